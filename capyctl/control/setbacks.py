"""A clock that was set back between two sessions: what the rows remember lies ahead then.

A role that started with a wrong clock, and the next one after it was put right, would wait for hours for looks and
readings that are newer than what the first one wrote. So all that instances and open operations remember is moved
back together, until the newest thing that has happened has happened by now: order and distances stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from capyctl.control.book import Book
from capyctl.control.records import InstanceRow
from capyctl.fsm import operation
from capyctl.fsm.types import Millis

INSTANTS = ("at_ms", "since_ms", "until_ms", "deadline_ms")
"""How the names of points in time end; other `_ms` are spans."""


def put_right(book: Book) -> None:
    """Move back what lies ahead, if anything that has happened does."""
    opened = [book.operations[one] for known in book.open_operations.values() for one in known]
    happened = [at for row in book.instances.values() for at in _happened(row)]
    happened += [state.accepted_at_ms for state in opened if state.accepted_at_ms is not None]
    ahead_ms = max(happened, default=book.now_ms) - book.now_ms
    if ahead_ms <= 0:
        return
    for lane, row in list(book.instances.items()):
        book.put_instance(lane, _earlier(row, ahead_ms))
    for state in opened:
        moved = _earlier(state, ahead_ms)
        book.put_operation(moved)
        book.due.at(operation.due_at_ms(moved), "operation", moved.operation)


def _happened(row: InstanceRow) -> Iterator[Millis]:
    """When something happened to an instance, as far as its row says."""
    run, gate = row.run, row.machine.gate
    told = (run.ready_at_ms, gate.closed_at_ms, gate.doubted_at_ms)
    stopped = None if run.stopped is None else run.stopped.asked_at_ms
    wished = None if row.wish is None else row.wish.since_ms
    slept = None if row.slept is None else row.slept.at_ms
    yield from (at for at in (*told, stopped, wished, slept) if at is not None)


def _earlier(value: Any, by_ms: int) -> Any:  # Any: an attrs value of whatever kind, and one of the same
    """The same value with all of its points in time so much earlier."""
    changes: dict[str, Any] = {}
    for field in attrs.fields(type(value)):
        known = getattr(value, field.name)
        if attrs.has(type(known)):
            changes[field.name] = _earlier(known, by_ms)
        elif isinstance(known, int) and field.name.endswith(INSTANTS):
            changes[field.name] = Millis(max(0, known - by_ms))
    return attrs.evolve(value, **changes) if changes else value
