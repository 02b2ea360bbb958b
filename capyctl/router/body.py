"""JSON at the door: parsed once and strictly, and changed by replacing one value's bytes.

Engines read fields that nobody here knows, and some clients sign or hash what they send. So a body is
never written anew: the top level is walked here, each value is skipped (and decoded) by the standard
library's own C scanner, and the walk notes where each value stands. Replacing `model` is then a
splice of bytes, and everything else stays as it came.

Refused: text that is not UTF-8, a byte-order mark, lone surrogates, duplicate names at any depth,
`NaN` and `Infinity`, nesting beyond 64, integers of more than 4300 digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json.decoder import JSONDecodeError, scanstring  # type: ignore[attr-defined]  # typeshed leaves it out
from typing import Any, Final

import attrs

DEPTH_MAX: Final = 64

_SPACE: Final = re.compile(r"[ \t\n\r]*", re.ASCII)
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


class NotStrict(ValueError):
    """The text is not an acceptable JSON object. Its message names no value of the client's."""


@attrs.frozen
class Spot:
    """Where a value stands, in bytes of the text: from `start` up to `end`."""

    start: int
    end: int


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


def parse_object(text: bytes, *, lenient: bool = False) -> JsonObject:
    """Parse one JSON object, strictly (see above). Raises NotStrict with a sentence for the client.

    `lenient` is for engines' answers, which are passed on whatever they hold: some write `NaN` as a
    log probability. It lets such constants, duplicate names below the top and lone surrogates pass.
    """
    try:
        characters = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotStrict(f"the body is not UTF-8: byte {error.start} does not fit") from None
    if characters.startswith("\ufeff"):
        raise NotStrict("the body starts with a byte-order mark")
    try:
        values, spots = _members(characters, _scan_leniently if lenient else _scan_strictly)
    except StopIteration as stop:
        raise NotStrict(f"the body is not JSON: no value at character {stop.value}") from None
    except JSONDecodeError as error:
        raise NotStrict(f"the body is not JSON: {error.msg.removesuffix(' at')} at character {error.pos}") from None
    except RecursionError:
        raise NotStrict(f"the body is nested deeper than {DEPTH_MAX}") from None
    except NotStrict:
        raise
    except ValueError:
        # The one ValueError left is int()'s bound on digits.
        raise NotStrict("the body holds an integer of more than 4300 digits") from None
    if lenient:
        return JsonObject(text, values, characters, spots)
    if characters.count("[") + characters.count("{") > DEPTH_MAX and _deeper_than(values, DEPTH_MAX):
        raise NotStrict(f"the body is nested deeper than {DEPTH_MAX}")
    if _SURROGATE.search(characters) and not _encodable(values):
        raise NotStrict("the body holds a lone surrogate")
    return JsonObject(text, values, characters, spots)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise NotStrict("an object in the body has two members of one name")
    return found


def _no_constant(word: str) -> Any:
    raise NotStrict(f"the body holds {word}, which is not JSON")


_Scan = Callable[[str, int], tuple[Any, int]]
# scan_once decodes one value at a place and says where it ends; typeshed leaves it out.
_scan_strictly: Final[_Scan] = json.JSONDecoder(  # type: ignore[attr-defined]
    object_pairs_hook=_unique, parse_constant=_no_constant
).scan_once
_scan_leniently: Final[_Scan] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def _members(text: str, scan_once: _Scan) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
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
            value, at = scan_once(text, start)
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


def _deeper_than(value: Any, limit: int) -> bool:
    """Level by level, so that no input can exhaust the stack."""
    level = [value]
    for _ in range(limit):
        below: list[Any] = []
        for container in level:
            children = container.values() if type(container) is dict else container
            below += [child for child in children if type(child) is dict or type(child) is list]
        if not below:
            return False
        level = below
    return True


def _encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
