"""The host's own memory of what it launched: `host/journal.sqlite3`, owner-only, durable before effects.

W3: a launch is written before its process is spawned. W4: identities before "launched" is answered,
and before the gate of the spawned process opens. W11: a terminate before anything is signalled.
A finished command's result is kept and replayed by its id. A handle (deployment, index, generation)
is spawned at most once for ever: the launch row is the fence, and a fence row stands for a handle that
was refused before it had one.

All calls go to one thread, one at a time; SQLite is told `synchronous=FULL`, so a commit that returned
survives a power loss. Launch keys are in here, which is why the file is 0600.
Source: lifecycle 14, 17, 18.3, 19; decisions 24, 25.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import attrs
import trio

from capyctl.errors import Failure, Refusal
from capyctl.fsm.types import DeploymentId, Generation, Incarnation, Millis, ProcessIdentity, Role
from capyctl.host.logs import private_directory
from capyctl.session.codec import canonical, decode_message, encode_message
from capyctl.session.messages import Command, Launch, Result

JOURNAL_FILE = "journal.sqlite3"

T = TypeVar("T")
VERSION = 1
RESULTS_KEPT = 1_000  # of commands whose launches are gone
_SCHEMA = """
CREATE TABLE launch (
  deployment TEXT NOT NULL, idx INTEGER NOT NULL, generation INTEGER NOT NULL,
  command_id TEXT NOT NULL UNIQUE, digest TEXT NOT NULL, token INTEGER NOT NULL, launch_id TEXT NOT NULL,
  command TEXT NOT NULL, port INTEGER NOT NULL, key TEXT NOT NULL, log_path TEXT NOT NULL,
  started_ms INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'journaled',
  writer TEXT, PRIMARY KEY (deployment, idx, generation)
) STRICT;
CREATE TABLE process (
  deployment TEXT NOT NULL, idx INTEGER NOT NULL, generation INTEGER NOT NULL,
  pid INTEGER NOT NULL, boot_id TEXT NOT NULL, start_ticks INTEGER NOT NULL,
  role TEXT NOT NULL, number INTEGER NOT NULL,
  PRIMARY KEY (deployment, idx, generation, pid, boot_id, start_ticks)
) STRICT;
CREATE TABLE fence (
  deployment TEXT NOT NULL, idx INTEGER NOT NULL, generation INTEGER NOT NULL, PRIMARY KEY (deployment, idx)
) STRICT;
CREATE TABLE accepted (
  command_id TEXT PRIMARY KEY, digest TEXT NOT NULL, command TEXT NOT NULL, accepted_ms INTEGER NOT NULL, result TEXT
) STRICT;
"""


@attrs.frozen(kw_only=True)
class LaunchRecord:
    """One launch as the journal has it. `state`: journaled, spawned, ready, gone."""

    command: Launch
    launch_id: str
    port: int
    key: str = attrs.field(repr=False)
    log_path: Path
    started_ms: Millis
    state: str
    writer: ProcessIdentity | None
    processes: tuple[ProcessIdentity, ...]

    @property
    def incarnation(self) -> Incarnation:
        return self.command.incarnation


def digest_of(command: Command) -> str:
    """SHA-256 of a command's content, its id left out: the same id with another digest is a conflict."""
    content = encode_message(command)
    content.pop("command_id")
    return hashlib.sha256(canonical(content).encode("ascii")).hexdigest()


@attrs.define(eq=False)
class Journal:
    """The open journal. Made by `open_journal`; every method is one durable transaction or one read."""

    _db: sqlite3.Connection
    _limiter: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1))

    async def close(self) -> None:
        await self._in_thread(self._db.close)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        # Not abandoned on cancel: a write that began is finished, and its outcome known.
        return await trio.to_thread.run_sync(work, limiter=self._limiter)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # --- launches ----------------------------------------------------------------------------------

    async def arm(self, command: Launch, launch_id: str, port: int, key: str, log_path: Path, now: Millis) -> None:
        """W3: the launch is about to be spawned.

        Raises: Refusal `lifecycle_conflict` for a handle that was launched or fenced before, or is older
        than one that was.
        """

        def write() -> None:
            with self._transaction() as db:
                self._check_fence(db, command.incarnation)
                self._drop_older(db, command.incarnation)
                db.execute(
                    "INSERT INTO launch (deployment, idx, generation, command_id, digest, token, launch_id, command, "
                    "port, key, log_path, started_ms) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        *_handle(command.incarnation),
                        command.command_id,
                        digest_of(command),
                        command.token,
                        launch_id,
                        canonical(encode_message(command)),
                        port,
                        key,
                        str(log_path),
                        now,
                    ),
                )

        await self._in_thread(write)

    async def fence(self, incarnation: Incarnation) -> bool:
        """Make sure that this handle can never start here; False when it already has been launched."""

        def write() -> bool:
            with self._transaction() as db:
                deployment, index, generation = _handle(incarnation)
                launched = db.execute(
                    "SELECT 1 FROM launch WHERE deployment = ? AND idx = ? AND generation = ?",
                    (deployment, index, generation),
                ).fetchone()
                db.execute(
                    "INSERT INTO fence VALUES (?, ?, ?) ON CONFLICT (deployment, idx) "
                    "DO UPDATE SET generation = max(generation, excluded.generation)",
                    (deployment, index, generation),
                )
                return launched is None

        return await self._in_thread(write)

    def _check_fence(self, db: sqlite3.Connection, incarnation: Incarnation) -> None:
        deployment, index, generation = _handle(incarnation)
        (newest,) = db.execute(
            "SELECT max(generation) FROM (SELECT generation FROM launch WHERE deployment = ? AND idx = ? "
            "UNION ALL SELECT generation FROM fence WHERE deployment = ? AND idx = ?)",
            (deployment, index, deployment, index),
        ).fetchone()
        if newest is not None and generation <= newest:
            raise Refusal(
                "lifecycle_conflict",
                f"{incarnation} cannot start here: generation {newest} was already launched or refused",
            )

    def _drop_older(self, db: sqlite3.Connection, incarnation: Incarnation) -> None:
        """Launches of this lane that are gone: the newer row is the fence now, and their results replay by id."""
        lane = _handle(incarnation)[:2]
        db.execute(
            "DELETE FROM process WHERE (deployment, idx, generation) IN (SELECT deployment, idx, generation "
            "FROM launch WHERE deployment = ? AND idx = ? AND state = 'gone')",
            lane,
        )
        db.execute("DELETE FROM launch WHERE deployment = ? AND idx = ? AND state = 'gone'", lane)

    async def spawned(
        self, incarnation: Incarnation, processes: tuple[ProcessIdentity, ...], writer: ProcessIdentity | None
    ) -> None:
        """W4, first half: the waiting process has an identity; its gate may open after this."""
        await self._record(incarnation, "spawned", processes, writer)

    async def ready(self, incarnation: Incarnation, processes: tuple[ProcessIdentity, ...]) -> None:
        """W4: the whole group at readiness."""
        await self._record(incarnation, "ready", processes, None)

    async def noticed(self, incarnation: Incarnation, processes: tuple[ProcessIdentity, ...]) -> None:
        """New members of a known group; the state stays."""
        await self._record(incarnation, None, processes, None)

    async def gone(self, incarnation: Incarnation) -> None:
        """The launch is proven gone, or proven never to have been spawned: its port is free. The key is forgotten."""

        def write() -> None:
            with self._transaction() as db:
                db.execute(
                    "UPDATE launch SET state = 'gone', key = '' WHERE deployment = ? AND idx = ? AND generation = ?",
                    _handle(incarnation),
                )

        await self._in_thread(write)

    async def _record(
        self,
        incarnation: Incarnation,
        state: str | None,
        processes: tuple[ProcessIdentity, ...],
        writer: ProcessIdentity | None,
    ) -> None:
        def write() -> None:
            handle = _handle(incarnation)
            with self._transaction() as db:
                if state is not None:
                    db.execute(
                        "UPDATE launch SET state = ?, writer = coalesce(?, writer) "
                        "WHERE deployment = ? AND idx = ? AND generation = ?",
                        (state, _writer_text(writer), *handle),
                    )
                db.executemany(
                    "INSERT OR IGNORE INTO process VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    [(*handle, p.pid, p.boot_id, p.start_ticks, p.role.value, p.number) for p in processes],
                )

        await self._in_thread(write)

    async def launches(self) -> list[LaunchRecord]:
        """Every launch that is not proven gone, oldest first."""
        return await self._in_thread(lambda: self._read("state != 'gone' ORDER BY started_ms", ()))

    async def launch(self, incarnation: Incarnation) -> LaunchRecord | None:
        """The record of one handle, gone or not."""
        where = "deployment = ? AND idx = ? AND generation = ?"
        found = await self._in_thread(lambda: self._read(where, _handle(incarnation)))
        return found[0] if found else None

    def _read(self, where: str, values: tuple[object, ...]) -> list[LaunchRecord]:
        rows = self._db.execute(
            "SELECT deployment, idx, generation, command, launch_id, port, key, log_path, started_ms, state, writer "
            f"FROM launch WHERE {where}",
            values,
        ).fetchall()
        return [self._launch_record(row) for row in rows]

    def _launch_record(self, row: tuple[object, ...]) -> LaunchRecord:
        deployment, index, generation, text, launch_id, port, key, log_path, started_ms, state, writer = row
        command = decode_message(json.loads(str(text)))
        assert isinstance(command, Launch)
        processes = self._db.execute(
            "SELECT pid, boot_id, start_ticks, role, number FROM process "
            "WHERE deployment = ? AND idx = ? AND generation = ? ORDER BY rowid",
            (deployment, index, generation),
        ).fetchall()
        return LaunchRecord(
            command=command,
            launch_id=str(launch_id),
            port=int(str(port)),
            key=str(key),
            log_path=Path(str(log_path)),
            started_ms=Millis(int(str(started_ms))),
            state=str(state),
            writer=_writer(writer),
            processes=tuple(
                ProcessIdentity(pid=pid, boot_id=boot, start_ticks=ticks, role=Role(role), number=number)
                for pid, boot, ticks, role, number in processes
            ),
        )

    # --- commands and their results ------------------------------------------------------------------

    async def accept(self, command: Command, now: Millis) -> None:
        """W11: this command is about to take effect. Accepting it again changes nothing."""

        def write() -> None:
            with self._transaction() as db:
                db.execute(
                    "INSERT OR IGNORE INTO accepted VALUES (?, ?, ?, ?, NULL)",
                    (command.command_id, digest_of(command), canonical(encode_message(command)), now),
                )

        await self._in_thread(write)

    async def finish(self, command: Command, result: Result, now: Millis) -> None:
        """Keep a command's result for replay; old ones of finished commands go."""

        def write() -> None:
            text = canonical(encode_message(result))
            with self._transaction() as db:
                db.execute(
                    "INSERT INTO accepted VALUES (?, ?, ?, ?, ?) "
                    "ON CONFLICT (command_id) DO UPDATE SET result = excluded.result",
                    (command.command_id, digest_of(command), canonical(encode_message(command)), now, text),
                )
                db.execute(
                    "DELETE FROM accepted WHERE result IS NOT NULL AND rowid <= "
                    "(SELECT max(rowid) FROM accepted) - ? AND command_id NOT IN "
                    "(SELECT command_id FROM launch WHERE state != 'gone')",
                    (RESULTS_KEPT,),
                )

        await self._in_thread(write)

    async def recall(self, command: Command) -> Result | None:
        """The recorded result of this very command, None when it has none yet.

        Raises: Refusal `idempotency_conflict` when the id belongs to another content.
        """

        def read() -> tuple[str, str | None] | None:
            found: tuple[str, str | None] | None = self._db.execute(
                "SELECT digest, result FROM accepted WHERE command_id = ?", (command.command_id,)
            ).fetchone()
            return found

        found = await self._in_thread(read)
        if found is None:
            return None
        digest, text = found
        if digest != digest_of(command):
            raise Refusal("idempotency_conflict", f"command {command.command_id} was already used for something else")
        if text is None:
            return None
        result = decode_message(json.loads(text))
        assert isinstance(result, Result)
        return result

    async def unfinished(self) -> list[Command]:
        """Accepted commands without a result, oldest first: they are run again after a restart."""

        def read() -> list[Command]:
            rows = self._db.execute("SELECT command FROM accepted WHERE result IS NULL ORDER BY rowid").fetchall()
            commands = [decode_message(json.loads(text)) for (text,) in rows]
            return [command for command in commands if isinstance(command, Command)]

        return await self._in_thread(read)


async def open_journal(path: Path) -> Journal:
    """Open or make the journal, 0600 in a 0700 directory.

    Raises: Failure `store_from_newer_version`, or `internal` when the file is damaged or not ours.
    """
    return await trio.to_thread.run_sync(_open, path)


def _open(path: Path) -> Journal:
    private_directory(path.parent)
    # Made here with its mode, so that SQLite never makes it; -wal and -shm copy the mode of the file.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    os.chmod(path, 0o600)
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise Failure("store_from_newer_version", f"{path} was written by a newer release (version {version})")
        if version == 0:
            db.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}PRAGMA user_version = {VERSION};COMMIT;")
    except sqlite3.DatabaseError as error:
        db.close()
        raise Failure("internal", f"{path} cannot be read as a journal: {error}") from error
    except BaseException:
        db.close()
        raise
    return Journal(db)


def _handle(incarnation: Incarnation) -> tuple[DeploymentId, int, Generation]:
    return incarnation.lane.deployment, incarnation.lane.index, incarnation.generation


def _writer_text(writer: ProcessIdentity | None) -> str | None:
    return None if writer is None else f"{writer.pid} {writer.boot_id} {writer.start_ticks}"


def _writer(text: object) -> ProcessIdentity | None:
    if text is None:
        return None
    pid, boot, ticks = str(text).split()
    return ProcessIdentity(pid=int(pid), boot_id=boot, start_ticks=int(ticks), role=Role.HELPER)
