"""The ledger broken on purpose: each check widened, each proof taken for more, each predicate always true.

`MUTANTS` is (name, breaks): a callable that applies the mutant for as long as its context lasts. A mutant is
killed when a test of the ledger fails under it. Used by test_ledger_mutants here, and by the mutation run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import attrs

from capyctl.fsm.types import Phase
from capyctl.ledger import checks, settlement

GUARDS = (
    ("capyctl.ledger.settlement", "is_of_this_run"),
    ("capyctl.ledger.settlement", "may_settle"),
    ("capyctl.ledger.settlement", "may_release"),
    ("capyctl.ledger.settlement", "left_is_shown"),
    ("capyctl.ledger.placement", "has_a_place"),
    ("capyctl.ledger.forecast", "fits_later"),
    ("capyctl.ledger.victims", "may_give_way"),
    ("capyctl.ledger.victims", "can_be_released"),
    ("capyctl.ledger.victims", "has_room_to_park"),
    ("capyctl.ledger.search", "covers"),
    ("capyctl.ledger.parked", "is_parked"),
    ("capyctl.ledger.charges", "every_holding_is_on_a_known_host"),
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


MUTANTS: tuple[tuple[str, Mutant], ...] = tuple(_mutants())
