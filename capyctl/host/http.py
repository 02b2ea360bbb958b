"""Questions to an engine: health, models, metrics, the probe. Bounded in time and size, one connection each."""

from __future__ import annotations

import attrs
import trio

from capyctl.host import wire

ANSWER_S = 5.0
ANSWER_BYTES = 4 << 20


@attrs.frozen(kw_only=True)
class LoopbackClient:
    """`engines.adapter.Client` over loopback, with the launch's keys."""

    port: int
    key: str = attrs.field(repr=False)
    admin_key: str = attrs.field(default="", repr=False)
    limit_s: float = ANSWER_S

    async def get(self, path: str, *, admin: bool = False) -> tuple[int, bytes]:
        """(status, body). Raises: ConnectionError, TimeoutError."""
        return await self._ask(b"GET", path, b"", self.limit_s, admin)

    async def post(
        self, path: str, body: bytes, limit_s: float | None = None, *, admin: bool = False
    ) -> tuple[int, bytes]:
        """(status, body). Raises: ConnectionError, TimeoutError."""
        return await self._ask(b"POST", path, body, self.limit_s if limit_s is None else limit_s, admin)

    async def _ask(self, method: bytes, path: str, body: bytes, limit_s: float, admin: bool) -> tuple[int, bytes]:
        with trio.move_on_after(limit_s):
            try:
                return await self._exchange(method, path, body, self.admin_key if admin else self.key)
            except wire.WireBroken as broken:
                raise ConnectionError(str(broken)) from broken
            except OSError as error:
                raise ConnectionError(f"port {self.port} on loopback: {error.strerror}") from error
        raise TimeoutError(f"no answer to {path} within {limit_s:g} s")

    async def _exchange(self, method: bytes, path: str, body: bytes, key: str) -> tuple[int, bytes]:
        connection = await wire.connect(self.port)
        try:
            await connection.send(head(self.port, key, body, close=True), method, path.encode("ascii"), body)
            status, _ = await connection.head()
            answer = bytearray()
            while piece := await connection.receive_some():
                answer += piece
                if len(answer) > ANSWER_BYTES:
                    raise wire.WireBroken(f"the answer to {path} is over {ANSWER_BYTES} bytes")
            return status, bytes(answer)
        finally:
            connection.close()


def head(port: int, key: str, body: bytes, *, close: bool = False) -> list[tuple[bytes, bytes]]:
    """Everything that an engine is told beside the body; nothing of a client's own headers."""
    fields = [(b"Host", f"127.0.0.1:{port}".encode()), (b"Accept", b"*/*")]
    if key:
        fields.append((b"Authorization", f"Bearer {key}".encode()))
    if body:
        fields += [(b"Content-Type", b"application/json"), (b"Content-Length", str(len(body)).encode())]
    if close:
        fields.append((b"Connection", b"close"))
    return fields
