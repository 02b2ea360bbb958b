"""The request machine: total, true on every life, and never freeing a place that an engine still works for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from explore import assert_total, explore
from explore import play as tell
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from capyctl.errors import InvariantBroken
from capyctl.fsm import request as m
from capyctl.fsm.proofs import Aborted, Closed, Gone, Idle, NeverLaunched
from capyctl.fsm.request import Outcome, Phase
from capyctl.fsm.types import DeploymentId, Generation, Incarnation, Lane, Millis, ProcessIdentity, RequestId

DEPLOYMENT = DeploymentId("01DEPLOYMENT")
RUN = Incarnation(Lane(DEPLOYMENT, 0), Generation(7))
OTHER = Incarnation(Lane(DEPLOYMENT, 0), Generation(8))
REQUEST = RequestId("01REQUEST")
DEADLINE = Millis(50)
LLAMA = m.EngineTraits(eof_proves_end=True)
SGLANG = m.EngineTraits(abort_by_id=True)
VLLM = m.EngineTraits()
MUTE = m.EngineTraits(idle_signal=False)
MUTE_ABORT = m.EngineTraits(abort_by_id=True, idle_signal=False)
MUTE_EOF = m.EngineTraits(idle_signal=False, eof_proves_end=True)
ALL_TRAITS = tuple(
    m.EngineTraits(abort_by_id=a, idle_signal=i, eof_proves_end=e)
    for a, i, e in itertools.product((False, True), repeat=3)
)


def arrived(**more: Any) -> m.State:
    return m.State(request=REQUEST, stream=True, arrived_at_ms=Millis(0), deadline_ms=DEADLINE, **more)


def idle(at_ms: int, run: Incarnation = RUN) -> Idle:
    return Idle(incarnation=run, running=0, waiting=0, read_at_ms=Millis(at_ms))


def gone(run: Incarnation = RUN) -> Gone:
    process = ProcessIdentity(4321, "boot", 99)
    return Gone(
        incarnation=run,
        processes=(process,),
        absent=frozenset({process}),
        group_empty=True,
        observed_at_ms=Millis(1),
    )


def aborted(request: RequestId = REQUEST, run: Incarnation = RUN) -> Aborted:
    return Aborted(incarnation=run, request=request, acknowledged_at_ms=Millis(70))


def alphabet(state: m.State) -> list[m.Event]:
    """One of each event, at instants around the deadline (50), the cut (60) and the EOF (62)."""
    now = Millis(60)
    ticks = [m.Ticked(now_ms=Millis(t), places_full=f) for t in (49, 50, 60 + m.EOF_LIMIT_MS) for f in (False, True)]
    places = [m.PlaceGiven(now_ms=now, deployment=DEPLOYMENT, incarnation=RUN, traits=traits) for traits in ALL_TRAITS]
    return [
        m.TurnedAway(now_ms=now, code="queue_full", message="full", retry_after_s=1),
        m.WaitBegun(now_ms=now, deployment=DEPLOYMENT),
        *places,
        m.WaitFailed(now_ms=now, code="activation_failed", message="no"),
        m.Sent(now_ms=now),
        m.NotAccepted(now_ms=now, reason="refused"),
        m.OutputBegun(now_ms=now),
        m.Finished(now_ms=now),
        m.Recorded(now_ms=now),
        m.Rejected(now_ms=now, status=400),
        m.Errored(now_ms=now, reason="500"),
        m.UpstreamLost(now_ms=now, reason="reset"),
        m.ClientGone(now_ms=now, reason="hung up"),
        m.UpstreamEnded(now_ms=now, half_closed_at_ms=Millis(61), eof_at_ms=Millis(62)),
        m.UpstreamEnded(now_ms=now, half_closed_at_ms=Millis(61), eof_at_ms=Millis(60)),
        *(m.IdleRead(now_ms=now, proof=idle(t)) for t in (60, 61, 63)),
        m.IdleRead(now_ms=now, proof=idle(63, OTHER)),
        m.AbortAcknowledged(now_ms=now, proof=aborted()),
        m.AbortAcknowledged(now_ms=now, proof=aborted(run=OTHER)),
        m.AbortAcknowledged(now_ms=now, proof=aborted(RequestId("01OTHER"))),
        m.AbortUnanswered(now_ms=now),
        m.IncarnationGone(now_ms=now, proof=gone()),
        m.IncarnationGone(now_ms=now, proof=gone(OTHER)),
        *ticks,
        m.ControllerRestarted(now_ms=now),
    ]


# --- exploration ----------------------------------------------------------------------------------


def test_every_event_is_decided_once_in_every_reachable_state_and_every_row_fires():
    assert_total(m.REQUEST, [arrived()], alphabet)


def count(held: tuple[int, ...], step: Any) -> tuple[int, ...]:
    """(places, slots, settlements, answers to the client, sent) of one life."""
    places, slots, settled, answered, sent = held
    for order in step.orders:
        places += isinstance(order, m.TakePlace) - isinstance(order, m.FreePlace)
        slots += isinstance(order, m.TakeSlot) - isinstance(order, m.FreeSlot)
        settled += isinstance(order, m.Settle)
        answered += isinstance(order, m.AnswerClient)
    # What the engine itself says reaches the client too: a whole answer, or a whole refusal.
    answered += step.after.phase is Phase.COMPLETING and step.state.phase is not Phase.COMPLETING
    answered += step.after.outcome is Outcome.REJECTED and step.state.outcome is None
    sent += step.after.phase is Phase.DISPATCHED and step.state.phase is not Phase.DISPATCHED
    return places, slots, settled, answered, sent


def test_on_every_life_places_slots_outcomes_and_answers_are_counted_right():
    """Invariants 31 and 35: one outcome, at most one answer, one dispatch, a place where the phase has one."""
    for step in explore(m.REQUEST, [arrived()], alphabet, memory=(0, 0, 0, 0, 0), fold=count):
        places, slots, settled, answered, sent = count(step.memory, step)
        assert places == (step.after.phase in m.PLACED)
        assert slots == (step.after.phase is Phase.QUEUED)
        assert settled == (step.after.phase in m.OVER)
        assert answered <= 1
        assert sent <= 1, "never replayed after acceptance (31, 32)"


def test_a_place_is_freed_only_on_the_proof_that_its_case_allows():
    """Invariants 35 and 37, case by case, over everything reachable."""
    for step in explore(m.REQUEST, [arrived()], alphabet):
        for order in step.orders:
            if not isinstance(order, m.FreePlace):
                continue
            was = step.state
            match order.proof:
                case m.NothingSent():
                    assert was.phase is Phase.ADMITTED
                case m.Delivered():
                    assert was.phase is Phase.COMPLETING
                case m.RejectedWhole():
                    assert was.phase in m.IN_ENGINE
                case Idle() as proof:
                    assert was.begun
                    assert was.cut_at_ms is not None
                    assert proof.read_at_ms > was.cut_at_ms
                    assert proof.incarnation == was.incarnation
                case Closed() as proof:
                    assert not was.begun
                    assert was.traits is not None
                    assert was.traits.eof_proves_end
                    assert proof.idle.read_at_ms > proof.eof_at_ms >= proof.half_closed_at_ms
                case Aborted() as proof:
                    assert (proof.request, proof.incarnation) == (was.request, was.incarnation)
                    assert was.phase in m.CANCELLING
                    assert was.traits is not None
                    assert was.traits.abort_by_id or was.phase is not Phase.CANCEL_ABORT
                case proof:
                    assert proof.incarnation == was.incarnation


def test_the_cancelling_phase_is_what_the_engine_can_prove():
    """Lifecycle 10.2 and the decision on P-CLOSED, for every combination of traits."""
    for traits in ALL_TRAITS:
        for begun, cause in itertools.product((False, True), ("gone", "error", "late")):
            state = sent(traits, begun=begun)
            event: m.Event = {
                "gone": m.ClientGone(now_ms=Millis(60), reason="hung up"),
                "error": m.Errored(now_ms=Millis(60), reason="500"),
                "late": m.Ticked(now_ms=Millis(60)),
            }[cause]
            after, _ = m.step(state, event)
            if cause == "late" and begun:
                assert after.phase is Phase.STREAMING
            elif cause == "error" and not begun:  # an error answer: it was the engine's last word
                assert after.phase is (Phase.CANCEL_IDLE if traits.idle_signal else Phase.CANCEL_STOP)
            elif traits.abort_by_id:
                assert after.phase is Phase.CANCEL_ABORT
            elif begun and traits.idle_signal:
                assert after.phase is Phase.CANCEL_IDLE
            elif not begun and traits.eof_proves_end and traits.idle_signal:
                assert after.phase is Phase.CANCEL_CLOSED
            else:
                assert after.phase is Phase.CANCEL_STOP


def test_what_is_not_proven_over_is_settled_at_the_stop_without_exception():
    """No reachable state that holds a place survives the end of its incarnation."""
    for step in explore(m.REQUEST, [arrived()], alphabet):
        if step.after.phase in m.PLACED:
            after, orders = m.step(step.after, m.IncarnationGone(now_ms=Millis(99), proof=gone()))
            assert after.phase is Phase.SETTLED
            assert any(isinstance(order, m.FreePlace) for order in orders)


def test_a_state_that_cannot_be_stops_the_machine():
    impossible = [
        arrived(phase=Phase.QUEUED, incarnation=RUN, traits=VLLM),
        arrived(phase=Phase.DISPATCHED),
        arrived(phase=Phase.CANCEL_IDLE, incarnation=RUN, traits=VLLM, cut_at_ms=60),
        arrived(phase=Phase.CANCEL_IDLE, incarnation=RUN, traits=MUTE, cut_at_ms=60, begun=True),
        arrived(phase=Phase.CANCEL_CLOSED, incarnation=RUN, traits=VLLM, cut_at_ms=60),
        arrived(phase=Phase.CANCEL_CLOSED, incarnation=RUN, traits=LLAMA, cut_at_ms=60, begun=True),
        arrived(phase=Phase.CANCEL_STOP, incarnation=RUN, traits=VLLM),
        arrived(phase=Phase.STREAMING, incarnation=RUN, traits=VLLM, cut_at_ms=60),
        arrived(phase=Phase.COMPLETING, incarnation=RUN, traits=VLLM),
        arrived(phase=Phase.SETTLED),
        arrived(phase=Phase.QUEUED, outcome=Outcome.OK),
        arrived(phase=Phase.QUEUED, half_closed_at_ms=62, eof_at_ms=61),
    ]
    for state in impossible:
        assert not all(claim(state) for claim in m.REQUEST.invariants), state
    # A step that would leave one such state behind raises instead of going on.
    with pytest.raises(InvariantBroken, match="has a time of its cut"):
        m.step(arrived(phase=Phase.ADMITTED, incarnation=RUN, traits=VLLM, cut_at_ms=60), m.Sent(now_ms=Millis(1)))


# --- stories --------------------------------------------------------------------------------------


def play(state: m.State, script: list[tuple[m.Event, list[Any]]], ends: Phase) -> m.State:
    return tell(m.REQUEST, state, script, ends=ends)


def sent(traits: m.EngineTraits, *, begun: bool = False) -> m.State:
    state, _ = m.step(arrived(), m.PlaceGiven(now_ms=Millis(1), deployment=DEPLOYMENT, incarnation=RUN, traits=traits))
    state, _ = m.step(state, m.Sent(now_ms=Millis(2)))
    if begun:
        state, _ = m.step(state, m.OutputBegun(now_ms=Millis(3)))
    return state


def test_a_request_to_a_ready_model_takes_a_place_and_gives_it_back_after_delivery():
    given = m.PlaceGiven(now_ms=Millis(1), deployment=DEPLOYMENT, incarnation=RUN, traits=LLAMA)
    script = [
        (given, [m.TakePlace, m.Dispatch(request=REQUEST, incarnation=RUN, deadline_ms=DEADLINE)]),
        (m.Sent(now_ms=Millis(2)), []),
        (m.OutputBegun(now_ms=Millis(3)), []),
        (m.Finished(now_ms=Millis(4)), [m.CloseRecord]),
        (
            m.Recorded(now_ms=Millis(5)),
            [
                m.FreePlace(request=REQUEST, incarnation=RUN, proof=m.Delivered(finished_at_ms=Millis(4))),
                m.Settle(request=REQUEST, outcome=Outcome.OK),
            ],
        ),
    ]
    play(arrived(), script, ends=Phase.SETTLED)


def test_a_waiting_request_fails_over_only_while_nothing_was_sent():
    """Invariant 32."""
    given = m.PlaceGiven(now_ms=Millis(1), deployment=DEPLOYMENT, incarnation=RUN, traits=VLLM)
    again = m.PlaceGiven(now_ms=Millis(3), deployment=DEPLOYMENT, incarnation=OTHER, traits=VLLM)
    state = play(
        arrived(),
        [
            (m.WaitBegun(now_ms=Millis(0), deployment=DEPLOYMENT), [m.TakeSlot]),
            (given, [m.FreeSlot, m.TakePlace, m.Dispatch]),
            (m.NotAccepted(now_ms=Millis(2), reason="gate closed"), [m.FreePlace, m.TakeSlot]),
            (again, [m.FreeSlot, m.TakePlace, m.Dispatch]),
            (m.Sent(now_ms=Millis(4)), []),
        ],
        ends=Phase.DISPATCHED,
    )
    lost, orders = m.step(state, m.NotAccepted(now_ms=Millis(5), reason="reset"))
    assert lost.phase is Phase.CANCEL_STOP
    assert orders == (m.AnswerClient(request=REQUEST, code="engine_unreachable", message="reset"),)


def test_an_abandoned_waiter_frees_its_slot_and_nothing_else():
    waiting, _ = m.step(arrived(), m.WaitBegun(now_ms=Millis(0), deployment=DEPLOYMENT))
    state, orders = m.step(waiting, m.ClientGone(now_ms=Millis(9), reason="hung up"))
    assert (state.phase, state.outcome) == (Phase.SETTLED, Outcome.ABANDONED)
    assert orders == (m.FreeSlot(request=REQUEST), m.Settle(request=REQUEST, outcome=Outcome.ABANDONED))


@pytest.mark.parametrize(("full", "code"), [(False, "unavailable"), (True, "queue_full")])
def test_a_waiter_expires_at_its_deadline_and_not_before(full: bool, code: str):
    """Invariant 61, the request's half: control sends the tick."""
    waiting, _ = m.step(arrived(), m.WaitBegun(now_ms=Millis(0), deployment=DEPLOYMENT))
    assert m.due_at_ms(waiting) == DEADLINE
    assert m.step(waiting, m.Ticked(now_ms=Millis(49), places_full=full)) == (waiting, ())
    state, orders = m.step(waiting, m.Ticked(now_ms=DEADLINE, places_full=full))
    assert state.outcome is Outcome.EXPIRED
    assert [order.code for order in orders if isinstance(order, m.AnswerClient)] == [code]
    assert m.due_at_ms(state) is None


def test_on_llama_cpp_a_request_cut_before_its_output_settles_on_eof_and_then_idle():
    """P-CLOSED: half-close, the engine's EOF, an idle reading, in this order."""
    cut_at = Millis(60)
    state = play(
        sent(LLAMA),
        [
            (m.ClientGone(now_ms=cut_at, reason="hung up"), [m.CutUpstream]),
            (m.IdleRead(now_ms=Millis(65), proof=idle(64)), []),
            (m.UpstreamEnded(now_ms=Millis(1062), half_closed_at_ms=Millis(61), eof_at_ms=Millis(1061)), []),
            (m.IdleRead(now_ms=Millis(1063), proof=idle(1000)), []),
            (m.IdleRead(now_ms=Millis(2600), proof=idle(2500)), [m.FreePlace, m.Settle]),
        ],
        ends=Phase.SETTLED,
    )
    assert state.outcome is Outcome.CANCELLED


def test_an_eof_that_never_comes_leaves_the_place_to_the_stop_and_a_late_one_takes_it_back():
    cut_state, _ = m.step(sent(LLAMA), m.ClientGone(now_ms=Millis(60), reason="hung up"))
    due = m.due_at_ms(cut_state)
    assert due == 60 + m.EOF_LIMIT_MS
    assert m.step(cut_state, m.Ticked(now_ms=Millis(due - 1))) == (cut_state, ())
    assert m.step(cut_state, m.Ticked(now_ms=due))[0].phase is Phase.CANCEL_STOP
    play(
        cut_state,
        [
            (m.Ticked(now_ms=due), []),
            (m.IdleRead(now_ms=Millis(due + 2), proof=idle(due + 1)), []),
            (m.UpstreamEnded(now_ms=Millis(due + 4), half_closed_at_ms=Millis(61), eof_at_ms=Millis(due + 3)), []),
            (m.IdleRead(now_ms=Millis(due + 9), proof=idle(due + 8)), [m.FreePlace, m.Settle]),
        ],
        ends=Phase.SETTLED,
    )


def test_a_late_deadline_of_a_silent_engine_tells_the_client_and_cuts():
    state, orders = m.step(sent(LLAMA), m.Ticked(now_ms=DEADLINE))
    assert state.phase is Phase.CANCEL_CLOSED
    assert [type(order) for order in orders] == [m.AnswerClient, m.CutUpstream]
    assert orders[0].code == "deadline_exceeded"


def test_an_engine_error_holds_the_place_until_the_engine_is_idle():
    play(
        sent(VLLM),
        [
            (
                m.Errored(now_ms=Millis(60), reason="CUDA out of memory"),
                [m.AnswerClient(request=REQUEST, code="engine_error", message="CUDA out of memory"), m.CutUpstream],
            ),
            (m.IdleRead(now_ms=Millis(61), proof=idle(59)), []),
            (m.IdleRead(now_ms=Millis(61), proof=idle(61, OTHER)), []),
            (m.IdleRead(now_ms=Millis(62), proof=idle(61)), [m.FreePlace, m.Settle]),
        ],
        ends=Phase.SETTLED,
    )


def test_a_whole_refusal_settles_at_once():
    state, orders = m.step(sent(VLLM), m.Rejected(now_ms=Millis(9), status=413))
    assert state.outcome is Outcome.REJECTED
    assert [type(order) for order in orders] == [m.FreePlace, m.Settle]


def test_an_unanswered_abort_falls_back_on_what_is_left():
    silent, _ = m.step(sent(SGLANG), m.ClientGone(now_ms=Millis(60), reason="hung up"))
    begun, orders = m.step(sent(SGLANG, begun=True), m.ClientGone(now_ms=Millis(60), reason="hung up"))
    assert [type(order) for order in orders] == [m.CutUpstream, m.AbortWork]
    mute, _ = m.step(sent(MUTE_ABORT, begun=True), m.ClientGone(now_ms=Millis(60), reason="hung up"))
    unanswered = m.AbortUnanswered(now_ms=Millis(90))
    assert m.step(silent, unanswered)[0].phase is Phase.CANCEL_STOP
    assert m.step(mute, unanswered)[0].phase is Phase.CANCEL_STOP
    fallen, _ = m.step(begun, unanswered)
    assert fallen.phase is Phase.CANCEL_IDLE
    late, orders = m.step(fallen, m.AbortAcknowledged(now_ms=Millis(95), proof=aborted()))
    assert late.outcome is Outcome.CANCELLED
    assert isinstance(orders[0], m.FreePlace)


def test_an_engine_that_closes_first_proves_nothing():
    """Some servers close the connection and finish the work later."""
    cut_state, _ = m.step(sent(LLAMA), m.ClientGone(now_ms=Millis(60), reason="hung up"))
    first = m.UpstreamEnded(now_ms=Millis(62), half_closed_at_ms=Millis(61), eof_at_ms=Millis(58))
    assert m.step(cut_state, first) == (cut_state, ())


def test_a_restarted_controller_keeps_every_place_and_loses_every_waiter():
    restart = m.ControllerRestarted(now_ms=Millis(100))
    waiting, _ = m.step(arrived(), m.WaitBegun(now_ms=Millis(0), deployment=DEPLOYMENT))
    assert m.step(waiting, restart)[0].outcome is Outcome.ABANDONED
    assert m.step(sent(LLAMA), restart)[0].phase is Phase.CANCEL_STOP
    assert m.step(sent(LLAMA, begun=True), restart)[0].phase is Phase.CANCEL_STOP
    admitted, _ = m.step(
        arrived(), m.PlaceGiven(now_ms=Millis(1), deployment=DEPLOYMENT, incarnation=RUN, traits=LLAMA)
    )
    assert m.step(admitted, restart)[0].phase is Phase.CANCEL_STOP
    idling, _ = m.step(sent(VLLM, begun=True), m.ClientGone(now_ms=Millis(60), reason="hung up"))
    assert m.step(idling, restart) == (idling, ())
    aborting, _ = m.step(sent(SGLANG), m.ClientGone(now_ms=Millis(60), reason="hung up"))
    assert m.step(aborting, restart) == (aborting, (m.AbortWork(request=REQUEST, incarnation=RUN),))
    delivered, _ = m.step(sent(LLAMA, begun=True), m.Finished(now_ms=Millis(60)))
    assert m.step(delivered, restart)[0].outcome is Outcome.OK
    closing, _ = m.step(sent(LLAMA), m.ClientGone(now_ms=Millis(60), reason="hung up"))
    assert m.step(closing, restart)[0].phase is Phase.CANCEL_STOP
    closed, _ = m.step(closing, m.UpstreamEnded(now_ms=Millis(63), half_closed_at_ms=Millis(61), eof_at_ms=Millis(62)))
    assert m.step(closed, restart) == (closed, ())


def test_an_incarnation_that_never_ran_settles_its_requests_as_well():
    proof = NeverLaunched(incarnation=RUN, fenced=True, observed_at_ms=Millis(5))
    state, orders = m.step(sent(MUTE), m.IncarnationGone(now_ms=Millis(6), proof=proof))
    assert state.outcome is Outcome.CUT
    assert m.FreePlace(request=REQUEST, incarnation=RUN, proof=proof) in orders


# --- a model of an engine, beside the machine -------------------------------------------------------


class Serving(RuleBasedStateMachine):
    """Requests beside an engine that really holds work. Every event is true of that engine.

    The model knows where the work of each request is: on the wire, in the engine, or nowhere. It
    never reads the table; its claim is that a place is only given back for work that is nowhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.requests: dict[RequestId, m.State] = {}
        self.work: dict[RequestId, str] = {}  # "wire" -> "engine"; absent: nowhere
        self.half_closed: dict[RequestId, int] = {}
        self.held: set[RequestId] = set()
        self.waiting: set[RequestId] = set()
        self.aborts: set[RequestId] = set()
        self.answers: dict[RequestId, int] = {}
        self.cut_by_us: set[RequestId] = set()
        self.generation = 1
        self.finished: set[RequestId] = set()

    @initialize(traits=st.sampled_from((LLAMA, LLAMA, VLLM, SGLANG, *ALL_TRAITS)))
    def choose_engine(self, traits: m.EngineTraits) -> None:
        self.traits = traits

    @property
    def run(self) -> Incarnation:
        return Incarnation(Lane(DEPLOYMENT, 0), Generation(self.generation))

    def tick(self, ms: int = 1) -> Millis:
        self.now += ms
        return Millis(self.now)

    def feed(self, request: RequestId, event: m.Event) -> None:
        state, orders = m.step(self.requests[request], event)
        self.requests[request] = state
        for order in orders:
            match order:
                case m.TakePlace():
                    assert request not in self.held
                    self.held.add(request)
                case m.FreePlace():
                    assert request in self.held
                    assert request not in self.work, f"freed on {order.proof} while its work is {self.work[request]}"
                    self.held.discard(request)
                case m.TakeSlot():
                    self.waiting.add(request)
                case m.FreeSlot():
                    self.waiting.remove(request)
                case m.CutUpstream():
                    self.half_closed.setdefault(request, self.tick())
                    self.cut_by_us.add(request)
                case m.AbortWork():
                    self.aborts.add(request)
                case m.AnswerClient():
                    self.answers[request] = self.answers.get(request, 0) + 1

    def some(self, data: st.DataObject, *phases: Phase) -> RequestId | None:
        fitting = sorted(name for name, state in self.requests.items() if not phases or state.phase in phases)
        return data.draw(st.sampled_from(fitting)) if fitting else None

    def some_work(self, data: st.DataObject, where: str) -> RequestId | None:
        fitting = sorted(name for name, at in self.work.items() if at == where)
        return data.draw(st.sampled_from(fitting)) if fitting else None

    @precondition(lambda self: len(self.requests) < 6)
    @rule(ready=st.booleans())
    def arrive(self, ready: bool) -> None:
        now = self.tick()
        request = RequestId(f"01R{len(self.requests)}")
        self.requests[request] = m.State(request=request, stream=True, arrived_at_ms=now, deadline_ms=Millis(now + 200))
        if ready:
            self.give(request)
        else:
            self.feed(request, m.WaitBegun(now_ms=now, deployment=DEPLOYMENT))

    def give(self, request: RequestId) -> None:
        self.feed(
            request,
            m.PlaceGiven(now_ms=self.tick(), deployment=DEPLOYMENT, incarnation=self.run, traits=self.traits),
        )

    @rule(data=st.data())
    def place(self, data: st.DataObject) -> None:
        if request := self.some(data, Phase.QUEUED):
            self.give(request)

    @rule(data=st.data(), accepted=st.booleans())
    def dispatch(self, data: st.DataObject, accepted: bool) -> None:
        if request := self.some(data, Phase.ADMITTED):
            if accepted:
                self.feed(request, m.Sent(now_ms=self.tick()))
                self.work[request] = "wire"
            else:
                self.feed(request, m.NotAccepted(now_ms=self.tick(), reason="refused"))

    @rule(data=st.data())
    def engine_takes_it(self, data: st.DataObject) -> None:
        if request := self.some_work(data, "wire"):
            self.work[request] = "engine"

    @rule(data=st.data(), how=st.sampled_from(("output", "output", "finish", "reject", "error", "lost")))
    def engine_answers(self, data: st.DataObject, how: str) -> None:
        request = self.some_work(data, "engine")
        if request is None or request in self.half_closed:
            return
        now = self.tick()
        if how == "output":
            self.feed(request, m.OutputBegun(now_ms=now))
        elif how == "finish":
            del self.work[request]
            self.finished.add(request)
            self.answers[request] = self.answers.get(request, 0) + 1
            self.feed(request, m.Finished(now_ms=now))
        elif how == "reject" and self.requests[request].phase is Phase.DISPATCHED:
            del self.work[request]
            self.answers[request] = self.answers.get(request, 0) + 1
            self.feed(request, m.Rejected(now_ms=now, status=400))
        elif how == "error":  # it may go on working all the same
            self.feed(request, m.Errored(now_ms=now, reason="broken"))
        elif how == "lost":
            self.half_closed[request] = now
            self.feed(request, m.UpstreamLost(now_ms=now, reason="reset"))

    @rule(data=st.data())
    def record(self, data: st.DataObject) -> None:
        if request := self.some(data, Phase.COMPLETING):
            assert request in self.finished
            self.feed(request, m.Recorded(now_ms=self.tick()))

    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        request = self.some(data)
        if request is not None:
            self.feed(request, m.ClientGone(now_ms=self.tick(), reason="hung up"))

    @rule(data=st.data())
    def work_of_a_cut_request_ends(self, data: st.DataObject) -> None:
        request = self.some_work(data, "engine")
        if request in self.half_closed:
            del self.work[request]

    @rule(data=st.data())
    def eof_comes_back(self, data: st.DataObject) -> None:
        """On an engine whose EOF proves its end the handler returned: nothing is on the wire any more.

        What it leaves may still be in the engine's queue, where a reading counts it.
        """
        for request in sorted(self.cut_by_us):
            if self.work.get(request) == "wire" and self.traits.eof_proves_end:
                continue
            half_closed = Millis(self.half_closed[request])
            now = self.tick()
            self.feed(request, m.UpstreamEnded(now_ms=now, half_closed_at_ms=half_closed, eof_at_ms=now))

    @precondition(lambda self: self.traits.idle_signal and "engine" not in self.work.values())
    @rule(age=st.sampled_from((0, 0, 5)))
    def engine_reads_idle(self, age: int) -> None:
        """True of now. An old reading is true of then, when work may have been on the wire; fed only if it was so."""
        now = self.tick()
        if age and self.work:
            return
        for request in sorted(self.requests):
            self.feed(request, m.IdleRead(now_ms=now, proof=idle(max(0, now - age), self.run)))

    @rule(data=st.data(), answered=st.booleans())
    def abort_ends(self, data: st.DataObject, answered: bool) -> None:
        if not self.aborts:
            return
        request = data.draw(st.sampled_from(sorted(self.aborts)))
        state = self.requests[request]
        if answered and state.incarnation == self.run:
            self.aborts.discard(request)
            self.work.pop(request, None)
            self.feed(
                request,
                m.AbortAcknowledged(now_ms=self.tick(), proof=aborted(request, self.run)),
            )
        else:
            self.feed(request, m.AbortUnanswered(now_ms=self.tick()))

    @rule()
    def engine_ends(self) -> None:
        proof = gone(self.run)
        self.work.clear()
        self.generation += 1
        now = self.tick()
        for request in sorted(self.requests):
            self.feed(request, m.IncarnationGone(now_ms=now, proof=proof))

    @rule(ms=st.sampled_from((1, 100, 250, m.EOF_LIMIT_MS)), full=st.booleans())
    def time_passes(self, ms: int, full: bool) -> None:
        now = self.tick(ms)
        for request in sorted(self.requests):
            due = m.due_at_ms(self.requests[request])
            before = self.requests[request]
            self.feed(request, m.Ticked(now_ms=now, places_full=full))
            changed = self.requests[request] != before
            assert changed == (due is not None and due <= now), "a tick changes exactly what was due"

    @rule()
    def controller_restarts(self) -> None:
        now = self.tick()
        for request in sorted(self.requests):
            self.feed(request, m.ControllerRestarted(now_ms=now))
        self.cut_by_us.clear()  # nobody listens for their EOF any more

    @invariant()
    def a_place_is_held_while_there_is_work(self) -> None:
        assert set(self.work) <= self.held

    @invariant()
    def the_counts_are_the_phases(self) -> None:
        assert self.held == {name for name, state in self.requests.items() if state.phase in m.PLACED}
        assert self.waiting == {name for name, state in self.requests.items() if state.phase is Phase.QUEUED}

    @invariant()
    def nobody_is_answered_twice(self) -> None:
        assert all(times <= 1 for times in self.answers.values())


TestServing = Serving.TestCase
TestServing.settings = settings(
    max_examples=150, stateful_step_count=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
