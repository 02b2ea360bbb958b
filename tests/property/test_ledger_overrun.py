"""Owners that hold more than they are charged: noticed beyond a tolerance, charged what they hold, never less."""

from __future__ import annotations

import attrs
import pytest

from capyctl.errors import InvariantBroken
from capyctl.fsm.proofs import Resident
from capyctl.fsm.types import (
    Bytes,
    DeploymentId,
    Device,
    Domain,
    Generation,
    HostId,
    Incarnation,
    Lane,
    Millis,
    Phase,
)
from capyctl.ledger.charges import Holding, Ledger
from capyctl.ledger.overrun import TOLERANCE_BYTES, overruns, raise_to_measured
from capyctl.ledger.settlement import settle_down
from capyctl.ledger.types import Allocation, DomainKind, DomainPolicy, HostPolicy, Observation

GIB = 1 << 30
H, RAM, OWNER = HostId("h"), Domain("unified"), "deployment:d/instance:0"
NOW = Millis(100_000)


def ledger(phase: Phase = Phase.READY, **changes: object) -> Ledger:
    limits = DomainPolicy(
        kind=DomainKind.UNIFIED,
        capacity_bytes=Bytes(16 * GIB),
        managed_bytes=Bytes(4 * GIB),
        reserve_bytes=Bytes(GIB),
        parked_bytes=Bytes(GIB),
    )
    sizes = {Phase.COLD: 3, Phase.READY: 2, Phase.PARKING: 2, Phase.PARKED: 1, Phase.WAKE: 2}
    phases = {one: Allocation(bytes={RAM: Bytes(size * GIB)}) for one, size in sizes.items()}
    held = Holding(host=H, phase=phase, generation=Generation(1), allocation=phases[phase], phases=phases)
    return Ledger.load(
        epoch=1,
        hosts=[HostPolicy(host=H, name="h", domains={RAM: limits})],
        holdings={OWNER: attrs.evolve(held, lowered_by="Usable", **changes)},
    )


def seen(resident: int, *, at_ms: int = NOW) -> dict[Domain, Observation]:
    sample = Observation(
        capacity_bytes=Bytes(16 * GIB),
        available_bytes=Bytes(8 * GIB),
        seen_at_ms=Millis(at_ms),
        residents={OWNER: Bytes(resident)},
    )
    return {RAM: sample}


@pytest.mark.parametrize(
    ("resident", "phase", "at_ms", "noticed"),
    [
        (2 * GIB + TOLERANCE_BYTES, Phase.READY, NOW, False),
        (2 * GIB + TOLERANCE_BYTES + 1, Phase.READY, NOW, True),
        (3 * GIB + TOLERANCE_BYTES, Phase.COLD, NOW, False),
        (4 * GIB, Phase.COLD, NOW, True),
        (4 * GIB, Phase.PARKED, NOW, False),  # a sample from before the park looks the same
        (4 * GIB, Phase.WAKE, NOW, False),
        (4 * GIB, Phase.READY, NOW - 60_001, False),
        (4 * GIB, Phase.READY, NOW + 1, False),
    ],
)
def test_more_than_the_tolerance_in_a_fresh_sample_is_an_overrun(
    resident: int, phase: Phase, at_ms: int, noticed: bool
) -> None:
    found = overruns(ledger(phase), H, seen(resident, at_ms=at_ms), NOW)
    assert found == ({(OWNER, RAM): resident} if noticed else {})


def test_the_tolerance_grows_with_the_charge() -> None:
    big = ledger(allocation=Allocation(bytes={RAM: Bytes(100 * GIB)}))
    assert not overruns(big, H, seen(101 * GIB), NOW)
    assert overruns(big, H, seen(103 * GIB), NOW)


def test_a_raise_is_for_this_phase_and_all_later_ones_and_remembers_what_was_planned() -> None:
    before = ledger()
    after = raise_to_measured(before, OWNER, {RAM: Bytes(3 * GIB)})
    held = after.held_by(OWNER)
    assert (after.epoch, held.on(RAM), held.planned(RAM)) == (2, 3 * GIB, 2 * GIB)
    assert {phase: held.at(phase).on(RAM) // GIB for phase in held.phases} == {
        Phase.COLD: 3, Phase.READY: 3, Phase.PARKING: 3, Phase.PARKED: 1, Phase.WAKE: 3,
    }  # fmt: skip
    again = raise_to_measured(after, OWNER, {RAM: Bytes(6 * GIB)})  # past the limits: it is what it holds
    assert (again.held_by(OWNER).planned(RAM), again.room(H, RAM)) == (2 * GIB, -2 * GIB)


def test_an_overrun_while_it_loads_says_nothing_of_what_it_will_hold() -> None:
    held = raise_to_measured(ledger(Phase.COLD), OWNER, {RAM: Bytes(5 * GIB)}).held_by(OWNER)
    assert (held.on(RAM), held.at(Phase.READY).on(RAM)) == (5 * GIB, 2 * GIB)


# --- RAM beside a card: no park gives anything of it back --------------------------------------------------

GPU0, SYSTEM = Domain("gpu0"), Domain("system")


def beside_a_card(phase: Phase) -> Ledger:
    """One owner that is charged 9 GiB on its card, 1 of it parked, and 4 GiB of RAM in every phase."""
    limits = {
        name: DomainPolicy(
            kind=kind,
            capacity_bytes=Bytes(24 * GIB),
            managed_bytes=Bytes(20 * GIB),
            reserve_bytes=Bytes(GIB),
            parked_bytes=Bytes(8 * GIB),
        )
        for name, kind in ((GPU0, DomainKind.DEVICE), (SYSTEM, DomainKind.DISTINCT))
    }
    limits[GPU0] = attrs.evolve(limits[GPU0], device=Device("gpu0"))
    phases = {
        one: Allocation(bytes={GPU0: Bytes((1 if one is Phase.PARKED else 9) * GIB), SYSTEM: Bytes(4 * GIB)})
        for one in (Phase.COLD, Phase.READY, Phase.PARKING, Phase.PARKED, Phase.WAKE)
    }
    held = Holding(
        host=H, phase=phase, generation=Generation(1), allocation=phases[phase], phases=phases, lowered_by="Usable"
    )
    return Ledger.load(epoch=1, hosts=[HostPolicy(host=H, name="h", domains=limits)], holdings={OWNER: held})


def test_what_was_found_in_ram_stays_charged_when_it_parks() -> None:
    """A park samples the card alone: what it says nothing about may not fall."""
    ledger = raise_to_measured(beside_a_card(Phase.READY), OWNER, {SYSTEM: Bytes(6 * GIB), GPU0: Bytes(10 * GIB)})
    held = ledger.held_by(OWNER)
    ledger = ledger.replaced(OWNER, attrs.evolve(held, phase=Phase.PARKING))
    run = Incarnation(Lane(DeploymentId("d"), 0), Generation(1))
    left = Resident(
        incarnation=run,
        resident_bytes=Bytes(GIB),
        budget_bytes=Bytes(GIB),
        released_at_ms=Millis(1),
        sampled_at_ms=Millis(2),
    )
    parked = settle_down(ledger, OWNER, Phase.PARKED, {GPU0: left}).held_by(OWNER)
    assert (parked.on(GPU0), parked.on(SYSTEM), parked.planned(SYSTEM)) == (GIB, 6 * GIB, 4 * GIB)
    assert parked.at(Phase.WAKE).on(SYSTEM) == 6 * GIB


def test_ram_that_a_parked_engine_is_seen_to_hold_is_charged_and_its_card_has_a_rule_of_its_own() -> None:
    ledger = beside_a_card(Phase.PARKED)
    found = overruns(ledger, H, {**of(GPU0, 9 * GIB), **of(SYSTEM, 7 * GIB)}, NOW)
    assert found == {(OWNER, SYSTEM): 7 * GIB}
    held = raise_to_measured(ledger, OWNER, {SYSTEM: Bytes(7 * GIB)}).held_by(OWNER)
    assert {held.at(phase).on(SYSTEM) for phase in held.phases} == {7 * GIB}
    assert (held.on(SYSTEM), held.on(GPU0)) == (7 * GIB, GIB)


def of(domain: Domain, resident: int) -> dict[Domain, Observation]:
    return {domain: seen(resident)[RAM]}


def test_nothing_is_lowered_by_a_sample() -> None:
    with pytest.raises(InvariantBroken):
        raise_to_measured(ledger(), OWNER, {RAM: Bytes(GIB)})
