"""`demo`: two models, memory for one, and a request for the second that makes room.

Runs the real thing in a throw-away directory: a standalone role, llama.cpp's server, a small real
model under two names. Nothing is stubbed, and nothing is left behind but what had to be downloaded, which is said.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import attrs
from cyclopts import Parameter

from capyctl import ulid
from capyctl.cli import demo_parts, target
from capyctl.cli.client import Management
from capyctl.cli.demo_parts import Room
from capyctl.cli.demo_screen import Moment, Screen, screen
from capyctl.cli.output import first_line, note, say
from capyctl.documents import places
from capyctl.errors import CapyError, Failure

NAMES: Final = ("ada", "grace")
ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REQUEST_MIB: Final = 512  # stated in the deployments: weights 94 MiB, cache, and the engine's own memory
LIMIT_MIB: Final = 768  # holds one of them
START_LIMIT_S: Final = 60
ANSWER_LIMIT_S: Final = 120
DRAIN_LIMIT_S: Final = 30
LOOK_EVERY_S: Final = 0.15
QUESTIONS: Final = (
    ("ada", "In one sentence: why is the sky blue?"),
    ("grace", "In one sentence: what is a compiler?"),
    ("ada", "Name three colours."),
)


def demo(
    *,
    once: Annotated[bool, Parameter(negative=(), help="End when it has been shown; leave nothing running.")] = False,
) -> int:
    """See it work on this machine: two models share memory that holds one."""
    catch_endings()
    with screen(NAMES) as show:
        environment = demo_parts.engine(show.step)
        model = demo_parts.model(show.step)
        with _role(show, environment, model) as running:
            for name, question in QUESTIONS:
                _ask(running, show, name, question)
            running.look(show)
            show.step("Both models answered; memory never held more than one of them")
            if once:
                show.step(demo_parts.farewell())
            else:
                show.step("The endpoint stays up until you press Ctrl-C")
                show.close()  # what follows is meant for copying
                _stay_up(running)
    return 0


def catch_endings() -> None:
    """Ctrl-C, SIGTERM and a terminal that is closed all clean up; `nohup` keeps its say over the last."""
    for number in ENDINGS:
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)  # even where a script's job ignores SIGINT


def _stay_up(running: Running) -> None:
    try:
        _farewell(running)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        note(demo_parts.farewell())


@attrs.frozen(kw_only=True)
class Running:
    """The demo's role while it runs."""

    api: Management
    endpoint: str  # ip:port
    key: str = attrs.field(repr=False)
    room: Room
    process: subprocess.Popen[bytes]

    def look(self, show: Screen) -> Moment:
        """The role's state now, shown."""
        views = {str(view["name"]): view for view in self.api.deployments()}
        moment = Moment(
            states={name: str(views[name].get("observed_state")) for name in NAMES if name in views},
            charged={
                name: sum(int(row["bytes"]) for row in views[name].get("ledger") or ())
                for name in NAMES
                if name in views
            },
            limit_bytes=LIMIT_MIB << 20,
        )
        show.seen(moment)
        return moment

    def engines(self) -> list[int]:
        """Process ids of engines that run now."""
        return [
            int(instance["pid"])
            for view in self.api.deployments()
            for instance in view.get("instances", ())
            if instance.get("pid")
        ]


@contextmanager
def _role(show: Screen, environment: Path, model: Path) -> Iterator[Running]:
    """A standalone role with both models deployed; ends with every engine stopped and the room removed."""
    room = Room.make()
    try:
        for name in NAMES:
            room.place_model(name, model)
        show.step("Registering the engine")
        _command(room, "engine", "add", str(environment), "--arg", "--threads", "--arg", str(_threads()))
        show.step("Starting CapyCTL on this machine")
        process, endpoint = _start(room)
        try:
            running = _answering(room, process, endpoint)
            try:
                for name in NAMES:
                    show.step(f"Deploying {name}")
                    _deploy(room, running, name)
                _measured(running, show)
                yield running
            finally:
                for number in ENDINGS:
                    signal.signal(number, signal.SIG_IGN)  # a second one must not leave engines behind
                _stop_engines(running)
        finally:
            _end(process)
    finally:
        room.remove()


def _threads() -> int:
    return max(1, min(4, (os.cpu_count() or 2) - 1))


def _command(room: Room, *words: str) -> None:
    """One `capyctl` command in the demo's room. Raises: Failure with its error line."""
    done = subprocess.run(
        [sys.executable, "-m", "capyctl", *words], env=room.environ(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise Failure("operation_failed", f"capyctl {' '.join(words[:2])}: {lines[-1] if lines else done.returncode}")


def _start(room: Room) -> tuple[subprocess.Popen[bytes], str]:
    endpoint = f"127.0.0.1:{demo_parts.free_port()}"
    first, last = demo_parts.free_ports(8)
    words = [
        *("start", "standalone", "--format", "json"),
        *("--listen", endpoint, "--management-listen", "127.0.0.1:0"),
        *("--engine-ports", f"{first}-{last}", "--models-root", str(room.models)),
        *("--set", f"host.resource_policy.memory.system.managed_limit={LIMIT_MIB}MiB"),
        *("--set", "shutdown.drain_timeout=2s"),
    ]
    with room.log.open("wb") as log:
        # Its own session: a Ctrl-C on the terminal is for the demo, which then stops the engines first.
        process = subprocess.Popen(
            [sys.executable, "-m", "capyctl", *words],
            env=room.environ(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return process, endpoint


def _answering(room: Room, process: subprocess.Popen[bytes], endpoint: str) -> Running:
    """The role once its management answers."""
    environ = room.environ()
    began = time.monotonic()
    while time.monotonic() - began < START_LIMIT_S:
        if process.poll() is not None:
            break
        if places.read_line(places.Places(str(room.state)).management_address):
            try:
                api = Management(target.find(None, None, environ, str(room.root)))
                next(api.deployments(), None)
            except CapyError as refusal:
                if refusal.code not in ("unavailable", "unauthorized", "invalid_config"):
                    raise
            else:
                key = places.read_credentials(api.target.places.credentials).api_key
                return Running(api=api, endpoint=endpoint, key=key, room=room, process=process)
        time.sleep(0.05)
    raise Failure("operation_failed", f"the role did not come up: {_last_words(room)}")


def _last_words(room: Room) -> str:
    lines = room.log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:400] if lines else "it said nothing"


def _deploy(room: Room, running: Running, name: str) -> None:
    document = {
        "name": name,
        "engine": "llamacpp",
        "model": name,
        "engine_config": {
            "context_length": 2048,
            "max_concurrent_requests": 2,
            "memory": {"request": f"{REQUEST_MIB}MiB"},
        },
    }
    file = room.root / f"{name}.yaml"
    file.write_text(json.dumps(document))
    _command(room, "deploy", "model", "--file", str(file))


def _measured(running: Running, show: Screen) -> None:
    """Wait until both checkpoints have been read once: nothing starts from files nobody has looked at."""
    show.step("Reading the models once")
    began = time.monotonic()
    while time.monotonic() - began < START_LIMIT_S:
        states = [(view.get("checkpoint") or {}) for view in running.api.deployments()]
        if all(state.get("digest") for state in states):
            running.look(show)
            return
        for state in states:
            if state.get("reason") and not state.get("digest") and state.get("state") not in ("pending", "measuring"):
                raise Failure("checkpoint_unusable", f"the demo's model: {state['reason']}")
        time.sleep(LOOK_EVERY_S)
    raise Failure("operation_failed", "the demo's model was not measured in time")


def _ask(running: Running, show: Screen, name: str, question: str) -> None:
    """One streamed question; the role's state is looked at all the while."""
    show.asked(name, question)
    pieces: queue.SimpleQueue[str] = queue.SimpleQueue()
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(_stream, running, name, question, pieces)
        while not answer.done():
            try:
                show.said(pieces.get(timeout=LOOK_EVERY_S))
            except queue.Empty:
                running.look(show)
        answer.result()
    while not pieces.empty():
        show.said(pieces.get())
    show.answered(time.monotonic() - began)
    running.look(show)


def _stream(running: Running, name: str, question: str, pieces: queue.SimpleQueue[str]) -> None:
    host, _, port = running.endpoint.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=ANSWER_LIMIT_S)
    body: dict[str, Any] = {
        "model": name,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "max_tokens": 48,
        "temperature": 0,
    }
    headers = {"Authorization": f"Bearer {running.key}", "Content-Type": "application/json"}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise Failure("operation_failed", f"{name} answered {answer.status}: {answer.read(2000).decode()}")
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if not data.startswith("{"):
                continue  # empty lines, comments that keep the stream alive, and the end mark
            event = json.loads(data)
            if event.get("error"):
                raise Failure("operation_failed", f"{name}: {first_line(event['error'].get('message'))}")
            for choice in event.get("choices", ()):
                text = choice.get("delta", {}).get("content")
                if text:
                    pieces.put(text)
    except OSError as wrong:
        raise Failure("operation_failed", f"{name} did not answer: {wrong}") from None
    finally:
        connection.close()


def _stop_engines(running: Running) -> None:
    """Drain, so that every engine's end is proven; what is left after that is ended by its process id."""
    if running.process.poll() is not None:
        return
    left: list[int] = []
    try:
        left = running.engines()
        deadline = ulid.instant_ms(ulid.fresh()) + DRAIN_LIMIT_S * 1000
        running.api.request_id = ulid.fresh()
        running.api.change("POST", "/drain", {"deadline_ms": deadline})
        began = time.monotonic()
        while (left := running.engines()) and time.monotonic() - began < DRAIN_LIMIT_S:
            time.sleep(LOOK_EVERY_S)
    except CapyError as refusal:
        note(f"the engines could not be drained: {refusal.message}")
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended in the meantime


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(timeout=DRAIN_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _farewell(running: Running) -> None:
    body = '{"model": "grace", "messages": [{"role": "user", "content": "Say hello."}]}'
    say()
    say(f"  Endpoint   http://{running.endpoint}/v1")
    say(f"  API key    {running.key}")
    say(f"  Models     {', '.join(NAMES)}")
    say()
    say(f"curl http://{running.endpoint}/v1/chat/completions -H 'Authorization: Bearer {running.key}' \\")
    say(f"  -H 'Content-Type: application/json' -d '{body}'")
    say()
    say("Press Ctrl-C to stop the engines and remove everything.")
    sys.stdout.flush()  # a pipe would keep it back until the end
