"""What vLLM's last lines say of its end. Pure; names options, never their values.

Source: engines 3.3, 6.1, 12.3, 20.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_OWN = re.compile(r"capyctl_refused (?P<code>[a-z_]+(?::[a-z_]+)?) (?P<text>.{1,300})")
_UNKNOWN = re.compile(r"error: unrecognized arguments:.*?(?P<name>--[A-Za-z0-9][\w.-]*)")
_REFUSED = re.compile(r"error: argument (?P<name>--[A-Za-z0-9][\w-]*)")
_AMBIGUOUS = re.compile(r"error: ambiguous option: (?P<name>--[A-Za-z0-9][\w-]*)")
_FREE = re.compile(r"Free memory on device .{0,200}?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than")
_OWN_CODES = frozenset({"effective_args_mismatch", "capability_missing:core", "capability_missing:deep_park"})
_MEMORY = ("out of memory", "no available memory for the cache blocks", "larger than the available kv cache memory")
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
        way_out = ". State residency: restart_only" if own["code"] == "capability_missing:deep_park" else ""
        return own["code"], own["text"].strip() + way_out
    for pattern in (_UNKNOWN, _REFUSED, _AMBIGUOUS):
        refused = pattern.search(line)
        if refused is not None:
            return "engine_argument_rejected", f"vLLM does not accept the argument {refused['name']}"
    if "error: unrecognized arguments:" in line:
        return "engine_argument_rejected", "vLLM does not accept an argument that follows no option"
    short = _FREE.search(line)
    if short is not None:
        return (
            "insufficient_device_memory",
            f"vLLM found {short['free']} of {short['total']} GiB free on its device, less than it was to use",
        )
    low = line.lower()
    if "sleep mode is not supported" in low:
        return "capability_missing:deep_park", "vLLM cannot sleep on this platform. State residency: restart_only"
    if any(words in low for words in _PORT):
        return "port_conflict", "the leased port was taken by another program while the engine started"
    if any(words in low for words in _MEMORY):
        return "insufficient_device_memory", "the engine could not allocate its memory"
    return None
