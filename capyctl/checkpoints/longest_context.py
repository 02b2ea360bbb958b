"""The longest context that an engine takes for a model, from `config.json`. Pure.

Each engine derives it from the description in its own way, and refuses to start with more than that unless a variable
says otherwise. What an argument puts in the description's place is not followed: then nothing is known.

Source: memory 5.12, 6; engines 6.1, 7.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from capyctl.checkpoints.arguments import arguments, said
from capyctl.checkpoints.config_values import TOKENS_MAX, Block, block_of, tokens, word
from capyctl.documents.deployment import Deployment

_VLLM_NAMES = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
"""vLLM takes the smallest of those that are stated, and `model_max_length` in their place where there is one."""
_SGLANG_NAMES = (
    "max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings", "n_positions",
)  # fmt: skip
"""SGLang takes the first of them."""
_SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of rope scaling whose factor vLLM leaves out: the description states the length with it."""
_SCALED_ONCE = "yarn"
"""The kind whose original length releases of vLLM before 0.32 multiply by its factor."""

_ALLOWED: Mapping[str, str] = {
    "vllm": "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "sglang": "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
}
"""The variable with which an engine takes more."""
_YES = frozenset({"1", "true", "yes", "y", "t", "on"})
OTHER_DESCRIPTION: Mapping[str, tuple[str, ...]] = {
    "vllm": ("--hf-overrides", "--hf-config-path", "--config-format"),
    "sglang": ("--json-model-override-args", "--decrypted-config-file"),
}


@attrs.frozen(kw_only=True)
class Longest:
    """Tokens, the words for whose they are, and the variable that lifts it."""

    tokens: int
    whose: str
    variable: str


def limits_of(text: Block) -> dict[str, int]:
    """Tokens by engine family, from the block that describes the language model; without those that nobody can say.

    `vllm_scaled` is what releases of vLLM that scale yarn take, where that is more.
    """
    found = {"vllm": _vllm(text, scaled=False), "vllm_scaled": _vllm(text, scaled=True), "sglang": _sglang(text)}
    if found["vllm_scaled"] is not None and found["vllm_scaled"] <= (found["vllm"] or 0):
        del found["vllm_scaled"]
    return {family: limit for family, limit in found.items() if limit is not None and 0 < limit <= TOKENS_MAX}


def longest(facts: Mapping[str, Any], document: Deployment, family: str) -> Longest | None:
    """The most that the engine starts with; None where it takes any, or nobody can say.

    SGLang asks the same of a drafter, which runs with the context of the model.
    """
    variable = _ALLOWED.get(family)
    if variable is None or lifted(facts, document, variable):
        return None
    args = arguments(facts, document)
    if any(said(args, option) is not None for option in OTHER_DESCRIPTION[family]):
        return None
    found: list[Longest] = []
    own = _limit(facts, family)
    if own is not None and facts.get("scales_yarn"):
        own = max(own, _limit(facts, f"{family}_scaled") or own)
    if own is not None:
        found.append(Longest(tokens=_windowed(own, facts, family, args), whose="the model", variable=variable))
    drafter = _limit(facts.get("draft") or {}, family) if family == "sglang" else None
    if drafter is not None:
        found.append(Longest(tokens=drafter, whose="the draft model", variable=variable))
    return min(found, key=lambda one: one.tokens, default=None)


def trained(facts: Mapping[str, Any], family: str) -> int | None:
    """What the model was made for: the length that a context is fitted to. None when nobody can say."""
    limits = [limit for name in dict.fromkeys(("vllm", family)) if (limit := _limit(facts, name)) is not None]
    return min(limits, default=facts.get("context_trained"))


def lifted(facts: Mapping[str, Any], document: Deployment, variable: str) -> bool:
    """Whether the deployment, or the profile for every launch of its own, sets the variable."""
    stated = {**(facts.get("host_env") or {}), **document.engine_config.env}
    return str(stated.get(variable, "")).strip().lower() in _YES


def _limit(facts: Mapping[str, Any], family: str) -> int | None:
    """As `limits_of` found it; facts that were measured by an older release have none."""
    limit = (facts.get("context_limits") or {}).get(family)
    return limit if type(limit) is int and limit > 0 else None


def _windowed(own: int, facts: Mapping[str, Any], family: str, args: Sequence[str]) -> int:
    """vLLM that is told to do without windows takes no more than a window holds."""
    if family != "vllm" or said(args, "--disable-sliding-window") is None:
        return own
    windows = [group.get("window") for group in facts.get("cache") or ()]
    return min([own, *(window for window in windows if type(window) is int and window > 0)])


# --- as the engines derive it -----------------------------------------------------------------------


def _vllm(text: Block, *, scaled: bool) -> int | None:
    stated = [length for name in _VLLM_NAMES if (length := tokens(text, name)) is not None]
    whole = tokens(text, "model_max_length")
    plain = whole or min(stated, default=None)
    if plain is None:
        return None
    most = float(plain)
    if "gemma3" not in (word(text, "model_type") or ""):  # its length is stated with the factor in it
        factor = 1.0
        for rope in _ropes(text):
            kind = _kind(rope)
            if scaled and kind == _SCALED_ONCE:
                original = ("original_max_position_embeddings",)
                most = float(tokens(rope, *original) or tokens(text, *original) or plain)
            elif kind in _SCALED_ALREADY:
                continue
            factor = _factor(rope, factor)
        most *= factor
    return max(math.floor(most), whole or 0)


def _sglang(text: Block) -> int | None:
    plain = tokens(text, *_SGLANG_NAMES)
    if plain is None:
        return None
    rope = block_of(text, "rope_scaling") or block_of(text, "rope_parameters")
    counted = tokens(rope, "original_max_position_embeddings") is not None or _kind(rope) == "llama3"
    return plain if counted else math.floor(plain * _factor(rope, 1.0))


def _ropes(text: Block) -> list[Block]:
    """The rope of every kind of layer: one for all, or one under the name of each kind."""
    found: list[Block] = []
    for name in ("rope_parameters", "rope_scaling"):
        block = block_of(text, name)
        nested = [one for one in block.values() if isinstance(one, Mapping)]
        found += nested if nested else [block] if block else []
    return found


def _kind(rope: Block) -> str:
    return word(rope, "rope_type", "type") or "default"


def _factor(rope: Block, otherwise: float) -> float:
    factor = rope.get("factor")
    good = isinstance(factor, int | float) and not isinstance(factor, bool) and 0 < factor <= 1 << 20
    return float(factor) if good and factor is not None else otherwise
