"""What status and operations say of parks and wakes: told to a whole world, read as operators read it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from test_world_stories import BIG, named, world
from world import Shell
from world_values import SGLANG, gib

from capyctl.control import events as e
from capyctl.control import orders as o
from capyctl.control import views, waits
from capyctl.control.requests import PATHS
from capyctl.fsm.cleanup import CleanupPhase
from capyctl.fsm.types import DeploymentId, Device, Domain, HostId, Millis, RequestId, Residency
from capyctl.ledger.shortfall import _WORDS, Shortfall
from capyctl.router.endpoints import ENDPOINTS

DEEP = attrs.evolve(BIG, traits=SGLANG, residency=Residency.DEEP, ready_gib=2, cold_gib=2)


def view(here: Shell, identity: DeploymentId) -> dict[str, object]:
    found = views.deployment(here.world, identity, here.now)
    assert found is not None
    return found


def latest(here: Shell, identity: DeploymentId) -> str:
    operation = view(here, identity)["latest_operation"]
    assert isinstance(operation, dict)
    return f"{operation['action']} {operation['state']}"


def test_a_start_of_what_is_parked_is_a_wake() -> None:
    here, (a,) = world(DEEP)
    here.start(a)
    here.run(20_000)
    assert latest(here, a) == "initialize succeeded"
    here.park(a)
    here.run(20_000)
    here.start(a)
    assert latest(here, a).startswith("wake ")
    here.run(20_000)
    assert (latest(here, a), here.lane(a).gate_open) == ("wake succeeded", True)


def test_a_start_that_has_to_load_one_of_two_instances_is_no_wake() -> None:
    here, (a,) = world(attrs.evolve(DEEP, instances=2))
    here.start(a)
    here.run(20_000)
    here.park(a)
    here.run(20_000)
    here.exit(here.engines("a")[0])
    here.run(20_000)
    assert sorted(one.is_parked for _, one in here.world.book.of(a)) == [False, True]
    here.start(a)
    here.run(20_000)
    assert latest(here, a) == "initialize succeeded"


def test_a_copy_that_woke_wrongly_is_still_named_once_a_fresh_engine_serves() -> None:
    here, (a,) = world(DEEP)
    here.start(a)
    here.run(20_000)
    here.park(a)
    here.run(20_000)
    here.faults.percent = {"wake_mismatch": 100}
    here.ask("a")
    here.run(20_000, until=lambda: here.lane(a).phase in CleanupPhase)
    here.faults.percent = {}
    here.run(60_000)
    assert here.lane(a).gate_open
    (row,) = view(here, a)["instances"]  # type: ignore[misc]
    assert (row["observed_state"], row["last_error"]["code"]) == ("ready", "wake_mismatch")


def test_a_victim_that_is_deleted_while_its_switch_goes_on_keeps_nobody_from_reading_status() -> None:
    here, (a, b) = world(*named("a", "b"))
    here.start(a)
    here.run(20_000)
    here.ask("b")
    here.run(20_000, until=lambda: here.lane(b).has_launch)
    assert view(here, b)["waiting"] == "a gave way; it loads or wakes in their room"
    here.delete(a, stop=True)
    here.run(20_000, until=lambda: a not in here.world.book.deployments)
    assert not here.lane(b).gate_open
    assert [row["waiting"] for row in views.deployments(here.world, here.now)] == [
        "others gave way; it loads or wakes in their room"
    ]
    here.run(60_000)
    assert here.lane(b).gate_open


def test_a_request_at_a_path_of_the_other_kind_reads_every_path_that_its_model_is_asked_at() -> None:
    assert {path: [api for api, paths in PATHS.items() if path in paths] for path in ENDPOINTS} == {
        path: [endpoint.api] for path, endpoint in ENDPOINTS.items()
    }
    here, _ = world(*named("a"))
    event = e.RequestArrived(
        now_ms=Millis(here.now),
        request=RequestId("R"),
        route="a",
        api="decisions",
        stream=False,
        body_bytes=9,
        nameable=True,
    )
    told = [order for order in here.world.handle(event).orders if isinstance(order, o.Answer)]
    assert [(order.code, order.message) for order in told] == [
        (
            "api_mismatch",
            "a is a model for chat, and is asked at /v1/chat/completions, /v1/completions, /v1/responses, "
            "/v1/messages, /v1/embeddings and /v1/rerank",
        )
    ]


def test_embeddings_of_an_engine_that_was_started_without_them_are_refused_and_start_nothing() -> None:
    here, (a,) = world(*named("a", traits=attrs.evolve(BIG.traits, vectors=False)))
    arrival = e.RequestArrived(
        now_ms=Millis(here.now), request=RequestId("R"), route="a", api="chat", stream=False, body_bytes=9, vectors=True
    )
    (told,) = [order for order in here.world.handle(arrival).orders if isinstance(order, o.Answer)]
    words = "the engine of a serves chat and completions; embeddings and ranks are off"
    assert (told.code, told.message) == ("api_mismatch", words)
    here.run(20_000)
    assert not here.lane(a).gate_open


def test_what_a_command_may_not_do_now_is_said_with_its_reason() -> None:
    here, (a,) = world(DEEP)
    assert actions(here, a)["park"] == (False, "none of its instances is ready")
    assert actions(here, a)["start"] == (True, None)
    here.start(a)
    here.run(20_000)
    assert actions(here, a)["start"] == (False, "every instance of it is ready")
    assert actions(here, a)["park"] == (True, None)


def actions(here: Shell, identity: DeploymentId) -> dict[str, tuple[bool, str | None]]:
    rows: Any = view(here, identity)["supported_actions"]
    return {row["action"]: (row["allowed"], row["reason"]) for row in rows}


@pytest.mark.parametrize("check", [*_WORDS])
@pytest.mark.parametrize("others", [1, 2, 9])
def test_a_client_reads_what_lacks_and_neither_who_else_is_there_nor_where(check: str, others: int) -> None:
    names = {f"o{number}": f"secret-{number}.1" for number in range(10)}
    short = Shortfall(
        code="startup_requires_empty_host" if check == "stands_alone" else "insufficient_resources",
        check=check,
        host=HostId("H"),
        host_name="box.local",
        owner="me",
        domain=Domain("gpu0"),
        device=Device("gpu0"),
        needs_bytes=gib(8),
        free_bytes=gib(4),
        limit_bytes=gib(16),
        reserve_bytes=gib(0.5),
        unbacked_bytes=gib(1),
        others=tuple((f"o{number}", gib(1)) for number in range(others)),
        count=3,
        count_max=3,
    )
    for one in (short, attrs.evolve(short, evictable_bytes=gib(1), stay=(("o9", "lifecycle.warm"),))):
        said, read = one.message(names), waits.nameless(one.message(names))
        assert "box.local" in said
        assert "box.local" not in read
        assert "secret" not in read
        assert read.endswith(".")
        if "needs" in said:
            assert "needs 8.0 GiB" in read
            assert "4.0 GiB" in read
