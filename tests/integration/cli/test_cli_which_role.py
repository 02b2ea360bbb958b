"""Which role a command is about, where several left something and where none ever ran."""

from __future__ import annotations

import json

import pytest
from cli_fake_role import FakeRole
from conftest import Shell


@pytest.mark.parametrize(
    "command",
    ["status", "list deployments", "stop deployment x", "drain standalone", "logs x", "inspect host x", "list memory"],
)
def test_where_no_role_ever_ran_the_way_out_is_to_start_one(shell: Shell, command: str) -> None:
    done = shell(*command.split())
    assert (done.status, done.err) == (
        13,
        f"error [unavailable]: no role has run with the state directory {shell.state}; "
        f"start it with `capyctl start standalone --state-dir {shell.state}`\n",
    )


def test_documents_that_init_wrote_make_no_role_that_ran(shell: Shell) -> None:
    for role in ("server", "host"):
        assert shell("init", role).status == 0
        done = shell("status")
        assert (done.status, done.err.partition(":")[0]) == (13, "error [unavailable]")
        assert "`capyctl start standalone" in done.err
        assert shell("engine", "list").status == 0


def test_a_host_that_joined_a_server_is_told_where_commands_belong(shell: Shell) -> None:
    (shell.state / "identity").mkdir(parents=True, mode=0o700)
    (shell.state / "identity" / "host-identity.json").write_text("{}")
    done = shell("status")
    assert done.status == 2
    assert "run the command on the server" in done.err


def test_lost_credentials_are_not_taken_for_a_first_start(shell: Shell) -> None:
    (shell.state / "server").mkdir(parents=True, mode=0o700)
    assert shell("status").status == 3


def test_settings_are_those_of_the_standalone_role_beside_other_documents(shell: Shell, role: FakeRole) -> None:
    for other in ("host", "server"):
        (shell.state / "config").mkdir(mode=0o700, exist_ok=True)
        written = shell("init", other, "--output", f"{other}.yaml")  # the keys there are the standalone role's
        assert written.status == 0, written.err
        (shell.home / f"{other}.yaml").rename(shell.state / "config" / f"{other}.yaml")
    shown = shell("config", "show", "--json")
    assert json.loads(shown.out)["role"] == "standalone"
    assert json.loads(shell("config", "show", "--role", "host", "--json").out)["role"] == "host"
    assert shell("list", "deployments").status == 0


def test_a_document_that_is_not_there_yet_is_called_so(shell: Shell) -> None:
    document = shell.state / "config" / "standalone.yaml"
    assert shell("config", "show").out.startswith(f"standalone (document {document}, not written yet)\n")
    document.parent.mkdir(parents=True, mode=0o700)
    document.write_text("schema_version: 1\nkind: standalone\nname: local\n")
    assert shell("config", "show").out.startswith(f"standalone (document {document})\n")
