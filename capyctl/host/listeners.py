"""What an engine listens on besides its port: anything but loopback is a door that CapyCTL does not guard.

An engine takes requests without the router's keys and limits; one that listens on every address serves the
network. So the sockets of a launch's whole group are read, by inode, out of its own network namespace.
Source: engines 10 (listener check).
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from capyctl.host.identity import PROC

_LISTEN = "0A"


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
        sockets = _sockets(pid, proc)
        if sockets:
            found |= {
                Listener(address, port, pid)
                for inode, address, port in _listening(pid, proc)
                if inode in sockets and not is_loopback(address)
            }
    return tuple(sorted(found))


def is_loopback(address: str) -> bool:
    """127.0.0.0/8, ::1, and the IPv4 ones written as IPv6."""
    ip = ipaddress.ip_address(address)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def _listening(pid: int, proc: Path) -> Iterator[tuple[str, str, int]]:
    """(inode, address, port) of every listening TCP socket in the process's network namespace."""
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (proc / str(pid) / table).read_text("ascii").splitlines()[1:]
        except OSError:  # it ended, or the kernel has no IPv6
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN:
                address, _, port = fields[1].rpartition(":")
                yield fields[9], _address(address), int(port, 16)


def _address(text: str) -> str:
    """An address as the kernel prints it: words of 32 bits in the machine's byte order."""
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def _sockets(pid: int, proc: Path) -> set[str]:
    """Inodes of the sockets that a process has open."""
    found: set[str] = set()
    try:
        entries = os.listdir(proc / str(pid) / "fd")
    except OSError:
        return found
    for entry in entries:
        try:
            link = os.readlink(proc / str(pid) / "fd" / entry)
        except OSError:  # closed while we looked
            continue
        if link.startswith("socket:["):
            found.add(link[len("socket:[") : -1])
    return found
