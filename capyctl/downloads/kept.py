"""What was downloaded and lies on this host: shown with sizes, and removed when nobody refers to it any more. Blocks.

A directory that is removed is first taken from where models are looked for, in one step. Source: cli 13; config 5.2.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import attrs

from capyctl.checkpoints.sources import SOURCES
from capyctl.downloads.fetch import PARTS, is_nameless, locked, parts_of, place_noted, sync
from capyctl.downloads.room import bytes_below

_NAMELESS: Final = f"{SOURCES}/{PARTS}/"


@attrs.frozen(kw_only=True)
class Kept:
    """A download. `place` is relative to the download directory. Not `complete`: parts that a fetch goes on from.

    Parts that nothing names, left by a power cut or by a removal that was killed, have their own directory as place.
    """

    place: str
    bytes: int
    complete: bool


def present(root: Path) -> list[Kept]:
    """Every download below `root`, by place."""
    whole = [Kept(place=place, bytes=bytes_below(root / place), complete=True) for place in _places(root)]
    parts = []
    for work in _children(root / SOURCES / PARTS):
        place = place_noted(work)
        if place is None and is_nameless(work):
            parts.append(Kept(place=f"{_NAMELESS}{work.name}", bytes=bytes_below(work), complete=False))
        elif place is not None and not (root / place).is_dir():
            parts.append(Kept(place=place, bytes=bytes_below(work), complete=False))
    return sorted([*whole, *parts], key=lambda kept: kept.place)


def _places(root: Path) -> Iterator[str]:
    top = root / SOURCES
    for owner in _children(top / "huggingface"):
        for choice in (
            choice for name in _children(owner) for commit in _children(name) for choice in _children(commit)
        ):
            yield str(choice.relative_to(root))
    for one in _children(top / "http"):
        yield str(one.relative_to(root))


def _children(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.is_dir() and not path.is_symlink())


def prune(root: Path, kept: Collection[str]) -> list[Kept]:
    """Remove every download but those at `kept` places, and but those that are being fetched. What was removed.

    Raises: OSError.
    """
    removed = []
    for one in present(root):
        if one.place in kept:
            continue
        work = root / one.place if one.place.startswith(_NAMELESS) else parts_of(root, one.place)
        with locked(work, make=True) as held:
            if not held:
                continue  # somebody fetches it
            if one.complete:
                gone = work / "gone"
                (root / one.place).rename(gone)
                sync((root / one.place).parent)
            shutil.rmtree(work)
            removed.append(one)
            _tidy_above(root / one.place, root / SOURCES)
    return removed


def _tidy_above(place: Path, top: Path) -> None:
    """Directories of a repository that hold nothing any more."""
    for above in place.parents:
        if above == top or top not in above.parents:
            return
        try:
            above.rmdir()
        except OSError:
            return  # it holds something
