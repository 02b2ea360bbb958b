"""What one rank holds of a model that is split over several cards or machines. Pure.

An engine splits the matrices inside the numbered layers over the ranks of tensor parallelism, and whole layers over
the stages of pipeline parallelism; everything else is on every rank. Sums are of the rank that holds most.

Source: memory 5.2, 6.1, 17 (M11).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from capyctl.documents.deployment import Topology

WHOLE_PERCENT = 10
"""What is kept whole of a model whose headers say nothing of its tensors, percent of the weights."""


@attrs.frozen(kw_only=True)
class Tensors:
    """How a checkpoint's bytes lie in its layers: what the engines split, and the largest layer. From headers."""

    sharded_bytes: int
    layer_count: int
    largest_layer_bytes: int


def tensors_of(facts: Mapping[str, Any]) -> Tensors | None:
    """What the headers say (`layer_shares`); None when they were not read, or contradict themselves."""
    figures = [facts.get(name) for name in ("sharded_bytes", "layer_count", "largest_layer_bytes")]
    if any(type(figure) is not int or figure < 0 for figure in figures):
        return None
    sharded, layers, largest = (int(figure or 0) for figure in figures)
    if sharded and not layers:
        return None
    return Tensors(sharded_bytes=sharded, layer_count=layers, largest_layer_bytes=largest)


def share(weights: int, topology: Topology, tensors: Tensors | None) -> int:
    """Bytes of the weights that one rank holds: all of them for a single one, and never less than an even part.

    Args:
      weights: W, all weight files and the drafter's; bytes.
      tensors: None for weights whose layers are not known: a tenth is kept whole.
    """
    ranks, stages = topology.tensor_parallel, topology.pipeline_parallel
    if tensors is None:
        replicated = -(-weights * WHOLE_PERCENT // 100)
        return _ceil(weights - replicated, ranks * stages) + replicated
    sharded = min(tensors.sharded_bytes, weights)
    # Layers that add up to more than the largest one says would else leave a stage too small.
    most_layers = _ceil(tensors.layer_count, stages) * tensors.largest_layer_bytes
    stage = sharded if stages == 1 else min(sharded, max(most_layers, _ceil(sharded, stages)))
    return _ceil(stage, ranks) + weights - sharded


def cached_values(facts: Mapping[str, Any], topology: Topology) -> int:
    """Cached values per token on one rank, where the facts have their sum alone. Latent attention is not split."""
    values = int(facts.get("cache_values") or 0)
    heads = facts.get("kv_heads")
    if facts.get("attention") != "latent" and type(heads) is int and heads > 0:
        values = _ceil(values * max(1, _ceil(heads, topology.tensor_parallel)), heads)
    return values


def stage_layers(facts: Mapping[str, Any], topology: Topology) -> int | None:
    """The layers of the largest stage; None where one stage has them all, or their number is not known."""
    layers = facts.get("layers")
    if topology.pipeline_parallel == 1 or type(layers) is not int or layers <= 0:
        return None
    return _ceil(layers, topology.pipeline_parallel)


def of_stage(amount: int, layers: int, facts: Mapping[str, Any], topology: Topology) -> int:
    """The part of an amount of `layers` like layers that the largest stage may hold: all of them, if it has room."""
    most = stage_layers(facts, topology)
    return amount if most is None or layers <= 0 else _ceil(amount * min(layers, most), layers)


def _ceil(amount: int, parts: int) -> int:
    return -(-amount // parts)
