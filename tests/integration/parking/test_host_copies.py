"""Engines that keep a copy of their weights in RAM: what each phase is charged, and that no wake reads files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engines.checkpoints import write_checkpoint
from tests.integration.acceptance.machine import Done, until
from tests.nvml.card import GIB

from .machine import PORTS, ParkMachine, park_machine

SETTINGS = (
    "host.resource_policy.queue.admission_window=1ms",
    "host.resource_policy.memory.system.parked_limit=4608MiB",
)
OVERHEAD = 4 * GIB  # of an engine's own processes, as long as nobody measured it


def deploy(here: ParkMachine, name: str, family: str, weights: int, **document: Any) -> Done:
    """A model that is sized by what it is; nothing is stated but its residency."""
    place = write_checkpoint(here.home / "models" / name, weights=weights)
    source = {"source": {"type": "local", "path": str(place)}}
    body = {"name": name, "engine": family, "residency": "host_backed", "model": source, **document}
    return here.command("deploy", "model", "--file", here.write(f"{name}.yaml", json.dumps(body)))


def measured(here: ParkMachine, name: str) -> int:
    """Its bytes of weights, once they are known."""
    until(lambda: here.view(name)["checkpoint"]["state"] == "measured", what="measuring")
    return int(here.view(name)["checkpoint"]["weight_bytes"])


def charges(here: ParkMachine, name: str) -> dict[str, tuple[str, int]]:
    """Phase and bytes by domain."""
    return {row["domain"]: (str(row["phase"]), int(row["bytes"])) for row in here.view(name)["ledger"]}


def in_phase(here: ParkMachine, name: str, phase: str) -> dict[str, int]:
    """What is charged, by domain, once it is charged for this phase."""

    def seen() -> dict[str, int] | None:
        now = charges(here, name)
        there = set(now) == {"gpu0", "system"} and all(which == phase for which, _ in now.values())
        return {domain: amount for domain, (_, amount) in now.items()} if there else None

    return dict(until(seen, what=f"{name} charged as {phase}"))


def test_a_copy_is_charged_for_the_engines_whole_life_and_a_wake_reads_nothing(tmp_path: Path) -> None:
    slow = {"load_s": 1.0, "sleep_s": 1.0, "wake_s": 1.0}  # somebody has to see the phases
    with park_machine(tmp_path, PORTS, {"vllm": slow, "sglang": {}}, SETTINGS) as here:
        vllm, sglang = here.installations["vllm"], here.installations["sglang"]
        assert deploy(here, "ada", "vllm", GIB // 4).status == 0
        in_ram = OVERHEAD + -(-measured(here, "ada") * 3 // 2)
        here.act("ada", "start", wait=False)
        assert in_phase(here, "ada", "cold")["system"] == in_ram
        loaded = in_phase(here, "ada", "ready")
        until(lambda: here.state_of("ada") == "ready", what="ada")
        said = here.ask("ada", max_tokens=8).text

        here.act("ada", "park", wait=False)
        assert in_phase(here, "ada", "parking") == loaded
        assert in_phase(here, "ada", "parked") == {"gpu0": GIB, "system": in_ram}
        until(lambda: here.state_of("ada") == "parked", what="ada")
        here.act("ada", "start", wait=False)
        assert in_phase(here, "ada", "wake") == loaded
        assert in_phase(here, "ada", "ready") == loaded == {"gpu0": loaded["gpu0"], "system": in_ram}
        vllm.set(load_s=0.0, sleep_s=0.0, wake_s=0.0)

        # a switch parks it, and the next one wakes it
        here.put("eve", "vllm", GIB, 20 * GIB)
        assert here.ask("eve", max_tokens=8).status == 200
        assert here.instance("ada")["sleeps"]["for"] == "eve"
        assert charges(here, "ada") == {"gpu0": ("parked", GIB), "system": ("parked", in_ram)}
        answer = here.ask("ada", max_tokens=8)
        assert (answer.status, answer.text) == (200, said)
        assert charges(here, "ada") == {domain: ("ready", amount) for domain, amount in loaded.items()}

        # one tier: where its copy and another one do not fit into the RAM, it is stopped
        assert deploy(here, "bob", "sglang", GIB // 4).status == 0
        measured(here, "bob")
        spoken = here.ask("bob", max_tokens=8).text
        stopped = here.instance("ada")["stopped"]
        assert (stopped["kind"], stopped["for"], stopped["no_room_to_park"]) == ("pressure", "bob", True)
        assert charges(here, "ada") == {}
        before = charges(here, "bob")
        here.act("bob", "park")
        assert charges(here, "bob") == {"gpu0": ("parked", GIB), "system": ("parked", before["system"][1])}
        assert here.ask("bob", max_tokens=8).text == spoken
        assert charges(here, "bob") == before

        # what the engines were asked: once each, whole, and never for their files
        assert [call["query"] for call in vllm.calls("/sleep")][:2] == ["level=1", "level=1"]
        assert [call["query"] for call in vllm.calls("/wake_up")] == ["", ""]
        assert vllm.calls("/collective_rpc") == []
        assert len(sglang.calls("/release_memory_occupation")) == len(sglang.calls("/resume_memory_occupation")) == 1
        assert sglang.calls("/update_weights_from_disk") == []

        # what cannot be is refused with the figures and the way out
        refused = deploy(here, "big", "vllm", GIB // 2)
        assert refused.status == 5
        assert "the copy of the weights and the engine need 4.8 GiB of system on " in refused.error
        assert "where 4.5 GiB may be parked. Use residency: deep, or raise the parked limit" in refused.error
        assert refused.error.startswith("error [host_backed_unavailable]: ")
        guesses = {"extra_args": ["--speculative-algorithm", "NGRAM"], "accept_extra_args": True}
        refused = deploy(here, "guess", "sglang", GIB // 4, engine_config=guesses)
        assert (refused.status, "Use residency: restart_only" in refused.error) == (5, True)
        assert here.terminate() == 0
