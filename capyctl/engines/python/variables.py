"""The closed environment of an engine that lives in a Python environment. Pure.

Source: engines 4.1, 4.2; security 6.2.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from capyctl.engines.adapter import LaunchFacts
from capyctl.engines.environment import SYSTEM_PATH, Reserved, reserved_reason

_JOB_BYTES = 8 << 30  # what one compiler of kernels may need
UNIFIED = "unified"
SYSTEM = "system"


@attrs.frozen(kw_only=True)
class Closed:
    """What an environment is made of. `configured` is the profile's and the deployment's, `owned` the family's."""

    prefix: Path
    cuda_home: str | None
    profile_env: Mapping[str, str]
    deployment_env: Mapping[str, str]
    reserved: Sequence[Reserved]
    log_path: Path
    max_jobs: int
    telemetry: bool = False
    path_dirs: tuple[str, ...] = ()  # further directories, after the environment's bin
    owned: Mapping[str, str] = attrs.field(factory=dict, repr=False)


def closed_environment(parts: Closed) -> dict[str, str]:
    """The whole environment: configured variables first, CapyCTL's own over them.

    A configured name that is reserved is dropped here too: a stored revision is older than today's rules.
    """
    configured = {**parts.profile_env, **parts.deployment_env}
    env = {name: value for name, value in configured.items() if reserved_reason(name, parts.reserved) is None}
    env.setdefault("MAX_JOBS", str(parts.max_jobs))
    env.setdefault("FLASHINFER_NVCC_THREADS", "1")
    places = [str(parts.prefix / "bin"), *parts.path_dirs]
    if parts.cuda_home is not None:
        places.append(f"{parts.cuda_home}/bin")
        env["CUDA_HOME"] = parts.cuda_home
    env["PATH"] = ":".join([*places, SYSTEM_PATH])
    env["CAPYCTL_ENGINE_LOG"] = str(parts.log_path)
    if not parts.telemetry:
        env["DO_NOT_TRACK"] = "1"
    env.update(parts.owned)
    return env


def max_jobs(facts: LaunchFacts, cpus: int | None = None) -> int:
    """How many kernels may be compiled at once: one per 8 GiB of free RAM, at most one per CPU.

    On unified memory the engine's own Ready charge comes out of the same RAM.
    """
    free = facts.available.get(UNIFIED)
    room = facts.available.get(SYSTEM, 0) if free is None else free - facts.ready.get(UNIFIED, 0)
    return max(1, min(room // _JOB_BYTES, cpus or os.cpu_count() or 1))


LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks of one launch talk over loopback; dropped for groups."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""A model is a directory of this host; an engine fetches nothing."""
