"""What a start of a role finds in its state directory, and what a first one writes there."""

from __future__ import annotations

import os
from pathlib import Path

from capyctl.documents import places, standalone, started
from capyctl.documents.places import Credentials
from capyctl.documents.settings import StandaloneSettings
from capyctl.errors import Refusal
from capyctl.host.journal import JOURNAL_FILE
from capyctl.host.orphans import engines_below
from capyctl.server.store import STORE_FILE


def first_start(settings: StandaloneSettings) -> Credentials:
    """Everything that a first start writes; a later one finds it. The lock is held."""
    where = settings.places
    for directory in (where.run, where.server, where.host):
        places.keep_private(directory)
    started.keep(settings)
    if settings.generated:
        places.make_private(os.path.dirname(settings.document_path))
        places.write_new(settings.document_path, standalone.GENERATED)
    served_before = _served_before(os.path.join(where.server, STORE_FILE), os.path.join(where.host, JOURNAL_FILE))
    if not served_before:
        _check_nobody_runs(Path(where.host))
    credentials = places.establish_credentials(where, served_before=served_before)
    try:
        os.makedirs(settings.models_dir, mode=0o755, exist_ok=True)
    except OSError as wrong:
        why = "it is no directory" if isinstance(wrong, FileExistsError) else wrong.strerror
        raise Refusal(
            "invalid_config", f"the models directory {settings.models_dir}: {why}. Name another with --models-root"
        ) from None
    return credentials


def _served_before(store: str, journal: str) -> bool:
    """Whether this state directory has a store. Raises: Refusal `unreconciled` when it had one and lost it.

    A role opens its store before its host's journal, so a journal without a store is no first start: engines may
    run that an empty store would let others be started beside.
    """
    if os.path.exists(journal) and not (os.path.exists(store) and os.path.getsize(store)):
        raise Refusal(
            "unreconciled",
            f"the store {store} is missing or empty, but this state directory has served. Restore it; or, to begin "
            f"anew, end the engines that still run and remove {journal}",
        )
    return os.path.exists(store)


def _check_nobody_runs(host: Path) -> None:
    """Refuse a first start beside engines of a state that was removed. Raises: Refusal `unreconciled`."""
    left = engines_below(host)
    if left:
        raise Refusal(
            "unreconciled",
            f"engines of an earlier state at {host} still run, and nothing is known here of them and their memory: "
            f"{', '.join(f'pid {pid}' for pid in left[:16])}. End them with kill, and start again",
        )
