"""A simulated server of nobody's family, for custom engines: its own options, its own idle signal, no keys.

    server --host 127.0.0.1 --port 8101 --model DIR --name NAME [--api chat|decisions] [anything else]

Health at `/healthz`; idle at `/status` as JSON (`/work/active`, `/work/queued`) and at `/metrics`
(`server_active`, `server_queued`). It answers every failure with 422. Source: engines 10.
"""

from __future__ import annotations

import argparse
import os
import secrets
import time

from .decisions import Malformed, decide
from .dialect import Asked, Dead, Dialect, Generator, Refused
from .engine import Engine, load_model, say
from .http import Reply, Request
from .memory import OutOfMemory
from .processes import Plan
from .scheduler import Job, Scheduler

GIB = 1 << 30


class Other(Engine):
    family = "custom"
    server_name = "server"

    def __init__(self, version: str, prefix: str | None = None) -> None:
        super().__init__(prefix)
        self.version = version

    def main(self, argv: list[str]) -> int:
        parser = argparse.ArgumentParser(prog="server")
        parser.add_argument("--version", action="version", version=self.version)
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", type=int, required=True)
        parser.add_argument("--model", required=True)
        parser.add_argument("--name", default="model")
        parser.add_argument("--api", choices=("chat", "decisions"), default="chat")
        parser.add_argument("--slots", type=int, default=4)
        self.args, _ = parser.parse_known_args(argv)
        model = load_model(self.args.model)
        if model is None:
            say(f"server: cannot read a model in {self.args.model}")
            return 1
        self.model = model
        self.scheduler = Scheduler(self.args.slots)
        self.generator = Generator(Dialect(), self.scheduler, model, self.args.name, self.knobs, self.state)
        self.generator.on_answer = self.count_answer
        self.routes |= {
            ("GET", "/healthz"): lambda _, reply: reply.send(200, b"ok", "text/plain"),
            ("GET", "/status"): self._status,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
        }
        if self.args.api == "chat":
            self.routes[("POST", "/v1/chat/completions")] = lambda request, reply: self._run(request, reply, chat=True)
            self.routes[("POST", "/v1/completions")] = lambda request, reply: self._run(request, reply, chat=False)
        else:
            self.routes[("POST", "/v1/systemone")] = self._decide
        return self.start(argv, self.args.host, self.args.port, self.args.name, self._plans)

    def _plans(self) -> list[Plan]:
        return []

    def load(self) -> int | None:
        self.hold()
        return None

    def hold(self) -> None:
        self.hold_all(self.model.weight_bytes, 0)

    def launch_failed(self, why: str, full: OutOfMemory | None) -> int:
        say({"oom": "server: out of memory"}.get(why, why))
        return 1

    def worker_died(self, *, loading: bool) -> int:
        return 1

    def port_taken(self, host: str, port: int, error: OSError) -> int:
        say(f"server: {error.strerror}: {host}:{port}")
        return 1

    def say_ready(self) -> None:
        say(f"server: pid {os.getpid()} listens on {self.args.host}:{self.args.port}")

    def stop_step(self) -> int | None:
        return 0

    def refuse(self, request: Request, reply: Reply, status: int) -> None:
        reply.send_json(status, {"error": {"message": {404: "no such route", 405: "wrong method"}.get(status, "no")}})

    def _counts(self) -> tuple[int, int]:
        running, waiting = self.scheduler.counts()
        return running + self.knobs.busy["running"], waiting + self.knobs.busy["waiting"]

    def _status(self, request: Request, reply: Reply) -> None:
        running, waiting = self._counts()
        work = {} if self.knobs.gauges_missing else {"active": running, "queued": waiting}
        reply.send_json(200, {"state": "serving", "work": work})

    def _metrics(self, request: Request, reply: Reply) -> None:
        running, waiting = self._counts()
        text = "" if self.knobs.gauges_missing else f"server_active {running}\nserver_queued {waiting}\n"
        reply.send(200, text.encode() or b"\n", "text/plain; version=0.0.4")

    def _models(self, request: Request, reply: Reply) -> None:
        reply.send_json(200, {"object": "list", "data": [{"id": self.args.name, "object": "model"}]})

    def _failed(self, reply: Reply, message: str) -> None:
        reply.send_json(422, {"error": {"message": message, "type": "unprocessable"}})

    def _run(self, request: Request, reply: Reply, *, chat: bool) -> None:
        try:
            asked = Asked(request.json(), chat=chat)
            self.generator.run(request, reply, asked, rid=secrets.token_hex(8), name=self.args.name)
        except (ValueError, AttributeError) as error:
            self._failed(reply, f"cannot be read: {error}")
        except Refused as refused:
            self._failed(reply, refused.message)
        except Dead:
            reply.close()

    def _decide(self, request: Request, reply: Reply) -> None:
        try:
            body = request.json()
            with self.scheduler.place(Job(secrets.token_hex(8), 1), lambda: None):
                time.sleep(self.knobs.prefill_s)
                reply.send_json(200, decide(self.model.seed, body, self.args.name))
            self.count_answer()
        except (ValueError, AttributeError, Malformed) as error:
            self._failed(reply, str(error))
