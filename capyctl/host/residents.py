"""How much of the machine's RAM processes hold together, without walking their pages more often than is worth it.

The kernel says at once what each process has mapped, and counts what several of them share once for each. Their
proportional shares add up to the truth, and cost a walk over every page: some 40 ms for a GiB of small pages, in
which the engine's own calls for memory wait. So what they share is remembered from the last walk, and a long one is
repeated only after WALK_RESTS times as long as it took.

File-backed pages are left out: the kernel counts most of them as available, so a mapped model file in the page
cache would be counted twice.
Source: memory 3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs

from capyctl.fsm.types import Bytes, ProcessIdentity
from capyctl.host.identity import PROC, Presence, presence

WALK_RESTS = 50  # between two walks, in lengths of one: at most 2 % of a core
WALK_SHORT_S = 0.02  # a walk that needs less of a core is repeated whenever somebody asks
WALKS_KEPT = 64
_MAPPED = ("RssAnon:", "RssShmem:")
_SHARES = ("Pss_Anon:", "Pss_Shmem:")


@attrs.frozen
class _Walk:
    """What processes shared when their pages were walked, bytes; and when it may be done again, seconds."""

    shared: int
    again_at: float


@attrs.define(eq=False, kw_only=True)
class Residents:
    """Reads what processes hold; blocking, for one thread at a time. `now` and `used` are of a clock and of a core."""

    proc: Path = PROC
    now: Callable[[], float] = time.monotonic
    used: Callable[[], float] = time.thread_time
    _walks: dict[tuple[ProcessIdentity, ...], _Walk] = attrs.field(factory=dict)

    def held(self, processes: Iterable[ProcessIdentity]) -> Bytes:
        """Bytes that the living ones hold: exact, or less what they shared at the last walk."""
        alive = self._alive(processes)
        mapped = self._mapped(alive)
        walk = self._walks.get(alive)
        if len(alive) < 2 or (walk is not None and self.now() < walk.again_at):
            return Bytes(max(0, mapped - (0 if walk is None else walk.shared)))
        return self._walk(alive, mapped)

    def held_at_most(self, processes: Iterable[ProcessIdentity], enough: Bytes) -> Bytes:
        """Bytes that the living ones do not exceed: exact unless what they have mapped is within `enough` anyway."""
        alive = self._alive(processes)
        mapped = self._mapped(alive)
        walk = self._walks.get(alive)
        if len(alive) < 2 or (walk is not None and self.now() < walk.again_at and mapped <= enough):
            return Bytes(mapped)
        return self._walk(alive, mapped)

    def _alive(self, processes: Iterable[ProcessIdentity]) -> tuple[ProcessIdentity, ...]:
        return tuple(p for p in processes if presence(p, self.proc) is Presence.ALIVE)

    def _mapped(self, alive: tuple[ProcessIdentity, ...]) -> int:
        return sum(_sum(self.proc / str(process.pid) / "status", _MAPPED) for process in alive)

    def _walk(self, alive: tuple[ProcessIdentity, ...], mapped: int) -> Bytes:
        began, total = self.used(), 0
        for process in alive:
            place = self.proc / str(process.pid)
            total += _sum(place / "smaps_rollup", _SHARES) or _sum(place / "status", _MAPPED)
        took = self.used() - began
        rest = WALK_RESTS * took if took > WALK_SHORT_S else 0.0
        self._walks.pop(alive, None)  # the newest is last
        self._walks[alive] = _Walk(max(0, mapped - total), self.now() + rest)
        if len(self._walks) > WALKS_KEPT:
            del self._walks[next(iter(self._walks))]
        return Bytes(total)


def _sum(path: Path, keys: tuple[str, ...]) -> int:
    """The named rows of a file of `Name: N kB`, in bytes; 0 when it cannot be read (it ended)."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(keys))
