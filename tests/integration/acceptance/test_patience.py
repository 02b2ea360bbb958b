"""Failures that take their time: a stop that an engine ignores, a start that fails, a crash in mid-answer.

All happen at once at the beginning. What needs time is looked at last, after the other modules' tests. After a
failed start, or an exit soon after readiness, requests are told why at once, and the first request after
`Retry-After` starts it again.
"""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from .conftest import REAL, TINY, Build
from .machine import Answer, Engine, Machine, Stopwatch, until


@attrs.define(kw_only=True)
class Troubled:
    """A machine on which three things have gone wrong, and what was heard of it."""

    machine: Machine
    stuck: Engine
    stop_began: float
    broken: Answer  # the request that met the corrupt file
    whole: bytes  # the file as it was
    dead: Engine
    cut: bytes  # the stream that lost its engine
    after_cut: Answer
    argued: Answer  # the request whose engine refused its arguments
    ended_at: float | None = None  # when the stopped engine was seen to be gone
    failed_at: float = attrs.field(factory=time.monotonic)


@pytest.fixture(scope="session")
def troubled(build: Build) -> Iterator[Troubled]:
    with build(limit_mib=3072) as machine:
        machine.start()
        folder = machine.home / "models" / "other"
        folder.mkdir()
        file = folder / "model.gguf"
        whole = (machine.home / "models" / TINY / "tiny.gguf").read_bytes()
        file.write_bytes(whole)
        for name, model in (("stuck", TINY), ("broken", "other"), ("well", TINY)):
            machine.deploy(name, model, 400)
        machine.deploy("dead", REAL, 512, context_length=2048, max_concurrent_requests=2)

        _deploy_and_move_away(machine, whole)
        until(lambda: "is not there" in machine.ask("late").json["message"], 20, "a look at it", 0.2)

        assert machine.ask("stuck").status == 200
        stuck = machine.engine("stuck")
        stuck.send(signal.SIGSTOP)
        machine.ok("stop", "deployment", "stuck")
        stop_began = time.monotonic()

        file.write_bytes(whole[: len(whole) // 2])
        broken = machine.ask("broken")

        assert machine.ask("dead").status == 200
        dead = machine.engine("dead")
        call = machine.open("dead")
        call.read_until(b'"content":"')
        dead.send(signal.SIGKILL)
        cut = call.rest(10)
        until(lambda: machine.instance("dead")["last_error"], 5, "the reason")
        machine.deploy("argued", TINY, 400, extra_args=["--no-such-thing"], accept_extra_args=True)
        argued = machine.ask("argued")
        found = Troubled(
            argued=argued,
            machine=machine,
            stuck=stuck,
            stop_began=stop_began,
            broken=broken,
            whole=whole,
            dead=dead,
            cut=cut,
            after_cut=machine.ask("dead"),
        )
        over = threading.Event()

        def see_its_end() -> None:
            while not over.wait(0.1):
                if not stuck.alive():
                    found.ended_at = time.monotonic()
                    return

        watcher = threading.Thread(target=see_its_end)
        watcher.start()
        yield found
        over.set()
        watcher.join()


def _deploy_and_move_away(machine: Machine, whole: bytes) -> None:
    """Deploy `late` and take its directory away before it is measured: others that are measured hold it back."""
    for name in ("slow", "not-moved-in"):
        (machine.home / "models" / name).mkdir()
        (machine.home / "models" / name / "model.gguf").write_bytes(whole)
    with (machine.home / "models" / "slow" / "notes.bin").open("wb") as notes:
        notes.truncate(256 << 20)  # a hole, which is hashed all the same
    for name, model in (("slow", "slow"), ("late", "not-moved-in")):
        config = json.loads(Path(machine.document(name, model, 400)).read_text())
        machine.manage("POST", "/deployments", {"config": config})
    (machine.home / "models" / "not-moved-in").rename(machine.home / "moved-out")


def last(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that would wait: others of the session come first."""
    test.comes_last = True  # type: ignore[attr-defined]
    return test


def test_while_a_stop_is_stuck_others_are_served_and_status_answers(troubled: Troubled) -> None:
    machine = troubled.machine
    took: list[float] = []
    looks: list[float] = []
    assert machine.ask("well").status == 200
    for _ in range(8):
        done = machine.ok("status", "deployment", "stuck")
        shown = done.out
        looks.append(done.took_s)
        assert re.search(r"^stuck +stopping ", shown, re.MULTILINE)
        assert re.search(r"^  Stopping +operator$", shown, re.MULTILINE)
        since = Stopwatch()
        assert machine.ask("well", max_tokens=1).status == 200
        took.append(since.s)
        time.sleep(0.2)
    assert troubled.stuck.alive()
    print(f"while a stop is stuck: another model answers in at most {max(took):.2f} s, status in {max(looks):.2f} s")
    assert max(looks) < 5, "nobody waits for the stop"
    assert max(took) < 5


def test_a_stream_that_lost_its_engine_says_so(troubled: Troubled) -> None:
    assert b"[DONE]" not in troubled.cut
    events = [line for line in troubled.cut.decode().splitlines() if line.startswith("data: ")]
    print(f"last event: {events[-1]}")
    assert '"error"' in events[-1]
    assert '"engine_error"' in events[-1]


def test_status_says_what_the_engine_died_of(troubled: Troubled) -> None:
    shown = troubled.machine.ok("status", "deployment", "dead").out
    print(shown)
    assert re.search(r"^0 +\S+ +failed +active +- +engine_error: the engine was ended by signal 9", shown, re.MULTILINE)
    assert re.search(r"^  Last words +\S", shown, re.MULTILINE)


def test_a_request_for_a_model_whose_files_changed_reads_that_no_patience_helps(troubled: Troubled) -> None:
    answer = troubled.broken
    print(answer.json["message"])
    assert (answer.status, answer.json["code"], answer.json["retryable"]) == (409, "checkpoint_mismatch", False)
    assert "retry-after" not in answer.headers
    assert str(troubled.machine.home) not in answer.body.decode(), "no directory of the machine"


@pytest.mark.parametrize("which", ["after_cut", "argued"])
def test_requests_after_a_failure_are_told_why_and_when_to_come_again(troubled: Troubled, which: str) -> None:
    answer: Answer = getattr(troubled, which)
    print(answer.json["message"])
    assert (answer.status, answer.json["retryable"]) == (503, True), answer.body
    assert answer.json["code"] == "activation_failed"
    assert answer.json["error"]["code"] == "activation_failed"
    assert 0 < int(answer.headers["retry-after"]) <= 30
    assert str(troubled.machine.home) not in answer.body.decode(), "no directory of the machine"
    assert "127.0.0.1" not in answer.body.decode(), "no address"


def test_status_says_why_the_start_failed(troubled: Troubled) -> None:
    shown = troubled.machine.ok("status", "deployment", "broken").out
    print(shown)
    assert re.search(r"^broken +failed +0/1 +1 +0\.4 GiB +\d+s +deploy succeeded$", shown, re.MULTILINE)
    assert re.search(r"^0 +[a-z0-9]\S* +failed +active +- +checkpoint_mismatch: the files of ", shown, re.MULTILINE)
    assert troubled.machine.engines("broken") == []


def test_a_model_that_was_missing_is_served_once_it_is_there(troubled: Troubled) -> None:
    machine = troubled.machine
    refused = machine.ask("late")
    assert (refused.status, refused.json["code"]) == (409, "invalid_root"), refused.body
    shown = machine.ok("status", "deployment", "late").out
    assert re.search(
        r"^  Checkpoint +unmeasurable: the model directory \S+/not-moved-in is not there$", shown, re.MULTILINE
    )
    (machine.home / "moved-out").rename(machine.home / "models" / "not-moved-in")
    machine.ask("late")  # asking has it looked at again
    until(lambda: machine.ask("late").status == 200, 5, "an answer", 0.2)


def test_a_corrected_revision_serves_at_once(troubled: Troubled) -> None:
    machine = troubled.machine
    shown = machine.ok("status", "deployment", "argued").out
    assert re.search(r"^0 +\S+ +failed +active +- +engine_argument_rejected: .*--no-such-thing", shown, re.MULTILINE), (
        shown
    )
    assert re.search(r"^  Last words +\S", shown, re.MULTILINE)
    machine.ok("deploy", "model", "--file", machine.document("argued", TINY, 400), "--revision", "1")
    assert machine.ask("argued").status == 200, "failures of the older revision are forgotten"


@last
def test_a_stop_that_an_engine_ignores_ends_within_its_bounds(troubled: Troubled) -> None:
    machine = troubled.machine
    until(lambda: troubled.ended_at, 90, "the end of the stopped engine")
    assert troubled.ended_at is not None
    ended_s = troubled.ended_at - troubled.stop_began
    print(f"the engine that ignored its stop ended after {ended_s:.1f} s")
    assert ended_s < 30 + 15 + 15, "idle wait, grace after SIGTERM, SIGKILL"
    until(lambda: machine.view("stuck")["observed_state"] == "stopped", 5, "the proven end")
    assert machine.view("stuck")["ledger"] == []
    assert machine.ask("stuck").json["code"] == "deployment_stopped"


@last
def test_a_corrected_file_serves_without_a_restart_or_a_command(troubled: Troubled) -> None:
    machine = troubled.machine
    (machine.home / "models/other/model.gguf").write_bytes(troubled.whole)
    wait_s = troubled.failed_at + 30 + 1 - time.monotonic()  # the pause after a first failure
    time.sleep(max(0.0, wait_s))
    answer = machine.ask("broken")
    assert answer.status == 200, answer.body


@last
def test_a_crashed_engine_is_started_by_the_next_request(troubled: Troubled) -> None:
    machine = troubled.machine
    time.sleep(max(0.0, troubled.failed_at + int(troubled.after_cut.headers["retry-after"]) + 1 - time.monotonic()))
    assert machine.ask("dead").status == 200
    assert machine.engine("dead") != troubled.dead
