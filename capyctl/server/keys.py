"""Named inference keys: made here, kept as digests, given to the router as a ring.

The first key lives in the credentials file and may use every model. Each further key has a name and may
be confined to some deployments.

A key is shown in the answer to the command that made it, and whoever lost that answer sends the command
again. So that no token has to be stored for it, a token is computed: from the admin token, which stands in no
database, and from fresh random bits, which stand beside the receipt. Neither says anything without the other.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Sequence
from typing import Final, Protocol

import attrs
import trio

from capyctl.control.events import Command
from capyctl.errors import Refusal
from capyctl.fsm.types import Millis
from capyctl.router.answers import clean
from capyctl.router.keys import Caller, Keys
from capyctl.router.keys import Key as RingKey
from capyctl.server.store import KEY_RECEIPTS_MAX, Key, KeyReceipt

FIRST: Final = "api_key"
KEYS_MAX: Final = 256
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)


class KeyStore(Protocol):
    """Where named keys are kept."""

    def named_keys(self) -> list[Key]: ...

    def key_receipts(self) -> list[KeyReceipt]: ...

    async def put_key(self, key: Key, receipt: KeyReceipt) -> None: ...

    async def drop_key(self, name: str, receipt: KeyReceipt) -> bool: ...


@attrs.define(eq=False)
class KeyRing:
    """`router.Keyring`: the first key and the named ones.

    `secret` is the admin token; `open`: no key is asked for.
    """

    first: str = attrs.field(repr=False)
    secret: str = attrs.field(repr=False)
    store: KeyStore
    open: bool = False
    _receipts: dict[str, KeyReceipt] = attrs.field(init=False)
    _one: trio.Lock = attrs.field(factory=trio.Lock)  # the second of two equal commands finds the first's receipt
    _named: dict[str, Key] = attrs.field(init=False)
    _ring: Keys = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._named = {key.name: key for key in self.store.named_keys()}
        self._receipts = {receipt.command: receipt for receipt in self.store.key_receipts()}
        self._build()

    def caller(self, authorization: Sequence[bytes]) -> Caller | None:
        """Who asks, or None when the request may not pass."""
        if self.open:
            return Caller(name="anonymous")
        return self._ring.caller(authorization)

    def named(self) -> list[Key]:
        """Every named key, by name."""
        return [self._named[name] for name in sorted(self._named)]

    async def create(
        self,
        command: Command,
        name: str,
        models: Sequence[str] | None,
        now_ms: Millis,
        *,
        deployed: Collection[str],
    ) -> tuple[KeyReceipt, str | None]:
        """Make a key; the second value is its token. The same command again has the same answer, and no effect.

        Its token is then None when the admin token has changed meanwhile: nobody can compute it any more.

        Args:
          models: names of deployments that it is confined to; None for all, those of later too.
          deployed: the names that there are now.
        Raises: Refusal `invalid_request` for the name or the models, `idempotency_conflict` when it is taken or the
        command's identity was used for another, `category_limit`; Failure when it cannot be stored.
        """
        async with self._one:
            known = self._recall(command)
            if known is not None:
                token = None if known.salt is None else self._token(command, known.salt)
                if token is not None and _digest(token) != known.token_digest:
                    token = None
                return known, token
            if not _NAME.fullmatch(name) or name == FIRST:
                raise Refusal("invalid_request", "a key's name is a-z, 0-9, '.', '_' or '-', at most 64 of them")
            if models is not None:
                _check_models(models, deployed)
            if name in self._named:
                raise Refusal("idempotency_conflict", f"there is a key {name}. Delete it and make another")
            if len(self._named) >= KEYS_MAX:
                raise Refusal("category_limit", f"there are {KEYS_MAX} keys, as many as there may be")
            salt = secrets.token_hex(32)
            token = self._token(command, salt)
            receipt = KeyReceipt(
                command=command.key,
                digest=command.digest,
                name=name,
                models=None if models is None else tuple(models),
                created_at_ms=now_ms,
                salt=salt,
                token_digest=_digest(token),
            )
            key = Key(name=name, digest=_digest(token), models=receipt.models, created_at_ms=now_ms)
            await self.store.put_key(key, receipt)
            self._named[name] = key
            self._remember(receipt)
            self._build()
            return receipt, token

    async def delete(self, command: Command, name: str, now_ms: Millis) -> None:
        """Forget a key; requests in progress go on. The same command again has no effect.

        Raises: Refusal `not_found`, `idempotency_conflict`; Failure when it cannot be stored, and the key stays.
        """
        async with self._one:
            if self._recall(command) is not None:
                return
            key = self._named.get(name)
            if key is None:
                raise Refusal("not_found", f"there is no key {name}")
            receipt = KeyReceipt(
                command=command.key, digest=command.digest, name=name, models=key.models, created_at_ms=now_ms
            )
            del self._named[name]
            self._build()  # before the disk: a key that is being deleted opens nothing more
            try:
                await self.store.drop_key(name, receipt)
            except BaseException:
                self._named[name] = key
                self._build()
                raise
            self._remember(receipt)

    def _recall(self, command: Command) -> KeyReceipt | None:
        known = self._receipts.get(command.key)
        if known is not None and known.digest != command.digest:
            raise Refusal(
                "idempotency_conflict",
                "this request identity was used for another command; leave it out, or repeat that command",
            )
        return known

    def _remember(self, receipt: KeyReceipt) -> None:
        self._receipts[receipt.command] = receipt
        if len(self._receipts) > KEY_RECEIPTS_MAX:
            del self._receipts[next(iter(self._receipts))]

    def _token(self, command: Command, salt: str) -> str:
        made = hmac.digest(self.secret.encode(), f"inference key\0{salt}\0{command.key}".encode(), "sha256")
        return f"capy-{base64.urlsafe_b64encode(made).decode().rstrip('=')}"

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


def _check_models(models: Sequence[str], deployed: Collection[str]) -> None:
    """A key that opens nothing is a slip. Raises: Refusal."""
    if not models:
        raise Refusal(
            "invalid_request", "models: is empty, so the key would open nothing; leave it out for every model"
        )
    for name in models:
        if name not in deployed:
            raise Refusal(
                "invalid_request",
                f"models: there is no deployment {clean(name[:64])}. Deploy it first, or name one of those that "
                "GET /management/v1/deployments lists",
            )


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
