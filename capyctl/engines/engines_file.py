"""`engines.yaml`: the registered profiles. The CLI writes it, a role only reads it.

The first line counts writes. A write holds `engines.yaml.lock`, reads again, writes a temporary file in the
same directory, and renames it, so a reader sees the old file or the new one, whole. Profiles of engines
that this release does not know are kept as they are.

Source: engines 2.7; config 5.5, 8.
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

from capyctl.documents import reader, strict
from capyctl.documents.blocks import RESERVED_PROFILES, EngineProfile
from capyctl.documents.scalars import parse_name
from capyctl.engines.environment import check_approved_env, check_env
from capyctl.engines.families import FAMILIES
from capyctl.engines.options import check_approved_options, check_fixed_args
from capyctl.engines.registered import Registered
from capyctl.errors import Refusal

DOCUMENT_BYTES_MAX = 32 << 10
_HEADER = re.compile(r"# capyctl-document-revision: (\d{1,18})")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_DIGEST_FIELD = "installation_digest"


@attrs.frozen(kw_only=True)
class EnginesFile:
    """What the file says. `raw` keeps every profile as it was written; `skipped` names those not understood."""

    path: Path
    revision: int
    profiles: Mapping[str, Registered]
    skipped: tuple[str, ...]
    raw: Mapping[str, Any]

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line per profile that is not used."""
        return tuple(
            f"{self.path}: the profile {name} is for an engine that this release does not run; it is left out"
            for name in self.skipped
        )


def read_engines(path: Path) -> EnginesFile:
    """Read the file; one that is not there is empty, at revision 0.

    Raises: Refusal `invalid_config` naming the field at fault; `unsafe_file` when others could have written it.
    """
    text = _read(path)
    if text is None:
        return EnginesFile(path=path, revision=0, profiles={}, skipped=(), raw={})
    header = _HEADER.fullmatch(text.partition("\n")[0].rstrip())
    data = reader.read(text, str(path))
    if not isinstance(data, dict) or data.get("schema_version") != 1 or data.get("kind") != "engines":
        raise Refusal("invalid_config", f"{path}: expected schema_version: 1 and kind: engines")
    unknown = sorted(set(data) - {"schema_version", "kind", "runtime_profiles"})
    if unknown:
        raise Refusal("invalid_config", f"{path}: {unknown[0]} is not a field of this file")
    raw = data.get("runtime_profiles") or {}
    if not isinstance(raw, dict):
        raise Refusal("invalid_config", f"{path}: runtime_profiles: expected names and profiles")
    profiles: dict[str, Registered] = {}
    skipped: list[str] = []
    for name, block in raw.items():
        registered = _profile(path, str(name), block)
        if registered is None:
            skipped.append(str(name))
        else:
            profiles[str(name)] = registered
    return EnginesFile(
        path=path, revision=int(header[1]) if header else 0, profiles=profiles, skipped=tuple(skipped), raw=raw
    )


def _read(path: Path) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refusal("unsafe_file", f"{path} cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise Refusal("unsafe_file", f"{path} is not a regular file")
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


def _profile(path: Path, name: str, block: Any) -> Registered | None:
    """One profile, or None when its engine is not one that this release runs."""
    if not isinstance(block, dict):
        raise Refusal("invalid_config", f"{path}: runtime_profiles.{name}: expected a block")
    if block.get("engine") not in FAMILIES and isinstance(block.get("engine"), str):
        return None
    fields = dict(block)
    digest = fields.pop(_DIGEST_FIELD, None)
    if digest is not None and not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
        raise Refusal(
            "invalid_config", f"{path}: runtime_profiles.{name}.{_DIGEST_FIELD}: expected sha256: and 64 digits"
        )
    where = f"{path}: runtime_profiles.{name}"
    registered = Registered(name=name, profile=strict.structure(fields, EngineProfile, where), digest=digest)
    check_registered(registered)
    return registered


def check_registered(registered: Registered) -> None:
    """The rules that the profile's family adds to its document: options, variables, approvals.

    Raises: Refusal `invalid_config`, `engine_env_reserved:<name>`, `capability_missing:deep_park`.
    """
    known, profile = FAMILIES[registered.engine], registered.profile
    where = f"runtime_profiles.{registered.name}"
    check_fixed_args(known.options, profile.args, f"{where}.args")
    check_env(profile.env, known.reserved_env, where=f"{where}.env")
    check_approved_options(known.options, profile.security.approved_options)
    check_approved_env(profile.security.approved_env, known.reserved_env)


def check_name(name: str) -> None:
    """Refuse a profile name that is malformed or belongs to the role. Raises: Refusal."""
    try:
        parse_name(name)
    except ValueError as error:
        raise Refusal("invalid_config", f"--name: {name!r}: {error}") from None
    if name in RESERVED_PROFILES:
        raise Refusal("profile_exists", f"{name} is the name of the role's own engine; choose another with --name")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold `<file>.lock` exclusively; waits for another writer. The directory is made, 0700, when it is missing."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def put_profile(path: Path, registered: Registered, *, owner: tuple[int, int] | None = None) -> int:
    """Add a profile under a new name and return the file's new revision. Blocking; takes the lock.

    Args:
      owner: uid and gid for a file that root creates on behalf of a role.
    Raises: Refusal `profile_exists` for a name already there; `publish_rejected` when the file would grow
      beyond 32 KiB; nothing is written then.
    """
    with locked(path):
        present = read_engines(path)
        if registered.name in present.raw:
            raise Refusal(
                "profile_exists", f"{path} has a profile {registered.name} already; choose another with --name"
            )
        check_registered(registered)
        block = {**_plain(registered.profile), **({_DIGEST_FIELD: registered.digest} if registered.digest else {})}
        return _write(present, {**present.raw, registered.name: block}, owner)


def remove_profile(path: Path, name: str, *, owner: tuple[int, int] | None = None) -> int:
    """Remove a profile and return the file's new revision. Blocking; takes the lock.

    Raises: Refusal `not_found` naming those that are there.
    """
    with locked(path):
        present = read_engines(path)
        if name not in present.raw:
            known = ", ".join(present.raw) or "none"
            raise Refusal("not_found", f"{path} has no profile {name}; it has {known}")
        return _write(present, {other: block for other, block in present.raw.items() if other != name}, owner)


def _plain(profile: EngineProfile) -> dict[str, Any]:
    """The profile as a person would write it: fields at their defaults are left out."""
    written: dict[str, Any] = strict.unstructure(profile)
    blank: dict[str, Any] = strict.unstructure(
        EngineProfile(engine=profile.engine, executable=profile.executable, build_fingerprint=profile.build_fingerprint)
    )
    always = ("engine", "revision", "executable", "build_fingerprint", "args")
    kept = {name: value for name, value in written.items() if name in always or value != blank.get(name)}
    security = {name: value for name, value in written["security"].items() if value != blank["security"].get(name)}
    return {**kept, "security": security} if security else {k: v for k, v in kept.items() if k != "security"}


def _write(present: EnginesFile, raw: Mapping[str, Any], owner: tuple[int, int] | None) -> int:
    path, revision = present.path, present.revision + 1
    body = yaml.safe_dump(
        {"schema_version": 1, "kind": "engines", "runtime_profiles": dict(raw)}, sort_keys=False, allow_unicode=True
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
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            if keeper is not None and os.geteuid() == 0:
                os.fchown(stream.fileno(), *keeper)
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return revision
