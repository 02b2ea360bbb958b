"""The host's agent: it takes commands, answers each once, and watches the engines that it owns.

`run` is the lifetime of everything here: the ingress, the samplers, one watch per engine. When it ends
the engines go on; the next agent finds them in its journal, recognises them by identity and watches
them again. A command's effect runs in the agent's own task, so a caller that gives up or asks twice
changes nothing: the same id joins the command in progress, or replays its recorded result.
What the commands do is beside it: `launching` starts and ends engines, `parking` moves their memory,
`looks` answers questions, `reports` tells unasked.
Source: lifecycle 14, 17, 18.3, 19; api 7.6-7.9.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs
import trio

from capyctl.clock import now_ms
from capyctl.downloads.shared import Downloads
from capyctl.errors import CapyError, Failure, Lost, Refusal
from capyctl.fsm.types import HostId, Incarnation, Role
from capyctl.host import identity, process
from capyctl.host.adapter import Checkpoints, EngineRegistry
from capyctl.host.custody import Custody, in_thread, observe
from capyctl.host.devices import Observer
from capyctl.host.engine import Engine
from capyctl.host.ingress import Ingress
from capyctl.host.journal import Journal, digest_of
from capyctl.host.launch import Launcher
from capyctl.host.launching import Launching
from capyctl.host.looks import Looks
from capyctl.host.materials import Materials
from capyctl.host.parking import Parking
from capyctl.host.ports import PortLeases
from capyctl.host.reports import Reports
from capyctl.ledger.types import HostPolicy
from capyctl.session import messages as m

_log = logging.getLogger("capyctl.host.agent")


@attrs.define(eq=False)
class _Running:
    """A command whose effect is in progress; whoever sends it again waits here."""

    digest: str
    done: trio.Event = attrs.field(factory=trio.Event)
    result: m.Result | None = None


@attrs.define(eq=False)
class HostAgent:
    """Everything that runs on one machine. `reports` is for the server's end, and bounded: see `reports.Reports`."""

    host: HostId
    name: str
    policy: HostPolicy
    memory_source: str
    state_dir: Path
    models_root: Path
    registry: EngineRegistry
    checkpoints: Checkpoints
    journal: Journal
    ingress: Ingress
    observer: Observer
    ports: PortLeases = attrs.field(factory=PortLeases)
    lifecycle_activation: str = "on_demand"
    grace_s: float = process.GRACE_S
    kill_s: float = process.KILL_S
    downloads: Downloads | None = None
    reports: trio.MemoryReceiveChannel[m.Report] = attrs.field(init=False)
    _custody: Custody = attrs.field(init=False)
    _news: Reports = attrs.field(init=False)
    _launcher: Launcher = attrs.field(init=False)
    _parking: Parking = attrs.field(init=False)
    _launching: Launching = attrs.field(init=False)
    _looks: Looks = attrs.field(init=False)
    _materials: Materials = attrs.field(init=False)
    _running: dict[str, _Running] = attrs.field(init=False, factory=dict)
    _nursery: trio.Nursery | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        custody = self._custody = Custody(self.journal, self.ports, self.ingress, self.kill_s)
        self.ingress.runs = self._runs
        self._news = Reports(
            host=self.host,
            custody=custody,
            ingress=self.ingress,
            observer=self.observer,
            grace_s=self.grace_s,
        )
        self.reports = self._news.channel
        self._launcher = Launcher(
            state_dir=self.state_dir,
            models_root=self.models_root,
            policy=self.policy,
            registry=self.registry,
            checkpoints=self.checkpoints,
            journal=self.journal,
            ingress=self.ingress,
            observer=self.observer,
            ports=self.ports,
            owners=custody.owners,
        )
        self._parking = Parking(
            journal=self.journal,
            custody=custody,
            ingress=self.ingress,
            observer=self.observer,
            checkpoints=self.checkpoints,
            policy=self.policy,
            owners=custody.owners,
        )
        self._launching = Launching(
            journal=self.journal,
            custody=custody,
            launcher=self._launcher,
            parking=self._parking,
            ingress=self.ingress,
            observer=self.observer,
            tell=self._news.tell,
            adopt=self._adopt,
            watch=self._watch,
            tell_domains=self._news.tell_domains,
            grace_s=self.grace_s,
        )
        self._materials = Materials(downloads=self.downloads, journal=self.journal, say=self._news.sample)
        self._looks = Looks(
            state_dir=self.state_dir,
            journal=self.journal,
            custody=custody,
            checkpoints=self.checkpoints,
            launcher=self._launcher,
            launching=self._launching,
            parking=self._parking,
            ingress=self.ingress,
            watch=self._watch,
            say=self._news.sample,
        )

    # --- lifetime --------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Find the engines of before, then serve until cancelled. Started once they are all known."""
        try:
            identity.become_subreaper()
        except OSError as error:  # a sandbox may forbid it: orphans then go to PID 1, and proofs do not lean on it
            _log.warning("subreaper.refused", extra={"fields": {"why": str(error)}})
        async with trio.open_nursery() as self._nursery:
            try:
                await self._nursery.start(self.ingress.run)
                await self._nursery.start(self._custody.arrivals.run)
                await self._recover()
                self._nursery.start_soon(self.observer.run)
                self._nursery.start_soon(self._news.sample_domains)
                task_status.started()
                await trio.sleep_forever()
            finally:
                nursery, self._nursery = self._nursery, None
                nursery.cancel_scope.cancel()

    async def _recover(self) -> None:
        """Look at every launch of the journal: alive is watched again, gone is recorded, nothing is signalled."""
        for record in await self.journal.launches():
            self.ports.restore(record.port, record.incarnation)
            gone = await observe(record.incarnation, record.processes)
            if not isinstance(gone, str):
                # Without an identity the gate never opened; with one, all that was recorded is absent.
                await self._custody.release(record.incarnation)
                if record.processes:
                    self._spawn_task(self._news.ended_unseen, record)
                continue
            try:
                engine = self._launcher.engine(record)
            except CapyError as error:
                # Its profile was removed: nobody can ask it anything; Terminate still works from the record.
                fields = {"launch": str(record.incarnation), "why": error.message}
                _log.warning("engine.unknown_profile", extra={"fields": fields})
                continue
            self._adopt(engine)
            if engine.answers and await in_thread(engine.owns_its_port) and not await self._custody.exposed(engine):
                self._custody.admit(engine)
        for command in await self.journal.unfinished():
            self._begin(command)

    def _adopt(self, engine: Engine) -> None:
        self._custody.engines[engine.incarnation] = engine
        self._spawn_task(self._news.follow, engine)
        if engine.record.writer is not None:
            self._spawn_task(identity.wait_gone, engine.record.writer)  # reaps it when it ends
        self._watch(engine)

    def _watch(self, engine: Engine) -> None:
        """Watch those of its processes whose exit ends it, and that nobody watches yet."""
        for one in engine.processes:
            if one.role is not Role.HELPER and one not in engine.watched:
                engine.watched.add(one)
                self._spawn_task(engine.watch, one)

    def _spawn_task(self, work: Callable[..., Awaitable[object]], *args: object) -> None:
        if self._nursery is None:
            raise Failure("unavailable", "this host's agent is not running")
        self._nursery.start_soon(work, *args)

    def _runs(self, incarnation: Incarnation) -> bool:
        engine = self._custody.engines.get(incarnation)
        if engine is None or engine.ended.is_set():
            return False
        return identity.presence(engine.api) is not identity.Presence.GONE

    # --- commands ----------------------------------------------------------------------------------------

    async def handle(self, command: m.Command) -> m.Result:
        """Perform a command once and answer it. Cancelling the call cancels only the waiting for the answer."""
        try:
            match command:
                case m.Inspect():
                    return self._inventory(command)
                case m.AwaitIdle():
                    return await self._looks.await_idle(command)
                case m.Probe():
                    return await self._looks.probe(command)
                case m.CloseIngress():
                    self.ingress.close(command.incarnation)
                    return m.Done(command_id=command.command_id)
                case m.DigestCheckpoint():
                    return await self._looks.digest(command)
                case m.MaterializeSource():
                    return await self._materials.materialize(command)
                case m.PruneSources():
                    return await self._materials.prune(command)
                case m.StopMaterializing():
                    return self._materials.stop(command)
                case m.ReadLoad():
                    engine = self._custody.engines.get(command.incarnation)
                    if engine is not None:
                        engine.read_now.set()
                    return m.Done(command_id=command.command_id)
                case m.ReadMemory():
                    self._news.look_now()
                    return m.Done(command_id=command.command_id)
                case m.PruneLogs():
                    return await self._looks.prune_logs(command)
                case m.VerifyStart():
                    return await self._looks.verify(command)
                case m.Abort():
                    return await self._looks.abort(command)
                case m.Launch() | m.Terminate() | m.Release() | m.Restore():
                    return await self._once(command)
                case _:
                    return _refused(command, Refusal("unsupported", f"this host knows no {type(command).__name__}"))
        except CapyError as error:
            return _refused(command, error)

    async def _once(self, command: m.Command) -> m.Result:
        running = self._running.get(command.command_id)
        if running is None:
            recorded = await self.journal.recall(command)
            if recorded is not None:
                return recorded
            running = self._begin(command)
        if running.digest != digest_of(command):
            raise Refusal("idempotency_conflict", f"command {command.command_id} is being used for something else")
        await running.done.wait()
        assert running.result is not None
        return running.result

    def _begin(self, command: m.Command) -> _Running:
        running = self._running.get(command.command_id)
        if running is None:
            running = self._running[command.command_id] = _Running(digest_of(command))
            try:
                self._spawn_task(self._perform, command, running)
            except BaseException:
                del self._running[command.command_id]
                raise
        return running

    async def _perform(self, command: m.Command, running: _Running) -> None:
        """The one task of a command with an effect. What was proven is recorded; an end that nobody knows of is
        tried again, and a step of an engine's memory never is.
        """
        running.result = m.Unresolved(command_id=command.command_id, reason="the host's agent was interrupted")
        try:
            running.result = await self._effect(command)
            repeats = isinstance(command, (m.Launch, m.Terminate))
            if not (isinstance(running.result, m.Refused) or (repeats and isinstance(running.result, m.Unresolved))):
                await self.journal.finish(command, running.result, now_ms())
        except Lost as error:  # the journal cannot be written: what was done is done, and on no record
            running.result = m.Unresolved(command_id=command.command_id, reason=error.message)
        except CapyError as error:
            running.result = _refused(command, error)
        except Exception as error:  # a bug of ours must not end the watch over every other engine
            _log.exception("command.broke", extra={"fields": {"command": command.command_id}})
            reason = f"{type(error).__name__} in the host's agent"
            running.result = m.Unresolved(command_id=command.command_id, reason=reason)
        finally:
            running.done.set()
            del self._running[command.command_id]

    async def _effect(self, command: m.Command) -> m.Result:
        match command:
            case m.Launch():
                return await self._launching.launch(command)
            case m.Terminate():
                return await self._launching.terminate(command)
            case m.Release():
                return await self._parking.release(command)
            case m.Restore():
                return await self._parking.restore(command)
            case _:
                raise Refusal("unsupported", f"{type(command).__name__} has no effect to perform")

    # --- what this host is -----------------------------------------------------------------------------------

    def _inventory(self, command: m.Inspect) -> m.Inventory:
        return m.Inventory(
            command_id=command.command_id,
            host=self.host,
            name=self.name,
            boot_id=identity.boot_id(),
            policy=self.policy,
            profiles=self.profiles(),
            owned=tuple(self._custody.engines),
            models_root=str(self.models_root),
            downloads_root=self._materials.root,
            lifecycle_activation=self.lifecycle_activation,
            memory_source=self.memory_source,
        )

    def profiles(self) -> tuple[m.Profile, ...]:
        """The registered installations, as session values."""
        return tuple(
            m.Profile(
                name=p.name,
                engine=p.engine,
                version=p.version,
                custom=p.custom,
                deep_park=p.deep_park,
                executable=p.executable,
                fingerprint=p.fingerprint,
                source=p.source,
                revision=p.revision,
            )
            for p in self.registry.profiles()
        )

    def announce_profiles(self) -> None:
        """Tell the server the merged profiles, after `engine add` or `engine remove`."""
        changed = m.ProfilesChanged(seen_at_ms=now_ms(), host=self.host, profiles=self.profiles())
        self._spawn_task(self._news.tell, changed)


def _refused(command: m.Command, error: CapyError) -> m.Refused:
    return m.Refused(command_id=command.command_id, code=error.code, message=error.message)
