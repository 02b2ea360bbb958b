"""Complete exploration of one machine for a small alphabet, and the claim that its table is total.

Complete means: every state that can be reached by any sequence of the alphabet's events is visited,
and every event of the alphabet is tried in it. Keep the alphabet small: two or three instants, one
of each kind of proof, two incarnations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
from retrace import Notebook

from capyctl.fsm.table import Machine, Row, first_line

Alphabet = Callable[[Any], Iterable[Any]]
Fold = Callable[[Any, "Step"], Any]

rows_must_fire = True
"""`mutants` lowers it: that a narrowed row never fires is no proof that anybody would have noticed."""

notebook: Notebook | None = None
"""`mutants` sets it: explorations are written down, and repeated as far as a changed table can differ."""


@attrs.frozen
class Step:
    """One explored step. `memory` is what the walk remembered before it."""

    state: Any
    event: Any
    after: Any
    orders: tuple[Any, ...]
    row: Row
    memory: Any = None


def explore(
    machine: Machine[Any],
    starts: Iterable[Any],
    alphabet: Alphabet,
    *,
    memory: Any = None,
    fold: Fold | None = None,
    limit: int = 200_000,
) -> Iterator[Step]:
    """Yield every step of every reachable state.

    Args:
      starts: where lives begin.
      alphabet: the events to try in a state.
      memory, fold: what a walk remembers beside the state (a count, a set), hashable and bounded; states are
        told apart by it, so that a claim about a whole life is checked on every life.
    Raises: AssertionError past `limit` states: the alphabet is too large, or a counter grows without bound.
    """

    def take(node: tuple[Any, Any], event: Any) -> tuple[Step, tuple[Any, Any]]:
        state, before = node
        taken = machine.take(state, event)
        step = Step(state, event, taken.state, taken.orders, taken.row, before)
        return step, (taken.state, fold(before, step) if fold else before)

    todo = [(start, memory) for start in starts]
    if notebook is not None:
        yield from notebook.steps(take, todo, alphabet, limit)
        return
    seen = set(todo)
    while todo:
        node = todo.pop()
        for event in alphabet(node[0]):
            step, found = take(node, event)
            yield step
            if found not in seen:
                seen.add(found)
                todo.append(found)
                assert len(seen) <= limit, f"{machine.name}: more than {limit} states"


def label(row: Row, phase: Any) -> str:
    """How a row is named at one of its phases: `QUEUED Ticked [the deadline is ahead]`."""
    guard = f" [{first_line(row.given)}]" if row.given else ""
    return f"{phase.name} {row.on.__name__}{guard}"


def assert_total(
    machine: Machine[Any],
    starts: Iterable[Any],
    alphabet: Alphabet,
    *,
    never: Mapping[str, str] | None = None,
    limit: int = 200_000,
) -> set[str]:
    """In every reachable state exactly one row fits each event, invariants hold, and every row fires at each phase.

    Args:
      never: rows (by `label`) that cannot fire, each with the reason.
    Returns: the labels that fired.
    """
    fired: set[str] = set()
    for step in explore(machine, starts, alphabet, limit=limit):  # take() raises unless exactly one row fits
        fired.add(label(step.row, step.state.phase))
        assert_pure(machine, step)
    if rows_must_fire:
        everything = {label(row, phase) for row in machine.rows for phase in row.when}
        unfired = everything - fired - set(never or {})
        assert not unfired, f"{machine.name}: never fired: {sorted(unfired)}"
        stale = set(never or {}) & fired
        assert not stale, f"{machine.name}: said to be impossible, but fired: {sorted(stale)}"
    return fired


def assert_pure(machine: Machine[Any], step: Step) -> None:
    """The same state and event give the same answer, and a refused or ignored event changes nothing."""
    assert machine.step(step.state, step.event) == (step.after, step.orders)
    if step.row.ignored or step.row.code is not None:
        assert step.after == step.state


def play(machine: Machine[Any], state: Any, script: Iterable[tuple[Any, list[Any]]], *, ends: Any) -> Any:
    """Tell a story: each event, and the orders it gives, as kinds or as whole values. Returns the last state."""
    for event, expected in script:
        state, orders = machine.step(state, event)
        told = [type(order) if isinstance(want, type) else order for order, want in zip(orders, expected, strict=False)]
        assert told == expected, f"after {event}: {orders}"
        assert len(orders) == len(expected), f"after {event}: {orders}"
    assert state.phase is ends, state
    return state
