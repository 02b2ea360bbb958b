"""How long an engine's requests took, by its own histograms: read from `/metrics`, never averaged by us.

Source: engines 6.5, 8, 14.6 (llama.cpp exports none); api 5.9.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Final

import attrs

from capyctl.engines.metrics import count, samples, sums

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

_BOUND: Final = re.compile(r'(?:^|,)[ \t]*le="([^"]*)"')
_LARGEST_S: Final = 1 << 43  # of which a session can still carry the microseconds


@attrs.frozen(kw_only=True)
class Histogram:
    """Requests since the engine began. `buckets`: (upper bound in microseconds, None for any; how many up to it)."""

    count: int
    sum_us: int
    buckets: tuple[tuple[int | None, int], ...]


def histograms(page: str, family: str) -> dict[str, Histogram]:
    """Each figure that a metrics page states for the family, its labels summed (ranks, models).

    A series that is incomplete, or holds something that is no count, is left out: half of it would be a lie.
    Raises: Failure as `samples`.
    """
    read = {figure: _histogram(page, series) for figure, series in SERIES.get(family, {}).items()}
    return {figure: one for figure, one in read.items() if one is not None}


def _histogram(page: str, series: str) -> Histogram | None:
    named_count, named_sum = f"{series}_count", f"{series}_sum"
    totals = sums(page, (named_count, named_sum))
    upto: dict[float, float] = {}
    for _, labels, value in samples(page, (f"{series}_bucket",)):
        bound = _upper_bound(labels)
        if value is None or bound is None:
            return None
        upto[bound] = upto.get(bound, 0.0) + value
    rows = sorted(upto.items())
    rising = all(one[1] <= other[1] for one, other in itertools.pairwise(rows))
    whole = rows and rows[-1] == (math.inf, totals.get(named_count)) and totals.get(named_sum, math.inf) < _LARGEST_S
    if not whole or not rising or len(rows) > BUCKETS_MAX:
        return None
    return Histogram(
        count=int(totals[named_count]),
        sum_us=round(totals[named_sum] * 1e6),
        buckets=tuple((None if bound == math.inf else round(bound * 1e6), int(count)) for bound, count in rows),
    )


def _upper_bound(labels: str) -> float | None:
    """In seconds; None of a bucket that does not state it."""
    found = _BOUND.search(labels)
    if found is None:
        return None
    bound = math.inf if found[1] == "+Inf" else count(found[1])
    return None if bound is None or _LARGEST_S < bound < math.inf else bound
