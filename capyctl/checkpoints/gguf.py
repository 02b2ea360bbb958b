"""GGUF headers, read with bounds: metadata, tensor shapes and where the data begins. No tensor byte is read.

A model file is untrusted input. Every length in it is checked before anything of that length is read,
so a hostile header costs bounded time and memory and ends in one clear line. Vocabulary arrays are walked
over, not kept: a header of a 50 000-token model takes some hundredths of a second.

Source: memory 5.12, 5.15; security 5.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Protocol

import attrs

from capyctl.checkpoints.directory import ModelFile
from capyctl.checkpoints.reading import opened
from capyctl.errors import Refusal

METADATA_BYTES_MAX = 64 << 20
KEYS_MAX = 1 << 20
STRING_BYTES_MAX = 1 << 20
ARRAY_ENTRIES_MAX = 1 << 20
TENSORS_MAX = 1 << 18
KEPT_ENTRIES_MAX = 1024
"""Numeric arrays up to this length are kept (one entry per layer); longer ones are vocabularies."""
KEPT_TOTAL_MAX = 1 << 16
"""Entries kept over the whole file: a file of nothing but short arrays must not become gigabytes of objects."""
_INT64_MAX = (1 << 63) - 1
_CHUNK = 1 << 20

# name, values per block, bytes per block; the index is ggml's type number. None: a number ggml gave up.
BLOCKS: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}

# The scalar types of metadata values, by their number in the file.
_SCALARS: Mapping[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64, _I64 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<q")

Scalar = int | float | bool | str


@attrs.frozen
class Skipped:
    """An array that was walked over and not kept."""

    entries: int


Value = Scalar | tuple[Scalar, ...] | Skipped


@attrs.frozen(kw_only=True)
class Tensor:
    """One tensor's place. `offset` counts from the start of the data; `size_bytes` follows from shape and type."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    size_bytes: int


@attrs.frozen(kw_only=True)
class Header:
    """What a GGUF file says about itself. `data_at` is where its tensor data begins, bytes."""

    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    alignment: int
    data_at: int

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    def text(self, key: str) -> str | None:
        """The value of `key` when it is text."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int | None:
        """The value of `key` when it is a whole number that is not negative."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


class Readable(Protocol):
    """What a header is read from; `read` may give less than is asked."""

    def read(self, size: int, /) -> bytes | None: ...


class _Cursor:
    """A forward reader over a bounded window of the file."""

    def __init__(self, stream: _Whole, name: str) -> None:
        self.stream, self.name = stream, name
        self.buffer = b""
        self.at = 0  # next unread byte of the buffer
        self.base = 0  # file offset of the buffer's first byte
        self.kept = 0  # array entries kept so far

    @property
    def offset(self) -> int:
        return self.base + self.at

    def refuse(self, what: str) -> Refusal:
        return Refusal("checkpoint_unusable", f"{self.name}: {what} (at byte {self.offset} of the GGUF header)")

    def need(self, count: int) -> int:
        """Make `count` bytes available and return where they begin in the buffer."""
        start = self.at
        if len(self.buffer) - start < count:
            if self.offset + count > METADATA_BYTES_MAX:
                raise self.refuse(f"the metadata is larger than {METADATA_BYTES_MAX >> 20} MiB")
            kept = self.buffer[start:]
            self.base += start
            # The read stops at the file's end, so a hostile length allocates nothing by itself.
            self.buffer = kept + self.stream.read(max(count - len(kept), _CHUNK))
            self.at = start = 0
            if len(self.buffer) < count:
                raise self.refuse("the file ends inside its header")
        self.at = start + count
        return start

    def unpack(self, form: struct.Struct) -> Scalar:
        start = self.need(form.size)  # first: it may replace the buffer
        value: Scalar = form.unpack_from(self.buffer, start)[0]
        return value

    def count(self, form: struct.Struct, most: int, what: str) -> int:
        value = self.unpack(form)
        assert isinstance(value, int)
        if not 0 <= value <= most:
            raise self.refuse(f"{what} of {value}; at most {most} are read")
        return value

    def string(self, what: str) -> str:
        length = self.count(_U64, STRING_BYTES_MAX, f"a {what} length")
        start = self.need(length)
        return self.buffer[start : start + length].decode("utf-8", "replace")

    def skip_strings(self, entries: int) -> None:
        """Walk over `entries` strings. The plain loop over local names is what keeps vocabularies cheap."""
        read, size = _U64.unpack_from, _U64.size
        while entries:
            buffer, at, end = self.buffer, self.at, len(self.buffer)
            while entries and end - at >= size:
                (length,) = read(buffer, at)
                if length > STRING_BYTES_MAX:
                    self.at = at
                    raise self.refuse(f"a string length of {length}; at most {STRING_BYTES_MAX} are read")
                if end - at - size < length:
                    break
                at += size + length
                entries -= 1
            self.at = at
            if entries:
                # One string by the careful way, which also fetches the next piece of the file.
                self.need(self.count(_U64, STRING_BYTES_MAX, "a string length"))
                entries -= 1
            if self.offset > METADATA_BYTES_MAX:
                raise self.refuse(f"the metadata is larger than {METADATA_BYTES_MAX >> 20} MiB")

    def skip(self, count: int) -> None:
        while count:
            step = min(count, _CHUNK)
            self.need(step)
            count -= step


def read_header(file: ModelFile) -> Header:
    """Read the header of a listed GGUF file.

    Raises: Refusal `checkpoint_unusable` for anything that is not a whole, well-formed header of bounded
      size, and for a file shorter than its tensors say; `checkpoint_mismatch` when it changes meanwhile.
    Source: memory 5.15.
    """
    with opened(file) as stream:
        return parse_header(stream, file.path, file_bytes=file.size_bytes)


def parse_header(stream: Readable, name: str, *, file_bytes: int | None = None) -> Header:
    """Read a header from `stream`; `file_bytes` lets it be compared with what the tensors need.

    Raises: Refusal `checkpoint_unusable`, as `read_header`.
    """
    cursor = _Cursor(_Whole(stream), name)
    start = cursor.need(4)
    if cursor.buffer[start : start + 4] != b"GGUF":
        raise Refusal("checkpoint_unusable", f"{name} is not a GGUF file: it does not begin with GGUF")
    version = cursor.unpack(_U32)
    if version not in (2, 3):
        raise Refusal("checkpoint_unusable", f"{name}: GGUF version {version} is not read; versions 2 and 3 are")
    tensor_count = cursor.count(_I64, TENSORS_MAX, "a tensor count")
    key_count = cursor.count(_I64, KEYS_MAX, "a key count")
    metadata: dict[str, Value] = {}
    for _ in range(key_count):
        key = cursor.string("key")
        if not key:
            raise cursor.refuse("a key is empty")
        if key in metadata:
            raise cursor.refuse(f"the key {_shown(key)} is given twice")
        metadata[key] = _value(cursor)
    alignment = _alignment(cursor, metadata)
    tensors = _tensors(cursor, tensor_count)
    data_at = -(-cursor.offset // alignment) * alignment
    header = Header(version=int(version), metadata=metadata, tensors=tensors, alignment=alignment, data_at=data_at)
    end = data_at + _end(cursor, tensors, alignment)
    if file_bytes is not None and tensors and end > file_bytes:
        raise Refusal(
            "checkpoint_unusable",
            f"{name} is incomplete: its tensors need {end} bytes and the file has {file_bytes}. Download it again",
            details={"needs_bytes": end, "has_bytes": file_bytes},
        )
    return header


def _end(cursor: _Cursor, tensors: tuple[Tensor, ...], alignment: int) -> int:
    """Where the data of the last tensor ends. Raises: Refusal for tensors that overlap or are not aligned."""
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.size_bytes)):
        if tensor.offset % alignment:
            raise cursor.refuse(f"the tensor {_shown(tensor.name)} is not aligned to {alignment} bytes")
        if tensor.offset < end:
            raise cursor.refuse(f"the tensor {_shown(tensor.name)} overlaps another one")
        end = tensor.offset + tensor.size_bytes
    return end


class _Whole:
    """A stream whose `read` gives as much as asked unless the file ends: raw files may give less."""

    def __init__(self, stream: Readable) -> None:
        self.stream = stream

    def read(self, size: int = -1) -> bytes:
        pieces = []
        while size > 0:
            piece = self.stream.read(min(size, _CHUNK))
            if not piece:
                break
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


def _shown(text: str) -> str:
    return ascii(text[:60])


def _value(cursor: _Cursor) -> Value:
    kind = cursor.unpack(_U32)
    if kind == _STRING:
        return cursor.string("string")
    if kind == _ARRAY:
        return _array(cursor)
    form = _SCALARS.get(int(kind))
    if form is None:
        raise cursor.refuse(f"a value of unknown type {kind}")
    return cursor.unpack(form)


def _array(cursor: _Cursor) -> Value:
    kind = int(cursor.unpack(_U32))
    entries = cursor.count(_U64, ARRAY_ENTRIES_MAX, "an array length")
    if kind == _ARRAY:
        raise cursor.refuse("an array of arrays")
    if kind == _STRING:
        cursor.skip_strings(entries)
        return Skipped(entries)
    form = _SCALARS.get(kind)
    if form is None:
        raise cursor.refuse(f"an array of unknown type {kind}")
    if entries > KEPT_ENTRIES_MAX or cursor.kept + entries > KEPT_TOTAL_MAX:
        cursor.skip(entries * form.size)
        return Skipped(entries)
    cursor.kept += entries
    start = cursor.need(entries * form.size)
    window = cursor.buffer[start : start + entries * form.size]
    return tuple(value for (value,) in form.iter_unpack(window))


def _alignment(cursor: _Cursor, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value & (value - 1) or value >= 1 << 32:
        raise cursor.refuse(f"general.alignment is {value!r}, not a power of two")
    return value


def _tensors(cursor: _Cursor, count: int) -> tuple[Tensor, ...]:
    tensors: dict[str, Tensor] = {}
    for _ in range(count):
        tensor = _tensor(cursor)
        if tensor.name in tensors:
            raise cursor.refuse(f"the tensor {_shown(tensor.name)} is listed twice")
        tensors[tensor.name] = tensor
    return tuple(tensors.values())


def _tensor(cursor: _Cursor) -> Tensor:
    name = cursor.string("tensor name")
    dimensions = cursor.count(_U32, 4, "a dimension count")
    shape = tuple(cursor.count(_I64, _INT64_MAX, "a dimension") for _ in range(dimensions))
    kind = int(cursor.unpack(_U32))
    offset = cursor.count(_U64, _INT64_MAX, "a tensor offset")
    block = BLOCKS.get(kind)
    if block is None:
        raise cursor.refuse(f"the tensor {_shown(name)} has the unknown type {kind}")
    type_name, values, size = block
    elements = 1
    for dimension in shape:
        elements *= dimension
    if elements > _INT64_MAX:
        raise cursor.refuse(f"the tensor {_shown(name)} has more elements than can be counted")
    if shape and shape[0] % values:
        raise cursor.refuse(f"the tensor {_shown(name)} has rows of {shape[0]} values, not whole {type_name} blocks")
    size_bytes = -(-elements // values) * size
    return Tensor(name=name, shape=shape, type=type_name, offset=offset, size_bytes=size_bytes)
