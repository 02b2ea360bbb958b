"""What becomes of a Launch and of a Terminate: a process that answers, or the proof that nothing of it is left.

A launch is prepared and spawned by `launch.Launcher`; from the spawn on its process is watched, and whatever
ends the start (the deadline, the engine's exit, an answer that forbids going on, a stop) ends the process too.
Refused while no process existed, its handle is fenced, so that it can never start late.
Source: lifecycle 14, 17, 18.3; engines 5, 12, 16.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import trio

from capyctl.clock import now_ms
from capyctl.errors import CapyError, Failure, Refusal
from capyctl.fsm.proofs import NeverLaunched, Usable
from capyctl.fsm.types import Incarnation
from capyctl.host import process
from capyctl.host.custody import Custody, observe, unrecorded
from capyctl.host.devices import Observer
from capyctl.host.engine import Engine, with_words
from capyctl.host.ingress import Ingress
from capyctl.host.journal import Journal, LaunchRecord
from capyctl.host.launch import TRANSIENT, Launcher, SpawnFailed
from capyctl.host.parking import Parking
from capyctl.host.peaks import StartWatch
from capyctl.host.ports import taken
from capyctl.host.reports import ENDED_UNSEEN
from capyctl.session import messages as m

OVERSEE_FIRST_S = 0.1  # shared memory is among the first things that an engine makes, and some die soon after
OVERSEE_STARTING_S = 2.0  # the pause doubles up to this
HUNG_GRACE_S = 3.0  # between SIGTERM and SIGKILL of an engine that does nothing any more


@attrs.define(eq=False)
class Preparing:
    """A launch that has spawned nothing yet; a Terminate calls it off."""

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    over: trio.Event = attrs.field(factory=trio.Event)


@attrs.define(eq=False, kw_only=True)
class Launching:
    """Starts engines and ends them. `adopt` has a spawned one watched, `watch` those of its group that came later."""

    journal: Journal
    custody: Custody
    launcher: Launcher
    parking: Parking
    ingress: Ingress
    observer: Observer
    tell: Callable[[m.Report], Awaitable[None]]
    adopt: Callable[[Engine], None]
    watch: Callable[[Engine], None]
    tell_domains: Callable[[], Awaitable[None]]
    grace_s: float = process.GRACE_S
    preparing: dict[Incarnation, Preparing] = attrs.field(init=False, factory=dict)

    # --- launch ------------------------------------------------------------------------------------------

    async def launch(self, command: m.Launch) -> m.Result:
        """Launched, LaunchRefused with a proof, or Unresolved. Asked again for a launch on record, goes on with it."""
        record = await self.journal.launch(command.incarnation)
        if record is not None:
            if record.command.command_id != command.command_id:
                raise Refusal("lifecycle_conflict", f"{command.incarnation} was already launched by another command")
            return await self._resume(command, record)
        preparing = self.preparing[command.incarnation] = Preparing()
        try:
            with preparing.scope:
                try:
                    prepared = await self.launcher.prepare(command)
                except CapyError as error:
                    return await self._never(command, error)
            if preparing.scope.cancelled_caught:
                return await self._never(command, Refusal("lifecycle_conflict", "stopped before it was spawned"))
            watch = await StartWatch.open(self.observer, self.custody)
            try:
                engine = await self.launcher.spawn(command, prepared)
            except SpawnFailed as failed:
                failed.engine.launching = True
                self.adopt(failed.engine)
                return await self._clean_up(command, failed.engine, failed.error)
            except CapyError as error:
                return await self._never(command, error)
            engine.launching = True
            self.adopt(engine)
        finally:
            preparing.over.set()
            self.preparing.pop(command.incarnation, None)
        await self.tell(
            m.Spawned(
                seen_at_ms=now_ms(),
                incarnation=command.incarnation,
                token=command.token,
                processes=engine.processes,
            )
        )
        return await self._make_ready(command, engine, watch)

    async def _resume(self, command: m.Launch, record: LaunchRecord) -> m.Result:
        """The same launch asked for again after a restart: go on where it stands, never spawn again."""
        engine = self.custody.engines.get(command.incarnation)
        if engine is not None:
            engine.launching = True
            return await self._make_ready(command, engine)
        if not record.processes:
            return await self._never(command, Failure("launch_failed", "the host stopped before it was spawned"))
        return await self._absent_launch(command, record, ENDED_UNSEEN)

    async def _make_ready(self, command: m.Launch, engine: Engine, watch: StartWatch | None = None) -> m.Result:
        """Readiness, ended by the deadline or by the engine's exit, whichever is first.

        Without a `watch` from before its spawn nobody saw what the start needed, and nothing is said of it.
        """
        outcome: Usable | CapyError | None = None

        async def look_around(scope: trio.CancelScope) -> None:
            nonlocal outcome
            pause_s = OVERSEE_FIRST_S
            while True:
                await trio.sleep(pause_s)
                await self.custody.note_segments(engine.incarnation, engine.processes)
                exposed = await self.custody.exposed(engine)  # it may load for minutes with its door open
                if exposed is not None:
                    outcome = Failure("launch_failed", exposed)
                    scope.cancel()
                pause_s = min(2 * pause_s, OVERSEE_STARTING_S)

        async def stop_at_exit(scope: trio.CancelScope) -> None:
            await engine.ended.wait()
            scope.cancel()

        with trio.move_on_after(max(0.0, (command.deadline_ms - now_ms()) / 1000)) as window:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stop_at_exit, nursery.cancel_scope)
                if watch is not None:
                    nursery.start_soon(watch.run, engine)
                nursery.start_soon(look_around, nursery.cancel_scope)
                outcome = await engine.become_ready()
                exposed = await self.custody.exposed(engine) if isinstance(outcome, Usable) else None
                if exposed is not None:
                    outcome = Failure("launch_failed", exposed)
                elif isinstance(outcome, Usable):
                    await self.parking.take_reference(engine)
                nursery.cancel_scope.cancel()
        if engine.ending:
            outcome = Refusal("lifecycle_conflict", "stopped while it was starting")
        elif engine.ended.is_set():
            outcome = Failure("launch_failed", engine.story(" before it was ready"))
        elif outcome is None and window.cancelled_caught:
            waited_s = (command.deadline_ms - engine.record.started_ms) / 1000
            outcome = Failure("activation_timeout", f"the engine was not ready within {waited_s:.0f} s")
        if not isinstance(outcome, Usable):
            outcome = outcome or Failure("launch_failed", "readiness gave no answer")
            return await self._clean_up(command, engine, outcome)
        await self.custody.record_group(engine)
        self.watch(engine)
        peak = {} if watch is None else await watch.close(engine)
        if engine.ended.is_set():  # from here on its end is news, and told by `Reports.follow`
            return await self._clean_up(
                command, engine, Failure("launch_failed", f"{engine.story()} as it became ready")
            )
        engine.launching = False
        self.custody.admit(engine)
        return m.Launched(
            command_id=command.command_id,
            processes=engine.processes,
            usable=outcome,
            peak_bytes=peak,
            canary=engine.canary,
        )

    async def _clean_up(self, command: m.Launch, engine: Engine, error: CapyError) -> m.Result:
        """End what is left of a failed start; LaunchRefused only with the proof that nothing is."""
        engine.ending, ended = True, engine.ended.is_set()
        gone = await self.custody.end(engine.incarnation, engine.processes, self.grace_s)
        if isinstance(gone, str):
            return m.Unresolved(command_id=command.command_id, reason=f"{error.message}; then: {gone}")
        engine.ended.set()
        words = await engine.last_words()
        code, reason = error.code, error.message
        text = with_words(reason, words)
        if code == "launch_failed":
            named = engine.adapter.failure(words)
            if named is not None:
                code, text = named[0], with_words(named[1], words)
            elif taken(engine.record.port):
                code = "port_conflict"
                text = with_words(f"another program took port {engine.record.port}; {reason}", words)
            elif ended:
                text = engine.told(reason, words)
        return m.LaunchRefused(
            command_id=command.command_id,
            code=code,
            reason=text,
            proof=gone,
            transient=code == "port_conflict",  # an exit before ready is no passing cause, whatever it says
        )

    async def _never(self, command: m.Launch, error: CapyError) -> m.Result:
        """Refused while no process existed: the handle is fenced, then P-NEVER is true."""
        await self.journal.fence(command.incarnation)
        await self.custody.release(command.incarnation)
        return m.LaunchRefused(
            command_id=command.command_id,
            code=error.code,
            reason=error.message,
            proof=NeverLaunched(incarnation=command.incarnation, fenced=True, observed_at_ms=now_ms()),
            transient=error.code in TRANSIENT,
        )

    async def _absent_launch(self, command: m.Launch, record: LaunchRecord, reason: str) -> m.Result:
        gone = await self.custody.end(command.incarnation, record.processes, self.grace_s)
        if isinstance(gone, str):
            return m.Unresolved(command_id=command.command_id, reason=gone)
        return m.LaunchRefused(
            command_id=command.command_id, code="launch_failed", reason=reason, proof=gone, transient=False
        )

    # --- terminate -----------------------------------------------------------------------------------------

    async def terminate(self, command: m.Terminate) -> m.Result:
        """Close the upstreams, then SIGTERM, grace, SIGKILL, and the proof, or the reason why there is none."""
        incarnation = command.incarnation
        preparing = self.preparing.get(incarnation)
        if preparing is not None:
            preparing.scope.cancel()
            await preparing.over.wait()
        record = await self.journal.launch(incarnation)
        if record is None:
            return await self._terminate_unknown(command)
        await self.journal.accept(command, now_ms())
        engine = self.custody.engines.get(incarnation)
        if engine is not None:
            engine.ending = True
        self.ingress.close(incarnation)
        processes = record.processes if engine is None else engine.processes
        grace_s = min(self.grace_s, command.limit_ms / 1000)
        if engine is not None and engine.silence.hung:
            grace_s = min(grace_s, HUNG_GRACE_S)
        gone = await self.custody.end(incarnation, processes, grace_s)
        if isinstance(gone, str):
            return m.Unresolved(command_id=command.command_id, reason=gone)
        return m.Absent(command_id=command.command_id, proof=gone)

    async def _terminate_unknown(self, command: m.Terminate) -> m.Result:
        """No record of that launch: fence the handle and signal nothing; identities are only observed."""
        await self.journal.fence(command.incarnation)
        gone = await observe(command.incarnation, command.processes)
        if isinstance(gone, str):
            return m.Unresolved(command_id=command.command_id, reason=f"{gone}; {unrecorded(command.processes)}")
        return m.Absent(command_id=command.command_id, proof=gone)
