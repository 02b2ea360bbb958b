"""A world whose host has cards: which card a start takes, and what a driver that is late does to a switch."""

from __future__ import annotations

import random

import attrs
from simulation import checked
from world import Faults, Shell
from world_values import RAM, Host, Model, gib

from capyctl.control import events as e
from capyctl.control.spec import Spec
from capyctl.fsm.switch import Phase as SwitchPhase
from capyctl.fsm.types import Bytes, DeploymentId, Device, Domain, HostId, Incarnation, Lane, Millis, Phase
from capyctl.ledger.charges import Ledger
from capyctl.ledger.limits import set_policy
from capyctl.ledger.shortfall import Shortfall
from capyctl.ledger.types import Allocation, Claim, DomainKind, DomainPolicy, HostPolicy, Observation, Plan

GPU0, GPU1 = Domain("gpu0"), Domain("gpu1")


def limits(kind: DomainKind, capacity: float, device: str | None = None) -> DomainPolicy:
    return DomainPolicy(
        kind=kind,
        capacity_bytes=gib(capacity),
        managed_bytes=gib(capacity - 1),
        reserve_bytes=gib(1),
        parked_bytes=gib(2),
        device=None if device is None else Device(device),
    )


def machine(*cards: float) -> HostPolicy:
    domains = {RAM: limits(DomainKind.DISTINCT, 32)}
    domains |= {Domain(f"gpu{i}"): limits(DomainKind.DEVICE, capacity, f"gpu{i}") for i, capacity in enumerate(cards)}
    return HostPolicy(host=HostId("h1"), name="h1", domains=domains)


@attrs.frozen(kw_only=True)
class OnCard(Model):
    """A model on a card. Its plan names gpu0, as one that was sized without a named device."""

    card_gib: float = 10
    device: str | None = None

    @property
    def plan(self) -> Plan:
        held = Allocation(
            bytes={Domain(self.device or "gpu0"): gib(self.card_gib), RAM: gib(1)},
            claims=(Claim(device=Device(self.device or "gpu0")),),
        )
        return attrs.evolve(super().plan, phases={Phase.COLD: held, Phase.READY: held})

    @property
    def spec(self) -> Spec:
        return attrs.evolve(super().spec, devices=() if self.device is None else (Device(self.device),))


@attrs.define(eq=False)
class CardShell(Shell):
    """Its samples have cards: an engine holds what it is charged there, and what ends gives it back `late_ms` later."""

    late_ms: int = 0
    unread: frozenset[Domain] = frozenset()
    used: dict[Incarnation, tuple[Domain, Bytes, int | None]] = attrs.field(factory=dict)

    def _observe(self, host: Host) -> None:
        policy = host.policy
        for incarnation, engine in host.engines.items():
            row = self.world.book.instances.get(incarnation.lane)
            if engine.alive and incarnation not in self.used and row is not None and row.plan is not None:
                card = next(name for name in row.plan.at(Phase.COLD).bytes if name != RAM)
                self.used[incarnation] = (card, row.plan.at(Phase.COLD).on(card), None)
        alive = {incarnation for incarnation, engine in host.engines.items() if engine.alive}
        for incarnation, (card, amount, since) in list(self.used.items()):
            if incarnation not in alive and since is None:
                self.used[incarnation] = (card, amount, self.now)
            elif since is not None and self.now - since >= self.late_ms:
                del self.used[incarnation]
        domains = {}
        for name, one in policy.domains.items():
            if name in self.unread:
                continue
            held = {i: amount for i, (card, amount, _) in self.used.items() if card == name}
            assert sum(held.values()) <= one.capacity_bytes, f"{name} is full"
            domains[name] = Observation(
                capacity_bytes=one.capacity_bytes,
                available_bytes=Bytes(one.capacity_bytes - sum(held.values())),
                seen_at_ms=Millis(self.now),
                residents={i.lane.owner: amount for i, amount in held.items() if i in alive},
            )
        self.tell(e.Observed(now_ms=Millis(self.now), host=policy.host, domains=domains))


def world(*models: OnCard, cards: tuple[float, ...] = (12, 12), **options: object) -> CardShell:
    rng = random.Random(1)
    here = checked(CardShell(rng=rng, faults=Faults(rng), policies=(machine(*cards),), sample_ms=1_000, **options))  # type: ignore[arg-type]
    for model in models:
        here.deploy(model)
    here.run(4_000)
    return here


def card_of(here: CardShell, name: str) -> Domain:
    (identity,) = [one for one, row in here.world.book.deployments.items() if row.spec.name == name]
    held = here.world.book.ledger.held_by(f"deployment:{DeploymentId(identity)}/instance:0")
    return next(domain for domain in held.allocation.bytes if domain != RAM)


def switches(here: CardShell) -> list[SwitchPhase]:
    return [state.phase for state in here.world.book.switches.values()]


def test_two_models_take_two_cards_and_nobody_gives_way() -> None:
    here = world(OnCard(name="a"), OnCard(name="b"))
    clients = [here.ask("a"), here.ask("b")]
    here.run(30_000)
    assert [client.told for client in clients] == ["ok", "ok"]
    assert {card_of(here, "a"), card_of(here, "b")} == {GPU0, GPU1}
    assert switches(here) == []
    claims = [claim.device for _, held in here.world.book.ledger.rows() for claim in held.claims]
    assert sorted(claims) == ["gpu0", "gpu1"]


def test_a_third_model_takes_the_card_of_the_one_that_gives_way() -> None:
    here = world(OnCard(name="a"), OnCard(name="b"), OnCard(name="c"))
    for name in "abc":
        client = here.ask(name)
        here.run(40_000)
        assert client.told == "ok"
    assert switches(here) == [SwitchPhase.DONE]
    assert card_of(here, "c") != card_of(here, "b")


def test_a_named_card_is_the_only_one_that_is_tried() -> None:
    here = world(OnCard(name="a", device="gpu1"), OnCard(name="b", device="gpu1"))
    for name in "ab":
        client = here.ask(name)
        here.run(40_000)
        assert client.told == "ok"
        assert card_of(here, name) == GPU1
    assert switches(here) == [SwitchPhase.DONE]


def test_a_larger_card_is_taken_where_the_first_is_too_small() -> None:
    here = world(OnCard(name="a"), cards=(8, 24))
    client = here.ask("a")
    here.run(30_000)
    assert client.told == "ok"
    assert card_of(here, "a") == GPU1


def test_a_switch_waits_for_card_memory_that_comes_back_late() -> None:
    here = world(OnCard(name="a"), OnCard(name="b"), cards=(12,), late_ms=5_000)
    for name in "ab":
        client = here.ask(name)
        here.run(60_000)
        assert client.told == "ok"
    assert switches(here) == [SwitchPhase.DONE]


def test_a_switch_does_not_wait_for_card_memory_for_ever() -> None:
    here = world(OnCard(name="a"), OnCard(name="b"), cards=(12,), late_ms=10**9)
    assert here.ask("a") is not None
    here.run(60_000)
    client = here.ask("b")
    here.run(60_000)
    assert SwitchPhase.FAILED in switches(here)
    assert client.told != "ok"


def test_nothing_starts_on_a_card_that_cannot_be_read_and_the_other_one_serves() -> None:
    here = world(OnCard(name="a"), OnCard(name="b"), unread=frozenset({GPU0}))
    clients = [here.ask("a"), here.ask("b")]
    here.run(40_000)
    assert "ok" in [client.told for client in clients]
    charged = {domain for _, held in here.world.book.ledger.rows() for domain in held.allocation.bytes}
    assert charged == {GPU1, RAM}


def test_limits_of_another_card_under_a_charged_cards_name_are_refused() -> None:
    here = world(OnCard(name="a"), cards=(12,))
    here.ask("a")
    here.run(30_000)
    ledger = here.world.book.ledger

    def with_uuid(uuid: str | None) -> HostPolicy:
        policy = machine(12)
        return attrs.evolve(policy, domains={**policy.domains, GPU0: attrs.evolve(policy.domains[GPU0], uuid=uuid)})

    first = set_policy(ledger, with_uuid("GPU-a"))
    assert isinstance(first, Ledger)
    assert isinstance(set_policy(first, with_uuid(None)), Ledger)
    other = set_policy(first, with_uuid("GPU-b"))
    assert isinstance(other, Shortfall)
    assert other.code == "device_policy_mismatch"
    assert "charged as the card GPU-a, and is GPU-b" in other.message()


# --- several ranks -----------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class OnCards(OnCard):
    """A model of several ranks: so much on each of the first cards."""

    ranks: int = 2

    @property
    def plan(self) -> Plan:
        cards = {Domain(f"gpu{i}"): gib(self.card_gib) for i in range(self.ranks)}
        claims = tuple(Claim(device=Device(card)) for card in cards)
        held = Allocation(bytes={**cards, RAM: gib(1)}, claims=claims)
        return attrs.evolve(super().plan, phases={Phase.COLD: held, Phase.READY: held})


def charged_on(here: Shell, identity: DeploymentId) -> set[str]:
    held = here.world.book.ledger.held_by(Lane(identity, 0).owner)
    return {domain for domain in held.allocation.bytes if domain != RAM}


def test_ranks_take_equal_cards_and_a_switch_empties_those_where_fewest_give_way() -> None:
    here = checked(CardShell(random.Random(4), Faults(random.Random(4)), policies=(machine(24, 24, 24, 24),)))
    singles = [here.deploy(OnCard(name=name)) for name in ("a", "b", "c")]
    wide = here.deploy(OnCards(name="wide", card_gib=20))
    here.run(2_000)
    for one in singles:
        here.start(one)
        here.run(30_000, until=lambda one=one: here.lane(one).gate_open)
    taken = [charged_on(here, one) for one in singles]
    assert len(set().union(*taken)) == 3  # the one with most room each time
    client = here.ask("wide")
    here.run(120_000, until=lambda: client.told is not None)
    assert client.told == "ok"
    assert len(charged_on(here, wide)) == 2
    assert sum(here.lane(one).gate_open for one in singles) == 2  # the free card, and that of the oldest
    before = charged_on(here, wide)
    here.stop(wide)
    here.run(60_000)
    here.start(wide)
    here.run(60_000, until=lambda: here.lane(wide).gate_open)
    assert charged_on(here, wide) == before


def test_ranks_that_no_host_has_equal_cards_for_are_refused_with_every_hosts_reason() -> None:
    unlike = machine(24, 24)
    named = {
        card: attrs.evolve(unlike.domains[card], model=model) for card, model in ((GPU0, "Card A"), (GPU1, "Card B"))
    }
    unlike = attrs.evolve(unlike, domains={**unlike.domains, **named})
    here = checked(CardShell(random.Random(4), Faults(random.Random(4)), policies=(unlike,)))
    wide = here.deploy(OnCards(name="wide"))
    here.run(2_000)
    key = here.start(wide)
    here.run(10_000)
    state = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
    assert state.code == "host_ineligible"
    assert "h1: 2 ranks need 2 equal cards of one machine; h1 has 1 of Card A (24.0 GiB), 1 of Card B" in state.reason


def test_a_deployment_that_runs_as_often_as_it_may_waits_and_says_so_of_every_host() -> None:
    hosts = tuple(attrs.evolve(machine(24), host=HostId(name), name=name) for name in ("h1", "h2"))
    here = checked(CardShell(random.Random(4), Faults(random.Random(4)), policies=hosts))
    many = here.deploy(OnCard(name="many", instances=3, max_per_host=1))
    here.run(2_000)
    here.start(many)
    here.run(60_000)
    (waiting,) = [row for _, row in here.world.book.of(many) if not row.gate_open]
    assert waiting.waits_for is not None
    assert waiting.waits_for.code == "host_ineligible"
    for name in ("h1", "h2"):
        assert f"{name}: runs 1 of it, as many as placement.max_per_host allows" in waiting.waits_for.reason
