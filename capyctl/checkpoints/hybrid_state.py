"""What each running request of a gated-delta-net hybrid keeps on SGLang besides its cache. Pure.

The arithmetic is the engine's own, so that what is charged is what it allocates.

Source: memory 5.10; engines 7.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from capyctl.checkpoints import shares
from capyctl.checkpoints.arguments import arguments, counted, said
from capyctl.documents.deployment import Deployment

RUNNING = 8
"""Requests at once of such a model, unless the document says."""
_DTYPES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@attrs.frozen(kw_only=True)
class State:
    """A pool of states. `slot` is bytes of one of them on one rank."""

    slot: int
    per_request: int  # slots of the pool per running request
    draft_tokens: int

    def slots(self, running: int) -> int:
        """Slots of the pool, as the engine is told."""
        return self.per_request * running

    def bytes(self, running: int) -> int:
        """What the pool takes: one slot more than its requests use, and one per draft token beside them."""
        return (self.slots(running) + 1) * self.slot + (running + 1) * self.draft_tokens * self.slot

    def most_running(self, wanted: int, room: int) -> int | None:
        """The most requests, up to `wanted`, whose state fits into `room` bytes; None when not even one does."""
        per_request = self.bytes(2) - self.bytes(1)
        fixed = self.bytes(1) - per_request
        fitting = min(wanted, (room - fixed) // per_request)
        return fitting if fitting >= 1 else None


def state_of(facts: Mapping[str, Any], document: Deployment, family: str) -> State | None:
    """The state of one rank; None where there is none, or its size is not ours to say."""
    values = facts.get("state_slot_values")
    if family != "sglang" or not values:
        return None
    args = arguments(facts, document)
    env = {str(k): str(v) for k, v in {**(facts.get("host_env") or {}), **document.engine_config.env}.items()}
    if said(args, "--max-mamba-cache-size") is not None or said(args, "--mamba-full-memory-ratio") is not None:
        return None  # whoever sizes the pool in arguments has the last word
    draft_tokens = 0
    if said(args, "--speculative-algorithm") is not None and said(args, "--enable-linear-replayssm-spec") is None:
        number = counted(args, "--speculative-num-draft-tokens")
        if number is None:
            return None
        draft_tokens = number
    kernel = _DTYPES.get(env.get("SGLANG_MAMBA_CONV_DTYPE") or "bfloat16")
    state = _DTYPES.get(
        said(args, "--mamba-ssm-dtype")
        or env.get("SGLANG_MAMBA_SSM_DTYPE")
        or str(facts.get("state_dtype") or "float32")
    )
    if kernel is None or state is None:
        return None
    convolution, temporal = (int(number) for number in values)
    topology = document.topology
    layers = int((facts.get("states") or {}).get("layers") or 0)
    whole = shares.of_stage(convolution * kernel + temporal * state, layers, facts, topology)
    slot = -(-whole // topology.tensor_parallel)
    return State(slot=slot, per_request=_per_request(args, env), draft_tokens=draft_tokens)


def _per_request(args: Sequence[str], env: Mapping[str, str]) -> int:
    """State slots per running request."""
    if said(args, "--disable-radix-cache") is not None:
        return 1
    strategy = said(args, "--mamba-radix-cache-strategy") or "auto"
    backend = said(args, "--linear-attn-backend") or "triton"
    if strategy == "no_buffer" or (strategy == "auto" and backend != "triton"):
        return 3
    lazy = strategy == "extra_buffer_lazy" or said(args, "--disable-overlap-schedule") is not None
    unlocked = env.get("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK", "").lower() in ("1", "true", "yes", "y", "on")
    return (4 if lazy else 5) - (1 if unlocked else 0)
