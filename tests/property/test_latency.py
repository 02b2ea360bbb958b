"""Histograms of engines' metrics pages: what is read of them, and that half of one is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capyctl.engines.latency import SERIES, Histogram, histograms
from tests.engines.simulated.scheduler import Histogram as Kept

TTFT = "vllm:time_to_first_token_seconds"
PAGE = f"""# HELP {TTFT} Histogram of time to first token in seconds.
# TYPE {TTFT} histogram
{TTFT}_bucket{{engine="0",le="0.5",model_name="a {{b}} le=\\"9\\""}} 2.0
{TTFT}_bucket{{engine="0",le="+Inf",model_name="a"}} 3.0
{TTFT}_count{{engine="0",model_name="a"}} 3.0
{TTFT}_sum{{engine="0",model_name="a"}} 1.25
{TTFT}_created{{engine="0",model_name="a"}} 1.7e9
vllm:num_requests_running{{engine="0",model_name="a"}} 1.0
"""
READ = Histogram(count=3, sum_us=1_250_000, buckets=((500_000, 2), (None, 3)))


def test_a_series_is_read_with_its_bounds_in_microseconds() -> None:
    assert histograms(PAGE, "vllm") == {"ttft": READ}


def test_what_several_ranks_count_is_summed() -> None:
    other = PAGE.replace('engine="0"', 'engine="1"')
    (found,) = histograms(PAGE + other, "vllm").values()
    assert (found.count, found.sum_us, found.buckets) == (6, 2_500_000, ((500_000, 4), (None, 6)))


def test_families_without_series_have_none() -> None:
    assert histograms(PAGE, "llama.cpp") == histograms(PAGE, "custom") == {}


@pytest.mark.parametrize(
    "spoilt",
    [
        PAGE.replace("_count{", "_counts{"),
        PAGE.replace("_sum{", "_sums{"),
        PAGE.replace('le="+Inf"', 'le="9"'),
        PAGE.replace('le="0.5",', ""),
        PAGE.replace(" 2.0\n", " 5.0\n"),
        PAGE.replace(" 2.0\n", " nan\n"),
        PAGE.replace(" 1.25\n", " -1\n"),
        PAGE.replace(" 1.25\n", " +Inf\n"),
        PAGE.replace(" 1.25\n", " 9e15\n"),
        PAGE.replace('le="0.5"', 'le="9e15"'),
        PAGE.replace(" 3.0\n", " inf\n"),
        PAGE.replace(" 3.0\n", " many\n"),
        "",
        TTFT + "_count",
    ],
)
def test_half_a_series_is_none(spoilt: str) -> None:
    assert histograms(spoilt, "vllm") == {}


@given(st.text(alphabet=st.sampled_from(f'{TTFT}_bucketsumcount{{}}le="+Inf",0.19e \n'), max_size=200))
def test_any_page_is_read_or_passed_over(text: str) -> None:
    for found in histograms(PAGE + text, "vllm").values():
        counts = [count for _, count in found.buckets]
        assert counts == sorted(counts)
        assert found.buckets[-1] == (None, found.count)


@pytest.mark.parametrize(
    ("family", "series"), [(family, name) for family in SERIES for name in SERIES[family].values()]
)
def test_each_series_of_each_family_is_found(family: str, series: str) -> None:
    kept = Kept()
    for seconds in (0.003, 0.4, 700.0):
        kept.observe(seconds)
    (found,) = histograms("\n".join(kept.lines(series, 'model_name="m"')), family).values()
    assert (found.count, found.buckets[-1], found.sum_us) == (3, (None, 3), 700_403_000)
