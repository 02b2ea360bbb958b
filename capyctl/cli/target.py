"""Which role on this machine answers a client command, where, and with which token.

Looks at files only; the role need not run. Source: cli 3, config 14.3 and 14.4.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import attrs

from capyctl.documents import places
from capyctl.documents.places import Places, Role
from capyctl.errors import Failure, Refusal


@attrs.frozen(kw_only=True)
class Target:
    """A management listener: `address` is ip:port, `token` its bearer token."""

    role: Role
    address: str
    token: str = attrs.field(repr=False)
    places: Places
    start: str  # the command that starts the role


def find(config: str | None, state_dir: str | None, environ: Mapping[str, str], cwd: str) -> Target:
    """The role that client commands talk to.

    Raises: Failure `unavailable` when no role has ever run there; Refusal: a host machine, two roles, or credentials
    that are not to be read.
    """
    explicit = places.explicit_document(config, environ, cwd)
    root = places.stated_state_root(state_dir, environ, cwd)
    document, stated_kind = (None, None) if explicit is None else _read(explicit[0])
    if root is None and explicit is not None and document is not None:
        own = document.get("state_dir")
        if isinstance(own, str) and own:
            root = places.absolute(own, os.path.dirname(explicit[0]))
    where = Places(root or places.default_state_root(environ))
    role = _role(where, stated_kind)
    start = f"capyctl start {role}"
    if explicit is not None:
        start += f" --config {explicit[0]}"
    elif root is not None and root != places.default_state_root(environ):
        start += f" --state-dir {root}"
    token = _token(where, role, start)
    address = environ.get("CAPYCTL_MANAGEMENT_ADDR") or places.read_line(where.management_address)
    if not address:
        if document is None and os.path.isfile(where.document(role)):
            document, _ = _read(where.document(role))
        address = _stated_address(document, role) or places.DEFAULT_MANAGEMENT
    return Target(role=role, address=address, token=token, places=where, start=start)


def _role(where: Places, stated: Role | None) -> Role:
    run = places.roles_run(where)
    if stated == "host" or (stated is None and run == ("host",)):
        raise Refusal(
            "invalid_config",
            "this machine is a host, which has no management of its own; run the command on the server it joined",
        )
    if stated is not None:
        return stated
    clients = [role for role in run if role != "host"]
    if not clients:
        return "standalone"  # the one that can be started; that it never ran is said where its token is missed
    if len(clients) > 1:
        named = " or ".join(f"--config {where.document(role)}" for role in clients)
        raise Refusal("invalid_config", f"a server and a standalone role share {where.root}; choose with {named}")
    return clients[0]


def _token(where: Places, role: Role, start: str) -> str:
    try:
        if role == "server":
            return _server_token(where.below("identity", "server-credentials.json"))
        return places.read_credentials(where.credentials).admin_token
    except FileNotFoundError:
        if not os.path.isdir(where.server):  # the first start makes it
            raise Failure(
                "unavailable", f"no role has run with the state directory {where.root}; start it with `{start}`"
            ) from None
        raise Refusal(
            "unauthorized", f"there are no credentials below {where.identity}; start the role, or name its --state-dir"
        ) from None


def _server_token(path: str) -> str:
    import json

    try:
        token = json.loads(places.read_owned(path, 4096))["admin_token"]
    except (ValueError, KeyError, TypeError):
        raise Refusal("unauthorized", f"{path} is not used: it holds no admin_token") from None
    if not isinstance(token, str):
        raise Refusal("unauthorized", f"{path} is not used: it holds no admin_token")
    return token


def _read(path: str) -> tuple[dict[str, object], Role | None]:
    """A role document's plain data and kind; only the address is wanted, so it is not structured."""
    from capyctl.documents import owned, reader

    raw = reader.read(owned.read_regular(path, reader.BYTES_MAX), path)
    if type(raw) is not dict:
        raise Refusal("invalid_config", f"{path}: expected a role document")
    kind = raw.get("kind")
    for role in places.ROLES:
        if kind == role:
            return raw, role
    raise Refusal("invalid_config", f"{path}: kind: expected server, host or standalone")


def _stated_address(document: Mapping[str, object] | None, role: Role) -> str | None:
    at: object = document
    for name in (*(("server",) if role == "standalone" else ()), "listeners", "management", "bind"):
        if not isinstance(at, Mapping):
            return None
        at = at.get(name)
    return at if isinstance(at, str) else None
