"""Gauges of a Prometheus text page, as far as load reports need them. Pure.

Source: engines 6.5, 7.5, 14.6.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from capyctl.errors import Failure

_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)(?:\{[^\n]*\})?[ \t]+(?P<value>\S+)(?:[ \t]+-?\d+)?")
_COUNT_MAX = 1 << 31


def samples(text: str, names: Iterable[str]) -> Mapping[str, tuple[float, ...]]:
    """Every sample of these series, one per label set; a series that is not on the page has none.

    A value that is no number is read as NaN.
    """
    found: dict[str, list[float]] = {name: [] for name in names}
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line.strip())
        if match is not None and match["name"] in found:
            try:
                found[match["name"]].append(float(match["value"]))
            except ValueError:
                found[match["name"]].append(math.nan)
    return {name: tuple(values) for name, values in found.items()}


def total(found: Mapping[str, tuple[float, ...]], name: str) -> int:
    """A count, summed over its label sets.

    Raises: Failure `engine_error` when it is missing or no count.
    """
    values = found.get(name, ())
    if not values or not all(0 <= value < _COUNT_MAX for value in values):
        raise Failure("engine_error", f"/metrics does not state {name}")
    return int(sum(values))


def share_ppm(found: Mapping[str, tuple[float, ...]], name: str) -> int | None:
    """A share from 0 to 1, the largest over its label sets, in millionths; None when the page does not say."""
    values = [value for value in found.get(name, ()) if 0 <= value <= 1.000001]
    return min(1_000_000, round(max(values) * 1_000_000)) if values else None
