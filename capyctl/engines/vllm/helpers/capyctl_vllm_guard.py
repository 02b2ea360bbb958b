"""The key guard of one launch, as vLLM's outermost ASGI layer: every route but `/health` takes a key.

The engine's own check covers four prefixes; everything else, control routes included, is open without this.
It is a class because a function would not be called for WebSockets.

This file imports nothing of CapyCTL: it is copied and runs in the engine's process.
Source: engines 6.3.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = frozenset({"/health"})
INFERENCE = ("/v1", "/v2", "/inference", "/cohere", "/metrics")
BODY = b'{"error":"Unauthorized"}'


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class KeyGuard:
    """Admits what carries the key of its route: inference and figures one, everything else the other.

    A key that the launch was not given opens nothing.
    """

    def __init__(self, app: Application) -> None:
        self.app = app
        keys = (os.environ.get("VLLM_API_KEY", ""), os.environ.get("CAPYCTL_VLLM_ADMIN_KEY", ""))
        self.inference, self.admin = (_digest(key) if key else None for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self.admits(str(scope.get("path", "")), scope.get("headers") or ()):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(BODY)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": BODY})

    def admits(self, path: str, headers: Any) -> bool:
        """Whether a request to this path carries the right key, exactly once."""
        if path in OPEN:
            return True
        inference = any(path == prefix or path.startswith(prefix + "/") for prefix in INFERENCE)
        wanted = self.inference if inference else self.admin
        sent = [value for name, value in headers if name.lower() == b"authorization"]
        if wanted is None or len(sent) != 1:
            return False
        scheme, _, key = sent[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(hashlib.sha256(key).digest(), wanted)
