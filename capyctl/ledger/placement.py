"""Placement: in which order hosts and cards are tried, and where a start goes.

Seats are the allowed hosts that can hold the deployment at all; who is allowed and eligible was decided
before. Source: memory 11, 13; lifecycle 23, invariant 16.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from capyctl.errors import check
from capyctl.fsm.types import Domain, HostId, Millis, Phase
from capyctl.ledger.asks import UNSEEN, Ask, Proposal, Seen, ask_start, charge_of
from capyctl.ledger.charges import Ledger
from capyctl.ledger.forecast import Hold, gate
from capyctl.ledger.shortfall import Names, Shortfall
from capyctl.ledger.types import Allocation, Claim, DomainKind, HostPolicy, Plan


class Strategy(enum.Enum):
    """How instances of one deployment are laid over its hosts."""

    SPREAD = "spread"  # fewest instances of it, then most headroom
    PACK = "pack"  # most instances of it, then least headroom


@attrs.frozen(kw_only=True)
class Seat:
    """One allowed host of a deployment.

    `cards`: card domains that it may use there instead of the one that the plan names; empty when a device was
    named, or where there is no choice. `last_card` and `previous` are of the stopped instance's last run.
    """

    host: HostId
    plan: Plan
    instances: int = 0  # of this deployment, on this host, this one left out
    cards: tuple[Domain, ...] = ()
    previous: bool = False
    last_card: Domain | None = None


@attrs.frozen(kw_only=True)
class Nowhere:
    """It fits on no host: what each lacks, in the order in which they were tried."""

    shortfalls: tuple[Shortfall, ...]

    def __attrs_post_init__(self) -> None:
        check(bool(self.shortfalls), "at least one host was tried")

    @property
    def code(self) -> str:
        """The code of the first host that waiting or evicting could help, else of the first."""
        return next((short for short in self.shortfalls if not short.never), self.shortfalls[0]).code

    @property
    def never(self) -> bool:
        """Whether waiting can change nothing on any of the hosts."""
        return all(short.never for short in self.shortfalls)

    def message(self, names: Names | None = None) -> str:
        """One line for people, every host in it."""
        return " ".join(short.message(names) for short in self.shortfalls)

    def details(self) -> dict[str, Any]:  # Any: plain JSON values of several types
        """The figures per host for `--json`."""
        return {"hosts": [{"code": short.code, **short.details()} for short in self.shortfalls]}


def candidates(
    ledger: Ledger,
    owner: str,
    seats: Sequence[Seat],
    *,
    strategy: Strategy = Strategy.SPREAD,
    max_per_host: int | None = None,
) -> tuple[Ask, ...]:
    """The starts to try, best first: hosts by strategy, and on each host its cards.

    Seats at `max_per_host`, and hosts without limits, are left out. Nothing is judged here.
    """
    open_seats = [seat for seat in seats if has_a_place(seat, max_per_host) and seat.host in ledger.hosts]
    ranked = sorted(open_seats, key=lambda seat: _rank(ledger, owner, seat, strategy))
    return tuple(ask for seat in ranked for ask in _on_host(ledger, owner, seat))


def has_a_place(seat: Seat, max_per_host: int | None) -> bool:
    """the host has fewer instances of the deployment than it may"""
    return max_per_host is None or seat.instances < max_per_host


def place(
    ledger: Ledger, asks: Sequence[Ask], seen: Mapping[HostId, Seen], now_ms: Millis
) -> Proposal | Hold | Nowhere:
    """Take the first host on which the start fits, or will once the starts in flight there are READY.

    On one host a card that fits now is taken before one that will. `asks` are of `candidates`; not empty.
    Returns: a proposal to arm, a hold to wait in, or what every host lacks.
    """
    shortfalls: list[Shortfall] = []
    for host in dict.fromkeys(ask.host for ask in asks):
        holds: list[Hold] = []
        for ask in asks:
            if ask.host != host:
                continue
            answer = gate(ledger, ask, seen.get(host, UNSEEN), now_ms)
            if isinstance(answer, Proposal):
                return answer
            if isinstance(answer, Hold):
                holds.append(answer)
            else:
                shortfalls.append(answer)
        if holds:
            return holds[0]
    return Nowhere(shortfalls=tuple(shortfalls))


def on_card(plan: Plan, policy: HostPolicy, card: Domain) -> Plan:
    """`plan` with everything that it puts on a card put on `card` instead. RAM stays where it is."""
    device = policy.domains[card].device
    check(device is not None, f"{card} is a card's domain")
    assert device is not None  # for the type checker

    def moved(allocation: Allocation) -> Allocation:
        return Allocation(
            bytes={card if _is_card(policy, domain) else domain: n for domain, n in allocation.bytes.items()},
            claims=tuple(Claim(device=device, exclusive=claim.exclusive) for claim in allocation.claims),
            host_kv=allocation.host_kv,
        )

    return attrs.evolve(plan, phases={phase: moved(allocation) for phase, allocation in plan.phases.items()})


# --- order ----------------------------------------------------------------------------------------


def _rank(ledger: Ledger, owner: str, seat: Seat, strategy: Strategy) -> tuple[int, int, int, str]:
    """Where a stopped instance ran, then the strategy's two rules, then the host's id."""
    room = max(headroom(ledger, ask) for ask in _asks(ledger, owner, seat))
    counted = (seat.instances, -room) if strategy is Strategy.SPREAD else (-seat.instances, room)
    return (0 if seat.previous else 1, *counted, seat.host)


def headroom(ledger: Ledger, ask: Ask) -> int:
    """What would be left where the engine runs (its card, else RAM), the ask granted; negative if it does not fit."""
    charge, policy = charge_of(ledger, ask), ledger.hosts[ask.host]
    known = [domain for domain in charge.bytes if domain in policy.domains]
    cards = [domain for domain in known if _is_card(policy, domain)]
    left = [ledger.room(ask.host, domain, but=ask.owner) - charge.on(domain) for domain in cards or known]
    return min(left, default=0)


def _on_host(ledger: Ledger, owner: str, seat: Seat) -> list[Ask]:
    """Its last card, then the card with most headroom, then the lowest index."""

    def rank(ask: Ask) -> tuple[int, int, tuple[int, str]]:
        cards = [domain for domain in ask.phases[Phase.COLD].bytes if _is_card(ledger.hosts[ask.host], domain)]
        card = cards[0] if cards else Domain("")
        return (0 if card == seat.last_card else 1, -headroom(ledger, ask), card_index(card))

    return sorted(_asks(ledger, owner, seat), key=rank)


def _asks(ledger: Ledger, owner: str, seat: Seat) -> list[Ask]:
    policy = ledger.hosts[seat.host]
    plans = [on_card(seat.plan, policy, card) for card in seat.cards] or [seat.plan]
    return [ask_start(owner=owner, host=seat.host, plan=plan) for plan in plans]


def card_index(card: Domain) -> tuple[int, str]:
    """The number in a card's name, so that gpu10 comes after gpu2."""
    digits = re.search(r"\d+$", card)
    return (int(digits[0]) if digits else -1, card)


def _is_card(policy: HostPolicy, domain: Domain) -> bool:
    return domain in policy.domains and policy.domains[domain].kind is DomainKind.DEVICE
