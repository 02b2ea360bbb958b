"""The whole instance: three machines and a gate as one product, and a model of a host that never reads a table."""

from __future__ import annotations

from typing import Any

import attrs
import lives
import pytest
from explore import explore, label, rows_must_fire
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lives import EARLY, HELPER, HOST, LANE, LATE, PROCESSES, SWITCH, TRAITS, Product, few

from capyctl.errors import InvariantBroken
from capyctl.fsm import cleanup, residency
from capyctl.fsm import effects as x
from capyctl.fsm import facts as f
from capyctl.fsm import gate as g
from capyctl.fsm import instance as m
from capyctl.fsm.activation import ACTIVATION
from capyctl.fsm.cleanup import CLEANUP
from capyctl.fsm.gate import GATE, Closure, GatePhase
from capyctl.fsm.instance import Instance, Want, born, published, questions, step
from capyctl.fsm.proofs import Canary, Gone, NeverLaunched, Quiet, Resident, SameEngine, Usable
from capyctl.fsm.residency import RESIDENCY, ResidencyPhase
from capyctl.fsm.run import HoldCause, Step, Stop
from capyctl.fsm.table import Refused, first_line
from capyctl.fsm.types import Bytes, Generation, Incarnation, Millis, Origin, Phase, Residency, Role, StopKind, Token

# --- exploration of the product -----------------------------------------------------------------------

NEVER = {
    "gate: OPEN LeftReady": "whatever leaves READY closes first",
    **{
        f"cleanup: IDLE_GATE {on} [{first_line(guard)}]": "it is never loaded, or it exited: it is not asked"
        for on in ("Terminated", "LaunchFailed", "Probed")
        for guard in (cleanup.gone_to_retry, cleanup.gone_to_failed)
    },
}
"""Rows that do something and cannot fire in the product, each with the reason."""


def test_no_life_of_any_length_breaks_a_promise_of_the_product_and_every_row_is_reached():
    """28-30 and 43 on every reachable pair of life and gate; `tell` checks every invariant after every step."""
    product = Product()
    for taken in explore(product, [born(LANE)], lambda instance: few(instance, TRAITS)):
        before, event, after = taken.state, taken.event, taken.after
        opened = [order for order in taken.orders if isinstance(order, x.GateOpened)]
        assert (after.gate.phase is GatePhase.OPEN) <= (published(after) == "ready")
        assert bool(opened) == (before.gate.phase is not after.gate.phase is GatePhase.OPEN)
        if before.gate.phase is GatePhase.OPEN and after.phase is not ResidencyPhase.READY:
            assert [type(order) for order in taken.orders if isinstance(order, x.GateClosed)] == [x.GateClosed]
        assert m.wants(after, LATE) is None or not m.in_flight(after), "one order at a time"
        assert not isinstance(event, f.EngineExited) or event.role is not Role.HELPER or after == before
    if rows_must_fire:
        tables = (ACTIVATION, RESIDENCY, CLEANUP, GATE)
        acting = [(one, row) for one in tables for row in one.rows if not row.ignored and row.code is None]
        rows = {f"{one.name}: {label(row, phase)}" for one, row in acting for phase in row.when}
        assert rows - product.fired == set(NEVER)


def test_a_tick_before_the_next_bound_changes_nothing_and_at_the_bound_it_does():
    """71: `due_at_ms` is neither early nor late."""
    for taken in explore(Product(), [born(LANE)], lambda instance: few(instance, {"tier": Residency.RESTART_ONLY})):
        due = m.due_at_ms(taken.after)
        if taken.after == taken.state:
            continue
        if due is None:
            assert step(taken.after, f.Ticked(now_ms=Millis(10**12))) == (taken.after, ())
        elif m.wants(taken.after, due) is not Want.TURN:
            assert step(taken.after, f.Ticked(now_ms=Millis(due - 1))) == (taken.after, ())
            assert step(taken.after, f.Ticked(now_ms=due))[0] != taken.after


# --- reading --------------------------------------------------------------------------------------


def test_every_phase_has_one_of_the_ten_names_and_answers_its_questions():
    names = [
        "stopped",
        "starting",
        "ready",
        "draining",
        "parking",
        "parked",
        "waking",
        "stopping",
        "reconciling",
        "failed",
    ]
    told = {phase: questions(phase) for phase in m.PHASES}
    assert sorted({answers.status for answers in told.values()}) == sorted(names)
    assert [phase for phase, answers in told.items() if answers.serves] == [ResidencyPhase.READY]
    for phase, answers in told.items():
        assert not answers.signals or (answers.status == "stopping" and answers.falls), phase


def test_the_unknown_is_shown_as_uncertain_while_it_is_charged():
    run = attrs.evolve(lives.READY, charged=Phase.PARKING)
    unknown = Instance(life=lives.unknown(Step.PARK, run), gate=born(LANE).gate)
    assert published(unknown) == "uncertain"
    assert m.wants(unknown, EARLY) is Want.TURN
    assert m.wants(unknown, Millis(EARLY - 1)) is None


def test_a_new_instance_is_stopped_wants_nothing_and_is_never_due():
    new = born(LANE)
    assert (published(new), m.wants(new, LATE), m.due_at_ms(new), m.why_stopped(new)) == ("stopped", None, None, None)
    assert (new.lane, m.in_flight(new), m.wants_proof(new)) == (LANE, False, False)


def test_life_and_gate_that_contradict_each_other_stop_the_lane():
    torn = Instance(life=residency.State(run=lives.READY), gate=born(LANE).gate)
    with pytest.raises(InvariantBroken):
        step(torn, f.HostReturned(now_ms=EARLY))


# --- stories --------------------------------------------------------------------------------------


def tell_all(instance: Instance, *events: f.Fact) -> tuple[Instance, list[Any]]:
    orders: list[Any] = []
    for event in events:
        instance, ordered = step(instance, event)
        orders.extend(ordered)
    return instance, orders


def ready_instance() -> Instance:
    run = attrs.evolve(lives.NEW, generation=Generation(1))
    instance, orders = tell_all(
        born(LANE),
        f.Activated(now_ms=EARLY, origin=Origin.REQUEST, wait_ends_at_ms=LATE),
        f.Placed(now_ms=EARLY, host=HOST, generation=Generation(1), token=Token(1), deadline_ms=LATE, **TRAITS),
        f.Spawned(now_ms=EARLY, token=Token(1), processes=PROCESSES),
        f.LaunchReady(now_ms=EARLY, token=Token(1), processes=PROCESSES, usable=lives.usable(run), canary="42"),
    )
    kinds = [type(order) for order in orders]
    assert kinds == [x.RaiseCharge, x.SendLaunch, x.SettleDown, x.ConfirmStored, x.ReadyReached]
    assert (published(instance), m.may_dispatch(instance, Generation(1))) == ("ready", False)
    instance, orders = step(instance, g.ReadyStored(now_ms=EARLY, generation=Generation(1)))
    assert orders == (x.GateOpened(incarnation=Incarnation(LANE, Generation(1))),)
    return instance


def test_a_start_opens_its_gate_once_ready_is_stored():
    instance = ready_instance()
    assert m.may_dispatch(instance, Generation(1))
    assert not m.may_dispatch(instance, Generation(2))
    assert instance.run.charged is Phase.READY


def test_a_crash_in_service_reads_failed_and_the_next_request_starts_afresh():
    """Lifecycle 4.4 and 4.5; decision 8: it had served for long, so there is no pause."""
    late = Millis(EARLY + 60_000)
    instance, orders = tell_all(
        ready_instance(),
        f.EngineExited(now_ms=late, generation=Generation(1), role=Role.API, reason="segfault"),
    )
    assert (published(instance), orders) == ("stopping", [x.GateClosed(generation=Generation(1))])
    instance, orders = step(instance, f.Turn(now_ms=late, token=Token(2)))
    assert [type(order) for order in orders] == [x.SendTerminate]
    gone = f.Terminated(now_ms=late, token=Token(2), proof=lives.gone(instance.run))
    instance, orders = step(instance, gone)
    assert [type(order) for order in orders] == [x.ReleaseCharge, x.RunGone, x.StopEnded, x.StartEnded]
    assert published(instance) == "failed"
    assert instance.run.last_error is not None
    assert instance.run.last_error.reason == "segfault"
    instance, _ = step(instance, f.Activated(now_ms=late, origin=Origin.REQUEST))
    assert published(instance) == "starting"


def test_a_switch_parks_it_a_request_wakes_it_and_both_are_proven():
    """Lifecycle 12.5, seen from the victim."""
    instance = ready_instance()
    run = instance.run
    instance, orders = tell_all(
        instance,
        f.ParkRequested(now_ms=EARLY, origin=Origin.SWITCH, switch=SWITCH, for_name="b", drain_ends_at_ms=LATE),
        f.GateDrained(now_ms=EARLY, quiet=lives.quiet(run)),
        f.ParkAdmitted(now_ms=EARLY, token=Token(2), deadline_ms=LATE),
        f.ParkConfirmed(
            now_ms=EARLY, token=Token(2), quiet=lives.quiet(run), same=lives.same(run), resident=lives.resident(run)
        ),
    )
    kinds = [type(order) for order in orders]
    assert kinds == [x.GateClosed, x.RaiseCharge, x.SendRelease, x.SettleDown, x.ParkEnded]
    assert orders[-1].switch == SWITCH
    assert (published(instance), instance.run.charged, instance.gate.reasons) == ("parked", Phase.PARKED, frozenset())
    instance, orders = tell_all(
        instance,
        f.Activated(now_ms=EARLY, origin=Origin.REQUEST, wait_ends_at_ms=LATE),
        f.WakeAdmitted(now_ms=EARLY, token=Token(3), deadline_ms=LATE),
        f.WakeConfirmed(
            now_ms=EARLY,
            token=Token(3),
            back=lives.back(run),
            usable=lives.usable(run),
            canary=lives.canary(run),
            same=lives.same(run),
        ),
        g.ReadyStored(now_ms=EARLY, generation=Generation(1)),
    )
    kinds = [type(order) for order in orders]
    assert kinds == [x.RaiseCharge, x.SendRestore, x.SettleDown, x.ConfirmStored, x.ReadyReached, x.GateOpened]
    assert instance.run.generation == Generation(1)


def test_a_new_controller_session_closes_calls_the_switch_off_and_opens_on_fresh_proofs_alone():
    """Lifecycle 18.2, invariant 42."""
    instance, _ = tell_all(
        ready_instance(),
        f.ParkRequested(now_ms=EARLY, origin=Origin.SWITCH, switch=SWITCH, drain_ends_at_ms=LATE),
        f.SessionBegan(now_ms=lives.SOON, session=1),
    )
    assert instance.phase is ResidencyPhase.READY
    assert instance.gate.reasons == {Closure.UNPROVEN}
    assert m.wants_proof(instance)
    run = instance.run
    old = g.Proven(now_ms=LATE, same=lives.same(run), usable=lives.usable(run))
    assert step(instance, old) == (instance, ())
    fresh = g.Proven(now_ms=LATE, same=lives.same(run, at_ms=LATE), usable=lives.usable(run, at_ms=LATE))
    instance, orders = step(instance, fresh)
    assert [type(order) for order in orders] == [x.GateOpened]


def test_a_stop_says_for_whom_it_was_made():
    """Decision 18."""
    why = Stop(kind=StopKind.PRESSURE, asked_at_ms=EARLY, for_name="mistral", switch=SWITCH)
    instance, _ = tell_all(ready_instance(), f.StopRequested(now_ms=EARLY, stop=why, drain_ends_at_ms=LATE))
    assert m.why_stopped(instance) == why
    instance, orders = tell_all(
        instance,
        f.RequestsEnded(now_ms=EARLY, generation=Generation(1)),
        f.Turn(now_ms=EARLY, token=Token(2)),
        f.IdleGateEnded(now_ms=EARLY, token=Token(2), verdict="idle", next_token=Token(3)),
        f.Terminated(now_ms=EARLY, token=Token(3), proof=lives.gone(instance.run)),
    )
    assert published(instance) == "stopped"
    assert m.why_stopped(instance) == why
    assert x.StopEnded(stop=why) in orders


# --- a model of a host, in counters -------------------------------------------------------------------

WEIGHT = {Phase.NONE: 0, Phase.COLD: 10, Phase.READY: 8, Phase.PARKING: 8, Phase.PARKED: 2, Phase.WAKE: 9}
"""Bytes charged per phase, as a ledger would."""


@attrs.define
class Engine:
    """What really runs: its generation, whether its model is in memory, and what it would answer."""

    generation: int
    loaded: bool = False
    parked: bool = False
    answer: str = "42"

    @property
    def weighs(self) -> int:
        """Bytes really held."""
        return 2 if self.parked else 8 if self.loaded else 10


TROUBLES = {"stops", "settles only at stop", "switch gives up", "orders go wrong", "exits", "restarts", "host lost"}


def trouble(name: str) -> Any:
    """The rule is tried only in runs that have this trouble."""
    return precondition(lambda self: name in self.troubles)


class Lane(RuleBasedStateMachine):
    """One lane, its host, its ledger and its requests. Proofs are built from what really is; tables are never read."""

    def __init__(self) -> None:
        super().__init__()
        self.instance = born(LANE)
        self.now = 1_000
        self.token = 0
        self.generation = 0
        self.session = 0
        self.engine: Engine | None = None
        self.orders: list[x.HostOrder] = []  # sent, in the order of the lane
        self.tokens: set[int] = set()
        self.launched: set[int] = set()
        self.charged = Phase.NONE
        self.open_for: int | None = None
        self.running = 0
        self.told: list[f.Fact] = []
        self.stopped_by_hand = False
        self.unstored: list[int] = []
        self.reference: str | None = None
        self.proven_in: int | None = None
        self.troubles: set[str] = set()

    # --- plumbing

    def feed(self, event: f.Fact) -> tuple[Any, ...]:
        self.told.append(event)
        self.instance, orders = step(self.instance, event)
        raised = False
        for order in orders:
            match order:
                case x.RaiseCharge(phase=phase):
                    assert WEIGHT[phase] >= WEIGHT[self.charged], "a raise raises"
                    self.charged, raised = phase, True
                case x.SettleDown(phase=phase, proof=proof):
                    assert proof, "3: nothing falls without a proof"
                    self.charged = phase
                case x.ReleaseCharge(proof=proof):
                    assert proof
                    self.charged = Phase.NONE
                case x.HostOrder():
                    assert order.token not in self.tokens, "27: a token fences one order"
                    assert raised == isinstance(order, x.SendLaunch | x.SendRelease | x.SendRestore), "4"
                    self.tokens.add(order.token)
                    self.orders.append(order)
                    if isinstance(order, x.SendLaunch):
                        assert order.incarnation.generation not in self.launched, "18, 19"
                        assert order.incarnation.generation > max(self.launched, default=0), "19"
                        assert not self.stopped_by_hand, "38"
                        self.launched.add(order.incarnation.generation)
                    if isinstance(order, x.SendRelease):
                        assert self.running == 0, "36"
                case x.ConfirmStored(incarnation=run):
                    self.unstored.append(run.generation)
                    self.proven_in = self.session
                case x.GateOpened(incarnation=run):
                    self.open_for = run.generation
                case x.GateClosed():
                    self.open_for = None
                case x.RunGone(incarnation=run):
                    assert self.engine is None or self.engine.generation != run.generation, "23"
                    self.running = 0
        return orders

    def when(self) -> Millis:
        return Millis(self.now)

    def fresh(self) -> Token:
        self.token += 1
        return Token(self.token)

    def known(self) -> Incarnation:
        return Incarnation(LANE, Generation(self.instance.run.generation or 0))

    # --- proofs, of what is

    def gone(self, run: Incarnation) -> Any:
        if self.engine is not None and self.engine.generation == run.generation:
            return None
        processes = self.instance.run.processes
        if not processes:
            return NeverLaunched(incarnation=run, fenced=True, observed_at_ms=self.when())
        return Gone(
            incarnation=run,
            processes=processes,
            absent=frozenset(PROCESSES),
            group_empty=True,
            observed_at_ms=self.when(),
        )

    def same(self, run: Incarnation) -> SameEngine | None:
        if self.engine is None or self.engine.generation != run.generation:
            return None
        return SameEngine(
            incarnation=run, recorded=PROCESSES, alive=frozenset(PROCESSES), strangers=0, observed_at_ms=self.when()
        )

    def usable(self, run: Incarnation) -> Usable | None:
        engine = self.engine
        if engine is None or engine.generation != run.generation or not engine.loaded or engine.parked:
            return None
        return Usable(incarnation=run, answer_chars=2, probed_at_ms=self.when())

    def resident(self, run: Incarnation) -> dict[Any, Resident] | None:
        if self.engine is None or not self.engine.parked:
            return None
        return {
            lives.UNIFIED: Resident(
                incarnation=run,
                resident_bytes=Bytes(2),
                budget_bytes=Bytes(2),
                released_at_ms=Millis(self.now - 1),
                sampled_at_ms=self.when(),
            )
        }

    def canary(self, run: Incarnation) -> Canary | None:
        if self.engine is None or self.reference is None or self.engine.answer != self.reference:
            return None
        return Canary(incarnation=run, expected=self.reference, actual=self.engine.answer)

    def quiet(self, run: Incarnation) -> Quiet | None:
        if self.running or self.open_for is not None:
            return None
        return Quiet(
            incarnation=run,
            gate_closed_at_ms=Millis(0),
            router_in_flight=0,
            running=0,
            waiting=0,
            read_at_ms=self.when(),
        )

    # --- what happens

    @initialize(troubles=st.sets(st.sampled_from(sorted(TROUBLES)), max_size=2), serving=st.booleans())
    def a_run_has_its_troubles(self, troubles: set[str], serving: bool) -> None:
        """Drawn once and often none, so that runs differ in kind; half of them begin with a model that serves."""
        self.troubles = troubles
        if serving:
            self.somebody_wants_it(Origin.REQUEST, None)
            for _ in range(2):
                self.everything_goes_its_way()
            assert self.open_for == 1

    def teardown(self) -> None:
        """62, 63, 64: once nothing goes wrong any more, every life comes to rest, and what it holds is known."""
        self.running = 0
        for _ in range(12):
            self.everything_goes_its_way()
            if not self.orders:
                self.time_passes(700_000)
        assert published(self.instance) in ("stopped", "failed", "ready", "parked"), self.instance

    @rule(ms=st.sampled_from((1, 900, 31_000, 200_000)))
    def time_passes(self, ms: int) -> None:
        self.now += ms
        self.feed(f.Ticked(now_ms=self.when()))

    @rule(origin=st.sampled_from((Origin.OPERATOR, Origin.REQUEST)), ends=st.sampled_from((None, 20_000)))
    def somebody_wants_it(self, origin: Origin, ends: int | None) -> None:
        if origin is Origin.OPERATOR and published(self.instance) in ("stopped", "failed"):
            self.stopped_by_hand = False
        bound = None if ends is None else Millis(self.now + ends)
        self.feed(f.Activated(now_ms=self.when(), origin=origin, wait_ends_at_ms=bound))

    @rule(verdict=st.sampled_from(("yes", "yes", "yes", "no", "later")))
    def the_scheduler_comes_by(self, verdict: str) -> None:
        match m.wants(self.instance, self.when()):
            case Want.PLACE if verdict == "yes":
                self.generation += 1
                self.feed(
                    f.Placed(
                        now_ms=self.when(),
                        host=HOST,
                        generation=Generation(self.generation),
                        token=self.fresh(),
                        deadline_ms=Millis(self.now + 60_000),
                        **TRAITS,
                    )
                )
            case Want.PLACE if verdict == "no":
                self.feed(f.NotPlaced(now_ms=self.when(), code="insufficient_memory", reason="full"))
            case Want.PLACE:
                until = Millis(self.now + 5_000)
                self.feed(f.Held(now_ms=self.when(), until_ms=until, cause=HoldCause.CLEANUP))
            case Want.ROOM_TO_PARK if verdict == "yes":
                deadline = Millis(self.now + 60_000)
                self.feed(f.ParkAdmitted(now_ms=self.when(), token=self.fresh(), deadline_ms=deadline))
            case Want.ROOM_TO_PARK:
                self.feed(f.ParkNotAdmitted(now_ms=self.when(), code="parked_capacity", reason="full"))
            case Want.ROOM_TO_WAKE if verdict == "yes":
                deadline = Millis(self.now + 60_000)
                self.feed(f.WakeAdmitted(now_ms=self.when(), token=self.fresh(), deadline_ms=deadline))
            case Want.ROOM_TO_WAKE:
                self.feed(f.WakeNotAdmitted(now_ms=self.when(), code="insufficient_memory", reason="full"))
            case Want.TURN:
                self.feed(f.Turn(now_ms=self.when(), token=self.fresh()))

    @rule(
        origin=st.sampled_from((Origin.OPERATOR, Origin.IDLE, Origin.SWITCH)),
        settle_at_stop=st.sampled_from((False, False, True)),
    )
    def somebody_wants_its_memory(self, origin: Origin, settle_at_stop: bool) -> None:
        self.feed(
            f.ParkRequested(
                now_ms=self.when(),
                origin=origin,
                switch=SWITCH if origin is Origin.SWITCH else None,
                drain_ends_at_ms=Millis(self.now + 30_000),
                settle_at_stop=settle_at_stop and "settles only at stop" in self.troubles,
            )
        )

    @trouble("stops")
    @rule(kind=st.sampled_from((StopKind.OPERATOR, StopKind.OPERATOR, StopKind.PRESSURE, StopKind.SATURATION)))
    def somebody_stops_it(self, kind: StopKind) -> None:
        if kind is StopKind.OPERATOR:
            self.stopped_by_hand = True
        switch = SWITCH if kind is StopKind.PRESSURE else None
        asked = Stop(kind=kind, asked_at_ms=self.when(), switch=switch)
        self.feed(f.StopRequested(now_ms=self.when(), stop=asked, drain_ends_at_ms=Millis(self.now + 30_000)))

    @trouble("switch gives up")
    @rule()
    def the_switch_gives_up(self) -> None:
        self.feed(f.Withdrawn(now_ms=self.when(), switch=SWITCH))

    @precondition(lambda self: self.orders)
    @rule(how=st.sampled_from(("well", "well", "well", "badly", "lost, done", "lost, not done")))
    def the_host_performs_an_order(self, how: str) -> None:
        how = how if "orders go wrong" in self.troubles else "well"
        order = self.orders.pop(0)
        run, token = order.incarnation, order.token
        self.now += 1
        if how == "lost, not done":
            self.feed(f.OrderLost(now_ms=self.when(), token=token, reason="session lost"))
            return
        outcome = self.perform(order, run, token, well=how != "badly")
        if how == "lost, done" or outcome is None:
            outcome = f.OrderLost(now_ms=self.when(), token=token, reason="session lost")
        self.feed(outcome)

    def perform(self, order: x.HostOrder, run: Incarnation, token: Token, *, well: bool) -> f.Fact | None:
        """Do what the order says to what really is, and answer with what is then true."""
        now, engine = self.when(), self.engine
        match order:
            case x.SendLaunch():
                assert engine is None, "a launch beside a live engine"
                assert self.charged is Phase.COLD
                if not well:
                    return f.LaunchFailed(
                        now_ms=now,
                        token=token,
                        code="launch_failed",
                        reason="exit 1",
                        proof=self.gone(run),
                        transient=self.now % 2 == 0,
                    )
                self.engine = Engine(run.generation, loaded=True)
                self.reference = self.engine.answer
                self.feed(f.Spawned(now_ms=now, token=token, processes=PROCESSES))
                return f.LaunchReady(
                    now_ms=now, token=token, processes=PROCESSES, usable=self.usable(run), canary=self.reference
                )
            case x.SendRelease():
                if engine is None or not well:
                    return f.ParkRefused(now_ms=now, token=token, code="unavailable", reason="not quiescent")
                engine.parked = True
                quiet, same = self.quiet(run), self.same(run)
                assert quiet is not None, "36: released while something ran"
                return f.ParkConfirmed(
                    now_ms=now, token=token, quiet=quiet, same=same, resident=self.resident(run) or {}
                )
            case x.SendRestore():
                if engine is None:
                    return f.WakeFailed(now_ms=now, token=token, code="operation_failed", reason="gone")
                engine.parked = False
                engine.answer = "42" if well else "43"
                if not well and self.now % 2:
                    return f.WakeFailed(now_ms=now, token=token, code="wake", reason="42 became 43", mismatch=True)
                back = attrs.evolve(lives.back(self.instance.run), incarnation=run)
                return f.WakeConfirmed(
                    now_ms=now,
                    token=token,
                    back=back,
                    usable=self.usable(run),
                    canary=self.canary(run),
                    same=self.same(run),
                )
            case x.SendAwaitIdle():
                verdict = "gone" if engine is None else "busy" if self.running else "idle"
                return f.IdleGateEnded(now_ms=now, token=token, verdict=verdict, next_token=self.fresh())
            case x.SendTerminate():
                if not well:
                    return f.TerminateUnproven(now_ms=now, token=token, reason="1 alive")
                self.engine = None
                return f.Terminated(now_ms=now, token=token, proof=self.gone(run))
            case x.SendProbe():
                gone = self.gone(run)
                if gone is not None:
                    return f.Probed(now_ms=now, token=token, gone=gone)
                return f.Probed(
                    now_ms=now,
                    token=token,
                    same=self.same(run),
                    usable=self.usable(run),
                    resident=self.resident(run),
                    canary=self.canary(run),
                )
        return None

    @rule()
    def everything_goes_its_way(self) -> None:
        """The scheduler says yes, the host does it, the disk is done, requests end and the load is read."""
        self.the_scheduler_comes_by("yes")
        if self.orders:
            self.the_host_performs_an_order("well")
        if self.unstored:
            self.the_disk_is_done()
        elif self.running:
            self.running -= 1
        elif self.engine is not None:
            self.the_load_is_read(True)

    @precondition(lambda self: self.unstored)
    @rule()
    def the_disk_is_done(self) -> None:
        self.feed(g.ReadyStored(now_ms=self.when(), generation=Generation(self.unstored.pop(0))))

    @precondition(lambda self: "exits" in self.troubles and self.engine is not None)
    @rule()
    def the_engine_exits(self) -> None:
        assert self.engine is not None
        generation, self.engine = self.engine.generation, None
        exited = f.EngineExited(now_ms=self.when(), generation=Generation(generation), role=Role.API, reason="segv")
        self.feed(exited)

    @precondition(lambda self: self.engine is not None)
    @rule()
    def a_helper_exits(self) -> None:
        assert self.engine is not None
        before = self.instance
        exited = f.EngineExited(
            now_ms=self.when(), generation=Generation(self.engine.generation), role=HELPER.role, reason="done"
        )
        self.feed(exited)
        assert self.instance == before, "22"

    @rule()
    def a_request_comes(self) -> None:
        if self.open_for is not None and m.may_dispatch(self.instance, Generation(self.open_for)):
            assert self.engine is None or self.engine.generation == self.open_for, "28"
            self.running += 1

    @precondition(lambda self: self.running)
    @rule()
    def a_request_ends(self) -> None:
        self.running -= 1

    @precondition(lambda self: self.engine is not None)
    @rule(idle=st.booleans())
    def the_load_is_read(self, idle: bool) -> None:
        if self.running:
            return
        quiet = self.quiet(self.known())
        if idle and quiet is not None:
            self.feed(f.GateDrained(now_ms=self.when(), quiet=quiet))
        else:
            self.feed(f.RequestsEnded(now_ms=self.when(), generation=self.known().generation))

    @trouble("restarts")
    @rule()
    def the_controller_restarts(self) -> None:
        """Orders without an outcome are lost; whether the host performs them is another matter."""
        self.session += 1
        self.open_for = None
        self.unstored.clear()
        token = self.instance.run.token
        self.feed(f.SessionBegan(now_ms=self.when(), session=self.session))
        if m.in_flight(self.instance) and token is not None:
            self.orders.clear()
            self.feed(f.OrderLost(now_ms=self.when(), token=token, reason="restart"))

    @trouble("host lost")
    @rule()
    def the_host_is_lost(self) -> None:
        self.feed(g.HostLost(now_ms=self.when()))

    @trouble("silent")
    @rule()
    def the_engine_is_doubted(self) -> None:
        self.feed(g.Doubted(now_ms=self.when()))

    @rule()
    def the_host_proves_itself(self) -> None:
        self.now += 1
        self.feed(f.HostReturned(now_ms=self.when()))
        run = self.known()
        same, usable = self.same(run), self.usable(run)
        if same is not None and usable is not None and m.wants_proof(self.instance):
            self.proven_in = self.session
            self.feed(g.Proven(now_ms=self.when(), same=same, usable=usable))

    @precondition(lambda self: any(isinstance(event, f.Outcome) for event in self.told))
    @rule(pick=st.integers(0, 10_000))
    def an_old_answer_comes_again(self, pick: int) -> None:
        old = [event for event in self.told if isinstance(event, f.Outcome)]
        event = old[pick % len(old)]
        before, token = self.instance, self.instance.run.token
        if event.token != token and not isinstance(event, f.Terminated | f.LaunchFailed | f.Probed):
            self.feed(attrs.evolve(event, now_ms=self.when()))
            assert self.instance == before, "20: stale answers change nothing"

    # --- what is always so

    @invariant()
    def memory_is_never_held_uncharged(self) -> None:
        """4, 12, 13: what an engine really holds is charged, through every lost answer and every restart."""
        assert self.charged is self.instance.run.charged
        assert (self.engine.weighs if self.engine else 0) <= WEIGHT[self.charged]

    @invariant()
    def what_is_down_is_free(self) -> None:
        """13."""
        if published(self.instance) in ("stopped", "failed"):
            assert self.charged is Phase.NONE
            assert self.engine is None

    @invariant()
    def an_open_gate_serves(self) -> None:
        """28, 29, 42, 44: READY, this generation, proven in this session, and answering as at its first start."""
        if self.open_for is None:
            assert self.instance.gate.phase is GatePhase.CLOSED
            return
        assert published(self.instance) == "ready"
        assert self.proven_in == self.session
        if self.engine is not None:
            assert self.engine.generation == self.open_for
            assert self.engine.loaded
            assert not self.engine.parked
            assert self.engine.answer == self.reference

    @invariant()
    def a_parked_engine_runs_nothing(self) -> None:
        """36."""
        if published(self.instance) == "parked":
            assert self.running == 0

    @invariant()
    def a_reason_that_is_left_keeps_it_closed(self) -> None:
        """43."""
        gate = self.instance.gate
        assert not gate.reasons or gate.phase is GatePhase.CLOSED

    @invariant()
    def one_order_at_a_time(self) -> None:
        """An instance waits for one answer; what is older was given up."""
        assert not m.in_flight(self.instance) or m.wants(self.instance, self.when()) is None


TestALaneWithItsHost = Lane.TestCase
TestALaneWithItsHost.settings = settings(
    max_examples=250,
    stateful_step_count=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_a_refusal_is_told_with_its_code():
    _, orders = step(born(LANE), f.ParkRequested(now_ms=EARLY, origin=Origin.OPERATOR, drain_ends_at_ms=LATE))
    assert orders == (Refused(code="lifecycle_conflict", event="ParkRequested"),)
