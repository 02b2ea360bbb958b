"""The world's contents, and the one way to change them: every row that changes is noted for the store.

The book holds machines' states in plain dicts. A step replaces the entries that it touches and nothing
else. What is derived (routes, queues, deadlines) is rebuilt when a world is loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from capyctl.control.due import Due
from capyctl.control.events import LoadReported
from capyctl.control.orders import Order, Receipt
from capyctl.control.records import (
    Counter,
    DeploymentRow,
    HostRow,
    InstanceRow,
    Move,
    ReceiptRow,
    Record,
)
from capyctl.control.traffic import QueueLimits, Traffic
from capyctl.fsm import deployment, operation, request, switch
from capyctl.fsm.types import (
    DeploymentId,
    Domain,
    Generation,
    HostId,
    Incarnation,
    Lane,
    Millis,
    OperationId,
    Phase,
    RequestId,
    SwitchId,
    Token,
)
from capyctl.ledger.charges import Ledger, Shelf
from capyctl.ledger.crowd import Turn
from capyctl.ledger.placement import Tries
from capyctl.ledger.types import Observation

SETTLING = frozenset({deployment.Phase.REVISING, deployment.Phase.DELETING})
"""Deployments in one of these wait for their instances to come to an end."""
LEASED = request.CANCELLING | {request.Phase.ADMITTED}
"""Entering one of these writes the request's row."""


@attrs.frozen(kw_only=True)
class Settings:
    """What the role's document decides for control (config 4, 5.4, 6), all in milliseconds."""

    queue: QueueLimits = attrs.field(factory=QueueLimits)
    admission_window_ms: Millis = Millis(2_000)
    request_deadline_ms: Millis = Millis(1_800_000)
    drain_timeout_ms: Millis = Millis(30_000)
    stop_limit_ms: Millis = Millis(900_000)
    ready_idle_ms: Millis | None = None
    parked_idle_ms: Millis | None = None


@attrs.frozen(kw_only=True)
class Over:
    """In how many samples in a row, of one phase of one run, an owner held more than it is charged on a domain."""

    phase: Phase
    generation: Generation
    times: int
    seen_at_ms: Millis


@attrs.frozen(kw_only=True)
class Question:
    """Could a start with this revision and these files begin on this host? A wake asks by what it was launched with."""

    deployment: DeploymentId
    revision: int
    digest: str
    host: HostId


@attrs.frozen(kw_only=True)
class Verified:
    """When such a question was asked, and whether it was answered with yes."""

    asked_at_ms: Millis
    passed: bool = False
    again_at_ms: Millis | None = None  # the host could not say; asked again then


@attrs.frozen(kw_only=True)
class Refused:
    """A victim that would not give way: until when it is left alone, and why. `idle`: or until it reads idle.

    `answer` is `why` as clients read it.
    """

    until_ms: Millis
    why: str
    answer: str
    idle: bool = False


@attrs.frozen(kw_only=True, eq=False)
class Steps:
    """The starts to try for an instance: as long as they rest on the very same, and would be `at` the same hosts."""

    tries: Tries
    rests_on: tuple[object, ...]
    at: tuple[object, ...]


@attrs.frozen(kw_only=True, eq=False)
class AskedAround:
    """Nobody could give way for a start that was `tried`; `policy`: who was asked at all, `seen`: samples that said no.

    While all of it is the very same, so is the answer.
    """

    tried: tuple[object, ...] | None
    policy: tuple[object, ...]
    seen: Mapping[HostId, Mapping[Domain, Observation] | None]


@attrs.frozen(kw_only=True)
class Owed:
    """An answer that is not given yet, to whoever sent this command, once or several `times`."""

    receipt: Receipt
    operation: OperationId
    until_ms: Millis
    refusable: bool
    times: int = 1


@attrs.define
class Book:
    """Everything the world knows. See `put_*` for changes and `orders`, `changed`, `moves` for what a step did."""

    settings: Settings = attrs.field(factory=Settings)
    # durable rows
    deployments: dict[DeploymentId, DeploymentRow] = attrs.field(factory=dict)
    instances: dict[Lane, InstanceRow] = attrs.field(factory=dict)
    operations: dict[OperationId, operation.State] = attrs.field(factory=dict)
    switches: dict[SwitchId, switch.State] = attrs.field(factory=dict)
    requests: dict[RequestId, request.State] = attrs.field(factory=dict)
    hosts: dict[HostId, HostRow] = attrs.field(factory=dict)
    receipts: dict[str, ReceiptRow] = attrs.field(factory=dict)
    counters: dict[str, int] = attrs.field(factory=dict)
    ledger: Ledger = attrs.field(factory=Ledger.empty)
    # derived, or true of this controller session only
    routes: dict[str, DeploymentId] = attrs.field(factory=dict)
    lanes: dict[DeploymentId, tuple[Lane, ...]] = attrs.field(factory=dict)
    open_operations: dict[DeploymentId, dict[OperationId, None]] = attrs.field(factory=dict)
    preparing: set[OperationId] = attrs.field(factory=set)  # of those, the preinitializations
    past_operations: set[OperationId] = attrs.field(factory=set)  # ended, and not the latest of their deployment
    active_switches: dict[HostId, SwitchId] = attrs.field(factory=dict)
    doubted: set[Lane] = attrs.field(factory=set)  # READY lanes whose gate waits for a proof
    looks: dict[Lane, Token] = attrs.field(factory=dict)  # the probe in flight for each of those
    look_again_at: dict[Lane, Millis] = attrs.field(factory=dict)
    vain: dict[Lane, tuple[int, str]] = attrs.field(factory=dict)  # looks in a row that proved nothing, and why
    over: dict[tuple[str, Domain], Over] = attrs.field(factory=dict)  # owners seen to hold more than they are charged
    silent: dict[Lane, str] = attrs.field(factory=dict)  # engines doubted since they answer nothing, and why
    released_at: dict[Lane, Millis] = attrs.field(factory=dict)  # when a lane's memory last came free
    latest_operation: dict[DeploymentId, OperationId] = attrs.field(factory=dict)
    busy: set[Lane] = attrs.field(factory=set)  # lanes on which something is planned or in progress
    in_phase: dict[object, set[Lane]] = attrs.field(factory=dict)  # the busy ones by their phase
    placed: dict[HostId, set[Lane]] = attrs.field(factory=dict)  # lanes of which processes exist or may, by host
    crowded: set[HostId] = attrs.field(factory=set)  # hosts whose parked set may be over its limits for a switch
    settling: set[DeploymentId] = attrs.field(factory=set)  # those that wait for an end of instances
    named: dict[str, DeploymentId] = attrs.field(factory=dict)  # deployments by name
    wished: set[Lane] = attrs.field(factory=set)  # lanes that somebody wants to serve and that do not yet
    traffic: Traffic = attrs.field(factory=Traffic)
    due: Due = attrs.field(factory=Due)
    online: set[HostId] = attrs.field(factory=set)
    emptying: set[HostId] = attrs.field(factory=set)  # hosts that take nothing more
    seen: dict[HostId, Mapping[Domain, Observation]] = attrs.field(factory=dict)
    installations: dict[HostId, Mapping[str, str]] = attrs.field(factory=dict)  # what each profile of a host runs
    used_at: dict[Lane, Millis] = attrs.field(factory=dict)
    loads: dict[Lane, LoadReported] = attrs.field(factory=dict)
    bodies: dict[RequestId, int] = attrs.field(factory=dict)  # bytes of bodies that wait
    verified: dict[Question, Verified] = attrs.field(factory=dict)  # starts that others give way for
    asked: set[DeploymentId] = attrs.field(factory=set)  # wanted by a request that nothing could be queued for
    running_on: dict[Lane, int] = attrs.field(factory=dict)  # places held on a lane
    draining: set[Lane] = attrs.field(factory=set)  # lanes whose drain is watched
    asked_memory: dict[HostId, Millis] = attrs.field(factory=dict)  # since when it is to be looked at
    asked_idle: dict[Lane, Millis] = attrs.field(factory=dict)  # drains whose engine was asked for its own word, when
    windowed: set[Lane] = attrs.field(factory=set)  # victims of a switch in its window
    moved: set[Lane] = attrs.field(factory=set)  # of those, where a request started or ended since the last pass
    no_room: set[Lane] = attrs.field(factory=set)  # lanes that are stopped because their parked copy had no room
    shy_until: dict[Lane, Millis] = attrs.field(factory=dict)  # lanes that just refused a connection
    proposals: dict[Lane, Any] = attrs.field(factory=dict)  # ledger proposals between "it fits" and the raise
    shortfalls: dict[Lane, Any] = attrs.field(factory=dict)  # why a planned start or wake waits
    evicts_again_at: dict[DeploymentId, Millis] = attrs.field(factory=dict)  # after a switch for it came to nothing
    refused: dict[Lane, Refused] = attrs.field(factory=dict)  # victims that would not give way, and are left alone
    measuring: set[DeploymentId] = attrs.field(factory=set)  # checkpoints that are looked at again
    measured_at: dict[DeploymentId, Millis] = attrs.field(factory=dict)  # when their last look ended
    first_turns: dict[HostId, tuple[Shelf, Turn | None]] = attrs.field(factory=dict)  # who would give way first there
    steps: dict[Lane, Steps] = attrs.field(factory=dict)  # of those that wait for room
    tried: dict[Lane, tuple[object, ...]] = attrs.field(factory=dict)  # on what grounds a start found no room
    asked_around: dict[Lane, AskedAround] = attrs.field(factory=dict)  # on what grounds nobody could give way
    told_short: dict[Lane, str] = attrs.field(factory=dict)  # of those, what its instance was told
    owed: dict[str, Owed] = attrs.field(factory=dict)  # answers to commands, by key
    notices: deque[tuple[Lane, Any]] = attrs.field(factory=deque)  # what instances said, still to be heard
    # of the step being taken
    now_ms: Millis = Millis(0)
    orders: list[Order] = attrs.field(factory=list)
    changed: dict[tuple[str, str], None] = attrs.field(factory=dict)
    moves: list[Move] = attrs.field(factory=list)
    dirty: bool = False
    version: int = 0
    shape: int = 0  # of deployments and instances: another one after each change of their rows

    # --- writing ----------------------------------------------------------------------------------

    def order(self, order: Order) -> None:
        """Give an order out with this step."""
        self.orders.append(order)

    def touch(self, kind: str, key: str) -> None:
        """Note that a row changed."""
        self.changed[kind, key] = None
        self.version += 1
        self.dirty = True

    def put_deployment(self, row: DeploymentRow) -> None:
        identity = row.state.deployment
        before = self.deployments.get(identity)
        if before is not None and before.spec.name != row.spec.name:
            self.named.pop(before.spec.name, None)
        self.named[row.spec.name] = identity
        self.deployments[identity] = row
        self._note_settling(identity)
        self._forget_turns(identity)
        self.touch("deployment", identity)

    def drop_deployment(self, identity: DeploymentId) -> None:
        """Forget a deployment of which no instance is left, and what is remembered of it."""
        row = self.deployments.pop(identity)
        if self.named.get(row.spec.name) == identity:
            del self.named[row.spec.name]
        for route in row.spec.routes:
            if self.routes.get(route) == identity:
                del self.routes[route]
        self.traffic.forget(identity)
        self.measuring.discard(identity)
        self.settling.discard(identity)
        opened, latest = self.open_operations.get(identity, {}), self.latest_operation.get(identity)
        self.preparing -= opened.keys()
        if latest is not None and latest not in opened:
            self.past_operations.add(latest)
        for memo in (self.evicts_again_at, self.measured_at, self.lanes, self.open_operations, self.latest_operation):
            memo.pop(identity, None)
        self.touch("deployment", identity)

    def _note_settling(self, identity: DeploymentId) -> None:
        row = self.deployments.get(identity)
        if row is not None and (row.state.phase in SETTLING or len(self.lanes.get(identity, ())) != row.spec.instances):
            self.settling.add(identity)
        else:
            self.settling.discard(identity)

    def put_instance(self, lane: Lane, row: InstanceRow) -> None:
        before = self.instances.get(lane)
        if before is None:
            self.lanes[lane.deployment] = tuple(sorted((*self.lanes.get(lane.deployment, ()), lane)))
            self._note_settling(lane.deployment)
        else:
            self._forget_turns(lane.deployment)
            self._lift(lane, before)
        self.instances[lane] = row
        self._forget_turns(lane.deployment)
        if row.in_progress:
            self.busy.add(lane)
            self.in_phase.setdefault(row.phase, set()).add(lane)
        else:
            self.busy.discard(lane)
        if row.has_launch and row.run.host is not None:
            self.placed.setdefault(row.run.host, set()).add(lane)
        if row.wish is not None:
            self.wished.add(lane)
        else:
            self.wished.discard(lane)
        self.touch("instance", str(lane))

    def _lift(self, lane: Lane, row: InstanceRow) -> None:
        """Take a lane out of where this row of it stands."""
        if lane in (beside := self.in_phase.get(row.phase, set())):
            beside.discard(lane)
        if row.run.host is not None and lane in (beside := self.placed.get(row.run.host, set())):
            beside.discard(lane)

    def _forget_turns(self, identity: DeploymentId) -> None:
        """Who gives way first may be another one where instances of a deployment that changed are, or were."""
        self.shape += 1
        for _, row in self.of(identity):
            if row.run.host is not None:
                self.first_turns.pop(row.run.host, None)

    def drop_instance(self, lane: Lane) -> None:
        self._forget_turns(lane.deployment)
        self._lift(lane, self.instances.pop(lane))
        for known in (self.busy, self.wished, self.draining, self.doubted, self.windowed, self.moved, self.no_room):
            known.discard(lane)
        self.lanes[lane.deployment] = tuple(other for other in self.lanes[lane.deployment] if other != lane)
        self._note_settling(lane.deployment)
        for memo in (
            self.used_at,
            self.loads,
            self.proposals,
            self.shortfalls,
            self.told_short,
            self.steps,
            self.tried,
            self.asked_around,
            self.released_at,
            self.shy_until,
            self.looks,
            self.look_again_at,
            self.vain,
            self.silent,
            self.running_on,
            self.asked_idle,
            self.refused,
        ):
            memo.pop(lane, None)
        self.touch("instance", str(lane))

    def put_operation(self, state: operation.State) -> None:
        self.operations[state.operation] = state
        self.touch("operation", state.operation)

    def put_switch(self, state: switch.State) -> None:
        self.switches[state.switch] = state
        self.touch("switch", state.switch)

    def put_host(self, row: HostRow) -> None:
        self.hosts[row.policy.host] = row
        if row.draining:
            self.emptying.add(row.policy.host)
        else:
            self.emptying.discard(row.policy.host)
        self.touch("host", row.policy.host)

    def put_receipt(self, key: str, row: ReceiptRow) -> None:
        self.receipts[key] = row
        self.touch("receipt", key)

    def put_ledger(self, ledger: Ledger, *owners: str) -> None:
        """Replace the ledger; `owners` are the rows that changed."""
        self.ledger = ledger
        for owner in owners:
            self.touch("ledger", owner)
        self.count("epoch", ledger.epoch)

    def put_request(self, state: request.State) -> None:
        """Keep a request. Only one that holds a place is a row: a waiting one does not survive its client."""
        before = self.requests.get(state.request)
        self.requests[state.request] = state
        if state.phase in LEASED or (before is not None and before.incarnation != state.incarnation):
            self.changed["request", state.request] = None

    def drop_request(self, state: request.State) -> None:
        """Forget a request that reached its outcome."""
        self.due.forget("request", state.request)
        if self.requests.pop(state.request).incarnation is not None:
            self.changed["request", state.request] = None

    def count(self, name: str, value: int) -> None:
        self.counters[name] = value
        self.touch("counter", name)

    def draw_token(self) -> Token:
        """A token that no order had before."""
        self.count("token", self.counters.get("token", 0) + 1)
        return Token(self.counters["token"])

    def draw_generation(self, deployment: DeploymentId) -> Generation:
        """The deployment's next generation (invariant 19: drawn at most once, strictly rising)."""
        row = self.deployments[deployment]
        row = attrs.evolve(row, generation=Generation(row.generation + 1))
        self.put_deployment(row)
        return row.generation

    # --- reading ----------------------------------------------------------------------------------

    @property
    def session(self) -> int:
        return self.counters.get("session", 0)

    def installation(self, host: HostId, profile: str) -> str | None:
        """What `profile` runs on `host`, None while nobody said."""
        return self.installations.get(host, {}).get(profile)

    def of(self, deployment: DeploymentId) -> Iterator[tuple[Lane, InstanceRow]]:
        """The instances of a deployment, by index."""
        for lane in self.lanes.get(deployment, ()):
            yield lane, self.instances[lane]

    def on(self, host: HostId) -> list[tuple[Lane, InstanceRow]]:
        """The instances of which processes exist on a host, or may, by lane."""
        return [(lane, self.instances[lane]) for lane in sorted(self.placed.get(host, ()))]

    def anybody_on(self, host: HostId) -> list[tuple[Lane, InstanceRow]]:
        """The same, in no order."""
        return [(lane, self.instances[lane]) for lane in self.placed.get(host, ())]

    def being(self, *phases: object) -> list[tuple[Lane, InstanceRow]]:
        """The busy instances in one of these phases, by lane."""
        lanes = sorted(lane for phase in phases for lane in self.in_phase.get(phase, ()))
        return [(lane, self.instances[lane]) for lane in lanes]

    def serving(self, deployment: DeploymentId) -> list[Incarnation]:
        """Incarnations with an open gate, by index."""
        return [row.machine.run.incarnation for _, row in self.of(deployment) if row.gate_open]

    def value_of(self, kind: str, key: str) -> object | None:
        """The present value of a row, None when it is gone."""
        match kind:
            case "instance":
                return self.instances.get(lane_of(key))
            case "deployment":
                return self.deployments.get(DeploymentId(key))
            case "operation":
                return self.operations.get(OperationId(key))
            case "switch":
                return self.switches.get(SwitchId(key))
            case "host":
                return self.hosts.get(HostId(key))
            case "receipt":
                return self.receipts.get(key)
            case "ledger":
                return self.ledger.holding(key)
            case "request":
                return leased(self.requests.get(RequestId(key)))
            case _:
                return Counter(value=self.counters[key])

    def rows(self) -> Iterator[Record]:
        """Every durable row."""
        keys: dict[str, list[str]] = {
            "deployment": list(self.deployments),
            "instance": [str(lane) for lane in self.instances],
            "operation": list(self.operations),
            "switch": list(self.switches),
            "host": list(self.hosts),
            "receipt": list(self.receipts),
            "ledger": [owner for owner, _ in self.ledger.rows()],
            "request": [request for request, state in self.requests.items() if state.incarnation is not None],
            "counter": list(self.counters),
        }
        for kind, names in keys.items():
            for key in names:
                yield Record(kind=kind, key=key, value=self.value_of(kind, key))


def leased(state: request.State | None) -> request.State | None:
    """The row of a request: kept while it holds a place.

    A row is written when the place is taken and when it is cut, not for each step between: so a stored
    place without a cut reads as dispatched, the most that may have happened.
    """
    if state is None or state.incarnation is None:
        return None
    if state.phase in (request.Phase.ADMITTED, request.Phase.STREAMING, request.Phase.COMPLETING):
        return attrs.evolve(state, phase=request.Phase.DISPATCHED, begun=False, finished_at_ms=None)
    return state


def lane_of(key: str) -> Lane:
    """The lane whose text form is `key`."""
    deployment, _, index = key.rpartition("/")
    return Lane(DeploymentId(deployment), int(index))


def lane_of_owner(owner: str) -> Lane:
    """The lane behind a ledger owner key, `deployment:<id>/instance:<k>`."""
    deployment, _, index = owner.removeprefix("deployment:").partition("/instance:")
    return Lane(DeploymentId(deployment), int(index))
