"""A host that comes back with other memory: what was sized for the old machine is a new revision, sized again."""

from __future__ import annotations

import attrs
from simulation import checked
from test_world_cards import GPU0, OnCard, machine
from test_world_cards import world as cards
from world import Shell, shell
from world_values import RAM, Model, gib, policy

from capyctl.control import events as e
from capyctl.fsm.activation import ActivationPhase
from capyctl.fsm.types import DeploymentId, HostId, Millis, Phase
from capyctl.ledger.types import HostPolicy

HOST = HostId("h1")
PLAIN = Model(name="a")


def world(*models: Model) -> tuple[Shell, list[DeploymentId]]:
    here = checked(shell(3))
    identities = [here.deploy(model) for model in models]
    here.run(4_000)
    return here, identities


def back_with(here: Shell, limits: HostPolicy, **models: Model) -> None:
    """The host says what it has now; new revisions of these models are what they are on it."""
    host = here.hosts[HOST]
    host.policy = limits
    for revisions in here.models.values():
        name = next(iter(revisions.values())).name
        if name in models:
            revisions[max(revisions) + 1] = attrs.evolve(models[name], hosts=(HOST,))
    here.tell(e.HostOnline(now_ms=Millis(here.now), policy=limits, boot_id=host.boot_id))
    here.run(4_000)


def sized_on(here: Shell, identity: DeploymentId) -> tuple[int, set[str]]:
    row = here.world.book.deployments[identity]
    return row.state.revision, set(row.plans[HOST].at(Phase.COLD).bytes)


def test_a_card_that_was_added_is_sized_for_by_a_new_revision_of_the_same_document() -> None:
    here, (a,) = world(PLAIN)
    before = here.world.book.deployments[a].spec
    assert sized_on(here, a) == (1, {RAM})
    back_with(here, machine(12), a=OnCard(name="a", card_gib=8))
    assert sized_on(here, a) == (2, {RAM, GPU0})
    assert here.world.book.deployments[a].spec == before


def test_what_waits_for_a_start_starts_on_the_new_machine() -> None:
    here, (a, b) = world(PLAIN, attrs.evolve(PLAIN, name="b", ready_gib=6.5, cold_gib=6.5))
    here.start(a)
    here.run(30_000, until=lambda: here.lane(a).gate_open)
    here.start(b)
    here.run(2_000)
    here.stop(a)
    here.run(500)
    assert here.lane(b).in_progress
    here.run(30_000, until=lambda: here.lane(b).gate_open)
    here.stop(b)
    here.run(30_000, until=lambda: here.lane(b).phase is ActivationPhase.STOPPED)
    back_with(here, machine(12), a=OnCard(name="a", card_gib=8), b=OnCard(name="b", card_gib=8))
    assert sized_on(here, b) == (2, {RAM, GPU0})
    assert here.lane(b).phase is ActivationPhase.STOPPED, "an operator stopped it"


def test_limits_and_a_little_more_ram_change_no_plan() -> None:
    here, (a,) = world(PLAIN)
    back_with(here, policy("h1", capacity=10.5, managed=6))
    assert sized_on(here, a) == (1, {RAM})


def test_an_engine_that_still_runs_keeps_what_it_was_sized_for() -> None:
    here = cards(OnCard(name="a", card_gib=4), OnCard(name="b", card_gib=4), cards=(12,))
    a, b = sorted(here.models, key=lambda one: here.models[one][1].name)
    here.start(b)
    here.run(30_000, until=lambda: here.lane(b).gate_open)
    back_with(here, machine(16), a=OnCard(name="a", card_gib=5))
    assert sized_on(here, a)[0] == 2
    assert sized_on(here, b)[0] == 1
    assert here.lane(b).gate_open


def test_what_did_not_fit_the_old_machine_is_tried_on_the_new_one() -> None:
    here, (a,) = world(PLAIN)
    here.revise(a, attrs.evolve(PLAIN, note="unusable"))
    here.tell(
        e.RevisionUnusable(
            now_ms=Millis(here.now), deployment=a, revision=2, code="insufficient_resources", reason="needs 99 GiB"
        )
    )
    back_with(here, machine(12), a=OnCard(name="a", card_gib=8))
    assert sized_on(here, a) == (3, {RAM, GPU0})
    assert here.world.book.deployments[a].plans[HOST].at(Phase.COLD).on(GPU0) == gib(8)
