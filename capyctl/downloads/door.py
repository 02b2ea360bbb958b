"""The one way out: HTTP requests of downloads, each hop checked before anything is sent.

Theory of operation. `Door.open` asks for a URL and follows redirects by itself. Each hop is judged as the first
was: scheme, name, addresses; the connection goes to an address that was judged. What is secret is sent to the
origin it was given for and is left out from the first hop to anywhere else. Environment proxies are not used, since
nobody could judge what they connect to. A `Line` is the socket in use: whoever watches can cut it from another
thread, and the reader then ends at once. Source: security 7.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Final

import attrs

from capyctl import __version__
from capyctl.documents.model_source import shown_url
from capyctl.documents.scalars import is_loopback_name
from capyctl.downloads.reach import Reach
from capyctl.errors import Refusal

REDIRECTS_MAX: Final = 5
WAIT_MAX_S: Final = 60.0
SHOWN_MAX: Final = 400
REDIRECTING: Final = (301, 302, 303, 307, 308)
TRY_LATER: Final = (408, 425, 429, 500, 502, 503, 504)


class Interrupted(Exception):
    """It did not work this time. `after_s`: what the other side asked to wait."""

    def __init__(self, why: str, after_s: float | None = None) -> None:
        super().__init__(why)
        self.why, self.after_s = why, after_s


class Stopped(Exception):
    """Nobody wants it any more."""


@attrs.define(eq=False)
class Line:
    """The socket in use. `cut` and `stop` are for other threads; what reads ends with Interrupted or Stopped."""

    stopped: threading.Event = attrs.field(factory=threading.Event)
    _lock: threading.Lock = attrs.field(factory=threading.Lock)
    _socket: socket.socket | None = None
    _why: str | None = None

    def take(self, sock: socket.socket | None) -> None:
        """The socket that is used from now on. Raises: Stopped."""
        with self._lock:
            self._socket, self._why = sock, None
        self.check_stopped()

    def goes_on_as(self, sock: socket.socket) -> None:
        """What is used is another object now, of the same connection. Raises: Stopped, Interrupted as cut before."""
        with self._lock:
            self._socket = sock
        self.check()

    def cut(self, why: str) -> None:
        """End what is being read now; it may be tried again."""
        with self._lock:
            self._why = why
            self._shut()

    def stop(self) -> None:
        """End it for good."""
        self.stopped.set()
        with self._lock:
            self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                self._socket.shutdown(socket.SHUT_RDWR)

    def check_stopped(self) -> None:
        """Raises: Stopped."""
        if self.stopped.is_set():
            raise Stopped

    def check(self) -> None:
        """Raises: Stopped; Interrupted when what is being read was cut."""
        self.check_stopped()
        if self._why is not None:
            raise Interrupted(self._why)


class _Connection(http.client.HTTPConnection):
    """A connection to a judged address, with TLS for the name."""

    def __init__(self, door: Door, parts: urllib.parse.SplitResult, line: Line) -> None:
        self._door, self._line, self._tls = door, line, parts.scheme == "https"
        super().__init__(parts.hostname or "", parts.port or (443 if self._tls else 80), timeout=door.wait_s)

    def connect(self) -> None:
        wrong: OSError = OSError("it has no address")
        for family, address in self._door.reach.addresses(self.host, self.port):
            self._line.check_stopped()
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(self._door.wait_s)
                self._line.take(sock)
                sock.connect(address)
                self._line.check()  # cut meanwhile: nothing is asked
                if self._tls:
                    # Taken before the handshake, which can be cut as well then: wrapping empties the plain socket.
                    sock = self._door.tls().wrap_socket(sock, server_hostname=self.host, do_handshake_on_connect=False)
                    self._line.goes_on_as(sock)
                    sock.do_handshake()
                self.sock = sock
                return
            except OSError as error:
                sock.close()
                self._line.check()  # cut: the next address would be another wait
                wrong = error
                if isinstance(error, ssl.SSLCertVerificationError):
                    break
            except BaseException:
                sock.close()
                raise
        raise wrong


@attrs.define(eq=False)
class Answer:
    """An answer whose body is still to be read. `url` is the last hop's, without what may be secret."""

    status: int
    headers: http.client.HTTPMessage
    url: str
    _response: http.client.HTTPResponse
    _connection: http.client.HTTPConnection
    _line: Line

    @property
    def length(self) -> int | None:
        """How many bytes the body is said to have. None also where that is said twice, in two ways."""
        said = set(self.headers.get_all("Content-Length") or ())
        stated = said.pop() if len(said) == 1 else ""
        return int(stated) if stated.isascii() and stated.isdigit() and len(stated) < 19 else None

    def read(self, most: int) -> bytes:
        """The next bytes, b"" at the end. Raises: Interrupted, Stopped."""
        try:
            with _as_interrupted(self.url, self._line):
                return self._response.read1(most)
        finally:
            self._line.check()

    def whole(self, most: int) -> bytes:
        """The rest of the body. Raises also: Refusal `too_large`."""
        pieces, size = [], 0
        while piece := self.read(1 << 16):
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise Refusal("too_large", f"the answer of {self.url} is larger than {most >> 20} MiB")
        if self.length is not None and size != self.length:
            raise Interrupted(f"the answer of {self.url} ended early")
        return b"".join(pieces)

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: type[BaseException] | None, wrong: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()


@attrs.define(eq=False)
class Door:
    """Opens URLs. `wait_s` bounds each single wait for the network; `trusted` replaces the system's certificates."""

    reach: Reach
    wait_s: float = 30.0
    trusted: ssl.SSLContext | None = None

    def tls(self) -> ssl.SSLContext:
        """Verified TLS; SSL_CERT_FILE and SSL_CERT_DIR add an organisation's own authority."""
        if self.trusted is None:
            self.trusted = ssl.create_default_context()
        return self.trusted

    def check(self, url: str) -> None:
        """Refuse a URL that `open` would refuse before it asks anybody. Raises: Refusal `not_materializable`."""
        parts = _parts(url, "the source")
        host = parts.hostname or ""
        self.reach.check_named(host)
        self._check_scheme(parts, _shown(parts))
        self.reach.check_written(host)

    def open(
        self,
        url: str,
        line: Line,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        called: str | None = None,
    ) -> Answer:
        """Ask for a URL with GET and follow where it leads, at most five times.

        Args:
          token: sent to the URL's own origin alone.
          called: what a URL that is a secret is called in messages, and what it redirects to.
        Returns: a 200 or 206, or the 416 of a range that is not there.
        Raises: Refusal `unauthorized`, `not_found`, `not_materializable`; Interrupted; Stopped.
        """
        origin = _parts(url, called or "the source")
        self.reach.check_named(origin.hostname or "")
        parts, asked = origin, dict(headers or {})
        for _ in range(REDIRECTS_MAX + 1):
            secret = token if _origin(parts) == _origin(origin) else None
            if secret is None:
                token = None  # a way back through another host does not get it either
            answer = self._ask(parts, line, asked, secret, called or _shown(parts))
            if answer.status not in REDIRECTING:
                return _good(answer, token_sent=secret is not None)
            with answer:
                target = answer.headers.get("Location")
            if not target:
                raise Refusal("not_materializable", f"{answer.url} redirects to nowhere")
            try:
                parts = _parts(
                    urllib.parse.urljoin(urllib.parse.urlunsplit(parts), target), f"where {answer.url} redirects"
                )
            except ValueError:
                raise Refusal("not_materializable", f"{answer.url} redirects to what is no URL") from None
            if origin.scheme == "https" and parts.scheme != "https":
                raise Refusal("not_materializable", f"{answer.url} redirects to plain HTTP, which is not followed")
        raise Refusal("not_materializable", f"{called or _shown(origin)} redirects more than {REDIRECTS_MAX} times")

    def _ask(
        self, parts: urllib.parse.SplitResult, line: Line, headers: Mapping[str, str], token: str | None, where: str
    ) -> Answer:
        self._check_scheme(parts, where)
        line.check_stopped()
        connection = _Connection(self, parts, line)
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        sent = {"Accept-Encoding": "identity", "Connection": "close", "User-Agent": f"capyctl/{__version__}", **headers}
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"
        try:
            with _as_interrupted(where, line):
                connection.request("GET", target, headers=sent)
                response = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        return Answer(response.status, response.headers, where, response, connection, line)

    def _check_scheme(self, parts: urllib.parse.SplitResult, where: str) -> None:
        if parts.scheme == "http" and not self.reach.plain_http and not is_loopback_name(parts.hostname or ""):
            reason = f"{where} is plain HTTP, which host.model_sources.plain_http does not allow; use https"
            raise Refusal("not_materializable", reason)


def _parts(url: str, what: str) -> urllib.parse.SplitResult:
    """A URL taken apart. Raises: Refusal `not_materializable` for one that is not followed."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise Refusal("not_materializable", f"{what}: it is no URL") from None
    if parts.scheme not in ("http", "https"):
        raise Refusal("not_materializable", f"{what}: the scheme {parts.scheme or '(none)'} is not used, only https is")
    if not host or parts.username is not None or not url.isascii() or not url.isprintable() or " " in url:
        raise Refusal("not_materializable", f"{what}: expected https://host/path without a user")
    return parts._replace(fragment="")


def _shown(parts: urllib.parse.SplitResult) -> str:
    """A URL for a line of text: a redirect may be as long as a header."""
    shown = shown_url(urllib.parse.urlunsplit(parts))
    return shown if len(shown) <= SHOWN_MAX else f"{shown[:SHOWN_MAX]}…"


def _origin(parts: urllib.parse.SplitResult) -> tuple[str, str, int]:
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _good(answer: Answer, *, token_sent: bool) -> Answer:
    if answer.status in (200, 206, 416):
        encoding = ", ".join(answer.headers.get_all("Content-Encoding") or ("identity",))
        if encoding.lower() == "identity":
            return answer
        answer.__exit__(None, None, None)
        raise Refusal("not_materializable", f"{answer.url} answers with Content-Encoding {encoding[:32]!a}")
    with answer:
        raise _bad(answer, token_sent)


def _bad(answer: Answer, token_sent: bool) -> Exception:
    said = f"{answer.url} answered {answer.status}"
    if answer.status in TRY_LATER:
        return Interrupted(said, _retry_after(answer.headers))
    if answer.status in (401, 403):
        how = (
            "the token may not read it"
            if token_sent
            else "no token was sent; state host.model_sources.huggingface_token_file or CAPYCTL_HF_TOKEN"
        )
        return Refusal("unauthorized", f"{said}: {how}")
    if answer.status in (404, 410):
        return Refusal("not_found", f"{said}: there is no such repository, commit or file, or it needs a token")
    return Refusal("not_materializable", said)


def _retry_after(headers: Mapping[str, Any] | http.client.HTTPMessage) -> float | None:
    stated = str(headers.get("Retry-After", ""))
    return min(float(stated), WAIT_MAX_S) if stated.isascii() and stated.isdigit() and len(stated) < 9 else None


@contextlib.contextmanager
def _as_interrupted(where: str, line: Line) -> Iterator[None]:
    """What a network may do, as Interrupted; a certificate that is not believed is refused."""
    try:
        yield
    except ssl.SSLCertVerificationError as wrong:
        raise Refusal(
            "not_materializable", f"{where}: its certificate is not trusted ({wrong.verify_message})"
        ) from None
    except TimeoutError:
        line.check()
        raise Interrupted(f"{where} did not answer in time") from None
    except (OSError, http.client.HTTPException) as wrong:
        line.check()
        raise Interrupted(f"{where}: {_word(wrong)}") from None
    except UnicodeError:
        raise Refusal("not_materializable", f"{where}: the host's name cannot be looked up") from None


def _word(wrong: Exception) -> str:
    if isinstance(wrong, http.client.IncompleteRead):
        return "the connection ended early"
    if isinstance(wrong, OSError):
        return wrong.strerror or str(wrong) or type(wrong).__name__
    # What a server sent instead of HTTP stays out of the line.
    said = isinstance(wrong, http.client.LineTooLong) or type(wrong) is http.client.HTTPException
    return str(wrong) if said else "what it answered is no HTTP"
