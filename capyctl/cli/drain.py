"""`drain standalone`: stop every engine and wait for proven cleanup; deployments stay.

Source: cli 8.5, api 5.2.
"""

from __future__ import annotations

import time
from typing import Any

from capyctl import ulid
from capyctl.cli import progress
from capyctl.cli.lifecycle import STOP_LIMIT_MS, RequestId, announce, management
from capyctl.cli.output import PLAIN, Common, emit_json, summary
from capyctl.errors import Failure


def standalone(*, request_id: RequestId = None, common: Common = PLAIN) -> None:
    """Stop every engine of this machine; deployments are kept and start again on request."""
    api = management(common, request_id)
    announce(api)
    running = sorted(str(view["name"]) for view in api.deployments() if _holds(view))
    receipt = api.change("POST", "/drain", {"deadline_ms": ulid.instant_ms(api.request_id) + STOP_LIMIT_MS})
    operations = _operations(receipt)
    failed: list[dict[str, Any]] = []
    for operation_id in operations:
        operation = progress.wait_for(api, operation_id, "Draining", STOP_LIMIT_MS / 1000)
        if operation.get("state") != "succeeded":
            failed.append(operation)
    began = time.monotonic()
    for pause in progress.pauses():
        held = [view for view in api.deployments() if _holds(view)]
        if not held or failed:
            break
        if time.monotonic() - began > STOP_LIMIT_MS / 1000:
            raise Failure(
                "unreconciled", f"{held[0]['name']} has not proven its stop; `capyctl status deployment` shows it"
            )
        time.sleep(pause)
    for operation in failed:
        progress.check_succeeded(operation, str(operation.get("deployment_id") or "a deployment"))
    if common.as_json:
        emit_json({**receipt, "stopped": running})
    else:
        pairs = {"Stopped": ",".join(running) or "nothing, no engine was running"}
        summary("Drained standalone", pairs | ({"Operations": ",".join(operations)} if operations else {}))


def _holds(view: dict[str, Any]) -> bool:
    """Whether engines of a deployment run, or may."""
    return bool(view.get("ledger")) or view.get("observed_state") == "stopping"


def _operations(receipt: dict[str, Any]) -> list[str]:
    found = receipt.get("operations")
    if isinstance(found, list):
        return [str(item["id"] if isinstance(item, dict) else item) for item in found]
    return [str(receipt["operation_id"])] if receipt.get("operation_id") else []
