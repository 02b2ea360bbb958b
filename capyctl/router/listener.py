"""The inference listener: sockets, connections, and an orderly end."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Sequence
from functools import partial
from typing import Final

import attrs
import trio
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext

from capyctl.errors import Refusal
from capyctl.router.app import Router
from capyctl.router.connection import HEAD_BYTES_MAX, Bounds, Connection, place_of

LOG: Final = logging.getLogger("capyctl.router")

GRACE_SECONDS: Final = 2.0
CONNECTIONS_MAX: Final = 2048
BACKLOG: Final = 512
# What the kernel holds for a client that reads slowly. Small, so that a reader which has stopped is
# noticed after seconds of output instead of minutes, and memory stays bounded.
SEND_BUFFER_BYTES: Final = 256 * 2**10
KEEP_ALIVE_SECONDS: Final = (15, 5, 3)  # idle, between probes, probes: a vanished client is seen within 30 s


@attrs.define(eq=False)
class Listener:
    """The connections of one listener."""

    app: Router
    config: Config
    bounds: Bounds
    connections_max: int = CONNECTIONS_MAX
    context: WorkerContext = attrs.field(factory=lambda: WorkerContext(None))
    connections: set[Connection] = attrs.field(factory=set)

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one accepted connection. Never raises: a fault of one client ends nobody else."""
        if len(self.connections) >= self.connections_max:
            await stream.aclose()
            return
        connection = Connection(self.app, self.config, self.context, self.bounds, stream)
        self.connections.add(connection)
        try:
            await connection.run()
        except* Exception as failed:
            LOG.error("connection.failed", extra={"fields": {"error": place_of(failed)}})
        finally:
            self.connections.discard(connection)


async def serve(
    app: Router,
    bind: str | Sequence[str],
    *,
    stopping: trio.Event,
    hurry: trio.Event | None = None,
    alone: trio.Event | None = None,
    drain_seconds: float = 30.0,
    bounds: Bounds | None = None,
    connections_max: int = CONNECTIONS_MAX,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` on `bind` (`ip:port`, port 0 for any) until `stopping` is set and what runs has ended.

    `started` gets the bound addresses. Once stopping, new requests get 503; after `drain_seconds`, or
    when `hurry` is set, the rest is told so and cut, with two seconds of grace. `alone` is set when nobody gives
    places any more: what waits for one is told so at once, and what has one goes on. A client beyond
    `connections_max` is hung up on.
    Raises: Refusal(`port_conflict` | `invalid_config`) when an address cannot be bound.
    """
    bounds = bounds or Bounds()
    config = _config([bind] if isinstance(bind, str) else list(bind))
    listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(sock)) for sock in _sockets(config, bounds)]
    listener = Listener(app, config, bounds, connections_max)
    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            accepting.start_soon(partial(trio.serve_listeners, listener.handle, listeners, handler_nursery=connections))
            task_status.started([_address(each.socket.getsockname()) for each in listeners])
            await stopping.wait()
            app.closing = True
            await listener.context.terminated.set()
            await _drain(app, drain_seconds, hurry, alone)
            accepting.cancel_scope.cancel()
        app.cut_all()
        with trio.move_on_after(GRACE_SECONDS):
            await app.drained()
        for connection in tuple(listener.connections):
            connection.abort()
        connections.cancel_scope.cancel()


async def _drain(app: Router, seconds: float, hurry: trio.Event | None, alone: trio.Event | None) -> None:
    with trio.move_on_after(seconds) as patience:
        async with trio.open_nursery() as nursery:
            if hurry is not None:

                async def hurried() -> None:
                    await hurry.wait()
                    patience.cancel()

                nursery.start_soon(hurried)
            if alone is not None:

                async def left_alone() -> None:
                    await alone.wait()
                    app.cut_waiting()

                nursery.start_soon(left_alone)
            await app.drained()
            nursery.cancel_scope.cancel()


def _config(binds: list[str]) -> Config:
    config = Config()
    config.bind = binds
    config.backlog = BACKLOG
    config.accesslog = None
    config.errorlog = LOG
    config.include_server_header = False
    config.h11_max_incomplete_size = HEAD_BYTES_MAX
    config.keep_alive_max_requests = 2**31
    return config


def _sockets(config: Config, bounds: Bounds) -> list[socket.socket]:
    try:
        sockets = config.create_sockets().insecure_sockets
        for sock in sockets:
            # Accepted sockets take these over. Engines must not inherit the listener.
            sock.set_inheritable(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            idle, between, probes = KEEP_ALIVE_SECONDS
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(bounds.stall_seconds * 1000))
            sock.listen(config.backlog)
    except OSError as error:
        where = ", ".join(config.bind)
        code = "port_conflict" if error.errno == errno.EADDRINUSE else "invalid_config"
        raise Refusal(code, f"cannot listen on {where}: {error.strerror or error}") from None
    return sockets


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> str:
    host, port = name[0], name[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
