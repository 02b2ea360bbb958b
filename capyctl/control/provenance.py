"""Where every figure of memory comes from, as people and programs read it (api 5.5; cli 8.3, 11.2; memory 2.2, 8.1)."""

from __future__ import annotations

from typing import Any

from capyctl.control.book import Book
from capyctl.control.records import HostRow
from capyctl.control.spelling import size, sizes
from capyctl.fsm.types import Domain, HostId, Lane, Phase
from capyctl.ledger.charges import Holding
from capyctl.ledger.estimates import source
from capyctl.ledger.types import DomainKind, HostPolicy, Plan
from capyctl.units import gib

Json = dict[str, Any]  # plain JSON values of several types


def planned(plan: Plan, policy: HostPolicy | None) -> list[Json]:
    """What each phase is charged on each domain, and why that much; where it was measured, beside what was planned."""
    rows: list[Json] = []
    for phase in Phase:  # in the order of a life, however the plan was stored
        for domain, amount in sorted(plan.at(phase).bytes.items()):
            figure = plan.measured.get(phase, {}).get(domain)
            rows.append(
                {
                    "domain": domain,
                    "phase": phase.value,
                    "bytes": size(amount),
                    "provenance": source(plan, policy, phase, domain),
                    "measured_bytes": size(None if figure is None else figure.seen_bytes),
                    "planned_bytes": size(None if figure is None else figure.planned_bytes),
                }
            )
    return rows


def of_phase(plan: Plan, policy: HostPolicy | None, phase: Phase) -> Json | None:
    """One phase in short: its bytes, and whence they are where the engine runs; beside a card for RAM apart.

    None for a phase that the plan does not have.
    """
    if phase not in plan.phases:
        return None
    domains = list(plan.at(phase).bytes)
    ram = [domain for domain in domains if _kind(policy, domain) is DomainKind.DISTINCT]
    engine = [domain for domain in domains if domain not in ram]
    device = source(plan, policy, phase, engine[0]) if engine else None
    host = source(plan, policy, phase, ram[0]) if ram else None
    measured = {domain: figure.seen_bytes for domain, figure in plan.measured.get(phase, {}).items()}
    return {
        "bytes": sizes(plan.at(phase).bytes),
        "provenance": device or host or "derived",
        "device_provenance": device if ram else None,
        "host_provenance": host,
        "measured_bytes": sizes(measured),
    }


def charges(book: Book, lane: Lane, plan: Plan | None) -> list[Json]:
    """What the ledger holds for one instance, a line per domain."""
    held = book.ledger.holding(lane.owner)
    if held is None:
        return []
    row = book.hosts.get(held.host)
    return [
        {
            "instance": lane.index,
            "host": held.host if row is None else row.policy.name,
            "domain": domain,
            "phase": "uncertain" if held.uncertain else held.phase.value,
            "bytes": size(amount),
            "provenance": of_charge(plan, None if row is None else row.policy, held, domain),
            "planned_bytes": size(held.planned(domain)),
        }
        for domain, amount in sorted(held.allocation.bytes.items())
        if amount
    ]


def of_charge(plan: Plan | None, policy: HostPolicy | None, held: Holding, domain: Domain) -> str:
    """Where a charge comes from: what was seen beyond any plan, the whole host, else the plan's own figure."""
    if held.planned(domain) is not None:
        return "measured"
    if held.whole_host and _kind(policy, domain) is not DomainKind.DISTINCT:
        return "whole_host"
    if plan is None:
        return "derived"
    word = source(plan, policy, held.phase, domain)
    if word == "measured" and held.on(domain) != plan.at(held.phase).on(domain):
        return plan.provenance.get(held.phase, "derived")  # it was charged before anything was measured
    return word


def memory_warnings(book: Book, host: HostId, row: HostRow) -> list[str]:
    """Domains in which less is available than their limits promise, what deployments hold there counted in; and cards
    that are not in the newest sample of their host, on which nothing is admitted."""
    warnings = []
    seen = book.seen.get(host, {})
    for name, limits in sorted(row.policy.domains.items()):
        sample = seen.get(name)
        if sample is None:
            if seen and limits.kind is DomainKind.DEVICE:
                warnings.append(f"{name}: its card could not be read; nothing starts or wakes there until it is")
            continue
        held = sum(sample.residents.values())
        promised, there = limits.managed_bytes + limits.reserve_bytes, sample.available_bytes + held
        if promised > there:
            warnings.append(
                f"{name}: managed limit {gib(limits.managed_bytes)} and reserve {gib(limits.reserve_bytes)} do not "
                f"fit into the {gib(sample.available_bytes)} available now and the {gib(held)} that deployments hold "
                "there; starts may wait until other programs free memory"
            )
    return warnings


def _kind(policy: HostPolicy | None, domain: Domain) -> DomainKind | None:
    limits = None if policy is None else policy.domains.get(domain)
    return None if limits is None else limits.kind
