"""The deployment machine: total, true to operators, and never deleting or replacing over something that runs."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from explore import assert_total, explore, play
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from capyctl.fsm import deployment as m
from capyctl.fsm.deployment import Gate, Phase, Wanted
from capyctl.fsm.table import Refused
from capyctl.fsm.types import Activation, DeploymentId, Millis, StopKind

ID = DeploymentId("01DEPLOYMENT")
NOW = Millis(10)
ONE = Wanted()
TWO = Wanted(instances=2)
PARKS = Wanted(instances=2, parks=True)
EXPLICIT = Wanted(activation=Activation.EXPLICIT)
CAP = 3  # revisions explored


def absent() -> m.State:
    return m.State(deployment=ID)


def resolved(revision: int) -> m.RevisionResolved:
    return m.RevisionResolved(now_ms=NOW, revision=revision)


def unusable(revision: int, gate: Gate = Gate.UNUSABLE) -> m.RevisionUnusable:
    code = "checkpoint_mismatch" if gate is Gate.MISMATCH else "checkpoint_unusable"
    return m.RevisionUnusable(now_ms=NOW, revision=revision, gate=gate, code=code, reason=code)


def unmeasurable(revision: int) -> m.RevisionUnmeasurable:
    return m.RevisionUnmeasurable(now_ms=NOW, revision=revision, code="unsafe_file", reason="a link leaves the root")


def revise(revision: int, wanted: Wanted = ONE, **more: Any) -> m.ReviseAsked:
    return m.ReviseAsked(now_ms=NOW, expected_revision=revision, wanted=wanted, **more)


def feed(state: m.State, *events: m.Event) -> m.State:
    for event in events:
        state, _ = m.step(state, event)
    return state


def accepted(wanted: Wanted = ONE) -> m.State:
    return feed(absent(), m.DeployAsked(now_ms=NOW, wanted=wanted))


def active(wanted: Wanted = ONE) -> m.State:
    return feed(accepted(wanted), resolved(1))


def alphabet(state: m.State) -> list[m.Event]:
    now, current, stale = NOW, state.revision, state.revision + 7
    revisions = (
        [revise(stale)]
        if state.revision >= CAP
        else [
            revise(stale),
            *(
                revise(current, wanted, count_only=count_only, live=live, resume=resume)
                for wanted in (ONE, PARKS)
                for count_only in (False, True)
                for live in (False, True)
                for resume in (False, True)
            ),
        ]
    )
    return [
        *(
            m.DeployAsked(now_ms=now, wanted=wanted, published=published, free=free)
            for wanted, published, free in (
                (TWO, True, True),
                (PARKS, True, True),
                (ONE, False, True),
                (ONE, True, False),
                (ONE, False, False),
            )
        ),
        *revisions,
        *(
            kind(now_ms=now, expected_revision=revision)
            for kind in (m.StartAsked, m.StopAsked, m.ParkAsked)
            for revision in (None, current, stale)
        ),
        m.ParkAsked(now_ms=now, resident=True),
        *(kind(now_ms=now, index=index) for kind in (m.InstanceStartAsked, m.InstanceStopAsked) for index in (0, 1, 5)),
        *(m.DeleteAsked(now_ms=now, stop=stop, live=live) for stop in (False, True) for live in (False, True)),
        *(resolved(revision) for revision in (current, stale)),
        *(unusable(revision, gate) for revision in (current, stale) for gate in (Gate.UNUSABLE, Gate.MISMATCH)),
        *(unmeasurable(revision) for revision in (current, stale)),
        m.InstancesSettled(now_ms=now),
        m.InstanceUncertain(now_ms=now, index=0, reason="group did not empty"),
    ]


# --- exploration ----------------------------------------------------------------------------------


def test_every_event_is_decided_once_in_every_reachable_state_and_every_row_fires():
    assert_total(m.DEPLOYMENT, [absent()], alphabet)


def test_a_stale_revision_changes_nothing():
    """Invariant 55."""
    for step in explore(m.DEPLOYMENT, [absent()], alphabet):
        named = getattr(step.event, "expected_revision", None)
        if named is not None and named != step.state.revision:
            assert step.after == step.state
            (order,) = step.orders
            assert isinstance(order, Refused)
            parks_nothing = isinstance(step.event, m.ParkAsked) and step.state.phase in (Phase.ACCEPTED, Phase.REVISING)
            assert order.code == "revision_conflict" or parks_nothing or step.state.phase not in m.KEPT
        told = getattr(step.event, "revision", None)
        if told is not None and told != step.state.revision:
            assert (step.after, step.orders) == (step.state, ())


def test_an_instance_that_is_not_there_is_not_found():
    for step in explore(m.DEPLOYMENT, [absent()], alphabet):
        if isinstance(step.event, m.InstanceStartAsked | m.InstanceStopAsked) and step.state.phase in (
            Phase.ACCEPTED,
            Phase.ACTIVE,
            Phase.UNUSABLE,
        ):
            there = step.event.index < step.state.wanted.instances
            refused = Refused(code="not_found", event=type(step.event).__name__)
            assert (step.orders == (refused,)) != there
            assert there or step.after == step.state


def test_only_an_operator_lifts_an_operator_s_stop():
    """Invariant 38, on every life: and nothing is planned for what an operator stopped."""
    for step in explore(m.DEPLOYMENT, [absent()], alphabet):
        by_operator = isinstance(step.event, m.StartAsked | m.InstanceStartAsked)
        if step.state.suspended and not step.after.suspended:
            assert by_operator
        if not by_operator:
            assert step.state.stopped & set(range(step.after.wanted.instances)) <= step.after.stopped
        for order in step.orders:
            if isinstance(order, m.PlanStart):
                assert not step.after.suspended
                assert not set(order.indices) & step.after.stopped
                assert order.indices


def test_a_record_goes_only_when_nothing_of_it_is_left():
    """Invariant 56."""
    for step in explore(m.DEPLOYMENT, [absent()], alphabet):
        dropped = any(isinstance(order, m.DropRecord) for order in step.orders)
        assert dropped == (step.after.phase is Phase.DELETED and step.state.phase is not Phase.DELETED)
        if dropped:
            settled = isinstance(step.event, m.InstancesSettled) or (
                isinstance(step.event, m.DeleteAsked) and not step.event.live
            )
            assert settled


def test_every_new_revision_is_measured_unless_only_its_count_changed():
    for step in explore(m.DEPLOYMENT, [absent()], alphabet):
        asked = [order.revision for order in step.orders if isinstance(order, m.MeasureCheckpoint)]
        if step.after.revision == step.state.revision:
            assert not asked
        elif any(isinstance(order, m.SetCount) for order in step.orders):
            assert not asked
            assert step.after.gate is Gate.MEASURED
        else:
            assert asked == [step.after.revision]
            assert step.after.revision == step.state.revision + 1
            assert step.after.gate is Gate.PENDING


def test_old_instances_are_gone_before_a_record_counts_as_the_new_revision():
    """A record leaves REVISING only when they settled, or with the record itself."""
    for step in explore(m.DEPLOYMENT, [absent()], alphabet):
        if step.state.phase is Phase.REVISING and step.after.phase is not Phase.REVISING:
            assert isinstance(step.event, m.InstancesSettled | m.DeleteAsked)
        if isinstance(step.event, m.ReviseAsked) and step.event.live and step.after != step.state:
            stopping = [order for order in step.orders if isinstance(order, m.PlanStop)]
            counted = any(isinstance(order, m.SetCount) for order in step.orders)
            assert counted or step.state.phase in (Phase.REVISING, Phase.ACCEPTED) or stopping


def test_a_state_that_cannot_be_stops_the_machine():
    good = active(TWO)
    impossible = [
        attrs.evolve(good, gate=Gate.PENDING),
        attrs.evolve(good, phase=Phase.UNUSABLE),
        attrs.evolve(good, phase=Phase.ACCEPTED),
        attrs.evolve(good, phase=Phase.REVISING, gate=Gate.UNUSABLE),
        attrs.evolve(good, phase=Phase.REVISING, gate=Gate.UNUSABLE, gate_code="nonsense"),
        attrs.evolve(good, gate_code="checkpoint_unusable"),
        attrs.evolve(good, revision=0),
        attrs.evolve(good, stopped=frozenset({2})),
        attrs.evolve(good, resume=True),
        attrs.evolve(good, phase=Phase.REVISING, resume=True, suspended=True),
    ]
    for state in impossible:
        assert not all(claim(state) for claim in m.DEPLOYMENT.invariants), state


# --- stories --------------------------------------------------------------------------------------


def test_a_deployment_is_accepted_measured_and_started():
    play(
        m.DEPLOYMENT,
        absent(),
        [
            (m.DeployAsked(now_ms=NOW, wanted=TWO), [m.MeasureCheckpoint(deployment=ID, revision=1)]),
            (m.StartAsked(now_ms=NOW), [m.PlanStart(deployment=ID, indices=(0, 1))]),
            (resolved(1), []),
            (m.StartAsked(now_ms=NOW, expected_revision=1), [m.PlanStart(deployment=ID, indices=(0, 1))]),
            (m.ParkAsked(now_ms=NOW), [Refused(code="unsupported_capability", event="ParkAsked")]),
        ],
        ends=Phase.ACTIVE,
    )


@pytest.mark.parametrize(
    ("published", "free", "code"),
    [(False, True, "profile_not_published"), (False, False, "profile_not_published"), (True, False, "route_conflict")],
)
def test_what_cannot_be_deployed_leaves_no_record(published: bool, free: bool, code: str):
    state, orders = m.step(absent(), m.DeployAsked(now_ms=NOW, wanted=ONE, published=published, free=free))
    assert state == absent()
    assert orders == (Refused(code=code, event="DeployAsked"),)


def test_a_count_change_restarts_nothing():
    state, orders = m.step(active(ONE), revise(1, TWO, count_only=True, live=True))
    assert (state.phase, state.revision) == (Phase.ACTIVE, 2)
    assert orders == (m.SetCount(deployment=ID, instances=2),)
    stopped, _ = m.step(state, m.InstanceStopAsked(now_ms=NOW, index=1))
    fewer, _ = m.step(stopped, revise(2, ONE, count_only=True, live=True))
    assert fewer.stopped == frozenset()


def test_a_running_deployment_is_replaced_and_starts_again():
    play(
        m.DEPLOYMENT,
        active(TWO),
        [
            (
                revise(1, PARKS, live=True, resume=True),
                [
                    m.PlanStop(deployment=ID, indices=(0, 1), kind=StopKind.REVISION),
                    m.MeasureCheckpoint(deployment=ID, revision=2),
                ],
            ),
            (resolved(1), []),
            (resolved(2), []),
            (m.InstanceUncertain(now_ms=NOW, index=1, reason="alive"), [m.ReportPending]),
            (m.InstancesSettled(now_ms=NOW), [m.PlanStart(deployment=ID, indices=(0, 1))]),
            (m.ParkAsked(now_ms=NOW), [Refused(code="lifecycle_conflict", event="ParkAsked")]),
            (m.ParkAsked(now_ms=NOW, resident=True), [m.PlanPark(deployment=ID)]),
        ],
        ends=Phase.ACTIVE,
    )


@pytest.mark.parametrize(
    ("told", "resume", "ends", "starts"),
    [
        (resolved(2), True, Phase.ACTIVE, True),
        (resolved(2), False, Phase.ACTIVE, False),
        (None, True, Phase.ACCEPTED, True),
        (None, False, Phase.ACCEPTED, False),
        (unmeasurable(2), True, Phase.ACCEPTED, False),
        (unusable(2), True, Phase.UNUSABLE, False),
        (unusable(2, Gate.MISMATCH), False, Phase.UNUSABLE, False),
    ],
)
def test_what_follows_a_revision_is_what_was_measured(told: m.Event | None, resume: bool, ends: Phase, starts: bool):
    state = feed(active(), revise(1, live=True, resume=resume), *([told] if told else []))
    state, orders = m.step(state, m.InstancesSettled(now_ms=NOW))
    assert state.phase is ends
    assert any(isinstance(order, m.PlanStart) for order in orders) == starts


def test_a_stop_during_a_revision_means_no_start_after_it_and_a_start_means_one():
    revising = feed(active(), revise(1, live=True, resume=True))
    stopped = feed(revising, m.StopAsked(now_ms=NOW), resolved(2))
    assert m.step(stopped, m.InstancesSettled(now_ms=NOW))[1] == ()
    started = feed(stopped, m.StartAsked(now_ms=NOW))
    assert m.step(started, m.InstancesSettled(now_ms=NOW))[1] == (m.PlanStart(deployment=ID, indices=(0,)),)


def test_a_checkpoint_that_cannot_be_used_refuses_starts_with_its_reason():
    state, orders = m.step(accepted(), unusable(1))
    assert orders == (m.EndWaiters(deployment=ID, code="checkpoint_unusable", reason="checkpoint_unusable"),)
    for event in (m.StartAsked(now_ms=NOW), m.InstanceStartAsked(now_ms=NOW, index=0)):
        after, orders = m.step(state, event)
        assert after == state
        assert orders == (Refused(code="checkpoint_unusable", event=type(event).__name__),)
    assert feed(state, resolved(1)) == state, "only a new revision changes what is asked"
    assert feed(state, revise(1)).phase is Phase.ACCEPTED


def test_files_that_changed_refuse_starts_until_they_are_back():
    state = feed(active(PARKS), unusable(1, Gate.MISMATCH))
    assert state.phase is Phase.UNUSABLE
    assert m.step(state, m.ParkAsked(now_ms=NOW, resident=True))[1] == (m.PlanPark(deployment=ID),)
    assert feed(state, resolved(1)).phase is Phase.ACTIVE


def test_a_checkpoint_that_cannot_be_measured_ends_its_waiters_at_once():
    state, orders = m.step(accepted(), unmeasurable(1))
    assert state.phase is Phase.ACCEPTED
    assert orders == (m.EndWaiters(deployment=ID, code="unsafe_file", reason="a link leaves the root"),)
    assert m.step(state, m.StartAsked(now_ms=NOW))[1] == (Refused(code="unsafe_file", event="StartAsked"),)
    assert m.step(state, m.InstanceStartAsked(now_ms=NOW, index=0))[1] == (
        Refused(code="unsafe_file", event="InstanceStartAsked"),
    )
    assert feed(state, resolved(1)).phase is Phase.ACTIVE


def test_starting_one_instance_of_a_stopped_deployment_leaves_the_others_stopped():
    state = feed(active(TWO), m.StopAsked(now_ms=NOW), m.InstanceStartAsked(now_ms=NOW, index=1))
    assert (state.suspended, state.stopped) == (False, frozenset({0}))
    assert not m.may_start(state, 0, by_operator=False)
    assert m.may_start(state, 1, by_operator=False)


def test_stopping_the_last_instance_is_stopping_the_deployment():
    some, orders = m.step(active(TWO), m.InstanceStopAsked(now_ms=NOW, index=0))
    assert orders == (m.PlanStop(deployment=ID, indices=(0,), kind=StopKind.INSTANCE),)
    assert m.unavailable_reason(some, served=False) is None
    last, orders = m.step(some, m.InstanceStopAsked(now_ms=NOW, index=1))
    assert [type(order) for order in orders] == [m.PlanStop, m.EndWaiters]
    assert m.unavailable_reason(last, served=False) == "deployment_stopped"


def test_a_delete_waits_for_proof_and_can_be_asked_again():
    play(
        m.DEPLOYMENT,
        active(),
        [
            (m.DeleteAsked(now_ms=NOW, live=True), [Refused(code="delete_requires_cleanup", event="DeleteAsked")]),
            (
                m.DeleteAsked(now_ms=NOW, live=True, stop=True),
                [m.PlanStop(deployment=ID, indices=(0,), kind=StopKind.DELETE), m.EndWaiters],
            ),
            (m.DeleteAsked(now_ms=NOW, live=True), [Refused(code="delete_requires_cleanup", event="DeleteAsked")]),
            (m.InstanceUncertain(now_ms=NOW, index=0, reason="alive"), [m.ReportPending]),
            (m.StartAsked(now_ms=NOW), [Refused(code="lifecycle_conflict", event="StartAsked")]),
            (m.DeleteAsked(now_ms=NOW, live=True, stop=True), [m.PlanStop]),
            (m.InstancesSettled(now_ms=NOW), [m.DropRecord(deployment=ID)]),
        ],
        ends=Phase.DELETED,
    )
    assert feed(active(), m.DeleteAsked(now_ms=NOW)).phase is Phase.DELETED


@pytest.mark.parametrize(
    ("state", "served", "reason"),
    [
        (active(), False, None),
        (active(), True, None),
        (feed(active(), m.StopAsked(now_ms=NOW)), False, "deployment_stopped"),
        (feed(active(), m.StopAsked(now_ms=NOW)), True, "deployment_stopped"),
        (feed(active(EXPLICIT), m.StopAsked(now_ms=NOW)), False, "deployment_stopped"),
        (active(EXPLICIT), False, "deployment_inactive"),
        (active(EXPLICIT), True, None),
        (accepted(), False, None),
        (feed(accepted(), unusable(1)), False, "checkpoint_unusable"),
        (feed(accepted(), unmeasurable(1)), False, "unsafe_file"),
        (feed(active(), unusable(1, Gate.MISMATCH)), False, "checkpoint_mismatch"),
        (feed(active(), unusable(1, Gate.MISMATCH)), True, None),
        (feed(active(), m.DeleteAsked(now_ms=NOW)), False, "not_found"),
        (absent(), False, "not_found"),
    ],
)
def test_a_request_is_refused_at_once_for_the_right_reason(state: m.State, served: bool, reason: str | None):
    """Lifecycle 3.6."""
    assert m.unavailable_reason(state, served=served) == reason


def test_who_may_start_an_instance():
    """Invariants 38 and 39."""
    assert m.may_start(active(), 0, by_operator=False)
    assert not m.may_start(active(EXPLICIT), 0, by_operator=False)
    assert m.may_start(active(EXPLICIT), 0, by_operator=True)
    assert not m.may_start(feed(active(), m.StopAsked(now_ms=NOW)), 0, by_operator=False)
    for waiting in (accepted(), feed(accepted(), unusable(1)), feed(active(), revise(1, live=True))):
        assert not m.may_start(waiting, 0, by_operator=True)


# --- a model of an operator, beside the machine -----------------------------------------------------


class Operator(RuleBasedStateMachine):
    """Commands in any order. The model remembers the last word on each instance, and what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.state = accepted(TWO)
        self.count = 2
        self.word: dict[int, str] = {}  # "stop" or "start": an operator's last word on an instance
        self.live = False
        self.gone = False

    def tell(self, event: m.Event) -> bool:
        """Whether it was taken; starts and ends what the orders say."""
        self.state, orders = m.step(self.state, event)
        for order in orders:
            match order:
                case m.PlanStart():
                    assert all(self.word.get(index) != "stop" for index in order.indices)
                    self.live = True
                case m.DropRecord():
                    assert not self.live
                    self.gone = True
        return not any(isinstance(order, Refused) for order in orders)

    @rule()
    def start(self) -> None:
        before = dict(self.word)
        self.word = {}
        if not self.tell(m.StartAsked(now_ms=NOW)):
            self.word = before

    @rule()
    def stop(self) -> None:
        if self.tell(m.StopAsked(now_ms=NOW)):
            self.word = dict.fromkeys(range(self.count), "stop")

    @rule(index=st.integers(0, 2))
    def start_one(self, index: int) -> None:
        before = self.word.pop(index, None)
        if not self.tell(m.InstanceStartAsked(now_ms=NOW, index=index)) and before is not None:
            self.word[index] = before

    @rule(index=st.integers(0, 2))
    def stop_one(self, index: int) -> None:
        if self.tell(m.InstanceStopAsked(now_ms=NOW, index=index)):
            self.word[index] = "stop"

    @rule(good=st.booleans(), current=st.booleans())
    def measure(self, good: bool, current: bool) -> None:
        revision = self.state.revision if current else self.state.revision + 1
        self.tell(resolved(revision) if good else unusable(revision, Gate.MISMATCH))

    @rule(current=st.booleans(), resume=st.booleans())
    def revise(self, current: bool, resume: bool) -> None:
        revision = self.state.revision if current else self.state.revision + 1
        taken = self.tell(revise(revision, TWO, live=self.live, resume=resume))
        assert not (taken and not current)

    @rule()
    def everything_ends(self) -> None:
        if self.live:
            self.live = False
            self.tell(m.InstancesSettled(now_ms=NOW))

    @rule(stop=st.booleans(), sure=st.integers(0, 5))
    def delete(self, stop: bool, sure: int) -> None:
        if sure == 0:
            self.tell(m.DeleteAsked(now_ms=NOW, stop=stop, live=self.live))

    @invariant()
    def an_operator_s_word_stands(self) -> None:
        """Invariant 38."""
        if self.gone or self.state.phase in (Phase.DELETING, Phase.DELETED):
            return
        stopped = all(self.word.get(index) == "stop" for index in range(self.count))
        assert (m.unavailable_reason(self.state, served=True) == "deployment_stopped") == stopped
        for index in range(self.count):
            if self.word.get(index) == "stop":
                assert not m.may_start(self.state, index, by_operator=False)


TestOperator = Operator.TestCase
TestOperator.settings = settings(
    max_examples=200, stateful_step_count=30, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
