"""What the router says itself: error bodies in both shapes, headers, the list of models.

An error is written for two readers at once. Official clients look under `error`; scripts look at the
flat members. Neither ever holds a prompt, an address, a path or a key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import attrs

from capyctl.control import outward
from capyctl.errors import CapyError, lookup
from capyctl.router.desk import Model

MESSAGE_BYTES_MAX: Final = 2048
JSON_TYPE: Final = (b"content-type", b"application/json")
STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)

_TYPES: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_NO_INPUT: Final = re.compile(r"(?:image|audio|video) input is not supported\b")
_CLIENT_ID: Final = re.compile(rb"[!-~]{1,128}")


@attrs.frozen(kw_only=True)
class Fault:
    """An error for a client: status, code, message, and what official clients want beside them."""

    status: int
    code: str
    message: str
    retryable: bool = False
    retry_after_s: int | None = None
    param: str | None = None
    kind: str | None = None  # the engine's own `type`, where it named one

    @classmethod
    def of(cls, error: CapyError) -> Fault:
        """From an error of ours. Details read: `param`, `retry_after_s`."""
        return cls(
            status=error.http_status,
            code=error.code,
            message=error.message,
            retryable=error.retryable,
            retry_after_s=error.details.get("retry_after_s"),
            param=error.details.get("param"),
        )

    @classmethod
    def named(cls, code: str, message: str) -> Fault:
        """With the status and retryability that the code stands for."""
        row = lookup(code)
        return cls(status=row.http, code=code, message=message, retryable=row.retryable)

    def body(self, typed: bool = False) -> bytes:
        """Both shapes in one object. `typed` adds the member by which Messages clients know an error."""
        kind = self.kind or _TYPES.get(self.status) or ("server_error" if self.status >= 500 else None)
        shape: dict[str, Any] = {
            "error": {
                "message": self.message,
                "type": kind or "invalid_request_error",
                "code": self.code,
                "param": self.param,
            },
            "code": self.code,
            "message": self.message,
            "retryable": self.retryable,
        }
        return json.dumps({"type": "error", **shape} if typed else shape, ensure_ascii=False).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """`Retry-After` on every 429 and wherever a time is known; the scheme on a 401."""
        after = self.retry_after_s if self.retry_after_s is not None else 1 if self.status == 429 else None
        headers = [JSON_TYPE, (b"cache-control", b"no-store")]
        if after is not None:
            headers.append((b"retry-after", str(after).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


def clean(message: str) -> str:
    """An engine's words, fit to pass on: control characters replaced, no places of the machine, cut to 2 KiB."""
    plain = "".join(char if char.isprintable() else " " for char in message[: 2 * MESSAGE_BYTES_MAX])
    return outward.placeless(plain).encode()[:MESSAGE_BYTES_MAX].decode("utf-8", "ignore").strip()


def engine_words(value: Any) -> tuple[str, str | None, str | None]:
    """Message, type and param of an engine's error object, in any of the shapes that engines use."""
    inner = value.get("error", value) if isinstance(value, Mapping) else value
    if isinstance(inner, str):
        return clean(inner), None, None
    if not isinstance(inner, Mapping):
        return "", None, None
    for name in ("message", "detail", "error"):
        words = inner.get(name)
        if words:
            text = words if isinstance(words, str) else json.dumps(words, ensure_ascii=False)
            kind, param = inner.get("type"), inner.get("param")
            return (
                clean(text),
                clean(kind) if isinstance(kind, str) else None,
                clean(param) if isinstance(param, str) else None,
            )
    return "", None, None


def asks_too_much(words: str) -> bool:
    """Whether an engine says that its model takes no such input: llama.cpp calls that a fault of its own (500)."""
    return _NO_INPUT.match(words) is not None


def client_request_id(values: list[bytes]) -> bytes | None:
    """The client's own `X-Request-Id`, when there is exactly one and it is 1 to 128 printable characters."""
    return values[0] if len(values) == 1 and _CLIENT_ID.fullmatch(values[0]) else None


def model_entry(model: Model) -> dict[str, Any]:
    """One model as clients list it: no state, no host, no memory."""
    return {
        "id": model.id,
        "object": "model",
        "created": model.created_s,
        "owned_by": "capyctl",
        "capyctl": {"api": model.api},
    }
