"""The local control socket: engine commands of the role's own user, on the machine itself.

One JSON line in, one JSON line out, one request per connection. The peer's user is asked of the kernel
before a byte is read; whoever is neither the role's user nor root is closed unread. Nothing but the list
of engine profiles can be changed here.
Source: api 9.1; engines 2.9.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Any, Final, Protocol

import attrs
import trio

from capyctl.errors import CapyError, Refusal
from capyctl.router.body import strict_object
from capyctl.router.scan import NotStrict
from capyctl.server.log import Log

log = Log("control")

LINE_BYTES_MAX: Final = 64 << 10
READ_S: Final = 5.0
WRITE_S: Final = 10.0
CONNECTIONS_MAX: Final = 16
NAME_BYTES_MAX: Final = 107  # sun_path, with its closing zero
_UCRED: Final = struct.Struct("3i")


class Engines(Protocol):
    """What the verbs do. Raises CapyError."""

    def engines(self) -> list[dict[str, Any]]: ...

    async def reload_engines(self) -> dict[str, Any]: ...

    async def retire_engine(self, profile: str, *, drain: bool) -> dict[str, Any]: ...


@attrs.define(eq=False)
class ControlSocket:
    """Serves the verbs `list`, `add` (also `reload`) and `remove`."""

    path: Path
    engines: Engines

    async def serve(self, *, task_status: trio.TaskStatus[bool] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled. `started` says whether there is a socket: a path may be too long for one."""
        if len(os.fsencode(self.path)) > NAME_BYTES_MAX:
            log.warning("control.unavailable", path=self.path, reason="the path is too long for a socket's name")
            task_status.started(False)
            return
        listener = self._bind()
        try:
            async with trio.open_nursery() as nursery:
                limit = trio.CapacityLimiter(CONNECTIONS_MAX)
                task_status.started(True)
                while True:
                    stream, _ = await listener.accept()
                    nursery.start_soon(self._one, trio.SocketStream(stream), limit)
        finally:
            listener.close()
            self.path.unlink(missing_ok=True)

    def _bind(self) -> trio.socket.SocketType:
        """The role's lock is held, so what lies there is a leftover of a role that was killed."""
        try:
            if stat.S_ISSOCK(self.path.lstat().st_mode):
                self.path.unlink()
        except FileNotFoundError:
            pass  # the ordinary case
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        before = os.umask(0o177)  # the socket's mode: there is no moment in which others may connect
        try:
            listener.bind(os.fspath(self.path))
            listener.listen(CONNECTIONS_MAX)
        except OSError as wrong:
            listener.close()
            raise Refusal("unsafe_file", f"{self.path} cannot be made: {wrong.strerror}") from wrong
        finally:
            os.umask(before)
        listener.setblocking(False)
        return trio.socket.from_stdlib_socket(listener)

    async def _one(self, stream: trio.SocketStream, limit: trio.CapacityLimiter) -> None:
        async with stream:
            if not _trusted(stream):
                log.warning("control.stranger")
                return
            async with limit:
                try:
                    with trio.fail_after(READ_S):
                        line = await _line(stream)
                    answer = await self._answer(line)
                except trio.TooSlowError:
                    return
                except CapyError as error:
                    answer = {"error": {"code": error.code, "message": error.message, "retryable": error.retryable}}
                except Exception as wrong:  # one command's fault ends no other
                    log.failed("control.broken", wrong)
                    answer = {"error": {"code": "internal", "message": "a fault of CapyCTL's own; see its log"}}
                try:
                    with trio.move_on_after(WRITE_S):
                        await stream.send_all(json.dumps(answer).encode() + b"\n")
                except trio.BrokenResourceError:
                    pass  # it left; what it asked for is done all the same

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            asked = strict_object(line)
        except NotStrict as wrong:
            raise Refusal("invalid_request", f"the request: {wrong}") from None
        verb = asked.pop("verb", None)
        match verb:
            case "list" if not asked:
                return {"ok": True, "profiles": self.engines.engines()}
            case "add" | "reload" if not asked:
                return {"ok": True, **await self.engines.reload_engines()}
            case "remove" if set(asked) <= {"profile", "drain"}:
                profile, drain = asked.get("profile"), asked.get("drain", False)
                if type(profile) is not str or type(drain) is not bool:
                    raise Refusal("invalid_request", "expected a profile's name, and drain as true or false")
                return {"ok": True, **await self.engines.retire_engine(profile, drain=drain)}
            case _:
                raise Refusal("invalid_request", "expected one of the verbs list, add, reload and remove")


def _trusted(stream: trio.SocketStream) -> bool:
    raw = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(raw)
    return uid in (0, os.geteuid())


async def _line(stream: trio.SocketStream) -> bytes:
    received = b""
    while b"\n" not in received:
        piece = await stream.receive_some()
        if not piece:
            break
        received += piece
        if len(received) > LINE_BYTES_MAX:
            raise Refusal("body_too_large", f"a request has at most {LINE_BYTES_MAX} bytes")
    return received.partition(b"\n")[0]
