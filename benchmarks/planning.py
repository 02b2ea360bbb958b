"""What one decision of the scheduler costs, and how that grows with the fleet.

Random fleets in the pure core: no process, no socket, no disk. One host in ten deployments, four equal cards a host,
half of the deployments serving. Each row is the median time of one event until its orders are given: a start that is
placed among the hosts that it may use, one that needs a switch (planned when it is asked for, and again when its host
has said that it could begin), one that waits, a request, a report of an engine, a sample of a host. A fleet is
measured at several sizes; the exponent says how the median grows with it: 0 is not at all, 1 in step.
"""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import time
from collections.abc import Callable

import attrs

from benchmarks import fleet
from benchmarks.fleet import Fleet

HOSTS = tuple(int(one) for one in os.environ.get("CAPYCTL_BENCH_HOSTS", "100 300 1000").split())
ROUNDS = int(os.environ.get("CAPYCTL_BENCH_EVENTS", "60"))
NAMED = 16  # hosts that a deployment names, where it does not leave the choice open
START_LIMIT_MS = 10.0


@attrs.frozen
class Measured:
    """Medians in milliseconds by the number of hosts."""

    name: str
    medians: tuple[float, ...]

    @property
    def exponent(self) -> float:
        """The slope of log time over log size: how the median grows with the fleet."""
        return slope([math.log(size) for size in HOSTS], [math.log(median) for median in self.medians])


def slope(xs: list[float], ys: list[float]) -> float:
    """Of the line that fits best; 0 for a single point."""
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0


def timed(deed: Callable[[], None]) -> float:
    """Milliseconds of processor time: a decision waits for nothing, and whatever else runs here is not its doing."""
    began = time.process_time()
    deed()
    return (time.process_time() - began) * 1000


def measure(size: int) -> dict[str, float]:
    """Medians by name, of a fleet with so many hosts."""
    rng = random.Random(size)
    found: dict[str, list[float]] = {}
    for title, named in (("among all hosts", None), (f"among {NAMED} hosts", NAMED)):
        here = Fleet.of(size, rng, named=named)
        gc.collect()
        gc.freeze()  # what the fleet is made of is not walked through while one event is measured
        for names in deeds(here, title):
            for _ in range(ROUNDS):
                for name, deed in names.items():
                    found.setdefault(name, []).append(timed(deed))
                here.calm()
        gc.unfreeze()
    return {name: statistics.median(times) for name, times in found.items()}


def deeds(here: Fleet, title: str) -> list[dict[str, Callable[[], None]]]:
    """What is measured of a fleet: events by name, those that follow each other together."""
    some: list[dict[str, Callable[[], None]]] = [
        {f"start that fits, {title}": here.start},
        {
            f"start that others give way for, {title}: planned": here.evict,
            f"start that others give way for, {title}: begun": here.switch,
        },
        {f"start that waits for room, {title}": here.wait},
    ]
    if title.endswith("all hosts"):
        some += [
            {"request that is served at once": here.ask},
            {"report of an engine's gauges": here.report},
            {"sample of a host": here.observe},
            {"a deadline that has come": here.tick},
        ]
    return some


def main() -> None:
    """Measure, and print medians per size and how they grow."""
    by_size = [measure(size) for size in HOSTS]
    rows = [Measured(name, tuple(medians[name] for medians in by_size)) for name in by_size[0]]
    print(f"one decision of the scheduler, median of {ROUNDS}, {fleet.PER_HOST} deployments a host")
    print(f"  {'hosts':60}" + "".join(f"{size:>11}" for size in HOSTS) + "   growth")
    for row in rows:
        print(f"  {row.name:60}" + "".join(f"{one:8.3f} ms" for one in row.medians) + f"   n^{row.exponent:.2f}")
    slowest = max((row for row in rows if row.name.startswith("start")), key=lambda row: row.medians[-1])
    print(f"  slowest: {slowest.name}, {slowest.medians[-1]:.2f} ms; {START_LIMIT_MS:.0f} ms wanted at most")


if __name__ == "__main__":
    main()
