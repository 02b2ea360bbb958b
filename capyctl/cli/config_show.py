"""`config show`: every effective setting, and where it comes from. Asks no role and writes nothing.

Source: config 12.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Annotated, Final

from cyclopts import Parameter

from capyctl.cli import running
from capyctl.cli.output import PLAIN, Common, Words, emit_json, note, say, table
from capyctl.documents import kinds, places
from capyctl.documents.custom_engine import MANIFEST_KIND
from capyctl.documents.settings import Stated, effective
from capyctl.errors import Refusal

TITLES: Final = ("SETTING", "VALUE", "SOURCE")


def show(
    *,
    role: Annotated[str | None, Parameter(help="server, host or standalone.")] = None,
    set: Annotated[Words | None, Parameter(help="Any setting: <path>=<value>; repeatable.")] = None,
    common: Common = PLAIN,
) -> None:
    """Show every setting with its value and source."""
    stated = Stated(
        overrides=tuple(set or ()),
        environ=dict(os.environ),
        cwd=os.getcwd(),
        config=common.config,
        state_dir=common.state_dir,
    )
    explicit = places.explicit_document(stated.config, stated.environ, stated.cwd)
    root = places.stated_state_root(stated.state_dir, stated.environ, stated.cwd)
    where = places.Places(root or places.default_state_root(stated.environ))
    chosen = _role(role, explicit[0] if explicit else None, where)
    if chosen == "standalone":
        settings = effective(stated)
        for notice in settings.notices:
            note(notice)
        document, rows = settings.document_path, settings.rows
        differs = running.other(settings)
        if differs is not None:
            note(differs.line)
    else:
        document = explicit[0] if explicit else places.read_line(where.document_record) or where.document(chosen)
        rows = kinds.rows_of(chosen, document, stated.overrides, stated.environ)
    if common.as_json:
        listed = [{"path": row.path, "value": row.value, "source": row.source} for row in rows]
        emit_json({"role": chosen, "document": document, "settings": listed})
        return
    say(f"{chosen} (document {document}{'' if os.path.exists(document) else ', not written yet'})")
    listed_rows = [TITLES, *((row.path, row.text, row.source) for row in rows)]
    if not sys.stdout.isatty():
        table(TITLES, listed_rows[1:])
        return
    for line in fitted(listed_rows, shutil.get_terminal_size().columns):
        say(line)


def fitted(rows: Sequence[tuple[str, str, str]], columns: int) -> list[str]:
    """The rows as lines of at most `columns`: a value that is too long for its column has a line of its own.

    Wider than that are only what no line holds: long paths and values, which are never cut.
    """
    names, sources = (max(len(row[at]) for row in rows) for at in (0, 2))
    widest = max(len(row[1]) for row in rows)
    width = max(len(TITLES[1]), min(widest, columns - names - sources - 6))
    lines = []
    for name, value, source in rows:
        if len(value) > width:
            lines += [name, f"{f'  {value}'.rjust(names + 3 + width)}   {source}"]
        else:
            lines.append(f"{name.ljust(names)}   {value.ljust(width)}   {source}".rstrip())
    return lines


def _role(stated: str | None, explicit: str | None, where: places.Places) -> places.Role:
    """The role whose settings are meant: as stated, the document's kind, standalone where it is or is alone to be.

    A document that `init` wrote beside a standalone role belongs to no role that this release runs.
    """
    if stated is not None and stated not in places.ROLES:
        raise Refusal("invalid_config", f"--role {stated}: expected server, host or standalone")
    if explicit is not None:
        raw = kinds.read_file(explicit, explicit)
        kind = str(raw["kind"]) if raw.get("kind") == MANIFEST_KIND else kinds.kind_of(raw, explicit)
        if kind not in places.ROLES or stated not in (None, kind):
            raise Refusal("invalid_config", f"{explicit}: kind: is {kind}; expected {stated or 'a role document'}")
        stated = kind
    known = places.roles_known(where)
    for role in places.ROLES:
        if role == stated:
            return role
    if "standalone" in known or not known:
        return "standalone"
    if len(known) > 1:
        raise Refusal(
            "invalid_config",
            f"{' and '.join(known)} share {where.root}; choose with --role {' or --role '.join(known)}",
        )
    return known[0]
