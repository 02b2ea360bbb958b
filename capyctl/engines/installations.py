"""What detection and registration learn of an installation, whatever its family."""

from __future__ import annotations

from pathlib import Path

import attrs


@attrs.frozen(kw_only=True)
class Found:
    """An installation seen on disk. `version` is `unknown` when only running it would tell."""

    executable: Path
    version: str
    place: Path  # the environment, or the binary's directory


@attrs.frozen(kw_only=True)
class Measurement:
    """An installation as registration found it, by running it once. `fingerprint` is the checked version text."""

    version: str
    fingerprint: str
    digest: str | None
