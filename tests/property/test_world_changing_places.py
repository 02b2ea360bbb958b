"""Two models take turns where the parked set has room for one copy: the one that wakes leaves as the other enters."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from simulation import checked
from world import Shell, shell
from world_values import VLLM, Model, policy

from capyctl.fsm.switch import Released
from capyctl.fsm.types import Activation, DeploymentId, HostId, Residency, StopKind
from capyctl.ledger.parked import is_over

DEEP = Model(name="a", traits=VLLM, residency=Residency.DEEP, ready_gib=4, cold_gib=4, parked_gib=0.5)
LIMITS = {
    "bytes for one": policy("h1", capacity=12, managed=7, parked=0.75),
    "a place for one": policy("h1", capacity=12, managed=7, max_parked=1),
}
HOST = HostId("h1")


def turns(limits: str, **changes: Any) -> tuple[Shell, DeploymentId, DeploymentId]:
    """`a` sleeps and `b` serves; there is room for one of them to serve and for one to sleep."""
    here = checked(shell(5, policies=(LIMITS[limits],)))
    a = here.deploy(attrs.evolve(DEEP, **changes))
    b = here.deploy(attrs.evolve(DEEP, name="b"))
    here.run(2_000)
    here.start(a)
    here.run(30_000, until=lambda: here.lane(a).gate_open)
    answered(here, "b")
    if not here.lane(a).is_parked:  # nobody's request, nor a switch, takes an explicit one
        here.park(a)
        here.run(60_000, until=lambda: here.lane(a).is_parked)
        answered(here, "b")
    assert here.lane(a).is_parked
    return here, a, b


def answered(here: Shell, route: str) -> None:
    client = here.ask(route)
    here.run(120_000, until=lambda: client.told is not None)
    here.run(1_000)


@pytest.mark.parametrize("limits", LIMITS)
def test_both_keep_their_copies_turn_after_turn(limits: str) -> None:
    here, a, b = turns(limits)
    for route, asleep in (("a", b), ("b", a), ("a", b)):
        client = here.ask(route)
        here.run(120_000, until=lambda client=client: client.told is not None)
        assert client.told == "ok"
        assert here.lane(asleep).is_parked
    assert len(here.launches) == 2  # one start each, and wakes ever after
    released = {victim.released for state in here.world.book.switches.values() for victim in state.victims}
    assert released == {Released.PARKED}
    here.run(5_000)
    assert not here.world.book.crowded
    assert not is_over(here.world.book.ledger, HOST)


@pytest.mark.parametrize("limits", LIMITS)
def test_a_wake_that_comes_to_nothing_leaves_one_copy_of_two(limits: str) -> None:
    here, a, b = turns(limits)
    here.faults.percent["wake_refused_unsent"] = 100
    client = here.ask("a")
    here.run(60_000, until=lambda: is_over(here.world.book.ledger, HOST))
    assert is_over(here.world.book.ledger, HOST)  # it is on its way back out, and the other one is in
    here.run(60_000, until=lambda: client.told is not None)
    here.faults.percent.clear()
    here.run(60_000)
    asleep = [one for one in (a, b) if here.lane(one).is_parked]
    (ended,) = [one for one in (a, b) if one not in asleep]
    stopped = here.lane(ended).run.stopped
    assert stopped is not None
    assert stopped.kind is StopKind.RECLAIM
    assert not is_over(here.world.book.ledger, HOST)
    assert not here.world.book.crowded
    answered(here, "a")
    answered(here, "b")
    assert here.lane(b).gate_open


def test_the_copy_that_nobody_may_ask_stays_and_the_other_one_goes() -> None:
    here, a, b = turns("a place for one", activation=Activation.EXPLICIT)
    here.faults.percent["wake_refused_unsent"] = 100
    here.start(a, evict=True)
    here.run(60_000, until=lambda: here.lane(b).is_parked)
    here.run(120_000, until=lambda: here.lane(b).run.stopped is not None)
    assert here.lane(a).is_parked
    stopped = here.lane(b).run.stopped
    assert stopped is not None
    assert stopped.kind is StopKind.RECLAIM


def test_a_third_copy_still_finds_no_room() -> None:
    """What leaves for a switch makes room for its victim alone."""
    here, a, b = turns("a place for one")
    c = here.deploy(attrs.evolve(DEEP, name="c", ready_gib=1, cold_gib=1))
    here.run(2_000)
    here.start(c)
    here.run(30_000, until=lambda: here.lane(c).gate_open)
    assert here.lane(c).gate_open
    here.park(c)
    here.run(60_000)
    assert [here.lane(one).is_parked for one in (a, b, c)].count(True) == 1
