"""The dispatch gate of one instance: open exactly while nothing speaks against dispatching to it.

Open means: READY, its readiness proven in the present controller session, its READY record durable,
and no closure reason left. Reasons come and go on their own; removing one never clears another.
This table alone decides invariants 28-30, 42 and 43. Lifecycle 9.
"""

from __future__ import annotations

import enum

import attrs

from capyctl.fsm.effects import ConfirmStored, GateClosed, GateOpened
from capyctl.fsm.facts import Fact
from capyctl.fsm.proofs import SameEngine, Usable
from capyctl.fsm.table import Machine, Row, any_of, at, ignore
from capyctl.fsm.types import Generation, Incarnation, Lane, Millis

# --- phases ---------------------------------------------------------------------------------------


class GatePhase(enum.Enum):
    """Whether a request may be dispatched."""

    CLOSED = "closed"
    OPEN = "open"


class Closure(enum.Enum):
    """One reason against dispatching."""

    SWITCH = "switch"  # a switch drains it
    PARK = "park"  # an operator or an idle timer parks it
    STOP = "stop"  # it is being stopped; never removed for this incarnation
    HOST_SESSION = "host_session"  # its host does not answer
    ENGINE_EXIT = "engine_exit"  # its engine exited; never removed for this incarnation
    UNPROVEN = "unproven"  # nobody proved its readiness to the present controller session
    UNSTORED = "unstored"  # the record that it is READY is not durable yet


LASTING = frozenset({Closure.STOP, Closure.ENGINE_EXIT})
"""Reasons that only the end of the incarnation removes."""

PROVABLE = frozenset({Closure.HOST_SESSION, Closure.UNPROVEN})
"""Reasons that P-READY and P-SAME remove."""

# --- state ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class State:
    """The gate. `generation` is the run that is READY, None while none is; times are Unix milliseconds."""

    lane: Lane
    phase: GatePhase = GatePhase.CLOSED
    generation: Generation | None = None
    reasons: frozenset[Closure] = frozenset()
    session: int = 0  # the present controller session
    proven_in: int | None = None  # the session to which this run's readiness was proven
    closed_at_ms: Millis = Millis(0)
    doubted_at_ms: Millis = Millis(0)  # proofs older than this do not remove a provable reason


# --- events ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ReadyProven(Fact):
    """From the instance: this generation is READY, by a proof of `probed_at_ms`."""

    generation: Generation
    probed_at_ms: Millis


@attrs.frozen(kw_only=True)
class LeftReady(Fact):
    """From the instance: no run of it is READY any more (parked, unknown or gone)."""


@attrs.frozen(kw_only=True)
class ReasonAdded(Fact):
    """From the instance: one more reason against dispatching."""

    reason: Closure


@attrs.frozen(kw_only=True)
class ReasonRemoved(Fact):
    """From the instance: this reason no longer holds."""

    reason: Closure


@attrs.frozen(kw_only=True)
class ReadyStored(Fact):
    """The record that this generation is READY is durable (W5)."""

    generation: Generation


@attrs.frozen(kw_only=True)
class HostLost(Fact):
    """The session of its host ended or is unresponsive."""


@attrs.frozen(kw_only=True)
class Proven(Fact):
    """P-SAME and a fresh P-READY of the running engine."""

    same: SameEngine
    usable: Usable


@attrs.frozen(kw_only=True)
class SessionBegan(Fact):
    """A new controller session over the stored world: nothing is proven to it, and no switch survived."""

    session: int


FROM_OUTSIDE = (ReadyStored, HostLost, Proven, SessionBegan)
"""What control tells the gate through `instance.step`; the rest comes from the other machines."""

EVENTS: tuple[type[Fact], ...] = (ReadyProven, LeftReady, ReasonAdded, ReasonRemoved, *FROM_OUTSIDE)
