"""Who may ask: named keys, kept as digests, compared in constant time.

Only SHA-256 digests of accepted tokens stay here, so that neither a dump nor a log can hold a key.
Every stored digest is compared, whichever matched first: timing tells neither match length nor rank.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import attrs

_TOKEN: Final = re.compile(rb"[A-Za-z0-9\-._~+/]{1,512}={0,2}", re.ASCII)


@attrs.frozen(kw_only=True)
class Caller:
    """Who asks. `allowed` are the deployments that this key may use; None is all."""

    name: str
    allowed: frozenset[str] | None = None


@attrs.frozen(kw_only=True)
class Key:
    """One accepted key: a name for logs and records, the digest of its token, what it may use."""

    name: str
    digest: bytes = attrs.field(repr=False)
    allowed: frozenset[str] | None = None

    @classmethod
    def of(cls, name: str, token: str, allowed: Iterable[str] | None = None) -> Key:
        """The key whose token is `token`; the token itself is not kept."""
        digest = hashlib.sha256(token.encode()).digest()
        return cls(name=name, digest=digest, allowed=None if allowed is None else frozenset(allowed))


class Keyring(Protocol):
    """Decides from the values of all `Authorization` headers of a request, in order."""

    @property
    def open(self) -> bool:
        """Whether no key is asked for: the explicit `authentication: none`."""

    def caller(self, authorization: Sequence[bytes]) -> Caller | None:
        """Who asks, or None when the request may not pass."""


@attrs.frozen
class Keys:
    """The keys that are accepted now. Exactly one `Authorization: Bearer` header passes."""

    accepted: tuple[Key, ...] = ()
    open: bool = attrs.field(default=False, init=False)

    def caller(self, authorization: Sequence[bytes]) -> Caller | None:
        """The owner of the one bearer token, or None."""
        if len(authorization) != 1:
            return None
        scheme, _, token = authorization[0].partition(b" ")
        if scheme.lower() != b"bearer" or not _TOKEN.fullmatch(token):
            return None
        digest = hashlib.sha256(token).digest()
        found: Key | None = None
        for key in self.accepted:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return None if found is None else Caller(name=found.name, allowed=found.allowed)


@attrs.frozen
class NoKeys:
    """`authentication: none`: everybody passes, and any `Authorization` header is ignored."""

    open: bool = attrs.field(default=True, init=False)

    def caller(self, authorization: Sequence[bytes]) -> Caller | None:
        """Anybody."""
        return Caller(name="anonymous")
