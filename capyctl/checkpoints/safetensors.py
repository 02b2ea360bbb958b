"""Safetensors headers, read with bounds: names, types and shapes of tensors. No tensor byte is read.

A model file is untrusted input: its header's length is checked before anything of that length is read, and
every range in it before it is believed. What the library accepts and we refuse is a name said twice: it keeps
the last, and the sums would differ.

Source: memory 5.15.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from capyctl.errors import Refusal

HEADER_BYTES_MAX = 100_000_000
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


def read_header(path: Path, shown: str | None = None) -> Header:
    """Read the header of one file. Blocking; at most 100 MB are read.

    Args:
      shown: the name that people know the file by, when `path` is a blob of a cache.
    Raises: Refusal `checkpoint_unusable` naming the file and the first thing that is wrong with it.
    """
    name = shown or path.name
    try:
        raw, data_bytes = _read(path)
        return _header(_parse(raw), data_bytes)
    except OSError as error:
        raise Refusal("checkpoint_unusable", f"{name} cannot be read: {error.strerror}") from None
    except _Wrong as wrong:
        raise Refusal("checkpoint_unusable", f"{name} is no usable safetensors file: {wrong}") from None


def _read(path: Path) -> tuple[bytes, int]:
    """The header's text, and how many bytes follow it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise _Wrong("it is no regular file")
        first = stream.read(_LENGTH.size)
        if len(first) < _LENGTH.size:
            raise _Wrong(f"it has {status.st_size} bytes, fewer than its length field")
        (length,) = _LENGTH.unpack(first)
        if length > HEADER_BYTES_MAX:
            raise _Wrong(f"its header would have {length} bytes; at most {HEADER_BYTES_MAX} are read")
        raw = stream.read(length)
        if len(raw) < length:
            raise _Wrong(f"its header of {length} bytes ends after {len(raw)}; is it still being downloaded?")
    return raw, status.st_size - _LENGTH.size - length


def _parse(raw: bytes) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise _Wrong("its header does not begin with {")
    try:
        # Parsed strictly: NaN and its kin are no JSON, and a name that is said twice is refused.
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise _Wrong("its header is not UTF-8") from None
    except RecursionError:
        raise _Wrong("its header is nested too deeply") from None
    except _Wrong:
        raise
    except ValueError:
        raise _Wrong("its header is not JSON") from None
    if not isinstance(parsed, dict):
        raise _Wrong("its header is not an object")
    return parsed


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _Wrong(f"its header names {_shown(twice)} twice")
    return made


def _no_constant(word: str) -> Any:
    raise _Wrong(f"its header holds {word}, which is not JSON")


def _header(entries: dict[str, Any], data_bytes: int) -> Header:
    metadata = entries.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise _Wrong("its __metadata__ holds something that is no text")
    tensors: dict[str, Tensor] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        tensor, begin, end = _tensor(name, entry)
        tensors[name] = tensor
        ranges.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(ranges):
        if begin != at:
            what = "a hole before" if begin > at else "an overlap at"
            raise _Wrong(f"there is {what} {_shown(name)}")
        at = end
    if at != data_bytes:
        if at > data_bytes:
            raise _Wrong(f"its tensors need {at} bytes and {data_bytes} are there; is it still being downloaded?")
        raise _Wrong(f"{data_bytes - at} bytes follow its last tensor")
    return Header(tensors=tensors, tensor_bytes=at)


def _tensor(name: str, entry: Any) -> tuple[Tensor, int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _Wrong(f"{_shown(name)} does not state dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _Wrong(f"{_shown(name)} has the unknown type {_shown(str(dtype))}")
    if not isinstance(shape, list) or not all(_count(number) for number in shape):
        raise _Wrong(f"{_shown(name)} has no usable shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_count(number) for number in offsets):
        raise _Wrong(f"{_shown(name)} has no usable data_offsets")
    bits = BITS[dtype]
    for number in shape:
        bits *= number
        if bits >= 1 << 66:  # more than any file holds; a later zero would have hidden it
            raise _Wrong(f"{_shown(name)} is larger than any file")
    begin, end = offsets
    if bits % 8:
        raise _Wrong(f"{_shown(name)} does not end on a byte")
    if end - begin != bits // 8:
        raise _Wrong(f"{_shown(name)} is {bits // 8} bytes by its shape and {end - begin} by its data_offsets")
    return Tensor(dtype=dtype, shape=tuple(shape), size_bytes=end - begin), begin, end


def _count(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 63


def _shown(name: str) -> str:
    return repr(name if len(name) <= 80 else f"{name[:80]}…")
