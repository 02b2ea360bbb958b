"""`logs`: the end of what an engine wrote, as the role keeps it. Source: cli 11, api 5.1; engines 17."""

from __future__ import annotations

import json
import sys
from typing import Annotated

from cyclopts import Parameter

from capyctl.cli.lifecycle import management
from capyctl.cli.output import PLAIN, Common, emit_json
from capyctl.errors import CapyError, Refusal

KIB_MOST = 256
INSTANCES_MOST = 1023


def logs(
    name: str,
    /,
    *,
    instance: Annotated[str, Parameter(help="Index of the instance.", show_default=True)] = "0",
    kib: Annotated[str, Parameter(help="How much of its end, 1 to 256 KiB.", show_default=True)] = "64",
    common: Common = PLAIN,
) -> None:
    """Print the end of an engine's log, of its present or last launch."""
    index = _number("--instance", instance, 0, INSTANCES_MOST)
    size = _number("--kib", kib, 1, KIB_MOST)
    api = management(common)
    view = api.deployment(name)
    try:
        log = api.get(f"/deployments/{view['id']}/engine-log", instance=str(index), kib=str(size))
    except CapyError as refusal:
        if refusal.code != "not_found":
            raise
        raise Refusal("not_found", _why(view["name"], index, len(view.get("instances", ())))) from None
    if common.as_json:
        emit_json(log)
    else:
        sys.stdout.write(str(log.get("text") or ""))


def _number(option: str, text: str, least: int, most: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 6 or not least <= int(text) <= most:
        raise Refusal("invalid_config", f"{option} {text}: expected a number from {least} to {most}")
    return int(text)


def _why(name: str, index: int, instances: int) -> str:
    """Why there is no log: no such instance, or one that was never started, or whose log was pruned."""
    if index >= instances:
        return f"{name} has no instance {index}; it has {instances}, counted from 0"
    return f"instance {index} of {json.dumps(name)} has no engine log: it has not been started, or its log was deleted"
