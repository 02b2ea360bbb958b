"""What instances said in a step, told to whoever cares: operations, switches, requests, the deployment."""

from __future__ import annotations

import attrs

from capyctl.control import idle, operations, outward, requests, switching, waits
from capyctl.control.book import Book
from capyctl.control.lanes import Armed
from capyctl.control.orders import ConfirmStored
from capyctl.control.records import Move, Slept
from capyctl.fsm import deployment, switch
from capyctl.fsm import effects as fx
from capyctl.fsm.residency import NO_ROOM_TO_PARK
from capyctl.fsm.run import Stop
from capyctl.fsm.types import Activation, Generation, Lane, StopKind

CAPACITY = frozenset({"insufficient_resources", "insufficient_memory", "startup_requires_empty_host"})
"""Failures of a start that a waiting client reads as they are; any other one is `activation_failed`, and names its
code. A full card too: its own code says to an operator that the document asks for too much, and to a client that
asking again is of no use, which is wrong when an engine ran out of memory or a stranger holds it (api 4)."""


STOPPED_SINCE = {
    StopKind.GROWTH: "its parked copy outgrew the bound",
    StopKind.CUT_REQUEST: "a cut request ended only with its engine",
    StopKind.FAILED_PARK: "its park could not be completed",
    StopKind.PRESSURE: "there was no room for its parked copy",
    StopKind.EXIT: "its engine ended meanwhile",
}
"""Why what was to be parked was stopped, for those who asked for the park and were not told sooner."""


INSISTED = 2
"""Stops of this rank and above were asked for by somebody: an operator, a new revision, a host's drain."""


def hear(book: Book) -> None:
    """Pass on every notice, in the order in which they were given, until none is left."""
    while book.notices:
        lane, notice = book.notices.popleft()
        if lane in book.instances:
            _hear(book, lane, notice)


def _hear(book: Book, lane: Lane, notice: fx.Notice | Armed) -> None:
    match notice:
        case Armed():
            operations.armed(book, lane)
            for other in book.lanes[lane.deployment]:
                book.told_short.pop(other, None)  # the operation forgot why its other instances wait
                book.tried.pop(other, None)
        case fx.ConfirmStored(incarnation=incarnation):
            book.order(ConfirmStored(incarnation=incarnation))
        case fx.GateOpened():
            _opened(book, lane)
        case fx.GateClosed():
            book.loads.pop(lane, None)
        case fx.ReadyReached():
            switching.target_ready(book, lane)
        case fx.StartEnded(at_once=True) if _starts_again(book, lane):
            pass  # in this very pass, and whoever waits is served by the next run
        case fx.StartEnded(code=code, reason=reason):
            start_ended(book, lane, code, reason)
            _answer_waiters(book, lane, code, reason)
        case fx.AttemptFailed(code=code, reason=reason, attempt=attempt):
            operations.waits(book, lane, code, f"attempt {attempt} failed: {reason}")
        case fx.ParkEnded(code=None):
            _parked(book, lane, notice)
        case fx.ParkEnded(code=str(code), reason=reason):
            operations.failed(book, lane, operations.PARK, code, reason)
            operations.failed(book, lane, operations.PREINIT, code, reason)
            switching.kept(book, lane, code, reason)
        case fx.ParkBecameStop(stop=stop, reason=reason):
            operations.waits(book, lane, "parked_capacity", reason)
            if stop.kind is StopKind.PRESSURE and reason == NO_ROOM_TO_PARK:
                book.no_room.add(lane)
            if stop.kind is StopKind.GROWTH:
                book.moves.append(
                    Move(
                        machine="instance",
                        lane=str(lane),
                        was="ready",
                        event="park_growth_stop",
                        now="stopping",
                        deployment=book.deployments[lane.deployment].spec.name,
                    )
                )
        case fx.StopEnded(stop=stop):
            operations.met(book, lane, operations.STOP)
            _stopped_instead(book, lane, stop)
            operations.failed(book, lane, operations.PREINIT, "deployment_stopped", "it was stopped before it parked")
            switching.released(book, lane, _how(book, lane))
            _stopped(book, lane, stop)
        case fx.StopWithdrawn(code=code, reason=reason):
            operations.failed(book, lane, operations.PARK, code, reason)
            operations.failed(book, lane, operations.PREINIT, code, reason)
            switching.kept(book, lane, code, reason)
        case fx.RunGone(incarnation=incarnation, proof=proof):
            _fence(book, lane, incarnation.generation)
            requests.gone(book, incarnation, proof)
        case fx.RunUncertain(reason=reason):
            operations.unknown(book, lane, reason)
            switching.not_released(book, lane, reason)
            switching.target_failed(book, lane, "unreconciled", reason)


def _starts_again(book: Book, lane: Lane) -> bool:
    """Somebody waits for it, who asked since its engine ended or before its wake: the scheduler starts it for them."""
    owner, wish = book.deployments[lane.deployment], book.instances[lane].wish
    if wish is not None:
        return wish.switch is None  # a switch makes room for this wake alone
    waited_for = lane.deployment in book.traffic.waited_for
    return waited_for and owner.spec.activation is Activation.ON_DEMAND and not requests.operator_stopped(book, owner)


def _opened(book: Book, lane: Lane) -> None:
    """The gate is open: waiters come first, so that no switch finds a model that has served nobody."""
    book.used_at[lane] = book.now_ms
    if (row := book.instances[lane]).slept is not None:
        book.put_instance(lane, attrs.evolve(row, slept=None))
    forget_wish(book, lane)
    operations.met(book, lane, operations.SERVE)  # not sooner: whoever waited for it may send a request at once
    requests.let_in(book, lane.deployment)
    switching.opened(book, lane)
    idle.watch(book, lane)


def _parked(book: Book, lane: Lane, ended: fx.ParkEnded) -> None:
    row = book.instances[lane]
    if row.is_parked and (ended.origin is not None or row.slept is None):
        slept = Slept(at_ms=book.now_ms, origin=ended.origin, for_name=ended.for_name, switch=ended.switch)
        book.put_instance(lane, attrs.evolve(row, slept=slept))
    operations.met(book, lane, operations.PARK)
    operations.met(book, lane, operations.PREINIT)
    switching.released(book, lane, switch.Released.PARKED)
    idle.watch(book, lane)


def _stopped_instead(book: Book, lane: Lane, stop: Stop) -> None:
    """Whoever wanted it parked has its memory; that it is stopped, and why, is part of the outcome."""
    error = book.instances[lane].run.last_error
    why = f": {error.reason}" if error is not None else ""
    words = STOPPED_SINCE.get(stop.kind, "it was stopped meanwhile")
    if stop.kind in (StopKind.FAILED_PARK, StopKind.EXIT):
        words += why
    operations.met_otherwise(book, lane, operations.PARK, words)


def forget_wish(book: Book, lane: Lane) -> None:
    """The wish is over: it serves, or it will not."""
    row = book.instances[lane]
    if row.wish is not None:
        book.put_instance(lane, attrs.evolve(row, wish=None))
    for memo in (book.steps, book.shortfalls, book.told_short, book.tried, book.asked_around):
        memo.pop(lane, None)


def start_ended(book: Book, lane: Lane, code: str, reason: str) -> None:
    """It will not serve; the switch that made room for it hears that while the wish still names the switch."""
    switching.target_failed(book, lane, code, reason)
    operations.failed(book, lane, operations.SERVE, code, reason)
    operations.failed(book, lane, operations.PREINIT, code, reason)
    forget_wish(book, lane)


def _stopped(book: Book, lane: Lane, stop: Stop) -> None:
    """A stop that somebody insisted on ends the start it came upon, but not one that was asked for after it."""
    row = book.deployments[lane.deployment]
    wish = book.instances[lane].wish
    if stop.rank < INSISTED:
        return
    kept = row.state.phase is not deployment.Phase.DELETING and not requests.operator_stopped(book, row)
    if wish is not None and wish.since_ms >= stop.asked_at_ms and kept:
        return
    start_ended(book, lane, "deployment_stopped", "it was stopped while it started")


def _answer_waiters(book: Book, lane: Lane, code: str, reason: str) -> None:
    """When nobody else is on the way to serve this deployment, those who wait for it are answered."""
    if any(row.gate_open or row.on_the_way for _, row in book.of(lane.deployment)):
        return
    stopped = requests.operator_stopped(book, book.deployments[lane.deployment])
    if code == "deployment_stopped" and not stopped:
        return  # a new revision, or a host that is drained: who waits is served by what comes next
    run = book.instances[lane].machine.run
    retry = None if run.retry_at_ms is None else max(1, -(-(run.retry_at_ms - book.now_ms) // 1000))
    if stopped:
        words = requests.stopped_words(book.deployments[lane.deployment])
        requests.fail_waiters(book, lane.deployment, "deployment_stopped", words)
    elif code in CAPACITY:
        requests.fail_waiters(book, lane.deployment, code, outward.words(waits.nameless(reason)), retry)
    elif code in requests.OF_FILES:
        requests.fail_waiters(book, lane.deployment, code, outward.words(reason))
    else:
        words = requests.did_not_start(book.deployments[lane.deployment], f"{code}: {outward.words(reason)}")
        requests.fail_waiters(book, lane.deployment, "activation_failed", words, retry)


def _how(book: Book, lane: Lane) -> switch.Released:
    """How a stopped victim's memory came free: one that was to park, and had no room for its copy, says so."""
    if lane not in book.no_room:
        return switch.Released.STOPPED
    book.no_room.discard(lane)
    return switch.Released.STOPPED_NO_ROOM


def _fence(book: Book, lane: Lane, generation: Generation) -> None:
    """A gone launch is fenced: the deployment's next one has a higher generation (W12)."""
    row = book.deployments[lane.deployment]
    if row.generation <= generation:
        book.put_deployment(attrs.evolve(row, generation=Generation(generation + 1)))
