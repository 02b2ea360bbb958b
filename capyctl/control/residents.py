"""What engines are seen to hold against what they are charged: noticed, charged, and shown (memory 3, 16)."""

from __future__ import annotations

from typing import Final

from capyctl.control import events as e
from capyctl.control.book import Book, Over, lane_of_owner
from capyctl.control.records import Move
from capyctl.fsm.types import Bytes, Domain
from capyctl.ledger import overrun

SAMPLES: Final = 3
"""In a row, of one phase: a sample from before a phase began, and a passing peak, raise nothing."""


def judged(book: Book, event: e.Observed) -> None:
    """Raise the charge of whoever holds more than it is charged, sample after sample."""
    found = overrun.overruns(book.ledger, event.host, event.domains, event.now_ms)
    raises: dict[str, dict[Domain, Bytes]] = {}
    over: dict[tuple[str, Domain], Over] = {
        key: one for key, one in book.over.items() if key in found or not _is_on(book, key[0], event)
    }
    for (owner, domain), resident in found.items():
        held, known = book.ledger.held_by(owner), over.get((owner, domain))
        seen_at = event.domains[domain].seen_at_ms
        again = known is not None and (known.phase, known.generation) == (held.phase, held.generation)
        if again and known is not None and seen_at <= known.seen_at_ms:
            continue  # a sample that was counted
        times = known.times + 1 if again and known is not None else 1
        over[owner, domain] = Over(phase=held.phase, generation=held.generation, times=times, seen_at_ms=seen_at)
        if times >= SAMPLES:
            raises.setdefault(owner, {})[domain] = resident
            del over[owner, domain]
    book.over = over
    for owner, measured in raises.items():
        before = book.ledger.held_by(owner)
        book.put_ledger(overrun.raise_to_measured(book.ledger, owner, measured), owner)
        lane = lane_of_owner(owner)
        for domain, amount in measured.items():
            book.moves.append(
                Move(
                    machine="ledger",
                    lane=str(lane),
                    deployment=book.deployments[lane.deployment].spec.name,
                    was=f"{before.on(domain)} on {domain}",
                    event="Observed",
                    now=f"{amount}, which it holds",
                )
            )


def _is_on(book: Book, owner: str, event: e.Observed) -> bool:
    held = book.ledger.holding(owner)
    return held is None or held.host == event.host
