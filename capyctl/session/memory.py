"""The session of a server and a host in one process: two bounded channels and no second code path.

Commands go one way, results and reports the other, in the order in which they were sent. At full the
sender waits: results and reports are never dropped here (a host drops samples before it sends them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import attrs
import trio

from capyctl.errors import Lost
from capyctl.session.messages import Command, Report, Result

COMMANDS_MAX: Final = 64
NEWS_MAX: Final = 256


class Agent(Protocol):
    """The host's end."""

    reports: trio.MemoryReceiveChannel[Report]

    async def handle(self, command: Command) -> Result:
        """Perform one command; the same id again gives the same result and no second effect."""


@attrs.define(eq=False)
class _Slot:
    """A caller that waits for one result."""

    done: trio.Event = attrs.field(factory=trio.Event)
    result: Result | None = None


@attrs.define(eq=False)
class MemoryLink:
    """The server's end. Run `run` in a nursery; from then on `call`."""

    agent: Agent
    _waiting: dict[str, list[_Slot]] = attrs.field(factory=dict)
    _commands: trio.MemorySendChannel[Command] | None = None

    async def call(self, command: Command) -> Result:
        """Send a command and wait for its result. Cancelling gives up the waiting, not the command.

        Raises: Lost `unavailable` when the session is down, or ends before the result came.
        """
        if self._commands is None:
            raise Lost("unavailable", "the host's session is down")
        slot = _Slot()
        self._waiting.setdefault(command.command_id, []).append(slot)
        try:
            await self._commands.send(command)
            await slot.done.wait()
        except trio.BrokenResourceError:
            raise Lost("unavailable", "the host's session ended") from None
        finally:
            slots = self._waiting.get(command.command_id)
            if slots is not None and slot in slots:
                slots.remove(slot)
                if not slots:
                    del self._waiting[command.command_id]
        if slot.result is None:
            raise Lost("unavailable", "the host's session ended before it answered")
        return slot.result

    async def run(
        self, on_report: Callable[[Report], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Carry messages until cancelled. `on_report` hears the host's news, in order, and must not block."""
        self._commands, commands = trio.open_memory_channel[Command](COMMANDS_MAX)
        news_in, news = trio.open_memory_channel[Result | Report](NEWS_MAX)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve, commands, news_in)
                nursery.start_soon(self._forward, news_in)
                task_status.started()
                async for message in news:
                    if isinstance(message, Report):
                        on_report(message)
                    else:
                        self._settle(message)
        finally:
            self._commands = None
            for slots in self._waiting.values():
                for slot in slots:
                    slot.done.set()
            self._waiting.clear()

    async def _serve(
        self, commands: trio.MemoryReceiveChannel[Command], news: trio.MemorySendChannel[Result | Report]
    ) -> None:
        async with trio.open_nursery() as nursery:
            async for command in commands:
                nursery.start_soon(self._handle, command, news)

    async def _handle(self, command: Command, news: trio.MemorySendChannel[Result | Report]) -> None:
        await news.send(await self.agent.handle(command))

    async def _forward(self, news: trio.MemorySendChannel[Result | Report]) -> None:
        async for report in self.agent.reports:
            await news.send(report)

    def _settle(self, result: Result) -> None:
        for slot in self._waiting.pop(result.command_id, ()):
            slot.result = result
            slot.done.set()
