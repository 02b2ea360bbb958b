"""The manifest of a custom engine: how its program is started, what it serves, and how it says that it is idle.

A manifest is confirmed once by whoever administers the host, and pinned: what it says is data, never a
shell's text. Source: config 9; engines 10.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from capyctl.documents import strict
from capyctl.documents.scalars import Argument, EnvName, EnvValue, UrlPath
from capyctl.documents.strict import Wrong, no_more_than

PLACEHOLDERS: Final = ("host", "port", "model", "name")
MANIFEST_KIND: Final = "custom_engine"
_PLACEHOLDER: Final = re.compile(r"\{([a-z_]+)\}", re.ASCII)
_METRIC: Final = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]{0,255}", re.ASCII)


@attrs.frozen(kw_only=True)
class Idle:
    """Where the engine says how much it is doing: JSON pointers, or names of Prometheus metrics; all 0 is idle."""

    path: UrlPath
    running: str
    waiting: str | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("running", "waiting"):
            word = getattr(self, name)
            if word is not None and not (_pointer(word) or _METRIC.fullmatch(word)):
                raise Wrong((name,), "expected a JSON pointer such as /active, or the name of a metric")
        if self.waiting is not None and _pointer(self.waiting) != _pointer(self.running):
            raise Wrong(("waiting",), "is of the other kind than running; state two JSON pointers or two metrics")

    @property
    def is_json(self) -> bool:
        """Whether the answer is a JSON value; otherwise it is a page of metrics."""
        return _pointer(self.running)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.running,) if self.waiting is None else (self.running, self.waiting)


def _pointer(word: str) -> bool:
    return word.startswith("/") and word.isprintable() and len(word) <= 256


@attrs.frozen(kw_only=True)
class Manifest:
    """What a custom engine is. `command` is everything after the program; `{port}` and others are filled in."""

    api: Literal["chat", "decisions"]
    command: tuple[Argument, ...] = attrs.field(validator=no_more_than(256))
    health: UrlPath | None = None
    idle: Idle | None = None
    version: str = "unknown"
    env: Mapping[EnvName, EnvValue] = attrs.field(factory=dict, validator=no_more_than(64))

    def __attrs_post_init__(self) -> None:
        used: set[str] = set()
        for index, word in enumerate(self.command):
            if any(ord(char) < 32 for char in word):
                raise Wrong(("command", index), "expected one line of text without control characters")
            for name in _PLACEHOLDER.findall(word):
                if name not in PLACEHOLDERS:
                    known = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
                    raise Wrong(("command", index), f"{{{name}}} is not filled in; there are {known}")
                used.add(name)
        if "port" not in used:
            raise Wrong(("command",), "does not say {port}; CapyCTL leases a port for each launch")
        if not self.version or len(self.version) > 64 or not self.version.isprintable() or " " in self.version:
            raise Wrong(("version",), "expected one word of at most 64 characters")

    def arguments(self, *, host: str, port: int, model: str, name: str) -> tuple[str, ...]:
        """The command with its placeholders filled in. What is put in is not looked at again."""
        values = {"host": host, "port": str(port), "model": model, "name": name}
        return tuple(_PLACEHOLDER.sub(lambda found: values[found[1]], word) for word in self.command)


def parse_manifest(data: Any, source: str) -> Manifest:
    """A manifest file's plain data. Raises: Refusal `invalid_config`, one line naming the field."""
    header = {"schema_version": 1, "kind": MANIFEST_KIND}
    if not isinstance(data, dict):
        raise strict.refusal(Wrong((), f"expected a document with kind: {MANIFEST_KIND}"), source)
    for name, value in header.items():
        if type(data.get(name)) is not type(value) or data[name] != value:
            raise strict.refusal(Wrong((name,), f"expected {value}"), source)
    return strict.structure({name: value for name, value in data.items() if name not in header}, Manifest, source)
