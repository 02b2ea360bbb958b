"""Hosts, instances and owners of memory by the names that people gave them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from capyctl.control.book import Book, lane_of_owner
from capyctl.fsm.types import HostId, Lane

DEPLOYMENT = "deployment:"  # others than deployments own memory too


@attrs.frozen
class _Names(Mapping[str, str]):
    """Looked up when a message names an owner, one by one: a fleet has many."""

    book: Book

    def __getitem__(self, owner: str) -> str:
        if not owner.startswith(DEPLOYMENT):
            raise KeyError(owner)
        return self.book.deployments[lane_of_owner(owner).deployment].spec.name

    def __iter__(self) -> Iterator[str]:
        return (lane.owner for lane in self.book.instances)

    def __len__(self) -> int:
        return len(self.book.instances)


def names(book: Book) -> Mapping[str, str]:
    """Ledger owners by the names of their deployments."""
    return _Names(book)


def host_name(book: Book, host: HostId) -> str:
    """A host by its name; one that is not here by its id."""
    row = book.hosts.get(host)
    return host if row is None else row.policy.name


def lane_name(book: Book, lane: Lane) -> str:
    """`<deployment>/<index>`."""
    row = book.deployments.get(lane.deployment)
    return f"{row.spec.name if row else lane.deployment}/{lane.index}"


def owner_name(book: Book, owner: str) -> str:
    """An owner by the name of its instance; others by their key."""
    if not owner.startswith(DEPLOYMENT):
        return owner
    lane = lane_of_owner(owner)
    return lane_name(book, lane) if lane in book.instances else owner
