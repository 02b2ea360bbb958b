"""Safetensors headers, read with bounds: names, types and shapes of tensors. No tensor byte is read.

A model file is untrusted input: its header's length is checked before anything of that length is read, and
every range in it before it is believed. What the library accepts and we refuse is a name said twice: it keeps
the last, and the sums would differ.

Source: memory 5.15.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import attrs

from capyctl.checkpoints.bounded_json import WrongJson, parse, shown
from capyctl.checkpoints.directory import ModelFile
from capyctl.checkpoints.reading import opened, read
from capyctl.errors import Refusal

HEADER_BYTES_MAX = 100_000_000
DIMENSIONS_MAX = 64
_BITS_MAX = 1 << 66
_LENGTH = struct.Struct("<Q")
_MEMBERS = {"dtype", "shape", "data_offsets"}

BITS: Mapping[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(
        ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"),
        8,
    ),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}
"""Bits of one value of each type that the format knows."""


class Tensor(NamedTuple):
    """One tensor as its header states it. A plain tuple: a large model has a hundred thousand of them."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


@attrs.frozen(kw_only=True)
class Header:
    """What a safetensors file says about itself, by tensor name. `tensor_bytes` is all of its data."""

    tensors: Mapping[str, Tensor]
    tensor_bytes: int
    header_bytes: int


class _Wrong(ValueError):
    """What is wrong with a header, in words that follow the file's name."""


def read_header(file: ModelFile) -> Header:
    """Read the header of one file. Blocking; at most 100 MB are read.

    Raises: Refusal `checkpoint_unusable` naming the file and the first thing that is wrong with it;
      `checkpoint_mismatch` when it changes meanwhile.
    """
    try:
        raw, data_bytes = _read(file)
        try:
            return _header(parse(raw), data_bytes, len(raw))
        except WrongJson as wrong:
            raise _Wrong(f"its header {wrong}") from None
    except _Wrong as wrong:
        raise Refusal("checkpoint_unusable", f"{file.path} is no usable safetensors file: {wrong}") from None


def _read(file: ModelFile) -> tuple[bytes, int]:
    """The header's text, and how many bytes follow it."""
    with opened(file) as stream:
        first = read(stream, _LENGTH.size)
        if len(first) < _LENGTH.size:
            raise _Wrong(f"it has {file.size_bytes} bytes, fewer than its length field")
        (length,) = _LENGTH.unpack(first)
        if length > HEADER_BYTES_MAX:
            raise _Wrong(f"its header would have {length} bytes; at most {HEADER_BYTES_MAX} are read")
        there = file.size_bytes - _LENGTH.size
        if length > there:
            raise _Wrong(f"its header of {length} bytes ends after {there}; is it still being downloaded?")
        begin = read(stream, min(length, 1))
        if begin != b"{":  # looked at first: a hole of 100 MB costs nobody a disk, and would cost us the memory
            raise _Wrong("its header does not begin with {")
        raw = begin + read(stream, length - 1)
    return raw.rstrip(b" "), there - length


def _header(entries: Any, data_bytes: int, header_bytes: int) -> Header:
    if not isinstance(entries, dict):
        raise _Wrong("its header is not an object")
    metadata = entries.pop("__metadata__", None)
    if metadata is not None:
        _check_metadata(metadata)
    tensors: dict[str, Tensor] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        tensor, begin, end = _tensor(name, entry)
        tensors[name] = tensor
        ranges.append((begin, end, name))
    return Header(tensors=tensors, tensor_bytes=_covered(ranges, data_bytes), header_bytes=header_bytes)


def _check_metadata(entry: Any) -> None:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise _Wrong("its __metadata__ holds something that is no text")


def _covered(ranges: list[tuple[int, int, str]], data_bytes: int) -> int:
    """All bytes of the data, which the ranges must cover without a hole, an overlap or a rest."""
    at = 0
    for begin, end, name in sorted(ranges):
        if begin != at:
            what = "a hole before" if begin > at else "an overlap at"
            raise _Wrong(f"there is {what} {shown(name)}")
        at = end
    if at != data_bytes:
        if at > data_bytes:
            raise _Wrong(f"its tensors need {at} bytes and {data_bytes} are there; is it still being downloaded?")
        raise _Wrong(f"{data_bytes - at} bytes follow its last tensor")
    return at


def _tensor(name: str, entry: Any) -> tuple[Tensor, int, int]:
    if not isinstance(entry, dict) or entry.keys() != _MEMBERS:
        raise _Wrong(f"{shown(name)} does not state dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise _Wrong(f"{shown(name)} has the unknown type {shown(str(dtype))}")
    if not _counts(shape, DIMENSIONS_MAX):
        raise _Wrong(f"{shown(name)} has no usable shape")
    if not _counts(offsets, 2) or len(offsets) != 2:
        raise _Wrong(f"{shown(name)} has no usable data_offsets")
    for number in shape:
        bits *= number
        if bits > _BITS_MAX:  # a later zero would have hidden it
            raise _Wrong(f"{shown(name)} is larger than any file")
    begin, end = offsets
    if bits % 8:
        raise _Wrong(f"{shown(name)} does not end on a byte")
    if end - begin != bits // 8:
        raise _Wrong(f"{shown(name)} is {bits // 8} bytes by its shape and {end - begin} by its data_offsets")
    return Tensor(dtype, tuple(shape), end - begin), begin, end


def _counts(numbers: Any, most: int) -> bool:
    """Whether this is a list of at most `most` whole numbers that a file could be measured in."""
    if type(numbers) is not list or len(numbers) > most:
        return False
    if not numbers:
        return True
    return set(map(type, numbers)) == {int} and min(numbers) >= 0 and max(numbers) < 1 << 63
