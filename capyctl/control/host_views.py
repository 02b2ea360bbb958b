"""Hosts and switches as people and programs read them: limits, what is charged and what was seen there (api 5.7)."""

from __future__ import annotations

from typing import Any

from capyctl.control import provenance
from capyctl.control.book import Book
from capyctl.control.naming import lane_name, owner_name
from capyctl.control.spelling import instant, size
from capyctl.control.world import World
from capyctl.fsm import switch
from capyctl.fsm.types import Domain, HostId
from capyctl.ledger.types import DomainPolicy, Observation

Json = dict[str, Any]  # plain JSON values of several types


def hosts(world: World) -> list[Json]:
    """Every host with its limits, what is charged and what was seen there (api 5.7)."""
    book = world.book
    return [_host(book, host) for host in sorted(book.hosts, key=lambda one: book.hosts[one].policy.name)]


def _host(book: Book, host: HostId) -> Json:
    row = book.hosts[host]
    online = host in book.online
    seen = book.seen.get(host, {})
    domains = []
    for name, limits in sorted(row.policy.domains.items()):
        sample = seen.get(name)
        domains.append(
            {
                **domain_limits(name, limits, sample),
                "charged_bytes": size(book.ledger.charged(host, name)),
                "available_bytes": size(None if sample is None else sample.available_bytes),
                "observed_at_unix_ms": instant(None if sample is None else sample.seen_at_ms),
                "memory_source": None if sample is None else sample.source or None,
                "residents": [
                    {"name": owner_name(book, owner), "bytes": size(amount)}
                    for owner, amount in sorted(({} if sample is None else sample.residents).items())
                ],
                "owners": [
                    {"name": owner_name(book, owner), "phase": held.phase.value, "bytes": size(held.on(name))}
                    for owner, held in sorted(book.ledger.on(host))
                    if held.on(name)
                ],
            }
        )
    return {
        "id": host,
        "name": row.policy.name,
        "state": "draining" if row.draining else "online" if online else "offline",
        "eligible": online and not row.draining,
        "domains": domains,
        "memory_warnings": provenance.memory_warnings(book, host, row) if online else [],
        "switch": _switch(book, host),
    }


def domain_limits(name: Domain, limits: DomainPolicy, sample: Observation | None) -> Json:
    """What a domain is, and how much of it may be used."""
    return {
        "domain_id": name,
        "kind": limits.kind.value,
        "device_id": limits.device,
        # As it was seen: a control group's limit may have come or gone since the limits were derived.
        "capacity_bytes": size(limits.capacity_bytes if sample is None else sample.capacity_bytes),
        "managed_limit": size(limits.managed_bytes),
        "free_reserve": size(limits.reserve_bytes),
        "parked_limit": size(limits.parked_bytes),
    }


def _switch(book: Book, host: HostId) -> Json | None:
    identity = book.active_switches.get(host)
    return None if identity is None else switch_view(book, book.switches[identity])


def switch_view(book: Book, state: switch.State) -> Json:
    """One switch: for whom, at whose cost, how far."""
    target = book.deployments.get(state.target)
    return {
        "id": state.switch,
        "target": target.spec.name if target else state.target,
        "host_id": state.host,
        "phase": state.phase.value,
        "started_at_ms": instant(state.started_at_ms),
        "ended_at_ms": instant(state.ended_at_ms),
        "code": state.code,
        "reason": state.reason or None,
        "victims": [
            {
                "name": lane_name(book, victim.lane),
                "released": released(victim),
            }
            for victim in state.victims
        ],
    }


def released(victim: switch.Victim) -> str | None:
    """How a victim's memory came free, None while it has not."""
    return None if victim.released is None else f"released: {victim.released.value}"
