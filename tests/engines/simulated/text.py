"""What a model says: words that depend on the checkpoint and the prompt alone, so that a canary is stable."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

WORDS = """
a able above across after again air all along also always among and answer any are around as ask at away back
be because been before began being below between big both boy bring but by call came can car carry change city
close cold come could country cut day did different do does done door down draw each earth eat end enough even
every example eye face family far father feel few find first follow food for form found four from gave get
give go good great group grow had hand hard has have he head hear help her here high him his home house how
idea if
""".split()  # noqa: SIM905
FIRST_ID = 1000


class Model:
    """A checkpoint directory, as far as an engine's answers and memory depend on it."""

    def __init__(self, place: str) -> None:
        """Raises: OSError, ValueError when there is no usable config.json."""
        self.place = os.path.realpath(place)
        with open(os.path.join(place, "config.json"), encoding="utf-8") as stream:
            self.config: dict[str, Any] = json.load(stream)
        names = sorted(name for name in os.listdir(place) if name.endswith(".safetensors"))
        self.shards = [(name, os.path.getsize(os.path.join(place, name))) for name in names]
        self.weight_bytes = sum(size for _, size in self.shards)
        identity = json.dumps([self.place, self.config, self.shards], sort_keys=True)
        self.seed = hashlib.sha256(identity.encode()).digest()

    def number(self, name: str, default: int) -> int:
        value = self.config.get(name, self.config.get("text_config", {}).get(name))
        return int(value) if value is not None else default

    @property
    def context(self) -> int:
        return self.number("max_position_embeddings", 4096)

    @property
    def architecture(self) -> str:
        return str((self.config.get("architectures") or ["UnknownForCausalLM"])[0])

    def kv_bytes_per_token(self, cache_dtype: str = "auto") -> int:
        heads = self.number("num_attention_heads", 1)
        kv_heads = self.number("num_key_value_heads", heads)
        head = self.number("head_dim", 0) or self.number("hidden_size", 64) // heads
        kinds = self.config.get("layer_types") or self.config.get("text_config", {}).get("layer_types")
        layers = self.number("num_hidden_layers", 1)
        if kinds:
            layers = sum(kind == "full_attention" for kind in kinds)
        width = 1 if cache_dtype.startswith("fp8") else 2
        return 2 * layers * kv_heads * head * width


def count_tokens(text: str) -> int:
    """A word is a token."""
    return len(text.split())


def _number(*parts: bytes | str | int) -> int:
    joined = b"\0".join(part if isinstance(part, bytes) else str(part).encode() for part in parts)
    return int.from_bytes(hashlib.sha256(joined).digest()[:8], "big")


def answer(seed: bytes, prompt: str, length: int | None, mode: str = "same", variant: int = 0) -> list[tuple[int, str]]:
    """(token id, text) of the whole natural answer; `length` None is 12 to 19 tokens.

    Args:
      mode: what a wake did to the model: same, other, garbage, empty.
    """
    if mode == "empty":
        return []
    if mode == "other":
        seed = hashlib.sha256(seed).digest()
    if length is None:
        length = 12 + _number(seed, prompt, "length") % 8
    tokens = []
    for at in range(length):
        number = _number(seed, prompt, variant, at) % len(WORDS) if mode != "garbage" else -1
        text = "!" if number < 0 else (WORDS[number] if at == 0 else " " + WORDS[number])
        tokens.append((FIRST_ID + number, text))
    return tokens


def embedding(seed: bytes, text: str, size: int = 16) -> list[float]:
    raw = [_number(seed, text, at) / 2**63 - 1 for at in range(size)]
    norm = sum(value * value for value in raw) ** 0.5
    return [round(value / norm, 6) for value in raw]


def share(*parts: str | bytes) -> float:
    """A number in 0..1 that depends on the parts."""
    return _number(*parts) / 2**64
