"""What vLLM's last lines say of its end. Pure; names options, never their values.

Source: engines 3.3, 6.1, 12.3, 20; the engine's own start checks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from capyctl.engines.python import failures
from capyctl.engines.python.failures import Named

_OWN_CODES = frozenset({"effective_args_mismatch", "capability_missing:core", "capability_missing:deep_park"})
_FREE = re.compile(r"Free memory on device .{0,200}?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than")
_CACHE = re.compile(
    r"max seq len \((?P<tokens>[\d,]+)\).{0,40}?\(?(?P<needs>[\d.]+) GiB KV cache is needed, which is larger than the "
    r"available KV cache memory \((?P<there>[\d.]+) GiB(?:.{0,80}?estimated maximum model length is (?P<most>[\d,]+))?"
)
_LONG = re.compile(
    r"max_model_len \((?P<tokens>\d+)\) is greater than the derived max_model_len \(\w{1,40}=(?P<most>\d+).{0,200}?"
    r"To allow overriding"
)
_STATES = re.compile(r"max_num_seqs \((?P<asked>\d+)\) exceeds available Mamba cache blocks \((?P<most>\d+)\)")
_BATCH = re.compile(
    r"max_num_batched_tokens \((?P<batch>\d+)\) (?:must be greater|is smaller than) .{0,40}?(?P<what>max_\w+)"
)


def classify(lines: Sequence[str]) -> Named | None:
    """(code, one line) of the last line that names a typed failure, or None."""
    return failures.classify(lines, "vLLM", _OWN_CODES, _own_words)


def _own_words(line: str) -> Named | None:
    short = _FREE.search(line)
    if short is not None:
        return (
            "insufficient_device_memory",
            f"vLLM found {short['free']} of {short['total']} GiB free on its device, less than it was to use",
        )
    low = line.lower()
    if "sleep mode is not supported" in low:
        return "capability_missing:deep_park", "vLLM cannot sleep on this platform. State residency: restart_only"
    if "no available memory for the cache blocks" in low:
        return "insufficient_device_memory", "vLLM's weights left no memory of its device for the KV cache"
    return _context(line) or _requests(line)


def _context(line: str) -> Named | None:
    """The context that it was told is too long: nothing that memory coming free would mend."""
    cache = _CACHE.search(line)
    if cache is not None:
        most = f"; {cache['most'].rstrip(',')} tokens would fit" if cache["most"] else ""
        return "engine_argument_rejected", (
            f"vLLM does not start with a context of {cache['tokens']} tokens: that needs {cache['needs']} GiB of KV "
            f"cache and there is {cache['there']} GiB{most}. Lower engine_config.context_length, or raise "
            "engine_config.memory.kv_cache"
        )
    low = line.lower()
    if "larger than the available kv cache memory" in low or "that can be stored in kv cache" in low:
        return "engine_argument_rejected", (
            "vLLM does not start with a context that its KV cache cannot hold. Lower engine_config.context_length, or "
            "raise engine_config.memory.kv_cache"
        )
    long = _LONG.search(line)
    if long is not None:
        return "engine_argument_rejected", (
            f"vLLM does not start with a context of {long['tokens']} tokens: it derives {long['most']} for the model. "
            "Lower engine_config.context_length"
        )
    return None


def _requests(line: str) -> Named | None:
    states = _STATES.search(line)
    if states is not None:
        return "engine_argument_rejected", (
            f"vLLM's cache has the states of {states['most']} requests, and {states['asked']} are to run at once. "
            "Lower engine_config.max_concurrent_requests, or raise engine_config.memory.kv_cache"
        )
    batch = _BATCH.search(line)
    if batch is not None:
        return "engine_argument_rejected", (
            f"vLLM does not start with a step of {batch['batch']} tokens, less than {batch['what']}. Raise "
            "engine_config.vllm.max_num_batched_tokens"
        )
    return None
