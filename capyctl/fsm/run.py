"""What one run of one instance carries through its three machines: activation, residency, cleanup.

A run is data. Which machine holds it, and in which phase, says what may happen to it next; the run
says to whom it happens (incarnation, host, processes), what is in flight (token, deadlines) and what
is remembered for people (last error, why it was stopped). Lifecycle 4, 20; decisions 7, 8, 16-18.
"""

from __future__ import annotations

import enum

import attrs

from capyctl.errors import check
from capyctl.fsm.proofs import Gone, GoneProof, NeverLaunched
from capyctl.fsm.types import (
    Generation,
    HostId,
    Incarnation,
    Lane,
    Millis,
    Phase,
    ProcessIdentity,
    Residency,
    StopKind,
    SwitchId,
    Token,
)

ATTEMPTS_MAX = 3  # launches in one start operation
COOLDOWN_MS = Millis(30_000)  # after the first failed attempt or operation; doubles
COOLDOWN_MAX_MS = Millis(600_000)
LOOK_MS = Millis(2_000)  # hosts look at their memory each second: by then what a launch was refused by is seen here too
SOON_MS = Millis(60_000)  # an exit this soon after READY is a failed operation
IDLE_GATE_MS = Millis(30_000)  # how long a stop waits for an engine to read idle
TERMINATE_MS = Millis(60_000)  # SIGTERM, the wait, SIGKILL, and the look afterwards
PROBE_MS = Millis(90_000)  # one look at a launch whose state is unknown; a host's takes a minute and a little at most
ANSWER_GRACE_MS = Millis(30_000)  # an order's answer may be this late before it counts as lost


class Step(enum.Enum):
    """The order whose outcome nobody knows."""

    LAUNCH = "launch"
    PARK = "park"
    WAKE = "wake"
    TERMINATE = "terminate"


class HoldCause(enum.Enum):
    """Why a planned start is not tried now."""

    COOLDOWN = "cooldown"  # the last attempt failed; only time ends it
    PEER_STARTUP = "peer_startup"  # another start on the host is loading; both peaks do not fit
    RECLAIM = "reclaim"  # the parked set is making room
    CLEANUP = "cleanup"  # an older launch on the host is being ended


CLOSING = frozenset({StopKind.OPERATOR, StopKind.INSTANCE, StopKind.DELETE})
"""Stops after which no request starts the instance again (lifecycle 20)."""

YIELDING = frozenset(
    {
        StopKind.PRESSURE,
        StopKind.IDLE,
        StopKind.RECLAIM,
        StopKind.GROWTH,
        StopKind.CUT_REQUEST,
        StopKind.FAILED_PARK,
    }
)
"""Stops that nobody insists on: they give way to a start, and to a drain that does not end in time."""

ABRUPT = frozenset({StopKind.EXIT, StopKind.MISMATCH, StopKind.SATURATION, StopKind.FAILED_WAKE, StopKind.FAILED_START})
"""Stops that wait for no request: there is nobody left to answer, or nothing that may answer."""

_RANK = {StopKind.DELETE: 5, StopKind.OPERATOR: 4, StopKind.INSTANCE: 3} | {
    StopKind.REVISION: 2,
    StopKind.DRAIN: 2,
    StopKind.PROFILE: 2,
}


@attrs.frozen(kw_only=True)
class Stop:
    """Why a run ends, or why it ended. `for_name` and `switch` say who needed the room (decision 18)."""

    kind: StopKind
    asked_at_ms: Millis
    for_name: str | None = None
    switch: SwitchId | None = None
    unseen: bool = False  # an exit while nobody watched: it says nothing of how long the engine ran

    @property
    def rank(self) -> int:
        """How much is asked: the strongest of several stops is the one that is remembered."""
        return _RANK.get(self.kind, 0 if self.kind in YIELDING else 1)


def stronger(present: Stop | None, asked: Stop) -> Stop:
    """The stop to go on with: the present one, unless the new one asks for more."""
    return asked if present is None or asked.rank > present.rank else present


@attrs.frozen(kw_only=True)
class Problem:
    """A code of `capyctl.errors`, and words for people (redacted by whoever reported them)."""

    code: str
    reason: str


@attrs.frozen(kw_only=True)
class Run:
    """The data of one run; between two runs it keeps what outlives them.

    Outliving a run: `lane`, the last `generation` and `token`, `failures`, `retry_at_ms`, `last_error`, `stopped`.
    `charged` is the ledger phase that this run's orders have raised and not yet settled; the bytes
    are the ledger's alone. All `_at_ms` are Unix milliseconds.
    """

    lane: Lane
    # of the engine: facts of the revision that was launched
    tier: Residency = Residency.RESTART_ONLY
    waits_idle: bool = False  # no park control, but it can say that it is idle: asked before it is signalled
    needs_canary: bool = False  # a wake without the canary's answer proves nothing
    # of the run
    generation: Generation | None = None  # None until the first cold arm
    host: HostId | None = None
    processes: tuple[ProcessIdentity, ...] = ()
    canary: str | None = None
    charged: Phase = Phase.NONE
    ready_at_ms: Millis | None = None
    # of the order in flight, or the last one
    token: Token | None = None
    deadline_ms: Millis | None = None  # the order's own bound
    pending: Stop | None = None  # to run once the order in flight is classified
    # of the start operation
    wait_ends_at_ms: Millis | None = None  # how long it may wait for memory; None: until it is stopped
    attempts: int = 0  # failed launches of this operation
    # for people, and for the next start
    failures: int = 0  # failed operations in a row
    retry_at_ms: Millis | None = None  # until then a request is answered with `last_error`
    last_error: Problem | None = None
    stopped: Stop | None = None  # why it does not run; None while it does

    @property
    def incarnation(self) -> Incarnation:
        """The run's identity. Raises InvariantBroken before the first arm."""
        check(self.generation is not None, "an armed run has a generation")
        assert self.generation is not None  # for the type checker
        return Incarnation(self.lane, self.generation)

    @property
    def placed_on(self) -> HostId:
        """The host of an armed run. Raises InvariantBroken before the first arm."""
        check(self.host is not None, "an armed run has a host")
        assert self.host is not None  # for the type checker
        return self.host

    @property
    def answer_due_at_ms(self) -> Millis | None:
        """When an order without an answer counts as lost."""
        return None if self.deadline_ms is None else Millis(self.deadline_ms + ANSWER_GRACE_MS)


def cooldown_ms(failed: int) -> Millis:
    """30 s after the first failure, doubling, ten minutes at most."""
    return Millis(min(COOLDOWN_MS * 2 ** (failed - 1), COOLDOWN_MAX_MS))


def pause_ms(attempts: int, *, found_no_room: bool) -> Millis:
    """Until the next attempt of an operation.

    Args:
      found_no_room: the host found less free than was known here, and refused before anything began. The first time
        one look later is soon enough: from then on the start waits for the memory itself.
    """
    if not found_no_room:
        return cooldown_ms(attempts)
    return LOOK_MS if attempts == 1 else cooldown_ms(attempts - 1)


def blank(run: Run) -> Run:
    """What is left of `run` once its engine is gone: the facts that outlive it."""
    return Run(
        lane=run.lane,
        generation=run.generation,
        token=run.token,
        failures=run.failures,
        retry_at_ms=run.retry_at_ms,
        last_error=run.last_error,
        stopped=run.stopped,
    )


def shows_gone(run: Run, proof: object) -> bool:
    """Whether `proof` is a gone proof of this run that covers everything recorded for it, helpers included."""
    if not isinstance(proof, GoneProof) or run.generation is None or proof.incarnation != run.incarnation:
        return False
    if isinstance(proof, Gone):
        return set(run.processes) <= proof.absent
    if isinstance(proof, NeverLaunched):
        return not run.processes  # what was recorded was launched
    return all(process.boot_id == proof.recorded_boot_id for process in run.processes)


def made_ready(run: Run, now_ms: Millis, *, processes: tuple[ProcessIdentity, ...], canary: str | None) -> Run:
    """`run` as it is once proven READY: nothing in flight, the attempt budget fresh.

    A wake's mismatch stays the last error of the run that replaces it; any other error is over.
    """
    error = run.last_error
    return attrs.evolve(
        run,
        processes=processes,
        canary=canary,
        charged=Phase.READY,
        ready_at_ms=now_ms,
        deadline_ms=None,
        wait_ends_at_ms=None,
        attempts=0,
        last_error=error if error is not None and error.code == "wake_mismatch" else None,
    )


def later(one: Millis | None, other: Millis | None) -> Millis | None:
    """The later of two bounds; None has no end."""
    return None if one is None or other is None else max(one, other)


def ran_well(run: Run, stop: Stop | None) -> bool:
    """Whether `run` was READY, and its engine did not end by itself within a minute of that (decision 8).

    One that was stopped because somebody wanted it so had succeeded, however soon that was, and so had one that was
    parked: what kills a sleeping engine says nothing of its starts. An exit that nobody saw is held against no
    engine: a machine or a container that is switched off ends it.
    """
    if run.ready_at_ms is None or stop is None:
        return False
    wanted = stop.kind not in ABRUPT and stop.kind is not StopKind.FAILED_PARK
    asleep = stop.kind is StopKind.EXIT and run.charged is Phase.PARKED
    return wanted or asleep or stop.unseen or stop.asked_at_ms - run.ready_at_ms >= SOON_MS
