"""The world: every machine and the ledger as one value that eats one event at a time and answers with orders.

`handle` routes the event to the machines it concerns, runs scheduler passes until nothing moves, and says
which rows changed. It is pure but for its own contents: the same rows and the same events always give the
same orders. One task owns it.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from capyctl.control import (
    answering,
    commands,
    deeds,
    hosts,
    invariants,
    lanes,
    measuring,
    operations,
    outward,
    peaks,
    requests,
    schedule,
    setbacks,
    switching,
)
from capyctl.control import events as e
from capyctl.control.book import Book, Settings, lane_of
from capyctl.control.orders import Measure, Order
from capyctl.control.records import (
    Counter,
    DeploymentRow,
    HostRow,
    InstanceRow,
    Move,
    ReceiptRow,
    Record,
)
from capyctl.errors import InvariantBroken
from capyctl.fsm import deployment, facts, operation, request, switch
from capyctl.fsm.types import Lane, Millis, OperationId, RequestId, SwitchId
from capyctl.ledger.charges import Holding, Ledger

COMMANDS = (e.DeployAsked, e.StartAsked, e.PreinitializeAsked, e.StopAsked, e.ParkAsked, e.DeleteAsked, e.DrainAsked)

UNMEASURABLE = frozenset(
    {
        *("invalid_root", "unsafe_file", "too_large", "unauthorized", "not_materializable", "not_found"),
        *("insufficient_space", "unavailable", "deployment_stopped"),
    }
)
"""Reasons for which a checkpoint is not there or cannot be measured at all, as against measured and unusable."""


@attrs.frozen(kw_only=True)
class Step:
    """What one event did: orders to perform after their commit, rows to store, and moves for the log."""

    orders: tuple[Order, ...]
    changed: tuple[Record, ...]
    moves: tuple[Move, ...]


@attrs.define
class World:
    """One owner's value. `book` holds the contents; read it through `views`."""

    book: Book = attrs.field(factory=Book)

    @classmethod
    def load(cls, records: Iterable[Record], *, now_ms: Millis, settings: Settings | None = None) -> World:
        """The world of these rows; none is a fresh one. Feed ControllerStarted before anything else.

        Raises: InvariantBroken when the rows cannot be of one world.
        """
        book = Book(settings=settings or Settings(), now_ms=now_ms)
        book.traffic.limits = book.settings.queue
        holdings: dict[str, Holding] = {}
        for record in records:
            _take_in(book, record, holdings)
        book.ledger = Ledger.load(
            epoch=book.counters.get("epoch", 0),
            hosts=[row.policy for row in book.hosts.values()],
            holdings=holdings,
        )
        for lane in list(book.instances):
            book.due.at(now_ms, "lane", lane)
        book.changed.clear()
        book.dirty = False
        return cls(book)

    def handle(self, event: e.Event) -> Step:
        """Take one event.

        Returns: orders, changed rows and moves of this step.
        Raises: InvariantBroken when the world would become one that cannot be; nothing may be performed then.
          Rows that such a step touched are stored with the next one: what is in memory stays the truth.
        """
        book = self.book
        book.now_ms = max(book.now_ms, event.now_ms)
        book.orders, book.moves = [], []
        _route(book, event)
        schedule.settle(book)
        answering.settle(book, event)
        invariants.check_touched(book)
        changed = tuple(Record(kind=kind, key=key, value=book.value_of(kind, key)) for kind, key in book.changed)
        book.changed = {}
        return Step(orders=tuple(book.orders), changed=changed, moves=tuple(book.moves))

    @property
    def next_due_ms(self) -> Millis | None:
        """When Ticked must be fed at the latest; None while no deadline runs."""
        return self.book.due.next_ms

    def records(self) -> Iterable[Record]:
        """Every durable row."""
        return self.book.rows()


def _take_in(book: Book, record: Record, holdings: dict[str, Holding]) -> None:
    match record.value:
        case DeploymentRow() as row:
            book.put_deployment(row)
            for route in row.spec.routes:
                book.routes[route] = row.state.deployment
        case InstanceRow() as row:
            book.put_instance(lane_of(record.key), row)
        case operation.State() as state:
            book.operations[OperationId(record.key)] = state
            operations.index(book, state)
            book.due.at(operation.due_at_ms(state), "operation", state.operation)
        case switch.State() as state:
            book.switches[SwitchId(record.key)] = state
            if state.phase not in switching.OVER:
                book.active_switches[state.host] = state.switch
        case request.State() as state:
            requests.load(book, state)
        case HostRow() as row:
            book.put_host(row)
        case ReceiptRow() as row:
            book.receipts[record.key] = row
        case Counter(value=value):
            book.counters[record.key] = value
        case Holding() as holding:
            holdings[record.key] = holding
        case _:
            raise InvariantBroken(f"a row of kind {record.kind} holds {type(record.value).__name__}")


def _route(book: Book, event: e.Event) -> None:
    match event:
        case e.RequestArrived():
            requests.arrived(book, event)
        case e.RequestFact():
            requests.told(book, event)
        case e.LoadReported():
            hosts.load(book, event)
        case e.EngineSilent():
            hosts.silent(book, event)
        case e.Observed():
            hosts.observed(book, event)
        case e.Outcome():
            hosts.outcome(book, event)
        case e.ReadyStored():
            hosts.stored(book, event)
        case e.EngineExited():
            hosts.exited(book, event)
        case e.Ticked():
            _tick(book)
        case e.HostOnline():
            hosts.online(book, event)
        case e.ProfilesPublished():
            hosts.published(book, event)
        case e.HostOffline():
            hosts.offline(book, event)
        case e.RevisionResolved():
            _resolved(book, event)
        case e.RevisionUnusable():
            _unusable(book, event)
        case e.StartVerified():
            switching.verified(book, event)
        case e.ControllerStarted():
            _started(book, event)
        case _ if isinstance(event, COMMANDS):
            commands.handle(book, event)
        case _:
            raise InvariantBroken(f"the world knows no {type(event).__name__}")


def _tick(book: Book) -> None:
    """Look at everything whose deadline has come."""
    for kind, key in book.due.past(book.now_ms):
        match kind, key:
            case "request", str():
                requests.ticked(book, RequestId(key))
            case "operation", str():
                operations.ticked(book, OperationId(key))
            case "switch", str():
                switching.ticked(book, SwitchId(key))
            case "lane", Lane():
                lanes.ticked(book, key)
            case "answer", str():
                answering.ticked(book, key)
            case "idle", Lane():
                schedule.idle_timer(book, key)
            case _:
                pass  # "waiters" and "verify" only ask for a pass
    book.dirty = True


def _resolved(book: Book, event: e.RevisionResolved) -> None:
    row = book.deployments.get(event.deployment)
    if row is None or row.state.revision != event.revision:
        return
    measuring.done(book, event.deployment)
    again = row.state.phase is deployment.Phase.ACTIVE and row.state.gate is deployment.Gate.MEASURED
    if again and event.digest == row.digest:
        return  # what is known of these files, parks included, stands
    settled = event.residency or row.spec.residency
    plans = peaks.resolved(book, row, event.plans) if event.digest == row.digest else dict(event.plans)
    book.put_deployment(
        attrs.evolve(
            row,
            spec=attrs.evolve(
                row.spec, residency=settled, residency_reason=event.residency_reason or row.spec.residency_reason
            ),
            digest=event.digest,
            weight_bytes=event.weight_bytes,
            plans=plans,
        )
    )
    fact = deployment.RevisionResolved(now_ms=event.now_ms, revision=event.revision, parks=settled.parks)
    deeds.tell(book, event.deployment, fact)
    if again:
        deeds.remeasured(book, event.deployment)


def _unusable(book: Book, event: e.RevisionUnusable) -> None:
    row = book.deployments.get(event.deployment)
    if row is None or row.state.revision != event.revision:
        return
    measuring.done(book, event.deployment)
    fact: deployment.Event
    code = event.code.partition(":")[0]
    if code in UNMEASURABLE:
        fact = deployment.RevisionUnmeasurable(
            now_ms=event.now_ms, revision=event.revision, code=event.code, reason=event.reason
        )
    else:
        gate = deployment.Gate.MISMATCH if code == "checkpoint_mismatch" else deployment.Gate.UNUSABLE
        fact = deployment.RevisionUnusable(
            now_ms=event.now_ms, revision=event.revision, gate=gate, code=event.code, reason=event.reason
        )
    deeds.tell(book, event.deployment, fact)
    for lane, one in list(book.of(event.deployment)):
        if one.in_progress and not one.has_launch:
            lanes.tell(
                book,
                lane,
                facts.NotPlaced(now_ms=event.now_ms, code=event.code, reason=event.reason, final=True),
            )
    requests.fail_waiters(book, event.deployment, requests.of_files(event.code), outward.words(event.reason))


def _started(book: Book, event: e.ControllerStarted) -> None:
    """Recovery: the ordinary machines with more unknowns (lifecycle 18.2)."""
    setbacks.put_right(book)
    requests.restart(book)
    switching.restart(book)
    hosts.restart(book, event)
    for identity, row in list(book.deployments.items()):
        if row.state.gate is deployment.Gate.PENDING and row.state.phase is not deployment.Phase.DELETED:
            book.order(Measure(deployment=identity, revision=row.state.revision))
    book.dirty = True
