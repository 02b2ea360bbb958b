"""The router's desk: a request's ticket on one side, the world's events and orders on the other.

Tickets live from arrival until the world settles their request, which can be long after the client has
gone: a cut request keeps its place until it is proven that the engine is done with it. Everything but
`Ticket.place` is a plain call that steps the world at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Final

import attrs
import trio

from capyctl.clock import Clock
from capyctl.control import events, orders
from capyctl.control.book import Book
from capyctl.errors import CapyError, Refusal
from capyctl.fsm.types import DeploymentId, Millis, RequestId
from capyctl.router.desk import Arrival, Model, Place, Waiting
from capyctl.server.store import Finished

Queued = Callable[[RequestId], tuple[str, int, str] | None]
"""(the state that users see of its deployment, its place from 1, what it waits for) of a waiting request, else None."""

RUNNING: Final = "ready"
"""Of a request that waits for nothing any more: its engine works on the answer."""


@attrs.define(eq=False, repr=False)
class DeskTicket:
    """One request's dealings with the world (`router.desk.Ticket`)."""

    request: RequestId
    desk: Desk
    arrived_at_ms: Millis
    model: str = ""  # the deployment that it named and may use; figures count it there, also when it was turned away
    cut: trio.Event = attrs.field(factory=trio.Event)
    cut_error: tuple[str, str] | None = None
    _told: trio.Event = attrs.field(factory=trio.Event)
    _place: Place | None = None
    _refusal: CapyError | None = None

    async def place(self) -> Place:
        """Wait for a place. Raises: CapyError when the world refuses, expires or ends the request."""
        while self._place is None:
            if self._refusal is not None:
                raise self._refusal
            self._told = trio.Event()
            await self._told.wait()
        return self._place

    def waiting(self) -> Waiting:
        """What a client that waits may be told now."""
        return self.desk.waiting(self.request)

    def sent(self) -> None:
        self.desk.feed(events.RequestSent(request=self.request, now_ms=self.desk.clock()))

    def not_accepted(self, reason: str) -> None:
        self._place = None
        self.desk.feed(events.RequestNotAccepted(request=self.request, reason=reason, now_ms=self.desk.clock()))

    def first_output(self) -> None:
        self.desk.feed(events.FirstOutput(request=self.request, now_ms=self.desk.clock()))

    def finished(self) -> None:
        self.desk.feed(events.RequestFinished(request=self.request, now_ms=self.desk.clock()))

    def rejected(self, status: int) -> None:
        self.desk.feed(events.EngineRejected(request=self.request, status=status, now_ms=self.desk.clock()))

    def errored(self, reason: str) -> None:
        self.desk.feed(events.EngineErrored(request=self.request, reason=reason, now_ms=self.desk.clock()))

    def upstream_lost(self, reason: str) -> None:
        self.desk.feed(events.UpstreamLost(request=self.request, reason=reason, now_ms=self.desk.clock()))

    def client_gone(self, reason: str) -> None:
        self.desk.feed(events.ClientGone(request=self.request, reason=reason, now_ms=self.desk.clock()))

    # --- from the world --------------------------------------------------------------------------

    def admitted(self, place: Place) -> None:
        self._place = place
        self._told.set()

    def refused(self, error: CapyError) -> None:
        self._refusal = error
        self._told.set()

    @property
    def refusal(self) -> CapyError | None:
        return self._refusal

    def ended(self, code: str, message: str) -> None:
        """The world ended it: whoever waits for a place is refused, whoever relays is cut."""
        if self.cut_error is None:
            self.cut_error = (code, message)
        self.cut.set()
        self.refused(Refusal(code, message))


@attrs.define(eq=False, repr=False)
class Desk:
    """`router.desk.Desk` and `seams.Gates` in one. `feed` is the driver's."""

    book: Book
    clock: Clock
    queued: Queued
    record: Callable[[Finished], None]
    feed: Callable[[events.Event], None]
    accepting: bool = True
    outcomes: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    refusals: Counter[str] = attrs.field(factory=Counter)
    _tickets: dict[RequestId, DeskTicket] = attrs.field(factory=dict)

    # --- for the router --------------------------------------------------------------------------

    def arrive(self, arrival: Arrival) -> DeskTicket:
        """Hand a request to the world. Raises: Refusal at once when nothing is queued for it."""
        now_ms = self.clock()
        ticket = DeskTicket(arrival.request, self, now_ms, self._named(arrival))
        self._tickets[arrival.request] = ticket
        self.feed(
            events.RequestArrived(
                request=arrival.request,
                route=arrival.route,
                api=arrival.api,
                stream=arrival.stream,
                body_bytes=arrival.body_bytes,
                cache_salt=arrival.cache_salt,
                nameable=arrival.nameable,
                vectors=arrival.vectors,
                allowed=arrival.allowed,
                now_ms=now_ms,
            )
        )
        if ticket.refusal is not None:
            raise ticket.refusal
        return ticket

    def _named(self, arrival: Arrival) -> str:
        owner = self.book.routes.get(arrival.route)
        row = self.book.deployments.get(owner) if owner is not None else None
        if row is None or (arrival.allowed is not None and row.spec.name not in arrival.allowed):
            return ""
        return row.spec.name

    def models(self) -> list[Model]:
        """Configured deployments by route, whatever their state."""
        rows = self.book.deployments
        return [
            Model(id=route, api=rows[owner].spec.api, created_s=rows[owner].created_at_ms // 1000)
            for route, owner in sorted(self.book.routes.items())
            if owner in rows
        ]

    def waiting(self, request: RequestId) -> Waiting:
        """State of what it waits for, its place in the queue (1 is next), and an estimate where there is one."""
        state, queued = self.book.requests.get(request), self.queued(request)
        if queued is None or state is None or state.deployment is None:
            return Waiting(state=RUNNING, position=0, estimate_s=None)
        return Waiting(
            state=queued[0], position=queued[1], estimate_s=self._estimate_s(state.deployment), why=queued[2]
        )

    def _estimate_s(self, deployment: DeploymentId) -> int | None:
        """Seconds until the start in progress must have ended: an upper bound, or None when nothing is in progress."""
        bounds = [row.run.deadline_ms for _, row in self.book.of(deployment) if row.in_progress]
        known = [bound for bound in bounds if bound is not None]
        return max(0, math.ceil((min(known) - self.clock()) / 1000)) if known else None

    # --- for the ingress -------------------------------------------------------------------------

    def upstream_ended(self, request: RequestId, half_closed_at_ms: Millis, eof_at_ms: Millis) -> None:
        """The engine closed its side after we closed ours."""
        self.feed(
            events.UpstreamEnded(
                request=request, half_closed_at_ms=half_closed_at_ms, eof_at_ms=eof_at_ms, now_ms=self.clock()
            )
        )

    # --- for the driver --------------------------------------------------------------------------

    def perform(self, order: orders.RouterOrder) -> None:
        """Do one of the world's orders to the router, at once."""
        ticket = self._tickets.get(order.request)
        match order:
            case orders.Admit():
                if ticket is not None:
                    ticket.admitted(self._place_of(order))
            case orders.Answer():
                self.refusals[order.code] += 1
                if ticket is not None:
                    details = {} if order.retry_after_s is None else {"retry_after_s": order.retry_after_s}
                    ticket.refused(Refusal(order.code, order.message, details=details))
            case orders.Cut():
                if ticket is not None:
                    ticket.ended(order.code, order.message)
            case orders.Settled():
                self._settled(order)

    def fault(self, request: RequestId) -> None:
        """The world could not take this request's event: its client is told so, and the ticket is let go."""
        ticket = self._tickets.pop(request, None)
        if ticket is not None:
            ticket.ended("internal", "a fault of CapyCTL's own; its log names the place")

    def _place_of(self, order: orders.Admit) -> Place:
        deployment = self.book.deployments[order.incarnation.lane.deployment]
        state = self.book.requests.get(order.request)
        traits = None if state is None else state.traits
        return Place(
            incarnation=order.incarnation,
            host=order.host,
            served_name=deployment.spec.routes[0],
            left_ms=Millis(order.deadline_ms - self.clock()),
            cache_scope=f"{order.incarnation.lane.deployment}@{deployment.state.revision}",
            named=traits is not None and traits.abort_by_id,  # as the request's machine will settle it, if it is cut
        )

    def _settled(self, order: orders.Settled) -> None:
        ticket = self._tickets.pop(order.request, None)
        row = self.book.deployments.get(order.deployment) if order.deployment is not None else None
        told = "" if ticket is None else ticket.model
        self.outcomes[row.spec.name if row is not None else told, order.outcome] += 1
        if order.deployment is None:
            return  # turned away at the door: counted, not kept
        now_ms = self.clock()
        self.record(
            Finished(
                request=order.request,
                deployment=order.deployment,
                incarnation=None if order.incarnation is None else str(order.incarnation),
                outcome=order.outcome,
                arrived_at_ms=now_ms if ticket is None else ticket.arrived_at_ms,
                ended_at_ms=now_ms,
            )
        )
