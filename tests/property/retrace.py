"""Explorations repeated under a changed table, without the steps that cannot have changed.

A widened row differs from the original only where one of its siblings fitted. So whoever remembers which rows each
explored step took, by itself and in what was asked of it, need only show the steps that took such a sibling, and
everything of states that were never seen before. What a claim says of all other steps it has said already.

`mutants` writes down the explorations of one check while nothing is changed, and has them repeated under each mutant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from capyctl.fsm.table import Machine, Row, Taken

Where = tuple[int, Any]
"""A row of the unchanged table, by identity, at one of the phases it applies in."""

FEW, MANY_TIMES = 500, 2
GIVEN_UP = "given up after"
"""How a walk that was not patient says so: that a table leads to more states says nothing of any claim."""


@attrs.define
class Rows:
    """Which rows were taken lately, by any machine: filled while `watching` lasts."""

    taken: set[Where] = attrs.field(factory=set)

    @contextmanager
    def watching(self) -> Iterator[Rows]:
        take = Machine.take

        def watched(machine: Machine[Any], state: Any, event: object) -> Taken[Any]:
            taken = take(machine, state, event)
            self.taken.add((id(taken.row), state.phase))
            return taken

        Machine.take = watched  # type: ignore[method-assign]
        try:
            yield self
        finally:
            Machine.take = take  # type: ignore[method-assign]


@attrs.define
class Walk:
    """One exploration of the unchanged table: its states with their memory, their events, and where those led."""

    number: dict[Any, int] = attrs.field(factory=dict)
    nodes: list[Any] = attrs.field(factory=list)
    events: list[tuple[Any, ...]] = attrs.field(factory=list)
    leads_to: list[list[int]] = attrs.field(factory=list)
    took: dict[Where, dict[int, set[int]]] = attrs.field(factory=dict)
    whole: bool = False

    def known(self, node: Any) -> int:
        """The number of a state with its memory, a new one if it was never seen."""
        if node not in self.number:
            self.number[node] = len(self.nodes)
            self.nodes.append(node)
        return self.number[node]


@attrs.define
class Notebook:
    """The explorations of one check, in the order in which it makes them."""

    rows: Rows
    walks: list[Walk] = attrs.field(factory=list)
    everything: set[Where] = attrs.field(factory=set)
    """Every row that the check took anywhere: one that took no sibling of a mutant cannot tell it from the table."""
    repeated: bool = False
    suspects: frozenset[Where] = frozenset()
    begun: int = 0
    patient: bool = True

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write down what is explored meanwhile."""
        self.rows.taken.clear()
        with self.rows.watching():
            yield
        self.everything |= self.rows.taken
        self.repeated = True

    @contextmanager
    def repeating(self, suspects: frozenset[Where], *, patient: bool) -> Iterator[None]:
        """Repeat what was written down; only what took one of these rows may have changed.

        Args:
          patient: follow a table that leads to ever more states up to the exploration's own limit; else give up soon.
        """
        self.suspects, self.begun, self.patient = suspects, 0, patient
        yield

    def concerns(self, suspects: frozenset[Where]) -> bool:
        """Whether the check took any of these rows."""
        return not self.everything.isdisjoint(suspects)

    def steps(
        self,
        take: Callable[[Any, Any], Any],
        starts: Iterable[Any],
        alphabet: Callable[[Any], Iterable[Any]],
        limit: int,
    ) -> Iterator[Any]:
        """The steps of an exploration: all of them, or those that may have changed.

        Args:
          take: (state with memory, event) to (step, state with memory after it).
        """
        if not self.repeated:
            walk = Walk()
            self.walks.append(walk)
            yield from self._written(walk, take, starts, alphabet, limit)
        else:
            known = self.walks[self.begun] if self.begun < len(self.walks) else None
            self.begun += 1
            walk = known if known is not None and known.whole else Walk()
            yield from self._changed(walk, take, starts, alphabet, limit)

    def _written(self, walk: Walk, take: Any, starts: Iterable[Any], alphabet: Any, limit: int) -> Iterator[Any]:
        for start in starts:
            walk.known(start)
        for here, node in enumerate(walk.nodes):  # grows meanwhile
            walk.events.append(tuple(alphabet(node[0])))
            walk.leads_to.append([])
            for at, event in enumerate(walk.events[here]):
                self.everything |= self.rows.taken
                self.rows.taken.clear()
                step, after = take(node, event)
                walk.leads_to[here].append(walk.known(after))
                assert len(walk.nodes) <= limit, f"more than {limit} states"
                yield step
                for row in self.rows.taken:  # by the step itself, and by what it was asked
                    walk.took.setdefault(row, {}).setdefault(here, set()).add(at)
        walk.whole = True

    def _changed(self, walk: Walk, take: Any, starts: Iterable[Any], alphabet: Any, limit: int) -> Iterator[Any]:
        suspect: dict[int, set[int]] = {}
        for row in self.suspects:
            for here, changed in walk.took.get(row, {}).items():
                suspect.setdefault(here, set()).update(changed)
        seen, new = set[int](), set[Any]()
        todo: deque[int | Any] = deque()
        if not self.patient:
            limit = min(limit, FEW + MANY_TIMES * len(walk.nodes))

        def find(node: Any) -> None:
            number = walk.number.get(node)
            if number is None and node not in new:
                new.add(node)
                todo.append(node)
                found = len(seen) + len(new)
                assert found <= limit, f"{'more than' if self.patient else GIVEN_UP} {limit} states"
            elif number is not None and number not in seen:
                seen.add(number)
                todo.append(number)

        for start in starts:
            find(start)
        while todo:
            here = todo.popleft()
            if isinstance(here, int):
                node, events = walk.nodes[here], walk.events[here]
                again: Iterable[int] = sorted(suspect.get(here, ()))
                sure = {to for at, to in enumerate(walk.leads_to[here]) if at not in suspect.get(here, ())}
                todo += sure - seen
                seen |= sure
            else:
                node, events = here, tuple(alphabet(here[0]))
                again = range(len(events))
            for at in again:
                step, after = take(node, events[at])
                yield step
                find(after)


def siblings(machine: Machine[Any], row: Row) -> frozenset[Where]:
    """The rows that fitted where `row` will: where they were taken, and nowhere else, the mutant may differ."""
    return frozenset(
        (id(one), phase) for one in machine.rows if one is not row and one.on is row.on for phase in one.when & row.when
    )
