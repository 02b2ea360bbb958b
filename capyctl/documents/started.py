"""What a role was started with, kept below `run/` for commands that ask no role.

A document says less than a start: flags, `--set` and variables were laid over it, and it may have been edited since.
Values of engines' variables are redacted here as in `config show`, so nothing secret is kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import attrs

from capyctl.documents import paths, places, strict
from capyctl.documents.paths import Origin, Row, Statement
from capyctl.documents.places import Places
from capyctl.documents.settings import StandaloneSettings
from capyctl.documents.standalone import Standalone
from capyctl.errors import Refusal

BYTES_MAX: Final = 1 << 20
_STRONGEST: Final[tuple[Origin, ...]] = ("set", "flag", "env", "yaml", "default")
_PROFILES: Final = ("host", "runtime_profiles")


@attrs.frozen(kw_only=True)
class Started:
    """The settings of a role's present or last start, and where it reads engines."""

    engines_file: str
    rows: tuple[Row, ...]


def keep(settings: StandaloneSettings) -> None:
    """Note what a role is started with. Its lock is held. Raises: Failure insufficient_space."""
    rows = [{"path": row.path, "value": row.value, "source": row.source} for row in settings.rows]
    text = json.dumps({"engines_file": settings.engines_file, "settings": rows})
    places.replace(settings.places.started, f"{text}\n")


def read(where: Places) -> Started | None:
    """What the role was started with; None where that was never noted, or is not ours to read."""
    try:
        said = json.loads(places.read_owned(where.started, BYTES_MAX))
        rows = tuple(Row(path=row["path"], value=row["value"], source=row["source"]) for row in said["settings"])
        return Started(engines_file=str(said["engines_file"]), rows=rows)
    except (FileNotFoundError, Refusal, ValueError, KeyError, TypeError):
        return None


def others(started: Started, rows: Sequence[Row]) -> list[Row]:
    """The settings that the role was started with and that are not so in `rows`, but for those that `--set` states.

    What a command line stated comes first, then variables, then what documents say.
    """
    here = {row.path: row for row in rows}
    there = {row.path: row for row in started.rows}
    gone = [Row(path=path, value="not set", source="default") for path in here if path not in there]
    changed = [row for path, row in there.items() if path not in here or here[path].value != row.value]
    asked = {row.path for row in rows if row.source == "set"}
    found = [row for row in (*changed, *gone) if row.path not in asked]
    return sorted(found, key=lambda row: (_STRONGEST.index(row.source), row.path))


def as_started(settings: StandaloneSettings, started: Started) -> StandaloneSettings:
    """The settings of the role that was started; engine profiles of its document are those of `settings`.

    Raises: Refusal for a record of another release.
    """
    profiles = strict.unstructure(settings.document)["host"]["runtime_profiles"]
    raw: dict[str, Any] = {"host": {"runtime_profiles": profiles}} if profiles else {}
    statements = [
        Statement(path=path, value=row.value, origin=row.source, by="the role that runs here")
        for row in started.rows
        if (path := tuple(row.path.split(".")))[: len(_PROFILES)] != _PROFILES
    ]
    document = paths.overlay(Standalone, raw, statements, "the role that runs here")
    return attrs.evolve(
        settings,
        document=document,
        engines_file=started.engines_file,
        models_dir=str(document.host.model_store.path or settings.models_dir),
        rows=started.rows,
    )
