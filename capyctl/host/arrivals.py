"""News of `/dev/shm`: the kernel tells when a file of shared memory is made, so that its maker is looked for at once.

Whose a segment is shows only while a process has it open or mapped, and an engine may die right after it made one;
a look each few seconds would never see it. Where the kernel has no watch to give there is no news, and the looks that
go by the clock are all there is.
Source: engines 16.3; inotify(7).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from pathlib import Path

import attrs
import trio

from capyctl.host.segments import SHM

_CREATED, _MOVED_IN = 0x100, 0x80  # IN_CREATE, IN_MOVED_TO
_CLOEXEC, _NONBLOCK = 0o2000000, 0o4000  # IN_CLOEXEC, IN_NONBLOCK
READ_BYTES = 1 << 16
_log = logging.getLogger("capyctl.host.arrivals")


@attrs.define(eq=False)
class Arrivals:
    """`count` says how many bursts of news there were; whoever waits is woken by the next one. Run `run` once."""

    shm: Path = SHM
    count: int = attrs.field(init=False, default=0)
    _news: trio.Event = attrs.field(init=False, factory=trio.Event)

    async def after(self, count: int) -> None:
        """Return once `self.count` is beyond `count`; for ever where there is no news to be had."""
        while self.count <= count:
            await self._news.wait()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled. Started once nothing that is made from then on can be missed."""
        try:
            watch = _watch(self.shm)
        except OSError as error:
            _log.warning("segments.unwatched", extra={"fields": {"why": str(error)}})
            task_status.started()
            return
        try:
            task_status.started()
            while True:
                await trio.lowlevel.wait_readable(watch)
                _drain(watch)
                self.count += 1
                news, self._news = self._news, trio.Event()
                news.set()
        finally:
            trio.lowlevel.notify_closing(watch)
            os.close(watch)


def _watch(directory: Path) -> int:
    """A descriptor that is readable when a file was made in `directory`. Raises: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(_CLOEXEC | _NONBLOCK)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if libc.inotify_add_watch(descriptor, os.fsencode(directory), _CREATED | _MOVED_IN) < 0:
        number = ctypes.get_errno()
        os.close(descriptor)
        raise OSError(number, os.strerror(number))
    return int(descriptor)


def _drain(descriptor: int) -> None:
    """What happened to whom does not matter: the look that follows sees what is there."""
    while True:
        try:
            os.read(descriptor, READ_BYTES)
        except OSError as empty:
            if empty.errno == errno.EAGAIN:
                return
            raise
