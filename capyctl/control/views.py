"""The world as people and programs read it: plain JSON values, built on demand, activating nothing (api 5).

Reading never changes the world (invariant 41). Figures are those of the rows: what is shown as charged is
what the ledger holds.
"""

from __future__ import annotations

from typing import Any

from capyctl.control import operations, provenance, requests, residue, waits
from capyctl.control.book import Book, lane_of_owner
from capyctl.control.host_views import hosts, released, switch_view
from capyctl.control.naming import host_name, lane_name
from capyctl.control.records import DeploymentRow, InstanceRow
from capyctl.control.spelling import instant, size, sizes
from capyctl.control.world import World
from capyctl.fsm import deployment as machine
from capyctl.fsm import instance, request, switch
from capyctl.fsm.operation import Kind
from capyctl.fsm.operation import Phase as OperationPhase
from capyctl.fsm.operation import State as Operation
from capyctl.fsm.types import (
    DeploymentId,
    Domain,
    Lane,
    Millis,
    OperationId,
    Origin,
    Phase,
    RequestId,
    SwitchId,
)
from capyctl.ledger.charges import Holding
from capyctl.ledger.types import HostPolicy, Plan

Json = dict[str, Any]  # plain JSON values of several types

STATES = ("ready", "draining", "parking", "waking", "starting", "stopping")
"""Aggregate states in order of precedence, as far as one instance decides (lifecycle 3.2)."""

PARKED_BY = {Origin.PREINIT: "preinitialize"}
"""Words for who asked for a park, where the origin's own is none for people."""

MADE_ROOM = {
    switch.Phase.RECHECK: "the room is looked at",
    switch.Phase.ACTIVATING: "it loads or wakes in their room",
    switch.Phase.OPENING: "it opens",
}
"""What a switch does once its victims are gone."""

BARRED = frozenset({machine.Gate.MISMATCH, machine.Gate.UNUSABLE, machine.Gate.UNMEASURABLE})
"""Checkpoint gates through which no start goes."""

_PROGRESS = {
    OperationPhase.ACCEPTED: "accepted",
    OperationPhase.RUNNING: "running",
    OperationPhase.UNCERTAIN: "uncertain",
    OperationPhase.SUCCEEDED: "succeeded",
    OperationPhase.PARTIAL: "failed",
    OperationPhase.FAILED: "failed",
    OperationPhase.SUPERSEDED: "cancelled",
    OperationPhase.EXPIRED: "failed",
}


# --- deployments --------------------------------------------------------------------------------------


def deployments(world: World, now_ms: Millis) -> list[Json]:
    """Every deployment, by name."""
    rows = sorted(world.book.deployments.values(), key=lambda row: row.spec.name)
    return [_deployment(world.book, row, now_ms) for row in rows]


def deployment(world: World, identity: DeploymentId, now_ms: Millis) -> Json | None:
    """One deployment (api 5.5), None when there is none."""
    row = world.book.deployments.get(identity)
    return None if row is None else _deployment(world.book, row, now_ms)


def _deployment(book: Book, row: DeploymentRow, now_ms: Millis) -> Json:
    identity, spec = row.state.deployment, row.spec
    instances = list(book.of(identity))
    ready = sum(one.gate_open for _, one in instances)
    latest = book.operations.get(book.latest_operation.get(identity, OperationId("")))
    plan, policy = shown_plan(row, instances), _policy(book, row, instances)
    return {
        "id": identity,
        "name": spec.name,
        "revision": str(row.state.revision),
        "routes": list(spec.routes),
        "api": spec.api,
        "residency": spec.residency.value,
        "residency_reason": spec.residency_reason or None,
        "activation": spec.activation.value,
        "warm": spec.warm,
        "profile": spec.profile,
        "engine": spec.traits.family,
        "record": row.state.phase.value,
        "desired_state": "stopped" if requests.operator_stopped(book, row) else "ready",
        "observed_state": observed_state(row, [one for _, one in instances]),
        "degraded": 0 < ready < spec.instances,
        "ready": f"{ready}/{spec.instances}",
        "hosts": [{"id": host, "name": host_name(book, host)} for host in spec.hosts],
        "instances": [_instance(book, lane, one, now_ms) for lane, one in instances],
        "startup": None if plan is None else provenance.of_phase(plan, policy, Phase.COLD),
        "parked": None if plan is None else provenance.of_phase(plan, policy, Phase.PARKED),
        "memory": [] if plan is None else provenance.planned(plan, policy),
        "initialize_ms": plan.initialize_ms if plan else None,
        "context": _context(plan),
        "slots": plan.slots if plan else None,
        "facts": dict(plan.facts) if plan else {},
        "parsers": _parsers(plan),
        "checkpoint": _checkpoint(row),
        "latest_operation": None if latest is None else _operation(latest),
        "waiting": _waiting(book, row, instances),
        "requests": _requests(book, identity),
        "ledger": [
            line for lane, one in instances for line in provenance.charges(book, lane, _instance_plan(row, one))
        ],
        "created_at_ms": instant(row.created_at_ms),
        "supported_actions": _actions(row, instances),
        "document": spec.document,
    }


def _context(plan: Plan | None) -> Json | None:
    """None while it is not resolved, and for an engine that is not told one."""
    if plan is None or not plan.context_tokens:
        return None
    return {"tokens": plan.context_tokens, "reason": plan.context_reason}


def _parsers(plan: Plan | None) -> Json | None:
    """Which parsers its engine is told of, and where each comes from; None for engines that have none."""
    facts = {} if plan is None else plan.facts
    found = {
        kind: {"name": facts[f"{kind}_parser"], "source": facts[f"{kind}_parser_source"]}
        for kind in ("tool_call", "reasoning")
        if f"{kind}_parser" in facts
    }
    return found or None


def observed_state(row: DeploymentRow, instances: list[InstanceRow]) -> str:
    """The aggregate state (lifecycle 3.2). A checkpoint that cannot be used reads as failed: no start can succeed."""
    states = ["reconciling" if _doubted(one) else instance.published(one.machine) for one in instances]
    if any(one.gate_open for one in instances):
        return "ready"
    for state in STATES:
        if state in states:
            return state
    for state in ("uncertain", "reconciling", "parked"):
        if state in states:
            return state
    return "failed" if "failed" in states or _barred(row) else "stopped"


def _barred(row: DeploymentRow) -> bool:
    """Its checkpoint cannot be used, and not because an operator stopped its download."""
    return row.state.gate in BARRED and row.state.gate_code != "deployment_stopped"


def _doubted(one: InstanceRow) -> bool:
    """READY by its record, and not proven to this controller session."""
    return one.is_ready and not one.gate_open and instance.wants_proof(one.machine)


def shown_plan(row: DeploymentRow, instances: list[tuple[Lane, InstanceRow]]) -> Plan | None:
    """What a run was sized by, else what the first host resolved the revision to."""
    for _, one in instances:
        if one.plan is not None and one.has_launch:
            return one.plan
    return next(iter(row.plans.values()), None)


def _policy(book: Book, row: DeploymentRow, instances: list[tuple[Lane, InstanceRow]]) -> HostPolicy | None:
    """Of the host that `shown_plan` is for."""
    hosts = [one.run.host for _, one in instances if one.plan is not None and one.has_launch]
    host = next(iter([*hosts, *row.plans]), None)
    return None if host is None or host not in book.hosts else book.hosts[host].policy


def _instance_plan(row: DeploymentRow, one: InstanceRow) -> Plan | None:
    return one.plan if one.plan is not None else next(iter(row.plans.values()), None)


def _checkpoint(row: DeploymentRow) -> Json:
    gate = row.state.gate
    return {
        "state": gate.value,
        "digest": row.digest,
        "weight_bytes": size(row.weight_bytes if row.digest else None),
        "code": row.state.gate_code,
        "reason": row.state.gate_reason or None,
    }


def _instance(book: Book, lane: Lane, one: InstanceRow, now_ms: Millis) -> Json:
    run = one.run
    stop = instance.why_stopped(one.machine)
    claims = () if one.plan is None else one.plan.at(Phase.READY).claims
    api = next((process.pid for process in run.processes), None)
    state = instance.published(one.machine)
    host = one.last_host if run.host is None and state == "failed" else run.host  # where it failed
    return {
        "index": lane.index,
        "host_id": host,
        "host": None if host is None else host_name(book, host),
        "generation": None if run.generation is None else str(run.generation),
        "revision": str(one.revision) if one.has_launch else None,
        "observed_state": state,
        "phase": one.machine.phase.value,
        "lifecycle": "disabled" if lane.index in book.deployments[lane.deployment].state.stopped else "active",
        "devices": [claim.device for claim in claims] if one.has_launch else [],
        "closures": sorted(reason.value for reason in one.machine.gate.reasons),
        "last_error": _last_error(book.deployments[lane.deployment], one),
        "retry_at_ms": instant(run.retry_at_ms if (run.retry_at_ms or 0) > now_ms else None),
        "stopped": None
        if stop is None or one.gate_open
        else {
            "kind": stop.kind.value,
            "for": stop.for_name,
            "switch_id": stop.switch,
            "no_room_to_park": _had_no_room(book, lane, stop.switch),
            "at_ms": instant(stop.asked_at_ms),
        },
        "sleeps": _sleeps(one),
        "parked": _parked(book, lane, one),
        "pid": api if one.has_launch else None,
        "ready_at_ms": instant(run.ready_at_ms),
        "in_flight": book.running_on.get(lane, 0),
    }


def _sleeps(one: InstanceRow) -> Json | None:
    """Since when it is parked, who asked for that, and for whom; None while it is not."""
    if not one.is_parked or one.slept is None:
        return None
    slept = one.slept
    kind = None if slept.origin is None else PARKED_BY.get(slept.origin, slept.origin.value)
    return {"since_ms": instant(slept.at_ms), "kind": kind, "for": slept.for_name, "switch_id": slept.switch}


def _had_no_room(book: Book, lane: Lane, identity: SwitchId | None) -> bool:
    """Whether a switch stopped it because its parked copy had no room."""
    state = None if identity is None else book.switches.get(identity)
    victims = () if state is None else state.victims
    return any(one.lane == lane and one.released is switch.Released.STOPPED_NO_ROOM for one in victims)


def _parked(book: Book, lane: Lane, one: InstanceRow) -> Json | None:
    """What the parks of this launch left, bytes per domain; None before the first. `growth`: the next is a stop."""
    if not one.has_launch or not one.parked_first:
        return None
    return {
        "first_bytes": sizes(one.parked_first),
        "latest_bytes": sizes(one.parked_latest),
        "growth": residue.outgrown(book, lane),
    }


def _last_error(row: DeploymentRow, one: InstanceRow) -> Json | None:
    """What went wrong last, while it still matters: the run's own problem, else the checkpoint's."""
    if one.gate_open and (one.run.last_error is None or one.run.last_error.code != "wake_mismatch"):
        return None  # what it serves says that it is over; that a copy woke wrongly stays to be known
    if one.run.last_error is not None:
        return {"code": one.run.last_error.code, "message": one.run.last_error.reason}
    if _barred(row) and not one.has_launch:
        return {"code": row.state.gate_code or "checkpoint_unusable", "message": row.state.gate_reason}
    return None


def _waiting(book: Book, row: DeploymentRow, instances: list[tuple[Lane, InstanceRow]]) -> str | None:
    """Why something that is wanted has not happened yet, in one line."""
    active = [book.switches[one] for one in book.active_switches.values()]
    for state in active:
        if state.target == row.state.deployment:
            of = (book.deployments.get(victim.lane.deployment) for victim in state.victims)
            names = ", ".join(row.spec.name for row in of if row is not None)  # one that left may be deleted meanwhile
            if state.phase in MADE_ROOM:
                return f"{names or 'others'} gave way; {MADE_ROOM[state.phase]}"
            return f"a switch makes room ({state.phase.value}){f': {names}' if names else ''}"
    for _, one in instances:
        if one.in_progress and one.waits_for is not None:
            return one.waits_for.reason
    if row.state.gate is machine.Gate.PENDING and any(one.in_progress for _, one in instances):
        return "the checkpoint is being measured"
    for lane, one in instances:
        if lane in book.doubted:
            if one.run.host not in book.online:
                return "its host does not answer"
            _, found = book.vain.get(lane, (0, ""))
            return f"its engine is looked at again, and has not answered yet{f': {found}' if found else ''}"
    return None


def _requests(book: Book, identity: DeploymentId) -> Json:
    queue = book.traffic.queues.get(identity)
    running = [book.requests[one] for one in queue.running] if queue else []
    at_stop = sum(one.phase is request.Phase.CANCEL_STOP for one in running)
    when_idle = sum(one.phase in request.CANCELLING and one.phase is not request.Phase.CANCEL_STOP for one in running)
    return {
        "in_flight": len(running),
        "waiting": len(queue.waiting) if queue else 0,
        "settle_when_idle": when_idle,
        "settle_at_stop": at_stop,
    }


def _actions(row: DeploymentRow, instances: list[tuple[Lane, InstanceRow]]) -> list[Json]:
    """What a command would be allowed to do now; the command itself decides again."""
    parks = row.spec.residency.parks
    ready = any(one.is_ready for _, one in instances)
    live = any(one.has_launch or one.in_progress for _, one in instances)
    serves = all(one.is_ready for _, one in instances)
    unparked = None if ready else "none of its instances is ready"
    return [
        {"action": "start", "allowed": not serves, "reason": "every instance of it is ready" if serves else None},
        {"action": "stop", "allowed": True, "reason": None},
        {
            "action": "park",
            "allowed": parks and ready,
            "reason": unparked if parks else f"its residency is restart_only{_because(row)}",
        },
        {"action": "delete", "allowed": not live, "reason": "it is not stopped; use --stop" if live else None},
    ]


def _because(row: DeploymentRow) -> str:
    return f": {row.spec.residency_reason}" if row.spec.residency_reason else ""


# --- operations, requests, the whole ----------------------------------------------------------------


def operation(world: World, identity: OperationId) -> Json | None:
    """One operation (api 5.6), None when there is none or it was forgotten."""
    state = world.book.operations.get(identity)
    return None if state is None else {**_operation(state), "victims": _victims(world.book, state)}


def _victims(book: Book, state: Operation) -> list[Json]:
    """Who gives way for it: how, and how their memory came free once it did."""
    made = None if state.switch is None else book.switches.get(state.switch)
    return [
        {
            "instance": str(victim.lane),
            "name": lane_name(book, victim.lane),
            "way": "park" if victim.parks else "stop (no room to park)" if victim.no_room else "stop",
            "released": released(victim),
        }
        for victim in (() if made is None else made.victims)
    ]


def _action(state: Operation) -> str:
    """What people call it: a start initialises; a deploy that starts nothing is a deploy."""
    if state.kind is Kind.START:
        return "initialize"
    return "deploy" if state.kind is Kind.INITIALIZE and not state.targets else state.kind.value


def _operation(state: Operation) -> Json:
    code, reason = state.code, state.reason or None
    if state.phase in operations.OPEN:
        code, reason = None, state.waiting_reason or None
    return {
        "id": state.operation,
        "deployment_id": state.deployment,
        "action": _action(state),
        "state": _PROGRESS.get(state.phase, state.phase.value),
        "phase": state.phase.value,
        "error_code": code,
        "reason": reason,
        "waiting_code": state.waiting_code,
        "switch_id": state.switch,
        "after": state.after,
        "joined": state.joined,
        "instances": [
            {"index": target.index, "result": target.result.value, "code": target.code, "reason": target.reason or None}
            for target in state.targets
        ],
        "accepted_at_ms": instant(state.accepted_at_ms),
        "finished_at_ms": instant(state.ended_at_ms),
    }


def snapshot(world: World, now_ms: Millis) -> Json:
    """Deployments, operations, hosts, switches and the ledger, which agree with each other (api 5.4)."""
    book = world.book
    return {
        "scope": "durable_store_foundation",
        "deployments": deployments(world, now_ms),
        "operations": [_operation(book.operations[one]) for one in sorted(book.operations)],
        "hosts": hosts(world),
        "switches": [switch_view(book, book.switches[one]) for one in sorted(book.switches)],
        "ledger": {
            "epoch": str(book.ledger.epoch),
            "reservations": [
                {
                    "owner": owner,
                    "host_id": held.host,
                    "domain": domain,
                    "phase": "uncertain" if held.uncertain else held.phase.value,
                    "bytes": size(amount),
                    "provenance": _reserved(book, owner, held, domain),
                    "lowered_by": held.lowered_by,
                }
                for owner, held in sorted(book.ledger.rows())
                for domain, amount in sorted(held.allocation.bytes.items())
            ],
        },
    }


def _reserved(book: Book, owner: str, held: Holding, domain: Domain) -> str:
    one = book.instances.get(lane_of_owner(owner))
    policy = book.hosts[held.host].policy if held.host in book.hosts else None
    return provenance.of_charge(None if one is None else one.plan, policy, held, domain)


def waiting(world: World, identity: RequestId) -> tuple[str, int, str] | None:
    """(the published state of its deployment, its place in the queue from 1, why it waits) of a waiting request.

    The last is empty where the state says it all, and names nobody. None for a request that does not wait.
    """
    state = world.book.requests.get(identity)
    if state is None or state.deployment is None or state.phase is not request.Phase.QUEUED:
        return None
    row = world.book.deployments.get(state.deployment)
    if row is None:
        return None
    order = list(world.book.traffic.queue(state.deployment).waiting)
    rows = [one for _, one in world.book.of(state.deployment)]
    return observed_state(row, rows), order.index(identity) + 1, waits.for_client(world.book, state.deployment)
