"""Shared memory that a launch left behind: `/dev/shm` segments, found while it lives and removed after its end.

Engines make them for their gauges and between their workers; one that is killed cannot remove them, and each
keeps its bytes until the next boot. They are found by who has them open or mapped, and known by device and inode.
A name says whose a segment is only where a library writes its maker's pid into it: such a name counts right after
the end of that very process, as long as nobody else has its pid. A name that an engine gives to each of its launches
says nothing: people run that engine themselves. What was there before the launch is not its own.
Removal follows the proof that the launch is gone, and never touches what somebody else has open or mapped: that is
asked of /proc, and of the kernel itself.
Source: engines 16.3.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

import attrs

from capyctl.fsm.types import ProcessIdentity
from capyctl.host import identity
from capyctl.host.identity import PROC

SHM = Path("/dev/shm")
_DELETED = " (deleted)"
_NAMED = (
    (re.compile(r"torch_(\d+)_\d+_\d+"), 10),  # PyTorch, between processes
    (re.compile(r"cuda\.shm\.[0-9a-f]+\.([0-9a-f]+)\.\d+"), 16),  # the CUDA driver: user and process in hexadecimal
    (re.compile(r"sgl_shm_\w+_(\d+)_[0-9a-f]{8}"), 10),  # SGLang, in newer releases
)
"""Names that carry the pid of their maker, and its base."""


@attrs.frozen(order=True)
class Segment:
    """One file of shared memory. Its name may be given again to another one; device and inode are its own."""

    path: str
    device: int
    inode: int


def present(shm: Path = SHM) -> frozenset[int]:
    """Inodes of every segment that exists now; blocking. What a later launch finds here is not its own."""
    found = set()
    for directory, _, names in os.walk(shm):
        for name in names:
            try:
                found.add(os.lstat(os.path.join(directory, name)).st_ino)
            except OSError:  # it went while we looked
                continue
    return frozenset(found)


def made_by(
    pids: Iterable[int], before: frozenset[int] = frozenset(), *, shm: Path = SHM, proc: Path = PROC
) -> frozenset[Segment]:
    """Segments of our own user that these processes have open or mapped, and that are not among `before`; blocking."""
    found = set()
    for path in {path for pid in pids for path in _open_paths(pid, shm, proc)}:
        segment = _segment(path)
        if segment is not None and segment.inode not in before:
            found.add(segment)
    return frozenset(found)


def named_after(processes: Iterable[ProcessIdentity], before: frozenset[int], *, shm: Path = SHM) -> frozenset[Segment]:
    """Segments of our own user whose names say that one of these processes, now gone, made them; blocking.

    The caller has just seen them end. A pid that somebody else has by now proves nothing any more.
    """
    gone = {process.pid for process in processes if _gone_and_not_followed(process)}
    found = set()
    for name in os.listdir(shm) if gone else ():
        segment = _segment(str(shm / name)) if _maker(name) in gone else None
        if segment is not None and segment.inode not in before:
            found.add(segment)
    return frozenset(found)


def _gone_and_not_followed(process: ProcessIdentity) -> bool:
    try:
        stat = identity.read_stat(process.pid)
    except OSError:  # not to be seen is not gone
        return False
    return stat is None or (stat.dead and stat.start_ticks == process.start_ticks)


def _maker(name: str) -> int | None:
    for pattern, base in _NAMED:
        match = pattern.fullmatch(name)
        if match is not None:
            return int(match[1], base)
    return None


def remove_unused(
    segments: Iterable[Segment], *, shm: Path = SHM, proc: Path = PROC
) -> tuple[frozenset[str], frozenset[str]]:
    """Unlink those that nobody has open or mapped; (paths removed, paths left in use); blocking.

    The caller has the proof that their launch is gone. A segment that may be somebody's is left.
    """
    there = {segment for segment in segments if _segment(segment.path) == segment}
    left = set(there)
    if left:
        for pid in [int(name) for name in os.listdir(proc) if name.isdigit()]:
            opened = _open_paths(pid, shm, proc)
            left = {segment for segment in left if segment.path not in opened}
    removed = frozenset(segment.path for segment in left if _remove_unopened(segment))
    return removed, frozenset(segment.path for segment in there) - removed


def _remove_unopened(segment: Segment) -> bool:
    """Unlink a segment under a write lease, which the kernel gives for a file that nobody else has open or mapped:
    its word covers processes that may not be looked at."""
    try:
        descriptor = os.open(segment.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # its owner was faster
        return False
    try:
        seen = os.fstat(descriptor)
        if (seen.st_dev, seen.st_ino) != (segment.device, segment.inode):
            return False
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        os.unlink(segment.path)
    except OSError:  # somebody has it, or nobody can say: it stays
        return False
    finally:
        os.close(descriptor)  # the lease goes with it
    return True


def _segment(path: str) -> Segment | None:
    """The segment at a path, if it is a file of our own user."""
    try:
        seen = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISREG(seen.st_mode) or seen.st_uid != os.getuid():
        return None
    return Segment(path, seen.st_dev, seen.st_ino)


def _open_paths(pid: int, shm: Path, proc: Path) -> set[str]:
    """Paths below `shm` that a process has open or mapped, as far as it may be looked at."""
    names: set[str] = set()
    try:
        maps = (proc / str(pid) / "maps").read_text("utf-8", "surrogateescape")
        entries = os.listdir(proc / str(pid) / "fd")
    except OSError:
        return names
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)  # address perms offset device inode path; the path may hold spaces
        if len(fields) == 6:
            names.add(fields[5])
    for entry in entries:
        try:
            names.add(os.readlink(proc / str(pid) / "fd" / entry))
        except OSError:  # closed while we looked
            continue
    return {name for name in names if name.startswith(f"{shm}/") and not name.endswith(_DELETED)}
