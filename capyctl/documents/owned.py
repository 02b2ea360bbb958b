"""Files that are read because somebody named them, and files that must be their owner's alone.

A path that a user names may be a pipe that never says anything, a device that never ends, or a piece of
`/proc`: only regular files are read, without waiting, and up to a bound. What a role keeps is more than that:
no symbolic link, no second name, nobody else's, and closed to all others. A wrong file is refused and never
put right silently, since nobody knows who has used the door while it stood open.
Source: security 4, 5; config 15.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from capyctl.errors import Refusal

_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def read_regular(path: str, limit: int, called: str | None = None) -> bytes:
    """The content of a regular file, at most one byte more than `limit`: enough to see that it is too large.

    Args:
      called: how messages name the file, when not by its path.
    Raises: Refusal invalid_config naming the file and what it is instead.
    """
    called = called or path
    try:
        descriptor = os.open(path, _READ)
    except (OSError, ValueError) as wrong:  # ValueError: a NUL in the path
        raise Refusal("invalid_config", f"{called}: {_why(wrong)}") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise Refusal("invalid_config", f"{called}: is {_kind(mode)}; expected a regular file")
        content = b""
        while len(content) <= limit and (piece := os.read(descriptor, limit + 1 - len(content))):
            content += piece
    except OSError as wrong:
        raise Refusal("invalid_config", f"{called}: cannot be read: {_why(wrong)}") from None
    finally:
        os.close(descriptor)
    return content


def _why(wrong: OSError | ValueError) -> str:
    return (wrong.strerror if isinstance(wrong, OSError) else None) or str(wrong)


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
        (stat.S_ISLNK, "a symbolic link"),
    )
    return next((name for is_it, name in kinds if is_it(mode)), "something else")


def private_directory(path: Path) -> Path:
    """Make `path` and whatever is missing above it, each 0700. One that is there is left as it is.

    Every directory that CapyCTL keeps something in is made here: `parents=True` leaves those above to the umask.
    Raises: OSError.
    """
    for missing in reversed([above for above in path.parents if not above.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def check_file(path: str) -> None:
    """Refuse a file of the state that is not its owner's alone; one that is missing is fine.

    Raises: Refusal unsafe_file naming the path, what is wrong with it, and the way out.
    """
    seen = _look(path)
    if seen is None:
        return
    if not stat.S_ISREG(seen.st_mode):
        why = f"it is {_kind(seen.st_mode)}; expected a regular file"
    elif seen.st_nlink != 1:
        why = "it has a second name"
    else:
        why = _shared(seen, path, "600")
    if why:
        raise Refusal("unsafe_file", f"{path} is not used: {why}")


def check_directory(path: str) -> None:
    """Refuse a directory of the state that is not its owner's alone; one that is missing is fine.

    Raises: Refusal unsafe_file, as `check_file`.
    """
    seen = _look(path)
    if seen is None:
        return
    if not stat.S_ISDIR(seen.st_mode):
        why = f"it is {_kind(seen.st_mode)}; expected a directory"
    else:
        why = _shared(seen, path, "700")
    if why:
        raise Refusal("unsafe_file", f"{path} is not used: {why}")


def _look(path: str) -> os.stat_result | None:
    """What is there; None where nothing is, or nobody may look: whoever opens it says so. Raises: Refusal."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, PermissionError):
        return None
    except OSError as wrong:
        raise Refusal("unsafe_file", f"{path} cannot be used: {wrong.strerror}") from None


def _shared(seen: os.stat_result, path: str, mode: str) -> str:
    """What opens it to others, or nothing."""
    if seen.st_uid not in (0, os.geteuid()) and os.geteuid() != 0:
        return "another user owns it"
    if seen.st_mode & 0o077:
        open_to = f"its mode is {stat.S_IMODE(seen.st_mode):04o}, so others may reach it"
        return f"{open_to}. When nobody has changed it: chmod {mode} {path}"
    return ""
