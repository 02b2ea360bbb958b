"""The simulated NVML's state file: the machine that a test wants, and the card memory of its simulated engines.

Standard library alone, so that a simulated engine can import this file by its path. Every change is made under
a lock and replaces the file at once; the library (nvml.c) reads it again at each call. README.md has the format.

    card = Card(os.environ["CAPYCTL_TEST_NVML"])
    card.hold(0, os.getpid(), 6 << 30)   # raises OutOfCardMemory when it is not free
    card.drop(0, os.getpid(), 5 << 30)   # parked; what is left goes when the process ends
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "CAPYCTL_TEST_NVML"  # where nvml.c finds the state file
GIB = 1 << 30

DRIVER_NOT_LOADED, GPU_IS_LOST, UNKNOWN = 9, 15, 999  # error codes of NVML that tests ask for


class OutOfCardMemory(MemoryError):
    """What a card does not have free, as CUDA would say it."""


class Card:
    """The cards of one simulated machine, by index. A new Card over the same path sees the same machine."""

    def __init__(self, state: str | os.PathLike[str]) -> None:
        self.state = Path(state)

    # --- memory: what simulated engines use ---------------------------------------------------------------

    def hold(self, index: int, pid: int, size: int, late_s: float = 0.0) -> None:
        """`size` more bytes of a card for a living process, or for nobody that NVML lists (pid 0).

        They go when the process ends, `late_s` seconds after somebody first looked and saw that it had.
        A card without memory of its own only lists them. Raises: OutOfCardMemory, ProcessLookupError.
        """
        start = _started(pid)
        if start is None:
            raise ProcessLookupError(f"no process {pid} lives")
        with self._change() as lines:
            total, used = self._total(lines, index), self._used(lines, index)
            if total and used + size > total:
                raise OutOfCardMemory(f"card {index}: {size} bytes asked for, {total - used} of {total} free")
            lines.append(f"hold {index} {pid} {start} {size} {late_s}")
            peak = max(used + size, _peak(lines, index))
            lines[:] = [line for line in lines if line.split()[:2] != ["peak", str(index)]]
            lines.append(f"peak {index} {peak}")

    def drop(self, index: int, pid: int, size: int | None = None) -> None:
        """Give `size` bytes back, or all that the process holds. Raises: ValueError when it holds less."""
        with self._change() as lines:
            left = None if size is None else self._held(lines, index, pid) - size
            if left is not None and left < 0:
                raise ValueError(f"process {pid} holds less than {size} bytes of card {index}")
            mine = [line for line in lines if line.split()[:3] == ["hold", str(index), str(pid)]]
            for line in mine:
                lines.remove(line)
            if left:
                _, _, _, start, _, late = mine[-1].split()
                lines.append(f"hold {index} {pid} {start} {left} {late}")

    def held(self, index: int, pid: int) -> int:
        """Bytes of a card that a process holds now."""
        return self._held(self._lines(), index, pid)

    def used(self, index: int) -> int:
        """Bytes of a card in use now, by anybody, the driver's own included."""
        return self._used(self._lines(), index)

    def peak(self, index: int) -> int:
        """The most bytes that were ever in use at once. Exact: use grows in `hold` alone."""
        return _peak(self._lines(), index)

    # --- faults: what tests use -----------------------------------------------------------------------------

    def fault(self, code: int | None, index: int | None = None) -> None:
        """Every call about a card, or every call at all, answers this error of NVML; None ends it."""
        self._say("fault", index, code)

    def hang(self, seconds: float | None, index: int | None = None) -> None:
        """Every call about a card, or every call at all, sleeps that long first; None ends it."""
        self._say("hang", index, seconds)

    def no_init(self, code: int | None = DRIVER_NOT_LOADED) -> None:
        """nvmlInit answers this error; None ends it."""
        with self._change() as lines:
            lines[:] = [line for line in lines if not line.startswith("init ")]
            if code is not None:
                lines.append(f"init {code}")

    def hide(self, index: int, *what: str) -> None:
        """Hide exactly these: `name`, `uuid`, `memory`, `processes` (errors), `usage` (processes without bytes)."""
        with self._change() as lines:
            lines[:] = [line for line in lines if line.split()[:2] != ["hide", str(index)]]
            lines += [f"hide {index} {one}" for one in what]

    def _say(self, word: str, index: int | None, value: float | None) -> None:
        which = "all" if index is None else str(index)
        with self._change() as lines:
            lines[:] = [line for line in lines if line.split()[:2] != [word, which]]
            if value is not None:
                lines.append(f"{word} {which} {value}")

    # --- the file ---------------------------------------------------------------------------------------------

    def write(self, *lines: str) -> Card:
        """Replace the whole machine."""
        with self._change() as now:
            now[:] = ["driver 580.95.05", "nvml 13.580.95.05", *lines]
        return self

    def _lines(self) -> list[str]:
        return self.state.read_text("utf-8").splitlines() if self.state.exists() else []

    @contextmanager
    def _change(self) -> Iterator[list[str]]:
        """The lines, to be changed in place; written when the block ends without an error."""
        with open(f"{self.state}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lines = self._lines()
            yield lines
            fresh = Path(f"{self.state}.new")
            fresh.write_text("".join(f"{line}\n" for line in lines), "utf-8")
            os.replace(fresh, self.state)

    def _holds(self, lines: list[str], index: int) -> Iterator[tuple[int, int]]:
        """(pid, bytes) of what is in use on a card; pid 0 for what nobody living holds."""
        for line in lines:
            word, *fields = line.split()
            if word == "hold" and int(fields[0]) == index:
                pid, start, size, late_s = int(fields[1]), int(fields[2]), int(fields[3]), float(fields[4])
                if _started(pid) == start:
                    yield pid, size
                elif self._lingers(pid, start, late_s):
                    yield 0, size

    def _held(self, lines: list[str], index: int, pid: int) -> int:
        return sum(size for owner, size in self._holds(lines, index) if owner == pid)

    def _used(self, lines: list[str], index: int) -> int:
        reserved = next((int(line.split()[5]) for line in lines if line.split()[:2] == ["card", str(index)]), 0)
        return reserved + sum(size for _, size in self._holds(lines, index))

    def _total(self, lines: list[str], index: int) -> int:
        for line in lines:
            if line.split()[:2] == ["card", str(index)]:
                return int(line.split()[4])
        raise ValueError(f"this machine has no card {index}")

    def _lingers(self, pid: int, start: int, late_s: float) -> bool:
        """As nvml.c: whoever first sees that the process ended leaves a mark; the memory goes that much later."""
        if late_s <= 0:
            return False
        mark = Path(f"{self.state}.{pid}.{start}.ended")
        if not mark.exists():
            mark.touch()
        return time.time() - mark.stat().st_mtime < late_s


def _peak(lines: list[str], index: int) -> int:
    return next((int(line.split()[2]) for line in lines if line.split()[:2] == ["peak", str(index)]), 0)


def _started(pid: int) -> int | None:
    """A living process's start in clock ticks after boot; None once it has ended. 0 is nobody, always there."""
    if pid == 0:
        return 0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


# --- shapes ---------------------------------------------------------------------------------------------------


def card_lines(
    index: int, total: int, *, name: str = "NVIDIA GeForce RTX 4090", reserved: int = 0, compute: str = "8 9"
) -> tuple[str, ...]:
    """One card; `total` 0 is a GPU without memory of its own."""
    return (
        f"card {index} {uuid(index)} 00000000:{index + 1:02X}:00.0 {total} {reserved}",
        f"name {index} {name}",
        f"compute {index} {compute}",
    )


def uuid(index: int) -> str:
    """The UUID of a card of these shapes."""
    return f"GPU-5ca1ab1e-0000-4000-8000-{index:012x}"


def one_card(state: str | os.PathLike[str], total: int = 24 * GIB) -> Card:
    """One card of 24 GiB."""
    return Card(state).write(*card_lines(0, total))


def two_cards(state: str | os.PathLike[str], total: int = 24 * GIB) -> Card:
    """Two equal cards."""
    return Card(state).write(*card_lines(0, total), *card_lines(1, total))


def unified(state: str | os.PathLike[str]) -> Card:
    """A GPU that uses the machine's memory."""
    return Card(state).write(*card_lines(0, 0, name="NVIDIA GB10", compute="12 1"))


def mixed(state: str | os.PathLike[str]) -> Card:
    """A GPU without memory of its own beside a card with some."""
    return Card(state).write(*card_lines(0, 0, name="NVIDIA GB10", compute="12 1"), *card_lines(1, 24 * GIB))


def no_driver(state: str | os.PathLike[str]) -> Card:
    """The library is installed and its kernel module is not loaded."""
    return Card(state).write(f"init {DRIVER_NOT_LOADED}")
