"""What `validate config` prints of a deployment on one host: each value with its source. Source: config 13."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from capyctl.cli.output import context_note
from capyctl.units import gib, seconds

if TYPE_CHECKING:
    from capyctl.documents.deployment import Deployment
    from capyctl.fsm.types import Phase
    from capyctl.server.preview import Preview

WHOLE_HOST: Final = "whole_host: the estimate is above the limit"


def key_values(made: Preview) -> dict[str, str]:
    """One host's part of the answer, each value with its source."""
    document, registered, site = made.document, made.registered, made.site
    if made.refused is not None:
        words = f"{made.refused.code}: {made.refused.message}"
        return {"Host": f"{site.allowed.name} ({site.source})", "Refused": words}
    plan, facts = made.plan, made.plan.facts if made.plan is not None else {}
    revision = "deployment" if document.runtime_profile_revision is not None else registered.source
    lines = {
        "Host": f"{site.allowed.name} ({site.source})",
        "Profile": f"{registered.name} {registered.version}, revision {registered.revision} ({revision})",
        "Limits": _limits(made),
        "Devices": _devices(made),
        "Residency": _residency(made),
    }
    if plan is not None:
        weights = gib(int(facts["weight_bytes"]))
        named = [facts.get("model_file") or "", facts.get("architecture") or "", f"{weights} of weights"]
        lines["Model"] = ", ".join(word for word in named if word)
        lines |= {word: _held(made, phase) for phase, word in _phases(made)}
        if facts.get("kv_cache_bytes"):
            stated = document.engine_config.memory.kv_cache is not None
            lines["KV cache"] = f"{gib(int(facts['kv_cache_bytes']))} ({'deployment' if stated else 'derived'})"
        if facts.get("host_options"):
            lines["Options"] = f"take {facts['host_options']}, charged in every phase"
        if plan.context_tokens:
            lines["Context"] = (
                f"{plan.context_tokens} tokens ({plan.context_reason or 'deployment'}){context_note(facts)}"
            )
        stated = document.engine_config.max_concurrent_requests is not None
        source = "limited by the state cache" if "running_limited" in facts else "deployment" if stated else "default"
        lines["Requests"] = f"{plan.slots} at a time ({source})"
        if "tool_call_parser" in facts:
            lines["Parsers"] = _parsers(facts)
        lines["Initialize"] = _bound(plan.initialize_ms, document.timeouts.initialize is not None, document)
        if made.residency is not None and made.residency.parks:
            lines["Wake"] = _bound(plan.wake_ms, document.timeouts.wake is not None, document)
    stated = made.spec.request_deadline_ms is not None
    lines["Request deadline"] = f"{seconds(made.deadline_ms)} ({'deployment' if stated else site.deadline_source})"
    return lines


def _phases(made: Preview) -> list[tuple[Any, str]]:
    """The phases that are worth a line, with their words: parking and waking where they differ from ready."""
    from capyctl.fsm.types import Phase

    words = {Phase.COLD: "Startup", Phase.READY: "Ready", Phase.PARKING: "Parking", Phase.PARKED: "Parked"}
    phases = {} if made.plan is None else made.plan.phases
    return [
        (phase, word)
        for phase, word in {**words, Phase.WAKE: "Waking"}.items()
        if phase in phases
        and not (phase in (Phase.PARKING, Phase.WAKE) and phases[phase].bytes == phases[Phase.READY].bytes)
    ]


def _held(made: Preview, phase: Phase) -> str:
    """`15.0 GiB on gpu0, 4.0 GiB on system (derived)`; `1.0 GiB on gpu0 (placeholder), 4.0 GiB on system (derived)`.

    Cards that hold the same for the same reason stand together: `15.0 GiB on each of gpu0,gpu1`.
    """
    from capyctl.ledger.estimates import source

    assert made.plan is not None  # it has the phase
    alike: dict[tuple[int, str], list[str]] = {}
    for domain, amount in sorted(made.plan.phases[phase].bytes.items()):
        why = source(made.plan, made.site.policy, phase, domain)
        alike.setdefault((amount, WHOLE_HOST if why == "whole_host" else why), []).append(domain)
    told = [(_on(amount, domains), why) for (amount, why), domains in alike.items()]
    if len({why for _, why in told}) == 1:
        return f"{', '.join(amount for amount, _ in told)} ({told[0][1]})"
    return ", ".join(f"{amount} ({why})" for amount, why in told)


def _limits(made: Preview) -> str:
    alike: dict[int, list[str]] = {}
    for name, one in sorted(made.site.policy.domains.items()):
        alike.setdefault(one.managed_bytes, []).append(name)
    return ", ".join(_on(amount, domains) for amount, domains in alike.items())


def _on(amount: int, domains: Sequence[str]) -> str:
    return f"{gib(amount)} on {'each of ' if len(domains) > 1 else ''}{','.join(domains)}"


def _devices(made: Preview) -> str:
    stated = [str(claim.id) for claim in made.document.claims if claim.id is not None]
    if stated:
        return f"{','.join(stated)} (deployment)"
    cards = [str(one.device) for _, one in sorted(made.site.policy.domains.items()) if one.device is not None]
    if not cards:
        return "none (host)"
    ranks = made.document.topology.ranks
    return f"{ranks} of {','.join(cards)} (host)" if len(cards) > 1 else f"{cards[0]} (host)"


def _residency(made: Preview) -> str:
    if made.residency is None:
        known = made.spec.residency_reason
        return f"{made.spec.residency.value} ({known})" if known else "by hardware and model, once its files are seen"
    return f"{made.residency.value} ({made.residency_reason})"


def _parsers(facts: Mapping[str, str]) -> str:
    from capyctl.cli.status import parser_line

    return parser_line(
        {
            kind: {"name": facts[f"{kind}_parser"], "source": facts[f"{kind}_parser_source"]}
            for kind in ("tool_call", "reasoning")
        }
    )


def _bound(limit_ms: int, stated: bool, document: Deployment) -> str:
    deadline = document.request_deadline
    if not stated and deadline is not None and limit_ms == deadline.ms:
        return f"{seconds(limit_ms)} (lowered to request_deadline)"
    return f"{seconds(limit_ms)} ({'deployment' if stated else 'derived'})"


def record(made: Preview) -> dict[str, Any]:
    """One host's part of the answer, whole."""
    from capyctl.server.preview import plan_view

    registered = made.registered
    return {
        "host": made.site.allowed.name,
        "document": made.site.source,
        "host_document": made.site.stated,
        "profile": {
            "name": registered.name,
            "engine": registered.engine,
            "version": registered.version,
            "revision": registered.revision,
            "source": registered.source,
        },
        "limits": {
            name: {
                "managed_limit": str(one.managed_bytes),
                "free_reserve": str(one.reserve_bytes),
                "parked_limit": str(one.parked_bytes),
            }
            for name, one in sorted(made.site.policy.domains.items())
        },
        "devices": _ids(made.spec.devices),
        "residency": {
            "value": None if made.residency is None else made.residency.value,
            "reason": made.residency_reason or None,
        },
        "activation": made.spec.activation.value,
        "request_deadline_ms": made.deadline_ms,
        "plan": None if made.plan is None else plan_view(made.plan, made.site.policy),
        "refused": None if made.refused is None else {"code": made.refused.code, "message": made.refused.message},
    }


def _ids(devices: Sequence[Any]) -> list[str]:
    return [str(device) for device in devices]
