"""An installation of vLLM: how it is found, measured, and what its build can do.

Source: engines 2.2-2.5.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from capyctl.engines.installations import Measurement
from capyctl.engines.options import OptionClass, OptionRule
from capyctl.engines.python.capabilities import Capabilities, measurement, probe
from capyctl.engines.python.helpers import write_helpers
from capyctl.engines.python.installation import (
    HYGIENE,
    Package,
    interpreter,
    parse_version,
    prefix_of,
    read_version,
    release,
)
from capyctl.engines.vllm.options import IF_PRESENT, POLICY, UNCONDITIONAL

PACKAGE = Package(distribution="vllm", package="vllm", commands=("vllm",))
_HERE = Path(__file__).with_name("helpers")
ENTRY = "capyctl_vllm.py"
SOURCES = (_HERE / ENTRY, _HERE / "capyctl_vllm_guard.py")
_YARN_AS_STATED_SINCE = (0, 32)
_RESERVED_FILE = "capyctl_vllm_reserved.json"


def scales_yarn(version: str) -> bool:
    """Whether this build multiplies a yarn model's original length by its factor, for the longest context it takes."""
    return release(version) < _YARN_AS_STATED_SINCE


def install_helpers(state_dir: Path) -> Path:
    """Make the helper directory hold the entry, the guard and the names that they compare. Blocking.

    Raises: Refusal `unsafe_file`.
    """
    content = json.dumps(owned_destinations(), indent=1).encode()
    return write_helpers(state_dir, SOURCES, {_RESERVED_FILE: content})


def owned_destinations() -> dict[str, list[str]]:
    """The parser's destinations that CapyCTL owns: those of every build, and those that some builds lack."""
    typed = [rule for rule in POLICY.rules if rule.kind is OptionClass.TYPED and not rule.fixed]
    if_present = [name for rule in (*IF_PRESENT, *typed) for name in _destinations(rule)]
    always = [name for rule in UNCONDITIONAL for name in _destinations(rule)]
    return {"always": always, "if_present": ["model_tag", *if_present]}


def _destinations(rule: OptionRule) -> Iterator[str]:
    """argparse's: the first long name. An alias has the same destination."""
    yield next(name for name in rule.names if name.startswith("--"))[2:].replace("-", "_")


def measure(executable: Path) -> Measurement:
    """Run the program once for its version, digest its package, and ask what its build can do. Blocking.

    Raises: Refusal `engine_version_failed`, `capability_missing:core` for a build that no launch could be checked on.
    """
    prefix = prefix_of(executable)
    what = f"{executable} --version"
    if executable.name in PACKAGE.commands:
        argv = [str(executable), "--version"]
    else:
        argv = [str(interpreter(prefix) or executable), *HYGIENE[:1], "-m", "vllm.entrypoints.cli.main", "--version"]
    version = parse_version(read_version(argv, what=what, prefix=prefix), what)
    return measurement(PACKAGE, prefix, version, ask(prefix), f"vLLM {version} in {prefix} lacks")


def ask(prefix: Path) -> Capabilities | None:
    """What the build can do; None when that cannot be found out. Blocking."""
    with tempfile.TemporaryDirectory(prefix="capyctl-probe-") as place:
        runtime = install_helpers(Path(place))
        return probe(prefix, runtime / ENTRY, words=("probe",), env={"VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"})
