"""One registered installation: a profile document, where it is stated, and the digest it was registered with."""

from __future__ import annotations

import attrs

from capyctl.documents.blocks import EngineProfile
from capyctl.documents.custom_engine import Manifest
from capyctl.engines.options import Consent
from capyctl.engines.verified import is_custom

ENGINES_FILE = "engines.yaml"


@attrs.frozen(kw_only=True)
class Registered:
    """A profile under its name. It has the fields by which lists and the host show an installation."""

    name: str
    profile: EngineProfile
    digest: str | None = None  # sha256: of the installation's files; None when they could not be measured
    source: str = ENGINES_FILE
    manifest: Manifest | None = None  # of a custom engine, which has one
    kv_cache_bytes: int | None = None  # of its deployments that state nothing of memory, where a setting says so
    lacks: str | None = None  # what its build would need to park, where registration found that missing

    @property
    def engine(self) -> str:
        return self.profile.engine

    @property
    def version(self) -> str:
        """The checked version. A llama.cpp fingerprint is `<version>+<commit>`; elsewhere it is the version."""
        if self.profile.engine == "llamacpp":
            return self.profile.build_fingerprint.partition("+")[0]
        return self.profile.build_fingerprint

    @property
    def custom(self) -> bool:
        """Whether this version is outside the verified set; no llama.cpp build is in it."""
        return is_custom(self.engine, self.version)

    @property
    def deep_park(self) -> str:
        return "enabled" if self.profile.parks else "disabled"

    @property
    def executable(self) -> str:
        return self.profile.executable

    @property
    def fingerprint(self) -> str:
        return self.profile.build_fingerprint

    @property
    def revision(self) -> int:
        return self.profile.revision

    @property
    def consent(self) -> Consent:
        security = self.profile.security
        return Consent(
            extra_args=security.extra_args == "allowed",
            options=frozenset(option.replace("_", "-") for option in security.approved_options),
            paths=tuple(security.approved_paths),
        )
