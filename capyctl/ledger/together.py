"""How many instances of one deployment its hosts can ever hold at once, whatever else they hold now.

Everything that others hold may be parked or stopped, so what counts is the limits alone: what all of them hold while
they serve, and what the last one takes while it starts. More than that would be waited for without an end. The count
is never too small: where cards leave a choice the best one is taken. Source: memory 10, 11, 13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from capyctl.fsm.types import Bytes, Device, Domain, HostId, Phase
from capyctl.ledger.cards import alike, cards_of, choice
from capyctl.ledger.types import HostPolicy, Plan, card_index
from capyctl.units import gib

HOSTS_TOLD = 8  # that one message names; `details` has all of them
WAYS_OUT = {"device_conflict": "let them share it", "host_ineligible": "raise placement.max_per_host"}


@attrs.frozen(kw_only=True)
class Bound:
    """What bounds the instances on one host at `count`, and how a refusal says it.

    `needs_bytes` is what each holds of `domain` while it serves, `limit_bytes` what may be charged there; None where
    it is not memory that bounds them.
    """

    count: int
    code: str
    words: str
    domain: Domain | None = None
    needs_bytes: Bytes | None = None
    limit_bytes: Bytes | None = None


@attrs.frozen(kw_only=True)
class TooMany:
    """More instances than all hosts together can hold, and what bounds them on each. Waiting changes nothing."""

    instances: int
    hosts: Mapping[HostId, Bound]
    names: Mapping[HostId, str]

    @property
    def most(self) -> int:
        """How many of them fit."""
        return sum(bound.count for bound in self.hosts.values())

    @property
    def code(self) -> str:
        """As one instance would be refused that never fits: by the first host, those first that memory bounds."""
        bounds = sorted(self.hosts.values(), key=lambda bound: bound.domain is None)
        return bounds[0].code

    def message(self, deployment: str) -> str:
        """One line for people."""
        told = [
            f"{self.names[host]} holds {bound.count} of them, {bound.words}"
            for host, bound in list(self.hosts.items())[:HOSTS_TOLD]
        ]
        if len(self.hosts) > HOSTS_TOLD:
            told.append(f"with {len(self.hosts) - HOSTS_TOLD} more hosts it is {self.most}")
        other = WAYS_OUT.get(self.code, "lower what each needs")
        way_out = f"State instances: {self.most}, or {other}" if self.most else other.capitalize()
        return f"{deployment}: instances: is {self.instances}, and {'; '.join(told)}. {way_out}"

    def details(self) -> dict[str, Any]:  # Any: plain JSON values of several types
        """The figures for `--json`."""
        return {
            "instances": self.instances,
            "instances_max": self.most,
            "hosts": [
                {
                    "host": host,
                    "host_name": self.names[host],
                    "instances_max": bound.count,
                    "code": bound.code,
                    "domain": bound.domain,
                    "needs_bytes": bound.needs_bytes,
                    "limit_bytes": bound.limit_bytes,
                }
                for host, bound in self.hosts.items()
            ],
        }


def too_many(
    instances: int,
    plans: Mapping[HostId, Plan],
    policies: Mapping[HostId, HostPolicy],
    *,
    named: Sequence[Device] = (),
    max_per_host: int | None = None,
) -> TooMany | None:
    """Why so many instances can never be ready at once on the hosts of these plans; None where they can.

    Args:
      plans: of every host that may run it. There is one at least.
      named: the devices that the document names.
    """
    found: dict[HostId, Bound] = {}
    for host, plan in plans.items():
        bounds = _bounds(plan, policies[host], named)
        if max_per_host is not None:
            words = "as many as placement.max_per_host allows"
            bounds.append(Bound(count=max_per_host, code="host_ineligible", words=words))
        if not bounds:
            return None
        found[host] = min(bounds, key=lambda bound: bound.count)
        if sum(bound.count for bound in found.values()) >= instances:
            return None
    names = {host: policies[host].name for host in found}
    return TooMany(instances=instances, hosts=found, names=names)


def _bounds(plan: Plan, policy: HostPolicy, named: Sequence[Device]) -> list[Bound]:
    """Everything that bounds the instances on one host."""
    ready, cards = plan.at(Phase.READY), cards_of(plan, policy)
    bounds = []
    for domain, needs in ready.bytes.items():
        if domain in cards or not needs:
            continue
        most = policy.domains[domain].most_bytes
        words = f"each {_held(needs, _start(plan, domain), most)} on {domain}, where at most {gib(most)} may be used"
        bounds.append(
            Bound(
                count=_fitting(most, needs, _start(plan, domain)),
                code="insufficient_resources",
                words=words,
                domain=domain,
                needs_bytes=needs,
                limit_bytes=Bytes(most),
            )
        )
    for domain, needs in ready.host_kv.items():
        limit = policy.domains[domain].host_kv_bytes
        if needs:
            bounds.append(
                Bound(
                    count=limit // needs,
                    code="category_limit",
                    words=f"each {gib(needs)} of KV cache in host memory on {domain}, where {gib(limit)} is allowed",
                    domain=domain,
                    needs_bytes=needs,
                    limit_bytes=limit,
                )
            )
    alone = any(claim.exclusive for claim in ready.claims)
    if cards:
        bounds.append(_on_cards(plan, policy, cards, choice(plan, policy, named) or cards, alone=alone))
    elif alone:
        words = f"since each wants {ready.claims[0].device} exclusively"
        bounds.append(Bound(count=1, code="device_conflict", words=words))
    return bounds


def _on_cards(plan: Plan, policy: HostPolicy, cards: Sequence[Domain], pool: Sequence[Domain], *, alone: bool) -> Bound:
    """How many fit on the cards of a host, each rank on one of its own, and ranks of one instance on equal ones."""
    ready, pool = plan.at(Phase.READY), sorted(pool, key=card_index)
    by_memory, share = min(_by_share(plan, policy, cards, pool), key=lambda found: found[0])
    if len(pool) == len(cards):  # each rank has one card that it can be on
        by_memory, share = min(
            (_fitting(policy.domains[card].most_bytes, ready.on(rank), _start(plan, rank)), rank)
            for rank, card in zip(cards, pool, strict=True)
        )
        by_memory *= _sets(policy, dict.fromkeys(pool, 1), len(cards))
    needs = ready.on(share)
    room = {card: _fitting(policy.domains[card].most_bytes, needs, _start(plan, share)) for card in pool}
    by_device = _sets(policy, {card: min(1, places) for card, places in room.items()}, len(cards))
    of = f"{len(cards)} of {','.join(pool)}" if len(cards) > 1 else f"one of {','.join(pool)}"
    where = of if len(pool) > len(cards) or len(cards) > 1 else pool[0]
    if alone and by_device < by_memory:
        return Bound(count=by_device, code="device_conflict", words=f"since each wants {where} exclusively")
    most = max(policy.domains[card].most_bytes for card in pool)
    return Bound(
        count=by_memory,
        code="insufficient_device_memory",
        words=f"each {_held(needs, _start(plan, share), most)} on {where}, where at most {gib(most)} may be used",
        domain=share,
        needs_bytes=needs,
        limit_bytes=Bytes(most),
    )


def _by_share(
    plan: Plan, policy: HostPolicy, cards: Sequence[Domain], pool: Sequence[Domain]
) -> list[tuple[int, Domain]]:
    """How many fit by each rank's share: all ranks that hold as much or more lie on cards with room for that."""
    ready, found = plan.at(Phase.READY), []
    for rank in cards:
        needs = ready.on(rank)
        start = min(_start(plan, other) for other in cards if ready.on(other) >= needs)
        room = {card: _fitting(policy.domains[card].most_bytes, needs, start) for card in pool}
        found.append((_sets(policy, room, sum(ready.on(other) >= needs for other in cards)), rank))
    return found


def _start(plan: Plan, domain: Domain) -> int:
    """What a start takes of a domain beside those that serve. A peak that nobody sized is measured, once, alone."""
    if plan.provenance.get(Phase.COLD) == "whole_host":
        return plan.at(Phase.READY).on(domain)
    return plan.start_bytes.get(domain, 0)


def _held(needs: int, start: int, most: int) -> str:
    """What each holds, with the peak of its start where that leaves room for fewer."""
    peak = f", {gib(start)} while it starts," if _fitting(most, needs, start) < _fitting(most, needs, 0) else ""
    return f"{gib(needs)}{peak}"


def _fitting(most: int, needs: int, start: int) -> int:
    """How often `needs` fits, the last one with its start's peak."""
    peak = max(start, needs)
    if peak > most:
        return 0
    return 1 + (most - peak) // max(1, needs)


def _sets(policy: HostPolicy, room: Mapping[Domain, int], ranks: int) -> int:
    """How many sets of `ranks` different, equal cards there are, where each card may be in so many of them."""
    if ranks == 1:
        return sum(room.values())
    total = 0
    for group in alike(policy, room):
        least, most = 0, sum(room[card] for card in group) // ranks
        while least < most:  # k sets can be made exactly if the cards have k * ranks places, none more than k of them
            middle = (least + most + 1) // 2
            fits = sum(min(room[card], middle) for card in group) >= middle * ranks
            least, most = (middle, most) if fits else (least, middle - 1)
        total += least
    return total
