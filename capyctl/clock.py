"""What time it is: Unix milliseconds that never jump.

Deadlines hold when somebody sets the machine's clock (a year ahead, or back): the wall clock is read
once, and the time since then is counted by the kernel, sleep of the machine included.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from capyctl.fsm.types import Millis

Clock = Callable[[], Millis]
"""Says now, in Unix milliseconds."""


def steady() -> Clock:
    """A clock for a role's life, anchored at the wall clock of this moment."""
    anchor_ms = time.time_ns() // 1_000_000 - _since_boot_ms()
    return lambda: Millis(anchor_ms + _since_boot_ms())


def _since_boot_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


now_ms: Clock = steady()
"""The clock of this process: what the host stamps evidence with and the server its events agree, whatever is set."""


def of_the_wall(at_ms: Millis) -> Millis:
    """By this process's clock: a point in time that somebody else gave by the machine's clock as it is set now.

    Apart by less than a second they count as one: two readings are never of the same moment.
    """
    ahead_ms = now_ms() - time.time_ns() // 1_000_000
    return at_ms if abs(ahead_ms) < 1_000 else Millis(at_ms + ahead_ms)
