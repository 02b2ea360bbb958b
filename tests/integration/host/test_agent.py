"""The agent over real processes: launch, serve, fail, stop, and a role that ends and comes back."""

# A test may block and poll: it is alone in its loop, and what it waits for has no event.

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import attrs
import pytest
import trio

from capyctl import ulid
from capyctl.documents import owned
from capyctl.fsm.proofs import Gone, NeverLaunched
from capyctl.fsm.types import Bytes, DeploymentId, Generation, Incarnation, Lane, Millis, RequestId, Role
from capyctl.host import identity, logs, ports, reports, silence
from capyctl.host.identity import Presence
from capyctl.host.journal import open_journal
from capyctl.router.desk import NotAccepted
from capyctl.session import messages as m

from .conftest import FIRST_PORT, Host, Running
from .fakes import GIB, UNIFIED, incarnation, launch

R1 = RequestId("r1")
CHAT = "/v1/chat/completions"


@attrs.define
class Ticket:
    """The part of a router's ticket that an upstream touches."""

    request: RequestId = R1
    sends: int = 0

    def sent(self) -> None:
        self.sends += 1


def terminate(what: Incarnation, command_id: str = "stop-1", limit_ms: int = 5_000, processes=()) -> m.Terminate:
    return m.Terminate(command_id=command_id, incarnation=what, processes=processes, limit_ms=Millis(limit_ms))


async def launched(running: Running, model: Path, **more) -> m.Launched:
    result = await running.agent.handle(launch(model, **more))
    assert isinstance(result, m.Launched), result
    return result


async def stopped(running: Running, what: Incarnation, command_id: str = "stop") -> Gone:
    result = await running.agent.handle(terminate(what, command_id))
    assert isinstance(result, m.Absent), result
    assert isinstance(result.proof, Gone)
    return result.proof


async def test_a_launch_answers_and_a_terminate_proves_it_gone(host: Host, model: Path) -> None:
    async with host() as running:
        result = await launched(running, model)
        assert result.usable.answer_chars == 2
        assert [p.role for p in result.processes] == [Role.API]
        assert result.peak_bytes[UNIFIED] > 1 << 20
        spawned = await running.report(m.Spawned)
        assert spawned.processes == result.processes
        load = await running.report(m.LoadReport)
        assert (load.running, load.waiting) == (0, 0)
        domains = await running.report(m.Domains)
        assert domains.domains[UNIFIED].available_bytes > 0

        ticket = Ticket()
        exchange = await running.ingress.open(incarnation(), CHAT, b'{"stream":true}', ticket)
        body = b""
        while piece := await exchange.receive_some():
            body += piece
        await exchange.aclose()
        assert (exchange.status, exchange.content_type, ticket.sends) == (200, "text/event-stream", 1)
        assert body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"

        idle = await running.agent.handle(
            m.AwaitIdle(command_id="i", incarnation=incarnation(), limit_ms=Millis(2_000))
        )
        assert isinstance(idle, m.IdleVerdict)
        assert idle.verdict == "idle"
        proof = await stopped(running, incarnation())
        assert proof.absent == set(result.processes)
        with pytest.raises(NotAccepted):
            await running.ingress.open(incarnation(), CHAT, b"{}", ticket)
        again = await running.agent.handle(terminate(incarnation(), "stop"))
        assert isinstance(again, m.Absent)


async def test_the_log_has_the_engines_words_without_its_key(host: Host, model: Path, tmp_path: Path) -> None:
    async with host() as running:
        await launched(running, model)
        await stopped(running, incarnation())
        path = tmp_path / "host" / "logs" / "d1" / "0-1.log"
        assert logs.last_words(path) == ["starting as serve with key <redacted>"]
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700


async def test_an_engine_that_dies_early_fails_at_once_with_its_last_words(host: Host, model: Path) -> None:
    async with host() as running:
        with trio.fail_after(30):
            result = await running.agent.handle(launch(model, mode="die", limit_s=60))
        assert isinstance(result, m.LaunchRefused)
        assert (result.code, result.transient) == ("launch_failed", False)
        assert "exited with status 3 before it was ready" in result.reason
        assert "error: cannot load the model" in result.reason
        assert isinstance(result.proof, Gone)
        assert running.agent.ports.of(incarnation()) is None


async def test_a_program_that_cannot_be_executed_is_named(host: Host, model: Path) -> None:
    async with host() as running:
        result = await running.agent.handle(launch(model, program="/nowhere/llama-server"))
        assert isinstance(result, m.LaunchRefused)
        assert "/nowhere/llama-server cannot be executed: No such file or directory" in result.reason
        assert isinstance(result.proof, Gone)


async def test_the_deadline_ends_a_start_that_never_becomes_ready(host: Host, model: Path) -> None:
    async with host() as running:
        result = await running.agent.handle(launch(model, mode="slow", limit_s=1.0))
        assert isinstance(result, m.LaunchRefused)
        assert result.code == "activation_timeout"
        assert isinstance(result.proof, Gone)


@pytest.mark.parametrize(
    ("change", "code", "transient"),
    [
        ({"digest": "sha256:ff"}, "checkpoint_mismatch", False),
        ({"profile": "other"}, "not_found", False),
        ({"profile_fingerprint": "2+b"}, "installation_drift", False),
        ({"model": "../elsewhere"}, "invalid_root", False),
        ({"allocation": {UNIFIED: Bytes(5 * GIB)}}, "insufficient_resources", False),
        ({"deadline_ms": Millis(1)}, "activation_timeout", False),
    ],
)
async def test_what_is_refused_before_spawning_never_was(host, model, change, code, transient) -> None:
    async with host() as running:
        command = launch(model, **change)
        result = await running.agent.handle(command)
        assert isinstance(result, m.LaunchRefused)
        assert (result.code, result.transient) == (code, transient)
        assert isinstance(result.proof, NeverLaunched)
        assert await running.agent.handle(command) == result  # replayed
        late = await running.agent.handle(launch(model, command_id="late"))
        assert isinstance(late, m.LaunchRefused)  # the handle is fenced for ever
        assert late.code == "lifecycle_conflict"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, None),
        ({"digest": "sha256:ff"}, "checkpoint_mismatch"),
        ({"profile": "other"}, "not_found"),
        ({"profile_fingerprint": "2+b"}, "installation_drift"),
        ({"model": "../elsewhere"}, "invalid_root"),
    ],
)
async def test_a_look_refuses_what_a_launch_would_and_begins_nothing(host, model, change, code) -> None:
    async with host() as running:
        asked = attrs.asdict(launch(model, **change), recurse=False)
        fields = {name: asked[name] for name in ("profile", "profile_fingerprint", "model", "digest")}
        for number in range(2):
            result = await running.agent.handle(m.VerifyStart(command_id=f"look{number}", **fields))
            assert getattr(result, "code", None) == code
            assert isinstance(result, m.Done if code is None else m.Refused)
        assert await running.agent.journal.launches() == []


async def test_too_little_free_memory_is_a_passing_refusal_with_figures(host: Host, model: Path) -> None:
    async with host() as running:
        limits = attrs.evolve(running.agent.policy.domains[UNIFIED], reserve_bytes=Bytes(1 << 50))
        object.__setattr__(
            running.agent._launcher, "policy", attrs.evolve(running.agent.policy, domains={UNIFIED: limits})
        )
        result = await running.agent.handle(launch(model))
        assert isinstance(result, m.LaunchRefused)
        assert (result.code, result.transient) == ("insufficient_memory", True)
        assert "1048576.0 GiB reserved" in result.reason


async def test_one_command_id_is_one_launch_however_often_it_is_sent(host: Host, model: Path) -> None:
    async with host() as running:
        command = launch(model, command_id="once")
        results: list[m.Result] = []

        async def send() -> None:
            results.append(await running.agent.handle(command))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(send)
        assert isinstance(results[0], m.Launched)
        assert results[0] == results[1] == results[2] == await running.agent.handle(command)
        other = await running.agent.handle(attrs.evolve(command, slots=2))
        assert isinstance(other, m.Refused)
        assert other.code == "idempotency_conflict"
        second = await running.agent.handle(launch(model, command_id="twice"))
        assert isinstance(second, m.Refused)  # the same handle again
        await stopped(running, incarnation())


async def test_a_caller_that_gives_up_does_not_end_the_launch(host: Host, model: Path) -> None:
    async with host() as running:
        command = launch(model, command_id="left")
        with trio.move_on_after(0.05):
            await running.agent.handle(command)
        result = await running.agent.handle(command)
        assert isinstance(result, m.Launched)
        await stopped(running, incarnation())


async def test_a_crash_is_told_with_status_and_last_words(host: Host, model: Path) -> None:
    async with host() as running:
        result = await launched(running, model)
        os.kill(result.processes[0].pid, signal.SIGKILL)
        told = await running.report(m.MemberExit)
        assert (told.role, told.status) == (Role.API, -9)
        assert "ended by signal 9" in told.last_words
        assert "starting as serve" in told.last_words
        with pytest.raises(NotAccepted):
            await running.ingress.open(incarnation(), CHAT, b"{}", Ticket())
        await stopped(running, incarnation())


@pytest.mark.parametrize(
    ("whom", "role", "said"),
    [
        ((1, 0), Role.API, "the engine was ended by signal 9"),  # the workers' ends are seen first
        ((1,), Role.WORKER, "a worker of the engine (pid "),
    ],
    ids=["all, worker first", "a worker"],
)
async def test_the_front_is_what_ended_where_it_did_and_else_the_worker_is_named(host, model, whom, role, said) -> None:
    async with host() as running:
        result = await launched(running, model, mode="family")
        for place in whom:
            os.kill(result.processes[place].pid, signal.SIGKILL)
            if len(whom) > 1:
                await trio.sleep(0.05)  # this one's end is seen first
        told = await running.report(m.MemberExit)
        assert told.role is role
        assert told.last_words.startswith(said)
        assert "signal 9" in told.last_words or told.status is None
        await stopped(running, incarnation())


async def test_an_engine_without_a_record_is_named_with_the_way_out(host: Host, model: Path) -> None:
    async with host() as running:
        result = await launched(running, model)
        stray, at = result.processes, incarnation(7)  # of a journal that was lost
        pid = stray[0].pid
        looked = await running.agent.handle(m.Probe(command_id="p", incarnation=at, processes=stray))
        assert isinstance(looked, m.ProbeResult)
        ended = await running.agent.handle(
            m.Terminate(command_id="t", incarnation=at, processes=stray, limit_ms=Millis(100))
        )
        assert isinstance(ended, m.Unresolved)
        for reason in (looked.reason, ended.reason):
            assert f"pid {pid} (api) is alive" in str(reason)
            assert f"end pid {pid} with kill" in str(reason)
        await stopped(running, incarnation())


async def test_a_group_that_ignores_sigterm_is_killed_whole(host: Host, model: Path) -> None:
    async with host() as running:
        result = await launched(running, model, mode="stubborn")
        assert [p.role for p in result.processes] == [Role.API, Role.WORKER]
        proof = await stopped(running, incarnation())
        assert proof.absent >= set(result.processes)


async def test_children_are_workers_and_the_rest_helpers(host: Host, model: Path) -> None:
    async with host() as running:
        result = await launched(running, model, mode="family")
        assert [(p.role, p.number) for p in result.processes] == [
            (Role.API, 0),
            (Role.WORKER, 1),
            (Role.WORKER, 2),
            (Role.HELPER, 1),
        ]
        helper = result.processes[3]
        os.kill(helper.pid, signal.SIGKILL)  # nobody's business
        same = await running.agent.handle(
            m.Probe(command_id="p", incarnation=incarnation(), processes=result.processes)
        )
        assert isinstance(same, m.ProbeResult)
        # the shell that waited for the helper is a worker, and it has ended with it
        worker = await running.report(m.MemberExit)
        assert worker.process == result.processes[2]
        await stopped(running, incarnation())


async def test_a_stop_calls_off_a_start(host: Host, model: Path) -> None:
    async with host() as running:
        results: list[m.Result] = []

        async def start() -> None:
            results.append(await running.agent.handle(launch(model, mode="slow")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(start)
            await running.report(m.Spawned)
            await stopped(running, incarnation())
        assert isinstance(results[0], m.LaunchRefused)
        assert "stopped while it was starting" in results[0].reason


async def test_a_stop_for_an_unknown_launch_signals_nothing_and_fences_it(host: Host, model: Path) -> None:
    me = identity.identify(os.getpid())
    assert me is not None
    async with host() as running:
        result = await running.agent.handle(terminate(incarnation(), processes=(me,)))
        assert isinstance(result, m.Unresolved)
        assert "no record" in result.reason
        nothing = await running.agent.handle(terminate(incarnation(2), "stop-2"))
        assert isinstance(nothing, m.Absent)
        assert isinstance(nothing.proof, NeverLaunched)
        late = await running.agent.handle(launch(model, generation=2))
        assert isinstance(late, m.LaunchRefused)


async def test_engines_outlive_the_role_and_are_found_again(host: Host, model: Path) -> None:
    async with host() as running:
        result = await launched(running, model)
    assert identity.presence(result.processes[0]) is Presence.ALIVE
    async with host() as running:
        inventory = await running.agent.handle(m.Inspect(command_id="who"))
        assert isinstance(inventory, m.Inventory)
        assert inventory.owned == (incarnation(),)
        probe = await running.agent.handle(
            m.Probe(command_id="p", incarnation=incarnation(), processes=result.processes)
        )
        assert isinstance(probe, m.ProbeResult)
        assert probe.same is not None
        assert probe.usable is not None
        exchange = await running.ingress.open(incarnation(), CHAT, b"{}", Ticket())
        assert exchange.status == 200
        await exchange.aclose()
        os.kill(result.processes[0].pid, signal.SIGKILL)
        told = await running.report(m.MemberExit)
        assert told.process == result.processes[0]
        await stopped(running, incarnation())
    async with host() as running:
        inventory = await running.agent.handle(m.Inspect(command_id="who"))
        assert isinstance(inventory, m.Inventory)
        assert inventory.owned == ()


async def test_an_engine_that_died_while_nobody_watched_is_told_at_the_next_start(host: Host, model: Path) -> None:
    async with host() as running:
        result = await launched(running, model)
    os.kill(result.processes[0].pid, signal.SIGKILL)
    with trio.fail_after(30):
        while identity.presence(result.processes[0]) is not Presence.GONE:
            await trio.sleep(0.01)
    async with host() as running:
        told = await running.report(m.MemberExit)
        assert told.incarnation == incarnation()
        await stopped(running, incarnation())


async def test_a_launch_is_taken_up_again_after_a_restart_and_not_spawned_twice(host: Host, model: Path) -> None:
    command = launch(model, mode="family", command_id="resumed")
    async with host() as running, trio.open_nursery() as nursery:
        nursery.start_soon(running.agent.handle, command)
        first = await running.report(m.Spawned)
        nursery.cancel_scope.cancel()
    async with host() as running:
        result = await running.agent.handle(command)
        assert isinstance(result, m.Launched), result
        assert result.processes[0] == first.processes[0]
        await stopped(running, incarnation())


async def test_a_launch_that_was_journaled_and_never_spawned_never_was(host: Host, model: Path, tmp_path: Path) -> None:
    command = launch(model, command_id="cut")
    journal = await open_journal(tmp_path / "host" / "journal.sqlite3")
    await journal.arm(command, "0-1", FIRST_PORT, "k", tmp_path / "x.log", Millis(1))
    await journal.close()
    async with host() as running:
        assert running.agent.ports.of(incarnation()) is None
        result = await running.agent.handle(command)
        assert isinstance(result, m.LaunchRefused)
        assert isinstance(result.proof, NeverLaunched)


async def test_a_stop_accepted_before_a_crash_is_done_after_it(host: Host, model: Path, tmp_path: Path) -> None:
    async with host() as running:
        result = await launched(running, model)
    stop = terminate(incarnation(), "unfinished")
    journal = await open_journal(tmp_path / "host" / "journal.sqlite3")
    await journal.accept(stop, Millis(1))
    await journal.close()
    async with host() as running:
        with trio.fail_after(30):
            while identity.presence(result.processes[0]) is not Presence.GONE:
                await trio.sleep(0.01)
        answer = await running.agent.handle(stop)
        assert isinstance(answer, m.Absent)


async def test_a_relaunch_keeps_the_journal_and_the_logs_small(host: Host, model: Path, tmp_path: Path) -> None:
    async with host() as running:
        for generation in range(1, 8):
            result = await running.agent.handle(launch(model, generation, mode="die"))
            assert isinstance(result, m.LaunchRefused)
        assert await running.agent.journal.launch(incarnation(6)) is None
        stale = await running.agent.handle(launch(model, 6))
        assert isinstance(stale, m.LaunchRefused)
        assert stale.code == "lifecycle_conflict"
    names = sorted(p.name for p in (tmp_path / "host" / "logs" / "d1").iterdir())
    assert names == ["0-3.log", "0-4.log", "0-5.log", "0-6.log", "0-7.log"]


def zombies() -> set[int]:
    return {stat.pid for stat in identity.everyone() if stat.ppid == os.getpid() and stat.dead}


async def test_no_process_of_an_ended_launch_stays_a_zombie(host: Host, model: Path) -> None:
    before = zombies()  # of roles that ended inside this very process
    async with host() as running:
        await launched(running, model, mode="family")
        await stopped(running, incarnation())
        with trio.fail_after(30):
            while zombies() - before:
                await trio.sleep(0.02)


async def test_a_port_that_another_program_holds_is_passed_over(host: Host, model: Path) -> None:
    with socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        foreign.bind(("127.0.0.1", FIRST_PORT))
        foreign.listen()
        async with host() as running:
            await launched(running, model)
            assert running.agent.ports.of(incarnation()) == FIRST_PORT + 1
            await stopped(running, incarnation())


async def test_whoever_takes_the_port_before_the_engine_listens_is_told_nothing(host, model, monkeypatch) -> None:
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", FIRST_PORT))
        thief.listen()
        thief.setblocking(False)
        monkeypatch.setattr(ports, "taken", lambda port: False)  # it came right after the look
        async with host() as running:
            result = await running.agent.handle(launch(model, mode="slow"))
            assert isinstance(result, m.LaunchRefused), result
            assert (result.code, result.transient) == ("port_conflict", True)
            with pytest.raises(BlockingIOError):
                thief.accept()


async def test_no_request_goes_to_a_port_whose_engine_has_ended(host, model) -> None:
    async with host() as running:
        await launched(running, model)
        running.agent.ingress.runs = lambda incarnation: False
        with pytest.raises(NotAccepted, match="has ended"):
            await running.agent.ingress.open(incarnation(), "/v1/chat/completions", b"{}", Ticket())
        await stopped(running, incarnation())


async def test_a_checkpoint_is_measured(host: Host, model: Path) -> None:
    async with host() as running:
        found = await running.agent.handle(m.DigestCheckpoint(command_id="c", model="tiny", document={}))
        assert isinstance(found, m.Checkpoint)
        assert (found.digest, found.weight_bytes, found.path) == ("sha256:00", 100, str(model))
        missing = await running.agent.handle(m.DigestCheckpoint(command_id="c2", model="none", document={}))
        assert isinstance(missing, m.Refused)
        assert missing.code == "invalid_root"


async def test_an_engine_that_is_stopped_is_told_of_and_a_stop_does_not_wait_for_it(host, model, monkeypatch) -> None:
    monkeypatch.setattr(silence, "HUNG_S", 1.0)
    monkeypatch.setattr(reports, "LOAD_EVERY_S", 0.2)
    async with host() as running:
        engine = await launched(running, model)
        watched = running.agent._custody.engines[incarnation()]
        watched.client = attrs.evolve(watched.client, limit_s=0.3)
        os.kill(engine.processes[0].pid, signal.SIGSTOP)
        with trio.fail_after(30):
            news = await running.report(m.EngineSilent)
            assert isinstance(news, m.EngineSilent)
            assert news.incarnation == incarnation()
            assert "stopped by a signal" in news.reason
            asked = m.AwaitIdle(command_id="idle", incarnation=incarnation(), limit_ms=Millis(30_000))
            assert (await running.agent.handle(asked)).verdict == "silent"
            await stopped(running, incarnation())


async def test_logs_of_what_still_runs_stay_whatever_the_server_knows(host: Host, model: Path) -> None:
    running_id, deleted_id = ulid.new(1, bytes(10)), ulid.new(2, bytes(10))
    lane = Lane(DeploymentId(running_id), 0)
    async with host() as running:
        command = launch(model, incarnation=Incarnation(lane, Generation(1)))
        assert isinstance(await running.agent.handle(command), m.Launched)
        directory = logs.log_path(running.agent.state_dir, running_id, "0-1").parent
        other = owned.private_directory(directory.with_name(deleted_id))
        for number, ends in enumerate((False, True)):
            prune = m.PruneLogs(command_id=f"p{number}", kept=(), as_of_ms=Millis(1 << 45))
            assert isinstance(await running.agent.handle(prune), m.Done)
            assert (directory.exists(), other.exists()) == (not ends, False)
            if not ends:
                await stopped(running, command.incarnation)
