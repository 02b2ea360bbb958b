"""A desk, a ticket and an upstream that keep their promises, and a listener over them on a real socket.

The ticket checks what the contract says of it: at most one final report, no fact before its cause.
The upstream is a script per request: what the engine does is written in the test.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

import attrs
import trio

from capyctl.errors import CapyError
from capyctl.fsm.types import DeploymentId, Generation, HostId, Incarnation, Lane, Millis, RequestId
from capyctl.router import (
    Arrival,
    Bounds,
    Key,
    Keyring,
    Keys,
    Model,
    NotAccepted,
    Place,
    Router,
    Settings,
    UpstreamBroken,
    Waiting,
    build_app,
    serve,
)
from capyctl.router.listener import CONNECTIONS_MAX

TOKEN = "k" * 43
INCARNATION = Incarnation(lane=Lane(deployment=DeploymentId("D"), index=0), generation=Generation(1))
FINAL = {"finished", "rejected", "errored", "upstream_lost", "client_gone", "refused", "cut"}


@attrs.define(eq=False)
class FakeTicket:
    """Records every report. `place` waits for the desk's gate, then answers with a place or raises."""

    request: RequestId
    arrival: Arrival
    desk: FakeDesk
    told: list[str] = attrs.field(factory=list)
    reasons: list[str] = attrs.field(factory=list)
    at: dict[str, float] = attrs.field(factory=dict)
    changed: trio.Event = attrs.field(factory=trio.Event)
    _cut: trio.Event = attrs.field(factory=trio.Event)
    _cut_error: tuple[str, str] | None = None

    def tell(self, fact: str, reason: str = "") -> None:
        if fact in FINAL:
            assert not FINAL & set(self.told), f"{fact} after {self.told}"
        self.told.append(fact)
        self.reasons.append(reason)
        self.at[fact] = trio.current_time()
        changed, self.changed = self.changed, trio.Event()
        changed.set()

    async def until(self, fact: str) -> None:
        while fact not in self.told:
            await self.changed.wait()

    async def place(self) -> Place:
        await self.desk.gate.wait()
        if self.desk.refuse_place is not None:
            self.tell("refused")
            raise self.desk.refuse_place
        self.tell("placed")
        return Place(
            incarnation=INCARNATION,
            host=HostId("H"),
            served_name=self.desk.served_name or self.arrival.route,
            left_ms=Millis(int(self.desk.deadline_seconds * 1000)),
        )

    def waiting(self) -> Waiting:
        return self.desk.waiting

    def sent(self) -> None:
        assert self.told[-1] == "placed"
        self.tell("sent")

    def not_accepted(self, reason: str) -> None:
        self.tell("not_accepted", reason)

    def first_output(self) -> None:
        assert "sent" in self.told
        assert "first_output" not in self.told
        self.tell("first_output")

    def finished(self) -> None:
        assert "first_output" in self.told
        self.tell("finished")

    def rejected(self, status: int) -> None:
        self.tell("rejected", str(status))

    def errored(self, reason: str) -> None:
        self.tell("errored", reason)

    def upstream_lost(self, reason: str) -> None:
        self.tell("upstream_lost", reason)

    def client_gone(self, reason: str) -> None:
        self.tell("client_gone", reason)

    def end(self, code: str, message: str) -> None:
        """The world cuts this request."""
        self.tell("cut")
        self._cut_error = (code, message)
        self._cut.set()

    @property
    def cut(self) -> trio.Event:
        return self._cut

    @property
    def cut_error(self) -> tuple[str, str] | None:
        return self._cut_error


@attrs.define(eq=False)
class FakeDesk:
    names: list[Model] = attrs.field(factory=lambda: [Model(id="m", api="chat", created_s=1)])
    refuse: Exception | None = None
    refuse_place: CapyError | None = None
    served_name: str | None = None
    deadline_seconds: float = 30.0
    waiting: Waiting = attrs.field(factory=lambda: Waiting(state="starting", position=1, estimate_s=7))
    accepting: bool = True
    gate: trio.Event = attrs.field(factory=trio.Event)
    tickets: list[FakeTicket] = attrs.field(factory=list)
    arrivals: list[Arrival] = attrs.field(factory=list)
    arrived: trio.Event = attrs.field(factory=trio.Event)

    def arrive(self, arrival: Arrival) -> FakeTicket:
        self.arrivals.append(arrival)
        if self.refuse is not None:
            raise self.refuse
        ticket = FakeTicket(arrival.request, arrival, self)
        self.tickets.append(ticket)
        arrived, self.arrived = self.arrived, trio.Event()
        arrived.set()
        return ticket

    async def ticket(self, number: int = 0) -> FakeTicket:
        """The ticket of the nth request, once it has arrived."""
        while len(self.tickets) <= number:
            await self.arrived.wait()
        return self.tickets[number]

    def models(self) -> list[Model]:
        return self.names


@attrs.define(eq=False)
class FakeExchange:
    """One answer. `say` bytes from the script; `abandon` ends the script at once."""

    status: int
    content_type: str
    _pieces: trio.MemoryReceiveChannel[bytes]
    _done: Callable[[str], None]
    broken: bool = False
    fate: str = ""  # "abandoned", "returned" (body ended) or "closed"
    ended: bool = False
    reading: bool = False

    async def receive_some(self) -> bytes:
        assert not self.fate
        assert not self.reading
        self.reading = True
        try:
            return await self._pieces.receive()
        except trio.EndOfChannel:
            self.ended = True
            if self.broken:
                raise UpstreamBroken("reset by peer 10.1.2.3:8100") from None
            return b""
        finally:
            self.reading = False

    async def aclose(self) -> None:
        assert not self.fate
        self.fate = "returned" if self.ended and not self.broken else "closed"
        self._done(self.fate)

    def abandon(self, request: RequestId) -> None:
        assert not self.fate
        assert not self.reading, "abandoned under a reader"
        self.fate = "abandoned"
        self._done(self.fate)


@attrs.define(eq=False)
class Engine:
    """What the script of one request can do."""

    path: str
    body: bytes
    _send: trio.MemorySendChannel[bytes]
    _head: Callable[[int, str], FakeExchange]
    exchange: FakeExchange | None = None

    def head(self, status: int = 200, content_type: str = "text/event-stream; charset=utf-8") -> None:
        self.exchange = self._head(status, content_type)

    async def say(self, *pieces: bytes) -> None:
        for piece in pieces:
            await self._send.send(piece)

    def die(self) -> None:
        assert self.exchange is not None
        self.exchange.broken = True


Script = Callable[[Engine], Awaitable[None]]


@attrs.define(eq=False)
class FakeUpstream:
    """Opens exchanges whose other side is a script run in the nursery; counts what became of them."""

    nursery: trio.Nursery
    scripts: list[Script] = attrs.field(factory=list)
    refusals: int = 0
    opened: list[Engine] = attrs.field(factory=list)
    fates: list[str] = attrs.field(factory=list)
    fated_at: list[float] = attrs.field(factory=list)
    changed: trio.Event = attrs.field(factory=trio.Event)

    async def fate(self, number: int = 0) -> str:
        while len(self.fates) <= number:
            await self.changed.wait()
        return self.fates[number]

    async def open(
        self, incarnation: Incarnation, path: str, body: bytes, ticket: FakeTicket, *, named: bool = False
    ) -> FakeExchange:
        if self.refusals:
            self.refusals -= 1
            raise NotAccepted("connection refused by 10.1.2.3:8100")
        script = self.scripts[min(len(self.opened), len(self.scripts) - 1)]
        send, receive = trio.open_memory_channel[bytes](0)
        scope = trio.CancelScope()
        ready = trio.Event()
        made: list[FakeExchange] = []

        def done(fate: str) -> None:
            self.fates.append(fate)
            self.fated_at.append(trio.current_time())
            scope.cancel()
            changed, self.changed = self.changed, trio.Event()
            changed.set()

        def head(status: int, content_type: str) -> FakeExchange:
            made.append(FakeExchange(status, content_type, receive, done))
            ready.set()
            return made[0]

        engine = Engine(path, body, send, head)
        self.opened.append(engine)
        ticket.sent()

        async def run() -> None:
            with scope, send:
                await script(engine)
                ready.set()

        self.nursery.start_soon(run)
        try:
            await ready.wait()
        except trio.Cancelled:
            done("abandoned")
            raise
        if not made:
            done("closed")
            raise UpstreamBroken("no head")
        return made[0]


@attrs.define(eq=False)
class House:
    """A served router: its fakes, its address, and clients for it."""

    app: Router
    desk: FakeDesk
    upstream: FakeUpstream
    address: str
    stopping: trio.Event
    hurry: trio.Event
    stopped: trio.Event
    alone: trio.Event

    @property
    def port(self) -> int:
        return int(self.address.rsplit(":", 1)[1])

    async def told(self, number: int = 0) -> list[str]:
        """What the nth ticket was told, once the router is done with everything."""
        await self.app.drained()
        return self.desk.tickets[number].told

    async def connect(self, receive_buffer: int | None = None) -> Client:
        sock = trio.socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await sock.connect(("127.0.0.1", self.port))
        return Client(trio.SocketStream(sock))


@contextlib.asynccontextmanager
async def house(
    *scripts: Script,
    keyring: Keyring | None = None,
    settings: Settings | None = None,
    open_gate: bool = True,
    drain_seconds: float = 5.0,
    bounds: Bounds | None = None,
    connections_max: int = CONNECTIONS_MAX,
) -> AsyncIterator[House]:
    """Serve a router on a free loopback port for the length of a block."""
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            desk = FakeDesk()
            if open_gate:
                desk.gate.set()
            upstream = FakeUpstream(nursery, list(scripts))
            app = build_app(desk, upstream, keyring or Keys((Key.of("first", TOKEN),)), settings=settings)
            stopping, hurry, stopped, alone = trio.Event(), trio.Event(), trio.Event(), trio.Event()

            async def run(task_status: trio.TaskStatus[list[str]]) -> None:
                await serve(
                    app,
                    "127.0.0.1:0",
                    stopping=stopping,
                    hurry=hurry,
                    alone=alone,
                    drain_seconds=drain_seconds,
                    bounds=bounds,
                    connections_max=connections_max,
                    task_status=task_status,
                )
                stopped.set()

            addresses = await nursery.start(run)
            yield House(app, desk, upstream, addresses[0], stopping, hurry, stopped, alone)
            stopping.set()
            hurry.set()
            await stopped.wait()
            assert len(upstream.fates) == len(upstream.opened), "an exchange was neither given back nor abandoned"
            nursery.cancel_scope.cancel()


@attrs.define
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        values = [value for found, value in self.headers if found == name]
        assert len(values) <= 1, f"{name} more than once"
        return values[0] if values else None

    @property
    def json(self) -> dict:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The code, which both shapes must agree on."""
        found = self.json
        assert found["error"]["code"] == found["code"]
        assert found["error"]["message"] == found["message"]
        assert isinstance(found["retryable"], bool)
        return found["code"]

    @property
    def events(self) -> list[str]:
        """The data of a stream's events."""
        return [
            "\n".join(line[6:] for line in event.split("\n") if line.startswith("data: "))
            for event in self.body.decode().split("\n\n")
            if "data: " in event
        ]

    @property
    def comments(self) -> list[str]:
        return [line[2:] for line in self.body.decode().split("\n") if line.startswith(": ")]


@attrs.define(eq=False)
class Client:
    """A raw HTTP/1.1 client that can misbehave."""

    stream: trio.SocketStream
    held: bytearray = attrs.field(factory=bytearray)

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def ask(self, *arguments: object, **keywords: object) -> Answer:
        await self.send(request(*arguments, **keywords))
        return await self.answer()

    async def fill(self) -> bool:
        try:
            data = await self.stream.receive_some(65536)
        except trio.BrokenResourceError:
            data = b""
        self.held += data
        return bool(data)

    async def until(self, mark: bytes) -> bytes:
        """Bytes up to and including `mark`."""
        while mark not in self.held:
            assert await self.fill(), f"closed before {mark!r}: {bytes(self.held)!r}"
        end = self.held.index(mark) + len(mark)
        taken = bytes(self.held[:end])
        del self.held[:end]
        return taken

    async def exactly(self, size: int) -> bytes:
        while len(self.held) < size:
            assert await self.fill(), f"closed with {len(self.held)} of {size} bytes"
        taken = bytes(self.held[:size])
        del self.held[:size]
        return taken

    async def head(self) -> Answer:
        lines = (await self.until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = [(line.split(":", 1)[0].lower(), line.split(":", 1)[1].strip()) for line in lines[1:] if line]
        return Answer(int(lines[0].split(" ")[1]), headers, b"")

    async def answer(self, *, head_only: bool = False) -> Answer:
        answer = await self.head()
        while answer.status == 100:
            answer = await self.head()
        if head_only or answer.status == 204:
            return answer
        if answer.header("transfer-encoding") == "chunked":
            while True:
                size = int((await self.until(b"\r\n"))[:-2], 16)
                answer.body += (await self.exactly(size + 2))[:-2]
                if not size:
                    return answer
        answer.body = await self.exactly(int(answer.header("content-length") or "0"))
        return answer

    async def at_end(self) -> bool:
        """Whether the server has closed, with nothing more to read."""
        with trio.move_on_after(5):
            while await self.fill():
                pass
            return True
        return False

    async def aclose(self) -> None:
        await self.stream.aclose()


def request(
    body: object = None,
    *,
    path: str = "/v1/chat/completions",
    method: str | None = None,
    token: str | None = TOKEN,
    headers: Iterable[str] = (),
    length: int | None = None,
) -> bytes:
    """A request's bytes. `body`: bytes as they are, anything else as JSON."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    lines = [f"{method} {path} HTTP/1.1", "Host: x"]
    if token is not None:
        lines.append(f"Authorization: Bearer {token}")
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(raw) if length is None else length}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + raw


def chat(stream: bool = False, **more: object) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream, **more}


def chunk(content: str | None = None, **more: object) -> bytes:
    """One event as llama.cpp writes it."""
    delta = {"role": "assistant", "content": None} if content is None else {"content": content}
    value = {"choices": [{"finish_reason": None, "index": 0, "delta": delta}], "id": "c", "model": "m", **more}
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


USAGE = {"completion_tokens": 2, "prompt_tokens": 5, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}
TIMINGS = {"prompt_ms": 12.5, "predicted_per_second": 80.25}
DONE = b"data: [DONE]\n\n"


async def answers_at_once(engine: Engine) -> None:
    """A whole chat answer, or a stream of two words, as the body asks."""
    if json.loads(engine.body).get("stream"):
        engine.head()
        await engine.say(chunk(), chunk("Hel"), chunk("lo"), chunk("", timings=TIMINGS, usage=USAGE), DONE)
    else:
        engine.head(content_type="application/json; charset=utf-8")
        await engine.say(WHOLE[:20], WHOLE[20:])


WHOLE = json.dumps(
    {
        "choices": [{"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": "Hello é 😀"}}],
        "model": "m",
        "usage": USAGE,
        "timings": TIMINGS,
    },
    ensure_ascii=False,
    separators=(",", ":"),
).encode()
