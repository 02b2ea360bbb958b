"""Clients that go away: what they asked for is given up, in the queue and in the engine, and every count returns."""

from __future__ import annotations

import collections
import random
import re
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from .conftest import REAL, TINY, Build
from .machine import CLOSE_WAIT, Machine, Stopwatch, connections, until

LONG = (
    "Tell me about " + "one thing and another, " * 40
)  # some 250 tokens: over a second of reading. A batch cannot be cut


@pytest.fixture(scope="module")
def machine(build: Build) -> Iterator[Machine]:
    """Room for both models at once."""
    with build(limit_mib=1536) as made:
        made.start()
        made.deploy("real", REAL)
        made.deploy("tiny", TINY)
        yield made


def counts(machine: Machine, name: str) -> dict[str, int]:
    return dict(machine.view(name)["requests"])


def test_nineteen_of_twenty_drop_during_a_cold_start(machine: Machine) -> None:
    calls = [machine.open("tiny", max_tokens=4)]
    engine = machine.engine("tiny")
    with engine.halted():  # a long load
        calls += [machine.open("tiny", max_tokens=4, stream=number % 2 == 0) for number in range(1, 20)]
        until(lambda: counts(machine, "tiny")["waiting"] == 20, 5, "20 waiting")
        since = Stopwatch()
        for number, call in enumerate(calls[1:]):
            call.reset() if number % 2 else call.hang_up()
        until(lambda: counts(machine, "tiny")["waiting"] == 1, 10, "1 waiting", 0.01)
        dropped_s = since.s
    text = calls[0].rest()
    assert text.startswith(b"HTTP/1.1 200 ")
    assert b"data: [DONE]" in text
    assert len(machine.launches("tiny")) == 1
    outcomes = collections.Counter((line["outcome"], line.get("status")) for line in machine.said("request.ended", 20))
    print(f"19 dropped: waiting count is 1 after {dropped_s * 1000:.0f} ms; one launch; outcomes {dict(outcomes)}")
    assert dropped_s < 2
    assert machine.served("tiny", 1) == 1, "the engine saw the one that stayed"
    assert sum(number for (outcome, _), number in outcomes.items() if outcome == "ok") == 1
    assert machine.engine("tiny") == engine


def test_all_drop_during_a_cold_start_and_the_next_one_is_served(machine: Machine) -> None:
    machine.ok("stop", "deployment", "tiny", "--wait")
    machine.act("tiny", "start", wait=False)
    with machine.engine("tiny").halted():
        calls = [machine.open("tiny", max_tokens=4) for _ in range(20)]
        until(lambda: counts(machine, "tiny")["waiting"] == 20, 5, "20 waiting")
        since = Stopwatch()
        for call in calls:
            call.hang_up()
        until(lambda: counts(machine, "tiny")["waiting"] == 0, 10, "none waiting", 0.01)
        assert since.s < 2
    assert machine.ask("tiny").status == 200
    assert machine.served("tiny", 1) == 1


@pytest.mark.parametrize("moment", ["before the first token", "in mid-stream"])
def test_a_stream_without_its_reader_frees_the_engine_within_two_seconds(machine: Machine, moment: str) -> None:
    assert machine.ask("real").status == 200
    call = machine.open("real", prompt=LONG if moment == "before the first token" else "Tell a story.", max_tokens=900)
    if moment == "in mid-stream":
        call.read_until(b'"content":"')
    else:
        until(lambda: counts(machine, "real")["in_flight"] == 1, 5)
        time.sleep(0.3)  # it reads the prompt now
    call.hang_up()
    since = Stopwatch()
    until(lambda: counts(machine, "real")["in_flight"] == 0, 20, "the place back", 0.02)
    place_s = since.s
    since.sleep_until(2)  # asking sooner would keep an abandoned answer going
    print(f"{moment}: the place is back after {place_s:.2f} s")
    assert machine.busy("real") == (0, 0), "two seconds after the hang-up"
    assert place_s < 4, "the place waits for a reading of the gauges, which are at least 1.5 s apart"
    assert not any(counts(machine, "real").values())


def test_an_answer_that_is_not_streamed_is_cut_at_once_and_settles_when_the_engine_is_idle(machine: Machine) -> None:
    assert machine.ask("real").status == 200
    engine, (port, _) = machine.engine("real"), machine.engine_door("real")
    cuts: list[float] = []
    places: list[float] = []
    for _ in range(3):
        call = machine.open("real", stream=False, max_tokens=900)
        until(lambda: counts(machine, "real")["in_flight"] == 1, 5)
        time.sleep(0.2)  # it is being answered
        with engine.halted():  # else it may be idle before anybody has looked
            call.hang_up()
            since = Stopwatch()
            until(lambda: connections(port, CLOSE_WAIT), 5, "the half-closed upstream", 0.002)
            cuts.append(since.s)
            until(lambda: counts(machine, "real")["settle_when_idle"] == 1, 5)
            if not places:
                assert "1 cancelled, settle when the engine is idle" in machine.ok("status", "deployment", "real").out
        since = Stopwatch()
        until(lambda: counts(machine, "real")["in_flight"] == 0, 20, "the place back", 0.05)
        places.append(since.s)
    print(
        f"not streamed: upstream cut after {[round(s * 1000) for s in cuts]} ms, "
        f"place back after {[round(s, 1) for s in places]} s"
    )
    assert statistics.median(cuts) < 0.1
    assert max(places) < 6
    assert machine.busy("real") == (0, 0)


def test_a_thousand_mixed_requests_leave_every_count_at_zero(machine: Machine) -> None:
    assert machine.ask("tiny").status == 200
    engine = machine.engine("tiny")
    lot = random.Random(11)
    plans = [(lot.choice(("whole", "stream", "drop", "drop mid", "reset", "half")), lot.random()) for _ in range(1000)]
    happened: collections.Counter[str] = collections.Counter()
    lock = threading.Lock()

    def one(plan: tuple[str, float]) -> None:
        kind, chance = plan
        if kind in ("whole", "stream"):
            answer = machine.ask("tiny", stream=kind == "stream", max_tokens=1 + int(chance * 12))
            result = f"{kind} {answer.status}" if kind == "whole" or answer.done else "stream broken"
        else:
            call = machine.open("tiny", stream=kind == "drop mid" or chance < 0.5, max_tokens=400)
            if kind == "drop mid":
                call.read_until(b"data: ")
            elif chance < 0.7:
                time.sleep(chance * 0.05)  # a moment of its own for each
            if kind == "half":
                call.sock.shutdown(socket.SHUT_WR)
                time.sleep(0.01)  # the half-close arrives by itself
            call.reset() if kind == "reset" else call.hang_up()
            result = kind
        with lock:
            happened[result] += 1

    began = time.monotonic()
    with ThreadPoolExecutor(12) as clients:
        list(clients.map(one, plans))
    sent_s = time.monotonic() - began
    until(lambda: not any(counts(machine, "tiny").values()), 40, "all counts at zero", 0.1)
    settled_s = time.monotonic() - began - sent_s
    print(f"1000 requests in {sent_s:.1f} s, counts at zero {settled_s:.1f} s later: {dict(happened)}")
    assert not any(re.search("broken| [345]", result) for result in happened), happened
    assert machine.busy("tiny") == (0, 0)
    assert machine.engine("tiny") == engine
    assert machine.ask("tiny").status == 200
    load = next(row for row in machine.manage("GET", "/metrics/load")["deployments"] if row["name"] == "tiny")
    assert (load["router"]["in_flight"], load["router"]["waiting"]) == (0, 0)
