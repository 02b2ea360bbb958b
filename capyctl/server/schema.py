"""The two database files: their tables, their versions, and how a file is opened without harming it.

A file written by a newer release is refused before it is opened, since opening may already write.
A damaged file is refused and never reset.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from capyctl.documents.places import is_full
from capyctl.errors import Failure, Refusal

APPLICATION_ID: Final = 0x43617079  # "Capy"

WAY_OUT: Final = "Restore it from a backup, or move it away to start afresh"

_ROWS: Final = """(
    kind TEXT NOT NULL, key TEXT NOT NULL, json TEXT NOT NULL, PRIMARY KEY (kind, key)
) STRICT, WITHOUT ROWID"""

STORE: Final = (
    f"""
    CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    CREATE TABLE rows {_ROWS};
    CREATE TABLE snapshot {_ROWS};
    CREATE TABLE journal (
        seq INTEGER PRIMARY KEY, recorded_at_ms INTEGER NOT NULL, table_version INTEGER NOT NULL,
        kind TEXT NOT NULL, json TEXT NOT NULL
    ) STRICT;
    CREATE TABLE keys (
        name TEXT PRIMARY KEY, digest TEXT NOT NULL UNIQUE, models TEXT, created_at_ms INTEGER NOT NULL
    ) STRICT
    """,
    """
    CREATE TABLE key_receipts (
        number INTEGER PRIMARY KEY, command TEXT NOT NULL UNIQUE, digest TEXT NOT NULL, name TEXT NOT NULL,
        models TEXT, created_at_ms INTEGER NOT NULL, salt TEXT, token_digest TEXT
    ) STRICT
    """,
)
"""Each migration is applied once, in order; `user_version` counts them."""

REQUESTS: Final = (
    f"""
    CREATE TABLE rows {_ROWS};
    CREATE TABLE finished (
        number INTEGER PRIMARY KEY, request TEXT NOT NULL, deployment TEXT, incarnation TEXT, outcome TEXT NOT NULL,
        arrived_at_ms INTEGER NOT NULL, ended_at_ms INTEGER NOT NULL
    ) STRICT
    """,
)


def refuse_newer(path: Path, known: int) -> None:
    """Read the schema version from the file's header, without opening it.

    Raises: Refusal `store_from_newer_version`; Failure `internal` for a file of something else.
    """
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError:
        return
    if not header:
        return  # SQLite makes an empty file first; a crash then leaves it
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        raise Failure("internal", f"{path} is not a database. {WAY_OUT}")
    version, application = int.from_bytes(header[60:64], "big"), int.from_bytes(header[68:72], "big")
    if application not in (0, APPLICATION_ID):
        raise Failure("internal", f"{path} is the database of another program")
    if version > known:
        raise Refusal(
            "store_from_newer_version",
            f"{path} was written by a newer release (schema {version}, this one knows {known}); nothing was changed. "
            "Install that release again",
        )


def open_database(path: Path, migrations: Sequence[str], *, synchronous: str) -> sqlite3.Connection:
    """Open, check and migrate one file. `synchronous` is FULL or NORMAL.

    Raises: Failure `internal` for a file that cannot be used; nothing is reset.
    """
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
        connection.execute("PRAGMA foreign_keys = ON")
        if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("its pages do not fit together")
        version: int = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > len(migrations):
            refuse_newer(path, len(migrations))
            raise Refusal("store_from_newer_version", f"{path} was written by a newer release")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        for number in range(version, len(migrations)):
            with transaction(connection) as write:
                for statement in migrations[number].split(";"):
                    write.execute(statement)
                write.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                write.execute(f"PRAGMA user_version = {number + 1}")
        if version < len(migrations):  # into the file's header, where the next release looks first
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as wrong:
        raise unusable(path, wrong, "nothing was reset") from wrong
    return connection


def unusable(path: Path, wrong: BaseException, more: str, *, verb: str = "used") -> Failure:
    """What a file means that cannot be used, or written: `insufficient_space` on a full disk, else `internal`."""
    if is_full(str(path), wrong):
        return Failure(
            "insufficient_space",
            f"{path} cannot be written: its disk is full; {more}. Free some space there and start again",
        )
    said = f"{type(wrong).__name__}: {wrong}"
    out = f". {WAY_OUT}" if verb == "used" else ""
    return Failure("internal", f"{path} cannot be {verb}: {said}; {more}{out}")


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """One write transaction: committed when the block ends, rolled back when it raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")  # it may fail too, and leaves the transaction open then
    except BaseException:
        if connection.in_transaction:  # a full disk has rolled it back already
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """Files made in this block are their owner's alone: SQLite's -wal and -shm take the umask."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
