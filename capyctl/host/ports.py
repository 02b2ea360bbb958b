"""Loopback ports for engines: one per launch, leased until that launch is proven gone or never begun.

A free port is found by binding it and closing it again, with SO_REUSEADDR and without ever listening,
so that a forked child keeps no listener and a past connection in TIME_WAIT is no obstacle. A port that
someone else listens on is passed over; only when none is left the launch is refused.
Source: engines 5; lifecycle 23 (24).
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from pathlib import Path

import attrs

from capyctl.errors import Refusal, check
from capyctl.fsm.types import Incarnation
from capyctl.host import sockets
from capyctl.host.identity import PROC

LOOPBACK = "127.0.0.1"
FIRST, LAST = 8100, 8199


_REACHED = frozenset({LOOPBACK, "0.0.0.0", "::", f"::ffff:{LOOPBACK}"})
"""Where one may listen to take a connection to LOOPBACK."""


@attrs.define
class PortLeases:
    """Who holds which port of `first`-`last`."""

    first: int = FIRST
    last: int = LAST
    _held: dict[int, Incarnation] = attrs.field(factory=dict)
    _next: int = 0

    def lease(self, incarnation: Incarnation) -> int:
        """A port that nobody holds and nobody listens on; the search goes round, so ports rest between launches.

        Raises: Refusal `port_conflict` when there is none.
        """
        count = self.last - self.first + 1
        foreign = 0
        for step in range(count):
            port = self.first + (self._next + step) % count
            if port in self._held:
                continue
            if taken(port):
                foreign += 1
                continue
            self._next = (port - self.first + 1) % count
            self._held[port] = incarnation
            return port
        raise Refusal(
            "port_conflict",
            f"no engine port is free in {self.first}-{self.last}: {len(self._held)} leased to engines, "
            f"{foreign} used by other programs. Widen endpoint_port_range or stop what listens there",
        )

    def restore(self, port: int, incarnation: Incarnation) -> None:
        """Take the lease of a launch that the journal names, inside the range or not."""
        check(self._held.get(port, incarnation) == incarnation, f"port {port} is leased to one launch")
        self._held[port] = incarnation

    def give_back(self, incarnation: Incarnation) -> None:
        """End the lease; the caller holds the proof that the launch is gone or never began."""
        self._held = {port: holder for port, holder in self._held.items() if holder != incarnation}

    def of(self, incarnation: Incarnation) -> int | None:
        return next((port for port, holder in self._held.items() if holder == incarnation), None)


def taken(port: int) -> bool:
    """Whether someone listens on the port on loopback (or everywhere)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return True
            raise
    return False


def listened_by(port: int, pids: Iterable[int], proc: Path = PROC) -> bool | None:
    """Whether processes of `pids` hold every socket that takes connections to `port` on loopback; None: nobody does.

    A port answers for whoever took it, so an engine is known by its processes' own descriptors. Several sockets may
    share a port (SO_REUSEPORT, which llama.cpp sets too), and each gets some of the connections: one of another
    program is enough for a no.
    """
    wanted = {one.inode for one in sockets.listening(proc=proc) if one.port == port and one.address in _REACHED}
    if not wanted:
        return None
    return wanted <= {inode for pid in pids for inode in sockets.inodes(pid, proc)}
