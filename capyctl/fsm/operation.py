"""One accepted operator command, or the activation that a request opened, from its receipt to its end.

An operation names the instances it wants somewhere and collects what became of each; waiting clients
only watch it. What arms, sends and proves is the instance's own machine. (Reference: lifecycle 13, 19.)
"""

from __future__ import annotations

import enum

import attrs

from capyctl.fsm.table import Emit, Machine, Refused, Row, any_of, at, ignore, refuse
from capyctl.fsm.types import DeploymentId, Millis, OperationId, Origin, SwitchId


class Phase(enum.Enum):
    """Where an operation is."""

    PROPOSED = "proposed"  # a command arrived; nothing is stored
    ACCEPTED = "accepted"  # the receipt is durable, no step is armed
    RUNNING = "running"  # at least one step was armed
    SUCCEEDED = "succeeded"  # every instance reached the target
    PARTIAL = "partial"  # some did, some failed
    FAILED = "failed"  # none did
    UNCERTAIN = "uncertain"  # the outcome of some step is unknown; accounting is held
    SUPERSEDED = "superseded"  # replaced before any step was armed
    EXPIRED = "expired"  # its deadline passed before any step was armed


class Kind(enum.Enum):
    """What an operation wants of each instance it names."""

    START = "start"
    WAKE = "wake"  # a start of what is parked
    STOP = "stop"
    PARK = "park"
    DELETE = "delete"
    INITIALIZE = "initialize"
    PREINITIALIZE = "preinitialize"
    DRAIN = "drain"


class Result(enum.Enum):
    """What became of one instance of an operation."""

    PENDING = "pending"
    MET = "met"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Seen(enum.Enum):
    """What is stored under a command's idempotency key."""

    NEW = "new"
    SAME = "same"  # the same key with the same body
    OTHER = "other"  # the same key with another body


# --- state ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Target:
    """One instance of an operation, and what became of it."""

    index: int
    result: Result = Result.PENDING
    code: str | None = None
    reason: str = ""


@attrs.frozen(kw_only=True)
class State:
    """`waiting_code` says why the last unplaced target waits, and names the expiry. `joined` counts who joined.

    `after`: the operation that has its turn before this one.
    """

    phase: Phase = Phase.PROPOSED
    operation: OperationId
    deployment: DeploymentId
    kind: Kind
    origin: Origin
    accepted_at_ms: Millis | None = None
    deadline_ms: Millis | None = None
    targets: tuple[Target, ...] = ()
    joined: int = 0
    switch: SwitchId | None = None
    after: OperationId | None = None
    waiting_code: str | None = None
    waiting_reason: str = ""
    superseded_by: OperationId | None = None
    ended_at_ms: Millis | None = None
    code: str | None = None
    reason: str = ""


# --- events ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Event:
    """A fact about one operation, and when it was seen."""

    now_ms: Millis


@attrs.frozen(kw_only=True)
class Submitted(Event):
    """The command as it met the stored world.

    `stop_runs`: a stop of the deployment is open. `start_open`: an activation of it is open.
    `conflict`: some named instance has an open step that excludes this one.
    """

    indices: tuple[int, ...]
    deadline_ms: Millis | None = None
    seen: Seen = Seen.NEW
    stop_runs: bool = False
    start_open: bool = False
    conflict: bool = False


@attrs.frozen(kw_only=True)
class Joined(Event):
    """Another command or request asked for the same and joined."""


@attrs.frozen(kw_only=True)
class StepArmed(Event):
    """The first effect for one of its instances is armed."""

    index: int


@attrs.frozen(kw_only=True)
class Waited(Event):
    """A target could not be placed yet; `code` and `reason` say what is in the way, in figures."""

    index: int
    code: str
    reason: str


@attrs.frozen(kw_only=True)
class SwitchOpened(Event):
    """A switch makes room for it."""

    switch: SwitchId


@attrs.frozen(kw_only=True)
class TargetReported(Event):
    """What became of one instance. A later report corrects UNKNOWN, and nothing else."""

    index: int
    result: Result
    code: str | None = None
    reason: str = ""


@attrs.frozen(kw_only=True)
class Replaced(Event):
    """A stop was accepted over it."""

    by: OperationId


@attrs.frozen(kw_only=True)
class Ticked(Event):
    """Time passed."""


# --- effects --------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Effect:
    """An order about one operation."""

    operation: OperationId


@attrs.frozen(kw_only=True)
class GiveReceipt(Effect):
    """Answer the command with a fresh receipt, once it is durable."""


@attrs.frozen(kw_only=True)
class ReplayReceipt(Effect):
    """Answer with the receipt stored under the key; nothing is created."""


@attrs.frozen(kw_only=True)
class JoinOpen(Effect):
    """Answer with the receipt of the open activation, `joined: true`."""


@attrs.frozen(kw_only=True)
class DropPlans(Effect):
    """Forget its planned and held steps: none was armed (P-NONE-WAITING)."""


@attrs.frozen(kw_only=True)
class Conclude(Effect):
    """Tell whoever watches that it ended, and how."""

    phase: Phase
    code: str | None
    reason: str


# --- guards ---------------------------------------------------------------------------------------

OPEN = at(Phase.ACCEPTED, Phase.RUNNING, Phase.UNCERTAIN)
"""Not ended: it is listed as in progress, and a second start of the deployment joins it."""

ENDED = at(Phase.SUCCEEDED, Phase.PARTIAL, Phase.FAILED, Phase.SUPERSEDED, Phase.EXPIRED)

ANY = any_of(Phase)

STARTING = (Kind.START, Kind.WAKE, Kind.INITIALIZE, Kind.PREINITIALIZE)


def _starts(state: State) -> bool:
    return state.kind in STARTING


def _fresh(state: State, event: Submitted) -> bool:
    return event.seen is Seen.NEW


def key_same(state: State, event: Submitted) -> bool:
    """the key was used for the same body"""
    return event.seen is Seen.SAME


def key_other(state: State, event: Submitted) -> bool:
    """the key was used for another body"""
    return event.seen is Seen.OTHER


def start_meets_stop(state: State, event: Submitted) -> bool:
    """new key; a start, while a stop of the deployment runs"""
    return _fresh(state, event) and _starts(state) and event.stop_runs


def start_meets_start(state: State, event: Submitted) -> bool:
    """new key; a start, no stop runs, and a start of the deployment is open"""
    return _fresh(state, event) and _starts(state) and not event.stop_runs and event.start_open


def step_excludes(state: State, event: Submitted) -> bool:
    """new key; nothing to join, and some named instance has an open step that excludes this"""
    return _fresh(state, event) and not _waits_or_joins(state, event) and event.conflict


def work_to_do(state: State, event: Submitted) -> bool:
    """new key; nothing to join or to wait for, and it names instances"""
    return _clear(state, event) and bool(event.indices)


def no_work(state: State, event: Submitted) -> bool:
    """new key; nothing to join or to wait for, and it names no instance"""
    return _clear(state, event) and not event.indices


def _clear(state: State, event: Submitted) -> bool:
    return _fresh(state, event) and not _waits_or_joins(state, event) and not event.conflict


def _waits_or_joins(state: State, event: Submitted) -> bool:
    return _starts(state) and (event.stop_runs or event.start_open)


def target_named(state: State, event: StepArmed | Waited) -> bool:
    """the instance is one of its targets, and pending"""
    return any(target.index == event.index and target.result is Result.PENDING for target in state.targets)


def target_not_named(state: State, event: StepArmed | Waited) -> bool:
    """the instance is none of its targets, or not pending"""
    return not target_named(state, event)


def _news(state: State, event: TargetReported) -> bool:
    """A report counts for a pending target, and corrects an unknown one once it is known."""
    if event.result is Result.PENDING:
        return False
    was = [target.result for target in state.targets if target.index == event.index]
    return was == [Result.PENDING] or (was == [Result.UNKNOWN] and event.result is not Result.UNKNOWN)


def _after(state: State, event: TargetReported) -> set[Result]:
    return {target.result for target in _reported(state, event)}


def _reported(state: State, event: TargetReported) -> tuple[Target, ...]:
    return tuple(
        attrs.evolve(target, result=event.result, code=event.code, reason=event.reason)
        if target.index == event.index
        else target
        for target in state.targets
    )


def old_news(state: State, event: TargetReported) -> bool:
    """the instance is none of its targets, or its outcome is known"""
    return not _news(state, event)


def some_unknown(state: State, event: TargetReported) -> bool:
    """news, and some target's outcome is unknown"""
    return _news(state, event) and Result.UNKNOWN in _after(state, event)


def some_pending(state: State, event: TargetReported) -> bool:
    """news; none is unknown, some target is pending"""
    after = _after(state, event)
    return _news(state, event) and Result.UNKNOWN not in after and Result.PENDING in after


def all_met(state: State, event: TargetReported) -> bool:
    """news, and every target is met"""
    return _news(state, event) and _after(state, event) == {Result.MET}


def all_failed(state: State, event: TargetReported) -> bool:
    """news, and every target failed"""
    return _news(state, event) and _after(state, event) == {Result.FAILED}


def some_met_some_failed(state: State, event: TargetReported) -> bool:
    """news; all are known, some met and some failed"""
    return _news(state, event) and _after(state, event) == {Result.MET, Result.FAILED}


def deadline_passed(state: State, event: Ticked) -> bool:
    """the deadline has passed"""
    return state.deadline_ms is not None and event.now_ms >= state.deadline_ms


def deadline_ahead(state: State, event: Ticked) -> bool:
    """there is no deadline, or it is ahead"""
    return not deadline_passed(state, event)


# --- changes --------------------------------------------------------------------------------------


def accepted(state: State, event: Submitted) -> State:
    """note the targets, the time and the deadline"""
    return attrs.evolve(
        state,
        accepted_at_ms=event.now_ms,
        deadline_ms=event.deadline_ms,
        targets=tuple(Target(index=index) for index in event.indices),
    )


def already_there(state: State, event: Submitted) -> State:
    """note that there was nothing to do"""
    return attrs.evolve(accepted(state, event), ended_at_ms=event.now_ms)


def one_more(state: State, event: Joined) -> State:
    """count who joined"""
    return attrs.evolve(state, joined=state.joined + 1)


def waits(state: State, event: Waited) -> State:
    """note what is in the way"""
    return attrs.evolve(state, waiting_code=event.code, waiting_reason=event.reason)


def armed(state: State, event: StepArmed) -> State:
    """nothing is in the way any more"""
    return attrs.evolve(state, waiting_code=None, waiting_reason="")


def switch_noted(state: State, event: SwitchOpened) -> State:
    """note the switch"""
    return attrs.evolve(state, switch=event.switch)


def reported(state: State, event: TargetReported) -> State:
    """note the target's outcome"""
    return attrs.evolve(state, targets=_reported(state, event))


def ended(state: State, event: TargetReported) -> State:
    """note the target's outcome, the end, and the first failure's code"""
    targets = _reported(state, event)
    first = next((target for target in targets if target.result is Result.FAILED), None)
    return attrs.evolve(
        state,
        targets=targets,
        ended_at_ms=event.now_ms,
        code=first.code or "operation_failed" if first else None,
        reason=first.reason if first else "",
    )


def replaced(state: State, event: Replaced) -> State:
    """note what replaced it"""
    return attrs.evolve(state, superseded_by=event.by, ended_at_ms=event.now_ms)


def expired(state: State, event: Ticked) -> State:
    """note the end, and why it waited"""
    code, reason = _expiry(state)
    return attrs.evolve(state, ended_at_ms=event.now_ms, code=code, reason=reason)


def _expiry(state: State) -> tuple[str, str]:
    if state.waiting_code is not None:
        return state.waiting_code, state.waiting_reason
    if _starts(state):
        return "activation_timeout", "nothing was started before the deadline"
    return "operation_failed", "nothing was begun before the deadline"


# --- emits ----------------------------------------------------------------------------------------


def give_receipt(state: State, event: Submitted) -> Effect:
    """GiveReceipt"""
    return GiveReceipt(operation=state.operation)


def replay_receipt(state: State, event: Submitted) -> Effect:
    """ReplayReceipt"""
    return ReplayReceipt(operation=state.operation)


def join_open(state: State, event: Submitted) -> Effect:
    """JoinOpen"""
    return JoinOpen(operation=state.operation)


def drop_plans(state: State, event: Event) -> Effect:
    """DropPlans"""
    return DropPlans(operation=state.operation)


def _conclude(phase: Phase) -> Emit:
    def conclude(state: State, event: Event) -> Effect:
        code, reason = None, ""
        if isinstance(event, TargetReported) and phase is not Phase.SUCCEEDED:
            after = ended(state, event)
            code, reason = after.code, after.reason
        elif phase is Phase.EXPIRED:
            code, reason = _expiry(state)
        elif isinstance(event, Replaced):
            reason = f"replaced by {event.by}"
        return Conclude(operation=state.operation, phase=phase, code=code, reason=reason)

    conclude.__doc__ = f"Conclude({phase.value})"
    return conclude


# --- invariants -----------------------------------------------------------------------------------


def exactly_the_ended_have_an_end(state: State) -> bool:
    """Exactly an ended operation has a time of its end."""
    return (state.phase in ENDED) == (state.ended_at_ms is not None)


def the_phase_is_the_sum_of_the_targets(state: State) -> bool:
    """An end says what became of every target; it is uncertain while one of them is unknown, and only then."""
    results = {target.result for target in state.targets}
    if (state.phase is Phase.UNCERTAIN) != (Result.UNKNOWN in results):
        return False
    if state.phase is Phase.SUCCEEDED:
        return results <= {Result.MET}
    if state.phase is Phase.PARTIAL:
        return results == {Result.MET, Result.FAILED}
    if state.phase is Phase.FAILED:
        return results == {Result.FAILED}
    return state.phase is Phase.PROPOSED or Result.PENDING in results or state.phase is Phase.UNCERTAIN


def a_failure_has_a_code(state: State) -> bool:
    """Whatever ended without its target says why, with a code."""
    return state.phase not in at(Phase.PARTIAL, Phase.FAILED, Phase.EXPIRED) or state.code is not None


def targets_are_distinct(state: State) -> bool:
    """No instance is named twice."""
    return len({target.index for target in state.targets}) == len(state.targets)


# --- table ----------------------------------------------------------------------------------------

EVENTS = (Submitted, Joined, StepArmed, Waited, SwitchOpened, TargetReported, Replaced, Ticked)

OPERATION: Machine[State] = Machine(
    name="operation",
    doc=__doc__,
    phases=Phase,
    events=EVENTS,
    invariants=(
        exactly_the_ended_have_an_end,
        the_phase_is_the_sum_of_the_targets,
        a_failure_has_a_code,
        targets_are_distinct,
    ),
    rows=(
        # the command
        Row(when=at(Phase.PROPOSED), on=Submitted, given=key_same, emits=(replay_receipt,),
            why="The same command is answered as before; nothing is created (54)."),
        refuse(at(Phase.PROPOSED), Submitted, "idempotency_conflict", given=key_other,
               why="A key names one command for ever (54)."),
        refuse(at(Phase.PROPOSED), Submitted, "still_stopping", given=start_meets_stop,
               why="What is being ended cannot be started; the caller may wait and ask again."),
        Row(when=at(Phase.PROPOSED), on=Submitted, given=start_meets_start, emits=(join_open,),
            why="One activation per instance; whoever asks for the same joins it (50)."),
        refuse(at(Phase.PROPOSED), Submitted, "lifecycle_conflict", given=step_excludes,
               why="An open step has the instance; its outcome comes first."),
        Row(when=at(Phase.PROPOSED), on=Submitted, given=work_to_do, to=Phase.ACCEPTED, change=accepted,
            emits=(give_receipt,), why="The receipt is durable before it is returned (W1)."),
        Row(when=at(Phase.PROPOSED), on=Submitted, given=no_work, to=Phase.SUCCEEDED, change=already_there,
            emits=(give_receipt, _conclude(Phase.SUCCEEDED)),
            why="A stop of what is stopped succeeds at once."),
        # joining, waiting, arming
        Row(when=OPEN, on=Joined, change=one_more, why="It is one operation for all who asked."),
        Row(when=at(Phase.ACCEPTED), on=StepArmed, given=target_named, to=Phase.RUNNING, change=armed,
            why="From here on it cannot expire or be replaced: its outcome is awaited."),
        Row(when=at(Phase.RUNNING, Phase.UNCERTAIN), on=StepArmed, given=target_named, change=armed,
            why="One more of its instances."),
        ignore(OPEN, StepArmed, given=target_not_named, why="It is another operation's."),
        Row(when=OPEN, on=Waited, given=target_named, change=waits, why="Status shows the figures while it waits."),
        ignore(OPEN, Waited, given=target_not_named, why="It waits for that one no more."),
        Row(when=OPEN, on=SwitchOpened, change=switch_noted, why="The receipt names the switch that makes its room."),
        # outcomes
        Row(when=OPEN, on=TargetReported, given=all_met, to=Phase.SUCCEEDED, change=ended,
            emits=(_conclude(Phase.SUCCEEDED),), why="Every instance is where it was wanted."),
        Row(when=OPEN, on=TargetReported, given=all_failed, to=Phase.FAILED, change=ended,
            emits=(_conclude(Phase.FAILED),), why="Each failure is proven clean."),
        Row(when=OPEN, on=TargetReported, given=some_met_some_failed, to=Phase.PARTIAL, change=ended,
            emits=(_conclude(Phase.PARTIAL),), why="Each instance is reported by itself."),
        Row(when=OPEN, on=TargetReported, given=some_unknown, to=Phase.UNCERTAIN, change=reported,
            why="Nobody knows is not failed; it stays open until proof comes."),
        Row(when=at(Phase.ACCEPTED), on=TargetReported, given=some_pending, change=reported,
            why="The others may still expire unarmed."),
        Row(when=at(Phase.RUNNING, Phase.UNCERTAIN), on=TargetReported, given=some_pending, to=Phase.RUNNING,
            change=reported, why="The others go on."),
        ignore(OPEN, TargetReported, given=old_news, why="A known outcome stands."),
        # ends without outcomes
        Row(when=at(Phase.ACCEPTED), on=Replaced, to=Phase.SUPERSEDED, change=replaced,
            emits=(drop_plans, _conclude(Phase.SUPERSEDED)), why="Nothing was armed (P-NONE-WAITING)."),
        refuse(at(Phase.RUNNING, Phase.UNCERTAIN), Replaced, "lifecycle_conflict",
               why="An armed step is classified first; the stop runs after it."),
        Row(when=at(Phase.ACCEPTED), on=Ticked, given=deadline_passed, to=Phase.EXPIRED, change=expired,
            emits=(drop_plans, _conclude(Phase.EXPIRED)), why="Unarmed work does not outlive its deadline."),
        ignore(at(Phase.ACCEPTED), Ticked, given=deadline_ahead, why="It may still wait."),
        ignore(at(Phase.RUNNING, Phase.UNCERTAIN), Ticked,
               why="Armed steps have deadlines of their own; time proves nothing about their outcome."),
        # what does not concern it
        ignore(at(Phase.PROPOSED), Ticked, why="It is not accepted."),
        *(ignore(ENDED, event, why="It has ended.") for event in EVENTS if event is not Submitted),
        # what cannot come
        refuse(OPEN | ENDED, Submitted, "internal", why="A command is submitted once."),
        *(refuse(at(Phase.PROPOSED), event, "internal", why="It is not accepted.")
          for event in EVENTS if event not in (Submitted, Ticked)),
    ),
)  # fmt: skip


def due_at_ms(state: State) -> Millis | None:
    """When a tick would change this operation, if nothing else comes first."""
    return state.deadline_ms if state.phase is Phase.ACCEPTED else None


def step(state: State, event: Event) -> tuple[State, tuple[Effect | Refused, ...]]:
    """Decide one event. Pure: the same state and event always give the same answer."""
    return OPERATION.step(state, event)
