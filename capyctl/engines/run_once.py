"""Running an installation's program once, to learn what it is: bounded, with an environment of its own.

The program gets a group of its own, which is ended whatever happens, so that nothing it started stays.
Source: engines 2.3 step 4, 2.5; security 16.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import attrs

from capyctl.errors import Refusal

TAIL_BYTES = 4096
_LOOK_S = 0.5


@attrs.frozen(kw_only=True)
class Said:
    """What a program printed until it ended. `beside` is the end of its other stream, at most 4 KiB."""

    status: int
    text: str
    beside: str
    stream: Literal["stdout", "stderr"]  # the one that `text` is of

    @property
    def last_line(self) -> str:
        """The last line of standard error, else of standard output; printable and bounded."""
        outputs = (self.beside, self.text) if self.stream == "stdout" else (self.text, self.beside)
        lines = [line for text in outputs for line in text.strip().splitlines()[-1:]]
        return printable(lines[0]) if lines else "it said nothing"


def run_once(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    what: str,
    limit_s: float,
    bytes_max: int,
    stream: Literal["stdout", "stderr"] = "stdout",
    code: str = "engine_version_failed",
) -> Said:
    """Run a program to its end and return what it printed on `stream`. Blocking.

    Args:
      argv: `argv[0]` is absolute.
      env: the whole environment.
      what: how messages call it.
      bytes_max: most bytes of `stream`; the other stream is read and only its end kept.
    Raises: Refusal with `code` when it cannot be run, prints too much or takes longer than `limit_s`.
    """
    try:
        process = subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise Refusal(code, f"{argv[0]} cannot be run: {error.strerror}") from None
    try:
        text, beside = _read(process, what, limit_s, bytes_max, stream, code)
    finally:
        # The group, not the process: whatever it started goes with it. The leader is not reaped yet, so its
        # number cannot have become somebody else's.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing was left in it
        status = process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    return Said(
        status=status,
        text=text.decode("utf-8", "replace"),
        beside=beside.decode("utf-8", "replace"),
        stream=stream,
    )


def _read(
    process: subprocess.Popen[bytes], what: str, limit_s: float, bytes_max: int, stream: str, code: str
) -> tuple[bytes, bytes]:
    judged, other = (process.stdout, process.stderr) if stream == "stdout" else (process.stderr, process.stdout)
    assert judged is not None
    assert other is not None
    said, beside, ends = b"", b"", time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for pipe in (judged, other):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(min(_LOOK_S, max(0.0, ends - time.monotonic())))
            if not ready and _ended(process):
                break  # a child that it left behind holds the streams; the program has said what it says
            if time.monotonic() > ends:
                raise Refusal(code, f"{what} did not answer within {limit_s:.0f} s")
            for key, _ in ready:
                piece = os.read(key.fd, 65_536)
                if not piece:
                    selector.unregister(key.fileobj)
                elif key.fileobj is judged:
                    said += piece
                else:
                    beside = (beside + piece)[-TAIL_BYTES:]
            if len(said) > bytes_max:
                raise Refusal(code, f"{what} printed more than {bytes_max} bytes")
    # The streams have ended; a program that closed them and lives on gets what is left of the time.
    while not _ended(process):
        if time.monotonic() > ends:
            raise Refusal(code, f"{what} did not end within {limit_s:.0f} s")
        time.sleep(0.005)
    return said, beside


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the leader ended; it stays unreaped, so that its number stays its own."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def printable(text: str) -> str:
    """One bounded line without control characters."""
    return "".join(char if char.isprintable() else " " for char in text)[:200]
