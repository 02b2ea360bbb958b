"""An event touches the machines that it concerns, never the fleet: counted in lines run, whatever else is running."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from benchmarks.fleet import Fleet
from capyctl.control import invariants

Note = Callable[[FrameType, str, object], object]
SMALL, LARGE = 8, 64
NAMED = 4


def lines(deed: Callable[[], object]) -> int:
    """How many lines of ours are run while this is done."""
    count = 0

    def note(frame: FrameType, event: str, _argument: object) -> Note | None:
        nonlocal count
        count += event == "line"
        return note if "capyctl" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(note)
    try:
        deed()
    finally:
        sys.settrace(before)
    return count


def counted(size: int, deed: str, named: int | None) -> int:
    """The least of a few: where a start lies first on a busy card, another one lies on a free one."""
    here = Fleet.of(size, random.Random(size), named=named)
    least = min(_once(here, deed) for _ in range(5))
    invariants.assert_state(here.world.book)
    return least


def _once(here: Fleet, deed: str) -> int:
    """Whoever plans is answered, and who begins was planned; what is counted is the one deed."""
    counts = {
        one: lines(getattr(here, one)) for one in (("evict", "switch") if deed in ("evict", "switch") else (deed,))
    }
    here.calm()
    return counts[deed]


@pytest.mark.parametrize(
    "deed", ["ask", "report", "observe", "tick", "start", "evict", "switch", "deploy", "delete", "stop", "host"]
)
def test_an_event_in_a_large_fleet_costs_what_it_does_in_a_small_one(deed: str) -> None:
    small, large = counted(SMALL, deed, NAMED), counted(LARGE, deed, NAMED)
    assert large <= small * 1.25 + 20, f"{small} lines in a fleet of {SMALL} hosts, {large} in one of {LARGE}"


@pytest.mark.parametrize("deed", ["start", "evict", "switch"])
def test_a_start_that_may_go_anywhere_costs_no_more_than_the_hosts_are_more(deed: str) -> None:
    small, large = counted(SMALL, deed, None), counted(LARGE, deed, None)
    assert large <= small * (LARGE / SMALL) * 1.25, f"{small} lines among {SMALL} hosts, {large} among {LARGE}"
