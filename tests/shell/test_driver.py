"""The driver with a scripted world and a store in memory, on trio's clock."""

from __future__ import annotations

import random
from collections import defaultdict

import attrs
import pytest
import trio
import trio.testing

from capyctl.control import events, orders
from capyctl.control.records import Counter, Move, Record
from capyctl.errors import Failure, InvariantBroken, Lost, Refusal
from capyctl.fsm.proofs import Aborted
from capyctl.fsm.types import DeploymentId, Generation, Incarnation, Lane
from capyctl.server.driver import Driver

START_MS = 1_000_000


def incarnation(name: str = "D", index: int = 0) -> Incarnation:
    return Incarnation(Lane(DeploymentId(name), index), Generation(1))


def wait_idle(token: int, name: str = "D") -> orders.AwaitIdle:
    return orders.AwaitIdle(incarnation=incarnation(name), token=token, host="H", limit_ms=1)


@attrs.frozen(kw_only=True)
class Step:
    orders: tuple = ()
    changed: tuple = ()
    moves: tuple = ()


class World:
    """Answers each kind of event as it was told, and remembers what it saw."""

    def __init__(self) -> None:
        self.script = defaultdict(list)
        self.seen: list[events.Event] = []
        self.next_due_ms: int | None = None

    def on(self, kind: type, *given: orders.Order, **more) -> None:
        self.script[kind].append(Step(orders=given, changed=(row(len(self.seen)),), **more))

    def handle(self, event: events.Event) -> Step:
        self.seen.append(event)
        told = self.script[type(event)]
        found = told.pop(0) if told else Step()
        if isinstance(found, Exception):
            raise found
        return found

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.seen]


def row(value: int) -> Record:
    return Record(kind="counter", key="n", value=Counter(value=value))


class Commit:
    def __init__(self, seq: int) -> None:
        self.seq, self.done, self.failed = seq, trio.Event(), False

    async def durable(self) -> None:
        await self.done.wait()
        if self.failed:
            raise Failure("internal", "the disk is full")


class Store:
    """Keeps commits back until they are let go, when `held`."""

    def __init__(self) -> None:
        self.commits: list[Commit] = []
        self.appended: list[events.Event | None] = []
        self.held = False

    def append(self, event, changed, now_ms, *, waited) -> Commit:
        commit = Commit(len(self.commits) + 1)
        self.commits.append(commit)
        self.appended.append(event)
        if not self.held:
            commit.done.set()
        return commit

    def release(self, *, failed: bool = False) -> None:
        for commit in self.commits:
            commit.failed = failed
            commit.done.set()


class Hosts:
    """Performs each order in `takes_s`, and keeps a diary of begins and ends."""

    def __init__(self) -> None:
        self.diary: list[str] = []
        self.takes_s = 1.0
        self.fetch_s = 0.0
        self.unfetched: events.Event | None = None
        self.raises: Exception | None = None

    async def perform(self, order: orders.HostOrder) -> events.Event:
        self.diary.append(f"begin {order.lane} {order.token}")
        await trio.sleep(self.takes_s)
        if self.raises is not None:
            raise self.raises
        self.diary.append(f"end {order.lane} {order.token}")
        return events.IdleGateEnded(incarnation=order.incarnation, token=order.token, verdict="idle", now_ms=now())

    async def fetch(self, order: orders.Measure) -> events.Event | None:
        await trio.sleep(self.fetch_s)
        return self.unfetched

    async def stop_fetching(self, order: orders.StopFetching) -> None:
        self.diary.append(f"stop fetching {order.deployment}")

    async def measure(self, order: orders.Measure) -> events.Event:
        self.diary.append(f"measure {order.revision}")
        await trio.sleep(self.takes_s)
        if self.raises is not None:
            raise self.raises
        return events.RevisionResolved(
            deployment=order.deployment, revision=order.revision, digest="d", weight_bytes=1, plans={}, now_ms=now()
        )

    async def prune_logs(self, order: orders.PruneLogs) -> None:
        self.diary.append(f"prune {order.host}")
        if self.raises is not None:
            raise self.raises

    async def read_load(self, order: orders.ReadLoad) -> None:
        self.diary.append(f"read {order.incarnation.lane}")

    async def read_memory(self, order: orders.ReadMemory) -> None:
        self.diary.append(f"look {order.host}")

    async def verify(self, order: orders.VerifyStart) -> events.Event:
        self.diary.append(f"verify {order.digest}")
        if self.raises is not None:
            raise self.raises
        return verified(order)

    async def abort(self, order: orders.Abort) -> events.Event:
        self.diary.append(f"abort {order.request}")
        await trio.sleep(self.takes_s)
        if self.raises is not None:
            raise self.raises
        return events.AbortAcknowledged(request=order.request, proof=ENDED, now_ms=now())


def verified(order: orders.VerifyStart, **more) -> events.StartVerified:
    asked = {"deployment": order.deployment, "revision": order.revision, "digest": order.digest, "host": order.host}
    return events.StartVerified(now_ms=now(), **asked, **more)


class Gates:
    def __init__(self) -> None:
        self.performed: list[orders.RouterOrder] = []
        self.faults: list[str] = []

    def perform(self, order: orders.RouterOrder) -> None:
        self.performed.append(order)

    def fault(self, request: str) -> None:
        self.faults.append(request)


def now() -> int:
    return START_MS + round(trio.current_time() * 1000)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


@pytest.fixture
def gates() -> Gates:
    return Gates()


@pytest.fixture
async def driver(autojump_clock, world, store, hosts, gates, nursery) -> Driver:
    made = Driver(world=world, store=store, hosts=hosts, clock=now, gates=gates)
    await nursery.start(made.run)
    return made


def stop_asked(key: str = "k") -> events.StopAsked:
    command = events.Command(key=key, digest="x", operation="O", switch="S")
    return events.StopAsked(command=command, deployment="D", now_ms=now())


def ticked() -> events.Ticked:
    return events.Ticked(now_ms=now())


def arrived() -> events.RequestArrived:
    return events.RequestArrived(request="R", route="m", api="chat", stream=False, body_bytes=1, now_ms=now())


async def quiet() -> None:
    await trio.testing.wait_all_tasks_blocked()


# --- aborts -----------------------------------------------------------------------------------------

ENDED = Aborted(incarnation=incarnation(), request="R", acknowledged_at_ms=1)
ABORT = orders.Abort(request="R", incarnation=incarnation(), host="H")


async def test_an_abort_goes_out_before_the_disk_and_its_answer_is_a_fact(
    autojump_clock, driver, world, store, hosts, gates
):
    store.held = True
    world.on(events.RequestArrived, ABORT)
    driver.feed(arrived())
    await quiet()
    await trio.sleep(2)
    assert hosts.diary == ["abort R"]
    assert gates.performed == []
    assert world.seen[-1] == events.AbortAcknowledged(request="R", proof=ENDED, now_ms=START_MS + 1_000)


async def test_an_abort_that_breaks_is_an_unanswered_one(autojump_clock, driver, world, hosts):
    hosts.raises = RuntimeError("a slip")
    world.on(events.RequestArrived, ABORT)
    driver.feed(arrived())
    await trio.sleep(2)
    assert isinstance(world.seen[-1], events.AbortUnanswered)


async def test_a_driver_that_ends_asks_no_engine_to_end_a_request(autojump_clock, driver, world, hosts):
    driver.close()
    world.on(events.RequestArrived, ABORT)
    driver.feed(arrived())
    await quiet()
    assert hosts.diary == []
    assert isinstance(world.seen[-1], events.AbortUnanswered)


# --- effects wait for the commit -------------------------------------------------------------------


async def test_a_host_order_waits_for_the_disk_and_a_router_order_does_not(
    autojump_clock, driver, world, store, hosts, gates
):
    store.held = True
    answer = orders.Answer(request="R", code="unavailable", message="later")
    world.on(events.ControllerStarted, wait_idle(1), answer)
    driver.feed(events.ControllerStarted(session=1, now_ms=now()))
    assert gates.performed == [answer]
    await quiet()
    assert hosts.diary == []
    store.release()
    await quiet()
    assert hosts.diary == ["begin D/0 1"]


async def test_a_reply_waits_for_the_disk_and_reaches_its_asker(autojump_clock, driver, world, store, nursery):
    store.held = True
    receipt = orders.Receipt(operation="O", deployment="D", revision=2)
    world.on(events.StopAsked, orders.Reply(key="k", receipt=receipt))
    answered = []

    async def ask():
        answered.append(await driver.submit(stop_asked()))

    nursery.start_soon(ask)
    await quiet()
    assert answered == []
    store.release()
    await quiet()
    assert answered == [receipt]


async def test_a_refusal_carries_the_worlds_code_and_figures(autojump_clock, driver, world):
    world.on(
        events.StopAsked,
        orders.Reply(key="k", code="revision_conflict", message="it is at 7", details={"expected": "6", "actual": "7"}),
    )
    with pytest.raises(Refusal) as refused:
        await driver.submit(stop_asked())
    assert (refused.value.code, refused.value.details["actual"]) == ("revision_conflict", "7")


async def test_two_callers_with_one_key_are_both_answered(autojump_clock, driver, world):
    receipt = orders.Receipt(operation="O", deployment="D", revision=2)
    answers = []
    for _ in range(2):
        world.on(events.StopAsked, orders.Reply(key="k", receipt=receipt))

    async def ask():
        answers.append(await driver.submit(stop_asked()))

    async with trio.open_nursery() as both:
        both.start_soon(ask)
        both.start_soon(ask)
    assert answers == [receipt, receipt]


async def test_a_caller_that_left_does_not_take_the_next_ones_answer(autojump_clock, driver, world, store, nursery):
    store.held = True
    world.on(events.StopAsked, orders.Reply(key="k", receipt=orders.Receipt(operation="A", deployment="D", revision=1)))
    with trio.move_on_after(1):
        await driver.submit(stop_asked())
    store.release()
    store.held = False
    await quiet()
    world.on(events.StopAsked, orders.Reply(key="k", receipt=orders.Receipt(operation="B", deployment="D", revision=1)))
    assert (await driver.submit(stop_asked())).operation == "B"


async def test_a_caller_whose_driver_ends_first_knows_that_nobody_knows(autojump_clock, world, store, hosts, gates):
    driver = Driver(world=world, store=store, hosts=hosts, clock=now, gates=gates)
    store.held = True
    world.on(events.StopAsked, orders.Reply(key="k", receipt=orders.Receipt(operation="A", deployment="D", revision=1)))
    async with trio.open_nursery() as callers:

        async def ask():
            with pytest.raises(Lost):
                await driver.submit(stop_asked())

        async with trio.open_nursery() as nursery:
            await nursery.start(driver.run)
            callers.start_soon(ask)
            await quiet()
            nursery.cancel_scope.cancel()


async def test_ready_is_confirmed_when_it_is_stored_and_not_before(autojump_clock, driver, world, store):
    store.held = True
    world.on(events.LaunchReady, orders.ConfirmStored(incarnation=incarnation()))
    driver.feed(ready())
    await quiet()
    assert world.kinds() == ["LaunchReady"]
    store.release()
    await quiet()
    assert world.kinds() == ["LaunchReady", "ReadyStored"]


def ready() -> events.LaunchReady:
    from capyctl.fsm.proofs import Usable

    usable = Usable(incarnation=incarnation(), answer_chars=1, probed_at_ms=1)
    return events.LaunchReady(incarnation=incarnation(), token=1, processes=(), usable=usable, now_ms=now())


# --- lanes and outcomes ----------------------------------------------------------------------------


async def test_a_lane_does_one_thing_at_a_time_and_waits_for_no_other(autojump_clock, driver, world, hosts):
    world.on(events.ControllerStarted, wait_idle(1), wait_idle(2), wait_idle(3, "E"))
    driver.feed(events.ControllerStarted(session=1, now_ms=now()))
    await trio.sleep(5)
    assert [line for line in hosts.diary if "D/0" in line] == ["begin D/0 1", "end D/0 1", "begin D/0 2", "end D/0 2"]
    assert hosts.diary.index("begin E/0 3") < hosts.diary.index("end D/0 1")


async def test_many_orders_on_few_lanes_each_have_one_outcome(autojump_clock, driver, world, hosts):
    chance = random.Random(7)
    given = [wait_idle(token, chance.choice("ABC")) for token in range(60)]
    hosts.takes_s = 0.01
    for order in given:
        world.on(events.ControllerStarted, order)
        driver.feed(events.ControllerStarted(session=1, now_ms=now()))
        if chance.random() < 0.3:
            await trio.sleep(0.02)
    await trio.sleep(10)
    outcomes = [event.token for event in world.seen if isinstance(event, events.Outcome)]
    assert sorted(outcomes) == list(range(60))
    running = 0
    for line in (line for line in hosts.diary if " A/0 " in line):
        running += 1 if line.startswith("begin") else -1
        assert running in (0, 1)


async def test_an_order_given_by_an_outcome_goes_to_the_same_lane_next(autojump_clock, driver, world, hosts):
    world.on(events.ControllerStarted, wait_idle(1))
    world.on(events.IdleGateEnded, wait_idle(2))
    driver.feed(events.ControllerStarted(session=1, now_ms=now()))
    await trio.sleep(5)
    assert hosts.diary == ["begin D/0 1", "end D/0 1", "begin D/0 2", "end D/0 2"]


async def test_an_order_that_is_cancelled_is_lost_and_nothing_is_begun_after_it(
    autojump_clock, world, store, hosts, gates
):
    driver = Driver(world=world, store=store, hosts=hosts, clock=now, gates=gates)
    world.on(events.ControllerStarted, wait_idle(1))
    for token in range(2, 9):
        world.on(events.OrderLost, wait_idle(token))
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        driver.feed(events.ControllerStarted(session=1, now_ms=now()))
        await trio.sleep(0.5)
        nursery.cancel_scope.cancel()
    assert hosts.diary == ["begin D/0 1"]
    assert [(type(event), event.token, event.reason) for event in world.seen[1:]] == [
        (events.OrderLost, 1, "interrupted")
    ]


async def test_a_fault_while_performing_is_an_order_nobody_knows_about(autojump_clock, driver, world, hosts):
    hosts.raises = ValueError("a slip")
    world.on(events.ControllerStarted, wait_idle(1))
    driver.feed(events.ControllerStarted(session=1, now_ms=now()))
    await trio.sleep(5)
    assert isinstance(world.seen[-1], events.OrderLost)
    assert world.seen[-1].reason == "ValueError: a slip"
    hosts.raises = None
    world.on(events.ControllerStarted, wait_idle(2))
    driver.feed(events.ControllerStarted(session=1, now_ms=now()))
    await trio.sleep(5)
    assert hosts.diary[-1] == "end D/0 2"


async def test_a_store_that_cannot_be_written_ends_the_driver_before_anything_is_sent(
    autojump_clock, world, store, hosts, gates
):
    driver = Driver(world=world, store=store, hosts=hosts, clock=now, gates=gates)
    store.held = True
    world.on(events.ControllerStarted, wait_idle(1), wait_idle(2))
    with pytest.RaisesGroup(Failure, allow_unwrapped=True, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(driver.run)
            driver.feed(events.ControllerStarted(session=1, now_ms=now()))
            await quiet()
            store.release(failed=True)
            await trio.sleep_forever()
    assert hosts.diary == []


async def test_whoever_waits_for_an_answer_hears_why_the_store_could_not_keep_it(
    autojump_clock, world, store, hosts, gates
):
    driver = Driver(world=world, store=store, hosts=hosts, clock=now, gates=gates)
    store.held = True
    world.on(events.StopAsked, orders.Reply(key="k", code="x", message="x"))
    told: list[str] = []

    async def ask() -> None:
        with pytest.raises(Failure) as failed:
            await driver.submit(stop_asked())
        told.append(failed.value.message)

    with pytest.RaisesGroup(Failure, allow_unwrapped=True, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(driver.run)
            async with trio.open_nursery() as asking:
                asking.start_soon(ask)
                await quiet()
                store.release(failed=True)
            assert told == ["the disk is full"]
            await trio.sleep_forever()
    with pytest.raises(Refusal, match="stopping"):
        await driver.submit(stop_asked())


async def test_a_measurement_that_breaks_makes_the_revision_unusable_not_the_role(autojump_clock, driver, world, hosts):
    hosts.raises = RuntimeError("no")
    world.on(events.ControllerStarted, orders.Measure(deployment="D", revision=3))
    driver.feed(events.ControllerStarted(session=1, now_ms=now()))
    await trio.sleep(5)
    last = world.seen[-1]
    assert isinstance(last, events.RevisionUnusable)
    assert (last.deployment, last.revision, last.code) == ("D", 3, "internal")


async def test_at_most_two_checkpoints_are_measured_at_a_time(autojump_clock, driver, world, hosts):
    world.on(events.ControllerStarted, *(orders.Measure(deployment="D", revision=n) for n in range(3)))
    driver.feed(events.ControllerStarted(session=1, now_ms=now()))
    await trio.sleep(0.5)
    assert len(hosts.diary) == 2
    await trio.sleep(5)
    assert world.kinds().count("RevisionResolved") == 3


async def test_models_that_are_downloaded_keep_nobody_from_being_measured(autojump_clock, driver, world, hosts):
    hosts.fetch_s = 3600
    world.on(events.ControllerStarted, *(orders.Measure(deployment="D", revision=n) for n in range(3)))
    driver.feed(events.ControllerStarted(session=1, now_ms=now()))
    await quiet()
    hosts.fetch_s = 0.0
    world.on(events.Ticked, orders.Measure(deployment="E", revision=9))
    driver.feed(events.Ticked(now_ms=now()))
    await trio.sleep(5)
    assert hosts.diary == ["measure 9"]
    await trio.sleep(3600)
    assert len(hosts.diary) == 4


async def test_a_model_that_cannot_be_fetched_is_not_measured(autojump_clock, driver, world, hosts):
    hosts.unfetched = events.RevisionUnusable(
        deployment="D", revision=3, code="unauthorized", reason="its Hub says no", now_ms=now()
    )
    world.on(events.ControllerStarted, orders.Measure(deployment="D", revision=3), orders.StopFetching(deployment="E"))
    driver.feed(events.ControllerStarted(session=1, now_ms=now()))
    await trio.sleep(1)
    assert world.seen[-1] is hosts.unfetched
    assert hosts.diary == ["stop fetching E"]


async def test_a_request_is_let_go_of_after_everything_else_that_concerns_it(autojump_clock, driver, world, gates):
    settled = orders.Settled(request="R", outcome="refused", deployment=None, incarnation=None)
    answer = orders.Answer(request="R", code="not_found", message="no such model")
    world.on(events.RequestArrived, settled, answer)
    driver.feed(arrived())
    assert gates.performed == [answer, settled]


# --- one at a time, and time -----------------------------------------------------------------------


async def test_an_event_fed_from_inside_a_step_is_taken_right_after_it(autojump_clock, driver, world, gates):
    def perform(order: orders.RouterOrder) -> None:
        gates.performed.append(order)
        driver.feed(ticked())
        assert world.kinds()[-1] == "RequestArrived"  # not yet

    gates.perform = perform
    world.on(events.RequestArrived, orders.Answer(request="R", code="unavailable", message=""))
    driver.feed(arrived())
    assert world.kinds() == ["RequestArrived", "Ticked"]


async def test_the_world_hears_the_time_when_its_deadline_comes_and_only_then(autojump_clock, driver, world):
    begin_ms = now()
    world.next_due_ms = begin_ms + 5_000
    driver.feed(arrived())
    await trio.sleep(4.9)
    assert world.kinds() == ["RequestArrived"]
    world.on(events.Ticked)
    await trio.sleep(0.2)
    assert world.kinds()[1] == "Ticked"
    assert begin_ms + 5_000 <= world.seen[1].now_ms <= begin_ms + 5_010


async def test_deadlines_of_before_wait_for_the_event_that_begins_the_session(
    autojump_clock, world, store, hosts, gates, nursery
):
    world.next_due_ms = START_MS - 1_000
    driver = Driver(world, store, hosts, now, gates)
    await nursery.start(driver.run)
    await trio.sleep(5)
    assert world.kinds() == []
    driver.feed(events.ControllerStarted(session=2, now_ms=now()))
    await trio.sleep(0.2)
    assert world.kinds()[:2] == ["ControllerStarted", "Ticked"]
    nursery.cancel_scope.cancel()


async def test_a_nearer_deadline_wakes_the_clock_earlier(autojump_clock, driver, world):
    begin_ms = now()
    world.next_due_ms = begin_ms + 60_000
    driver.feed(arrived())
    await trio.sleep(1)
    world.next_due_ms = begin_ms + 2_000
    driver.feed(arrived())
    await trio.sleep(1.5)
    assert world.kinds()[:3] == ["RequestArrived", "RequestArrived", "Ticked"]


async def test_a_deadline_that_the_world_never_lets_go_of_is_not_spun_on(autojump_clock, driver, world):
    world.next_due_ms = START_MS
    driver.feed(arrived())
    await trio.sleep(10)
    assert world.kinds().count("Ticked") <= 10 / 0.05 + 2


# --- a broken invariant ----------------------------------------------------------------------------


async def test_a_broken_step_is_kept_with_its_journal_place_and_the_role_lives(
    autojump_clock, driver, world, store, gates
):
    world.script[events.RequestArrived].append(InvariantBroken("two owners"))
    driver.feed(arrived())
    assert gates.faults == ["R"]
    (fault,) = driver.faults
    assert (fault.event, fault.seq, fault.reason) == ("RequestArrived", 1, "InvariantBroken: two owners")
    assert len(store.appended) == 1
    driver.feed(arrived())
    assert world.kinds() == ["RequestArrived", "RequestArrived"]


async def test_a_command_that_breaks_the_world_is_answered_internal(autojump_clock, driver, world):
    world.script[events.StopAsked].append(KeyError("D"))
    with pytest.raises(Failure) as failed:
        await driver.submit(stop_asked())
    assert failed.value.code == "internal"
    assert "journal position 1" in failed.value.message


async def test_a_tick_that_breaks_is_tried_again_more_and_more_slowly(autojump_clock, driver, world):
    world.script[events.Ticked] = [InvariantBroken("x") for _ in range(50)]
    world.next_due_ms = START_MS
    driver.feed(arrived())
    await trio.sleep(100)
    assert world.kinds().count("Ticked") <= 8
    assert len(driver.faults) == world.kinds().count("Ticked")


async def test_every_move_is_one_line_that_can_be_searched(autojump_clock, driver, world, caplog):
    import logging

    logging.getLogger("capyctl").propagate = True
    with caplog.at_level("INFO", logger="capyctl"):
        move = Move(
            machine="instance",
            lane="D/0",
            was="ready",
            event="StopAsked",
            now="draining",
            deployment="chat",
            why="pressure for code",
        )
        world.on(events.ControllerStarted, wait_idle(1), moves=(move,))
        driver.feed(events.ControllerStarted(session=1, now_ms=now()))
    (line,) = [record for record in caplog.records if record.message == "machine.moved"]
    assert line.fields == {
        "machine": "instance",
        "lane": "D/0",
        "deployment": "chat",
        "was": "ready",
        "event": "StopAsked",
        "now": "draining",
        "orders": ["AwaitIdle"],
        "why": "pressure for code",
    }


async def test_a_look_whether_a_start_could_begin_is_taken_at_once_and_answered_whatever_breaks(
    autojump_clock, driver, world, store, hosts
):
    order = orders.VerifyStart(deployment="D", revision=3, digest="sha256:1", host="H")
    world.on(events.ControllerStarted, order)
    store.held = True
    hosts.raises = RuntimeError("no")
    driver.feed(events.ControllerStarted(session=1, now_ms=now()))
    await quiet()
    assert hosts.diary == ["verify sha256:1"]
    store.release()
    last = world.seen[-1]
    assert isinstance(last, events.StartVerified)
    assert (last.deployment, last.host, last.looked, last.code) == ("D", "H", False, None)


async def test_logs_that_could_not_be_deleted_are_no_outcome_and_stop_nothing(autojump_clock, driver, world, hosts):
    hosts.raises = RuntimeError("no")
    world.on(events.ControllerStarted, orders.PruneLogs(host="H", kept=("D",), as_of_ms=now()))
    driver.feed(events.ControllerStarted(session=1, now_ms=now()))
    await trio.sleep(1)
    assert hosts.diary == ["prune H"]
    assert world.kinds() == ["ControllerStarted"]
    hosts.raises = None
    world.on(events.Ticked, wait_idle(1))
    driver.feed(events.Ticked(now_ms=now()))
    await trio.sleep(2)
    assert hosts.diary[1:] == ["begin D/0 1", "end D/0 1"]
