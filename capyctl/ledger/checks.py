"""The conditions of admission, as rows: where each looks, what it requires, the code of its refusal, and why.

`CHECKS` is the whole of it, in the order in which an ask is judged; the first one that does not hold gives
the refusal. The spec page renders the same rows. Source: memory 10, 13-15; lifecycle 23, 1-16.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import attrs

from capyctl.fsm.types import Bytes, Domain, Phase
from capyctl.ledger.asks import Case
from capyctl.ledger.shortfall import Shortfall
from capyctl.ledger.types import Allocation, DomainKind

# --- where a check looks --------------------------------------------------------------------------


class Scope(enum.Enum):
    """On which domains a check is asked; the value is its cell in the page."""

    HOST = "the host"
    NAMED = "every domain that the ask names or its owner holds"
    RAISED = "every domain on which the charge rises"
    RAISED_POOLS = "RAM on which the charge rises"
    RAISED_CARDS = "every card on which the charge rises"
    COPY = "every domain of the parked copy"


def places(scope: Scope, case: Case) -> tuple[Domain | None, ...]:
    """The domains on which a check of this scope looks at the case."""
    if scope is Scope.HOST:
        return (None,)
    if scope is Scope.NAMED:
        return tuple(sorted(case.charge.bytes))
    if scope is Scope.COPY:
        return tuple(sorted(case.ask.phases.get(Phase.PARKED, Allocation()).bytes)) if parks(case) else ()
    raised = [domain for domain in sorted(case.charge.bytes) if rises(case, domain)]
    if scope is Scope.RAISED:
        return tuple(raised)
    card = scope is Scope.RAISED_CARDS
    return tuple(one for one in raised if (case.policy.domains[one].kind is DomainKind.DEVICE) == card)


def rises(case: Case, domain: Domain) -> bool:
    """Whether the ask adds to what its owner is charged on `domain`."""
    return case.charge.on(domain) > (case.held.on(domain) if case.held else 0)


def parks(case: Case) -> bool:
    """Whether the step leaves a parked copy."""
    return case.ask.phase is Phase.PARKING


# --- the checks -----------------------------------------------------------------------------------


def host_is_known(case: Case) -> bool:
    """the host published its limits"""
    return case.ask.host in case.ledger.hosts


def run_is_known(case: Case) -> bool:
    """the owner's present state is known, and it is on this host"""
    return case.held is None or (not case.held.uncertain and case.held.host == case.ask.host)


def domain_is_known(case: Case) -> bool:
    """the host has the domain"""
    return case.on in case.policy.domains


def devices_are_known(case: Case) -> bool:
    """the host has the devices"""
    known = {limits.device for limits in case.policy.domains.values()}
    return all(claim.device in known for claim in case.charge.claims)


def sample_names_this_host(case: Case) -> bool:
    """the observation names no domain that the limits do not"""
    return set(case.seen) <= set(case.policy.domains) or not any(rises(case, one) for one in case.charge.bytes)


def domain_was_seen(case: Case) -> bool:
    """the domain is in the newest observation"""
    return case.on in case.seen


def sample_is_fresh(case: Case) -> bool:
    """the observation is at most the host's TTL old, and not from the future"""
    return 0 <= case.now_ms - case.sample.seen_at_ms <= case.policy.observation_ttl_ms


def sample_adds_up(case: Case) -> bool:
    """the observation's figures can be true"""
    sample = case.sample
    return 0 <= sample.available_bytes <= sample.capacity_bytes and all(n >= 0 for n in sample.residents.values())


def stands_alone(case: Case) -> bool:
    """a first start that takes the whole host has no other owner beside it"""
    return not case.ask.whole_host or not any(case.ledger.on(case.ask.host, but=case.ask.owner))


def nobody_took_the_host(case: Case) -> bool:
    """no other owner is charged the whole host"""
    return not any(held.whole_host for _, held in case.ledger.on(case.ask.host, but=case.ask.owner))


def within_managed_limit(case: Case) -> bool:
    """all charges together stay within the managed limit"""
    return case.after <= case.limits.managed_bytes


def within_capacity(case: Case) -> bool:
    """all charges together leave the free reserve"""
    return case.after <= case.most


def memory_is_free(case: Case) -> bool:
    """what is free now, less what others were promised, covers the ask and the reserve"""
    return case.sample.available_bytes - case.unbacked_bytes - case.needs_now >= case.reserve


def parked_copies_fit(case: Case) -> bool:
    """all parked copies together stay within the parked limit, without that of a switch's target, which is to wake"""
    copy = case.ask.phases[Phase.PARKED].on(case.on)
    return case.ledger.parked(case.ask.host, case.on, but=case.ask.uncounted) + copy <= case.limits.parked_bytes


def parked_set_has_a_place(case: Case) -> bool:
    """fewer instances are parked than the host may keep, without a switch's target, which is to wake"""
    return not parks(case) or case.ledger.parked_count(case.ask.host, but=case.ask.uncounted) < case.policy.max_parked


def host_kv_fits(case: Case) -> bool:
    """all KV caches in host memory stay within their limit"""
    mine = case.charge.host_kv.get(case.on, 0)
    theirs = case.ledger.host_kv(case.ask.host, case.on, but=case.ask.owner)
    return mine == 0 or theirs + mine <= case.limits.host_kv_bytes


def devices_are_free(case: Case) -> bool:
    """no device is used by two owners of which one wants it alone"""
    return not case.conflicts


# --- what a refusal says ----------------------------------------------------------------------------


def _short(case: Case, row: Check, **figures: object) -> Shortfall:
    known = host_is_known(case)
    return Shortfall(
        code=row.code,
        check=row.name,
        host=case.ask.host,
        host_name=case.policy.name if known else case.ask.host,
        owner=case.ask.owner,
        domain=case.domain,
        **figures,  # type: ignore[arg-type] # the figures are named in the lines that call this
    )


def _says(row: Check, case: Case) -> Shortfall:
    return _short(case, row, reason=_SENTENCES[row.name].format(case=case, domain=case.domain))


def _managed(row: Check, case: Case) -> Shortfall:
    limit = case.limits.managed_bytes
    return _short(
        case,
        row,
        needs_bytes=case.needs,
        free_bytes=limit - case.charged,
        limit_bytes=limit,
        others=case.others,
        never=case.needs > limit,
    )


def _capacity(row: Check, case: Case) -> Shortfall:
    return _short(
        case,
        row,
        needs_bytes=case.needs,
        free_bytes=case.limits.capacity_bytes - case.charged,
        limit_bytes=case.limits.capacity_bytes,
        reserve_bytes=case.limits.reserve_bytes,
        others=case.others,
        never=case.needs > case.most,
    )


def _free(row: Check, case: Case) -> Shortfall:
    return _short(
        case,
        row,
        needs_bytes=Bytes(case.needs_now),
        free_bytes=case.sample.available_bytes,
        reserve_bytes=Bytes(case.reserve),
        unbacked_bytes=Bytes(case.unbacked_bytes),
        others=case.unbacked,
    )


def _parked(row: Check, case: Case) -> Shortfall:
    copy, limit = case.ask.phases[Phase.PARKED].on(case.on), case.limits.parked_bytes
    rows = [
        (owner, held.at(Phase.PARKED).on(case.on))
        for owner, held in case.ledger.copies(case.ask.host, but=case.ask.uncounted)
    ]
    return _short(
        case,
        row,
        needs_bytes=copy,
        free_bytes=limit - sum(amount for _, amount in rows),
        limit_bytes=limit,
        others=tuple(sorted((one for one in rows if one[1]), key=lambda one: (-one[1], one[0]))),
        never=copy > limit,
    )


def _parked_count(row: Check, case: Case) -> Shortfall:
    count = case.ledger.parked_count(case.ask.host, but=case.ask.uncounted)
    return _short(case, row, count=count, count_max=case.policy.max_parked, never=case.policy.max_parked == 0)


def _host_kv(row: Check, case: Case) -> Shortfall:
    mine, limit = case.charge.host_kv[case.on], case.limits.host_kv_bytes
    theirs = case.ledger.host_kv(case.ask.host, case.on, but=case.ask.owner)
    return _short(case, row, needs_bytes=mine, free_bytes=limit - theirs, limit_bytes=limit, never=mine > limit)


def _everyone(row: Check, case: Case) -> Shortfall:
    rows = [
        (owner, Bytes(sum(held.allocation.bytes.values())))
        for owner, held in case.ledger.on(case.ask.host, but=case.ask.owner)
    ]
    return _short(case, row, others=tuple(sorted(rows, key=lambda one: (-one[1], one[0]))))


def _devices(row: Check, case: Case) -> Shortfall:
    device = case.conflicts[0][0]
    owners = tuple((owner, Bytes(0)) for other, owner in case.conflicts if other == device)
    return _short(case, row, device=device, others=owners)


_SENTENCES = {
    "host": "the host {case.ask.host} has not published what it may hold",
    "run": "what this instance holds now is not known; it is being looked at",
    "domains": "{case.policy.name} has no memory domain {domain}",
    "device_names": "{case.policy.name} lacks a device that is asked for",
    "sample_names": "the last observation of {case.policy.name} names other domains than its limits",
    "card_seen": "{domain} of {case.policy.name} could not be read, and nothing starts or wakes there until it is; "
    "`nvidia-smi` may say more",
    "pool_seen": "{domain} of {case.policy.name} was not observed",
    "sample_age": "the last observation of {domain} of {case.policy.name} is not of the last "
    "{case.policy.observation_ttl_ms} ms",
    "sample_sums": "the last observation of {domain} of {case.policy.name} cannot be true",
}


@attrs.frozen(kw_only=True)
class Check:
    """One condition of admission. `requires` is a predicate whose docstring is its cell in the page.

    `observed`: it judges what was seen, not the ledger; planning asks it apart.
    """

    name: str
    scope: Scope
    requires: Callable[[Case], bool]
    code: str
    why: str
    observed: bool = False
    figures: Callable[[Check, Case], Shortfall] = _says


CHECKS: tuple[Check, ...] = (
    Check(
        name="host",
        scope=Scope.HOST,
        requires=host_is_known,
        code="topology_unknown",
        why="Without limits there is nothing to judge by.",
    ),
    Check(
        name="run",
        scope=Scope.HOST,
        requires=run_is_known,
        code="unreconciled",
        why="An owner whose state nobody knows keeps its charge; it begins nothing new, here or elsewhere.",
    ),
    Check(
        name="domains",
        scope=Scope.NAMED,
        requires=domain_is_known,
        code="topology_unknown",
        why="Topology is declared or observed, never guessed.",
    ),
    Check(
        name="device_names",
        scope=Scope.HOST,
        requires=devices_are_known,
        code="topology_unknown",
        why="A claim on a device that is not there would conflict with nobody.",
    ),
    Check(
        name="sample_names",
        scope=Scope.HOST,
        requires=sample_names_this_host,
        code="stale_observation",
        observed=True,
        why="A sample of other domains is of another machine, or of this one before it changed.",
    ),
    Check(
        name="card_seen",
        scope=Scope.RAISED_CARDS,
        requires=domain_was_seen,
        code="device_unobserved",
        observed=True,
        why="A card that cannot be read is unknown, not empty.",
    ),
    Check(
        name="pool_seen",
        scope=Scope.RAISED_POOLS,
        requires=domain_was_seen,
        code="stale_observation",
        observed=True,
        why="Nothing rises on memory that nobody looked at.",
    ),
    Check(
        name="sample_age",
        scope=Scope.RAISED,
        requires=sample_is_fresh,
        code="stale_observation",
        observed=True,
        why="Memory that was free a while ago may be used now, and a clock that runs ahead proves nothing.",
    ),
    Check(
        name="sample_sums",
        scope=Scope.RAISED,
        requires=sample_adds_up,
        code="stale_observation",
        observed=True,
        why="Arithmetic on impossible figures admits anything.",
    ),
    Check(
        name="stands_alone",
        scope=Scope.HOST,
        requires=stands_alone,
        code="startup_requires_empty_host",
        figures=_everyone,
        why="A peak that nobody can size is measured on an empty host.",
    ),
    Check(
        name="whole_host_taken",
        scope=Scope.HOST,
        requires=nobody_took_the_host,
        code="insufficient_resources",
        figures=_everyone,
        why="While a whole-host start loads, its peak may be anything up to the limit.",
    ),
    Check(
        name="managed_limit",
        scope=Scope.NAMED,
        requires=within_managed_limit,
        code="insufficient_resources",
        figures=_managed,
        why="The managed limit is a promise to whatever else runs on the machine.",
    ),
    Check(
        name="capacity",
        scope=Scope.NAMED,
        requires=within_capacity,
        code="insufficient_resources",
        figures=_capacity,
        why="The reserve is a second constraint, not a deduction from the managed limit.",
    ),
    Check(
        name="free_memory",
        scope=Scope.RAISED_POOLS,
        requires=memory_is_free,
        code="insufficient_memory",
        observed=True,
        figures=_free,
        why="Charges say what was promised; only an observation says what is there.",
    ),
    Check(
        name="free_card_memory",
        scope=Scope.RAISED_CARDS,
        requires=memory_is_free,
        code="insufficient_device_memory",
        observed=True,
        figures=_free,
        why="As for RAM; what foreign processes use comes out of the card's reserve first.",
    ),
    Check(
        name="parked_copies",
        scope=Scope.COPY,
        requires=parked_copies_fit,
        code="parked_capacity",
        figures=_parked,
        why="Parked models are worth less than running ones, so they get a part of the memory.",
    ),
    Check(
        name="parked_count",
        scope=Scope.HOST,
        requires=parked_set_has_a_place,
        code="parked_capacity",
        figures=_parked_count,
        why="Every parked engine is processes and a context, however small its residue.",
    ),
    Check(
        name="host_kv",
        scope=Scope.NAMED,
        requires=host_kv_fits,
        code="category_limit",
        figures=_host_kv,
        why="Caches in host memory are a part of the managed total and have a limit of their own.",
    ),
    Check(
        name="devices",
        scope=Scope.HOST,
        requires=devices_are_free,
        code="device_conflict",
        figures=_devices,
        why="An exclusive claim conflicts with every other active claim; shared ones live beside each other.",
    ),
)
