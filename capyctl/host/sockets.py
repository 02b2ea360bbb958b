"""Listening TCP sockets, and whose they are: who takes connections where, as the kernel has it.

The kernel is asked for listeners alone (sock_diag), since its text tables also list every connection that has just
ended, of which a busy router leaves thousands. Where it does not answer that, the tables are read.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs

from capyctl.host.identity import PROC

_LISTEN = 10
_SOCK_DIAG, _BY_FAMILY = 4, 20
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3
_HEAD = struct.Struct("=IHHII")  # length, type, flags, sequence, port id
_ASK = struct.Struct("=BBBBI48x")  # family, protocol, extensions, padding, states; any socket
_FOUND = struct.Struct("=BBBB2s2x16s16x12xIIIII")  # family, state, …, port, address, …, inode


@attrs.frozen(order=True)
class Listening:
    """A socket that takes connections. `inode` is its name in `/proc/<pid>/fd`, `address` an IP address as text."""

    inode: str
    address: str
    port: int


def listening(pid: int | None = None, proc: Path = PROC) -> tuple[Listening, ...]:
    """Every TCP socket that listens in the network namespace of a process, or of this one; blocking.

    Empty for a process that has ended.
    """
    place = "self" if pid is None else str(pid)
    if proc == PROC and (pid is None or _shared(pid)):
        try:
            return tuple(sorted([*_asked(socket.AF_INET), *_asked(socket.AF_INET6)]))
        except OSError:  # a kernel without sock_diag, or a sandbox that forbids it
            pass
    return tuple(sorted([*_read(proc / place / "net/tcp"), *_read(proc / place / "net/tcp6")]))


def inodes(pid: int, proc: Path = PROC) -> set[str]:
    """The sockets that a process has open; blocking. A process that ended has none."""
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


def _shared(pid: int) -> bool:
    """Whether a process lives in our network namespace."""
    try:
        return os.readlink(PROC / str(pid) / "ns/net") == os.readlink(PROC / "self/ns/net")
    except OSError:
        return False


def _asked(family: int) -> Iterator[Listening]:
    """What sock_diag says. Raises: OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
        kernel.settimeout(5)
        ask = _ASK.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << _LISTEN)
        kernel.send(_HEAD.pack(_HEAD.size + len(ask), _BY_FAMILY, _REQUEST_DUMP, 0, 0) + ask)
        while True:
            answer, at = kernel.recv(1 << 16), 0
            while at < len(answer):
                length, kind, *_ = _HEAD.unpack_from(answer, at)
                body = at + _HEAD.size
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    (code,) = struct.unpack_from("=i", answer, body)
                    raise OSError(-code, os.strerror(-code))
                _, _, _, _, port, address, *_, inode = _FOUND.unpack_from(answer, body)
                packed = address[:4] if family == socket.AF_INET else address
                yield Listening(str(inode), str(ipaddress.ip_address(packed)), int.from_bytes(port, "big"))
                at += (length + 3) & ~3


def _read(table: Path) -> Iterator[Listening]:
    """What a text table says; nothing when its process ended or the kernel has no IPv6."""
    try:
        lines = table.read_text("ascii").splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if int(fields[3], 16) == _LISTEN:
            address, _, port = fields[1].rpartition(":")
            yield Listening(fields[9], _address(address), int(port, 16))


def _address(text: str) -> str:
    """An address as the kernel prints it: words of 32 bits in the machine's byte order."""
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
