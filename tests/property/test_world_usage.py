"""Memory as `list memory` reads it: what is set aside adds up, what is unknown is null, nobody else's is shown."""

from __future__ import annotations

from typing import Any

import attrs
from test_world_stories import BIG, named, world
from world import Shell
from world_values import RAM, SGLANG, gib

from capyctl.control import host_views
from capyctl.control.events import Observed
from capyctl.control.usage import usage
from capyctl.fsm.types import Millis, Residency
from capyctl.ledger.types import Observation

DEEP = attrs.evolve(BIG, name="b", traits=SGLANG, residency=Residency.DEEP, ready_gib=2, cold_gib=2)


def domains(here: Shell, **only: Any) -> list[dict[str, Any]]:
    return [counted(domain) for host in usage(here.world, here.now, **only)["hosts"] for domain in host["domains"]]


def counted(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its bytes as numbers; they are decimal strings, or null."""
    amounts = {name: value for name, value in row.items() if name.endswith(("bytes", "_limit", "_reserve"))}
    assert all(value is None or type(value) is str for value in amounts.values())
    found = row | {name: value and int(value) for name, value in amounts.items()}
    return found | {"holders": [counted(one) for one in row["holders"]]} if "holders" in row else found


def assert_adds_up(here: Shell) -> None:
    for domain in domains(here):
        assert domain["reserved_bytes"] == sum(holder["bytes"] for holder in domain["holders"])
        most = min(domain["managed_limit"], domain["capacity_bytes"] - domain["free_reserve"])
        assert domain["unreserved_bytes"] == max(0, most - domain["reserved_bytes"])
        used = domain["capacity_bytes"] - domain["available_bytes"]
        assert domain["foreign_bytes"] == max(0, used - domain["resident_bytes"])
        assert (domain["stale"], domain["reason"]) == (False, None)


def test_what_is_set_aside_is_who_holds_it_through_start_park_and_stop() -> None:
    here, (a, b) = world(*named("a", ready_gib=2, cold_gib=3), DEEP)
    assert_adds_up(here)
    assert all(not domain["holders"] for domain in domains(here))
    here.start(a)
    here.start(b)
    here.run(20_000)
    assert_adds_up(here)
    held = {holder["name"]: holder["phase"] for domain in domains(here) for holder in domain["holders"]}
    assert held == {"a": "ready", "b": "ready"}
    here.park(b)
    here.run(20_000)
    assert_adds_up(here)
    (parked,) = [holder for domain in domains(here) for holder in domain["holders"] if holder["phase"] == "parked"]
    assert parked["name"] == "b"
    assert sum(domain["parked_bytes"] for domain in domains(here)) == parked["bytes"]
    here.stop(a)
    here.run(20_000)
    assert_adds_up(here)
    assert {holder["name"] for domain in domains(here) for holder in domain["holders"]} == {"b"}


def test_it_adds_up_to_what_was_seen_where_a_control_group_took_a_part_away() -> None:
    here, _ = world(*named("a", ready_gib=2, cold_gib=2))
    (policy,) = (row.policy for row in here.world.book.hosts.values())
    small = Observation(
        capacity_bytes=gib(5), available_bytes=gib(4), seen_at_ms=Millis(here.now), residents={"x": gib(0.5)}
    )
    here.tell(Observed(now_ms=Millis(here.now), host=policy.host, domains={RAM: small}))
    (domain,) = domains(here)
    assert (domain["capacity_bytes"], domain["foreign_bytes"]) == (gib(5), gib(0.5))
    (shown,) = (one for host in host_views.hosts(here.world) for one in host["domains"])
    assert shown["capacity_bytes"] == str(gib(5))


def test_one_deployment_shows_its_own_and_the_totals_of_all() -> None:
    here, (a, b) = world(*named("a", "b", ready_gib=2, cold_gib=2))
    here.start(a)
    here.start(b)
    here.run(20_000)
    every, mine = domains(here), domains(here, deployment=a)
    assert {holder["name"] for domain in mine for holder in domain["holders"]} == {"a"}
    assert [domain["reserved_bytes"] for domain in mine] == [domain["reserved_bytes"] for domain in every]
    (only,) = usage(here.world, here.now, deployment=b)["deployments"]
    assert only["name"] == "b"


def test_an_instance_says_how_long_it_was_idle_or_that_nothing_is_known() -> None:
    here, (a,) = world(BIG)
    (before,) = usage(here.world, here.now)["deployments"][0]["instances"]
    assert (before["idle_ms"], before["activity"], before["bytes"]) == (None, "none_recorded", {})
    here.ask("a", answer_ms=30_000)
    here.run(15_000)
    (working,) = usage(here.world, here.now)["deployments"][0]["instances"]
    assert (working["in_flight"], working["idle_ms"], working["activity"]) == (1, None, "in_flight")
    here.run(60_000)
    (idle,) = usage(here.world, here.now)["deployments"][0]["instances"]
    assert (idle["activity"], idle["idle_ms"] > 20_000, idle["state"]) == ("idle", True, "ready")
    assert here.lane(a).gate_open


def test_a_host_that_does_not_answer_has_no_figures_of_now_and_keeps_its_charges() -> None:
    here, (a,) = world(BIG)
    here.start(a)
    here.run(20_000)
    (host,) = here.hosts.values()
    here.drop_session(host)
    here.run(10)
    (row,) = usage(here.world, here.now)["hosts"]
    for domain in row["domains"]:
        assert domain["stale"] is True
        assert domain["reason"]
    assert sum(int(domain["reserved_bytes"]) for domain in row["domains"]) > 0
