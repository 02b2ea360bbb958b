"""The journal: what is durable, what is fenced, what is replayed, who may read it."""

# A test may block and poll: it is alone in its loop, and what it waits for has no event.

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from capyctl.errors import Failure, Lost, Refusal
from capyctl.fsm.proofs import Gone
from capyctl.fsm.types import Generation, Millis, ProcessIdentity, Role
from capyctl.host.journal import Journal, open_journal
from capyctl.session import messages as m

from .fakes import incarnation, launch

API = ProcessIdentity(10, "boot", 5)
WORKER = ProcessIdentity(11, "boot", 6, Role.WORKER, 1)


async def opened(tmp_path: Path) -> Journal:
    return await open_journal(tmp_path / "host" / "journal.sqlite3")


async def arm(journal: Journal, command: m.Launch) -> None:
    await journal.arm(command, "0-1", 8100, "the key", Path("/logs/x.log"), Millis(1))


async def test_what_was_written_is_there_after_a_reopening(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    command = launch(tmp_path, mode="serve")
    await arm(journal, command)
    await journal.spawned(incarnation(), (API,), ProcessIdentity(12, "boot", 7, Role.HELPER))
    await journal.ready(incarnation(), (API, WORKER))
    await journal.close()
    journal = await opened(tmp_path)
    (record,) = await journal.launches()
    assert record.command == command
    assert (record.state, record.port, record.key) == ("ready", 8100, "the key")
    assert record.processes == (API, WORKER)
    assert [p.role for p in record.processes] == [Role.API, Role.WORKER]
    assert record.writer == ProcessIdentity(12, "boot", 7, Role.HELPER)
    assert "the key" not in repr(record)
    await journal.close()


async def test_a_handle_is_armed_once_and_never_an_older_one(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    await arm(journal, launch(tmp_path, 5))
    for generation in (5, 4):
        with pytest.raises(Refusal, match="generation 5 was already launched") as refused:
            await arm(journal, launch(tmp_path, generation))
        assert refused.value.code == "lifecycle_conflict"
    assert await journal.fence(incarnation(5)) is False
    assert await journal.fence(incarnation(7)) is True
    with pytest.raises(Refusal):
        await arm(journal, launch(tmp_path, 6))
    await arm(journal, launch(tmp_path, 8))
    await journal.close()


async def test_a_proven_end_takes_the_key_and_the_record_out(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    await arm(journal, launch(tmp_path))
    await journal.gone(incarnation())
    assert await journal.launches() == []
    record = await journal.launch(incarnation())
    assert record is not None
    assert (record.state, record.key) == ("gone", "")
    await journal.close()


async def test_results_are_replayed_by_id_and_a_changed_content_is_a_conflict(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    command = m.Terminate(command_id="t1", incarnation=incarnation(), processes=(API,), limit_ms=Millis(1000))
    assert await journal.recall(command) is None
    await journal.accept(command, Millis(1))
    assert await journal.recall(command) is None
    assert await journal.unfinished() == [command]
    proof = Gone(
        incarnation=incarnation(),
        processes=(API,),
        absent=frozenset({API}),
        group_empty=True,
        observed_at_ms=Millis(2),
    )
    result = m.Absent(command_id="t1", proof=proof)
    await journal.finish(command, result, Millis(3))
    assert await journal.recall(command) == result
    assert await journal.unfinished() == []
    with pytest.raises(Refusal, match="already used for something else"):
        await journal.recall(attrs.evolve(command, limit_ms=Millis(2000)))
    await journal.close()


async def test_old_results_go_and_those_of_living_launches_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capyctl.host.journal.RESULTS_KEPT", 3)
    journal = await opened(tmp_path)
    living = launch(tmp_path, command_id="living")
    await arm(journal, living)
    await journal.finish(living, m.Done(command_id="living"), Millis(1))
    commands = [m.CloseIngress(command_id=f"c{number}", incarnation=incarnation()) for number in range(6)]
    for command in commands:
        await journal.finish(command, m.Done(command_id=command.command_id), Millis(1))
    kept = [command.command_id for command in (living, *commands) if await journal.recall(command)]
    assert kept == ["living", "c3", "c4", "c5"]
    await journal.close()


async def test_only_the_owner_reads_it_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        journal = await opened(tmp_path)
        await arm(journal, launch(tmp_path))
        names = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "host").iterdir()}
    finally:
        os.umask(old)
    assert names == {"journal.sqlite3": 0o600, "journal.sqlite3-wal": 0o600, "journal.sqlite3-shm": 0o600}
    assert (tmp_path / "host").stat().st_mode & 0o777 == 0o700
    await journal.close()


async def test_a_file_that_is_no_journal_or_a_newer_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite3"
    path.write_text("something else entirely, and long enough to be a header of a database file " * 20)
    path.chmod(0o600)
    with pytest.raises(Failure, match=r"cannot be read as a journal: .*Restore it from a backup, or move it away"):
        await open_journal(path)
    newer = tmp_path / "newer.sqlite3"
    newer.touch(mode=0o600)
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(Failure) as refused:
        await open_journal(newer)
    assert refused.value.code == "store_from_newer_version"
    link = tmp_path / "link.sqlite3"
    link.symlink_to(newer)
    with pytest.raises(Refusal, match="symbolic link"):
        await open_journal(link)


async def test_a_journal_that_lost_the_processes_of_a_launch_is_refused_and_nothing_in_it_reads_as_gone(
    tmp_path: Path,
) -> None:
    journal = await opened(tmp_path)
    await arm(journal, launch(tmp_path, mode="serve"))
    await journal.spawned(incarnation(), (API,), ProcessIdentity(12, "boot", 7, Role.HELPER))
    await journal.close()
    with sqlite3.connect(tmp_path / "host" / "journal.sqlite3") as db:
        db.execute("DELETE FROM process")
    db.close()
    with pytest.raises(Failure, match=f"lost the processes of {incarnation()}. Restore it from a backup"):
        await opened(tmp_path)


async def test_a_journal_that_others_may_have_written_is_refused_and_left(tmp_path: Path) -> None:
    path = tmp_path / "host" / "journal.sqlite3"
    await (await open_journal(path)).close()
    path.chmod(0o666)
    with pytest.raises(Refusal) as refused:
        await open_journal(path)
    assert (refused.value.code, f"chmod 600 {path}" in refused.value.message) == ("unsafe_file", True)
    assert path.stat().st_mode & 0o777 == 0o666


async def test_a_full_disk_is_named_and_nobody_concludes_anything_from_it(tmp_path: Path) -> None:
    path = tmp_path / "host" / "journal.sqlite3"
    journal = await open_journal(path)
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    lost = []
    for number in range(200):
        try:
            await journal.accept(
                m.Terminate(
                    command_id=f"t{number}", incarnation=incarnation(), processes=(API,), limit_ms=Millis(1000)
                ),
                Millis(1),
            )
        except Lost as full:
            lost.append(full)
            break
    assert (lost[0].code, str(path) in lost[0].message) == ("insufficient_space", True)
    assert len(await journal.unfinished()) == number
    await journal.close()


async def test_a_commit_that_returned_survives_a_kill(tmp_path: Path) -> None:
    program = (
        "import os, sys, trio\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent.parent)!r})\n"
        "from host.fakes import launch\n"
        "from capyctl.host.journal import open_journal\n"
        "async def main():\n"
        f"    journal = await open_journal(Path({str(tmp_path / 'host' / 'journal.sqlite3')!r}))\n"
        f"    await journal.arm(launch(Path('/m'), command_id='k'), '0-1', 8100, 'k', Path('/l'), 1)\n"
        "    os.kill(os.getpid(), 9)\n"
        "trio.run(main)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert ended.returncode == -9, ended.stderr.decode()
    journal = await opened(tmp_path)
    (record,) = await journal.launches()
    assert (record.command.command_id, record.state, record.processes) == ("k", "journaled", ())
    await journal.close()
    with sqlite3.connect(tmp_path / "host" / "journal.sqlite3") as db:
        (text,) = db.execute("SELECT command FROM launch").fetchone()
    db.close()
    assert json.loads(text)["kind"] == "launch"


async def test_a_key_whose_launch_is_gone_is_nowhere_on_the_disk(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    key = "k" * 20 + "-of-a-launch-" + "y" * 20
    for generation in range(3, 6):
        command = launch(tmp_path, generation)
        await journal.arm(command, "0-1", 8100, key, Path("/logs/x.log"), Millis(1), admin_key=key[::-1])
        on_disk = [file.read_bytes() for file in (tmp_path / "host").iterdir()]
        assert any(key.encode() in content for content in on_disk), "it is kept while the launch lives"
        await journal.gone(attrs.evolve(incarnation(), generation=Generation(generation)))
        for file in (tmp_path / "host").iterdir():
            content = file.read_bytes()
            assert key.encode() not in content, file
            assert key[::-1].encode() not in content, file
    await journal.close()
