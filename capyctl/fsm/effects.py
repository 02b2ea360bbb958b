"""What the instance's machines order: steps of the ledger, orders to a host, notices, and hand-overs.

Control turns the first three into ledger writes, host orders and events of other machines, all in the
step that ordered them. Hand-overs and gate facts never leave the instance: `instance.step` follows them.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from capyctl.fsm.proofs import GoneProof, Lowering, Resident, Unsent
from capyctl.fsm.run import Run, Step, Stop
from capyctl.fsm.types import (
    Domain,
    Generation,
    HostId,
    Incarnation,
    Millis,
    Origin,
    Phase,
    ProcessIdentity,
    Residency,
    SwitchId,
    Token,
)

# --- ledger ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class RaiseCharge:
    """Charge the peak of the transition into `phase`, before the order that can reach it."""

    phase: Phase


@attrs.frozen(kw_only=True)
class SettleDown:
    """Lower the charge to `phase`. A park's proof is one sample per domain that it emptied."""

    phase: Phase
    proof: Lowering | Mapping[Domain, Resident]


@attrs.frozen(kw_only=True)
class ReleaseCharge:
    """Free the charge, the claims and the port altogether."""

    proof: GoneProof | Unsent


@attrs.frozen(kw_only=True)
class KeepLarger:
    """Nobody knows which side of the transition holds: keep, per domain, the larger of these phases."""

    phases: tuple[Phase, ...]


# --- orders to a host -----------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class HostOrder:
    """Sent once under its token, after the commit that holds its step."""

    incarnation: Incarnation
    token: Token
    host: HostId


@attrs.frozen(kw_only=True)
class SendLaunch(HostOrder):
    """Spawn the engine and prove it ready."""

    deadline_ms: Millis


@attrs.frozen(kw_only=True)
class SendRelease(HostOrder):
    """Park: one release call, never repeated."""

    tier: Residency
    processes: tuple[ProcessIdentity, ...]
    gate_closed_at_ms: Millis
    deadline_ms: Millis


@attrs.frozen(kw_only=True)
class SendRestore(HostOrder):
    """Wake: restore, check, ask the canary."""

    tier: Residency
    processes: tuple[ProcessIdentity, ...]
    canary: str | None
    deadline_ms: Millis


@attrs.frozen(kw_only=True)
class SendAwaitIdle(HostOrder):
    """Wait until the engine reads idle."""

    limit_ms: Millis


@attrs.frozen(kw_only=True)
class SendTerminate(HostOrder):
    """Close the upstreams, signal the group, escalate, and look."""

    processes: tuple[ProcessIdentity, ...]
    limit_ms: Millis


@attrs.frozen(kw_only=True)
class SendProbe(HostOrder):
    """Is it the recorded engine, and what can it prove?"""

    processes: tuple[ProcessIdentity, ...]
    canary: str | None
    lost: Step  # what the answer is to classify; PARK is asked for residency, WAKE for the canary


# --- notices to other machines --------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ConfirmStored:
    """Say when this READY record is durable: the gate waits for it."""

    incarnation: Incarnation


@attrs.frozen(kw_only=True)
class GateOpened:
    """Requests may be dispatched to this incarnation."""

    incarnation: Incarnation


@attrs.frozen(kw_only=True)
class GateClosed:
    """No request may be dispatched to this generation any more."""

    generation: Generation | None


@attrs.frozen(kw_only=True)
class ReadyReached:
    """A start or a wake succeeded."""

    incarnation: Incarnation


@attrs.frozen(kw_only=True)
class StartEnded:
    """A start or a wake ended without READY. A request gets `code` until `retry_at_ms`.

    `at_once`: an engine that ran well has ended, and nothing keeps whoever wants it by now from a fresh start.
    """

    code: str
    reason: str
    retry_at_ms: Millis | None = None
    at_once: bool = False


@attrs.frozen(kw_only=True)
class AttemptFailed:
    """One launch failed; the operation goes on at `again_at_ms`."""

    code: str
    reason: str
    attempt: int
    again_at_ms: Millis


@attrs.frozen(kw_only=True)
class ParkEnded:
    """A park ended: `code` is None when it is parked. `origin` asked for it: a `switch`, if one did, and for whom."""

    code: str | None
    reason: str = ""
    switch: SwitchId | None = None
    origin: Origin | None = None
    for_name: str | None = None


@attrs.frozen(kw_only=True)
class ParkBecameStop:
    """What was asked to park is stopped instead, for this reason."""

    stop: Stop
    reason: str


@attrs.frozen(kw_only=True)
class StopEnded:
    """Nothing of it runs, proven."""

    stop: Stop


@attrs.frozen(kw_only=True)
class StopWithdrawn:
    """A stop that nobody insisted on gave way; it serves again."""

    stop: Stop
    code: str
    reason: str


@attrs.frozen(kw_only=True)
class RunGone:
    """Everything that hung on this incarnation can be settled: requests, leases, keys."""

    incarnation: Incarnation
    proof: GoneProof


@attrs.frozen(kw_only=True)
class RunUncertain:
    """Nobody knows what `step` left; nothing is freed until a proof says."""

    incarnation: Incarnation
    step: Step
    reason: str


# --- hand-overs: from the active machine to the next, in the same step -------------------------------


@attrs.frozen(kw_only=True)
class HandOver:
    """This machine is done with the run; the next one takes it."""

    run: Run


@attrs.frozen(kw_only=True)
class BecameReady(HandOver):
    """To residency, READY."""


@attrs.frozen(kw_only=True)
class StopDue(HandOver):
    """To cleanup, PLANNED."""

    stop: Stop


@attrs.frozen(kw_only=True)
class BecameUncertain(HandOver):
    """To cleanup, RECONCILING."""

    step: Step
    now_ms: Millis


@attrs.frozen(kw_only=True)
class SettledStopped(HandOver):
    """To activation, STOPPED."""


@attrs.frozen(kw_only=True)
class SettledFailed(HandOver):
    """To activation, FAILED."""


@attrs.frozen(kw_only=True)
class SettledToRetry(HandOver):
    """To activation, HELD: a failed attempt cools down."""

    until_ms: Millis


@attrs.frozen(kw_only=True)
class SettledToRestart(HandOver):
    """To activation, PLANNED: it starts again at once."""


@attrs.frozen(kw_only=True)
class Adopted(HandOver):
    """To residency, READY: the lost launch is proven to have succeeded (P-READY, P-SAME)."""


@attrs.frozen(kw_only=True)
class AdoptedWoken(HandOver):
    """To residency, READY: the lost wake is proven to have succeeded (P-CANARY where the engine has one)."""


@attrs.frozen(kw_only=True)
class AdoptedParked(HandOver):
    """To residency, PARKED: the lost park is proven to have succeeded (P-RESID, P-SAME)."""


LedgerEffect = RaiseCharge | SettleDown | ReleaseCharge | KeepLarger
HostEffect = SendLaunch | SendRelease | SendRestore | SendAwaitIdle | SendTerminate | SendProbe
Notice = (
    ConfirmStored
    | GateOpened
    | GateClosed
    | ReadyReached
    | StartEnded
    | AttemptFailed
    | ParkEnded
    | ParkBecameStop
    | StopEnded
    | StopWithdrawn
    | RunGone
    | RunUncertain
)
Effect = LedgerEffect | HostEffect | Notice
"""What `instance.step` returns, beside `table.Refused`."""
