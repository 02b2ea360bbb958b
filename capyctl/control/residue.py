"""What parked engines really keep: measured after each park, charged from then on, and watched for growth.

A placeholder is charged before anybody has measured. The samples that prove a park also say what is left: the
largest of a revision on a host is what its parked instances are charged, now and later. Per launch the first and the
latest are kept; one that outgrew its bound does not park again, it stops. Source: memory 8.3; engines 13.4.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from capyctl.control import peaks
from capyctl.control.book import Book
from capyctl.control.records import InstanceRow
from capyctl.fsm.proofs import Resident
from capyctl.fsm.types import Bytes, Domain, Lane, Phase
from capyctl.ledger import estimates, parked, settlement


def measured(book: Book, lane: Lane, resident: Mapping[Domain, Resident]) -> None:
    """The samples of a park that is about to be settled: what its revision is charged while parked, on that host.

    Declared figures stay as they were declared.
    """
    row = book.instances[lane]
    if row.plan is None or row.plan.provenance.get(Phase.PARKED) == "declared":
        return
    _note_growth(book, lane, row, resident)
    left = {domain: sample.resident_bytes for domain, sample in resident.items()}
    peaks.keep(book, lane, Phase.PARKED, left)
    for domain, amount in left.items():
        if amount > book.ledger.held_by(lane.owner).at(Phase.PARKED).on(domain):
            _charge(book, lane, domain, amount)


def _note_growth(book: Book, lane: Lane, row: InstanceRow, resident: Mapping[Domain, Resident]) -> None:
    """The launch's first and latest parked charge: what was left, and never below the placeholder."""
    held = book.ledger.held_by(lane.owner)
    least = held.at(Phase.PARKED) if not row.parked_first else None
    latest = {
        domain: max(sample.resident_bytes, least.on(domain) if least is not None else Bytes(0))
        for domain, sample in resident.items()
    }
    first = row.parked_first or latest
    if (first, latest) != (row.parked_first, row.parked_latest):
        book.put_instance(lane, attrs.evolve(row, parked_first=first, parked_latest=latest))


def _charge(book: Book, lane: Lane, domain: Domain, amount: Bytes) -> None:
    """Charge every instance of the same revision on the same host by the measurement, each on its own cards."""
    policy = book.ledger.hosts[book.instances[lane].run.placed_on]
    ledger, moved = book.ledger, []
    for other, one in peaks.alike(book, lane):
        if one.plan is None:
            continue
        mine = (
            {domain: amount}
            if other == lane
            else estimates.as_seen_by(one.plan, policy, Phase.PARKED, {domain: amount})
        )
        for its, bytes_ in mine.items():
            ledger = settlement.remeasure(ledger, [other.owner], its, bytes_)
        moved.append(other.owner)
    book.put_ledger(ledger, *moved)


def outgrown(book: Book, lane: Lane) -> bool:
    """its parked copy outgrew the bound since this launch's first park"""
    row = book.instances[lane]
    policy = book.ledger.policy(row.run.host) if row.run.host is not None else None
    if policy is None:
        return False
    return any(
        parked.grew_too_much(
            row.parked_first.get(domain, latest),
            latest,
            parked.growth_bytes(policy, row.parked_first.get(domain, latest)),
        )
        for domain, latest in row.parked_latest.items()
    )
