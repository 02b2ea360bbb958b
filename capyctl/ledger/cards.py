"""Cards of one host: which of them one start may take, and a plan laid over those that it takes.

A plan names as many cards as its engine has ranks, each with a share of its own; which cards these are at a start is
chosen here. Several ranks need equal cards, since an engine gives each rank the same share: cards of one model and
one size. Ranks lie on the chosen cards in the order of their numbers, and the engine is shown them in that order.
Source: memory 11 (several devices, card on the chosen host).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

import attrs

from capyctl.errors import check
from capyctl.fsm.types import Device, Domain
from capyctl.ledger.types import Allocation, Claim, DomainPolicy, HostPolicy, Plan, card_index
from capyctl.units import gib

SETS_MAX = 70
"""Sets of equal cards that are looked at: all of them for four of eight cards. Beyond that, neighbours by room."""


def is_card(policy: HostPolicy, domain: Domain) -> bool:
    """the host has it, and it is a card's"""
    return domain in policy.cards


def cards_of(plan: Plan, policy: HostPolicy) -> tuple[Domain, ...]:
    """The cards that a plan names, one for each rank, in rank order."""
    named = plan.domains & policy.cards
    return tuple(named) if len(named) < 2 else tuple(sorted(named, key=card_index))


def on_cards(plan: Plan, policy: HostPolicy, cards: Sequence[Domain]) -> Plan:
    """`plan` with each rank's share on the card that stands in its place in `cards`. RAM stays where it is."""
    named = cards_of(plan, policy)
    check(len(named) == len(set(cards)) == len(cards), "each rank has a card of its own")
    check(all(is_card(policy, card) for card in cards), "what a rank is put on is a card")
    if named == tuple(cards):
        return plan
    to = dict(zip(named, cards, strict=True))
    devices = {policy.domains[one].device: policy.domains[card].device for one, card in to.items()}

    def moved(allocation: Allocation) -> Allocation:
        claims = []
        for claim in allocation.claims:
            device = devices.get(claim.device)
            check(device is not None, "a plan claims the devices of the cards that it names")
            assert device is not None  # for the type checker
            claims.append(Claim(device=device, exclusive=claim.exclusive))
        return Allocation(
            bytes={to.get(domain, domain): amount for domain, amount in allocation.bytes.items()},
            claims=tuple(claims),
            host_kv=allocation.host_kv,
        )

    return attrs.evolve(plan, phases={phase: moved(held) for phase, held in plan.phases.items()})


def choice(plan: Plan, policy: HostPolicy, named: Sequence[Device]) -> tuple[Domain, ...]:
    """The cards of a host that may be taken instead of those that the plan names; none where there is no choice.

    Args:
      named: the devices that the document names. Several of them have to be equal too.
    """
    ranks = len(cards_of(plan, policy))
    mine = tuple(
        domain
        for domain, limits in policy.domains.items()
        if domain in policy.cards and (not named or limits.device in named)
    )
    return mine if ranks > 1 or (ranks == 1 and not named and len(mine) > 1) else ()


def alike(policy: HostPolicy, cards: Iterable[Domain]) -> list[list[Domain]]:
    """`cards` by model and size, each group in the order of its numbers."""
    groups: dict[tuple[str | None, int], list[Domain]] = {}
    for card in sorted(cards, key=card_index):
        groups.setdefault(_make(policy.domains[card]), []).append(card)
    return list(groups.values())


def sets(policy: HostPolicy, cards: Sequence[Domain], ranks: int) -> Iterator[tuple[Domain, ...]]:
    """The sets of `ranks` equal cards among `cards`, each in the order of its numbers; none where too few are alike.

    `cards` stand in order of preference: where there are more sets than are looked at, neighbours in it are taken.
    """
    if ranks == 1:
        yield from ((card,) for card in cards)
        return
    place = {card: number for number, card in enumerate(cards)}
    for group in alike(policy, cards):
        preferred = sorted(group, key=place.__getitem__)
        if math.comb(len(group), ranks) <= SETS_MAX:
            chosen: Iterable[Sequence[Domain]] = combinations(preferred, ranks)
        else:
            chosen = (preferred[first : first + ranks] for first in range(len(group) - ranks + 1))
        yield from (tuple(sorted(one, key=card_index)) for one in chosen)


def too_few(policy: HostPolicy, cards: Iterable[Domain], ranks: int) -> str | None:
    """Why a host has no place for so many ranks, in figures; None where enough of its cards are alike."""
    groups = alike(policy, cards)
    if any(len(group) >= ranks for group in groups):
        return None
    have = ", ".join(f"{len(group)} of {_words(policy.domains[group[0]])}" for group in groups) or "no card"
    return f"{ranks} ranks need {ranks} equal cards of one machine; {policy.name} has {have}"


def _make(limits: DomainPolicy) -> tuple[str | None, int]:
    """What cards that one engine may span have in common: the model that the driver names, and the size."""
    return limits.model, limits.capacity_bytes


def _words(limits: DomainPolicy) -> str:
    size = gib(limits.capacity_bytes)
    return f"{limits.model} ({size})" if limits.model else size
