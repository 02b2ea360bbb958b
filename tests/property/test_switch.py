"""The switch machine: the window is never extended, nothing is raised early, a failure leaves nobody half-way."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from explore import assert_total, explore, play
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from capyctl.errors import InvariantBroken
from capyctl.fsm import switch as m
from capyctl.fsm.switch import Phase, Released
from capyctl.fsm.types import DeploymentId, Generation, HostId, Incarnation, Lane, Millis, SwitchId

SWITCH = SwitchId("01SWITCH")
TARGET = DeploymentId("01TARGET")
HOST = HostId("01HOST")
A = Lane(DeploymentId("01A"), 0)
B = Lane(DeploymentId("01B"), 0)
STRANGER = Lane(DeploymentId("01C"), 0)
START = Millis(1000)
WINDOW = Millis(100)
LIMIT = Millis(500)


def planning() -> m.State:
    return m.State(switch=SWITCH, target=TARGET, host=HOST, started_at_ms=START, wanted_since_ms=Millis(900))


def victim(lane: Lane, **more: Any) -> m.Victim:
    told = {"parks": True, "last_ready": True, "running": 1, "quiet_since_ms": Millis(950)} | more
    return m.Victim(incarnation=Incarnation(lane, Generation(3)), **told)


def plan(*victims: m.Victim) -> m.PlanMade:
    return m.PlanMade(now_ms=START, victims=victims, window_ms=WINDOW, drain_limit_ms=LIMIT)


PLANS = (
    plan(),
    plan(victim(A)),
    plan(victim(A, last_ready=False)),
    plan(victim(A, running=0, quiet_since_ms=Millis(900))),
    plan(victim(A), victim(B, parks=False, last_ready=False)),
    plan(victim(A, parks=False, last_ready=False), victim(B, last_ready=False)),
)


def alphabet(state: m.State) -> list[m.Event]:
    now = Millis(1050)
    lanes = (A, B, STRANGER)
    return [
        *(PLANS if state.phase is Phase.PLANNING else PLANS[:1]),
        m.NoPlan(now_ms=now, code="insufficient_memory", reason="needs 2 GiB, 1 GiB free"),
        *(m.TrafficSeen(now_ms=now, lane=lane, running=running) for lane in lanes for running in (0, 1)),
        *(m.VictimDrained(now_ms=now, lane=lane) for lane in lanes),
        *(m.ParkRefused(now_ms=now, lane=lane) for lane in lanes),
        *(m.VictimReleased(now_ms=now, lane=lane, released=r) for lane in lanes for r in Released),
        *(m.VictimLost(now_ms=now, lane=lane, reason="lost", serves=on) for lane in lanes for on in (False, True)),
        m.TargetFits(now_ms=now),
        m.TargetDoesNotFit(now_ms=now, code="insufficient_memory", reason="short"),
        m.TargetReady(now_ms=now),
        m.TargetFailed(now_ms=now, code="activation_failed", reason="exit 1"),
        m.WaitersLetIn(now_ms=now),
        *(m.Ticked(now_ms=Millis(t)) for t in (1060, 1100, 1150, 5000)),
        m.ControllerRestarted(now_ms=now),
    ]


# --- exploration ----------------------------------------------------------------------------------


def test_every_event_is_decided_once_in_every_reachable_state_and_every_row_fires():
    assert_total(m.SWITCH, [planning()], alphabet)


def test_traffic_never_extends_the_window():
    """Invariant 47: its end is fixed when it opens, and no event but its own end or the switch's moves it."""
    for step in explore(m.SWITCH, [planning()], alphabet):
        if step.state.phase is Phase.WINDOW:
            assert step.after.window_ends_at_ms == step.state.window_ends_at_ms
            over = m.Ticked(now_ms=step.state.window_ends_at_ms)
            assert m.step(step.state, over)[0].phase is Phase.DRAINING


def test_a_tick_does_something_exactly_when_it_is_due():
    for step in explore(m.SWITCH, [planning()], alphabet):
        due = m.due_at_ms(step.after)
        late, _ = m.step(step.after, m.Ticked(now_ms=Millis(10**6)))
        assert (due is not None) == (late != step.after)
        if due is not None:
            at_due, _ = m.step(step.after, m.Ticked(now_ms=due))
            assert at_due.phase is not step.after.phase
            before, _ = m.step(step.after, m.Ticked(now_ms=Millis(due - 1)))
            assert before == step.after


def test_what_is_said_of_others_changes_nothing():
    """A stranger, or a victim that is released already, moves no switch."""
    for step in explore(m.SWITCH, [planning()], alphabet):
        lane = getattr(step.event, "lane", None)
        if lane is not None and lane not in {v.lane for v in step.state.victims if v.released is None}:
            assert (step.after, step.orders) == (step.state, ())


def test_closures_and_charges_follow_the_order_of_a_switch():
    """Invariants 48 and 49, on every life: gates, then proofs, then the target; and no closure is left behind."""

    def closed(lanes: frozenset[Lane], step: Any) -> frozenset[Lane]:
        for order in step.orders:
            if isinstance(order, m.CloseVictims):
                lanes |= set(order.lanes)
            if isinstance(order, m.DropSwitchReason):
                lanes -= set(order.lanes)
        return lanes

    for step in explore(m.SWITCH, [planning()], alphabet, memory=frozenset(), fold=closed):
        after = closed(step.memory, step)
        assert after >= {
            v.lane for v in step.after.victims if v.released is None and step.after.phase in m.GATES_CLOSED
        }
        assert not after or step.after.phase in m.GATES_CLOSED, "no closure outlives its switch"
        kinds = [type(order) for order in step.orders]
        if m.ReleaseVictims in kinds:
            assert all(v.drained or v.released for v in step.after.victims)
            (order,) = (order for order in step.orders if isinstance(order, m.ReleaseVictims))
            left = {v.lane: v.parks for v in step.after.victims if v.released is None}
            assert set(order.park) == {lane for lane, parks in left.items() if parks}
            assert set(order.stop) == {lane for lane, parks in left.items() if not parks}
        if m.ActivateTarget in kinds or m.CheckAgain in kinds:
            assert all(v.released for v in step.after.victims)
        if m.StopVictim in kinds:
            assert step.state.phase is Phase.RELEASING
        assert kinds.count(m.Conclude) == (step.after.phase in m.OVER and step.state.phase not in m.OVER)
        for order in step.orders:
            if isinstance(order, m.Conclude):
                assert (order.phase, order.code, order.reason) == (step.after.phase, step.after.code, step.after.reason)


def test_a_state_that_cannot_be_stops_the_machine():
    v = victim(A)
    impossible = [
        attrs.evolve(planning(), phase=Phase.RECHECK, victims=(v,)),
        attrs.evolve(planning(), phase=Phase.RELEASING, victims=(v,)),
        attrs.evolve(planning(), phase=Phase.DRAINING, victims=(v,)),
        attrs.evolve(planning(), phase=Phase.WINDOW, victims=(v,)),
        attrs.evolve(planning(), phase=Phase.DONE),
        attrs.evolve(planning(), phase=Phase.FAILED, ended_at_ms=Millis(1)),
        attrs.evolve(planning(), victims=(v, v)),
        attrs.evolve(planning(), victims=(victim(Lane(TARGET, 1)),)),
    ]
    for state in impossible:
        assert not all(claim(state) for claim in m.SWITCH.invariants), state
    with pytest.raises(InvariantBroken, match="No instance is a victim twice"):
        m.step(planning(), plan(v, v))


# --- stories --------------------------------------------------------------------------------------


def tick(ms: int) -> m.Ticked:
    return m.Ticked(now_ms=Millis(ms))


def test_a_parks_and_b_wakes():
    """The reference's order of operations (lifecycle 12.5)."""
    end = play(
        m.SWITCH,
        planning(),
        [
            (plan(victim(A)), []),
            (m.TrafficSeen(now_ms=Millis(1090), lane=A, running=2), []),
            (tick(1099), []),
            (tick(1100), [m.CloseVictims(switch=SWITCH, lanes=(A,))]),
            (tick(1599), []),
            (m.VictimDrained(now_ms=Millis(1599), lane=A), [m.ReleaseVictims(switch=SWITCH, park=(A,), stop=())]),
            (m.VictimReleased(now_ms=Millis(1700), lane=A, released=Released.PARKED), [m.CheckAgain]),
            (m.TargetFits(now_ms=Millis(1701)), [m.ActivateTarget(switch=SWITCH, target=TARGET, host=HOST)]),
            (m.TargetReady(now_ms=Millis(1900)), [m.LetWaitersIn]),
            (
                m.WaitersLetIn(now_ms=Millis(1901)),
                [
                    m.DropSwitchReason(switch=SWITCH, lanes=(A,)),
                    m.Conclude(switch=SWITCH, host=HOST, phase=Phase.DONE, code=None, reason=""),
                ],
            ),
        ],
        ends=Phase.DONE,
    )
    assert [v.released for v in end.victims] == [Released.PARKED]


def test_a_victim_with_a_twin_elsewhere_gets_no_window():
    state, orders = m.step(planning(), plan(victim(A, last_ready=False)))
    assert (state.phase, state.drain_ends_at_ms) == (Phase.DRAINING, START + LIMIT)
    assert orders == (m.CloseVictims(switch=SWITCH, lanes=(A,)),)


def test_an_idle_window_closes_early_and_traffic_keeps_it_open_to_its_end():
    state, _ = m.step(planning(), plan(victim(A, running=1)))
    ended, _ = m.step(state, m.TrafficSeen(now_ms=Millis(1040), lane=A, running=0))
    assert m.due_at_ms(ended) == 1100, "a whole idle window would end after the window itself"
    state, _ = m.step(planning(), plan(victim(A, running=0, quiet_since_ms=Millis(930))))
    assert state.phase is Phase.WINDOW
    assert m.due_at_ms(state) == 1030
    assert m.step(state, tick(1029))[0].phase is Phase.WINDOW
    assert m.step(state, tick(1030))[0].phase is Phase.DRAINING
    state, _ = m.step(state, m.TrafficSeen(now_ms=Millis(1010), lane=A, running=1))
    assert m.due_at_ms(state) == 1100


def test_a_victim_idle_for_a_whole_window_already_closes_at_once():
    state, _ = m.step(planning(), plan(victim(A, running=0, quiet_since_ms=Millis(900))))
    assert state.phase is Phase.DRAINING


def test_a_stranger_s_traffic_closes_no_window():
    state, _ = m.step(planning(), plan(victim(A)))
    assert m.step(state, m.TrafficSeen(now_ms=Millis(1010), lane=STRANGER, running=0)) == (state, ())


def test_a_drain_that_takes_too_long_gives_every_victim_back():
    """Invariant 48."""
    play(
        m.SWITCH,
        planning(),
        [
            (plan(victim(A, last_ready=False), victim(B, last_ready=False)), [m.CloseVictims]),
            (m.VictimDrained(now_ms=Millis(1100), lane=A), []),
            (
                tick(1500),
                [m.DropSwitchReason(switch=SWITCH, lanes=(A, B)), m.FailWaiters, m.Conclude],
            ),
        ],
        ends=Phase.FAILED,
    )


def test_no_room_for_the_copy_stops_the_victim_and_says_so():
    end = play(
        m.SWITCH,
        planning(),
        [
            (plan(victim(A, last_ready=False)), [m.CloseVictims]),
            (m.VictimDrained(now_ms=Millis(1100), lane=A), [m.ReleaseVictims]),
            (m.ParkRefused(now_ms=Millis(1101), lane=A), [m.StopVictim(switch=SWITCH, lane=A)]),
            (m.ParkRefused(now_ms=Millis(1102), lane=A), []),
            (m.VictimReleased(now_ms=Millis(1200), lane=A, released=Released.STOPPED), [m.CheckAgain]),
        ],
        ends=Phase.RECHECK,
    )
    assert end.victims[0].released is Released.STOPPED_NO_ROOM


def test_an_uncertain_victim_fails_the_switch_and_nothing_is_raised():
    state, _ = m.step(planning(), plan(victim(A, last_ready=False)))
    state, _ = m.step(state, m.VictimDrained(now_ms=Millis(1100), lane=A))
    state, orders = m.step(state, m.VictimLost(now_ms=Millis(1101), lane=A, reason="no answer to the release"))
    assert (state.phase, state.code) == (Phase.FAILED, "unreconciled")
    assert [type(order) for order in orders] == [m.DropSwitchReason, m.Conclude]


def test_a_victim_that_would_not_give_way_fails_the_switch_and_its_waiters_are_told():
    state, _ = m.step(planning(), plan(victim(A, last_ready=False)))
    state, _ = m.step(state, m.VictimDrained(now_ms=Millis(1100), lane=A))
    state, orders = m.step(state, m.VictimLost(now_ms=Millis(1101), lane=A, reason="it is busy", serves=True))
    assert (state.phase, state.code, state.reason) == (Phase.FAILED, "unavailable", "it is busy")
    assert [type(order) for order in orders] == [m.DropSwitchReason, m.FailWaiters, m.Conclude]


def test_victims_that_an_operator_stops_meanwhile_count_as_released():
    both = plan(victim(A), victim(B))
    state, _ = m.step(planning(), both)
    state, _ = m.step(state, m.VictimReleased(now_ms=Millis(1010), lane=A, released=Released.STOPPED))
    assert state.phase is Phase.WINDOW
    state, orders = m.step(state, m.VictimReleased(now_ms=Millis(1020), lane=B, released=Released.STOPPED))
    assert state.phase is Phase.RECHECK
    assert [type(order) for order in orders] == [m.CheckAgain]
    state, _ = m.step(m.step(planning(), both)[0], tick(1100))
    state, _ = m.step(state, m.VictimDrained(now_ms=Millis(1110), lane=A))
    state, orders = m.step(state, m.VictimReleased(now_ms=Millis(1120), lane=B, released=Released.STOPPED))
    assert state.phase is Phase.RELEASING
    assert orders == (m.ReleaseVictims(switch=SWITCH, park=(A,), stop=()),)
    assert state.drain_ends_at_ms is None


@pytest.mark.parametrize("phase", [Phase.PLANNING, Phase.WINDOW, Phase.DRAINING])
def test_a_target_that_becomes_ready_elsewhere_calls_the_switch_off(phase: Phase):
    state = planning()
    if phase is not Phase.PLANNING:
        state, _ = m.step(state, plan(victim(A, last_ready=phase is Phase.WINDOW)))
    assert state.phase is phase
    done, orders = m.step(state, m.TargetReady(now_ms=Millis(1001)))
    assert done.phase is Phase.DONE
    assert (m.DropSwitchReason in [type(order) for order in orders]) == (phase is Phase.DRAINING)


def test_memory_that_went_elsewhere_fails_the_switch_without_a_refill():
    state, _ = m.step(planning(), plan())
    state, orders = m.step(state, m.TargetDoesNotFit(now_ms=Millis(1001), code="insufficient_memory", reason="short"))
    assert state.phase is Phase.FAILED
    assert [type(order) for order in orders] == [m.DropSwitchReason, m.FailWaiters, m.Conclude]


# --- a model of a host, beside the machine ----------------------------------------------------------


class Host(RuleBasedStateMachine):
    """Victims that serve, drain, park, stop or get lost as told; the model counts closures and charges only."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000
        self.state: m.State | None = None
        self.serving: dict[Lane, int] = {}  # READY victims, and what runs on each
        self.closed: set[Lane] = set()
        self.releasing: dict[Lane, str] = {}
        self.freed: set[Lane] = set()
        self.lost: set[Lane] = set()
        self.asked: list[str] = []
        self.raised = False

    @initialize(data=st.data(), count=st.integers(1, 3))
    def begin(self, data: st.DataObject, count: int) -> None:
        self.state = m.State(
            switch=SWITCH, target=TARGET, host=HOST, started_at_ms=Millis(1000), wanted_since_ms=Millis(900)
        )
        victims = []
        for index in range(count):
            lane = Lane(DeploymentId(f"01V{index}"), 0)
            self.serving[lane] = data.draw(st.integers(0, 2))
            victims.append(
                victim(
                    lane,
                    parks=data.draw(st.booleans()),
                    last_ready=data.draw(st.booleans()),
                    running=self.serving[lane],
                    quiet_since_ms=Millis(data.draw(st.sampled_from((0, 950, 1000)))),
                )
            )
        self.feed(m.PlanMade(now_ms=Millis(1000), victims=tuple(victims), window_ms=WINDOW, drain_limit_ms=LIMIT))

    def feed(self, event: m.Event) -> None:
        assert self.state is not None
        self.state, orders = m.step(self.state, event)
        for order in orders:
            match order:
                case m.CloseVictims():
                    self.closed |= set(order.lanes)
                case m.DropSwitchReason():
                    self.closed -= set(order.lanes)
                case m.ReleaseVictims():
                    for lane in (*order.park, *order.stop):
                        assert self.serving.get(lane) == 0, "only what is drained is released"
                        assert lane in self.closed
                    self.releasing |= dict.fromkeys(order.park, "park") | dict.fromkeys(order.stop, "stop")
                case m.StopVictim():
                    assert self.releasing[order.lane] == "no room"
                    self.releasing[order.lane] = "stop"
                case m.CheckAgain():
                    self.asked.append("fit")
                case m.ActivateTarget():
                    assert set(self.serving) == self.freed, "every release is proven first (49)"
                    assert not self.lost
                    self.raised = True
                    self.asked.append("activate")
                case m.LetWaitersIn():
                    self.asked.append("open")

    def later(self, ms: int = 1) -> Millis:
        self.now += ms
        return Millis(self.now)

    def draw_lane(self, data: st.DataObject) -> Lane:
        return data.draw(st.sampled_from(sorted(self.serving)))

    @rule(data=st.data(), more=st.booleans())
    def traffic(self, data: st.DataObject, more: bool) -> None:
        lane = self.draw_lane(data)
        busy = self.serving[lane]
        if lane in self.freed | self.lost or lane in self.releasing or (more and lane in self.closed):
            return  # a closed gate admits nothing
        if not more and not busy:
            return
        self.serving[lane] = busy + 1 if more else busy - 1
        self.feed(m.TrafficSeen(now_ms=self.later(), lane=lane, running=self.serving[lane]))

    @rule(data=st.data())
    def quiet(self, data: st.DataObject) -> None:
        lane = self.draw_lane(data)
        if lane in self.closed and self.serving[lane] == 0 and lane not in self.freed:
            self.feed(m.VictimDrained(now_ms=self.later(), lane=lane))

    @rule(data=st.data(), how=st.sampled_from(("proven", "proven", "no room", "lost", "kept")))
    def release(self, data: st.DataObject, how: str) -> None:
        lane = self.draw_lane(data)
        if lane not in self.releasing or lane in self.freed | self.lost:
            return
        if how in ("lost", "kept"):
            self.lost.add(lane)
            self.feed(m.VictimLost(now_ms=self.later(), lane=lane, reason="no answer", serves=how == "kept"))
        elif how == "no room":
            if self.releasing[lane] == "park":
                if self.state is not None and self.state.phase is Phase.RELEASING:
                    self.releasing[lane] = "no room"
                self.feed(m.ParkRefused(now_ms=self.later(), lane=lane))
        else:
            released = Released.PARKED if self.releasing[lane] == "park" else Released.STOPPED
            self.freed.add(lane)
            self.feed(m.VictimReleased(now_ms=self.later(), lane=lane, released=released))

    @rule(data=st.data())
    def an_operator_stops_one(self, data: st.DataObject) -> None:
        lane = self.draw_lane(data)
        if lane not in self.freed | self.lost:
            self.serving[lane] = 0
            self.freed.add(lane)
            self.feed(m.VictimReleased(now_ms=self.later(), lane=lane, released=Released.STOPPED))

    @precondition(lambda self: self.asked)
    @rule(good=st.sampled_from((True, True, False)))
    def answer(self, good: bool) -> None:
        asked = self.asked.pop()
        now = self.later()
        if asked == "fit":
            bad = m.TargetDoesNotFit(now_ms=now, code="insufficient_memory", reason="short")
            self.feed(m.TargetFits(now_ms=now) if good else bad)
        elif asked == "activate":
            failed = m.TargetFailed(now_ms=now, code="activation_failed", reason="exit 1")
            self.feed(m.TargetReady(now_ms=now) if good else failed)
        else:
            self.feed(m.WaitersLetIn(now_ms=now))

    @rule(ms=st.sampled_from((1, 50, 100, 500)))
    def time_passes(self, ms: int) -> None:
        self.feed(m.Ticked(now_ms=self.later(ms)))

    @rule(what=st.sampled_from(("ready", "failed", "restart", "nothing", "nothing", "nothing")))
    def rarely(self, what: str) -> None:
        now = self.later()
        match what:
            case "ready":
                self.feed(m.TargetReady(now_ms=now))
            case "failed":
                self.feed(m.TargetFailed(now_ms=now, code="activation_failed", reason="called off"))
            case "restart":
                self.asked.clear()
                self.feed(m.ControllerRestarted(now_ms=now))

    @invariant()
    def the_window_and_the_drain_have_their_lengths(self) -> None:
        if self.state is not None and self.state.phase is Phase.WINDOW:
            assert self.state.window_ends_at_ms == 1000 + WINDOW
            assert not self.closed

    @invariant()
    def a_failed_switch_leaves_nobody_half_way(self) -> None:
        """Invariant 48: serving behind an open gate, proven released, on its way there, or lost with its charge."""
        if self.state is not None and self.state.phase in m.OVER:
            assert not self.closed
            for lane in self.serving:
                assert lane in self.freed or lane in self.lost or lane in self.releasing or lane not in self.closed

    @invariant()
    def nothing_is_raised_for_the_target_beside_a_lost_victim(self) -> None:
        assert not (self.raised and self.lost)


TestHost = Host.TestCase
TestHost.settings = settings(
    max_examples=150, stateful_step_count=30, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
