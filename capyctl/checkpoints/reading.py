"""The bytes of a listed file, and of no other: opened without following a link, compared with what was listed.

Between the listing and the read somebody may put another file in its place, or write to it. Its stat identity is
compared when it is open and again when it was read, so what was read is one state of the listed file.

Source: security 5, E15.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO

from capyctl.checkpoints.directory import ModelFile
from capyctl.errors import Refusal

Identity = tuple[int, int, int, int, int]


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
            if identity(descriptor) != file.identity:
                raise changed(file)
            yield stream
            if identity(descriptor) != file.identity:
                raise changed(file)
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
    return Refusal("checkpoint_mismatch", f"{file.path} changed while it was read; is it still being downloaded?")


def _unreadable(file: ModelFile, error: OSError) -> Refusal:
    return Refusal("checkpoint_unusable", f"{file.path} cannot be read: {error.strerror}")
