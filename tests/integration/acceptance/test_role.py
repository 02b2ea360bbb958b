"""The role's own life: one per state directory, ports that are taken, a stop that keeps engines, a second start."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from .conftest import REAL, Build
from .machine import Machine, Stopwatch, until


@pytest.fixture(scope="module")
def machine(build: Build) -> Iterator[Machine]:
    with build(settings=("shutdown.drain_timeout=4s",)) as made:
        made.start()
        made.deploy("real", REAL, 512, context_length=2048, max_concurrent_requests=2)
        yield made


def test_a_stopping_role_lets_answers_end_and_keeps_its_engines(machine: Machine) -> None:
    assert machine.ask("real").status == 200
    engine, generation = machine.engine("real"), machine.instance("real")["generation"]
    call = machine.open("real", max_tokens=60)
    call.read_until(b'"content":"')
    with engine.halted():  # the answer goes on for as long as anybody looks
        began = time.monotonic()
        assert machine.role is not None
        machine.role.send_signal(signal.SIGTERM)
        machine.said("role.stopping")
        refused = machine.ask("real", limit_s=10)
        assert (refused.status, refused.json["code"], refused.json["retryable"]) == (503, "unavailable", True)
    assert b"data: [DONE]" in call.rest(10)
    assert machine.role.wait(timeout=60) == 0
    stopped_s = time.monotonic() - began
    assert engine.alive()
    start_s = machine.start()
    began = time.monotonic()
    assert machine.ask("real").status == 200
    print(
        f"stopped in {stopped_s:.2f} s with an answer running, engine {engine.pid} kept; started in {start_s:.2f} s, "
        f"first answer after {time.monotonic() - began:.2f} s"
    )
    assert machine.engine("real") == engine
    assert machine.instance("real")["generation"] == generation


def test_an_answer_over_the_drain_bound_is_cut_with_an_error_and_the_role_ends(machine: Machine) -> None:
    assert machine.ask("real").status == 200
    call = machine.open("real", max_tokens=900)
    call.read_until(b'"content":"')
    with machine.engine("real").halted():
        began, since = time.monotonic(), Stopwatch()
        assert machine.terminate(limit_s=30) == 0
        stopped_s, counted_s = time.monotonic() - began, since.s
        text = call.rest(5)
    print(f"stopped in {stopped_s:.2f} s with drain_timeout=4s; the stream's last bytes: {text[-300:]!r}")
    assert stopped_s > 3.5
    assert counted_s < 4 + 2 + 2
    assert b"[DONE]" not in text
    machine.start()
    until(lambda: not any(machine.view("real")["requests"].values()), 10, "nothing in flight")
    assert machine.ask("real").status == 200


def test_a_second_signal_ends_the_wait_now(machine: Machine) -> None:
    assert machine.ask("real").status == 200
    engine = machine.engine("real")
    call = machine.open("real", max_tokens=900)
    call.read_until(b'"content":"')
    assert machine.role is not None
    with engine.halted():
        machine.role.send_signal(signal.SIGINT)
        machine.said("role.stopping")
        since = Stopwatch()
        machine.role.send_signal(signal.SIGINT)
        assert machine.role.wait(timeout=60) == 0
        ended_s = since.s
    print(f"two signals: ended {ended_s:.2f} s after the second")
    assert ended_s < 3, "sooner than its drain would"
    assert engine.alive()
    call.hang_up()
    machine.start()
    assert machine.ask("real").status == 200


def test_drain_standalone_ends_every_engine_and_keeps_deployments(machine: Machine) -> None:
    assert machine.ask("real").status == 200
    machine.ok("drain", "standalone", limit_s=40)
    until(lambda: not machine.engines(), 10, "no engine")
    assert machine.charged() == {}
    assert "real" in machine.ok("list", "deployments").out
