"""The wall clock of evidence, the same one that the server stamps its events with."""

from __future__ import annotations

import time

from capyctl.fsm.types import Millis


def now_ms() -> Millis:
    """Now, in Unix milliseconds."""
    return Millis(time.time_ns() // 1_000_000)
