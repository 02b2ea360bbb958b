"""`init server | host`: a document to edit, written from this machine, never over an existing file.

Source: cli 5, config 16.2.
"""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

from cyclopts import Parameter

from capyctl.cli.output import Basic, emit_json, note, summary
from capyctl.documents import kinds, places
from capyctl.documents.places import Places, Role
from capyctl.errors import Refusal
from capyctl.units import format_size

_BASIC = Basic()
Output = Annotated[str | None, Parameter(help="File to write.", allow_leading_hyphen=True)]
_MIB = 1 << 20


def server(*, output: Output = None, common: Basic = _BASIC) -> None:
    """Write a server document (for a later release)."""
    where = _where(common)
    document = {
        "schema_version": 1,
        "kind": "server",
        "name": "capyctl-server",
        "state_dir": where.root,
        "identity_dir": where.identity,
        "listeners": {
            "inference": {"bind": "0.0.0.0:8443", "authentication": "api_key"},
            "management": {"bind": "127.0.0.1:7443", "authentication": "token"},
            "bootstrap": {"bind": "127.0.0.1:7444", "authentication": "server_tls"},
            "control": {"bind": "127.0.0.1:7445", "authentication": "mutual_tls"},
        },
        "enrollment": {
            "bootstrap_address": "https://127.0.0.1:7444",
            "control_address": "https://127.0.0.1:7445",
        },
    }
    path = _write("server", output, where, document)
    if common.as_json:
        emit_json({"document": path, "state_dir": where.root})
    else:
        summary(f"Wrote {output or path}", {"State directory": where.root})
    _not_yet("server")


def host(*, output: Output = None, common: Basic = _BASIC) -> None:
    """Write a host document with limits that fit this machine (for a later release)."""
    where = _where(common)
    runtime = where.below("runtime")
    document = {
        "schema_version": 1,
        "kind": "host",
        "name": "capyctl-host",
        "state_dir": where.root,
        "identity_dir": where.identity,
        "model_store": {"path": os.path.join(places.home_of(os.environ), "models")},
        "resource_policy": _policy(),
    }
    path = _write("host", output, where, document)
    if common.as_json:
        emit_json({"document": path, "state_dir": where.root, "runtime_dir": runtime})
    else:
        summary(f"Wrote {output or path}", {"State directory": where.root, "Runtime directory": runtime})
    _not_yet("host")


def _not_yet(role: str) -> None:
    note(f"This release runs one machine: no {role} role of it starts with this document yet.")


def _where(common: Basic) -> Places:
    root = places.stated_state_root(common.state_dir, os.environ, os.getcwd())
    return Places(root or places.default_state_root(os.environ))


def _write(role: Role, output: str | None, where: Places, document: dict[str, Any]) -> str:
    """Check the document as a start would and write it. Raises: Refusal for an existing file or identity."""
    path = places.absolute(output, os.getcwd()) if output is not None else where.document(role)
    kinds.check(document, path)
    for other in places.roles_known(where):
        if other == "standalone" and path == where.document(role):  # beside it, no command knew whom to ask
            raise Refusal(
                "invalid_config",
                f"{where.root} is the state of a standalone role, and two roles share none; "
                f"name another with --state-dir, or a file with --output",
            )
        kept = os.listdir(where.identity) if os.path.isdir(where.identity) else []
        if other != "standalone" and set(kept) - {os.path.basename(where.credentials)}:  # those are standalone's
            raise Refusal("invalid_config", f"Role identity refused: {where.identity}: a {other} has one there already")
    if output is None:
        places.make_private(os.path.dirname(path))
    if path.endswith((".yaml", ".yml")):
        import yaml

        text = yaml.safe_dump(document, sort_keys=False, default_flow_style=False)
    else:
        text = json.dumps(document, indent=2) + "\n"
    try:
        places.write_new(path, text)
    except FileExistsError:
        raise Refusal("invalid_config", f"{path} exists; nothing is overwritten, name another --output") from None
    except OSError as wrong:
        raise Refusal("invalid_config", f"{path} cannot be written: {os.strerror(wrong.errno or 0)}") from None
    return path


def _policy() -> dict[str, Any]:
    """Domains, devices and limits of this machine as literal sizes.

    One shared pool: 80 % managed. RAM beside cards: 50 %, and of each card all but its reserve.
    Raises: Refusal `unsupported_gpu_topology`, `topology_unknown` as a role on this machine would be refused.
    """
    from capyctl.host.cards import Nvml
    from capyctl.host.memory import read_memory
    from capyctl.host.policy import check_topology

    total, found = read_memory().capacity_bytes, Nvml().read()
    check_topology(found)
    cards = [card for card in found if card.discrete]

    def part(amount: int, percent: int) -> str:
        return format_size(amount * percent // 100 // _MIB * _MIB)

    if not cards:
        limits = {"managed_limit": part(total, 80), "free_reserve": part(total, 20)}
        shared = {"parked_limit": part(total, 25), "host_kv_limit": part(total, 10)}
        return {"domains": {"unified": {"memory": "unified", **limits, **shared}}}
    domains: dict[str, Any] = {
        "system": {
            "memory": "distinct",
            "managed_limit": part(total, 50),
            "free_reserve": part(total, 20),
            "parked_limit": part(total, 25),
            "host_kv_limit": part(total, 10),
        }
    }
    devices: dict[str, Any] = {}
    for card in cards:
        assert card.total_bytes is not None
        reserve = max(1 << 30, card.total_bytes * 8 // 100 // _MIB * _MIB)
        managed = (card.total_bytes - reserve) // _MIB * _MIB
        parked = min(8 << 30, card.total_bytes // 4 // _MIB * _MIB, managed)
        name = f"gpu{card.index}"
        domains[name] = {
            "memory": "device",
            "device": name,
            "managed_limit": format_size(managed),
            "free_reserve": format_size(reserve),
            "parked_limit": format_size(parked),
        }
        devices[name] = {"domain": name}
    return {"domains": domains, "devices": devices}
