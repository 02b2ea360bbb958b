"""The kernel: a machine is a table of rows, and every (phase, event) pair is decided.

A pair has a row, a `refuse` with a closed code, or an `ignore` with a reason. Building a machine
fails on a pair that nobody thought about. Rows of one pair have guards that exclude each other;
`step` evaluates all of them and stops on none or on two, so order never decides. The same rows are
rendered to the spec pages by `render`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import attrs

from capyctl.errors import CODES, InvariantBroken


class Situation(Protocol):
    """What every machine's state has: a phase. All else is data."""

    @property
    def phase(self) -> Any: ...  # the machine's own enum; the kernel only compares it


S = TypeVar("S", bound=Situation)

Guard = Callable[[Any, Any], bool]
"""(state, event) -> whether the row fits. The first line of its docstring is its cell in the spec page."""

Change = Callable[[Any, Any], Any]
"""(state, event) -> the new state, without the new phase, which the row names."""

Emit = Callable[[Any, Any], Any]
"""(state before, event) -> one order. Orders of one step do not depend on each other."""


@attrs.frozen(kw_only=True)
class Refused:
    """The order that answers a refused event: nothing changed, and this is why."""

    code: str
    event: str


@attrs.frozen(kw_only=True)
class Row:
    """One decided case of a machine. `to=None` stays in the phase."""

    when: frozenset[Any]
    on: type[Any]
    given: Guard | None = None
    to: Any = None
    change: Change | None = None
    emits: tuple[Emit, ...] = ()
    why: str
    code: str | None = None  # set by refuse()
    ignored: bool = False  # set by ignore()


def at(*phases: enum.Enum) -> frozenset[Any]:
    """The set of these phases. Subtract it from a machine's ANY; never write a wildcard."""
    return frozenset(phases)


def any_of(phases: type[enum.Enum]) -> frozenset[Any]:
    """Every phase of a machine, to subtract from: `ANY - at(READY)`."""
    return frozenset(phases)


def refuse(when: frozenset[Any], on: type[Any], code: str, *, given: Guard | None = None, why: str) -> Row:
    """A case answered with a closed code and no change."""
    if code not in CODES:
        raise InvariantBroken(f"{code} is not a code of capyctl.errors")
    return Row(when=when, on=on, given=given, why=why, code=code)


def ignore(when: frozenset[Any], on: type[Any], *, given: Guard | None = None, why: str) -> Row:
    """A case in which the event is old news: no change, no order."""
    return Row(when=when, on=on, given=given, why=why, ignored=True)


@attrs.frozen
class Taken(Generic[S]):
    """What one step did: the state after, the orders, and the row that decided it."""

    state: S
    orders: tuple[Any, ...]
    row: Row


class Machine(Generic[S]):
    """A table with its phases, events and invariants, checked when it is built.

    Args:
      name: the page's name in `spec/`.
      doc: the module docstring; prose of the page.
      phases, events: everything the table must decide.
      rows: the decided cases, in the order the page shows them.
      invariants: predicates over one state, checked after every step, in production too.
    Raises: InvariantBroken for an undecided pair, a row outside the machine, or two unguarded rows of a pair.
    """

    def __init__(
        self,
        *,
        name: str,
        doc: str,
        phases: type[enum.Enum],
        events: tuple[type[Any], ...],
        rows: tuple[Row, ...],
        invariants: tuple[Callable[[S], bool], ...] = (),
    ) -> None:
        self.name, self.doc, self.phases = name, doc, phases
        self.events, self.rows, self.invariants = events, rows, invariants
        self._by_pair: dict[tuple[Any, type[Any]], tuple[Row, ...]] = {}
        for row in rows:
            self._place(row)
        missing = [
            f"({phase.name}, {event.__name__})"
            for phase in phases
            for event in events
            if (phase, event) not in self._by_pair
        ]
        if missing:
            raise InvariantBroken(f"{name}: nobody decided {', '.join(missing)}")
        for (phase, event), fitting in self._by_pair.items():
            if len(fitting) > 1 and any(row.given is None for row in fitting):
                raise InvariantBroken(
                    f"{name}: ({phase.name}, {event.__name__}) has a row without a guard beside another"
                )

    def _place(self, row: Row) -> None:
        if row.on not in self.events or not row.when <= frozenset(self.phases):
            raise InvariantBroken(f"{self.name}: a row on {row.on.__name__} is outside the machine")
        if row.to is not None and row.to not in frozenset(self.phases):
            raise InvariantBroken(f"{self.name}: {row.to} is not a phase")
        for phase in row.when:
            self._by_pair[phase, row.on] = (*self._by_pair.get((phase, row.on), ()), row)

    def fitting(self, state: S, event: object) -> tuple[Row, ...]:
        """Every row whose pair and guard fit; exploration asserts that it is always exactly one."""
        try:
            rows = self._by_pair[state.phase, type(event)]
        except KeyError:
            raise InvariantBroken(f"{self.name}: {type(event).__name__} is no event of this machine") from None
        return tuple(row for row in rows if row.given is None or row.given(state, event))

    def take(self, state: S, event: object) -> Taken[S]:
        """Decide one event and say which row did. Pure.

        Raises: InvariantBroken when no row or several fit, or when the new state breaks an invariant.
        """
        rows = self.fitting(state, event)
        if len(rows) != 1:
            raise InvariantBroken(
                f"{self.name}: {len(rows)} rows fit ({state.phase.name}, {type(event).__name__}) in {state}"
            )
        (row,) = rows
        if row.ignored:
            return Taken(state, (), row)
        if row.code is not None:
            return Taken(state, (Refused(code=row.code, event=type(event).__name__),), row)
        after: Any = row.change(state, event) if row.change else state
        if row.to is not None and after.phase is not row.to:
            after = attrs.evolve(after, phase=row.to)
        for invariant in self.invariants:
            if not invariant(after):
                raise InvariantBroken(f"{self.name}: {first_line(invariant)} Not so in {after}")
        return Taken(after, tuple(emit(state, event) for emit in row.emits), row)

    def step(self, state: S, event: object) -> tuple[S, tuple[Any, ...]]:
        """Decide one event: the state after and the orders. Pure."""
        taken = self.take(state, event)
        return taken.state, taken.orders


def first_line(thing: object) -> str:
    """The first line of a docstring: what guards, changes, emits and invariants are called in a page."""
    doc = getattr(thing, "__doc__", None)
    name = getattr(thing, "__name__", type(thing).__name__)
    return doc.strip().splitlines()[0] if doc else str(name)


def decided(rows: Iterable[Row]) -> set[tuple[Any, type[Any]]]:
    """The pairs that `rows` decide."""
    return {(phase, row.on) for row in rows for phase in row.when}
