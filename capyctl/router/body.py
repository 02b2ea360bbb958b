"""JSON objects that are read whole: what engines answer, and what operators send.

An answer is passed on as it came, and changed by replacing one value's bytes: the top level is walked here,
each value is skipped (and decoded) by the standard library's own C scanner, and the walk notes where each
value stands. Replacing `model` is then a splice of bytes, and everything else stays. Clients' bodies are
never read whole; see `scan`.
"""

from __future__ import annotations

import json
import re
from json.decoder import JSONDecodeError, scanstring  # type: ignore[attr-defined]  # typeshed leaves it out
from typing import Any, Final

import attrs

from capyctl.router.scan import NotStrict, Spot, scan

_SPACE: Final = re.compile(r"[ \t\n\r]*", re.ASCII)


@attrs.frozen
class JsonObject:
    """A parsed object beside its bytes. `values` is what json.loads would give; `_spots` count characters."""

    text: bytes
    values: dict[str, Any]
    _characters: str
    _spots: dict[str, tuple[int, int]]

    def spot(self, name: str) -> Spot:
        """Where the value of the top-level `name` stands. Raises KeyError when there is none."""
        start, end = self._spots[name]
        if len(self._characters) == len(self.text):
            return Spot(start, end)
        before = len(self._characters[:start].encode())
        return Spot(before, before + len(self._characters[start:end].encode()))

    def replaced(self, name: str, value: str) -> bytes:
        """The text with the value of the top-level `name` replaced; every other byte stays."""
        spot = self.spot(name)
        return self.text[: spot.start] + quoted(value) + self.text[spot.end :]

    def with_last(self, name: str, value: Any) -> bytes:
        """The text with one more member before its closing brace; every other byte stays."""
        end = self.text.rindex(b"}")
        comma = b", " if self.values else b""
        member = quoted(name) + b": " + json.dumps(value, ensure_ascii=False).encode()
        return self.text[:end] + comma + member + self.text[end:]


def quoted(value: str) -> bytes:
    """A JSON string."""
    return json.dumps(value, ensure_ascii=False).encode()


def strict_object(text: bytes) -> dict[str, Any]:
    """The object that is written, when `scan` accepts it: for commands of operators, which are small.

    Raises: NotStrict with a sentence for the sender.
    """
    scan(text)
    values: dict[str, Any] = json.loads(text)
    return values


def parse_object(text: bytes) -> JsonObject:
    """Parse an engine's object, leniently: it is passed on whatever it holds. Constants like `NaN` (see
    `holds_no_number`), duplicate names below the top and lone surrogates pass.

    Raises: NotStrict with a sentence that names no value.
    """
    try:
        characters = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotStrict(f"the body is not UTF-8: byte {error.start} does not fit") from None
    try:
        values, spots = _members(characters)
    except StopIteration as stop:
        raise NotStrict(f"the body is not JSON: no value at character {stop.value}") from None
    except JSONDecodeError as error:
        raise NotStrict(f"the body is not JSON: {error.msg.removesuffix(' at')} at character {error.pos}") from None
    except RecursionError:
        raise NotStrict("the body is nested too deep") from None
    except NotStrict:
        raise
    except ValueError:
        # The one ValueError left is int()'s bound on digits.
        raise NotStrict("the body holds an integer of more than 4300 digits") from None
    return JsonObject(text, values, characters, spots)


_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_CONSTANT: Final = re.compile(rb"NaN|Infinity")


def holds_no_number(text: bytes) -> bool:
    """Whether `NaN` or `Infinity` stands where a value should: no client's parser of JSON takes that.

    Two searches as a rule: an answer that has the words anywhere is looked at again without its strings.
    """
    return (b"NaN" in text or b"Infinity" in text) and _CONSTANT.search(_STRING.sub(b'""', text)) is not None


# scan_once decodes one value at a place and says where it ends; typeshed leaves it out.
_scan_once: Final = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def _members(text: str) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """Walk the top level: every member's value, and its place in characters."""
    values: dict[str, Any] = {}
    spots: dict[str, tuple[int, int]] = {}
    at = _after_space(text, 0)
    if text[at : at + 1] != "{":
        raise NotStrict("the body is not a JSON object")
    at = _after_space(text, at + 1)
    if text[at : at + 1] == "}":
        at += 1
    else:
        while True:
            if text[at : at + 1] != '"':
                raise JSONDecodeError("a member's name in quotes is missing", text, at)
            name, at = scanstring(text, at + 1, True)
            at = _after_space(text, at)
            if text[at : at + 1] != ":":
                raise JSONDecodeError("a colon is missing", text, at)
            start = _after_space(text, at + 1)
            value, at = _scan_once(text, start)
            if name in values:
                # The name is shown only when it is a plain word: it is the client's text.
                shown = f"`{name}`" if name.isascii() and name.isidentifier() and len(name) <= 64 else "a name"
                raise NotStrict(f"the body has {shown} twice")
            values[name] = value
            spots[name] = (start, at)
            at = _after_space(text, at)
            mark = text[at : at + 1]
            if mark == "}":
                at += 1
                break
            if mark != ",":
                raise JSONDecodeError("a comma or a closing brace is missing", text, at)
            at = _after_space(text, at + 1)
    if _after_space(text, at) != len(text):
        raise JSONDecodeError("something follows the object", text, at)
    return values, spots


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
