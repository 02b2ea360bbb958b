"""The same events give the same world: from its first event, from its journal, and from its rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulation import Life, live
from world import Shell

from capyctl.control import events as e
from capyctl.control.world import Step, World
from capyctl.fsm.types import Millis

HERE = Path(__file__).parent
FAULTS = {"exit_early": 5, "crash_soon": 5, "order_lost": 5, "session_drop": 5, "hang_up": 20, "park_refused": 20}


def rows(world: World, *, requests: bool = True) -> dict[tuple[str, str], object]:
    return {(one.kind, one.key): one.value for one in world.records() if requests or one.kind != "request"}


def lived(
    seed: int, *, steps: int = 800, appetite: int | None = None, parks: bool | None = None
) -> tuple[Life, list[e.Event], list[Step]]:
    """A life without controller crashes, with every event that it was told and every step that it took."""
    life = Life.drawn(seed, faults=FAULTS, parks=parks)
    if appetite is not None:
        life.appetite = appetite
    events: list[e.Event] = []
    steps_: list[Step] = []
    check = life.shell.check
    # the world hears ControllerStarted while the shell is made
    events.append(e.ControllerStarted(now_ms=Millis(life.shell.now), session=1))
    steps_.append(life.shell._uncommitted[0][1])

    def noted(shell: Shell, before: Any, event: e.Event, step: Step) -> None:
        events.append(event)
        steps_.append(step)
        assert check is not None
        check(shell, before, event, step)

    life.shell.check = noted
    life.hurt(steps)
    return life, events, steps_


@pytest.mark.parametrize("seed", range(6))
def test_a_life_told_again_gives_the_same_orders_and_rows(seed: int) -> None:
    life, events, steps = lived(seed)
    again = World.load([], now_ms=events[0].now_ms, settings=life.shell.settings)
    for event, step in zip(events, steps, strict=True):
        told = again.handle(event)
        assert told.orders == step.orders
        assert told.changed == step.changed
    assert rows(again) == rows(life.shell.world)
    assert len(events) > 500


@pytest.mark.parametrize("seed", range(20, 26))
def test_the_journal_without_requests_gives_the_same_rows_where_no_request_decided(seed: int) -> None:
    life, events, _ = lived(seed, appetite=0)
    journal = [event for event in events if not isinstance(event, e.REQUEST_EVENTS)]
    assert journal == events
    assert any(isinstance(event, e.LaunchReady) for event in journal)
    again = World.load([], now_ms=events[0].now_ms, settings=life.shell.settings)
    for event in journal:
        again.handle(event)
    here = life.shell.world
    assert rows(again, requests=False) == rows(here, requests=False)


def test_a_journal_with_parks_and_wakes_gives_the_same_rows() -> None:
    """Measured copies, first and latest of each launch, and who waits for a wake are all told by events."""
    for seed in range(45, 75):
        life, events, _ = lived(seed, appetite=0, parks=True)
        here = life.shell.world
        again = World.load([], now_ms=events[0].now_ms, settings=life.shell.settings)
        for event in events:
            again.handle(event)
        assert rows(again) == rows(here)
        assert again.book.instances == here.book.instances
        measured = any(row.parked_latest for row in here.book.instances.values())
        if measured and {e.ParkConfirmed, e.WakeConfirmed} <= {type(event) for event in events}:
            return
    raise AssertionError("no life parked and woke")


@pytest.mark.parametrize("seed", range(40, 46))
def test_what_was_committed_is_what_the_world_holds_and_loads_again(seed: int) -> None:
    life = Life.drawn(seed)
    life.hurt(700)
    life.heal()
    life.shell.run(1_000)
    shell = life.shell
    shell.run(100, until=lambda: not shell._uncommitted and not shell._behind)
    assert shell.durable == rows(shell.world)
    loaded = World.load(shell.world.records(), now_ms=Millis(shell.now), settings=shell.settings)
    assert rows(loaded) == rows(shell.world)


def test_the_order_of_sets_decides_nothing() -> None:
    """The same seed under two hash seeds lives the same life: a set's order reaches no order and no row."""
    lives = [
        subprocess.run(
            [sys.executable, str(HERE / "simulation.py"), "77", "700", "digest"],
            env={
                **os.environ,
                "PYTHONHASHSEED": str(hash_seed),
                "PYTHONPATH": os.pathsep.join((str(HERE.parents[1]), str(HERE))),
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in (1, 2)
    ]
    assert lives[0] == lives[1]
    assert "digest" in lives[0]


def test_a_failure_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Life) -> None:
        raise AssertionError("as made")

    monkeypatch.setattr(Life, "come_to_rest", wrong)
    with pytest.raises(AssertionError, match=r"again: .venv/bin/python tests/property/simulation.py 5 50"):
        live(5, 50)
