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


@pytest.fixture(scope="module")
def machine(build: Build) -> Iterator[Machine]:
    """Room for one of two real models of 512 MiB each, and a drain bound shorter than a long answer."""
    with build(settings=("server.switching.drain_timeout=2s",)) as made:
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
        time.sleep(0.3)  # the last looks, and the last lines of the logs
    assert answers == [(name, 200, name) for name in requests]
    logs = [log.read_text(errors="replace") for log in watch.logs.values()]
    by_launch = [served(log) for log in logs]
    print(
        f"20 of 20 answered in {wall_s:.1f} s (longest {max(took):.1f} s); {len(watch.pids)} launches served "
        f"{sorted(by_launch)}; PSS at most {watch.most_pss_bytes / MIB:.0f} of {machine.limit_mib} MiB in "
        f"{watch.samples} looks; engines at once: {watch.most_engines}"
    )
    assert sum(by_launch) == 20, "each request was worked on exactly once"
    assert min(by_launch) >= 1, "no launch in vain"
    assert len(watch.pids) == len(logs)
    assert watch.most_engines == 1
    assert 0 < watch.most_pss_bytes <= machine.limit_mib * MIB
    stopped = machine.ok("status", "deployment", next(n for n in PAIR if not machine.engines(n))).out
    assert re.search(rf"^  Stopped +for ({'|'.join(PAIR)}) \(switch \w{{26}}\)$", stopped, re.MULTILINE), stopped


def test_a_stream_within_the_drain_bound_ends_before_the_other_model_starts(machine: Machine) -> None:
    assert machine.ask("ada").status == 200
    with ThreadPoolExecutor(2) as clients:
        call = machine.open("ada", max_tokens=100)
        call.read_until(b'"content":"')  # about 1.2 s follow
        began = time.monotonic()
        other = clients.submit(machine.ask, "grace")
        seen_first: list[float] = []

        def watch_grace() -> None:
            until(lambda: machine.engines("grace"), 30, "an engine of grace", 0.005)
            seen_first.append(time.monotonic())

        watcher = clients.submit(watch_grace)
        text = call.rest()
        ended = time.monotonic()
        assert b"data: [DONE]" in text
        assert other.result().status == 200
        watcher.result()
    ended_s, seen_s = ended - began, seen_first[0] - began
    print(f"the stream ended {ended_s:.2f} s after the other request came, the other engine began after {seen_s:.2f} s")
    assert seen_s > ended_s - 0.05


def test_a_stream_over_the_drain_bound_is_not_cut_and_the_other_is_told_to_come_again(machine: Machine) -> None:
    assert machine.ask("ada").status == 200
    before = machine.engine("ada")
    call = machine.open("ada", max_tokens=450)  # about 6 s
    call.read_until(b'"content":"')
    began = time.monotonic()
    refused = machine.ask("grace")
    waited_s = time.monotonic() - began
    assert (refused.status, refused.json["code"], refused.json["retryable"]) == (503, "unavailable", True)
    print(f"refused after {waited_s:.2f} s with drain_timeout=2s: {refused.json['message']}")
    assert 1.5 < waited_s < 6
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
