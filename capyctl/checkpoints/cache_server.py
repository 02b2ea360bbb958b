"""A private LMCache server beside one engine: whether a deployment has one, and the host RAM that it is charged. Pure.

It holds what left the engine's cache, in RAM, and starts and ends with the instance. Whether a host can run one is its
own to say, as a fact beside the checkpoint's; nothing is qualified for engines that park.

Source: memory 4.3, 5.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capyctl.checkpoints import host_memory
from capyctl.checkpoints.arguments import arguments
from capyctl.checkpoints.machines import GIB, MIB
from capyctl.documents.deployment import Deployment
from capyctl.errors import Refusal
from capyctl.fsm.types import Residency

POOL_BYTES = 4 * GIB
OVERHEAD_BYTES = 512 * MIB
"""The server's own memory, a placeholder: nobody has published a figure."""
_FAMILIES = ("vllm", "sglang")


def server_bytes(facts: Mapping[str, Any], document: Deployment, family: str, residency: Residency) -> int:
    """Host RAM of the server in every phase of its engine; 0 where it runs without one.

    Args:
      facts: `cache_server` among them where the host has a version that fits this engine's.
    Raises: Refusal `capability_missing:lmcache` for a document that requires one where there can be none.
    """
    why = why_not(facts, document, family, residency)
    if why is None:
        pool = document.lmcache_pool.bytes if document.lmcache_pool is not None else POOL_BYTES
        return pool + OVERHEAD_BYTES
    if document.lmcache == "required":
        raise Refusal("capability_missing:lmcache", f"{document.name}: lmcache: required: {why}. Use lmcache: auto")
    return 0


def why_not(facts: Mapping[str, Any], document: Deployment, family: str, residency: Residency) -> str | None:
    """Why a deployment runs without a cache server, or None when it has one."""
    if document.lmcache == "off":
        return "the document turned it off"
    if document.api == "decisions":
        return "a decisions deployment keeps no cache"
    if family not in _FAMILIES:
        return f"{family} takes no cache server"
    if family == "vllm" and host_memory.takes_cache(arguments(facts, document)):
        return "an option of the engine already says where its cache goes"
    if residency.parks:
        return f"nothing is qualified for residency {residency.value}"
    if not facts.get("cache_server"):
        return "this host has none for this engine"
    return None
