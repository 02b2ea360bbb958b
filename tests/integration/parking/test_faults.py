"""A part of the fault matrix, one role per family; all of it: `make faults`."""

from __future__ import annotations

from pathlib import Path

from .fault_rows import ALL, FAULTS, PARKING, QUICK, State
from .faults import cells, run, table


def test_a_model_ends_where_it_should_whatever_its_engine_or_its_role_does(tmp_path: Path) -> None:
    done = run(tmp_path, cells(ALL, quick=True))
    print(table(done))
    assert len(done) == sum(len(families) for families in QUICK.values())
    assert all(cell.ok for cell in done), table([cell for cell in done if not cell.ok])


def test_every_family_is_struck_in_every_state_that_it_has() -> None:
    parking = {State.PARKING, State.PARKED, State.WAKING}
    for family in ALL:
        struck = {state for fault in FAULTS if family in fault.families for state in fault.states}
        assert struck == set(State) - (set() if family in PARKING else parking)
