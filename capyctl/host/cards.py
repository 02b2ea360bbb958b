"""NVIDIA cards through NVML. Every call here blocks, and a sick driver blocks for long: call it in a thread.

A sample is whole or void: two cards with one index or UUID, or more memory used and free than there is,
mean that the driver talks nonsense, and half a sample would be judged as a small machine.
Source: memory 3.
"""

from __future__ import annotations

import threading
from typing import Protocol

import attrs
import pynvml

from capyctl.errors import Refusal
from capyctl.fsm.types import Bytes

SLACK_BYTES = 64 << 20  # used + free may exceed total by this much: the driver reads them one after another


@attrs.frozen(kw_only=True)
class Card:
    """One card at one look. A card without memory of its own (integrated) has `total_bytes` None."""

    index: int
    uuid: str
    name: str
    total_bytes: Bytes | None
    free_bytes: Bytes | None
    held: tuple[tuple[int, int], ...] = ()  # (pid, bytes) of each process on it


class CardReader(Protocol):
    """What samples cards: NVML, or a test's own."""

    def read(self) -> tuple[Card, ...]:
        """Every card. Raises: Refusal `topology_unknown` when they cannot be read or the sample is void."""


@attrs.define
class Nvml:
    """The real reader. A machine without the driver has no cards, which is an answer and no error."""

    _ready: bool = False
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def read(self) -> tuple[Card, ...]:
        with self._lock:
            try:
                if not self._ready:
                    pynvml.nvmlInit()
                    self._ready = True
                cards = tuple(_card(index) for index in range(pynvml.nvmlDeviceGetCount()))
            except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
                return ()
            except pynvml.NVMLError as error:
                self._ready = False  # a driver that was reloaded wants a fresh start
                raise Refusal("topology_unknown", f"the NVIDIA driver does not answer: {error}") from error
        return whole(cards)


def _card(index: int) -> Card:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    total: Bytes | None = None
    free: Bytes | None = None
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        total, free = Bytes(int(memory.total)), Bytes(int(memory.free))
    except pynvml.NVMLError_NotSupported:
        pass  # integrated: it has no memory of its own, and nothing is inferred from its name
    try:
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        held = tuple((int(p.pid), int(p.usedGpuMemory or 0)) for p in running)
    except pynvml.NVMLError_NotSupported:
        held = ()
    return Card(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        total_bytes=total,
        free_bytes=free,
        held=held,
    )


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def whole(cards: tuple[Card, ...]) -> tuple[Card, ...]:
    """The sample, if every row of it can be believed. Raises: Refusal `topology_unknown`."""
    if len({card.uuid for card in cards}) != len(cards) or len({card.index for card in cards}) != len(cards):
        raise Refusal("topology_unknown", "the NVIDIA driver names one card twice")
    for card in cards:
        if card.total_bytes is not None and (card.free_bytes or 0) > card.total_bytes + SLACK_BYTES:
            raise Refusal("topology_unknown", f"card {card.index} reports {card.free_bytes} of {card.total_bytes} free")
    return cards
