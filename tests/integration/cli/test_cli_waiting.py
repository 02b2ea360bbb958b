"""What a waiting start says, piped as on a terminal, and how the way on is shown."""

from __future__ import annotations

from typing import Any

import pytest
from cli_fake_role import FakeRole
from conftest import Shell

ROOM = "Use --evict to let it stop or park idle models, or send it a request: that makes room by itself."


def waits(role: FakeRole, reasons: list[str | None], code: str | None) -> None:
    """Let the next operation wait for these reasons, one per look, and then succeed."""
    role.polls_before_end = len(reasons)
    poll = role.poll

    def told(operation: dict[str, Any]) -> dict[str, Any]:
        seen = poll(operation)
        if seen["state"] == "running":
            seen |= {"reason": reasons[operation["polls"] - 1], "waiting_code": code}
        return seen

    role.poll = told  # type: ignore[method-assign]


def said(err: str) -> list[str]:
    return [line for line in err.splitlines() if not line.startswith("Request identity")]


@pytest.mark.parametrize("code", ["insufficient_resources", "insufficient_memory", "startup_requires_empty_host"])
def test_a_start_that_does_not_fit_says_each_reason_once_and_how_room_is_made(
    shell: Shell, role: FakeRole, code: str
) -> None:
    role.add("writer")
    waits(role, ["needs 2 GiB"] * 6 + ["needs 1 GiB"], code)
    done = shell("start", "deployment", "writer", "--wait")
    assert (done.status, said(done.err)) == (0, ["Waiting: needs 2 GiB", ROOM, "Waiting: needs 1 GiB"])
    assert done.out.startswith("Started writer: ready\n")


def test_a_start_with_evict_and_one_that_waits_for_something_else_get_no_such_advice(
    shell: Shell, role: FakeRole
) -> None:
    role.add("writer")
    waits(role, ["needs 2 GiB"] * 6, "insufficient_resources")
    assert said(shell("start", "deployment", "writer", "--wait", "--evict").err) == ["Waiting: needs 2 GiB"]
    waits(role, ["the host does not answer"] * 6, "stale_observation")
    assert said(shell("start", "deployment", "writer", "--wait").err) == ["Waiting: the host does not answer"]


def test_what_a_deployment_waits_for_is_said_when_its_operation_does_not_say_it(shell: Shell, role: FakeRole) -> None:
    role.add("writer", waiting="the checkpoint is being measured")
    waits(role, [None] * 6, None)
    done = shell("start", "deployment", "writer", "--wait")
    assert said(done.err) == ["Waiting: the checkpoint is being measured"]


def test_status_says_how_long_a_start_may_take_while_it_starts(shell: Shell, role: FakeRole) -> None:
    role.add("writer", observed_state="starting")
    role.add("notes", observed_state="ready")
    assert "  Bound     ready within 130s of its start\n" in shell("status", "deployment", "writer").out
    assert "Bound" not in shell("status", "deployment", "notes").out


def test_what_passes_at_once_is_not_said(shell: Shell, role: FakeRole) -> None:
    role.add("writer")
    waits(role, ["needs 2 GiB"], "insufficient_resources")
    assert said(shell("start", "deployment", "writer", "--wait").err) == []
