"""A simulated SGLang: its options, scheduler and detokenizer, its static memory pool, its end.

Source: engines 7, 20; the options of sglang 0.5.23, recorded in `sglang_options.json`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import time
from typing import Any

from .dialect import Generator
from .engine import load_model, say
from .memory import OutOfMemory, room
from .options import Parser, add_options, facts, older
from .processes import Child, Plan
from .scheduler import Scheduler
from .sglang_routes import GIB, SglangDialect, SglangRoutes

SINCE = {"--cuda-graph-max-bs-decode": "0.5.22", "--cuda-graph-max-bs-prefill": "0.5.22", "--attn-dp-size": "0.5.22"}
RUNNING = 48  # the engine's own limit where nothing else says one


def defaults() -> dict[str, Any]:
    """Every field of `ServerArgs` with its default."""
    parser = Parser(flexible=False)
    add_options(parser, facts("sglang"), loose=True)
    return vars(parser.parse_args([]))


class Sglang(SglangRoutes):
    family = "sglang"

    def __init__(self, version: str, prefix: str | None = None) -> None:
        super().__init__(prefix)
        self.version = version

    def make_parser(self, parser: Any) -> Any:
        """`ServerArgs.add_cli_args`."""
        without = self.knobs.unknown_options
        add_options(parser, facts("sglang"), version=self.version, since=SINCE, without=without, loose=True)
        return parser

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """`prepare_server_args`."""
        return self.make_parser(argparse.ArgumentParser(prog="sglang serve")).parse_args(argv)

    def serve(self, args: argparse.Namespace, argv: list[str]) -> int:
        """`launch_server`."""
        self.args = args
        self.log(f"server_args=ServerArgs(model_path={args.model_path!r}, host={args.host!r}, port={args.port}, …)")
        refused = self._refused(args)
        if refused is not None:
            say(f"Traceback (most recent call last):\n{refused}")
            return 1
        model = load_model(args.model_path)
        if model is None:
            say(f"OSError: {args.model_path} does not appear to have a file named config.json.")
            return 1
        self.model = model
        self.served = args.served_model_name or args.model_path
        most = model.context
        wanted = args.context_length or most
        if wanted > most:
            long = (
                f"Warning: User-specified context_length ({wanted}) is greater than the derived context_length "
                f"({most}). This may lead to incorrect model outputs or CUDA errors. Note that the derived "
                "context_length may differ from max_position_embeddings in the model's config."
            )
            allowed = os.environ.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "0").lower() in ("1", "true")
            if not allowed:
                say(
                    f"ValueError: {long} To allow overriding this maximum, set the env var "
                    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
                )
                return 1
            self.log(long)
        self.context = int(wanted)
        self.scheduler = Scheduler(args.max_running_requests or RUNNING)
        self.scheduler.on_change = self.written
        self.generator = Generator(SglangDialect(self), self.scheduler, model, self.served, self.knobs, self.state)
        self.generator.reasoning_parser = args.reasoning_parser or None
        self.generator.tool_parser = args.tool_call_parser or None
        self.generator.check_length = self.check_length
        self.generator.on_answer = self.count_answer
        self.add_routes()
        return self.start(argv, args.host, args.port, self.served, self._plans)

    def _refused(self, args: argparse.Namespace) -> str | None:
        if not older(self.version, "0.5.22") and importlib.util.find_spec("cutlass") is None:
            return "ModuleNotFoundError: No module named 'cutlass'"
        if args.enable_memory_saver and importlib.util.find_spec("torch_memory_saver") is None:
            return "ModuleNotFoundError: No module named 'torch_memory_saver'"
        if (args.tokenizer_worker_num or 1) > 1 and args.api_key:
            return "RuntimeError: a tokenizer worker failed its start: the server has an API key"
        if not 0 < (args.mem_fraction_static or 0.5) < 1:
            return f"AssertionError: mem_fraction_static={args.mem_fraction_static}"
        return None

    def _plans(self) -> list[Plan]:
        ranks = (self.args.tp_size or 1) * (self.args.pp_size or 1)
        names = ["sglang::scheduler"] if ranks == 1 else [f"sglang::scheduler_TP{rank}" for rank in range(ranks)]
        plans = [
            Plan(name, outlives=False, worker=True, segments=("sglang_loads_",) if at == 0 else (), suffix=".shm")
            for at, name in enumerate(names)
        ]
        return [*plans, Plan("sglang::detokenizer", outlives=False, worker=True)]

    def memory_names(self) -> set[str]:
        return {child.name for child in self.children if child.name.startswith("sglang::scheduler")}

    # --- memory ---------------------------------------------------------------------------------------------

    def load(self) -> int | None:
        args, ranks = self.args, len(self.memory_names())
        per_token = self.model.kv_bytes_per_token(args.kv_cache_dtype or "auto")
        fraction = args.mem_fraction_static or 0.85
        weights = self.model.weight_bytes
        self.hold_all(0, 0)  # the context: the base of the fraction is what is free beside it
        base = self._free()
        self.log(f"Load weight begin. avail mem={base / GIB:.2f} GB")
        self.hold_all(weights, 0, host_copy=weights if args.enable_weights_cpu_backup else 0)
        free = self._free()
        self.log(
            f"Load weight end. elapsed={self.knobs.load_s:.2f} s, type={self.model.architecture}, "
            f"dtype=torch.bfloat16, avail mem={free / GIB:.2f} GB, mem usage={(base - free) / GIB:.2f} GB."
        )
        tokens = int(free - base * (1 - fraction)) * ranks // per_token
        if not self.cards and not args.max_total_tokens:
            tokens = min(tokens, self.context * 4)
        if args.max_total_tokens:
            tokens = min(tokens, int(args.max_total_tokens))
        if tokens <= 0:
            say(
                "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
                f"Current value: self.server_args.mem_fraction_static={fraction}"
            )
            return self._scheduler_failed()
        self.cache_tokens, self.cache_bytes = tokens, tokens * per_token
        self.scheduler.running_max = min(args.max_running_requests or RUNNING, max(1, tokens // 2))
        if "linear_attention" in (self.model.config.get("layer_types") or []) and args.max_mamba_cache_size:
            self.scheduler.running_max = min(self.scheduler.running_max, max(1, int(args.max_mamba_cache_size) // 5))
        self.hold()
        half = self.cache_bytes / 2 / GIB
        self.log(f"KV Cache is allocated. #tokens: {tokens}, K size: {half:.2f} GB, V size: {half:.2f} GB")
        self.log(f"Memory pool end. avail mem={self._free() / GIB:.2f} GB")
        self.log(
            f"max_total_num_tokens={tokens}, chunked_prefill_size={args.chunked_prefill_size}, "
            f"max_running_requests={self.scheduler.running_max}, context_len={self.context}, "
            f"available_gpu_mem={self._free() / GIB:.2f} GB"
        )
        return None

    def _free(self) -> int:
        if self.cards:
            return room(self.knobs.card_state, self.cards[0])[0]
        with open("/proc/meminfo", encoding="ascii") as stream:
            return next(int(line.split()[1]) << 10 for line in stream if line.startswith("MemAvailable"))

    def launch_failed(self, why: str, full: OutOfMemory | None) -> int:
        wanted = full.wanted if full else 2 * GIB
        words = {
            "oom": f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted / GIB:.2f} GiB.",
            "kv": "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            "config": "ValueError: The checkpoint you are trying to load has model type `unheard` but "
            "Transformers does not recognize this architecture.",
            "quantization": "ValueError: Unknown quantization method: unheard.",
        }
        say(words.get(why, why))
        return self._scheduler_failed()

    def _scheduler_failed(self) -> int:
        say("Scheduler hit an exception: Traceback (most recent call last): …")
        self._kill_tree()
        return 137

    def worker_died(self, *, loading: bool) -> int:
        if loading:
            return self._scheduler_failed()
        self.log("Subprocess scheduler_0 crashed with exit code 1. Triggering SIGQUIT for cleanup...")
        time.sleep(1.0 * self.knobs.time_scale)
        self._kill_tree()
        return 131

    def scheduler_dies(self, words: str) -> None:
        say(f"Scheduler hit an exception: Traceback (most recent call last):\n{words}")
        self.journal.write("scheduler_dies", words=words)
        next(child for child in self.children if child.worker).tell(exit=1)
        self.state.dead = True

    def _kill_tree(self) -> None:
        for child in self.children:
            child.tell(signal=9)

    def port_taken(self, host: str, port: int, error: OSError) -> int:
        say(
            f"ERROR:    [Errno 98] error while attempting to bind on address ('{host}', {port}): address already in use"
        )
        return 1

    # --- the log, the end -------------------------------------------------------------------------------------

    def log(self, text: str) -> None:
        say(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}")

    def say_ready(self) -> None:
        for line in (f"Started server process [{os.getpid()}]", "Waiting for application startup."):
            say(f"INFO:     {line}")
        say("INFO:     Application startup complete.")
        say(f"INFO:     Uvicorn running on http://{self.args.host}:{self.args.port} (Press CTRL+C to quit)")
        self.log("The server is fired up and ready to roll!")

    def stop_step(self) -> int | None:
        """Looked at every 5 s, and then without limit for requests in flight."""
        since = time.monotonic() - (self.stop_at or 0)
        if since < 5.0 * self.knobs.time_scale / 2:  # on average
            return None
        if self.state.dead:  # the signal reached the whole group
            return 0
        if self.scheduler.running or self.scheduler.waiting:
            return None
        self.log("Gracefully exiting... Remaining number of requests 0. Remaining requests remaining_rids=[].")
        return 0

    def children_outlive_exit(self, child: Child) -> bool:
        return False


def main() -> None:
    """`python -m sglang.launch_server …`."""
    from sglang.version import __version__

    engine = Sglang(__version__)
    sys.exit(engine.serve(engine.parse(sys.argv[1:]), sys.argv[1:]))
