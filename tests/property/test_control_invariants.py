"""Each claim about the world catches a world that is broken in its way: a claim that nothing can break says nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from simulation import checked
from world import Shell, shell
from world_values import RAM, VLLM, Model, gib

from capyctl.control import events as e
from capyctl.control import indexes, parking_claims
from capyctl.control import invariants as inv
from capyctl.control import orders as o
from capyctl.control import transitions as tr
from capyctl.control.book import Book
from capyctl.control.changes import Before, Change, remember
from capyctl.control.records import Record, Wish
from capyctl.control.steps import seat
from capyctl.errors import InvariantBroken
from capyctl.fsm import gate, operation, switch
from capyctl.fsm.proofs import Back, Canary, SameEngine, Usable
from capyctl.fsm.run import Stop
from capyctl.fsm.types import (
    Bytes,
    DeploymentId,
    Generation,
    Incarnation,
    Lane,
    Millis,
    OperationId,
    Origin,
    Phase,
    ProcessIdentity,
    RequestId,
    Residency,
    Role,
    StopKind,
    Token,
)
from capyctl.ledger.types import Allocation, Claim, Observation

Breaker = Callable[[Book, Lane, Lane], None]


def healthy() -> tuple[Shell, Book, Lane, Lane]:
    """A READY model with a running and a cut request, and one that waits for memory with requests that wait for it."""
    here = checked(shell(5))
    a = here.deploy(Model(name="a", traits=VLLM, residency=Residency.DEEP, ready_gib=6, cold_gib=6))
    b = here.deploy(Model(name="b", ready_gib=6, cold_gib=6))
    here.run(4_000)
    here.ask("a")
    here.run(20_000)
    here.ask("a", answer_ms=100_000)
    here.ask("a", answer_ms=100_000, hangs_up_in_ms=1_000)
    here.run(1_500)
    here.ask("b")
    here.start(b)
    here.run(500, until=lambda: bool(here.world.book.switches))
    return here, here.world.book, Lane(a, 0), Lane(b, 0)


def held(book: Book, lane: Lane, **changes: Any) -> None:
    """Change what the ledger holds for a lane, behind its back."""
    holding = attrs.evolve(book.ledger.held_by(lane.owner), **changes)
    book.ledger = book.ledger.assuming(lane.owner, holding)


def machine(book: Book, lane: Lane, **changes: Any) -> None:
    row = book.instances[lane]
    book.instances[lane] = attrs.evolve(row, machine=attrs.evolve(row.machine, **changes))


def run(book: Book, lane: Lane, **changes: Any) -> None:
    life = book.instances[lane].machine.life
    machine(book, lane, life=attrs.evolve(life, run=attrs.evolve(life.run, **changes)))


def the_gate(book: Book, lane: Lane, **changes: Any) -> None:
    machine(book, lane, gate=attrs.evolve(book.instances[lane].machine.gate, **changes))


def deployed(book: Book, lane: Lane, **changes: Any) -> None:
    row = book.deployments[lane.deployment]
    book.deployments[lane.deployment] = attrs.evolve(row, state=attrs.evolve(row.state, **changes))


def no_holding(book: Book, a: Lane, b: Lane) -> None:
    book.ledger = attrs.evolve(book.ledger, shelves={})


def a_stranger(book: Book, a: Lane, b: Lane) -> None:
    holding = book.ledger.held_by(a.owner)
    book.ledger = book.ledger.assuming("deployment:x/instance:0", holding)


def a_forgotten_start(book: Book, a: Lane, b: Lane) -> None:
    book.operations[OperationId("x")] = operation.State(
        operation=OperationId("x"),
        deployment=a.deployment,
        kind=operation.Kind.STOP,
        origin=Origin.OPERATOR,
        phase=operation.Phase.ACCEPTED,
        accepted_at_ms=Millis(1),
        targets=(operation.Target(index=0),),
    )
    book.open_operations.setdefault(a.deployment, {})[OperationId("x")] = None


def two_starts(book: Book, a: Lane, b: Lane) -> None:
    opened = next(iter(book.open_operations[b.deployment]))
    book.operations[OperationId("x")] = attrs.evolve(book.operations[opened], operation=OperationId("x"))
    book.open_operations[b.deployment][OperationId("x")] = None


def steps_of_yesterday(book: Book, lane: Lane) -> None:
    known, host = book.steps[lane], next(iter(book.hosts))
    seated = (((1, 0, -1, host), 1, seat(book, lane, host)),)  # there is more room
    book.steps[lane] = attrs.evolve(known, tries=attrs.evolve(known.tries, seated=seated))


def room_that_nobody_wants(book: Book, a: Lane, b: Lane) -> None:
    (identity,) = book.active_switches.values()
    book.switches[identity] = attrs.evolve(book.switches[identity], phase=switch.Phase.ACTIVATING)
    book.instances[b] = attrs.evolve(book.instances[b], wish=None)


def one_more_place(book: Book, a: Lane, b: Lane) -> None:
    queue = book.traffic.queue(a.deployment)
    for number in range(40):
        queue.running[RequestId(f"x{number}")] = book.instances[a].run.incarnation


def many_waiting(book: Book, a: Lane, b: Lane) -> None:
    for number in range(300):
        book.traffic.wait(b.deployment, RequestId(f"x{number}"), 0)


def another_place(book: Book, a: Lane, b: Lane) -> None:
    book.traffic.queue(a.deployment).running[RequestId("x")] = Incarnation(a, Generation(99))


def claims(phase: Phase) -> Breaker:
    def change(book: Book, a: Lane, b: Lane) -> None:
        phases = dict(book.ledger.held_by(a.owner).phases)
        phases[phase] = attrs.evolve(phases[phase], claims=(Claim(device="gpu0"),))  # type: ignore[arg-type]
        held(book, a, phases=phases)

    return change


def bigger(phase: Phase, amount: float) -> Breaker:
    def change(book: Book, a: Lane, b: Lane) -> None:
        phases = dict(book.ledger.held_by(a.owner).phases)
        held(book, a, phases={**phases, phase: Allocation(bytes={RAM: gib(amount)})})

    return change


def planned(book: Book, a: Lane, phase: Phase, amount: Bytes) -> None:
    row = book.deployments[a.deployment]
    plans = {
        host: attrs.evolve(plan, phases={**plan.phases, phase: Allocation(bytes={RAM: amount})})
        for host, plan in row.plans.items()
    }
    book.put_deployment(attrs.evolve(row, plans=plans))


BROKEN: tuple[tuple[Callable[[Book], bool], Breaker], ...] = (
    (inv.inv_01_charges_within_limits, lambda k, a, b: held(k, a, allocation=Allocation(bytes={RAM: gib(99)}))),
    (
        inv.inv_15_host_kv_is_a_part,
        lambda k, a, b: object.__setattr__(k.ledger.held_by(a.owner).allocation, "host_kv", {RAM: gib(99)}),
    ),
    (inv.inv_08_ready_claims_are_held_throughout, claims(Phase.READY)),
    (inv.inv_13_exactly_what_may_run_is_charged, no_holding),
    (inv.inv_13_exactly_what_may_run_is_charged, lambda k, a, b: held(k, a, generation=Generation(9))),
    (inv.inv_13_no_charge_without_an_owner, a_stranger),
    (inv.inv_13_the_phase_is_the_ledgers, lambda k, a, b: held(k, a, phase=Phase.PARKED)),
    (inv.inv_m5_budgets_are_ordered, bigger(Phase.READY, 50)),
    (inv.inv_m6_plans_are_ordered, lambda k, a, b: planned(k, a, Phase.COLD, gib(1))),
    (inv.inv_m6_plans_are_ordered, lambda k, a, b: planned(k, a, Phase.PARKED, gib(50))),
    (inv.inv_m7_below_its_peak_with_a_proof, lambda k, a, b: held(k, a, allocation=Allocation(), lowered_by=None)),
    (inv.inv_m12_a_whole_host_has_one_owner, lambda k, a, b: (a_stranger(k, a, b), held(k, a, whole_host=True))[0]),
    (inv.inv_19_generations_are_drawn, lambda k, a, b: run(k, a, generation=Generation(99))),
    (inv.inv_20_tokens_are_drawn, lambda k, a, b: run(k, a, token=Token(10**6))),
    (
        inv.inv_28_open_means_ready_proven_and_online,
        lambda k, a, b: the_gate(k, a, phase=gate.GatePhase.OPEN, proven_in=0),
    ),
    (
        inv.inv_28_open_means_ready_proven_and_online,
        lambda k, a, b: (the_gate(k, a, phase=gate.GatePhase.OPEN, reasons=frozenset()), k.online.clear())[1],
    ),
    (inv.inv_33_places_are_bounded, one_more_place),
    (inv.inv_34_waiting_is_bounded, many_waiting),
    (inv.inv_35_places_are_on_runs, another_place),
    (inv.inv_38_what_an_operator_stopped_does_not_start, lambda k, a, b: deployed(k, b, suspended=True)),
    (
        inv.inv_49_wishes_name_running_switches,
        lambda k, a, b: k.put_instance(
            b, attrs.evolve(k.instances[b], wish=Wish(origin=Origin.REQUEST, since_ms=Millis(1), switch="gone"))
        ),
    ),  # type: ignore[arg-type]
    (inv.inv_49_made_room_is_wanted, room_that_nobody_wants),
    (inv.inv_50_one_start_at_a_time, two_starts),
    (inv.inv_50_an_open_start_is_pursued, a_forgotten_start),
    (inv.inv_56_what_is_deleted_left_nothing, lambda k, a, b: k.deployments.pop(a.deployment)),
    (indexes.idx_lanes, lambda k, a, b: k.lanes.pop(a.deployment)),
    (indexes.idx_routes, lambda k, a, b: k.routes.pop("a")),
    (indexes.idx_busy, lambda k, a, b: k.busy.discard(b)),
    (indexes.idx_busy, lambda k, a, b: k.wished.discard(b)),
    (indexes.idx_drains, lambda k, a, b: k.doubted.add(a)),
    (indexes.idx_operations, lambda k, a, b: k.open_operations[b.deployment].clear()),
    (indexes.idx_switches, lambda k, a, b: k.active_switches.clear()),
    (indexes.idx_traffic, lambda k, a, b: k.running_on.clear()),
    (indexes.idx_traffic, lambda k, a, b: setattr(k.traffic, "waiting_bytes", 1)),
    (indexes.idx_emptying, lambda k, a, b: k.emptying.update(k.hosts)),
    (indexes.idx_steps, lambda k, a, b: steps_of_yesterday(k, b)),
    (indexes.idx_turns, lambda k, a, b: [k.first_turns.update({h: (k.ledger.shelf(h), None)}) for h in k.ledger.hosts]),
    (indexes.idx_due, lambda k, a, b: k.due.past(Millis(10**12))),
)


@pytest.mark.parametrize(("claim", "broken"), BROKEN, ids=lambda one: getattr(one, "__name__", ""))
def test_a_claim_about_a_book_catches_its_breach(claim: Callable[[Book], bool], broken: Breaker) -> None:
    _, book, a, b = healthy()
    assert claim(book)
    broken(book, a, b)
    assert not claim(book)


def change(book: Book, before: Before, event: e.Event, orders: tuple[o.Order, ...] = (), changed: Any = ()) -> Change:
    return Change(before=before, event=event, book=book, orders=orders, changed=changed)


NOW = Millis(10**9)


def seen() -> e.Observed:
    return e.Observed(now_ms=NOW, host="h1", domains={})  # type: ignore[arg-type]


def steps() -> list[tuple[Callable[[Change], bool], Callable[[Book, Lane, Lane], Change]]]:
    """Claims about a step, and a step that breaks each."""

    def after(breaker: Breaker, event: e.Event, orders: Any = ()) -> Callable[[Book, Lane, Lane], Change]:
        def make(book: Book, a: Lane, b: Lane) -> Change:
            before = remember(book)
            breaker(book, a, b)
            return change(book, before, event, orders(book, a, b) if callable(orders) else orders)

        return make

    def ordered(kind: type[o.HostOrder], **facts: Any) -> Callable[[Book, Lane, Lane], tuple[o.Order, ...]]:
        def make(book: Book, a: Lane, b: Lane) -> tuple[o.Order, ...]:
            one = book.instances[a].run
            base: dict[str, Any] = {"incarnation": one.incarnation, "token": Token(10**6), "host": one.host} | facts
            return (kind(**base),)

        return make

    nothing: Breaker = lambda k, a, b: None  # noqa: E731
    launch = {"revision": 1, "plan": Model(name="a").plan, "digest": "", "deadline_ms": NOW}
    outcome = e.OrderLost(
        now_ms=NOW, incarnation=Incarnation(Lane(DeploymentId("x"), 0), Generation(1)), token=Token(1), reason=""
    )
    stranger = ProcessIdentity(pid=1, boot_id="x", start_ticks=1)
    return [
        (
            tr.tr_02_a_rise_fits,
            after(lambda k, a, b: held(k, a, allocation=Allocation(bytes={RAM: gib(6.5)})) or k.seen.clear(), outcome),
        ),
        (
            tr.tr_03_a_fall_has_a_proof,
            after(lambda k, a, b: held(k, a, allocation=Allocation(bytes={RAM: gib(1)})), seen()),
        ),
        (tr.tr_04_orders_are_charged_first, after(nothing, seen(), ordered(o.Launch, **launch))),
        (tr.tr_11_epochs_rise, after(lambda k, a, b: held(k, a, lowered_by="x"), seen())),
        (tr.tr_16_launches_go_where_they_may, after(nothing, seen(), ordered(o.Launch, host="h9", **launch))),
        (
            tr.tr_17_only_the_recorded_is_ended,
            after(nothing, seen(), ordered(o.Terminate, processes=(stranger,), limit_ms=NOW)),
        ),
        (tr.tr_19_generations_rise, after(nothing, seen(), ordered(o.Launch, **launch))),
        (tr.tr_20_orders_have_their_own_token, after(nothing, seen(), ordered(o.AwaitIdle, limit_ms=NOW))),
        (tr.tr_23_gone_covers_everything, after(no_holding, seen())),
        (tr.tr_25_losing_a_session_frees_nothing, after(no_holding, e.HostOffline(now_ms=NOW, host="h1", reason=""))),  # type: ignore[arg-type]
        (
            tr.tr_28_admitted_to_an_open_gate,
            after(
                lambda k, a, b: run(k, a, generation=Generation(9)),
                seen(),
                lambda k, a, b: (
                    o.Admit(
                        request=RequestId("x"),
                        incarnation=Incarnation(a, Generation(1)),
                        host=k.instances[a].run.host,
                        deadline_ms=NOW,
                    ),
                ),
            ),
        ),
        (tr.tr_31_exactly_one_end, after(lambda k, a, b: k.requests.pop(next(iter(k.requests))), seen())),
        (
            tr.tr_35_places_are_freed_by_proof,
            after(lambda k, a, b: k.requests.pop(next(iter(k.traffic.queue(a.deployment).running))), seen()),
        ),
        (tr.tr_38_nobody_but_an_operator_lifts_a_stop, _lifted),
        (tr.tr_47_a_window_never_moves, after(_moved_window, seen())),
        (
            parking_claims.tr_03_a_released_copy_was_sampled,
            after(lambda k, a, b: held(k, a, phase=Phase.PARKED, allocation=COPY), seen()),
        ),
        (parking_claims.tr_03_a_woken_engine_answered, _woken_without_its_answer),
        (parking_claims.tr_27_whole_engine_calls_are_made_once, after(nothing, seen(), _release)),
        (parking_claims.tr_m6_a_copy_is_charged_what_was_measured, _grown_unmeasured),
        (
            parking_claims.tr_m6_what_outgrew_its_bound_parks_no_more,
            after(lambda k, a, b: outgrew(k, a), seen(), _release),
        ),
        (
            parking_claims.tr_40_only_what_sleeps_is_reclaimed,
            after(
                lambda k, a, b: run(k, a, pending=Stop(kind=StopKind.RECLAIM, asked_at_ms=NOW)),
                seen(),
            ),
        ),
        (parking_claims.tr_s7_all_are_prepared_or_none, _prepared_in_part),
        (
            parking_claims.tr_s7_one_is_prepared_at_a_time,
            after(lambda k, a, b: [prepared(k, a, after=None), prepared(k, b, after=a)], seen()),
        ),
        (tr.tr_54_a_key_is_one_command, _twice),
        (tr.tr_55_a_refusal_changes_nothing, _refused_with_change),
        (tr.tr_56_a_delete_leaves_nothing, after(lambda k, a, b: k.deployments.pop(a.deployment), seen())),
    ]


COPY = Allocation(bytes={RAM: gib(0.5)})


def _release(book: Book, a: Lane, b: Lane) -> tuple[o.Order, ...]:
    row = book.instances[a]
    assert row.plan is not None
    return (
        o.Release(
            incarnation=row.run.incarnation,
            token=Token(10**6),
            host=row.run.placed_on,
            tier=Residency.DEEP,
            plan=row.plan,
            gate_closed_at_ms=NOW,
            processes=row.run.processes,
            deadline_ms=NOW,
        ),
    )


def outgrew(book: Book, lane: Lane) -> None:
    row = book.instances[lane]
    book.instances[lane] = attrs.evolve(row, parked_first={RAM: gib(0.5)}, parked_latest={RAM: gib(1.1)})


def _woken_without_its_answer(book: Book, a: Lane, b: Lane) -> Change:
    """Everything else is proven of it, and it is charged as ready."""
    held(book, a, phase=Phase.WAKE, allocation=Allocation(bytes={RAM: gib(6.5)}))
    before, known = remember(book), book.instances[a].run
    held(book, a, phase=Phase.READY, allocation=Allocation(bytes={RAM: gib(6)}))
    event = e.WakeConfirmed(
        now_ms=NOW,
        incarnation=known.incarnation,
        token=Token(1),
        back=Back(
            incarnation=known.incarnation, restored_at_ms=NOW, sampled_at_ms=NOW, fresh_until_ms=NOW, recorded_at_ms=NOW
        ),
        usable=Usable(incarnation=known.incarnation, answer_chars=1, probed_at_ms=NOW),
        canary=None,
        same=SameEngine(
            incarnation=known.incarnation,
            recorded=known.processes,
            alive=frozenset(known.processes),
            strangers=0,
            observed_at_ms=NOW,
        ),
    )
    assert parking_claims.tr_03_a_woken_engine_answered(
        change(
            book, before, attrs.evolve(event, canary=Canary(incarnation=known.incarnation, expected="1", actual="1"))
        )
    )
    return change(book, before, event)


def _grown_unmeasured(book: Book, a: Lane, b: Lane) -> Change:
    held(book, a, phase=Phase.PARKED, allocation=COPY)
    before = remember(book)
    held(book, a, phase=Phase.PARKED, allocation=Allocation(bytes={RAM: gib(1)}))
    return change(book, before, seen())


def _lifted(book: Book, a: Lane, b: Lane) -> Change:
    deployed(book, a, suspended=True)
    before = remember(book)
    deployed(book, a, suspended=False)
    return change(book, before, seen())


def _moved_window(book: Book, a: Lane, b: Lane) -> None:
    identity, state = next(iter(book.switches.items()))
    book.switches[identity] = attrs.evolve(state, window_ends_at_ms=NOW)


def prepared(book: Book, lane: Lane, *, after: Lane | None) -> None:
    """A preparation of this instance, which is wanted for it; `after`: the one that has its turn before."""
    identity, name = OperationId(f"of {lane}"), lane.deployment
    book.operations[identity] = operation.State(
        operation=identity,
        deployment=name,
        kind=operation.Kind.PREINITIALIZE,
        origin=Origin.OPERATOR,
        phase=operation.Phase.RUNNING,
        accepted_at_ms=NOW,
        targets=(operation.Target(index=0),),
        after=None if after is None else OperationId(f"of {after}"),
    )
    wish = Wish(origin=Origin.OPERATOR, since_ms=NOW, operation=identity)
    book.put_instance(lane, attrs.evolve(book.instances[lane], wish=wish))


def _prepared_in_part(book: Book, a: Lane, b: Lane) -> Change:
    """Two were asked for, and one was accepted."""
    before = remember(book)
    prepared(book, a, after=None)
    command = e.Command(key="new", digest="x", operation=OperationId("x"), switch="x")  # type: ignore[arg-type]
    asked = tuple(e.Member(deployment=lane.deployment, operation=OperationId(f"of {lane}")) for lane in (a, b))
    event = e.PreinitializeAsked(now_ms=NOW, command=command, members=asked)
    made = o.MemberReceipt(operation=OperationId(f"of {a}"), deployment=a.deployment, revision=1)
    receipt = o.Receipt(operation=made.operation, deployment=None, revision=None, members=(made,))
    return change(book, before, event, orders=(o.Reply(key="new", receipt=receipt),))


def _twice(book: Book, a: Lane, b: Lane) -> Change:
    key = next(iter(book.receipts))
    command = e.Command(key=key, digest="x", operation=OperationId("x"), switch="x")  # type: ignore[arg-type]
    event = e.StopAsked(now_ms=NOW, command=command, deployment=a.deployment)
    return change(book, remember(book), event, changed=(Record(kind="deployment", key="x", value=None),))


def _refused_with_change(book: Book, a: Lane, b: Lane) -> Change:
    command = e.Command(key="new", digest="x", operation=OperationId("x"), switch="x")  # type: ignore[arg-type]
    event = e.StopAsked(now_ms=NOW, command=command, deployment=a.deployment)
    reply = o.Reply(key="new", code="lifecycle_conflict")
    changed = (Record(kind="instance", key="x", value=None),)
    return change(book, remember(book), event, orders=(reply,), changed=changed)


@pytest.mark.parametrize(("claim", "broken"), steps(), ids=lambda one: getattr(one, "__name__", ""))
def test_a_claim_about_a_step_catches_its_breach(
    claim: Callable[[Change], bool], broken: Callable[[Book, Lane, Lane], Change]
) -> None:
    _, book, a, b = healthy()
    assert not claim(broken(book, a, b))


def test_a_helper_that_exits_and_a_sample_move_nothing() -> None:
    here, book, a, _ = healthy()
    before = book.instances[a]
    here.tell(
        e.EngineExited(
            now_ms=Millis(here.now), incarnation=before.run.incarnation, role=Role.HELPER, status=0, reason="done"
        )
    )
    assert book.instances[a].machine.phase is before.machine.phase
    sample = Observation(capacity_bytes=gib(10), available_bytes=gib(1), seen_at_ms=Millis(here.now))
    here.tell(e.Observed(now_ms=Millis(here.now), host=before.run.placed_on, domains={RAM: sample}))
    assert book.ledger.held_by(a.owner).on(RAM) == gib(6)


def test_the_world_refuses_a_step_that_leaves_what_runs_uncharged_and_goes_on_with_the_others() -> None:
    here, book, a, _ = healthy()
    book.ledger = attrs.evolve(book.ledger, shelves={})
    book.put_instance(a, attrs.evolve(book.instances[a], last_host=None))
    with pytest.raises(InvariantBroken, match="exactly while processes of it exist"):
        here.world.handle(e.Ticked(now_ms=Millis(here.now)))
    assert ("instance", str(a)) in book.changed  # kept for the next step, so that no row is lost


def test_every_claim_has_a_number_or_a_name_and_a_sentence() -> None:
    for claim in (*inv.STATE, *tr.TRANSITIONS):
        assert claim.__doc__
        assert claim.__doc__.endswith(".")
    numbered = {claim.__name__.split("_")[1] for claim in (*inv.STATE, *tr.TRANSITIONS) if "_" in claim.__name__}
    assert len(numbered) > 25


def test_a_healthy_world_keeps_every_claim() -> None:
    here, book, _, _ = healthy()
    inv.assert_state(book)
    here.run(60_000)
    inv.assert_state(book)
