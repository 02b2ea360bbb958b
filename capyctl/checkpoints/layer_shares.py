"""Which bytes of a checkpoint ranks share out among themselves, and which every rank keeps whole.

Judged by the tensors' names and dimensions alone: what lies in a numbered decoder layer and has two dimensions is
split; what a router, a latent projection or an indexer needs is not, nor what lies outside the layers. A name that
nobody knows counts as kept whole, so a share is never too small.

Source: memory 5.2.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

import attrs

from capyctl.checkpoints.safetensors import Tensor

# Everything before a decoder layer's number, as model classes nest themselves. Towers and heads for speculation
# have words of their own (`visual.blocks.3.`, `mtp.layers.0.`), which are not among these; one family calls its
# decoder an encoder.
_LAYER = re.compile(
    r"(?:(?:base_model|model|language_model|text_model|llm|thinker|transformer|backbone|decoder|gpt_neox)\.)*"
    r"(?:(?<=transformer\.)encoder\.)?(?:layers|h|blocks)\.(\d{1,4})\."
)
# Routers, the gate of shared experts, low-rank projections of latent attention, and what an indexer has.
_WHOLE = re.compile(
    r"\.(?:gate|router|shared_expert_gate|indexer|compressor|fused_qkv_a_proj_with_mqa|kv_a_proj_with_mqa"
    r"|[a-z]{1,8}_a_proj|wq_a|wkv_a|wkv)\."
)


@attrs.frozen(kw_only=True)
class Shares:
    """What tensor and pipeline parallelism divide. Bytes of `largest_layer` are those of its split tensors."""

    sharded_bytes: int
    layers: int
    largest_layer_bytes: int


def shares(tensors: Iterable[tuple[str, Tensor]]) -> Shares:
    """The shares of a checkpoint; all zero for one without numbered layers, of which each rank then keeps all."""
    per_layer: dict[int, int] = defaultdict(int)
    for name, tensor in tensors:
        match = _LAYER.match(name)
        if match is None:
            continue
        split = len(tensor.shape) > 1 and _WHOLE.search(name, match.end() - 1) is None
        per_layer[int(match[1])] += tensor.size_bytes if split else 0
    return Shares(
        sharded_bytes=sum(per_layer.values()),
        layers=len(per_layer),
        largest_layer_bytes=max(per_layer.values(), default=0),
    )
