"""How many files a role may have open, and how many of them its clients may take.

A client's connection is a file, and so is one to an engine. A login shell allows 1024, which a few hundred idle
strangers use up; what the role then cannot open is its store, /proc and the next connection to an engine. So it takes
what it may have, and its clients leave enough of it for its own work.
"""

from __future__ import annotations

import resource
from typing import Final

from capyctl.router.listener import CONNECTIONS_MAX

FILES_WANTED: Final = 65_536
FILES_KEPT: Final = 512  # the store, the journal, logs, and up to 32 connections for each engine


def raise_limit() -> int:
    """Take as many files as are wanted, within what this process is allowed; how many those are now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = FILES_WANTED if hard == resource.RLIM_INFINITY else min(FILES_WANTED, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return FILES_WANTED if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def for_clients(files: int) -> int:
    """How many of so many files are for clients' connections: at least half of them, where there are few."""
    return min(CONNECTIONS_MAX, max(files // 2, files - FILES_KEPT))
