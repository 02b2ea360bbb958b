"""Engines that run below a state directory which knows nothing of them: environment and words say whose they are.

Whoever begins anew by removing the state takes away what the next role would adopt or end them by. Their memory
would be charged to nobody, so a first start beside them is refused.
Source: security 6.1; lifecycle 17.
"""

from __future__ import annotations

import os
from pathlib import Path

from capyctl.host.identity import PROC

LOG_VARIABLE = "CAPYCTL_ENGINE_LOG"
"""Set for every engine, of every family: where its log is written."""


def engines_below(state: Path, proc: Path = PROC) -> tuple[int, ...]:
    """Living processes of engines whose log, or whose entry, lies in the host's directory `state`.

    As far as they may be looked at; a program that writes a title of its own may overwrite one of the two.
    """
    marks = (
        ("environ", os.fsencode(f"{LOG_VARIABLE}={state / 'logs'}{os.sep}")),
        ("cmdline", os.fsencode(f"{state / 'runtime'}{os.sep}")),
    )
    found = []
    for name in os.listdir(proc):
        if not name.isdecimal():
            continue
        if any(_says(proc / name / file, mark) for file, mark in marks):
            found.append(int(name))
    return tuple(sorted(found))


def _says(path: Path, mark: bytes) -> bool:
    try:
        return any(text.startswith(mark) for text in path.read_bytes().split(b"\0"))  # nothing, of a zombie
    except OSError:
        return False  # another user's, or it has ended
