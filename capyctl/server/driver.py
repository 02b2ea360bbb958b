"""The driver: one place where facts become steps, and steps become deeds.

Theory of operation. `feed` takes one fact and steps the world at once, in memory, in the trio thread.
It never awaits: a router callback, a `finally` block and a report reader may all call it, and the order
of calls is the order of events. What the step changed is queued in the store, and what it ordered is
done in one of three ways:

* orders to the router at once. Closing a gate must not wait for a disk, and the request's way must not
  either; what a request changes is written behind its answer. Asking an engine to end a request goes out at
  once too.
* replies to operators and confirmations after the commit that holds the step is durable.
* orders to hosts after the commit too, and one at a time per lane, in the order in which they were given.
  Each has exactly one outcome, fed back as an event. A task that ends without one (cancelled, or by a
  fault of ours) feeds OrderLost: nobody knows is an answer, and silence is none.

A step that breaks an invariant is our fault. The event is written to the journal, logged with its
position there, and taken back from the world's way: whoever waits for it is told `internal`, reads go
on, and nothing is restarted over and over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import attrs
import trio

from capyctl.clock import Clock
from capyctl.control import events, orders
from capyctl.control.records import Move
from capyctl.errors import CapyError, Failure, InvariantBroken, Lost, Refusal
from capyctl.fsm.types import Lane, Millis
from capyctl.server.errands import Errand, Errands
from capyctl.server.log import Log
from capyctl.server.seams import CommitLike, Gates, Hosts, Journal, WorldLike

log = Log("driver")

SPIN_PAUSE_S: Final = 0.05
TICK_PAUSE_S: Final = 1.0
TICK_PAUSE_MAX_S: Final = 60.0
FAULTS_KEPT: Final = 100

CommandEvent = (
    events.DeployAsked
    | events.StartAsked
    | events.PreinitializeAsked
    | events.StopAsked
    | events.ParkAsked
    | events.DeleteAsked
    | events.DrainAsked
)
"""Events that an operator's command makes, and that a Reply answers."""


@attrs.frozen(kw_only=True)
class Fault:
    """An event that the world could not take: our bug, with what a report needs."""

    at_ms: Millis
    seq: int
    event: str
    reason: str


@attrs.define(eq=False)
class _Waiter:
    """Whoever submitted a command and waits for its answer."""

    done: trio.Event = attrs.field(factory=trio.Event)
    receipt: orders.Receipt | None = None
    error: CapyError | None = None


@attrs.define(eq=False, repr=False)
class Driver:
    """Owns the world. Run `run` in a nursery; from then on `feed` and `submit`."""

    world: WorldLike
    store: Journal
    hosts: Hosts
    clock: Clock
    gates: Gates | None = None
    faults: deque[Fault] = attrs.field(factory=lambda: deque(maxlen=FAULTS_KEPT))
    _nursery: trio.Nursery | None = None
    _pending: deque[events.Event] = attrs.field(factory=deque)
    _stepping: bool = False
    _closing: bool = False
    _waiters: dict[str, deque[_Waiter]] = attrs.field(factory=dict)
    _lanes: dict[Lane, deque[tuple[orders.HostOrder, CommitLike]]] = attrs.field(factory=dict)
    _armed_ms: Millis | None = None  # what the timer task sleeps for
    _rearm: trio.Event = attrs.field(factory=trio.Event)
    _fed: trio.Event = attrs.field(factory=trio.Event)  # set with the first event, which begins the session
    _tick_pause_s: float = 0.0
    _moved: trio.Event = attrs.field(factory=trio.Event)
    _rest: trio.Event = attrs.field(factory=trio.Event)
    _errands: Errands = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._errands = Errands(hosts=self.hosts, clock=self.clock, feed=self.feed)

    # --- facts in --------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        """Tell the world a fact. Fed from inside a step, it is taken right after that step."""
        self._fed.set()
        self._pending.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._pending:
                self._step(self._pending.popleft())
        finally:
            self._stepping = False

    async def submit(self, event: CommandEvent) -> orders.Receipt:
        """Tell the world an operator's command and wait for its answer, which is durable when it comes.

        Raises: Refusal with the world's code and figures; Failure `internal` when the world or the store broke;
        `unavailable` when the driver has ended, or as Lost when it ends first: the command may have been taken.
        """
        if self._closing:
            raise Refusal("unavailable", "the role is stopping; ask again when it is back")
        waiter = _Waiter()
        self._waiters.setdefault(event.command.key, deque()).append(waiter)
        try:
            self.feed(event)
            await waiter.done.wait()
        finally:
            self._forget(event.command.key, waiter)
        if waiter.error is not None:
            raise waiter.error
        assert waiter.receipt is not None
        return waiter.receipt

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Perform orders and keep time until cancelled. Ends with Failure when the store cannot be written."""
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                await self._keep_time()
        finally:
            self._closing = True
            for key in list(self._waiters):
                for _ in range(len(self._waiters[key])):
                    self._settle(key, None, Lost("unavailable", "the role stopped before it could answer; ask again"))

    def close(self) -> None:
        """Start nothing on hosts any more; facts are still taken and stored."""
        self._closing = True

    async def moved(self) -> None:
        """Return once some machine has moved: look again then."""
        await self._moved.wait()

    async def rested(self) -> None:
        """Return once no order to a host is being performed."""
        while self._lanes:
            await self._rest.wait()

    # --- one step --------------------------------------------------------------------------------

    def _step(self, event: events.Event) -> None:
        try:
            step = self.world.handle(event)
        except Exception as wrong:  # InvariantBroken, or a slip that amounts to one: stopping here beats guessing
            self._broken(event, wrong)
            return
        if isinstance(event, events.Ticked):
            self._tick_pause_s = 0.0
        for move in step.moves:
            self._say(move, step.orders)
        if step.moves:
            self._moved.set()
            self._moved = trio.Event()
        waits = [order for order in step.orders if not isinstance(order, orders.RouterOrder)]
        commit = self.store.append(event, step.changed, event.now_ms, waited=bool(waits))
        for to_router in _last_words_last(step.orders):
            if isinstance(to_router, orders.Abort):
                self._begin_abort(to_router)
                continue
            assert self.gates is not None
            self.gates.perform(to_router)
        for order in waits:
            self._start(order, commit)
        due = self.world.next_due_ms
        if due is not None and (self._armed_ms is None or due < self._armed_ms):
            self._rearm.set()

    def _start(self, order: orders.Order, commit: CommitLike) -> None:
        if self._closing or self._nursery is None:
            return  # the next start finds an armed order without an outcome, and treats it as lost
        match order:
            case orders.Reply():
                self._nursery.start_soon(self._answer, order, commit)
            case orders.ConfirmStored():
                self._nursery.start_soon(self._confirm, order, commit)
            case orders.HostOrder():
                lane = order.incarnation.lane
                if lane in self._lanes:
                    self._lanes[lane].append((order, commit))
                else:
                    self._lanes[lane] = deque([(order, commit)])
                    self._nursery.start_soon(self._work, lane)
            case _ if isinstance(order, Errand):
                self._nursery.start_soon(self._errands.run, order, commit)
            case _:
                raise InvariantBroken(f"nobody performs {type(order).__name__}")

    def _broken(self, event: events.Event, wrong: Exception) -> None:
        commit = self.store.append(event, (), event.now_ms, waited=False)
        name = type(event).__name__
        fault = Fault(at_ms=event.now_ms, seq=commit.seq, event=name, reason=f"{type(wrong).__name__}: {wrong}")
        self.faults.append(fault)
        log.failed("world.broken", wrong, event=name, seq=commit.seq, reason=fault.reason)
        match event:
            case events.Ticked():  # its deadline stays due: look again, but not at once and not for ever at full speed
                self._tick_pause_s = min(max(2 * self._tick_pause_s, TICK_PAUSE_S), TICK_PAUSE_MAX_S)
            case events.RequestArrived() | events.RequestFact():
                if self.gates is not None:
                    self.gates.fault(event.request)
            case (
                events.DeployAsked()
                | events.StartAsked()
                | events.PreinitializeAsked()
                | events.StopAsked()
                | events.ParkAsked()
                | events.DeleteAsked()
                | events.DrainAsked()
            ):
                error = Failure("internal", f"a fault of CapyCTL's own; see the log at journal position {commit.seq}")
                self._settle(event.command.key, None, error)
            case _:
                pass

    @staticmethod
    def _say(move: Move, given: tuple[orders.Order, ...]) -> None:
        say = log.debug if move.machine == "request" else log.info
        names = [type(order).__name__ for order in given if order.lane is not None and str(order.lane) == move.lane]
        say(
            "machine.moved",
            machine=move.machine,
            lane=move.lane,
            was=move.was,
            event=move.event,
            now=move.now,
            orders=names,
            **({} if move.deployment is None else {"deployment": move.deployment}),
            **({"why": move.why} if move.why else {}),
        )

    # --- deeds -----------------------------------------------------------------------------------

    def _begin_abort(self, order: orders.Abort) -> None:
        """Ask the engine at once, in the background: the request's places are waited for, and no disk is needed."""
        if self._closing or self._nursery is None:
            self.feed(self._errands.unanswered(order))
        else:
            self._nursery.start_soon(self._errands.abort, order)

    async def _answer(self, order: orders.Reply, commit: CommitLike) -> None:
        try:
            await commit.durable()
        except Failure as failed:
            self._settle(order.key, None, failed)  # the store says why; nobody else could
            raise
        if order.code is None:
            self._settle(order.key, order.receipt, None)
        else:
            self._settle(order.key, None, Refusal(order.code, order.message, details=order.details))

    def _settle(self, key: str, receipt: orders.Receipt | None, error: CapyError | None) -> None:
        queue = self._waiters.get(key)
        if queue:  # else the caller has gone; its receipt is kept for when it asks again
            waiter = queue.popleft()
            waiter.receipt, waiter.error = receipt, error
            waiter.done.set()

    def _forget(self, key: str, waiter: _Waiter) -> None:
        queue = self._waiters.get(key)
        if queue is not None:
            if waiter in queue:
                queue.remove(waiter)
            if not queue:
                del self._waiters[key]

    async def _confirm(self, order: orders.ConfirmStored, commit: CommitLike) -> None:
        await commit.durable()
        self.feed(events.ReadyStored(incarnation=order.incarnation, now_ms=self.clock()))

    async def _work(self, lane: Lane) -> None:
        """Perform what was ordered on one lane, one at a time."""
        queue = self._lanes[lane]
        try:
            while queue:
                await self._perform(*queue[0])
                queue.popleft()
        finally:
            del self._lanes[lane]
            self._rest.set()
            self._rest = trio.Event()

    async def _perform(self, order: orders.HostOrder, commit: CommitLike) -> None:
        """Send it once; whatever happens, it has exactly one outcome."""
        outcome: events.Event | None = None
        reason = "interrupted"
        try:
            await commit.durable()
            outcome = await self.hosts.perform(order)
        except trio.Cancelled:
            self._closing = True  # nobody cancels one order: the driver ends, and begins nothing more
            raise
        except Failure as failed:
            self._closing = True  # the store cannot be written, so the order was not sent, nor will be another
            reason = f"the store cannot be written: {failed.message}"
            raise
        except Exception as wrong:
            reason = f"{type(wrong).__name__}: {wrong}"
            log.failed("order.broken", wrong, order=type(order).__name__, lane=order.lane, token=order.token)
        finally:
            if outcome is None:
                outcome = events.OrderLost(
                    incarnation=order.incarnation, token=order.token, reason=reason, now_ms=self.clock()
                )
            self.feed(outcome)

    # --- time ------------------------------------------------------------------------------------

    async def _keep_time(self) -> None:
        """Feed Ticked whenever the world's next deadline has come; after a broken tick, only after a pause.

        Not before the first event: a world that was just loaded has deadlines of before, and must hear that its
        controller was restarted before it acts on one.
        """
        await self._fed.wait()
        while True:
            if self._tick_pause_s > 0:
                await trio.sleep(self._tick_pause_s)
            self._rearm = trio.Event()
            due = self._armed_ms = self.world.next_due_ms
            if due is None:
                await self._rearm.wait()
            elif (left_ms := due - self.clock()) > 0:
                with trio.move_on_after(left_ms / 1000):
                    await self._rearm.wait()
            else:
                self.feed(events.Ticked(now_ms=self.clock()))
                if self.world.next_due_ms == due:  # it did not let go of that deadline: do not spin on it
                    self._tick_pause_s = self._tick_pause_s or SPIN_PAUSE_S
                await trio.lowlevel.checkpoint()


def _last_words_last(given: Sequence[orders.Order]) -> list[orders.RouterOrder]:
    """The router's orders of one step, which come in no order: a request is let go of after all else about it."""
    mine = [order for order in given if isinstance(order, orders.RouterOrder)]
    return sorted(mine, key=lambda order: isinstance(order, orders.Settled)) if len(mine) > 1 else mine
