"""What SGLang and vLLM are told beside a client's words: an id to end it by, a digest of its salt, and no headers."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engines.installation import Installation
from tests.integration.acceptance.machine import Call, Stopwatch, until
from tests.nvml.card import GIB

from .machine import PORTS, ParkMachine, park_machine

CHAT, ABORT = "/v1/chat/completions", "/abort_request"
QUICK: dict[str, Any] = {"token_s": 0.001, "answer_tokens": None, "prefill_s": 0.0, "faults": [], "time_scale": 0.1}
ENDLESS: dict[str, Any] = {"token_s": 0.02, "answer_tokens": 10_000, "time_scale": 0.3}


@pytest.fixture(scope="module")
def role(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParkMachine]:
    """Both engines serve; nobody has to give way."""
    with park_machine(tmp_path_factory.mktemp("ids"), PORTS, {"vllm": {}, "sglang": {}}) as made:
        for name, family in (("ada", "vllm"), ("tom", "sglang"), ("tim", "sglang")):
            made.put(name, family, 2 * GIB, 6 * GIB)  # room for 10 000 tokens beside the context
            assert made.ask(name).status == 200
        yield made


@pytest.fixture
def here(role: ParkMachine) -> ParkMachine:
    for made in role.installations.values():
        made.set(**QUICK)
        made.clear()
    return role


@pytest.fixture
def sglang(here: ParkMachine) -> Installation:
    return here.installations["sglang"]


def counts(here: ParkMachine) -> dict[str, int]:
    return dict(here.view("tom")["requests"])


def told(made: Installation, path: str = CHAT) -> list[dict[str, Any]]:
    """Bodies that the engine was sent."""
    return [json.loads(call["body"]) for call in made.calls(path)]


def post(
    here: ParkMachine, connection: http.client.HTTPConnection, body: dict[str, Any], **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    key = {"Authorization": f"Bearer {here.credential('api_key')}", "Content-Type": "application/json"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", CHAT, json.dumps(body), key | named)
    answer = connection.getresponse()
    return answer, answer.read()


def begun(call: Call) -> None:
    """Read a stream until something of its answer has come; its first chunk only names the role."""
    call.read_until(b"data: ")
    while not re.search(rb'"content":"[^"]', call.got):
        piece = call.sock.recv(1 << 16)
        assert piece, call.got
        call.got += piece


def at_work(here: ParkMachine) -> int:
    """Requests in the engine, by its own word."""
    port, key = here.engine_door("tom")
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/v1/loads", headers={"Authorization": f"Bearer {key}"})
        load = json.loads(connection.getresponse().read())["loads"][0]
    return int(load["num_running_reqs"]) + int(load["num_waiting_reqs"])


@pytest.mark.parametrize("moment", ["in a stream", "before the first token", "before a whole answer"])
def test_a_hang_up_sends_one_abort_with_the_id_of_its_request(
    here: ParkMachine, sglang: Installation, moment: str
) -> None:
    sglang.set(**ENDLESS, prefill_s=30.0 if moment == "before the first token" else 0.0)
    sglang.set(time_scale=1.0)  # as the real one: by itself it notices after 2 s, and after 4 s what is not streamed
    call = here.open("tom", stream=moment != "before a whole answer", max_tokens=10_000)
    if moment == "in a stream":
        begun(call)
    until(lambda: at_work(here) == 1, 5, "one request in the engine")
    (sent,) = told(sglang)
    if moment == "in a stream":
        assert re.search(rb"x-capyctl-request-id: (\S+)", call.got, re.IGNORECASE)[1].decode() == sent["rid"]  # type: ignore[index]
    call.hang_up()
    since = Stopwatch()
    until(lambda: not any(counts(here).values()), 10, "the place back", 0.01)
    place_s = since.s
    (abort,) = sglang.calls(ABORT)
    assert (json.loads(abort["body"]), abort["key"]) == ({"rid": sent["rid"]}, "admin")
    assert at_work(here) == 0
    print(f"{moment}: the place is back after {place_s * 1000:.0f} ms")
    assert place_s < 2, "before the engine would have noticed by itself"


def test_an_abort_that_comes_before_the_engine_knows_the_id_is_asked_again_and_keeps_the_place(
    here: ParkMachine, sglang: Installation
) -> None:
    sglang.set(**ENDLESS, registers_s=1.2)
    call = here.open("tom", stream=False, max_tokens=10_000)
    until(lambda: told(sglang), 5, "one request on its way to its id")
    call.hang_up()
    began = time.monotonic()
    until(lambda: sglang.calls(ABORT), 5, "the first abort", 0.01)
    assert at_work(here) == 0, "nothing there is to end yet"
    seen = []
    while any(counts(here).values()):
        seen.append(at_work(here))
        assert time.monotonic() - began < 30
    print(f"the place is back after {(time.monotonic() - began) * 1000:.0f} ms")
    assert 1 in seen, "the engine works on it, and its place is kept"
    assert at_work(here) == 0
    first, *more = sglang.calls(ABORT)
    assert more
    assert {one["body"] for one in more} == {first["body"]}


def test_a_lost_answer_to_an_abort_is_settled_by_an_idle_engine_and_not_asked_for_again(
    here: ParkMachine, sglang: Installation
) -> None:
    lost = {"route": ABORT, "then": "close", "perform": False, "times": 1}
    sglang.set(**(ENDLESS | {"time_scale": 1.0}), faults=[lost])
    call = here.open("tom", max_tokens=10_000)
    begun(call)
    call.hang_up()
    until(lambda: counts(here)["settle_when_idle"] == 1, 2, "waiting for an idle engine", 0.01)
    assert at_work(here) == 1, "nothing has ended it"
    until(lambda: not any(counts(here).values()), 10, "the place back")
    assert at_work(here) == 0
    assert len(sglang.calls(ABORT)) == 1


def test_two_hundred_hang_ups_leave_every_count_at_zero(here: ParkMachine, sglang: Installation) -> None:
    sglang.set(**ENDLESS)
    lot = random.Random(3)
    plans = [(lot.choice(("stream", "stream", "silent", "whole", "reset")), lot.random() * 0.03) for _ in range(200)]

    def one(plan: tuple[str, float]) -> None:
        kind, wait_s = plan
        call = here.open("tom", stream=kind != "whole", max_tokens=10_000)
        if kind == "stream":
            begun(call)
        else:
            time.sleep(wait_s)  # a moment of its own for each
        call.reset() if kind == "reset" else call.hang_up()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(one, plans))
    began = time.monotonic()
    until(lambda: not any(counts(here).values()), 20, "every count at zero")
    zero_s = time.monotonic() - began
    until(lambda: at_work(here) == 0, 10, "an engine without work")
    print(f"counts at zero after {zero_s:.2f} s, engine idle after {time.monotonic() - began:.2f} s")
    sent = [body["rid"] for body in told(sglang)]
    aborted = [json.loads(call["body"])["rid"] for call in sglang.calls(ABORT)]
    print(f"200 hang-ups: {len(sent)} reached the engine, {len(aborted)} aborts")
    assert len(set(sent)) == len(sent)
    assert {len(rid) for rid in sent} == {26}, "no id is the beginning of another"
    again = len(aborted) - len(set(aborted))
    print(f"asked again, since the engine did not know the id yet: {again}")
    often = 5 + 2 * (time.monotonic() - began)
    assert max(Counter(aborted).values()) <= often, "asked again twice a second, while the answer goes on"
    assert set(sent) <= set(aborted)
    assert {call["key"] for call in sglang.calls(ABORT)} == {"admin"}
    sglang.set(**QUICK)
    assert here.ask("tom").status == 200


def test_requests_on_one_connection_have_ids_of_their_own_and_answers_keep_what_the_engine_said(
    here: ParkMachine, sglang: Installation
) -> None:
    host, _, at = here.inference.rpartition(":")
    body = {"messages": [{"role": "user", "content": "Say héllo."}], "model": "tom", "max_tokens": 6}
    with contextlib.closing(http.client.HTTPConnection(host, int(at), timeout=20)) as connection:
        answers = [post(here, connection, body | {"stream": stream}) for stream in (False, True, False)]
    ids = [answer.getheader("X-CapyCTL-Request-Id") for answer, _ in answers]
    assert len(set(ids)) == 3
    bodies = told(sglang)
    assert [sent.pop("rid") for sent in bodies] == ids
    assert bodies == [body | {"stream": stream} for stream in (False, True, False)]
    port, key = here.engine_door("tom")
    for (_, text), rid, stream in zip(answers, ids, (False, True, False), strict=True):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            connection.request("POST", CHAT, json.dumps(body | {"stream": stream, "rid": rid}), headers)
            own = connection.getresponse().read()
        assert values(text) == values(own)
        assert {value["id"] for value in values(text)} == {rid}


def values(text: bytes) -> list[dict[str, Any]]:
    """Every JSON object of an answer, without the second in which it was made and our own figures."""
    lines = [line.removeprefix(b"data: ") for line in text.splitlines() if line.startswith((b"{", b"data: {"))]
    found = [json.loads(line) for line in lines]
    return [{name: value for name, value in one.items() if name not in ("created", "capyctl")} for one in found]


def test_several_answers_in_one_request_have_no_id_and_settle_when_the_engine_is_idle(
    here: ParkMachine, sglang: Installation
) -> None:
    whole = here.ask("tom", n=2)
    assert (whole.status, len(whole.json["choices"])) == (200, 2)
    batch = {"model": "tom", "prompt": ["a", "b"], "max_tokens": 2}
    assert here.send("POST", "/v1/completions", json.dumps(batch).encode()).status == 200
    one = here.send("POST", "/v1/completions", json.dumps(batch | {"prompt": "a"}).encode())
    assert ["rid" in body for body in told(sglang, "/v1/completions")] == [False, True]
    assert one.json["id"] == one.headers["x-capyctl-request-id"]

    sglang.set(**ENDLESS)
    text = json.dumps({"model": "tom", "n": 2, "stream": True, "messages": [{"role": "user", "content": "Go on."}]})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {here.credential('api_key')}\r\n"
    call = here.raw(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
    begun(call)
    call.hang_up()
    until(lambda: counts(here)["settle_when_idle"] == 1, 2, "waiting for an idle engine", 0.01)
    until(lambda: not any(counts(here).values()), 10, "the place back")
    assert at_work(here) == 0
    assert not any("rid" in body for body in told(sglang))
    assert sglang.calls(ABORT) == []


def test_a_salt_arrives_as_a_digest_and_no_header_of_the_client_does(here: ParkMachine) -> None:
    salt = "tenant@7/ü\\" + "x" * 200  # vLLM takes neither such signs nor such a length
    strange = {
        "X_Request_Id": "mine-1", "X_Conversation_Id": "c1", "X_CapyCTL_Request_Id": "forged", "Cookie": "a=b",
        "X_Data_Parallel_Rank": "1", "X_SMG_Routing_Key": "r", "X_Forwarded_For": "10.0.0.1", "Forwarded": "for=x",
    }  # fmt: skip
    host, _, at = here.inference.rpartition(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(at), timeout=20)) as connection:
        for name in ("ada", "tom", "tim"):
            body = {"cache_salt": salt, "model": name, "messages": [{"role": "user", "content": "Hi."}], "n": 1}
            for more in ({}, {"cache_salt": "another"}, {}):
                answer, text = post(here, connection, body | more, **strange)
                assert answer.status == 200, text
                assert answer.getheader("X-Request-Id") == "mine-1"
                assert answer.getheader("X-CapyCTL-Request-Id") != "forged"
    salts: dict[str, list[str]] = {"ada": [], "tom": [], "tim": []}
    for family, made in here.installations.items():
        for call in made.calls(CHAT):
            assert call["headers"].keys() == {"host", "accept", "content-type", "content-length"}
            assert call["key"] == "inference"
            sent = json.loads(call["body"])
            assert ("rid" in sent) == (family == "sglang")
            assert list(sent) == ["cache_salt", "model", *(["rid"] if family == "sglang" else []), "messages", "n"]
            salts[sent["model"]].append(sent["cache_salt"])
    digests = [one for group in salts.values() for one in group]
    assert all(re.fullmatch(r"[0-9a-f]{64}", one) for one in digests)
    for first, other, again in salts.values():
        assert first == again != other
    assert len(set(digests)) == 6, "one salt, three deployments: three caches"
    for place in [here.log_path, *(made.prefix / "journal.jsonl" for made in here.installations.values())]:
        assert "tenant@7" not in place.read_text()


# --- how long requests took ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "family"), [("ada", "vllm"), ("tom", "sglang")])
def test_the_engines_own_latency_series_are_told_per_deployment(here: ParkMachine, name: str, family: str) -> None:
    asked = len(here.installations[family].calls(CHAT, of=name))
    assert here.ask(name).status == 200

    def told_of() -> dict[str, dict[str, Any]]:
        identity = here.view(name)["id"]
        (row,) = here.manage("GET", f"/metrics/latency?deployment={identity}")["deployments"]
        (one,) = row["instances"]
        assert row["name"] == name
        return {} if one["sample"] is None else {found["figure"]: found for found in one["sample"]["distributions"]}

    until(lambda: told_of().get("e2e", {}).get("count", 0) > asked, what="a sample with the last request in it")
    found = told_of()
    assert set(found) == {"ttft", "e2e", "queue"}
    assert {one["tier"] for one in found.values()} == {"engine"}
    assert all(one["source"].startswith(f"{family}:") for one in found.values())
    assert found["e2e"]["sum_us"] >= found["ttft"]["sum_us"] > 0
    (shown,) = json.loads(here.ok("status", "deployment", name, "--json").out)["latency"]
    assert [one["figure"] for one in shown["sample"]["distributions"]] == ["ttft", "e2e", "queue"]
    assert found["e2e"]["buckets"][-1] == {"le_us": None, "count": found["e2e"]["count"]}
