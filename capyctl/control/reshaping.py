"""A machine that came back with other memory: what was sized for domains that it has no more is sized again.

What was charged there has ended by then; the role sees to that before it publishes the new limits. Source: memory 2.2.
"""

from __future__ import annotations

from capyctl.control import deeds
from capyctl.control.book import Book
from capyctl.fsm.deployment import Gate
from capyctl.fsm.types import Domain, HostId
from capyctl.ledger.types import DomainKind, HostPolicy


def resolve_anew(book: Book, host: HostId, before: HostPolicy | None, after: HostPolicy) -> None:
    """Make a new revision, of the same document, of every deployment that another machine was resolved for.

    One that could not be resolved for the machine as it was is tried too. An engine that still runs keeps its own.
    """
    if before is None or _shape(before) == _shape(after):
        return
    changed = {domain for domain, _, _ in _shape(before) ^ _shape(after)}
    for row in list(book.deployments.values()):
        plan = row.plans.get(host)
        sized_otherwise = plan is not None and any(
            not changed.isdisjoint(allocation.bytes) for allocation in plan.phases.values()
        )
        hopeless = row.state.gate is Gate.UNUSABLE and host in row.spec.hosts
        runs = any(one.has_launch for _, one in book.of(row.state.deployment))
        if (sized_otherwise or hopeless) and not runs:
            deeds.renew(book, row.state.deployment)


def _shape(policy: HostPolicy) -> set[tuple[Domain, DomainKind, int]]:
    """What a plan rests on. RAM is another amount after every kernel update, which changes no plan."""
    return {
        (name, limits.kind, limits.capacity_bytes if limits.kind is DomainKind.DEVICE else 0)
        for name, limits in policy.domains.items()
    }
