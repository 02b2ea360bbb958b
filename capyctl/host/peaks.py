"""The most that an engine's start held, by domain: what the next start of the same is charged while it loads.

Where an engine's processes say what they hold (a card lists them, RAM is in /proc) they are summed. A GPU without
memory of its own is not in /proc, so there the peak is the largest drop of what the machine had available. What other
programs are seen to take or give back meanwhile is no part of it; what other engines of this host do cannot be told
apart that well, so such a drop counts only while none of them starts, ends, parks or wakes. Kernels that are compiled
at a first start take memory that no later start takes, so what was seen beside a compiler in the engine's group is
left out: a build reaches from the last look that found no compiler to the next one that finds none.
Source: memory 8.1; engines 13.4.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import attrs
import trio

from capyctl.fsm.types import Bytes, Domain, ProcessIdentity
from capyctl.host import identity
from capyctl.host.custody import Custody, in_thread
from capyctl.host.devices import Observer
from capyctl.host.engine import Engine
from capyctl.host.identity import PROC, Stat
from capyctl.host.journal import Memory

SAMPLE_EVERY_S = 0.25
SAMPLES_PER_CHECK = 2
"""So that compilers are looked for each 500 ms: a look reads all of /proc."""
BUILDS_MAX = 64
"""A start that builds more often than that is measured as nothing."""

_COMPILERS = """
nvcc cicc ptxas ptxas-blackwell tileiras fatbinary cudafe++ nvlink nvc nvc++ hipcc ninja make cmake cc c++ gcc g++ cc1
cc1plus clang clang++ lto1 rustc collect2 as ld ld.bfd ld.gold ld.lld lld
"""
COMPILERS: Final = frozenset(_COMPILERS.split())
_VERSION: Final = re.compile(r"-\d+(\.\d+)*$")  # gcc-13, clang++-17


@attrs.define(eq=False)
class Peak:
    """The largest figures of a start so far. Samples count once a check after them, and the one before, found no build.

    Give it every check (`checked`) and every sample (`sampled`) in order; `bytes` is what was seen outside builds.
    """

    bytes: dict[Domain, Bytes] = attrs.field(factory=dict)
    builds: int = 0
    _building: bool = False
    _open: dict[Domain, Bytes] = attrs.field(factory=dict)  # since the last check, which found no build

    def checked(self, *, building: bool) -> None:
        """Whether a compiler was found in the engine's group just now."""
        if building and not self._building:
            self.builds += 1
        if not building and not self._building:
            _raise(self.bytes, self._open)
        self._open.clear()
        self._building = building

    def sampled(self, held: Mapping[Domain, Bytes]) -> None:
        """What is held now."""
        if not self._building:
            _raise(self._open, held)

    @property
    def result(self) -> dict[Domain, Bytes]:
        """The peaks, empty where nothing can be said: nothing was seen outside builds, or there were too many."""
        return dict(self.bytes) if self.builds <= BUILDS_MAX else {}


def _raise(most: dict[Domain, Bytes], seen: Mapping[Domain, Bytes]) -> None:
    for domain, amount in seen.items():
        most[domain] = max(most.get(domain, Bytes(0)), amount)


def builds(members: Iterable[Stat], proc: Path = PROC) -> bool:
    """Whether one of these processes is a compiler, by the name of its program."""
    return any(_VERSION.sub("", _name(member.pid, proc)) in COMPILERS for member in members)


def _name(pid: int, proc: Path) -> str:
    try:
        return (proc / str(pid) / "comm").read_text("utf-8", "replace").strip()
    except OSError:
        return ""  # it ended


Others = frozenset[tuple[str, Memory, bool]]


@attrs.define(eq=False, kw_only=True)
class StartWatch:
    """Watches one start, from before its process exists until it is ready. `open` makes one."""

    observer: Observer
    custody: Custody
    others: Others
    before_bytes: Bytes | None  # available before the start beside others, where a GPU shares the machine's memory
    proc: Path = PROC
    peak: Peak = attrs.field(factory=Peak)
    contended: bool = False

    @classmethod
    async def open(cls, observer: Observer, custody: Custody) -> StartWatch:
        """Before anything is spawned."""
        return cls(
            observer=observer,
            custody=custody,
            others=_others(custody, None),
            before_bytes=await _available(observer, ()) if observer.shared else None,
            contended=_any_moves(custody, None),
        )

    async def run(self, engine: Engine) -> None:
        """Look until cancelled."""
        while True:
            group = await self._check(engine)
            for _ in range(SAMPLES_PER_CHECK):
                await self._sample(engine, group)
                await trio.sleep(SAMPLE_EVERY_S)

    async def close(self, engine: Engine) -> dict[Domain, Bytes]:
        """The engine is ready: look once more.

        Returns: the peaks by domain, empty where this start cannot be told from what else happened.
        """
        await self._check(engine)
        await self._sample(engine, engine.processes)  # it may have been quicker than the looks before
        await self._check(engine)
        if self.contended or _others(self.custody, engine) != self.others:
            return {}
        return self.peak.result

    async def _check(self, engine: Engine) -> tuple[ProcessIdentity, ...]:
        """Look for compilers, and who the engine's processes are by now."""
        building, group = await in_thread(lambda: look_at(engine, self.proc))
        self.peak.checked(building=building)
        engine.group = group  # what its workers hold is not foreign while they load
        return group

    async def _sample(self, engine: Engine, group: tuple[ProcessIdentity, ...]) -> None:
        """By a look at the cards of its own: those that serve everybody come too seldom to see a peak."""
        self.contended = self.contended or _any_moves(self.custody, engine)
        held = dict((await self.observer.held(group)).bytes)
        if self.before_bytes is not None:
            drop = self.before_bytes - await self.observer.available_beside(group)
            held[self.observer.ram] = max(Bytes(drop), held.get(self.observer.ram, Bytes(0)))
        self.peak.sampled(held)


async def _available(observer: Observer, processes: tuple[ProcessIdentity, ...]) -> Bytes:
    await observer.look()
    return await observer.available_beside(processes)


def look_at(engine: Engine, proc: Path = PROC) -> tuple[bool, tuple[ProcessIdentity, ...]]:
    """Whether something is compiled for it now, and its processes; reads all of /proc."""
    members = identity.group_members(engine.api, proc)
    return builds(members, proc), identity.with_roles(engine.api, engine.processes, members)


def _any_moves(custody: Custody, engine: Engine | None) -> bool:
    """Whether another engine of this host starts, ends, parks or wakes."""
    return any(
        other is not engine and (other.launching or other.ending or bool(other.moving))
        for other in custody.engines.values()
    )


def _others(custody: Custody, engine: Engine | None) -> Others:
    """The other engines of this host and where their memory is: the same before a start and after it, or it is none."""
    return frozenset(
        (str(other.incarnation), other.memory, other.ended.is_set())
        for other in custody.engines.values()
        if other is not engine
    )
