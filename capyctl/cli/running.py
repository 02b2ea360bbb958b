"""A role that runs here with other settings than its document and this command's environment say. Files alone are read.

Source: config 12.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import attrs

from capyctl.documents import started
from capyctl.documents.settings import StandaloneSettings
from capyctl.documents.started import Started

NAMED_MAX: Final = 3


@attrs.frozen(kw_only=True)
class Other:
    """What runs, and the one line about it."""

    started: Started
    line: str


def other(settings: StandaloneSettings) -> Other | None:
    """The role that runs with this state directory, where it was started with other settings; else None."""
    from capyctl.server import lock

    found = started.read(settings.places)
    holder = None if found is None else lock.holder(Path(settings.places.role_lock))
    if found is None or holder is None:
        return None
    rows = started.others(found, settings.rows)
    told = [f"{row.path} {row.text} ({row.source})" for row in rows]
    if found.engines_file != settings.engines_file:
        told.insert(0, f"engines of {found.engines_file}")
    if not told:
        return None
    more = f", and {len(told) - NAMED_MAX} more" if len(told) > NAMED_MAX else ""
    return Other(
        started=found,
        line=f"a role runs here (pid {holder.pid}) with other settings: {', '.join(told[:NAMED_MAX])}{more}",
    )
