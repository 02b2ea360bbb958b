"""Engine logs: where they are, how a writer is started, how their last words are read.

`<state>/logs/<deployment id>/<launch id>.log`, 0600 in 0700 directories. The writer is a process of
its own (`logwriter`), so that the role's death neither loses the log nor fills the engine's pipe.
Source: engines 17; security 9; decisions 29.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import attrs
import trio

from capyctl.documents import owned
from capyctl.errors import Failure
from capyctl.fsm.types import ProcessIdentity, Role
from capyctl.host import identity, logwriter, process
from capyctl.ulid import is_ulid

WRITER_PROGRAM = Path(__file__).with_name("logwriter.py")
LAST_LINES = 20
LAST_LINE_CHARS = 400
LOOKED_AT_LINES, LOOKED_AT_CHARS = 200, 2000
"""What is looked at for the cause of an end: engines of several processes write long traces below it."""
LAUNCHES_KEPT = 5  # per instance; a crash loop must not fill the disk
TAIL_BYTES_MAX = 256 << 10
_SECRET_NAME = re.compile(r"(?i)secret|token|passw|passphrase|credential|(?:^|_)key(?:$|_)|apikey")
SETTLE_S = 1.0  # how long a writer may need to write what a dead engine left in the pipe


@attrs.frozen(kw_only=True)
class Writer:
    """A running log writer. `output` is the descriptor for the engine; close it once the engine has it."""

    path: Path
    identity: ProcessIdentity
    output: int


def log_path(state_dir: Path, deployment: str, launch_id: str) -> Path:
    return state_dir / "logs" / deployment / f"{launch_id}.log"


def prune(path: Path, kept: int = LAUNCHES_KEPT) -> None:
    """Delete the logs of an instance's older launches, so that `path` and the `kept` - 1 before it remain."""
    index = path.name.partition("-")[0]
    launches: dict[int, list[Path]] = {}
    for file in path.parent.glob(f"{index}-*.log*") if path.parent.is_dir() else ():
        number = file.name.split(".")[0].partition("-")[2]
        if number.isdigit():
            launches.setdefault(int(number), []).append(file)
    for generation in sorted(launches, reverse=True)[kept - 1 :]:
        for file in launches[generation]:
            file.unlink(missing_ok=True)


def prune_deployments(state_dir: Path, kept: Collection[str], as_of_ms: int) -> list[str]:
    """Delete the log directories of deployments that are not `kept`. Blocking; returns whose logs went.

    Only directories that a deployment's id names, and none that changed at `as_of_ms` or later: `kept` is older
    than what it may have been written for.
    """
    try:
        entries = list(os.scandir(state_dir / "logs"))
    except FileNotFoundError:
        return []
    gone = []
    for entry in entries:
        if entry.name in kept or not is_ulid(entry.name) or not entry.is_dir(follow_symlinks=False):
            continue
        if entry.stat(follow_symlinks=False).st_mtime_ns < as_of_ms * 1_000_000:
            shutil.rmtree(entry.path)
            gone.append(entry.name)
    return gone


def start_writer(path: Path, secrets: Sequence[str], rotate_bytes: int = logwriter.ROTATE_BYTES) -> Writer:
    """Start the writer of one launch. Its secrets go through a pipe, never through its arguments.

    Raises: Failure `launch_failed` when the file or the process could not be made.
    """
    order = json.dumps({"path": str(path), "secrets": list(secrets), "rotate_bytes": rotate_bytes}).encode()
    order_read, order_write = os.pipe()
    engine_read, engine_write = os.pipe()
    try:
        owned.private_directory(path.parent)
        pid = process.start(
            [sys.executable, "-I", "-S", str(WRITER_PROGRAM)],
            stdin=order_read,
            stdout=None,
            extra={logwriter.OUTPUT: engine_read},
        )
    except OSError as error:
        os.close(engine_write)
        os.close(order_write)
        raise Failure("launch_failed", f"the engine's log cannot be written: {error}") from error
    finally:
        os.close(order_read)
        os.close(engine_read)
    try:
        # A few hundred bytes as a rule; the pipe takes 64 KiB at once, and the writer reads what is over.
        os.write(order_write, order)
    except BrokenPipeError:
        os.close(engine_write)
        raise Failure("launch_failed", "the log writer ended before it began") from None
    finally:
        os.close(order_write)
    writer = identity.identify(pid, Role.HELPER)
    if writer is None:
        os.close(engine_write)
        raise Failure("launch_failed", "the log writer vanished")
    return Writer(path=path, identity=writer, output=engine_write)


async def settled(writer: ProcessIdentity | None) -> None:
    """Wait, at most SETTLE_S, until the writer has written all that its engine left."""
    if writer is not None:
        with trio.move_on_after(SETTLE_S):
            await identity.wait_gone(writer)


def last_words(path: Path, lines: int = LAST_LINES, chars: int = LAST_LINE_CHARS) -> list[str]:
    """The last lines of a launch's log, oldest first; of the rotated file too when the newest is short."""
    found: list[str] = []
    for part in (path, path.with_name(path.name + ".1")):
        if len(found) < lines:
            found = _tail(part, 64 << 10)[-(lines - len(found)) :] + found
    return [line if len(line) <= chars else line[: chars - 1] + "…" for line in found]


def tail(path: Path, kib: int = 64) -> str:
    """The last `kib` KiB (1-256) of a log, whole lines, redacted once more. Blocking.

    Raises: FileNotFoundError when this launch has written nothing.
    """
    os.stat(path)
    redactor = logwriter.Redactor([])
    return "".join(f"{redactor.line(line)}\n" for line in _tail(path, min(kib << 10, TAIL_BYTES_MAX)))


def _tail(path: Path, limit_bytes: int) -> list[str]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    with os.fdopen(fd, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - limit_bytes))
        text = file.read(limit_bytes).decode("utf-8", "replace")
    lines = text.splitlines()
    return lines[1:] if size > limit_bytes else lines


def secret_values(env: Mapping[str, str]) -> list[str]:
    """Values of environment variables whose names say that they are secret."""
    return [value for name, value in env.items() if _SECRET_NAME.search(name) and value]
