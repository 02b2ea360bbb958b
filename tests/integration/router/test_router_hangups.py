"""A client that goes away, at every stage and in every way: the engine stops at once, and counts come back."""

from __future__ import annotations

import json
import socket
import struct

import pytest
import trio
import trio.testing
from router_fakes import DONE, WHOLE, Client, Engine, House, answers_at_once, chat, chunk, house, request

from capyctl.router import Bounds, Settings

CUT_WITHIN_S = 1.0
"""Ten times what is promised: this process may have to wait for a processor."""


async def close(client: Client) -> None:
    await client.aclose()


async def half_close(client: Client) -> None:
    await client.stream.send_eof()


async def reset(client: Client) -> None:
    client.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await client.aclose()


async def pipeline_and_close(client: Client) -> None:
    await client.send(request(chat()))
    await trio.sleep(0.02)  # read by itself, before the end
    await client.aclose()


async def stray_line_end_and_close(client: Client) -> None:
    await client.send(b"\r\n")
    await trio.sleep(0.02)  # as above
    await client.aclose()


async def flood_and_close(client: Client) -> None:
    """Far more ahead of time than anybody keeps; the hang-up is behind all of it."""
    await client.send(request(chat()) * 2000)
    await client.aclose()


WAYS = [close, half_close, reset, pipeline_and_close, stray_line_end_and_close, flood_and_close]


async def before_the_head(engine: Engine) -> None:
    await trio.sleep_forever()


async def before_the_first_output(engine: Engine) -> None:
    engine.head()
    await engine.say(chunk())
    await trio.sleep_forever()


async def in_mid_stream(engine: Engine) -> None:
    engine.head()
    await engine.say(chunk(), chunk("a"))
    while True:
        await trio.sleep(0.01)
        await engine.say(chunk("b"))


async def in_a_silent_stream(engine: Engine) -> None:
    engine.head()
    await engine.say(chunk(), chunk("a"))
    await trio.sleep_forever()


async def in_a_whole_answer(engine: Engine) -> None:
    engine.head(content_type="application/json")
    await engine.say(WHOLE[:10])
    await trio.sleep_forever()


async def ready_to_leave(here: House, client: Client, stage: object) -> None:
    """Wait until the request has got as far as the stage says."""
    ticket = await here.desk.ticket()
    if stage is before_the_head:
        await ticket.until("sent")
    elif stage is before_the_first_output:
        await client.until(chunk())
    elif stage in (in_mid_stream, in_a_silent_stream):
        await client.until(chunk("a"))
    elif stage is in_a_whole_answer:
        await ticket.until("first_output")


@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    "stage",
    [before_the_head, before_the_first_output, in_mid_stream, in_a_silent_stream, in_a_whole_answer],
    ids=lambda stage: stage.__name__,
)
async def test_the_engine_is_cut_at_once(stage: object, leave: object) -> None:
    async with house(stage) as here:
        client = await here.connect()
        streamed = stage not in (in_a_whole_answer,)
        await client.send(request(chat(stream=streamed)))
        await ready_to_leave(here, client, stage)
        await leave(client)
        left_at = trio.current_time()
        ticket = await here.desk.ticket()
        with trio.fail_after(30):
            await ticket.until("client_gone")
            assert await here.upstream.fate() == "abandoned"
        assert ticket.at["client_gone"] - left_at < CUT_WITHIN_S
        assert here.upstream.fated_at[0] - left_at < CUT_WITHIN_S
        assert ticket.told[-1] == "client_gone"
        await here.app.drained()
        assert len(here.upstream.opened) == 1


@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_waiting_request_gives_its_slot_up_and_reaches_no_engine(leave: object, stream: bool) -> None:
    async with house(answers_at_once, open_gate=False, settings=Settings(keep_alive_seconds=0.03)) as here:
        client = await here.connect()
        await client.send(request(chat(stream=stream)))
        ticket = await here.desk.ticket()
        if stream:
            await client.until(b"}\n\n")
        await leave(client)
        left_at = trio.current_time()
        with trio.fail_after(30):
            await ticket.until("client_gone")
        assert ticket.at["client_gone"] - left_at < CUT_WITHIN_S
        await here.app.drained()
        assert ticket.told == ["client_gone"]
        assert here.upstream.opened == []


async def test_nineteen_leave_and_the_twentieth_is_served() -> None:
    async with house(answers_at_once, open_gate=False) as here:
        clients = []
        for number in range(20):
            client = await here.connect()
            await client.send(request(chat(stream=number % 2 == 0)))
            await here.desk.ticket(number)
            clients.append(client)
        for client in clients[:19]:
            await client.aclose()
        for ticket in here.desk.tickets[:19]:
            await ticket.until("client_gone")
        here.desk.gate.set()
        assert (await clients[19].answer()).status == 200
        await here.app.drained()
        assert [ticket.told[-1] for ticket in here.desk.tickets] == ["client_gone"] * 19 + ["finished"]


async def test_a_client_that_reads_nothing_is_given_up_and_so_is_its_engine() -> None:
    async with house(floods, bounds=Bounds(stall_seconds=0.5)) as here:
        client = await here.connect(receive_buffer=8192)
        await client.send(request(chat(stream=True)))
        ticket = await here.desk.ticket()
        with trio.fail_after(30):
            await ticket.until("client_gone")
        assert ticket.reasons[-1] == "read nothing for 0.5 s"
        assert await here.upstream.fate() == "abandoned"
        await here.app.drained()


async def floods(engine: Engine) -> None:
    engine.head()
    while True:
        await engine.say(chunk("x" * 60_000))


async def until_stalled(here: House) -> None:
    """Until the router waits for the client to read."""
    exchange = None
    while exchange is None or exchange.reading:
        await trio.testing.wait_all_tasks_blocked(0.02)
        exchange = here.upstream.opened[0].exchange if here.upstream.opened else None


async def test_a_hang_up_while_a_write_is_stuck_cuts_the_engine_and_the_write() -> None:
    async with house(floods) as here:
        client = await here.connect(receive_buffer=8192)
        await client.send(request(chat(stream=True)))
        await until_stalled(here)
        await client.stream.send_eof()
        left_at = trio.current_time()
        ticket = await here.desk.ticket()
        await ticket.until("client_gone")
        assert await here.upstream.fate() == "abandoned"
        await here.app.drained()
        assert trio.current_time() - left_at < CUT_WITHIN_S


async def test_the_world_cuts_the_engine_even_while_a_write_is_stuck() -> None:
    async with house(floods, bounds=Bounds(stall_seconds=2)) as here:
        client = await here.connect(receive_buffer=8192)
        await client.send(request(chat(stream=True)))
        await until_stalled(here)
        ticket = await here.desk.ticket()
        ticket.end("unavailable", "its engine is gone")
        assert await here.upstream.fate() == "abandoned"
        assert here.upstream.fated_at[0] - ticket.at["cut"] < CUT_WITHIN_S


async def test_a_client_that_reads_slowly_is_served_whole() -> None:
    event = chunk("x" * 60_000)

    async def twenty(engine: Engine) -> None:
        engine.head()
        await engine.say(*[event] * 20, DONE)

    async with house(twenty, bounds=Bounds(stall_seconds=0.4)) as here:
        client = await here.connect(receive_buffer=8192)
        await client.send(request(chat(stream=True)))
        read = 0
        with trio.fail_after(30):
            while DONE not in client.held:
                await trio.sleep(0.002)
                client.held += await client.stream.receive_some(8192)
                read += 1
        assert (await here.told())[-1] == "finished"
        assert read > 50


async def test_the_world_cuts_a_running_request() -> None:
    async with house(in_mid_stream) as here:
        client = await here.connect()
        await client.send(request(chat(stream=True)))
        await client.until(chunk("a"))
        ticket = await here.desk.ticket()
        ticket.end("deadline_exceeded", "no output within 600 s")
        assert await here.upstream.fate() == "abandoned"
        assert here.upstream.fated_at[0] - ticket.at["cut"] < CUT_WITHIN_S
        event = await client.until(b'"retryable": true}\n\n')
        assert b'data: {"error": {"message": "no output within 600 s"' in event
        assert await client.until(b"0\r\n\r\n")
        await here.app.drained()
        assert ticket.told[-1] == "cut"


async def test_the_world_cuts_a_request_whose_answer_has_not_begun() -> None:
    async with house(before_the_head, answers_at_once) as here:
        client = await here.connect()
        await client.send(request(chat(stream=True)))
        ticket = await here.desk.ticket()
        await ticket.until("sent")
        ticket.end("deadline_exceeded", "too late")
        answer = await client.answer()
        assert (answer.status, answer.error) == (504, "deadline_exceeded")
        assert (await client.ask(chat())).status == 200


async def test_an_engine_silent_past_the_deadline_is_cut_even_when_the_world_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("capyctl.router.relay.WORLD_LATE_SECONDS", 0.1)
    async with house(before_the_head, before_the_first_output) as here:
        here.desk.deadline_seconds = 0.1
        client = await here.connect()
        answer = await client.ask(chat())
        assert (answer.status, answer.error) == (504, "deadline_exceeded")
        assert (await here.told())[-1] == "client_gone"
        answer = await client.ask(chat(stream=True))
        assert answer.status == 200
        assert json.loads(answer.events[-1])["code"] == "deadline_exceeded"
        await here.app.drained()
        assert here.upstream.fates == ["abandoned", "abandoned"]


async def test_a_stream_that_falls_silent_ends_with_an_event() -> None:
    async with house(in_a_silent_stream, settings=Settings(stream_idle_seconds=0.1)) as here:
        client = await here.connect()
        answer = await client.ask(chat(stream=True))
        assert json.loads(answer.events[-1])["message"] == "the engine said nothing for 0.1 s"
        assert (await here.told())[-1] == "errored"
        assert await here.upstream.fate() == "abandoned"


async def test_comments_of_an_engine_are_no_sign_of_life() -> None:
    async def pings(engine: Engine) -> None:
        engine.head()
        await engine.say(chunk("a"))
        while True:
            await trio.sleep(0.02)
            await engine.say(b":\n\n")

    async with house(pings, settings=Settings(stream_idle_seconds=0.15)) as here:
        client = await here.connect()
        answer = await client.ask(chat(stream=True))
        assert json.loads(answer.events[-1])["code"] == "engine_error"


async def test_a_long_prefill_is_kept_alive_once_the_head_is_out() -> None:
    async with house(before_the_first_output, settings=Settings(keep_alive_seconds=0.05)) as here:
        client = await here.connect()
        await client.send(request(chat(stream=True)))
        await client.until(b": keep-alive\n\n")
        await client.until(b": keep-alive\n\n")


# --- shutdown ------------------------------------------------------------------------------------------


async def test_shutdown_lets_streams_end_and_refuses_what_is_new() -> None:
    go_on = trio.Event()

    async def slow(engine: Engine) -> None:
        engine.head()
        await engine.say(chunk("a"))
        await go_on.wait()
        await engine.say(DONE)

    async with house(slow, drain_seconds=10) as here:
        client = await here.connect()
        await client.send(request(chat(stream=True)))
        await client.until(chunk("a"))
        here.stopping.set()
        await trio.testing.wait_all_tasks_blocked()
        late = await here.connect()
        answer = await late.ask(chat())
        assert (answer.status, answer.error) == (503, "unavailable")
        assert answer.json["retryable"]
        assert await late.at_end()
        go_on.set()
        await client.until(DONE)
        await here.stopped.wait()
        assert (await here.told())[-1] == "finished"


async def test_left_alone_it_finishes_what_engines_answer_and_refuses_what_waits() -> None:
    go_on = trio.Event()

    async def slow(engine: Engine) -> None:
        engine.head()
        await engine.say(chunk("a"))
        await go_on.wait()
        await engine.say(DONE)

    async with house(slow, drain_seconds=10) as here:
        running, waiting, arriving = [await here.connect() for _ in range(3)]
        await running.send(request(chat(stream=True)))
        await running.until(chunk("a"))
        here.desk.gate = trio.Event()
        await waiting.send(request(chat()))
        await here.desk.ticket(1)
        await arriving.send(request(chat())[:-5])
        await trio.testing.wait_all_tasks_blocked()
        here.stopping.set()
        here.alone.set()
        assert (await waiting.answer()).status == 503
        await arriving.send(request(chat())[-5:])
        assert (await arriving.answer()).status == 503
        assert len(here.desk.arrivals) == 2
        go_on.set()
        await running.until(DONE)
        with trio.fail_after(30):
            await here.stopped.wait()
        assert [ticket.told[-1] for ticket in here.desk.tickets] == ["finished", "client_gone"]


@pytest.mark.parametrize("hurry", [False, True])
async def test_what_outlives_the_drain_is_told_so_and_cut(hurry: bool) -> None:
    async with house(in_mid_stream, before_the_head, drain_seconds=30 if hurry else 0.1) as here:
        streaming, whole = await here.connect(), await here.connect()
        await streaming.send(request(chat(stream=True)))
        await streaming.until(chunk("a"))
        await whole.send(request(chat()))
        await (await here.desk.ticket(1)).until("sent")
        here.stopping.set()
        if hurry:
            await trio.sleep(0.05)  # it is draining
            here.hurry.set()
        assert b'"code": "unavailable"' in await streaming.until(b'"retryable": true}')
        assert (await whole.answer()).status == 503
        with trio.fail_after(30):
            await here.stopped.wait()
        assert [ticket.told[-1] for ticket in here.desk.tickets] == ["client_gone"] * 2
        assert here.upstream.fates == ["abandoned"] * 2


async def test_shutdown_is_not_held_up_by_idle_connections_or_slow_bodies() -> None:
    async with house(answers_at_once, drain_seconds=0.1) as here:
        idle, slow = await here.connect(), await here.connect()
        await idle.ask(chat())
        await slow.send(request(chat())[:-5])
        here.stopping.set()
        with trio.fail_after(30):
            await here.stopped.wait()
        assert await idle.at_end()
        assert await slow.at_end()
