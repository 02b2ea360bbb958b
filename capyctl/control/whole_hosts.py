"""First starts that nobody can size: they take their host alone, and only who lets others give way empties it.

Source: memory 14.
"""

from __future__ import annotations

from capyctl.control.book import Book
from capyctl.control.naming import names
from capyctl.fsm.types import Bytes, DeploymentId
from capyctl.ledger.shortfall import listed


def in_the_way(book: Book, identity: DeploymentId) -> str | None:
    """Why a start that releases nobody cannot begin on any host that could take it, with what is charged there.

    None while some host may be, or come to be, ready for it: it is sized there, nothing is charged, or none is online.
    """
    row = book.deployments[identity]
    mine = {lane.owner for lane, _ in book.of(identity)}
    found: list[str] = []
    for host, plan in row.plans.items():
        if host not in book.online or book.hosts[host].draining:
            continue
        charged = [(owner, Bytes(sum(held.allocation.bytes.values()))) for owner, held in book.ledger.on(host)]
        others = [(owner, amount) for owner, amount in charged if owner not in mine]
        if not plan.whole_host or not others:
            return None
        ranked = tuple(sorted(others, key=lambda other: (-other[1], other[0])))
        found.append(
            f"{book.hosts[host].policy.name} has to be empty for it, and is charged to {listed(ranked, names(book))}"
        )
    if not found:
        return None
    name = row.spec.name
    return (
        f"the first start of {name} is measured on a host of its own: {'; '.join(found)}. "
        f"Try: capyctl start deployment {name} --evict, or state memory.startup"
    )
