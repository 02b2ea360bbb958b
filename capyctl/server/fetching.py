"""Models that are on their way to hosts: asked for, shown, and called off. How far they are is no part of the world.

A host fetches each source once, whoever asks; here is which deployment asked for what. The world sees a measurement
that takes long. Source: lifecycle 15; api 7.6-7.9; cli 14.1.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import trio

from capyctl.checkpoints import sources
from capyctl.clock import Clock
from capyctl.control import events, orders
from capyctl.control.book import Book
from capyctl.control.spelling import size
from capyctl.errors import CapyError
from capyctl.fsm.types import DeploymentId, HostId
from capyctl.server.log import Log
from capyctl.server.measuring import answered, deployment_of, spec_of, unusable
from capyctl.session import messages as m

log = Log("fetching")


@attrs.define(eq=False)
class _Asked:
    """One command that is being performed, and what was last heard of it."""

    deployment: DeploymentId
    revision: int
    host: HostId
    seen: m.SourceProgress | None = None


@attrs.define(eq=False, repr=False)
class Fetching:
    """Downloads in progress, by command. `book` is read, never written; `call` raises as `hosts.Link.call`."""

    book: Book
    clock: Clock
    call: Callable[[HostId, m.Command], Awaitable[m.Result]]
    _asked: dict[str, _Asked] = attrs.field(factory=dict)

    async def fetch(self, order: orders.Measure) -> events.Event | None:
        """Have every source of a revision on its hosts. None once one host has them; the others are refused later.

        What an earlier revision of the deployment still fetches is called off.
        """
        try:
            spec = spec_of(self.book, order.deployment, order.revision)
            document = deployment_of(spec)
            refusals: dict[HostId, CapyError] = {}
            if sources.fetched(document, spec.traits.family):
                async with trio.open_nursery() as nursery:
                    for host in spec.hosts:
                        nursery.start_soon(self._on_host, host, order, spec.document, spec.traits.family, refusals)
                    nursery.start_soon(self.stop, order.deployment, order.revision)
            else:
                await self.stop(order.deployment, order.revision)
            if len(refusals) < len(spec.hosts) or not refusals:
                return None
            raise next(refusals[host] for host in spec.hosts if host in refusals)  # the same one each time
        except CapyError as wrong:
            return unusable(order, wrong, self.clock())

    async def _on_host(
        self, host: HostId, order: orders.Measure, document: str, family: str, refusals: dict[HostId, CapyError]
    ) -> None:
        identity = f"fetch:{order.deployment}#{order.revision}@{self.clock()}:{host}"
        command = m.MaterializeSource(command_id=identity, document=json.loads(document), family=family)
        self._asked[identity] = _Asked(order.deployment, order.revision, host)
        try:
            answered(host, command, await self.call(host, command), m.Materialized)
        except CapyError as wrong:
            refusals[host] = wrong
        finally:
            del self._asked[identity]

    async def stop(self, deployment: DeploymentId, but: int | None = None) -> None:
        """Call off what is fetched for a deployment, for every revision or for all `but` one."""
        for identity, asked in list(self._asked.items()):
            if asked.deployment == deployment and asked.revision != but:
                command = m.StopMaterializing(command_id=f"stop:{identity}", materialize=identity)
                try:
                    await self.call(asked.host, command)
                except CapyError as wrong:  # it is fetched for nobody, and is there for whoever wants it next
                    log.debug("fetch.goes_on", deployment=deployment, why=wrong.message)

    async def sources(self, host: HostId, *, prune: bool = False) -> list[dict[str, Any]]:
        """What a host has downloaded, with the deployments that refer to it; with `prune` what was removed of it.

        Raises: CapyError.
        """
        users: dict[str, list[str]] = {}
        for row in self.book.deployments.values():
            document = deployment_of(row.spec)
            for source, wanted in sources.fetched(document, row.spec.traits.family):
                users.setdefault(sources.place_of(source, wanted), []).append(row.spec.name)
        command = m.PruneSources(command_id=f"sources:{host}@{self.clock()}", kept=tuple(users) if prune else None)
        found = answered(host, command, await self.call(host, command), m.Sources)
        return [
            {
                "host_id": host,
                "place": one.place,
                "bytes": size(one.bytes),
                "complete": one.complete,
                "deployments": sorted(users.get(one.place, ())),
            }
            for one in found.sources
        ]

    def heard(self, report: m.SourceProgress) -> None:
        """How far one of them is."""
        asked = self._asked.get(report.materialize)
        if asked is not None:
            asked.seen = report

    def progress(self, deployment: DeploymentId) -> list[dict[str, Any]]:
        """What is fetched for a deployment now, a row per host. Bytes are None while nobody knows them."""
        return [
            {
                "host_id": asked.host,
                "phase": "asking" if asked.seen is None else asked.seen.phase,
                "done_bytes": 0 if asked.seen is None else asked.seen.done_bytes,
                "total_bytes": None if asked.seen is None else asked.seen.total_bytes,
            }
            for asked in self._asked.values()
            if asked.deployment == deployment
        ]
