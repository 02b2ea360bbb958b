"""The management listener: one loopback address, bound before anything is promised."""

from __future__ import annotations

import errno
import logging
import socket
from typing import Any, Final

import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from quart_trio import QuartTrio

from capyctl.errors import Refusal

HEAD_BYTES_MAX: Final = 16 << 10
HEAD_S: Final = 5.0
BACKLOG: Final = 128
GRACE_S: Final = 2.0


async def serve_management(
    app: QuartTrio,
    host: str,
    port: int,
    *,
    stopping: trio.Event,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve on `host:port` (port 0 for any) until `stopping`; `started` gets the bound address.

    Raises: Refusal `unavailable` when the port is taken, `invalid_config` for any other trouble with the address.
    """
    listener = _bind(host, port)
    bound = listener.getsockname()
    address = f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"
    config = Config()
    config.bind = [f"fd://{listener.fileno()}"]
    config.accesslog = None
    config.errorlog = _http_log()
    config.include_server_header = False
    config.h11_max_incomplete_size = HEAD_BYTES_MAX
    config.keep_alive_timeout = HEAD_S
    config.graceful_timeout = GRACE_S
    async with trio.open_nursery() as nursery:
        await nursery.start(_serve, app, config, stopping)
        listener.set_inheritable(False)  # Hypercorn makes it so; an engine must not inherit it
        listener.detach()  # Hypercorn owns the descriptor now, and closes it
        task_status.started(address)


async def _serve(
    app: QuartTrio, config: Config, stopping: trio.Event, *, task_status: trio.TaskStatus[list[str]]
) -> None:
    await serve(_sends_whole(app), config, shutdown_trigger=stopping.wait, task_status=task_status, mode="asgi")


def _sends_whole(app: QuartTrio) -> Any:  # Any: an ASGI application, as Hypercorn types it
    """The application, its sends finished once begun.

    With the last of an answer Hypercorn tells the application that the exchange is over and then closes the
    connection, if it is to close. Quart ends the sending task at that word, and the close was never made.
    """

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        async def send_whole(message: Any) -> None:
            with trio.CancelScope(shield=True):
                await send(message)

        await app(scope, receive, send_whole)

    return whole


def _http_log() -> logging.Logger:
    """Hypercorn says where it runs and names other people's mistakes; only warnings are of interest."""
    logger = logging.getLogger("capyctl.management.http")
    logger.setLevel(logging.WARNING)
    return logger


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as wrong:
        listener.close()
        if wrong.errno == errno.EADDRINUSE:
            raise Refusal(
                "unavailable",
                f"the management listener cannot use {host}:{port}: another program listens there; "
                "end it, or name another address with --management-listen",
            ) from None
        raise Refusal("invalid_config", f"cannot listen for management on {host}:{port}: {wrong.strerror}") from None
    return listener
