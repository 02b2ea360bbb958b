"""A shell around the world for tests: clock, store, driver, sessions, operators; on one seed, in virtual time.

Ground truth is kept here and in `world_values`, and never asked of the world: which processes exist, what
they hold, which requests they work on, what each client was told. The shell is faithful: an order to a host is
performed after its commit, one at a time per lane, and answered once (late, twice or never only as a fault);
a router reports in order; a dead controller forgets. `world_hosts` performs orders, `world_router` serves.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import world_hosts
import world_router
from world_values import (
    RAM,
    Client,
    Engine,
    Faults,
    Host,
    Model,
    gib,
    policy,
)

from capyctl.control import events as e
from capyctl.control import orders as o
from capyctl.control.book import Settings
from capyctl.control.records import Record
from capyctl.control.world import Step, World
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.types import (
    Bytes,
    DeploymentId,
    Domain,
    HostId,
    Incarnation,
    Lane,
    Millis,
    OperationId,
    RequestId,
    SwitchId,
    Token,
)
from capyctl.ledger.types import HostPolicy, Observation

START_MS = 1_000_000
SILENT_MS = 18_000  # after which a host says that an engine answers nothing
PULSES_PER_BUILD = 40  # after so many samples a host has other engines under the same names
TICKS_MAX = 5  # a look that changed something may ask for one more at once
PROBE_LIMIT_MS = 180_000
HOST_ANSWER_MS = 120_000  # how long after an order's own bound the driver still waits for its host


class Crashed(Exception):
    """The controller died at a chosen boundary."""


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
    dispatch_ms: int = 20  # how long a router task takes at most from its place to the first byte
    attributed: bool = True  # samples name what each owner holds
    # truth
    now: int = START_MS
    hosts: dict[HostId, Host] = attrs.field(factory=dict)
    models: dict[DeploymentId, dict[int, Model]] = attrs.field(factory=dict)
    look_ms: dict[DeploymentId, int] = attrs.field(factory=dict)  # how long a look at its files takes
    spoiled: set[DeploymentId] = attrs.field(factory=set)  # whose files changed since they were measured
    spoiled_code: str = "checkpoint_mismatch"  # what a launch of those is refused with
    digests: dict[DeploymentId, str] = attrs.field(factory=dict)  # of files that changed
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
    _drawn: int = 0
    _uncommitted: list[tuple[e.Event, Step]] = attrs.field(factory=list)
    _behind: list[Record] = attrs.field(factory=list)
    _lanes: dict[Lane, deque[o.HostOrder]] = attrs.field(factory=dict)
    _in_flight: dict[Token, o.HostOrder] = attrs.field(factory=dict)
    _fed: deque[e.Event] = attrs.field(factory=deque)
    _stepping: bool = False
    _ticks: int = 0
    quiet: bool = False  # nothing new is begun by operators, clients or faults

    # --- beginning -------------------------------------------------------------------------------

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

    # --- time ------------------------------------------------------------------------------------

    def number(self) -> int:
        """One that was not drawn before."""
        self._drawn += 1
        return self._drawn

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

    # --- the driver ------------------------------------------------------------------------------

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
                world_router.route(self, order)
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
                if record.kind == "request":
                    self._behind.append(record)  # written behind the answers, into a file of their own
                else:
                    self._write(record)
        if self._behind:
            self.later(self.between(0, 50), self._write_behind, mortal=True)
        self._boundary()
        for _, step in batch:
            for order in step.orders:
                if not isinstance(order, o.RouterOrder):
                    self._begin(order)
                    self._boundary()

    def _write(self, record: Record) -> None:
        if record.value is None:
            self.durable.pop((record.kind, record.key), None)
        else:
            self.durable[record.kind, record.key] = record.value

    def _write_behind(self) -> None:
        for record in self._behind:
            self._write(record)
        self._behind.clear()

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
            case o.StopFetching():
                pass  # the measurement that it belongs to ends by itself here
            case o.PruneLogs(kept=kept):
                rows = self.world.book.deployments.items()
                assert {one for one, row in rows if row.created_at_ms < order.as_of_ms} <= set(kept)
            case o.ReadLoad(incarnation=incarnation):
                self.later(self.between(0, 5), lambda: self._read_load(incarnation), mortal=True)
            case o.ReadMemory(host=host):
                self.later(self.between(1, 5), lambda: self.read_memory(host), mortal=True)
            case o.VerifyStart():
                takes = self.look_ms.get(order.deployment) or self.between(1, 50)
                self.later(takes, lambda: self._verified(order), mortal=True)
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
                digest=self.digests.get(order.deployment) or self._digest(order.deployment, model),
                weight_bytes=gib(model.ready_gib),
                plans=dict.fromkeys(model.hosts, model.plan),
                residency=model.settles,
            )
        )

    def _digest(self, identity: DeploymentId, model: Model) -> str:
        """Another document may name other files; the same one names the same, unless `digests` says otherwise."""
        same = attrs.evolve(model, instances=1)
        known = self.models[identity].items()
        return f"sha256:{model.name}{min(number for number, one in known if attrs.evolve(one, instances=1) == same)}"

    def _verified(self, order: o.VerifyStart) -> None:
        self.tell(
            e.StartVerified(
                now_ms=Millis(self.now),
                deployment=order.deployment,
                revision=order.revision,
                digest=order.digest,
                host=order.host,
                looked=self.hosts[order.host].online and not self.faults.hits("order_lost"),
                **(
                    {"code": "checkpoint_mismatch", "reason": "its files changed"}
                    if order.deployment in self.spoiled or self.faults.hits("files_changed")
                    else {}
                ),
            )
        )

    def _send(self, order: o.HostOrder) -> None:
        host = self.hosts[order.host]
        self._in_flight[order.token] = order
        if not host.online:
            self.answer(order, e.OrderLost, after_ms=1, reason="the session is down")
        else:
            self.later(_patience_ms(order, self.now), lambda: self._give_up(order), mortal=True)
            world_hosts.perform(self, host, order)

    def _give_up(self, order: o.HostOrder) -> None:
        """The driver waits for a host no longer than this."""
        if self._in_flight.pop(order.token, None) is not None:
            self.tell(e.OrderLost(**self.at(order), reason="the host did not answer within the limit of the order"))
            self._next(order.incarnation.lane)

    def answer(self, order: o.HostOrder, kind: type[e.Outcome], *, after_ms: int = 0, **facts: Any) -> None:
        """Answer an order once; a controller that died, or a session that ended, hears nothing."""
        if self.faults.hits("order_silent"):
            bound = getattr(order, "deadline_ms", self.now + 60_000)
            after_ms = max(0, bound - self.now) + HOST_ANSWER_MS
            kind, facts = e.OrderLost, {"reason": "not answered within its limit"}
        elif self.faults.hits("order_late"):
            bound = getattr(order, "deadline_ms", self.now + 60_000)
            after_ms = max(0, bound - self.now) + self.between(0, HOST_ANSWER_MS)
        elif self.faults.hits("order_lost"):
            kind, facts = e.OrderLost, {"reason": "the answer was lost"}

        def deliver() -> None:
            if self._in_flight.pop(order.token, None) is None:
                return  # told lost already, when the session ended
            self.tell(kind(**self.at(order), **facts))
            if self.faults.hits("answer_twice"):
                again = self.between(0, 90_000)
                self.later(again, lambda: self.tell(kind(**self.at(order), **facts)), mortal=True)
            self._next(order.incarnation.lane)

        self.later(after_ms, deliver, mortal=True)

    def _next(self, lane: Lane) -> None:
        queue = self._lanes[lane]
        queue.popleft()
        if queue:
            self._send(queue[0])
        else:
            del self._lanes[lane]

    def at(self, order: o.HostOrder) -> dict[str, Any]:
        return {"now_ms": Millis(self.now), "incarnation": order.incarnation, "token": order.token}

    def crash(self) -> None:
        """The controller dies: what was not committed, not sent or not heard is gone; connections break."""
        self.crashes += 1
        self.crash_at = None
        self.log.append(f"{self.now - START_MS:>9} === crash ===")
        self._stepping = False
        self._fed.clear()
        self._uncommitted.clear()
        self._behind.clear()
        self._lanes.clear()
        self._in_flight.clear()
        for client in self.clients.values():
            client.settled = False  # a place whose end was not stored yet ends once more
            if client.stage != "over":
                if client.told is None:
                    client.told = "crashed"
                world_router.abandon(self, client, report=False)
                client.stage = "over"
        self._start()

    def set_back(self, by_ms: int) -> None:
        """The controller ends, the machine's clock is set back, and another one starts."""
        self.now -= by_ms
        self._heap = [(at - by_ms, order, deed) for at, order, deed in self._heap]
        self.crash()

    # --- hosts: sessions and samples -------------------------------------------------------------

    def drop_session(self, host: Host) -> None:
        """The session ends: in-flight orders are lost to the controller, the host goes on."""
        if not host.online:
            return
        host.online = False
        self.tell(e.HostOffline(now_ms=Millis(self.now), host=host.policy.host, reason="dropped"))
        for order in [one for one in self._in_flight.values() if one.host == host.policy.host]:
            del self._in_flight[order.token]

            def deliver(order: o.HostOrder = order) -> None:
                self.tell(e.OrderLost(**self.at(order), reason="the session ended"))
                self._next(order.incarnation.lane)

            self.later(0, deliver, mortal=True)
        self.later(self.between(200, 90_000), lambda: self._connect(host), mortal=True)

    def reboot(self, host: Host) -> None:
        """The machine restarts: every process is gone, and its boot id is new."""
        self.drop_session(host)
        host.boot += 1
        for engine in list(host.engines.values()):
            world_hosts.die(self, engine, news=False)

    def exit(self, engine: Engine, *, news: bool = True) -> None:
        """Every process of an engine ends by itself; without `news` nobody who watches is there."""
        world_hosts.die(self, engine, news=news)

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
            host.pulses += 1
            if host.pulses % PULSES_PER_BUILD == 0:
                built = {"p": f"build {host.pulses // PULSES_PER_BUILD}"}
                self.tell(e.ProfilesPublished(now_ms=Millis(self.now), host=host.policy.host, installations=built))
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
                residents[engine.incarnation.lane.owner] = Bytes(engine.held_bytes + engine.more_bytes)
        sample = Observation(
            capacity_bytes=host.policy.domains[RAM].capacity_bytes,
            available_bytes=Bytes(max(0, free)),
            seen_at_ms=Millis(seen_at + (600_000 if bad else 0)),
            residents=residents,
        )
        domains = {Domain("other"): sample} if bad and self.rng.random() < 0.3 else {RAM: sample}
        self.tell(e.Observed(now_ms=Millis(self.now), host=host.policy.host, domains=domains))

    def read_memory(self, host: HostId) -> None:
        if self.hosts[host].online:
            self._observe(self.hosts[host])

    def _read_load(self, incarnation: Incarnation) -> None:
        for host in self.hosts.values():
            engine = host.engines.get(incarnation)
            if engine is not None and host.online:
                self._gauge(engine)

    def _gauge(self, engine: Engine) -> None:
        """A load reading, where anybody may wait for one; or the word that there is none."""
        if engine.alive and engine.hung_at_ms is not None:
            if self.now - engine.hung_at_ms >= SILENT_MS and engine.host.online:
                self.tell(e.EngineSilent(now_ms=Millis(self.now), incarnation=engine.incarnation, reason="it is mute"))
            return
        if engine.state != "ready" or engine.moving or not engine.model.traits.idle_signal:
            return
        lane = engine.incarnation.lane
        row = self.world.book.instances.get(lane)
        draining = row is not None and row.phase is ResidencyPhase.DRAINING_TO_PARK
        busy = engine.work or engine.foreign or self.world.book.traffic.on(lane)
        if not (busy or draining or self.rng.random() < 0.1):
            return
        running, read_at = len(engine.entered) + engine.foreign, self.now

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

    # --- clients ------------------------------------------------------------------------------------

    def ask(self, route: str, **options: Any) -> Client:
        """One client asks `route`; see `world_router.ask`."""
        return world_router.ask(self, route, **options)

    def hang_up(self, client: Client) -> None:
        """The client leaves, wherever its request stands."""
        world_router.hang_up(self, client)

    # --- operators -------------------------------------------------------------------------------

    def command(self, body: object = "") -> e.Command:
        number = self.number()
        return e.Command(
            key=f"key{number}",
            digest=str(body),
            operation=OperationId(f"op{number}"),
            switch=SwitchId(f"unused{number}"),
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
        identity = DeploymentId(f"d{self.number()}-{model.name}")
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

    def prepare(self, *identities: DeploymentId, **options: Any) -> str:
        """Prepare several with one command, one after the other."""
        command = self.command(identities)
        members = tuple(
            e.Member(deployment=one, operation=OperationId(f"{command.operation} {one}")) for one in identities
        )
        return self.give(e.PreinitializeAsked(now_ms=Millis(self.now), command=command, members=members, **options))

    def delete(self, identity: DeploymentId, *, stop: bool = False) -> str:
        return self.give(e.DeleteAsked(now_ms=Millis(self.now), command=self.command(), deployment=identity, stop=stop))

    def drain(self, host: HostId, *, undrain: bool = False) -> str:
        return self.give(e.DrainAsked(now_ms=Millis(self.now), command=self.command(), host=host, undrain=undrain))

    # --- truth -----------------------------------------------------------------------------------

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
            held_bytes = sum(engine.held_bytes for engine in host.engines.values())
            assert held_bytes <= host.policy.domains[RAM].managed_bytes, f"{host.policy.name} holds too much"

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


def _patience_ms(order: o.HostOrder, now_ms: int) -> int:
    match order:
        case o.Launch() | o.Restore():
            return max(0, order.deadline_ms - now_ms) + HOST_ANSWER_MS
        case o.AwaitIdle() | o.Terminate():
            return order.limit_ms + HOST_ANSWER_MS
        case _:
            return PROBE_LIMIT_MS


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
