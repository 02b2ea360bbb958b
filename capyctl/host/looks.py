"""Questions about what runs here, and what is asked of a running engine without moving its memory.

Whoever looks finds out; nothing here ends a process. An engine that could not be asked is not one that said no.
Source: lifecycle 2, 14, 18.5; engines 5, 13, 14; api 7.6-7.9.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import attrs
import trio

from capyctl.clock import now_ms
from capyctl.errors import CapyError, Failure, Lost, Refusal
from capyctl.fsm.proofs import Aborted
from capyctl.fsm.types import Bytes, RequestId
from capyctl.host import logs
from capyctl.host.adapter import Checkpoints
from capyctl.host.custody import Custody, in_thread, observe, unrecorded
from capyctl.host.engine import Engine
from capyctl.host.ingress import Ingress, Stage, Stay
from capyctl.host.journal import Journal, Memory
from capyctl.host.launch import FILES_LIMITER, Launcher
from capyctl.host.launching import Launching
from capyctl.host.parking import Parking
from capyctl.session import messages as m

IDLE_POLL_S = 0.5
ABORT_S = 8.0  # until the engine has ended a request; a step of a large prompt takes seconds
ABORT_AGAIN_S = 0.5
DIGEST_TOLD_MS = 500  # between two reports of how far a digest is
_log = logging.getLogger("capyctl.host.looks")


@attrs.define
class _Told:
    """Says now and then how far a digest is, from the thread that makes it."""

    command: str
    say: Callable[[m.Report], None]
    loop: trio.lowlevel.TrioToken
    said_at_ms: int = 0

    def hear(self, done: int, total: int) -> None:
        now = now_ms()
        if now - self.said_at_ms < DIGEST_TOLD_MS:
            return
        self.said_at_ms = now
        report = m.DigestProgress(seen_at_ms=now, digest=self.command, done_bytes=Bytes(done), total_bytes=Bytes(total))
        with suppress(trio.RunFinishedError):  # the role ended, and nobody waits for this thread
            self.loop.run_sync_soon(self.say, report)


@attrs.frozen(kw_only=True)
class Looks:
    """Answers to questions. It keeps no state of its own.

    `watch` has those watched that a probe was first to name; `say` sends a sample of how far a digest is, or drops it.
    """

    state_dir: Path
    journal: Journal
    custody: Custody
    checkpoints: Checkpoints
    launcher: Launcher
    launching: Launching
    parking: Parking
    ingress: Ingress
    watch: Callable[[Engine], None]
    say: Callable[[m.Report], None]

    async def probe(self, command: m.Probe) -> m.Result:
        """Is it still the recorded engine, and does it answer? Finds out; decides and signals nothing."""
        if command.incarnation in self.launching.preparing:
            return _unproven(command, "it is being launched right now")
        record = await self.journal.launch(command.incarnation)
        engine = self.custody.engines.get(command.incarnation)
        processes = command.processes if record is None else record.processes if engine is None else engine.processes
        if record is None:
            await self.journal.fence(command.incarnation)  # before it is called never launched
        gone = await observe(command.incarnation, processes)
        if not isinstance(gone, str):
            story = await engine.how_it_ended() if engine is not None else ""
            await self.custody.release(command.incarnation)
            return m.ProbeResult(command_id=command.command_id, same=None, usable=None, gone=gone, reason=story)
        if engine is None:
            no_profile = "its engine's profile is not registered here, so it cannot be asked: stop it"
            return _unproven(command, f"{gone}; {unrecorded(processes) if record is None else no_profile}")
        same = await self.custody.same(engine)
        if isinstance(same, str):
            return _unproven(command, same)
        exposed = await self.custody.exposed(engine)  # `Custody.oversee` ends it
        if exposed is not None:
            return _unproven(command, exposed)
        if engine.moving:
            return _unproven(command, f"a step of its memory is in progress: {engine.moving}")
        found = m.ProbeResult(command_id=command.command_id, same=same, usable=None, gone=None)
        if command.parked:
            resident, reason = await self.parking.look_parked(engine, command.parked_budget)
            return attrs.evolve(found, resident=resident, reason=reason)
        if command.canary is not None or engine.memory is not Memory.HELD:
            usable, canary, reason = await self.parking.look_woken(engine, command.canary)
            return attrs.evolve(found, usable=usable, canary=canary, reason=reason)
        try:
            usable = await engine.probe()
        except CapyError as error:
            return attrs.evolve(found, reason=error.message)
        if not engine.ending:
            if not engine.ready:
                await self.custody.record_group(engine)
                await self.parking.take_reference(engine)
                self.watch(engine)
            engine.launching = False
            self.custody.admit(engine)
        return attrs.evolve(found, usable=usable)

    async def abort(self, command: m.Abort) -> m.Result:
        """Ask an engine that can to end one request, and wait until it has ended its answer to that request.

        The engine says 200 to an id that it does not know, so being asked proves nothing: it may be asked before the
        request has got as far as its id, or while it is between two of the engine's processes. It is asked again
        while the answer goes on. Without its end within `ABORT_S` nothing is acknowledged, and the connection is let
        go of, which such an engine notices by itself some seconds later.
        """
        engine = self.custody.engines.get(command.incarnation)
        stay = self.ingress.stay(command.incarnation, command.request)
        try:
            if engine is None or not engine.answers:
                raise Refusal("unavailable", f"{command.incarnation} is not served here")
            if not engine.adapter.aborts:
                raise Refusal("unsupported_capability", "this engine ends a request only when its connection closes")
            with trio.move_on_after(ABORT_S):
                await _ended(engine, command.request, stay)
        except (ConnectionError, TimeoutError) as error:
            raise Refusal("engine_unreachable", str(error)) from error
        finally:
            if stay is not None:
                stay.let_go()
        if stay is None:
            raise Lost("engine_error", "its connection is not one of this host's, so nobody sees whether it ended")
        if stay.stage is not Stage.OVER:
            raise Lost("engine_error", "the engine did not end its answer to the request that it was to end")
        proof = Aborted(incarnation=command.incarnation, request=command.request, acknowledged_at_ms=now_ms())
        return m.AbortAcknowledged(command_id=command.command_id, proof=proof)

    async def await_idle(self, command: m.AwaitIdle) -> m.Result:
        """Wait until the engine reads idle, at most `limit_ms`."""
        engine = self.custody.engines.get(command.incarnation)
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

    async def digest(self, command: m.DigestCheckpoint) -> m.Result:
        """Read a checkpoint's files: digest, sizes, facts. Raises: CapyError."""
        model_dir = self.launcher.model_dir(command.model)
        told = _Told(command=command.command_id, say=self.say, loop=trio.lowlevel.current_trio_token())
        measure = partial(self.checkpoints.measure, model_dir, command.document, told.hear)
        measured = await trio.to_thread.run_sync(measure, limiter=FILES_LIMITER, abandon_on_cancel=True)
        return m.Checkpoint(
            command_id=command.command_id,
            digest=measured.digest,
            weight_bytes=Bytes(measured.weight_bytes),
            path=str(model_dir),
            facts=measured.facts,
        )

    async def verify(self, command: m.VerifyStart) -> m.Result:
        """Look at what a launch would need, before anybody gives way for it. Raises: Refusal as the launch would be."""
        await self.launcher.verify(command)
        return m.Done(command_id=command.command_id)

    async def prune_logs(self, command: m.PruneLogs) -> m.Result:
        """Logs go with their deployment, once nothing of it runs here."""
        live = {record.incarnation.lane.deployment for record in await self.journal.launches()}
        live |= {incarnation.lane.deployment for incarnation in self.launching.preparing}
        kept = live | set(command.kept)
        try:
            gone = await in_thread(lambda: logs.prune_deployments(self.state_dir, kept, command.as_of_ms))
        except OSError as error:
            raise Failure("internal", f"logs of deleted deployments stay: {error}") from error
        if gone:
            _log.info("logs.pruned", extra={"fields": {"deployments": gone}})
        return m.Done(command_id=command.command_id)


async def _ended(engine: Engine, request: RequestId, stay: Stay | None) -> None:
    """Ask until the engine is done with it; once only where its end cannot be seen. Raises: as `Adapter.abort`."""
    if stay is not None:
        stay.hold()
    while True:
        await engine.adapter.abort(engine.client, request)
        if stay is None:
            return
        with trio.move_on_after(ABORT_AGAIN_S):
            await stay.settled.wait()
            return


def _unproven(command: m.Probe, reason: str) -> m.ProbeResult:
    return m.ProbeResult(command_id=command.command_id, same=None, usable=None, gone=None, reason=reason)
