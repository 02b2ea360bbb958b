"""The host's agent: it takes commands, answers each once, and tells unasked what happens to its engines.

`run` is the lifetime of everything here: the ingress, the samplers, one watch per engine. When it ends
the engines go on; the next agent finds them in its journal, recognises them by identity and watches
them again. A command's effect runs in the agent's own task, so a caller that gives up or asks twice
changes nothing: the same id joins the command in progress, or replays its recorded result.
Source: lifecycle 14, 17, 18.3, 19; api 7.6-7.9.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs
import trio

from capyctl.clock import now_ms
from capyctl.errors import CapyError, Failure, Lost, Refusal
from capyctl.fsm.proofs import Aborted, NeverLaunched, Usable
from capyctl.fsm.types import Bytes, Domain, HostId, Incarnation, ProcessIdentity, Role
from capyctl.host import identity, logs, process
from capyctl.host.adapter import Checkpoints, EngineRegistry
from capyctl.host.custody import Custody, in_thread, observe
from capyctl.host.devices import Observer, Owners
from capyctl.host.engine import LOAD_EVERY_S, Engine
from capyctl.host.ingress import Ingress
from capyctl.host.journal import Journal, LaunchRecord, Memory, digest_of
from capyctl.host.launch import FILES_LIMITER, TRANSIENT, Launcher, SpawnFailed
from capyctl.host.parking import Parking
from capyctl.host.ports import PortLeases, taken
from capyctl.ledger.types import HostPolicy
from capyctl.session import messages as m

REPORTS_MAX = 256
DOMAINS_EVERY_S = 1.0
A_MOMENT_S = 0.002  # times are told in milliseconds, and the look is to be newer than what it was asked for
PEAK_EVERY_S = 0.2
OVERSEE_STARTING_S = 2.0
OVERSEE_S = 15.0  # between two looks at what a running engine listens on and which shared memory it made
PEAKS_PER_GROUP = 5  # between two looks at who joined the engine's group: each reads all of /proc
IDLE_POLL_S = 0.5
HUNG_GRACE_S = 3.0  # between SIGTERM and SIGKILL of an engine that does nothing any more
REASON_CHARS = 4_000
ENDED_UNSEEN = "the engine ended while the host was not running"
_log = logging.getLogger("capyctl.host.agent")


@attrs.define(eq=False)
class _Running:
    """A command whose effect is in progress; whoever sends it again waits here."""

    digest: str
    done: trio.Event = attrs.field(factory=trio.Event)
    result: m.Result | None = None


@attrs.define(eq=False)
class _Preparing:
    """A launch that has spawned nothing yet; a Terminate calls it off."""

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    over: trio.Event = attrs.field(factory=trio.Event)


@attrs.define(eq=False)
class HostAgent:
    """Everything that runs on one machine. `reports` is for the server's end; it is bounded.

    Samples (LoadReport, Domains) are dropped when nobody reads, since newer ones follow; Spawned and
    MemberExit wait.
    """

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
    reports: trio.MemoryReceiveChannel[m.Report] = attrs.field(init=False)
    dropped_reports: int = attrs.field(init=False, default=0)
    _send: trio.MemorySendChannel[m.Report] = attrs.field(init=False)
    _launcher: Launcher = attrs.field(init=False)
    _custody: Custody = attrs.field(init=False)
    _parking: Parking = attrs.field(init=False)
    _running: dict[str, _Running] = attrs.field(init=False, factory=dict)
    _preparing: dict[Incarnation, _Preparing] = attrs.field(init=False, factory=dict)
    _nursery: trio.Nursery | None = attrs.field(init=False, default=None)
    _look_now: trio.Event = attrs.field(init=False, factory=trio.Event)  # somebody waits for a look at the memory

    def __attrs_post_init__(self) -> None:
        self._send, self.reports = trio.open_memory_channel[m.Report](REPORTS_MAX)
        self._custody = Custody(self.journal, self.ports, self.ingress, self.kill_s)
        self.ingress.runs = self._runs
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
            owners=self._owners,
        )
        self._parking = Parking(
            journal=self.journal,
            custody=self._custody,
            ingress=self.ingress,
            observer=self.observer,
            checkpoints=self.checkpoints,
            policy=self.policy,
            owners=self._owners,
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
                await self._recover()
                self._nursery.start_soon(self.observer.run)
                self._nursery.start_soon(self._report_domains)
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
                    exit_report = _exit_report(record.incarnation, record.processes[0], None, ENDED_UNSEEN, unseen=True)
                    self._spawn_task(self._send.send, exit_report)
                continue
            try:
                engine = self._launcher.engine(record)
            except CapyError as error:
                # Its profile was removed: nobody can ask it anything; Terminate still works from the record.
                fields = {"launch": str(record.incarnation), "why": error.message}
                _log.warning("engine.unknown_profile", extra={"fields": fields})
                continue
            self._adopt(engine)
            if engine.answers and await in_thread(engine.owns_its_port):
                self.ingress.admit(engine.incarnation, record.port, record.key)
        for command in await self.journal.unfinished():
            self._begin(command)

    def _adopt(self, engine: Engine) -> None:
        self._custody.engines[engine.incarnation] = engine
        self._spawn_task(self._follow, engine)
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
                    return await self._await_idle(command)
                case m.Probe():
                    return await self._probe(command)
                case m.CloseIngress():
                    self.ingress.close(command.incarnation)
                    return m.Done(command_id=command.command_id)
                case m.DigestCheckpoint():
                    return await self._digest(command)
                case m.ReadLoad():
                    engine = self._custody.engines.get(command.incarnation)
                    if engine is not None:
                        engine.read_now.set()
                    return m.Done(command_id=command.command_id)
                case m.ReadMemory():
                    self._look_now.set()
                    return m.Done(command_id=command.command_id)
                case m.PruneLogs():
                    return await self._prune_logs(command)
                case m.VerifyStart():
                    await self._launcher.verify(command)
                    return m.Done(command_id=command.command_id)
                case m.Abort():
                    return await self._abort(command)
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
                return await self._launch(command)
            case m.Terminate():
                return await self._terminate(command)
            case m.Release():
                return await self._parking.release(command)
            case m.Restore():
                return await self._parking.restore(command)
            case _:
                raise Refusal("unsupported", f"{type(command).__name__} has no effect to perform")

    # --- launch ------------------------------------------------------------------------------------------

    async def _launch(self, command: m.Launch) -> m.Result:
        record = await self.journal.launch(command.incarnation)
        if record is not None:
            if record.command.command_id != command.command_id:
                raise Refusal("lifecycle_conflict", f"{command.incarnation} was already launched by another command")
            return await self._resume(command, record)
        preparing = self._preparing[command.incarnation] = _Preparing()
        try:
            with preparing.scope:
                try:
                    prepared = await self._launcher.prepare(command)
                except CapyError as error:
                    return await self._never(command, error)
            if preparing.scope.cancelled_caught:
                return await self._never(command, Refusal("lifecycle_conflict", "stopped before it was spawned"))
            try:
                engine = await self._launcher.spawn(command, prepared)
            except SpawnFailed as failed:
                failed.engine.launching = True
                self._adopt(failed.engine)
                return await self._clean_up(command, failed.engine, failed.error)
            except CapyError as error:
                return await self._never(command, error)
            engine.launching = True
            self._adopt(engine)
        finally:
            preparing.over.set()
            self._preparing.pop(command.incarnation, None)
        await self._send.send(
            m.Spawned(
                seen_at_ms=now_ms(),
                incarnation=command.incarnation,
                token=command.token,
                processes=engine.processes,
            )
        )
        return await self._make_ready(command, engine)

    async def _resume(self, command: m.Launch, record: LaunchRecord) -> m.Result:
        """The same launch asked for again after a restart: go on where it stands, never spawn again."""
        engine = self._custody.engines.get(command.incarnation)
        if engine is not None:
            engine.launching = True
            return await self._make_ready(command, engine)
        if not record.processes:
            return await self._never(command, Failure("launch_failed", "the host stopped before it was spawned"))
        return await self._absent_launch(command, record, ENDED_UNSEEN)

    async def _make_ready(self, command: m.Launch, engine: Engine) -> m.Result:
        """Readiness, ended by the deadline or by the engine's exit, whichever is first."""
        outcome: Usable | CapyError | None = None
        peak: dict[Domain, Bytes] = {}

        async def sample(processes: tuple[ProcessIdentity, ...]) -> None:
            held = await self.observer.held(processes, anew=False)
            for domain, amount in held.bytes.items():
                peak[domain] = max(peak.get(domain, Bytes(0)), amount)

        async def sample_peak() -> None:
            while True:
                group = await in_thread(lambda: identity.with_roles(engine.api, engine.processes))
                for _ in range(PEAKS_PER_GROUP):
                    await sample(group)
                    await trio.sleep(PEAK_EVERY_S)

        async def look_around() -> None:
            while True:
                await trio.sleep(OVERSEE_STARTING_S)
                await self._custody.note_segments(engine.incarnation, engine.processes)

        async def stop_at_exit(scope: trio.CancelScope) -> None:
            await engine.ended.wait()
            scope.cancel()

        with trio.move_on_after(max(0.0, (command.deadline_ms - now_ms()) / 1000)) as window:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stop_at_exit, nursery.cancel_scope)
                nursery.start_soon(sample_peak)
                nursery.start_soon(look_around)
                outcome = await engine.become_ready()
                exposed = await self._custody.exposed(engine) if isinstance(outcome, Usable) else None
                if exposed is not None:
                    outcome = Failure("launch_failed", exposed)
                elif isinstance(outcome, Usable):
                    await self._parking.take_reference(engine)
                nursery.cancel_scope.cancel()
        if engine.ending:
            outcome = Refusal("lifecycle_conflict", "stopped while it was starting")
        elif engine.ended.is_set():
            outcome = Failure("launch_failed", f"{engine.story()} before it was ready")
        elif outcome is None and window.cancelled_caught:
            waited_s = (command.deadline_ms - engine.record.started_ms) / 1000
            outcome = Failure("activation_timeout", f"the engine was not ready within {waited_s:.0f} s")
        if not isinstance(outcome, Usable):
            outcome = outcome or Failure("launch_failed", "readiness gave no answer")
            return await self._clean_up(command, engine, outcome)
        await self._custody.record_group(engine)
        self._watch(engine)
        await sample(engine.processes)
        if engine.ended.is_set():  # from here on its end is news, and told by `_follow`
            return await self._clean_up(
                command, engine, Failure("launch_failed", f"{engine.story()} as it became ready")
            )
        engine.launching = False
        self.ingress.admit(engine.incarnation, engine.record.port, engine.record.key)
        return m.Launched(
            command_id=command.command_id,
            processes=engine.processes,
            usable=outcome,
            peak_bytes=peak,
            canary=engine.canary,
        )

    async def _clean_up(self, command: m.Launch, engine: Engine, error: CapyError) -> m.Result:
        """End what is left of a failed start; LaunchRefused only with the proof that nothing is."""
        engine.ending = True
        gone = await self._custody.end(engine.incarnation, engine.processes, self.grace_s)
        if isinstance(gone, str):
            return m.Unresolved(command_id=command.command_id, reason=f"{error.message}; then: {gone}")
        engine.ended.set()
        words = await engine.last_words()
        code, reason = error.code, error.message
        if code == "launch_failed":
            named = engine.adapter.failure(words)
            if named is not None:
                code, reason = named
            elif taken(engine.record.port):
                code, reason = "port_conflict", f"another program took port {engine.record.port}; {reason}"
        return m.LaunchRefused(
            command_id=command.command_id,
            code=code,
            reason=_with_words(reason, words),
            proof=gone,
            transient=code == "port_conflict",  # an exit before ready is no passing cause, whatever it says
        )

    async def _never(self, command: m.Launch, error: CapyError) -> m.Result:
        """Refused while no process existed: the handle is fenced, then P-NEVER is true."""
        await self.journal.fence(command.incarnation)
        await self._custody.release(command.incarnation)
        return m.LaunchRefused(
            command_id=command.command_id,
            code=error.code,
            reason=error.message,
            proof=NeverLaunched(incarnation=command.incarnation, fenced=True, observed_at_ms=now_ms()),
            transient=error.code in TRANSIENT,
        )

    async def _absent_launch(self, command: m.Launch, record: LaunchRecord, reason: str) -> m.Result:
        gone = await self._custody.end(command.incarnation, record.processes, self.grace_s)
        if isinstance(gone, str):
            return m.Unresolved(command_id=command.command_id, reason=gone)
        return m.LaunchRefused(
            command_id=command.command_id, code="launch_failed", reason=reason, proof=gone, transient=False
        )

    # --- terminate -----------------------------------------------------------------------------------------

    async def _terminate(self, command: m.Terminate) -> m.Result:
        """Close the upstreams, then SIGTERM, grace, SIGKILL, and the proof, or the reason why there is none."""
        incarnation = command.incarnation
        preparing = self._preparing.get(incarnation)
        if preparing is not None:
            preparing.scope.cancel()
            await preparing.over.wait()
        record = await self.journal.launch(incarnation)
        if record is None:
            return await self._terminate_unknown(command)
        await self.journal.accept(command, now_ms())
        engine = self._custody.engines.get(incarnation)
        if engine is not None:
            engine.ending = True
        self.ingress.close(incarnation)
        processes = record.processes if engine is None else engine.processes
        grace_s = min(self.grace_s, command.limit_ms / 1000)
        if engine is not None and engine.silence.hung:
            grace_s = min(grace_s, HUNG_GRACE_S)
        gone = await self._custody.end(incarnation, processes, grace_s)
        if isinstance(gone, str):
            return m.Unresolved(command_id=command.command_id, reason=gone)
        return m.Absent(command_id=command.command_id, proof=gone)

    async def _terminate_unknown(self, command: m.Terminate) -> m.Result:
        """No record of that launch: fence the handle and signal nothing; identities are only observed."""
        await self.journal.fence(command.incarnation)
        gone = await observe(command.incarnation, command.processes)
        if isinstance(gone, str):
            return m.Unresolved(command_id=command.command_id, reason=f"this host has no record of it; {gone}")
        return m.Absent(command_id=command.command_id, proof=gone)

    # --- questions -------------------------------------------------------------------------------------------

    async def _probe(self, command: m.Probe) -> m.Result:
        """Is it still the recorded engine, and does it answer? Finds out; decides and signals nothing."""
        if command.incarnation in self._preparing:
            return _unproven(command, "it is being launched right now")
        record = await self.journal.launch(command.incarnation)
        engine = self._custody.engines.get(command.incarnation)
        processes = command.processes if record is None else record.processes if engine is None else engine.processes
        if record is None:
            await self.journal.fence(command.incarnation)  # before it is called never launched
        gone = await observe(command.incarnation, processes)
        if not isinstance(gone, str):
            await self._custody.release(command.incarnation)
            return m.ProbeResult(command_id=command.command_id, same=None, usable=None, gone=gone)
        if engine is None:
            return _unproven(command, f"not watched here; {gone}")
        same = await self._custody.same(engine)
        if isinstance(same, str):
            return _unproven(command, same)
        if engine.moving:
            return _unproven(command, f"a step of its memory is in progress: {engine.moving}")
        found = m.ProbeResult(command_id=command.command_id, same=same, usable=None, gone=None)
        if command.parked:
            resident, reason = await self._parking.look_parked(engine, command.parked_budget)
            return attrs.evolve(found, resident=resident, reason=reason)
        if command.canary is not None or engine.memory is not Memory.HELD:
            usable, canary, reason = await self._parking.look_woken(engine, command.canary)
            return attrs.evolve(found, usable=usable, canary=canary, reason=reason)
        try:
            usable = await engine.probe()
        except CapyError as error:
            return attrs.evolve(found, reason=error.message)
        if not engine.ending:
            if not engine.ready:
                await self._custody.record_group(engine)
                await self._parking.take_reference(engine)
                self._watch(engine)
            engine.launching = False
            self.ingress.admit(engine.incarnation, engine.record.port, engine.record.key)
        return attrs.evolve(found, usable=usable)

    async def _abort(self, command: m.Abort) -> m.Result:
        """Ask an engine that can to end one request. Only its own word that it did is an answer."""
        engine = self._custody.engines.get(command.incarnation)
        if engine is None or not engine.answers:
            raise Refusal("unavailable", f"{command.incarnation} is not served here")
        if not engine.adapter.aborts:
            raise Refusal("unsupported_capability", "this engine ends a request only when its connection closes")
        try:
            await engine.adapter.abort(engine.client, command.request)
        except (ConnectionError, TimeoutError) as error:
            raise Refusal("engine_unreachable", str(error)) from error
        proof = Aborted(incarnation=command.incarnation, request=command.request, acknowledged_at_ms=now_ms())
        return m.AbortAcknowledged(command_id=command.command_id, proof=proof)

    async def _await_idle(self, command: m.AwaitIdle) -> m.Result:
        """Wait until the engine reads idle, at most `limit_ms`."""
        engine = self._custody.engines.get(command.incarnation)
        verdict = "gone" if engine is None or engine.ended.is_set() else "busy"
        with trio.move_on_after(command.limit_ms / 1000):
            while engine is not None and verdict not in ("idle", "gone"):
                if engine.silence.hung:
                    return m.IdleVerdict(command_id=command.command_id, verdict="silent")  # it never will be idle
                try:
                    running, waiting, _, _ = await engine.gauges()
                    verdict = "idle" if running == waiting == 0 else "busy"
                except ConnectionError:
                    verdict = "gone"
                except TimeoutError:
                    verdict = "silent"
                except CapyError:
                    verdict = "silent"  # it answered something that is no reading
                if verdict not in ("idle", "gone"):
                    await trio.sleep(IDLE_POLL_S)
        return m.IdleVerdict(command_id=command.command_id, verdict=verdict)

    async def _digest(self, command: m.DigestCheckpoint) -> m.Result:
        model_dir = self._launcher.model_dir(command.model)
        measured = await trio.to_thread.run_sync(
            self.checkpoints.measure, model_dir, command.document, limiter=FILES_LIMITER, abandon_on_cancel=True
        )
        return m.Checkpoint(
            command_id=command.command_id,
            digest=measured.digest,
            weight_bytes=Bytes(measured.weight_bytes),
            path=str(model_dir),
            facts=measured.facts,
        )

    async def _prune_logs(self, command: m.PruneLogs) -> m.Result:
        """Logs go with their deployment, once nothing of it runs here."""
        live = {record.incarnation.lane.deployment for record in await self.journal.launches()}
        live |= {incarnation.lane.deployment for incarnation in self._preparing}
        kept = live | set(command.kept)
        try:
            gone = await in_thread(lambda: logs.prune_deployments(self.state_dir, kept, command.as_of_ms))
        except OSError as error:
            raise Failure("internal", f"logs of deleted deployments stay: {error}") from error
        if gone:
            _log.info("logs.pruned", extra={"fields": {"deployments": gone}})
        return m.Done(command_id=command.command_id)

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
        self._spawn_task(self._send.send, changed)

    # --- news ----------------------------------------------------------------------------------------------

    async def _follow(self, engine: Engine) -> None:
        """Sample an engine's gauges while it serves, and tell of its end, unless a command in progress does."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report_load, engine)
            nursery.start_soon(self._oversee, engine)
            await engine.ended.wait()
            nursery.cancel_scope.cancel()
        if engine.launching or engine.ending:
            return
        self.ingress.close(engine.incarnation)
        reason = _with_words(engine.story(), await engine.last_words())
        await self._send.send(_exit_report(engine.incarnation, engine.exited or engine.api, engine.status, reason))

    async def _report_load(self, engine: Engine) -> None:
        while True:
            if engine.answers:
                try:
                    running, waiting, kv, asked_at = await engine.gauges()
                    self._say(
                        m.LoadReport(
                            seen_at_ms=asked_at,
                            incarnation=engine.incarnation,
                            running=running,
                            waiting=waiting,
                            kv_usage_ppm=kv,
                        )
                    )
                except (ConnectionError, TimeoutError, CapyError) as error:
                    # No reading is no report: the server sees the last one age.
                    fields = {"launch": str(engine.incarnation), "why": str(error)}
                    _log.debug("engine.unread", extra={"fields": fields})
                    why = engine.silence.why
                    if why is not None:  # told again while it stays so
                        _log.warning("engine.silent", extra={"fields": {**fields, "why": why}})
                        self._say(m.EngineSilent(seen_at_ms=now_ms(), incarnation=engine.incarnation, reason=why))
            else:
                engine.silence.answered()  # it is not asked
            with trio.move_on_after(LOAD_EVERY_S):
                await engine.read_now.wait()
            engine.read_now = trio.Event()

    async def _oversee(self, engine: Engine) -> None:
        """Note what shared memory a running engine made, and end one that opens a door of its own to the network."""
        while True:
            await trio.sleep(OVERSEE_S)
            if engine.launching or engine.ending or not engine.ready:
                continue
            await self._custody.note_segments(engine.incarnation, engine.processes)
            exposed = await self._custody.exposed(engine)
            if exposed is not None:
                _log.error("engine.exposed", extra={"fields": {"launch": str(engine.incarnation), "why": exposed}})
                self.ingress.close(engine.incarnation)
                engine.fault = exposed
                await process.put_down(engine.processes, self.grace_s, self.kill_s)
                return

    async def _report_domains(self) -> None:
        while True:
            self._look_now = trio.Event()
            domains = await self.observer.sample(self._owners())
            self._say(m.Domains(seen_at_ms=now_ms(), host=self.host, domains=domains))
            with trio.move_on_after(DOMAINS_EVERY_S) as pause:
                await self._look_now.wait()
            if not pause.cancelled_caught:
                await trio.sleep(A_MOMENT_S)
                with trio.move_on_after(DOMAINS_EVERY_S):
                    await self.observer.look()

    def _owners(self) -> Owners:
        return {engine.incarnation.lane.owner: engine.processes for engine in self._custody.engines.values()}

    def _say(self, report: m.Report) -> None:
        """Send a sample, or drop and count it: the next one says more. Half of the channel is kept for news."""
        if self._send.statistics().current_buffer_used >= REPORTS_MAX // 2:
            self.dropped_reports += 1
        else:
            self._send.send_nowait(report)


def _exit_report(
    incarnation: Incarnation, exited: ProcessIdentity, status: int | None, last_words: str, *, unseen: bool = False
) -> m.MemberExit:
    return m.MemberExit(
        seen_at_ms=now_ms(),
        incarnation=incarnation,
        process=exited,
        role=exited.role,
        status=status,
        last_words=last_words,
        unseen=unseen,
    )


def _unproven(command: m.Probe, reason: str) -> m.ProbeResult:
    return m.ProbeResult(command_id=command.command_id, same=None, usable=None, gone=None, reason=reason)


def _refused(command: m.Command, error: CapyError) -> m.Refused:
    return m.Refused(command_id=command.command_id, code=error.code, message=error.message)


def _with_words(reason: str, words: list[str]) -> str:
    """A failure's reason with the engine's last lines, bounded."""
    text = reason if not words else reason + ":\n" + "\n".join(words)
    return text if len(text) <= REASON_CHARS else text[: REASON_CHARS - 1] + "…"
