"""When the world must be told the time next: deadlines by what to look at, derived from the state and never stored.

A deadline here is only a reason to look. Whoever is woken compares the state's own deadline with the
event's time and asks to be woken again if that is still ahead, so each key has one entry: the earliest.
"""

from __future__ import annotations

import heapq

import attrs

from capyctl.fsm.types import Millis

Key = tuple[str, object]
"""What to look at: ("request", id), ("lane", lane), ("switch", id), …"""

STALE_MIN = 64  # forgotten entries that a heap may carry before it is made anew


@attrs.define
class Due:
    """The earliest deadline of each key."""

    _earliest: dict[Key, Millis] = attrs.field(factory=dict)
    _heap: list[tuple[Millis, int, Key]] = attrs.field(factory=list)
    _order: int = 0

    def at(self, at_ms: Millis | None, kind: str, key: object) -> None:
        """Look at `key` once `at_ms` has come; None never comes. A look that is due earlier stays."""
        if at_ms is None:
            return
        entry = (kind, key)
        known = self._earliest.get(entry)
        if known is None or at_ms < known:
            self._earliest[entry] = at_ms
            self._order += 1
            heapq.heappush(self._heap, (at_ms, self._order, entry))

    def forget(self, kind: str, key: object) -> None:
        """Nobody needs to look at `key` any more."""
        if self._earliest.pop((kind, key), None) is not None and len(self._heap) > STALE_MIN + 2 * len(self._earliest):
            self._heap = [one for one in self._heap if self._earliest.get(one[2]) == one[0]]
            heapq.heapify(self._heap)

    def when(self, kind: str, key: object) -> Millis | None:
        """When `key` is looked at next."""
        return self._earliest.get((kind, key))

    @property
    def next_ms(self) -> Millis | None:
        """The earliest deadline, or None."""
        while self._heap and self._earliest.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def past(self, now_ms: Millis) -> list[Key]:
        """Take out every key whose deadline is not after `now_ms`, in order of time."""
        taken: list[Key] = []
        while (next_ms := self.next_ms) is not None and next_ms <= now_ms:
            key = heapq.heappop(self._heap)[2]
            del self._earliest[key]
            taken.append(key)
        return taken
