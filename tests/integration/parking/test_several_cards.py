"""One model on two cards of one machine: equal ones, shown to the engine in rank order, charged and parked together."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tests.engines.checkpoints import write_checkpoint
from tests.integration.acceptance.machine import until
from tests.nvml.card import GIB, Card, card_lines, uuid

from .machine import PORTS, ParkMachine, park_machine

GB = 10**9


def cards(state: Path) -> Card:
    """Two cards of one model with another one between them, all of one size."""
    return Card(state).write(
        *card_lines(0, 24 * GIB), *card_lines(1, 24 * GIB, name="NVIDIA L4"), *card_lines(2, 24 * GIB)
    )


def document(here: ParkMachine, name: str, family: str, weights: int, **more: object) -> str:
    place = write_checkpoint(here.home / "models" / name, weights=weights)
    digest = "sha256:" + hashlib.sha256(name.encode()).hexdigest()
    body = {"name": name, "engine": family, "model": {"path": str(place), "content_fingerprint": digest}, **more}
    return here.write(f"{name}.yaml", json.dumps(body))


def variables(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def on_cards(here: ParkMachine, name: str) -> dict[str, str]:
    """What the ledger charges a deployment on each card."""
    owner = f"deployment:{here.view(name)['id']}/instance:0 "
    charged = {key.removeprefix(owner): held for key, held in here.charged().items() if key.startswith(owner)}
    return {domain: held for domain, held in charged.items() if domain.startswith("gpu")}


def test_a_model_of_two_ranks_takes_both_equal_cards_and_gives_them_back_when_it_parks(tmp_path: Path) -> None:
    with park_machine(tmp_path, PORTS, {"vllm": {}}, cards=cards) as here:
        topology = {"topology": {"tensor_parallel": 2}}
        here.ok("deploy", "model", "--file", document(here, "wide", "vllm", 30 * GB, **topology))
        until(lambda: here.view("wide")["checkpoint"]["state"] == "measured", what="measuring")
        assert here.ask("wide").status == 200
        pid = here.instance("wide")["pid"]
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        assert words[words.index("--tensor-parallel-size") + 1] == "2"
        assert variables(pid)["CUDA_VISIBLE_DEVICES"] == f"{uuid(0)},{uuid(2)}"
        ready = on_cards(here, "wide")
        assert set(ready) == {"gpu0", "gpu2"}
        assert len(set(ready.values())) == 1
        assert here.cards.used(0) == here.cards.used(2) > 14 * GIB
        assert here.cards.used(1) == 0
        here.ok("park", "deployment", "wide", "--wait")
        assert set(on_cards(here, "wide")) == {"gpu0", "gpu2"}
        assert max(here.cards.used(0), here.cards.used(2)) < 3 * GIB
        assert here.ask("wide").status == 200
        assert here.instance("wide")["pid"] == pid
        too_wide = document(here, "wider", "vllm", GB, topology={"tensor_parallel": 4})
        refused = here.command("deploy", "model", "--file", too_wide, "--activate", "--wait")
        assert refused.status != 0
        assert "topology has 4 ranks" in refused.out + refused.err
        assert "host_ineligible" in refused.out + refused.err
