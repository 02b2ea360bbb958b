"""Facts for one instance, built from what a run holds: what its present order may be answered, and what is stale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
from explore import label

from capyctl.fsm import cleanup
from capyctl.fsm import facts as f
from capyctl.fsm import gate as g
from capyctl.fsm.activation import ActivationPhase
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
from capyctl.fsm.run import HoldCause, Run, Step, Stop
from capyctl.fsm.table import Machine, Row, Taken
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
    Phase,
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


def demands(now: Millis) -> Iterator[f.Fact]:
    """What people, requests, timers and switches ask."""
    for origin, ends in ((Origin.OPERATOR, None), (Origin.REQUEST, SOON)):
        yield f.Activated(now_ms=now, origin=origin, wait_ends_at_ms=ends)
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


def verdicts(run: Run, now: Millis, traits: dict[str, Any]) -> Iterator[f.Fact]:
    """What the ledger and the scheduler answer, with a fresh token or generation and with an old one."""
    last = run.token or 0
    for token in (Token(last + 1), Token(last)):
        for generation in (Generation((run.generation or 0) + 1), Generation(run.generation or 0)):
            yield f.Placed(now_ms=now, host=HOST, generation=generation, token=token, deadline_ms=SOON, **traits)
        yield f.ParkAdmitted(now_ms=now, token=token, deadline_ms=SOON)
        yield f.WakeAdmitted(now_ms=now, token=token, deadline_ms=SOON)
        yield f.Turn(now_ms=now, token=token)
    yield f.NotPlaced(now_ms=now, code="insufficient_memory", reason="no room")
    yield f.NotPlaced(now_ms=now, code="host_ineligible", reason="no host", final=True)
    yield f.Held(now_ms=now, until_ms=SOON, cause=HoldCause.PEER_STARTUP)
    yield f.Held(now_ms=now, until_ms=SOON, cause=HoldCause.RECLAIM)
    yield f.HoldLifted(now_ms=now)
    yield f.ParkNotAdmitted(now_ms=now, code="parked_capacity", reason="no room")
    yield f.WakeNotAdmitted(now_ms=now, code="insufficient_memory", reason="no room")
    yield f.WakeNotAdmitted(now_ms=now, code="checkpoint_mismatch", reason="changed", final=True)


def gone_proofs(run: Run) -> tuple[GoneProof, ...]:
    """Every kind, one that misses a helper, one of another run."""
    return (
        gone(run),
        never(run),
        rebooted(run),
        rebooted(run, "other"),
        gone(run, absent=(API,)),
        gone(run, generation=98),
    )


def outcomes(run: Run, now: Millis) -> Iterator[f.Fact]:
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
        yield f.WakeFailed(now_ms=now, token=token, code="insufficient_memory", reason="full", unsent=unsent(run))
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
    yield g.Doubted(now_ms=now)
    yield g.Proven(now_ms=now, same=same(run, at_ms=now), usable=usable(run, at_ms=now))
    yield g.Proven(now_ms=now, same=same(run, at_ms=now), usable=usable(run, at_ms=Millis(1)))
    for session in sessions:
        yield f.SessionBegan(now_ms=now, session=session)


def everything(run: Run, traits: dict[str, Any]) -> Iterator[f.Fact]:
    """The whole alphabet of the three lives, at two instants: what fits the run, and what is stale in every way."""
    for now in (EARLY, LATE):
        yield from demands(now)
        yield from verdicts(run, now, traits)
        yield from outcomes(run, now)
        yield from happenings(run, now)
        yield f.SessionBegan(now_ms=now, session=1)


def few(instance: Instance, traits: dict[str, Any]) -> Iterator[f.Fact]:
    """About one of each fact, without what is stale: the alphabet of the product."""
    run, now = instance.run, EARLY
    last = Token(run.token or 0)
    fresh, generation = Token(last + 1), Generation((run.generation or 0) + 1)
    for at_ms in (EARLY, LATE):
        yield f.Activated(now_ms=at_ms, origin=Origin.REQUEST, wait_ends_at_ms=Millis(at_ms + 1))
        yield f.Turn(now_ms=at_ms, token=fresh)
        yield f.Ticked(now_ms=at_ms)
        yield f.EngineExited(now_ms=at_ms, generation=Generation(run.generation or 99), role=Role.API, reason="words")
        yield f.Probed(now_ms=at_ms, token=last, same=same(run))
    yield f.Activated(now_ms=now, origin=Origin.OPERATOR)
    for origin, switch in ((Origin.IDLE, None), (Origin.OPERATOR, None), (Origin.SWITCH, SWITCH)):
        yield f.ParkRequested(now_ms=now, origin=origin, switch=switch, drain_ends_at_ms=SOON)
    yield f.ParkRequested(now_ms=now, origin=Origin.SWITCH, switch=SWITCH, drain_ends_at_ms=SOON, settle_at_stop=True)
    for kind, switch in ((StopKind.PRESSURE, SWITCH), (StopKind.IDLE, None), (StopKind.OPERATOR, None)):
        yield f.StopRequested(now_ms=now, stop=stop(kind, now, switch), drain_ends_at_ms=SOON)
    yield f.StopRequested(now_ms=now, stop=stop(StopKind.SATURATION, now))
    yield f.Withdrawn(now_ms=now, switch=SWITCH)
    yield f.Reopened(now_ms=now)
    yield f.Revised(now_ms=now)
    yield f.Placed(now_ms=now, host=HOST, generation=generation, token=fresh, deadline_ms=SOON, **traits)
    yield f.ParkAdmitted(now_ms=now, token=fresh, deadline_ms=SOON)
    yield f.WakeAdmitted(now_ms=now, token=fresh, deadline_ms=SOON)
    yield f.NotPlaced(now_ms=now, code="host_ineligible", reason="no host", final=True)
    yield f.Held(now_ms=now, until_ms=SOON, cause=HoldCause.PEER_STARTUP)
    yield f.HoldLifted(now_ms=now)
    yield f.ParkNotAdmitted(now_ms=now, code="parked_capacity", reason="no room")
    yield f.WakeNotAdmitted(now_ms=now, code="insufficient_memory", reason="no room")
    yield f.WakeNotAdmitted(now_ms=now, code="checkpoint_mismatch", reason="changed", final=True)
    yield f.NotPlaced(now_ms=now, code="insufficient_memory", reason="no room")
    yield from _answers(run, now, last)
    yield f.OrderLost(now_ms=now, token=Token(last - 1), reason="lost")
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
        yield f.LaunchReady(now_ms=now, token=token, processes=PROCESSES, usable=usable(run, at_ms=at_ms), canary="42")
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
    yield f.WakeFailed(now_ms=now, token=token, code="insufficient_memory", reason="full", unsent=unsent(run))
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
    """The same instance with everything replaced that no table can tell apart, so that endless lives are few.

    Tokens, generations and sessions are only compared with the last one, bounds only with the time; who asked for
    what is over is for people; and the gate of a run that ends forgets all but its host when it has ended.
    """
    return Instance(life=_normal_life(instance.life, now), gate=_normal_gate(instance))


def _normal_life(life: Any, now: Millis) -> Any:  # Any: one of three machines' states
    run = life.run
    ending = isinstance(life, cleanup.State)
    renamed = attrs.evolve(
        run,
        generation=None if run.generation is None else Generation(FIFTH),
        token=None if run.token is None else Token(FIFTH),
        deadline_ms=_when(run.deadline_ms, now),
        wait_ends_at_ms=_when(run.wait_ends_at_ms, now),
        retry_at_ms=_when(run.retry_at_ms, now) if life.phase is ActivationPhase.FAILED else None,
        ready_at_ms=None,
        failures=0,
        last_error=None,
        canary=None,
        pending=_stop(run.pending),
        stopped=_stop(run.stopped) if life.phase is ActivationPhase.STOPPED else None,
    )
    changes: dict[str, object] = {"run": renamed}
    for name in ("hold_ends_at_ms", "drain_began_at_ms", "drain_ends_at_ms", "look_at_ms"):
        if hasattr(life, name):
            changes[name] = _when(getattr(life, name), now)
    if hasattr(life, "waits_for"):
        changes["waits_for"] = None
    if hasattr(life, "looks"):
        changes["looks"] = 0
    if hasattr(life, "stop"):
        stop_now = _stop(life.stop)
        changes["stop"] = attrs.evolve(stop_now, switch=None) if ending and stop_now else stop_now
    if ending and life.phase in cleanup.ENDING:
        changes["lost"] = None
    return attrs.evolve(life, **changes)


def _normal_gate(instance: Instance) -> g.State:
    shutter, run = instance.gate, instance.run
    current = shutter.generation is not None and shutter.generation == run.generation
    reasons = shutter.reasons
    if isinstance(instance.life, cleanup.State) and reasons & g.LASTING:
        reasons = frozenset({g.Closure.STOP}) | (reasons & {g.Closure.HOST_SESSION})
    proven = shutter.proven_in == shutter.session and shutter.generation is not None
    return attrs.evolve(
        shutter,
        generation=Generation(FIFTH) if current else None if shutter.generation is None else Generation(FIFTH - 1),
        reasons=reasons,
        session=0,
        proven_in=0 if proven else None,
        closed_at_ms=EARLY,
        doubted_at_ms=EARLY,
    )


@attrs.define
class Alone:
    """One machine by itself, up to renaming; a run that was handed over is told more, as if nobody had taken it."""

    machine: Machine[Any]

    @property
    def name(self) -> str:
        return self.machine.name

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.machine.rows

    def take(self, state: Any, event: f.Fact) -> Taken[Any]:
        taken = self.machine.take(state, event)
        return taken if taken.state is state else attrs.evolve(taken, state=_normal_life(taken.state, event.now_ms))

    def step(self, state: Any, event: f.Fact) -> tuple[Any, tuple[Any, ...]]:
        taken = self.take(state, event)
        return taken.state, taken.orders


@attrs.define
class Product:
    """The instance as something to explore: `take` steps it, and remembers which rows of which table fired."""

    name: str = "instance"
    fired: set[str] = attrs.field(factory=set)

    def take(self, instance: Instance, event: f.Fact) -> Taken[Any]:
        told = tell(instance, event)
        for table, row in told.rows:
            phase = instance.gate.phase if table == "gate" else instance.phase
            self.fired.add(f"{table}: {label(row, phase)}")
        after = instance if told.instance is instance else normal(told.instance, event.now_ms)
        return Taken(after, told.orders, told.rows[-1][1])


# --- where lives are explored from ------------------------------------------------------------------

TRAITS: dict[str, Any] = {"tier": Residency.DEEP, "waits_idle": True, "needs_canary": True}
NEW = Run(lane=LANE, **TRAITS)
READY = attrs.evolve(
    NEW,
    generation=Generation(FIFTH),
    token=Token(FIFTH),
    host=HOST,
    processes=PROCESSES,
    charged=Phase.READY,
    canary="42",
    ready_at_ms=EARLY,
)


def unknown(step: Step, run: Run) -> cleanup.State:
    """A run whose last order was lost; it may be looked at."""
    lost = attrs.evolve(run, deadline_ms=SOON)
    return cleanup.State(phase=cleanup.CleanupPhase.RECONCILING, run=lost, lost=step, look_at_ms=EARLY)


def starts_of_cleanup() -> Iterator[cleanup.State]:
    """As the other machines hand a run over: due to stop, or unknown; with attempts left, and with none."""
    waking = attrs.evolve(READY, charged=Phase.WAKE)
    for attempts in (0, 2):
        yield unknown(Step.LAUNCH, attrs.evolve(READY, charged=Phase.COLD, processes=(), attempts=attempts))
        yield unknown(Step.WAKE, attrs.evolve(waking, attempts=attempts))
        yield cleanup.State(run=attrs.evolve(waking, attempts=attempts), stop=stop(StopKind.FAILED_WAKE, EARLY))
    yield unknown(Step.WAKE, attrs.evolve(waking, needs_canary=False))
    yield unknown(Step.PARK, attrs.evolve(READY, charged=Phase.PARKING))
    for kind in (StopKind.EXIT, StopKind.SATURATION, StopKind.PRESSURE):
        yield cleanup.State(run=READY, stop=stop(kind, EARLY))
