"""What a simulated SGLang answers: its routes, key levels, park and wake, lagging gauges, loads.

Source: engines 7.4, 7.5, 20.
"""

from __future__ import annotations

import argparse
import secrets
import threading
import time
from datetime import UTC, datetime
from typing import Any

from . import asgi
from .decisions import Malformed, decide
from .dialect import Asked, Dead, Dialect, Generator, Json, Refused
from .engine import Engine, Route
from .http import Reply, Request
from .memory import OutOfMemory
from .options import older
from .processes import ChildGone
from .scheduler import Job, Scheduler
from .text import Model, count_tokens, embedding

GIB = 1 << 30
TAGS = ("kv_cache", "weights")
ADMIN = frozenset({
    "/flush_cache", "/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_disk",
    "/abort_request", "/pause_generation", "/continue_generation", "/configure_logging", "/start_profile",
    "/stop_profile", "/get_weights_by_name", "/update_weight_version", "/weights_checker", "/slow_down",
})  # fmt: skip
OPEN = ("/health", "/ready", "/metrics")
DECODE_STEPS = 40  # between two writings of the gauges while requests run
LOAD_STEPS = 15


class SglangDialect(Dialect):
    first_delta = {"role": "assistant", "content": "", "reasoning_content": None, "tool_calls": None}
    left_streamed_s = 2.0
    left_whole_s = 4.0
    scaled = True

    def __init__(self, engine: SglangRoutes) -> None:
        self._engine = engine

    def chunk_choice(self, choice: Json, *, final: bool) -> Json:
        if "delta" in choice:
            blank = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None}
            choice["delta"] = blank | choice["delta"]
        stopped = final and choice.get("finish_reason") == "stop"
        return choice | {"matched_stop": 151645 if stopped else None}

    def chunk(self, chunk: Json, *, first: bool) -> Json:
        return chunk | {"usage": None}

    def usage(self, job: Job, *, streamed: bool = False) -> Json:
        usage = super().usage(job)
        report = self._engine.args.enable_cache_report
        usage["prompt_tokens_details"] = {"cached_tokens": job.cached_tokens} if report else None
        usage["reasoning_tokens"] = job.reasoned
        if not older(self._engine.version, "0.5.23"):
            usage["completion_tokens_details"] = {"reasoning_tokens": job.reasoned}
        return usage


class SglangRoutes(Engine):
    """The routes; what they rest on is set up by `Sglang`."""

    model: Model
    scheduler: Scheduler
    generator: Generator
    served: str
    context: int
    cache_bytes = 0
    cache_tokens = 0

    def __init__(self, prefix: str | None = None) -> None:
        super().__init__(prefix)
        self.args = argparse.Namespace()
        self.released: set[str] = set()
        self.shown = (0, 0)  # the gauges as they were last written
        self.loads = (0, 0)
        self._lock = threading.Lock()
        self._rids: set[str] = set()
        self.middlewares: list[Any] = []

    def log(self, text: str) -> None:
        raise NotImplementedError

    def scheduler_dies(self, words: str) -> None:
        """The scheduler's failure takes the whole tree down."""
        raise NotImplementedError

    # --- keys and refusals ----------------------------------------------------------------------------------

    def allowed(self, request: Request) -> bool:
        if request.method == "OPTIONS" or request.path.startswith(OPEN):
            return True
        if request.path in ADMIN and self.args.admin_api_key:
            return request.bearer == self.args.admin_api_key
        return not self.args.api_key or request.bearer == self.args.api_key

    def key_kind(self, request: Request) -> str:
        if request.bearer is None:
            return "none"
        return {self.args.api_key: "inference", self.args.admin_api_key: "admin"}.get(request.bearer, "wrong")

    def refuse(self, request: Request, reply: Reply, status: int) -> None:
        words: Json = {401: {"error": "Unauthorized"}, 404: {"detail": "Not Found"}}.get(
            status, {"detail": "Method Not Allowed"}
        )
        reply.send_json(status, words)

    def _error(self, reply: Reply, status: int, message: str, kind: str = "BadRequestError") -> None:
        reply.send_json(status, {"object": "error", "message": message, "type": kind, "param": None, "code": status})

    # --- routes -----------------------------------------------------------------------------------------------

    def add_routes(self) -> None:
        ping = self._ready
        both: dict[str, Route] = {
            "/flush_cache": self._flush,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
            "/configure_logging": lambda _, reply: reply.send(200),
            "/start_profile": lambda _, reply: reply.send(200),
            "/stop_profile": lambda _, reply: reply.send(200),
        }
        self.routes |= {(method, path): route for path, route in both.items() for method in ("GET", "POST")}
        self.routes |= {
            ("GET", "/ready"): ping,
            ("GET", "/ping"): ping,
            ("GET", "/health"): self._health,
            ("GET", "/health_generate"): self._health,
            ("GET", "/model_info"): self._model_info,
            ("GET", "/get_model_info"): self._model_info,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/get_server_info"): self._server_info,
            ("GET", "/v1/models"): self._models,
            ("GET", "/v1/loads"): self._loads,
            ("GET", "/"): lambda _, reply: reply.send(200, b'"SGLang is running"'),
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._completion,
            ("POST", "/v1/embeddings"): self._embeddings,
            ("POST", "/v1/systemone"): self._systemone,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/generate"): self._generate_native,
            ("POST", "/update_weights_from_disk"): self._update,
            ("POST", "/abort_request"): self._abort,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._pause,
        }
        if self.args.enable_metrics:
            self.routes[("GET", "/metrics")] = self._metrics

    def _ready(self, request: Request, reply: Reply) -> None:
        reply.send(503 if self.stopping or self.state.dead else 200)

    def _health(self, request: Request, reply: Reply) -> None:
        """A generation of one token, which a parked engine does not survive."""
        if self.stopping:
            reply.send(503)
            return
        if self._touches_released():
            reply.close()
            return
        if reply.left(1.0 * self.knobs.time_scale):
            reply.close()
            return
        reply.send(503 if self.state.dead else 200)

    def _touches_released(self) -> bool:
        if not self.released:
            return False
        self.scheduler_dies("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
        return True

    def _model_info(self, request: Request, reply: Reply) -> None:
        info = {
            "model_path": self.args.model_path, "served_model_name": self.served,
            "tokenizer_path": self.args.tokenizer_path or self.args.model_path, "is_generation": True,
            "preferred_sampling_params": None, "weight_version": "default", "load_format": self.args.load_format,
            "reasoning_parser": self.args.reasoning_parser, "tool_call_parser": self.args.tool_call_parser,
            "model_type": self.model.config.get("model_type"), "architectures": self.model.config.get("architectures"),
        }  # fmt: skip
        reply.send_json(200, info)

    def _server_info(self, request: Request, reply: Reply) -> None:
        hidden = {"api_key", "admin_api_key"}
        shown = {name: value for name, value in vars(self.args).items() if name not in hidden}
        state = {"memory_usage": {"token_capacity": self.cache_tokens}}
        more = {"version": self.version, "internal_states": [state], "max_total_num_tokens": self.cache_tokens}
        reply.send_json(200, {**{name: value for name, value in shown.items() if _plain(value)}, **more})

    def _models(self, request: Request, reply: Reply) -> None:
        name = self.knobs.drift.get("served_name", self.served)
        card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "sglang", "root": name}
        card |= {"parent": None, "max_model_len": self.knobs.drift.get("max_model_len", self.context)}
        reply.send_json(200, {"object": "list", "data": [card]})

    def dispatch(self, request: Request, reply: Reply) -> None:
        # Middleware that is added before the server starts lies inside the engine's own key check.
        checked = self.allowed(request) or not self.knobs.checks_keys
        if checked and not asgi.through(self.middlewares, request, reply, self.args.port):
            return
        if request.method == "GET" and request.path.startswith("/v1/models/") and self.allowed(request):
            self._models(request, reply)
            return
        super().dispatch(request, reply)

    def _loads(self, request: Request, reply: Reply) -> None:
        running, waiting = self.loads
        used = sum(job.prompt_tokens + job.produced for job in list(self.scheduler.running)) if running else 0
        busy = self.knobs.busy
        load = {
            "dp_rank": 0, "num_running_reqs": running + busy["running"], "num_waiting_reqs": waiting + busy["waiting"],
            "num_used_tokens": used, "max_total_num_tokens": self.cache_tokens,
            "max_running_requests": self.scheduler.running_max, "token_usage": used / max(1, self.cache_tokens),
            "gen_throughput": 0.0, "cache_hit_rate": 0.0, "utilization": 0.0,
        }  # fmt: skip
        now = datetime.now(UTC).isoformat()
        reply.send_json(200, {"timestamp": now, "version": self.version, "loads": [load]})

    def _body(self, request: Request, reply: Reply) -> Json | None:
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            self._error(reply, 400, "Unsupported Media Type: Only 'application/json' is allowed")
            return None
        try:
            body = request.json()
        except ValueError as error:
            self._error(reply, 400, f"JSON decode error: {error}")
            return None
        if not isinstance(body, dict):
            self._error(reply, 400, "Input should be a valid dictionary")
            return None
        return body

    def _chat(self, request: Request, reply: Reply) -> None:
        self._generate(request, reply, chat=True)

    def _completion(self, request: Request, reply: Reply) -> None:
        self._generate(request, reply, chat=False)

    def _generate(self, request: Request, reply: Reply, *, chat: bool) -> None:
        body = self._body(request, reply)
        if body is None:
            return
        rid = str(body.get("rid") or secrets.token_hex(16))
        try:
            asked = Asked(body, chat=chat)
            name = str(body.get("model") or self.served)
            if name.startswith(f"{self.served}:"):
                raise Refused(400, f"LoRA adapter '{name.partition(':')[2]}' was requested, but LoRA is not enabled.")
            time.sleep(self.knobs.registers_s)  # template and tokens are made beside the loop, and nobody knows the id
            with self._lock:
                if rid in self._rids:
                    raise Refused(400, f"Duplicate request ID detected: {rid}")
                self._rids.add(rid)
            try:
                if not self._touches_released():
                    # A batch, or several answers, are requests of ids of their own; the one that was sent names none.
                    prompt = None if chat else body.get("prompt")
                    batch = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
                    inside = secrets.token_hex(16) if batch or asked.choices > 1 else rid
                    self.generator.run(request, reply, asked, rid=inside, name=name)
            finally:
                with self._lock:
                    self._rids.discard(rid)
        except Refused as refused:
            self._error(reply, refused.status, refused.message, refused.kind)
        except Dead:
            reply.close()

    def check_length(self, prompt: int, wanted: int | None) -> None:
        most = min(self.context, self.cache_tokens) - 7
        if prompt > most:
            raise Refused(
                400,
                f"Input length ({prompt} tokens) exceeds the maximum allowed length ({most} tokens). Use a shorter "
                "input or enable --allow-auto-truncate.",
            )
        if prompt + (wanted or 0) > self.context:
            raise Refused(
                400,
                f"Requested token count exceeds the model's maximum context length of {self.context} tokens. You "
                f"requested a total of {prompt + (wanted or 0)} tokens: {prompt} tokens from the input messages and "
                f"{wanted} tokens for the completion. Please reduce the number of tokens in the input messages or the "
                "completion to fit within the limit.",
            )

    def _generate_native(self, request: Request, reply: Reply) -> None:
        body = self._body(request, reply)
        if body is None or self._touches_released():
            return
        wanted = (body.get("sampling_params") or {}).get("max_new_tokens", 8)
        text = str(body.get("text") or body.get("input_ids"))
        from .text import answer

        tokens = answer(self.model.seed, text, int(wanted))
        meta = {"id": secrets.token_hex(16), "prompt_tokens": count_tokens(text), "completion_tokens": len(tokens)}
        ids = [number for number, _ in tokens]
        reply.send_json(200, {"text": "".join(text for _, text in tokens), "output_ids": ids, "meta_info": meta})

    def _embeddings(self, request: Request, reply: Reply) -> None:
        body = self._body(request, reply)
        if body is None:
            return
        if not self.args.is_embedding:
            self._error(reply, 400, "This model does not appear to be an embedding model by default. Please add "
                        "`--is-embedding` when launching the server or try another model.")  # fmt: skip
            return
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        rows = [{"object": "embedding", "index": at, "embedding": embedding(self.model.seed, str(text))}
                for at, text in enumerate(texts)]  # fmt: skip
        tokens = sum(count_tokens(str(text)) for text in texts)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        reply.send_json(200, {"object": "list", "data": rows, "model": self.served, "usage": usage})

    def _systemone(self, request: Request, reply: Reply) -> None:
        body = self._body(request, reply)
        if body is None:
            return
        if older(self.version, "0.5.22"):
            self.refuse(request, reply, 404)
            return
        mass = None if self.model.config.get("decision_head") else 0.93
        job = Job(secrets.token_hex(16), 1)
        try:
            with self.scheduler.place(job, lambda: None):
                time.sleep(self.knobs.prefill_s)
                reply.send_json(200, decide(self.model.seed, body, str(body.get("model") or self.served), mass=mass))
        except Malformed as wrong:
            detail = [{"type": "value_error", "loc": wrong.where, "msg": str(wrong)}]
            reply.send_json(422, {"detail": detail})

    def _tokenize(self, request: Request, reply: Reply) -> None:
        body = self._body(request, reply)
        if body is not None:
            count = count_tokens(str(body.get("prompt", "")))
            answer = {"tokens": list(range(count)), "count": count, "max_model_len": self.context}
            reply.send_json(200, answer)

    # --- gauges -------------------------------------------------------------------------------------------------

    def written(self) -> None:
        """Called at every change: decide whether the scheduler would write its gauges now.

        At a prefill they are written before the new request counts, then every 40 decode steps, and on idle.
        """
        running, waiting = self.scheduler.counts()
        steps = max((job.produced for job in list(self.scheduler.running)), default=0)
        if running == 0 and waiting == 0:
            self.shown = self.loads = (0, 0)
            return
        if steps == 0:
            self.shown = (max(0, running - 1), waiting)
            self.loads = (running, waiting)
        if steps and steps % DECODE_STEPS == 0:
            self.shown = (running, waiting)
        if steps and steps % LOAD_STEPS == 0:
            self.loads = (running, waiting)

    def _metrics(self, request: Request, reply: Reply) -> None:
        labels = f'engine_type="unified",model_name="{self.served}",pp_rank="0",tp_rank="0"'
        running, waiting = self.shown
        lines = []
        if not self.knobs.gauges_missing:
            lines += [
                "# TYPE sglang:num_running_reqs gauge",
                f"sglang:num_running_reqs{{{labels}}} {float(running + self.knobs.busy['running'])}",
                "# TYPE sglang:num_queue_reqs gauge",
                f"sglang:num_queue_reqs{{{labels}}} {float(waiting + self.knobs.busy['waiting'])}",
            ]
        used = sum(job.prompt_tokens + job.produced for job in list(self.scheduler.running)) if running else 0
        lines += [
            f"sglang:token_usage{{{labels}}} {used / max(1, self.cache_tokens)}",
            f"sglang:prompt_tokens_total{{{labels}}} {float(self.scheduler.prompt_tokens)}",
            f"sglang:generation_tokens_total{{{labels}}} {float(self.scheduler.generated_tokens)}",
        ]
        lines += self.scheduler.ttft.lines("sglang:time_to_first_token_seconds", labels)
        lines += self.scheduler.e2e.lines("sglang:e2e_request_latency_seconds", labels)
        lines += self.scheduler.queued.lines("sglang:queue_time_seconds", labels)
        reply.send(200, ("\n".join(lines) + "\n").encode(), "text/plain; version=0.0.4; charset=utf-8")

    # --- park and wake --------------------------------------------------------------------------------------------

    def _idle(self) -> bool:
        return self.scheduler.counts() == (0, 0) and not any(self.knobs.busy.values())

    def _flush(self, request: Request, reply: Reply) -> None:
        try:
            ends = time.monotonic() + float(request.query.get("timeout", ["0"])[-1])
        except ValueError:
            self._error(reply, 400, "timeout: Input should be a valid number")
            return
        while not self._idle() and time.monotonic() < ends:
            time.sleep(0.01)
        if not self._idle() or not self.scheduler.reset_cache():
            reply.send(400, b"Flush cache failed.\n", "text/plain; charset=utf-8")
            return
        words = (
            b"Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, "
            b"the operation will not be performed.)\n"
        )
        reply.send(200, words, "text/plain; charset=utf-8")

    def _tags(self, request: Request, reply: Reply) -> list[str] | None:
        body = self._body(request, reply) if request.body else None
        if body is None:
            if not request.body:
                self._error(reply, 400, "1 validation error: {'type': 'missing', 'loc': ('body',)}")
            return None
        return list(body.get("tags") or TAGS)

    def _release(self, request: Request, reply: Reply) -> None:
        tags = self._tags(request, reply)
        if tags is None:
            return
        if not self._idle():
            self.scheduler_dies("AssertionError: release_memory_occupation should be called only when server is idle.")
            reply.close()
            return
        time.sleep(float(self.knobs.sleep_s))
        with self._lock:
            if self.released & set(tags):
                self.state.garbage = True  # buffers were copied out of memory that was released already
            self.released |= set(tags) & set(TAGS)
            try:
                if self.args.enable_memory_saver:
                    self.leaked += int(self.knobs.sleep_leak_bytes) if "weights" in tags else 0
                    self.hold(after_s=float(self.knobs.sleep_frees_after_s), frees=float(self.knobs.sleep_frees))
            except (ChildGone, OutOfMemory):
                reply.close()
                return
        reply.send(200, b"null")
        if self.knobs.sleep_then_dies:
            self.die({"who": "worker", "signal": 9})

    def _resume(self, request: Request, reply: Reply) -> None:
        tags = self._tags(request, reply)
        if tags is None:
            return
        if set(tags) & set(TAGS) - self.released:
            self.scheduler_dies("AssertionError: a tag was resumed that was not released")
            reply.close()
            return
        time.sleep(float(self.knobs.wake_s))
        with self._lock:
            before = set(self.released)
            self.released -= set(tags)
            try:
                if self.knobs.wake_fails == "oom":
                    raise OutOfMemory(0, self.model.weight_bytes, 0, 24 * GIB)
                if self.args.enable_memory_saver:
                    self.hold()
            except (OutOfMemory, ChildGone):
                self.released = before
                self.scheduler_dies("[torch_memory_saver.cpp] CUresult error: 2 (out of memory) file=csrc/utils.h")
                reply.close()
                return
            if "weights" in tags and self.args.enable_memory_saver and not self.args.enable_weights_cpu_backup:
                self.state.garbage = True  # until they are loaded again
            self.state.woken = self.state.woken or not self.released
        reply.send(200, b"null")

    def hold(self, *, after_s: float = 0.0, frees: float = 1.0) -> None:
        weights, cache = self.model.weight_bytes, self.cache_bytes
        if "weights" in self.released:
            weights -= int(weights * frees)
        if "kv_cache" in self.released:
            cache -= int(cache * frees)
        # The saver keeps its host copy for the engine's whole life, parked or not.
        copy = self.model.weight_bytes if self.args.enable_weights_cpu_backup else 0
        self.hold_all(weights, cache, host_copy=copy, after_s=after_s)

    def _update(self, request: Request, reply: Reply) -> None:
        body = self._body(request, reply)
        if body is None:
            return
        if "weights" in self.released:
            self._touches_released()
            reply.close()
            return
        time.sleep(float(self.knobs.reload_s))
        same = str(body.get("model_path")) == self.args.model_path
        if same:
            self.state.garbage = False
        words = (
            "Succeeded to update model weights." if same else f"Failed to get weights from {body.get('model_path')}."
        )
        answer = {"success": same, "message": words, "num_paused_requests": 0}
        if body.get("flush_cache", True):
            self.scheduler.reset_cache()
        reply.send_json(200 if same else 400, answer)

    def _abort(self, request: Request, reply: Reply) -> None:
        body = self._body(request, reply)
        if body is None:
            return
        rid = str(body.get("rid") or "")
        if body.get("abort_all"):
            self.scheduler.abort(lambda _: True)
        elif self._knows(rid):
            self.scheduler.abort(lambda known: known.startswith(rid))
        reply.send(200)

    def _knows(self, rid: str) -> bool:
        """Whether the front holds exactly this id: only then does the scheduler hear of it, which looks at prefixes."""
        with self._lock:
            return rid in self._rids

    def _pause(self, request: Request, reply: Reply) -> None:
        self.scheduler.paused = request.path == "/pause_generation"
        reply.send_json(200, {"message": "ok", "status": "ok"})


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool, list))
