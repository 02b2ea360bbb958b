"""The ledger broken on purpose: each check widened, each proof taken for more, each predicate always true.

`MUTANTS` is (name, breaks): a callable that applies the mutant for as long as its context lasts. A mutant is
killed when a test of the ledger fails under it. Used by test_ledger_mutants here, and by the mutation run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import attrs

from capyctl.fsm.types import Device, Domain, Phase
from capyctl.ledger import checks, placement, settlement
from capyctl.ledger.asks import Ask
from capyctl.ledger.placement import Seat, Strategy
from capyctl.ledger.types import HostPolicy, Plan, card_index

GUARDS = (
    ("capyctl.ledger.settlement", "is_of_this_run"),
    ("capyctl.ledger.settlement", "may_settle"),
    ("capyctl.ledger.settlement", "may_release"),
    ("capyctl.ledger.settlement", "left_is_shown"),
    ("capyctl.ledger.placement", "has_a_place"),
    ("capyctl.ledger.forecast", "fits_later"),
    ("capyctl.ledger.crowd", "may_give_way"),
    ("capyctl.ledger.crowd", "can_be_released"),
    ("capyctl.ledger.victims", "has_room_to_park"),
    ("capyctl.ledger.search", "covers"),
    ("capyctl.ledger.parked", "is_parked"),
    ("capyctl.ledger.parked", "is_over"),
    ("capyctl.ledger.cards", "is_card"),
    ("capyctl.ledger.charges", "every_holding_is_on_a_known_host"),
    ("capyctl.ledger.charges", "rows_stand_where_they_are_looked_for"),
    ("capyctl.ledger.charges", "sums_are_those_of_the_rows"),
    ("capyctl.ledger.charges", "exclusive_devices_have_one_owner"),
    ("capyctl.ledger.charges", "a_whole_host_start_is_alone"),
)
"""Predicates that other code looks up by name when it runs: (module, function)."""

Mutant = Callable[[], AbstractContextManager[None]]


@contextmanager
def replaced(module: str, name: str, value: Any) -> Iterator[None]:
    """`module.name` is `value` meanwhile."""
    home = importlib.import_module(module)
    before = getattr(home, name)
    setattr(home, name, value)
    try:
        yield
    finally:
        setattr(home, name, before)


@contextmanager
def changed(owner: type, name: str, value: Any) -> Iterator[None]:
    """An attribute of a class is `value` meanwhile."""
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Everybody(frozenset[str]):
    """The set that has every owner in it."""

    def __contains__(self, owner: object) -> bool:
        return True


_ranked_as_stated = placement._ranked


def _ranked(strategy: Strategy, seat: Seat, left_bytes: int, stated: Strategy) -> placement.Seated:
    return _ranked_as_stated(seat, left_bytes, strategy)


def always(value: bool) -> Callable[..., bool]:
    return lambda *_args, **_more: value


def _mutants() -> Iterator[tuple[str, Mutant]]:
    for row in checks.CHECKS:
        for word, value in (("never refuses", True), ("always refuses", False)):
            changed = tuple(attrs.evolve(one, requires=always(value)) if one is row else one for one in checks.CHECKS)
            yield f"check {row.name} {word}", partial(replaced, "capyctl.ledger.checks", "CHECKS", changed)
    for module, name in GUARDS:
        if module == "capyctl.ledger.charges":
            from capyctl.ledger import charges

            fewer = tuple(one for one in charges.INVARIANTS if one.__name__ != name)
            yield f"invariant {name} is not checked", partial(replaced, module, "INVARIANTS", fewer)
            continue
        for value in (True, False):
            yield f"{name} is always {value}", partial(replaced, module, name, always(value))
    for row in settlement.SETTLES:
        fewer_rows = tuple(one for one in settlement.SETTLES if one is not row)
        yield (
            f"{row.proof.__name__} does not settle to {row.to.value}",
            partial(replaced, "capyctl.ledger.settlement", "SETTLES", fewer_rows),
        )
        wider = tuple(attrs.evolve(one, of=frozenset(Phase)) if one is row else one for one in settlement.SETTLES)
        yield (
            f"{row.proof.__name__} settles anything to {row.to.value}",
            partial(replaced, "capyctl.ledger.settlement", "SETTLES", wider),
        )


def _together(policy: HostPolicy, cards: Iterable[Domain]) -> list[list[Domain]]:
    return [sorted(cards, key=card_index)]


def _counted(ask: Ask) -> frozenset[str]:
    return frozenset({ask.owner})


def _planned_on(plan: Plan, policy: HostPolicy, named: Sequence[Device]) -> tuple[Domain, ...]:
    return ()


def _choices() -> Iterator[tuple[str, Mutant]]:
    """What placement and the parked set choose by, beside predicates."""
    yield "cards are all alike", partial(replaced, "capyctl.ledger.cards", "alike", _together)
    yield "the target's own copy is counted", partial(changed, Ask, "uncounted", property(_counted))
    yield "no copy is counted", partial(changed, Ask, "uncounted", property(lambda ask: Everybody()))
    yield "there is no choice of cards", partial(replaced, "capyctl.ledger.placement", "choice", _planned_on)
    for strategy in (Strategy.SPREAD, Strategy.PACK):
        ranked = partial(_ranked, strategy)
        yield f"every strategy is {strategy.value}", partial(replaced, "capyctl.ledger.placement", "_ranked", ranked)


MUTANTS: tuple[tuple[str, Mutant], ...] = (*_mutants(), *_choices())
