"""What sizing needs to know of a checkpoint in safetensors files, as a JSON-able dictionary that is stored.

The directory of vLLM, SGLang and TensorFold: `config.json`, weight files with an index when there are
several, a tokenizer's files. Headers are read, tensors never.

Source: engines 5; memory 5.1, 5.4, 5.15.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from capyctl.checkpoints.bounded_json import WrongJson, parse, shown
from capyctl.checkpoints.directory import Listing, ModelFile
from capyctl.checkpoints.layer_shares import shares
from capyctl.checkpoints.model_config import describe
from capyctl.checkpoints.quantization import parameters, quantization_of
from capyctl.checkpoints.reading import read_whole
from capyctl.checkpoints.safetensors import Header, Tensor, read_header
from capyctl.errors import Refusal

CONFIG_FILE = "config.json"
INDEX_SUFFIX = ".safetensors.index.json"
CONFIG_BYTES_MAX = 4 << 20
INDEX_BYTES_MAX = 64 << 20
HEADERS_BYTES_MAX = 256 << 20
TENSORS_MAX = 1 << 20
"""Of all weight files together: a model of a trillion weights has 140 000 tensors in 20 MB of headers."""
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model")
_MODELOPT_FILE = "hf_quant_config.json"
_TABLE = ".ngram_embedding."


def tensor_facts(listing: Listing) -> dict[str, Any]:
    """Read `config.json`, the index and every weight file's header, and put together what sizing needs.

    Returns: `format`, `weight_bytes` (the weight files' sizes), `tensor_bytes`, `weight_files`, `tensors`,
      `parameters` (weights unpacked, a tied head once; None for packed ones of unknown width), `tied_twice_bytes`
      (a head that is stored although it is the embedding), `table_bytes` (of each n-gram table),
      `tokenizer` (whether its files are there), `sharded_bytes`, `layer_count` and `largest_layer_bytes`
      (`layer_shares`), and everything of `model_config.describe`.
    Raises: Refusal `checkpoint_unusable` naming the file that cannot be used or is missing.
    """
    config = read_json(listing, CONFIG_FILE, CONFIG_BYTES_MAX)
    index = _index(listing)
    mapping = None if index is None else _mapped(listing, index)
    names = _unindexed(listing) if mapping is None else tuple(sorted(set(mapping.values())))
    headers = _headers(listing, names)
    if mapping is not None:
        _check_index(mapping, headers, str(index))
    tensors = _distinct(headers)
    shape = describe(config)
    if shape["quantization"] is None and listing.find(_MODELOPT_FILE) is not None:
        _add_modelopt(shape, listing)
    divided = shares(tensors.items())
    twice = _tied_twice(shape, tensors)
    counted = parameters(tensors.items(), int(shape["quantized_bits"]))
    return {
        "format": "safetensors",
        "weight_bytes": sum(_file(listing, name).size_bytes for name in names),
        "tensor_bytes": sum(header.tensor_bytes for header in headers.values()),
        "weight_files": len(names),
        "tensors": len(tensors),
        "parameters": None if counted is None else counted - sum(math.prod(head.shape) for head in twice),
        "tied_twice_bytes": sum(head.size_bytes for head in twice),
        "table_bytes": _tables(tensors),
        "tokenizer": any(listing.find(name) is not None for name in _TOKENIZERS),
        "sharded_bytes": divided.sharded_bytes,
        "layer_count": divided.layers,
        "largest_layer_bytes": divided.largest_layer_bytes,
        **shape,
    }


def _distinct(headers: Mapping[str, Header]) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its name. Raises: Refusal for a name that two files hold."""
    tensors: dict[str, Tensor] = {}
    for file, header in headers.items():
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise Refusal("checkpoint_unusable", f"{file} holds {shown(name)}, which another weight file holds too")
            tensors[name] = tensor
    return tensors


def _add_modelopt(shape: dict[str, Any], listing: Listing) -> None:
    """What ModelOpt says of its weights in a file of its own."""
    said = read_json(listing, _MODELOPT_FILE, CONFIG_BYTES_MAX)
    stated = quantization_of({"quantization_config": said.get("quantization")})
    shape["quantization"] = "modelopt" if stated is None else stated.words
    if stated is not None:
        shape |= {"quantized_bits": stated.bits, "quantized_cache": stated.cache}


def _tied_twice(shape: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Output heads that are stored beside the embedding that they are: engines load one of the two."""
    if shape["tied"] is not True:
        return []
    return [tensor for name, tensor in tensors.items() if name == "lm_head.weight" or name.endswith(".lm_head.weight")]


def _tables(tensors: Mapping[str, Tensor]) -> list[int]:
    """Bytes of each n-gram table, whose shards are tensors of their own. Source: memory 5.3."""
    tables: dict[str, int] = {}
    for name, tensor in tensors.items():
        table, found, _ = name.partition(_TABLE)
        if found:
            tables[table] = tables.get(table, 0) + tensor.size_bytes
    return list(tables.values())


def _unindexed(listing: Listing) -> tuple[str, ...]:
    """Every safetensors file of the top directory, which is what an engine loads without an index.

    Raises: Refusal `checkpoint_unusable` when there is none, or a set is not complete.
    """
    names = [file.path for file in listing.files if file.path.endswith(".safetensors") and "/" not in file.path]
    if not names:
        raise Refusal("checkpoint_unusable", f"{listing.directory} holds no .safetensors file{_hub_hint(listing)}")
    _check_sets(names)
    return tuple(names)


def _headers(listing: Listing, names: Sequence[str]) -> dict[str, Header]:
    """The headers of the weight files, as many as a model may have. Raises: Refusal `checkpoint_unusable`."""
    headers: dict[str, Header] = {}
    left = HEADERS_BYTES_MAX, TENSORS_MAX
    for name in names:
        headers[name] = header = read_header(_file(listing, name))
        left = left[0] - header.header_bytes, left[1] - len(header.tensors)
        if min(left) < 0:
            raise Refusal(
                "checkpoint_unusable",
                f"the headers of {listing.directory} list more than {TENSORS_MAX} tensors, or have more than "
                f"{HEADERS_BYTES_MAX >> 20} MiB",
            )
    return headers


def _index(listing: Listing) -> str | None:
    names = [file.path for file in listing.files if file.path.endswith(INDEX_SUFFIX) and "/" not in file.path]
    usual = f"model{INDEX_SUFFIX}"
    if usual in names:
        return usual
    if len(names) > 1:
        raise Refusal("checkpoint_unusable", f"{listing.directory} holds several indexes: {', '.join(names[:4])}")
    return names[0] if names else None


def _mapped(listing: Listing, index: str) -> dict[str, str]:
    """Tensor name to the file that the index names for it."""
    mapping = read_json(listing, index, INDEX_BYTES_MAX).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise Refusal("checkpoint_unusable", f"{index} has no weight_map")
    if not all(isinstance(name, str) for name in mapping.values()):
        raise Refusal("checkpoint_unusable", f"the weight_map of {index} names something that is no file")
    for name in sorted(set(mapping.values())):
        if PurePosixPath(name).name != name or not name.endswith(".safetensors"):
            raise Refusal("checkpoint_unusable", f"{index} names {shown(name)}, which is no weight file beside it")
        if listing.find(name) is None:
            raise Refusal("checkpoint_unusable", f"{shown(name)} is missing; {index} names it")
    return mapping


def _check_sets(names: Sequence[str]) -> None:
    present, looked = set(names), set()
    for name in names:
        match = _SHARD.match(name)
        if match is None or (match["stem"], match["count"]) in looked:
            continue
        looked.add((match["stem"], match["count"]))
        for number in range(1, int(match["count"]) + 1):
            other = f"{match['stem']}-{number:05}-of-{match['count']}.safetensors"
            if other not in present:
                raise Refusal("checkpoint_unusable", f"{other} is missing; {name} belongs to the same set")


def _check_index(mapping: Mapping[str, str], headers: Mapping[str, Header], index: str) -> None:
    for tensor, name in mapping.items():
        if tensor not in headers[name].tensors:
            raise Refusal("checkpoint_unusable", f"{name} does not hold {shown(tensor)}, which {index} says it does")


def _hub_hint(listing: Listing) -> str:
    """A word for who named a cache of the hub instead of the snapshot in it."""
    found = next((file.path for file in listing.files if file.path.startswith("snapshots/")), None)
    return "" if found is None else f"; it is a cache of the hub, name {'/'.join(found.split('/')[:2])} in it"


def _file(listing: Listing, name: str) -> ModelFile:
    found = listing.find(name)
    if found is None:
        raise Refusal("checkpoint_unusable", f"{name} is missing in {listing.directory}{_hub_hint(listing)}")
    return found


def read_json(listing: Listing, name: str, most: int) -> dict[str, Any]:
    """A JSON object of the checkpoint, at most `most` bytes of it.

    Raises: Refusal `checkpoint_unusable` naming the file.
    """
    raw = read_whole(_file(listing, name), most)
    try:
        parsed = parse(raw)
    except WrongJson as wrong:
        raise Refusal("checkpoint_unusable", f"{name} {wrong}") from None
    if not isinstance(parsed, dict):
        raise Refusal("checkpoint_unusable", f"{name} is not a JSON object")
    return parsed
