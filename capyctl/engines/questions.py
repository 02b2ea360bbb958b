"""Questions that engines of every family are asked in the same words, and how their answers are read.

Each raises ConnectionError or TimeoutError as the client does; a 503 is a ConnectionError, since every
server says it while it loads or goes away.
Source: engines 12.1, 15.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from capyctl.engines.adapter import Client
from capyctl.errors import CapyError, Failure

PROBE_TOKENS = 8
NOT_FINITE = "with log probabilities that are no finite numbers: its weights or its cache are damaged"


async def probe_chat(client: Client, served_name: str, limit_s: float, *, logprobs: bool = False) -> int:
    """One short chat at temperature 0; the characters of its content or reasoning, whichever there is.

    Args:
      logprobs: asked for too, of an engine that has them; where it gives them they must be finite.
    Raises: Failure `launch_failed` on an error status, an empty answer, or log probabilities that are no numbers.
    """
    asked = {
        "model": served_name,
        "messages": [{"role": "user", "content": "Say OK."}],
        "max_tokens": PROBE_TOKENS,
        "temperature": 0,
        "stream": False,
    }
    path = "/v1/chat/completions"
    status, body, _ = await ask_beside(client, path, asked, {"logprobs": True} if logprobs else {}, limit_s)
    choice = first(answer(status, body, "the probe").get("choices"))
    message = choice.get("message") or {}
    texts = [message.get(name) for name in ("content", "reasoning_content", "reasoning")]
    characters = sum(len(text) for text in texts if isinstance(text, str))
    if characters == 0:
        raise Failure("launch_failed", "the engine answered the readiness probe with nothing")
    if logprobs and not all(map(is_finite, sampled_logprobs(choice))):
        raise Failure("launch_failed", f"the engine answered the readiness probe {NOT_FINITE}")
    return characters


async def ask_beside(
    client: Client, path: str, asked: Mapping[str, Any], beside: Mapping[str, Any], limit_s: float
) -> tuple[int, bytes, bool]:
    """Ask with the members `beside`, and without them if the engine refuses that; the third value says which."""
    status, body = await client.post(path, json.dumps({**asked, **beside}).encode(), limit_s)
    if status not in (400, 422) or not beside:
        return status, body, bool(beside)
    return *(await client.post(path, json.dumps(asked).encode(), limit_s)), False


def sampled_logprobs(choice: Mapping[str, Any]) -> list[Any]:
    """The log probability of each token that a chat or a completion chose, as the engine wrote it."""
    given = choice.get("logprobs")
    if not isinstance(given, Mapping):
        return []
    chat, text = given.get("content"), given.get("token_logprobs")
    if isinstance(chat, list):
        return [token.get("logprob") if isinstance(token, Mapping) else None for token in chat]
    return text if isinstance(text, list) else []


def is_finite(value: object) -> bool:
    """Whether it is a number as JSON has them: servers write `NaN`, or null in its place."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]  # a number by now


async def probe_decision(client: Client, served_name: str, limit_s: float) -> int:
    """A constant decision: every option must come back with a probability. Returns the answers' length.

    Raises: Failure `launch_failed`.
    """
    asked = {
        "model": served_name,
        "state": "ping",
        "questions": {
            "pick": {"type": "choice", "instructions": "Which word is it?", "criteria": {"ping": None, "pong": None}},
            "sure": {"type": "noul", "instructions": "Is it ping?", "criteria": None},
        },
    }
    status, body = await client.post("/v1/systemone", json.dumps(asked).encode(), limit_s)
    answers = answer(status, body, "the probe").get("answers")
    answers = answers if isinstance(answers, Mapping) else {}
    pick, sure = answers.get("pick") or {}, answers.get("sure") or {}
    shares = pick.get("probabilities") if isinstance(pick, Mapping) else None
    if not isinstance(shares, Mapping) or set(shares) != {"ping", "pong"} or "noul" not in sure:
        raise Failure("launch_failed", "the engine answered the readiness probe without a probability for every option")
    return len(json.dumps(answers))


async def read_json(client: Client, path: str) -> Mapping[str, Any]:
    """A JSON object that says how the engine runs. Raises: Failure `effective_args_mismatch`."""
    status, body = await client.get(path)
    return answer(status, body, path, code="effective_args_mismatch")


def answer(status: int, body: bytes, what: str, code: str = "launch_failed") -> Mapping[str, Any]:
    """The JSON object of an answer. Raises: Failure with the engine's own message, bounded."""
    try:
        said = json.loads(body)
    except ValueError:
        said = None
    if status == 503:
        raise ConnectionError(f"{what}: the engine is loading or going away")
    if status != 200:
        error = said.get("error") if isinstance(said, Mapping) else None
        words = error.get("message") if isinstance(error, Mapping) else None
        raise _failure(code, f"{what} was answered with {status}" + (f": {str(words)[:300]}" if words else ""))
    if not isinstance(said, Mapping):
        raise _failure(code, f"{what} was not answered with a JSON object")
    return said


def _failure(code: str, message: str) -> CapyError:
    return Failure(code, message)


def first(rows: Any) -> Mapping[str, Any]:
    """The first object of a list, or an empty one."""
    if isinstance(rows, list) and rows and isinstance(rows[0], Mapping):
        return rows[0]
    return {}


def same(what: str, seen: Any, rendered: Any) -> None:
    """Refuse a setting that the engine runs with and that was not rendered.

    Raises: Failure `effective_args_mismatch` naming both.
    """
    if seen != rendered or type(seen) is not type(rendered):
        raise Failure(
            "effective_args_mismatch",
            f"{what} was rendered as {rendered!r} and the engine runs with {str(seen)[:100]!r}",
        )
