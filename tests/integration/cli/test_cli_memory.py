"""`list memory`: bars on a terminal as wide as it is, columns elsewhere, one JSON value for programs."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from fractions import Fraction
from typing import Any

from cli_fake_role import FakeRole
from conftest import Shell
from hypothesis import given, settings
from hypothesis import strategies as st

from capyctl.cli.memory import bar, drawn, figures

GIB = 1 << 30
SIZE = re.compile(r"\d+\.\d GiB|(?<= )-(?= |$)")


def holder(name: str, gib: int, phase: str = "ready", **more: Any) -> dict[str, Any]:
    row = {"name": name, "index": 0, "phase": phase, "bytes": str(gib * GIB), "provenance": "derived"}
    return {**row, "planned_bytes": None, "resident_bytes": str(gib * GIB), **more}


def domain(*holders: dict[str, Any], **more: Any) -> dict[str, Any]:
    charged = sum(int(row["bytes"]) for row in holders)
    return {
        "domain_id": "gpu0",
        "capacity_bytes": str(24 * GIB),
        "managed_limit": str(22 * GIB),
        "free_reserve": str(2 * GIB),
        "parked_limit": str(6 * GIB),
        "reserved_bytes": str(charged),
        "parked_bytes": str(sum(int(row["bytes"]) for row in holders if row["phase"] == "parked")),
        "available_bytes": str(10 * GIB),
        "resident_bytes": str(charged),
        "foreign_bytes": str(GIB),
        "holders": list(holders),
        "reason": None,
        **more,
    }


HOST = {"name": "box"}
ROWS = [holder("coder", 11), holder("writer", 1, "parked", provenance="measured")]


def test_every_bar_is_of_the_whole_domain_and_stands_in_one_column() -> None:
    lines = drawn(HOST, domain(*ROWS), 100, full="#")
    assert lines[0] == "gpu0 of box, 24.0 GiB"
    shown = {line.split("GiB")[0].strip().rsplit(" ", 1)[0].strip(): line.count("#") for line in lines[1:]}
    whole = sum(shown[name] for name in ("charged", "free", "reserve"))
    assert shown["charged"] == shown["coder/0"] + shown["writer/0"]
    assert 55 <= whole <= 59
    starts = {line.index("#") for line in lines[1:] if "#" in line}
    assert len(starts) == 1
    assert lines[2].endswith("ready, derived")
    assert lines[3].endswith("parked, measured")


def test_what_is_not_observed_is_said_and_has_no_bar() -> None:
    blank = dict.fromkeys(("available_bytes", "resident_bytes", "foreign_bytes"))
    lines = drawn(HOST, domain(*ROWS, **blank, reason="it cannot be read now"), 100, full="#")
    assert lines[0] == "gpu0 of box, 24.0 GiB: it cannot be read now"
    assert [line.split()[-1] for line in lines if line.strip().startswith(("free", "others use"))] == ["-", "-"]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    st.integers(1, 400),
    st.lists(st.tuples(st.text("abc-", min_size=1, max_size=64), st.integers(0, 30)), max_size=6),
    st.sampled_from("#█"),
)
def test_no_figure_is_ever_cut_and_wide_terminals_are_never_overrun(
    columns: int, rows: list[tuple[str, int]], full: str
) -> None:
    lines = drawn(HOST, domain(*(holder(name, gib) for name, gib in rows)), columns, full=full)
    assert all(SIZE.search(line) for line in lines)
    if columns >= 45:
        assert max(len(line) for line in lines[1:]) <= columns


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50), st.integers(1, 300))
def test_a_bar_shows_something_for_anything_and_never_more_than_there_is(
    amount: int, capacity: int, width: int
) -> None:
    drawn_ = bar(amount, capacity, width, "#")
    assert bool(drawn_) == (amount > 0 and capacity > 0)
    assert len(drawn_) <= width


def test_the_figures_of_a_table_have_one_unit_and_none_that_is_something_reads_as_nothing() -> None:
    assert [*map(figures([11 * GIB, GIB, 0, None]), (11 * GIB, 0, None))] == ["11.0 GiB", "0.0 GiB", "-"]
    amounts = (11 * GIB, 45_508_608)
    assert [*map(figures(amounts), amounts)] == ["11.00 GiB", "0.04 GiB"]
    amounts = (GIB - 1, 4096)
    assert [*map(figures(amounts), amounts)] == ["1.000 GiB", "<0.001 GiB"]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1 << 42), max_size=6))
def test_figures_are_within_half_of_their_last_digit(amounts: list[int]) -> None:
    figure = figures(amounts)
    for amount in amounts:
        text = figure(amount).removesuffix(" GiB").removeprefix("<")
        assert abs(Fraction(text) - Fraction(amount, GIB)) <= Fraction(1, 10 ** len(text.partition(".")[2]))
        assert not amount or Fraction(text)


def test_columns_and_json_reach_a_pipe(shell: Shell, role: FakeRole) -> None:
    role.usage = {"hosts": [{**HOST, "domains": [domain(*ROWS)]}], "deployments": []}
    done = shell("list", "memory")
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines() == [
        "HOST   DOMAIN   CHARGED    LIMIT      PARKED    RESERVE   FOREIGN   FREE       TOTAL",
        "box    gpu0     12.0 GiB   22.0 GiB   1.0 GiB   2.0 GiB   1.0 GiB   10.0 GiB   24.0 GiB",
        "",
        "HOST   DOMAIN   HOLDER     PHASE    CHARGED    SOURCE     RESIDENT",
        "box    gpu0     coder/0    ready    11.0 GiB   derived    11.0 GiB",
        "box    gpu0     writer/0   parked   1.0 GiB    measured   1.0 GiB",
    ]
    writer = role.add("writer")
    answer = json.loads(shell("list", "memory", "--deployment", "writer", "--host", "box", "--json").out)
    assert answer["query"] == f"host=01N8C2F0QW7V5T3R9JX4B6M1KD&deployment={writer['id']}"
    assert shell("list", "memory", "--host", "other").err.startswith("error [not_found]: there is no host other")


def test_a_terminal_gets_bars_without_any_colour_and_a_closed_stream_gets_nothing(shell: Shell, role: FakeRole) -> None:
    role.usage = {"hosts": [{**HOST, "domains": [domain(*ROWS)]}], "deployments": []}
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "capyctl", "list", "memory"]
    environ = {**shell.environ(), "COLUMNS": "90", "LC_ALL": "C.UTF-8", "TERM": "xterm-256color"}
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, env=environ, timeout=30, check=False)
    os.close(theirs)
    text = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "█" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 90
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], env=environ, capture_output=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, b"")
