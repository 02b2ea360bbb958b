"""One role per state directory: a lock that the kernel lets go of however the process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from capyctl.documents import owned, places
from capyctl.errors import Refusal


@contextlib.contextmanager
def held(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` while the block runs.

    Raises: Refusal `unavailable` naming the process that holds it, `unsafe_file`;
    Failure `insufficient_space`.
    """
    owned.check_file(str(path))
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as wrong:
        raise Refusal("unsafe_file", f"{path} cannot be opened: {wrong.strerror}") from wrong
    try:
        try:
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
    finally:
        os.close(handle)
