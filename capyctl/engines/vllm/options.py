"""vLLM's options and variables by class, with the reason. Its parser abbreviates, so prefixes count.

Source: engines 3.2, 4.3, 6.1, 6.2; spellings as the parser of 0.32.0 knows them.
"""

from __future__ import annotations

from capyctl.engines.environment import Reserved
from capyctl.engines.option_rows import gated, owned, passed, typed
from capyctl.engines.options import OptionPolicy

_ON_DEVICE = "memory follows the ledger; weights are on the device: choose a smaller model for it"

_TYPED = (
    *typed("engine_config.max_concurrent_requests", "max-num-seqs", fixed=True),
    *typed("engine_config.context_length", "max-model-len"),
    *typed("engine_config.vllm.max_num_batched_tokens", "max-num-batched-tokens"),
    *typed("engine_config.vllm.block_size_tokens", "block-size"),
    *typed("engine_config.kv_cache_dtype", "kv-cache-dtype"),
    *typed("engine_config.dtype", "dtype"),
    *typed("engine_config.quantization", "quantization|-q"),
    *typed("engine_config.cuda_graphs", "enforce-eager?"),
    *typed("engine_config.language_model_only", "language-model-only?"),
    *typed("engine_config.trust_remote_code", "trust-remote-code?"),
    *typed("engine_config.vllm.safetensors_load_strategy", "safetensors-load-strategy"),
)

UNCONDITIONAL = (
    *owned("engines listen on loopback, on a leased port", "host", "port"),
    *owned("the model is the measured directory", "model", "revision", "code-revision"),
    *owned("the first route is the served name", "served-model-name*"),
    *owned("ranks follow the deployment's topology", "tensor-parallel-size|-tp", "pipeline-parallel-size|-pp"),
    *owned("ranks follow the deployment's topology", "distributed-executor-backend"),
    *owned("ranks follow the deployment's topology", "data-parallel-size|-dp", "data-parallel-address|-dpa"),
    *owned("ranks follow the deployment's topology", "data-parallel-rpc-port|-dpp"),
    *owned(
        "memory follows the ledger; state engine_config.memory",
        *("gpu-memory-utilization|device-memory-utilization", "kv-cache-memory-bytes"),
    ),
    *owned(_ON_DEVICE, "cpu-offload-gb"),
    *owned("CapyCTL decides what sleeps", "enable-sleep-mode?"),
    *owned("CapyCTL gives each launch keys of its own", "api-key*", "middleware"),
    *owned("prompts stay out of the log", "enable-log-requests?"),
    *owned("idle and load are read from its gauges", "disable-log-stats!"),
    *owned("the log writer owns the log", "uvicorn-log-level", "disable-uvicorn-access-log?"),
    *owned("the engine serves the router alone", "uds", "root-path", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs"),
    *owned("one API server, whose keys are checked", "headless!", "api-server-count|-asc"),
    *owned("a file of options would go around every check", "config"),
    *owned("the router reads each request's figures", "enable-per-request-metrics?"),
)
"""Reserved options that every build must have: a build without one of them cannot be checked."""

IF_PRESENT = (
    *owned("the log writer owns the log", "log-config-file", "log-level", "logging-config"),
    *owned("the log writer owns the log", "disable-access-log-for-endpoints"),
    *owned("the engine serves the router alone", "enable-ssl-refresh?", "ssl-cert-reqs", "ssl-ciphers"),
    *owned("ranks follow the deployment's topology", "nnodes|-n", "node-rank|-r", "master-addr", "master-port"),
    *owned("ranks follow the deployment's topology", "enable-scale-out?", "enable-elastic-ep?"),
    *owned("ranks follow the deployment's topology", "data-parallel-rank|-dpn", "data-parallel-start-rank|-dpr"),
    *owned("ranks follow the deployment's topology", "data-parallel-size-local|-dpl", "data-parallel-backend|-dpb"),
    *owned(
        "ranks follow the deployment's topology", "data-parallel-hybrid-lb|-dph?", "data-parallel-external-lb|-dpe?"
    ),
    *owned("ranks follow the deployment's topology", "data-parallel-multi-port-external-lb|-dpm!"),
    *owned("ranks follow the deployment's topology", "data-parallel-supervisor-port", "elastic-ep-max-dp-size"),
    *owned("devices follow the ledger's claims", "device", "device-ids"),
    *owned("ranks follow the deployment's topology", "prefill-context-parallel-size|-pcp"),
    *owned("memory follows the ledger; a cache in host RAM is --kv-offloading-size", "swap-space"),
    *owned(_ON_DEVICE, "cpu-offload-params*", "offload-backend", "offload-params*"),
    *owned("memory follows the ledger", "num-gpu-blocks-override"),
    *owned(_ON_DEVICE, "offload-group-size", "offload-num-in-group", "offload-prefetch-step"),
    *owned("prompts stay out of the log", "disable-log-requests!", "enable-log-outputs?", "enable-log-deltas?"),
    *owned("a second listener, outside the keys", "grpc!", "grpc-port"),
    *owned("CapyCTL decides what sleeps", "sleep-mode-backend", "sleep-preserve-parameter-names*"),
    *owned("CapyCTL decides what sleeps", "enable-cumem-allocator?", "enable-nccl-comm-suspend?"),
    *owned("CapyCTL decides what sleeps", "sleep-mode-offload-cudagraph?"),
    *owned("CapyCTL drains before it stops an engine", "shutdown-timeout"),
    *owned("the endpoint speaks text", "tokens-only?"),
    *owned("CapyCTL restarts what failed", "enable-fault-tolerance?"),
    *owned("another program would serve", "omni!"),
    *owned("the engine would print and end", "help!", "version!"),
)
"""Reserved options that some builds lack; where a build has one, it is compared."""

DRAFT_KEYS = (
    *("method", "model", "num_speculative_tokens", "draft_tensor_parallel_size", "prompt_lookup_max"),
    *("prompt_lookup_min", "draft_sample_method", "moe_backend"),
)

_GATED = (
    *gated("it may load another model", "speculative-config|-sc", keys=DRAFT_KEYS),
    *gated("it loads another model", "spec-model", paths=True),
    *gated("it may load another model", "spec-method", "spec-tokens"),
    *gated(
        "the cache would leave the engine; host memory that is not known needs resources",
        *("kv-transfer-config", "ec-transfer-config"),
    ),
    *gated("the cache would leave the engine", "kv-events-config"),
    *gated("it states settings that no other option shows", "compilation-config|-cc", "attention-config|-ac"),
    *gated("it states settings that no other option shows", "watermark-config", "diffusion-config|-dc"),
    *gated("it states settings that no other option shows", "engram-config", "reasoning-config", "kernel-config"),
    *gated("it states settings that no other option shows", "ec-manager-config", "structured-outputs-config"),
    *gated("it states settings that no other option shows", "additional-config", "aux-output-config", "eplb-config"),
    *gated("it states settings that no other option shows", "pooler-config", "quantization-config"),
    *gated("it states settings that no other option shows", "fault-tolerance-config", "model-loader-extra-config"),
    *gated("it states settings that no other option shows", "weight-transfer-config", "hf-overrides"),
    *gated("it writes files of the host", "profiler-config"),
    *gated(
        "it reads files of the host", "generation-config", "hf-config-path", "tokenizer", "chat-template", paths=True
    ),
    *gated("it loads code", "tool-parser-plugin", "reasoning-parser-plugin", paths=True),
    *gated("it loads code", "io-processor-plugin", "worker-cls", "worker-extension-cls", "scheduler-cls"),
    *gated("it loads code", "logits-processors*", "model-class-overrides"),
    *gated("it loads other weights", "lora-modules*", "default-mm-loras"),
    *gated("it reads or writes files of the host", "download-dir", "allowed-local-media-path", paths=True),
    *gated("it reads or writes files of the host", "mm-encoder-fp8-scale-path", paths=True),
    *gated("it reads or writes files of the host", "mm-encoder-fp8-scale-save-path", paths=True),
    *gated("requests could make the engine call other hosts", "allowed-media-domains*"),
    *gated("it sends what the engine does elsewhere", "otlp-traces-endpoint", "collect-detailed-traces*"),
    *gated("it runs tools, and one of them runs code that a model wrote", "tool-server"),
    *gated("requests could bring templates", "trust-request-chat-template?", "trust-request-mm-kwargs?"),
    *gated("requests could bring tensors", "enable-prompt-embeds?", "enable-mm-embeds?"),
    *gated("the engine would fetch with it", "hf-token", "tokenizer-revision"),
    *gated("browsers of other origins could read answers", "allowed-origins", "allowed-methods", "allowed-headers"),
    *gated("browsers of other origins could read answers", "allow-credentials?"),
)

_PASSED = (
    *passed("how answers are shaped", "reasoning-parser", "tool-call-parser", "enable-auto-tool-choice?"),
    *passed("how answers are shaped", "exclude-tools-when-tool-choice-none?", "tool-strict-level", "response-role"),
    *passed("how answers are shaped", "chat-template-content-format", "default-chat-template-kwargs"),
    *passed("how answers are shaped", "return-tokens-as-token-ids?", "enable-prompt-tokens-details?"),
    *passed("how answers are shaped", "enable-force-include-usage?", "sse-keep-alive-interval", "stream-interval"),
    *passed("how answers are shaped", "override-generation-config", "max-logprobs", "logprobs-mode", "seed"),
    *passed("how answers are shaped", "cohere-is-reasoning-model?", "cohere-format", "return-sampling-mask?"),
    *passed("how answers are shaped", "anthropic-disabled-thinking-effort", "enable-request-id-headers?"),
    *passed(
        "how prompts are read", "tokenizer-mode", "skip-tokenizer-init?", "config-format", "interleave-mm-strings?"
    ),
    *passed("how weights are read", "load-format", "ignore-patterns*", "use-tqdm-on-load?", "pt-load-map-location"),
    *passed("how weights are read", "safetensors-prefetch-num-threads", "safetensors-prefetch-block-size"),
    *passed("how weights are read", "max-parallel-loading-workers", "allow-deprecated-quantization?"),
    *passed("which model code runs", "runner", "convert", "model-impl"),
    *passed("how prompts are cached", "enable-prefix-caching?", "prefix-caching-hash-algo", "kv-sharing-fast-prefill?"),
    *passed("how prompts are cached", "prefix-cache-retention-interval", "prefix-match-unit"),
    *passed("how prompts are cached", "kv-cache-dtype-skip-layers*"),
    *passed("a cache in host RAM, GiB of all ranks together; it is charged", "kv-offloading-size"),
    *passed("how prompts are cached", "kv-offloading-backend", "disable-hybrid-kv-cache-manager?"),
    *passed("the state of recurrent layers", "mamba-backend", "mamba-ssu-algorithm", "mamba-cache-philox-rounds"),
    *passed("the state of recurrent layers", "mamba-cache-dtype", "mamba-ssm-cache-dtype", "mamba-block-size"),
    *passed("the state of recurrent layers", "mamba-cache-mode", "enable-mamba-cache-stochastic-rounding?"),
    *passed("the state of recurrent layers", "enable-mamba-shared-prefix-checkpoint?", "use-replayssm?"),
    *passed("the state of recurrent layers", "replayssm-buffer-len"),
    *passed("how requests are scheduled", "enable-chunked-prefill?", "scheduling-policy", "async-scheduling?"),
    *passed("how requests are scheduled", "max-num-scheduled-tokens", "max-num-active-seqs", "watermark"),
    *passed("how requests are scheduled", "max-num-queued-reqs", "max-num-queued-tokens"),
    *passed("how requests are scheduled", "long-prefill-token-threshold", "long-prefill-token-threshold-adaptive?"),
    *passed("how requests are scheduled", "prefill-schedule-interval", "scheduler-reserve-full-isl?"),
    *passed("kernels", "attention-backend", "disable-sliding-window?", "disable-cascade-attn?", "moe-backend"),
    *passed("kernels", "linear-backend", "sparse-indexer-topk-backend", "gdn-prefill-backend", "kda-prefill-backend"),
    *passed("kernels", "kda-decode-backend", "cudagraph-capture-sizes*", "max-cudagraph-capture-size"),
    *passed("kernels", "optimization-level", "performance-mode", "enable-flashinfer-autotune?", "ir-op-priority"),
    *passed("kernels", "enable-expert-parallel|-ep?", "all2all-backend", "use-fp64-gumbel?"),
    *passed("media", "limit-mm-per-prompt", "media-io-kwargs", "mm-processor-kwargs", "disable-chunked-mm-input?"),
    *passed("a cache of media in host RAM, GiB twice over; it is charged where it is stated", "mm-processor-cache-gb"),
    *passed("media", "mm-processor-cache-type", "mm-encoder-only?", "skip-mm-profiling?"),
    *passed("adapters of weights", "enable-lora?", "max-loras", "max-lora-rank", "lora-dtype", "max-cpu-loras"),
    *passed("adapters of weights", "fully-sharded-loras?", "lora-target-modules*"),
    *passed("adapters of weights", "enable-tower-connector-lora?", "specialize-active-lora?", "max-lora-cls-labels"),
    *passed("adapters of weights", "enable-mixed-moe-lora-format?", "enable-moe-shared-loras?"),
    *passed("media", "mm-hasher-algorithm", "mm-shm-cache-max-object-size-mb", "mm-encoder-tp-mode", "mm-tensor-ipc"),
    *passed("media", "mm-encoder-attn-backend", "mm-encoder-attn-dtype", "mm-encoder-fp8-scale-save-margin"),
    *passed("media", "video-pruning-rate", "video-pruning-method", "mm-processor-device"),
    *passed("GiB of the cache on the card for media; the context is fitted beside them", "mm-ipc-gpu-memory-gb"),
    *passed("media", "mm-device-do-normalize?"),
    *passed("how ranks share the work", "decode-context-parallel-size|-dcp", "dcp-comm-backend", "dcp-q-replicate?"),
    *passed("how ranks share the work", "dcp-kv-cache-interleave-size", "cp-kv-cache-interleave-size", "enable-hc-sp?"),
    *passed("how ranks share the work", "disable-custom-all-reduce?", "disable-nccl-for-dp-synchronization?"),
    *passed("how ranks share the work", "distributed-timeout-seconds", "cpu-distributed-timeout-seconds"),
    *passed("how ranks share the work", "dp-sync-interval", "dp-supervisor-probe-interval-s"),
    *passed("how ranks share the work", "dp-supervisor-probe-timeout-s", "dp-supervisor-probe-failure-threshold"),
    *passed("how ranks share the work", "enable-dbo?", "dbo-decode-token-threshold", "dbo-prefill-token-threshold"),
    *passed("how ranks share the work", "ubatch-size", "enable-eplb?", "expert-placement-strategy"),
    *passed("how ranks share the work", "enable-batch-sharded-sampling?", "enable-ep-weight-filter?"),
    *passed("2 GiB of shared memory; they are charged", "enable-shm-tensor-arena?"),
    *passed("how ranks share the work", "ray-workers-use-nsight?"),
    *passed("where processes run", "numa-bind?", "numa-bind-nodes*", "numa-bind-cpus*", "renderer-num-workers"),
    *passed("what the server answers beside", "enable-server-load-tracking?", "enable-tokenizer-info-endpoint?"),
    *passed("what the server answers beside", "disable-fastapi-docs?", "enable-offline-docs?", "fingerprint-mode"),
    *passed("what the server answers beside", "fingerprint-value", "enable-return-routed-experts?"),
    *passed("what the server answers beside", "enable-flash-late-interaction?", "enable-trace-replay?"),
    *passed("bounds of one request", "h11-max-incomplete-event-size", "h11-max-header-count", "max-log-len"),
    *passed("figures", "per-request-spec-decode-metrics", "kv-cache-metrics-sample", "custom-histogram-buckets"),
    *passed("figures", "cudagraph-metrics?", "enable-layerwise-nvtx-tracing?", "enable-logging-iteration-details?"),
    *passed("figures", "jit-monitor-mode", "jit-monitor-verbose?", "aggregate-engine-logging!", "log-error-stack?"),
    *passed("how prompts are cached", "swa-bounded-replay?"),
    *passed("checks at the start", "fail-on-environ-validation?"),
    *passed("figures", "show-hidden-metrics-for-version", "kv-cache-metrics?", "enable-mfu-metrics?"),
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
    Reserved("VLLM_CPU_KVCACHE_SPACE", "memory follows the ledger"),
    Reserved("LMCACHE_*", "the cache server is CapyCTL's"),
    Reserved("HF_HUB_OFFLINE", "the engine fetches nothing"),
    Reserved("TRANSFORMERS_OFFLINE", "the engine fetches nothing"),
)
