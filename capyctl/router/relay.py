"""One request from its arrival at the desk to its last byte.

Theory of operation. Three tasks share a request and a cancel scope. *Work* asks for a place, opens
the upstream and passes bytes on. *The client's watch* waits for the hang-up. *The world's watch* waits
for the world to cut the request, and keeps a silent stream alive. Whoever ends it early says so to the
ticket at once, cuts the upstream, and cancels the scope; everything that settles is a plain call, so
no cancellation can lose it, and the first to settle wins.

Who may touch the exchange: while work is inside `receive_some` only work may, so the cut happens in
its own unwinding; at any other moment (work is writing to a client that reads slowly) the watch cuts
directly. Either way the engine learns of a hang-up within a scheduler pass.
"""

from __future__ import annotations

import json
import logging
import math
from typing import Final

import attrs
import trio

from capyctl.errors import CapyError, Failure
from capyctl.fsm.types import RequestId
from capyctl.router import figures
from capyctl.router.answers import JSON_TYPE, Fault, asks_too_much, clean, engine_words
from capyctl.router.bodies import Share
from capyctl.router.body import holds_no_number, parse_object, quoted
from capyctl.router.desk import Arrival, Desk, Exchange, NotAccepted, Place, Ticket, Upstream, UpstreamBroken
from capyctl.router.endpoints import Endpoint, Question
from capyctl.router.events import NO_NUMBER, PIECE_BYTES_MAX, Broken, Done, EngineSaid, EventReader
from capyctl.router.keys import Caller
from capyctl.router.reply import Receive, Reply
from capyctl.router.scan import NotStrict

LOG: Final = logging.getLogger("capyctl.router")

REFUSAL_BYTES_MAX: Final = 64 * 2**10  # of an engine's error body
REFUSAL_SECONDS: Final = 5.0
DRAIN_SECONDS: Final = 1.0  # for the end of a body whose terminator has come
WORLD_LATE_SECONDS: Final = 2.0  # the world ends a request at its deadline; this is for when it does not
RETRY_SECONDS: Final = (0.0, 0.05, 0.1, 0.2, 0.5)


@attrs.frozen(kw_only=True)
class Settings:
    """Bounds of the inference endpoint. Seconds and bytes; `origins` is the CORS allow-list."""

    body_bytes_max: int = 16 * 2**20
    body_seconds: float = 60.0
    buffered_bytes_max: int = 64 * 2**20  # of bodies that arrive or wait, in all
    stream_idle_seconds: float = 120.0
    piece_bytes_max: int = PIECE_BYTES_MAX
    keep_alive_seconds: float = 10.0
    origins: frozenset[str] = frozenset()


@attrs.define(eq=False, kw_only=True)
class Relay:
    """One request's tasks and what they share."""

    request: RequestId
    desk: Desk
    upstream: Upstream
    settings: Settings
    endpoint: Endpoint
    question: Question
    caller: Caller
    share: Share
    reply: Reply
    receive: Receive
    _ticket: Ticket = attrs.field(init=False)
    _scope: trio.CancelScope = attrs.field(init=False)
    _exchange: Exchange | None = None
    _receiving: bool = False
    _place: Place | None = None
    _answered: bool = False  # the engine's first output has been told to the ticket
    _outcome: str | None = None  # how it was settled; set once
    _verdict: Fault | None = None  # what a watch wants the client told

    async def run(self) -> str:
        """Answer the request. Returns its outcome for the log."""
        try:
            self._ticket = self.desk.arrive(
                Arrival(
                    request=self.request,
                    route=self.question.model,
                    api=self.endpoint.api,
                    stream=self.question.stream,
                    body_bytes=len(self.question.text),
                    cache_salt=self.question.cache_salt,
                    nameable=self.question.nameable,
                    vectors=self.endpoint.vectors,
                    allowed=self.caller.allowed,
                )
            )
        except CapyError as error:
            await self.reply.fault(Fault.of(error))
            return error.code
        try:
            async with trio.open_nursery() as nursery:
                self._scope = nursery.cancel_scope
                nursery.start_soon(self._watch_client)
                nursery.start_soon(self._watch_world)
                await self._work()
                nursery.cancel_scope.cancel()
            if self._verdict is not None:
                await self.reply.fault(self._verdict)
            await self._give_back()
        finally:
            # Reached unsettled only when the whole connection was cancelled or the code above is wrong.
            self._cut_upstream()
            if self._settle("failed"):
                self._ticket.client_gone("the router gave the request up")
        return self._outcome or "failed"

    @property
    def waits(self) -> bool:
        """Whether it has no place at an engine."""
        return self._place is None

    def end(self, fault: Fault, reason: str) -> None:
        """Cut the request as a hang-up would be, and tell its client why. Plain call."""
        if self._settle(fault.code):
            self._ticket.client_gone(reason)
            self._stop(fault)

    # --- settling and cutting: plain calls ----------------------------------------------------------

    def _settle(self, outcome: str) -> bool:
        """Claim the one report that the ticket gets. False when it was made already."""
        if self._outcome is not None:
            return False
        self._outcome = outcome
        return True

    def _stop(self, fault: Fault | None) -> None:
        self._verdict = fault
        if not self._receiving:
            self._cut_upstream()
        self._scope.cancel()

    def _cut_upstream(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.abandon(self.request)

    # --- the two watches ----------------------------------------------------------------------------

    async def _watch_client(self) -> None:
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                break
        reason = message.get("reason")
        # Without a reason the server merely says that the answer is complete.
        if (reason is not None or not self.reply.ended) and self._settle("client_gone"):
            self._ticket.client_gone(reason or "hung up")
            self._stop(None)

    async def _watch_world(self) -> None:
        pause = self.settings.keep_alive_seconds if self.question.stream else math.inf
        while not self._ticket.cut.is_set():
            with trio.move_on_after(pause):
                await self._ticket.cut.wait()
            if not self._ticket.cut.is_set():
                await self._keep_alive()
        code, message = self._ticket.cut_error or ("unavailable", "the request was ended before its answer")
        if self._settle(code):
            self._stop(Fault.named(code, message))

    async def _keep_alive(self) -> None:
        """Comments while nothing else is said: what it waits for, then that it still runs."""
        if self._place is None:
            waiting = self._ticket.waiting()
            seen = {"state": waiting.state, "position": waiting.position, "estimate_s": waiting.estimate_s}
            if waiting.why:
                seen["why"] = waiting.why
            if not self.reply.begun:
                await self.reply.start_stream()
            await self.reply.write(b": x-capyctl-waiting " + json.dumps(seen).encode() + b"\n\n")
        elif self.reply.begun and trio.current_time() - self.reply.wrote_at >= self.settings.keep_alive_seconds:
            await self.reply.write(b": keep-alive\n\n")

    # --- work -----------------------------------------------------------------------------------------

    async def _work(self) -> None:
        fault: Fault | None
        try:
            with trio.CancelScope() as patience:
                fault = await self._ask(patience)
            if patience.cancelled_caught:
                fault = self._ran_out()
        except CapyError as error:
            # The world refused it or let it expire: it holds nothing any more.
            self._settle(error.code)
            fault = Fault.of(error)
        except UpstreamBroken as error:
            LOG.info("upstream.broke", extra={"fields": {"request": self.request, "reason": str(error)}})
            exchange, self._exchange = self._exchange, None
            if exchange is not None:
                await exchange.aclose()
            if not self._settle("upstream_lost"):
                return
            self._ticket.upstream_lost("the connection ended before the answer did")
            fault = (
                Fault.named("engine_error", "the engine's connection ended before its answer did")
                if self.reply.begun
                else Fault.named("engine_unreachable", "the engine took the request and went away without an answer")
            )
        if fault is not None:
            await self.reply.fault(fault)

    def _ran_out(self) -> Fault | None:
        """The bound on the first output, or on silence after it, has passed."""
        self._cut_upstream()
        if self._answered:
            silent = f"the engine said nothing for {self.settings.stream_idle_seconds:g} s"
            if self._settle("engine_error"):
                self._ticket.errored(silent)
                return Fault.named("engine_error", silent)
        elif self._settle("deadline_exceeded"):
            self._ticket.client_gone("no output within the request's deadline")
            return Fault.named("deadline_exceeded", "the engine gave no output within the request's deadline")
        return None

    async def _ask(self, patience: trio.CancelScope) -> Fault | None:
        exchange, clock = await self._open(patience)
        self._exchange = exchange
        clock.answered_at = trio.current_time()
        if exchange.status != 200:
            return await self._refused(exchange)
        kind = exchange.content_type.partition(";")[0].strip().lower()
        if kind == "text/event-stream" and self.question.stream:
            return await self._relay_stream(patience, clock)
        if kind == "application/json" and not self.reply.begun:
            return await self._relay_whole(patience, clock)
        return self._broke_the_rules(f"the engine answered with {clean(kind[:100]) or 'no content type'}")

    async def _open(self, patience: trio.CancelScope) -> tuple[Exchange, figures.Clock]:
        """Ask for places until an upstream takes the request. Nothing is sent twice: NotAccepted took nothing."""
        attempt = 0
        while True:
            place = await self._ticket.place()
            self._place = place
            self.share.release()
            patience.deadline = trio.current_time() + place.left_ms / 1000 + WORLD_LATE_SECONDS
            rid = self.request if place.named else None
            body = self.question.for_engine(place.served_name, place.cache_scope, rid)
            clock = figures.Clock(sent_at=trio.current_time())
            try:
                exchange = await self.upstream.open(
                    place.incarnation, self.endpoint.path, body, self._ticket, named=place.named
                )
                self.question = attrs.evolve(self.question, text=b"")  # it is never sent again
                return exchange, clock
            except NotAccepted as refusal:
                self._place = None
                self.share.hold(len(self.question.text))
                if self._outcome is None:
                    self._ticket.not_accepted(str(refusal))
            # A world that offers the same closed door again must not make this loop spin.
            await trio.sleep(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
            attempt += 1

    async def _receive(self) -> bytes:
        exchange = self._exchange
        if exchange is None:  # a watch cut it while this task was writing; its cancellation is on the way
            await trio.sleep_forever()
        self._receiving = True
        try:
            piece = await exchange.receive_some()
        except trio.Cancelled:
            self._cut_upstream()
            raise
        finally:
            self._receiving = False
        if self._scope.cancel_called:  # ended by a watch while this piece was on its way: left to us, so cut as well
            self._cut_upstream()
        return piece

    def _broke_the_rules(self, reason: str, words: str | None = None) -> Fault | None:
        """The engine's answer cannot be passed on. `words` go to the client alone, never to a log."""
        self._cut_upstream()
        if not self._settle("engine_error"):
            return None
        self._ticket.errored(reason)
        return Fault.named("engine_error", words or reason)

    def _has_begun(self) -> None:
        if not self._answered:
            self._answered = True
            if self._outcome is None:
                self._ticket.first_output()

    # --- answers ----------------------------------------------------------------------------------------

    async def _relay_stream(self, patience: trio.CancelScope, clock: figures.Clock) -> Fault | None:
        reader = EventReader(
            self.endpoint.dialect,
            self.question.model,
            self.settings.piece_bytes_max,
            logprobs=self.question.logprobs,
        )
        idle_seconds = self.settings.stream_idle_seconds
        if not self.reply.begun:
            await self.reply.start_stream()
        at_end = False
        while reader.end is None and not at_end:
            piece = await self._receive()
            at_end = not piece
            passed = reader.finish() if at_end else reader.feed(piece)
            if reader.output_begun and (passed or not self._answered):
                clock.last_output_at = trio.current_time()
                if clock.first_output_at is None:
                    clock.first_output_at = clock.last_output_at
                self._has_begun()
            if passed:
                await self.reply.write(passed)
                if self._answered:
                    patience.deadline = trio.current_time() + idle_seconds
        match reader.end:
            case Done(terminator):
                found = figures.figures(reader.figures, clock, streamed=True) if self.endpoint.figures else {}
                await self._finish((figures.comment(found) if found else b"") + terminator)
                return None
            case Broken(reason):
                return self._broke_the_rules(reason)
            case EngineSaid(message):
                return self._broke_the_rules("the engine reported an error in its stream", message)
            case None:
                return self._broke_the_rules("the engine ended its stream without a terminator")

    async def _finish(self, last: bytes) -> None:
        await self.reply.write(last, last=True)
        if self._settle("ok"):
            self._ticket.finished()

    async def _relay_whole(self, patience: trio.CancelScope, clock: figures.Clock) -> Fault | None:
        pieces: list[bytes] = []
        size = 0
        while piece := await self._receive():
            self._has_begun()
            patience.deadline = trio.current_time() + self.settings.stream_idle_seconds
            pieces.append(piece)
            size += len(piece)
            if size > self.endpoint.answer_bytes_max:
                return self._broke_the_rules(f"the answer is larger than {self.endpoint.answer_bytes_max} bytes")
        clock.answered_at = trio.current_time()
        text = b"".join(pieces)
        if self.question.logprobs and holds_no_number(text):
            return self._broke_the_rules(NO_NUMBER)
        try:
            body = self._dressed(text, clock)
        except NotStrict:
            return self._broke_the_rules("the engine's answer is not a JSON object")
        await self.reply.whole(200, [JSON_TYPE, (b"cache-control", b"no-store")], body)
        if self._settle("ok"):
            self._ticket.finished()
        return None

    def _dressed(self, text: bytes, clock: figures.Clock) -> bytes:
        """The engine's answer under the name the client asked for, with figures beside its own members."""
        route = self.question.model
        name = quoted(route)
        named = b'"model"' not in text or b'"model":' + name in text or b'"model": ' + name in text
        if named and not self.endpoint.figures:
            return text
        answer = parse_object(text)
        if isinstance(answer.values.get("model"), str) and answer.values["model"] != route:
            answer = parse_object(answer.replaced("model", route))
        if not self.endpoint.figures or "capyctl" in answer.values:
            return answer.text
        found = figures.figures(answer.values, clock, streamed=False, decisions=self.endpoint.api == "decisions")
        return answer.with_last("capyctl", {"metrics": found})

    async def _refused(self, exchange: Exchange) -> Fault | None:
        """An engine's error answer: its own refusal of the request, or anything else that is not 200."""
        status = exchange.status
        text, complete = b"", False
        with trio.move_on_after(REFUSAL_SECONDS):
            while len(text) <= REFUSAL_BYTES_MAX:
                piece = await self._receive()
                text += piece
                if not piece:
                    complete = True
                    break
        kind = exchange.content_type.partition(";")[0].strip().lower()
        words, engine_type, param = "", None, None
        is_json = False
        if kind == "application/json" and complete:
            try:
                words, engine_type, param = engine_words(parse_object(text).values)
                is_json = True
            except NotStrict:
                pass  # then it is an error answer like any other
        elif kind == "text/plain":
            words = clean(text.decode("utf-8", "replace"))
        if is_json and status == 500 and asks_too_much(words):
            status, engine_type = 400, None
        if is_json and status in (400, 413, 422):
            if not self._settle("engine_rejected"):
                return None
            self._ticket.rejected(status)
            return Fault(
                status=status,
                code="engine_rejected",
                message=words or "the engine refused the request",
                kind=engine_type,
                param=param,
            )
        reason = f"the engine answered {status}"
        if not complete:
            return self._broke_the_rules(reason, f"{reason}: {words}" if words else None)
        if not self._settle("engine_error"):
            return None
        self._ticket.errored(reason)
        return Fault.named("engine_error", f"{reason}: {words}" if words else reason)

    async def _give_back(self) -> None:
        """After the client has its answer: read what ends the body, so that the connection can serve again."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        try:
            with trio.move_on_after(DRAIN_SECONDS):
                while await exchange.receive_some():
                    pass
        except UpstreamBroken:
            pass  # the answer was complete; aclose drops the connection
        finally:
            await exchange.aclose()


def shutting_down() -> Fault:
    """What a request is told when the role ends."""
    return Fault.of(Failure("unavailable", "the server is shutting down; ask again when it is back"))
