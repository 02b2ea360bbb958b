"""Operators' commands in the world: answered once per key, recorded before they are answered (lifecycle 3, 13, 19)."""

from __future__ import annotations

import attrs

from capyctl.control import (
    answering,
    deeds,
    lanes,
    measuring,
    operations,
    requests,
    switching,
    whole_hosts,
)
from capyctl.control import events as e
from capyctl.control.book import Book
from capyctl.control.orders import Measure, MemberReceipt, Receipt, Reply
from capyctl.control.records import DeploymentRow, InstanceRow, ReceiptRow, Wish
from capyctl.control.spec import Spec
from capyctl.fsm import deployment, facts, instance, operation
from capyctl.fsm.operation import Kind
from capyctl.fsm.run import CLOSING
from capyctl.fsm.table import Refused
from capyctl.fsm.types import Activation, DeploymentId, Millis, OperationId, Origin
from capyctl.ledger import together

RECEIPTS_MAX = 2_000  # the oldest are forgotten beyond

GATED = "{name} cannot start: {gate}"
WORDS = {
    "still_stopping": "its stop is not finished. Try again, or: capyctl start deployment {name} --wait",
    "revision_conflict": "the revision is {revision} now; read it again (capyctl inspect deployment {name}) "
    "and repeat the change",
    "route_conflict": "{clash}",
    "unsupported_capability": "{name} cannot park: its residency is restart_only{because}. "
    "Try: capyctl stop deployment {name}",
    "checkpoint_digest_pending": "the checkpoint of {name} is still being measured; wait, or use --wait",
    "checkpoint_unusable": GATED,
    "checkpoint_mismatch": GATED,
    "lifecycle_conflict": "another operation on {name} has an open step; its outcome comes first",
    "profile_not_published": "no allowed host offers the engine profile of {name}",
    "not_found": "{name} is being deleted",
}


class _Turned(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(code)
        self.code, self.message = code, message


def handle(book: Book, event: e.Event) -> None:
    """Answer one command: the stored receipt for a known key, else what the machines say."""
    command: e.Command = event.command  # type: ignore[attr-defined]
    known = book.receipts.get(command.key)
    if known is not None:
        if known.digest == command.digest:
            if not answering.again(book, command.key):
                book.order(Reply(key=command.key, receipt=known.receipt))
        else:
            book.order(
                Reply(
                    key=command.key,
                    code="idempotency_conflict",
                    message="this request identity was used for another command; leave it out, or repeat that command",
                )
            )
        return
    try:
        receipt = _decide(book, event)
    except _Turned as turned:
        book.order(Reply(key=command.key, code=turned.code, message=turned.message))
        return
    book.put_receipt(command.key, ReceiptRow(digest=command.digest, receipt=receipt, given_at_ms=event.now_ms))
    _prune_receipts(book)
    if receipt.operation is not None and _evicts(event):
        answering.owe(book, command, receipt, refusable=isinstance(event, e.StartAsked) and not receipt.joined)
    else:
        book.order(Reply(key=command.key, receipt=receipt))


def _evicts(event: e.Event) -> bool:
    """It is a start for which others may have to give way: who does is part of its answer."""
    return (isinstance(event, e.StartAsked) and event.evict) or (
        isinstance(event, e.DeployAsked) and event.activate and event.evict
    )


def _decide(book: Book, event: e.Event) -> Receipt:
    match event:
        case e.DeployAsked(expected_revision=None):
            return _create(book, event)
        case e.DeployAsked():
            return _revise(book, event)
        case e.StartAsked(park=True):
            return _preinitialize(book, event)
        case e.PreinitializeAsked():
            return _preinitialize_all(book, event)
        case e.StartAsked():
            return _start(book, event)
        case e.StopAsked():
            return _stop(book, event)
        case e.ParkAsked():
            return _park(book, event)
        case e.DeleteAsked():
            return _delete(book, event)
        case e.DrainAsked():
            return _drain(book, event)
        case _:
            raise TypeError(f"{type(event).__name__} is no command")


# --- deploy -----------------------------------------------------------------------------------------


def _create(book: Book, event: e.DeployAsked) -> Receipt:
    spec, identity = event.spec, event.deployment
    taken = [route for route in spec.routes if route in book.routes]
    row = DeploymentRow(state=deployment.State(deployment=identity), spec=spec, created_at_ms=event.now_ms)
    free = not taken and spec.name not in book.named
    fact = deployment.DeployAsked(now_ms=event.now_ms, wanted=deeds.wanted(spec), published=bool(spec.hosts), free=free)
    after, effects = deployment.step(row.state, fact)
    _refuse(effects, row, "" if free else _clash(book, spec))
    book.put_deployment(attrs.evolve(row, state=after))
    for route in spec.routes:
        book.routes[route] = identity
    deeds.resize(book, identity, spec.instances)
    deeds.perform(book, identity, effects, None)
    return _activated(book, event, identity, revision=after.revision)


def _clash(book: Book, spec: Spec, own: DeploymentId | None = None) -> str:
    """Which name or route of `spec` is another deployment's, and whose."""
    if own is None and spec.name in book.named:
        return f"{spec.name} is deployed already. Try another name, or --revision to replace it"
    route, holder = next((one, book.routes[one]) for one in spec.routes if book.routes.get(one, own) != own)
    return f"{spec.name} cannot have the route {route}: {book.deployments[holder].spec.name} has it. Name another"


def _revise(book: Book, event: e.DeployAsked) -> Receipt:
    row = _known(book, event.deployment)
    spec = event.spec
    if any(book.routes.get(route, row.state.deployment) != row.state.deployment for route in spec.routes):
        raise _Turned("route_conflict", _clash(book, spec, row.state.deployment))
    if event.activate and _still_stopping(book, row.state.deployment):
        raise _Turned("still_stopping", WORDS["still_stopping"].format(name=row.spec.name))
    alike = row.spec.same_but_count(spec)
    count_only = alike and (row.spec.instances != spec.instances or _at_work(book, row.state.deployment))
    if count_only and row.state.phase is deployment.Phase.ACTIVE and spec.instances > row.spec.instances:
        _check_together(book, row, spec)
    if alike:
        settled = row.spec
        spec = attrs.evolve(spec, residency=settled.residency, residency_reason=settled.residency_reason)
    fact = deployment.ReviseAsked(
        now_ms=event.now_ms,
        expected_revision=event.expected_revision or 0,
        wanted=deeds.wanted(spec),
        count_only=count_only,
        live=any(one.has_launch or one.in_progress for _, one in book.of(row.state.deployment)),
    )
    after, effects = deployment.step(row.state, fact)
    _refuse(effects, row)
    kept = {} if not count_only else {"digest": row.digest, "plans": row.plans, "weight_bytes": row.weight_bytes}
    book.put_deployment(
        DeploymentRow(
            state=after,
            spec=spec,
            created_at_ms=row.created_at_ms,
            generation=row.generation,
            **kept,  # type: ignore[arg-type]
        )
    )
    for route in row.spec.routes:
        if book.routes.get(route) == row.state.deployment:
            del book.routes[route]
    for route in spec.routes:
        book.routes[route] = row.state.deployment
    for lane, _ in list(book.of(row.state.deployment)):
        lanes.tell(book, lane, facts.Revised(now_ms=event.now_ms))
    deeds.perform(book, row.state.deployment, effects, None)
    if kept and after.gate is deployment.Gate.MEASURED:
        # Its document is what it was, its files may not be: whoever deploys again means those that are there now.
        book.order(Measure(deployment=row.state.deployment, revision=after.revision))
    receipt = _activated(book, event, row.state.deployment, revision=after.revision)
    if spec.activation is Activation.EXPLICIT:
        _leave_to_operators(book, row.state.deployment)
    return receipt


def _leave_to_operators(book: Book, identity: DeploymentId) -> None:
    """Only an operator starts it from now on: no request that came before wants it any more, nor waits in vain."""
    code, words = "deployment_inactive", requests.inactive_words(book.deployments[identity])
    switching.drop_request_wishes(book, identity, code, words)
    if not any(one.wish is not None or one.gate_open or one.on_the_way for _, one in book.of(identity)):
        requests.fail_waiters(book, identity, code, words)


def _check_together(book: Book, row: DeploymentRow, spec: Spec) -> None:
    """More instances than its hosts can ever hold are refused at once: what each needs is known already."""
    if not set(spec.hosts) <= set(row.plans):
        return
    policies = {host: book.hosts[host].policy for host in row.plans}
    found = together.too_many(spec.instances, row.plans, policies, named=spec.devices, max_per_host=spec.max_per_host)
    if found is not None:
        raise _Turned(found.code, found.message(spec.name))


def _at_work(book: Book, identity: DeploymentId) -> bool:
    """An engine of it serves, or is about to: nothing of that is ended for a document that says the same."""
    return any(one.has_launch and not one.is_parked and not one.ending for _, one in book.of(identity))


def _activated(book: Book, event: e.DeployAsked, identity: DeploymentId, *, revision: int) -> Receipt:
    """The receipt of a deploy; with `activate` it also opened a start, which waits for the digest if it must."""
    row = book.deployments[identity]
    pending = row.state.gate is deployment.Gate.PENDING
    if not event.activate:
        _open(book, event.command.operation, identity, Kind.INITIALIZE, (), None, event.now_ms)
        return Receipt(
            operation=event.command.operation, deployment=identity, revision=revision, checkpoint_pending=pending
        )
    start = e.StartAsked(
        now_ms=event.now_ms,
        command=event.command,
        deployment=identity,
        evict=event.evict,
        deadline_ms=event.deadline_ms,
    )
    return _start(book, start, Kind.INITIALIZE)


# --- start, stop, park, delete, drain -------------------------------------------------------------------


def _start(book: Book, event: e.StartAsked, kind: Kind = Kind.START) -> Receipt:
    row = _known(book, event.deployment)
    identity = row.state.deployment
    after, effects = deployment.step(
        row.state, deployment.StartAsked(now_ms=event.now_ms, expected_revision=event.expected_revision)
    )
    by_gate = any(isinstance(one, Refused) and one.code == row.state.gate_code for one in effects)
    if by_gate and measuring.again(book, row):
        raise _Turned("checkpoint_digest_pending", WORDS["checkpoint_digest_pending"].format(name=row.spec.name))
    _refuse(effects, row)
    open_start = next(operations.open_for(book, identity, operations.SERVE), None)
    rows = list(book.of(identity))
    if _still_stopping(book, identity):
        raise _Turned("still_stopping", WORDS["still_stopping"].format(name=row.spec.name))
    wanted = any(one.has_launch or one.wish is not None for _, one in rows)  # by whoever makes room for it
    if kind is Kind.START and not event.evict and not wanted:
        full = whole_hosts.in_the_way(book, identity)
        if full is not None:
            raise _Turned("startup_requires_empty_host", full)
    book.put_deployment(attrs.evolve(row, state=after))
    wish = Wish(
        origin=Origin.OPERATOR,
        since_ms=event.now_ms,
        operation=event.command.operation,
        evict=event.evict,
        until_ms=event.deadline_ms,
        initialize_ms=event.initialize_ms,
    )
    if open_start is not None:
        operations.tell(book, open_start.operation, operation.Joined(now_ms=event.now_ms))
        _wish_all(book, identity, attrs.evolve(wish, operation=open_start.operation))
        return Receipt(operation=open_start.operation, deployment=identity, revision=after.revision, joined=True)
    ready = {lane.index for lane, one in rows if one.is_ready}
    indices = tuple(lane.index for lane, _ in rows if lane.index not in ready)
    if kind is Kind.START and indices and all(one.is_parked for lane, one in rows if lane.index in indices):
        kind = Kind.WAKE
    _open(book, event.command.operation, identity, kind, indices, event.deadline_ms, event.now_ms)
    _wish_all(book, identity, wish)
    return Receipt(
        operation=event.command.operation,
        deployment=identity,
        revision=after.revision,
        checkpoint_pending=after.gate is deployment.Gate.PENDING,
    )


def _preinitialize(book: Book, event: e.StartAsked) -> Receipt:
    """Accept it; `preinit` takes the steps."""
    member = e.Member(
        deployment=event.deployment, operation=event.command.operation, expected_revision=event.expected_revision
    )
    made = _prepare(book, member, _may_be_prepared(book, member, event.now_ms), event.deadline_ms)
    gate = book.deployments[made.deployment].state.gate
    return Receipt(
        operation=made.operation,
        deployment=made.deployment,
        revision=made.revision,
        joined=made.joined,
        checkpoint_pending=not made.joined and gate is deployment.Gate.PENDING,
    )


def _preinitialize_all(book: Book, event: e.PreinitializeAsked) -> Receipt:
    """Accept all of them, or none; each waits until the one before it is done, well or not."""
    names = [member.deployment for member in event.members]
    if not names or len(set(names)) < len(names):
        raise _Turned("invalid_request", "members: expected one deployment or more, each named once")
    accepted: list[deployment.State] = []
    refused: list[_Turned] = []
    for member in event.members:
        try:
            accepted.append(_may_be_prepared(book, member, event.now_ms))
        except _Turned as turned:
            refused.append(turned)
    if refused:  # whoever asked hears of each, and sends the others again
        told = "; ".join(one.message for one in refused)
        raise _Turned(refused[0].code, f"{told}{'; nothing is prepared' if len(event.members) > 1 else ''}")
    made: list[MemberReceipt] = []
    for member, after in zip(event.members, accepted, strict=True):
        before = made[-1].operation if made else None
        made.append(_prepare(book, member, after, event.deadline_ms, before))
    return Receipt(operation=made[0].operation, deployment=None, revision=None, members=tuple(made))


def _may_be_prepared(book: Book, member: e.Member, now_ms: Millis) -> deployment.State:
    """The deployment as it is once it is accepted. Raises: _Turned."""
    row = _known(book, member.deployment)
    if not row.spec.residency.parks:
        name = row.spec.name
        words = f"{name} cannot be parked: its residency is restart_only{_because(row)}. "
        raise _Turned("unsupported_capability", f"{words}Try: capyctl start deployment {name}")
    after, effects = deployment.step(
        row.state, deployment.StartAsked(now_ms=now_ms, expected_revision=member.expected_revision)
    )
    _refuse(effects, row)
    if _still_stopping(book, member.deployment):
        raise _Turned("still_stopping", WORDS["still_stopping"].format(name=row.spec.name))
    return after


def _prepare(
    book: Book, member: e.Member, after: deployment.State, deadline_ms: Millis | None, before: OperationId | None = None
) -> MemberReceipt:
    identity = member.deployment
    book.put_deployment(attrs.evolve(book.deployments[identity], state=after))
    for lane, _ in list(book.of(identity)):  # also those whose turn comes later: a request may want them before
        lanes.tell(book, lane, facts.Reopened(now_ms=book.now_ms))
    opened = next(operations.open_for(book, identity, operations.PREINIT), None)
    if opened is not None:
        operations.tell(book, opened.operation, operation.Joined(now_ms=book.now_ms))
        return MemberReceipt(operation=opened.operation, deployment=identity, revision=after.revision, joined=True)
    indices = tuple(lane.index for lane, one in book.of(identity) if not one.is_parked)
    _open(book, member.operation, identity, Kind.PREINITIALIZE, indices, deadline_ms, book.now_ms, before)
    return MemberReceipt(operation=member.operation, deployment=identity, revision=after.revision)


def _still_stopping(book: Book, identity: DeploymentId) -> bool:
    """Whether an operator's stop of it is not finished; what a switch ends starts again when it is gone."""
    for _, one in book.of(identity):
        stop = instance.why_stopped(one.machine)
        if one.has_launch and stop is not None and stop.kind in CLOSING:
            return True
    return False


def _wish_all(book: Book, identity: DeploymentId, wish: Wish) -> None:
    for lane, one in list(book.of(identity)):
        if not one.is_ready:
            lanes.tell(book, lane, facts.Reopened(now_ms=book.now_ms))
            deeds.activate(book, lane, wish)


def _stop(book: Book, event: e.StopAsked) -> Receipt:
    row = _known(book, event.deployment)
    identity = row.state.deployment
    after, effects = deployment.step(
        row.state, deployment.StopAsked(now_ms=event.now_ms, expected_revision=event.expected_revision)
    )
    _refuse(effects, row)
    open_stop = next(operations.open_for(book, identity, operations.STOP), None)
    if open_stop is not None:
        book.put_deployment(attrs.evolve(row, state=after))
        operations.tell(book, open_stop.operation, operation.Joined(now_ms=event.now_ms))
        deeds.perform(book, identity, effects, open_stop.operation)
        return Receipt(operation=open_stop.operation, deployment=identity, revision=after.revision, joined=True)
    book.put_deployment(attrs.evolve(row, state=after))
    deeds.supersede(book, identity, event.command.operation)
    indices = tuple(lane.index for lane, one in book.of(identity) if one.has_launch or one.in_progress)
    _open(book, event.command.operation, identity, Kind.STOP, indices, None, event.now_ms)
    deeds.perform(book, identity, effects, event.command.operation)
    return Receipt(operation=event.command.operation, deployment=identity, revision=after.revision)


def _park(book: Book, event: e.ParkAsked) -> Receipt:
    row = _known(book, event.deployment)
    identity = row.state.deployment
    after, effects = deployment.step(
        row.state,
        deployment.ParkAsked(
            now_ms=event.now_ms,
            expected_revision=event.expected_revision,
            resident=any(_resident(one) for _, one in book.of(identity)),
        ),
    )
    if any(isinstance(one, Refused) and one.code == "lifecycle_conflict" for one in effects):
        raise _Turned("lifecycle_conflict", _not_parked(book, row))
    _refuse(effects, row)
    book.put_deployment(attrs.evolve(row, state=after))
    open_park = next(operations.open_for(book, identity, operations.PARK), None)
    if open_park is not None:
        operations.tell(book, open_park.operation, operation.Joined(now_ms=event.now_ms))
        deeds.perform(book, identity, effects, open_park.operation)
        return Receipt(operation=open_park.operation, deployment=identity, revision=after.revision, joined=True)
    indices = tuple(lane.index for lane, one in book.of(identity) if one.may_park or one.parking)
    _open(book, event.command.operation, identity, Kind.PARK, indices, None, event.now_ms)
    deeds.perform(book, identity, effects, event.command.operation)
    return Receipt(operation=event.command.operation, deployment=identity, revision=after.revision)


def _resident(one: InstanceRow) -> bool:
    return one.may_park or one.parking or one.is_parked


def _not_parked(book: Book, row: DeploymentRow) -> str:
    """Why nothing of it can be parked now, and the way there."""
    name = row.spec.name
    if row.state.phase is deployment.Phase.DELETING:
        return f"{name} is being deleted"
    states = [instance.published(one.machine) for _, one in book.of(row.state.deployment)]
    busy = next((state for state in states if state not in ("stopped", "failed")), None)
    if busy is not None:
        return f"{name} is {busy}, and only what is ready can be parked; try again when it is"
    return f"{name} is not running, so there is nothing to park. Try: capyctl preinitialize deployment {name}"


def _not_deleted(book: Book, row: DeploymentRow) -> str:
    """What is left of it, and the way to its end."""
    name = row.spec.name
    both = f"capyctl delete deployment {name} --stop"
    states = [instance.published(one.machine) for _, one in book.of(row.state.deployment)]
    busy = next((state for state in states if state not in ("stopped", "failed")), None)
    if row.state.suspended or row.state.phase is deployment.Phase.DELETING or busy is None:
        return f"{name} is {busy or 'not cleaned up yet'}; try again when it is stopped, or: {both}"
    return f"{name} is {busy}. Stop it first: capyctl stop deployment {name} --wait; or in one step: {both}"


def _delete(book: Book, event: e.DeleteAsked) -> Receipt:
    row = _known(book, event.deployment)
    identity = row.state.deployment
    live = any(
        one.has_launch or one.in_progress or book.ledger.holding(lane.owner) is not None
        for lane, one in book.of(identity)
    ) or any(True for _ in operations.open_for(book, identity))
    indices = tuple(lane.index for lane, one in book.of(identity) if one.has_launch or one.in_progress)
    after, effects = deployment.step(row.state, deployment.DeleteAsked(now_ms=event.now_ms, stop=event.stop, live=live))
    if any(isinstance(one, Refused) and one.code == "delete_requires_cleanup" for one in effects):
        raise _Turned("delete_requires_cleanup", _not_deleted(book, row))
    _refuse(effects, row)
    book.put_deployment(attrs.evolve(row, state=after))
    deeds.supersede(book, identity, event.command.operation)
    _open(book, event.command.operation, identity, Kind.DELETE, indices, None, event.now_ms)
    deeds.perform(book, identity, effects, event.command.operation)
    return Receipt(operation=event.command.operation, deployment=identity, revision=after.revision)


def _drain(book: Book, event: e.DrainAsked) -> Receipt:
    host = book.hosts.get(event.host)
    if host is None:
        raise _Turned("not_found", f"no host {event.host}")
    if event.profile is not None:
        deeds.drain_profile(book, event.host, event.profile)
        return Receipt(operation=None, deployment=None, revision=None)
    book.put_host(attrs.evolve(host, draining=not event.undrain))
    if not event.undrain:
        deeds.drain_host(book, event.host)
    return Receipt(operation=None, deployment=None, revision=None)


# --- shared -------------------------------------------------------------------------------------------


def _open(
    book: Book,
    identity: OperationId,
    target: DeploymentId,
    kind: Kind,
    indices: tuple[int, ...],
    deadline_ms: Millis | None,
    now_ms: Millis,
    after: OperationId | None = None,
) -> None:
    """Open an operation. What must exclude it was asked before: here it is accepted, or done at once."""
    book.operations[identity] = operation.State(
        operation=identity, deployment=target, kind=kind, origin=Origin.OPERATOR, after=after
    )
    operations.tell(book, identity, operation.Submitted(now_ms=now_ms, indices=indices, deadline_ms=deadline_ms))
    operations.prune(book)


def _known(book: Book, identity: DeploymentId) -> DeploymentRow:
    row = book.deployments.get(identity)
    if row is None:
        raise _Turned("not_found", f"no deployment {identity}; see capyctl list deployments")
    return row


def _refuse(effects: tuple[object, ...], row: DeploymentRow, clash: str = "") -> None:
    for effect in effects:
        if isinstance(effect, Refused):
            if effect.code == row.state.gate_code and row.state.phase is not deployment.Phase.DELETING:
                words = GATED  # before the words of its code: a source's `not_found` is no deletion
            else:
                words = WORDS.get(effect.code, "{name} cannot do that now")
            message = words.format(
                name=row.spec.name,
                revision=row.state.revision,
                gate=row.state.gate_reason.removeprefix(f"{row.spec.name}: "),
                because=_because(row),
                clash=clash,
            )
            raise _Turned(effect.code, message)


def _because(row: DeploymentRow) -> str:
    """` (why its residency is what it is)`, where that is known."""
    return f" ({row.spec.residency_reason})" if row.spec.residency_reason else ""


def _prune_receipts(book: Book) -> None:
    if len(book.receipts) > RECEIPTS_MAX:
        oldest = min(book.receipts, key=lambda key: book.receipts[key].given_at_ms)
        del book.receipts[oldest]
        book.touch("receipt", oldest)
