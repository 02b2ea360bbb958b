"""One engine that this host launched or found again: its watch, its gauges, its way to READY.

Watching never owns: cancelling anything here leaves the process as it is.
Source: engines 5, 12, 14; decisions 15.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import attrs
import trio

from capyctl.clock import now_ms
from capyctl.engines.adapter import Adapter, LaunchFacts
from capyctl.engines.last_words import bounded, telling
from capyctl.errors import CapyError, Failure
from capyctl.fsm.proofs import Usable
from capyctl.fsm.types import Incarnation, Millis, ProcessIdentity, Role
from capyctl.host import identity, logs, ports
from capyctl.host.http import LoopbackClient
from capyctl.host.journal import LaunchRecord, Memory
from capyctl.host.silence import Silence, effort

POLL_FIRST_S = 0.05  # a small model on llama.cpp is ready in 0.2 s
POLL_S = 0.5
LOAD_EVERY_S = 1.5
"""Between two looks at the gauges. llama.cpp looks for a client that has gone only after 1 s in which it had nothing
else to answer, so a poll each second would keep an abandoned answer running for ever."""

HUNG_PROBE_S = 10.0  # of one that is doubted because it does nothing
PROBE_S = 60.0  # of a running engine; at a start the deadline bounds the probe
REASON_CHARS = 4_000
_SENT = (-signal.SIGKILL, -signal.SIGTERM)  # somebody's, who the log does not know of
FRONT_TOO_S = 0.5
"""How long the end of a worker waits for that of the `api`: workers of a front that was killed end right after it, by
themselves and with statuses of their own, and are often the first to be seen."""


@attrs.define(eq=False)
class Engine:
    """A launch with processes. `ended` is set when an `api` or `worker` has exited, which is an engine exit."""

    record: LaunchRecord
    adapter: Adapter
    facts: LaunchFacts
    client: LoopbackClient
    processes: tuple[ProcessIdentity, ...]
    abandoned: Callable[[], int]  # requests given up and not settled, from the ingress
    ready: bool = False
    group: tuple[ProcessIdentity, ...] = ()  # who was seen in its group while it loads: nobody is recorded yet
    launching: bool = False  # its Launch command is still being answered, and tells of an exit itself
    ending: bool = False  # being terminated: its exit is no news
    memory: Memory = Memory.HELD
    canary: str | None = None  # how it answered the fixed prompt at its first readiness
    fault: str | None = None  # why this host ended it by itself
    moving: str | None = None  # the step of its memory that is being performed now
    ended: trio.Event = attrs.field(factory=trio.Event)
    read_now: trio.Event = attrs.field(factory=trio.Event)  # somebody waits for its gauges: do not wait for their turn
    silence: Silence = attrs.field(factory=Silence)
    watched: set[ProcessIdentity] = attrs.field(factory=set)
    exited: ProcessIdentity | None = None  # whose end ended it, with `status`
    status: int | None = None
    _exits: dict[ProcessIdentity, int | None] = attrs.field(factory=dict)  # in the order in which they were seen
    _front_ended: trio.Event = attrs.field(factory=trio.Event)
    _read_at: float = 0.0  # trio time
    _reading: trio.Lock = attrs.field(factory=trio.Lock)

    @property
    def incarnation(self) -> Incarnation:
        return self.record.incarnation

    @property
    def holders(self) -> tuple[ProcessIdentity, ...]:
        """Whose memory is its own: the recorded processes; while it loads, whoever lives in its group."""
        return self.processes if self.ready else self.group or self.processes

    @property
    def answers(self) -> bool:
        """Whether it may be asked for its gauges and for answers: an engine without its memory may hang, or end."""
        return self.ready and not self.launching and self.memory is Memory.HELD

    @property
    def api(self) -> ProcessIdentity:
        return next(process for process in self.processes if process.role is Role.API)

    async def watch(self, process: ProcessIdentity) -> None:
        """Wait for the exit of an `api` or `worker`, either of which ends the engine."""
        self._exits[process] = await identity.wait_gone(process)
        if process == self.api:
            self._front_ended.set()
        with trio.move_on_after(FRONT_TOO_S):
            await self._front_ended.wait()
        if not self.ended.is_set():
            self.exited, self.status = self._cause()
            self.ended.set()

    def _cause(self) -> tuple[ProcessIdentity, int | None]:
        """The front's exit, whose status is ours to read; the first worker's when the front stays."""
        if self.api in self._exits:
            return self.api, self._exits[self.api]
        return next(iter(self._exits.items()))

    async def gauges(self) -> tuple[int, int, int | None, Millis]:
        """(running, waiting, KV ppm, when the engine was asked). While a request that was given up is unsettled,
        readings keep LOAD_EVERY_S apart, whoever asks.

        Raises: ConnectionError, TimeoutError, CapyError.
        """
        async with self._reading:
            if self.abandoned():
                await trio.sleep_until(self._read_at + LOAD_EVERY_S)
            asked_at, asked_at_s = now_ms(), trio.current_time()
            try:
                running, waiting, kv = await self.adapter.gauges(self.client)
            except (ConnectionError, TimeoutError):
                used = await trio.to_thread.run_sync(effort, self.processes)
                self.silence.missed(asked_at_s, trio.current_time(), used)
                raise
            except CapyError:
                self.silence.answered()  # an answer, if no reading
                raise
            finally:
                self._read_at = trio.current_time()
            self.silence.answered()
            return running, waiting, kv, asked_at

    async def probe(self, limit_s: float | None = None) -> Usable:
        """P-READY's second half: one bounded inference. Raises: CapyError when it did not answer as it should."""
        if limit_s is None:
            limit_s = HUNG_PROBE_S if self.silence.hung else PROBE_S
        try:
            chars = await self.adapter.probe(self.client, self.facts, limit_s)
        except (ConnectionError, TimeoutError) as error:
            raise Failure("launch_failed", f"the engine did not answer the probe: {error}") from error
        if chars <= 0:
            raise Failure("launch_failed", "the engine's answer to the probe is empty")
        return Usable(incarnation=self.incarnation, answer_chars=chars, probed_at_ms=now_ms())

    def owns_its_port(self) -> bool:
        """Whether its own processes, and nobody else, listen on the leased port; blocking."""
        return self._owns_its_port() is True

    def _owns_its_port(self) -> bool | None:
        pids = [process.pid for process in self.processes]
        pids += [member.pid for member in identity.group_members(self.api) if member.pid not in pids]
        return ports.listened_by(self.record.port, pids)

    async def become_ready(self) -> Usable | CapyError:
        """Own port, health, served name and effective arguments, probe. The caller bounds it and watches the process.

        Between the lease and the engine's listen anybody may listen there, so nothing is asked, since asking tells
        the launch's key, before it is seen whose the listener is. Nobody listening and a silent engine are "not
        yet"; an answer that forbids going on ends it.
        """
        wait_s = POLL_FIRST_S
        while True:
            owned = await trio.to_thread.run_sync(self._owns_its_port)
            if owned is False:
                return self._taken()
            try:
                if owned and await self.adapter.loaded(self.client):
                    break
            except (ConnectionError, TimeoutError):
                pass  # too busy loading to answer
            except CapyError as refused:
                return refused
            await trio.sleep(wait_s)
            wait_s = min(wait_s * 1.2, POLL_S)
        while True:
            if await trio.to_thread.run_sync(self._owns_its_port) is False:
                return self._taken()
            try:
                await self.adapter.verify(self.client, self.facts)
                return await self.probe(_seconds_until(self.record.command.deadline_ms))
            except (ConnectionError, TimeoutError):
                await trio.sleep(POLL_S)
            except CapyError as refused:
                return refused

    def _taken(self) -> CapyError:
        return Failure("port_conflict", f"another program listens on port {self.record.port} of this engine")

    def story(self, when: str = "") -> str:
        """How it ended, in words; `when` is ` before it was ready`."""
        if self.fault is not None:
            return f"the engine was ended{when}: {self.fault}"
        who = "the engine"
        if self.exited is not None and self.exited.role is Role.WORKER:
            who = f"a worker of the engine (pid {self.exited.pid})"
        if self.status is None:
            return f"{who} ended{when}, and with which status is not known"  # no child of this run of the role
        if self.status < 0:
            more = ", perhaps for lack of memory" if self.status == -9 else ""
            return f"{who} was ended by signal {-self.status}{when}{more}"
        return f"{who} exited with status {self.status}{when}"

    async def how_it_ended(self) -> str:
        """Its story and last lines, once its watch has seen the end; "" when that takes longer than it should."""
        with trio.move_on_after(2 * FRONT_TOO_S):
            await self.ended.wait()
        return self.told(self.story(), await self.last_words()) if self.ended.is_set() else ""

    def told(self, reason: str, words: list[str]) -> str:
        """A failure's reason with the engine's last lines below it; with the line that names an error beside it, where
        the engine ended by itself."""
        by_itself = self.exited is not None and self.fault is None and self.status not in _SENT
        cause = telling(words) if by_itself else None
        return with_words(reason if cause is None or cause in reason else f"{reason}: {cause}", words)

    async def last_words(self) -> list[str]:
        """The last lines that it wrote, redacted, of which the newest are told; waits a moment for the writer when
        the engine has ended."""
        if self.ended.is_set():
            await logs.settled(self.record.writer)
        return await trio.to_thread.run_sync(
            logs.last_words, self.record.log_path, logs.LOOKED_AT_LINES, logs.LOOKED_AT_CHARS
        )


def _seconds_until(deadline_ms: Millis) -> float:
    return max(0.1, (deadline_ms - now_ms()) / 1000)


def with_words(reason: str, words: list[str]) -> str:
    """A failure's reason on one line, with the engine's last lines below it, bounded."""
    shown = [bounded(line, logs.LAST_LINE_CHARS) for line in words[-logs.LAST_LINES :]]
    text = reason if not shown else reason + ":\n" + "\n".join(shown)
    return text if len(text) <= REASON_CHARS else text[: REASON_CHARS - 1] + "…"
