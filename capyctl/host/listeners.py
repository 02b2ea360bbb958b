"""What an engine listens on besides its port: anything but loopback is a door that CapyCTL does not guard.

An engine takes requests without the router's keys and limits; one that listens on every address serves the
network. So the sockets of a launch's whole group are read, by inode, out of its own network namespace.
Source: engines 10 (listener check).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from pathlib import Path

import attrs

from capyctl.host import sockets
from capyctl.host.identity import PROC


@attrs.frozen(order=True)
class Listener:
    """A socket that listens. `address` is an IP address as text."""

    address: str
    port: int
    pid: int

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port} (pid {self.pid})"


def exposed(pids: Iterable[int], proc: Path = PROC) -> tuple[Listener, ...]:
    """Sockets of these processes that listen beyond loopback; blocking. A process that ended listens nowhere."""
    found = set()
    for pid in pids:
        held = sockets.inodes(pid, proc)
        if held:
            found |= {
                Listener(one.address, one.port, pid)
                for one in sockets.listening(pid, proc)
                if one.inode in held and not is_loopback(one.address)
            }
    return tuple(sorted(found))


def is_loopback(address: str) -> bool:
    """127.0.0.0/8, ::1, and the IPv4 ones written as IPv6."""
    ip = ipaddress.ip_address(address)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
