"""The builds that CapyCTL was checked with. Others run with every gate applied, and lists call them custom.

It is derived whenever something is listed and never stored. Source: engines 1.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

VERIFIED: Final[Mapping[str, frozenset[str]]] = {
    "vllm": frozenset({"0.29.0", "0.30.0", "0.31.0", "0.32.0"}),
    "sglang": frozenset({"0.5.20", "0.5.21", "0.5.22"}),
    "tensorfold": frozenset({"0.6.0", "0.6.1", "0.6.2", "0.6.3", "0.6.5", "0.6.6"}),
}


def is_custom(family: str, version: str) -> bool:
    """Whether a build is outside the verified set; the local part of a version (`+cpu`) does not count."""
    return version.partition("+")[0] not in VERIFIED.get(family, frozenset())
