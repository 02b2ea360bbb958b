"""What the driver has hosts do beside their lanes: measuring, looks, aborts, readings, old logs.

None of it touches an engine's process or memory, so nothing here waits for a turn or for another. What the world waits
for has exactly one outcome, fed to it as an event, also when asking broke; the rest is asked for again by and by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs
import trio

from capyctl.clock import Clock
from capyctl.control import events, orders
from capyctl.server.log import Log
from capyctl.server.seams import CommitLike, Hosts

log = Log("driver")

MEASURES_MAX: Final = 2
"""Checkpoints digested at a time: they compete for one disk."""

Errand = (
    orders.Measure | orders.StopFetching | orders.VerifyStart | orders.PruneLogs | orders.ReadLoad | orders.ReadMemory
)


@attrs.define(eq=False, kw_only=True)
class Errands:
    """Runs them in the driver's nursery. `feed` is the driver's."""

    hosts: Hosts
    clock: Clock
    feed: Callable[[events.Event], None]
    _measures: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(MEASURES_MAX))

    async def run(self, order: Errand, commit: CommitLike) -> None:
        """Perform one: at once what only looks, everything else once the step that ordered it is durable."""
        if not isinstance(order, orders.VerifyStart | orders.ReadLoad | orders.ReadMemory):
            await commit.durable()
        match order:
            case orders.Measure():
                await self._measure(order)
            case orders.VerifyStart():
                await self._verify(order)
            case orders.StopFetching():
                await self._stop_fetching(order)
            case orders.PruneLogs():
                await self._prune_logs(order)
            case orders.ReadLoad() | orders.ReadMemory():
                await self._read(order)

    async def abort(self, order: orders.Abort) -> None:
        """Ask the engine to end a request, and feed what it answered."""
        answer: events.Event = self.unanswered(order)
        try:
            answer = await self.hosts.abort(order)
        except Exception as wrong:  # it is settled by an idle reading, or with its engine, all the same
            log.failed("abort.broken", wrong, request=order.request)
        finally:
            self.feed(answer)

    def unanswered(self, order: orders.Abort) -> events.AbortUnanswered:
        return events.AbortUnanswered(request=order.request, now_ms=self.clock())

    async def _measure(self, order: orders.Measure) -> None:
        try:
            measured = await self.hosts.fetch(order)  # bounded by the hosts themselves: it may take hours
            if measured is None:
                async with self._measures:
                    measured = await self.hosts.measure(order)
        except Exception as wrong:
            log.failed("measure.broken", wrong, deployment=order.deployment, revision=order.revision)
            measured = events.RevisionUnusable(
                deployment=order.deployment,
                revision=order.revision,
                code="internal",
                reason="measuring it failed inside CapyCTL; see the log",
                now_ms=self.clock(),
            )
        self.feed(measured)

    async def _verify(self, order: orders.VerifyStart) -> None:
        try:
            verified = await self.hosts.verify(order)
        except Exception as wrong:
            log.failed("verify.broken", wrong, deployment=order.deployment, revision=order.revision)
            verified = events.StartVerified(
                deployment=order.deployment,
                revision=order.revision,
                digest=order.digest,
                host=order.host,
                looked=False,
                reason="looking at it failed inside CapyCTL; see the log",
                now_ms=self.clock(),
            )
        self.feed(verified)

    async def _stop_fetching(self, order: orders.StopFetching) -> None:
        try:
            await self.hosts.stop_fetching(order)
        except Exception as wrong:  # it is fetched for nobody, and is there for whoever wants it next
            log.failed("fetch.goes_on", wrong, deployment=order.deployment)

    async def _prune_logs(self, order: orders.PruneLogs) -> None:
        try:
            await self.hosts.prune_logs(order)
        except Exception as wrong:  # they are asked for again when the host comes online next
            log.failed("logs.kept", wrong, host=order.host)

    async def _read(self, order: orders.ReadLoad | orders.ReadMemory) -> None:
        try:
            if isinstance(order, orders.ReadLoad):
                await self.hosts.read_load(order)
            else:
                await self.hosts.read_memory(order)
        except Exception as wrong:  # the host looks anyway, only later
            log.failed("look.unasked", wrong, order=type(order).__name__)
