"""What is wrong is refused with one line or one error, a stable code, and no trace left behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import TINY
from .machine import Machine, until

GOOD = "name: x\nengine: llamacpp\nmodel: tiny\n"


@pytest.fixture(scope="module", autouse=True)
def _served(machine: Machine) -> Iterator[None]:
    """A model that serves throughout, on a daemon that stays the same."""
    machine.deploy("tiny", TINY, 512)
    assert machine.ask("tiny").status == 200
    before = machine.ok("list", "deployments").out
    role, engine = machine.role, machine.engine("tiny")
    yield
    assert role is not None
    assert role.poll() is None
    assert machine.ok("list", "deployments").out == before
    assert machine.engine("tiny") == engine
    assert machine.ask("tiny").status == 200
    none = {"in_flight": 0, "waiting": 0, "settle_when_idle": 0, "settle_at_stop": 0}
    until(lambda: machine.view("tiny")["requests"] == none, what="no request left")


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (GOOD + "colour: red\n", "invalid_config", "colour"),
        (GOOD + "instances: '2'\n", "invalid_config", "instances"),
        (GOOD + "instances: yes\n", "invalid_config", "instances"),
        (GOOD + "instances: 0\n", "invalid_config", "instances"),
        (GOOD + "name: y\n", "invalid_config", "name"),
        (GOOD + "routes: &a [x]\n", "invalid_config", "anchor"),
        (GOOD + "routes: *a\n", "invalid_config", "alias"),
        (GOOD + "routes: !!python/object:os.system [x]\n", "invalid_config", "tag"),
        ("name: x\nengine: llamacpp\n", "invalid_config", "model"),
        ("name: X Y\nengine: llamacpp\nmodel: tiny\n", "invalid_config", "name"),
        (GOOD + "engine_config: {context_length: -1}\n", "invalid_config", "context_length"),
        (GOOD + "engine_config: {memory: {request: lots}}\n", "invalid_config", "memory.request"),
        (
            GOOD + "engine_config: {extra_args: [--host, 0.0.0.0], accept_extra_args: true}\n",
            "invalid_config",
            "--host",
        ),
        ("name: x\nengine: vllm\nmodel: tiny\n", "profile_not_published", "vllm"),
        ("[1, 2", "invalid_config", ""),
        ("", "invalid_config", ""),
        ("\ufeffname: x\n", "invalid_config", ""),
        (b"name: \xff\xfe\n", "invalid_config", ""),
        ("x: " * 3 + "1", "invalid_config", ""),
        ("[" * 5000, "invalid_config", ""),
    ],
)
def test_a_document_that_is_wrong_is_refused_in_one_line(
    machine: Machine, text: str | bytes, code: str | None, says: str
) -> None:
    file = machine.write("bad.yaml", text)
    done = machine.command("deploy", "model", "--file", file)
    print(done.status, done.error)
    assert done.status in (2, 5, 24)
    assert done.out == ""
    assert re.match(rf"error \[{code or '[a-z_]+'}(:[^\]]+)?\]: ", done.error)
    assert says in done.error
    assert "Traceback" not in done.err


def test_a_refusal_as_json_is_one_object_with_the_same_code(machine: Machine) -> None:
    file = machine.write("bad.yaml", GOOD + "colour: red\n")
    done = machine.command("deploy", "model", "--file", file, "--json")
    assert (done.status, done.out) == (2, "")
    error = json.loads(done.err)
    assert error["code"] == "invalid_config"
    assert "colour" in error["message"]


@pytest.mark.parametrize(
    ("words", "status", "code"),
    [
        (("deploy", "model", "--file", "nowhere.yaml"), 2, "invalid_config"),
        (("deploy", "model", "--file", "."), 2, "invalid_config"),
        (("status", "deployment", "nobody"), 2, "not_found"),
        (("start", "deployment", "nobody"), 2, "not_found"),
        (("delete", "deployment", "tiny"), 25, "delete_requires_cleanup"),
        (("park", "deployment", "tiny"), 5, "unsupported_capability"),
        (("start", "deployment", "tiny", "--request-id", "x"), 2, "invalid_config"),
        (("engine", "add", "/nowhere"), 16, "engine_not_found"),
        (("engine", "add", "/bin/true", "--name", "other"), None, None),
        (("engine", "add", ".", "--name", "llamacpp"), None, None),
        (("engine", "remove", "llamacpp"), 20, "profile_in_use"),
        (("engine", "remove", "nobody"), 2, "not_found"),
        (("list", "hosts", "--state-dir", "/nowhere/x"), 13, "unavailable"),
        (("config", "show", "--set", "server.colour=red"), 2, "invalid_config"),
    ],
)
def test_a_command_that_cannot_be_done_says_so_in_one_line(
    machine: Machine, words: tuple[str, ...], status: int | None, code: str | None
) -> None:
    done = machine.command(*words)
    print(done.status, done.error)
    assert done.status == status if status else done.status in range(2, 27)
    assert code is None or done.error.startswith(f"error [{code}]: ")
    assert "Traceback" not in done.err


@pytest.mark.parametrize("words", [("fly",), ("deploy", "model", "--colour"), ("status", "deployment")])
def test_unknown_words_print_usage_and_exit_two(machine: Machine, words: tuple[str, ...]) -> None:
    done = machine.command(*words)
    print(done.err)
    assert done.status == 2
    assert done.out == ""
    assert len(done.err.strip().splitlines()) <= 4


def ask(content: object) -> bytes:
    return json.dumps(content).encode()


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_request"),
        (b"{", 400, "invalid_request"),
        (b'{"model": "tiny", "messages": [{"role": "user", "cont', 400, "invalid_request"),
        (b'{"model": "tiny", "messages": "\xff\xfe"}', 400, "invalid_request"),
        (b"[]", 400, "invalid_request"),
        (ask({"messages": MESSAGES}), 400, "invalid_request"),
        (ask({"model": 7, "messages": MESSAGES}), 400, "invalid_request"),
        (ask({"model": "tiny", "messages": MESSAGES, "stream": "yes"}), 400, "invalid_request"),
        (b'{"model": "tiny", "model": "other", "messages": []}', 400, "invalid_request"),
        (b'{"model": "tiny", "messages": [], "n": NaN}', 400, "invalid_request"),
        (b'{"model": "tiny", "messages": ' + b"[" * 100 + b"]" * 100 + b"}", 400, "invalid_request"),
        (ask({"model": "nobody", "messages": MESSAGES}), 404, "not_found"),
        (ask({"model": "../tiny", "messages": MESSAGES}), 404, "not_found"),
        (ask({"model": "tiny"}), 400, None),
        (ask({"model": "tiny", "messages": [{"role": "user", "content": {"a": 1}}]}), 400, None),
    ],
)
def test_a_request_that_is_wrong_gets_one_error_in_both_shapes(
    machine: Machine, body: bytes, status: int, code: str | None
) -> None:
    answer = machine.send("POST", "/v1/chat/completions", body)
    print(answer.status, answer.body.decode())
    assert answer.status == status
    error = answer.json
    assert error["code"] == (code or error["code"])
    assert error["error"]["code"] == error["code"]
    assert error["error"]["message"] == error["message"]
    assert error["error"]["type"]
    assert str(machine.home) not in answer.body.decode()


@pytest.mark.parametrize(
    ("key", "status"), [("capy-wrong", 401), ("x", 401), ("capy-n-" + "a" * 32, 401), ("a" * 5000, 401)]
)
def test_a_wrong_key_is_told_nothing_else(machine: Machine, key: str, status: int) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/nowhere")):
        answer = machine.send(method, path, ask({"model": "tiny"}) if method == "POST" else None, key=key)
        assert answer.status == status
        assert answer.json["code"] == "unauthorized"
        assert answer.headers["www-authenticate"] == "Bearer"


def head(machine: Machine, *lines: str, path: str = "/v1/chat/completions", method: str = "POST") -> bytes:
    key = machine.credential("api_key")
    text = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", "Content-Type: application/json"]
    return ("\r\n".join((*text, "Connection: close", *lines)) + "\r\n\r\n").encode()


def test_an_oversize_body_is_refused_before_it_is_read(machine: Machine) -> None:
    call = machine.raw(head(machine, f"Content-Length: {64 << 20}"))
    text = call.read_until(b"}", 10)
    print(text.decode())
    assert text.startswith(b"HTTP/1.1 413 ")
    assert b'"body_too_large"' in text


def test_an_oversize_chunked_body_is_refused(machine: Machine) -> None:
    call = machine.raw(head(machine, "Transfer-Encoding: chunked"))
    piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    try:
        for _ in range(40):
            call.sock.sendall(piece)
    except OSError:
        pass  # the daemon closed it in the middle, as it should
    text = call.rest(10)
    assert text.startswith(b"HTTP/1.1 413 ") or text == b"", text


def test_two_ways_of_saying_where_a_body_ends_are_refused(machine: Machine) -> None:
    body = ask({"model": "tiny", "messages": MESSAGES, "max_tokens": 1})
    lines = (f"Content-Length: {len(body)}", "Transfer-Encoding: chunked")
    call = machine.raw(head(machine, *lines) + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    text = call.rest(10)
    print(text.decode())
    assert text.startswith(b"HTTP/1.1 400 ")
    assert text.count(b"HTTP/1.1 ") == 1, "and nothing after it is taken for a second request"


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_answered_with_an_error_or_closed(machine: Machine, data: bytes) -> None:
    text = b""
    try:
        text = machine.raw(data).rest(15)
    except ConnectionError:
        pass  # closed while we were still sending
    assert text == b"" or re.match(rb"HTTP/1\.1 (400|401|413|431|505) ", text), text[:200]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("GET", "/v1/models/nobody", 404, "not_found"),
        ("GET", "/v1/%2e%2e/%2e%2e/etc/passwd", 404, "not_found"),
        ("GET", "/management/v1/deployments", 404, "not_found"),
    ],
)
def test_wrong_paths_and_methods(machine: Machine, method: str, path: str, status: int, code: str) -> None:
    answer = machine.send(method, path)
    assert (answer.status, answer.json["code"]) == (status, code)


def test_the_management_listener_does_not_take_the_inference_key(machine: Machine) -> None:
    original, machine.inference = machine.inference, machine.management
    try:
        answer = machine.send("GET", "/management/v1/deployments")
    finally:
        machine.inference = original
    assert (answer.status, answer.json["error"]["code"]) == (401, "unauthenticated")


def test_a_role_document_that_is_wrong_starts_nothing(machine: Machine, tmp_path: Path) -> None:
    file = machine.write("role.yaml", "schema_version: 1\nkind: standalone\nname: local\nserver: {colour: red}\n")
    done = machine.command("start", "standalone", "--config", file, "--state-dir", str(tmp_path / "s"))
    print(done.error)
    assert done.status == 2
    assert "colour" in done.error
    assert not (tmp_path / "s").exists() or not list((tmp_path / "s").rglob("*.sqlite3"))
