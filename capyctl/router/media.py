"""Addresses of pictures, sounds and films in a request: only what lies in the request itself goes to an engine.

Engines fetch `http(s)` addresses, redirects and all, and some open paths of their host, so a client could make
one call services on the host's loopback, or read its files. Whatever is not `data:` is refused here, before any
engine sees it.

The body was scanned already, so it is JSON; it is looked over once more without being decoded. Names may be
written with escapes, which is why text that has them is searched for those as well.
Source: engines 14.7.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

from capyctl.router.scan import NotStrict

ADDRESSES: Final = frozenset(
    {
        "image_url", "video_url", "audio_url", "file_url", "input_image", "input_video", "input_audio", "images",
        "source",
    }
)  # fmt: skip
"""Members that hold an address, or an object or a list with addresses; `source` is the Messages API's."""

_INSIDE: Final = frozenset({*ADDRESSES, "url", "uri", "path", "image", "video", "audio"}) - {"source"}
"""Members whose own text is an address, once inside of one of those. A `source` is that of an object alone."""

_ENCODED: Final = frozenset({"data", "file_data"})  # base64 without a scheme, or an address
_HINTS: Final = (b"_url", b"input_", b'"images"', b'"source"', b"\\u00")
STEPS_MAX: Final = 2**17
"""Values and names in all such members; beyond it the body is refused, since each is looked at by itself."""

ESCAPED_MAX: Final = 4096
"""Names with escaped letters. No library writes them, so a few are read and a flood is refused."""

_SPACE: Final = rb"[ \t\n\r]*+"
_NAMED: Final = re.compile(
    rb'"(' + b"|".join(name.encode() for name in sorted(ADDRESSES)) + rb')"' + _SPACE + rb":" + _SPACE
)
# A name in which some letter is escaped; an escape of anything but ASCII is in none of ours.
_ESCAPED: Final = re.compile(
    rb'"(?=[A-Za-z_]{0,64}\\u00)((?>[A-Za-z_]|\\u00[0-9a-fA-F]{2}){1,64}+)"' + _SPACE + rb":" + _SPACE
)
_STRING: Final = re.compile(rb'"(?>[^"\\]++|\\.)*+"', re.DOTALL)
_OTHER: Final = re.compile(rb"[^,\]}\s]++")
_GAP: Final = re.compile(rb"[ \t\n\r,:]*+")
_SCHEME: Final = re.compile(rb'"(?!data:)[A-Za-z][A-Za-z0-9+.\-]{0,31}:')
_OPENERS: Final = (b"{"[0], b"["[0])
_CLOSERS: Final = (b"}"[0], b"]"[0])
_QUOTE: Final = b'"'[0]


def foreign_address(text: bytes) -> str | None:
    """The member of a scanned body that names an address which is not `data:`, or None. Linear in the text.

    Raises: NotStrict with a sentence for the client, for more of such members than anybody means.
    """
    if not any(hint in text for hint in _HINTS):
        return None
    steps = iter(range(STEPS_MAX))
    for values in (_plainly_named(text), _named_with_escapes(text)):
        seen = 0  # what lies inside of a value was looked at with it
        for name, at in values:
            if at < seen:
                continue
            end = _looked_over(text, at, name, steps)
            if end is None:
                return name
            seen = end
    return None


def _plainly_named(text: bytes) -> Iterator[tuple[str, int]]:
    """Each member that may hold an address, and where its value begins."""
    for match in _NAMED.finditer(text):
        yield match[1].decode(), match.end()


def _named_with_escapes(text: bytes) -> Iterator[tuple[str, int]]:
    if b"\\u00" not in text:
        return
    for count, match in enumerate(_ESCAPED.finditer(text)):
        if count >= ESCAPED_MAX:
            raise NotStrict(f"the body has more than {ESCAPED_MAX} names with escaped letters")
        name = json.loads(b'"' + match[1] + b'"')
        if name in ADDRESSES:
            yield name, match.end()


def _looked_over(text: bytes, at: int, name: str, steps: Iterator[int]) -> int | None:
    """The end of the value that begins at `at`, or None when it, or a member of it, is a foreign address."""
    names = [name]  # of what is open, the member that a value belongs to
    expects_name = [False]
    for _ in steps:
        mark = text[at]
        if mark in _OPENERS:
            names.append(names[-1])
            expects_name.append(mark == _OPENERS[0])
            at += 1
        elif mark in _CLOSERS:
            names.pop()
            expects_name.pop()
            at += 1
        elif mark == _QUOTE:
            end = _end(_STRING, text, at)
            if expects_name[-1]:
                names[-1] = _decoded(text[at:end])
                at = _end(_GAP, text, end)  # at its value now
                if text[at] in _OPENERS:
                    continue
                if text[at] != _QUOTE:
                    end = _end(_OTHER, text, at)
                else:
                    end = _end(_STRING, text, at)
                    if _is_foreign(names[-1], text, at):
                        return None
            elif _is_foreign(names[-1], text, at):
                return None
            at = end
        else:
            at = _end(_OTHER, text, at)
        if len(names) == 1:
            return at
        at = _end(_GAP, text, at)
    raise NotStrict(f"the body has more than {STEPS_MAX} values and names in `{name}` and its like")


def _is_foreign(name: str, text: bytes, at: int) -> bool:
    if name in _ENCODED:
        return _SCHEME.match(text, at) is not None or text[at + 1 : at + 3] in (b"./", b"~/")
    return name in _INSIDE and not text.startswith(b'"data:', at)


def _decoded(quoted: bytes) -> str:
    return str(json.loads(quoted)) if len(quoted) <= 512 else ""


def _end(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()
