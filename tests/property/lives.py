"""Facts for one instance, built from what a run holds: what its present order may be answered, and what is stale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
from explore import label

from capyctl.fsm import facts as f
from capyctl.fsm import gate as g
from capyctl.fsm.instance import Instance, tell
from capyctl.fsm.proofs import (
    Back,
    Canary,
    Gone,
    GoneProof,
    NeverLaunched,
    Quiet,
    Rebooted,
    Resident,
    SameEngine,
    Unsent,
    Usable,
)
from capyctl.fsm.run import HoldCause, Run, Stop
from capyctl.fsm.table import Taken
from capyctl.fsm.types import (
    Bytes,
    DeploymentId,
    Domain,
    Generation,
    HostId,
    Incarnation,
    Lane,
    Millis,
    Origin,
    ProcessIdentity,
    Residency,
    Role,
    StopKind,
    SwitchId,
    Token,
)

LANE = Lane(DeploymentId("01DEPLOYMENT"), 0)
HOST = HostId("01HOST")
SWITCH, OTHER_SWITCH = SwitchId("01SWITCH"), SwitchId("01OTHER")
API = ProcessIdentity(pid=10, boot_id="boot", start_ticks=1)
HELPER = ProcessIdentity(pid=11, boot_id="boot", start_ticks=2, role=Role.HELPER)
PROCESSES = (API, HELPER)
EARLY, LATE = Millis(10_000), Millis(10_000_000)
MIDDAY = Millis(45_000)  # a first cooldown that began EARLY is over, no bound is
SOON = Millis(50_000)  # every bound
UNIFIED = Domain("unified")


def incarnation(run: Run, generation: int | None = None) -> Incarnation:
    """The run's, or that of another generation; before the first arm, generation 99."""
    return Incarnation(LANE, Generation(generation or run.generation or 99))


def gone(run: Run, *, absent: tuple[ProcessIdentity, ...] = PROCESSES, generation: int | None = None) -> Gone:
    return Gone(
        incarnation=incarnation(run, generation),
        processes=(),
        absent=frozenset(absent),
        group_empty=True,
        observed_at_ms=EARLY,
    )


def never(run: Run) -> NeverLaunched:
    return NeverLaunched(incarnation=incarnation(run), fenced=True, observed_at_ms=EARLY)


def rebooted(run: Run, recorded: str = "boot") -> Rebooted:
    return Rebooted(
        incarnation=incarnation(run), recorded_boot_id=recorded, present_boot_id="next", observed_at_ms=EARLY
    )


def unsent(run: Run) -> Unsent:
    return Unsent(incarnation=incarnation(run), refused_before_sending=True)


def usable(run: Run, generation: int | None = None, at_ms: Millis = EARLY) -> Usable:
    return Usable(incarnation=incarnation(run, generation), answer_chars=3, probed_at_ms=at_ms)


def same(run: Run, generation: int | None = None, at_ms: Millis = EARLY) -> SameEngine:
    return SameEngine(
        incarnation=incarnation(run, generation),
        recorded=PROCESSES,
        alive=frozenset((API,)),
        strangers=0,
        observed_at_ms=at_ms,
    )


def quiet(run: Run, *, read_at_ms: Millis = LATE, generation: int | None = None) -> Quiet:
    return Quiet(
        incarnation=incarnation(run, generation),
        gate_closed_at_ms=min(EARLY, read_at_ms),
        router_in_flight=0,
        running=0,
        waiting=0,
        read_at_ms=read_at_ms,
    )


def resident(run: Run, generation: int | None = None) -> dict[Domain, Resident]:
    sample = Resident(
        incarnation=incarnation(run, generation),
        resident_bytes=Bytes(1),
        budget_bytes=Bytes(2),
        released_at_ms=EARLY,
        sampled_at_ms=Millis(EARLY + 1),
    )
    return {UNIFIED: sample}


def back(run: Run, generation: int | None = None) -> Back:
    return Back(
        incarnation=incarnation(run, generation),
        restored_at_ms=EARLY,
        sampled_at_ms=EARLY,
        fresh_until_ms=LATE,
        recorded_at_ms=EARLY,
    )


def canary(run: Run) -> Canary:
    return Canary(incarnation=incarnation(run), expected="42", actual="42")


def stop(kind: StopKind, at_ms: Millis, switch: SwitchId | None = None) -> Stop:
    return Stop(kind=kind, asked_at_ms=at_ms, switch=switch)


# --- alphabets ------------------------------------------------------------------------------------

STOPS = (
    stop(StopKind.PRESSURE, EARLY, SWITCH),
    stop(StopKind.IDLE, EARLY),
    stop(StopKind.REVISION, EARLY),
    stop(StopKind.OPERATOR, EARLY),
)


def demands(now: Millis, *, tier: Residency, waits_idle: bool, needs_canary: bool) -> Iterator[f.Fact]:
    """What people, requests, timers and switches ask."""
    for origin, ends in ((Origin.OPERATOR, None), (Origin.REQUEST, SOON)):
        yield f.Activated(
            now_ms=now,
            origin=origin,
            wait_ends_at_ms=ends,
            tier=tier,
            waits_idle=waits_idle,
            needs_canary=needs_canary,
        )
    for origin, switch in ((Origin.OPERATOR, None), (Origin.IDLE, None), (Origin.SWITCH, SWITCH)):
        for at_stop in (False, True):
            yield f.ParkRequested(
                now_ms=now, origin=origin, switch=switch, drain_ends_at_ms=SOON, settle_at_stop=at_stop
            )
    for asked in STOPS:
        yield f.StopRequested(now_ms=now, stop=asked, drain_ends_at_ms=SOON)
    yield f.StopRequested(now_ms=now, stop=stop(StopKind.SATURATION, EARLY))
    yield f.StopRequested(now_ms=now, stop=stop(StopKind.DELETE, EARLY))
    yield f.Withdrawn(now_ms=now, switch=SWITCH)
    yield f.Withdrawn(now_ms=now, switch=OTHER_SWITCH)
    yield f.Reopened(now_ms=now)
    yield f.Revised(now_ms=now)


def verdicts(run: Run, now: Millis, tokens_max: int) -> Iterator[f.Fact]:
    """What the ledger and the scheduler answer; tokens rise up to a cap, and one is old."""
    last = run.token or 0
    for token in {Token(last + 1), Token(last)}:
        if token > tokens_max:
            continue
        for generation in {Generation((run.generation or 0) + 1), Generation(run.generation or 0)}:
            yield f.Placed(now_ms=now, host=HOST, generation=generation, token=token, deadline_ms=SOON)
        yield f.ParkAdmitted(now_ms=now, token=token, deadline_ms=SOON)
        yield f.WakeAdmitted(now_ms=now, token=token, deadline_ms=SOON)
        yield f.Turn(now_ms=now, token=token)
    yield f.NotPlaced(now_ms=now, code="insufficient_memory", reason="no room")
    yield f.NotPlaced(now_ms=now, code="host_ineligible", reason="no host", final=True)
    yield f.Held(now_ms=now, until_ms=SOON, cause=HoldCause.PEER_STARTUP)
    yield f.HoldLifted(now_ms=now)
    yield f.ParkNotAdmitted(now_ms=now, code="parked_capacity", reason="no room")
    yield f.WakeNotAdmitted(now_ms=now, code="insufficient_memory", reason="no room")


def gone_proofs(run: Run) -> tuple[GoneProof, ...]:
    """Every kind, one that misses a helper, one of another run."""
    return (gone(run), never(run), rebooted(run), rebooted(run, "other"), gone(run, absent=(API,)), gone(run, generation=98))


def outcomes(run: Run, now: Millis, tokens_max: int) -> Iterator[f.Fact]:
    """Answers to the order in flight, and to an older one."""
    last = Token(run.token or 0)
    for token in (last, Token(last - 1)):
        for other in (None, 98):
            proof_of = {"generation": other}
            yield f.LaunchReady(
                now_ms=now, token=token, processes=PROCESSES, usable=usable(run, **proof_of), canary="42"
            )
            yield f.ParkConfirmed(
                now_ms=now, token=token, quiet=quiet(run, **proof_of), same=same(run), resident=resident(run)
            )
            yield f.WakeConfirmed(
                now_ms=now, token=token, back=back(run, **proof_of), usable=usable(run), canary=None, same=same(run)
            )
        yield f.WakeConfirmed(
            now_ms=now, token=token, back=back(run), usable=usable(run), canary=canary(run), same=same(run)
        )
        yield f.ParkConfirmed(now_ms=now, token=token, quiet=quiet(run), same=same(run), resident={})
        yield f.Sent(now_ms=now, token=token)
        yield f.Spawned(now_ms=now, token=token, processes=PROCESSES)
        yield f.OrderLost(now_ms=now, token=token, reason="lost")
        for proof in (*gone_proofs(run), unsent(run)):
            for transient in (False, True):
                yield f.LaunchFailed(
                    now_ms=now, token=token, code="launch_failed", reason="exit", proof=proof, transient=transient
                )
        for refusal in (None, unsent(run)):
            yield f.ParkRefused(now_ms=now, token=token, code="unavailable", reason="busy", unsent=refusal)
        yield f.Restored(now_ms=now, token=token)
        for mismatch in (False, True):
            yield f.WakeFailed(now_ms=now, token=token, code="operation_failed", reason="no", mismatch=mismatch)
        if last < tokens_max:
            yield f.IdleGateEnded(now_ms=now, token=token, verdict="busy", next_token=Token(last + 1))
        yield f.IdleGateEnded(now_ms=now, token=token, verdict="idle", next_token=token)
        for proof in gone_proofs(run):
            yield f.Terminated(now_ms=now, token=token, proof=proof)
        yield f.TerminateUnproven(now_ms=now, token=token, reason="alive")
        yield f.Probed(now_ms=now, token=token)
        yield f.Probed(now_ms=now, token=token, gone=gone(run))
        yield f.Probed(now_ms=now, token=token, gone=gone(run, absent=(API,)))
        yield f.Probed(now_ms=now, token=token, same=same(run))
        yield f.Probed(now_ms=now, token=token, same=same(run), usable=usable(run))
        yield f.Probed(now_ms=now, token=token, same=same(run), usable=usable(run), canary=canary(run))
        yield f.Probed(now_ms=now, token=token, same=same(run), resident=resident(run))
        yield f.Probed(now_ms=now, token=token, same=same(run, generation=98), usable=usable(run))


def happenings(run: Run, now: Millis) -> Iterator[f.Fact]:
    """Processes, requests, time and hosts."""
    mine = Generation(run.generation or 99)
    for generation in (mine, Generation(mine - 1)):
        yield f.EngineExited(now_ms=now, generation=generation, role=Role.API, reason="last words")
        yield f.EngineExited(now_ms=now, generation=generation, role=Role.HELPER, reason="last words")
        yield f.RequestsEnded(now_ms=now, generation=generation)
    yield f.GateDrained(now_ms=now, quiet=quiet(run))
    yield f.GateDrained(now_ms=now, quiet=quiet(run, read_at_ms=Millis(1)))
    yield f.GateDrained(now_ms=now, quiet=quiet(run, generation=98))
    yield f.Ticked(now_ms=now)
    yield f.HostReturned(now_ms=now)


def gate_facts(run: Run, now: Millis, sessions: tuple[int, ...] = (1,)) -> Iterator[f.Fact]:
    """What control tells the gate, and a new controller session."""
    mine = Generation(run.generation or 99)
    yield g.ReadyStored(now_ms=now, generation=mine)
    yield g.ReadyStored(now_ms=now, generation=Generation(mine - 1))
    yield g.HostLost(now_ms=now)
    yield g.Proven(now_ms=now, same=same(run, at_ms=now), usable=usable(run, at_ms=now))
    yield g.Proven(now_ms=now, same=same(run, at_ms=now), usable=usable(run, at_ms=Millis(1)))
    for session in sessions:
        yield f.SessionBegan(now_ms=now, session=session)


def everything(
    run: Run,
    *,
    nows: tuple[Millis, ...] = (EARLY, LATE),
    tokens_max: int = 4,
    tier: Residency = Residency.DEEP,
    waits_idle: bool = False,
    needs_canary: bool = False,
) -> Iterator[f.Fact]:
    """The whole alphabet of the three lives at these instants."""
    for now in nows:
        yield from demands(now, tier=tier, waits_idle=waits_idle, needs_canary=needs_canary)
        yield from verdicts(run, now, tokens_max)
        yield from outcomes(run, now, tokens_max)
        yield from happenings(run, now)
        yield f.SessionBegan(now_ms=now, session=1)


def few(instance: Instance, traits: dict[str, Any]) -> Iterator[f.Fact]:
    """About one of each fact: the alphabet of the product. Stale facts are told for the last order but one."""
    run, now = instance.run, EARLY
    last = Token(run.token or 0)
    fresh, generation = Token(last + 1), Generation((run.generation or 0) + 1)
    for at_ms in (EARLY, LATE):
        yield f.Activated(now_ms=at_ms, origin=Origin.REQUEST, wait_ends_at_ms=Millis(at_ms + 1), **traits)
        yield f.Turn(now_ms=at_ms, token=fresh)
        yield f.Ticked(now_ms=at_ms)
        yield f.EngineExited(now_ms=at_ms, generation=Generation(run.generation or 99), role=Role.API, reason="words")
        yield f.Probed(now_ms=at_ms, token=last, same=same(run))
    yield f.Activated(now_ms=now, origin=Origin.OPERATOR, **traits)
    for origin, switch in ((Origin.IDLE, None), (Origin.OPERATOR, None), (Origin.SWITCH, SWITCH)):
        yield f.ParkRequested(now_ms=now, origin=origin, switch=switch, drain_ends_at_ms=SOON)
    yield f.ParkRequested(now_ms=now, origin=Origin.SWITCH, switch=SWITCH, drain_ends_at_ms=SOON, settle_at_stop=True)
    for kind, switch in ((StopKind.PRESSURE, SWITCH), (StopKind.IDLE, None), (StopKind.OPERATOR, None)):
        yield f.StopRequested(now_ms=now, stop=stop(kind, now, switch), drain_ends_at_ms=SOON)
    yield f.StopRequested(now_ms=now, stop=stop(StopKind.SATURATION, now))
    yield f.Withdrawn(now_ms=now, switch=SWITCH)
    yield f.Reopened(now_ms=now)
    yield f.Revised(now_ms=now)
    yield f.Placed(now_ms=now, host=HOST, generation=generation, token=fresh, deadline_ms=SOON)
    yield f.ParkAdmitted(now_ms=now, token=fresh, deadline_ms=SOON)
    yield f.WakeAdmitted(now_ms=now, token=fresh, deadline_ms=SOON)
    yield f.NotPlaced(now_ms=now, code="host_ineligible", reason="no host", final=True)
    yield f.Held(now_ms=now, until_ms=SOON, cause=HoldCause.PEER_STARTUP)
    yield f.HoldLifted(now_ms=now)
    yield f.ParkNotAdmitted(now_ms=now, code="parked_capacity", reason="no room")
    for token in (last, Token(last - 1)):
        yield from _answers(run, now, token)
    yield f.IdleGateEnded(now_ms=now, token=last, verdict="busy", next_token=fresh)
    mine = Generation(run.generation or 99)
    yield f.EngineExited(now_ms=now, generation=mine, role=Role.HELPER, reason="words")
    yield f.EngineExited(now_ms=now, generation=Generation(mine - 1), role=Role.API, reason="words")
    yield f.RequestsEnded(now_ms=now, generation=mine)
    yield f.GateDrained(now_ms=now, quiet=quiet(run))
    yield f.HostReturned(now_ms=now)
    yield from gate_facts(run, now, sessions=(instance.gate.session + 1,))


def _answers(run: Run, now: Millis, token: Token) -> Iterator[f.Fact]:
    yield f.Sent(now_ms=now, token=token)
    yield f.Spawned(now_ms=now, token=token, processes=PROCESSES)
    for at_ms in (EARLY, Millis(1)):
        yield f.LaunchReady(
            now_ms=now, token=token, processes=PROCESSES, usable=usable(run, at_ms=at_ms), canary="42"
        )
    for proof, transient in ((gone(run), True), (gone(run), False), (unsent(run), True)):
        yield f.LaunchFailed(
            now_ms=now, token=token, code="launch_failed", reason="exit", proof=proof, transient=transient
        )
    yield f.OrderLost(now_ms=now, token=token, reason="lost")
    yield f.ParkConfirmed(now_ms=now, token=token, quiet=quiet(run), same=same(run), resident=resident(run))
    for refusal in (None, unsent(run)):
        yield f.ParkRefused(now_ms=now, token=token, code="unavailable", reason="busy", unsent=refusal)
    yield f.Restored(now_ms=now, token=token)
    for answer in (None, canary(run)):
        yield f.WakeConfirmed(
            now_ms=now, token=token, back=back(run), usable=usable(run), canary=answer, same=same(run)
        )
    for mismatch in (False, True):
        yield f.WakeFailed(now_ms=now, token=token, code="operation_failed", reason="no", mismatch=mismatch)
    yield f.Terminated(now_ms=now, token=token, proof=gone(run))
    yield f.TerminateUnproven(now_ms=now, token=token, reason="alive")
    yield f.Probed(now_ms=now, token=token)
    yield f.Probed(now_ms=now, token=token, gone=gone(run))
    yield f.Probed(now_ms=now, token=token, same=same(run), usable=usable(run), canary=canary(run))
    yield f.Probed(now_ms=now, token=token, same=same(run), resident=resident(run))


# --- the product, up to renaming --------------------------------------------------------------------

FIFTH = 5  # what the last token and generation are called


def _when(at_ms: Millis | None, now: Millis) -> Millis | None:
    """Over, or ahead: nothing else about a bound is compared."""
    return None if at_ms is None else (SOON if at_ms > now else EARLY)


def _stop(asked: Stop | None) -> Stop | None:
    return None if asked is None else attrs.evolve(asked, asked_at_ms=EARLY)


def normal(instance: Instance, now: Millis) -> Instance:
    """The same instance with numbers that only count replaced by names, so that endless lives are finitely many.

    Tokens, generations and sessions are only compared with the last one, bounds only with the time.
    """
    life, shutter = instance.life, instance.gate
    run = life.run
    renamed = attrs.evolve(
        run,
        generation=None if run.generation is None else Generation(FIFTH),
        token=None if run.token is None else Token(FIFTH),
        deadline_ms=_when(run.deadline_ms, now),
        wait_ends_at_ms=_when(run.wait_ends_at_ms, now),
        retry_at_ms=_when(run.retry_at_ms, now),
        ready_at_ms=_when(run.ready_at_ms, now),
        failures=min(run.failures, 1),
        last_error=None,
        pending=_stop(run.pending),
        stopped=_stop(run.stopped),
    )
    changes: dict[str, object] = {"run": renamed}
    for name in ("hold_ends_at_ms", "drain_began_at_ms", "drain_ends_at_ms", "look_at_ms"):
        if hasattr(life, name):
            changes[name] = _when(getattr(life, name), now)
    if hasattr(life, "waits_for"):
        changes["waits_for"] = None
    if hasattr(life, "looks"):
        changes["looks"] = min(life.looks, 1)
    if hasattr(life, "stop"):
        changes["stop"] = _stop(life.stop)
    current = shutter.generation is not None and shutter.generation == run.generation
    return Instance(
        life=attrs.evolve(life, **changes),
        gate=attrs.evolve(
            shutter,
            generation=Generation(FIFTH) if current else None if shutter.generation is None else Generation(FIFTH - 1),
            session=0,
            proven_in=None if shutter.proven_in is None else shutter.proven_in - shutter.session,
            closed_at_ms=EARLY,
            doubted_at_ms=EARLY if shutter.doubted_at_ms else shutter.doubted_at_ms,
        ),
    )


@attrs.define
class Product:
    """The instance as something to explore: `take` steps it, and remembers which rows of which table fired."""

    name: str = "instance"
    fired: set[str] = attrs.field(factory=set)

    def take(self, instance: Instance, event: f.Fact) -> Taken[Any]:
        told = tell(instance, event)
        before = {"activation": instance.phase, "residency": instance.phase, "cleanup": instance.phase}
        for table, row in told.rows:
            self.fired.add(label(row, before[table]) if table != "gate" else f"gate {row.on.__name__} {row.why}")
        return Taken(normal(told.instance, event.now_ms), told.orders, told.rows[-1][1])
