"""An engine's memory given back and taken back, with proof: park, wake, and what is looked at afterwards.

Theory of operation. An engine is asked to release or to restore at most once per command, whatever becomes of
the answer and of us: the doubt is journaled first, and whoever finds the journaled step without a result looks at
the engine instead of asking again. An engine's own "done" proves nothing. A park is proven by what its processes
hold in looks that began after the call; a wake by a bounded answer, by the fixed prompt answered as it was at the
first readiness, and by a look that is newer than all of that. What is refused before the call is refused as never
sent, and the engine serves on.

While its memory is away, or may be, an engine gets no request and is asked for no gauges: one that is asked for an
answer without its weights hangs, answers nonsense or ends.
Source: lifecycle 2, 4.4, 17 (W8-W10), 18.5; engines 6.4, 7.4, 13; memory 8.3.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import attrs
import trio

from capyctl.clock import now_ms
from capyctl.errors import CapyError, Lost, Refusal
from capyctl.fsm.proofs import Back, Canary, Quiet, Resident, SameEngine, Unsent, Usable
from capyctl.fsm.types import Bytes, Domain, Millis
from capyctl.host.adapter import Checkpoints
from capyctl.host.custody import Custody
from capyctl.host.devices import Observer, Owners
from capyctl.host.engine import Engine
from capyctl.host.ingress import Ingress
from capyctl.host.journal import Journal, Memory
from capyctl.host.launch import FILES_LIMITER, check_room
from capyctl.ledger.types import HostPolicy
from capyctl.session import messages as m

SETTLE_S = 30.0  # drivers give memory back after the call has returned
LOOK_S = 45.0  # at a wake whose answer was lost: whoever waits for it is served sooner by a clean start
SETTLE_LOOK_S = 5.0  # the same for a release whose answer was lost some time ago
LAST_WORDS_S = 0.5  # of a limit, to say what was seen
CLOCK_TICK_S = 0.001
LOOK_FIRST_S = 0.002  # most engines are done when they say so: the second look comes at once, later ones seldom
LOOK_EVERY_S = 0.5
QUIET_S = 5.0  # an engine that was read idle may have to finish its last step
ALIVE_S = 15.0  # of a parked engine, until it answers what may be asked of it
FRESH_MS = 5_000  # a look this old is still a fresh one
CANARY_S = 60.0
OVERRUN_S = 5.0  # over its own limit, an adapter's call is cut
_log = logging.getLogger("capyctl.host.parking")


class _Unsent(Exception):
    """Refused before anything was asked of the engine."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class _Unknown(Exception):
    """The engine may have been asked, and what became of it is not proven."""


@attrs.frozen(kw_only=True)
class Parking:
    """Performs the steps of engines' memory. It keeps no state of its own: the journal and the engines have it."""

    journal: Journal
    custody: Custody
    ingress: Ingress
    observer: Observer
    checkpoints: Checkpoints
    policy: HostPolicy
    owners: Callable[[], Owners]  # whose memory is not foreign on a card

    # --- park --------------------------------------------------------------------------------------------

    async def release(self, command: m.Release) -> m.Parked | m.NotParked | m.Unresolved:
        """Park: quiet, the same engine, one call, and looks until what is left fits. Never raises a CapyError."""
        identity = command.command_id
        engine = self.custody.engines.get(command.incarnation)
        if await self.journal.may_have_begun(command):
            return m.Unresolved(command_id=identity, reason=await self._seen(engine, "release"))
        if engine is None:
            return self._not_parked(command, "unavailable", "this host does not watch such an engine")
        if engine.memory is not Memory.HELD or engine.moving:
            return m.Unresolved(command_id=identity, reason=f"its memory is {engine.moving or engine.memory.value}")
        engine.moving = "releasing"
        limit_s = command.limit_ms / 1000
        try:
            with trio.move_on_after(limit_s) as scope:
                try:
                    quiet = await self._quiet(command, engine)
                    await self._ask(engine, command, engine.adapter.release, limit_s - SETTLE_S)
                    return await self._released(command, engine, quiet, scope.deadline - LAST_WORDS_S)
                except _Unsent as refused:
                    return self._not_parked(command, refused.code, refused.reason)
                except _Unknown as unknown:
                    reason = f"{unknown}; {await self._seen(engine, 'release')}"
                    return m.Unresolved(command_id=identity, reason=reason)
            if engine.memory is Memory.HELD:
                return self._not_parked(command, "not_quiescent", "the limit passed before it was quiet")
            return m.Unresolved(command_id=identity, reason="the limit passed before the park was proven")
        finally:
            engine.moving = None
            if engine.answers and not engine.ending:
                self.custody.admit(engine)

    async def _quiet(self, command: m.Release, engine: Engine) -> Quiet:
        """P-QUIET with the gate of this host closed too. Raises: _Unsent; then the caller opens it again."""
        if not engine.adapter.parks or command.tier is not engine.record.command.residency:
            raise _Unsent("capability_missing:deep_park", f"it was not launched to park as {command.tier.value}")
        if engine.canary is None:
            raise _Unsent(
                "capability_missing:deep_park",
                "it never answered the fixed prompt, so that nobody could tell whether it woke as it was",
            )
        inside = self.ingress.answering(engine.incarnation)
        if inside:
            raise _Unsent("not_quiescent", f"{inside} requests are still being answered")
        self.ingress.close(engine.incarnation)
        same: SameEngine | str
        quiet: Quiet
        same, quiet = await _together(
            partial(self.custody.same, engine), partial(self._reads_quiescent, command, engine)
        )
        if isinstance(same, str):
            raise _Unsent("unavailable", same)
        return quiet

    async def _reads_quiescent(self, command: m.Release, engine: Engine) -> Quiet:
        """Idle by its gauges, then by whatever else its family can say. Raises: _Unsent."""
        quiet = await self._reads_idle(command, engine)
        try:
            await engine.adapter.quiescent(engine.client)
        except CapyError as busy:
            raise _Unsent("not_quiescent", busy.message) from busy
        except (ConnectionError, TimeoutError) as error:
            raise _Unsent("not_quiescent", f"it does not say whether it is quiescent: {error}") from error
        return quiet

    async def _reads_idle(self, command: m.Release, engine: Engine) -> Quiet:
        running = waiting = -1
        reason = "its gauges were not read"
        with trio.move_on_after(QUIET_S):
            while True:
                try:
                    running, waiting, _, asked_at = await engine.gauges()
                except (ConnectionError, TimeoutError, CapyError) as error:
                    reason = f"its gauges were not read: {error}"
                else:
                    if running == waiting == 0:
                        return Quiet(
                            incarnation=engine.incarnation,
                            gate_closed_at_ms=command.gate_closed_at_ms,
                            router_in_flight=0,
                            running=running,
                            waiting=waiting,
                            read_at_ms=asked_at,
                        )
                    reason = f"it still runs {running} requests, and {waiting} wait in it"
                await trio.sleep(LOOK_EVERY_S)
        raise _Unsent("not_quiescent", reason)

    async def _released(self, command: m.Release, engine: Engine, quiet: Quiet, ends_at_s: float) -> m.Parked:
        """P-SAME and P-RESID after the call; journaled with the result. Raises: _Unknown."""
        resident, same, _ = await _together(
            partial(self._resident, engine, command.budget, now_ms(), ends_at_s),
            partial(self._same_after, engine),
            partial(self._alive, engine),
        )
        engine.memory = Memory.PARKED
        return m.Parked(command_id=command.command_id, quiet=quiet, same=same, resident=resident)

    async def _resident(
        self, engine: Engine, budget: Mapping[Domain, Bytes], released_at: Millis, ends_at_s: float
    ) -> dict[Domain, Resident]:
        """P-RESID on every domain of `budget`. Raises: _Unknown with the figures that did not fit."""
        seen, wait_s = "nothing was sampled", LOOK_FIRST_S
        await trio.sleep(CLOCK_TICK_S)  # a look in the millisecond of the answer could be older than it
        with trio.move_on_at(min(ends_at_s, trio.current_time() + SETTLE_S)):
            while not engine.ended.is_set():
                held = await self.observer.held(engine.processes, budget)
                lacking = [domain for domain in budget if domain not in held.bytes]
                over = [domain for domain in budget if domain not in lacking and held.bytes[domain] > budget[domain]]
                if not lacking and not over and held.sampled_at_ms > released_at:
                    return {
                        domain: Resident(
                            incarnation=engine.incarnation,
                            resident_bytes=held.bytes[domain],
                            budget_bytes=budget[domain],
                            released_at_ms=released_at,
                            sampled_at_ms=held.sampled_at_ms,
                        )
                        for domain in budget
                    }
                words = [f"{_mib(held.bytes[one])} left on {one}, at most {_mib(budget[one])} may be" for one in over]
                seen = "; ".join([*words, *(f"{one} does not say what is left" for one in lacking)]) or seen
                await trio.sleep(wait_s)
                wait_s = min(wait_s * 2, LOOK_EVERY_S)
        raise _Unknown(engine.story() if engine.ended.is_set() else seen)

    async def _same_after(self, engine: Engine) -> SameEngine:
        same = await self.custody.same(engine)
        if isinstance(same, str):
            raise _Unknown(same)
        return same

    async def _alive(self, engine: Engine) -> None:
        """A released engine that answers nothing any more could not be woken. Raises: _Unknown."""
        reason = "it answers nothing"
        with trio.move_on_after(ALIVE_S):
            while not engine.ended.is_set():
                try:
                    if await engine.adapter.alive_parked(engine.client):
                        return
                except (ConnectionError, TimeoutError) as error:
                    reason = str(error)
                except CapyError as error:
                    reason = error.message
                await trio.sleep(LOOK_EVERY_S)
        raise _Unknown(engine.story() if engine.ended.is_set() else f"released, but {reason}")

    # --- wake --------------------------------------------------------------------------------------------

    async def restore(self, command: m.Restore) -> m.Awake | m.NotAwake | m.Unresolved:
        """Wake: files and room first, one call, then the checks. Never raises a CapyError."""
        identity = command.command_id
        engine = self.custody.engines.get(command.incarnation)
        if await self.journal.may_have_begun(command):
            return m.Unresolved(command_id=identity, reason=await self._seen(engine, "restore"))
        if engine is None:
            return m.NotAwake(command_id=identity, code="unavailable", reason="this host does not watch such an engine")
        if engine.memory is not Memory.PARKED or engine.moving:
            return m.Unresolved(command_id=identity, reason=f"its memory is {engine.moving or engine.memory.value}")
        engine.moving = "restoring"
        limit_s = max(0.0, (command.deadline_ms - now_ms()) / 1000)
        try:
            with trio.move_on_after(limit_s):
                try:
                    return await self._wake(command, engine, limit_s)
                except _Unsent as refused:
                    return m.NotAwake(
                        command_id=identity,
                        code=refused.code,
                        reason=refused.reason,
                        unsent=Unsent(incarnation=engine.incarnation, refused_before_sending=True),
                    )
                except _Unknown as unknown:
                    return m.Unresolved(command_id=identity, reason=f"{unknown}; {await self._seen(engine, 'restore')}")
            return m.Unresolved(command_id=identity, reason="the deadline passed before the wake was proven")
        finally:
            engine.moving = None

    async def _wake(self, command: m.Restore, engine: Engine, limit_s: float) -> m.Awake | m.NotAwake:
        changed = await self._files_changed(command, engine)
        if changed is not None:
            return changed
        await self._check_room(engine)
        await self._ask(engine, command, engine.adapter.restore, limit_s)
        restored_at = now_ms()
        try:
            usable = await engine.probe(max(1.0, (command.deadline_ms - now_ms()) / 1000))
        except CapyError as silent:
            if engine.ended.is_set():
                raise _Unknown(engine.story()) from silent
            return m.NotAwake(command_id=command.command_id, code=silent.code, reason=silent.message)
        canary = await self.canary(engine, command.canary)
        if isinstance(canary, str):
            return m.NotAwake(command_id=command.command_id, code="wake_mismatch", reason=canary, mismatch=True)
        if canary is None:
            raise _Unknown("it did not answer the fixed prompt")
        same, back = await _together(partial(self._same_after, engine), partial(self._back, engine, restored_at))
        self._serves_again(engine)
        return m.Awake(command_id=command.command_id, back=back, usable=usable, same=same, canary=canary)

    async def _files_changed(self, command: m.Restore, engine: Engine) -> m.NotAwake | None:
        """P-DIGEST. Other files than it was launched with cannot give it its weights back: its copy is of no use."""
        try:
            await trio.to_thread.run_sync(
                self.checkpoints.verify,
                engine.facts.model_dir,
                command.digest,
                limiter=FILES_LIMITER,
                abandon_on_cancel=True,
            )
        except CapyError as changed:
            return m.NotAwake(command_id=command.command_id, code=changed.code, reason=changed.message)
        return None

    async def _check_room(self, engine: Engine) -> None:
        """What the wake adds beyond what it still holds, against what the machine says now. Raises: _Unsent.

        Only where it is charged more awake than parked, as in the ledger: it takes no more of the RAM that its
        processes have kept, however little of that charge they hold.
        """
        seen, owner = await self.observer.sample_lately(self.owners()), engine.incarnation.lane.owner
        ready = {Domain(name): amount for name, amount in engine.facts.ready.items()}
        held = {name: seen[name].residents.get(owner, 0) for name in ready if name in seen}
        parked = engine.facts.parked
        adds = {
            name: Bytes(max(0, amount - held.get(name, 0)))
            for name, amount in ready.items()
            if amount > parked.get(name, 0)
        }
        try:
            check_room(self.policy, adds, seen)
        except Refusal as short:
            raise _Unsent(short.code, short.message) from short

    async def _back(self, engine: Engine, restored_at: Millis) -> Back:
        """P-BACK: its processes hold memory again, in a look that is newer than the checks. Raises: _Unknown."""
        held = await self.observer.held(engine.processes)
        recorded_at = now_ms()
        if not any(held.bytes.values()) or recorded_at > held.sampled_at_ms + FRESH_MS:
            raise _Unknown("no fresh look says what its processes hold")
        return Back(
            incarnation=engine.incarnation,
            restored_at_ms=restored_at,
            sampled_at_ms=held.sampled_at_ms,
            fresh_until_ms=Millis(held.sampled_at_ms + FRESH_MS),
            recorded_at_ms=recorded_at,
        )

    def _serves_again(self, engine: Engine) -> None:
        """It is proven awake: its gauges are read again, and this host lets requests through to it.

        None comes before the server has heard of it, and it hears what is journaled.
        """
        engine.memory = Memory.HELD
        if not engine.ending:
            self.custody.admit(engine)

    # --- canary ------------------------------------------------------------------------------------------

    async def take_reference(self, engine: Engine) -> str | None:
        """Ask the fixed prompt at the first readiness of an engine that is to park, and journal its answer.

        None when the engine did not answer it; its parks are refused then, and it serves.
        """
        if engine.canary is None and engine.adapter.parks and engine.record.command.residency.parks:
            try:
                engine.canary = await engine.adapter.canary(engine.client, engine.facts, CANARY_S)
            except (ConnectionError, TimeoutError) as error:
                _log.warning("canary.unanswered", extra={"fields": _of(engine, str(error))})
            except CapyError as error:
                _log.warning("canary.unanswered", extra={"fields": _of(engine, error.message)})
            await self.journal.asked_for(engine.incarnation, engine.canary)
        return engine.canary

    async def canary(self, engine: Engine, expected: str | None) -> Canary | str | None:
        """P-CANARY; a text says how the answer differs, None that there was none."""
        reference = expected or engine.canary
        if reference is None:
            return None
        try:
            actual = await engine.adapter.canary(engine.client, engine.facts, CANARY_S)
        except (ConnectionError, TimeoutError, CapyError) as error:
            _log.warning("canary.unanswered", extra={"fields": _of(engine, str(error))})
            return error.message if isinstance(error, CapyError) and error.code == "wake_mismatch" else None
        if not actual:
            return None
        if actual != reference:
            return "it answers the fixed prompt otherwise than before its memory was released"
        return Canary(incarnation=engine.incarnation, expected=reference, actual=actual)

    # --- looks ---------------------------------------------------------------------------------------------

    async def look_parked(
        self, engine: Engine, budget: Mapping[Domain, Bytes]
    ) -> tuple[Mapping[Domain, Resident] | None, str]:
        """P-RESID of a release whose answer was lost, by a look of now; else None, and what is left.

        An engine that was never asked holds what it held, and is no parked one however little that is.
        """
        if engine.memory is Memory.HELD:
            return None, "it was never asked to release its memory"
        if engine.memory is Memory.RESTORING:
            return None, "it was asked to take its memory back since"
        try:
            resident = await self._resident(engine, budget, now_ms(), trio.current_time() + SETTLE_LOOK_S)
            await self._alive(engine)
        except _Unknown as unknown:
            return None, str(unknown)
        await self.journal.memory_is(engine.incarnation, Memory.PARKED)
        engine.memory = Memory.PARKED
        return resident, ""

    async def look_woken(self, engine: Engine, expected: str | None) -> tuple[Usable | None, Canary | None, str]:
        """(P-READY, P-CANARY, why not) of a wake whose answer was lost; it serves again only with both."""
        if engine.memory not in (Memory.RESTORING, Memory.HELD):
            return None, None, f"its memory is {engine.memory.value}: nobody asked it to take it back"
        try:
            if await engine.adapter.sleeps(engine.client):
                return None, None, "it says that not all of its memory is back"
            with trio.fail_after(LOOK_S):
                usable = await engine.probe()
                canary = await self.canary(engine, expected)
        except (ConnectionError, TimeoutError, trio.TooSlowError) as error:
            return None, None, f"it does not answer: {error or f'nothing came within {LOOK_S:.0f} s'}"
        except CapyError as error:
            return None, None, error.message
        if not isinstance(canary, Canary):
            return usable, None, canary or "it did not answer the fixed prompt"
        await self.journal.memory_is(engine.incarnation, Memory.HELD)
        self._serves_again(engine)
        return usable, canary, ""

    async def _seen(self, engine: Engine | None, step: str) -> str:
        """What a look says about a step that must not be asked for again, for people: it decides nothing."""
        if engine is None:
            return f"the {step} may have been asked for, and this host does not watch such an engine"
        if engine.ended.is_set():
            return f"the {step} may have been asked for; {engine.story()}"
        held = await self.observer.held(engine.processes)
        figures = ", ".join(f"{_mib(amount)} on {domain}" for domain, amount in sorted(held.bytes.items()))
        return f"the {step} may have been asked for and is not asked for again; it holds {figures or 'unknown amounts'}"

    # --- the one call --------------------------------------------------------------------------------------

    async def _ask(
        self,
        engine: Engine,
        command: m.Release | m.Restore,
        call: Callable[..., Awaitable[None]],
        limit_s: float,
    ) -> None:
        """Journal the doubt, then ask once. Raises: _Unsent when nothing was sent, _Unknown otherwise."""
        before, limit_s = engine.memory, max(1.0, limit_s)
        try:
            begun = await self.journal.begin_step(command, now_ms())
        except Lost as unwritten:  # on no record, so not asked; what the record says of it is the worse case
            raise _Unsent("unavailable", unwritten.message) from unwritten
        if not begun:
            raise _Unknown("an earlier step of this engine may be in progress")
        engine.memory = Memory.RELEASING if isinstance(command, m.Release) else Memory.RESTORING
        try:
            with trio.fail_after(limit_s + OVERRUN_S):
                await call(engine.client, engine.facts, limit_s)
        except Refusal as refused:
            await self.journal.memory_is(engine.incarnation, before)
            engine.memory = before
            raise _Unsent(refused.code, refused.message) from refused
        except (ConnectionError, TimeoutError, trio.TooSlowError) as error:
            raise _Unknown(f"its answer was lost: {error or 'no answer within its limit'}") from error
        except CapyError as error:
            raise _Unknown(error.message) from error

    def _not_parked(self, command: m.Release, code: str, reason: str) -> m.NotParked:
        unsent = Unsent(incarnation=command.incarnation, refused_before_sending=True)
        return m.NotParked(command_id=command.command_id, code=code, reason=reason, unsent=unsent)


async def _together(*looks: Callable[[], Awaitable[Any]]) -> list[Any]:
    """What looks that do not build on each other find, side by side. The first that fails ends all, and is raised."""
    found: list[Any] = [None] * len(looks)
    failed: list[Exception] = []

    async def take(place: int, look: Callable[[], Awaitable[Any]]) -> None:
        try:
            found[place] = await look()
        except Exception as error:
            failed.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for place, look in enumerate(looks):
            nursery.start_soon(take, place, look)
    if failed:
        raise failed[0]
    return found


def _of(engine: Engine, why: str) -> dict[str, str]:
    return {"launch": str(engine.incarnation), "why": why}


def _mib(amount: int) -> str:
    return f"{amount / (1 << 20):.0f} MiB"
