"""The tokens that vLLM's cache holds for a model whose layers keep either a cache or one state per request. Pure.

All layers share one pool of blocks: a block of an attention layer is as long as a state needs, and a group of layers
takes one block of the pool at a time. States take blocks as well, so they come out of the same budget.

Source: memory 6.
"""

from __future__ import annotations

import attrs

from capyctl.units import gib

KERNEL_TOKENS, LATENT_KERNEL_TOKENS = 16, 128
"""The smallest block that the attention kernels take: for most, and for latent attention beside states."""
UNUSED_BLOCKS = 2
"""The pool's null block, and the one that the start check leaves."""


@attrs.frozen(kw_only=True)
class Hybrid:
    """One rank's layers: those with a cache, bytes per token and layer, and those with a state, bytes per layer."""

    attention_layers: int
    token_bytes: int
    state_layers: int
    state_bytes: int
    latent: bool = False


@attrs.frozen(kw_only=True)
class Held:
    """Tokens of the longest request, whole blocks; or None, with the reason and the budget that would do."""

    tokens: int | None
    why: str | None = None
    needs_bytes: int = 0


@attrs.frozen(kw_only=True)
class _Pool:
    block_tokens: int
    block_bytes: int
    attention_groups: int
    state_groups: int


def held(shape: Hybrid, cache: int, *, sequences: int, block_size: int | None, draft_tokens: int) -> Held:
    """What `cache` bytes hold with `sequences` requests at once.

    Args:
      block_size: `--block-size`, when somebody states it; tokens.
      draft_tokens: those that speculation asks for at a time; 0 without it.
    """
    pool = _pool(shape, block_size)
    blocks = cache // pool.block_bytes
    least = sequences * pool.state_groups + UNUSED_BLOCKS
    if blocks < least:
        needed = least * pool.block_bytes
        return Held(
            tokens=None,
            why=f"{gib(cache)} of KV cache holds no state for each of {sequences} requests; {gib(needed)} would",
            needs_bytes=needed,
        )
    states = pool.state_groups * (2 + 2 * (draft_tokens + 1))
    left = max(0, blocks - UNUSED_BLOCKS - states) // pool.attention_groups
    if left < 1:
        needed = (UNUSED_BLOCKS + states + pool.attention_groups) * pool.block_bytes
        return Held(
            tokens=None,
            why=f"{gib(cache)} of KV cache holds no block beside the states; {gib(needed)} would",
            needs_bytes=needed,
        )
    return Held(tokens=left * pool.block_tokens)


def needed_bytes(shape: Hybrid, tokens: int, *, sequences: int, block_size: int | None, draft_tokens: int) -> int:
    """The smallest cache that `held` says so many tokens of."""
    pool = _pool(shape, block_size)
    blocks = UNUSED_BLOCKS + pool.state_groups * (2 + 2 * (draft_tokens + 1))
    blocks += pool.attention_groups * _ceil(tokens, pool.block_tokens)
    return max(blocks, sequences * pool.state_groups + UNUSED_BLOCKS) * pool.block_bytes


def least_bytes(shape: Hybrid, tokens: int, *, block_size: int | None, draft_tokens: int) -> int:
    """What the engine's start check asks for at least: one request, without prefix caching, and the null block."""
    pool = _pool(shape, block_size)
    blocks = 1 + pool.state_groups * (1 + draft_tokens) + pool.attention_groups * _ceil(tokens, pool.block_tokens)
    return blocks * pool.block_bytes


def _pool(shape: Hybrid, block_size: int | None) -> _Pool:
    step = max(block_size or KERNEL_TOKENS, LATENT_KERNEL_TOKENS if shape.latent else KERNEL_TOKENS)
    block_tokens = max(1, _ceil(shape.state_bytes, step * shape.token_bytes)) * step
    fewest, most = sorted((shape.attention_layers, shape.state_layers))
    group = most if 2 * most < 3 * fewest else fewest
    return _Pool(
        block_tokens=block_tokens,
        block_bytes=group * block_tokens * shape.token_bytes,
        attention_groups=_ceil(shape.attention_layers, group),
        state_groups=_ceil(shape.state_layers, group),
    )


def _ceil(amount: int, parts: int) -> int:
    return -(-amount // parts)
