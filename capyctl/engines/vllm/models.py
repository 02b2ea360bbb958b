"""Models that vLLM cannot park, by what their `config.json` says of themselves.

A park of one of them would end in wrong answers, or in an engine that does not come back: it is refused
before a launch, and the document is told what to state instead.
Source: engines 6.4.
"""

from __future__ import annotations

import json
from typing import Final

from capyctl.errors import Refusal

_GPT_OSS: Final = frozenset({"GptOssForCausalLM"})


def cannot_park(config: str | None) -> str | None:
    """Why the model of this `config.json` text cannot park, or None. An unreadable config says nothing."""
    try:
        found = json.loads(config) if config is not None else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    listed = found.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    kind = found.get("model_type")
    kind = kind if isinstance(kind, str) else ""
    if kind == "gpt_oss" or _GPT_OSS & set(names):
        return "gpt-oss does not load its weights again after a park"
    if any(_is_super_vision(name) for name in (*names, kind)):
        return "Nemotron Super VL answers wrongly after a park"
    return None


def _is_super_vision(name: str) -> bool:
    """Nemotron's large models that see: their architectures' names differ by release, these words stay."""
    words = name.replace("_", "").lower()
    return "nemotron" in words and "super" in words and ("vl" in words or "omni" in words)


def check_parks(config: str | None) -> None:
    """Refuse a park of such a model. Raises: Refusal `capability_missing:deep_park`."""
    why = cannot_park(config)
    if why is not None:
        raise Refusal("capability_missing:deep_park", f"{why} on vLLM. State residency: restart_only")
