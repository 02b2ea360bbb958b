"""`start | stop | park | preinitialize | delete deployment`, and what they share: one action, maybe waited for.

Source: cli 10, 14; api 5.3.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Annotated, Any, Final

from cyclopts import Parameter

from capyctl import ulid
from capyctl.cli import progress, target
from capyctl.cli.client import Management
from capyctl.cli.output import PLAIN, Common, emit_json, first_line, memory, note, summary
from capyctl.errors import Refusal
from capyctl.units import Duration, parse_duration

START_LIMIT_MS: Final = 3_600_000
STOP_LIMIT_MS: Final = 900_000
RequestId = Annotated[str | None, Parameter(help="Identity of an earlier command, to recover it.")]
Wait = Annotated[bool, Parameter(negative=(), help="Return when it is done, or gave up.")]


def management(common: Common, request_id: str | None = None) -> Management:
    """The management API of the role that this command is for."""
    if request_id is not None and not ulid.is_ulid(request_id):
        raise Refusal("invalid_config", f"--request-id {request_id}: expected a ULID, 26 upper-case letters and digits")
    return Management(target.find(common.config, common.state_dir, os.environ, os.getcwd()), request_id)


def announce(api: Management) -> None:
    """The line with which a lost command can be recovered."""
    note(f"Request identity: {api.request_id} (reuse --request-id {api.request_id} to recover this command)")


def stated_duration(text: str | None, option: str) -> Duration | None:
    """A duration option. Raises: Refusal naming the option."""
    if text is None:
        return None
    try:
        return parse_duration(text)
    except ValueError as wrong:
        raise Refusal("invalid_config", f"{option} {text}: {wrong}") from None


def act(api: Management, view: dict[str, Any], action: str, limit_ms: int, **more: Any) -> dict[str, Any]:
    """Send one action on a deployment; its receipt.

    The deadline counts from the instant inside the request identity, so that the same identity sends
    the same body and recovers the original receipt.
    """
    body = {
        "expected_revision": int(view["revision"]),
        "action": action,
        "deadline_ms": ulid.instant_ms(api.request_id) + limit_ms,
        **{name: value for name, value in more.items() if value is not None},
    }
    return api.change("POST", f"/deployments/{view['id']}/actions", body)


def ended(operation: dict[str, Any]) -> str:
    """`initialize succeeded`, `initialize failed (launch_failed)`, `stop pending`."""
    code = operation.get("error_code")
    state = operation.get("state")
    if state not in progress.TERMINAL:
        return f"{operation.get('action')} pending"
    return f"{operation.get('action')} {state}{f' ({code})' if code else ''}"


def looked_at(api: Management, name: str, receipt: dict[str, Any], common: Common) -> dict[str, Any]:
    """The receipt of a start, for people with the operation as it is now: who gives way, or what it waits for.

    Raises: what the operation failed with, where it has failed already.
    """
    if common.as_json:
        return receipt
    operation = api.get(f"/operations/{receipt['operation_id']}")
    if operation.get("state") in progress.TERMINAL:
        progress.check_succeeded(operation, name)
    return {**receipt, "operation": operation}


def receipt_lines(receipt: dict[str, Any]) -> dict[str, str]:
    """The key lines of an accepted action; victims are listed when it makes room, else what it waits for.

    Args:
      receipt: with the operation as it is now in `operation`, where it is known.
    """
    pairs = {"Operation": str(receipt.get("operation_id"))}
    if receipt.get("switch_id"):
        pairs["Switch"] = str(receipt["switch_id"])
        pairs["Makes room"] = victim_lines(receipt.get("operation") or {}) or ",".join(receipt.get("victims") or ("-",))
    elif (operation := receipt.get("operation") or {}) and operation.get("reason"):
        pairs["Waits"] = first_line(operation["reason"])
    return pairs


def started(api: Management, view: dict[str, Any], *, evict: bool, timeout: Duration | None) -> dict[str, Any]:
    """Start a deployment and wait; its view once every instance is ready, and the operation inside it.

    Raises: what the operation failed with.
    """
    name = str(view["name"])

    def send() -> dict[str, Any]:
        return _start(api, view, evict=evict, timeout=timeout)

    with progress.leaving(f"{name} is not started: its start was not accepted yet."):
        receipt = progress.until_accepted(send, name, view, api)
    text = f"Starting {name}"
    with progress.leaving(progress.goes_on(api, f"the start of {name}", f"capyctl stop deployment {name}")):
        operation = progress.wait_for(
            api,
            str(receipt["operation_id"]),
            text,
            START_LIMIT_MS / 1000,
            late="activation_timeout",
            told=progress.Told(api),
        )
    progress.check_succeeded(operation, name)
    return {**api.deployment(str(view["id"])), "operation": operation}


def victim_lines(operation: Mapping[str, Any]) -> str:
    """Who gave way, or is about to: `notes/0 released: stopped (no room to park)`, a line each."""
    return "\n".join(
        f"{row.get('name')} {row.get('released') or 'to ' + str(row.get('way'))}"
        for row in operation.get("victims") or ()
    )


def _start(api: Management, view: dict[str, Any], *, evict: bool, timeout: Duration | None) -> dict[str, Any]:
    bound = None if timeout is None else timeout.ms
    return act(api, view, "start", START_LIMIT_MS, evict=evict or None, initialize_timeout_ms=bound)


def ready_lines(view: dict[str, Any]) -> dict[str, str]:
    """The key lines of a deployment that was started."""
    hosts = ",".join(str(host.get("name") or host.get("id")) for host in view.get("hosts", ()))
    lines = {"Ready": str(view.get("ready")), "Hosts": hosts or "-"}
    if victims := victim_lines(view["operation"]):
        lines["Made room"] = victims
    return {**lines, "Operation": ended(view["operation"])}


def start(
    name: str,
    /,
    *,
    wait: Wait = False,
    evict: Annotated[bool, Parameter(negative=(), help="Park or stop idle models so that it fits.")] = False,
    initialize_timeout: Annotated[str | None, Parameter(help="Bound of this start alone, such as 300s.")] = None,
    request_id: RequestId = None,
    common: Common = PLAIN,
) -> None:
    """Start a deployment."""
    timeout = stated_duration(initialize_timeout, "--initialize-timeout")
    api = management(common, request_id)
    view = api.deployment(name)
    announce(api)
    if not wait:
        receipt = _start(api, view, evict=evict, timeout=timeout)
        _accepted(f"Start requested for {view['name']}", looked_at(api, str(view["name"]), receipt, common), common)
        return
    view = started(api, view, evict=evict, timeout=timeout)
    if common.as_json:
        emit_json(view)
    else:
        summary(f"Started {view['name']}: ready", ready_lines(view))


def _accepted(sentence: str, receipt: dict[str, Any], common: Common) -> None:
    if common.as_json:
        emit_json(receipt)
    else:
        summary(sentence, receipt_lines(receipt))


def _simple(
    action: str,
    done: str,
    name: str,
    wait: bool,
    request_id: str | None,
    common: Common,
    limit_ms: int = STOP_LIMIT_MS,
) -> None:
    api = management(common, request_id)
    view = api.deployment(name)
    announce(api)
    receipt = act(api, view, action, limit_ms)
    if not wait:
        _accepted(f"{action.capitalize()} requested for {view['name']}", receipt, common)
        return
    text = f"Waiting for the {action} of {view['name']} to finish"
    note(f"{text} (at most {limit_ms // 1000}s)")
    ends = f"capyctl stop deployment {view['name']}" if action == "preinitialize" else ""
    with progress.leaving(progress.goes_on(api, f"the {action} of {view['name']}", ends)):
        operation = progress.wait_for(api, str(receipt["operation_id"]), text, limit_ms / 1000)
    progress.check_succeeded(operation, str(view["name"]))
    view = {**api.deployment(str(view["id"])), "operation": operation}
    if common.as_json:
        emit_json(view)
        return
    instead = stopped_instead(view) if action == "park" else []
    if instead:
        summary(
            f"{view['name']} was stopped instead of parked", {"Why": "\n".join(instead), "Operation": ended(operation)}
        )
    else:
        summary(f"{done} {view['name']}", {"Operation": ended(operation)})


def stopped_instead(view: Mapping[str, Any]) -> list[str]:
    """Instances that a park ended, and why: a park that cannot give the memory back becomes a stop."""
    rows = view["operation"].get("instances") or ()
    return [f"instance {row.get('index')}: {first_line(row['reason'])}" for row in rows if row.get("reason")]


def stop(name: str, /, *, wait: Wait = False, request_id: RequestId = None, common: Common = PLAIN) -> None:
    """Stop a deployment; requests are refused until it is started."""
    _simple("stop", "Stopped", name, wait, request_id, common)


def park(name: str, /, *, wait: Wait = False, request_id: RequestId = None, common: Common = PLAIN) -> None:
    """Park a deployment: its memory is released, the next request wakes it."""
    _simple("park", "Parked", name, wait, request_id, common)


def preinitialize(*names: str, wait: Wait = False, request_id: RequestId = None, common: Common = PLAIN) -> None:
    """Start, prove and park each instance in turn, so that its first request finds it ready to wake."""
    if not names:
        raise Refusal("invalid_config", "no deployment is named; `capyctl list deployments` shows them")
    if len(names) == 1:
        _simple("preinitialize", "Preinitialized", names[0], wait, request_id, common, START_LIMIT_MS)
        return
    api = management(common, request_id)
    views = [api.deployment(name) for name in names]
    announce(api)
    body = {
        "members": [
            {"deployment_id": view["id"], "expected_revision": int(view["revision"]), "final_state": "parked"}
            for view in views
        ],
        "deadline_ms": ulid.instant_ms(api.request_id) + START_LIMIT_MS,
    }
    receipt = api.change("POST", "/preinitializations", body)
    opened = {str(view["name"]): str(one["operation_id"]) for view, one in zip(views, receipt["members"], strict=True)}
    if wait:
        _prepared(api, opened, common)
    elif common.as_json:
        emit_json(receipt)
    else:
        summary(f"Preinitialize requested for {', '.join(opened)}", opened)


def _prepared(api: Management, opened: Mapping[str, str], common: Common) -> None:
    """Wait for each in its turn and report all of them. Raises: what the first one that failed says."""
    text = f"Waiting for the preinitialize of {', '.join(opened)} to finish"
    note(f"{text} (at most {START_LIMIT_MS // 1000}s)")
    began = time.monotonic()
    done: dict[str, dict[str, Any]] = {}
    for name, operation in opened.items():
        left_s = max(1.0, START_LIMIT_MS / 1000 - (time.monotonic() - began))
        with progress.leaving(progress.goes_on(api, f"the preinitialize of {', '.join(opened)}")):
            done[name] = progress.wait_for(api, operation, text, left_s)
    good = [name for name, operation in done.items() if operation.get("state") == "succeeded"]
    if common.as_json:
        emit_json({"members": [{"name": name, "operation": operation} for name, operation in done.items()]})
    else:
        said = ", ".join(good) if len(good) == len(done) else f"{len(good)} of {len(done)}"
        summary(f"Preinitialized {said}", {name: _how(operation) for name, operation in done.items()})
    for name, ending in done.items():
        progress.check_succeeded(ending, name)


def _how(operation: Mapping[str, Any]) -> str:
    """`preinitialize succeeded`, or how it ended and why."""
    good = operation.get("state") == "succeeded" or not operation.get("reason")
    return ended(dict(operation)) + ("" if good else f": {first_line(operation['reason'])}")


def delete(
    name: str,
    /,
    *,
    stop: Annotated[bool, Parameter(negative=(), help="Stop it first and wait for proven cleanup.")] = False,
    wait: Annotated[bool, Parameter(negative=(), help="As with other commands; a delete always waits.")] = False,
    request_id: RequestId = None,
    common: Common = PLAIN,
) -> None:
    """Delete a deployment. Model files are never touched."""
    api = management(common, request_id)
    view = api.deployment(name)
    announce(api)
    receipt = act(api, view, "delete", STOP_LIMIT_MS, stop=True if stop else None)
    text = f"Waiting for the stop of {view['name']} to finish"
    if stop and view.get("observed_state") != "stopped":
        note(f"{text} (at most {STOP_LIMIT_MS // 1000}s)")
    with progress.leaving(progress.goes_on(api, f"the delete of {view['name']}")):
        operation = progress.wait_for(api, str(receipt["operation_id"]), text, STOP_LIMIT_MS / 1000)
    if operation.get("state") != "succeeded" and stop and not common.as_json:
        pairs = {"Cleanup": "pending", "Operation": str(receipt["operation_id"])}
        summary(f"{view['name']} is not deleted", pairs)
    progress.check_succeeded(operation, str(view["name"]))
    if common.as_json:
        emit_json({"deleted": view["name"], "deployment_id": view["id"], "operation": operation})
    else:
        summary(f"Deleted {view['name']}", {"Operation": str(receipt["operation_id"])})


def startup_cell(view: dict[str, Any]) -> str:
    """Memory set aside for a first start."""
    startup = view.get("startup") or {}
    domains = startup.get("bytes") or {}
    return memory(domains)
