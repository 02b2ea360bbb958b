"""Gauges of a Prometheus page, as every family's are read."""

from __future__ import annotations

import pytest

from capyctl.engines.metrics import SAMPLES_MAX, sums
from capyctl.errors import Failure


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a 3\nb 0.5\n", {"a": 3.0, "b": 0.5}),
        ('a{engine="0",m="x y"} 1\na{engine="1"} 2\n', {"a": 3.0}),
        ('a{m="} 9"} 1 1712000000000\n', {"a": 1.0}),
        ("# HELP a how many\n# TYPE a gauge\na 2\naa 7\na_total 9\n", {"a": 2.0}),
        ("a NaN\nb 1\n", {"b": 1.0}),
        ("a +Inf\n", {}),
        ("a -1\n", {}),
        ("a 1\na x\n", {}),
        ("a\n", {}),
        ("a 1\na{x 2\n", {}),
        ("a 1\n{\n}\n a 2\n\x00\nb.c 7\n", {"a": 1.0}),
        ("", {}),
    ],
)
def test_a_gauge_is_the_sum_of_its_samples_or_nothing(text: str, found: dict[str, float]) -> None:
    assert sums(text, ("a", "b")) == found


def test_a_page_that_states_a_gauge_without_end_is_refused() -> None:
    with pytest.raises(Failure, match="more than 65536 times"):
        sums("a 1\n" * (SAMPLES_MAX + 1), ("a", "b"))
