"""One role per state directory: a lock that the kernel lets go of however the process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from capyctl.documents import owned, places
from capyctl.errors import Refusal


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
