"""SGLang's options and variables by class, with the reason. Its parser abbreviates, so prefixes count.

Source: engines 3.2, 4.3, 7.1, 7.3; spellings as the parser of 0.5.23 knows them.
"""

from __future__ import annotations

from capyctl.engines.environment import Reserved
from capyctl.engines.option_rows import gated, owned, passed, typed
from capyctl.engines.options import OptionPolicy

_TYPED = (
    *typed("engine_config.context_length", "context-length"),
    *typed("engine_config.max_concurrent_requests", "max-running-requests"),
    *typed("engine_config.sglang.max_total_tokens", "max-total-tokens"),
    *typed("engine_config.sglang.chunked_prefill_size", "chunked-prefill-size"),
    *typed("engine_config.sglang.tokenizer_workers", "tokenizer-worker-num"),
    *typed("engine_config.dtype", "dtype"),
    *typed("engine_config.quantization", "quantization"),
    *typed("engine_config.kv_cache_dtype", "kv-cache-dtype"),
    *typed("engine_config.cuda_graphs", "cuda-graph-backend-decode", "cuda-graph-backend-prefill"),
    *typed("engine_config.cuda_graphs", "disable-cuda-graph!"),
    *typed("engine_config.language_model_only", "language-model-only!"),
    *typed("engine_config.trust_remote_code", "trust-remote-code!"),
)

UNCONDITIONAL = (
    *owned("engines listen on loopback, on a leased port", "host", "port"),
    *owned("the model is the measured directory", "model-path|model", "tokenizer-path", "revision"),
    *owned("the first route is the served name", "served-model-name"),
    *owned("CapyCTL gives each launch keys of its own", "api-key", "admin-api-key"),
    *owned("devices follow the ledger's claims", "device", "base-gpu-id"),
    *owned("ranks follow the deployment's topology", "tp-size|tensor-parallel-size", "pp-size|pipeline-parallel-size"),
    *owned("ranks follow the deployment's topology", "dp-size|data-parallel-size", "nnodes", "node-rank"),
    *owned("ranks follow the deployment's topology", "dist-init-addr|nccl-init-addr"),
    *owned("memory follows the ledger", "mem-fraction-static", "cpu-offload-gb"),
    *owned("CapyCTL decides what sleeps", "enable-memory-saver!", "enable-weights-cpu-backup!"),
    *owned("the log writer owns the log", "log-level", "log-level-http"),
    *owned("prompts stay out of the log", "log-requests!", "crash-dump-folder"),
    *owned("idle and load are read from its gauges", "enable-metrics!"),
    *owned("the router reads each request's figures", "enable-cache-report!"),
    *owned("readiness is proven by CapyCTL's own probe", "skip-server-warmup!"),
    *owned("one engine serves whole requests", "disaggregation-mode"),
)
"""Reserved options that every build must have: a build without one of them cannot be checked."""

IF_PRESENT = (
    *owned("ranks follow the deployment's topology", "ep-size|expert-parallel-size|ep", "nccl-port"),
    *owned("ranks follow the deployment's topology", "dcp-size|decode-context-parallel-size"),
    *owned("ranks follow the deployment's topology", "attn-cp-size|attention-context-parallel-size"),
    *owned("ranks follow the deployment's topology", "moe-dp-size|moe-data-parallel-size", "dwdp-size"),
    *owned(
        "ranks follow the deployment's topology", "attn-dp-size|attention-data-parallel-size", "enable-dp-attention!"
    ),
    *owned("ranks follow the deployment's topology", "use-ray!", "gated-launch-port"),
    *owned("ranks follow the deployment's topology", "elastic-ep-backend", "elastic-ep-join-mode", "max-ep-size"),
    *owned("ranks follow the deployment's topology", "elastic-ep-join-rank-offset", "elastic-ep-initial-size"),
    *owned("ranks follow the deployment's topology", "enable-elastic-expert-backup!"),
    *owned("devices follow the ledger's claims", "gpu-id-step"),
    *owned("memory follows the ledger", "offload-group-size", "offload-num-in-group", "offload-prefetch-step"),
    *owned("memory follows the ledger", "offload-mode"),
    *owned("CapyCTL decides what sleeps", "enable-draft-weights-cpu-backup!"),
    *owned("a second listener, outside the keys", "smg-grpc-mode!", "grpc-mode!", "grpc-port", "sidecar"),
    *owned("a second listener, outside the keys", "smg-http-sidecar-port|grpc-http-sidecar-port", "sidecar-args"),
    *owned("a second listener, outside the keys", "grpc-response-timeout-secs", "engine-info-bootstrap-port"),
    *owned("a second listener, outside the keys", "decoupled-spec-bind-endpoint", "decoupled-spec-connect-endpoints"),
    *owned("a second listener, outside the keys", "decoupled-spec-rank", "decoupled-spec-role"),
    *owned("a second listener, outside the keys", "load-publish-endpoint", "kv-events-config"),
    *owned("the port is this launch's alone", "enable-http-worker-reuseport!"),
    *owned("the engine serves the router alone", "fastapi-root-path", "enable-http2!", "enable-ssl-refresh!"),
    *owned("the engine serves the router alone", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs"),
    *owned("the engine serves the router alone", "ssl-keyfile-password"),
    *owned("prompts stay out of the log", "log-requests-level", "log-requests-format", "log-requests-target*"),
    *owned("the log writer owns the log", "uvicorn-access-log-exclude-prefixes*"),
    *owned("prompts stay out of files", "export-metrics-to-file!", "export-metrics-to-file-dir"),
    *owned("prompts stay out of files", "debug-tensor-dump-output-folder", "debug-tensor-dump-layers*"),
    *owned("prompts stay out of files", "debug-tensor-dump-input-file", "msprobe-dump-config", "spec-trace-dir"),
    *owned("prompts stay out of files", "watermark-config", "file-storage-path", "enable-response-store!"),
    *owned("readiness is proven by CapyCTL's own probe", "warmups"),
    *owned("the cache would leave the engine", "enable-hierarchical-cache|enable-hicache!", "hicache-host-memory-mode"),
    *owned("the cache would leave the engine", "hicache-ratio", "hicache-size", "hicache-write-policy"),
    *owned("the cache would leave the engine", "hicache-io-backend", "hicache-mem-layout"),
    *owned("the cache would leave the engine", "hicache-host-memory-fraction", "hicache-storage-backend"),
    *owned("the cache would leave the engine", "hicache-storage-prefetch-policy"),
    *owned("the cache would leave the engine", "hicache-storage-backend-extra-config"),
    *owned("the cache would leave the engine", "hicache-storage-prefetch-retry-poll-interval"),
    *owned("the cache would leave the engine", "hicache-storage-prefetch-retry-max-attempts"),
    *owned("the cache would leave the engine", "enable-lmcache!", "lmcache-config-file"),
    *owned("the cache would leave the engine", "enable-flexkv!", "flexkv-config-file", "radix-cache-backend"),
    *owned("the cache would leave the engine", "enable-unified-cache-external-linker!"),
    *owned("the cache would leave the engine", "unified-cache-external-linker-backend"),
    *owned("it imports a module that a file names", "unified-cache-external-linker-config", "forward-hooks"),
    *owned("it writes another checkpoint", "quantize-and-serve!", "modelopt-quant"),
    *owned("it writes another checkpoint", "modelopt-checkpoint-restore-path", "modelopt-checkpoint-save-path"),
    *owned("it writes another checkpoint", "modelopt-export-path"),
    *owned("it deletes the checkpoint", "delete-ckpt-after-loading!"),
    *owned("the weights are the measured directory's", "weight-cache-mode", "weight-cache-socket"),
    *owned("the weights are the measured directory's", "weight-cache-timeout", "modelexpress-config"),
    *owned("the weights are the measured directory's", "checkpoint-engine-wait-weights-before-ready!"),
    *owned("the weights are the measured directory's", "remote-instance-weight-loader-seed-instance-ip"),
    *owned("the weights are the measured directory's", "remote-instance-weight-loader-seed-instance-service-port"),
    *owned("the weights are the measured directory's", "remote-instance-weight-loader-send-weights-group-ports"),
    *owned("the weights are the measured directory's", "remote-instance-weight-loader-backend"),
    *owned("the weights are the measured directory's", "remote-instance-weight-loader-start-seed-via-transfer-engine!"),
    *owned("one engine serves whole requests", "encoder-only!", "language-only!", "encoder-urls*"),
    *owned("one engine serves whole requests", "encoder-register-urls*", "encoder-bootstrap-port"),
    *owned("one engine serves whole requests", "disaggregation-transfer-backend", "disaggregation-bootstrap-port"),
    *owned("one engine serves whole requests", "disaggregation-ib-device", "enable-pd-role-switch!"),
    *owned("the endpoint speaks text", "skip-tokenizer-init!"),
    *owned("the deployment's api decides what is served", "is-embedding!"),
    *owned("an engine runs no tools", "tool-server"),
    *owned("requests could bring templates", "trust-request-chat-template!"),
    *owned("a file of options would go around every check", "config"),
    *owned("the engine would print and end", "help!", "version!"),
)
"""Reserved options that some builds lack; where a build has one, it is compared."""

_GATED = (
    *gated("it loads other weights", "speculative-draft-model-path|speculative-draft-model", paths=True),
    *gated("it loads other weights", "uno-lora-path", "lora-paths*", "kt-weight-path", paths=True),
    *gated("it loads other weights", "speculative-draft-model-revision"),
    *gated("it loads code", "custom-weight-loader*", "enable-custom-logit-processor!"),
    *gated("it states settings that no other option shows", "model-loader-extra-config", "json-model-override-args"),
    *gated("it states settings that no other option shows", "cuda-graph-config", "speculative-adaptive-config"),
    *gated("it states settings that no other option shows", "deepep-config", "dllm-algorithm-config"),
    *gated("it states settings that no other option shows", "radix-eviction-policy-config", "mm-process-config"),
    *gated(
        "it states settings that no other option shows", "hisparse-config|hierarchical-sparse-attention-extra-config"
    ),
    *gated("it reads a file of the host", "chat-template", "completion-template", paths=True),
    *gated("it reads a file of the host", "quantization-param-path", "speculative-token-map", paths=True),
    *gated("it reads a file of the host", "speculative-dspark-sps-table-path", paths=True),
    *gated("it reads a file of the host", "speculative-dspark-confidence-sts-path", paths=True),
    *gated("it reads a file of the host", "speculative-ngram-external-corpus-path", paths=True),
    *gated("it reads a file of the host", "decrypted-config-file", "decrypted-draft-config-file", paths=True),
    *gated("it reads a file of the host", "pdmux-config-path", "init-expert-location", paths=True),
    *gated("it writes files of the host", "download-dir", "ple-offload-dir", paths=True),
    *gated("it sends what the engine does elsewhere", "enable-trace!", "otlp-traces-endpoint", "trace-modules"),
    *gated("it sends what the engine does elsewhere", "enable-forward-pass-metrics!", "forward-pass-metrics-ipc-name"),
    *gated("requests could make the engine call other hosts", "allowed-media-domains*"),
    *gated("prompts would be shared over a network", "enable-mm-global-cache!", "mm-global-cache-backend"),
)

_PASSED = (
    *passed("speculative decoding; such an engine does not park", "speculative-algorithm", "speculative-num-steps"),
    *passed("speculative decoding; such an engine does not park", "speculative-eagle-topk"),
    *passed("speculative decoding; such an engine does not park", "speculative-num-draft-tokens"),
    *passed("sizes the state of hybrid models; CapyCTL then passes none", "max-mamba-cache-size"),
    *passed("sizes the state of hybrid models; CapyCTL then passes none", "mamba-full-memory-ratio"),
    *passed("how the state of hybrid models is kept", "mamba-ssm-dtype", "mamba-radix-cache-strategy"),
    *passed("how the state of hybrid models is kept", "enable-linear-replayssm-spec!"),
    *passed("how answers are shaped", "tool-call-parser", "reasoning-parser", "default-chat-template-kwargs"),
    *passed("how answers are shaped", "hf-chat-template-name", "sampling-defaults", "stream-interval"),
    *passed("how prompts are cached", "disable-radix-cache!", "page-size", "radix-eviction-policy"),
    *passed("how work is scheduled", "enable-mixed-chunk!", "max-prefill-tokens", "schedule-policy"),
    *passed("how work is scheduled", "disable-overlap-schedule!", "schedule-conservativeness", "max-queued-requests"),
    *passed("how work is scheduled", "sleep-on-idle!", "watchdog-timeout"),
    *passed("which batches have graphs", "cuda-graph-max-bs-decode", "cuda-graph-max-bs-prefill"),
    *passed("which batches have graphs", "cuda-graph-bs-decode*", "cuda-graph-bs-prefill*"),
    *passed("which batches have graphs", "disable-decode-cuda-graph!", "disable-prefill-cuda-graph!"),
    *passed("which kernels are used", "attention-backend", "decode-attention-backend", "prefill-attention-backend"),
    *passed("which kernels are used", "grammar-backend", "moe-runner-backend", "linear-attn-backend"),
    *passed("how weights are read", "load-format", "model-impl"),
    *passed("a table on disk; its cache in memory is charged", "ple-offload-backend"),
)

POLICY = OptionPolicy(
    family="sglang",
    rules=(*_TYPED, *UNCONDITIONAL, *IF_PRESENT, *_GATED, *_PASSED),
    prefixes=True,
    equals=True,
)
"""Options of `sglang serve`: prefixes of a reserved name are that name."""

RESERVED_ENV = (
    Reserved("SGLANG_HOST_IP", "addresses follow the deployment's topology"),
    Reserved("HOST_IP", "addresses follow the deployment's topology"),
    Reserved("SGLANG_LOCAL_IP_NIC", "addresses follow the deployment's topology"),
    Reserved("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", "rendezvous of ranks"),
    Reserved("SGLANG_PLUGINS", "no plugin is loaded"),
    Reserved("SGLANG_PLATFORM", "no plugin is loaded"),
    Reserved("SMG_*", "a second server beside the engine"),
    Reserved("SGLANG_RUST_SERVER", "another server, outside the keys"),
    Reserved("SGLANG_GRPC_PORT", "a second listener, outside the keys"),
    Reserved("DUMPER_*", "prompts stay out of files"),
    Reserved("SGLANG_DUMP*", "prompts stay out of files"),
    Reserved("SGLANG_KERNEL_API_*", "prompts stay out of files"),
    Reserved("SGLANG_CUDA_COREDUMP*", "prompts stay out of files"),
    Reserved("SGLANG_TRACE_*", "prompts stay out of files"),
    Reserved("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "/health takes no key, so it runs nothing"),
    Reserved("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "CapyCTL decides what sleeps"),
    Reserved("TMS_*", "CapyCTL decides what sleeps"),
    Reserved("LMCACHE_*", "the cache would leave the engine"),
)
