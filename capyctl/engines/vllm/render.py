"""One launch of vLLM as argv and environment. Pure: no file is looked at, nothing is created.

Source: engines 4.1, 6.1-6.3; memory 5.11.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import attrs

from capyctl.documents.deployment import Deployment
from capyctl.documents.engine_config import Vllm
from capyctl.engines.adapter import LaunchFacts
from capyctl.engines.options import OptionClass, flat_object, is_option, mentions, normal, value_of
from capyctl.engines.parsers import Choice, Parsers, choices
from capyctl.engines.python.installation import release
from capyctl.engines.python.variables import LOOPBACK_ONLY, OFFLINE, UNIFIED
from capyctl.engines.registered import Registered
from capyctl.engines.vllm import agreement
from capyctl.engines.vllm.options import POLICY
from capyctl.errors import Refusal, check
from capyctl.units import format_size

GUARD = "capyctl_vllm_guard.KeyGuard"
SPECULATION = ("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens")
_MIB = 1 << 20
_CARD_FLOOR_PERCENT, _PERCENT_MAX = 75, 99
_SLACK_BYTES = 512 * _MIB  # the context, which is there before the engine looks at what is free
_PRESERVES_SINCE = (0, 31)


@attrs.frozen(kw_only=True)
class Launch:
    """What one command line depends on, beside the facts. Paths are absolute."""

    facts: LaunchFacts
    document: Deployment
    fixed_args: Sequence[str]
    version: str
    parsers: Parsers
    draft_dir: Path | None = None


def words(launch: Launch) -> tuple[list[str], list[str]]:
    """(the rendered words, host-fixed and extra arguments), in their order. The first word is the model.

    Raises: Refusal `invalid_config`, `insufficient_device_memory`, `capability_missing:deep_park`.
    """
    return _block(launch), _rest(launch)


def _block(launch: Launch) -> list[str]:
    facts, config = launch.facts, launch.document.engine_config
    own = config.vllm or Vllm()
    topology = launch.document.topology
    block = [
        str(facts.model_dir),
        *("--host", "127.0.0.1"),
        *("--port", str(facts.port)),
        *("--served-model-name", facts.served_name),
        *("--tensor-parallel-size", str(topology.tensor_parallel)),
        *("--pipeline-parallel-size", str(topology.pipeline_parallel)),
        *("--gpu-memory-utilization", utilization(launch)),
    ]
    cache = cache_bytes(launch)
    if cache is not None:
        block += ["--kv-cache-memory-bytes", str(cache)]
    sequences = config.max_concurrent_requests
    if sequences is not None or not mentions(POLICY, launch.fixed_args, "--max-num-seqs"):
        block += ["--max-num-seqs", str(sequences or agreement.DEFAULT_SEQUENCES)]
    if facts.context_tokens:
        block += ["--max-model-len", str(facts.context_tokens)]
    for option, value in (
        ("--max-num-batched-tokens", own.max_num_batched_tokens),
        ("--block-size", own.block_size_tokens),
        ("--kv-cache-dtype", config.kv_cache_dtype),
        ("--dtype", config.dtype),
        ("--quantization", config.quantization),
    ):
        if value is not None:
            block += [option, str(value)]
    for option, wanted in (
        ("--enforce-eager", config.cuda_graphs is False),
        ("--language-model-only", config.language_model_only),
        ("--trust-remote-code", config.trust_remote_code),
    ):
        if wanted:
            block.append(option)
    block += _sleep(launch, own)
    block += ["--middleware", GUARD, "--enable-per-request-metrics"]
    block += ["--no-enable-log-requests", "--no-enable-log-outputs"]
    return block + _parsers(launch)


def _sleep(launch: Launch, own: Vllm) -> list[str]:
    block: list[str] = []
    if launch.facts.residency.parks:
        block.append("--enable-sleep-mode")
        if release(launch.version) >= _PRESERVES_SINCE:
            # A reload reads the target model alone: the weights of a draft would be lost.
            block += ["--sleep-preserve-parameter-names", "draft.*"]
    strategy = own.safetensors_load_strategy or ("eager" if launch.facts.residency.parks else None)
    return [*block, "--safetensors-load-strategy", strategy] if strategy is not None else block


def _parsers(launch: Launch) -> list[str]:
    tool, reasoning = chosen_parsers(launch)
    block = ["--tool-call-parser", tool.name] if tool.name is not None else []
    said = [*launch.fixed_args, *launch.document.engine_config.extra_args]
    if block and not mentions(POLICY, said, "--enable-auto-tool-choice"):
        block.append("--enable-auto-tool-choice")
    return [*block, "--reasoning-parser", reasoning.name] if reasoning.name is not None else block


def chosen_parsers(launch: Launch) -> tuple[Choice, Choice]:
    """(tool calls, reasoning), each with where it comes from."""
    found = choices("vllm", POLICY, launch.document, launch.fixed_args, launch.parsers)
    return found.tool_call, found.reasoning


def _rest(launch: Launch) -> list[str]:
    rest = [*launch.fixed_args, *launch.document.engine_config.extra_args]
    # Both lists were checked when they were written; a stored revision is older than today's rules.
    for word in rest:
        if is_option(word):
            rule = POLICY.rule(word)
            fixed = rule.fixed and word in launch.fixed_args
            if rule.kind in (OptionClass.TYPED, OptionClass.RESERVED) and not fixed:
                raise Refusal("invalid_config", f"{normal(word)} is owned by CapyCTL: {rule.why}")
    return _with_draft(rest, launch.draft_dir)


def _with_draft(rest: list[str], draft: Path | None) -> list[str]:
    """The arguments with the deployment's own draft filled into the speculative configuration."""
    if draft is None:
        return rest
    said = value_of(POLICY, rest, "--speculative-config")
    settings = flat_object(said) if said else None
    if settings is None:
        raise Refusal(
            "invalid_config", "model.draft needs --speculative-config in extra_args, which says how the draft is used"
        )
    if settings.get("model", str(draft)) != str(draft):
        raise Refusal(
            "invalid_config", "--speculative-config names another model than model.draft; leave its model out"
        )
    filled = json.dumps({**settings, "model": str(draft)}, separators=(",", ":"))
    kept: list[str] = []
    skip = False
    for word in rest:
        speculative = is_option(word) and POLICY.rule(word).names[0] == "--speculative-config"
        if not speculative and not skip:
            kept.append(word)
        skip = speculative and "=" not in word
    return [*kept, "--speculative-config", filled]


def speculates(args: Sequence[str]) -> bool:
    """Whether an argument list asks for speculative decoding."""
    return any(mentions(POLICY, args, option) for option in SPECULATION)


def device_domains(facts: LaunchFacts) -> list[str]:
    """The memory domains that the engine's devices have: its cards, else the machine's one pool."""
    cards = sorted(name for name, amount in facts.ready.items() if name.startswith("gpu") and amount)
    return cards or [UNIFIED]


def utilization(launch: Launch) -> str:
    """The share of its device that the engine takes itself to use, as it is rendered.

    The request, or what is charged when it is ready without the context and without what options keep in RAM, over
    all of the device, in whole percent.
    The engine refuses to start when less than this is free, so it never exceeds what the admission saw.
    Raises: Refusal `insufficient_device_memory` when nothing is free that could be stated.
    """
    facts, request = launch.facts, launch.document.engine_config.memory.request
    derived = request is None and launch.document.resources is None
    shares: list[float] = []
    for domain in device_domains(facts):
        total, free = facts.capacity.get(domain, 0), facts.available.get(domain)
        if total <= 0:
            raise Refusal(
                "insufficient_device_memory", f"the size of {domain} is not known; vLLM is told a share of it"
            )
        beside = facts.pools.get("context", 0) + (facts.pools.get("host", 0) if domain == UNIFIED else 0)
        ready = max(0, facts.ready.get(domain, 0) - beside)
        wanted = ready if request is None else request.bytes
        percent = min(_PERCENT_MAX, -(-wanted * 100 // total))
        if derived and domain != UNIFIED:
            percent = max(_CARD_FLOOR_PERCENT, percent)
        share = percent / 100
        if free is not None and (free - _SLACK_BYTES) < share * total:
            share = max(0, free - _SLACK_BYTES) * 10_000 // total / 10_000
        if share <= 0:
            raise Refusal(
                "insufficient_device_memory",
                f"{format_size(free or 0)} of {domain} is free, which is too little; stop what holds the rest",
            )
        shares.append(share)
    return f"{min(shares):.4f}".rstrip("0").rstrip(".")


def cache_bytes(launch: Launch) -> int | None:
    """Bytes of the key-value cache: stated, or those of the plan; None leaves it to the engine."""
    stated = launch.document.engine_config.memory.kv_cache
    return stated.bytes if stated is not None else launch.facts.pools.get("kv_cache")


def variables(facts: LaunchFacts, runtime: Path, *, telemetry: bool) -> dict[str, str]:
    """The variables that CapyCTL owns on vLLM, keys included."""
    check(bool(facts.key), "every launch has a key")
    parks = facts.residency.parks
    check(bool(facts.admin_key) or not parks, "a launch that parks has an admin key")
    env = {
        "VLLM_API_KEY": facts.key,
        "CAPYCTL_VLLM_ADMIN_KEY": facts.admin_key,
        "VLLM_SERVER_DEV_MODE": "1" if parks else "0",
        "VLLM_PLUGINS": "",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(facts.deadline_s))),
        "VLLM_HOST_IP": "127.0.0.1",
        "PYTHONPATH": str(runtime),
        **LOOPBACK_ONLY,
        **OFFLINE,
    }
    if not telemetry:
        env |= {"VLLM_DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
    return {**env, **facts.device_env}


def check_document(document: Deployment, registered: Registered) -> None:
    """What vLLM adds to a deployment's rules. Raises: Refusal `invalid_config`, `capability_missing:deep_park`."""
    config, fixed = document.engine_config, registered.profile.args
    own, said = config.vllm or Vllm(), [*fixed, *config.extra_args]
    where = f"{document.name}: engine_config"
    if config.max_concurrent_requests is not None and mentions(POLICY, fixed, "--max-num-seqs"):
        raise Refusal("invalid_config", f"{where}.max_concurrent_requests: the engine profile fixes --max-num-seqs")
    for option, field, value in (
        ("--tool-call-parser", "tool_call_parser", own.tool_call_parser),
        ("--reasoning-parser", "reasoning_parser", own.reasoning_parser),
    ):
        if value != "auto" and mentions(POLICY, said, option):
            raise Refusal(
                "invalid_config", f"{where}.vllm.{field}: is {value}, and {option} is given as well; keep one"
            )
    if document.model.draft is not None and not mentions(POLICY, said, "--speculative-config"):
        raise Refusal("invalid_config", f"{document.name}: model.draft needs --speculative-config in extra_args")
    agreement.check(document, fixed)
    why = restart_only(document, registered) if document.residency == "deep" else None
    if why is not None:
        raise Refusal(
            "capability_missing:deep_park",
            f"{document.name}: residency: deep beside {why}. Use residency: host_backed or restart_only",
        )


def restart_only(document: Deployment, registered: Registered) -> str | None:
    """What of this deployment would not survive a deep park, or None. It also decides the default."""
    said = [*registered.profile.args, *document.engine_config.extra_args]
    if value_of(POLICY, said, "--load-format") not in (None, "auto", "safetensors"):
        return "--load-format: only the default loader can load weights again after a park"
    if speculates(said) and release(registered.version) < _PRESERVES_SINCE:
        return f"speculation on vLLM {registered.version}, which loses a draft model's weights in a deep park"
    return None


def check_served_name(name: str) -> None:
    """Refuse a name that the parser would read as an option. Raises: Refusal `invalid_config`."""
    if not name or name != name.strip() or name.startswith("-"):
        raise Refusal("invalid_config", f"routes: {name!r} cannot be the served name on vllm")
