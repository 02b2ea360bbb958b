"""The two files of registered engines, `engines.yaml` and `custom-engines.yaml`: how they are read and written.

The first line counts writes. A write holds one lock for both files, since they share their names, reads
again, writes a temporary file in the same directory, and renames it: a reader sees the old file or the new
one, whole.

Source: engines 2.7; config 8, 9.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import yaml

from capyctl.documents import owned, reader
from capyctl.documents.places import is_full, no_space
from capyctl.errors import CapyError, Refusal

DOCUMENT_BYTES_MAX = 32 << 10
LOCK_NAME = "engines.yaml.lock"
_HEADER = re.compile(r"# capyctl-document-revision: (\d{1,18})")


@attrs.frozen(kw_only=True)
class Form:
    """What tells the two files apart: the file's name, its kind, and the field that holds names and blocks."""

    file: str
    kind: str
    field: str


ENGINES = Form(file="engines.yaml", kind="engines", field="runtime_profiles")
CUSTOM = Form(file="custom-engines.yaml", kind="custom_engines", field="engines")


def beside(path: Path, form: Form) -> Path:
    """The file of the other form in the same directory."""
    return path.with_name(form.file)


def read_blocks(path: Path, form: Form) -> tuple[int, dict[str, Any]]:
    """(revision, blocks by name); a file that is not there is empty, at revision 0.

    Raises: Refusal `invalid_config` naming the field at fault; `unsafe_file` when others could have written it.
    """
    text = _read(path)
    if text is None:
        return 0, {}
    header = _HEADER.fullmatch(text.partition("\n")[0].rstrip())
    data = reader.read(text, str(path))
    if not isinstance(data, dict) or data.get("schema_version") != 1 or data.get("kind") != form.kind:
        raise Refusal("invalid_config", f"{path}: expected schema_version: 1 and kind: {form.kind}")
    unknown = sorted(set(data) - {"schema_version", "kind", form.field})
    if unknown:
        raise Refusal("invalid_config", f"{path}: {unknown[0]} is not a field of this file")
    raw = data.get(form.field) or {}
    if not isinstance(raw, dict):
        raise Refusal("invalid_config", f"{path}: {form.field}: expected names and blocks")
    return int(header[1]) if header else 0, {str(name): block for name, block in raw.items()}


def check_free(path: Path, form: Form, present: Mapping[str, Any], name: str) -> None:
    """Refuse a name that this file or the other one has. Raises: Refusal `profile_exists`."""
    other = CUSTOM if form is ENGINES else ENGINES
    for place, names in ((path, present), (beside(path, other), read_blocks(beside(path, other), other)[1])):
        if name in names:
            raise Refusal("profile_exists", f"{place} has a profile {name} already; choose another with --name")


def _read(path: Path) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refusal("unsafe_file", f"{path} cannot be read: {error.strerror}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise Refusal("unsafe_file", f"{path} is not a regular file")
    with os.fdopen(descriptor, "rb") as stream:
        if status.st_mode & 0o022 or (status.st_uid not in (0, os.geteuid()) and os.geteuid() != 0):
            # It names programs that a role runs.
            raise Refusal("unsafe_file", f"{path} can be written by other users. Try: chmod 600 {path}")
        content = stream.read(DOCUMENT_BYTES_MAX + 1)
    if len(content) > DOCUMENT_BYTES_MAX:
        raise Refusal("invalid_config", f"{path} is larger than {DOCUMENT_BYTES_MAX >> 10} KiB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise Refusal("invalid_config", f"{path} is not UTF-8 text") from None


def _unwritten(path: Path, wrong: OSError) -> CapyError:
    if is_full(str(path), wrong):
        return no_space(str(path), wrong)
    return Refusal("unsafe_file", f"{path} cannot be written: {os.strerror(wrong.errno or 0)}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the directory's lock exclusively; waits for another writer. The directory is made, 0700, when missing."""
    beside_it = path.with_name(LOCK_NAME)
    try:
        owned.private_directory(path.parent)
        lock = os.open(beside_it, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as wrong:
        raise _unwritten(beside_it, wrong) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def write_blocks(
    path: Path, form: Form, revision: int, blocks: Mapping[str, Any], owner: tuple[int, int] | None
) -> int:
    """Replace the file and return `revision`. The lock is held. Owner and mode stay as they were.

    Args:
      owner: uid and gid for a file that root creates on behalf of a role.
    Raises: Refusal `publish_rejected` when the file would grow beyond 32 KiB, `unsafe_file` when it cannot be
      written, Failure `insufficient_space` when its disk is full; nothing is written then.
    """
    body = yaml.safe_dump(
        {"schema_version": 1, "kind": form.kind, form.field: dict(blocks)}, sort_keys=False, allow_unicode=True
    )
    content = f"# capyctl-document-revision: {revision}\n{body}".encode()
    if len(content) > DOCUMENT_BYTES_MAX:
        raise Refusal("publish_rejected", f"{path} would be {len(content)} bytes; at most {DOCUMENT_BYTES_MAX}")
    try:
        before: os.stat_result | None = os.stat(path)
    except FileNotFoundError:
        before = None
    mode = stat.S_IMODE(before.st_mode) if before is not None else 0o600
    keeper = (before.st_uid, before.st_gid) if before is not None else owner
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            if keeper is not None and os.geteuid() == 0:
                os.fchown(stream.fileno(), *keeper)
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException as wrong:
        temporary.unlink(missing_ok=True)
        if isinstance(wrong, OSError):
            raise _unwritten(path, wrong) from None
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return revision
