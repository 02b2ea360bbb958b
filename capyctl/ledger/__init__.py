"""Memory domains, charges by phase, device claims, admission, placement order and victim choice. Pure."""

from capyctl.ledger.admission import arm, judge, propose
from capyctl.ledger.asks import Ask, Proposal, Seen, ask_start, ask_step
from capyctl.ledger.charges import Holding, Ledger
from capyctl.ledger.checks import CHECKS, Check
from capyctl.ledger.limits import set_policy
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

__all__ = [
    "CHECKS",
    "Allocation",
    "Ask",
    "Check",
    "Claim",
    "DomainKind",
    "DomainPolicy",
    "Holding",
    "HostPolicy",
    "Ledger",
    "Observation",
    "Outdated",
    "Plan",
    "Proposal",
    "Seen",
    "Shortfall",
    "arm",
    "ask_start",
    "ask_step",
    "judge",
    "keep_larger",
    "peak",
    "propose",
    "release",
    "remeasure",
    "set_policy",
    "settle_down",
]
