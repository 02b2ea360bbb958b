"""What the world keeps beside its rows to find them by: each index says what the rows say."""

from __future__ import annotations

from collections.abc import Callable

from capyctl.control import crowd, operations, switching
from capyctl.control.book import SETTLING, Book
from capyctl.fsm import instance, operation, request, switch
from capyctl.fsm.types import DeploymentId, HostId, Incarnation, Lane, Millis, OperationId, RequestId
from capyctl.ledger.placement import Tries, candidates


def idx_lanes(book: Book) -> bool:
    """The lanes of each deployment are those of its instances, by index."""
    derived: dict[DeploymentId, list[Lane]] = {}
    for lane in sorted(book.instances):
        derived.setdefault(lane.deployment, []).append(lane)
    return {one: list(lanes) for one, lanes in book.lanes.items() if lanes} == derived


def idx_routes(book: Book) -> bool:
    """Routes are those of the deployments' specs."""
    return book.routes == {route: identity for identity, row in book.deployments.items() for route in row.spec.routes}


def idx_busy(book: Book) -> bool:
    """Busy lanes are those in progress, and wished ones those with a wish."""
    return book.busy == {lane for lane, row in book.instances.items() if row.in_progress} and book.wished == {
        lane for lane, row in book.instances.items() if row.wish is not None
    }


def idx_places(book: Book) -> bool:
    """Lanes are found by their phase while they are busy, and by the host that their processes are on."""
    phases: dict[object, set[Lane]] = {}
    hosts: dict[HostId, set[Lane]] = {}
    for lane, row in book.instances.items():
        if row.in_progress:
            phases.setdefault(row.phase, set()).add(lane)
        if row.has_launch and row.run.host is not None:
            hosts.setdefault(row.run.host, set()).add(lane)
    return {one: lanes for one, lanes in book.in_phase.items() if lanes} == phases and {
        one: lanes for one, lanes in book.placed.items() if lanes
    } == hosts


def idx_emptying(book: Book) -> bool:
    """Hosts that take nothing more are known."""
    return book.emptying == {host for host, row in book.hosts.items() if row.draining}


def idx_steps(book: Book) -> bool:
    """The starts that are kept stand as their ledger's sums order them."""
    return all(_stands(one.tries) for one in book.steps.values())


def _stands(tries: Tries) -> bool:
    seats = [seat for _, _, seat in tries.seated]
    return candidates(tries.ledger, tries.owner, seats, strategy=tries.strategy).seated == tries.seated


def idx_turns(book: Book) -> bool:
    """What is kept of who gives way first on a host is not after anybody's turn there."""
    return all(
        shelf is not book.ledger.shelf(host)
        or all(kept is not None and kept <= one for one in crowd.turns_on(book, host))
        for host, (shelf, kept) in book.first_turns.items()
    )


def idx_deployments(book: Book) -> bool:
    """Deployments are found by their names, and those that wait for an end of instances are known."""
    return book.named == {row.spec.name: identity for identity, row in book.deployments.items()} and book.settling == {
        identity
        for identity, row in book.deployments.items()
        if row.state.phase in SETTLING or len(book.lanes.get(identity, ())) != row.spec.instances
    }


def idx_drains(book: Book) -> bool:
    """Every drain is watched, and exactly the doubted wait for a proof."""
    return book.draining >= {lane for lane, row in book.instances.items() if row.draining} and book.doubted == {
        lane for lane, row in book.instances.items() if instance.wants_proof(row.machine)
    }


def idx_operations(book: Book) -> bool:
    """Open operations are those that have not ended; past ones had another of their deployment after them."""
    derived: dict[DeploymentId, set[OperationId]] = {}
    for identity, state in book.operations.items():
        if state.phase in operations.OPEN:
            derived.setdefault(state.deployment, set()).add(identity)
    opened = {one for identities in derived.values() for one in identities}
    latest = set(book.latest_operation.values())
    return (
        {one: set(opened) for one, opened in book.open_operations.items()} == derived
        and book.preparing == {one for one in opened if book.operations[one].kind is operation.Kind.PREINITIALIZE}
        and book.past_operations == book.operations.keys() - opened - latest
    )


def idx_switches(book: Book) -> bool:
    """Active switches are those that are not over."""
    return set(book.active_switches.values()) == {
        identity for identity, state in book.switches.items() if state.phase not in switching.OVER
    }


def idx_traffic(book: Book) -> bool:
    """Queues and their totals are what the request machines say."""
    waiting: dict[DeploymentId, set[RequestId]] = {}
    running: dict[DeploymentId, dict[RequestId, Incarnation]] = {}
    on: dict[Lane, int] = {}
    for identity, state in book.requests.items():
        if state.deployment is None:
            return False  # classified in the step of its arrival
        if state.phase is request.Phase.QUEUED:
            waiting.setdefault(state.deployment, set()).add(identity)
        elif state.phase in request.PLACED and state.incarnation is not None:
            running.setdefault(state.deployment, {})[identity] = state.incarnation
            on[state.incarnation.lane] = on.get(state.incarnation.lane, 0) + 1
        else:
            return False
    queues = book.traffic.queues
    return (
        {one: set(queue.waiting) for one, queue in queues.items() if queue.waiting} == waiting
        and book.traffic.waited_for == waiting.keys()
        and {one: queue.running for one, queue in queues.items() if queue.running} == running
        and {lane: count for lane, count in book.running_on.items() if count} == on
        and book.traffic.waiting_total == sum(len(queue.waiting) for queue in queues.values())
        and book.traffic.waiting_bytes == sum(sum(queue.waiting.values()) for queue in queues.values())
    )


def idx_due(book: Book) -> bool:
    """Whoever has a deadline is looked at by then."""
    for lane, row in book.instances.items():
        if not _looked_at(book, "lane", lane, instance.due_at_ms(row.machine)):
            return False
    return (
        all(_looked_at(book, "request", one, request.due_at_ms(state)) for one, state in book.requests.items())
        and all(
            _looked_at(book, "operation", one, operation.due_at_ms(book.operations[one]))
            for opened in book.open_operations.values()
            for one in opened
        )
        and all(
            _looked_at(book, "switch", one, switch.due_at_ms(book.switches[one]))
            for one in book.active_switches.values()
        )
    )


def _looked_at(book: Book, kind: str, key: object, due_ms: Millis | None) -> bool:
    looked = book.due.when(kind, key)
    return due_ms is None or due_ms <= book.now_ms or (looked is not None and looked <= due_ms)


INDEXES: tuple[Callable[[Book], bool], ...] = (
    idx_lanes,
    idx_routes,
    idx_busy,
    idx_places,
    idx_emptying,
    idx_steps,
    idx_turns,
    idx_deployments,
    idx_drains,
    idx_operations,
    idx_switches,
    idx_traffic,
    idx_due,
)
