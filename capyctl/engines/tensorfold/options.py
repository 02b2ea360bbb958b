"""TensorFold's options and variables by class, with the reason. Its parser abbreviates.

Source: engines 4.3, 8.1.
"""

from __future__ import annotations

from capyctl.engines.environment import Reserved
from capyctl.engines.options import OptionClass, OptionPolicy, OptionRule


def _typed(field: str, *names: str) -> OptionRule:
    return OptionRule(names=names, kind=OptionClass.TYPED, why=f"stated by {field}", field=field)


def _owned(why: str, *names: str) -> OptionRule:
    return OptionRule(names=names, kind=OptionClass.RESERVED, why=why)


def _gated(why: str, *names: str, paths: bool = False) -> OptionRule:
    return OptionRule(names=names, kind=OptionClass.APPROVAL, why=why, paths=paths)


def _passed(why: str, *names: str) -> OptionRule:
    return OptionRule(names=names, kind=OptionClass.EXTRA, why=why)


_TYPED = (
    _typed("engine_config.kv_cache_dtype", "--kv-dtype"),
    _typed("engine_config.tensorfold.max_tokens", "--max-tokens"),
    _typed("engine_config.tensorfold.thinking", "--thinking"),
)

_OWNED = (
    _owned("engines listen on loopback, on a leased port", "--host"),
    _owned("engines listen on loopback, on a leased port", "--port"),
    _owned("the first route is the served name", "--name"),
    _owned("one engine serves one model", "--alias"),
    _owned("devices follow the ledger's claims", "--backend"),
    _owned("engine_config.context_length states it", "--context"),
    _owned("ranks follow the topology", "--tp"),
    _owned("ranks follow the topology", "--rank"),
    _owned("rendezvous of ranks", "--master"),
    _owned("rendezvous of ranks", "--master-port"),
    _owned("prompts stay out of files", "--snapshot-dir"),
    _owned("the engine fetches nothing", "--no-update-check"),
    _owned("the engine is reached over loopback alone, without a key", "--api-key"),
    _owned("the engine is reached over loopback alone, without a key", "--api-key-file"),
    _owned("the engine is reached over loopback alone, without a key", "--metrics-open"),
    _owned("the engine would print and end", "--help"),
    _owned("the engine would print and end", "--version"),
)

_GATED = (
    _gated("it loads other weights", "--drafter", paths=True),
    _gated("it loads kernels of another origin", "--lane-kernels"),
    _gated("requests could make the engine fetch addresses", "--vision-urls"),
)

_EXTRA = (
    _passed("streams; or engine_config.max_concurrent_requests, not both", "--parallel"),
    _passed("no drafts; for a model that has no drafter family", "--no-drafts"),
    _passed("how drafts are made", "--drafter-bits"),
    _passed("how drafts are made", "--mtp-drafts"),
    _passed("how drafts are made", "--mtp-confidence"),
    _passed("how answers are shaped", "--thinking-budget"),
    _passed("how answers are shaped", "--reasoning-effort"),
    _passed("kept prompts; within the declared memory", "--prompt-cache-gib"),
    _passed("kept prompts; within the declared memory", "--checkpoint-slots"),
    _passed("kept prompts; within the declared memory", "--spill-gib"),
    _passed("kept prompts; within the declared memory", "--max-snapshots"),
    _passed("speed against precision", "--prefill-fp8"),
    _passed("speed against precision", "--precision"),
    _passed("images in requests", "--vision"),
    _passed("a table on disk; its cache of 1 GiB is part of the declared memory", "--ple-on-ssd"),
    _passed("which names give way", "--name-priority"),
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
