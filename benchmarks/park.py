"""What the control plane adds to a switch between two engines that park, beyond their own park and wake.

Two models of 14 GB take turns on a simulated card of 24 GB. Each switch is measured at its client, from the
request to the answer. What the engines themselves took is in their journals: the calls that release and restore
memory, and the client's own question. All the rest is added: draining, proofs of memory, the probe, the canary.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from tests.integration.parking.machine import ParkMachine, park_machine
from tests.nvml.card import GIB

ROUNDS = int(os.environ.get("CAPYCTL_BENCH_PARKS", "30"))
PORT = 9_700
OWN = ("/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache")
CHECKS = ("/v1/completions",)
CHAT = "/v1/chat/completions"


def _took_s(here: ParkMachine, since: float) -> tuple[float, float]:
    """(release, restore and the client's answer; probe and canary) of one switch, seconds inside the engines."""
    begun: dict[tuple[int, str], float] = {}
    own = checks = 0.0
    chats: list[float] = []
    for line in here.installations["vllm"].journal("call", "answered"):
        if line["at"] < since:
            continue
        key = (line["pid"], line["path"])
        if line["event"] == "call":
            begun[key] = line["at"]
            continue
        if key not in begun:
            continue  # the end of a question of before
        took = line["at"] - begun.pop(key)
        if line["path"] in OWN:
            own += took
        elif line["path"] in CHECKS:
            checks += took
        elif line["path"] == CHAT:
            chats.append(took)
    return own + chats[-1], checks + sum(chats[:-1])


def main() -> None:
    """Measure, and print medians and what a switch adds."""
    settings = ("host.resource_policy.queue.admission_window=1ms",)
    added, own, checks = [], [], []
    with (
        tempfile.TemporaryDirectory() as home,
        park_machine(Path(home), PORT, {"vllm": {"sleep_s": 0.2, "wake_s": 0.2}}, settings) as here,
    ):
        for name in ("one", "two"):
            here.put(name, "vllm", 14 * GIB, 16 * GIB)
            here.ask(name)
        for number in range(ROUNDS):
            since, began = time.monotonic(), time.perf_counter()
            here.ask(("one", "two")[number % 2])
            wall_s = time.perf_counter() - began
            time.sleep(0.05)  # an engine notes its answer after it has given it
            engines_s, checks_s = _took_s(here, since)
            own.append(engines_s)
            checks.append(checks_s)
            added.append(wall_s - engines_s)
    print(f"switch between two models that park, {ROUNDS} times")
    print(f"  {'park, wake and answer':26} median {statistics.median(own) * 1000:7.0f} ms  inside the engines")
    print(f"  {'capyctl':26} adds   {statistics.median(added) * 1000:7.0f} ms  at the median", end="")
    print(f", of them {statistics.median(checks) * 1000:.0f} ms in the engines' answers to probe and canary")


if __name__ == "__main__":
    main()
