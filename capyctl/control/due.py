"""When the world must be told the time next: a heap of deadlines, derived from the state and never stored.

A deadline here is only a reason to look. Whoever is woken compares the state's own deadline with the
event's time, so an entry that outlived its cause costs one look and nothing else.
"""

from __future__ import annotations

import heapq

import attrs

from capyctl.fsm.types import Millis


@attrs.define
class Due:
    """Deadlines by time; `key` says what to look at: ("request", id), ("instance", lane), …"""

    _heap: list[tuple[int, int, tuple[str, object]]] = attrs.field(factory=list)
    _order: int = 0

    def at(self, at_ms: Millis | None, kind: str, key: object) -> None:
        """Look at `key` once `at_ms` has come; None never comes."""
        if at_ms is not None:
            self._order += 1
            heapq.heappush(self._heap, (at_ms, self._order, (kind, key)))

    @property
    def next_ms(self) -> Millis | None:
        """The earliest deadline, or None."""
        return Millis(self._heap[0][0]) if self._heap else None

    def past(self, now_ms: Millis) -> list[tuple[str, object]]:
        """Take out every key whose deadline is not after `now_ms`, each once, in order of time."""
        taken: dict[tuple[str, object], None] = {}
        while self._heap and self._heap[0][0] <= now_ms:
            taken[heapq.heappop(self._heap)[2]] = None
        return list(taken)
