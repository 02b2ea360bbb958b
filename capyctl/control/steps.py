"""The steps that would let an instance serve: its wake where it is parked, else a start on each host that may take it.

Of a start that waits for room they are kept, since among many hosts they cost more than anything that is decided by
them, and looked at again only where something was charged or released since.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import attrs

from capyctl.control.book import Book, Steps
from capyctl.control.records import InstanceRow
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.types import Device, HostId, Lane, Phase
from capyctl.ledger import asks, placement
from capyctl.ledger.asks import Ask
from capyctl.ledger.types import Plan


def steps_of(book: Book, lane: Lane) -> Sequence[Ask]:
    """The steps that would let this lane serve, best first."""
    if book.instances[lane].phase is ResidencyPhase.WAKE_PLANNED:
        return (asks.ask_step(book.ledger, lane.owner, Phase.WAKE),)
    return starts(book, lane, usable(book, lane))


def starts(book: Book, lane: Lane, hosts: Sequence[HostId]) -> placement.Tries:
    """The starts to try on these hosts, best first; only the switch's host while a switch makes room for it."""
    row, owner = book.instances[lane], book.deployments[lane.deployment]
    spec, plans = owner.spec, owner.plans
    if row.wish is not None and row.wish.host is not None:
        hosts = [host for host in hosts if host == row.wish.host]
    running = _running(book, lane)
    rests_on, at = (book.ledger.hosts, spec, plans, row.plan), (hosts, running, row.last_host)
    known = book.steps.get(lane)
    if known is not None and same(known.rests_on, rests_on) and known.at == at:
        if known.tries.ledger is not book.ledger:
            book.steps[lane] = known = attrs.evolve(known, tries=known.tries.renewed(book.ledger))
        return known.tries
    tries = placement.candidates(
        book.ledger,
        lane.owner,
        _seats(row, plans, hosts, spec.devices, running),
        strategy=spec.strategy,
        max_per_host=spec.max_per_host,
    )
    book.steps[lane] = Steps(tries=tries, rests_on=rests_on, at=at)
    return tries


def same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether these are the very same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def usable(book: Book, lane: Lane) -> list[HostId]:
    """Hosts that resolved the revision, are there, and are not draining."""
    owner, online, emptying = book.deployments[lane.deployment], book.online, book.emptying
    plans = owner.plans
    return [host for host in owner.spec.hosts if host in plans and host in online and host not in emptying]


def may_go_to(book: Book, lane: Lane, hosts: Sequence[HostId]) -> bool:
    """Whether it could be woken or started on any of these hosts, whatever room there is."""
    row, owner = book.instances[lane], book.deployments[lane.deployment]
    if row.phase is ResidencyPhase.WAKE_PLANNED:
        return row.run.host in hosts
    allowed = [host for host in usable(book, lane) if host in hosts]
    return any(
        placement.has_a_place(one, owner.spec.max_per_host) and placement.most_left(book.ledger, one) is not None
        for one in (seat(book, lane, host) for host in allowed)
    )


def seat(book: Book, lane: Lane, host: HostId) -> placement.Seat:
    """One host that may take it."""
    owner = book.deployments[lane.deployment]
    (one,) = _seats(book.instances[lane], owner.plans, (host,), owner.spec.devices, _running(book, lane))
    return one


def runs_anywhere(book: Book, lane: Lane) -> bool:
    """Others of the deployment run, so that their ends may make a place."""
    return bool(_running(book, lane))


def _running(book: Book, lane: Lane) -> dict[HostId, int]:
    """How often each host runs the deployment, this instance left out."""
    counts: dict[HostId, int] = {}
    for other, one in book.of(lane.deployment):
        if other != lane and one.run.host is not None and one.has_launch:
            counts[one.run.host] = counts.get(one.run.host, 0) + 1
    return counts


def _seats(
    row: InstanceRow,
    plans: Mapping[HostId, Plan],
    hosts: Sequence[HostId],
    devices: tuple[Device, ...],
    running: Mapping[HostId, int],
) -> list[placement.Seat]:
    last, before = row.last_host, row.plan
    return [
        placement.Seat(
            host, plans[host], running.get(host, 0), devices, before if host == last else None, previous=host == last
        )
        for host in hosts
    ]
