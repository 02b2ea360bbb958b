"""What one revision needs on one host: bytes per phase, context, slots and time limits. Pure.

The same facts, document and policy always give the same plan, so a stored revision can be derived again
and compared. Three machines are known by their policy: one pool without a GPU, one pool with a GPU, and
discrete cards beside system RAM.

Source: memory 4.2, 4.3, 5.5-5.8, 5.12, 6, 7; decisions 3, 4; engines 12.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from capyctl.checkpoints import kv_cache
from capyctl.documents.deployment import Deployment, PhaseResources
from capyctl.errors import Refusal
from capyctl.fsm.types import Bytes, Domain, Millis, Phase
from capyctl.ledger.types import Allocation, Claim, DomainKind, DomainPolicy, HostPolicy, Plan
from capyctl.units import gib

GIB = 1 << 30
MIB = 1 << 20
CUDA_CONTEXT_BYTES = 5 * GIB // 4
"""X: the CUDA context and graphs placeholder. A machine without a GPU has none (decisions 4)."""
HOST_OVERHEAD_BYTES = 4 * GIB
"""O: host RAM of an engine on a discrete card, until measured."""
DEFAULT_KV_BYTES = 4 * GIB
DEFAULT_SLOTS = 4
FALLBACK_CONTEXT = 4096
_INT_MAX = 2**31 - 1


@attrs.frozen(kw_only=True)
class _Machine:
    """Where the engine's memory lies: its main domain, and the system domain beside a card."""

    domain: Domain
    policy: DomainPolicy
    system: Domain | None
    claims: tuple[Claim, ...]

    @property
    def card(self) -> bool:
        return self.policy.kind is DomainKind.DEVICE

    @property
    def context_bytes(self) -> int:
        return CUDA_CONTEXT_BYTES if self.policy.device is not None else 0

    def margin(self, weights: int) -> int:
        """What an engine needs beside weights and cache. On a card the weights are scaled instead."""
        if self.card:
            return -(-weights // 10)
        if self.policy.device is None:
            return max(256 * MIB, -(-weights // 10))
        return max(8 * GIB, -(-weights * 15 // 100) + 4 * GIB)


@attrs.frozen(kw_only=True)
class _Needs:
    """Request R, start peak S and what they were made of, bytes, before the context placeholder."""

    request: int
    startup: int
    cache: int | None
    context: int
    reason: str | None
    declared_request: bool
    declared_startup: bool


def derive_plan(
    facts: Mapping[str, Any], document: Deployment, policy: HostPolicy, *, request_deadline_ms: int | None = None
) -> Plan:
    """Resolve a llama.cpp deployment on a host into its plan.

    Args:
      facts: of the checkpoint, as `gguf_facts` gives them; `host_args` in it are the profile's own arguments.
      request_deadline_ms: the host's, for a document that states none; it bounds the derived time limits.
    Raises: Refusal `checkpoint_unusable` when the sums leave no cache, `no_safe_estimate` when the cache cannot
      be derived and is not stated, `insufficient_resources` or `insufficient_device_memory` when it can never
      fit this host, `invalid_config` for a context above the trained one, `missing_system_allocation`.
    """
    machine = _machine(document, policy)
    weights = int(facts["weight_bytes"])
    slots = document.engine_config.max_concurrent_requests or DEFAULT_SLOTS
    if document.resources is not None:
        phases = _declared_phases(document, policy, machine)
        budget = sum(phases[Phase.READY].bytes.values()) - weights - machine.margin(weights)
        context, reason = _context_beside_resources(facts, document, slots, budget)
        provenance = dict.fromkeys(phases, "declared")
        cache: int | None = None
    else:
        needs = _needs(facts, document, machine, slots)
        phases, provenance = _derived_phases(needs, machine)
        context, reason, cache = needs.context, needs.reason, needs.cache
    _check_fits(phases, provenance, policy, document.name)
    initialize, wake = _limits(document, weights, request_deadline_ms)
    return Plan(
        phases=phases,
        provenance=provenance,
        initialize_ms=initialize,
        wake_ms=wake,
        context_tokens=context,
        context_reason=reason,
        slots=slots,
        facts=_shown(facts, machine, weights, cache),
    )


def _machine(document: Deployment, policy: HostPolicy) -> _Machine:
    wanted = str(document.devices[0].id) if document.devices and document.devices[0].id else None
    sharing = document.devices[0].sharing if document.devices else None
    fitting = [
        (name, limits)
        for name, limits in sorted(policy.domains.items(), key=lambda item: (len(item[0]), item[0]))
        if limits.kind is not DomainKind.DISTINCT and (wanted is None or wanted == limits.device)
    ]
    if not fitting:
        what = f"the device {wanted}" if wanted else "a memory domain for an engine"
        raise Refusal("host_ineligible", f"{policy.name} does not have {what}")
    name, limits = fitting[0]
    exclusive = sharing == "exclusive" or (sharing is None and limits.exclusive)
    claims = (Claim(device=limits.device, exclusive=exclusive),) if limits.device is not None else ()
    system = next((name for name, other in policy.domains.items() if other.kind is DomainKind.DISTINCT), None)
    return _Machine(domain=name, policy=limits, system=system, claims=claims)


def _arguments(facts: Mapping[str, Any], document: Deployment) -> list[str]:
    return [*map(str, facts.get("host_args") or ()), *document.engine_config.extra_args]


def _per_token(facts: Mapping[str, Any], document: Deployment) -> tuple[int | None, str | None]:
    """Cache bytes per token and slot, or None and why not."""
    config = document.engine_config
    args = _arguments(facts, document)
    gpu_layers = config.llamacpp.n_gpu_layers if config.llamacpp is not None else "all"
    cache_type = config.kv_cache_dtype or kv_cache.DEFAULT_TYPE
    flash = kv_cache.flash_attention_on(cache_type, args)
    why = kv_cache.unaccounted(facts, gpu_layers, args)
    if why is not None:
        return None, why
    return kv_cache.bytes_per_token(facts, cache_type, flash_attention=flash), None


def _needs(facts: Mapping[str, Any], document: Deployment, machine: _Machine, slots: int) -> _Needs:
    memory = document.engine_config.memory
    weights = int(facts["weight_bytes"])
    per_token, why = _per_token(facts, document)
    if per_token is None and memory.kv_cache is None:
        raise Refusal(
            "no_safe_estimate",
            f"the memory of {document.name} cannot be derived: {why}. "
            "State engine_config.memory.kv_cache, or resources",
        )
    declared = _declared_context(facts, document, slots)
    margin = machine.margin(weights)
    budget, cache = _budget(document, machine, weights, declared, slots, per_token)
    context, reason = _fit(facts, declared, slots, per_token, budget, why)
    if cache is None:
        # Neither is stated: the engine allocates what the context needs, and that is what is charged.
        cache = slots * kv_cache.pad(context) * (per_token or 0)
    request = memory.request.bytes if memory.request is not None else weights + cache + margin
    startup = memory.startup.bytes if memory.startup is not None else request
    if startup < request:
        raise Refusal(
            "invalid_config",
            f"engine_config.memory.startup: {gib(startup)} is less than the {gib(request)} it needs once it serves",
        )
    return _Needs(
        request=request,
        startup=startup,
        cache=cache,
        context=context,
        reason=reason,
        declared_request=memory.request is not None,
        declared_startup=memory.startup is not None,
    )


def _budget(
    document: Deployment, machine: _Machine, weights: int, declared: int | None, slots: int, per_token: int | None
) -> tuple[int, int | None]:
    """(bytes that the context may be fitted to, bytes to charge when they are stated)."""
    memory = document.engine_config.memory
    if memory.kv_cache is not None:
        return memory.kv_cache.bytes, memory.kv_cache.bytes
    if memory.request is not None:
        left = memory.request.bytes - weights - machine.margin(weights)
        if left <= 0:
            raise Refusal(
                "checkpoint_unusable",
                f"engine_config.memory.request of {gib(memory.request.bytes)} leaves no KV cache beside "
                f"{gib(weights)} of weights and {gib(machine.margin(weights))} of margin",
                details={"weight_bytes": weights, "margin_bytes": machine.margin(weights)},
            )
        return left, left
    if declared is not None and per_token is not None:
        return slots * kv_cache.pad(declared) * per_token, None
    return min(DEFAULT_KV_BYTES, machine.policy.managed_bytes // 4), None


def _declared_context(facts: Mapping[str, Any], document: Deployment, slots: int) -> int | None:
    context, trained = document.engine_config.context_length, facts.get("context_trained")
    if context is None:
        return None
    if trained is not None and context > trained:
        raise Refusal(
            "invalid_config",
            f"engine_config.context_length: {context} is above the {trained} that the model was trained on",
        )
    if slots * kv_cache.pad(context) > _INT_MAX:
        raise Refusal(
            "invalid_config", f"engine_config: {slots} slots of {context} tokens are more than the engine can count"
        )
    return context


def _fit(
    facts: Mapping[str, Any], declared: int | None, slots: int, per_token: int | None, budget: int, why: str | None
) -> tuple[int, str | None]:
    """The context of one slot, and why it is that when the document does not say. Source: memory 6."""
    trained = facts.get("context_trained")
    if per_token is None:
        if declared is not None:
            return declared, None
        context = min(FALLBACK_CONTEXT, trained or FALLBACK_CONTEXT)
        return context, f"{context} tokens, since the cache cannot be derived: {why}"
    if declared is not None:
        needed = slots * kv_cache.pad(declared) * per_token
        if needed > budget:
            needs, left = gib(needed), gib(budget)
            if needs == left:  # rounded to the same figure, which would explain nothing
                needs, left = f"{-(-needed // MIB)} MiB", f"{budget // MIB} MiB"
            raise Refusal(
                "checkpoint_unusable",
                f"{slots} slots of {declared} tokens need {needs} of KV cache and {left} is left for it. "
                "Lower context_length or max_concurrent_requests, or raise memory",
                details={"needs_bytes": needed, "budget_bytes": budget},
            )
        return declared, None
    tokens = budget // (slots * per_token)
    tokens = min(tokens, _INT_MAX // slots) // kv_cache.CONTEXT_STEP * kv_cache.CONTEXT_STEP
    if tokens < kv_cache.CONTEXT_STEP:
        needed = slots * kv_cache.CONTEXT_STEP * per_token
        raise Refusal(
            "checkpoint_unusable",
            f"{gib(budget)} of KV cache holds no {kv_cache.CONTEXT_STEP} tokens in each of {slots} slots; "
            f"{gib(needed)} would. Lower max_concurrent_requests or raise memory.kv_cache",
            details={"needs_bytes": needed, "budget_bytes": budget},
        )
    if trained is not None and trained <= tokens:
        return trained, f"the {trained} tokens that the model was trained on, in each of {slots} slots"
    return tokens, f"fitted to {gib(budget)} of KV cache over {slots} slots"


def _context_beside_resources(
    facts: Mapping[str, Any], document: Deployment, slots: int, left: int
) -> tuple[int, str | None]:
    declared = _declared_context(facts, document, slots)
    per_token, why = _per_token(facts, document)
    stated = document.engine_config.memory.kv_cache
    budget = stated.bytes if stated is not None else left
    if declared is None and budget <= 0:
        raise Refusal(
            "checkpoint_unusable",
            f"the ready phase of resources leaves no KV cache beside the weights of {document.name}",
        )
    if declared is not None and stated is None:
        return declared, None  # resources are the operator's own sums
    return _fit(facts, declared, slots, per_token, budget, why)


def _derived_phases(needs: _Needs, machine: _Machine) -> tuple[dict[Phase, Allocation], dict[Phase, str]]:
    extra = machine.context_bytes
    ready, cold = needs.request + extra, needs.startup + extra
    provenance = {
        Phase.COLD: "declared" if needs.declared_startup or needs.declared_request else "derived",
        Phase.READY: "declared" if needs.declared_request else "derived",
    }
    if cold > machine.policy.managed_bytes >= ready and not needs.declared_startup:
        cold, provenance[Phase.COLD] = machine.policy.managed_bytes, "whole_host"
    beside = {machine.system: Bytes(HOST_OVERHEAD_BYTES)} if machine.card and machine.system is not None else {}
    phases = {
        Phase.COLD: Allocation(bytes={machine.domain: Bytes(cold), **beside}, claims=machine.claims),
        Phase.READY: Allocation(bytes={machine.domain: Bytes(ready), **beside}, claims=machine.claims),
    }
    return phases, provenance


def _declared_phases(document: Deployment, policy: HostPolicy, machine: _Machine) -> dict[Phase, Allocation]:
    """The `resources` block as it is written. Source: memory 7."""
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
    for phase in (Phase.COLD, Phase.READY, Phase.PARKING, Phase.PARKED, Phase.WAKE):
        block: PhaseResources | None = getattr(resources, phase.value)
        # llama.cpp is restart-only: what the block says about parking has no phase to be held in.
        if block is not None and phase in (Phase.COLD, Phase.READY):
            phases[phase] = _declared_phase(block, policy, machine, phase)
    return phases


def _declared_phase(block: PhaseResources, policy: HostPolicy, machine: _Machine, phase: Phase) -> Allocation:
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
    return Allocation(bytes=amounts, claims=machine.claims if block.devices or not machine.card else ())


def _check_fits(
    phases: Mapping[Phase, Allocation], provenance: Mapping[Phase, str], policy: HostPolicy, name: str
) -> None:
    """Refuse now what no admission on this host could ever grant."""
    for phase, allocation in phases.items():
        for domain, amount in allocation.bytes.items():
            limits = policy.domains[domain]
            most = min(limits.managed_bytes, limits.capacity_bytes - limits.reserve_bytes)
            if amount <= most or provenance[phase] == "whole_host":
                continue
            card = limits.kind is DomainKind.DEVICE
            raise Refusal(
                "insufficient_device_memory" if card else "insufficient_resources",
                f"{name} needs {gib(amount)} on {domain} of {policy.name} while it is {phase.value}; "
                f"at most {gib(most)} may be used there. "
                "Lower context_length or max_concurrent_requests, or choose a smaller model",
                details={"domain": domain, "needs_bytes": amount, "limit_bytes": most, "host": policy.name},
                retryable=False,
            )


def _limits(document: Deployment, weights: int, host_deadline_ms: int | None) -> tuple[Millis, Millis]:
    """Time limits of a cold start and of a wake, milliseconds. Source: engines 12.2."""
    deadline = document.request_deadline.ms if document.request_deadline is not None else host_deadline_ms

    def bounded(derived: int, most: int) -> Millis:
        return Millis(min(derived, most, deadline if deadline is not None else most))

    stated = document.timeouts
    initialize = bounded(120_000 + weights * 10_000 // 10**9, 1_800_000)
    wake = bounded(60_000 + weights * 5_000 // 10**9, 900_000)
    return (
        Millis(stated.initialize.ms) if stated.initialize is not None else initialize,
        Millis(stated.wake.ms) if stated.wake is not None else wake,
    )


def _shown(facts: Mapping[str, Any], machine: _Machine, weights: int, cache: int | None) -> dict[str, str]:
    shown = {
        "model_file": str(facts.get("model_file", "")),
        "architecture": str(facts.get("architecture", "")),
        "weight_bytes": str(weights),
        "margin_bytes": str(machine.margin(weights)),
        "context_trained": str(facts.get("context_trained") or "unknown"),
    }
    return shown if cache is None else {**shown, "kv_cache_bytes": str(cache)}
