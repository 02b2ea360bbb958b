"""What SGLang's last lines say of its end. Pure; names options, never their values.

Source: engines 3.3, 5, 7.4, 12.3, 20; the engine's own start checks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from capyctl.engines.python import failures
from capyctl.engines.python.failures import Named

_OWN_CODES = frozenset(
    {"effective_args_mismatch", "capability_missing:core", "capability_missing:deep_park", "plugin_closure_failed"}
)
_LONG = re.compile(
    r"(?P<whose>Target model's|User-specified) context_length \((?P<tokens>\d+)\) is greater than the derived "
    r"context_length \((?P<most>\d+)\).{0,300}?To allow overriding"
)
_MEMORY = ("not enough memory. please try to increase", "loading weights failed due to memory")


def classify(lines: Sequence[str]) -> Named | None:
    """(code, one line) of the last line that names a typed failure, or None."""
    return failures.classify(lines, "SGLang", _OWN_CODES, _own_words)


def _own_words(line: str) -> Named | None:
    low = line.lower()
    if "no module named 'torch_memory_saver'" in low:
        return (
            "capability_missing:deep_park",
            "SGLang cannot park without the package torch_memory_saver. State residency: restart_only",
        )
    long = _LONG.search(line)
    if long is not None:
        whose = "the draft model" if long["whose"].startswith("Target") else "the model"
        return "engine_argument_rejected", (
            f"SGLang does not start with a context of {long['tokens']} tokens: it derives {long['most']} for {whose}. "
            "Lower engine_config.context_length"
        )
    if any(words in low for words in _MEMORY):
        return "insufficient_device_memory", "SGLang's weights left no memory of its share for the KV cache"
    return None
