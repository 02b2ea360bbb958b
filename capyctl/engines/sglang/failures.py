"""What SGLang's last lines say of its end. Pure; names options, never their values.

Source: engines 3.3, 5, 7.4, 12.3, 20.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_OWN = re.compile(r"capyctl_refused (?P<code>[a-z_]+(?::[a-z_]+)?) (?P<text>.{1,300})")
_OWN_CODES = frozenset(
    {"effective_args_mismatch", "capability_missing:core", "capability_missing:deep_park", "plugin_closure_failed"}
)
_UNKNOWN = re.compile(r"error: unrecognized arguments:.*?(?P<name>--[A-Za-z0-9][\w.-]*)")
_REFUSED = re.compile(r"error: argument (?P<name>--[A-Za-z0-9][\w-]*)")
_AMBIGUOUS = re.compile(r"error: ambiguous option: (?P<name>--[A-Za-z0-9][\w-]*)")
_MEMORY = ("out of memory", "not enough memory. please try to increase", "loading weights failed due to memory")
_PORT = ("address already in use", "errno 98")


def classify(lines: Sequence[str]) -> tuple[str, str] | None:
    """(code, one line) of the last line that names a typed failure, or None."""
    for line in reversed(lines):
        found = _one(line)
        if found is not None:
            return found
    return None


def _one(line: str) -> tuple[str, str] | None:
    own = _OWN.search(line)
    if own is not None and own["code"] in _OWN_CODES:
        return own["code"], own["text"].strip()
    for pattern in (_UNKNOWN, _REFUSED, _AMBIGUOUS):
        refused = pattern.search(line)
        if refused is not None:
            return "engine_argument_rejected", f"SGLang does not accept the argument {refused['name']}"
    low = line.lower()
    if "no module named 'torch_memory_saver'" in low:
        return (
            "capability_missing:deep_park",
            "SGLang cannot park without the package torch_memory_saver. State residency: restart_only",
        )
    if any(words in low for words in _PORT):
        return "port_conflict", "the leased port was taken by another program while the engine started"
    if any(words in low for words in _MEMORY):
        return "insufficient_device_memory", "the engine could not allocate its memory"
    return None
