"""Preinitialize: start, prove, park, and the next one (lifecycle 21).

It pays for a cold start before anybody waits for it. One instance at a time, so that it needs the room of one; it
takes no room from anybody, neither from who serves nor from who sleeps, and each instance that cannot be had is
reported by itself. What is to be done next is read off the open operation and the instances, in every pass.
"""

from __future__ import annotations

from capyctl.control import deeds, lanes, operations, requests
from capyctl.control.book import Book
from capyctl.control.records import Wish
from capyctl.fsm import deployment, facts, operation
from capyctl.fsm.types import DeploymentId, Lane, Origin

OPEN = (operation.Result.PENDING, operation.Result.UNKNOWN)


def advance(book: Book) -> None:
    """Take the next step of every open preinitialization."""
    for identity in sorted(book.preparing):
        state = book.operations[identity]
        if identity in book.preparing and not _waits_for_its_turn(book, state):
            _advance(book, state)


def _waits_for_its_turn(book: Book, state: operation.State) -> bool:
    """Of several deployments that one command prepares, the one before is not done yet."""
    before = None if state.after is None else book.operations.get(state.after)
    return before is not None and before.phase in operations.OPEN


def _advance(book: Book, state: operation.State) -> None:
    for target in state.targets:
        lane = Lane(state.deployment, target.index)
        row = book.instances.get(lane)
        if target.result not in OPEN or row is None:
            continue
        if row.is_parked:
            operations.met(book, lane, operations.PREINIT)
            continue
        if row.gate_open and row.is_ready:
            deeds.park_lane(book, lane, Origin.PREINIT)
        elif row.may_start and row.wish is None:
            hopeless = _hopeless(book, state.deployment)
            if hopeless is not None:
                operations.failed(book, lane, operations.PREINIT, *hopeless)
                continue
            lanes.tell(book, lane, facts.Reopened(now_ms=book.now_ms))
            wish = Wish(
                origin=Origin.OPERATOR,
                since_ms=book.now_ms,
                operation=state.operation,
                until_ms=state.deadline_ms,
            )
            refused = deeds.activate(book, lane, wish)
            if refused is not None:
                operations.failed(book, lane, operations.PREINIT, refused.code, "it cannot be started now")
                continue
        return  # one at a time


def _hopeless(book: Book, identity: DeploymentId) -> tuple[str, str] | None:
    """Why nothing of this deployment is started any more: (code, reason)."""
    row = book.deployments[identity]
    if row.state.phase is deployment.Phase.DELETING or requests.operator_stopped(book, row):
        return "deployment_stopped", "it was stopped meanwhile"
    if row.state.phase is deployment.Phase.UNUSABLE:
        return row.state.gate_code or "checkpoint_unusable", row.state.gate_reason
    return None


def is_for(book: Book, wish: Wish | None) -> bool:
    """Whether an instance is wanted for a preinitialization."""
    state = book.operations.get(wish.operation) if wish is not None and wish.operation is not None else None
    return state is not None and state.kind is operation.Kind.PREINITIALIZE
