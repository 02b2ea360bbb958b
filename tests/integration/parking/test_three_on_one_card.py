"""Three models of 14, 14 and 12 GB on a card of 24 GB, from documents that say nothing of memory, or all of it.

Everybody is answered, each switch parks one and wakes one, and status says where every figure came from.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import os
from pathlib import Path

from tests.engines.checkpoints import write_checkpoint
from tests.integration.acceptance.machine import until
from tests.nvml.card import GIB

from .machine import PORTS, ParkMachine, park_machine, sampled

GB = 10**9
MODELS = {"ada": ("vllm", 14), "grace": ("vllm", 14), "tom": ("sglang", 12)}
LIMIT = 24 * GIB
STATED = int(os.environ.get("CAPYCTL_TEST_TURNS", "12"))  # a switch takes a third of a second
SETTINGS = (
    "host.resource_policy.queue.admission_window=1ms",  # that window is waited out on purpose
    "host.resource_policy.memory.system.managed_limit=90%",  # 4 GiB of RAM are set aside for each engine
    "host.resource_policy.memory.system.parked_limit=80%",
    "host.resource_policy.memory.system.free_reserve=2%",
)


def deploy(here: ParkMachine, name: str) -> None:
    """Name, engine and model; the digest is said beside the model, since nobody reads 14 GB in a test."""
    family, weights = MODELS[name]
    place = write_checkpoint(here.home / "models" / name, weights=weights * GB)
    digest = "sha256:" + hashlib.sha256(name.encode()).hexdigest()
    document = {"name": name, "engine": family, "model": {"path": str(place), "content_fingerprint": digest}}
    here.ok("deploy", "model", "--file", here.write(f"{name}.yaml", json.dumps(document)))
    until(lambda: here.view(name)["checkpoint"]["state"] not in ("pending", "measuring"), what="measuring")
    assert here.view(name)["checkpoint"]["state"] == "measured", here.view(name)["checkpoint"]


def test_fifty_requests_that_alternate_among_three_models_are_all_answered(tmp_path: Path) -> None:
    with park_machine(tmp_path, PORTS, {"vllm": {}, "sglang": {}}, SETTINGS) as here:
        for name in MODELS:
            deploy(here, name)
        estimated = {name: here.view(name)["startup"] for name in MODELS}
        assert {(one["device_provenance"], one["host_provenance"]) for one in estimated.values()} == {
            ("derived", "derived")
        }
        alternate(here, 50)
        says_where_its_figures_come_from(here)
        before = {name: here.view(name)["memory"] for name in MODELS}
        assert here.terminate() == 0
        here.start()
        assert {name: here.view(name)["memory"] for name in MODELS} == before, "what was measured outlives the role"
        assert here.terminate() == 0


def test_the_same_three_take_turns_by_memory_that_their_documents_state(tmp_path: Path) -> None:
    with park_machine(tmp_path, PORTS, {"vllm": {}, "sglang": {}}, SETTINGS) as here:
        for name, (family, weights) in MODELS.items():
            here.put(name, family, weights * GIB, (weights + 2) * GIB)
        alternate(here, STATED)
        for name in MODELS:
            rows = {(row["phase"], row["domain"]): row for row in here.view(name)["memory"]}
            assert int(rows["ready", "gpu0"]["bytes"]) == (MODELS[name][1] + 2) * GIB
            assert rows["ready", "gpu0"]["provenance"] == "declared"
        assert here.terminate() == 0


def alternate(here: ParkMachine, requests: int) -> None:
    """Ask the three in turn: everybody is answered, each switch parks one and wakes one, the card is never over."""
    order = list(itertools.islice(itertools.cycle(MODELS), requests))
    with sampled(here.cards) as seen:
        answers = [(name, here.ask(name, max_tokens=4)) for name in order]
    assert [(name, answer.status) for name, answer in answers] == [(name, 200) for name in order]
    assert all(answer.json["model"] == name for name, answer in answers)
    texts = collections.defaultdict(set)
    for name, answer in answers:
        texts[name].add(answer.text)
    assert all(len(said) == 1 for said in texts.values()), "the same question is answered alike after each wake"

    starts = dict.fromkeys(MODELS, 0)
    sleeps = wakes = 0
    for made in here.installations.values():
        for start in made.starts():
            argv = start["argv"]
            starts[next(name for name in MODELS if name in argv)] += 1
        sleeps += len(made.calls("/sleep", "/release_memory_occupation"))
        wakes += len(made.calls("/resume_memory_occupation"))
        wakes += len([call for call in made.calls("/wake_up") if call["query"] == "tags=weights"])
    assert starts == dict.fromkeys(MODELS, 1), f"nobody was started twice\n{here.story()}"
    assert (sleeps, wakes) == (requests - 1, requests - len(MODELS)), here.story()

    took = sorted(answer.took_s for _, answer in answers[3:])
    print(
        f"{requests} of {requests} answered; median switch {took[len(took) // 2]:.2f} s, longest {took[-1]:.2f} s; "
        f"{sleeps} parks, {wakes} wakes; card at most {max(seen) / GIB:.1f} of {LIMIT / GIB:.0f} GiB "
        f"in {len(seen)} samples"
    )
    assert here.cards.peak(0) <= LIMIT
    assert max(seen) <= LIMIT


def says_where_its_figures_come_from(here: ParkMachine) -> None:
    """Status of the card, and of each model: planned by phase and domain, charged now, each with its provenance."""
    held = here.on_card()
    status = here.ok("status").out
    print(status)
    assert sum(int(text.split()[0]) for text in held.values()) <= LIMIT
    assert sorted(text.split()[1] for text in held.values()) == ["parked", "parked", "ready"]
    for name in MODELS:
        assert name in status
        view = here.view(name)
        startup = view["startup"]
        assert startup["device_provenance"] == startup["host_provenance"] == "measured"
        rows = {(row["phase"], row["domain"]): row for row in view["memory"]}
        cold, ready, parked = (rows[phase, "gpu0"] for phase in ("cold", "ready", "parked"))
        assert (cold["provenance"], ready["provenance"], parked["provenance"]) == ("measured", "derived", "measured")
        assert int(ready["bytes"]) <= int(cold["bytes"])  # a peak below it is planned as it
        assert 0 < int(cold["measured_bytes"]) <= int(cold["bytes"])
        assert rows["ready", "system"]["provenance"] == "derived"
        charged = {row["domain"]: (row["phase"], row["provenance"]) for row in view["ledger"]}
        phase = view["instances"][0]["observed_state"]
        assert charged == {
            "gpu0": (phase, rows[phase, "gpu0"]["provenance"]),
            "system": (phase, rows[phase, "system"]["provenance"]),
        }
        told = here.ok("status", "deployment", name).out
        print(told)
        assert " measured" in next(line for line in told.splitlines() if "gpu0: start" in line)
        assert "(" + rows[phase, "gpu0"]["provenance"] + ")" in told
