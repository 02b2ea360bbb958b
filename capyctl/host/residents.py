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
_MAPPED = ("RssAnon:", "RssShmem:")  # the kinds of pages, which are never the same ones
_SHARES = ("Pss_Anon:", "Pss_Shmem:")
_NOTHING = (0, 0)


@attrs.frozen
class _Kind:
    """What processes have mapped of one kind, bytes: all of them, counting each for itself, and the largest."""

    together: int
    largest: int


@attrs.frozen
class _Walk:
    """What processes shared when their pages were walked, bytes of each kind; when to walk again, seconds."""

    shared: tuple[int, ...]
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
        if len(alive) < 2:
            return _sum_of(mapped)
        if walk is not None and self.now() < walk.again_at:
            kinds = zip(mapped, walk.shared, strict=True)
            return Bytes(sum(max(kind.largest, kind.together - shared) for kind, shared in kinds))
        return self._walk(alive, mapped)

    def held_at_most(self, processes: Iterable[ProcessIdentity], enough: Bytes) -> Bytes:
        """Bytes that the living ones do not exceed: exact unless what they have mapped is within `enough` anyway."""
        alive = self._alive(processes)
        mapped = self._mapped(alive)
        walk = self._walks.get(alive)
        if len(alive) < 2 or (walk is not None and self.now() < walk.again_at and _sum_of(mapped) <= enough):
            return _sum_of(mapped)
        return self._walk(alive, mapped)

    def _alive(self, processes: Iterable[ProcessIdentity]) -> tuple[ProcessIdentity, ...]:
        return tuple(p for p in processes if presence(p, self.proc) is Presence.ALIVE)

    def _mapped(self, alive: tuple[ProcessIdentity, ...]) -> tuple[_Kind, ...]:
        each = [_rows(self.proc / str(process.pid) / "status", _MAPPED) or _NOTHING for process in alive]
        return tuple(_Kind(sum(of), max(of, default=0)) for of in zip(*each, strict=True)) or (_Kind(0, 0),) * 2

    def _walk(self, alive: tuple[ProcessIdentity, ...], before: tuple[_Kind, ...]) -> Bytes:
        began, found = self.used(), []
        for process in alive:
            place = self.proc / str(process.pid)
            found.append(_rows(place / "smaps_rollup", _SHARES) or _rows(place / "status", _MAPPED) or _NOTHING)
        held, shared = 0, []
        # What they took or gave back meanwhile was not shared, so that the smaller figure counts.
        for was, now, shares in zip(before, self._mapped(alive), zip(*found, strict=True), strict=True):
            kind = max(sum(shares), min(was.largest, now.largest))
            held += kind
            shared.append(max(0, min(was.together, now.together) - kind))
        took = self.used() - began
        rest = WALK_RESTS * took if took > WALK_SHORT_S else 0.0
        self._walks.pop(alive, None)  # the newest is last
        self._walks[alive] = _Walk(tuple(shared), self.now() + rest)
        if len(self._walks) > WALKS_KEPT:
            del self._walks[next(iter(self._walks))]
        return Bytes(held)


def _sum_of(kinds: Iterable[_Kind]) -> Bytes:
    return Bytes(sum(kind.together for kind in kinds))


def _rows(path: Path, keys: tuple[str, ...]) -> tuple[int, ...] | None:
    """The named rows of a file of `Name: N kB`, in bytes; None when it has none of them or has ended."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    rows = {key: int(line.split()[1]) * 1024 for line in lines for key in keys if line.startswith(key)}
    return tuple(rows.get(key, 0) for key in keys) if rows else None
