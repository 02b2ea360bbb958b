"""Reading an engine's event stream while it passes: whole events in, the same bytes out.

An event is passed on when it is complete, never before: whatever becomes of the engine, the client
never holds half an event, and the error event that may follow is one that it can read. The bytes of
an event stay as they came, except that a `model` other than the one the client asked for is replaced.
Comments are the router's own language to clients, so an engine's comments are dropped.

Unknown fields pass: a closed list of them would break with every release of an engine, and protects
nobody, since whoever may ask a model may read what it says.

Most events are only searched for a few byte strings; an unescaped `"model":"` cannot occur inside a
JSON string, so finding the right one needs no parser.
"""

from __future__ import annotations

import re
from typing import Any, Final

import attrs

from capyctl.router.answers import engine_words
from capyctl.router.body import JsonObject, holds_no_number, parse_object, quoted
from capyctl.router.endpoints import MODEL_PATHS, Dialect, ends_stream, is_output
from capyctl.router.figures import OBJECTS
from capyctl.router.scan import NotStrict

PIECE_BYTES_MAX: Final = 4 * 2**20
NO_NUMBER: Final = "the engine's answer holds a log probability that is no number, which is no JSON"

# CRLF is one line end. A lone CR that ends the buffer may be the first half of one; then the event is
# cut a byte early and that LF starts the next, which changes no byte of the whole.
_EVENT_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_NAMES: Final = ("usage", *OBJECTS)
_FIGURES: Final = tuple(f'"{name}"'.encode() for name in _NAMES)


@attrs.frozen
class Done:
    """The terminator came. Its bytes have not been passed on yet: figures go before it."""

    terminator: bytes


@attrs.frozen
class Broken:
    """The stream broke a rule of the relay; nothing of the offending event was passed on."""

    reason: str


@attrs.frozen
class EngineSaid:
    """The engine reported an error inside its stream."""

    message: str


End = Done | Broken | EngineSaid


@attrs.define
class EventReader:
    """One answer's events. After `end` is set nothing more is passed on."""

    dialect: Dialect
    route: str
    piece_bytes_max: int = PIECE_BYTES_MAX
    logprobs: bool = False  # asked for: an event with one that is no number is not passed on
    output_begun: bool = False
    end: End | None = None
    figures: dict[str, Any] = attrs.field(factory=dict)  # the newest of the engine's own objects
    _held: bytearray = attrs.field(factory=bytearray)
    _needles: tuple[bytes, bytes] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        name = quoted(self.route)
        self._needles = (b'"model":' + name, b'"model": ' + name)

    def feed(self, piece: bytes) -> bytes:
        """Take bytes as they came; answer what may be passed on now. May set `end` and `output_begun`."""
        held = self._held
        look_from = max(0, len(held) - 3)  # an event's end is at most four bytes long
        held += piece
        passed: list[bytes] = []
        start = 0
        for match in _EVENT_END.finditer(held, look_from):
            passed.append(self._read(bytes(held[start : match.end()])))
            start = match.end()
            if self.end is not None:
                break
        if start:
            del held[:start]
        if self.end is None and len(held) > self.piece_bytes_max:
            self._too_large()
        return passed[0] if len(passed) == 1 else b"".join(passed)

    def finish(self) -> bytes:
        """The engine ended its body: a last event may lack its blank line, but not its own end."""
        rest = bytes(self._held).strip(b"\r\n")
        self._held.clear()
        if not rest or self.end is not None:
            return b""
        self.output_begun, begun = False, self.output_begun  # have it parsed, whatever it looks like
        passed = self._read(rest + b"\n\n")
        self.output_begun = self.output_begun or begun
        return b"" if isinstance(self.end, Broken) else passed

    def _too_large(self) -> None:
        self.end = Broken(f"one event of the answer is larger than {self.piece_bytes_max} bytes")

    def _read(self, event: bytes) -> bytes:
        if len(event) > self.piece_bytes_max + 4:
            self._too_large()
            return b""
        if event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2 and b"\r" not in event:
            return self._read_data(event, b"", event[6:-2])
        return self._read_lines(event)

    def _read_lines(self, event: bytes) -> bytes:
        """An event in any of the forms that the format allows: other fields, several data lines, comments."""
        lines = [line for line in _LINE_END.split(event) if line]
        fields = [line for line in lines if not line.startswith(b":")]
        if len(fields) != len(lines):
            event = b"\n".join(fields) + b"\n\n" if fields else b""
        data, others, kind = [], [], b""
        for line in fields:
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                data.append(value)
                continue
            others.append(line + b"\n")
            if name == b"event":
                kind = value
            elif name == b"error":  # how older llama.cpp servers report an error
                kind, data = b"error", [value]
        if not data:
            return event
        if kind == b"error":
            return self._said(b"\n".join(data))
        return self._read_data(event, b"".join(others), b"\n".join(data))

    def _read_data(self, event: bytes, others: bytes, data: bytes) -> bytes:
        if data == b"[DONE]":
            self.end = Done(event)
            return b""
        try:
            event.decode()
        except UnicodeDecodeError:
            self.end = Broken("the answer is not UTF-8")
            return b""
        if data[:1] != b"{" or data[-1:] != b"}":
            self.end = Broken("an event of the answer is not a JSON object")
            return b""
        if self.logprobs and holds_no_number(data):
            self.end = Broken(NO_NUMBER)
            return b""
        renamed = b'"model"' in data and self._needles[0] not in data and self._needles[1] not in data
        figures = any(name in data for name in _FIGURES)
        typed = self.dialect is not Dialect.CHAT and (b"message_stop" in data or b'"response.' in data)
        if not (renamed or figures or typed or not self.output_begun or b'"error"' in data):
            return event
        try:
            chunk = parse_object(data)
        except NotStrict:
            self.end = Broken("an event of the answer is not a JSON object")
            return b""
        return self._read_chunk(event, others, chunk, renamed)

    def _read_chunk(self, event: bytes, others: bytes, chunk: JsonObject, renamed: bool) -> bytes:
        values = chunk.values
        if values.get("error") or values.get("type") == "error":
            return self._said(chunk.text)
        self.output_begun = self.output_begun or is_output(self.dialect, values)
        for name in _NAMES:
            if isinstance(values.get(name), dict):
                self.figures[name] = values[name]
        if renamed:
            text = renamed_to(chunk, self.route, MODEL_PATHS[self.dialect])
            event = others + b"".join(b"data: " + line + b"\n" for line in _LINE_END.split(text)) + b"\n"
        if ends_stream(self.dialect, str(values.get("type", ""))):
            self.end = Done(event)
            return b""
        return event

    def _said(self, data: bytes) -> bytes:
        try:
            message, _, _ = engine_words(parse_object(data).values)
        except NotStrict:
            message = ""
        self.end = EngineSaid(message or "the engine reported an error")
        return b""


def renamed_to(chunk: JsonObject, route: str, inside: tuple[str, ...]) -> bytes:
    """The chunk's bytes with `model` replaced at the top level and inside the named members."""
    text = chunk.text
    for name in inside:
        if isinstance(chunk.values.get(name), dict):
            spot = chunk.spot(name)
            inner = parse_object(text[spot.start : spot.end])
            if isinstance(inner.values.get("model"), str):
                text = text[: spot.start] + inner.replaced("model", route) + text[spot.end :]
    if isinstance(chunk.values.get("model"), str):
        # A member's own place may have moved; the model's place is looked up in the text as it is now.
        text = (chunk if text is chunk.text else parse_object(text)).replaced("model", route)
    return text
