"""`logs`: the end of an engine's log, and why there is none."""

from __future__ import annotations

import json

import pytest
from cli_fake_role import FakeRole
from conftest import Shell


def test_logs_prints_the_end_of_the_log_as_it_is(shell: Shell, role: FakeRole) -> None:
    writer = role.add("writer")
    role.logs[writer["id"], 0] = "x" * 2000 + "\nI loading\nE no memory\n"
    done = shell("logs", "writer")
    assert (done.status, done.out, done.err) == (0, role.logs[writer["id"], 0], "")
    done = shell("logs", "writer", "--kib", "1")
    assert (len(done.out), done.out.endswith("\nE no memory\n")) == (1024, True)
    assert json.loads(shell("logs", writer["id"], "--json").out)["text"] == role.logs[writer["id"], 0]


def test_no_log_no_instance_and_no_deployment_are_one_line_each(shell: Shell, role: FakeRole) -> None:
    role.add("writer")
    for words, why in (
        (("writer",), 'instance 0 of "writer" has no engine log: it has not been started, or its log was deleted'),
        (("writer", "--instance", "3"), "writer has no instance 3; it has 1, counted from 0"),
        (("nobody",), 'there is no deployment "nobody"; `capyctl list deployments` shows them'),
    ):
        done = shell("logs", *words)
        assert (done.status, done.out, done.err) == (2, "", f"error [not_found]: {why}\n")


@pytest.mark.parametrize("words", [("--kib", "0"), ("--kib", "257"), ("--kib=-1",), ("--instance", "x")])
def test_figures_out_of_range_are_refused_before_anything_is_asked(
    shell: Shell, role: FakeRole, words: tuple[str, ...]
) -> None:
    done = shell("logs", "writer", *words)
    assert (done.status, "expected a number from" in done.err) == (2, True)
    assert role.seen == []
