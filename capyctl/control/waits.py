"""What whoever waits for room is told: operators who is in the way and what helps, clients what lacks, without names.

Source: lifecycle 12.2, 12.3; api 4; cli 14.3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from capyctl.control.book import Book, lane_of_owner
from capyctl.control.records import WAITING, DeploymentRow, InstanceRow
from capyctl.fsm import deployment
from capyctl.fsm.types import Activation, DeploymentId, HostId, Lane
from capyctl.ledger import victims
from capyctl.ledger.placement import Nowhere
from capyctl.units import gib

NAMED_MAX = 3
NOBODY = "Nobody gives way for it"
KEPT_RETRY_S = 60
"""When a request may ask again that only an operator can make room for."""

_END: Final = r".+?(?:\)|more)(?=[.;])"  # of a list of owners with what they hold
_HOST: Final = r"\S+?(?=[.;](?:\s|$))"
_OTHERS: Final = (
    (re.compile(rf"(?:; | is )(?:charged to|held by) {_END}"), ""),
    (re.compile(rf"(still to be filled) by {_END}"), r"\1"),
    (re.compile(r"; [^;]+? (?:is|are) not asked to give way(?=\.)"), ""),
    (re.compile(r"\S+ of \S+ is in use by [^;]+?, and one of them wants it alone"), "a device is in use"),
    (re.compile(rf"its first start takes all of {_HOST}"), "its first start takes a whole host"),
    (re.compile(rf"another's first start has {_HOST}"), "another's first start has the whole host"),
    (re.compile(r"(instances are parked) on \S+(?=, \d)"), r"\1"),
    (re.compile(r" (?:on (?:\S+ of )?\S+)(?=; \d)"), ""),
)
"""How shortfalls tell of others (`ledger.shortfall`), and what a client reads instead."""


# --- clients ------------------------------------------------------------------------------------------


def for_client(book: Book, target: DeploymentId) -> str:
    """Why a request for it is not served yet, in a few words without names; empty where it starts or just waits."""
    if any(book.switches[one].target == target for one in book.active_switches.values()):
        return "room is being made for it"
    row = book.deployments.get(target)
    if row is not None and row.state.gate is deployment.Gate.PENDING:
        return "its files are not measured yet"
    for lane, one in book.of(target):
        if one.phase in WAITING and lane in book.shortfalls:
            return lack(book.shortfalls[lane])
    return ""


def lack(nowhere: Nowhere, what: str = "it") -> str:
    """`there is no room for it (it needs 5.0 GiB, 2.0 GiB is free)`."""
    for short in nowhere.shortfalls:
        if short.needs_bytes is not None and short.free_bytes is not None:
            free = max(0, short.free_bytes - (short.unbacked_bytes or 0))
            return f"there is no room for {what} (it needs {gib(short.needs_bytes)}, {gib(free)} is free)"
    return f"there is no room for {what}"


def kept(nowhere: Nowhere, name: str) -> str:
    """What a client is told where only an operator can make room."""
    return f"{lack(nowhere, name)}. What holds the rest gives way for no request: an operator has to make room"


def nameless(reason: str) -> str:
    """What lacks, without the machine's name and without who else is there: a key may be for one model alone."""
    for rule, instead in _OTHERS:
        reason = rule.sub(instead, reason)
    return reason


# --- operators ----------------------------------------------------------------------------------------


def chosen(book: Book, plans: Sequence[victims.Eviction]) -> str:
    """What helps a start that evicts nobody, where others may give way: these."""
    gone = [victim for plan in plans for victim in plan.victims]
    if not gone:
        return ""
    ways = {"park" if victim.way is victims.Way.PARK else "stop" for victim in gone}
    names = _listed([_name(book, lane_of_owner(victim.owner)) for victim in gone])
    how = " or ".join(sorted(ways, reverse=True))
    return f" Use --evict to let it {how} {names}, or send it a request: that makes room by itself."


def stay(book: Book, lane: Lane, nowhere: Nowhere) -> str:
    """What helps where nobody may give way: those whom policy keeps, and what makes them leave."""
    kept = _kept(book, lane, nowhere)
    stop = f"`capyctl stop deployment {next(iter(kept)) if len(kept) == 1 else '<name>'}`"
    without = f"deploy {'it' if len(kept) == 1 else 'one'} without {' and '.join(sorted(set(kept.values())))}"
    return f" {NOBODY}: stop {_listed(list(kept))} ({stop}), {without}, or lower what this one needs."


def _kept(book: Book, lane: Lane, nowhere: Nowhere) -> dict[str, str]:
    """Who holds what is lacking and is kept by policy, by name and why."""
    domains = {short.domain for short in nowhere.shortfalls if short.domain is not None}
    kept: dict[str, str] = {}
    for host in nowhere.hosts:
        for other, row in book.on(host):
            held, reason = book.ledger.holding(other.owner), spared(book.deployments[other.deployment])
            if (
                held is None
                or not reason
                or other.deployment == lane.deployment
                or not (row.gate_open or row.is_parked)
            ):
                continue
            if not domains or any(held.on(domain) for domain in domains):
                kept[_name(book, other)] = reason
    return kept


def spared(row: DeploymentRow) -> str:
    """Why policy keeps it whoever waits; empty where it may give way."""
    if row.spec.warm:
        return "lifecycle.warm"
    return "activation: explicit" if row.spec.activation is Activation.EXPLICIT else ""


def never(book: Book, lane: Lane, nowhere: Nowhere) -> bool:
    """Whether nobody gives way for it whatever time passes: only an operator, or an engine's end, makes that room.

    Not while another of its own instances comes of which that is not known.
    """
    mine = book.of(lane.deployment)
    coming = any(one.in_progress and other not in book.asked_around for other, one in mine if other != lane)
    return not coming and is_kept_out(book, lane, nowhere)


def is_kept_out(book: Book, lane: Lane, nowhere: Nowhere) -> bool:
    """Whether what keeps it out is there to stay, by policy.

    Not while something moves on one of the hosts or an allowed host is away, nor where a sample is in the way, or
    somebody who is kept only for now.
    """
    owner, tried = book.deployments[lane.deployment], set(nowhere.hosts)
    if any(host not in tried for host in owner.spec.hosts if host in owner.plans):
        return False
    if any(moves(book, lane, host) or _leaves_later(book, lane, host) for host in tried):
        return False
    if not all(short.check in victims.LIFTED and not short.evicted for short in nowhere.shortfalls):
        return False
    return bool(_kept(book, lane, nowhere))


def moves(book: Book, lane: Lane, host: HostId) -> bool:
    """Something of another deployment is on its way on this host, and may be able to give way at its end."""
    if host in book.active_switches:
        return True
    return any(
        other.deployment != lane.deployment and (row.in_progress or _unproven(row)) for other, row in book.on(host)
    )


def _unproven(row: InstanceRow) -> bool:
    return row.is_ready and not row.gate_open


def _leaves_later(book: Book, lane: Lane, host: HostId) -> bool:
    """Somebody who holds of the host may be asked later: who is waited for now, or is left alone; or is nobody's."""
    for owner, _ in book.ledger.on(host):
        other = lane_of_owner(owner) if owner.startswith("deployment:") else None
        row = None if other is None else book.deployments.get(other.deployment)
        if other is None or row is None:
            return True
        if other.deployment == lane.deployment or spared(row):
            continue
        if other in book.refused or book.traffic.queue(other.deployment).waiting:
            return True
    return False


def _name(book: Book, lane: Lane) -> str:
    return book.deployments[lane.deployment].spec.name


def _listed(names: Sequence[str]) -> str:
    told = list(dict.fromkeys(names))
    more = f" and {len(told) - NAMED_MAX} more" if len(told) > NAMED_MAX else ""
    return f"{', '.join(told[:NAMED_MAX])}{more}"
