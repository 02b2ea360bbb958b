"""What an owner asks of the ledger, and one ask looked at beside the ledger and what was seen.

An ask is one step of one owner: a cold start, a park, a wake. It is charged the peak of that step before
the order is given, in place of its owner's present charge and never added to it. Source: memory 4.1, 10.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from capyctl.errors import check
from capyctl.fsm.types import Bytes, Device, Domain, HostId, Millis, Phase
from capyctl.ledger.charges import Holding, Ledger
from capyctl.ledger.types import Allocation, DomainKind, DomainPolicy, HostPolicy, Observation, Plan, peak

Seen = Mapping[Domain, Observation]
"""The newest sample of each domain of one host; a domain that could not be read is left out."""

UNSEEN: Seen = {}

PEAKS: Mapping[Phase, tuple[Phase, ...]] = {
    Phase.COLD: (Phase.COLD, Phase.READY),
    Phase.PARKING: (Phase.READY, Phase.PARKING, Phase.PARKED),
    Phase.WAKE: (Phase.PARKED, Phase.WAKE, Phase.READY),
}
"""What a step may reach: it is charged, per domain, the largest of these before it is ordered (invariant 4)."""

RISES: Mapping[Phase, frozenset[Phase]] = {
    Phase.COLD: frozenset({Phase.NONE}),
    Phase.PARKING: frozenset({Phase.READY, Phase.PARKING}),  # a park refused without proof keeps its peak
    Phase.WAKE: frozenset({Phase.PARKED}),
}
"""From which present phase a step begins. Asking for another is a bug of the caller, not a refusal."""


@attrs.frozen(kw_only=True)
class Ask:
    """One owner's next step on one host. `phases` is what each phase of the run is charged.

    `whole_host`: a first start that nobody can size; it is charged the whole managed limit (memory 14).
    `leaving`: of a park, whose copies leave the parked set for what it makes room for: a switch's own target, which
    wakes once this one is parked. They are not counted beside it.
    """

    owner: str
    host: HostId
    phase: Phase
    phases: Mapping[Phase, Allocation]
    whole_host: bool = False
    leaving: frozenset[str] = frozenset()

    @property
    def uncounted(self) -> frozenset[str]:
        """Whose copies its own copy is not counted beside."""
        return self.leaving | {self.owner}


def ask_start(*, owner: str, host: HostId, plan: Plan) -> Ask:
    """A cold start of `plan` on `host`."""
    return Ask(
        owner=owner,
        host=host,
        phase=Phase.COLD,
        phases=dict(plan.phases),
        whole_host=plan.whole_host,
    )


def ask_step(ledger: Ledger, owner: str, phase: Phase, *, leaving: frozenset[str] = frozenset()) -> Ask:
    """A park or a wake of what `owner` holds, where it holds it. Raises: InvariantBroken when it holds nothing."""
    held = ledger.held_by(owner)
    return Ask(owner=owner, host=held.host, phase=phase, phases=held.phases, leaving=leaving)


@attrs.frozen(kw_only=True)
class Proposal:
    """It fits beside everything charged at `epoch`. This is no permission to launch: `arm` it first.

    `expires_at_ms`: when the oldest observation that it rests on is too old; None when it rests on none.
    """

    ask: Ask
    charge: Allocation
    epoch: int
    expires_at_ms: Millis | None


def charge_of(ledger: Ledger, ask: Ask) -> Allocation:
    """The peak that `ask` is charged: per domain the largest of what it holds and what its step may reach.

    Raises: InvariantBroken when the step does not begin from the owner's present phase.
    """
    held = ledger.holding(ask.owner)
    present = held.phase if held else Phase.NONE
    check(ask.phase in RISES, f"{ask.phase.value} is a step that raises a charge")
    if held is None or not held.uncertain:
        check(present in RISES[ask.phase], f"{ask.owner} may go from {present.value} to {ask.phase.value}")
    reached = [ask.phases.get(phase, Allocation()) for phase in PEAKS[ask.phase]]
    return peak(*reached, *((held.allocation,) if held else ()))


# --- one ask, looked at ---------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Case:
    """An ask beside the ledger and what was seen, looked at on one domain (None: on the host as a whole)."""

    ledger: Ledger
    ask: Ask
    charge: Allocation  # the peak that the step would be charged
    held: Holding | None
    seen: Seen
    now_ms: Millis
    domain: Domain | None = None

    def at(self, domain: Domain | None) -> Case:
        """The same case, looked at on another domain."""
        if domain == self.domain:
            return self
        return Case(
            ledger=self.ledger,
            ask=self.ask,
            charge=self.charge,
            held=self.held,
            seen=self.seen,
            now_ms=self.now_ms,
            domain=domain,
        )

    @property
    def policy(self) -> HostPolicy:
        return self.ledger.hosts[self.ask.host]

    @property
    def on(self) -> Domain:
        """The domain that is looked at. Raises: InvariantBroken in a check of the whole host."""
        check(self.domain is not None, "a check of a domain is asked about a domain")
        assert self.domain is not None  # for the type checker
        return self.domain

    @property
    def limits(self) -> DomainPolicy:
        return self.policy.domains[self.on]

    @property
    def sample(self) -> Observation:
        return self.seen[self.on]

    @property
    def needs(self) -> Bytes:
        """Bytes that the owner would be charged on the domain."""
        return self.charge.on(self.on)

    @property
    def others(self) -> tuple[tuple[str, Bytes], ...]:
        """The other owners on the domain, largest first."""
        rows = [(owner, held.on(self.on)) for owner, held in self.ledger.on(self.ask.host, but=self.ask.owner)]
        return tuple(sorted((row for row in rows if row[1]), key=lambda row: (-row[1], row[0])))

    @property
    def charged(self) -> int:
        """Bytes charged to the others on the domain."""
        return self.ledger.charged(self.ask.host, self.on, but=self.ask.owner)

    @property
    def after(self) -> int:
        """The domain's sum with the ask granted."""
        return self.charged + self.needs

    @property
    def most(self) -> int:
        """What may be charged on the domain at all, the reserve left alone."""
        return self.limits.capacity_bytes - self.limits.reserve_bytes

    def resident(self, owner: str) -> int:
        """What the recorded processes of `owner` were seen to hold on the domain; 0 without attribution."""
        return self.sample.residents.get(owner, 0)

    @property
    def needs_now(self) -> int:
        """What of the ask is not resident yet."""
        return max(self.needs - self.resident(self.ask.owner), 0)

    @property
    def unbacked(self) -> tuple[tuple[str, Bytes], ...]:
        """The other owners' charges that are not resident yet: free memory that is spoken for."""
        rows = [(owner, Bytes(max(charged - self.resident(owner), 0))) for owner, charged in self.others]
        return tuple(sorted((row for row in rows if row[1]), key=lambda row: (-row[1], row[0])))

    @property
    def unbacked_bytes(self) -> int:
        return sum(amount for _, amount in self.unbacked)

    @property
    def reserve(self) -> int:
        """What has to stay free. On a card, foreign memory comes out of the reserve first (memory 3.1)."""
        return max(0, self.limits.reserve_bytes - self.foreign)

    @property
    def foreign(self) -> int:
        """What is used on a card beyond what recorded owners hold; in RAM it only lowers what is available."""
        if self.limits.kind is not DomainKind.DEVICE:
            return 0
        owners = {owner for owner, _ in self.ledger.on(self.ask.host)} | {self.ask.owner}
        known = sum(held for owner, held in self.sample.residents.items() if owner in owners)
        return max(0, self.sample.capacity_bytes - self.sample.available_bytes - known)

    @property
    def conflicts(self) -> tuple[tuple[Device, str], ...]:
        """Devices that the ask would use and others use, where one side wants the device alone."""
        wanted = {claim.device: claim.exclusive for claim in self.charge.claims}
        return tuple(
            (claim.device, owner)
            for owner, held in self.ledger.on(self.ask.host, but=self.ask.owner)
            for claim in held.claims
            if claim.device in wanted and (claim.exclusive or wanted[claim.device])
        )
