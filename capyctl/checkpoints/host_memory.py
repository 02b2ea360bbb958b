"""Host RAM that an engine takes because an option told it so: charged beside everything else, or refused. Pure.

What an option says in figures is charged in every phase: engines set such memory aside at their start and keep it
while they are parked. What says no figure cannot be derived, so the document must state the whole charge. A
`resources` block is the whole charge as it is; it must hold what its own options take.

Source: memory 4.3, 7; engines 6.2, 7.3, 9.1; vLLM's and SGLang's pages of server arguments.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from capyctl.checkpoints.arguments import arguments
from capyctl.checkpoints.machines import GIB, MIB, Machine
from capyctl.documents.deployment import Deployment
from capyctl.errors import Refusal
from capyctl.fsm.types import Bytes, Phase
from capyctl.ledger.types import Allocation
from capyctl.units import larger

KV_OFFLOADING, KV_BACKEND = "--kv-offloading-size", "--kv-offloading-backend"
KV_TRANSFER = "--kv-transfer-config"
MEDIA_CACHE = {"vllm": "--mm-processor-cache-gb", "sglang": "--mm-preprocess-cache-size-mb"}
TABLES = "--ple-offload-embedding"
CONNECTORS: Mapping[str, int | None] = {"OffloadingConnector": None, "SimpleCPUOffloadConnector": 8 * GIB}
"""Those of vLLM that keep the cache in its own host RAM, and what they take when they are not told."""
MEDIA_ON_CARD = "--mm-ipc-gpu-memory-gb"
ARENA, ARENA_BYTES = "--enable-shm-tensor-arena", 2 * GIB
"""Shared memory through which vLLM's processes hand each other tensors: 8 slots of 256 MiB."""
MEDIA_COPIES = 2
"""vLLM keeps its cache of media in the API server and in the engine's core."""
_NAME_LEAST = 6
_UNKNOWN: Mapping[str, Mapping[str, str]] = {
    "vllm": {"--ec-transfer-config": "keeps what encoders made elsewhere"},
    "sglang": {
        "--enable-hisparse": "keeps a part of the cache in host RAM",
        "--hisparse-config": "keeps a part of the cache in host RAM",
        "--enable-paged-experts": "keeps experts in host RAM",
        "--kt-weight-path": "keeps experts in host RAM",
    },
}


@attrs.frozen(kw_only=True)
class Taken:
    """Host RAM of one engine, all ranks together, bytes; `cache` is the part that is a KV cache. `words`: by what."""

    cache: int = 0
    other: int = 0
    words: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return self.cache + self.other


def taken(facts: Mapping[str, Any], document: Deployment, family: str) -> Taken:
    """What the options of a deployment and of its profile take.

    Raises: Refusal `invalid_config` for a figure that the engine would not start with, or a cache server that nobody
      runs; `no_safe_estimate` naming an option without a figure, where the document states no `resources`.
    """
    args = arguments(facts, document)
    if document.resources is None:
        for option, what in _UNKNOWN.get(family, {}).items():
            if _given(args, option) is not None:
                raise _no_figure(document, f"{option} {what}")
    match family:
        case "vllm":
            cache = _offloaded(document, args) + _transferred(document, args)
            other = 0 if document.engine_config.language_model_only else MEDIA_COPIES * _media(document, args, family)
            other += ARENA_BYTES if _given(args, ARENA) is not None else 0
        case "sglang":
            cache, other = 0, _media(document, args, family) + _pinned_tables(facts, args)
        case _:
            return Taken()
    names = (KV_OFFLOADING, KV_TRANSFER, MEDIA_CACHE[family], ARENA, TABLES)
    return Taken(cache=cache, other=other, words=tuple(name for name in names if _given(args, name) is not None))


def kept_of_card_cache(facts: Mapping[str, Any], document: Deployment, family: str) -> int:
    """Bytes of its cache on each card that vLLM gives to the decoding of media, whatever cache it is told.

    Raises: Refusal `invalid_config` for a figure that the engine would not start with.
    """
    said = _given(arguments(facts, document), MEDIA_ON_CARD) if family == "vllm" else None
    return 0 if said is None else _amount(document, MEDIA_ON_CARD, said, GIB)


def takes_cache(args: Sequence[str]) -> bool:
    """Whether vLLM's options already say where its cache goes: a private cache server would be told to it twice."""
    return any(_given(args, name) is not None for name in (KV_OFFLOADING, KV_TRANSFER))


def check_declared(taken: Taken, phases: Mapping[Phase, Allocation], machine: Machine, name: str) -> None:
    """Refuse a `resources` block that states less host RAM than its own options take.

    Raises: Refusal `invalid_config` naming the phase, the domain and the options.
    """
    domain = machine.system if machine.card and machine.system is not None else machine.domain
    for phase, allocation in phases.items():
        if allocation.on(domain) < taken.bytes:
            takes, there = larger(taken.bytes, allocation.on(domain))
            raise Refusal(
                "invalid_config",
                f"{name}: {' and '.join(taken.words)} take {takes} of host memory in every phase, and the "
                f"{phase.value} phase of resources states {there} on {domain}. Raise it, or lower the options",
            )


def left_to_engine(taken: Taken, ready: Allocation, machine: Machine) -> Allocation:
    """What the options leave of a stated ready phase for weights and cache: beside a card, all of the card's part."""
    if machine.card or not taken.bytes:
        return ready
    return attrs.evolve(ready, bytes={**ready.bytes, machine.domain: Bytes(ready.on(machine.domain) - taken.bytes)})


# --- vLLM --------------------------------------------------------------------------------------------


def _offloaded(document: Deployment, args: Sequence[str]) -> int:
    """`--kv-offloading-size`: GiB, the sum over all ranks."""
    said = _given(args, KV_OFFLOADING)
    if said is None:
        return 0
    if _given(args, KV_BACKEND) == "lmcache":
        raise Refusal(
            "invalid_config",
            f"{document.name}: {KV_BACKEND} lmcache needs a cache server that nobody runs here. "
            f"Use {KV_BACKEND} native, or leave both options out and state lmcache in the document",
        )
    return _amount(document, KV_OFFLOADING, said, GIB, zero=False)


def _transferred(document: Deployment, args: Sequence[str]) -> int:
    """`--kv-transfer-config`: what the connector that it names takes; key by key, nobody here adds it up."""
    said = _given(args, KV_TRANSFER)
    if said is None:
        return 0
    config = _json_object(said)
    connector = config.get("kv_connector")
    extra = config.get("kv_connector_extra_config") or {}
    if isinstance(connector, str) and connector in CONNECTORS and isinstance(extra, dict):
        told = extra.get("cpu_bytes_to_use", CONNECTORS[connector])
        if isinstance(told, int | float) and not isinstance(told, bool) and 0 < told < 1 << 63:
            return math.ceil(told)
    if document.resources is not None:
        return 0
    if isinstance(connector, str) and connector in CONNECTORS:
        what = f"{connector} of {KV_TRANSFER} says no cpu_bytes_to_use"
    else:
        what = f"{KV_TRANSFER} hands the cache to a connector whose host memory is not known here"
    raise _no_figure(document, what)


# --- both --------------------------------------------------------------------------------------------


def _media(document: Deployment, args: Sequence[str], family: str) -> int:
    """A cache of prepared media, where its size is stated: GiB of vLLM's, MiB of SGLang's."""
    said = _given(args, MEDIA_CACHE[family])
    return 0 if said is None else _amount(document, MEDIA_CACHE[family], said, GIB if family == "vllm" else MIB)


def _pinned_tables(facts: Mapping[str, Any], args: Sequence[str]) -> int:
    """N-gram tables that SGLang pins in host RAM instead of the card's memory, shared out among the ranks."""
    if _given(args, TABLES) is None or _given(args, "--ple-offload-backend") == "file":
        return 0
    return sum(int(size) for size in facts.get("table_bytes") or ())


def _amount(document: Deployment, option: str, said: str, unit: int, *, zero: bool = True) -> int:
    try:
        number = float(said)
    except ValueError:
        number = math.nan
    if not (0 < number < 1 << 33 or (zero and number == 0)):
        of = "GiB" if unit == GIB else "MiB"
        raise Refusal("invalid_config", f"{document.name}: {option}: {said!r} is no number of {of}")
    return math.ceil(number * unit)


def _no_figure(document: Deployment, what: str) -> Refusal:
    return Refusal(
        "no_safe_estimate",
        f"the memory of {document.name} cannot be derived: {what}. State resources, or leave the option out",
    )


def _given(args: Sequence[str], name: str) -> str | None:
    """The last value of an option under any spelling that the parser takes, "" without one; None when not given.

    A part that is said by a dotted name (`--name.key value`) counts as given without a value.
    """
    found = None
    for index, word in enumerate(args):
        spelled, equals, value = word.partition("=")
        spelled, dotted, _ = spelled.replace("_", "-").partition(".")
        if spelled != name and not (len(spelled) >= _NAME_LEAST and name.startswith(spelled)):
            continue
        following = args[index + 1] if index + 1 < len(args) else ""
        found = "" if dotted else value if equals else "" if following.startswith("--") else following
    return found


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
