"""Measuring and re-checking the checkpoints of a host, with one cache of stat identities. Everything blocks.

Source: engines 5 (checkpoint gate); config 7.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from capyctl.checkpoints.digest import Progress, StatCache, digest_listing
from capyctl.checkpoints.directory import list_files, pick_gguf, resolve_model
from capyctl.checkpoints.facts import gguf_facts
from capyctl.documents.deployment import Deployment, parse_deployment
from capyctl.errors import Refusal


@attrs.frozen(kw_only=True)
class Checkpoint:
    """A model directory as it was measured. `facts` is what sizing takes, JSON-able."""

    digest: str
    weight_bytes: int
    facts: Mapping[str, Any]


class CheckpointStore:
    """Measures model directories below one models directory, or named by absolute paths.

    Args:
      cache_file: where hashes are remembered; None keeps them in memory.
      fixed_args: the arguments that a profile adds to every launch: some of them decide about memory.
    """

    def __init__(
        self,
        cache_file: Path | None,
        models_root: Path | None,
        fixed_args: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        self.cache = StatCache(cache_file)
        self.models_root = models_root
        self.fixed_args = fixed_args

    def resolve(self, model: str) -> Path:
        """The directory of a local model. Raises: Refusal `invalid_root`."""
        return resolve_model(model, self.models_root)

    def measure(
        self, model_dir: Path, document: Mapping[str, Any] | Deployment, progress: Progress | None = None
    ) -> Checkpoint:
        """Digest the directory and read its headers.

        Raises: Refusal `checkpoint_unusable`, `unsafe_file`, `invalid_root`; `checkpoint_mismatch` when the
          document expects another digest.
        """
        wanted = document if isinstance(document, Deployment) else parse_deployment(document, "the deployment")
        block = wanted.engine_config.llamacpp
        listing = list_files(model_dir, self.models_root)
        pick = pick_gguf(
            listing,
            block.gguf_file if block is not None else None,
            block.mmproj_file if block is not None else None,
        )
        # Headers first: a file that is no model is refused before its gigabytes are read.
        facts = gguf_facts(listing, pick)
        digest = digest_listing(listing, self.cache, progress=progress).digest
        expected = wanted.model.expected_digest
        if expected is not None and expected != digest:
            raise Refusal(
                "checkpoint_mismatch",
                f"{model_dir} has the digest {digest} and model.content_fingerprint expects {expected}",
            )
        fixed = list(self.fixed_args(wanted.profile)) if self.fixed_args is not None else []
        return Checkpoint(digest=digest, weight_bytes=int(facts["weight_bytes"]), facts={**facts, "host_args": fixed})

    def verify(self, model_dir: Path, digest: str, progress: Progress | None = None) -> None:
        """P-DIGEST: what lies there now is what was measured. Small files are read again, changed ones as well.

        Raises: Refusal `checkpoint_mismatch`.
        """
        present = digest_listing(list_files(model_dir, self.models_root), self.cache, progress=progress).digest
        if present != digest:
            raise Refusal(
                "checkpoint_mismatch",
                f"the files of {model_dir} changed since the deployment was accepted. Deploy it again to use them",
                details={"expected": digest, "actual": present},
            )
