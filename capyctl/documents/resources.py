"""`resources`: the memory of a deployment as its operator states it, instead of what would be derived.

Short (`gpu`, `ram`: held while it starts, runs and stops) or phase by phase, bytes per memory domain and the
devices that are in use. Whatever the block contradicts by itself is refused when it is written; what only a host
can say (which domains it has, whether it fits there) is asked when it is resolved.

Source: memory 4.1, 7; config 7.4.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal

import attrs

from capyctl.documents.scalars import DeviceName, DomainName
from capyctl.documents.strict import Wrong, no_more_than
from capyctl.units import Size

PHASES: Final = ("cold", "ready", "parking", "parked", "wake")
SERVING: Final = ("cold", "ready", "parking", "wake")
"""Phases in which the engine has its memory; `parked` is what is left of it."""
SYSTEM: Final = "system"
UNIFIED: Final = "unified"
LEAST_RAM: Final = Size(64 << 20)
"""What an engine process holds of the RAM at the least: what is charged below it, no observation tells from nothing."""


@attrs.frozen(kw_only=True)
class DeviceClaim:
    """A card, by name or any; `sharing` absent means the host's."""

    id: DeviceName | None = None
    sharing: Literal["shared", "exclusive"] | None = None


@attrs.frozen(kw_only=True)
class PhaseAllocation:
    """Bytes of one memory domain during one phase; `host_kv_bytes` is a part of `bytes`, not beside it."""

    domain: DomainName
    bytes: Size
    host_kv_bytes: Size = attrs.field(factory=lambda: Size(0))

    @property
    def on_card(self) -> bool:
        """Whether the domain is a card's."""
        return self.domain not in (SYSTEM, UNIFIED)

    def __attrs_post_init__(self) -> None:
        if self.host_kv_bytes > self.bytes:
            raise Wrong(
                ("host_kv_bytes",), f"is {self.host_kv_bytes} of {self.bytes}: it is a part of bytes, raise those"
            )
        if self.host_kv_bytes.bytes and self.on_card:
            raise Wrong(("host_kv_bytes",), f"is a cache in the RAM, and {self.domain} is a card; state it on {SYSTEM}")


@attrs.frozen(kw_only=True)
class PhaseResources:
    """What one phase holds, and which devices it uses."""

    allocations: tuple[PhaseAllocation, ...] = attrs.field(default=(), validator=no_more_than(64))
    devices: tuple[DeviceClaim, ...] = attrs.field(default=(), validator=no_more_than(64))

    def __attrs_post_init__(self) -> None:
        for path, names, what in (
            ("allocations", [str(one.domain) for one in self.allocations], "one amount"),
            ("devices", [str(one.id) for one in self.devices if one.id is not None], "one claim"),
        ):
            twice = next((name for name, times in Counter(names).items() if times > 1), None)
            if twice is not None:
                raise Wrong((path,), f"names {twice} twice; keep {what}")
        self._check_domains()

    def _check_domains(self) -> None:
        cards = self.cards
        if cards and self.on(UNIFIED) is not None:
            raise Wrong(
                ("allocations",), f"names {UNIFIED} beside {cards[0]}: a machine has one of them; keep those it has"
            )
        if self.on(UNIFIED) is not None and self.on(SYSTEM) is not None:
            raise Wrong(
                ("allocations",), f"names {UNIFIED} and {SYSTEM}: on unified memory there is no {SYSTEM}; add them up"
            )
        if cards and self.on(SYSTEM) is None:
            raise Wrong(
                ("allocations",),
                f"names {cards[0]} and not {SYSTEM}: an engine on a card needs RAM too; state its bytes",
                "missing_system_allocation",
            )
        for claim in self.devices:
            if claim.id is not None and str(claim.id) not in cards and self.on(UNIFIED) is None:
                raise Wrong(("devices",), f"claims {claim.id} and holds nothing there; state the bytes of {claim.id}")

    @property
    def cards(self) -> tuple[str, ...]:
        """The card domains that hold something, in the document's order."""
        return tuple(str(one.domain) for one in self.allocations if one.on_card and one.bytes.bytes)

    @property
    def ram(self) -> PhaseAllocation | None:
        """What it holds where its processes lie: the RAM beside cards, or the one memory of the machine."""
        return next((one for one in self.allocations if not one.on_card), None)

    @property
    def total_bytes(self) -> int:
        return sum(one.bytes.bytes for one in self.allocations)

    @property
    def ids(self) -> tuple[str, ...]:
        """The devices that are claimed by name."""
        return tuple(str(claim.id) for claim in self.devices if claim.id is not None)

    def on(self, domain: str) -> Size | None:
        """What is stated on `domain`, None for nothing."""
        return next((one.bytes for one in self.allocations if one.domain == domain), None)


@attrs.frozen(kw_only=True)
class Resources:
    """Declared memory: short (`gpu`, `ram`; held while it starts, runs and stops) or phase by phase."""

    gpu: Size | None = None
    ram: Size | None = None
    cold: PhaseResources | None = None
    ready: PhaseResources | None = None
    parking: PhaseResources | None = None
    parked: PhaseResources | None = None
    wake: PhaseResources | None = None

    @property
    def short(self) -> bool:
        return self.gpu is not None or self.ram is not None

    @property
    def stated(self) -> dict[str, PhaseResources]:
        """The phases that are stated, by name."""
        found = ((phase, getattr(self, phase)) for phase in PHASES)
        return {phase: block for phase, block in found if block is not None}

    @property
    def serving_bytes(self) -> int:
        """All that it holds while it serves, in all its memory."""
        if self.gpu is not None and self.ram is not None:
            return self.gpu.bytes + self.ram.bytes
        return 0 if self.ready is None else self.ready.total_bytes

    @property
    def claims(self) -> tuple[DeviceClaim, ...]:
        """The devices that it serves on; none in the short form, which leaves that to the deployment."""
        return () if self.ready is None else self.ready.devices

    def __attrs_post_init__(self) -> None:
        if self.short:
            self._check_short()
        else:
            self._check_phases()

    def _check_short(self) -> None:
        if self.stated:
            phase = next(iter(self.stated))
            raise Wrong((), f"states gpu and ram, and {phase} as well; keep the short form or the phases")
        for name, other in (("gpu", "ram"), ("ram", "gpu")):
            size: Size | None = getattr(self, name)
            if size is None:
                raise Wrong((name,), f"is required beside {other}; state both, or the phases instead")
            if size.bytes == 0:
                raise Wrong((name,), "is 0B; state what the engine holds there, or the phases instead")
        if self.ram is not None and self.ram < LEAST_RAM:
            raise Wrong(("ram",), too_little(self.ram))

    def _check_phases(self) -> None:
        stated = self.stated
        for phase in ("cold", "ready"):
            if phase not in stated:
                raise Wrong((phase,), "is required, unless gpu and ram are stated instead")
        ready = stated["ready"]
        for phase in SERVING:
            block = stated.get(phase)
            if block is None:
                continue
            if not block.total_bytes:
                raise Wrong((phase, "allocations"), "hold nothing; state the bytes of each memory domain")
            if block.devices and not block.cards and block.on(UNIFIED) is None:
                raise Wrong((phase, "devices"), "claims a device and holds nothing on a card; state its bytes")
            check_ram(phase, block)
            if block is not ready:
                _check_covers(block, ready, phase)
        if "parked" in stated:
            _check_residue(stated["parked"], ready)


def check_ram(phase: str, block: PhaseResources) -> None:
    """Refuse a phase in which the engine's processes would live in no memory. Raises: Wrong."""
    ram = block.ram
    if ram is not None and ram.bytes >= LEAST_RAM:
        return
    where = (phase, "allocations")
    if ram is None:
        raise Wrong(where, f"name neither {SYSTEM} nor {UNIFIED}, where its processes lie; state its bytes")
    code = "missing_system_allocation" if ram.domain == SYSTEM and block.cards else "invalid_config"
    raise Wrong((*where, block.allocations.index(ram), "bytes"), too_little(ram.bytes, f" on {ram.domain}"), code)


def too_little(stated: Size, where: str = "") -> str:
    """`is 0B on system; an engine's processes …`"""
    return f"is {stated}{where}; an engine's processes hold {LEAST_RAM} of RAM at the least. State what yours hold"


def _check_covers(block: PhaseResources, ready: PhaseResources, phase: str) -> None:
    """What an engine serves on, it uses while it gets there and while it leaves. Source: memory 7."""
    lacking = [device for device in ready.ids if device not in block.ids]
    if not lacking and len(block.devices) < len(ready.devices):
        lacking = ["a device"]
    if lacking:
        raise Wrong((phase, "devices"), f"lacks {lacking[0]}, which ready claims; claim it in {phase} too")
    for card in ready.cards:
        if card not in block.cards:
            raise Wrong((phase, "allocations"), f"holds nothing on {card}, where ready does; state its bytes")


def _check_residue(parked: PhaseResources, ready: PhaseResources) -> None:
    """A parked engine is the ready one less what it gave back. What it claims rests with it. Source: memory 4.1, 17."""
    for index, left in enumerate(parked.allocations):
        served = ready.on(left.domain) or Size(0)
        if left.bytes > served:
            raise Wrong(
                ("parked", "allocations", index, "bytes"),
                f"is {left.bytes} on {left.domain}, more than the {served} of ready; a park only gives memory back",
            )
