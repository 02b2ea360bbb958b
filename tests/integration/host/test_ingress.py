"""The ingress against small real servers on raw sockets, whose every close and byte the test decides."""

# A test may block and poll: it is alone in its loop, and what it waits for has no event.

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import attrs
import pytest
import trio

from capyctl.fsm.types import Incarnation, Millis, RequestId
from capyctl.host import ingress as room
from capyctl.host.http import LoopbackClient
from capyctl.host.ingress import Ingress, Relay, Stage, Stay
from capyctl.router.desk import NotAccepted, UpstreamBroken
from tests.integration.acceptance.machine import Stopwatch

from .fakes import incarnation

R1 = RequestId("r1")
CHAT = "/v1/chat/completions"
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@attrs.define
class Ticket:
    request: RequestId = R1
    sends: int = 0

    def sent(self) -> None:
        self.sends += 1


@attrs.define
class Engine:
    """What the engine's side saw: raw requests per connection, in order of connection."""

    port: int
    connections: list[list[bytes]] = attrs.field(factory=list)

    @property
    def requests(self) -> list[bytes]:
        return [request for connection in self.connections for request in connection]


Talk = Callable[[trio.SocketStream, list[bytes]], Awaitable[None]]


async def one_request(stream: trio.SocketStream) -> bytes:
    """A whole request, or b"" at EOF."""
    data = b""
    while True:
        head, end, body = data.partition(b"\r\n\r\n")
        if end:
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            if len(body) >= int(fields.get(b"content-length", b"0")):
                return data
        piece = await stream.receive_some()
        if not piece:
            return b""
        data += piece


@asynccontextmanager
async def engine(talk: Talk) -> AsyncIterator[Engine]:
    async def serve(stream: trio.SocketStream) -> None:
        mine: list[bytes] = []
        here.connections.append(mine)
        try:
            await talk(stream, mine)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the other side hung up, which some tests want

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    here = Engine(listener.socket.getsockname()[1])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield here
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def running(port: int, ended: list[tuple[RequestId, Millis, Millis]] | None = None) -> AsyncIterator[Ingress]:
    told = [] if ended is None else ended
    ingress = Ingress(on_upstream_ended=lambda *facts: told.append(facts))
    async with trio.open_nursery() as nursery:
        await nursery.start(ingress.run)
        ingress.admit(incarnation(), port, "launch-key")
        yield ingress
        nursery.cancel_scope.cancel()


async def always_ok(stream: trio.SocketStream, seen: list[bytes]) -> None:
    while request := await one_request(stream):
        seen.append(request)
        await stream.send_all(OK)


async def ask(ingress: Ingress, ticket: Ticket | None = None, which: Incarnation | None = None) -> bytes:
    exchange = await ingress.open(which or incarnation(), CHAT, b'{"a":1}', ticket or Ticket())
    body = await all_of(exchange)
    await exchange.aclose()
    return body


async def all_of(exchange: Relay) -> bytes:
    body = b""
    while piece := await exchange.receive_some():
        body += piece
    return body


async def test_the_engine_is_told_its_key_and_nothing_of_a_client() -> None:
    async with engine(always_ok) as there, running(there.port) as ingress:
        assert await ask(ingress) == b"{}"
        (request,) = there.requests
        head, _, body = request.partition(b"\r\n\r\n")
        assert head.split(b"\r\n") == [
            b"POST /v1/chat/completions HTTP/1.1",
            f"Host: 127.0.0.1:{there.port}".encode(),
            b"Accept: */*",
            b"Authorization: Bearer launch-key",
            b"Content-Type: application/json",
            b"Content-Length: 7",
        ]
        assert body == b'{"a":1}'


async def test_a_connection_is_used_again_until_it_has_carried_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "REQUESTS_MAX", 3)
    async with engine(always_ok) as there, running(there.port) as ingress:
        for _ in range(7):
            await ask(ingress)
        assert [len(connection) for connection in there.connections] == [3, 3, 1]
        assert ingress.in_flight(incarnation()) == 0


async def test_a_connection_that_rested_too_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "IDLE_S", 0.05)
    async with engine(always_ok) as there, running(there.port) as ingress:
        await ask(ingress)
        await trio.sleep(0.12)  # more than `IDLE_S`
        await ask(ingress)
        assert [len(connection) for connection in there.connections] == [1, 1]


async def test_a_pooled_connection_that_the_engine_closed_is_seen_and_passed_over() -> None:
    async def one_each(stream: trio.SocketStream, seen: list[bytes]) -> None:
        seen.append(await one_request(stream))
        await stream.send_all(OK)
        await stream.aclose()

    async with engine(one_each) as there, running(there.port) as ingress:
        ticket = Ticket()
        await ask(ingress, ticket)
        await trio.sleep(0.05)  # the engine's end arrives
        await ask(ingress, ticket)
        assert [len(connection) for connection in there.connections] == [1, 1]
        assert ticket.sends == 2


async def test_one_that_closes_just_as_it_is_used_costs_nothing_but_a_new_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The race: the look before the use sees it open, and the engine closes before it can read a byte."""

    async def one_each(stream: trio.SocketStream, seen: list[bytes]) -> None:
        seen.append(await one_request(stream))
        await stream.send_all(OK)
        await stream.aclose()

    async with engine(one_each) as there, running(there.port) as ingress:
        await ask(ingress)
        await trio.sleep(0.05)  # the engine's end arrives
        monkeypatch.setattr("capyctl.host.wire.Wire.stale", lambda wire: False)
        ticket = Ticket()
        assert await ask(ingress, ticket) == b"{}"
        assert ticket.sends == 1
        assert len(there.requests) == 2


async def test_a_request_that_the_engine_read_is_never_sent_twice() -> None:
    async def reads_and_dies(stream: trio.SocketStream, seen: list[bytes]) -> None:
        seen.append(await one_request(stream))
        await stream.send_all(OK)
        seen.append(await one_request(stream))
        await stream.aclose()

    async with engine(reads_and_dies) as there, running(there.port) as ingress:
        await ask(ingress)
        with pytest.raises(UpstreamBroken):
            await ask(ingress)
        assert len(there.requests) == 2
        assert ingress.in_flight(incarnation()) == 0


@pytest.mark.parametrize("shuts_down", [True, False])
@pytest.mark.parametrize("before_its_bytes", [True, False])
async def test_one_that_resets_what_it_never_read_costs_a_new_connection_where_that_is_its_way(
    before_its_bytes: bool, shuts_down: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same race, a moment later: the request lies unread in the engine when its idle limit closes the socket."""
    monkeypatch.setattr("capyctl.host.wire.Wire.stale", lambda wire: False)

    async def closes_unread(stream: trio.SocketStream, seen: list[bytes]) -> None:
        seen.append(await one_request(stream))
        await stream.send_all(OK)
        if not before_its_bytes:
            await stream.socket.recv(1, socket.MSG_PEEK)
        if shuts_down:  # its end comes first, and hides the reset that follows
            stream.socket.shutdown(socket.SHUT_RDWR)
        stream.socket.close()

    async with engine(closes_unread) as there, running(there.port) as ingress:
        ingress.close(incarnation())
        ingress.admit(incarnation(), there.port, "launch-key", resets_unread=True)
        for _ in range(20):
            ticket = Ticket()
            assert await ask(ingress, ticket) == b"{}"
            assert ticket.sends == 1
        assert [len(connection) for connection in there.connections] == [1] * 20
        assert ingress.in_flight(incarnation()) == 0


async def test_a_reset_is_no_proof_of_an_engine_that_may_reset_what_it_read() -> None:
    async def reads_a_part(stream: trio.SocketStream, seen: list[bytes]) -> None:
        seen.append(await one_request(stream))
        await stream.send_all(OK)
        await stream.receive_some(1)
        stream.socket.close()

    async with engine(reads_a_part) as there, running(there.port) as ingress:
        await ask(ingress)
        with pytest.raises(UpstreamBroken):
            await ask(ingress)
        assert len(there.requests) == 1
        assert ingress.in_flight(incarnation()) == 0


async def test_a_reset_of_a_new_connection_is_not_answered_with_another() -> None:
    async def resets(stream: trio.SocketStream, seen: list[bytes]) -> None:
        seen.append(await stream.receive_some(1))
        stream.socket.close()

    async with engine(resets) as there, running(there.port) as ingress:
        ingress.close(incarnation())
        ingress.admit(incarnation(), there.port, "launch-key", resets_unread=True)
        with pytest.raises(UpstreamBroken):
            await ask(ingress)
        assert len(there.connections) == 1


async def test_a_refused_connection_took_nothing() -> None:
    async with engine(always_ok) as there:
        port = there.port
    async with running(port) as ingress:
        ticket = Ticket()
        with pytest.raises(NotAccepted, match="does not accept connections: "):
            await ask(ingress, ticket)
        assert ticket.sends == 0


async def test_a_closed_gate_and_a_stale_generation_take_nothing() -> None:
    async with engine(always_ok) as there, running(there.port) as ingress:
        with pytest.raises(NotAccepted, match="is closed"):
            await ask(ingress, which=incarnation(2))
        ingress.close(incarnation())
        with pytest.raises(NotAccepted):
            await ask(ingress)
        assert there.requests == []


async def test_closing_cuts_what_is_running() -> None:
    async def endless(stream: trio.SocketStream, seen: list[bytes]) -> None:
        seen.append(await one_request(stream))
        await stream.send_all(CHUNKED + b"3\r\nabc\r\n")
        await trio.sleep_forever()

    async with engine(endless) as there, running(there.port) as ingress:
        exchange = await ingress.open(incarnation(), CHAT, b"{}", Ticket())
        assert await exchange.receive_some() == b"abc"
        assert ingress.in_flight(incarnation()) == 1
        cut: list[BaseException] = []

        async def reads() -> None:
            try:
                await exchange.receive_some()
            except UpstreamBroken as broken:
                cut.append(broken)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reads)
            await trio.testing.wait_all_tasks_blocked(0.02)
            since = Stopwatch()
            assert ingress.close(incarnation()) == 1
        assert since.s < 0.1
        assert len(cut) == 1
        await exchange.aclose()
        exchange.abandon(RequestId("r"))
        assert ingress.in_flight(incarnation()) == 0


async def test_an_abandoned_request_half_closes_and_tells_of_the_engines_eof() -> None:
    async def notices(stream: trio.SocketStream, seen: list[bytes]) -> None:
        seen.append(await one_request(stream))
        await stream.send_all(CHUNKED + b"3\r\nabc\r\n")
        assert await stream.receive_some() == b""  # our half-close
        await stream.send_all(b"3\r\ndef\r\n")  # what it still had
        await trio.sleep(0.1)  # told below as the time between the two ends

    ended: list[tuple[RequestId, Millis, Millis]] = []
    async with engine(notices) as there, running(there.port, ended) as ingress:
        exchange = await ingress.open(incarnation(), CHAT, b"{}", Ticket())
        await exchange.receive_some()
        exchange.abandon(RequestId("r7"))
        exchange.abandon(RequestId("r7"))
        await exchange.aclose()
        assert (ingress.in_flight(incarnation()), ingress.abandoned(incarnation())) == (1, 1)
        with trio.fail_after(30):
            while not ended:
                await trio.sleep(0.01)
        ((request, half_closed_at_ms, eof_at_ms),) = ended
        assert request == "r7"
        assert eof_at_ms - half_closed_at_ms >= 90
        assert ingress.in_flight(incarnation()) == 0


async def test_without_an_eof_nothing_is_claimed() -> None:
    async def deaf(stream: trio.SocketStream, seen: list[bytes]) -> None:
        seen.append(await one_request(stream))
        await stream.send_all(CHUNKED)
        await trio.sleep_forever()

    ended: list[tuple[RequestId, Millis, Millis]] = []
    async with engine(deaf) as there, running(there.port, ended) as ingress:
        ingress.eof_limit_s = 0.1
        exchange = await ingress.open(incarnation(), CHAT, b"{}", Ticket())
        exchange.abandon(RequestId("r"))
        with trio.fail_after(30):
            while ingress.in_flight(incarnation()):
                await trio.sleep(0.01)
        assert ended == []


async def test_cancelling_the_wait_for_the_head_abandons_the_request() -> None:
    scope = trio.CancelScope()

    async def slow(stream: trio.SocketStream, seen: list[bytes]) -> None:
        seen.append(await one_request(stream))
        scope.cancel()
        assert await stream.receive_some() == b""

    ended: list[tuple[RequestId, Millis, Millis]] = []
    async with engine(slow) as there, running(there.port, ended) as ingress:
        with scope:
            await ingress.open(incarnation(), CHAT, b"{}", Ticket(RequestId("slow")))
        assert scope.cancelled_caught
        with trio.fail_after(30):
            while not ended:
                await trio.sleep(0.01)
        assert ended[0][0] == "slow"


async def stay_of(ingress: Ingress) -> Stay:
    """What became of the one named request, once that is known."""
    stay = ingress.stay(incarnation(), R1)
    assert stay is not None
    with trio.fail_after(30):
        await stay.settled.wait()
    return stay


@pytest.mark.parametrize("begun", [True, False])
async def test_a_named_request_that_is_given_up_is_read_to_its_end(begun: bool) -> None:
    given_up = trio.Event()

    async def ends_when_told(stream: trio.SocketStream, seen: list[bytes]) -> None:
        seen.append(await one_request(stream))
        if begun:
            await stream.send_all(CHUNKED + b"3\r\nabc\r\n")
        await given_up.wait()
        with trio.move_on_after(0.1) as patience:
            assert await stream.receive_some() == b"", "half-closed"
        assert patience.cancelled_caught
        await stream.send_all((b"" if begun else CHUNKED) + b"3\r\nend\r\n0\r\n\r\n")

    async with engine(ends_when_told) as there, running(there.port) as ingress:
        with trio.move_on_after(0.1):
            exchange = await ingress.open(incarnation(), CHAT, b"{}", Ticket(), named=True)
            exchange.abandon(R1)
        given_up.set()
        assert (await stay_of(ingress)).stage is Stage.OVER
        await trio.testing.wait_all_tasks_blocked()
        assert ingress.in_flight(incarnation()) == 0


async def test_a_named_request_that_nobody_asks_the_engine_to_end_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "UNASKED_S", 0.05)

    async def endless(stream: trio.SocketStream, seen: list[bytes]) -> None:
        seen.append(await one_request(stream))
        await stream.send_all(CHUNKED + b"3\r\nabc\r\n")
        assert await stream.receive_some() == b""

    ended: list[tuple[RequestId, Millis, Millis]] = []
    async with engine(endless) as there, running(there.port, ended) as ingress:
        (await ingress.open(incarnation(), CHAT, b"{}", Ticket(), named=True)).abandon(R1)
        assert (await stay_of(ingress)).stage is Stage.LOST
        with trio.fail_after(30):
            while not ended:
                await trio.sleep(0.01)
        assert ended[0][0] == R1


async def test_a_named_request_that_was_cut_while_it_was_sent_can_never_begin() -> None:
    async def reads_little(stream: trio.SocketStream, seen: list[bytes]) -> None:
        await stream.receive_some(100)
        await trio.sleep_forever()

    async with engine(reads_little) as there, running(there.port) as ingress:
        with trio.move_on_after(0.1):
            await ingress.open(incarnation(), CHAT, b" " * (32 << 20), Ticket(), named=True)
        assert (await stay_of(ingress)).stage is Stage.OVER
        assert ingress.in_flight(incarnation()) == 0


async def test_a_named_request_is_lost_with_its_gate_or_its_connection_and_forgotten_with_its_answer() -> None:
    async def endless(stream: trio.SocketStream, seen: list[bytes]) -> None:
        request = await one_request(stream)
        if b"whole" in request:
            await stream.send_all(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        elif b"broken" in request:
            await stream.send_all(CHUNKED)
        else:
            await stream.send_all(CHUNKED + b"3\r\nabc\r\n")
            await trio.sleep_forever()

    async with engine(endless) as there, running(there.port) as ingress:
        exchange = await ingress.open(incarnation(), CHAT, b"whole", Ticket(), named=True)
        stay = ingress.stay(incarnation(), R1)
        assert await all_of(exchange) == b"{}"
        await exchange.aclose()
        assert stay is not None
        assert (stay.stage, ingress.stay(incarnation(), R1)) == (Stage.OVER, None)

        (await ingress.open(incarnation(), CHAT, b"broken", Ticket(), named=True)).abandon(R1)
        assert (await stay_of(ingress)).stage is Stage.LOST

        (await ingress.open(incarnation(), CHAT, b"endless", Ticket(), named=True)).abandon(R1)
        stay = ingress.stay(incarnation(), R1)
        ingress.close(incarnation())
        assert stay is not None
        assert (stay.stage, ingress.stay(incarnation(), R1)) == (Stage.LOST, None)


async def test_an_early_answer_to_a_body_that_is_too_large_is_read() -> None:
    async def refuses(stream: trio.SocketStream, seen: list[bytes]) -> None:
        await stream.receive_some(100)
        await stream.send_all(
            OK.replace(b"200 OK", b"413 Too Large").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        )
        await trio.sleep(0.2)  # closing on what it has not read resets the connection, and the answer with it

    async with engine(refuses) as there, running(there.port) as ingress:
        exchange = await ingress.open(incarnation(), CHAT, b" " * (8 << 20), Ticket())
        assert exchange.status == 413
        assert await all_of(exchange) == b"{}"
        await exchange.aclose()


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", b"SSH-2.0-x\r\n\r\n", OK[:-1], CHUNKED + b"3\r\nab"]
)
async def test_an_answer_that_is_cut_or_no_http_is_a_broken_upstream(answer: bytes) -> None:
    async def cut(stream: trio.SocketStream, seen: list[bytes]) -> None:
        seen.append(await one_request(stream))
        if answer:
            await stream.send_all(answer)

    async with engine(cut) as there, running(there.port) as ingress:
        with pytest.raises(UpstreamBroken):
            await ask(ingress)
        assert len(there.requests) == 1


async def test_bytes_pass_as_they_are_and_what_came_together_goes_together() -> None:
    pieces = [b"data: \xff\xfe\r\n\r\n", b": ping\n\n", b"data: {}\n\n"]

    async def streams(stream: trio.SocketStream, seen: list[bytes]) -> None:
        seen.append(await one_request(stream))
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        await stream.send_all(CHUNKED + chunks + b"0\r\n\r\n")
        await one_request(stream)

    async with engine(streams) as there, running(there.port) as ingress:
        exchange = await ingress.open(incarnation(), CHAT, b"{}", Ticket())
        assert await exchange.receive_some() == b"".join(pieces)
        assert await exchange.receive_some() == b""
        await exchange.aclose()
        assert ingress.in_flight(incarnation()) == 0


async def test_the_small_client_says_what_it_could_not_learn() -> None:
    async def mixed(stream: trio.SocketStream, seen: list[bytes]) -> None:
        request = await one_request(stream)
        seen.append(request)
        if b"/silent" in request:
            await trio.sleep_forever()
        if b"/broken" not in request:
            await stream.send_all(OK)

    async with engine(mixed) as there:
        client = LoopbackClient(port=there.port, key="k", limit_s=0.2)
        assert await client.get("/health") == (200, b"{}")
        assert b"Authorization: Bearer k" in there.requests[0]
        with pytest.raises(TimeoutError, match=r"no answer to /silent within 0\.2 s"):
            await client.get("/silent")
        with pytest.raises(ConnectionError):
            await client.post("/broken", b"{}", 1.0)
        port = there.port
    with pytest.raises(ConnectionError, match="on loopback"):
        await LoopbackClient(port=port, key="").get("/health")


async def test_the_way_through_costs_far_less_than_a_millisecond() -> None:
    async with engine(always_ok) as there, running(there.port) as ingress:
        ours, bare = [], []
        raw = await trio.open_tcp_stream("127.0.0.1", there.port)
        asked = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\n\r\n" + b'{"a":1}'
        for _ in range(200):
            began = time.perf_counter()
            await ask(ingress)
            ours.append(time.perf_counter() - began)
            began = time.perf_counter()
            await raw.send_all(asked)
            await raw.receive_some()
            bare.append(time.perf_counter() - began)
        await raw.aclose()
        added_ms = 1000 * (statistics.median(ours) - statistics.median(bare))
        print(f"ingress adds {added_ms:.3f} ms")
        assert added_ms < 1.0  # 0.2-0.3 ms on a quiet machine; this one is shared
