"""What somebody who typed a command that does not exist most likely meant. Pure: words in, words out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

ALIKE = 0.7  # `deplyo` and `deploy` are 0.83 alike, `chat` and `start` 0.44
NAMED = {"deploy": "model", "validate": "config"}  # which resource a bare name or file is of, where it is no deployment


def command(words: Sequence[str], known: Mapping[str, Sequence[str]]) -> str:
    """A command line for `words` of which some are unknown, empty when nothing comes near.

    `known` maps an action to its resources; one without resources is a whole command.
    """
    action, *rest = words
    if action not in known:
        owners = [owner for owner, resources in known.items() if action in resources]
        near = _near(action, known)
        if near and not owners:
            return f"capyctl {near}"
        for owner, resources in known.items():
            near = _near(action, resources) if not owners else action if owner == owners[0] else ""
            if near:
                return f"capyctl {owner} {near}"
        return ""
    if not rest:
        return ""
    resources = known[action]
    near = _near(rest[0], resources)
    if near:
        return " ".join(("capyctl", action, near, *_name(rest[1:])))
    resource = NAMED.get(action, "deployment")
    if resource not in resources:
        return ""
    return " ".join(("capyctl", action, resource, *_name(rest)))


def _near(word: str, words: Mapping[str, Sequence[str]] | Sequence[str]) -> str:
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=ALIKE)), "")


def _name(rest: Sequence[str]) -> Sequence[str]:
    """The name after the resource, without options."""
    return [word for word in rest[:1] if not word.startswith("-")]
