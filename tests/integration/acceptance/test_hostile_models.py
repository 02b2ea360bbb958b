"""Models that somebody made to hurt, deployed one after the other on one running role: it refuses each, and lives."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.parking.machine import PORTS, ParkMachine, park_machine

from .machine import ROOT, Stopwatch, until

EVERY = 12  # of those that are files alone; odd directories are all sent
SIZED_OUT = {"insufficient_device_memory", "insufficient_resources", "no_safe_estimate", "invalid_config"}
"""What a model that could be read may be refused for."""
ANSWER_S = 5.0  # for a refusal, and for whoever looks meanwhile; most take milliseconds
PEAK_KIB = 400 << 10


@pytest.fixture
def here(tmp_path: Path) -> Iterator[ParkMachine]:
    (tmp_path / "home").mkdir()
    with park_machine(tmp_path / "home", PORTS, {"vllm": {}}) as machine:
        machine.add_engine()
        yield machine


def written(place: Path) -> list[dict[str, Any]]:
    program = [sys.executable, str(ROOT / "tests/property/hostile.py"), str(place), "--write", str(EVERY)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def deployed(here: ParkMachine, case: dict[str, Any]) -> tuple[str, str]:
    """(code, line) of a refusal; ("", "") where it was taken."""
    config = {"name": Path(case["place"]).name, "engine": case["engine"], "model": case["place"]}
    status, answer = here.call("POST", "/deployments", {"config": config})
    if status == 202:
        return "", ""
    return answer["error"]["code"], answer["error"]["message"]


@contextmanager
def looked_at(here: ParkMachine) -> Iterator[list[float]]:
    """Ask for the list of deployments again and again until the end of the block; how long each answer took."""
    took: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            watch = Stopwatch()
            here.manage("GET", "/deployments?limit=1")
            took.append(watch.s)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()


def test_each_is_refused_with_its_code_in_little_time_and_the_role_serves_on(here: ParkMachine, tmp_path: Path) -> None:
    place = tmp_path / "models"
    place.mkdir(mode=0o755)
    cases = written(place)
    assert len(cases) > 75
    wrong, slow, taken = [], {}, {}
    assert here.role is not None
    with looked_at(here) as took:
        for case in cases:
            watch = Stopwatch()
            code, line = deployed(here, case)
            if watch.s > ANSWER_S:
                slow[case["name"]] = watch.s
            if not code:
                taken[Path(case["place"]).name] = case
            elif not is_fine(case, code, line):
                wrong.append(f"{case['name']}: {code}, not {case['expected']}: {line[:200]!r}")
    assert wrong == []
    assert slow == {}
    assert len(took) > 3
    assert max(took) < ANSWER_S
    assert here.role.poll() is None
    until(lambda: not {row["checkpoint"]["state"] for row in rows(here)} & {"pending", "measuring"}, what="measuring")
    found = {row["name"]: row["checkpoint"] for row in rows(here)}
    assert set(found) == set(taken)
    for name, case in taken.items():  # what could be read, and whatever this machine was too busy to look at in time
        code, line = str(found[name]["code"] or ""), str(found[name]["reason"] or "")
        assert is_fine(case, code, line) if code else "read" in case["expected"], (case["name"], found[name])
    good = [name for name, case in taken.items() if case["name"].startswith("good: ")]
    assert [found[name]["state"] for name in good] == ["measured", "measured"]
    peak = Path(f"/proc/{here.role.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
    assert int(peak) < PEAK_KIB
    assert here.ok("status", "deployment", good[0]).out


def is_fine(case: dict[str, Any], code: str, line: str) -> bool:
    """Whether a model may be refused with this code, and the line is one that a terminal can show."""
    known = SIZED_OUT if "read" in case["expected"] else set()
    return code in known | set(case["expected"]) and len(line) <= 1000 and line.isprintable()


def rows(here: ParkMachine) -> list[dict[str, Any]]:
    found = here.manage("GET", "/deployments?limit=100")
    assert "next" not in found
    return list(found["deployments"])
