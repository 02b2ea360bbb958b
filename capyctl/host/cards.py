"""NVIDIA cards through NVML. Every call here blocks, and a sick driver blocks for long: call it in a thread.

A sample is whole or void: two cards with one index or UUID, or more memory used and free than there is,
mean that the driver talks nonsense, and half a sample would be judged as a small machine. A card that does not
answer is no nonsense: it is in the sample, with the driver's words and without figures, and the others count.
The library is `libnvidia-ml.so.1` as the dynamic loader finds it, so `LD_LIBRARY_PATH` of the role has its say.
Source: memory 3.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

import attrs
import pynvml

from capyctl.errors import Refusal
from capyctl.fsm.types import Bytes

SLACK_BYTES = 64 << 20  # used + free may exceed total by this much: the driver reads them one after another
_T = TypeVar("_T")
_log = logging.getLogger("capyctl.host.cards")


@attrs.frozen(kw_only=True)
class Card:
    """One card at one look. A card without memory of its own (integrated) has `total_bytes` None.

    `held` is (pid, bytes) of each process on it; bytes are None where the driver lists a process and not what it
    holds, and `held` is None where it lists no processes at all. `fault`: it did not answer, and why.
    """

    index: int
    uuid: str | None
    name: str = ""
    total_bytes: Bytes | None = None
    free_bytes: Bytes | None = None
    used_bytes: Bytes | None = None
    held: tuple[tuple[int, int | None], ...] | None = ()
    divided: bool = False  # MIG: engines would see slices of it, with other UUIDs and other sizes
    fault: str = ""

    @property
    def discrete(self) -> bool:
        """It answers, and has memory of its own."""
        return not self.fault and self.total_bytes is not None


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
            except pynvml.NVMLError as error:
                self._forget()
                if isinstance(error, (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded)):
                    return ()
                raise Refusal("topology_unknown", f"the NVIDIA driver does not answer: {error}") from error
        return whole(cards)

    def _forget(self) -> None:
        """A driver that was reloaded wants a fresh start."""
        if self._ready:
            self._ready = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError as error:
                _log.debug("nvml.shutdown", extra={"fields": {"why": str(error)}})


def _card(index: int) -> Card:
    """One card; one that does not answer has its fault."""
    uuid: str | None = None
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _known(lambda: _text(pynvml.nvmlDeviceGetUUID(handle)))
        memory = _if_supported(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
        running = _known(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
        mig = _known(lambda: pynvml.nvmlDeviceGetMigMode(handle))
        name = _known(lambda: _text(pynvml.nvmlDeviceGetName(handle)))
    except (pynvml.NVMLError_Uninitialized, pynvml.NVMLError_DriverNotLoaded):
        raise  # the driver, not this card
    except pynvml.NVMLError as error:
        return Card(index=index, uuid=uuid, fault=str(error))
    return Card(
        index=index,
        uuid=uuid,
        name=name or "",
        total_bytes=None if memory is None else Bytes(int(memory.total)),
        free_bytes=None if memory is None else Bytes(int(memory.free)),
        used_bytes=None if memory is None else Bytes(int(memory.used)),
        held=None if running is None else tuple((int(p.pid), _amount(p.usedGpuMemory)) for p in running),
        divided=mig is not None and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
    )


def _if_supported(ask: Callable[[], _T]) -> _T | None:
    """An answer, or None from a card that has none to give. Nothing is inferred from its name."""
    try:
        return ask()
    except pynvml.NVMLError_NotSupported:
        return None


def _known(ask: Callable[[], _T]) -> _T | None:
    """An answer that a card may owe us and still be of use; None without it. A lost card is of none."""
    try:
        return ask()
    except pynvml.NVMLError_GpuIsLost:
        raise
    except pynvml.NVMLError:
        return None


def _amount(used: int | None) -> int | None:
    return None if used is None else int(used)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def whole(cards: tuple[Card, ...]) -> tuple[Card, ...]:
    """The sample, if every row of it can be believed. Raises: Refusal `topology_unknown`."""
    uuids = [card.uuid for card in cards if card.uuid is not None]
    if len(set(uuids)) != len(uuids) or len({card.index for card in cards}) != len(cards):
        raise Refusal("topology_unknown", "the NVIDIA driver names one card twice")
    for card in cards:
        if card.total_bytes is None:
            continue
        total, free, used = card.total_bytes, card.free_bytes or 0, card.used_bytes or 0
        if min(total, free, used) < 0 or total == 0 or used + free > total + SLACK_BYTES:
            raise Refusal(
                "topology_unknown",
                f"card {card.index} reports {used} bytes used and {free} bytes free of {total}",
            )
    return cards
