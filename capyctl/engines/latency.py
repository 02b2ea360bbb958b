"""How long an engine's requests took, by its own histograms: read from `/metrics`, never averaged by us.

Source: engines 6.5, 8, 14.6 (llama.cpp exports none); api 5.9.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

import attrs

BUCKETS_MAX: Final = 64
"""More upper bounds in one histogram are no latency series of an engine that CapyCTL knows."""

SERIES: Final[Mapping[str, Mapping[str, str]]] = {
    "vllm": {
        "ttft": "vllm:time_to_first_token_seconds",
        "e2e": "vllm:e2e_request_latency_seconds",
        "queue": "vllm:request_queue_time_seconds",
    },
    "sglang": {
        "ttft": "sglang:time_to_first_token_seconds",
        "e2e": "sglang:e2e_request_latency_seconds",
        "queue": "sglang:queue_time_seconds",
    },
    "tensorfold": {
        "ttft": "tensorfold:time_to_first_token_seconds",
        "e2e": "tensorfold:request_latency_seconds",
    },
}
"""Family -> figure -> the engine's series. ttft: to the first token, e2e: the whole request, queue: until it ran."""


_LINE: Final = re.compile(
    r"(?P<series>[a-zA-Z0-9:_]+)_(?P<part>bucket|count|sum)(?:\{(?P<labels>.*)\})?[ \t]+(?P<value>\S+)(?:[ \t].*)?"
)
_BOUND: Final = re.compile(r'(?:^|,)[ \t]*le="([^"]*)"')


@attrs.frozen(kw_only=True)
class Histogram:
    """Requests since the engine began. `buckets`: (upper bound in microseconds, None for any; how many up to it)."""

    count: int
    sum_us: int
    buckets: tuple[tuple[int | None, int], ...]


def histograms(text: str, family: str) -> dict[str, Histogram]:
    """Each figure that a metrics page states for the family, its labels summed (ranks, models).

    A series that is incomplete, or holds something that is no count, is left out: half of it would be a lie.
    """
    wanted = {series: figure for figure, series in SERIES.get(family, {}).items()}
    counts: dict[str, float] = {}
    sums: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    spoilt: set[str] = set()
    for series, part, bound, value in _samples(text):
        figure = wanted.get(series)
        if figure is None:
            continue
        if value is None or (part == "bucket" and bound is None):
            spoilt.add(figure)
        elif part == "count":
            counts[figure] = counts.get(figure, 0.0) + value
        elif part == "sum":
            sums[figure] = sums.get(figure, 0.0) + value
        elif bound is not None:
            of = buckets.setdefault(figure, {})
            of[bound] = of.get(bound, 0.0) + value
    found = {}
    for figure in counts.keys() & sums.keys() & buckets.keys() - spoilt:
        rows = sorted(buckets[figure].items())
        rising = all(one[1] <= other[1] for one, other in itertools.pairwise(rows))
        if len(rows) <= BUCKETS_MAX and rows[-1] == (math.inf, counts[figure]) and rising:
            found[figure] = Histogram(
                count=int(counts[figure]),
                sum_us=round(sums[figure] * 1e6),
                buckets=tuple((None if bound == math.inf else round(bound * 1e6), int(upto)) for bound, upto in rows),
            )
    return found


def _samples(text: str) -> Iterator[tuple[str, str, float | None, float | None]]:
    """(series, bucket | count | sum, upper bound in seconds, value) of each line of a histogram; None: no number."""
    for line in text.splitlines():
        found = _LINE.fullmatch(line)
        if found is not None:
            bound = _BOUND.search(found["labels"] or "")
            value = _number(found["value"])
            yield (
                found["series"],
                found["part"],
                _number(bound[1]) if bound else None,
                None if value == math.inf else value,
            )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value >= 0 and (value < 1 << 53 or value == math.inf) else None
