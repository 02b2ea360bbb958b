"""An installation of SGLang: how it is found, measured, and what its build can do.

Source: engines 2.2-2.5.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from capyctl.engines.installations import Measurement
from capyctl.engines.options import OptionClass
from capyctl.engines.python.capabilities import Capabilities, measurement, probe
from capyctl.engines.python.helpers import write_helpers
from capyctl.engines.python.installation import (
    Package,
    helper_argv,
    parse_version,
    prefix_of,
    read_version,
    release,
)
from capyctl.engines.sglang.options import IF_PRESENT, POLICY, UNCONDITIONAL

PACKAGE = Package(distribution="sglang", package="sglang", commands=())
NO_PLUGINS = "capyctl-loads-no-plugins"
"""A list of plugins that names none of them; an empty one would load them all."""
ENTRY = "capyctl_sglang.py"
SOURCES = (Path(__file__).with_name("helpers") / ENTRY,)
ABORTS_SINCE = DECIDES_SINCE = (0, 5, 22)
_RESERVED_FILE = "capyctl_sglang_reserved.json"


def install_helpers(state_dir: Path) -> Path:
    """Make the helper directory hold the entry and the names that it compares. Blocking.

    Raises: Refusal `unsafe_file`.
    """
    content = json.dumps(owned_options(), indent=1).encode()
    return write_helpers(state_dir, SOURCES, {_RESERVED_FILE: content})


def owned_options() -> dict[str, list[str]]:
    """The options that CapyCTL owns, by one spelling each: those of every build, and those that some builds lack."""
    typed = [rule.names[0] for rule in POLICY.rules if rule.kind is OptionClass.TYPED]
    if_present = [rule.names[0] for rule in IF_PRESENT if rule.names[0] not in ("--help", "--version")]
    return {"always": [rule.names[0] for rule in UNCONDITIONAL], "if_present": [*if_present, *typed]}


def measure(executable: Path) -> Measurement:
    """Ask its interpreter once for the version, digest the package, and ask what the build can do. Blocking.

    Raises: Refusal `engine_version_failed`, `capability_missing:core` for a build that no launch could be checked on.
    """
    prefix = prefix_of(executable)
    what = f"the version of SGLang in {prefix}"
    with tempfile.TemporaryDirectory(prefix="capyctl-version-") as place:
        argv = helper_argv(prefix, install_helpers(Path(place)) / ENTRY, ("version",))
        version = parse_version(read_version(argv, what=what, prefix=prefix), what)
    return measurement(PACKAGE, prefix, version, ask(prefix), f"SGLang {version} in {prefix}:")


def ask(prefix: Path) -> Capabilities | None:
    """What the build can do; None when that cannot be found out. Blocking."""
    with tempfile.TemporaryDirectory(prefix="capyctl-probe-") as place:
        runtime = install_helpers(Path(place))
        env = {"SGLANG_PLUGINS": NO_PLUGINS, "HF_HUB_OFFLINE": "1"}
        return probe(prefix, runtime / ENTRY, words=("probe",), env=env)


def aborts(version: str) -> bool:
    """Whether this build ends a request by the id that it was sent with."""
    return release(version) >= ABORTS_SINCE


def decides(version: str) -> bool:
    """Whether this build answers decisions."""
    return release(version) >= DECIDES_SINCE
