"""Room in the parked set: copies that nobody asked to keep are ended, least recently used first (memory 15).

A park and an operator's plain start take no memory from anybody who serves. What sleeps is another matter: its
next request starts it afresh. Requests and `--evict` have their switches, which ask parked ones first too.
"""

from __future__ import annotations

from collections.abc import Sequence

from capyctl.control import deeds
from capyctl.control.book import Book, lane_of_owner
from capyctl.control.crowd import candidate
from capyctl.control.records import InstanceRow
from capyctl.fsm import cleanup, instance, residency
from capyctl.fsm.types import HostId, Lane, StopKind
from capyctl.ledger import parked
from capyctl.ledger.asks import Ask
from capyctl.ledger.crowd import Candidate, may_give_way
from capyctl.ledger.placement import asks_at, hosts_of
from capyctl.ledger.victims import Eviction


def make_room(book: Book, lane: Lane, tries: Sequence[Ask]) -> bool:
    """Whether parked copies are leaving so that one of these steps may fit; whoever asked looks again then."""
    hosts = hosts_of(tries)
    if any(_leaves(row) and row.run.host in hosts for _, row in book.being(*cleanup.ENDING)):
        return True
    for place, host in enumerate(hosts):
        mine = _candidates(book, lane, host) if book.ledger.shelf(host).parked else []
        for ask in asks_at(tries, place, host) if mine else ():
            plan = parked.reclaim(book.ledger, ask, mine, since_ms=book.now_ms, seen=book.seen, now_ms=book.now_ms)
            if isinstance(plan, Eviction) and plan.victims:
                for owner in plan.owners:
                    deeds.stop_lane(book, lane_of_owner(owner), StopKind.RECLAIM)
                return True
    return False


def relieve(book: Book) -> None:
    """End copies of a parked set that is over its limits: a switch's target that was to leave it did not wake.

    Its victim was parked as if the target were gone already. Whoever was used least recently goes, until the rest
    fits; who cannot be asked stays, and the next park finds no room.
    """
    for host in sorted(book.crowded):
        if host in book.active_switches or any(_leaves(row) for _, row in book.on(host)):
            continue
        if any(row.parking or row.phase in residency.WAKING for _, row in book.on(host)):
            continue  # what is under way may settle it
        asleep = [one for one in _candidates(book, None, host) if may_give_way(one, book.now_ms)]
        if not parked.is_over(book.ledger, host) or not asleep:
            book.crowded.discard(host)
            continue
        oldest = min(asleep, key=lambda one: (one.last_used_at_ms, one.owner))
        deeds.stop_lane(book, lane_of_owner(oldest.owner), StopKind.RECLAIM)


def _leaves(row: InstanceRow) -> bool:
    """It is being ended for somebody's room; one whose end nobody knows is not waited for."""
    stop = instance.why_stopped(row.machine)
    return stop is not None and stop.kind is StopKind.RECLAIM


def _candidates(book: Book, target: Lane | None, host: HostId) -> list[Candidate]:
    """Parked instances on this host that nobody is about to wake, without the target."""
    return [
        candidate(book, lane, row)
        for lane, row in book.on(host)
        if lane != target and row.is_parked and row.wish is None
    ]
