"""The management API: operators' commands as events of the world, and its views as JSON.

A mutation carries one Idempotency-Key. Its receipt is replayed for as long as the world keeps it, before
anything else is looked at, since deadlines pass and policy changes. A caller that leaves does not take its
command back: waiting is a client's own business.
Source: api 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import trio
from quart import Response
from quart_trio import QuartTrio

from capyctl import ulid
from capyctl.clock import of_the_wall
from capyctl.control import events, orders
from capyctl.errors import Failure, Refusal
from capyctl.fsm.types import DeploymentId, HostId, Millis, OperationId
from capyctl.router.keys import Key, Keys
from capyctl.server.api import (
    BODY_BYTES_MAX,
    BODY_S,
    Door,
    View,
    answer,
    body_of,
    command_of,
    flag,
    handle_errors,
    identity_of,
    number,
    positive,
    query,
    slot,
)
from capyctl.server.driver import CommandEvent
from capyctl.server.services import Services

BASE: Final = "/management/v1"
ANSWER_S: Final = 15.0


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

    handle_errors(app)
    _reads(app, services, door)
    _commands(app, services, door)
    _keys(app, services, door)
    return app


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
    if receipt.members:
        body["members"] = [
            {
                "deployment_id": one.deployment,
                "operation_id": one.operation,
                "revision": str(one.revision),
                "joined": one.joined,
            }
            for one in receipt.members
        ]
    if receipt.checkpoint_pending:
        body["checkpoint_pending"] = True
    return body


# --- reading ---------------------------------------------------------------------------------------


def _reads(app: QuartTrio, services: Services, door: Door) -> None:
    def get(path: str, view: View, *, big: bool = False) -> None:
        wrapped = slot(door.reads, view) if big else view
        app.add_url_rule(f"{BASE}{path}", view.__name__, wrapped, methods=["GET"], provide_automatic_options=False)

    async def snapshot() -> Response:
        query()
        return answer({**services.snapshot(), "cursor": services.cursor})

    async def list_deployments() -> Response:
        asked = query("limit", "after")
        limit = number(asked.get("limit", "100"), "limit", 1, 100)
        after = asked.get("after", "")
        if after and not ulid.is_ulid(after):
            raise Refusal("invalid_request", "after: expected the `next` of the page before")
        rows = [row for row in services.deployments() if row["id"] > after]
        body: dict[str, Any] = {"deployments": rows[:limit], "cursor": services.cursor}
        if len(rows) > limit:
            body["next"] = rows[limit - 1]["id"]
        return answer(body)

    async def one_deployment(identity: str) -> Response:
        query()
        return answer({**services.deployment(DeploymentId(identity_of(identity))), "cursor": services.cursor})

    async def effective_config(identity: str) -> Response:
        query()
        return answer(services.effective_config(DeploymentId(identity_of(identity))))

    async def engine_log(identity: str) -> Response:
        asked = query("instance", "kib")
        instance = number(asked.get("instance", "0"), "instance", 0, 1023)
        kib = number(asked.get("kib", "64"), "kib", 1, 256)
        return answer(await services.engine_log(DeploymentId(identity_of(identity)), instance, kib))

    async def one_operation(identity: str) -> Response:
        query()
        return answer(services.operation(OperationId(identity_of(identity))))

    async def list_hosts() -> Response:
        query()
        return answer(services.hosts())

    async def one_host(identity: str) -> Response:
        query()
        identity_of(identity)
        for host in services.hosts()["hosts"]:
            if host["id"] == identity:
                return answer(host)
        raise Refusal("not_found", "there is no such host")

    async def list_engines() -> Response:
        query()
        return answer({"engines": services.engines()})

    async def model_sources() -> Response:
        asked = query("host", "deployment")
        rows = await services.model_sources()
        host, deployment = asked.get("host"), asked.get("deployment")
        rows = [row for row in rows if host in (None, row["host_id"])]
        return answer({"sources": [row for row in rows if deployment is None or deployment in row["deployments"]]})

    async def load() -> Response:
        asked = query("deployment")
        return answer(services.load(asked.get("deployment")))

    async def latency() -> Response:
        asked = query("deployment")
        return answer(services.latency(asked.get("deployment")))

    async def memory_usage() -> Response:
        asked = query("host", "deployment")
        deployment = asked.get("deployment")
        host = asked.get("host")
        return answer(
            services.usage(
                None if host is None else HostId(identity_of(host)),
                None if deployment is None else DeploymentId(identity_of(deployment)),
            )
        )

    async def installation() -> Response:
        query()
        return answer(services.installation())

    async def inference_listener() -> Response:
        query()
        return answer(services.inference_listener())

    async def role_config() -> Response:
        query()
        return answer({"settings": services.settings_rows()})

    async def prometheus() -> Response:
        return Response(services.prometheus(), 200, content_type="text/plain; version=0.0.4; charset=utf-8")

    get("/snapshot", snapshot, big=True)
    get("/deployments", list_deployments)
    get("/deployments/<identity>", one_deployment)
    get("/deployments/<identity>/effective-config", effective_config)
    get("/deployments/<identity>/engine-log", engine_log)
    get("/operations/<identity>", one_operation)
    get("/hosts", list_hosts)
    get("/hosts/<identity>", one_host)
    get("/engines", list_engines)
    get("/model-sources", model_sources)
    get("/metrics/load", load)
    get("/metrics/latency", latency)
    get("/usage", memory_usage)
    get("/installation", installation)
    get("/inference-listener", inference_listener)
    get("/config/effective", role_config)
    app.add_url_rule("/metrics", "prometheus", prometheus, methods=["GET"], provide_automatic_options=False)


# --- changing --------------------------------------------------------------------------------------

MEMBERS_MAX: Final = 256
NOT_BUILT: Final = ("suspend", "resume")


def _commands(app: QuartTrio, services: Services, door: Door) -> None:
    def rule(path: str, view: View, method: str) -> None:
        app.add_url_rule(
            f"{BASE}{path}",
            view.__name__,
            slot(door.mutations, view),
            methods=[method],
            provide_automatic_options=False,
        )

    async def submit(event: CommandEvent) -> Response:
        """Answer with the receipt, durable by now. A caller that leaves does not take its command back."""
        with trio.CancelScope(deadline=trio.current_time() + ANSWER_S, shield=True):
            return answer(receipt_body(await services.submit(event)), 202)
        raise Failure("deadline_exceeded", "it was not answered in time; ask again with the same Idempotency-Key")

    async def create_deployment() -> Response:
        query()
        body = await body_of(("config",), ("activate", "evict"))
        command = command_of("/deployments", body)
        if (known := services.recall(command)) is not None:
            return answer(receipt_body(known), 202)
        return await submit(
            events.DeployAsked(
                command=command,
                deployment=DeploymentId(ulid.fresh()),
                spec=await services.accept(_config(body)),
                activate=flag(body, "activate"),
                evict=flag(body, "evict"),
                now_ms=services.clock(),
            )
        )

    async def revise_deployment(identity: str) -> Response:
        query()
        body = await body_of(("expected_revision", "config"))
        command = command_of(f"/deployments/{identity_of(identity)}", body)
        if (known := services.recall(command)) is not None:
            return answer(receipt_body(known), 202)
        return await submit(
            events.DeployAsked(
                command=command,
                deployment=DeploymentId(identity),
                spec=await services.accept(_config(body)),
                expected_revision=positive(body, "expected_revision"),
                now_ms=services.clock(),
            )
        )

    async def act_on_deployment(identity: str) -> Response:
        query()
        body = await body_of(("expected_revision", "action", "deadline_ms"), ("evict", "initialize_timeout_ms", "stop"))
        command = command_of(f"/deployments/{identity_of(identity)}/actions", body)
        if (known := services.recall(command)) is not None:
            return answer(receipt_body(known), 202)
        return await submit(_action(DeploymentId(identity), command, body, services.clock()))

    async def preinitialize() -> Response:
        query()
        body = await body_of(("members", "deadline_ms"))
        command = command_of("/preinitializations", body)
        if (known := services.recall(command)) is not None:
            return answer(receipt_body(known), 202)
        return await submit(
            events.PreinitializeAsked(
                command=command,
                members=_members(body["members"]),
                deadline_ms=_ahead(body, services.clock()),
                now_ms=services.clock(),
            )
        )

    async def drain_standalone() -> Response:
        query()
        body = await body_of((), ("deadline_ms",))
        positive(body, "deadline_ms")
        command = command_of("/drain", body)
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
        query()
        body = await body_of((), () if undrain else ("deadline_ms", "wait"))
        word = "undrain" if undrain else "drain"
        command = command_of(f"/hosts/{identity_of(identity)}/{word}", body)
        return await submit(
            events.DrainAsked(command=command, host=HostId(identity), undrain=undrain, now_ms=services.clock())
        )

    async def prune_sources() -> Response:
        query()
        await body_of(())
        return answer({"removed": await services.model_sources(prune=True)})

    rule("/model-sources/prune", prune_sources, "POST")
    rule("/deployments", create_deployment, "POST")
    rule("/deployments/<identity>", revise_deployment, "PUT")
    rule("/deployments/<identity>/actions", act_on_deployment, "POST")
    rule("/preinitializations", preinitialize, "POST")
    rule("/drain", drain_standalone, "POST")
    rule("/hosts/<identity>/drain", drain_host, "POST")
    rule("/hosts/<identity>/undrain", undrain_host, "POST")


def _config(body: Mapping[str, Any]) -> Mapping[str, Any]:
    config = body["config"]
    if type(config) is not dict:
        raise Refusal("invalid_config", "config: expected a deployment document as an object")
    return config


def _ahead(body: Mapping[str, Any], now_ms: Millis) -> Millis | None:
    """The deadline of a body, which its sender read off the wall. Raises: Failure when it has passed."""
    given = positive(body, "deadline_ms")
    if given is None:
        return None
    deadline = of_the_wall(Millis(given))
    if deadline <= now_ms:
        raise Failure("deadline_exceeded", "deadline_ms: has passed")
    return deadline


def _members(given: object) -> tuple[events.Member, ...]:
    """The deployments of a preinitialization. Raises: Refusal naming the member and what is wrong with it."""
    if type(given) is not list or not 0 < len(given) <= MEMBERS_MAX:
        raise Refusal("invalid_request", f"members: expected a list of 1 to {MEMBERS_MAX} deployments")
    members = []
    for place, one in enumerate(given):
        where = f"members[{place}]"
        if type(one) is not dict or not set(one) <= {"deployment_id", "expected_revision", "final_state"}:
            raise Refusal("invalid_request", f"{where}: expected deployment_id, expected_revision and final_state")
        if type(one.get("deployment_id")) is not str:
            raise Refusal("invalid_request", f"{where}.deployment_id: is required")
        if one.get("final_state", "parked") != "parked":
            raise Refusal("invalid_request", f"{where}.final_state: expected parked; the action start leaves it ready")
        members.append(
            events.Member(
                deployment=DeploymentId(identity_of(one["deployment_id"])),
                expected_revision=positive(one, "expected_revision"),
                operation=OperationId(ulid.fresh()),
            )
        )
    return tuple(members)


def _action(identity: DeploymentId, command: events.Command, body: Mapping[str, Any], now_ms: Millis) -> CommandEvent:
    """The event of one action. Raises: Refusal for fields that are not this action's, and a deadline in the past."""
    action = body["action"]
    extra = {"start": ("evict", "initialize_timeout_ms"), "delete": ("stop",)}
    for name in ("evict", "initialize_timeout_ms", "stop"):
        if name in body and name not in extra.get(str(action), ()):
            raise Refusal("invalid_request", f"{name}: is no field of this action")
    revision, deadline = positive(body, "expected_revision"), _ahead(body, now_ms)
    match action:
        case "start":
            limit = positive(body, "initialize_timeout_ms")
            return events.StartAsked(
                command=command,
                deployment=identity,
                expected_revision=revision,
                evict=flag(body, "evict"),
                deadline_ms=deadline,
                initialize_ms=None if limit is None else Millis(limit),
                now_ms=now_ms,
            )
        case "preinitialize":
            return events.StartAsked(
                command=command,
                deployment=identity,
                expected_revision=revision,
                deadline_ms=deadline,
                park=True,
                now_ms=now_ms,
            )
        case "stop":
            return events.StopAsked(command=command, deployment=identity, expected_revision=revision, now_ms=now_ms)
        case "park":
            return events.ParkAsked(command=command, deployment=identity, expected_revision=revision, now_ms=now_ms)
        case "delete":
            return events.DeleteAsked(command=command, deployment=identity, stop=flag(body, "stop"), now_ms=now_ms)
        case str() if action in NOT_BUILT:
            raise Refusal("unsupported_capability", f"action: {action} is not in this release")
        case _:
            raise Refusal("invalid_request", "action: expected start, stop, park, preinitialize or delete")


# --- inference keys --------------------------------------------------------------------------------


def _keys(app: QuartTrio, services: Services, door: Door) -> None:
    async def list_keys() -> Response:
        query()
        return answer({"keys": [_key_body(key) for key in services.keys.named()]})

    async def create_key() -> Response:
        query()
        body = await body_of(("name",), ("models",))
        command = command_of("/keys", body)
        name, models = body["name"], body.get("models")
        if type(name) is not str or not (models is None or _names(models)):
            raise Refusal("invalid_request", "expected a name, and models as a list of deployment names or null")
        with trio.CancelScope(shield=True):
            deployed = services.deployment_names()
            made, token = await services.keys.create(command, name, models, services.clock(), deployed=deployed)
        return answer({**_key_body(made), "key": token}, 201)

    async def delete_key(name: str) -> Response:
        query()
        command = command_of(f"/keys/{name}", {})
        with trio.CancelScope(shield=True):
            await services.keys.delete(command, name, services.clock())
        return answer({"name": name, "deleted": True})

    for path, view, method in (
        ("/keys", list_keys, "GET"),
        ("/keys", create_key, "POST"),
        ("/keys/<name>", delete_key, "DELETE"),
    ):
        limited: View = view if method == "GET" else slot(door.mutations, view)
        app.add_url_rule(f"{BASE}{path}", view.__name__, limited, methods=[method], provide_automatic_options=False)


def _names(models: object) -> bool:
    return type(models) is list and len(models) <= 256 and all(type(name) is str and name for name in models)


def _key_body(key: Any) -> dict[str, Any]:  # Any: a Key or KeyReceipt, whose digests stay here
    return {
        "name": key.name,
        "models": None if key.models is None else list(key.models),
        "created_at_ms": str(key.created_at_ms),
    }
