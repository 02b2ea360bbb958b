"""What starts were measured to need, in a whole world: planned with later, by revision, host and installation."""

from __future__ import annotations

from typing import Any

import attrs
from simulation import checked
from test_world_cards import GPU0, GPU1, OnCard
from test_world_cards import world as cards
from world import Shell, shell
from world_values import RAM, VLLM, Model, gib, policy

from capyctl.control import events as e
from capyctl.control import host_views, residue, views
from capyctl.fsm.activation import ActivationPhase
from capyctl.fsm.proofs import Resident
from capyctl.fsm.types import DeploymentId, HostId, Lane, Millis, Phase, Residency
from capyctl.ledger.types import Allocation, Plan

HOST = HostId("h1")
ROOMY = (policy("h1", capacity=40, managed=30, parked=8),)
BIG = Model(name="a", ready_gib=4, cold_gib=9, peak_gib=6)


@attrs.frozen(kw_only=True)
class Unsized(Model):
    """A model whose first start nobody can size: it is charged all that may be charged."""

    @property
    def plan(self) -> Plan:
        return attrs.evolve(super().plan, provenance={Phase.COLD: "whole_host"})


def world(*models: Model, **options: Any) -> tuple[Shell, list[DeploymentId]]:
    here = checked(shell(3, **{"policies": ROOMY, **options}))
    identities = [here.deploy(model) for model in models]
    here.run(4_000)
    return here, identities


def served(here: Shell, identity: DeploymentId) -> None:
    here.start(identity)
    here.run(60_000, until=lambda: here.lane(identity).gate_open)
    assert here.lane(identity).gate_open
    here.run(1_000)


def stopped(here: Shell, identity: DeploymentId) -> None:
    here.stop(identity)
    here.run(60_000, until=lambda: here.lane(identity).phase is ActivationPhase.STOPPED)
    here.run(1_000)


def cold(here: Shell, identity: DeploymentId) -> int:
    return here.world.book.deployments[identity].plans[HOST].at(Phase.COLD).on(RAM)


def startup(here: Shell, identity: DeploymentId) -> tuple[int, str]:
    view = views.deployment(here.world, identity, Millis(here.now))
    assert view is not None
    return int(view["startup"]["bytes"][RAM]), view["startup"]["provenance"]


def installed(here: Shell, build: str) -> None:
    here.tell(e.ProfilesPublished(now_ms=Millis(here.now), host=HOST, installations={"p": build}))


def test_the_second_start_is_charged_what_the_first_one_held_and_status_says_so() -> None:
    here, (a,) = world(BIG)
    assert startup(here, a) == (gib(9), "derived")
    served(here, a)
    assert startup(here, a) == (gib(6), "measured")
    view = views.deployment(here.world, a, Millis(here.now))
    assert view is not None
    rows = {row["phase"]: (row["bytes"], row["provenance"], row["planned_bytes"]) for row in view["memory"]}
    assert rows == {
        "cold": (str(gib(6)), "measured", str(gib(9))),
        "ready": (str(gib(4)), "derived", None),
    }
    stopped(here, a)
    here.start(a)
    here.run(1_000, until=lambda: here.world.book.ledger.holding(Lane(a, 0).owner) is not None)
    held = here.world.book.ledger.held_by(Lane(a, 0).owner)
    assert (held.phase, held.on(RAM)) == (Phase.COLD, gib(6))


def test_a_peak_below_ready_is_planned_as_ready_and_shown_as_it_was() -> None:
    here, (a,) = world(attrs.evolve(BIG, peak_gib=1))
    served(here, a)
    assert startup(here, a) == (gib(4), "measured")
    view = views.deployment(here.world, a, Millis(here.now))
    assert view is not None
    assert view["startup"]["measured_bytes"] == {RAM: str(gib(4))}  # it held that at the end of its start


def test_what_was_measured_outlives_the_role() -> None:
    here, (a,) = world(BIG)
    served(here, a)
    here.crash()
    here.run(30_000)
    assert cold(here, a) == gib(6)
    assert startup(here, a) == (gib(6), "measured")


def test_a_new_revision_begins_with_its_own_estimates() -> None:
    here, (a,) = world(BIG)
    served(here, a)
    here.revise(a, attrs.evolve(BIG, note="v2", cold_gib=8))
    here.run(60_000)
    assert cold(here, a) == gib(8)
    assert startup(here, a) == (gib(8), "derived")


def test_two_starts_at_one_time_say_nothing_about_either() -> None:
    here, (a, b) = world(attrs.evolve(BIG, load_ms=20_000), attrs.evolve(BIG, name="b", load_ms=20_000))
    here.start(a)
    here.start(b)
    here.run(90_000, until=lambda: here.lane(a).gate_open and here.lane(b).gate_open)
    assert {cold(here, a), cold(here, b)} == {gib(9), gib(6)}, "the last of them was alone at its end"


def test_an_answer_that_is_no_news_measures_nothing() -> None:
    here, (a,) = world(BIG)
    served(here, a)
    run = here.lane(a).run
    late = e.LaunchReady(
        now_ms=Millis(here.now),
        incarnation=run.incarnation,
        token=run.token or 1,
        processes=run.processes,
        usable=run.usable if hasattr(run, "usable") else None,  # type: ignore[arg-type]
        peak_bytes={RAM: gib(8)},
    )
    here.tell(late)
    assert cold(here, a) == gib(6)


def test_another_installation_starts_from_the_estimate_again() -> None:
    here, (a,) = world(BIG)
    installed(here, "1.0")
    served(here, a)
    assert cold(here, a) == gib(6)
    installed(here, "1.0")
    assert cold(here, a) == gib(6)
    installed(here, "2.0")
    assert startup(here, a)[1] == "measured", "what runs is of the old one"
    assert cold(here, a) == gib(9)
    stopped(here, a)
    assert startup(here, a) == (gib(9), "derived")
    served(here, a)
    assert cold(here, a) == gib(6)


def test_a_run_of_the_old_installation_measures_nothing_for_the_new_one() -> None:
    here, (a,) = world(BIG)
    installed(here, "1.0")
    here.start(a)
    here.run(2_000)
    installed(here, "2.0")
    here.run(60_000, until=lambda: here.lane(a).gate_open)
    assert cold(here, a) == gib(9)


# --- a first start that nobody can size (memory 14) --------------------------------------------------------

WHOLE = Unsized(name="w", ready_gib=12, cold_gib=30, peak_gib=14)
DEEP = Model(name="d", traits=VLLM, residency=Residency.DEEP, ready_gib=4, cold_gib=4, parked_gib=0.5)


def test_a_request_empties_the_host_for_it_and_afterwards_it_starts_beside_others() -> None:
    here, (w, d, s) = world(WHOLE, DEEP, attrs.evolve(BIG, name="s", cold_gib=5, peak_gib=None))
    served(here, d)
    served(here, s)
    here.park(d)
    here.run(30_000, until=lambda: here.lane(d).is_parked)
    client = here.ask("w")
    here.run(200, until=lambda: False)
    here.run(120_000, until=lambda: client.told is not None)
    assert client.told == "ok"
    assert {one.phase for one in (here.lane(d), here.lane(s))} == {ActivationPhase.STOPPED}
    assert startup(here, w) == (gib(14), "measured")
    stopped(here, w)
    served(here, s)
    served(here, d)
    served(here, w)
    assert all(here.lane(one).gate_open for one in (w, d, s)), "its peak is known, and there is room for all"


def test_it_is_charged_all_that_may_be_charged_until_it_is_ready() -> None:
    here, (w,) = world(attrs.evolve(WHOLE, load_ms=20_000))
    assert startup(here, w) == (gib(30), "whole_host")
    here.start(w)
    here.run(4_000)
    view = views.deployment(here.world, w, Millis(here.now))
    assert view is not None
    assert [(row["phase"], row["bytes"], row["provenance"]) for row in view["ledger"]] == [
        ("cold", str(gib(30)), "whole_host")
    ]
    here.run(60_000, until=lambda: here.lane(w).gate_open)
    assert here.world.book.ledger.held_by(Lane(w, 0).owner).on(RAM) == gib(12)


def test_a_plain_start_beside_others_says_that_the_host_has_to_be_empty_and_releases_nobody() -> None:
    here, (w, d) = world(WHOLE, DEEP)
    served(here, d)
    key = here.start(w)
    here.run(10_000)
    reply = here.reply(key)
    assert (reply.code, reply.receipt) == ("startup_requires_empty_host", None)
    assert reply.message == (
        "the first start of w is measured on a host of its own: h1 has to be empty for it, "
        "and is charged to d (4.0 GiB). Try: capyctl start deployment w --evict, or state memory.startup"
    )
    assert here.lane(d).gate_open
    assert not here.world.book.open_operations.get(w)


def test_a_plain_start_joins_the_requests_that_empty_the_host_and_a_deploy_waits_for_it() -> None:
    here, (w, d) = world(WHOLE, DEEP)
    served(here, d)
    client = here.ask("w")
    here.run(100)
    key = here.start(w)
    here.run(120_000, until=lambda: client.told is not None)
    assert (client.told, here.reply(key).code) == ("ok", None)
    here, (w, d) = world(WHOLE, DEEP)
    served(here, d)
    key = here.revise(w, attrs.evolve(WHOLE, instances=2), activate=True)
    here.run(10_000)
    assert here.reply(key).code is None, "its document was accepted, so its start waits"
    assert here.lane(d).gate_open


def test_whoever_stays_on_the_host_is_named_to_those_who_wait_for_it() -> None:
    here, (w, d) = world(WHOLE, attrs.evolve(DEEP, warm=True))
    served(here, d)
    key = here.start(w, evict=True)
    client = here.ask("w")
    here.run(10_000)
    assert here.reply(key).code in (None, "startup_requires_empty_host")
    assert client.told == "insufficient_resources"  # only an operator can make that room
    seen = views.deployment(here.world, w, Millis(here.now))
    assert seen is not None
    error = seen["instances"][0]["last_error"]["message"]
    assert "its first start takes all of h1; charged to d (4.0 GiB)" in error
    assert "Nobody gives way for it: stop d (`capyctl stop deployment d`)" in error


def test_an_operator_that_lets_others_give_way_empties_the_host() -> None:
    here, (w, d) = world(WHOLE, DEEP)
    served(here, d)
    here.start(w, evict=True)
    here.run(120_000, until=lambda: here.lane(w).gate_open)
    assert here.lane(w).gate_open
    assert here.lane(d).phase is ActivationPhase.STOPPED
    assert here.world.book.deployments[w].plans[HOST].at(Phase.COLD).on(RAM) == gib(14)


def test_nobody_starts_beside_it() -> None:
    here, (w, d) = world(attrs.evolve(WHOLE, load_ms=20_000), DEEP)
    here.start(w)
    here.run(4_000)
    here.start(d)
    here.run(2_000)
    assert not here.lane(d).has_launch
    here.run(90_000, until=lambda: here.lane(w).gate_open and here.lane(d).gate_open)
    assert here.lane(d).gate_open, "once it is ready there is room"


# --- several cards --------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Parks(OnCard):
    """A model on any card, whose copy is guessed to keep 1 GiB of it."""

    @property
    def plan(self) -> Plan:
        made = super().plan
        ready = made.at(Phase.READY)
        copy = Allocation(bytes={**ready.bytes, GPU0: gib(1)})
        phases = {**made.phases, Phase.PARKING: ready, Phase.PARKED: copy, Phase.WAKE: ready}
        return attrs.evolve(made, phases=phases, provenance={Phase.COLD: "derived", Phase.PARKED: "placeholder"})


def test_what_a_park_left_on_one_card_is_charged_on_whatever_card_its_like_is() -> None:
    here = cards(Parks(name="a", instances=2, card_gib=8))
    (a,) = here.models
    here.start(a)
    here.run(60_000, until=lambda: here.lane(a).gate_open and here.lane(a, 1).gate_open)
    lanes = [Lane(a, 0), Lane(a, 1)]
    book = here.world.book
    mine = {lane: next(one for one in book.ledger.held_by(lane.owner).allocation.bytes if one != RAM) for lane in lanes}
    assert set(mine.values()) == {GPU0, GPU1}
    for index, (parked, left) in enumerate(((lanes[1], 1.5), (lanes[0], 1.25))):
        sample = Resident(
            incarnation=book.instances[parked].run.incarnation,
            resident_bytes=gib(left),
            budget_bytes=gib(3),
            released_at_ms=Millis(index),
            sampled_at_ms=Millis(index + 1),
        )
        residue.measured(book, parked, {mine[parked]: sample})
        for lane in lanes:
            held = book.ledger.held_by(lane.owner).at(Phase.PARKED)
            assert held.bytes == {mine[lane]: gib(1.5), RAM: gib(1)}
    planned = book.deployments[a].plans[HOST].at(Phase.PARKED)
    assert planned.bytes == {GPU0: gib(1.5), RAM: gib(1)}


# --- what a host says of its memory ----------------------------------------------------------------------------


def test_limits_that_other_programs_took_are_warned_of_and_what_deployments_hold_is_no_reason() -> None:
    here, (a,) = world(BIG, policies=(policy("h1", capacity=20, managed=14),), attributed=True)
    served(here, a)
    here.run(30_000)
    (host,) = host_views.hosts(here.world)
    assert host["memory_warnings"] == []
    assert host["domains"][0]["residents"] == [{"name": "a/0", "bytes": str(gib(4))}]
    here.hosts[HOST].foreign_bytes = gib(8)
    here.run(30_000)
    (host,) = host_views.hosts(here.world)
    assert host["memory_warnings"] == [
        "unified: managed limit 14.0 GiB and reserve 1.0 GiB do not fit into the 8.0 GiB available now and the 4.0 GiB "
        "that deployments hold there; starts may wait until other programs free memory"
    ]


def test_a_card_that_is_not_read_is_warned_of_and_whoever_waits_for_it_is_told_so() -> None:
    here = cards(OnCard(name="a", device="gpu1"), cards=(12, 12))
    (a,) = here.world.book.deployments
    here.unread = frozenset({GPU1})
    here.run(10_000)
    (host,) = host_views.hosts(here.world)
    assert host["memory_warnings"] == ["gpu1: its card could not be read; nothing starts or wakes there until it is"]
    here.start(a)
    here.run(30_000)
    view = views.deployment(here.world, a, here.now)
    assert view["waiting"].startswith("gpu1 of h1 could not be read, and nothing starts or wakes there until it is")
    assert here.world.book.ledger.holding(Lane(a, 0).owner) is None
    here.unread = frozenset()
    here.run(60_000, until=lambda: here.lane(a).gate_open)
    assert here.lane(a).gate_open, "it starts by itself once the card is read"
    assert host_views.hosts(here.world)[0]["memory_warnings"] == []
