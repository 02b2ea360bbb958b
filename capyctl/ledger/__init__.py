"""Memory domains, charges by phase, device claims, admission, placement order and victim choice. Pure."""

from capyctl.ledger.admission import arm, judge, propose
from capyctl.ledger.asks import Ask, Proposal, Seen, ask_start, ask_step
from capyctl.ledger.charges import Holding, Ledger
from capyctl.ledger.checks import CHECKS, Check
from capyctl.ledger.crowd import Candidate, Crowd, may_give_way
from capyctl.ledger.forecast import Forecast, Hold, fits_later, gate
from capyctl.ledger.limits import set_policy
from capyctl.ledger.parked import ParkedSet, grew_too_much, parked_set, reclaim
from capyctl.ledger.placement import Nowhere, Seat, Strategy, candidates, place
from capyctl.ledger.settlement import keep_larger, release, remeasure, settle_down
from capyctl.ledger.shortfall import Outdated, Shortfall
from capyctl.ledger.types import (
    Allocation,
    Claim,
    DomainKind,
    DomainPolicy,
    HostPolicy,
    Observation,
    Plan,
    peak,
)
from capyctl.ledger.victims import (
    Eviction,
    Unplaceable,
    Victim,
    Way,
    plan_eviction,
    plan_together,
)

__all__ = [
    "CHECKS",
    "Allocation",
    "Ask",
    "Candidate",
    "Check",
    "Claim",
    "Crowd",
    "DomainKind",
    "DomainPolicy",
    "Eviction",
    "Forecast",
    "Hold",
    "Holding",
    "HostPolicy",
    "Ledger",
    "Nowhere",
    "Observation",
    "Outdated",
    "ParkedSet",
    "Plan",
    "Proposal",
    "Seat",
    "Seen",
    "Shortfall",
    "Strategy",
    "Unplaceable",
    "Victim",
    "Way",
    "arm",
    "ask_start",
    "ask_step",
    "candidates",
    "fits_later",
    "gate",
    "grew_too_much",
    "judge",
    "keep_larger",
    "may_give_way",
    "parked_set",
    "peak",
    "place",
    "plan_eviction",
    "plan_together",
    "propose",
    "reclaim",
    "release",
    "remeasure",
    "set_policy",
    "settle_down",
]
