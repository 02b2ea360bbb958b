"""`list memory`: every memory domain with its limits, and who holds how much of it.

Bars on a terminal, as wide as it is; plain columns elsewhere. Source: api 5.11, cli 4.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final

from cyclopts import Parameter

from capyctl.cli.lifecycle import management
from capyctl.cli.output import PLAIN, Common, emit_json, say, table
from capyctl.cli.status import charged_as
from capyctl.errors import Refusal
from capyctl.units import gib

BAR_LEAST: Final = 10
"""Columns below which a bar shows nothing; without room for it the figures stand alone."""
BAR_MOST: Final = 60
GIB: Final = 1 << 30
WORDS_LEAST: Final = 14
DOMAIN_TITLES: Final = ("HOST", "DOMAIN", "CHARGED", "LIMIT", "PARKED", "RESERVE", "FOREIGN", "FREE", "TOTAL")
HOLDER_TITLES: Final = ("HOST", "DOMAIN", "HOLDER", "PHASE", "CHARGED", "SOURCE", "RESIDENT")

Row = tuple[str, str, int | None, str]
"""A line under a domain: its words, its figure's text, the bytes of its bar, what is said after it."""

Figures = Callable[[Any], str]
"""How the amounts of one table are written, so that they can be compared by eye."""
DOMAIN_FIGURES: Final = (
    "reserved_bytes",
    "managed_limit",
    "parked_bytes",
    "free_reserve",
    "foreign_bytes",
    "available_bytes",
    "capacity_bytes",
)


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
    held = [(host, domain, holder) for host, domain in domains for holder in domain.get("holders", ())]
    whole = figures(domain.get(name) for _, domain in domains for name in DOMAIN_FIGURES)
    part = figures(holder.get(name) for _, _, holder in held for name in ("bytes", "resident_bytes", "planned_bytes"))
    table(
        DOMAIN_TITLES,
        (
            (str(host["name"]), str(domain["domain_id"]), *(whole(domain.get(name)) for name in DOMAIN_FIGURES))
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
                charged_as(holder),
                part(holder["bytes"]),
                _source(holder, part),
                part(holder.get("resident_bytes")),
            )
            for host, domain, holder in held
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
    width = max(len(row[1]) for row in rows)
    most = max(WORDS_LEAST, columns - width - BAR_LEAST - 5)
    words = min(most, max(len(row[0]) for row in rows))
    notes = max(len(row[3]) for row in rows)
    room = min(BAR_MOST, columns - words - width - notes - 8)
    if room < BAR_LEAST:  # what is said after it is worth less than the bar
        notes, room = 0, min(BAR_MOST, columns - words - width - 5)
    head = f"{domain['domain_id']} of {host['name']}, {gib(capacity)}"
    if domain.get("reason"):
        head += f": {domain['reason']}"
    lines = [head]
    for text, figure, amount, note in rows:
        line = f"  {_cut(text, words, full).ljust(words)}  {figure.rjust(width)}"
        if room >= BAR_LEAST:
            line += f" {bar(amount, capacity, room, full).ljust(room)}"
        lines.append(f"{line}  {note}" if notes else line)
    return [line.rstrip() for line in lines]


def _rows(domain: Mapping[str, Any]) -> Iterable[Row]:
    holders, parked = domain.get("holders", ()), int(domain.get("parked_bytes") or 0)
    seen = (("resident_bytes", "engines use"), ("foreign_bytes", "others use"), ("available_bytes", "free"))
    size = figures(
        [domain[name] for name in ("reserved_bytes", "managed_limit", "free_reserve")]
        + [parked, domain["parked_limit"] if parked else None, *(domain.get(name) for name, _ in seen)]
        + [holder.get(name) for holder in holders for name in ("bytes", "planned_bytes")]
    )
    charged = int(domain["reserved_bytes"])
    yield "charged", size(charged), charged, f"limit {size(domain['managed_limit'])}"
    for holder in holders:
        note = f"{charged_as(holder)}, {_source(holder, size)}"
        yield f"  {_name(holder)}", size(holder["bytes"]), int(holder["bytes"]), note
    if parked:
        yield "parked", size(parked), parked, f"limit {size(domain['parked_limit'])}"
    reserve = int(domain["free_reserve"])
    yield "reserve", size(reserve), reserve, "stays free"
    for name, word in seen:
        amount = domain.get(name)
        yield word, size(amount), None if amount is None else int(amount), ""


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


def figures(amounts: Iterable[Any]) -> Figures:
    """GiB with as many decimals, one to three, as it takes that none of these amounts reads as nothing."""
    given = [int(amount) for amount in amounts if amount is not None and int(amount)]
    least = min(given, default=GIB)
    decimals = next((count for count in (1, 2) if least * 10**count * 2 >= GIB), 3)

    def figure(amount: Any) -> str:
        if amount is None:
            return "-"
        steps = (int(amount) * 10**decimals * 2 + GIB) // (2 * GIB)
        if int(amount) and not steps:
            return f"<{1 / 10**decimals:.{decimals}f} GiB"
        return f"{steps // 10**decimals}.{steps % 10**decimals:0{decimals}d} GiB"

    return figure


def _source(holder: Mapping[str, Any], figure: Figures) -> str:
    planned = holder.get("planned_bytes")
    return str(holder["provenance"]) + (f", planned {figure(planned)}" if planned is not None else "")
