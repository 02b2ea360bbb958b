"""Downloads of one host: a bounded number at a time, each source once, watched, and ended when nobody wants it.

The fetching itself blocks and has a thread; here is what is asked about time. Whoever asks for a source that is on
its way waits for the same fetch. When the one who began it gives up, one of those who wait goes on from its parts.
Source: config 5.2; lifecycle 15.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs
import trio

from capyctl.checkpoints.sources import Wanted, place_of
from capyctl.documents.model_source import Http, HuggingFace
from capyctl.downloads.door import Line
from capyctl.downloads.fetch import Fetcher
from capyctl.downloads.part import Progress
from capyctl.errors import CapyError, Failure

AT_ONCE: Final = 2
THREADS_MAX: Final = 16
"""Those that were left to themselves included: one may be in a look-up of a name, which nothing ends."""
TELL_EVERY_S: Final = 0.5
SLOW_S: Final = 60.0
SLOWEST_BYTES: Final = 64 << 10
"""A source that sends less in `SLOW_S` seconds is not waited for: it is asked again, and given up in the end."""

Hear = Callable[[Progress], None]
_Asked = tuple[HuggingFace | Http, Wanted]
"""What is one fetch. Not its place: a mirror or a token of another document may do where this one fails."""
_log = logging.getLogger("capyctl.downloads")


@attrs.define(eq=False)
class _Running:
    """A fetch in progress, and who hears of it."""

    hear: list[Hear]
    progress: Progress = attrs.field(factory=Progress)
    done: trio.Event = attrs.field(factory=trio.Event)
    outcome: Path | CapyError | None = None  # None once done: whoever fetched gave up


@attrs.define(eq=False)
class Downloads:
    """Everything that a host downloads. `have` may be cancelled: then nothing of it goes on behind."""

    fetcher: Fetcher
    at_once: int = AT_ONCE
    slow_s: float = SLOW_S
    _running: dict[_Asked, _Running] = attrs.field(factory=dict)
    _places: trio.CapacityLimiter = attrs.field(init=False)
    _threads: trio.CapacityLimiter = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._places = trio.CapacityLimiter(self.at_once)
        self._threads = trio.CapacityLimiter(THREADS_MAX)

    @property
    def root(self) -> Path:
        """The download directory."""
        return self.fetcher.room.root

    async def have(self, source: HuggingFace | Http, wanted: Wanted, hear: Hear) -> Path:
        """The directory of a source, once it is complete.

        Args:
          hear: told how far it is, each half second.
        Raises: as `Fetcher.fetch`, without Stopped.
        """
        found = await trio.to_thread.run_sync(self.fetcher.found, source, wanted)
        if found is not None:
            return found
        asked = source, wanted
        while True:
            running = self._running.get(asked)
            if running is None:
                return await self._lead(asked, hear)
            running.hear.append(hear)
            try:
                await running.done.wait()
            finally:
                running.hear.remove(hear)
            if isinstance(running.outcome, Path):
                return running.outcome
            if running.outcome is not None:
                raise _again(running.outcome)

    async def _lead(self, asked: _Asked, hear: Hear) -> Path:
        running = self._running[asked] = _Running([hear])
        try:
            running.outcome = await self._fetch(*asked, running)
        finally:
            del self._running[asked]
            running.done.set()
        if isinstance(running.outcome, CapyError):
            raise running.outcome
        return running.outcome

    async def _fetch(self, source: HuggingFace | Http, wanted: Wanted, running: _Running) -> Path | CapyError:
        line = Line()
        outcome: Path | CapyError
        running.progress.phase = "waiting"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, running, line)
            try:
                async with self._places:
                    # Cancelled, the thread is left to itself: it ends at once, as its connection does.
                    outcome = await trio.to_thread.run_sync(
                        self.fetcher.fetch,
                        source,
                        wanted,
                        running.progress,
                        line,
                        abandon_on_cancel=True,
                        limiter=self._threads,
                    )
            except CapyError as wrong:
                outcome = wrong
            except Exception as wrong:  # a fault of ours ends this download alone
                _log.exception("download.broke", extra={"fields": {"place": place_of(source, wanted)}})
                reason = f"the download failed inside CapyCTL ({type(wrong).__name__}); see the log"
                outcome = Failure("internal", reason)
            finally:
                line.stop()
            nursery.cancel_scope.cancel()
        return outcome

    async def _watch(self, running: _Running, line: Line) -> None:
        """Tell whoever listens how far it is, and cut a connection that sends too little to come to an end."""
        progress = running.progress
        mark, since, phase = 0, trio.current_time(), ""
        while True:
            for hear in list(running.hear):
                hear(progress)
            moves = progress.phase == "downloading" or progress.phase == "asking"
            if progress.phase != phase or progress.received_bytes - mark >= SLOWEST_BYTES or not moves:
                mark, since, phase = progress.received_bytes, trio.current_time(), progress.phase
            elif trio.current_time() - since >= self.slow_s:
                _log.warning("download.slow", extra={"fields": {"bytes": progress.received_bytes - mark}})
                line.cut(f"only {progress.received_bytes - mark} bytes came in {self.slow_s:.0f} s")
                since = trio.current_time()
            await trio.sleep(min(TELL_EVERY_S, self.slow_s / 2))


def _again(wrong: CapyError) -> CapyError:
    """The same refusal for another who waited: an exception is raised once."""
    return type(wrong)(wrong.code, wrong.message, details=wrong.details, retryable=wrong.retryable)
