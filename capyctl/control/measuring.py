"""Checkpoints that could not be read, or whose files changed, are measured again when somebody asks for them.

A directory that was missing and is there now needs no restart and no new revision. What was measured and does
not resolve (`unusable`) stays as it is: only a new revision changes what is asked. Source: lifecycle 15.
"""

from __future__ import annotations

from typing import Final

from capyctl.control.book import Book
from capyctl.control.orders import Measure
from capyctl.control.records import DeploymentRow
from capyctl.fsm.deployment import Gate
from capyctl.fsm.types import DeploymentId, Millis

FRESH_MS: Final = {Gate.UNMEASURABLE: Millis(1_000), Gate.MISMATCH: Millis(30_000)}
"""Gates that may clear, and how long a measurement is the answer: a digest reads every file."""

FROM_A_SOURCE: Final = frozenset({"unavailable", "unauthorized", "not_found", "not_materializable"})
"""What a place that models are downloaded from answered: it is not asked again with every request of a client."""
SOURCE_FRESH_MS: Final = Millis(5_000)


def again(book: Book, row: DeploymentRow) -> bool:
    """Have a checkpoint looked at again, unless that has just been done; whether it is being looked at now."""
    identity = row.state.deployment
    fresh_ms = FRESH_MS.get(row.state.gate)
    if fresh_ms is None:
        return False
    if row.state.gate_code == "deployment_stopped":
        fresh_ms = Millis(0)  # an operator ended its download, and nothing was found out
    elif row.state.gate_code in FROM_A_SOURCE:
        fresh_ms = SOURCE_FRESH_MS
    if identity in book.measuring:
        return True
    measured_at = book.measured_at.get(identity)
    if measured_at is not None and book.now_ms - measured_at < fresh_ms:
        return False
    book.measuring.add(identity)
    book.order(Measure(deployment=identity, revision=row.state.revision))
    return True


def done(book: Book, identity: DeploymentId) -> None:
    """A measurement of it has ended, well or not."""
    book.measuring.discard(identity)
    book.measured_at[identity] = book.now_ms
