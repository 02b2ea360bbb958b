"""JSON that somebody else wrote, read with bounds on bytes, on values and on depth, and without doubles or NaN.

A text of some megabytes can say tens of millions of values, each of which becomes an object of 50 bytes and more:
what opens and separates values is counted before anything is parsed. A name that is said twice is refused: parsers
differ in which of the two they keep, so what we sum and what an engine loads would too.

Source: memory 5.15; security 5.
"""

from __future__ import annotations

import json
from typing import Any

VALUES_MAX = 1 << 22
CONTAINERS_MAX = 1 << 20
WIDE_BYTES_MAX = 16 << 20
"""A text with letters beyond ASCII takes up to four bytes for each of its bytes, so it may be this long at most."""


class WrongJson(ValueError):
    """What is wrong with a text, in words that follow its name."""


def parse(raw: bytes) -> Any:
    """The value that `raw` says.

    Raises: WrongJson.
    """
    text = _text(raw)
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except WrongJson:
        raise
    except RecursionError:
        raise WrongJson("is nested too deeply") from None
    except ValueError:
        raise WrongJson("is not JSON") from None


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
