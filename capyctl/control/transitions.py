"""What must be true of every step of the world, under the reference's numbers (lifecycle 23, memory M1-M20).

They are checked by simulation and exploration; the world never asks them of itself. Those about parking and
waking are in `parking_claims`.
"""

from __future__ import annotations

from capyctl.control import events as e
from capyctl.control import orders, preinit, switching
from capyctl.control.changes import Change, ChangeClaim, moved
from capyctl.control.invariants import most
from capyctl.control.parking_claims import PARKING
from capyctl.control.records import InstanceRow
from capyctl.errors import InvariantBroken
from capyctl.fsm import activation, cleanup, deployment, request, residency, switch
from capyctl.fsm.proofs import Gone, GoneProof
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.run import Step
from capyctl.fsm.types import Activation, Domain, HostId, Incarnation, Origin, Phase, Role, StopKind
from capyctl.ledger.asks import PEAKS
from capyctl.ledger.charges import Holding
from capyctl.ledger.types import peak

RUNNING = request.IN_ENGINE | {request.Phase.ADMITTED}

Proving = (
    e.LaunchReady
    | e.LaunchFailed
    | e.Terminated
    | e.Probed
    | e.ParkConfirmed
    | e.ParkRefused
    | e.WakeConfirmed
    | e.WakeFailed
)
"""Events that carry a proof which may lower a charge."""


# --- transitions: memory ----------------------------------------------------------------------------


def tr_02_a_rise_fits(change: Change) -> bool:
    """1, 2, 9, 14, M1, M2, M13: A charge rises only within every limit and on a fresh sample, or to what one shows."""
    book = change.book
    for _, was, held in moved(change):
        if held is None:
            continue
        if was is not None and was.phase is held.phase is Phase.PARKED:
            continue  # M1: what a park of its revision was measured to leave
        raised = [domain for domain in held.allocation.bytes if held.on(domain) > (was.on(domain) if was else 0)]
        policy = book.ledger.hosts[held.host]
        if isinstance(change.event, e.Observed) and _was_seen_to_hold(change, was, held, raised):
            continue
        for domain in raised:
            if book.ledger.charged(held.host, domain) > most(policy.domains[domain]):
                return False
            sample = book.seen.get(held.host, {}).get(domain)
            if sample is None or not 0 <= book.now_ms - sample.seen_at_ms <= policy.observation_ttl_ms:
                return False
        if held.phase is Phase.PARKING and (was is None or was.phase is not Phase.PARKING):
            leaves = _wakes_for_it(change, held)
            if book.ledger.parked_count(held.host, but=leaves) > policy.max_parked:
                return False
            if any(
                book.ledger.parked(held.host, one, but=leaves) > limits.parked_bytes
                for one, limits in policy.domains.items()
            ):
                return False
    return True


def _wakes_for_it(change: Change, held: Holding) -> set[str]:
    """The sleeping target of the switch that parks this owner: it leaves the parked set as the owner enters it."""
    book, owner = change.book, next(owner for owner, one in change.book.ledger.rows() if one is held)
    identity = book.active_switches.get(held.host)
    if identity is None or owner not in {victim.lane.owner for victim in book.switches[identity].victims}:
        return set()
    rows = ((lane, row) for lane, row in book.of(book.switches[identity].target) if row.run.host == held.host)
    return {
        lane.owner
        for lane, row in rows
        if row.phase is ResidencyPhase.WAKE_PLANNED and row.wish is not None and row.wish.switch == identity
    }


def _was_seen_to_hold(change: Change, was: Holding | None, held: Holding, raised: list[Domain]) -> bool:
    """A sample found more of it resident than it was charged: it is charged that, whatever the limits say."""
    assert isinstance(change.event, e.Observed)
    owner = next(owner for owner, one in change.book.ledger.rows() if one is held)
    samples = change.event.domains
    return (
        was is not None
        and held.phase is was.phase
        and all(one in held.overrun and samples[one].residents.get(owner) == held.on(one) for one in raised)
    )


def tr_03_a_fall_has_a_proof(change: Change) -> bool:
    """3, 25, M7, M20: A charge falls, or goes, only in a step whose event carries a proof of that very run."""
    for owner, was, held in moved(change):
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
    """4: Whoever is told to launch, park or wake is charged the peak of it in this very step."""
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
    """16: A launch goes to an allowed host that is there and not draining, of a deployment that may be started."""
    book = change.book
    for order in change.of(orders.Launch):
        owner = book.deployments[order.incarnation.lane.deployment]
        if order.host not in owner.spec.hosts or order.host not in book.online or book.hosts[order.host].draining:
            return False
        if owner.state.phase is not deployment.Phase.ACTIVE:
            return False
    return True


# --- transitions: processes ---------------------------------------------------------------------------


def tr_17_only_the_recorded_is_ended(change: Change) -> bool:
    """17: A terminate names the present run of its instance, on its host, with what is recorded of it."""
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
    for owner, was, held in moved(change):
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
    """25, M20: A session that ends, a restart and a sample change no charge."""
    if not isinstance(change.event, (e.HostOffline, e.ControllerStarted)):
        return True
    return all(
        was is not None and held is not None and all(held.on(one) >= was.on(one) for one in was.allocation.bytes)
        for _, was, held in moved(change)
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
    if isinstance(change.event, e.StartAsked | e.PreinitializeAsked | e.DeployAsked):
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
    return life.phase in activation.WAITING or life.phase is ResidencyPhase.WAKE_PLANNED


def tr_41_reading_starts_nothing(change: Change) -> bool:
    """41: A sample or a gauge makes nobody want anything."""
    if not isinstance(change.event, e.Observed | e.LoadReported):
        return True
    return all(
        lane not in change.before.instances
        or row.wish is None
        or change.before.instances[lane].wish is not None
        or bool(change.book.traffic.queue(lane.deployment).waiting)
        or preinit.is_for(change.book, row.wish)  # an operator asked for it before: its turn came
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
    """45, 46, 66 (decision 9): Victims sit on its host, and nobody waits longer for one than for the target."""
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
    for owner, was, held in moved(change):
        if held is None or (was is not None and not any(held.on(d) > was.on(d) for d in held.allocation.bytes)):
            continue
        before = next((one for one in change.before.switches.values() if _runs_on(one, held.host)), None)
        if before is None or held.phase not in (Phase.COLD, Phase.WAKE):
            continue
        after = change.book.switches[before.switch]
        if after.phase in switching.OVER:
            continue  # it ended in this step; what rises now fits without anybody's giving way
        if owner.startswith(f"deployment:{before.target}/"):
            if any(victim.released is None for victim in after.victims):
                return False
        else:
            return False
    return True


def _runs_on(state: switch.State, host: HostId) -> bool:
    return state.host == host and state.phase not in switching.OVER


def tr_54_a_key_is_one_command(change: Change) -> bool:
    """54: A key that was answered is answered again, or refused, and changes nothing either way."""
    command = getattr(change.event, "command", None)
    if command is None or command.key not in change.before.receipts:
        return True
    if change.changed:
        return False
    known = change.book.receipts.get(command.key)
    owed = (
        known is not None and known.digest == command.digest and command.key in change.book.owed
    )  # still to be answered, for both
    return [type(order) for order in change.orders] == ([] if owed else [orders.Reply])


def tr_55_a_refusal_changes_nothing(change: Change) -> bool:
    """55, M15: A refused command changes nothing of any deployment, instance or charge, nor opens an operation."""
    command = getattr(change.event, "command", None)
    if command is None:
        return True
    refused = any(
        isinstance(order, orders.Reply) and order.code is not None and order.key == command.key
        for order in change.orders
    )
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
    *PARKING,
)


def assert_change(change: Change, claims: tuple[ChangeClaim, ...] = TRANSITIONS) -> None:
    """Raises: InvariantBroken naming the first claim that a step does not keep."""
    for claim in claims:
        if not claim(change):
            raise InvariantBroken(f"world: {claim.__doc__} ({type(change.event).__name__})")
