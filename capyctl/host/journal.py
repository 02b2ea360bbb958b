"""The host's own memory of what it launched: `host/journal.sqlite3`, owner-only, durable before effects.

W3: a launch is written before its process is spawned. W4: identities before "launched" is answered,
and before the gate of the spawned process opens. W11: a terminate before anything is signalled.
A finished command's result is kept and replayed by its id. A handle (deployment, index, generation)
is spawned at most once for ever: the launch row is the fence, and a fence row stands for a handle that
was refused before it had one.

A step of an engine's memory, a release or a restore, is written before the engine is asked (W8, W10) together
with the doubt that it brings. Whoever finds it without a result knows that the engine may have been asked, and
never asks again.

All calls go to one thread, one at a time; SQLite is told `synchronous=FULL`, so a commit that returned
survives a power loss. Launch keys are in here while their launches live, which is why the file is 0600; once a
launch is proven gone nothing of its keys is left in the file or in its write-ahead log.
Source: lifecycle 14, 17, 18.3, 19; decisions 24, 25.
"""

from __future__ import annotations

import enum
import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import attrs
import trio

from capyctl.errors import Refusal
from capyctl.fsm.types import DeploymentId, Generation, Incarnation, Millis, ProcessIdentity, Role
from capyctl.host import journal_file
from capyctl.host.segments import Segment
from capyctl.session.codec import canonical
from capyctl.session.kinds import decode_message, encode_message
from capyctl.session.messages import Awake, Command, Launch, Parked, Release, Restore, Result

JOURNAL_FILE = "journal.sqlite3"

T = TypeVar("T")
RESULTS_KEPT = 1_000  # of commands whose launches are gone


class Memory(enum.Enum):
    """Where a launch's memory is, as far as this host ever asked its engine to move it."""

    HELD = "held"  # as it was loaded, or proven to be back
    RELEASING = "releasing"  # the release may have been asked for; what came of it is not proven
    PARKED = "parked"  # proven released
    RESTORING = "restoring"  # the restore may have been asked for; what came of it is not proven


_PROVEN: Mapping[type[Result], Memory] = {Parked: Memory.PARKED, Awake: Memory.HELD}


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
    admin_key: str = attrs.field(default="", repr=False)
    memory: Memory = Memory.HELD
    canary: str | None = None  # how it answered the fixed prompt at its first readiness
    shm_before: frozenset[int] = frozenset()  # inodes of shared memory that is older than the launch
    segments: frozenset[Segment] = frozenset()  # shared memory that it made

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
    """The open journal. Made by `open_journal`; every method is one durable transaction or one read.

    Raises: Lost, from all of them, naming the file, when it cannot be written or read. What the caller was about to
    do or has done is then not on record, so nobody may conclude anything from it.
    """

    _db: sqlite3.Connection
    _path: Path
    _limiter: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1))

    async def close(self) -> None:
        await self._in_thread(self._db.close)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        # Not abandoned on cancel: a write that began is finished, and its outcome known.
        try:
            return await trio.to_thread.run_sync(work, limiter=self._limiter)
        except sqlite3.Error as wrong:
            raise journal_file.unwritten(self._path, wrong) from wrong

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")  # it may fail too, and leaves the transaction open then
        except BaseException:
            if self._db.in_transaction:  # a full disk has rolled it back already
                self._db.execute("ROLLBACK")
            raise

    # --- launches ----------------------------------------------------------------------------------

    async def arm(
        self,
        command: Launch,
        launch_id: str,
        port: int,
        key: str,
        log_path: Path,
        now: Millis,
        *,
        admin_key: str = "",
        shm_before: frozenset[int] = frozenset(),
    ) -> None:
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
                    "port, key, log_path, started_ms, admin_key, shm_before) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
                        admin_key,
                        json.dumps(sorted(shm_before)),
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
        for table in ("process", "segment"):
            db.execute(
                f"DELETE FROM {table} WHERE (deployment, idx, generation) IN (SELECT deployment, idx, generation "
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
                    "UPDATE launch SET state = 'gone', key = '', admin_key = '' "
                    "WHERE deployment = ? AND idx = ? AND generation = ?",
                    _handle(incarnation),
                )
            journal_file.erase(self._db)

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

    async def asked_for(self, incarnation: Incarnation, canary: str | None) -> None:
        """How the engine answered the fixed prompt at its first readiness; a later answer does not replace it."""

        def write() -> None:
            with self._transaction() as db:
                db.execute(
                    "UPDATE launch SET canary = coalesce(canary, ?) "
                    "WHERE deployment = ? AND idx = ? AND generation = ?",
                    (canary, *_handle(incarnation)),
                )

        await self._in_thread(write)

    async def begin_step(self, command: Release | Restore, now: Millis) -> bool:
        """W8, W10: the engine is about to be asked to move its memory, which is unknown from here on.

        False when it may have been asked before: under this id, or for a newer step of this launch.
        """
        doubt = Memory.RELEASING if isinstance(command, Release) else Memory.RESTORING

        def write() -> bool:
            handle = _handle(command.incarnation)
            with self._transaction() as db:
                accepted = db.execute(
                    "INSERT OR IGNORE INTO accepted VALUES (?, ?, ?, ?, NULL)",
                    (command.command_id, digest_of(command), canonical(encode_message(command)), now),
                )
                if not accepted.rowcount:
                    return False
                moved = db.execute(
                    "UPDATE launch SET memory = ?, memory_token = ? "
                    "WHERE deployment = ? AND idx = ? AND generation = ? AND memory_token < ?",
                    (doubt.value, command.token, *handle, command.token),
                )
                return moved.rowcount == 1

        return await self._in_thread(write)

    async def may_have_begun(self, command: Release | Restore) -> bool:
        """Whether `begin_step` would answer False: the engine may have been asked."""

        def read() -> bool:
            accepted = self._db.execute("SELECT 1 FROM accepted WHERE command_id = ?", (command.command_id,)).fetchone()
            newer = self._db.execute(
                "SELECT 1 FROM launch WHERE deployment = ? AND idx = ? AND generation = ? AND memory_token >= ?",
                (*_handle(command.incarnation), command.token),
            ).fetchone()
            return accepted is not None or newer is not None

        return await self._in_thread(read)

    async def memory_is(self, incarnation: Incarnation, memory: Memory) -> None:
        """Where the launch's memory was proven to be."""

        def write() -> None:
            with self._transaction() as db:
                _set_memory(db, incarnation, memory)

        await self._in_thread(write)

    async def made(self, incarnation: Incarnation, segments: frozenset[Segment]) -> None:
        """Shared memory that the launch's processes have; known ones are not written again."""

        def write() -> None:
            handle = _handle(incarnation)
            with self._transaction() as db:
                db.executemany(
                    "INSERT OR IGNORE INTO segment VALUES (?, ?, ?, ?, ?, ?)",
                    [(*handle, one.path, one.device, one.inode) for one in sorted(segments)],
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
            "SELECT deployment, idx, generation, command, launch_id, port, key, log_path, started_ms, state, writer, "
            f"admin_key, memory, canary, shm_before FROM launch WHERE {where}",
            values,
        ).fetchall()
        return [self._launch_record(row) for row in rows]

    def _launch_record(self, row: tuple[object, ...]) -> LaunchRecord:
        deployment, index, generation, text, launch_id, port, key, log_path, started_ms, state, writer = row[:11]
        admin_key, memory, canary, shm_before = row[11:]
        command = decode_message(json.loads(str(text)))
        assert isinstance(command, Launch)
        processes = self._db.execute(
            "SELECT pid, boot_id, start_ticks, role, number FROM process "
            "WHERE deployment = ? AND idx = ? AND generation = ? ORDER BY rowid",
            (deployment, index, generation),
        ).fetchall()
        segments = self._db.execute(
            "SELECT path, device, inode FROM segment WHERE deployment = ? AND idx = ? AND generation = ?",
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
            admin_key=str(admin_key),
            memory=Memory(memory),
            canary=None if canary is None else str(canary),
            shm_before=frozenset(json.loads(str(shm_before))),
            segments=frozenset(Segment(path, device, inode) for path, device, inode in segments),
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
        """Keep a command's result for replay, with where it proves memory to be; old ones of finished commands go."""

        def write() -> None:
            text = canonical(encode_message(result))
            with self._transaction() as db:
                if isinstance(command, Release | Restore) and type(result) in _PROVEN:
                    _set_memory(db, command.incarnation, _PROVEN[type(result)])
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

    Raises: Refusal `unsafe_file` when others reach it; Failure `store_from_newer_version`, `insufficient_space`, or
    `internal` when the file is damaged.
    """
    return Journal(await trio.to_thread.run_sync(journal_file.open_database, path), path)


def _handle(incarnation: Incarnation) -> tuple[DeploymentId, int, Generation]:
    return incarnation.lane.deployment, incarnation.lane.index, incarnation.generation


def _set_memory(db: sqlite3.Connection, incarnation: Incarnation, memory: Memory) -> None:
    db.execute(
        "UPDATE launch SET memory = ? WHERE deployment = ? AND idx = ? AND generation = ?",
        (memory.value, *_handle(incarnation)),
    )


def _writer_text(writer: ProcessIdentity | None) -> str | None:
    return None if writer is None else f"{writer.pid} {writer.boot_id} {writer.start_ticks}"


def _writer(text: object) -> ProcessIdentity | None:
    if text is None:
        return None
    pid, boot, ticks = str(text).split()
    return ProcessIdentity(pid=int(pid), boot_id=boot, start_ticks=int(ticks), role=Role.HELPER)
