"""A simulated vLLM: `vllm serve`, its API server, engine core and workers, its routes with and without dev mode.

Source: engines 6, 20; real-engines 1; the parser and the routes of vllm 0.32.0, recorded in `vllm_options.json`.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from typing import Any

from . import asgi
from .dialect import Generator
from .engine import load_model, say, stamp
from .memory import OutOfMemory, room
from .options import Parser, add_options, facts
from .processes import Child, Plan
from .scheduler import Scheduler
from .vllm_routes import GIB, VllmDialect, VllmRoutes

SINCE = {"--sleep-preserve-parameter-names": "0.31.0", "--logging-config": "0.31.0", "--log-level": "0.31.0"}


class Vllm(VllmRoutes):
    family = "vllm"

    def __init__(self, version: str, prefix: str | None = None) -> None:
        super().__init__(prefix)
        self.version = version

    # --- the command line -----------------------------------------------------------------------------------

    def make_parser(self, parser: Any) -> Any:
        """`make_arg_parser`: the options of `vllm serve`."""
        without = self.knobs.unknown_options
        add_options(parser, facts("vllm"), version=self.version, since=SINCE, without=without, loose=True)
        return parser

    def main(self, argv: list[str]) -> int:
        """`vllm …`."""
        top = Parser(prog="vllm", description="vLLM CLI")
        top.add_argument("-v", "--version", action="version", version=self.version)
        commands = top.add_subparsers(required=False, dest="subparser", parser_class=Parser)
        names = ("chat", "complete", "serve", "launch", "bench", "collect-env")
        names += ("download-kernels", "preload", "run-batch", "snapshot")
        for name in names:
            if name == "serve":
                self.make_parser(commands.add_parser(name, usage="vllm serve [model_tag] [options]"))
            else:
                commands.add_parser(name)
        args = top.parse_args(argv)
        if args.subparser == "serve":
            return self.serve(args, argv)
        top.print_help()
        return 0

    def serve(self, args: argparse.Namespace, argv: list[str]) -> int:
        """What `run_server` does with parsed options."""
        self.args = args
        if getattr(args, "model_tag", None) is not None:
            args.model = args.model_tag
        refused = self._refused_arguments(args)
        if refused is not None:
            say(refused)
            return 1
        self.log(f"vLLM API server version {self.version}")
        self.log(f"non-default args: {{'model_tag': {args.model!r}, 'host': {args.host!r}, 'port': {args.port}}}")
        model = load_model(args.model)
        if model is None:
            say(
                f"OSError: Can't load the configuration of '{args.model}'. If you were trying to load it from "
                "'https://huggingface.co/models', make sure you don't have a local directory with the same name.",
            )
            return 1
        self.model = model
        served = args.served_model_name or [args.model]
        self.served = [served] if isinstance(served, str) else list(served)
        self.context = self._context()
        if self.context is None:
            return 1
        self.dev = os.environ.get("VLLM_SERVER_DEV_MODE", "0")
        if not self.dev.lstrip("-").isdigit():
            say(f"ValueError: invalid literal for int() with base 10: '{self.dev}'")
            return 1
        try:
            self.middlewares = [asgi.load(name) for name in args.middleware or []]
        except (ImportError, AttributeError) as error:
            say(f"{type(error).__name__}: {error}")
            return 1
        self.keys = list(args.api_key or []) or [key for key in [os.environ.get("VLLM_API_KEY")] if key]
        self._set_up()
        return self.start(argv, args.host or "0.0.0.0", args.port, self.served[0], self._plans)

    def _refused_arguments(self, args: argparse.Namespace) -> str | None:
        """What the configuration refuses although the parser takes it."""
        if args.enable_sleep_mode and not self._has_sleep_mode():
            return "  Value error, Sleep mode is not supported on current platform. [type=value_error]"
        if args.enable_per_request_metrics and args.disable_log_stats:
            return "ValueError: --enable-per-request-metrics cannot be used with --disable-log-stats"
        if args.enable_auto_tool_choice and not args.tool_call_parser:
            return "TypeError: Error: --enable-auto-tool-choice requires --tool-call-parser"
        if not 0 < args.gpu_memory_utilization <= 1:
            return f"ValueError: GPU memory utilization must be in (0, 1]. Got {args.gpu_memory_utilization}."
        return None

    def _has_sleep_mode(self) -> bool:
        return bool(self.cards)

    def _context(self) -> int | None:
        wanted, most = self.args.max_model_len, self.model.context
        wanted = self.knobs.drift.get("max_model_len", wanted)
        if wanted in (None, -1):
            return most
        if wanted > most:
            long = (
                f"User-specified max_model_len ({wanted}) is greater than the derived max_model_len "
                f"(max_position_embeddings={float(most)} or model_max_length=None in model's config.json)."
            )
            if os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").lower() in ("1", "true"):
                self.log(f"{long} VLLM_ALLOW_LONG_MAX_MODEL_LEN must be used with extreme caution.")
                return int(wanted)
            say(
                f"  Value error, {long} To allow overriding this maximum, set the env var "
                "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1. VLLM_ALLOW_LONG_MAX_MODEL_LEN must be used with extreme caution. "
                "[type=value_error, input_value=ArgsKwargs((), {'model': '…'}), input_type=ArgsKwargs]",
            )
            return None
        return int(wanted)

    def _set_up(self) -> None:
        self.scheduler = Scheduler(self.args.max_num_seqs or 256)
        self.generator = Generator(
            VllmDialect(self), self.scheduler, self.model, self.served[0], self.knobs, self.state
        )
        self.generator.context = self.context
        self.generator.reasoning_parser = self.args.reasoning_parser or None
        if self.args.enable_auto_tool_choice:
            self.generator.tool_parser = self.args.tool_call_parser
        self.generator.force_usage = bool(self.args.enable_force_include_usage)
        self.generator.check_length = self._check_length
        self.generator.on_answer = self.count_answer
        self.add_routes()

    def _plans(self) -> list[Plan]:
        ranks = self.args.tensor_parallel_size * self.args.pipeline_parallel_size
        ends = 2.0 + (self.args.shutdown_timeout or 0) * 0.1
        workers = tuple(
            Plan(f"VLLM::Worker_TP{rank}", outlives=True, term_s=ends, worker=True) for rank in range(ranks)
        )
        core = Plan(
            "VLLM::EngineCore", outlives=True, term_s=1.0, worker=True, segments=("psm_", "psm_"),
            children=workers if ranks > 1 else (),
        )  # fmt: skip
        return [Plan("resource_tracker", outlives=False), core]

    def memory_names(self) -> set[str]:
        ranked = {child.name for child in self.children if child.name.startswith("VLLM::Worker_TP")}
        return ranked or {"VLLM::EngineCore"}

    # --- memory ---------------------------------------------------------------------------------------------

    def load(self) -> int | None:
        args = self.args
        share = args.gpu_memory_utilization
        for card in self.cards[: args.tensor_parallel_size * args.pipeline_parallel_size]:
            free, total = room(self.knobs.card_state, card)
            free = self.knobs.card_free_bytes if self.knobs.card_free_bytes is not None else free
            if free < share * total:
                say(
                    f"ValueError: Free memory on device cuda:{card} ({free / GIB:.2f}/{total / GIB:.2f} GiB) on "
                    f"startup is less than desired GPU memory utilization ({share}, {share * total / GIB:.2f} GiB). "
                    "Decrease GPU memory utilization or reduce GPU memory used by other processes.",
                )
                return self._core_failed()
        weights = self.model.weight_bytes
        self.log(f"Starting to load model {self.args.model}...", core=True)
        self.hold_all(weights, 0)
        self.log(f"Model loading took {weights / GIB:.2f} GiB memory and {self.knobs.load_s:.6f} seconds", core=True)
        per_token = self.model.kv_bytes_per_token(args.kv_cache_dtype or "auto")
        cache = args.kv_cache_memory_bytes
        ranks = args.tensor_parallel_size * args.pipeline_parallel_size
        if cache is None:
            cache = self._profiled_cache(weights // ranks, per_token)
        self.cache_bytes = int(cache) * ranks
        self.log(f"Available KV cache memory: {cache / GIB:.2f} GiB", core=True)
        block = args.block_size or 16
        tokens = max(0, self.cache_bytes // (block * per_token) - 1) * block  # one block is the pool's own
        if tokens < self.context:
            need = self.context * per_token
            say(
                f"ValueError: To serve at least one request with the models's max seq len ({self.context}), "
                f"({need / GIB:.2f} GiB KV cache is needed, which is larger than the available KV cache memory "
                f"({cache / GIB:.2f} GiB). Based on the available memory, the estimated maximum model length is "
                f"{tokens}. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing "
                "the engine.",
            )
            return self._core_failed()
        self.hold()
        self.log(f"GPU KV cache size: {tokens:,} tokens", core=True)
        self.log(
            f"Maximum concurrency for {self.context:,} tokens per request: {tokens / self.context:.2f}x", core=True
        )
        self.cache_tokens = tokens
        if not args.enforce_eager and self.cards:
            self.log("Graph capturing finished in 1 secs, took 0.21 GiB", core=True)
        return None

    def _profiled_cache(self, weights: int, per_token: int) -> int:
        if not self.cards:
            return int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * GIB
        _, total = room(self.knobs.card_state, self.cards[0])
        return int(total * self.args.gpu_memory_utilization) - weights - int(self.knobs.card_context_bytes)

    def hold(self) -> None:
        weights = 0 if "weights" in self.sleeping else self.model.weight_bytes
        cache = 0 if "kv_cache" in self.sleeping else self.cache_bytes
        copy = self.model.weight_bytes if self.level == 1 and "weights" in self.sleeping else 0
        if self.level and "weights" in self.sleeping and self.preserved:
            copy += self.model.weight_bytes // 100
        self.hold_all(weights, cache, host_copy=copy)

    def launch_failed(self, why: str, full: OutOfMemory | None) -> int:
        wanted = full.wanted if full else 2 * GIB
        free, total = (full.free, full.total) if full else (GIB, 24 * GIB)
        words = {
            "oom": f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted / GIB:.2f} GiB. GPU 0 has a "
            f"total capacity of {total / GIB:.2f} GiB of which {free / GIB:.2f} GiB is free.",
            "kv": "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
            "initializing the engine.",
            "config": "  Value error, The checkpoint you are trying to load has model type `unheard` but Transformers "
            "does not recognize this architecture.",
            "quantization": "ValueError: The quantization method unheard is not supported for the current GPU.",
        }
        say(words.get(why, why))
        return self._core_failed()

    def _core_failed(self) -> int:
        say(
            f"(EngineCore pid={self.core_pid()}) RuntimeError: Engine core initialization failed. See root cause "
            "above. Failed core proc(s): {}",
        )
        return 1

    def worker_died(self, *, loading: bool) -> int:
        if loading:
            return self._core_failed()
        say(
            f"(APIServer pid={os.getpid()}) ERROR {stamp()} [async_llm.py:735] AsyncLLM output_handler failed.\n"
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for "
            "the root cause.",
        )
        return 1

    def port_taken(self, host: str, port: int, error: OSError) -> int:
        say(f"OSError: [Errno 98] Address already in use: ({host}, {port})")
        return 1

    # --- the log ----------------------------------------------------------------------------------------------

    def log(self, text: str, *, core: bool = False, level: str = "INFO") -> None:
        who = f"EngineCore pid={self.core_pid()}" if core else f"APIServer pid={os.getpid()}"
        place = "gpu_worker.py:412" if core else "api_server.py:271"
        say(f"({who}) {level} {stamp()} [{place}] {text}")

    def say_ready(self) -> None:
        self.log(f"Starting vLLM server on http://{self.args.host}:{self.args.port}")
        for line in (f"Started server process [{os.getpid()}]", "Waiting for application startup."):
            say(f"(APIServer pid={os.getpid()}) INFO:     {line}")
        say(f"(APIServer pid={os.getpid()}) INFO:     Application startup complete.")

    # --- the end ----------------------------------------------------------------------------------------------

    def stop_step(self) -> int | None:
        drain = float(self.args.shutdown_timeout or 0)
        running = bool(self.scheduler.running or self.scheduler.waiting)
        since = time.monotonic() - (self.stop_at or 0)
        if not self.state.silent:
            if drain and running and since < drain:
                return None  # mode=drain: answers are finished
            self.log(f"Shutting down: mode={'drain' if drain else 'abort'} timeout={drain:.0f}s")
            self.state.silent = True  # answers stop; their connections stay open until the clients leave
        if running:
            return None
        return 0 if since >= 0.4 * self.knobs.time_scale else None

    def children_outlive_exit(self, child: Child) -> bool:
        """The leader goes first: workers that a SIGTERM reached end a moment later."""
        if self.stopping and child.worker:
            try:
                os.kill(child.pid, signal.SIGTERM)
            except ProcessLookupError:
                return True  # it ended already
            return True
        return False
