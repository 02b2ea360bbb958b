"""Plain values of the simulated shell: faults, models, and what hosts, engines and clients are in truth."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import attrs

from capyctl.control import orders as o
from capyctl.control.spec import Spec, Traits
from capyctl.fsm.types import (
    Activation,
    Bytes,
    Domain,
    HostId,
    Incarnation,
    Millis,
    Phase,
    ProcessIdentity,
    RequestId,
    Residency,
)
from capyctl.ledger.types import Allocation, DomainKind, DomainPolicy, HostPolicy, Plan

GIB = 2**30
RAM = Domain("unified")

LLAMA = Traits(family="llamacpp", eof_proves_end=True)
VLLM = Traits(family="vllm", parks=True)
SGLANG = Traits(family="sglang", parks=True, abort_by_id=True)
CUSTOM = Traits(family="custom", idle_signal=False)

FAULTS = (
    "launch_never", "launch_refused", "files_changed", "exit_early", "load_stuck", "spawn_unheard", "crash_soon",
    "crash_late", "hangs", "bloats",
    "order_lost", "order_silent", "order_late", "answer_twice", "probe_mute", "unkillable",
    "idle_busy", "idle_silent", "park_refused", "park_refused_unsent", "park_left", "park_dies",
    "wake_refused_unsent", "wake_fails", "wake_mismatch", "wake_mute", "helper_exit",
    "session_drop", "reboot", "forget", "stale", "foreign", "bad_sample",
    "refused_connection", "rejects", "errors", "upstream_lost", "engine_mute", "hang_up",
    "abort_mute", "eof_mute", "eof_late",
    "controller_crash",
)  # fmt: skip


@attrs.define
class Faults:
    """Chances in percent, drawn once per run. A fault comes for this call only, or for every call from here on."""

    rng: random.Random
    percent: dict[str, int] = attrs.field(factory=dict)
    lasting: set[str] = attrs.field(factory=set)

    @classmethod
    def drawn(cls, rng: random.Random, names: Sequence[str] = FAULTS) -> Faults:
        """A few kinds of fault, so that runs differ in kind and something also goes well."""
        some = rng.sample(names, rng.choice((0, 4, 8, 16)))
        return cls(rng, {name: rng.choice((0, 5, 5, 50)) for name in some})

    def hits(self, name: str) -> bool:
        chance = self.percent.get(name, 0)
        if not chance:
            return False
        if name in self.lasting:
            return True
        if self.rng.random() * 100 >= chance:
            return False
        if name in LASTING and self.rng.random() < 0.05:
            self.lasting.add(name)
        return True

    def heal(self) -> None:
        self.percent.clear()
        self.lasting.clear()


LASTING = frozenset(
    {"launch_never", "exit_early", "load_stuck", "unkillable", "park_refused", "wake_fails", "wake_mismatch", "rejects"}
)


@attrs.frozen(kw_only=True)
class Model:
    """What a deployment is in truth, in GiB and milliseconds."""

    name: str
    traits: Traits = LLAMA
    residency: Residency = Residency.RESTART_ONLY
    settles: Residency | None = None  # what measuring makes of it
    activation: Activation = Activation.ON_DEMAND
    warm: bool = False
    instances: int = 1
    max_per_host: int | None = None
    ready_gib: float = 3.0
    cold_gib: float = 3.25
    peak_gib: float | None = None  # what a start really holds at most; None: what it is charged
    parked_gib: float = 0.5
    residue_gib: float | None = None  # what a park really leaves; None: what it is charged
    residue_grows_gib: float = 0.0  # by so much with each park of a launch
    load_ms: int = 5_000
    answer_ms: int = 500
    deadline_ms: Millis | None = None
    hosts: tuple[HostId, ...] = ()
    note: str = ""  # a revision that changes something changes this

    @property
    def plan(self) -> Plan:
        sizes = {Phase.COLD: self.cold_gib, Phase.READY: self.ready_gib}
        if self.residency.parks:
            sizes |= {Phase.PARKING: self.ready_gib + 0.25, Phase.PARKED: self.parked_gib, Phase.WAKE: self.cold_gib}
        return Plan(
            phases={phase: Allocation(bytes={RAM: gib(size)}) for phase, size in sizes.items()},
            provenance={Phase.COLD: "derived"},
            initialize_ms=Millis(120_000),
            wake_ms=Millis(60_000),
            context_tokens=4096,
        )

    @property
    def spec(self) -> Spec:
        return Spec(
            name=self.name,
            routes=(self.name, f"{self.name}-alias"),
            profile="p",
            traits=self.traits,
            document=json.dumps({"name": self.name, "instances": self.instances, "note": self.note}),
            activation=self.activation,
            warm=self.warm,
            residency=self.residency,
            instances=self.instances,
            hosts=self.hosts,
            max_per_host=self.max_per_host,
            request_deadline_ms=self.deadline_ms,
        )


def gib(amount: float) -> Bytes:
    return Bytes(int(amount * GIB))


def policy(
    name: str, *, capacity: float = 10, managed: float = 7, parked: float = 2, max_parked: int = 4
) -> HostPolicy:
    limits = DomainPolicy(
        kind=DomainKind.UNIFIED,
        capacity_bytes=gib(capacity),
        managed_bytes=gib(managed),
        reserve_bytes=gib(1),
        parked_bytes=gib(parked),
    )
    return HostPolicy(host=HostId(name), name=name, domains={RAM: limits}, max_parked=max_parked)


@attrs.define(eq=False)
class Engine:
    """One launch in truth. `state`: loading, ready, parked, gone; `moving` while a park or wake runs."""

    incarnation: Incarnation
    host: Host
    model: Model
    processes: tuple[ProcessIdentity, ...]
    state: str = "loading"
    moving: bool = False
    held_bytes: Bytes = Bytes(0)
    work: dict[RequestId, None] = attrs.field(factory=dict)  # in the engine, or on its way into its queue
    foreign: int = 0  # requests of nobody whom the controller knows, on its gauges
    entered: set[RequestId] = attrs.field(factory=set)  # of those, what its gauges show
    ending: bool = False  # its host ends it: an exit is no news
    unkillable: bool = False
    launch: o.Launch | None = None  # whose answer is still due
    woken_wrong: bool = False
    parks: int = 0  # how often it parked
    more_bytes: Bytes = Bytes(0)  # held beyond all that was planned
    hung_at_ms: int | None = None  # since then it does nothing and answers nobody

    @property
    def alive(self) -> bool:
        return self.state != "gone"


@attrs.define(eq=False)
class Host:
    """One machine in truth."""

    policy: HostPolicy
    boot: int = 1
    online: bool = False
    foreign_bytes: Bytes = Bytes(0)
    engines: dict[Incarnation, Engine] = attrs.field(factory=dict)
    started: set[Incarnation] = attrs.field(factory=set)  # ever spawned here
    fenced: set[Incarnation] = attrs.field(factory=set)
    forgotten: set[Incarnation] = attrs.field(factory=set)  # its journal lost them
    stale_until_ms: int = 0
    pulses: int = 0  # samples that it told

    @property
    def boot_id(self) -> str:
        return f"{self.policy.host}-boot{self.boot}"

    @property
    def held_bytes(self) -> int:
        return sum(engine.held_bytes + engine.more_bytes for engine in self.engines.values())


@attrs.define(eq=False)
class Client:
    """One request in truth. `told` is how it ended for its client; `stage` is where its router task stands."""

    request: RequestId
    route: str
    stream: bool
    arrived_at_ms: int
    nameable: bool = True
    stage: str = "waiting"  # waiting, placed, sent, streaming, over
    told: str | None = None
    engine: Engine | None = None
    enters_at_ms: int = 0
    served_by: Incarnation | None = None
    settled: bool = False
    cut: bool = False  # the world ended it, and its router task has not seen that yet
