"""What the host tells unasked: load, memory, silence, spawns and exits.

The channel is bounded. Samples are dropped and counted when nobody reads, since newer ones follow; spawns and
exits wait for room.
Source: lifecycle 18.3; api 7.9; decisions 15.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import attrs
import trio

from capyctl.clock import now_ms
from capyctl.engines import latency, metrics
from capyctl.errors import CapyError
from capyctl.fsm.types import HostId, Incarnation, Millis, ProcessIdentity
from capyctl.host import process
from capyctl.host.custody import Custody
from capyctl.host.devices import Observer
from capyctl.host.engine import LOAD_EVERY_S, Engine
from capyctl.host.ingress import Ingress
from capyctl.host.journal import LaunchRecord
from capyctl.session import messages as m

REPORTS_MAX = 256
DOMAINS_EVERY_S = 1.0
LATENCY_EVERY_S = 5.0  # the series only ever grow, and a large engine takes milliseconds to write them all down
A_MOMENT_S = 0.001  # times are told in milliseconds, and the look is to be newer than what it was asked for
ENDED_UNSEEN = "the engine ended while the host was not running"
_log = logging.getLogger("capyctl.host.reports")


@attrs.define(eq=False, kw_only=True)
class Reports:
    """The host's end of the reports, and the tasks that sample for them. `channel` is for the server's end."""

    host: HostId
    custody: Custody
    ingress: Ingress
    observer: Observer
    grace_s: float = process.GRACE_S
    channel: trio.MemoryReceiveChannel[m.Report] = attrs.field(init=False)
    dropped: int = attrs.field(init=False, default=0)
    _send: trio.MemorySendChannel[m.Report] = attrs.field(init=False)
    _look_now: trio.Event = attrs.field(init=False, factory=trio.Event)  # somebody waits for a look at the memory

    def __attrs_post_init__(self) -> None:
        self._send, self.channel = trio.open_memory_channel[m.Report](REPORTS_MAX)

    async def tell(self, report: m.Report) -> None:
        """Send news, waiting for room."""
        await self._send.send(report)

    async def ended_unseen(self, record: LaunchRecord) -> None:
        """Tell the end of an engine that nobody watched."""
        await self.tell(_exit_report(record.incarnation, record.processes[0], None, ENDED_UNSEEN, unseen=True))

    def look_now(self) -> None:
        """Somebody waits for a look at the memory: do not wait for its turn."""
        self._look_now.set()

    def sample(self, report: m.Report) -> None:
        """Send what a newer report replaces: dropped when the server is behind."""
        self._say(report)

    # --- engines ---------------------------------------------------------------------------------------------

    async def follow(self, engine: Engine) -> None:
        """Sample an engine's gauges while it serves, and tell of its end, unless a command in progress does."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report_load, engine)
            if engine.adapter.family in latency.SERIES:
                nursery.start_soon(self._report_latency, engine)
            nursery.start_soon(self.custody.oversee, engine, self.grace_s)
            nursery.start_soon(self.custody.note_arrivals, engine)
            await engine.ended.wait()
            nursery.cancel_scope.cancel()
        await self.custody.note_named(engine.incarnation, engine.processes)
        if engine.launching or engine.ending:
            return
        self.ingress.close(engine.incarnation)
        reason = await engine.how_it_ended()
        await self.tell(_exit_report(engine.incarnation, engine.exited or engine.api, engine.status, reason))

    async def _report_load(self, engine: Engine) -> None:
        while True:
            if engine.answers:
                try:
                    running, waiting, kv, asked_at = await engine.gauges()
                    self._say(
                        m.LoadReport(
                            seen_at_ms=asked_at,
                            incarnation=engine.incarnation,
                            running=running,
                            waiting=waiting,
                            kv_usage_ppm=kv,
                        )
                    )
                except (ConnectionError, TimeoutError, CapyError) as error:
                    # No reading is no report: the server sees the last one age.
                    fields = {"launch": str(engine.incarnation), "why": str(error)}
                    _log.debug("engine.unread", extra={"fields": fields})
                    why = engine.silence.why
                    if why is not None:  # told again while it stays so
                        _log.warning("engine.silent", extra={"fields": {**fields, "why": why}})
                        self._say(m.EngineSilent(seen_at_ms=now_ms(), incarnation=engine.incarnation, reason=why))
            else:
                engine.silence.answered()  # it is not asked
            with trio.move_on_after(LOAD_EVERY_S):
                await engine.read_now.wait()
            engine.read_now = trio.Event()

    async def _report_latency(self, engine: Engine) -> None:
        """What cannot be read is no report: the last one ages."""
        family = engine.adapter.family
        while True:
            if engine.answers:
                asked_at = now_ms()
                try:
                    found = latency.histograms(await metrics.read_page(engine.client), family)
                except (ConnectionError, TimeoutError, CapyError):  # its gauges tell whether it is silent
                    found = {}
                if found:
                    self._say(_latency_report(engine.incarnation, asked_at, family, found))
            await trio.sleep(LATENCY_EVERY_S)

    # --- memory ----------------------------------------------------------------------------------------------

    async def tell_domains(self, *, asked: bool = False) -> None:
        """Report the memory domains as they were last seen. `asked`: somebody waits for it."""
        domains = await self.observer.sample(self.custody.owners(), asked=asked)
        self._say(m.Domains(seen_at_ms=now_ms(), host=self.host, domains=domains))

    async def sample_domains(self) -> None:
        """Report the memory domains each second, and at once when somebody waits for it; until cancelled."""
        asked = False
        while True:
            self._look_now = trio.Event()
            try:
                await self.tell_domains(asked=asked)
            except OSError as error:  # too many files are open: no look is no report, and the last one ages
                _log.warning("memory.unread", extra={"fields": {"why": str(error)}})
            with trio.move_on_after(DOMAINS_EVERY_S) as pause:
                await self._look_now.wait()
            asked = not pause.cancelled_caught
            if asked:
                await trio.sleep(A_MOMENT_S)
                with trio.move_on_after(DOMAINS_EVERY_S):
                    await self.observer.look()

    def _say(self, report: m.Report) -> None:
        """Send a sample, or drop and count it: the next one says more. Half of the channel is kept for news."""
        if self._send.statistics().current_buffer_used >= REPORTS_MAX // 2:
            self.dropped += 1
        else:
            self._send.send_nowait(report)


def _latency_report(
    incarnation: Incarnation, asked_at: Millis, family: str, found: Mapping[str, latency.Histogram]
) -> m.LatencyReport:
    return m.LatencyReport(
        seen_at_ms=asked_at,
        incarnation=incarnation,
        distributions=tuple(
            m.Distribution(
                figure=figure,
                source=source,
                count=found[figure].count,
                sum_us=found[figure].sum_us,
                buckets=tuple(m.Bucket(le_us=bound, count=count) for bound, count in found[figure].buckets),
            )
            for figure, source in latency.SERIES[family].items()
            if figure in found
        ),
    )


def _exit_report(
    incarnation: Incarnation, exited: ProcessIdentity, status: int | None, last_words: str, *, unseen: bool = False
) -> m.MemberExit:
    return m.MemberExit(
        seen_at_ms=now_ms(),
        incarnation=incarnation,
        process=exited,
        role=exited.role,
        status=status,
        last_words=last_words,
        unseen=unseen,
    )
