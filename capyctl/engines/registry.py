"""The merged profiles that a role works with: its own engine, its document's, and the engines file's.

Source: engines 2.7-2.9; security F17.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import attrs

from capyctl.documents.blocks import EngineProfile, LocalEngine, Profiles, Security
from capyctl.documents.deployment import Deployment, parse_deployment
from capyctl.documents.scalars import AbsolutePath
from capyctl.documents.strict import nearest
from capyctl.engines.adapter import Adapter
from capyctl.engines.check import check_deployment
from capyctl.engines.custom.engines_file import CustomFile, read_custom
from capyctl.engines.engines_file import EnginesFile, check_registered, read_engines
from capyctl.engines.families import FAMILIES, Family, family, traits_of
from capyctl.engines.parsers import choices, detect, read_texts
from capyctl.engines.registered import Registered
from capyctl.engines.revisioned import CUSTOM, beside
from capyctl.errors import Refusal

LOCAL_ENGINE = "local_engine"
UNMEASURED = "unknown"


class Registry:
    """Profiles by name, in memory. `load` and `reload` read the file; everything else answers at once.

    Args:
      engines_file: None for a role without one.
      stated: the role document's own `runtime_profiles`, and that document's file name.
      local: the role's own engine.
      telemetry: whether the host lets engines report home (`engine_telemetry: allow`).
    """

    def __init__(
        self,
        engines_file: Path | None,
        *,
        stated: Profiles | None = None,
        stated_in: str = "",
        local: LocalEngine | None = None,
        models_root: Path | None = None,
        telemetry: bool = False,
    ) -> None:
        self.engines_file = engines_file
        self.models_root = models_root
        self.telemetry = telemetry
        self._own = _own(stated or {}, stated_in, local)
        self._merged: Mapping[str, Registered] = self._own
        self._retired: dict[str, Registered] = {}
        self.revision = 0
        self.custom_revision = 0
        self.warnings: tuple[str, ...] = ()

    def reload(self) -> None:
        """Read both engines files again. Blocking. One that cannot be used leaves the profiles as they are.

        Raises: Refusal `profile_exists` for a name that is stated twice, `publish_rejected` for a file older
          than the one in use; `invalid_config`, `unsafe_file` as reading says.
        """
        if self.engines_file is None:
            self._merged, self._retired = dict(self._own), {}
            return
        read = read_engines(self.engines_file)
        custom = read_custom(beside(self.engines_file, CUSTOM))
        for path, revision, known in (
            (read.path, read.revision, self.revision),
            (custom.path, custom.revision, self.custom_revision),
        ):
            if revision < known:
                raise Refusal(
                    "publish_rejected", f"{path} is at revision {revision}, older than the revision {known} in use"
                )
        self._take(read, custom)

    def measure_own(self, *, running: bool = True) -> None:
        """Measure the role's own engine, whose version its document need not state. Blocking.

        What only a program that starts slowly could tell is left to its launches, which look again.

        Args:
          running: False runs no program, and leaves alone what only that would tell; the program must be there.

        Raises: Refusal as registering it would.
        """
        for name, registered in self._own.items():
            if registered.source != LOCAL_ENGINE or registered.digest is not None:
                continue
            executable = _program(registered)
            known = FAMILIES[registered.engine]
            if known.glance is None and not running:
                _check_program(executable)
                continue
            measured = (known.glance or known.measure)(executable)
            stated = registered.profile.build_fingerprint
            fingerprint = measured.fingerprint if stated == UNMEASURED else stated
            profile = attrs.evolve(
                registered.profile, executable=AbsolutePath(str(executable)), build_fingerprint=fingerprint
            )
            self._own[name] = attrs.evolve(registered, profile=profile, digest=measured.digest)
        self._merged = {**self._merged, **self._own}

    def _take(self, read: EnginesFile, custom: CustomFile) -> None:
        merged = dict(self._own)
        for path, profiles in ((read.path, read.profiles), (custom.path, custom.profiles)):
            for name, registered in profiles.items():
                if name in merged:
                    raise Refusal(
                        "profile_exists", f"the profile {name} is stated in {path} and in {merged[name].source}"
                    )
                merged[name] = registered
        self._merged, self._retired = merged, {}
        self.revision, self.custom_revision, self.warnings = read.revision, custom.revision, read.warnings

    def retire(self, profile: str) -> None:
        """Withdraw a profile before it leaves its file: nothing new is placed on it. Retiring twice is once.

        The next `reload` goes by the files again. Raises: Refusal `not_found`.
        """
        if profile in self._retired:
            return
        if profile not in self._merged:
            raise Refusal("not_found", f"there is no engine profile {profile}")
        self._retired[profile] = self._merged[profile]
        self._merged = {name: row for name, row in self._merged.items() if name != profile}

    def reinstate(self, profile: str) -> None:
        """Offer a retired profile again: it could not be let go of."""
        if profile in self._retired:
            self._merged = {**self._merged, profile: self._retired.pop(profile)}

    def profiles(self) -> Sequence[Registered]:
        """Every usable profile, the role's own first."""
        return tuple(self._merged.values())

    def registered(self, word: str) -> Registered:
        """What a document asks for: the profile of that name, else the only profile of the family of that name.

        Raises: Refusal `profile_not_published` naming those that are there.
        """
        kin = [row for row in self._merged.values() if row.engine == word]
        return kin[0] if word not in self._merged and len(kin) == 1 else self.named(word)

    def named(self, profile: str) -> Registered:
        """The profile that a deployment was settled on. Its name is never a family word, even where it reads as one:
        a profile that is gone is not replaced by another of its family, which nobody would count as in use.

        Raises: Refusal `profile_not_published` naming those that are there.
        """
        found = self._merged.get(profile)
        if found is None:
            known = ", ".join(self._merged) or "none"
            engines = [row.engine for row in self._merged.values()]
            near = nearest(
                profile, {*self._merged, *(word for word in engines if engines.count(word) == 1)} - {profile}
            )
            way_out = f"Did you mean {near[0]}?" if near else "Try: capyctl engine add <path>"
            raise Refusal(
                "profile_not_published",
                f"there is no engine profile {profile}; registered: {known}. {way_out}",
            )
        return found

    def adapter(self, profile: str) -> Adapter:
        """The adapter of a profile. Raises: Refusal as `named`."""
        registered = self.named(profile)
        return self.family_of(profile).adapter(registered, self.models_root, self.telemetry)

    def built(self, state_dir: Path, profile: str) -> bool:
        """Whether a profile's engine has compiled its kernels below `state_dir`; true of those that compile none.

        Blocking. Raises: Refusal as `named`.
        """
        return self.family_of(profile).built(self.named(profile), state_dir)

    def family_of(self, profile: str) -> Family:
        """The family of a profile, with the traits of its installation. Raises: Refusal as `named`."""
        registered = self.named(profile)
        return attrs.evolve(family(registered.engine), traits=traits_of(registered))

    def check(self, document: Deployment | Mapping[str, Any]) -> Registered:
        """The profile that a deployment runs on, once the document passed every rule of it and of its family.

        Raises: Refusal as `registered` and as `check_deployment`.
        """
        wanted = document if isinstance(document, Deployment) else parse_deployment(document, "the deployment")
        registered = self.registered(wanted.profile)
        check_deployment(wanted, registered)
        return registered

    def parsers(self, document: Deployment, model_dir: Path) -> dict[str, str]:
        """The parsers that a launch of `document` from these files will have: `tool_call_parser`,
        `reasoning_parser`, and the source of each; nothing for families without any.

        Blocking. Raises: Refusal as `named`.
        """
        registered = self.named(document.profile)
        known = family(registered.engine)
        if known.name not in ("vllm", "sglang"):
            return {}
        engine = cast("Literal['vllm', 'sglang']", known.name)
        found = detect(engine, *read_texts(model_dir))
        return choices(engine, known.options, document, registered.profile.args, found).facts()

    def fixed_args(self, profile: str) -> Sequence[str]:
        """The profile's own arguments, which sizing must know of. Raises: Refusal as `named`."""
        return self.named(profile).profile.args

    def sizing_facts(self, profile: str) -> Mapping[str, Any]:
        """What else of a profile decides about memory: its variables, and a cache that a setting states for it.

        Raises: Refusal as `named`.
        """
        registered = self.named(profile)
        facts: dict[str, Any] = {"host_env": {str(name): str(value) for name, value in registered.profile.env.items()}}
        if family(registered.engine).scales_yarn(registered.version):
            facts["scales_yarn"] = True
        return facts if registered.kv_cache_bytes is None else {**facts, "default_kv_bytes": registered.kv_cache_bytes}


def _program(registered: Registered) -> Path:
    """The program that a setting names: its own path, or the one in the environment that it names.

    Raises: Refusal `engine_not_found` for a directory without that engine.
    """
    path = Path(registered.executable)
    if not path.is_dir():
        return path
    found = FAMILIES[registered.engine].find(path)
    if found is None:
        raise Refusal("engine_not_found", f"{path} holds no {FAMILIES[registered.engine].title}")
    return found.executable


def _check_program(path: Path) -> None:
    """Refuse what running it would refuse at once. Raises: Refusal `engine_version_failed`."""
    try:
        seen = os.stat(path)
    except OSError as wrong:
        raise Refusal("engine_version_failed", f"{path} cannot be run: {wrong.strerror}") from None
    if not stat.S_ISREG(seen.st_mode) or not os.access(path, os.X_OK):
        raise Refusal("engine_version_failed", f"{path} cannot be run: {os.strerror(errno.EACCES)}")


def _own(stated: Profiles, stated_in: str, local: LocalEngine | None) -> dict[str, Registered]:
    own: dict[str, Registered] = {}
    if local is not None:
        kinds = [word for word in local.installations if word in FAMILIES]
        for word in kinds:
            own_name = "local" if len(local.installations) == 1 else f"local-{word}"
            profile = EngineProfile(
                engine=cast("object", word),  # type: ignore[arg-type]
                executable=local.installations[word],  # type: ignore[arg-type]
                build_fingerprint=local.build_fingerprint or UNMEASURED,
                args=local.args if word in ("vllm", "tensorfold") else (),
                cuda_home=local.cuda_home,
                security=Security(
                    deep_park=None if FAMILIES[word].traits.parks and local.deep_park == "on" else "disabled",
                    trust_remote_code=local.trust_remote_code and FAMILIES[word].remote_code,
                    installation_drift=local.installation_drift,
                ),
            )
            cache = local.kv_cache.bytes if local.kv_cache is not None else None
            own[own_name] = Registered(name=own_name, profile=profile, source=LOCAL_ENGINE, kv_cache_bytes=cache)
    for profile_name, profile in stated.items():
        if profile.engine not in FAMILIES:
            continue  # accepted in a document, not run by this release: deployments on it are not published
        own[str(profile_name)] = Registered(
            name=str(profile_name), profile=profile, source=stated_in or "the role document"
        )
    for registered in own.values():
        check_registered(registered, args="host.local_engine.args" if registered.source == LOCAL_ENGINE else None)
    return own
