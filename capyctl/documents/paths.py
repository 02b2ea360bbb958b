"""The settings of a document class by their dotted path, and laying statements over a document.

A *statement* is one value at one path and who made it; a refusal names that maker, because a user
with a document, three variables and two flags needs to know which of them to change.
Source: config 11, 12.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import attrs

from capyctl.documents import strict
from capyctl.documents.scalars import Written
from capyctl.documents.strict import Wrong
from capyctl.errors import Refusal

T = TypeVar("T")
Origin = Literal["default", "yaml", "env", "flag", "set"]
SettingPath = tuple[str, ...]
REDACTED: Final = "<redacted>"
"""Instead of the values of engines' variables, which may be secrets."""


@attrs.frozen(kw_only=True)
class Statement:
    """`value` (plain data) at `path`, made by `by`: a flag, a variable or an override, as a message names it."""

    path: SettingPath
    value: Any
    origin: Origin
    by: str


@attrs.frozen(kw_only=True)
class Row:
    """One effective setting as `config show` prints it. `value` is plain data."""

    path: str
    value: Any
    source: Origin

    @property
    def text(self) -> str:
        return as_text(self.value)


def as_text(value: Any) -> str:
    """Plain data as a table cell: `true`, `30s`, `[a, b]`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(as_text(item) for item in value)}]"
    return str(value)


def _inner(kind: Any) -> Any:
    """The type without its `| None`."""
    arms = [arm for arm in typing.get_args(kind) if arm is not type(None)]
    return arms[0] if type(None) in typing.get_args(kind) and len(arms) == 1 else kind


def _fields(kind: Any) -> dict[str, Any] | None:
    """Names and types inside a block, or None for a leaf. A map answers for no name of its own."""
    if isinstance(kind, type) and attrs.has(kind) and not issubclass(kind, typing.get_args(Written)):
        hints = typing.get_type_hints(kind)
        return {field.name: _inner(hints[field.name]) for field in attrs.fields(kind)}
    return None


def _item(kind: Any) -> Any | None:
    """The type of a map's values, or None when `kind` is no map."""
    return _inner(typing.get_args(kind)[1]) if typing.get_origin(kind) in (dict, Mapping) else None


def leaves(document: type[Any], under: SettingPath = ()) -> Iterator[SettingPath]:
    """Every setting of a document class; names inside maps are written `<name>`."""
    fields = _fields(document)
    if fields is not None:
        for name, kind in fields.items():
            yield from leaves(kind, (*under, name))
    elif (item := _item(document)) is not None:
        yield from leaves(item, (*under, "<name>"))
    else:
        yield under


def check_path(document: type[Any], path: SettingPath, by: str) -> None:
    """Refuse a path that is no setting of `document`: lists the nearest ones, or those inside the block.

    Raises: Refusal invalid_config naming `by`.
    """
    kind: Any = document
    for depth, name in enumerate(path):
        fields, item = _fields(kind), _item(kind)
        if item is not None:
            kind = item
        elif fields is not None and name in fields:
            kind = fields[name]
        else:
            raise Refusal("invalid_config", f"{by}: {'.'.join(path)} is no setting; {_suggest(document, path, depth)}")
    fields, item = _fields(kind), _item(kind)
    if fields is not None or item is not None:
        inside = [".".join(leaf) for leaf in leaves(kind, path)][:8]
        raise Refusal("invalid_config", f"{by}: {'.'.join(path)} is a block; set one of {', '.join(inside)}")


def _suggest(document: type[Any], path: SettingPath, depth: int) -> str:
    known = [".".join(leaf) for leaf in leaves(document)]
    near = strict.nearest(".".join(path), known, most=3)
    ending = [name for name in known if name.rsplit(".", 1)[-1] == path[-1]]
    found = list(dict.fromkeys((*near, *ending)))[:3]
    if found:
        return f"the nearest are {', '.join(found)}"
    at = ".".join(path[:depth])
    inside = [name for name in known if name.startswith(f"{at}.")] if at else known
    return f"there is {', '.join(inside[:8])}"


def overlay(document: type[T], raw: Mapping[str, Any], statements: Sequence[Statement], source: str) -> T:
    """The document with every statement laid over it, in order: the last one about a path wins.

    Args:
      raw: the document's plain data; `source` is how messages call it.
    Raises: Refusal naming the document, flag, variable or override at fault.
    """
    if raw:
        strict.structure(dict(raw), document, source)  # what is wrong with the document is its own fault
    merged = copy.deepcopy(dict(raw))
    for statement in statements:
        _put(merged, statement)
    try:
        return strict.structure_raw(merged, document)
    except Wrong as wrong:
        raise strict.refusal(wrong, _maker(wrong, statements) or source) from None


def _put(merged: dict[str, Any], statement: Statement) -> None:
    at: Any = merged
    for name in statement.path[:-1]:
        at = at.setdefault(name, {})
    at[statement.path[-1]] = statement.value


def _maker(wrong: Wrong, statements: Sequence[Statement]) -> str | None:
    """Who stated the path a fault names, or something inside it; the strongest one."""
    for statement in reversed(statements):
        shorter = min(len(statement.path), len(wrong.path))
        if shorter and statement.path[:shorter] == wrong.path[:shorter]:
            return statement.by
    return None


def rows(effective: Any, raw: Mapping[str, Any], statements: Iterable[Statement]) -> tuple[Row, ...]:
    """Every effective setting with where it comes from, sorted by path. Values of engine `env` are redacted."""
    made = {statement.path: statement for statement in statements}
    found = []
    for path, value in _flatten(strict.unstructure(effective), ()):
        origin: Origin = "default"
        shown = value
        if path in made:
            origin, stated = made[path].origin, made[path].value
            shown = stated if type(stated) is type(value) else value
        elif (stated := _get(raw, path)) is not None:
            origin, shown = "yaml", stated if type(stated) is type(value) else value
        if "env" in path[:-1]:
            shown = REDACTED
        found.append(Row(path=".".join(path), value=shown, source=origin))
    return tuple(sorted(found, key=lambda row: row.path))


def _flatten(value: Any, under: SettingPath) -> Iterator[tuple[SettingPath, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flatten(item, (*under, name))
    elif not (isinstance(value, list) and not value):  # an empty list says nothing that its absence does not
        yield under, value


def _get(raw: Any, path: SettingPath) -> Any:
    for name in path:
        if not isinstance(raw, Mapping) or name not in raw:
            return None
        raw = raw[name]
    return raw
