"""One role per state directory: a lock that the kernel lets go of however the process ends.

The file says the holder's pid. While the holder stops, a note of its own says until when at most: clients find no
listener then, and are told so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

from capyctl.documents import owned, places
from capyctl.errors import Refusal

NOTE = Path("run", "stopping")  # below the state root, beside whose lock it is


@contextlib.contextmanager
def held(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path`, and the directory that it is in, while the block runs.

    The file says who holds it; the directory is what cannot be unlinked while somebody works in it.
    Raises: Refusal `unavailable` naming the process that holds it, `unsafe_file`;
    Failure `insufficient_space`.
    """
    owned.check_file(str(path))
    with contextlib.ExitStack() as open_files:

        def opened(place: Path, flags: int) -> int:
            try:
                handle = os.open(place, flags | os.O_CLOEXEC, 0o600)
            except OSError as wrong:
                raise Refusal("unsafe_file", f"{place} cannot be opened: {wrong.strerror}") from wrong
            open_files.callback(os.close, handle)
            return handle

        directory = opened(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        handle = opened(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            _lock_directory(directory)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
            who = f"process {holder}" if holder.isdigit() else "another process"
            raise Refusal(
                "unavailable",
                f"{who} already runs {what} on {path.parent}; stop it, or use another --state-dir",
                details={"pid": int(holder)} if holder.isdigit() else {},
            ) from None
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        except OSError as wrong:
            raise places.no_space(str(path), wrong) from None
        yield


def _lock_directory(directory: int) -> None:
    """Raises: BlockingIOError when another process holds it. A network file system may lock files alone."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as wrong:
        if wrong.errno not in (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP):
            raise


@attrs.frozen(kw_only=True)
class Holder:
    """Who runs the role. `stops_in_s`: how long it still stops at most, None while it was not told to."""

    pid: int
    stops_in_s: int | None


def say_stopping(path: Path, for_s: float | None) -> None:
    """Note beside the lock that this process, which holds it, stops within so many seconds; None: it does not."""
    note = path.parent / NOTE
    with contextlib.suppress(OSError):  # a courtesy to clients
        if for_s is None:
            note.unlink(missing_ok=True)
        else:
            note.write_text(f"{os.getpid()} {time.time_ns() // 1_000_000 + int(for_s * 1000)}\n")


def holder(path: Path, locks: Path = Path("/proc/locks")) -> Holder | None:
    """Who holds the lock file `path` now, None where nobody does, or it cannot be known without taking it."""
    try:
        inode, pid = path.stat().st_ino, path.read_text().strip()
        taken = any(f":{inode} " in line and "FLOCK" in line for line in locks.read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not taken or not pid.isdigit():
        return None
    return Holder(pid=int(pid), stops_in_s=_stops_in_s(path.parent / NOTE, pid))


def _stops_in_s(note: Path, pid: str) -> int | None:
    try:
        who, until_ms = note.read_text().split()
        left_ms = int(until_ms) - time.time_ns() // 1_000_000
    except (OSError, ValueError):
        return None
    return max(1, -(-left_ms // 1000)) if who == pid else None
