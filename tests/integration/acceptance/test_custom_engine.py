"""A program of nobody's family behind the endpoint: registered, asked, and what it cannot prove."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from tests.engines.checkpoints import write_checkpoint
from tests.engines.installation import Installation, lay_out

from .conftest import Build
from .machine import Machine, until

COMMAND = ["--host", "{host}", "--port", "{port}", "--model", "{model}", "--name", "{name}"]
IDLE = {"path": "/status", "running": "/work/active", "waiting": "/work/queued"}


@attrs.frozen
class Place:
    machine: Machine
    server: Installation

    def add(self, name: str, **fields: object) -> None:
        manifest = {"schema_version": 1, "kind": "custom_engine", "api": "chat", "command": COMMAND, **fields}
        file = self.machine.write(f"{name}-manifest.yaml", json.dumps(manifest))
        words = ("--custom", str(self.server.executable), "--name", name, "--manifest", file, "--yes")
        assert "Published      yes" in self.machine.ok("engine", "add", *words).out

    def deploy(self, name: str) -> None:
        body = {"name": name, "engine": name, "model": "any", "resources": {"gpu": "64MiB", "ram": "64MiB"}}
        self.machine.ok("deploy", "model", "--file", self.machine.write(f"{name}.yaml", json.dumps(body)))
        until(lambda: self.machine.view(name)["checkpoint"]["state"] == "measured", what="measuring")

    def abandon(self, name: str) -> None:
        """Hang up in the middle of an answer that would take minutes."""
        self.server.set(token_s=0.2, answer_tokens=2000)
        call = self.machine.open(name, max_tokens=2000)
        call.read_until(b"content")
        call.hang_up()

    def counts(self, name: str) -> dict[str, int]:
        counts: dict[str, int] = self.machine.view(name)["requests"]
        return counts


@pytest.fixture(scope="module")
def place(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with build() as machine:
        server = lay_out("custom", "1.0", machine.home / "server", load_s=0.05)
        write_checkpoint(Path(machine.home) / "models" / "any", weights=1 << 20)
        machine.start()
        yield Place(machine, server)


def test_without_an_idle_signal_an_abandoned_place_comes_back_with_the_stop(place: Place) -> None:
    place.add("mute")
    place.deploy("mute")
    answer = place.machine.ask("mute", max_tokens=5)
    assert answer.status == 200
    assert answer.json["model"] == "mute"
    place.abandon("mute")
    until(lambda: place.counts("mute")["settle_at_stop"] == 1, 20, "a place that only a stop gives back")
    place.machine.act("mute", "stop")  # does not wait for it
    assert place.counts("mute")["settle_at_stop"] == 0
    assert place.machine.charged() == {}


def test_with_an_idle_signal_the_place_comes_back_and_a_removal_is_no_operators_stop(place: Place) -> None:
    place.add("telling", health="/healthz", idle=IDLE)
    place.deploy("telling")
    place.server.set(token_s=0.001, answer_tokens=20)
    assert place.machine.ask("telling", max_tokens=5).status == 200
    place.abandon("telling")
    until(lambda: place.counts("telling")["in_flight"] == 0, 30, "an idle engine")
    assert place.machine.command("engine", "remove", "telling").status == 20
    place.machine.ok("engine", "remove", "telling", "--drain")
    assert place.machine.charged() == {}
    assert place.machine.ask("telling").json["code"] == "activation_failed"
    assert place.machine.view("telling")["desired_state"] == "ready"


def test_one_that_listens_to_the_network_never_serves(place: Place) -> None:
    place.server.set(also_listens="0.0.0.0", token_s=0.001)
    place.add("open", health="/healthz", idle=IDLE)
    place.deploy("open")
    refused = place.machine.ask("open")
    place.server.set(also_listens=None)
    assert (refused.status, refused.json["code"]) == (503, "activation_failed")
    assert "beyond loopback" in place.machine.command("status", "deployment", "open").out
    assert place.machine.charged() == {}
