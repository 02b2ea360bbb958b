"""Idle timers: when an instance that nobody uses is looked at next. What is done then is the scheduler's.

Source: lifecycle 16.
"""

from __future__ import annotations

from capyctl.control.book import Book
from capyctl.fsm.types import Lane, Millis

MARGIN_MS = 1


def watch(book: Book, lane: Lane) -> None:
    """It serves or sleeps from now on: look at it once it may have been idle for long enough."""
    row = book.instances[lane]
    limit = book.settings.ready_idle_ms if row.gate_open else book.settings.parked_idle_ms if row.is_parked else None
    if limit is not None:
        book.due.at(Millis(book.now_ms + limit + MARGIN_MS), "idle", lane)
