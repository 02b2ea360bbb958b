"""Commands as a shell runs them: a process, its streams, its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from cli_fake_role import FakeRole

ROOT = Path(__file__).parents[3]


@attrs.frozen
class Done:
    """How a command ended."""

    status: int
    out: str
    err: str


@attrs.define
class Shell:
    """Runs `capyctl` with a home of its own."""

    home: Path
    state: Path

    def environ(self, **more: str) -> dict[str, str]:
        plain = {
            "HOME": str(self.home),
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return {**plain, "CAPYCTL_STATE_DIR": str(self.state), **more}

    def __call__(self, *words: str, **more: str) -> Done:
        command = [sys.executable, "-m", "capyctl", *words]
        ended = subprocess.run(
            command, capture_output=True, text=True, env=self.environ(**more), cwd=self.home, timeout=30, check=False
        )
        return Done(ended.returncode, ended.stdout, ended.stderr)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    os.umask(0o077)
    return Shell(home=home, state=tmp_path / "state")


@pytest.fixture
def role(shell: Shell) -> Iterator[FakeRole]:
    with FakeRole(shell.state) as running:
        yield running
