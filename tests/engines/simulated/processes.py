"""The processes of an engine beside its front: workers and helpers, forked, in the same process group.

Each child has a socket to the front and does what it is told: hold so much memory, end in such a way. What a
sleep, a wake or an overrun means is decided in the front. Children are forked before any thread starts.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import time
from typing import Any

from .journal import Journal
from .knobs import Knobs
from .memory import CardMemory, HostMemory, OutOfMemory, Segment


class Plan:
    """One process to start. `outlives` a killed front; `segments` are name prefixes of its shared memory."""

    def __init__(
        self, name: str, *, outlives: bool, term_s: float = 0.0, segments: tuple[str, ...] = (), suffix: str = "",
        children: tuple[Plan, ...] = (), worker: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.outlives, self.term_s, self.worker = name, outlives, term_s, worker
        self.segments, self.suffix, self.children = segments, suffix, children
        self.ours, self.theirs = socket.socketpair()

    def all(self) -> list[Plan]:
        return [self, *(plan for child in self.children for plan in child.all())]


class ChildGone(Exception):
    """The process has ended."""


class Child:
    """The front's side of a process."""

    def __init__(self, plan: Plan, pid: int) -> None:
        self.name, self.worker, self.pid = plan.name, plan.worker, pid
        self.pidfd = os.pidfd_open(pid)
        self._socket = plan.ours
        self._file = plan.ours.makefile("rb")

    def ask(self, **order: Any) -> None:
        """Have it carry out an order. Raises: OutOfMemory, ChildGone."""
        try:
            self._socket.sendall(json.dumps(order).encode() + b"\n")
            line = self._file.readline()
        except OSError:
            line = b""
        if not line:
            raise ChildGone(self.name)
        answer = json.loads(line)
        if "oom" in answer:
            raise OutOfMemory(*answer["oom"])

    def tell(self, **order: Any) -> None:
        """As `ask`, for orders that it does not survive to answer."""
        try:
            self._socket.sendall(json.dumps(order).encode() + b"\n")
        except OSError:
            return  # it has ended already, which is what the order was for


def spawn(plans: list[Plan], knobs: Knobs, journal: Journal) -> list[Child]:
    """Start every process of the plans, parents before their children. Returns the flat list."""
    everything = [plan for root in plans for plan in root.all()]
    reader, writer = os.pipe()
    for plan in plans:
        _fork(plan, everything, writer, knobs, journal)
    os.close(writer)
    children: list[Child] = []
    with os.fdopen(reader) as pids:  # one line each, once it runs
        by_name = {plan.name: plan for plan in everything}
        for line in pids:
            name, _, pid = line.rstrip("\n").rpartition(" ")
            children.append(Child(by_name[name], int(pid)))
    for plan in everything:
        plan.theirs.close()
    order = [plan.name for plan in everything]
    return sorted(children, key=lambda child: order.index(child.name))


def _fork(plan: Plan, everything: list[Plan], announce: int, knobs: Knobs, journal: Journal) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        status = _Process(plan, everything, announce, knobs, journal).run()
    finally:
        os._exit(status)  # never back into the front's code


class _Process:
    """A child, inside."""

    def __init__(self, plan: Plan, everything: list[Plan], announce: int, knobs: Knobs, journal: Journal) -> None:
        self._plan, self._knobs, self._journal = plan, knobs, journal
        self._front = os.getppid()
        for other in everything:
            other.ours.close()
        with open("/proc/self/comm", "w") as comm:
            comm.write(plan.name[:15])
        self._ends_at: float | None = None
        self._woken, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told)
        signal.signal(signal.SIGTERM, self._terminated)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._segments = [
            Segment(f"{prefix}{secrets.token_hex(4)}{plan.suffix}", knobs.shm_bytes) for prefix in plan.segments
        ]
        for segment in self._segments:
            journal.write("segment", path=segment.path, process=plan.name)
        mine = plan.all()
        for child in plan.children:
            _fork(child, everything, announce, knobs, journal)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are reaped by the kernel
        for other in everything:
            if other is not plan:
                other.theirs.close()
        os.write(announce, f"{plan.name} {os.getpid()}\n".encode())
        os.close(announce)
        del mine
        self._host, self._cards = HostMemory(), CardMemory(knobs.card_state)
        self._later: list[tuple[float, dict[str, Any]]] = []

    def _terminated(self, *_: object) -> None:
        if not self._knobs.ignores_sigterm:  # an orphan, too, ends sooner when it is asked to
            ends_at = time.monotonic() + self._plan.term_s * self._knobs.time_scale
            self._ends_at = ends_at if self._ends_at is None else min(self._ends_at, ends_at)

    def run(self) -> int:
        orders: socket.socket | None = self._plan.theirs
        received = b""
        while True:
            now = time.monotonic()
            if self._ends_at is not None and now >= self._ends_at:
                return self._leave()
            for due in [entry for entry in self._later if entry[0] <= now]:
                self._later.remove(due)
                self._hold(due[1])
            moments = [at for at, _ in self._later] + ([self._ends_at] if self._ends_at is not None else [])
            watched = [self._woken] + ([orders] if orders is not None else [])
            ready, _, _ = select.select(watched, [], [], max(0.0, min(moments) - now) if moments else None)
            if self._woken in ready:
                os.read(self._woken, 512)
            if orders is not None and orders in ready:
                piece = orders.recv(65536)
                if not piece:
                    orders = None
                    if not self._plan.outlives:
                        return self._leave(clean=False)  # killed by the kernel at its parent's death
                    self._ends_at = self._ends_at or now + self._knobs.orphan_s
                received += piece
                while b"\n" in received and orders is not None:
                    line, _, received = received.partition(b"\n")
                    orders.sendall(json.dumps(self._obey(json.loads(line))).encode() + b"\n")

    def _obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if "signal" in order:
            os.kill(os.getpid(), order["signal"])
        if "exit" in order:
            os._exit(order["exit"])
        if order.get("leave"):
            os._exit(self._leave())
        if order.get("after_s"):
            self._later.append((time.monotonic() + order["after_s"], order))
            return {}
        return self._hold(order)

    def _hold(self, order: dict[str, Any]) -> dict[str, Any]:
        limit = self._knobs.host_limit_bytes
        try:
            for index, wanted in order.get("cards", {}).items():
                self._cards.hold(int(index), int(wanted))
        except OutOfMemory as full:
            return {"oom": [full.index, full.wanted, full.free, full.total]}
        if "host" in order:
            if limit is not None and order["host"] > limit:
                self._host.resize(limit)
                os.kill(os.getpid(), signal.SIGKILL)
            self._host.resize(order["host"])
        return {}

    def _leave(self, *, clean: bool = True) -> int:
        if clean and not self._knobs.shm_leak:
            for segment in self._segments:
                segment.unlink()
        return 0
