"""Corners that random lives seldom turn: each is a short life with its own ending, and fires rows of its own."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import world_hosts
import world_router
from simulation import checked
from world import Shell, shell
from world_values import CUSTOM, RAM, SGLANG, VLLM, Client, Model, gib, policy

from capyctl.control import events as e
from capyctl.control.book import Settings
from capyctl.fsm import operation, request
from capyctl.fsm.activation import ActivationPhase
from capyctl.fsm.cleanup import CleanupPhase
from capyctl.fsm.proofs import (
    Back,
    Gone,
    NeverLaunched,
    Quiet,
    Resident,
    SameEngine,
    Unsent,
    Usable,
)
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.types import (
    Bytes,
    DeploymentId,
    Generation,
    HostId,
    Incarnation,
    Lane,
    Millis,
    Phase,
    ProcessIdentity,
    Residency,
    Role,
    Token,
)
from capyctl.ledger.types import HostPolicy

PLAIN = Model(name="a", ready_gib=6, cold_gib=6)
DEEP = attrs.evolve(PLAIN, traits=VLLM, residency=Residency.DEEP, ready_gib=5, cold_gib=5)
LONG_MS = 10**9


def begun(model: Model, **options: object) -> tuple[Shell, DeploymentId]:
    """One model, READY."""
    here = checked(shell(11, **options))
    a = here.deploy(model)
    here.run(4_000)
    here.start(a)
    here.run(30_000, until=lambda: here.lane(a).gate_open)
    assert here.lane(a).gate_open
    return here, a


def reaches(here: Shell, a: DeploymentId, *phases: object, within_ms: int = 400_000) -> None:
    here.run(within_ms, until=lambda: here.lane(a).phase in phases)
    assert here.lane(a).phase in phases, here.lane(a).phase


def ends(here: Shell, a: DeploymentId) -> None:
    """Until it is not resident any more."""
    here.run(900_000, until=lambda: here.lane(a).phase not in ResidencyPhase)


def is_told(here: Shell, client: Client) -> None:
    here.run(900_000, until=lambda: client.told is not None)


def serves_again(here: Shell, name: str = "a") -> None:
    here.faults.heal()
    client = here.ask(name)
    is_told(here, client)
    assert client.told == "ok"


def old_news(here: Shell, a: DeploymentId) -> None:
    """Every outcome of an order that nobody waits for any more, of this run and of one before it: nothing moves."""
    lane = Lane(a, 0)
    before = here.world.book.instances[lane]
    charged = here.world.book.ledger.holding(lane.owner)
    now = Millis(here.now)
    for generation in (before.run.generation or 1, 10_000):
        run = Incarnation(lane, Generation(generation))
        base = {"now_ms": now, "incarnation": run, "token": Token(0)}
        process = ProcessIdentity(pid=1, boot_id="b", start_ticks=1)
        missing = (
            Gone(incarnation=run, processes=(), absent=frozenset(), group_empty=True, observed_at_ms=now)
            if before.run.processes
            else NeverLaunched(incarnation=Incarnation(lane, Generation(10_000)), fenced=True, observed_at_ms=now)
        )
        usable = Usable(incarnation=run, answer_chars=1, probed_at_ms=now)
        same = SameEngine(
            incarnation=run, recorded=(process,), alive=frozenset({process}), strangers=0, observed_at_ms=now
        )
        quiet = Quiet(incarnation=run, gate_closed_at_ms=now, router_in_flight=0, running=0, waiting=0, read_at_ms=now)
        left = Resident(
            incarnation=run, resident_bytes=Bytes(1), budget_bytes=Bytes(2), released_at_ms=Millis(1), sampled_at_ms=now
        )
        back = Back(incarnation=run, restored_at_ms=now, sampled_at_ms=now, fresh_until_ms=now, recorded_at_ms=now)
        unsent = Unsent(incarnation=run, refused_before_sending=True)
        news: tuple[e.Event, ...] = (
            e.Spawned(**base, processes=(process,)),
            e.LaunchReady(**base, processes=(process,), usable=usable),
            e.LaunchFailed(**base, code="launch_failed", reason="old", proof=missing, transient=True),
            e.OrderLost(**base, reason="old"),
            e.IdleGateEnded(**base, verdict="idle"),
            e.Terminated(**base, proof=missing),
            e.TerminateUnproven(**base, reason="old"),
            e.Probed(**base, reason="old"),
            e.ParkConfirmed(**base, quiet=quiet, same=same, resident={RAM: left}),
            e.ParkRefused(**base, code="unavailable", reason="old", unsent=unsent),
            e.WakeConfirmed(**base, back=back, usable=usable, canary=None, same=same),
            e.WakeFailed(**base, code="engine_error", reason="old"),
            e.ReadyStored(now_ms=now, incarnation=Incarnation(lane, Generation(10_000))),
            e.EngineExited(
                now_ms=now, incarnation=Incarnation(lane, Generation(10_000)), role=Role.API, status=1, reason="old"
            ),
            e.EngineExited(now_ms=now, incarnation=run, role=Role.HELPER, status=1, reason="old"),
        )
        for event in news:
            here.tell(event)
            after = here.world.book.instances[lane]
            assert after.machine.life == before.machine.life, event
            assert after.gate_open == before.gate_open
            assert here.world.book.ledger.holding(lane.owner) == charged


# --- old news in every phase ------------------------------------------------------------------------------


def old_news_moves_nothing_in_any_phase() -> None:
    here = checked(shell(11))
    a = here.deploy(attrs.evolve(DEEP, traits=SGLANG))
    here.run(4_000)
    old_news(here, a)  # stopped
    here.faults.percent = {"launch_never": 100}
    here.start(a)
    old_news(here, a)  # armed
    reaches(here, a, ActivationPhase.HELD)
    old_news(here, a)
    here.faults.percent = {}
    reaches(here, a, ActivationPhase.PROBING)
    old_news(here, a)
    reaches(here, a, ResidencyPhase.READY)
    old_news(here, a)
    here.run(1_000)
    old_news(here, a)
    stored = here.lane(a).run.incarnation
    here.tell(e.ReadyStored(now_ms=Millis(here.now), incarnation=stored))
    here.ask("a", answer_ms=5_000)
    here.run(1_000)
    here.park(a)
    old_news(here, a)  # draining to a park
    reaches(here, a, ResidencyPhase.PARK_ARMED)
    old_news(here, a)
    reaches(here, a, ResidencyPhase.PARKED)
    old_news(here, a)
    here.ask("a")
    reaches(here, a, ResidencyPhase.WAKE_ARMED)
    old_news(here, a)
    reaches(here, a, ResidencyPhase.READY)
    here.run(1_000)
    here.ask("a", answer_ms=5_000)
    here.run(1_000)
    here.stop(a)
    old_news(here, a)  # draining to its end
    reaches(here, a, CleanupPhase.ARMED)
    old_news(here, a)
    reaches(here, a, ActivationPhase.STOPPED)


def old_news_moves_nothing_of_what_ends_or_is_unknown() -> None:
    here, a = begun(PLAIN)
    here.faults.percent = {"idle_busy": 100}
    here.stop(a)
    reaches(here, a, CleanupPhase.IDLE_GATE)
    old_news(here, a)
    (host,) = here.hosts.values()
    here.drop_session(host)
    here.run(10)
    assert here.lane(a).phase is CleanupPhase.PLANNED
    old_news(here, a)
    here.faults.percent = {"unkillable": 100}
    reaches(here, a, ActivationPhase.STOPPED)
    here.start(a)
    reaches(here, a, ResidencyPhase.READY)
    here.stop(a)
    reaches(here, a, CleanupPhase.RECONCILING)
    old_news(here, a)
    for engine in here.engines():
        engine.unkillable = False
    here.faults.heal()
    reaches(here, a, ActivationPhase.STOPPED, within_ms=3_600_000)


# --- launches ---------------------------------------------------------------------------------------------


def a_late_proof_that_nothing_is_left_settles_an_unknown_launch() -> None:
    """Its host answers after the bound and the grace, when nobody waits for it any more."""
    for stop_kind in ("none", "operator"):
        here = checked(shell(11))
        a = here.deploy(PLAIN)
        here.run(4_000)
        here.faults.percent = {"exit_early": 100, "order_late": 100, "probe_mute": 100}
        here.start(a)
        reaches(here, a, CleanupPhase.RECONCILING)
        if stop_kind == "operator":
            here.stop(a)
        reaches(here, a, ActivationPhase.HELD, ActivationPhase.STOPPED)
        assert here.lane(a).phase is (ActivationPhase.STOPPED if stop_kind == "operator" else ActivationPhase.HELD)
        assert not list(here.world.book.ledger.rows())


def late_proofs_spend_the_attempts_like_prompt_ones() -> None:
    here = checked(shell(11))
    a = here.deploy(PLAIN)
    here.run(4_000)
    here.faults.percent = {"exit_early": 100, "order_late": 100, "probe_mute": 100}
    here.start(a)
    for _ in range(3):
        reaches(here, a, CleanupPhase.RECONCILING)
        reaches(here, a, ActivationPhase.HELD, ActivationPhase.FAILED)
    assert here.lane(a).phase is ActivationPhase.FAILED
    assert len(here.launches) == 3


def three_lost_launches_that_are_gone_spend_the_attempts() -> None:
    here = checked(shell(11))
    a = here.deploy(PLAIN)
    here.run(4_000)
    here.faults.percent = {"exit_early": 100, "order_lost": 100}
    client = here.ask("a")
    here.faults.percent = {"exit_early": 100}
    for _ in range(3):
        here.run(400_000, until=lambda: here.lane(a).phase is ActivationPhase.PROBING)
        here.drop_session(here.hosts[HostId("h1")])  # the answer is lost with the session
        here.run(400_000, until=lambda: here.lane(a).phase in (ActivationPhase.HELD, ActivationPhase.FAILED))
    assert here.lane(a).phase is ActivationPhase.FAILED
    here.run(1_000)
    assert client.told == "activation_failed"
    assert len(here.launches) == 3
    serves_again_after_the_pause(here, a)


def serves_again_after_the_pause(here: Shell, a: DeploymentId) -> None:
    retry_at = here.lane(a).run.retry_at_ms
    here.run(max(0, (retry_at or 0) - here.now) + 1)
    serves_again(here)


def a_launch_that_still_loads_past_its_bound_is_ended_and_tried_again() -> None:
    here = checked(shell(11))
    a = here.deploy(attrs.evolve(PLAIN, load_ms=1_500_000))
    here.run(4_000)
    here.start(a)
    reaches(here, a, CleanupPhase.RECONCILING)
    reaches(here, a, CleanupPhase.ARMED)
    reaches(here, a, ActivationPhase.HELD)
    assert here.lane(a).run.attempts == 1
    assert not here.engines()


def an_unknown_launch_that_exits_is_looked_at_at_once() -> None:
    here = checked(shell(11))
    a = here.deploy(PLAIN)
    here.run(4_000)
    here.faults.percent = {"order_lost": 100, "probe_mute": 100}
    here.start(a)
    reaches(here, a, CleanupPhase.RECONCILING)
    here.run(7_000)
    here.faults.percent = {}
    assert here.lane(a).machine.life.look_at_ms > here.now + 10_000
    here.exit(here.engines()[0])
    reaches(here, a, ActivationPhase.HELD, within_ms=6_000)


def a_look_that_finds_nothing_ends_what_its_operator_stopped_meanwhile() -> None:
    here = checked(shell(11))
    a = here.deploy(PLAIN)
    here.run(4_000)
    here.faults.percent = {"exit_early": 100, "order_lost": 100}
    here.start(a)
    reaches(here, a, CleanupPhase.RECONCILING)
    here.faults.percent = {"order_late": 100}  # the look is under way when the operator stops it
    here.run(2_000)
    here.stop(a)
    reaches(here, a, ActivationPhase.STOPPED, within_ms=900_000)
    assert not list(here.world.book.ledger.rows())


def an_idle_wait_that_is_never_answered_is_given_up() -> None:
    here, a = begun(PLAIN)
    here.faults.percent = {"order_silent": 100}
    here.stop(a)
    reaches(here, a, CleanupPhase.IDLE_GATE)
    here.run(1_000)
    here.faults.percent = {}
    here.run(59_000, until=lambda: here.lane(a).phase is CleanupPhase.ARMED)
    assert here.lane(a).phase is CleanupPhase.ARMED
    reaches(here, a, ActivationPhase.STOPPED, within_ms=900_000)


def a_host_that_says_again_that_it_is_there_disturbs_no_launch() -> None:
    here = checked(shell(11))
    a = here.deploy(PLAIN)
    here.run(4_000)
    here.start(a)
    reaches(here, a, ActivationPhase.PROBING)
    (host,) = here.hosts.values()
    here.tell(e.HostOnline(now_ms=Millis(here.now), policy=host.policy, boot_id=host.boot_id))
    assert here.lane(a).phase is ActivationPhase.PROBING
    serves_again(here)
    assert len(here.launches) == 1


# --- parks and wakes ----------------------------------------------------------------------------------------


def an_idle_park_gives_way_to_a_request_and_to_an_operator() -> None:
    for operators in (False, True):
        here, a = begun(DEEP, settings=Settings(ready_idle_ms=Millis(20_000)))
        reaches(here, a, ResidencyPhase.DRAINING_TO_PARK)
        if operators:
            here.start(a)
        else:
            client = here.ask("a")
        assert here.lane(a).gate_open
        here.run(5_000)
        assert operators or client.told == "ok"
        assert here.lane(a).gate_open


def an_operator_parks_what_drains_for_a_switch_and_keeps_it_when_the_switch_fails() -> None:
    here, a = begun(DEEP, settings=Settings(drain_timeout_ms=Millis(8_000)))
    here.deploy(attrs.evolve(DEEP, name="b"))
    here.run(4_000)
    here.ask("a", answer_ms=20_000)
    here.run(1_000)
    here.ask("b")
    reaches(here, a, ResidencyPhase.DRAINING_TO_PARK)
    key = here.park(a)
    again = here.park(a)
    here.run(5_000)
    assert here.lane(a).phase is ResidencyPhase.DRAINING_TO_PARK
    assert here.reply(again).receipt.joined  # type: ignore[union-attr]
    here.run(60_000)
    opened = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
    assert opened.phase in (operation.Phase.FAILED, operation.Phase.SUCCEEDED)
    serves_again(here)


def a_refused_park_leaves_it_serving() -> None:
    for fault, charged in (("park_refused", 5.25), ("park_refused_unsent", 5)):
        here, a = begun(DEEP)
        here.faults.percent = {fault: 100}
        key = here.park(a)
        reaches(here, a, ResidencyPhase.PARK_ARMED)
        reaches(here, a, ResidencyPhase.READY)
        assert here.lane(a).gate_open
        assert here.world.book.ledger.held_by(Lane(a, 0).owner).on(RAM) == gib(charged)  # no proof, no fall
        opened = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
        assert opened.phase is operation.Phase.FAILED
        here.faults.percent = {}
        here.park(a)
        reaches(here, a, ResidencyPhase.PARKED)


def an_engine_that_dies_while_it_drains_to_a_park_is_ended_instead() -> None:
    here, a = begun(DEEP)
    here.ask("a", answer_ms=20_000)
    here.run(1_000)
    key = here.park(a)
    here.exit(here.engines()[0])
    reaches(here, a, ActivationPhase.FAILED)
    opened = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
    assert opened.phase is operation.Phase.SUCCEEDED  # its memory is free, which is what was wanted
    serves_again_after_the_pause(here, a)


def a_victim_that_its_operator_parks_in_the_window_is_released_by_that() -> None:
    here, a = begun(DEEP, settings=Settings(admission_window_ms=Millis(10_000), drain_timeout_ms=Millis(200_000)))
    here.deploy(attrs.evolve(DEEP, name="b"))
    here.run(4_000)
    here.ask("a")
    here.run(1_000)
    client = here.ask("b")
    here.run(1_000)
    here.faults.percent = {"order_late": 100}
    here.park(a)
    reaches(here, a, ResidencyPhase.PARK_ARMED)
    (switch,) = here.world.book.switches.values()
    assert switch.phase.value == "window"
    here.run(20_000)
    here.faults.percent = {}
    assert here.lane(a).phase is ResidencyPhase.PARK_ARMED  # the window is over; the park is on its way already
    is_told(here, client)
    assert client.told == "ok"
    assert here.lane(a).phase is ResidencyPhase.PARKED


def a_victim_that_ends_by_itself_while_others_are_drained_completes_the_drain() -> None:
    here = checked(shell(11))
    small = attrs.evolve(PLAIN, ready_gib=3, cold_gib=3)
    x, y, _ = (here.deploy(attrs.evolve(small, name=name)) for name in ("x", "y", "z"))
    t = here.deploy(attrs.evolve(PLAIN, name="t", ready_gib=7, cold_gib=7))
    here.run(4_000)
    here.start(x)
    here.start(y)
    here.run(30_000)
    (engine,) = here.engines("y")
    leaves = here.ask("y", answer_ms=25_000)
    here.run(1_000)
    world_router.first_output(here, leaves, engine)
    client = here.ask("t")
    reaches(here, x, ResidencyPhase.DRAINING_TO_STOP)
    here.hang_up(leaves)  # settles when y reads idle, or with y
    here.run(35)
    here.exit(engine)
    is_told(here, client)
    assert client.told == "ok"
    assert here.lane(t).gate_open


def an_abort_that_is_never_answered_falls_back_to_the_idle_reading() -> None:
    here, _ = begun(attrs.evolve(DEEP, traits=SGLANG))
    here.faults.percent = {"abort_mute": 100}
    for begun_ in (True, False):
        client = here.ask("a", answer_ms=20_000)
        here.run(1_000)
        if begun_:
            world_router.first_output(here, client, here.engines()[0])
        here.hang_up(client)
        here.run(1_500, until=lambda: bool(cancelling(here) - {request.Phase.CANCEL_ABORT}))
        assert cancelling(here) == {request.Phase.CANCEL_IDLE if begun_ else request.Phase.CANCEL_STOP}
        here.run(10_000)


def cancelling(here: Shell) -> set[request.Phase]:
    return {state.phase for state in here.world.book.requests.values() if state.phase in request.CANCELLING}


def a_request_on_its_way_keeps_its_engine_from_parking() -> None:
    """The engine reads idle, for the request has a place and is not sent, or not in its queue."""
    here, a = begun(DEEP)
    here.dispatch_ms = 0
    client = here.ask("a", answer_ms=3_000)
    here.dispatch_ms = 9_000
    slow = here.ask("a")
    here.park(a)
    here.run(3_000)
    assert here.lane(a).phase is ResidencyPhase.DRAINING_TO_PARK
    reaches(here, a, ResidencyPhase.PARKED)
    assert (client.told, slow.told) == ("ok", "ok")


def nobody_is_released_before_every_victim_is_drained() -> None:
    """The quiet one waits for the busy one; when that one does not drain in time, both serve on."""
    here, x, y, busy, client = two_victims(
        DEEP, policies=(policy("h1", managed=8),), settings=Settings(drain_timeout_ms=Millis(8_000))
    )
    reaches(here, x, ResidencyPhase.DRAINING_TO_PARK)
    here.run(7_000)  # the quiet one has read idle many times
    assert here.lane(x).phase is ResidencyPhase.DRAINING_TO_PARK
    is_told(here, client)
    assert client.told == "unavailable"
    assert here.lane(x).gate_open
    assert here.lane(y).gate_open
    is_told(here, busy)
    assert busy.told == "ok"
    assert len(here.launches) == 2


def rows_of_requests_that_are_older_than_their_engines_end_are_let_go() -> None:
    """They are written behind: the controller may find a place whose engine is settled already."""
    here, a = begun(attrs.evolve(PLAIN, traits=CUSTOM))
    client = here.ask("a", answer_ms=LONG_MS, hangs_up_in_ms=1_000)
    here.run(6_000)
    (state,) = here.world.book.requests.values()
    assert state.phase in request.CANCELLING
    kept = here.durable["request", client.request]
    here.stop(a)
    reaches(here, a, ActivationPhase.STOPPED)
    here.run(1_000)
    here.durable["request", client.request] = kept
    here.crash()
    assert not here.world.book.requests
    assert here.world.book.running_on.get(Lane(a, 0), 0) == 0
    here.run(1_000)
    assert ("request", client.request) not in here.durable
    here.start(a)
    here.run(30_000)
    serves_again(here)


def a_stop_waits_for_the_park_in_flight() -> None:
    for fault, ends in (("park_refused", 1), ("park_refused_unsent", 1), ("", 1), ("park_left", 1)):
        here, a = begun(DEEP)
        here.faults.percent = {fault: 100} if fault else {}
        here.park(a)
        reaches(here, a, ResidencyPhase.PARK_ARMED)
        key = here.stop(a)
        assert here.lane(a).phase is ResidencyPhase.PARK_ARMED
        reaches(here, a, ActivationPhase.STOPPED, within_ms=900_000)
        opened = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
        assert opened.phase is operation.Phase.SUCCEEDED
        assert len(here.launches) == ends


def a_stop_waits_for_the_wake_in_flight() -> None:
    for fault in (
        "wake_mute", "wake_fails", "wake_mismatch", "wake_refused_unsent", "order_lost", "order_silent", ""
    ):  # fmt: skip
        here, a = begun(DEEP)
        here.park(a)
        reaches(here, a, ResidencyPhase.PARKED)
        here.ask("a")
        reaches(here, a, ResidencyPhase.WAKE_ARMED)
        here.faults.percent = {fault: 100} if fault else {}
        here.stop(a)
        assert here.lane(a).phase is ResidencyPhase.WAKE_ARMED
        ends(here, a)
        here.faults.percent = {}
        reaches(here, a, ActivationPhase.STOPPED, within_ms=900_000)
        assert not here.engines()


def a_wake_that_was_never_asked_for_leaves_the_copy_as_it_was() -> None:
    here, a = begun(DEEP)
    here.park(a)
    reaches(here, a, ResidencyPhase.PARKED)
    here.faults.percent = {"wake_refused_unsent": 100}
    client = here.ask("a")
    reaches(here, a, ResidencyPhase.WAKE_ARMED)
    reaches(here, a, ResidencyPhase.PARKED)
    held = here.world.book.ledger.held_by(Lane(a, 0).owner)
    assert held.phase is Phase.PARKED
    assert client.told == "insufficient_memory"
    assert len(here.launches) == 1
    here.faults.percent = {}
    serves_again(here)
    assert len(here.launches) == 1


def an_engine_that_dies_in_a_wake_is_started_again_for_whoever_waits() -> None:
    """Whichever is told first, its exit or the wake's lost answer."""
    for seen_first in (True, False):
        here, a = begun(DEEP)
        here.park(a)
        reaches(here, a, ResidencyPhase.PARKED)
        here.faults.percent = {"order_silent": 100}
        client = here.ask("a")
        reaches(here, a, ResidencyPhase.WAKE_ARMED)
        (engine,) = here.engines()
        token = here.lane(a).run.token
        assert token is not None
        lost = e.OrderLost(now_ms=Millis(here.now), incarnation=engine.incarnation, token=token, reason="closed")
        exited = e.EngineExited(
            now_ms=Millis(here.now), incarnation=engine.incarnation, role=Role.API, status=1, reason="segfault"
        )
        here.faults.percent = {}
        here.exit(engine, news=False)
        for news in (exited, lost) if seen_first else (lost, exited):
            here.tell(news)
        here.run(120_000, until=lambda here=here, a=a: here.lane(a).gate_open)
        assert here.lane(a).gate_open, seen_first
        here.run(60_000)
        assert client.told == "ok", seen_first
        assert len(here.launches) == 2


def a_park_whose_answer_never_comes_is_looked_at_and_adopted() -> None:
    here, a = begun(DEEP)
    here.faults.percent = {"order_silent": 100}
    key = here.park(a)
    reaches(here, a, CleanupPhase.RECONCILING)
    here.faults.percent = {}
    reaches(here, a, ResidencyPhase.PARKED, within_ms=900_000)
    opened = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
    assert opened.phase is operation.Phase.SUCCEEDED
    serves_again(here)
    assert len(here.launches) == 1


def a_park_that_left_too_much_is_ended_and_one_whose_engine_is_gone_is_settled() -> None:
    for gone in (False, True):
        here, a = begun(DEEP)
        here.faults.percent = {"park_left": 100}
        key = here.park(a)
        reaches(here, a, ResidencyPhase.PARK_ARMED)
        here.run(600)
        if gone:
            here.reboot(here.hosts[HostId("h1")])
        reaches(here, a, ActivationPhase.FAILED if gone else ActivationPhase.STOPPED, within_ms=900_000)
        opened = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
        assert opened.phase is operation.Phase.SUCCEEDED  # the memory is free, if not as it was asked
        serves_again(here)
        assert len(here.launches) == 2


def an_engine_that_falls_silent_while_it_drains_is_doubted_too() -> None:
    here, a = begun(DEEP)
    client = here.ask("a", answer_ms=100_000)
    here.run(2_000)
    here.park(a)
    reaches(here, a, ResidencyPhase.DRAINING_TO_PARK)
    here.tell(
        e.EngineSilent(now_ms=Millis(here.now), incarnation=here.lane(a).run.incarnation, reason="it answers nothing")
    )
    assert Lane(a, 0) in here.world.book.doubted
    is_told(here, client)
    serves_again(here)


def who_asks_for_a_copy_whose_engine_has_died_is_served_by_the_next_run() -> None:
    for late in (False, True):  # before its end is heard, while the wake waits for room; or while it is cleaned up
        here, a = begun(attrs.evolve(DEEP, parked_gib=0.5))
        here.park(a)
        reaches(here, a, ResidencyPhase.PARKED)
        (engine,) = here.hosts[HostId("h1")].engines.values()
        if late:
            here.exit(engine)
            reaches(here, a, *CleanupPhase)
            client = here.ask("a")
        else:
            here.hosts[HostId("h1")].foreign_bytes = gib(7)
            here.run(10_000)
            client = here.ask("a")
            reaches(here, a, ResidencyPhase.WAKE_PLANNED)
            here.exit(engine)
            here.hosts[HostId("h1")].foreign_bytes = gib(0)
        is_told(here, client)
        assert client.told == "ok"
        assert len(here.launches) == 2


def a_start_while_it_parks_wakes_it_once_it_is_parked() -> None:
    here, a = begun(DEEP)
    here.park(a)
    reaches(here, a, ResidencyPhase.PARK_ARMED)
    here.start(a)
    assert here.lane(a).phase is ResidencyPhase.PARK_ARMED
    here.run(60_000)
    assert here.lane(a).gate_open
    assert len(here.launches) == 1


def a_silent_canary_is_asked_again_before_anybody_is_served() -> None:
    here, a = begun(DEEP)
    here.park(a)
    reaches(here, a, ResidencyPhase.PARKED)
    here.faults.percent = {"wake_mute": 100}
    client = here.ask("a")
    reaches(here, a, CleanupPhase.RECONCILING)
    assert client.told is None
    is_told(here, client)
    assert client.told == "ok"
    assert len(here.launches) == 1


def a_lost_wake_is_adopted_if_it_answers_and_started_afresh_if_it_is_gone() -> None:
    for gone in (False, True):
        here, a = begun(DEEP)
        here.park(a)
        reaches(here, a, ResidencyPhase.PARKED)
        client = here.ask("a")
        reaches(here, a, ResidencyPhase.WAKE_ARMED)
        (host,) = here.hosts.values()
        here.run(1_000)
        if gone:
            here.reboot(host)
        else:
            here.drop_session(host)
        reaches(here, a, CleanupPhase.RECONCILING)
        is_told(here, client)
        assert client.told == "ok"
        assert len(here.launches) == (2 if gone else 1)


def an_engine_that_dies_while_it_parks_or_wakes_is_ended_and_starts_afresh() -> None:
    for waking in (False, True):
        here, a = begun(DEEP)
        here.park(a)
        reaches(here, a, ResidencyPhase.PARKED if waking else ResidencyPhase.PARK_ARMED)
        if waking:
            here.ask("a")
            reaches(here, a, ResidencyPhase.WAKE_ARMED)
        here.exit(here.engines()[0])
        ends(here, a)
        here.run(120_000)
        serves_again(here)
        assert len(here.launches) == 2


def a_parked_model_that_somebody_wakes_is_no_victim_any_more() -> None:
    """It was chosen while it slept; meanwhile a request woke it, so the switch does without, or fails."""
    here = checked(shell(11, policies=(policy("h1", managed=7),), settings=Settings(drain_timeout_ms=Millis(5_000))))
    sleeper = attrs.evolve(DEEP, name="p", ready_gib=3, cold_gib=3, parked_gib=1)
    p, v, t = (here.deploy(one) for one in (sleeper, attrs.evolve(PLAIN, name="v", ready_gib=3, cold_gib=3),
                                            attrs.evolve(PLAIN, name="t", ready_gib=7, cold_gib=7)))  # fmt: skip
    here.run(4_000)
    here.start(p)
    here.run(20_000)
    here.park(p)
    reaches(here, p, ResidencyPhase.PARKED)
    here.start(v)
    here.run(20_000)
    busy = here.ask("v", answer_ms=20_000)
    here.run(500)
    target = here.ask("t")
    here.run(500)
    woken = here.ask("p")
    here.run(10)
    assert here.lane(p).phase is ResidencyPhase.WAKE_PLANNED
    here.run(300_000)
    assert busy.told == "ok"
    assert woken.told in ("ok", "unavailable")
    assert target.told in ("ok", "unavailable", "insufficient_resources")
    assert t in here.world.book.deployments


def a_victim_that_comes_back_elsewhere_stays_another_switchs_victim() -> None:
    """Its first switch ends while it drains for a second one: only the second may call that off."""
    here = checked(shell(11, policies=(policy("h1"), policy("h2"))))
    h1, h2 = HostId("h1"), HostId("h2")
    a = here.deploy(attrs.evolve(PLAIN, hosts=(h1, h2)))
    here.deploy(attrs.evolve(PLAIN, name="b", hosts=(h1,), load_ms=60_000))
    here.deploy(attrs.evolve(PLAIN, name="c", hosts=(h2,)))
    here.run(4_000)
    here.ask("a")
    here.run(20_000)
    assert here.lane(a).run.host == h1
    first = here.ask("b")
    here.run(20_000)
    back = here.ask("a", answer_ms=100_000)
    here.run(15_000)
    assert here.lane(a).run.host == h2
    second = here.ask("c")
    reaches(here, a, ResidencyPhase.DRAINING_TO_STOP)
    here.run(60_000, until=lambda: first.told is not None)
    assert first.told == "ok"
    here.run(200_000)
    assert back.told == "ok"
    assert second.told in ("ok", "unavailable")


# --- switches: what its victims and its target do meanwhile ------------------------------------------------------


def a_switch(model: Model, **options: object) -> tuple[Shell, DeploymentId, Client]:
    """A window of ten seconds for the last instance of a busy model, opened by a request for another one."""
    settings = Settings(admission_window_ms=Millis(10_000), drain_timeout_ms=Millis(200_000))
    here, a = begun(model, settings=settings, **options)
    here.deploy(attrs.evolve(model, name="b"))
    here.run(4_000)
    here.ask("a", answer_ms=1_000)
    here.run(500)
    client = here.ask("b")
    here.run(100)
    (switch,) = here.world.book.switches.values()
    assert switch.phase.value == "window"
    return here, a, client


def a_victim_that_is_stopped_in_the_window_gives_way_by_that() -> None:
    here, a, client = a_switch(DEEP)
    here.ask("a", answer_ms=25_000)
    here.run(1_000)
    here.stop(a)
    assert here.lane(a).phase is ResidencyPhase.DRAINING_TO_STOP
    here.run(12_000)
    assert here.lane(a).phase is ResidencyPhase.DRAINING_TO_STOP  # asked to park by the switch: it gives more already
    is_told(here, client)
    assert client.told == "ok"
    assert here.ask("a").told == "deployment_stopped"


def a_victim_whose_engine_dies_in_the_window_is_ended_not_parked() -> None:
    here, a, client = a_switch(DEEP)
    here.faults.percent = {"order_late": 100}
    here.exit(here.engines("a")[0])
    here.run(12_000)
    here.faults.percent = {}
    assert here.lane(a).phase is CleanupPhase.ARMED
    is_told(here, client)
    assert client.told == "ok"


def a_victim_whose_end_gives_back_its_last_place_is_gone_before_its_traffic_counts() -> None:
    here, a, client = a_switch(PLAIN)
    lost = here.ask("a", answer_ms=25_000)
    here.run(1_000)
    here.exit(here.engines("a")[0])
    reaches(here, a, ActivationPhase.FAILED)  # the proof that ends its run settles the place and leaves the window
    (switch,) = here.world.book.switches.values()
    assert switch.phase.value == "recheck"
    assert not here.world.book.running_on.get(Lane(a, 0), 0)
    is_told(here, client)
    assert (lost.told, client.told) == ("engine_unreachable", "ok")


def a_victim_that_becomes_unknown_in_the_window_ends_the_switch() -> None:
    here, a, client = a_switch(DEEP)
    here.faults.percent = {"order_lost": 100, "probe_mute": 100}
    here.park(a)
    reaches(here, a, CleanupPhase.RECONCILING)
    assert [one.phase.value for one in here.world.book.switches.values()] == ["failed"]
    here.faults.percent = {}
    is_told(here, client)
    assert client.told == "ok"


WINDOW = Settings(admission_window_ms=Millis(10_000), drain_timeout_ms=Millis(60_000))


def two_victims(
    kind: Model = PLAIN,
    settings: Settings = WINDOW,
    policies: tuple[HostPolicy, ...] = (policy("h1"),),
) -> tuple[Shell, DeploymentId, DeploymentId, Client, Client]:
    """Two small models of which one is busy, and a switch that needs the room of both."""
    here = checked(shell(11, settings=settings, policies=policies))
    small = attrs.evolve(kind, ready_gib=3, cold_gib=3)
    x, y = (here.deploy(attrs.evolve(small, name=name)) for name in ("x", "y"))
    here.deploy(attrs.evolve(PLAIN, name="t", ready_gib=7, cold_gib=7))
    here.run(4_000)
    here.start(x)
    here.start(y)
    here.run(30_000)
    busy = here.ask("y", answer_ms=40_000)
    here.run(1_000)
    return here, x, y, busy, here.ask("t")


def one_of_two_victims_is_stopped_by_its_operator_in_the_window() -> None:
    here, x, _, busy, client = two_victims()
    here.run(100)
    here.stop(x)
    reaches(here, x, ActivationPhase.STOPPED)
    (switch,) = here.world.book.switches.values()
    assert switch.phase.value == "window"
    is_told(here, client)
    assert (busy.told, client.told) == ("ok", "ok")


def one_of_two_victims_dies_while_the_other_still_drains() -> None:
    here, x, _, busy, client = two_victims()
    reaches(here, x, ResidencyPhase.DRAINING_TO_STOP)
    here.run(100)
    here.exit(here.engines("x")[0])
    here.run(8_000)
    (switch,) = here.world.book.switches.values()
    assert switch.phase.value == "draining"
    is_told(here, client)
    assert (busy.told, client.told) == ("ok", "ok")


def a_target_that_comes_up_elsewhere_needs_no_switch_any_more() -> None:
    """In the window, in the drain, and in the release, which cannot be called back."""
    for load_ms, fault, was in ((6_000, "", "window"), (25_000, "", "draining"), (16_000, "idle_busy", "releasing")):
        h1, h2 = HostId("h1"), HostId("h2")
        settings = Settings(admission_window_ms=Millis(10_000), drain_timeout_ms=Millis(60_000))
        here = checked(shell(11, policies=(policy("h1"), policy("h2")), settings=settings))
        v = here.deploy(attrs.evolve(PLAIN, name="v", hosts=(h1,)))
        two = attrs.evolve(PLAIN, name="t", hosts=(h1, h2), instances=2, load_ms=load_ms)
        t = here.deploy(two)
        here.run(4_000)
        here.ask("v")
        here.run(20_000)
        here.ask("v", answer_ms=1_000 if fault else 40_000)
        here.run(500)
        here.faults.percent = {fault: 100} if fault else {}
        here.start(t, evict=True)
        here.run(1_000, until=lambda: bool(here.world.book.switches))  # noqa: B023
        (switch,) = here.world.book.switches.values()
        here.run(60_000, until=lambda: bool(here.world.book.serving(t)))  # noqa: B023
        phases = [move for move in here.log if "switch" in move]
        assert any(was in line for line in phases), phases
        here.faults.percent = {}
        here.run(120_000)
        assert here.world.book.switches[switch.switch].phase.value in ("done", "failed")
        serves_again(here, "t")
        assert v in here.world.book.deployments


def a_wake_whose_files_changed_evicts_nobody_and_may_be_asked_for_again() -> None:
    here, a = begun(DEEP)
    here.deploy(attrs.evolve(DEEP, name="b"))
    here.run(4_000)
    serves_again(here, "b")
    reaches(here, a, ResidencyPhase.PARKED)
    here.spoiled.add(a)
    client = here.ask("a")
    here.run(10_000)
    assert client.told == "checkpoint_mismatch"
    assert here.lane(a).is_parked
    here.spoiled.clear()
    serves_again(here, "a")


# --- requests -------------------------------------------------------------------------------------------------


def a_slow_router_loses_its_place_to_nobody_but_the_end_of_the_engine() -> None:
    """Admitted, and not sent yet, when the deadline passes, and when the engine ends."""
    here, a = begun(PLAIN, settings=Settings(request_deadline_ms=Millis(5_000)))
    here.dispatch_ms = 60_000
    clients = [here.ask("a") for _ in range(4)]
    here.run(6_000)
    assert {here.world.book.requests[one.request].phase for one in clients if not one.settled} <= {
        request.Phase.ADMITTED, request.Phase.DISPATCHED, request.Phase.CANCEL_CLOSED, request.Phase.COMPLETING,
    }  # fmt: skip
    here.exit(here.engines()[0])
    here.run(90_000)
    assert all(client.told is not None for client in clients)
    here.dispatch_ms = 20
    here.run(60_000)
    assert here.lane(a).phase is ActivationPhase.FAILED


def a_request_whose_deadline_passes_before_it_is_sent_is_cut_when_it_is() -> None:
    here = checked(shell(11))
    here.deploy(attrs.evolve(PLAIN, deadline_ms=Millis(10_000)))
    here.run(4_000)
    here.dispatch_ms = 60_000
    clients = [here.ask("a") for _ in range(8)]
    here.run(11_000)
    phases = {state.phase for state in here.world.book.requests.values()}
    assert request.Phase.ADMITTED in phases  # only its router knows whether the first byte left
    here.run(90_000)
    assert not here.world.book.requests
    assert {client.told for client in clients} <= {"ok", "deadline_exceeded"}


def a_late_eof_still_proves_that_the_engine_is_done() -> None:
    here, a = begun(PLAIN)
    here.faults.percent = {"eof_late": 100}
    here.ask("a", stream=False, answer_ms=LONG_MS, hangs_up_in_ms=1_000)
    here.run(32_000)
    (state,) = here.world.book.requests.values()
    assert state.phase is request.Phase.CANCEL_STOP  # thirty seconds without an EOF
    here.run(60_000)
    assert not here.world.book.requests
    assert here.lane(a).gate_open


def places_that_only_a_stop_gives_back_restart_the_engine() -> None:
    here, a = begun(attrs.evolve(PLAIN, traits=CUSTOM))
    lost = [here.ask("a", answer_ms=LONG_MS) for _ in range(32)]
    here.run(1_000)
    for client in lost[:5]:
        world_router.first_output(here, client, here.engines()[0])
    for client in lost:
        here.hang_up(client)
    serves_again(here)
    assert len(here.launches) == 2
    assert here.lane(a).gate_open


def a_waiter_that_expires_while_every_place_is_taken_hears_that() -> None:
    here, _ = begun(attrs.evolve(PLAIN, deadline_ms=Millis(20_000)))
    running = [here.ask("a", answer_ms=60_000) for _ in range(32)]
    here.run(1_000)
    for client in running:
        world_router.first_output(here, client, here.engines()[0])
    late = here.ask("a")
    here.run(19_900)
    assert late.told is None
    here.run(200)
    assert late.told == "queue_full"
    here.run(90_000)
    assert {client.told for client in running} == {"ok"}


def a_kill_keeps_every_way_in_which_a_cut_request_can_settle() -> None:
    for model, phase in (
        (PLAIN, request.Phase.CANCEL_CLOSED),
        (attrs.evolve(PLAIN, traits=SGLANG), request.Phase.CANCEL_ABORT),
    ):
        for eof in (False, True):
            here, a = begun(model)
            here.faults.percent = {"eof_mute": 100, "idle_silent": 100}
            client = here.ask("a", stream=False, answer_ms=LONG_MS)
            here.run(1_000)
            here.hang_up(client)
            at = Millis(here.now)
            if eof and phase is request.Phase.CANCEL_CLOSED:
                here.tell(e.UpstreamEnded(now_ms=at, request=client.request, half_closed_at_ms=at, eof_at_ms=at))
            here.run(100, until=lambda here=here, client=client: ("request", client.request) in here.durable)  # type: ignore[misc]
            here.run(60)
            assert cancelling(here) == {phase}
            here.crash()
            kept = phase is request.Phase.CANCEL_ABORT or eof
            assert cancelling(here) == {phase if kept else request.Phase.CANCEL_STOP}
            here.run(10_000)
            assert bool(here.world.book.requests) == (not kept)
            here.stop(a)
            here.run(120_000)
            assert not here.world.book.requests


def what_the_engine_was_not_told_by_id_is_not_ended_by_id() -> None:
    here, a = begun(attrs.evolve(PLAIN, traits=SGLANG))
    for output, phase in ((True, request.Phase.CANCEL_IDLE), (False, request.Phase.CANCEL_STOP)):
        client = here.ask("a", nameable=False, stream=False, answer_ms=20_000)
        here.run(2_000)
        if output:
            world_router.first_output(here, client, here.engines()[0])
        here.hang_up(client)  # the router of this world fails a test that has it aborted
        assert cancelling(here) == {phase}
        here.run(60_000)
        assert bool(here.world.book.requests) == (not output)
    here.stop(a)
    here.run(120_000)
    assert not here.world.book.requests


def a_reading_older_than_the_cut_settles_nothing() -> None:
    here, a = begun(PLAIN)
    client = here.ask("a", answer_ms=20_000)
    here.run(2_000)
    world_router.first_output(here, client, here.engines()[0])
    read_at, run = Millis(here.now), here.lane(a).run.incarnation
    here.hang_up(client)
    here.run(5)
    (state,) = here.world.book.requests.values()
    assert state.phase is request.Phase.CANCEL_IDLE
    here.tell(
        e.LoadReported(
            now_ms=Millis(here.now), incarnation=run, running=0, waiting=0, kv_usage_ppm=None, read_at_ms=read_at
        )
    )
    assert here.world.book.requests
    here.run(10_000)
    assert not here.world.book.requests


def an_eof_that_is_told_twice_counts_once() -> None:
    here, _ = begun(PLAIN)
    here.faults.percent = {"eof_mute": 100}
    client = here.ask("a", stream=False, answer_ms=LONG_MS, hangs_up_in_ms=1_000)
    here.run(1_010)
    for late in (0, 5):
        at = Millis(here.now + late)
        here.tell(e.UpstreamEnded(now_ms=at, request=client.request, half_closed_at_ms=at, eof_at_ms=at))
    (state,) = here.world.book.requests.values()
    assert state.eof_at_ms == here.now
    here.run(10_000)
    assert not here.world.book.requests


def a_proof_from_before_the_doubt_opens_nothing() -> None:
    here, a = begun(PLAIN)
    (engine,) = here.engines()
    same, usable = world_hosts.same_engine(here, engine), world_hosts.usable_now(here, engine)
    here.run(1_000)
    here.faults.percent = {"probe_mute": 100}
    here.crash()
    here.run(1_000, until=lambda: bool(here.world.book.looks))
    token = here.world.book.looks[Lane(a, 0)]
    here.tell(e.Probed(now_ms=Millis(here.now), incarnation=engine.incarnation, token=token, same=same, usable=usable))
    assert not here.lane(a).gate_open
    serves_again(here)


def news_that_crosses_a_cut_changes_nothing() -> None:
    """The router task says what it saw before it saw that the world had ended the request."""
    here, a = begun(attrs.evolve(PLAIN, deadline_ms=Millis(5_000)))
    for late in ("errored", "lost", "gone", "output", "rejected", "finished"):
        client = here.ask("a", answer_ms=LONG_MS)
        here.run(60_000, until=lambda client=client: client.cut)  # type: ignore[misc]
        (state,) = here.world.book.requests.values()
        assert state.phase is request.Phase.CANCEL_CLOSED
        engine = here.engines()[0]
        match late:
            case "lost":
                world_router.upstream_lost(here, client)
            case "gone":
                here.hang_up(client)
            case "finished":
                world_router.finish(here, client, engine)
            case "output":
                world_router.first_output(here, client, engine)
            case _:
                world_router.tells(here, client, engine, late)
        (after,) = here.world.book.requests.values()
        assert after == state
        here.run(60_000)
        # A whole answer that crossed the cut leaves nothing to half-close: its place waits for the engine's end.
        assert bool(here.world.book.requests) == (late in ("rejected", "finished"))
        here.stop(a)
        here.run(60_000)
        here.start(a)
        here.run(30_000)


# --- deployments ------------------------------------------------------------------------------------------------


def what_no_host_offers_is_not_deployed() -> None:
    here, _ = begun(PLAIN)
    spec = attrs.evolve(attrs.evolve(PLAIN, name="x").spec, hosts=())
    key = here.give(
        e.DeployAsked(now_ms=Millis(here.now), command=here.command(), deployment=DeploymentId("x"), spec=spec)
    )
    here.run(1_000)
    assert here.reply(key).code == "profile_not_published"
    assert DeploymentId("x") not in here.world.book.deployments


def a_checkpoint_that_comes_back_is_measured_again_when_somebody_asks() -> None:
    for note in ("bad checkpoint_mismatch", "bad not_found"):
        here, a = begun(PLAIN)
        here.revise(a, attrs.evolve(PLAIN, note=note))
        here.run(60_000)
        here.models[a][2] = attrs.evolve(PLAIN, hosts=tuple(here.hosts))  # the files are back
        here.ask("a")
        here.run(30_000)
        serves_again(here)


def what_serves_is_started_again_on_other_files_once_they_are_measured() -> None:
    here, a = begun(PLAIN)
    here.digests[a] = "sha256:others"
    here.revise(a, PLAIN)  # the same document: it serves on until it is known that its files are others
    here.run(30_000)
    assert here.lane(a).digest == "sha256:others"
    assert len(here.launches) == 2
    serves_again(here)


def a_measurement_that_is_told_again_changes_nothing() -> None:
    here, a = begun(PLAIN)
    now = Millis(here.now)
    again = e.RevisionResolved(
        now_ms=now,
        deployment=a,
        revision=1,
        digest="sha256:a1",
        weight_bytes=Bytes(1),
        plans={HostId("h1"): PLAIN.plan},
    )
    here.tell(again)
    here.tell(e.RevisionUnusable(now_ms=now, deployment=a, revision=1, code="not_found", reason="gone"))
    here.tell(attrs.evolve(again, revision=7))
    here.tell(attrs.evolve(again, deployment=DeploymentId("nobody")))
    assert here.lane(a).gate_open
    serves_again(here)
    here.revise(a, attrs.evolve(PLAIN, note="bad"))
    here.run(60_000)
    here.tell(attrs.evolve(again, revision=2))
    assert here.ask("a").told == "checkpoint_unusable"
    here.revise(a, PLAIN)
    here.run(5_000)
    here.start(a)
    here.run(30_000)
    here.delete(a, stop=True)
    here.tell(attrs.evolve(again, revision=3))
    for code in ("not_found", "checkpoint_unusable"):
        here.tell(e.RevisionUnusable(now_ms=Millis(here.now), deployment=a, revision=3, code=code, reason="too late"))
    here.run(60_000)
    assert a not in here.world.book.deployments


CORNERS: tuple[Callable[[], None], ...] = (
    a_wake_whose_files_changed_evicts_nobody_and_may_be_asked_for_again,
    old_news_moves_nothing_in_any_phase,
    old_news_moves_nothing_of_what_ends_or_is_unknown,
    a_late_proof_that_nothing_is_left_settles_an_unknown_launch,
    late_proofs_spend_the_attempts_like_prompt_ones,
    three_lost_launches_that_are_gone_spend_the_attempts,
    a_launch_that_still_loads_past_its_bound_is_ended_and_tried_again,
    an_unknown_launch_that_exits_is_looked_at_at_once,
    a_look_that_finds_nothing_ends_what_its_operator_stopped_meanwhile,
    an_idle_wait_that_is_never_answered_is_given_up,
    a_host_that_says_again_that_it_is_there_disturbs_no_launch,
    an_idle_park_gives_way_to_a_request_and_to_an_operator,
    an_operator_parks_what_drains_for_a_switch_and_keeps_it_when_the_switch_fails,
    a_refused_park_leaves_it_serving,
    an_engine_that_dies_while_it_drains_to_a_park_is_ended_instead,
    a_victim_that_its_operator_parks_in_the_window_is_released_by_that,
    a_victim_that_ends_by_itself_while_others_are_drained_completes_the_drain,
    an_abort_that_is_never_answered_falls_back_to_the_idle_reading,
    a_request_on_its_way_keeps_its_engine_from_parking,
    nobody_is_released_before_every_victim_is_drained,
    rows_of_requests_that_are_older_than_their_engines_end_are_let_go,
    a_stop_waits_for_the_park_in_flight,
    a_stop_waits_for_the_wake_in_flight,
    a_wake_that_was_never_asked_for_leaves_the_copy_as_it_was,
    an_engine_that_dies_in_a_wake_is_started_again_for_whoever_waits,
    a_park_whose_answer_never_comes_is_looked_at_and_adopted,
    a_park_that_left_too_much_is_ended_and_one_whose_engine_is_gone_is_settled,
    an_engine_that_falls_silent_while_it_drains_is_doubted_too,
    who_asks_for_a_copy_whose_engine_has_died_is_served_by_the_next_run,
    a_start_while_it_parks_wakes_it_once_it_is_parked,
    a_silent_canary_is_asked_again_before_anybody_is_served,
    a_lost_wake_is_adopted_if_it_answers_and_started_afresh_if_it_is_gone,
    an_engine_that_dies_while_it_parks_or_wakes_is_ended_and_starts_afresh,
    a_parked_model_that_somebody_wakes_is_no_victim_any_more,
    a_victim_that_comes_back_elsewhere_stays_another_switchs_victim,
    a_victim_that_is_stopped_in_the_window_gives_way_by_that,
    a_victim_whose_engine_dies_in_the_window_is_ended_not_parked,
    a_victim_whose_end_gives_back_its_last_place_is_gone_before_its_traffic_counts,
    a_victim_that_becomes_unknown_in_the_window_ends_the_switch,
    one_of_two_victims_is_stopped_by_its_operator_in_the_window,
    one_of_two_victims_dies_while_the_other_still_drains,
    a_target_that_comes_up_elsewhere_needs_no_switch_any_more,
    a_slow_router_loses_its_place_to_nobody_but_the_end_of_the_engine,
    a_request_whose_deadline_passes_before_it_is_sent_is_cut_when_it_is,
    a_late_eof_still_proves_that_the_engine_is_done,
    places_that_only_a_stop_gives_back_restart_the_engine,
    a_waiter_that_expires_while_every_place_is_taken_hears_that,
    a_kill_keeps_every_way_in_which_a_cut_request_can_settle,
    what_the_engine_was_not_told_by_id_is_not_ended_by_id,
    a_reading_older_than_the_cut_settles_nothing,
    an_eof_that_is_told_twice_counts_once,
    a_proof_from_before_the_doubt_opens_nothing,
    news_that_crosses_a_cut_changes_nothing,
    what_no_host_offers_is_not_deployed,
    a_checkpoint_that_comes_back_is_measured_again_when_somebody_asks,
    what_serves_is_started_again_on_other_files_once_they_are_measured,
    a_measurement_that_is_told_again_changes_nothing,
)
