"""What must be true of the whole world, under the reference's numbers (lifecycle 23, memory M1-M20).

STATE are claims about one book; `transitions` has those about one step. Tests check all of them; the world
itself checks `touched` after each step that moved an instance or a charge, and nothing on a request's way.
Not shown here: 5 and 11 (types), 17, 21, 24, 26, 57, 58 (hosts), 51-53 (groups), 60-72 (simulation).
"""

from __future__ import annotations

from collections.abc import Callable

from capyctl.control import operations, requests, switching
from capyctl.control.book import Book, lane_of
from capyctl.control.indexes import INDEXES
from capyctl.control.records import InstanceRow
from capyctl.errors import InvariantBroken
from capyctl.fsm import activation, cleanup, deployment, instance, operation, residency, switch
from capyctl.fsm.cleanup import CleanupPhase
from capyctl.fsm.gate import GatePhase
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.run import Step
from capyctl.fsm.types import (
    Activation,
    HostId,
    Lane,
    Origin,
    Phase,
    StopKind,
)
from capyctl.ledger.asks import PEAKS
from capyctl.ledger.types import DomainPolicy, Plan, peak

StateClaim = Callable[[Book], bool]

HELD_PHASES = activation.IN_FLIGHT | frozenset(ResidencyPhase) | frozenset(CleanupPhase)
"""Phases in which processes exist or may."""


def most(limits: DomainPolicy) -> int:
    """What may be charged on a domain at all: the managed limit, and the free reserve left alone."""
    return min(limits.managed_bytes, limits.capacity_bytes - limits.reserve_bytes)


# --- memory ---------------------------------------------------------------------------------------


def inv_01_charges_within_limits(book: Book) -> bool:
    """1, M1, M2: Charges fit a domain's limits, unless an owner there is uncertain or was measured to hold more."""
    return all(_within_limits(book, host) for host in book.ledger.hosts)


def _within_limits(book: Book, host: HostId) -> bool:
    held = [row for _, row in book.ledger.on(host)]
    if any(row.uncertain or row.phase is Phase.PARKED or any(map(row.planned, row.overrun)) for row in held):
        return True  # a charge that is kept, or measured, may exceed a limit: then nothing is admitted
    return all(
        sum(row.on(domain) for row in held) <= most(limits)
        for domain, limits in book.ledger.hosts[host].domains.items()
    )


def inv_15_host_kv_is_a_part(book: Book) -> bool:
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
    return all(_charged_as_it_runs(book, lane, row) for lane, row in book.instances.items())


def _charged_as_it_runs(book: Book, lane: Lane, row: InstanceRow) -> bool:
    held = book.ledger.holding(lane.owner)
    if held is None:
        return not row.has_launch
    return row.has_launch and held.generation == row.run.generation and held.host == row.run.host


def inv_13_no_charge_without_an_owner(book: Book) -> bool:
    """13, 56: Every charge belongs to an instance of a deployment that exists."""
    owners = {lane.owner for lane in book.instances}
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


def inv_m6_plans_are_ordered(book: Book) -> bool:
    """M5, M6: Later starts are planned with cold of at least ready, and copies of the placeholder at least."""
    return all(_is_ordered(plan) for row in book.deployments.values() for plan in row.plans.values())


def _is_ordered(plan: Plan) -> bool:
    ready, cold, copy = (plan.at(phase) for phase in (Phase.READY, Phase.COLD, Phase.PARKED))
    left = plan.measured.get(Phase.PARKED, {})
    return all(cold.on(domain) >= amount >= copy.on(domain) for domain, amount in ready.bytes.items()) and all(
        copy.on(domain) >= figure.planned_bytes for domain, figure in left.items()
    )


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
    return all(_open_rightly(book, row) for row in book.instances.values())


def _open_rightly(book: Book, row: InstanceRow) -> bool:
    gate = row.machine.gate
    if gate.phase is GatePhase.CLOSED:
        return True
    ready = row.is_ready and gate.generation == row.run.generation and not gate.reasons
    return ready and gate.proven_in == book.session and row.run.host in book.online


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


def inv_49_made_room_is_wanted(book: Book) -> bool:
    """49, 65: While a switch keeps the room that it made, some instance of its target wants it."""
    return all(
        any(row.wish is not None and row.wish.switch == identity for _, row in book.of(book.switches[identity].target))
        for identity in book.active_switches.values()
        if book.switches[identity].phase in (switch.Phase.RECHECK, switch.Phase.ACTIVATING)
    )


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
    return row.in_progress or goal == operations.PREINIT  # the others wait for their turn


def inv_56_what_is_deleted_left_nothing(book: Book) -> bool:
    """56: No instance, route, queue or open operation is left of a deployment that is gone."""
    known = book.deployments.keys()
    return (
        all(lane.deployment in known for lane in book.instances)
        and set(book.routes.values()) <= known
        and all(identity in known or not opened for identity, opened in book.open_operations.items())
        and all(identity in known for identity in book.traffic.queues)
    )


STATE: tuple[StateClaim, ...] = (
    inv_01_charges_within_limits,
    inv_15_host_kv_is_a_part,
    inv_08_ready_claims_are_held_throughout,
    inv_12_the_unknown_keeps_the_larger,
    inv_13_exactly_what_may_run_is_charged,
    inv_13_no_charge_without_an_owner,
    inv_13_the_phase_is_the_ledgers,
    inv_m5_budgets_are_ordered,
    inv_m6_plans_are_ordered,
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
    inv_49_made_room_is_wanted,
    inv_50_one_start_at_a_time,
    inv_50_an_open_start_is_pursued,
    inv_56_what_is_deleted_left_nothing,
    *INDEXES,
)


def assert_state(book: Book, claims: tuple[StateClaim, ...] = STATE) -> None:
    """Raises: InvariantBroken naming the first claim that does not hold."""
    for claim in claims:
        if not claim(book):
            raise InvariantBroken(f"world: {claim.__doc__}")


def check_touched(book: Book) -> None:
    """The grave claims about what this step moved: what is charged, and what may be dispatched to.

    Only of the instances and hosts it touched, so that one broken instance does not stop the others.
    Raises: InvariantBroken naming the claim.
    """
    hosts: set[HostId] = set()
    for kind, key in book.changed:
        if kind == "instance":
            lane = lane_of(key)
            row = book.instances.get(lane)
            if row is not None and not _charged_as_it_runs(book, lane, row):
                raise InvariantBroken(f"world: {inv_13_exactly_what_may_run_is_charged.__doc__} Not so: {lane}")
            if row is not None and not _open_rightly(book, row):
                raise InvariantBroken(f"world: {inv_28_open_means_ready_proven_and_online.__doc__} Not so: {lane}")
        elif kind == "ledger":
            held = book.ledger.holding(key)
            if held is not None:
                hosts.add(held.host)
    for host in hosts:
        if not _within_limits(book, host):
            raise InvariantBroken(f"world: {inv_01_charges_within_limits.__doc__} Not so: {host}")
