"""What every simulated engine is made of: its life from the command line to the end, and its routes.

A family derives from `Engine`, says how its options are parsed, which processes it has, what its memory is,
and fills `routes`. Faults and the journal lie around every route here, so that no family forgets them.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from . import knobs as knobs_module
from .faults import Fault, Faults
from .http import ClientLeft, Reply, Request, Server
from .journal import Journal
from .knobs import Knobs
from .memory import CardMemory, HostMemory, OutOfMemory, own_memory, visible
from .processes import Child, ChildGone, Plan, spawn
from .text import Model

Route = Callable[[Request, Reply], None]
QUIET = frozenset({"/metrics", "/slots"})  # read every second: their answers would drown the journal


class State:
    """What the generation loop asks."""

    def __init__(self) -> None:
        self.dead = False  # a worker is gone
        self.silent = False  # stopping, and the client has not left yet
        self.woken = False  # answers after a wake
        self.garbage = False  # weights were dropped and not loaded again


class Engine:
    family = ""
    version = "0"
    server_name = "uvicorn"

    def __init__(self, prefix: str | None = None) -> None:
        self.prefix = prefix or knobs_module.prefix()
        self.knobs = Knobs(os.path.join(self.prefix, "knobs.json"))
        self.journal = Journal(os.path.join(self.prefix, "journal.jsonl"))
        self.faults = Faults(self.knobs)
        self.state = State()
        self.server = Server(self._serve, lambda: float(self.knobs.keep_alive_s), self.server_name)
        self.routes: dict[tuple[str, str], Route] = {}
        self.children: list[Child] = []
        self.cards = visible(self.knobs.card_state, dict(os.environ))
        # What lies on a GPU without memory of its own lies in RAM, as it does on a machine without one.
        self.in_ram = not self.cards or not own_memory(self.knobs.card_state, self.cards[0])
        self.stopping = False
        self.stop_at: float | None = None
        self.ready_at: float | None = None
        self.leaked = 0
        self._dies_seen: dict[str, Any] | None = None
        self._dies_since = 0.0
        self._numbers = itertools.count(1)
        self._answers = 0
        self._memory_lock = threading.Lock()
        self._own_host, self._own_cards = HostMemory(), CardMemory(self.knobs.card_state)
        self._woken, self._told = os.pipe()

    # --- the life -------------------------------------------------------------------------------------------

    def start(self, argv: list[str], host: str, port: int, served_name: str, plans: Callable[[], list[Plan]]) -> int:
        """From parsed options to the end; returns the exit status."""
        self.knobs.served_name = served_name
        self.journal.write("start", family=self.family, version=self.version, argv=argv, env=dict(os.environ))
        self._handle_signals()
        try:
            listener = self._bind(host, port)
        except OSError as error:
            return self.port_taken(host, port, error)
        status = self._load(plans)
        if status is None:
            listener.listen(512)
            self.server.listeners.append(listener)
            if self.knobs.also_listens:
                self.server.listen(self.knobs.also_listens, 0)
            self.ready_at = time.monotonic()
            self.say_ready()
            self.journal.write("ready", port=port)
            threading.Thread(target=self._flood, daemon=True).start()
            status = self._loop()
        self.server.close()
        self._end_children()
        self.journal.write("end", status=status)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # threads of connections that nobody waits for

    def _bind(self, host: str, port: int) -> Any:
        import socket

        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.knobs.listens_on or host, port))
        return listener

    def _load(self, plans: Callable[[], list[Plan]]) -> int | None:
        """Start the processes and take the memory; None when the engine is up, else its exit status."""
        self.children = spawn(plans(), self.knobs, self.journal)
        for name in range(self.knobs.extra_children):
            self.children += spawn([Plan(f"helper-{name}", outlives=False)], self.knobs, self.journal)
        self.journal.write("loading")
        dies = self.knobs.dies
        ends = time.monotonic() + self.knobs.load_s
        if dies is not None and dies.get("when") == "loading":
            ends = time.monotonic() + float(dies.get("after_s", 0))
        while self.knobs.never_ready or time.monotonic() < ends:
            left = max(0.0, ends - time.monotonic())
            self._select(min(left, 0.05) if not self.knobs.never_ready else 0.05)
            if self.stopping:
                return 1
            if self.state.dead and not self.knobs.front_stays:
                return self.worker_died(loading=True)
        if dies is not None and dies.get("when") == "loading":
            self.die(dies)
            while not self.state.dead:
                self._select(0.05)
            return self.worker_died(loading=True)
        if self.knobs.launch_fails is not None:
            return self.launch_failed(str(self.knobs.launch_fails), None)
        try:
            return self.load()
        except OutOfMemory as full:
            return self.launch_failed("oom", full)
        except ChildGone:
            self.state.dead = True
            return self.worker_died(loading=True)

    def _loop(self) -> int:
        timer = self._death_timer()
        while True:
            if self.stopping:
                status = self.stop_step()
                if status is not None:
                    return 1 if self.knobs.exits_nonzero else status
            if self.state.dead and not self.knobs.front_stays and not self.stopping:
                return self.worker_died(loading=False)
            timer()
            self._select(0.02 if self.stopping or self.knobs.dies else 0.2)

    def _death_timer(self) -> Callable[[], None]:
        done = False

        def look() -> None:
            nonlocal done
            dies = self.knobs.dies
            if dies is None:
                done = False
            elif not done and dies.get("when", "ready") == "ready" and time.monotonic() >= self._dies_at(dies):
                done = True
                self.die(dies)

        return look

    def _dies_at(self, dies: dict[str, Any]) -> float:
        """`after_s` counts from ready, or from the moment at which the knob was turned if that is later."""
        if dies is not self._dies_seen:
            self._dies_seen, self._dies_since = dies, time.monotonic()
        return max(self.ready_at or 0.0, self._dies_since) + float(dies.get("after_s", 0))

    def _select(self, limit_s: float) -> None:
        pidfds = {child.pidfd: child for child in self.children}
        ready, _, _ = select.select([self._woken, *self.server.listeners, *pidfds], [], [], limit_s)
        for found in ready:
            if found is self._woken or found == self._woken:
                os.read(self._woken, 512)
            elif found in pidfds:
                child = pidfds[found]
                self.children.remove(child)
                os.close(child.pidfd)
                self.journal.write("child_ended", process=child.name, child=child.pid)
                if child.worker:
                    self.state.dead = True
            else:
                self.server.accept(found)

    def _handle_signals(self) -> None:
        os.set_blocking(self._told, False)
        signal.set_wakeup_fd(self._told)

        def asked(*_: object) -> None:
            self.journal.write("sigterm")
            if not self.knobs.ignores_sigterm:
                self.stopping = True
                self.stop_at = self.stop_at or time.monotonic()

        signal.signal(signal.SIGTERM, asked)
        signal.signal(signal.SIGINT, asked)

    def _end_children(self) -> None:
        for child in self.children:
            if self.children_outlive_exit(child):
                continue
            child.tell(leave=True)
        for child in list(self.children):
            if not self.children_outlive_exit(child):
                select.select([child.pidfd], [], [], 5.0)

    def die(self, how: dict[str, Any]) -> None:
        """End the front or a worker as the knob `dies` says."""
        if how.get("text"):
            print(how["text"], file=sys.stderr, flush=True)
        self.journal.write("dies", how=how)
        worker = next((child for child in self.children if child.worker), None)
        if how.get("who", "api") == "worker" and worker is not None:
            order = {"signal": how["signal"]} if how.get("signal") else {"exit": int(how.get("status", 1))}
            worker.tell(**order)
        elif how.get("signal"):
            os.kill(os.getpid(), how["signal"])
        else:
            self._end_children()  # an exit of its own takes its children along; a signal does not
            sys.stderr.flush()
            os._exit(int(how.get("status", 1)))

    def _flood(self) -> None:
        flood = self.knobs.flood
        if flood is None:
            return
        line = os.urandom(flood.get("line_bytes", 200)) if flood.get("binary") else b"W" * flood.get("line_bytes", 200)
        left = int(flood["bytes"])
        while left > 0:
            piece = (line + b"\n") * max(1, 65536 // (len(line) + 1)) if not flood.get("one_line") else line
            os.write(2, piece[:left])
            left -= len(piece)
        self.journal.write("flooded", bytes=flood["bytes"])

    # --- what a family says -------------------------------------------------------------------------------

    def load(self) -> int | None:
        """Take the memory of a ready engine; None, or the exit status of a start that failed. Raises: OutOfMemory."""
        raise NotImplementedError

    def say_ready(self) -> None:
        raise NotImplementedError

    def launch_failed(self, why: str, full: OutOfMemory | None) -> int:
        """Say the real engine's words for a failed start; returns the exit status."""
        raise NotImplementedError

    def worker_died(self, *, loading: bool) -> int:
        """Say the real engine's words; returns the exit status."""
        raise NotImplementedError

    def port_taken(self, host: str, port: int, error: OSError) -> int:
        raise NotImplementedError

    def stop_step(self) -> int | None:
        """One look at a stop that was asked for; the exit status once it is done."""
        raise NotImplementedError

    def children_outlive_exit(self, child: Child) -> bool:
        """Whether a child is still there for a moment when the front has gone."""
        return False

    def allowed(self, request: Request) -> bool:
        """Whether the key of the request opens its route."""
        return True

    def refuse(self, request: Request, reply: Reply, status: int) -> None:
        """401, 404, 405 in the family's words."""
        raise NotImplementedError

    # --- routes -------------------------------------------------------------------------------------------

    def _serve(self, request: Request, reply: Reply) -> None:
        number, began = next(self._numbers), time.monotonic()
        loud = request.path not in QUIET
        if loud:
            self.journal.write("call", number=number, **self._described(request))
        fault = self.faults.take(request.method, request.path)
        try:
            if fault is not None:
                self._faulty(fault, request, reply)
            else:
                self.dispatch(request, reply)
        finally:
            if loud:
                seconds = round(time.monotonic() - began, 4)
                self.journal.write("answered", number=number, path=request.path, status=reply.status, seconds=seconds)

    def _described(self, request: Request) -> dict[str, Any]:
        facts: dict[str, Any] = {"method": request.method, "path": request.path, "query": request.query_text}
        facts["key"] = self.key_kind(request)
        facts["body"] = request.body[:4096].decode("utf-8", "replace")
        facts["headers"] = {name: value for name, value in request.headers.items() if name != "authorization"}
        return facts

    def key_kind(self, request: Request) -> str:
        """none, or wrong; families know more."""
        return "none" if request.bearer is None else "wrong"

    def dispatch(self, request: Request, reply: Reply) -> None:
        """Key, route, handler."""
        if self.knobs.checks_keys and not self.allowed(request):
            self.refuse(request, reply, 401)
            return
        absent = self.knobs.absent_routes
        route = self.routes.get((request.method, request.path))
        if route is None and request.method == "HEAD":
            route = None
        if route is not None and request.path not in absent:
            route(request, reply)
            return
        methods = [method for method, path in self.routes if path == request.path and path not in absent]
        if methods:
            reply.extra_headers["allow"] = ", ".join(methods)
        self.refuse(request, reply, 405 if methods else 404)

    def _faulty(self, fault: Fault, request: Request, reply: Reply) -> None:
        then, status = fault.get("then", "answer"), fault.get("status")
        time.sleep(float(fault.get("wait_s", 0)))
        perform = fault.get("perform", then != "hang")
        plain = status is None and then in ("answer", "answer_then_die")
        if perform:
            self.dispatch(request, reply if plain else _Nowhere(request))
        if then == "hang":
            while not reply.left(1.0):
                pass
            reply.close()
            raise ClientLeft
        if then == "close":
            reply.close()
            raise ClientLeft
        if then == "reset":
            reply.reset()
            raise ClientLeft
        if then == "die":
            self.die(
                {"status": int(fault.get("exit", 1)), "signal": fault.get("signal"), "who": fault.get("who", "api")}
            )
            raise ClientLeft
        if status is not None:
            body = fault.get("body", "")
            text = body if isinstance(body, str) else json.dumps(body)
            kind = "text/plain" if isinstance(body, str) else "application/json"
            reply.send(int(status), (text + "x" * int(fault.get("pad_bytes", 0))).encode(), kind)
        if then == "answer_then_die":
            time.sleep(0.02)  # the answer reaches the client first
            self.die(
                {"status": int(fault.get("exit", 1)), "signal": fault.get("signal"), "who": fault.get("who", "api")}
            )

    def count_answer(self) -> None:
        """What the knobs say of an engine that has answered once more."""
        self._answers += 1
        grows = int(self.knobs.answer_bytes)
        if grows:
            self.leaked += grows
            self.hold()
        dies = self.knobs.dies
        if dies is not None and dies.get("when") == "answer" and self._answers >= int(dies.get("after", 1)):
            self.die(dies)

    def hold(self) -> None:
        """Bring every process to what it should hold now."""

    # --- memory of weights and cache, common to the families ------------------------------------------------

    def hold_all(self, weights: int, cache: int, *, host_copy: int = 0, after_s: float = 0.0) -> None:
        """Each worker holds its share: on its card, or in RAM without cards. Raises: OutOfMemory, ChildGone.

        Weights and cache are what all workers hold together; a host copy is scaled by `host_copy_scale`.
        """
        workers = [child for child in self.children if child.worker and child.name in self.memory_names()]
        with self._memory_lock:
            if not workers:
                self._hold_here(weights + cache)
            for rank, worker in enumerate(workers):
                share = (weights + cache) // len(workers)
                host = int(self.knobs.host_bytes + host_copy * self.knobs.host_copy_scale / len(workers))
                order: dict[str, Any] = {"after_s": after_s}
                if self.cards:
                    card = self.cards[rank % len(self.cards)]
                    order["cards"] = {str(card): share + int(self.knobs.card_context_bytes) + self.leaked}
                if self.in_ram:
                    host += int(share * self.knobs.host_scale) + self.leaked
                worker.ask(host=host, **order)

    def _hold_here(self, wanted: int) -> None:
        """The front is the only process, and holds everything. Raises: OutOfMemory."""
        host = int(self.knobs.host_bytes)
        if self.cards:
            self._own_cards.hold(self.cards[0], wanted + int(self.knobs.card_context_bytes) + self.leaked)
        if self.in_ram:
            host += int(wanted * self.knobs.host_scale) + self.leaked
        limit = self.knobs.host_limit_bytes
        self._own_host.resize(host if limit is None else min(host, limit))
        if limit is not None and host > limit:
            os.kill(os.getpid(), signal.SIGKILL)

    def memory_names(self) -> set[str]:
        """Names of the workers that hold weights and cache."""
        return {child.name for child in self.children if child.worker}


class _Nowhere(Reply):
    """An answer that nobody gets: the work is done, its result is lost."""

    def __init__(self, request: Request) -> None:
        self._request, self.status, self.keep = request, None, True
        self.extra_headers, self.bytes_per_write = {}, 0

    def _head(self, status: int, headers: dict[str, str]) -> None:
        return

    def _write(self, data: bytes) -> None:
        return

    def left(self, wait_s: float = 0.0) -> bool:
        time.sleep(wait_s)
        return False

    def close(self) -> None:
        return


def load_model(place: str) -> Model | None:
    """The checkpoint, or None when there is no usable one."""
    try:
        return Model(place)
    except (OSError, ValueError):
        return None


def say(text: str) -> None:
    """One piece of the log, whole."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def stamp() -> str:
    return time.strftime("%m-%d %H:%M:%S")
