"""The real vLLM, its CPU build, through `capyctl` alone: registered, deployed, asked, hung up on, stopped.

Needs an environment that holds vLLM; `make test-vllm` makes one and names it in CAPYCTL_REAL_VLLM. One engine
at a time, started once: a start takes half a minute and some 3 GB.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.acceptance.machine import Machine, until
from tests.ports import neighbours

ENVIRONMENT = os.environ.get("CAPYCTL_REAL_VLLM", "")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not ENVIRONMENT, reason="needs vLLM; run make test-vllm"),
]
START_S, ADD_S = 400.0, 300.0
PR_SET_CHILD_SUBREAPER = 36
CONFIG = {"cuda_graphs": False, "context_length": 512, "memory": {"request": "3GiB", "kv_cache": "256MiB"}}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A running machine with vLLM registered and a tiny model in its models directory."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a killed engine leaves comes to us
    home = tmp_path_factory.mktemp("home")
    script = Path(__file__).with_name("write_tiny_qwen3.py")
    environ = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(home)}
    subprocess.run(
        [f"{ENVIRONMENT}/bin/python3", str(script), str(home / "models" / "tiny")], env=environ, check=True, timeout=300
    )
    made = Machine(home=home, environment=Path(ENVIRONMENT), first_port=neighbours(10), limit_mib=12_288)
    added = made.ok("engine", "add", ENVIRONMENT, "--arg=--seed", "--arg=7", limit_s=ADD_S)
    assert "Registered vllm (vllm 0." in added.out
    assert "disabled (it lacks sleep mode on cpu)" in added.out
    try:
        made.start()
        yield made
    finally:
        made.drop_everything()


@pytest.fixture(scope="module")
def running(machine: Machine) -> Iterator[Machine]:
    """The machine with its model ready."""
    machine.ok("deploy", "model", "--file", document(machine, "tiny"))
    machine.ok("start", "deployment", "tiny", "--wait", limit_s=START_S)
    yield machine
    machine.ok("stop", "deployment", "tiny", "--wait", limit_s=60)
    assert engines(machine) == []
    assert machine.charged() == {}


def document(machine: Machine, name: str, **fields: Any) -> str:
    config = {**CONFIG, **fields.pop("engine_config", {})}
    body = {"name": name, "engine": "vllm", "model": "tiny", "engine_config": config, **fields}
    return machine.write(f"{name}.yaml", json.dumps(body))


def engines(machine: Machine) -> list[psutil.Process]:
    """Processes of this machine that run the helper directory's entry, their workers included."""
    place = str(machine.home)
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if place in " ".join(process.cmdline()) and "capyctl_vllm.py" in " ".join(process.cmdline()):
                found += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_an_engine_that_cannot_sleep_is_not_registered_as_one_that_parks(machine: Machine) -> None:
    refused = machine.command("engine", "add", ENVIRONMENT, "--name", "parks", "--deep-park", "enabled", limit_s=ADD_S)
    assert refused.status == 5
    assert "capability_missing:deep_park" in refused.error
    assert "sleep mode on cpu" in refused.error
    listed = machine.ok("engine", "list").out
    assert "parks" not in listed.split()
    assert "0.32.0+cpu" in listed


def test_a_model_that_must_park_is_refused_with_the_way_out(machine: Machine) -> None:
    refused = machine.command("deploy", "model", "--file", document(machine, "deep", residency="deep"))
    assert refused.status == 5
    assert "capability_missing:deep_park" in refused.error
    assert "restart_only" in refused.error


def test_it_answers_whole_and_streamed(running: Machine) -> None:
    whole = running.ask("tiny", max_tokens=16)
    assert whole.status == 200
    assert whole.json["model"] == "tiny"
    assert whole.json["usage"]["completion_tokens"] > 0
    streamed = running.ask("tiny", stream=True, max_tokens=16)
    assert streamed.done
    assert len(streamed.events) > 2
    assert running.ask("tiny", messages=[]).status == 400


def test_a_client_that_leaves_gives_its_place_back(running: Machine) -> None:
    call = running.open("tiny", max_tokens=480)
    call.read_until(b'"delta":{"content":')  # not the chunk with the role alone, which is no output
    call.hang_up()
    until(lambda: running.view("tiny")["requests"] == dict.fromkeys(running.view("tiny")["requests"], 0), 10, "idle")
    assert running.ask("tiny").status == 200


def test_its_processes_are_known_by_what_they_are(running: Machine) -> None:
    view = running.instance("tiny")
    assert view["observed_state"] == "ready"
    names = [process.name() for process in engines(running)]
    assert len(names) >= 2, "the front and its engine core"
    text = "".join(running.engine_logs().values())
    assert running.engine_door("tiny")[1] not in text, "the key is in no log"


def test_a_role_that_was_killed_finds_its_engine_again(running: Machine) -> None:
    before = {process.pid for process in engines(running)}
    running.kill()
    running.start()
    until(lambda: running.instance("tiny")["observed_state"] == "ready", 60, "the engine is proven again")
    assert running.ask("tiny").status == 200
    assert {process.pid for process in engines(running)} == before


def test_a_start_that_an_argument_spoils_names_it(machine: Machine) -> None:
    spoilt = {"accept_extra_args": True, "extra_args": ["--frobnicate", "1"]}
    machine.ok("deploy", "model", "--file", document(machine, "spoilt", engine_config=spoilt))
    started = machine.command("start", "deployment", "spoilt", "--wait", limit_s=START_S)
    assert started.status == 13
    assert "--frobnicate" in started.err
    assert "engine_argument_rejected" in started.err
    machine.ok("delete", "deployment", "spoilt", "--stop", limit_s=60)
