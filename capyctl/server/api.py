"""What every management call passes and every answer looks like: the door, strict bodies, errors, places.

The order of checks is the listener's (security 2): Host and Origin, since a page in a browser must not get
here; the token in constant time; path and method; query; body. A refusal always has the same shape.
Source: api 1, 5.1, 5.13; security 17.2.
"""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import attrs
import trio
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound, RequestEntityTooLarge, RequestTimeout

from capyctl import ulid
from capyctl.control import events
from capyctl.errors import CapyError, Refusal, shown_details
from capyctl.fsm.types import OperationId, SwitchId
from capyctl.router.body import strict_object
from capyctl.router.keys import Keys
from capyctl.router.scan import NotStrict
from capyctl.server.log import Log
from capyctl.session.codec import canonical

log = Log("management")

API_VERSION: Final = "1"
BODY_BYTES_MAX: Final = 1 << 20
BODY_S: Final = 5
MUTATIONS_MAX: Final = 2
READS_MAX: Final = 2
"""Readers of the big views at a time; they hold the trio thread while they build them."""
INT_MAX: Final = 2**63 - 1

_NO_TOKEN: Final = "the admin token is missing or wrong; exactly one `Authorization: Bearer <admin token>` is needed"
_HOST: Final = re.compile(r"(127\.0\.0\.1|\[::1\]|localhost)(:[0-9]{1,5})?", re.ASCII)
_IDEMPOTENCY: Final = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)

View = Callable[..., Awaitable[Response]]


class Problem(Exception):
    """A refusal whose code is this API's own (`unauthenticated`, `forbidden`)."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(code)
        self.status, self.code, self.message = status, code, message


@attrs.define(eq=False)
class Door:
    """What every request passes, and what limits how many are inside."""

    ring: Keys
    mutations: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(MUTATIONS_MAX))
    reads: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(READS_MAX))

    def check(self) -> None:
        """Refuse what a browser page may have sent, and whoever has no token. Raises: Problem."""
        hosts = request.headers.getlist("Host")
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0].lower()):
            raise Problem(403, "forbidden", "this address is for the machine itself; the Host header names another")
        if "Origin" in request.headers:
            raise Problem(403, "forbidden", "browsers are not served here")
        if "Content-Length" in request.headers and "Transfer-Encoding" in request.headers:
            raise Problem(400, "invalid_request", "both Content-Length and Transfer-Encoding are stated")
        tokens = [value.encode("latin-1", "replace") for value in request.headers.getlist("Authorization")]
        if self.ring.caller(tokens) is None:
            raise Problem(401, "unauthenticated", _NO_TOKEN)


# --- answers ---------------------------------------------------------------------------------------


def answer(body: Mapping[str, Any], status: int = 200) -> Response:
    """A JSON answer with the API's version."""
    return Response(canonical({"api_version": API_VERSION, **body}) + "\n", status, content_type="application/json")


def problem(status: int, code: str, message: str, *, retryable: bool = False, details: Any = None) -> Response:
    """An error in this API's form."""
    error = {
        "code": code,
        "message": message,
        "retryable": retryable,
        "operation_id": None,
        "details": details or {},
    }
    response = answer({"error": error}, status)
    if status == 429:
        response.headers["Retry-After"] = "1"
    return response


def handle_errors(app: QuartTrio) -> None:
    """Give every error of `app` this API's form; a fault of ours is logged under a correlation id."""

    @app.errorhandler(Problem)
    async def own(wrong: Problem) -> Response:
        return problem(wrong.status, wrong.code, wrong.message)

    @app.errorhandler(CapyError)
    async def ours(wrong: CapyError) -> Response:
        return problem(
            wrong.http_status,
            wrong.code,
            wrong.message,
            retryable=wrong.retryable,
            details=shown_details(wrong.details),
        )

    @app.errorhandler(HTTPException)
    async def http(wrong: HTTPException) -> Response:
        match wrong:
            case NotFound():
                return problem(404, "not_found", "there is no such path")
            case MethodNotAllowed():
                response = problem(405, "method_not_allowed", f"{request.method} is not served on this path")
                response.headers["Allow"] = ", ".join(sorted(set(wrong.valid_methods or ()) - {"HEAD", "OPTIONS"}))
                return response
            case RequestEntityTooLarge():
                return problem(413, "body_too_large", f"a body has at most {BODY_BYTES_MAX} bytes")
            case RequestTimeout():
                response = problem(408, "request_timeout", f"the body did not arrive within {BODY_S} s", retryable=True)
                response.headers["Connection"] = "close"
                return response
            case _:
                return problem(wrong.code or 400, "invalid_request", wrong.name)

    @app.errorhandler(Exception)
    async def broken(wrong: Exception) -> Response:
        correlation = secrets.token_hex(8)
        log.failed("management.broken", wrong, correlation=correlation, method=request.method, path=request.path)
        return problem(500, "internal", f"a fault of CapyCTL's own; its log names it under {correlation}")


# --- requests --------------------------------------------------------------------------------------


def query(*allowed: str) -> dict[str, str]:
    """The query's values. Raises: Refusal for a name that the route does not take, or takes once only."""
    found: dict[str, str] = {}
    for name, value in request.args.items(multi=True):
        if name not in allowed or name in found:
            raise Refusal("invalid_request", f"the query holds {name[:64]!r}, which this path does not take")
        found[name] = value
    return found


def number(text: str, name: str, low: int, high: int) -> int:
    """A number of the query. Raises: Refusal naming the range."""
    if not text.isascii() or not text.isdigit() or len(text) > 19 or not low <= int(text) <= high:
        raise Refusal("invalid_request", f"{name}: expected a whole number from {low} to {high}")
    return int(text)


def identity_of(text: str) -> str:
    """A ULID in its one written form. Raises: Refusal."""
    if not ulid.is_ulid(text):
        raise Refusal("invalid_request", "an id is a ULID: 26 digits and upper-case letters")
    return text


async def body_of(required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """The body's object, strictly read. Raises: Refusal for what it lacks or holds besides."""
    raw = await request.get_data(cache=False, as_text=False)
    assert isinstance(raw, bytes)  # as_text is False
    try:
        values = strict_object(raw or b"{}")
    except NotStrict as wrong:
        raise Refusal("invalid_request", f"the body: {wrong}") from None
    for name in values:
        if name not in required and name not in optional:
            raise Refusal("invalid_request", f"the body holds {name[:64]!r}, which is no field here")
    for name in required:
        if name not in values:
            raise Refusal("invalid_request", f"{name}: is required")
    return values


def positive(values: Mapping[str, Any], name: str) -> int | None:
    """A positive integer of the body, None when it is absent. Raises: Refusal; `true` and 1.0 are none."""
    value = values.get(name)
    if name not in values:
        return None
    if type(value) is not int or not 0 < value <= INT_MAX:
        raise Refusal("invalid_request", f"{name}: expected a positive whole number")
    return value


def flag(values: Mapping[str, Any], name: str) -> bool:
    """A truth value of the body, false when it is absent. Raises: Refusal."""
    value = values.get(name, False)
    if type(value) is not bool:
        raise Refusal("invalid_request", f"{name}: expected true or false")
    return value


def command_of(target: str, body: Mapping[str, Any]) -> events.Command:
    """The command's identity. Raises: Refusal unless there is exactly one usable Idempotency-Key."""
    keys = request.headers.getlist("Idempotency-Key")
    if len(keys) != 1 or not _IDEMPOTENCY.fullmatch(keys[0]):
        raise Refusal("invalid_request", "exactly one Idempotency-Key of 1 to 128 printable characters is needed")
    return events.Command(
        key=f"admin {request.method} {target} {keys[0]}",
        digest=hashlib.sha256(canonical(body).encode()).hexdigest(),
        operation=OperationId(ulid.fresh()),
        switch=SwitchId(ulid.fresh()),
    )


def slot(limiter: trio.CapacityLimiter, view: View) -> View:
    """Hold one of a few places while `view` works; without one the caller is told to come back."""

    @functools.wraps(view)
    async def limited(**path: str) -> Response:
        borrower = object()
        try:
            limiter.acquire_on_behalf_of_nowait(borrower)
        except trio.WouldBlock:
            raise Refusal("queue_full", "as many commands as may be are in work; send it again") from None
        try:
            return await view(**path)
        finally:
            limiter.release_on_behalf_of(borrower)

    return limited
