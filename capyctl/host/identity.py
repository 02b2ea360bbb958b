"""Who a process is, and whether it is still there. Nothing here signals anything.

A pid is reused, so a process is named by (pid, boot id, start ticks). Presence has three values:
"could not see" is not "gone". A zombie with a matching triple is gone: it holds no memory and runs
nothing, and under a PID 1 that does not reap it may stay for ever. A thread-group leader that has
exited while its threads run looks like a zombie too, so the thread count decides.
Source: lifecycle 2 (P-GONE, P-SAME), 14.
"""

from __future__ import annotations

import ctypes
import enum
import os
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import attrs
import trio

from capyctl.fsm.types import ProcessIdentity, Role

PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36
LOOKS_AT_NOBODY = 5  # at a group that exists, and in which each look found nobody alive
_STAT_BYTES = 4096  # one read is the whole line: a name of 64 bytes and 51 numbers


class Presence(enum.Enum):
    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


@attrs.frozen(kw_only=True)
class Stat:
    """What /proc/<pid>/stat says: fields 3-6, 20 and 22."""

    pid: int
    state: str
    ppid: int
    group: int
    session: int
    threads: int
    start_ticks: int

    @property
    def dead(self) -> bool:
        """A zombie (or nearly reaped) whose last thread has ended."""
        return self.state in "ZXx" and self.threads <= 1


@lru_cache(maxsize=8)
def boot_id(proc: Path = PROC) -> str:
    """The id of this boot of the kernel, which outlives whoever asks: read once."""
    return (proc / "sys/kernel/random/boot_id").read_text("ascii").strip()


def read_stat(pid: int, proc: Path = PROC) -> Stat | None:
    """The process's stat, None when no such process exists. Raises: OSError when it cannot be seen."""
    try:
        descriptor = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # of every process, so without a stream
        try:
            text = os.read(descriptor, _STAT_BYTES)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name stands in parentheses and may hold any byte, so the fields are counted from the last one.
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(
        pid=pid,
        state=fields[0].decode("ascii"),
        ppid=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
    )


def identify(pid: int, role: Role = Role.API, number: int = 0) -> ProcessIdentity | None:
    """The identity of a running process, None when it is gone. Raises: OSError when it cannot be seen."""
    stat = read_stat(pid)
    if stat is None:
        return None
    return ProcessIdentity(pid=pid, boot_id=boot_id(), start_ticks=stat.start_ticks, role=role, number=number)


def presence(process: ProcessIdentity, proc: Path = PROC) -> Presence:
    """Whether exactly that process still runs."""
    try:
        if boot_id(proc) != process.boot_id:
            return Presence.GONE
        stat = read_stat(process.pid, proc)
    except OSError:
        return Presence.UNKNOWN
    if stat is None:
        return Presence.UNKNOWN if proc is PROC and _signals_reach(process.pid) else Presence.GONE
    if stat.start_ticks != process.start_ticks or stat.dead:
        return Presence.GONE
    return Presence.ALIVE


def _signals_reach(pid: int) -> bool:
    """Whether the kernel knows a process that /proc hides (hidepid) or that appeared just now."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def everyone(proc: Path = PROC, among: Callable[[int], bool] | None = None) -> Iterator[Stat]:
    """Every process that can be seen, of those pids that may be meant. Raises: OSError when /proc cannot be read."""
    for entry in os.listdir(proc):
        if entry.isdigit() and (among is None or among(int(entry))):
            stat = read_stat(int(entry), proc)
            if stat is not None:
                yield stat


def descendants(pids: Iterable[int], proc: Path = PROC) -> set[int]:
    """Children of these processes, their children, and so on: found at once, where the kernel lists them.

    Those whose parent has ended are somebody else's by now, so this is a part of a launch and never a proof.
    """
    found: set[int] = set()
    asked = [*pids]
    while asked:
        new = _children(proc / str(asked.pop()) / "task") - found
        found |= new
        asked += new
    return found


def _children(tasks: Path) -> set[int]:
    """Whom the threads of one process forked; none of it when it ends meanwhile, or where no such lists are kept."""
    try:
        lists = [(tasks / task / "children").read_bytes() for task in os.listdir(tasks)]
    except OSError:
        return set()
    return {int(pid) for one in lists for pid in one.split()}


def group_members(leader: ProcessIdentity, proc: Path = PROC) -> tuple[Stat, ...]:
    """Living processes of the group, or of the session, that `leader` was spawned to lead.

    `killpg(pgid, 0)` succeeds on zombies, so the group is scanned. The session counts too: a child
    that only made a group of its own is still one of the launch. While any process uses the number as
    its group or session, the kernel gives it to no new process; a leader with other start ticks
    therefore means that the recorded group has emptied.
    Raises: OSError when /proc cannot be read.
    """
    return tuple(stat for stat in _in_group(leader, proc) if not stat.dead)


def group_left(leader: ProcessIdentity) -> tuple[Stat, ...] | None:
    """Who of the group still lives, as in `group_members`; None when somebody does whom no look meets.

    A look lists the pids first and asks about each afterwards, so processes that fork and end at once are missed by
    all of it. It is exact where nothing on the machine was forked meanwhile, and needless where the kernel knows no
    such group any more. Else only zombies that nobody reaps, the same in each look, are taken for the reason.
    Zombies that became our children (we are a sub-reaper) are reaped, except the leader, whose exit status its watch
    wants. Raises: OSError when /proc cannot be read.
    """
    unreaped: set[frozenset[int]] = set()
    for _ in range(LOOKS_AT_NOBODY):
        forks = _forks()
        members = _in_group(leader, PROC)
        alive = tuple(stat for stat in members if not stat.dead)
        if alive:
            return alive
        ours = [stat.pid for stat in members if stat.ppid == os.getpid()]
        for pid in ours:
            if pid != leader.pid:
                _reap(pid)
        if (forks is not None and _forks() == forks) or not _group_exists(leader):
            return ()
        unreaped.add(frozenset(stat.pid for stat in members) if not ours else frozenset())
    return () if len(unreaped) == 1 and all(unreaped) else None


def _forks() -> int | None:
    """How often anything was forked since the boot, None where the kernel does not say."""
    with open(PROC / "stat", "rb") as stream:
        found = [line for line in stream if line.startswith(b"processes ")]
    return int(found[0].split()[1]) if found else None


def _group_exists(leader: ProcessIdentity) -> bool:
    """Whether any process, zombies too, uses the recorded leader's number as its group."""
    try:
        os.killpg(leader.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody is there
    stat = read_stat(leader.pid)
    return boot_id() == leader.boot_id and (stat is None or stat.start_ticks == leader.start_ticks)


def _in_group(leader: ProcessIdentity, proc: Path) -> tuple[Stat, ...]:
    if boot_id(proc) != leader.boot_id:
        return ()
    at_its_pid = read_stat(leader.pid, proc)
    if at_its_pid is not None and at_its_pid.start_ticks != leader.start_ticks:
        return ()
    among = partial(_may_belong, leader.pid) if proc is PROC else None
    return tuple(stat for stat in everyone(proc, among) if leader.pid in (stat.group, stat.session))


def _may_belong(leader: int, pid: int) -> bool:
    """False when the kernel says that the process is in another group and session: it does so at a tenth of what
    reading its stat costs, and a machine has thousands of processes that are not the engine's.
    """
    try:
        return leader in (os.getpgid(pid), os.getsid(pid))
    except ProcessLookupError:
        return False
    except PermissionError:
        return True


def with_roles(
    leader: ProcessIdentity, recorded: Iterable[ProcessIdentity] = (), members: Iterable[Stat] | None = None
) -> tuple[ProcessIdentity, ...]:
    """The launch's processes: what is recorded, and whoever else lives in the group (`members`, where they are known).

    `api` leads; its direct children in start order are `worker-N`, all else is `helper-N`. A recorded
    process keeps its role and number, and a number is never given twice.
    Raises: OSError when /proc cannot be read.
    """
    known = {process: process for process in recorded} or {leader: leader}
    found = list(known.values())
    numbers = {role: max((p.number for p in found if p.role is role), default=0) for role in Role}
    living = group_members(leader) if members is None else members
    for stat in sorted(living, key=lambda s: (s.start_ticks, s.pid)):
        process = ProcessIdentity(pid=stat.pid, boot_id=leader.boot_id, start_ticks=stat.start_ticks)
        if process.pid == leader.pid or any(_same(process, other) for other in found):
            continue
        role = Role.WORKER if stat.ppid == leader.pid else Role.HELPER
        numbers[role] += 1
        found.append(attrs.evolve(process, role=role, number=numbers[role]))
    return tuple(found)


def _same(one: ProcessIdentity, other: ProcessIdentity) -> bool:
    return (one.pid, one.boot_id, one.start_ticks) == (other.pid, other.boot_id, other.start_ticks)


def become_subreaper() -> None:
    """Orphans of our engines become our children instead of PID 1's. Raises: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refused the sub-reaper")


def reap(process: ProcessIdentity) -> int | None:
    """The exit status of a child of ours that has ended (minus the signal, if one ended it); else None.

    Reaps exactly that process: a general wait would steal the children of other tasks.
    """
    stat = read_stat(process.pid)
    if stat is None or stat.start_ticks != process.start_ticks:
        return None
    return _reap(process.pid)


def _reap(pid: int) -> int | None:
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if ended else None


async def wait_gone(process: ProcessIdentity) -> int | None:
    """Wait until the process has ended and return its status if it was our child, else None.

    Works for adopted processes too. Cancelling the wait does nothing to the process.
    """
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    try:
        # The pid may have been reused before the descriptor was opened; afterwards it cannot be.
        if presence(process) is not Presence.GONE:
            await trio.lowlevel.wait_readable(fd)
    finally:
        trio.lowlevel.notify_closing(fd)
        os.close(fd)
    return reap(process)
