"""The management API: operators' commands as events of the world, and its views as JSON.

A listener of its own on loopback, with a token of its own. Every check has its place in one order:
Host and Origin (a page in a browser must not reach it), the token in constant time, path and method, query,
body, then the command. A mutation carries one Idempotency-Key; its receipt is replayed for as long as
the world keeps it, before anything else is looked at, since policy may have changed in the meantime.
Source: api 1, 5; security 17.2.
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
from capyctl.control import events, orders
from capyctl.errors import CapyError, Failure, Refusal
from capyctl.fsm.types import DeploymentId, HostId, Millis, OperationId, SwitchId
from capyctl.router.body import NotStrict, parse_object
from capyctl.router.keys import Key, Keys
from capyctl.server.driver import CommandEvent
from capyctl.server.log import Log
from capyctl.server.services import Services
from capyctl.session.codec import canonical

log = Log("management")

BASE: Final = "/management/v1"
API_VERSION: Final = "1"
BODY_BYTES_MAX: Final = 1 << 20
BODY_S: Final = 5
ANSWER_S: Final = 15.0
MUTATIONS_MAX: Final = 2
READS_MAX: Final = 2
"""Readers of the big views at a time; they hold the trio thread while they build them."""
INT_MAX: Final = 2**63 - 1

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
            raise Problem(401, "unauthenticated", "exactly one `Authorization: Bearer <admin token>` is needed")


def build_management(services: Services) -> QuartTrio:
    """The management API over a role's services, as an ASGI application."""
    app = QuartTrio("capyctl-management", static_folder=None)
    app.config.update(MAX_CONTENT_LENGTH=BODY_BYTES_MAX, BODY_TIMEOUT=BODY_S, RESPONSE_TIMEOUT=None)
    door = Door(Keys((Key.of("admin", services.admin_token),)))

    @app.before_request
    async def enter() -> None:
        door.check()

    @app.after_request
    async def leave(response: Response) -> Response:
        response.headers["Cache-Control"] = "no-store"
        response.headers.pop("Server", None)
        return response

    _handle_errors(app)
    _reads(app, services, door)
    _commands(app, services, door)
    _keys(app, services, door)
    return app


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


def receipt_body(receipt: orders.Receipt) -> dict[str, Any]:
    """A receipt as JSON; integers are decimal strings."""
    body: dict[str, Any] = {
        "operation_id": receipt.operation,
        "deployment_id": receipt.deployment,
        "joined": receipt.joined,
        "revision": None if receipt.revision is None else str(receipt.revision),
    }
    if receipt.switch is not None:
        body["switch_id"] = receipt.switch
        body["victims"] = list(receipt.victims)
    if receipt.checkpoint_pending:
        body["checkpoint_pending"] = True
    return body


def _handle_errors(app: QuartTrio) -> None:
    @app.errorhandler(Problem)
    async def own(wrong: Problem) -> Response:
        return problem(wrong.status, wrong.code, wrong.message)

    @app.errorhandler(CapyError)
    async def ours(wrong: CapyError) -> Response:
        return problem(
            wrong.http_status, wrong.code, wrong.message, retryable=wrong.retryable, details=_plain(wrong.details)
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


def _plain(details: Mapping[str, Any]) -> dict[str, Any]:
    """Details as JSON; integers as decimal strings, as everywhere in this API."""
    return {name: str(value) if type(value) is int else value for name, value in details.items()}


# --- requests --------------------------------------------------------------------------------------


def _query(*allowed: str) -> dict[str, str]:
    """The query's values. Raises: Refusal for a name that the route does not take, or takes once only."""
    found: dict[str, str] = {}
    for name, value in request.args.items(multi=True):
        if name not in allowed or name in found:
            raise Refusal("invalid_request", f"the query holds {name[:64]!r}, which this path does not take")
        found[name] = value
    return found


def _number(text: str, name: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19 or not low <= int(text) <= high:
        raise Refusal("invalid_request", f"{name}: expected a whole number from {low} to {high}")
    return int(text)


def _identity(text: str) -> str:
    if not ulid.is_ulid(text):
        raise Refusal("invalid_request", "an id is a ULID: 26 digits and upper-case letters")
    return text


async def _body(required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """The body's object, strictly read. Raises: Refusal for what it lacks or holds besides."""
    raw = await request.get_data(cache=False, as_text=False)
    assert isinstance(raw, bytes)  # as_text is False
    try:
        values = parse_object(raw or b"{}").values
    except NotStrict as wrong:
        raise Refusal("invalid_request", f"the body: {wrong}") from None
    for name in values:
        if name not in required and name not in optional:
            raise Refusal("invalid_request", f"the body holds {name[:64]!r}, which is no field here")
    for name in required:
        if name not in values:
            raise Refusal("invalid_request", f"{name}: is required")
    return values


def _positive(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    if name not in values:
        return None
    if type(value) is not int or not 0 < value <= INT_MAX:
        raise Refusal("invalid_request", f"{name}: expected a positive whole number")
    return value


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name, False)
    if type(value) is not bool:
        raise Refusal("invalid_request", f"{name}: expected true or false")
    return value


def _command(target: str, body: Mapping[str, Any]) -> events.Command:
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


def _slot(limiter: trio.CapacityLimiter, view: View) -> View:
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


# --- reading ---------------------------------------------------------------------------------------


def _reads(app: QuartTrio, services: Services, door: Door) -> None:
    def get(path: str, view: View, *, slot: bool = False) -> None:
        wrapped = _slot(door.reads, view) if slot else view
        app.add_url_rule(f"{BASE}{path}", view.__name__, wrapped, methods=["GET"], provide_automatic_options=False)

    async def snapshot() -> Response:
        _query()
        return answer({**services.snapshot(), "cursor": services.cursor})

    async def list_deployments() -> Response:
        asked = _query("limit", "after")
        limit = _number(asked.get("limit", "100"), "limit", 1, 100)
        after = asked.get("after", "")
        if after and not ulid.is_ulid(after):
            raise Refusal("invalid_request", "after: expected the `next` of the page before")
        rows = [row for row in services.deployments() if row["id"] > after]
        body: dict[str, Any] = {"deployments": rows[:limit], "cursor": services.cursor}
        if len(rows) > limit:
            body["next"] = rows[limit - 1]["id"]
        return answer(body)

    async def one_deployment(identity: str) -> Response:
        _query()
        return answer({**services.deployment(DeploymentId(_identity(identity))), "cursor": services.cursor})

    async def effective_config(identity: str) -> Response:
        _query()
        return answer(services.effective_config(DeploymentId(_identity(identity))))

    async def engine_log(identity: str) -> Response:
        asked = _query("instance", "kib")
        instance = _number(asked.get("instance", "0"), "instance", 0, 1023)
        kib = _number(asked.get("kib", "64"), "kib", 1, 256)
        return answer(await services.engine_log(DeploymentId(_identity(identity)), instance, kib))

    async def one_operation(identity: str) -> Response:
        _query()
        return answer(services.operation(OperationId(_identity(identity))))

    async def list_hosts() -> Response:
        _query()
        return answer(services.hosts())

    async def one_host(identity: str) -> Response:
        _query()
        _identity(identity)
        for host in services.hosts()["hosts"]:
            if host["id"] == identity:
                return answer(host)
        raise Refusal("not_found", "there is no such host")

    async def list_engines() -> Response:
        _query()
        return answer({"engines": services.engines()})

    async def load() -> Response:
        asked = _query("deployment")
        return answer(services.load(asked.get("deployment")))

    async def installation() -> Response:
        _query()
        return answer(services.installation())

    async def inference_listener() -> Response:
        _query()
        return answer(services.inference_listener())

    async def role_config() -> Response:
        _query()
        return answer({"settings": services.settings_rows()})

    async def prometheus() -> Response:
        return Response(services.prometheus(), 200, content_type="text/plain; version=0.0.4; charset=utf-8")

    get("/snapshot", snapshot, slot=True)
    get("/deployments", list_deployments)
    get("/deployments/<identity>", one_deployment)
    get("/deployments/<identity>/effective-config", effective_config)
    get("/deployments/<identity>/engine-log", engine_log)
    get("/operations/<identity>", one_operation)
    get("/hosts", list_hosts)
    get("/hosts/<identity>", one_host)
    get("/engines", list_engines)
    get("/metrics/load", load)
    get("/installation", installation)
    get("/inference-listener", inference_listener)
    get("/config/effective", role_config)
    app.add_url_rule("/metrics", "prometheus", prometheus, methods=["GET"], provide_automatic_options=False)


# --- changing --------------------------------------------------------------------------------------

NOT_BUILT: Final = ("preinitialize", "suspend", "resume")


def _commands(app: QuartTrio, services: Services, door: Door) -> None:
    def rule(path: str, view: View, method: str) -> None:
        app.add_url_rule(
            f"{BASE}{path}",
            view.__name__,
            _slot(door.mutations, view),
            methods=[method],
            provide_automatic_options=False,
        )

    async def submit(event: CommandEvent) -> Response:
        """Answer with the receipt, durable by now. A caller that leaves does not take its command back."""
        with trio.CancelScope(deadline=trio.current_time() + ANSWER_S, shield=True):
            return answer(receipt_body(await services.submit(event)), 202)
        raise Failure("deadline_exceeded", "it was not answered in time; ask again with the same Idempotency-Key")

    async def create_deployment() -> Response:
        _query()
        body = await _body(("config",), ("activate", "evict"))
        command = _command("/deployments", body)
        if (known := services.recall(command)) is not None:
            return answer(receipt_body(known), 202)
        return await submit(
            events.DeployAsked(
                command=command,
                deployment=DeploymentId(ulid.fresh()),
                spec=services.accept(_config(body)),
                activate=_flag(body, "activate"),
                evict=_flag(body, "evict"),
                now_ms=services.clock(),
            )
        )

    async def revise_deployment(identity: str) -> Response:
        _query()
        body = await _body(("expected_revision", "config"))
        command = _command(f"/deployments/{_identity(identity)}", body)
        if (known := services.recall(command)) is not None:
            return answer(receipt_body(known), 202)
        return await submit(
            events.DeployAsked(
                command=command,
                deployment=DeploymentId(identity),
                spec=services.accept(_config(body)),
                expected_revision=_positive(body, "expected_revision"),
                now_ms=services.clock(),
            )
        )

    async def act_on_deployment(identity: str) -> Response:
        _query()
        body = await _body(("expected_revision", "action", "deadline_ms"), ("evict", "initialize_timeout_ms", "stop"))
        command = _command(f"/deployments/{_identity(identity)}/actions", body)
        if (known := services.recall(command)) is not None:
            return answer(receipt_body(known), 202)
        return await submit(_action(DeploymentId(identity), command, body, services.clock()))

    async def drain_standalone() -> Response:
        _query()
        body = await _body((), ("deadline_ms",))
        _positive(body, "deadline_ms")
        command = _command("/drain", body)
        known = services.recall(command)
        if known is None:
            with trio.CancelScope(deadline=trio.current_time() + ANSWER_S, shield=True):
                known = await services.drain_all(command)
        if known is None:
            raise Failure("deadline_exceeded", "it was not answered in time; ask again with the same Idempotency-Key")
        return answer({**receipt_body(known), "host_id": services.host, "operations": []}, 202)

    async def drain_host(identity: str) -> Response:
        return await host_drain(identity, undrain=False)

    async def undrain_host(identity: str) -> Response:
        return await host_drain(identity, undrain=True)

    async def host_drain(identity: str, *, undrain: bool) -> Response:
        _query()
        body = await _body((), () if undrain else ("deadline_ms", "wait"))
        word = "undrain" if undrain else "drain"
        command = _command(f"/hosts/{_identity(identity)}/{word}", body)
        return await submit(
            events.DrainAsked(command=command, host=HostId(identity), undrain=undrain, now_ms=services.clock())
        )

    rule("/deployments", create_deployment, "POST")
    rule("/deployments/<identity>", revise_deployment, "PUT")
    rule("/deployments/<identity>/actions", act_on_deployment, "POST")
    rule("/drain", drain_standalone, "POST")
    rule("/hosts/<identity>/drain", drain_host, "POST")
    rule("/hosts/<identity>/undrain", undrain_host, "POST")


def _config(body: Mapping[str, Any]) -> Mapping[str, Any]:
    config = body["config"]
    if type(config) is not dict:
        raise Refusal("invalid_config", "config: expected a deployment document as an object")
    return config


def _action(identity: DeploymentId, command: events.Command, body: Mapping[str, Any], now_ms: Millis) -> CommandEvent:
    """The event of one action. Raises: Refusal for fields that are not this action's, and a deadline in the past."""
    action = body["action"]
    extra = {"start": ("evict", "initialize_timeout_ms"), "delete": ("stop",)}
    for name in ("evict", "initialize_timeout_ms", "stop"):
        if name in body and name not in extra.get(str(action), ()):
            raise Refusal("invalid_request", f"{name}: is no field of this action")
    revision, deadline = _positive(body, "expected_revision"), _positive(body, "deadline_ms")
    if deadline is not None and deadline <= now_ms:
        raise Failure("deadline_exceeded", "deadline_ms: has passed")
    match action:
        case "start":
            limit = _positive(body, "initialize_timeout_ms")
            return events.StartAsked(
                command=command,
                deployment=identity,
                expected_revision=revision,
                evict=_flag(body, "evict"),
                deadline_ms=None if deadline is None else Millis(deadline),
                initialize_ms=None if limit is None else Millis(limit),
                now_ms=now_ms,
            )
        case "stop":
            return events.StopAsked(command=command, deployment=identity, expected_revision=revision, now_ms=now_ms)
        case "park":
            return events.ParkAsked(command=command, deployment=identity, expected_revision=revision, now_ms=now_ms)
        case "delete":
            return events.DeleteAsked(command=command, deployment=identity, stop=_flag(body, "stop"), now_ms=now_ms)
        case str() if action in NOT_BUILT:
            raise Refusal("unsupported_capability", f"action: {action} is not in this release")
        case _:
            raise Refusal("invalid_request", "action: expected start, stop, park or delete")


# --- inference keys --------------------------------------------------------------------------------


def _keys(app: QuartTrio, services: Services, door: Door) -> None:
    async def list_keys() -> Response:
        _query()
        return answer({"keys": [_key_body(key) for key in services.keys.named()]})

    async def create_key() -> Response:
        _query()
        body = await _body(("name",), ("models",))
        _command("/keys", body)
        name, models = body["name"], body.get("models")
        if type(name) is not str or not (models is None or _names(models)):
            raise Refusal("invalid_request", "expected a name, and models as a list of deployment names or null")
        with trio.CancelScope(shield=True):
            key, token = await services.keys.create(name, models, services.clock())
        return answer({**_key_body(key), "key": token}, 201)

    async def delete_key(name: str) -> Response:
        _query()
        _command(f"/keys/{name}", {})
        with trio.CancelScope(shield=True):
            await services.keys.delete(name)
        return answer({"name": name, "deleted": True})

    for path, view, method in (
        ("/keys", list_keys, "GET"),
        ("/keys", create_key, "POST"),
        ("/keys/<name>", delete_key, "DELETE"),
    ):
        limited: View = view if method == "GET" else _slot(door.mutations, view)
        app.add_url_rule(f"{BASE}{path}", view.__name__, limited, methods=[method], provide_automatic_options=False)


def _names(models: object) -> bool:
    return type(models) is list and len(models) <= 256 and all(type(name) is str and name for name in models)


def _key_body(key: Any) -> dict[str, Any]:  # Any: server.store.Key, whose digest stays here
    return {
        "name": key.name,
        "models": None if key.models is None else list(key.models),
        "created_at_ms": str(key.created_at_ms),
    }
