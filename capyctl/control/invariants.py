"""What must be true of the whole world, under the reference's numbers (lifecycle 23, memory M1-M20).

STATE are claims about one book, TRANSITIONS about one step: the book before it, the event, the book after it
and what it ordered. Tests check all of them after every step; the world itself checks LIGHT after steps that
moved an instance or a charge, never on a request's way. Claims that cannot be shown here live where they can:
5, 21, 24, 26, 51-53, 57, 58 with hosts and groups, 60-72 in simulation. Each is true or the step is a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import attrs

from capyctl.control import events as e
from capyctl.control import operations, orders, requests, switching
from capyctl.control.book import Book
from capyctl.control.records import DeploymentRow, InstanceRow, Record
from capyctl.errors import InvariantBroken
from capyctl.fsm import activation, cleanup, deployment, instance, operation, request, residency, switch
from capyctl.fsm.cleanup import CleanupPhase
from capyctl.fsm.gate import GatePhase
from capyctl.fsm.proofs import Gone, GoneProof
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.run import Step
from capyctl.fsm.types import (
    Activation,
    DeploymentId,
    HostId,
    Incarnation,
    Lane,
    Millis,
    OperationId,
    Origin,
    Phase,
    RequestId,
    Role,
    StopKind,
    SwitchId,
)
from capyctl.ledger.asks import PEAKS
from capyctl.ledger.charges import Holding, Ledger
from capyctl.ledger.types import DomainPolicy, peak

# --- what is compared -----------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Before:
    """The book as it was before a step: its plain dicts copied, their values shared."""

    deployments: Mapping[DeploymentId, DeploymentRow]
    instances: Mapping[Lane, InstanceRow]
    operations: Mapping[OperationId, operation.State]
    switches: Mapping[SwitchId, switch.State]
    requests: Mapping[RequestId, request.State]
    looks: Mapping[Lane, object]
    receipts: frozenset[str]
    ledger: Ledger
    now_ms: Millis


def remember(book: Book) -> Before:
    """What TRANSITIONS need of the book before a step."""
    return Before(
        deployments=dict(book.deployments),
        instances=dict(book.instances),
        operations=dict(book.operations),
        switches=dict(book.switches),
        requests=dict(book.requests),
        looks=dict(book.looks),
        receipts=frozenset(book.receipts),
        ledger=book.ledger,
        now_ms=book.now_ms,
    )


H = TypeVar("H", bound=orders.Order)


@attrs.frozen(kw_only=True)
class Change:
    """One step: before, the event, the book after it, and what it ordered and changed."""

    before: Before
    event: e.Event
    book: Book
    orders: tuple[orders.Order, ...]
    changed: tuple[Record, ...]

    def of(self, kind: type[H]) -> list[H]:
        """The orders of one class."""
        return [order for order in self.orders if isinstance(order, kind)]


StateClaim = Callable[[Book], bool]
ChangeClaim = Callable[[Change], bool]

HELD_PHASES = activation.IN_FLIGHT | frozenset(ResidencyPhase) | frozenset(CleanupPhase)
"""Phases in which processes exist or may."""

RUNNING = request.IN_ENGINE | {request.Phase.ADMITTED}

Proving = (
    e.LaunchReady | e.LaunchFailed | e.Terminated | e.Probed | e.ParkConfirmed | e.ParkRefused | e.WakeConfirmed
)
"""Events that carry a proof which may lower a charge."""


def _owners(book: Book) -> dict[str, InstanceRow]:
    return {lane.owner: row for lane, row in book.instances.items()}


def _limit(limits: DomainPolicy) -> int:
    return min(limits.managed_bytes, limits.capacity_bytes - limits.reserve_bytes)


# --- memory ---------------------------------------------------------------------------------------


def inv_01_charges_within_limits(book: Book) -> bool:
    """1, M1, M2: Charges fit a domain's limits, unless an owner there is uncertain or its residue was measured."""
    for host, policy in book.ledger.hosts.items():
        held = [row for _, row in book.ledger.on(host)]
        for domain, limits in policy.domains.items():
            if sum(row.on(domain) for row in held) <= _limit(limits):
                continue
            if not any(row.uncertain or row.phase is Phase.PARKED for row in held):
                return False
    return True


def inv_04_host_kv_is_a_part(book: Book) -> bool:
    """15, M4: KV caches in host memory are a part of the bytes charged, never beside them."""
    return all(
        amount <= held.on(domain)
        for _, held in book.ledger.rows()
        for domain, amount in held.allocation.host_kv.items()
    )


def inv_08_ready_claims_are_held_throughout(book: Book) -> bool:
    """8: Every device of the ready phase is claimed while it starts, parks and wakes."""
    for _, held in book.ledger.rows():
        needed = {claim.device for claim in held.at(Phase.READY).claims}
        for phase in (Phase.COLD, Phase.PARKING, Phase.WAKE):
            if phase in held.phases and not needed <= {claim.device for claim in held.at(phase).claims}:
                return False
    return True


def inv_12_the_unknown_keeps_the_larger(book: Book) -> bool:
    """12: An unknown run is charged, per domain, at least the larger of the phases around its unknown step."""
    around = {
        Step.LAUNCH: (Phase.COLD, Phase.READY),
        Step.PARK: (Phase.READY, Phase.PARKED),
        Step.WAKE: (Phase.PARKED, Phase.READY),
    }
    for lane in book.busy:
        life = book.instances[lane].machine.life
        if not isinstance(life, cleanup.State) or life.phase is not CleanupPhase.RECONCILING or life.lost is None:
            continue
        held = book.ledger.holding(lane.owner)
        if held is None:
            return False
        least = peak(*(held.at(phase) for phase in around.get(life.lost, ())))
        if any(held.on(domain) < amount for domain, amount in least.bytes.items()):
            return False
    return True


def inv_13_exactly_what_may_run_is_charged(book: Book) -> bool:
    """3, 13, 25: An instance is charged exactly while processes of it exist or may, under that run's generation."""
    for lane, row in book.instances.items():
        held = book.ledger.holding(lane.owner)
        if (held is not None) != row.has_launch:
            return False
        if held is not None and (held.generation != row.run.generation or held.host != row.run.host):
            return False
    return True


def inv_13_no_charge_without_an_owner(book: Book) -> bool:
    """13, 56: Every charge belongs to an instance of a deployment that exists."""
    owners = _owners(book)
    return all(owner in owners for owner, _ in book.ledger.rows())


def inv_13_the_phase_is_the_ledgers(book: Book) -> bool:
    """4, M3: The phase that a run is charged for is the ledger's, unless nobody knows which one holds."""
    for lane, row in book.instances.items():
        held = book.ledger.holding(lane.owner)
        if held is not None and not held.uncertain and held.phase is not row.run.charged:
            return False
    return True


def inv_m5_budgets_are_ordered(book: Book) -> bool:
    """M5: Cold is charged at least ready, and ready at least parked, on every domain."""
    for _, held in book.ledger.rows():
        for domain, ready in held.at(Phase.READY).bytes.items():
            if held.at(Phase.COLD).on(domain) < ready or held.at(Phase.PARKED).on(domain) > ready:
                return False
    return True


def inv_m7_below_its_peak_with_a_proof(book: Book) -> bool:
    """3, M7: A charge below the peak of its start names the proof that lowered it."""
    for _, held in book.ledger.rows():
        start = peak(*(held.at(phase) for phase in PEAKS[Phase.COLD]))
        if any(held.on(domain) < amount for domain, amount in start.bytes.items()) and held.lowered_by is None:
            return False
    return True


def inv_m12_a_whole_host_has_one_owner(book: Book) -> bool:
    """M12: An owner that is charged a whole host is alone on it."""
    return all(sum(1 for _ in book.ledger.on(held.host)) == 1 for _, held in book.ledger.rows() if held.whole_host)


# --- processes ------------------------------------------------------------------------------------


def inv_16_hosts_are_allowed(book: Book) -> bool:
    """16: A deployment has at most `max_per_host` launches on one host."""
    for identity, row in book.deployments.items():
        most = row.spec.max_per_host
        if most is None or row.state.phase is deployment.Phase.REVISING:
            continue
        on: dict[HostId, int] = {}
        for _, one in book.of(identity):
            if one.has_launch and one.revision == row.state.revision and one.run.host is not None:
                on[one.run.host] = on.get(one.run.host, 0) + 1
        if any(count > most for count in on.values()):
            return False
    return True


def inv_19_generations_are_drawn(book: Book) -> bool:
    """19: No instance has a generation that its deployment has not drawn."""
    return all(
        (row.run.generation or 0) <= book.deployments[lane.deployment].generation
        for lane, row in book.instances.items()
    )


def inv_19_generations_differ(book: Book) -> bool:
    """19, 18: No two instances of a deployment share a generation."""
    for lanes in book.lanes.values():
        drawn = [book.instances[lane].run.generation for lane in lanes]
        known = [generation for generation in drawn if generation is not None]
        if len(known) != len(set(known)):
            return False
    return True


def inv_20_tokens_are_drawn(book: Book) -> bool:
    """20: No instance waits for a token that was not drawn, and no two for the same."""
    tokens = [row.run.token for row in book.instances.values() if row.run.token is not None]
    return len(tokens) == len(set(tokens)) and all(token <= book.counters.get("token", 0) for token in tokens)


# --- serving --------------------------------------------------------------------------------------


def inv_28_open_means_ready_proven_and_online(book: Book) -> bool:
    """28, 29, 42, 43: An open gate is of a READY run, its host is there, and it was proven to this session."""
    for row in book.instances.values():
        gate = row.machine.gate
        if gate.phase is GatePhase.CLOSED:
            continue
        if not row.is_ready or gate.generation != row.run.generation or gate.reasons:
            return False
        if gate.proven_in != book.session or row.run.host not in book.online:
            return False
    return True


def inv_33_places_are_bounded(book: Book) -> bool:
    """33: A deployment runs at most 32 requests, cancelling ones included."""
    return all(len(queue.running) <= 32 for queue in book.traffic.queues.values())


def inv_34_waiting_is_bounded(book: Book) -> bool:
    """34: Waiting requests are within their bounds; those that lost a place unsent may stand in front of them."""
    limits = book.traffic.limits
    spare = 32
    return book.traffic.waiting_total <= limits.pending_total + spare * max(1, len(book.traffic.queues)) and all(
        len(queue.waiting) <= limits.pending_per_deployment + spare for queue in book.traffic.queues.values()
    )


def inv_35_places_are_on_runs(book: Book) -> bool:
    """35: A place is held on the present run of an instance, until that run is proven gone."""
    for queue in book.traffic.queues.values():
        for incarnation in set(queue.running.values()):
            row = book.instances.get(incarnation.lane)
            if row is None or row.run.generation != incarnation.generation or not row.has_launch:
                return False
    return True


def inv_36_what_parks_runs_nothing(book: Book) -> bool:
    """36: Nothing runs on what is parked or on its way there, and nothing that ends only with the engine."""
    quiet = residency.PARKING | {ResidencyPhase.PARK_PLANNED, ResidencyPhase.PARKED, ResidencyPhase.WAKE_PLANNED}
    return all(
        not requests.waited_for(book, lane) and not requests.settle_at_stop(book, lane)
        for lane, row in book.instances.items()
        if row.phase in quiet
    )


def inv_38_what_an_operator_stopped_does_not_start(book: Book) -> bool:
    """38: Nothing of a deployment that an operator stopped is wanted, planned, or on its way without an end."""
    for identity, row in book.deployments.items():
        if not deployment.operator_stopped(row.state):
            continue
        for _, one in book.of(identity):
            if one.wish is not None and one.machine.phase not in HELD_PHASES:
                return False
            if one.phase in activation.WAITING or one.phase is ResidencyPhase.WAKE_PLANNED:
                return False
            if one.phase in activation.IN_FLIGHT | residency.ARMED and one.run.pending is None:
                return False
    return True


def inv_40_the_warm_stay(book: Book) -> bool:
    """39, 40: Nobody's switch, timer or shortage ends or parks what is warm or explicit."""
    for lane, row in book.instances.items():
        spec = book.deployments[lane.deployment].spec
        if not (spec.warm or spec.activation is Activation.EXPLICIT) or row.revision != _revision(book, lane):
            continue
        life = row.machine.life
        if (
            isinstance(life, residency.State)
            and life.ask is not None
            and life.ask.origin in (Origin.SWITCH, Origin.IDLE)
        ):
            return False
        stop = instance.why_stopped(row.machine)
        if stop is not None and row.has_launch and stop.kind in (StopKind.PRESSURE, StopKind.IDLE, StopKind.RECLAIM):
            return False
    return True


def _revision(book: Book, lane: Lane) -> int:
    return book.deployments[lane.deployment].state.revision


# --- switches, operations, commands ---------------------------------------------------------------


def inv_45_victims_are_on_one_host(book: Book) -> bool:
    """45, S-one: A host has at most one switch, and its victims are, or were, on that host."""
    return all(
        book.switches[identity].host == host and book.switches[identity].phase not in switching.OVER
        for host, identity in book.active_switches.items()
    )


def inv_48_only_a_running_switch_drains(book: Book) -> bool:
    """48: What drains for a switch drains for one that still runs."""
    for lane in book.draining:
        row = book.instances.get(lane)
        if row is None or not isinstance(row.machine.life, residency.State) or not row.draining:
            continue
        life = row.machine.life
        identity = life.ask.switch if life.ask is not None else life.stop.switch if life.stop is not None else None
        if identity is not None and book.switches[identity].phase in switching.OVER:
            return False
    return True


def inv_49_wishes_name_running_switches(book: Book) -> bool:
    """49: A wish that names a switch names one that runs, for this very deployment."""
    for lane in book.wished:
        wish = book.instances[lane].wish
        if wish is None or wish.switch is None:
            continue
        state = book.switches.get(wish.switch)
        if state is None or state.phase in switching.OVER or state.target != lane.deployment or state.host != wish.host:
            return False
    return True


def inv_50_one_start_at_a_time(book: Book) -> bool:
    """50: A deployment has at most one open start; whoever asks for the same joins it."""
    return all(
        sum(1 for _ in operations.open_for(book, identity, operations.SERVE)) <= 1 for identity in book.deployments
    )


def inv_50_an_open_start_is_pursued(book: Book) -> bool:
    """62, 64: Whatever an open operation still waits for is on its way, wanted, or unknown; none is forgotten."""
    for identities in book.open_operations.values():
        for identity in identities:
            state = book.operations[identity]
            goal = operations.GOAL[state.kind]
            for target in state.targets:
                if target.result is not operation.Result.PENDING:
                    continue
                row = book.instances.get(Lane(state.deployment, target.index))
                if row is None or not _pursued(row, goal):
                    return False
    return True


def _pursued(row: InstanceRow, goal: str) -> bool:
    if goal == operations.SERVE:
        return row.wish is not None or row.on_the_way or row.in_progress
    return row.in_progress


def inv_56_what_is_deleted_left_nothing(book: Book) -> bool:
    """56: No instance, route, queue or open operation is left of a deployment that is gone."""
    known = book.deployments.keys()
    return (
        all(lane.deployment in known for lane in book.instances)
        and set(book.routes.values()) <= known
        and all(identity in known or not opened for identity, opened in book.open_operations.items())
        and all(identity in known for identity in book.traffic.queues)
    )


# --- indexes --------------------------------------------------------------------------------------


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


def idx_drains(book: Book) -> bool:
    """Every drain is watched, and exactly the doubted wait for a proof."""
    return book.draining >= {lane for lane, row in book.instances.items() if row.draining} and book.doubted == {
        lane for lane, row in book.instances.items() if instance.wants_proof(row.machine)
    }


def idx_operations(book: Book) -> bool:
    """Open operations are those that have not ended."""
    derived: dict[DeploymentId, set[OperationId]] = {}
    for identity, state in book.operations.items():
        if state.phase in operations.OPEN:
            derived.setdefault(state.deployment, set()).add(identity)
    return {one: set(opened) for one, opened in book.open_operations.items() if opened} == derived


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


# --- transitions: memory ----------------------------------------------------------------------------


def _moved(change: Change) -> list[tuple[str, Holding | None, Holding | None]]:
    """Owners whose holding differs, with what they held and hold."""
    before, after = change.before.ledger.holdings, change.book.ledger.holdings
    if before is after:
        return []
    return [
        (owner, before.get(owner), after.get(owner))
        for owner in {**before, **after}
        if before.get(owner) is not after.get(owner)
    ]


def tr_02_a_rise_fits(change: Change) -> bool:
    """2, 9, 13, 14, M2, M13: A charge rises only within every limit, and on a fresh observation."""
    book = change.book
    for _, was, held in _moved(change):
        if held is None:
            continue
        raised = [domain for domain in held.allocation.bytes if held.on(domain) > (was.on(domain) if was else 0)]
        policy = book.ledger.hosts[held.host]
        for domain in raised:
            if book.ledger.charged(held.host, domain) > _limit(policy.domains[domain]):
                return False
            sample = book.seen.get(held.host, {}).get(domain)
            if sample is None or not 0 <= book.now_ms - sample.seen_at_ms <= policy.observation_ttl_ms:
                return False
        if held.phase is Phase.PARKING and (was is None or was.phase is not Phase.PARKING):
            if book.ledger.parked_count(held.host) > policy.max_parked:
                return False
            if any(book.ledger.parked(held.host, one) > limits.parked_bytes for one, limits in policy.domains.items()):
                return False
    return True


def tr_03_a_fall_has_a_proof(change: Change) -> bool:
    """3, 25, M7, M20: A charge falls, or goes, only in a step whose event carries a proof of that very run."""
    for owner, was, held in _moved(change):
        if was is None:
            continue
        fell = held is None or any(held.on(domain) < was.on(domain) for domain in was.allocation.bytes)
        if not fell:
            continue
        event = change.event
        if not isinstance(event, Proving) or event.incarnation.lane.owner != owner:
            return False
        if event.incarnation.generation != was.generation:
            return False
        if held is not None and held.generation == was.generation and held.lowered_by is None:
            return False
    return True


def tr_04_orders_are_charged_first(change: Change) -> bool:
    """4, 49: Whoever is told to launch, park or wake is charged the peak of it in this very step."""
    wants = ((orders.Launch, Phase.COLD), (orders.Release, Phase.PARKING), (orders.Restore, Phase.WAKE))
    for kind, phase in wants:
        for order in change.of(kind):
            held = change.book.ledger.holding(order.incarnation.lane.owner)
            if held is None or held.phase is not phase or held.generation != order.incarnation.generation:
                return False
            reached = peak(*(held.at(one) for one in PEAKS[phase]))
            if any(held.on(domain) < amount for domain, amount in reached.bytes.items()):
                return False
    return True


def tr_11_epochs_rise(change: Change) -> bool:
    """11: Every change of the ledger has its own epoch."""
    before, after = change.before.ledger, change.book.ledger
    return after.epoch > before.epoch if after is not before else after.epoch == before.epoch


def tr_16_launches_go_where_they_may(change: Change) -> bool:
    """16, 39: A launch goes to an allowed host that is there and not draining, of a deployment that may be started."""
    book = change.book
    for order in change.of(orders.Launch):
        owner = book.deployments[order.incarnation.lane.deployment]
        host = book.hosts[order.host]
        if order.host not in owner.spec.hosts or order.host not in book.online or host.draining:
            return False
        if owner.state.phase is not deployment.Phase.ACTIVE:
            return False
    return True


# --- transitions: processes ---------------------------------------------------------------------------


def tr_17_only_the_recorded_is_ended(change: Change) -> bool:
    """17, 21: A terminate names the present run of its instance, on its host, with what is recorded of it."""
    for order in change.of(orders.Terminate):
        run = change.book.instances[order.incarnation.lane].run
        if run.incarnation != order.incarnation or run.host != order.host or order.processes != run.processes:
            return False
    return True


def tr_19_generations_rise(change: Change) -> bool:
    """18, 19: Each launch has a generation above every one that its deployment ever had."""
    drawn: set[Incarnation] = set()
    for order in change.of(orders.Launch):
        before = change.before.deployments.get(order.incarnation.lane.deployment)
        if before is not None and order.incarnation.generation <= before.generation:
            return False
        if order.incarnation in drawn:
            return False
        drawn.add(order.incarnation)
    return all(
        identity not in change.book.deployments or change.book.deployments[identity].generation >= row.generation
        for identity, row in change.before.deployments.items()
    )


def tr_20_the_stale_moves_nothing(change: Change) -> bool:
    """20, 27: An answer to another order than the present one moves no charge, opens no gate and readies nothing."""
    event = change.event
    if not isinstance(event, e.Outcome):
        return True
    lane = event.incarnation.lane
    before, after = change.before.instances.get(lane), change.book.instances.get(lane)
    if before is None or after is None:
        return True
    current = event.token in (before.run.token, change.before.looks.get(lane))
    proof = getattr(event, "proof", None) or getattr(event, "gone", None)
    if current or (isinstance(proof, GoneProof) and proof.incarnation.generation == before.run.generation):
        return True
    was, held = change.before.ledger.holding(lane.owner), change.book.ledger.holding(lane.owner)
    fell = was is not None and (held is None or any(held.on(one) < was.on(one) for one in was.allocation.bytes))
    return not fell and (before.gate_open or not after.gate_open) and (before.is_ready or not after.is_ready)


def tr_20_orders_have_their_own_token(change: Change) -> bool:
    """20, 27: Every order to a host has a token of its own, and the one that its instance waits for is the newest."""
    given = [order for order in change.orders if isinstance(order, orders.HostOrder)]
    if len({order.token for order in given}) != len(given):
        return False
    for order in given:
        lane = order.incarnation.lane
        before, row = change.before.instances.get(lane), change.book.instances.get(lane)
        if row is None or row.run.incarnation != order.incarnation:
            return False
        if before is not None and order.token <= (before.run.token or 0):
            return False
        if order.token not in (row.run.token, change.book.looks.get(lane)):
            return False
    return True


def tr_22_helpers_change_nothing(change: Change) -> bool:
    """22: A helper's exit moves no instance that serves or sleeps."""
    event = change.event
    if not isinstance(event, e.EngineExited) or event.role is not Role.HELPER:
        return True
    lane = event.incarnation.lane
    before, after = change.before.instances.get(lane), change.book.instances.get(lane)
    if before is None or before.in_progress:
        return True
    return after is not None and after.machine.phase is before.machine.phase and after.gate_open == before.gate_open


def tr_23_gone_covers_everything(change: Change) -> bool:
    """23: What is freed was proven gone with every process that is recorded of it, helpers too."""
    for owner, was, held in _moved(change):
        if was is None or held is not None:
            continue
        event = change.event
        proof = getattr(event, "proof", None) or getattr(event, "gone", None)
        lane = event.incarnation.lane if isinstance(event, e.Outcome) else None
        before = change.before.instances.get(lane) if lane is not None else None
        if before is None or lane is None or lane.owner != owner or proof is None:
            return False
        if isinstance(proof, Gone) and not set(before.run.processes) <= proof.absent:
            return False
    return True


def tr_25_losing_a_session_frees_nothing(change: Change) -> bool:
    """25: A session that ends, a restart and a sample change no charge."""
    if not isinstance(change.event, (e.HostOffline, e.ControllerStarted)):
        return True
    return all(
        was is not None and held is not None and all(held.on(one) >= was.on(one) for one in was.allocation.bytes)
        for _, was, held in _moved(change)
    )


# --- transitions: serving -----------------------------------------------------------------------------


def tr_28_admitted_to_an_open_gate(change: Change) -> bool:
    """28, 29: A request is admitted to the present run of an instance whose gate is open, now or before this step."""
    for order in change.orders:
        if not isinstance(order, orders.Admit):
            continue
        lane = order.incarnation.lane
        row, before = change.book.instances.get(lane), change.before.instances.get(lane)
        if row is None or row.run.generation != order.incarnation.generation or order.host != row.run.host:
            return False
        if not (row.gate_open or (before is not None and before.gate_open) or _closed_just_now(change, row)):
            return False
    return True


def _closed_just_now(change: Change, row: InstanceRow) -> bool:
    """It opened in this step, let waiters in, and was closed again: a drain waits for them."""
    return row.machine.gate.closed_at_ms == change.book.now_ms


def tr_30_a_closed_gate_admits_nobody(change: Change) -> bool:
    """30: While a gate is closed nobody new runs behind it."""
    if not isinstance(change.event, e.RequestFact | e.RequestArrived) and not change.orders:
        return True
    for state in change.book.requests.values():
        before = change.before.requests.get(state.request)
        if state is before or state.phase not in RUNNING or state.incarnation is None:
            continue
        if before is not None and before.phase in RUNNING and before.incarnation == state.incarnation:
            continue
        lane = state.incarnation.lane
        was = change.before.instances.get(lane)
        row = change.book.instances[lane]
        if was is not None and not was.gate_open and not row.gate_open and not _closed_just_now(change, row):
            return False
    return True


def tr_31_exactly_one_end(change: Change) -> bool:
    """31: A request leaves with exactly one outcome, and is told of at most one end in a step."""
    settled = [order.request for order in change.orders if isinstance(order, orders.Settled)]
    told = [order.request for order in change.orders if isinstance(order, orders.Answer | orders.Cut)]
    if len(settled) != len(set(settled)) or len(told) != len(set(told)):
        return False
    came = {change.event.request} if isinstance(change.event, e.RequestArrived) else set()
    left = (change.before.requests.keys() | came) - change.book.requests.keys()
    if isinstance(change.event, e.ControllerStarted):
        return set(settled) <= left  # places of runs that are settled are let go without an outcome
    return left == set(settled)


def tr_32_only_the_unsent_go_elsewhere(change: Change) -> bool:
    """32: Only a request of which nothing was sent waits again."""
    for state in change.book.requests.values():
        if state.phase is not request.Phase.QUEUED:
            continue
        before = change.before.requests.get(state.request)
        if before is not None and before.phase not in (request.Phase.QUEUED, request.Phase.ADMITTED):
            return False
    return True


FREES: dict[request.Phase, tuple[type[e.Event], ...]] = {
    request.Phase.ADMITTED: (e.ClientGone, e.RequestNotAccepted),
    request.Phase.DISPATCHED: (e.RequestFinished, e.EngineRejected),
    request.Phase.STREAMING: (e.RequestFinished, e.EngineRejected),
    request.Phase.COMPLETING: (e.ControllerStarted,),
    request.Phase.CANCEL_ABORT: (e.AbortAcknowledged,),
    request.Phase.CANCEL_IDLE: (e.LoadReported, e.AbortAcknowledged),
    request.Phase.CANCEL_CLOSED: (e.LoadReported,),
    request.Phase.CANCEL_STOP: (e.AbortAcknowledged,),
}
"""Beside the end of its engine, the events that may free a place, by how far its request had got."""


def tr_35_places_are_freed_by_proof(change: Change) -> bool:
    """35, 37: A place is freed by the end of its answer, an abort, an idle engine that had begun it, or its end."""
    event = change.event
    gone = isinstance(event, e.Terminated | e.LaunchFailed | e.Probed | e.ControllerStarted)
    for identity, before in change.before.requests.items():
        if before.phase not in request.PLACED:
            continue
        after = change.book.requests.get(identity)
        if after is not None and after.phase in request.PLACED:
            continue
        if gone and isinstance(event, e.ControllerStarted):
            continue
        if gone and isinstance(event, e.Outcome) and event.incarnation == before.incarnation:
            continue
        if not isinstance(event, FREES[before.phase]):
            return False
        if isinstance(event, e.LoadReported):
            newer = event.read_at_ms > (before.eof_at_ms or before.cut_at_ms or event.read_at_ms)
            idle = not event.running and not event.waiting and event.incarnation == before.incarnation
            if not idle or not newer or not (before.begun or before.eof_at_ms is not None):
                return False
        elif isinstance(event, e.RequestFact) and event.request != identity:
            return False
    return True


def tr_38_nobody_but_an_operator_lifts_a_stop(change: Change) -> bool:
    """38: An operator's stop is lifted by an operator's start alone."""
    if isinstance(change.event, e.StartAsked | e.DeployAsked):
        return True
    return all(
        not row.state.suspended
        or identity not in change.book.deployments
        or change.book.deployments[identity].state.suspended
        for identity, row in change.before.deployments.items()
    )


def tr_39_only_an_operator_starts_the_explicit(change: Change) -> bool:
    """39, 41: A run begins because somebody wants it: an operator where only operators may, else a request too."""
    for order in (*change.of(orders.Launch), *change.of(orders.Restore)):
        lane = order.incarnation.lane
        before, row = change.before.instances.get(lane), change.book.instances[lane]
        wish = row.wish or (before.wish if before is not None else None)
        spec = change.book.deployments[lane.deployment].spec
        if wish is None and (before is None or not _restarts(before)):
            return False
        if spec.activation is Activation.EXPLICIT and wish is not None and wish.origin is not Origin.OPERATOR:
            return False
    return True


def _restarts(row: InstanceRow) -> bool:
    """It starts by itself: its places were stuck, its wake failed, or whoever wanted it gave up on it."""
    life = row.machine.life
    if isinstance(life, cleanup.State):
        kind = life.stop.kind if life.stop is not None else StopKind.FAILED_WAKE
        return kind in (StopKind.SATURATION, StopKind.FAILED_WAKE)
    return life.phase in (activation.ActivationPhase.PLANNED, ResidencyPhase.WAKE_PLANNED)


def tr_41_reading_starts_nothing(change: Change) -> bool:
    """41: A sample or a gauge makes nobody want anything."""
    if not isinstance(change.event, e.Observed | e.LoadReported):
        return True
    return all(
        lane not in change.before.instances
        or row.wish is None
        or change.before.instances[lane].wish is not None
        or bool(change.book.traffic.queue(lane.deployment).waiting)
        for lane, row in ((one, change.book.instances[one]) for one in change.book.wished)
    )


def tr_44_the_woken_are_proven(change: Change) -> bool:
    """44: What woke serves only after it answered as before, where its engine can show that."""
    event = change.event
    for lane in change.before.instances:
        before, after = change.before.instances[lane], change.book.instances.get(lane)
        if after is None or not after.is_ready or before.is_ready:
            continue
        life = before.machine.life
        waking = before.phase in residency.WAKING or (isinstance(life, cleanup.State) and life.lost is Step.WAKE)
        if waking and before.run.needs_canary and getattr(event, "canary", None) is None:
            return False
    return True


# --- transitions: switches and commands -----------------------------------------------------------------


def tr_46_victims_waited_less(change: Change) -> bool:
    """45, 46 (decision 9): Victims are on the switch's host, and nobody waits for one longer than for the target."""
    book = change.book
    for identity, state in book.switches.items():
        if identity in change.before.switches:
            continue
        for victim in state.victims:
            before = change.before.instances.get(victim.lane)
            row = before or book.instances[victim.lane]
            if row.run.host != state.host or victim.lane.deployment == state.target:
                return False
            spec = book.deployments[victim.lane.deployment].spec
            if spec.warm or spec.activation is Activation.EXPLICIT:
                return False
            waiting = [
                change.before.requests[one].arrived_at_ms
                for one, other in change.before.requests.items()
                if other.phase is request.Phase.QUEUED
                and other.deployment == victim.lane.deployment
                and one in book.traffic.queue(victim.lane.deployment).waiting  # let in meanwhile: drained, not bypassed
            ]
            if any(arrived < state.wanted_since_ms for arrived in waiting):
                return False
    return True


def tr_47_a_window_never_moves(change: Change) -> bool:
    """47: The end of a switch's window is set once."""
    return all(
        before.window_ends_at_ms is None
        or identity not in change.book.switches
        or change.book.switches[identity].window_ends_at_ms == before.window_ends_at_ms
        for identity, before in change.before.switches.items()
    )


def tr_49_room_is_for_the_target(change: Change) -> bool:
    """49: On a host with a switch nobody's charge rises but the target's, after every victim's release, or a park's."""
    for owner, was, held in _moved(change):
        if held is None or (was is not None and not any(held.on(d) > was.on(d) for d in held.allocation.bytes)):
            continue
        before = next((one for one in change.before.switches.values() if _runs_on(one, held.host)), None)
        if before is None or held.phase not in (Phase.COLD, Phase.WAKE):
            continue
        after = change.book.switches[before.switch]
        if after.phase is switch.Phase.FAILED:
            continue  # it gave up in this step; what rises now fits without anybody's giving way
        if owner.startswith(f"deployment:{before.target}/"):
            if any(victim.released is None for victim in after.victims):
                return False
        elif after.phase not in switching.OVER:
            return False
    return True


def _runs_on(state: switch.State, host: HostId) -> bool:
    return state.host == host and state.phase not in switching.OVER


def tr_54_a_key_is_one_command(change: Change) -> bool:
    """54: A key that was answered is answered again, or refused, and changes nothing either way."""
    command = getattr(change.event, "command", None)
    if command is None or command.key not in change.before.receipts:
        return True
    return not change.changed and [type(order) for order in change.orders] == [orders.Reply]


def tr_55_a_refusal_changes_nothing(change: Change) -> bool:
    """55, M15: A refused command changes nothing of any deployment, instance or charge, nor opens an operation."""
    if getattr(change.event, "command", None) is None:
        return True
    refused = any(isinstance(order, orders.Reply) and order.code is not None for order in change.orders)
    return not refused or not any(
        record.kind in ("deployment", "instance", "operation", "switch", "ledger") for record in change.changed
    )


def tr_56_a_delete_leaves_nothing(change: Change) -> bool:
    """56: A deployment goes only once nothing of it runs or is charged."""
    for identity in change.before.deployments.keys() - change.book.deployments.keys():
        if any(lane.deployment == identity for lane in change.book.instances):
            return False
        if any(owner.startswith(f"deployment:{identity}/") for owner, _ in change.book.ledger.rows()):
            return False
    return True


STATE: tuple[StateClaim, ...] = (
    inv_01_charges_within_limits,
    inv_04_host_kv_is_a_part,
    inv_08_ready_claims_are_held_throughout,
    inv_12_the_unknown_keeps_the_larger,
    inv_13_exactly_what_may_run_is_charged,
    inv_13_no_charge_without_an_owner,
    inv_13_the_phase_is_the_ledgers,
    inv_m5_budgets_are_ordered,
    inv_m7_below_its_peak_with_a_proof,
    inv_m12_a_whole_host_has_one_owner,
    inv_16_hosts_are_allowed,
    inv_19_generations_are_drawn,
    inv_19_generations_differ,
    inv_20_tokens_are_drawn,
    inv_28_open_means_ready_proven_and_online,
    inv_33_places_are_bounded,
    inv_34_waiting_is_bounded,
    inv_35_places_are_on_runs,
    inv_36_what_parks_runs_nothing,
    inv_38_what_an_operator_stopped_does_not_start,
    inv_40_the_warm_stay,
    inv_45_victims_are_on_one_host,
    inv_48_only_a_running_switch_drains,
    inv_49_wishes_name_running_switches,
    inv_50_one_start_at_a_time,
    inv_50_an_open_start_is_pursued,
    inv_56_what_is_deleted_left_nothing,
    idx_lanes,
    idx_routes,
    idx_busy,
    idx_drains,
    idx_operations,
    idx_switches,
    idx_traffic,
    idx_due,
)

TRANSITIONS: tuple[ChangeClaim, ...] = (
    tr_02_a_rise_fits,
    tr_03_a_fall_has_a_proof,
    tr_04_orders_are_charged_first,
    tr_11_epochs_rise,
    tr_16_launches_go_where_they_may,
    tr_17_only_the_recorded_is_ended,
    tr_19_generations_rise,
    tr_20_the_stale_moves_nothing,
    tr_20_orders_have_their_own_token,
    tr_22_helpers_change_nothing,
    tr_23_gone_covers_everything,
    tr_25_losing_a_session_frees_nothing,
    tr_28_admitted_to_an_open_gate,
    tr_30_a_closed_gate_admits_nobody,
    tr_31_exactly_one_end,
    tr_32_only_the_unsent_go_elsewhere,
    tr_35_places_are_freed_by_proof,
    tr_38_nobody_but_an_operator_lifts_a_stop,
    tr_39_only_an_operator_starts_the_explicit,
    tr_41_reading_starts_nothing,
    tr_44_the_woken_are_proven,
    tr_46_victims_waited_less,
    tr_47_a_window_never_moves,
    tr_49_room_is_for_the_target,
    tr_54_a_key_is_one_command,
    tr_55_a_refusal_changes_nothing,
    tr_56_a_delete_leaves_nothing,
)

LIGHT: tuple[StateClaim, ...] = (
    inv_01_charges_within_limits,
    inv_13_exactly_what_may_run_is_charged,
    inv_13_no_charge_without_an_owner,
    inv_28_open_means_ready_proven_and_online,
)
"""Cheap and grave: what is charged, and what may be dispatched to."""


def assert_state(book: Book, claims: tuple[StateClaim, ...] = STATE) -> None:
    """Raises: InvariantBroken naming the first claim that does not hold."""
    for claim in claims:
        if not claim(book):
            raise InvariantBroken(f"world: {claim.__doc__}")


def assert_change(change: Change, claims: tuple[ChangeClaim, ...] = TRANSITIONS) -> None:
    """Raises: InvariantBroken naming the first claim that a step does not keep."""
    for claim in claims:
        if not claim(change):
            raise InvariantBroken(f"world: {claim.__doc__} ({type(change.event).__name__})")
