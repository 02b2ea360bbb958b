"""Which tier a deployment's memory is held in while nobody uses it: what its document says, else by the hardware.

One tier per deployment, settled when its checkpoint is measured; there is no ladder at run time. What only the
profile decides (a host that opted out, a build that cannot) is settled before, in `capyctl.engines.parking`.

Source: engines 6.4, 7.4, 13.1; memory 9; config 16.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from capyctl.checkpoints import host_memory, ways_out
from capyctl.checkpoints.machines import Machine, machine_of
from capyctl.checkpoints.phases import (
    HOST_OVERHEAD_BYTES,
    check_fits,
    declared_phases,
    host_copy_bytes,
    states_parking,
)
from capyctl.checkpoints.sizing_tensors import rank_weights
from capyctl.documents.deployment import Deployment
from capyctl.errors import Refusal
from capyctl.fsm.types import Phase, Residency
from capyctl.ledger.types import Allocation, HostPolicy
from capyctl.units import gib, larger


def settle(
    facts: Mapping[str, Any], document: Deployment, policy: HostPolicy, *, family: str, provisional: Residency
) -> Residency:
    """The residency of a measured deployment on one host.

    Args:
      provisional: what the document and the profile settled without the checkpoint; `restart_only` stays.
    Raises: Refusal `host_backed_unavailable` or `capability_missing:deep_park` for a declared residency that
      this machine or this model cannot keep, naming what to declare instead.
    """
    if not provisional.parks:
        return Residency.RESTART_ONLY
    declared = document.residency is not None
    why = wakes_wrong(facts, family)
    if why is not None and declared:
        raise Refusal(
            "capability_missing:deep_park",
            f"{document.name}: residency: {provisional.value}: {why}. Use residency: restart_only",
        )
    machine = machine_of(document, policy)
    if declared:
        _check_gpu(document, machine, policy.name)
    copy = _copy_bytes(facts, document, machine, family)
    if declared:
        if provisional is Residency.HOST_BACKED:
            check_host_backed(document, machine, policy.name, copy)
        return provisional
    if _keeps_from_parking(facts, document, machine, policy.name, family) is not None:
        return Residency.RESTART_ONLY
    return Residency.HOST_BACKED if machine.card and copy + HOST_OVERHEAD_BYTES <= room(machine) else Residency.DEEP


def reason(
    facts: Mapping[str, Any], document: Deployment, policy: HostPolicy, *, family: str, settled: Residency
) -> str:
    """Why a deployment that its document and its profile let park is held in that tier, in one line for people."""
    if document.residency is not None:
        return "the document states it"
    machine = machine_of(document, policy)
    if settled is Residency.RESTART_ONLY:
        return _keeps_from_parking(facts, document, machine, policy.name, family) or "another host cannot park it"
    if not machine.card:
        return f"{policy.name} has one memory for GPU and CPU: a copy of the weights would free nothing"
    needs, where = _copy_bytes(facts, document, machine, family) + HOST_OVERHEAD_BYTES, machine.system or "its RAM"
    if settled is Residency.DEEP and needs <= room(machine):
        return "another host cannot hold a copy of the weights"
    if settled is Residency.DEEP:
        would_need, may = larger(needs, room(machine))
        return (
            f"no copy of the weights is kept in RAM: with the engine it would need {would_need} of {where} on "
            f"{policy.name}, and {may} may be parked there"
        )
    return (
        f"a copy of the weights fits into RAM: with the engine it needs {gib(needs)} of {where} on {policy.name}, "
        f"and {gib(room(machine))} may be parked there"
    )


def _copy_bytes(facts: Mapping[str, Any], document: Deployment, machine: Machine, family: str) -> int:
    """What a copy of every rank's weights holds of the RAM, with what options take of it beside the copy."""
    copy = host_copy_bytes(rank_weights(facts, document, family), Residency.HOST_BACKED) * len(machine.domains)
    return copy + host_memory.taken(facts, document, family).bytes


def _keeps_from_parking(
    facts: Mapping[str, Any], document: Deployment, machine: Machine, host: str, family: str
) -> str | None:
    """What keeps a deployment without a stated residency from parking on one host, or None."""
    if (why := wakes_wrong(facts, family)) is not None:
        return why
    if not states_parking(document):
        return "resources do not state parking, parked and wake"
    return None if machine.has_gpu else _no_gpu(host)


def _no_gpu(host: str) -> str:
    return f"{host} has no GPU, and the engine refuses to start with a sleep mode there"


def _check_gpu(document: Deployment, machine: Machine, host: str) -> None:
    """Refuse a declared park where the engine would not start. Raises: Refusal `capability_missing:deep_park`."""
    if document.residency in ("deep", "host_backed") and not machine.has_gpu:
        raise Refusal(
            "capability_missing:deep_park",
            f"{document.name}: residency: {document.residency}: {_no_gpu(host)}. Use residency: restart_only",
        )


def check_unmeasured(
    document: Deployment, policy: HostPolicy, *, provisional: Residency
) -> dict[Phase, Allocation] | None:
    """Refuse what a host can tell of a document before its checkpoint is measured: devices and stated memory.

    Args:
      provisional: as for `settle`.
    Returns: what each phase is charged, where `resources` state it.
    Raises: Refusal `host_ineligible`, `missing_system_allocation`, `host_backed_unavailable`, `insufficient_resources`,
      `insufficient_device_memory`, `capability_missing:deep_park` on a machine without a GPU; `invalid_config` naming a
      phase that is missing.
    """
    machine = machine_of(document, policy)
    _check_gpu(document, machine, policy.name)
    if document.residency == "host_backed":
        check_host_backed(document, machine, policy.name, 0)
    if document.resources is None:
        return None
    parks = document.residency is not None or (states_parking(document) and machine.has_gpu)
    phases = declared_phases(document, policy, machine, provisional if parks else Residency.RESTART_ONLY)
    check_fits(phases, dict.fromkeys(phases, "declared"), policy, document, lambda _: ways_out.OF_RESOURCES)
    return phases


def check_host_backed(document: Deployment, machine: Machine, host: str, copy_bytes: int) -> None:
    """Refuse a declared host copy that this machine cannot hold.

    Args:
      copy_bytes: 1.5 x the weights, and the RAM that options take; 0 while they are not known.
    Raises: Refusal `host_backed_unavailable`.
    """
    if not machine.card:
        raise Refusal(
            "host_backed_unavailable",
            f"{document.name}: residency: host_backed: {host} has one memory for GPU and CPU, so a copy frees nothing. "
            "Use residency: deep",
        )
    needed = copy_bytes + HOST_OVERHEAD_BYTES
    if document.resources is None and needed > room(machine):
        needs, there = larger(needed, room(machine))
        raise Refusal(
            "host_backed_unavailable",
            f"{document.name}: residency: host_backed: the copy of the weights and the engine need {needs} of "
            f"{machine.system or 'host RAM'} on {host}, where {there} may be parked. "
            "Use residency: deep, or raise the parked limit",
            details={"needs_bytes": needed, "limit_bytes": room(machine), "host": host},
        )


def room(machine: Machine) -> int:
    """What parked engines may hold of the RAM beside a card."""
    limits = machine.system_policy
    return 0 if limits is None else min(limits.parked_bytes, limits.managed_bytes)


def one_for_all(residencies: Iterable[Residency]) -> Residency:
    """One tier for a deployment that may run on several hosts: what each of them can keep."""
    found = set(residencies)
    if len(found) == 1:
        return found.pop()
    return Residency.RESTART_ONLY if Residency.RESTART_ONLY in found else Residency.DEEP


def wakes_wrong(facts: Mapping[str, Any], family: str) -> str | None:
    """Why this model cannot be parked on that engine, or None. Source: engines 6.4, 7.4; memory 9."""
    words = " ".join([str(facts.get("model_type") or ""), *map(str, facts.get("architectures") or ())]).lower()
    plain = words.replace("_", "").replace("-", "")
    if "gptoss" in plain:
        return "the weights of gpt-oss cannot be loaded again after a park"
    if family == "vllm" and "nemotron" in plain and ("vl" in plain.split("nemotron", 1)[1]):
        return "this model answers wrongly after a wake"
    quantization = str(facts.get("quantization") or "").lower()
    if family == "sglang" and "modelopt" in quantization:
        return "SGLang cannot load ModelOpt weights again after a park"
    return None
