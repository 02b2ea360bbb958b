"""`capyctl engine add`, `list` and `remove`, as far as the file goes. Publishing to a running role is the CLI's.

Nothing is written on any refusal.
Source: engines 2.3, 2.9; cli 12.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from capyctl.documents import strict
from capyctl.documents.blocks import EngineProfile
from capyctl.engines.engines_file import check_name, check_registered, put_profile, read_engines, remove_profile
from capyctl.engines.families import FAMILIES, Family
from capyctl.engines.installations import Found
from capyctl.engines.registered import Registered
from capyctl.errors import Refusal


@attrs.frozen(kw_only=True)
class Added:
    """What `engine add` prints. `revision` is the engines file's."""

    registered: Registered
    engines_file: Path
    revision: int

    def as_json(self) -> dict[str, Any]:
        """The result's keys, without `published`, which only the CLI knows."""
        row = self.registered
        return {
            "profile": row.name,
            "engine": row.engine,
            "version": row.version,
            "custom": row.custom,
            "executable": row.executable,
            "cuda_home": row.profile.cuda_home,
            "deep_park": row.deep_park,
            "deep_park_probe": "not_supported",
            "fingerprint": {"version": row.fingerprint, "digest": row.digest or "unmeasured"},
            "engines_file": str(self.engines_file),
            "revision": self.revision,
        }


def locate(path: Path) -> tuple[Family, Found]:
    """The family and the installation that `path` names.

    Raises: Refusal `engine_not_found` when nothing is there, `engine_unsupported` when it is no engine that
      this release runs.
    """
    if not os.path.lexists(path):
        raise Refusal("engine_not_found", f"{path} is not there")
    for family in FAMILIES.values():
        found = family.find(path)
        if found is not None:
            return family, found
    wanted = "a llama-server binary, its directory, or a Python environment that holds the xllamacpp package"
    if path.is_dir():
        raise Refusal("engine_not_found", f"{path} holds no engine; expected {wanted}")
    raise Refusal("engine_unsupported", f"{path} is no engine that this release runs; expected {wanted}")


def add_engine(
    path: Path,
    *,
    engines_file: Path,
    name: str | None = None,
    args: Sequence[str] = (),
    deep_park: Literal["enabled", "disabled"] | None = None,
    drift: Literal["warn", "refuse"] = "warn",
    env: Mapping[str, str] | None = None,
    approve_env: Sequence[str] = (),
    approve_options: Sequence[str] = (),
    approve_paths: Sequence[str] = (),
    allow_remote_code: bool = False,
    taken: Collection[str] = (),
    owner: tuple[int, int] | None = None,
) -> Added:
    """Register an installation: find it, run it once for its version, digest its files, write the profile. Blocking.

    Args:
      path: absolute; taken as written, links of an environment are not resolved.
      taken: names of profiles that a role document states.
      owner: uid and gid of the role's state directory, for a file that root creates.
    Raises: Refusal with the codes of engines 2.10.
    """
    family, found = locate(path)
    profile_name = name if name is not None else family.name
    check_name(profile_name)
    if profile_name in taken or profile_name in read_engines(engines_file).raw:
        raise Refusal("profile_exists", f"there is a profile {profile_name} already; choose another with --name")
    if deep_park == "enabled" and not family.traits.parks:
        raise Refusal("capability_missing:deep_park", f"{family.title} cannot park; leave --deep-park out")
    if allow_remote_code:
        raise Refusal("invalid_config", f"--allow-remote-code: {family.title} runs no code of a model")
    block = {
        "engine": family.name,
        "executable": str(found.executable),
        "build_fingerprint": "unknown",
        "args": list(args),
        "env": dict(env or {}),
        "security": {
            "approved_options": list(approve_options),
            "approved_paths": [os.path.normpath(place) for place in approve_paths],
            "approved_env": list(approve_env),
            "installation_drift": drift,
            "deep_park": "disabled",
        },
    }
    draft = Registered(name=profile_name, profile=strict.structure(block, EngineProfile, "engine add"))
    check_registered(draft)  # before the program is run: a bad option must not cost a minute
    measured = family.measure(found.executable)
    registered = attrs.evolve(
        draft,
        profile=attrs.evolve(draft.profile, build_fingerprint=measured.fingerprint),
        digest=measured.digest,
    )
    return Added(
        registered=registered, engines_file=engines_file, revision=put_profile(engines_file, registered, owner=owner)
    )


def remove_engine(name: str, *, engines_file: Path, stated: Mapping[str, str] | None = None) -> int:
    """Remove a profile from the file and return the file's new revision. Blocking.

    Args:
      stated: profiles that a role states itself, to where: they are edited there.
    Raises: Refusal `invalid_config` for one of those, `not_found` otherwise.
    """
    where = (stated or {}).get(name)
    if where is not None:
        raise Refusal("invalid_config", f"{name} is stated in {where}; remove it there and restart the role")
    return remove_profile(engines_file, name)
