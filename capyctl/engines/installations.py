"""What detection and registration learn of an installation, whatever its family."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import attrs


@attrs.frozen(kw_only=True)
class Found:
    """An installation seen on disk. `version` is `unknown` when only running it would tell."""

    executable: Path
    version: str
    place: Path  # the environment, or the binary's directory


@attrs.frozen(kw_only=True)
class Measurement:
    """An installation as registration found it, by running it once. `fingerprint` is the checked version text.

    `deep_park` is what the capability probe said: `unknown` when it could not run, which refuses nothing;
    `lacks` is what is missing then.
    """

    version: str
    fingerprint: str
    digest: str | None
    deep_park: Literal["not_supported", "present", "missing", "unknown"] = "not_supported"
    lacks: str = ""
