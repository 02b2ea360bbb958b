"""Memory that a simulated engine really holds: touched pages, bytes on a simulated card, shared memory."""

from __future__ import annotations

import mmap
import os

PAGE = 4096


class OutOfMemory(Exception):
    """A card has no room for `wanted` more bytes."""

    def __init__(self, index: int, wanted: int, free: int, total: int) -> None:
        super().__init__(f"card {index}: {wanted} wanted, {free} of {total} free")
        self.index, self.wanted, self.free, self.total = index, wanted, free, total


class HostMemory:
    """Anonymous pages of this process, touched, so that they are resident."""

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []

    @property
    def bytes(self) -> int:
        return sum(len(block) for block in self._blocks)

    def resize(self, wanted: int) -> None:
        """Hold `wanted` bytes, rounded up to pages."""
        wanted = -(-wanted // PAGE) * PAGE
        while self._blocks and self.bytes > wanted:
            self._blocks.pop().close()
        if self.bytes < wanted:
            block = mmap.mmap(-1, wanted - self.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            block[::PAGE] = b"\1" * (len(block) // PAGE)
            self._blocks.append(block)


class CardMemory:
    """What this process holds on simulated cards. Without a state file every call is free and without effect."""

    def __init__(self, state: str | None) -> None:
        self._state = state
        self._held: dict[int, int] = {}

    def hold(self, index: int, wanted: int) -> None:
        """Hold `wanted` bytes in all on that card. Raises: OutOfMemory."""
        if self._state is None:
            return
        from .card import Card, OutOfCardMemory  # copied beside this file when the installation is laid out

        change = wanted - self._held.get(index, 0)
        try:
            if change > 0:
                Card(self._state).hold(index, os.getpid(), change)
            elif change < 0:
                Card(self._state).drop(index, os.getpid(), -change)
        except OutOfCardMemory:
            free, total = room(self._state, index)
            raise OutOfMemory(index, change, free, total) from None
        self._held[index] = wanted


def room(state: str, index: int) -> tuple[int, int]:
    """(free, total) bytes of a simulated card; a card without memory of its own has the machine's."""
    from .card import Card

    total = next(total for number, _, total in cards(state) if number == index)
    if total:
        return total - Card(state).used(index), total
    with open("/proc/meminfo", encoding="ascii") as stream:
        rows = {line.split(":")[0]: int(line.split()[1]) << 10 for line in stream}
    return rows["MemAvailable"], rows["MemTotal"]


def cards(state: str) -> list[tuple[int, str, int]]:
    """(index, UUID, total bytes) of every card of the state file."""
    with open(state, encoding="utf-8") as stream:
        rows = [line.split() for line in stream if line.startswith("card ")]
    return [(int(row[1]), row[2], int(row[4])) for row in rows]


def own_memory(state: str, index: int) -> bool:
    """Whether a card has memory of its own."""
    return any(number == index and total for number, _, total in cards(state))


def visible(state: str | None, environ: dict[str, str]) -> list[int]:
    """The cards that `CUDA_VISIBLE_DEVICES` lets this process see, by index or UUID, in its order."""
    if state is None:
        return []
    there = cards(state)
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return [index for index, _, _ in there]
    seen: list[int] = []
    for word in wanted.split(","):
        found = [index for index, uuid, _ in there if word.strip() in (str(index), uuid)]
        if not found:
            break  # as CUDA does: what follows an unknown name is not seen either
        seen += found
    return seen


class Segment:
    """One shared-memory file, mapped by its maker and by every process forked from it later."""

    def __init__(self, name: str, size: int) -> None:
        self.path = f"/dev/shm/{name}"
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._map[0:1] = b"\1"

    def unlink(self) -> None:
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            return  # somebody cleaned up after what looked like a crash
