"""One launch of SGLang as argv and environment, and what SGLang adds to a deployment's rules. Pure.

Source: engines 4.1, 7.1-7.4; memory 5.11.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

from capyctl.documents.deployment import Deployment
from capyctl.documents.engine_config import Sglang
from capyctl.engines.adapter import LaunchFacts
from capyctl.engines.options import OptionClass, is_option, mentions, normal, value_of
from capyctl.engines.parsers import Choice, Parsers, choices
from capyctl.engines.python.installation import release
from capyctl.engines.python.variables import LOOPBACK_ONLY, OFFLINE, UNIFIED
from capyctl.engines.registered import Registered
from capyctl.engines.sglang import agreement
from capyctl.engines.sglang.agreement import DRAFT, SPECULATION
from capyctl.engines.sglang.installation import NO_PLUGINS
from capyctl.engines.sglang.options import POLICY
from capyctl.errors import Refusal, check
from capyctl.fsm.types import Residency
from capyctl.units import format_size

TABLE_BUDGET = "SGLANG_QWEN4_PLE_FILE_RSS_BUDGET_GB"
_GRAPH_BACKENDS_SINCE = (0, 5, 22)
_STEPS = 10_000  # the fraction has four decimals


@attrs.frozen(kw_only=True)
class Launch:
    """What one command line depends on, beside the facts. Paths are absolute."""

    facts: LaunchFacts
    document: Deployment
    version: str
    parsers: Parsers
    draft_dir: Path | None = None


def words(launch: Launch) -> tuple[list[str], list[str]]:
    """(the rendered words, extra arguments), in their order. Keys are in neither.

    Raises: Refusal `invalid_config`, `insufficient_device_memory`, `insufficient_memory`.
    """
    return _block(launch), _rest(launch)


def _block(launch: Launch) -> list[str]:
    facts, config = launch.facts, launch.document.engine_config
    own = config.sglang or Sglang()
    topology, pools = launch.document.topology, launch.facts.pools
    block = [
        *("--model-path", str(facts.model_dir)),
        *("--tokenizer-path", str(facts.model_dir)),
        *("--host", "127.0.0.1"),
        *("--port", str(facts.port)),
        *("--served-model-name", facts.served_name),
        *("--tp-size", str(topology.tensor_parallel)),
        *("--pp-size", str(topology.pipeline_parallel)),
        *("--nnodes", "1"),
        *("--node-rank", "0"),
        *("--mem-fraction-static", fraction(facts)),
        *("--tokenizer-worker-num", "1"),
    ]
    for option, value in (
        ("--max-total-tokens", _total_tokens(own, pools)),
        ("--max-running-requests", pools.get("running") or config.max_concurrent_requests),
        ("--context-length", facts.context_tokens or None),
        ("--chunked-prefill-size", own.chunked_prefill_size),
        ("--dtype", config.dtype),
        ("--quantization", config.quantization),
        ("--kv-cache-dtype", config.kv_cache_dtype),
        ("--max-mamba-cache-size", pools.get("state_slots")),
        (DRAFT, launch.draft_dir),
    ):
        if value is not None:
            block += [option, str(value)]
    if config.language_model_only:
        block.append("--language-model-only")
    if config.trust_remote_code:
        block.append("--trust-remote-code")
    if config.cuda_graphs is False:
        block += _without_graphs(launch.version)
    block += _memory_saver(launch)
    block += ["--log-level", "info", "--log-level-http", "info"]
    block += ["--enable-metrics", "--enable-cache-report", "--skip-server-warmup"]
    return block + _parsers(launch)


def _total_tokens(own: Sglang, pools: Mapping[str, int]) -> int | None:
    """The smaller of what the document says and what the cache holds: never more than is charged."""
    return min((number for number in (own.max_total_tokens, pools.get("kv_tokens")) if number), default=None)


def _without_graphs(version: str) -> list[str]:
    if release(version) < _GRAPH_BACKENDS_SINCE:
        return ["--disable-cuda-graph"]
    return ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]


def _memory_saver(launch: Launch) -> list[str]:
    residency = launch.facts.residency
    if not residency.parks:
        return []
    block = ["--enable-memory-saver"]
    if residency is Residency.HOST_BACKED:
        block.append("--enable-weights-cpu-backup")
    if not mentions(POLICY, launch.document.engine_config.extra_args, "--sleep-on-idle"):
        block.append("--sleep-on-idle")  # else a parked scheduler spins one CPU
    return block


def fraction(facts: LaunchFacts) -> str:
    """The share of what is free before it loads that SGLang may set aside, with four decimals.

    The engine takes its share of the memory that is free when it starts, not of all there is: on a card of what is
    left beside its own context, so that the pool and that context together stay inside the charge.
    What is free now may be taken by another start or wake before the engine looks, and then the share of the rest
    would not hold its weights. Only what its own charge sets aside is sure to be there, so that is the base wherever
    the tokens that it is told bound its cache; elsewhere the share is the only bound, and is of what is free.
    Raises: Refusal `insufficient_device_memory` or `insufficient_memory` when nothing is free that could be stated.
    """
    cards = sorted(name for name, amount in facts.ready.items() if name.startswith("gpu") and amount)
    shares: list[int] = []
    for domain in cards or [UNIFIED]:
        context = facts.pools.get("context", 0)
        pool = facts.pools.get("static") or facts.ready.get(domain, 0) - context
        free = facts.available.get(domain) or facts.capacity.get(domain, 0)
        if "kv_tokens" in facts.pools:
            free = min(free, facts.allocation.get(domain, free))
        base = free - context if cards else free
        if base <= 0 or pool <= 0:
            code = "insufficient_device_memory" if cards else "insufficient_memory"
            short = (
                f"{format_size(free)} of {domain} is free, and SGLang is told a share of it; stop what holds the rest"
            )
            raise Refusal(code, short)
        shares.append(min(_STEPS - 1, max(1, pool * _STEPS // base)))
    return f"{min(shares) / _STEPS:.4f}"


def _parsers(launch: Launch) -> list[str]:
    tool, reasoning = chosen_parsers(launch)
    block = ["--tool-call-parser", tool.name] if tool.name is not None else []
    return [*block, "--reasoning-parser", reasoning.name] if reasoning.name is not None else block


def chosen_parsers(launch: Launch) -> tuple[Choice, Choice]:
    """(tool calls, reasoning), each with where it comes from."""
    found = choices("sglang", POLICY, launch.document, (), launch.parsers)
    return found.tool_call, found.reasoning


def _rest(launch: Launch) -> list[str]:
    rest = [str(word) for word in launch.document.engine_config.extra_args]
    # They were checked when they were written; a stored revision is older than today's rules.
    for word in rest:
        if is_option(word):
            rule = POLICY.rule(word)
            if rule.kind in (OptionClass.TYPED, OptionClass.RESERVED):
                raise Refusal("invalid_config", f"{normal(word)} is owned by CapyCTL: {rule.why}")
    return rest


def variables(facts: LaunchFacts, *, telemetry: bool) -> dict[str, str]:
    """The variables that CapyCTL owns on SGLang. The entry takes the keys out before anything else starts."""
    check(bool(facts.key) and bool(facts.admin_key), "every launch has both keys")
    env = {
        "CAPYCTL_ENGINE_API_KEY": facts.key,
        "CAPYCTL_ENGINE_ADMIN_KEY": facts.admin_key,
        "CAPYCTL_RENDEZVOUS_DIR": str(facts.state_dir / "engines" / "sglang" / "rendezvous" / str(facts.port)),
        "SGLANG_PLUGINS": NO_PLUGINS,
        "SGLANG_HOST_IP": "127.0.0.1",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # no key guards it: what it runs ends a parked engine
        **LOOPBACK_ONLY,
        **OFFLINE,
    }
    if not telemetry:
        env["DO_NOT_TRACK"] = "1"
    return {**env, **facts.device_env}


# --- rules of a deployment --------------------------------------------------------------------------


def restart_only(document: Deployment, registered: Registered) -> str | None:
    """Why an engine with these options cannot park, or None."""
    if mentions(POLICY, document.engine_config.extra_args, SPECULATION):
        return f"{SPECULATION} is given: a wake loads the model's own weights, not those that speculate"
    return None


def check_document(document: Deployment, registered: Registered) -> None:
    """What SGLang adds to a deployment's rules.

    Raises: Refusal `invalid_config`, `unsupported`, `engine_env_reserved:…`.
    """
    config = document.engine_config
    own, where = config.sglang or Sglang(), f"{document.name}: engine_config"
    for option, field, value in (
        ("--tool-call-parser", "tool_call_parser", own.tool_call_parser),
        ("--reasoning-parser", "reasoning_parser", own.reasoning_parser),
    ):
        if value != "auto" and mentions(POLICY, config.extra_args, option):
            raise Refusal(
                "invalid_config", f"{where}.sglang.{field}: is {value}, and {option} is given as well; keep one"
            )
    if own.tokenizer_workers not in (None, 1):
        raise Refusal(
            "invalid_config",
            f"{where}.sglang.tokenizer_workers: is {own.tokenizer_workers}; SGLang checks its keys with one alone",
        )
    agreement.check(document)
    _check_table_budget(document, registered)
    why = restart_only(document, registered)
    if why is not None and document.residency in ("deep", "host_backed"):
        raise Refusal(
            "unsupported",
            f"{document.name}: residency: {document.residency} beside {why}. Use residency: restart_only",
        )


def _check_table_budget(document: Deployment, registered: Registered) -> None:
    """Refuse a budget of the tables' cache beside tables on disk: what is charged for that cache is fixed."""
    if value_of(POLICY, document.engine_config.extra_args, "--ple-offload-backend") != "file":
        return
    for env, where in (
        (document.engine_config.env, f"{document.name}: engine_config.env"),
        (registered.profile.env, f"the profile {registered.name}"),
    ):
        for name in env:
            if name.upper() == TABLE_BUDGET:
                raise Refusal(
                    f"engine_env_reserved:{name}",
                    f"{where}: {name} is owned by CapyCTL beside --ple-offload-backend file, whose cache is charged "
                    "8 GiB a table. Leave one of them out",
                )


def check_served_name(name: str) -> None:
    """Refuse a name that SGLang would read otherwise: what follows a colon asks for an adapter.

    Raises: Refusal `invalid_config`.
    """
    if not name or name != name.strip() or name.startswith("-") or ":" in name:
        raise Refusal(
            "invalid_config",
            f"routes: {name!r} cannot be the served name on sglang: it reads what follows a colon as an adapter",
        )
