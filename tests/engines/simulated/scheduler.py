"""Requests in an engine: a bounded number runs, the rest waits; gauges and latency series count them."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)


class Histogram:
    """A Prometheus histogram of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str) -> Iterator[str]:
        yield f"# TYPE {name} histogram"
        total = 0
        for bound, count in zip([*map(str, BUCKETS), "+Inf"], self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}",{labels}}} {float(total)}'
        yield f"{name}_count{{{labels}}} {float(total)}"
        yield f"{name}_sum{{{labels}}} {self._sum}"


class Job:
    """One request, from its arrival to the moment from which the engine works on it no longer."""

    def __init__(self, rid: str, prompt_tokens: int) -> None:
        self.rid, self.prompt_tokens = rid, prompt_tokens
        self.cached_tokens = 0
        self.arrived_at = time.monotonic()
        self.started_at: float | None = None
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.produced = 0
        self.reasoned = 0
        self.aborted = False

    @property
    def queue_s(self) -> float:
        return (self.started_at or time.monotonic()) - self.arrived_at

    @property
    def ttft_s(self) -> float | None:
        """From scheduling to the first token."""
        return None if self.first_at is None or self.started_at is None else self.first_at - self.started_at

    @property
    def between_tokens_s(self) -> float | None:
        if self.first_at is None or self.last_at is None or self.produced < 2:
            return None
        return (self.last_at - self.first_at) / (self.produced - 1)

    def token(self) -> None:
        self.last_at = time.monotonic()
        self.first_at = self.first_at or self.last_at
        self.produced += 1


class Aborted(Exception):
    """The request was ended from elsewhere."""


class Scheduler:
    def __init__(self, running_max: int) -> None:
        self.running_max = running_max
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.paused = False
        self.changed = threading.Condition()
        self.ttft, self.e2e, self.queued = Histogram(), Histogram(), Histogram()
        self.prompt_tokens = self.generated_tokens = self.finished = 0
        self._seen: dict[int, int] = {}  # prompt -> tokens, since the cache was last reset
        self.on_change: Callable[[], None] = lambda: None

    def counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def cached(self, prompt: int, tokens: int) -> int:
        """Tokens of this prompt that the prefix cache holds, in blocks of 16; remembers the prompt."""
        with self.changed:
            known = self._seen.get(prompt, 0)
            self._seen[prompt] = tokens
        return min(known, tokens - 1) // 16 * 16

    def reset_cache(self) -> bool:
        """False while blocks are held."""
        with self.changed:
            if self.running:
                return False
            self._seen.clear()
            return True

    @contextmanager
    def place(self, job: Job, look: Callable[[], None]) -> Iterator[None]:
        """Wait for a place, hold it. `look` is called while waiting and may raise; so may an abort."""
        with self.changed:
            self.waiting.append(job)
        self.on_change()
        try:
            with self.changed:
                while self.paused or len(self.running) >= self.running_max or self.waiting[0] is not job:
                    self.changed.wait(0.02)
                    if job.aborted:
                        raise Aborted
                    look()
                self.waiting.remove(job)
                self.running.append(job)
                job.started_at = time.monotonic()
                self.queued.observe(job.queue_s)
                self.changed.notify_all()
            self.on_change()
            yield
        finally:
            with self.changed:
                if job in self.waiting:
                    self.waiting.remove(job)
                if job in self.running:
                    self.running.remove(job)
                    self._count(job)
                self.changed.notify_all()
            self.on_change()

    def _count(self, job: Job) -> None:
        self.finished += 1
        self.prompt_tokens += job.prompt_tokens
        self.generated_tokens += job.produced
        self.e2e.observe(time.monotonic() - job.arrived_at)
        if job.ttft_s is not None:
            self.ttft.observe(job.ttft_s)

    def linger(self, job: Job, seconds: float) -> None:
        """Its client has left: the work goes on until the engine notices that, or is told to end it."""
        with self.changed:
            self.changed.wait_for(lambda: job.aborted, seconds)

    def abort(self, matches: Callable[[str], bool]) -> int:
        """End every request whose id matches; returns how many."""
        with self.changed:
            found = [job for job in (*self.running, *self.waiting) if matches(job.rid)]
            for job in found:
                job.aborted = True
            self.changed.notify_all()
        return len(found)
