"""Clients that are broken or hostile: odd framing, endless bodies, dripping headers, smuggling, upgrades."""

from __future__ import annotations

import gc
import json

import psutil
import pytest
import trio
import trio.testing
from router_fakes import DONE, TOKEN, Engine, answers_at_once, chat, chunk, house, request

from capyctl.router import Bounds, Settings

BODY = json.dumps(chat()).encode()
AUTH = f"Authorization: Bearer {TOKEN}\r\n".encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + AUTH


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n"


# --- bodies in all their wrappings ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("trailer", [b"", b"X-Checksum: 1\r\n"])
async def test_a_body_in_chunks_reaches_the_engine_whole(size: int, trailer: bytes) -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY, size) + trailer + b"\r\n")
        assert (await client.answer()).status == 200
        assert here.upstream.opened[0].body == BODY
        assert here.desk.arrivals[0].body_bytes == len(BODY)
        assert (await client.ask(chat())).status == 200


async def test_a_body_that_trickles_in_is_read_whole() -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        raw = request(chat())
        for at in range(len(raw)):
            await client.send(raw[at : at + 1])
        assert (await client.answer()).status == 200


async def test_whoever_expects_to_be_asked_for_the_body_is_asked() -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        await client.send(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        assert (await client.head()).status == 100
        await client.send(BODY)
        assert (await client.answer()).status == 200


async def test_whoever_is_refused_is_not_asked_for_the_body() -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        await client.send(HEAD + b"Expect: 100-continue\r\nContent-Length: 1000000000000\r\n\r\n")
        assert (await client.head()).status == 413


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "br", "deflate", "nonsense", "gzip, identity"])
async def test_a_compressed_body_is_refused_and_not_passed_on(encoding: str) -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        answer = await client.ask(b"\x1f\x8b\x08", headers=[f"Content-Encoding: {encoding}"])
        assert (answer.status, answer.error) == (415, "unsupported")
        assert here.desk.arrivals == []


async def test_a_body_over_the_bound_is_refused_before_it_is_read() -> None:
    async with house(answers_at_once, settings=Settings(body_bytes_max=1000)) as here:
        for length in (1001, 10**12):
            client = await here.connect()
            answer = await client.ask(b"", length=length)
            assert (answer.status, answer.error) == (413, "body_too_large")
            assert answer.header("connection") == "close"
        client = await here.connect()
        assert (await client.ask(BODY.ljust(1000))).status == 200


async def test_the_answer_to_an_endless_body_arrives_and_memory_stays_flat() -> None:
    async with house(
        answers_at_once, settings=Settings(body_bytes_max=2**20), bounds=Bounds(linger_seconds=0.3)
    ) as here:
        gc.collect()
        before = psutil.Process().memory_info().rss
        client = await here.connect()
        await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        answered = trio.Event()

        async def pour() -> None:
            try:
                while True:
                    await client.send(piece)
            except trio.BrokenResourceError:
                answered.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pour)
            answer = await client.answer()
            assert (answer.status, answer.error) == (413, "body_too_large")
            await answered.wait()
            nursery.cancel_scope.cancel()
        assert psutil.Process().memory_info().rss - before < 32 * 2**20


async def test_bodies_that_arrive_are_counted_and_a_full_total_is_refused_with_a_time() -> None:
    whole = BODY.ljust(60_000)
    head = HEAD + b"Content-Length: 60000\r\n\r\n"
    async with house(answers_at_once, settings=Settings(buffered_bytes_max=100_000)) as here:
        slow, gone, more = [await here.connect() for _ in range(3)]
        await slow.send(head + whole[:50_000])
        while here.app.bodies.held < 50_000:
            await trio.lowlevel.checkpoint()
        refused = await more.ask(whole)
        assert (refused.status, refused.error, refused.json["retryable"]) == (429, "queue_full", True)
        assert (refused.header("retry-after"), refused.header("connection")) == ("1", "close")
        typed = await (await here.connect()).ask(whole, path="/v1/messages")
        assert (typed.status, typed.json["type"], typed.header("retry-after")) == (429, "error", "1")
        await gone.send(head + whole[:40_000])
        while here.app.bodies.held < 90_000:
            await trio.lowlevel.checkpoint()
        await gone.aclose()
        await slow.send(whole[50_000:])
        assert (await slow.answer()).status == 200
        await here.app.drained()
        assert here.app.bodies.held == 0


async def test_bodies_that_wait_are_counted_until_they_are_sent_and_then_let_go() -> None:
    whole = BODY.ljust(60_000)
    answering = trio.Event()

    async def slowly(engine: Engine) -> None:
        engine.head()
        await answering.wait()
        await engine.say(chunk("x"), chunk("", usage={}), DONE)

    async with house(slowly, settings=Settings(buffered_bytes_max=100_000), open_gate=False) as here:
        first, second = await here.connect(), await here.connect()
        await first.send(request(json.dumps(chat(stream=True)).encode().ljust(60_000)))
        await here.desk.ticket()
        assert (await second.ask(whole)).error == "queue_full"
        here.desk.gate.set()
        while not here.upstream.opened or here.upstream.opened[0].exchange is None:
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked(0.01)
        (relay,) = here.app._relays
        assert (here.app.bodies.held, relay.question.text) == (0, b"")
        answering.set()
        assert (await first.answer()).status == 200


async def test_a_body_larger_than_the_total_is_served_when_it_is_alone() -> None:
    async with house(answers_at_once, settings=Settings(buffered_bytes_max=1000)) as here:
        client = await here.connect()
        assert (await client.ask(BODY.ljust(50_000))).status == 200


async def test_others_are_answered_while_a_nasty_body_is_looked_over() -> None:
    nasty = BODY.rstrip()[:-1] + b',"x":[' + b"[[[[0]]]]," * 50_000 + b"0]}"
    async with house(answers_at_once) as here:
        slow, quick = await here.connect(), await here.connect()
        await slow.send(request(nasty))
        while here.app.bodies.held < len(nasty):
            await trio.lowlevel.checkpoint()
        assert (await quick.ask(BODY)).status == 200
        assert len(here.desk.tickets) == 1
        assert (await slow.answer()).status == 200


async def test_a_client_that_sends_a_large_body_without_a_key_reads_its_401() -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        await client.send(request(b"x" * 3_000_000, token="wrong"))
        answer = await client.answer()
        assert answer.status == 401
        assert await client.at_end()


async def test_a_body_that_stops_arriving_ends_with_408() -> None:
    async with house(answers_at_once, settings=Settings(body_seconds=0.1)) as here:
        client = await here.connect()
        await client.send(request(chat())[:-3])
        answer = await client.answer()
        assert (answer.status, answer.error) == (408, "request_timeout")
        assert answer.json["retryable"]
        assert await client.at_end()
        assert here.desk.arrivals == []


async def test_a_client_that_leaves_before_its_body_is_complete_leaves_nothing() -> None:
    async with house(answers_at_once) as here:
        for _ in range(5):
            client = await here.connect()
            await client.send(request(chat())[:-3])
            await client.aclose()
        client = await here.connect()
        assert (await client.ask(chat())).status == 200
        await here.app.drained()
        assert len(here.desk.arrivals) == 1


# --- framing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        HEAD + b"Content-Length: 5, 6\r\n\r\nhello!",
        HEAD + b"Content-Length: 5, 5\r\n\r\nhello",
        HEAD + b"Content-Length: 5\r\ncontent-length: 5\r\n\r\nhello",
        HEAD + b"X-Folded: a\r\n b\r\nContent-Length: 5\r\n\r\nhello",
        HEAD + b"Content-Length:\r\n\t5\r\n\r\nhello",
        HEAD + b"Content-Length: -5\r\n\r\nhello!",
        HEAD + b"Content-Length: +5\r\n\r\nhello",
        HEAD + b"Content-Length: 0x5\r\n\r\nhello",
        HEAD + b"Content-Length : 5\r\n\r\nhello",
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloXX0\r\n\r\n",
        HEAD.replace(b"Host: x\r\n", b""),
        HEAD.replace(b"Host: x\r\n", b"Host: x\r\nHost: y\r\n") + b"\r\n",
        b"GET /v1/models\r\n\r\n",
        b"GET /v1/models HTTP/3.0\r\nHost: x\r\n\r\n",
        b"GET /v1/mod\x00els HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"hello\r\n\r\n",
    ],
)
async def test_odd_framing_is_refused_and_the_connection_closed(head: bytes) -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        await client.send(head if b"\r\n\r\n" in head else head + b"\r\n")
        answer = await client.answer()
        assert answer.status in (400, 431, 501, 505)
        assert answer.error == "invalid_request"
        assert await client.at_end()
        await here.app.drained()
        assert here.desk.arrivals == []


async def test_a_request_hidden_in_a_body_stays_a_body() -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        hidden = request(chat(x="hidden"))
        answer = await client.ask(hidden)
        assert answer.status == 400
        assert (await client.ask(chat())).status == 200
        await here.app.drained()
        assert len(here.desk.arrivals) == 1


async def test_pipelined_requests_are_answered_in_order_one_at_a_time() -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        raw = [request(chat(stream=number % 2 == 0, user=str(number))) for number in range(6)]
        await client.send(b"\r\n" + b"\r\n\r\n".join(raw) + b"\r\n")
        ids = [(await client.answer()).header("x-capyctl-request-id") for _ in raw]
        assert ids == [arrival.request for arrival in here.desk.arrivals]
        assert [json.loads(engine.body)["user"] for engine in here.upstream.opened] == list("012345")
        assert (await client.ask(chat())).status == 200


async def test_more_pipelined_than_is_kept_is_answered_up_to_there_and_closed() -> None:
    async with house(answers_at_once, open_gate=False) as here:
        client = await here.connect()
        await client.send(request(chat()))
        await here.desk.ticket()
        await client.send(request(chat()) * 1000)
        await trio.testing.wait_all_tasks_blocked(0.05)
        here.desk.gate.set()
        assert (await client.answer()).status == 200
        assert await client.at_end()
        await here.app.drained()
        assert len(here.desk.arrivals) == 1


@pytest.mark.parametrize(
    "headers",
    [
        b"X-Large: " + b"x" * 20_000 + b"\r\n",
        b"".join(b"X-%d: %s\r\n" % (number, b"y" * 400) for number in range(60)),
        b"".join(b"X-%d: y\r\n" % number for number in range(120)),
        b"Authorization: Bearer " + b"x" * 10_000_000 + b"\r\n",
    ],
)
async def test_a_header_block_over_its_bound_is_refused(headers: bytes) -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        async with trio.open_nursery() as nursery:

            async def pour() -> None:
                try:
                    await client.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
                except trio.BrokenResourceError:
                    pass  # refused before it was sent whole

            nursery.start_soon(pour)
            answer = await client.answer()
            assert answer.status == 431
            nursery.cancel_scope.cancel()


async def test_dripping_headers_are_closed_while_others_are_served() -> None:
    async with house(answers_at_once, bounds=Bounds(head_seconds=0.5)) as here:
        drippers = [await here.connect() for _ in range(60)]
        drip = request(chat())[:60]

        async def drip_all() -> None:
            for at in range(len(drip)):
                for client in drippers:
                    try:
                        await client.send(drip[at : at + 1])
                    except trio.BrokenResourceError:
                        return
                await trio.sleep(0.02)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drip_all)
            for _ in range(5):
                client = await here.connect()
                assert (await client.ask(chat())).status == 200
                await trio.sleep(0.1)
            for client in drippers:
                assert await client.at_end()
            nursery.cancel_scope.cancel()
        assert len(here.desk.arrivals) == 5


async def test_a_header_block_may_not_drip_on_a_connection_that_served_before() -> None:
    async with house(answers_at_once, bounds=Bounds(head_seconds=0.2, idle_seconds=30)) as here:
        client = await here.connect()
        assert (await client.ask(chat())).status == 200
        await trio.sleep(0.3)  # resting is no part of the time for a head
        assert (await client.ask(chat())).status == 200
        await client.send(b"GET")
        with trio.fail_after(30):
            assert await client.at_end()


async def test_an_idle_connection_is_closed_after_its_time() -> None:
    async with house(answers_at_once, bounds=Bounds(idle_seconds=0.1)) as here:
        client = await here.connect()
        assert (await client.ask(chat())).status == 200
        with trio.fail_after(30):
            assert await client.at_end()


# --- other protocols ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"],
        [
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZQ==",
        ],
    ],
)
async def test_upgrades_are_ignored_and_the_key_still_counts(headers: list[str]) -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        assert (await client.ask(path="/v1/models", headers=headers)).status == 200
        assert (await client.ask(path="/v1/models", headers=headers, token="wrong")).status == 401


async def test_an_http_1_0_proxy_gets_its_answers_and_streams() -> None:
    async with house(answers_at_once) as here:
        for stream in (False, True):
            client = await here.connect()
            await client.send(request(chat(stream=stream)).replace(b"HTTP/1.1", b"HTTP/1.0"))
            head = await client.head()
            assert head.status == 200
            assert head.header("transfer-encoding") is None
            assert await client.at_end()
            assert (DONE in client.held) is stream


async def test_headers_of_ours_from_a_client_mean_nothing() -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        answer = await client.ask(
            chat(),
            headers=[
                "X-CapyCTL-Request-Id: forged",
                "X-CapyCTL-Generation: 9",
                "X-Forwarded-For: 1.2.3.4",
                "TE: trailers",
            ],
        )
        assert answer.status == 200
        assert answer.header("x-capyctl-request-id") != "forged"


async def test_a_query_is_not_a_path() -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        answer = await client.ask(chat(), path="/v1/messages?beta=true")
        assert answer.status == 200
        assert here.upstream.opened[0].path == "/v1/messages"
        assert (await client.ask(path="/x?/v1/models")).status == 404


async def test_model_names_of_any_kind_are_only_asked_for_at_the_desk() -> None:
    from capyctl.errors import Refusal

    async with house(answers_at_once) as here:
        here.desk.refuse = Refusal("not_found", "no such deployment")
        client = await here.connect()
        for name in ("../../etc/passwd", "a\x00b", "x" * 1_000_000, "%2e%2e", "😀", "M", "m.", "", "\x1b[31m"):
            answer = await client.ask(chat() | {"model": name})
            assert (answer.status, answer.error) == (404, "not_found")


async def test_a_fault_of_the_router_is_one_internal_error_without_detail() -> None:
    async with house(answers_at_once) as here:
        here.desk.refuse = RuntimeError("secret prompt")
        client = await here.connect()
        answer = await client.ask(chat())
        assert (answer.status, answer.error) == (500, "internal")
        assert b"secret" not in answer.body
        here.desk.refuse = None
        assert (await client.ask(chat())).status == 200


async def test_who_comes_when_all_connections_are_taken_is_hung_up_on_and_others_are_served_on() -> None:
    async with house(answers_at_once, answers_at_once, connections_max=2) as here:
        one, other = await here.connect(), await here.connect()
        assert (await one.ask(chat())).status == 200
        assert await (await here.connect()).at_end()
        await other.aclose()
        await trio.sleep(0.05)  # its end is noticed
        assert (await (await here.connect()).ask(chat())).status == 200
