"""A simulated TensorFold: one process, kernels built on the first request, figures on the finish chunk.

Source: engines 8; its public documents for routes, fields and metrics.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import threading
import time

from .dialect import Asked, Dead, Dialect, Generator, Json, Refused
from .engine import Engine, load_model, say
from .http import Reply, Request
from .memory import OutOfMemory
from .options import add_options, facts
from .processes import Plan
from .scheduler import Job, Scheduler
from .text import count_tokens

GIB = 1 << 30
SINCE = {"--name-priority": "0.6.6"}
KERNELS = "tensorfold_kernels"


class TensorfoldDialect(Dialect):
    usage_always = True

    def chunk_choice(self, choice: Json, *, final: bool) -> Json:
        return {name: value for name, value in choice.items() if name != "logprobs"}

    def usage(self, job: Job, *, streamed: bool = False) -> Json:
        usage = super().usage(job)
        usage["prompt_tokens_details"] = {"cached_tokens": job.cached_tokens}
        usage["completion_tokens_details"] = {"reasoning_tokens": job.reasoned}
        return usage

    def finish_figures(self, job: Job) -> Json:
        between = job.between_tokens_s
        prefill = job.ttft_s or 0.0
        return {
            "tensorfold": {
                "time_to_first_token": prefill,
                "prefill_seconds": prefill,
                "tokens_per_second": 0.0 if not between else 1 / between,
                "token_sha": secrets.token_hex(8),
            }
        }


class Tensorfold(Engine):
    family = "tensorfold"
    server_name = "BaseHTTP/0.6 Python/3.11.7"

    def __init__(self, version: str, prefix: str | None = None) -> None:
        super().__init__(prefix)
        self.version = version
        self._totals = {"prefill_seconds_total": 0.0, "decode_seconds_total": 0.0, "rounds_total": 0}
        self._built = False
        self._building = threading.Lock()
        self._builder: subprocess.Popen[bytes] | None = None

    def main(self, argv: list[str]) -> int:
        """`tensorfold …`."""
        parser = argparse.ArgumentParser(prog="tensorfold")
        parser.add_argument("--version", action="version", version=f"tensorfold {self.version}")
        commands = parser.add_subparsers(dest="command", required=True)
        serve = commands.add_parser("serve")
        add_options(serve, facts("tensorfold"), version=self.version, since=SINCE, without=self.knobs.unknown_options)
        for name in ("pull", "models", "update", "info"):
            commands.add_parser(name)
        args = parser.parse_args(argv)
        return self.serve(args, argv) if args.command == "serve" else 0

    def serve(self, args: argparse.Namespace, argv: list[str]) -> int:
        self.args = args
        refused = self._refused(args)
        if refused is not None:
            say(f"tensorfold: {refused}")
            return 2
        model = load_model(args.model)
        if model is None:
            say(f"tensorfold: {args.model} is not a model directory: no config.json")
            return 1
        self.model = model
        self.names = [args.name or os.path.basename(args.model.rstrip("/")), *(args.alias or [])]
        self.streams = 1 if args.parallel == "auto" else int(args.parallel)
        self.context = args.context or model.context
        self.scheduler = Scheduler(self.streams)
        self.generator = Generator(TensorfoldDialect(), self.scheduler, model, self.names[0], self.knobs, self.state)
        self.generator.reasoning_parser = "template" if args.thinking else None
        self.generator.tool_parser = "template"
        self.generator.check_length = self._check_length
        self.generator.on_answer = self.count_answer
        self._add_routes()
        return self.start(argv, args.host, args.port, self.names[0], self._plans)

    def _refused(self, args: argparse.Namespace) -> str | None:
        if args.no_drafts and args.drafter not in ("auto", "none"):
            return "--drafter and --no-drafts exclude each other"
        if args.parallel != "auto" and not str(args.parallel).isdigit():
            return f"--parallel takes a number or auto, not {args.parallel!r}"
        if args.tp == 2 and not args.master:
            return "--tp 2 needs --master"
        return None

    def _plans(self) -> list[Plan]:
        return []

    # --- memory ---------------------------------------------------------------------------------------------

    def load(self) -> int | None:
        width = {"bf16": "auto", "int8": "fp8", "int4": "fp8"}[self.args.kv_dtype]
        self.cache_tokens = self.context * self.streams
        self.cache_bytes = self.cache_tokens * self.model.kv_bytes_per_token(width)
        cap = float(os.environ.get("TENSORFOLD_CUDA_MEMORY_LIMIT_GB", "0"))
        needs = (self.model.weight_bytes + self.cache_bytes) / GIB
        if cap and needs > cap:
            say(f"tensorfold: --context {self.context} needs {needs:.2f} GiB and the budget is {cap:.2f} GiB")
            return 1
        say(f"tensorfold {self.version}: loading {self.args.model}")
        self.hold()
        return None

    def hold(self) -> None:
        self.hold_all(self.model.weight_bytes, self.cache_bytes)

    def launch_failed(self, why: str, full: OutOfMemory | None) -> int:
        wanted = full.wanted if full else 2 * GIB
        words = {
            "oom": f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted / GIB:.2f} GiB.",
            "config": f"tensorfold: no family serves {self.args.model}",
            "drafter": "tensorfold: this family has no drafter; pass --no-drafts",
        }
        say(words.get(why, why))
        return 1

    def worker_died(self, *, loading: bool) -> int:
        return 1

    def port_taken(self, host: str, port: int, error: OSError) -> int:
        say("OSError: [Errno 98] Address already in use")
        return 1

    def say_ready(self) -> None:
        say(f"serving {self.names[0]} at http://{self.args.host}:{self.args.port}/v1 (window {self.context})")

    def stop_step(self) -> int | None:
        if self._builder is not None:
            self._builder.kill()
        return 0

    # --- routes -----------------------------------------------------------------------------------------------

    def _add_routes(self) -> None:
        self.routes |= {
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/chat/completions"): lambda request, reply: self._generate(request, reply, chat=True),
            ("POST", "/v1/completions"): lambda request, reply: self._generate(request, reply, chat=False),
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/v1/tokenize"): self._tokenize,
        }

    def refuse(self, request: Request, reply: Reply, status: int) -> None:
        message = {401: "invalid API key", 404: "not found", 405: "method not allowed"}[status]
        self._error(reply, status, message)

    def _error(
        self, reply: Reply, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        reply.send_json(status, {"error": {"message": message, "type": kind, "code": code, "param": param}})

    def _health(self, request: Request, reply: Reply) -> None:
        running, waiting = self.scheduler.counts()
        running += self.knobs.busy["running"]
        body = {
            "ok": True, "backend": "tensorfold", "busy": running > 0, "requests_running": running,
            "requests_total": self.scheduler.finished, "prompt_tokens_total": self.scheduler.prompt_tokens,
            "completion_tokens_total": self.scheduler.generated_tokens, **self._totals,
            "context_length": self.context,
        }  # fmt: skip
        if self.streams > 1:
            body["streams"] = {"decoding": running, "prefilling": waiting, "max": self.streams}
        reply.send_json(200, body)

    def _models(self, request: Request, reply: Reply) -> None:
        names = [self.knobs.drift.get("served_name", name) for name in self.names]
        rows = [
            {"id": name, "object": "model", "created": int(time.time()), "owned_by": "tensorfold"} for name in names
        ]
        reply.send_json(200, {"object": "list", "data": rows})

    def _check_length(self, prompt: int, wanted: int | None) -> None:
        if prompt + (wanted or 1) > self.context:
            raise Refused(
                400,
                f"This server's maximum context length is {self.context} tokens. The prompt has {prompt} and the reply "
                f"may take {wanted or 1}.",
                param="messages",
            )

    def _generate(self, request: Request, reply: Reply, *, chat: bool) -> None:
        try:
            body = request.json()
            body["n"] = body.get("n", 1)
        except (ValueError, TypeError, AttributeError) as error:
            self._error(reply, 400, f"invalid JSON: {error}")
            return
        try:
            if body["n"] != 1:
                raise Refused(400, "n must be 1", param="n")
            asked = Asked(body, chat=chat)
            self._build()
            rid = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
            self.generator.run(request, reply, asked, rid=rid, name=str(body.get("model") or self.names[0]))
        except Refused as refused:
            code = "context_length_exceeded" if refused.param else None
            self._error(reply, refused.status, refused.message, code, refused.param)
        except Dead:
            reply.close()

    def _build(self) -> None:
        """The first request compiles the kernels where `TORCH_EXTENSIONS_DIR` has none, under a lock file.

        A lock that a dead build left is waited for, for ever.
        """
        place = os.environ.get("TORCH_EXTENSIONS_DIR")
        if place is None or self._built:
            return
        with self._building:
            here = os.path.join(place, KERNELS)
            done, lock = os.path.join(here, f"{KERNELS}.so"), os.path.join(here, "lock")
            os.makedirs(here, exist_ok=True)
            while not os.path.exists(done):
                try:
                    os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                except FileExistsError:
                    time.sleep(0.02)
                    continue
                say(f"Building extension module {KERNELS}...")
                seconds = str(float(self.knobs.build_s))
                code = "import sys, time; open('/proc/self/comm', 'w').write('nvcc'); time.sleep(float(sys.argv[1]))"
                self._builder = subprocess.Popen([sys.executable, "-I", "-S", "-c", code, seconds])
                self._builder.wait()
                with open(done, "wb") as stream:
                    stream.write(b"\x7fELF")
                os.unlink(lock)
            self._built = True

    def _tokenize(self, request: Request, reply: Reply) -> None:
        count = count_tokens(str(request.json().get("prompt", "")))
        reply.send_json(200, {"count": count, "max_model_len": self.context, "tokens": list(range(count))})

    def _metrics(self, request: Request, reply: Reply) -> None:
        running, waiting = self.scheduler.counts()
        used = sum(job.prompt_tokens + job.produced for job in list(self.scheduler.running))
        lines = []
        if not self.knobs.gauges_missing:
            for name, value in (("requests", running + self.knobs.busy["running"]), ("num_requests", running)):
                lines.append(f"tensorfold:{name}_running {value}")
            for name in ("requests", "num_requests"):
                lines.append(f"tensorfold:{name}_waiting {waiting + self.knobs.busy['waiting']}")
        lines += [
            f'tensorfold:kv_cache_usage_ratio{{pool="0"}} {used / max(1, self.cache_tokens)}',
            f"tensorfold:prompt_tokens_total {self.scheduler.prompt_tokens}",
            f"tensorfold:generation_tokens_total {self.scheduler.generated_tokens}",
        ]
        lines += self.scheduler.ttft.lines("tensorfold:time_to_first_token_seconds", 'model="0"')
        lines += self.scheduler.e2e.lines("tensorfold:request_latency_seconds", 'model="0"')
        reply.send(200, ("\n".join(lines) + "\n").encode(), "text/plain; version=0.0.4; charset=utf-8")
