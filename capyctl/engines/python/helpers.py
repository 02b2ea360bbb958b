"""The directory of helper modules that engines' interpreters run: `<state_dir>/runtime`.

Its modules are part of CapyCTL and are written again at each start of a role, so that an engine never runs
an older release's. It belongs to the role alone: a directory that CapyCTL did not make is refused.
Source: engines 5 (helper modules).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from capyctl.errors import Refusal

MARKER = ".capyctl-runtime"


def write_helpers(state_dir: Path, sources: Sequence[Path], data: Mapping[str, bytes] | None = None) -> Path:
    """Make `<state_dir>/runtime` hold these modules and return it. Blocking; safe to repeat.

    Args:
      sources: files of this package; each keeps its name. A file that is the same already is left alone.
      data: further files by name.
    Raises: Refusal `unsafe_file` when the directory is a link, somebody else's, or not CapyCTL's.
    """
    directory = state_dir / "runtime"
    try:
        os.mkdir(directory, 0o700)
        made = True
    except FileExistsError:
        made = False
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise Refusal("unsafe_file", f"{directory} is not a directory of this user. Move it away")
    marker = directory / MARKER
    if not made and not os.path.lexists(marker) and any(os.scandir(directory)):
        raise Refusal("unsafe_file", f"{directory} was not made by CapyCTL (it has no {MARKER}). Move it away")
    os.chmod(directory, 0o700)
    _write(marker, b"")
    for source in sources:
        _write(directory / source.name, source.read_bytes())
    for name, content in (data or {}).items():
        _write(directory / name, content)
    return directory


def _write(path: Path, content: bytes) -> None:
    if not path.is_symlink() and path.is_file() and path.read_bytes() == content and not path.stat().st_mode & 0o077:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
