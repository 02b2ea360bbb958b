"""Waiting for an operation: polls, says what is waited for, and shows the time on a terminal.

Waiting is a client's own business: leaving cancels nothing, and the same request identity finds the
operation again. Source: cli 14.1, api 5.6.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import attrs

from capyctl.cli.client import Management, made
from capyctl.cli.output import note
from capyctl.errors import CapyError, Failure, Lost, Refusal

POLL_FIRST_S: Final = 0.25
POLL_MOST_S: Final = 2.0
DIGEST_LIMIT_S: Final = 900
UNCERTAIN_LIMIT_S: Final = 30  # how long "nobody knows" is waited out before it is the answer
TERMINAL: Final = ("succeeded", "failed", "cancelled")
QUIET_S: Final = 1.0  # what passes by itself within it is not worth a line
CAPACITY: Final = ("insufficient_resources", "insufficient_memory", "startup_requires_empty_host")
MAKE_ROOM: Final = "Use --evict to let it stop or park idle models, or send it a request: that makes room by itself."


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
class Told:
    """Says on stderr what a start waits for: each reason once, and once how room is made."""

    management: Management
    evict: bool
    reason: str = ""
    hinted: bool = False

    def look(self, operation: dict[str, Any]) -> None:
        """Say what an open operation waits for now, if it is something else than before."""
        reason = operation.get("reason") or self._waiting(operation)
        if reason and reason != self.reason:
            self.reason = str(reason)
            note(f"Waiting: {' '.join(self.reason.split())}")
        if operation.get("waiting_code") in CAPACITY and not self.evict and not self.hinted:
            self.hinted = True
            note(MAKE_ROOM)

    def _waiting(self, operation: dict[str, Any]) -> Any:
        """What the deployment waits for, when its operation does not say."""
        try:
            return self.management.get(f"/deployments/{operation.get('deployment_id')}").get("waiting")
        except Refusal:  # it was deleted; the next look at the operation tells
            return None


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
                told.look(operation)
            reason = operation.get("reason")
            change(f"{text} ({operation.get('action')} {operation.get('state')}{f': {reason}' if reason else ''})")
            time.sleep(min(pause, limit_s - waited))
    raise AssertionError("pauses never end")


def until_accepted(send: Callable[[], dict[str, Any]], name: str, view: dict[str, Any]) -> dict[str, Any]:
    """`send` until the role takes it, when it is refused only because a stop or a measurement is going on.

    Says on stderr what is waited for, with its bound. Raises: the refusal itself once the bound has passed.
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
    for pause in pauses():
        try:
            return send()
        except CapyError as refusal:
            if refusal.code not in waits:
                raise
            text, limit_s = waits[refusal.code]
            if refusal.code not in began:
                began[refusal.code] = time.monotonic()
                note(f"{text} (at most {limit_s}s)")
            if time.monotonic() - began[refusal.code] >= limit_s:
                raise
            time.sleep(pause)
    raise AssertionError("pauses never end")


def check_succeeded(operation: dict[str, Any], name: str) -> None:
    """Raise what a failed operation says of itself."""
    if operation.get("state") == "succeeded":
        return
    if operation.get("state") == "uncertain":
        reason = operation.get("reason") or "what happened to its engine is not known yet"
        raise Lost("unreconciled", f"{name}: {reason}; `capyctl status deployment {name}` follows it")
    code = str(operation.get("error_code") or "operation_failed")
    action = operation.get("action") or "operation"
    how = "was overtaken by a later command" if operation.get("state") == "cancelled" else "failed"
    reason = str(operation.get("reason") or f"the {action} {how}")
    raise made(code, reason if reason.startswith(f"{name} ") else f"{name}: {reason}", 503)
