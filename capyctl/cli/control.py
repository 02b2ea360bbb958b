"""The local control socket of a running role: one JSON line to it, one JSON line back.

Requests: `{"verb": "add"}` reads the engines file again, `{"verb": "remove", "profile": …, "drain": …}`
withdraws a profile, `{"verb": "list"}` tells what is published. Answers: `{"ok": true, …}` or
`{"error": {"code", "message"}}`. Source: api 9.1, engines 2.9.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any, Final

from capyctl.cli.client import refused
from capyctl.documents.places import Places
from capyctl.errors import Failure, Lost

ANSWER_LIMIT_S: Final = 30.0
_ANSWER_MAX: Final = 4 << 20


def ask(places: Places, request: Mapping[str, Any], limit_s: float = ANSWER_LIMIT_S) -> dict[str, Any] | None:
    """The role's answer, or None when no role listens (or it is not this user's).

    Raises: the refusal in the answer; Lost agent_unreachable when the role took the request and fell silent.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(limit_s)
        try:
            link.connect(places.control_socket)
        except (FileNotFoundError, ConnectionRefusedError, PermissionError):
            return None
        except OSError as wrong:
            if "too long" in str(wrong):  # a state root deeper than a socket's name may be: no role can listen there
                return None
            raise Failure("agent_unreachable", f"{places.control_socket}: {wrong}") from None
        try:
            link.sendall(json.dumps(request).encode() + b"\n")
            link.shutdown(socket.SHUT_WR)
            raw = _read(link)
            answer = json.loads(raw)
        except (OSError, ValueError):
            raise Lost(
                "agent_unreachable",
                f"the role behind {places.control_socket} took the request and did not answer; the outcome is not "
                "known: run `capyctl engine list`, then the command again, which resumes",
            ) from None
    if not isinstance(answer, dict):
        raise Failure("agent_unreachable", f"{places.control_socket} answered something that is not a JSON object")
    if answer.get("error"):
        raise refused(409, answer)
    return answer


def _read(link: socket.socket) -> bytes:
    raw = b""
    while len(raw) <= _ANSWER_MAX:
        piece = link.recv(65_536)
        if not piece:
            return raw
        raw += piece
    raise ValueError("the answer is too long")
