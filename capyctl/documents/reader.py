"""Text of a document into plain data, strictly: YAML with the 1.2 core scalars, or JSON.

Both standard readers keep the last of two equal keys, and YAML readers of the 1.1 school turn `on`
and `no` into booleans. Here the second key is refused with its line, `on` stays text, and
everything that lets a document mean more than it shows (anchors, aliases, tags, merge keys, a second
document) is refused. Works on the event stream, so a bomb is refused before it is built.
Source: config 3, security 5.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import yaml

from capyctl.errors import Refusal

BYTES_MAX: Final = 1 << 20
DEPTH_MAX: Final = 32
_DIGITS_MAX: Final = 19

_INT: Final = re.compile(r"[-+]?(0|[1-9][0-9]*)", re.ASCII)
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_WORDS: Final = {
    "true": True, "True": True, "TRUE": True,
    "false": False, "False": False, "FALSE": False,
    "null": None, "Null": None, "NULL": None, "~": None, "": None,
}  # fmt: skip
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml when the wheel has it; untyped


class _Bad(Exception):
    """What is wrong with the text, and the line it stands on when that is known."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def read(text: str | bytes, source: str) -> Any:
    """Plain data (dict, list, str, int, float, bool, None) of one document.

    Args:
      source: how messages call the document: its path, or "the request".
    Raises: Refusal invalid_config, one line that starts with `source` and names the line at fault.
    """
    try:
        if isinstance(text, bytes):
            text = _decode(text)
        if len(text) > BYTES_MAX or len(text.encode("utf-8", "surrogatepass")) > BYTES_MAX:
            raise _Bad("is larger than 1 MiB")
        if text.lstrip(" \t\r\n").startswith(("{", "[")):
            return _read_json_or_flow(text)
        return _read_yaml(text)
    except _Bad as bad:
        where = f"{source}, line {bad.line}" if bad.line is not None else source
        raise Refusal("invalid_config", f"{where}: {bad}") from None


def read_scalar(text: str, source: str) -> Any:
    """What `text` means when it stands alone, as the value of `--set path=value` does."""
    return read(text, source) if text.strip() else ""


def _decode(raw: bytes) -> str:
    if len(raw) > BYTES_MAX:
        raise _Bad("is larger than 1 MiB")
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as wrong:
        raise _Bad("is not UTF-8 text", raw[: wrong.start].count(b"\n") + 1) from None


# JSON documents are read as JSON: YAML would refuse their tabs.
def _read_json_or_flow(text: str) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant, parse_int=_json_int)
    except json.JSONDecodeError:
        return _read_yaml(text)  # a YAML flow mapping, or broken JSON that YAML will describe
    except RecursionError:
        raise _Bad(f"is nested deeper than {DEPTH_MAX} levels") from None
    _bound_depth(value, 1)
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise _Bad(f"{_quote(key)} is stated twice")
        mapping[key] = value
    return mapping


def _constant(word: str) -> Any:
    raise _Bad(f"{word} is not a value a document may hold")


def _json_int(digits: str) -> int:
    return _int(digits, None)


def _bound_depth(value: Any, depth: int) -> None:
    if not isinstance(value, dict | list):
        if isinstance(value, str):
            _check_text(value, None)
        return
    if depth > DEPTH_MAX:
        raise _Bad(f"is nested deeper than {DEPTH_MAX} levels")
    for key, item in value.items() if isinstance(value, dict) else ((None, item) for item in value):
        if key is not None:
            _check_text(key, None)
        _bound_depth(item, depth + 1)


def _read_yaml(text: str) -> Any:
    try:
        return _Builder().build(text)
    except yaml.MarkedYAMLError as wrong:
        line = wrong.problem_mark.line + 1 if wrong.problem_mark is not None else None
        raise _Bad(f"is not YAML: {wrong.problem or wrong.context}", line) from None
    except yaml.reader.ReaderError as wrong:
        raise _Bad(f"holds a character YAML forbids: {wrong.reason}") from None
    except UnicodeEncodeError:
        raise _Bad("holds half a surrogate pair") from None


class _Builder:
    """Builds data from YAML events with an explicit stack: depth costs no recursion."""

    def __init__(self) -> None:
        self.stack: list[tuple[Any, str | None]] = []  # container, key waiting for its value
        self.root: Any = None
        self.documents = 0

    def build(self, text: str) -> Any:
        for event in yaml.parse(text, Loader=_LOADER):
            mark = event.start_mark
            line = mark.line + 1 if mark is not None else 0
            if isinstance(event, yaml.DocumentStartEvent):
                self.documents += 1
                if self.documents > 1:
                    raise _Bad("a file holds one document; a second one begins here", line)
                if event.tags or (event.version or (1, 2)) > (1, 2):
                    raise _Bad("YAML directives are not read", line)
            elif isinstance(event, yaml.AliasEvent):
                raise _Bad(f"aliases (*{event.anchor}) are not read; write the value out", line)
            elif isinstance(event, yaml.NodeEvent):
                self._node(event, line)
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                self.stack.pop()
        if self.documents == 0:
            raise _Bad("is empty")
        return self.root

    def _node(self, event: Any, line: int) -> None:  # Any: the stubs give events no attributes
        if event.anchor is not None:
            raise _Bad(f"anchors (&{event.anchor}) are not read", line)
        if event.tag is not None:
            raise _Bad(f"tags ({event.tag}) are not read", line)
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event, line)
            return
        if len(self.stack) >= DEPTH_MAX:
            raise _Bad(f"is nested deeper than {DEPTH_MAX} levels", line)
        container: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
        if self.stack and isinstance(self.stack[-1][0], dict) and self.stack[-1][1] is None:
            raise _Bad("a key must be plain text", line)
        self._place(container)
        self.stack.append((container, None))

    def _scalar(self, event: Any, line: int) -> None:
        text: str = event.value
        _check_text(text, line)
        plain = event.style in (None, "") and event.implicit[0]
        if self.stack and isinstance(self.stack[-1][0], dict) and self.stack[-1][1] is None:
            mapping = self.stack[-1][0]
            if plain and text == "<<":
                raise _Bad("merge keys (<<) are not read", line)
            if text in mapping:
                raise _Bad(f"{_quote(text)} is stated twice", line)
            self.stack[-1] = (mapping, text)
            return
        self._place(_resolve(text, line) if plain else text)

    def _place(self, value: Any) -> None:
        if not self.stack:
            self.root = value
            return
        container, key = self.stack[-1]
        if isinstance(container, dict):
            assert key is not None
            container[key] = value
            self.stack[-1] = (container, None)
        else:
            container.append(value)


def _resolve(text: str, line: int) -> Any:
    """The YAML 1.2 core meaning of a plain scalar, less octal and hexadecimal: `0x10` stays text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return _int(text, line)
    if _FLOAT.fullmatch(text) and len(text) <= 64 and not text.lstrip("+-").isdigit():
        return float(text)
    return text


def _int(digits: str, line: int | None) -> int:
    if len(digits) > _DIGITS_MAX + 1:
        raise _Bad(f"the number {digits[:24]}… is too large", line)
    return int(digits)


def _check_text(text: str, line: int | None) -> None:
    if "\x00" in text:
        raise _Bad("holds a NUL character", line)
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise _Bad("holds half a surrogate pair", line)


def _quote(text: str) -> str:
    return json.dumps(text if len(text) <= 64 else text[:64] + "…", ensure_ascii=True)
