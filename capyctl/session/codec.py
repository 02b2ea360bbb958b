"""Values to JSON and back, strictly both ways: what was not said is not guessed.

Everything that is stored or sent is an attrs class of plain values. cattrs alone is lenient ("5"
becomes 5, "no" becomes True, "123" becomes (1, 2, 3)), so every scalar and every container has a
hook of its own here. A union of classes carries `kind`, spelled out in a table: renaming a class
renames no record, and a class that the table lacks is an error when it is first encoded, not a guess.

Absent optional fields are left out, so that a record written before a field existed reads the same
after it, and its digest stays valid.
"""

from __future__ import annotations

import collections.abc
import enum
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, Union

import attrs
import cattrs
import cattrs.errors

from capyctl.errors import InvariantBroken

KIND: Final = "kind"
INT_MAX: Final = 2**63 - 1  # what SQLite and other languages' clients carry


class Malformed(ValueError):
    """Stored or received text does not say what its type needs."""


class Codec:
    """Encodes and decodes attrs classes. `tags` names every class that is a member of some union."""

    def __init__(self, tags: Mapping[type, str]) -> None:
        self._tags = dict(tags)
        self._converter = cattrs.Converter(
            forbid_extra_keys=True, omit_if_default=True, detailed_validation=False, prefer_attrib_converters=False
        )
        self._register()

    # --- the whole value -----------------------------------------------------------------------

    def encode(self, value: object, as_type: Any = None) -> Any:
        """`value` as JSON values. `as_type` is needed when the value is declared as a union."""
        return self._converter.unstructure(value, unstructure_as=as_type if as_type is not None else type(value))

    def decode(self, data: object, as_type: Any) -> Any:  # Any: a union is a type too, and no type[T]
        """The value that `encode` made. Raises Malformed, naming the type and what is wrong."""
        try:
            return self._converter.structure(data, as_type)
        except (
            TypeError,
            KeyError,
            ValueError,
            AttributeError,
            InvariantBroken,
            cattrs.errors.ForbiddenExtraKeysError,
        ) as wrong:
            raise Malformed(
                f"not a {getattr(as_type, '__name__', as_type)}: {type(wrong).__name__}: {wrong}"
            ) from wrong

    def dumps(self, value: object, as_type: Any = None) -> str:
        """`encode` as canonical text: sorted keys, no spaces, ASCII."""
        return canonical(self.encode(value, as_type))

    def loads(self, text: str, as_type: Any) -> Any:
        """`decode` of text. Raises Malformed."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as wrong:
            raise Malformed(f"not JSON: {wrong}") from wrong
        return self.decode(data, as_type)

    # --- hooks -----------------------------------------------------------------------------------

    def _register(self) -> None:
        conv = self._converter
        for scalar in (str, int, bool, float):
            conv.register_structure_hook(scalar, _exactly(scalar))
        conv.register_structure_hook_func(lambda kind: kind is type(None), _exactly(type(None)))
        conv.register_structure_hook_func(_is_enum, _structure_enum)
        conv.register_unstructure_hook_func(_is_enum, lambda member: member.value)
        conv.register_structure_hook_func(_is_anything, lambda value, _: _plain(value))
        conv.register_unstructure_hook_func(_is_anything, _plain)
        for fits, structure, unstructure in (
            (_is_tuple, self._structure_tuple, self._unstructure_sequence),
            (_is_list, self._structure_list, self._unstructure_sequence),
            (_is_set, self._structure_set, self._unstructure_set),
            (_is_mapping, self._structure_mapping, self._unstructure_mapping),
            (_is_union, self._structure_union, self._unstructure_union),
        ):
            conv.register_structure_hook_factory(fits, structure)
            conv.register_unstructure_hook_factory(fits, unstructure)

    def _in(self, kind: Any) -> Callable[[Any], Any]:
        hook = self._converter.get_structure_hook(kind)
        return lambda value: hook(value, kind)

    def _out(self, kind: Any) -> Callable[[Any], Any]:
        return self._converter.get_unstructure_hook(kind)

    def _structure_tuple(self, kind: Any) -> Callable[[Any, Any], Any]:
        args = typing.get_args(kind)
        if len(args) == 2 and args[1] is Ellipsis:
            inner = self._in(args[0])
            return lambda value, _: tuple([inner(each) for each in _list(value)])
        inners = [self._in(arg) for arg in args]

        def fixed(value: Any, _: Any) -> tuple[Any, ...]:
            given = _list(value)
            if len(given) != len(inners):
                raise ValueError(f"{len(inners)} items, not {len(given)}")
            return tuple([inner(each) for inner, each in zip(inners, given, strict=True)])

        return fixed

    def _structure_list(self, kind: Any) -> Callable[[Any, Any], Any]:
        inner = self._in(typing.get_args(kind)[0])
        return lambda value, _: [inner(each) for each in _list(value)]

    def _unstructure_sequence(self, kind: Any) -> Callable[[Any], Any]:
        args = typing.get_args(kind)
        if len(args) > 1 and args[1] is not Ellipsis:
            outs = [self._out(arg) for arg in args]
            return lambda value: [out(each) for out, each in zip(outs, value, strict=True)]
        out = self._out(args[0])
        return lambda value: [out(each) for each in value]

    def _structure_set(self, kind: Any) -> Callable[[Any, Any], Any]:
        inner = self._in(typing.get_args(kind)[0])

        def structure(value: Any, _: Any) -> frozenset[Any]:
            items = [inner(each) for each in _list(value)]
            if len(set(items)) != len(items):
                raise ValueError("the same item twice")
            return frozenset(items)

        return structure

    def _unstructure_set(self, kind: Any) -> Callable[[Any], Any]:
        out = self._out(typing.get_args(kind)[0])
        return lambda value: sorted((out(each) for each in value), key=canonical)

    def _structure_mapping(self, kind: Any) -> Callable[[Any, Any], Any]:
        key_type, value_type = typing.get_args(kind)
        key, inner = _text_key(key_type), self._in(value_type)
        if key is not None:
            read = key.read

            def structure(value: Any, _: Any) -> dict[Any, Any]:
                if type(value) is not dict:
                    raise TypeError("an object is needed")
                return {read(name): inner(each) for name, each in value.items()}

            return structure
        key_in = self._in(key_type)

        def pairs(value: Any, _: Any) -> dict[Any, Any]:
            items = [_pair(each) for each in _list(value)]
            built = {key_in(name): inner(each) for name, each in items}
            if len(built) != len(items):
                raise ValueError("the same key twice")
            return built

        return pairs

    def _unstructure_mapping(self, kind: Any) -> Callable[[Any], Any]:
        key_type, value_type = typing.get_args(kind)
        key, out = _text_key(key_type), self._out(value_type)
        if key is not None:
            write = key.write
            return lambda value: {write(name): out(each) for name, each in value.items()}
        key_out = self._out(key_type)
        return lambda value: sorted(([key_out(name), out(each)] for name, each in value.items()), key=canonical)

    def _structure_union(self, kind: Any) -> Callable[[Any, Any], Any]:
        members = _members(kind)
        plain = [member for member in members if not attrs.has(member)]
        classes = [member for member in members if attrs.has(member)]
        hooks = [self._in(member) for member in plain]
        tagged = {self._tag(member): self._in(member) for member in classes} if len(classes) > 1 else {}
        alone = self._in(classes[0]) if len(classes) == 1 else None

        def structure(value: Any, _: Any) -> Any:
            if type(value) is dict and alone is not None:
                return alone(value)
            if type(value) is dict and tagged:
                rest = dict(value)
                return tagged[rest.pop(KIND)](rest)
            for hook in hooks:
                try:
                    return hook(value)
                except (TypeError, ValueError):
                    continue
            raise TypeError(f"{type(value).__name__} is none of {kind}")

        return structure

    def _unstructure_union(self, kind: Any) -> Callable[[Any], Any]:
        members = _members(kind)
        classes = [member for member in members if attrs.has(member)]
        tagged = {member: (self._tag(member), self._out(member)) for member in classes} if len(classes) > 1 else {}
        outs = {classes[0]: self._out(classes[0])} if len(classes) == 1 else {}
        plain = [self._out(member) for member in members if not attrs.has(member) and member is not type(None)]

        def unstructure(value: Any) -> Any:
            found = tagged.get(type(value))
            if found is not None:
                tag, out = found
                return {KIND: tag, **out(value)}
            if type(value) in outs:
                return outs[type(value)](value)
            if value is None or isinstance(value, (str, int, float, bool)):
                return value
            if len(plain) == 1:
                return plain[0](value)
            raise TypeError(f"{type(value).__name__} is none of {kind}")

        return unstructure

    def _tag(self, member: type) -> str:
        try:
            tag = self._tags[member]
        except KeyError:
            raise InvariantBroken(f"{member.__module__}.{member.__name__} has no spelled-out kind") from None
        if any(field.name == KIND for field in attrs.fields(member)):
            raise InvariantBroken(f"{member.__name__} has a field named {KIND}, which its tag needs")
        return tag


def canonical(data: object) -> str:
    """JSON with one spelling per value."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


# --- kinds of types --------------------------------------------------------------------------------


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def _is_anything(kind: Any) -> bool:
    return kind is Any or kind is object


def _is_tuple(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple


def _is_list(kind: Any) -> bool:
    return typing.get_origin(kind) in (list, collections.abc.Sequence)


def _is_set(kind: Any) -> bool:
    return typing.get_origin(kind) in (set, frozenset, collections.abc.Set)


def _is_mapping(kind: Any) -> bool:
    return typing.get_origin(kind) in (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (Union, types.UnionType)


def _members(kind: Any) -> tuple[Any, ...]:
    """The classes of a union, aliases of plain types resolved."""
    return tuple(_base(member) if not attrs.has(_base(member)) else member for member in typing.get_args(kind))


def _base(kind: Any) -> Any:
    while hasattr(kind, "__supertype__"):
        kind = kind.__supertype__
    return kind


# --- scalars ---------------------------------------------------------------------------------------


def _exactly(scalar: type) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        if type(value) is not scalar:  # a bool is an int elsewhere, not here
            raise TypeError(f"{scalar.__name__} is needed, not {type(value).__name__}")
        if isinstance(value, int) and not -INT_MAX - 1 <= value <= INT_MAX:
            raise ValueError("beyond 64 bits")
        return value

    return structure


def _structure_enum(value: Any, kind: Any) -> Any:
    for member in kind:
        if type(member.value) is type(value) and member.value == value:
            return member
    raise ValueError(f"{value!r} is no {kind.__name__}")


def _plain(value: Any) -> Any:
    """A value that JSON carries unchanged; tuples become lists. Raises TypeError for anything else."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, collections.abc.Mapping):
        if not all(isinstance(name, str) for name in value):
            raise TypeError("a key of free-form data is text")
        return {name: _plain(each) for name, each in value.items()}
    raise TypeError(f"{type(value).__name__} is not free-form data")


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"a list is needed, not {type(value).__name__}")
    return value


def _pair(value: Any) -> list[Any]:
    if type(value) is not list or len(value) != 2:
        raise TypeError("a pair of key and value is needed")
    return value


@attrs.frozen
class _TextKey:
    """How a key of a mapping is written as an object's key."""

    read: Callable[[Any], Any]
    write: Callable[[Any], str]


def _text_key(kind: Any) -> _TextKey | None:
    """The text form of a key type, or None: then the mapping is a list of pairs."""
    kind = _base(kind)
    if kind is str:
        return _TextKey(read=lambda name: name, write=str)
    if kind is int:
        return _TextKey(read=_whole, write=str)
    if _is_enum(kind) and all(isinstance(member.value, str) for member in kind):
        return _TextKey(read=lambda name: _structure_enum(name, kind), write=lambda member: str(member.value))
    return None


def _whole(name: str) -> int:
    number = int(name)
    if str(number) != name:
        raise ValueError(f"{name!r} is not a canonical integer")
    return number
