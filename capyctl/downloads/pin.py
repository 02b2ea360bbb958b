"""The commit that a branch or tag of a repository stands for now. Asked by the client, before a document is stored.

Without the Hub's library, whose import would be felt in every deploy. Source: config 7.2; cli 9.
"""

from __future__ import annotations

import json
import urllib.parse
from typing import Final

from capyctl.documents.model_source import COMMIT
from capyctl.downloads.door import Door, Line
from capyctl.downloads.part import Patience, try_on
from capyctl.downloads.reach import Reach
from capyctl.errors import Failure, Refusal

ANSWER_MAX: Final = 16 << 20


def commit_of(
    repo: str, revision: str | None, *, endpoint: str, token: str | None, patience: Patience | None = None
) -> str:
    """The commit of `revision`, or of the main branch.

    Args:
      endpoint: the Hub's address, https or this machine's own; the user's word is enough for it to be a private one.
    Raises: Refusal `unauthorized`, `not_found`, `not_materializable`; Failure `unavailable`.
    """
    hub = endpoint.rstrip("/")
    url = f"{hub}/api/models/{repo}/revision/{urllib.parse.quote(revision or 'main', safe='')}"
    host = urllib.parse.urlsplit(hub).hostname or ""
    line, door = Line(), Door(Reach(allowed_hosts=frozenset({host.lower()})))

    def ask() -> bytes:
        with door.open(url, line, token=token) as answer:
            return answer.whole(ANSWER_MAX)

    try:
        body = try_on(ask, lambda: 0, line, patience or Patience(attempts=3), hub)
    except (Refusal, Failure) as wrong:
        raise type(wrong)(wrong.code, f"{repo} cannot be pinned: {wrong.message}") from None
    try:
        commit = json.loads(body).get("sha")
    except (ValueError, AttributeError, RecursionError):
        commit = None
    if not isinstance(commit, str) or COMMIT.fullmatch(commit) is None:
        raise Failure("unavailable", f"{repo} cannot be pinned: {hub} did not say its commit")
    return commit
