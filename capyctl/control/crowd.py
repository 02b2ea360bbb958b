"""Who might give way in this world: instances of other deployments that serve or are parked, host by host.

Of each host the book keeps the turn of whoever would be asked there first, until a row or a charge there changes. A
request that uses an instance only makes its turn later, so what is kept may be too early and is never too late: a
plan that looks at a host in vain for it works it out anew.
Source: lifecycle 12.3; memory 12.
"""

from __future__ import annotations

from functools import partial

from capyctl.control import refusing, requests, residue
from capyctl.control.book import Book
from capyctl.control.records import InstanceRow
from capyctl.fsm.types import Activation, HostId, Lane, Millis, Phase
from capyctl.ledger.crowd import Candidate, Crowd, Turn, turn


def around(book: Book, target: Lane, *, left_alone: bool = False) -> Crowd:
    """Everybody who might give way for this instance. `left_alone`: those too that would not, not long ago."""
    return Crowd(partial(_on, book, target, left_alone=left_alone), partial(first_on, book))


def first_on(book: Book, host: HostId) -> Turn | None:
    """A turn before which nobody on a host is asked, None where nobody could be."""
    shelf = book.ledger.shelf(host)
    kept = book.first_turns.get(host)
    if kept is None or kept[0] is not shelf:
        kept = book.first_turns[host] = (shelf, min(turns_on(book, host), default=None))
    return kept[1]


def turns_on(book: Book, host: HostId) -> list[Turn]:
    """The turns of all on a host that policy does not spare, whoever waits for them and whatever they refused."""
    return [_turn(book, lane) for lane, row in book.anybody_on(host) if _is_there(row) and not _is_spared(book, lane)]


def _is_spared(book: Book, lane: Lane) -> bool:
    spec = book.deployments[lane.deployment].spec
    return spec.warm or spec.activation is Activation.EXPLICIT


def _turn(book: Book, lane: Lane) -> Turn:
    held = book.ledger.holding(lane.owner)
    return turn(
        lane.owner,
        book.used_at.get(lane, Millis(0)),
        parked=held is not None and held.phase is Phase.PARKED,
        keeps_another_ready=_keeps_another(book, lane),
    )


def _is_there(row: InstanceRow) -> bool:
    return row.gate_open or row.is_parked


def _keeps_another(book: Book, lane: Lane) -> bool:
    return any(other != lane and row.gate_open for other, row in book.of(lane.deployment))


def _on(book: Book, target: Lane, host: HostId, *, left_alone: bool) -> list[Candidate]:
    """Those on one host. What they hold is known to the ledger."""
    book.first_turns.pop(host, None)
    return [
        candidate(book, lane, row)
        for lane, row in book.on(host)
        if lane.deployment != target.deployment and _is_there(row)
        if left_alone or not refusing.is_left_alone(book, lane)
    ]


def candidate(book: Book, lane: Lane, row: InstanceRow) -> Candidate:
    """An instance as a plan knows it."""
    spec = book.deployments[lane.deployment].spec
    return Candidate(
        owner=lane.owner,
        last_used_at_ms=book.used_at.get(lane, Millis(0)),
        keeps_another_ready=_keeps_another(book, lane),
        parks=row.run.tier.parks and not requests.settle_at_stop(book, lane) and not residue.outgrown(book, lane),
        warm=spec.warm,
        explicit=spec.activation is Activation.EXPLICIT,
        oldest_waiter_at_ms=requests.waits_since(book, lane.deployment),
    )
