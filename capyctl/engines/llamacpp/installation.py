"""Where an installation of llama.cpp is, which version it is, and what its files are.

Two kinds: a `llama-server` binary, and a Python environment that holds the `xllamacpp` wheel, whose
interpreter runs our launcher. Finding one executes nothing; registering one runs it once, with an empty
environment, in a process group of its own, for at most 60 s and 4 KiB.

Source: engines 2.2-2.4; security 16.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from pathlib import Path

import attrs

from capyctl.engines.environment import SYSTEM_PATH
from capyctl.engines.installations import Found
from capyctl.engines.llamacpp.render import BINARY, program
from capyctl.engines.python.installation import Package, interpreter
from capyctl.engines.run_once import run_once
from capyctl.errors import Refusal

CONFIG_FILE = Path("/etc/llama.cpp/config.ini")
PACKAGE = Package(distribution="xllamacpp", package="xllamacpp", commands=())
VERSION_LIMIT_S = 60.0
OUTPUT_BYTES_MAX = 4096
_VERSION = re.compile(
    r"^version: (?P<version>[!-~]{1,64}) \(build (?P<build>[0-9]{1,9}), commit (?P<commit>[0-9A-Za-z]{1,40})\)$", re.M
)
_LIBRARY = re.compile(r"^libllama\.so\.(?P<version>\d+\.\d+\.\d+)$")


@attrs.frozen(kw_only=True)
class Version:
    """What the program said of itself."""

    version: str
    build: int
    commit: str

    @property
    def fingerprint(self) -> str:
        """`<version>+<commit>`; the build number says nothing that the commit does not."""
        return f"{self.version}+{self.commit}"


def find(path: Path) -> Found | None:
    """The installation that `path` names: a binary, its directory, an environment, its `bin` or its interpreter.

    Paths are taken as they are written: an environment's `python` is a link, and stays one.
    Raises: Refusal `engine_unsupported` for a binary that is a symbolic link, naming its target.
    """
    if path.name == BINARY and not path.is_dir():
        return _binary(path)
    if path.is_dir():
        for binary in (path / BINARY, path / "bin" / BINARY):
            if os.path.lexists(binary) and not binary.is_dir():
                return _binary(binary)
        is_bin = path.name == "bin" and interpreter(path.parent) is not None
        return _environment(path.parent if is_bin else path)
    if path.name.startswith("python") and path.parent.name == "bin":
        return _environment(path.parent.parent)
    return None


def _binary(path: Path) -> Found | None:
    if path.is_symlink():
        raise Refusal("engine_unsupported", f"{path} is a link. Name its target: {os.path.realpath(path)}")
    try:
        status = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode) or not status.st_mode & 0o111:
        return None
    return Found(executable=path, version=_library_version(path), place=path.parent)


def _library_version(binary: Path) -> str:
    """The version in the name of a `libllama.so.X.Y.Z` beside the binary, or in `<prefix>/lib`."""
    for place in _library_places(binary):
        try:
            names = sorted(os.listdir(place))[:4096]
        except OSError:
            continue
        for name in names:
            match = _LIBRARY.match(name)
            if match is not None:
                return match["version"]
    return "unknown"


def _library_places(binary: Path) -> list[Path]:
    places = [binary.parent]
    if binary.parent.name == "bin":
        places.append(binary.parent.parent / "lib")
    return places


def _environment(prefix: Path) -> Found | None:
    python = next((p for p in (prefix / "bin" / "python", prefix / "bin" / "python3") if p.exists()), None)
    version = PACKAGE.version(prefix)
    return None if python is None or version is None else Found(executable=python, version=version, place=prefix)


def check_config_file(path: Path = CONFIG_FILE, code: str = "engine_unsupported") -> None:
    """llama.cpp reads this file of its own accord, so that its options would not be the rendered ones.

    Raises: Refusal with `code`, naming the file.
    """
    if os.path.lexists(path):
        raise Refusal(code, f"{path} exists and llama.cpp would read options from it. Move it away")


def read_version(executable: Path, limit_s: float = VERSION_LIMIT_S) -> Version:
    """Run the program once with `--version` and read what it prints on standard error. Blocking.

    Raises: Refusal `engine_version_failed` when it cannot be run, fails, prints too much or takes too long;
      `engine_unsupported` when its version line is not llama.cpp's.
    """
    what = f"{executable} --version"
    said = run_once(
        [*program(str(executable)), "--version"],
        env={"PATH": f"{executable.parent}:{SYSTEM_PATH}"},
        what=what,
        limit_s=limit_s,
        bytes_max=OUTPUT_BYTES_MAX,
        stream="stderr",
    )
    if said.status != 0:
        raise Refusal("engine_version_failed", f"{what} ended with {said.status}: {said.last_line}")
    match = _VERSION.search(said.text)
    if match is None:
        raise Refusal(
            "engine_unsupported", f"{executable} --version does not print llama.cpp's version line on standard error"
        )
    return Version(version=match["version"], build=int(match["build"]), commit=match["commit"])


_measured: dict[str, tuple[tuple[object, ...], str]] = {}


def fingerprint(executable: Path) -> str | None:
    """`sha256:` over the installation's own files, or None when they cannot be read. Blocking.

    A binary: itself and every `lib*.so*` beside it or in `<prefix>/lib`; a link counts by its target's text.
    An environment: the files of the wheel, bytecode left out. Unchanged files are not read again.
    Source: engines 2.4.
    """
    try:
        files = _binary_files(executable) if executable.name == BINARY else _wheel_files(executable.parent.parent)
        stats: tuple[object, ...] = tuple((str(path), *_stat(path)) for path in files)
        known = _measured.get(str(executable))
        if known is not None and known[0] == stats:
            return known[1]
        rows = [_row(path) for path in files]
    except OSError:
        return None
    digest = hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
    _measured[str(executable)] = (stats, f"sha256:{digest}")
    return f"sha256:{digest}"


def _stat(path: Path) -> tuple[int, int, int, int]:
    status = os.lstat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _binary_files(binary: Path) -> list[Path]:
    files = [binary]
    for place in _library_places(binary):
        if place.is_dir():
            files += [p for p in sorted(place.iterdir()) if p.name.startswith("lib") and ".so" in p.name]
    return files


def _wheel_files(prefix: Path) -> list[Path]:
    package = PACKAGE.directory(prefix)
    if package is None:
        raise FileNotFoundError(PACKAGE.package)
    files = [p for p in sorted(package.rglob("*")) if "__pycache__" not in p.parts]
    return [p for p in files if p.is_symlink() or p.is_file()]


def _row(path: Path) -> list[object]:
    if path.is_symlink():
        return [path.name, "link", os.readlink(path)]
    hasher = hashlib.sha256()
    with open(path, "rb", buffering=0) as stream:
        size = 0
        while piece := stream.read(1 << 20):
            hasher.update(piece)
            size += len(piece)
    return [path.name, size, hasher.hexdigest()]
