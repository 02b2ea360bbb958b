"""Checkpoints that somebody made to hurt: each is refused with its code or read as something sane, in little time.

Run as a program it measures every one of them, one after another, and prints a line of JSON for each:

    .venv/bin/python tests/property/hostile.py <empty directory>

With `--write <n>` it writes good ones, odd directories and every n-th of the others, and prints what may come of each.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import attrs
from sizing_values import spark

from capyctl.checkpoints.sizing import derive_plan
from capyctl.checkpoints.store import CheckpointStore
from capyctl.documents.deployment import parse_deployment
from capyctl.errors import CapyError

UNUSABLE: Final = "checkpoint_unusable"
READ: Final = "read"
SEED: Final = 7
MUTATIONS: Final = 160
MEMORY_BYTES: Final = 3 << 30  # of addresses, in which Python and its libraries take some hundred megabytes

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 512, "vocab_size": 1000,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


@attrs.frozen(kw_only=True)
class Case:
    """One checkpoint: how it is written into an empty directory, and what may come of it."""

    name: str
    write: Callable[[Path], object]
    expected: frozenset[str]
    engine: str = "vllm"


# --- parts that are good -----------------------------------------------------------------------------


def tensor(shape: list[Any], at: int, size: int, dtype: Any = "BF16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}


def entries() -> dict[str, Any]:
    found: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for layer in range(4):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"model.layers.{layer}.self_attn.{part}.weight"] = tensor([16, 16], at, 512)
            at += 512
    return found


def packed(header: bytes, data: int = 8192, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(data)


def text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def good(place: Path) -> None:
    (place / "config.json").write_bytes(text(CONFIG))
    (place / "model.safetensors").write_bytes(packed(text(entries())))


def word(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return word(name) + struct.pack("<I", kind) + value


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def gguf_keys(**changes: bytes | None) -> dict[str, bytes]:
    keys: dict[str, bytes | None] = {
        "general.architecture": struct.pack("<I", 8) + word(b"llama"),
        "llama.block_count": struct.pack("<II", 4, 4),
        "llama.context_length": struct.pack("<II", 4, 4096),
        "llama.embedding_length": struct.pack("<II", 4, 256),
        "llama.attention.head_count": struct.pack("<II", 4, 8),
        "llama.attention.head_count_kv": struct.pack("<II", 4, 2),
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return {name: value for name, value in keys.items() if value is not None}


def gguf_tensor(name: bytes, shape: list[int], kind: int, offset: int) -> bytes:
    return word(name) + u32(len(shape)) + struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, offset)


TENSOR: Final = gguf_tensor(b"token_embd.weight", [32, 4], 0, 0)


def gguf(
    keys: dict[str, bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    data: int = 1024,
) -> bytes:
    keys = gguf_keys() if keys is None else keys
    tensors = [TENSOR] if tensors is None else tensors
    told = (len(tensors), len(keys)) if counts is None else counts
    head = b"GGUF" + struct.pack("<I", version) + struct.pack("<QQ", *(number % (1 << 64) for number in told))
    body = b"".join(word(name.encode()) + value for name, value in keys.items()) + b"".join(tensors)
    whole = head + body
    return whole + bytes(-len(whole) % 32 + data)


# --- made by hand ------------------------------------------------------------------------------------


def headers() -> Iterator[tuple[str, bytes, str]]:
    """(what it is, the weight file, what comes of it)."""
    e, one = entries, "model.layers.0.self_attn.q_proj.weight"
    ok = text(e())
    yield "empty file", b"", UNUSABLE
    yield "seven bytes", b"\0" * 7, UNUSABLE
    yield "length alone", struct.pack("<Q", 8), UNUSABLE
    yield "length zero", packed(b"", 0), UNUSABLE
    for number in (1 << 63, (1 << 64) - 1, 100_000_001, 1 << 40, len(ok) + 8193, 99_999_999):
        yield f"length of {number}", packed(ok, length=number), UNUSABLE
    yield "length one less", packed(ok, length=len(ok) - 1), UNUSABLE
    yield "length one more", packed(ok, length=len(ok) + 1), UNUSABLE
    yield "spaces after", packed(ok + b" " * 100), READ
    yield "a megabyte of spaces", packed(ok + b" " * (1 << 20)), READ
    yield "space before", packed(b" " + ok), UNUSABLE
    yield "zeros after", packed(ok + b"\0"), UNUSABLE
    yield "no tensor", packed(b"{}", 0), READ
    yield "a list", packed(b"[]"), UNUSABLE
    yield "a number", packed(b"7"), UNUSABLE
    yield "cut", packed(ok[:-20]), UNUSABLE
    yield "twice", packed(ok + ok), UNUSABLE
    yield "latin letters", packed(b'{"\xe9":1}'), UNUSABLE
    yield "byte order mark", packed(b"\xef\xbb\xbf" + ok), UNUSABLE
    yield "utf-16", packed(ok.decode().encode("utf-16")), UNUSABLE
    yield "deep lists", packed(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"), UNUSABLE
    yield "deep objects", packed(b'{"a":' * 50_000 + b"1" + b"}" * 50_000), UNUSABLE
    yield "deep and open", packed(b'{"a":' + b"[" * 900_000), UNUSABLE
    yield "millions of lists", packed(b'{"a":[' + b"[]," * 3_000_000 + b"[]]}"), UNUSABLE
    yield "millions of numbers", packed(b'{"a":[' + b"1," * 6_000_000 + b"1]}"), UNUSABLE
    yield "millions of names", packed(b"{" + b",".join(b'"%d":1' % n for n in range(300_000)) + b"}"), UNUSABLE
    yield "a number of 5000 digits", packed(b'{"a":' + b"9" * 5000 + b"}"), UNUSABLE
    yield "NaN", packed(b'{"a":NaN}'), UNUSABLE
    yield "Infinity", packed(b'{"a":-Infinity}'), UNUSABLE
    yield "1e309", packed(b'{"a":{"dtype":"U8","shape":[1e309],"data_offsets":[0,1]}}', 1), UNUSABLE
    yield "a name twice", packed(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},' * 2 + b'"b":1}', 1), UNUSABLE
    yield "a member twice", packed(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1), UNUSABLE
    yield "an escaped twin", packed(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"\\u0061":1}', 1), UNUSABLE
    yield "half of a pair", packed(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1), READ
    yield "control letters", packed(b'{"\\u001b[2J\\n":{"dtype":"Q","shape":[1],"data_offsets":[0,1]}}', 1), UNUSABLE
    yield "a name of a megabyte", packed(text({"n" * (1 << 20): tensor([1], 0, 2)}), 2), READ
    yield "metadata of numbers", packed(text(e() | {"__metadata__": {"a": 1}})), UNUSABLE
    yield "metadata that is a list", packed(text(e() | {"__metadata__": []})), UNUSABLE
    for what, odd in (
        ("null", None), ("a number", 7), ("a text", "x"), ("a list", []), ("empty", {}),
        ("no dtype", {"shape": [1], "data_offsets": [0, 2]}), ("no shape", {"dtype": "U8", "data_offsets": [0, 2]}),
        ("no offsets", {"dtype": "U8", "shape": [1]}), ("more", tensor([16, 16], 0, 512) | {"x": 1}),
    ):  # fmt: skip
        yield f"an entry that is {what}", packed(text(e() | {one: odd})), UNUSABLE
    for odd in ("F9", "bf16", "", 7, None, [], {}, "BF16 "):
        yield f"type {odd!r}", packed(text(e() | {one: tensor([16, 16], 0, 512, odd)})), UNUSABLE
    for odd in ([-1], [1.0], ["16"], [True], [None], [[16]], "16", 16, None, {}, [1 << 63], [1 << 64], [16, 17],
                [1 << 40, 1 << 40], [0, 1 << 62], [256] + [1] * 100, [-16, -16]):  # fmt: skip
        yield f"shape {str(odd)[:30]}", packed(text(e() | {one: {**tensor([], 0, 512), "shape": odd}})), UNUSABLE
    for odd in ([512, 0], [0], [0, 512, 1024], [-512, 0], [0.0, 512.0], ["0", "512"], [0, True], None, 512, [0, 511],
                [1, 513], [512, 1024], [0, 1 << 63], [1 << 62, (1 << 62) + 512], [0, 1 << 65]):  # fmt: skip
        yield f"offsets {odd}", packed(text(e() | {one: {**tensor([16, 16], 0, 512), "data_offsets": odd}})), UNUSABLE
    yield "a hole", packed(text({"a": tensor([1], 0, 2), "b": tensor([1], 4, 2)}), 6), UNUSABLE
    yield "an overlap", packed(text({"a": tensor([2], 0, 4), "b": tensor([1], 2, 2)}), 4), UNUSABLE
    yield "all on one place", packed(text({str(n): tensor([1], 0, 2) for n in range(99)}), 2), UNUSABLE
    yield "empty tensors on one place", packed(text({str(n): tensor([0], 0, 0) for n in range(99)}), 0), READ
    yield "a rest", packed(ok, 8193), UNUSABLE
    yield "too little", packed(ok, 8191), UNUSABLE
    yield "half a byte", packed(text({"a": tensor([1], 0, 1, "F4")}), 1), UNUSABLE
    yield "quarters of bytes", packed(text({"a": tensor([3], 0, 2, "F6_E2M3")}), 2), UNUSABLE
    yield "another format", b"GGUF" + bytes(100), UNUSABLE
    yield "a zip", b"PK\3\4" + bytes(100), UNUSABLE
    yield "a pickle", b"\x80\x04\x95" + bytes(100), UNUSABLE


def configs() -> Iterator[tuple[str, bytes, str]]:
    yield "empty", b"", UNUSABLE
    yield "a list", b"[]", UNUSABLE
    yield "a text", b'"x"', UNUSABLE
    yield "nothing", b"null", UNUSABLE
    yield "no object in it", b"{}", READ
    yield "cut", text(CONFIG)[:-5], UNUSABLE
    yield "five megabytes", text(CONFIG | {"x": "y" * (5 << 20)}), UNUSABLE
    yield "four megabytes of lists", b'{"a":[' + b"[]," * 1_300_000 + b"[]]}", UNUSABLE
    yield "deep", b'{"text_config":' * 100_000 + b"1" + b"}" * 100_000, UNUSABLE
    yield "NaN", b'{"num_hidden_layers":NaN}', UNUSABLE
    yield "a name twice", b'{"num_hidden_layers":4,"num_hidden_layers":8}', UNUSABLE
    yield "a block twice", b'{"text_config":{"hidden_size":1,"hidden_size":2}}', UNUSABLE
    yield "not utf-8", b'{"a":"\xff"}', UNUSABLE
    yield "comments", b"{/* */}", UNUSABLE
    yield "a comma too many", b'{"a":1,}', UNUSABLE
    numbers = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size",
               "max_position_embeddings", "kv_lora_rank", "sliding_window", "num_nextn_predict_layers")  # fmt: skip
    for name in numbers:
        for odd in (-1, 0, 1 << 31, 1 << 63, 1 << 200, 1.5, "8", True, None, [8], {"a": 8}):
            yield f"{name} {str(odd)[:20]}", text({**CONFIG, name: odd}), READ
        yield (
            f"{name} 1e309",
            text({**CONFIG, name: 0}).replace(f'"{name}":0'.encode(), f'"{name}":1e309'.encode()),
            READ,
        )
    for name, odd in (
        ("layer_types", ["full_attention"] * 100_000), ("layer_types", [None] * 4), ("layer_types", "full"),
        ("layer_types", [["full_attention"]] * 4), ("layers_block_type", ["x" * 100_000] * 4),
        ("hybrid_override_pattern", "M" * 1_000_000), ("hybrid_override_pattern", ["M"] * 4),
        ("attn_layer_period", 1 << 19), ("attn_layer_offset", -5), ("attn_layer_indices", [1 << 70]),
        ("linear_attn_config", {"full_attn_layers": [0, -1]}), ("linear_attn_config", []),
        ("block_configs", [None] * 4), ("block_configs", [{"attention": 7}] * 4), ("no_rope_layers", [2.5] * 4),
        ("sliding_window_pattern", "L" * 1_000_000), ("sliding_window_pattern", "(a+)+"), ("num_kv_shared_layers", 99),
        ("text_config", []), ("text_config", "x"), ("thinker_config", {"text_config": 7}),
        ("quantization_config", []), ("quantization_config", {"quant_method": "x" * 10_000}),
        ("quantization_config", {"quant_method": "awq", "bits": 1 << 70}), ("compress_ratios", [1]),
        ("quantization_config", {"config_groups": {"a": []}}), ("architectures", "Qwen3"),
        ("architectures", [None, 7, {}, "x" * 100_000]),
        ("architectures", ["\x1b[2J", "\ud800", "a\nb"]), ("model_type", ["qwen3"]), ("model_type", "\x1b[2J"),
        ("torch_dtype", 16), ("torch_dtype", "../../x"), ("tie_word_embeddings", "yes"),
    ):  # fmt: skip
        yield f"{name} as {str(odd)[:30]}", text({**CONFIG, name: odd}), READ


def indexes() -> Iterator[tuple[str, bytes, str]]:
    name = "model.layers.0.self_attn.q_proj.weight"
    yield "empty", b"", UNUSABLE
    yield "no map", b"{}", UNUSABLE
    yield "an empty map", b'{"weight_map":{}}', UNUSABLE
    yield "a list", b'{"weight_map":["model.safetensors"]}', UNUSABLE
    yield "one entry", text({"weight_map": {name: "model.safetensors"}}), READ
    yield "a name twice", b'{"weight_map":{"a":"model.safetensors","a":"x.safetensors"}}', UNUSABLE
    yield "an unknown tensor", text({"weight_map": {"other": "model.safetensors"}}), UNUSABLE
    for odd in ("../model.safetensors", "/etc/passwd", "/dev/zero", "a/model.safetensors", "", ".", "..", "model.bin",
                "none.safetensors", "model.safetensors\0", "\x1b[2J.safetensors", "x" * 100_000 + ".safetensors",
                7, None, [], {}, True):  # fmt: skip
        yield f"a file {str(odd)[:24]!r}", text({"weight_map": {name: odd}}), UNUSABLE
    yield (
        "half a million tensors",
        text({"weight_map": {f"t{n}": "model.safetensors" for n in range(500_000)}}),
        UNUSABLE,
    )
    yield "millions of values", b'{"weight_map":{"a":[' + b"1," * 5_000_000 + b"1]}}", UNUSABLE
    yield "deep", b'{"weight_map":' * 60_000 + b"1" + b"}" * 60_000, UNUSABLE


def ggufs() -> Iterator[tuple[str, bytes, str]]:
    yield "empty", b"", UNUSABLE
    yield "magic alone", b"GGUF", UNUSABLE
    yield "the other byte order", b"FUGG" + bytes(100), UNUSABLE
    for version in (0, 1, 4, 1 << 24, (1 << 32) - 1):
        yield f"version {version}", gguf(version=version), UNUSABLE
    for counts in ((1 << 62, 6), (1, 1 << 62), (-1, 6), (1, -1), (1 << 40, 1 << 40), (2, 6), (1, 7), (1, 5), (0, 6)):
        yield f"counts {counts}", gguf(counts=counts), READ if counts == (0, 6) else UNUSABLE
    for kind in (13, 99, (1 << 32) - 1):
        yield f"a value of type {kind}", gguf(gguf_keys(x=u32(kind))), UNUSABLE
        yield f"an array of type {kind}", gguf(gguf_keys(x=u32(9) + struct.pack("<IQ", kind, 1))), UNUSABLE
    yield "an array of arrays", gguf(gguf_keys(x=u32(9) + struct.pack("<IQ", 9, 1))), UNUSABLE
    for length in (1 << 21, 1 << 40, (1 << 64) - 1):
        yield f"a text of {length}", gguf(gguf_keys(x=u32(8) + struct.pack("<Q", length))), UNUSABLE
        yield f"an array of {length}", gguf(gguf_keys(x=u32(9) + struct.pack("<IQ", 0, length))), UNUSABLE
        yield f"texts of {length}", gguf(gguf_keys(x=u32(9) + struct.pack("<IQQ", 8, 1, length))), UNUSABLE
    yield "an empty key", gguf(gguf_keys() | {"": u32(0) + b"\0"}), UNUSABLE
    twice = key(b"general.name", 0, b"\0")
    yield "a key twice", b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + twice + twice, UNUSABLE
    yield "a tensor twice", gguf(tensors=[TENSOR, TENSOR]), UNUSABLE
    for kind in (4, 5, 31, 36, 500, (1 << 32) - 1):
        yield f"a tensor of type {kind}", gguf(tensors=[gguf_tensor(b"t", [32, 4], kind, 0)]), UNUSABLE
    for shape in ([1 << 63], [1 << 40, 1 << 40], [(1 << 64) - 1], [1] * 5, [1 << 62, 0], [33, 2]):
        kind = 2 if shape == [33, 2] else 0
        fine = READ if shape == [1 << 62, 0] else UNUSABLE
        yield f"a tensor {shape}", gguf(tensors=[gguf_tensor(b"t", shape, kind, 0)]), fine
    for offset in (1, 31, 1 << 62, 1 << 63, (1 << 64) - 32, 4096):
        yield f"a tensor at {offset}", gguf(tensors=[gguf_tensor(b"t", [32, 4], 0, offset)]), UNUSABLE
    overlap = [gguf_tensor(b"a", [64], 0, 0), gguf_tensor(b"b", [64], 0, 128)]
    yield "tensors that overlap", gguf(tensors=overlap), UNUSABLE
    for alignment in (0, 3, 1 << 31, (1 << 32) - 1):
        value = struct.pack("<II", 4, alignment)
        yield f"aligned to {alignment}", gguf(gguf_keys(general__alignment=value)), UNUSABLE
    yield "aligned to a text", gguf(gguf_keys(general__alignment=u32(8) + word(b"32"))), UNUSABLE
    yield "no architecture", gguf(gguf_keys(general__architecture=None)), UNUSABLE
    for name in (b"", b"clip", b"../x", b"\x1b[2J", b"l" * 100_000, b"\xff\xfe"):
        yield f"architecture {name[:12]!r}", gguf(gguf_keys(general__architecture=u32(8) + word(name))), UNUSABLE
    yield "an architecture that is a number", gguf(gguf_keys(general__architecture=struct.pack("<II", 4, 7))), UNUSABLE
    for field in ("block_count", "context_length", "embedding_length", "attention.head_count_kv",
                  "attention.key_length", "attention.shared_kv_layers", "nextn_predict_layers"):  # fmt: skip
        for what, value in (
            ("2^64 - 1", struct.pack("<IQ", 10, (1 << 64) - 1)), ("minus one", struct.pack("<Ii", 5, -1)),
            ("NaN", struct.pack("<If", 6, float("nan"))), ("a text", u32(8) + word(b"8")), ("true", u32(7) + b"\1"),
            ("an array", u32(9) + struct.pack("<IQ4i", 5, 4, -1, -2, 1 << 30, 7)),
            ("2^31", struct.pack("<II", 4, 1 << 31)),
        ):  # fmt: skip
            yield f"{field} {what}", gguf(gguf_keys() | {f"llama.{field}": value}), READ
    yield "a name of letters that move the cursor", gguf(gguf_keys(general__name=u32(8) + word(b"a\x1b[2J\nb"))), READ
    yield "a hundred thousand keys", gguf({f"k{n}": u32(0) + b"\0" for n in range(100_000)}), UNUSABLE
    yield "cut data", gguf()[:-600], UNUSABLE


def directories() -> Iterator[tuple[str, Callable[[Path], object], str]]:
    def added(make: Callable[[Path], object]) -> Callable[[Path], object]:
        def write(place: Path) -> None:
            good(place)
            make(place)

        return write

    def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
        def write(place: Path) -> None:
            good(place)
            (place / name).unlink()
            make(place / name)

        return write

    def listening(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as door:
            at = os.getcwd()
            os.chdir(path.parent)  # the name of a socket is short
            try:
                door.bind(path.name)
            finally:
                os.chdir(at)

    def chain(place: Path) -> None:
        for number in range(12):
            (place / f"hop{number}").symlink_to(f"hop{number + 1}")
        (place / "hop12").write_bytes(b"x")

    def deep(place: Path) -> None:
        for _ in range(30):
            place = place / "d"
            place.mkdir()
        (place / "x").write_bytes(b"x")

    def many(place: Path) -> None:
        for number in range(8_200):
            (place / f"{number}").touch()

    def shards(place: Path) -> None:
        for number in range(1, 200):
            os.link(place / "model.safetensors", place / f"m-{number:05}-of-99999.safetensors")

    for name in ("config.json", "model.safetensors"):
        yield f"{name} is a FIFO", instead(name, os.mkfifo), "unsafe_file"
        yield f"{name} is a socket", instead(name, listening), "unsafe_file"
        yield f"{name} is a directory", instead(name, Path.mkdir), UNUSABLE
        yield f"{name} leads to /dev/zero", instead(name, lambda at: at.symlink_to("/dev/zero")), "unsafe_file"
        yield f"{name} leads out", instead(name, lambda at: at.symlink_to("/etc/passwd")), "unsafe_file"
        yield (
            f"{name} leads out and back",
            instead(name, lambda at: at.symlink_to(f"../../{at.parent.parent.name}/{at.parent.name}/{at.name}.x")),
            "unsafe_file",
        )
        yield f"{name} leads to itself", instead(name, lambda at: at.symlink_to(at.name)), "unsafe_file"
        yield f"{name} leads nowhere", instead(name, lambda at: at.symlink_to("nothing")), "unsafe_file"
        yield f"{name} is missing", instead(name, lambda at: None), UNUSABLE
    yield "a chain of links", added(chain), "unsafe_file"
    yield "a link to the directory itself", added(lambda at: (at / "x").symlink_to(".")), "unsafe_file"
    yield "a link to the root", added(lambda at: (at / "x").symlink_to("/")), "unsafe_file"
    yield "directories without an end", added(deep), "too_large"
    yield "thousands of files", added(many), "too_large"
    yield "a set of 99 999", added(shards), UNUSABLE
    yield "two indexes", added(lambda at: [(at / f"{n}.safetensors.index.json").touch() for n in "ab"]), UNUSABLE
    yield (
        "two weight files of the same tensors",
        added(lambda at: os.link(at / "model.safetensors", at / "other.safetensors")),
        UNUSABLE,
    )
    yield "a name that moves the cursor", added(lambda at: (at / "a\x1b[2J").touch()), "unsafe_file"
    yield "a name that is no text", added(lambda at: open(os.fsencode(at) + b"/\xff", "w").close()), "unsafe_file"
    yield "everybody may write", added(lambda at: at.chmod(0o777)), "invalid_root"
    yield "everybody may write below", added(lambda at: [(at / "d").mkdir(), (at / "d").chmod(0o777)]), "invalid_root"
    yield (
        "a header of 100 MB that is a hole",
        instead(
            "model.safetensors", lambda at: (at.write_bytes(struct.pack("<Q", 99_999_999)), os.truncate(at, 1 << 40))
        ),
        UNUSABLE,
    )
    yield "a config of a terabyte", instead("config.json", lambda at: (at.touch(), os.truncate(at, 1 << 40))), UNUSABLE
    yield "nothing", lambda place: None, UNUSABLE


# --- mutations of good ones ---------------------------------------------------------------------------


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """A few bytes flipped, cut out, doubled or put in, most of them where the header is."""
    made = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(min(len(made), rng.choice((16, 200, 2000))) or 1)
        match rng.randrange(6):
            case 0:
                made[at] ^= 1 << rng.randrange(8)
            case 1:
                made[at] = rng.choice((0, 255, *b'{}[]",:0129-.eE'))
            case 2:
                del made[at : at + rng.randrange(1, 40)]
            case 3:
                made[at:at] = made[at : at + rng.randrange(1, 40)]
            case 4:
                made[at:at] = rng.randbytes(rng.randrange(1, 20))
            case _:
                made[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 1 << 31, 1 << 63, (1 << 64) - 1)))
        if not made:
            break
    return bytes(made)


def mutations() -> Iterator[Case]:
    rng = random.Random(SEED)
    anything = frozenset({UNUSABLE, READ})
    index = text({"weight_map": dict.fromkeys([*entries()][1:], "model.safetensors")})
    for number in range(MUTATIONS):
        parts = {"config.json": text(CONFIG), "model.safetensors": packed(text(entries())),
                 "model.safetensors.index.json": index, "model.gguf": gguf()}  # fmt: skip
        name = [*parts][number % 4]
        wanted = ("model.gguf",) if name == "model.gguf" else ("config.json", "model.safetensors", name)
        files = {one: parts[one] for one in wanted} | {name: mutated(parts[name], rng)}
        yield Case(
            name=f"{name} mutated, {number}",
            write=_writer(files),
            expected=anything,
            engine="llamacpp" if name == "model.gguf" else "vllm",
        )


def _writer(files: dict[str, bytes]) -> Callable[[Path], object]:
    return lambda place: [(place / name).write_bytes(raw) for name, raw in files.items()]


def cases() -> Iterator[Case]:
    """Every hostile checkpoint, good ones among them so that a refusal of everything would be seen."""
    yield Case(name="good: safetensors", write=good, expected=frozenset({READ}))
    yield Case(name="good: GGUF", write=_writer({"m.gguf": gguf()}), expected=frozenset({READ}), engine="llamacpp")
    config = text(CONFIG)
    for name, raw, expected in headers():
        files = {"config.json": config, "model.safetensors": raw}
        yield Case(name=f"header: {name}", write=_writer(files), expected=frozenset({expected}))
    weights = packed(text(entries()))
    for name, raw, expected in configs():
        files = {"config.json": raw, "model.safetensors": weights}
        yield Case(name=f"config: {name}", write=_writer(files), expected=frozenset({expected}))
    for name, raw, expected in indexes():
        files = {"config.json": config, "model.safetensors": weights, "model.safetensors.index.json": raw}
        yield Case(name=f"index: {name}", write=_writer(files), expected=frozenset({expected}))
    for name, raw, expected in ggufs():
        yield Case(
            name=f"GGUF: {name}", write=_writer({"m.gguf": raw}), expected=frozenset({expected}), engine="llamacpp"
        )
    for name, write, expected in directories():
        yield Case(name=f"directory: {name}", write=write, expected=frozenset({expected}))
    yield from mutations()


# --- the program that measures them --------------------------------------------------------------------


def insane(facts: Any) -> str | None:
    """What is wrong with facts that were read, or None."""
    try:
        json.dumps(facts, allow_nan=False)
    except ValueError as wrong:
        return f"facts are no JSON: {wrong}"
    stack = [("facts", facts)]
    while stack:
        where, value = stack.pop()
        if isinstance(value, dict):
            stack += [(f"{where}.{name}", one) for name, one in value.items()]
        elif isinstance(value, list | tuple):
            stack += [(f"{where}[{number}]", one) for number, one in enumerate(value)]
        elif isinstance(value, str):
            if len(value) > 400 or not value.isprintable():
                return f"{where} is no short printable text"
        elif isinstance(value, float) or (isinstance(value, int) and not 0 <= value < 1 << 63):
            return f"{where} is {value}"
    if facts.get("format") == "safetensors":
        order = [facts["largest_layer_bytes"], facts["sharded_bytes"], facts["tensor_bytes"], facts["weight_bytes"]]
        if sorted(order) != order:
            return f"layers, split, tensors and files are {order} bytes"
    return None


def measured(case: Case, place: Path) -> str:
    """What came of one checkpoint: a code, `read`, or words that begin with `!`."""
    body: dict[str, Any] = {"name": "m", "engine": case.engine, "model": str(place)}
    document = parse_deployment(body, "test")
    try:
        found = CheckpointStore(None, None).measure(place, document)
    except CapyError as refusal:
        if "\n" in refusal.message or not refusal.message.isprintable() or len(refusal.message) > 1000:
            return f"!the message is no short line: {refusal.message[:200]!r}"
        return refusal.code
    except Exception as wrong:
        return f"!{type(wrong).__name__}: {str(wrong)[:200]}"
    wrong = insane(found.facts)
    if wrong is not None:
        return f"!{wrong}"
    try:
        plan = derive_plan(found.facts, document, spark(), family=case.engine)
    except CapyError:
        return READ
    except Exception as broken:
        return f"!sizing: {type(broken).__name__}: {str(broken)[:200]}"
    held = [amount for phase in plan.phases.values() for amount in phase.bytes.values()]
    return READ if all(0 <= amount < 1 << 63 for amount in held) else f"!a plan of {held}"


def main(root: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for number, case in enumerate(cases()):
        place = root / str(number)
        place.mkdir(mode=0o755)
        case.write(place)
        began = time.process_time()
        came = measured(case, place)
        row = {
            "name": case.name,
            "came": came,
            "expected": sorted(case.expected),
            "seconds": time.process_time() - began,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        print(json.dumps(row), flush=True)
        place.chmod(0o755)
        shutil.rmtree(place)


def write(root: Path, step: int) -> None:
    for number, case in enumerate(cases()):
        if number % step and not case.name.startswith(("good: ", "directory: ")):
            continue
        place = root / f"h{number}"
        place.mkdir(mode=0o755)
        case.write(place)
        print(
            json.dumps(
                {"name": case.name, "engine": case.engine, "expected": sorted(case.expected), "place": str(place)}
            )
        )


if __name__ == "__main__":
    if "--write" in sys.argv:
        write(Path(sys.argv[1]), int(sys.argv[3]))
    else:
        main(Path(sys.argv[1]))
