"""The kernel refuses a table that leaves something open, and stops rather than guess."""

from __future__ import annotations

import enum
from typing import Any

import attrs
import pytest
from explore import assert_total, explore, label

from capyctl.errors import InvariantBroken
from capyctl.fsm import render
from capyctl.fsm.table import Machine, Refused, Row, any_of, at, decided, first_line, ignore, refuse


class Phase(enum.Enum):
    OPEN = "open"  # may be entered
    SHUT = "shut"  # may not


@attrs.frozen(kw_only=True)
class State:
    phase: Phase = Phase.OPEN
    count: int = 0


@attrs.frozen(kw_only=True)
class Pushed:
    force: int = 1


@attrs.frozen(kw_only=True)
class Asked:
    pass


@attrs.frozen(kw_only=True)
class Moved:
    to: str


ANY = any_of(Phase)


def strong(state: State, event: Pushed) -> bool:
    """it is pushed hard"""
    return event.force > 1


def weak(state: State, event: Pushed) -> bool:
    """it is pushed softly"""
    return event.force <= 1


def once_more(state: State, event: Pushed) -> State:
    """count it"""
    return attrs.evolve(state, count=state.count + 1)


def moved(state: State, event: Pushed) -> Moved:
    """Moved"""
    return Moved(to=f"from {state.phase.value} at {state.count}")


def counts_up_to_three(state: State) -> bool:
    """Nobody pushes four times."""
    return state.count <= 3


SHUTS = Row(
    when=at(Phase.OPEN), on=Pushed, given=strong, to=Phase.SHUT, change=once_more, emits=(moved,), why="It gives way."
)
STAYS = ignore(at(Phase.OPEN), Pushed, given=weak, why="It does not notice.")
HELD = refuse(at(Phase.SHUT), Pushed, "lifecycle_conflict", why="It is shut.")
ANSWER = Row(when=ANY, on=Asked, why="Always answered.")


def machine(*rows: Row, invariants: tuple[Any, ...] = ()) -> Machine[State]:
    return Machine(
        name="door",
        doc="A door.\n\nIt opens and shuts.",
        phases=Phase,
        events=(Pushed, Asked),
        rows=rows,
        invariants=invariants,
    )


def door() -> Machine[State]:
    return machine(SHUTS, STAYS, HELD, ANSWER, invariants=(counts_up_to_three,))


def test_a_pair_that_nobody_decided_fails_the_build_and_is_named():
    with pytest.raises(InvariantBroken, match=r"door: nobody decided \(SHUT, Pushed\)"):
        machine(SHUTS, STAYS, ANSWER)


def test_a_row_without_a_guard_beside_another_fails_the_build():
    with pytest.raises(InvariantBroken, match=r"\(SHUT, Pushed\) has a row without a guard beside another"):
        machine(SHUTS, STAYS, HELD, ANSWER, ignore(at(Phase.SHUT), Pushed, given=weak, why="twice"))


def test_a_row_of_another_machine_fails_the_build():
    class Other(enum.Enum):
        OPEN = "open"

    with pytest.raises(InvariantBroken, match="outside the machine"):
        machine(SHUTS, STAYS, HELD, ANSWER, Row(when=at(Other.OPEN), on=Asked, why="elsewhere"))
    with pytest.raises(InvariantBroken, match="outside the machine"):
        machine(SHUTS, STAYS, HELD, ANSWER, Row(when=ANY, on=Moved, why="no event"))
    with pytest.raises(InvariantBroken, match="is not a phase"):
        machine(SHUTS, STAYS, HELD, Row(when=ANY, on=Asked, to=Other.OPEN, why="elsewhere"))


def test_a_refusal_has_a_code_of_the_closed_list():
    with pytest.raises(InvariantBroken, match="no_such_code is not a code"):
        refuse(ANY, Asked, "no_such_code", why="none")


def test_no_row_or_two_rows_that_fit_stop_the_step():
    def never(state: State, event: Pushed) -> bool:
        """never"""
        return False

    gap = machine(attrs.evolve(SHUTS, given=never), STAYS, HELD, ANSWER)
    with pytest.raises(InvariantBroken, match=r"0 rows fit \(OPEN, Pushed\)"):
        gap.step(State(), Pushed(force=2))

    def always(state: State, event: Pushed) -> bool:
        """always"""
        return True

    clash = machine(SHUTS, attrs.evolve(STAYS, given=always), HELD, ANSWER)
    with pytest.raises(InvariantBroken, match=r"2 rows fit \(OPEN, Pushed\)"):
        clash.step(State(), Pushed(force=2))
    with pytest.raises(InvariantBroken, match="no event of this machine"):
        door().step(State(), Moved(to="x"))


def test_a_step_moves_changes_and_orders_from_the_state_before():
    assert door().step(State(), Pushed(force=2)) == (
        State(phase=Phase.SHUT, count=1),
        (Moved(to="from open at 0"),),
    )
    assert door().take(State(), Pushed(force=2)).row is SHUTS


def test_a_refused_and_an_ignored_event_change_nothing():
    shut = State(phase=Phase.SHUT, count=1)
    assert door().step(shut, Pushed()) == (shut, (Refused(code="lifecycle_conflict", event="Pushed"),))
    assert door().step(State(), Pushed()) == (State(), ())


def test_a_state_that_breaks_a_claim_stops_the_machine_and_says_which():
    with pytest.raises(InvariantBroken, match=r"door: Nobody pushes four times. Not so in State\("):
        door().step(State(count=3), Pushed(force=2))


def test_decided_lists_the_pairs_of_rows():
    assert decided((SHUTS, ANSWER)) == {(Phase.OPEN, Pushed), (Phase.OPEN, Asked), (Phase.SHUT, Asked)}
    assert first_line(strong) == "it is pushed hard"


def alphabet(state: State) -> list[Any]:
    return [Pushed(force=1), Pushed(force=2), Asked()]


def test_exploration_visits_everything_and_complains_about_what_never_fires():
    steps = list(explore(door(), [State()], alphabet))
    assert {step.after.phase for step in steps} == set(Phase)
    assert len(steps) == 2 * 3
    assert label(STAYS, Phase.OPEN) in assert_total(door(), [State()], alphabet)
    with pytest.raises(AssertionError, match=r"never fired: \['OPEN Pushed \[it is pushed hard\]', 'SHUT"):
        assert_total(door(), [State()], lambda state: [Pushed(force=1), Asked()])
    excused = {label(row, phase): "it is never pushed" for row in (SHUTS, HELD, ANSWER) for phase in row.when}
    del excused[label(ANSWER, Phase.OPEN)]
    assert_total(door(), [State()], lambda state: [Pushed(force=1), Asked()], never=excused)
    with pytest.raises(AssertionError, match="said to be impossible, but fired"):
        assert_total(door(), [State()], alphabet, never={label(STAYS, Phase.OPEN): "wrong"})


def test_exploration_of_an_endless_machine_says_so():
    endless = machine(attrs.evolve(SHUTS, to=None), STAYS, HELD, ANSWER)
    with pytest.raises(AssertionError, match="more than 50 states"):
        list(explore(endless, [State()], alphabet, limit=50))


def test_a_page_shows_every_row_and_reads_the_comments_beside_the_phases():
    page = render.page(door(), source="tests/property/test_kernel.py")
    assert "# Door\n" in page
    assert "It opens and shuts." in page
    assert "| `OPEN` | may be entered |" in page
    assert "| 1 | `OPEN` | `Pushed` | it is pushed hard | `SHUT` | count it | Moved | It gives way. |" in page
    assert "| 2 | every phase | `Asked` |  | stays |  |  | Always answered. |" in page
    assert "| `SHUT` | `Pushed` |  | `lifecycle_conflict` | It is shut. |" in page
    assert "| `OPEN` | `Pushed` | it is pushed softly | It does not notice. |" in page
    assert "- Nobody pushes four times. (`counts_up_to_three`)" in page
    assert "    OPEN --> SHUT: Pushed" in page
    assert "    SHUT --> [*]" in page
    assert page.count("```") == 2


def test_a_bar_in_a_cell_does_not_break_a_table():
    assert render.table(("a",), [("x | y",)]) == "| a |\n| --- |\n| x \\| y |"
