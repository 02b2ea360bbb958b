"""What instances said in a step, told to whoever cares: operations, switches, requests, the deployment."""

from __future__ import annotations

import attrs

from capyctl.control import operations, requests, switching
from capyctl.control.book import Book
from capyctl.control.lanes import Armed
from capyctl.control.orders import ConfirmStored
from capyctl.control.records import InstanceRow
from capyctl.fsm import effects as fx
from capyctl.fsm import switch
from capyctl.fsm.types import Generation, Lane, StopKind

CAPACITY = frozenset({"insufficient_resources", "insufficient_memory", "insufficient_device_memory"})
"""Failures of a start that a waiting client reads as they are; any other one is `activation_failed`."""


def hear(book: Book) -> None:
    """Pass on every notice, in the order in which they were given, until none is left."""
    while book.notices:
        lane, notice = book.notices.popleft()
        if lane in book.instances:
            _hear(book, lane, notice)


def _hear(book: Book, lane: Lane, notice: fx.Notice | Armed) -> None:
    row = book.instances[lane]
    match notice:
        case Armed():
            operations.armed(book, lane)
        case fx.ConfirmStored(incarnation=incarnation):
            book.order(ConfirmStored(incarnation=incarnation))
        case fx.GateOpened():
            _opened(book, lane)
        case fx.GateClosed():
            book.loads.pop(lane, None)
        case fx.ReadyReached():
            _granted(book, lane)
            operations.met(book, lane, operations.SERVE)
            switching.target_ready(book, lane)
        case fx.StartEnded(code=code, reason=reason):
            _granted(book, lane)
            operations.failed(book, lane, operations.SERVE, code, reason)
            switching.target_failed(book, lane.deployment, code, reason)
            _answer_waiters(book, lane, code, reason)
        case fx.AttemptFailed(code=code, reason=reason, attempt=attempt):
            operations.waits(book, lane, code, f"attempt {attempt} failed: {reason}")
        case fx.ParkEnded(code=None):
            operations.met(book, lane, operations.PARK)
            switching.released(book, lane, switch.Released.PARKED)
        case fx.ParkEnded(code=str(code), reason=reason):
            operations.failed(book, lane, operations.PARK, code, reason)
            switching.not_released(book, lane, reason)
        case fx.ParkBecameStop(reason=reason):
            operations.waits(book, lane, "parked_capacity", reason)
        case fx.StopEnded(stop=stop):
            operations.met(book, lane, operations.STOP)
            operations.met(book, lane, operations.PARK)
            switching.released(book, lane, _how(row, stop.kind))
        case fx.StopWithdrawn(reason=reason):
            switching.not_released(book, lane, reason)
        case fx.RunGone(incarnation=incarnation, proof=proof):
            _fence(book, lane, incarnation.generation)
            requests.gone(book, incarnation, proof)
        case fx.RunUncertain(reason=reason):
            operations.unknown(book, lane, reason)
            switching.lost(book, lane, reason)


def _opened(book: Book, lane: Lane) -> None:
    """The gate is open: waiters come first, so that no switch finds a model that has served nobody."""
    book.used_at[lane] = book.now_ms
    requests.let_in(book, lane.deployment)
    switching.opened(book, lane)


def _granted(book: Book, lane: Lane) -> None:
    """The wish is over: it serves, or it will not."""
    row = book.instances[lane]
    if row.wish is not None:
        book.put_instance(lane, attrs.evolve(row, wish=None))
    book.shortfalls.pop(lane, None)


def _answer_waiters(book: Book, lane: Lane, code: str, reason: str) -> None:
    """When nobody else is on the way to serve this deployment, those who wait for it are answered."""
    if any(row.gate_open or row.on_the_way for _, row in book.of(lane.deployment)):
        return
    run = book.instances[lane].machine.run
    retry = None if run.retry_at_ms is None else max(1, -(-(run.retry_at_ms - book.now_ms) // 1000))
    if requests.operator_stopped(book, book.deployments[lane.deployment]):
        name = book.deployments[lane.deployment].spec.name
        requests.fail_waiters(
            book,
            lane.deployment,
            "deployment_stopped",
            f"an operator stopped it. Try: capyctl start deployment {name}",
        )
    elif code in CAPACITY:
        requests.fail_waiters(book, lane.deployment, code, reason, retry)
    else:
        requests.fail_waiters(book, lane.deployment, "activation_failed", f"{code}: {reason}", retry)


def _how(row: InstanceRow, kind: StopKind) -> switch.Released:
    no_room = row.machine.run.tier.parks and kind is StopKind.PRESSURE
    return switch.Released.STOPPED_NO_ROOM if no_room else switch.Released.STOPPED


def _fence(book: Book, lane: Lane, generation: Generation) -> None:
    """A gone launch is fenced: the deployment's next one has a higher generation (W12)."""
    row = book.deployments[lane.deployment]
    if row.generation <= generation:
        book.put_deployment(attrs.evolve(row, generation=Generation(generation + 1)))
