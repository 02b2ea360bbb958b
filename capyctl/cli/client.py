"""The management API as a client command uses it: one connection, plain http.client, no event loop.

Refusals of the server come back as the error they are, with its exit status; a code this release
does not know keeps its name and takes the exit of its HTTP class. Source: api 5.1, 5.3; cli 15.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode

from capyctl import ulid
from capyctl.cli.target import Target
from capyctl.errors import CODES, CapyError, Failure, Lost, Refusal

BASE: Final = "/management/v1"
ANSWER_LIMIT_S: Final = 20  # the role answers within 15
BUSY_LIMIT_S: Final = 10
_ANSWER_MAX: Final = 64 << 20
_ALIASES: Final = {
    "unauthenticated": "unauthorized",
    "forbidden": "unauthorized",
    "capacity_blocked": "insufficient_resources",
    "reconciliation_required": "unreconciled",
}


class Unknown(CapyError):
    """A code from a newer role. Its exit follows from the HTTP status."""

    conclusion = "the role refused, for a reason this release does not know"

    def __init__(self, code: str, message: str, status: int, details: Mapping[str, Any]) -> None:
        super().__init__("internal", message, details=details)
        self.code = code
        self.http_status = status
        self.retryable = status in (429, 503)
        self.exit_code = 3 if status in (401, 403) else 4 if self.retryable else 2 if 400 <= status < 500 else 13


class Management:
    """A role's management API. `request_id` is the idempotency key of what this command changes."""

    def __init__(self, target: Target, request_id: str | None = None) -> None:
        self.target = target
        self.request_id = request_id or ulid.fresh()
        self._connection: http.client.HTTPConnection | None = None

    # ------------------------------------------------------------ reading

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """The JSON object at `path`. Raises: CapyError as the role refused it, unavailable when nobody answers."""
        suffix = f"?{urlencode(query)}" if query else ""
        return self._ask("GET", f"{path}{suffix}", None)

    def deployments(self) -> Iterator[dict[str, Any]]:
        """Every deployment view, page by page, in the role's order."""
        after: dict[str, str] = {}
        while True:
            page = self.get("/deployments", limit="100", **after)
            yield from page.get("deployments", ())
            following = page.get("next")
            if not following:
                return
            after = {"after": str(following)}

    def deployment(self, name: str) -> dict[str, Any]:
        """The view of the deployment with this name or ULID. Raises: Refusal not_found."""
        if ulid.is_ulid(name):
            return self.get(f"/deployments/{quote(name, safe='')}")
        for view in self.deployments():
            if view.get("name") == name:
                return view
        raise Refusal("not_found", f"there is no deployment {json.dumps(name)}; `capyctl list deployments` shows them")

    # ------------------------------------------------------------ changing

    def change(self, method: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send one mutation under this command's request identity; the same one again is recovered, not repeated.

        The role works on few commands at a time; one that finds no place is sent again for some seconds.
        """
        began = time.monotonic()
        while True:
            try:
                return self._ask(method, path, body)
            except CapyError as refusal:
                if refusal.code != "queue_full" or time.monotonic() - began > BUSY_LIMIT_S:
                    raise
            time.sleep(0.25)

    # ------------------------------------------------------------ one exchange

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        for attempt in (1, 2):
            reused = self._connection is not None
            try:
                return self._exchange(method, path, body)
            except (http.client.HTTPException, OSError) as wrong:
                self.close()
                # A kept connection may have been closed while idle. Asking again is safe either way:
                # reads change nothing, and a change carries its identity.
                if reused and attempt == 1 and not isinstance(wrong, TimeoutError):
                    continue
                raise self._no_answer(wrong, changing=body is not None) from None
        raise AssertionError("the second attempt answers or raises")

    def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.target.token}", "Accept": "application/json"}
        payload = None
        if body is not None:
            payload = json.dumps(body, ensure_ascii=False).encode()
            headers |= {"Content-Type": "application/json", "Idempotency-Key": self.request_id}
        if self._connection is None:
            host, _, port = self.target.address.rpartition(":")
            if not port.isdigit():
                raise Refusal("invalid_config", f"the management address {self.target.address} is not ip:port")
            self._connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=ANSWER_LIMIT_S)
            self._connection.connect()
            self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.request(method, f"{BASE}{path}", payload, headers)
        answer = self._connection.getresponse()
        raw = answer.read(_ANSWER_MAX)
        if answer.will_close:
            self.close()
        return self._read(answer.status, raw)

    def _read(self, status: int, raw: bytes) -> dict[str, Any]:
        try:
            value = json.loads(raw) if raw else {}
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise Failure("internal", f"{self.target.address} answered {status} with something that is not JSON")
        if 200 <= status < 300:
            return value
        raise refused(status, value)

    def _no_answer(self, wrong: Exception, *, changing: bool) -> CapyError:
        if isinstance(wrong, TimeoutError):
            again = f"; it may have been accepted, ask again with --request-id {self.request_id}" if changing else ""
            return Lost("unavailable", f"the {self.target.role} role at {self.target.address} did not answer{again}")
        return self._nobody()

    def _nobody(self) -> Failure:
        """No listener: it stops, it starts, or it does not run."""
        from pathlib import Path

        from capyctl.server import lock

        role, start, address = self.target.role, self.target.start, self.target.address
        found = lock.holder(Path(self.target.places.role_lock))
        if found is None:
            return Failure("unavailable", f"no {role} role answers at {address}; start it with `{start}`")
        if found.stops_in_s is None:
            where = f"does not answer at {address}; ask again once it has started"
            return Failure("unavailable", f"the {role} role (pid {found.pid}) runs and {where}")
        return Failure(
            "unavailable",
            f"the {role} role (pid {found.pid}) is stopping, for at most {found.stops_in_s} s more; "
            f"after that, start it with `{start}`",
        )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def refused(status: int, body: Mapping[str, Any]) -> CapyError:
    """The error in a management answer, `{"error": {code, message, retryable, details}}`."""
    inner = body.get("error")
    error: Mapping[str, Any] = inner if isinstance(inner, Mapping) else body
    code = str(error.get("code") or "internal")
    message = str(error.get("message") or f"the role answered {status}")
    details = error.get("details")
    retryable = error.get("retryable")
    return made(
        code,
        message,
        status,
        details if isinstance(details, Mapping) else {},
        retryable if isinstance(retryable, bool) else None,
    )


def made(
    code: str, message: str, status: int, details: Mapping[str, Any] | None = None, retryable: bool | None = None
) -> CapyError:
    """An error as the role named it; `status` decides the exit of a code this release does not know."""
    head, colon, rest = code.partition(":")
    known = _ALIASES.get(head, head)
    if known not in CODES:
        return Unknown(code, message, status, details or {})
    return Refusal(known + colon + rest, message, details=details, retryable=retryable)
