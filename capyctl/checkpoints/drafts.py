"""The drafter beside a checkpoint: which directory it is, and what it adds to weights and cache.

A drafter is sized, not digested. Where several are named, the last one wins, as in the engines.
Source: memory 5.4.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capyctl.checkpoints.arguments import said
from capyctl.checkpoints.directory import Listing, list_files, resolve_model
from capyctl.checkpoints.tensor_facts import tensor_facts
from capyctl.documents.deployment import Deployment
from capyctl.documents.model_source import Local
from capyctl.errors import Refusal

_OPTIONS = {
    "sglang": ("--speculative-draft-model", "--speculative-draft-model-path"),
    "tensorfold": ("--drafter",),
}


def draft_directory(document: Deployment, family: str, args: Sequence[str], models_root: Path | None) -> Path | None:
    """The drafter's directory, or None when nothing names one.

    Args:
      args: host-fixed and extra arguments, in the order the engine gets them.
    Raises: Refusal `invalid_root`; `unsupported` for a drafter that would have to be fetched.
    """
    source = document.model.draft
    if source is not None:
        if not isinstance(source, Local):
            raise Refusal("unsupported", f"{document.name}: model.draft: name a directory of this host")
        return resolve_model(source.path, models_root)
    named = _named(family, args)
    # A hub's name, or the engine's own word for "none", is no directory: nothing is sized by it.
    return resolve_model(named, models_root) if named is not None and os.path.isabs(named) else None


def _named(family: str, args: Sequence[str]) -> str | None:
    if family == "vllm":
        try:
            config = json.loads(said(args, "--speculative-config") or "null")
        except (ValueError, RecursionError):
            return None  # the option policy refuses what is no flat object
        name = config.get("model") if isinstance(config, dict) else None
        return name if isinstance(name, str) else None
    found = [said(args, option) for option in _OPTIONS.get(family, ())]
    return next((name for name in reversed(found) if name), None)


def draft_facts(
    document: Deployment, family: str, args: Sequence[str], models_root: Path | None
) -> dict[str, Any] | None:
    """`weight_bytes`, `cache_values`, `layers` and `not_derivable` of the drafter, or None when there is none.

    Raises: Refusal as `draft_directory`; `unsafe_file` as listing it says.
    """
    directory = draft_directory(document, family, args, models_root)
    if directory is None:
        return None
    listing = list_files(directory, models_root)
    try:
        facts = tensor_facts(listing)
    except Refusal as refusal:
        return {
            "weight_bytes": _tensor_files_bytes(listing),
            "cache_values": 0,
            "not_derivable": f"the draft model cannot be read: {refusal.message}",
        }
    return {name: facts[name] for name in ("weight_bytes", "cache_values", "layers", "not_derivable")}


def _tensor_files_bytes(listing: Listing) -> int:
    return sum(file.size_bytes for file in listing.files if file.path.endswith(".safetensors"))
