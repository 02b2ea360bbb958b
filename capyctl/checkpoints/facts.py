"""What sizing needs to know of a GGUF model, as a JSON-able dictionary that travels and is stored.

Facts are measured where the files are; the arithmetic over them is pure and happens anywhere
(`sizing`). A model whose cache the plain formula does not describe carries the reason here.

Source: memory 5.12, 5.15.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from capyctl.checkpoints.bounded_json import shown
from capyctl.checkpoints.config_values import DIMENSION_MAX, TOKENS_MAX
from capyctl.checkpoints.directory import GgufPick, Listing
from capyctl.checkpoints.gguf import Header, Value, read_header
from capyctl.errors import Refusal

LAYERS_MAX = 1024
_ARCHITECTURE = re.compile(r"[A-Za-z0-9_.-]{1,64}")

# Architectures whose memory is not a plain per-token cache in each layer. Keys of the header are looked at
# as well, so that a new architecture with a known feature is caught without a row here.
_RECURRENT = frozenset({
    "mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "jamba", "bamba", "falcon-h1", "granitehybrid",
    "nemotron_h", "nemotron_h_moe", "plamo2", "lfm2", "lfm2moe", "qwen3next", "qwen35", "qwen35moe", "kimi-linear",
    "minimax-text",
})  # fmt: skip
_ENCODERS = frozenset({
    "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert",
    "t5", "t5encoder", "gemma-embedding", "wavtokenizer-dec",
})  # fmt: skip
_DIFFUSION = frozenset(["dream", "llada", "llada-moe", "rnd1"])
_REASONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("recurrent layers", ("ssm.", "wkv.", "shortconv.", "full_attention_interval", "attention.recurrent_layers")),
    ("latent attention (MLA)", ("attention.key_length_mla", "attention.kv_lora_rank")),
    ("an attention indexer", ("attention.indexer.",)),
    ("sliding-window attention", ("attention.sliding_window", "attention.chunk_size")),
)


def gguf_facts(listing: Listing, pick: GgufPick) -> dict[str, Any]:
    """Read the headers of the picked files and put together what sizing needs.

    Returns: `format`, `model_file`, `projector_file`, `weight_bytes` (files of the pick), `architecture`,
      `context_trained`, `layers` (those with a cache), `kv_heads` per layer, `key_length`, `value_length`,
      `not_derivable` (None, or why the cache cannot be derived), and figures for status, `parameters`
      among them.
    Raises: Refusal `checkpoint_unusable` for a header that cannot be used.
    """
    headers = {name: _header(listing, name) for name in pick.weights}
    header = headers[pick.model]
    if len(pick.shards) > 1:
        _check_split(headers, pick)
    architecture = header.text("general.architecture") or ""
    if not architecture:
        raise Refusal("checkpoint_unusable", f"{pick.model} does not say its architecture")
    if not _ARCHITECTURE.fullmatch(architecture):
        raise Refusal("checkpoint_unusable", f"{pick.model} names the architecture {shown(architecture)}")
    if architecture == "clip":
        raise Refusal("checkpoint_unusable", f"{pick.model} is a projector, not a model")
    sizes = {name: file.size_bytes for name in pick.weights if (file := listing.find(name)) is not None}
    facts: dict[str, Any] = {
        "format": "gguf",
        "model_file": pick.model,
        "shards": len(pick.shards),
        "projector_file": pick.projector,
        "weight_bytes": sum(sizes.values()),
        "tensor_bytes": sum(headers[name].tensor_bytes for name in pick.shards),
        "architecture": architecture,
        "name": "".join(sign for sign in (header.text("general.name") or "")[:128] if sign.isprintable()),
        "parameters": sum(math.prod(tensor.shape) for name in pick.shards for tensor in headers[name].tensors),
        "context_trained": _number(header, f"{architecture}.context_length", TOKENS_MAX),
        "chat_template": isinstance(header.metadata.get("tokenizer.chat_template"), str),
    }
    return facts | _cache_shape(header, architecture)


def _header(listing: Listing, name: str) -> Header:
    file = listing.find(name)
    if file is None:
        raise Refusal("checkpoint_unusable", f"{name} is not in {listing.directory}")
    return read_header(file)


def _check_split(headers: Mapping[str, Header], pick: GgufPick) -> None:
    for number, name in enumerate(pick.shards):
        said = (headers[name].number("split.no"), headers[name].number("split.count"))
        if said != (number, len(pick.shards)):
            what = "does not say which shard it is"
            if said[0] is not None and said[1] is not None:
                what = f"says that it is shard {said[0] + 1} of {said[1]}"
            raise Refusal("checkpoint_unusable", f"{name} {what}, and its name says {number + 1} of {len(pick.shards)}")


def _cache_shape(header: Header, architecture: str) -> dict[str, Any]:
    """The per-layer shape of the cache, or the reason why there is none to compute."""
    reason = _not_derivable(header, architecture)
    layers = _number(header, f"{architecture}.block_count") or 0
    layers -= _number(header, f"{architecture}.nextn_predict_layers") or 0  # MTP heads keep no cache of their own here
    layers -= _number(header, f"{architecture}.attention.shared_kv_layers") or 0  # they read another layer's cache
    heads = header.metadata.get(f"{architecture}.attention.head_count")
    kv_heads = header.metadata.get(f"{architecture}.attention.head_count_kv", heads)
    blank = {"kv_heads": [], "key_length": 0, "value_length": 0}
    if reason is not None:
        return {"layers": max(layers, 0), "not_derivable": reason, **blank}
    per_layer = _per_layer(kv_heads, layers)
    head_length = _head_length(header, architecture, heads)
    key = _number(header, f"{architecture}.attention.key_length") or head_length
    value = _number(header, f"{architecture}.attention.value_length") or head_length
    if layers <= 0 or layers > LAYERS_MAX or per_layer is None or not key or not value or not any(per_layer):
        return {"layers": max(layers, 0), "not_derivable": "an incomplete description of its attention", **blank}
    shape = {"kv_heads": per_layer, "key_length": key, "value_length": value}
    return {"layers": layers, "not_derivable": None, **shape}


def _number(header: Header, key: str, most: int = DIMENSION_MAX) -> int | None:
    """A dimension that a model may have: nothing that is computed from it overflows."""
    number = header.number(key)
    return number if number is not None and number <= most else None


def _not_derivable(header: Header, architecture: str) -> str | None:
    if architecture in _ENCODERS or f"{architecture}.pooling_type" in header.metadata:
        return "no decoder cache (an embedding or encoder model)"
    if header.metadata.get(f"{architecture}.attention.causal") is False:
        return "no decoder cache (an embedding or encoder model)"
    if architecture in _DIFFUSION or any(key.startswith("diffusion.") for key in header.metadata):
        return "no causal cache (a diffusion model)"
    if architecture in _RECURRENT:
        return "recurrent layers"
    own = [(key, value) for key, value in header.metadata.items() if key.startswith(f"{architecture}.")]
    for reason, names in _REASONS:
        for name in names:
            if any(_says(key, value, f"{architecture}.{name}") for key, value in own):
                return reason
    return None


def _says(key: str, value: Value, wanted: str) -> bool:
    """Whether `key` is the wanted one (or below it, for a wanted prefix) and states something but zero."""
    named = key.startswith(wanted) if wanted.endswith(".") else key == wanted
    return named and value not in (0, 0.0, False)


def _per_layer(kv_heads: Value | None, layers: int) -> list[int] | None:
    if isinstance(kv_heads, int) and not isinstance(kv_heads, bool):
        numbers: tuple[Any, ...] = (kv_heads,) * max(layers, 0) if layers <= LAYERS_MAX else ()
    elif isinstance(kv_heads, tuple):
        numbers = kv_heads[: max(layers, 0)]
    else:
        return None
    good = len(numbers) == layers and all(isinstance(n, int) and 0 <= n <= 1 << 20 for n in numbers)
    return [int(number) for number in numbers] if good else None


def _head_length(header: Header, architecture: str, heads: Value | None) -> int:
    """Embedding length over the head count; 0 when the header does not say."""
    embedding = _number(header, f"{architecture}.embedding_length") or 0
    if isinstance(heads, tuple):
        heads = max((head for head in heads if isinstance(head, int)), default=0)
    if not isinstance(heads, int) or isinstance(heads, bool) or heads <= 0:
        return 0
    return embedding // heads
