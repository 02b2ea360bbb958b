"""What operators see and say about parked models, on a real role with short timers: commands, words, status, limits."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

from tests.integration.acceptance.machine import until
from tests.nvml.card import GIB

from .machine import PORTS, ParkMachine, park_machine

IDLE = ("server.lifecycle_defaults.ready_idle_timeout=2s", "server.lifecycle_defaults.parked_idle_timeout=8s")
IDLE += ("host.resource_policy.queue.admission_window=100ms",)
LIMIT_S = 20.0


def reached(here: ParkMachine, name: str, state: str) -> dict[str, Any]:
    """The instance, once it is in this state."""
    until(lambda: here.view(name)["observed_state"] == state, LIMIT_S, f"{name} {state}", 0.05)
    return here.instance(name)


def test_commands_say_what_happened_and_timers_and_limits_do_the_rest(tmp_path: Path) -> None:
    with park_machine(tmp_path, PORTS, {"vllm": {}}, IDLE) as here:
        # residues of 2.5 GiB: two of them fit the card's parked limit of 6 GiB
        here.put("a", "vllm", 4 * GIB, 10 * GIB, parked=5 * GIB // 2)
        here.put("b", "vllm", 4 * GIB, 10 * GIB, parked=5 * GIB // 2)
        here.put("c", "vllm", 4 * GIB, 10 * GIB, parked=5 * GIB // 2)
        here.put("warm", "vllm", 2 * GIB, 4 * GIB, lifecycle={"warm": True})
        here.put("asked", "vllm", 2 * GIB, 4 * GIB, lifecycle={"activation": "explicit"})

        refused = here.command("park", "deployment", "a", "--wait")
        assert (refused.status, refused.error) == (
            2,
            "error [lifecycle_conflict]: a is not running, so there is nothing to park. "
            "Try: capyctl preinitialize deployment a",
        )

        # ahead of time: one after the other, each reported
        done = here.ok("preinitialize", "deployment", "a", "b", "--wait")
        assert done.out.startswith("Preinitialized a, b\n")
        assert [here.instance(one)["sleeps"]["kind"] for one in "ab"] == ["preinitialize", "preinitialize"]
        status = here.ok("status", "deployment", "b").out
        assert "Parked " in status
        assert "s ago, by preinitialize" in status
        assert "2.5 GiB parked on gpu0 (declared)" in status
        assert [line.split()[:3] for line in here.ok("list", "deployments").out.splitlines()[1:3]] == [
            ["a", "parked", "0/1"],
            ["asked", "stopped", "0/1"],
        ]

        # a start wakes what is parked; the idle timer parks it, then the other one stops it
        here.act("warm", "start")
        assert here.ok("start", "deployment", "b", "--wait").out.startswith("Started b: ready\n\n  Ready       1/1\n")
        assert reached(here, "a", "stopped")["stopped"]["kind"] == "idle"
        assert reached(here, "b", "parked")["sleeps"]["kind"] == "idle"
        answer = here.ask("b", max_tokens=2)  # wake on request
        assert answer.status == 200
        assert len(here.installations["vllm"].calls("/wake_up")) >= 2

        # only an operator starts it, and no timer ends it
        answer = here.ask("asked", max_tokens=2)
        assert (answer.status, answer.json["code"]) == (409, "deployment_inactive")
        here.act("asked", "start")
        assert here.ask("asked", max_tokens=2).status == 200

        # b, warm and asked hold 18 of 22 GiB: a plain start waits, --evict says whom it costs, at once
        assert here.ask("b", max_tokens=2).status == 200
        receipt = here.act("c", "start", wait=False, evict=True)
        assert receipt["victims"] == [f"{here.view('b')['id']}/0"]
        slept = reached(here, "b", "parked")["sleeps"]
        assert (slept["kind"], slept["for"], slept["switch_id"]) == ("switch", "c", receipt["switch_id"])
        reached(here, "c", "ready")
        operation = here.manage("GET", f"/operations/{receipt['operation_id']}")
        assert [(one["name"], one["released"]) for one in operation["victims"]] == [("b/0", "released: parked")]

        # what is parked is stopped with all it holds, and deleted
        done = here.ok("park", "deployment", "c", "--wait")
        assert done.out.startswith("Parked c\n")
        here.act("c", "stop")
        assert "c" not in here.on_card()
        assert here.engines("c") == []

        # nobody may give way: refused with the figures, and nobody was touched
        here.put("big", "vllm", 4 * GIB, 20 * GIB)
        refused = here.command("start", "deployment", "big", "--evict")
        assert refused.status == 4
        assert refused.error.startswith("error [insufficient_resources]: big/0: needs 20.0 GiB on gpu0 of ")
        assert here.state_of("warm") == here.state_of("asked") == "ready"
        assert here.terminate() == 0


def test_the_parked_set_has_a_limit_in_bytes_and_in_number(tmp_path: Path) -> None:
    with park_machine(tmp_path, PORTS, {"vllm": {}}) as here:
        for name, residue in zip("abc", itertools.repeat(5 * GIB // 2), strict=False):
            here.put(name, "vllm", 2 * GIB, 8 * GIB, parked=residue)
        for name in "abc":
            here.act(name, "start")
            here.act(name, "park")
            time.sleep(0.01)
        assert [here.state_of(name) for name in "abc"] == ["stopped", "parked", "parked"]  # 6 GiB may be parked
        assert here.instance("a")["stopped"]["kind"] == "reclaim"
        assert "  Stopped   reclaim\n" in here.ok("status", "deployment", "a").out
        here.ok("delete", "deployment", "c", "--stop")
        here.ok("delete", "deployment", "b", "--stop")
        assert here.on_card() == {}
        small = ("d", "e", "f", "g", "h")
        for name in small:
            here.put(name, "vllm", GIB, 3 * GIB, parked=GIB // 2)
            here.act(name, "start")
            here.act(name, "park")
        states = [here.state_of(name) for name in small]
        assert states == ["stopped", "parked", "parked", "parked", "parked"]  # four at a time
        here.put("last", "vllm", GIB, 3 * GIB, parked=GIB // 2)
        done = here.command("preinitialize", "deployment", "last", "--wait")  # takes the room of nobody
        assert done.status == 4
        assert done.error.startswith("error [parked_capacity]: last: ")
        assert here.state_of("last") == "ready"
        assert here.terminate() == 0
