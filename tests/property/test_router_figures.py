"""Each engine's own figures, in one shape; what nobody measured is absent."""

from __future__ import annotations

from typing import Any

import pytest

from capyctl.router.endpoints import Dialect
from capyctl.router.events import EventReader
from capyctl.router.figures import Clock, figures

CLOCK = Clock(sent_at=1.0, answered_at=1.5, first_output_at=2.0, last_output_at=4.0)
USAGE = {"completion_tokens": 11, "prompt_tokens_details": {"cached_tokens": 7}}


def said(engine: dict[str, Any], streamed: bool = True) -> dict[str, tuple[float, str]]:
    found = figures(engine, CLOCK, streamed=streamed)
    return {name: (figure["value"], figure["source"]) for name, figure in found.items()}


def test_vllm_counts_from_the_schedule_so_the_queue_comes_first() -> None:
    metrics = {"time_to_first_token_ms": 40, "queue_time_ms": 5, "mean_itl_ms": 8, "generation_time_ms": None}
    assert said({"usage": USAGE, "metrics": metrics}) == {
        "queue_ms": (5, "engine"),
        "prefill_ms": (40, "engine"),
        "ttft_ms": (45, "engine"),
        "decode_tokens_per_second": (125.0, "engine"),
        "cached_tokens": (7, "engine"),
    }


def test_llamacpp_gives_the_prompt_and_a_rate() -> None:
    assert said({"usage": USAGE, "timings": {"prompt_ms": 12.5, "predicted_per_second": 80.0}}) == {
        "prefill_ms": (12.5, "engine"),
        "decode_tokens_per_second": (80.0, "engine"),
        "cached_tokens": (7, "engine"),
        "ttft_ms": (1000.0, "router"),
    }


def test_tensorfold_speaks_in_seconds_and_zero_is_unknown() -> None:
    fold = {"time_to_first_token": 0.25, "prefill_seconds": 0.2, "tokens_per_second": 0.0}
    assert said({"usage": USAGE, "tensorfold": fold}) == {
        "ttft_ms": (250.0, "engine"),
        "prefill_ms": (200.0, "engine"),
        "cached_tokens": (7, "engine"),
        "decode_tokens_per_second": (5.0, "router"),
    }


@pytest.mark.parametrize("nothing", [{}, {"metrics": None, "timings": [], "tensorfold": 3}])
@pytest.mark.parametrize("value", [None, True, "5", float("nan"), float("inf"), -0.0])
def test_what_is_no_number_is_no_figure(nothing: dict[str, Any], value: Any) -> None:
    engine = {**nothing, "tensorfold": {"tokens_per_second": value}, "timings": {"predicted_per_second": value}}
    assert said({**engine, "usage": {"completion_tokens": 1}}) == {"ttft_ms": (1000.0, "router")}
    assert said(nothing, streamed=False) == {"total_ms": (500.0, "router")}


@pytest.mark.parametrize("name", ["usage", "timings", "metrics", "tensorfold"])
def test_a_stream_keeps_the_newest_of_the_engines_own_objects(name: str) -> None:
    reader = EventReader(Dialect.CHAT, "m")
    event = b'data: {"choices":[{"delta":{"novel":"x"}}],"%s":{"a":1}}\n\n' % name.encode()
    assert reader.feed(event) == event  # a delta that no list names passes
    assert reader.feed(event.replace(b":1}", b":2}")) == event.replace(b":1}", b":2}")
    assert reader.figures == {name: {"a": 2}}
