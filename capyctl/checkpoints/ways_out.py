"""What would make a document fit that never fits a host: words for its refusal. Pure.

Nothing is promised that was not tried: a smaller KV cache is named with a figure with which the same sums come out
below the host's limits, and not at all where the rest alone exceeds them. What lowers the cache is a matter of the
family: llama.cpp allocates what the context needs, the others get a cache of a size that no context changes.

Source: memory 4.2, 5.5, 5.7, 5.12.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from capyctl.documents.deployment import Deployment
from capyctl.ledger.types import DomainKind, DomainPolicy, HostPolicy
from capyctl.units import Size

STEPS_BYTES = (1 << 30, 1 << 26, 1 << 20)
"""A figure is a multiple of the first of these that it reaches."""
SPLIT = ("vllm", "sglang")
"""Families whose engines spread one model over several cards of a machine."""
OF_RESOURCES = "Lower what the document states in resources, or choose a smaller model"
"""For a document that says itself what it takes."""


def of_derived(
    document: Deployment,
    policy: HostPolicy,
    limits: DomainPolicy,
    *,
    family: str,
    cache: int | None,
    excess: int,
    over: int,
    fits: Callable[[Deployment], bool],
) -> str:
    """For a document whose memory is derived.

    Args:
      limits: those of the domain that is too small.
      cache: KV cache of one rank in the derived sums, bytes; None where it is not told apart.
      excess: bytes of the refused phase that its domain has not.
      over: bytes by which an engine that serves exceeds its domain; 0 or less when only its start, or RAM, does.
      fits: whether a changed document would be refused no more.
    """
    smaller = _smaller(document, family, limits, policy)
    engine, memory = document.engine_config, document.engine_config.memory
    # A stated request holds the cache: lowering what is inside it frees nothing.
    if memory.request is not None or (memory.startup is not None and over <= 0):
        lower = " and ".join(f"memory.{name}" for name in ("request", "startup") if getattr(memory, name) is not None)
        return f"Lower {lower}, or {smaller}" if _less_fits(document, excess, fits) else _sentence(smaller)
    found = _cache_that_fits(document, cache, over, fits)
    if found is None:
        return _sentence(smaller)
    less, short = found
    if memory.kv_cache is not None:
        what = f"Lower memory.kv_cache to {less}"
    elif family == "llamacpp":
        slots = " or max_concurrent_requests" if engine.max_concurrent_requests is not None else ""
        wide = engine.context_length is not None  # without one, fewer requests only get longer contexts
        what = f"Lower context_length{slots}" if wide else f"State a lower context_length, or memory.kv_cache: {less}"
        short = False
    else:
        what = f"State engine_config.memory.kv_cache: {less}"
    if memory.startup is not None:
        what = f"Leave memory.startup out and {what[0].lower()}{what[1:]}"
    return f"{what}{' with a lower context_length' if short else ''}, or {smaller}"


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}"


def _smaller(document: Deployment, family: str, limits: DomainPolicy, policy: HostPolicy) -> str:
    """`choose a smaller model`, and more cards where the engine can use them and the host has them."""
    cards = sum(
        other.kind is DomainKind.DEVICE and (other.model, other.capacity_bytes) == (limits.model, limits.capacity_bytes)
        for other in policy.domains.values()
    )
    if family in SPLIT and limits.kind is DomainKind.DEVICE and cards > document.topology.ranks:
        return "choose a smaller model, or more cards in topology"
    return "choose a smaller model"


def _less_fits(document: Deployment, excess: int, fits: Callable[[Deployment], bool]) -> bool:
    """Whether it fits once what it states for everything is less by `excess` bytes."""
    engine, memory = document.engine_config, document.engine_config.memory
    request = None if memory.request is None else Size(memory.request.bytes - excess)
    startup = None if memory.startup is None else Size(memory.startup.bytes - excess)
    least = min(size.bytes for size in (request, startup) if size is not None)
    if least <= (memory.kv_cache.bytes if memory.kv_cache is not None else 0):
        return False
    if request is not None and startup is not None:
        startup = max(request, startup)
    less = attrs.evolve(memory, request=request, startup=startup)
    return fits(attrs.evolve(document, engine_config=attrs.evolve(engine, memory=less)))


def _cache_that_fits(
    document: Deployment, cache: int | None, over: int, fits: Callable[[Deployment], bool]
) -> tuple[Size, bool] | None:
    """(the largest round cache with which it fits, whether the stated context does not fit into that) or None."""
    left = (cache or 0) - over
    if cache is None or over <= 0 or left < STEPS_BYTES[-1]:
        return None
    step = next(step for step in STEPS_BYTES if left >= step)
    size, engine = Size(left // step * step), document.engine_config
    less = attrs.evolve(engine, memory=attrs.evolve(engine.memory, kv_cache=size, startup=None))
    if fits(attrs.evolve(document, engine_config=less)):
        return size, False
    if engine.context_length is None:
        return None
    return (size, True) if fits(attrs.evolve(document, engine_config=attrs.evolve(less, context_length=None))) else None
