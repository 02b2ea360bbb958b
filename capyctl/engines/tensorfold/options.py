"""TensorFold's options and variables by class, with the reason. Its parser abbreviates.

Source: engines 4.3, 8.1.
"""

from __future__ import annotations

from capyctl.engines.environment import Reserved
from capyctl.engines.option_rows import gated, owned, passed, typed
from capyctl.engines.options import OptionPolicy

_TYPED = (
    *typed("engine_config.kv_cache_dtype", "kv-dtype"),
    *typed("engine_config.tensorfold.max_tokens", "max-tokens"),
    *typed("engine_config.tensorfold.thinking", "thinking?"),
    *typed("engine_config.context_length", "context"),
)

_OWNED = (
    *owned("engines listen on loopback, on a leased port", "host", "port"),
    *owned("the first route is the served name", "name"),
    *owned("one engine serves one model under one name", "alias"),
    *owned("devices follow the ledger's claims", "backend"),
    *owned("ranks follow the topology", "tp", "rank", "master", "master-port"),
    *owned("prompts stay out of files", "snapshot-dir"),
    *owned("the engine fetches nothing", "no-update-check!"),
    *owned("the engine is reached over loopback alone, without a key", "api-key", "api-key-file", "metrics-open!"),
    *owned("the engine would print and end", "help|-h!", "version!"),
)

_GATED = (
    *gated("it loads other weights", "drafter", paths=True),
    *gated("it loads kernels of another origin", "lane-kernels"),
    *gated("requests could make the engine fetch addresses", "vision-urls!"),
)

_EXTRA = (
    *passed("streams; or engine_config.max_concurrent_requests, not both", "parallel"),
    *passed("no drafts; for a model that has no drafter family", "no-drafts!"),
    *passed("how drafts are made", "drafter-bits", "mtp-drafts", "mtp-confidence"),
    *passed("how answers are shaped", "thinking-budget", "reasoning-effort"),
    *passed("kept prompts; within the declared memory", "prompt-cache-gib", "checkpoint-slots", "spill-gib"),
    *passed("kept prompts; within the declared memory", "max-snapshots"),
    *passed("speed against precision", "prefill-fp8?", "precision"),
    *passed("images in requests", "vision!", "vision-max-images"),
    *passed("a table on disk; its cache of 1 GiB is part of the declared memory", "ple-on-ssd!"),
    *passed("which names give way", "name-priority"),
    *passed("a default that requests may override", "temperature", "top-p", "top-k", "min-p"),
)

POLICY = OptionPolicy(
    family="tensorfold",
    rules=(*_TYPED, *_OWNED, *_GATED, *_EXTRA),
    prefixes=True,
    equals=True,
)
"""Options of `tensorfold serve`; any prefix of a reserved name is that name."""

RESERVED_ENV = (
    Reserved("TENSORFOLD_API_KEY", "the engine is reached over loopback alone, without a key"),
    Reserved("TENSORFOLD_CUDA_MEMORY_LIMIT_GB", "memory follows the ledger's charge"),
    Reserved("TORCH_EXTENSIONS_DIR", "a private directory of this family"),
    Reserved("TF_COMM_BACKEND", "transport between ranks"),
    Reserved("TF_NCCL_LIB", "transport between ranks"),
    Reserved("TENSORFOLD_NO_UPDATE_CHECK", "the engine fetches nothing"),
    Reserved("HF_HUB_OFFLINE", "the engine fetches nothing"),
    Reserved("TRANSFORMERS_OFFLINE", "the engine fetches nothing"),
)
