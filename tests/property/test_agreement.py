"""Fields and arguments of vLLM and SGLang that contradict each other are refused when they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from sizing_values import args, deployment

from capyctl.engines.sglang import agreement as sglang
from capyctl.engines.vllm import agreement as vllm
from capyctl.errors import CapyError

DRAFT = {"model": {"path": "/srv/m", "draft": {"path": "/srv/d"}}}


def speculative(text: str) -> dict[str, Any]:
    return args("--speculative-config", text)


def refused(config: Mapping[str, Any], engine: str = "vllm", fixed: tuple[str, ...] = (), **fields: Any) -> str:
    document = deployment(dict(config), engine, **fields)
    with pytest.raises(CapyError) as caught:
        vllm.check(document, fixed) if engine == "vllm" else sglang.check(document)
    assert caught.value.code == "invalid_config"
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"vllm": {"max_num_batched_tokens": 16}}, "is 16, less than the 32 requests that run at once"),
        ({"vllm": {"max_num_batched_tokens": 16}, "max_concurrent_requests": 17}, "less than the 17 requests"),
        (
            {"vllm": {"max_num_batched_tokens": 2048}, "context_length": 4096} | args("--no-enable-chunked-prefill"),
            "is 2048, less than context_length 4096 beside --no-enable-chunked-prefill",
        ),
        ({"kv_cache_dtype": "q8_0"}, "vLLM has no q8_0; nearest is fp8"),
        ({"kv_cache_dtype": "bf16"}, "nearest is bfloat16"),
        (speculative('{"num_speculative_tokens":2}'), "names neither method nor model"),
        (speculative('{"method":"ngram","model":"/srv/d"}'), "method ngram drafts without a model; leave model out"),
        (speculative('{"method":"mtp","num_speculative_tokens":0}'), "expected a whole number from 1"),
        (speculative('{"method":"mtp","num_speculative_tokens":true}'), "expected a whole number from 1"),
        (speculative('{"method":"ngram","prompt_lookup_min":5,"prompt_lookup_max":2}'), "5 is above prompt_lookup_max"),
        (speculative('{"method":"mtp","draft_tensor_parallel_size":2}'), "vLLM takes 1 or topology.tensor_parallel, 1"),
        (
            args("--speculative-config", '{"method":"mtp"}', "--spec-tokens", "2"),
            "--spec-tokens stands beside --speculative-config",
        ),
    ],
)
def test_vllm_is_asked_for_nothing_that_contradicts_itself(config: dict[str, Any], says: str) -> None:
    assert says in refused(config)


def test_a_draft_model_that_vllm_would_not_use_is_refused() -> None:
    assert "leave model.draft out" in refused(speculative('{"method":"ngram"}'), **DRAFT)
    vllm.check(deployment(speculative('{"num_speculative_tokens":2}'), **DRAFT), ())


def test_a_profile_s_own_number_of_requests_counts() -> None:
    config = {"vllm": {"max_num_batched_tokens": 64}}
    assert "less than the 128 requests" in refused(config, fixed=("--max-num-seqs", "128"))
    vllm.check(deployment(config), ("--max-num-seqs", "64"))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"vllm": {"max_num_batched_tokens": 32}, "context_length": 4096},
        {"vllm": {"max_num_batched_tokens": 2048}, "context_length": 2048} | args("--no-enable-chunked-prefill"),
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "a_word_of_tomorrow"},
        speculative('{"method":"ngram","prompt_lookup_min":2,"prompt_lookup_max":2,"num_speculative_tokens":3}'),
        speculative('{"model":"/srv/d","num_speculative_tokens":3,"draft_tensor_parallel_size":1}'),
        speculative("no object"),
    ],
)
def test_what_vllm_takes_together_passes(config: dict[str, Any]) -> None:
    vllm.check(deployment(config), ())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"kv_cache_dtype": "fp8"}, "SGLang has no fp8; nearest is fp8_e4m3"),
        ({"sglang": {"chunked_prefill_size": 100}} | args("--page-size", "64"), "100 is no multiple of --page-size 64"),
        (args("--speculative-draft-model-path", "/srv/d"), "needs --speculative-algorithm"),
        (
            args("--speculative-algorithm", "ngram", "--speculative-draft-model-path", "/srv/d"),
            "--speculative-algorithm ngram drafts without a model; leave --speculative-draft-model-path out",
        ),
    ],
)
def test_sglang_is_asked_for_nothing_that_contradicts_itself(config: dict[str, Any], says: str) -> None:
    assert says in refused(config, "sglang")


def test_a_draft_model_that_sglang_would_not_use_is_refused() -> None:
    assert "model.draft needs --speculative-algorithm" in refused({}, "sglang", **DRAFT)
    assert "leave model.draft out" in refused(args("--speculative-algorithm", "NGRAM"), "sglang", **DRAFT)
    both = args("--speculative-algorithm", "EAGLE", "--speculative-draft-model", "/srv/d")
    assert "both name the draft model" in refused(both, "sglang", **DRAFT)


@pytest.mark.parametrize(
    "config",
    [
        {"kv_cache_dtype": "fp8_e4m3", "sglang": {"chunked_prefill_size": -1}} | args("--page-size", "64"),
        {"sglang": {"chunked_prefill_size": 128}} | args("--page-size", "64"),
        args("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "/srv/d"),
        args("--speculative-algorithm", "NGRAM"),
    ],
)
def test_what_sglang_takes_together_passes(config: dict[str, Any]) -> None:
    sglang.check(deployment(config, "sglang"))
