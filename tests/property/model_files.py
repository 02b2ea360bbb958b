"""Checkpoints of real architectures as sparse files: true headers, and holes where the weights would be.

A model of a terabyte takes some megabytes of header and no block of disk besides.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from model_families import tensors_of
from model_tensors import Tensors
from model_zoo import Model

BITS = {"F32": 32, "I64": 64, "I32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "U8": 8}


def write_model(model: Model, place: Path) -> Path:
    """The directory of a model: `config.json`, its weight files and, for several, their index."""
    place.mkdir(parents=True)
    config = {name: value for name, value in model.config.items() if not name.startswith("_")}
    if model.quantization is not None:
        config["quantization_config"] = model.quantization
    (place / "config.json").write_text(json.dumps(config))
    (place / "tokenizer.json").write_text("{}")
    tensors = tensors_of(model.config, model.pack)
    if model.files == 1:
        write_tensors(place / "model.safetensors", tensors)
        return place
    each = -(-len(tensors) // model.files)
    names, mapping = list(tensors), {}
    for number in range(model.files):
        file = f"model-{number + 1:05}-of-{model.files:05}.safetensors"
        mine = {name: tensors[name] for name in names[number * each : (number + 1) * each]}
        write_tensors(place / file, mine)
        mapping |= dict.fromkeys(mine, file)
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapping}))
    return place


def write_tensors(path: Path, tensors: Tensors) -> None:
    """One weight file whose data is a hole."""
    at, entries = 0, ['"__metadata__":{"format":"pt"}']
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * BITS[dtype] // 8
        entries.append(f'"{name}":{{"dtype":"{dtype}","shape":{list(shape)},"data_offsets":[{at},{end}]}}')
        at = end
    raw = f"{{{','.join(entries)}}}".encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        stream.truncate(8 + len(raw) + at)
