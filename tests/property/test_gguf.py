"""The header reader against files built byte by byte: what is whole is read, what is not is refused, in one line."""

from __future__ import annotations

import contextlib
import io
import struct
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capyctl.checkpoints import gguf
from capyctl.errors import Refusal

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def tensor(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
    dims = b"".join(struct.pack("<q", size) for size in shape)
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def build(keys: Sequence[bytes] = (), tensors: Sequence[bytes] = (), *, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<Iqq", version, len(tensors), len(keys))
    return head + b"".join(keys) + b"".join(tensors)


def parse(raw: bytes, file_bytes: int | None = None) -> gguf.Header:
    return gguf.parse_header(io.BytesIO(raw), "model.gguf", file_bytes=file_bytes)


def refused(raw: bytes, file_bytes: int | None = None) -> str:
    with pytest.raises(Refusal) as caught:
        parse(raw, file_bytes)
    assert caught.value.code == "checkpoint_unusable"
    assert caught.value.message.startswith("model.gguf")
    assert "\n" not in caught.value.message
    return caught.value.message


names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
values = st.one_of(
    st.integers(0, 2**32 - 1).map(lambda n: (U32, struct.pack("<I", n), n)),
    st.integers(-(2**31), 2**31 - 1).map(lambda n: (I32, struct.pack("<i", n), n)),
    st.booleans().map(lambda b: (BOOL, struct.pack("<?", b), b)),
    st.text(st.characters(codec="utf-8"), max_size=20).map(lambda s: (STRING, text(s), s)),
    st.lists(st.integers(0, 2**32 - 1), max_size=8).map(
        lambda ns: (ARRAY, array(U32, len(ns), struct.pack(f"<{len(ns)}I", *ns)), tuple(ns))
    ),
    st.lists(st.binary(max_size=8), max_size=8).map(
        lambda ss: (ARRAY, array(STRING, len(ss), b"".join(map(text, ss))), gguf.Skipped(len(ss)))
    ),
)


@given(st.dictionaries(names, values, max_size=12), st.sampled_from((2, 3)))
@settings(derandomize=True, max_examples=150)
def test_what_was_written_is_read(written: dict[str, tuple[int, bytes, object]], version: int) -> None:
    written.pop("general.alignment", None)
    raw = build([key(name, kind, packed) for name, (kind, packed, _) in written.items()], version=version)
    header = parse(raw)
    assert dict(header.metadata) == {name: value for name, (_, _, value) in written.items()}
    assert header.version == version
    assert header.data_at % header.alignment == 0


@given(st.data())
@settings(derandomize=True, max_examples=150)
def test_a_header_that_is_cut_anywhere_is_refused(data: st.DataObject) -> None:
    raw = build(
        [key("general.architecture", STRING, text("llama")), key("a", ARRAY, array(STRING, 2, text("x") + text("y")))],
        [tensor("t", (32, 2), 2, 0)],
    )
    refused(raw[: data.draw(st.integers(0, len(raw) - 1))])


@given(st.binary(max_size=200), st.integers(0, 3))
@settings(derandomize=True, max_examples=300)
def test_noise_never_ends_in_anything_but_a_refusal_or_a_header(noise: bytes, at: int) -> None:
    raw = bytearray(
        build([key("general.name", STRING, text("name")), key("n", U32, b"\1\0\0\0")], [tensor("t", (4,), 0, 0)])
    )
    raw[4 + at * 9 : 4 + at * 9 + len(noise)] = noise
    with contextlib.suppress(Refusal):
        assert parse(bytes(raw), len(raw)).version in (2, 3)


@pytest.mark.parametrize("count", [2**20 + 1, 2**63 - 1, -1])
def test_a_hostile_key_count_is_refused(count: int) -> None:
    assert "key count" in refused(b"GGUF" + struct.pack("<Iqq", 3, 0, count))


@pytest.mark.parametrize("count", [2**40, 2**63 - 1, -5])
def test_a_hostile_tensor_count_is_refused(count: int) -> None:
    assert "tensor count" in refused(b"GGUF" + struct.pack("<Iqq", 3, count, 0))


@pytest.mark.parametrize("length", [2**20 + 1, 2**40, 2**64 - 1])
def test_a_hostile_string_length_is_refused_without_allocating_it(length: int) -> None:
    raw = build([text("a") + struct.pack("<IQ", STRING, length)])
    assert "string length" in refused(raw)
    inside = build([key("a", ARRAY, array(STRING, 3, text("x") + struct.pack("<Q", length)))])
    assert "string length" in refused(inside)


@pytest.mark.parametrize("length", [2**20 + 1, 2**60, 2**64 - 1])
def test_a_hostile_array_length_is_refused(length: int) -> None:
    assert "array length" in refused(build([key("a", ARRAY, struct.pack("<IQ", U8, length))]))


def test_a_key_count_that_the_file_cannot_hold_ends_at_the_files_end() -> None:
    assert "ends inside" in refused(b"GGUF" + struct.pack("<Iqq", 3, 0, 2**20))


def test_nested_arrays_unknown_types_duplicates_and_empty_keys_are_refused() -> None:
    assert "array of arrays" in refused(build([key("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]))
    assert "unknown type 99" in refused(build([key("a", 99, b"")]))
    assert "unknown type 98" in refused(build([key("a", ARRAY, struct.pack("<IQ", 98, 1))]))
    twice = key("a", U32, b"\0\0\0\0")
    assert "given twice" in refused(build([twice, twice]))
    assert "empty" in refused(build([key("", U32, b"\0\0\0\0")]))
    same = tensor("t", (1,), 0, 0)
    assert "listed twice" in refused(build((), [same, same]))


@pytest.mark.parametrize("version", [0, 1, 4, 0x03000000])
def test_other_versions_and_byte_orders_are_refused(version: int) -> None:
    assert "version" in refused(build(version=version))


def test_other_files_are_refused() -> None:
    for raw in (b"", b"GGU", b"PK\3\4" + b"\0" * 60, b"\0" * 100):
        refused(raw)


def test_tensor_bytes_follow_the_table_of_blocks() -> None:
    shapes = {name: (kind, 256 * 3, size * (256 * 3 // values)) for kind, (name, values, size) in gguf.BLOCKS.items()}
    listed, at = [], 0
    for name, (kind, width, size) in shapes.items():
        listed.append(tensor(name, (width, 2), kind, at))
        at += -(-size * 2 // 32) * 32
    raw = build((), listed)
    assert {t.name: t.size_bytes for t in parse(raw).tensors} == {
        name: size * 2 for name, (_, _, size) in shapes.items()
    }


def test_tensors_that_cannot_be_are_refused() -> None:
    assert "whole Q4_0 blocks" in refused(build((), [tensor("t", (33, 2), 2, 0)]))
    assert "unknown type 5" in refused(build((), [tensor("t", (32,), 5, 0)]))
    assert "dimension count" in refused(build((), [tensor("t", (1, 1, 1, 1, 1), 0, 0)]))
    assert "more elements" in refused(build((), [tensor("t", (2**40, 2**40), 0, 0)]))
    assert "a dimension" in refused(build((), [tensor("t", (-1,), 0, 0)]))


def test_tensors_that_overlap_or_are_not_aligned_are_refused() -> None:
    first = tensor("a", (32, 4), 0, 0)
    assert "overlaps another" in refused(build((), [first, tensor("b", (32,), 0, 480)]))
    assert "overlaps another" in refused(build((), [first, tensor("b", (32,), 0, 0)]))
    assert "not aligned" in refused(build((), [first, tensor("b", (32,), 0, 520)]))
    assert parse(build((), [first, tensor("b", (32,), 0, 1024)]), 1 << 12).tensor_bytes == 640


def test_an_alignment_that_is_no_power_of_two_is_refused() -> None:
    for packed in (struct.pack("<I", 0), struct.pack("<I", 48)):
        assert "power of two" in refused(build([key("general.alignment", U32, packed)]))
    assert "power of two" in refused(build([key("general.alignment", STRING, text("32"))]))
    assert parse(build([key("general.alignment", U32, struct.pack("<I", 64))])).data_at % 64 == 0


def test_a_file_that_is_shorter_than_its_tensors_is_incomplete() -> None:
    raw = build((), [tensor("t", (32, 4), 0, 0)])
    data_at = parse(raw).data_at
    assert parse(raw, data_at + 512).tensor_bytes == 512
    assert "incomplete" in refused(raw, data_at + 511)


def test_a_vocabulary_of_a_quarter_million_is_walked_over_quickly() -> None:
    count = 262_144
    words = b"".join(text(b"word%d" % number) for number in range(count))
    raw = build([key("tokenizer.ggml.tokens", ARRAY, array(STRING, count, words)), key("last", U32, b"\7\0\0\0")])
    began = time.process_time()
    header = parse(raw)
    assert time.process_time() - began < 1.0
    assert header.metadata == {"tokenizer.ggml.tokens": gguf.Skipped(count), "last": 7}


def test_metadata_beyond_64_mib_is_refused() -> None:
    big = key("k", ARRAY, array(STRING, 80, text(b"x" * (1 << 20)) * 80))
    assert "larger than 64 MiB" in refused(build([big]))


def test_many_short_arrays_do_not_become_many_objects() -> None:
    raw = build([key(f"k{number}", ARRAY, array(U8, 1024, b"\1" * 1024)) for number in range(200)])
    kept = sum(len(value) for value in parse(raw).metadata.values() if isinstance(value, tuple))
    assert kept <= gguf.KEPT_TOTAL_MAX
