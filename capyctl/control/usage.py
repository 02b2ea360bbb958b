"""Memory by domain and by deployment: what may be used, what is set aside for whom, and what is used (api 5.11).

What is set aside is the ledger's; what is used was observed. Unknown is null with a reason, never zero.
"""

from __future__ import annotations

from typing import Any

from capyctl.control import provenance
from capyctl.control.book import Book, lane_of_owner
from capyctl.control.host_views import domain_limits
from capyctl.control.spelling import instant, size, sizes
from capyctl.control.world import World
from capyctl.fsm import instance
from capyctl.fsm.types import DeploymentId, Domain, HostId, Lane, Millis, Phase
from capyctl.ledger.charges import Holding
from capyctl.ledger.types import DomainPolicy, Observation

Json = dict[str, Any]  # plain JSON values of several types


def usage(world: World, now_ms: Millis, *, host: HostId | None = None, deployment: DeploymentId | None = None) -> Json:
    """Every memory domain and every deployment that may hold some of it, or those of one host or one deployment."""
    book = world.book
    hosts = [one for one in book.hosts if host in (None, one)]
    rows = [row for identity, row in book.deployments.items() if deployment in (None, identity)]
    return {
        "observed_at_ms": instant(now_ms),
        "hosts": [
            _host(book, one, now_ms, deployment) for one in sorted(hosts, key=lambda one: book.hosts[one].policy.name)
        ],
        "deployments": [
            {
                "deployment_id": row.state.deployment,
                "name": row.spec.name,
                "waiting": _waiting(book, row.state.deployment),
                "instances": [
                    _instance(book, lane, now_ms)
                    for lane, one in book.of(row.state.deployment)
                    if host in (None, one.run.host)
                ],
            }
            for row in sorted(rows, key=lambda row: row.spec.name)
        ],
    }


# --- hosts ------------------------------------------------------------------------------------------


def _host(book: Book, host: HostId, now_ms: Millis, deployment: DeploymentId | None) -> Json:
    policy = book.hosts[host].policy
    return {
        "host_id": host,
        "name": policy.name,
        "state": "online" if host in book.online else "offline",
        "max_parked": policy.max_parked,
        "parked": book.ledger.parked_count(host),
        "domains": [
            _domain(book, host, name, limits, now_ms, deployment)
            for name, limits in sorted(policy.domains.items(), key=lambda item: (len(item[0]), item[0]))
        ],
    }


def _domain(
    book: Book, host: HostId, name: Domain, limits: DomainPolicy, now_ms: Millis, deployment: DeploymentId | None
) -> Json:
    reserved = book.ledger.charged(host, name)
    most = min(limits.managed_bytes, limits.capacity_bytes - limits.reserve_bytes)
    sample = book.seen.get(host, {}).get(name)
    return {
        **domain_limits(name, limits, sample),
        "reserved_bytes": size(reserved),
        "unreserved_bytes": size(max(0, most - reserved)),
        "parked_bytes": size(book.ledger.parked(host, name)),
        **_observed(book, host, sample, now_ms),
        "holders": [
            _holder(book, owner, held, name, sample)
            for owner, held in sorted(book.ledger.on(host), key=lambda row: (-row[1].on(name), row[0]))
            if held.on(name) and deployment in (None, lane_of_owner(owner).deployment)
        ],
    }


def _observed(book: Book, host: HostId, sample: Observation | None, now_ms: Millis) -> Json:
    """What was seen of a domain. `foreign_bytes` are used by others than recorded engines."""
    if sample is None:
        reason = "the host is offline" if host not in book.online else "it cannot be read now"
        blank = dict.fromkeys(("available_bytes", "resident_bytes", "foreign_bytes", "observed_at_ms"))
        return {**blank, "stale": True, "reason": reason}
    resident = sum(sample.residents.values())
    age = now_ms - sample.seen_at_ms
    stale = host not in book.online or age > book.hosts[host].policy.observation_ttl_ms
    return {
        "available_bytes": size(sample.available_bytes),
        "resident_bytes": size(resident),
        "foreign_bytes": size(max(0, sample.capacity_bytes - sample.available_bytes - resident)),
        "observed_at_ms": instant(sample.seen_at_ms),
        "stale": stale,
        "reason": f"last seen {max(0, age) // 1000} s ago" if stale else None,
    }


def _holder(book: Book, owner: str, held: Holding, domain: Domain, sample: Observation | None) -> Json:
    lane = lane_of_owner(owner)
    row, one = book.deployments.get(lane.deployment), book.instances.get(lane)
    plan = None if one is None else one.plan
    host = book.hosts.get(held.host)
    return {
        "deployment_id": lane.deployment,
        "name": row.spec.name if row else lane.deployment,
        "index": lane.index,
        "phase": "uncertain" if held.uncertain else held.phase.value,
        "bytes": size(held.on(domain)),
        "planned_bytes": size(held.planned(domain)),
        "provenance": provenance.of_charge(plan, None if host is None else host.policy, held, domain),
        "resident_bytes": size(None if sample is None else sample.residents.get(owner)),
    }


# --- deployments ------------------------------------------------------------------------------------


def _waiting(book: Book, identity: DeploymentId) -> int:
    queue = book.traffic.queues.get(identity)
    return len(queue.waiting) if queue else 0


def _instance(book: Book, lane: Lane, now_ms: Millis) -> Json:
    """One instance. `idle_ms` counts from its last request, or from when it could first take one."""
    one = book.instances[lane]
    held = book.ledger.holding(lane.owner)
    used_at, in_flight = book.used_at.get(lane), book.running_on.get(lane, 0)
    idle = None if in_flight or used_at is None or not one.has_launch else max(0, now_ms - used_at)
    return {
        "index": lane.index,
        "host_id": one.run.host,
        "state": instance.published(one.machine),
        "phase": Phase.NONE.value if held is None else "uncertain" if held.uncertain else held.phase.value,
        "bytes": {} if held is None else sizes({name: n for name, n in sorted(held.allocation.bytes.items()) if n}),
        "in_flight": in_flight,
        "idle_ms": idle,
        "activity": "in_flight" if in_flight else "none_recorded" if idle is None else "idle",
    }
