"""One switch: room is made on one host for one waiting deployment, by parking or stopping its neighbours.

The window, the drain and the recheck belong to the switch; each victim is its own instance, READY
with an open gate until the window closes. Nothing is charged for the target before every victim's
release is proven. One switch runs per host at a time. (Reference: lifecycle 12.)
"""

from __future__ import annotations

import enum
from typing import Any

import attrs

from capyctl.fsm.table import Machine, Refused, Row, any_of, at, ignore, refuse
from capyctl.fsm.types import DeploymentId, HostId, Incarnation, Lane, Millis, SwitchId

NEVER = Millis(0)


class Phase(enum.Enum):
    """Where a switch is."""

    PLANNING = "planning"  # the victims are being chosen
    WINDOW = "window"  # victims still serve
    DRAINING = "draining"  # victims' gates are closed by `switch`, requests still run
    RELEASING = "releasing"  # victims park or stop
    RECHECK = "recheck"  # does the target fit now?
    ACTIVATING = "activating"  # the target wakes or starts
    OPENING = "opening"  # the target's waiters are let in
    DONE = "done"
    FAILED = "failed"


class Released(enum.Enum):
    """How a victim's memory came free; the text that status shows."""

    PARKED = "parked"
    STOPPED = "stopped"
    STOPPED_NO_ROOM = "stopped (no room to park)"


# --- state ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Victim:
    """One instance that gives way.

    `last_ready`: its deployment has no other READY instance, so it gets a window. `quiet_since_ms`:
    when a request last started or finished on it. `running`: its requests in flight.
    """

    incarnation: Incarnation
    parks: bool
    last_ready: bool
    running: int = 0
    quiet_since_ms: Millis = NEVER
    drained: bool = False
    no_room: bool = False
    released: Released | None = None

    @property
    def lane(self) -> Lane:
        return self.incarnation.lane


@attrs.frozen(kw_only=True)
class State:
    """`wanted_since_ms` is the arrival of the target's oldest waiter when the switch began."""

    phase: Phase = Phase.PLANNING
    switch: SwitchId
    target: DeploymentId
    host: HostId
    started_at_ms: Millis
    wanted_since_ms: Millis
    victims: tuple[Victim, ...] = ()
    window_ms: Millis = NEVER
    window_ends_at_ms: Millis | None = None
    drain_limit_ms: Millis = NEVER
    drain_ends_at_ms: Millis | None = None
    ended_at_ms: Millis | None = None
    code: str | None = None
    reason: str = ""


# --- events ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Event:
    """A fact about one switch, and when it was seen."""

    now_ms: Millis


@attrs.frozen(kw_only=True)
class PlanMade(Event):
    """The smallest set of victims whose release makes the target fit on this host."""

    victims: tuple[Victim, ...]
    window_ms: Millis
    drain_limit_ms: Millis


@attrs.frozen(kw_only=True)
class NoPlan(Event):
    """No set of victims that policy allows makes room; `reason` names host, need, free and evictable."""

    code: str
    reason: str


@attrs.frozen(kw_only=True)
class TrafficSeen(Event):
    """A request started or finished on a victim; `running` is its count after that."""

    lane: Lane
    running: int


@attrs.frozen(kw_only=True)
class VictimDrained(Event):
    """A victim's gate is closed and it is proven quiet (P-QUIET, carried by its own machine)."""

    lane: Lane


@attrs.frozen(kw_only=True)
class ParkRefused(Event):
    """A victim's park was refused for memory when it was armed."""

    lane: Lane


@attrs.frozen(kw_only=True)
class VictimReleased(Event):
    """A victim is parked or stopped with proof, whoever asked for it."""

    lane: Lane
    released: Released


@attrs.frozen(kw_only=True)
class VictimLost(Event):
    """A victim is not released, and keeps its charge: it `serves` on, or nobody knows what became of it.

    `reason` of one that serves on is read by clients: it names nobody.
    """

    lane: Lane
    reason: str
    serves: bool = False


@attrs.frozen(kw_only=True)
class TargetFits(Event):
    """On fresh observations the target's full peak fits on this host."""


@attrs.frozen(kw_only=True)
class TargetDoesNotFit(Event):
    """Released, observed anew, and it still does not fit."""

    code: str
    reason: str


@attrs.frozen(kw_only=True)
class TargetReady(Event):
    """An instance of the target is READY."""


@attrs.frozen(kw_only=True)
class TargetFailed(Event):
    """The target's activation failed, is uncertain, or was called off."""

    code: str
    reason: str


@attrs.frozen(kw_only=True)
class WaitersLetIn(Event):
    """The target's gate is open and its waiters, up to 32, were given places."""


@attrs.frozen(kw_only=True)
class Ticked(Event):
    """Time passed."""


@attrs.frozen(kw_only=True)
class ControllerRestarted(Event):
    """A new controller session: a switch does not outlive its controller."""


# --- effects --------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Effect:
    """An order about one switch."""

    switch: SwitchId


@attrs.frozen(kw_only=True)
class CloseVictims(Effect):
    """Add the closure reason `switch` to these gates."""

    lanes: tuple[Lane, ...]


@attrs.frozen(kw_only=True)
class DropSwitchReason(Effect):
    """Remove this switch's closure reason, and only it, from these gates."""

    lanes: tuple[Lane, ...]


@attrs.frozen(kw_only=True)
class ReleaseVictims(Effect):
    """Park those that park, stop the others (kind pressure)."""

    park: tuple[Lane, ...]
    stop: tuple[Lane, ...]


@attrs.frozen(kw_only=True)
class StopVictim(Effect):
    """Stop this victim instead of parking it: there is no room for the copy."""

    lane: Lane


@attrs.frozen(kw_only=True)
class CheckAgain(Effect):
    """Does the target's peak fit now, on fresh observations? Answer: TargetFits or TargetDoesNotFit."""

    target: DeploymentId
    host: HostId


@attrs.frozen(kw_only=True)
class ActivateTarget(Effect):
    """Reserve the target's peak on this host and wake or start it."""

    target: DeploymentId
    host: HostId


@attrs.frozen(kw_only=True)
class LetWaitersIn(Effect):
    """Give the target's waiters places, 32 at most, in order of arrival. Answer: WaitersLetIn."""

    target: DeploymentId


@attrs.frozen(kw_only=True)
class FailWaiters(Effect):
    """End the target's waiters with this code; they may ask again."""

    target: DeploymentId
    code: str
    reason: str


@attrs.frozen(kw_only=True)
class Conclude(Effect):
    """The host is free for the next switch; record how this one ended."""

    host: HostId
    phase: Phase
    code: str | None
    reason: str


# --- guards ---------------------------------------------------------------------------------------

OVER = at(Phase.DONE, Phase.FAILED)

VICTIMS_SERVE = at(Phase.PLANNING, Phase.WINDOW)
"""No gate is closed by this switch."""

GATES_CLOSED = at(Phase.DRAINING, Phase.RELEASING, Phase.RECHECK, Phase.ACTIVATING, Phase.OPENING)
"""Victims that are not released are closed by reason `switch`."""

ANY = any_of(Phase)


def _left(victims: tuple[Victim, ...]) -> tuple[Victim, ...]:
    return tuple(victim for victim in victims if victim.released is None)


def _idle_from_ms(victim: Victim, window_ms: Millis) -> Millis | None:
    """From when a victim counts as idle: one window length without a start or finish, and nothing running."""
    return None if victim.running else Millis(victim.quiet_since_ms + window_ms)


def _window_is_over_at_ms(victims: tuple[Victim, ...], window_ms: Millis, ends_at_ms: Millis) -> Millis:
    """The earlier of its fixed end and the moment when every last READY victim that is left counts as idle."""
    protected = [_idle_from_ms(victim, window_ms) for victim in _left(victims) if victim.last_ready]
    idle_at_ms = [at_ms for at_ms in protected if at_ms is not None]
    if len(idle_at_ms) < len(protected):
        return ends_at_ms
    return min(ends_at_ms, max(idle_at_ms, default=NEVER))


def _plan_window_over(event: PlanMade) -> bool:
    ends_at_ms = Millis(event.now_ms + event.window_ms)
    return event.now_ms >= _window_is_over_at_ms(event.victims, event.window_ms, ends_at_ms)


def nobody_gives_way(state: State, event: PlanMade) -> bool:
    """the plan needs no victim"""
    return not event.victims


def a_victim_is_busy_and_alone(state: State, event: PlanMade) -> bool:
    """some victim is its deployment's last READY instance, and not idle for a whole window"""
    return bool(event.victims) and not _plan_window_over(event)


def no_victim_needs_a_window(state: State, event: PlanMade) -> bool:
    """every victim has a READY twin elsewhere, or has been idle for a whole window"""
    return bool(event.victims) and _plan_window_over(event)


def window_is_over(state: State, event: Ticked) -> bool:
    """the window has ended, or every victim it protects has been idle for a whole window"""
    assert state.window_ends_at_ms is not None
    return event.now_ms >= _window_is_over_at_ms(state.victims, state.window_ms, state.window_ends_at_ms)


def window_goes_on(state: State, event: Ticked) -> bool:
    """the window has not ended"""
    return not window_is_over(state, event)


def drain_is_over(state: State, event: Ticked) -> bool:
    """the drain deadline has passed"""
    return state.drain_ends_at_ms is not None and event.now_ms >= state.drain_ends_at_ms


def drain_goes_on(state: State, event: Ticked) -> bool:
    """the drain deadline is ahead"""
    return not drain_is_over(state, event)


def _find(state: State, lane: Lane) -> Victim | None:
    return next((victim for victim in _left(state.victims) if victim.lane == lane), None)


def is_victim(state: State, event: VictimLost) -> bool:
    """it is a victim that is not released"""
    return _find(state, event.lane) is not None


def is_victim_unknown(state: State, event: VictimLost) -> bool:
    """it is a victim that is not released, and nobody knows what became of it"""
    return is_victim(state, event) and not event.serves


def is_victim_that_serves(state: State, event: VictimLost) -> bool:
    """it is a victim that would not give way, and serves on"""
    return is_victim(state, event) and event.serves


def is_no_victim(state: State, event: VictimLost | VictimReleased) -> bool:
    """it is no victim, or is released already"""
    return _find(state, event.lane) is None


def last_to_drain(state: State, event: VictimDrained) -> bool:
    """it is the last victim that had not drained"""
    return [v.lane for v in _left(state.victims) if not v.drained] == [event.lane]


def others_drain(state: State, event: VictimDrained) -> bool:
    """it is a victim, and others still drain"""
    undrained = [v.lane for v in _left(state.victims) if not v.drained]
    return event.lane in undrained and len(undrained) > 1


def not_draining(state: State, event: VictimDrained) -> bool:
    """it is no victim, or was drained or released before"""
    return not last_to_drain(state, event) and not others_drain(state, event)


def no_room_for_the_copy(state: State, event: ParkRefused) -> bool:
    """it is a victim that was to park"""
    victim = _find(state, event.lane)
    return victim is not None and victim.parks and not victim.no_room


def was_not_to_park(state: State, event: ParkRefused) -> bool:
    """it is no victim, or was not to park"""
    return not no_room_for_the_copy(state, event)


def _others_left(state: State, lane: Lane) -> tuple[Victim, ...]:
    return tuple(victim for victim in _left(state.victims) if victim.lane != lane)


def last_released(state: State, event: VictimReleased) -> bool:
    """it is the last victim that was not released"""
    return _find(state, event.lane) is not None and not _others_left(state, event.lane)


def more_left(state: State, event: VictimReleased) -> bool:
    """it is a victim, and others are left"""
    return _find(state, event.lane) is not None and bool(_others_left(state, event.lane))


def more_left_all_drained(state: State, event: VictimReleased) -> bool:
    """it is a victim; others are left, and all of them are drained"""
    return more_left(state, event) and all(victim.drained for victim in _others_left(state, event.lane))


def more_left_some_drain(state: State, event: VictimReleased) -> bool:
    """it is a victim; others are left, and some of them still drain"""
    return more_left(state, event) and not more_left_all_drained(state, event)


# --- changes --------------------------------------------------------------------------------------


def _with(state: State, lane: Lane, **change: Any) -> State:
    victims = tuple(
        attrs.evolve(victim, **change) if victim.lane == lane and victim.released is None else victim
        for victim in state.victims
    )
    return attrs.evolve(state, victims=victims)


def _planned(state: State, event: PlanMade) -> State:
    victims = tuple(
        attrs.evolve(v, drained=False, no_room=v.no_room and not v.parks, released=None) for v in event.victims
    )
    return attrs.evolve(state, victims=victims, window_ms=event.window_ms, drain_limit_ms=event.drain_limit_ms)


def window_opens(state: State, event: PlanMade) -> State:
    """note the victims; the window starts now and never again"""
    return attrs.evolve(_planned(state, event), window_ends_at_ms=Millis(event.now_ms + event.window_ms))


def no_window(state: State, event: PlanMade) -> State:
    """note the victims; the drain starts now"""
    return _draining(_planned(state, event), event)


def _draining(state: State, event: Event) -> State:
    return attrs.evolve(state, drain_ends_at_ms=Millis(event.now_ms + state.drain_limit_ms))


def drain_starts(state: State, event: Ticked) -> State:
    """the drain starts now"""
    return _draining(state, event)


def traffic_noted(state: State, event: TrafficSeen) -> State:
    """note what runs on the victim, and when that changed; nothing of others"""
    return _with(state, event.lane, running=event.running, quiet_since_ms=event.now_ms)


def drain_noted(state: State, event: VictimDrained) -> State:
    """the victim is drained"""
    return _with(state, event.lane, drained=True)


def drain_done(state: State, event: VictimDrained) -> State:
    """the victim is drained; the drain deadline is off"""
    return attrs.evolve(drain_noted(state, event), drain_ends_at_ms=None)


def to_be_stopped(state: State, event: ParkRefused) -> State:
    """the victim is to be stopped for want of room"""
    return _with(state, event.lane, no_room=True)


def release_noted(state: State, event: VictimReleased) -> State:
    """note how the victim's memory came free"""
    victim = _find(state, event.lane)
    released = event.released
    if victim is not None and victim.no_room and released is Released.STOPPED:
        released = Released.STOPPED_NO_ROOM
    return _with(state, event.lane, released=released)


def release_noted_drain_done(state: State, event: VictimReleased) -> State:
    """note how the victim's memory came free; the drain deadline is off"""
    return attrs.evolve(release_noted(state, event), drain_ends_at_ms=None)


def failed_as_told(state: State, event: NoPlan | TargetDoesNotFit | TargetFailed) -> State:
    """note the end and the event's code"""
    return _failed(state, event, event.code, event.reason)


def failed_drain(state: State, event: Ticked) -> State:
    """note the end: the drain took too long"""
    return _failed(state, event, *_drain_failure(state))


def failed_victim(state: State, event: VictimLost) -> State:
    """note the end: a victim's release is not proven"""
    return _failed(state, event, "unreconciled", event.reason)


def failed_to_give_way(state: State, event: VictimLost) -> State:
    """note the end: a victim would not give way"""
    return _failed(state, event, "unavailable", event.reason)


def failed_restart(state: State, event: ControllerRestarted) -> State:
    """note the end: the controller restarted"""
    return _failed(state, event, "unavailable", RESTARTED)


def ended(state: State, event: Event) -> State:
    """note the end"""
    return attrs.evolve(state, ended_at_ms=event.now_ms, drain_ends_at_ms=None)


RESTARTED = "the controller restarted"
ASK_AGAIN = "; ask again later"
"""How a reason ends that clients are told, who may try again; an operator's start does that by itself."""


def _failed(state: State, event: Event, code: str, reason: str) -> State:
    return attrs.evolve(ended(state, event), code=code, reason=reason)


def _drain_failure(state: State) -> tuple[str, str]:
    """Without names: clients read this, and a key may not know the other models."""
    busy = sum(not victim.drained for victim in _left(state.victims))
    who = "the model in its way was" if busy == 1 else f"{busy} models in its way were"
    return "unavailable", f"{who} still answering after {state.drain_limit_ms / 1000:g} s{ASK_AGAIN}"


# --- emits ----------------------------------------------------------------------------------------


def close_planned(state: State, event: PlanMade) -> Effect:
    """CloseVictims"""
    return CloseVictims(switch=state.switch, lanes=tuple(victim.lane for victim in event.victims))


def close_victims(state: State, event: Ticked) -> Effect:
    """CloseVictims"""
    return CloseVictims(switch=state.switch, lanes=tuple(victim.lane for victim in _left(state.victims)))


def drop_switch_reason(state: State, event: Event) -> Effect:
    """DropSwitchReason"""
    return DropSwitchReason(switch=state.switch, lanes=tuple(victim.lane for victim in state.victims))


def release_victims(state: State, event: VictimDrained | VictimReleased) -> Effect:
    """ReleaseVictims"""
    gone = event.lane if isinstance(event, VictimReleased) else None
    left = tuple(victim for victim in _left(state.victims) if victim.lane != gone)
    return ReleaseVictims(
        switch=state.switch,
        park=tuple(victim.lane for victim in left if victim.parks),
        stop=tuple(victim.lane for victim in left if not victim.parks),
    )


def stop_victim(state: State, event: ParkRefused) -> Effect:
    """StopVictim"""
    return StopVictim(switch=state.switch, lane=event.lane)


def check_again(state: State, event: Event) -> Effect:
    """CheckAgain"""
    return CheckAgain(switch=state.switch, target=state.target, host=state.host)


def activate_target(state: State, event: TargetFits) -> Effect:
    """ActivateTarget"""
    return ActivateTarget(switch=state.switch, target=state.target, host=state.host)


def let_waiters_in(state: State, event: TargetReady) -> Effect:
    """LetWaitersIn"""
    return LetWaitersIn(switch=state.switch, target=state.target)


def fail_waiters_of_drain(state: State, event: Ticked) -> Effect:
    """FailWaiters(unavailable)"""
    code, reason = _drain_failure(state)
    return FailWaiters(switch=state.switch, target=state.target, code=code, reason=reason)


def fail_waiters_of_victim(state: State, event: VictimLost) -> Effect:
    """FailWaiters(unavailable)"""
    return FailWaiters(switch=state.switch, target=state.target, code="unavailable", reason=event.reason)


def fail_waiters_as_told(state: State, event: TargetDoesNotFit) -> Effect:
    """FailWaiters(the event's code)"""
    return FailWaiters(switch=state.switch, target=state.target, code=event.code, reason=event.reason)


def conclude_done(state: State, event: Event) -> Effect:
    """Conclude(done)"""
    return Conclude(switch=state.switch, host=state.host, phase=Phase.DONE, code=None, reason="")


def conclude_as_told(state: State, event: NoPlan | TargetDoesNotFit | TargetFailed) -> Effect:
    """Conclude(failed, the event's code)"""
    return _conclude(state, event.code, event.reason)


def conclude_drain(state: State, event: Ticked) -> Effect:
    """Conclude(failed, unavailable)"""
    return _conclude(state, *_drain_failure(state))


def conclude_victim(state: State, event: VictimLost) -> Effect:
    """Conclude(failed, unreconciled)"""
    return _conclude(state, "unreconciled", event.reason)


def conclude_kept(state: State, event: VictimLost) -> Effect:
    """Conclude(failed, unavailable)"""
    return _conclude(state, "unavailable", event.reason)


def conclude_restart(state: State, event: ControllerRestarted) -> Effect:
    """Conclude(failed, unavailable)"""
    return _conclude(state, "unavailable", RESTARTED)


def _conclude(state: State, code: str, reason: str) -> Effect:
    return Conclude(switch=state.switch, host=state.host, phase=Phase.FAILED, code=code, reason=reason)


# --- invariants -----------------------------------------------------------------------------------


def nothing_is_raised_before_every_release(state: State) -> bool:
    """From the recheck on every victim is proven parked or stopped (49)."""
    after = state.phase in at(Phase.RECHECK, Phase.ACTIVATING, Phase.OPENING)
    return not after or not _left(state.victims)


def releasing_follows_draining(state: State) -> bool:
    """While victims are released every one of them is drained or released."""
    return state.phase is not Phase.RELEASING or all(victim.drained for victim in _left(state.victims))


def exactly_draining_has_a_limit(state: State) -> bool:
    """Exactly the DRAINING phase has a drain deadline."""
    return (state.phase is Phase.DRAINING) == (state.drain_ends_at_ms is not None)


def a_window_has_an_end(state: State) -> bool:
    """The window's end is fixed when it opens, at its length from then."""
    return state.phase is not Phase.WINDOW or state.window_ends_at_ms is not None


def only_the_over_have_an_end(state: State) -> bool:
    """Exactly a switch that is over has a time of its end, and exactly a failed one has a code."""
    return (state.phase in OVER) == (state.ended_at_ms is not None) and (state.phase is Phase.FAILED) == (
        state.code is not None
    )


def victims_are_distinct(state: State) -> bool:
    """No instance is a victim twice."""
    return len({victim.lane for victim in state.victims}) == len(state.victims)


def the_target_is_no_victim(state: State) -> bool:
    """The target gives way to nobody in its own switch."""
    return all(victim.lane.deployment != state.target for victim in state.victims)


# --- table ----------------------------------------------------------------------------------------

EVENTS = (
    PlanMade,
    NoPlan,
    TrafficSeen,
    VictimDrained,
    ParkRefused,
    VictimReleased,
    VictimLost,
    TargetFits,
    TargetDoesNotFit,
    TargetReady,
    TargetFailed,
    WaitersLetIn,
    Ticked,
    ControllerRestarted,
)

P, W, D, R = Phase.PLANNING, Phase.WINDOW, Phase.DRAINING, Phase.RELEASING
RC, AC, OP, DONE, FAILED = Phase.RECHECK, Phase.ACTIVATING, Phase.OPENING, Phase.DONE, Phase.FAILED

SWITCH: Machine[State] = Machine(
    name="switch",
    doc=__doc__,
    phases=Phase,
    events=EVENTS,
    invariants=(
        nothing_is_raised_before_every_release,
        releasing_follows_draining,
        exactly_draining_has_a_limit,
        a_window_has_an_end,
        only_the_over_have_an_end,
        victims_are_distinct,
        the_target_is_no_victim,
    ),
    rows=(
        # planning
        Row(when=at(P), on=PlanMade, given=a_victim_is_busy_and_alone, to=W, change=window_opens,
            why="Whoever has no twin elsewhere may finish a window of its own work first."),
        Row(when=at(P), on=PlanMade, given=no_victim_needs_a_window, to=D, change=no_window, emits=(close_planned,),
            why="Nobody is deprived of anything by closing at once."),
        Row(when=at(P), on=PlanMade, given=nobody_gives_way, to=RC, emits=(check_again,),
            why="Room came free while it was planned."),
        Row(when=at(P), on=NoPlan, to=FAILED, change=failed_as_told, emits=(conclude_as_told,),
            why="The target's waiters keep waiting: a victim may become eligible before their deadline."),
        # the window
        Row(when=at(W), on=TrafficSeen, change=traffic_noted,
            why="It may close the window early; it never extends it (47)."),
        Row(when=at(W), on=Ticked, given=window_is_over, to=D, change=drain_starts, emits=(close_victims,),
            why="The gates close together; each victim drains by itself."),
        ignore(at(W), Ticked, given=window_goes_on, why="Victims still serve."),
        Row(when=at(W), on=VictimReleased, given=more_left, change=release_noted,
            why="Its owner or its own end was faster."),
        # the drain
        Row(when=at(D), on=VictimDrained, given=others_drain, change=drain_noted,
            why="Nobody is released before all are drained: a failed drain must give every one back."),
        Row(when=at(D), on=VictimDrained, given=last_to_drain, to=R, change=drain_done, emits=(release_victims,),
            why="All are quiet."),
        Row(when=at(D), on=Ticked, given=drain_is_over, to=FAILED, change=failed_drain,
            emits=(drop_switch_reason, fail_waiters_of_drain, conclude_drain),
            why="Victims serve again; nothing is cut for a switch."),
        ignore(at(D), Ticked, given=drain_goes_on, why="Requests may still end."),
        Row(when=at(D), on=VictimReleased, given=more_left_some_drain, change=release_noted,
            why="Its owner or its own end was faster."),
        Row(when=at(D), on=VictimReleased, given=more_left_all_drained, to=R, change=release_noted_drain_done,
            emits=(release_victims,), why="The ones that are left are quiet."),
        # the release
        Row(when=at(R), on=ParkRefused, given=no_room_for_the_copy, change=to_be_stopped, emits=(stop_victim,),
            why="The room is wanted more than the copy."),
        ignore(at(R), ParkRefused, given=was_not_to_park, why="It is being stopped already."),
        Row(when=at(R), on=VictimReleased, given=more_left, change=release_noted, why="The others go on."),
        Row(when=at(W, D, R), on=VictimReleased, given=last_released, to=RC, change=release_noted_drain_done,
            emits=(check_again,), why="Every release is proven; what was forecast is now measured."),
        Row(when=at(W), on=VictimLost, given=is_victim, to=FAILED, change=failed_victim, emits=(conclude_victim,),
            why="What it holds is not known, so nothing may count on it."),
        Row(when=at(D, R), on=VictimLost, given=is_victim_unknown, to=FAILED, change=failed_victim,
            emits=(drop_switch_reason, conclude_victim),
            why="It stays charged and nothing increases; the others serve again or end as proven."),
        Row(when=at(D, R), on=VictimLost, given=is_victim_that_serves, to=FAILED, change=failed_to_give_way,
            emits=(drop_switch_reason, fail_waiters_of_victim, conclude_kept),
            why="71: who waits is told as after a drain that took too long, or the same victim is asked without end."),
        # the target
        Row(when=at(RC), on=TargetFits, to=AC, emits=(activate_target,),
            why="Only here is anything charged for the target (49)."),
        Row(when=at(RC), on=TargetDoesNotFit, to=FAILED, change=failed_as_told,
            emits=(drop_switch_reason, fail_waiters_as_told, conclude_as_told),
            why="Memory went elsewhere. Waiters are told, or the next victim would be released for nothing."),
        Row(when=at(RC, AC), on=TargetReady, to=OP, emits=(let_waiters_in,),
            why="All its waiters go at once, 32 at most."),
        Row(when=at(P, W), on=TargetReady, to=DONE, change=ended, emits=(conclude_done,),
            why="A READY instance of the target needs no switch."),
        Row(when=at(D), on=TargetReady, to=DONE, change=ended, emits=(drop_switch_reason, conclude_done),
            why="A READY instance of the target needs no switch; victims serve again."),
        ignore(at(R), TargetReady, why="A release cannot be called back; the recheck finds the target READY."),
        ignore(at(OP), TargetReady, why="It is being opened."),
        Row(when=at(P, W), on=TargetFailed, to=FAILED, change=failed_as_told, emits=(conclude_as_told,),
            why="Nobody wants the room any more."),
        Row(when=at(D, RC, AC, OP), on=TargetFailed, to=FAILED, change=failed_as_told,
            emits=(drop_switch_reason, conclude_as_told),
            why="The target's own machine tells its waiters; released victims stay as they are, there is no refill."),
        ignore(at(R), TargetFailed, why="A release cannot be called back; the recheck says what became of the target."),
        Row(when=at(OP), on=WaitersLetIn, to=DONE, change=ended, emits=(drop_switch_reason, conclude_done),
            why="A victim that was parked must not wake behind a closed gate."),
        # the controller
        Row(when=VICTIMS_SERVE, on=ControllerRestarted, to=FAILED, change=failed_restart, emits=(conclude_restart,),
            why="A switch does not outlive its controller; waiting requests died with it."),
        Row(when=GATES_CLOSED, on=ControllerRestarted, to=FAILED, change=failed_restart,
            emits=(drop_switch_reason, conclude_restart),
            why="Its closures go with it; victims are judged by their own state."),
        # what does not concern it
        ignore(ANY - at(W), TrafficSeen, why="Traffic counts in the window alone."),
        ignore(at(D), VictimDrained, given=not_draining, why="It was drained or released before, or gives no way."),
        ignore(ANY - at(D), VictimDrained, why="Only the drain waits for it."),
        ignore(ANY - at(R), ParkRefused, why="Only the release asked for a park."),
        ignore(at(W, D, R), VictimReleased, given=is_no_victim, why="It gives no way, or did already."),
        ignore(ANY - at(W, D, R), VictimReleased, why="No release is awaited."),
        ignore(at(W, D, R), VictimLost, given=is_no_victim, why="It gives no way, or did already."),
        ignore(ANY - at(W, D, R), VictimLost, why="No release is awaited."),
        ignore(ANY - at(W, D), Ticked, why="No deadline runs here."),
        *(ignore(OVER, event, why="It is over.")
          for event in (PlanMade, NoPlan, TargetFits, TargetDoesNotFit, TargetReady, TargetFailed, WaitersLetIn,
                        ControllerRestarted)),
        # what cannot come
        refuse(ANY - OVER - at(P), PlanMade, "internal", why="A switch is planned once."),
        refuse(ANY - OVER - at(P), NoPlan, "internal", why="A switch is planned once."),
        refuse(ANY - OVER - at(RC), TargetFits, "internal", why="Nobody asked."),
        refuse(ANY - OVER - at(RC), TargetDoesNotFit, "internal", why="Nobody asked."),
        refuse(ANY - OVER - at(OP), WaitersLetIn, "internal", why="Nobody was let in."),
    ),
)  # fmt: skip


def due_at_ms(state: State) -> Millis | None:
    """When a tick would change this switch, if nothing else comes first. May lie in the past: then at once."""
    if state.phase is W and state.window_ends_at_ms is not None:
        return _window_is_over_at_ms(state.victims, state.window_ms, state.window_ends_at_ms)
    return state.drain_ends_at_ms


def step(state: State, event: Event) -> tuple[State, tuple[Effect | Refused, ...]]:
    """Decide one event. Pure: the same state and event always give the same answer."""
    return SWITCH.step(state, event)
