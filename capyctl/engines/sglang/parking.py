"""SGLang's park and wake: which calls, in which order, and what their answers must say.

A call is made once. An answer that does not say what it must leaves the engine in doubt, and whoever asked
stops it. A release while anything runs ends the engine, and so does a resume of what was not released: the
flush before it is the scheduler's own word, which the gauges are not.
Source: engines 7.4.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capyctl.engines.adapter import Client
from capyctl.engines.questions import answer
from capyctl.engines.run_once import printable
from capyctl.errors import Lost, Refusal
from capyctl.fsm.types import Residency

TAGS = {"tags": ["kv_cache", "weights"]}
FLUSH_WAIT_S = 5
FLUSH_LIMIT_S, MOVE_LIMIT_S, RELOAD_LIMIT_S = 10.0, 60.0, 300.0


async def quiesce(client: Client) -> None:
    """Have the scheduler itself say that it is idle; its caches are forgotten on the way.

    Raises: Refusal `not_quiescent`; ConnectionError, TimeoutError.
    """
    status, body = await client.post(f"/flush_cache?timeout={FLUSH_WAIT_S}", b"", FLUSH_LIMIT_S, admin=True)
    if status == 503:
        raise ConnectionError("/flush_cache: the engine is going away")
    if status != 200:
        raise Refusal("not_quiescent", f"the engine is not quiescent: /flush_cache answered {status}{_words(body)}")


async def release(client: Client, limit_s: float) -> None:
    """Give weights and cache back. Raises: Lost `engine_error` when the answer is not the expected one."""
    await _move(client, "/release_memory_occupation", min(limit_s, MOVE_LIMIT_S))


async def resume(client: Client, residency: Residency, model_dir: Path, limit_s: float) -> None:
    """Take weights and cache back; load the weights again where they were dropped; forget every prompt.

    All calls share `limit_s`. Raises: as `release`.
    """
    ends = time.monotonic() + limit_s

    def left(most: float) -> float:
        return max(0.1, min(most, ends - time.monotonic()))

    await _move(client, "/resume_memory_occupation", left(MOVE_LIMIT_S))
    if residency is Residency.DEEP:
        await _reload(client, model_dir, left(RELOAD_LIMIT_S))
    status, body = await client.post("/flush_cache?timeout=0", b"", left(FLUSH_LIMIT_S), admin=True)
    if status != 200:
        raise _uncertain(f"/flush_cache answered {status}{_words(body)}")


async def _move(client: Client, path: str, limit_s: float) -> None:
    status, body = await client.post(path, json.dumps(TAGS).encode(), limit_s, admin=True)
    if status != 200 or body.strip() not in (b"null", b""):
        raise _uncertain(f"{path} answered {status}{_words(body)}")


async def _reload(client: Client, model_dir: Path, limit_s: float) -> None:
    asked: Mapping[str, Any] = {
        "model_path": str(model_dir),
        "load_format": "auto",
        "abort_all_requests": False,
        "is_async": False,
        "keep_pause": False,
        "recapture_cuda_graph": False,
        "flush_cache": True,
    }
    path = "/update_weights_from_disk"
    status, body = await client.post(path, json.dumps(asked).encode(), limit_s, admin=True)
    said = answer(status, body, path, code="engine_error") if status == 200 else {}
    if said.get("success") is not True:
        raise _uncertain(f"{path} did not load the weights again: {status}{_words(body)}")


def _uncertain(message: str) -> Lost:
    return Lost("engine_error", message)


def _words(body: bytes) -> str:
    text = printable(body.decode("utf-8", "replace").strip())
    return f": {text}" if text else ""
