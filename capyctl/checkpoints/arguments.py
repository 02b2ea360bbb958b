"""What an engine's raw arguments say about memory: the profile's own first, then the deployment's. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capyctl.documents.deployment import Deployment


def arguments(facts: Mapping[str, Any], document: Deployment) -> list[str]:
    """Host-fixed and extra arguments, in the order the engine gets them."""
    return [*map(str, facts.get("host_args") or ()), *document.engine_config.extra_args]


def said(args: Sequence[str], name: str) -> str | None:
    """The last value given to a long option, "" for one without a value, None when it is not given.

    Abbreviations count: the engines' parsers take any unambiguous prefix.
    """
    found = None
    for index, word in enumerate(args):
        option, equals, value = word.partition("=")
        option = option.replace("_", "-")
        if option != name and not (len(option) >= 8 and name.startswith(option)):
            continue
        following = args[index + 1] if index + 1 < len(args) else ""
        found = value if equals else ("" if following.startswith("--") else following)
    return found


def counted(args: Sequence[str], name: str) -> int | None:
    """The positive whole number given to an option; None where there is none, or something else."""
    word = said(args, name)
    return int(word) if word is not None and word.isascii() and word.isdecimal() and 0 < len(word) < 10 else None
