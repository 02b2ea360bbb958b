"""Room for downloads: all of one is set aside before its first byte is kept, beside what others have still to write.

Source: config 5.2; memory 1.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs

from capyctl.checkpoints.sources import SOURCES
from capyctl.errors import Refusal
from capyctl.units import gib

KEPT_FREE: Final = 1 << 30


def bytes_below(directory: Path) -> int:
    """What the files below a directory take together, links not followed."""
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another fetch has just moved it
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def free_bytes(path: Path) -> int:
    """What this user may still write on the file system of a directory."""
    seen = os.statvfs(path)
    return seen.f_bavail * seen.f_frsize


@attrs.define(eq=False)
class Room:
    """What all downloads of a host may take together. Shared between the threads that fetch.

    Args:
      root: the download directory; `sources/` is below it.
      max_bytes: cap over everything below `sources/`.
    """

    root: Path
    max_bytes: int
    free: Callable[[Path], int] = free_bytes
    _lock: threading.Lock = attrs.field(factory=threading.Lock)
    _coming: dict[object, Callable[[], int]] = attrs.field(factory=dict)  # what running fetches have still to write

    def reserve(self, who: object, total: int, there: int, left: Callable[[], int], called: str) -> None:
        """Set the whole of a download aside before its first byte is kept.

        Args:
          there: how much of it lies below `sources/` already.
          left: how much is still to be written, asked whenever another download wants room.
        Raises: Refusal `too_large` over the cap; `insufficient_space` when less than 1 GiB would stay free.
        """
        need = max(0, total - there)
        with self._lock:
            others = sum(max(0, coming()) for key, coming in self._coming.items() if key is not who)
            used = bytes_below(self.root / SOURCES) + others
            if used + need > self.max_bytes:
                raise Refusal(
                    "too_large",
                    f"{called} is {gib(total)}; host.model_sources.max_bytes allows {gib(self.max_bytes)} in all, "
                    f"of which {gib(used)} are taken. Try: capyctl prune sources",
                    details={"need_bytes": need, "used_bytes": used, "limit_bytes": self.max_bytes},
                )
            free = self.free(self.root)
            if need + others + KEPT_FREE > free:
                waits = f", {gib(others)} of it for other downloads" if others else ""
                raise Refusal(
                    "insufficient_space",
                    f"{called} needs {gib(need)} below {self.root}, where {gib(free)} are free{waits}, and "
                    f"{gib(KEPT_FREE)} must stay free. Free some space there",
                    details={
                        "need_bytes": need,
                        "free_bytes": free,
                        "kept_free_bytes": KEPT_FREE,
                        "others_bytes": others,
                    },
                )
            self._coming[who] = left

    def release(self, who: object) -> None:
        """A fetch has ended, well or not."""
        with self._lock:
            self._coming.pop(who, None)
