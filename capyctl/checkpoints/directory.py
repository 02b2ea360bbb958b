"""A model directory, listed without leaving it: regular files only, links followed inside the model's root.

The listing is what the digest covers and what the pick chooses from. A link may point at most eight hops
on, and every hop must stay below the root: the models directory, a Hub cache's own `models--…` directory,
or the directory itself. Devices, sockets, FIFOs, links to directories and links that leave the root are
`unsafe_file`; a directory that other users may write is `invalid_root`.

Source: config 7.2; security 4.2, 5 and F10; engines 9.1 for the pick.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath

import attrs

from capyctl.documents.strict import nearest
from capyctl.errors import Refusal

HOPS_MAX = 8
FILES_MAX = 8192
TOTAL_BYTES_MAX = 1 << 62
"""All files together: sums of sizes stay within 64 bits."""
DEPTH_MAX = 16
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_DOWNLOADED = re.compile(r"/sources/(huggingface|http)/")
_HUB_SNAPSHOT = re.compile(r"^models--[^/]+$")


@attrs.frozen(kw_only=True)
class ModelFile:
    """One regular file of a model. `path` is relative and posix; `real` is where its bytes lie, links resolved.

    The last five fields are its stat identity: while they stay the same, so does the content.
    """

    path: str
    real: Path
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    device: int
    inode: int

    @property
    def identity(self) -> tuple[int, int, int, int, int]:
        return (self.size_bytes, self.mtime_ns, self.ctime_ns, self.device, self.inode)


@attrs.frozen(kw_only=True)
class Listing:
    """Every file of a model directory, sorted by path."""

    directory: Path
    files: tuple[ModelFile, ...]

    def find(self, path: str) -> ModelFile | None:
        """The file at that relative path, or None."""
        return self._by_path.get(path)

    @cached_property
    def _by_path(self) -> Mapping[str, ModelFile]:
        return {file.path: file for file in self.files}

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@attrs.frozen(kw_only=True)
class GgufPick:
    """Which files of a directory llama.cpp is given. `shards` begins with `model`; paths are relative."""

    model: str
    shards: tuple[str, ...]
    projector: str | None

    @property
    def weights(self) -> tuple[str, ...]:
        return (*self.shards, self.projector) if self.projector else self.shards


def resolve_model(model: str, models_root: Path | None) -> Path:
    """The absolute directory that a deployment's local `model` names: below the models directory, or absolute.

    Raises: Refusal `invalid_root` for a path that climbs out, is not there, or that other users may write.
    Source: config 7.2.
    """
    if not model or "\0" in model or model.startswith("~"):
        raise Refusal("invalid_root", f"{model!r} is not a model directory that this machine can resolve")
    if os.path.isabs(model):
        path = Path(os.path.normpath(model))
    else:
        if models_root is None:
            raise Refusal("invalid_root", f"{model!r} is relative and this machine has no models directory")
        if ".." in PurePosixPath(model).parts:
            raise Refusal("invalid_root", f"{model!r} climbs out of the models directory {models_root}")
        path = models_root / model
    try:
        found = stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        again = (
            ". Deploy the model again to have it downloaded" if _DOWNLOADED.search(str(path)) else _meant(path, model)
        )
        raise Refusal("invalid_root", f"the model directory {path} is not there{again}") from None
    except OSError as error:
        raise Refusal("invalid_root", f"the model directory {path} cannot be read: {error.strerror}") from None
    if not found:
        raise Refusal(
            "invalid_root", f"the model directory {path} is not a directory{_of_file(path, model, models_root)}"
        )
    return path


def _meant(path: Path, model: str) -> str:
    """The directory beside the missing one that its name is nearest to, as a document would name it; else nothing."""
    try:
        with os.scandir(path.parent) as entries:
            beside = [entry.name for entry in itertools.islice(entries, FILES_MAX) if entry.is_dir()]
    except OSError:
        return ""  # there is nothing beside it
    near = nearest(path.name, (name for name in beside if name.isprintable()))
    return f'. Did you mean "{PurePosixPath(model).with_name(near[0])}"?' if near else ""


def _of_file(path: Path, model: str, models_root: Path | None) -> str:
    """How a document names the file whose path stands where a directory's belongs."""
    if path.parent == models_root:  # which holds every model, and is none
        return ". Put the file into a directory of its own and name that"
    above = PurePosixPath(model).parent
    file = f", and in engine_config.llamacpp.gguf_file: {path.name}" if path.name.endswith(".gguf") else ""
    return f". Name the directory that holds it, model: {above}{file}"


def root_of(directory: Path, models_root: Path | None) -> Path:
    """The root that links of `directory` must not leave: the narrowest that still lets a Hub snapshot work."""
    real = Path(os.path.realpath(directory))
    if models_root is not None:
        store = Path(os.path.realpath(models_root))
        if real == store or store in real.parents:
            return store
    snapshot, snapshots = real.parent, real.parent.parent
    if snapshot.name == "snapshots" and _HUB_SNAPSHOT.match(snapshots.name):
        return snapshots
    return real


def check_root(directory: Path) -> None:
    """Refuse a directory that other users may replace: it, or an ancestor, is writable by everyone.

    A sticky ancestor that root owns (a temporary directory) is fine: nobody else can rename what is in it.
    Raises: Refusal `invalid_root` naming the path that is open.
    """
    for place in (directory, *directory.parents):
        status = os.stat(place)
        sticky = bool(status.st_mode & stat.S_ISVTX) and status.st_uid == 0 and place != directory
        if status.st_mode & stat.S_IWOTH and not sticky:
            raise Refusal(
                "invalid_root",
                f"{place} is writable by every user, so the model could be replaced. Try: chmod o-w {place}",
            )


def list_files(directory: Path, models_root: Path | None = None) -> Listing:
    """List the regular files of a model directory, deterministically.

    Raises: Refusal `invalid_root` or `unsafe_file` as the module says; `too_large` beyond 8192 files.
    """
    root = root_of(directory, models_root)
    real = Path(os.path.realpath(directory))
    if real != root and root not in real.parents:
        raise Refusal("unsafe_file", f"{directory} is a link that leaves {root}")
    try:
        check_root(real)
        found: dict[str, ModelFile] = {}
        _scan(real, "", root, found, depth=0)
    except OSError as error:
        raise Refusal("invalid_root", f"{error.filename or directory} cannot be read: {error.strerror}") from None
    listing = Listing(directory=directory, files=tuple(found[path] for path in sorted(found)))
    if listing.total_bytes > TOTAL_BYTES_MAX:
        raise Refusal("too_large", f"{directory} holds {listing.total_bytes} bytes, more than any model has")
    return listing


def file_at(place: Path) -> ModelFile:
    """One file as a listing of its directory alone would show it. Raises: Refusal `unsafe_file`."""
    return _file(place, place.name, Path(os.path.realpath(place.parent)))


def _scan(place: Path, prefix: str, root: Path, found: dict[str, ModelFile], *, depth: int) -> None:
    if depth > DEPTH_MAX:
        raise Refusal("too_large", f"{place} is more than {DEPTH_MAX} directories deep")
    with os.scandir(place) as entries:
        children = sorted(itertools.islice(entries, FILES_MAX + 1), key=lambda entry: entry.name)
    if len(children) > FILES_MAX:
        raise Refusal("too_large", f"{place} holds more than {FILES_MAX} files")
    for entry in children:
        path = f"{prefix}{entry.name}"
        if not path.isprintable():
            raise Refusal("unsafe_file", f"{path!r} has a name that cannot be printed")
        if entry.is_dir(follow_symlinks=False):
            check_root(Path(entry.path))
            _scan(Path(entry.path), f"{path}/", root, found, depth=depth + 1)
        else:
            found[path] = _file(Path(entry.path), path, root)
        if len(found) > FILES_MAX:
            raise Refusal("too_large", f"{place} holds more than {FILES_MAX} files")


def _file(place: Path, path: str, root: Path) -> ModelFile:
    real = _follow(place, path, root)
    try:
        status = os.lstat(real)
    except FileNotFoundError:
        what = "is a link to a file that is not there" if real != place else "was removed while the model was listed"
        raise Refusal("unsafe_file", f"{path} {what}. Download the model again") from None
    if not stat.S_ISREG(status.st_mode):
        raise Refusal("unsafe_file", f"{path} is not a regular file, so it cannot be part of a model")
    return ModelFile(
        path=path,
        real=real,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        device=status.st_dev,
        inode=status.st_ino,
    )


def _follow(place: Path, path: str, root: Path) -> Path:
    """Resolve a link hop by hop; every hop is checked, not only the end."""
    for _ in range(HOPS_MAX + 1):
        if not place.is_symlink():
            return place
        target = Path(os.path.normpath(os.path.join(place.parent, os.readlink(place))))
        # The parent may itself be reached through links: judge where it really is.
        place = Path(os.path.realpath(target.parent)) / target.name
        if root not in place.parents:
            raise Refusal("unsafe_file", f"{path} is a link that leaves {root}")
    raise Refusal("unsafe_file", f"{path} is a chain of more than {HOPS_MAX} links")


def pick_gguf(listing: Listing, gguf_file: str | None = None, mmproj_file: str | None = None) -> GgufPick:
    """Choose the model file: the named one, the only one, or the first shard of the only complete set.

    Raises: Refusal `checkpoint_unusable` when there is none, several candidates, or a set with a hole.
    Source: engines 9.1, memory 5.12.
    """
    names = [file.path for file in listing.files if file.path.endswith(".gguf")]
    projectors = [name for name in names if "mmproj" in PurePosixPath(name).name.lower()]
    models = [name for name in names if name not in projectors]
    if gguf_file is None:
        starts = [name for name in models if _shard_number(name) in (None, 1)]
        if not models:
            raise Refusal("checkpoint_unusable", f"{listing.directory} holds no .gguf file")
        if len(starts) != 1:
            shown = ", ".join((starts or models)[:8])
            raise Refusal(
                "checkpoint_unusable",
                f"{listing.directory} holds several candidates ({shown}). Name one in engine_config.llamacpp.gguf_file"
                if starts
                else f"{listing.directory} holds {shown} but no first shard (-00001-of-…)",
            )
        gguf_file = starts[0]
    elif gguf_file not in names:
        raise Refusal("checkpoint_unusable", f"{gguf_file} is not a .gguf file of {listing.directory}{_held(models)}")
    elif _shard_number(gguf_file) not in (None, 1):
        raise Refusal("checkpoint_unusable", f"{gguf_file} is not the first shard of its set; name the first")
    if mmproj_file is None:
        if len(projectors) > 1:
            raise Refusal(
                "checkpoint_unusable",
                f"{listing.directory} holds several projectors ({', '.join(projectors[:8])}). "
                "Name one in engine_config.llamacpp.mmproj_file",
            )
        mmproj_file = projectors[0] if projectors else None
    elif mmproj_file not in names or mmproj_file == gguf_file:
        others = [name for name in names if name != gguf_file]
        raise Refusal(
            "checkpoint_unusable", f"{mmproj_file} is not another .gguf file of {listing.directory}{_held(others)}"
        )
    return GgufPick(model=gguf_file, shards=_shards(listing, gguf_file), projector=mmproj_file)


def _held(names: Sequence[str]) -> str:
    """What a directory holds in place of the file that was named."""
    more = ", …" if len(names) > 8 else ""
    return f", which holds {', '.join(names[:8])}{more}" if names else ", which holds none that could be meant"


def _shard_number(name: str) -> int | None:
    match = _SHARD.match(PurePosixPath(name).name)
    return int(match["number"]) if match else None


def _shards(listing: Listing, first: str) -> tuple[str, ...]:
    match = _SHARD.match(PurePosixPath(first).name)
    if match is None:
        return (first,)
    parent = PurePosixPath(first).parent
    count = int(match["count"])
    wanted = tuple(str(parent / f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))
    present = {file.path for file in listing.files}
    missing = [name for name in wanted if name not in present]
    if missing or not wanted:
        raise Refusal("checkpoint_unusable", f"the set of {first} is not complete: {', '.join(missing[:4])} missing")
    return wanted
