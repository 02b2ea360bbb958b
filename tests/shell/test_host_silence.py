"""Whether an engine that answers no gauge is slow or hangs: by the clock and by what its processes use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from capyctl.fsm.types import Role
from capyctl.host import identity, silence
from capyctl.host.silence import Effort, Silence, effort

ASKED_EVERY_S = 6.5  # a gauge that is not answered within 5 s, and the pause


def told(uses: list[Effort]) -> list[str | None]:
    """What is said after each gauge that was not answered."""
    quiet, verdicts = Silence(), []
    for n, used in enumerate(uses):
        quiet.missed(n * ASKED_EVERY_S, n * ASKED_EVERY_S + 5, used)
        verdicts.append(quiet.why)
    return verdicts


def test_an_engine_that_does_nothing_is_doubted_after_a_quarter_of_a_minute():
    verdicts = told([Effort(cpu_s=10.0, major_faults=3)] * 4)
    assert verdicts[:2] == [None, None]
    assert verdicts[2] == "the engine has answered nothing for 18 s, and its processes do nothing"
    assert verdicts[3] is not None, "told again while it is so"


def test_timers_are_no_work_and_a_stopped_process_is_named():
    ticking = [Effort(cpu_s=10.0 + n * 0.05, major_faults=3, stopped=True) for n in range(3)]
    assert told(ticking)[-1] == "the engine has answered nothing for 18 s, and it is stopped by a signal"


def test_one_that_computes_or_reads_its_files_is_given_five_minutes():
    for uses in (
        [Effort(cpu_s=6.0 * n, major_faults=0) for n in range(60)],
        [Effort(cpu_s=0.0, major_faults=9 * n) for n in range(60)],
    ):
        verdicts = told(uses)
        first = next(n for n, verdict in enumerate(verdicts) if verdict is not None)
        assert silence.BUSY_S <= first * ASKED_EVERY_S + 5 < silence.BUSY_S + ASKED_EVERY_S


def test_what_hangs_after_a_long_batch_is_doubted_from_then_on():
    uses = [Effort(cpu_s=min(n, 10) * 6.0, major_faults=0) for n in range(20)]
    first = next(n for n, verdict in enumerate(told(uses)) if verdict is not None)
    assert (first - 10) * ASKED_EVERY_S < silence.HUNG_S + ASKED_EVERY_S


def test_an_answer_ends_the_silence_and_a_pause_of_the_machine_says_nothing():
    quiet, used = Silence(), Effort(cpu_s=1.0, major_faults=0)
    for n in range(2):
        quiet.missed(n * ASKED_EVERY_S, n * ASKED_EVERY_S + 5, used)
    quiet.answered()
    quiet.missed(0.0, 9_000.0, used)  # the whole machine slept in the middle of one gauge
    assert quiet.why is None
    quiet.missed(9_001.5, 9_006.5, used)
    assert (quiet.why, quiet.hung) == (None, False)


def test_effort_reads_a_process_by_its_identity():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        process = identity.identify(child.pid, Role.API)
        assert process is not None
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        used = effort([process])
        assert used.stopped
        assert used == effort([process])
    finally:
        child.kill()
        child.wait()
    assert effort([process]) == Effort(cpu_s=0.0, major_faults=0)
