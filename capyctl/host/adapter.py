"""What the host asks of the registered installations and of the checkpoint room.

`capyctl.engines` and `capyctl.checkpoints` satisfy these by shape, without importing this file. What it asks
of one engine is `capyctl.engines.adapter`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from capyctl.engines.adapter import Adapter


class EngineProfile(Protocol):
    """One registered installation, as lists show it (the fields of session's Profile)."""

    @property
    def name(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def custom(self) -> bool: ...
    @property
    def deep_park(self) -> str: ...
    @property
    def executable(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def revision(self) -> int: ...


class EngineRegistry(Protocol):
    """The merged profiles of `engines.yaml` and of the role document. Reads are from memory."""

    def profiles(self) -> Sequence[EngineProfile]: ...

    def adapter(self, profile: str) -> Adapter:
        """Raises: Refusal `not_found` naming the registered profiles."""


class Measured(Protocol):
    """A checkpoint as the digest found it."""

    @property
    def digest(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...


class Checkpoints(Protocol):
    """Blocking; the host calls it in a thread. A cache of stat identities is theirs."""

    def measure(
        self, model_dir: Path, document: Mapping[str, Any], progress: Callable[[int, int], None] | None = None
    ) -> Measured:
        """Digest the directory and read its headers. Raises: Refusal `checkpoint_unusable`, `not_found`, …

        Args:
          progress: told often, in the calling thread, how many bytes have been read of how many.
        """

    def verify(self, model_dir: Path, digest: str) -> None:
        """P-DIGEST before a launch: stat identities, else a full rehash. Raises: Refusal `checkpoint_mismatch`."""
