"""What an ask lacks by the ledger alone, as amounts that releasing owners can give.

Each limit that the ask would exceed is one amount. Owners that block it whatever they hold (a device used
alone, a host that has to be empty) are named instead. Source: memory 10, 12, 14, 15.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs

from capyctl.fsm.types import Domain, Millis, Phase
from capyctl.ledger.asks import UNSEEN, Ask, Case, charge_of
from capyctl.ledger.charges import Ledger
from capyctl.ledger.types import Allocation


class Limit(enum.Enum):
    """Which limit an amount is about."""

    CHARGE = "charge"  # the tighter of managed limit and capacity less reserve
    COPIES = "copies"  # the parked limit
    COUNT = "count"  # the number of parked instances
    HOST_KV = "host_kv"


Key = tuple[Limit, Domain]
EVERYWHERE = Domain("")  # of a limit that is not a domain's


@attrs.frozen(kw_only=True)
class Wants:
    """What has to be freed: amounts per limit, all above zero, and owners that have to go."""

    amounts: Mapping[Key, int]
    owners: frozenset[str]


def wants_of(ledger: Ledger, ask: Ask) -> Wants:
    """What `ask` lacks by charges; empty when the ledger would admit it."""
    charge, policy = charge_of(ledger, ask), ledger.hosts[ask.host]
    amounts: dict[Key, int] = {}
    for domain in charge.bytes:
        limits = policy.domains.get(domain)
        if limits is None:
            continue
        most = min(limits.managed_bytes, limits.capacity_bytes - limits.reserve_bytes)
        amounts[Limit.CHARGE, domain] = ledger.charged(ask.host, domain, but=ask.owner) + charge.on(domain) - most
        kv = charge.host_kv.get(domain, 0)
        theirs = ledger.host_kv(ask.host, domain, but=ask.owner)
        amounts[Limit.HOST_KV, domain] = theirs + kv - limits.host_kv_bytes if kv else 0
    if ask.phase is Phase.PARKING:
        amounts[Limit.COUNT, EVERYWHERE] = ledger.parked_count(ask.host, but=ask.uncounted) + 1 - policy.max_parked
        copy = ask.phases.get(Phase.PARKED, Allocation())
        for domain in copy.bytes:
            total = ledger.parked(ask.host, domain, but=ask.uncounted) + copy.on(domain)
            amounts[Limit.COPIES, domain] = total - policy.domains[domain].parked_bytes
    return Wants(
        amounts={key: amount for key, amount in amounts.items() if amount > 0}, owners=_blockers(ledger, ask, charge)
    )


def _blockers(ledger: Ledger, ask: Ask, charge: Allocation) -> frozenset[str]:
    """Owners that are in the way whatever they hold."""
    others = dict(ledger.on(ask.host, but=ask.owner))
    if ask.whole_host:
        return frozenset(others)
    held = ledger.holding(ask.owner)
    case = Case(ledger=ledger, ask=ask, charge=charge, held=held, seen=UNSEEN, now_ms=Millis(0))
    return frozenset(owner for _, owner in case.conflicts) | {
        owner for owner, other in others.items() if other.whole_host
    }


def gives(ledger: Ledger, wants: Wants, owner: str) -> Mapping[Key, int]:
    """What releasing `owner` altogether frees of what is wanted."""
    held = ledger.held_by(owner)
    freed = {
        (limit, domain): {
            Limit.CHARGE: held.on(domain),
            Limit.HOST_KV: held.allocation.host_kv.get(domain, 0),
            Limit.COPIES: held.at(Phase.PARKED).on(domain) if held.parks else 0,
            Limit.COUNT: int(held.parks),
        }[limit]
        for limit, domain in wants.amounts
    }
    return {key: amount for key, amount in freed.items() if amount}
