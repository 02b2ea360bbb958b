"""Owners of memory by the names that people gave them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from capyctl.control.book import Book, lane_of_owner


@attrs.frozen
class _Names(Mapping[str, str]):
    """Looked up when a message names an owner, one by one: a fleet has many."""

    book: Book

    def __getitem__(self, owner: str) -> str:
        if not owner.startswith("deployment:"):
            raise KeyError(owner)
        return self.book.deployments[lane_of_owner(owner).deployment].spec.name

    def __iter__(self) -> Iterator[str]:
        return (lane.owner for lane in self.book.instances)

    def __len__(self) -> int:
        return len(self.book.instances)


def names(book: Book) -> Mapping[str, str]:
    """Ledger owners by the names of their deployments."""
    return _Names(book)
