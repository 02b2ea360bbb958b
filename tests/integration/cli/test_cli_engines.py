"""`capyctl engine` for every family: a person's choice and consent, variables, and what has no role to run."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import Done, Shell

MANIFEST = """\
schema_version: 1
kind: custom_engine
api: chat
version: "2.1"
command: ["--listen", "{host}:{port}", "--weights", "{model}"]
health: /healthz
idle: {path: /stats, running: /active}
"""


def on_a_terminal(shell: Shell, answer: str, *words: str, **more: str) -> Done:
    """Run a command whose standard input is a terminal on which a person types `answer`."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, answer.encode())
        ended = subprocess.run(
            [sys.executable, "-m", "capyctl", *words],
            stdin=theirs,
            capture_output=True,
            text=True,
            env=shell.environ(**more),
            cwd=shell.home,
            timeout=30,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    return Done(ended.returncode, ended.stdout, ended.stderr)


@pytest.fixture
def program(shell: Shell) -> Path:
    path = shell.home / "judge-serve"
    path.write_text("#!/bin/sh\nexit 3\n")
    path.chmod(0o755)
    (shell.home / "judge.yaml").write_text(MANIFEST)
    return path


def test_a_custom_engine_is_confirmed_by_a_person_and_pinned(shell: Shell, program: Path) -> None:
    words = ("engine", "add", "--custom", str(program), "--name", "judge", "--manifest", "judge.yaml")
    more = {"XDG_CONFIG_HOME": str(shell.home / "config"), "CAPYCTL_ENGINE_ADD_ENV": "A=1;B=2"}
    saved = shell.home / "config" / "capyctl" / "custom-engines.yaml"
    nobody = shell(*words, **more)
    assert (nobody.status, nobody.out) == (23, "")
    assert "--yes" in nobody.err
    declined = on_a_terminal(shell, "no\n", *words, **more)
    assert declined.status == 2
    assert not saved.exists()
    assert str(program) in declined.err
    assert "--listen {host}:{port} --weights {model}" in declined.err
    done = on_a_terminal(shell, "yes\n", *words, "--env", "B=3", "--approve-env", "HF_*", **more)
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "Registered judge (custom 2.1)"
    assert {line[2:16].strip(): line[17:] for line in lines[2:8]} == {
        "Executable": str(program),
        "API": "chat",
        "Health": "/healthz",
        "Idle": "/stats (/active)",
        "Engines file": f"{saved} (revision 1)",
        "Published": "when capyctl starts",
    }
    text = saved.read_text()
    assert "A: '1'" in text
    assert "B: '3'" in text
    assert "HF_*" in text
    listed = json.loads(shell("engine", "list", "--json", **more).out)
    assert [(row["profile"], row["source"]) for row in listed["engines"]] == [("judge", "custom-engines.yaml")]
    removed = shell("engine", "remove", "judge", **more).out
    assert removed.startswith("Removed judge\n")
    assert removed.endswith("  Published      no role runs\n")


def test_a_manifest_is_checked_offline_like_any_document(shell: Shell, program: Path) -> None:
    assert shell("validate", "config", "judge.yaml").out.startswith("judge.yaml is a valid custom_engine document\n\n")
    (shell.home / "bad.yaml").write_text(MANIFEST.replace("{port}", "8101"))
    done = shell("validate", "config", "bad.yaml")
    assert done.status == 2
    assert "bad.yaml: command: does not say {port}" in done.err


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("--custom", "{program}", "--yes"), 2),
        (("--manifest", "judge.yaml", "--name", "j"), 2),
        (("--custom", "judge-serve", "--name", "j", "--manifest", "judge.yaml", "--yes"), 17),
        (("--custom", "{program}", "--name", "j", "--manifest", "judge.yaml", "--deep-park", "enabled"), 5),
        (("--custom", "{program}", "--name", "j", "--manifest", "judge.yaml", "--drift", "warn"), 2),
        (("/x", "--custom", "{program}", "--name", "j", "--manifest", "judge.yaml"), 2),
        (("/x", "--yes"), 2),
    ],
)
def test_what_a_custom_engine_lacks_or_cannot_be_told(
    shell: Shell, program: Path, words: tuple[str, ...], status: int
) -> None:
    done = shell("engine", "add", *(word.format(program=program) for word in words))
    assert (done.status, done.out) == (status, "")
    assert done.err.startswith("error [")
    assert done.err.count("\n") == 1


def test_without_a_path_a_person_picks_from_what_was_found(shell: Shell) -> None:
    more = {"XDG_CONFIG_HOME": str(shell.home / "config"), "CAPYCTL_APPROVE_ENV": "HF_*"}
    found = json.loads(shell("engine", "detect", "--json", **more).out)
    number = next(at for at, row in enumerate(found, 1) if row["engine"] == "llamacpp")
    assert on_a_terminal(shell, f"{len(found) + 1}\n", "engine", "add", **more).status == 2
    done = on_a_terminal(shell, f"{number}\n", "engine", "add", "--approve-env", "RUST_*", **more)
    assert done.status == 0, done.err
    assert f"  {number}   llamacpp " in done.err
    saved = (shell.home / "config" / "capyctl" / "engines.yaml").read_text()
    assert "RUST_*" in saved
    assert "HF_*" not in saved  # a flag replaces the variable as a whole


@pytest.mark.parametrize(
    ("answer", "status", "published"),
    [
        ({"ok": True}, 0, "yes"),
        ({"error": {"code": "profile_exists", "message": "judge is stated twice", "retryable": False}}, 21, "no"),
        (None, 22, "no"),
    ],
)
def test_a_running_role_is_told_and_what_it_says_is_the_exit(
    shell: Shell, program: Path, answer: dict[str, object] | None, status: int, published: str
) -> None:
    shell.state.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as role:
        role.bind(os.path.relpath(shell.state / "control.sock"))  # a socket's name has at most 107 bytes
        role.listen()
        asked: list[bytes] = []

        def answer_once() -> None:
            link, _ = role.accept()
            with link:
                asked.append(link.recv(4096))
                if answer is not None:
                    link.sendall(json.dumps(answer).encode() + b"\n")

        thread = threading.Thread(target=answer_once, daemon=True)
        thread.start()
        words = ("--custom", str(program), "--name", "judge", "--manifest", "judge.yaml", "--yes")
        done = shell("engine", "add", *words, XDG_CONFIG_HOME=str(shell.home / "config"))
        thread.join(60)
    assert (done.status, json.loads(asked[0])) == (status, {"verb": "add"})
    assert f"Published      {published}" in done.out
    assert (shell.home / "config" / "capyctl" / "custom-engines.yaml").exists()


def test_the_roles_own_engine_is_not_removed_here(shell: Shell) -> None:
    done = shell("engine", "remove", "local-vllm")
    assert done.status == 2
    assert "start options" in done.err


def test_a_place_that_is_looked_at_in_vain_is_said(shell: Shell) -> None:
    (shell.home / "empty").mkdir()
    packages = shell.home / "env" / "lib" / "python3.11" / "site-packages"
    for directory in (packages / "vllm", packages / "vllm-0.32.0.dist-info", shell.home / "env" / "bin"):
        directory.mkdir(parents=True)
    (shell.home / "env" / "bin" / "python3").symlink_to(sys.executable)
    done = shell("engine", "detect", "--path", "nowhere", "--path", "empty", "--path", "env/bin", "--path", "env")
    assert done.status == 0
    assert done.out.count(f"{shell.home}/env ") == 1
    assert f"{shell.home}/env" not in done.err
    assert f"--path {shell.home}/nowhere is not there\n--path {shell.home}/empty holds no engine\n" in done.err
