"""Machines of every kind, by their policy, and checkpoints as their headers describe them."""

from __future__ import annotations

from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from capyctl.checkpoints.cache_shape import Attention, CacheLayers, recorded
from capyctl.checkpoints.sizing import derive_plan
from capyctl.documents.deployment import Deployment, parse_deployment
from capyctl.errors import CapyError
from capyctl.fsm.types import Bytes, Device, Domain, HostId, Residency
from capyctl.ledger.types import DomainKind, DomainPolicy, HostPolicy, Plan

GIB, MIB = 1 << 30, 1 << 20
CONTEXT = 5 * GIB // 4  # X of a GPU


def domain(
    kind: DomainKind, total: int, managed: int, reserve: int = 0, device: str | None = None, parked: int = 0
) -> DomainPolicy:
    return DomainPolicy(
        kind=kind,
        capacity_bytes=Bytes(total),
        managed_bytes=Bytes(managed),
        reserve_bytes=Bytes(reserve),
        parked_bytes=Bytes(parked),
        device=Device(device) if device else None,
    )


def host(**domains: DomainPolicy) -> HostPolicy:
    return HostPolicy(host=HostId("H"), name="box", domains={Domain(name): limits for name, limits in domains.items()})


def plain(managed: int = 64 * GIB) -> HostPolicy:
    """A machine without a GPU."""
    return host(unified=domain(DomainKind.UNIFIED, 2 * managed, managed))


def spark(managed: int = 97 * GIB) -> HostPolicy:
    """One pool with a GPU on it."""
    return host(unified=domain(DomainKind.UNIFIED, 122 * GIB, managed, device="gpu0"))


def cards() -> HostPolicy:
    return host(
        system=domain(DomainKind.DISTINCT, 64 * GIB, 32 * GIB),
        gpu0=domain(DomainKind.DEVICE, 24 * GIB, 22 * GIB, device="gpu0"),
        gpu1=domain(DomainKind.DEVICE, 48 * GIB, 44 * GIB, device="gpu1"),
    )


def alike(count: int, total: int = 80 * GIB, ram: int = 512 * GIB) -> HostPolicy:
    """A machine with cards of one size, with the limits that such a machine has by itself."""
    reserve = max(GIB, total * 8 // 100)
    each = {
        f"gpu{index}": domain(DomainKind.DEVICE, total, total - reserve, reserve, f"gpu{index}", total // 4)
        for index in range(count)
    }
    return host(system=domain(DomainKind.DISTINCT, ram, ram // 2, ram // 5, parked=ram // 4), **each)


# --- checkpoints -----------------------------------------------------------------------------------


def tensors(weights: int, groups: tuple[CacheLayers, ...] = (), **more: Any) -> dict[str, Any]:
    """Facts of safetensors files whose layers cache as `groups` say."""
    return {
        "weight_bytes": weights,
        "cache": recorded(groups),
        "cache_values": sum(group.values for group in groups),
        "layers": sum(group.layers for group in groups),
        "kv_heads": groups[0].heads if groups else None,
        "attention": "full",
        "state_slot_values": None,
        "states": None,
        "context_trained": 1 << 17,
        "dtype": "bfloat16",
        "not_derivable": None,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        **more,
    }


def layers_of(
    layers: int, heads: int = 8, key: int = 128, attention: Attention = Attention.FULL, **more: Any
) -> CacheLayers:
    return CacheLayers(attention=attention, layers=layers, heads=heads, key=key, value=more.pop("value", key), **more)


def delta_net(full: int = 12, linear: int = 36, **more: Any) -> dict[str, Any]:
    """A hybrid of attention and gated delta nets, facts beside `weight_bytes`."""
    convolution, temporal = 30_720, 786_432
    states = {"recurrence": "gated delta net", "layers": linear, "convolution": convolution, "temporal": temporal}
    group = layers_of(full, heads=2, key=256)
    return {
        "attention": "hybrid",
        "cache": recorded([group]),
        "cache_values": group.values,
        "layers": full + linear,
        "kv_heads": 2,
        "states": states,
        "state_slot_values": [linear * convolution, linear * temporal],
        **more,
    }


def deployment(engine_config: dict[str, Any] | None = None, engine: str = "vllm", **fields: Any) -> Deployment:
    block = {"name": "m", "engine": engine, "model": "m", "engine_config": engine_config or {}, **fields}
    return parse_deployment(block, "test")


def args(*words: str) -> dict[str, Any]:
    return {"accept_extra_args": True, "extra_args": list(words)}


ORDINARY = frozenset({
    "checkpoint_unusable", "insufficient_resources", "insufficient_device_memory", "invalid_config", "host_ineligible",
})  # fmt: skip
"""Refusals that any document may meet; another one of a model that can be sized is a fault."""


def planned(
    facts: dict[str, Any], document: Deployment, policy: HostPolicy, residency: Residency = Residency.RESTART_ONLY
) -> Plan | None:
    """The plan, or None where it is refused for a reason that a document may meet."""
    try:
        return derive_plan(facts, document, policy, family=document.family, residency=residency)
    except CapyError as error:
        if error.code in ORDINARY and "\n" not in error.message:
            return None
        raise


def plan_of(
    facts: dict[str, Any], document: Deployment, policy: HostPolicy, residency: Residency = Residency.RESTART_ONLY
) -> Plan:
    """The plan, of a case that is not refused: others are no example."""
    made = planned(facts, document, policy, residency)
    assume(made is not None)
    assert made is not None  # for the type checker
    return made


# --- any of them -----------------------------------------------------------------------------------


@st.composite
def checkpoints(draw: st.DrawFn, most: int = 200 * GIB) -> dict[str, Any]:
    """Facts of any model in safetensors: any shape, headers read or not, a drafter or none."""
    weights = draw(st.integers(1 * MIB, most))
    kind = draw(st.sampled_from(("full", "sliding", "latent", "hybrid", "unknown")))
    count, heads = draw(st.integers(1, 96)), draw(st.sampled_from((1, 2, 4, 8, 16, 32)))
    group = layers_of(count, heads, draw(st.sampled_from((64, 128, 256))))
    made = tensors(weights, (group,))
    if kind == "sliding":
        made |= tensors(weights, (layers_of(count, heads, attention=Attention.SLIDING, window=4096), group))
        made["attention"] = "sliding"
    if kind == "latent":
        made |= tensors(weights, (layers_of(count, 1, 512, Attention.LATENT, value=64),), attention="latent")
    if kind == "hybrid":
        made |= delta_net(count, draw(st.integers(1, 96)))
    if kind == "unknown":
        made |= {"not_derivable": "the model has recurrent layers", "cache": [], "cache_values": 0, "attention": None}
    if draw(st.booleans()):
        largest = draw(st.integers(0, weights))
        parts = draw(st.integers(1, 96))
        made |= {
            "sharded_bytes": draw(st.integers(0, min(weights, largest * parts))),
            "layer_count": parts,
            "largest_layer_bytes": largest,
        }
    if draw(st.integers(0, 4)) == 0:
        made["draft"] = {
            "weight_bytes": draw(st.integers(1 * MIB, max(1 * MIB, weights // 4))),
            "cache_values": draw(st.sampled_from((0, 2048, 65_536))),
            "layers": 1,
            "not_derivable": None,
        }
    made["context_trained"] = draw(st.none() | st.integers(1, 1 << 20))
    return made


@st.composite
def machines(draw: st.DrawFn) -> HostPolicy:
    """Any machine that a role may run on, with limits that fit it."""
    total = draw(st.integers(4, 512)) * GIB + draw(st.integers(0, GIB - 1))
    if draw(st.booleans()):
        return alike(draw(st.integers(1, 4)), total=min(total, 192 * GIB), ram=total)
    reserve = total * draw(st.integers(0, 40)) // 100
    managed = max(1, (total - reserve) * draw(st.integers(1, 100)) // 100)
    pool = domain(
        DomainKind.UNIFIED, total, managed, reserve, draw(st.sampled_from((None, "gpu0"))), parked=managed // 2
    )
    return host(unified=pool)


def _sizes(low: int, high: int) -> st.SearchStrategy[str]:
    return st.integers(low, high).map(lambda number: f"{number}MiB")


@st.composite
def documents(draw: st.DrawFn, policy: HostPolicy, engine: str) -> Deployment:
    """Any way of stating memory on that machine."""
    memory = draw(
        st.fixed_dictionaries({}, optional={"kv_cache": _sizes(1, 8 << 10), "request": _sizes(9 << 10, 160 << 10)})
    )
    config: dict[str, Any] = {"memory": memory}
    if draw(st.booleans()):
        config["max_concurrent_requests"] = draw(st.integers(1, 64))
    if draw(st.booleans()):
        config["context_length"] = draw(st.integers(1, 1 << 17))
    if engine == "sglang" and draw(st.booleans()):
        config["sglang"] = {"max_total_tokens": draw(st.integers(1, 1 << 22))}
    fields: dict[str, Any] = {}
    stated = draw(st.sampled_from(("", "", "short", "phases")))
    on_cards = sorted(name for name in policy.domains if name.startswith("gpu"))
    ranks = draw(st.integers(1, len(on_cards))) if on_cards and engine in ("vllm", "sglang") else 1
    if ranks > 1:
        fields["topology"] = {"tensor_parallel": ranks}
    if stated:
        memory.pop("request", None)
    if stated == "short" and ranks == 1:
        fields["resources"] = {"gpu": draw(_sizes(1, 160 << 10)), "ram": draw(_sizes(64, 8 << 10))}
    if stated == "phases":
        ready = draw(st.integers(64, 160 << 10))
        names = on_cards[:ranks] or ["unified"]
        held = [{"domain": name, "bytes": f"{ready}MiB"} for name in names]
        if on_cards:
            held.append({"domain": "system", "bytes": "4GiB"})
        block = {"allocations": held, "devices": [{}] * ranks if on_cards else []}
        left = {"allocations": [{**one, "bytes": "1MiB" if one["domain"] in on_cards else "64MiB"} for one in held]}
        fields["resources"] = {"cold": block, "ready": block, "parking": block, "parked": left, "wake": block}
    try:
        return deployment(config, engine, **fields)
    except CapyError as refused:
        if "which leaves no room for weights" not in refused.message:
            raise
        memory.pop("kv_cache")  # as large as the whole: the one pair that contradicts itself here
        return deployment(config, engine, **fields)
