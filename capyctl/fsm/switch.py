"""One switch: room is made on one host for one waiting deployment, by parking or stopping its neighbours.

The window, the drain and the recheck belong to the switch; each victim is its own instance, READY
with an open gate until the window closes. Nothing is charged for the target before every victim's
release is proven. One switch runs per host at a time. (Reference: lifecycle 12.)
"""

from __future__ import annotations

import enum

import attrs

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
    """Nobody knows what became of a victim, or it cannot be released; it keeps its charge."""

    lane: Lane
    reason: str


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
