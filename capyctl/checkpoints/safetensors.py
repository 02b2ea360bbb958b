"""Safetensors headers, read with bounds: names, types and shapes of tensors. No tensor byte is read.

A model file is untrusted input: its header's length is checked before anything of that length is read, and
every range in it before it is believed. What the library accepts and we refuse is a name said twice: it keeps
the last, and the sums would differ.

Source: memory 5.15.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import attrs

from capyctl.checkpoints.bounded_json import WrongJson, members, shown
from capyctl.checkpoints.directory import ModelFile
from capyctl.checkpoints.reading import opened, read
from capyctl.errors import Refusal

HEADER_BYTES_MAX = 100_000_000
DIMENSIONS_MAX = 64
_LENGTH = struct.Struct("<Q")

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


@attrs.frozen(kw_only=True)
class Tensor:
    """One tensor as its header states it."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


@attrs.frozen(kw_only=True)
class Header:
    """What a safetensors file says about itself, by tensor name. `tensor_bytes` is all of its data."""

    tensors: Mapping[str, Tensor]
    tensor_bytes: int


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
            return _header(raw, data_bytes)
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


def _header(raw: bytes, data_bytes: int) -> Header:
    """The whole text is read before anything in it is judged: what is no JSON is said to be none."""
    tensors: dict[str, Tensor] = {}
    ranges: list[tuple[int, int, str]] = []
    problem: _Wrong | None = None
    names: set[str] = set()
    twice: str | None = None
    for name, entry in members(raw):
        twice = name if name in names else twice
        names.add(name)
        try:
            if name == "__metadata__":
                _check_metadata(entry)
                continue
            tensor, begin, end = _tensor(name, entry)
        except _Wrong as wrong:
            problem = problem or wrong
            continue
        if problem is None:
            tensors[name] = tensor
            ranges.append((begin, end, name))
    if twice is not None:
        raise _Wrong(f"its header names {shown(twice)} twice")
    if problem is not None:
        raise problem
    return Header(tensors=tensors, tensor_bytes=_covered(ranges, data_bytes))


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
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _Wrong(f"{shown(name)} does not state dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _Wrong(f"{shown(name)} has the unknown type {shown(str(dtype))}")
    if not isinstance(shape, list) or len(shape) > DIMENSIONS_MAX or not all(_count(number) for number in shape):
        raise _Wrong(f"{shown(name)} has no usable shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_count(number) for number in offsets):
        raise _Wrong(f"{shown(name)} has no usable data_offsets")
    bits = BITS[dtype]
    for number in shape:
        bits *= number
        if bits >= 1 << 66:  # more than any file holds; a later zero would have hidden it
            raise _Wrong(f"{shown(name)} is larger than any file")
    begin, end = offsets
    if bits % 8:
        raise _Wrong(f"{shown(name)} does not end on a byte")
    if end - begin != bits // 8:
        raise _Wrong(f"{shown(name)} is {bits // 8} bytes by its shape and {end - begin} by its data_offsets")
    return Tensor(dtype=dtype, shape=tuple(shape), size_bytes=end - begin), begin, end


def _count(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 63
