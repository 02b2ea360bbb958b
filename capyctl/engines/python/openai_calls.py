"""Readiness, the probe and the canary of servers that speak OpenAI's shapes.

How answers read is said in `capyctl.engines.adapter`.
Source: engines 12.1, 13.3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from capyctl.engines.adapter import Client
from capyctl.engines.run_once import printable
from capyctl.errors import Failure

PROBE_TOKENS = 8
CANARY_TOKENS = 8
CANARY_PROMPT = "The quick brown fox jumps over the lazy dog. One, two, three, four,"
CANARY_BYTES_MAX = 4096


async def models_listed(client: Client) -> bool:
    """One poll of `/v1/models`: 200 is loaded, 503 still loads. ConnectionError passes through: not yet.

    Raises: Failure `launch_failed` for any other answer.
    """
    status, _ = await client.get("/v1/models")
    if status in (200, 503):
        return status == 200
    raise Failure("launch_failed", f"/v1/models answered {status}")


async def served_entry(client: Client, served_name: str) -> Mapping[str, Any]:
    """The row of `/v1/models` under the served name.

    Raises: Failure `effective_args_mismatch` when it is not there.
    """
    answer = answered(*await client.get("/v1/models"), "/v1/models", code="effective_args_mismatch")
    listed = answer.get("data")
    rows: list[Mapping[str, Any]] = (
        [row for row in listed if isinstance(row, Mapping)] if isinstance(listed, list) else []
    )
    for row in rows:
        if row.get("id") == served_name:
            return row
    names = ", ".join(printable(str(row.get("id"))) for row in rows[:8]) or "none"
    raise Failure("effective_args_mismatch", f"the engine serves {names}, not {served_name}")


async def chat_probe(client: Client, served_name: str, limit_s: float) -> int:
    """One short chat answer at temperature 0; returns its characters. A model that reasons first is fine.

    Raises: Failure `launch_failed` on an error status or an empty answer.
    """
    asked = {
        "model": served_name,
        "messages": [{"role": "user", "content": "Say OK."}],
        "max_tokens": PROBE_TOKENS,
        "temperature": 0,
        "stream": False,
    }
    status, body = await client.post("/v1/chat/completions", json.dumps(asked).encode(), limit_s)
    message = first(answered(status, body, "the probe").get("choices")).get("message")
    message = message if isinstance(message, Mapping) else {}
    texts = [message.get(name) for name in ("content", "reasoning_content", "reasoning")]
    characters = sum(len(text) for text in texts if isinstance(text, str))
    if characters == 0:
        raise Failure("launch_failed", "the engine answered the readiness probe with nothing")
    return characters


async def completion_canary(client: Client, served_name: str, limit_s: float) -> str:
    """What the fixed prompt is completed with: `ids:` and the token ids, else `text:` and the text.

    Raises: Failure `engine_error` when the engine answered with an error, or without a completion.
    """
    asked = {
        "model": served_name,
        "prompt": CANARY_PROMPT,
        "max_tokens": CANARY_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
        "stream": False,
    }
    status, body = await client.post("/v1/completions", json.dumps(asked).encode(), limit_s)
    choice = first(answered(status, body, "the canary", code="engine_error").get("choices"))
    ids = choice.get("token_ids")
    if isinstance(ids, list) and ids and all(type(token) is int for token in ids):
        return "ids:" + ",".join(map(str, ids[:256]))
    text = choice.get("text")
    if not isinstance(text, str):
        raise Failure("engine_error", "the canary was not answered with a completion")
    return "text:" + text.encode("utf-8", "replace")[:CANARY_BYTES_MAX].decode("utf-8", "ignore")


def answered(status: int, body: bytes, what: str, *, code: str = "launch_failed") -> Mapping[str, Any]:
    """The JSON object of an answer.

    Raises: ConnectionError for 503; Failure with `code` and the engine's own message, bounded, otherwise.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if status == 503:
        raise ConnectionError(f"{what}: the engine is loading or going away")
    if status != 200:
        said = message_of(answer)
        raise Failure(code, f"{what} was answered with {status}" + (f": {said}" if said else ""))
    if not isinstance(answer, Mapping):
        raise Failure(code, f"{what} was not answered with a JSON object")
    return answer


def message_of(answer: object) -> str:
    """The message in an engine's error answer, one bounded line, or nothing."""
    if not isinstance(answer, Mapping):
        return ""
    error = answer.get("error", answer.get("detail"))
    said = error.get("message") if isinstance(error, Mapping) else error
    return printable(said) if isinstance(said, str) else ""


def first(rows: Any) -> Mapping[str, Any]:
    """The first object of a list, or an empty one."""
    if isinstance(rows, list) and rows and isinstance(rows[0], Mapping):
        return rows[0]
    return {}
