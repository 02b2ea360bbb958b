"""The router's own bounds at their defaults, in memory and in virtual time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

# The fakes live beside the tests that use them over real sockets.
sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "router"))

from router_fakes import DONE, TOKEN, Engine, FakeDesk, FakeUpstream, answers_at_once, chat, chunk

from capyctl.errors import Failure, Refusal
from capyctl.router import Key, Keys, Router, build_app


@attrs.define(eq=False)
class Asked:
    """One request given to the application without a socket; keeps when what was sent."""

    body: bytes
    more_body: bool = False
    sent: list[tuple[float, dict]] = attrs.field(factory=list)
    leave: trio.Event = attrs.field(factory=trio.Event)
    asked: bool = False
    reason: str | None = "hung up"

    async def receive(self) -> dict:
        if not self.asked:
            self.asked = True
            return {"type": "http.request", "body": self.body, "more_body": self.more_body}
        await self.leave.wait()
        return {"type": "http.disconnect", "reason": self.reason}

    async def send(self, message: dict) -> None:
        self.sent.append((trio.current_time(), message))

    async def through(self, app: Router) -> None:
        headers = [(b"authorization", f"Bearer {TOKEN}".encode()), (b"transfer-encoding", b"chunked")]
        scope = {"type": "http", "method": "POST", "raw_path": b"/v1/chat/completions", "headers": headers}
        await app(scope, self.receive, self.send)

    @property
    def status(self) -> int:
        return self.sent[0][1]["status"]

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for _, message in self.sent).decode()

    def times(self, mark: bytes, since: float) -> list[int]:
        return [round(at - since) for at, message in self.sent if mark in message.get("body", b"")]


def ask(**more: object) -> Asked:
    import json

    return Asked(json.dumps(chat(**more)).encode())


@attrs.define
class Room:
    app: Router
    desk: FakeDesk
    upstream: FakeUpstream


def furnish(nursery: trio.Nursery, *scripts: Callable) -> Room:
    desk, upstream = FakeDesk(deadline_seconds=600), FakeUpstream(nursery, list(scripts))
    return Room(build_app(desk, upstream, Keys((Key.of("k", TOKEN),))), desk, upstream)


@pytest.mark.parametrize("ahead_s", [7_200, -7_200])
async def test_an_answer_has_its_time_though_the_machines_clock_is_set_meanwhile(
    ahead_s: int, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + ahead_s)
    async with trio.open_nursery() as nursery:
        here = furnish(nursery, answers_at_once)
        here.desk.gate.set()
        asked = ask(stream=True)
        await asked.through(here.app)
        assert asked.status == 200
        assert "[DONE]" in asked.text
        nursery.cancel_scope.cancel()


async def test_a_waiting_stream_hears_something_every_ten_seconds(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        here = furnish(nursery, answers_at_once)
        asked = ask(stream=True)
        began = trio.current_time()
        nursery.start_soon(asked.through, here.app)
        await trio.sleep(35)
        here.desk.gate.set()
        await here.app.drained()
        assert asked.times(b": x-capyctl-waiting", began) == [10, 20, 30]
        assert asked.times(b"[DONE]", began) == [35]
        nursery.cancel_scope.cancel()


async def test_a_body_has_sixty_seconds(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        here = furnish(nursery, answers_at_once)
        asked = Asked(b'{"model"', more_body=True)
        began = trio.current_time()
        await asked.through(here.app)
        assert asked.status == 408
        assert trio.current_time() - began == pytest.approx(60)
        assert here.desk.arrivals == []
        nursery.cancel_scope.cancel()


async def test_a_stream_may_be_silent_for_two_minutes_after_each_output(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def falls_silent(engine: Engine) -> None:
        engine.head()
        await trio.sleep(500)  # prefill: bounded by the deadline alone
        await engine.say(chunk("a"))
        await trio.sleep(110)
        await engine.say(chunk("b"))
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        here = furnish(nursery, falls_silent)
        here.desk.gate.set()
        asked = ask(stream=True)
        began = trio.current_time()
        await asked.through(here.app)
        assert trio.current_time() - began == pytest.approx(500 + 110 + 120)
        assert "the engine said nothing for 120 s" in asked.text
        assert here.desk.tickets[0].told[-1] == "errored"
        nursery.cancel_scope.cancel()


async def test_no_output_by_the_deadline_ends_a_request_whatever_the_world_does(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def opens_only(engine: Engine) -> None:
        engine.head()
        while True:
            await engine.say(chunk())
            await trio.sleep(5)

    async with trio.open_nursery() as nursery:
        here = furnish(nursery, opens_only)
        here.desk.gate.set()
        asked = ask(stream=True)
        began = trio.current_time()
        await asked.through(here.app)
        assert 600 <= trio.current_time() - began <= 603
        assert '"code": "deadline_exceeded"' in asked.text
        assert here.desk.tickets[0].told[-1] == "client_gone"
        assert here.upstream.fates == ["abandoned"]
        nursery.cancel_scope.cancel()


async def test_a_door_that_stays_closed_is_not_hammered(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        here = furnish(nursery, answers_at_once)
        here.desk.gate.set()
        here.upstream.refusals = 10**9
        asked = ask()
        nursery.start_soon(asked.through, here.app)
        await trio.sleep(60)
        assert here.desk.tickets[0].told.count("not_accepted") < 150
        asked.leave.set()
        await here.app.drained()
        assert here.desk.tickets[0].told[-1] == "client_gone"
        nursery.cancel_scope.cancel()


async def test_a_request_whose_task_is_cancelled_is_settled_all_the_same(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def silent(engine: Engine) -> None:
        engine.head()
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        here = furnish(nursery, silent)
        here.desk.gate.set()
        with trio.move_on_after(3):
            await ask(stream=True).through(here.app)
        assert here.desk.tickets[0].told[-1] == "client_gone"
        assert here.upstream.fates == ["abandoned"]
        nursery.cancel_scope.cancel()


async def test_a_disconnect_is_a_hang_up_unless_the_answer_is_complete(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def ends_late(engine: Engine) -> None:
        engine.head()
        await engine.say(chunk("a"), DONE)
        await trio.sleep(0.5)  # the end of the body, after its terminator

    async with trio.open_nursery() as nursery:
        here = furnish(nursery, ends_late, answers_at_once)
        here.desk.gate.set()
        complete = ask(stream=True)
        complete.reason = None  # a server that gives none
        nursery.start_soon(complete.through, here.app)
        await trio.sleep(0.1)
        complete.leave.set()
        await here.app.drained()
        assert here.desk.tickets[0].told[-1] == "finished"
        here.desk.gate = trio.Event()
        waiting = ask()
        waiting.reason = None
        nursery.start_soon(waiting.through, here.app)
        await trio.sleep(1)
        waiting.leave.set()
        await here.app.drained()
        assert here.desk.tickets[1].told == ["client_gone"]
        nursery.cancel_scope.cancel()


async def test_what_the_role_answers_itself_is_logged_with_its_status(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="capyctl")
    async with trio.open_nursery() as nursery:
        here = furnish(nursery)
        here.desk.gate.set()

        async def status_of(asked: Asked) -> int:
            await asked.through(here.app)
            return asked.status

        answered = [await status_of(Asked(b"[]"))]
        for here.desk.refuse in (Refusal("deployment_stopped", "it is stopped"), Failure("unavailable", "not now")):
            answered.append(await status_of(ask()))
        here.app.alone = True
        answered.append(await status_of(ask()))
        here.app.closing = True
        answered.append(await status_of(ask()))
        assert answered == [400, 409, 503, 503, 503]
        lines = [record.fields for record in caplog.records if record.message == "request.ended"]  # type: ignore[attr-defined]
        assert [line["status"] for line in lines] == answered
        assert lines[3]["outcome"] == "unavailable"
        nursery.cancel_scope.cancel()
