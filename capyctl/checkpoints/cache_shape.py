"""What one token costs in the cache of each layer: groups of layers with one kind of attention, and their sums. Pure.

A group is a fact of the checkpoint; its bytes depend on the type of the cached values and on the number of ranks.
Grouped heads are shared out among ranks, one per rank at least. A latent cache is the same on every rank, and it is
one vector for keys and values together. A sparse latent cache has a key of its indexer beside it, one byte per value
with a scale of four bytes per 128 of them, whatever the type of the rest; when the rest has one byte per value, it
is stored with such scales too, and its rotated part in two bytes each.

Source: memory 6, 6.1.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

SCALE_BYTES, SCALED_VALUES = 4, 128


class Attention(enum.Enum):
    FULL = "full"  # every token of the context
    SLIDING = "sliding"  # the last `window` tokens
    CHUNKED = "chunked"  # the tokens of one piece of `window` tokens
    LATENT = "latent"  # every token, compressed; `key` is the rank, `value` the rotated part


@attrs.frozen(kw_only=True)
class CacheLayers:
    """Layers whose caches are alike. `key`, `value` and `index` are values per head and token."""

    attention: Attention
    layers: int
    heads: int
    key: int
    value: int
    window: int | None = None
    index: int = 0

    @property
    def values(self) -> int:
        """Cached values per token over all of these layers, an indexer's left out."""
        return self.layers * self.heads * (self.key + self.value)

    def token_bytes(self, value_bytes: int, ranks: int = 1) -> int:
        """Bytes of one token over all of these layers, on one of `ranks` ranks."""
        if self.attention is not Attention.LATENT:
            return self.layers * -(-self.heads // ranks) * (self.key + self.value) * value_bytes
        held = (self.key + self.value) * value_bytes
        if self.index and value_bytes == 1:
            held = self.key + _scales(self.key) + 2 * self.value
        return self.layers * (held + (self.index + _scales(self.index) if self.index else 0))


def _scales(values: int) -> int:
    return -(-values // SCALED_VALUES) * SCALE_BYTES


def cache_of(facts: Mapping[str, Any]) -> tuple[CacheLayers, ...] | None:
    """The groups that `tensor_facts` recorded; None for facts without them, which an older release measured."""
    rows = facts.get("cache")
    if rows is None:
        return None
    return tuple(CacheLayers(**{**row, "attention": Attention(row["attention"])}) for row in rows)


def recorded(groups: Iterable[CacheLayers]) -> list[dict[str, Any]]:
    """The groups as facts, JSON-able."""
    return [attrs.asdict(group) | {"attention": group.attention.value} for group in groups]


def token_bytes(groups: Iterable[CacheLayers], value_bytes: int, ranks: int = 1) -> int:
    """Bytes that one more token takes while every window still has room for it."""
    return sum(group.token_bytes(value_bytes, ranks) for group in groups)


def bounded_token_bytes(groups: Iterable[CacheLayers], value_bytes: int, ranks: int = 1) -> int:
    """The part of `token_bytes` that a request stops growing by once it is longer than the window."""
    return token_bytes((group for group in groups if group.window is not None), value_bytes, ranks)
