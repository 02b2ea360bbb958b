"""What each phase of an engine's life is charged on its machine. Pure.

A family's own sums give the request and the start's peak (`Needs`); what a phase is charged follows from them in
the same way for every family. Amounts that 64 bits do not hold are refused before any arithmetic of the ledger.

Source: memory 4.2, 4.3, 7; engines 13.1, 13.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from capyctl.checkpoints.machines import GIB, Machine
from capyctl.documents.deployment import Deployment
from capyctl.documents.resources import PhaseResources, check_ram
from capyctl.documents.strict import Wrong, refusal
from capyctl.errors import Refusal
from capyctl.fsm.types import Bytes, Domain, Phase, Residency
from capyctl.ledger.types import Allocation, DomainKind, HostPolicy
from capyctl.units import larger

BYTES_MAX = 2**63 - 1
HOST_OVERHEAD_BYTES = 4 * GIB
"""O: host RAM of an engine on a discrete card, until measured."""
CARD_RESIDUE_BYTES = GIB
UNIFIED_RESIDUE_BYTES = 2 * GIB
"""What a parked engine is charged where its GPU memory lies, until measured."""
WHILE = {
    Phase.COLD: "while it starts",
    Phase.READY: "while it serves",
    Phase.PARKING: "while it is parked",
    Phase.PARKED: "parked",
    Phase.WAKE: "while it wakes",
}
STEPS = (Phase.COLD, Phase.READY, Phase.PARKING, Phase.PARKED, Phase.WAKE)


@attrs.frozen(kw_only=True)
class Needs:
    """Request R, start peak S and what they were made of, bytes, before the context placeholder.

    All of it is of one rank. `cache` is what is set aside for the KV cache. `pools` is what the engine is told (see
    `ledger.types.Plan`). `kept_bytes` is host RAM that a parked engine keeps, all ranks together, besides a copy of
    the weights; `cache_server_bytes` that of a private cache server, in every phase. `host_bytes` is what options take
    of it in every phase, `host_kv_bytes` the part of that which is a KV cache.
    """

    request: int
    startup: int
    cache: int | None
    context: int
    reason: str | None
    slots: int
    weights: int
    declared_request: bool
    declared_startup: bool
    pools: Mapping[str, int] = attrs.field(factory=dict)
    notes: Mapping[str, str] = attrs.field(factory=dict)
    kept_bytes: int = 0
    cache_server_bytes: int = 0
    host_bytes: int = 0
    host_kv_bytes: int = 0


def host_copy_bytes(weights: int, residency: Residency) -> int:
    """C: the pinned copy of the weights in host RAM, held for the engine's whole life."""
    return -(-weights * 3 // 2) if residency is Residency.HOST_BACKED else 0


def derived_phases(
    needs: Needs, machine: Machine, residency: Residency
) -> tuple[dict[Phase, Allocation], dict[Phase, str]]:
    """What each phase is charged, and where the figure comes from. Source: memory 4.2, 4.3, 14.

    Raises: Refusal `insufficient_resources` for a sum that 64 bits do not hold.
    """
    extra, server = machine.context_bytes, needs.cache_server_bytes + needs.host_bytes
    ready, cold = needs.request + extra, needs.startup + extra
    request = "declared" if needs.declared_request else "derived"
    provenance = {
        Phase.COLD: "declared" if needs.declared_startup else "derived",
        Phase.READY: request,
    }
    residue, beside = CARD_RESIDUE_BYTES, 0
    if machine.card:
        copy = host_copy_bytes(needs.weights, residency) * len(machine.domains)
        # What a park keeps in RAM is charged for the whole life, as a copy is: a park needs no new room.
        beside = HOST_OVERHEAD_BYTES + copy + needs.kept_bytes + server
    else:
        ready, cold, residue = ready + server, cold + server, UNIFIED_RESIDUE_BYTES + needs.kept_bytes + server
    if cold > machine.policy.managed_bytes >= ready and not needs.declared_startup:
        cold, provenance[Phase.COLD] = machine.policy.managed_bytes, "whole_host"

    def held(amount: int) -> dict[Domain, Bytes]:
        on_each = dict.fromkeys(machine.domains, counted_bytes(amount))
        return on_each if machine.system is None else {**on_each, machine.system: counted_bytes(beside)}

    # On a card without RAM of its own to charge there is no domain for it, as for the engine's other RAM.
    ram = machine.system if machine.card else machine.domain
    host_kv = {ram: counted_bytes(needs.host_kv_bytes)} if ram is not None and needs.host_kv_bytes else {}
    serving = Allocation(bytes=held(ready), claims=machine.claims, host_kv=host_kv)
    phases = {Phase.COLD: attrs.evolve(serving, bytes=held(cold)), Phase.READY: serving}
    if residency.parks:
        phases |= {
            Phase.PARKING: serving,
            Phase.PARKED: Allocation(bytes=held(min(residue, ready)), host_kv=host_kv),
            Phase.WAKE: serving,
        }
        provenance |= {Phase.PARKING: request, Phase.PARKED: "placeholder", Phase.WAKE: request}
    return phases, provenance


def counted_bytes(amount: int) -> Bytes:
    """An amount as the ledger counts it.

    Raises: Refusal `insufficient_resources` when 64 bits do not hold it.
    """
    if not 0 <= amount <= BYTES_MAX:
        raise Refusal(
            "insufficient_resources",
            f"its memory comes to {amount} bytes, which is more than any machine has. State less, or use other files",
            retryable=False,
        )
    return Bytes(amount)


def declared_phases(
    document: Deployment, policy: HostPolicy, machine: Machine, residency: Residency
) -> dict[Phase, Allocation]:
    """The `resources` block as it is written; what it says about parking only for a residency that parks.

    Raises: Refusal `missing_system_allocation`, `host_ineligible`, `invalid_config` naming the phase.
    Source: memory 7.
    """
    resources = document.resources
    assert resources is not None
    if resources.gpu is not None and resources.ram is not None:
        if not machine.card:
            both = {machine.domain: counted_bytes(resources.gpu.bytes + resources.ram.bytes)}
        elif machine.system is None:
            raise Refusal("missing_system_allocation", f"{policy.name} has no system domain for the ram of resources")
        else:
            both = {
                machine.domain: counted_bytes(resources.gpu.bytes),
                machine.system: counted_bytes(resources.ram.bytes),
            }
        held = Allocation(bytes=both, claims=machine.claims)
        return {Phase.COLD: held, Phase.READY: held}
    phases: dict[Phase, Allocation] = {}
    for phase in STEPS if residency.parks else (Phase.COLD, Phase.READY):
        block: PhaseResources | None = getattr(resources, phase.value)
        if block is None:
            raise Refusal(
                "invalid_config", f"{document.name}: resources.{phase.value}: is required for a model that parks"
            )
        phases[phase] = _declared_phase(document.name, block, policy, machine, phase)
    return phases


def states_parking(document: Deployment) -> bool:
    """Whether a document's memory says what a parked engine holds; derived memory always does."""
    resources = document.resources
    return resources is None or all(getattr(resources, phase.value) is not None for phase in STEPS)


def _declared_phase(
    document: str, block: PhaseResources, policy: HostPolicy, machine: Machine, phase: Phase
) -> Allocation:
    amounts = {Domain(allocation.domain): counted_bytes(allocation.bytes.bytes) for allocation in block.allocations}
    unknown = sorted(set(amounts) - set(policy.domains))
    if unknown:
        known = ", ".join(sorted(policy.domains))
        raise Refusal(
            "host_ineligible",
            f"{document}: resources.{phase.value}: {policy.name} has no domain {unknown[0]}; it has {known}",
        )
    if machine.card and machine.system is not None and machine.system not in amounts:
        raise Refusal(
            "missing_system_allocation",
            f"{document}: resources.{phase.value}: a model on a card also needs {machine.system}",
        )
    host_kv = {
        Domain(allocation.domain): Bytes(allocation.host_kv_bytes.bytes)
        for allocation in block.allocations
        if allocation.host_kv_bytes.bytes
    }
    if phase is Phase.PARKED:
        try:
            check_ram(phase.value, block)
        except Wrong as wrong:
            raise refusal(wrong.under("resources"), document) from None
    # A parked engine holds memory on its card and does not use it: others may.
    uses = phase is not Phase.PARKED and (block.devices or block.cards or not machine.card)
    return Allocation(bytes=amounts, claims=machine.claims if uses else (), host_kv=host_kv)


@attrs.frozen(kw_only=True)
class TooLarge:
    """A phase of which no admission of this host could grant the bytes on a domain, and the most that it grants."""

    phase: Phase
    domain: Domain
    needs: int
    most: int


def too_large(
    phases: Mapping[Phase, Allocation], provenance: Mapping[Phase, str], policy: HostPolicy
) -> TooLarge | None:
    """The first amount that this host can never grant, if there is one."""
    for phase, allocation in phases.items():
        for domain, amount in allocation.bytes.items():
            most = most_of(policy, domain)
            if amount > most and provenance[phase] != "whole_host":
                return TooLarge(phase=phase, domain=domain, needs=amount, most=most)
    return None


def most_of(policy: HostPolicy, domain: Domain) -> int:
    """What may be charged on a domain at all, bytes."""
    limits = policy.domains[domain]
    return min(limits.managed_bytes, limits.capacity_bytes - limits.reserve_bytes)


def check_fits(
    phases: Mapping[Phase, Allocation],
    provenance: Mapping[Phase, str],
    policy: HostPolicy,
    document: Deployment,
    way_out: Callable[[TooLarge], str],
) -> None:
    """Refuse now what no admission on this host could ever grant.

    Args:
      way_out: what the document may say instead, for what is too large.
    Raises: Refusal `insufficient_device_memory` or `insufficient_resources` with figures; not retryable.
    """
    for allocation in phases.values():
        for domain in allocation.bytes:
            _check_host_kv(allocation, domain, policy, document)
    found = too_large(phases, provenance, policy)
    if found is None:
        return
    needs, there = larger(found.needs, found.most)
    raise Refusal(
        "insufficient_device_memory"
        if policy.domains[found.domain].kind is DomainKind.DEVICE
        else "insufficient_resources",
        f"{document.name} needs {needs} on {found.domain} of {policy.name} {WHILE[found.phase]}; "
        f"at most {there} may be used there. {way_out(found)}",
        details={
            "domain": found.domain,
            "needs_bytes": found.needs,
            "limit_bytes": found.most,
            "host": policy.name,
        },
        retryable=False,
    )


def _check_host_kv(allocation: Allocation, domain: Domain, policy: HostPolicy, document: Deployment) -> None:
    name = document.name
    way_out = "" if document.resources is None else "host_kv_bytes of its resources, or "
    stated, limit = allocation.host_kv.get(domain, 0), policy.domains[domain].host_kv_bytes
    if stated > limit:
        needs, there = larger(stated, limit)
        raise Refusal(
            "category_limit",
            f"{name} needs {needs} of KV cache in host memory on {domain} of {policy.name}; at most {there} may be "
            f"used for that there. Lower {way_out}the option that takes it",
            details={"domain": domain, "needs_bytes": stated, "limit_bytes": limit, "host": policy.name},
            retryable=False,
        )
