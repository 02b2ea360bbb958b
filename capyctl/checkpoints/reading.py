"""The bytes of a listed file, and of no other: opened without following a link, compared with what was listed.

Between the listing and the read somebody may put another file in its place, or write to it. Its stat identity is
compared when it is open and again when it was read, so what was read is one state of the listed file.

A second name, or another mode, changes the identity as a write does that sets the time back: only listing and reading
it once more tells them apart. `steadily` does that.

Source: security 5, E15.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from typing import Final, TypeVar

from capyctl.checkpoints.directory import ModelFile
from capyctl.errors import Refusal

Identity = tuple[int, int, int, int, int]
T = TypeVar("T")

LOOKS_MAX: Final = 5
"""How often files are listed and read, while their status changes each time."""


class StatusChanged(Refusal):
    """A file is the one that was listed, as long and as old as it was, and its status changed: perhaps nothing else."""


def steadily(look: Callable[[], T]) -> T:
    """What `look` finds, which lists and reads files; looked again where no more than a file's status changed.

    Raises: Refusal as `look`; `StatusChanged` where that goes on.
    """
    for _ in range(LOOKS_MAX - 1):
        try:
            return look()
        except StatusChanged:
            pass  # it is listed anew, as it is now
    return look()


@contextmanager
def opened(file: ModelFile) -> Iterator[FileIO]:
    """The file, unbuffered, from its beginning.

    Raises: Refusal `checkpoint_unusable` when it cannot be read; `checkpoint_mismatch` when it is not, or no longer,
      what was listed.
    """
    try:
        descriptor = os.open(file.real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _unreadable(file, error) from None
    with open(descriptor, "rb", buffering=0) as stream:
        try:
            _check(file, descriptor)
            yield stream
            _check(file, descriptor)
        except OSError as error:
            raise _unreadable(file, error) from None


def read_whole(file: ModelFile, most: int) -> bytes:
    """All bytes of a file of at most `most` bytes. Raises: Refusal as `opened`, and for a longer file."""
    if file.size_bytes > most:
        raise Refusal("checkpoint_unusable", f"{file.path} has {file.size_bytes} bytes; at most {most} are read")
    with opened(file) as stream:
        return read(stream, file.size_bytes)


def read(stream: FileIO, size: int) -> bytes:
    """`size` bytes, fewer only where the file ends."""
    pieces = []
    while size > 0:
        piece = stream.read(min(size, 1 << 20))
        if not piece:
            break
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def identity(descriptor: int) -> Identity:
    """The stat identity of an open file."""
    status = os.fstat(descriptor)
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino)


def changed(file: ModelFile) -> Refusal:
    return Refusal("checkpoint_mismatch", _changed(file))


def _changed(file: ModelFile) -> str:
    return f"{file.path} changed while it was read; is it still being downloaded?"


def _check(file: ModelFile, descriptor: int) -> None:
    now = identity(descriptor)
    if now == file.identity:
        return
    if _but_for_status(now) == _but_for_status(file.identity):
        raise StatusChanged("checkpoint_mismatch", _changed(file))
    raise changed(file)


def _but_for_status(identity: Identity) -> tuple[int, ...]:
    size, mtime, _, device, inode = identity
    return (size, mtime, device, inode)


def _unreadable(file: ModelFile, error: OSError) -> Refusal:
    return Refusal("checkpoint_unusable", f"{file.path} cannot be read: {error.strerror}")
