"""vLLM's options and variables by class, with the reason. Its parser abbreviates, so prefixes count.

A row names an option without its dashes. `?` at its end marks a switch, which has a `--no-` form; `!` a switch
without one; `*` an option that takes several values; `a|b` two spellings of one option.
Source: engines 3.2, 4.3, 6.1, 6.2; spellings as the parser of 0.32.0 knows them.
"""

from __future__ import annotations

from collections.abc import Iterator

from capyctl.engines.environment import Reserved
from capyctl.engines.options import OptionClass, OptionPolicy, OptionRule


def _rules(
    kind: OptionClass,
    why: str,
    *specs: str,
    field: str | None = None,
    paths: bool = False,
    fixed: bool = False,
    keys: tuple[str, ...] = (),
) -> Iterator[OptionRule]:
    for spec in specs:
        names: list[str] = []
        for word in spec.rstrip("?!*").split("|"):
            names.append(word if word.startswith("-") else f"--{word}")
            if spec.endswith("?") and not word.startswith("-"):
                names.append(f"--no-{word}")
        values = 0 if spec.endswith(("?", "!")) else 256 if spec.endswith("*") else 1
        yield OptionRule(
            names=tuple(names), kind=kind, why=why, field=field, paths=paths, values=values, fixed=fixed, keys=keys
        )


def _typed(field: str, *specs: str, fixed: bool = False) -> Iterator[OptionRule]:
    return _rules(OptionClass.TYPED, f"stated by {field}", *specs, field=field, fixed=fixed)


def _owned(why: str, *specs: str) -> Iterator[OptionRule]:
    return _rules(OptionClass.RESERVED, why, *specs)


def _gated(why: str, *specs: str, paths: bool = False, keys: tuple[str, ...] = ()) -> Iterator[OptionRule]:
    return _rules(OptionClass.APPROVAL, why, *specs, paths=paths, keys=keys)


def _passed(why: str, *specs: str) -> Iterator[OptionRule]:
    return _rules(OptionClass.EXTRA, why, *specs)


_TYPED = (
    *_typed("engine_config.max_concurrent_requests", "max-num-seqs", fixed=True),
    *_typed("engine_config.context_length", "max-model-len"),
    *_typed("engine_config.vllm.max_num_batched_tokens", "max-num-batched-tokens"),
    *_typed("engine_config.vllm.block_size_tokens", "block-size"),
    *_typed("engine_config.kv_cache_dtype", "kv-cache-dtype"),
    *_typed("engine_config.dtype", "dtype"),
    *_typed("engine_config.quantization", "quantization|-q"),
    *_typed("engine_config.cuda_graphs", "enforce-eager?"),
    *_typed("engine_config.language_model_only", "language-model-only?"),
    *_typed("engine_config.trust_remote_code", "trust-remote-code?"),
    *_typed("engine_config.vllm.safetensors_load_strategy", "safetensors-load-strategy"),
)

UNCONDITIONAL = (
    *_owned("engines listen on loopback, on a leased port", "host", "port"),
    *_owned("the model is the measured directory", "model", "revision", "code-revision"),
    *_owned("the first route is the served name", "served-model-name*"),
    *_owned("ranks follow the deployment's topology", "tensor-parallel-size|-tp", "pipeline-parallel-size|-pp"),
    *_owned("ranks follow the deployment's topology", "distributed-executor-backend"),
    *_owned("ranks follow the deployment's topology", "data-parallel-size|-dp", "data-parallel-address|-dpa"),
    *_owned("ranks follow the deployment's topology", "data-parallel-rpc-port|-dpp"),
    *_owned("memory follows the ledger", "gpu-memory-utilization|device-memory-utilization", "kv-cache-memory-bytes"),
    *_owned("memory follows the ledger", "cpu-offload-gb"),
    *_owned("CapyCTL decides what sleeps", "enable-sleep-mode?"),
    *_owned("CapyCTL gives each launch keys of its own", "api-key*", "middleware"),
    *_owned("prompts stay out of the log", "enable-log-requests?"),
    *_owned("idle and load are read from its gauges", "disable-log-stats!"),
    *_owned("the log writer owns the log", "uvicorn-log-level", "disable-uvicorn-access-log?"),
    *_owned("the engine serves the router alone", "uds", "root-path", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs"),
    *_owned("one API server, whose keys are checked", "headless!", "api-server-count|-asc"),
    *_owned("a file of options would go around every check", "config"),
    *_owned("the router reads each request's figures", "enable-per-request-metrics?"),
)
"""Reserved options that every build must have: a build without one of them cannot be checked."""

IF_PRESENT = (
    *_owned("the log writer owns the log", "log-config-file", "log-level", "logging-config"),
    *_owned("the log writer owns the log", "disable-access-log-for-endpoints"),
    *_owned("the engine serves the router alone", "enable-ssl-refresh?", "ssl-cert-reqs", "ssl-ciphers"),
    *_owned("ranks follow the deployment's topology", "nnodes|-n", "node-rank|-r", "master-addr", "master-port"),
    *_owned("ranks follow the deployment's topology", "enable-scale-out?", "enable-elastic-ep?"),
    *_owned("ranks follow the deployment's topology", "data-parallel-rank|-dpn", "data-parallel-start-rank|-dpr"),
    *_owned("ranks follow the deployment's topology", "data-parallel-size-local|-dpl", "data-parallel-backend|-dpb"),
    *_owned(
        "ranks follow the deployment's topology", "data-parallel-hybrid-lb|-dph?", "data-parallel-external-lb|-dpe?"
    ),
    *_owned("ranks follow the deployment's topology", "data-parallel-multi-port-external-lb|-dpm!"),
    *_owned("ranks follow the deployment's topology", "data-parallel-supervisor-port", "elastic-ep-max-dp-size"),
    *_owned("devices follow the ledger's claims", "device", "device-ids"),
    *_owned("ranks follow the deployment's topology", "prefill-context-parallel-size|-pcp"),
    *_owned("memory follows the ledger", "swap-space", "cpu-offload-params*", "offload-backend", "offload-params*"),
    *_owned("memory follows the ledger", "offload-group-size", "offload-num-in-group", "offload-prefetch-step"),
    *_owned("prompts stay out of the log", "disable-log-requests!", "enable-log-outputs?", "enable-log-deltas?"),
    *_owned("a second listener, outside the keys", "grpc!", "grpc-port"),
    *_owned("CapyCTL decides what sleeps", "sleep-mode-backend", "sleep-preserve-parameter-names*"),
    *_owned("CapyCTL decides what sleeps", "enable-cumem-allocator?", "enable-nccl-comm-suspend?"),
    *_owned("CapyCTL decides what sleeps", "sleep-mode-offload-cudagraph?"),
    *_owned("CapyCTL drains before it stops an engine", "shutdown-timeout"),
    *_owned("the endpoint speaks text", "tokens-only?"),
    *_owned("CapyCTL restarts what failed", "enable-fault-tolerance?"),
    *_owned("another program would serve", "omni!"),
    *_owned("the engine would print and end", "help!", "version!"),
)
"""Reserved options that some builds lack; where a build has one, it is compared."""

DRAFT_KEYS = (
    *("method", "model", "num_speculative_tokens", "draft_tensor_parallel_size", "prompt_lookup_max"),
    *("prompt_lookup_min", "draft_sample_method", "moe_backend"),
)

_GATED = (
    *_gated("it may load another model", "speculative-config|-sc", keys=DRAFT_KEYS),
    *_gated("it loads another model", "spec-model", paths=True),
    *_gated("it may load another model", "spec-method", "spec-tokens"),
    *_gated("the cache would leave the engine", "kv-transfer-config", "kv-events-config", "ec-transfer-config"),
    *_gated("it states settings that no other option shows", "compilation-config|-cc", "attention-config|-ac"),
    *_gated("it states settings that no other option shows", "watermark-config", "diffusion-config|-dc"),
    *_gated("it states settings that no other option shows", "engram-config", "reasoning-config", "kernel-config"),
    *_gated("it states settings that no other option shows", "ec-manager-config", "structured-outputs-config"),
    *_gated("it states settings that no other option shows", "additional-config", "aux-output-config", "eplb-config"),
    *_gated("it states settings that no other option shows", "pooler-config", "quantization-config"),
    *_gated("it states settings that no other option shows", "fault-tolerance-config", "model-loader-extra-config"),
    *_gated("it states settings that no other option shows", "weight-transfer-config", "hf-overrides"),
    *_gated("it writes files of the host", "profiler-config"),
    *_gated(
        "it reads files of the host", "generation-config", "hf-config-path", "tokenizer", "chat-template", paths=True
    ),
    *_gated("it loads code", "tool-parser-plugin", "reasoning-parser-plugin", paths=True),
    *_gated("it loads code", "io-processor-plugin", "worker-cls", "worker-extension-cls", "scheduler-cls"),
    *_gated("it loads code", "logits-processors*", "model-class-overrides"),
    *_gated("it loads other weights", "lora-modules*", "default-mm-loras"),
    *_gated("it reads or writes files of the host", "download-dir", "allowed-local-media-path", paths=True),
    *_gated("it reads or writes files of the host", "mm-encoder-fp8-scale-path", paths=True),
    *_gated("it reads or writes files of the host", "mm-encoder-fp8-scale-save-path", paths=True),
    *_gated("requests could make the engine call other hosts", "allowed-media-domains*"),
    *_gated("it sends what the engine does elsewhere", "otlp-traces-endpoint", "collect-detailed-traces*"),
    *_gated("it runs tools, and one of them runs code that a model wrote", "tool-server"),
    *_gated("requests could bring templates", "trust-request-chat-template?", "trust-request-mm-kwargs?"),
    *_gated("requests could bring tensors", "enable-prompt-embeds?", "enable-mm-embeds?"),
    *_gated("the engine would fetch with it", "hf-token", "tokenizer-revision"),
    *_gated("browsers of other origins could read answers", "allowed-origins", "allowed-methods", "allowed-headers"),
    *_gated("browsers of other origins could read answers", "allow-credentials?"),
)

_PASSED = (
    *_passed("how answers are shaped", "reasoning-parser", "tool-call-parser", "enable-auto-tool-choice?"),
    *_passed("how answers are shaped", "exclude-tools-when-tool-choice-none?", "tool-strict-level", "response-role"),
    *_passed("how answers are shaped", "chat-template-content-format", "default-chat-template-kwargs"),
    *_passed("how answers are shaped", "return-tokens-as-token-ids?", "enable-prompt-tokens-details?"),
    *_passed("how answers are shaped", "enable-force-include-usage?", "sse-keep-alive-interval", "stream-interval"),
    *_passed("how answers are shaped", "override-generation-config", "max-logprobs", "logprobs-mode", "seed"),
    *_passed("how answers are shaped", "cohere-is-reasoning-model?", "cohere-format", "return-sampling-mask?"),
    *_passed("how answers are shaped", "anthropic-disabled-thinking-effort", "enable-request-id-headers?"),
    *_passed(
        "how prompts are read", "tokenizer-mode", "skip-tokenizer-init?", "config-format", "interleave-mm-strings?"
    ),
    *_passed("how weights are read", "load-format", "ignore-patterns*", "use-tqdm-on-load?", "pt-load-map-location"),
    *_passed("how weights are read", "safetensors-prefetch-num-threads", "safetensors-prefetch-block-size"),
    *_passed("how weights are read", "max-parallel-loading-workers", "allow-deprecated-quantization?"),
    *_passed("which model code runs", "runner", "convert", "model-impl"),
    *_passed(
        "how prompts are cached", "enable-prefix-caching?", "prefix-caching-hash-algo", "kv-sharing-fast-prefill?"
    ),
    *_passed("how prompts are cached", "prefix-cache-retention-interval", "prefix-match-unit"),
    *_passed("how prompts are cached", "kv-cache-dtype-skip-layers*", "num-gpu-blocks-override"),
    *_passed(
        "how prompts are cached", "kv-offloading-backend", "kv-offloading-size", "disable-hybrid-kv-cache-manager?"
    ),
    *_passed("the state of recurrent layers", "mamba-backend", "mamba-ssu-algorithm", "mamba-cache-philox-rounds"),
    *_passed("the state of recurrent layers", "mamba-cache-dtype", "mamba-ssm-cache-dtype", "mamba-block-size"),
    *_passed("the state of recurrent layers", "mamba-cache-mode", "enable-mamba-cache-stochastic-rounding?"),
    *_passed("the state of recurrent layers", "enable-mamba-shared-prefix-checkpoint?", "use-replayssm?"),
    *_passed("the state of recurrent layers", "replayssm-buffer-len"),
    *_passed("how requests are scheduled", "enable-chunked-prefill?", "scheduling-policy", "async-scheduling?"),
    *_passed("how requests are scheduled", "max-num-scheduled-tokens", "max-num-active-seqs", "watermark"),
    *_passed("how requests are scheduled", "max-num-queued-reqs", "max-num-queued-tokens"),
    *_passed("how requests are scheduled", "long-prefill-token-threshold", "long-prefill-token-threshold-adaptive?"),
    *_passed("how requests are scheduled", "prefill-schedule-interval", "scheduler-reserve-full-isl?"),
    *_passed("kernels", "attention-backend", "disable-sliding-window?", "disable-cascade-attn?", "moe-backend"),
    *_passed("kernels", "linear-backend", "sparse-indexer-topk-backend", "gdn-prefill-backend", "kda-prefill-backend"),
    *_passed("kernels", "kda-decode-backend", "cudagraph-capture-sizes*", "max-cudagraph-capture-size"),
    *_passed("kernels", "optimization-level", "performance-mode", "enable-flashinfer-autotune?", "ir-op-priority"),
    *_passed("kernels", "enable-expert-parallel|-ep?", "all2all-backend", "use-fp64-gumbel?"),
    *_passed("media", "limit-mm-per-prompt", "media-io-kwargs", "mm-processor-kwargs", "disable-chunked-mm-input?"),
    *_passed("media", "mm-processor-cache-gb", "mm-processor-cache-type", "mm-encoder-only?", "skip-mm-profiling?"),
    *_passed("adapters of weights", "enable-lora?", "max-loras", "max-lora-rank", "lora-dtype", "max-cpu-loras"),
    *_passed("adapters of weights", "fully-sharded-loras?", "lora-target-modules*"),
    *_passed("adapters of weights", "enable-tower-connector-lora?", "specialize-active-lora?", "max-lora-cls-labels"),
    *_passed("adapters of weights", "enable-mixed-moe-lora-format?", "enable-moe-shared-loras?"),
    *_passed("media", "mm-hasher-algorithm", "mm-shm-cache-max-object-size-mb", "mm-encoder-tp-mode", "mm-tensor-ipc"),
    *_passed("media", "mm-encoder-attn-backend", "mm-encoder-attn-dtype", "mm-encoder-fp8-scale-save-margin"),
    *_passed("media", "video-pruning-rate", "video-pruning-method", "mm-processor-device", "mm-ipc-gpu-memory-gb"),
    *_passed("media", "mm-device-do-normalize?"),
    *_passed("how ranks share the work", "decode-context-parallel-size|-dcp", "dcp-comm-backend", "dcp-q-replicate?"),
    *_passed(
        "how ranks share the work", "dcp-kv-cache-interleave-size", "cp-kv-cache-interleave-size", "enable-hc-sp?"
    ),
    *_passed("how ranks share the work", "disable-custom-all-reduce?", "disable-nccl-for-dp-synchronization?"),
    *_passed("how ranks share the work", "distributed-timeout-seconds", "cpu-distributed-timeout-seconds"),
    *_passed("how ranks share the work", "dp-sync-interval", "dp-supervisor-probe-interval-s"),
    *_passed("how ranks share the work", "dp-supervisor-probe-timeout-s", "dp-supervisor-probe-failure-threshold"),
    *_passed("how ranks share the work", "enable-dbo?", "dbo-decode-token-threshold", "dbo-prefill-token-threshold"),
    *_passed("how ranks share the work", "ubatch-size", "enable-eplb?", "expert-placement-strategy"),
    *_passed("how ranks share the work", "enable-batch-sharded-sampling?", "enable-ep-weight-filter?"),
    *_passed("how ranks share the work", "enable-shm-tensor-arena?", "ray-workers-use-nsight?"),
    *_passed("where processes run", "numa-bind?", "numa-bind-nodes*", "numa-bind-cpus*", "renderer-num-workers"),
    *_passed("what the server answers beside", "enable-server-load-tracking?", "enable-tokenizer-info-endpoint?"),
    *_passed("what the server answers beside", "disable-fastapi-docs?", "enable-offline-docs?", "fingerprint-mode"),
    *_passed("what the server answers beside", "fingerprint-value", "enable-return-routed-experts?"),
    *_passed("what the server answers beside", "enable-flash-late-interaction?", "enable-trace-replay?"),
    *_passed("bounds of one request", "h11-max-incomplete-event-size", "h11-max-header-count", "max-log-len"),
    *_passed("figures", "per-request-spec-decode-metrics", "kv-cache-metrics-sample", "custom-histogram-buckets"),
    *_passed("figures", "cudagraph-metrics?", "enable-layerwise-nvtx-tracing?", "enable-logging-iteration-details?"),
    *_passed("figures", "jit-monitor-mode", "jit-monitor-verbose?", "aggregate-engine-logging!", "log-error-stack?"),
    *_passed("how prompts are cached", "swa-bounded-replay?"),
    *_passed("checks at the start", "fail-on-environ-validation?"),
    *_passed("figures", "show-hidden-metrics-for-version", "kv-cache-metrics?", "enable-mfu-metrics?"),
)

POLICY = OptionPolicy(
    family="vllm",
    rules=(*_TYPED, *UNCONDITIONAL, *IF_PRESENT, *_GATED, *_PASSED),
    prefixes=True,
    equals=True,
    dotted=True,
)
"""Options of `vllm serve`: abbreviations, `--name=value` and `--name.key value` are understood."""

RESERVED_ENV = (
    Reserved("VLLM_HOST_IP", "engines listen on loopback"),
    Reserved("VLLM_PORT", "ports are leased"),
    Reserved("VLLM_API_KEY", "CapyCTL gives each launch keys of its own"),
    Reserved("VLLM_PLUGINS", "an engine loads no plugins"),
    Reserved("VLLM_SERVER_DEV_MODE", "control routes follow the residency"),
    Reserved("VLLM_ALLOW_INSECURE_SERIALIZATION", "it lets messages run code"),
    Reserved("VLLM_DO_NOT_TRACK", "telemetry follows the host's engine_telemetry"),
    Reserved("VLLM_NO_USAGE_STATS", "telemetry follows the host's engine_telemetry"),
    Reserved("VLLM_USE_RUST_FRONTEND", "another server, outside the keys"),
    Reserved("VLLM_RUST_FRONTEND_PATH", "another server, outside the keys"),
    Reserved("VLLM_ENGINE_READY_TIMEOUT_S", "the start's deadline is the deployment's"),
    Reserved("VLLM_DEBUG_LOG_API_SERVER_RESPONSE", "answers stay out of the log"),
    Reserved("VLLM_LOGGING_CONFIG_PATH", "the log writer owns the log"),
    Reserved("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "requests could load weights"),
    Reserved("LMCACHE_*", "the cache server is CapyCTL's"),
    Reserved("HF_HUB_OFFLINE", "the engine fetches nothing"),
    Reserved("TRANSFORMERS_OFFLINE", "the engine fetches nothing"),
)
