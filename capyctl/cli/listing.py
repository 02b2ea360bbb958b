"""`list deployments | engines | hosts`: tables of what the role knows. Reading never starts a model.

Source: cli 8.3, 11.1, 12.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capyctl.cli.lifecycle import management
from capyctl.cli.output import PLAIN, Common, emit_json, note, say, table, yes
from capyctl.units import gib


def host_names(view: Mapping[str, Any]) -> str:
    """The hosts a deployment's instances are on, else those it may run on."""
    placed = [str(item.get("host") or item["host_id"]) for item in view.get("instances", ()) if item.get("host_id")]
    allowed = [str(host.get("name") or host.get("id")) for host in view.get("hosts", ())]
    return ",".join(dict.fromkeys(placed or allowed)) or "-"


def deployments(*, common: Common = PLAIN) -> None:
    """List deployments with their states."""
    views = sorted(management(common).deployments(), key=lambda view: str(view.get("name")))
    if common.as_json:
        emit_json({"api_version": "1", "deployments": views})
        return
    titles = ("NAME", "STATE", "READY", "REVISION", "HOSTS")
    table(
        titles,
        (
            (
                str(view["name"]),
                str(view.get("observed_state")),
                str(view.get("ready")),
                str(view.get("revision")),
                host_names(view),
            )
            for view in views
        ),
        none="There are no deployments. Try: capyctl deploy model <file>",
    )
    kept = [str(view["name"]) for view in views if is_kept_stopped(view)]
    if kept:
        note(
            f"Stopped by an operator, and refusing requests until `capyctl start deployment <name>`: {', '.join(kept)}"
        )


def is_kept_stopped(view: Mapping[str, Any]) -> bool:
    """An operator stopped it: requests start what a switch, a drain or idleness stopped, and not this."""
    return view.get("desired_state") == "stopped" and view.get("observed_state") in ("stopped", "failed")


def engines(*, common: Common = PLAIN) -> None:
    """List the engines that hosts offer."""
    answer = management(common).get("/engines")
    profiles = sorted(answer.get("engines", ()), key=lambda row: (str(row.get("host")), str(row.get("profile"))))
    if common.as_json:
        emit_json(answer)
        return
    titles = ("HOST", "PROFILE", "ENGINE", "VERSION", "CUSTOM", "DEEP PARK", "STATE", "DEPLOYMENTS")
    table(
        titles,
        (
            (
                str(row.get("host") or "-"),
                str(row.get("profile")),
                str(row.get("engine")),
                str(row.get("version") or "-"),
                yes(bool(row.get("custom"))),
                word(row.get("deep_park")),
                str(row.get("state") or "-"),
                ",".join(row.get("deployments") or ()) or "-",
            )
            for row in profiles
        ),
        none="No engine is registered. Try: capyctl engine detect",
    )


def word(value: Any) -> str:
    """`enabled` or `disabled`, whether the role said so in a word or as a truth value."""
    if isinstance(value, bool):
        return "enabled" if value else "disabled"
    return str(value) if value else "-"


def hosts(*, common: Common = PLAIN) -> None:
    """List hosts with their memory and engines."""
    api = management(common)
    answer = api.get("/hosts")
    if common.as_json:
        emit_json(answer)
        return
    # The host of a standalone role is the same program, so its version needs no report of its own.
    embedded = api.target.role == "standalone"
    version, fits = (str(answer.get("server_version") or "-"), "supported") if embedded else ("-", "-")
    titles = ("NAME", "STATE", "ELIGIBLE", "VERSION", "COMPATIBILITY", "MEMORY (FREE / TOTAL)", "ENGINES")
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    for host in sorted(answer.get("hosts", ()), key=lambda row: str(row.get("name"))):
        rows.append(
            (
                str(host.get("name") or host.get("id")),
                str(host.get("state")),
                yes(bool(host.get("eligible"))),
                str(host.get("binary_version") or version),
                str(host.get("compatibility") or fits),
                free_of_total(host),
                ",".join(host.get("engines") or ()) or "-",
            )
        )
        reasons = [host.get("compatibility_reason"), host.get("reason"), *(host.get("memory_warnings") or ())]
        notes.extend(f"{rows[-1][0]}: {reason}" for reason in reasons if reason)
    table(titles, rows)
    for line in notes:
        say(line)


def domains_of(host: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A host's memory domains: in its live session, or beside it."""
    session = host.get("session")
    found = session.get("domains") if isinstance(session, Mapping) else host.get("domains")
    return list(found or ())


def free_of_total(host: Mapping[str, Any]) -> str:
    """`46.8 GiB / 77.2 GiB`, one pair per domain."""
    pairs = []
    for domain in domains_of(host):
        free, total = domain.get("available_bytes"), domain.get("capacity_bytes")
        pairs.append(f"{gib(int(free)) if free is not None else '?'} / {gib(int(total)) if total is not None else '?'}")
    return ", ".join(pairs) or "-"
