"""Every fault of an engine and of the role, in every state in which it can strike, looked at from outside.

    python -m tests.integration.parking.faults [--family vllm] [--only TEXT] [--state waking] [--quick]

A role with one simulated card per family; the families side by side, the cells of one after another on the same
deployment. What must have become of the model stands in `fault_rows.py`. What holds of every cell is looked at here:
what the card holds is never more than what the ledger charges; no call that moves memory is made twice; no client
gets a text that is not the model's; a stop leaves no process, no shared memory, no charge.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import attrs
import psutil

from capyctl.host import identity
from tests.engines.installation import Installation, lay_out
from tests.engines.simulated.knobs import DEFAULTS
from tests.integration.acceptance.machine import Answer, gone, until
from tests.nvml import card
from tests.nvml.card import GIB
from tests.ports import neighbours

from .fault_rows import ALL, COPIED, COPIES, CUSTOM, FAULTS, PARKING, QUICK, ROUTES, TENSORFOLD, Expect, Fault, State
from .machine import VERSIONS, ParkMachine

READY, PARKED, WEIGHTS = 6 * GIB, GIB, 2 * GIB
COPIED_WEIGHTS = GIB // 2  # of the engines with a copy: at 1.5 times and with the engine itself it is charged in RAM
PATIENCE = 3.0  # bounds are those of a quiet machine; what comes to pass is not waited for any longer than it takes
YOUNG_S = 50.0  # an engine that ends within a minute of being ready has failed its start
REST = ("ready", "parked", "stopped", "failed")
ENDED = ("succeeded", "failed", "cancelled")
SETTINGS = (
    "host.resource_policy.queue.admission_window=1ms",
    "server.switching.drain_timeout=4s",
    "host.resource_policy.memory.system.parked_limit=5GiB",
)
SOUND = {"card_context_bytes": 128 << 20}  # within what is left beside weights and cache of a small model
LAYING = threading.Lock()  # an installation is compiled where its source lies
ALLOWED = frozenset({"engine.exposed"})  # errors that a role may log here: a person must act on them
PROMPT, STORY = "Say hello.", "Tell a story."


@attrs.define
class Cell:
    """One fault in one state of one family, and what came of it."""

    family: str
    fault: Fault
    state: State
    expect: Expect
    end: str = "?"
    client: int | None = None
    code: str = ""
    after: str = ""
    took_s: float = 0.0
    problems: list[str] = attrs.field(factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems and self.end != "?"

    def row(self) -> tuple[str, ...]:
        client = "-" if self.client is None else "cut" if self.client == 0 else str(self.client)
        verdict = "ok" if self.ok else "NO: " + ("; ".join(self.problems) or "not run")
        took = f"{self.took_s:.1f}"
        return self.family, self.fault.name, self.state.value, self.end, client, self.code, self.after, took, verdict


HEAD = ("family", "fault", "state", "end state", "client", "code", "next", "s", "ok")


def cells(families: Iterable[str], *, quick: bool = False, only: str = "", state: str = "") -> list[Cell]:
    """The matrix, or the part of it that is asked for."""
    return [
        Cell(family, fault, where, expect)
        for family in families
        for fault in FAULTS
        if engine_of(family) in fault.families and only in fault.name
        for where, expect in fault.states.items()
        if state in ("", where.value) and (not quick or family in QUICK.get((fault.name, where), ()))
        if family not in COPIES or where in COPIED.get(fault.name, ())
    ]


def engine_of(family: str) -> str:
    return COPIES.get(family, family)


class Client(threading.Thread):
    """A client of its own: one question, streamed or not; `status` 0 when its answer broke off."""

    def __init__(self, here: ParkMachine, model: str, *, stream: bool = False) -> None:
        super().__init__()
        self._here, self._model, self._stream = here, model, stream
        self.status, self.text, self.body = 0, "", b""
        self.begun = threading.Event()

    def run(self) -> None:
        try:
            if self._stream:
                self._read()
            else:
                self._take(self._here.ask(self._model, prompt=PROMPT, max_tokens=8))
        except (OSError, HTTPException, EOFError, ValueError):
            self.status = 0
        finally:
            self.begun.set()

    def _take(self, answer: Answer) -> None:
        self.status, self.body = answer.status, answer.body
        if answer.status == 200:
            self.text = answer.text

    def _read(self) -> None:
        call = self._here.open(self._model, max_tokens=200, prompt=STORY)
        call.read_until(b'"content"')
        self.begun.set()
        got = call.rest()
        self.status = 200 if b"[DONE]" in got else 0
        for line in got.decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
                self.text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""


@attrs.define(eq=False)
class Bench:
    """One role, one family, one deployment; cells are run on it one after another."""

    here: ParkMachine
    family: str
    made: Installation
    said: str = ""
    story: str = ""
    foreign: int = 0
    cell: Cell | None = None
    _seen: int = 0  # journal lines that belong to earlier cells
    _began: float = 0.0  # of the cell

    @property
    def name(self) -> str:
        return self.family

    # --- the machine --------------------------------------------------------------------------------------

    def view(self) -> dict[str, Any]:
        return self.here.view(self.name)

    def command(self, action: str) -> str:
        """The operation of one management action, not waited for."""
        view = self.view()
        body = {"expected_revision": int(view["revision"]), "action": action, "deadline_ms": _in_ms(60_000)}
        return str(self.here.manage("POST", f"/deployments/{view['id']}/actions", body)["operation_id"])

    def operation(self, identity: str, limit_s: float = 300) -> dict[str, Any]:
        """How it ended. A role that is down meanwhile is waited for."""

        def ended() -> Any:
            found = self.here.manage("GET", f"/operations/{identity}")
            return found if found["state"] in ENDED else None

        return dict(until(ended, limit_s, "the end of an operation"))

    def do(self, action: str) -> None:
        ended = self.operation(self.command(action), 120)
        assert ended["state"] == "succeeded", (action, ended)

    def fresh(self) -> list[dict[str, Any]]:
        """What the engine did in this cell."""
        return self.made.journal()[self._seen :]

    def heard(self, event: str, path: str | None = None) -> bool:
        return any(line["event"] == event and path in (None, line.get("path")) for line in self.fresh())

    def route(self, name: str) -> str:
        return ROUTES[engine_of(self.family)].get(name, name)

    def turn(self, fault: Fault) -> None:
        """Turn the fault's knobs, its routes named as this engine names them."""
        knobs = dict(fault.knobs)
        if "faults" in knobs:
            knobs["faults"] = [{**one, "route": self.route(one["route"])} for one in knobs["faults"]]
        self.made.set(**knobs)

    def heal(self) -> None:
        kept = {"card_state", "absent_routes"}
        self.made.set(**{name: value for name, value in (DEFAULTS | SOUND).items() if name not in kept})
        if self.foreign:
            self.here.cards.drop(0, 0)
            self.foreign = 0

    def processes(self) -> list[psutil.Process]:
        """Engine processes of this installation that live."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.made.prefix) in " ".join(process.cmdline()) and not gone(process):
                    found.append(process)
        return found

    def charged(self) -> int:
        return sum(int(row["bytes"]) for row in self.view()["ledger"] if row["domain"] == "gpu0")

    def ledger(self) -> dict[str, Any]:
        """The whole of it; `epoch` is another one after every change."""
        return dict(self.here.manage("GET", "/snapshot")["ledger"])

    def used(self) -> int:
        return self.here.cards.used(0) - self.foreign

    # --- a cell --------------------------------------------------------------------------------------------

    def run(self, cell: Cell) -> None:
        began = self._began = time.monotonic()
        self.cell, self._seen = cell, len(self.made.journal())
        try:
            with self._watched(cell):
                self._strike(cell)
        except Exception as error:  # the next cell has to run too; this one has failed
            last = traceback.extract_tb(error.__traceback__)[-1]
            cell.problems.append(f"{type(error).__name__} at {last.name}:{last.lineno}: {str(error)[:300]}")
        try:
            self._clean_up(cell)
        except Exception as error:
            cell.problems.append(f"cleaning up: {type(error).__name__}: {str(error)[:300]}")
        cell.took_s = time.monotonic() - began

    def _strike(self, cell: Cell) -> None:
        fault, state, expect = cell.fault, cell.state, cell.expect
        self._reach(fault, state)
        client: Client | None = None
        operation: str | None = None
        if state is State.ANSWERING:
            client = Client(self.here, self.name, stream=True)
            client.start()
            assert client.begun.wait(60)
        self.turn(fault)
        if fault.foreign:
            self.foreign = fault.foreign  # first: who looks meanwhile takes none of it for the engine's
            self.here.cards.hold(0, 0, fault.foreign)
        if state is State.LOADING:
            operation = self.command("start")
        elif state in (State.PARKING, State.STOPPING):
            operation = self.command({State.PARKING: "park", State.STOPPING: "stop"}[state])
        elif state is State.PARKED and fault.kill is None:
            time.sleep(0.5)  # nobody asks a parked engine: the fault is there when the role looks at it
        if client is None and expect.client is not None:
            client = Client(self.here, self.name)
            client.start()
        if fault.kill is not None:
            self._kill(fault.kill, state)
        ended = None if operation is None else self.operation(operation)
        if client is not None:
            client.join(PATIENCE * expect.within_s + 70)
            assert not client.is_alive(), "the client is not answered"
            cell.client = client.status
            self._compare(client)
        self._settle(cell)
        view = self.view()
        error = view["instances"][0]["last_error"]
        cell.code = (error or {}).get("code") or (ended or {}).get("error_code") or _code(client) or ""
        self._judge(cell)
        if state is not State.STOPPING:
            self._next(cell)

    def _reach(self, fault: Fault, state: State) -> None:
        if state is State.LOADING:
            return
        self.do("start")
        if state is State.ANSWERING:
            self.made.set(token_s=0.04, answer_tokens=200)
        if fault.cycles:
            self.turn(fault)
        for _ in range(fault.cycles):
            self.do("park")
            self.do("start")
        if state in (State.PARKED, State.WAKING):
            self.do("park")

    def _kill(self, whom: str, state: State) -> None:
        """SIGKILL (or SIGSTOP) at the moment that the state names."""
        if state is State.LOADING:
            until(lambda: self.heard("loading"), 60, "a load that all of its processes are up for", 0.01)
        elif state in (State.PARKING, State.WAKING):
            route = self.route("@park" if state is State.PARKING else "@wake")
            until(lambda: self.heard("call", route), 60, route, 0.01)
        elif state is State.STOPPING:
            until(lambda: self.heard("sigterm"), 90, "a signal", 0.01)
        if whom == "role":
            self.here.kill()
            self.here.start()
            return
        there = self.processes()
        front = min(there, key=lambda process: process.create_time())
        if whom == "front":
            front.send_signal(signal.SIGKILL)
        elif whom == "worker":
            names = ("VLLM::Engine", "sglang::schedul")
            worker = next(one for one in there if one.name().startswith(names))
            worker.send_signal(signal.SIGKILL)
        elif whom == "stop":
            for process in there:
                process.send_signal(signal.SIGSTOP)

    def _compare(self, client: Client) -> None:
        assert self.cell is not None
        if self.story.startswith(client.text) or client.text == self.said:
            return
        self.cell.problems.append(f"a client got {client.text[:60]!r}")

    def _settle(self, cell: Cell) -> None:
        """Wait for the end that is expected, or for the bound."""
        ends, since, state = time.monotonic() + PATIENCE * cell.expect.within_s, 0.0, ""
        while time.monotonic() < ends:
            view = self.view()
            now = str(view["instances"][0]["observed_state"])
            operation = view["latest_operation"]
            rests = now in REST and now == view["observed_state"]
            rests = rests and (operation is None or operation["state"] in ENDED)
            if now != state or not rests:
                state, since = now, time.monotonic()
            if rests and state in cell.expect.end.split("|") and time.monotonic() - since > 0.3:
                break
            time.sleep(0.05)
        cell.end = state

    def _judge(self, cell: Cell) -> None:
        expect, charged, used = cell.expect, self.charged(), self.used()
        if cell.end not in expect.end.split("|"):
            error = self.view()["instances"][0]["last_error"]
            cell.problems.append(f"ends {cell.end}, not {expect.end} ({error or self.view()['waiting']})"[:300])
        if expect.client is not None and cell.client != expect.client:
            cell.problems.append(f"the client got {cell.client}, not {expect.client}")
        if expect.code is not None and cell.code != expect.code:
            cell.problems.append(f"code {cell.code}, not {expect.code}")
        if cell.end in ("stopped", "failed") and (charged or used):
            cell.problems.append(f"{charged} charged and {used} used of nothing")
        if used > charged and not cell.fault.exceeds:
            cell.problems.append(f"{used} used, {charged} charged")
        cell.problems += repeated(self.fresh(), engine_of(self.family))
        if self.family in COPIES and self.heard("call", self.route("@reload")):
            cell.problems.append("its files were read for a wake")

    def _next(self, cell: Cell) -> None:
        """The next request, the engine being sound again."""
        self.heal()
        if cell.fault.kill == "stop":
            for process in self.processes():
                process.send_signal(signal.SIGCONT)
        answer = self.here.ask(self.name, prompt=PROMPT, max_tokens=8)
        cell.after = str(answer.status)
        if answer.status == 200:
            if answer.text != self.said:
                cell.problems.append(f"the next client got {answer.text[:60]!r}")
        else:
            cell.after += f" {_code_of(answer.body)}"
            if answer.status == 503 and "retry-after" not in answer.headers:
                cell.problems.append("503 without Retry-After")
            self.do("start")
            again = self.here.ask(self.name, prompt=PROMPT, max_tokens=8)
            if again.status != 200 or again.text != self.said:
                cell.problems.append(f"after an operator's start {again.status}")
        wanted = cell.expect.after if cell.end == "failed" else 200
        grown_up = wanted == 503 and time.monotonic() - self._began > YOUNG_S
        late = cell.end == "failed" and answer.status == cell.expect.else_after
        if answer.status != wanted and not late and not (grown_up and answer.status == 200):
            cell.problems.append(f"the next got {answer.status}, not {wanted}")
        cell.problems += [one for one in repeated(self.fresh(), engine_of(self.family)) if one not in cell.problems]

    def _clean_up(self, cell: Cell) -> None:
        self.heal()
        if self.here.role is None or self.here.role.poll() is not None:
            self.here.start()
        state = self.view()["instances"][0]["observed_state"]
        if not (cell.state is State.STOPPING and state == "stopped"):
            self.do("stop")
        left = self.processes()
        if left:
            cell.problems.append(f"left after the stop: {[one.name() for one in left]}")
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        if self.made.segments():
            cell.problems.append(f"shared memory left: {[path.name for path in self.made.segments()]}")
            self.made.sweep()
        if self.used() or self.here.charged():
            cell.problems.append(f"after the stop {self.used()} used, charged {self.here.charged()}")

    @contextlib.contextmanager
    def _watched(self, cell: Cell) -> Iterator[None]:
        """Compare card and ledger again and again: nothing is used that was not charged, nor is a copy forgotten.

        What is used is compared only with a ledger that stood still around the reading.
        """
        over = threading.Event()
        worst = [0, 0, 0]
        uncopied: set[int] = set()

        def look() -> None:
            before = ""
            while not over.wait(0.1):
                try:
                    used, ledger = self.used(), self.ledger()
                except (OSError, HTTPException, ValueError, KeyError, AssertionError):  # the role is down
                    before = ""
                    continue
                charged = {"gpu0": 0, "system": 0}
                for row in ledger["reservations"]:
                    charged[row["domain"]] += int(row["bytes"])
                stood, before = before == ledger["epoch"], ledger["epoch"]
                if stood and used - charged["gpu0"] > worst[0]:
                    worst[:] = [used - charged["gpu0"], used, charged["gpu0"]]
                if stood and charged["gpu0"] and self.family in COPIES and charged["system"] < copy_of(COPIED_WEIGHTS):
                    uncopied.add(charged["system"])

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            if worst[0] and not cell.fault.exceeds:
                cell.problems.append(f"{worst[1]} used while {worst[2]} charged")
            if uncopied:
                cell.problems.append(f"its copy was charged with {sorted(uncopied)}")


def copy_of(weights: int) -> int:
    """What a copy of weights is charged in RAM."""
    return -(-weights * 3 // 2)


def repeated(journal: list[dict[str, Any]], family: str) -> list[str]:
    """Calls that moved memory and were made again although nothing lay between: one line each."""
    routes = {path: name for name, path in ROUTES[family].items() if name in ("@park", "@wake", "@reload")}
    made: dict[int, set[str]] = {}
    found = []
    for line in journal:
        if line["event"] != "call" or line["path"] not in routes:
            continue
        since = made.setdefault(line["launch"], set())
        what = f"{line['path']}?{line['query']}"
        if what in since:
            found.append(f"{what} twice")
        parked = routes[line["path"]] == "@park"
        if parked:
            since.clear()
        else:  # it may be parked again
            since -= {one for one in since if routes[one.partition("?")[0]] == "@park"}
        since.add(what)
    return found


def _in_ms(more: int) -> int:
    return time.time_ns() // 1_000_000 + more


def _code_of(body: bytes) -> str:
    try:
        return str(json.loads(body).get("code", ""))
    except ValueError:
        return ""


def _code(client: Client | None) -> str:
    return "" if client is None or client.status == 200 else _code_of(client.body)


@contextlib.contextmanager
def bench(home: Path, family: str, first_port: int) -> Iterator[Bench]:
    """A running role with one deployment of the family that has answered once, and is stopped."""
    home.mkdir(parents=True)
    card.one_card(home / "cards")
    here = ParkMachine(home=home, environment=Path(sys.prefix), first_port=first_port, settings=SETTINGS)
    engine = engine_of(family)
    try:
        with LAYING:
            made = lay_out(engine, VERSIONS.get(engine, "1.0"), home / f"env-{engine}", cards=here.cards.state)
        if family == CUSTOM:
            _add_custom(here, made)
        else:
            here.ok("engine", "add", str(made.prefix))
        here.start()
        more: dict[str, Any] = {"timeouts": {"initialize": "30s"}, "request_deadline": "60s"}
        if engine in PARKING:
            more["timeouts"]["wake"] = "10s"
        else:
            more["residency"] = "restart_only"
        weights = WEIGHTS
        if family in COPIES:
            weights = COPIED_WEIGHTS
            more |= {"residency": "host_backed", "copy": copy_of(weights)}
        if family == TENSORFOLD:
            more["engine_config"] = {"context_length": 2048}
        here.put(family, engine, weights, READY, parked=PARKED, **more)
        there = Bench(here, family, made)
        there.heal()
        there.do("start")
        there.said = here.ask(family, prompt=PROMPT, max_tokens=8).text
        made.set(answer_tokens=200)
        there.story = here.ask(family, prompt=STORY, max_tokens=200).text
        there.heal()
        there.do("stop")
        yield there
    finally:
        here.roles = 0  # which errors a role may log is judged by `run_family`
        here.drop_everything()


def _add_custom(here: ParkMachine, made: Installation) -> None:
    command = ["--host", "{host}", "--port", "{port}", "--model", "{model}", "--name", "{name}"]
    idle = {"path": "/status", "running": "/work/active", "waiting": "/work/queued"}
    manifest = {"schema_version": 1, "kind": "custom_engine", "api": "chat", "command": command}
    file = here.write("manifest.yaml", json.dumps({**manifest, "health": "/healthz", "idle": idle}))
    here.ok("engine", "add", "--custom", str(made.executable), "--name", CUSTOM, "--manifest", file, "--yes")


def run_family(home: Path, family: str, first_port: int, todo: list[Cell], say: Any = None) -> None:
    """Run the cells of one family; a problem of the whole role is put on the last one."""
    with bench(home, family, first_port) as there:
        for cell in todo:
            there.run(cell)
            if say is not None:
                say(" | ".join(cell.row()))
        shown = there.here.ok("status").out
        if family not in shown:
            todo[-1].problems.append("status does not show the model")
        if there.here.terminate() != 0:
            todo[-1].problems.append("the role did not end with status 0")
        until(lambda: not there.here.ours(), 10, "the end of every process")
        for number in range(1, there.here.roles + 1):
            for line in (home / f"role-{number}.log").read_text().splitlines():
                said = json.loads(line) if line.startswith("{") else {"level": "critical", "message": line}
                if said["level"] in ("error", "critical") and said["message"] not in ALLOWED:
                    todo[-1].problems.append(f"role {number} logged: {line[:300]}")


def run(home: Path, todo: list[Cell], say: Any = None) -> list[Cell]:
    """Run the cells, one role per family, side by side; engines with a copy after the same ones without."""
    identity.become_subreaper()  # what a killed role leaves comes to us
    base = neighbours(10 * len(ALL))
    threads = []
    for number, engine in enumerate(ALL):
        mine = [cell for cell in todo if engine_of(cell.family) == engine]
        if mine:
            threads.append(threading.Thread(target=_run_engine, args=(home, base + 10 * number, mine, say)))
            threads[-1].start()
    for thread in threads:
        thread.join()
    return todo


def _run_engine(home: Path, first_port: int, todo: list[Cell], say: Any) -> None:
    for family in dict.fromkeys(cell.family for cell in todo):
        mine = [cell for cell in todo if cell.family == family]
        try:
            run_family(home / family, family, first_port, mine, say)
        except Exception as error:
            mine[-1].problems.append(f"the role of {family}: {type(error).__name__}: {str(error)[:600]}")
            traceback.print_exc()


def table(done: list[Cell]) -> str:
    rows = [HEAD, *(cell.row() for cell in done)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEAD) - 1)]
    lines = [
        "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    bad = [cell for cell in done if not cell.ok]
    slow = max(done, key=lambda cell: cell.took_s)
    summary = (
        f"{len(done)} cells, {len(done) - len(bad)} ok, {len(bad)} not; slowest {slow.fault.name}: {slow.took_s:.0f} s"
    )
    return "\n".join([*lines, "", summary])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", action="append", choices=(*ALL, *COPIES))
    parser.add_argument("--only", default="")
    parser.add_argument("--state", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", type=Path, help="a directory that keeps the machines")
    args = parser.parse_args()
    todo = cells(args.family or (*ALL, *COPIES), quick=args.quick, only=args.only, state=args.state)
    if not todo:
        parser.error("no such cell")
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        home = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="capyctl-faults-")))
        run(home, todo, say=lambda line: print(line, file=sys.stderr, flush=True))
    print(table(todo))
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if all(cell.ok for cell in todo) else 1


if __name__ == "__main__":
    sys.exit(main())
