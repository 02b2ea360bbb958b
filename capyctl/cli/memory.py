"""`list memory`: every memory domain with its limits, and who holds how much of it.

Bars on a terminal, as wide as it is; plain columns elsewhere. Source: api 5.11, cli 4.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from cyclopts import Parameter

from capyctl.cli.lifecycle import management
from capyctl.cli.output import PLAIN, Common, emit_json, say, table
from capyctl.errors import Refusal
from capyctl.units import gib

BAR_LEAST: Final = 10
"""Columns below which a bar shows nothing; without room for it the figures stand alone."""
BAR_MOST: Final = 60
WORDS_LEAST: Final = 14
DOMAIN_TITLES: Final = ("HOST", "DOMAIN", "CHARGED", "LIMIT", "PARKED", "RESERVE", "FOREIGN", "FREE", "TOTAL")
HOLDER_TITLES: Final = ("HOST", "DOMAIN", "HOLDER", "PHASE", "CHARGED", "SOURCE", "RESIDENT")

Row = tuple[str, str, int | None, str]
"""A line under a domain: its words, its figure's text, the bytes of its bar, what is said after it."""


def memory(
    *,
    host: Annotated[str | None, Parameter(help="Only this host, by name or id.")] = None,
    deployment: Annotated[str | None, Parameter(help="Only what this deployment holds, by name or id.")] = None,
    common: Common = PLAIN,
) -> None:
    """Show every memory domain: its limits, what is used, and who holds what."""
    api = management(common)
    query = []
    if host is not None:
        query.append(f"host={_host_id(api.get('/hosts').get('hosts', ()), host)}")
    if deployment is not None:
        query.append(f"deployment={api.deployment(deployment)['id']}")
    answer = api.get("/usage" + ("?" + "&".join(query) if query else ""))
    if common.as_json:
        emit_json(answer)
        return
    domains = [(row, domain) for row in answer.get("hosts", ()) for domain in row.get("domains", ())]
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        for number, (row, domain) in enumerate(domains):
            for line in (*([""] if number else []), *drawn(row, domain, columns, full=fills())):
                say(line)
    else:
        plain(domains)


def _host_id(hosts: Iterable[Mapping[str, Any]], name: str) -> str:
    for host in hosts:
        if name in (host.get("name"), host.get("id")):
            return str(host["id"])
    raise Refusal("not_found", f"there is no host {name}; `capyctl list hosts` shows them")


def fills() -> str:
    """What bars are drawn with: blocks where the terminal can show them."""
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#"
    return "#" if os.environ.get("TERM") == "dumb" else "█"


# --- plain columns ------------------------------------------------------------------------------------


def plain(domains: list[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """Two tables: the domains, and who holds what of them."""
    table(
        DOMAIN_TITLES,
        (
            (
                str(host["name"]),
                str(domain["domain_id"]),
                *(
                    _size(domain.get(name))
                    for name in (
                        "reserved_bytes",
                        "managed_limit",
                        "parked_bytes",
                        "free_reserve",
                        "foreign_bytes",
                        "available_bytes",
                        "capacity_bytes",
                    )
                ),
            )
            for host, domain in domains
        ),
    )
    say()
    table(
        HOLDER_TITLES,
        (
            (
                str(host["name"]),
                str(domain["domain_id"]),
                _name(holder),
                str(holder["phase"]),
                _size(holder["bytes"]),
                _source(holder),
                _size(holder.get("resident_bytes")),
            )
            for host, domain in domains
            for holder in domain.get("holders", ())
        ),
        none="No engine holds memory.",
    )


# --- bars -----------------------------------------------------------------------------------------------


def drawn(host: Mapping[str, Any], domain: Mapping[str, Any], columns: int, *, full: str) -> list[str]:
    """One domain as lines no wider than `columns`, as far as its figures allow; they are never cut.

    Every bar is of the domain's whole capacity. Long names give way to bars, and so do the notes behind them.
    """
    rows = [*_rows(domain)]
    capacity = int(domain["capacity_bytes"])
    figures = max(len(row[1]) for row in rows)
    most = max(WORDS_LEAST, columns - figures - BAR_LEAST - 5)
    words = min(most, max(len(row[0]) for row in rows))
    notes = max(len(row[3]) for row in rows)
    room = min(BAR_MOST, columns - words - figures - notes - 8)
    if room < BAR_LEAST:  # what is said after it is worth less than the bar
        notes, room = 0, min(BAR_MOST, columns - words - figures - 5)
    head = f"{domain['domain_id']} of {host['name']}, {gib(capacity)}"
    if domain.get("reason"):
        head += f": {domain['reason']}"
    lines = [head]
    for text, figure, amount, note in rows:
        line = f"  {_cut(text, words, full).ljust(words)}  {figure.rjust(figures)}"
        if room >= BAR_LEAST:
            line += f" {bar(amount, capacity, room, full).ljust(room)}"
        lines.append(f"{line}  {note}" if notes else line)
    return [line.rstrip() for line in lines]


def _rows(domain: Mapping[str, Any]) -> Iterable[Row]:
    charged, most = int(domain["reserved_bytes"]), int(domain["managed_limit"])
    yield "charged", _size(charged), charged, f"limit {gib(most)}"
    for holder in domain.get("holders", ()):
        amount = int(holder["bytes"])
        yield f"  {_name(holder)}", _size(amount), amount, f"{holder['phase']}, {_source(holder)}"
    parked = int(domain.get("parked_bytes") or 0)
    if parked:
        yield "parked", _size(parked), parked, f"limit {gib(int(domain['parked_limit']))}"
    reserve = int(domain["free_reserve"])
    yield "reserve", _size(reserve), reserve, "stays free"
    for name, word, note in (
        ("resident_bytes", "engines use", ""),
        ("foreign_bytes", "others use", ""),
        ("available_bytes", "free", ""),
    ):
        amount_seen = domain.get(name)
        yield word, _size(amount_seen), None if amount_seen is None else int(amount_seen), note


def _cut(text: str, width: int, full: str) -> str:
    """`a-long-na…`"""
    return text if len(text) <= width else text[: width - 1] + ("~" if full == "#" else "…")


def bar(amount: int | None, capacity: int, width: int, full: str) -> str:
    """`amount` of `capacity` over `width` columns: at least one for anything, never more than there are."""
    if not amount or capacity <= 0:
        return ""
    return full * max(1, min(width, round(width * amount / capacity)))


def _name(holder: Mapping[str, Any]) -> str:
    return f"{holder['name']}/{holder['index']}"


def _size(amount: Any) -> str:
    return "-" if amount is None else gib(int(amount))


def _source(holder: Mapping[str, Any]) -> str:
    planned = holder.get("planned_bytes")
    return str(holder["provenance"]) + (f", planned {gib(int(planned))}" if planned is not None else "")
