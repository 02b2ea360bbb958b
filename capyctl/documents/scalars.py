"""Words with a form of their own: names, paths, addresses, references.

Each parser takes text and gives the value, or raises ValueError saying what is allowed.
Source: config 2.
"""

from __future__ import annotations

import ipaddress
import re
import urllib.parse
from collections.abc import Callable
from typing import Any, Final, NewType

import attrs

from capyctl.units import Duration, Percent, Size

Name = NewType("Name", str)  # deployments, hosts, profiles, label keys
Route = NewType("Route", str)  # the `model` value a client sends
AbsolutePath = NewType("AbsolutePath", str)
SecretRef = NewType("SecretRef", str)  # secret://<name>
EnvName = NewType("EnvName", str)
EnvValue = NewType("EnvValue", str)
EnvPattern = NewType("EnvPattern", str)  # NAME or NAME*
Argument = NewType("Argument", str)  # one word of an argument list
HttpsUrl = NewType("HttpsUrl", str)
HostName = NewType("HostName", str)  # a name in DNS
DomainName = NewType("DomainName", str)  # a memory domain: unified, system, gpu0
DeviceName = NewType("DeviceName", str)  # gpu0
GgufPath = NewType("GgufPath", str)  # relative, ends in .gguf
SecretFile = NewType("SecretFile", AbsolutePath)
UrlPath = NewType("UrlPath", str)

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
_ENV: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_PATTERN: Final = re.compile(r"[A-Z_][A-Z0-9_]{0,126}\*?", re.ASCII)
_DNS: Final = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.I
)


@attrs.frozen(order=True)
class SocketAddress:
    """An IP address and a port; written `127.0.0.1:8443` or `[::1]:8443`."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


Written = Duration | Size | Percent | SocketAddress  # values whose text is their form in a document


def parse_name(text: str) -> Name:
    """Lower-case letters, digits, dots, underscores and dashes; at most 64."""
    if not _NAME.fullmatch(text):
        raise ValueError(
            "expected a name of at most 64 lower-case letters, digits, '.', '_', '-', beginning with a letter or digit"
        )
    return Name(text)


def parse_route(text: str) -> Route:
    """One line of printable text; what a client may send as `model`."""
    if not text or len(text) > 256 or not text.isprintable() or text != text.strip():
        raise ValueError("expected one line of printable text, at most 256 characters, no spaces at its ends")
    return Route(text)


def parse_path(text: str) -> AbsolutePath:
    """An absolute path without a step up."""
    if not text.startswith("/"):
        raise ValueError("expected an absolute path (beginning with /)")
    if any(ord(char) < 32 for char in text) or len(text) > 4096 or ".." in text.split("/"):
        raise ValueError("expected an absolute path without '..' or control characters")
    return AbsolutePath(text)


def parse_secret(text: str) -> SecretRef:
    """`secret://<name>`, a file's name below the state directory's secrets."""
    name = text.removeprefix("secret://")
    if name == text or not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(
            "expected secret://<name>, where the name is one of lower-case letters, digits, '.', '_' and '-'"
        )
    return SecretRef(text)


def parse_address(text: str) -> SocketAddress:
    """`ip:port` or `[v6]:port`. Port 0 on loopback is allowed: the bound port is printed and recorded."""
    form = "expected ip:port or [ipv6]:port, such as 127.0.0.1:8443"
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,20}", port, re.ASCII):
        raise ValueError(form)
    if int(port) > 65535:
        raise ValueError(f"the port {port} is too large; the largest is 65535")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        raise ValueError(f"{form}; host names are not read") from None
    if (address.version == 6) != bracketed or getattr(address, "scope_id", None):
        raise ValueError(form)
    if address.is_multicast:
        raise ValueError("a multicast address cannot be listened on")
    if int(port) == 0 and not address.is_loopback:
        raise ValueError("port 0 is read on loopback only")
    return SocketAddress(str(address), int(port))


def parse_https(text: str) -> HttpsUrl:
    """`https://…`, or `http://` on loopback; no user, no fragment."""
    form = "expected an https:// URL without user or fragment"
    try:
        parts = urllib.parse.urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError(form) from None
    if (
        not host
        or parts.username is not None
        or parts.fragment
        or not text.isascii()
        or not text.isprintable()
        or " " in text
    ):
        raise ValueError(form)
    if parts.scheme == "https":
        return HttpsUrl(text)
    if parts.scheme == "http" and is_loopback_name(host):
        return HttpsUrl(text)
    raise ValueError(form)


def is_loopback_name(host: str) -> bool:
    """Whether a URL's host is this machine by its own words: `127.example.com` is a name like any other."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_env_name(text: str) -> EnvName:
    """A variable's name."""
    if not _ENV.fullmatch(text):
        raise ValueError("expected a variable name: letters, digits and '_', not beginning with a digit")
    return EnvName(text)


def parse_env_value(text: str) -> EnvValue:
    """One line of at most 4 KiB."""
    if len(text.encode()) > 4096 or any(char in text for char in "\n\r\x00"):
        raise ValueError("expected one line of at most 4 KiB")
    return EnvValue(text)


def parse_env_pattern(text: str) -> EnvPattern:
    """`NAME` or `NAME*`; a bare `*` is refused."""
    if not _PATTERN.fullmatch(text):
        raise ValueError("expected an upper-case variable name, with at most one * at its end")
    return EnvPattern(text)


def parse_argument(text: str) -> Argument:
    """One word of an argument list: not empty, at most 8 KiB."""
    if not text or len(text.encode()) > 8192:
        raise ValueError("expected an argument of at most 8 KiB")
    return Argument(text)


def parse_host_name(text: str) -> HostName:
    """A DNS name."""
    if not _DNS.fullmatch(text):
        raise ValueError("expected a host name such as huggingface.co")
    return HostName(text.lower())


def parse_domain(text: str) -> DomainName:
    """`unified`, `system` or `gpu<n>`."""
    if not re.fullmatch(r"unified|system|gpu[0-9]{1,3}", text, re.ASCII):
        raise ValueError("expected unified, system or gpu<n>")
    return DomainName(text)


def parse_device(text: str) -> DeviceName:
    """`gpu<n>`."""
    if not re.fullmatch(r"gpu(0|[1-9][0-9]{0,2})", text, re.ASCII):
        raise ValueError("expected gpu<n>, such as gpu0")
    return DeviceName(text)


def parse_gguf(text: str) -> GgufPath:
    """A path inside the model's directory that ends in .gguf."""
    if not text.endswith(".gguf") or text.startswith("/") or ".." in text.split("/") or not text.isprintable():
        raise ValueError("expected a relative path inside the model's directory that ends in .gguf")
    return GgufPath(text)


def parse_url_path(text: str) -> UrlPath:
    """`/health`: a path on the engine's own listener."""
    if not re.fullmatch(r"/[A-Za-z0-9._~/-]{0,255}", text, re.ASCII):
        raise ValueError("expected a path such as /health")
    return UrlPath(text)


def parse_peer(text: str) -> str:
    """An IP address other machines can reach."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise ValueError("expected an IP address") from None
    if address.is_loopback or address.is_unspecified or address.is_multicast:
        raise ValueError("expected an IP address that other machines can reach")
    return str(address)


PeerAddress = NewType("PeerAddress", str)

# type, parser, what a message calls it
PARSERS: Final[tuple[tuple[Any, Callable[[str], Any], str], ...]] = (
    (Name, parse_name, "a name"),
    (Route, parse_route, "text"),
    (AbsolutePath, parse_path, "an absolute path"),
    (SecretFile, parse_path, "an absolute path"),
    (SecretRef, parse_secret, "a secret reference"),
    (SocketAddress, parse_address, "an address"),
    (HttpsUrl, parse_https, "a URL"),
    (EnvName, parse_env_name, "a variable name"),
    (EnvValue, parse_env_value, "text"),
    (EnvPattern, parse_env_pattern, "a variable name"),
    (Argument, parse_argument, "text"),
    (HostName, parse_host_name, "a host name"),
    (DomainName, parse_domain, "a memory domain"),
    (DeviceName, parse_device, "a device name"),
    (GgufPath, parse_gguf, "a path"),
    (UrlPath, parse_url_path, "a path"),
    (PeerAddress, parse_peer, "an IP address"),
)
