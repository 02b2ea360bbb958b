"""What the driver needs around it, as protocols: the world, the store, the router's gates, the hosts.

Each is another module's object in a role and a small stand-in in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from capyctl.control import events, orders
from capyctl.control.records import Move, Record
from capyctl.fsm.types import Millis, RequestId


class StepLike(Protocol):
    """What one event did to the world."""

    @property
    def orders(self) -> tuple[orders.Order, ...]: ...
    @property
    def changed(self) -> tuple[Record, ...]: ...
    @property
    def moves(self) -> tuple[Move, ...]: ...


class WorldLike(Protocol):
    """The pure world: one event in, one step out."""

    def handle(self, event: events.Event) -> StepLike: ...

    @property
    def next_due_ms(self) -> Millis | None: ...


class CommitLike(Protocol):
    """The promise that a step is on the disk."""

    seq: int

    async def durable(self) -> None: ...


class Journal(Protocol):
    """Where steps are kept."""

    def append(
        self, event: events.Event | None, changed: Sequence[Record], now_ms: Millis, *, waited: bool
    ) -> CommitLike: ...


class Gates(Protocol):
    """The router's side: performs its orders at once, and never blocks."""

    def perform(self, order: orders.RouterOrder) -> None: ...

    def fault(self, request: RequestId) -> None:
        """The world could not take this request's event."""


class Hosts(Protocol):
    """Performs orders on hosts. Answers with the outcome; raises nothing that it can say as an outcome."""

    async def perform(self, order: orders.HostOrder) -> events.Event: ...

    async def fetch(self, order: orders.Measure) -> events.Event | None:
        """Have the model on its hosts, however long that takes; None once it is there."""

    async def stop_fetching(self, order: orders.StopFetching) -> None: ...

    async def measure(self, order: orders.Measure) -> events.Event: ...

    async def abort(self, order: orders.Abort) -> events.Event: ...

    async def verify(self, order: orders.VerifyStart) -> events.Event: ...

    async def prune_logs(self, order: orders.PruneLogs) -> None: ...

    async def read_load(self, order: orders.ReadLoad) -> None: ...

    async def read_memory(self, order: orders.ReadMemory) -> None: ...
