"""What a resident run may be in: its phases, what it remembers, and the sets of phases that the table names."""

from __future__ import annotations

import enum

import attrs

from capyctl.fsm.run import Problem, Run, Stop
from capyctl.fsm.table import any_of, at
from capyctl.fsm.types import Millis, Origin, SwitchId

# --- phases ---------------------------------------------------------------------------------------


class ResidencyPhase(enum.Enum):
    """Where the model's memory is, and where it is going."""

    READY = "ready"  # serving, unless the gate says otherwise
    DRAINING_TO_PARK = "draining_to_park"  # gate closed, requests still running
    DRAINING_TO_STOP = "draining_to_stop"  # the same, and it will end
    PARK_PLANNED = "park_planned"  # quiet; wants room for the parked copy
    PARK_ARMED = "park_armed"  # the peak is charged; the release may have left
    RELEASING = "releasing"  # the release has left
    PARKED = "parked"  # memory proven released, processes kept
    WAKE_PLANNED = "wake_planned"  # wants room for the wake, on its host
    WAKE_ARMED = "wake_armed"  # the peak is charged; the restore may have left
    RESTORING = "restoring"  # the restore has left
    VERIFYING = "verifying"  # the memory is back; the checks run


P = ResidencyPhase

# --- state ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Ask:
    """Who wants it parked, and for whom."""

    origin: Origin
    switch: SwitchId | None = None
    for_name: str | None = None


@attrs.frozen(kw_only=True)
class State:
    """A resident run. `ask` while it goes to its park, `stop` while it drains to its end; times are Unix ms."""

    phase: ResidencyPhase = ResidencyPhase.READY
    run: Run
    ask: Ask | None = None
    stop: Stop | None = None
    drain_began_at_ms: Millis | None = None  # an idle reading must not be older than this
    drain_ends_at_ms: Millis | None = None
    waits_for: Problem | None = None  # why a planned park or wake has no room, in figures


ANY = any_of(P)
TO_PARK = at(P.DRAINING_TO_PARK, P.PARK_PLANNED)
DRAINING = at(P.DRAINING_TO_PARK, P.DRAINING_TO_STOP)
PARKING = at(P.PARK_ARMED, P.RELEASING)
WAKING = at(P.WAKE_ARMED, P.RESTORING, P.VERIFYING)
ARMED = PARKING | WAKING
CALM = ANY - ARMED
"""Nothing is in flight at the host."""

NO_ROOM_TO_PARK = "no room to park"
