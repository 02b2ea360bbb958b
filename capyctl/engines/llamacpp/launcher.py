"""llama.cpp's server out of the `xllamacpp` wheel, behind the command line of `llama-server`.

Run by the interpreter of the environment that holds the wheel: `<env>/bin/python -I -S -B launcher.py …`.
`-S` keeps `.pth` hooks from running, so the environment's packages are put on the path by hand. This file
imports nothing of CapyCTL: it must run where CapyCTL is not installed.

The wheel carries the same HTTP server as the binary, but neither its argument parser nor its signal
handling, and some of its defaults differ from the flags'. What is here makes the two alike: flags,
`--version` on standard error, `LLAMA_API_KEY`, exit statuses, and how SIGTERM ends it. A flag that this
file does not know is refused as the binary refuses an unknown one; it is never ignored.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

# Any, here and below: the wheel ships no types.
Params = Any
Setter = Callable[[Params, str], None]


class BadValue(Exception):
    """A value that its flag cannot take; the text says what it takes."""


def add_packages() -> None:
    """Put the environment's packages on the path, without running the hooks that `site` would run."""
    prefix = os.path.dirname(os.path.dirname(os.path.abspath(sys.executable)))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for lib in ("lib", "lib64"):
        packages = os.path.join(prefix, lib, version, "site-packages")
        if os.path.isdir(packages) and packages not in sys.path:
            sys.path.append(packages)


def whole(text: str) -> int:
    try:
        return int(text, 10)
    except ValueError:
        raise BadValue("expected a whole number") from None


def real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadValue("expected a number") from None


def put(path: str, convert: Callable[[str], Any] = str) -> Setter:
    """A setter of a field; dots descend, as in `cpuparams.n_threads`."""
    *parents, name = path.split(".")

    def setter(params: Params, text: str) -> None:
        target = params
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, convert(text))

    return setter


def const(path: str, value: Any) -> Setter:
    """A setter for a flag without a value."""
    return put(path, lambda _: value)


def word(path: str, enum_name: str, prefix: str, **words: str) -> Setter:
    """A setter of an enumeration of the wheel: the flag's word to the member's name."""

    def setter(params: Params, text: str) -> None:
        import xllamacpp

        members: dict[str, Any] = getattr(xllamacpp, enum_name).__members__
        member = members.get(prefix + (words.get(text, "") if words else text.upper()))
        if member is None:
            raise BadValue(f"expected one of {', '.join(words) or 'the known types'}")
        put(path, lambda _: member)(params, text)

    return setter


def gpu_layers(params: Params, text: str) -> None:
    params.n_gpu_layers = {"auto": -1, "all": -2}.get(text) if text in ("auto", "all") else whole(text)


def switch(path: str) -> Setter:
    def setter(params: Params, text: str) -> None:
        if text not in ("on", "off", "enabled", "disabled", "true", "false", "1", "0"):
            raise BadValue("expected on or off")
        put(path, lambda _: text in ("on", "enabled", "true", "1"))(params, text)

    return setter


def ternary(params: Params, text: str) -> None:
    if text not in ("on", "off", "auto"):
        raise BadValue("expected on, off or auto")
    params.enable_reasoning = {"on": 1, "off": 0, "auto": -1}[text]


def alias(params: Params, text: str) -> None:
    params.model_alias = {name.strip() for name in text.split(",") if name.strip()}


def origins(params: Params, text: str) -> None:
    params.cors_origins = text
    params.cors_origins_explicit = True


def template_kwargs(params: Params, text: str) -> None:
    import json

    try:
        pairs = json.loads(text)
        params.default_template_kwargs = {str(key): json.dumps(value) for key, value in pairs.items()}
    except (ValueError, AttributeError):
        raise BadValue("expected a JSON object") from None


def template_file(params: Params, text: str) -> None:
    try:
        with open(text, encoding="utf-8") as stream:
            params.chat_template = stream.read()
    except (OSError, UnicodeDecodeError):
        raise BadValue("the file cannot be read") from None


_FLASH = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO", "1": "ENABLED", "0": "DISABLED"}
_LOAD = {
    "auto": "AUTO",
    "none": "NONE",
    "mmap": "MMAP",
    "mlock": "MLOCK",
    "mmap+mlock": "MMAP_MLOCK",
    "dio": "DIRECT_IO",
}
_REASONING = {"none": "NONE", "auto": "AUTO", "deepseek": "DEEPSEEK", "deepseek-legacy": "DEEPSEEK_LEGACY"}

# Flags with one value, by every spelling of the binary.
VALUED: dict[tuple[str, ...], Setter] = {
    ("--host",): lambda params, text: setattr(params, "hostnames", [text]),
    ("--port",): put("port", whole),
    ("--model", "-m"): put("model.path"),
    ("--mmproj", "-mm"): put("mmproj.path"),
    ("--alias", "-a"): alias,
    ("--ctx-size", "-c"): put("n_ctx", whole),
    ("--parallel", "-np"): put("n_parallel", whole),
    ("--gpu-layers", "--n-gpu-layers", "-ngl"): gpu_layers,
    ("--cache-type-k", "-ctk"): word("cache_type_k", "ggml_type", "GGML_TYPE_"),
    ("--cache-type-v", "-ctv"): word("cache_type_v", "ggml_type", "GGML_TYPE_"),
    ("--fit", "-fit"): switch("fit_params"),
    ("--cache-ram", "-cram"): put("cache_ram_mib", whole),
    ("--cors-origins",): origins,
    ("--threads", "-t"): put("cpuparams.n_threads", whole),
    ("--threads-batch", "-tb"): put("cpuparams_batch.n_threads", whole),
    ("--threads-http",): put("n_threads_http", whole),
    ("--poll",): put("cpuparams.poll", whole),
    ("--poll-batch",): put("cpuparams_batch.poll", whole),
    ("--batch-size", "-b"): put("n_batch", whole),
    ("--ubatch-size", "-ub"): put("n_ubatch", whole),
    ("--keep",): put("n_keep", whole),
    ("--n-predict", "--predict", "-n"): put("n_predict", whole),
    ("--flash-attn", "-fa"): word("flash_attn_type", "llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_", **_FLASH),
    ("--load-mode", "-lm"): word("load_mode", "llama_load_mode", "LLAMA_LOAD_MODE_", **_LOAD),
    ("--reasoning-format",): word(
        "reasoning_format", "common_reasoning_format", "COMMON_REASONING_FORMAT_", **_REASONING
    ),
    ("--reasoning", "-rea"): ternary,
    ("--reasoning-budget",): put("sampling.reasoning_budget_tokens", whole),
    ("--chat-template",): put("chat_template"),
    ("--chat-template-file",): template_file,
    ("--chat-template-kwargs",): template_kwargs,
    ("--cache-reuse",): put("n_cache_reuse", whole),
    ("--ctx-checkpoints", "--swa-checkpoints", "-ctxcp"): put("n_ctx_checkpoints", whole),
    ("--slot-prompt-similarity", "-sps"): put("slot_prompt_similarity", real),
    ("--sse-ping-interval",): put("sse_ping_interval", whole),
    ("--image-min-tokens",): put("image_min_tokens", whole),
    ("--image-max-tokens",): put("image_max_tokens", whole),
    ("--rope-freq-base",): put("rope_freq_base", real),
    ("--rope-freq-scale",): put("rope_freq_scale", real),
    ("--yarn-orig-ctx",): put("yarn_orig_ctx", whole),
    ("--yarn-ext-factor",): put("yarn_ext_factor", real),
    ("--yarn-attn-factor",): put("yarn_attn_factor", real),
    ("--yarn-beta-slow",): put("yarn_beta_slow", real),
    ("--yarn-beta-fast",): put("yarn_beta_fast", real),
    ("--seed", "-s"): put("sampling.seed", lambda text: whole(text) & 0xFFFFFFFF),
    ("--temp", "--temperature"): put("sampling.temp", real),
    ("--top-k",): put("sampling.top_k", whole),
    ("--top-p",): put("sampling.top_p", real),
    ("--min-p",): put("sampling.min_p", real),
    ("--typical", "--typical-p"): put("sampling.typ_p", real),
    ("--repeat-last-n",): put("sampling.penalty_last_n", whole),
    ("--repeat-penalty",): put("sampling.penalty_repeat", real),
    ("--presence-penalty",): put("sampling.penalty_present", real),
    ("--frequency-penalty",): put("sampling.penalty_freq", real),
}

# Flags without a value.
BARE: dict[tuple[str, ...], Setter] = {
    ("--no-kv-unified", "-no-kvu"): const("kv_unified", False),
    ("--no-context-shift",): const("ctx_shift", False),
    ("--metrics",): const("endpoint_metrics", True),
    ("--slots",): const("endpoint_slots", True),
    ("--no-slots",): const("endpoint_slots", False),
    ("--offline",): const("offline", True),
    ("--no-webui", "--no-ui"): const("ui", False),
    ("--no-cors-credentials",): const("cors_credentials", False),
    ("--jinja",): const("use_jinja", True),
    ("--no-jinja",): const("use_jinja", False),
    ("--no-warmup",): const("warmup", False),
    ("--warmup",): const("warmup", True),
    ("--cont-batching", "-cb"): const("cont_batching", True),
    ("--no-cont-batching", "-nocb"): const("cont_batching", False),
    ("--cache-prompt",): const("cache_prompt", True),
    ("--no-cache-prompt",): const("cache_prompt", False),
    ("--prefill-assistant",): const("prefill_assistant", True),
    ("--no-prefill-assistant",): const("prefill_assistant", False),
    ("--swa-full",): const("swa_full", True),
    ("--no-perf",): const("no_perf", True),
    ("--check-tensors",): const("check_tensors", True),
    ("--no-repack",): const("no_extra_bufts", True),
    ("--no-op-offload",): const("no_op_offload", True),
    ("--no-kv-offload", "-nkvo"): const("no_kv_offload", True),
    ("--no-mmproj-offload",): const("mmproj_use_gpu", False),
    ("--ignore-eos",): const("sampling.ignore_eos", True),
    ("--special", "-sp"): const("special", True),
}


def flags(table: dict[tuple[str, ...], Setter]) -> dict[str, Setter]:
    return {name: setter for names, setter in table.items() for name in names}


def fail(message: str) -> NoReturn:
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    raise SystemExit(1)


def with_defaults(params: Params) -> None:
    """Where the wheel's defaults differ from those of the binary."""
    params.hostnames = ["127.0.0.1"]
    params.port = 8080
    params.n_parallel = 4
    params.cors_origins = "localhost"


def parse(params: Params, words: list[str]) -> None:
    """Set what the words say, or end the process as the binary does: status 1 and one line."""
    valued, bare = flags(VALUED), flags(BARE)
    at = 0
    while at < len(words):
        given = words[at]
        name = given.replace("_", "-") if given.startswith("--") else given
        at += 1
        try:
            if name in bare:
                bare[name](params, "")
            elif name in valued:
                if at == len(words):
                    raise BadValue("expected value for argument")
                valued[name](params, words[at])
                at += 1
            else:
                fail(f"error: invalid argument: {given}")
        except (BadValue, OverflowError, TypeError, ValueError) as wrong:
            fail(f'error while handling argument "{given}": {wrong}')


def physical_cores() -> int:
    """Cores, counting the threads that share one once; at least 1."""
    siblings = set()
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", encoding="ascii") as stream:
                siblings.add(stream.read())
        except OSError:
            siblings.add(str(cpu))
    return max(1, len(siblings))


def settle_threads(params: Params) -> None:
    """What the binary's parser does last: as many threads as cores, and batches like the rest."""
    if params.cpuparams.n_threads <= 0:
        params.cpuparams.n_threads = physical_cores()
    if params.cpuparams_batch.n_threads <= 0:
        params.cpuparams_batch.n_threads = params.cpuparams.n_threads


def print_version() -> None:
    """The binary's two lines, on standard error. The build is the wheel's last number: llama.cpp's own."""
    import xllamacpp

    version = str(xllamacpp.__version__)
    build = version.rpartition(".")[2]
    commit = str(xllamacpp._version.get_versions().get("full-revisionid") or "unknown")[:7]
    compiled = xllamacpp.BUILD_INFO
    sys.stderr.write(f"version: {version} (build {build}, commit {commit})\n")
    sys.stderr.write(f"built with {compiled['compiler']} for {compiled['build_target']}\n")


def main(words: list[str]) -> int:
    add_packages()
    try:
        import xllamacpp
    except ImportError as wrong:
        fail(f"error: xllamacpp cannot be imported by {sys.executable}: {wrong}")
    if "--version" in words:
        print_version()
        return 0
    params = xllamacpp.CommonParams()
    with_defaults(params)
    parse(params, words)
    settle_threads(params)
    key = os.environ.get("LLAMA_API_KEY")
    if key:
        params.api_keys = [key]
    try:
        # Until the model is loaded SIGTERM has its default action, as with the binary: this call is one long
        # stay in C++, in which no Python handler could run.
        server = xllamacpp.Server(params)
    except (RuntimeError, ValueError) as wrong:
        fail(f"error: {wrong}")
    if params.endpoint_metrics:
        # It is ready a moment before its queue of tasks runs. Ended in that moment it would wait for its queue for
        # ever, which was told to stop before it began; what is asked here is answered by the queue alone.
        server.handle_metrics()
    wait_for_stop()
    del server  # like the binary, it waits for a client that still has a stream open
    return 0


def wait_for_stop() -> None:
    """Return at the first SIGTERM or SIGINT; a second one ends the process at once.

    The wheel's own threads may be the ones that a signal is delivered to, so the handler's note travels
    through a pipe: it is written by whichever thread ran it.
    """
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    os.read(heard, 1)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
