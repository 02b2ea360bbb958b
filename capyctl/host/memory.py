"""How much memory this machine has for engines: /proc/meminfo under the tightest control group above us.

A container's limit is invisible in /proc/meminfo, and a role that plans with the machine's memory
inside a smaller group is ended by the kernel. So both versions of control groups are read, from our own
group up to the root, and the tightest limit counts. Page cache that the kernel can drop is not in use.
Source: memory 3; config 16.1; cli 8.4 (`memory_source`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs

from capyctl.fsm.types import Bytes
from capyctl.host.identity import PROC

CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes a number near 2^63 for "no limit"


@attrs.frozen(kw_only=True)
class Seen:
    """Memory at one look, bytes. `source`: meminfo, cgroup_v2:<group>, cgroup_v1:<group>, meminfo:<why not a group>."""

    capacity_bytes: Bytes
    available_bytes: Bytes
    source: str


@attrs.frozen(kw_only=True)
class _Group:
    limit: int
    used: int
    name: str


class _Unreadable(Exception):
    """A control group exists, but its limits cannot be read."""


def read_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> Seen:
    """What the machine, or the tightest control group above this process, has and has free."""
    info = _meminfo(proc)
    capacity, available, source = info["MemTotal"], info["MemAvailable"], "meminfo"
    try:
        groups = list(_limited_groups(proc, cgroups))
    except _Unreadable as unread:
        return Seen(capacity_bytes=Bytes(capacity), available_bytes=Bytes(available), source=f"meminfo:{unread}")
    for group in groups:
        if group.limit < capacity:
            capacity, source = group.limit, group.name
        available = min(available, max(0, group.limit - group.used))
    return Seen(capacity_bytes=Bytes(capacity), available_bytes=Bytes(available), source=source)


def available_beside(own_bytes: Bytes, proc: Path = PROC) -> Bytes:
    """What the machine would have available if, of all processes, only those that hold `own_bytes` held memory.

    What others hold (anonymous and shared memory, by the kernel's own sum) is added to what is available now, so
    that their coming and going changes nothing here. Control groups are left aside: they bound, they do not count
    what a GPU takes of the machine's memory.
    """
    info = _meminfo(proc)
    others = max(0, info.get("AnonPages", 0) + info.get("Shmem", 0) - own_bytes)  # some kernels do not sum them
    return Bytes(info["MemAvailable"] + others)


def _meminfo(proc: Path) -> dict[str, int]:
    rows = (line.split() for line in (proc / "meminfo").read_text("ascii").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) >= 2}


def _limited_groups(proc: Path, cgroups: Path) -> Iterator[_Group]:
    """Our group and its ancestors that have a limit. Raises: _Unreadable."""
    try:
        lines = (proc / "self/cgroup").read_text("utf-8").splitlines()
    except FileNotFoundError:  # a kernel without control groups
        return
    unified: str | None = None
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from _version_1(cgroups, path)
            return
        if number == "0" and not controllers:
            unified = path
    if unified is not None:
        yield from _version_2(cgroups, unified)


def _version_2(cgroups: Path, path: str) -> Iterator[_Group]:
    root = cgroups / "unified" if (cgroups / "unified/cgroup.controllers").exists() else cgroups
    try:
        for directory, name in _ancestry(root, path):
            limit = directory / "memory.max"
            if limit.exists() and (text := limit.read_text("ascii").strip()) != "max":
                used = int((directory / "memory.current").read_text("ascii"))
                cache = _stat(directory / "memory.stat", "inactive_file")
                yield _Group(limit=int(text), used=used - cache, name=f"cgroup_v2:{name}")
    except (OSError, ValueError):
        raise _Unreadable("cgroup_v2_unreadable") from None


def _version_1(cgroups: Path, path: str) -> Iterator[_Group]:
    try:
        for directory, name in _ancestry(cgroups / "memory", path):
            limit = int((directory / "memory.limit_in_bytes").read_text("ascii"))
            if limit < _UNLIMITED:
                used = int((directory / "memory.usage_in_bytes").read_text("ascii"))
                cache = _stat(directory / "memory.stat", "total_inactive_file")
                yield _Group(limit=limit, used=used - cache, name=f"cgroup_v1:{name}")
    except (OSError, ValueError):
        raise _Unreadable("cgroup_v1_unread") from None


def _ancestry(root: Path, path: str) -> Iterator[tuple[Path, str]]:
    """Our group's directory, then each above it up to `root`, with their names as the kernel says them.

    Inside a container the path may be the host's, while the mount shows our own group at its root;
    directories that are not there are passed over, and the root is looked at in any case.
    """
    here = Path(path.strip())
    for group in (here, *here.parents):
        directory = root / str(group).lstrip("/")
        if directory.is_dir():
            yield directory, str(group)
    if not root.is_dir():
        raise OSError(f"{root} is not mounted")


def _stat(path: Path, key: str) -> int:
    for line in path.read_text("ascii").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
