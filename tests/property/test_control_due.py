"""Deadlines: each key has one look, the earliest; what is forgotten costs no memory for long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from capyctl.control.due import STALE_MIN, Due
from capyctl.fsm.types import Millis

keys = st.integers(0, 5)
acts = st.lists(
    st.one_of(
        st.tuples(st.just("at"), st.integers(0, 100), keys),
        st.tuples(st.just("forget"), st.just(0), keys),
        st.tuples(st.just("past"), st.integers(0, 100), st.just(0)),
    ),
    max_size=60,
)


@given(acts)
def test_deadlines_are_those_of_a_plain_table(told: list[tuple[str, int, int]]) -> None:
    due, table = Due(), dict[int, int]()
    for what, at_ms, key in told:
        match what:
            case "at":
                due.at(Millis(at_ms), "k", key)
                table[key] = min(at_ms, table.get(key, at_ms))
            case "forget":
                due.forget("k", key)
                table.pop(key, None)
            case _:
                taken = due.past(Millis(at_ms))
                assert {one for _, one in taken} == {one for one, end in table.items() if end <= at_ms}
                assert len(taken) == len(set(taken))
                table = {one: end for one, end in table.items() if end > at_ms}
        assert due.next_ms == min(table.values(), default=None)
        assert {key: due.when("k", key) for key in table} == table


def test_what_never_comes_is_no_deadline() -> None:
    due = Due()
    due.at(None, "k", 1)
    assert due.next_ms is None


def test_forgotten_deadlines_do_not_pile_up() -> None:
    """A request's deadline lies half an hour ahead; most are forgotten within a second."""
    due = Due()
    for number in range(50_000):
        due.at(Millis(1_800_000 + number), "request", number)
        due.forget("request", number)
    assert len(due._heap) <= STALE_MIN + 1
    assert due.next_ms is None
