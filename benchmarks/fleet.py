"""A random fleet for `planning`: many hosts and deployments in one world, as its rows would load them, and its events.

One model is taken through its start by events; its rows are then the pattern of all others. Sizes differ by model.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence

import attrs

from capyctl.control import events as e
from capyctl.control import orders as o
from capyctl.control.records import Counter, DeploymentRow, HostRow, InstanceRow, Record
from capyctl.control.spec import Spec, Traits
from capyctl.control.world import Step, World
from capyctl.fsm.proofs import Usable
from capyctl.fsm.types import (
    Bytes,
    DeploymentId,
    Device,
    Domain,
    HostId,
    Incarnation,
    Lane,
    Millis,
    OperationId,
    Phase,
    ProcessIdentity,
    RequestId,
    Residency,
    SwitchId,
    Token,
)
from capyctl.ledger.cards import on_cards
from capyctl.ledger.charges import Holding
from capyctl.ledger.types import Allocation, Claim, DomainKind, DomainPolicy, HostPolicy, Observation, Plan

GIB = 1 << 30
CARDS = 4
CARD_GIB, RAM_GIB = 80, 512
PER_HOST = 10  # deployments; half of them serve
SIZES = (24, 30, 36)  # of most models, GiB on a card: two of them share one
LARGE = 70  # of those that others give way for
SYSTEM = Domain("system")
NOW = Millis(1_000_000)
TRAITS = Traits(family="vllm", parks=True)


def policy(host: HostId) -> HostPolicy:
    """Four equal cards."""
    cards = {Domain(f"gpu{i}"): _limits(DomainKind.DEVICE, CARD_GIB, Device(f"gpu{i}")) for i in range(CARDS)}
    return HostPolicy(host=host, name=host, domains={SYSTEM: _limits(DomainKind.DISTINCT, RAM_GIB), **cards})


def _limits(kind: DomainKind, gib: int, device: Device | None = None) -> DomainPolicy:
    total = gib * GIB
    return DomainPolicy(
        kind=kind,
        capacity_bytes=Bytes(total),
        managed_bytes=Bytes(total - 4 * GIB),
        reserve_bytes=Bytes(4 * GIB),
        parked_bytes=Bytes(total // 4),
        device=device,
    )


def plan(gib: int) -> Plan:
    """So much on one card, 4 GiB of RAM beside it, 1 GiB of the card while parked."""

    def at(card: int, claims: tuple[Claim, ...]) -> Allocation:
        return Allocation(bytes={Domain("gpu0"): Bytes(card * GIB), SYSTEM: Bytes(4 * GIB)}, claims=claims)

    claims = (Claim(device=Device("gpu0")),)
    active = dict.fromkeys((Phase.COLD, Phase.READY, Phase.PARKING, Phase.WAKE), at(gib, claims))
    return Plan(
        phases={**active, Phase.PARKED: at(1, ())},
        provenance={Phase.COLD: "derived"},
        initialize_ms=Millis(600_000),
        wake_ms=Millis(600_000),
        context_tokens=4096,
    )


@attrs.define
class Fleet:
    """A world, and who in it may still be told something."""

    world: World
    hosts: Sequence[HostId]
    serving: list[Incarnation]
    stopped: list[DeploymentId]
    large: list[DeploymentId]
    now_ms: int = NOW
    begun: list[DeploymentId] = attrs.field(factory=list)
    called_off: list[DeploymentId] = attrs.field(factory=list)
    look: o.VerifyStart | None = None
    numbers: itertools.count[int] = attrs.field(factory=lambda: itertools.count(1))

    @classmethod
    def of(cls, size: int, rng: random.Random, *, named: int | None) -> Fleet:
        """`size` hosts with ten deployments each. A deployment may use `named` hosts, or all of them."""
        hosts = [HostId(f"host-{i:05}") for i in range(size)]
        pattern = _Pattern.made()
        plans = {gib: {host: plan(gib) for host in hosts} for gib in (*SIZES, LARGE)}  # each host has its own
        records = [Record(kind="host", key=host, value=HostRow(policy=policy(host), boot_id="b")) for host in hosts]
        here = cls(World(), hosts, [], [], [])
        for number in range(size * PER_HOST):
            home = number // PER_HOST
            gib = LARGE if number % PER_HOST == PER_HOST - 1 else rng.choice(SIZES)
            identity = DeploymentId(f"D{number:06}")
            allowed = hosts if named is None else rng.sample(hosts, min(named, size))
            serves = number % PER_HOST < PER_HOST // 2
            spec = _spec(str(identity), tuple(dict.fromkeys((hosts[home], *allowed)) if serves else allowed))
            row = attrs.evolve(
                pattern.deployment,
                state=attrs.evolve(pattern.deployment.state, deployment=identity),
                spec=spec,
                plans=plans[gib] if named is None else {host: plans[gib][host] for host in spec.hosts},
            )
            records.append(Record(kind="deployment", key=identity, value=row))
            lane = Lane(identity, 0)
            if serves:
                card = Domain(f"gpu{number % PER_HOST % CARDS}")
                moved = on_cards(plans[gib][hosts[home]], policy(hosts[home]), (card,))
                records += pattern.serving(lane, hosts[home], moved, Token(number + 1))
                here.serving.append(Incarnation(lane, pattern.generation))
            else:
                records.append(Record(kind="instance", key=str(lane), value=pattern.stopped(lane)))
                (here.large if gib == LARGE else here.stopped).append(identity)
        records += [*pattern.counters, Record(kind="counter", key="token", value=Counter(value=size * PER_HOST))]
        here.world = World.load(records, now_ms=NOW)
        book = here.world.book
        book.online |= set(hosts)
        book.installations.update({host: {} for host in hosts})
        rng.shuffle(here.stopped)
        for host in hosts:
            here.observe(host)
        here.tell(e.Ticked(now_ms=NOW))
        return here

    # --- events -----------------------------------------------------------------------------------

    def tell(self, event: e.Event) -> Step:
        return self.world.handle(event)

    def start(self) -> None:
        """An operator starts a stopped model; it is launched in the same step."""
        step = self.tell(self._start_asked(self.stopped.pop()))
        assert any(isinstance(order, o.Launch) for order in step.orders), "there was room"

    def evict(self) -> None:
        """A request wants a model for which others have to give way: who, is planned, and its host is asked."""
        identity = self.large.pop()
        step = self._ask(identity)
        (self.look,) = (order for order in step.orders if isinstance(order, o.VerifyStart))
        self.begun.append(identity)

    def switch(self) -> None:
        """Its host says that it could begin: that is planned anew, and a switch begins."""
        look = self.look
        assert look is not None, "somebody wants it"
        step = self.tell(
            e.StartVerified(
                now_ms=Millis(self.now_ms),
                deployment=look.deployment,
                revision=look.revision,
                digest=look.digest,
                host=look.host,
            )
        )
        assert any(move.machine == "switch" for move in step.moves), "a switch began"

    def wait(self) -> None:
        """An operator starts a model for which others would have to give way, and may not: it waits for room."""
        identity = self.called_off.pop(0)
        step = self.tell(self._start_asked(identity))
        assert all(isinstance(order, o.Reply) for order in step.orders), "nobody gives way"
        self.begun.append(identity)

    def calm(self) -> None:
        """An operator calls off what has begun: nobody has given way yet."""
        while self.begun:
            self.now_ms += 1
            self.called_off.append(self.begun.pop())
            self.tell(
                e.StopAsked(
                    now_ms=Millis(self.now_ms), command=_command(next(self.numbers)), deployment=self.called_off[-1]
                )
            )
        assert not self.world.book.active_switches, "it is called off"

    def ask(self) -> None:
        """A request for a model that serves."""
        step = self._ask(self._next_serving().lane.deployment)
        assert any(isinstance(order, o.Admit) for order in step.orders), "it had a place"

    def report(self) -> None:
        """What an engine says of itself."""
        self.tell(
            e.LoadReported(
                now_ms=Millis(self.now_ms),
                incarnation=self._next_serving(),
                running=0,
                waiting=0,
                kv_usage_ppm=0,
                read_at_ms=Millis(self.now_ms),
            )
        )

    def observe(self, host: HostId | None = None) -> None:
        """What is free on a host: as much as nobody is charged."""
        host = host or self.hosts[next(self.numbers) % len(self.hosts)]
        ledger = self.world.book.ledger
        samples = {
            domain: Observation(
                capacity_bytes=limits.capacity_bytes,
                available_bytes=Bytes(limits.capacity_bytes - ledger.charged(host, domain)),
                seen_at_ms=Millis(self.now_ms),
                residents={owner: held.on(domain) for owner, held in ledger.on(host)},
            )
            for domain, limits in ledger.hosts[host].domains.items()
        }
        self.tell(e.Observed(now_ms=Millis(self.now_ms), host=host, domains=samples))

    def tick(self) -> None:
        """A deadline has come that concerns nobody any more."""
        self.tell(e.Ticked(now_ms=Millis(self.now_ms)))

    def deploy(self) -> None:
        """A new model, which nobody starts."""
        number = next(self.numbers)
        spec = _spec(f"new-{number}", tuple(self.hosts[:4]))
        self.tell(
            e.DeployAsked(
                now_ms=Millis(self.now_ms),
                command=_command(number),
                deployment=DeploymentId(f"N{number:06}"),
                spec=spec,
            )
        )

    def delete(self) -> None:
        """A stopped model goes."""
        command = _command(next(self.numbers))
        self.tell(e.DeleteAsked(now_ms=Millis(self.now_ms), command=command, deployment=self.stopped.pop()))

    def stop(self) -> None:
        """A model that serves begins to end."""
        command = _command(next(self.numbers))
        self.tell(
            e.StopAsked(now_ms=Millis(self.now_ms), command=command, deployment=self.serving.pop().lane.deployment)
        )

    def host(self) -> None:
        """A host loses its session and is back."""
        host = self.hosts[next(self.numbers) % len(self.hosts)]
        self.tell(e.HostOffline(now_ms=Millis(self.now_ms), host=host, reason="its connection ended"))
        self.tell(e.HostOnline(now_ms=Millis(self.now_ms), policy=policy(host), boot_id="b"))

    def _ask(self, identity: DeploymentId) -> Step:
        return self.tell(
            e.RequestArrived(
                now_ms=Millis(self.now_ms),
                request=RequestId(f"R{next(self.numbers)}"),
                route=str(identity),
                api="chat",
                stream=False,
                body_bytes=100,
            )
        )

    def _start_asked(self, identity: DeploymentId) -> e.StartAsked:
        return e.StartAsked(
            now_ms=Millis(self.now_ms), command=_command(next(self.numbers)), deployment=identity, deadline_ms=None
        )

    def _next_serving(self) -> Incarnation:
        return self.serving[next(self.numbers) % len(self.serving)]


def _command(number: int) -> e.Command:
    return e.Command(
        key=f"k{number}", digest="d", operation=OperationId(f"O{number:010}"), switch=SwitchId(f"S{number:010}")
    )


def _spec(name: str, hosts: tuple[HostId, ...]) -> Spec:
    return Spec(
        name=name,
        routes=(name,),
        profile="p",
        traits=TRAITS,
        document=json.dumps({"name": name}),
        residency=Residency.DEEP,
        hosts=hosts,
    )


@attrs.frozen
class _Pattern:
    """The rows of one model that serves, whatever its name and host."""

    deployment: DeploymentRow
    instance: InstanceRow
    at_rest: InstanceRow
    holding: Holding
    counters: tuple[Record, ...]

    @classmethod
    def made(cls) -> _Pattern:
        """Deploy, start, prove and serve, on one host."""
        host, identity = HostId("pattern"), DeploymentId("PATTERN")
        world = World()
        world.handle(e.ControllerStarted(now_ms=NOW, session=1))
        world.handle(e.HostOnline(now_ms=NOW, policy=policy(host), boot_id="b"))
        free = {
            domain: Observation(capacity_bytes=one.capacity_bytes, available_bytes=one.capacity_bytes, seen_at_ms=NOW)
            for domain, one in policy(host).domains.items()
        }
        world.handle(e.Observed(now_ms=NOW, host=host, domains=free))
        deploy = e.DeployAsked(now_ms=NOW, command=_command(1), deployment=identity, spec=_spec("pattern", (host,)))
        world.handle(deploy)
        world.handle(
            e.RevisionResolved(
                now_ms=NOW,
                deployment=identity,
                revision=1,
                digest="sha256:0",
                weight_bytes=Bytes(GIB),
                plans={host: plan(SIZES[0])},
            )
        )
        at_rest = world.book.instances[Lane(identity, 0)]
        step = world.handle(e.StartAsked(now_ms=NOW, command=_command(2), deployment=identity))
        (launch,) = (order for order in step.orders if isinstance(order, o.Launch))
        run, token = launch.incarnation, launch.token
        processes = (ProcessIdentity(pid=10, boot_id="b", start_ticks=1),)
        world.handle(e.Spawned(now_ms=NOW, incarnation=run, token=token, processes=processes))
        usable = Usable(incarnation=run, answer_chars=3, probed_at_ms=NOW)
        world.handle(
            e.LaunchReady(now_ms=NOW, incarnation=run, token=token, processes=processes, usable=usable, canary="four")
        )
        world.handle(e.ReadyStored(now_ms=NOW, incarnation=run))
        row = world.book.instances[run.lane]
        assert row.gate_open, "the pattern serves"
        return cls(
            deployment=world.book.deployments[identity],
            instance=row,
            at_rest=at_rest,
            holding=world.book.ledger.held_by(run.lane.owner),
            counters=tuple(record for record in world.records() if record.kind == "counter"),
        )

    @property
    def generation(self) -> int:
        return self.holding.generation

    def stopped(self, lane: Lane) -> InstanceRow:
        """An instance that never ran."""
        return _renamed(self.at_rest, lane, None, None)

    def serving(self, lane: Lane, host: HostId, moved: Plan, token: Token) -> list[Record]:
        """An instance that serves on this host, and what it is charged. `token`: of its last order."""
        row = attrs.evolve(_renamed(self.instance, lane, host, token), plan=moved, last_host=host)
        held = attrs.evolve(self.holding, host=host, allocation=moved.at(Phase.READY), phases=dict(moved.phases))
        return [
            Record(kind="instance", key=str(lane), value=row),
            Record(kind="ledger", key=lane.owner, value=held),
        ]


def _renamed(row: InstanceRow, lane: Lane, host: HostId | None, token: Token | None) -> InstanceRow:
    machine = row.machine
    life = attrs.evolve(machine.life, run=attrs.evolve(machine.run, lane=lane, host=host, token=token))
    return attrs.evolve(row, machine=attrs.evolve(machine, life=life, gate=attrs.evolve(machine.gate, lane=lane)))
