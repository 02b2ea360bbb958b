"""The role's figures as Prometheus text. Names carry their unit; a figure that is unknown is left out, never 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter

import attrs

from capyctl import __version__
from capyctl.control import naming
from capyctl.control.world import World
from capyctl.fsm import instance
from capyctl.fsm.types import Phase
from capyctl.server.desk import Desk


@attrs.define
class _Page:
    lines: list[str] = attrs.field(factory=list)

    def family(self, name: str, kind: str, text: str, rows: Iterable[tuple[Mapping[str, str], int]]) -> None:
        """One metric with its help, its type and its samples."""
        self.lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for labels, value in rows:
            inside = ",".join(f'{label}="{_escaped(word)}"' for label, word in labels.items())
            self.lines.append(f"{name}{{{inside}}} {value}" if inside else f"{name} {value}")


def render(world: World, desk: Desk, faults: int) -> str:
    """Every figure, in a fixed order."""
    book = world.book
    names = {identity: row.spec.name for identity, row in book.deployments.items()}
    page = _Page()
    page.family("capyctl_info", "gauge", "The release that answers.", [({"version": __version__}, 1)])
    page.family("capyctl_faults_total", "counter", "Events that CapyCTL itself could not take.", [({}, faults)])
    page.family(
        "capyctl_requests_total",
        "counter",
        "Requests that reached their outcome.",
        [({"deployment": name, "outcome": what}, count) for (name, what), count in sorted(desk.outcomes.items())],
    )
    page.family(
        "capyctl_requests_answered_total",
        "counter",
        "Requests that the role itself answered with a code.",
        [({"code": code}, count) for code, count in sorted(desk.refusals.items())],
    )
    queues = [(names[identity], queue) for identity, queue in book.traffic.queues.items() if identity in names]
    page.family(
        "capyctl_requests_running",
        "gauge",
        "Places held, cancelled requests that are not settled included.",
        [({"deployment": name}, len(queue.running)) for name, queue in queues],
    )
    page.family(
        "capyctl_requests_waiting",
        "gauge",
        "Requests that wait for a place.",
        [({"deployment": name}, len(queue.waiting)) for name, queue in queues],
    )
    page.family(
        "capyctl_instance_state",
        "gauge",
        "1 for the state that an instance is in.",
        [
            (
                {
                    "deployment": names[lane.deployment],
                    "instance": str(lane.index),
                    "state": instance.published(row.machine),
                },
                1,
            )
            for lane, row in sorted(book.instances.items())
            if lane.deployment in names
        ],
    )
    page.family("capyctl_memory_bytes", "gauge", "Memory of a host's domains.", _memory(world))
    page.family("capyctl_charged_bytes", "gauge", "What an owner is charged, by ledger phase.", _charges(world))
    return "\n".join(page.lines) + "\n"


def _memory(world: World) -> Iterable[tuple[Mapping[str, str], int]]:
    book = world.book
    for host, row in sorted(book.hosts.items()):
        for domain, policy in sorted(row.policy.domains.items()):
            labels = {"host": row.policy.name, "domain": domain}
            yield {**labels, "figure": "capacity"}, policy.capacity_bytes
            yield {**labels, "figure": "managed"}, policy.managed_bytes
            yield {**labels, "figure": "reserve"}, policy.reserve_bytes
            seen = book.seen.get(host, {}).get(domain)
            if seen is not None:
                yield {**labels, "figure": "available"}, seen.available_bytes


def _charges(world: World) -> Iterable[tuple[Mapping[str, str], int]]:
    book = world.book
    held = {naming.owner_name(book, owner): row for owner, row in book.ledger.rows() if row.phase is not Phase.NONE}
    for name, holding in sorted(held.items(), key=itemgetter(0)):
        deployment, _, index = name.rpartition("/")
        whose = {"owner": name} if name.startswith(naming.DEPLOYMENT) else {"deployment": deployment, "instance": index}
        for domain, amount in sorted(holding.allocation.bytes.items()):
            yield {**whose, "domain": domain, "phase": holding.phase.value}, amount


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
