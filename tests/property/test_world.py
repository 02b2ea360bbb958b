"""Whole worlds on seeds: safe while it hurts, moving once it stops, and every row that the world can reach fires.

`CAPYCTL_CAMPAIGN=1` lives fresh and longer lives. A failure prints its seed and the command that repeats it.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable

import pytest
from simulation import MACHINES, label, live, recording
from world_corners import CORNERS

CAMPAIGN = os.environ.get("CAPYCTL_CAMPAIGN") == "1"
LIVES, STEPS = (400, 3_000) if CAMPAIGN else (180, 1_000)
MORE_LIVES = 400
FIRST = random.SystemRandom().randrange(10**9) if CAMPAIGN else 1

UNREACHABLE: tuple[tuple[str, str], ...] = (
    (r"^(activation|residency|cleanup): .* (Sent|Restored)\b",
     "progress for people: no session message of this release carries it"),
    (r"^deployment: .* Instance(Start|Stop)Asked", "instances are not started or stopped one by one in this release"),
    (r"^deployment: .* InstanceUncertain", "views read it off the instances' rows"),
    # control asks before it tells
    (r"^activation: stopped Activated \[an operator stopped", "a wish of a stopped deployment is dropped, not tried"),
    (r"^activation: failed Activated \[a request asks before", "control picks only instances whose pause is over"),
    (r"^activation: .* ParkRequested", "only what is READY or drains to a park is asked to park"),
    (r"^activation: .* StopRequested \[nobody insists", "a victim that ended is released, and no victim any more"),
    (r"^residency: ready Activated", "only what does not serve is activated"),
    (r"^residency: draining_to_stop Activated \[nothing but an idle", "an idle stop has nothing to wait for"),
    (r"^residency: ready ParkRequested \[its tier does not park, and an op", "the deployment refuses it first"),
    (r"^residency: parked ParkRequested", "a park is asked of what serves"),
    (r"^residency: restoring.* ParkRequested", "a park is asked of what serves"),
    (r"^residency: draining_to_(park|stop) StopRequested \[the stop waits for no", "saturation stops what is READY"),
    (r"^residency: (draining_to_park\+park_planned|draining_to_stop) SessionBegan \[it leaves for a switch",
     "switches end, and withdraw, before the session is told to the instances"),
    (r"^cleanup: reconciling (ParkRequested|StopRequested \[nobody)", "a switch ends when its victim is unknown"),
    # PARK_PLANNED lasts for a part of one step
    (r"^residency: park_planned ParkRequested", "room to park is decided in the step that wants it"),
    (r"^gate: closed Doubted \[no run", "what answers nothing is doubted while it is READY or drains"),
    # verdicts are given to who wants them, with fresh tokens
    (r": .* (Placed|Held|HoldLifted|ParkAdmitted|ParkNotAdmitted|WakeAdmitted|WakeNotAdmitted|Turn) ignored",
     "the scheduler gives a verdict to who wants it"),
    (r"^activation: held Held", "a held start is placed only once its hold is lifted"),
    (r"^activation: held HoldLifted \[it is held by the cooldown", "only holds for peers are lifted"),
    (r": .* (Placed|ParkAdmitted|WakeAdmitted) \[.*not newer", "tokens and generations are drawn, and only rise"),
    (r"^cleanup: (planned|reconciling) Turn \[the (token is not|pause)",
     "a turn comes when it is due, with a fresh token"),
    # readings are told to the drain that waits for them
    (r"^(activation|cleanup): .* (GateDrained|RequestsEnded)", "a drain is told to what drains"),
    (r"^residency: draining_to_stop GateDrained", "a drain to an end hears of its requests, not of gauges"),
    (r"^residency: draining_to_park\+draining_to_stop GateDrained",
     "control keeps readings that are too old to itself"),
    (r"^residency: park_armed.* GateDrained", "a drain is told to what drains"),
    (r"^residency: draining_to_stop RequestsEnded \[it tells of another", "control tells of the present run"),
    (r"^residency: draining_to_park.* RequestsEnded", "a park needs the engine's own reading"),
    (r"^cleanup: .* LaunchFailed \[gone.*its places were stuck", "no launch is in flight where places were stuck"),
    # the gate
    (r"^gate: open ReadyProven", "an instance is proven READY once, behind a closed gate"),
    (r"^gate: closed ReasonRemoved \[only the end", "nobody removes a stop or an exit"),
    (r"^gate: open LeftReady", "a reason closes it first"),
    (r"^gate: open Proven", "a look ends when nothing is in doubt any more"),
    (r"^gate: closed\+open SessionBegan \[the session is not newer", "sessions are counted"),
    # requests: woken at their own deadline, told by a faithful router, dropped when they are over
    (r"^request: (queued|dispatched) Ticked \[the deadline is ahead", "a request is woken at its own deadline"),
    (r"^request: (received|queued|admitted|completing) ControllerRestarted",
     "what waits is no row, and a stored place reads as dispatched"),
    (r"^request: completing IncarnationGone", "its record is closed in the step that delivers it"),
    (r"^request: (streaming OutputBegun|received ClientGone)", "the router tells each once, and after arrival"),
    (r"^request: .* AbortAcknowledged \[the ack.*another", "the ingress answers for the id it was asked about"),
    (r"^request: .* AbortUnanswered ignored", "an abort has one answer"),
    (r"^request: cancel_stop UpstreamEnded \[the engine closed first", "only half-closed upstreams are listened to"),
    (r"^request: .* IncarnationGone (\[it was another|ignored)", "control tells those whose run is gone"),
    (r"^request: admitted.* IdleRead", "control tells those who wait for a reading"),
    (r"^request: refused\+settled", "what is over is forgotten"),
    (r"^request: .* refused internal", "a faithful router tells no such thing"),
    # deployments, operations, switches: control looks before it tells
    (r"^deployment: (accepted.*|deleting|deleted) DeployAsked", "a create has an id of its own"),
    (r"^deployment: absent.* InstancesSettled", "only what waits for its instances is told that they are settled"),
    (r"^deployment: unusable ReviseAsked \[current, and some instance is not", "what is unusable runs nothing"),
    (r"^deployment: deleting DeleteAsked \[nothing", "it is dropped in the step in which nothing is left"),
    (r"^deployment: .* Revision\w+ \[it is of another revision\]", "control drops measurements of older revisions"),
    (r"^deployment: absent\+deleted ", "control knows who exists"),
    (r"^operation: proposed Submitted \[(the key|new key; (a start|nothing to join, and some))",
     "control reads receipts and open operations before it opens one"),
    (r"^operation: .* Replaced refused", "only what armed nothing is replaced"),
    (r"^operation: (accepted Ticked \[there is no|proposed Ticked)", "an operation is woken at its own deadline"),
    (r"^operation: expired\S* (Joined|StepArmed|Waited|SwitchOpened|TargetReported|Replaced)",
     "only open operations are told"),
    (r"^operation: .* refused internal", "control submits once, then tells"),
    (r"^switch: planning (PlanMade \[the plan needs no|NoPlan)", "a switch is opened with its victims"),
    (r"^switch: .* ParkRefused",
     "an instance without room to park ends by itself, and the switch hears of the release"),
    (r"^switch: opening TargetReady", "the opening lasts for a part of one step"),
    (r"^switch: draining VictimDrained \[it is no victim", "control asks the switch who is left"),
    (r"^switch: done\+failed", "control tells those that run"),
    (r"^switch: .* refused internal", "control answers what was asked"),
)  # fmt: skip
"""Rows of the tables that no world takes, and why. A row that matches and fires is news: then this list is wrong."""

SELDOM: tuple[tuple[str, str], ...] = (
    (r"^residency: park_planned StopRequested", "a stop comes in the very step in which room to park is decided"),
    (r"^switch: activating.* Victim(Drained|Lost) ignored", "an instance is in the plans of two switches in a row"),
    (r"^(activation|cleanup): .* NotPlaced ignored", "a switch fails while its target is held, or ends"),
    (r"^switch: draining\+releasing\+window VictimLost \[it is no victim", "a released victim runs again and is lost"),
    (r"^switch: draining Ticked \[the drain deadline is ahead", "an early end of the window was planned and moved"),
)
"""Rows that need so much at once that fixed lives may miss them; campaigns do not."""


@pytest.fixture(scope="module")
def fired() -> Counter[str]:
    """What the lives and corners of this module fired."""
    return Counter()


def test_worlds_are_safe_while_it_hurts_and_come_to_rest_when_it_stops(
    fired: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    began, steps, crashes, launches = time.perf_counter(), 0, 0, 0
    with recording(fired):
        for seed in range(FIRST, FIRST + LIVES):
            life = live(seed, STEPS)
            steps += life.shell.steps
            crashes += life.shell.crashes
            launches += len(life.shell.launches)
    took = time.perf_counter() - began
    with capsys.disabled():
        print(
            f"\n{LIVES} worlds from seed {FIRST}: {steps} steps, {crashes} crashes, {launches} launches, "
            f"{steps / took:.0f} steps/s"
        )
    assert steps > LIVES * STEPS
    assert launches > LIVES


@pytest.mark.parametrize("corner", CORNERS, ids=lambda one: one.__name__)
def test_corners(corner: Callable[[], None], fired: Counter[str]) -> None:
    with recording(fired):
        corner()


def matches(name: str, rules: tuple[tuple[str, str], ...]) -> bool:
    return any(re.search(pattern, name) for pattern, _ in rules)


def rows() -> dict[str, list[str]]:
    """The rows of each machine by label."""
    return {machine.name: [label(machine, row) for row in machine.rows] for machine in MACHINES}


def missed(fired: Counter[str]) -> list[str]:
    """Rows that a world can reach and that nothing has fired."""
    return [
        name
        for names in rows().values()
        for name in names
        if not fired[name] and not matches(name, UNREACHABLE) and not matches(name, SELDOM)
    ]


def test_every_row_that_the_world_can_reach_has_fired(fired: Counter[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Needs the tests above to have run. A change of the code moves what seeds do: then more of them are lived."""
    if not fired:
        pytest.skip("run the whole module")
    more = FIRST + LIVES
    with recording(fired):
        while missed(fired) and more < FIRST + LIVES + MORE_LIVES:
            live(more, STEPS)
            more += 1
    with capsys.disabled():
        print(f"\n{more - FIRST - LIVES} more worlds for rare rows\nmachine      rows  fired  never by design")
        for machine, names in rows().items():
            silent = sum(matches(name, UNREACHABLE) for name in names)
            print(f"{machine:<12} {len(names):>4}  {sum(fired[one] > 0 for one in names):>5}  {silent:>5}")
        print(
            "rarest:", *(f"\n  {count:>3} {name}" for count, name in sorted((n, one) for one, n in fired.items())[:5])
        )
    surprises = [name for name in fired if fired[name] and matches(name, UNREACHABLE)]
    assert not surprises, "these were said to be unreachable:\n" + "\n".join(surprises)
    assert not missed(fired), "these never fired:\n" + "\n".join(missed(fired))


def test_every_reason_why_a_row_is_unreachable_is_about_some_row() -> None:
    names = [label(machine, row) for machine in MACHINES for row in machine.rows]
    for pattern, why in (*UNREACHABLE, *SELDOM):
        assert any(re.search(pattern, name) for name in names), f"nothing matches {pattern!r} ({why})"


def test_rows_have_labels_of_their_own() -> None:
    names = Counter(label(machine, row) for machine in MACHINES for row in machine.rows)
    assert not [name for name, count in names.items() if count > 1]
