"""Signals that mean nothing to a role, and that would end it by default: a mistyped kill must not cut answers.

What ends a role in order is in `standalone`; SIGQUIT and the signals of faults keep their defaults, for cores.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Final

STRAYS: Final = frozenset(
    {signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGPWR}
    | set(range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
)


def ignore_strays() -> None:
    """Handle them by doing nothing. Ignored they would be ignored in every engine too; a handler ends at the exec."""
    for number in STRAYS:
        signal.signal(number, _nothing)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Nobody meant it for us."""
