"""What is done to deployments and instances, whoever wants it: an operator's command, a pass, a host that is drained.

Each function steps the machine that it concerns and does what that one ordered. Who may ask for it is decided before,
in `commands` and in `schedule`. Lifecycle 3, 4.
"""

from __future__ import annotations

import itertools

import attrs

from capyctl.control import lanes, leftovers, notices, operations, outward, requests, residue, verifying
from capyctl.control.book import Book
from capyctl.control.orders import Measure, StopFetching
from capyctl.control.records import DeploymentRow, InstanceRow, Move, Wish
from capyctl.control.spec import Spec
from capyctl.fsm import deployment, facts, instance, operation
from capyctl.fsm.run import Stop
from capyctl.fsm.table import Refused
from capyctl.fsm.types import DeploymentId, HostId, Lane, Millis, OperationId, Origin, StopKind

# --- instances -----------------------------------------------------------------------------------------


def activate(book: Book, lane: Lane, wish: Wish) -> Refused | None:
    """Want this instance to serve: a new start or wake, or joining the one in progress (invariant 50).

    A wish outlives what is in its way: it is taken up again once the instance is at rest (`schedule`).
    Returns: why nothing can be begun now, None when something was.
    """
    row = book.instances[lane]
    if row.wish is None or (wish.origin is Origin.OPERATOR and row.wish.origin is not Origin.OPERATOR):
        present = row.wish or wish
        wish = attrs.evolve(wish, host=present.host, switch=present.switch)
        book.put_instance(lane, attrs.evolve(row, wish=wish))
    elif wish.evict and not row.wish.evict:
        book.put_instance(lane, attrs.evolve(row, wish=attrs.evolve(row.wish, evict=True)))
    return take_up(book, lane, wish)


def take_up(book: Book, lane: Lane, wish: Wish) -> Refused | None:
    """Begin what a wish asks for, if the deployment may have something begun now; else it waits."""
    phase = book.deployments[lane.deployment].state.phase
    if phase not in (deployment.Phase.ACTIVE, deployment.Phase.ACCEPTED):
        return None  # the instances of the old revision come to their end first
    wanted = facts.Activated(now_ms=book.now_ms, origin=wish.origin, wait_ends_at_ms=wish.until_ms)
    return lanes.tell(book, lane, wanted)


def stop_lane(book: Book, lane: Lane, kind: StopKind, *, for_name: str | None = None, abrupt: bool = False) -> None:
    """Ask an instance to end; running requests are waited for unless `abrupt`."""
    lanes.tell(
        book,
        lane,
        facts.StopRequested(
            now_ms=book.now_ms,
            stop=Stop(kind=kind, asked_at_ms=book.now_ms, for_name=for_name),
            drain_ends_at_ms=None if abrupt else Millis(book.now_ms + book.settings.stop_limit_ms),
        ),
    )


def park_lane(book: Book, lane: Lane, origin: Origin) -> None:
    """Ask an instance to give its memory back."""
    lanes.tell(
        book,
        lane,
        facts.ParkRequested(
            now_ms=book.now_ms,
            origin=origin,
            drain_ends_at_ms=Millis(book.now_ms + book.settings.drain_timeout_ms),
            settle_at_stop=requests.settle_at_stop(book, lane),
            outgrown=residue.outgrown(book, lane),
        ),
    )


# --- hosts ---------------------------------------------------------------------------------------------


def drain_host(book: Book, host: HostId) -> None:
    """Stop every instance on a host; a request starts it again, elsewhere or once the host is undrained."""
    for lane, _ in book.on(host):
        stop_lane(book, lane, StopKind.DRAIN)


def drain_profile(book: Book, host: HostId, profile: str) -> None:
    """Stop what runs, or begins to, on a profile; its deployments start again on request, where one offers it."""
    for lane in sorted({*(lane for lane, _ in book.on(host)), *book.busy}):
        here = book.instances[lane].machine.run.host in (host, None)
        if here and book.deployments[lane.deployment].spec.profile == profile:
            stop_lane(book, lane, StopKind.DRAIN)


# --- deployments ---------------------------------------------------------------------------------------


def tell(book: Book, identity: DeploymentId, fact: deployment.Event) -> None:
    """Step a deployment outside of a command and do what it ordered."""
    row = book.deployments[identity]
    after, effects = deployment.step(row.state, fact)
    if after is not row.state:
        book.put_deployment(attrs.evolve(row, state=after))
        if after.phase is not row.state.phase:
            book.moves.append(
                Move(
                    machine="deployment",
                    lane=row.spec.name,
                    was=row.state.phase.value,
                    event=type(fact).__name__,
                    now=after.phase.value,
                )
            )
    perform(book, identity, effects, None)


def perform(book: Book, identity: DeploymentId, effects: tuple[object, ...], by: OperationId | None) -> None:
    """Do what a step of a deployment ordered; a start of it belongs to the operation `by`."""
    row = book.deployments[identity]
    for effect in effects:
        match effect:
            case deployment.MeasureCheckpoint(revision=revision):
                book.order(Measure(deployment=identity, revision=revision))
            case deployment.PlanStop(indices=indices, kind=kind):
                unwanted = kind is StopKind.DELETE or deployment.operator_stopped(row.state)
                if unwanted and row.state.gate is not deployment.Gate.MEASURED:
                    book.order(StopFetching(deployment=identity))
                for lane, _ in list(book.of(identity)):
                    if kind is not StopKind.INSTANCE or lane.index in indices:  # retired ones may leave gaps
                        stop_lane(book, lane, kind)
            case deployment.PlanStart() if row.state.phase is not deployment.Phase.REVISING:
                for lane, one in list(book.of(identity)):
                    if one.wish is None and not one.is_ready:
                        activate(book, lane, Wish(origin=Origin.OPERATOR, since_ms=book.now_ms, operation=by))
            case deployment.PlanPark():
                for lane, one in list(book.of(identity)):
                    if one.may_park:
                        if one.wish is not None:
                            notices.start_ended(book, lane, "lifecycle_conflict", "it was parked before it served")
                        park_lane(book, lane, Origin.OPERATOR)
            case deployment.SetCount(instances=count):
                resize(book, identity, count)
            case deployment.EndWaiters(code="deployment_stopped"):
                requests.fail_waiters(book, identity, "deployment_stopped", requests.stopped_words(row))
            case deployment.EndWaiters(code=code, reason=reason):
                requests.fail_waiters(book, identity, code, outward.words(reason))
            case deployment.DropRecord():
                _drop(book, row)
            case _:
                pass  # ReportPending is read off the rows


def _drop(book: Book, row: DeploymentRow) -> None:
    identity = row.state.deployment
    book.order(StopFetching(deployment=identity))
    hosts = {*row.spec.hosts, *(one.last_host for _, one in book.of(identity))}
    for lane, _ in list(book.of(identity)):
        _forget(book, lane, "the deployment was deleted")
    requests.fail_waiters(book, identity, "not_found", f"{row.spec.name} was deleted")
    verifying.forget(book, identity)
    book.drop_deployment(identity)
    leftovers.prune_logs(book, *sorted(host for host in hosts if host in book.online))


def supersede(book: Book, identity: DeploymentId, by: OperationId) -> None:
    """End the open starts and parks of a deployment that armed nothing: a stop was accepted over them."""
    for goal in (operations.SERVE, operations.PARK, operations.PREINIT):
        for state in operations.open_for(book, identity, goal):
            if state.phase is operation.Phase.ACCEPTED:
                operations.tell(book, state.operation, operation.Replaced(now_ms=book.now_ms, by=by))


def renew(book: Book, identity: DeploymentId) -> None:
    """The same document as a new revision, measured and sized again, by nobody's command."""
    row = book.deployments[identity]
    fact = deployment.ReviseAsked(
        now_ms=book.now_ms,
        expected_revision=row.state.revision,
        wanted=wanted(row.spec),
        live=any(one.has_launch or one.in_progress for _, one in book.of(identity)),
        resume=any(one.on_the_way for _, one in book.of(identity)),
    )
    after, effects = deployment.step(row.state, fact)
    if any(isinstance(one, Refused) for one in effects):
        return  # it is being deleted
    book.put_deployment(
        DeploymentRow(state=after, spec=row.spec, created_at_ms=row.created_at_ms, generation=row.generation)
    )
    for lane, _ in list(book.of(identity)):
        lanes.tell(book, lane, facts.Revised(now_ms=book.now_ms))
    perform(book, identity, effects, None)


def remeasured(book: Book, identity: DeploymentId) -> None:
    """Its files are others than those that its engines were started on: these end, and start again on the new ones."""
    row = book.deployments[identity]
    for lane, one in list(book.of(identity)):
        if not one.has_launch or one.digest == row.digest:
            continue
        serves = one.on_the_way
        stop_lane(book, lane, StopKind.REVISION)
        if serves and not requests.operator_stopped(book, row):
            activate(book, lane, Wish(origin=Origin.OPERATOR, since_ms=book.now_ms))


def wanted(spec: Spec) -> deployment.Wanted:
    """What its machine is told of a document."""
    return deployment.Wanted(
        instances=spec.instances, parks=spec.residency.parks, activation=spec.activation, warm=spec.warm
    )


# --- how many ------------------------------------------------------------------------------------------


def resize(book: Book, identity: DeploymentId, count: int) -> None:
    """Add stopped instances up to `count`; retire the surplus in the order of lifecycle 3.5."""
    present = dict(book.of(identity))
    free = (index for index in itertools.count() if Lane(identity, index) not in present)
    for index in itertools.islice(free, max(0, count - len(present))):
        lane = Lane(identity, index)
        book.put_instance(lane, InstanceRow(machine=instance.born(lane, session=book.session)))
    for lane in surplus(book, identity, count):
        if not retire(book, lane):
            stop_lane(book, lane, StopKind.REVISION)


def retire(book: Book, lane: Lane) -> bool:
    """Drop an instance that is at rest with nothing of it left; whether it was."""
    one = book.instances[lane]
    if one.has_launch or one.in_progress:
        return False
    _forget(book, lane, "the deployment has fewer instances now")
    return True


def surplus(book: Book, identity: DeploymentId, count: int) -> list[Lane]:
    """Whoever has to go so that `count` are left: the stopped first, then the parked, then the highest index."""
    present = list(book.of(identity))
    order = sorted(present, key=lambda pair: _retirement(pair[1], pair[0]))
    return [lane for lane, _ in order[: max(0, len(present) - count)]]


def _retirement(row: InstanceRow, lane: Lane) -> tuple[int, int]:
    goes = instance.why_stopped(row.machine)
    order = 2 if row.is_ready else 1 if row.is_parked or goes is None else 0
    return order, -lane.index


def _forget(book: Book, lane: Lane, reason: str) -> None:
    """Drop an instance of which nothing is left; whatever an open operation wanted of it is settled by that."""
    operations.failed(book, lane, operations.SERVE, "deployment_stopped", reason)
    operations.failed(book, lane, operations.PREINIT, "deployment_stopped", reason)
    operations.met(book, lane, operations.PARK)
    operations.met(book, lane, operations.STOP)
    book.drop_instance(lane)
