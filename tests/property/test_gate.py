"""The gate: total, and open exactly while nothing speaks against dispatching (invariants 28, 30, 42, 43)."""

from __future__ import annotations

from typing import Any

import attrs
import lives
import pytest
from explore import assert_total, explore, play
from lives import EARLY, LANE, LATE

from capyctl.errors import InvariantBroken
from capyctl.fsm import effects as x
from capyctl.fsm import gate as m
from capyctl.fsm.facts import Fact, SessionBegan
from capyctl.fsm.gate import Closure, GatePhase
from capyctl.fsm.run import Run
from capyctl.fsm.types import Generation, Millis

RUN = Run(lane=LANE, generation=Generation(2))
FROM_LIFE = (Closure.SWITCH, Closure.PARK, Closure.STOP, Closure.ENGINE_EXIT)


def proven(now: Millis, *, at_ms: Millis | None = None, same: int = 2, usable: int = 2) -> m.Proven:
    seen = now if at_ms is None else at_ms
    return m.Proven(now_ms=now, same=lives.same(RUN, same, at_ms=now), usable=lives.usable(RUN, usable, at_ms=seen))


def alphabet(state: m.State) -> list[Fact]:
    """Two runs, two sessions, two instants and everything that is said of them."""
    told: list[Fact] = []
    for now in (EARLY, LATE):
        for generation in (Generation(1), Generation(2)):
            told += [m.ReadyProven(now_ms=now, generation=generation, probed_at_ms=at) for at in (EARLY, LATE)]
            told += [m.ReadyStored(now_ms=now, generation=generation)]
        told += [kind(now_ms=now, reason=reason) for kind in (m.ReasonAdded, m.ReasonRemoved) for reason in FROM_LIFE]
        told += [m.LeftReady(now_ms=now), m.HostLost(now_ms=now), m.Doubted(now_ms=now)]
        told += [proven(now), proven(now, at_ms=Millis(1)), proven(now, same=9), proven(now, usable=9)]
        told += [SessionBegan(now_ms=now, session=session) for session in (1, 2)]
    return told


def closed() -> m.State:
    return m.State(lane=LANE, session=1)


def opened(now: int = 100) -> m.State:
    state = closed()
    for event in (
        m.ReadyProven(now_ms=Millis(now), generation=Generation(2), probed_at_ms=Millis(now)),
        m.ReadyStored(now_ms=Millis(now), generation=Generation(2)),
    ):
        state, _ = m.GATE.step(state, event)
    assert state.phase is GatePhase.OPEN
    return state


# --- exploration ----------------------------------------------------------------------------------


def test_every_event_is_decided_once_in_every_reachable_state_and_every_row_fires():
    assert_total(m.GATE, [closed()], alphabet)


def test_it_opens_only_by_the_last_reason_and_only_when_proven_to_this_session():
    """28, 42, 43, by a closure set that is counted beside the table."""
    for step in explore(m.GATE, [closed()], alphabet):
        before, event, after = step.state, step.event, step.after
        assert (x.GateOpened in map(type, step.orders)) == (before.phase is not after.phase is GatePhase.OPEN)
        assert (x.GateClosed in map(type, step.orders)) == (before.phase is not after.phase is GatePhase.CLOSED)
        gone: set[Closure] = set()
        match event:
            case m.ReadyStored(generation=generation) if generation == before.generation:
                gone = {Closure.UNSTORED}
            case m.ReasonRemoved(reason=reason) if reason not in (Closure.STOP, Closure.ENGINE_EXIT):
                gone = {reason}
            case m.Proven(same=same, usable=usable):
                runs = {same.incarnation.generation, usable.incarnation.generation}
                fresh = min(same.observed_at_ms, usable.probed_at_ms) >= before.doubted_at_ms
                if runs == {before.generation} and fresh:
                    gone = {Closure.UNPROVEN, Closure.HOST_SESSION}
        if isinstance(event, m.ReadyStored | m.ReasonRemoved | m.Proven):
            assert after.reasons == before.reasons - gone
            assert after.generation == before.generation
            assert after.phase is GatePhase.OPEN or after.generation is None or after.reasons
        if before.phase is GatePhase.CLOSED and after.phase is GatePhase.OPEN:
            assert before.reasons
            assert before.reasons <= gone
            assert after.proven_in == after.session


def test_whatever_speaks_against_it_closes_it_in_the_same_step():
    """30."""
    for step in explore(m.GATE, [closed()], alphabet):
        against = (m.ReasonAdded, m.LeftReady, m.HostLost, m.Doubted)
        new_session = isinstance(step.event, SessionBegan) and step.event.session > step.state.session
        if isinstance(step.event, against) or new_session:
            assert step.after.phase is GatePhase.CLOSED
        if isinstance(step.event, m.ReasonAdded):
            assert step.after.reasons == step.state.reasons | {step.event.reason}
        if isinstance(step.event, m.HostLost):
            assert step.after.reasons == step.state.reasons | {Closure.HOST_SESSION}
            assert step.after.doubted_at_ms == step.event.now_ms
        if isinstance(step.event, m.Doubted) and step.state.generation is not None:
            assert step.after.reasons == step.state.reasons | {Closure.UNPROVEN}
            assert step.after.doubted_at_ms == step.event.now_ms
        elif isinstance(step.event, m.Doubted):
            assert step.after == step.state, "there is no run to doubt, and none to look at"
        if new_session:
            assert step.after.generation is None or Closure.UNPROVEN in step.after.reasons
            assert step.after.session == step.event.session
        if isinstance(step.event, SessionBegan) and not new_session:
            assert (step.after, step.orders) == (step.state, ())


# --- stories --------------------------------------------------------------------------------------


def test_it_opens_when_ready_is_proven_and_stored():
    """W5."""
    story: list[tuple[Fact, list[Any]]] = [
        (m.ReadyProven(now_ms=Millis(5), generation=Generation(2), probed_at_ms=Millis(4)), [x.ConfirmStored]),
        (m.ReadyStored(now_ms=Millis(6), generation=Generation(1)), []),
        (m.ReadyStored(now_ms=Millis(7), generation=Generation(2)), [x.GateOpened]),
    ]
    play(m.GATE, closed(), story, ends=GatePhase.OPEN)


def test_a_passing_probe_does_not_open_a_gate_that_a_switch_holds():
    """Lifecycle 9."""
    story: list[tuple[Fact, list[Any]]] = [
        (m.HostLost(now_ms=Millis(200)), [x.GateClosed]),
        (m.ReasonAdded(now_ms=Millis(210), reason=Closure.SWITCH), []),
        (proven(Millis(300)), []),
        (m.ReasonRemoved(now_ms=Millis(400), reason=Closure.SWITCH), [x.GateOpened]),
    ]
    play(m.GATE, opened(), story, ends=GatePhase.OPEN)


def test_an_engine_that_answers_nothing_gets_nothing_new_until_it_is_seen_to_answer():
    story: list[tuple[Fact, list[Any]]] = [
        (m.Doubted(now_ms=Millis(200)), [x.GateClosed]),
        (proven(Millis(300), at_ms=Millis(199)), []),
        (proven(Millis(400)), [x.GateOpened]),
    ]
    play(m.GATE, opened(), story, ends=GatePhase.OPEN)


def test_a_refused_park_never_reopens_what_a_restart_closed():
    """42."""
    story: list[tuple[Fact, list[Any]]] = [
        (m.ReasonAdded(now_ms=Millis(200), reason=Closure.PARK), [x.GateClosed]),
        (SessionBegan(now_ms=Millis(300), session=2), []),
        (m.ReasonRemoved(now_ms=Millis(400), reason=Closure.PARK), []),
        (proven(Millis(500), at_ms=Millis(299)), []),
        (proven(Millis(600)), [x.GateOpened]),
    ]
    play(m.GATE, opened(), story, ends=GatePhase.OPEN)


def test_a_readiness_that_was_proven_before_the_doubt_waits_for_a_fresh_proof():
    """A launch's answer that was on its way when the controller restarted, or the host's session ended."""
    for doubt in (SessionBegan(now_ms=Millis(200), session=2), m.HostLost(now_ms=Millis(200))):
        story: list[tuple[Fact, list[Any]]] = [
            (doubt, []),
            (m.ReadyProven(now_ms=Millis(300), generation=Generation(2), probed_at_ms=Millis(199)), [x.ConfirmStored]),
            (m.ReadyStored(now_ms=Millis(301), generation=Generation(2)), []),
            (proven(Millis(400)), [x.GateOpened]),
        ]
        play(m.GATE, closed(), story, ends=GatePhase.OPEN)


def test_a_stop_and_an_exit_are_never_taken_back():
    for reason in (Closure.STOP, Closure.ENGINE_EXIT):
        state, _ = m.GATE.step(opened(), m.ReasonAdded(now_ms=Millis(200), reason=reason))
        assert m.GATE.step(state, m.ReasonRemoved(now_ms=Millis(300), reason=reason)) == (state, ())


def test_a_closed_gate_without_a_reason_stops_the_machine():
    torn = attrs.evolve(opened(), phase=GatePhase.CLOSED, reasons=frozenset({Closure.STOP}), generation=None)
    strange = attrs.evolve(torn, generation=Generation(2), reasons=frozenset(), proven_in=None)
    with pytest.raises(InvariantBroken):
        m.GATE.step(strange, m.ReasonRemoved(now_ms=LATE, reason=Closure.PARK))
