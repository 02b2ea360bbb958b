"""What clients of the inference endpoint may read of a failure: the reason, on one line and without places.

An operator sees a failure whole, in `status`, with the last lines of the engine's log below it. A client may be anybody
with a key: it reads of the log only the line that names the error, which is in the reason, and never addresses, ports,
paths or process ids of the machine, nor lines of an engine's source. Source: api 4, security 9.
"""

from __future__ import annotations

import re
from typing import Final

CHARS_MAX: Final = 600
CHARS_READ_MAX: Final = 16384

_OCTET: Final = r"(?:0|[1-9]\d{0,2})"  # engines stamp their lines with 0.01.099.278, which is no address
_FILES: Final = r"[\w-]{1,64}\.(?:py|pyx|cc?|cpp|cxx|hh?|hpp|cuh?|rs|go|mm)"
_IPV4: Final = rf"(?<![\d.])(?:{_OCTET}\.){{3}}{_OCTET}(?![\d.]*\d)"
_IPV6: Final = r"\[(?:[0-9a-f:]*::[0-9a-f:.]*|(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4})\]"
_IN_PATH: Final = r"[^\s'\"`<>()\[\]{},;:|=]"
_IS: Final = r"([\"']?(?:\s*[:=]\s*|\s+))"
_LIST: Final = r"[\[({]\d+(?:, ?\d+)*[\])}]"
# An address ends where a sentence may go on; what an endpoint is called by clients is no place of the machine.
_RULES: Final = (
    (
        re.compile(r"(?<= is not there\.) Did you mean \"[^\"]{1,4096}\"\?"),
        "",
    ),  # what else lies there is the operator's
    (re.compile(r"(?i)\bfile://[^\s'\"<>)\]},;]+"), "<path>"),
    (re.compile(r"(?i)\b[a-z][a-z0-9+.-]{0,15}://[^\s'\"<>)\]},;]*[^\s'\"<>)\]},;:.]"), "<address>"),
    (re.compile(r"\bFile ([\"'])[^\"']*\1, line \d+(?:, in [\w<>.]+)?:? ?"), ""),
    (re.compile(rf"(?:\[{_FILES}:\d+\]|(?<![\w/.]){_FILES}:\d+(?::\d+)?\b):? ?"), ""),
    (re.compile(r"([\"'])(?:~|\.{1,2})?/(?!v1/)[^\"']*\1"), r"\1<path>\1"),
    (re.compile(rf"(?<![\w/<>.~*)\]])(?:~|\.{{1,2}})?/(?!(?:v1/|health\b|metrics\b)){_IN_PATH}+"), "<path>"),
    (re.compile(rf"(?:{_IPV4}|{_IPV6}|\blocalhost\b)(?::\d{{1,5}})?"), "<address>"),
    (re.compile(r"(?<![\w:.])[0-9a-f:]{0,30}::[0-9a-f:]{0,30}(?![\w:])"), "<address>"),
    (re.compile(r" ?\(\w+ pid=\d+\)"), ""),
    (re.compile(rf"(?i)\b(p?pids?|process(?:es)?(?: id)?)\b{_IS}(?:\d+|{_LIST})(?![\w.%/])"), r"\1\2<number>"),
    (re.compile(rf"(?i)((?:\b|_)ports?)\b{_IS}[\"']?(?:\d{{1,5}}(?:-\d{{1,5}})?\b[\"']?|{_LIST})"), r"\1\2<number>"),
)


def placeless(text: str) -> str:
    """A sentence without addresses, ports, paths, process ids and lines of source."""
    text = text[:CHARS_READ_MAX]
    for rule, instead in _RULES:
        text = rule.sub(instead, text)
    return text.strip()


def words(reason: str) -> str:
    """A failure's reason without the engine's log below it, on one line of at most CHARS_MAX characters."""
    head, *log = reason.splitlines() or [""]
    text = placeless(" ".join((head.removesuffix(":") if log else head).split()))
    return text if len(text) <= CHARS_MAX else text[: CHARS_MAX - 1] + "…"
