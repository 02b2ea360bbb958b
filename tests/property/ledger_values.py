"""Hosts, plans, samples and proofs for the ledger's tests. Figures are small integers: every one of them is bytes."""

from __future__ import annotations

from collections.abc import Mapping

from capyctl.fsm.proofs import Canary, Gone, NeverLaunched, Rebooted, Resident, Unsent, Usable
from capyctl.fsm.types import (
    Bytes,
    DeploymentId,
    Device,
    Domain,
    Generation,
    HostId,
    Incarnation,
    Lane,
    Millis,
    Phase,
    ProcessIdentity,
)
from capyctl.ledger import (
    Allocation,
    Claim,
    DomainKind,
    DomainPolicy,
    HostPolicy,
    Ledger,
    Observation,
    Outdated,
    Plan,
    Proposal,
    Seen,
    Shortfall,
    arm,
    ask_start,
    ask_step,
    propose,
    set_policy,
    settle_down,
)

GIB = 1 << 30
HOST = HostId("host-a")
OTHER_HOST = HostId("host-b")
POOL, SYSTEM, GPU0, GPU1 = Domain("unified"), Domain("system"), Domain("gpu0"), Domain("gpu1")
NOW = Millis(1_000_000)
G1, G2 = Generation(1), Generation(2)


def lane(name: str, index: int = 0) -> Lane:
    return Lane(DeploymentId(name), index)


def owner(name: str) -> str:
    return lane(name).owner


def run(name: str, generation: int = 1) -> Incarnation:
    return Incarnation(lane(name), Generation(generation))


def limits(
    managed: int,
    *,
    kind: DomainKind = DomainKind.UNIFIED,
    capacity: int | None = None,
    reserve: int = 0,
    parked: int | None = None,
    host_kv: int = 0,
    device: str | None = None,
) -> DomainPolicy:
    return DomainPolicy(
        kind=kind,
        capacity_bytes=Bytes(capacity if capacity is not None else managed + reserve),
        managed_bytes=Bytes(managed),
        reserve_bytes=Bytes(reserve),
        parked_bytes=Bytes(parked if parked is not None else managed),
        host_kv_bytes=Bytes(host_kv),
        device=Device(device) if device else None,
    )


def pool_host(managed: int = 100, *, host: HostId = HOST, max_parked: int = 4, **figures: int) -> HostPolicy:
    """A machine without cards of their own memory: one pool."""
    return HostPolicy(host=host, name=f"{host}-name", domains={POOL: limits(managed, **figures)}, max_parked=max_parked)


def card_host(*cards: int, system: int = 100, host: HostId = HOST, reserve: int = 0, max_parked: int = 4) -> HostPolicy:
    """A machine with one card for each of these managed limits."""
    domains = {SYSTEM: limits(system, kind=DomainKind.DISTINCT)} | {
        Domain(f"gpu{i}"): limits(managed, kind=DomainKind.DEVICE, device=f"gpu{i}", reserve=reserve)
        for i, managed in enumerate(cards)
    }
    return HostPolicy(host=host, name=f"{host}-name", domains=domains, max_parked=max_parked)


def plan(
    cold: int,
    ready: int,
    parked: int | None = None,
    *,
    domain: Domain = POOL,
    ram: int = 0,
    device: str | None = None,
    exclusive: bool = False,
    parking: int | None = None,
    wake: int | None = None,
    host_kv: int = 0,
    whole_host: bool = False,
) -> Plan:
    """A plan on one domain, with `ram` more on the system domain in every phase. With `parked` it can park."""
    claims = (Claim(device=Device(device), exclusive=exclusive),) if device else ()

    def at(amount: int, claims: tuple[Claim, ...] = claims) -> Allocation:
        beside = {SYSTEM: Bytes(ram)} if ram else {}
        kv = {domain: Bytes(min(host_kv, amount))} if host_kv else {}
        return Allocation(bytes={domain: Bytes(amount), **beside}, claims=claims, host_kv=kv)

    phases = {Phase.COLD: at(cold), Phase.READY: at(ready)}
    if parked is not None:
        phases |= {
            Phase.PARKING: at(ready if parking is None else parking),
            Phase.PARKED: at(parked, ()),
            Phase.WAKE: at(ready if wake is None else wake),
        }
    return Plan(
        phases=phases,
        provenance={Phase.COLD: "whole_host" if whole_host else "derived"},
        initialize_ms=Millis(1),
        wake_ms=Millis(1),
        context_tokens=1,
    )


def seen(
    free: Mapping[Domain, int] | int,
    *,
    capacity: Mapping[Domain, int] | int = 2**50,
    at: int = NOW,
    residents: Mapping[str, int] | None = None,
    domain: Domain = POOL,
) -> Seen:
    """A sample: `free` on each domain, or on one."""
    free = {domain: free} if isinstance(free, int) else free
    return {
        one: Observation(
            capacity_bytes=Bytes(capacity if isinstance(capacity, int) else capacity[one]),
            available_bytes=Bytes(amount),
            seen_at_ms=Millis(at),
            residents={name: Bytes(held) for name, held in (residents or {}).items()},
        )
        for one, amount in free.items()
    }


PLENTY = seen(dict.fromkeys((POOL, SYSTEM, GPU0, GPU1), 2**50))


def plenty(policy: HostPolicy, at: int = NOW) -> Seen:
    """Everything of this host is free."""
    return seen(dict.fromkeys(policy.domains, 2**50), at=at)


def process(number: int = 1) -> ProcessIdentity:
    return ProcessIdentity(pid=1000 + number, boot_id="boot-1", start_ticks=7)


def usable(name: str, generation: int = 1) -> Usable:
    return Usable(incarnation=run(name, generation), answer_chars=3, probed_at_ms=NOW)


def gone(name: str, generation: int = 1) -> Gone:
    one = process()
    return Gone(
        incarnation=run(name, generation),
        processes=(one,),
        absent=frozenset({one}),
        group_empty=True,
        observed_at_ms=NOW,
    )


def never(name: str, generation: int = 1) -> NeverLaunched:
    return NeverLaunched(incarnation=run(name, generation), fenced=True, observed_at_ms=NOW)


def rebooted(name: str, generation: int = 1) -> Rebooted:
    return Rebooted(
        incarnation=run(name, generation), recorded_boot_id="boot-1", present_boot_id="boot-2", observed_at_ms=NOW
    )


def unsent(name: str, generation: int = 1) -> Unsent:
    return Unsent(incarnation=run(name, generation), refused_before_sending=True)


def canary(name: str, generation: int = 1) -> Canary:
    return Canary(incarnation=run(name, generation), expected="four", actual="four")


def resident(name: str, left: int, budget: int | None = None, generation: int = 1) -> Resident:
    return Resident(
        incarnation=run(name, generation),
        resident_bytes=Bytes(left),
        budget_bytes=Bytes(left if budget is None else budget),
        released_at_ms=NOW,
        sampled_at_ms=Millis(NOW + 1),
    )


# --- the way of one owner --------------------------------------------------------------------------------


def ledger_of(*policies: HostPolicy) -> Ledger:
    ledger = Ledger.empty()
    for policy in policies:
        ledger = put_policy(ledger, policy)
    return ledger


def put_policy(ledger: Ledger, policy: HostPolicy) -> Ledger:
    after = set_policy(ledger, policy)
    assert isinstance(after, Ledger), after.message()
    return after


def armed(ledger: Ledger, answer: Proposal | Shortfall, generation: int | None = None) -> Ledger:
    assert isinstance(answer, Proposal), answer.message()
    after = arm(ledger, answer, now_ms=NOW, generation=None if generation is None else Generation(generation))
    assert not isinstance(after, Outdated), after.reason
    return after


def start(ledger: Ledger, name: str, plan_: Plan, *, host: HostId = HOST, view: Seen | None = None) -> Ledger:
    """A start in flight: charged its peak."""
    view = view if view is not None else plenty(ledger.hosts[host])
    return armed(ledger, propose(ledger, ask_start(owner=owner(name), host=host, plan=plan_), view, NOW), 1)


def ready(ledger: Ledger, name: str, plan_: Plan, *, host: HostId = HOST) -> Ledger:
    """Started and proven ready."""
    return settle_down(start(ledger, name, plan_, host=host), owner(name), Phase.READY, usable(name))


def step(ledger: Ledger, name: str, phase: Phase) -> Ledger:
    """A park or wake in flight."""
    held = ledger.held_by(owner(name))
    view = plenty(ledger.hosts[held.host])
    return armed(ledger, propose(ledger, ask_step(ledger, owner(name), phase), view, NOW))


def parked(ledger: Ledger, name: str, plan_: Plan, *, host: HostId = HOST) -> Ledger:
    """Started, ready, and parked with a sample for every domain."""
    ledger = step(ready(ledger, name, plan_, host=host), name, Phase.PARKING)
    copy = ledger.held_by(owner(name)).at(Phase.PARKED)
    samples = {domain: resident(name, amount) for domain, amount in copy.bytes.items()}
    return settle_down(ledger, owner(name), Phase.PARKED, samples)
