"""How long a command takes before it does anything, against the bare interpreter in the same run.

`--version` imports nothing; `list deployments` finds the role, asks it and prints. Every way is run in
turn, so that noise of the machine falls on all of them alike.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks.role import CAPYCTL, running

ROUNDS = int(os.environ.get("CAPYCTL_BENCH_STARTS", "30"))


def _took_s(words: Sequence[str], environ: Mapping[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(words, env=environ, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def main() -> None:
    """Measure, and print medians and ratios beside what is wanted of them."""
    ways: dict[str, tuple[Sequence[str], str]] = {
        "bare interpreter": ((sys.executable, "-c", "pass"), ""),
        "capyctl --version": ((*CAPYCTL, "--version"), "4"),
        "capyctl list deployments": ((*CAPYCTL, "list", "deployments"), "15"),
    }
    with running({}) as role:
        environ = role.room.environ()
        for words, _ in ways.values():
            _took_s(words, environ)  # bytecode and page cache
        took: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, (words, _) in ways.items():
                took[name].append(_took_s(words, environ))
    bare = statistics.median(took["bare interpreter"])
    print(f"start of a command, {ROUNDS} starts of each")
    for name, (_, wanted) in ways.items():
        median = statistics.median(took[name])
        aim = f"  wanted at most {wanted}" if wanted else ""
        print(f"  {name:26} median {median * 1000:7.1f} ms  ratio {median / bare:5.2f}{aim}")


if __name__ == "__main__":
    main()
