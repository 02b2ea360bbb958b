"""Directories of safetensors: what their headers must be, what is measured of them, and what is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capyctl.checkpoints.directory import file_at
from capyctl.checkpoints.safetensors import read_header
from capyctl.checkpoints.store import Checkpoint, CheckpointStore
from capyctl.errors import CapyError, Refusal

from .tensor_files import QWEN, header, write_checkpoint, write_file

ONE = {"a": ("F16", [2, 3], 12)}


def document(engine: str = "sglang", **more: Any) -> dict[str, Any]:
    return {"name": "m", "engine": engine, "model": "m", **more}


def measure(directory: Path, engine: str = "sglang", **more: Any) -> Checkpoint:
    return CheckpointStore(None, directory.parent).measure(directory, document(engine, **more))


def refused(directory: Path, *named: str) -> None:
    with pytest.raises(Refusal) as caught:
        measure(directory)
    assert caught.value.code == "checkpoint_unusable"
    assert "\n" not in caught.value.message
    for word in named:
        assert word in caught.value.message


# --- headers ---------------------------------------------------------------------------------------


def test_a_header_gives_types_shapes_and_bytes(tmp_path: Path) -> None:
    place = write_file(
        tmp_path / "x.safetensors", {**ONE, "b": ("F4", [4], 2), "c": ("F32", [], 4)}, __metadata__={"a": "b"}
    )
    found = read_header(file_at(place))
    assert found.tensor_bytes == 18
    assert found.tensors["a"].shape == (2, 3)
    assert found.tensors["c"].shape == ()


def entry(dtype: Any = "U8", shape: Any = (1,), offsets: Any = (0, 1)) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


@pytest.mark.parametrize(
    ("entries", "data", "words"),
    [
        (entry(dtype="Q9"), 1, "unknown type"),
        (entry(shape=(2,)), 1, "by its shape"),
        (entry(shape=(-1,)), 1, "no usable shape"),
        (entry(shape=(True,)), 1, "no usable shape"),
        (entry(shape=(1 << 62, 1 << 62)), 1, "larger than any file"),
        (entry(dtype="F4", shape=(1,)), 1, "does not end on a byte"),
        (entry(offsets=(1, 2)), 2, "a hole before"),
        (entry() | {"y": entry()["x"]}, 1, "an overlap at"),
        (entry(), 2, "1 bytes follow its last tensor"),
        (entry(shape=(9,), offsets=(0, 9)), 4, "still being downloaded"),
        ({"x": {"dtype": "U8", "shape": [1]}}, 1, "does not state"),
        ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
    ],
)
def test_a_header_that_does_not_add_up_is_refused(
    tmp_path: Path, entries: dict[str, Any], data: int, words: str
) -> None:
    text = json.dumps(entries).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    with pytest.raises(Refusal, match=words) as caught:
        read_header(file_at(tmp_path / "x.safetensors"))
    assert caught.value.code == "checkpoint_unusable"
    assert "x.safetensors" in caught.value.message


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "fewer than its length field"),
        (struct.pack("<Q", 100_000_001), "at most 100000000"),
        (struct.pack("<Q", 50) + b"{}", "ends after 2"),
        (struct.pack("<Q", 3) + b" {}", "does not begin with"),
        (struct.pack("<Q", 3) + b"{]}", "not JSON"),
        (struct.pack("<Q", 4) + b'{"\xff"', "not UTF-8"),
        (struct.pack("<Q", 12) + b'{"a":1,"a":2', "not JSON"),
        (struct.pack("<Q", 13) + b'{"a":1,"a":2}', "names 'a' twice"),
        (struct.pack("<Q", 9) + b'{"a":NaN}', "NaN"),
        (struct.pack("<Q", 40_005) + b'{"a":' + b"[" * 20_000 + b"]" * 20_000, "deeply|not JSON"),
    ],
)
def test_a_header_that_is_none_is_refused(tmp_path: Path, raw: bytes, words: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(Refusal, match=words):
        read_header(file_at(tmp_path / "x.safetensors"))


# --- directories -----------------------------------------------------------------------------------


def test_a_checkpoint_says_its_weights_and_its_shape(tmp_path: Path) -> None:
    found = measure(write_checkpoint(tmp_path / "m"))
    assert found.weight_bytes == (tmp_path / "m" / "model.safetensors").stat().st_size
    assert found.facts["tensor_bytes"] == 4096
    assert (found.facts["model_type"], found.facts["context_trained"]) == ("qwen3", 512)
    assert found.facts["cache_values"] == 2 * 2 * (32 + 32)
    assert json.loads(json.dumps(found.facts)) == found.facts
    for engine in ("vllm", "tensorfold"):
        more = {"resources": {"gpu": "1GiB", "ram": "1GiB"}, "engine_config": {"context_length": 512}}
        assert measure(tmp_path / "m", engine, **(more if engine == "tensorfold" else {})).digest == found.digest


def test_the_index_decides_which_files_are_weights(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m")
    for number in (1, 2):
        write_file(directory / f"model-0000{number}-of-00002.safetensors", {f"w{number}": ("U8", [100], 100)})
    index = {"weight_map": {f"w{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert measure(directory).facts["tensor_bytes"] == 200
    index["weight_map"]["w3"] = "model-00001-of-00002.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(directory, "model-00001-of-00002.safetensors", "w3")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda m: (m / "config.json").unlink(), "config.json"),
        (lambda m: (m / "config.json").write_text("["), "config.json"),
        (lambda m: (m / "config.json").write_text("[]"), "config.json"),
        (lambda m: (m / "model.safetensors").unlink(), "no .safetensors file"),
        (lambda m: (m / "model.safetensors").write_bytes(b"12"), "model.safetensors"),
        (lambda m: (m / "model.safetensors").rename(m / "model-00001-of-00002.safetensors"), "model-00002-of-00002"),
        (lambda m: (m / "model.safetensors.index.json").write_text("{}"), "model.safetensors.index.json"),
        (
            lambda m: (m / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../x.safetensors"}}'),
            "../x",
        ),
        (lambda m: (m / "model.safetensors.index.json").write_text('{"weight_map": {"w": "x.safetensors"}}'), "x.safe"),
    ],
)
def test_an_unusable_directory_is_refused_naming_the_file(
    tmp_path: Path, spoil: Callable[[Path], Any], named: str
) -> None:
    directory = write_checkpoint(tmp_path / "m")
    spoil(directory)
    refused(directory, named)


def test_the_language_model_of_a_multimodal_one_is_what_counts(tmp_path: Path) -> None:
    config = {"model_type": "some_vl", "architectures": ["SomeVL"], "text_config": QWEN, "vision_config": {"depth": 9}}
    assert measure(write_checkpoint(tmp_path / "m", config)).facts["cache_values"] == 256


def test_the_state_of_a_gated_delta_net_is_the_reference_value(tmp_path: Path) -> None:
    config = QWEN | {
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    facts = measure(write_checkpoint(tmp_path / "m", config)).facts
    convolution, temporal = facts["state_slot_values"]
    assert round((convolution * 2 + temporal * 4) / (1 << 20), 2) == 146.81
    assert facts["cache_values"] == 16 * 2 * 64


def test_a_drafter_adds_its_weights_and_cache(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m")
    draft = write_checkpoint(tmp_path / "d", weight_bytes=1000)
    plain = measure(directory)
    stated = measure(directory, model={"path": "m", "draft": "d"})
    assert stated.digest == plain.digest
    assert stated.facts["draft"]["weight_bytes"] == (draft / "model.safetensors").stat().st_size
    args = {"accept_extra_args": True, "extra_args": ["--speculative-draft-model-path", str(draft)]}
    assert measure(directory, engine_config=args).facts["draft"] == stated.facts["draft"]
    (draft / "config.json").unlink()
    assert "config.json" in measure(directory, engine_config=args).facts["draft"]["not_derivable"]


def test_a_drafter_of_pickles_is_charged_and_not_opened(tmp_path: Path) -> None:
    directory, draft = write_checkpoint(tmp_path / "m"), tmp_path / "eagle"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(QWEN | {"num_hidden_layers": 1}))
    (draft / "pytorch_model.bin").write_bytes(b"\x80" * 5000)
    found = measure(directory, model={"path": "m", "draft": "eagle"}).facts["draft"]
    assert (found["weight_bytes"], found["cache_values"]) == (5000, 0)
    assert "cannot be read" in found["not_derivable"]


def test_the_drafter_that_is_named_last_counts(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m")
    one, two = (write_checkpoint(tmp_path / name, weight_bytes=size) for name, size in (("a", 1000), ("b", 2000)))
    words = ["--speculative-draft-model-path", str(one), "--speculative-draft-model", str(two)]
    for args, last in ((words, two), ([*words[2:], *words[:2]], one)):
        found = measure(directory, engine_config={"accept_extra_args": True, "extra_args": args}).facts["draft"]
        assert found["weight_bytes"] == (last / "model.safetensors").stat().st_size


def test_a_declared_digest_is_taken_without_a_read_when_the_host_trusts_it(tmp_path: Path) -> None:
    size = 1 << 43  # 8 TiB of hole: reading it would not end
    directory = write_checkpoint(tmp_path / "m", weight_bytes=size)
    digest = "sha256:" + "a" * 64
    wanted = document(model={"path": "m", "content_fingerprint": digest})
    store = CheckpointStore(tmp_path / "cache.json", tmp_path, trust_declared=True)
    found = store.measure(directory, wanted)
    assert (found.digest, found.facts["tensor_bytes"]) == (digest, size)
    again = CheckpointStore(tmp_path / "cache.json", tmp_path)
    again.verify(directory, digest)
    with open(directory / "model.safetensors", "r+b") as stream:
        stream.write(header(ONE)[:8])
        stream.truncate(100)
    with pytest.raises(CapyError, match="changed"):
        again.verify(directory, digest)
