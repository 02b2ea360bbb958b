"""A shell around the world for tests: clock, store, hosts with engines, a router with clients, operators.

Everything is in memory and on one seed, in virtual time. Ground truth is kept here and never asked of the
world: which processes exist, what they hold, which requests they work on, what each client was told. The
shell is faithful: an order to a host is performed after its commit, one at a time per lane, and answered at
most once (late, twice or never only as a fault); a router reports in order; a dead controller forgets.
What must always be true of the truth beside the world is asserted where it could become false.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from capyctl.control import events as e
from capyctl.control import orders as o
from capyctl.control.book import Settings
from capyctl.control.records import Record
from capyctl.control.spec import Spec, Traits
from capyctl.control.world import Step, World
from capyctl.fsm.proofs import (
    Aborted,
    Back,
    Canary,
    Gone,
    GoneProof,
    NeverLaunched,
    Quiet,
    Rebooted,
    Resident,
    SameEngine,
    Unsent,
    Usable,
)
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.types import (
    Activation,
    Bytes,
    DeploymentId,
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
    Role,
    SwitchId,
    Token,
)
from capyctl.ledger.types import Allocation, DomainKind, DomainPolicy, HostPolicy, Observation, Plan

GIB = 2**30
RAM = Domain("unified")
START_MS = 1_000_000
TICKS_MAX = 5  # a look that changed something may ask for one more at once
HOST_ANSWER_MS = 120_000  # how long after an order's own bound the driver still waits for its host

LLAMA = Traits(family="llamacpp", eof_proves_end=True)
VLLM = Traits(family="vllm", parks=True)
SGLANG = Traits(family="sglang", parks=True, abort_by_id=True)
CUSTOM = Traits(family="custom", idle_signal=False)

FAULTS = (
    "launch_never", "launch_refused", "exit_early", "load_stuck", "spawn_unheard", "crash_soon", "crash_late",
    "order_lost", "order_silent", "answer_twice", "probe_mute", "unkillable",
    "idle_busy", "idle_silent", "park_refused", "park_refused_unsent", "park_left", "park_dies",
    "wake_fails", "wake_mismatch", "wake_mute", "helper_exit", "worker_exit",
    "session_drop", "reboot", "forget", "stale", "foreign", "bad_sample",
    "refused_connection", "rejects", "errors", "upstream_lost", "engine_mute", "hang_up", "abort_mute", "eof_mute",
    "controller_crash",
)  # fmt: skip


class Crashed(Exception):
    """The controller died at a chosen boundary."""


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
    activation: Activation = Activation.ON_DEMAND
    warm: bool = False
    instances: int = 1
    max_per_host: int | None = None
    ready_gib: float = 3.0
    cold_gib: float = 3.25
    parked_gib: float = 0.5
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
    entered: set[RequestId] = attrs.field(factory=set)  # of those, what its gauges show
    ending: bool = False  # its host ends it: an exit is no news
    unkillable: bool = False
    launch: o.Launch | None = None  # whose answer is still due
    woken_wrong: bool = False

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

    @property
    def boot_id(self) -> str:
        return f"{self.policy.host}-boot{self.boot}"

    @property
    def held_bytes(self) -> int:
        return sum(engine.held_bytes for engine in self.engines.values())


@attrs.define(eq=False)
class Client:
    """One request in truth. `told` is how it ended for its client; `stage` is where its router task stands."""

    request: RequestId
    route: str
    stream: bool
    arrived_at_ms: int
    stage: str = "waiting"  # waiting, placed, sent, streaming, over
    told: str | None = None
    engine: Engine | None = None
    enters_at_ms: int = 0
    served_by: Incarnation | None = None
    settled: bool = False
    cut: bool = False  # the world ended it, and its router task has not seen that yet


@attrs.define(eq=False)
class Shell:
    """Owns the world and everything around it. Feed it with `deploy`, `ask`, … and let time pass with `run`."""

    rng: random.Random
    faults: Faults
    policies: tuple[HostPolicy, ...] = (policy("h1"),)
    settings: Settings = attrs.field(factory=Settings)
    check: Callable[[Shell, Any, e.Event, Step], None] | None = None  # called after each step
    before: Callable[[Shell], Any] | None = None  # what `check` is given of the world before it
    crash_at: int | None = None
    sample_ms: int = 2_000
    attributed: bool = True  # samples name what each owner holds
    # truth
    now: int = START_MS
    hosts: dict[HostId, Host] = attrs.field(factory=dict)
    models: dict[DeploymentId, dict[int, Model]] = attrs.field(factory=dict)
    clients: dict[RequestId, Client] = attrs.field(factory=dict)
    launches: list[Incarnation] = attrs.field(factory=list)
    served: dict[Incarnation, int] = attrs.field(factory=dict)
    # controller
    world: World = attrs.field(factory=World)
    session: int = 0
    durable: dict[tuple[str, str], object] = attrs.field(factory=dict)
    journal: list[e.Event] = attrs.field(factory=list)
    replies: dict[str, o.Reply] = attrs.field(factory=dict)
    commands: list[Any] = attrs.field(factory=list)
    boundaries: int = 0
    crashes: int = 0
    steps: int = 0
    log: list[str] = attrs.field(factory=list)
    _heap: list[tuple[int, int, Callable[[], None]]] = attrs.field(factory=list)
    _order: int = 0
    _ids: int = 0
    _pids: int = 100
    _uncommitted: list[tuple[e.Event, Step]] = attrs.field(factory=list)
    _lanes: dict[Lane, deque[o.HostOrder]] = attrs.field(factory=dict)
    _in_flight: dict[Token, o.HostOrder] = attrs.field(factory=dict)
    _fed: deque[e.Event] = attrs.field(factory=deque)
    _stepping: bool = False
    _ticks: int = 0
    quiet: bool = False  # nothing new is begun by operators, clients or faults

    # --- beginning --------------------------------------------------------------------------------

    def __attrs_post_init__(self) -> None:
        self.hosts = {one.host: Host(policy=one) for one in self.policies}
        self._start()
        for host in self.hosts.values():
            self._pulse(host)

    def _start(self) -> None:
        """A new controller session over what is durable."""
        self.session += 1
        rows = [Record(kind=kind, key=key, value=value) for (kind, key), value in self.durable.items()]
        self.world = World.load(rows, now_ms=Millis(self.now), settings=self.settings)
        self.tell(e.ControllerStarted(now_ms=Millis(self.now), session=self.session))
        for host in self.hosts.values():
            host.online = False
            self.later(self.between(0, 500), lambda host=host: self._connect(host), mortal=True)

    def _connect(self, host: Host) -> None:
        if host.online:
            return
        host.online = True
        self.tell(e.HostOnline(now_ms=Millis(self.now), policy=host.policy, boot_id=host.boot_id))
        self._observe(host)

    # --- time -------------------------------------------------------------------------------------

    def between(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def later(self, delay_ms: int, deed: Callable[[], None], *, mortal: bool = False) -> None:
        """Do it in `delay_ms`; what is `mortal` dies with the present controller."""
        session = self.session
        self._order += 1

        def due() -> None:
            if not mortal or session == self.session:
                deed()

        heapq.heappush(self._heap, (self.now + max(0, delay_ms), self._order, due))

    def run(self, span_ms: int, *, until: Callable[[], bool] | None = None, steps_max: int | None = None) -> None:
        """Let time pass. A controller that crashes on the way is started again."""
        ends_at, steps = self.now + span_ms, self.steps
        while until is None or not until():
            if steps_max is not None and self.steps - steps >= steps_max:
                return
            try:
                if not self._advance(ends_at):
                    self.now = ends_at
                    return
            except Crashed:
                self.crash()

    def _advance(self, ends_at_ms: int) -> bool:
        due = self.world.next_due_ms
        next_at = self._heap[0][0] if self._heap else None
        if due is not None and (next_at is None or max(due, self.now) <= next_at):
            if due > ends_at_ms:
                return False
            self.now = max(self.now, due)
            self.tell(e.Ticked(now_ms=Millis(self.now)))
            again = self.world.next_due_ms
            self._ticks = self._ticks + 1 if again is not None and again <= self.now else 0
            assert self._ticks < TICKS_MAX, f"71: told the time, it does not let go of a deadline at {again}"
            return True
        if next_at is None or next_at > ends_at_ms:
            return False
        at, _, deed = heapq.heappop(self._heap)
        self.now = max(self.now, at)
        deed()
        return True

    # --- the driver -------------------------------------------------------------------------------

    def tell(self, event: e.Event) -> None:
        """Feed one fact. Fed from inside a step, it is taken right after that step."""
        self._fed.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._fed:
                self._step(self._fed.popleft())
        finally:
            self._stepping = False
            self._fed.clear()

    def _step(self, event: e.Event) -> None:
        remembered = self.before(self) if self.before is not None else None
        step = self.world.handle(event)
        self.steps += 1
        self._trace(event, step)
        for order in step.orders:
            if isinstance(order, o.RouterOrder):
                self._route(order)
        if self.check is not None:
            self.check(self, remembered, event, step)
        self._uncommitted.append((event, step))
        if len(self._uncommitted) == 1:
            self.later(self.between(0, 20), self._commit, mortal=True)

    def _trace(self, event: e.Event, step: Step) -> None:
        if len(self.log) > 400:
            del self.log[:200]
        moves = "; ".join(f"{one.machine} {one.lane} {one.was}>{one.now}" for one in step.moves)
        given = " ".join(_shown(order) for order in step.orders)
        self.log.append(f"{self.now - START_MS:>9} {_shown(event)} | {moves} | {given}")

    def _boundary(self) -> None:
        self.boundaries += 1
        if self.crash_at is not None and self.boundaries == self.crash_at:
            raise Crashed
        if self.rng.random() * 5_000 < self.faults.percent.get("controller_crash", 0):
            raise Crashed

    def _commit(self) -> None:
        """One transaction for everything that piled up; then what waited for it is begun."""
        batch, self._uncommitted = self._uncommitted, []
        self._boundary()
        for event, step in batch:
            if not isinstance(event, e.REQUEST_EVENTS):
                self.journal.append(event)
            for record in step.changed:
                if record.value is None:
                    self.durable.pop((record.kind, record.key), None)
                else:
                    self.durable[record.kind, record.key] = record.value
        self._boundary()
        for _, step in batch:
            for order in step.orders:
                if not isinstance(order, o.RouterOrder):
                    self._begin(order)
                    self._boundary()

    def _begin(self, order: o.Order) -> None:
        match order:
            case o.Reply():
                self.replies[order.key] = order
            case o.ConfirmStored(incarnation=incarnation):
                self.later(
                    0, lambda: self.tell(e.ReadyStored(now_ms=Millis(self.now), incarnation=incarnation)), mortal=True
                )
            case o.Measure():
                self.later(self.between(1, 3_000), lambda: self._measured(order), mortal=True)
            case o.HostOrder():
                lane = order.incarnation.lane
                if lane in self._lanes:
                    self._lanes[lane].append(order)
                else:
                    self._lanes[lane] = deque([order])
                    self._send(order)
            case _:
                raise AssertionError(f"nobody performs {order}")

    def _measured(self, order: o.Measure) -> None:
        model = self.models[order.deployment].get(order.revision)
        if model is None:
            return
        now = Millis(self.now)
        if model.note.startswith("bad"):
            code = model.note.partition(" ")[2] or "checkpoint_unusable"
            self.tell(
                e.RevisionUnusable(
                    now_ms=now, deployment=order.deployment, revision=order.revision, code=code, reason="as made"
                )
            )
            return
        self.tell(
            e.RevisionResolved(
                now_ms=now,
                deployment=order.deployment,
                revision=order.revision,
                digest=f"sha256:{model.name}{order.revision}",
                weight_bytes=gib(model.ready_gib),
                plans=dict.fromkeys(model.hosts, model.plan),
            )
        )

    def _send(self, order: o.HostOrder) -> None:
        host = self.hosts[order.host]
        self._in_flight[order.token] = order
        if not host.online:
            self._answer(order, self._lost(order, "the session is down"), 1)
        else:
            self._perform(host, order)

    def _answer(self, order: o.HostOrder, outcome: Callable[[], e.Outcome], delay_ms: int = 0) -> None:
        """Answer an order once; a controller that died, or a session that ended, hears nothing."""
        if self.faults.hits("order_silent"):
            bound = getattr(order, "deadline_ms", self.now + 60_000)
            outcome, delay_ms = (
                self._lost(order, "not answered within its limit"),
                max(0, bound - self.now) + HOST_ANSWER_MS,
            )
        elif self.faults.hits("order_lost"):
            outcome = self._lost(order, "the answer was lost")

        def deliver() -> None:
            if self._in_flight.pop(order.token, None) is None:
                return  # told lost already, when the session ended
            self.tell(outcome())
            if self.faults.hits("answer_twice"):
                self.later(self.between(0, 90_000), lambda: self.tell(outcome()), mortal=True)
            self._next(order.incarnation.lane)

        self.later(delay_ms, deliver, mortal=True)

    def _next(self, lane: Lane) -> None:
        queue = self._lanes[lane]
        queue.popleft()
        if queue:
            self._send(queue[0])
        else:
            del self._lanes[lane]

    def _lost(self, order: o.HostOrder, reason: str) -> Callable[[], e.Outcome]:
        return lambda: e.OrderLost(**self._at(order), reason=reason)

    def _at(self, order: o.HostOrder) -> dict[str, Any]:
        return {"now_ms": Millis(self.now), "incarnation": order.incarnation, "token": order.token}

    def crash(self) -> None:
        """The controller dies: what was not committed, not sent or not heard is gone; connections break."""
        self.crashes += 1
        self.crash_at = None
        self.log.append(f"{self.now - START_MS:>9} === crash ===")
        self._stepping = False
        self._fed.clear()
        self._uncommitted.clear()
        self._lanes.clear()
        self._in_flight.clear()
        for client in self.clients.values():
            client.settled = False  # a place whose end was not stored yet ends once more
            if client.stage != "over":
                if client.told is None:
                    client.told = "crashed"
                self._abandon(client, report=False)
                client.stage = "over"
        self._start()

    # --- hosts: sessions and samples ----------------------------------------------------------------

    def drop_session(self, host: Host) -> None:
        """The session ends: in-flight orders are lost to the controller, the host goes on."""
        if not host.online:
            return
        host.online = False
        self.tell(e.HostOffline(now_ms=Millis(self.now), host=host.policy.host, reason="dropped"))
        for order in [one for one in self._in_flight.values() if one.host == host.policy.host]:
            del self._in_flight[order.token]

            def deliver(order: o.HostOrder = order) -> None:
                self.tell(e.OrderLost(**self._at(order), reason="the session ended"))
                self._next(order.incarnation.lane)

            self.later(0, deliver, mortal=True)
        self.later(self.between(200, 90_000), lambda: self._connect(host), mortal=True)

    def reboot(self, host: Host) -> None:
        """The machine restarts: every process is gone, and its boot id is new."""
        self.drop_session(host)
        host.boot += 1
        for engine in list(host.engines.values()):
            self._die(engine, news=False)

    def _pulse(self, host: Host) -> None:
        """Samples and gauges, for ever."""
        busy = not self.quiet or any(engine.alive for engine in host.engines.values())
        self.later(self.sample_ms if busy else 10 * self.sample_ms, lambda: self._pulse(host))
        if not self.quiet:
            if self.faults.hits("session_drop") and self.rng.random() < 0.02:
                self.drop_session(host)
            if self.faults.hits("reboot") and self.rng.random() < 0.01:
                self.reboot(host)
            if self.faults.hits("stale") and self.rng.random() < 0.05:
                host.stale_until_ms = self.now + self.between(0, 150_000)
            if self.faults.hits("foreign") and self.rng.random() < 0.1:
                host.foreign_bytes = gib(self.rng.choice((0, 0, 1, 3, 6)))
            if self.faults.hits("forget") and self.rng.random() < 0.01:
                host.forgotten.update(host.engines)
        if host.online:
            self._observe(host)
            for engine in list(host.engines.values()):
                self._gauge(engine)

    def _observe(self, host: Host) -> None:
        if self.now < host.stale_until_ms:
            return
        seen_at, bad = self.now, self.faults.hits("bad_sample")
        free = host.policy.domains[RAM].capacity_bytes - host.foreign_bytes - host.held_bytes
        residents: dict[str, Bytes] = {}
        if self.attributed:
            for engine in host.engines.values():
                residents[engine.incarnation.lane.owner] = engine.held_bytes
        sample = Observation(
            capacity_bytes=host.policy.domains[RAM].capacity_bytes,
            available_bytes=Bytes(max(0, free)),
            seen_at_ms=Millis(seen_at + (600_000 if bad else 0)),
            residents=residents,
        )
        domains = {Domain("other"): sample} if bad and self.rng.random() < 0.3 else {RAM: sample}
        self.tell(e.Observed(now_ms=Millis(self.now), host=host.policy.host, domains=domains))

    def _gauge(self, engine: Engine) -> None:
        """A load reading, where anybody may wait for one."""
        if engine.state != "ready" or engine.moving or not engine.model.traits.idle_signal:
            return
        lane = engine.incarnation.lane
        row = self.world.book.instances.get(lane)
        draining = row is not None and row.phase is ResidencyPhase.DRAINING_TO_PARK
        if not (engine.work or draining or self.world.book.traffic.on(lane) or self.rng.random() < 0.1):
            return
        running, read_at = len(engine.entered), self.now

        def report() -> None:
            if engine.host.online:
                self.tell(
                    e.LoadReported(
                        now_ms=Millis(self.now),
                        incarnation=engine.incarnation,
                        running=running,
                        waiting=0,
                        kv_usage_ppm=self.rng.choice((None, 100_000, 950_000)),
                        read_at_ms=Millis(read_at),
                    )
                )

        self.later(self.between(0, 150), report, mortal=True)

    # --- hosts: orders ------------------------------------------------------------------------------

    def _perform(self, host: Host, order: o.HostOrder) -> None:
        match order:
            case o.Launch():
                self._launch(host, order)
            case o.AwaitIdle():
                self._await_idle(host, order, self.now + order.limit_ms)
            case o.Terminate():
                self._terminate(host, order)
            case o.Probe():
                self.later(self.between(1, 2_000), lambda: self._probe(host, order))
            case o.Release():
                self.later(self.between(1, 500), lambda: self._release(host, order))
            case o.Restore():
                self.later(self.between(1, 500), lambda: self._restore(host, order))
            case _:
                raise AssertionError(f"no host takes {order}")

    def _launch(self, host: Host, order: o.Launch) -> None:
        incarnation = order.incarnation
        assert incarnation not in host.started, f"18: {incarnation} is launched a second time"
        never = lambda code, passing: (
            lambda: e.LaunchFailed(
                **self._at(order),
                code=code,
                reason="before it was spawned",
                transient=passing,
                proof=self._never(incarnation),
            )
        )
        if self.faults.hits("launch_refused"):
            unsent = Unsent(incarnation=incarnation, refused_before_sending=True)
            failed = lambda: e.LaunchFailed(  # noqa: E731
                **self._at(order), code="revision_conflict", reason="changed", transient=False, proof=unsent
            )
            host.fenced.add(incarnation)
            self._answer(order, failed, 1)
            return

        def spawn() -> None:
            if incarnation in host.fenced:
                self._answer(order, never("lifecycle_conflict", False))
            elif self.faults.hits("launch_never"):
                host.fenced.add(incarnation)
                self._answer(order, never("port_conflict", True))
            else:
                self._spawn(host, order)

        self.later(self.between(1, 300), spawn)

    def _spawn(self, host: Host, order: o.Launch) -> None:
        incarnation = order.incarnation
        host.started.add(incarnation)
        self.launches.append(incarnation)
        model = self.models[incarnation.lane.deployment][order.revision]
        roles = [(Role.API, 0), (Role.WORKER, 0), (Role.HELPER, 0)][: self.between(1, 3)]
        processes = []
        for role, number in roles:
            self._pids += 1
            processes.append(
                ProcessIdentity(pid=self._pids, boot_id=host.boot_id, start_ticks=self.now, role=role, number=number)
            )
        engine = Engine(incarnation, host, model, tuple(processes), launch=order)
        engine.unkillable = self.faults.hits("unkillable")
        host.engines[incarnation] = engine
        if not self.faults.hits("spawn_unheard"):
            told = e.Spawned(**self._at(order), processes=engine.processes)
            if host.online:
                self.later(0, lambda: self.tell(told), mortal=True)
                if self.faults.hits("answer_twice"):
                    self.later(self.between(0, 90_000), lambda: self.tell(told), mortal=True)
        takes = self.between(model.load_ms // 2, model.load_ms * 3 // 2)
        self.later(takes // 2, lambda: self._hold(engine, order.plan.at(Phase.COLD)))
        if self.faults.hits("exit_early"):
            self.later(takes * 3 // 4, lambda: self._launch_ended(engine, "launch_failed", "it exited with status 1"))
        elif self.faults.hits("load_stuck"):
            self.later(
                order.deadline_ms - self.now, lambda: self._launch_ended(engine, "activation_timeout", "not ready")
            )
        else:
            self.later(takes, lambda: self._loaded(engine, order))

    def _hold(self, engine: Engine, allocation: Allocation) -> None:
        if engine.alive:
            engine.held_bytes = allocation.on(RAM)
            self.assert_charged(engine)

    def _launch_ended(self, engine: Engine, code: str, reason: str) -> None:
        """Its host ends a launch that failed, and proves it or cannot."""
        order, engine.launch = engine.launch, None
        if order is None or not engine.alive:
            return
        if engine.unkillable:
            self._answer(order, self._lost(order, f"{reason}; then: a process is alive"), 10_000)
            return
        self._die(engine, news=False)
        proof = self._gone(engine)
        self._answer(
            order,
            lambda: e.LaunchFailed(**self._at(order), code=code, reason=reason, transient=False, proof=proof),
        )

    def _loaded(self, engine: Engine, order: o.Launch) -> None:
        if not engine.alive or engine.state != "loading":
            return
        engine.state = "ready"
        self._hold(engine, order.plan.at(Phase.READY))
        if engine.launch is not None and not engine.ending:
            engine.launch = None
            usable = self._usable(engine)
            canary = "42" if engine.model.traits.parks else None
            self._answer(
                order,
                lambda: e.LaunchReady(**self._at(order), processes=engine.processes, usable=usable, canary=canary),
            )
        if self.faults.hits("crash_soon"):
            self.later(self.between(0, 50_000), lambda: self._die(engine))
        elif self.faults.hits("crash_late"):
            self.later(self.between(60_000, 900_000), lambda: self._die(engine))
        if self.faults.hits("helper_exit"):
            self.later(self.between(0, 50_000), lambda: self._exit_news(engine, Role.HELPER))

    def _await_idle(self, host: Host, order: o.AwaitIdle, ends_at_ms: int) -> None:
        engine = host.engines.get(order.incarnation)
        verdict = None
        if engine is None or not engine.alive:
            verdict = "gone"
        elif self.faults.hits("idle_silent"):
            verdict = "silent"
        elif not engine.entered and not self.faults.hits("idle_busy"):
            verdict = "idle"
        elif self.now >= ends_at_ms:
            verdict = "busy"
        if verdict is None:
            self.later(1_000, lambda: self._await_idle(host, order, ends_at_ms))
        else:
            self._answer(order, lambda: e.IdleGateEnded(**self._at(order), verdict=verdict), 1)

    def _terminate(self, host: Host, order: o.Terminate) -> None:
        host.fenced.add(order.incarnation)
        engine = host.engines.get(order.incarnation)
        if engine is not None and order.incarnation in host.forgotten and engine.alive:
            unproven = "this host has no record of it; a process is alive"
            self._answer(order, lambda: e.TerminateUnproven(**self._at(order), reason=unproven), 50)
            return
        if engine is not None:
            engine.ending = True

        def kill() -> None:
            if engine is not None and engine.alive:
                if engine.unkillable:
                    self._answer(
                        order, lambda: e.TerminateUnproven(**self._at(order), reason="it survives SIGKILL"), 30_000
                    )
                    return
                self._launch_ended(engine, "lifecycle_conflict", "stopped while it was starting")
                self._die(engine, news=False)
            proof = self._shown_gone(host, order.incarnation, order.processes)
            self._answer(order, lambda: e.Terminated(**self._at(order), proof=proof))

        self.later(self.between(5, 4_000), kill)

    def _probe(self, host: Host, order: o.Probe) -> None:
        engine = host.engines.get(order.incarnation)
        if self.faults.hits("probe_mute"):
            self._answer(order, lambda: e.Probed(**self._at(order), reason="it does not answer"), 5_000)
            return
        if engine is None:
            host.fenced.add(order.incarnation)
        if engine is None or not engine.alive:
            proof = self._shown_gone(host, order.incarnation, order.processes)
            self._answer(order, lambda: e.Probed(**self._at(order), gone=proof, reason="nothing of it is left"))
            return
        if order.incarnation in host.forgotten:
            self._answer(order, lambda: e.Probed(**self._at(order), reason="not watched here"))
            return
        same, usable, canary, resident = self._same(engine), None, None, None
        if engine.state == "ready" and not engine.moving and not order.parked and not engine.woken_wrong:
            usable = self._usable(engine)
            if order.canary is not None:
                canary = Canary(incarnation=engine.incarnation, expected=order.canary, actual="42")
        if engine.state == "parked" and not engine.moving and order.parked:
            resident = self._resident(engine, self.now - 1)
        self._answer(
            order,
            lambda: e.Probed(
                **self._at(order), same=same, usable=usable, canary=canary, resident=resident, reason=engine.state
            ),
        )

    def _release(self, host: Host, order: o.Release) -> None:
        engine = host.engines.get(order.incarnation)
        if engine is None or not engine.alive:
            self._answer(order, self._lost(order, "the engine is gone"))
            return
        assert not engine.work, f"36: released under work: {list(engine.work)}"
        if self.faults.hits("park_refused_unsent"):
            unsent = Unsent(incarnation=engine.incarnation, refused_before_sending=True)
            refused = lambda: e.ParkRefused(  # noqa: E731
                **self._at(order), code="host_capability_missing", reason="not declared", unsent=unsent
            )
            self._answer(order, refused)
            return
        if self.faults.hits("park_refused"):
            refused = lambda: e.ParkRefused(**self._at(order), code="unavailable", reason="not quiescent")  # noqa: E731
            self._answer(order, refused)
            return
        engine.moving = True
        began = self.now
        self._hold(engine, order.plan.at(Phase.PARKING))

        def parked() -> None:
            engine.moving = False
            if not engine.alive:
                self._answer(order, self._lost(order, "the engine ended meanwhile"))
                return
            if self.faults.hits("park_dies"):
                self._die(engine)
                self._answer(order, self._lost(order, "the engine ended meanwhile"))
                return
            if self.faults.hits("park_left"):
                self._answer(order, self._lost(order, "it is still resident"))
                return
            engine.state = "parked"
            self._hold(engine, order.plan.at(Phase.PARKED))
            quiet = Quiet(
                incarnation=engine.incarnation,
                gate_closed_at_ms=order.gate_closed_at_ms,
                router_in_flight=0,
                running=0,
                waiting=0,
                read_at_ms=Millis(began),
            )
            same, resident = self._same(engine), self._resident(engine, began)
            self._answer(order, lambda: e.ParkConfirmed(**self._at(order), quiet=quiet, same=same, resident=resident))

        self.later(self.between(100, 5_000), parked)

    def _restore(self, host: Host, order: o.Restore) -> None:
        engine = host.engines.get(order.incarnation)
        if engine is None or not engine.alive:
            failed = lambda: e.WakeFailed(**self._at(order), code="engine_error", reason="the engine is gone")  # noqa: E731
            self._answer(order, failed)
            return
        engine.moving = True
        began = self.now
        self._hold(engine, engine.model.plan.at(Phase.WAKE))

        def awake() -> None:
            engine.moving = False
            if not engine.alive:
                self._answer(order, self._lost(order, "the engine ended meanwhile"))
                return
            if self.faults.hits("wake_fails"):
                failed = lambda: e.WakeFailed(**self._at(order), code="engine_error", reason="no memory")  # noqa: E731
                self._answer(order, failed)
                return
            engine.state = "ready"
            self._hold(engine, engine.model.plan.at(Phase.READY))
            if self.faults.hits("wake_mismatch"):
                engine.woken_wrong = True
                wrong = lambda: e.WakeFailed(  # noqa: E731
                    **self._at(order), code="wake_mismatch", reason="!!!! is not 42", mismatch=True
                )
                self._answer(order, wrong)
                return
            at = Millis(self.now)
            back = Back(
                incarnation=engine.incarnation,
                restored_at_ms=Millis(began),
                sampled_at_ms=at,
                fresh_until_ms=Millis(at + 5_000),
                recorded_at_ms=at,
            )
            canary = None
            if not self.faults.hits("wake_mute"):
                canary = Canary(incarnation=engine.incarnation, expected=order.canary or "42", actual="42")
            usable, same = self._usable(engine), self._same(engine)
            self._answer(
                order,
                lambda: e.WakeConfirmed(**self._at(order), back=back, usable=usable, canary=canary, same=same),
            )

        self.later(self.between(100, 5_000), awake)

    # --- hosts: proofs and ends ------------------------------------------------------------------------

    def _usable(self, engine: Engine) -> Usable:
        return Usable(incarnation=engine.incarnation, answer_chars=3, probed_at_ms=Millis(self.now))

    def _same(self, engine: Engine) -> SameEngine:
        return SameEngine(
            incarnation=engine.incarnation,
            recorded=engine.processes,
            alive=frozenset(engine.processes),
            strangers=0,
            observed_at_ms=Millis(self.now),
        )

    def _resident(self, engine: Engine, released_at_ms: int) -> dict[Domain, Resident]:
        return {
            RAM: Resident(
                incarnation=engine.incarnation,
                resident_bytes=engine.held_bytes,
                budget_bytes=engine.model.plan.at(Phase.PARKED).on(RAM),
                released_at_ms=Millis(released_at_ms),
                sampled_at_ms=Millis(self.now + 1),
            )
        }

    def _never(self, incarnation: Incarnation) -> NeverLaunched:
        return NeverLaunched(incarnation=incarnation, fenced=True, observed_at_ms=Millis(self.now))

    def _gone(self, engine: Engine) -> Gone:
        return Gone(
            incarnation=engine.incarnation,
            processes=engine.processes,
            absent=frozenset(engine.processes),
            group_empty=True,
            observed_at_ms=Millis(self.now),
        )

    def _shown_gone(self, host: Host, incarnation: Incarnation, processes: tuple[ProcessIdentity, ...]) -> GoneProof:
        engine = host.engines.get(incarnation)
        assert engine is None or not engine.alive
        if engine is None and not processes:
            return self._never(incarnation)
        known = processes or (engine.processes if engine is not None else ())
        if known and known[0].boot_id != host.boot_id:
            return Rebooted(
                incarnation=incarnation,
                recorded_boot_id=known[0].boot_id,
                present_boot_id=host.boot_id,
                observed_at_ms=Millis(self.now),
            )
        absent = frozenset(known) | frozenset(engine.processes if engine is not None else ())
        return Gone(
            incarnation=incarnation,
            processes=known,
            absent=absent,
            group_empty=True,
            observed_at_ms=Millis(self.now),
        )

    def _die(self, engine: Engine, *, news: bool = True) -> None:
        """Every process of it ends. Its host says so if nobody ended it on purpose."""
        if not engine.alive:
            return
        if news and engine.launch is not None:  # a launch in progress tells by its own outcome
            self._launch_ended(engine, "launch_failed", "it exited")
            return
        engine.state = "gone"
        engine.held_bytes = Bytes(0)
        engine.work.clear()
        engine.entered.clear()
        for client in [
            one for one in self.clients.values() if one.engine is engine and one.stage in ("sent", "streaming")
        ]:
            self.later(self.between(1, 50), lambda client=client: self._upstream_lost(client), mortal=True)
        if news and not engine.ending:
            self._exit_news(engine, self.rng.choice((Role.API, Role.WORKER)))

    def _exit_news(self, engine: Engine, role: Role) -> None:
        def report() -> None:
            if engine.host.online:
                self.tell(
                    e.EngineExited(
                        now_ms=Millis(self.now),
                        incarnation=engine.incarnation,
                        role=role,
                        status=1,
                        reason="segmentation fault",
                    )
                )

        self.later(self.between(1, 300), report, mortal=True)

    # --- the router -----------------------------------------------------------------------------------

    def ask(
        self, route: str, *, stream: bool = True, hangs_up_in_ms: int | None = None, answer_ms: int | None = None
    ) -> Client:
        """One client asks `route`."""
        self._ids += 1
        request = RequestId(f"r{self._ids:06d}")
        client = self.clients[request] = Client(request, route, stream, self.now)
        client.enters_at_ms = answer_ms or 0
        if hangs_up_in_ms is not None:
            self.later(hangs_up_in_ms, lambda: self.hang_up(client))
        self.tell(
            e.RequestArrived(
                now_ms=Millis(self.now), request=request, route=route, api="chat", stream=stream, body_bytes=1_000
            )
        )
        return client

    def hang_up(self, client: Client) -> None:
        """The client leaves, wherever its request stands."""
        if client.told is not None:
            return
        client.told = "gone"
        self.tell(e.ClientGone(now_ms=Millis(self.now), request=client.request, reason="the client hung up"))

    def _end(self, client: Client, how: str) -> None:
        """The one answer that a client gets."""
        if client.told == "gone" or client.cut:
            return
        assert client.told is None, f"31: {client.request} was told {client.told}, and now {how}"
        client.told = how

    def _route(self, order: o.RouterOrder) -> None:
        client = self.clients.get(order.request)
        match order:
            case o.Admit():
                assert client is not None
                assert client.stage == "waiting", f"{order.request} is admitted at {client.stage}"
                client.stage = "placed"
                client.served_by = order.incarnation
                if self.faults.hits("hang_up") and self.rng.random() < 0.1:
                    self.later(self.between(0, 10), lambda: self.hang_up(client))
                self.later(self.between(0, 20), lambda: self._dispatch(client, order), mortal=True)
            case o.Answer():
                assert client is not None
                client.stage = "over"
                self._end(client, order.code)
            case o.Cut():
                assert client is not None
                self._end(client, order.code)
                client.cut = True
                self.later(self.between(0, 30), lambda: self._abandon(client), mortal=True)
            case o.Abort():
                self._abort(order)
            case o.Settled():
                self._settled(order)
            case _:
                raise AssertionError(f"no router takes {order}")

    def _dispatch(self, client: Client, order: o.Admit) -> None:
        """Connect and send; the first byte is told before it leaves."""
        if client.stage != "placed" or client.served_by != order.incarnation:
            return
        at, engine = Millis(self.now), self.hosts[order.host].engines.get(order.incarnation)
        serves = engine is not None and engine.state == "ready" and not engine.ending
        if engine is not None and engine.alive:
            assert not engine.moving, f"29: {client.request} goes to a model that parks or wakes"
            assert engine.state != "parked", f"29: {client.request} goes to a parked model"
        if engine is None or not serves or self.faults.hits("refused_connection"):
            client.stage = "waiting"
            self.tell(e.RequestNotAccepted(now_ms=at, request=client.request, reason="connection refused"))
            return
        client.stage, client.engine = "sent", engine
        engine.work[client.request] = None
        takes, client.enters_at_ms = client.enters_at_ms, self.now + self.between(0, 300)
        self.tell(e.RequestSent(now_ms=at, request=client.request))
        if self.faults.hits("refused_connection") and self.rng.random() < 0.1:
            self.later(1, lambda: self._refused_late(client, engine))
            return
        self.later(client.enters_at_ms - self.now, lambda: self._enter(client, engine, takes))

    def _refused_late(self, client: Client, engine: Engine) -> None:
        """The engine closed a kept connection under the first byte: nobody knows whether it took it."""
        self._done(engine, client.request)
        if client.stage == "sent":
            client.stage = "over"
            self.tell(e.RequestNotAccepted(now_ms=Millis(self.now), request=client.request, reason="reset"))

    def _enter(self, client: Client, engine: Engine, answer_ms: int) -> None:
        """It reaches the engine's queue, even if it was cut on the way."""
        if client.request not in engine.work or not engine.alive:
            return
        engine.entered.add(client.request)
        takes = answer_ms or self.between(1, 2 * engine.model.answer_ms)
        if self.faults.hits("engine_mute"):
            return
        if self.faults.hits("rejects"):
            self.later(takes // 4, lambda: self._tells(client, engine, "rejected"))
        elif self.faults.hits("errors"):
            self._outputs(client, engine, takes)
            self.later(takes * 3 // 4, lambda: self._tells(client, engine, "errored"))
        elif self.faults.hits("upstream_lost"):
            self._outputs(client, engine, takes)
            self.later(takes * 3 // 4, lambda: self._upstream_lost(client), mortal=True)
        else:
            self._outputs(client, engine, takes)
            self.later(takes, lambda: self._finish(client, engine))

    def _outputs(self, client: Client, engine: Engine, takes_ms: int) -> None:
        if client.stream and self.rng.random() < 0.8:
            self.later(takes_ms // 2, lambda: self._first_output(client, engine))

    def _first_output(self, client: Client, engine: Engine) -> None:
        if client.stage == "sent" and client.engine is engine and engine.alive:
            client.stage = "streaming"
            self.tell(e.FirstOutput(now_ms=Millis(self.now), request=client.request))

    def _finish(self, client: Client, engine: Engine) -> None:
        if not engine.alive:
            return
        self._done(engine, client.request)
        if client.stage in ("sent", "streaming") and client.engine is engine:
            if client.told is None:
                self.served[engine.incarnation] = self.served.get(engine.incarnation, 0) + 1
            self._end(client, "ok")
            client.stage = "over"
            self.tell(e.RequestFinished(now_ms=Millis(self.now), request=client.request))

    def _done(self, engine: Engine, request: RequestId) -> None:
        engine.work.pop(request, None)
        engine.entered.discard(request)

    def _tells(self, client: Client, engine: Engine, what: str) -> None:
        """The engine answers with an error; whole ones leave no work behind."""
        if client.stage not in ("sent", "streaming") or client.engine is not engine or not engine.alive:
            return
        if what == "rejected":
            self._done(engine, client.request)
            self._end(client, "rejected")
            client.stage = "over"
            self.tell(e.EngineRejected(now_ms=Millis(self.now), request=client.request, status=400))
        else:
            self.tell(e.EngineErrored(now_ms=Millis(self.now), request=client.request, reason="CUDA error"))

    def _upstream_lost(self, client: Client) -> None:
        if client.stage in ("sent", "streaming"):
            engine = client.engine
            assert engine is not None
            self.later(self.between(100, 5_000), lambda: self._done(engine, client.request))  # it notices in time
            self.tell(e.UpstreamLost(now_ms=Millis(self.now), request=client.request, reason="connection reset"))

    def _abandon(self, client: Client, *, report: bool = True) -> None:
        """Half-close the upstream: the engine notices after a while, drops the work and closes too."""
        if client.stage not in ("sent", "streaming") or client.engine is None:
            client.stage = "over" if client.stage != "waiting" else client.stage
            return
        engine, cut_at = client.engine, self.now
        client.stage = "over"
        deaf = self.faults.hits("eof_mute")

        def noticed() -> None:
            if not engine.alive:
                return
            self._done(engine, client.request)
            if report and not deaf and engine.model.traits.eof_proves_end:
                self.later(
                    0,
                    lambda: self.tell(
                        e.UpstreamEnded(
                            now_ms=Millis(self.now),
                            request=client.request,
                            half_closed_at_ms=Millis(cut_at),
                            eof_at_ms=Millis(self.now),
                        )
                    ),
                    mortal=True,
                )

        self.later(max(self.between(10, 3_000), client.enters_at_ms - self.now + 50), noticed, mortal=False)

    def _abort(self, order: o.Abort) -> None:
        client = self.clients.get(order.request)
        mute = self.faults.hits("abort_mute")
        engine = self.hosts[order.host].engines.get(order.incarnation)

        def answer() -> None:
            now = Millis(self.now)
            if mute or engine is None or not engine.alive:
                self.tell(e.AbortUnanswered(now_ms=now, request=order.request))
                if engine is not None and engine.alive and self.rng.random() < 0.5:
                    self.later(self.between(1, 5_000), acknowledge, mortal=True)
                return
            acknowledge()

        def acknowledge() -> None:
            now = Millis(self.now)
            if engine is None or not engine.alive:
                return
            self._done(engine, order.request)
            proof = Aborted(incarnation=order.incarnation, request=order.request, acknowledged_at_ms=now)
            self.tell(e.AbortAcknowledged(now_ms=now, request=order.request, proof=proof))

        waits = max(0, client.enters_at_ms - self.now) + 1 if client is not None else 1
        self.later(waits + self.between(1, 1_000), answer, mortal=True)

    def _settled(self, order: o.Settled) -> None:
        client = self.clients.get(order.request)
        assert client is not None
        assert not client.settled, f"31: {order.request} settles twice"
        client.settled = True
        if client.stage in ("waiting", "placed"):
            client.stage = "over"  # whoever leaves before anything was sent does not send it either
        engine = client.engine
        if engine is not None and engine.incarnation == order.incarnation and engine.alive:
            assert order.request not in engine.work, (
                f"35: {order.request} settles as {order.outcome} while its engine works on it"
            )
        if client.told is None and order.outcome in ("failed", "expired", "refused", "cut"):
            client.stage = "over"  # its Answer or Cut is of this very step

    # --- operators --------------------------------------------------------------------------------------

    def command(self, body: object = "") -> e.Command:
        self._ids += 1
        return e.Command(
            key=f"key{self._ids}",
            digest=str(body),
            operation=OperationId(f"op{self._ids}"),
            switch=SwitchId(f"unused{self._ids}"),
        )

    def give(self, event: Any) -> str:
        """Give an operator's command; its reply comes in `replies` once it is durable."""
        self.commands.append(event)
        self.tell(event)
        return event.command.key  # type: ignore[no-any-return]

    def deploy(self, model: Model, **options: Any) -> DeploymentId:
        """Create a deployment on every host, unless the model names some."""
        if not model.hosts:
            model = attrs.evolve(model, hosts=tuple(self.hosts))
        self._ids += 1
        identity = DeploymentId(f"d{self._ids}-{model.name}")
        self.models[identity] = {1: model}
        self.give(
            e.DeployAsked(
                now_ms=Millis(self.now),
                command=self.command((model, identity)),
                deployment=identity,
                spec=model.spec,
                **options,
            )
        )
        return identity

    def revise(self, identity: DeploymentId, model: Model, *, revision: int | None = None, **options: Any) -> str:
        """Change a deployment; `revision` None names the current one."""
        row = self.world.book.deployments.get(identity)
        current = row.state.revision if row is not None else 0
        if not model.hosts:
            model = attrs.evolve(model, hosts=tuple(self.hosts))
        expected = current if revision is None else revision
        if row is not None and expected == current:
            self.models[identity].setdefault(current + 1, model)
            self.models[identity][current + 1] = model
        return self.give(
            e.DeployAsked(
                now_ms=Millis(self.now),
                command=self.command(model),
                deployment=identity,
                spec=model.spec,
                expected_revision=expected,
                **options,
            )
        )

    def start(self, identity: DeploymentId, **options: Any) -> str:
        return self.give(e.StartAsked(now_ms=Millis(self.now), command=self.command(), deployment=identity, **options))

    def stop(self, identity: DeploymentId, **options: Any) -> str:
        return self.give(e.StopAsked(now_ms=Millis(self.now), command=self.command(), deployment=identity, **options))

    def park(self, identity: DeploymentId, **options: Any) -> str:
        return self.give(e.ParkAsked(now_ms=Millis(self.now), command=self.command(), deployment=identity, **options))

    def delete(self, identity: DeploymentId, *, stop: bool = False) -> str:
        return self.give(e.DeleteAsked(now_ms=Millis(self.now), command=self.command(), deployment=identity, stop=stop))

    def drain(self, host: HostId, *, undrain: bool = False) -> str:
        return self.give(e.DrainAsked(now_ms=Millis(self.now), command=self.command(), host=host, undrain=undrain))

    # --- truth ------------------------------------------------------------------------------------------

    def assert_charged(self, engine: Engine) -> None:
        """4, 12, 25: what a process may hold is charged, in the world and on the disk."""
        owner = engine.incarnation.lane.owner
        for where, held in (
            ("world", self.world.book.ledger.holding(owner)),
            ("store", self.durable.get(("ledger", owner))),
        ):
            assert held is not None, f"{engine.incarnation} is {engine.state} and not charged in the {where}"
            assert held.generation == engine.incarnation.generation, f"another run is charged in the {where}: {held}"  # type: ignore[attr-defined]
            assert engine.held_bytes <= held.on(RAM), (  # type: ignore[attr-defined]
                f"{engine.incarnation} holds {engine.held_bytes} and is charged {held.on(RAM)} in the {where}"  # type: ignore[attr-defined]
            )

    def assert_truth(self) -> None:
        """Every engine that lives is charged, and together they stay within what a host may give."""
        for host in self.hosts.values():
            for engine in host.engines.values():
                if engine.alive:
                    self.assert_charged(engine)
            assert host.held_bytes <= host.policy.domains[RAM].managed_bytes, f"{host.policy.name} holds too much"

    def engines(self, name: str | None = None) -> list[Engine]:
        """Engines that live, of one model or of all."""
        return [
            engine
            for host in self.hosts.values()
            for engine in host.engines.values()
            if engine.alive and (name is None or engine.model.name == name)
        ]

    def lane(self, identity: DeploymentId, index: int = 0) -> Any:
        """The row of an instance."""
        return self.world.book.instances[Lane(identity, index)]

    def reply(self, key: str) -> o.Reply:
        return self.replies[key]


def _shown(thing: object) -> str:
    """A short form for the log of a failure."""
    parts = [
        f"{getattr(thing, name)}"
        for name in ("request", "incarnation", "deployment", "token", "code", "outcome")
        if getattr(thing, name, None) is not None
    ]
    return f"{type(thing).__name__}({' '.join(parts)})"


def shell(seed: int = 0, **options: Any) -> Shell:
    """A shell without faults."""
    rng = random.Random(seed)
    return Shell(rng=rng, faults=Faults(rng), **options)
