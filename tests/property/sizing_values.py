"""Machines of every kind, by their policy."""

from __future__ import annotations

from capyctl.fsm.types import Bytes, Device, Domain, HostId
from capyctl.ledger.types import DomainKind, DomainPolicy, HostPolicy

GIB, MIB = 1 << 30, 1 << 20


def domain(
    kind: DomainKind, total: int, managed: int, reserve: int = 0, device: str | None = None, parked: int = 0
) -> DomainPolicy:
    return DomainPolicy(
        kind=kind,
        capacity_bytes=Bytes(total),
        managed_bytes=Bytes(managed),
        reserve_bytes=Bytes(reserve),
        parked_bytes=Bytes(parked),
        device=Device(device) if device else None,
    )


def host(**domains: DomainPolicy) -> HostPolicy:
    return HostPolicy(host=HostId("H"), name="box", domains={Domain(name): limits for name, limits in domains.items()})


def plain(managed: int = 64 * GIB) -> HostPolicy:
    """A machine without a GPU."""
    return host(unified=domain(DomainKind.UNIFIED, 2 * managed, managed))


def spark(managed: int = 97 * GIB) -> HostPolicy:
    """One pool with a GPU on it."""
    return host(unified=domain(DomainKind.UNIFIED, 122 * GIB, managed, device="gpu0"))


def cards() -> HostPolicy:
    return host(
        system=domain(DomainKind.DISTINCT, 64 * GIB, 32 * GIB),
        gpu0=domain(DomainKind.DEVICE, 24 * GIB, 22 * GIB, device="gpu0"),
        gpu1=domain(DomainKind.DEVICE, 48 * GIB, 44 * GIB, device="gpu1"),
    )
