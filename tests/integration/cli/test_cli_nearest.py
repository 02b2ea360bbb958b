"""Commands that do not exist: one line, with what was most likely meant."""

from __future__ import annotations

import json

import pytest
from conftest import Shell

MEANT = [
    ("deplyo model --file x", "deploy"),
    ("standlone", "start standalone"),
    ("deployments", "list deployments"),
    ("lgos writer", "logs"),
    ("start standlone", "start standalone"),
    ("engine lst", "engine list"),
    ("list deployment", "list deployments"),
    ("status chat", "status deployment chat"),
    ("status deploymnt chat", "status deployment chat"),
    ("stop chat --wait", "stop deployment chat"),
    ("inspect chat", "inspect deployment chat"),
    ("deploy chat.yaml --activate", "deploy model chat.yaml"),
    ("validate chat.yaml", "validate config chat.yaml"),
]


@pytest.mark.parametrize(("words", "meant"), MEANT)
def test_a_command_that_does_not_exist_names_the_one_that_was_meant(shell: Shell, words: str, meant: str) -> None:
    done = shell(*words.split())
    first, usage = done.err.splitlines()
    assert (done.status, done.out) == (2, "")
    assert first.startswith("error [invalid_config]: ")
    assert first.endswith(f" did you mean `capyctl {meant}`?")
    assert usage.startswith("Usage: capyctl")


def test_what_resembles_nothing_lists_what_there_is_and_what_is_too_much_is_named(shell: Shell) -> None:
    assert "expected one of config, delete, demo," in shell("bogus").err
    assert (
        shell("list", "chat")
        .err.splitlines()[0]
        .endswith("expected one of deployments, engines, hosts, memory, sources.")
    )
    for words, line in (
        (("list", "deployments", "extra"), "`capyctl list deployments` takes no 'extra'"),
        (("stop", "deployment", "a", "b"), "`capyctl stop deployment` takes no 'b'"),
    ):
        done = shell(*words)
        assert (done.status, done.err.splitlines()[0]) == (2, f"error [invalid_config]: {line}")
    assert json.loads(shell("status", "chat", "--json").err)["message"].endswith("status deployment chat`?")


@pytest.mark.parametrize(
    ("words", "line", "usage"),
    [
        ("stop standalone", "to stop every engine: `capyctl drain standalone`", "stop <deployment>"),
        ("init standalone", "`capyctl start standalone` writes its own document", "init <server|host>"),
        ("status standalone", "`capyctl status` shows the role", "status"),
        ("status deployment", "`capyctl status deployment` needs <name>", "status deployment <name>"),
        ("start deployment --wait", "`capyctl start deployment` needs <name>", "start deployment <name>"),
        ("engine flags", "`capyctl engine flags` needs <family>", "engine flags <family>"),
        ("list hosts --config", "`capyctl list hosts`: --config needs a value", "list hosts"),
        ("deploy model a b", "`capyctl deploy model` takes no 'b'", "deploy model [<path>]"),
        ("--bogus", "Unknown option '--bogus' after 'capyctl'", "<init|"),
    ],
)
def test_what_a_command_lacks_and_what_does_its_work_are_said(shell: Shell, words: str, line: str, usage: str) -> None:
    done = shell(*words.split())
    first, second = done.err.splitlines()
    assert (done.status, done.out) == (2, "")
    assert line in first
    assert second.startswith(f"Usage: capyctl {usage}")


def test_help_shows_the_form_of_a_setting(shell: Shell) -> None:
    for words in (("start", "standalone"), ("validate", "config"), ("config", "show")):
        done = shell(*words, "--help")
        assert (done.status, "<path>=<value>" in done.out) == (0, True), words
