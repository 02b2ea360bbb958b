"""Room in the parked set: copies that nobody asked to keep are ended, least recently used first (memory 15).

A park and an operator's plain start take no memory from anybody who serves. What sleeps is another matter: its
next request starts it afresh. Requests and `--evict` have their switches, which ask parked ones first too.
"""

from __future__ import annotations

from collections.abc import Sequence

from capyctl.control import commands
from capyctl.control.book import Book, lane_of_owner
from capyctl.fsm import cleanup, instance
from capyctl.fsm.types import Activation, HostId, Lane, Millis, StopKind
from capyctl.ledger import parked
from capyctl.ledger.asks import Ask
from capyctl.ledger.victims import Candidate, Eviction


def make_room(book: Book, lane: Lane, tries: Sequence[Ask]) -> bool:
    """Whether parked copies are leaving so that one of these steps may fit; whoever asked looks again then."""
    if any(_leaves(book, other, {ask.host for ask in tries}) for other in book.busy):
        return True
    candidates = _candidates(book, lane)
    for ask in tries:
        plan = parked.reclaim(book.ledger, ask, candidates, since_ms=book.now_ms, seen=book.seen, now_ms=book.now_ms)
        if isinstance(plan, Eviction) and plan.victims:
            for owner in plan.owners:
                commands.stop_lane(book, lane_of_owner(owner), StopKind.RECLAIM)
            return True
    return False


def _leaves(book: Book, lane: Lane, hosts: set[HostId]) -> bool:
    """It is being ended for somebody's room; one whose end nobody knows is not waited for."""
    row = book.instances[lane]
    stop = instance.why_stopped(row.machine)
    reclaimed = stop is not None and stop.kind is StopKind.RECLAIM
    return reclaimed and row.phase in cleanup.ENDING and row.run.host in hosts


def _candidates(book: Book, target: Lane) -> list[Candidate]:
    """Parked instances that nobody is about to wake."""
    found = []
    for lane, row in book.instances.items():
        if lane == target or not row.is_parked or row.wish is not None:
            continue
        spec = book.deployments[lane.deployment].spec
        waiting = book.traffic.queue(lane.deployment).waiting
        found.append(
            Candidate(
                owner=lane.owner,
                last_used_at_ms=book.used_at.get(lane, Millis(0)),
                warm=spec.warm,
                explicit=spec.activation is Activation.EXPLICIT,
                oldest_waiter_at_ms=min((book.requests[one].arrived_at_ms for one in waiting), default=None),
            )
        )
    return found
