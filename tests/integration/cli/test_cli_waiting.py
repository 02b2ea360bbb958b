"""What a waiting start says, piped as on a terminal, and how the way on is shown."""

from __future__ import annotations

from typing import Any

from cli_fake_role import FakeRole
from conftest import Shell


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


def test_a_start_that_does_not_fit_says_each_reason_once(shell: Shell, role: FakeRole) -> None:
    role.add("writer")
    waits(role, ["needs 2 GiB"] * 6 + ["needs 1 GiB"], "insufficient_resources")
    done = shell("start", "deployment", "writer", "--wait")
    assert (done.status, said(done.err)) == (0, ["Waiting: needs 2 GiB", "Waiting: needs 1 GiB"])
    assert done.out.startswith("Started writer: ready\n")


def test_a_start_that_nobody_waits_for_says_what_it_waits_for_as_far_as_is_known_at_once(
    shell: Shell, role: FakeRole
) -> None:
    role.add("writer")
    waits(role, ["needs 2 GiB. Use --evict"] * 2, "insufficient_resources")
    lines = shell("start", "deployment", "writer").out.splitlines()
    assert (lines[0], lines[-1]) == ("Start requested for writer", "  Waits       needs 2 GiB. Use --evict")
    assert "operation" not in shell("start", "deployment", "writer", "--json").out.replace("operation_id", "")


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
