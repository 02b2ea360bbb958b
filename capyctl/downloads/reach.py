"""Which machines a download may talk to: names, and the addresses behind them.

A name is looked up once, every address is judged, and the connection is made to a judged address: a name that
answers otherwise on a second look changes nothing. Source: security 7, F14; config 5.2.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs

from capyctl.documents.scalars import is_loopback_name
from capyctl.errors import Refusal

Found = tuple[int, Any]
"""(address family, socket address) as `getaddrinfo` says it; Any: its shape depends on the family."""

Lookup = Callable[[str, int], Sequence[Found]]

_EMBEDS: Final = ipaddress.ip_network("64:ff9b::/96")
_SPECIAL: Final = tuple(
    ipaddress.ip_network(network) for network in ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20", "fec0::/10")
)
"""Kept for protocols, relays, documents and sites, which this Python calls global. Source: IANA's registries."""


def look_up(host: str, port: int) -> list[Found]:
    """Every address of a name. Raises: OSError."""
    rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in rows]


@attrs.frozen(kw_only=True)
class Reach:
    """What the operator lets downloads reach.

    Args:
      allowed_hosts: when not empty, sources name no other hosts than these; they alone may be at private addresses.
      plain_http: whether a source on another machine may be fetched without TLS.
    """

    allowed_hosts: frozenset[str] = frozenset()
    plain_http: bool = False
    lookup: Lookup = look_up

    def check_named(self, host: str) -> None:
        """Refuse a source whose own host is not on the list. Where it redirects to is judged by address alone."""
        if self.allowed_hosts and host.lower() not in self.allowed_hosts:
            raise Refusal(
                "not_materializable",
                f"{host} is not one of host.model_sources.allowed_hosts ({', '.join(sorted(self.allowed_hosts))})",
            )

    def addresses(self, host: str, port: int) -> list[Found]:
        """The addresses of a host that may be connected to. Raises: Refusal `not_materializable`; OSError."""
        found = list(self.lookup(host, port))
        if host.lower() in self.allowed_hosts:
            return found
        return _public(host, found)

    def check_written(self, host: str) -> None:
        """Refuse a host that says by itself that it may not be connected to: an address, however it is spelled.

        Raises: Refusal `not_materializable`. Names are judged once they are looked up.
        """
        if host.lower() in self.allowed_hosts:
            return
        try:
            rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            rows = []
        found: list[Found] = [(family, address) for family, _, _, _, address in rows]
        if not found and is_loopback_name(host):
            found = [(socket.AF_INET, ("127.0.0.1", 0))]
        _public(host, found)


def _public(host: str, found: Sequence[Found]) -> list[Found]:
    """Those addresses of a host that are public. Raises: Refusal `not_materializable` when it has others alone."""
    public = [(family, address) for family, address in found if is_public(str(address[0]))]
    if found and not public:
        at = str(found[0][1][0])
        where = "is" if host == at else f"is at {at}, which is"
        add = f"add {host}" if ":" not in host else "give it a name and add that"  # the list holds no IPv6 address
        raise Refusal(
            "not_materializable",
            f"{host} {where} not a public address. If that is meant, {add} to host.model_sources.allowed_hosts",
        )
    return public


def is_public(text: str) -> bool:
    """Whether an address is one of the internet's: not of this machine, a private network, a link or a group."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _EMBEDS:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    if any(address in network for network in _SPECIAL if network.version == address.version):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved and not address.is_unspecified
