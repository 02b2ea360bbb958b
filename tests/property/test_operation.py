"""The operation machine: total, honest about each instance, and never expired over an armed step."""

from __future__ import annotations

from typing import Any

import pytest
from explore import assert_total, explore, play
from hypothesis import given, settings
from hypothesis import strategies as st

from capyctl.fsm import operation as m
from capyctl.fsm.operation import Kind, Phase, Result, Seen
from capyctl.fsm.table import Refused
from capyctl.fsm.types import DeploymentId, Millis, OperationId, Origin, SwitchId

OPERATION = OperationId("01OPERATION")
LATER = OperationId("01LATER")


def proposed(kind: Kind = Kind.START) -> m.State:
    return m.State(operation=OPERATION, deployment=DeploymentId("01D"), kind=kind, origin=Origin.OPERATOR)


def submitted(indices: tuple[int, ...] = (0, 1), **more: Any) -> m.Submitted:
    return m.Submitted(now_ms=Millis(10), indices=indices, **more)


def accepted(kind: Kind = Kind.START, indices: tuple[int, ...] = (0, 1), deadline: int | None = 50) -> m.State:
    event = submitted(indices, deadline_ms=None if deadline is None else Millis(deadline))
    return m.step(proposed(kind), event)[0]


def report(index: int, result: Result, code: str | None = None) -> m.TargetReported:
    return m.TargetReported(now_ms=Millis(30), index=index, result=result, code=code, reason=code or "")


def alphabet(state: m.State) -> list[m.Event]:
    facts = [
        {"seen": Seen.SAME},
        {"seen": Seen.OTHER},
        {"stop_runs": True},
        {"start_open": True},
        {"stop_runs": True, "start_open": True},
        {"conflict": True},
        {"conflict": True, "start_open": True},
        {},
    ]
    now = Millis(20)
    return [
        *(submitted(deadline_ms=Millis(50), **fact) for fact in facts),
        submitted((), deadline_ms=Millis(50)),
        *([m.Joined(now_ms=now)] if state.joined < 2 else []),
        *(m.StepArmed(now_ms=now, index=index) for index in (0, 1, 9)),
        *(m.Waited(now_ms=now, index=index, code="insufficient_resources", reason="short") for index in (0, 9)),
        m.SwitchOpened(now_ms=now, switch=SwitchId("01S")),
        *(report(index, result) for index in (0, 1, 9) for result in Result),
        report(0, Result.FAILED, "launch_failed"),
        m.Replaced(now_ms=now, by=LATER),
        m.Ticked(now_ms=Millis(49)),
        m.Ticked(now_ms=Millis(50)),
    ]


def test_every_event_is_decided_once_in_every_reachable_state_and_every_row_fires():
    assert_total(m.OPERATION, [proposed(kind) for kind in Kind], alphabet)


def test_a_known_outcome_stands_and_an_end_is_told_once():
    def conclusions(count: int, step: Any) -> int:
        return count + sum(isinstance(order, m.Conclude) for order in step.orders)

    for step in explore(m.OPERATION, [proposed()], alphabet, memory=0, fold=conclusions):
        before = {target.index: target.result for target in step.state.targets}
        for target in step.after.targets:
            was = before.get(target.index, Result.PENDING)
            assert was in (Result.PENDING, Result.UNKNOWN) or target.result is was
            assert not (was is Result.UNKNOWN and target.result is Result.PENDING)
        assert conclusions(step.memory, step) == (step.after.phase in m.ENDED)
        for order in step.orders:
            if isinstance(order, m.Conclude):
                assert (order.phase, order.code) == (step.after.phase, step.after.code)


def test_what_is_said_of_another_instance_changes_nothing():
    for step in explore(m.OPERATION, [proposed()], alphabet):
        if isinstance(step.event, m.StepArmed | m.Waited | m.TargetReported) and step.state.phase in m.OPEN:
            results = {target.index: target.result for target in step.state.targets}
            if isinstance(step.event, m.TargetReported):
                old = results.get(step.event.index, Result.MET) in (Result.MET, Result.FAILED)
            else:
                old = results.get(step.event.index) is not Result.PENDING
            assert not old or (step.after, step.orders) == (step.state, ())


def test_nothing_armed_is_ever_forgotten():
    """Plans are dropped only while no step was armed: time and a stop prove nothing about a step under way."""

    def armed(before: bool, step: Any) -> bool:
        return before or step.after.phase is Phase.RUNNING

    for step in explore(m.OPERATION, [proposed()], alphabet, memory=False, fold=armed):
        if any(isinstance(order, m.DropPlans) for order in step.orders):
            assert not step.memory
            assert step.state.phase is Phase.ACCEPTED


@pytest.mark.parametrize(
    ("kind", "facts", "answer"),
    [
        (Kind.START, {"seen": Seen.SAME}, m.ReplayReceipt(operation=OPERATION)),
        (Kind.START, {"seen": Seen.OTHER}, Refused(code="idempotency_conflict", event="Submitted")),
        (Kind.START, {"stop_runs": True}, Refused(code="still_stopping", event="Submitted")),
        (Kind.START, {"stop_runs": True, "start_open": True}, Refused(code="still_stopping", event="Submitted")),
        (Kind.START, {"start_open": True}, m.JoinOpen(operation=OPERATION)),
        (Kind.INITIALIZE, {"start_open": True}, m.JoinOpen(operation=OPERATION)),
        (Kind.START, {"start_open": True, "conflict": True}, m.JoinOpen(operation=OPERATION)),
        (Kind.PARK, {"conflict": True}, Refused(code="lifecycle_conflict", event="Submitted")),
        (Kind.STOP, {"start_open": True}, m.GiveReceipt(operation=OPERATION)),
        (Kind.STOP, {"stop_runs": True}, m.GiveReceipt(operation=OPERATION)),
        (Kind.START, {}, m.GiveReceipt(operation=OPERATION)),
    ],
)
def test_a_command_is_answered_by_what_it_meets(kind: Kind, facts: dict[str, Any], answer: Any):
    """Invariants 50 and 54."""
    state, orders = m.step(proposed(kind), submitted(**facts))
    assert orders == (answer,)
    assert (state.phase is Phase.ACCEPTED) == isinstance(answer, m.GiveReceipt)


def test_a_stop_of_what_is_stopped_succeeds_at_once():
    state, orders = m.step(proposed(Kind.STOP), submitted(()))
    assert state.phase is Phase.SUCCEEDED
    assert [type(order) for order in orders] == [m.GiveReceipt, m.Conclude]


def test_a_start_of_two_that_half_succeeds_is_partial_and_says_why():
    end = play(
        m.OPERATION,
        accepted(),
        [
            (m.StepArmed(now_ms=Millis(20), index=0), []),
            (m.StepArmed(now_ms=Millis(21), index=1), []),
            (report(0, Result.MET), []),
            (m.Ticked(now_ms=Millis(99)), []),
            (
                report(1, Result.FAILED, "launch_failed"),
                [m.Conclude(operation=OPERATION, phase=Phase.PARTIAL, code="launch_failed", reason="launch_failed")],
            ),
        ],
        ends=Phase.PARTIAL,
    )
    assert [target.result for target in end.targets] == [Result.MET, Result.FAILED]


def test_an_unknown_outcome_keeps_the_operation_open_until_proof():
    play(
        m.OPERATION,
        accepted(indices=(0,)),
        [
            (m.StepArmed(now_ms=Millis(20), index=0), []),
            (report(0, Result.UNKNOWN), []),
            (m.Ticked(now_ms=Millis(9_999)), []),
            (m.Replaced(now_ms=Millis(9_999), by=LATER), [Refused(code="lifecycle_conflict", event="Replaced")]),
            (report(0, Result.UNKNOWN), []),
            (report(0, Result.MET), [m.Conclude(operation=OPERATION, phase=Phase.SUCCEEDED, code=None, reason="")]),
            (report(0, Result.FAILED), []),
        ],
        ends=Phase.SUCCEEDED,
    )


@pytest.mark.parametrize(
    ("kind", "waits", "code"),
    [
        (Kind.START, True, "insufficient_resources"),
        (Kind.START, False, "activation_timeout"),
        (Kind.PARK, False, "operation_failed"),
    ],
)
def test_what_was_never_armed_expires_at_its_deadline_with_what_was_in_the_way(kind: Kind, waits: bool, code: str):
    """Invariant 64."""
    state = accepted(kind)
    assert m.due_at_ms(state) == 50
    if waits:
        state, _ = m.step(
            state,
            m.Waited(now_ms=Millis(20), index=0, code="insufficient_resources", reason="needs 4 GiB, 3 GiB free"),
        )
    assert m.step(state, m.Ticked(now_ms=Millis(49)))[0].phase is Phase.ACCEPTED
    state, orders = m.step(state, m.Ticked(now_ms=Millis(50)))
    assert (state.phase, state.code) == (Phase.EXPIRED, code)
    assert [type(order) for order in orders] == [m.DropPlans, m.Conclude]
    assert m.due_at_ms(state) is None


def test_an_operation_without_a_deadline_waits_for_ever():
    state = accepted(deadline=None)
    assert m.due_at_ms(state) is None
    assert m.step(state, m.Ticked(now_ms=Millis(10**12))) == (state, ())


def test_what_stood_in_the_way_is_forgotten_once_a_step_is_armed():
    state = accepted()
    state, _ = m.step(state, m.Waited(now_ms=Millis(20), index=0, code="insufficient_resources", reason="short"))
    stranger, _ = m.step(state, m.StepArmed(now_ms=Millis(21), index=7))
    assert (stranger.phase, stranger.waiting_code) == (Phase.ACCEPTED, "insufficient_resources")
    state, _ = m.step(state, m.StepArmed(now_ms=Millis(21), index=0))
    assert (state.phase, state.waiting_code) == (Phase.RUNNING, None)


def test_a_stop_supersedes_a_planned_start():
    state, orders = m.step(accepted(), m.Replaced(now_ms=Millis(20), by=LATER))
    assert (state.phase, state.superseded_by) == (Phase.SUPERSEDED, LATER)
    assert [type(order) for order in orders] == [m.DropPlans, m.Conclude]


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from((Result.MET, Result.FAILED, Result.UNKNOWN)), st.booleans()),
        max_size=12,
    )
)
def test_the_end_is_the_sum_of_what_was_told_first(reports: list[tuple[int, Result, bool]]):
    """Against a dictionary: the first known report of each instance counts, in whatever order they come."""
    indices = (0, 1, 2)
    known: dict[int, Result] = {}
    state = accepted(indices=indices, deadline=None)
    for index, result, arm in reports:
        if arm:
            state, _ = m.step(state, m.StepArmed(now_ms=Millis(20), index=index))
        state, _ = m.step(state, report(index, result))
        if index in indices and known.get(index, Result.UNKNOWN) is Result.UNKNOWN and state.phase is not None:
            known[index] = result
        values = [known.get(each) for each in indices]
        if Result.UNKNOWN in values:
            assert state.phase is Phase.UNCERTAIN
        elif None in values:
            assert state.phase in (Phase.ACCEPTED, Phase.RUNNING)
        else:
            met = values.count(Result.MET)
            ends = {3: Phase.SUCCEEDED, 0: Phase.FAILED}.get(met, Phase.PARTIAL)
            assert state.phase is ends
            assert (state.code is None) == (ends is Phase.SUCCEEDED)
