"""The standalone role: server and host in one process, over a memory channel.

Lifetimes nest. The store outlives the host's agent, which outlives the driver, which outlives the
listeners: whoever ends can still record what became of it. Engines are in none of these lifetimes: they go
on, and the next start finds them in the host's journal.

At a start nothing is assumed from before. The world is loaded from its rows, every order without an outcome
is lost, every engine is looked at again, and only then the role says that it is ready.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import trio

from capyctl import clock as clocks
from capyctl import router, ulid
from capyctl.control import events, views
from capyctl.control.book import Settings
from capyctl.control.records import RECORDS
from capyctl.control.traffic import QueueLimits
from capyctl.control.world import World
from capyctl.documents import places, standalone
from capyctl.documents.places import Credentials
from capyctl.documents.scalars import SocketAddress
from capyctl.documents.settings import StandaloneSettings
from capyctl.errors import CapyError, Failure, Refusal
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
from capyctl.host.journal import JOURNAL_FILE
from capyctl.host.orphans import engines_below
from capyctl.ledger.shortfall import Shortfall
from capyctl.roles import descriptors
from capyctl.roles.machine import Machine, look_at_model, machine
from capyctl.roles.ready import Ready, announce, say_left, tell_service_manager, warn_open
from capyctl.roles.reshaped import Reshaped, check_cards, check_limits
from capyctl.roles.strays import ignore_strays
from capyctl.server import log as logging
from capyctl.server.control_socket import ControlSocket
from capyctl.server.deploy import Allowed
from capyctl.server.desk import Desk
from capyctl.server.driver import Driver
from capyctl.server.hosts import HostLinks, installations, listener
from capyctl.server.keys import KeyRing
from capyctl.server.listener import serve_management
from capyctl.server.lock import held
from capyctl.server.management import build_management
from capyctl.server.preview import Site
from capyctl.server.services import RoleFacts, Services
from capyctl.server.store import STORE_FILE, Store
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
        raise _first(group) from group
    return 0


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the role, taken out of the nurseries around it: ours first."""
    ours, rest = group.split(CapyError)
    inner = (ours or rest or group).exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _prepared(settings: StandaloneSettings) -> Path:
    """The state root, checked; the lock's place in it."""
    root = settings.places.root
    places.keep_private(root)
    if (wrong := places.unsafe(root)) is not None:
        raise Refusal("unsafe_file", f"the state directory cannot be used: {wrong}")
    return Path(root) / LOCK_FILE


def _served_before(store: str, journal: str) -> bool:
    """Whether this state directory has a store. Raises: Refusal `unreconciled` when it had one and lost it.

    A role opens its store before its host's journal, so a journal without a store is no first start: engines may
    run that an empty store would let others be started beside.
    """
    if os.path.exists(journal) and not (os.path.exists(store) and os.path.getsize(store)):
        raise Refusal(
            "unreconciled",
            f"the store {store} is missing or empty, but this state directory has served. Restore it; or, to begin "
            f"anew, end the engines that still run and remove {journal}",
        )
    return os.path.exists(store)


def _check_nobody_runs(host: Path) -> None:
    """Refuse a first start beside engines of a state that was removed. Raises: Refusal `unreconciled`."""
    left = engines_below(host)
    if left:
        raise Refusal(
            "unreconciled",
            f"engines of an earlier state at {host} still run, and nothing is known here of them and their memory: "
            f"{', '.join(f'pid {pid}' for pid in left[:16])}. End them with kill, and start again",
        )


def _first_start(settings: StandaloneSettings) -> Credentials:
    """Everything that a first start writes; a later one finds it. The lock is held."""
    where = settings.places
    for directory in (where.run, where.server, where.host):
        places.keep_private(directory)
    if settings.generated:
        places.make_private(os.path.dirname(settings.document_path))
        places.write_new(settings.document_path, standalone.GENERATED)
    served_before = _served_before(os.path.join(where.server, STORE_FILE), os.path.join(where.host, JOURNAL_FILE))
    if not served_before:
        _check_nobody_runs(Path(where.host))
    credentials = places.establish_credentials(where, served_before=served_before)
    try:
        os.makedirs(settings.models_dir, mode=0o755, exist_ok=True)
    except OSError as wrong:
        why = "it is no directory" if isinstance(wrong, FileExistsError) else wrong.strerror
        raise Refusal(
            "invalid_config", f"the models directory {settings.models_dir}: {why}. Name another with --models-root"
        ) from None
    return credentials


# --- wiring ----------------------------------------------------------------------------------------


@attrs.define(eq=False)
class _Stopping:
    """`asked` at the first signal, `hurry` at the second.

    `asked` and `alone` when a part failed without which nothing new may begin: what engines are answering needs
    neither the store nor the driver, and is finished within the time that a stop gives it.
    """

    asked: trio.Event = attrs.field(factory=trio.Event)
    hurry: trio.Event = attrs.field(factory=trio.Event)
    alone: trio.Event = attrs.field(factory=trio.Event)
    failed: CapyError | None = None

    async def unless_it_fails(
        self, work: Callable[..., Awaitable[None]], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the store or the driver. Its failure ends the role in order: whoever waits for an answer gets one."""
        try:
            await work(task_status=task_status)
        except* CapyError as group:
            wrong = _first(group)
            assert isinstance(wrong, CapyError)
            if self.failed is None:
                self.failed = wrong
                log.error("role.failed", code=wrong.code, reason=wrong.message)
            self.asked.set()
            self.alone.set()

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup, and meant to be
            numbers.append(signal.SIGHUP)  # its terminal closed: what it answers is finished all the same
        with trio.open_signal_receiver(*numbers) as signals:
            task_status.started()
            async for number in signals:
                log.info("role.stopping", signal=signal.Signals(number).name, again=self.asked.is_set())
                (self.hurry if self.asked.is_set() else self.asked).set()


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
    stopping = _Stopping()
    credentials = _first_start(settings)
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
        facts=partial(here.checkpoints.facts_here, downloads=downloads),
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
    stopping: _Stopping,
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
                ready = await _open_doors(doors, settings, stopping, services, here, form)
                await _first_look(services, stopping)
                for text in (text for row in views.hosts(services.world) for text in row["memory_warnings"]):
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


async def _leave(services: Services, stopping: _Stopping, host: HostId, short: Shortfall) -> None:
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


async def _first_look(services: Services, stopping: _Stopping) -> None:
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


async def _open_doors(
    doors: trio.Nursery,
    settings: StandaloneSettings,
    stopping: _Stopping,
    services: Services,
    here: Machine,
    form: str,
) -> Ready:
    """Bind and serve both listeners; what the banner says of them."""
    listeners = settings.document.server.listeners
    inference, management = listeners.inference, listeners.management
    if inference.authentication == "none" and not inference.bind.loopback:
        warn_open(str(inference.bind), form)
    bound: str = await doors.start(partial(_serve_inference, inference.bind, settings, stopping, services, here))
    admin: str = await doors.start(
        partial(
            serve_management,
            build_management(services),
            management.bind.host,
            management.bind.port,
            stopping=stopping.asked,
        )
    )
    services.facts = RoleFacts(
        role=ROLE,
        state_dir=settings.places.root,
        inference=bound,
        inference_auth=inference.authentication,
        management=admin,
        document=settings.document_path,
        rows=settings.rows,
    )
    return Ready(
        role=ROLE,
        inference=bound,
        key_required=inference.authentication != "none",
        management=admin,
        engines=[profile.name for profile in here.registry.profiles()],
        state=settings.places.root,
        credentials=settings.places.credentials,
    )


async def _serve_inference(
    bind: SocketAddress,
    settings: StandaloneSettings,
    stopping: _Stopping,
    services: Services,
    here: Machine,
    *,
    task_status: trio.TaskStatus[str],
) -> None:
    """The inference listener, until what runs has ended."""
    server, queue = settings.document.server, settings.document.host.resource_policy.queue
    app = router.build_app(
        services.desk,
        here.ingress,
        services.keys,
        settings=router.Settings(
            buffered_bytes_max=queue.max_buffered_bytes_total.bytes,
            stream_idle_seconds=queue.stream_idle_timeout.ms / 1000,
            piece_bytes_max=server.relay.max_piece.bytes,
            origins=frozenset(server.listeners.inference.allowed_origins),
        ),
    )
    async with trio.open_nursery() as nursery:
        try:
            (address,) = await nursery.start(
                partial(
                    router.serve,
                    app,
                    str(bind),
                    stopping=stopping.asked,
                    hurry=stopping.hurry,
                    alone=stopping.alone,
                    drain_seconds=settings.document.shutdown.drain_timeout.ms / 1000,
                    connections_max=descriptors.for_clients(descriptors.raise_limit()),
                )
            )
        except CapyError as error:
            if error.code == "port_conflict":  # that code is an engine's port; this one ends the start
                raise Refusal(
                    "unavailable",
                    f"the inference listener cannot use {bind}: another program listens there; "
                    "end it, or name another address with --listen",
                ) from None
            raise
        task_status.started(address)
