"""Switches in the world: which waiting deployment gets room next, on which host, at whose cost (lifecycle 12).

The switch machine owns the window, the drain and the order of releases; this module finds what it asks
for: the target, the victims, whether it fits now, and what became of each victim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from capyctl import ulid
from capyctl.control import answering, crowd, lanes, operations, outward, refusing, requests, residue, verifying, waits
from capyctl.control import events as e
from capyctl.control.book import AskedAround, Book, lane_of_owner
from capyctl.control.naming import names
from capyctl.control.orders import ReadMemory
from capyctl.control.records import WAITING, Move, Wish, told_by
from capyctl.control.steps import may_go_to, steps_of
from capyctl.fsm import facts, operation, residency, switch
from capyctl.fsm.activation import ActivationPhase
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.run import Stop
from capyctl.fsm.switch import Phase
from capyctl.fsm.types import DeploymentId, HostId, Lane, Millis, OperationId, Origin, StopKind, SwitchId
from capyctl.ledger import admission, placement, victims
from capyctl.ledger.asks import Ask
from capyctl.ledger.crowd import Crowd
from capyctl.ledger.placement import Nowhere
from capyctl.ledger.shortfall import Shortfall

OVER = frozenset({Phase.DONE, Phase.FAILED})
CLOSES_GATES = frozenset({Phase.DRAINING})
CALLED_BACK = "lifecycle_conflict"  # why a victim serves on when somebody else wanted it to
KEPT_MAX = 100  # ended switches that are remembered
FREED_LATE_MS = 10_000  # a driver may give an ended engine's card memory back so much later than its proven end


# --- reading ----------------------------------------------------------------------------------------


def active(book: Book) -> Iterator[switch.State]:
    """Switches that run now, one per host at most."""
    for identity in list(book.active_switches.values()):
        yield book.switches[identity]


def active_on(book: Book, host: HostId) -> switch.State | None:
    """The switch that runs on `host`."""
    identity = book.active_switches.get(host)
    return None if identity is None else book.switches[identity]


def closes(book: Book, lane: Lane) -> bool:
    """Whether a switch has closed this lane's gate and waits until all of its victims are drained."""
    return any(
        state.phase in CLOSES_GATES and any(victim.lane == lane for victim in state.victims) for state in active(book)
    )


def leaving_for(book: Book, lane: Lane) -> frozenset[str]:
    """Whose copy leaves the parked set for what this one is parked for: its switch's own target, if that sleeps."""
    identity = _leaves_for(book, lane)
    state = None if identity is None else book.switches.get(identity)
    if state is None or state.phase in OVER:
        return frozenset()
    return frozenset(
        other.owner
        for other, row in book.of(state.target)
        if row.phase is ResidencyPhase.WAKE_PLANNED and row.wish is not None and row.wish.switch == identity
    )


def words(book: Book, short: Shortfall) -> str:
    """A shortfall in one line, with names."""
    return short.message(names(book))


# --- beginning ----------------------------------------------------------------------------------------


def begin(book: Book) -> None:
    """Open a switch on a free host for the deployment that has waited longest and does not fit."""
    wanting: list[tuple[Millis, Lane]] = []
    for lane in book.shortfalls:
        since_ms = _wants_a_switch_since(book, lane)
        if since_ms is not None:
            wanting.append((since_ms, lane))
    for since_ms, lane in sorted(wanting):
        if _wants_a_switch_since(book, lane) is None:
            continue  # a verdict on an instance that the same command is to start ended its wait too
        if any(state.target == lane.deployment for state in active(book)):
            continue
        _begin_for(book, lane, since_ms)


def _wants_a_switch_since(book: Book, lane: Lane) -> Millis | None:
    """Since when somebody waits for room for it that others may have to give; None while nobody does."""
    row = book.instances.get(lane)
    if row is None or row.wish is None or row.wish.switch is not None or row.phase not in WAITING:
        return None
    if book.evicts_again_at.get(lane.deployment, Millis(0)) > book.now_ms:
        return None
    return _may_evict_since(book, lane, row.wish)


def _may_evict_since(book: Book, lane: Lane, wish: Wish) -> Millis | None:
    """Since when somebody waits for whom others may have to give way; None while only an operator without --evict does.

    Requests that joined such a start are owed what they would have had without it.
    """
    if wish.origin is not Origin.OPERATOR or wish.evict:
        return wish.since_ms
    return requests.waits_since(book, lane.deployment)


def _asked_before(book: Book, lane: Lane, since_ms: Millis) -> bool:
    """Nobody could give way when it was asked last, and nothing has moved since."""
    tried, known = book.tried.get(lane), book.asked_around.get(lane)
    return (
        known is not None
        and tried is not None
        and known.tried is tried
        and known.policy == _policy(book, since_ms)
        and all(book.seen.get(host) is seen for host, seen in known.seen.items())
    )


def _policy(book: Book, since_ms: Millis) -> tuple[object, ...]:
    """What says who may give way to somebody who waits since then."""
    left_alone = frozenset(lane for lane in book.refused if refusing.is_left_alone(book, lane))
    waiting = {target: requests.waits_since(book, target) for target in book.traffic.waited_for}
    return (since_ms, book.shape, left_alone, waiting)


def _begin_for(book: Book, lane: Lane, since_ms: Millis) -> None:
    if book.active_switches and may_go_to(book, lane, tuple(book.active_switches)):
        return  # the room being made there may do for us once that switch is over; no second host is emptied
    tries = steps_of(book, lane)
    open_to_it = frozenset(placement.hosts_of(tries))
    if not open_to_it:
        return
    if verifying.is_asked(book, lane, open_to_it):
        return  # the answer decides
    if verifying.holds_back(book, lane.deployment, open_to_it):
        return  # whoever has waited longer is about to be told that it may have the room
    if _asked_before(book, lane, since_ms):
        return
    plans = _plans(book, lane, since_ms, tries, crowd.around(book, lane))
    if isinstance(plans, Nowhere):
        why = _refused_by(book, lane, since_ms, tries)
        if why is not None:
            requests.fail_waiters(book, lane.deployment, "unavailable", *why)
            drop_request_wishes(book, lane.deployment, "unavailable", why[0])
            if book.instances[lane].wish is None:
                return  # it was wanted by requests alone, and they are answered
        if waits.never(book, lane, plans):
            # A wait would end with nothing at its deadline. An operator's wish goes on: operators may make room.
            words = waits.kept(plans, book.deployments[lane.deployment].spec.name)
            requests.fail_waiters(book, lane.deployment, "insufficient_resources", words, waits.KEPT_RETRY_S)
        _say(book, lane, plans)
        seen = {host: book.seen.get(host) for host in victims.kept_out_by_samples(plans)}
        tried = book.tried.get(lane)
        book.asked_around[lane] = AskedAround(tried=tried, policy=_policy(book, since_ms), seen=seen)
        return
    plan = plans[0]
    if not plan.victims:
        return  # it fits without anybody giving way: the scheduler's next pass takes it
    known, looked = verifying.could_begin(book, lane, plan.host, since_ms), _looked_since_ready(book, plan)
    if not (known and looked):
        return  # nobody gives way for a start that is not known to work, nor for good on an old look
    row = book.instances[lane]
    assert row.wish is not None  # only wanting lanes come here
    identity = SwitchId(ulid.new(book.now_ms, int(book.draw_token()).to_bytes(10)))
    book.put_switch(
        switch.State(
            switch=identity,
            target=lane.deployment,
            host=plan.host,
            started_at_ms=book.now_ms,
            wanted_since_ms=since_ms,
        )
    )
    book.active_switches[plan.host] = identity
    book.put_instance(lane, attrs.evolve(row, wish=attrs.evolve(row.wish, host=plan.host, switch=identity)))
    for opened in operations.open_for(book, lane.deployment, operations.SERVE):
        operations.tell(book, opened.operation, operation.SwitchOpened(now_ms=book.now_ms, switch=identity))
        _name_on_receipts(book, opened.operation, identity, [victim for one in plans for victim in one.victims])
    tell(
        book,
        identity,
        switch.PlanMade(
            now_ms=book.now_ms,
            victims=_victims(book, plan.victims),
            window_ms=book.settings.admission_window_ms,
            drain_limit_ms=book.settings.drain_timeout_ms,
        ),
    )
    _prune(book)


def _looked_since_ready(book: Book, plan: victims.Eviction) -> bool:
    """Whether whoever would be stopped for want of room was looked at since its READY; else a look is asked for, once.

    The processes of an engine that loads are not all known. What those hold that joined since is nobody's in a look
    of that time, so that it seems to give nothing back by a park, whatever room there is.
    """
    roomless = [lane_of_owner(one.owner) for one in plan.victims if one.way is victims.Way.STOP_NO_ROOM]
    ready_at = max((book.instances[lane].run.ready_at_ms or Millis(0) for lane in roomless), default=Millis(0))
    return not roomless or _looked_since(book, plan.host, ready_at)


def _looked_since(book: Book, host: HostId, at_ms: Millis) -> bool:
    """Whether this host's memory was looked at after `at_ms`; else a look is asked for: the regular one may be far."""
    seen = book.seen.get(host, {})
    if seen and min(one.seen_at_ms for one in seen.values()) > at_ms:
        return True
    if book.asked_memory.get(host, Millis(-1)) < at_ms and host in book.online:
        book.asked_memory[host] = at_ms
        book.order(ReadMemory(host=host))
    return False


def _refused_by(book: Book, lane: Lane, since_ms: Millis, tries: Sequence[Ask]) -> tuple[str, int] | None:
    """What requests are told, and when to ask again, where there is no room only because victims are left alone."""
    if not any(refusing.is_left_alone(book, one) for one in book.refused):
        return None
    plans = _plans(book, lane, since_ms, tries, crowd.around(book, lane, left_alone=True))
    if isinstance(plans, Nowhere):
        return None
    return refusing.answer(book, [lane_of_owner(one.owner) for plan in plans for one in plan.victims])


def _plans(
    book: Book, lane: Lane, since_ms: Millis, tries: Sequence[Ask], everybody: Crowd
) -> tuple[victims.Eviction, ...] | Nowhere:
    """The plan for this instance, then for the others that the same `--evict` is to start: all of them, or none.

    A request wants one instance, whatever it costs the others, and waits for no more than that (12.3, rules 9 and 13).
    """
    others = [steps_of(book, other) for other in _started_with(book, lane)]
    plans = _together(book, [tries, *others], since_ms, everybody)
    waits_since = requests.waits_since(book, lane.deployment)
    if isinstance(plans, victims.Unplaceable) and others and waits_since is not None:
        plans = _together(book, [tries], max(since_ms, waits_since), everybody)  # it is owed what it had without them
    return plans.nowhere if isinstance(plans, victims.Unplaceable) else plans


def _together(
    book: Book, targets: Sequence[Sequence[Ask]], since_ms: Millis, everybody: Crowd
) -> tuple[victims.Eviction, ...] | victims.Unplaceable:
    return victims.plan_together(
        book.ledger,
        [asks for asks in targets if asks],
        everybody,
        since_ms=since_ms,
        seen=book.seen,
        now_ms=book.now_ms,
    )


def _started_with(book: Book, lane: Lane) -> list[Lane]:
    """The other instances that lack room and that the same `--evict` is to start."""
    wish = book.instances[lane].wish
    if wish is None or not wish.evict or wish.operation is None:
        return []
    return [
        other
        for other, row in book.of(lane.deployment)
        if other != lane and other in book.shortfalls and row.phase in WAITING
        if row.wish is not None and row.wish.operation == wish.operation
    ]


def _name_on_receipts(book: Book, opened: OperationId, identity: SwitchId, chosen: Sequence[victims.Victim]) -> None:
    """Whoever asks again with the key of that start is told which switch was opened for it, and at whose cost."""
    for key, row in list(book.receipts.items()):
        if row.receipt.operation == opened and row.receipt.switch is None:
            receipt = attrs.evolve(
                row.receipt, switch=identity, victims=tuple(str(lane_of_owner(one.owner)) for one in chosen)
            )
            book.put_receipt(key, attrs.evolve(row, receipt=receipt))


def _say(book: Book, lane: Lane, nowhere: Nowhere) -> None:
    """No eviction that policy allows makes room: status shows the figures with what could be evicted."""
    helps = waits.stay(book, lane, nowhere) if waits.is_kept_out(book, lane, nowhere) else ""
    reason = f"{nowhere.message(names(book))}{refusing.words(book, set(nowhere.hosts))}{helps}"
    row = book.instances[lane]
    if row.wish is not None and row.wish.origin is Origin.REQUEST and waits.never(book, lane, nowhere):
        say_short(book, lane, nowhere.code, reason, final=True)  # who waited was told
    elif answering.is_hopeless(book, lane, nowhere):
        for one in (lane, *_started_with(book, lane)):
            say_short(book, one, nowhere.code, reason, final=True)
    elif row.waits_for is None or row.waits_for.reason != reason:
        say_short(book, lane, nowhere.code, reason)


def way_out(book: Book, lane: Lane) -> str:
    """What would help a start that evicts nobody: who may give way for it, or that nobody may and what then helps."""
    tries = steps_of(book, lane)
    if not tries:
        return ""
    plans = _plans(book, lane, book.now_ms, tries, crowd.around(book, lane))
    if not isinstance(plans, Nowhere):
        return waits.chosen(book, plans)
    return waits.stay(book, lane, plans) if waits.is_kept_out(book, lane, plans) else ""


def say_short(book: Book, lane: Lane, code: str, reason: str, *, final: bool = False) -> None:
    """Tell a planned start or wake, and whoever watches it, why it waits; `final` ends a start."""
    fact: facts.Fact
    if book.instances[lane].phase is ActivationPhase.PLANNED:
        fact = facts.NotPlaced(now_ms=book.now_ms, code=code, reason=reason, final=final)
    else:
        fact = facts.WakeNotAdmitted(now_ms=book.now_ms, code=code, reason=reason, final=final)
    lanes.tell(book, lane, fact)
    operations.waits(book, lane, code, reason)


def verified(book: Book, event: e.StartVerified) -> None:
    """A start or wake for which others would have had to give way could begin, or is refused with nobody evicted."""
    if not verifying.heard(book, event) or event.code is None:
        return
    for lane, row in list(book.of(event.deployment)):
        if row.wish is not None and row.phase in WAITING and verifying.is_about(book, event, lane):
            say_short(book, lane, event.code, event.reason, final=True)


def _victims(book: Book, chosen: Sequence[victims.Victim]) -> tuple[switch.Victim, ...]:
    lanes_ = {lane_of_owner(one.owner) for one in chosen}
    return tuple(_victim(book, one, lanes_) for one in chosen)


def _victim(book: Book, one: victims.Victim, all_of_them: set[Lane]) -> switch.Victim:
    lane = lane_of_owner(one.owner)
    row = book.instances[lane]
    stays = any(other.lane not in all_of_them for other in book.serving(lane.deployment))
    return switch.Victim(
        incarnation=row.run.incarnation,
        parks=one.way is victims.Way.PARK,
        last_ready=row.gate_open and not stays,
        running=book.running_on.get(lane, 0),
        quiet_since_ms=book.used_at.get(lane, book.now_ms),
        no_room=one.way is victims.Way.STOP_NO_ROOM,
    )


# --- moving -----------------------------------------------------------------------------------------------


def tell(book: Book, identity: SwitchId, fact: switch.Event) -> None:
    """Step one switch and do what it ordered."""
    before = book.switches[identity]
    after, effects = switch.step(before, fact)
    if after is not before:
        book.put_switch(after)
        if after.phase is not before.phase:
            book.moves.append(
                Move(
                    machine="switch",
                    lane=_target_name(book, after),
                    was=before.phase.value,
                    event=type(fact).__name__,
                    now=after.phase.value,
                    why=_why(book, fact),
                )
            )
        book.due.at(switch.due_at_ms(after), "switch", identity)
    for effect in effects:
        _do(book, after, effect)


def _why(book: Book, fact: switch.Event) -> str:
    """What a switch's move rests on: whom it costs, and how; or why it failed."""
    if not isinstance(fact, switch.PlanMade):
        return told_by(fact)
    called = names(book)
    how = {True: "parks", False: "stops"}
    return ", ".join(
        f"{called[one.lane.owner]}/{one.lane.index} {how[one.parks]}{' (no room to park)' if one.no_room else ''}"
        for one in fact.victims
    )


def _target_name(book: Book, state: switch.State) -> str:
    """For whom it makes room; a target that was deleted meanwhile has its identity alone."""
    target = book.deployments.get(state.target)
    return target.spec.name if target is not None else state.target


def _do(book: Book, state: switch.State, effect: object) -> None:
    match effect:
        case switch.CloseVictims(lanes=closed):
            # The victim drains as its own machine says; it goes on when every victim of the switch is drained.
            for lane in closed:
                parks = next(victim.parks for victim in state.victims if victim.lane == lane)
                _leave(book, state, lane, parks=parks)
        case switch.DropSwitchReason(lanes=closed):
            for lane in closed:
                if lane in book.instances and _leaves_for(book, lane) in (None, state.switch):
                    lanes.tell(book, lane, facts.Withdrawn(now_ms=book.now_ms, switch=state.switch))
        case switch.ReleaseVictims(park=park, stop=stop):
            book.dirty = True  # the drains that were held back for the slowest victim go on in the next pass
            for lane in (*park, *stop):
                if book.instances[lane].is_parked:
                    _leave(book, state, lane, parks=False)
        case switch.StopVictim(lane=lane):
            _leave(book, state, lane, parks=False)
        case switch.FailWaiters(target=target, code=code, reason=reason):
            requests.fail_waiters(book, target, code, outward.words(waits.nameless(reason)), 1)
            _pause(book, target, code, reason)
        case switch.Conclude(host=host):
            book.active_switches.pop(host, None)
            book.dirty = True
            for lane, row in list(book.of(state.target)):
                if row.wish is not None and row.wish.switch == state.switch:
                    book.put_instance(lane, attrs.evolve(row, wish=attrs.evolve(row.wish, host=None, switch=None)))
        case _:
            book.dirty = True  # CheckAgain, ActivateTarget, LetWaitersIn: answered by `advance` in the same pass


def _leaves_for(book: Book, lane: Lane) -> SwitchId | None:
    """The switch that this instance leaves for now: a victim that came back may be another one's meanwhile."""
    life = book.instances[lane].machine.life
    if not isinstance(life, residency.State):
        return None
    return life.ask.switch if life.ask is not None else life.stop.switch if life.stop is not None else None


def _pause(book: Book, target: DeploymentId, code: str, reason: str) -> None:
    """Nobody gave way for it in time: its victims serve as long as they were kept, before they are asked again.

    Whoever waited was told so. An operator's wish goes on, and says what it waits for; a request's wish was theirs.
    """
    again_at = Millis(book.now_ms + book.settings.drain_timeout_ms)
    book.evicts_again_at[target] = again_at
    book.due.at(again_at, "waiters", target)
    _end_request_wishes(book, target, code, reason)


def _end_request_wishes(book: Book, target: DeploymentId, code: str, reason: str) -> None:
    drop_request_wishes(book, target, code, reason)
    for lane, row in list(book.of(target)):
        if row.wish is None or row.phase not in WAITING:
            continue
        if row.wish.evict:
            told = reason.removesuffix(switch.ASK_AGAIN)  # it asks again by itself
            say_short(book, lane, code, f"{told}{refusing.words(book, set(book.hosts))}")
            continue
        for memo in (book.told_short, book.tried):  # nobody gives way for it any more: it says anew what it lacks
            memo.pop(lane, None)


def drop_request_wishes(book: Book, target: DeploymentId, code: str, reason: str) -> None:
    """Whoever waited was answered; an operator's wish stays, and says what it waits for by its own verdict."""
    for lane, row in list(book.of(target)):
        if row.wish is not None and row.wish.origin is Origin.REQUEST:
            book.put_instance(lane, attrs.evolve(row, wish=None))
            lanes.tell(book, lane, facts.NotPlaced(now_ms=book.now_ms, code=code, reason=reason, final=True))


def _leave(book: Book, state: switch.State, lane: Lane, *, parks: bool) -> None:
    """Ask a victim to park or to end; its own drain bound lies past the switch's, which decides."""
    ends_at = Millis(book.now_ms + 2 * book.settings.drain_timeout_ms)
    name = _target_name(book, state)
    stop = Stop(kind=StopKind.PRESSURE, asked_at_ms=book.now_ms, for_name=name, switch=state.switch)
    if parks:
        lanes.tell(
            book,
            lane,
            facts.ParkRequested(
                now_ms=book.now_ms,
                origin=Origin.SWITCH,
                drain_ends_at_ms=ends_at,
                switch=state.switch,
                for_name=name,
                settle_at_stop=requests.settle_at_stop(book, lane),
                outgrown=residue.outgrown(book, lane),
            ),
        )
        return
    lanes.tell(
        book,
        lane,
        facts.StopRequested(now_ms=book.now_ms, stop=stop, drain_ends_at_ms=ends_at),
    )


def advance(book: Book) -> None:
    """Answer what running switches ask of the world: does it fit now, is it on its way, were waiters let in?"""
    for state in list(active(book)):
        for lane in sorted(book.moved & {victim.lane for victim in state.victims}):
            running = book.running_on.get(lane, 0)
            tell(book, state.switch, switch.TrafficSeen(now_ms=book.now_ms, lane=lane, running=running))
        target = next((one for one, row in book.of(state.target) if row.wish and row.wish.switch == state.switch), None)
        if state.phase in (Phase.RECHECK, Phase.ACTIVATING) and target is None:
            _unwanted(book, state)
        elif state.phase is Phase.RECHECK and target is not None:
            _recheck(book, state, target)
        elif state.phase is Phase.OPENING:
            tell(book, state.switch, switch.WaitersLetIn(now_ms=book.now_ms))
    book.moved.clear()
    book.windowed = {victim.lane for state in active(book) if state.phase is Phase.WINDOW for victim in state.victims}


def _unwanted(book: Book, state: switch.State) -> None:
    """Nothing waits for the room that this switch made: the target serves elsewhere, or its start came to nothing."""
    if book.serving(state.target):
        tell(book, state.switch, switch.TargetReady(now_ms=book.now_ms))
    else:
        why = "nobody wants it any more"
        tell(book, state.switch, switch.TargetFailed(now_ms=book.now_ms, code="unavailable", reason=why))


def _recheck(book: Book, state: switch.State, lane: Lane) -> None:
    """After the releases: on fresh observations, does the target fit now? Its raise is the scheduler's next act."""
    row = book.instances[lane]
    if row.phase not in WAITING:
        tell(book, state.switch, switch.TargetFits(now_ms=book.now_ms))  # it was armed in this very pass
        return
    tries = [ask for ask in steps_of(book, lane) if ask.host == state.host]
    if not tries:
        return
    released_at = max((victim_at(book, victim) for victim in state.victims), default=state.started_at_ms)
    if not _looked_since(book, state.host, released_at):
        return
    verdicts = [admission.propose(book.ledger, ask, book.seen[state.host], book.now_ms) for ask in tries]
    shorts = [verdict for verdict in verdicts if isinstance(verdict, Shortfall)]
    if len(shorts) < len(verdicts):
        tell(book, state.switch, switch.TargetFits(now_ms=book.now_ms))
        return
    late = [short for short in shorts if short.check == "free_card_memory"]
    if late and book.now_ms < released_at + FREED_LATE_MS:
        return  # each sample asks again
    short = (late or shorts)[0]
    tell(book, state.switch, switch.TargetDoesNotFit(now_ms=book.now_ms, code=short.code, reason=words(book, short)))


def victim_at(book: Book, victim: switch.Victim) -> Millis:
    """When a victim's memory came free, as far as this session saw it."""
    return book.released_at.get(victim.lane, Millis(0))


# --- what became of others ----------------------------------------------------------------------------------


def drained(book: Book, lane: Lane) -> None:
    """Nothing that a drain waits for runs on this lane any more."""
    for state in list(active(book)):
        if state.phase is Phase.DRAINING and any(one.lane == lane and _drains_on(one) for one in state.victims):
            tell(book, state.switch, switch.VictimDrained(now_ms=book.now_ms, lane=lane))


def _drains_on(victim: switch.Victim) -> bool:
    """It is waited for: it has neither drained nor come to its end by itself."""
    return not victim.drained and victim.released is None


def released(book: Book, lane: Lane, how: switch.Released) -> None:
    """This instance's memory came free, with proof."""
    book.released_at[lane] = book.now_ms
    book.refused.pop(lane, None)
    for state in list(active(book)):
        tell(book, state.switch, switch.VictimReleased(now_ms=book.now_ms, lane=lane, released=how))


def not_released(book: Book, lane: Lane, reason: str) -> None:
    """It will not give way: it was called back, or nobody knows what it holds and it keeps its charge."""
    for state in list(active(book)):
        if any(one.lane == lane for one in state.victims):
            tell(book, state.switch, switch.VictimLost(now_ms=book.now_ms, lane=lane, reason=reason))


def kept(book: Book, lane: Lane, code: str, reason: str) -> None:
    """It serves on. Unless it was called back, the switch that asked it fails, and it is left alone for a while."""
    if code == CALLED_BACK:
        not_released(book, lane, reason)
        return
    for state in list(active(book)):
        if state.phase not in (Phase.DRAINING, Phase.RELEASING):
            continue  # it was no switch that asked it; this one's turn is still to come
        victim = next((one for one in state.victims if one.lane == lane and one.released is None), None)
        if victim is None:
            continue
        why = refusing.note(book, lane, code, reason, drained=state.phase is Phase.RELEASING)
        tell(
            book,
            state.switch,
            switch.VictimLost(
                now_ms=book.now_ms, lane=lane, reason=f"the model in its way {why}{switch.ASK_AGAIN}", serves=True
            ),
        )


def target_ready(book: Book, lane: Lane) -> None:
    """An instance of this deployment is READY; its gate opens when that is stored."""
    book.dirty = True


def opened(book: Book, lane: Lane) -> None:
    """The gate of an instance of this deployment is open, its waiters are in."""
    for state in list(active(book)):
        if state.target == lane.deployment:
            tell(book, state.switch, switch.TargetReady(now_ms=book.now_ms))


def target_failed(book: Book, lane: Lane, code: str, reason: str) -> None:
    """The start or wake that a switch made room for ended without READY, or nobody knows how it ended."""
    row = book.instances[lane]
    if row.wish is not None and row.wish.switch is not None:
        identity = row.wish.switch
        if book.switches[identity].phase not in OVER:
            tell(book, identity, switch.TargetFailed(now_ms=book.now_ms, code=code, reason=reason))


def ticked(book: Book, identity: SwitchId) -> None:
    """A window or a drain may be over."""
    state = book.switches.get(identity)
    if state is not None and state.phase not in OVER:
        tell(book, identity, switch.Ticked(now_ms=book.now_ms))
        due = switch.due_at_ms(book.switches[identity])
        if due is not None and due > book.now_ms:
            book.due.at(due, "switch", identity)


def restart(book: Book) -> None:
    """A new controller session: switches do not outlive their controller."""
    for identity, state in list(book.switches.items()):
        if state.phase not in OVER:
            tell(book, identity, switch.ControllerRestarted(now_ms=book.now_ms))


def _prune(book: Book) -> None:
    ended = [identity for identity, state in book.switches.items() if state.phase in OVER]
    for identity in ended[: max(0, len(book.switches) - KEPT_MAX)]:
        del book.switches[identity]
        book.touch("switch", identity)
