"""Faults of routes, chosen live by the knob `faults`: a list of `{"route": ..., "then": ..., ...}`.

route     path, `METHOD path`, or `*`; a query is not looked at
times     how many requests meet it; None is every one from here on
wait_s    before anything is done
perform   whether the request is carried out at all (default true; false for `hang` and `status` of chat)
then      answer (default), hang (never answers), close (no answer, connection closed), reset (RST),
          die (the front ends before it answers), answer_then_die
status    instead of the real one, with `body` (text or JSON) and `pad_bytes` of text in it
"""

from __future__ import annotations

import threading
from typing import Any

from .knobs import Knobs

Fault = dict[str, Any]


class Faults:
    """Which fault a request meets. Counts of `times` are kept per list: a changed list starts anew."""

    def __init__(self, knobs: Knobs) -> None:
        self._knobs = knobs
        self._lock = threading.Lock()
        self._list: list[Fault] = []
        self._met: list[int] = []

    def take(self, method: str, path: str) -> Fault | None:
        faults: list[Fault] = self._knobs.faults
        with self._lock:
            if faults != self._list:
                self._list, self._met = faults, [0] * len(faults)
            for number, fault in enumerate(faults):
                if fault["route"] not in ("*", path, f"{method} {path}"):
                    continue
                times = fault.get("times")
                if times is not None and self._met[number] >= times:
                    continue
                self._met[number] += 1
                return fault
        return None
