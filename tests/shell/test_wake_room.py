"""The room that a wake needs is what it takes beyond what stayed charged: the ledger asks for no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from capyctl.fsm.types import Bytes, DeploymentId, Domain, Generation, HostId, Incarnation, Lane, Millis
from capyctl.host.cards import Card
from capyctl.host.memory import Seen
from capyctl.host.parking import Parking, _Unsent
from capyctl.host.policy import host_policy
from capyctl.ledger.types import Observation

GIB = 1 << 30
HOST = HostId("h")
LAUNCH = Incarnation(Lane(DeploymentId("d"), 0), Generation(1))
GPU0, SYSTEM = Domain("gpu0"), Domain("system")


async def check(*, ram_free: int, card_free: int, parked_ram: int = 4) -> None:
    """A wake of 12 GiB on a card of 24, 1 of it kept, beside 4 GiB of RAM of which its processes hold one."""
    memory = Seen(capacity_bytes=Bytes(32 * GIB), available_bytes=Bytes(32 * GIB), source="meminfo")
    card = Card(index=0, uuid="GPU-a", total_bytes=Bytes(24 * GIB), free_bytes=Bytes(0), used_bytes=Bytes(0))

    async def sample(owners: object) -> dict[Domain, Observation]:
        held = {LAUNCH.lane.owner: Bytes(GIB)}
        figures = ((GPU0, 24, card_free), (SYSTEM, 32, ram_free))
        return {
            name: Observation(
                capacity_bytes=Bytes(size * GIB),
                available_bytes=Bytes(free * GIB),
                seen_at_ms=Millis(1),
                residents=held,
            )
            for name, size, free in figures
        }

    here: Any = SimpleNamespace(
        observer=SimpleNamespace(sample_lately=sample), owners=dict, policy=host_policy(HOST, "box", memory, (card,))
    )
    facts = SimpleNamespace(
        ready={"gpu0": 12 * GIB, "system": 4 * GIB}, parked={"gpu0": GIB, "system": parked_ram * GIB}
    )
    engine: Any = SimpleNamespace(incarnation=LAUNCH, facts=facts)
    await Parking._check_room(here, engine)


async def test_ram_that_stayed_charged_is_not_asked_for_again_however_little_is_free() -> None:
    await check(ram_free=1, card_free=20)


async def test_what_rises_needs_its_room() -> None:
    with pytest.raises(_Unsent, match="on gpu0"):
        await check(ram_free=30, card_free=8)
    with pytest.raises(_Unsent, match="on system"):
        await check(ram_free=1, card_free=20, parked_ram=2)
