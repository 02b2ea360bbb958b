"""One step of the world as its claims see it: the book before, the event, the book after, and what was ordered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import attrs

from capyctl.control import events as e
from capyctl.control import orders
from capyctl.control.book import Book
from capyctl.control.records import DeploymentRow, InstanceRow, Record
from capyctl.fsm import operation, request, switch
from capyctl.fsm.types import DeploymentId, Lane, Millis, OperationId, RequestId, SwitchId
from capyctl.ledger.charges import Holding, Ledger


@attrs.frozen(kw_only=True)
class Before:
    """The book as it was before a step: its plain dicts copied, their values shared."""

    deployments: Mapping[DeploymentId, DeploymentRow]
    instances: Mapping[Lane, InstanceRow]
    operations: Mapping[OperationId, operation.State]
    switches: Mapping[SwitchId, switch.State]
    requests: Mapping[RequestId, request.State]
    looks: Mapping[Lane, object]
    receipts: frozenset[str]
    ledger: Ledger
    now_ms: Millis


def remember(book: Book) -> Before:
    """What TRANSITIONS need of the book before a step."""
    return Before(
        deployments=dict(book.deployments),
        instances=dict(book.instances),
        operations=dict(book.operations),
        switches=dict(book.switches),
        requests=dict(book.requests),
        looks=dict(book.looks),
        receipts=frozenset(book.receipts),
        ledger=book.ledger,
        now_ms=book.now_ms,
    )


H = TypeVar("H", bound=orders.Order)


@attrs.frozen(kw_only=True)
class Change:
    """One step: before, the event, the book after it, and what it ordered and changed."""

    before: Before
    event: e.Event
    book: Book
    orders: tuple[orders.Order, ...]
    changed: tuple[Record, ...]

    def of(self, kind: type[H]) -> list[H]:
        """The orders of one class."""
        return [order for order in self.orders if isinstance(order, kind)]


ChangeClaim = Callable[[Change], bool]


def moved(change: Change) -> list[tuple[str, Holding | None, Holding | None]]:
    """Owners whose holding differs, with what they held and hold."""
    if change.before.ledger is change.book.ledger:
        return []
    before, after = dict(change.before.ledger.rows()), dict(change.book.ledger.rows())
    return [
        (owner, before.get(owner), after.get(owner))
        for owner in {**before, **after}
        if before.get(owner) is not after.get(owner)
    ]
