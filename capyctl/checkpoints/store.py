"""Measuring and re-checking the checkpoints of a host, with one cache of stat identities. Everything blocks.

What is measured follows from the family that will load it: a GGUF for llama.cpp, safetensors and their
`config.json` for engines that live in Python environments, any files for a custom engine.

Source: engines 5 (checkpoint gate); config 5, 7.2; memory 5.4.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from capyctl.checkpoints import sources
from capyctl.checkpoints.digest import Progress, StatCache, digest_listing
from capyctl.checkpoints.directory import Listing, list_files, pick_gguf, resolve_model
from capyctl.checkpoints.drafts import draft_facts
from capyctl.checkpoints.facts import gguf_facts
from capyctl.checkpoints.reading import steadily
from capyctl.checkpoints.tensor_facts import tensor_facts
from capyctl.documents.deployment import Deployment, parse_deployment
from capyctl.documents.engine_config import FAMILIES
from capyctl.documents.model_source import Http, HuggingFace, Local
from capyctl.errors import Refusal

LLAMACPP, CUSTOM = "llamacpp", "custom"


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
      family_of: the family of a profile; without it the document's own word counts.
      built: whether a profile's engine has compiled its kernels on this host already.
      parsers: what is to be known of the parsers of a deployment on these files, for people.
      profile_facts: what else of a profile decides about memory: `host_env`, `default_kv_bytes`.
      trust_declared: a digest that a document declares is taken without reading large files (config 5).
    """

    def __init__(
        self,
        cache_file: Path | None,
        models_root: Path | None,
        fixed_args: Callable[[str], Sequence[str]] | None = None,
        *,
        family_of: Callable[[str], str] | None = None,
        built: Callable[[str], bool] | None = None,
        parsers: Callable[[Deployment, Path], Mapping[str, str]] | None = None,
        profile_facts: Callable[[str], Mapping[str, Any]] | None = None,
        trust_declared: bool = False,
    ) -> None:
        self.cache = StatCache(cache_file)
        self.models_root = models_root
        self.fixed_args = fixed_args
        self.family_of = family_of
        self.built = built
        self.parsers = parsers
        self.profile_facts = profile_facts
        self.trust_declared = trust_declared

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
        expected = wanted.model.expected_digest

        def look() -> tuple[dict[str, Any], str]:
            # Headers first: a file that is no model is refused before its gigabytes are read.
            listing, facts = self._looked_at(model_dir, wanted)
            if self.trust_declared and expected is not None:
                self.cache.vouch(listing, expected)
                return facts, expected
            return facts, digest_listing(listing, self.cache, progress=progress).digest

        facts, digest = steadily(look)
        if expected is not None and expected != digest:
            raise Refusal(
                "checkpoint_mismatch",
                f"{model_dir} has the digest {digest} and model.content_fingerprint expects {expected}",
            )
        return Checkpoint(digest=digest, weight_bytes=int(facts["weight_bytes"]), facts=facts)

    def facts(self, model_dir: Path, wanted: Deployment) -> Mapping[str, Any]:
        """What `measure` would find of the directory, without its digest: only headers and small files are read.

        Raises: Refusal as `measure`, but for the digest.
        """
        return steadily(lambda: self._looked_at(model_dir, wanted))[1]

    def facts_here(
        self, wanted: Deployment, downloads: str, check: Callable[[HuggingFace | Http], None] = lambda source: None
    ) -> Mapping[str, Any] | None:
        """`facts` of a deployment's model where it lies here; None while one of its sources is not downloaded.

        Args:
          downloads: the directory below which downloads lie.
          check: refuses a source that is not there and that would never be fetched.
        Raises: Refusal as `resolve`, `facts` and `check`.
        """
        family = self._family(wanted)
        missing = [
            source
            for source, files in sources.fetched(wanted, family)
            if not os.path.isdir(os.path.join(downloads, sources.place_of(source, files)))
        ]
        for source in missing:
            check(source)
        if missing:
            return None
        here = sources.placed(wanted, family, downloads)
        assert isinstance(here.model.source, Local)  # it is placed
        return self.facts(self.resolve(here.model.source.path), here)

    def _looked_at(self, model_dir: Path, wanted: Deployment) -> tuple[Listing, dict[str, Any]]:
        listing = list_files(model_dir, self.models_root)
        fixed = list(self.fixed_args(wanted.profile)) if self.fixed_args is not None else []
        facts = {**self._facts(listing, wanted, fixed), "host_args": fixed}
        if self.built is not None and self.built(wanted.profile):
            facts["kernels_built"] = True
        if self.profile_facts is not None:
            facts |= self.profile_facts(wanted.profile)
        if self.parsers is not None:
            facts |= self.parsers(wanted, model_dir)
        return listing, facts

    def _facts(self, listing: Listing, wanted: Deployment, fixed: Sequence[str]) -> dict[str, Any]:
        family = self._family(wanted)
        if family == LLAMACPP:
            block = wanted.engine_config.llamacpp
            pick = pick_gguf(
                listing,
                block.gguf_file if block is not None else None,
                block.mmproj_file if block is not None else None,
            )
            facts = gguf_facts(listing, pick)
            draft = draft_facts(wanted, family, [*fixed, *wanted.engine_config.extra_args], self.models_root)
            return facts if draft is None else {**facts, "draft": draft}
        if family == CUSTOM:
            # Its program decides what it reads; its memory is stated, so this is for time limits and status alone.
            return {"format": "files", "weight_bytes": listing.total_bytes, "context_trained": None}
        facts = tensor_facts(listing)
        draft = draft_facts(wanted, family, [*fixed, *wanted.engine_config.extra_args], self.models_root)
        return facts if draft is None else {**facts, "draft": draft}

    def _family(self, wanted: Deployment) -> str:
        if self.family_of is not None:
            return self.family_of(wanted.profile)
        return wanted.family if wanted.family in (*FAMILIES, CUSTOM) else LLAMACPP

    def verify(self, model_dir: Path, digest: str, progress: Progress | None = None) -> None:
        """P-DIGEST: what lies there now is what was measured. Small files are read again, changed ones as well.

        Raises: Refusal `checkpoint_mismatch`.
        """

        def look() -> str:
            listing = list_files(model_dir, self.models_root)
            if self.cache.vouched(listing, digest):
                return digest
            return digest_listing(listing, self.cache, progress=progress).digest

        present = steadily(look)
        if present != digest:
            raise Refusal(
                "checkpoint_mismatch",
                f"the files of {model_dir} changed since the deployment was accepted. Deploy it again to use them",
                details={"expected": digest, "actual": present},
            )
