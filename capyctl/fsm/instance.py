"""One instance: exactly one of activation, residency and cleanup is active, and a gate stands beside it.

`step` gives an event to the active machine, follows its hand-over to the next one, and tells the gate
what it must know, all in one step. What is left are orders for control. Which machine is active is
told by the type of `life`, so no instance can be in two of them. Lifecycle 4, 9; decision 32.
"""

from __future__ import annotations

import enum

import attrs

from capyctl.errors import InvariantBroken
from capyctl.fsm import activation, cleanup, facts, gate, residency
from capyctl.fsm.activation import ACTIVATION, ActivationPhase
from capyctl.fsm.cleanup import CLEANUP, CleanupPhase
from capyctl.fsm.effects import (
    Adopted,
    AdoptedParked,
    AdoptedWoken,
    BecameReady,
    BecameUncertain,
    Effect,
    HandOver,
    SettledFailed,
    SettledStopped,
    SettledToRestart,
    SettledToRetry,
    StopDue,
)
from capyctl.fsm.gate import GATE, Closure, GatePhase
from capyctl.fsm.residency import RESIDENCY, ResidencyPhase
from capyctl.fsm.run import HoldCause, Run, Stop
from capyctl.fsm.table import Refused, Row, Taken
from capyctl.fsm.types import Generation, Lane, Millis, Phase

Life = activation.State | residency.State | cleanup.State
LifePhase = ActivationPhase | ResidencyPhase | CleanupPhase


@attrs.frozen(kw_only=True)
class Instance:
    """The active machine's state, and the gate's."""

    life: Life
    gate: gate.State

    @property
    def run(self) -> Run:
        """The run that the active machine holds."""
        return self.life.run

    @property
    def lane(self) -> Lane:
        """The key that orders its effects."""
        return self.life.run.lane

    @property
    def phase(self) -> LifePhase:
        """The active machine's phase; its enum says which machine that is."""
        return self.life.phase


def born(lane: Lane, *, session: int = 0) -> Instance:
    """A new instance: stopped, never started, its gate closed. `session` is the present controller session."""
    return Instance(life=activation.State(run=Run(lane=lane)), gate=gate.State(lane=lane, session=session))


# --- stepping -------------------------------------------------------------------------------------


@attrs.frozen
class Told:
    """What one step did: the instance after, the orders, and the row of every machine that had a say."""

    instance: Instance
    orders: tuple[Effect | Refused, ...]
    rows: tuple[tuple[str, Row], ...]


def step(instance: Instance, event: facts.Fact) -> tuple[Instance, tuple[Effect | Refused, ...]]:
    """Decide one event: the instance after, and what control must do in the same step. Pure.

    Raises: InvariantBroken when a table does, or when the machines and the gate contradict each other.
    """
    told = tell(instance, event)
    return told.instance, told.orders


def tell(instance: Instance, event: facts.Fact) -> Told:
    """As `step`, and say which rows decided. What changes nothing gives the very same instance: no row is stored."""
    after = instance
    orders: list[Effect | Refused] = []
    rows: list[tuple[str, Row]] = []
    if isinstance(event, (*gate.FROM_OUTSIDE, facts.SessionBegan)):  # the gate doubts before anything reopens it
        after = _tell_gate(after, event, orders, rows)
    if not isinstance(event, gate.FROM_OUTSIDE):
        after = _tell_life(after, event, orders, rows)
    for claim in INVARIANTS:
        if not claim(after):
            raise InvariantBroken(f"instance: {claim.__doc__} Not so in {after}")
    return Told(after, tuple(orders), tuple(rows))


def _tell_life(
    instance: Instance, event: facts.Fact, orders: list[Effect | Refused], rows: list[tuple[str, Row]]
) -> Instance:
    name, taken = _take(instance.life, event)
    rows.append((name, taken.row))
    after = instance if taken.state is instance.life else attrs.evolve(instance, life=taken.state)
    for order in taken.orders:
        if isinstance(order, HandOver):
            after = attrs.evolve(after, life=heir(order))
        elif isinstance(order, facts.Fact):  # a fact for the gate
            after = _tell_gate(after, order, orders, rows)
        else:
            orders.append(order)
    return after


def _tell_gate(
    instance: Instance, event: facts.Fact, orders: list[Effect | Refused], rows: list[tuple[str, Row]]
) -> Instance:
    taken = GATE.take(instance.gate, event)
    rows.append((GATE.name, taken.row))
    orders.extend(taken.orders)
    return instance if taken.state is instance.gate else attrs.evolve(instance, gate=taken.state)


def _take(
    life: Life, event: facts.Fact
) -> tuple[str, Taken[activation.State] | Taken[residency.State] | Taken[cleanup.State]]:
    match life:
        case activation.State():
            return ACTIVATION.name, ACTIVATION.take(life, event)
        case residency.State():
            return RESIDENCY.name, RESIDENCY.take(life, event)
        case cleanup.State():
            return CLEANUP.name, CLEANUP.take(life, event)


def heir(over: HandOver) -> Life:
    """The state in which the next machine takes the run."""
    match over:
        case BecameReady() | Adopted() | AdoptedWoken():
            return residency.State(phase=ResidencyPhase.READY, run=over.run)
        case AdoptedParked():
            return residency.State(phase=ResidencyPhase.PARKED, run=over.run)
        case StopDue():
            run = attrs.evolve(over.run, deadline_ms=None)
            return cleanup.State(phase=CleanupPhase.PLANNED, run=run, stop=over.stop)
        case BecameUncertain():
            return cleanup.State(phase=CleanupPhase.RECONCILING, run=over.run, lost=over.step, look_at_ms=over.now_ms)
        case SettledStopped():
            return activation.State(phase=ActivationPhase.STOPPED, run=over.run)
        case SettledFailed():
            return activation.State(phase=ActivationPhase.FAILED, run=over.run)
        case SettledToRestart():
            return activation.State(phase=ActivationPhase.PLANNED, run=over.run)
        case SettledToRetry():
            return activation.State(
                phase=ActivationPhase.HELD, run=over.run, hold=HoldCause.COOLDOWN, hold_ends_at_ms=over.until_ms
            )
        case _:
            raise InvariantBroken(f"nobody takes over from {type(over).__name__}")


# --- invariants of the product ----------------------------------------------------------------------


def open_means_ready(instance: Instance) -> bool:
    """28, 29: An open gate belongs to a READY run of the same generation."""
    if instance.gate.phase is GatePhase.CLOSED:
        return True
    return instance.phase is ResidencyPhase.READY and instance.run.generation == instance.gate.generation


def ready_is_known_to_the_gate(instance: Instance) -> bool:
    """Exactly a READY or leaving run is known to the gate, by its generation."""
    if instance.phase is ResidencyPhase.READY:
        return instance.gate.generation == instance.run.generation
    return isinstance(instance.life, residency.State | cleanup.State) or instance.gate.generation is None


def leaving_has_a_reason(instance: Instance) -> bool:
    """30: Exactly a run that leaves READY is kept closed for a park, a switch or its end."""
    reasons = instance.gate.reasons & {Closure.SWITCH, Closure.PARK, Closure.STOP, Closure.ENGINE_EXIT}
    if instance.phase is ResidencyPhase.READY:
        return not reasons
    return bool(reasons) or instance.phase not in LEAVING


LEAVING = frozenset(
    {
        ResidencyPhase.DRAINING_TO_PARK,
        ResidencyPhase.DRAINING_TO_STOP,
        ResidencyPhase.PARK_PLANNED,
        ResidencyPhase.PARK_ARMED,
        ResidencyPhase.RELEASING,
        CleanupPhase.PLANNED,
        CleanupPhase.IDLE_GATE,
        CleanupPhase.ARMED,
        CleanupPhase.TERMINATING,
    }
)

INVARIANTS = (open_means_ready, ready_is_known_to_the_gate, leaving_has_a_reason)

# --- reading --------------------------------------------------------------------------------------


class Want(enum.Enum):
    """What the scheduler owes an instance, and the fact that answers it."""

    PLACE = "place"  # Placed, NotPlaced or Held
    ROOM_TO_PARK = "room_to_park"  # ParkAdmitted or ParkNotAdmitted
    ROOM_TO_WAKE = "room_to_wake"  # WakeAdmitted or WakeNotAdmitted
    TURN = "turn"  # Turn, once the lane is free and the host answers


_WANTS: dict[LifePhase, Want] = {
    ActivationPhase.PLANNED: Want.PLACE,
    ResidencyPhase.PARK_PLANNED: Want.ROOM_TO_PARK,
    ResidencyPhase.WAKE_PLANNED: Want.ROOM_TO_WAKE,
    CleanupPhase.PLANNED: Want.TURN,
    CleanupPhase.RECONCILING: Want.TURN,
}


def wants(instance: Instance, now_ms: Millis) -> Want | None:
    """What the scheduler owes it now; None while it waits for an outcome, for time, or for nothing."""
    life = instance.life
    if isinstance(life, cleanup.State) and life.look_at_ms is not None and now_ms < life.look_at_ms:
        return None
    return _WANTS.get(instance.phase)


def wants_proof(instance: Instance) -> bool:
    """Whether only P-SAME and a fresh P-READY can open its gate again (`gate.Proven`)."""
    return instance.gate.generation is not None and bool(instance.gate.reasons & gate.PROVABLE)


def in_flight(instance: Instance) -> bool:
    """Whether an order to its host awaits an outcome, so that a new controller session must call it lost."""
    match instance.life:
        case activation.State(phase=phase):
            return phase in activation.IN_FLIGHT
        case residency.State(phase=phase):
            return phase in residency.ARMED
        case cleanup.State(phase=phase):
            return phase in cleanup.ENDING - {CleanupPhase.PLANNED}


def due_at_ms(instance: Instance) -> Millis | None:
    """When it must be looked at next: fed `Ticked`, and asked what it wants. None: time changes nothing."""
    run = instance.run
    match instance.life:
        case activation.State(phase=ActivationPhase.PLANNED):
            return run.wait_ends_at_ms
        case activation.State(phase=ActivationPhase.HELD, hold_ends_at_ms=hold_ends_at_ms):
            return min((end for end in (hold_ends_at_ms, run.wait_ends_at_ms) if end is not None), default=None)
        case residency.State(phase=ResidencyPhase.WAKE_PLANNED):
            return run.wait_ends_at_ms
        case residency.State(drain_ends_at_ms=drain_ends_at_ms) if drain_ends_at_ms is not None:
            return drain_ends_at_ms
        case cleanup.State(phase=CleanupPhase.RECONCILING, look_at_ms=look_at_ms):
            return look_at_ms
        case _:
            return run.answer_due_at_ms


def why_stopped(instance: Instance) -> Stop | None:
    """Why it does not run, or will not: decision 18. None while it runs and nobody asked for its end."""
    match instance.life:
        case activation.State(run=run):
            return run.stopped or run.pending
        case residency.State(run=run, stop=stop):
            return stop or run.pending
        case cleanup.State(stop=stop):
            return stop


def may_dispatch(instance: Instance, generation: Generation) -> bool:
    """28: READY, nothing against it, and this very run."""
    return instance.gate.phase is GatePhase.OPEN and instance.gate.generation == generation


@attrs.frozen(kw_only=True)
class Answers:
    """What a reviewer asks of a phase."""

    status: str  # one of the ten states that users see
    serves: bool  # may a request be dispatched, the gate permitting
    signals: bool  # may a process of it be signalled
    falls: str  # on which proof its charge may fall; "" when it may not


_START = "P-READY to ready; P-GONE, P-NEVER, P-BOOT or P-UNSENT to nothing"
_GONE = "P-GONE, P-NEVER or P-BOOT to nothing"
_FALLS: dict[LifePhase, str] = {
    **dict.fromkeys((ActivationPhase.ARMED, ActivationPhase.LAUNCHING, ActivationPhase.PROBING), _START),
    **dict.fromkeys(
        (ResidencyPhase.PARK_ARMED, ResidencyPhase.RELEASING),
        "P-QUIET, P-SAME and P-RESID to parked; P-UNSENT to ready",
    ),
    **dict.fromkeys(
        (ResidencyPhase.WAKE_ARMED, ResidencyPhase.RESTORING, ResidencyPhase.VERIFYING),
        "P-BACK, P-READY, P-SAME and P-CANARY to ready",
    ),
    **dict.fromkeys(
        (CleanupPhase.PLANNED, CleanupPhase.IDLE_GATE, CleanupPhase.ARMED, CleanupPhase.TERMINATING), _GONE
    ),
    CleanupPhase.RECONCILING: f"{_GONE}; or the proof that completes the unknown step",
}
_STATUS: dict[LifePhase, str] = {
    ActivationPhase.STOPPED: "stopped",
    **dict.fromkeys(activation.WAITING | activation.IN_FLIGHT, "starting"),
    ActivationPhase.FAILED: "failed",
    ResidencyPhase.READY: "ready",
    **dict.fromkeys(residency.DRAINING, "draining"),
    **dict.fromkeys(residency.PARKING | {ResidencyPhase.PARK_PLANNED}, "parking"),
    ResidencyPhase.PARKED: "parked",
    **dict.fromkeys(residency.WAKING | {ResidencyPhase.WAKE_PLANNED}, "waking"),
    **dict.fromkeys(cleanup.ENDING, "stopping"),
    CleanupPhase.RECONCILING: "reconciling",
}


def questions(phase: LifePhase) -> Answers:
    """May it serve, may it be signalled, may its memory fall, what does status call it?

    `signals` speaks of orders to end it: a launch that fails is ended by its host, under the launch's own order.
    """
    return Answers(
        status=_STATUS[phase],
        serves=phase is ResidencyPhase.READY,
        signals=phase in cleanup.SIGNALLED,
        falls=_FALLS.get(phase, ""),
    )


def published(instance: Instance) -> str:
    """What status calls it: one of the ten states, or `uncertain` for an unknown run that is still charged."""
    status = _STATUS[instance.phase]
    return "uncertain" if status == "reconciling" and instance.run.charged is not Phase.NONE else status


PHASES: tuple[LifePhase, ...] = (*ActivationPhase, *ResidencyPhase, *CleanupPhase)
"""Every phase that an instance can be in, for the page of questions."""
