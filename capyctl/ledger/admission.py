"""Admission: may this owner's charge rise to the peak of that step, now?

`propose` runs `checks.CHECKS` over one ask and changes nothing; `arm` raises the charge if the ledger is still
at the proposal's epoch and its observations are still young. Nothing else raises a charge, but for what was
measured: a parked residue, and an owner that holds more than it was planned to. Source: memory 10, 16.
"""

from __future__ import annotations

from capyctl.errors import check
from capyctl.fsm.types import Generation, Millis
from capyctl.ledger import checks as table
from capyctl.ledger.asks import Ask, Case, Proposal, Seen, charge_of
from capyctl.ledger.charges import Holding, Ledger
from capyctl.ledger.shortfall import Outdated, Shortfall


def judge(ledger: Ledger, ask: Ask, seen: Seen, now_ms: Millis, *, observed: bool = True) -> Shortfall | None:
    """The first check that does not hold, with its figures; None when all do.

    Without `observed` only those that judge the ledger are asked: what is charged, whatever was seen.
    """
    case = Case(
        ledger=ledger,
        ask=ask,
        charge=charge_of(ledger, ask),
        held=ledger.holding(ask.owner),
        seen=seen,
        now_ms=now_ms,
    )
    places: dict[table.Scope, list[Case]] = {}
    for row in table.CHECKS:
        if row.observed and not observed:
            continue
        if row.scope not in places:
            places[row.scope] = [case.at(domain) for domain in table.places(row.scope, case)]
        for looked_at in places[row.scope]:
            if not row.requires(looked_at):
                return row.figures(row, looked_at)
    return None


def propose(ledger: Ledger, ask: Ask, seen: Seen, now_ms: Millis) -> Proposal | Shortfall:
    """Decide whether the peak of `ask` fits beside everything charged now. Changes nothing.

    Args:
      seen: the newest sample per domain of the ask's host; judged only on domains whose charge rises.
    Returns: a proposal naming its epoch, or the first thing in the way, with figures.
    Raises: InvariantBroken when the step does not begin from the owner's present phase.
    Source: memory 10.
    """
    short = judge(ledger, ask, seen, now_ms)
    if short is not None:
        return short
    charge, held = charge_of(ledger, ask), ledger.holding(ask.owner)
    policy = ledger.hosts[ask.host]
    used = [domain for domain in charge.bytes if charge.on(domain) > (held.on(domain) if held else 0)]
    ends = [seen[domain].seen_at_ms + policy.observation_ttl_ms for domain in used]
    return Proposal(ask=ask, charge=charge, epoch=ledger.epoch, expires_at_ms=Millis(min(ends)) if ends else None)


def arm(
    ledger: Ledger, proposal: Proposal, *, now_ms: Millis, generation: Generation | None = None
) -> Ledger | Outdated:
    """Raise the charge to the proposal's peak, before the order that can reach it is given.

    Args:
      generation: the run's; needed for a cold start, and for other steps compared when given.
    Returns: the next epoch's ledger, or why the proposal is no longer true; then nothing was changed.
    """
    ask, held = proposal.ask, ledger.holding(proposal.ask.owner)
    if proposal.epoch != ledger.epoch:
        return _outdated(proposal, ledger, "lifecycle_conflict", "the ledger changed since this was judged")
    if proposal.expires_at_ms is not None and now_ms > proposal.expires_at_ms:
        return _outdated(proposal, ledger, "stale_observation", "what this was judged by is too old now")
    if held is None:
        check(generation is not None, "a cold start is armed with its generation")
    elif generation is not None and generation != held.generation:
        return _outdated(proposal, ledger, "lifecycle_conflict", "another run of this instance holds the charge")
    run = held.generation if held else generation
    assert run is not None  # for the type checker
    return ledger.replaced(
        ask.owner,
        Holding(
            host=ask.host,
            phase=ask.phase,
            generation=run,
            allocation=proposal.charge,
            phases=ask.phases,
            whole_host=ask.whole_host,
            lowered_by=held.lowered_by if held else None,
            overrun=held.overrun if held else {},
        ),
    )


def _outdated(proposal: Proposal, ledger: Ledger, code: str, reason: str) -> Outdated:
    return Outdated(code=code, reason=reason, proposed_at_epoch=proposal.epoch, epoch=ledger.epoch)
