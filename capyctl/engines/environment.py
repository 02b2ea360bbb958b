"""Engine variables: which names CapyCTL owns, which a deployment may set, and the environment that results.

Nothing of CapyCTL's own environment reaches an engine: a child's environment is built from an empty
dictionary. Names are compared without regard to case, so that no lower-case twin slips through.

Source: engines 4; security 6.2, E10, E11.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from capyctl.errors import Refusal

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
NAMES_MAX = 64
VALUE_BYTES_MAX = 4096
FREE_NAMES = frozenset(
    {"MAX_JOBS", "FLASHINFER_NVCC_THREADS", "TOKENIZERS_PARALLELISM", "PYTHONUNBUFFERED", "RUST_LOG"}
)
"""Names that a deployment may set without approval."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_GLOB = re.compile(r"[A-Z_][A-Z0-9_]{0,126}\*?")


@attrs.frozen
class Reserved:
    """A name, or a family of names with one trailing `*`, that no document may set."""

    pattern: str
    why: str

    def covers(self, name: str) -> bool:
        upper = name.upper()
        if self.pattern.endswith("*"):
            return upper.startswith(self.pattern[:-1])
        return upper == self.pattern


EVERY_ENGINE: tuple[Reserved, ...] = (
    Reserved("PATH", "the search path is closed"),
    Reserved("LD_*", "the loader decides what code runs"),
    Reserved("CUDA_HOME", "the profile's cuda_home states it"),
    Reserved("CUDA_VISIBLE_DEVICES", "devices follow the ledger's claims"),
    Reserved("CAPYCTL_*", "written by CapyCTL for its own helpers"),
    Reserved("PYTHON*", "the interpreter decides what code runs"),
    Reserved("NCCL_*", "transport between ranks"),
    Reserved("GLOO_*", "transport between ranks"),
    Reserved("MASTER_*", "rendezvous of ranks"),
    Reserved("DO_NOT_TRACK", "telemetry follows the host's engine_telemetry"),
)


def reserved_reason(name: str, family: Sequence[Reserved]) -> str | None:
    """Why `name` may not be set, or None."""
    if name.upper() == "PYTHONUNBUFFERED":
        return None
    return next((row.why for row in (*EVERY_ENGINE, *family) if row.covers(name)), None)


def check_env(env: Mapping[Any, str], family: Sequence[Reserved], *, where: str) -> None:
    """The rules of both levels: known shape, bounds, and no reserved name. Keys are text, or a NewType of it.

    Raises: Refusal `invalid_config`, or `engine_env_reserved:<name>`.
    """
    if len(env) > NAMES_MAX:
        raise Refusal("invalid_config", f"{where}: {len(env)} variables; at most {NAMES_MAX}")
    for name, value in env.items():
        if not _NAME.fullmatch(name):
            raise Refusal("invalid_config", f"{where}: {name!r} is not a variable's name")
        if len(value.encode()) > VALUE_BYTES_MAX or any(char in value for char in "\n\r\0"):
            raise Refusal("invalid_config", f"{where}.{name}: expected one line of at most 4 KiB")
        why = reserved_reason(name, family)
        if why is not None:
            raise Refusal(f"engine_env_reserved:{name}", f"{where}: {name} is owned by CapyCTL: {why}")


def check_deployment_env(env: Mapping[Any, str], family: Sequence[Reserved], approved: Sequence[str]) -> None:
    """A deployment's `engine_config.env`: as `check_env`, and each name free or approved by the profile.

    Raises: also Refusal `engine_env_not_approved:<name>`.
    """
    check_env(env, family, where="engine_config.env")
    for name in env:
        if name not in FREE_NAMES and not any(_matches(name, pattern) for pattern in approved):
            raise Refusal(
                f"engine_env_not_approved:{name}",
                f"engine_config.env: the profile does not approve {name}. "
                f"Try: capyctl engine add … --approve-env {name}",
            )


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def check_approved_env(patterns: Sequence[str], family: Sequence[Reserved]) -> None:
    """A profile's `security.approved_env`: upper-case names with at most one trailing star, none fully reserved.

    Raises: Refusal `invalid_config`, or `engine_env_reserved:<pattern>` for one that frees only reserved names.
    """
    for pattern in patterns:
        if not _GLOB.fullmatch(pattern):
            raise Refusal(
                "invalid_config",
                f"security.approved_env: {pattern!r} is not an upper-case name with at most one * at its end",
            )
        stem = pattern.rstrip("*")
        if stem != "PYTHONUNBUFFERED" and any(row.covers(stem) for row in (*EVERY_ENGINE, *family)):
            raise Refusal(
                f"engine_env_reserved:{pattern}",
                f"security.approved_env: {pattern} matches only names that CapyCTL owns",
            )
