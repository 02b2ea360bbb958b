"""One file: fetched, gone on with after a cut, and hashed on the way. It blocks.

Theory of operation. Bytes go to a part file; beside it lies the validator (a strong ETag) that the server gave for
them. To go on, the part is hashed again and the rest is asked for, on the condition that the validator still holds:
a server whose file has changed answers with the whole file, and the part starts over. What a server says of lengths
is held against what is expected before a byte is kept. The file counts once all of it has the expected hash; a
part that does not is removed, since going on from it could never end well.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs

from capyctl.downloads.door import Answer, Door, Interrupted, Line
from capyctl.downloads.listing import RemoteFile
from capyctl.errors import Failure, Refusal

CHUNK: Final = 1 << 20
PROGRESS_BYTES: Final = 64 << 10  # less than that between two failures counts as nothing
SYNC_BYTES: Final = 256 << 20  # a kill costs what the system has not written; a power cut this much
_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_ETAG: Final = re.compile(r'"[\x21\x23-\x7e]{1,200}"', re.ASCII)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED: Final = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST),
    *(errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENOTEMPTY),  # somebody moves things there
    *(errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.EXDEV),  # a disk or a mount is ill, or in the way
)


@attrs.define(eq=False)
class Progress:
    """How far a download is. Written by the thread that fetches, read by others; figures only ever grow together."""

    total_bytes: int | None = None
    done_bytes: int = 0
    phase: str = "asking"  # asking, waiting, downloading, verifying
    received_bytes: int = 0  # of this attempt, for whoever watches whether anything comes


@attrs.frozen(kw_only=True)
class Patience:
    """How often something is tried again without a byte of progress, and the pauses between: 1, 2, 4, … times."""

    attempts: int = 5
    pause_s: float = 1.0

    def pause(self, failed: int, after_s: float | None) -> float:
        return max(self.pause_s * float(1 << (failed - 1)), after_s or 0.0)


def try_on(work: Callable[[], Any], done: Callable[[], int], line: Line, patience: Patience, what: str) -> Any:
    """`work` until it ends well; after so many tries in a row without progress it is given up.

    Raises: Failure `unavailable`; what `work` raises.
    """
    failed, most = 0, done()
    while True:
        try:
            return work()
        except Interrupted as interrupted:
            # Against the most there ever was: who starts over again and again makes no progress.
            failed = 1 if done() - most >= PROGRESS_BYTES else failed + 1
            most = max(most, done())
            if failed >= patience.attempts:
                why = interrupted.why if interrupted.why.startswith(what) else f"{what}: {interrupted.why}"
                raise Failure("unavailable", f"{why}. Try again later") from None
            line.stopped.wait(patience.pause(failed, interrupted.after_s))
            line.check_stopped()


@attrs.define(eq=False)
class Part:
    """A file on its way. `admit` is told its size before the first byte is kept, and may refuse.

    `twin`: a file of this machine that was seen to have the content.
    """

    door: Door
    remote: RemoteFile
    path: Path
    progress: Progress
    admit: Callable[[int], None]
    twin: Path | None = None
    _sha256: Any = attrs.field(init=False, factory=hashlib.sha256)  # any: hashlib names no type of its own
    _blob: Any = attrs.field(init=False, factory=hashlib.sha256)  # as git hashes a file
    _have: int = attrs.field(init=False, default=0)
    _counted: int = attrs.field(init=False, default=0)  # of `progress.done_bytes`
    _size: int | None = attrs.field(init=False, default=None)

    def fetch(self, line: Line, patience: Patience) -> str:
        """Fetch all of it; its SHA-256. It lies at `path` then, on the disk, and has the expected hash.

        Raises: Refusal `checkpoint_mismatch`, `not_materializable`, `insufficient_space`, …; Failure `unavailable`;
          Stopped.
        """
        self._size = self.remote.size_bytes
        if self.twin is None or not self._copied(self.twin, line):
            try_on(lambda: self._attempt(line), lambda: self._have, line, patience, self.remote.called)
        self._check()
        return str(self._sha256.hexdigest())

    def _copied(self, twin: Path, line: Line) -> bool:
        """Copy what is here already, rather than link it: two models must not change their stat identities together."""
        self._over()
        self.progress.phase = "verifying"
        try:
            with open(twin, "rb") as source:
                self._size = os.fstat(source.fileno()).st_size
                self.admit(self._size)
                with self._opened() as stream:
                    while piece := source.read(CHUNK):
                        line.check_stopped()
                        _write(stream, piece)
                        self._take(piece)
                    os.fsync(stream.fileno())
        except FileNotFoundError:
            self._over()  # it was pruned a moment ago
        if self._sha256.hexdigest() == self.remote.sha256:
            return True
        self._over()
        self._size = self.remote.size_bytes
        return False

    def _attempt(self, line: Line) -> None:
        self._begin(line)
        if self._size is None and self._have and self._sha256.hexdigest() == self.remote.sha256:
            self._size = self._have  # a kill came after its last byte
            self.admit(self._size)
        if self._size is not None and self._have == self._size:
            self._opened().close()  # nobody is asked for an empty file, and it must be there as well
            return
        headers = {}
        if self._have:
            headers["Range"] = f"bytes={self._have}-"
            validator = self._validator()
            if validator is not None:
                headers["If-Range"] = validator
        self.progress.phase = "asking"
        called = self.remote.called if self.remote.secret else None
        with self.door.open(self.remote.url, line, token=self.remote.token, headers=headers, called=called) as answer:
            if answer.status == 416:
                self._over()
                raise Interrupted(f"{self.remote.called} has no bytes from {self._have} on")
            self._hold_against(answer)
            self._keep(answer, line)

    # --- what is there already -----------------------------------------------------------------------------

    def _begin(self, line: Line) -> None:
        """Hash what an earlier attempt left, unless it was this one's own."""
        there = self.path.stat().st_size if self.path.exists() else 0
        if there and there == self._have:
            return
        self._fresh()
        if not there:
            return
        self.progress.phase = "verifying"
        with open(self.path, "rb") as stream:
            while piece := stream.read(CHUNK):
                line.check_stopped()
                self._take(piece)
        if self._size is not None and self._have > self._size:
            self._over()

    def _fresh(self) -> None:
        self._sha256 = hashlib.sha256()
        size = self.remote.size_bytes
        self._blob = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        self.progress.done_bytes -= self._counted
        self._have = self._counted = 0

    def _over(self) -> None:
        """Start over: what is there is of no use."""
        self.path.unlink(missing_ok=True)
        self._etag.unlink(missing_ok=True)
        self._fresh()

    def _take(self, piece: bytes) -> None:
        self._sha256.update(piece)
        if self.remote.git_blob is not None:
            self._blob.update(piece)
        self._have += len(piece)
        self._counted += len(piece)
        self.progress.done_bytes += len(piece)

    @property
    def _etag(self) -> Path:
        return self.path.with_name(f"{self.path.name}.etag")

    def _validator(self) -> str | None:
        try:
            text = self._etag.read_text("ascii")
        except (OSError, UnicodeDecodeError):
            return None
        return text if _ETAG.fullmatch(text) else None

    # --- the answer -------------------------------------------------------------------------------------------

    def _hold_against(self, answer: Answer) -> None:
        """What the server says it will send, against what is expected. Raises: Refusal; Interrupted to start over."""
        length = answer.length
        if answer.status == 200:
            if self._have:
                self._over()  # it sends all of it: the file changed, or it knows no ranges
            total = length
        else:
            found = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != self._have or int(found[2]) + 1 != int(found[3]):
                self._over()
                raise Interrupted(f"{self.remote.called} answered with another range than was asked for")
            if self._is_another(answer.headers.get("ETag", "")):
                self._over()
                raise Interrupted(f"{self.remote.called} is another file than the one that was begun")
            total = int(found[3])
            if length is not None and length != total - self._have:
                raise Refusal("not_materializable", f"{self.remote.called} contradicts itself about how much it sends")
        if total is None and self._size is None:
            raise Refusal("not_materializable", f"{self.remote.called} does not say how large it is")
        if total is not None and self._size is not None and total != self._size:
            raise Refusal(
                "not_materializable",
                f"{self.remote.called} is {total} bytes, and {self._size} are expected",
                details={"expected_bytes": self._size, "actual_bytes": total},
            )
        if self._size is None:
            assert total is not None
            self._size = total
        self.admit(self._size)
        etag = answer.headers.get("ETag", "")
        if _ETAG.fullmatch(etag):
            self._etag.write_text(etag, "ascii")
        else:
            self._etag.unlink(missing_ok=True)

    def _opened(self) -> Any:
        """The part, to be written on. Any: a raw stream."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        return os.fdopen(descriptor, "wb", buffering=0)

    def _is_another(self, etag: str) -> bool:
        """Whether a server that was asked for the rest of a file, on a condition, sends the rest of another one."""
        validator = self._validator() if self._have else None
        return validator is not None and _ETAG.fullmatch(etag) is not None and etag != validator

    def _keep(self, answer: Answer, line: Line) -> None:
        """Write what comes behind what is there."""
        assert self._size is not None
        self.progress.phase = "downloading"
        with self._opened() as stream:
            unsynced = 0
            try:
                while piece := answer.read(CHUNK):
                    if self._have + len(piece) > self._size:
                        raise Refusal(
                            "not_materializable", f"{self.remote.called} sends more than its {self._size} bytes"
                        )
                    _write(stream, piece)
                    self._take(piece)
                    self.progress.received_bytes += len(piece)
                    unsynced += len(piece)
                    if unsynced >= SYNC_BYTES:
                        os.fdatasync(stream.fileno())
                        unsynced = 0
                if self._have < self._size:
                    raise Interrupted(f"the connection ended after {self._have} of {self._size} bytes")
                os.fsync(stream.fileno())
            except OSError as wrong:
                raise unwritten(self.path, wrong) from None

    def _check(self) -> None:
        expected, actual = self.remote.sha256, self._sha256.hexdigest()
        if expected is None:
            expected, actual = self.remote.git_blob, self._blob.hexdigest()
        if actual == expected:
            return
        self._over()
        raise Refusal(
            "checkpoint_mismatch",
            f"{self.remote.called} has the hash {actual}, and {expected} is expected; what arrived was removed",
            details={"expected": expected, "actual": actual},
        )


def _write(stream: Any, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[stream.write(view) :]


def unwritten(path: Path, wrong: OSError) -> Exception:
    """What a disk may do."""
    if wrong.errno in _FULL:
        return Refusal(
            "insufficient_space", f"{path} cannot be written: {os.strerror(wrong.errno or 0)}. Free some space there"
        )
    why = f"{path} cannot be written: {wrong.strerror or wrong}"
    if wrong.errno in _CLOSED:
        return Refusal("invalid_root", f"{why}. Put that right, or name another place in host.model_sources.path")
    return Failure("internal", why)
