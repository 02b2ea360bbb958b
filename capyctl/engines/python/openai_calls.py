"""Readiness and the canary of servers that list their model and complete a prompt in OpenAI's shapes.

How answers read is said in `capyctl.engines.adapter`; the chat probe and the gauges are in `questions`.
Source: engines 12.1, 13.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capyctl.engines.adapter import Client
from capyctl.engines.questions import (
    NOT_FINITE,
    answer,
    ask_beside,
    first,
    is_finite,
    read_json,
    sampled_logprobs,
)
from capyctl.engines.run_once import printable
from capyctl.errors import Failure

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
    listed = (await read_json(client, "/v1/models")).get("data")
    rows: list[Any] = listed if isinstance(listed, list) else []
    for row in rows:
        if isinstance(row, Mapping) and row.get("id") == served_name:
            return row
    names = ", ".join(printable(str(row.get("id"))) for row in rows[:8] if isinstance(row, Mapping)) or "nothing"
    raise Failure("effective_args_mismatch", f"the engine serves {names}, not {served_name}")


async def completion_canary(client: Client, served_name: str, limit_s: float) -> str:
    """What the fixed prompt is completed with: `ids:` and the token ids, else `text:` and the text.

    Log probabilities are asked for as well, except of an engine that refuses them. They differ in their last digits
    from run to run, so they are no part of the answer; but they must be numbers.

    Raises: Failure `engine_error` when the engine answered with an error, or without a completion; `wake_mismatch`
      when its log probabilities are not finite: right tokens, by chance.
    """
    asked = {
        "model": served_name,
        "prompt": CANARY_PROMPT,
        "max_tokens": CANARY_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
        "stream": False,
    }
    status, body, with_logprobs = await ask_beside(client, "/v1/completions", asked, {"logprobs": 1}, limit_s)
    choice = first(answer(status, body, "the canary", code="engine_error").get("choices"))
    numbers = sampled_logprobs(choice)
    if with_logprobs and not (numbers and all(map(is_finite, numbers))):
        raise Failure("wake_mismatch", f"it answers the fixed prompt {NOT_FINITE}")
    ids = choice.get("token_ids")
    if isinstance(ids, list) and ids and all(type(token) is int for token in ids):
        return "ids:" + ",".join(map(str, ids[:256]))
    text = choice.get("text")
    if not isinstance(text, str):
        raise Failure("engine_error", "the canary was not answered with a completion")
    return "text:" + text.encode("utf-8", "replace")[:CANARY_BYTES_MAX].decode("utf-8", "ignore")
