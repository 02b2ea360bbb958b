"""Operations in the world: opened by commands and requests, moved by what becomes of instances (lifecycle 13)."""

from __future__ import annotations

from collections.abc import Iterator

from capyctl.control.book import Book
from capyctl.control.records import Move
from capyctl.fsm import operation
from capyctl.fsm.operation import Kind, Phase, Result
from capyctl.fsm.types import DeploymentId, Lane, OperationId

OPEN = frozenset({Phase.ACCEPTED, Phase.RUNNING, Phase.UNCERTAIN})

SERVE, PARK, STOP, PREINIT = "serve", "park", "stop", "preinit"
GOAL = {
    Kind.START: SERVE,
    Kind.WAKE: SERVE,
    Kind.INITIALIZE: SERVE,
    Kind.PARK: PARK,
    Kind.STOP: STOP,
    Kind.DELETE: STOP,
    Kind.DRAIN: STOP,
    Kind.PREINITIALIZE: PREINIT,
}
"""What each kind of operation wants of an instance."""

KEPT_MAX = 500  # ended operations that are remembered


def open_for(book: Book, deployment: DeploymentId, goal: str | None = None) -> Iterator[operation.State]:
    """Operations of a deployment that have not ended, of this goal."""
    for identity in tuple(book.open_operations.get(deployment, ())):
        state = book.operations[identity]
        if goal is None or GOAL[state.kind] == goal:
            yield state


def tell(book: Book, identity: OperationId, fact: operation.Event) -> tuple[object, ...]:
    """Step one operation; its orders, for whoever opened it."""
    before = book.operations[identity]
    after, effects = operation.step(before, fact)
    if after is not before:
        book.put_operation(after)
        if after.phase is not before.phase:
            book.moves.append(
                Move(
                    machine="operation",
                    lane=after.deployment,
                    was=before.phase.value,
                    event=type(fact).__name__,
                    now=after.phase.value,
                )
            )
        index(book, after)
        book.due.at(operation.due_at_ms(after), "operation", identity)
    return effects


def index(book: Book, state: operation.State) -> None:
    """Keep the indexes of open and latest operations."""
    opened = book.open_operations.setdefault(state.deployment, {})
    if state.phase in OPEN:
        opened[state.operation] = None
        if state.kind is Kind.PREINITIALIZE:
            book.preparing.add(state.operation)
    else:
        opened.pop(state.operation, None)
        book.preparing.discard(state.operation)
    if not opened:
        del book.open_operations[state.deployment]
    if state.phase is not Phase.PROPOSED:
        latest = book.operations.get(book.latest_operation.get(state.deployment, state.operation))
        if latest is None or (latest.accepted_at_ms or 0) <= (state.accepted_at_ms or 0):
            book.latest_operation[state.deployment] = state.operation
            if latest is not None:
                _note_past(book, latest)
    _note_past(book, book.operations[state.operation])


def _note_past(book: Book, state: operation.State) -> None:
    """Whether it may be forgotten some time: it has ended, and its deployment had another one since."""
    if state.phase not in OPEN and book.latest_operation.get(state.deployment) != state.operation:
        book.past_operations.add(state.operation)
    else:
        book.past_operations.discard(state.operation)


def prune(book: Book) -> None:
    """Forget the oldest ended operations beyond KEPT_MAX, never a deployment's latest."""
    surplus = len(book.operations) - KEPT_MAX
    if surplus <= 0:
        return
    ended = sorted((book.operations[identity].ended_at_ms or 0, identity) for identity in book.past_operations)
    for _, identity in ended[:surplus]:
        del book.operations[identity]
        book.past_operations.discard(identity)
        book.touch("operation", identity)


# --- what becomes of instances ------------------------------------------------------------------------


def _report(book: Book, lane: Lane, goal: str, result: Result, code: str | None = None, reason: str = "") -> None:
    for state in open_for(book, lane.deployment, goal):
        if any(target.index == lane.index for target in state.targets):
            tell(
                book,
                state.operation,
                operation.TargetReported(now_ms=book.now_ms, index=lane.index, result=result, code=code, reason=reason),
            )


def met(book: Book, lane: Lane, goal: str) -> None:
    """The instance is where these operations want it."""
    _report(book, lane, goal, Result.MET)


def met_otherwise(book: Book, lane: Lane, goal: str, reason: str) -> None:
    """What these operations want of the instance is had in another way, for this reason or the one told before."""
    for state in open_for(book, lane.deployment, goal):
        if any(target.index == lane.index for target in state.targets):
            told = state.waiting_reason or reason
            tell(
                book,
                state.operation,
                operation.TargetReported(now_ms=book.now_ms, index=lane.index, result=Result.MET, reason=told),
            )


def failed(book: Book, lane: Lane, goal: str, code: str, reason: str) -> None:
    """It will not get there, proven."""
    _report(book, lane, goal, Result.FAILED, code, reason)


def unknown(book: Book, lane: Lane, reason: str) -> None:
    """Nobody knows where it is."""
    for goal in (SERVE, PARK, STOP, PREINIT):
        _report(book, lane, goal, Result.UNKNOWN, "unreconciled", reason)


def armed(book: Book, lane: Lane) -> None:
    """A first effect for this instance is armed."""
    for state in open_for(book, lane.deployment):
        if any(target.index == lane.index for target in state.targets):
            tell(book, state.operation, operation.StepArmed(now_ms=book.now_ms, index=lane.index))


def waits(book: Book, lane: Lane, code: str, reason: str) -> None:
    """It could not be placed yet, or is tried again; say why."""
    for state in open_for(book, lane.deployment):
        if state.waiting_reason != reason and any(target.index == lane.index for target in state.targets):
            tell(
                book, state.operation, operation.Waited(now_ms=book.now_ms, index=lane.index, code=code, reason=reason)
            )


def ticked(book: Book, identity: OperationId) -> None:
    """An operation's deadline may have passed."""
    if identity in book.operations:
        tell(book, identity, operation.Ticked(now_ms=book.now_ms))
        due = operation.due_at_ms(book.operations[identity])
        if due is not None and due > book.now_ms:
            book.due.at(due, "operation", identity)
