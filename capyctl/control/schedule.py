"""The scheduler pass: after an event that may have changed something, do what can be done now (lifecycle 13.2).

Order: unarmed stops and cleanups, drains, parks, wakes and starts by age, switches, waiting requests. A pass
repeats until nothing moves; that it ends is invariant 71.
"""

from __future__ import annotations

import attrs

from capyctl.control import deeds, idle, lanes, notices, operations, preinit, reclaiming, requests, steps, switching
from capyctl.control.book import SETTLING, Book
from capyctl.control.naming import names
from capyctl.control.orders import Probe, ReadLoad
from capyctl.control.records import WAITING, InstanceRow, Wish
from capyctl.errors import InvariantBroken
from capyctl.fsm import deployment, facts, residency, switch
from capyctl.fsm.activation import ActivationPhase
from capyctl.fsm.cleanup import CleanupPhase
from capyctl.fsm.instance import Want, wants, wants_proof
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.run import HoldCause
from capyctl.fsm.types import Activation, DeploymentId, HostId, Lane, Millis, Origin, Phase, StopKind
from capyctl.ledger import admission, asks, cards, estimates, placement
from capyctl.ledger.asks import Proposal
from capyctl.ledger.forecast import Hold
from capyctl.ledger.placement import HOSTS_TOLD, Nowhere
from capyctl.ledger.shortfall import Shortfall

PASSES_MAX = 200  # a pass that still moves after so many rounds is a bug, not work
HOLD_MS = 60_000  # a start held for a loading peer looks again after this long at the latest
PARK_LIMIT_MS = 120_000
HALF_A_SECOND = 500  # an idle model for which somebody waits is looked at again after this


def settle(book: Book) -> None:
    """Run passes until nothing moves.

    Raises: InvariantBroken when it does not come to rest.
    """
    notices.hear(book)
    for _ in range(PASSES_MAX):
        if not book.dirty:
            return
        book.dirty = False
        before = book.version
        for part in (
            _turns,
            _settled,
            _proofs,
            _drains,
            _wishes,
            preinit.advance,
            reclaiming.relieve,
            _parks,
            _wakes,
            _starts,
            _switched,
            _switches,
            _waiters,
        ):
            part(book)
            notices.hear(book)
        if book.version == before:
            book.dirty = False
            return
    raise InvariantBroken(f"the scheduler does not come to rest; moved last: {book.moves[-3:]}")


def _busy(book: Book, *phases: object) -> list[tuple[Lane, InstanceRow]]:
    """Lanes in one of these phases, those first whose wish is oldest."""
    return sorted(book.being(*phases), key=lambda pair: (pair[1].wish.since_ms if pair[1].wish else 0, pair[0]))


# --- turns, drains, parks, wakes ----------------------------------------------------------------------


def _turns(book: Book) -> None:
    """Cleanups whose host answers get their next order; what cannot be sent now waits for the host."""
    for lane, row in book.being(*CleanupPhase):
        if wants(row.machine, book.now_ms) is Want.TURN and row.run.host in book.online:
            lanes.tell(book, lane, facts.Turn(now_ms=book.now_ms, token=book.draw_token()))


def _drains(book: Book) -> None:
    """Tell every draining lane, and the switch that closed one, when nothing runs on it any more."""
    for lane in sorted(book.draining):
        row = book.instances.get(lane)
        if row is None or not (row.draining or switching.closes(book, lane)):
            book.draining.discard(lane)
        elif not requests.waited_for(book, lane):
            if switching.closes(book, lane):
                switching.drained(book, lane)
            else:
                end_requests(book, lane)


def end_requests(book: Book, lane: Lane) -> None:
    """Nothing that a drain waits for runs on this lane: its stop goes on. A park needs the engine's own word too."""
    row = book.instances[lane]
    if row.phase is ResidencyPhase.DRAINING_TO_STOP and row.run.generation is not None:
        lanes.tell(book, lane, facts.RequestsEnded(now_ms=book.now_ms, generation=row.run.generation))
    elif row.phase is ResidencyPhase.DRAINING_TO_PARK and row.run.host in book.online:
        _ask_idle(book, lane, row)


def _ask_idle(book: Book, lane: Lane, row: InstanceRow) -> None:
    """Have the gauges of a drained engine read now, once for what is known: the next regular reading is far off."""
    told_at = max(row.machine.gate.closed_at_ms, book.used_at.get(lane, Millis(0)))
    if row.run.generation is not None and book.asked_idle.get(lane, Millis(-1)) < told_at:
        book.asked_idle[lane] = book.now_ms
        book.order(ReadLoad(incarnation=row.run.incarnation, host=row.run.placed_on))


def _proofs(book: Book) -> None:
    """READY engines whose readiness nobody proved to this session: look at them, one look at a time."""
    for lane in sorted(book.doubted):
        row = book.instances.get(lane)
        if row is None or not wants_proof(row.machine) or lane in book.looks or row.run.host not in book.online:
            continue
        if book.look_again_at.get(lane, Millis(0)) > book.now_ms:
            continue
        token = book.draw_token()
        book.looks[lane] = token
        book.order(
            Probe(
                incarnation=row.run.incarnation,
                token=token,
                host=row.run.placed_on,
                processes=row.run.processes,
            )
        )


def _parks(book: Book) -> None:
    """Planned parks: the copy must have room, after reclaiming older parked ones."""
    for lane, row in _busy(book, ResidencyPhase.PARK_PLANNED):
        leaving = switching.leaving_for(book, lane)
        ask = asks.ask_step(book.ledger, lane.owner, Phase.PARKING, leaving=leaving)
        verdict = admission.propose(book.ledger, ask, book.seen.get(ask.host, {}), book.now_ms)
        if isinstance(verdict, Shortfall):
            if not _parks_ahead(row) and reclaiming.make_room(book, lane, (ask,)):
                continue  # it parks once they are gone
            lanes.tell(
                book,
                lane,
                facts.ParkNotAdmitted(now_ms=book.now_ms, code=verdict.code, reason=switching.words(book, verdict)),
            )
            continue
        book.proposals[lane] = verdict
        if leaving:
            book.crowded.add(ask.host)
        lanes.tell(
            book,
            lane,
            facts.ParkAdmitted(
                now_ms=book.now_ms, token=book.draw_token(), deadline_ms=Millis(book.now_ms + PARK_LIMIT_MS)
            ),
        )


def _wakes(book: Book) -> None:
    """Planned wakes: only where they are parked, in place of what they still hold."""
    for lane, row in _busy(book, ResidencyPhase.WAKE_PLANNED):
        host = row.machine.run.host
        if host is None or host not in book.online or not may_take(book, lane, host):
            continue
        if _gate_holds(book, lane):
            continue
        ask = asks.ask_step(book.ledger, lane.owner, Phase.WAKE)
        verdict = admission.propose(book.ledger, ask, book.seen.get(host, {}), book.now_ms)
        if isinstance(verdict, Shortfall) and _evicts_nobody(book, row) and reclaiming.make_room(book, lane, (ask,)):
            continue
        if isinstance(verdict, Shortfall):
            _short(book, lane, Nowhere(shortfalls=(verdict,)))
            continue
        book.proposals[lane] = verdict
        _fits(book, lane)
        lanes.tell(
            book,
            lane,
            facts.WakeAdmitted(
                now_ms=book.now_ms,
                token=book.draw_token(),
                deadline_ms=Millis(book.now_ms + lanes.plan_of(book, lane).wake_ms),
            ),
        )


def _gate_holds(book: Book, lane: Lane) -> bool:
    """Whether the checkpoint's gate keeps a wake back: while it is measured, or for good, and then it is told so."""
    state = book.deployments[lane.deployment].state
    if state.gate is deployment.Gate.PENDING:
        return True
    if state.phase is not deployment.Phase.UNUSABLE:
        return False
    code = state.gate_code or "checkpoint_unusable"
    lanes.tell(book, lane, facts.WakeNotAdmitted(now_ms=book.now_ms, code=code, reason=state.gate_reason, final=True))
    return True


def _evicts_nobody(book: Book, row: InstanceRow) -> bool:
    """An operator wants it to serve, without anybody who serves giving way for it."""
    wish = row.wish
    return wish is not None and wish.origin is Origin.OPERATOR and not wish.evict and not preinit.is_for(book, wish)


def _parks_ahead(row: InstanceRow) -> bool:
    """It parks before anybody wanted it: nobody who sleeps gives way for that."""
    life = row.machine.life
    return isinstance(life, residency.State) and life.ask is not None and life.ask.origin is Origin.PREINIT


# --- wishes ----------------------------------------------------------------------------------------------


def _wishes(book: Book) -> None:
    """What was in the way of a wish is over: the instance is at rest, so it is started or woken now."""
    for lane in sorted(book.wished):
        row = book.instances[lane]
        if row.wish is None or not (row.may_start or row.is_parked):
            continue
        owner = book.deployments[lane.deployment]
        if owner.state.phase is deployment.Phase.DELETING or requests.operator_stopped(book, owner):
            notices.forget_wish(book, lane)
            continue
        if owner.state.phase is deployment.Phase.UNUSABLE:
            code, reason = owner.state.gate_code or "checkpoint_unusable", owner.state.gate_reason
        else:
            refused = deeds.take_up(book, lane, row.wish)
            if refused is None:
                continue
            code, reason = refused.code, "it cannot be started now"
        operations.failed(book, lane, operations.SERVE, code, reason)
        operations.failed(book, lane, operations.PREINIT, code, reason)
        notices.forget_wish(book, lane)


# --- starts ---------------------------------------------------------------------------------------------


def _starts(book: Book) -> None:
    """Planned starts, oldest first: place them, hold them for a loading peer, or say why they wait."""
    _lift_holds(book)
    for lane, row in _busy(book, ActivationPhase.PLANNED):
        owner = book.deployments[lane.deployment]
        if owner.state.gate is deployment.Gate.PENDING:
            continue  # the digest comes first; status says so
        open_hosts = steps.usable(book, lane)
        if open_hosts:
            place(book, lane, row, open_hosts)
        elif all(host not in owner.plans or _is_draining(book, host) for host in owner.spec.hosts):
            _ineligible(book, lane, final=True)
        # a host that is merely away may come back before the start's own bound


def _is_draining(book: Book, host: HostId) -> bool:
    return host in book.emptying


def _ineligible(book: Book, lane: Lane, *, final: bool) -> None:
    """No allowed host may take it, whatever room there is: every one of them with its reason, once."""
    spec = book.deployments[lane.deployment].spec
    told = [f"{_called(book, host)}: {_why_not(book, lane, host)}" for host in spec.hosts[:HOSTS_TOLD]]
    if len(spec.hosts) > HOSTS_TOLD:
        told.append(f"and {len(spec.hosts) - HOSTS_TOLD} more hosts")
    reason = f"no host may take {spec.name} ({'; '.join(told)})"
    if final or book.told_short.get(lane) != reason:
        book.told_short[lane] = reason
        switching.say_short(book, lane, "host_ineligible", reason, final=final)


def _called(book: Book, host: HostId) -> str:
    return book.hosts[host].policy.name if host in book.hosts else host


def _why_not(book: Book, lane: Lane, host: HostId) -> str:
    """Why an allowed host may not take it, in a few words."""
    owner = book.deployments[lane.deployment]
    if host not in owner.plans:
        return "its files or its needs could not be settled there"
    if host not in book.online:
        return "not connected"
    if _is_draining(book, host):
        return "draining"
    seat = steps.seat(book, lane, host)
    if not placement.has_a_place(seat, owner.spec.max_per_host):
        return f"runs {seat.instances} of it, as many as placement.max_per_host allows"
    ranks = len(cards.cards_of(seat.plan, book.hosts[host].policy))
    few = cards.too_few(book.hosts[host].policy, cards.choice(seat.plan, book.hosts[host].policy, seat.named), ranks)
    return few or "makes room for another model"


def place(book: Book, lane: Lane, row: InstanceRow, hosts: list[HostId]) -> None:
    """Arm a planned start where its peak fits now, hold it for a loading peer, or note why it waits."""
    owner = book.deployments[lane.deployment]
    free = [host for host in hosts if may_take(book, lane, host)] if book.active_switches else hosts
    tries = steps.starts(book, lane, free)
    if lane in book.tried and steps.same(book.tried[lane], _grounds(book, tries)):
        if _evicts_nobody(book, row):
            reclaiming.make_room(book, lane, tries)  # who sleeps may be wanted by nobody since
        return
    if not tries:
        if free and free == hosts:
            _ineligible(book, lane, final=not steps.runs_anywhere(book, lane))
        return
    verdict = placement.place(book.ledger, tries, book.seen, book.now_ms)
    match verdict:
        case Proposal(ask=ask):
            plan = estimates.laid_out(owner.plans[ask.host], book.hosts[ask.host].policy, ask.phases)
            plan = attrs.evolve(plan, installation=book.installation(ask.host, owner.spec.profile))
            initialize = row.wish.initialize_ms if row.wish and row.wish.initialize_ms else plan.initialize_ms
            revision, traits = owner.state.revision, owner.spec.traits
            book.put_instance(
                lane,
                attrs.evolve(
                    row,
                    plan=plan,
                    digest=owner.digest,
                    revision=revision,
                    last_host=ask.host,
                    parked_first={},
                    parked_latest={},
                    slept=None,
                ),
            )
            book.proposals[lane] = verdict
            _fits(book, lane)
            lanes.tell(
                book,
                lane,
                facts.Placed(
                    now_ms=book.now_ms,
                    host=ask.host,
                    generation=book.draw_generation(lane.deployment),
                    token=book.draw_token(),
                    deadline_ms=Millis(book.now_ms + initialize),
                    tier=owner.spec.residency,
                    waits_idle=traits.idle_signal and not traits.parks,
                    needs_canary=traits.parks,
                ),
            )
        case Hold():
            until = Millis(book.now_ms + HOLD_MS)
            lanes.tell(book, lane, facts.Held(now_ms=book.now_ms, until_ms=until, cause=HoldCause.PEER_STARTUP))
        case Nowhere() if _evicts_nobody(book, row) and reclaiming.make_room(book, lane, tries):
            pass  # it is placed once they are gone
        case Nowhere():
            _short(book, lane, verdict)
            weighed = {*verdict.hosts[:HOSTS_TOLD], *(seat.host for seat in tries.may_fit)}
            if all(_is_seen(book, host) for host in weighed):
                book.tried[lane] = _grounds(book, tries)


def _is_seen(book: Book, host: HostId) -> bool:
    """All of a host is in samples that count; else time alone may change a verdict: one a little ahead comes true."""
    policy, seen = book.hosts[host].policy, book.seen.get(host, {})
    return all(
        domain in seen and 0 <= book.now_ms - seen[domain].seen_at_ms <= policy.observation_ttl_ms
        for domain in policy.domains
    )


def _grounds(book: Book, tries: placement.Tries) -> tuple[object, ...]:
    """All that a verdict on a start rests on, beside the time: while it is the very same, so is the verdict.

    Where what is charged leaves no room, no sample can change that.
    """
    return (tries.seated, *(book.seen.get(seat.host) for seat in tries.may_fit))


def may_take(book: Book, lane: Lane, host: HostId) -> bool:
    """Room that a switch makes on a host is for the switch's target alone, once the switch has found it (49)."""
    active = switching.active_on(book, host)
    return active is None or (active.target == lane.deployment and active.phase is switch.Phase.ACTIVATING)


def _short(book: Book, lane: Lane, nowhere: Nowhere) -> None:
    """It fits nowhere now: say why it waits, once, and leave it to the switches if it may evict."""
    book.shortfalls[lane] = nowhere
    reason = nowhere.message(names(book))
    if book.told_short.get(lane) != reason:
        book.told_short[lane] = reason
        helps = "" if nowhere.never or not _evicts_nobody(book, book.instances[lane]) else switching.way_out(book, lane)
        switching.say_short(book, lane, nowhere.code, f"{reason}{helps}", final=nowhere.never)


def _fits(book: Book, lane: Lane) -> None:
    for memo in (book.steps, book.shortfalls, book.told_short, book.tried, book.asked_around):
        memo.pop(lane, None)


def _switched(book: Book) -> None:
    """Answer what running switches ask."""
    switching.advance(book)


def _switches(book: Book) -> None:
    """Begin switches for what does not fit."""
    switching.begin(book)


def _lift_holds(book: Book) -> None:
    """A held start is looked at again once nobody loads or wakes on any host that it may use."""
    for lane, row in _busy(book, ActivationPhase.HELD):
        hosts = book.deployments[lane.deployment].plans
        if row.held_for is HoldCause.PEER_STARTUP and not any(_is_loading(book, host) for host in hosts):
            lanes.tell(book, lane, facts.HoldLifted(now_ms=book.now_ms))


def _is_loading(book: Book, host: HostId) -> bool:
    return any(held.loading for _, held in book.ledger.on(host))


# --- waiting requests -----------------------------------------------------------------------------------


def _waiters(book: Book) -> None:
    """Let waiters in where there is a place; want an instance for those that nobody is on the way to serve."""
    wanted = book.asked | book.traffic.waited_for
    book.asked.clear()
    for target in sorted(wanted):  # sets have no order that a replay could rely on
        row = book.deployments.get(target)
        if row is None:
            continue
        requests.let_in(book, target)
        queue = book.traffic.queue(target)
        if requests.saturated(book, target):
            _restart_saturated(book, target)
        if book.serving(target) or requests.operator_stopped(book, row):
            continue
        if row.state.phase not in (deployment.Phase.ACTIVE, deployment.Phase.ACCEPTED):
            continue
        since = requests.waits_since(book, target)
        oldest = book.now_ms if since is None else since
        patience = Millis(book.now_ms + book.settings.request_deadline_ms)  # of one for whom the queue had no slot
        latest = max((book.requests[one].deadline_ms for one in queue.waiting), default=patience)
        wish = Wish(origin=Origin.REQUEST, since_ms=oldest, until_ms=latest)
        coming = [lane for lane, one in book.of(target) if one.on_the_way]
        if row.spec.activation is Activation.EXPLICIT:
            continue  # what restarts by itself does, but no request wants it anywhere
        if coming:
            _join(book, coming, wish)
        else:
            lane = _cheapest(book, target)
            if lane is not None:
                deeds.activate(book, lane, wish)


def _join(book: Book, coming: list[Lane], wish: Wish) -> None:
    """It is on the way; what restarts by itself is from now on wanted by those who wait."""
    for lane in coming:
        row = book.instances[lane]
        if row.wish is None and row.phase in WAITING:
            deeds.activate(book, lane, wish)


def _cheapest(book: Book, target: DeploymentId) -> Lane | None:
    """The instance that serves soonest: one that only leaves idly, a parked one, a stopped one after its pause."""
    best: tuple[int, Lane] | None = None
    for lane, row in book.of(target):
        if lane.index in book.deployments[target].state.stopped:
            continue
        rank = 0 if row.leaves_idly else 1 if row.is_parked else 2 if row.may_start_at(book.now_ms) else None
        if rank is None and row.may_start:
            book.due.at(row.run.retry_at_ms, "waiters", target)
        if rank is not None and (best is None or (rank, lane) < best):
            best = (rank, lane)
    return None if best is None else best[1]


def _restart_saturated(book: Book, target: DeploymentId) -> None:
    """Every place waits for a stop: then the stop comes now, and the instance starts again."""
    for lane, row in book.of(target):
        if row.is_ready and not row.draining:
            deeds.stop_lane(book, lane, StopKind.SATURATION, abrupt=True)


# --- deployments that wait for their instances ------------------------------------------------------------


def _settled(book: Book) -> None:
    """Revisions and deletes go on once nothing of the old instances is left; surplus instances go."""
    for target in sorted(book.settling):
        row = book.deployments[target]
        live = [one for _, one in book.of(target) if one.has_launch or one.in_progress]
        if row.state.phase in SETTLING:
            if not live:
                deeds.tell(book, target, deployment.InstancesSettled(now_ms=book.now_ms))
        else:
            for lane in deeds.surplus(book, target, row.spec.instances):
                deeds.retire(book, lane)


# --- timers ---------------------------------------------------------------------------------------------------


def idle_timer(book: Book, lane: Lane) -> None:
    """Park or stop what nobody used for long enough; an answer's last byte is what the clock counts from."""
    row, settings = book.instances.get(lane), book.settings
    if row is None:
        return
    spec = book.deployments[lane.deployment].spec
    if spec.warm or spec.activation is Activation.EXPLICIT:
        return
    if book.running_on.get(lane, 0):
        book.used_at[lane] = book.now_ms
    since = book.used_at.setdefault(lane, book.now_ms)
    if row.gate_open and settings.ready_idle_ms is not None:
        if book.now_ms - since >= settings.ready_idle_ms and not book.traffic.queue(lane.deployment).waiting:
            deeds.park_lane(book, lane, Origin.IDLE)
        else:
            ends_at = max(since, book.now_ms - settings.ready_idle_ms + HALF_A_SECOND) + settings.ready_idle_ms
            book.due.at(Millis(ends_at + idle.MARGIN_MS), "idle", lane)
    elif row.is_parked and settings.parked_idle_ms is not None:
        if book.now_ms - since >= settings.parked_idle_ms:
            deeds.stop_lane(book, lane, StopKind.IDLE)
        else:
            book.due.at(Millis(since + settings.parked_idle_ms + idle.MARGIN_MS), "idle", lane)


__all__ = ["idle_timer", "place", "settle"]
