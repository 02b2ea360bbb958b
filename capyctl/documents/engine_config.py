"""`engine_config:` of a deployment: typed wishes every family understands, a block per family, raw words.

Which family reads which field is a table here, so that a field an engine would ignore is refused
when it is written, not discovered in a log. Source: config 7.3, engines 10.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from capyctl.documents import strict
from capyctl.documents.scalars import Argument, EnvName, EnvValue, GgufPath
from capyctl.documents.strict import Wrong, no_more_than
from capyctl.units import Size

FAMILIES: Final = ("vllm", "sglang", "tensorfold", "llamacpp")
LLAMACPP_KV_TYPES: Final = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
COUNT_MAX: Final = 2**31 - 1


@attrs.frozen(kw_only=True)
class Memory:
    """What the engine may take on its first domain; absent figures are derived from the checkpoint."""

    request: Size | None = None
    kv_cache: Size | None = None
    startup: Size | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("request", "kv_cache", "startup"):
            size = getattr(self, name)
            if size is not None and size.bytes == 0:
                raise Wrong((name,), "is 0B; leave the field out to have it derived")
        if self.startup is not None and self.request is not None and self.startup < self.request:
            raise Wrong(("startup",), f"is {self.startup}; a start needs at least memory.request, {self.request}")
        if self.kv_cache is not None and self.request is not None and self.kv_cache >= self.request:
            raise Wrong(
                ("kv_cache",), f"is {self.kv_cache}, which leaves no room for weights in memory.request, {self.request}"
            )
        if self.kv_cache is not None and self.startup is not None and self.kv_cache >= self.startup:
            raise Wrong(
                ("kv_cache",), f"is {self.kv_cache}, which leaves no room for weights in memory.startup, {self.startup}"
            )


@attrs.frozen(kw_only=True)
class Vllm:
    """What vLLM alone understands."""

    block_size_tokens: int | None = attrs.field(default=None, validator=strict.within(1, COUNT_MAX))
    max_num_batched_tokens: int | None = attrs.field(default=None, validator=strict.within(1, COUNT_MAX))
    safetensors_load_strategy: Literal["eager", "lazy"] | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"


@attrs.frozen(kw_only=True)
class Sglang:
    """What SGLang alone understands."""

    max_total_tokens: int | None = attrs.field(default=None, validator=strict.within(1, COUNT_MAX))
    chunked_prefill_size: int | None = attrs.field(default=None, validator=strict.within(-1, COUNT_MAX))
    tokenizer_workers: int | None = attrs.field(default=None, validator=strict.within(1, 1024))
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __attrs_post_init__(self) -> None:
        if self.chunked_prefill_size == 0:
            raise Wrong(("chunked_prefill_size",), "is 0; state a number of tokens, or -1 to turn it off")


@attrs.frozen(kw_only=True)
class Tensorfold:
    """What TensorFold alone understands."""

    max_tokens: int | None = attrs.field(default=None, validator=strict.within(1, COUNT_MAX))
    thinking: str | None = None


@attrs.frozen(kw_only=True)
class Llamacpp:
    """What llama.cpp alone understands. Absent file names are found in the model's directory."""

    n_gpu_layers: int | Literal["all"] = "all"
    gguf_file: GgufPath | None = None
    mmproj_file: GgufPath | None = None


@attrs.frozen(kw_only=True)
class EngineConfig:
    """How the engine is to run. What is absent is the engine's or the checkpoint's to say."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    context_length: int | None = attrs.field(default=None, validator=strict.within(1, COUNT_MAX))
    max_concurrent_requests: int | None = attrs.field(default=None, validator=strict.within(1, 65_536))
    cuda_graphs: bool | None = None
    language_model_only: bool = False
    trust_remote_code: bool = False
    memory: Memory = attrs.field(factory=Memory)
    env: Mapping[EnvName, EnvValue] = attrs.field(factory=dict, validator=no_more_than(64))
    accept_extra_args: bool = False
    extra_args: tuple[Argument, ...] = attrs.field(default=(), validator=no_more_than(256))
    vllm: Vllm | None = None
    sglang: Sglang | None = None
    tensorfold: Tensorfold | None = None
    llamacpp: Llamacpp | None = None

    def __attrs_post_init__(self) -> None:
        if self.extra_args and not self.accept_extra_args:
            raise Wrong(("extra_args",), "needs accept_extra_args: true beside it")
        for name in ("quantization", "kv_cache_dtype"):
            word = getattr(self, name)
            if word is not None and (not word or len(word) > 64 or not word.isprintable() or " " in word):
                raise Wrong((name,), "expected the engine's own word")

    def check_family(self, family: str) -> None:
        """Refuse what `family` would not read. Raises Wrong."""
        for other in FAMILIES:
            if other != family and getattr(self, other) is not None:
                raise Wrong((other,), f"is for {other}; this deployment runs on {family}")
        for name in _REFUSED.get(family, ()):
            if getattr(self, name) is not None:
                raise Wrong((name,), f"is not read by {family}; leave it out")
        for name in _REFUSED_WHEN_TRUE.get(family, ()):
            if getattr(self, name):
                raise Wrong((name,), f"is not possible on {family}; leave it out")
        if family == "tensorfold" and self.context_length is None:
            raise Wrong(("context_length",), "is required on tensorfold")
        if family in ("tensorfold", "custom"):
            for name in ("request", "kv_cache", "startup"):
                if getattr(self.memory, name) is not None:
                    raise Wrong(("memory", name), f"is not read by {family}; state `resources` instead")
        if family == "llamacpp" and self.kv_cache_dtype not in (None, *LLAMACPP_KV_TYPES):
            allowed = ", ".join(LLAMACPP_KV_TYPES)
            raise Wrong(
                ("kv_cache_dtype",), f"{strict.shown(self.kv_cache_dtype)} is not allowed; expected one of {allowed}"
            )


_REFUSED: Final = {
    "tensorfold": ("dtype", "quantization", "cuda_graphs"),
    "llamacpp": ("dtype", "quantization", "cuda_graphs"),
    # Nobody tells its program: what it should know goes into the manifest, or into extra_args.
    "custom": (
        "dtype",
        "quantization",
        "cuda_graphs",
        "kv_cache_dtype",
        "context_length",
        "max_concurrent_requests",
    ),
}
_REFUSED_WHEN_TRUE: Final = {
    "tensorfold": ("language_model_only", "trust_remote_code"),
    "llamacpp": ("language_model_only", "trust_remote_code"),
    "custom": ("language_model_only", "trust_remote_code"),
}


def _layers(value: Any, _: Any) -> Any:
    if value == "all" or (type(value) is int and 0 <= value <= 100_000):
        return value
    raise Wrong((), f"{strict.shown(value)} is not allowed; expected a number of layers from 0, or all")


strict.register(int | Literal["all"], _layers)
