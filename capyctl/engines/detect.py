"""`capyctl engine detect`: installations in the usual places, by metadata alone. Nothing found is executed.

No link is followed out of a place that is looked at, and places, entries and depth are bounded, so a
hostile directory costs a bounded look.
Source: engines 2.2; security F18.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from capyctl.documents import owned
from capyctl.engines.families import FAMILIES, Family
from capyctl.engines.verified import is_custom
from capyctl.errors import Refusal

PLACES_MAX = 512
ENTRIES_MAX = 1024
_CONDA = ("miniconda3", "anaconda3", "miniforge3", "mambaforge", ".conda")


@attrs.frozen(kw_only=True)
class Detected:
    """One row of the table. `path` is what `engine add` takes."""

    engine: str
    version: str
    custom: bool
    environment: str
    source: str  # venv, conda, path
    path: str


def detect(environ: Mapping[str, str], extra: Sequence[Path] = (), home: Path | None = None) -> tuple[Detected, ...]:
    """Every installation in the known places and in `extra`, in the order of the search.

    Args:
      environ: `PATH` and `HOME` are read from it.
      home: instead of `HOME`.
    """
    at_home = home or (Path(environ["HOME"]) if environ.get("HOME", "").startswith("/") else None)
    found: dict[str, Detected] = {}
    for place in _bounded(_places(environ, extra, at_home)):
        for family in FAMILIES.values():
            row = _look(place, family)
            if row is not None:
                found.setdefault(os.path.realpath(row.environment) + row.engine, row)
    return tuple(found.values())


def holds_one(place: Path) -> bool:
    """Whether an installation of any family is there, or in a directory of it."""
    return any(_look(one, family) is not None for one in _bounded(_given(place)) for family in FAMILIES.values())


def _bounded(places: Iterable[Path]) -> list[Path]:
    seen: dict[str, Path] = {}
    for place in places:
        if len(seen) >= PLACES_MAX:
            break
        seen.setdefault(str(place), place)
    return list(seen.values())


def _places(environ: Mapping[str, str], extra: Sequence[Path], home: Path | None) -> Iterable[Path]:
    yield from extra
    for entry in environ.get("PATH", "").split(os.pathsep)[:128]:
        if entry.startswith("/"):
            yield Path(entry)
            if Path(entry).name == "bin":
                yield Path(entry).parent
    yield Path(sys.prefix)  # the environment that CapyCTL itself is installed in
    yield Path("/usr/local/bin")
    if home is not None:
        yield from _at_home(home)
    for entry in ("miniconda3", "anaconda3"):
        yield from _conda(Path("/opt") / entry)
    yield from _conda(Path("/opt/conda"))
    yield from _shelf(Path("/opt"))
    for place in extra:  # what it names itself came first; a full shelf takes no place from the usual ones
        yield from _given(place)


def _at_home(home: Path) -> Iterable[Path]:
    yield home / ".venv"
    for shelf in ("venvs", ".virtualenvs", ".local/share/uv/tools", ".local/share/pipx/venvs", ".local/pipx/venvs"):
        yield from _children(home / shelf)
    for child in _children(home):
        if (child / "pyvenv.cfg").is_file():
            yield child
    for build in _children(home / "llama.cpp"):
        if build.name.startswith("build"):
            yield build / "bin"
    for name in _CONDA:
        yield from _conda(home / name)
    try:
        listed = owned.read_regular(str(home / ".conda" / "environments.txt"), 64 << 10).decode().splitlines()
    except (Refusal, UnicodeDecodeError):
        listed = []
    yield from (Path(line) for line in listed[:128] if line.startswith("/"))


def _given(place: Path) -> Iterable[Path]:
    """A place that somebody named: an installation, or a directory of some."""
    yield place
    yield from _conda(place)
    yield from _shelf(place)


def _shelf(place: Path) -> Iterable[Path]:
    """What lies in a directory, programs that were built there as well."""
    for child in _children(place):
        yield child
        yield child / "bin"


def _conda(prefix: Path) -> Iterable[Path]:
    yield prefix
    yield from _children(prefix / "envs")


def _children(place: Path) -> list[Path]:
    """The directories right below `place`; links among them are not followed."""
    try:
        with os.scandir(place) as entries:
            names = [entry.name for _, entry in zip(range(ENTRIES_MAX), entries, strict=False) if _is_real_dir(entry)]
    except OSError:
        return []
    return [place / name for name in sorted(names)]


def _is_real_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _look(place: Path, family: Family) -> Detected | None:
    try:
        found = family.find(place)
    except (Refusal, OSError):
        return None  # a link, or unreadable: registering it by name says why
    if found is None:
        return None
    binary = found.executable.name in family.binaries
    environment = "conda" if (found.place / "conda-meta").is_dir() else "venv"
    return Detected(
        engine=family.name,
        version=found.version,
        custom=is_custom(family.name, found.version),
        environment=str(found.place),
        source="path" if binary else environment,
        path=str(found.executable) if binary else str(found.place),
    )
