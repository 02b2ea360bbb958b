"""Named inference keys: made here, shown once, kept as digests, given to the router as a ring.

The first key lives in the credentials file and may use every model. Each further key has a name and may
be confined to some deployments.
"""

from __future__ import annotations

import re
import secrets
import sqlite3
from collections.abc import Sequence
from typing import Final, Protocol

import attrs

from capyctl.errors import Refusal
from capyctl.fsm.types import Millis
from capyctl.router.keys import Caller, Keys
from capyctl.router.keys import Key as RingKey
from capyctl.server.store import Key

FIRST: Final = "api_key"
KEYS_MAX: Final = 256
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)


class KeyStore(Protocol):
    """Where named keys are kept."""

    def named_keys(self) -> list[Key]: ...

    async def put_key(self, key: Key) -> None: ...

    async def drop_key(self, name: str) -> bool: ...


@attrs.define(eq=False)
class KeyRing:
    """`router.Keyring`: the first key and the named ones. `open` when no key is asked for."""

    first: str = attrs.field(repr=False)
    store: KeyStore
    open: bool = False
    _named: dict[str, Key] = attrs.field(init=False)
    _ring: Keys = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._named = {key.name: key for key in self.store.named_keys()}
        self._build()

    def caller(self, authorization: Sequence[bytes]) -> Caller | None:
        """Who asks, or None when the request may not pass."""
        if self.open:
            return Caller(name="anonymous")
        return self._ring.caller(authorization)

    def named(self) -> list[Key]:
        """Every named key, by name."""
        return [self._named[name] for name in sorted(self._named)]

    async def create(self, name: str, models: Sequence[str] | None, now_ms: Millis) -> tuple[Key, str]:
        """Make a key; the second value is its token, which is shown now and never again.

        Raises: Refusal `invalid_request` for the name, `idempotency_conflict` when it is taken, `category_limit`.
        """
        if not _NAME.fullmatch(name) or name == FIRST:
            raise Refusal("invalid_request", "a key's name is a-z, 0-9, '.', '_' or '-', at most 64 of them")
        if name in self._named:
            raise Refusal(
                "idempotency_conflict", f"there is a key {name}; its token was shown once. Delete it and make another"
            )
        if len(self._named) >= KEYS_MAX:
            raise Refusal("category_limit", f"there are {KEYS_MAX} keys, as many as there may be")
        token = f"capy-{secrets.token_urlsafe(32)}"
        digest = RingKey.of(name, token).digest.hex()
        key = Key(name=name, digest=digest, models=None if models is None else tuple(models), created_at_ms=now_ms)
        self._named[name] = key  # first, so that two creations of one name do not both wait for the disk
        try:
            await self.store.put_key(key)
        except sqlite3.Error as wrong:
            del self._named[name]
            raise Refusal("idempotency_conflict", f"the key {name} cannot be stored: {wrong}") from wrong
        except BaseException:
            del self._named[name]
            raise
        self._build()
        return key, token

    async def delete(self, name: str) -> None:
        """Forget a key; requests in progress go on. Raises: Refusal `not_found`."""
        if name not in self._named:
            raise Refusal("not_found", f"there is no key {name}")
        del self._named[name]
        self._build()  # before the disk: a key that is being deleted opens nothing more
        await self.store.drop_key(name)

    def _build(self) -> None:
        first = RingKey.of(FIRST, self.first)
        named = [
            RingKey(
                name=key.name,
                digest=bytes.fromhex(key.digest),
                allowed=None if key.models is None else frozenset(key.models),
            )
            for key in self._named.values()
        ]
        self._ring = Keys((first, *named))
