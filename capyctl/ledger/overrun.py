"""Owners whose processes hold more than they are charged: a plan that was too small, or an engine that leaks.

What was admitted is then less than what is used, and the next admission would rest on a wrong sum. So the charge
rises to what was measured, and is marked; nothing is ended for it. It may pass the limits: then nothing is
admitted there until the sum fits. It falls with the owner's end, like every charge. Source: memory 3, 16 (M1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from capyctl.errors import check
from capyctl.fsm.types import Bytes, Domain, HostId, Millis, Phase
from capyctl.ledger.asks import Seen
from capyctl.ledger.charges import PARKED_SET, Holding, Ledger
from capyctl.ledger.settlement import with_bytes
from capyctl.ledger.types import Allocation

TOLERANCE_BYTES: Final = 64 << 20
TOLERANCE_PERCENT: Final = 2
"""More than the larger of these two above its charge is no noise of allocators and samples."""

JUDGED: Final = frozenset({Phase.COLD, Phase.READY})
"""Phases whose charge is what the processes hold. What a park leaves has a rule of its own (memory 8.3), but for what
no park empties: RAM beside a card is held while it is parked as it was before."""


def stays(held: Holding, domain: Domain) -> bool:
    """a park of this run gives nothing of the domain back"""
    return Phase.PARKED in held.phases and held.at(Phase.PARKED).on(domain) == held.at(Phase.READY).on(domain)


def overruns(ledger: Ledger, host: HostId, seen: Seen, now_ms: Millis) -> dict[tuple[str, Domain], Bytes]:
    """(owner, domain) -> resident bytes, where they pass the charge by more than the tolerance in a fresh sample."""
    policy = ledger.hosts.get(host)
    if policy is None:
        return {}
    found = {}
    for owner, held in ledger.on(host):
        if held.phase not in JUDGED | {Phase.PARKED} or not PARKED_SET.isdisjoint(held.kept):
            continue
        for domain, sample in seen.items():
            if held.phase is Phase.PARKED and not stays(held, domain):
                continue
            if domain not in policy.domains or not 0 <= now_ms - sample.seen_at_ms <= policy.observation_ttl_ms:
                continue
            resident, charged = sample.residents.get(owner, Bytes(0)), held.on(domain)
            if resident > charged + max(TOLERANCE_BYTES, charged * TOLERANCE_PERCENT // 100):
                found[owner, domain] = resident
    return found


def raise_to_measured(ledger: Ledger, owner: str, measured: Mapping[Domain, Bytes]) -> Ledger:
    """Charge an owner what its processes were seen to hold, now and in the later phases of this run.

    Raises: InvariantBroken when that would lower a charge.
    """
    held = ledger.held_by(owner)
    allocation, phases, planned = held.allocation, dict(held.phases), dict(held.overrun)
    for domain, amount in measured.items():
        check(amount >= held.on(domain), f"what {owner} was seen to hold on {domain} raises its charge")
        planned.setdefault(domain, held.on(domain))
        allocation = with_bytes(allocation, domain, amount)
        # A peak that is over says nothing of what it holds when it is READY; what is READY is in every later peak, and
        # is left by a park that empties nothing there: no sample is taken of that.
        later = (Phase.COLD, Phase.READY, Phase.PARKING, Phase.WAKE, *((Phase.PARKED,) if stays(held, domain) else ()))
        for phase in (Phase.COLD,) if held.phase is Phase.COLD else later:
            if phase in phases or phase is held.phase:
                present = phases.get(phase, Allocation())
                phases[phase] = with_bytes(present, domain, max(present.on(domain), amount))
    return ledger.replaced(owner, attrs.evolve(held, allocation=allocation, phases=phases, overrun=planned))
