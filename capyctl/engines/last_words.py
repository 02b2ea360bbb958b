"""What the last lines of an engine's log say of its end, whatever its family. Pure.

The log keeps everything; an operator gets one line of it, bounded, and a code that says who can do something.

Source: engines 12.3, 17.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

TELLING_CHARS = 240
"""The longest line of an engine that becomes a part of a message."""
NEWEST = 20
"""Lines at the end of a log that are all looked at; of those before, only what says itself that it is an error."""

_STAMP = re.compile(
    r"^\s*(?:\([^()]{1,40}pid=\d+\)\s*)?"  # vLLM: (EngineCore pid=1)
    r"(?:(?:ERROR|CRITICAL|FATAL)\s+[\d:., T-]{5,30})?"
    r"(?:\[[^\[\]]{1,60}\]\s*)?"  # [core.py:842], [2026-11-30 03:54:47 TP0]
    r"(?:[\d.]{6,20}\s+[EWI]\s+)?"  # llama.cpp: 0.01.099.278 E
)
_ERROR = re.compile(
    r"\b[A-Za-z_.]*(?:Error|Exception|OutOfMemory\w*)\b|\b(?:fatal|panic|failed|cannot|could not|refus\w+)\b",
    re.IGNORECASE,
)
_LESS = ("File ", "raise ", "INFO", "DEBUG", "WARNING")
_SAYS_NOTHING = (
    "engine core initialization failed",  # vLLM: the cause is above
    "traceback (most recent call last)",
    "scheduler hit an exception",
    "received sigquit from a child process",
    "cleaning up before exit",
    "during handling of the above exception",
    "the above exception was the direct cause",
)
_CARD_MEMORY = re.compile(r"(?i)(?:cuda|hip|device|vram|gpu).{0,80}out of memory|outofmemoryerror|cudamalloc failed")
_OTHER_MEMORY = re.compile(r"(?i)out of memory|\bmemoryerror\b|bad_alloc|cannot allocate memory|can't allocate memory")
_TRIED = re.compile(
    r"Tried to allocate (?P<wanted>[\d.]+ [KMG]iB).{0,80}?total capacity of (?P<total>[\d.]+ [KMG]iB) of which "
    r"(?P<free>[\d.]+ [KMG]iB) is free"
)


def telling(lines: Sequence[str]) -> str | None:
    """The last line that names an error, without the stamps before it; None where none does."""
    for line in reversed(lines):
        plain = _STAMP.sub("", line, count=1).strip()
        low = plain.lower()
        if not plain or any(words in low for words in _SAYS_NOTHING) or plain.startswith(_LESS):
            continue
        if _ERROR.search(plain):
            return bounded(" ".join(plain.split()).rstrip(".: "))
    return None


def bounded(text: str, most: int = TELLING_CHARS) -> str:
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def worth_reading(lines: Sequence[str]) -> list[str]:
    """The newest lines, and of those before only errors: a hint about memory in a banner is no reason for an end."""
    before, newest = lines[:-NEWEST], lines[-NEWEST:]
    return [line for line in before if _ERROR.search(line) and "INFO" not in line[:60]] + list(newest)


def out_of_memory(line: str) -> tuple[str, str] | None:
    """(code, one line) for a line that says that memory could not be had, on a card or on the machine."""
    if _CARD_MEMORY.search(line) is not None:
        tried = _TRIED.search(line)
        figures = f": {tried['wanted']} beside {tried['free']} free of {tried['total']}" if tried is not None else ""
        return "insufficient_device_memory", f"the engine could not allocate its memory on the device{figures}"
    if _OTHER_MEMORY.search(line) is not None:
        return "insufficient_memory", "the engine could not allocate its memory"
    return None
