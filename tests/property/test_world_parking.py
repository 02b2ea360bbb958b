"""Parked models in a whole world: what a park leaves, how many there may be, who leaves first, and who never does."""

from __future__ import annotations

from typing import Any

import attrs
from simulation import checked
from world import Shell, shell
from world_values import CUSTOM, RAM, SGLANG, VLLM, Model, gib, policy

from capyctl.control import views
from capyctl.control.book import Settings
from capyctl.fsm import operation
from capyctl.fsm.activation import ActivationPhase
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.switch import Released
from capyctl.fsm.types import Activation, Bytes, DeploymentId, HostId, Lane, Millis, Phase, Residency, StopKind
from capyctl.ledger.parked import growth_bytes, may_be_left
from capyctl.ledger.types import Allocation, Measured, Plan

DEEP = Model(name="a", traits=VLLM, residency=Residency.DEEP, ready_gib=4, cold_gib=4, parked_gib=0.5)
WIDE = (policy("h1", capacity=40, managed=30, parked=8, max_parked=4),)


def world(*models: Model, **options: Any) -> tuple[Shell, list[DeploymentId]]:
    """These models on a roomy host, every step checked."""
    here = checked(shell(3, **{"policies": WIDE, **options}))
    identities = [here.deploy(model) for model in models]
    here.run(4_000)
    return here, identities


def named(*names: str, **changes: Any) -> list[Model]:
    return [attrs.evolve(DEEP, name=name, **changes) for name in names]


def parked(here: Shell, *identities: DeploymentId) -> None:
    """Start and park each of them, one after the other."""
    for identity in identities:
        here.start(identity)
        here.run(30_000, until=lambda one=identity: here.lane(one).gate_open)
        here.park(identity)
        here.run(60_000, until=lambda one=identity: here.lane(one).is_parked)
        assert here.lane(identity).is_parked
        here.run(1_000)


def charged(here: Shell, identity: DeploymentId) -> Bytes:
    return here.world.book.ledger.held_by(Lane(identity, 0).owner).on(RAM)


def left(here: Shell) -> StopKind | None:
    """Why the first model was stopped."""
    stops = [row.run.stopped for row in here.world.book.instances.values() if row.run.stopped is not None]
    return stops[0].kind if stops else None


# --- what is left ----------------------------------------------------------------------------------------


def plan(ready: int, copy: int, provenance: str) -> Plan:
    phases = {
        Phase.READY: Allocation(bytes={RAM: Bytes(ready)}),
        Phase.PARKED: Allocation(bytes={RAM: Bytes(copy)}),
    }
    return Plan(phases=phases, provenance={Phase.PARKED: provenance}, initialize_ms=1, wake_ms=1, context_tokens=1)


def test_a_placeholder_may_be_passed_by_a_quarter_of_what_is_to_come_free_and_a_declared_residue_by_nothing() -> None:
    assert may_be_left(plan(40, 4, "placeholder")) == {RAM: 13}
    assert may_be_left(plan(40, 4, "measured")) == {RAM: 13}
    assert may_be_left(plan(40, 4, "declared")) == {RAM: 4}
    assert may_be_left(plan(4, 4, "placeholder")) == {}  # nothing is emptied there


def test_what_a_park_leaves_is_charged_from_then_on_to_every_instance_of_the_revision() -> None:
    here, (a,) = world(attrs.evolve(DEEP, residue_gib=0.75, instances=2))
    here.start(a)
    here.run(30_000, until=lambda: here.lane(a).gate_open and here.lane(a, 1).gate_open)
    here.park(a)
    here.run(60_000, until=lambda: here.lane(a).is_parked and here.lane(a, 1).is_parked)
    for index in (0, 1):
        held = here.world.book.ledger.held_by(Lane(a, index).owner)
        assert (held.phase, held.on(RAM)) == (Phase.PARKED, gib(0.75))
        row = here.lane(a, index)
        assert row.plan.measured[Phase.PARKED][RAM] == Measured(seen_bytes=gib(0.75), planned_bytes=gib(0.5))
    found = here.world.book.deployments[a].plans
    assert {one.at(Phase.PARKED).on(RAM) for one in found.values()} == {gib(0.75)}
    here.stop(a)
    here.run(60_000)
    parked(here, a)  # the next launch is sized by it
    assert charged(here, a) == gib(0.75)


def test_less_than_the_placeholder_is_charged_as_the_placeholder() -> None:
    here, (a,) = world(attrs.evolve(DEEP, residue_gib=0.1))
    parked(here, a)
    assert charged(here, a) == gib(0.5)


def test_a_launch_whose_copy_more_than_doubled_stops_instead_of_parking_again_and_its_next_one_parks() -> None:
    here, (a,) = world(attrs.evolve(DEEP, residue_gib=0.5, residue_grows_gib=0.3))
    parked(here, a)
    for _ in range(2):  # 0.8, then 1.1: more than twice the first
        here.ask("a")
        here.run(60_000, until=lambda: here.lane(a).gate_open)
        here.park(a)
        here.run(60_000, until=lambda: here.lane(a).is_parked)
    assert charged(here, a) == gib(1.1)
    view = views.deployment(here.world, a, Millis(here.now))
    assert view is not None
    assert view["instances"][0]["parked"] == {
        "first_bytes": {RAM: str(gib(0.5))},
        "latest_bytes": {RAM: str(gib(1.1))},
        "growth": True,
    }
    here.ask("a")
    here.run(60_000, until=lambda: here.lane(a).gate_open)
    key = here.park(a)
    here.run(60_000, until=lambda: here.lane(a).phase is ActivationPhase.STOPPED)
    assert left(here) is StopKind.GROWTH
    opened = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
    assert opened.phase is operation.Phase.SUCCEEDED
    client = here.ask("a")
    here.run(60_000, until=lambda: client.told is not None)
    assert client.told == "ok"  # on demand as before
    here.park(a)
    here.run(60_000, until=lambda: here.lane(a).is_parked)
    assert len(here.launches) == 2


def test_how_far_a_copy_may_grow_is_the_hosts_to_say() -> None:
    host = policy("h1")
    assert growth_bytes(host, Bytes(100)) == 100
    assert growth_bytes(attrs.evolve(host, parked_growth_percent=50), Bytes(100)) == 50
    assert growth_bytes(attrs.evolve(host, parked_growth_bytes=Bytes(7)), Bytes(100)) == 7
    assert growth_bytes(attrs.evolve(host, parked_growth_percent=None), Bytes(100)) is None


# --- room in the parked set --------------------------------------------------------------------------------


def test_a_park_makes_room_among_the_parked_least_recently_used_first() -> None:
    few = (policy("h1", capacity=40, managed=30, parked=8, max_parked=2),)
    here, (a, b, c) = world(*named("a", "b", "c"), policies=few)
    parked(here, a, b)
    here.ask("a")  # now b is the one that nobody used for longest
    here.run(30_000, until=lambda: here.lane(a).gate_open)
    here.run(2_000)
    here.park(a)
    here.run(30_000, until=lambda: here.lane(a).is_parked)
    parked(here, c)
    assert here.lane(a).is_parked
    assert here.lane(b).phase is ActivationPhase.STOPPED
    assert here.lane(b).run.stopped.kind is StopKind.RECLAIM
    client = here.ask("b")  # it is on demand still
    here.run(60_000, until=lambda: client.told is not None)
    assert client.told == "ok"


def test_nobody_leaves_for_a_park_that_is_warm_or_only_an_operator_starts() -> None:
    few = (policy("h1", capacity=40, managed=30, parked=8, max_parked=2),)
    kept, meant = attrs.evolve(DEEP, name="w", warm=True), attrs.evolve(DEEP, name="x", activation=Activation.EXPLICIT)
    here, (warm, explicit, c) = world(kept, meant, attrs.evolve(DEEP, name="c"), policies=few)
    parked(here, warm, explicit)
    here.start(c)
    here.run(30_000, until=lambda: here.lane(c).gate_open)
    key = here.park(c)
    here.run(60_000)
    assert here.lane(c).gate_open  # it serves on
    opened = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
    assert (opened.phase, opened.code) == (operation.Phase.FAILED, "parked_capacity")
    assert here.lane(warm).is_parked
    assert here.lane(explicit).is_parked


def test_a_park_beyond_the_parked_limit_makes_room_as_well() -> None:
    tight = (policy("h1", capacity=40, managed=30, parked=1.2, max_parked=4),)
    here, (a, b, c) = world(*named("a", "b", "c"), policies=tight)
    parked(here, a, b, c)
    assert here.lane(a).phase is ActivationPhase.STOPPED
    assert here.lane(b).is_parked


def test_an_operators_plain_start_takes_the_room_of_what_sleeps_and_of_nobody_who_serves() -> None:
    host = (policy("h1", capacity=12, managed=9, parked=4),)
    here, (a, b, c) = world(*named("a", "b"), attrs.evolve(DEEP, name="c", ready_gib=4.5, cold_gib=4.75), policies=host)
    parked(here, a)
    here.start(b)
    here.run(30_000, until=lambda: here.lane(b).gate_open)
    here.start(c)
    here.run(60_000, until=lambda: here.lane(c).gate_open)
    assert here.lane(c).gate_open
    assert here.lane(b).gate_open
    assert here.lane(a).run.stopped.kind is StopKind.RECLAIM
    key = here.start(a)
    here.run(60_000)
    assert (here.lane(b).gate_open, here.lane(c).gate_open) == (True, True)
    opened = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
    assert opened.phase is not operation.Phase.SUCCEEDED  # it waits: nobody who serves gives way without --evict


def test_a_plain_start_that_waits_takes_the_room_of_a_copy_once_nobody_wants_that_awake() -> None:
    host = (policy("h1", capacity=12, managed=8, parked=4),)
    stays = attrs.evolve(DEEP, name="x", activation=Activation.EXPLICIT)
    sleeper = attrs.evolve(DEEP, name="p", ready_gib=5, cold_gib=5, parked_gib=1.5)
    here, (x, p, t) = world(stays, sleeper, *named("t", ready_gib=3, cold_gib=3), policies=host)
    parked(here, p)
    here.start(x)
    here.run(30_000, until=lambda: here.lane(x).gate_open)
    here.start(p, deadline_ms=Millis(here.now + 30_000))  # no room beside x, which only an operator stops
    here.start(t)
    here.run(5_000)
    assert here.lane(t).phase is ActivationPhase.PLANNED
    assert here.lane(p).phase is ResidencyPhase.WAKE_PLANNED
    here.run(120_000, until=lambda: here.lane(t).gate_open)
    assert here.lane(t).gate_open  # nobody waits for the other any more, and it went back to sleep
    assert here.lane(p).run.stopped.kind is StopKind.RECLAIM


# --- switches that park ---------------------------------------------------------------------------------------


def two(settings: Settings | None = None, **changes: Any) -> tuple[Shell, list[DeploymentId]]:
    """Two that cannot serve together, but one beside the other's copy."""
    options = {} if settings is None else {"settings": settings}
    host = (policy("h1", capacity=9, managed=7, parked=2),)
    return world(*named("a", "b", ready_gib=5, cold_gib=5, **changes), policies=host, **options)


def how(here: Shell) -> list[Released | None]:
    return [victim.released for state in here.world.book.switches.values() for victim in state.victims]


def test_two_models_take_turns_without_a_cold_start_after_the_first_one() -> None:
    here, _ = two()
    for _ in range(20):
        for name in ("a", "b"):
            client = here.ask(name)
            here.run(60_000, until=lambda one=client: one.told is not None)
            assert client.told == "ok"
    assert len(here.launches) == 2
    assert set(how(here)) == {Released.PARKED}


def test_an_evicting_start_is_told_its_switch_and_whom_it_cost() -> None:
    here, (a, b) = two()
    here.ask("a")
    here.run(30_000, until=lambda: here.lane(a).gate_open)
    here.run(3_000)
    key = here.start(b, evict=True)
    here.run(60_000, until=lambda: here.lane(b).gate_open)
    row = here.world.book.receipts[key]
    (state,) = here.world.book.switches.values()
    assert row.receipt.switch == state.switch
    assert row.receipt.victims == (str(Lane(a, 0)),)


def test_a_victim_whose_copy_has_no_room_is_stopped_and_says_so() -> None:
    host = (policy("h1", capacity=9, managed=7, parked=0.25),)
    here, (a, _) = world(*named("a", "b", ready_gib=5, cold_gib=5), policies=host)
    here.ask("a")
    here.run(30_000, until=lambda: here.lane(a).gate_open)
    client, why = here.ask("b"), dict[str, str]()

    def served() -> bool:
        why.update({f"{move.machine} {move.event}": move.why for move in here.world.book.moves})
        return client.told is not None

    here.run(60_000, until=served)
    assert client.told == "ok"
    assert how(here) == [Released.STOPPED_NO_ROOM]
    assert why["switch PlanMade"] == "a/0 stops (no room to park)"
    assert why["instance StopRequested"] == "pressure for b"
    assert here.lane(a).run.stopped.kind is StopKind.PRESSURE
    assert here.lane(a).run.stopped.for_name == "b"


def test_no_victim_is_stopped_on_a_look_from_before_it_served() -> None:
    """While it loaded, nobody knew that its memory is its own: by that look its park would give nothing back."""
    host = (policy("h1", capacity=9, managed=7, parked=2),)
    here, (a, _) = world(*named("a", "b", ready_gib=5, cold_gib=5), policies=host, sample_ms=10_000)
    here.attributed = False
    here.ask("a")
    here.run(30_000, until=lambda: any(engine.held_bytes for engine in here.engines()))
    here.read_memory(HostId("h1"))
    here.attributed = True
    here.run(9_000, until=lambda: here.lane(a).gate_open)
    assert here.lane(a).gate_open
    seen = here.world.book.seen[HostId("h1")][RAM]
    assert seen.available_bytes == gib(4)
    assert not seen.residents
    client = here.ask("b")
    here.run(60_000, until=lambda: client.told is not None)
    assert client.told == "ok"
    assert how(here) == [Released.PARKED]


def never_idle(here: Shell, identity: DeploymentId) -> Any:
    """The engine of `identity` says that it runs something that no client of ours asked for."""
    engine = next(one for one in here.engines() if one.incarnation.lane.deployment == identity)
    engine.foreign = 1
    return engine


def test_a_victim_that_never_reads_idle_serves_on_and_whoever_waits_is_told() -> None:
    here, (a, b) = two(settings=Settings(drain_timeout_ms=Millis(5_000)))
    here.ask("a")
    here.run(30_000, until=lambda: here.lane(a).gate_open)
    here.run(20_000)
    engine = never_idle(here, a)
    client, asked = here.ask("b"), here.now
    here.run(60_000, until=lambda: client.told is not None)
    assert (client.told, here.now - asked < 25_000) == ("unavailable", True)
    book = here.world.book
    here.run(1_000)
    assert here.lane(a).gate_open
    (failed,) = book.switches.values()
    assert (failed.code, failed.reason) == ("unavailable", "the model in its way does not read idle; ask again later")
    again = here.ask("b")
    here.run(6_000)  # the pause after a failed switch
    assert again.told == "unavailable", "no wait for what is not to be expected"
    key = here.start(b, evict=True)
    here.run(250_000)
    assert len(book.switches) == 1, "it is left alone"
    assert here.lane(a).gate_open
    refusal = here.reply(key).message
    assert refusal is not None
    assert "; a/0 does not read idle, and is asked again once it does, or 300 s after that" in refusal
    engine.foreign = 0
    here.ask("b")  # its gauges are read again for that
    here.run(2_000)
    here.ask("b")
    here.run(30_000, until=lambda: here.lane(b).gate_open)
    assert here.lane(b).gate_open
    assert here.lane(a).is_parked


def test_an_operators_start_says_who_does_not_read_idle_and_asks_it_again_after_five_minutes() -> None:
    here, (a, b) = two(settings=Settings(drain_timeout_ms=Millis(5_000)))
    here.ask("a")
    here.run(30_000, until=lambda: here.lane(a).gate_open)
    never_idle(here, a)
    here.start(b, evict=True)
    here.run(20_000)
    view = views.deployment(here.world, b, Millis(here.now))
    assert view is not None
    assert "a/0 does not read idle, and is asked again once it does, or 300 s after that" in view["waiting"]
    here.run(680_000)
    assert len(here.world.book.switches) == 3


def test_a_victim_whose_host_refuses_the_park_is_left_alone_for_a_minute() -> None:
    here, (a, b) = two(settings=Settings(drain_timeout_ms=Millis(5_000)))
    here.ask("a")
    here.run(30_000, until=lambda: here.lane(a).gate_open)
    here.faults.percent = {"park_refused_unsent": 100}
    client = here.ask("b")
    here.run(60_000, until=lambda: client.told is not None)
    assert client.told == "unavailable"
    second = here.ask("b")
    here.run(50_000)
    assert second.told == "unavailable"
    assert len(here.world.book.switches) == 1
    here.faults.percent = {}
    here.run(10_000)
    later = here.ask("b")
    here.run(60_000, until=lambda: later.told is not None)
    assert later.told == "ok"
    assert here.lane(b).gate_open


def test_a_victim_that_outgrew_its_bound_is_stopped_and_not_for_lack_of_room() -> None:
    here, _ = two(residue_gib=0.5, residue_grows_gib=0.8)
    for name in ("a", "b", "a", "b"):
        client = here.ask(name)
        here.run(60_000, until=lambda one=client: one.told is not None)
    assert how(here)[:3] == [Released.PARKED, Released.PARKED, Released.PARKED]
    client = here.ask("a")
    here.run(60_000, until=lambda: client.told is not None)
    client = here.ask("b")
    here.run(90_000, until=lambda: client.told is not None)
    assert client.told == "ok"
    assert how(here)[-1] is Released.STOPPED
    assert left(here) is StopKind.PRESSURE


def test_a_cut_request_that_ends_only_with_its_engine_turns_a_park_into_a_stop() -> None:
    silent = attrs.evolve(CUSTOM, parks=True)
    here, (a,) = world(attrs.evolve(DEEP, traits=silent))
    here.ask("a")
    here.run(30_000, until=lambda: here.lane(a).gate_open)
    here.ask("a", stream=False, answer_ms=10**6, hangs_up_in_ms=500)
    here.run(2_000)
    here.park(a)
    here.run(60_000, until=lambda: here.lane(a).phase is ActivationPhase.STOPPED)
    assert here.lane(a).phase is ActivationPhase.STOPPED
    assert len(here.launches) == 1


def parked_by(here: Shell, identity: DeploymentId) -> Any:
    view = views.deployment(here.world, identity, Millis(here.now))
    assert view is not None
    return view["instances"][0]["sleeps"]


def test_an_operator_who_parks_is_told_what_really_happened() -> None:
    here, (a,) = world(attrs.evolve(DEEP, residue_gib=0.5, residue_grows_gib=0.6))
    for prepare, said in (
        (lambda: None, "a is not running, so there is nothing to park. Try: capyctl preinitialize deployment a"),
        (lambda: here.start(a), "a is starting, and only what is ready can be parked; try again when it is"),
    ):
        prepare()
        here.run(100)
        key = here.park(a)
        here.run(100)
        assert (here.reply(key).code, here.reply(key).message) == ("lifecycle_conflict", said)
    here.run(30_000, until=lambda: here.lane(a).gate_open)
    one = here.park(a)
    here.run(20_000, until=lambda: here.lane(a).parking)
    other = here.park(a)  # while the release is in flight
    here.run(100)
    first, second = here.reply(one).receipt, here.reply(other).receipt
    assert first is not None
    assert second is not None
    assert (second.joined, second.operation) == (True, first.operation)
    here.run(20_000, until=lambda: here.lane(a).is_parked)
    asked_at = here.now
    assert parked_by(here, a) == {"since_ms": str(asked_at), "kind": "operator", "for": None, "switch_id": None}
    again = here.park(a)  # it is parked: nothing is left to do
    here.run(100)
    assert here.world.book.operations[here.reply(again).receipt.operation].phase is operation.Phase.SUCCEEDED  # type: ignore[union-attr, index]
    assert parked_by(here, a)["since_ms"] == str(asked_at)
    for _ in range(2):
        here.ask("a")
        here.run(60_000, until=lambda: here.lane(a).gate_open)
        assert parked_by(here, a) is None
        key = here.park(a)
        here.run(60_000, until=lambda: not here.lane(a).gate_open and not here.lane(a).in_progress)
    opened = views.operation(here.world, here.reply(key).receipt.operation)  # type: ignore[union-attr, arg-type]
    assert opened is not None
    assert opened["state"] == "succeeded"
    assert [row["reason"] for row in opened["instances"]] == ["its parked copy outgrew the bound"]


def test_a_park_that_a_cut_request_turns_into_a_stop_says_so_and_not_that_a_park_failed() -> None:
    here, (a,) = world(attrs.evolve(DEEP, traits=SGLANG))
    here.start(a)
    here.run(30_000, until=lambda: here.lane(a).gate_open)
    client = here.ask("a", nameable=False, stream=False, answer_ms=20_000)
    here.run(2_000)
    here.hang_up(client)
    key = here.park(a)
    here.run(120_000)
    opened = views.operation(here.world, here.reply(key).receipt.operation)  # type: ignore[union-attr, arg-type]
    assert opened is not None
    assert opened["state"] == "succeeded"
    assert [row["reason"] for row in opened["instances"]] == ["a cut request ended only with its engine"]
    view = views.deployment(here.world, a, Millis(here.now))
    assert view is not None
    assert view["instances"][0]["stopped"]["kind"] == "cut_request"


def test_a_park_in_which_the_engine_dies_says_that_it_ended() -> None:
    here, (a,) = world(DEEP)
    here.start(a)
    here.run(30_000, until=lambda: here.lane(a).gate_open)
    key = here.park(a)
    here.run(20_000, until=lambda: here.lane(a).parking)
    (engine,) = here.engines("a")
    here.exit(engine)
    here.run(60_000)
    opened = views.operation(here.world, here.reply(key).receipt.operation)  # type: ignore[union-attr, arg-type]
    assert opened is not None
    assert opened["state"] == "succeeded"  # its memory is free
    assert [row["reason"] for row in opened["instances"]] == ["its engine ended meanwhile: segmentation fault"]
    assert here.lane(a).phase is ActivationPhase.FAILED


def test_status_says_for_whom_a_model_was_parked() -> None:
    here, (a, b) = two()
    here.ask("a")
    here.run(30_000, until=lambda: here.lane(a).gate_open)
    here.run(3_000)
    key = here.start(b, evict=True)
    here.run(60_000, until=lambda: here.lane(b).gate_open)
    receipt = here.reply(key).receipt
    assert receipt is not None
    slept = parked_by(here, a)
    assert (slept["kind"], slept["for"], slept["switch_id"]) == ("switch", "b", receipt.switch)
    opened = views.operation(here.world, receipt.operation)  # type: ignore[arg-type]
    assert opened is not None
    assert opened["victims"] == [
        {"instance": str(Lane(a, 0)), "name": "a/0", "way": "park", "released": "released: parked"}
    ]
    key = here.stop(a)  # a parked one keeps nothing
    here.run(30_000, until=lambda: here.lane(a).phase is ActivationPhase.STOPPED)
    assert here.world.book.ledger.holding(Lane(a, 0).owner) is None
    assert not here.engines("a")


# --- ahead of time ---------------------------------------------------------------------------------------------


def preinitialized(here: Shell, identity: DeploymentId) -> Any:
    """Ask for it, and the operation once it has ended."""
    key = here.start(identity, park=True)
    here.run(100)
    opened = here.reply(key).receipt.operation  # type: ignore[union-attr]
    here.run(400_000, until=lambda: here.world.book.operations[opened].ended_at_ms is not None)
    return here.world.book.operations[opened]


def test_instances_are_started_proven_and_parked_one_after_the_other_in_the_room_of_one() -> None:
    narrow = (policy("h1", capacity=8, managed=6, parked=3),)
    here, (a,) = world(attrs.evolve(DEEP, instances=3), policies=narrow)
    most: list[int] = []
    before = here.check

    def watch(shell_: Shell, memory: Any, event: Any, step: Any) -> None:
        most.append(sum(row.is_ready for _, row in shell_.world.book.of(a)))
        if before is not None:
            before(shell_, memory, event, step)

    here.check = watch
    ended = preinitialized(here, a)
    assert ended.phase is operation.Phase.SUCCEEDED
    assert [row.is_parked for _, row in here.world.book.of(a)] == [True, True, True]
    assert max(most) == 1
    client = here.ask("a")
    here.run(20_000, until=lambda: client.told is not None)
    assert (client.told, len(here.launches)) == ("ok", 3)


def test_what_is_prepared_ahead_takes_the_room_of_nobody() -> None:
    few = (policy("h1", capacity=40, managed=9, parked=8, max_parked=1),)
    here, (a, b) = world(*named("a", "b"), policies=few)
    parked(here, a)
    ended = preinitialized(here, b)
    assert (ended.phase, ended.code) == (operation.Phase.FAILED, "parked_capacity")
    assert here.lane(a).is_parked  # asked to give way for nobody's request
    assert here.lane(b).gate_open  # it stays loaded rather than be lost
    here.park(a)
    here.ask("a")
    here.run(60_000, until=lambda: here.lane(a).gate_open)
    c = here.deploy(attrs.evolve(DEEP, name="c"))
    here.run(4_000)
    key = here.start(c, park=True, deadline_ms=Millis(here.now + 30_000))
    here.run(60_000)
    assert (here.lane(a).gate_open, here.lane(b).gate_open) == (True, True)
    opened = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
    assert opened.phase in (operation.Phase.FAILED, operation.Phase.EXPIRED)


def test_each_instance_that_cannot_be_prepared_is_reported_by_itself() -> None:
    here, (a,) = world(attrs.evolve(DEEP, instances=2))
    here.faults.percent = {"exit_early": 100}
    key = here.start(a, park=True)
    here.run(300_000, until=lambda: len(here.launches) > 0)
    here.run(60_000, until=lambda: here.lane(a).phase is ActivationPhase.FAILED)
    here.faults.percent = {}
    opened = here.reply(key).receipt.operation  # type: ignore[union-attr]
    here.run(400_000, until=lambda: here.world.book.operations[opened].ended_at_ms is not None)
    state = here.world.book.operations[opened]
    assert state.phase is operation.Phase.PARTIAL
    assert [target.result for target in state.targets] == [operation.Result.FAILED, operation.Result.MET]
    assert here.lane(a, 1).is_parked


def test_what_cannot_park_is_not_prepared_and_asking_twice_is_asking_once() -> None:
    here, (a, b) = world(Model(name="a"), attrs.evolve(DEEP, name="b"))
    key = here.start(a, park=True)
    here.run(100)
    refused = here.reply(key)
    assert refused.code == "unsupported_capability"
    first, second = here.start(b, park=True), here.start(b, park=True)
    here.run(100)
    one, other = here.reply(first).receipt, here.reply(second).receipt
    assert one is not None
    assert other is not None
    assert (one.operation, other.joined) == (other.operation, True)
    here.run(60_000, until=lambda: here.lane(b).is_parked)
    assert preinitialized(here, b).phase is operation.Phase.SUCCEEDED  # it is parked: nothing is left to do
    assert len(here.launches) == 1


def test_several_are_prepared_one_after_the_other_and_each_is_reported_by_itself() -> None:
    narrow = (policy("h1", capacity=8, managed=6, parked=3),)
    here, (a, b, c) = world(*named("a", "b", "c"), policies=narrow)
    here.spoiled.add(b)
    most: list[int] = []
    before = here.check

    def watch(shell_: Shell, memory: Any, event: Any, step: Any) -> None:
        rows = shell_.world.book.instances.values()
        most.append(sum(row.has_launch and not row.is_parked for row in rows))
        if before is not None:
            before(shell_, memory, event, step)

    here.check = watch
    key = here.prepare(a, b, c)
    here.run(300_000, until=lambda: here.lane(c).is_parked)
    receipt = here.reply(key).receipt
    assert receipt is not None
    assert (receipt.deployment, [one.deployment for one in receipt.members]) == (None, [a, b, c])
    ended = [here.world.book.operations[one.operation] for one in receipt.members]
    assert [one.phase for one in ended] == [
        operation.Phase.SUCCEEDED,
        operation.Phase.FAILED,
        operation.Phase.SUCCEEDED,
    ]
    assert ended[1].code == "checkpoint_mismatch"
    assert ended[0].ended_at_ms <= ended[1].ended_at_ms <= ended[2].ended_at_ms  # type: ignore[operator]
    assert max(most) == 1
    assert [here.lane(one).is_parked for one in (a, b, c)] == [True, False, True]


def test_a_request_does_not_wait_for_the_turn_of_its_model_and_a_crash_loses_no_turn() -> None:
    here, (a, b, c) = world(*named("a", "b", "c"))
    here.prepare(a, b, c)
    client = here.ask("c")
    here.run(20_000, until=lambda: client.told is not None)
    assert client.told == "ok"
    here.run(100_000, until=lambda: here.lane(a).is_parked)
    here.crash()
    here.run(300_000, until=lambda: here.lane(c).is_parked)
    assert [here.lane(one).is_parked for one in (a, b, c)] == [True, True, True]


def test_of_several_all_are_accepted_or_none() -> None:
    here, (a, b) = world(DEEP, Model(name="b"))
    for given, code in (((a, b), "unsupported_capability"), ((a, a), "invalid_request"), ((), "invalid_request")):
        key = here.prepare(*given)
        here.run(100)
        assert here.reply(key).code == code
    here.delete(a)
    here.run(100)
    key = here.prepare(a, b)
    here.run(100)
    (first, *more) = here.reply(key).message.split("; ")
    assert "a" in first
    assert "b cannot be parked" in " ".join(more)  # each with its own reason
    assert more[-1] == "nothing is prepared"
    here.run(30_000)
    assert here.launches == []


# --- idle ---------------------------------------------------------------------------------------------------------


def test_what_nobody_uses_parks_and_what_nobody_wakes_stops() -> None:
    idle = Settings(ready_idle_ms=Millis(30_000), parked_idle_ms=Millis(120_000))
    here, (a, w) = world(DEEP, attrs.evolve(DEEP, name="w", warm=True), settings=idle)
    here.ask("a")
    here.ask("w")
    here.run(20_000, until=lambda: here.lane(a).gate_open)
    here.run(60_000, until=lambda: here.lane(a).is_parked)
    assert here.lane(a).is_parked
    here.run(200_000, until=lambda: here.lane(a).phase is ActivationPhase.STOPPED)
    assert here.lane(a).run.stopped.kind is StopKind.IDLE
    assert here.lane(w).gate_open  # warm
    client = here.ask("a")
    here.run(60_000, until=lambda: client.told is not None)
    assert client.told == "ok"


def test_one_verdict_ends_the_waits_of_all_copies_that_a_start_was_to_wake() -> None:
    host = (policy("h1", capacity=12, managed=9, parked=4),)
    here, (a, w) = world(
        attrs.evolve(DEEP, instances=2, ready_gib=3, cold_gib=3),
        attrs.evolve(DEEP, name="w", warm=True, ready_gib=7, cold_gib=7),
        policies=host,
    )
    here.start(a)
    here.run(30_000, until=lambda: here.lane(a).gate_open and here.lane(a, 1).gate_open)
    here.park(a)
    here.run(60_000, until=lambda: here.lane(a).is_parked and here.lane(a, 1).is_parked)
    here.start(w)
    here.run(60_000, until=lambda: here.lane(w).gate_open)
    key = here.start(a, evict=True)
    here.run(20_000)
    assert here.lane(w).gate_open  # warm: it gives way for nobody
    assert here.lane(a).is_parked
    assert here.lane(a, 1).is_parked
    refused = here.reply(key)
    assert (refused.code, refused.receipt) == ("insufficient_resources", None)
    assert not any(here.world.book.open_operations.values())


def test_a_copy_of_an_older_revision_and_a_new_start_are_each_looked_at_once() -> None:
    host = (policy("h1", capacity=12, managed=9, parked=4),)
    model = attrs.evolve(DEEP, ready_gib=3, cold_gib=3)
    here, (a, b) = world(model, attrs.evolve(DEEP, name="b", ready_gib=8, cold_gib=8), policies=host)
    parked(here, a)
    here.start(b)
    here.run(60_000, until=lambda: here.lane(b).gate_open)
    here.revise(a, attrs.evolve(model, instances=2))
    here.run(5_000)
    here.start(a, evict=True)
    before = len(here.log)
    here.run(60_000, until=lambda: here.lane(a).gate_open and here.lane(a, 1).gate_open)
    assert here.lane(a).gate_open
    assert here.lane(a, 1).gate_open
    assert sum(line.count("VerifyStart") for line in here.log[before:]) <= 4


def test_a_copy_and_a_new_start_wait_quietly_for_a_victim_that_would_not_give_way() -> None:
    host = (policy("h1", capacity=12, managed=9, parked=4),)
    model = attrs.evolve(DEEP, ready_gib=3, cold_gib=3)
    here, (a, b) = world(model, attrs.evolve(DEEP, name="b", ready_gib=8, cold_gib=8), policies=host)
    parked(here, a)
    here.start(b)
    here.run(60_000, until=lambda: here.lane(b).gate_open)
    here.revise(a, attrs.evolve(model, instances=2))
    here.run(5_000)
    here.faults.percent = {"park_refused_unsent": 100}
    here.start(a, evict=True)
    here.run(20_000)  # it was asked once, and is left alone
    assert here.lane(b).gate_open
    for index in (0, 1):
        assert "asked again 60 s after that" in here.lane(a, index).waits_for.reason
    here.faults.percent = {}
    here.run(300_000, until=lambda: here.lane(a).gate_open and here.lane(a, 1).gate_open)
    assert here.lane(a).gate_open
    assert here.lane(a, 1).gate_open
