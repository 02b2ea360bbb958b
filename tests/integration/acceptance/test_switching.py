"""Two models and memory for one: everybody is answered, memory never holds both, and status says why one went."""

from __future__ import annotations

import collections
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from .conftest import REAL, TINY, Build
from .machine import MIB, Machine, Watch, served, until

PAIR = ("ada", "grace")
BOUND_S = 4


@pytest.fixture(scope="module")
def machine(build: Build) -> Iterator[Machine]:
    """Room for one of two real models of 512 MiB each, and a drain bound that is soon over."""
    with build(settings=(f"server.switching.drain_timeout={BOUND_S}s",)) as made:
        made.start()
        for name in PAIR:
            made.deploy(name, REAL, 512, context_length=2048, max_concurrent_requests=2)
        made.deploy("tom", TINY, 512)
        yield made


def test_alternating_requests_of_four_clients_are_each_answered_once(machine: Machine) -> None:
    watch = Watch(machine)
    requests = [PAIR[number % 2] for number in range(20)]
    took: list[float] = []

    def one(name: str) -> tuple[str, int, str]:
        answer = machine.ask(name, max_tokens=6)
        took.append(answer.took_s)
        return name, answer.status, answer.json["model"]

    with watch.on():
        began = time.monotonic()
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(one, requests))
        wall_s = time.monotonic() - began
    assert answers == [(name, 200, name) for name in requests]

    def counted() -> list[int]:
        return [served(log.read_text(errors="replace")) for log in watch.logs.values()]

    until(lambda: sum(counted()) >= 20, what="20 requests in the engines' logs")
    by_launch = counted()
    print(
        f"20 of 20 answered in {wall_s:.1f} s (longest {max(took):.1f} s); {len(watch.pids)} launches served "
        f"{sorted(by_launch)}; PSS at most {watch.most_pss_bytes / MIB:.0f} of {machine.limit_mib} MiB in "
        f"{watch.samples} looks; engines at once: {watch.most_engines}"
    )
    assert sum(by_launch) == 20, "each request was worked on exactly once"
    assert min(by_launch) >= 1, "no launch in vain"
    assert len(watch.pids) == len(by_launch)
    assert watch.most_engines == 1
    assert 0 < watch.most_pss_bytes <= machine.limit_mib * MIB
    stopped = machine.ok("status", "deployment", next(n for n in PAIR if not machine.engines(n))).out
    assert re.search(rf"^  Stopped +for ({'|'.join(PAIR)}) \(switch \w{{26}}\)$", stopped, re.MULTILINE), stopped


def test_a_stream_within_the_drain_bound_ends_before_the_other_model_starts(machine: Machine) -> None:
    assert machine.ask("ada").status == 200
    engine = machine.engine("ada")
    before = len(machine.log())
    with ThreadPoolExecutor(1) as clients:
        call = machine.open("ada", max_tokens=60)
        call.read_until(b'"content":"')
        with engine.halted():  # it goes on once the switch waits for it
            other = clients.submit(machine.ask, "grace")
            until(lambda: any(line.get("now") == "draining" for line in machine.log()[before:]), what="the drain")
            assert not machine.engines("grace")
        assert b"data: [DONE]" in call.rest()
        assert other.result().status == 200
    machine.said("request.ended", model="grace")
    lines = machine.log()[before:]
    ended = max(at for at, line in enumerate(lines) if line["message"] == "request.ended" and line["model"] == "ada")
    begun = next(
        at for at, line in enumerate(lines) if line.get("event") == "Spawned" and line["deployment"] == "grace"
    )
    assert ended < begun, "the stream ended, then the other engine began"


def test_a_stream_over_the_drain_bound_is_not_cut_and_the_other_is_told_to_come_again(machine: Machine) -> None:
    assert machine.ask("ada").status == 200
    before = machine.engine("ada")
    call = machine.open("ada", max_tokens=200)
    call.read_until(b'"content":"')
    with before.halted():
        began = time.monotonic()
        refused = machine.ask("grace")
        waited_s = time.monotonic() - began
    assert (refused.status, refused.json["code"], refused.json["retryable"]) == (503, "unavailable", True), refused
    print(f"refused after {waited_s:.2f} s with drain_timeout={BOUND_S}s: {refused.json['message']}")
    assert waited_s > BOUND_S - 0.5
    assert b"data: [DONE]" in call.rest()
    assert machine.engine("ada") == before
    assert machine.ask("grace").status == 200, "and later it is served"


def test_first_requests_together_launch_one_engine(machine: Machine) -> None:
    assert machine.ask("ada").status == 200  # so that tom is cold and needs the room
    watch = Watch(machine)
    barrier = threading.Barrier(64)

    def one(_: int) -> int:
        barrier.wait()
        return machine.ask("tom", max_tokens=2).status

    with watch.on(), ThreadPoolExecutor(64) as clients:
        statuses = list(clients.map(one, range(64)))
    launched = [name for name in watch.pids.values() if name == "tom"]
    print(f"64 first requests: {collections.Counter(statuses)}, engines of tom: {len(launched)}")
    assert statuses == [200] * 64
    assert launched == ["tom"]
    assert watch.most_engines == 1
