"""What can be told to an instance. Facts in the past tense; every one of its machines decides every one.

Outcomes carry the token of their order, facts about processes carry the generation, commands carry
neither (decision 16). Facts that concern the gate alone are in `gate`. Lifecycle 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from capyctl.fsm.proofs import Back, Canary, GoneProof, Quiet, Resident, SameEngine, Unsent, Usable
from capyctl.fsm.run import HoldCause, Run, Stop
from capyctl.fsm.types import (
    Domain,
    Generation,
    HostId,
    Millis,
    Origin,
    ProcessIdentity,
    Residency,
    Role,
    SwitchId,
    Token,
)


@attrs.frozen(kw_only=True)
class Fact:
    """Something that happened, and when it was seen (Unix milliseconds)."""

    now_ms: Millis


# --- demands --------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Activated(Fact):
    """Somebody wants it to serve.

    `wait_ends_at_ms`: how long it may wait for memory (the waiter's deadline, the operator's limit); None: no bound.
    """

    origin: Origin
    wait_ends_at_ms: Millis | None = None


@attrs.frozen(kw_only=True)
class ParkRequested(Fact):
    """Somebody wants its memory. What cannot park, or must not, is stopped instead.

    `settle_at_stop`: a cut request of this run can only be settled by the engine's end.
    `outgrown`: the parked copy grew past the bound since this launch's first park.
    `for_name`, `switch`: who needs the room, when origin is SWITCH.
    """

    origin: Origin
    drain_ends_at_ms: Millis
    switch: SwitchId | None = None
    for_name: str | None = None
    settle_at_stop: bool = False
    outgrown: bool = False


@attrs.frozen(kw_only=True)
class StopRequested(Fact):
    """It is to end. `drain_ends_at_ms` bounds the wait for running requests; None waits for none."""

    stop: Stop
    drain_ends_at_ms: Millis | None = None


@attrs.frozen(kw_only=True)
class Withdrawn(Fact):
    """The switch that wanted the memory ended without it."""

    switch: SwitchId


@attrs.frozen(kw_only=True)
class Reopened(Fact):
    """An operator started the deployment: its stop no longer keeps requests from starting this instance."""


@attrs.frozen(kw_only=True)
class Revised(Fact):
    """A new revision was accepted: old failures say nothing about it."""


# --- verdicts of the scheduler and the ledger -----------------------------------------------------


@attrs.frozen(kw_only=True)
class Placed(Fact):
    """The cold peak fits on `host` now. `generation` is freshly drawn, `deadline_ms` is the start's bound.

    `tier`, `waits_idle`, `needs_canary`: facts of the engine that is launched; a wake keeps its own.
    """

    host: HostId
    generation: Generation
    token: Token
    deadline_ms: Millis
    tier: Residency = Residency.RESTART_ONLY
    waits_idle: bool = False
    needs_canary: bool = False


@attrs.frozen(kw_only=True)
class NotPlaced(Fact):
    """It fits nowhere now; `final` when waiting cannot change that (no eligible host)."""

    code: str
    reason: str
    final: bool = False


@attrs.frozen(kw_only=True)
class Held(Fact):
    """It would fit once something else is over: look again at `until_ms`, or when the hold is lifted."""

    until_ms: Millis
    cause: HoldCause


@attrs.frozen(kw_only=True)
class HoldLifted(Fact):
    """What the start was held for is over."""


@attrs.frozen(kw_only=True)
class ParkAdmitted(Fact):
    """The transition's peak and the parked copy fit. `deadline_ms` bounds the release."""

    token: Token
    deadline_ms: Millis


@attrs.frozen(kw_only=True)
class ParkNotAdmitted(Fact):
    """The parked copy has no room (`parked_capacity`)."""

    code: str
    reason: str


@attrs.frozen(kw_only=True)
class WakeAdmitted(Fact):
    """The wake's peak fits in place of the parked bytes. `deadline_ms` bounds the wake."""

    token: Token
    deadline_ms: Millis


@attrs.frozen(kw_only=True)
class WakeNotAdmitted(Fact):
    """The wake's peak does not fit on its host now; or, when `final`, waiting cannot change the verdict."""

    code: str
    reason: str
    final: bool = False


@attrs.frozen(kw_only=True)
class Turn(Fact):
    """The scheduler came to this lane: nothing is in flight on it, and its next order has this token."""

    token: Token


# --- outcomes -------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Outcome(Fact):
    """An answer to the order with this token."""

    token: Token


@attrs.frozen(kw_only=True)
class Sent(Outcome):
    """The order left the controller. Progress for people: no safety hangs on it."""


@attrs.frozen(kw_only=True)
class Spawned(Outcome):
    """The host journaled the launch and recorded its processes."""

    processes: tuple[ProcessIdentity, ...]


@attrs.frozen(kw_only=True)
class LaunchReady(Outcome):
    """The model answers. `canary` is the reference for later wakes."""

    processes: tuple[ProcessIdentity, ...]
    usable: Usable
    canary: str | None = None


@attrs.frozen(kw_only=True)
class LaunchFailed(Outcome):
    """The launch ended and nothing of it is left. `transient` reasons may be tried again in the operation."""

    code: str
    reason: str
    proof: GoneProof | Unsent
    transient: bool = False


@attrs.frozen(kw_only=True)
class OrderLost(Outcome):
    """Nobody knows whether the order took effect."""

    reason: str


@attrs.frozen(kw_only=True)
class ParkConfirmed(Outcome):
    """Quiet, the same engine, and what it still holds in every domain the park was to empty."""

    quiet: Quiet
    same: SameEngine
    resident: Mapping[Domain, Resident]


@attrs.frozen(kw_only=True)
class ParkRefused(Outcome):
    """The release did not happen, and nothing changed. Without `unsent` the peak stays charged."""

    code: str
    reason: str
    unsent: Unsent | None = None


@attrs.frozen(kw_only=True)
class Restored(Outcome):
    """The memory is back and the checks began. Progress for people: no safety hangs on it."""


@attrs.frozen(kw_only=True)
class WakeConfirmed(Outcome):
    """Resident again, usable, the same engine; `canary` where the engine can show it."""

    back: Back
    usable: Usable
    canary: Canary | None
    same: SameEngine


@attrs.frozen(kw_only=True)
class WakeFailed(Outcome):
    """The wake failed, the processes are still recorded. `mismatch`: it answered otherwise than before.

    `unsent`: nothing was asked of the engine, which is parked as it was.
    """

    code: str
    reason: str
    mismatch: bool = False
    unsent: Unsent | None = None


@attrs.frozen(kw_only=True)
class IdleGateEnded(Outcome):
    """The wait for an idle engine is over: `verdict` is idle, busy, gone or silent. `next_token` is fresh."""

    verdict: str
    next_token: Token


@attrs.frozen(kw_only=True)
class Terminated(Outcome):
    """The engine is proven gone."""

    proof: GoneProof


@attrs.frozen(kw_only=True)
class TerminateUnproven(Outcome):
    """It was signalled, and something of it may be left."""

    reason: str


@attrs.frozen(kw_only=True)
class Probed(Outcome):
    """What a look at the launch proved; everything None when it proved nothing."""

    same: SameEngine | None = None
    usable: Usable | None = None
    gone: GoneProof | None = None
    resident: Mapping[Domain, Resident] | None = None
    canary: Canary | None = None
    reason: str = ""


# --- processes and requests -----------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class EngineExited(Fact):
    """A recorded process of this generation is gone; only api and worker count as the engine."""

    generation: Generation
    role: Role
    reason: str
    unseen: bool = False  # it ended while its host did not run


@attrs.frozen(kw_only=True)
class RequestsEnded(Fact):
    """No request of this generation runs any more that can still end by itself."""

    generation: Generation


@attrs.frozen(kw_only=True)
class GateDrained(Fact):
    """P-QUIET: nothing in flight, and the engine read idle after the gate closed."""

    quiet: Quiet


# --- clock and hosts ------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Ticked(Fact):
    """Time passed."""


@attrs.frozen(kw_only=True)
class HostReturned(Fact):
    """The instance's host answers again."""


@attrs.frozen(kw_only=True)
class SessionBegan(Fact):
    """A new controller session over the stored world: nothing is proven to it, and no switch survived.

    The gate decides this one too.
    """

    session: int


FACTS: tuple[type[Fact], ...] = (
    Activated, ParkRequested, StopRequested, Withdrawn, Reopened, Revised,
    Placed, NotPlaced, Held, HoldLifted, ParkAdmitted, ParkNotAdmitted, WakeAdmitted, WakeNotAdmitted, Turn,
    Sent, Spawned, LaunchReady, LaunchFailed, OrderLost,
    ParkConfirmed, ParkRefused, Restored, WakeConfirmed, WakeFailed,
    IdleGateEnded, Terminated, TerminateUnproven, Probed,
    EngineExited, RequestsEnded, GateDrained, Ticked, HostReturned, SessionBegan,
)  # fmt: skip
"""Everything that activation, residency and cleanup decide."""


def of_order(run: Run, event: Outcome) -> bool:
    """Whether `event` answers the order that `run` has in flight."""
    return run.token is not None and event.token == run.token


def overdue(run: Run, event: Fact) -> bool:
    """Whether the order that `run` has in flight should have been answered by now, grace included."""
    return run.answer_due_at_ms is not None and event.now_ms >= run.answer_due_at_ms
