"""What this host owns: launches with processes, and the only ways in which that ends.

Custody ends with a proof: P-GONE from watching every recorded process and the whole group vanish, P-BOOT
when the machine has booted since, P-NEVER when nothing was ever spawned. Whatever cannot be proven keeps
its record, its port and its charge. Looking at /proc reads every process of the machine, so it is done
in a thread: the loop that relays tokens does not wait for it.
Source: lifecycle 2, 14, 18.3; engines 16.2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs
import trio

from capyctl.clock import now_ms
from capyctl.fsm.proofs import GoneProof, NeverLaunched, Rebooted, SameEngine
from capyctl.fsm.types import Incarnation, ProcessIdentity, Role
from capyctl.host import identity, listeners, process, segments
from capyctl.host.arrivals import Arrivals
from capyctl.host.devices import Owners
from capyctl.host.engine import Engine
from capyctl.host.identity import Presence
from capyctl.host.ingress import Ingress
from capyctl.host.journal import Journal
from capyctl.host.ports import PortLeases, listened_by

T = TypeVar("T")
LOOK_LIMITER = trio.CapacityLimiter(2)
OVERSEE_S = 15.0  # between two looks at what a running engine listens on and which shared memory it made
ARRIVALS_REST = 3.0  # between two looks that new segments ask for, in lengths of a look
_log = logging.getLogger("capyctl.host.custody")


async def in_thread(look: Callable[[], T]) -> T:
    """Run a blocking look at /proc."""
    return await trio.to_thread.run_sync(look, limiter=LOOK_LIMITER)


@attrs.define(eq=False)
class Custody:
    """The engines in this host's care. `engines` holds those that are watched; the journal holds all."""

    journal: Journal
    ports: PortLeases
    ingress: Ingress
    kill_s: float = process.KILL_S
    arrivals: Arrivals = attrs.field(factory=Arrivals)
    engines: dict[Incarnation, Engine] = attrs.field(factory=dict)

    def admit(self, engine: Engine) -> None:
        """Let requests through to an engine that is proven to serve."""
        record = engine.record
        self.ingress.admit(engine.incarnation, record.port, record.key, resets_unread=engine.adapter.resets_unread)

    async def end(
        self, incarnation: Incarnation, processes: tuple[ProcessIdentity, ...], grace_s: float
    ) -> GoneProof | str:
        """SIGTERM, grace, SIGKILL, proof. A text instead of a proof says what is left, and nothing is released."""
        if not processes or processes[0].boot_id != identity.boot_id():
            gone = await observe(incarnation, processes)
        else:
            processes = await self.with_newcomers(incarnation, processes)
            await self.note_segments(incarnation, processes)
            remains = await process.put_down(processes, grace_s, self.kill_s)
            await self.note_named(incarnation, processes)
            gone = process.proof_of(incarnation, processes, remains) if remains.nothing else str(remains)
        if not isinstance(gone, str):
            await self.release(incarnation)
        return gone

    async def release(self, incarnation: Incarnation) -> None:
        """Proven gone, or proven never to have been: the record ends first, then its port is free."""
        await self._remove_segments(incarnation)
        await self.journal.gone(incarnation)
        self.ports.give_back(incarnation)
        self.ingress.close(incarnation)
        self.engines.pop(incarnation, None)

    async def with_newcomers(
        self, incarnation: Incarnation, processes: tuple[ProcessIdentity, ...]
    ) -> tuple[ProcessIdentity, ...]:
        """Record whoever joined the group since, so that a proof covers helpers too."""
        leader = next(p for p in processes if p.role is Role.API)
        found = await in_thread(lambda: identity.with_roles(leader, processes))
        if len(found) > len(processes):
            await self.journal.noticed(incarnation, found)
        return found

    async def note_segments(self, incarnation: Incarnation, processes: tuple[ProcessIdentity, ...]) -> None:
        """Journal what shared memory the launch has made by now: after its end nobody could tell whose it is."""

        def look() -> frozenset[segments.Segment]:
            alive = {p.pid for p in processes if identity.presence(p) is Presence.ALIVE}
            nearest = alive | identity.descendants(alive)
            found = segments.made_by(nearest)  # before the whole machine is searched for the rest of the group
            group = {member.pid for p in processes if p.role is Role.API for member in identity.group_members(p)}
            return found | segments.made_by(group - nearest)

        await self._journal_segments(incarnation, await in_thread(look))  # looked first: its maker may be dying

    async def note_named(self, incarnation: Incarnation, processes: tuple[ProcessIdentity, ...]) -> None:
        """Journal what an engine that has just ended made and no look saw, where a name says so."""
        record = await self.journal.launch(incarnation)
        if record is None:
            return
        makers = [p for p in processes if p.role is not Role.HELPER]  # helpers come and go, and their pids with them
        found = await in_thread(lambda: segments.named_after(makers, record.shm_before))
        await self._journal_segments(incarnation, found)

    async def _journal_segments(self, incarnation: Incarnation, found: frozenset[segments.Segment]) -> None:
        record = await self.journal.launch(incarnation) if found else None
        if record is None:
            return
        made = frozenset(one for one in found if one.inode not in record.shm_before)
        if made - record.segments:
            await self.journal.made(incarnation, made)

    async def note_arrivals(self, engine: Engine) -> None:
        """Look whose new shared memory is the moment it is made, until cancelled. What came before is looked at too."""
        seen = -1
        while True:
            await self.arrivals.after(seen)
            seen, began = self.arrivals.count, trio.current_time()
            try:
                await self.note_segments(engine.incarnation, engine.processes)
            except OSError as error:  # `oversee` looks again
                _unseen(engine, error)
            # Whoever else floods /dev/shm gets a quarter of a thread's time from us, not all of it.
            await trio.sleep(ARRIVALS_REST * (trio.current_time() - began))

    async def _remove_segments(self, incarnation: Incarnation) -> None:
        record = await self.journal.launch(incarnation)
        if record is None or not record.segments:
            return
        removed, kept = await in_thread(lambda: segments.remove_unused(record.segments))
        if removed or kept:  # most engines clean up after themselves
            fields = {"launch": str(incarnation), "removed": sorted(removed), "in_use": sorted(kept)}
            _log.info("segments.removed", extra={"fields": fields})

    async def exposed(self, engine: Engine) -> str | None:
        """Where the launch listens beyond loopback and must not, in words; None while it does not."""
        found = await in_thread(
            lambda: listeners.exposed([member.pid for member in identity.group_members(engine.api)])
        )
        if engine.adapter.workers_listen:
            found = tuple(one for one in found if one.pid == engine.api.pid or one.port == engine.record.port)
        if not found:
            return None
        places = ", ".join(str(one) for one in found)
        return f"the engine listens beyond loopback, where no key guards it: {places}"

    async def oversee(self, engine: Engine, grace_s: float) -> None:
        """Note what shared memory a running engine made, and end one that opens a door of its own to the network.

        The first look is at once: one that was found again may have opened it while nobody watched.
        """
        while True:
            exposed = None
            if engine.ready and not (engine.launching or engine.ending):
                try:
                    await self.note_segments(engine.incarnation, engine.processes)
                    exposed = await self.exposed(engine)
                except OSError as error:  # the watch over it, and over all others, goes on
                    _unseen(engine, error)
            if exposed is not None:
                _log.error("engine.exposed", extra={"fields": {"launch": str(engine.incarnation), "why": exposed}})
                self.ingress.close(engine.incarnation)
                engine.fault = exposed
                await process.put_down(engine.processes, grace_s, self.kill_s)
                return
            await trio.sleep(OVERSEE_S)

    def owners(self) -> Owners:
        """Whose processes hold which memory: every watched engine's."""
        return {engine.incarnation.lane.owner: engine.holders for engine in self.engines.values()}

    async def record_group(self, engine: Engine) -> tuple[ProcessIdentity, ...]:
        """Name every process of a group that has just become ready, in the journal first (W4)."""
        found = await in_thread(lambda: identity.with_roles(engine.api, engine.processes))
        await self.journal.ready(engine.incarnation, found)
        engine.processes, engine.ready = found, True
        await self.note_segments(engine.incarnation, found)
        return found

    async def same(self, engine: Engine) -> SameEngine | str:
        """P-SAME: every recorded api and worker alive, nobody unnamed among them, its own port; or why not."""
        recorded = engine.processes

        def look() -> tuple[tuple[ProcessIdentity, ...], frozenset[ProcessIdentity], bool]:
            found = identity.with_roles(engine.api, recorded)
            alive = frozenset(p for p in found if identity.presence(p) is Presence.ALIVE)
            return found, alive, listened_by(engine.record.port, [p.pid for p in found]) is True

        found, alive, listens = await in_thread(look)
        missing = [p for p in recorded if p.role is not Role.HELPER and p not in alive]
        strangers = [p for p in found[len(recorded) :] if p.role is Role.WORKER] if engine.ready else []
        if missing or strangers:
            reasons = [f"{p.role.value} pid {p.pid} is not seen alive" for p in missing]
            return "; ".join([*reasons, *(f"pid {p.pid} is not in the record" for p in strangers)])
        if not listens:
            return f"none of its processes listens on port {engine.record.port}"
        if len(found) > len(recorded):
            await self.journal.noticed(engine.incarnation, found)
            engine.processes = found
        return SameEngine(
            incarnation=engine.incarnation,
            recorded=engine.processes,
            alive=alive,
            strangers=len(strangers),
            observed_at_ms=now_ms(),
        )


def _unseen(engine: Engine, why: OSError) -> None:
    """Nothing could be looked at: the process has too many files open, or the machine has."""
    _log.warning("engine.unseen", extra={"fields": {"launch": str(engine.incarnation), "why": str(why)}})


async def observe(incarnation: Incarnation, processes: tuple[ProcessIdentity, ...]) -> GoneProof | str:
    """P-GONE, P-BOOT or P-NEVER from looking alone; else what is still there. Signals nothing.

    P-NEVER for an empty record says that the handle can never start here: the caller has fenced it.
    """
    if not processes:
        return NeverLaunched(incarnation=incarnation, fenced=True, observed_at_ms=now_ms())
    boot = identity.boot_id()
    if all(p.boot_id != boot for p in processes):
        return Rebooted(
            incarnation=incarnation,
            recorded_boot_id=processes[0].boot_id,
            present_boot_id=boot,
            observed_at_ms=now_ms(),
        )
    remains = await in_thread(lambda: process.look(processes))
    return process.proof_of(incarnation, processes, remains) if remains.nothing else str(remains)


def unrecorded(processes: Sequence[ProcessIdentity]) -> str:
    """Why nothing is done about processes that the server knows of and no record here, and what a person can do."""
    alive = [f"pid {p.pid}" for p in processes if identity.presence(p) is not Presence.GONE]
    return (
        "this host's journal has no record of it, so nothing is signalled: see whose it is, end "
        f"{', '.join(alive) or 'its group'} with kill, then stop or start the instance again"
    )
