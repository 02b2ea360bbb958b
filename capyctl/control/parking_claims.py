"""What must be true of every step that parks, wakes, prepares, or charges what is parked.

Written from the reference, beside the tables and the ledger's own rules: which proof each fall needs, that no call
on a whole engine is repeated, and who may be ended for whom. Checked with `transitions`.
Source: lifecycle 2, 4.4, 21, 23; memory 8.3, 15.
"""

from __future__ import annotations

from collections.abc import Mapping

from capyctl.control import events as e
from capyctl.control import orders
from capyctl.control.changes import Change, ChangeClaim, moved
from capyctl.control.operations import OPEN
from capyctl.control.records import InstanceRow
from capyctl.fsm import instance
from capyctl.fsm.operation import Kind
from capyctl.fsm.proofs import Resident
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.types import Activation, Bytes, Domain, OperationId, Phase, StopKind
from capyctl.ledger import parked
from capyctl.ledger.charges import Holding

# --- proofs -------------------------------------------------------------------------------------------


def tr_03_a_released_copy_was_sampled(change: Change) -> bool:
    """3 (P-QUIET, P-SAME, P-RESID, P-UNSENT): A charge falls to parked by a sample after the release, or if unasked."""
    for owner, was, held in moved(change):
        if was is None or held is None or held.phase is not Phase.PARKED or not _fell(was, held):
            continue
        event = change.event
        if isinstance(event, e.WakeFailed) and event.unsent is not None and was.phase is Phase.WAKE:
            continue
        if not isinstance(event, e.ParkConfirmed | e.Probed) or event.same is None or not event.resident:
            return False
        if event.incarnation.lane.owner != owner or event.same.incarnation != event.incarnation:
            return False
        if isinstance(event, e.ParkConfirmed) and event.quiet.incarnation != event.incarnation:
            return False
        if any(
            not _shows(event, event.resident, held, one) for one in was.allocation.bytes if held.on(one) < was.on(one)
        ):
            return False
    return True


def _fell(was: Holding, held: Holding) -> bool:
    return any(held.on(domain) < was.on(domain) for domain in was.allocation.bytes)


def _shows(event: e.Outcome, resident: Mapping[Domain, Resident], held: Holding, domain: Domain) -> bool:
    """A sample of that run, taken after the call, of no more than what stays charged there."""
    sample = resident.get(domain)
    return (
        sample is not None
        and sample.incarnation == event.incarnation
        and sample.sampled_at_ms > sample.released_at_ms
        and sample.resident_bytes <= held.on(domain)
    )


def tr_03_a_woken_engine_answered(change: Change) -> bool:
    """3 (P-READY, P-SAME, P-CANARY, P-UNSENT): What was to park or wake is charged as ready by a proof of that."""
    for _, was, held in moved(change):
        if was is None or held is None or held.phase is not Phase.READY or not _fell(was, held):
            continue
        match change.event:
            case e.LaunchReady():
                continue
            case e.ParkRefused(unsent=unsent):
                proven = unsent is not None
            case e.WakeConfirmed() | e.Probed() as event:
                run = event.incarnation
                answered = event.usable is not None and event.usable.incarnation == run
                proven = answered and event.same is not None and event.same.incarnation == run
                before = change.before.instances[run.lane]
                if was.phase is Phase.WAKE and before.run.needs_canary:
                    proven = proven and event.canary is not None
            case _:
                proven = False
        if not proven:
            return False
    return True


# --- calls on a whole engine --------------------------------------------------------------------------


def tr_27_whole_engine_calls_are_made_once(change: Change) -> bool:
    """17, 27: A release goes to a drained run and a restore to a parked one, with what is recorded, on its host."""
    calls: list[orders.Release | orders.Restore] = [*change.of(orders.Release), *change.of(orders.Restore)]
    for order in calls:
        before, row = change.before.instances.get(order.incarnation.lane), change.book.instances[order.incarnation.lane]
        if before is None or before.run.incarnation != order.incarnation:
            return False
        if order.host != row.run.host or order.processes != row.run.processes:
            return False
        drained = before.phase in (ResidencyPhase.DRAINING_TO_PARK, ResidencyPhase.PARK_PLANNED)
        if not (drained if isinstance(order, orders.Release) else _sleeps(change, before)):
            return False
    return True


def _sleeps(change: Change, before: InstanceRow) -> bool:
    """It was parked, or this step's event shows that it is."""
    if before.phase in (ResidencyPhase.PARKED, ResidencyPhase.WAKE_PLANNED):
        return True
    event = change.event
    if not isinstance(event, e.Outcome) or event.incarnation != before.run.incarnation:
        return False
    shown = isinstance(event, e.ParkConfirmed) or (isinstance(event, e.Probed) and bool(event.resident))
    unasked = isinstance(event, e.WakeFailed) and event.unsent is not None
    return shown or unasked


# --- the parked set -----------------------------------------------------------------------------------


def tr_m6_a_copy_is_charged_what_was_measured(change: Change) -> bool:
    """M6: What a parked copy is charged rises to what a park left, never past ready; or to what no park empties."""
    for owner, was, held in moved(change):
        if was is None or held is None or not was.phase is held.phase is Phase.PARKED:
            continue
        for domain in held.allocation.bytes:
            if held.on(domain) == was.on(domain):
                continue
            event = change.event
            if isinstance(event, e.Observed) and _stays_resident(event, owner, was, held, domain):
                continue
            if not isinstance(event, e.ParkConfirmed | e.Probed) or not event.resident or domain not in event.resident:
                return False
            alike = owner.startswith(f"deployment:{event.incarnation.lane.deployment}/")
            left = min(event.resident[domain].resident_bytes, was.at(Phase.READY).on(domain))
            if not alike or held.on(domain) != max(left, was.on(domain)):
                return False
    return True


def _stays_resident(event: e.Observed, owner: str, was: Holding, held: Holding, domain: Domain) -> bool:
    """A sample shows more of what it was charged, ready or parked, alike."""
    return was.at(Phase.PARKED).on(domain) == was.at(Phase.READY).on(domain) and event.domains[domain].residents.get(
        owner
    ) == held.on(domain) == held.at(Phase.READY).on(domain)


def tr_m6_what_outgrew_its_bound_parks_no_more(change: Change) -> bool:
    """M6 (memory 8.3): No release goes to a launch whose latest copy passed its first by more than its host allows."""
    for order in change.of(orders.Release):
        row = change.book.instances[order.incarnation.lane]
        policy = change.book.ledger.hosts[order.host]
        for domain, latest in row.parked_latest.items():
            first = row.parked_first.get(domain, latest)
            most = parked.growth_bytes(policy, first)
            if most is not None and latest > Bytes(first + most):
                return False
    return True


def tr_40_only_what_sleeps_is_reclaimed(change: Change) -> bool:
    """39, 40 (memory 15): Room in the parked set is taken from copies alone, and from none that is warm or explicit."""
    for lane, row in change.book.instances.items():
        before = change.before.instances.get(lane)
        if before is row or not _reclaimed(row) or (before is not None and _reclaimed(before)):
            continue
        if before is None or not _sleeps(change, before) or row.wish is not None:
            return False
        spec = change.book.deployments[lane.deployment].spec
        if spec.warm or spec.activation is Activation.EXPLICIT:
            return False
    return True


def _reclaimed(row: InstanceRow) -> bool:
    stop = instance.why_stopped(row.machine)
    return stop is not None and stop.kind is StopKind.RECLAIM


# --- preinitialization --------------------------------------------------------------------------------


def tr_s7_all_are_prepared_or_none(change: Change) -> bool:
    """S7: A command that prepares several is accepted for each of them, in its order, or opens nothing for any."""
    event = change.event
    if not isinstance(event, e.PreinitializeAsked):
        return True
    opened = change.book.operations.keys() - change.before.operations.keys()
    receipt = next((order.receipt for order in change.of(orders.Reply) if order.key == event.command.key), None)
    if receipt is None or event.command.key in change.before.receipts:
        return not opened
    if [one.deployment for one in receipt.members] != [one.deployment for one in event.members]:
        return False
    turns = [None, *(one.operation for one in receipt.members)]
    made = [
        (change.book.operations[one.operation], turn)
        for one, turn in zip(receipt.members, turns, strict=False)
        if not one.joined
    ]
    in_turn = all(state.kind is Kind.PREINITIALIZE and state.after == turn for state, turn in made)
    return in_turn and opened == {state.operation for state, _ in made}


def tr_s7_one_is_prepared_at_a_time(change: Change) -> bool:
    """S7: A preparation wants one instance at a time to serve, once it is its turn, and nobody to give way for it."""
    served: set[OperationId] = set()
    for lane in change.book.wished:
        wish = change.book.instances[lane].wish
        state = None if wish is None or wish.operation is None else change.book.operations.get(wish.operation)
        if wish is None or state is None or state.kind is not Kind.PREINITIALIZE or state.phase not in OPEN:
            continue
        before = None if state.after is None else change.book.operations.get(state.after)
        waits = before is not None and before.phase in OPEN
        known = change.before.instances.get(lane)
        evicts = wish.evict and (known is None or known.wish is None)  # later an operator's own start may say so
        if waits or evicts or state.operation in served:
            return False
        served.add(state.operation)
    return True


PARKING: tuple[ChangeClaim, ...] = (
    tr_03_a_released_copy_was_sampled,
    tr_03_a_woken_engine_answered,
    tr_27_whole_engine_calls_are_made_once,
    tr_m6_a_copy_is_charged_what_was_measured,
    tr_m6_what_outgrew_its_bound_parks_no_more,
    tr_40_only_what_sleeps_is_reclaimed,
    tr_s7_all_are_prepared_or_none,
    tr_s7_one_is_prepared_at_a_time,
)
