"""Router and host ingress together, before an engine on a real socket that notes what it sees."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial

import attrs
import pytest
import trio
from router_fakes import DONE, FINAL, INCARNATION, TOKEN, WHOLE, Client, FakeDesk, chat, chunk, request

from capyctl.host.ingress import Ingress
from capyctl.router import Key, Keys, Settings, build_app, serve


@attrs.define(eq=False)
class SocketEngine:
    """Does what the request's `user` says; `gone` counts clients that left before their answer ended."""

    bodies: list[bytes] = attrs.field(factory=list)
    gone: int = 0
    left_at: float = 0.0

    async def __call__(self, stream: trio.SocketStream) -> None:
        held = b""
        try:
            while True:
                while b"\r\n\r\n" not in held:
                    held += await self._more(stream)
                head, _, held = held.partition(b"\r\n\r\n")
                assert b"Bearer engine-key" in head
                assert TOKEN.encode() not in head
                size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                while len(held) < size:
                    held += await self._more(stream)
                body, held = held[:size], held[size:]
                self.bodies.append(body)
                await self._act(stream, json.loads(body)["user"])
        except* EOFError:
            pass  # the client, or this engine, is done with the connection

    async def _more(self, stream: trio.SocketStream) -> bytes:
        data = await stream.receive_some(65536)
        if not data:
            raise EOFError
        return data

    async def _act(self, stream: trio.SocketStream, what: str) -> None:
        def framed(data: bytes) -> bytes:
            return b"%x\r\n%s\r\n" % (len(data), data)

        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nSet-Cookie: x=1\r\n"
        head += b"Transfer-Encoding: chunked\r\n\r\n"
        if what == "whole":
            await stream.send_all(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE
            )
        elif what == "refuse":
            refusal = b'{"error":{"message":"too long"}}'
            await stream.send_all(
                b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                % len(refusal)
                + refusal
            )
        elif what == "stream":
            await stream.send_all(head + framed(chunk()) + framed(chunk("a")) + framed(DONE) + b"0\r\n\r\n")
        elif what == "bytes":
            await stream.send_all(head)
            for byte in chunk("é😀") + DONE:
                await stream.send_all(framed(bytes([byte])))
            await stream.send_all(b"0\r\n\r\n")
        elif what == "die":
            await stream.send_all(head + framed(chunk("a")) + b"50\r\ndata: {")
            await stream.aclose()
            raise EOFError
        elif what == "silent":
            await self._until_gone(stream)
        elif what == "drip":
            await stream.send_all(head + framed(chunk()))
            async with trio.open_nursery() as nursery:

                async def drip() -> None:
                    try:
                        while True:
                            await stream.send_all(framed(chunk("a")))
                            await trio.sleep(0.01)
                    except (trio.BrokenResourceError, trio.ClosedResourceError):
                        pass  # the reader below notes it

                nursery.start_soon(drip)
                try:
                    await self._until_gone(stream)
                finally:
                    nursery.cancel_scope.cancel()

    async def _until_gone(self, stream: trio.SocketStream) -> None:
        try:
            data = await stream.receive_some(1)
        except trio.BrokenResourceError:
            data = b""
        assert data == b""
        self.gone += 1
        self.left_at = trio.current_time()
        await stream.aclose()
        raise EOFError


@attrs.define(eq=False)
class Street:
    desk: FakeDesk
    ingress: Ingress
    engine: SocketEngine
    port: int
    ended: list[str]
    drained: object

    async def connect(self) -> Client:
        return Client(await trio.open_tcp_stream("127.0.0.1", self.port))


async def eventually(holds: Callable[[], bool]) -> None:
    """What another task does by itself, and soon."""
    while not holds():
        await trio.sleep(0.001)


@contextlib.asynccontextmanager
async def street() -> AsyncIterator[Street]:
    with trio.fail_after(40):
        async with trio.open_nursery() as nursery:
            engine, desk, ended = SocketEngine(), FakeDesk(), []
            desk.gate.set()
            listeners = await nursery.start(partial(trio.serve_tcp, engine, 0, host="127.0.0.1"))
            ingress = Ingress(lambda request, half_closed_at_ms, eof_at_ms: ended.append(request))
            await nursery.start(ingress.run)
            ingress.admit(INCARNATION, listeners[0].socket.getsockname()[1], "engine-key")
            app = build_app(desk, ingress, Keys((Key.of("first", TOKEN),)), settings=Settings(keep_alive_seconds=5))
            stopping, stopped = trio.Event(), trio.Event()

            async def run(task_status: trio.TaskStatus[list[str]]) -> None:
                await serve(app, "127.0.0.1:0", stopping=stopping, drain_seconds=1, task_status=task_status)
                stopped.set()

            addresses = await nursery.start(run)
            yield Street(desk, ingress, engine, int(addresses[0].rsplit(":", 1)[1]), ended, app.drained)
            stopping.set()
            await stopped.wait()
            nursery.cancel_scope.cancel()


async def test_every_kind_of_answer_comes_through() -> None:
    async with street() as here:
        client = await here.connect()
        assert (await client.ask(chat(user="whole"))).body.startswith(WHOLE[:-1])
        refusal = await client.ask(chat(user="refuse"))
        assert (refusal.status, refusal.json["message"]) == (400, "too long")
        for what in ("stream", "bytes"):
            answer = await client.ask(chat(stream=True, user=what))
            assert answer.events[-1] == "[DONE]"
            assert answer.header("set-cookie") is None
        assert chunk("é😀") in answer.body
        answer = await client.ask(chat(stream=True, user="die"))
        assert json.loads(answer.events[-1])["code"] == "engine_error"
        await here.drained()
        assert [ticket.told[-1] for ticket in here.desk.tickets] == [
            *("finished", "rejected", "finished", "finished", "upstream_lost")
        ]
        assert here.ingress.in_flight(INCARNATION) == 0


@pytest.mark.parametrize(("what", "stream"), [("silent", False), ("silent", True), ("drip", True)])
async def test_the_engine_reads_the_hang_up_at_once_and_its_end_is_reported(what: str, stream: bool) -> None:
    async with street() as here:
        client = await here.connect()
        await client.send(request(chat(stream=stream, user=what)))
        ticket = await here.desk.ticket()
        await ticket.until("first_output" if what == "drip" else "sent")
        await eventually(lambda: len(here.engine.bodies) == 1)
        await client.aclose()
        left_at = trio.current_time()
        await ticket.until("client_gone")
        await eventually(lambda: here.ended == [ticket.request])
        assert here.engine.left_at - left_at < 0.1
        assert here.engine.gone == 1


async def test_counts_come_back_to_zero_after_requests_that_end_anywhere() -> None:
    dice = random.Random(11)
    async with street() as here:

        async def one(limit: trio.CapacityLimiter) -> None:
            async with limit:
                what = dice.choice(["whole", "refuse", "stream", "bytes", "die", "silent", "drip"])
                raw = request(chat(stream=what in ("stream", "bytes", "die", "drip"), user=what))
                client = await here.connect()
                with trio.move_on_after(dice.choice([0, 0.002, 0.01, 0.03, 0.3])):
                    await client.send(raw[: dice.choice([len(raw), len(raw), len(raw), dice.randrange(len(raw))])])
                    if dice.random() < 0.2:
                        await client.stream.send_eof()
                    await client.at_end()
                await client.aclose()

        limit = trio.CapacityLimiter(20)
        async with trio.open_nursery() as nursery:
            for _ in range(400):
                nursery.start_soon(one, limit)
        await here.drained()
        await eventually(lambda: here.ingress.in_flight(INCARNATION) == 0)
        ends = Counter(tuple(fact for fact in ticket.told if fact in FINAL) for ticket in here.desk.tickets)
        assert all(len(final) == 1 for final in ends), ends
        assert {final[0] for final in ends} >= {"finished", "rejected", "upstream_lost", "client_gone"}, ends
        client = await here.connect()
        for _ in range(33):
            assert (await client.ask(chat(user="whole"))).status == 200
