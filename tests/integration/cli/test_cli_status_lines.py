"""Single lines of `status deployment`: what keeps a model from parking, and its parsers."""

from __future__ import annotations

from typing import Any

import pytest

from capyctl.cli.status import applying, flat, last_error, parser_line, residency_line


@pytest.mark.parametrize(
    ("residency", "reason", "shown"),
    [
        ("restart_only", "this host opted out: x", {"Residency": "restart_only: this host opted out: x"}),
        ("restart_only", "llama.cpp cannot park", {}),
        ("restart_only", None, {}),
        ("deep", "the document states it", {}),
    ],
)
def test_only_what_keeps_an_engine_that_parks_from_parking_is_a_line(
    residency: str, reason: str | None, shown: dict[str, str]
) -> None:
    assert residency_line({"residency": residency, "residency_reason": reason}) == shown


@pytest.mark.parametrize(
    ("tool", "reasoning", "line"),
    [
        (("hermes", "declared"), ("none", "off"), "tool calls hermes (declared), reasoning none (turned off)"),
        (
            ("hermes", "model_family"),
            ("none", "unsupported"),
            "tool calls hermes (by model family), reasoning none (its chat template has none)",
        ),
        (
            ("none", "unknown_family"),
            ("none", "extra_args"),
            "tool calls none (no default for this model family), reasoning none (extra_args say it)",
        ),
        (("x", "newer"), ("y", "host_fixed"), "tool calls x (newer), reasoning y (the host's arguments say it)"),
    ],
)
def test_a_parser_is_shown_with_where_it_comes_from(tool: Any, reasoning: Any, line: str) -> None:
    parsers = {
        "reasoning": {"name": reasoning[0], "source": reasoning[1]},
        "tool_call": {"name": tool[0], "source": tool[1]},
    }
    assert parser_line(parsers) == line
    assert applying({"parsers": parsers})["Parsers"] == line
    assert "Parsers" not in applying({"parsers": None})


def test_instances_that_are_charged_alike_share_a_line() -> None:
    row = {"bytes": str(2 << 30), "phase": "ready", "domain": "gpu0", "provenance": "derived"}
    lines = applying({"ledger": [row, row, {**row, "phase": "cold"}]})
    assert lines == {"Charged": "2 x 2.0 GiB ready on gpu0 (derived)\n2.0 GiB starting on gpu0 (derived)"}


def test_every_phase_is_said_with_its_figure_and_where_it_comes_from() -> None:
    def row(domain: str, phase: str, gibs: float, why: str, measured: float | None = None) -> dict[str, Any]:
        seen = None if measured is None else str(int(measured * (1 << 30)))
        amount = str(int(gibs * (1 << 30)))
        return {
            "domain": domain, "phase": phase, "bytes": amount, "provenance": why, "measured_bytes": seen,
        }  # fmt: skip

    card = [
        row("gpu0", "cold", 16, "measured", 16),
        row("gpu0", "ready", 16, "declared"),
        row("gpu0", "parking", 18, "declared"),
        row("gpu0", "parked", 1, "measured", 0.5),
        row("gpu0", "wake", 17, "declared"),
    ]
    ram = [row("system", phase, 4, "derived") for phase in ("cold", "ready", "parking", "parked", "wake")]
    assert applying({"memory": [*card, *ram]})["Memory"].splitlines() == [
        "gpu0: start 16.0 GiB measured, ready 16.0 GiB declared, parking 18.0 GiB declared, "
        "parked 1.0 GiB measured as 0.5 GiB, waking 17.0 GiB declared",
        "system: start 4.0 GiB derived, ready/parking/parked/waking 4.0 GiB derived",
    ]
    alone = [row("unified", phase, 2, "derived") for phase in ("cold", "ready")]
    assert applying({"memory": alone})["Memory"] == "unified: start 2.0 GiB derived, ready 2.0 GiB derived"


def test_a_record_says_bytes_for_people_wherever_they_stand() -> None:
    record = {"startup": {"measured_bytes": {"gpu0": str(15 << 29)}, "bytes": {"system": "0"}}, "count": 7}
    assert flat(record) == {
        "startup.measured_bytes.gpu0": "8053063680 (7.5 GiB)",
        "startup.bytes.system": "0 (0.0 GiB)",
        "count": "7",
    }


def test_what_no_instance_can_be_started_for_stands_once() -> None:
    error = {"code": "insufficient_resources", "message": "m: instances: is 9, and box holds 2 of them"}
    assert last_error(error) == "insufficient_resources: m: instances: is 9, and box holds 2 of them"
    assert last_error(error, error["message"]) == "insufficient_resources: see Checkpoint"
    assert last_error(None, error["message"]) == "-"
