"""ULIDs: 48 bits of milliseconds and 80 random bits, as 26 upper-case letters of Crockford's base 32.

They sort by time as text. `new` is pure; `fresh` asks the clock and the system's randomness.
"""

from __future__ import annotations

import re
from typing import Final

_DIGITS: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_FORM: Final = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}", re.ASCII)


def new(now_ms: int, randomness: bytes) -> str:
    """The ULID of an instant (Unix ms, below 2^48) and ten random bytes.

    Raises: ValueError when either does not fit.
    """
    if not 0 <= now_ms < 1 << 48 or len(randomness) != 10:
        raise ValueError("a ULID is made of 48 bits of milliseconds and ten random bytes")
    number = now_ms << 80 | int.from_bytes(randomness)
    return "".join(_DIGITS[number >> shift & 31] for shift in range(125, -1, -5))


def fresh() -> str:
    """A ULID of now."""
    import os
    import time

    return new(time.time_ns() // 1_000_000, os.urandom(10))


def is_ulid(text: str) -> bool:
    """Whether `text` is a ULID in its one written form (upper case)."""
    return _FORM.fullmatch(text) is not None


def instant_ms(ulid: str) -> int:
    """The Unix milliseconds inside a ULID. Raises ValueError for other text."""
    if not is_ulid(ulid):
        raise ValueError("not a ULID")
    number = 0
    for digit in ulid[:10]:
        number = number << 5 | _DIGITS.index(digit)
    return number
