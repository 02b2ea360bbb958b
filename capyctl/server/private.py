"""Files that belong to one user: checked before they are trusted, written so that no reader sees half.

A state directory and what leads to it must be writable by nobody else: whoever can rename a directory
can put another in its place. A root-owned sticky ancestor (a temporary directory) is fine, since only
the owner may rename there. Nothing here repairs what it finds; it says what is wrong and stops.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from capyctl.errors import Refusal

OWNER_ONLY: Final = 0o077


def private_directory(path: Path) -> Path:
    """`path` as a directory of mode 0700 that only its user can change, made when absent.

    Raises: Refusal `unsafe_file` naming the path and the failed check.
    """
    check_ancestors(path)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        seen = path.lstat()
    except OSError as wrong:
        raise _unsafe(path, f"cannot be made or read: {wrong.strerror or wrong}") from wrong
    if stat.S_ISLNK(seen.st_mode):
        raise _unsafe(path, "is a symbolic link")
    if not stat.S_ISDIR(seen.st_mode):
        raise _unsafe(path, "is not a directory")
    if seen.st_uid != os.geteuid():
        raise _unsafe(path, f"belongs to user {seen.st_uid}, not to {os.geteuid()}")
    if seen.st_mode & OWNER_ONLY:
        raise _unsafe(path, f"has mode {stat.S_IMODE(seen.st_mode):04o}; chmod 700 it")
    return path


def check_ancestors(path: Path) -> None:
    """Refuse a path that somebody else could swap. Raises: Refusal `unsafe_file`."""
    if not path.is_absolute():
        raise _unsafe(path, "is not absolute")
    trusted = {0, os.geteuid()}
    for ancestor in path.parents:
        try:
            seen = ancestor.lstat()
        except FileNotFoundError:
            continue  # it will be made below a checked one
        except OSError as wrong:
            raise _unsafe(ancestor, f"cannot be read: {wrong.strerror}") from wrong
        if stat.S_ISLNK(seen.st_mode):
            raise _unsafe(ancestor, "is a symbolic link")
        if seen.st_uid not in trusted:
            raise _unsafe(ancestor, f"belongs to user {seen.st_uid}")
        sticky = seen.st_uid == 0 and seen.st_mode & stat.S_ISVTX
        if seen.st_mode & 0o022 and not sticky:
            raise _unsafe(ancestor, f"is writable by others (mode {stat.S_IMODE(seen.st_mode):04o})")


def read_private(path: Path, *, most: int) -> bytes:
    """The content of an owner-only regular file of at most `most` bytes.

    Raises: FileNotFoundError when there is none; Refusal `unsafe_file` for anything that is not such a file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as wrong:
        reason = "is a symbolic link" if wrong.errno == errno.ELOOP else f"cannot be read: {wrong.strerror}"
        raise _unsafe(path, reason) from wrong
    try:
        seen = os.fstat(handle)
        if not stat.S_ISREG(seen.st_mode):
            raise _unsafe(path, "is not a regular file")
        if seen.st_nlink != 1:
            raise _unsafe(path, f"has {seen.st_nlink} links")
        if seen.st_uid != os.geteuid():
            raise _unsafe(path, f"belongs to user {seen.st_uid}, not to {os.geteuid()}")
        if seen.st_mode & OWNER_ONLY:
            raise _unsafe(path, f"has mode {stat.S_IMODE(seen.st_mode):04o}; chmod 600 it")
        content = os.read(handle, most + 1)
    finally:
        os.close(handle)
    if len(content) > most:
        raise _unsafe(path, f"is larger than {most} bytes")
    return content


def write_private(path: Path, content: bytes, *, replace: bool = True) -> None:
    """Write an owner-only file: a reader sees the old content or the new, never half, also after a power loss.

    Raises: FileExistsError when `replace` is False and there is one; Refusal `unsafe_file` when it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.rename(temporary, path)
        else:
            os.link(temporary, path)  # unlike a rename, refuses to replace
            os.unlink(temporary)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except FileExistsError:
        raise
    except OSError as wrong:
        raise _unsafe(path, f"cannot be written: {wrong.strerror or wrong}") from wrong
    finally:
        with contextlib.suppress(FileNotFoundError):  # gone after the rename, which is the ordinary case
            os.unlink(temporary)


@contextlib.contextmanager
def held(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` while the block runs; the kernel lets go of it however the process ends.

    Raises: Refusal `unavailable` naming the process that holds it.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as wrong:
        raise _unsafe(path, f"cannot be opened: {wrong.strerror}") from wrong
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
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def _unsafe(path: Path, reason: str) -> Refusal:
    return Refusal("unsafe_file", f"{path} {reason}")
