"""Quantities as people write them: durations, sizes, percentages, and the limits built from them.

A quantity is an integer and a unit, as one word. Nothing is guessed: a bare number, a fraction, a
sign or a space is refused, because `30` was meant as seconds by one reader and milliseconds by the
next. Refusals are `ValueError`s whose text says what is allowed; documents add the field's path.
Source: config 2.
"""

from __future__ import annotations

import enum
import re
from typing import Final

import attrs

LARGEST: Final = 2**63 - 1  # what the store and the wire carry

_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}
_BYTES: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL: Final = {"KB": "KiB", "kB": "KiB", "MB": "MiB", "GB": "GiB", "TB": "TiB", "K": "KiB", "M": "MiB", "G": "GiB"}
_WORD: Final = re.compile(r"([0-9]+)([A-Za-z%]*)", re.ASCII)

DURATION_FORM: Final = "a whole number and ms, s, m or h, such as 250ms or 30s"
SIZE_FORM: Final = "a whole number and B, KiB, MiB, GiB or TiB, such as 512MiB or 24GiB"


@attrs.frozen(order=True)
class Duration:
    """A span of time in milliseconds."""

    ms: int

    def __str__(self) -> str:
        return format_duration(self.ms)


@attrs.frozen(order=True)
class Size:
    """An amount of memory or disk in bytes."""

    bytes: int

    def __str__(self) -> str:
        return format_size(self.bytes)


@attrs.frozen(order=True)
class Percent:
    """A whole number of hundredths of something that the field names."""

    percent: int

    def of(self, whole: int) -> int:
        """The share of `whole`, rounded down."""
        return whole * self.percent // 100

    def __str__(self) -> str:
        return f"{self.percent}%"


class Auto(enum.Enum):
    """The limit is derived from the machine."""

    AUTO = "auto"

    def __str__(self) -> str:
        return self.value


class Off(enum.Enum):
    """The limit does not exist."""

    OFF = "off"

    def __str__(self) -> str:
        return self.value


Limit = Size | Percent | Auto  # a memory limit of a standalone machine
Growth = Size | Percent | Auto | Off  # how far a parked copy may grow


def _split(text: str, form: str) -> tuple[int, str]:
    found = _WORD.fullmatch(text)
    if found is None or len(found[1]) > 19:
        raise ValueError(f"expected {form}")
    return int(found[1]), found[2]


def parse_duration(text: str) -> Duration:
    """`250ms`, `30s`, `5m`, `2h` as a Duration. Raises ValueError saying the form."""
    number, unit = _split(text, DURATION_FORM)
    if unit == "":
        raise ValueError(f"has no unit; expected {DURATION_FORM}")
    if unit not in _MS or number * _MS[unit] > LARGEST:
        raise ValueError(f"expected {DURATION_FORM}")
    return Duration(number * _MS[unit])


def parse_size(text: str) -> Size:
    """`0B`, `14848MiB`, `90GiB` as a Size. Raises ValueError saying the form, with a hint for GB."""
    number, unit = _split(text, SIZE_FORM)
    if unit == "":
        raise ValueError(f"has no unit; expected {SIZE_FORM}")
    if unit in _DECIMAL:
        raise ValueError(f"uses {unit}; sizes are binary here, write {number}{_DECIMAL[unit]}")
    if unit not in _BYTES or number * _BYTES[unit] > LARGEST:
        raise ValueError(f"expected {SIZE_FORM}")
    return Size(number * _BYTES[unit])


def parse_percent(text: str, *, most: int = 100) -> Percent:
    """`75%` as a Percent of at most `most`. Raises ValueError saying the range."""
    form = f"a whole percentage from 0% to {most}%"
    number, unit = _split(text, form)
    if unit != "%" or number > most:
        raise ValueError(f"expected {form}")
    return Percent(number)


def parse_limit(text: str) -> Limit:
    """A size, a percentage of the machine, or `auto`. Raises ValueError saying the three."""
    if text == "auto":
        return Auto.AUTO
    if text.endswith("%"):
        return parse_percent(text)
    try:
        return parse_size(text)
    except ValueError as wrong:
        raise ValueError(_alternatives(wrong, "auto, a percentage such as 70%, or a size such as 24GiB")) from None


def parse_growth(text: str) -> Growth:
    """A size, `0%` to `10000%`, `auto` or `off`. Raises ValueError saying the four."""
    if text == "off":
        return Off.OFF
    if text.endswith("%"):
        return parse_percent(text, most=10_000)
    try:
        return parse_limit(text)
    except ValueError as wrong:
        raise ValueError(_alternatives(wrong, "auto, off, 0% to 10000%, or a size such as 2GiB")) from None


def _alternatives(wrong: ValueError, forms: str) -> str:
    """Keep a hint that names the mistake; otherwise name every form that would have done."""
    text = str(wrong)
    return text if text.startswith("uses ") else f"expected {forms}"


def format_duration(ms: int) -> str:
    """The shortest exact form in seconds or milliseconds: 30s, 1800s, 250ms."""
    return f"{ms // 1000}s" if ms % 1000 == 0 else f"{ms}ms"


def format_size(amount: int) -> str:
    """The shortest exact form up to GiB: 24GiB, 14848MiB, 0B."""
    if amount == 0:
        return "0B"
    for unit in ("GiB", "MiB", "KiB"):
        if amount % _BYTES[unit] == 0:
            return f"{amount // _BYTES[unit]}{unit}"
    return f"{amount}B"


def gib(amount: int) -> str:
    """Bytes for people, one decimal: `28.5 GiB`. What would read as 0.0 GiB is shown in MiB, KiB or bytes instead."""
    tenths = (amount * 10 + (1 << 29)) // (1 << 30)
    if tenths or not amount:
        return f"{tenths // 10}.{tenths % 10} GiB"
    unit = next(word for word in ("MiB", "KiB", "B") if amount >= _BYTES[word])
    whole, rest = divmod(amount, _BYTES[unit])
    return f"{whole} {unit}" if not rest else f"{amount / _BYTES[unit]:.1f} {unit}"


def larger(needed: int, there: int) -> tuple[str, str]:
    """Two amounts for people, the first of them larger: in MiB, with more decimals, or in bytes, where both would read
    the same."""
    if _read(gib(needed)) > _read(gib(there)):
        return gib(needed), gib(there)
    mib = _BYTES["MiB"]
    if needed % mib == there % mib == 0:
        return f"{needed // mib} MiB", f"{there // mib} MiB"
    for decimals in (2, 3):
        finer = tuple(f"{amount / _BYTES['GiB']:.{decimals}f} GiB" for amount in (needed, there))
        if _read(finer[0]) > _read(finer[1]):
            return finer[0], finer[1]
    return f"{needed} B", f"{there} B"


def _read(text: str) -> float:
    """What a reader takes an amount for."""
    number, unit = text.split()
    return float(number) * _BYTES[unit]


def seconds(ms: int) -> str:
    """Milliseconds for people, in whole seconds rounded up: `210s`."""
    return f"{-(-ms // 1000)}s"
