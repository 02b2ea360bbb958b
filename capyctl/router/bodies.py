"""How many bytes of clients' bodies are held here: those that arrive, and those that wait for a place.

One total for all of them, `max_buffered_bytes_total`. A body is counted by the bytes that have come, not
by what its head announces, so that a slow sender takes no room with a promise. A body that is alone always
has room up to its own bound: it would never be served otherwise.
"""

from __future__ import annotations

import attrs


@attrs.define(eq=False)
class Bodies:
    """The total and its bound, in bytes."""

    bytes_max: int
    held: int = 0


@attrs.define(eq=False)
class Share:
    """What one request adds to the total."""

    _all: Bodies
    _bytes: int = 0

    def take(self, count: int) -> bool:
        """Count bytes that have come. False, and nothing counted, when there is no room for them."""
        others = self._all.held - self._bytes
        if others and self._all.held + count > self._all.bytes_max:
            return False
        self.hold(count)
        return True

    def hold(self, count: int) -> None:
        """Count bytes that were let in before."""
        self._bytes += count
        self._all.held += count

    def release(self) -> None:
        """Its body is on its way upstream, or dropped."""
        self._all.held -= self._bytes
        self._bytes = 0
