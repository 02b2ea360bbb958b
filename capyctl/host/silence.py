"""An engine that answers no gauge: is it slow, or does it hang? Told by its processes, not by patience alone.

An engine that computes may be silent for long: llama.cpp reads its gauges between two batches, and a batch of a
large model on a slow processor takes minutes. One that is stopped or deadlocked uses no processor at all. So
silence counts from the last answer and from the last moment in which a process of it got anywhere, and only a
much longer silence counts by itself. The verdict is no proof: the server closes the gate and has it looked at.
Source: lifecycle 9 (`unresponsive`), 16 (stall bound of groups); engines 12 (read again before judging).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

import attrs

from capyctl.fsm.types import ProcessIdentity

HUNG_S: Final = 15.0
"""Silent for so long, and no process of it has got anywhere meanwhile."""
BUSY_S: Final = 300.0
"""Silent for so long, whatever its processes do."""
MISSES_MIN: Final = 3
"""Gauges in a row without an answer; after a pause of the whole machine the first one says nothing."""
WORKS_SHARE: Final = 0.02
"""A process that gets less of a processor than this only keeps its timers."""
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@attrs.frozen(kw_only=True)
class Effort:
    """What the processes of an engine have used so far, and whether one of them is stopped by a signal."""

    cpu_s: float
    major_faults: int
    stopped: bool = False


def effort(processes: Iterable[ProcessIdentity]) -> Effort:
    """Blocking. A process that is gone has used nothing."""
    ticks, faults, stopped = 0, 0, False
    for process in processes:
        try:
            with open(f"/proc/{process.pid}/stat", "rb") as file:
                text = file.read()
        except OSError:
            continue
        fields = text[text.rindex(b")") + 2 :].split()
        if int(fields[19]) != process.start_ticks:
            continue
        faults += int(fields[9])
        ticks += int(fields[11]) + int(fields[12])
        stopped = stopped or fields[0] in (b"T", b"t")
    return Effort(cpu_s=ticks / _TICKS_PER_S, major_faults=faults, stopped=stopped)


@attrs.define(eq=False)
class Silence:
    """How long one engine has been silent. Times are of one monotonic clock, s.

    `why` it is to be doubted, None while it may only be slow; `hung` when moreover it does nothing.
    """

    hung: bool = False
    why: str | None = None
    _misses: int = 0
    _since: float = 0.0
    _idle_since: float = 0.0
    _effort: Effort | None = None
    _seen_at: float = 0.0

    def answered(self) -> None:
        """It answered, be it with an error: whatever it is, it is not silent."""
        self.hung, self.why, self._misses, self._effort = False, None, 0, None

    def missed(self, asked_at_s: float, now_s: float, used: Effort) -> None:
        """One more gauge without an answer."""
        if self._misses == 0:
            self._since = self._idle_since = asked_at_s
        elif self._effort is not None and self._works(now_s, self._effort, used):
            self._idle_since = now_s
        self._misses += 1
        self._effort, self._seen_at = used, now_s
        silent_s, idle_s = now_s - self._since, now_s - self._idle_since
        self.hung = self._misses >= MISSES_MIN and idle_s >= HUNG_S
        self.why = None
        if self.hung:
            how = "it is stopped by a signal" if used.stopped else "its processes do nothing"
            self.why = f"the engine has answered nothing for {silent_s:.0f} s, and {how}"
        elif self._misses >= MISSES_MIN and silent_s >= BUSY_S:
            self.why = f"the engine has answered nothing for {silent_s:.0f} s"

    def _works(self, now_s: float, before: Effort, used: Effort) -> bool:
        if used.stopped:
            return False
        worked_s = used.cpu_s - before.cpu_s
        return used.major_faults > before.major_faults or worked_s > WORKS_SHARE * (now_s - self._seen_at)
