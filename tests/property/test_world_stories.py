"""What users of such systems reported, and what was decided, told to a whole world: events in, orders out."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from simulation import checked
from world import START_MS, Shell, shell
from world_hosts import hang
from world_values import CUSTOM, SGLANG, VLLM, Client, Model, gib, policy

from capyctl.control import events as e
from capyctl.control import orders as o
from capyctl.control import views
from capyctl.control.book import Settings
from capyctl.fsm import operation, request
from capyctl.fsm.activation import ActivationPhase
from capyctl.fsm.cleanup import CleanupPhase
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.switch import Phase as SwitchPhase
from capyctl.fsm.types import Activation, Bytes, DeploymentId, Millis, Origin, Residency

COLD_MS = 5_000
BIG = Model(name="a", ready_gib=6, cold_gib=6, load_ms=COLD_MS, answer_ms=250)
"""Two of these exclude each other."""


def told(clients: list[Client]) -> list[str | None]:
    return [client.told for client in clients]


def world(*models: Model, seed: int = 1, **options: Any) -> tuple[Shell, list[DeploymentId]]:
    """A shell without faults, every step of it checked, in which these models are deployed and measured."""
    here = checked(shell(seed, **options))
    identities = [here.deploy(model) for model in models]
    here.run(4_000)
    return here, identities


def named(*names: str, **changes: Any) -> list[Model]:
    return [attrs.evolve(BIG, name=name, **changes) for name in names]


def heard(here: Shell, kind: type[o.Order]) -> list[Any]:
    """Record every order of one class from now on."""
    found: list[Any] = []
    before = here.check

    def check(shell_: Shell, memory: Any, event: e.Event, step: Any) -> None:
        found.extend(order for order in step.orders if isinstance(order, kind))
        if before is not None:
            before(shell_, memory, event, step)

    here.check = check
    return found


def switches(here: Shell) -> list[SwitchPhase]:
    return [state.phase for state in here.world.book.switches.values()]


# --- R01: a client goes away while the model loads ---------------------------------------------------


@pytest.mark.parametrize("stay", [1, 0])
def test_r01_clients_that_leave_during_a_cold_start_leave_nothing_behind(stay: int) -> None:
    here, _ = world(attrs.evolve(BIG, load_ms=20_000))
    settled = heard(here, o.Settled)
    clients = [here.ask("a", hangs_up_in_ms=None if number < stay else 1_000) for number in range(20)]
    here.run(1_100)
    assert here.world.book.traffic.waiting_total == stay
    assert [order.outcome for order in settled] == ["abandoned"] * (20 - stay)
    here.run(40_000)
    assert len(here.launches) == 1
    assert told(clients) == ["ok"] * stay + ["gone"] * (20 - stay)
    assert [order.outcome for order in settled].count("ok") == stay
    assert not here.world.book.requests


# --- R02: a model is evicted before it served the request it was loaded for ----------------------------


def test_r02_two_exclusive_cold_models_asked_together_both_serve_before_they_go() -> None:
    here, _ = world(*named("a", "b"))
    for _ in range(50):
        first = here.ask("a")
        here.run(100)
        clients = [first, here.ask("b")]
        here.run(60_000)
        assert told(clients) == ["ok", "ok"]
    assert len(here.launches) == 2 * 50
    assert all(here.served.get(incarnation, 0) >= 1 for incarnation in here.launches)


def test_r02_two_others_asked_in_the_same_millisecond_both_serve_before_they_go() -> None:
    here, _ = world(*named("a", "b", "c"))
    for _ in range(50):
        ready = here.ask("a")
        here.run(60_000)
        clients = [ready, here.ask("b"), here.ask("c")]
        here.run(60_000)
        assert told(clients) == ["ok", "ok", "ok"]
    assert len(here.launches) == 3 * 50
    assert all(here.served.get(incarnation, 0) >= 1 for incarnation in here.launches)


# --- R03: a swap cuts a running answer, or kills the one that is loading --------------------------------


def test_r03_an_answer_within_the_drain_limit_ends_before_the_switch() -> None:
    here, (a, _) = world(*named("a", "b"))
    here.ask("a")
    here.run(20_000)
    streaming = here.ask("a", answer_ms=25_000)
    here.run(1_000)
    asked = here.now
    other = here.ask("b")
    here.run(24_500)
    assert (streaming.told, other.told) == ("ok", None)
    here.run(15_000)
    assert other.told == "ok"
    assert here.now - asked < 60_000
    assert here.lane(a).run.stopped.for_name == "b"  # decision 18: status can say for whom it went
    assert switches(here) == [SwitchPhase.DONE]


def test_r03_an_answer_over_the_drain_limit_is_not_cut_for_a_switch() -> None:
    here, _ = world(*named("a", "b"))
    here.ask("a")
    here.run(20_000)
    streaming = here.ask("a", answer_ms=60_000)
    here.run(1_000)
    cut, other = heard(here, o.Cut), here.ask("b")
    answers = heard(here, o.Answer)
    here.run(34_000)
    assert [(order.code, order.retry_after_s) for order in answers] == [("unavailable", 1)]
    assert (streaming.told, other.told) == (None, "unavailable")
    again = here.ask("a")  # the victim serves again at once
    here.run(28_000)
    assert told([streaming, again]) == ["ok", "ok"]
    assert not cut
    assert switches(here) == [SwitchPhase.FAILED]
    assert len(here.launches) == 1


def test_r03_a_model_that_loads_for_its_own_client_serves_it_before_it_goes() -> None:
    here, _ = world(*named("a", "b"))
    mine = here.ask("a")
    here.run(1_000)
    other = here.ask("b")
    here.run(60_000)
    assert told([mine, other]) == ["ok", "ok"]
    assert [str(incarnation.lane).partition("-")[2] for incarnation in here.launches] == ["a/0", "b/0"]
    assert here.served[here.launches[0]] == 1


# --- R04: first requests together start several copies ---------------------------------------------------


def test_r04_sixty_four_first_requests_start_one_engine_and_are_all_answered() -> None:
    here, (a,) = world(BIG)
    launches = heard(here, o.Launch)
    clients = [here.ask("a" if number % 2 else "a-alias") for number in range(64)]
    same = here.revise(a, BIG), here.revise(a, BIG)
    here.run(60_000)
    assert len(launches) == 1
    assert told(clients) == ["ok"] * 64
    assert all(here.reply(key).code is None for key in same)


# --- R05: the idle clock counts from the wrong moment ------------------------------------------------------


def test_r05_the_idle_clock_counts_from_the_last_byte_and_not_during_a_start() -> None:
    settings = Settings(ready_idle_ms=Millis(5_000))
    here, (a, w) = world(
        attrs.evolve(BIG, ready_gib=3, cold_gib=3, load_ms=12_000),
        attrs.evolve(BIG, name="w", ready_gib=3, cold_gib=3, warm=True),
        settings=settings,
    )
    client, kept = here.ask("a", answer_ms=12_000), here.ask("w")
    here.run(60_000, until=lambda: client.told is not None)
    ended = here.now
    assert (client.told, kept.told) == ("ok", "ok")
    here.run(4_900)
    assert here.lane(a).gate_open
    here.run(60_000, until=lambda: not here.lane(a).gate_open)
    assert 5_000 <= here.now - ended <= 5_600
    here.run(60_000)
    assert here.lane(a).run.stopped.kind.value == "idle"
    assert here.lane(w).gate_open


# --- R06: stuck in "stopping" --------------------------------------------------------------------------------


def test_r06_an_engine_that_survives_its_end_is_uncertain_with_a_reason_and_blocks_nobody() -> None:
    here, (a, _) = world(*named("a", "b", ready_gib=3, cold_gib=3))
    here.ask("a")
    here.run(20_000)
    (engine,) = here.engines("a")
    engine.unkillable = True
    endless = here.ask("a", answer_ms=10**9)
    here.run(1_000)
    key, other = here.stop(a), here.ask("b")
    here.run(30_000)
    assert other.told == "ok"
    here.run(900_000)  # the stop's bound for running requests
    here.run(70_000)  # the idle wait, and two kinds of signal
    stop = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
    assert stop.phase is operation.Phase.UNCERTAIN
    assert stop.targets[0].reason == "it survives SIGKILL"
    assert here.lane(a).run.last_error.reason == "it survives SIGKILL"
    assert here.world.book.ledger.holding(here.lane(a).machine.lane.owner) is not None
    engine.unkillable = False
    here.run(700_000)
    stop = here.world.book.operations[stop.operation]
    assert stop.phase is operation.Phase.SUCCEEDED
    assert here.lane(a).phase is ActivationPhase.STOPPED
    assert endless.told == "engine_unreachable"
    assert here.ask("a").told == "deployment_stopped"


# --- R07 and decision 7: a failed start is remembered for ever ---------------------------------------------------


def test_r07_after_failed_starts_a_request_starts_it_again_without_an_operator() -> None:
    here, (a,) = world(BIG)
    pause_ms = 30_000
    for fault in ("exit_early", "load_stuck", "exit_early"):
        here.faults.percent = {fault: 100}
        first = here.ask("a")
        here.run(150_000, until=lambda client=first: client.told is not None)  # type: ignore[misc]
        failed = here.now
        assert first.told == "activation_failed"
        answers = heard(here, o.Answer)
        launched = len(here.launches)
        second = here.ask("a")  # answered at once, with the engine's last words
        assert second.told == "activation_failed"
        assert answers[0].retry_after_s == pause_ms // 1_000
        assert answers[0].message.startswith("a did not start: ")
        assert ("not ready" if fault == "load_stuck" else "it exited with status 1") in answers[0].message
        here.run(failed + pause_ms - here.now - 1)
        assert here.ask("a").told == "activation_failed"
        assert len(here.launches) == launched
        here.run(1_001)
        pause_ms *= 2
    here.faults.percent = {}
    last = here.ask("a")
    here.run(20_000)
    assert last.told == "ok"
    assert here.lane(a).run.failures == 3  # forgotten once it has run well


def test_decision_7_a_passing_reason_is_tried_again_within_the_operation() -> None:
    here, _ = world(BIG)
    here.faults.percent = {"launch_never": 100}
    client = here.ask("a")
    here.run(10_000)
    assert here.lane(next(iter(here.models))).phase is ActivationPhase.HELD
    here.faults.percent = {}
    here.run(40_000)
    assert client.told == "ok"
    assert len(here.launches) == 1


def test_decision_7_an_operators_start_does_not_wait_for_the_pause() -> None:
    here, (a,) = world(BIG)
    here.faults.percent = {"exit_early": 100}
    here.ask("a")
    here.run(20_000)
    assert here.lane(a).phase is ActivationPhase.FAILED
    here.faults.percent = {}
    key = here.start(a)
    here.run(10_000)
    opened = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
    assert opened.phase is operation.Phase.SUCCEEDED
    assert here.lane(a).gate_open


@pytest.mark.parametrize(("lived_ms", "counts"), [(30_000, True), (90_000, False)])
def test_decision_8_an_exit_within_a_minute_of_ready_is_a_failed_operation(lived_ms: int, counts: bool) -> None:
    here, (a,) = world(BIG)
    here.ask("a")
    here.run(60_000, until=lambda: here.lane(a).gate_open)
    here.run(lived_ms)
    (engine,) = here.engines("a")
    here.exit(engine)
    here.run(10_000)
    run = here.lane(a).run
    assert here.lane(a).phase is ActivationPhase.FAILED
    assert (run.failures, run.retry_at_ms is not None) == ((1, True) if counts else (0, False))
    assert here.ask("a").told == ("activation_failed" if counts else None)


def test_failures_before_a_start_that_served_are_forgotten_however_soon_it_was_stopped() -> None:
    here, (a,) = world(BIG)
    for _ in range(5):
        here.faults.percent = {"exit_early": 100}
        here.start(a)
        here.run(20_000, until=lambda: here.lane(a).phase is ActivationPhase.FAILED)
        here.faults.percent = {}
        here.start(a)
        here.run(20_000, until=lambda: here.lane(a).gate_open)
        assert here.lane(a).run.failures == 1
        here.stop(a)
        here.run(20_000, until=lambda: here.lane(a).phase is ActivationPhase.STOPPED)
        assert here.lane(a).run.failures == 0


def test_an_engine_that_is_killed_while_it_is_parked_is_started_by_the_next_request() -> None:
    here, (a,) = world(attrs.evolve(BIG, traits=VLLM, residency=Residency.DEEP, parked_gib=0.5))
    here.start(a)
    here.run(20_000, until=lambda: here.lane(a).gate_open)
    here.park(a)
    here.run(20_000, until=lambda: here.lane(a).is_parked)
    here.exit(here.engines("a")[0])
    here.run(10_000)
    run = here.lane(a).run
    assert (here.lane(a).phase, run.failures, run.retry_at_ms) == (ActivationPhase.FAILED, 0, None)
    client = here.ask("a")
    here.run(30_000)
    assert client.told == "ok"


@pytest.mark.parametrize("settles", list(Residency))
def test_what_is_asked_for_before_it_is_measured_parks_or_stops_as_measuring_settled_it(settles: Residency) -> None:
    deep = attrs.evolve(BIG, traits=VLLM, residency=Residency.DEEP, parked_gib=0.5, settles=settles)
    here = checked(shell(1))
    a, _ = here.deploy(deep), here.deploy(attrs.evolve(deep, name="b"))
    first = here.ask("a")
    assert here.world.book.deployments[a].digest is None, "nobody has measured it yet"
    releases = heard(here, o.Release)
    here.run(60_000, until=lambda: first.told == "ok")
    assert here.lane(a).run.tier is settles
    second = here.ask("b")
    here.run(60_000, until=lambda: second.told == "ok")
    assert second.told == "ok"
    assert [order.tier for order in releases] == ([settles] if settles.parks else [])
    assert here.lane(a).is_parked is settles.parks


# --- R08: orphans after the parent is killed ------------------------------------------------------------------------


def test_r08_an_engine_that_outlived_its_controller_is_probed_before_it_serves() -> None:
    here, (a, _) = world(*named("a", "b"))
    running = here.ask("a", answer_ms=60_000)
    here.run(20_000)
    (place,) = here.world.book.requests
    here.crash()
    looks = heard(here, o.Probe)
    assert not here.lane(a).gate_open
    assert here.world.book.requests[place].phase is request.Phase.CANCEL_STOP  # nobody knows what was sent
    waits = here.ask("a")
    assert waits.told is None
    here.run(600, until=lambda: bool(looks))
    assert [order.incarnation for order in looks] == [here.launches[0]]
    assert not here.lane(a).gate_open
    here.run(10_000)
    assert here.lane(a).gate_open
    assert (running.told, waits.told) == ("crashed", "ok")
    assert len(here.launches) == 1


def test_r08_nothing_is_launched_into_memory_that_an_orphan_holds() -> None:
    here, (a, _) = world(*named("a", "b"))
    here.ask("a")
    here.run(20_000)
    here.crash()
    other = here.ask("b")
    here.run(60_000)
    assert other.told == "ok"  # every step was checked: b's launch came after the proof that a is gone
    assert here.lane(a).phase is ActivationPhase.STOPPED
    assert not here.engines("a")


def test_r08_an_engine_that_ended_while_the_controller_was_down_is_proven_gone_and_starts_again() -> None:
    here, (a,) = world(BIG)
    here.ask("a")
    here.run(100_000)
    (engine,) = here.engines("a")
    here.faults.percent = {}
    here.crash()
    here.exit(engine, news=False)
    client = here.ask("a")
    here.run(30_000)
    assert client.told in ("ok", "activation_failed")
    assert not engine.alive
    again = here.ask("a")
    here.run(30_000)
    assert again.told == "ok"
    assert here.lane(a).run.generation > here.launches[0].generation


# --- R09: two idle models, room for one -----------------------------------------------------------------------------


def test_r09_forty_interleaved_requests_take_a_switch_or_two_not_forty() -> None:
    here, _ = world(*named("a", "b"))
    clients = [here.ask("a" if number % 2 else "b") for number in range(40)]
    here.run(120_000)
    assert told(clients) == ["ok"] * 40
    assert len(here.launches) == 2
    assert len(switches(here)) == 1


B_BOUND_MS = 2_000 + 500 + 6_000 + 2 * COLD_MS
"""The window, the last answers, the end of the old engine, and the cold start with its first answer."""


@pytest.mark.parametrize("seed", range(3))
def test_r09_a_single_request_among_an_endless_stream_is_served_within_a_stated_bound(seed: int) -> None:
    here, _ = world(*named("a", "b"), seed=seed)
    stream: list[Client] = [here.ask("a")]

    def keep_asking() -> None:
        if not here.quiet:
            stream.append(here.ask("a"))
            here.later(100, keep_asking)

    here.run(20_000)
    keep_asking()
    here.run(10_000)
    asked, single = here.now, here.ask("b")
    here.run(60_000, until=lambda: single.told is not None)
    assert single.told == "ok"
    assert here.now - asked <= B_BOUND_MS
    here.quiet = True
    here.run(60_000)
    assert {client.told for client in stream} <= {"ok", "queue_full"}
    assert len(here.launches) == 3  # a, b for the one, and a again for those who waited meanwhile


# --- decisions --------------------------------------------------------------------------------------


def test_decision_1_a_request_for_a_model_that_drains_for_a_switch_waits_and_the_next_switch_serves_it() -> None:
    here, (a, b) = world(*named("a", "b"))
    here.ask("a")
    here.run(20_000)
    here.ask("a", answer_ms=10_000)
    here.run(100)
    here.ask("b")
    here.run(10_000, until=lambda: here.lane(a).phase is ResidencyPhase.DRAINING_TO_STOP)
    late = here.ask("a")
    assert late.told is None
    assert here.world.book.requests[late.request].phase is request.Phase.QUEUED
    here.run(60_000)
    assert late.told == "ok"
    assert switches(here) == [SwitchPhase.DONE, SwitchPhase.DONE]
    assert here.lane(b).phase is ActivationPhase.STOPPED


def test_decision_6_an_engine_that_stays_busy_is_signalled_after_the_idle_wait() -> None:
    settings = Settings(stop_limit_ms=Millis(5_000))
    here, (a,) = world(BIG, settings=settings)
    here.ask("a")
    here.run(20_000)
    endless = here.ask("a", answer_ms=10**9)
    here.run(1_000)
    ends, waits = heard(here, o.Terminate), heard(here, o.AwaitIdle)
    key = here.stop(a)
    here.run(5_500)
    assert (len(waits), len(ends)) == (1, 0)
    here.run(31_000)
    assert len(ends) == 1  # thirty seconds later, busy or not
    here.run(10_000)
    assert here.lane(a).phase is ActivationPhase.STOPPED
    assert here.world.book.operations[here.reply(key).receipt.operation].phase is operation.Phase.SUCCEEDED  # type: ignore[union-attr, index]
    assert endless.told == "engine_unreachable"


def test_decision_9_a_victim_with_an_older_waiter_is_protected_and_one_with_a_younger_is_not() -> None:
    here, (a, b) = world(*named("a", "b"))
    places = [here.ask("a", answer_ms=40_000) for _ in range(32)]
    here.run(15_000)
    older = here.ask("a")  # waits: all places are taken
    here.run(100)
    target = here.ask("b")
    here.run(2_000)
    assert switches(here) == []  # a's waiter is older than b's
    here.run(100_000)
    assert older.told == target.told == "ok"
    assert told(places) == ["ok"] * 32
    here.run(1_000)
    assert here.lane(b).gate_open
    again = here.ask("b", answer_ms=4_000)
    here.run(200)
    target = here.ask("a")
    here.run(100)
    younger = here.ask("b")
    here.run(60_000)
    assert told([again, target, younger]) == ["ok", "ok", "ok"]
    assert here.lane(a).run.generation == 3


def test_decision_16_a_wake_keeps_its_generation_and_a_cold_start_draws_the_next() -> None:
    deep = attrs.evolve(BIG, traits=VLLM, residency=Residency.DEEP, ready_gib=5, cold_gib=5, parked_gib=0.5)
    here, (a, b) = world(attrs.evolve(deep, name="a"), attrs.evolve(deep, name="b"))
    for name in ("a", "b", "a", "b", "a"):
        client = here.ask(name)
        here.run(60_000)
        assert client.told == "ok"
    assert [incarnation.generation for incarnation in here.launches] == [1, 1]
    assert here.lane(a).run.generation == here.lane(b).run.generation == 1
    assert (here.lane(a).phase, here.lane(b).phase) == (ResidencyPhase.READY, ResidencyPhase.PARKED)
    here.stop(b)
    here.run(10_000)
    here.start(b, evict=True)
    here.run(60_000)
    assert here.lane(b).run.generation == 3  # 2 fenced the old run when it was proven gone


def test_decision_17_waiting_for_memory_has_its_own_end_and_the_bound_of_a_start_runs_from_its_arm() -> None:
    settings = Settings(request_deadline_ms=Millis(60_000))
    here, (a, b) = world(*named("a", "b"), settings=settings)
    here.start(a)
    here.run(20_000)
    here.ask("a", answer_ms=1_000_000)  # never drains in time
    here.run(1_000)
    limit = Millis(here.now + 30_000)
    key = here.start(b, deadline_ms=limit)
    here.run(29_000)
    opened = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
    assert opened.phase is operation.Phase.ACCEPTED
    assert opened.waiting_code == "insufficient_resources"
    assert "charged to a (6.0 GiB)" in opened.waiting_reason
    here.run(2_000)
    opened = here.world.book.operations[opened.operation]
    assert (opened.phase, opened.code) == (operation.Phase.EXPIRED, "insufficient_resources")
    assert here.lane(b).phase is ActivationPhase.STOPPED
    here.stop(a)
    here.run(900_000)
    launches = heard(here, o.Launch)
    here.ask("b")
    assert launches[0].deadline_ms == here.now + 120_000


def test_a_start_that_evicts_nobody_says_again_who_is_in_its_way_once_a_switch_for_a_client_came_to_nothing() -> None:
    here, (a, b) = world(*named("a", "b"))
    here.start(a)
    here.run(20_000)
    here.ask("a", answer_ms=60_000)  # longer than a drain is waited for
    here.run(1_000)
    client = here.ask("b")
    here.run(1_000)
    key = here.start(b)
    here.run(60_000, until=lambda: client.told is not None)
    assert client.told == "unavailable"
    here.run(1_000)
    waits = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
    view = views.deployment(here.world, b, Millis(here.now))
    assert view is not None
    assert waits.waiting_code == "insufficient_resources"
    assert "charged to a (6.0 GiB)" in waits.waiting_reason
    assert view["waiting"] == waits.waiting_reason


def test_a_stop_is_lifted_by_an_operators_start_alone() -> None:
    here, (a,) = world(BIG)
    answers = heard(here, o.Answer)
    here.start(a)
    here.run(20_000)
    here.stop(a)
    here.run(20_000)
    assert here.ask("a").told == "deployment_stopped"
    assert answers[-1].message == "an operator stopped a. Try: capyctl start deployment a"
    here.crash()
    here.run(5_000)
    assert here.ask("a").told == "deployment_stopped"
    here.start(a)
    client = here.ask("a")
    here.run(20_000)
    assert client.told == "ok"


def test_a_start_that_meets_the_end_of_a_switch_victim_starts_it_once_it_is_gone() -> None:
    here, (a, _) = world(*named("a", "b"), policies=(policy("h1", managed=8),))
    here.ask("a")
    here.run(20_000)
    waits = here.ask("b")
    here.run(60_000, until=lambda: here.lane(a).phase in CleanupPhase)
    key = here.start(a, evict=True)
    here.run(120_000)
    assert waits.told == "ok"
    opened = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
    assert opened.phase is operation.Phase.SUCCEEDED
    assert here.lane(a).gate_open


def test_a_request_that_joins_a_start_without_evict_gets_room_as_it_would_have_without_that_start() -> None:
    here, (a, b) = world(*named("a", "b"), policies=(policy("h1", managed=8),))
    here.ask("a")
    here.run(20_000)
    here.start(b)
    here.run(60_000)
    assert here.lane(b).phase is ActivationPhase.PLANNED, "an operator without --evict stops nobody"
    assert here.lane(a).gate_open
    client = here.ask("b")
    here.run(60_000)
    assert client.told == "ok"


def test_a_switch_that_a_crash_caught_after_its_releases_waits_for_the_first_sample() -> None:
    here, (_, b) = world(*named("a", "b"), policies=(policy("h1", managed=8),))
    here.ask("a")
    here.run(20_000)
    here.ask("b")
    here.run(60_000, until=lambda: SwitchPhase.RECHECK in switches(here))
    (host,) = here.hosts.values()
    host.stale_until_ms = here.now + 1_500  # the session begins before the first sample
    here.crash()
    here.run(5_000)
    client = here.ask("b")
    here.run(15_000)
    assert client.told == "ok", "no pause: nobody kept it waiting"
    assert here.lane(b).gate_open


def test_a_checkpoint_that_could_not_be_read_is_measured_again_for_whoever_asks() -> None:
    here, (a,) = world(attrs.evolve(BIG, note="bad invalid_root"))
    measured = heard(here, o.Measure)
    assert [here.ask("a").told for _ in range(3)] == ["invalid_root"] * 3
    assert len(measured) == 1, "one look for all of them"
    here.run(10_000)
    here.models[a][1] = attrs.evolve(here.models[a][1], note="")  # the directory is there now
    assert here.ask("a").told == "invalid_root", "what was known when it came"
    here.run(5_000)
    client = here.ask("a")
    here.run(20_000)
    assert client.told == "ok"
    assert len(measured) == 2


def test_a_start_of_what_could_not_be_read_has_it_measured_again_first() -> None:
    here, (a,) = world(attrs.evolve(BIG, note="bad invalid_root"))
    here.models[a][1] = attrs.evolve(here.models[a][1], note="")
    first = here.start(a)
    here.run(5_000)
    assert here.reply(first).code == "checkpoint_digest_pending"
    second = here.start(a)
    here.run(20_000)
    assert here.reply(second).code is None
    assert here.lane(a).gate_open


def test_a_start_that_meets_a_park_wakes_it_once_it_is_parked() -> None:
    here, (a,) = world(attrs.evolve(BIG, traits=VLLM, residency=Residency.DEEP, parked_gib=0.5))
    here.start(a)
    here.run(20_000)
    parked = here.park(a)
    here.run(10)
    started = here.start(a)
    here.run(60_000)
    book = here.world.book
    ended = [book.operations[here.reply(key).receipt.operation].phase for key in (parked, started)]  # type: ignore[union-attr, index]
    assert ended == [operation.Phase.SUCCEEDED, operation.Phase.SUCCEEDED]
    assert here.lane(a).gate_open
    assert len(here.launches) == 1


def test_a_revision_with_a_start_waits_for_the_old_instances_and_then_starts() -> None:
    here, (a,) = world(attrs.evolve(BIG, instances=2, ready_gib=3, cold_gib=3))
    here.start(a)
    here.run(30_000)
    running = here.ask("a", answer_ms=20_000)
    here.run(500)
    key = here.revise(a, attrs.evolve(BIG, instances=2, ready_gib=3, cold_gib=3, note="v2"), activate=True)
    waits = here.ask("a")
    launched = len(here.launches)
    here.run(15_000)
    assert len(here.launches) == launched  # the old ones are proven gone first
    here.run(60_000)
    opened = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
    assert opened.phase is operation.Phase.SUCCEEDED
    assert told([running, waits]) == ["ok", "ok"]
    assert all(row.revision == 2 for _, row in here.world.book.of(a))


def test_the_count_of_instances_falls_and_rises_without_touching_what_serves() -> None:
    here, (a,) = world(attrs.evolve(BIG, instances=2, ready_gib=2, cold_gib=2))
    here.ask("a")
    here.run(20_000)
    serving = here.world.book.serving(a)
    assert len(serving) == 1
    for count in (1, 3, 1, 2):
        here.revise(a, attrs.evolve(BIG, instances=count, ready_gib=2, cold_gib=2))
        here.run(1_000)
        assert here.world.book.serving(a) == serving
        assert len(here.world.book.lanes[a]) == count
    here.stop(a)
    here.run(20_000)
    assert not here.engines()


@pytest.mark.parametrize("code", ["checkpoint_mismatch", "invalid_root"])
def test_a_launch_that_finds_other_files_answers_requests_with_its_own_code(code: str) -> None:
    here, (a,) = world(BIG)
    here.spoiled_code = code
    here.spoiled.add(a)
    answers = heard(here, o.Answer)
    first = here.ask("a")
    here.run(20_000, until=lambda: first.told is not None)
    assert (first.told, answers[0].retry_after_s) == (code, None)
    assert here.ask("a").told == code
    assert len(here.launches) <= 1


def test_who_deploys_the_same_document_again_gets_the_files_that_are_there_now() -> None:
    here, (a,) = world(BIG)
    digest = here.world.book.deployments[a].digest
    here.digests[a] = "sha256:others"
    key = here.revise(a, BIG, activate=True)
    here.run(20_000)
    row = here.world.book.deployments[a]
    assert (row.state.revision, row.digest == digest) == (2, False)
    assert here.reply(key).code is None
    assert here.lane(a).gate_open
    assert here.lane(a).digest == row.digest


def test_a_model_that_serves_is_restarted_by_the_same_document_only_if_its_files_are_others() -> None:
    here, (a,) = world(BIG)
    here.start(a)
    here.run(20_000)
    here.revise(a, BIG)
    here.run(20_000)
    assert (len(here.launches), here.world.book.deployments[a].state.revision) == (1, 2)
    here.digests[a] = "sha256:others"
    here.revise(a, BIG)
    here.run(30_000)
    assert len(here.launches) == 2
    assert here.lane(a).gate_open
    assert here.lane(a).digest == here.world.book.deployments[a].digest


def test_a_drained_host_keeps_nothing_and_serves_again_once_undrained() -> None:
    here, (a,) = world(BIG, policies=(policy("h1"), policy("h2")))
    client = here.ask("a")
    here.run(20_000)
    first = here.lane(a).run.host
    here.drain(first)
    here.run(20_000)
    assert not here.engines()
    moved = here.ask("a")
    here.run(20_000)
    assert told([client, moved]) == ["ok", "ok"]
    assert here.lane(a).run.host != first


def test_thirty_two_places_that_only_a_stop_gives_back_restart_the_engine() -> None:
    here, (a,) = world(attrs.evolve(BIG, traits=CUSTOM))
    here.ask("a")
    here.run(20_000)
    lost = [here.ask("a", stream=False, answer_ms=10**6, hangs_up_in_ms=500) for _ in range(32)]
    here.run(1_000)
    client = here.ask("a")
    here.run(30_000)
    assert client.told == "ok"  # 68
    assert told(lost) == ["gone"] * 32
    assert len(here.launches) == 2
    assert here.launches[1].generation > here.launches[0].generation
    assert here.lane(a).gate_open


def test_a_model_that_woke_with_another_answer_never_serves_and_starts_afresh() -> None:
    deep = attrs.evolve(BIG, traits=SGLANG, residency=Residency.DEEP, ready_gib=5, cold_gib=5)
    here, (a,) = world(deep)
    here.start(a)
    here.run(20_000)
    here.park(a)
    here.run(20_000)
    here.faults.percent = {"wake_mismatch": 100}
    client = here.ask("a")
    here.run(20_000, until=lambda: here.lane(a).phase in CleanupPhase)
    here.faults.percent = {}
    here.run(60_000)
    assert client.told == "ok"
    assert [incarnation.generation for incarnation in here.launches] == [1, 3]
    assert here.lane(a).run.last_error.code == "wake_mismatch"


def test_a_failed_switch_leaves_its_victim_alone_for_as_long_as_it_kept_it_waiting() -> None:
    here, _ = world(*named("a", "b"), settings=Settings(drain_timeout_ms=Millis(10_000)))
    here.ask("a")
    here.run(20_000)
    here.ask("a", answer_ms=300_000)
    here.run(1_000)
    here.ask("b")
    here.run(20_000, until=lambda: switches(here) == [SwitchPhase.FAILED])
    here.ask("b")
    here.run(9_900)
    assert len(switches(here)) == 1
    here.run(200)
    assert len(switches(here)) == 2


def test_the_clock_of_these_stories_starts_where_the_shell_says() -> None:
    assert shell(0).now == START_MS


# --- a start that cannot work ------------------------------------------------------------------------------


def test_a_start_whose_files_changed_is_refused_and_nobody_is_evicted_for_it() -> None:
    here, (a, b) = world(*named("a", "b"))
    here.ask("a")
    here.run(20_000)
    here.spoiled.add(b)
    key = here.start(b, evict=True)
    here.run(60_000)
    assert here.reply(key).code == "checkpoint_mismatch"
    assert (switches(here), len(here.launches)) == ([], 1)
    assert here.lane(a).gate_open


def test_a_request_whose_model_changed_evicts_nobody_and_is_told_at_once() -> None:
    here, (a, b) = world(*named("a", "b"))
    here.ask("a")
    here.run(20_000)
    here.spoiled.add(b)
    answers, client = heard(here, o.Answer), here.ask("b")
    here.run(5_000)
    assert client.told == "checkpoint_mismatch"
    assert "its files changed" in answers[0].message
    assert (switches(here), here.lane(a).gate_open) == ([], True)
    here.spoiled.clear()  # what was measured is there again
    again = here.ask("b")
    here.run(60_000)
    assert again.told == "ok"


def test_a_parked_model_whose_files_changed_stays_parked_and_evicts_nobody() -> None:
    parks = {"traits": VLLM, "residency": Residency.DEEP, "parked_gib": 0.5}
    here, (a, b) = world(*named("a", "b", **parks))
    here.ask("a")
    here.run(20_000)
    here.ask("b")
    here.run(60_000)
    assert here.lane(a).is_parked
    here.spoiled.add(a)
    client = here.ask("a")
    here.run(5_000)
    assert client.told == "checkpoint_mismatch"
    assert here.lane(a).is_parked
    assert here.lane(b).gate_open
    here.spoiled.clear()
    again = here.ask("a")
    here.run(60_000)
    assert again.told == "ok"


def test_a_look_that_its_host_does_not_answer_says_nothing_and_is_taken_again() -> None:
    here, (_, b) = world(*named("a", "b"))
    here.ask("a")
    here.run(20_000)
    looks = heard(here, o.VerifyStart)
    here.faults.percent = {"order_lost": 100}
    client = here.ask("b")
    here.run(7_000)
    here.faults.percent = {}
    assert (client.told, switches(here)) == (None, [])
    assert 3 <= len(looks) <= 5
    here.run(60_000)
    assert client.told == "ok"
    assert here.lane(b).gate_open


def test_a_slow_look_holds_others_back_for_five_seconds_and_no_longer() -> None:
    here, (_, b, _) = world(*named("a", "b", "c"))
    here.ask("a")
    here.run(20_000)
    here.look_ms[b] = 600_000  # it reads every byte again
    slow = here.ask("b")
    here.run(1_000)
    other = here.ask("c")
    here.run(3_900)
    assert switches(here) == []
    here.run(30_000)
    assert (slow.told, other.told) == (None, "ok")


# --- an engine that answers nothing any more -----------------------------------------------------------------


def test_an_engine_that_hangs_blocks_nobody_longer_than_it_takes_to_be_sure() -> None:
    here, (a, b) = world(*named("a", "b"))
    here.ask("a")
    here.run(80_000)
    hang(here, here.engines()[0])
    patient = here.ask("a")
    here.run(500)
    asked, other = here.now, here.ask("b")
    here.run(90_000, until=lambda: other.told is not None)
    assert (other.told, patient.told) == ("ok", "engine_unreachable")
    assert here.now - asked < 60_000
    assert here.lane(a).run.last_error.reason == "it is mute"
    again = here.ask("a")
    here.run(60_000)
    assert again.told == "ok"
    assert here.lane(b).run.stopped.for_name == "a"


def test_a_doubted_engine_that_answers_what_it_is_asked_serves_on() -> None:
    here, (a,) = world(BIG)
    here.ask("a")
    here.run(20_000)
    incarnation = here.engines()[0].incarnation
    here.tell(e.EngineSilent(now_ms=Millis(here.now), incarnation=incarnation, reason="no gauges"))
    assert not here.lane(a).gate_open
    client = here.ask("a")
    here.run(10_000)
    assert client.told == "ok"
    assert not here.world.book.silent
    assert len(here.launches) == 1


def test_a_stop_of_an_engine_that_hangs_ends_it_and_stays_a_stop() -> None:
    here, (a,) = world(BIG)
    here.ask("a")
    here.run(80_000)
    hang(here, here.engines()[0])
    patient = here.ask("a")
    here.run(500)
    here.stop(a)
    here.run(60_000)
    assert patient.told == "engine_unreachable"
    assert here.lane(a).run.stopped.kind.value == "operator"
    assert not here.lane(a).has_launch


# --- an engine that holds more than it is charged ---------------------------------------------------------------


def bloats(here: Shell, to_gib: float) -> None:
    engine = here.engines()[0]
    engine.more_bytes = Bytes(gib(to_gib) - engine.held_bytes)


def test_an_engine_that_outgrows_its_charge_is_charged_what_it_holds_and_nothing_is_admitted_on_less() -> None:
    here, (a, b) = world(*named("a", ready_gib=3, cold_gib=3), *named("b", ready_gib=4, cold_gib=4))
    here.ask("a")
    here.run(20_000)
    bloats(here, 6)
    here.run(3_000)
    assert ledger_line(here, a) == (gib(3), None), "one sample may be a passing peak"
    here.run(6_000)
    assert ledger_line(here, a) == (gib(6), gib(3))
    here.start(b)
    here.run(60_000)
    assert not here.lane(b).has_launch, "6 GiB of 8 are taken"
    assert "needs 4.0 GiB" in here.lane(b).waits_for.reason
    bloats(here, 2)
    here.run(20_000)
    assert ledger_line(here, a) == (gib(6), gib(3)), "a charge falls with a proof, not with a sample"
    here.stop(a)
    here.run(60_000)
    assert here.lane(b).gate_open


def test_what_parks_after_it_outgrew_its_charge_is_charged_as_parked_and_wakes_for_what_it_held() -> None:
    here, (a,) = world(attrs.evolve(BIG, ready_gib=3, cold_gib=3, traits=VLLM, residency=Residency.DEEP))
    here.ask("a")
    here.run(20_000)
    bloats(here, 4)
    here.run(10_000)
    here.park(a)
    here.run(30_000)
    assert here.lane(a).is_parked
    assert ledger_line(here, a)[1] is None
    here.ask("a")
    here.run(30_000)
    assert ledger_line(here, a) == (gib(4), gib(3))


def test_status_says_what_the_looks_at_a_doubted_engine_found() -> None:
    here, (a,) = world(BIG)
    here.ask("a")
    here.run(20_000)
    (host,) = here.hosts.values()
    host.forgotten |= set(host.engines)  # its journal was lost
    here.drop_session(host)
    here.run(120_000)
    view = views.deployment(here.world, a, Millis(here.now))
    assert view is not None
    assert view["waiting"] == "its engine is looked at again, and has not answered yet: not watched here"


def ledger_line(here: Shell, identity: DeploymentId) -> tuple[int, int | None]:
    """What status shows as charged, and as planned where it is charged more."""
    view = views.deployment(here.world, identity, Millis(here.now))
    assert view is not None
    (line,) = view["ledger"]
    return int(line["bytes"]), line["planned_bytes"] and int(line["planned_bytes"])


def test_a_client_that_waits_for_a_checkpoint_reads_no_place_of_the_machine() -> None:
    here = checked(shell(1))
    a = here.deploy(BIG)  # not measured yet
    answers = heard(here, o.Answer)
    here.ask("a")
    reason = "the model directory /srv/models/qwen is not there"
    here.tell(e.RevisionUnusable(now_ms=Millis(here.now), deployment=a, revision=1, code="invalid_root", reason=reason))
    here.ask("a")
    assert [order.message.removeprefix("a cannot start: ") for order in answers] == [
        "the model directory <path> is not there"
    ] * 2


def test_a_launch_that_outlives_its_controller_serves_soon_after_it_is_loaded() -> None:
    here, (a,) = world(attrs.evolve(BIG, load_ms=12_000))
    here.start(a)
    here.run(3_000)
    here.crash()
    died = here.now
    here.run(60_000, until=lambda: here.lane(a).gate_open)
    assert here.lane(a).gate_open
    assert here.now - died < 30_000, "no look waits longer than all that came before it"
    assert len(here.launches) == 1


def test_a_deleted_deployment_takes_its_logs_with_it_and_a_host_that_was_away_hears_of_it_later() -> None:
    here, (a, b) = world(*named("a", "b"))
    pruned = heard(here, o.PruneLogs)
    here.start(a)
    here.run(20_000)
    here.delete(a, stop=True)
    here.run(1_000)
    assert not pruned, "its engine may still write"
    here.run(60_000)
    assert [order.kept for order in pruned] == [(b,)]
    here.drop_session(next(iter(here.hosts.values())))
    here.delete(b)
    here.run(100_000)
    assert [order.kept for order in pruned[1:]] == [()]


def test_old_rows_of_requests_leave_no_queue_of_a_deployment_that_was_deleted_before_a_kill() -> None:
    here = checked(shell(3))
    a = here.deploy(Model(name="a", traits=CUSTOM))
    here.run(5_000)
    here.ask("a")
    here.run(20_000)
    here.ask("a", answer_ms=10**6, hangs_up_in_ms=500)  # settled by its engine's end
    here.run(3_000)
    older = {key: row for key, row in here.durable.items() if key[0] == "request"}
    assert older
    here.delete(a, stop=True)
    here.run(60_000)
    assert a not in here.world.book.deployments
    here.durable |= older  # requests are written behind
    here.crash()
    here.run(1_000)
    assert not here.world.book.requests
    assert a not in here.world.book.traffic.queues


def test_a_switch_whose_target_comes_to_nothing_under_a_new_revision_holds_its_host_shut_for_nobody() -> None:
    here = checked(shell(3))
    here.deploy(Model(name="a", ready_gib=6, cold_gib=6))
    b = here.deploy(Model(name="b", ready_gib=6, cold_gib=6, load_ms=20_000))
    here.run(5_000)
    here.ask("a")
    here.run(20_000)
    here.ask("b", hangs_up_in_ms=200_000)
    here.run(60_000, until=lambda: here.lane(b).phase is ActivationPhase.PROBING)
    here.revise(b, attrs.evolve(here.models[b][1], note="bad checkpoint_mismatch"))  # stops what is starting
    here.run(1)
    here.start(b, evict=True)
    here.run(120_000)
    assert not here.world.book.active_switches
    client = here.ask("a")
    here.run(60_000, until=lambda: client.told is not None)
    assert client.told == "ok"


def test_a_model_that_only_an_operator_starts_from_now_on_is_started_for_no_request_from_before() -> None:
    here = checked(shell(1))
    model = Model(name="a", load_ms=5_000)
    a = here.deploy(model)
    client = here.ask("a")  # its files are still being measured
    assert here.lane(a).wish.origin is Origin.REQUEST
    here.revise(a, attrs.evolve(model, activation=Activation.EXPLICIT))
    here.run(1_000)
    assert client.told == "deployment_inactive"
    here.run(60_000)
    assert here.launches == []
    here.start(a)
    here.run(60_000, until=lambda: here.lane(a).gate_open)
    assert here.lane(a).gate_open


def test_whoever_waits_is_served_by_the_start_that_comes_with_the_document() -> None:
    here = checked(shell(1))
    model = Model(name="a", load_ms=5_000)
    a = here.deploy(model)
    client = here.ask("a")
    here.revise(a, attrs.evolve(model, activation=Activation.EXPLICIT), activate=True)
    here.run(60_000, until=lambda: client.told is not None)
    assert client.told == "ok"


def test_a_request_is_served_by_one_instance_though_an_operator_wants_more_than_there_is_room_for() -> None:
    here = checked(shell(1))  # 7 GiB for one of either
    here.deploy(Model(name="a", ready_gib=6, cold_gib=6))
    b = here.deploy(Model(name="b", ready_gib=4, cold_gib=4, instances=2))
    first = here.ask("a")
    here.run(60_000, until=lambda: first.told is not None)
    here.run(5_000)
    here.start(b)  # it waits, without anybody giving way
    here.run(1_000)
    here.start(b, evict=True)  # for both, or for none
    here.run(30_000)
    assert not here.lane(b).gate_open
    client = here.ask("b")
    here.run(60_000, until=lambda: client.told is not None)
    assert client.told == "ok"
    assert here.lane(b, 1).phase is ActivationPhase.PLANNED
