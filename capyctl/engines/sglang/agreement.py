"""What of a deployment contradicts itself on SGLang: fields and arguments that its start checks would not take
together, or of which it would ignore one. Pure.

Source: engines 7.1, 7.3; the engine's own start checks.
"""

from __future__ import annotations

from collections.abc import Mapping

from capyctl.documents.deployment import Deployment
from capyctl.documents.engine_config import Sglang
from capyctl.engines.options import mentions, value_of
from capyctl.engines.sglang.options import POLICY
from capyctl.errors import Refusal

SPECULATION = "--speculative-algorithm"
DRAFT = "--speculative-draft-model-path"
CACHE_WORDS: Mapping[str, str] = {
    "fp8": "fp8_e4m3", "fp8_inc": "fp8_e4m3", "fp8_ds_mla": "fp8_e4m3", "f16": "auto", "fp16": "auto",
    "float16": "auto", "half": "auto", "f32": "auto", "float32": "auto", "q8_0": "fp8_e4m3", "q4_0": "fp4_e2m1",
    "q4_1": "fp4_e2m1", "iq4_nl": "fp4_e2m1", "q5_0": "fp8_e4m3", "q5_1": "fp8_e4m3",
}  # fmt: skip
"""Words of other engines for the type of a cache, and SGLang's nearest one."""
_WITHOUT_MODEL = ("NGRAM",)


def check(document: Deployment) -> None:
    """Refuse what contradicts itself. Raises: Refusal `invalid_config` naming both sides."""
    config, where = document.engine_config, f"{document.name}: engine_config"
    word = config.kv_cache_dtype
    if word is not None and word in CACHE_WORDS:
        raise Refusal("invalid_config", f"{where}.kv_cache_dtype: SGLang has no {word}; nearest is {CACHE_WORDS[word]}")
    _check_pages(document, where)
    _check_draft(document, where)


def _check_pages(document: Deployment, where: str) -> None:
    chunk = (document.engine_config.sglang or Sglang()).chunked_prefill_size
    page = value_of(POLICY, document.engine_config.extra_args, "--page-size") or ""
    if chunk is None or chunk < 0 or not page.isdecimal() or int(page) < 1 or chunk % int(page) == 0:
        return
    raise Refusal(
        "invalid_config",
        f"{where}.sglang.chunked_prefill_size: {chunk} is no multiple of --page-size {page}; SGLang does not start so",
    )


def _check_draft(document: Deployment, where: str) -> None:
    args, stated = document.engine_config.extra_args, document.model.draft is not None
    algorithm, named = value_of(POLICY, args, SPECULATION), mentions(POLICY, args, DRAFT)
    if stated and algorithm is None:
        raise Refusal("invalid_config", f"{document.name}: model.draft needs {SPECULATION} in extra_args")
    if stated and named:
        raise Refusal(
            "invalid_config", f"{document.name}: model.draft and {DRAFT} both name the draft model; keep one of them"
        )
    if named and algorithm is None:
        raise Refusal("invalid_config", f"{where}.extra_args: {DRAFT} needs {SPECULATION}; without it nothing drafts")
    if (stated or named) and algorithm is not None and algorithm.upper() in _WITHOUT_MODEL:
        other = "model.draft" if stated else DRAFT
        raise Refusal(
            "invalid_config", f"{where}.extra_args: {SPECULATION} {algorithm} drafts without a model; leave {other} out"
        )
