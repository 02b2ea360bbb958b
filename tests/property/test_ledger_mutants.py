"""Every guard of the ledger is noticed: with any one of them broken, a test of the ledger fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import pytest
import test_ledger_admission
import test_ledger_cards
import test_ledger_placement
import test_ledger_settlement
import test_ledger_victims
from ledger_mutants import MUTANTS

QUICK = (
    test_ledger_admission,
    test_ledger_settlement,
    test_ledger_placement,
    test_ledger_cards,
    test_ledger_victims,
)


def plain_tests() -> Iterator[Callable[[], None]]:
    """Tests without arguments that are not drawn: a few milliseconds each."""
    for module in QUICK:
        for name, test in vars(module).items():
            if name.startswith("test_") and not inspect.signature(test).parameters and not hasattr(test, "hypothesis"):
                yield test
    for row in test_ledger_admission.CHECKS:
        yield lambda row=row: test_ledger_admission.refuses_alone(row)
    for present in test_ledger_settlement.PHASES:
        for proof in test_ledger_settlement.PROOFS:
            yield (
                lambda present=present, proof=proof: (
                    test_ledger_settlement.test_a_proof_settles_its_own_steps_and_no_other(present, proof)
                )
            )
    for wrong in test_ledger_settlement.OTHER_RUNS:
        yield lambda wrong=wrong: test_ledger_settlement.test_a_proof_of_another_run_lowers_nothing(wrong)
    for flags, why in test_ledger_victims.PROTECTED:
        yield lambda flags=flags, why=why: test_ledger_victims.test_who_is_protected(flags, why)


TESTS = [test for test in plain_tests() if "smallest_set_that" not in getattr(test, "__name__", "")]


def fails(test: Callable[[], None]) -> bool:
    try:
        test()
    except BaseException as failure:  # pytest.fail is no Exception
        if isinstance(failure, (KeyboardInterrupt, SystemExit)):
            raise
        return True
    return False


def test_unbroken_they_pass():
    assert not [test for test in TESTS if fails(test)]


@pytest.mark.parametrize(("name", "breaks"), MUTANTS, ids=[name for name, _ in MUTANTS])
def test_a_broken_guard_is_noticed(name, breaks):
    with breaks():
        assert any(fails(test) for test in TESTS), f"nobody noticed: {name}"
