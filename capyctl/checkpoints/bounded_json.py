"""JSON that somebody else wrote, read with bounds on bytes, on values and on depth, and without doubles or NaN.

A text of some megabytes can say tens of millions of values, each of which becomes an object of 50 bytes and more:
what opens and separates values is counted before anything is parsed. A name that is said twice is refused: parsers
differ in which of the two they keep, so what we sum and what an engine loads would too.

Source: memory 5.15; security 5.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

VALUES_MAX = 1 << 22
CONTAINERS_MAX = 1 << 20
WIDE_BYTES_MAX = 16 << 20
"""A text with letters beyond ASCII takes up to four bytes for each of its bytes, so it may be this long at most."""
_DECODER_ERROR = (ValueError, RecursionError)


class WrongJson(ValueError):
    """What is wrong with a text, in words that follow its name."""


def parse(raw: bytes) -> Any:
    """The value that `raw` says.

    Raises: WrongJson.
    """
    return _load(_text(raw))


def members(raw: bytes) -> Iterator[tuple[str, Any]]:
    """The members of the object that `raw` says, each decoded when it is its turn, in their order.

    Names are not compared: whoever keeps them does. Raises: WrongJson.
    """
    text = _text(raw)
    decoder = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_constant)
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        raise WrongJson("does not begin with {")
    at = _skip(text, at + 1)
    if text[at : at + 1] == "}":
        return _end(text, at + 1)
    while True:
        name, at = _decoded(decoder, text, at)
        if not isinstance(name, str):
            raise WrongJson("is not JSON")
        at = _expect(text, at, ":")
        value, at = _decoded(decoder, text, at)
        yield name, value
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            return _end(text, at + 1)
        at = _expect(text, at, ",")


def _text(raw: bytes) -> str:
    if raw.count(b"{") + raw.count(b"[") > CONTAINERS_MAX or raw.count(b",") + raw.count(b":") > VALUES_MAX:
        raise WrongJson("says more values than any model has")
    if raw.isascii():
        return raw.decode("ascii")
    if len(raw) > WIDE_BYTES_MAX:
        raise WrongJson(f"has letters beyond ASCII in more than {WIDE_BYTES_MAX >> 20} MiB")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise WrongJson("is not UTF-8") from None


def _load(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except WrongJson:
        raise
    except RecursionError:
        raise WrongJson("is nested too deeply") from None
    except ValueError:
        raise WrongJson("is not JSON") from None


def _decoded(decoder: json.JSONDecoder, text: str, at: int) -> tuple[Any, int]:
    try:
        return decoder.raw_decode(text, at)
    except WrongJson:
        raise
    except RecursionError:
        raise WrongJson("is nested too deeply") from None
    except ValueError:
        raise WrongJson("is not JSON") from None


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\n", "\r") and at < len(text):
        at += 1
    return at


def _expect(text: str, at: int, sign: str) -> int:
    at = _skip(text, at)
    if text[at : at + 1] != sign:
        raise WrongJson("is not JSON")
    return _skip(text, at + 1)


def _end(text: str, at: int) -> None:
    if text[at:].strip(" \t\n\r"):
        raise WrongJson("goes on after its end")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise WrongJson(f"names {shown(twice)} twice")
    return made


def _no_constant(word: str) -> Any:
    raise WrongJson(f"holds {word}, which is not JSON")


def shown(name: str) -> str:
    """A name of a stranger's text, fit for one line."""
    return ascii(name if len(name) <= 80 else f"{name[:80]}…")
