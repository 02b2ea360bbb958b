"""An installation of TensorFold: its environment, its version, and the tools that build its kernels.

Source: engines 2.2-2.4, 2.6.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from capyctl.engines.environment import SYSTEM_PATH
from capyctl.engines.installations import Measurement
from capyctl.engines.python.installation import (
    Package,
    parse_version,
    prefix_of,
    read_version,
    release,
    site_packages,
)
from capyctl.errors import Refusal

PROGRAM = "tensorfold"
PACKAGE = Package(distribution="tensorfold", package="tensorfold", commands=(PROGRAM,))
OWN_NVCC_SINCE = (0, 6, 1)
"""The first release that finds the compiler of an `nvidia` package inside its environment."""

_CUDA_PACKAGE = re.compile(r"cu\d{1,3}")


def measure(executable: Path) -> Measurement:
    """Run `tensorfold --version` once and digest the package. Blocking.

    Raises: Refusal `engine_unsupported` for an environment without the program, `engine_version_failed`.
    """
    prefix = prefix_of(executable)
    if executable.name != PROGRAM:
        raise Refusal("engine_unsupported", f"{prefix} has the tensorfold package and no program bin/{PROGRAM}")
    what = f"{executable} --version"
    said = read_version([str(executable), "--version"], what=what, prefix=prefix)
    version = parse_version(said, what, named=PROGRAM)
    return Measurement(version=version, fingerprint=version, digest=PACKAGE.digest(prefix))


def own_cuda_dirs(prefix: Path) -> tuple[str, ...]:
    """`<site-packages>/nvidia/cu<major>/bin` where it holds a compiler that this release finds, newest first."""
    version = PACKAGE.version(prefix)
    if version is None or release(version) < OWN_NVCC_SINCE:
        return ()
    found = []
    for packages in site_packages(prefix):
        try:
            names = [name for name in os.listdir(packages / "nvidia") if _CUDA_PACKAGE.fullmatch(name)]
        except OSError:
            continue
        for name in sorted(names, key=lambda name: int(name[2:]), reverse=True):
            place = packages / "nvidia" / name / "bin"
            if os.access(place / "nvcc", os.X_OK):
                found.append(str(place))
    return tuple(found[:1])


def search_path(prefix: Path, cuda_home: str | None) -> tuple[str, ...]:
    """Where a launch finds programs; the caller's `PATH` is none of it."""
    toolkit = (f"{cuda_home}/bin",) if cuda_home is not None else ()
    return (str(prefix / "bin"), *own_cuda_dirs(prefix), *toolkit, *SYSTEM_PATH.split(":"))


def check_toolchain(executable: Path, cuda_home: str | None) -> None:
    """Whether a launch could build its kernels: `ninja`, `nvcc`, and `c++` or `g++`. Nothing is run.

    Raises: Refusal `toolchain_missing` naming what is missing and where it was looked for.
    """
    places = search_path(prefix_of(executable), cuda_home)

    def there(*names: str) -> bool:
        return any(os.access(f"{place}/{name}", os.X_OK) for place in places for name in names)

    needed = (("ninja", ("ninja",)), ("nvcc", ("nvcc",)), ("c++ or g++", ("c++", "g++")))
    missing = [shown for shown, names in needed if not there(*names)]
    if missing:
        raise Refusal(
            "toolchain_missing",
            f"TensorFold builds kernels and cannot find {', '.join(missing)} in {':'.join(places)}. "
            "Install it there, or set CUDA_HOME for a CUDA toolkit",
        )
