"""Parks and wakes over real processes: what is asked of an engine once, what proves it, and what nobody knows."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import trio

from capyctl.clock import now_ms
from capyctl.fsm.types import Bytes, Millis, ProcessIdentity, RequestId, Residency, Token
from capyctl.host import arrivals, custody, journal_file, launching, logs, looks
from capyctl.host.engine import LOAD_EVERY_S
from capyctl.host.journal import Memory, open_journal
from capyctl.host.segments import Segment
from capyctl.router.desk import NotAccepted
from capyctl.session import messages as m
from capyctl.session.codec import canonical
from capyctl.session.kinds import encode_message

from .conftest import Host, Running
from .fakes import UNIFIED, incarnation, launch
from .test_agent import CHAT, Ticket, stopped

MIB = 1 << 20
HOLD = 64
BUDGET = {UNIFIED: Bytes(48 * MIB)}


@pytest.fixture
def diary(tmp_path: Path) -> Path:
    return tmp_path / "diary"


def told(diary: Path) -> list[str]:
    """What was asked of the engine's memory, and what it was asked without it."""
    return diary.read_text().splitlines() if diary.exists() else []


async def loaded(running: Running, model: Path, diary: Path, **more: Any) -> m.Launched:
    facts: dict[str, Any] = {"residency": Residency.DEEP, "parked": BUDGET, "ready": {UNIFIED: Bytes(128 * MIB)}}
    result = await running.agent.handle(launch(model, hold=HOLD, diary=str(diary), **{**facts, **more}))
    assert isinstance(result, m.Launched), result
    return result


def release(processes: Iterable[ProcessIdentity], token: int = 2, limit_ms: int = 10_000, **more: Any) -> m.Release:
    facts: dict[str, Any] = {
        "command_id": f"release-{token}",
        "incarnation": incarnation(),
        "token": Token(token),
        "tier": Residency.DEEP,
        "budget": BUDGET,
        "gate_closed_at_ms": Millis(now_ms()),
        "processes": tuple(processes),
        "limit_ms": Millis(limit_ms),
    }
    return m.Release(**{**facts, **more})


def restore(engine: m.Launched, token: int = 3, limit_s: float = 20, **more: Any) -> m.Restore:
    facts: dict[str, Any] = {
        "command_id": f"restore-{token}",
        "incarnation": incarnation(),
        "token": Token(token),
        "tier": Residency.DEEP,
        "digest": "sha256:00",
        "canary": engine.canary,
        "processes": engine.processes,
        "deadline_ms": Millis(now_ms() + int(limit_s * 1000)),
    }
    return m.Restore(**{**facts, **more})


def look(engine: m.Launched, **more: Any) -> m.Probe:
    return m.Probe(command_id="look", incarnation=incarnation(), processes=engine.processes, **more)


async def served(running: Running) -> bool:
    """Whether this host lets a request through."""
    try:
        exchange = await running.ingress.open(incarnation(), CHAT, b"{}", Ticket())
    except NotAccepted:
        return False
    while await exchange.receive_some():
        pass
    await exchange.aclose()
    return exchange.status == 200


async def test_a_parked_engine_gave_its_memory_back_and_a_woken_one_answers_as_before(host, model, diary) -> None:
    async with host() as running:
        engine = await loaded(running, model, diary)
        assert engine.canary == "[1, 2, 3]"
        command = release(engine.processes)
        parked = await running.agent.handle(command)
        assert isinstance(parked, m.Parked), parked
        assert parked.resident[UNIFIED].resident_bytes < 48 * MIB < engine.peak_bytes[UNIFIED]
        assert (parked.quiet.running, parked.quiet.router_in_flight) == (0, 0)
        assert parked.quiet.read_at_ms >= command.gate_closed_at_ms
        assert parked.same.incarnation == incarnation()
        assert await running.agent.handle(command) == parked  # replayed
        assert not await served(running)
        await trio.sleep(LOAD_EVERY_S + 0.2)  # nothing asks it for its gauges meanwhile

        awake = await running.agent.handle(restore(engine))
        assert isinstance(awake, m.Awake), awake
        assert awake.canary is not None
        assert awake.canary.actual == engine.canary
        assert awake.back.sampled_at_ms >= awake.back.restored_at_ms
        assert await served(running)
        again = await running.agent.handle(release(engine.processes, token=4))
        assert isinstance(again, m.Parked)
        assert told(diary) == ["sleep", "wake", "sleep"]
        await stopped(running, incarnation())


async def test_memory_that_comes_back_late_is_waited_for(host, model, diary) -> None:
    async with host() as running:
        engine = await loaded(running, model, diary, fault="late")
        assert isinstance(await running.agent.handle(release(engine.processes)), m.Parked)
        await stopped(running, incarnation())


async def test_an_engine_that_answers_somebody_is_not_asked(host, model, diary) -> None:
    async with host() as running:
        engine = await loaded(running, model, diary)
        body = b'{"stream":true,"pieces":1000,"wait":0.05}'
        exchange = await running.ingress.open(incarnation(), CHAT, body, Ticket())
        busy = await running.agent.handle(release(engine.processes))
        assert isinstance(busy, m.NotParked)
        assert busy.unsent is not None
        assert (busy.code, told(diary)) == ("not_quiescent", [])
        assert await exchange.receive_some()  # nothing was cut for it
        exchange.abandon(RequestId("r1"))
        with trio.fail_after(30):
            while not await served(running):
                await trio.sleep(0.05)
        await stopped(running, incarnation())


async def test_a_lost_answer_is_looked_at_and_never_asked_for_again(host: Host, model: Path, diary: Path) -> None:
    async with host() as running:
        engine = await loaded(running, model, diary, fault="lost_sleep")
        command = release(engine.processes)
        lost = await running.agent.handle(command)
        assert isinstance(lost, m.Unresolved), lost
        assert "is not asked for again; it holds" in lost.reason
        assert await running.agent.handle(command) == lost
        other = await running.agent.handle(release(engine.processes, command_id="another", token=9))
        assert isinstance(other, m.Unresolved)
        assert not await served(running)
    async with host() as running:
        assert await running.agent.handle(command) == lost
        seen = await running.agent.handle(look(engine, parked=True, parked_budget=BUDGET))
        assert isinstance(seen, m.ProbeResult)
        assert seen.same is not None
        assert seen.resident is not None
        assert seen.resident[UNIFIED].resident_bytes < 48 * MIB
        assert isinstance(await running.agent.handle(restore(engine, token=10)), m.Awake)
        assert told(diary) == ["sleep", "wake"]
        await stopped(running, incarnation())


async def test_a_daemon_that_ends_between_the_journal_and_the_answer_never_asks_again(host, model, diary) -> None:
    async with host() as running:
        engine = await loaded(running, model, diary, fault="slow_sleep")
        command = release(engine.processes, limit_ms=90_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.agent.handle, command)
            with trio.fail_after(30):
                while not told(diary):
                    await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
    async with host() as running:
        result = await running.agent.handle(command)
        assert isinstance(result, m.Unresolved), result
        assert told(diary) == ["sleep"]
        assert not await served(running)
        await stopped(running, incarnation())


async def test_a_200_that_frees_nothing_is_no_park(host: Host, model: Path, diary: Path) -> None:
    async with host() as running:
        engine = await loaded(running, model, diary, fault="keeps")
        result = await running.agent.handle(release(engine.processes, limit_ms=2_500))
        assert isinstance(result, m.Unresolved), result
        assert "left on unified, at most 48 MiB may be" in result.reason
        assert not await served(running)
        seen = await running.agent.handle(look(engine, parked=True, parked_budget={UNIFIED: Bytes(1)}))
        assert isinstance(seen, m.ProbeResult)
        assert (seen.resident, seen.usable) == (None, None)
        assert seen.same is not None
        assert told(diary) == ["sleep"]
        await stopped(running, incarnation())


async def test_an_engine_that_ends_after_its_200_is_gone_and_not_parked(host: Host, model: Path, diary: Path) -> None:
    async with host() as running:
        engine = await loaded(running, model, diary, fault="dies")
        result = await running.agent.handle(release(engine.processes))
        assert isinstance(result, m.Unresolved), result
        exited = await running.report(m.MemberExit)
        assert exited.status == 9
        await stopped(running, incarnation())


async def test_an_engine_that_refuses_the_call_is_unknown(host: Host, model: Path, diary: Path) -> None:
    async with host() as running:
        engine = await loaded(running, model, diary, fault="refuses")
        result = await running.agent.handle(release(engine.processes))
        assert isinstance(result, m.Unresolved)
        assert "/sleep was answered with 409" in result.reason
        await stopped(running, incarnation())


async def test_an_engine_that_wakes_otherwise_serves_nobody(host: Host, model: Path, diary: Path) -> None:
    async with host() as running:
        engine = await loaded(running, model, diary, fault="other")
        assert isinstance(await running.agent.handle(release(engine.processes)), m.Parked)
        result = await running.agent.handle(restore(engine))
        assert isinstance(result, m.NotAwake), result
        assert (result.mismatch, result.code, result.unsent) == (True, "wake_mismatch", None)
        assert not await served(running)
        seen = await running.agent.handle(look(engine, canary=engine.canary))
        assert isinstance(seen, m.ProbeResult)
        assert seen.canary is None
        assert not await served(running)
        await stopped(running, incarnation())


async def test_an_unanswered_canary_is_no_passed_one(host: Host, model: Path, diary: Path) -> None:
    async with host() as running:
        engine = await loaded(running, model, diary, fault="mute")
        assert isinstance(await running.agent.handle(release(engine.processes)), m.Parked)
        result = await running.agent.handle(restore(engine))
        assert isinstance(result, m.Unresolved), result
        assert not await served(running)
        await stopped(running, incarnation())


async def test_a_wake_whose_answer_is_lost_serves_once_it_is_proven(host: Host, model: Path, diary: Path) -> None:
    async with host() as running:
        engine = await loaded(running, model, diary, fault="lost_wake")
        assert isinstance(await running.agent.handle(release(engine.processes)), m.Parked)
        command = restore(engine)
        assert isinstance(await running.agent.handle(command), m.Unresolved)
        assert not await served(running)
    async with host() as running:
        assert isinstance(await running.agent.handle(command), m.Unresolved)
        assert not await served(running)
        seen = await running.agent.handle(look(engine, canary=engine.canary))
        assert isinstance(seen, m.ProbeResult)
        assert seen.canary is not None
        assert seen.usable is not None
        assert await served(running)
        assert told(diary) == ["sleep", "wake"]
        await stopped(running, incarnation())


async def test_a_parked_engine_outlives_the_role_and_is_not_asked_anything(
    host: Host, model: Path, diary: Path
) -> None:
    async with host() as running:
        engine = await loaded(running, model, diary)
        assert isinstance(await running.agent.handle(release(engine.processes)), m.Parked)
    async with host() as running:
        assert not await served(running)
        await trio.sleep(LOAD_EVERY_S + 0.2)  # an engine that serves would be asked for its gauges meanwhile
        seen = await running.agent.handle(look(engine))
        assert isinstance(seen, m.ProbeResult)
        assert seen.same is not None
        assert seen.usable is None
        assert isinstance(await running.agent.handle(restore(engine)), m.Awake)
        assert await served(running)
        assert told(diary) == ["sleep", "wake"]
        os.kill(engine.processes[0].pid, signal.SIGKILL)
        await running.report(m.MemberExit)
        await stopped(running, incarnation())


async def test_other_files_wake_nothing(host: Host, model: Path, diary: Path) -> None:
    async with host() as running:
        engine = await loaded(running, model, diary)
        assert isinstance(await running.agent.handle(release(engine.processes)), m.Parked)
        result = await running.agent.handle(restore(engine, digest="sha256:ff"))
        assert isinstance(result, m.NotAwake), result
        assert (result.code, result.unsent) == ("checkpoint_mismatch", None)
        assert told(diary) == ["sleep"]
        await stopped(running, incarnation())


async def test_a_wake_without_room_leaves_the_copy_as_it_is(host: Host, model: Path, diary: Path) -> None:
    async with host() as running:
        engine = await loaded(running, model, diary, ready={UNIFIED: Bytes(5 << 30)})
        assert isinstance(await running.agent.handle(release(engine.processes)), m.Parked)
        result = await running.agent.handle(restore(engine))
        assert isinstance(result, m.NotAwake), result
        assert result.unsent is not None
        assert "GiB on unified" in result.reason
        assert told(diary) == ["sleep"]
        await stopped(running, incarnation())


async def test_what_cannot_park_is_not_launched_to_park(host: Host, model: Path, diary: Path) -> None:
    async with host() as running:
        running.agent.registry.one.parking = False  # type: ignore[attr-defined]
        result = await running.agent.handle(launch(model, residency=Residency.DEEP))
        assert isinstance(result, m.LaunchRefused)
        assert result.code == "capability_missing:deep_park"


async def test_what_was_launched_to_stay_is_not_asked_to_park(host: Host, model: Path, diary: Path) -> None:
    async with host() as running:
        engine = await loaded(running, model, diary, residency=Residency.RESTART_ONLY)
        assert engine.canary is None
        result = await running.agent.handle(release(engine.processes))
        assert isinstance(result, m.NotParked)
        assert result.unsent is not None
        assert (result.code, told(diary)) == ("capability_missing:deep_park", [])
        assert await served(running)
        await stopped(running, incarnation())


ABORT = m.Abort(command_id="a", incarnation=incarnation(), request=RequestId("r7"))


async def given_up(running: Running, **more: Any) -> None:
    """A request with an id is inside the engine, and whoever asked for it has gone."""
    body = json.dumps({"rid": "r7", **more}).encode()
    with trio.move_on_after(0.2):  # without a stream there is no head before the end
        exchange = await running.ingress.open(incarnation(), CHAT, body, Ticket(RequestId("r7")), named=True)
        await exchange.receive_some()
        exchange.abandon(RequestId("r7"))
    assert running.ingress.in_flight(incarnation()) == 1


@pytest.mark.parametrize("aborts", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_abort_is_acknowledged_when_the_engine_has_ended_its_answer_and_asked_again_until_then(
    host: Host, model: Path, diary: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, aborts: int
) -> None:
    monkeypatch.setattr(looks, "ABORT_AGAIN_S", 0.1)
    async with host() as running:
        await loaded(running, model, diary)
        await given_up(running, stream=stream, pieces=1000, wait=0.01, aborts=aborts)
        result = await running.agent.handle(ABORT)
        assert isinstance(result, m.AbortAcknowledged), result
        assert result.proof.request == "r7"
        assert told(diary) == ["abort r7"] * aborts
        assert running.ingress.in_flight(incarnation()) == 0
        assert running.ended == [], "it was never half-closed"
        await stopped(running, incarnation())
        gone = await running.agent.handle(ABORT)
        assert isinstance(gone, m.Refused)


async def test_an_engine_that_does_not_end_it_acknowledges_nothing_and_then_sees_the_hang_up(
    host: Host, model: Path, diary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "ABORT_S", 0.3)
    async with host() as running:
        await loaded(running, model, diary)
        await given_up(running, stream=True, pieces=1000, wait=0.01, aborts=99)
        result = await running.agent.handle(ABORT)
        assert isinstance(result, m.Refused)
        assert (result.code, told(diary)) == ("engine_error", ["abort r7"])
        with trio.fail_after(30):
            while not running.ended:
                await trio.sleep(0.01)
        assert running.ended[0][0] == "r7"
        assert running.ingress.in_flight(incarnation()) == 0
        await stopped(running, incarnation())


async def test_an_abort_of_what_never_came_through_this_host_is_asked_for_once_and_proves_nothing(
    host: Host, model: Path, diary: Path
) -> None:
    async with host() as running:
        await loaded(running, model, diary)
        result = await running.agent.handle(ABORT)
        assert isinstance(result, m.Refused)
        assert (result.code, told(diary)) == ("engine_error", ["abort r7"])
        await stopped(running, incarnation())


async def test_both_keys_are_kept_out_of_the_log(host: Host, model: Path, diary: Path) -> None:
    async with host() as running:
        await loaded(running, model, diary)
        record = await running.agent.journal.launch(incarnation())
        assert record is not None
        assert record.admin_key
        assert record.admin_key != record.key
        assert repr(record).count(record.admin_key) == 0
        words = logs.last_words(record.log_path)
        assert words == ["starting as serve with key <redacted>", "parks with key <redacted>"]
        await stopped(running, incarnation())
        record = await running.agent.journal.launch(incarnation())
        assert record is not None
        assert (record.key, record.admin_key) == ("", "")


async def test_shared_memory_of_a_killed_engine_goes_with_the_proof_of_its_end(host, model, diary) -> None:
    async with host() as running:
        engine = await loaded(running, model, diary, fault="shm")
        segment = Path(f"/dev/shm/fake_{engine.processes[0].pid}")
        assert segment.exists()
        with segment.open("rb"):  # somebody else looks at it
            os.kill(engine.processes[0].pid, signal.SIGKILL)
            await running.report(m.MemberExit)
            await stopped(running, incarnation())
            assert segment.exists()
        segment.unlink()


async def test_shared_memory_is_seen_when_it_is_made_not_when_the_next_look_is_due(
    host: Host, model: Path, diary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may die right after it made some, and then nobody could tell whose it is."""
    monkeypatch.setattr(launching, "OVERSEE_FIRST_S", 600.0)
    monkeypatch.setattr(custody, "OVERSEE_S", 600.0)
    async with host() as running, trio.open_nursery() as nursery:
        results: list[m.Result] = []

        async def start() -> None:
            results.append(await running.agent.handle(launch(model, diary=str(diary), fault="shm_told")))

        nursery.start_soon(start)
        with trio.fail_after(30):
            while not (made := await segments_of(running)):
                await trio.sleep(0.02)
        assert all(Path(one.path).exists() for one in made)
        diary.with_suffix(".exit").touch()
        with trio.fail_after(30):
            while not results:
                await trio.sleep(0.02)
        assert isinstance(results[0], m.LaunchRefused)
        assert not any(Path(one.path).exists() for one in made)


async def segments_of(running: Running) -> frozenset[Segment]:
    record = await running.agent.journal.launch(incarnation())
    return frozenset() if record is None else record.segments


async def test_what_bears_the_name_of_an_engine_that_died_goes_though_nobody_saw_it(
    host: Host, model: Path, diary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_watch(directory: Path) -> int:
        raise OSError("no watch to be had")

    monkeypatch.setattr(arrivals, "_watch", no_watch)
    async with host() as running:
        result = await running.agent.handle(launch(model, diary=str(diary), fault="shm_torch"))
        assert isinstance(result, m.LaunchRefused)
        (path,) = told(diary)
        assert not Path(path).exists()


async def test_a_restarted_role_removes_what_an_engine_left(host: Host, model: Path, diary: Path) -> None:
    async with host() as running:
        engine = await loaded(running, model, diary, fault="shm")
        segment = Path(f"/dev/shm/fake_{engine.processes[0].pid}")
    os.kill(engine.processes[0].pid, signal.SIGKILL)
    os.waitpid(engine.processes[0].pid, 0)
    assert segment.exists()
    async with host() as running:
        await running.report(m.MemberExit)
        assert not segment.exists()


async def test_an_engine_that_listens_beyond_loopback_is_not_served(host: Host, model: Path, diary: Path) -> None:
    async with host() as running:
        result = await running.agent.handle(launch(model, fault="worker_door"))
        assert isinstance(result, m.LaunchRefused)
        assert "listens beyond loopback, where no key guards it: 0.0.0.0:" in result.reason


@pytest.mark.parametrize("fault", ["door", "open"])
async def test_a_family_whose_workers_listen_by_themselves_is_held_to_it_at_its_api(host, model, fault) -> None:
    async with host() as running:
        running.agent.registry.one.workers_listen = True
        result = await running.agent.handle(launch(model, fault=fault))
        assert isinstance(result, m.LaunchRefused)
        assert "listens beyond loopback, where no key guards it: 0.0.0.0:" in result.reason


async def test_a_rendezvous_of_workers_beyond_loopback_is_let_be_where_a_library_makes_it(host, model) -> None:
    async with host() as running:
        running.agent.registry.one.workers_listen = True
        assert isinstance(await running.agent.handle(launch(model, fault="worker_door")), m.Launched)
        await stopped(running, incarnation())


async def test_an_engine_that_opens_a_door_later_is_ended(host, model, diary, monkeypatch) -> None:
    monkeypatch.setattr(custody, "OVERSEE_S", 0.2)
    async with host() as running:
        await loaded(running, model, diary, fault="door_later")
        exited = await running.report(m.MemberExit)
        assert "the engine was ended: the engine listens beyond loopback" in exited.last_words
        assert not await served(running)
        await stopped(running, incarnation())


async def test_an_engine_that_opened_a_door_while_no_role_ran_is_never_served(host, model, diary, monkeypatch) -> None:
    """The look is a part of finding it again: no request passes before it."""
    async with host() as running:
        engine = await loaded(running, model, diary, fault="door_told")
    diary.with_suffix(".door").touch()
    with trio.fail_after(30):
        while "door" not in told(diary):
            await trio.sleep(0.02)
    monkeypatch.setattr(custody, "OVERSEE_S", 600.0)
    async with host() as running:
        assert not await served(running)
        looked = await running.agent.handle(look(engine))
        assert isinstance(looked, m.ProbeResult)
        assert looked.usable is None
        exited = await running.report(m.MemberExit)
        assert "the engine was ended: the engine listens beyond loopback" in exited.last_words
        assert not await served(running)
        await stopped(running, incarnation())


# --- the journal of steps ---------------------------------------------------------------------------------


async def test_a_step_is_begun_once_by_its_id_and_never_behind_a_newer_one(tmp_path: Path, model: Path) -> None:
    journal = await open_journal(tmp_path / "host" / "journal.sqlite3")
    await journal.arm(launch(model), "0-1", 8100, "k", tmp_path / "x.log", Millis(1), admin_key="a")
    first = release((), token=4)
    assert not await journal.may_have_begun(first)
    assert await journal.begin_step(first, Millis(2))
    assert not await journal.begin_step(first, Millis(3))
    assert await journal.may_have_begun(first)
    older = release((), token=3, command_id="older")
    assert not await journal.begin_step(older, Millis(4))
    await journal.close()
    journal = await open_journal(tmp_path / "host" / "journal.sqlite3")
    (record,) = await journal.launches()
    assert (record.memory, record.admin_key) == (Memory.RELEASING, "a")
    await journal.memory_is(incarnation(), Memory.PARKED)
    await journal.asked_for(incarnation(), "ids:1")
    await journal.asked_for(incarnation(), "ids:2")  # the first answer is the reference
    await journal.made(incarnation(), frozenset({Segment("/dev/shm/x", 1, 2)}))
    (record,) = await journal.launches()
    assert (record.memory, record.canary, record.segments) == (
        Memory.PARKED,
        "ids:1",
        {Segment("/dev/shm/x", 1, 2)},
    )
    await journal.close()


async def test_a_journal_of_before_is_taken_over_with_its_engines(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "host" / "journal.sqlite3"
    await (await open_journal(path)).close()
    path.unlink()
    db = sqlite3.connect(path)
    db.executescript(journal_file._SCHEMA)
    command = launch(model)
    text = canonical(encode_message(command))
    db.execute(
        "INSERT INTO launch (deployment, idx, generation, command_id, digest, token, launch_id, command, port, key, "
        "log_path, started_ms, state) VALUES ('d1', 0, 1, 'c', 'x', 1, '0-1', ?, 8100, 'k', '/x', 1, 'ready')",
        (text,),
    )
    db.execute("INSERT INTO process VALUES ('d1', 0, 1, 10, 'boot', 5, 'api', 0)")
    db.execute("PRAGMA user_version = 1")
    db.commit()
    db.close()
    path.chmod(0o600)
    journal = await open_journal(path)
    (record,) = await journal.launches()
    assert (record.key, record.admin_key, record.memory, record.canary) == ("k", "", Memory.HELD, None)
    await journal.close()
    await (await open_journal(path)).close()  # and again
