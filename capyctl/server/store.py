"""What survives: rows are the truth, the journal is how they came about.

One SQLite file, one writer thread, group commit: `append` queues in memory and answers at once, the
writer takes whatever has piled up and makes one transaction of it, and `Commit.durable()` returns when
that transaction is on the disk. Effects wait for it; the world does not.

Two durabilities, since `synchronous` is a property of a connection and not of a transaction. What must
survive a power loss is in `srv.sqlite3`, FULL. Requests are in `requests.sqlite3`, NORMAL and behind
the answer: a power cut loses only places whose engines died with it.

Entries that nobody waits for (samples, mostly) ride along with the next commit or wait for
`LAZY_S`, so that an idle machine does not sync its disk every second.
"""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import trio

from capyctl.control import events
from capyctl.control.records import Record
from capyctl.documents import owned
from capyctl.errors import Failure
from capyctl.fsm.types import Millis
from capyctl.server import kinds, schema
from capyctl.server.log import Log
from capyctl.session.codec import Malformed

log = Log("store")

STORE_FILE: Final = "srv.sqlite3"
REQUESTS_FILE: Final = "requests.sqlite3"
TABLE_VERSION: Final = 1
"""Of the machines' tables: a journal entry says which tables decided it."""

LAZY_S: Final = 5.0
BEHIND_S: Final = 0.05
"""Requests are written in batches at most this long behind their answers."""
JOURNAL_MAX: Final = 100_000
FINISHED_MAX: Final = 50_000
FLUSH_LIMIT_S: Final = 10.0
KEY_RECEIPTS_MAX: Final = 1_000


@attrs.frozen(kw_only=True)
class Finished:
    """What is kept of a request that ended: no prompt, no answer, no client."""

    request: str
    deployment: str | None
    incarnation: str | None
    outcome: str
    arrived_at_ms: Millis
    ended_at_ms: Millis


@attrs.frozen(kw_only=True)
class Key:
    """A named inference key: its digest, and the deployments it may use (None: all)."""

    name: str
    digest: str
    models: tuple[str, ...] | None
    created_at_ms: Millis


@attrs.frozen(kw_only=True)
class KeyReceipt:
    """What a command about keys did, for when it is sent again.
    `salt` and `token_digest` are of a key that was made; see `server.keys`.
    """

    command: str
    digest: str
    name: str
    models: tuple[str, ...] | None
    created_at_ms: Millis
    salt: str | None = attrs.field(default=None, repr=False)
    token_digest: str | None = None


class Commit:
    """The promise that what was appended is on the disk. `seq` is its journal position."""

    __slots__ = ("_done", "_failed", "seq")

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self._done = trio.Event()
        self._failed: Failure | None = None

    async def durable(self) -> None:
        """Return when it is. Raises: Failure when it could not be written, naming the file; nothing may follow then."""
        await self._done.wait()
        if self._failed is not None:
            raise Failure(self._failed.code, self._failed.message)

    def settle(self, failed: Failure | None = None) -> None:
        """It is written, or never will be."""
        self._failed = failed
        self._done.set()


@attrs.define(eq=False)
class _Entry:
    event: events.Event | None
    recorded_at_ms: Millis
    changed: Sequence[Record]
    commit: Commit


@attrs.define(eq=False)
class _Batch:
    entries: list[_Entry] = attrs.field(factory=list)
    requests: dict[str, Record] = attrs.field(factory=dict)
    finished: list[Finished] = attrs.field(factory=list)


class Store:
    """The server's store. Open it, run `run` in a nursery, append, and await commits."""

    def __init__(self, directory: Path, records: Mapping[str, object]) -> None:
        """Open both files below `directory`, making or migrating them.

        `records` maps each kind of row to the type of its value (a union is one); other kinds are refused.
        Raises: Refusal `store_from_newer_version` or `unsafe_file`, with nothing written; Failure `internal` for a
        damaged file, `insufficient_space` when the disk is full.
        """
        self._directory = directory
        self._records = dict(records)
        self._limiter = trio.CapacityLimiter(1)  # one at a time; not one thread, hence check_same_thread=False
        self._urgent = trio.Event()
        self._some = trio.Event()
        self._patience: trio.CancelScope | None = None
        self._pending = _Batch()
        self._failed: Failure | None = None
        for name, migrations in ((STORE_FILE, schema.STORE), (REQUESTS_FILE, schema.REQUESTS)):
            for file in (name, f"{name}-wal", f"{name}-shm"):
                owned.check_file(str(directory / file))
            schema.refuse_newer(directory / name, len(migrations))
        with schema.private_umask():
            owned.private_directory(directory)
            self._main = schema.open_database(directory / STORE_FILE, schema.STORE, synchronous="FULL")
            self._side = schema.open_database(directory / REQUESTS_FILE, schema.REQUESTS, synchronous="NORMAL")
        self._side_keys = {key for (key,) in self._side.execute("SELECT key FROM rows")}
        with self._writing(STORE_FILE):
            self.incarnation = self._meta("incarnation", lambda: secrets.token_hex(13).upper())
            floor = int(self._meta("floor", lambda: "0"))
        last, self._journal_length = self._main.execute(
            "SELECT coalesce(max(seq), 0), count(*) FROM journal"
        ).fetchone()
        self._seq: int = max(floor, last)
        self._last = Commit(self._seq)
        self._last.settle()

    # --- reading, before the writer runs ---------------------------------------------------------

    def load(self) -> list[Record]:
        """Every row of both files. Raises: Failure `internal` for a row that its type does not allow."""
        return [*self._rows(self._main, "rows"), *self._rows(self._side, "rows")]

    def journal(self) -> tuple[list[Record], list[events.Event]]:
        """The snapshot at the journal's floor, and every durable input since: a World to replay."""
        found: list[events.Event] = []
        for seq, kind, text in self._main.execute("SELECT seq, kind, json FROM journal ORDER BY seq"):
            try:
                found.append(kinds.STORE.loads(text, kinds.EVENT_OF[kind]))
            except (KeyError, Malformed) as wrong:
                raise Failure("internal", f"the journal's entry {seq} cannot be read: {wrong}") from wrong
        return list(self._rows(self._main, "snapshot")), found

    def named_keys(self) -> list[Key]:
        """Every named inference key."""
        return [
            Key(name=name, digest=digest, models=_listed(models), created_at_ms=at)
            for name, digest, models, at in self._main.execute(
                "SELECT name, digest, models, created_at_ms FROM keys ORDER BY name"
            )
        ]

    def key_receipts(self) -> list[KeyReceipt]:
        """What commands about keys did, oldest first."""
        return [
            KeyReceipt(
                command=command,
                digest=digest,
                name=name,
                models=_listed(models),
                created_at_ms=at,
                salt=salt,
                token_digest=token_digest,
            )
            for command, digest, name, models, at, salt, token_digest in self._main.execute(
                "SELECT command, digest, name, models, created_at_ms, salt, token_digest FROM key_receipts"
                " ORDER BY number"
            )
        ]

    @property
    def cursor(self) -> str:
        """`<store incarnation>:<last position>`."""
        return f"{self.incarnation}:{self._seq}"

    # --- writing ---------------------------------------------------------------------------------

    def append(self, event: events.Event | None, changed: Sequence[Record], now_ms: Millis, *, waited: bool) -> Commit:
        """Queue one step: its input event and the rows it changed.

        Args:
          event: the input; request events are left out of the journal, so replay compares the durable rows only.
          changed: replaced and deleted rows (value None).
          waited: whether an effect waits for this commit. Such entries and changed rows are written at once,
            others with the next.
        """
        if event is not None and isinstance(event, events.REQUEST_EVENTS):
            event = None
        durable = []
        for record in changed:
            if record.kind == "request":
                self._behind(record)
            else:
                durable.append(record)
        if event is not None or durable:
            self._seq += 1
            self._last = Commit(self._seq)
            self._pending.entries.append(_Entry(event, now_ms, durable, self._last))
            if self._failed is not None:
                self._last.settle(self._failed)
            self._some.set()
        if durable or waited:
            self._urgent.set()
        return self._last  # with nothing of its own, a step is durable when what came before it is

    def finished(self, record: Finished) -> None:
        """Queue one completion record, written behind the answer."""
        self._pending.finished.append(record)
        self._hurry()

    def _behind(self, record: Record) -> None:
        if record.value is None and record.key not in self._side_keys:
            self._pending.requests.pop(record.key, None)  # it came and went between two batches
            return
        self._pending.requests[record.key] = record
        self._hurry()

    def _hurry(self) -> None:
        self._some.set()
        if self._patience is not None:
            self._patience.deadline = min(self._patience.deadline, trio.current_time() + BEHIND_S)

    async def put_key(self, key: Key, receipt: KeyReceipt) -> None:
        """Add a named key, and what its command did.

        Raises: sqlite3.IntegrityError when the name or the digest exists; Failure when it cannot be written.
        """
        row = (key.name, key.digest, _joined(key.models), key.created_at_ms)

        def write() -> None:
            with self._writing(STORE_FILE, twice=True), schema.transaction(self._main) as open_:
                open_.execute("INSERT INTO keys (name, digest, models, created_at_ms) VALUES (?, ?, ?, ?)", row)
                _keep_receipt(open_, receipt)

        await trio.to_thread.run_sync(write, limiter=self._limiter)

    async def drop_key(self, name: str, receipt: KeyReceipt) -> bool:
        """Remove a named key, and keep what the command did; False when there is none. Raises: Failure."""

        def write() -> bool:
            with self._writing(STORE_FILE), schema.transaction(self._main) as open_:
                dropped: int = open_.execute("DELETE FROM keys WHERE name = ?", (name,)).rowcount
                _keep_receipt(open_, receipt)
            return dropped > 0

        return await trio.to_thread.run_sync(write, limiter=self._limiter)

    @contextlib.contextmanager
    def _writing(self, file: str, *, twice: bool = False) -> Iterator[None]:
        """Name the file in whatever goes wrong with it. `twice`: what is there already is for the caller to say."""
        try:
            yield
        except Exception as wrong:  # a full disk, a value of ours that cannot be written, rows that somebody else wrote
            if twice and isinstance(wrong, sqlite3.IntegrityError):
                raise
            raise schema.unusable(
                self._directory / file, wrong, "what was stored is unharmed", verb="written"
            ) from wrong

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write until cancelled, then write what is left.

        Raises: Failure `insufficient_space` or `internal`, naming the file, when a write fails; every commit that was
        not yet durable fails with it.
        """
        task_status.started()
        try:
            while True:
                await self._some.wait()
                behind = self._pending.requests or self._pending.finished
                with trio.move_on_after(BEHIND_S if behind else LAZY_S) as self._patience:
                    await self._urgent.wait()
                self._patience = None
                await self._flush()
        finally:
            with trio.move_on_after(FLUSH_LIMIT_S, shield=True):
                await self._flush()

    def close(self) -> None:
        """Close both files; `run` has ended."""
        for connection in (self._main, self._side):
            connection.close()

    async def _flush(self) -> None:
        batch, self._pending = self._pending, _Batch()
        self._some, self._urgent = trio.Event(), trio.Event()
        if not (batch.entries or batch.requests or batch.finished):
            return
        # From here on, not once it is written: what ends while this batch is on its way is in the file all the same.
        for record in batch.requests.values():
            (self._side_keys.discard if record.value is None else self._side_keys.add)(record.key)
        failed = self._failed
        if failed is None:
            try:
                await trio.to_thread.run_sync(self._write, batch, limiter=self._limiter)
            except Failure as wrong:  # nothing may follow
                failed = self._failed = wrong
                log.error("store.failed", code=wrong.code, reason=wrong.message)
            except BaseException as wrong:
                failed = self._failed = schema.unusable(
                    self._directory / STORE_FILE, wrong, "the write was interrupted", verb="written"
                )
                raise
            finally:
                for entry in batch.entries:
                    entry.commit.settle(failed)
        if failed is not None:
            for entry in self._pending.entries:
                entry.commit.settle(failed)
            raise Failure(failed.code, failed.message)

    def _write(self, batch: _Batch) -> None:
        """In a thread. Values are immutable, so encoding them here races with nobody."""
        if batch.entries:
            with self._writing(STORE_FILE):
                self._write_durable(batch.entries)
        if batch.requests or batch.finished:
            with self._writing(REQUESTS_FILE):
                self._write_requests(batch)

    def _write_durable(self, entries: list[_Entry]) -> None:
        rows = {(record.kind, record.key): record for entry in entries for record in entry.changed}
        journal = [
            (
                entry.commit.seq,
                entry.recorded_at_ms,
                TABLE_VERSION,
                kinds.EVENTS[type(entry.event)],
                kinds.STORE.dumps(entry.event),
            )
            for entry in entries
            if entry.event is not None
        ]
        with schema.transaction(self._main) as write:
            self._replace(write, list(rows.values()))
            write.executemany(
                "INSERT INTO journal (seq, recorded_at_ms, table_version, kind, json) VALUES (?, ?, ?, ?, ?)", journal
            )
            self._journal_length += len(journal)
            if self._journal_length > JOURNAL_MAX:
                self._roll(write, entries[-1].commit.seq)

    def _roll(self, write: sqlite3.Connection, seq: int) -> None:
        """Start the journal anew from a snapshot of the rows as they are now."""
        write.execute("DELETE FROM snapshot")
        write.execute("INSERT INTO snapshot SELECT kind, key, json FROM rows")
        write.execute("DELETE FROM journal")
        write.execute("UPDATE meta SET value = ? WHERE name = 'floor'", (str(seq),))
        self._journal_length = 0

    def _write_requests(self, batch: _Batch) -> None:
        with schema.transaction(self._side) as write:
            self._replace(write, list(batch.requests.values()))
            write.executemany(
                "INSERT INTO finished (request, deployment, incarnation, outcome, arrived_at_ms, ended_at_ms)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                [attrs.astuple(record) for record in batch.finished],
            )
            write.execute(
                "DELETE FROM finished WHERE number <= (SELECT max(number) FROM finished) - ?", (FINISHED_MAX,)
            )

    def _replace(self, write: sqlite3.Connection, records: list[Record]) -> None:
        write.executemany(
            "DELETE FROM rows WHERE kind = ? AND key = ?",
            [(each.kind, each.key) for each in records if each.value is None],
        )
        write.executemany(
            "INSERT INTO rows (kind, key, json) VALUES (?, ?, ?)"
            " ON CONFLICT (kind, key) DO UPDATE SET json = excluded.json",
            [
                (each.kind, each.key, kinds.STORE.dumps(each.value, self._records[each.kind]))
                for each in records
                if each.value is not None
            ],
        )

    def _rows(self, connection: sqlite3.Connection, table: str) -> Iterator[Record]:
        for kind, key, text in connection.execute(f"SELECT kind, key, json FROM {table} ORDER BY kind, key"):
            if kind not in self._records:
                raise Failure(
                    "internal", f"the store holds a row of kind {kind!r} ({key}), which this release does not know"
                )
            try:
                yield Record(kind=kind, key=key, value=kinds.STORE.loads(text, self._records[kind]))
            except Malformed as wrong:
                raise Failure("internal", f"the store's {kind} {key} cannot be read: {wrong}") from wrong

    def _meta(self, name: str, fresh: Callable[[], str]) -> str:
        found = self._main.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        if found is not None:
            return str(found[0])
        value = fresh()
        self._main.execute("INSERT INTO meta (name, value) VALUES (?, ?)", (name, value))
        return value


def _listed(models: str | None) -> tuple[str, ...] | None:
    return None if models is None else tuple(models.split("\n"))


def _joined(models: Sequence[str] | None) -> str | None:
    return None if models is None else "\n".join(models)


def _keep_receipt(open_: sqlite3.Connection, receipt: KeyReceipt) -> None:
    row = (
        receipt.command,
        receipt.digest,
        receipt.name,
        _joined(receipt.models),
        receipt.created_at_ms,
        receipt.salt,
        receipt.token_digest,
    )
    open_.execute(
        "INSERT INTO key_receipts (command, digest, name, models, created_at_ms, salt, token_digest)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        row,
    )
    open_.execute(
        "DELETE FROM key_receipts WHERE number <= (SELECT max(number) FROM key_receipts) - ?", (KEY_RECEIPTS_MAX,)
    )
