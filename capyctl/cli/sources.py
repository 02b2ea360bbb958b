"""`list sources`, `prune sources`: what was downloaded, and what of it nobody uses any more.

Source: cli 13; api 5.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from capyctl.cli.lifecycle import management
from capyctl.cli.output import PLAIN, Common, emit_json, say, table
from capyctl.cli.progress import amount


def listed(*, common: Common = PLAIN) -> None:
    """List downloaded models, their sizes, and the deployments that use them."""
    answer = management(common).get("/model-sources")
    if common.as_json:
        emit_json(answer)
        return
    _table(answer["sources"], none="Nothing was downloaded.")


def prune(
    *,
    apply: Annotated[bool, Parameter(negative=(), help="Remove them; without it they are only shown.")] = False,
    common: Common = PLAIN,
) -> None:
    """Show the downloads that no deployment uses, and what they take; with --apply remove them."""
    api = management(common)
    if apply:
        rows = api.change("POST", "/model-sources/prune", {})["removed"]
    else:
        rows = [row for row in api.get("/model-sources")["sources"] if not row["deployments"]]
    if common.as_json:
        emit_json({"api_version": "1", "applied": apply, "sources": rows})
        return
    _table(rows)
    total = amount(sum(int(row["bytes"]) for row in rows))
    if not rows:
        say("Nothing can be removed.")
    else:
        say(f"{total} removed." if apply else f"{total} can be removed: capyctl prune sources --apply")


def _table(rows: Iterable[Mapping[str, Any]], none: str = "") -> None:
    cells = (
        (
            str(row["place"]),
            amount(int(row["bytes"])),
            "complete" if row["complete"] else "parts",
            ",".join(row["deployments"]) or "-",
        )
        for row in rows
    )
    table(("SOURCE", "SIZE", "STATE", "DEPLOYMENTS"), cells, none=none)
