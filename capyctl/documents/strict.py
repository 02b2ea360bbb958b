"""Plain data into attrs classes, strictly, and back.

cattrs is lenient by itself ("5" becomes 5, 3.7 becomes 3, "no" becomes True), so every scalar has a
hook of its own here and none of them coerces. A refusal is one line that names the field's path and
what is allowed; an unknown field is answered with the nearest name.
Source: config 2, 3.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeVar

import attrs
import cattrs

from capyctl.documents import scalars
from capyctl.errors import CapyError, Refusal
from capyctl.units import (
    Duration,
    Growth,
    Limit,
    Size,
    parse_duration,
    parse_growth,
    parse_limit,
    parse_size,
)

T = TypeVar("T")
Path = tuple[str | int, ...]


ALIKE: Final = 0.7  # `memry` and `memory` are 0.91 alike, `sleepy` and `deep` 0.6
NAME_CHARS: Final = 64  # no field's name is longer


class Wrong(Exception):
    """A field at `path` that may not be what it is. `code` is on the closed list."""

    def __init__(self, path: Path, message: str, code: str = "invalid_config") -> None:
        super().__init__(message)
        self.path = path
        self.message = message
        self.code = code

    def under(self, *parents: str | int) -> Wrong:
        """The same fault, seen from further out."""
        return Wrong((*parents, *self.path), self.message, self.code)


def dotted(path: Path) -> str:
    """`engine_config.extra_args[2]`; a field that somebody called something long or unprintable is quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if part.isprintable() and len(part) <= NAME_CHARS else shown(part)
            text += f".{name}" if text else name
    return text


def structure(data: Any, into: type[T], source: str) -> T:
    """`data` as an instance of `into`.

    Args:
      source: how messages call the document; empty leaves it out.
    Raises: Refusal with the fault's code, one line: `source: path: what is allowed`.
    """
    try:
        return structure_raw(data, into)
    except Wrong as wrong:
        raise refusal(wrong, source) from None


def refusal(wrong: Wrong, source: str) -> CapyError:
    """The one-line refusal of a fault in `source`."""
    where = ": ".join(part for part in (source, dotted(wrong.path)) if part)
    return Refusal(wrong.code, f"{where}: {wrong.message}" if where else wrong.message)


def structure_raw(data: Any, into: type[T]) -> T:
    """As `structure`, but raises Wrong: for callers that know who stated which path."""
    try:
        return _CONVERTER.structure(data, into)
    except RecursionError:
        raise Wrong((), "is nested too deeply") from None


def unstructure(value: Any) -> Any:
    """Plain data of a document's value: fields without a value are left out, quantities are text."""
    if attrs.has(type(value)) and not isinstance(value, scalars.Written):
        pairs = ((field.name, getattr(value, field.name)) for field in attrs.fields(type(value)))
        return {name: unstructure(item) for name, item in pairs if item is not None}
    if isinstance(value, enum.Enum | scalars.Written):
        return str(value)
    match value:
        case Mapping():
            return {str(key): unstructure(item) for key, item in value.items()}
        case tuple() | list():
            return [unstructure(item) for item in value]
        case _:
            return value


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal documents give equal text."""
    return json.dumps(unstructure(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def nearest(word: str, known: typing.Iterable[str], *, most: int = 1) -> list[str]:
    """The names that someone who wrote `word` may have meant."""
    import difflib  # 5 ms; only a refusal needs it

    return difflib.get_close_matches(word, sorted(known), n=most, cutoff=ALIKE)


def shown(value: Any) -> str:
    """A value as a message quotes it: short, one line, printable."""
    text = json.dumps(value, ensure_ascii=True, default=str) if not isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


# ---------------------------------------------------------------- rules of a field


def within(low: Any, high: Any) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """A validator: `low <= value <= high`; None passes. Bounds are of the field's own type."""

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and not low <= value <= high:
            raise Wrong((field.name,), f"is {value}; it must be from {low} to {high}")

    return check


def at_least(low: Any) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """A validator: `value >= low`; None passes."""

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and value < low:
            raise Wrong((field.name,), f"is {value}; it must be at least {low}")

    return check


def no_more_than(count: int) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """A validator: a list or a map of at most `count` entries."""

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and len(value) > count:
            raise Wrong((field.name,), f"has {len(value)} entries; at most {count} are read")

    return check


# ---------------------------------------------------------------- hooks


def _of(kind: type, name: str) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        if type(value) is not kind:  # not isinstance: True is an int
            quoted = " (write it in quotes)" if kind is str and type(value) in (int, float, bool) else ""
            raise Wrong((), f"expected {name}, not {shown(value)}{quoted}")
        return value

    return hook


def _from_text(parse: Callable[[str], Any], name: str) -> Callable[[Any, Any], Any]:
    text = _of(str, name)

    def hook(value: Any, into: Any) -> Any:
        if type(value) in (int, float) and name in ("a duration", "a size", "a limit"):
            raise Wrong((), f"{shown(value)} has no unit; expected {name} with its unit, such as {_UNIT[name]}")
        try:
            return parse(text(value, into))
        except ValueError as wrong:
            raise Wrong((), f"{shown(value)}: {wrong}") from None

    return hook


_UNIT: Final = {"a duration": "30s", "a size": "24GiB", "a limit": "24GiB"}


def _literal(value: Any, into: Any) -> Any:
    allowed = typing.get_args(into)
    if any(type(value) is type(word) and value == word for word in allowed):
        return value
    if allowed == (1,) and type(value) is int and value > 1:
        raise Wrong((), f"is {value}; this release reads 1", "unsupported")
    words = [str(word) for word in allowed]
    near = nearest(value, words) if isinstance(value, str) else []
    hint = f" (did you mean {near[0]}?)" if near and len(words) > 1 else ""
    raise Wrong((), f"{shown(value)} is not allowed; expected {' or '.join(words)}{hint}")


def _class_hook(cls: type[Any]) -> Callable[[Any, Any], Any]:
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in attrs.fields(cls)}

    def hook(value: Any, _: Any) -> Any:
        if type(value) is not dict:
            raise Wrong((), f"expected a block with {', '.join(list(fields)[:6])}, not {shown(value)}")
        for name in value:
            if name not in fields:
                raise Wrong((name,), unknown_field(name, cls))
        given: dict[str, Any] = {}
        for name, field in fields.items():
            if name in value:
                try:
                    given[name] = _CONVERTER.structure(value[name], hints[name])
                except Wrong as wrong:
                    raise wrong.under(name) from None
            elif field.default is attrs.NOTHING:
                raise Wrong((name,), "is required")
        return cls(**given)

    return hook


def unknown_field(name: str, cls: type[Any]) -> str:
    """What to say about a field that `cls` does not have."""
    moved = getattr(cls, "MOVED", {}).get(name)
    if moved is not None:
        return f"is not a field here; {moved}"
    known = [field.name for field in attrs.fields(cls)]
    near = nearest(name, known)
    if near:
        return f"is not a field here; did you mean {near[0]}?"
    return f"is not a field here; the fields are {', '.join(known)}"


def _optional_hook(into: Any) -> Callable[[Any, Any], Any]:
    arms = tuple(arm for arm in typing.get_args(into) if arm is not types.NoneType)
    inner: Any = arms[0] if len(arms) == 1 else typing.Union[arms]  # noqa: UP007  built at run time

    def hook(value: Any, _: Any) -> Any:
        if value is None:
            raise Wrong((), "has no value; leave the field out instead")
        return _CONVERTER.structure(value, inner)

    return hook


def _list_hook(into: Any) -> Callable[[Any, Any], Any]:
    item = typing.get_args(into)[0]

    def hook(value: Any, _: Any) -> Any:
        if type(value) is not list:
            raise Wrong((), f"expected a list, not {shown(value)}")
        out = []
        for index, entry in enumerate(value):
            try:
                out.append(_CONVERTER.structure(entry, item))
            except Wrong as wrong:
                raise wrong.under(index) from None
        return tuple(out)

    return hook


def _map_hook(into: Any) -> Callable[[Any, Any], Any]:
    key_type, item_type = typing.get_args(into)

    def hook(value: Any, _: Any) -> Any:
        if type(value) is not dict:
            raise Wrong((), f"expected a block of names and values, not {shown(value)}")
        out = {}
        for key, entry in value.items():
            try:
                out[_CONVERTER.structure(key, key_type)] = _CONVERTER.structure(entry, item_type)
            except Wrong as wrong:
                raise wrong.under(key) from None
        return out

    return hook


def _is_optional(into: Any) -> bool:
    return typing.get_origin(into) in (typing.Union, types.UnionType) and types.NoneType in typing.get_args(into)


def _origin_is(*origins: Any) -> Callable[[Any], bool]:
    return lambda into: typing.get_origin(into) in origins


def _same_as(alias: Any) -> Callable[[Any], bool]:
    return lambda into: bool(into == alias)


def register(into: Any, hook: Callable[[Any, Any], Any]) -> None:
    """Give `into` (a class, a NewType or a union) a hook of its own. The hook raises Wrong."""
    _hook(_CONVERTER, into, hook)


def _hook(made: cattrs.Converter, into: Any, hook: Callable[[Any, Any], Any]) -> None:
    # cattrs asks its table of classes before its predicates, so a class must go into the table.
    if isinstance(into, type):
        made.register_structure_hook(into, hook)
    else:
        made.register_structure_hook_func(_same_as(into), hook)


# Later registrations win, so the general comes before the particular.
def _converter() -> cattrs.Converter:
    made = cattrs.Converter(detailed_validation=False)
    made.register_structure_hook_factory(attrs.has, _class_hook)
    made.register_structure_hook_factory(_origin_is(tuple), _list_hook)
    made.register_structure_hook_factory(_origin_is(dict, Mapping), _map_hook)
    made.register_structure_hook_func(_origin_is(Literal), _literal)
    made.register_structure_hook_factory(_is_optional, _optional_hook)
    for kind, name in ((str, "text"), (int, "a whole number"), (bool, "true or false")):
        _hook(made, kind, _of(kind, name))
    quantities: tuple[tuple[Any, Callable[[str], Any], str], ...] = (
        (Duration, parse_duration, "a duration"),
        (Size, parse_size, "a size"),
        (Limit, parse_limit, "a limit"),
        (Growth, parse_growth, "a limit"),
        *scalars.PARSERS,
    )
    for into, parse, name in quantities:
        _hook(made, into, _from_text(parse, name))
    return made


_CONVERTER: Final = _converter()
