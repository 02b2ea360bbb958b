"""Random values of any plain type, by walking its fields. What claims something is drawn so that it holds."""

from __future__ import annotations

import collections.abc
import enum
import types
import typing
from typing import Any

import attrs
from hypothesis import strategies as st

from capyctl.fsm import proofs
from capyctl.fsm.types import Incarnation, Millis, ProcessIdentity, Role
from capyctl.ledger.types import Allocation, Claim

TEXT = st.text(max_size=8)
INTS = st.integers(0, 2**63 - 1)
FREE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)


def of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of `kind`: a scalar, an enum, a container, a union or an attrs class."""
    while hasattr(kind, "__supertype__"):
        kind = kind.__supertype__
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in CLAIMING:
        return CLAIMING[kind]()
    if kind in (Any, object):
        return FREE
    if kind in (None, type(None)):
        return st.none()
    if kind is bool:
        return st.booleans()
    if kind is int:
        return INTS
    if kind is str:
        return TEXT
    if origin in (typing.Union, types.UnionType):
        return st.one_of([of(arg) for arg in args])
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(of(args[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*[of(arg) for arg in args])
    if origin is list:
        return st.lists(of(args[0]), max_size=2)
    if origin in (frozenset, collections.abc.Set):
        return st.frozensets(of(args[0]), max_size=2)
    if origin in (dict, collections.abc.Mapping):
        return st.dictionaries(of(args[0]), of(args[1]), max_size=2)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if attrs.has(kind):
        return st.deferred(lambda: _instances(kind))
    raise TypeError(f"no strategy for {kind!r}")


def _instances(kind: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field.name: of(hints[field.name]) for field in attrs.fields(kind) if field.init})


def _times(count: int) -> st.SearchStrategy[list[Millis]]:
    return st.lists(INTS, min_size=count, max_size=count).map(sorted)


@st.composite
def _gone(draw: Any) -> proofs.Gone:
    processes = tuple(draw(st.lists(of(ProcessIdentity), max_size=2)))
    return proofs.Gone(
        incarnation=draw(of(Incarnation)),
        processes=processes,
        absent=frozenset(processes),
        group_empty=True,
        observed_at_ms=draw(INTS),
    )


@st.composite
def _same(draw: Any) -> proofs.SameEngine:
    engine = attrs.evolve(draw(of(ProcessIdentity)), role=Role.API)
    return proofs.SameEngine(
        incarnation=draw(of(Incarnation)),
        recorded=(engine,),
        alive=frozenset([engine]),
        strangers=0,
        observed_at_ms=draw(INTS),
    )


@st.composite
def _quiet(draw: Any) -> proofs.Quiet:
    closed, read = draw(_times(2))
    return proofs.Quiet(
        incarnation=draw(of(Incarnation)),
        gate_closed_at_ms=closed,
        router_in_flight=0,
        running=0,
        waiting=0,
        read_at_ms=read,
    )


@st.composite
def _resident(draw: Any) -> proofs.Resident:
    held, budget = draw(_times(2))
    released = draw(st.integers(0, 10))
    return proofs.Resident(
        incarnation=draw(of(Incarnation)),
        resident_bytes=held,
        budget_bytes=budget,
        released_at_ms=released,
        sampled_at_ms=released + 1,
    )


@st.composite
def _back(draw: Any) -> proofs.Back:
    restored, sampled, recorded, fresh = draw(_times(4))
    return proofs.Back(
        incarnation=draw(of(Incarnation)),
        restored_at_ms=restored,
        sampled_at_ms=sampled,
        fresh_until_ms=fresh,
        recorded_at_ms=recorded,
    )


@st.composite
def _canary(draw: Any) -> proofs.Canary:
    answer = draw(st.text(min_size=1, max_size=8))
    return proofs.Canary(incarnation=draw(of(Incarnation)), expected=answer, actual=answer)


@st.composite
def _idle(draw: Any) -> proofs.Idle:
    return proofs.Idle(incarnation=draw(of(Incarnation)), running=0, waiting=0, read_at_ms=draw(INTS))


@st.composite
def _closed(draw: Any) -> proofs.Closed:
    idle = draw(_idle())
    half, eof = sorted(draw(st.lists(st.integers(0, idle.read_at_ms), min_size=2, max_size=2)))
    return proofs.Closed(incarnation=idle.incarnation, half_closed_at_ms=half, eof_at_ms=eof, idle=idle)


@st.composite
def _allocation(draw: Any) -> Allocation:
    held = draw(st.dictionaries(TEXT, INTS, max_size=2))
    part = {domain: draw(st.integers(0, amount)) for domain, amount in held.items()}
    return Allocation(bytes=held, claims=tuple(draw(st.lists(of(Claim), max_size=2))), host_kv=part)


CLAIMING: dict[Any, Any] = {
    Allocation: _allocation,
    proofs.Gone: _gone,
    proofs.SameEngine: _same,
    proofs.Quiet: _quiet,
    proofs.Resident: _resident,
    proofs.Back: _back,
    proofs.Canary: _canary,
    proofs.Idle: _idle,
    proofs.Closed: _closed,
    proofs.NeverLaunched: lambda: st.builds(
        proofs.NeverLaunched, incarnation=of(Incarnation), fenced=st.just(True), observed_at_ms=INTS
    ),
    proofs.Rebooted: lambda: st.builds(
        proofs.Rebooted,
        incarnation=of(Incarnation),
        recorded_boot_id=st.just("before"),
        present_boot_id=st.just("after"),
        observed_at_ms=INTS,
    ),
    proofs.Usable: lambda: st.builds(
        proofs.Usable, incarnation=of(Incarnation), answer_chars=st.integers(1, 9), probed_at_ms=INTS
    ),
    proofs.Unsent: lambda: st.builds(proofs.Unsent, incarnation=of(Incarnation), refused_before_sending=st.just(True)),
}
