"""The product's router and ingress in a process of their own, before one engine that is always ready.

`python -m benchmarks.router_process ENGINE_PORT` prints its port and serves until its standard input
ends. The desk gives every request a place at once: what is measured is the way of the bytes.
"""

from __future__ import annotations

import gc
import sys
from functools import partial

import attrs
import trio

from capyctl.fsm.types import DeploymentId, Generation, HostId, Incarnation, Lane, Millis, RequestId
from capyctl.host.ingress import Ingress
from capyctl.router import Arrival, Key, Keys, Model, Place, Waiting, build_app, serve

TOKEN = "benchmark-" + "k" * 32
INCARNATION = Incarnation(lane=Lane(deployment=DeploymentId("D"), index=0), generation=Generation(1))


@attrs.define(eq=False)
class ReadyTicket:
    """A place at once; reports are taken and forgotten."""

    request: RequestId
    route: str
    cut: trio.Event = attrs.field(factory=trio.Event)
    cut_error: tuple[str, str] | None = None

    async def place(self) -> Place:
        """The one engine."""
        return Place(incarnation=INCARNATION, host=HostId("H"), served_name=self.route, left_ms=Millis(600_000))

    def waiting(self) -> Waiting:
        """It never waits."""
        return Waiting(state="ready", position=0, estimate_s=0)

    def sent(self) -> None:
        """Nothing to do."""

    first_output = finished = sent

    def _reason(self, reason: object) -> None:
        """Nothing to do."""

    not_accepted = rejected = errored = upstream_lost = client_gone = _reason


class ReadyDesk:
    """Takes everything."""

    accepting = True

    def arrive(self, arrival: Arrival) -> ReadyTicket:
        """A ticket that is as good as a place."""
        return ReadyTicket(arrival.request, arrival.route)

    def models(self) -> list[Model]:
        """The one model."""
        return [Model(id="m", api="chat", created_s=1)]


async def run(engine_port: int) -> None:
    """Serve until standard input ends."""
    async with trio.open_nursery() as nursery:
        ingress = Ingress(lambda request, half_closed_at_ms, eof_at_ms: None)
        await nursery.start(ingress.run)
        ingress.admit(INCARNATION, engine_port, "engine-key")
        app = build_app(ReadyDesk(), ingress, Keys((Key.of("bench", TOKEN),)))
        addresses = await nursery.start(partial(serve, app, "127.0.0.1:0", stopping=trio.Event()))
        gc.freeze()
        print(addresses[0].rsplit(":", 1)[1], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(run, int(sys.argv[1]))
