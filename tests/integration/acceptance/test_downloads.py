"""A model that is deployed by its name at a Hub, on a role that is killed in the middle of the download."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hub.hub import COMMIT, Fault, running, sha256

from .conftest import Build
from .machine import Machine, until

pytestmark = pytest.mark.engine
TOKEN = "hf_" + "t0ken" * 6
REPO = "maker/smol"
FILE = "smollm2.Q4_1.gguf"
STALLED = 20 << 20


def prepare(machine: Machine, endpoint: str) -> None:
    """The role's document, which alone may say that a Hub on loopback is meant, and an owner-only token beside it."""
    token = machine.home / "hub-token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    config = machine.state / "config"
    config.mkdir(parents=True, mode=0o700)
    sources = {
        "huggingface_endpoint": endpoint,
        "huggingface_token_file": str(token),
        "allowed_hosts": ["localhost", "127.0.0.1"],
    }
    document = config / "standalone.yaml"
    document.write_text(
        json.dumps({"schema_version": 1, "kind": "standalone", "name": "local", "host": {"model_sources": sources}})
    )
    document.chmod(0o600)
    machine.state.chmod(0o700)


def test_a_model_of_a_hub_answers_after_a_kill_in_the_middle_of_its_download(build: Build, real_model: Path):
    weights = real_model.read_bytes()
    files = {FILE: weights, "README.md": b"# smol", "pytorch_model.bin": b"pickled"}
    stalled = {FILE: [Fault(cut_after=STALLED, stall=True)]}
    with running({REPO: files}, token=TOKEN, faults=stalled) as hub, build() as machine:
        prepare(machine, hub.endpoint)
        machine.start()
        document = {
            "name": "smol",
            "engine": "llamacpp",
            "model": {"hf": f"{REPO}@{COMMIT}"},
            "engine_config": {"context_length": 512, "memory": {"request": "512MiB"}},
        }
        asked = machine.ok("deploy", "model", "--file", machine.write("smol.json", json.dumps(document)), "--activate")
        assert "Checkpoint digest   being " in asked.out

        def arrived() -> int:
            download = machine.view("smol")["checkpoint"].get("download") or {}
            return int(download.get("done_bytes") or 0)

        until(lambda: arrived() >= STALLED, what="the first part")
        status = machine.ok("status", "deployment", "smol").out
        assert "Waiting      the model is being downloaded" in status
        assert "Checkpoint   being downloaded: 20.0 MiB of 93.8 MiB (21 %)" in status
        directory = machine.home / "models/sources/huggingface" / REPO / COMMIT / "gguf"
        assert not directory.exists(), "half a download is no model"
        machine.kill()
        machine.start()
        until(lambda: machine.view("smol")["observed_state"] == "ready", 40, "the model")
        answer = machine.ask("smol", max_tokens=4)
        assert answer.status == 200
        assert answer.text
        assert [path.name for path in directory.iterdir()] == [FILE]
        assert sha256((directory / FILE).read_bytes()) == sha256(weights)
        ranges = [one.headers.get("range") for one in hub.to("cdn")]
        assert ranges[0] is None
        assert len(ranges) == 2
        assert int(str(ranges[1]).removeprefix("bytes=").removesuffix("-")) >= STALLED

        assert {one.headers.get("authorization") for one in hub.to("hub")} == {f"Bearer {TOKEN}"}
        assert {one.headers.get("authorization") for one in hub.to("cdn")} == {None}

        hub.seen.clear()
        machine.manage("POST", "/deployments", {"config": {**document, "name": "twin"}})
        until(lambda: machine.view("twin")["checkpoint"]["state"] == "measured", what="the twin's checkpoint")
        assert not hub.seen, "two deployments of one source share one download"

        kept = [path for path in machine.home.rglob("*") if path.is_file() and path.name != "hub-token"]
        for path in kept:
            if path.stat().st_size < 50 << 20:
                assert TOKEN.encode() not in path.read_bytes(), path

        assert machine.ok("list", "sources").out.split()[-5:] == [
            *(f"sources/huggingface/{REPO}/{COMMIT}/gguf", "93.8", "MiB", "complete", "smol,twin"),
        ]
        machine.act("twin", "delete")
        assert machine.manage("POST", "/model-sources/prune", {})["removed"] == [], "smol runs from it"
        machine.act("smol", "delete", stop=True)
        pruned = machine.ok("prune", "sources", "--apply")
        assert pruned.out.endswith("93.8 MiB removed.\n")
        assert not directory.exists()
