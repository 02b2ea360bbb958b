"""The ledger: which owner holds how many bytes of which domain, and why it may.

A ledger is a value. Rows are the truth in it; what they sum up to on a host is kept beside them, and checked.
Each write gives a new ledger with the next epoch. A charge rises in `admission.arm` alone, which needs
observations, and falls in `settlement` alone, which needs a proof. Source: memory 4, 16, 17.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import attrs

from capyctl.errors import InvariantBroken, check
from capyctl.fsm.types import Bytes, Device, Domain, Generation, HostId, Phase
from capyctl.ledger.types import Allocation, Claim, DomainKind, HostPolicy

LOADING = frozenset({Phase.COLD, Phase.WAKE})
"""Phases that end in READY, at a charge that is known now."""

PARKED_SET = frozenset({Phase.PARKING, Phase.PARKED, Phase.WAKE})
"""Phases that count toward the parked limits: on its way there, there, or back there if the wake is never sent."""

BYTES_MAX = 2**63 - 1  # what the store and the wire carry


@attrs.frozen(kw_only=True)
class Holding:
    """What one owner holds: its one row per domain, its claims, and what each phase of this run is charged.

    `allocation` is the present charge. `phases` was frozen when the run was armed, so that settling needs no
    figures from outside; only what was measured replaces one of them (a parked residue, more than it was planned
    to hold). `kept` names the phases around a step whose outcome nobody knows; it is empty while the outcome is
    known. `lowered_by` is the proof under which the charge fell last.
    """

    host: HostId
    phase: Phase
    generation: Generation
    allocation: Allocation
    phases: Mapping[Phase, Allocation]
    whole_host: bool = False  # charged the whole managed limit until READY (memory 14)
    kept: tuple[Phase, ...] = ()
    lowered_by: str | None = None
    overrun: Mapping[Domain, Bytes] = attrs.field(factory=dict)  # planned charge, where more was found resident

    @property
    def uncertain(self) -> bool:
        """Whether nobody knows which phase holds: the charge is the largest of `kept`."""
        return bool(self.kept)

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Device claims that are active now."""
        return self.allocation.claims

    @property
    def parks(self) -> bool:
        """Whether it counts toward the parked limits, now or once its step is over."""
        return self.phase in PARKED_SET or not PARKED_SET.isdisjoint(self.kept)

    @property
    def loading(self) -> bool:
        """Whether it is on its way to READY."""
        return self.phase in LOADING and not self.uncertain

    def at(self, phase: Phase) -> Allocation:
        """What this run is charged in `phase`; one that the plan does not have needs nothing."""
        return self.phases.get(phase, Allocation())

    def on(self, domain: Domain) -> Bytes:
        """Bytes charged on `domain` now."""
        return self.allocation.on(domain)

    def planned(self, domain: Domain) -> Bytes | None:
        """What it would be charged on `domain`, while it is charged more because it was seen to hold more."""
        planned = self.overrun.get(domain)
        return planned if planned is not None and self.on(domain) > planned else None


@attrs.frozen(kw_only=True)
class Shelf:
    """The rows of one host, and their sums: of every host that a start may go to, planning asks for both.

    `charged` is what all rows together hold of each domain (M3); a domain that is not in it holds nothing.
    `parked`: how many of the rows are parked. `card_room` is what may still be charged on the card with most room; None
    on a host without cards. `card_held` is the most that one row holds of a card. `given_back` is what all that are on
    their way to READY will give back of any one domain at most, once they are.
    """

    rows: Mapping[str, Holding] = attrs.field(factory=dict)
    charged: Mapping[Domain, Bytes] = attrs.field(factory=dict)
    parked: int = 0
    card_room: int | None = None
    card_held: int = 0
    given_back: int = 0

    @classmethod
    def of(cls, policy: HostPolicy | None, rows: Mapping[str, Holding]) -> Shelf:
        """The shelf that these rows make on a host with these limits."""
        sums: dict[Domain, Bytes] = {}
        for held in rows.values():
            for domain, amount in held.allocation.bytes.items():
                sums[domain] = Bytes(sums.get(domain, 0) + amount)
        return cls._with(policy, rows, sums)

    def put(self, policy: HostPolicy | None, owner: str, holding: Holding | None) -> Shelf:
        """The shelf with this row instead of the owner's present one; None takes it away."""
        before = self.rows.get(owner)
        rows = {other: held for other, held in self.rows.items() if other != owner}
        if holding is not None:
            rows[owner] = holding
        charged = dict(self.charged)
        for held, sign in ((before, -1), (holding, 1)):
            for domain, amount in held.allocation.bytes.items() if held is not None else ():
                charged[domain] = Bytes(charged.get(domain, 0) + sign * amount)
        return self._with(policy, rows, charged)

    @classmethod
    def _with(cls, policy: HostPolicy | None, rows: Mapping[str, Holding], sums: Mapping[Domain, Bytes]) -> Shelf:
        cards = policy.cards if policy is not None else frozenset()
        room = (policy.domains[card].most_bytes - sums.get(card, 0) for card in cards) if policy is not None else ()
        return cls(
            rows=rows,
            charged={domain: amount for domain, amount in sums.items() if amount},
            parked=sum(held.phase is Phase.PARKED for held in rows.values()),
            card_room=max(room, default=None),
            card_held=max((held.on(card) for held in rows.values() for card in cards), default=0),
            given_back=max(_given_back([held for held in rows.values() if held.loading]).values(), default=0),
        )


def _given_back(loading: Sequence[Holding]) -> Mapping[Domain, int]:
    given: dict[Domain, int] = {}
    for held in loading:
        ready = held.at(Phase.READY)
        for domain, amount in held.allocation.bytes.items():
            given[domain] = given.get(domain, 0) + max(amount - ready.on(domain), 0)
    return given


UNKNOWN = Shelf()


@attrs.frozen(kw_only=True)
class Ledger:
    """Hosts' limits and owners' holdings at one epoch. Change it with the functions of this room, never in place.

    Rows stand by host, so that a write and a plan look at the hosts that they concern and at no other. `homes`
    says on which host to look for an owner; it may name more than those that hold something.
    """

    epoch: int = 0
    hosts: Mapping[HostId, HostPolicy] = attrs.field(factory=dict)
    shelves: Mapping[HostId, Shelf] = attrs.field(factory=dict)
    homes: Mapping[str, HostId] = attrs.field(factory=dict, eq=False, repr=False)

    @classmethod
    def empty(cls) -> Ledger:
        """No host, no owner, epoch 0."""
        return cls()

    @classmethod
    def load(cls, *, epoch: int, hosts: Iterable[HostPolicy], holdings: Mapping[str, Holding]) -> Ledger:
        """The ledger as it was stored. Raises: InvariantBroken when the rows cannot be of one ledger."""
        by_host: dict[HostId, dict[str, Holding]] = {}
        for owner, held in holdings.items():
            by_host.setdefault(held.host, {})[owner] = held
        policies = {policy.host: policy for policy in hosts}
        ledger = cls(
            epoch=epoch,
            hosts=policies,
            shelves={
                host: Shelf.of(policies.get(host), by_host.get(host, {}))
                for host in dict.fromkeys((*policies, *by_host))
            },
            homes={owner: held.host for owner, held in holdings.items()},
        )
        return checked(ledger, *ledger.shelves)

    # --- reading ----------------------------------------------------------------------------------

    def rows(self) -> Iterator[tuple[str, Holding]]:
        """Every owner and what it holds."""
        for shelf in self.shelves.values():
            yield from shelf.rows.items()

    def shelf(self, host: HostId) -> Shelf:
        """The rows of a host. While nothing is written there, it is the very same object."""
        return self.shelves.get(host, UNKNOWN)

    def holding(self, owner: str) -> Holding | None:
        """What `owner` holds, None for nothing."""
        host = self.homes.get(owner)
        return None if host is None else self.shelf(host).rows.get(owner)

    def held_by(self, owner: str) -> Holding:
        """What `owner` holds. Raises: InvariantBroken when it holds nothing."""
        holding = self.holding(owner)
        if holding is None:
            raise InvariantBroken(f"not so: {owner} holds something")
        return holding

    def policy(self, host: HostId) -> HostPolicy | None:
        """The limits of `host`, None for a host that never published any."""
        return self.hosts.get(host)

    def on(self, host: HostId, *, but: str | None = None) -> Iterator[tuple[str, Holding]]:
        """Owners on `host` and what they hold, without `but`."""
        return ((owner, held) for owner, held in self.shelf(host).rows.items() if owner != but)

    def charged(self, host: HostId, domain: Domain, *, but: str | None = None) -> Bytes:
        """The sum of the charges on a domain, without those of `but`."""
        shelf = self.shelf(host)
        total = shelf.charged.get(domain, 0)
        mine = shelf.rows.get(but) if but is not None else None
        return Bytes(total if mine is None else total - mine.on(domain))

    def copies(self, host: HostId, *, but: Collection[str] = ()) -> Iterator[tuple[str, Holding]]:
        """Owners that are parked on `host`, or will be once their step is over, without these."""
        return ((owner, held) for owner, held in self.on(host) if held.parks and owner not in but)

    def parked(self, host: HostId, domain: Domain, *, but: Collection[str] = ()) -> Bytes:
        """The sum of what the copies on a host hold of a domain, or will."""
        return Bytes(sum(held.at(Phase.PARKED).on(domain) for _, held in self.copies(host, but=but)))

    def parked_count(self, host: HostId, *, but: Collection[str] = ()) -> int:
        """How many copies there are on `host`, or will be."""
        return sum(1 for _ in self.copies(host, but=but))

    def host_kv(self, host: HostId, domain: Domain, *, but: str | None = None) -> Bytes:
        """The sum of the host-side KV caches on a domain."""
        return Bytes(sum(held.allocation.host_kv.get(domain, 0) for _, held in self.on(host, but=but)))

    def room(self, host: HostId, domain: Domain, *, but: str | None = None) -> int:
        """Bytes that may still be charged on a domain; negative while it is charged past its limits."""
        return self.hosts[host].domains[domain].most_bytes - self.charged(host, domain, but=but)

    # --- writing: for this room's modules only ------------------------------------------------------

    def assuming(self, owner: str, holding: Holding | None) -> Ledger:
        """This ledger as if `owner` held that instead. Nobody checks it, and its epoch is this one's."""
        before = self.holding(owner)
        shelves, homes = dict(self.shelves), self.homes
        if before is not None and (holding is None or holding.host != before.host):
            shelves[before.host] = self.shelf(before.host).put(self.hosts.get(before.host), owner, None)
        if holding is not None:
            shelves[holding.host] = self.shelf(holding.host).put(self.hosts.get(holding.host), owner, holding)
            if homes.get(owner) != holding.host:
                homes = {**homes, owner: holding.host}
        return Ledger(epoch=self.epoch, hosts=self.hosts, shelves=shelves, homes=homes)

    def replaced(self, owner: str, holding: Holding | None) -> Ledger:
        """The next epoch's ledger, with `owner` holding this instead of what it held."""
        return self.rewritten({owner: holding})

    def rewritten(self, holdings: Mapping[str, Holding | None]) -> Ledger:
        """The next epoch's ledger, with these owners holding this instead of what they held."""
        after, hosts = self, set[HostId]()
        for owner, holding in holdings.items():
            hosts |= {held.host for held in (self.holding(owner), holding) if held is not None}
            after = after.assuming(owner, holding)
        homes = after.homes
        if gone := [owner for owner, holding in holdings.items() if holding is None]:
            homes = dict(homes)
            for owner in gone:
                homes.pop(owner, None)
        return checked(attrs.evolve(after, epoch=self.epoch + 1, homes=homes), *sorted(hosts))

    def limited(self, policy: HostPolicy) -> Ledger:
        """The next epoch's ledger, with these limits of a host in force."""
        shelf = Shelf.of(policy, self.shelf(policy.host).rows)
        after = Ledger(
            epoch=self.epoch + 1,
            hosts={**self.hosts, policy.host: policy},
            shelves={**self.shelves, policy.host: shelf},
            homes=self.homes,
        )
        return checked(after, policy.host)


# --- claims about every ledger, host by host --------------------------------------------------------------


def every_holding_is_on_a_known_host(ledger: Ledger, host: HostId) -> bool:
    """Every charge is on a domain of a host that published its limits."""
    policy = ledger.hosts.get(host)
    return all(policy is not None and set(held.allocation.bytes) <= set(policy.domains) for _, held in ledger.on(host))


def rows_stand_where_they_are_looked_for(ledger: Ledger, host: HostId) -> bool:
    """Every row stands on its own host, and is found by its owner (M4)."""
    return all(held.host == host and ledger.homes.get(owner) == host for owner, held in ledger.on(host))


def sums_are_those_of_the_rows(ledger: Ledger, host: HostId) -> bool:
    """What is kept of a host beside its rows is what they sum up to (M3)."""
    shelf = ledger.shelf(host)
    return shelf == Shelf.of(ledger.hosts.get(host), shelf.rows)


def exclusive_devices_have_one_owner(ledger: Ledger, host: HostId) -> bool:
    """A device that is claimed exclusively is claimed by nobody else (M8)."""
    users: dict[Device, list[bool]] = {}
    for _, held in ledger.on(host):
        for claim in held.claims:
            users.setdefault(claim.device, []).append(claim.exclusive)
    return all(len(exclusive) == 1 or not any(exclusive) for exclusive in users.values())


def parked_owners_claim_no_device(ledger: Ledger, host: HostId) -> bool:
    """A parked owner holds bytes and no device (invariant 7)."""
    return all(not held.claims for _, held in ledger.on(host) if held.phase is Phase.PARKED and not held.uncertain)


def a_whole_host_start_is_alone(ledger: Ledger, host: HostId) -> bool:
    """An owner that is charged a whole host is the only owner on it (M12)."""
    rows = ledger.shelf(host).rows
    return len(rows) == 1 or not any(held.whole_host for held in rows.values())


def nobody_holds_a_phase_of_none(ledger: Ledger, host: HostId) -> bool:
    """An owner that holds something is in a phase that holds something."""
    return all(held.phase is not Phase.NONE for _, held in ledger.on(host))


INVARIANTS: tuple[Callable[[Ledger, HostId], bool], ...] = (
    every_holding_is_on_a_known_host,
    rows_stand_where_they_are_looked_for,
    sums_are_those_of_the_rows,
    exclusive_devices_have_one_owner,
    parked_owners_claim_no_device,
    a_whole_host_start_is_alone,
    nobody_holds_a_phase_of_none,
)
"""Checked of the hosts that a write touched, in production too. Limits are not among them: a measured residue and a
kept uncertain charge may exceed them (M1), and admission is what refuses then."""


def checked(ledger: Ledger, *hosts: HostId) -> Ledger:
    """`ledger`, if these hosts of it can be. Raises: InvariantBroken naming the claim that does not hold."""
    for invariant in INVARIANTS:
        for host in hosts:
            check(invariant(ledger, host), (invariant.__doc__ or invariant.__name__).splitlines()[0])
    return ledger


# --- limits -------------------------------------------------------------------------------------------


def sound(policy: HostPolicy) -> None:
    """Raise InvariantBroken unless the limits of a host can be limits (memory 1, 2)."""
    kinds = [limits.kind for limits in policy.domains.values()]
    check(bool(kinds), "a host has at least one memory domain")
    pools = sum(kind is not DomainKind.DEVICE for kind in kinds)
    check(pools == 1, "a host has exactly one pool of RAM")
    check(DomainKind.UNIFIED not in kinds or len(kinds) == 1, "a unified pool has no card beside it")
    for limits in policy.domains.values():
        figures = (limits.capacity_bytes, limits.managed_bytes, limits.reserve_bytes, limits.parked_bytes)
        check(all(0 <= figure <= BYTES_MAX for figure in (*figures, limits.host_kv_bytes)), "limits are 64-bit sizes")
        check(limits.parked_bytes <= limits.managed_bytes, "the parked limit is a part of the managed limit")
        check(limits.host_kv_bytes <= limits.managed_bytes, "the host KV limit is a part of the managed limit")
        check(limits.kind is not DomainKind.DEVICE or limits.device is not None, "a card's domain names its device")
        check(limits.kind is not DomainKind.DISTINCT or limits.device is None, "host RAM beside cards is no device")
