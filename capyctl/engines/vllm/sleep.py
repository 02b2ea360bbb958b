"""vLLM's sleep and wake: which calls, in which order, and what their answers must say.

A call is made once. An answer that does not say what it must leaves the engine in doubt, and whoever asked
stops it: nothing here repeats, guesses, or goes on.
Source: engines 6.4.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from capyctl.engines.adapter import Client
from capyctl.engines.python.installation import release as numbers
from capyctl.engines.questions import answer
from capyctl.errors import Failure, Lost, Refusal
from capyctl.fsm.types import Residency

LEVELS = {Residency.DEEP: 2, Residency.HOST_BACKED: 1}
_STATES_SINCE = (0, 32)  # older builds answer /sleep and /wake_up with an empty body


def states_itself(version: str) -> bool:
    """Whether this build's answers to sleep and wake name the state."""
    return numbers(version) >= _STATES_SINCE


async def sleep(client: Client, residency: Residency, version: str, limit_s: float) -> None:
    """Put a drained engine to sleep: weights to host memory, or dropped; the cache dropped.

    Raises: Refusal when nothing was sent; Lost or Failure `engine_error` when the answer is not the expected one.
    """
    level = LEVELS.get(residency)
    if level is None:
        raise Refusal("residency_tier", f"a {residency.value} engine gives its memory back only when it stops")
    said = await _call(client, f"/sleep?level={level}", b"", limit_s)
    if states_itself(version):
        _expect("/sleep", said, {"status": "sleeping", "level": level})
    elif not await is_sleeping(client):
        raise _uncertain("/sleep was answered, and the engine does not sleep")


async def wake(client: Client, residency: Residency, version: str, limit_s: float) -> None:
    """Take the memory back. After a deep sleep the weights are read again before the cache is made.

    All calls share `limit_s`. Raises: as `sleep`.
    """
    if residency not in LEVELS:
        raise Refusal("residency_tier", f"a {residency.value} engine was never parked")
    ends = time.monotonic() + limit_s

    def left() -> float:
        return max(0.1, ends - time.monotonic())

    if residency is Residency.DEEP:
        # Woken whole, the scheduler would serve the weights that are not loaded yet.
        await _wake_up(client, "?tags=weights", "sleeping", version, left())
        body = json.dumps({"method": "reload_weights"}).encode()
        said = await _call(client, "/collective_rpc", body, left())
        results = said.get("results")
        if not isinstance(results, list) or not results or any(result is not None for result in results):
            raise _uncertain(f"/collective_rpc did not reload the weights: {_shown(said)}")
        await _wake_up(client, "?tags=kv_cache", "awake", version, left())
    else:
        await _wake_up(client, "", "awake", version, left())
    await reset_prefix_cache(client, left(), version)


async def reset_prefix_cache(client: Client, limit_s: float, version: str) -> None:
    """Forget every prompt of before; refused by an engine that still holds blocks."""
    status, body = await client.post("/reset_prefix_cache", b"", limit_s, admin=True)
    if status == 200 and not body.strip() and not states_itself(version):
        return
    said = answer(status, body, "/reset_prefix_cache", code="engine_error")
    if said.get("success") is not True:
        raise _uncertain(f"/reset_prefix_cache: {_shown(said)}")


async def is_sleeping(client: Client) -> bool:
    """What the engine says of itself; it only repeats what was asked, and proves no memory."""
    status, body = await client.get("/is_sleeping", admin=True)
    said = answer(status, body, "/is_sleeping", code="engine_error").get("is_sleeping")
    if not isinstance(said, bool):
        raise Failure("engine_error", "/is_sleeping does not say whether the engine sleeps")
    return said


async def _wake_up(client: Client, query: str, state: str, version: str, limit_s: float) -> None:
    said = await _call(client, f"/wake_up{query}", b"", limit_s)
    if states_itself(version):
        _expect("/wake_up", said, {"status": state})
    elif await is_sleeping(client) != (state == "sleeping"):
        raise _uncertain(f"after /wake_up{query} the engine is not {state}")


async def _call(client: Client, path: str, body: bytes, limit_s: float) -> Mapping[str, Any]:
    """The answer's object; an empty one for an empty body."""
    status, said = await client.post(path, body, limit_s, admin=True)
    if status == 200 and not said.strip():
        return {}
    return answer(status, said, path.partition("?")[0], code="engine_error")


def _expect(path: str, said: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    if any(said.get(name) != value or type(said.get(name)) is not type(value) for name, value in wanted.items()):
        raise _uncertain(f"{path} was to answer {_shown(wanted)} and answered {_shown(said)}")


def _uncertain(message: str) -> Lost:
    return Lost("engine_error", message)


def _shown(said: Mapping[str, Any]) -> str:
    return json.dumps(dict(said), default=str)[:200]
