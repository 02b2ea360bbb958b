"""The controller dies at every boundary: before a commit, after it, and after each order; the world recovers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import attrs
import pytest
from simulation import Life, checked, recording
from world import Shell, shell
from world_values import VLLM, Client, Model, policy

from capyctl.control import events as e
from capyctl.control import orders as o
from capyctl.fsm import operation, request, residency
from capyctl.fsm.activation import ActivationPhase
from capyctl.fsm.cleanup import CleanupPhase
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.types import DeploymentId, Millis, Residency

PLAIN = Model(name="a", ready_gib=6, cold_gib=6)
DEEP = attrs.evolve(PLAIN, traits=VLLM, residency=Residency.DEEP, ready_gib=5, cold_gib=5)
SMALL = attrs.evolve(DEEP, ready_gib=3, cold_gib=3)
GROWING = attrs.evolve(DEEP, residue_gib=0.5, residue_grows_gib=0.6)
LIMIT_MS = 2 * 3_600_000

Story = Callable[[Shell, DeploymentId, DeploymentId], None]


def nothing_yet(here: Shell, a: DeploymentId, b: DeploymentId) -> None:
    """Both models are deployed, and stopped."""


def start(here: Shell, a: DeploymentId, b: DeploymentId) -> None:
    here.start(a)
    here.run(15_000)
    here.ask("a")
    here.run(2_000)


def stop(here: Shell, a: DeploymentId, b: DeploymentId) -> None:
    start(here, a, b)
    here.ask("a", answer_ms=1_500)
    here.run(500)
    here.stop(a)
    here.run(40_000)


def switch(here: Shell, a: DeploymentId, b: DeploymentId) -> None:
    start(here, a, b)
    here.ask("b")
    here.run(60_000)
    here.ask("a")
    here.run(60_000)


def park_and_wake(here: Shell, a: DeploymentId, b: DeploymentId) -> None:
    start(here, a, b)
    here.park(a)
    here.run(20_000)
    here.ask("a")
    here.run(20_000)
    here.ask("b")
    here.run(60_000)


def revise_and_delete(here: Shell, a: DeploymentId, b: DeploymentId) -> None:
    start(here, a, b)
    here.revise(a, attrs.evolve(here.models[a][1], note="v2"), activate=True)
    here.run(40_000)
    here.delete(a, stop=True)
    here.run(40_000)


# --- parks and wakes that go wrong: from a model that serves, or that sleeps ---------------------------


def serving(here: Shell, a: DeploymentId, b: DeploymentId) -> None:
    here.start(a)
    here.run(30_000, until=lambda: here.lane(a).gate_open)
    here.run(1_000)


def sleeping(here: Shell, a: DeploymentId, b: DeploymentId) -> None:
    serving(here, a, b)
    here.park(a)
    here.run(60_000, until=lambda: here.lane(a).is_parked)
    here.run(1_000)


def park_under(*faults: str, for_ms: int = 20_000) -> Story:
    """It is parked while something goes wrong, and then wanted again."""

    def story(here: Shell, a: DeploymentId, b: DeploymentId) -> None:
        here.faults.percent = dict.fromkeys(faults, 100)
        here.park(a)
        here.run(7_000)
        here.faults.percent = {}
        here.ask("a")
        here.run(for_ms)

    return story


def wake_under(*faults: str) -> Story:
    """It is wanted while something goes wrong."""

    def story(here: Shell, a: DeploymentId, b: DeploymentId) -> None:
        here.faults.percent = dict.fromkeys(faults, 100)
        here.ask("a")
        here.run(7_000)
        here.faults.percent = {}
        here.run(20_000)

    return story


def stopped_while_it_parks(here: Shell, a: DeploymentId, b: DeploymentId) -> None:
    here.park(a)
    here.run(5_000, until=lambda: here.lane(a).phase in residency.PARKING)
    here.stop(a)
    here.run(20_000)


def stopped_while_it_wakes(here: Shell, a: DeploymentId, b: DeploymentId) -> None:
    here.ask("a")
    here.run(5_000, until=lambda: here.lane(a).phase in residency.WAKING)
    here.stop(a)
    here.run(20_000)


def reclaimed_for_another(here: Shell, a: DeploymentId, b: DeploymentId) -> None:
    """There is a place for one copy: the older one leaves it."""
    here.start(b)
    here.run(30_000, until=lambda: here.lane(b).gate_open)
    here.park(b)
    here.run(15_000)


def prepared_ahead(here: Shell, a: DeploymentId, b: DeploymentId) -> None:
    here.start(a, park=True)
    here.run(30_000)


def parked_until_it_outgrows(here: Shell, a: DeploymentId, b: DeploymentId) -> None:
    """Its second copy is more than twice the first: the third park is a stop."""
    for _ in range(2):
        here.ask("a")
        here.run(20_000, until=lambda: here.lane(a).gate_open)
        here.run(1_500)
        here.park(a)
        here.run(15_000, until=lambda: not here.lane(a).is_ready and not here.lane(a).in_progress)


STORIES: dict[str, tuple[Story, Story, Model, str]] = {
    "start": (nothing_yet, start, PLAIN, "activation: .* LaunchReady"),
    "stop": (nothing_yet, stop, PLAIN, "cleanup: .* Terminated"),
    "switch": (nothing_yet, switch, PLAIN, "switch: .* VictimReleased"),
    "switch that parks": (nothing_yet, switch, DEEP, r"residency: .* WakeConfirmed \[.*no stop waits"),
    "park and wake": (nothing_yet, park_and_wake, DEEP, r"residency: .* WakeConfirmed \[.*no stop waits"),
    "revise and delete": (nothing_yet, revise_and_delete, PLAIN, "deployment: .* InstancesSettled"),
    "release unanswered": (serving, park_under("order_lost"), DEEP, "residency: .* OrderLost .*no stop waits"),
    "release answered late": (
        serving,
        park_under("order_late", for_ms=180_000),
        DEEP,
        "residency: .* Ticked .*no stop",
    ),
    "release that frees nothing": (serving, park_under("park_left"), DEEP, "residency: .* OrderLost .*no stop waits"),
    "release refused": (serving, park_under("park_refused"), DEEP, "ParkRefused .*without P-UNSENT"),
    "release never asked for": (serving, park_under("park_refused_unsent"), DEEP, "ParkRefused .*with P-UNSENT"),
    "engine dies as it parks": (serving, park_under("park_dies"), DEEP, "residency: .* OrderLost "),
    "stop while it parks": (serving, stopped_while_it_parks, DEEP, "ParkConfirmed .*and a stop waits"),
    "restore unanswered": (sleeping, wake_under("order_lost"), DEEP, "residency: .* OrderLost .*no stop waits"),
    "wake answers otherwise": (sleeping, wake_under("wake_mismatch"), DEEP, "WakeFailed .*may have been asked for"),
    "canary unanswered": (sleeping, wake_under("wake_mute"), DEEP, "WakeConfirmed .*the canary did not"),
    "restore fails": (sleeping, wake_under("wake_fails"), DEEP, "WakeFailed .*may have been asked for"),
    "restore never asked for": (sleeping, wake_under("wake_refused_unsent"), DEEP, "WakeFailed .*with P-UNSENT"),
    "stop while it wakes": (sleeping, stopped_while_it_wakes, DEEP, "WakeConfirmed .*and a stop waits"),
    "reclaim": (sleeping, reclaimed_for_another, SMALL, "residency: parked StopRequested"),
    "preinitialize": (nothing_yet, prepared_ahead, attrs.evolve(SMALL, instances=2), "residency: .* ParkConfirmed"),
    "growth": (sleeping, parked_until_it_outgrows, GROWING, "ParkRequested .*a park cannot give it"),
}
"""Name -> what was before, what happens while the controller dies once, what both models are, a row that is taken."""


@pytest.mark.parametrize("name", STORIES)
def test_a_crash_at_every_boundary_is_recovered(name: str) -> None:
    fired: Counter[str] = Counter()
    boundaries = lived(name, fired=fired)
    assert boundaries > 10
    assert any(re.search(STORIES[name][-1], row) for row in fired), sorted(fired)
    for crash_at in range(1, boundaries + 1):
        lived(name, crash_at)


def lived(name: str, crash_at: int | None = None, fired: Counter[str] | None = None) -> int:
    """A life with this story, in which the controller dies at that boundary; how many boundaries the story had."""
    before, story, model, _ = STORIES[name]
    few = (policy("h1", max_parked=1),) if name == "reclaim" else (policy("h1"),)
    here = checked(shell(7, sample_ms=5_000, policies=few))
    if crash_at is not None:
        checked_from_its_crash_on(here)
    a = here.deploy(model)
    b = here.deploy(attrs.evolve(model, name="b"))
    here.run(5_000)
    before(here, a, b)
    began = here.boundaries
    here.crash_at = None if crash_at is None else began + crash_at
    with recording(Counter() if fired is None else fired):
        story(here, a, b)
    assert here.crashes == (crash_at is not None)
    boundaries = here.boundaries - began
    Life(7, here, [], [], 0, 0).come_to_rest()
    probe(here)
    return boundaries


def checked_from_its_crash_on(here: Shell) -> None:
    """The steps before are those of the life without a crash, in which all are checked."""
    check, before = here.check, here.before
    assert check is not None
    assert before is not None
    here.check = lambda shell, *what: check(shell, *what) if shell.crashes else None
    here.before = lambda shell: before(shell) if shell.crashes else None


def probe(here: Shell) -> None:
    """The closing check: each model that may run answers one request, and nothing is left over."""
    here.quiet = False
    for row in list(here.world.book.deployments.values()):
        stopped = row.state.suspended
        client: Client = here.ask(row.spec.name)
        here.run(LIMIT_MS, until=lambda client=client: client.told is not None)  # type: ignore[misc]
        assert client.told == ("deployment_stopped" if stopped else "ok"), row.spec.name
    assert not here.world.book.requests
    charged = {owner for owner, _ in here.world.book.ledger.rows()}
    assert charged == {engine.incarnation.lane.owner for engine in here.engines()}


def test_places_survive_a_kill_as_ending_only_with_their_engine_and_are_let_go_with_it() -> None:
    here = checked(shell(3))
    a = here.deploy(PLAIN)
    here.run(5_000)
    clients = [here.ask("a", answer_ms=120_000, hangs_up_in_ms=60_000 if n % 2 else None) for n in range(6)]
    here.run(20_000)
    assert len(here.world.book.requests) == 6
    here.crash()
    states = list(here.world.book.requests.values())
    assert [state.phase for state in states] == [request.Phase.CANCEL_STOP] * 6
    assert {client.told for client in clients} == {"crashed"}
    here.run(10_000)
    assert here.lane(a).gate_open
    assert len(here.world.book.requests) == 6  # an idle reading proves nothing of what may not have arrived
    assert here.ask("a").told is None
    here.stop(a)
    here.run(60_000)
    assert not here.world.book.requests


def test_a_ready_engine_is_probed_by_the_new_session_and_opens_only_on_fresh_proofs() -> None:
    here = checked(shell(3))
    a = here.deploy(PLAIN)
    here.start(a)
    here.run(20_000)
    here.faults.percent = {"probe_mute": 100}
    here.crash()
    client = here.ask("a")
    here.run(5_000)
    assert here.lane(a).phase is ResidencyPhase.READY
    assert not here.lane(a).gate_open
    assert client.told is None
    here.faults.percent = {}
    here.run(20_000)
    assert here.lane(a).gate_open
    assert client.told == "ok"


def test_an_engine_that_look_after_look_proves_nothing_of_keeps_nobody_waiting() -> None:
    here = checked(shell(3))
    a = here.deploy(PLAIN)
    here.start(a)
    here.run(20_000)
    here.faults.percent = {"probe_mute": 100}
    here.crash()
    waits = here.ask("a")
    here.run(60_000)
    assert waits.told == "unavailable"
    assert here.ask("a").told == "unavailable"
    assert here.lane(a).phase is ResidencyPhase.READY  # it may live: it keeps its charge
    here.faults.percent = {}
    here.run(20_000)
    again = here.ask("a")
    here.run(5_000)
    assert again.told == "ok"


def test_a_launch_whose_answer_died_with_the_controller_is_adopted_not_repeated() -> None:
    here = checked(shell(3))
    a = here.deploy(attrs.evolve(PLAIN, load_ms=20_000))
    key = here.start(a)
    here.run(10_000)
    here.crash()
    here.run(700)
    assert here.lane(a).phase is CleanupPhase.RECONCILING
    here.run(600_000)
    assert here.lane(a).gate_open
    assert len(here.launches) == 1
    opened = here.world.book.operations[here.reply(key).receipt.operation]  # type: ignore[union-attr, index]
    assert opened.phase is operation.Phase.SUCCEEDED


def test_a_step_that_breaks_an_invariant_is_stored_with_the_next_one() -> None:
    """What is in memory stays the truth: rows that a broken step touched are not lost to the store."""
    here = checked(shell(3))
    a = here.deploy(PLAIN)
    here.run(5_000)
    row = here.world.book.deployments[a]
    here.world.book.put_deployment(row)
    with pytest.raises(Exception, match="knows no"):
        here.world.handle(e.Event(now_ms=Millis(here.now)))
    step = here.world.handle(e.Ticked(now_ms=Millis(here.now)))
    assert [(record.kind, record.key) for record in step.changed] == [("deployment", a)]
    assert not any(isinstance(order, o.HostOrder) for order in step.orders)


@pytest.mark.parametrize("by_ms", [0, 3_600_000])
def test_what_was_remembered_before_the_clock_was_set_back_holds_nobody_up(by_ms: int) -> None:
    host = policy("h1", capacity=9, managed=7, parked=0.25)  # no room for a copy: whoever gives way is stopped
    here = checked(shell(1, policies=(host,), now=10**12))
    a, b, c = (here.deploy(attrs.evolve(DEEP, name=name)) for name in "abc")
    here.run(4_000)
    first = here.ask("a")
    here.run(60_000, until=lambda: first.told is not None)
    here.start(c)  # nobody gives way for it
    here.run(5_000)
    here.set_back(by_ms)
    here.run(10_000)
    assert here.lane(a).gate_open
    assert here.lane(c).wish.since_ms <= here.now
    second = here.ask("b")
    here.run(60_000, until=lambda: second.told is not None)
    assert second.told == "ok"
    assert here.lane(a).phase is ActivationPhase.STOPPED
    assert here.lane(c).phase is ActivationPhase.PLANNED
    assert here.lane(b).gate_open


@pytest.mark.parametrize("by_ms", [0, 3_600_000])
def test_a_drain_goes_on_after_the_clock_was_set_back(by_ms: int) -> None:
    here = checked(shell(1, now=10**12))
    a = here.deploy(DEEP)
    here.run(4_000)
    first = here.ask("a", answer_ms=4_000)
    here.run(60_000, until=lambda: here.lane(a).gate_open)
    here.run(500)
    here.park(a)
    here.run(100)
    assert here.lane(a).phase is ResidencyPhase.DRAINING_TO_PARK
    here.set_back(by_ms)
    here.run(60_000, until=lambda: not here.lane(a).in_progress)
    assert first.told == "crashed"
    assert here.lane(a).phase is ActivationPhase.STOPPED  # nobody knows what became of the request
