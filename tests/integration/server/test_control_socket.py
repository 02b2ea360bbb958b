"""The local control socket: who may speak, what it understands, and what it changes."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from pathlib import Path

import attrs
import pytest
import trio
from server_role import CONFIG, Role, role

from capyctl.server.control_socket import ControlSocket


@attrs.frozen
class Control:
    role: Role
    path: Path


@pytest.fixture
async def control(tmp_path, nursery):
    async with role(tmp_path / "server") as running:
        path = Path(os.path.relpath(tmp_path / "control.sock"))  # a socket's name has at most 107 bytes
        assert await nursery.start(ControlSocket(path, running.services).serve)
        yield Control(running, path)


async def ask(path: Path, raw: bytes) -> dict:
    async with await trio.open_unix_socket(os.fspath(path)) as stream:
        await stream.send_all(raw)
        await stream.send_eof()
        received = b""
        with trio.fail_after(30):
            while piece := await stream.receive_some():
                received += piece
    return json.loads(received)


async def test_it_lists_what_is_published(control):
    answer = await ask(control.path, b'{"verb": "list"}\n')
    assert answer["ok"]
    assert [row["profile"] for row in answer["profiles"]] == ["llamacpp"]


async def test_its_file_is_the_owners_alone(control):
    assert stat.S_IMODE(control.path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\n",
        b"[]\n",
        b"nonsense\n",
        b'{"verb": "explode"}\n',
        b'{"verb": "list", "verb": "add"}\n',
        b'{"verb": "list", "more": 1}\n',
        b'{"verb": "remove"}\n',
        b'{"verb": "remove", "profile": 1}\n',
        b'{"verb": "remove", "profile": "llamacpp", "drain": "yes"}\n',
        b"x" * 70_000,
    ],
)
async def test_anything_else_is_refused_in_one_line(control, raw):
    answer = await ask(control.path, raw)
    assert answer["error"]["code"] in ("invalid_request", "body_too_large")


async def test_a_profile_that_runs_something_is_in_use(control):
    view = await control.role.deployed()
    await control.role.act(view, "start")
    await control.role.settled(view["id"], lambda view: view["ready"] == "1/1")
    answer = await ask(control.path, b'{"verb": "remove", "profile": "llamacpp"}\n')
    assert answer["error"]["code"] == "profile_in_use"
    assert "notes/0" in answer["error"]["message"]
    answer = await ask(control.path, b'{"verb": "remove", "profile": "llamacpp", "drain": true}\n')
    assert answer["stopped"] == ["notes/0"]
    assert control.role.agent.running == {}


async def test_a_profile_that_was_let_go_of_is_offered_no_more_and_what_it_stopped_starts_again_with_it(control):
    view = await control.role.deployed()
    await control.role.act(view, "start")
    await control.role.settled(view["id"], lambda view: view["ready"] == "1/1")
    await ask(control.path, b'{"verb": "remove", "profile": "llamacpp", "drain": true}\n')
    assert (await ask(control.path, b'{"verb": "list"}\n'))["profiles"] == []
    status, refused = await control.role.ask("POST", "/deployments", {"config": {**CONFIG, "name": "other"}})
    assert (status, refused["error"]["code"]) == (409, "profile_not_published")
    # Whoever heard no answer asks again, and hears the same.
    answer = await ask(control.path, b'{"verb": "remove", "profile": "llamacpp"}\n')
    assert answer["retired"] == "llamacpp"
    # It is still stated, so that reading again brings it back; nobody stopped the deployment for good.
    answer = await ask(control.path, b'{"verb": "add"}\n')
    assert [row["profile"] for row in answer["profiles"]] == ["llamacpp"]
    stopped = await control.role.settled(view["id"], lambda view: view["ready"] == "0/1")
    assert stopped["desired_state"] == view["desired_state"]
    assert (await control.role.act(stopped, "start"))[0] == 202


async def test_a_profile_that_is_not_there_is_not_found(control):
    answer = await ask(control.path, b'{"verb": "remove", "profile": "vllm"}\n')
    assert answer["error"]["code"] == "not_found"


async def test_a_peer_that_says_nothing_keeps_nobody_out(control):
    idle = [await trio.open_unix_socket(os.fspath(control.path)) for _ in range(4)]
    assert (await ask(control.path, b'{"verb": "list"}\n'))["ok"]
    for stream in idle:
        await stream.aclose()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_another_user_is_closed_unread(control):
    control.path.chmod(0o666)  # past the file's mode, the kernel's word about the peer still decides
    script = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "t = socket.socket(socket.AF_UNIX); t.connect(sys.argv[1])\n"
        't.sendall(b\'{"verb": "list"}\\n\'); print(repr(t.recv(10)))'
    )
    for parent in control.path.resolve().parents:
        if parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(0o755)
    done = await trio.run_process(
        [sys.executable, "-c", script, str(control.path.resolve())],
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    assert done.stdout.strip() in (b"b''", b""), done.stderr
    assert b"verb" not in done.stdout
    if not done.stdout:
        assert b"ConnectionReset" in done.stderr or b"BrokenPipe" in done.stderr


async def test_a_leftover_of_a_killed_role_is_replaced_and_the_socket_goes_with_its_role(tmp_path):
    path = Path(os.path.relpath(tmp_path / "c.sock"))
    left = socket.socket(socket.AF_UNIX)
    left.bind(os.fspath(path))
    left.close()
    async with role(tmp_path / "server") as running, trio.open_nursery() as nursery:
        assert await nursery.start(ControlSocket(path, running.services).serve)
        assert (await ask(path, b'{"verb": "list"}\n'))["ok"]
        nursery.cancel_scope.cancel()
    assert not path.exists()


async def test_a_path_too_deep_for_a_socket_is_said_and_stops_nothing(tmp_path, nursery):
    async with role(tmp_path / "server") as running:
        deep = tmp_path / ("x" * 120) / "control.sock"
        assert not await nursery.start(ControlSocket(deep, running.services).serve)
