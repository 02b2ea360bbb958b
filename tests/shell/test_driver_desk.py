"""Tickets over the driver: refused at once, placed, cut, settled, and never left behind."""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.testing

from capyctl.control import events, orders
from capyctl.control.records import DeploymentRow
from capyctl.control.spec import Spec, Traits
from capyctl.control.world import World
from capyctl.errors import CapyError, Refusal
from capyctl.fsm import deployment
from capyctl.fsm import request as m
from capyctl.fsm.types import DeploymentId, Generation, Incarnation, Lane, Millis, RequestId
from capyctl.router.desk import Arrival, Place
from capyctl.server.desk import Desk

RUN = Incarnation(Lane(DeploymentId("D"), 0), Generation(1))


class Scripted:
    """Feeds nothing but what the test lets the world order."""

    def __init__(self) -> None:
        self.seen: list[events.Event] = []
        self.answers: dict[type, list[orders.RouterOrder]] = {}
        self.records: list[object] = []
        self.desk = Desk(
            book=World.load([], now_ms=0).book,
            clock=lambda: 1_000,
            queued=lambda request: ("starting", 2),
            record=self.records.append,
            feed=self.feed,
        )
        self.desk.book.deployments[DeploymentId("D")] = DeploymentRow(
            state=deployment.State(deployment=DeploymentId("D"), revision=1),
            spec=Spec(name="d", routes=("m",), profile="p", traits=Traits(family="p"), document="{}"),
            created_at_ms=0,
        )

    def feed(self, event: events.Event) -> None:
        self.seen.append(event)
        for order in self.answers.get(type(event), []):
            self.desk.perform(order)

    def on(self, kind: type, *given: orders.RouterOrder) -> None:
        self.answers[kind] = list(given)


@pytest.fixture
def world() -> Scripted:
    return Scripted()


def arrival(request: str = "R") -> Arrival:
    return Arrival(request=request, route="m", api="chat", stream=False, body_bytes=3)


ADMIT = orders.Admit(request="R", incarnation=RUN, host="H", deadline_ms=9_000)


def settled(outcome: str, deployment: str | None = "D") -> orders.Settled:
    return orders.Settled(request="R", outcome=outcome, deployment=deployment, incarnation=RUN)


def test_a_refusal_on_arrival_is_raised_with_its_wait(world):
    world.on(
        events.RequestArrived,
        orders.Answer(request="R", code="queue_full", message="64 wait", retry_after_s=1),
        settled("refused", None),
    )
    with pytest.raises(Refusal) as refused:
        world.desk.arrive(arrival())
    assert (refused.value.code, refused.value.details) == ("queue_full", {"retry_after_s": 1})
    assert world.desk._tickets == {}
    assert world.records == []


@pytest.mark.parametrize(
    ("route", "allowed", "counted"),
    [("m", None, "d"), ("m", frozenset({"d"}), "d"), ("m", frozenset({"other"}), ""), ("nothing", None, "")],
)
def test_a_request_that_was_turned_away_is_counted_for_the_model_that_it_named(world, route, allowed, counted):
    world.desk.book.routes["m"] = DeploymentId("D")
    world.on(
        events.RequestArrived,
        orders.Answer(request="R", code="activation_failed", message="the last start failed", retry_after_s=30),
        settled("refused", None),
    )
    with pytest.raises(Refusal):
        world.desk.arrive(attrs.evolve(arrival(), route=route, allowed=allowed))
    assert dict(world.desk.outcomes) == {(counted, "refused"): 1}
    assert world.records == []


async def test_a_place_given_on_arrival_needs_no_wait(world):
    world.on(events.RequestArrived, ADMIT)
    ticket = world.desk.arrive(arrival())
    place = await ticket.place()
    assert (place.incarnation, place.served_name, place.left_ms) == (RUN, "m", 8_000)


@pytest.mark.parametrize("by_id", [True, False])
async def test_the_engine_is_told_the_id_exactly_of_what_it_will_be_asked_to_end_by_it(world, by_id):
    state = m.State(request=RequestId("R"), stream=False, arrived_at_ms=Millis(1), deadline_ms=Millis(9_000))
    traits = m.EngineTraits(abort_by_id=by_id)
    world.desk.book.requests[RequestId("R")] = attrs.evolve(state, traits=traits)
    world.on(events.RequestArrived, ADMIT)
    ticket = world.desk.arrive(attrs.evolve(arrival(), nameable=True))
    assert world.seen[0].nameable
    assert (await ticket.place()).named == by_id


async def test_whoever_waits_is_woken_by_a_place_or_by_a_refusal(autojump_clock, world):
    for request, order in (
        ("R", ADMIT),
        ("S", orders.Answer(request="S", code="activation_failed", message="exit 1", retry_after_s=30)),
    ):
        ticket = world.desk.arrive(arrival(request))
        found: list[object] = []

        async def wait(ticket=ticket, found=found):
            try:
                found.append(await ticket.place())
            except CapyError as error:
                found.append(error.code)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            world.desk.perform(order)
        assert found == ["activation_failed"] if request == "S" else isinstance(found[0], Place)


async def test_after_a_closed_door_another_place_is_waited_for(autojump_clock, world):
    world.on(events.RequestArrived, ADMIT)
    ticket = world.desk.arrive(arrival())
    await ticket.place()
    ticket.not_accepted("the gate is closed")
    with trio.move_on_after(1) as patience:
        await ticket.place()
    assert patience.cancelled_caught
    world.desk.perform(ADMIT)
    await ticket.place()


async def test_a_cut_ends_the_relay_and_whoever_still_waits(autojump_clock, world):
    ticket = world.desk.arrive(arrival())
    world.desk.perform(orders.Cut(request="R", code="unavailable", message="the engine ended"))
    assert ticket.cut.is_set()
    assert ticket.cut_error == ("unavailable", "the engine ended")
    with pytest.raises(Refusal, match="the engine ended"):
        await ticket.place()


def test_what_the_router_tells_is_fed_as_facts(world):
    ticket = world.desk.arrive(arrival())
    ticket.sent()
    ticket.first_output()
    ticket.finished()
    ticket.rejected(400)
    ticket.errored("500")
    ticket.upstream_lost("reset")
    ticket.client_gone("hung up")
    world.desk.upstream_ended("R", 1, 2)
    assert [type(event).__name__ for event in world.seen] == [
        "RequestArrived",
        "RequestSent",
        "FirstOutput",
        "RequestFinished",
        "EngineRejected",
        "EngineErrored",
        "UpstreamLost",
        "ClientGone",
        "UpstreamEnded",
    ]
    assert {event.now_ms for event in world.seen} == {1_000}


def test_a_settled_request_is_recorded_counted_and_forgotten(world):
    world.desk.arrive(arrival())
    world.desk.perform(settled("ok"))
    (record,) = world.records
    assert (record.request, record.outcome, record.incarnation) == ("R", "ok", "D/0@1")
    assert world.desk.outcomes["d", "ok"] == 1
    assert world.desk._tickets == {}


async def test_a_request_that_broke_the_world_is_told_internal_and_let_go(world):
    ticket = world.desk.arrive(arrival())
    world.desk.fault("R")
    with pytest.raises(Refusal) as refused:
        await ticket.place()
    assert refused.value.code == "internal"
    assert world.desk._tickets == {}
    world.desk.fault("R")  # twice harms nobody


def test_orders_about_requests_that_nobody_holds_any_more_are_harmless(world):
    for order in (ADMIT, orders.Cut(request="R", code="unavailable", message="x"), settled("cut")):
        world.desk.perform(order)
    assert [record.outcome for record in world.records] == ["cut"]
