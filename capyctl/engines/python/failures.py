"""What the last lines of an engine that lives in a Python environment say of its end. Pure; names options, never
their values.

Source: engines 3.3, 12.3, 20.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from capyctl.engines.last_words import out_of_memory, worth_reading

Named = tuple[str, str]
"""A code and one line."""

_OWN = re.compile(r"capyctl_refused (?P<code>[a-z_]+(?::[a-z_]+)?) (?P<text>.{1,300})")
_UNKNOWN = re.compile(r"error: unrecognized arguments:.*?(?P<name>--[A-Za-z0-9][\w.-]*)")
_REFUSED = re.compile(r"error: argument (?P<name>--[A-Za-z0-9][\w-]*)")
_AMBIGUOUS = re.compile(r"error: ambiguous option: (?P<name>--[A-Za-z0-9][\w-]*)")
_PORT = ("address already in use", "errno 98")
_ARCHITECTURE = re.compile(
    r"(?i)does not recognize this architecture|model architectures .{0,200}are not supported|"
    r"has no .{0,40}implementation, the transformers|unsupported architectures?\b"
)
_QUANTIZATION = re.compile(r"(?i)quantization(?: method)? .{0,60}(?:is not supported|not found|does not match)")


def classify(
    lines: Sequence[str], title: str, own_codes: frozenset[str], more: Callable[[str], Named | None]
) -> Named | None:
    """The last line that names a typed failure, or None.

    Args:
      title: how messages call the engine.
      own_codes: what its protected entry may refuse with.
      more: what this family alone says; asked before what every one says.
    """
    for line in reversed(worth_reading(lines)):
        found = _own(line, own_codes) or _argument(line, title) or more(line) or _common(line, title)
        if found is not None:
            return found
    return None


def _own(line: str, codes: frozenset[str]) -> Named | None:
    own = _OWN.search(line)
    if own is None or own["code"] not in codes:
        return None
    way_out = ". State residency: restart_only" if own["code"] == "capability_missing:deep_park" else ""
    text = own["text"].strip()
    return own["code"], text if text.endswith(way_out) else text + way_out


def _argument(line: str, title: str) -> Named | None:
    for pattern in (_UNKNOWN, _REFUSED, _AMBIGUOUS):
        refused = pattern.search(line)
        if refused is not None:
            return "engine_argument_rejected", f"{title} does not accept the argument {refused['name']}"
    if "error: unrecognized arguments:" in line:
        return "engine_argument_rejected", f"{title} does not accept an argument that follows no option"
    return None


def _common(line: str, title: str) -> Named | None:
    low = line.lower()
    if any(words in low for words in _PORT):
        return "port_conflict", "the leased port was taken by another program while the engine started"
    if _ARCHITECTURE.search(line) is not None:
        return "checkpoint_unusable", f"{title} does not know the architecture of this model"
    if _QUANTIZATION.search(line) is not None:
        return "checkpoint_unusable", f"{title} cannot run this model's quantization here"
    return out_of_memory(line)
