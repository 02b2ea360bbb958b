"""What is left of deployments that are no more: their hosts forget it."""

from __future__ import annotations

from capyctl.control.book import Book
from capyctl.control.orders import PruneLogs
from capyctl.fsm.types import HostId


def prune_logs(book: Book, *hosts: HostId) -> None:
    """Engine logs go with their deployment: what no deployment of now has written is nobody's."""
    kept = tuple(sorted(book.deployments))
    for host in hosts:
        book.order(PruneLogs(host=host, kept=kept, as_of_ms=book.now_ms))
