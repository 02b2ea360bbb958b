"""Where an engine's memory lies on a host, and what each phase of its life is charged there. Pure.

Three machines are known by their policy: one pool without a GPU, one pool with a GPU, and discrete cards
beside system RAM. A family's own sums give the request and the start's peak (`Needs`); what a phase is
charged follows from them in the same way for every family.

Source: memory 4.2, 4.3, 7; engines 12.2, 13.1, 13.4; decisions 4.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from capyctl.documents.deployment import Deployment
from capyctl.documents.resources import PhaseResources
from capyctl.errors import Refusal
from capyctl.fsm.types import Bytes, Domain, Millis, Phase, Residency
from capyctl.ledger.types import Allocation, Claim, DomainKind, DomainPolicy, HostPolicy
from capyctl.units import gib

GIB = 1 << 30
MIB = 1 << 20
CUDA_CONTEXT_BYTES = 5 * GIB // 4
"""X: the CUDA context and graphs placeholder. A machine without a GPU has none (decisions 4)."""
HOST_OVERHEAD_BYTES = 4 * GIB
"""O: host RAM of an engine on a discrete card, until measured."""
CARD_RESIDUE_BYTES = GIB
UNIFIED_RESIDUE_BYTES = 2 * GIB
"""What a parked engine is charged where its GPU memory lies, until measured."""
DEFAULT_KV_BYTES = 4 * GIB
FIRST_START_MS = 480_000
"""What a first start of vLLM or SGLang may take beside its weights: kernels are compiled and tuned."""
TENSORFOLD_START_MS = 1_800_000
STEPS = (Phase.COLD, Phase.READY, Phase.PARKING, Phase.PARKED, Phase.WAKE)


@attrs.frozen(kw_only=True)
class Machine:
    """Where the engine's memory lies: its main domain, and the system domain beside a card."""

    domain: Domain
    policy: DomainPolicy
    system: Domain | None
    system_policy: DomainPolicy | None
    claims: tuple[Claim, ...]

    @property
    def card(self) -> bool:
        return self.policy.kind is DomainKind.DEVICE

    @property
    def has_gpu(self) -> bool:
        return self.policy.device is not None

    @property
    def context_bytes(self) -> int:
        return CUDA_CONTEXT_BYTES if self.has_gpu else 0

    @property
    def most_bytes(self) -> int:
        """What may be charged on the main domain at all."""
        return min(self.policy.managed_bytes, self.policy.capacity_bytes - self.policy.reserve_bytes)

    @property
    def default_kv_bytes(self) -> int:
        """The cache of a document that states none."""
        return min(DEFAULT_KV_BYTES, self.policy.managed_bytes // 4)


@attrs.frozen(kw_only=True)
class Needs:
    """Request R, start peak S and what they were made of, bytes, before the context placeholder.

    `cache` is what is set aside for the KV cache. `pools` is what the engine is told (see `ledger.types.Plan`).
    """

    request: int
    startup: int
    cache: int | None
    context: int
    reason: str | None
    slots: int
    declared_request: bool
    declared_startup: bool
    pools: Mapping[str, int] = attrs.field(factory=dict)
    notes: Mapping[str, str] = attrs.field(factory=dict)


def machine_of(document: Deployment, policy: HostPolicy) -> Machine:
    """The domain that a deployment's engine runs in: its named card, else the one that its `resources` speak of,
    else the largest one, the first of equals.

    Placement chooses among the cards on which that fits.

    Raises: Refusal `host_ineligible` naming the device that the host lacks.
    """
    asked = document.claims
    wanted = str(asked[0].id) if asked and asked[0].id else None
    sharing = asked[0].sharing if asked else None
    fitting = [
        (name, limits)
        for name, limits in sorted(policy.domains.items(), key=lambda item: (len(item[0]), item[0]))
        if limits.kind is not DomainKind.DISTINCT and (wanted is None or wanted == limits.device)
    ]
    if not fitting:
        what = f"the device {wanted}" if wanted else "a memory domain for an engine"
        raise Refusal("host_ineligible", f"{policy.name} does not have {what}")
    resources = document.resources
    stated = () if resources is None or resources.ready is None else resources.ready.cards
    name, limits = max(fitting, key=lambda item: (item[0] in stated, item[1].managed_bytes))
    exclusive = sharing == "exclusive" or (sharing is None and limits.exclusive)
    claims = (Claim(device=limits.device, exclusive=exclusive),) if limits.device is not None else ()
    system = next((name for name, other in policy.domains.items() if other.kind is DomainKind.DISTINCT), None)
    return Machine(
        domain=name,
        policy=limits,
        system=system,
        system_policy=None if system is None else policy.domains[system],
        claims=claims,
    )


def host_copy_bytes(weights: int, residency: Residency) -> int:
    """C: the pinned copy of the weights in host RAM, held for the engine's whole life."""
    return -(-weights * 3 // 2) if residency is Residency.HOST_BACKED else 0


def derived_phases(
    needs: Needs, machine: Machine, residency: Residency, weights: int
) -> tuple[dict[Phase, Allocation], dict[Phase, str]]:
    """What each phase is charged, and where the figure comes from. Source: memory 4.2, 4.3, 14."""
    extra = machine.context_bytes
    ready, cold = needs.request + extra, needs.startup + extra
    request = "declared" if needs.declared_request else "derived"
    provenance = {
        Phase.COLD: "declared" if needs.declared_startup else "derived",
        Phase.READY: request,
    }
    if cold > machine.policy.managed_bytes >= ready and not needs.declared_startup:
        cold, provenance[Phase.COLD] = machine.policy.managed_bytes, "whole_host"
    beside: dict[Domain, Bytes] = {}
    if machine.card and machine.system is not None:
        beside = {machine.system: Bytes(HOST_OVERHEAD_BYTES + host_copy_bytes(weights, residency))}
    serving = Allocation(bytes={machine.domain: Bytes(ready), **beside}, claims=machine.claims)
    phases = {
        Phase.COLD: Allocation(bytes={machine.domain: Bytes(cold), **beside}, claims=machine.claims),
        Phase.READY: serving,
    }
    if residency.parks:
        residue = min(CARD_RESIDUE_BYTES if machine.card else UNIFIED_RESIDUE_BYTES, ready)
        phases |= {
            Phase.PARKING: serving,
            Phase.PARKED: Allocation(bytes={machine.domain: Bytes(residue), **beside}),
            Phase.WAKE: serving,
        }
        provenance |= {Phase.PARKING: request, Phase.PARKED: "placeholder", Phase.WAKE: request}
    return phases, provenance


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
            both = {machine.domain: Bytes(resources.gpu.bytes + resources.ram.bytes)}
        elif machine.system is None:
            raise Refusal("missing_system_allocation", f"{policy.name} has no system domain for the ram of resources")
        else:
            both = {machine.domain: Bytes(resources.gpu.bytes), machine.system: Bytes(resources.ram.bytes)}
        held = Allocation(bytes=both, claims=machine.claims)
        return {Phase.COLD: held, Phase.READY: held}
    phases: dict[Phase, Allocation] = {}
    for phase in STEPS if residency.parks else (Phase.COLD, Phase.READY):
        block: PhaseResources | None = getattr(resources, phase.value)
        if block is None:
            raise Refusal(
                "invalid_config", f"{document.name}: resources.{phase.value}: is required for a model that parks"
            )
        phases[phase] = _declared_phase(block, policy, machine, phase)
    return phases


def states_parking(document: Deployment) -> bool:
    """Whether a document's memory says what a parked engine holds; derived memory always does."""
    resources = document.resources
    return resources is None or all(getattr(resources, phase.value) is not None for phase in STEPS)


def _declared_phase(block: PhaseResources, policy: HostPolicy, machine: Machine, phase: Phase) -> Allocation:
    amounts = {Domain(allocation.domain): Bytes(allocation.bytes.bytes) for allocation in block.allocations}
    unknown = sorted(set(amounts) - set(policy.domains))
    if unknown:
        known = ", ".join(sorted(policy.domains))
        raise Refusal(
            "host_ineligible", f"resources.{phase.value}: {policy.name} has no domain {unknown[0]}; it has {known}"
        )
    if machine.card and machine.system is not None and machine.system not in amounts:
        raise Refusal(
            "missing_system_allocation", f"resources.{phase.value}: a model on a card also needs {machine.system}"
        )
    host_kv = {
        Domain(allocation.domain): Bytes(allocation.host_kv_bytes.bytes)
        for allocation in block.allocations
        if allocation.host_kv_bytes.bytes
    }
    # A parked engine holds memory on its card and does not use it: others may.
    uses = phase is not Phase.PARKED and (block.devices or block.cards or not machine.card)
    return Allocation(bytes=amounts, claims=machine.claims if uses else (), host_kv=host_kv)


def check_fits(
    phases: Mapping[Phase, Allocation], provenance: Mapping[Phase, str], policy: HostPolicy, name: str
) -> None:
    """Refuse now what no admission on this host could ever grant.

    Raises: Refusal `insufficient_device_memory` or `insufficient_resources` with figures; not retryable.
    """
    for phase, allocation in phases.items():
        for domain, amount in allocation.bytes.items():
            limits = policy.domains[domain]
            most = min(limits.managed_bytes, limits.capacity_bytes - limits.reserve_bytes)
            if amount <= most or provenance[phase] == "whole_host":
                continue
            card = limits.kind is DomainKind.DEVICE
            way_out = "Lower context_length or max_concurrent_requests, or choose a smaller model"
            if provenance[phase] == "declared":
                way_out = "Lower what the document states of memory, or choose a smaller model"
            raise Refusal(
                "insufficient_device_memory" if card else "insufficient_resources",
                f"{name} needs {gib(amount)} on {domain} of {policy.name} while it is {phase.value}; "
                f"at most {gib(most)} may be used there. {way_out}",
                details={"domain": domain, "needs_bytes": amount, "limit_bytes": most, "host": policy.name},
                retryable=False,
            )


def limits(
    document: Deployment, weights: int, host_deadline_ms: int | None, *, family: str, built: bool = False
) -> tuple[Millis, Millis]:
    """Time limits of a cold start and of a wake, milliseconds. Source: engines 12.2.

    Args:
      built: a launch before has compiled what the family compiles on its first start.
    """
    deadline = document.request_deadline.ms if document.request_deadline is not None else host_deadline_ms

    def bounded(derived: int, most: int) -> Millis:
        return Millis(min(derived, most, deadline if deadline is not None else most))

    stated = document.timeouts
    derived = 120_000 + weights * 10_000 // 10**9
    if family in ("vllm", "sglang"):
        derived += FIRST_START_MS
    initialize = bounded(derived, 1_800_000)
    if family == "tensorfold" and not built:
        # It compiles its kernels at the first start, and waits for that longer than a request may elsewhere.
        least = TENSORFOLD_START_MS if document.request_deadline is None else document.request_deadline.ms
        initialize = Millis(min(TENSORFOLD_START_MS, least))
    wake = bounded(60_000 + weights * 5_000 // 10**9, 900_000)
    return (
        Millis(stated.initialize.ms) if stated.initialize is not None else initialize,
        Millis(stated.wake.ms) if stated.wake is not None else wake,
    )
