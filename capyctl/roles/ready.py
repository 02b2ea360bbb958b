"""What a role says when it is ready, to people, to log readers and to the service manager."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence

import attrs

from capyctl import __version__
from capyctl.server.log import Log

log = Log("role")

NO_ENGINE = "none; register one: capyctl engine add <path>"


@attrs.frozen(kw_only=True)
class Ready:
    """The facts of the ready banner. Addresses as bound."""

    role: str
    inference: str
    key_required: bool
    management: str
    engines: Sequence[str]
    state: str
    credentials: str

    @property
    def lines(self) -> Mapping[str, str]:
        """Key lines in their fixed order (cli 6.2)."""
        return {
            "Inference": f"{self.inference} ({'API key required' if self.key_required else 'no API key'})",
            "Management": self.management,
            "Engines": ",".join(self.engines) or NO_ENGINE,
            "State": self.state,
            "Credentials": self.credentials,
        }

    @property
    def text(self) -> str:
        """The banner."""
        width = max(map(len, self.lines)) + 3
        rows = "".join(f"  {key:<{width}}{value}\n" for key, value in self.lines.items())
        return f"capyctl {__version__} {self.role} ready\n\n{rows}"


def announce(ready: Ready, form: str) -> None:
    """Print the banner on stderr, or one JSON object with the same facts."""
    if form == "json":
        log.info(
            "role.ready",
            role=ready.role,
            version=__version__,
            inference=ready.inference,
            inference_authentication="api_key" if ready.key_required else "none",
            management=ready.management,
            engines=list(ready.engines),
            state=ready.state,
            credentials=ready.credentials,
        )
        return
    sys.stderr.write(ready.text)
    sys.stderr.flush()


def warn_open(address: str, form: str) -> None:
    """Say before the first accept that anybody who reaches the endpoint may use it."""
    lines = (
        f"warning: the inference endpoint on {address} asks for no API key.",
        "         Whoever reaches this address can use every model here, and the power bill.",
        "         Ask for the key (authentication: api_key), or listen on 127.0.0.1 alone.",
    )
    if form == "json":
        log.warning("inference.unauthenticated", address=address, advice=" ".join(line.strip() for line in lines))
        return
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def say_left(engines: int, form: str) -> None:
    """Say at the end of a role that engines go on without it, when some do."""
    if not engines:
        return
    if form == "json":
        log.info("role.engines_left", engines=engines, advice="capyctl drain standalone ends them before a stop")
        return
    one = engines == 1
    sys.stderr.write(
        f"{engines} {'engine keeps' if one else 'engines keep'} running; the next start takes "
        f"{'it' if one else 'them'} over, `capyctl drain standalone` ends {'it' if one else 'them'} before a stop\n"
    )
    sys.stderr.flush()


def tell_service_manager(state: str) -> None:
    """`READY=1` or `STOPPING=1` to systemd, when it started us and asked to be told."""
    where = os.environ.get("NOTIFY_SOCKET", "")
    if not where.startswith(("/", "@")):
        return
    address = "\0" + where[1:] if where.startswith("@") else where
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
        try:
            notify.sendto(state.encode(), address)
        except OSError as wrong:
            log.warning("service_manager.unreachable", reason=wrong.strerror)
