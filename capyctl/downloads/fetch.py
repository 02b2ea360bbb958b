"""A whole source: looked up, given room, fetched file by file, and put in its place at once. It blocks.

Theory of operation. What is being fetched lies below `sources/.parts/<name>`, under a lock that the system drops
with its process: one fetch per source, whoever asks, this role or another one on the same models. A file moves from
`part` to `files` when its hash is right and it is on the disk. When all are there the directory is renamed to where
models are looked for: it is complete, or it is not there. A kill at any moment leaves parts that the next fetch goes
on from.
Source: config 5.2; memory 1; security 7, F15.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs

from capyctl.checkpoints.digest import StatCache
from capyctl.checkpoints.directory import ModelFile, check_root, file_at, list_files
from capyctl.checkpoints.sources import SOURCES, Wanted, place_of
from capyctl.documents.model_source import Http, HuggingFace
from capyctl.downloads.door import Line
from capyctl.downloads.listing import Asking, RemoteFile
from capyctl.downloads.part import Part, Patience, Progress, try_on, unwritten
from capyctl.downloads.room import Room, bytes_below
from capyctl.errors import Refusal

PARTS: Final = ".parts"
PLACE: Final = "place"  # a file that says whose parts they are
LOCKED_PAUSE_S: Final = 0.2


def parts_of(root: Path, place: str) -> Path:
    """Where the parts of a download are, whose complete files lie at `place`."""
    return root / SOURCES / PARTS / hashlib.sha256(place.encode()).hexdigest()[:24]


def place_noted(work: Path) -> str | None:
    """Whose parts these are."""
    try:
        place = (work / PLACE).read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return None
    return place if parts_of(Path(), place).name == work.name else None


def is_nameless(work: Path) -> bool:
    """Whether nothing says whose parts these are: the power failed, or the disk was full, before it was written."""
    try:
        return (work / PLACE).stat().st_size == 0
    except FileNotFoundError:
        return True


@attrs.frozen(kw_only=True)
class Fetcher:
    """Fetches sources into one download directory.

    Args:
      cache: told the hashes of what was fetched, so that measuring it reads nothing twice.
    """

    asking: Asking
    room: Room
    patience: Patience = attrs.field(factory=Patience)
    cache: StatCache | None = None
    huggingface: bool = True
    http: bool = True

    def directory(self, source: HuggingFace | Http, wanted: Wanted) -> Path:
        """Where a source lies once it is complete."""
        return self.room.root / place_of(source, wanted)

    def check(self, source: HuggingFace | Http) -> None:
        """Refuse a source that is not here and that `fetch` would refuse before it asks anybody.

        Raises: Refusal `not_materializable`, `unsafe_file`, `unsupported`.
        """
        self._check_allowed(source)
        self.asking.check(source)

    def found(self, source: HuggingFace | Http, wanted: Wanted) -> Path | None:
        """Where a source lies, if it is complete. Raises: Refusal `invalid_root` and others of `unwritten`."""
        final = self.directory(source, wanted)
        if not final.is_dir():
            return None
        if isinstance(source, Http) and source.url_ref is not None:
            try:
                self._rename(final, source)
            except OSError as wrong:
                raise unwritten(final, wrong) from None
        return final

    def _rename(self, final: Path, source: Http) -> None:
        """A URL that is a secret may say another name by now, and engines go by names: the file is called that."""
        try:
            name = self.asking.name_of(source)
        except Refusal:
            return  # what is there needs no address
        files = list_files(final, self.room.root).files
        if len(files) != 1 or files[0].path == name:
            return
        sha256 = None if self.cache is None else self.cache.get(files[0])
        os.rename(final / files[0].path, final / name)
        sync(final)
        if self.cache is not None and sha256 is not None:
            self.cache.put({file_at(final / name): sha256})

    def fetch(self, source: HuggingFace | Http, wanted: Wanted, progress: Progress, line: Line) -> Path:
        """Have a source complete in its directory, from wherever an earlier fetch got to.

        Raises: Refusal `not_materializable`, `unauthorized`, `not_found`, `too_large`, `insufficient_space`,
          `checkpoint_mismatch`, `checkpoint_unusable`, `unsafe_file`, `invalid_root`; Failure `unavailable`;
          door.Stopped.
        """
        place = place_of(source, wanted)
        final = self.room.root / place
        there = self.found(source, wanted) is not None
        if not there:
            self._check_allowed(source)
        try:
            if there:
                _tidy(parts_of(self.room.root, place))
                return final
            self.room.root.mkdir(parents=True, exist_ok=True)
            work = parts_of(self.room.root, place)
            for where in (final, work):  # what others may replace is refused before it is fetched
                check_root(Path(os.path.realpath(_there(where))))
            with _held(work, place, line, progress):
                if not final.is_dir():  # whoever held the lock may have finished it
                    self._fetch(source, wanted, final, work, progress, line)
        except OSError as wrong:
            raise unwritten(Path(wrong.filename or self.room.root), wrong) from None
        return final

    def _check_allowed(self, source: HuggingFace | Http) -> None:
        kind, allowed = ("http", self.http) if isinstance(source, Http) else ("huggingface", self.huggingface)
        if not allowed:
            raise Refusal(
                "not_materializable",
                f"this host downloads nothing of this kind (host.model_sources.{kind}: disabled). "
                "Allow it, or name a directory",
            )

    def _fetch(
        self, source: HuggingFace | Http, wanted: Wanted, final: Path, work: Path, progress: Progress, line: Line
    ) -> None:
        called = source.repo if isinstance(source, HuggingFace) else "the file"
        files: Sequence[RemoteFile] = try_on(
            lambda: self.asking.files(source, wanted, line), lambda: 0, line, self.patience, called
        )
        if isinstance(source, Http):
            called = files[0].called
        token = object()
        twin = self._twin(source) if isinstance(source, Http) else None
        try:
            self._files(files, work, progress, line, token, called, twin)
        finally:
            self.room.release(token)
        _publish(work / "files", final, {file.path for file in files})
        self._vouch(final, work)
        shutil.rmtree(work, ignore_errors=True)

    def _twin(self, source: Http) -> Path | None:
        """A file with the content of a lone file, under another name, which is still what was hashed."""
        for place in sorted((self.room.root / SOURCES / "http").glob(f"*-{source.sha256}")):
            try:
                files = list_files(place, self.room.root).files
            except Refusal:
                continue  # it is of no use to anybody
            if len(files) == 1 and self.cache is not None and self.cache.get(files[0]) == source.sha256:
                return files[0].real
        return None

    def _files(
        self,
        files: Sequence[RemoteFile],
        work: Path,
        progress: Progress,
        line: Line,
        token: object,
        called: str,
        twin: Path | None,
    ) -> None:
        """Fetch what is missing of every file, the room for all of them set aside first."""
        there = 0
        missing = []
        for file in files:
            done = work / "files" / file.path
            if done.is_file() and (file.size_bytes is None or done.stat().st_size == file.size_bytes):
                there += done.stat().st_size
            else:
                missing.append(file)
        progress.done_bytes = there

        def admit(total: int) -> None:
            """Reserve, once its size is known: before the first file, or by the server's answer for a lone file."""
            if progress.total_bytes is None:
                begun = there + bytes_below(work / "part")
                self.room.reserve(token, total, begun, lambda: total - progress.done_bytes, called)
                progress.total_bytes = total

        sizes = [file.size_bytes for file in files]
        if None not in sizes:
            admit(sum(size or 0 for size in sizes))
        for file in missing:
            line.check_stopped()
            name = hashlib.sha256(file.path.encode()).hexdigest()[:24]
            part = Part(self.asking.door, file, work / "part" / name, progress, admit, twin)
            sha256 = part.fetch(line, self.patience)
            done = work / "files" / file.path
            done.parent.mkdir(parents=True, exist_ok=True)
            (work / "part" / f"{name}.etag").unlink(missing_ok=True)
            _note_hash(work, file.path, sha256)
            os.replace(work / "part" / name, done)
            sync(done.parent)
        progress.phase = "verifying"

    def _vouch(self, final: Path, work: Path) -> None:
        """What was hashed on its way is known by its stat identity from now on."""
        if self.cache is None:
            return
        known: dict[ModelFile, str] = {}
        for file in list_files(final, self.room.root).files:
            sha256 = _noted_hash(work, file.path)
            if sha256 is not None:
                known[file] = sha256
        self.cache.put(known)


def _there(path: Path) -> Path:
    """The nearest directory above a path that is there."""
    return next(above for above in path.parents if above.is_dir())


def _hash_note(work: Path, path: str) -> Path:
    return work / f"{hashlib.sha256(path.encode()).hexdigest()[:24]}.sha256"


def _note_hash(work: Path, path: str, sha256: str) -> None:
    _hash_note(work, path).write_text(sha256, "ascii")


def _noted_hash(work: Path, path: str) -> str | None:
    try:
        return _hash_note(work, path).read_text("ascii")
    except OSError:
        return None  # then it is read again


def _publish(files: Path, final: Path, names: set[str]) -> None:
    """Put a complete directory where models are looked for. Nothing that does not belong there goes along."""
    for place, _, there in os.walk(files, topdown=False):
        for name in there:
            path = Path(place, name)
            if str(path.relative_to(files)) not in names:
                path.unlink()
        sync(Path(place))
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.rename(files, final)
    except OSError as wrong:
        if final.is_dir():
            return  # another role was first
        raise unwritten(final, wrong) from None
    sync(final.parent)


def sync(directory: Path) -> None:
    """Have a directory's entries survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _held(work: Path, place: str, line: Line, progress: Progress) -> Iterator[None]:
    """Hold the source's parts. Whoever waits for another fetch of it shows that as the phase. Raises: Stopped."""
    while True:
        with locked(work, make=True) as held:
            if held:
                progress.phase = "asking"
                try:
                    for directory in ("files", "part"):
                        (work / directory).mkdir(exist_ok=True)
                    (work / PLACE).write_text(place, "ascii")
                    yield
                finally:
                    if not any(bytes_below(work / name) for name in ("files", "part")):
                        shutil.rmtree(work, ignore_errors=True)  # there is nothing to go on from
                return
        progress.phase = "waiting"
        line.stopped.wait(LOCKED_PAUSE_S)
        line.check_stopped()


@contextlib.contextmanager
def locked(work: Path, *, make: bool = False) -> Iterator[bool]:
    """Try to hold a directory; the system lets go of it with the process. False: somebody does, or it is gone.

    Args:
      make: make it first. Whoever holds it may be removing it, so that it can be gone all the same.
    """
    try:
        if make:
            work.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileExistsError, FileNotFoundError):
        if work.is_symlink() or (work.exists() and not work.is_dir()):
            raise
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.path.samestat(os.fstat(descriptor), os.lstat(work))
        except (BlockingIOError, FileNotFoundError):
            held = False
        yield held
    finally:
        os.close(descriptor)


def _tidy(work: Path) -> None:
    """Remove what a kill between the last two steps of a fetch left."""
    if work.is_dir():
        with locked(work) as held:
            if held:
                shutil.rmtree(work, ignore_errors=True)
