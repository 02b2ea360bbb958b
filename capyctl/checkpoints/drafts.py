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
from capyctl.checkpoints.directory import Listing, list_files, pick_gguf, resolve_model
from capyctl.checkpoints.tensor_facts import tensor_facts
from capyctl.documents.deployment import Deployment
from capyctl.documents.model_source import Local
from capyctl.errors import Refusal

_OPTIONS = {
    "sglang": ("--speculative-draft-model", "--speculative-draft-model-path"),
    "tensorfold": ("--drafter",),
    "llamacpp": ("--model-draft", "--spec-draft-model", "-md"),
}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


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
        return name if isinstance(name, str) else said(args, "--spec-model")
    for at in reversed(range(len(args))):  # the last one wins, by whichever of its spellings
        for option in _OPTIONS.get(family, ()):
            if name := said(args[at : at + 2], option):
                return name
    return None


def draft_facts(
    document: Deployment, family: str, args: Sequence[str], models_root: Path | None
) -> dict[str, Any] | None:
    """`weight_bytes`, `cache_values`, `layers`, `not_derivable` and, where it can be read, `context_limits` of the
    drafter, or None when there is none.

    Raises: Refusal as `draft_directory`; `unsafe_file` as listing it says.
    """
    if family == "llamacpp":
        return _draft_file_facts(args)
    directory = draft_directory(document, family, args, models_root)
    if directory is None:
        return None
    listing = list_files(directory, models_root)
    try:
        facts = tensor_facts(listing)
    except Refusal as refusal:
        return {
            "weight_bytes": _weight_files_bytes(listing),
            "cache_values": 0,
            "layers": None,
            "not_derivable": f"the draft model cannot be read: {refusal.message}",
        }
    names = ("weight_bytes", "cache_values", "layers", "not_derivable", "context_limits")
    return {name: facts[name] for name in names}


def _draft_file_facts(args: Sequence[str]) -> dict[str, Any] | None:
    """The GGUF that llama.cpp is given for drafting, with its shards. Its cache is not ours to derive."""
    named = _named("llamacpp", args)
    if named is None or not os.path.isabs(named):
        return None
    file = Path(named)
    try:
        listing = list_files(file.parent)
        shards = pick_gguf(listing, file.name, None).shards if listing.find(file.name) is not None else ()
    except Refusal as refusal:
        raise Refusal(refusal.code, f"the draft model {file}: {refusal.message}") from None
    if not shards:
        raise Refusal("checkpoint_unusable", f"the draft model {file} is not there")
    sizes = [found.size_bytes for name in shards if (found := listing.find(name)) is not None]
    return {
        "weight_bytes": sum(sizes),
        "cache_values": 0,
        "layers": None,
        "not_derivable": "the draft model's cache is not derived",
    }


def _weight_files_bytes(listing: Listing) -> int:
    """What may be weights of a drafter that could not be read: many are pickles, which nobody here opens."""
    return sum(file.size_bytes for file in listing.files if file.path.endswith(_WEIGHTS))
