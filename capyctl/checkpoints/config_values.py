"""Numbers and words of a model's `config.json`, taken only when they can be what they are taken for.

The file is untrusted: a dimension that is a text, a fraction, negative or larger than any model's is as good as
absent, so nothing that is computed from it can overflow.

Source: memory 5.1, 5.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Block = Mapping[str, Any]

LAYERS_MAX = 4096
DIMENSION_MAX = 1 << 20
"""Heads, head lengths, ranks, windows of a kernel: several times the largest that exist."""
TOKENS_MAX = 1 << 31


def dimension(block: Block, *names: str) -> int | None:
    """The first of these names that states a whole number from 1 to `DIMENSION_MAX`."""
    return _whole(block, names, DIMENSION_MAX)


def tokens(block: Block, *names: str) -> int | None:
    """The first of these names that states a length of text: a context, a window."""
    return _whole(block, names, TOKENS_MAX)


def _whole(block: Block, names: tuple[str, ...], most: int) -> int | None:
    for name in names:
        number = block.get(name)
        if type(number) is int and 0 < number <= most:
            return number
    return None


def count(block: Block, *names: str) -> int:
    """As `dimension`, 0 where nothing is stated."""
    return dimension(block, *names) or 0


def word(block: Block, *names: str) -> str | None:
    """The first of these names that states a short printable word."""
    for name in names:
        said = block.get(name)
        if isinstance(said, str) and said and len(said) <= 128 and said.isprintable():
            return said
    return None


def block_of(block: Block, name: str) -> Block:
    """The object under that name, empty when there is none."""
    found = block.get(name)
    return found if isinstance(found, Mapping) else {}


def numbers(block: Block, name: str, layers: int) -> list[int] | None:
    """One whole number per layer, 0 allowed, or None when the name states anything else."""
    found = block.get(name)
    if not isinstance(found, list) or len(found) != layers:
        return None
    good = all(type(number) is int and 0 <= number <= DIMENSION_MAX for number in found)
    return list(found) if good else None


def words(block: Block, name: str, layers: int) -> list[str] | None:
    """One word per layer (more are cut off: heads for speculation follow), or None."""
    found = block.get(name)
    if not isinstance(found, list) or len(found) < layers:
        return None
    kept = found[:layers]
    return kept if all(isinstance(one, str) and len(one) <= 64 for one in kept) else None
