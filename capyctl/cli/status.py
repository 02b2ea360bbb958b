"""`status`, `status deployment`, `inspect deployment | host`: what is going on, and why.

Source: cli 11.2, 11.3; decisions on what a stopped model shows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from capyctl.cli.lifecycle import ended, management, startup_cell
from capyctl.cli.listing import domains_of, host_names
from capyctl.cli.output import (
    PLAIN,
    Common,
    context_note,
    emit_json,
    first_line,
    key_lines,
    memory,
    say,
    summary,
    table,
)
from capyctl.cli.progress import being_measured, downloaded
from capyctl.errors import Refusal
from capyctl.units import gib, seconds

PHASES = {"cold": "start", "ready": "ready", "parking": "parking", "parked": "parked", "wake": "waking"}
"""A phase of the ledger and its word in status."""

CHARGES = {"cold": "starting", "wake": "waking"}
"""A charge's phase and its word for people, where that is another: what `STATE` says of the instance."""

LEAVING = ("starting", "waking", "draining", "parking", "stopping")
"""States of an instance that is to end and has not: it may still answer."""

LAST_WORDS = 8
"""Lines of a failed engine's log that `status` shows; `--json` has them all, and the log file is whole."""


def deployment(name: str, /, *, common: Common = PLAIN) -> None:
    """Show a deployment: its instances, what it waits for, what failed."""
    api = management(common)
    view = api.deployment(name)
    if common.as_json:
        (told,) = api.get(f"/metrics/latency?deployment={view['id']}")["deployments"]
        emit_json({**view, "latency": told["instances"]})
        return
    operation = view.get("latest_operation")
    initialize = view.get("initialize_ms")
    table(
        ("NAME", "STATE", "READY", "REVISION", "STARTUP", "INITIALIZE", "LAST OPERATION"),
        [
            (
                str(view["name"]),
                str(view.get("observed_state")),
                str(view.get("ready")),
                str(view.get("revision")),
                startup_cell(view),
                seconds(int(initialize)) if initialize else "-",
                ended(operation) if operation else "-",
            )
        ],
    )
    rows, known = view.get("instances", ()), (view.get("checkpoint") or {}).get("reason")
    say()
    table(
        ("INSTANCE", "HOST", "STATE", "LIFECYCLE", "DEVICES", "LAST ERROR"),
        (
            (
                str(row.get("index")),
                str(row.get("host") or row.get("host_id") or "-"),
                str(row.get("observed_state")),
                str(row.get("lifecycle") or "-"),
                ",".join(row.get("devices") or ()) or "-",
                last_error(row.get("last_error"), known if len(rows) > 1 else None),
            )
            for row in rows
        ),
    )
    lines = applying(view)
    if lines:
        say()
        key_lines(lines)
    if view.get("residency") in ("deep", "host_backed"):
        say()
        say("Parking uses control routes of the engine, on loopback and behind a key that each launch alone has.")


def last_error(error: Mapping[str, Any] | None, known: str | None = None) -> str:
    """`<code>: <reason>` on one line; the engine's own lines have a block of their own.

    `known`: the checkpoint's reason, which stands below the table once, and not in the row of each instance.
    """
    if not error:
        return "-"
    if known is not None and error.get("message") == known:
        return f"{error.get('code')}: see Checkpoint"
    return f"{error.get('code')}: {first_line(error.get('message'))}"


def last_words(error: Mapping[str, Any] | None) -> list[str]:
    """The last lines that the engine wrote before it failed."""
    return str(error.get("message")).splitlines()[1:] if error else []


def applying(view: Mapping[str, Any]) -> dict[str, str]:
    """The key lines of block 4: only what applies."""
    lines: dict[str, str] = {}
    if view.get("waiting"):
        lines["Waiting"] = str(view["waiting"])
    if view.get("observed_state") == "starting" and view.get("initialize_ms"):
        lines["Bound"] = f"ready within {seconds(int(view['initialize_ms']))} of its start"
    checkpoint = view.get("checkpoint") or {}
    state, reason = checkpoint.get("state"), checkpoint.get("reason")
    if state == "materializing":
        lines["Checkpoint"] = f"being downloaded: {downloaded(checkpoint.get('download') or {})}"
    elif state in ("pending", "measuring"):
        lines["Checkpoint"] = being_measured(checkpoint)
    elif reason:
        lines["Checkpoint"] = f"{state}: {reason}"
    profile, version = view.get("profile"), view.get("engine_version")
    if profile:
        lines["Engine"] = f"{profile} {version}" if version else str(profile)
        if view.get("engine_note"):
            lines["Engine"] += f"; {view['engine_note']}"
    lines |= residency_line(view)
    context, facts = view.get("context"), view.get("facts") or {}
    if context:
        why = context.get("reason")
        lines["Context"] = f"{context.get('tokens')} tokens{f', {why}' if why else ''}{context_note(facts)}"
    if facts.get("host_options"):
        lines["Options"] = f"take {facts['host_options']}, charged in every phase"
    if facts.get("running_limited"):
        lines["Running"] = str(facts["running_limited"]).removeprefix("Running ")
    if view.get("parsers"):
        lines["Parsers"] = parser_line(view["parsers"])
    ends: dict[str, list[str]] = {}
    for row in view.get("instances", ()):
        if row.get("stopped"):
            ends.setdefault(_how_far(row), []).append(_stopped(row["stopped"]))
    lines |= {word: "\n".join(dict.fromkeys(why)) for word, why in ends.items()}
    parked = [text for row in view.get("instances", ()) for text in (*_sleeps(row), *_stops_instead(row))]
    if parked:
        lines["Parked"] = "\n".join(parked)
    words = [line for row in view.get("instances", ()) for line in last_words(row.get("last_error"))]
    if words:
        lines["Last words"] = "\n".join(words[-LAST_WORDS:])
    sized = _memory(view.get("memory") or ())
    if sized:
        lines["Memory"] = "\n".join(sized)
    charged = Counter(_charge(row) for row in view.get("ledger", ()))
    if charged:
        lines["Charged"] = "\n".join(text if n == 1 else f"{n} x {text}" for text, n in charged.items())
    text = _requests(view.get("requests") or {})
    if text:
        lines["Requests"] = text
    return lines


PARSER_WORDS = {"tool_call": "tool calls", "reasoning": "reasoning"}
PARSER_SOURCES = {
    "declared": "declared",
    "off": "turned off",
    "extra_args": "extra_args say it",
    "host_fixed": "the host's arguments say it",
    "model_family": "by model family",
    "unsupported": "its chat template has none",
    "unknown_family": "no default for this model family",
}
"""Where a parser comes from, and how people read it."""


def parser_line(parsers: Mapping[str, Mapping[str, Any]]) -> str:
    """`tool calls hermes (by model family), reasoning none (turned off)`."""
    rows = [(words, parsers[kind]) for kind, words in PARSER_WORDS.items() if kind in parsers]
    return ", ".join(
        f"{words} {one.get('name')} ({PARSER_SOURCES.get(str(one.get('source')), one.get('source'))})"
        for words, one in rows
    )


def residency_line(view: Mapping[str, Any]) -> dict[str, str]:
    """Why an engine that could be parked elsewhere is not here; nothing for families of which none parks."""
    reason = view.get("residency_reason")
    if not reason or view.get("residency") != "restart_only" or str(reason).endswith(" cannot park"):
        return {}
    return {"Residency": f"restart_only: {reason}"}


def _memory(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """`gpu0: start 16.2 GiB measured, ready/parking/waking 15.1 GiB derived, parked 1.0 GiB placeholder`, a line per
    domain. After the start, phases that are charged the same for the same reason stand together.
    """
    domains: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        domains.setdefault(str(row["domain"]), {})[str(row["phase"])] = row
    return [f"{domain}: {', '.join(_phases(phases))}" for domain, phases in sorted(domains.items())]


def _phases(phases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    told: dict[tuple[bool, str], list[str]] = {}
    for phase, word in PHASES.items():
        if phase in phases:
            told.setdefault((phase == "cold", _figure(phases[phase])), []).append(word)
    return [f"{'/'.join(words)} {figure}" for (_, figure), words in told.items()]


def _figure(row: Mapping[str, Any]) -> str:
    """`1.0 GiB placeholder`; a measurement is said where it is not what is charged: `1.0 GiB measured as 0.5 GiB`."""
    note, measured = str(row["provenance"]), row.get("measured_bytes")
    if measured is not None and int(measured) != int(row["bytes"]):
        note += f" as {gib(int(measured))}"
    return f"{gib(int(row['bytes']))} {note}"


def _charge(row: Mapping[str, Any]) -> str:
    """`3.0 GiB ready on unified (derived)`; `…(measured: it holds more than the planned 2.0 GiB)`."""
    note, planned = str(row.get("provenance")), row.get("planned_bytes")
    if planned is not None:
        note += f": it holds more than the planned {gib(int(planned))}"
    return f"{gib(int(row['bytes']))} {charged_as(row)} on {row.get('domain')} ({note})"


def charged_as(row: Mapping[str, Any]) -> str:
    """The phase that a row of the ledger is charged for: `starting`, `ready`."""
    return CHARGES.get(str(row.get("phase")), str(row.get("phase")))


def _sleeps(row: Mapping[str, Any]) -> list[str]:
    """`instance 0: 3 min ago, for notes (switch 01N…)`: since when it is parked, and who asked for it."""
    slept = row.get("sleeps")
    if not slept:
        return []
    kind = slept.get("kind")
    why = _stopped(slept) if slept.get("for") else f"by {kind}" if kind in ("operator", "preinitialize") else kind
    ago = age(int(slept["since_ms"]), time.time_ns() // 1_000_000)
    return [f"instance {row.get('index')}: {ago}" + (f", {why}" if why else "")]


def age(at_ms: int, now_ms: int) -> str:
    """`42s ago`, `3 min ago`, `5 h ago`, `2 days ago`."""
    passed = max(0, now_ms - at_ms) // 1000
    for unit, seconds_, below in (("s", 1, 120), (" min", 60, 7_200), (" h", 3_600, 172_800)):
        if passed < below:
            return f"{passed // seconds_}{unit} ago"
    return f"{passed // 86_400} days ago"


def _stops_instead(row: Mapping[str, Any]) -> list[str]:
    """Why a park of an instance is, or was, a stop: its copy outgrew the bound, or a cut request held its engine."""
    if (row.get("parked") or {}).get("growth"):
        return [f"instance {row.get('index')}: its copy outgrew the bound, the next park stops it"]
    if (row.get("stopped") or {}).get("kind") == "growth":
        return [f"instance {row.get('index')}: its copy outgrew the bound, so it was stopped instead"]
    if (row.get("stopped") or {}).get("kind") == "cut_request":
        return [f"instance {row.get('index')}: a cut request ended only with its engine, so it was stopped instead"]
    return []


def _how_far(row: Mapping[str, Any]) -> str:
    """The word for an instance that was told to end: what still drains gives way, and is not stopped yet."""
    if row.get("observed_state") not in LEAVING:
        return "Stopped"
    return "Gives way" if row["stopped"].get("for") else "Stopping"


def _stopped(stopped: Mapping[str, Any]) -> str:
    """`for notes (switch 01N…)`, `idle`, `operator`."""
    if stopped.get("for"):
        switch = stopped.get("switch_id")
        why = ", no room to park: see parked_limit" if stopped.get("no_room_to_park") else ""
        return f"for {stopped['for']}{f' (switch {switch})' if switch else ''}{why}"
    return str(stopped.get("kind"))


def _requests(requests: Mapping[str, Any]) -> str:
    words = (
        ("in_flight", "in flight"),
        ("waiting", "waiting"),
        ("settle_when_idle", "cancelled, settle when the engine is idle"),
        ("settle_at_stop", "cancelled, settle at the next stop"),
    )
    return ", ".join(f"{requests[name]} {text}" for name, text in words if requests.get(name))


def overview(*, common: Common = PLAIN) -> None:
    """Show the role that answers here, its listeners and its memory."""
    api = management(common)
    installation = api.get("/installation")
    hosts = api.get("/hosts").get("hosts", ())
    if common.as_json:
        emit_json({**installation, "hosts": hosts})
        return
    role = installation.get("role") or api.target.role
    pairs = {"Management": api.target.address}
    inference = installation.get("inference")
    if isinstance(inference, Mapping):
        key = "(API key required)" if inference.get("authentication") == "api_key" else "(no API key)"
        pairs = {"Inference": f"{inference.get('address')} {key}", **pairs}
    pairs["State"] = str(installation.get("state_dir") or api.target.places.root)
    for host in hosts:
        for domain in domains_of(host):
            pairs[f"Memory {domain.get('domain_id')}"] = _domain(domain)
    summary(f"capyctl {installation.get('version')} {role}", pairs)
    warnings = [str(text) for host in hosts for text in host.get("memory_warnings") or ()]
    if warnings:
        say()
        for text in warnings:
            say(text)
    if isinstance(inference, Mapping) and inference.get("authentication") != "api_key":
        say()
        say(f"inference: unauthenticated on {inference.get('address')}")


def _domain(domain: Mapping[str, Any]) -> str:
    words = (
        ("charged_bytes", "charged"),
        ("managed_limit", "managed limit"),
        ("available_bytes", "free"),
        ("capacity_bytes", "total"),
    )
    figures = [f"{gib(int(domain[name]))} {text}" for name, text in words if domain.get(name) is not None]
    if domain.get("available_bytes") is None:
        figures.append("not observed now")
    asleep = sum(int(owner["bytes"]) for owner in domain.get("owners") or () if owner["phase"] == "parked")
    if asleep:
        figures.insert(1, f"{gib(asleep)} of it parked (limit {gib(int(domain.get('parked_limit') or 0))})")
    owners = [f"{owner['name']} {gib(int(owner['bytes']))} {charged_as(owner)}" for owner in domain.get("owners") or ()]
    return "\n".join((", ".join(figures), *owners))


def inspect_deployment(name: str, /, *, common: Common = PLAIN) -> None:
    """Show the full record of a deployment."""
    view = management(common).deployment(name)
    if common.as_json:
        emit_json(view)
        return
    pairs = flat(view, skip=("document", "hosts"))
    pairs["hosts"] = host_names(view)
    summary(f"Deployment {view['name']}", pairs)


def inspect_host(name: str, /, *, common: Common = PLAIN) -> None:
    """Show the full record of a host."""
    for host in management(common).get("/hosts").get("hosts", ()):
        if name in (host.get("name"), host.get("id")):
            if common.as_json:
                emit_json(host)
            else:
                summary(f"Host {host.get('name') or host.get('id')}", flat(host))
            return
    raise Refusal("not_found", f"there is no host {name}; `capyctl list hosts` shows them")


def flat(record: Mapping[str, Any], skip: tuple[str, ...] = ()) -> dict[str, str]:
    """A record as key lines: nested names joined by dots, bytes for people beside the exact number."""
    lines: dict[str, str] = {}

    def add(value: Any, path: str) -> None:
        if isinstance(value, Mapping) and value:
            for key, item in value.items():
                add(item, f"{path}.{key}" if path else str(key))
        elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
            for index, item in enumerate(value):
                add(item, f"{path}[{index}]")
        elif isinstance(value, list):
            lines[path] = ",".join(str(item) for item in value) or "-"
        elif value is None or value == {}:
            lines[path] = "-"
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            exact = any(word.endswith(("bytes", "_limit", "_reserve")) for word in path.split("."))
            lines[path] = f"{text} ({memory({'it': value})})" if exact and text.isdigit() else text

    for name, value in record.items():
        if name not in skip:
            add(value, name)
    return lines
