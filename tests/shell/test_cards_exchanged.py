"""A card in the place of another one that engines of before are charged on."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from capyctl.fsm.types import Bytes, DeploymentId, Domain, Generation, HostId, Incarnation, Lane, ProcessIdentity
from capyctl.host import identity
from capyctl.host.cards import Card
from capyctl.host.memory import Seen
from capyctl.host.policy import host_policy, left_out
from capyctl.roles.reshaped import Reshaped, check_cards

GIB = 1 << 30
HOST, GPU0 = HostId("h"), Domain("gpu0")
LAUNCH = Incarnation(Lane(DeploymentId("d"), 0), Generation(1))
OF_BEFORE = ProcessIdentity(pid=1, boot_id="another boot", start_ticks=1)


def card(index: int, uuid: str) -> Card:
    return Card(
        index=index, uuid=uuid, total_bytes=Bytes(24 * GIB), free_bytes=Bytes(24 * GIB), used_bytes=Bytes(0), name="RTX"
    )


def machine(*cards: Card, processes: tuple[ProcessIdentity, ...] | None = (OF_BEFORE,)) -> tuple[Any, Any]:
    """(ledger, machine) at a start: GPU-a was gpu0, and one launch is charged on it, recorded with `processes`."""
    memory = Seen(capacity_bytes=Bytes(64 * GIB), available_bytes=Bytes(60 * GIB), source="meminfo")
    kept = {GPU0: host_policy(HOST, "box", memory, (card(0, "GPU-a"),)).domains[GPU0]}

    async def launches() -> list[Any]:
        return [] if processes is None else [SimpleNamespace(incarnation=LAUNCH, processes=processes)]

    ledger = SimpleNamespace(on=lambda host: [(LAUNCH.lane.owner, None)])
    here = SimpleNamespace(
        agent=SimpleNamespace(host=HOST, name="box"),
        left_out=left_out(cards, kept),
        journal=SimpleNamespace(launches=launches),
    )
    return ledger, here


async def test_a_card_in_its_place_ends_the_charges_of_engines_that_died_with_an_earlier_boot() -> None:
    with pytest.raises(Reshaped, match="gpu0 of box is charged as another card"):
        await check_cards(*machine(card(0, "GPU-b")))
    with pytest.raises(Reshaped):
        await check_cards(*machine(card(0, "GPU-b"), card(1, "GPU-a")))  # numbered anew


async def test_it_waits_for_an_engine_that_lives_and_for_one_that_nobody_can_tell_of() -> None:
    me = identity.identify(os.getpid())
    assert me is not None
    await check_cards(*machine(card(0, "GPU-b"), processes=(me,)))
    await check_cards(*machine(card(0, "GPU-b"), processes=None))


async def test_nothing_ends_while_every_card_has_its_name() -> None:
    await check_cards(*machine(card(0, "GPU-a"), card(1, "GPU-b")))
    await check_cards(*machine(attrs.evolve(card(0, "GPU-a"), index=1)))
    await check_cards(*machine(Card(index=0, uuid="GPU-a", fault="GPU is lost"), card(1, "GPU-b")))
