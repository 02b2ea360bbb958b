"""What of a deployment contradicts itself on vLLM: fields and arguments that its start checks would not take together,
or of which it would ignore one. Pure.

Source: engines 6.1, 6.2; the engine's own start checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from capyctl.documents.deployment import Deployment
from capyctl.documents.engine_config import Vllm
from capyctl.engines.options import flat_object, mentions, normal, value_of
from capyctl.engines.vllm.options import POLICY
from capyctl.errors import Refusal

DEFAULT_SEQUENCES = 32
"""Requests at once, unless somebody says."""
CACHE_WORDS: Mapping[str, str] = {
    "bf16": "bfloat16", "f16": "float16", "fp16": "float16", "half": "float16", "f32": "auto", "float32": "auto",
    "q8_0": "fp8", "q4_0": "fp8", "q4_1": "fp8", "iq4_nl": "fp8", "q5_0": "fp8", "q5_1": "fp8",
}  # fmt: skip
"""Words of other engines for the type of a cache, and vLLM's nearest one."""
_WITHOUT_MODEL = ("ngram", "suffix")
_SHORT = ("--spec-method", "--spec-model", "--spec-tokens")


def check(document: Deployment, fixed: Sequence[str]) -> None:
    """Refuse what contradicts itself.

    Args:
      fixed: the profile's own arguments.
    Raises: Refusal `invalid_config` naming both sides.
    """
    where, said = f"{document.name}: engine_config", [*fixed, *document.engine_config.extra_args]
    word = document.engine_config.kv_cache_dtype
    if word is not None and word in CACHE_WORDS:
        raise Refusal("invalid_config", f"{where}.kv_cache_dtype: vLLM has no {word}; nearest is {CACHE_WORDS[word]}")
    _check_batch(document, where, fixed, said)
    _check_speculation(document, where, said)


def _check_batch(document: Deployment, where: str, fixed: Sequence[str], said: Sequence[str]) -> None:
    config = document.engine_config
    batch = (config.vllm or Vllm()).max_num_batched_tokens
    if batch is None:
        return
    told = value_of(POLICY, fixed, "--max-num-seqs") or ""
    asked = config.max_concurrent_requests or (int(told) if told.isdecimal() else DEFAULT_SEQUENCES)
    if batch < asked:
        raise Refusal(
            "invalid_config",
            f"{where}.vllm.max_num_batched_tokens: is {batch}, less than the {asked} requests that run at once; vLLM "
            "does not start so. Raise it, or lower max_concurrent_requests",
        )
    whole = any(normal(one).startswith("--no-enable-chunked") for one in said)
    if whole and config.context_length is not None and batch < config.context_length:
        raise Refusal(
            "invalid_config",
            f"{where}.vllm.max_num_batched_tokens: is {batch}, less than context_length {config.context_length} beside "
            "--no-enable-chunked-prefill; vLLM does not start so. Raise it, or leave that option out",
        )


def _check_speculation(document: Deployment, where: str, said: Sequence[str]) -> None:
    text = value_of(POLICY, said, "--speculative-config")
    if text is None:
        return
    short = next((option for option in _SHORT if mentions(POLICY, said, option)), None)
    if short is not None:
        raise Refusal("invalid_config", f"{where}.extra_args: {short} stands beside --speculative-config; keep one")
    settings = flat_object(text)
    if settings is None:
        return  # the option policy says what is wrong with it
    option = f"{where}.extra_args: --speculative-config"
    method, model = settings.get("method"), settings.get("model")
    named = "model" if model is not None else "model.draft" if document.model.draft is not None else None
    if isinstance(method, str) and method.strip("[]").lower().startswith(_WITHOUT_MODEL):
        if named is not None:
            raise Refusal("invalid_config", f"{option}: method {method} drafts without a model; leave {named} out")
    elif method is None and named is None:
        raise Refusal("invalid_config", f"{option}: names neither method nor model, so vLLM cannot draft with it")
    _check_numbers(document, option, settings)


def _check_numbers(document: Deployment, option: str, settings: Mapping[str, object]) -> None:
    for key in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "draft_tensor_parallel_size"):
        number = settings.get(key)
        if number is not None and (type(number) is not int or number < 1):
            raise Refusal("invalid_config", f"{option}: {key}: expected a whole number from 1")
    least, most = settings.get("prompt_lookup_min"), settings.get("prompt_lookup_max")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        raise Refusal("invalid_config", f"{option}: prompt_lookup_min {least} is above prompt_lookup_max {most}")
    ranks, whole = settings.get("draft_tensor_parallel_size"), document.topology.tensor_parallel
    if ranks is not None and ranks not in (1, whole):
        raise Refusal(
            "invalid_config",
            f"{option}: draft_tensor_parallel_size: is {ranks}; vLLM takes 1 or topology.tensor_parallel, {whole}",
        )
