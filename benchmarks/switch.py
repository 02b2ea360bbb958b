"""What the control plane adds to a switch, beyond ending one engine and starting the other.

Two deployments of one small model take turns in memory that holds one of them. A switch is measured at its
client: from the request to the answer. The bare way runs the very command line of those engines by hand:
SIGTERM, wait for the end, start, ask until it answers. The window that a busy model is given is set to
nothing here, since it is waited out on purpose.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import time
from pathlib import Path

from benchmarks.role import chat, running

ROUNDS = int(os.environ.get("CAPYCTL_BENCH_SWITCHES", "8"))
SETTINGS = {
    "host.resource_policy.memory.system.managed_limit": "1GiB",
    "host.resource_policy.queue.admission_window": "1ms",
}
CONFIG = {"engine_config": {"context_length": 2048}, "resources": {"gpu": "300MiB", "ram": "300MiB"}}


def _launch(pid: int) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of a running engine."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    pairs = Path(f"/proc/{pid}/environ").read_bytes().rstrip(b"\0").split(b"\0")
    return [os.fsdecode(word) for word in words], dict(os.fsdecode(pair).split("=", 1) for pair in pairs)


def _start(words: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start an engine and return once it has answered."""
    process = subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    port, name = (words[words.index(option) + 1] for option in ("--port", "--alias"))
    while True:
        try:
            chat(int(port), environ["LLAMA_API_KEY"], name)
        except (OSError, RuntimeError):
            if process.poll() is not None:
                raise
            time.sleep(0.01)
        else:
            return process


def _bare_s(words: list[str], environ: dict[str, str]) -> list[float]:
    process = _start(words, environ)
    took = []
    try:
        for _ in range(ROUNDS):
            began = time.perf_counter()
            process.send_signal(signal.SIGTERM)
            process.wait()
            process = _start(words, environ)
            took.append(time.perf_counter() - began)
    finally:
        process.terminate()
        process.wait()
    return took


def main() -> None:
    """Measure, and print medians, what a switch adds, and the ratio."""
    with running(SETTINGS) as role:
        for name in ("one", "two"):
            role.deploy(name, **CONFIG)
        role.ask("one")
        launch = _launch(role.pid("one"))
        took = []
        for round_number in range(ROUNDS):
            began = time.perf_counter()
            role.ask("two" if round_number % 2 == 0 else "one")
            took.append(time.perf_counter() - began)
        role.command("drain", "standalone")
        bare = statistics.median(_bare_s(*launch))
    switch = statistics.median(took)
    print(f"switch between two small models, {ROUNDS} of each")
    print(f"  {'engine by hand':26} median {bare * 1000:7.0f} ms  ratio  1.00")
    print(
        f"  {'capyctl':26} median {switch * 1000:7.0f} ms  ratio {switch / bare:5.2f}"
        f"  adds {(switch - bare) * 1000:+.0f} ms"
    )


if __name__ == "__main__":
    main()
