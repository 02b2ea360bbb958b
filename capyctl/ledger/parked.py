"""The parked set: how much of it there is, and who leaves it when a start or a park needs the room.

Reclaiming stops parked instances that nobody asked to keep, least recently used first; a running one is
never touched for it. Source: memory 2 (parked limit, max_parked, growth), 8.3, 15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from capyctl.fsm.types import Bytes, Domain, HostId, Millis, Phase
from capyctl.ledger.asks import Ask, Seen
from capyctl.ledger.charges import Ledger
from capyctl.ledger.crowd import Candidate, Crowd
from capyctl.ledger.shortfall import Shortfall
from capyctl.ledger.types import HostPolicy, Plan
from capyctl.ledger.victims import Eviction, plan_eviction


@attrs.frozen(kw_only=True)
class ParkedSet:
    """What the parked instances of one host take of what they may. Instances on their way in count."""

    count: int
    count_max: int
    charged_bytes: Mapping[Domain, Bytes]
    limit_bytes: Mapping[Domain, Bytes]


def parked_set(ledger: Ledger, host: HostId) -> ParkedSet:
    """The parked set of `host`, for status."""
    policy = ledger.hosts[host]
    return ParkedSet(
        count=ledger.parked_count(host),
        count_max=policy.max_parked,
        charged_bytes={domain: ledger.parked(host, domain) for domain in policy.domains},
        limit_bytes={domain: limits.parked_bytes for domain, limits in policy.domains.items()},
    )


def reclaim(
    ledger: Ledger,
    ask: Ask,
    candidates: Sequence[Candidate],
    *,
    since_ms: Millis,
    seen: Mapping[HostId, Seen],
    now_ms: Millis,
) -> Eviction | Shortfall:
    """Which parked instances to stop so that `ask` (a start, a wake or a park) fits.

    Returns: an eviction whose victims are all parked, without victims where it fits already; or what is still
      lacking with all of them gone, `parked_capacity` for a park: then the model serves on.
    """
    parked = [one for one in candidates if is_parked(ledger, one)]
    crowd = Crowd.of(ledger, parked)
    plan = plan_eviction(ledger, [ask], crowd, since_ms=since_ms, seen=seen, now_ms=now_ms)
    return plan if isinstance(plan, Eviction) else plan.shortfalls[0]


def is_over(ledger: Ledger, host: HostId) -> bool:
    """more is parked on the host than it may keep"""
    policy = ledger.hosts[host]
    return ledger.parked_count(host) > policy.max_parked or any(
        ledger.parked(host, domain) > limits.parked_bytes for domain, limits in policy.domains.items()
    )


def is_parked(ledger: Ledger, candidate: Candidate) -> bool:
    """it is parked"""
    held = ledger.holding(candidate.owner)
    return held is not None and held.phase is Phase.PARKED


def may_be_left(plan: Plan) -> Mapping[Domain, Bytes]:
    """What a park may leave on each domain that it is to empty, so that it counts as one.

    A domain that is charged as much parked as ready (host RAM beside a card, for a copy or for the engine's own
    processes) is not emptied, and what is there proves nothing. A declared residue is kept to. A placeholder is only
    a guess at what contexts, graphs and libraries keep, so it may be passed by a quarter of what the park was to
    free; what is then measured is charged. An engine that freed less than that did not park.
    """
    ready, parked = plan.at(Phase.READY), plan.at(Phase.PARKED)
    slack = 0 if plan.provenance.get(Phase.PARKED) == "declared" else 1
    return {
        domain: Bytes(parked.on(domain) + slack * (amount - parked.on(domain)) // 4)
        for domain, amount in ready.bytes.items()
        if parked.on(domain) < amount
    }


def growth_bytes(policy: HostPolicy, first_bytes: Bytes) -> Bytes | None:
    """What the parked copy of a launch may grow by on this host, None for any amount."""
    if policy.parked_growth_bytes is not None:
        return policy.parked_growth_bytes
    percent = policy.parked_growth_percent
    return None if percent is None else Bytes(first_bytes * percent // 100)


def grew_too_much(first_bytes: Bytes, latest_bytes: Bytes, growth_bytes: Bytes | None) -> bool:
    """its parked residue grew past the bound since its launch, so its next park is a stop

    Args:
      growth_bytes: what it may grow by; None bounds nothing.
    """
    return growth_bytes is not None and latest_bytes > first_bytes + growth_bytes
