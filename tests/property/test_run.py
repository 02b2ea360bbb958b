"""What a run's end says of how it ran."""

from __future__ import annotations

import attrs
import pytest
from lives import EARLY, LANE

from capyctl.fsm.run import SOON_MS, Run, Stop, ran_well
from capyctl.fsm.types import Millis, StopKind


@pytest.mark.parametrize(
    ("lived_ms", "unseen", "well"),
    [(SOON_MS - 1, False, False), (SOON_MS, False, True), (0, True, True), (SOON_MS, True, True)],
)
def test_only_an_exit_that_somebody_saw_soon_after_ready_is_held_against_the_engine(
    lived_ms: int, unseen: bool, well: bool
) -> None:
    run = attrs.evolve(Run(lane=LANE), ready_at_ms=EARLY)
    stop = Stop(kind=StopKind.EXIT, asked_at_ms=Millis(EARLY + lived_ms), unseen=unseen)
    assert ran_well(run, stop) is well


def test_a_run_that_was_never_ready_did_not_run_well() -> None:
    assert not ran_well(Run(lane=LANE), Stop(kind=StopKind.EXIT, asked_at_ms=EARLY, unseen=True))
