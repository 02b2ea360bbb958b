"""Waiting for an operation: polls, says what is waited for, and shows the time on a terminal.

Waiting is a client's own business: leaving cancels nothing, and the same request identity finds the
operation again. Source: cli 14.1, api 5.6.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import attrs

from capyctl.cli.client import Management, made
from capyctl.cli.output import first_line, note
from capyctl.errors import CapyError, Failure, Lost, Refusal

POLL_FIRST_S: Final = 0.25
POLL_MOST_S: Final = 2.0
DIGEST_LIMIT_S: Final = 900
DOWNLOAD_LIMIT_S: Final = 1800
DOWNLOAD_POLL_S: Final = 0.5
LINE_S: Final = 30.0  # between two lines of progress where there is no terminal, at most
LINES_AFTER_S: Final = 1.0  # before the first of them: what is done by then needs none
BAR: Final = 16
UNCERTAIN_LIMIT_S: Final = 30  # how long "nobody knows" is waited out before it is the answer
TERMINAL: Final = ("succeeded", "failed", "cancelled")
QUIET_S: Final = 1.0  # what passes by itself within it is not worth a line
DIGEST_QUIET_S: Final = 3.0  # beside a start, which takes longer by itself


def pauses() -> Iterator[float]:
    """Seconds between two looks: 250 ms, rising to 2 s."""
    pause = POLL_FIRST_S
    while True:
        yield pause
        pause = min(POLL_MOST_S, pause * 1.25)


@contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """A line with a spinner on a terminal's stderr, quiet elsewhere. Yields a function that changes its text."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console  # 100 ms; only a terminal needs it

    console = Console(stderr=True, no_color=True, highlight=False)
    began = time.monotonic()
    with console.status(text) as status:

        def change(now: str) -> None:
            status.update(f"{now} · {time.monotonic() - began:.0f}s")

        yield change


@attrs.define
class Lines:
    """How far something long is, where there is no terminal: a line at its beginning, at each tenth of it, after
    30 s without one, and at its end.

    `doing` and `done` are its name while it goes on and when it is over: `Measuring chat`, `Measured chat`.
    """

    doing: str
    done: str
    began: float | None = None
    said_at: float | None = None
    tenth: int = -1
    total: int = 0

    def look(self, text: str, done_bytes: int, total_bytes: int | None, now: float) -> None:
        """Say `text` if it is time to; `now` is a monotonic time, `total_bytes` None while nobody knows it."""
        self.began = now if self.began is None else self.began
        if sys.stderr.isatty() or now - self.began < LINES_AFTER_S:
            return
        tenth = -1 if total_bytes is None else 10 * done_bytes // total_bytes if total_bytes else 10
        if self.said_at is None or tenth > self.tenth or now - self.said_at >= LINE_S:
            note(f"{self.doing}: {text}")
            self.said_at, self.tenth = now, tenth
        self.total = total_bytes or self.total

    def end(self) -> None:
        """Say that it is over, where its progress was said."""
        if self.said_at is not None and self.total:
            note(f"{self.done}: {amount(self.total)}")
        self.said_at = None


@attrs.define
class Told:
    """Says on stderr what a start waits for: each reason once. A reason says what would help, where the role knows."""

    management: Management
    reason: str = ""
    download_ends: float = 0.0
    digest_ends: float = 0.0
    digest_said: bool = False
    measures: bool = False  # the files are being measured now
    measured: str = ""  # the line of a terminal while they are, once it is known how much it is
    lines: Lines | None = None  # elsewhere, once it was said that they are measured

    def look(self, operation: dict[str, Any], change: Callable[[str], None]) -> None:
        """Say what an open operation waits for now, if it is something else than before; a download is watched.

        Raises: Failure `activation_timeout` as `watch_download`, or when the files are measured for too long.
        """
        reason = operation.get("reason")
        self.measures, self.measured = False, ""
        if not reason:
            view = self._deployment(operation)
            if _is_downloaded(view):
                self.download_ends = self.download_ends or say_download(str(view["name"]))
                view = watch_download(self.management, view, change, self.download_ends)
            self._look_at_digest(view)
            reason = None if self.measures else view.get("waiting")
        if reason:
            self.measured_well()
        if reason and reason != self.reason:
            self.reason = str(reason)
            note(f"Waiting: {first_line(self.reason)}")

    def measured_well(self) -> None:
        """Say the end of a measurement whose progress was said: what is waited for comes after it, or nothing does."""
        if self.lines is not None:
            self.lines.end()

    def _look_at_digest(self, view: Mapping[str, Any]) -> None:
        """Say that the files are measured, with the bound. Raises: Failure `activation_timeout` beyond it."""
        name, checkpoint = str(view.get("name")), view.get("checkpoint") or {}
        self.measures = checkpoint.get("state") == "measuring"
        self.measured = _measured_line(name, checkpoint) if self.measures else ""
        if not self.measures:
            _end_of_measurement(self.lines, checkpoint)
            return
        now = time.monotonic()
        self.digest_ends = self.digest_ends or now + DIGEST_LIMIT_S
        if not self.digest_said and self.digest_ends - now <= DIGEST_LIMIT_S - DIGEST_QUIET_S:
            self.digest_said = True
            note(f"Waiting for the checkpoint digest of {name} to be measured (at most {DIGEST_LIMIT_S}s)")
            self.lines = Lines(f"Measuring {name}", f"Measured {name}")
        if self.lines is not None:
            _look_at_measurement(self.lines, checkpoint, now)
        if now >= self.digest_ends:
            raise Failure(
                "activation_timeout",
                f"{name} is still {being_measured(checkpoint)}; that goes on, "
                f"and `capyctl start deployment {name} --wait` waits for it again",
            )

    def _deployment(self, operation: dict[str, Any]) -> dict[str, Any]:
        """The deployment, which says what its operation does not; empty once it was deleted."""
        try:
            return self.management.get(f"/deployments/{operation.get('deployment_id')}")
        except Refusal:  # it was deleted; the next look at the operation tells
            return {}


@contextmanager
def leaving(text: str) -> Iterator[None]:
    """Whoever interrupts a wait is told what becomes of what was waited for."""
    try:
        yield
    except KeyboardInterrupt:
        note(text)
        raise


def goes_on(management: Management, what: str, ends: str = "") -> str:
    """`Not waited for any longer: the start of chat goes on; …`; `ends`: a command that ends it."""
    end = f"`{ends}` ends it; " if ends else ""
    return (
        f"Not waited for any longer: {what} goes on; {end}the same command with --request-id {management.request_id} "
        "waits for it again."
    )


def wait_for(
    management: Management,
    operation_id: str,
    text: str,
    limit_s: float,
    late: str = "deadline_exceeded",
    told: Told | None = None,
) -> dict[str, Any]:
    """The operation once it has ended, well or not, or has stayed uncertain for a while.

    Raises: Failure with the code `late` when `limit_s` seconds pass first.
    """
    began = time.monotonic()
    known = began
    with spinner(text) as change:
        for pause in pauses():
            operation = management.get(f"/operations/{operation_id}")
            if operation.get("state") in TERMINAL:
                if told is not None and operation["state"] == "succeeded":
                    told.measured_well()
                return operation
            now = time.monotonic()
            waited = now - began
            if operation.get("state") != "uncertain":
                known = now
            elif now - known >= UNCERTAIN_LIMIT_S:
                return operation
            if waited >= limit_s:
                raise Failure(
                    late,
                    f"operation {operation_id} has not ended within {limit_s:.0f}s; it goes on, "
                    f"wait again with --request-id {management.request_id}",
                )
            if told is not None and waited >= QUIET_S:
                told.look(operation, change)
            reason = f": {first_line(operation['reason'])}" if operation.get("reason") else ""
            doing = f"{text} ({operation.get('action')} {operation.get('state')}{reason})"
            change((told.measured if told is not None else "") or doing)
            time.sleep(min(pause, limit_s - waited))
    raise AssertionError("pauses never end")


def amount(count: int) -> str:
    """Bytes that arrive: `93.8 MiB`, `4.2 GiB`."""
    return f"{count / (1 << 20):.1f} MiB" if count < 1 << 30 else f"{count / (1 << 30):.1f} GiB"


def downloaded(download: Mapping[str, Any]) -> str:
    """`1.2 GiB of 4.5 GiB (27 %)`, or what goes on before anybody knows how much it is."""
    done, total = int(download.get("done_bytes") or 0), download.get("total_bytes")
    phase = download.get("phase")
    if total is None:
        return "waiting for its turn" if phase == "waiting" else "asking what it consists of"
    share = 100 * done // int(total) if int(total) else 100
    return f"{amount(done)} of {amount(int(total))} ({share} %){', verifying' if phase == 'verifying' else ''}"


def being_measured(checkpoint: Mapping[str, Any]) -> str:
    """`being measured: 1.2 GiB of 4.5 GiB (27 %)`; without the figures while nobody has said how much it is."""
    read = checkpoint.get("measured") or {}
    return f"being measured: {downloaded(read)}" if read.get("total_bytes") else "being measured"


def watch_measurement(
    management: Management, identity: str, name: str, change: Callable[[str], None], ends: float
) -> None:
    """Return once the deployment's files are not being measured any more, or at `ends`, a monotonic time.

    Says how far it is: in the spinner's line on a terminal, in lines of its own elsewhere.
    """
    lines = Lines(f"Measuring {name}", f"Measured {name}")
    for pause in pauses():
        now = time.monotonic()
        checkpoint = management.deployment(identity).get("checkpoint") or {}
        if checkpoint.get("state") not in ("pending", "measuring") or now >= ends:
            _end_of_measurement(lines, checkpoint)
            return
        if line := _measured_line(name, checkpoint):
            change(line)
        _look_at_measurement(lines, checkpoint, now)
        time.sleep(min(pause, max(0.0, ends - now)))  # the management API is asked, it does not push


def _look_at_measurement(lines: Lines, checkpoint: Mapping[str, Any], now: float) -> None:
    read = checkpoint.get("measured") or {}
    if read.get("total_bytes"):
        lines.look(downloaded(read), int(read["done_bytes"]), int(read["total_bytes"]), now)


def _end_of_measurement(lines: Lines | None, checkpoint: Mapping[str, Any]) -> None:
    """Say that the files are measured, unless that came to nothing, which whoever waits says."""
    if lines is not None and checkpoint.get("state") == "measured":
        lines.end()


def _measured_line(name: str, checkpoint: Mapping[str, Any]) -> str:
    """`Measuring chat ━━━╌╌╌ 1.2 GiB of 4.5 GiB (27 %)`; empty while nobody says how far it is."""
    read = checkpoint.get("measured") or {}
    if not read.get("total_bytes"):
        return ""
    return f"Measuring {name} {_bar(int(read['done_bytes']), int(read['total_bytes']))} {downloaded(read)}"


def _bar(done: int, total: int) -> str:
    filled = min(BAR, BAR * done // max(1, total))
    return f"{'━' * filled}{'╌' * (BAR - filled)}"


def watch_download(
    management: Management, view: Mapping[str, Any], change: Callable[[str], None], ends: float
) -> dict[str, Any]:
    """The deployment's view once nothing is downloaded for it any more.

    Says what is waited for, and how far it is: in the spinner's line on a terminal, in lines of its own elsewhere.

    Args:
      ends: the monotonic time of the bound.
    Raises: Failure `activation_timeout` once the bound has passed; what is downloaded goes on.
    """
    name = str(view["name"])
    lines = Lines(f"Downloading {name}", f"Downloaded {name}")
    first: tuple[float, int] | None = None
    while True:
        now = time.monotonic()
        seen = management.deployment(str(view["id"]))
        download = (seen.get("checkpoint") or {}).get("download")
        if not _is_downloaded(seen) or not download:
            if not (seen.get("checkpoint") or {}).get("code"):
                lines.end()
            return seen
        text = downloaded(download)
        if now >= ends:
            raise Failure(
                "activation_timeout",
                f"{name} is still being downloaded ({text}); that goes on, "
                f"and `capyctl start deployment {name} --wait` waits for it again",
            )
        done, total = int(download.get("done_bytes") or 0), download.get("total_bytes")
        if total:
            first = first or (now, done)
            rate = (done - first[1]) / (now - first[0]) if now - first[0] >= 1 else 0.0
            text += f", {amount(int(rate))}/s" if rate >= 1 else ""
            change(f"Downloading {name} {_bar(done, int(total))} {text}")
        lines.look(text, done, None if total is None else int(total), now)
        time.sleep(DOWNLOAD_POLL_S)  # as above


def say_download(name: str) -> float:
    """Say that a download is waited for, with its bound; when that ends."""
    text = f"Waiting for the model source of {name} to be downloaded and verified"
    note(f"{text} (at most {DOWNLOAD_LIMIT_S}s)")
    return time.monotonic() + DOWNLOAD_LIMIT_S


def _is_downloaded(view: Mapping[str, Any]) -> bool:
    return (view.get("checkpoint") or {}).get("state") == "materializing"


def until_accepted(
    send: Callable[[], dict[str, Any]], name: str, view: dict[str, Any], management: Management
) -> dict[str, Any]:
    """`send` until the role takes it, when it is refused only because a stop, a download or a measurement goes on.

    Says on stderr what is waited for, with its bound. Raises: the refusal itself once the bound has passed; what a
    download failed with.
    """
    stop_limit_s = -(-int(view.get("initialize_ms") or 130_000) // 1000) + 30
    waits = {
        "still_stopping": (f"Waiting for the stop of {name} to finish", stop_limit_s),
        "delete_requires_cleanup": (f"Waiting for the stop of {name} to finish", stop_limit_s),
        "checkpoint_digest_pending": (
            f"Waiting for the checkpoint digest of {name} to be measured",
            DIGEST_LIMIT_S,
        ),
    }
    began: dict[str, float] = {}
    download_ends = 0.0
    for pause in pauses():
        try:
            return send()
        except CapyError as refusal:
            if refusal.code not in waits:
                raise
            if refusal.code == "checkpoint_digest_pending":
                seen = management.deployment(str(view["id"]))
                if _is_downloaded(seen):
                    download_ends = download_ends or say_download(name)
                    with spinner(f"Downloading {name}") as change:
                        checkpoint = watch_download(management, seen, change, download_ends)["checkpoint"]
                    if checkpoint.get("code") and checkpoint.get("state") != "measuring":
                        raise made(str(checkpoint["code"]), naming(name, str(checkpoint["reason"])), 409) from None
                    continue
            text, limit_s = waits[refusal.code]
            if refusal.code not in began:
                began[refusal.code] = time.monotonic()
                note(f"{text} (at most {limit_s}s)")
            if time.monotonic() - began[refusal.code] >= limit_s:
                raise
            if refusal.code == "checkpoint_digest_pending":
                with spinner(f"Measuring {name}") as change:
                    watch_measurement(management, str(view["id"]), name, change, began[refusal.code] + limit_s)
            time.sleep(pause)
    raise AssertionError("pauses never end")


def check_succeeded(operation: dict[str, Any], name: str) -> None:
    """Raise what a failed operation says of itself."""
    if operation.get("state") == "succeeded":
        return
    if operation.get("state") == "uncertain":
        reason = str(operation.get("reason") or "what happened to its engine is not known yet")
        raise Lost("unreconciled", f"{name}: {first_line(reason)}; `capyctl status deployment {name}` follows it")
    code = str(operation.get("error_code") or "operation_failed")
    action = operation.get("action") or "operation"
    how = "was overtaken by a later command" if operation.get("state") == "cancelled" else "failed"
    said = str(operation.get("reason") or f"the {action} {how}")
    reason = first_line(said)
    if "\n" in said:  # the engine's last lines, which are no part of a message
        reason += f"; `capyctl status deployment {name}` has its last lines"
    raise made(code, naming(name, reason), 503)


def naming(name: str, reason: str) -> str:
    """A reason that says once which deployment it is about."""
    return reason if reason.startswith((f"{name} ", f"{name}:", f"{name}/")) else f"{name}: {reason}"
