"""`capyctl engine add`, `list` and `remove`, as far as the file goes. Publishing to a running role is the CLI's.

Nothing is written on any refusal.
Source: engines 2.3, 2.9; cli 12.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from capyctl.documents import owned, reader, strict
from capyctl.documents.blocks import EngineProfile
from capyctl.documents.custom_engine import Manifest, parse_manifest
from capyctl.engines.custom.engines_file import CustomEngine, put_custom, remove_custom
from capyctl.engines.custom.installation import check_program, pin
from capyctl.engines.engines_file import check_name, check_registered, put_profile, read_engines, remove_profile
from capyctl.engines.families import FAMILIES, Family
from capyctl.engines.installations import Found
from capyctl.engines.options import check_fixed_args
from capyctl.engines.python.installation import cuda_home
from capyctl.engines.registered import Registered
from capyctl.engines.revisioned import CUSTOM, beside, read_blocks
from capyctl.errors import Refusal


@attrs.frozen(kw_only=True)
class Added:
    """What `engine add` prints. `revision` is the engines file's."""

    registered: Registered
    engines_file: Path
    revision: int
    deep_park_probe: str = "not_supported"
    lacks: str = ""  # what the installation lacks for a deep park

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
            "deep_park_probe": self.deep_park_probe,
            "fingerprint": {"version": row.fingerprint, "digest": row.digest or "unmeasured"},
            "engines_file": str(self.engines_file),
            "revision": self.revision,
            **({} if row.manifest is None else _said(row.manifest)),
        }


def _said(manifest: Manifest) -> dict[str, Any]:
    """What a custom engine's manifest says, for its result."""
    plain = strict.unstructure(manifest)
    return {"api": manifest.api, "health": manifest.health, "idle": plain.get("idle")}


def locate(path: Path) -> tuple[Family, Found]:
    """The family and the installation that `path` names.

    Raises: Refusal `engine_not_found` when nothing is there, `engine_unsupported` when it is no engine that
      this release runs.
    """
    if not os.path.lexists(path):
        raise Refusal("engine_not_found", f"{path} is not there")
    seen = [(family, found) for family in FAMILIES.values() if (found := family.find(path)) is not None]
    named = [(family, found) for family, found in seen if found.executable == path] or seen
    if len(named) == 1:
        return named[0]
    if named:
        programs = ", ".join(f"{family.title}: {found.executable}" for family, found in named)
        raise Refusal("engine_unsupported", f"{path} holds several engines. Name the program of one: {programs}")
    packages = ", ".join(name for family in FAMILIES.values() for name in family.distributions)
    wanted = f"a llama-server binary, its directory, or a Python environment that holds one of {packages}"
    if path.is_dir():
        raise Refusal("engine_not_found", f"{path} holds no engine; expected {wanted}")
    raise Refusal("engine_unsupported", f"{path} is no engine that this release runs; expected {wanted}")


LACKS_MAX = 512  # characters of what a build lacks, as the engines file keeps them


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
    environ: Mapping[str, str] | None = None,
    taken: Collection[str] = (),
    owner: tuple[int, int] | None = None,
) -> Added:
    """Register an installation: find it, run it once for its version, digest its files, write the profile. Blocking.

    Args:
      path: absolute; taken as written, links of an environment are not resolved.
      environ: where `CUDA_HOME` is looked for.
      taken: names of profiles that a role document states.
      owner: uid and gid of the role's state directory, for a file that root creates.
    Raises: Refusal with the codes of engines 2.10.
    """
    family, found = locate(path)
    profile_name = name if name is not None else family.name
    check_untaken(profile_name, engines_file, taken)
    if deep_park == "enabled" and not family.traits.parks:
        raise Refusal("capability_missing:deep_park", f"{family.title} cannot park; leave --deep-park out")
    if allow_remote_code and not family.remote_code:
        raise Refusal("invalid_config", f"--allow-remote-code: {family.title} runs no code of a model")
    toolkit = cuda_home(environ or {}) if family.toolkit else None
    block = {
        **({"cuda_home": toolkit} if toolkit is not None else {}),
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
            "trust_remote_code": allow_remote_code,
            **({} if family.traits.parks and deep_park is None else {"deep_park": deep_park or "disabled"}),
        },
    }
    draft = Registered(name=profile_name, profile=strict.structure(block, EngineProfile, "engine add"))
    # Before the program is run: a bad option must not cost a minute.
    check_registered(draft, args="--arg", env="--env")
    measured = family.measure(found.executable)
    family.toolchain(found.executable, toolkit)
    profile = attrs.evolve(draft.profile, build_fingerprint=measured.fingerprint)
    if measured.deep_park == "missing" and deep_park == "enabled":
        raise Refusal(
            "capability_missing:deep_park",
            f"{family.title} {measured.version} cannot park here: it lacks {measured.lacks}. Leave --deep-park out",
        )
    if measured.deep_park == "missing":
        profile = attrs.evolve(profile, security=attrs.evolve(profile.security, deep_park="disabled"))
    lacks = "".join(sign for sign in " ".join(measured.lacks.split()) if sign.isprintable())[:LACKS_MAX]
    missing = lacks if measured.deep_park == "missing" else None
    registered = attrs.evolve(draft, profile=profile, digest=measured.digest, lacks=missing)
    return Added(
        registered=registered,
        engines_file=engines_file,
        revision=put_profile(engines_file, registered, owner=owner),
        deep_park_probe=measured.deep_park,
        lacks=measured.lacks,
    )


def check_untaken(name: str, engines_file: Path, taken: Collection[str]) -> None:
    """Refuse a profile name that is malformed or somebody's already, before anything is looked at.

    Raises: Refusal `profile_exists`, `invalid_config`.
    """
    check_name(name)
    custom = beside(engines_file, CUSTOM)
    if name in taken or name in read_engines(engines_file).raw or name in read_blocks(custom, CUSTOM)[1]:
        raise Refusal(
            "profile_exists",
            f"there is a profile {name} already; choose another with --name, or run capyctl engine remove {name}",
        )


def add_custom(
    program: Path,  # as it is written: the pin covers its path
    manifest_file: Path,
    *,
    name: str,
    engines_file: Path,
    confirm: Callable[[Manifest, str], None],
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    approve_env: Sequence[str] = (),
    taken: Collection[str] = (),
    owner: tuple[int, int] | None = None,
) -> Added:
    """Register a custom engine: read its manifest, have it confirmed, pin it, write it. Blocking; runs nothing.

    Args:
      engines_file: `engines.yaml`; custom engines lie beside it.
      env: joins the manifest's, name by name, before it is confirmed.
      confirm: called with the manifest and the pin before anything is written; raises what stops it.
    Raises: Refusal with the codes of engines 2.10.
    """
    check_untaken(name, engines_file, taken)
    check_program(program)
    manifest = parse_manifest(_manifest_data(manifest_file), str(manifest_file))
    plain = strict.unstructure(manifest)
    manifest = strict.structure({**plain, "env": {**plain["env"], **(env or {})}}, Manifest, "engine add")
    digest = pin(program, manifest)
    block = {
        "program": str(program),
        "digest": digest,
        "manifest": strict.unstructure(manifest),
        "args": list(args),
        "approved_env": list(approve_env),
    }
    engine = strict.structure(block, CustomEngine, "engine add")
    registered = engine.registered(name)
    check_fixed_args(FAMILIES["custom"].options, args, "--arg")
    confirm(manifest, digest)
    path = beside(engines_file, CUSTOM)
    return Added(registered=registered, engines_file=path, revision=put_custom(path, name, engine, owner=owner))


def _manifest_data(path: Path) -> object:
    return reader.read(owned.read_regular(str(path), reader.BYTES_MAX, f"--manifest {path}"), str(path))


def holder_of(name: str, engines_file: Path) -> Path:
    """Which of the two files holds a profile. Raises: Refusal `not_found` naming those that are there."""
    custom = beside(engines_file, CUSTOM)
    regular, others = read_engines(engines_file).raw, read_blocks(custom, CUSTOM)[1]
    if name in regular:
        return engines_file
    if name in others:
        return custom
    known = ", ".join((*regular, *others)) or "none"
    raise Refusal("not_found", f"there is no engine profile {name} beside {engines_file}; registered: {known}")


def remove_engine(name: str, *, engines_file: Path, stated: Mapping[str, str] | None = None) -> int:
    """Remove a profile from the file that holds it and return that file's new revision. Blocking.

    Args:
      stated: profiles that a role states itself, to where: they are edited there.
    Raises: Refusal `invalid_config` for one of those, `not_found` otherwise.
    """
    where = (stated or {}).get(name)
    if where is not None:
        raise Refusal("invalid_config", f"{name} is stated in {where}; remove it there and restart the role")
    holder = holder_of(name, engines_file)
    return remove_profile(holder, name) if holder == engines_file else remove_custom(holder, name)
