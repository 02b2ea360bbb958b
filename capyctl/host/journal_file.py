"""The file of the host's journal: its tables, its versions, and how it is opened, owner-only and without harming it.

Source: lifecycle 14; decisions 24, 25.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from pathlib import Path

from capyctl.documents import owned, places
from capyctl.errors import Failure, Lost

_log = logging.getLogger("capyctl.host.journal")

VERSION = 2
WAY_OUT = (
    "Restore it from a backup, or move it away: engines that still run are then named in status with their "
    "process ids, for you to end"
)
FULL = "its disk is full; what was stored is unharmed. Free some space there and start again"
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
_SINCE_1 = """
ALTER TABLE launch ADD COLUMN admin_key TEXT NOT NULL DEFAULT '';
ALTER TABLE launch ADD COLUMN memory TEXT NOT NULL DEFAULT 'held';
ALTER TABLE launch ADD COLUMN memory_token INTEGER NOT NULL DEFAULT 0;
ALTER TABLE launch ADD COLUMN canary TEXT;
ALTER TABLE launch ADD COLUMN shm_before TEXT NOT NULL DEFAULT '[]';
CREATE TABLE segment (
  deployment TEXT NOT NULL, idx INTEGER NOT NULL, generation INTEGER NOT NULL,
  path TEXT NOT NULL, device INTEGER NOT NULL, inode INTEGER NOT NULL,
  PRIMARY KEY (deployment, idx, generation, path, device, inode)
) STRICT;
"""


def open_database(path: Path) -> sqlite3.Connection:
    """Make the file where there is none, bring it to this release's version, and look whether it can be. Blocking.

    Raises: as `journal.open_journal`.
    """
    owned.private_directory(path.parent)
    # Made here with its mode, so that SQLite never makes it; -wal and -shm copy the mode of the file.
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        owned.check_file(str(path.with_name(name)))
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except OSError as wrong:
        if places.is_full(str(path), wrong):
            raise places.no_space(str(path), wrong) from wrong
        raise Failure("internal", f"{path} cannot be opened: {wrong.strerror}") from wrong
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA secure_delete = ON")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise Failure("store_from_newer_version", f"{path} was written by a newer release (version {version})")
        for since, statements in ((0, _SCHEMA), (1, _SINCE_1)):
            if version == since:
                version = since + 1
                db.executescript(f"BEGIN IMMEDIATE;{statements}PRAGMA user_version = {version};COMMIT;")
        _check_launches(db, path)
        erase(db)
    except sqlite3.DatabaseError as error:
        db.close()
        if places.is_full(str(path), error):
            raise Failure("insufficient_space", f"{path} cannot be written: {FULL}") from error
        raise Failure("internal", f"{path} cannot be read as a journal: {error}. {WAY_OUT}") from error
    except BaseException:
        db.close()
        raise
    return db


def _check_launches(db: sqlite3.Connection, path: Path) -> None:
    """A launch that was spawned names its process: without one it would read as proven gone while it runs."""
    nameless = db.execute(
        "SELECT deployment || '/' || idx || '@' || generation FROM launch AS one WHERE state IN ('spawned', 'ready') "
        "AND NOT EXISTS (SELECT * FROM process AS its WHERE its.deployment = one.deployment "
        "AND its.idx = one.idx AND its.generation = one.generation)"
    ).fetchall()
    if nameless:
        launches = ", ".join(name for (name,) in nameless)
        raise Failure("internal", f"{path} is damaged: it has lost the processes of {launches}. {WAY_OUT}")


def unwritten(path: Path, wrong: sqlite3.Error) -> Lost:
    """A write or a read that failed: nobody may conclude anything from it."""
    if places.is_full(str(path), wrong):
        return Lost("insufficient_space", f"{path} cannot be written: {FULL}")
    return Lost("internal", f"{path} cannot be used: {type(wrong).__name__}: {wrong}")


def erase(db: sqlite3.Connection) -> None:
    """Leave nothing of a forgotten key: its bytes in the database are zeros, and the log that held them is emptied.

    The next opening does it again, so a log that cannot be emptied now is no reason to call a launch less gone.
    """
    try:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except sqlite3.Error as error:
        _log.warning("journal.kept_its_log", extra={"fields": {"why": str(error)}})
