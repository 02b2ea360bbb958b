"""Ports for what tests start: test processes of one machine share none, however many run at the same time.

A role looks for a free port in its range, and the engine listens there a moment later. Two roles with the same range
could both find it free, and llama.cpp shares a port with whoever else listens on it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import Final

FIRST, LAST = 9_000, 17_999
"""Above CapyCTL's own defaults, below the demo's and the kernel's ports for connections."""

BLOCK: Final = 250

_blocks: list[int] = []  # descriptors: a block is claimed for as long as this process lives
_next, _end = 0, 0


def neighbours(count: int) -> int:
    """The first of `count` neighbouring ports that only this process uses, until it ends."""
    global _next, _end
    assert count <= BLOCK, count
    if _next + count > _end:
        _next = _claim()
        _end = _next + BLOCK
    first, _next = _next, _next + count
    return first


def _claim() -> int:
    place = Path(tempfile.gettempdir()) / f"capyctl-test-ports-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    for first in range(FIRST, LAST + 2 - BLOCK, BLOCK):
        block = os.open(place / str(first), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(block, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(block)
            continue
        _blocks.append(block)  # one that other programs use in part stays claimed too: nobody looks at it again
        if all(_is_free(port) for port in range(first, first + BLOCK)):
            return first
    raise AssertionError(f"every block of ports is taken by tests that run, or by other programs: {place}")


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", port))
        except OSError:
            return False
    return True
