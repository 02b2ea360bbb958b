"""A strict look over JSON text that builds nothing: is it one acceptable object, and where do its members stand?

A body of 16 MiB that is decoded becomes a tree of a gigabyte, and a decoder in C lets no other thread run
until it is done. So clients' bodies are only looked over: regular expressions step from value to value over
the bytes as they came, each match is bounded, and what is kept is a stack of names and the places of the
members at the top. Whoever needs a value decodes those few bytes.

Possessive quantifiers (`*+`, `{0,n}+`) everywhere: nothing is tried twice, so the time is linear in the text.
What they repeat is an atomic group (`(?>`) wherever it holds a choice: before Python 3.11.5 a possessive
quantifier forgets its place when what it repeats could be tried again.

Refused: text that is not UTF-8, a byte-order mark, lone surrogates, duplicate names at any depth, `NaN` and
`Infinity`, nesting beyond 64, numbers of more than 4300 digits, more than 2^18 names of objects that are open
at one time, more than some 2^21 objects, arrays and members in all.
"""

from __future__ import annotations

import codecs
import json
import re
import time
from typing import Final

import attrs

DEPTH_MAX: Final = 64
DIGITS_MAX: Final = 4300
NAMES_MAX: Final = 2**18
"""Names held to find duplicates: a bias for every token of a large vocabulary fits, a bomb of names does not."""

STEPS_MAX: Final = 2**21
"""Objects, arrays and members looked at one by one, which bounds the time: eight bytes for each in the largest body."""

_PIECE: Final = 2**16  # bytes decoded at a time
_BREATH_EVERY: Final = 2**11  # steps, a millisecond or so
_BREATH_S: Final = 1e-4


class NotStrict(ValueError):
    """The text is not an acceptable JSON object. Its message names no value of the client's."""


@attrs.frozen
class Spot:
    """Where a value stands, in bytes of the text: from `start` up to `end`."""

    start: int
    end: int


_SPACE: Final = rb"[ \t\n\r]*+"
_ESCAPE: Final = (
    rb'\\(?:["\\/bfnrt]|u(?:[0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}'
    rb"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
_PLAIN: Final = rb'[^"\\\x00-\x1f]'
_INSIDE: Final = rb"(?>" + _PLAIN + rb"{1,4096}+|" + _ESCAPE + rb")"
_STRING: Final = rb'"' + _INSIDE + rb'{0,256}+"'
_NUMBER: Final = rb"-?+(?:0|[1-9][0-9]{0,4299}+)(?>\.[0-9]{1,4300}+)?+(?>[eE][-+]?+[0-9]{1,4300}+)?+(?![0-9.eE+\-])"
_SCALAR: Final = rb"(?:" + _STRING + rb"|" + _NUMBER + rb"|true|false|null)"


def _listed(item: bytes, most: int) -> bytes:
    """Up to `most` items, each with the comma behind it."""
    return rb"(?>" + _SPACE + item + _SPACE + rb",){0,%d}+" % most


# What holds no two names needs no look of its own. The runs below only save steps; what they leave is walked.
_FLAT: Final = (
    rb"(?:" + _SCALAR
    + rb"|\[" + _SPACE + rb"(?>" + _listed(_SCALAR, 64) + _SPACE + _SCALAR + _SPACE + rb")?+\]"
    + rb"|\{" + _SPACE + rb"(?>" + _STRING + _SPACE + rb":" + _SPACE + _SCALAR + _SPACE + rb")?+\})"
)  # fmt: skip

_space: Final = re.compile(_SPACE).match
_inside: Final = re.compile(_INSIDE + rb"{0,256}+").match
_scalars: Final = re.compile(_listed(_SCALAR, 512)).match
_flats: Final = re.compile(_listed(_FLAT, 64)).match
_scalar: Final = re.compile(_SCALAR).match
_member: Final = re.compile(
    _SPACE + rb'"(' + _PLAIN + rb'{0,4096}+)"' + _SPACE + rb":" + _SPACE + rb"(" + _SCALAR + rb")" + _SPACE + rb","
).match
_word: Final = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*", re.ASCII).fullmatch
_digits: Final = re.compile(rb"[0-9.eE+\-]{%d}" % (DIGITS_MAX + 1)).match
_constant: Final = re.compile(rb"NaN|-?Infinity").match
_surrogate: Final = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}").match


def scan(text: bytes, *, patient: bool = False) -> dict[str, Spot]:
    """The places of the values of one strict JSON object's own members, by name.

    Args:
      patient: called in a thread of its own; every millisecond or so the others are let run.
    Raises: NotStrict with a sentence for the client.
    """
    if text.startswith(codecs.BOM_UTF8):
        raise NotStrict("the body starts with a byte-order mark")
    _check_utf8(text)
    at = _skip(text, 0)
    if text[at : at + 1] != b"{":
        raise NotStrict("the body is not a JSON object")
    return _Walk(text, patient).run(at)


def decoded(text: bytes, spot: Spot) -> object:
    """The value at a place that `scan` gave."""
    return json.loads(text[spot.start : spot.end])


def _check_utf8(text: bytes) -> None:
    if text.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(text), _PIECE):
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(text[at : at + _PIECE], at + _PIECE >= len(text))
        except UnicodeDecodeError as error:
            raise NotStrict(f"the body is not UTF-8: byte {at - pending + error.start} does not fit") from None


def _not_json(why: str, at: int) -> NotStrict:
    return NotStrict(f"the body is not JSON: {why} at byte {at}")


def _skip(text: bytes, at: int) -> int:
    match = _space(text, at)
    assert match is not None  # it matches nothing, too
    return match.end()


@attrs.define(eq=False)
class _Walk:
    """One pass. `stack` holds what is open: the names of an object so far, or None for an array."""

    text: bytes
    patient: bool
    stack: list[set[bytes] | None] = attrs.field(factory=list)
    names: int = 0
    found: dict[str, Spot] = attrs.field(factory=dict)

    def run(self, at: int) -> dict[str, Spot]:
        text, stack = self.text, self.stack
        begun: tuple[bytes, int] | None = None  # the top member being read, and where its value began
        steps = 0
        at, closable = self._opened(at), True  # `at` stands where a value, a name or a closing mark may begin
        while stack:
            steps += 1
            if steps > STEPS_MAX:
                raise NotStrict(f"the body has more than {STEPS_MAX} objects, arrays and members")
            if self.patient and not steps % _BREATH_EVERY:
                time.sleep(_BREATH_S)
            names = stack[-1]
            if names is None:
                run = _flats(text, at) if len(stack) < DEPTH_MAX else _scalars(text, at)
                assert run is not None  # it matches nothing, too
                if run.end() > at:
                    at, closable = run.end(), False
                    continue
                at = _skip(text, at)
                if closable and text[at : at + 1] == b"]":
                    at = self._closed(at + 1)
                elif text[at : at + 1] in (b"[", b"{"):
                    at, closable = self._opened(at), True
                    continue
                else:
                    at = self._scalar_end(at)
            elif (member := _member(text, at)) is not None:  # with a scalar, and the comma behind it
                self._named(member[1], names)
                if len(stack) == 1:
                    self._keep(member[1], *member.span(2))
                at, closable = member.end(), False
                continue
            else:
                at = _skip(text, at)
                if closable and text[at : at + 1] == b"}":
                    at = self._closed(at + 1)
                else:
                    name, at = self._name(at, names)
                    if len(stack) == 1:
                        begun = name, at
                    if text[at : at + 1] in (b"[", b"{"):
                        at, closable = self._opened(at), True
                        continue
                    at = self._scalar_end(at)
            # A value has ended here. A comma leads to the next one; a closing mark ends what is around it.
            while stack:
                if begun is not None and len(stack) == 1:
                    self._keep(begun[0], begun[1], at)
                    begun = None
                at = _skip(text, at)
                mark = text[at : at + 1]
                if mark == b",":
                    at, closable = at + 1, False
                    break
                if mark != (b"]" if stack[-1] is None else b"}"):
                    raise _not_json("a comma or a closing mark is missing", at)
                at = self._closed(at + 1)
        if _skip(text, at) != len(text):
            raise _not_json("something follows the object", at)
        return self.found

    def _keep(self, name: bytes, start: int, end: int) -> None:
        self.found[name.decode()] = Spot(start, end)

    def _opened(self, at: int) -> int:
        if len(self.stack) >= DEPTH_MAX:
            raise NotStrict(f"the body is nested deeper than {DEPTH_MAX}")
        self.stack.append(set() if self.text[at : at + 1] == b"{" else None)
        return at + 1

    def _closed(self, at: int) -> int:
        names = self.stack.pop()
        if names is not None:
            self.names -= len(names)
        return at

    def _name(self, at: int, names: set[bytes]) -> tuple[bytes, int]:
        """A member's name, and where its value begins."""
        text = self.text
        if text[at : at + 1] != b'"':
            raise _not_json("a member's name in quotes is missing", at)
        end = self._string_end(at)
        name = text[at + 1 : end - 1]
        if b"\\" in name:
            name = json.loads(text[at:end]).encode()
        self._named(name, names)
        at = _skip(text, end)
        if text[at : at + 1] != b":":
            raise _not_json("a colon is missing", at)
        return name, _skip(text, at + 1)

    def _named(self, name: bytes, names: set[bytes]) -> None:
        if name in names:
            if len(self.stack) > 1:
                raise NotStrict("an object in the body has two members of one name")
            # The name is shown only when it is a plain word: it is the client's text.
            shown = f"`{name.decode()}`" if len(name) <= 64 and _word(name) else "a name"
            raise NotStrict(f"the body has {shown} twice")
        names.add(name)
        self.names += 1
        if self.names > NAMES_MAX:
            raise NotStrict(f"the body has more than {NAMES_MAX} names in objects around one place")

    def _scalar_end(self, at: int) -> int:
        """The end of a string, number or word."""
        text = self.text
        if text[at : at + 1] == b'"':
            return self._string_end(at)
        match = _scalar(text, at)
        if match is not None:
            return match.end()
        if _digits(text, at):
            raise NotStrict(f"the body holds a number of more than {DIGITS_MAX} digits")
        if constant := _constant(text, at):
            raise NotStrict(f"the body holds {constant.group().decode()}, which is not JSON")
        raise _not_json("there is no value", at)

    def _string_end(self, at: int) -> int:
        text = self.text
        at += 1
        while True:
            match = _inside(text, at)
            assert match is not None  # it matches nothing, too
            if match.end() == at:
                break
            at = match.end()
        mark = text[at : at + 1]
        if mark == b'"':
            return at + 1
        if mark == b"":
            raise _not_json("a string has no end", at)
        if _surrogate(text, at):
            raise NotStrict("the body holds a lone surrogate")
        raise _not_json("a string holds a control character or an unknown escape", at)
