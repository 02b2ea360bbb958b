"""`engines.yaml`: the registered profiles. The CLI writes it, a role only reads it.

Profiles of engines that this release does not know are kept as they are. How the file is read and replaced
is in `revisioned`.

Source: engines 2.7; config 5.5, 8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from capyctl.documents import strict
from capyctl.documents.blocks import RESERVED_PROFILES, EngineProfile
from capyctl.documents.scalars import parse_name
from capyctl.engines.environment import check_approved_env, check_env
from capyctl.engines.families import FAMILIES
from capyctl.engines.options import check_approved_options, check_fixed_args
from capyctl.engines.registered import Registered
from capyctl.engines.revisioned import DOCUMENT_BYTES_MAX as DOCUMENT_BYTES_MAX
from capyctl.engines.revisioned import ENGINES, check_free, locked, read_blocks, write_blocks
from capyctl.errors import Refusal

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_DIGEST_FIELD = "installation_digest"
_LACKS_FIELD = "installation_lacks"


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
    revision, raw = read_blocks(path, ENGINES)
    profiles: dict[str, Registered] = {}
    skipped: list[str] = []
    for name, block in raw.items():
        registered = _profile(path, name, block)
        if registered is None:
            skipped.append(name)
        else:
            profiles[name] = registered
    return EnginesFile(path=path, revision=revision, profiles=profiles, skipped=tuple(skipped), raw=raw)


def _profile(path: Path, name: str, block: Any) -> Registered | None:
    """One profile, or None when its engine is not one that this release runs."""
    if not isinstance(block, dict):
        raise Refusal("invalid_config", f"{path}: runtime_profiles.{name}: expected a block")
    word = block.get("engine")
    if isinstance(word, str) and (word not in FAMILIES or word == "custom"):  # those have a file of their own
        return None
    fields = dict(block)
    digest = fields.pop(_DIGEST_FIELD, None)
    if digest is not None and not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
        raise Refusal(
            "invalid_config", f"{path}: runtime_profiles.{name}.{_DIGEST_FIELD}: expected sha256: and 64 digits"
        )
    lacks = fields.pop(_LACKS_FIELD, None)
    if lacks is not None and not (isinstance(lacks, str) and lacks.isprintable() and len(lacks) <= 1024):
        raise Refusal("invalid_config", f"{path}: runtime_profiles.{name}.{_LACKS_FIELD}: expected one line of text")
    where = f"{path}: runtime_profiles.{name}"
    profile = strict.structure(fields, EngineProfile, where)
    registered = Registered(name=name, profile=profile, digest=digest, lacks=lacks)
    check_registered(registered)
    return registered


def check_registered(registered: Registered, *, args: str | None = None, env: str | None = None) -> None:
    """The rules that the profile's family adds to its document: options, variables, approvals.

    Args:
      args, env: how messages call these fields, where no document states them.
    Raises: Refusal `invalid_config`, `engine_env_reserved:<name>`, `capability_missing:deep_park`.
    """
    known, profile = FAMILIES[registered.engine], registered.profile
    where = f"runtime_profiles.{registered.name}"
    check_fixed_args(known.options, profile.args, args or f"{where}.args")
    check_env(profile.env, known.reserved_env, where=env or f"{where}.env")
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


def put_profile(path: Path, registered: Registered, *, owner: tuple[int, int] | None = None) -> int:
    """Add a profile under a new name and return the file's new revision. Blocking; takes the lock.

    Args:
      owner: uid and gid for a file that root creates on behalf of a role.
    Raises: Refusal `profile_exists` for a name already there; `publish_rejected` when the file would grow
      beyond 32 KiB; nothing is written then.
    """
    with locked(path):
        present = read_engines(path)
        check_free(path, ENGINES, present.raw, registered.name)
        check_registered(registered)
        beside = {_DIGEST_FIELD: registered.digest, _LACKS_FIELD: registered.lacks}
        block = {**_plain(registered.profile), **{field: value for field, value in beside.items() if value}}
        return write_blocks(path, ENGINES, present.revision + 1, {**present.raw, registered.name: block}, owner)


def remove_profile(path: Path, name: str, *, owner: tuple[int, int] | None = None) -> int:
    """Remove a profile and return the file's new revision. Blocking; takes the lock.

    Raises: Refusal `not_found` naming those that are there.
    """
    with locked(path):
        present = read_engines(path)
        if name not in present.raw:
            known = ", ".join(present.raw) or "none"
            raise Refusal("not_found", f"{path} has no profile {name}; it has {known}")
        kept = {other: block for other, block in present.raw.items() if other != name}
        return write_blocks(path, ENGINES, present.revision + 1, kept, owner)


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
