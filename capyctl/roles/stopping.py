"""How a role is told to end: by signals, or because what it cannot do without has failed."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable

import attrs
import trio

from capyctl.errors import CapyError
from capyctl.server import log as logging

log = logging.Log("role")


@attrs.define(eq=False)
class Stopping:
    """`asked` at the first signal, `hurry` at the second.

    `asked` and `alone` when a part failed without which nothing new may begin: what engines are answering needs
    neither the store nor the driver, and is finished within the time that a stop gives it.
    """

    asked: trio.Event = attrs.field(factory=trio.Event)
    hurry: trio.Event = attrs.field(factory=trio.Event)
    alone: trio.Event = attrs.field(factory=trio.Event)
    failed: CapyError | None = None

    async def unless_it_fails(
        self, work: Callable[..., Awaitable[None]], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the store or the driver. Its failure ends the role in order: whoever waits for an answer gets one."""
        try:
            await work(task_status=task_status)
        except* CapyError as group:
            wrong = first_of(group)
            assert isinstance(wrong, CapyError)
            if self.failed is None:
                self.failed = wrong
                log.error("role.failed", code=wrong.code, reason=wrong.message)
            self.asked.set()
            self.alone.set()

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup, and meant to be
            numbers.append(signal.SIGHUP)  # its terminal closed: what it answers is finished all the same
        with trio.open_signal_receiver(*numbers) as signals:
            task_status.started()
            async for number in signals:
                log.info("role.stopping", signal=signal.Signals(number).name, again=self.asked.is_set())
                (self.hurry if self.asked.is_set() else self.asked).set()


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the role, taken out of the nurseries around it: ours first."""
    ours, rest = group.split(CapyError)
    inner = (ours or rest or group).exceptions[0]
    return first_of(inner) if isinstance(inner, BaseExceptionGroup) else inner
