"""What a simulated vLLM answers: routes with and without dev mode, park and wake, metrics.

Source: engines 6.3-6.5, 20; real-engines 1.
"""

from __future__ import annotations

import argparse
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from . import asgi
from .dialect import Asked, Dead, Dialect, Generator, Json, Refused
from .engine import Engine, say, stamp
from .http import Reply, Request
from .memory import OutOfMemory
from .options import older
from .processes import ChildGone
from .scheduler import Job, Scheduler
from .text import Model, count_tokens, embedding

GIB = 1 << 30
GUARDED = ("/v1", "/v2", "/inference", "/cohere")
TAGS = ("weights", "kv_cache")


class VllmDialect(Dialect):
    reasoning_field = "reasoning"

    def __init__(self, engine: VllmRoutes) -> None:
        self._engine = engine

    cut_on_last_token = True
    last_delta = {"content": ""}

    def chunk_choice(self, choice: Json, *, final: bool) -> Json:
        first = "role" in choice.get("delta", {})
        more: Json = {"stop_reason": None} if final or "text" in choice else {}
        more |= {} if first else {"token_ids": choice.get("token_ids")}
        if "message" in choice:
            blank = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
            choice["message"] = blank | choice["message"]
            more["routed_experts"] = None
        return choice | more

    def chunk(self, chunk: Json, *, first: bool) -> Json:
        return chunk | ({"prompt_token_ids": None, "prompt_text": None} if first else {})

    def whole(self, body: Json, *, chat: bool) -> Json:
        names = ["service_tier", "kv_transfer_params", "ec_transfer_params"]
        names += ["prompt_logprobs", "prompt_token_ids", "prompt_text"] if chat else []
        return body | dict.fromkeys(names)

    def usage(self, job: Job, *, streamed: bool = False) -> Json:
        usage = super().usage(job)
        engine = self._engine
        if engine.args.enable_prompt_tokens_details or older(engine.version, "0.31.0"):
            details: Json = {"cached_tokens": job.cached_tokens}
            if not older(engine.version, "0.31.0"):
                details |= {"created_cache_tokens": 0} | ({} if streamed else {"multimodal_tokens": None})
            usage["prompt_tokens_details"] = details
        elif not streamed:
            usage["prompt_tokens_details"] = None
        if engine.generator.reasoning_parser is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": job.reasoned}
        elif not streamed:
            usage["completion_tokens_details"] = None
        return usage

    def figures(self, job: Job) -> Json:
        fingerprint = {"system_fingerprint": f"vllm-{self._engine.version}-{self._engine.model.seed.hex()[:8]}"}
        if not self._engine.args.enable_per_request_metrics:
            return fingerprint
        between, first = job.between_tokens_s, job.ttft_s
        decoding = None if job.first_at is None or job.last_at is None else job.last_at - job.first_at
        figures = {
            "time_to_first_token_ms": None if first is None else first * 1000,
            "generation_time_ms": None if decoding is None else decoding * 1000,
            "queue_time_ms": job.queue_s * 1000,
            "mean_itl_ms": None if between is None else between * 1000,
            "tokens_per_second": None if not decoding or first is None else job.produced / (decoding + first),
        }
        return fingerprint | {"metrics": figures}


class VllmRoutes(Engine):
    """The routes; what they rest on is set up by `Vllm`."""

    model: Model
    scheduler: Scheduler
    generator: Generator
    served: list[str]
    keys: list[str]
    middlewares: list[Callable[[Any], Any]]
    context: int
    dev: str
    cache_bytes = 0
    cache_tokens = 0

    def __init__(self, prefix: str | None = None) -> None:
        super().__init__(prefix)
        self.args = argparse.Namespace()
        self.sleeping: set[str] = set()  # tags that sleep
        self.level = 0
        self.scheduler_paused = False
        self.preserved = False
        self._lock = threading.Lock()

    def log(self, text: str, *, core: bool = False, level: str = "INFO") -> None:
        raise NotImplementedError

    def core_pid(self) -> int:
        return next((child.pid for child in self.children if child.name == "VLLM::EngineCore"), 0)

    # --- routes -------------------------------------------------------------------------------------------------

    def add_routes(self) -> None:
        self.routes |= {
            ("GET", "/health"): self._health,
            ("GET", "/load"): self._load_route,
            ("GET", "/version"): lambda _, reply: reply.send_json(200, {"version": self.version.partition("+")[0]}),
            ("GET", "/ping"): self._health,
            ("POST", "/ping"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._completion,
            ("POST", "/v1/responses"): self._unsupported,
            ("POST", "/v1/messages"): self._unsupported,
            ("POST", "/v1/systemone"): self._unsupported,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._tokenize,
            ("POST", "/invocations"): self._chat,
        }
        if self._embeds:
            self.routes[("POST", "/v1/embeddings")] = self._embeddings
        if int(self.dev):
            self.log("SECURITY WARNING: Development endpoints are enabled! This should NOT be used in production!",
                     level="WARNING")  # fmt: skip
            self.routes |= {
                ("GET", "/server_info"): lambda _, reply: reply.send_json(200, {"vllm_config": str(vars(self.args))}),
                ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
                ("POST", "/reset_mm_cache"): lambda _, reply: reply.send(200),
                ("POST", "/reset_encoder_cache"): lambda _, reply: reply.send(200),
                ("POST", "/collective_rpc"): self._collective_rpc,
                ("POST", "/sleep"): self._sleep,
                ("POST", "/wake_up"): self._wake_up,
                ("GET", "/is_sleeping"): self._is_sleeping,
                ("POST", "/pause"): self._pause,
                ("POST", "/resume"): self._pause,
                ("GET", "/is_paused"): lambda _, reply: reply.send_json(200, {"is_paused": self.scheduler_paused}),
                ("POST", "/abort_requests"): self._abort_requests,
            }

    @property
    def _embeds(self) -> bool:
        return "model" in vars(self) and "Embedding" in self.model.architecture

    def dispatch(self, request: Request, reply: Reply) -> None:
        # Middleware is outermost: it sees a request before the engine's own key check.
        if asgi.through(self.middlewares, request, reply, self.args.port):
            super().dispatch(request, reply)

    def allowed(self, request: Request) -> bool:
        if not self.keys or request.method == "OPTIONS" or not request.path.startswith(GUARDED):
            return True
        return request.bearer in self.keys

    def key_kind(self, request: Request) -> str:
        if request.bearer is None:
            return "none"
        named = {os.environ.get("VLLM_API_KEY"): "inference", os.environ.get("CAPYCTL_VLLM_ADMIN_KEY"): "admin"}
        return named.get(request.bearer, "inference" if request.bearer in self.keys else "wrong")

    def refuse(self, request: Request, reply: Reply, status: int) -> None:
        if status == 401:
            reply.send_json(401, {"error": "Unauthorized"})
            return
        reply.send_json(status, {"detail": {404: "Not Found", 405: "Method Not Allowed"}[status]})

    def _error(self, reply: Reply, status: int, message: str, kind: str = "BadRequestError", param: Any = None) -> None:
        reply.send_json(status, {"error": {"message": message, "type": kind, "param": param, "code": status}})

    def _invalid(self, reply: Reply, message: str, where: str | None = None) -> None:
        """What the request's validation refuses."""
        self._error(reply, 400, f"1 validation error:\n  {message}", "Bad Request", where)

    def _health(self, request: Request, reply: Reply) -> None:
        reply.send(503 if self.state.dead and not self.knobs.front_stays else 200)

    def _load_route(self, request: Request, reply: Reply) -> None:
        reply.send_json(200, {"server_load": len(self.scheduler.running)})

    def _models(self, request: Request, reply: Reply) -> None:
        names = [self.knobs.drift.get("served_name", name) for name in self.served]
        cards = [
            {
                "id": name, "object": "model", "created": int(time.time()), "owned_by": "vllm",
                "root": self.args.model, "parent": None, "max_model_len": self.context, "permission": [],
            }
            for name in names
        ]  # fmt: skip
        reply.send_json(200, {"object": "list", "data": cards})

    def _body(self, request: Request, reply: Reply) -> Json | None:
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            self._invalid(reply, "Unsupported Media Type: Only 'application/json' is allowed")
            return None
        try:
            body = request.json()
        except ValueError as error:
            where = f"body.{getattr(error, 'pos', 0)}"
            self._invalid(reply, f"{{'type': 'json_invalid', 'loc': '{where}', 'msg': 'JSON decode error'}}", where)
            return None
        if not isinstance(body, dict):
            self._invalid(reply, "{'type': 'model_attributes_type', 'loc': 'body'}", "body")
            return None
        return body

    def _asked(self, request: Request, reply: Reply, *, chat: bool) -> tuple[Asked, str] | None:
        body = self._body(request, reply)
        if body is None:
            return None
        name = body.get("model") or self.served[0]
        if name not in self.served:
            message = f"The model `{name}` does not exist. Valid aliases: {', '.join(self.served)}."
            self._error(reply, 404, message, "NotFoundError", "model")
            return None
        salt = body.get("cache_salt")
        if salt is not None and (len(salt) > 128 or any(char in salt for char in "@/\\\0")):
            raise Refused(
                400,
                "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL. "
                "(parameter=cache_salt)",
                param="cache_salt",
            )
        asked = Asked(body, chat=chat)
        if asked.tool_choice == "auto" and asked.tools and self.generator.tool_parser is None:
            raise Refused(400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
        if isinstance(body.get("top_logprobs"), int) and body["top_logprobs"] > 20:
            raise Refused(
                400, f"Requested sample logprobs of {body['top_logprobs']}, which is greater than max allowed: 20"
            )
        return asked, str(name)

    def _check_length(self, prompt: int, wanted: int | None) -> None:
        limit = f"This model's maximum context length is {self.context} tokens. However, "
        if wanted is not None and wanted > self.context:
            raise Refused(
                400,
                f"max_tokens={wanted} cannot be greater than max_model_len={self.context}. Please request fewer output "
                f"tokens. (parameter=max_tokens, value={wanted})",
                param="max_tokens",
            )
        if prompt > self.context - 1:
            raise Refused(
                400,
                f"{limit}your prompt contains at least {self.context + 1} input tokens, which exceeds this limit even "
                "without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, "
                f"value={self.context + 1})",
                param="input_tokens",
            )
        if wanted is not None and prompt + wanted > self.context:
            raise Refused(
                400,
                f"{limit}you requested {wanted} output tokens and your prompt contains {prompt} input tokens, for a "
                f"total of {prompt + wanted} tokens. Please reduce the length of the input prompt or the number of "
                "requested output tokens.",
                param="input_tokens",
            )

    def _chat(self, request: Request, reply: Reply) -> None:
        self._generate(request, reply, chat=True, prefix="chatcmpl-")

    def _completion(self, request: Request, reply: Reply) -> None:
        self._generate(request, reply, chat=False, prefix="cmpl-")

    def _generate(self, request: Request, reply: Reply, *, chat: bool, prefix: str) -> None:
        try:
            asked = self._asked(request, reply, chat=chat)
            if asked is None:
                return
            rid = prefix + (request.headers.get("x-request-id") or secrets.token_hex(8))
            self.generator.run(request, reply, asked[0], rid=rid, name=asked[1])
        except Refused as refused:
            self._error(reply, refused.status, refused.message, refused.kind, refused.param)
        except Dead:
            if reply.status is None:
                message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
                self._error(reply, 500, message, "InternalServerError")
            else:
                reply.close()

    def _unsupported(self, request: Request, reply: Reply) -> None:
        if request.path == "/v1/systemone":
            self._error(reply, 501, "The model does not support the structured decision API", "NotImplementedError")
        else:
            self._error(reply, 404, "The model does not support this API", "NotFoundError")

    def _embeddings(self, request: Request, reply: Reply) -> None:
        body = self._body(request, reply)
        if body is None:
            return
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        data = [
            {"index": at, "object": "embedding", "embedding": embedding(self.model.seed, str(text))}
            for at, text in enumerate(texts)
        ]
        tokens = sum(count_tokens(str(text)) for text in texts)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        reply.send_json(200, {"object": "list", "model": self.served[0], "data": data, "usage": usage})

    def _tokenize(self, request: Request, reply: Reply) -> None:
        body = self._body(request, reply)
        if body is not None:
            count = count_tokens(str(body.get("prompt", "")))
            answer = {"count": count, "max_model_len": self.context, "tokens": list(range(count)), "token_strs": None}
            reply.send_json(200, answer if request.path == "/tokenize" else {"prompt": ""})

    def _metrics(self, request: Request, reply: Reply) -> None:
        running, waiting = self.scheduler.counts()
        labels = f'engine="0",model_name="{self.served[0]}"'
        level = {0: "awake", 1: "weights_offloaded", 2: "discard_all"}[self.level if self.sleeping else 0]
        lines = []
        if not self.knobs.gauges_missing:
            lines += [
                "# TYPE vllm:num_requests_running gauge",
                f"vllm:num_requests_running{{{labels}}} {float(running + self.knobs.busy['running'])}",
                "# TYPE vllm:num_requests_waiting gauge",
                f"vllm:num_requests_waiting{{{labels}}} {float(waiting + self.knobs.busy['waiting'])}",
            ]
            lines += [
                f'vllm:num_requests_waiting_by_reason{{{labels},reason="{reason}"}} {float(count)}'
                for reason, count in (("capacity", waiting + self.knobs.busy["waiting"]), ("deferred", 0))
            ]
        used = sum(job.prompt_tokens + job.produced for job in list(self.scheduler.running))
        lines.append(f"vllm:kv_cache_usage_perc{{{labels}}} {min(1.0, used / max(1, self.cache_tokens))}")
        lines += [
            f'vllm:engine_sleep_state{{{labels},sleep_state="{state}"}} {float(state == level)}'
            for state in ("awake", "weights_offloaded", "discard_all")
        ]
        lines += [
            f"vllm:generation_tokens_total{{{labels}}} {float(self.scheduler.generated_tokens)}",
            f"vllm:prompt_tokens_total{{{labels}}} {float(self.scheduler.prompt_tokens)}",
            f'vllm:request_success_total{{{labels},finished_reason="stop"}} {float(self.scheduler.finished)}',
            f"vllm:num_preemptions_total{{{labels}}} 0.0",
        ]
        lines += self.scheduler.ttft.lines("vllm:time_to_first_token_seconds", labels)
        lines += self.scheduler.e2e.lines("vllm:e2e_request_latency_seconds", labels)
        lines += self.scheduler.queued.lines("vllm:request_queue_time_seconds", labels)
        kind = "text/plain; version=0.0.4; charset=utf-8"
        reply.send(200, ("\n".join(lines) + "\n").encode(), kind)

    # --- park and wake --------------------------------------------------------------------------------------------

    @property
    def _words(self) -> bool:
        """Whether sleep and wake say a status; older releases answer with nothing."""
        return not older(self.version, "0.32.0")

    def _sleep(self, request: Request, reply: Reply) -> None:
        level = request.query.get("level", ["1"])[-1]
        mode = request.query.get("mode", ["abort"])[-1]
        if level not in ("0", "1", "2") or mode not in ("abort", "wait", "keep"):
            self._invalid(reply, "{'type': 'less_than_equal', 'loc': 'query.level'}", "query.level")
            return
        try:
            with self._lock:
                self._fall_asleep(int(level), mode)
        except (ChildGone, OutOfMemory):
            self.state.dead = True
            self._error(reply, 500, "EngineCore encountered an issue.", "InternalServerError")
            return
        if self._words:
            reply.send_json(200, {"status": "sleeping", "level": int(level)})
        else:
            reply.send(200)
        if self.knobs.sleep_then_dies:
            self.die({"who": "worker", "signal": 9})

    def _fall_asleep(self, level: int, mode: str) -> None:
        if self.sleeping or self.scheduler_paused:
            self.log("Executor is already sleeping.", level="WARNING", core=True)
            return
        self.scheduler.paused = self.scheduler_paused = True
        if mode == "abort":
            self.scheduler.abort(lambda rid: True)
        while self.scheduler.running and mode != "keep":
            time.sleep(0.002)
        self.scheduler.reset_cache()
        time.sleep(float(self.knobs.sleep_s))
        if level == 0:
            self.level = 0
            return
        self.preserved = bool(getattr(self.args, "sleep_preserve_parameter_names", None))
        self.sleeping, self.level = set(TAGS), level
        if not self.args.enable_sleep_mode:
            self.log("sleep mode is not supported on CPU, ignore it.", level="WARNING", core=True)
            return  # the protocol is served, and nothing is freed
        held = self.model.weight_bytes + self.cache_bytes
        self.leaked += int(self.knobs.sleep_leak_bytes)
        left = held - int(held * float(self.knobs.sleep_frees))
        copy = self.model.weight_bytes if level == 1 else self.model.weight_bytes // 100 * self.preserved
        self.hold_all(left, 0, host_copy=copy, after_s=float(self.knobs.sleep_frees_after_s))
        self.log(f"Sleep mode freed {(held - left) / GIB:.2f} GiB memory, {left / GIB:.2f} GiB memory is still in use.",
                 core=True)  # fmt: skip

    def _wake_up(self, request: Request, reply: Reply) -> None:
        tags = request.query.get("tags")
        self.log(f"wake up the engine with tags: {tags}")
        with self._lock:
            try:
                self._wake(tags)
            except (OutOfMemory, ChildGone) as error:
                self._wake_failed(error, reply)
                return
        if self._words:
            awake = not self.sleeping and not self.scheduler_paused
            reply.send_json(200, {"status": "awake" if awake else "sleeping", "tags": tags})
        else:
            reply.send(200)

    def _wake(self, tags: list[str] | None) -> None:
        if not self.sleeping and not self.scheduler_paused:
            self.log("Executor is not sleeping.", level="WARNING", core=True)
            return
        for tag in tags or []:
            if tag not in self.sleeping and tag != "scheduling":
                self.log(f"Tag {tag} is not in sleeping tags {self.sleeping}", level="WARNING", core=True)
        time.sleep(float(self.knobs.wake_s))
        if self.knobs.wake_fails == "oom":
            raise OutOfMemory(0, self.model.weight_bytes, 0, 24 * GIB)
        before = set(self.sleeping)
        if "weights" in self.sleeping and (tags is None or "weights" in tags) and self.level == 2:
            self.state.garbage = True  # until the weights are loaded again
        self.sleeping -= set(tags) if tags is not None else set(TAGS)
        try:
            if self.args.enable_sleep_mode and before != self.sleeping:
                self.hold()
        except OutOfMemory:
            self.sleeping = before
            raise
        if not self.sleeping:
            self.scheduler.paused = self.scheduler_paused = False
            self.state.woken = True

    def _wake_failed(self, error: Exception, reply: Reply) -> None:
        if isinstance(error, OutOfMemory):
            say(
                "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:139\n"
                f"(EngineCore pid={self.core_pid()}) ERROR {stamp()} [core.py:1204] EngineCore encountered a "
                "fatal error.\n"
                "RuntimeError: CUDA Error: out of memory",
            )
        self._error(reply, 500, "EngineCore encountered an issue.", "InternalServerError")
        self.state.dead = True

    def _is_sleeping(self, request: Request, reply: Reply) -> None:
        reply.send_json(200, {"is_sleeping": bool(self.sleeping) or self.scheduler_paused})

    def _pause(self, request: Request, reply: Reply) -> None:
        self.scheduler.paused = self.scheduler_paused = request.path == "/pause"
        reply.send_json(200, {"status": "paused" if self.scheduler_paused else "resumed"})

    def _collective_rpc(self, request: Request, reply: Reply) -> None:
        try:
            body = request.json()
        except ValueError:
            body = {}
        method = body.get("method") if isinstance(body, dict) else None
        if method is None:
            self._error(reply, 400, "Missing 'method' in request body", "Bad Request")
            return
        if method != "reload_weights":
            self._error(reply, 500, f"Call to collective_rpc method failed: {method}", "InternalServerError")
            return
        if self.args.load_format not in ("auto", "safetensors", "hf"):
            self._error(reply, 500, "Call to collective_rpc method failed: reload", "InternalServerError")
            return
        time.sleep(float(self.knobs.reload_s))
        self.state.garbage = False
        ranks = self.args.tensor_parallel_size * self.args.pipeline_parallel_size
        reply.send_json(200, {"results": [None] * ranks})

    def _reset_prefix_cache(self, request: Request, reply: Reply) -> None:
        done = self.scheduler.reset_cache()
        reply.send_json(200, {"success": done}) if self._words else reply.send(200)

    def _abort_requests(self, request: Request, reply: Reply) -> None:
        try:
            wanted = request.json().get("request_ids", [])
        except ValueError:
            self._error(reply, 400, "Invalid JSON")
            return
        ended = self.scheduler.abort((lambda rid: rid in wanted) if wanted else (lambda rid: True))
        reply.send_json(200, {"status": "aborted", "aborted": ended})
