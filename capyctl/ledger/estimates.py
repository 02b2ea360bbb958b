"""What runs have shown of a plan's figures: a start's peak, and what a park leaves.

A figure of a plan is an estimate until a run was measured; from then on the largest that was seen is planned with, on
that domain alone. It is kept per revision (the plan is one's), host and installation, and a measurement takes nothing
away that the document or the ready phase asks for. Source: memory 4.3, 5.8, 8.1, 8.3, 17 (M5, M6).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from capyctl.fsm.types import Bytes, Domain, Phase
from capyctl.ledger.settlement import clamp, with_bytes
from capyctl.ledger.types import Allocation, DomainKind, DomainPolicy, HostPolicy, Measured, Plan

MEASURABLE = (Phase.COLD, Phase.PARKED)


def source(plan: Plan, policy: HostPolicy | None, phase: Phase, domain: Domain) -> str:
    """Where one figure of a plan comes from: derived, declared, measured, placeholder or whole_host.

    What a document states of its engine's own memory says nothing of the host RAM beside a card, unless it is a
    `resources` block, which states all.
    """
    if plan.stated:
        return "declared"
    if domain in plan.measured.get(phase, {}):
        return "measured"
    limits = None if policy is None else policy.domains.get(domain)
    if limits is not None and limits.kind is DomainKind.DISTINCT:
        return "derived"
    return plan.provenance.get(phase, "derived")


def with_measured(plan: Plan, policy: HostPolicy, phase: Phase, seen: Mapping[Domain, Bytes]) -> Plan:
    """`plan` with what was seen of one phase: the largest so far on each domain counts from now on.

    A start's peak takes the estimate's place, larger or smaller; it is planned with as at least the ready charge and
    at most what the host may charge at all, since a start that fitted must fit again. What a park left only raises
    the placeholder, to at most the ready charge. Declared figures stay as they were declared, and a domain that the
    phase is not charged on has none.
    """
    allocation, figures = plan.at(phase), dict(plan.measured.get(phase, {}))
    for domain, amount in seen.items():
        limits = policy.domains.get(domain)
        if limits is None or domain not in allocation.bytes or source(plan, policy, phase, domain) == "declared":
            continue
        known = figures.get(domain)
        largest = amount if known is None else max(known.seen_bytes, amount)
        planned = allocation.on(domain) if known is None else known.planned_bytes
        figures[domain] = Measured(seen_bytes=largest, planned_bytes=planned)
        allocation = with_bytes(allocation, domain, _planned(plan, limits, phase, domain, figures[domain]))
    if figures == plan.measured.get(phase, {}):
        return plan
    return attrs.evolve(plan, phases={**plan.phases, phase: allocation}, measured={**plan.measured, phase: figures})


def _planned(plan: Plan, limits: DomainPolicy, phase: Phase, domain: Domain, figure: Measured) -> Bytes:
    ready = plan.at(Phase.READY).on(domain)
    if phase is Phase.PARKED:
        return clamp(figure.seen_bytes, at_least=figure.planned_bytes, at_most=ready)
    most = Bytes(min(limits.managed_bytes, limits.capacity_bytes - limits.reserve_bytes))
    return clamp(figure.seen_bytes, at_least=ready, at_most=most)


def as_estimated(plan: Plan) -> Plan:
    """`plan` as it was before anything was measured."""
    if not plan.measured:
        return plan
    phases = dict(plan.phases)
    for phase, figures in plan.measured.items():
        for domain, figure in figures.items():
            phases[phase] = with_bytes(phases[phase], domain, figure.planned_bytes)
    return attrs.evolve(plan, phases=phases, measured={}, installation=None)


def carried_over(before: Plan, after: Plan, policy: HostPolicy) -> Plan:
    """`after`, the same revision resolved again, with what was measured of it `before`."""
    for phase, figures in before.measured.items():
        seen = {domain: figure.seen_bytes for domain, figure in figures.items()}
        after = with_measured(after, policy, phase, seen)
    return attrs.evolve(after, installation=before.installation) if after.measured else after


def laid_out(plan: Plan, policy: HostPolicy, phases: Mapping[Phase, Allocation]) -> Plan:
    """`plan` as a start takes it: `phases` on the cards that were chosen, and what was measured beside them."""
    measured: dict[Phase, dict[Domain, Measured]] = {}
    for phase, figures in plan.measured.items():
        on_cards = [figure for domain, figure in sorted(figures.items()) if domain in policy.cards]
        largest = max(on_cards, key=lambda figure: figure.seen_bytes, default=None)
        here = {
            domain: figures.get(domain, largest if domain in policy.cards else None) for domain in _of(phases, phase)
        }
        measured[phase] = {domain: figure for domain, figure in here.items() if figure is not None}
    return attrs.evolve(plan, phases=phases, measured=measured)


def as_seen_by(plan: Plan, policy: HostPolicy, phase: Phase, seen: Mapping[Domain, Bytes]) -> dict[Domain, Bytes]:
    """What was seen of another run of the revision, on the domains of this plan.

    A plan is for any card of its host that is large enough, so the largest that was seen on a card counts for each of
    its own. RAM is the same for all.
    """
    largest = max((amount for domain, amount in seen.items() if domain in policy.cards), default=None)
    here = {domain: largest if domain in policy.cards else seen.get(domain) for domain in _of(plan.phases, phase)}
    return {domain: amount for domain, amount in here.items() if amount is not None}


def _of(phases: Mapping[Phase, Allocation], phase: Phase) -> Iterable[Domain]:
    return phases[phase].bytes if phase in phases else ()
