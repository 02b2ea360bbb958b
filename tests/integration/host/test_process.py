"""Identities, gated spawn, proven ends: against real processes."""

# A test may block and poll: it is alone in its loop, and what it waits for has no event.

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import trio

from capyctl.errors import Failure, InvariantBroken
from capyctl.fsm.types import ProcessIdentity, Role
from capyctl.host import identity, process
from capyctl.host.identity import Presence

from .fakes import incarnation

SLEEP = ["/bin/sleep", "600"]


@pytest.fixture
def sink() -> Iterator[int]:
    fd = os.open(os.devnull, os.O_WRONLY)
    yield fd
    os.close(fd)


@contextlib.contextmanager
def child(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen(argv, start_new_session=True)
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def named(pid: int) -> ProcessIdentity:
    found = identity.identify(pid)
    assert found is not None
    return found


def until(what: object, limit_s: float = 5.0) -> None:
    ends = time.monotonic() + limit_s
    while not what():  # type: ignore[operator]
        assert time.monotonic() < ends
        time.sleep(0.005)


# --- identity ----------------------------------------------------------------------------------------


def test_a_process_is_alive_until_it_is_not() -> None:
    with child(*SLEEP) as running:
        me = named(running.pid)
        assert identity.presence(me) is Presence.ALIVE
        running.kill()
        running.wait()
        assert identity.presence(me) is Presence.GONE


def test_a_zombie_with_its_own_triple_is_gone_and_its_group_is_empty() -> None:
    with child(*SLEEP) as running:
        me = named(running.pid)
        assert [member.pid for member in identity.group_members(me)] == [running.pid]
        running.kill()
        until(lambda: Path(f"/proc/{me.pid}/stat").read_text().split()[2] == "Z")
        os.killpg(me.pid, 0)  # the kernel still calls the group there
        assert identity.presence(me) is Presence.GONE
        assert identity.group_members(me) == ()


def test_a_reused_pid_is_another_process() -> None:
    me = named(os.getpid())
    past = attrs.evolve(me, start_ticks=me.start_ticks - 1)
    assert identity.presence(past) is Presence.GONE
    assert identity.group_members(past) == ()


def test_a_process_of_another_boot_is_gone() -> None:
    past = attrs.evolve(named(os.getpid()), boot_id="00000000-0000-0000-0000-000000000000")
    assert identity.presence(past) is Presence.GONE
    assert identity.group_members(past) == ()


def test_what_cannot_be_seen_is_unknown(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text("b\n")
    (proc / "7").mkdir()
    (proc / "7" / "stat").mkdir()  # neither absent nor readable
    assert identity.presence(ProcessIdentity(7, "b", 1), proc) is Presence.UNKNOWN


def test_a_leader_that_exited_while_its_threads_run_is_alive(tmp_path: Path) -> None:
    fields = ["Z", "1", "7", "7", *["0"] * 13, "3", "0", "55", "0"]
    place = tmp_path / "7"
    place.mkdir()
    (place / "stat").write_text(f"7 (odd) name)) {' '.join(fields)}")
    stat = identity.read_stat(7, tmp_path)
    assert stat is not None
    assert (stat.threads, stat.start_ticks, stat.dead) == (3, 55, False)


def test_whom_a_process_and_its_children_forked_is_found_from_any_of_their_threads(tmp_path: Path) -> None:
    lists = {"7/task/7": "8 ", "7/task/71": "9 10 ", "8/task/8": "11 ", "9/task/9": "", "11/task/11": ""}
    for task, children in {**lists, "12/task/12": "13 "}.items():
        (tmp_path / task).mkdir(parents=True)
        (tmp_path / task / "children").write_text(children)
    assert identity.descendants([7], tmp_path) == {8, 9, 10, 11}  # 10 has ended
    assert identity.descendants([99], tmp_path) == set()


def test_a_child_in_a_group_of_its_own_is_still_one_of_the_launch() -> None:
    program = "import subprocess,time; subprocess.Popen(['sleep','600'], process_group=0); time.sleep(600)"
    with child(sys.executable, "-c", program) as running:
        me = named(running.pid)
        until(lambda: len(identity.group_members(me)) == 2)
        roles = identity.with_roles(me)
        assert [(p.role, p.number) for p in roles] == [(Role.API, 0), (Role.WORKER, 1)]
        assert identity.with_roles(me, roles) == roles  # numbers stay
        remains = trio.run(process.put_down, roles, 1.0)
        assert remains.nothing


async def test_the_exit_of_a_child_is_told_with_its_status_and_an_adopted_ones_without() -> None:
    with child("/bin/sh", "-c", "exit 7") as running:
        assert await identity.wait_gone(named(running.pid)) == 7
        running.returncode = 7  # we reaped it
    parent = subprocess.Popen(["/bin/sh", "-c", "sleep 0.2 & echo $!"], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    orphan = named(pid)
    parent.wait()
    parent.stdout.close()
    with trio.fail_after(30):
        await identity.wait_gone(orphan)
    assert identity.presence(orphan) is Presence.GONE


# --- gated spawn ----------------------------------------------------------------------------------------


async def test_a_gated_process_becomes_the_engine_with_the_same_identity(tmp_path: Path) -> None:
    out = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT, 0o600)
    gated = process.spawn_gated(out)
    os.close(out)
    program = (
        "import os,signal; print(sorted(os.environ.items()), os.getpid()==os.getsid(0), "
        "sorted(int(f) for f in os.listdir('/proc/self/fd'))[:4], signal.getsignal(signal.SIGPIPE)==signal.SIG_DFL)"
    )
    await gated.open(["/usr/bin/env", "-S", sys.executable, "-IS", "-c", program], {"A": "1"})
    with trio.fail_after(30):
        await identity.wait_gone(gated.process)
    text = (tmp_path / "out").read_text()
    assert text.startswith("[('A', '1')") or "('A', '1')" in text
    assert " True [0, 1, 2, 3]" in text  # 3 is the directory being listed


async def test_the_identity_survives_the_exec(sink: int) -> None:
    gated = process.spawn_gated(sink)
    assert identity.presence(gated.process) is Presence.ALIVE
    await gated.open(SLEEP, {})
    assert identity.presence(gated.process) is Presence.ALIVE
    assert Path(f"/proc/{gated.process.pid}/cmdline").read_bytes() == b"/bin/sleep\x00600\x00"
    assert (await process.put_down((gated.process,))).nothing


async def test_a_gate_that_closes_ends_the_process_before_it_was_anything(sink: int) -> None:
    gated = process.spawn_gated(sink)
    gated.close()
    with trio.fail_after(30):
        assert await identity.wait_gone(gated.process) == 125


async def test_an_exec_that_fails_says_why(sink: int) -> None:
    gated = process.spawn_gated(sink)
    with pytest.raises(Failure, match="/no/such/engine cannot be executed: No such file"):
        await gated.open(["/no/such/engine"], {})
    with trio.fail_after(30):
        assert await identity.wait_gone(gated.process) == 126


async def test_a_long_order_fits_through_the_gate(sink: int) -> None:
    gated = process.spawn_gated(sink)
    environment = {f"N{number}": "x" * 4000 for number in range(100)}
    await gated.open(SLEEP, environment)
    text = Path(f"/proc/{gated.process.pid}/environ").read_bytes()
    assert text.count(b"x" * 4000) == 100
    assert (await process.put_down((gated.process,))).nothing


def test_a_host_killed_between_record_and_gate_leaves_no_engine(tmp_path: Path) -> None:
    """The crash window of W3: a small host spawns, tells the identity, and is killed before it opens the gate."""
    program = (
        "import os, sys, time\n"
        "from capyctl.host import process\n"
        f"gated = process.spawn_gated(os.open({str(tmp_path / 'out')!r}, os.O_WRONLY | os.O_CREAT))\n"
        "print(gated.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    host = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert host.stdout is not None
    gate = named(int(host.stdout.readline()))
    assert identity.presence(gate) is Presence.ALIVE
    host.kill()
    host.wait()
    host.stdout.close()
    until(lambda: identity.presence(gate) is Presence.GONE)
    assert (tmp_path / "out").read_bytes() == b""


def test_an_engine_survives_the_kill_of_its_host(tmp_path: Path) -> None:
    program = (
        "import os, time, trio\n"
        "from capyctl.host import process\n"
        "gated = process.spawn_gated(os.open(os.devnull, os.O_WRONLY))\n"
        f"trio.run(gated.open, {SLEEP!r}, {{}})\n"
        "print(gated.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    host = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert host.stdout is not None
    engine = named(int(host.stdout.readline()))
    host.kill()
    host.wait()
    host.stdout.close()
    time.sleep(0.1)  # what its host's end could do to it is done
    assert identity.presence(engine) is Presence.ALIVE
    assert trio.run(process.put_down, (engine,)).nothing


# --- ends -------------------------------------------------------------------------------------------------


async def test_a_grandchild_that_ignores_sigterm_is_killed_and_only_then_is_it_gone() -> None:
    deaf = (
        "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    program = f"import subprocess,sys,time; subprocess.Popen([sys.executable,'-c',{deaf!r}]); time.sleep(600)"
    running = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE)
    assert running.stdout is not None
    running.stdout.readline()
    running.stdout.close()
    me = named(running.pid)
    remains = await process.put_down((me,), grace_s=0.3, kill_s=0.0)  # the leader obeys, the grandchild does not
    assert not remains.nothing or remains.group == ()
    remains = await process.put_down((me,), grace_s=0.1, kill_s=3.0)
    assert remains.nothing
    proof = process.proof_of(incarnation(), (me,), remains)
    assert proof.group_empty
    running.returncode = -15  # reaped by put_down


async def test_a_process_that_is_not_the_recorded_one_is_never_signalled() -> None:
    with child(*SLEEP) as running:
        impostor = attrs.evolve(named(running.pid), start_ticks=1)
        remains = await process.put_down((impostor,), grace_s=0.1, kill_s=0.1)
        assert remains.nothing  # the recorded one is gone
        assert running.poll() is None  # and whoever has its pid now lives on


async def test_a_pid_that_was_reused_between_the_look_and_the_signal_is_not_signalled() -> None:
    with child(*SLEEP) as running:
        me = named(running.pid)
        stale = attrs.evolve(process.look((me,)), alive=(attrs.evolve(me, start_ticks=1),), group=())
        process.signal_all((attrs.evolve(me, start_ticks=1),), stale, signal.SIGKILL)
        await trio.sleep(0.1)  # a signal would have ended it by now
        assert running.poll() is None


def test_no_proof_comes_out_of_a_look_that_found_something() -> None:
    with child(*SLEEP) as running:
        me = named(running.pid)
        remains = process.look((me,))
        assert str(remains) == f"pid {me.pid} (api) is alive"
        with pytest.raises(InvariantBroken):
            process.proof_of(incarnation(), (me,), remains)


def test_processes_that_fork_and_end_at_once_are_not_proven_gone_by_looks_that_miss_them() -> None:
    """Each lives a millisecond, which is less than a look takes: a hundred looks, and none of them is a proof."""
    walk = (
        "import os, time\nends = time.monotonic() + 30\nwhile time.monotonic() < ends:\n  if os.fork(): os._exit(0)\n"
    )
    identity.become_subreaper()
    with child(sys.executable, "-S", "-c", walk) as running:
        me = named(running.pid)
        until(lambda: identity.presence(me) is Presence.GONE)
        for _ in range(100):
            remains = process.look((me,))
            assert not remains.nothing
            with pytest.raises(InvariantBroken):
                process.proof_of(incarnation(), (me,), remains)
        until(lambda: _killed(me), 10)
    assert process.look((me,)).nothing


def _killed(leader: ProcessIdentity) -> bool:
    """Kill the whole group at once, which only its test may: the number is still its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    return process.look((leader,)).nothing
