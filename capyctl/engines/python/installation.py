"""An engine installed as a package of a Python environment: where it is, its version, its files.

Paths are taken as they are written: the `python3` of an environment is a link, and stays one. Finding an
installation executes nothing; `read_version` runs it once.
Source: engines 2.2-2.4.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from capyctl.engines.environment import SYSTEM_PATH
from capyctl.engines.installations import Found, Measurement
from capyctl.engines.run_once import run_once
from capyctl.errors import Refusal

VERSION_LIMIT_S = 60.0
VERSION_BYTES_MAX = 4096
FILES_MAX = 100_000
DIGEST_BYTES_MAX = 32 << 30
HYGIENE = ("-I", "-S", "-B")
"""Flags of every interpreter that CapyCTL starts: nothing of the caller's directories or variables, no `.pth`
hooks, no bytecode written. A helper puts the environment's packages on its path itself."""

_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!]{0,63}")
_PYTHON_LIB = re.compile(r"python3\.\d+")
CUDA_PLACES = (Path("/usr/local/cuda"),)


@attrs.frozen(kw_only=True)
class Package:
    """How one engine lies in an environment. `commands` are the names of its programs in `bin`, best first."""

    distribution: str  # the dist-info's name
    package: str  # the directory below site-packages
    commands: tuple[str, ...]

    def find(self, path: Path) -> Found | None:
        """The installation that `path` names: an environment, its `bin`, its interpreter, or the engine's program.

        `executable` is the engine's first program that is there, else the interpreter. None when the path names
        no environment, or one without this package.
        """
        prefix = self._prefix(path)
        if prefix is None:
            return None
        python = interpreter(prefix)
        version = self.version(prefix)
        if python is None or version is None:
            return None
        programs = [prefix / "bin" / name for name in self.commands]
        return Found(
            executable=next((program for program in programs if os.access(program, os.X_OK)), python),
            version=version,
            place=prefix,
        )

    def _prefix(self, path: Path) -> Path | None:
        if path.is_dir():
            return path.parent if path.name == "bin" and interpreter(path.parent) is not None else path
        if path.parent.name != "bin" or not os.path.lexists(path):
            return None
        named = path.name in self.commands or re.fullmatch(r"python3?(\.\d+)?", path.name)
        return path.parent.parent if named else None

    def version(self, prefix: Path) -> str | None:
        """What the dist-info says; None when the package is not there, or its metadata is no version."""
        found = self._site(prefix)
        return None if found is None else found[1]

    def directory(self, prefix: Path) -> Path | None:
        """The package's own directory."""
        found = self._site(prefix)
        return None if found is None else found[0] / self.package

    def _site(self, prefix: Path) -> tuple[Path, str] | None:
        start, end = f"{self.distribution}-", ".dist-info"
        for packages in site_packages(prefix):
            try:
                names = sorted(os.listdir(packages))
            except OSError:
                continue
            for name in names:
                version = name[len(start) : -len(end)]
                is_info = name.startswith(start) and name.endswith(end) and _VERSION.fullmatch(version)
                if is_info and (packages / self.package).is_dir():
                    return packages, version
        return None

    def glance(self, executable: Path) -> Measurement:
        """The installation by its metadata and files alone, for a role that starts. Blocking; runs nothing.

        Raises: Refusal `engine_not_found` when the package is not in the program's environment.
        """
        prefix = prefix_of(executable)
        version = self.version(prefix)
        if version is None or not os.access(executable, os.X_OK):
            raise Refusal("engine_not_found", f"{executable} is no program of an environment that holds {self.package}")
        return Measurement(version=version, fingerprint=version, digest=self.digest(prefix), deep_park="unknown")

    def digest(self, prefix: Path) -> str | None:
        """`sha256:` over the package's files, or None when they cannot be read or are too many. Blocking.

        A canonical list of relative path, size and SHA-256, sorted; bytecode left out; a link counts by its
        target's text. Files that did not change since this process read them are not read again.
        """
        directory = self.directory(prefix)
        if directory is None:
            return None
        try:
            files = sorted(_files(directory))
            stats = tuple((name, *_stat(directory / name)) for name in files)
            known = _measured.get(str(directory))
            if known is not None and known[0] == stats:
                return known[1]
            if len(files) >= FILES_MAX or sum(size for _, size, *_ in stats) > DIGEST_BYTES_MAX:
                return None
            rows = [_row(directory, name) for name in files]
        except OSError:
            return None
        digest = "sha256:" + hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
        _measured[str(directory)] = (stats, digest)
        return digest


_measured: dict[str, tuple[tuple[tuple[str, int, int, int, int], ...], str]] = {}


def prefix_of(executable: Path | str) -> Path:
    """The environment of a registered program: `<env>/bin/<program>`, by its text."""
    return Path(executable).parent.parent


def interpreter(prefix: Path) -> Path | None:
    """The environment's own interpreter, as a path inside it."""
    places = (prefix / "bin" / "python3", prefix / "bin" / "python")
    return next((place for place in places if os.access(place, os.X_OK) and not place.is_dir()), None)


def site_packages(prefix: Path) -> list[Path]:
    """`<prefix>/lib*/python3.*/site-packages`, at most a few."""
    found: list[Path] = []
    for lib in ("lib", "lib64"):
        if lib == "lib64" and (prefix / lib).is_symlink():
            continue  # the same directory under another name
        try:
            names = sorted(os.listdir(prefix / lib))[:1024]
        except OSError:
            continue
        found += [prefix / lib / name / "site-packages" for name in names if _PYTHON_LIB.fullmatch(name)]
    return [packages for packages in found[:8] if packages.is_dir()]


def helper_argv(prefix: Path, script: Path, words: Sequence[str] = ()) -> tuple[str, ...]:
    """The command line that runs a helper script under the environment's interpreter.

    Raises: Refusal `engine_not_found` when the environment has lost its interpreter.
    """
    python = interpreter(prefix)
    if python is None:
        raise Refusal("engine_not_found", f"{prefix} has no interpreter in its bin directory")
    return (str(python), *HYGIENE, str(script), *words)


def read_version(argv: Sequence[str], *, what: str, prefix: Path, limit_s: float = VERSION_LIMIT_S) -> str:
    """Run a program once, with a cleared environment, and return the lines that it printed. Blocking.

    Raises: Refusal `engine_version_failed` when it cannot be run, fails, prints too much or takes too long.
    """
    said = run_once(
        argv,
        env={"PATH": f"{prefix / 'bin'}:{SYSTEM_PATH}", "DO_NOT_TRACK": "1"},
        what=what,
        limit_s=limit_s,
        bytes_max=VERSION_BYTES_MAX,
    )
    if said.status != 0:
        raise Refusal("engine_version_failed", f"{what} ended with {said.status}: {said.last_line}")
    return said.text


def parse_version(text: str, what: str, named: str = "") -> str:
    """The version in what a program printed: its last line, without the name that some print before it.

    Raises: Refusal `engine_version_failed` when that line is no version.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    word = last.removeprefix(named).strip() if named else last
    if not _VERSION.fullmatch(word):
        raise Refusal("engine_version_failed", f"{what} does not print a version")
    return word


def public(version: str) -> str:
    """A version without its local part: builds print `0.32.0+cpu`, and are compared as `0.32.0`."""
    return version.partition("+")[0]


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparing: `0.32.0rc1+cpu` is (0, 32, 0)."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def cuda_home(environ: Mapping[str, str], places: Sequence[Path] = CUDA_PLACES) -> str | None:
    """The CUDA toolkit that `engine add` records: `CUDA_HOME`, else a usual place, if it holds `bin/nvcc`."""
    stated = environ.get("CUDA_HOME", "")
    for place in ((Path(stated),) if stated.startswith("/") else ()) + tuple(places):
        if os.access(place / "bin" / "nvcc", os.X_OK):
            return os.path.normpath(place)
    return None


def _files(directory: Path) -> Iterator[str]:
    count = 0
    for place, folders, names in os.walk(directory, onerror=_raise):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        folders[:] = sorted(name for name in folders if name != "__pycache__" and name not in links)
        for name in (*names, *links):
            if name.endswith((".pyc", ".pyo")):
                continue
            count += 1
            if count > FILES_MAX:
                return
            yield os.path.relpath(os.path.join(place, name), directory)


def _raise(error: OSError) -> None:
    raise error


def _stat(path: Path) -> tuple[int, int, int, int]:
    status = os.lstat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _row(directory: Path, name: str) -> list[object]:
    path = directory / name
    if path.is_symlink():
        return [name, "link", os.readlink(path)]
    if not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    hasher, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as stream:
        while piece := stream.read(1 << 20):
            hasher.update(piece)
            size += len(piece)
    return [name, size, hasher.hexdigest()]
