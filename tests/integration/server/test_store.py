"""What the store promises, on real files: durable means durable, and nothing is reset, invented or left half done."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import trio

from capyctl.control import events
from capyctl.control.records import Counter, Record
from capyctl.errors import Failure, Refusal
from capyctl.server import schema
from capyctl.server.lock import held as lock_held
from capyctl.server.store import Commit, Finished, Key, KeyReceipt, Store

RECORDS = {"counter": Counter, "request": Counter}


def counter(key: str, value: int | None, kind: str = "counter") -> Record:
    return Record(kind=kind, key=key, value=None if value is None else Counter(value=value))


def held(store: Store, kind: str = "counter") -> dict[str, int]:
    return {record.key: record.value.value for record in store.load() if record.kind == kind}


def tick(now_ms: int) -> events.Event:
    return events.Ticked(now_ms=now_ms)


def arrived(now_ms: int = 1) -> events.Event:
    return events.RequestArrived(now_ms=now_ms, request="R", route="m", api="chat", stream=False, body_bytes=1)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "server"


async def test_what_is_durable_is_there_after_the_store_is_opened_again(home, nursery):
    store = Store(home, RECORDS)
    await nursery.start(store.run)
    await store.append(tick(1), [counter("a", 1), counter("b", 2)], 1, waited=True).durable()
    await store.append(tick(2), [counter("a", 7), counter("b", None)], 2, waited=True).durable()
    again = sqlite3.connect(home / "srv.sqlite3")
    assert again.execute("SELECT key, json FROM rows").fetchall() == [("a", '{"value":7}')]


async def test_steps_that_pile_up_share_one_transaction(home):
    store = Store(home, RECORDS)
    async with trio.open_nursery() as nursery:
        transactions = count_transactions(store)
        commits = [store.append(tick(n), [counter("n", n)], n, waited=True) for n in range(500)]
        await nursery.start(store.run)
        await commits[-1].durable()
        assert transactions() == 1
        nursery.cancel_scope.cancel()
    store.close()
    again = Store(home, RECORDS)
    assert held(again) == {"n": 499}
    assert len(again.journal()[1]) == 500
    again.close()


def count_transactions(store: Store):
    begun = [0]
    write = store._write

    def counting(batch):
        begun[0] += 1
        write(batch)

    store._write = counting
    return lambda: begun[0]


async def test_what_nobody_waits_for_is_written_when_the_store_ends(home):
    store = Store(home, RECORDS)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        store.append(tick(1), [], 1, waited=False)
        store.finished(finished("R1"))
        nursery.cancel_scope.cancel()
    store.close()
    again = Store(home, RECORDS)
    assert [event.now_ms for event in again.journal()[1]] == [1]
    assert requests_db(home).execute("SELECT request, outcome FROM finished").fetchall() == [("R1", "ok")]
    again.close()


def finished(request: str) -> Finished:
    return Finished(request=request, deployment="D", incarnation="D/0@1", outcome="ok", arrived_at_ms=1, ended_at_ms=2)


def requests_db(home: Path) -> sqlite3.Connection:
    return sqlite3.connect(home / "requests.sqlite3")


async def test_requests_are_left_out_of_the_journal_and_nobody_waits_for_their_rows(home):
    store = Store(home, RECORDS)
    async with trio.open_nursery() as nursery:
        commit = store.append(arrived(), [counter("R", 1, "request")], 1, waited=True)
        with trio.fail_after(30):
            await commit.durable()  # before the writer runs at all
        await nursery.start(store.run)
        with trio.fail_after(30):
            while requests_db(home).execute("SELECT key FROM rows").fetchall() != [("R",)]:
                await trio.sleep(0.01)
        store.append(arrived(), [counter("R", None, "request"), counter("S", 1, "request")], 1, waited=False)
        store.append(arrived(), [counter("S", None, "request")], 1, waited=False)
        nursery.cancel_scope.cancel()
    assert store.journal()[1] == []
    store.close()
    assert requests_db(home).execute("SELECT key FROM rows").fetchall() == []


async def test_a_request_that_ends_while_its_row_is_being_written_leaves_none(home):
    store = Store(home, RECORDS)
    on_its_way, go_on = threading.Event(), threading.Event()
    write = store._write

    def slowly(batch):
        on_its_way.set()
        go_on.wait(60)
        write(batch)

    store._write = slowly
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        store.append(
            arrived(), [counter("brief", 1, kind="request"), counter("long", 1, kind="request")], 1, waited=True
        )
        await trio.to_thread.run_sync(on_its_way.wait, 10)
        store.append(arrived(), [counter("brief", None, kind="request")], 2, waited=False)
        store.append(arrived(), [counter("unwritten", 1, kind="request")], 3, waited=False)
        store.append(arrived(), [counter("unwritten", None, kind="request")], 4, waited=False)
        go_on.set()
        nursery.cancel_scope.cancel()
    store.close()
    again = Store(home, RECORDS)
    assert held(again, "request") == {"long": 1}
    again.close()


async def test_the_journal_begins_anew_from_a_snapshot_when_it_is_long(home, monkeypatch):
    monkeypatch.setattr("capyctl.server.store.JOURNAL_MAX", 10)
    store = Store(home, RECORDS)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        for number in range(25):
            await store.append(tick(number), [counter("n", number)], number, waited=True).durable()
        nursery.cancel_scope.cancel()
    snapshot, journal = store.journal()
    cursor = store.cursor
    store.close()
    assert [event.now_ms for event in journal] == [22, 23, 24]
    assert [(record.key, record.value.value) for record in snapshot] == [("n", 21)]
    again = Store(home, RECORDS)
    assert again.cursor == cursor
    assert cursor.endswith(":25")
    again.close()


async def test_a_write_that_fails_fails_every_commit_and_every_later_one(home):
    store = Store(home, RECORDS)
    with pytest.RaisesGroup(pytest.RaisesExc(Failure, match="cannot be written")):
        async with trio.open_nursery() as nursery:
            await nursery.start(store.run)
            await store.append(tick(1), [counter("a", 1)], 1, waited=True).durable()
            bad = store.append(tick(2), [Record(kind="counter", key="a", value=Key)], 2, waited=True)
            nursery.start_soon(expect_failure, bad)
    with pytest.raises(Failure):
        await store.append(tick(3), [counter("a", 3)], 3, waited=True).durable()
    store.close()
    again = Store(home, RECORDS)
    assert held(again) == {"a": 1}
    assert len(again.journal()[1]) == 1
    again.close()


async def test_a_full_disk_is_named_with_its_file_and_harms_nothing_that_was_stored(home):
    store = Store(home, RECORDS)
    lots = Record(kind="counter", key="b" * 500_000, value=Counter(value=2))
    with pytest.RaisesGroup(pytest.RaisesExc(Failure, match=re.escape(f"{home / 'srv.sqlite3'} cannot be written"))):
        async with trio.open_nursery() as nursery:
            await nursery.start(store.run)
            await store.append(tick(1), [counter("a", 1)], 1, waited=True).durable()
            (pages,) = store._main.execute("PRAGMA page_count").fetchone()
            store._main.execute(f"PRAGMA max_page_count = {pages + 2}")
            with pytest.raises(Failure) as full:
                await store.put_key(Key(name="k" * 500_000, digest="d", models=None, created_at_ms=1), asked(1))
            assert full.value.code == "insufficient_space"
            await store.append(tick(2), [counter("a", 2)], 2, waited=True).durable()  # that one alone failed
            with pytest.raises(Failure) as full:
                await store.append(tick(3), [lots], 3, waited=True).durable()
            assert (full.value.code, full.value.exit_code) == ("insufficient_space", 4)
            await trio.sleep_forever()
    store.close()
    again = Store(home, RECORDS)
    assert held(again) == {"a": 2}
    assert again.named_keys() == []
    again.close()


async def expect_failure(commit: Commit) -> None:
    with pytest.raises(Failure):
        await commit.durable()


WRITER = """
import sys, trio
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_store import RECORDS, counter, tick
from capyctl.server.lock import held as lock_held
from capyctl.server.store import Store

async def main():
    store = Store(Path(sys.argv[1]), RECORDS)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        number = 0
        while True:
            number += 1
            commits = [store.append(tick(number), [counter("n", number), counter("twin", number)], number, waited=True)]
            await commits[-1].durable()
            print(number, flush=True)

trio.run(main)
"""


def test_a_writer_killed_at_any_moment_loses_nothing_that_it_called_durable(home):
    last = 0
    for round_number in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(home), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        assert child.stdout is not None
        said = int(child.stdout.readline())
        time.sleep(0.05 + 0.07 * round_number)  # a moment of its own for each round, mid-write as likely as not
        child.send_signal(signal.SIGKILL)
        rest = [int(line) for line in child.stdout.read().split() if line.isdigit()]
        child.wait()
        last = max([said, *rest])
        store = Store(home, RECORDS)
        rows = held(store)
        journal = store.journal()[1]
        store.close()
        assert rows["n"] == rows["twin"] >= last
        assert journal[-1].now_ms == rows["n"]


def test_a_store_of_a_newer_release_is_refused_and_not_touched(home):
    Store(home, RECORDS).close()
    database = sqlite3.connect(home / "srv.sqlite3")
    database.execute(f"PRAGMA user_version = {len(schema.STORE) + 1}")
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    before = snapshot_of(home)
    with pytest.raises(Refusal) as refused:
        Store(home, RECORDS)
    assert (refused.value.code, refused.value.exit_code) == ("store_from_newer_version", 5)
    assert snapshot_of(home) == before


def snapshot_of(home: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in home.iterdir()}


@pytest.mark.parametrize("damage", ["text", "truncated", "scrambled", "stranger"])
def test_a_damaged_store_is_refused_and_never_reset(home, damage):
    Store(home, RECORDS).close()
    path = home / "srv.sqlite3"
    content = path.read_bytes()
    match damage:
        case "text":
            path.write_bytes(b"not a database at all" * 10)
        case "truncated":
            path.write_bytes(content[: len(content) // 2 + 100])
        case "scrambled":
            path.write_bytes(content[:4096] + os.urandom(len(content) - 4096))
        case "stranger":
            path.write_bytes(content[:68] + b"\x00\x00\x00\x07" + content[72:])
    damaged = path.read_bytes()
    with pytest.raises(Failure) as failed:
        Store(home, RECORDS)
    assert failed.value.exit_code == 13
    assert str(path) in failed.value.message
    assert damage == "stranger" or schema.WAY_OUT in failed.value.message
    assert path.read_bytes() == damaged


def test_a_row_of_an_unknown_kind_or_shape_stops_the_load(home):
    Store(home, RECORDS).close()
    database = sqlite3.connect(home / "srv.sqlite3")
    for kind, text in (("mystery", "{}"), ("counter", '{"value": "7"}')):
        database.execute("INSERT OR REPLACE INTO rows VALUES (?, 'k', ?)", (kind, text))
        database.commit()
        store = Store(home, RECORDS)
        with pytest.raises(Failure, match=kind):
            store.load()
        store.close()
        database.execute("DELETE FROM rows")
    database.close()


def test_its_files_are_the_owners_alone_whatever_the_umask(home):
    before = os.umask(0)
    try:
        store = Store(home, RECORDS)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()}
    store.close()
    assert {"srv.sqlite3", "srv.sqlite3-wal", "srv.sqlite3-shm", "requests.sqlite3"} <= set(modes)
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["srv.sqlite3", "requests.sqlite3", "srv.sqlite3-wal"])
@pytest.mark.parametrize("spoil", ["mode", "link", "second name", "pipe", "directory"])
def test_a_file_that_is_not_its_owners_alone_is_refused_and_left(home, name, spoil):
    Store(home, RECORDS).close()
    path = home / name
    path.touch(mode=0o600)
    match spoil:
        case "mode":
            path.chmod(0o666)
        case "link":
            path.rename(home / "real")
            path.symlink_to(home / "real")
        case "second name":
            os.link(path, home / "second")
        case "pipe":
            path.unlink()
            os.mkfifo(path, 0o600)
        case "directory":
            path.unlink()
            path.mkdir(mode=0o700)
    before = os.lstat(path)
    with pytest.raises(Refusal) as refused:
        Store(home, RECORDS)
    assert (refused.value.code, str(path) in refused.value.message) == ("unsafe_file", True)
    assert os.lstat(path).st_mode == before.st_mode


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_reads_nothing_of_it(home):
    Store(home, RECORDS).close()
    for parent in home.parents:
        if parent != Path("/") and parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(0o755)
    script = f"""
import os
import re
os.setgid(65534); os.setuid(65534)
for path in ({str(home)!r}, {str(home / "srv.sqlite3")!r}):
    try:
        os.listdir(path) if path.endswith("server") else open(path)
    except PermissionError:
        print("refused")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused", "refused"]


def asked(number: int) -> KeyReceipt:
    return KeyReceipt(command=f"c{number}", digest="d", name="ci", models=("a", "b"), created_at_ms=5, salt="s")


@pytest.mark.parametrize(
    ("code", "free", "named"),
    [
        (sqlite3.SQLITE_FULL, 1 << 30, "insufficient_space"),
        (sqlite3.SQLITE_IOERR_WRITE, 0, "insufficient_space"),
        (sqlite3.SQLITE_IOERR_SHMSIZE, 4096, "insufficient_space"),
        (sqlite3.SQLITE_CANTOPEN, 0, "insufficient_space"),
        (sqlite3.SQLITE_IOERR_WRITE, 1 << 30, "internal"),
        (sqlite3.SQLITE_CORRUPT, 0, "internal"),
    ],
)
def test_a_full_disk_has_its_code_however_sqlite_calls_it(tmp_path, monkeypatch, code, free, named):
    wrong = sqlite3.OperationalError("disk I/O error")
    wrong.sqlite_errorcode = code
    real = os.statvfs(tmp_path)
    disk = os.statvfs_result((4096, 4096, *real[2:4], free // 4096, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    assert schema.unusable(tmp_path / "a.sqlite3", wrong, "nothing was reset").code == named


async def test_named_keys_are_kept_by_digest_and_what_made_them_beside(home):
    store = Store(home, RECORDS)
    await store.put_key(Key(name="ci", digest="d1", models=("a", "b"), created_at_ms=5), asked(1))
    await store.put_key(Key(name="all", digest="d2", models=None, created_at_ms=6), asked(2))
    with pytest.raises(sqlite3.IntegrityError):
        await store.put_key(Key(name="ci", digest="d3", models=None, created_at_ms=7), asked(3))
    store.close()
    again = Store(home, RECORDS)
    assert [(key.name, key.models) for key in again.named_keys()] == [("all", None), ("ci", ("a", "b"))]
    assert again.key_receipts() == [asked(1), asked(2)]
    assert await again.drop_key("ci", asked(4))
    assert not await again.drop_key("ci", asked(5))
    again.close()


async def test_a_store_that_somebody_else_wrote_fails_with_a_code(home):
    store = Store(home, RECORDS)
    other = sqlite3.connect(home / "srv.sqlite3")
    other.execute("INSERT INTO journal (seq, recorded_at_ms, table_version, kind, json) VALUES (1, 1, 1, 'x', '{}')")
    other.commit()
    other.close()
    with pytest.RaisesGroup(pytest.RaisesExc(Failure, match=r"srv\.sqlite3 cannot be written: IntegrityError")):
        async with trio.open_nursery() as nursery:
            await nursery.start(store.run)
            store.append(tick(1), [counter("n", 1)], 1, waited=True)
    store.close()


# --- the lock --------------------------------------------------------------------


def test_two_roles_never_share_a_state_directory(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from capyctl.server.lock import held\n"
        "with held(Path(sys.argv[1]), 'standalone'):\n    print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "role.lock")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(Refusal) as refused, lock_held(tmp_path / "role.lock", "standalone"):
            pass
        assert refused.value.exit_code == 13
        assert f"process {child.pid} already runs standalone" in refused.value.message
        (tmp_path / "role.lock").unlink()  # somebody tidied up: the directory is held all the same
        with pytest.raises(Refusal, match="another process already runs"), lock_held(tmp_path / "role.lock", "x"):
            pass
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    with lock_held(tmp_path / "role.lock", "standalone"):  # the kernel let go of it
        assert (tmp_path / "role.lock").read_text() == f"{os.getpid()}\n"
