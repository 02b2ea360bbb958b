"""What one revision needs on one host: bytes per phase, context, slots and time limits. Pure.

The same facts, document and policy always give the same plan, so a stored revision can be derived again
and compared. Each family has its own sums; phases and limits are everybody's.

Source: memory 4, 5, 7; engines 12.2, 13.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from capyctl.checkpoints import cache_server, host_memory, longest_context, sizing_llamacpp, sizing_tensors, ways_out
from capyctl.checkpoints.machines import Machine, machine_of
from capyctl.checkpoints.phases import Needs, TooLarge, check_fits, declared_phases, derived_phases, too_large
from capyctl.checkpoints.time_limits import limits
from capyctl.documents.deployment import Deployment
from capyctl.errors import Refusal
from capyctl.fsm.types import Phase, Residency
from capyctl.ledger.types import Allocation, HostPolicy, Plan
from capyctl.units import gib

PARSERS = ("tool_call_parser", "tool_call_parser_source", "reasoning_parser", "reasoning_parser_source")
ROUTER_BOUND = 32
"""Requests that run at once on one instance of an engine whose own limit is not known."""


def derive_plan(
    facts: Mapping[str, Any],
    document: Deployment,
    policy: HostPolicy,
    *,
    family: str = "llamacpp",
    residency: Residency = Residency.RESTART_ONLY,
    request_deadline_ms: int | None = None,
) -> Plan:
    """Resolve a deployment on a host into its plan.

    Args:
      facts: of the checkpoint, as `gguf_facts` or `tensor_facts` give them; `host_args` in them are the
        profile's own arguments, `draft` the drafter's facts.
      residency: the resolved one (`residency.settle`).
      request_deadline_ms: the host's, for a document that states none; it bounds the derived time limits.
    Raises: Refusal `checkpoint_unusable` when the sums leave no cache, `no_safe_estimate` when memory cannot be
      derived and is not stated, `insufficient_resources` or `insufficient_device_memory` when it can never
      fit this host, `invalid_config` for a context above the longest that its engine takes, or ranks
      that it cannot share the model's heads out to,
      `missing_system_allocation`, `multi_gpu_unsupported` for ranks of a family that runs on one device,
      `host_ineligible` for cards that the host has not, `capability_missing:lmcache` for a required cache server.
    """
    if document.topology.ranks > 1 and family not in ways_out.SPLIT:
        raise Refusal("multi_gpu_unsupported", f"{document.name}: {family} runs on one device here; leave topology out")
    machine = machine_of(document, policy)
    if family == "vllm":
        sizing_tensors.check_heads(facts, document)
    weights = weights_of(facts)
    server = cache_server.server_bytes(facts, document, family, residency)
    told = host_memory.taken(facts, document, family)

    def derived(stating: Deployment) -> Needs:
        return attrs.evolve(
            _needs(facts, stating, machine, family, residency),
            cache_server_bytes=server,
            host_bytes=told.bytes,
            host_kv_bytes=told.cache,
        )

    if document.resources is not None:
        phases = declared_phases(document, policy, machine, residency)
        host_memory.check_declared(told, phases, machine, document.name)
        provenance: dict[Phase, str] = dict.fromkeys(phases, "declared")
        left = host_memory.left_to_engine(told, phases[Phase.READY], machine)
        needs = _beside_resources(facts, document, machine, family, left)
    else:
        needs = derived(document)
        phases, provenance = derived_phases(needs, machine, residency)

    def would_fit(other: Deployment) -> bool:
        try:
            return too_large(*derived_phases(derived(other), machine, residency), policy) is None
        except Refusal:
            return False

    def way_out(found: TooLarge) -> str:
        if document.resources is not None:
            return ways_out.OF_RESOURCES
        over = phases[Phase.READY].on(found.domain) - found.most if found.domain in machine.domains else 0
        return ways_out.of_derived(
            document,
            policy,
            policy.domains[found.domain],
            family=family,
            cache=needs.cache,
            excess=found.needs - found.most,
            over=over,
            fits=would_fit,
        )

    check_fits(phases, provenance, policy, document, way_out)
    built = bool(facts.get("kernels_built"))
    initialize, wake = limits(document, weights, request_deadline_ms, family=family, built=built)
    return Plan(
        phases=phases,
        provenance=provenance,
        stated=document.resources is not None,
        initialize_ms=initialize,
        wake_ms=wake,
        context_tokens=needs.context,
        context_reason=needs.reason,
        slots=needs.slots,
        facts=_shown(facts, machine, weights, needs, family) | _of_options(told),
        pools={**needs.pools, "host": told.bytes} if told.bytes else needs.pools,
    )


def _of_options(told: host_memory.Taken) -> dict[str, str]:
    return {"host_options": f"{gib(told.bytes)} of RAM for {' and '.join(told.words)}"} if told.bytes else {}


def weights_of(facts: Mapping[str, Any]) -> int:
    """W: the weight files, a drafter's included. Time limits are of the whole, whatever a rank holds."""
    draft = facts.get("draft") or {}
    return int(facts["weight_bytes"]) + int(draft.get("weight_bytes", 0))


def _needs(
    facts: Mapping[str, Any], document: Deployment, machine: Machine, family: str, residency: Residency
) -> Needs:
    match family:
        case "llamacpp":
            return sizing_llamacpp.needs(facts, document, machine)
        case "vllm" | "sglang":
            return sizing_tensors.needs(facts, document, machine, family, residency)
        case _:
            raise Refusal("no_safe_estimate", f"the memory of {document.name} cannot be derived. State resources")


def _beside_resources(
    facts: Mapping[str, Any],
    document: Deployment,
    machine: Machine,
    family: str,
    ready: Allocation,
) -> Needs:
    """Context, slots and pools of a document that states its own sums."""
    if family == "custom":  # its program knows; nobody tells it a context, nor asks it for one
        held = ready.on(machine.domain)
        return Needs(
            request=held,
            startup=held,
            cache=None,
            context=0,
            reason=None,
            slots=ROUTER_BOUND,
            weights=weights_of(facts),
            declared_request=True,
            declared_startup=True,
        )
    if family == "llamacpp":
        return sizing_llamacpp.beside_resources(facts, document, machine, ready)
    return sizing_tensors.beside_resources(facts, document, machine, ready, family)


def _shown(facts: Mapping[str, Any], machine: Machine, weights: int, needs: Needs, family: str) -> dict[str, str]:
    beside = sizing_llamacpp.margin if family == "llamacpp" else sizing_tensors.margin
    architectures = facts.get("architectures") or ()
    shown = {
        "model_file": str(facts.get("model_file", "")),
        "architecture": str(facts.get("architecture") or next(iter(architectures), "")),
        "weight_bytes": str(weights),
        "margin_bytes": str(beside(machine, needs.weights)),
        "context_trained": str(longest_context.trained(facts, family) or "unknown"),
        **needs.notes,
    }
    for name in ("model_type", "quantization", *PARSERS):
        if facts.get(name):
            shown[name] = str(facts[name])
    # TensorFold is told no cache: what its cap leaves is its own to use.
    return shown if needs.cache is None or family == "tensorfold" else {**shown, "kv_cache_bytes": str(needs.cache)}
