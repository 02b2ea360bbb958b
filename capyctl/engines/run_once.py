"""Running an installation's program once, to learn what it is: bounded, with an environment of its own.

An overseer runs it (see `overseer`), so that nothing it started stays, in whatever session.
Source: engines 2.3 step 4, 2.5; security 16.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import attrs

from capyctl.errors import Refusal

OVERSEER: Final = Path(__file__).with_name("overseer.py")
TAIL_BYTES = 4096
_LOOK_S = 0.5
_END_S = 10.0


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
    ours, line = socket.socketpair()
    try:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(OVERSEER), str(line.fileno()), *argv],
                env=dict(env),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=(line.fileno(),),
            )
        except OSError as error:
            raise Refusal(code, f"{argv[0]} cannot be run: {error.strerror}") from None
        finally:
            line.close()
        run = _Run(process=process, line=ours)
        try:
            text, beside = _read(run, what, limit_s, bytes_max, stream, code)
        finally:
            run.end()
        if run.errno:
            raise Refusal(code, f"{argv[0]} cannot be run: {os.strerror(run.errno)}")
    finally:
        ours.close()
    return Said(
        status=run.status,
        text=text.decode("utf-8", "replace"),
        beside=beside.decode("utf-8", "replace"),
        stream=stream,
    )


@attrs.define(eq=False)
class _Run:
    """One program and its overseer. `status` as of `Popen`, and that of SIGKILL for an overseer that was killed."""

    process: subprocess.Popen[bytes]
    line: socket.socket
    status: int = -signal.SIGKILL
    errno: int = 0
    _over: bool = False

    def ended(self) -> bool:
        """Whether the program ended; what it left behind may live on."""
        if not self._over and select.select([self.line], [], [], 0)[0]:
            self._over = True
            word, _, number = self.line.recv(64).decode().partition(" ")
            self.status = int(number) if word == "exit" else self.status
            self.errno = int(number) if word == "errno" else 0
        return self._over

    def end(self) -> None:
        """End everything that the program started, and the overseer."""
        self.line.shutdown(socket.SHUT_RDWR)
        ends = time.monotonic() + _END_S
        while time.monotonic() < ends and not self._overseer_ended():
            time.sleep(0.002)  # waitpid knows no time limit
        # One that was killed left them in its group. It is not reaped yet, so its number is nobody else's.
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing was left in it
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def _overseer_ended(self) -> bool:
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _read(run: _Run, what: str, limit_s: float, bytes_max: int, stream: str, code: str) -> tuple[bytes, bytes]:
    process = run.process
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
            if not ready and run.ended():
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
    while not run.ended():
        if time.monotonic() > ends:
            raise Refusal(code, f"{what} did not end within {limit_s:.0f} s")
        time.sleep(0.005)
    return said, beside


def printable(text: str) -> str:
    """One bounded line without control characters."""
    return "".join(char if char.isprintable() else " " for char in text)[:200]
