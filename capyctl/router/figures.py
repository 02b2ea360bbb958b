"""What one answer cost, from the engine's own figures and from the router's clock.

Each figure is `{"value": <number>, "source": "engine" | "router"}`. What nobody measured is absent,
never zero. Times are milliseconds, rates tokens per second. (Reference: api 2.11.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeGuard

import attrs


@attrs.define(kw_only=True)
class Clock:
    """Instants of one relayed answer, in seconds of a monotonic clock."""

    sent_at: float
    answered_at: float | None = None  # the head, or the whole of a collected answer
    first_output_at: float | None = None
    last_output_at: float | None = None


def figures(engine: Mapping[str, Any], clock: Clock, *, streamed: bool, decisions: bool = False) -> dict[str, Any]:
    """The figures of a finished answer. `engine`: its `usage`, `timings` and `metrics` objects, as far as sent."""
    usage, timings, metrics = (_object(engine, name) for name in ("usage", "timings", "metrics"))
    found: dict[str, Any] = {}

    def engine_says(name: str, value: Any) -> None:
        if _number(value):
            found[name] = {"value": value, "source": "engine"}

    queue_ms, prefill_ms = metrics.get("queue_time_ms"), metrics.get("time_to_first_token_ms")
    engine_says("queue_ms", queue_ms)
    engine_says("prefill_ms", prefill_ms if _number(prefill_ms) else timings.get("prompt_ms"))
    if _number(queue_ms) and _number(prefill_ms):
        engine_says("ttft_ms", queue_ms + prefill_ms)
    between_ms = metrics.get("mean_itl_ms")
    if _number(between_ms) and between_ms > 0:
        engine_says("decode_tokens_per_second", round(1000 / between_ms, 3))
    else:
        engine_says("decode_tokens_per_second", timings.get("predicted_per_second"))
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


def _object(container: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = container.get(name)
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
