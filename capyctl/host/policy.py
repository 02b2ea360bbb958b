"""What this machine may hold: the limits of its memory domains, from what it has and what its document says. Pure.

Without a card that has memory of its own there is one domain, `unified`, the machine's RAM. With such
cards there are `system` and one `gpuN` each. Topology is observed, never guessed from a name.
Source: memory 1, 2; engines 4.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from capyctl.errors import Refusal
from capyctl.fsm.types import Bytes, Device, Domain, HostId
from capyctl.host.cards import Card
from capyctl.host.memory import Seen
from capyctl.ledger.types import DomainKind, DomainPolicy, HostPolicy, card_index
from capyctl.units import Auto, Growth, Limit, Off, Percent, Size, gib

UNIFIED, SYSTEM = Domain("unified"), Domain("system")
GIB = 1 << 30
PARKED_MAX = 4


def system_policy(
    kind: DomainKind,
    capacity: int,
    *,
    managed_limit: Limit = Auto.AUTO,
    free_reserve: Limit = Auto.AUTO,
    parked_limit: Limit = Auto.AUTO,
) -> DomainPolicy:
    """Limits of the machine's RAM on a standalone role: 50 % managed, 20 % reserve, 25 % parked, 10 % host KV.

    Percentages are of `capacity`, bytes. Automatic sub-limits are lowered to a smaller managed limit.
    Raises: Refusal `invalid_config` naming both numbers when they do not fit together.
    Source: memory 2.1, 2.2.
    """
    managed = _bytes(managed_limit, capacity, 50)
    reserve = _bytes(free_reserve, capacity, 20)
    parked = _bytes(parked_limit, capacity, 25)
    if managed <= 0:
        raise Refusal("invalid_config", "memory.system.managed_limit must be more than 0")
    if managed + reserve > capacity:
        raise Refusal(
            "invalid_config",
            f"managed_limit {gib(managed)} and free_reserve {gib(reserve)} do not fit into the {gib(capacity)} "
            "of this machine together; lower one of them, in host.resource_policy.memory.system",
        )
    if parked_limit is Auto.AUTO:
        parked = min(parked, managed)
    elif parked > managed:
        raise Refusal("invalid_config", f"parked_limit {gib(parked)} is above managed_limit {gib(managed)}")
    return DomainPolicy(
        kind=kind,
        capacity_bytes=Bytes(capacity),
        managed_bytes=Bytes(managed),
        reserve_bytes=Bytes(reserve),
        parked_bytes=Bytes(parked),
        host_kv_bytes=Bytes(min(capacity * 10 // 100, managed)),
    )


def card_policy(card: Card, max_parked: int = PARKED_MAX) -> DomainPolicy:
    """Limits of one discrete card: derived, not settable on standalone."""
    total = card.total_bytes or 0
    reserve = max(GIB, total * 8 // 100)
    return DomainPolicy(
        kind=DomainKind.DEVICE,
        capacity_bytes=Bytes(total),
        managed_bytes=Bytes(max(0, total - reserve)),
        reserve_bytes=Bytes(reserve),
        parked_bytes=Bytes(min(2 * GIB * max_parked, total // 4, max(0, total - reserve))),
        device=_device(card),
        uuid=card.uuid,
        model=card.name or None,
    )


def host_policy(
    host: HostId,
    name: str,
    memory: Seen,
    cards: tuple[Card, ...],
    *,
    managed_limit: Limit = Auto.AUTO,
    free_reserve: Limit = Auto.AUTO,
    parked_limit: Limit = Auto.AUTO,
    max_parked: int = PARKED_MAX,
    parked_growth: Growth = Auto.AUTO,
    charged: Mapping[Domain, DomainPolicy] | None = None,
) -> HostPolicy:
    """What a standalone machine may hold, from what it has and what its document says.

    Args:
      charged: domains of cards that engines of before are charged on. Their names stay with their cards, and one
        whose card does not answer stays as it was: it is never observed, so nothing new starts there, and
        its charges fall by proof as everywhere.
    Raises: Refusal `invalid_config`; `unsupported_gpu_topology` for a machine whose cards cannot be counted, naming
      them; `topology_unknown` when no card answers.
    """
    kept = charged or {}
    check_topology(cards, known=bool(kept))
    placed = places(cards, kept)
    integrated = [card for card in cards if not card.fault and card.total_bytes is None]
    system = system_policy(
        DomainKind.DISTINCT if placed or kept else DomainKind.UNIFIED,
        memory.capacity_bytes,
        managed_limit=managed_limit,
        free_reserve=free_reserve,
        parked_limit=parked_limit,
    )
    if integrated:
        system = attrs.evolve(system, device=_device(integrated[0]), uuid=integrated[0].uuid)
    domains = {SYSTEM if placed or kept else UNIFIED: system, **kept}
    domains |= {
        domain: attrs.evolve(card_policy(card, max_parked), device=Device(domain)) for domain, card in placed.items()
    }
    percent, amount = growth(parked_growth)
    return HostPolicy(
        host=host,
        name=name,
        domains=domains,
        max_parked=max_parked,
        parked_growth_percent=percent,
        parked_growth_bytes=amount,
    )


def growth(limit: Growth) -> tuple[int | None, Bytes | None]:
    """(percent of the first parked charge, bytes) that a launch's parked copy may grow by; `auto` lets it double."""
    match limit:
        case Size(bytes=amount):
            return None, Bytes(amount)
        case Percent(value):
            return value, None
        case Off():
            return None, None
        case _:
            return 100, None


def check_topology(cards: Iterable[Card], *, known: bool = False) -> None:
    """Refuse a machine whose memory cannot be laid out. `known`: its cards are known from before.

    Raises: Refusal as of `host_policy`.
    """
    cards = tuple(cards)
    faults = [card for card in cards if card.fault]
    if faults and len(faults) == len(cards) and not known:
        said = "; ".join(f"card {card.index}: {card.fault}" for card in faults)
        raise Refusal("topology_unknown", f"no card of this machine answers ({said}); `nvidia-smi` may say more")
    discrete = [card for card in cards if card.discrete]
    integrated = [card for card in cards if not card.fault and card.total_bytes is None]
    if integrated and (discrete or known or len(integrated) > 1):
        own = _words(integrated)
        beside = f" beside {_words(discrete)}" if discrete else ""
        raise Refusal(
            "unsupported_gpu_topology",
            f"{own} without memory of its own{beside}: engines run on discrete cards, or on one integrated GPU alone",
        )
    divided = [card for card in discrete if card.divided]
    if divided:
        raise Refusal(
            "unsupported_gpu_topology",
            f"{_words(divided)} is divided into MIG instances; `nvidia-smi -i {divided[0].index} -mig 0` ends that",
        )


def places(cards: Iterable[Card], kept: Mapping[Domain, DomainPolicy] | None = None) -> dict[Domain, Card]:
    """The domain of each discrete card: the one that it had and is charged, else `gpu` and the driver's index.

    A card whose index is the name of another one's charges is left out until they have fallen.
    """
    kept = kept or {}
    placed: dict[Domain, Card] = {}
    for card in cards:
        if not card.discrete:
            continue
        had = next((domain for domain, limits in kept.items() if _same(card, limits)), None)
        domain = had or Domain(_device(card))
        if had is not None or (domain not in kept and domain not in placed):
            placed[domain] = card
    return placed


def left_out(cards: Iterable[Card], kept: Mapping[Domain, DomainPolicy]) -> tuple[Card, ...]:
    """Discrete cards that cannot be used now: their number is the name of another card, which is charged."""
    cards = tuple(cards)
    placed = set(places(cards, kept).values())
    return tuple(card for card in cards if card.discrete and card not in placed)


def device_env(policy: HostPolicy, allocation: Mapping[Domain, int]) -> dict[str, str]:
    """The variables that show an engine the cards of its allocation and no other; none where memory is unified.

    In rank order, which is that of the cards' numbers: what the engine calls its first device is its first rank's.
    By UUID, since CUDA numbers cards by speed unless told otherwise; by the driver's index in bus order when a
    card has none. Source: engines 4.1; memory 11.
    """
    cards = {domain: limits for domain, limits in policy.domains.items() if limits.kind is DomainKind.DEVICE}
    if not cards:
        return {}
    mine = [cards[domain] for domain in sorted(cards, key=card_index) if allocation.get(domain)]
    uuids = [limits.uuid for limits in mine if limits.uuid is not None]
    if len(uuids) == len(mine):
        return {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}
    numbers = [str(limits.device).removeprefix("gpu") for limits in mine]
    return {"CUDA_VISIBLE_DEVICES": ",".join(numbers), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _device(card: Card) -> Device:
    return Device(f"gpu{card.index}")


def _same(card: Card, limits: DomainPolicy) -> bool:
    """Whether it is the card that these limits were derived from."""
    if card.uuid is not None and limits.uuid is not None:
        return card.uuid == limits.uuid
    return limits.device == _device(card) and limits.capacity_bytes == card.total_bytes


def _words(cards: Iterable[Card]) -> str:
    return ", ".join(f"card {card.index} ({card.name or 'unnamed'})" for card in cards)


def _bytes(limit: Limit, capacity: int, default_percent: int) -> int:
    match limit:
        case Size(bytes=size):
            return size
        case Percent() as share:
            return share.of(capacity)
        case _:
            return Percent(default_percent).of(capacity)
