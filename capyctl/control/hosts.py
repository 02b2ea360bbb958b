"""Hosts in the world: sessions come and go, observations age, outcomes of orders come back (lifecycle 7, 9, 18)."""

from __future__ import annotations

from capyctl.control import events as e
from capyctl.control import idle, lanes, leftovers, peaks, refusing, requests, reshaping, residents, switching
from capyctl.control.book import Book
from capyctl.control.records import HostRow, InstanceRow, Move
from capyctl.errors import InvariantBroken
from capyctl.fsm import facts, gate, residency
from capyctl.fsm.instance import in_flight, wants_proof
from capyctl.fsm.proofs import Quiet
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.types import Lane, Millis, Role
from capyctl.ledger import limits
from capyctl.ledger.shortfall import Shortfall

LOOK_AGAIN_MS = 2_000  # after a look at a doubted engine that proved nothing


def online(book: Book, event: e.HostOnline) -> None:
    """A host's session is up: its limits count from now on, its engines are looked at before they serve."""
    host = event.policy.host
    before = book.hosts.get(host)
    ledger = limits.set_policy(book.ledger, event.policy)
    if isinstance(ledger, Shortfall):
        # The role refuses such a start before it says that the host is up; here the stored limits stay in force.
        policy = before.policy if before is not None else event.policy
        book.moves.append(_refused(event, ledger))
    else:
        policy = event.policy
        if ledger is not book.ledger:
            book.put_ledger(ledger)
    book.put_host(
        HostRow(policy=policy, boot_id=event.boot_id, draining=before.draining if before is not None else False)
    )
    book.online.add(host)
    peaks.installed(book, host, event.installations)
    reshaping.resolve_anew(book, host, None if before is None else before.policy, policy)
    leftovers.prune_logs(book, host)
    for lane, _ in book.on(host):
        lanes.tell(book, lane, facts.HostReturned(now_ms=event.now_ms))


def _refused(event: e.HostOnline, short: Shortfall) -> Move:
    return Move(
        machine="host", lane=event.policy.name, was="limits", event="HostOnline", now=f"kept: {short.message()}"
    )


def published(book: Book, event: e.ProfilesPublished) -> None:
    """A host's engines are others than before: what was measured on those that are gone counts no more."""
    peaks.installed(book, event.host, event.installations)
    book.dirty = True


def offline(book: Book, event: e.HostOffline) -> None:
    """A session is lost: its gates close, everything stays charged, nothing is given up (invariant 25)."""
    book.online.discard(event.host)
    book.seen.pop(event.host, None)
    for lane, _ in book.on(event.host):
        lanes.tell(book, lane, gate.HostLost(now_ms=event.now_ms))


def observed(book: Book, event: e.Observed) -> None:
    """A newer sample of a host's domains. It moves something only where something waits for memory."""
    book.seen[event.host] = event.domains
    residents.judged(book, event)
    if book.shortfalls or book.active_switches:
        book.dirty = True


# --- outcomes ---------------------------------------------------------------------------------------------


def outcome(book: Book, event: e.Outcome) -> None:
    """An answer to an order. The lane's own token says whether it is news; a look at a READY engine has its own."""
    lane = event.incarnation.lane
    row = book.instances.get(lane)
    if row is None:
        return
    if book.looks.get(lane) == event.token:
        del book.looks[lane]
        _looked(book, lane, event)
        return
    if isinstance(event, e.LaunchReady) and in_flight(row.machine) and row.run.token == event.token:
        peaks.started(book, lane, event.peak_bytes)
    fact = _fact(book, event)
    if fact is not None:
        lanes.tell(book, lane, fact)


def _looked(book: Book, lane: Lane, event: e.Outcome) -> None:
    """What a look at a READY engine proved: it may serve, it is gone, or nothing and it is looked at again."""
    row = book.instances[lane]
    book.dirty = True
    if isinstance(event, e.Probed) and event.same is not None and event.usable is not None:
        book.look_again_at.pop(lane, None)
        book.vain.pop(lane, None)
        lanes.tell(book, lane, gate.Proven(now_ms=event.now_ms, same=event.same, usable=event.usable))
        return
    if isinstance(event, e.Probed) and event.gone is not None and row.run.generation is not None:
        lanes.tell(
            book,
            lane,
            facts.EngineExited(
                now_ms=event.now_ms,
                generation=row.run.generation,
                role=Role.API,
                reason=event.reason or "its processes are gone",
            ),
        )
        return
    if isinstance(event, e.Probed) and lane in book.silent and row.run.generation is not None:
        # It neither said how much it does nor answered what it was asked: that is no engine any more.
        lanes.tell(
            book,
            lane,
            facts.EngineExited(
                now_ms=event.now_ms, generation=row.run.generation, role=Role.API, reason=book.silent[lane]
            ),
        )
        return
    reason = event.reason if isinstance(event, e.Probed | e.OrderLost) else ""
    book.vain[lane] = (book.vain.get(lane, (0, ""))[0] + 1, reason)
    refusal = requests.unprovable(book, book.deployments[lane.deployment])
    if refusal is not None:
        requests.fail_waiters(book, lane.deployment, *refusal)
    again = Millis(event.now_ms + LOOK_AGAIN_MS)
    book.look_again_at[lane] = again
    book.due.at(again, "lane", lane)


def _fact(book: Book, event: e.Outcome) -> facts.Fact | None:
    at, token = event.now_ms, event.token
    match event:
        case e.Spawned(processes=processes):
            return facts.Spawned(now_ms=at, token=token, processes=processes)
        case e.LaunchReady(processes=processes, usable=usable, canary=canary):
            return facts.LaunchReady(now_ms=at, token=token, processes=processes, usable=usable, canary=canary)
        case e.LaunchFailed(code=code, reason=reason, proof=proof, transient=transient):
            return facts.LaunchFailed(
                now_ms=at, token=token, code=code, reason=reason, proof=proof, transient=transient
            )
        case e.OrderLost(reason=reason):
            return facts.OrderLost(now_ms=at, token=token, reason=reason)
        case e.IdleGateEnded(verdict=verdict):
            return facts.IdleGateEnded(now_ms=at, token=token, verdict=verdict, next_token=book.draw_token())
        case e.Terminated(proof=proof):
            return facts.Terminated(now_ms=at, token=token, proof=proof)
        case e.TerminateUnproven(reason=reason):
            return facts.TerminateUnproven(now_ms=at, token=token, reason=reason)
        case e.Probed():
            return facts.Probed(
                now_ms=at,
                token=token,
                same=event.same,
                usable=event.usable,
                gone=event.gone,
                resident=event.resident,
                canary=event.canary,
                reason=event.reason,
            )
        case e.ParkConfirmed(quiet=quiet, same=same, resident=resident):
            return facts.ParkConfirmed(now_ms=at, token=token, quiet=quiet, same=same, resident=resident)
        case e.ParkRefused(code=code, reason=reason, unsent=unsent):
            return facts.ParkRefused(now_ms=at, token=token, code=code, reason=reason, unsent=unsent)
        case e.WakeConfirmed(back=back, usable=usable, canary=canary, same=same):
            return facts.WakeConfirmed(now_ms=at, token=token, back=back, usable=usable, canary=canary, same=same)
        case e.WakeFailed(code=code, reason=reason, mismatch=mismatch, unsent=unsent):
            return facts.WakeFailed(now_ms=at, token=token, code=code, reason=reason, mismatch=mismatch, unsent=unsent)
        case _:
            raise InvariantBroken(f"{type(event).__name__} is no outcome")


# --- facts about engines ------------------------------------------------------------------------------------


def exited(book: Book, event: e.EngineExited) -> None:
    """A recorded process of an engine is gone."""
    lane = event.incarnation.lane
    if lane in book.instances:
        lanes.tell(
            book,
            lane,
            facts.EngineExited(
                now_ms=event.now_ms,
                generation=event.incarnation.generation,
                role=event.role,
                reason=event.reason,
                unseen=event.unseen,
            ),
        )


def load(book: Book, event: e.LoadReported) -> None:
    """A reading of an engine's gauges: it settles cut requests, and lets a drained engine park."""
    lane = event.incarnation.lane
    row = book.instances.get(lane)
    if row is None or row.run.generation != event.incarnation.generation:
        return
    book.loads[lane] = event
    requests.idle_read(book, event)
    refusing.heard(book, event)
    if row.phase is ResidencyPhase.DRAINING_TO_PARK and not event.running and not event.waiting:
        closed_at = row.machine.gate.closed_at_ms
        if switching.closes(book, lane):
            return  # nobody gives way before every victim of the switch is drained
        if event.read_at_ms >= closed_at and not requests.waited_for(book, lane):
            if requests.settle_at_stop(book, lane):
                lanes.tell(book, lane, _park_again(row, event.now_ms))  # a stop now: its copy would hold that work
                book.dirty = True
                return
            quiet = Quiet(
                incarnation=event.incarnation,
                gate_closed_at_ms=closed_at,
                router_in_flight=0,
                running=0,
                waiting=0,
                read_at_ms=event.read_at_ms,
            )
            lanes.tell(book, lane, facts.GateDrained(now_ms=event.now_ms, quiet=quiet))


def silent(book: Book, event: e.EngineSilent) -> None:
    """An engine answers nothing: nobody new is sent there, and it is asked once more before it counts as ended."""
    lane = event.incarnation.lane
    row = book.instances.get(lane)
    if row is None or row.run.generation != event.incarnation.generation or not (row.is_ready or row.draining):
        return
    if not wants_proof(row.machine):
        lanes.tell(book, lane, gate.Doubted(now_ms=event.now_ms))
    book.silent[lane] = event.reason
    book.dirty = True


def _park_again(row: InstanceRow, now_ms: Millis) -> facts.ParkRequested:
    """The park that it drains for, asked for anew: a request that ends only with its engine came up meanwhile."""
    life = row.machine.life
    assert isinstance(life, residency.State)  # only a drain to a park comes here
    assert life.ask is not None
    assert life.drain_ends_at_ms is not None
    return facts.ParkRequested(
        now_ms=now_ms,
        origin=life.ask.origin,
        drain_ends_at_ms=life.drain_ends_at_ms,
        switch=life.ask.switch,
        for_name=life.ask.for_name,
        settle_at_stop=True,
    )


def stored(book: Book, event: e.ReadyStored) -> None:
    """The READY record is durable: the gate may open (W5)."""
    lane = event.incarnation.lane
    if lane in book.instances:
        lanes.tell(book, lane, gate.ReadyStored(now_ms=event.now_ms, generation=event.incarnation.generation))
        book.dirty = True


def restart(book: Book, event: e.ControllerStarted) -> None:
    """A new controller session: nothing is proven to it, and an order without an outcome is lost."""
    book.count("session", event.session)
    for lane in list(book.instances):
        lanes.tell(book, lane, facts.SessionBegan(now_ms=event.now_ms, session=event.session))
        machine = book.instances[lane].machine
        if in_flight(machine) and machine.run.token is not None:
            lanes.tell(
                book,
                lane,
                facts.OrderLost(now_ms=event.now_ms, token=machine.run.token, reason="the controller restarted"),
            )
        book.used_at.setdefault(lane, event.now_ms)
        idle.watch(book, lane)
