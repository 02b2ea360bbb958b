"""Group and member as far as their own tables go: one falls, all end; nobody's proof releases another."""

from __future__ import annotations

from typing import Any

import pytest
from explore import assert_total, explore, play

from capyctl.fsm import group as g
from capyctl.fsm import member as m
from capyctl.fsm.group import Phase
from capyctl.fsm.proofs import Back, Canary, Gone, Quiet, Resident, SameEngine, Unsent, Usable
from capyctl.fsm.table import Refused
from capyctl.fsm.types import (
    Bytes,
    DeploymentId,
    Generation,
    HostId,
    Incarnation,
    Lane,
    Millis,
    ProcessIdentity,
    Role,
    StopKind,
)
from capyctl.fsm.types import Phase as Charge

ID = DeploymentId("01GROUP")
RUN = Incarnation(Lane(ID, 0), Generation(4))
OLD = Incarnation(Lane(ID, 0), Generation(3))
NOW = Millis(10)
API = ProcessIdentity(10, "boot", 1)
USABLE = Usable(incarnation=RUN, answer_chars=1, probed_at_ms=NOW)
CANARY = Canary(incarnation=RUN, expected="8 tokens", actual="8 tokens")
QUIET = Quiet(
    incarnation=RUN, gate_closed_at_ms=Millis(1), router_in_flight=0, running=0, waiting=0, read_at_ms=Millis(2)
)


def gone(run: Incarnation = RUN) -> Gone:
    return Gone(incarnation=run, processes=(API,), absent=frozenset({API}), group_empty=True, observed_at_ms=Millis(9))


# --- member ---------------------------------------------------------------------------------------


def named() -> m.State:
    return m.State(incarnation=RUN, rank=1, host=HostId("01HOSTB"))


def resident(run: Incarnation = RUN) -> Resident:
    return Resident(
        incarnation=run,
        resident_bytes=Bytes(5),
        budget_bytes=Bytes(9),
        released_at_ms=Millis(1),
        sampled_at_ms=Millis(2),
    )


BACK = Back(
    incarnation=RUN,
    restored_at_ms=Millis(1),
    sampled_at_ms=Millis(2),
    fresh_until_ms=Millis(9),
    recorded_at_ms=Millis(3),
)
SAME = SameEngine(incarnation=RUN, recorded=(API,), alive=frozenset({API}), strangers=0, observed_at_ms=Millis(2))
UNSENT = Unsent(incarnation=RUN, refused_before_sending=True)


def member_alphabet(state: m.State) -> list[m.Event]:
    return [
        m.PlanCommitted(now_ms=NOW),
        m.PrepareAccepted(now_ms=NOW, warnings=("host_tuning_warning:memlock",)),
        m.PlanDropped(now_ms=NOW, proof=UNSENT, reason="rendezvous_port_in_use:25000"),
        m.LaunchSent(now_ms=NOW),
        m.Launched(now_ms=NOW, processes=(API,)),
        *(m.LaunchFailed(now_ms=NOW, proof=gone(run), reason="exit 1") for run in (RUN, OLD)),
        *(m.EngineGone(now_ms=NOW, role=role, reason="killed") for role in Role),
        m.GroupReady(now_ms=NOW, usable=USABLE),
        m.ReleaseSent(now_ms=NOW),
        *(m.ResidencyProven(now_ms=NOW, proof=resident(run)) for run in (RUN, OLD)),
        m.ParkUnproven(now_ms=NOW, reason="silent"),
        m.WakeSent(now_ms=NOW),
        m.Woken(now_ms=NOW, back=BACK, usable=USABLE),
        m.HostLost(now_ms=NOW),
        m.HostBack(now_ms=NOW, proof=SAME),
        m.GroupStops(now_ms=NOW),
        m.TerminateUnproven(now_ms=NOW, reason="alive"),
        *(m.ProvenGone(now_ms=NOW, proof=gone(run)) for run in (RUN, OLD)),
    ]


def test_every_event_of_a_member_is_decided_once_and_every_row_fires():
    assert_total(m.MEMBER, [named()], member_alphabet)


def test_a_member_s_charge_moves_with_its_orders_and_falls_on_its_own_proof_alone():
    """Invariants 3, 4 and G6, on every life."""
    for step in explore(m.MEMBER, [named()], member_alphabet):
        raised = [order.phase for order in step.orders if isinstance(order, m.RaiseCharge)]
        lowered = [order for order in step.orders if isinstance(order, m.SettleDown)]
        told = raised + [order.phase for order in lowered]
        assert told == ([step.after.charged] if step.after.charged is not step.state.charged else [])
        assert len(told) <= 1
        for order in lowered:
            assert order.proof.incarnation == RUN
            assert order.phase in (Charge.NONE, Charge.READY, Charge.PARKED)
            allowed = {Charge.NONE: Gone | Unsent, Charge.READY: Usable, Charge.PARKED: Resident}[order.phase]
            assert isinstance(order.proof, allowed)
        if Charge.NONE in told:
            launched = step.state.phase not in (m.Phase.RESERVED, m.Phase.PREPARED)
            assert any(isinstance(order.proof, Gone) for order in lowered) == launched


def test_what_is_said_of_another_run_or_a_helper_changes_nothing():
    """Invariants 20 and 22."""
    for step in explore(m.MEMBER, [named()], member_alphabet):
        proof = getattr(step.event, "proof", None)
        stranger = proof is not None and proof.incarnation != RUN
        helper = isinstance(step.event, m.EngineGone) and step.event.role is Role.HELPER
        if stranger or helper:
            assert step.after == step.state
            assert step.row.ignored or step.row.code == "internal"


@pytest.mark.parametrize(
    "event",
    [
        m.LaunchFailed(now_ms=NOW, proof=gone(), reason="exit 1"),
        m.ProvenGone(now_ms=NOW, proof=gone()),
        m.EngineGone(now_ms=NOW, role=Role.API, reason="exit 1"),
    ],
)
def test_a_member_whose_launch_ends_tells_its_group_and_keeps_its_charge(event: m.Event):
    state = named()
    for step in (m.PlanCommitted(now_ms=NOW), m.PrepareAccepted(now_ms=NOW), m.LaunchSent(now_ms=NOW)):
        state, _ = m.step(state, step)
    failed, orders = m.step(state, event)
    assert (failed.phase, failed.charged) == (m.Phase.FAILED, Charge.COLD)
    assert [order.code for order in orders] == ["group_member_failed"]


def test_a_member_never_serves_again_once_its_group_stops():
    """Invariant 52."""
    for step in explore(m.MEMBER, [named()], member_alphabet):
        if step.state.group_stops:
            assert step.after.phase in (m.Phase.TERMINATING, m.Phase.UNCERTAIN, m.Phase.SETTLED)


def launched() -> m.State:
    state = named()
    for event in (
        m.PlanCommitted(now_ms=NOW),
        m.PrepareAccepted(now_ms=NOW),
        m.LaunchSent(now_ms=NOW),
        m.Launched(now_ms=NOW, processes=(API,)),
        m.GroupReady(now_ms=NOW, usable=USABLE),
    ):
        state, _ = m.step(state, event)
    return state


def test_a_member_parks_and_wakes_with_its_group():
    end = play(
        m.MEMBER,
        launched(),
        [
            (m.ReleaseSent(now_ms=NOW), [m.RaiseCharge(incarnation=RUN, rank=1, phase=Charge.PARKING)]),
            (m.ResidencyProven(now_ms=NOW, proof=resident()), [m.SettleDown]),
            (m.WakeSent(now_ms=NOW), [m.RaiseCharge]),
            (
                m.Woken(now_ms=NOW, back=BACK, usable=USABLE),
                [m.SettleDown(incarnation=RUN, rank=1, phase=Charge.READY, proof=USABLE)],
            ),
        ],
        ends=m.Phase.LAUNCHED,
    )
    assert end.charged is Charge.READY


@pytest.mark.parametrize(
    ("phase", "way"),
    [
        (m.Phase.LAUNCHED, []),
        (m.Phase.PARKING, [m.ReleaseSent(now_ms=NOW)]),
        (m.Phase.PARKED, [m.ReleaseSent(now_ms=NOW), m.ResidencyProven(now_ms=NOW, proof=resident())]),
        (
            m.Phase.WAKING,
            [m.ReleaseSent(now_ms=NOW), m.ResidencyProven(now_ms=NOW, proof=resident()), m.WakeSent(now_ms=NOW)],
        ),
    ],
)
def test_a_host_that_comes_back_finds_its_member_as_it_was(phase: m.Phase, way: list[m.Event]):
    state = launched()
    for event in way:
        state, _ = m.step(state, event)
    assert state.phase is phase
    lost, orders = m.step(state, m.HostLost(now_ms=NOW))
    assert (lost.phase, lost.charged) == (m.Phase.UNCERTAIN, state.charged)
    assert [order.code for order in orders] == ["group_member_uncertain"]
    assert m.step(lost, m.HostBack(now_ms=NOW, proof=SAME)) == (state, ())
    stopping, _ = m.step(lost, m.GroupStops(now_ms=NOW))
    ended, orders = m.step(stopping, m.HostBack(now_ms=NOW, proof=SAME))
    assert ended.phase is m.Phase.TERMINATING
    assert orders == (m.SendTerminate(incarnation=RUN, rank=1, processes=(API,)),)


def test_a_member_that_failed_before_its_host_was_lost_is_ended_when_it_is_back():
    failed, orders = m.step(launched(), m.EngineGone(now_ms=NOW, role=Role.WORKER, reason="exit 9"))
    assert [order.code for order in orders] == ["group_member_failed"]
    lost, _ = m.step(failed, m.HostLost(now_ms=NOW))
    assert m.step(lost, m.HostBack(now_ms=NOW, proof=SAME))[0].phase is m.Phase.TERMINATING


def test_an_unproven_end_keeps_the_charge_until_everything_is_gone():
    stopping, _ = m.step(launched(), m.GroupStops(now_ms=NOW))
    doubt, orders = m.step(stopping, m.TerminateUnproven(now_ms=NOW, reason="a child holds the device"))
    assert (doubt.phase, doubt.charged, orders) == (m.Phase.UNCERTAIN, Charge.READY, ())
    assert m.step(doubt, m.ProvenGone(now_ms=NOW, proof=gone(OLD))) == (doubt, ())
    assert m.step(doubt, m.ProvenGone(now_ms=NOW, proof=gone()))[0].charged is Charge.NONE


# --- group ----------------------------------------------------------------------------------------


def idle(size: int = 2, parks: bool = True) -> g.State:
    return g.State(deployment=ID, size=size, parks=parks)


def group_alphabet(state: g.State) -> list[g.Event]:
    ranks = range(state.size)
    return [
        *(g.Activated(now_ms=NOW, attempts=attempts) for attempts in (0, 1)),
        *(g.DigestsCompared(now_ms=NOW, equal=equal) for equal in (True, False)),
        g.NotReserved(now_ms=NOW, code="insufficient_resources", reason="host b is short"),
        g.PlanCommitted(now_ms=NOW, generation=Generation(4), port=25_000),
        g.PrepareSent(now_ms=NOW),
        *(kind(now_ms=NOW, rank=rank) for kind in (g.MemberPrepared, g.MemberLaunched) for rank in ranks),
        g.PrepareRefused(now_ms=NOW, rank=1, code="peer_address_not_local", reason="no such address"),
        g.HeadProven(now_ms=NOW, usable=USABLE),
        g.MemberFailed(now_ms=NOW, rank=1, code="group_member_failed", reason="exit 1"),
        g.ProbeFailed(now_ms=NOW, code="group_stalled", reason="no answer"),
        g.ParkAsked(now_ms=NOW),
        g.Drained(now_ms=NOW, quiet=QUIET),
        g.DrainExpired(now_ms=NOW),
        *(kind(now_ms=NOW, rank=rank) for kind in (g.MemberParked, g.MemberBack) for rank in ranks),
        g.WakeAsked(now_ms=NOW),
        g.CanaryRight(now_ms=NOW, canary=CANARY, usable=USABLE),
        g.CanaryWrong(now_ms=NOW, reason="7 of 8 tokens"),
        g.StopAsked(now_ms=NOW, kind=StopKind.OPERATOR),
        *(kind(now_ms=NOW, rank=rank) for kind in (g.MemberUncertain, g.MemberKnown) for rank in ranks),
        *(g.MemberSettled(now_ms=NOW, rank=rank) for rank in ranks),
    ]


STARTS = [idle(), idle(parks=False)]


def test_every_event_of_a_group_is_decided_once_and_every_row_fires():
    assert_total(g.GROUP, STARTS, group_alphabet)


def test_the_route_is_open_only_while_ready_and_reachable_and_never_again_after_a_failure():
    """Invariants 52, G4 and G5, on every life."""

    def route(memory: tuple[bool, bool], step: Any) -> tuple[bool, bool]:
        is_open, fell = memory
        if step.state.generation is None:
            fell = False
        fell = fell or (isinstance(step.event, g.MemberFailed) and step.state.phase in g.WITH_LAUNCH)
        for order in step.orders:
            if isinstance(order, g.OpenRoute):
                assert not fell
                is_open = True
            if isinstance(order, g.CloseRoute):
                is_open = False
        return is_open, fell

    for step in explore(g.GROUP, STARTS, group_alphabet, memory=(False, False), fold=route):
        is_open, _ = route(step.memory, step)
        assert is_open == (step.after.phase is Phase.READY and 0 not in step.after.uncertain)


def test_a_plan_is_all_or_nothing_and_its_port_is_free_only_when_all_are_settled():
    """Invariants 51 and 53, G1, G2, G7, G8."""

    def settled(memory: tuple[frozenset[int], frozenset[int]], step: Any) -> tuple[frozenset[int], frozenset[int]]:
        prepared, gone_ranks = memory
        if isinstance(step.event, g.PlanCommitted) and step.after.phase is Phase.RESERVED:
            return frozenset(), frozenset()
        if isinstance(step.event, g.MemberPrepared) and step.state.phase is Phase.PREPARING:
            prepared |= {step.event.rank}
        if isinstance(step.event, g.MemberSettled) and step.state.phase in g.ENDING:
            gone_ranks |= {step.event.rank}
        return prepared, gone_ranks

    nothing: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
    for step in explore(g.GROUP, STARTS, group_alphabet, memory=nothing, fold=settled):
        prepared, gone_ranks = settled(step.memory, step)
        kinds = [type(order) for order in step.orders]
        everybody = frozenset(range(step.state.size))
        if g.SendPrepare in kinds:
            assert isinstance(step.event, g.PlanCommitted)
        if g.SendLaunch in kinds:
            assert prepared == everybody
        if g.FreePort in kinds:
            assert gone_ranks == everybody
        if g.DropPlan in kinds:
            assert step.state.phase in (Phase.RESERVED, Phase.PREPARING)
        if g.CompareDigests in kinds:
            assert step.state.port is None or gone_ranks == everybody


def to_ready(size: int = 2) -> list[tuple[g.Event, list[Any]]]:
    return [
        (g.Activated(now_ms=NOW, attempts=1), [g.CompareDigests]),
        (g.DigestsCompared(now_ms=NOW, equal=True), [g.CommitPlan]),
        (g.PlanCommitted(now_ms=NOW, generation=Generation(4), port=25_000), [g.SendPrepare]),
        (g.PrepareSent(now_ms=NOW), []),
        *((g.MemberPrepared(now_ms=NOW, rank=rank), []) for rank in range(size - 1)),
        (g.MemberPrepared(now_ms=NOW, rank=size - 1), [g.SendLaunch]),
        *((g.MemberLaunched(now_ms=NOW, rank=rank), []) for rank in range(size)),
        (g.HeadProven(now_ms=NOW, usable=USABLE), [g.OpenRoute, g.Conclude]),
    ]


def test_four_hosts_start_park_and_wake():
    play(
        g.GROUP,
        idle(size=4),
        [
            *to_ready(size=4),
            (g.ParkAsked(now_ms=NOW), [g.CloseRoute]),
            (g.Drained(now_ms=NOW, quiet=QUIET), [g.SendRelease]),
            *((g.MemberParked(now_ms=NOW, rank=rank), []) for rank in range(4)),
            (g.WakeAsked(now_ms=NOW), [g.SendWake]),
            *((g.MemberBack(now_ms=NOW, rank=rank), []) for rank in range(3)),
            (g.CanaryRight(now_ms=NOW, canary=CANARY, usable=USABLE), []),
            (g.MemberBack(now_ms=NOW, rank=3), [g.OpenRoute, g.Conclude]),
        ],
        ends=Phase.READY,
    )


def test_a_worker_that_dies_ends_the_group_and_a_new_plan_follows():
    """The third timeline of the reference (groups 5.3)."""
    play(
        g.GROUP,
        idle(),
        [
            *to_ready(),
            (
                g.MemberFailed(now_ms=NOW, rank=1, code="group_member_failed", reason="exit 9"),
                [g.CloseRoute, g.StopMembers],
            ),
            (g.MemberSettled(now_ms=NOW, rank=1), []),
            (g.MemberSettled(now_ms=NOW, rank=1), []),
            (g.MemberSettled(now_ms=NOW, rank=0), [g.FreePort(deployment=ID, port=25_000), g.CompareDigests]),
            (g.DigestsCompared(now_ms=NOW, equal=False), [g.Conclude]),
        ],
        ends=Phase.IDLE,
    )


def test_attempts_run_out_and_a_stop_is_no_failure():
    spent = play(
        g.GROUP,
        idle(parks=False),
        [
            (g.Activated(now_ms=NOW, attempts=0), [g.CompareDigests]),
            (g.DigestsCompared(now_ms=NOW, equal=True), [g.CommitPlan]),
            (g.PlanCommitted(now_ms=NOW, generation=Generation(4), port=25_000), [g.SendPrepare]),
            (g.PrepareSent(now_ms=NOW), []),
            (g.MemberPrepared(now_ms=NOW, rank=0), []),
            (g.MemberPrepared(now_ms=NOW, rank=1), [g.SendLaunch]),
            (g.ProbeFailed(now_ms=NOW, code="launch_failed", reason="no answer"), [g.StopMembers]),
            (g.MemberSettled(now_ms=NOW, rank=1), []),
            (
                g.MemberSettled(now_ms=NOW, rank=0),
                [g.FreePort, g.Conclude(deployment=ID, code="launch_failed", reason="no answer")],
            ),
        ],
        ends=Phase.FAILED,
    )
    assert g.step(spent, g.Activated(now_ms=NOW, attempts=3))[0].phase is Phase.MATERIALIZING
    ready = play(g.GROUP, idle(), to_ready(), ends=Phase.READY)
    play(
        g.GROUP,
        ready,
        [
            (g.StopAsked(now_ms=NOW, kind=StopKind.OPERATOR), [g.CloseRoute, g.StopMembers]),
            (g.MemberSettled(now_ms=NOW, rank=0), []),
            (g.MemberSettled(now_ms=NOW, rank=1), [g.FreePort]),
        ],
        ends=Phase.IDLE,
    )


def test_an_unreachable_worker_closes_nothing_and_an_unreachable_head_closes_the_route():
    ready = play(g.GROUP, idle(), to_ready(), ends=Phase.READY)
    play(
        g.GROUP,
        ready,
        [
            (g.MemberUncertain(now_ms=NOW, rank=1), []),
            (g.MemberKnown(now_ms=NOW, rank=1), []),
            (g.MemberKnown(now_ms=NOW, rank=0), []),
            (g.MemberUncertain(now_ms=NOW, rank=0), [g.CloseRoute]),
            (g.MemberKnown(now_ms=NOW, rank=0), [g.OpenRoute]),
            (g.ParkAsked(now_ms=NOW), [g.CloseRoute]),
            (g.MemberUncertain(now_ms=NOW, rank=0), []),
            (g.DrainExpired(now_ms=NOW), []),
            (g.MemberKnown(now_ms=NOW, rank=0), [g.OpenRoute]),
        ],
        ends=Phase.READY,
    )


def test_a_head_that_was_unreachable_is_proven_anew_before_the_route_opens():
    state = play(g.GROUP, idle(), to_ready()[:-2], ends=Phase.LAUNCHING)
    play(
        g.GROUP,
        state,
        [
            (g.HeadProven(now_ms=NOW, usable=USABLE), []),
            (g.MemberUncertain(now_ms=NOW, rank=0), []),
            (g.MemberLaunched(now_ms=NOW, rank=1), []),
            (g.HeadProven(now_ms=NOW, usable=USABLE), [g.OpenRoute, g.Conclude]),
        ],
        ends=Phase.READY,
    )


def test_a_last_report_that_comes_after_the_head_s_proof_opens_the_route():
    state = play(g.GROUP, idle(), to_ready()[:-2], ends=Phase.LAUNCHING)
    play(
        g.GROUP,
        state,
        [
            (g.HeadProven(now_ms=NOW, usable=USABLE), []),
            (g.MemberLaunched(now_ms=NOW, rank=1), [g.OpenRoute, g.Conclude]),
            (g.ParkAsked(now_ms=NOW), [g.CloseRoute]),
            (g.Drained(now_ms=NOW, quiet=QUIET), [g.SendRelease]),
            *((g.MemberParked(now_ms=NOW, rank=rank), []) for rank in range(2)),
            (g.WakeAsked(now_ms=NOW), [g.SendWake]),
            *((g.MemberBack(now_ms=NOW, rank=rank), []) for rank in range(2)),
            (g.CanaryRight(now_ms=NOW, canary=CANARY, usable=USABLE), [g.OpenRoute, g.Conclude]),
        ],
        ends=Phase.READY,
    )


def test_a_group_that_cannot_park_says_so():
    ready = play(g.GROUP, idle(parks=False), to_ready(), ends=Phase.READY)
    assert g.step(ready, g.ParkAsked(now_ms=NOW)) == (
        ready,
        (Refused(code="unsupported_capability", event="ParkAsked"),),
    )


def test_a_wake_that_answers_otherwise_is_never_opened():
    ready = play(g.GROUP, idle(), to_ready(), ends=Phase.READY)
    end = play(
        g.GROUP,
        ready,
        [
            (g.ParkAsked(now_ms=NOW), [g.CloseRoute]),
            (g.Drained(now_ms=NOW, quiet=QUIET), [g.SendRelease]),
            (g.MemberParked(now_ms=NOW, rank=0), []),
            (g.MemberParked(now_ms=NOW, rank=1), []),
            (g.WakeAsked(now_ms=NOW), [g.SendWake]),
            (g.CanaryWrong(now_ms=NOW, reason="7 of 8 tokens"), [g.StopMembers]),
        ],
        ends=Phase.STOPPING,
    )
    assert end.code == "group_wake_mismatch"
