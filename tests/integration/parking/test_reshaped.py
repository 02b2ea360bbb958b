"""A machine that came back with other memory than its engines are charged on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import psutil

from tests.engines.checkpoints import write_checkpoint
from tests.integration.acceptance.machine import gone, until
from tests.nvml import card

from .machine import PORTS, park_machine

MIB = 1 << 20


def test_a_card_that_was_added_ends_what_runs_in_the_old_memory_and_sizes_it_anew(tmp_path: Path) -> None:
    with park_machine(tmp_path, PORTS, {"vllm": {}}) as here:
        assert here.terminate() == 0
        card.no_driver(here.cards.state)
        here.start()
        place = write_checkpoint(here.home / "models" / "ada", weights=64 * MIB)
        body = {
            "name": "ada",
            "engine": "vllm",
            "residency": "restart_only",
            "engine_config": {"context_length": 512},
            "resources": {"gpu": "2GiB", "ram": "128MiB"},
            "model": {
                "source": {"type": "local", "path": str(place)},
                "content_fingerprint": "sha256:" + hashlib.sha256(b"ada").hexdigest(),
            },
        }
        here.ok("deploy", "model", "--file", here.write("ada.yaml", json.dumps(body)), "--activate", "--wait")
        assert {row["domain"] for row in here.view("ada")["ledger"]} == {"unified"}
        old = psutil.Process(here.instance("ada")["pid"])
        assert here.terminate() == 0
        assert not gone(old), "the role leaves its engines"

        card.one_card(here.cards.state)
        here.start()
        assert gone(old)
        view = until(lambda: (seen := here.view("ada"))["checkpoint"]["state"] == "measured" and seen, what="sizing")
        assert view["revision"] == "2"
        assert set(view["startup"]["bytes"]) == {"gpu0", "system"}
        assert view["ledger"] == []
        assert here.manage("GET", "/hosts")["hosts"][0]["eligible"]
        assert here.ask("ada", max_tokens=2).status == 200
        assert {row["domain"] for row in here.view("ada")["ledger"]} == {"gpu0", "system"}
        assert here.terminate() == 0
