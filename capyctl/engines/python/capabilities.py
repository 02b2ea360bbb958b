"""What an installation's build can do, asked by a helper that runs under its own interpreter.

A helper prints one line, `capyctl_probe ` and a JSON object of capability to "" (there) or to what is missing.
Source: engines 2.5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from capyctl.engines.environment import SYSTEM_PATH
from capyctl.engines.installations import Measurement
from capyctl.engines.python.installation import Package, helper_argv
from capyctl.engines.run_once import printable, run_once
from capyctl.errors import Refusal

PROBE_LIMIT_S = 180.0
PROBE_BYTES_MAX = 256 << 10
MARK = "capyctl_probe "


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a probe found. `missing` says of each capability that is not there what it lacks."""

    present: frozenset[str]
    missing: Mapping[str, str]


def probe(
    prefix: Path,
    script: Path,
    *,
    words: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    limit_s: float = PROBE_LIMIT_S,
) -> Capabilities | None:
    """Run a probe helper; None when it could not answer, which refuses nothing by itself. Blocking.

    Args:
      env: variables of the family beside `PATH`.
    """
    try:
        said = run_once(
            helper_argv(prefix, script, words),
            env={"PATH": f"{prefix / 'bin'}:{SYSTEM_PATH}", "DO_NOT_TRACK": "1", **(env or {})},
            what="the capability probe",
            limit_s=limit_s,
            bytes_max=PROBE_BYTES_MAX,
        )
    except Refusal:
        return None
    return read_probe(said.text) if said.status == 0 else None


def measurement(package: Package, prefix: Path, version: str, found: Capabilities | None, lacks: str) -> Measurement:
    """What registering records of a build that parks where it can. `lacks`: words before what is missing. Blocking.

    Raises: Refusal `capability_missing:core` for a build that no launch could be checked on.
    """
    if found is not None and "core" in found.missing:
        raise Refusal("capability_missing:core", f"{lacks} {found.missing['core']}")
    return Measurement(
        version=version,
        fingerprint=version,
        digest=package.digest(prefix),
        deep_park="unknown" if found is None else "present" if "deep_park" in found.present else "missing",
        lacks="" if found is None else found.missing.get("deep_park", ""),
    )


def read_probe(text: str) -> Capabilities | None:
    """The answer in what a helper printed: the last marked line. None when there is none, or it is malformed."""
    lines = [line[len(MARK) :] for line in text.splitlines() if line.startswith(MARK)]
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    if not isinstance(found, dict) or not all(isinstance(lack, str) for lack in found.values()):
        return None
    return Capabilities(
        present=frozenset(name for name, lack in found.items() if not lack),
        missing={name: printable(lack) for name, lack in found.items() if lack},
    )
