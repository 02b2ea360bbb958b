"""The standalone role: server and host in one process, over a memory channel.

Lifetimes nest. The store outlives the host's agent, which outlives the driver, which outlives the
listeners: whoever ends can still record what became of it. Engines are in none of these lifetimes: they go
on, and the next start finds them in the host's journal.

At a start nothing is assumed from before. The world is loaded from its rows, every order without an outcome
is lost, every engine is looked at again, and only then the role says that it is ready.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import trio

from capyctl import clock as clocks
from capyctl import ulid
from capyctl.control import events, host_views, views
from capyctl.control.book import Settings
from capyctl.control.records import RECORDS
from capyctl.control.traffic import QueueLimits
from capyctl.control.world import World
from capyctl.documents import places
from capyctl.documents.places import Credentials
from capyctl.documents.settings import StandaloneSettings
from capyctl.errors import Failure, Refusal
from capyctl.fsm.types import (
    Activation,
    Bytes,
    HostId,
    Incarnation,
    Lane,
    Millis,
    OperationId,
    RequestId,
    SwitchId,
)
from capyctl.host import logs
from capyctl.ledger.shortfall import Shortfall
from capyctl.roles.doors import open_doors
from capyctl.roles.first_start import first_start
from capyctl.roles.machine import Machine, look_at_model, machine
from capyctl.roles.ready import announce, say_left, tell_service_manager
from capyctl.roles.reshaped import Reshaped, check_cards, check_limits
from capyctl.roles.stopping import Stopping, first_of
from capyctl.roles.strays import ignore_strays
from capyctl.server import log as logging
from capyctl.server.control_socket import ControlSocket
from capyctl.server.deploy import Allowed
from capyctl.server.desk import Desk
from capyctl.server.driver import Driver
from capyctl.server.hosts import HostLinks, installations, listener
from capyctl.server.keys import KeyRing
from capyctl.server.lock import held
from capyctl.server.preview import Site
from capyctl.server.services import Services
from capyctl.server.store import Store
from capyctl.session import messages
from capyctl.session.memory import MemoryLink

ROLE: Final = "standalone"
LOCK_FILE: Final = "role.lock"
LEAVE_LIMIT_S: Final = 180.0
"""How long engines of before may take to end on a machine that came back with other memory."""
RECOVERY_LIMIT_S: Final = 10.0
"""How long the role waits for its first look at engines of before; those that answer later open their gates later."""

log = logging.Log("role")


def run(settings: StandaloneSettings, *, format: str) -> int:
    """Run the role in the foreground until it is told to stop; its exit status.

    Args:
      format: `text` or `json`, of everything on stderr.
    Raises: CapyError when it cannot start, or when it must not go on.
    """
    logging.configure(format)
    os.umask(0o077)
    ignore_strays()
    try:
        with held(_prepared(settings), ROLE):
            trio.run(_run, settings, format)
    except BaseExceptionGroup as group:
        raise first_of(group) from group
    return 0


def _prepared(settings: StandaloneSettings) -> Path:
    """The state root, checked; the lock's place in it."""
    root = settings.places.root
    places.keep_private(root)
    if (wrong := places.unsafe(root)) is not None:
        raise Refusal("unsafe_file", f"the state directory cannot be used: {wrong}")
    return Path(root) / LOCK_FILE


# --- wiring ----------------------------------------------------------------------------------------


async def _run(settings: StandaloneSettings, form: str) -> None:
    """The role, or what has to end before it: a life of its own, so that being killed in it changes nothing."""
    try:
        await _role(settings, form)
    except Reshaped as changed:
        log.warning("role.reshaped", why=changed.short.message())
        if await _role(settings, form, leaving=changed.short):
            await _role(settings, form)


async def _role(settings: StandaloneSettings, form: str, *, leaving: Shortfall | None = None) -> bool:
    """Serve until told to stop. `leaving`: under the limits of before, only to end what is charged; no door opens.

    Returns: whether it ended by itself. Raises: Reshaped before anything is begun.
    """
    stopping = Stopping()
    credentials = first_start(settings)
    clock = clocks.now_ms
    store = Store(Path(settings.places.server), RECORDS)
    try:
        world = World.load(store.load(), now_ms=clock(), settings=world_settings(settings))
        links = HostLinks(world.book, clock)
        driver = Driver(world, store, links, clock)
        desk = Desk(
            book=world.book,
            clock=clock,
            queued=partial(views.waiting, world),
            record=store.finished,
            feed=driver.feed,
        )
        driver.gates = desk
        ended = partial(_upstream_ended, desk)
        async with machine(settings, ended, world.book.ledger, as_before=leaving is not None) as here:
            check_limits(world, here.agent.policy)
            if leaving is None:
                await check_cards(world.book.ledger, here)
            async with trio.open_nursery() as outer:
                await outer.start(stopping.watch)
                await outer.start(stopping.unless_it_fails, store.run)
                services = _services(settings, credentials, driver, world, store, desk, links, here, clock)
                await _serve(settings, form, stopping, services, here, leaving)
                outer.cancel_scope.cancel()
    finally:
        store.close()
    if stopping.failed is not None:
        raise stopping.failed
    log.info("role.stopped" if leaving is None else "role.emptied")
    return not stopping.asked.is_set()


def _upstream_ended(desk: Desk, request: RequestId, half_closed_at_ms: Millis, eof_at_ms: Millis) -> None:
    desk.upstream_ended(request, half_closed_at_ms, eof_at_ms)


def world_settings(settings: StandaloneSettings) -> Settings:
    """What the document decides for control."""
    server, queue = settings.document.server, settings.document.host.resource_policy.queue
    idle = server.lifecycle_defaults
    return Settings(
        queue=QueueLimits(
            pending_per_deployment=queue.max_pending_per_deployment,
            pending_total=queue.max_pending_total,
            buffered_bytes=Bytes(queue.max_buffered_bytes_total.bytes),
        ),
        admission_window_ms=Millis(queue.admission_window.ms),
        request_deadline_ms=Millis(queue.request_deadline.ms),
        drain_timeout_ms=Millis(server.switching.drain_timeout.ms),
        ready_idle_ms=None if idle.ready_idle_timeout is None else Millis(idle.ready_idle_timeout.ms),
        parked_idle_ms=None if idle.parked_idle_timeout is None else Millis(idle.parked_idle_timeout.ms),
    )


def _services(
    settings: StandaloneSettings,
    credentials: Credentials,
    driver: Driver,
    world: World,
    store: Store,
    desk: Desk,
    links: HostLinks,
    here: Machine,
    clock: clocks.Clock,
) -> Services:
    inference = settings.document.server.listeners.inference
    allowed = Allowed(
        host=here.agent.host,
        name=here.agent.name,
        activation=Activation(settings.document.host.lifecycle.activation),
        policy=here.agent.policy,
    )

    deadline_ms = Millis(settings.document.host.resource_policy.queue.request_deadline.ms)
    downloads = str(settings.document.host.model_sources.path or settings.models_dir)
    site = Site(
        allowed=allowed,
        policy=here.agent.policy,
        profiles=here.registry,
        request_deadline_ms=deadline_ms,
        facts=partial(here.checkpoints.facts_here, downloads=downloads, check=here.downloads.fetcher.check),
        source="this machine",
    )

    async def log_tail(lane: Lane, kib: int) -> str:
        generation = world.book.instances[lane].machine.run.generation
        record = None if generation is None else await here.journal.launch(Incarnation(lane, generation))
        if record is None:
            raise FileNotFoundError(str(lane))
        return await trio.to_thread.run_sync(logs.tail, Path(record.log_path), kib)

    return Services(
        driver=driver,
        world=world,
        store=store,
        desk=desk,
        links=links,
        registry=here.registry,
        keys=KeyRing(credentials.api_key, credentials.admin_token, store, open=inference.authentication == "none"),
        host=here.agent.host,
        allowed=[allowed],
        admin_token=credentials.admin_token,
        clock=clock,
        request_deadline_ms=deadline_ms,
        log_tail=log_tail,
        announce_profiles=here.agent.announce_profiles,
        look_at_model=partial(look_at_model, here.checkpoints, site),
    )


# --- the life of the role ----------------------------------------------------------------------------


async def _serve(
    settings: StandaloneSettings,
    form: str,
    stopping: Stopping,
    services: Services,
    here: Machine,
    leaving: Shortfall | None = None,
) -> None:
    driver, links = services.driver, services.links
    async with trio.open_nursery() as hosts:
        await hosts.start(here.agent.run)
        link = MemoryLink(here.agent)
        inbox = _Inbox(listener(links, driver.feed))
        await hosts.start(link.run, inbox.hear)
        links.links[here.agent.host] = link
        async with trio.open_nursery() as effects:
            await effects.start(stopping.unless_it_fails, driver.run)
            links.downloads[here.agent.host] = str(here.agent.downloads.root) if here.agent.downloads else None
            await _begin(services, link, here.agent.host)
            inbox.open()
            if leaving is not None:
                await _leave(services, stopping, here.agent.host, leaving)
                driver.close()
                effects.cancel_scope.cancel()
                hosts.cancel_scope.cancel()
                return
            if services.world.book.hosts[here.agent.host].draining:  # by a role that ended in the midst of a drain
                await _drain(services, here.agent.host, undrain=True)
            await effects.start(ControlSocket(Path(settings.places.control_socket), services).serve)
            async with trio.open_nursery() as doors:
                ready = await open_doors(doors, ROLE, settings, stopping, services, here, form)
                await _first_look(services, stopping)
                for text in (text for row in host_views.hosts(services.world) for text in row["memory_warnings"]):
                    log.warning("memory.short", why=text)
                if not stopping.asked.is_set():
                    places.replace(settings.places.management_address, f"{ready.management}\n")
                    announce(ready, form)
                    tell_service_manager("READY=1")
                await stopping.asked.wait()
                tell_service_manager("STOPPING=1")
                services.desk.accepting = False
            # Both listeners have ended: what was running finished, or was cut within its grace.
            say_left(sum(row.has_launch for row in services.world.book.instances.values()), form)
            driver.close()
            effects.cancel_scope.cancel()
        _forget_address(settings.places.management_address)
        hosts.cancel_scope.cancel()


@attrs.define(eq=False)
class _Inbox:
    """Keeps a host's news back until the world knows that a new session began."""

    _deliver: Callable[[messages.Report], None]
    _kept: list[messages.Report] | None = attrs.field(factory=list)

    def hear(self, report: messages.Report) -> None:
        if self._kept is None:
            self._deliver(report)
        else:
            self._kept.append(report)

    def open(self) -> None:
        kept, self._kept = self._kept or [], None
        for report in kept:
            self._deliver(report)


async def _begin(services: Services, link: MemoryLink, host: HostId) -> None:
    """A new controller session over the stored world, then the host's session."""
    driver, now_ms = services.driver, services.clock
    session = services.world.book.session + 1
    driver.feed(events.ControllerStarted(session=session, now_ms=now_ms()))
    found = await link.call(messages.Inspect(command_id=f"inspect:{session}"))
    if not isinstance(found, messages.Inventory):
        raise Failure("internal", f"the host {host} does not say what it has")
    driver.feed(
        events.HostOnline(
            policy=found.policy,
            boot_id=found.boot_id,
            installations=installations(found.profiles),
            now_ms=now_ms(),
        )
    )


async def _leave(services: Services, stopping: Stopping, host: HostId, short: Shortfall) -> None:
    """Stop what is charged on memory that is no more, with proof; its deployments start again on the new machine.

    Raises: Refusal `device_policy_mismatch` when something is still charged at the end of the limit.
    """
    book = services.world.book
    await _drain(services, host)

    async def ends(scope: trio.CancelScope) -> None:
        await stopping.asked.wait()
        scope.cancel()

    with trio.move_on_after(LEAVE_LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends, nursery.cancel_scope)
            while any(book.ledger.on(host)):
                await services.driver.moved()
            nursery.cancel_scope.cancel()
    if any(book.ledger.on(host)) and not stopping.asked.is_set():
        raise Refusal(
            short.code,
            f"{short.message()} Its stop was not proven within {LEAVE_LIMIT_S:.0f} s: end it by hand, or bring back "
            "what the machine had, and start again",
        )


async def _drain(services: Services, host: HostId, *, undrain: bool = False) -> None:
    command = events.Command(
        key=f"reshaped {ulid.fresh()}",
        digest="",
        operation=OperationId(ulid.fresh()),
        switch=SwitchId(ulid.fresh()),
    )
    asked = events.DrainAsked(command=command, host=host, undrain=undrain, now_ms=services.clock())
    await services.driver.submit(asked)


async def _first_look(services: Services, stopping: Stopping) -> None:
    """Wait until engines of before were looked at, for a while, or until the role is told to stop."""

    async def ends(scope: trio.CancelScope) -> None:
        await stopping.asked.wait()
        scope.cancel()

    with trio.move_on_after(RECOVERY_LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends, nursery.cancel_scope)
            await services.driver.rested()
            nursery.cancel_scope.cancel()


def _forget_address(path: str) -> None:
    """Nobody answers there any more; a role that was killed leaves it, and its client says where it asked."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass  # it was stopped before it was ready
