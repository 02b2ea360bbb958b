"""The management API over a real socket, a real store and the real world."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import trio
from server_role import API_KEY, CONFIG, HOST, TOKEN, FakeAgent, Role, http, policy, role

from capyctl import __version__, ulid
from capyctl import clock as clocks
from capyctl.checkpoints.store import CheckpointStore
from capyctl.control.records import RECORDS
from capyctl.control.world import World
from capyctl.errors import Refusal, shown_details
from capyctl.roles.machine import look_at_model
from capyctl.router.desk import Arrival
from capyctl.server import listener
from capyctl.server.preview import Site
from capyctl.server.store import Store


@pytest.fixture
async def here(tmp_path):
    async with role(tmp_path / "server") as running:
        yield running


AUTH = {"Authorization": f"Bearer {TOKEN}"}


# --- the door --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "Bearer wrong-token-0123456789abcdefghijkl")],
        [("Authorization", f"Bearer {API_KEY}")],
        [("Authorization", f"Basic {TOKEN}")],
        [("Authorization", f"Bearer {TOKEN}"), ("Authorization", f"Bearer {TOKEN}")],
        [("X-Api-Key", TOKEN)],
    ],
)
@pytest.mark.parametrize("path", ["/management/v1/hosts", "/management/v1/nowhere", "/metrics"])
async def test_without_exactly_one_token_every_path_is_401(here, headers, path):
    status, found, content = await http(here.address, "GET", path, headers, None)
    assert status == 401
    assert json.loads(content)["error"]["code"] == "unauthenticated"
    assert "server" not in found
    assert found["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example:7443"}, {"Origin": "http://127.0.0.1:1"}]
)
async def test_what_a_browser_page_could_send_is_forbidden(here, headers):
    status, _, content = await http(here.address, "GET", "/management/v1/hosts", {**AUTH, **headers}, None)
    assert (status, json.loads(content)["error"]["code"]) == (403, "forbidden")


async def test_paths_methods_and_queries_that_do_not_exist_say_so(here):
    for method, path, expected in (
        ("GET", "/nowhere", (404, "not_found")),
        ("DELETE", "/deployments", (405, "method_not_allowed")),
        ("GET", "/hosts?x=1", (400, "invalid_request")),
        ("GET", "/deployments?limit=0", (400, "invalid_request")),
        ("GET", "/deployments?limit=101", (400, "invalid_request")),
        ("GET", "/deployments?limit=-1", (400, "invalid_request")),
        ("GET", "/deployments?limit=1&limit=2", (400, "invalid_request")),
        ("GET", "/deployments?after=" + "x" * 4000, (400, "invalid_request")),
        ("GET", "/deployments/01n8c2f0qw7v5t3r9jx4b6m1kd", (400, "invalid_request")),
        ("GET", "/deployments/'; DROP TABLE rows".replace(" ", "%20"), (400, "invalid_request")),
        ("GET", f"/deployments/{ulid.fresh()}", (404, "not_found")),
        ("GET", f"/operations/{ulid.fresh()}", (404, "not_found")),
        ("GET", "/operations/x", (400, "invalid_request")),
        ("POST", "/hosts/x/drain", (400, "invalid_request")),
    ):
        status, answer = await here.ask(method, path)
        assert (status, answer["error"]["code"]) == expected, path
        assert answer["api_version"] == "1"


def test_a_management_address_that_is_taken_names_the_option_for_another():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(Refusal, match=f"127.0.0.1:{port}: another program .*--management-listen$") as caught:
            listener._bind("127.0.0.1", port)
    assert caught.value.code == "unavailable"


async def test_a_405_names_what_is_allowed(here):
    headers = {**AUTH, "Idempotency-Key": "k"}
    _, found, _ = await http(here.address, "PATCH", "/management/v1/deployments", headers, None)
    assert set(found["allow"].split(", ")) == {"GET", "POST"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"config": {}, "config": {}}',
        b'{"config": {"name": "a", "name": "b"}}',
        b'{"config": NaN}',
        b'{"config": {}, "surprise": 1}',
        b'{"activate": true}',
        b'{"config": "text"}',
        b'{"config": {"name": "x"}, "activate": 1}',
        b"\xef\xbb\xbf{}",
        b'{"config": ' + b"[" * 200 + b"]" * 200 + b"}",
    ],
)
async def test_a_body_that_is_not_strict_json_of_this_command_changes_nothing(here, body):
    headers = {**AUTH, "Idempotency-Key": ulid.fresh(), "Content-Type": "application/json"}
    status, _, content = await http(here.address, "POST", "/management/v1/deployments", headers, body)
    assert status == 400
    assert json.loads(content)["error"]["code"] in ("invalid_request", "invalid_config")
    assert here.services.world.book.deployments == {}


async def test_a_body_over_a_mebibyte_is_413_and_one_that_does_not_come_is_408(here, monkeypatch):
    headers = {**AUTH, "Idempotency-Key": ulid.fresh()}
    status, _, content = await http(here.address, "POST", "/management/v1/deployments", headers, b" " * ((1 << 20) + 1))
    assert (status, json.loads(content)["error"]["code"]) == (413, "body_too_large")
    host, _, port = here.address.rpartition(":")
    began = trio.current_time()
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        head = f"POST /management/v1/deployments HTTP/1.1\r\nHost: {here.address}\r\nAuthorization: Bearer {TOKEN}\r\n"
        await stream.send_all(f"{head}Idempotency-Key: k\r\nContent-Length: 10\r\n\r\n".encode())
        with trio.fail_after(30):
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 408 ")
    assert trio.current_time() - began > 4


@pytest.mark.parametrize(
    "keys", [[], ["a", "b"], [""], ["x" * 129], ["with space"], ["tab\there"]], ids=lambda keys: str(len(keys))
)
async def test_a_change_carries_exactly_one_idempotency_key(here, keys):
    headers = [*AUTH.items(), *(("Idempotency-Key", key) for key in keys)]
    body = json.dumps({"config": CONFIG}).encode()
    status, _, content = await http(here.address, "POST", "/management/v1/deployments", headers, body)
    assert (status, json.loads(content)["error"]["code"]) == (400, "invalid_request")


async def test_length_and_chunks_together_are_refused(here):
    host, _, port = here.address.rpartition(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        head = f"POST /management/v1/deployments HTTP/1.1\r\nHost: {here.address}\r\nAuthorization: Bearer {TOKEN}\r\n"
        await stream.send_all(f"{head}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode())
        with trio.fail_after(30):
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 400 ")


# --- deployments -----------------------------------------------------------------------------------


async def test_a_deployment_is_created_measured_started_stopped_and_deleted(here):
    status, receipt = await here.ask("POST", "/deployments", {"config": CONFIG, "activate": True})
    assert status == 202
    assert receipt["revision"] == "1"
    assert not receipt["joined"]
    view = await here.settled(receipt["deployment_id"], lambda view: view["ready"] == "1/1")
    assert (view["name"], view["observed_state"], view["engine_version"]) == ("notes", "ready", "b9000")
    _, operation = await here.ask("GET", f"/operations/{receipt['operation_id']}")
    assert (operation["state"], operation["error_code"]) == ("succeeded", None)
    status, refused = await here.act(view, "delete")
    assert (status, refused["error"]["code"]) == (409, "delete_requires_cleanup")
    status, stopped = await here.act(view, "stop")
    assert status == 202
    view = await here.settled(view["id"], lambda view: view["observed_state"] == "stopped")
    assert view["desired_state"] == "stopped"
    _, operation = await here.ask("GET", f"/operations/{stopped['operation_id']}")
    assert (operation["action"], operation["state"]) == ("stop", "succeeded")
    status, _ = await here.act(view, "delete")
    assert status == 202
    assert await here.ask("GET", "/deployments") == (
        200,
        {"api_version": "1", "deployments": [], "cursor": here.services.cursor},
    )
    assert here.agent.running == {}


async def test_delete_with_stop_stops_first(here):
    view = await here.deployed()
    await here.act(view, "start")
    view = await here.settled(view["id"], lambda view: view["ready"] == "1/1")
    status, _ = await here.act(view, "delete", stop=True)
    assert status == 202
    with trio.fail_after(30):
        while (await here.ask("GET", f"/deployments/{view['id']}"))[0] != 404:
            await trio.sleep(0.01)
    assert here.agent.running == {}


async def test_the_same_command_twice_has_one_effect_and_one_receipt(here):
    key = ulid.fresh()
    first = await here.ask("POST", "/deployments", {"config": CONFIG}, key=key)
    assert await here.ask("POST", "/deployments", {"config": CONFIG}, key=key) == first
    status, other = await here.ask("POST", "/deployments", {"config": {**CONFIG, "name": "else"}}, key=key)
    assert (status, other["error"]["code"]) == (409, "idempotency_conflict")
    assert len(here.services.world.book.deployments) == 1


async def test_a_receipt_outlives_a_restart_its_deadline_and_the_policy_it_met(tmp_path):
    key = ulid.fresh()
    async with role(tmp_path / "server") as before:
        view = await before.deployed()
        body = {"expected_revision": 1, "action": "start", "deadline_ms": before.services.clock() + 300}
        first = await before.ask("POST", f"/deployments/{view['id']}/actions", body, key=key)
        assert first[0] == 202
        await before.settled(view["id"], lambda view: view["ready"] == "1/1")
        agent = before.agent
    await trio.sleep(0.3)  # the deadline passes
    async with role(tmp_path / "server", agent) as after:
        assert await after.ask("POST", f"/deployments/{view['id']}/actions", body, key=key) == first
        fresh = await after.ask("POST", f"/deployments/{view['id']}/actions", body)
        assert (fresh[0], fresh[1]["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("ahead_s", [7_200, -7_200])
async def test_a_deadline_is_read_by_the_machines_clock_as_it_is_set_now(tmp_path, monkeypatch, ahead_s):
    wall = time.time_ns
    async with role(tmp_path / "server") as here:
        view = await here.deployed()
        monkeypatch.setattr(time, "time_ns", lambda: wall() + ahead_s * 10**9)
        passed = await here.act(view, "start", deadline_ms=time.time_ns() // 1_000_000 - 10_000)
        assert (passed[0], passed[1]["error"]["code"]) == (504, "deadline_exceeded")
        status, receipt = await here.act(view, "start", deadline_ms=time.time_ns() // 1_000_000 + 60_000)
        assert status == 202
        opened = here.services.world.book.operations[receipt["operation_id"]]
        assert 0 < opened.deadline_ms - here.services.clock() <= 60_000


async def test_an_engine_of_before_serves_again_only_after_it_was_looked_at(tmp_path):
    async with role(tmp_path / "server") as before:
        view = await before.deployed()
        await before.act(view, "start")
        await before.settled(view["id"], lambda view: view["ready"] == "1/1")
        agent = before.agent
    agent.diary.clear()
    async with role(tmp_path / "server", agent) as after:
        await after.settled(view["id"], lambda view: view["ready"] == "1/1")
        assert "Probe" in agent.diary
        assert "Launch" not in agent.diary
    agent.running.clear()  # it died while nobody looked
    async with role(tmp_path / "server", agent) as after:
        seen = await after.settled(view["id"], lambda view: view["observed_state"] in ("stopped", "failed"))
        assert seen["ledger"] == []


@pytest.mark.parametrize(
    ("config", "status", "code"),
    [
        ({"engine": "vllm"}, 409, "profile_not_published"),
        ({"engine": "nothing"}, 409, "profile_not_published"),
        ({"name": "../../x"}, 400, "invalid_config"),
        ({"name": "x" * 65}, 400, "invalid_config"),
        ({"kind": "host"}, 400, "invalid_config"),
        ({"tls": {}}, 400, "invalid_config"),
        ({"model": {"hf": "a/b@main"}}, 400, "invalid_config"),
        ({"model": {"url": "https://x.example/m.tar", "sha256": "0" * 64, "archive": "tar"}}, 400, "unsupported"),
        ({"host": "elsewhere"}, 404, "not_found"),
        ({"placement": {"selector": {"a": "b"}}}, 409, "host_ineligible"),
        ({"request_deadline": "3600s"}, 400, "invalid_config"),
        ({"residency": "deep"}, 409, "capability_missing:deep_park"),
        ({"topology": {"tensor_parallel": 2}}, 400, "multi_gpu_unsupported"),
        ({"engine_config": {"extra_args": ["--port", "1"]}}, 400, "invalid_config"),
        ({"engine_config": {"accept_extra_args": True, "extra_args": ["--port", "1"]}}, 400, "invalid_config"),
        ({"engine_config": {"env": {"LD_PRELOAD": "x"}}}, 400, "engine_env_reserved:LD_PRELOAD"),
    ],
)
async def test_a_document_that_cannot_run_is_refused_and_nothing_is_stored(here, config, status, code):
    got, answer = await here.ask("POST", "/deployments", {"config": {**CONFIG, **config}})
    assert (got, answer["error"]["code"]) == (status, code), answer
    assert here.services.world.book.deployments == {}


async def test_a_family_word_is_settled_as_the_profile_that_it_meant(here):
    view = await here.deployed()
    assert view["profile"] == "llamacpp"
    assert json.loads(view["document"])["runtime_profile"] == "llamacpp"


async def test_what_may_be_a_credential_is_in_no_view_of_a_document(here):
    model = {"url": "https://mirror.example/m.gguf?signature=s3cret", "sha256": "0" * 64}
    _, receipt = await here.ask("POST", "/deployments", {"config": {**CONFIG, "model": model}})
    identity = receipt["deployment_id"]
    for path in (f"/deployments/{identity}", "/deployments", "/snapshot", f"/deployments/{identity}/effective-config"):
        text = json.dumps((await here.ask("GET", path))[1])
        assert "s3cret" not in text, path
        assert "https://mirror.example/m.gguf?<redacted>" in text, path
    assert "s3cret" in here.services.world.book.deployments[identity].spec.document  # what is asked stays what was said


async def test_a_name_or_route_that_is_taken_is_a_conflict(here):
    await here.deployed()
    status, answer = await here.ask("POST", "/deployments", {"config": CONFIG})
    assert (status, answer["error"]["code"]) == (409, "route_conflict")
    status, answer = await here.ask("POST", "/deployments", {"config": {**CONFIG, "name": "b", "routes": ["notes"]}})
    assert (status, answer["error"]["code"]) == (409, "route_conflict")
    assert answer["error"]["message"] == f"b cannot have the route notes: {CONFIG['name']} has it. Name another"


async def test_a_revision_must_name_the_current_one(here):
    view = await here.deployed()
    body = {"expected_revision": 7, "config": {**CONFIG, "instances": 2}}
    status, answer = await here.ask("PUT", f"/deployments/{view['id']}", body)
    assert (status, answer["error"]["code"]) == (409, "revision_conflict")
    assert "the revision is 1 now; read it again (capyctl inspect deployment " in answer["error"]["message"]
    status, receipt = await here.ask("PUT", f"/deployments/{view['id']}", {**body, "expected_revision": 1})
    assert (status, receipt["revision"]) == (202, "2")


@pytest.mark.parametrize(
    "fields",
    [
        {"expected_revision": "1"},
        {"expected_revision": 0},
        {"expected_revision": -1},
        {"expected_revision": 2**63},
        {"expected_revision": True},
        {"expected_revision": 1.0},
        {"deadline_ms": "soon"},
        {"action": "explode"},
        {"action": 1},
        {"action": "stop", "evict": True},
        {"action": "start", "stop": True},
        {"evict": "yes"},
        {"surprise": 1},
    ],
)
async def test_an_action_with_a_field_it_does_not_take_is_400(here, fields):
    view = await here.deployed()
    body = {
        "expected_revision": 1,
        "action": "start",
        "deadline_ms": here.services.clock() + 10_000,
        **fields,
    }
    status, answer = await here.ask("POST", f"/deployments/{view['id']}/actions", body)
    assert (status, answer["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("action", ["park", "preinitialize", "suspend", "resume"])
async def test_what_no_engine_here_can_do_is_unsupported(here, action):
    view = await here.deployed()
    status, answer = await here.act(view, action)
    assert (status, answer["error"]["code"]) == (409, "unsupported_capability")


async def test_what_is_to_be_prepared_is_named_exactly_and_has_to_park(here):
    view = await here.deployed()
    member = {"deployment_id": view["id"], "expected_revision": 1, "final_state": "parked"}

    async def refused(*members, **more):
        body = {"members": list(members), "deadline_ms": here.services.clock() + 10_000, **more}
        status, answer = await here.ask("POST", "/preinitializations", body)
        return status, answer["error"]["code"], answer["error"]["message"]

    for wrong, said in (
        ({**member, "surprise": 1}, "members[0]: expected deployment_id, expected_revision and final_state"),
        ({**member, "final_state": "ready"}, "members[0].final_state: expected parked"),
        ({"expected_revision": 1}, "members[0].deployment_id: is required"),
    ):
        status, code, message = await refused(wrong)
        assert (status, code) == (400, "invalid_request")
        assert message.startswith(said)
    assert (await refused())[:2] == (400, "invalid_request")
    assert (await refused(member, deadline_ms=1))[:2] == (504, "deadline_exceeded")
    assert await refused(member) == (
        409,
        "unsupported_capability",
        f"{view['name']} cannot be parked: its residency is restart_only (llama.cpp cannot park). "
        f"Try: capyctl start deployment {view['name']}",
    )


async def test_a_checkpoint_that_cannot_be_measured_is_said_in_the_view_and_refuses_a_start(tmp_path):
    clock = clocks.steady()
    agent = FakeAgent(clock, refuse_digest=("invalid_root", "/models/notes leaves the models directory"))
    async with role(tmp_path / "server", agent) as here:
        view = await here.deployed()
        assert view["checkpoint"]["code"] == "invalid_root"
        status, answer = await here.act(view, "start")
        assert status in (400, 409)
        assert answer["error"]["code"] in ("invalid_root", "checkpoint_unusable")


async def test_a_model_that_is_in_no_directory_of_this_machine_is_refused_before_anything_is_created(tmp_path):
    async with role(tmp_path / "server") as here:
        store = CheckpointStore(None, tmp_path)
        site = Site(
            allowed=here.services.allowed[0],
            policy=policy(),
            profiles=here.services.registry,
            request_deadline_ms=here.services.request_deadline_ms,
            facts=partial(store.facts_here, downloads=str(tmp_path)),
            source="here",
        )
        here.services.look_at_model = partial(look_at_model, store, site)
        status, answer = await here.ask("POST", "/deployments", {"config": {**CONFIG, "model": "notes"}})
        assert (status, answer["error"]["code"]) == (409, "invalid_root")
        assert answer["error"]["message"] == f"notes: model: the model directory {tmp_path}/notes is not there"
        assert here.services.deployments() == []


async def test_a_failed_start_is_told_by_its_operation_and_its_instance(tmp_path):
    agent = FakeAgent(clocks.steady(), refuse_launch=True)
    async with role(tmp_path / "server", agent) as here:
        view = await here.deployed()
        _, receipt = await here.act(view, "start")
        view = await here.settled(view["id"], lambda view: view["observed_state"] == "failed")
        _, operation = await here.ask("GET", f"/operations/{receipt['operation_id']}")
        assert (operation["state"], operation["error_code"]) == ("failed", "launch_failed")
        assert "status 1" in view["instances"][0]["last_error"]["message"]
        assert view["ledger"] == []


async def test_pages_of_deployments_follow_each_other(here):
    names = [f"m{number}" for number in range(5)]
    for name in names:
        await here.ask("POST", "/deployments", {"config": {**CONFIG, "name": name}})
    _, first = await here.ask("GET", "/deployments?limit=2")
    _, second = await here.ask("GET", f"/deployments?limit=2&after={first['next']}")
    _, third = await here.ask("GET", f"/deployments?limit=2&after={second['next']}")
    assert "next" not in third
    assert [row["name"] for page in (first, second, third) for row in page["deployments"]] == names


async def test_of_fifty_changes_at_once_none_is_lost_and_none_is_done_twice(here):
    answers: list[tuple[int, dict]] = []

    async def create(name: str) -> None:
        key = ulid.fresh()
        while True:
            status, answer = await here.ask("POST", "/deployments", {"config": {**CONFIG, "name": name}}, key=key)
            answers.append((status, answer))
            if status != 429:
                return
            await trio.sleep(0.02)

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(create, f"m{number}")
    assert {status for status, _ in answers} <= {202, 429}
    accepted = [answer["deployment_id"] for status, answer in answers if status == 202]
    assert len(accepted) == len(set(accepted)) == len(here.services.world.book.deployments) == 50


# --- reading ---------------------------------------------------------------------------------------


async def test_the_snapshot_and_every_other_read_start_nothing_and_hold_no_secret(here):
    view = await here.deployed(engine_config={**CONFIG["engine_config"], "env": {}})
    here.agent.diary.clear()
    position = here.services.cursor
    pages = []
    for path in (
        "/snapshot",
        "/deployments",
        f"/deployments/{view['id']}",
        f"/deployments/{view['id']}/effective-config",
        f"/deployments/{view['id']}/engine-log?kib=1",
        "/hosts",
        f"/hosts/{HOST}",
        "/engines",
        "/metrics/load",
        "/metrics/latency",
        "/usage",
        "/installation",
        "/inference-listener",
        "/config/effective",
        "/keys",
    ):
        status, answer = await here.ask("GET", path)
        assert status == 200, (path, answer)
        pages.append(json.dumps(answer))
    text = "\n".join(pages)
    assert TOKEN not in text
    assert API_KEY not in text
    assert here.agent.diary == []
    assert position.split(":")[0] == here.services.cursor.split(":")[0]


async def test_hosts_engines_and_the_installation_are_described(here):
    view = await here.deployed()
    _, hosts = await here.ask("GET", "/hosts")
    assert [(row["name"], row["state"], row["eligible"], row["engines"]) for row in hosts["hosts"]] == [
        ("box", "online", True, ["llamacpp"])
    ]
    _, engines = await here.ask("GET", "/engines")
    assert [(row["host"], row["profile"], row["version"], row["deployments"]) for row in engines["engines"]] == [
        ("box", "llamacpp", "b9000", ["notes"])
    ]
    _, installation = await here.ask("GET", "/installation")
    assert (installation["version"], installation["role"]) == (__version__, "standalone")
    _, config = await here.ask("GET", f"/deployments/{view['id']}/effective-config")
    assert config["plans"][HOST]["context_tokens"] == 1024
    _, load = await here.ask("GET", f"/metrics/load?deployment={view['id']}")
    assert [row["name"] for row in load["deployments"]] == ["notes"]
    assert (await here.ask("GET", f"/metrics/load?deployment={ulid.fresh()}"))[0] == 404
    _, latency = await here.ask("GET", f"/metrics/latency?deployment={view['id']}")
    assert [(row["name"], [one["sample"] for one in row["instances"]]) for row in latency["deployments"]] == [
        ("notes", [None])
    ]
    assert (await here.ask("GET", f"/metrics/latency?deployment={ulid.fresh()}"))[0] == 404


async def test_memory_is_shown_by_domain_and_by_deployment(here):
    view = await here.deployed()
    await here.act(view, "start")
    await here.settled(view["id"], lambda view: view["ready"] == "1/1")
    for query in ("", f"?host={HOST}", f"?deployment={view['id']}"):
        status, answer = await here.ask("GET", f"/usage{query}")
        assert status == 200
        (domain,) = answer["hosts"][0]["domains"]
        (holder,) = domain["holders"]
        assert (holder["name"], holder["phase"]) == ("notes", "ready")
        assert domain["reserved_bytes"] == holder["bytes"] != "0"
        (instance,) = answer["deployments"][0]["instances"]
        assert instance["bytes"] == {domain["domain_id"]: holder["bytes"]}
    for query, status in (
        ("host=box", 400),
        ("deployment=notes", 400),
        ("other=1", 400),
        (f"host={ulid.fresh()}", 404),
        (f"deployment={ulid.fresh()}", 404),
    ):
        assert (await here.ask("GET", f"/usage?{query}"))[0] == status


BYTES = re.compile(r"(.*_)?bytes|(managed|parked|host_kv)_limit|free_reserve")


def figures_of(value: Any, path: str = "", amount: bool = False) -> Iterator[tuple[str, Any]]:
    """Every amount of bytes in an answer, with its path: what has such a name, and what stands below it."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from figures_of(one, f"{path}.{name}", amount or bool(BYTES.fullmatch(name)))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from figures_of(one, f"{path}[{number}]", amount)
    elif amount:
        yield path, value


async def test_bytes_are_decimal_strings_in_every_answer_and_every_refusal(here):
    view = await here.deployed()
    await here.act(view, "start")
    await here.settled(view["id"], lambda view: view["ready"] == "1/1")
    found: dict[str, Any] = {}
    for path in ("/snapshot", "/deployments", f"/deployments/{view['id']}", "/hosts", "/usage",
                 f"/deployments/{view['id']}/effective-config"):  # fmt: skip
        status, answer = await here.ask("GET", path)
        assert status == 200
        found |= {f"{path}{name}": amount for name, amount in figures_of(answer)}
    assert len(found) > 40
    odd = {name: amount for name, amount in found.items() if amount is not None and not _is_decimal(amount)}
    assert odd == {}
    assert shown_details({"needs_bytes": 5, "hosts": [{"free_bytes": 7, "short": True, "card": None}]}) == {
        "needs_bytes": "5",
        "hosts": [{"free_bytes": "7", "short": True, "card": None}],
    }


def _is_decimal(amount: Any) -> bool:
    return type(amount) is str and amount.isascii() and amount.isdigit()


async def test_the_engine_log_is_bounded_and_named(here):
    view = await here.deployed()
    for query in ("kib=0", "kib=257", "instance=-1", "kib=x", "other=1"):
        assert (await here.ask("GET", f"/deployments/{view['id']}/engine-log?{query}"))[0] == 400
    assert (await here.ask("GET", f"/deployments/{view['id']}/engine-log?instance=3"))[0] == 404
    status, answer = await here.ask("GET", f"/deployments/{view['id']}/engine-log?kib=7")
    assert (status, answer["text"]) == (200, f"the last 7 KiB of {view['id']}/0")


async def test_prometheus_figures_have_names_types_and_real_values(here):
    view = await here.deployed()
    await here.act(view, "start")
    await here.settled(view["id"], lambda view: view["ready"] == "1/1")
    ticket = here.services.desk.arrive(
        Arrival(request=ulid.fresh(), route="notes", api="chat", stream=False, body_bytes=1)
    )
    await ticket.place()
    ticket.sent()
    ticket.finished()
    status, found, content = await http(here.address, "GET", "/metrics", AUTH, None)
    lines = content.decode().splitlines()
    assert status == 200
    assert found["content-type"].startswith("text/plain; version=0.0.4")
    assert 'capyctl_requests_total{deployment="notes",outcome="ok"} 1' in lines
    assert 'capyctl_instance_state{deployment="notes",instance="0",state="ready"} 1' in lines
    assert 'capyctl_memory_bytes{host="box",domain="unified",figure="managed"} 8589934592' in lines
    charged = 'capyctl_charged_bytes{deployment="notes",instance="0",domain="unified",phase="ready"} '
    assert any(line.startswith(charged) and not line.endswith(" 0") for line in lines)
    names = {line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")}
    typed = {line.split(" ")[2] for line in lines if line.startswith("# TYPE")}
    assert names <= typed


# --- drain and keys --------------------------------------------------------------------------------


async def test_a_drain_stops_every_engine_and_requests_start_them_again(here):
    view = await here.deployed()
    await here.act(view, "start")
    await here.settled(view["id"], lambda view: view["ready"] == "1/1")
    status, _ = await here.ask("POST", "/drain", {"deadline_ms": here.services.clock() + 1000})
    assert status == 202
    await here.settled(view["id"], lambda view: view["observed_state"] == "stopped")
    assert here.agent.running == {}
    ticket = here.services.desk.arrive(
        Arrival(request=ulid.fresh(), route="notes", api="chat", stream=False, body_bytes=1)
    )
    with trio.fail_after(30):
        await ticket.place()
    assert len(here.agent.running) == 1


async def test_a_drained_host_takes_nothing_until_it_is_undrained(here):
    view = await here.deployed()
    assert (await here.ask("POST", f"/hosts/{HOST}/drain", {}))[0] == 202
    _, hosts = await here.ask("GET", "/hosts")
    assert (hosts["hosts"][0]["state"], hosts["hosts"][0]["eligible"]) == ("draining", False)
    assert (await here.ask("POST", f"/hosts/{HOST}/undrain", {}))[0] == 202
    await here.act(view, "start")
    await here.settled(view["id"], lambda view: view["ready"] == "1/1")


async def test_a_named_key_is_shown_once_confined_to_its_models_and_gone_when_deleted(here):
    await here.deployed()
    status, made = await here.ask("POST", "/keys", {"name": "ci", "models": ["notes"]})
    assert status == 201
    token = made["key"]
    ring = here.services.keys
    caller = ring.caller([f"Bearer {token}".encode()])
    assert (caller.name, caller.allowed) == ("ci", frozenset({"notes"}))
    assert ring.caller([f"Bearer {API_KEY}".encode()]).allowed is None
    _, listed = await here.ask("GET", "/keys")
    assert [(key["name"], key["models"]) for key in listed["keys"]] == [("ci", ["notes"])]
    assert token not in json.dumps(listed)
    status, again = await here.ask("POST", "/keys", {"name": "ci"})
    assert (status, again["error"]["code"]) == (409, "idempotency_conflict")
    assert (await here.ask("DELETE", "/keys/ci"))[0] == 200
    assert ring.caller([f"Bearer {token}".encode()]) is None
    assert (await here.ask("DELETE", "/keys/ci"))[0] == 404


async def test_a_key_command_sent_again_makes_no_second_key_and_answers_the_same(tmp_path):
    same, other = ulid.fresh(), ulid.fresh()
    async with role(tmp_path / "server") as before:
        first = await before.ask("POST", "/keys", {"name": "ci"}, key=same)
        assert first[0] == 201
        assert await before.ask("POST", "/keys", {"name": "ci"}, key=same) == first
        status, refused = await before.ask("POST", "/keys", {"name": "cd"}, key=same)
        assert (status, refused["error"]["code"]) == (409, "idempotency_conflict")
    async with role(tmp_path / "server") as after:
        assert await after.ask("POST", "/keys", {"name": "ci"}, key=same) == first
        assert [key.name for key in after.services.keys.named()] == ["ci"]
        gone = await after.ask("DELETE", "/keys/ci", key=other)
        assert gone[0] == 200
        assert await after.ask("DELETE", "/keys/ci", key=other) == gone
        assert await after.ask("POST", "/keys", {"name": "ci"}, key=same) == first  # told again, and not made again
        assert after.services.keys.named() == []
        assert after.services.keys.caller([f"Bearer {first[1]['key']}".encode()]) is None
        _, fresh = await after.ask("POST", "/keys", {"name": "ci"})
        assert fresh["key"] != first[1]["key"]
    stored = b"".join(path.read_bytes() for path in (tmp_path / "server").iterdir())
    assert first[1]["key"].encode() not in stored


@pytest.mark.parametrize(("models", "named"), [(["notes", "nobody"], "nobody"), ([], "empty"), (["no\tes"], "no")])
async def test_a_key_for_models_that_are_not_there_is_refused_with_the_name(here, models, named):
    await here.deployed()
    status, answer = await here.ask("POST", "/keys", {"name": "ci", "models": models})
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert named in answer["error"]["message"]
    assert here.services.keys.named() == []


@pytest.mark.parametrize("head", ["HTTP/1.1\r\nConnection: close", "HTTP/1.0"])
async def test_a_connection_that_was_announced_to_close_is_closed(here, head):
    host, _, port = here.address.rpartition(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        asked = f"GET /management/v1/hosts {head}\r\nHost: {here.address}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        await stream.send_all(asked.encode())
        came = b""
        with trio.fail_after(30):
            while piece := await stream.receive_some():
                came += piece
    assert came.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in came.lower()


async def test_drains_sent_again_have_one_receipt_each(here):
    for path, other in (
        (f"/hosts/{HOST}/drain", {"wait": False}),
        (f"/hosts/{HOST}/undrain", None),
        ("/drain", {"deadline_ms": 5}),
    ):
        key = ulid.fresh()
        first = await here.ask("POST", path, {}, key=key)
        assert first[0] == 202, path
        assert await here.ask("POST", path, {}, key=key) == first
        if other is not None:
            status, refused = await here.ask("POST", path, other, key=key)
            assert (status, refused["error"]["code"]) == (409, "idempotency_conflict")


async def test_named_keys_outlive_a_restart_and_the_store_never_holds_the_token(tmp_path):
    async with role(tmp_path / "server") as before:
        _, made = await before.ask("POST", "/keys", {"name": "ci", "models": None})
    stored = b"".join(path.read_bytes() for path in (tmp_path / "server").iterdir())
    assert made["key"].encode() not in stored
    async with role(tmp_path / "server") as after:
        assert after.services.keys.caller([f"Bearer {made['key']}".encode()]).name == "ci"


@pytest.mark.parametrize(
    "body",
    [
        {"name": "Upper"},
        {"name": ""},
        {"name": "api_key"},
        {"name": 1},
        {"name": "a", "models": "x"},
        {"name": "a", "models": [1]},
    ],
)
async def test_a_key_with_a_bad_name_or_list_is_refused(here, body):
    status, answer = await here.ask("POST", "/keys", body)
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert here.services.keys.named() == []


async def test_a_caller_that_hangs_up_does_not_take_its_command_back(here: Role):
    host, _, port = here.address.rpartition(":")
    body = json.dumps({"config": CONFIG}).encode()
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        head = (
            f"POST /management/v1/deployments HTTP/1.1\r\nHost: {here.address}\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Idempotency-Key: gone\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        await stream.send_all(head.encode() + body)
    with trio.fail_after(30):
        while not here.services.world.book.deployments:
            await trio.sleep(0.01)
    status, _ = await here.ask("POST", "/deployments", {"config": CONFIG}, key="gone")
    assert status == 202
    assert len(here.services.world.book.deployments) == 1


# --- replay ----------------------------------------------------------------------------------------


async def test_the_journal_fed_through_a_fresh_world_gives_the_stored_rows(tmp_path):
    async with role(tmp_path / "server") as here:
        first, second = await here.deployed(), await here.deployed(name="other")
        await here.act(first, "start")
        await here.settled(first["id"], lambda view: view["ready"] == "1/1")
        await here.act(second, "start")
        await here.settled(second["id"], lambda view: view["ready"] == "1/1")
        await here.act(first, "stop")
        await here.settled(first["id"], lambda view: view["observed_state"] == "stopped")
        await here.ask("POST", f"/hosts/{HOST}/drain", {})
        await here.settled(second["id"], lambda view: view["observed_state"] == "stopped")
        await here.act(second, "delete")
    store = Store(tmp_path / "server", RECORDS)
    snapshot, journal = store.journal()
    stored = {(record.kind, record.key): record.value for record in store.load()}
    store.close()
    world = World.load(snapshot, now_ms=journal[0].now_ms)
    for event in journal:
        world.handle(event)
    replayed = {(record.kind, record.key): record.value for record in world.records()}
    assert len(journal) > 20
    assert {kind for kind, _ in stored} >= {"deployment", "instance", "operation", "host", "receipt", "counter"}
    assert replayed == stored
