"""`version`: the release and the commit it was built from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from capyctl import __version__
from capyctl.cli.output import PLAIN, Common, emit_json, say

_COMMIT: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_BRANCH: Final = re.compile(r"ref: (refs/[\w./+@-]+)")
_FILE_MAX: Final = 1 << 20


def version(*, common: Common = PLAIN) -> None:
    """Show the version and the commit the build came from."""
    commit = _commit()
    if common.as_json:
        emit_json({"version": __version__, "commit": commit})
    else:
        say(f"capyctl {__version__}{f' ({commit})' if commit else ''}")


def _commit() -> str | None:
    """The commit that the installer recorded, or that of the checkout an editable installation runs from."""
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    try:
        text = metadata.distribution("capyctl").read_text("direct_url.json")
        told: Mapping[str, Any] = json.loads(text or "{}")
        found = told.get("vcs_info", {}).get("commit_id")
        if isinstance(found, str):
            return found
        place = urlsplit(str(told.get("url", "")))
        if told.get("dir_info", {}).get("editable") is True and place.scheme == "file":
            return checked_out(Path(unquote(place.path)))
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return None
    return None


def checked_out(directory: Path) -> str | None:
    """The commit that a git checkout is at, by its files alone; None where they do not tell. Runs no git."""
    at = directory / ".git"
    if at.is_file():  # a worktree of its own: the file says where its directory is
        at = directory / _text(at).removeprefix("gitdir:").strip()
    head = _text(at / "HEAD").strip()
    branch = _BRANCH.fullmatch(head)
    if branch is not None:
        common = at / (_text(at / "commondir").strip() or ".")  # where worktrees share branches
        head = _text(common / branch[1]).strip() or _packed(_text(common / "packed-refs"), branch[1])
    return head if _COMMIT.fullmatch(head) else None


def _packed(text: str, name: str) -> str:
    return next((line.partition(" ")[0] for line in text.splitlines() if line.endswith(f" {name}")), "")


def _text(path: Path) -> str:
    """A regular file's text, empty where it is none or cannot be read."""
    from capyctl.documents import owned
    from capyctl.errors import Refusal

    try:
        return owned.read_regular(str(path), _FILE_MAX).decode()
    except (Refusal, UnicodeDecodeError):
        return ""
