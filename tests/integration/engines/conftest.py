"""What the engine tests share: a tiny model, the real wheel's environment, and started launches that end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import pytest

from capyctl.engines.llamacpp.render import program

from .launched import free_port
from .tiny_gguf import write_tiny

ENVIRONMENT = Path(sys.prefix)
PYTHON = str(ENVIRONMENT / "bin" / "python")
KEY = "k" * 40


@attrs.define(kw_only=True)
class Engine:
    """A started launcher. `log` is what it wrote so far."""

    process: subprocess.Popen[bytes]
    port: int
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def end(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait(timeout=60)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds one tiny model."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    write_tiny(directory / "tiny.gguf")
    return directory


@pytest.fixture(name="free_port")
def a_free_port() -> int:
    return free_port()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Sequence[str], Mapping[str, str], int], Engine]]:
    """Start the launcher with these words; every engine is ended after the test."""
    engines: list[Engine] = []

    def begin(words: Sequence[str], env: Mapping[str, str], port: int) -> Engine:
        log_path = tmp_path / f"engine-{len(engines)}.log"
        with open(log_path, "wb") as log:
            process = subprocess.Popen(
                words, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
            )
        engines.append(Engine(process=process, port=port, log_path=log_path))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.end()


def until(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Poll every 20 ms; fail when it does not come to hold."""
    ends = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < ends, "it did not come to hold in time"
        time.sleep(0.02)


def launcher(*words: str) -> tuple[str, ...]:
    return (*program(PYTHON), *words)
