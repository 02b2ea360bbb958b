"""What a model directory is, as one `sha256:` digest of every file in it, and the cache that spares a reread.

The digest is taken over a canonical list of (path, size, SHA-256 of the content), sorted by path, so
renaming, adding, removing or changing any file changes it, and nothing else does. A file whose stat
identity (size, times, device, inode) is the one recorded keeps its recorded hash; small files are hashed
again every time, since they are cheap and are what is most often edited by hand.

Everything here blocks: callers put it in a thread.
Source: engines 5 (checkpoint gate), security E15, decisions 31.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs

from capyctl.checkpoints.directory import Listing, ModelFile
from capyctl.checkpoints.reading import Identity, changed, opened
from capyctl.documents import owned

SMALL_FILE_BYTES = 4 << 20
CACHE_BYTES_MAX = 16 << 20
CACHE_ENTRIES_MAX = 20_000
_CHUNK = 4 << 20

Progress = Callable[[int, int], None]
"""(bytes hashed so far, bytes to hash in all): first with 0, then at most once per 4 MiB."""


@attrs.frozen(kw_only=True)
class Digest:
    """The digest of a listing, and how many bytes had to be read for it."""

    digest: str
    read_bytes: int


class StatCache:
    """SHA-256 by file, remembered with the stat identity it was read under. One owner-only JSON file.

    A cache that cannot be read is an empty cache: it only costs a reread. Writes replace the file whole.
    Safe to share between the threads of one process; two processes only overwrite each other's savings.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._hashes = _load(path) if path is not None else {}

    def get(self, file: ModelFile) -> str | None:
        with self._lock:
            known = self._hashes.get(str(file.real))
        return known[1] if known is not None and known[0] == file.identity else None

    def put(self, hashes: Mapping[ModelFile, str]) -> None:
        """Remember these hashes and write the file."""
        if not hashes:
            return
        with self._lock:
            for file, sha256 in hashes.items():
                self._hashes.pop(str(file.real), None)  # re-inserted last: the oldest entries are dropped first
                self._hashes[str(file.real)] = (file.identity, sha256)
            for stale in list(self._hashes)[: max(0, len(self._hashes) - CACHE_ENTRIES_MAX)]:
                del self._hashes[stale]
            if self.path is not None:
                _save(self.path, self._hashes)

    def vouch(self, listing: Listing, digest: str) -> None:
        """Take a declared digest for a listing without reading its large files, for as long as they stay as they are.

        Kept among the hashes, under a name that no file has.
        """
        signature = _signature(listing)
        with self._lock:
            self._hashes.pop(_vouched(listing, digest), None)
            self._hashes[_vouched(listing, digest)] = (_NO_FILE, signature)
            if self.path is not None:
                _save(self.path, self._hashes)

    def vouched(self, listing: Listing, digest: str) -> bool:
        """Whether that digest was taken for exactly these files: stat identities, and contents of small ones."""
        with self._lock:
            known = self._hashes.get(_vouched(listing, digest))
        return known is not None and known[1] == _signature(listing)


_Hashes = dict[str, tuple[tuple[int, int, int, int, int], str]]
_NO_FILE = (0, 0, 0, 0, 0)


def _vouched(listing: Listing, digest: str) -> str:
    return f"{digest} {listing.directory}"


def _signature(listing: Listing) -> str:
    rows = [
        [file.path, *file.identity] if file.size_bytes > SMALL_FILE_BYTES else [file.path, _hash_file(file, _unheard)]
        for file in listing.files
    ]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def _unheard(done: int) -> None:
    """Nobody asked how far a small file was read."""


def _load(path: Path) -> _Hashes:
    try:
        with open(path, "rb") as stream:
            status = os.fstat(stream.fileno())
            # Somebody else's file could vouch for swapped weights.
            if status.st_uid != os.geteuid() or status.st_mode & 0o022 or status.st_size > CACHE_BYTES_MAX:
                return {}
            rows = json.load(stream)
        hashes: _Hashes = {}
        for name, (identity, sha256) in rows.items():
            size, mtime, ctime, device, inode = (int(number) for number in identity)
            hashes[str(name)] = ((size, mtime, ctime, device, inode), str(sha256))
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return hashes


def _save(path: Path, hashes: _Hashes) -> None:
    owned.private_directory(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        json.dump({name: [list(identity), sha256] for name, (identity, sha256) in hashes.items()}, stream)
    # No fsync: losing this file to a power cut costs a reread, never a wrong digest.
    os.replace(temporary, path)


def digest_listing(
    listing: Listing, cache: StatCache, *, trust_cache: bool = True, progress: Progress | None = None
) -> Digest:
    """The digest of every file of `listing`, rereading what the cache cannot vouch for.

    Args:
      trust_cache: False rereads every byte, whatever the stat identities say.
      progress: told how many of the bytes that must be read have been read.
    Raises: Refusal `checkpoint_mismatch` when a file changes while it is read; `checkpoint_unusable` when a
      file cannot be read.
    """
    # By stat identity: names that lead to one file (a cache of the hub links its blobs) are read once.
    known: dict[Identity, str] = {}
    unread: dict[Identity, int] = {}
    for file in listing.files:
        sha256 = cache.get(file) if trust_cache and file.size_bytes > SMALL_FILE_BYTES else None
        if sha256 is None:
            unread[file.identity] = file.size_bytes
        else:
            known[file.identity] = sha256
    total = sum(size for identity, size in unread.items() if identity not in known)
    read, fresh, rows = 0, {}, []
    if progress is not None:
        progress(0, total)
    try:
        for file in listing.files:
            sha256 = known.get(file.identity)
            if sha256 is None:
                base = read

                def advance(done: int, base: int = base) -> None:
                    if progress is not None:
                        progress(base + done, total)

                sha256 = known[file.identity] = _hash_file(file, advance)
                read += file.size_bytes
                if file.size_bytes > SMALL_FILE_BYTES:
                    fresh[file] = sha256
            rows.append([file.path, file.size_bytes, sha256])
    finally:
        cache.put(fresh)  # whoever looks again reads the others no second time
    canonical = json.dumps(rows, ensure_ascii=True, separators=(",", ":")).encode()
    return Digest(digest=f"sha256:{hashlib.sha256(canonical).hexdigest()}", read_bytes=read)


def _hash_file(file: ModelFile, advance: Callable[[int], None]) -> str:
    hasher, done = hashlib.sha256(), 0
    with opened(file) as stream:
        while piece := stream.read(_CHUNK):
            hasher.update(piece)
            done += len(piece)
            if done > file.size_bytes:
                break  # somebody appends faster than we read
            advance(done)
        if done != file.size_bytes:
            raise changed(file)
    return hasher.hexdigest()
