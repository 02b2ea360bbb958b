"""Runs the ASGI middleware that a launch names, around one request, without an event loop.

A middleware that only awaits the application and `send`, as a key guard does, never suspends, so its
coroutine is stepped by hand. One that waits for anything else cannot be run here, and says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .http import Reply, Request


def load(name: str) -> Callable[[Any], Any]:
    """`module.object`. Raises: ImportError, AttributeError."""
    module, _, attribute = name.rpartition(".")
    found: Callable[[Any], Any] = getattr(importlib.import_module(module), attribute)
    return found


def through(middlewares: list[Callable[[Any], Any]], request: Request, reply: Reply, port: int) -> bool:
    """Whether the request comes through to the application; else the middleware has answered it."""
    reached = False

    async def application(scope: Any, receive: Any, send: Any) -> None:
        nonlocal reached
        reached = True

    app: Any = application
    for middleware in middlewares:
        app = middleware(app)
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
        "method": request.method, "path": request.path, "raw_path": request.target.partition("?")[0].encode(),
        "query_string": request.query_text.encode(), "root_path": "", "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", port), "state": {},
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers.items()],
    }  # fmt: skip
    status, headers, body = 500, {}, b""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, body
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update({name.decode(): value.decode() for name, value in message.get("headers", [])})
        else:
            body += message.get("body", b"")

    try:
        app(scope, receive, send).send(None)
    except StopIteration:
        pass  # it ran to its end
    else:
        raise RuntimeError("the middleware waits for something that is no request")
    if not reached:
        for name in ("content-length", "content-type"):
            headers.pop(name, None)
        reply.extra_headers |= headers
        reply.send(status, body)
    return reached
