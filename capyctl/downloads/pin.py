"""The commit that a branch or tag of a repository stands for now. Asked by the client, before a document is stored.

Without the Hub's library, whose import would be felt in every deploy. A thread asks and a person waits, for so long
and no longer: look-ups of names cannot be cut, and a server may answer for ever without saying anything.
Source: config 7.2; cli 9.
"""

from __future__ import annotations

import threading
import urllib.parse
from typing import Final

from capyctl.checkpoints import bounded_json
from capyctl.documents.model_source import COMMIT
from capyctl.downloads.door import Door, Interrupted, Line
from capyctl.downloads.part import Patience, try_on
from capyctl.downloads.reach import Reach
from capyctl.errors import Failure, Refusal

ANSWER_MAX: Final = 16 << 20
LIMIT_S: Final = 30.0
"""Tries and pauses together."""


def commit_of(
    repo: str,
    revision: str | None,
    *,
    endpoint: str,
    token: str | None,
    patience: Patience | None = None,
    limit_s: float = LIMIT_S,
) -> str:
    """The commit of `revision`, or of the main branch.

    Args:
      endpoint: the Hub's address, https or this machine's own; the user's word is enough for it to be a private one.
      limit_s: how long all of it may take.
    Raises: Refusal `unauthorized`, `not_found`, `not_materializable`; Failure `unavailable`.
    """
    hub = endpoint.rstrip("/")
    url = f"{hub}/api/models/{repo}/revision/{urllib.parse.quote(revision or 'main', safe='')}"
    host = urllib.parse.urlsplit(hub).hostname or ""
    line, door = Line(), Door(Reach(allowed_hosts=frozenset({host.lower()})))
    last = f"{hub} did not answer"

    def ask() -> bytes:
        nonlocal last
        try:
            with door.open(url, line, token=token) as answer:
                return answer.whole(ANSWER_MAX)
        except Interrupted as wrong:
            last = wrong.why
            raise

    outcome: list[bytes | BaseException] = []

    def work() -> None:
        try:
            outcome.append(try_on(ask, lambda: 0, line, patience or Patience(attempts=3), hub))
        except BaseException as wrong:
            outcome.append(wrong)

    asking = threading.Thread(target=work, name="pin", daemon=True)  # the process may end while a name is looked up
    asking.start()
    asking.join(limit_s)
    if not outcome:
        line.stop()
        raise Failure("unavailable", f"{repo} cannot be pinned in {limit_s:.0f} s: {last}. Try again later")
    return _commit(outcome[0], repo, hub)


def _commit(outcome: bytes | BaseException, repo: str, hub: str) -> str:
    if isinstance(outcome, Refusal | Failure):
        raise type(outcome)(outcome.code, f"{repo} cannot be pinned: {outcome.message}") from None
    if isinstance(outcome, BaseException):
        raise outcome
    try:
        commit = bounded_json.parse(outcome).get("sha")
    except (bounded_json.WrongJson, AttributeError):
        commit = None
    if not isinstance(commit, str) or COMMIT.fullmatch(commit) is None:
        raise Failure("unavailable", f"{repo} cannot be pinned: {hub} did not say its commit")
    return commit
