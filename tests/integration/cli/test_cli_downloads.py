"""What whoever waits for a download reads: on a pipe lines now and then, on a terminal a bar, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cli_fake_role import FakeRole
from conftest import Shell

from capyctl.cli import progress, sources
from capyctl.errors import CapyError, Refusal

MIB = 1 << 20


class Role:
    """Answers one view after the other, and the last one for ever."""

    def __init__(self, *checkpoints: dict[str, Any]) -> None:
        self.views = [{"id": "D", "name": "m", "checkpoint": one} for one in checkpoints]

    def deployment(self, name: str) -> dict[str, Any]:
        return self.views.pop(0) if len(self.views) > 1 else self.views[0]


def coming(done: int | None, total: int | None = 100 * MIB, phase: str = "downloading") -> dict[str, Any]:
    figures = {"done_bytes": done and str(done), "total_bytes": total and str(total)}
    return {"state": "materializing", "download": {**figures, "phase": phase}}


MEASURED = {"state": "measured", "code": None, "reason": None}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DOWNLOAD_POLL_S", 0)
    monkeypatch.setattr(progress, "LINES_AFTER_S", 0)
    monkeypatch.setattr(progress, "POLL_FIRST_S", 0)


def refused_until(*codes: str) -> Callable[[], dict[str, Any]]:
    """A start that is refused with these codes, and then taken."""
    left = list(codes)

    def send() -> dict[str, Any]:
        if left:
            raise Refusal(left.pop(0), "not yet")
        return {"operation_id": "O"}

    return send


def test_a_start_waits_for_the_download_and_says_how_far_it_is(at_once: None, capsys: pytest.CaptureFixture[str]):
    role = Role(
        coming(0, None, "asking"),
        coming(0, None, "waiting"),
        coming(0),
        coming(25 * MIB),
        coming(26 * MIB),
        coming(29 * MIB),
        coming(100 * MIB),
        coming(100 * MIB, phase="verifying"),
        MEASURED,
    )
    receipt = progress.until_accepted(refused_until("checkpoint_digest_pending"), "m", {"id": "D"}, role)  # type: ignore[arg-type]
    assert receipt == {"operation_id": "O"}
    assert capsys.readouterr().err.splitlines() == [
        "Waiting for the model source of m to be downloaded and verified (at most 1800s)",
        "Downloading m: waiting for its turn",
        "Downloading m: 0.0 MiB of 100.0 MiB (0 %)",
        "Downloading m: 25.0 MiB of 100.0 MiB (25 %)",
        "Downloading m: 100.0 MiB of 100.0 MiB (100 %)",
        "Downloaded m: 100.0 MiB",
    ]


def test_on_a_pipe_a_line_is_said_at_the_beginning_each_tenth_each_half_minute_and_at_the_end(
    capsys: pytest.CaptureFixture[str],
):
    def said() -> list[str]:
        return capsys.readouterr().err.splitlines()

    lines = progress.Lines("Measuring m", "Measured m")
    for second in range(101):
        lines.look(f"{second} %", second, 100, float(second) / 10)
    assert said() == [f"Measuring m: {percent} %" for percent in range(10, 101, 10)]
    lines.end()
    assert said() == ["Measured m: 0.0 MiB"]
    slow = progress.Lines("Measuring m", "Measured m")
    for second in range(100):
        slow.look(f"after {second} s", 1, 1 << 30, float(second))
    assert said() == [f"Measuring m: after {second} s" for second in (1, 31, 61, 91)]
    quick = progress.Lines("Measuring m", "Measured m")
    quick.look("half", 1, 2, 0.0)
    quick.end()
    assert said() == []


def test_a_download_that_fails_ends_the_wait_with_its_code(at_once: None):
    failed = {"state": "unmeasurable", "code": "unauthorized", "reason": "its Hub answered 401"}
    role = Role(coming(1), coming(2), failed)
    with pytest.raises(CapyError) as caught:
        progress.until_accepted(refused_until("checkpoint_digest_pending"), "m", {"id": "D"}, role)  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.message) == ("unauthorized", "m: its Hub answered 401")
    assert caught.value.exit_code == 3


def test_a_download_that_is_measured_again_after_a_failure_is_no_failure(at_once: None):
    again = {"state": "measuring", "code": "unavailable", "reason": "of before"}
    role = Role(coming(1), coming(2), again, MEASURED)
    send = refused_until("checkpoint_digest_pending", "checkpoint_digest_pending")
    assert progress.until_accepted(send, "m", {"id": "D"}, role) == {"operation_id": "O"}  # type: ignore[arg-type]


def test_a_download_that_takes_longer_than_its_bound_goes_on(at_once: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "DOWNLOAD_LIMIT_S", 0)
    with pytest.raises(CapyError) as caught:
        progress.until_accepted(refused_until("checkpoint_digest_pending"), "m", {"id": "D"}, Role(coming(MIB)))  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.exit_code) == ("activation_timeout", 10)
    assert "still being downloaded (1.0 MiB of 100.0 MiB (1 %)); that goes on" in caught.value.message


def test_a_terminal_shows_a_bar_with_the_rate(at_once: None, monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(0, 100, 5))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    drawn: list[str] = []
    role = Role(coming(0), coming(50 * MIB), MEASURED)
    progress.watch_download(role, {"id": "D", "name": "m"}, drawn.append, 1e9)  # type: ignore[arg-type]
    assert drawn == [
        f"Downloading m {'╌' * 16} 0.0 MiB of 100.0 MiB (0 %)",
        f"Downloading m {'━' * 8}{'╌' * 8} 50.0 MiB of 100.0 MiB (50 %), 10.0 MiB/s",
    ]


def measuring(done: int, total: int = 4 << 30) -> dict[str, Any]:
    return {"state": "measuring", "measured": {"done_bytes": str(done), "total_bytes": str(total)}}


def test_a_start_waits_for_the_digest_and_says_how_far_it_is(at_once: None, capsys: pytest.CaptureFixture[str]):
    role = Role({"state": "pending"}, {"state": "pending"}, measuring(1 << 30), measuring(3 << 30), MEASURED)
    receipt = progress.until_accepted(refused_until("checkpoint_digest_pending"), "m", {"id": "D"}, role)  # type: ignore[arg-type]
    assert receipt == {"operation_id": "O"}
    assert capsys.readouterr().err.splitlines() == [
        "Waiting for the checkpoint digest of m to be measured (at most 900s)",
        "Measuring m: 1.0 GiB of 4.0 GiB (25 %)",
        "Measuring m: 3.0 GiB of 4.0 GiB (75 %)",
        "Measured m: 4.0 GiB",
    ]


def test_a_digest_that_takes_longer_than_its_bound_ends_the_wait(at_once: None, monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(0, 100_000, 400))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(progress.time, "sleep", lambda seconds: None)
    codes = ["checkpoint_digest_pending"] * 9
    with pytest.raises(CapyError) as caught:
        progress.until_accepted(refused_until(*codes), "m", {"id": "D"}, Role(measuring(1)))  # type: ignore[arg-type]
    assert caught.value.code == "checkpoint_digest_pending"


def test_a_terminal_shows_a_bar_of_what_was_read(at_once: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    drawn: list[str] = []
    role = Role({"state": "measuring"}, measuring(2 << 30), MEASURED)
    progress.watch_measurement(role, "D", "m", drawn.append, 1e12)  # type: ignore[arg-type]
    assert drawn == [f"Measuring m {'━' * 8}{'╌' * 8} 2.0 GiB of 4.0 GiB (50 %)"]


def test_an_operation_that_waits_for_the_digest_says_so_once_and_for_so_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    view = {"id": "D", "name": "m", "checkpoint": measuring(1 << 30), "waiting": "the checkpoint is being measured"}

    class Asked:
        def get(self, path: str) -> dict[str, Any]:
            return view

    told = progress.Told(Asked())  # type: ignore[arg-type]
    clock = iter([10.0, 12.9, 13.0, 14.0, 15.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    for _ in range(2):
        told.look({"deployment_id": "D"}, lambda text: None)
    assert capsys.readouterr().err == ""
    for _ in range(3):
        told.look({"deployment_id": "D"}, lambda text: None)
    line = "Waiting for the checkpoint digest of m to be measured (at most 900s)"
    assert capsys.readouterr().err.splitlines() == [line, "Measuring m: 1.0 GiB of 4.0 GiB (25 %)"]
    assert told.measured == f"Measuring m {'━' * 4}{'╌' * 12} 1.0 GiB of 4.0 GiB (25 %)"
    monkeypatch.setattr(progress.time, "monotonic", lambda: told.digest_ends)
    with pytest.raises(
        CapyError, match=r"m is still being measured: 1.0 GiB of 4.0 GiB \(25 %\); that goes on"
    ) as caught:
        told.look({"deployment_id": "D"}, lambda text: None)
    assert (caught.value.code, caught.value.exit_code) == ("activation_timeout", 10)
    view |= {"checkpoint": MEASURED, "waiting": None}
    told.look({"deployment_id": "D"}, lambda text: None)
    assert told.measured == ""
    assert capsys.readouterr().err.endswith("\nMeasured m: 4.0 GiB\n")


def test_the_end_of_a_measurement_is_said_however_soon_the_next_thing_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class Asked:
        def get(self, path: str) -> dict[str, Any]:
            return {"id": "D", "name": "m", "checkpoint": measuring(1 << 30)}

    clock = iter([10.0, 13.0, 14.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    told = progress.Told(Asked())  # type: ignore[arg-type]
    for _ in range(3):
        told.look({"deployment_id": "D"}, lambda text: None)
    for _ in range(2):
        told.look({"deployment_id": "D", "reason": "needs 2 GiB"}, lambda text: None)
    told.measured_well()
    assert capsys.readouterr().err.splitlines() == [
        "Waiting for the checkpoint digest of m to be measured (at most 900s)",
        "Measuring m: 1.0 GiB of 4.0 GiB (25 %)",
        "Measured m: 4.0 GiB",
        "Waiting: needs 2 GiB",
    ]


def test_status_shows_how_far_a_digest_is(shell: Shell, role: FakeRole):
    role.add("m", checkpoint={**measuring(1 << 30), "reason": "an older failure"})
    role.add("n", checkpoint={"state": "pending"})
    assert "  Checkpoint   being measured: 1.0 GiB of 4.0 GiB (25 %)\n" in shell("status", "deployment", "m").out
    assert "  Checkpoint   being measured\n" in shell("status", "deployment", "n").out


def test_status_shows_a_download(shell: Shell, role: FakeRole):
    role.add("m", checkpoint={**coming(3 << 30, 6 << 30), "reason": "an older failure"})
    assert "  Checkpoint   being downloaded: 3.0 GiB of 6.0 GiB (50 %)\n" in shell("status", "deployment", "m").out


def test_what_is_pruned_is_summed_up_and_nothing_is_said_to_be_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    row = {"place": "sources/http/m.gguf-ab", "bytes": str(3 * MIB), "complete": True, "deployments": []}
    answers = [{"removed": [row]}, {"removed": []}]

    class Pruning:
        def change(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
            return answers.pop(0)

    monkeypatch.setattr(sources, "management", lambda common: Pruning())
    sources.prune(apply=True)
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split() == ["sources/http/m.gguf-ab", "3.0", "MiB", "complete", "-"]
    assert shown[-1] == "3.0 MiB removed."
    sources.prune(apply=True)
    assert capsys.readouterr().out.splitlines()[-1] == "Nothing can be removed."
