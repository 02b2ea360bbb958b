"""`version`: the release and the commit it was built from."""

from __future__ import annotations

from capyctl import __version__
from capyctl.cli.output import PLAIN, Common, emit_json, say


def version(*, common: Common = PLAIN) -> None:
    """Show the version and the commit the build came from."""
    commit = _commit()
    if common.as_json:
        emit_json({"version": __version__, "commit": commit})
    else:
        say(f"capyctl {__version__} ({commit or 'commit unknown'})")


def _commit() -> str | None:
    """The commit that the installer recorded, when it installed from a repository."""
    import json
    from importlib import metadata

    try:
        text = metadata.distribution("capyctl").read_text("direct_url.json")
        found = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None
