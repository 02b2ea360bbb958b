"""Files named as a word, a name that is taken, and what a drain stopped."""

from __future__ import annotations

import json

import pytest
from cli_fake_role import FakeRole
from conftest import Shell


def document(shell: Shell, file: str = "writer.yaml") -> str:
    (shell.home / file).write_text("name: writer\nengine: llamacpp\nmodel: writer\n")
    return file


def test_a_document_is_named_by_a_word_or_by_file(shell: Shell, role: FakeRole) -> None:
    file = document(shell)
    checked = shell("validate", "config", file)
    assert checked.out.startswith("writer.yaml is a valid deployment document\n")
    assert checked.out == shell("validate", "config", "--file", file).out
    done = shell("deploy", "model", file, "--activate", "--wait")
    assert (done.status, done.out.splitlines()[0]) == (0, "Deployed writer: ready")


@pytest.mark.parametrize("command", [("deploy", "model"), ("validate", "config")])
def test_two_files_and_none_are_refused(shell: Shell, role: FakeRole, command: tuple[str, str]) -> None:
    file = document(shell)
    done = shell(*command, file, "--file", file)
    assert (done.status, done.err) == (
        2,
        "error [invalid_config]: writer.yaml and --file writer.yaml both name a file; keep one\n",
    )
    done = shell(*command)
    assert (done.status, done.err) == (
        2,
        "error [invalid_config]: no file is named; give its path, or --file <path>\n",
    )
    assert role.seen == []


def test_a_name_that_is_taken_shows_how_it_is_replaced(shell: Shell, role: FakeRole) -> None:
    file = document(shell, "my writer.yaml")
    role.add("writer", revision="7")
    taken = 409, {"error": {"code": "route_conflict", "message": "a route is taken", "retryable": False}}
    role.refuse["create"] = [taken, taken]
    done = shell("deploy", "model", file)
    assert (done.status, done.err.splitlines()[-1]) == (
        2,
        "error [route_conflict]: writer is deployed (revision 7). "
        "To replace it: capyctl deploy model --file 'my writer.yaml' --revision 7",
    )
    role.views.clear()  # another deployment has the route, not the name
    done = shell("deploy", "model", file)
    assert (done.status, done.err.splitlines()[-1]) == (2, "error [route_conflict]: a route is taken")


def test_a_drain_names_what_it_stopped(shell: Shell, role: FakeRole) -> None:
    charge = [{"domain": "unified", "phase": "ready", "bytes": "1073741824", "provenance": "derived"}]
    role.add("writer", observed_state="ready", ledger=charge)
    role.add("idle")
    role.add("notes", observed_state="ready", ledger=charge)
    done = shell("drain", "standalone")
    assert (done.status, done.out) == (0, "Drained standalone\n\n  Stopped   notes,writer\n")
    assert shell("drain", "standalone").out.endswith("\n  Stopped   nothing, no engine was running\n")
    assert json.loads(shell("drain", "standalone", "--json").out)["stopped"] == []
