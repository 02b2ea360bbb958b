"""One launch of llama.cpp as argv and environment. Pure: no file is looked at, nothing is created.

Source: engines 4.1, 9.1; decisions 14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import attrs

from capyctl.checkpoints.kv_cache import DEFAULT_TYPE, pad
from capyctl.documents.deployment import Deployment
from capyctl.engines.adapter import Command
from capyctl.engines.environment import SYSTEM_PATH, reserved_reason
from capyctl.engines.llamacpp.options import POLICY, RESERVED_ENV
from capyctl.engines.options import is_option
from capyctl.errors import Refusal, check

LAUNCHER = Path(__file__).with_name("launcher.py")
BINARY = "llama-server"
_INT_MAX = 2**31 - 1


@attrs.frozen(kw_only=True)
class Launch:
    """What one command line depends on. Paths are absolute; `context_tokens` is each slot's window."""

    executable: str
    served_name: str
    port: int
    model_file: Path
    projector_file: Path | None
    context_tokens: int
    slots: int
    document: Deployment
    fixed_args: Sequence[str]
    profile_env: Mapping[str, str]
    private_dir: Path
    log_path: Path
    key: str = attrs.field(repr=False)
    telemetry: bool = False
    device_env: Mapping[str, str] = attrs.field(factory=dict)


def program(executable: str, launcher: Path = LAUNCHER) -> tuple[str, ...]:
    """The words before the first option: the binary, or the environment's interpreter and the launcher.

    `-I -S -B`: nothing of the caller's directories or variables, no `.pth` hooks, no bytecode written.
    """
    if PurePosixPath(executable).name == BINARY:
        return (executable,)
    return (executable, "-I", "-S", "-B", str(launcher))


def render(launch: Launch) -> Command:
    """The command line in its fixed order, then host-fixed and extra arguments.

    Raises: Refusal `invalid_config` for a served name that the server would split, or a context that it
      cannot count.
    """
    return Command(argv=(*program(launch.executable), *_block(launch), *_rest(launch)), env=_environment(launch))


def _block(launch: Launch) -> list[str]:
    check_served_name(launch.served_name)
    config = launch.document.engine_config
    cache_type = config.kv_cache_dtype or DEFAULT_TYPE
    layers = config.llamacpp.n_gpu_layers if config.llamacpp is not None else "all"
    context = pad(launch.context_tokens) * launch.slots
    if context > _INT_MAX:
        raise Refusal(
            "invalid_config", f"{launch.slots} slots of {launch.context_tokens} tokens are more than can be counted"
        )
    block = [
        *("--host", "127.0.0.1"),
        *("--port", str(launch.port)),
        *("--model", str(launch.model_file)),
        *("--alias", launch.served_name),
        *("--ctx-size", str(context)),
        *("--parallel", str(launch.slots)),
        "--no-kv-unified",
        *("--gpu-layers", str(layers)),
        *("--cache-type-k", cache_type),
        *("--cache-type-v", cache_type),
        *("--fit", "off"),
        *("--cache-ram", "0"),
        "--no-context-shift",
        "--metrics",
        "--slots",
        "--offline",
        "--no-webui",
        *("--cors-origins", "localhost"),
        "--no-cors-credentials",
    ]
    if launch.projector_file is not None:
        block += ["--mmproj", str(launch.projector_file)]
    return block


def _rest(launch: Launch) -> list[str]:
    rest = [*launch.fixed_args, *launch.document.engine_config.extra_args]
    # Both lists were checked when they were written; a stored revision is older than today's rules.
    for word in rest:
        if is_option(word):
            rule = POLICY.rule(word)
            if rule.kind.value in ("owned", "reserved"):
                raise Refusal("invalid_config", f"{word.partition('=')[0]} is owned by CapyCTL: {rule.why}")
    return rest


def check_served_name(name: str) -> None:
    """Refuse a name that llama-server would split or trim. Raises: Refusal `invalid_config`."""
    if not name or name != name.strip() or any(char in ", \t" for char in name) or name.startswith("-"):
        raise Refusal(
            "invalid_config",
            f"routes: {name!r} cannot be the served name on llamacpp: it splits names at commas and spaces",
        )


def _environment(launch: Launch) -> dict[str, str]:
    configured: dict[str, str] = {**launch.profile_env}
    configured.update((str(name), value) for name, value in launch.document.engine_config.env.items())
    env = {name: value for name, value in configured.items() if reserved_reason(name, RESERVED_ENV) is None}
    env |= {
        "PATH": f"{PurePosixPath(launch.executable).parent}:{SYSTEM_PATH}",
        "CAPYCTL_ENGINE_LOG": str(launch.log_path),
        "XDG_CONFIG_HOME": str(launch.private_dir / "config"),
        "LLAMA_CACHE": str(launch.private_dir / "cache"),
        "LLAMA_API_KEY": launch.key,
        **launch.device_env,
    }
    if not launch.telemetry:
        env["DO_NOT_TRACK"] = "1"
    check(bool(launch.key), "every launch has a key")
    return env
