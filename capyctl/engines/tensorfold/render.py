"""One launch of TensorFold as argv and environment. Pure.

Source: engines 4.1, 8.1; memory M17.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path

import attrs

from capyctl.documents.deployment import Deployment
from capyctl.engines.options import OptionClass, is_option, mentions
from capyctl.engines.python.variables import OFFLINE
from capyctl.engines.tensorfold.options import POLICY
from capyctl.errors import Refusal

DEFAULT_STREAMS = 8
_MIB = 1 << 20


@attrs.frozen(kw_only=True)
class Launch:
    """What one command line depends on. Paths are absolute; `draft_dir` is `model.draft`'s."""

    executable: str
    served_name: str
    port: int
    model_dir: Path
    draft_dir: Path | None
    context_tokens: int
    document: Deployment
    fixed_args: Sequence[str]


def render(launch: Launch) -> tuple[str, ...]:
    """The command line in its fixed order, then host-fixed and extra arguments.

    Raises: Refusal `invalid_config` for an argument that CapyCTL owns, and as `check_drafts` and `check_streams`.
    """
    config = launch.document.engine_config
    rest = [*launch.fixed_args, *config.extra_args]
    _recheck(rest)
    check_served_name(launch.served_name)
    check_drafts(rest, draft=launch.draft_dir is not None)
    check_streams(launch.document, launch.fixed_args)
    words = [
        *(launch.executable, "serve", str(launch.model_dir)),
        *("--name", launch.served_name),
        *("--host", "127.0.0.1"),
        *("--port", str(launch.port)),
        "--no-update-check",
        *("--backend", "cuda"),
        *("--snapshot-dir", "none"),
        *("--context", str(launch.context_tokens)),
    ]
    if launch.draft_dir is not None:
        words += ["--drafter", str(launch.draft_dir)]
    elif not _says_drafts(rest):
        words += ["--drafter", "none"]
    if not mentions(POLICY, rest, "--parallel"):
        words += ["--parallel", str(config.max_concurrent_requests or DEFAULT_STREAMS)]
    if config.kv_cache_dtype is not None:
        words += ["--kv-dtype", config.kv_cache_dtype]
    block = config.tensorfold
    if block is not None and block.max_tokens is not None:
        words += ["--max-tokens", str(block.max_tokens)]
    if block is not None and block.thinking is not None:
        words.append(_thinking(block.thinking))
    return (*words, *rest)


def owned_variables(extensions: Path, ready: Mapping[str, int]) -> dict[str, str]:
    """The variables that CapyCTL writes, the memory cap among them."""
    owned = {**OFFLINE, "TENSORFOLD_NO_UPDATE_CHECK": "1", "TORCH_EXTENSIONS_DIR": str(extensions)}
    cap = memory_cap(ready)
    return owned if cap is None else {**owned, "TENSORFOLD_CUDA_MEMORY_LIMIT_GB": cap}


def memory_cap(ready: Mapping[str, int]) -> str | None:
    """The Ready charge of the GPU's domain in GiB, rounded down to a whole MiB; None when it has no such domain.

    A card's own domain comes before a pool that a GPU shares with the machine.
    """
    domains = sorted(name for name in ready if name.startswith("gpu")) or [name for name in ready if name == "unified"]
    if not domains:
        return None
    return f"{(Decimal(ready[domains[0]] // _MIB) / 1024).normalize():f}"


def check_served_name(name: str) -> None:
    """Refuse a name that the parser would take for an option. Raises: Refusal `invalid_config`."""
    if name.startswith("-"):
        raise Refusal("invalid_config", f"routes: {name!r} cannot be the served name on tensorfold: it begins with -")


def check_drafts(args: Sequence[str], *, draft: bool) -> None:
    """Drafts are said once: `model.draft`, `--drafter` or `--no-drafts`. Raises: Refusal `invalid_config`."""
    said = [name for name in ("--drafter", "--no-drafts") if mentions(POLICY, args, name)]
    if len(said) == 2:
        raise Refusal("invalid_config", "--drafter and --no-drafts contradict each other; keep one")
    if said and draft:
        raise Refusal("invalid_config", f"{said[0]} stands beside model.draft; keep one")


def check_streams(document: Deployment, fixed_args: Sequence[str]) -> None:
    """Streams are said once: the field or `--parallel`. Raises: Refusal `invalid_config`."""
    config = document.engine_config
    if config.max_concurrent_requests is not None and mentions(POLICY, [*fixed_args, *config.extra_args], "--parallel"):
        raise Refusal("invalid_config", "--parallel stands beside engine_config.max_concurrent_requests; keep one")


def _thinking(word: str) -> str:
    """The switch that the field's word means. Raises: Refusal `invalid_config`."""
    switch = {"on": "--thinking", "off": "--no-thinking"}.get(word)
    if switch is None:
        raise Refusal(
            "invalid_config", f"engine_config.tensorfold.thinking: {word!r} is not allowed; expected on or off"
        )
    return switch


def check_thinking(document: Deployment) -> None:
    """As `_thinking`, for a document that is being accepted. Raises: Refusal `invalid_config`."""
    block = document.engine_config.tensorfold
    if block is not None and block.thinking is not None:
        _thinking(block.thinking)


def _says_drafts(args: Sequence[str]) -> bool:
    return mentions(POLICY, args, "--drafter") or mentions(POLICY, args, "--no-drafts")


def _recheck(args: Sequence[str]) -> None:
    """Both lists were checked when they were written; a stored revision is older than today's rules."""
    for word in args:
        if is_option(word):
            rule = POLICY.rule(word)
            if rule.kind in (OptionClass.TYPED, OptionClass.RESERVED):
                raise Refusal("invalid_config", f"{word.partition('=')[0]} is owned by CapyCTL: {rule.why}")
