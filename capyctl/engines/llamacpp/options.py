"""llama.cpp's options and variables by class, with the reason. The parser takes exact names only.

Every alias and negative form is listed, since an alias that is missing here would be a way around.
Source: engines 9.1, 9.2, 4.3; spellings as the server of builds b11434 and b11549 knows them.
"""

from __future__ import annotations

from capyctl.engines.environment import Reserved
from capyctl.engines.options import OptionClass, OptionPolicy, OptionRule


def _typed(field: str, *names: str) -> OptionRule:
    return OptionRule(names=names, kind=OptionClass.TYPED, why=f"stated by {field}", field=field)


def _owned(why: str, *names: str) -> OptionRule:
    return OptionRule(names=names, kind=OptionClass.RESERVED, why=why)


def _gated(why: str, *names: str, paths: bool = True) -> OptionRule:
    return OptionRule(names=names, kind=OptionClass.APPROVAL, why=why, paths=paths)


def _passed(why: str, *names: str, values: int = 1) -> OptionRule:
    return OptionRule(names=names, kind=OptionClass.EXTRA, why=why, values=values)


_TYPED = (
    _typed("engine_config.context_length", "--ctx-size", "-c"),
    _typed("engine_config.max_concurrent_requests", "--parallel", "-np"),
    _typed("engine_config.llamacpp.n_gpu_layers", "--gpu-layers", "--n-gpu-layers", "-ngl"),
    _typed("engine_config.kv_cache_dtype", "--cache-type-k", "-ctk"),
    _typed("engine_config.kv_cache_dtype", "--cache-type-v", "-ctv"),
    _typed("engine_config.llamacpp.mmproj_file", "--mmproj", "-mm"),
    _typed("model", "--model", "-m"),
    _typed("routes", "--alias", "-a"),
)

_RENDERED = (
    _owned("engines listen on loopback, on a leased port", "--host"),
    _owned("engines listen on loopback, on a leased port", "--port"),
    _owned(
        "each slot has its own share of the context",
        "--kv-unified",
        "--no-kv-unified",
        "--kv-unified-per-slot",
        "-kvu",
        "-no-kvu",
    ),
    _owned("memory follows the ledger, not the engine's own fitting", "--fit", "-fit"),
    _owned("memory follows the ledger, not the engine's own fitting", "--fit-target", "-fitt"),
    _owned("memory follows the ledger, not the engine's own fitting", "--fit-ctx", "-fitc"),
    _owned("memory follows the ledger, not the engine's own fitting", "--fit-print", "-fitp"),
    _owned("a prompt cache outside the ledger's account; each slot keeps its last prompt", "--cache-ram", "-cram"),
    _owned("an answer must not lose its beginning silently", "--context-shift", "--no-context-shift"),
    _owned("idle and load are read there", "--metrics"),
    _owned("idle and load are read there", "--slots", "--no-slots"),
    _owned("the engine fetches nothing", "--offline"),
    _owned("the engine serves the router alone", "--webui", "--no-webui", "--ui", "--no-ui"),
    _owned("the engine serves the router alone", "--webui-config", "--ui-config"),
    _owned("the engine serves the router alone", "--webui-config-file", "--ui-config-file"),
    _owned("the engine serves the router alone", "--cors-origins"),
    _owned("the engine serves the router alone", "--cors-methods"),
    _owned("the engine serves the router alone", "--cors-headers"),
    _owned("the engine serves the router alone", "--cors-credentials", "--no-cors-credentials"),
)

_NEVER = (
    _owned("CapyCTL gives each launch a key of its own", "--api-key"),
    _owned("CapyCTL gives each launch a key of its own", "--api-key-file"),
    _owned("CapyCTL decides what sleeps", "--sleep-idle-seconds"),
    _owned("one engine serves one model", "--models-dir"),
    _owned("one engine serves one model", "--models-preset"),
    _owned("one engine serves one model", "--models-max"),
    _owned("one engine serves one model", "--models-autoload", "--no-models-autoload"),
    _owned("memory on other machines is outside the ledger", "--rpc"),
    _owned("prompts stay out of files", "--slot-save-path"),
    _owned("a prompt cache outside the ledger's account", "--cache-idle-slots", "--no-cache-idle-slots"),
    _owned("running settings stay as they were rendered", "--props"),
    _owned("the port is this launch's alone", "--reuse-port"),
    _owned("the engine serves the router alone", "--path"),
    _owned("the engine serves the router alone", "--api-prefix", "--server-base"),
    _owned("the loopback leg is not encrypted", "--ssl-key-file"),
    _owned("the loopback leg is not encrypted", "--ssl-cert-file"),
    _owned("the log writer owns the log", "--log-file"),
    _owned("the log writer owns the log", "--log-disable"),
    _owned("the log writer owns the log", "--log-jsonl", "--no-log-jsonl"),
    _owned("the log writer owns the log", "--log-colors"),
    _owned("the log writer owns the log", "--log-prefix", "--no-log-prefix"),
    _owned("the log writer owns the log", "--log-timestamps", "--no-log-timestamps"),
    _owned("prompts stay out of files", "--log-prompts-dir"),
    _owned(
        "prompts stay out of the log",
        "--log-verbosity",
        "--verbosity",
        "--log-verbose",
        "--verbose",
        "-lv",
        "-v",
    ),
    _owned("prompts stay out of the log", "--verbose-prompt"),
    _owned("the model is the measured directory", "--hf-repo", "-hf", "-hfr"),
    _owned("the model is the measured directory", "--hf-file", "-hff"),
    _owned("the model is the measured directory", "--hf-token", "-hft"),
    _owned("the model is the measured directory", "--model-url", "-mu"),
    _owned("the model is the measured directory", "--docker-repo", "-dr"),
    _owned("the model is the measured directory", "--mmproj-url", "-mmu"),
    _owned("the model is the measured directory", "--mmproj-auto", "--no-mmproj-auto", "--no-mmproj"),
    _owned("the model is the measured directory", "--spec-draft-hf", "--hf-repo-draft", "-hfrd", "-hfd"),
    *(
        _owned("a preset fetches a model of its own", name)
        for name in (
            "--embd-gemma-default",
            "--fim-qwen-3b-default",
            "--fim-qwen-7b-default",
            "--fim-qwen-7b-spec",
            "--fim-qwen-14b-spec",
            "--fim-qwen-30b-default",
            "--gpt-oss-20b-default",
            "--gpt-oss-120b-default",
            "--vision-gemma-4b-default",
            "--vision-gemma-12b-default",
            "--spec-default",
        )
    ),
    _owned("an engine runs no tools", "--tools"),
    _owned("an engine runs no tools", "--tools-runtime"),
    _owned("an engine runs no tools", "--agent", "--no-agent"),
    _owned("an engine runs no tools", "--mcp-servers-config"),
    _owned("an engine runs no tools", "--mcp-servers-json"),
    _owned(
        "an engine runs no tools", "--ui-mcp-proxy", "--no-ui-mcp-proxy", "--webui-mcp-proxy", "--no-webui-mcp-proxy"
    ),
    _owned("devices follow the ledger's claims", "--device", "-dev"),
    _owned("devices follow the ledger's claims", "--split-mode", "-sm"),
    _owned("devices follow the ledger's claims", "--tensor-split", "-ts"),
    _owned("devices follow the ledger's claims", "--main-gpu", "-mg"),
    _owned("devices follow the ledger's claims", "--spec-draft-device", "--device-draft", "-devd"),
    _owned("devices follow the ledger's claims", "--mmproj-device", "-mmdev"),
    _owned("the deployment's api decides what is served", "--embedding", "--embeddings"),
    _owned("the deployment's api decides what is served", "--rerank", "--reranking"),
    _owned("the deployment's api decides what is served", "--pooling"),
    *(
        _owned("the engine would print and end", name)
        for name in ("--version", "--list-devices", "-ld", "--cache-list", "-cl", "--completion-bash")
    ),
    _owned("the engine would print and end", "--help", "-h", "--usage"),
)

_GATED = (
    _gated("it loads other weights", "--model-draft", "--spec-draft-model", "-md"),
    _gated("it loads other weights", "--lora"),
    _gated("it loads other weights", "--lora-scaled"),
    _gated("it loads other weights", "--control-vector"),
    _gated("it loads other weights", "--control-vector-scaled"),
    _gated("it reads a file of the host", "--chat-template-file"),
    _gated("it reads a file of the host", "--grammar-file"),
    _gated("it reads a file of the host", "--json-schema-file", "-jf"),
    _gated("it reads a file of the host", "--lookup-cache-static", "-lcs"),
    _gated("it writes a file of the host", "--lookup-cache-dynamic", "-lcd"),
    _gated("requests could read files of the host", "--media-path"),
    _gated("it runs programs of the host", "--video-ffmpeg-dir"),
    _gated("it reads a file of the host", "--tts-speaker-file"),
)

# Extra options with several spellings: listed so that a repetition is seen under either name.
_EXTRA = (
    _passed("threads are the deployment's own choice", "--threads", "-t"),
    _passed("threads are the deployment's own choice", "--threads-batch", "-tb"),
    _passed("threads are the deployment's own choice", "--threads-http"),
    _passed("speed against memory", "--batch-size", "-b"),
    _passed("speed against memory", "--ubatch-size", "-ub"),
    _passed("attention kernels", "--flash-attn", "-fa"),
    _passed("how weights are read; mlock needs declared memory", "--load-mode", "-lm"),
    _passed("where weights lie; needs declared memory", "--override-tensor", "-ot"),
    _passed("where weights lie; needs declared memory", "--cpu-moe", "-cmoe"),
    _passed("where weights lie; needs declared memory", "--n-cpu-moe", "-ncmoe"),
    _passed("where weights lie; needs declared memory", "--n-cpu-ffn", "-ncffn"),
    _passed("where the cache lies; needs declared memory", "--kv-offload", "--no-kv-offload", "-kvo", "-nkvo"),
    _passed("speculative decoding; draft kinds need declared memory", "--spec-type"),
    _passed("how answers are shaped", "--reasoning-format"),
    _passed("how answers are shaped", "--reasoning", "-rea"),
    _passed("how answers are shaped", "--reasoning-budget"),
    _passed("how answers are shaped", "--chat-template"),
    _passed("how answers are shaped", "--chat-template-kwargs"),
    _passed("how answers are shaped", "--jinja", "--no-jinja"),
    _passed("how answers are shaped", "--prefill-assistant", "--no-prefill-assistant"),
    _passed("reuse of prompts within a slot", "--cache-reuse"),
    _passed("reuse of prompts within a slot", "--cache-prompt", "--no-cache-prompt"),
    _passed("a default that requests may override", "--temp", "--temperature"),
    _passed("a default that requests may override", "--n-predict", "--predict", "-n"),
    _passed("a default that requests may override", "--seed", "-s"),
    _passed("where the warm-up run is done", "--warmup", "--no-warmup"),
    _passed("the layers that a control vector applies to", "--control-vector-layer-range", values=2),
)

POLICY = OptionPolicy(
    family="llamacpp",
    rules=(*_TYPED, *_RENDERED, *_NEVER, *_GATED, *_EXTRA),
    ungated=frozenset({"--no-host"}),
)
"""Options of `llama-server`: exact names, no `--name=value`."""

RESERVED_ENV = (
    Reserved("LLAMA_ARG_*", "options travel as arguments, where they are checked"),
    Reserved("LLAMA_SERVER_*", "options travel as arguments, where they are checked"),
    Reserved("AIP_*", "another platform's addresses and ports"),
    Reserved("LLAMA_API_KEY", "CapyCTL gives each launch a key of its own"),
    Reserved("MTMD_BACKEND_DEVICE", "devices follow the ledger's claims"),
    Reserved("HF_TOKEN", "the engine fetches nothing"),
    Reserved("GGML_CUDA_DEVICES", "devices follow the ledger's claims"),
    Reserved("GGML_CUDA_ENABLE_UNIFIED_MEMORY", "memory outside the ledger's account"),
    Reserved("GGML_VK_VISIBLE_DEVICES", "devices follow the ledger's claims"),
    Reserved("GGML_VK_PREFER_HOST_MEMORY", "memory outside the ledger's account"),
    Reserved("GGML_VK_ALLOW_SYSMEM_FALLBACK", "memory outside the ledger's account"),
    Reserved("GGML_METAL_DEVICES", "devices follow the ledger's claims"),
    Reserved("GGML_OPENCL_PLATFORM", "devices follow the ledger's claims"),
    Reserved("GGML_OPENCL_DEVICE", "devices follow the ledger's claims"),
    Reserved("GGML_HEXAGON_DEVICES", "devices follow the ledger's claims"),
    Reserved("ONEAPI_DEVICE_SELECTOR", "devices follow the ledger's claims"),
    Reserved("GGML_BACKEND_PATH", "it loads code"),
    Reserved("LLAMA_CACHE", "a private directory of this family"),
    Reserved("XDG_CONFIG_HOME", "a private directory of this family"),
    Reserved("HOME", "engines have no home"),
)
