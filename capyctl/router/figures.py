"""What one answer cost, from the engine's own figures and from the router's clock.

Each figure is `{"value": <number>, "source": "engine" | "router"}`. What nobody measured is absent,
never zero. Times are milliseconds, rates tokens per second. (Reference: api 2.11.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeGuard

import attrs


@attrs.define(kw_only=True)
class Clock:
    """Instants of one relayed answer, in seconds of a monotonic clock."""

    sent_at: float
    answered_at: float | None = None  # the head, or the whole of a collected answer
    first_output_at: float | None = None
    last_output_at: float | None = None


def figures(engine: Mapping[str, Any], clock: Clock, *, streamed: bool, decisions: bool = False) -> dict[str, Any]:
    """The figures of a finished answer.

    Args:
      engine: its `usage`, and its own object as far as it sent one (`OBJECTS`).
    """
    found: dict[str, Any] = {}

    def engine_says(name: str, value: Any) -> None:
        if _number(value):
            found.setdefault(name, {"value": value, "source": "engine"})

    usage = _object(engine, "usage")
    for member, read in _READERS.items():
        for name, value in read(_object(engine, member)).items():
            engine_says(name, value)
    engine_says("cached_tokens", _object(usage, "prompt_tokens_details").get("cached_tokens"))
    if decisions:
        engine_says("input_tokens", usage.get("input_tokens"))

    def router_says(name: str, value: float) -> None:
        found.setdefault(name, {"value": round(value, 3), "source": "router"})

    if streamed and clock.first_output_at is not None:
        router_says("ttft_ms", (clock.first_output_at - clock.sent_at) * 1000)
        spent = (clock.last_output_at or clock.first_output_at) - clock.first_output_at
        tokens = usage.get("completion_tokens")
        if _number(tokens) and tokens >= 2 and spent > 0:
            router_says("decode_tokens_per_second", (tokens - 1) / spent)
    if not streamed and clock.answered_at is not None:
        took_ms = (clock.answered_at - clock.sent_at) * 1000
        router_says("total_ms", took_ms)
        if decisions:
            router_says("engine_ms", took_ms)
    return found


def comment(found: Mapping[str, Any]) -> bytes:
    """The comment that precedes a stream's terminator."""
    return b": x-capyctl-metrics " + json.dumps(found).encode() + b"\n\n"


def _vllm(said: Mapping[str, Any]) -> dict[str, Any]:
    """Milliseconds; the first token is counted from the moment in which the request was scheduled."""
    queue, first, between = (said.get(name) for name in ("queue_time_ms", "time_to_first_token_ms", "mean_itl_ms"))
    return {
        "queue_ms": queue,
        "prefill_ms": first,
        "ttft_ms": queue + first if _number(queue) and _number(first) else None,
        "decode_tokens_per_second": round(1000 / between, 3) if _number(between) and between > 0 else None,
    }


def _llamacpp(said: Mapping[str, Any]) -> dict[str, Any]:
    """Milliseconds and a rate."""
    return {
        "prefill_ms": said.get("prompt_ms"),
        "decode_tokens_per_second": _known_rate(said.get("predicted_per_second")),
    }


def _tensorfold(said: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds and a rate; a rate of 0.0 is one that it does not know."""
    return {
        "ttft_ms": _milliseconds(said.get("time_to_first_token")),
        "prefill_ms": _milliseconds(said.get("prefill_seconds")),
        "decode_tokens_per_second": _known_rate(said.get("tokens_per_second")),
    }


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "metrics": _vllm,
    "timings": _llamacpp,
    "tensorfold": _tensorfold,
}
OBJECTS: Final = tuple(_READERS)
"""The members in which engines give figures of their own, beside `usage`."""


def _object(container: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = container.get(name)
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _milliseconds(seconds: Any) -> float | None:
    return round(seconds * 1000, 3) if _number(seconds) else None


def _known_rate(rate: Any) -> float | None:
    return rate if _number(rate) and rate > 0 else None
