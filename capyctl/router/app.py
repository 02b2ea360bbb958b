"""The inference endpoint as a plain ASGI application: the checks at the door, in their order.

Accepting → key → path and method → size and arrival of the body → strict JSON → fields → the desk.
Nothing behind the key is told to whoever has none: known and unknown paths answer the same 401.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import attrs
import trio

from capyctl import ulid
from capyctl.errors import CapyError
from capyctl.fsm.types import RequestId
from capyctl.router.answers import JSON_TYPE, Fault, client_request_id, model_entry
from capyctl.router.bodies import Bodies, Share
from capyctl.router.desk import Desk, Model, Upstream
from capyctl.router.endpoints import ENDPOINTS, Endpoint, read_question
from capyctl.router.keys import Caller, Keyring
from capyctl.router.relay import LOG, Relay, Settings, shutting_down
from capyctl.router.reply import Header, Receive, Reply, Send

MODELS: Final = b"/v1/models"
NAMED_MAX: Final = 128  # characters of a name that an error repeats
READS: Final = ("GET", "HEAD")

LOOK_BYTES: Final = 16 * 2**10
"""A larger body is looked over in a thread, so that nobody else waits for it."""
LOOKERS: Final = trio.CapacityLimiter(2)


@attrs.define(eq=False)
class Router:
    """The application. `closing` refuses what is new; `drained` waits for what is not.

    `alone`: the world behind the desk gives no more places, so whoever waits for one is refused too.
    """

    desk: Desk
    upstream: Upstream
    keyring: Keyring
    settings: Settings = attrs.field(factory=Settings)
    fresh_id: Callable[[], str] = ulid.fresh
    closing: bool = False
    alone: bool = False
    bodies: Bodies = attrs.field(init=False)
    _relays: set[Relay] = attrs.field(factory=set)
    _inside: int = 0
    _empty: trio.Event = attrs.field(factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        self.bodies = Bodies(self.settings.buffered_bytes_max)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer one HTTP request. Other kinds of scope are not served."""
        if scope["type"] != "http":
            raise NotImplementedError(f"no {scope['type']} here")
        self._inside += 1
        try:
            await _Visit.of(self, scope, receive, send).answer()
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    async def drained(self) -> None:
        """Wait until no request is inside."""
        while self._inside:
            self._empty = trio.Event()
            await self._empty.wait()

    def cut_waiting(self) -> None:
        """End every request that no engine has, now and from now on; the others go on. Plain call."""
        self.alone = True
        for relay in tuple(self._relays):
            if relay.waits:
                relay.end(shutting_down(), "the role is shutting down")

    def cut_all(self) -> None:
        """End every request that is still inside; each is told `unavailable`. Plain call."""
        for relay in tuple(self._relays):
            relay.end(shutting_down(), "the role is shutting down")


def build_app(
    desk: Desk,
    upstream: Upstream,
    keyring: Keyring,
    *,
    settings: Settings | None = None,
    fresh_id: Callable[[], str] = ulid.fresh,
) -> Router:
    """The inference endpoint over a desk and an upstream.

    Args:
      keyring: `Keys(...)`, or `NoKeys()` for an explicit `authentication: none`; may be replaced while serving.
      fresh_id: gives request ids.
    """
    return Router(desk, upstream, keyring, settings or Settings(), fresh_id)


@attrs.define(eq=False, kw_only=True)
class _Visit:
    """One HTTP request and the headers that decide about it."""

    router: Router
    method: str
    path: bytes
    receive: Receive
    reply: Reply
    request: RequestId
    client_id: bytes | None
    authorization: Sequence[bytes]
    origin: bytes | None
    length: bytes | None
    chunked: bool
    encoding: bytes
    preflight: bytes | None  # Access-Control-Request-Headers, when Access-Control-Request-Method is there too

    @classmethod
    def of(cls, router: Router, scope: dict[str, Any], receive: Receive, send: Send) -> _Visit:
        """Read the headers once. Everything that a client sends and that is not named here is ignored."""
        found: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            found.setdefault(name, []).append(value)

        def only(name: bytes) -> bytes | None:
            values = found.get(name)
            return values[0] if values and len(values) == 1 else None

        request = RequestId(router.fresh_id())
        client_id = client_request_id(found.get(b"x-request-id", []))
        common: list[Header] = [(b"x-capyctl-request-id", request.encode())]
        if client_id is not None:
            common.append((b"x-request-id", client_id))
        origin = only(b"origin")
        if origin is not None and origin.decode("latin-1") in router.settings.origins:
            common.append((b"access-control-allow-origin", origin))
            common.append((b"access-control-expose-headers", b"X-CapyCTL-Request-Id, X-Request-Id, Retry-After"))
        if router.settings.origins:
            common.append((b"vary", b"Origin"))
        asked = only(b"access-control-request-method")
        raw_path: bytes = scope["raw_path"]
        return cls(
            router=router,
            method=scope["method"],
            path=raw_path,
            receive=receive,
            reply=Reply(send, common, typed=raw_path == b"/v1/messages"),
            request=request,
            client_id=client_id,
            authorization=found.get(b"authorization", []),
            origin=origin,
            length=only(b"content-length"),
            chunked=b"transfer-encoding" in found,
            encoding=b",".join(found.get(b"content-encoding", [])).strip().lower(),
            preflight=None if asked is None else b",".join(found.get(b"access-control-request-headers", [])),
        )

    @property
    def _has_body(self) -> bool:
        return self.chunked or (self.length is not None and self.length.strip(b"0") != b"")

    @property
    def _known_origin(self) -> bool:
        return self.origin is not None and self.origin.decode("latin-1") in self.router.settings.origins

    async def answer(self) -> None:
        """Walk the checks; the first that fails answers."""
        if self.method == "OPTIONS" and self.preflight is not None and self._known_origin:
            await self._allow_preflight()
            return
        if self.router.closing or not self.router.desk.accepting:
            await self._refuse(shutting_down(), close=True)
            return
        caller = self._caller()
        if caller is None:
            words = "the API key is missing or wrong; one `Authorization: Bearer <key>` is needed"
            await self._refuse(Fault.named("unauthorized", words), close=True)
            return
        if self.path == MODELS or self.path.startswith(MODELS + b"/"):
            await self._answer_models(caller)
            return
        endpoint = ENDPOINTS.get(self.path.decode("latin-1"))
        if endpoint is None:
            await self._refuse(Fault.named("not_found", f"no such path; there are /v1/models, {', '.join(ENDPOINTS)}"))
        elif self.method != "POST":
            await self._not_allowed("POST")
        else:
            await self._ask(endpoint, caller)

    def _caller(self) -> Caller | None:
        """Who asks. Without keys, a page in somebody's browser may not: only origins on the list pass."""
        keyring = self.router.keyring
        if keyring.open and self.origin is not None and not self._known_origin:
            return None
        return keyring.caller(self.authorization)

    async def _refuse(self, fault: Fault, *, close: bool = False) -> None:
        """An error before the body was read: with a body under way the connection cannot be kept."""
        self._log(fault.code, None, 0.0, fault.status)
        await self.reply.fault(fault, close=close or self._has_body)

    async def _not_allowed(self, *methods: str) -> None:
        self.reply.common = [*self.reply.common, (b"allow", ", ".join(methods).encode())]
        await self._refuse(
            Fault.named("method_not_allowed", f"{self.method[:16]} is not served here; use {' or '.join(methods)}")
        )

    async def _allow_preflight(self) -> None:
        headers = [
            (b"access-control-allow-methods", b"GET, HEAD, POST"),
            (b"access-control-max-age", b"600"),
        ]
        # Official clients add headers of their own; whichever they are, they are ignored here.
        if self.preflight and len(self.preflight) <= 1024:
            headers.append((b"access-control-allow-headers", self.preflight))
        await self.reply.whole(200, headers, b"")

    # --- models -------------------------------------------------------------------------------------

    async def _answer_models(self, caller: Caller) -> None:
        if self.method not in READS:
            await self._not_allowed(*READS)
            return
        listed = sorted(
            (each for each in self.router.desk.models() if _may_see(caller, each)), key=lambda model: model.id
        )
        if self.path == MODELS:
            await self._answer_json({"object": "list", "data": [model_entry(model) for model in listed]})
            return
        # Names may hold slashes, written plainly or escaped; one unescaping, and no other meaning of a path.
        name = unquote_to_bytes(self.path[len(MODELS) + 1 :]).decode("utf-8", "replace")
        for model in listed:
            if model.id == name:
                await self._answer_json(model_entry(model))
                return
        shown = json.dumps(name[:NAMED_MAX], ensure_ascii=False)
        await self._refuse(Fault.named("not_found", f"no model {shown} is deployed here; GET /v1/models lists them"))

    async def _answer_json(self, value: dict[str, Any]) -> None:
        body = json.dumps(value, ensure_ascii=False).encode()
        await self.reply.whole(200, [JSON_TYPE, (b"cache-control", b"no-store")], body)

    # --- questions ------------------------------------------------------------------------------------

    async def _ask(self, endpoint: Endpoint, caller: Caller) -> None:
        began_at = time.monotonic()
        if self.encoding not in (b"", b"identity"):
            fault = attrs.evolve(Fault.named("unsupported", "send the body without Content-Encoding"), status=415)
            await self._refuse(fault, close=True)
            return
        share = Share(self.router.bodies)
        try:
            relay = await self._prepared(endpoint, caller, share, began_at)
            if relay is not None:
                await self._run(relay, began_at)
        finally:
            share.release()

    async def _prepared(self, endpoint: Endpoint, caller: Caller, share: Share, began_at: float) -> Relay | None:
        """The relay of a checked body, which alone holds it; None when the client has been answered, or is gone."""
        body = await self._read_body(share)
        if body is None:
            return None
        try:
            if len(body) <= LOOK_BYTES:
                question = read_question(endpoint, body)
            else:
                look = partial(read_question, endpoint, body, patient=True)
                question = await trio.to_thread.run_sync(look, limiter=LOOKERS)
        except CapyError as error:
            fault = Fault.of(error)
            self._log(fault.code, None, time.monotonic() - began_at, fault.status)
            await self.reply.fault(fault)
            return None
        router = self.router
        if router.alone:  # its body was still arriving
            fault = shutting_down()
            self._log(fault.code, question.model, time.monotonic() - began_at, fault.status)
            await self.reply.fault(fault)
            return None
        return Relay(
            request=self.request,
            desk=router.desk,
            upstream=router.upstream,
            settings=router.settings,
            endpoint=endpoint,
            question=question,
            caller=caller,
            share=share,
            reply=self.reply,
            receive=self.receive,
        )

    async def _run(self, relay: Relay, began_at: float) -> None:
        self.router._relays.add(relay)
        outcome = "failed"
        try:
            outcome = await relay.run()
        except Exception:
            # Our own fault. What the exception says may quote the request, so its text is not logged here.
            LOG.error("request.failed", exc_info=False, extra={"fields": {"request": self.request}})
            await self.reply.fault(Fault.named("internal", "the router failed; its log has the request's id"))
            raise
        finally:
            self.router._relays.discard(relay)
            self._log(outcome, relay.question.model, time.monotonic() - began_at, self.reply.status)

    async def _read_body(self, share: Share) -> bytes | None:
        """The whole body within its bounds; None when the client has been answered, or is gone."""
        settings = self.router.settings
        limit = settings.body_bytes_max
        too_large = Fault.named("body_too_large", f"the body is larger than {limit} bytes")
        if self.length is not None and int(self.length) > limit:
            await self._refuse(too_large, close=True)
            return None
        pieces: list[bytes] = []
        size = 0
        fault = too_large
        with trio.move_on_after(settings.body_seconds) as patience:
            while True:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    return None
                piece = message.get("body", b"")
                size += len(piece)
                if size > limit:
                    break
                if not share.take(len(piece)):
                    fault = Fault.named(
                        "queue_full",
                        f"bodies that arrive or wait hold as much as they may, {settings.buffered_bytes_max} bytes",
                    )
                    break
                pieces.append(piece)
                if not message.get("more_body", False):
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if patience.cancelled_caught:
            fault = Fault.named("request_timeout", f"the body did not arrive within {settings.body_seconds:g} s")
        pieces.clear()  # before the answer, which may take a while to be read
        share.release()
        await self._refuse(fault, close=True)
        return None

    def _log(self, outcome: str, model: str | None, took_s: float, status: int | None) -> None:
        if LOG.isEnabledFor(logging.INFO):
            fields = {
                "request": self.request,
                "client_request": None if self.client_id is None else self.client_id.decode("ascii"),
                "path": self.path[:128].decode("latin-1"),
                "model": None if model is None else model[:128],
                "outcome": outcome,
                "status": status,  # None: nobody was there to be answered
                "took_ms": round(took_s * 1000, 1),
            }
            LOG.info("request.ended", extra={"fields": fields})


def _may_see(caller: Caller, model: Model) -> bool:
    return caller.allowed is None or (model.deployment or model.id) in caller.allowed
