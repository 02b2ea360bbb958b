"""Orders to hosts as session commands, and results and reports as events of the world.

The world knows incarnations, tokens and plans; a host knows profiles, directories and processes. This
is the one place where one is said in the other's words. Nothing is decided here, with one exception that
matters for charges: a refusal counts as "nothing was sent" only when it cannot mean that something else
already runs under that incarnation.
Source: api 7.6-7.9; lifecycle 17.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol, TypedDict

import attrs
import trio

from capyctl.clock import Clock
from capyctl.control import events, orders
from capyctl.control.book import Book
from capyctl.errors import CapyError, InvariantBroken, Refusal, lookup
from capyctl.fsm.proofs import Unsent
from capyctl.fsm.types import Bytes, Domain, HostId, Incarnation, Millis, Phase, Token
from capyctl.ledger.parked import may_be_left
from capyctl.server.fetching import Fetching
from capyctl.server.latency import Latencies
from capyctl.server.log import Log
from capyctl.server.measuring import Measuring, on_host, spec_of
from capyctl.session import messages as m

log = Log("hosts")

ANSWER_SLACK_S: Final = 120.0
"""A host keeps the order's own limit; it is given so much more to say what came of it."""
PROBE_LIMIT_S: Final = 180.0
ABORT_LIMIT_S: Final = 10.0
RUNS_UNDER_IT: Final = frozenset({"lifecycle_conflict", "idempotency_conflict"})
"""Refusals that may mean that this incarnation has processes already: nothing is freed on them."""


class _At(TypedDict):
    """What every outcome carries: whose it is, which order's, and when it was known."""

    incarnation: Incarnation
    token: Token
    now_ms: Millis


class Link(Protocol):
    """A host's session. Raises Lost when it is down or ends before the answer."""

    async def call(self, command: m.Command) -> m.Result: ...


@attrs.define(eq=False, repr=False)
class HostLinks:
    """`seams.Hosts` over the sessions of every host. `book` is read, never written."""

    book: Book
    clock: Clock
    links: dict[HostId, Link] = attrs.field(factory=dict)
    downloads: dict[HostId, str | None] = attrs.field(factory=dict)  # where each host keeps what it downloads
    fetching: Fetching = attrs.field(init=False)
    measuring: Measuring = attrs.field(init=False)
    latencies: Latencies = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.latencies = Latencies(self.book)
        self.fetching = Fetching(self.book, self.clock, self._call)
        self.measuring = Measuring(book=self.book, clock=self.clock, call=self._call, downloads_root=self.downloads.get)

    # --- orders ----------------------------------------------------------------------------------

    async def perform(self, order: orders.HostOrder) -> events.Event:
        """The one outcome of an order. A host that does not answer in time leaves it unknown."""
        try:
            command = self._command(order)
        except Refusal as refused:  # nothing was put on the wire
            return self._refused(order, refused.code, refused.message)
        try:
            with trio.fail_after(self._limit_s(order)):
                result = await self._call(order.host, command)
        except trio.TooSlowError:
            return self._lost(order, "the host did not answer within the limit of the order")
        except CapyError as error:
            return self._lost(order, error.message)
        return self._outcome(order, result)

    async def _call(self, host: HostId, command: m.Command) -> m.Result:
        link = self.links.get(host)
        if link is None:
            raise Refusal("unavailable", f"the session of host {host} is down")
        return await link.call(command)

    async def abort(self, order: orders.Abort) -> events.Event:
        """Ask the engine to end one request. No answer, or no such engine, is no proof: the cut goes on without it."""
        command = m.Abort(command_id=f"abort:{order.request}", incarnation=order.incarnation, request=order.request)
        reason = "the host did not answer"
        with trio.move_on_after(ABORT_LIMIT_S):
            try:
                match await self._call(order.host, command):
                    case m.AbortAcknowledged(proof=proof) if proof.request == order.request:
                        return events.AbortAcknowledged(request=order.request, proof=proof, now_ms=self.clock())
                    case m.Refused(message=message):
                        reason = message
                    case other:
                        reason = f"the host answered Abort with {type(other).__name__}"
            except CapyError as error:
                reason = error.message
        log.debug("abort.unanswered", request=order.request, why=reason)
        return events.AbortUnanswered(request=order.request, now_ms=self.clock())

    def _command(self, order: orders.HostOrder) -> m.Command:
        """The command that carries an order. Raises: Refusal when it cannot be said; InvariantBroken."""
        identity = f"{order.incarnation}#{order.token}"
        match order:
            case orders.Launch():
                return self._launch(order, f"launch:{identity}")
            case orders.AwaitIdle():
                return m.AwaitIdle(
                    command_id=f"idle:{identity}", incarnation=order.incarnation, limit_ms=order.limit_ms
                )
            case orders.Terminate():
                return m.Terminate(
                    command_id=f"terminate:{identity}",
                    incarnation=order.incarnation,
                    processes=order.processes,
                    limit_ms=order.limit_ms,
                )
            case orders.Probe():
                return m.Probe(
                    command_id=f"probe:{identity}",
                    incarnation=order.incarnation,
                    processes=order.processes,
                    parked=order.parked,
                    canary=order.canary,
                    parked_budget=self._budget(order.incarnation) if order.parked else {},
                )
            case orders.Release():
                return m.Release(
                    command_id=f"release:{identity}",
                    incarnation=order.incarnation,
                    token=order.token,
                    tier=order.tier,
                    budget=may_be_left(order.plan),
                    gate_closed_at_ms=order.gate_closed_at_ms,
                    processes=order.processes,
                    limit_ms=self._left_ms(order.deadline_ms),
                )
            case orders.Restore():
                return m.Restore(
                    command_id=f"restore:{identity}",
                    incarnation=order.incarnation,
                    token=order.token,
                    tier=order.tier,
                    digest=order.digest,
                    canary=order.canary,
                    processes=order.processes,
                    deadline_ms=order.deadline_ms,
                )
            case _:
                raise InvariantBroken(f"no host takes {type(order).__name__}")

    def _launch(self, order: orders.Launch, command_id: str) -> m.Launch:
        lane = order.incarnation.lane
        spec = spec_of(self.book, lane.deployment, order.revision)
        here = on_host(spec, self.downloads.get(order.host))
        return m.Launch(
            command_id=command_id,
            incarnation=order.incarnation,
            token=order.token,
            profile=spec.profile,
            profile_fingerprint=None,
            served_name=spec.routes[0],
            model=here.model,
            digest=order.digest,
            document=here.document,
            context_tokens=order.plan.context_tokens,
            slots=order.plan.slots,
            allocation=order.plan.at(Phase.COLD).bytes,
            ready=order.plan.at(Phase.READY).bytes,
            parked=order.plan.at(Phase.PARKED).bytes if spec.residency.parks else {},
            residency=spec.residency,
            pools=order.plan.pools,
            deadline_ms=order.deadline_ms,
        )

    def _budget(self, incarnation: Incarnation) -> Mapping[Domain, Bytes]:
        """What may be left of a park whose answer was lost: as its release was told, from the plan of its run."""
        row = self.book.instances.get(incarnation.lane)
        return {} if row is None or row.plan is None else may_be_left(row.plan)

    def _left_ms(self, deadline_ms: Millis) -> Millis:
        return Millis(max(0, deadline_ms - self.clock()))

    def _limit_s(self, order: orders.HostOrder) -> float:
        match order:
            case orders.Launch() | orders.Restore() | orders.Release():
                return max(0.0, (order.deadline_ms - self.clock()) / 1000) + ANSWER_SLACK_S
            case orders.AwaitIdle() | orders.Terminate():
                return order.limit_ms / 1000 + ANSWER_SLACK_S
            case _:
                return PROBE_LIMIT_S

    # --- results ---------------------------------------------------------------------------------

    def _outcome(self, order: orders.HostOrder, result: m.Result) -> events.Event:
        """What a result says about its order. A result of another kind says nothing: nobody knows."""
        at = self._at(order)
        match order, result:
            case orders.Launch(), m.Launched():
                return events.LaunchReady(
                    **at,
                    processes=result.processes,
                    usable=result.usable,
                    canary=result.canary,
                    peak_bytes=result.peak_bytes,
                )
            case orders.Launch(), m.LaunchRefused():
                return events.LaunchFailed(
                    **at,
                    code=result.code,
                    reason=result.reason,
                    proof=result.proof,
                    transient=result.transient,
                )
            case orders.Launch() | orders.Release() | orders.Restore(), m.Refused() if result.code not in RUNS_UNDER_IT:
                return self._refused(order, result.code, result.message)
            case orders.Release(), m.Parked():
                return events.ParkConfirmed(**at, quiet=result.quiet, same=result.same, resident=result.resident)
            case orders.Release(), m.NotParked():
                return events.ParkRefused(**at, code=result.code, reason=result.reason, unsent=result.unsent)
            case orders.Restore(), m.Awake():
                return events.WakeConfirmed(
                    **at, back=result.back, usable=result.usable, canary=result.canary, same=result.same
                )
            case orders.Restore(), m.NotAwake():
                return events.WakeFailed(
                    **at,
                    code=result.code,
                    reason=result.reason,
                    mismatch=result.mismatch,
                    unsent=result.unsent,
                )
            case orders.AwaitIdle(), m.IdleVerdict():
                return events.IdleGateEnded(**at, verdict=result.verdict)
            case orders.Terminate(), m.Absent():
                return events.Terminated(**at, proof=result.proof)
            case orders.Terminate(), m.Unresolved():
                return events.TerminateUnproven(**at, reason=result.reason)
            case orders.Terminate(), m.Refused():
                return events.TerminateUnproven(**at, reason=result.message)
            case orders.Probe(), m.ProbeResult():
                return events.Probed(
                    **at,
                    same=result.same,
                    usable=result.usable,
                    gone=result.gone,
                    resident=result.resident,
                    canary=result.canary,
                    reason=result.reason,
                )
            case _, m.Unresolved():
                return self._lost(order, result.reason)
            case _, m.Refused():
                return self._lost(order, result.message)
            case _:
                return self._lost(order, f"the host answered {type(order).__name__} with {type(result).__name__}")

    def _at(self, order: orders.HostOrder) -> _At:
        return {"incarnation": order.incarnation, "token": order.token, "now_ms": self.clock()}

    def _refused(self, order: orders.HostOrder, code: str, reason: str) -> events.Event:
        """It was refused before any effect: as it was before, whatever was charged for it."""
        at, unsent = self._at(order), Unsent(incarnation=order.incarnation, refused_before_sending=True)
        match order:
            case orders.Launch():
                return events.LaunchFailed(
                    **at, code=code, reason=reason, proof=unsent, transient=lookup(code).retryable
                )
            case orders.Release():
                return events.ParkRefused(**at, code=code, reason=reason, unsent=unsent)
            case orders.Restore():
                return events.WakeFailed(**at, code=code, reason=reason, unsent=unsent)
            case _:
                return self._lost(order, reason)

    def _lost(self, order: orders.HostOrder, reason: str) -> events.Event:
        return events.OrderLost(**self._at(order), reason=reason)

    # --- checkpoints, logs, looks ----------------------------------------------------------------

    async def measure(self, order: orders.Measure) -> events.Event:
        """Digest the checkpoint on the allowed hosts and resolve the revision on each of them."""
        return await self.measuring.measure(order)

    async def fetch(self, order: orders.Measure) -> events.Event | None:
        """Have what a revision is downloaded from on its hosts; None once one of them has it."""
        return await self.fetching.fetch(order)

    async def stop_fetching(self, order: orders.StopFetching) -> None:
        """End what is downloaded for a deployment."""
        await self.fetching.stop(order.deployment)

    async def verify(self, order: orders.VerifyStart) -> events.Event:
        """Ask a host whether a start could begin there."""
        return await self.measuring.verify(order)

    async def prune_logs(self, order: orders.PruneLogs) -> None:
        """Have a host delete the logs of deployments that are no more. Raises: CapyError when it did not."""
        command = m.PruneLogs(command_id=f"prune:{order.host}@{self.clock()}", kept=order.kept, as_of_ms=order.as_of_ms)
        match await self._call(order.host, command):
            case m.Refused() as refused:
                raise Refusal(refused.code, refused.message)
            case _:
                pass  # Done

    async def read_load(self, order: orders.ReadLoad) -> None:
        """Have a host read an engine's gauges now; the reading is a report. Raises: CapyError when it was not asked."""
        command = m.ReadLoad(command_id=f"load:{order.incarnation}@{self.clock()}", incarnation=order.incarnation)
        await self._call(order.host, command)

    async def read_memory(self, order: orders.ReadMemory) -> None:
        """As `read_load`, of a host's memory."""
        await self._call(order.host, m.ReadMemory(command_id=f"memory:{order.host}@{self.clock()}"))

    # --- reports ---------------------------------------------------------------------------------

    def heard(self, report: m.Report) -> events.Event | None:
        """What a host's news means to the world; None for news that is not the world's."""
        now_ms: Millis = self.clock()
        match report:
            case m.Spawned():
                return events.Spawned(
                    incarnation=report.incarnation, token=report.token, processes=report.processes, now_ms=now_ms
                )
            case m.MemberExit():
                return events.EngineExited(
                    incarnation=report.incarnation,
                    role=report.role,
                    status=report.status,
                    reason=report.last_words,
                    unseen=report.unseen,
                    now_ms=now_ms,
                )
            case m.LoadReport():
                return events.LoadReported(
                    incarnation=report.incarnation,
                    running=report.running,
                    waiting=report.waiting,
                    kv_usage_ppm=report.kv_usage_ppm,
                    read_at_ms=report.seen_at_ms,
                    now_ms=now_ms,
                )
            case m.EngineSilent():
                return events.EngineSilent(incarnation=report.incarnation, reason=report.reason, now_ms=now_ms)
            case m.Domains():
                return events.Observed(host=report.host, domains=report.domains, now_ms=now_ms)
            case m.ProfilesChanged():
                return events.ProfilesPublished(
                    host=report.host, installations=installations(report.profiles), now_ms=now_ms
                )
            case _:
                return None


def installations(profiles: Iterable[m.Profile]) -> dict[str, str]:
    """What each profile runs: another build, or another place, is another installation."""
    return {profile.name: f"{profile.fingerprint} {profile.executable}" for profile in profiles}


def listener(links: HostLinks, feed: Callable[[events.Event], None]) -> Callable[[m.Report], None]:
    """What a session calls with each report."""

    def hear(report: m.Report) -> None:
        if isinstance(report, m.SourceProgress):
            links.fetching.heard(report)
            return
        if isinstance(report, m.DigestProgress):
            links.measuring.heard(report)
            return
        if isinstance(report, m.LatencyReport):
            links.latencies.heard(report)
            return
        event = links.heard(report)
        if event is not None:
            feed(event)

    return hear
