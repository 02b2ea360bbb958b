"""An engine profile is let go of: what runs on it stops, and nothing is an operator's stop."""

from __future__ import annotations

import attrs
from simulation import checked
from world import Shell, shell
from world_values import Model

from capyctl.control import events as e
from capyctl.fsm.types import DeploymentId, Millis

BIG = Model(name="a", ready_gib=6, cold_gib=6, load_ms=5_000, answer_ms=250)


def world(*models: Model) -> tuple[Shell, list[DeploymentId]]:
    here = checked(shell(1))
    identities = [here.deploy(model) for model in models]
    here.run(4_000)
    return here, identities


def let_go(here: Shell, profile: str) -> None:
    (host,) = here.world.book.hosts
    here.give(e.DrainAsked(now_ms=Millis(here.now), command=here.command(), host=host, profile=profile))


def test_what_runs_on_the_profile_stops_and_a_request_starts_it_again() -> None:
    here, (a,) = world(BIG)
    here.ask("a")
    here.run(20_000)
    let_go(here, "another")
    here.run(5_000)
    assert here.engines()
    let_go(here, "p")
    here.run(20_000)
    assert not here.engines()
    client = here.ask("a")
    here.run(20_000)
    assert client.told == "ok"
    assert here.lane(a).gate_open


def test_a_start_that_loads_or_waits_for_memory_is_called_off_too() -> None:
    here, (a, b) = world(BIG, attrs.evolve(BIG, name="b"))
    here.start(a)
    here.start(b)  # two of these exclude each other: one waits
    here.run(1_000)
    let_go(here, "p")
    here.run(20_000)
    assert not here.engines()
    assert not any(here.lane(identity).in_progress for identity in (a, b))
