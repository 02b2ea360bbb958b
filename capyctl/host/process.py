"""Starting a process so that nobody can lose it, and ending one so that it is certain.

Spawn is gated (W3): the child blocks on a pipe, its identity is made durable by the caller, and only
then does it become the engine. Had we started the engine at once, a crash in the microseconds between
fork and record would leave an engine that holds memory and that nobody knows.
Ending goes SIGTERM to the group, grace, SIGKILL to the group and to every recorded process, and ends
in P-GONE or in "not proven"; a process whose triple does not match is never signalled.
Source: engines 5, 16.2; lifecycle 14, 17.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs
import trio

from capyctl.clock import now_ms
from capyctl.errors import Failure
from capyctl.fsm.proofs import Gone
from capyctl.fsm.types import Incarnation, Millis, ProcessIdentity, Role
from capyctl.host import identity
from capyctl.host.identity import Presence

GATE_PROGRAM = Path(__file__).with_name("gate.py")
GRACE_S = 15.0  # from SIGTERM to SIGKILL
KILL_S = 5.0  # from SIGKILL to "not proven"
POLL_S = 0.2
EXEC_S = 30.0  # a stuck file system must not hold a launch for ever


@attrs.define
class Gated:
    """A spawned process that waits at its gate. Open it once, or close it and nothing ever ran."""

    process: ProcessIdentity
    _gate: int
    _verdict: int

    async def open(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Let it become `argv`. Raises: Failure `launch_failed` when the exec failed; the process is ending then."""
        order = json.dumps({"argv": list(argv), "env": dict(env)}).encode() + b"\n"
        gate, self._gate = trio.lowlevel.FdStream(self._gate), -1
        verdict, self._verdict = trio.lowlevel.FdStream(self._verdict), -1
        async with gate, verdict:
            try:
                with trio.fail_after(EXEC_S):
                    await gate.send_all(order)
                    errno = await verdict.receive_some()
            except trio.BrokenResourceError:
                raise Failure("launch_failed", "the process ended at its gate, before it became the engine") from None
            except trio.TooSlowError:
                raise Failure("launch_failed", f"{argv[0]} could not be executed within {EXEC_S:.0f} s") from None
        if errno:
            raise Failure("launch_failed", f"{argv[0]} cannot be executed: {os.strerror(int(errno))}")
        # A gate that was killed leaves an empty verdict as well; readiness sees the exit at once.

    def close(self) -> None:
        """Close the gate: a process that never got its order ends by itself."""
        for fd in (self._gate, self._verdict):
            if fd >= 0:
                os.close(fd)
        self._gate = self._verdict = -1


def spawn_gated(output: int) -> Gated:
    """Start the gate program as leader of its own session, with `output` as stdout and stderr.

    Its environment is empty, its input /dev/null, its directory / and its umask 077. It gets no
    parent-death signal: an engine outlives the role. Nothing is awaited between the spawn and the
    return, so no cancellation can come between the process and its identity.
    Raises: Failure `launch_failed` when the machine could not start a process.
    """
    gate_read, gate_write = os.pipe()
    verdict_read, verdict_write = os.pipe()
    try:
        pid = start(
            [sys.executable, "-I", "-S", str(GATE_PROGRAM)],
            stdin=None,
            stdout=output,
            extra={3: gate_read, 4: verdict_write},
        )
    except OSError as error:
        os.close(gate_write)
        os.close(verdict_read)
        raise Failure("launch_failed", f"no process could be started: {error.strerror}") from error
    finally:
        os.close(gate_read)
        os.close(verdict_write)
    process = identity.identify(pid, Role.API)
    if process is None:  # cannot be: an unreaped child of ours keeps its entry
        os.close(gate_write)
        os.close(verdict_read)
        raise Failure("launch_failed", "the process vanished before it could be identified")
    return Gated(process, gate_write, verdict_read)


def start(argv: Sequence[str], *, stdin: int | None, stdout: int | None, extra: Mapping[int, int]) -> int:
    """Spawn `argv` with an empty environment as leader of a new session; returns the pid.

    `stdin` and `stdout` None are /dev/null; stderr goes where stdout goes. `extra` maps descriptors of
    the child to ours. All of ours are close-on-exec, so the child holds these and no others.
    Raises: OSError.
    """
    # Ours may have the very numbers that the child is to have; copies above them cannot collide.
    copies: list[int] = []

    def copy(fd: int) -> int:
        copies.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100))
        return copies[-1]

    try:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        copies.append(null)
        actions: list[tuple[int, int, int]] = [
            (os.POSIX_SPAWN_DUP2, copy(null if stdin is None else stdin), 0),
            (os.POSIX_SPAWN_DUP2, copy(null if stdout is None else stdout), 1),
            (os.POSIX_SPAWN_DUP2, copy(null if stdout is None else stdout), 2),
        ]
        actions += [(os.POSIX_SPAWN_DUP2, copy(ours), theirs) for theirs, ours in extra.items()]
        return os.posix_spawn(
            argv[0],
            list(argv),
            {},
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXFSZ),
        )
    finally:
        for fd in copies:
            os.close(fd)


@attrs.frozen(kw_only=True)
class Remains:
    """What is left of a launch at one look. `unknown` could not be seen, which is not gone."""

    alive: tuple[ProcessIdentity, ...]
    unknown: tuple[ProcessIdentity, ...]
    group: tuple[int, ...]  # living pids of the group, recorded or not
    absent: frozenset[ProcessIdentity]
    seen_at_ms: Millis

    @property
    def nothing(self) -> bool:
        return not (self.alive or self.unknown or self.group)

    def __str__(self) -> str:
        parts = [f"pid {p.pid} ({p.role.value}) is alive" for p in self.alive]
        parts += [f"pid {p.pid} ({p.role.value}) or its group could not be seen" for p in self.unknown]
        recorded = {p.pid for p in self.alive}
        parts += [f"pid {pid} is in its group" for pid in self.group if pid not in recorded]
        return "; ".join(parts) or "nothing is left"


def look(processes: Iterable[ProcessIdentity]) -> Remains:
    """Observe every recorded process and the group of the `api` among them."""
    by_presence: dict[Presence, list[ProcessIdentity]] = {value: [] for value in Presence}
    group: tuple[int, ...] = ()
    for process in processes:
        by_presence[identity.presence(process)].append(process)
        if process.role is Role.API:
            try:
                left = identity.group_left(process)
            except OSError:
                left = None
            if left is None:
                by_presence[Presence.UNKNOWN].append(process)
            else:
                group = tuple(member.pid for member in left)
    return Remains(
        alive=tuple(by_presence[Presence.ALIVE]),
        unknown=tuple(by_presence[Presence.UNKNOWN]),
        group=group,
        absent=frozenset(by_presence[Presence.GONE]) - set(by_presence[Presence.UNKNOWN]),
        seen_at_ms=now_ms(),
    )


def proof_of(incarnation: Incarnation, processes: Sequence[ProcessIdentity], remains: Remains) -> Gone:
    """P-GONE out of a look that found nothing."""
    return Gone(
        incarnation=incarnation,
        processes=tuple(processes),
        absent=remains.absent,
        group_empty=not remains.group,
        observed_at_ms=remains.seen_at_ms,
    )


async def put_down(processes: Sequence[ProcessIdentity], grace_s: float = GRACE_S, kill_s: float = KILL_S) -> Remains:
    """End a launch: SIGTERM to the group, SIGKILL after the grace, and what is left after that.

    Returns as soon as nothing is left. Cancelling it in between leaves the processes as they are.
    """
    remains = await trio.to_thread.run_sync(look, processes)
    if remains.nothing:
        return remains
    signal_all(processes, remains, signal.SIGTERM)
    remains = await _until_gone(processes, grace_s)
    if not remains.nothing:
        signal_all(processes, remains, signal.SIGKILL)
        remains = await _until_gone(processes, kill_s, every=signal.SIGKILL)
    return remains


async def _until_gone(
    processes: Sequence[ProcessIdentity], limit_s: float, every: signal.Signals | None = None
) -> Remains:
    """Look until nothing is left or the limit has passed; `every` is sent again to whatever appeared since."""
    ends = trio.current_time() + limit_s
    wait_s = 0.005  # most engines are gone within some ten milliseconds; the poll slows down to POLL_S
    while True:
        for process in processes:
            identity.reap(process)
        remains = await trio.to_thread.run_sync(look, processes)
        if remains.nothing or trio.current_time() >= ends:
            return remains
        if every is not None:
            signal_all(processes, remains, every)
        await trio.sleep(min(wait_s, POLL_S))
        wait_s *= 1.5


def signal_all(processes: Sequence[ProcessIdentity], remains: Remains, number: signal.Signals) -> None:
    """Signal the recorded group, then each recorded process that still matches its triple.

    The group is signalled by its members as they were just seen: a group id whose last member has gone
    may already be someone else's. Through a pidfd the triple is checked after the descriptor holds the
    process, so that a reused pid is never signalled.
    """
    leader = next((p for p in processes if p.role is Role.API), None)
    targets = {p.pid: p.start_ticks for p in remains.alive}
    if leader is not None and remains.group:
        for member in identity.group_members(leader):
            targets[member.pid] = member.start_ticks
    for pid, start_ticks in targets.items():
        _signal_one(pid, start_ticks, number)


def _signal_one(pid: int, start_ticks: int, number: signal.Signals) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        stat = identity.read_stat(pid)
        if stat is not None and stat.start_ticks == start_ticks:
            signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return  # it ended between the look and the signal, which is what the signal was for
    finally:
        os.close(fd)
