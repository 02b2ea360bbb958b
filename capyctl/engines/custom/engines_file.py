"""`custom-engines.yaml`: confirmed custom engines, each with its manifest and its pin.

It lies beside `engines.yaml`, and names are unique over both.
Source: config 9; engines 10.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from capyctl.documents import strict
from capyctl.documents.blocks import EngineProfile, Security
from capyctl.documents.custom_engine import Manifest
from capyctl.documents.scalars import AbsolutePath, Argument, EnvPattern
from capyctl.documents.strict import Wrong, no_more_than, within
from capyctl.engines.custom.options import RESERVED_ENV
from capyctl.engines.environment import check_approved_env, check_env
from capyctl.engines.registered import Registered
from capyctl.engines.revisioned import CUSTOM, check_free, locked, read_blocks, write_blocks
from capyctl.errors import Refusal

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@attrs.frozen(kw_only=True)
class CustomEngine:
    """One block of the file. `args` and `approved_env` are what `engine add` was told beside the manifest."""

    revision: int = attrs.field(default=1, validator=within(1, 2**31 - 1))
    program: AbsolutePath
    digest: str
    manifest: Manifest
    args: tuple[Argument, ...] = attrs.field(default=(), validator=no_more_than(256))
    approved_env: tuple[EnvPattern, ...] = attrs.field(default=(), validator=no_more_than(256))

    def __attrs_post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.digest):
            raise Wrong(("digest",), "expected sha256: and 64 digits")

    def registered(self, name: str) -> Registered:
        """The profile that lists and launches know it by.

        Raises: Refusal `invalid_config`, `engine_env_reserved:<name>`.
        """
        check_env(self.manifest.env, RESERVED_ENV, where=f"{name}: the manifest's env")
        check_approved_env(self.approved_env, RESERVED_ENV)
        profile = EngineProfile(
            engine="custom",  # type: ignore[arg-type]  # a word that no document may say for itself
            revision=self.revision,
            executable=self.program,
            build_fingerprint=self.manifest.version,
            args=self.args,
            env=self.manifest.env,
            security=Security(deep_park="disabled", installation_drift="refuse", approved_env=self.approved_env),
        )
        return Registered(name=name, profile=profile, digest=self.digest, source=CUSTOM.file, manifest=self.manifest)


@attrs.frozen(kw_only=True)
class CustomFile:
    """What the file says; `raw` keeps every block as it was written."""

    path: Path
    revision: int
    profiles: Mapping[str, Registered]
    raw: Mapping[str, Any]


def read_custom(path: Path) -> CustomFile:
    """Read the file; one that is not there is empty, at revision 0.

    Raises: Refusal `invalid_config` naming the field at fault; `unsafe_file` when others could have written it.
    """
    revision, raw = read_blocks(path, CUSTOM)
    profiles = {
        name: strict.structure(block, CustomEngine, f"{path}: engines.{name}").registered(name)
        for name, block in raw.items()
    }
    return CustomFile(path=path, revision=revision, profiles=profiles, raw=raw)


def put_custom(path: Path, name: str, engine: CustomEngine, *, owner: tuple[int, int] | None = None) -> int:
    """Add an engine under a new name and return the file's new revision. Blocking; takes the lock.

    Args:
      owner: uid and gid for a file that root creates on behalf of a role.
    Raises: Refusal `profile_exists`, `publish_rejected`; nothing is written then.
    """
    with locked(path):
        present = read_custom(path)
        check_free(path, CUSTOM, present.raw, name)
        engine.registered(name)
        blocks = {**present.raw, name: _plain(engine)}
        return write_blocks(path, CUSTOM, present.revision + 1, blocks, owner)


def remove_custom(path: Path, name: str, *, owner: tuple[int, int] | None = None) -> int:
    """Remove an engine and return the file's new revision. Blocking; takes the lock. Raises: Refusal `not_found`."""
    with locked(path):
        present = read_custom(path)
        if name not in present.raw:
            raise Refusal("not_found", f"{path} has no profile {name}; it has {', '.join(present.raw) or 'none'}")
        kept = {other: block for other, block in present.raw.items() if other != name}
        return write_blocks(path, CUSTOM, present.revision + 1, kept, owner)


def _plain(engine: CustomEngine) -> dict[str, Any]:
    """The block as a person would write it: what is empty is left out."""
    written: dict[str, Any] = strict.unstructure(engine)
    manifest = {name: value for name, value in written.pop("manifest").items() if value not in ({}, [])}
    kept = {name: value for name, value in written.items() if value != []}
    return {**kept, "manifest": manifest}
