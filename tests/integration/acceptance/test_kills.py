"""Anything may be killed at any moment: what lives is found again, what is gone is let go of, and requests go on."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .conftest import TINY, Build
from .machine import Machine, until


@pytest.fixture(scope="module")
def machine(build: Build) -> Iterator[Machine]:
    """Room for one model; two tiny ones."""
    with build(settings=("shutdown.drain_timeout=2s",)) as made:
        made.start()
        made.deploy("one", TINY, 512)
        made.deploy("two", TINY, 512)
        yield made


RESTING = frozenset({"ready", "stopped", "failed"})


def settled(machine: Machine, limit_s: float = 25.0) -> float:
    """Wait until nothing is on its way or in doubt; seconds."""
    began = time.monotonic()

    def rest() -> bool:
        rows = machine.manage("GET", "/deployments")["deployments"]
        return all(row["observed_state"] in RESTING or _waits_for_room(row) for row in rows)

    until(rest, limit_s, "rest", 0.05)
    return time.monotonic() - began


def _waits_for_room(row: dict[str, Any]) -> bool:
    """An operator's start without --evict, which parks and stops nobody."""
    return row["observed_state"] == "starting" and not row["ledger"] and bool(row["waiting"])


def agrees(machine: Machine) -> None:
    """The ledger holds exactly what lives."""
    charged = {re.split("[:/]", owner)[1] for owner in machine.charged()}
    alive = {machine.view(engine.name)["id"] for engine in machine.engines()}
    assert charged == alive, (machine.charged(), machine.engines())


def test_an_engine_outlives_its_role_and_is_found_again(machine: Machine) -> None:
    assert machine.ask("one").status == 200
    engine, before = machine.engine("one"), machine.instance("one")
    machine.kill()
    assert engine.alive()
    start_s = machine.start()
    settle_s = settled(machine)
    after = machine.instance("one")
    assert (machine.engine("one"), after["pid"]) == (engine, engine.pid)
    assert (after["generation"], after["observed_state"]) == (before["generation"], "ready")
    began = time.monotonic()
    assert machine.ask("one").status == 200
    print(
        f"role back after {start_s:.2f} s, adopted pid {engine.pid} after {settle_s:.2f} s more, "
        f"first answer after {time.monotonic() - began:.2f} s"
    )
    assert len(machine.launches("one")) == 1
    assert machine.served("one", 2) >= 2, "one launch has served before and after"
    agrees(machine)


def test_a_request_that_comes_at_once_after_a_crash_is_served_without_a_launch(machine: Machine) -> None:
    assert machine.ask("one").status == 200
    engine = machine.engine("one")
    machine.kill()
    machine.start()
    assert machine.ask("one").status == 200  # no waiting for anything
    assert machine.engine("one") == engine


def test_a_request_that_joins_a_start_which_may_evict_nobody_still_gets_room(machine: Machine) -> None:
    assert machine.ask("one").status == 200
    machine.ok("start", "deployment", "two")
    assert _waits_for_room(until(lambda: machine.view("two")["waiting"] and machine.view("two"), 5, "the figures"))
    assert machine.ask("two", limit_s=60).status == 200


def test_an_engine_that_cannot_answer_keeps_its_memory_until_it_is_seen_to_be_well(machine: Machine) -> None:
    machine.act("one", "start", evict=True)
    assert machine.ask("one").status == 200
    engine = machine.engine("one")
    engine.send(signal.SIGSTOP)
    try:
        machine.kill()
        machine.start(ready_s=60)
        with ThreadPoolExecutor(1) as client:
            other = client.submit(machine.ask, "two")
            doubt = "its engine is looked at again, and has not answered yet"
            until(lambda: (machine.view("one")["waiting"] or "").startswith(doubt), what="the doubt")
            until(lambda: machine.view("two")["requests"]["waiting"] == 1, what="the other's request")
            time.sleep(1)  # a role that counted on that memory would have started the other by now
            view = machine.view("one")
            print(f"a stopped engine after a restart: {view['observed_state']}, {machine.charged()}, {view['waiting']}")
            assert view["ready"] == "0/1"
            assert view["ledger"], "it may hold its memory, so it is charged"
            assert not machine.engines("two"), "and nobody else counts on it"
            assert machine.command("status", "deployment", "one").took_s < 5
            engine.send(signal.SIGCONT)
            assert other.result().status == 200
    finally:
        engine.send(signal.SIGCONT) if engine.alive() else None
    assert not machine.engines("one")
    agrees(machine)


def test_an_engine_that_nobody_can_ask_any_more_keeps_nobody_waiting(machine: Machine) -> None:
    machine.act("one", "start", evict=True)
    engine = machine.engine("one")
    machine.terminate()
    profiles = machine.home / ".config/capyctl/engines.yaml"
    hidden = profiles.rename(profiles.with_name("engines.hidden"))
    try:
        machine.start(ready_s=60)
        answer = machine.ask("one", limit_s=60)
        print(f"a profile is gone: {answer.status} {answer.json['message']}")
        assert (answer.status, answer.json["code"]) == (503, "unavailable")
        view = machine.view("one")
        assert (view["observed_state"], view["ready"]) == ("reconciling", "0/1")
        assert (view["requests"]["in_flight"], view["requests"]["waiting"]) == (0, 0)
        assert view["ledger"], "it lives, so it is charged"
    finally:
        hidden.rename(profiles)
    machine.terminate()
    machine.start()
    assert machine.ask("one").status == 200
    assert machine.engine("one") == engine, "the same process all along"


def test_role_and_engine_killed_together_leave_no_charge_and_no_process(machine: Machine) -> None:
    machine.ok("start", "deployment", "one", "--wait", "--evict")
    engine = machine.engine("one")
    machine.kill()
    engine.send(signal.SIGKILL)
    until(lambda: not machine.ours(), 5, "the end of every process, the log's writer too")
    machine.start()
    settled(machine)
    assert machine.charged() == {}
    assert machine.ours() == []
    assert machine.ask("one").status == 200
    agrees(machine)


# What the role says of an instance, and who it is, when the role is killed.
MOMENTS = {
    "loading": [("one", "starting.armed"), ("one", "starting.probing")],
    "stopping": [("one", "stopping.idle_gate"), ("one", "stopping.armed")],
    "switching": [
        ("one", "draining.draining_to_stop"),
        ("two", "starting.armed"),
        ("two", "starting.probing"),
    ],
}


@pytest.mark.parametrize("doing", MOMENTS)
def test_a_role_killed_while_it_works_converges_at_the_next_start(machine: Machine, doing: str) -> None:
    names = {name: machine.view(name)["id"] for name in ("one", "two")}
    for who, moment in MOMENTS[doing]:
        machine.act("two", "start", wait=False)  # what an operator stopped may serve again, when there is room
        machine.act("one", "start", evict=True)
        if doing == "loading":
            machine.act("two", "stop")
            machine.act("one", "stop")
        said = machine.log_path.stat().st_size
        mark = re.compile(rf'"lane": "{names[who]}/0", "was": "[a-z._]+", "event": "\w+", "now": "{moment}"')

        def reached(said: int = said, mark: re.Pattern[str] = mark) -> bool:
            with machine.log_path.open() as log:
                log.seek(said)
                return mark.search(log.read()) is not None

        with ThreadPoolExecutor(1) as client:
            match doing:
                case "loading":
                    doomed = client.submit(machine.command, "start", "deployment", "one")
                case "stopping":
                    doomed = client.submit(machine.command, "stop", "deployment", "one")
                case _:
                    doomed = client.submit(machine.open("two").rest, 30)
            until(reached, 10, moment, 0.0005)
            machine.kill()
            doomed.result()
        alive = [(engine.name, engine.pid) for engine in machine.engines()]
        start_s = machine.start()
        settle_s = settled(machine)
        states = {row["name"]: row["observed_state"] for row in machine.manage("GET", "/deployments")["deployments"]}
        print(f"{doing}, killed at {who} {moment}: alive {alive}; up {start_s:.2f} s, rest {settle_s:.2f} s, {states}")
        agrees(machine)
        assert len(machine.engines()) <= 1
        machine.act("two", "start", evict=True)
        assert machine.ask("two").status == 200
