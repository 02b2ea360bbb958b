"""What a start that may evict is answered: the first answer names its switch and victims, or says that nobody can."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from simulation import checked
from world import Shell, shell
from world_values import VLLM, Model, policy

from capyctl.control import orders as o
from capyctl.control import views
from capyctl.control.answering import WAITS_MS
from capyctl.fsm import operation
from capyctl.fsm.activation import ActivationPhase
from capyctl.fsm.types import Activation, DeploymentId, Lane, Millis, Residency

DEEP = Model(name="a", traits=VLLM, residency=Residency.DEEP, ready_gib=5, cold_gib=5, parked_gib=0.5)
ONE = (policy("h1", capacity=9, managed=7, parked=2),)
"""Room for one of them beside the other's copy."""


def world(*models: Model, policies: Any = ONE) -> tuple[Shell, list[DeploymentId]]:
    here = checked(shell(5, policies=policies))
    identities = [here.deploy(model) for model in models]
    here.run(4_000)
    return here, identities


def two(**changes: Any) -> tuple[Shell, DeploymentId, DeploymentId]:
    """Two that exclude each other; the first one serves, and nobody uses it."""
    here, (a, b) = world(attrs.evolve(DEEP, **changes), attrs.evolve(DEEP, name="b"))
    here.start(a)
    here.run(30_000, until=lambda: here.lane(a).gate_open)
    here.run(3_000)
    return here, a, b


def answered(here: Shell, key: str, limit_ms: int = 10_000) -> tuple[o.Reply, int]:
    """The answer to a command, and how long it took."""
    began = here.now
    here.run(limit_ms, until=lambda: key in here.replies)
    return here.reply(key), here.now - began


def test_the_first_answer_names_the_switch_and_its_victims_once_the_host_has_looked() -> None:
    here, a, b = two()
    here.look_ms[b] = 2_000
    reply, took = answered(here, here.start(b, evict=True))
    (state,) = here.world.book.switches.values()
    assert reply.receipt is not None
    assert (reply.receipt.switch, reply.receipt.victims) == (state.switch, (str(Lane(a, 0)),))
    assert 2_000 <= took < 2_200
    here.run(30_000, until=lambda: here.lane(b).gate_open)
    assert here.lane(a).is_parked


def test_without_anybody_in_the_way_it_is_answered_at_once() -> None:
    here, (a,) = world(DEEP)
    reply, took = answered(here, here.start(a, evict=True))
    assert reply.receipt is not None
    assert (reply.receipt.switch, took < 100) == (None, True)


def test_a_look_that_takes_long_is_not_waited_for_beyond_the_bound_and_is_named_when_asked_again() -> None:
    here, a, b = two()
    here.look_ms[b] = 7_000
    key = here.start(b, evict=True)
    reply, took = answered(here, key)
    assert reply.receipt is not None
    assert (reply.receipt.switch, reply.receipt.victims) == (None, ())
    assert WAITS_MS <= took < WAITS_MS + 100
    here.run(30_000, until=lambda: here.lane(b).gate_open)
    here.tell(attrs.evolve(here.commands[-1], now_ms=Millis(here.now)))
    here.run(100)
    again = here.reply(key).receipt
    assert again is not None
    assert again.victims == (str(Lane(a, 0)),)


def test_whoever_sends_it_twice_before_it_is_answered_is_answered_twice_and_alike() -> None:
    here, a, b = two()
    here.look_ms[b] = 2_000
    given: list[o.Reply] = []
    before = here.check

    def check(shell_: Shell, memory: Any, event: Any, step: Any) -> None:
        given.extend(order for order in step.orders if isinstance(order, o.Reply))
        assert before is not None
        before(shell_, memory, event, step)

    here.check = check
    here.start(b, evict=True)
    here.run(500)
    here.tell(attrs.evolve(here.commands[-1], now_ms=Millis(here.now)))
    assert given == []
    other_body = attrs.evolve(here.commands[-1].command, digest="another")
    here.tell(attrs.evolve(here.commands[-1], command=other_body, now_ms=Millis(here.now)))
    here.run(3_000)
    conflict, one, other = given
    assert conflict.code == "idempotency_conflict"
    assert one == other
    assert one.receipt is not None
    assert one.receipt.victims == (str(Lane(a, 0)),)


@pytest.mark.parametrize("kept", [{"warm": True}, {"activation": Activation.EXPLICIT}], ids=["warm", "explicit"])
def test_where_nobody_may_give_way_it_is_refused_with_the_figures_and_leaves_no_trace(kept: dict[str, Any]) -> None:
    here, a, b = two(**kept)
    key = here.start(b, evict=True)
    reply, took = answered(here, key)
    assert (reply.code, reply.receipt, took < 100) == ("insufficient_resources", None, True)
    assert "needs 5.0 GiB" in reply.message
    assert "0.0 GiB could be evicted; a (" in reply.message
    assert (here.lane(b).phase, here.lane(b).wish) == (ActivationPhase.STOPPED, None)
    assert here.lane(a).gate_open
    assert not here.world.book.switches
    here.stop(a)
    here.run(30_000, until=lambda: not here.lane(a).has_launch)
    here.tell(attrs.evolve(here.commands[-2], now_ms=Millis(here.now)))  # the same key once more: it is free
    here.run(30_000, until=lambda: here.lane(b).gate_open)
    assert here.reply(key).receipt is not None


@pytest.mark.parametrize("kept", [{"warm": True}, {"activation": Activation.EXPLICIT}], ids=["warm", "explicit"])
def test_a_request_that_only_an_operator_can_make_room_for_is_refused_at_once_with_what_lacks(
    kept: dict[str, Any],
) -> None:
    here, a, b = two(**kept)
    answers = []
    before = here.check

    def check(shell_: Shell, memory: Any, event: Any, step: Any) -> None:
        answers.extend(order for order in step.orders if isinstance(order, o.Answer))
        assert before is not None
        before(shell_, memory, event, step)

    here.check = check
    here.ask("b")
    here.run(100)
    (answer,) = answers
    assert (answer.code, answer.retry_after_s) == ("insufficient_resources", 60)
    assert answer.message == (
        "there is no room for b (it needs 5.0 GiB, 2.0 GiB is free). "
        "What holds the rest gives way for no request: an operator has to make room"
    )
    assert (here.lane(b).phase, here.lane(b).wish) == (ActivationPhase.STOPPED, None)
    why = here.lane(b).run.last_error
    assert why is not None
    assert "stop a (`capyctl stop deployment a`), deploy it without" in why.reason
    here.stop(a)
    here.run(30_000, until=lambda: not here.lane(a).has_launch)
    client = here.ask("b")
    here.run(60_000)
    assert client.told == "ok"


def test_a_request_that_may_get_room_waits_is_told_why_meanwhile_and_at_its_deadline() -> None:
    here, _, b = two()
    (host,) = here.hosts.values()
    host.foreign_bytes = 4 << 30  # a sample is in the way, which may change
    here.run(3_000)
    messages: list[str] = []
    before = here.check

    def check(shell_: Shell, memory: Any, event: Any, step: Any) -> None:
        messages.extend(order.message for order in step.orders if isinstance(order, o.Answer))
        assert before is not None
        before(shell_, memory, event, step)

    here.check = check
    client = here.ask("b")
    here.run(5_000)
    waits = views.waiting(here.world, client.request)
    assert waits is not None
    assert waits[1:] == (1, "there is no room for it (it needs 5.0 GiB, 2.0 GiB is free)")
    here.run(3_600_000, until=lambda: client.told is not None)
    assert client.told == "unavailable"
    assert messages[-1].startswith("the model was not ready within the request's deadline: there is no room for it (")
    assert here.lane(b).wish is None


def test_a_request_waits_for_what_is_kept_while_somebody_stops_it() -> None:
    here, a, _ = two(warm=True)
    running = here.ask("a")
    here.run(100)
    here.stop(a)
    client = here.ask("b")
    here.run(60_000)
    assert (running.told, client.told) == ("ok", "ok")


def test_a_start_that_waits_for_what_is_kept_says_so_and_goes_on_though_its_clients_were_refused() -> None:
    here, a, b = two(warm=True)
    here.start(b)
    here.run(100)
    for _ in range(2):
        client = here.ask("b")
        here.run(100)
        assert client.told == "insufficient_resources"
        waits = here.lane(b).waits_for
        assert waits is not None
        assert "Nobody gives way for it: stop a (`capyctl stop deployment a`)" in waits.reason
    here.stop(a)
    here.run(60_000, until=lambda: here.lane(b).gate_open)
    assert here.lane(b).gate_open


def test_a_start_that_waits_goes_on_though_another_with_evict_joins_it_in_vain() -> None:
    here, a, b = two(warm=True)
    plain = here.start(b)
    here.run(100)
    joined, _ = answered(here, here.start(b, evict=True))
    first = here.reply(plain).receipt
    assert first is not None
    assert joined.receipt is not None
    assert joined.receipt.operation == first.operation
    here.stop(a)
    here.run(60_000, until=lambda: here.lane(b).gate_open)
    assert here.lane(b).gate_open


def test_a_start_that_evicts_nobody_names_who_may_give_way_for_it() -> None:
    here, _, b = two()
    here.start(b)
    here.run(100)
    waits = here.lane(b).waits_for
    assert waits is not None
    assert waits.reason.endswith("Use --evict to let it park a, or send it a request: that makes room by itself.")


def test_a_start_with_evict_that_was_answered_before_its_files_were_measured_is_refused_then() -> None:
    here, a, _ = two(warm=True)
    c = here.deploy(attrs.evolve(DEEP, name="c"))
    key = here.start(c, evict=True)
    here.run(30_000)
    receipt = here.reply(key).receipt
    assert receipt is not None
    ended = here.world.book.operations[receipt.operation]
    assert (ended.phase, ended.code) == (operation.Phase.FAILED, "insufficient_resources")
    assert here.lane(a).gate_open


def test_what_only_a_sample_says_is_believed_at_the_end_of_the_wait() -> None:
    here, _, b = two()
    (host,) = here.hosts.values()
    host.foreign_bytes = 4 << 30
    here.run(3_000)
    reply, took = answered(here, here.start(b, evict=True))
    assert (reply.code, WAITS_MS <= took < WAITS_MS + 100) == ("insufficient_memory", True)


def test_it_is_not_refused_while_something_is_on_its_way_that_may_give_way_at_its_end() -> None:
    here, (a, b) = world(DEEP, attrs.evolve(DEEP, name="b"))
    here.start(a)
    here.run(1_000)
    reply, _ = answered(here, here.start(b, evict=True))
    assert reply.receipt is not None
    assert reply.receipt.victims == (str(Lane(a, 0)),)  # it was loaded meanwhile


def test_all_instances_are_planned_before_anybody_is_released_and_one_that_cannot_be_placed_releases_nobody() -> None:
    host = (policy("h1", capacity=20, managed=17, parked=2),)
    three = [attrs.evolve(DEEP, name=name) for name in "abc"]
    here, (a, b, c, d) = world(*three, attrs.evolve(DEEP, name="d", instances=2), policies=host)
    for one in (a, b, c):
        here.start(one)
        here.run(30_000, until=lambda one=one: here.lane(one).gate_open)
    here.run(3_000)
    reply, _ = answered(here, here.start(d, evict=True))
    assert reply.receipt is not None
    assert reply.receipt.victims == (str(Lane(a, 0)), str(Lane(b, 0)))
    here.run(90_000, until=lambda: here.lane(d).gate_open and here.lane(d, 1).gate_open)
    assert here.lane(d, 1).gate_open

    here, (a, w, d) = world(
        DEEP, attrs.evolve(DEEP, name="w", warm=True), attrs.evolve(DEEP, name="d", instances=2),
        policies=(policy("h1", capacity=14, managed=12, parked=2),),
    )  # fmt: skip
    for one in (a, w):
        here.start(one)
        here.run(30_000, until=lambda one=one: here.lane(one).gate_open)
    here.run(3_000)
    reply, _ = answered(here, here.start(d, evict=True))
    assert reply.code == "insufficient_resources"
    assert (here.lane(a).gate_open, here.world.book.switches) == (True, {})


@pytest.mark.parametrize("boundary", range(1, 7))
def test_a_crash_before_the_answer_loses_the_answer_alone(boundary: int) -> None:
    here, a, b = two()
    here.look_ms[b] = 1_000
    here.crash_at = here.boundaries + boundary
    key = here.start(b, evict=True)
    here.run(3_000)
    command = here.commands[-1]
    here.tell(attrs.evolve(command, now_ms=Millis(here.now)))
    here.run(60_000, until=lambda: here.lane(b).gate_open)
    assert here.crashes == 1
    assert here.reply(key).receipt is not None
    here.tell(attrs.evolve(command, now_ms=Millis(here.now)))
    here.run(100)
    receipt = here.reply(key).receipt
    assert receipt is not None
    assert receipt.victims == (str(Lane(a, 0)),)
    (opened,) = [one for one in here.world.book.operations.values() if one.deployment == b and one.targets]
    assert opened.phase is operation.Phase.SUCCEEDED
    assert here.world.book.owed == {}
