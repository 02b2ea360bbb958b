"""How views say points in time and amounts of bytes: as decimal strings, which no reader of JSON rounds (api 5.1).

Counts and spans of time are numbers, and so is everything of the live load.
"""

from __future__ import annotations

from collections.abc import Mapping

from capyctl.fsm.types import Bytes, Domain, Millis


def instant(at_ms: Millis | None) -> str | None:
    """A point in time, in Unix milliseconds; None where there is none."""
    return None if at_ms is None else str(at_ms)


def size(count: int | None) -> str | None:
    """Bytes; None where nobody knows them."""
    return None if count is None else str(count)


def sizes(counts: Mapping[Domain, Bytes] | Mapping[str, int]) -> dict[str, str]:
    """Bytes by domain, or by another name."""
    return {name: str(count) for name, count in counts.items()}
