"""A deployment document and what hosts publish, as the Spec that control decides by.

Everything that can be refused without measuring the checkpoint is refused here, before anything is
stored: unknown profiles, options nobody approved, hosts that do not exist, deadlines above the host's.
Source: config 7; engines 2.9, 3, 4.2; api 5.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from capyctl.checkpoints.residency import check_unmeasured
from capyctl.checkpoints.time_limits import TENSORFOLD_START_MS
from capyctl.checkpoints.ways_out import SPLIT
from capyctl.control.spec import Spec
from capyctl.documents.deployment import Deployment, parse_deployment
from capyctl.documents.model_source import Http
from capyctl.documents.scalars import Name
from capyctl.engines.check import check_deployment
from capyctl.engines.families import traits_of
from capyctl.engines.parking import provisional, residency_reason
from capyctl.engines.registered import Registered
from capyctl.errors import CapyError, Refusal
from capyctl.fsm.types import Activation, Device, HostId, Millis, Phase, Residency
from capyctl.ledger import together
from capyctl.ledger.placement import Strategy
from capyctl.ledger.types import Allocation, HostPolicy, Plan
from capyctl.units import Duration


class Profiles(Protocol):
    """The published profiles."""

    def profiles(self) -> Sequence[Registered]: ...

    def registered(self, profile: str) -> Registered:
        """Raises: Refusal `profile_not_published` naming those that are there."""


@attrs.frozen(kw_only=True)
class Allowed:
    """A host that deployments may run on."""

    host: HostId
    name: str
    activation: Activation = Activation.ON_DEMAND
    policy: HostPolicy | None = None  # what it may hold, where that is known


def accept(
    config: Mapping[str, Any],
    profiles: Profiles,
    hosts: Sequence[Allowed],
    request_deadline_ms: Millis,
    *,
    more_hosts: bool = False,
) -> Spec:
    """Check a deployment document against everything that is known before its checkpoint is.

    Args:
      config: the document as plain data, from a strict parser.
      hosts: every enrolled host, in preference order.
      request_deadline_ms: the hosts' bound; a deployment may state a shorter one.
      more_hosts: others may be enrolled, so that what is too much for these is not too much for ever.
    Raises: Refusal with the document's, the profile's or the placement's code; nothing is stored then.
    """
    document = parse_deployment(config, "config")
    _check_this_release(document)
    registered = profiles.registered(document.profile)
    check_deployment(document, registered)
    _check_ranks(document, registered.engine)
    name = Name(registered.name)  # a family word is settled now: registering a second engine changes no deployment
    completed = attrs.evolve(document, engine=name, runtime_profile=name).completed()
    allowed = _allowed(completed, hosts)
    named = [claim.id for claim in completed.claims if claim.id is not None]
    if named and len(allowed) > 1:
        raise Refusal(
            "invalid_config", f"{document.name}: {named[0]} means one host's card; name that host with `host`"
        )
    residency = provisional(completed, registered)
    plans = _check_memory(completed, allowed, residency)
    explicit = completed.lifecycle.activation == "explicit" or any(
        host.activation is Activation.EXPLICIT for host in allowed
    )
    spec = Spec(
        name=completed.name,
        routes=tuple(completed.routes),
        profile=registered.name,
        traits=traits_of(registered),
        document=completed.canonical(),
        api=completed.api,
        activation=Activation.EXPLICIT if explicit else Activation.ON_DEMAND,
        warm=completed.lifecycle.warm,
        residency=residency,
        residency_reason=residency_reason(completed, registered),
        instances=completed.instances,
        hosts=tuple(host.host for host in allowed),
        max_per_host=completed.placement.max_per_host,
        strategy=Strategy(completed.placement.strategy),
        devices=tuple(Device(str(device)) for device in named),
        request_deadline_ms=_deadline(completed, request_deadline_ms, registered.engine),
    )
    if not more_hosts or completed.placement.hosts:
        _check_count(spec)
        if plans is not None:
            check_together(spec, plans, {host.host: host.policy for host in allowed if host.policy is not None})
    return spec


def check_together(spec: Spec, plans: Mapping[HostId, Plan], policies: Mapping[HostId, HostPolicy]) -> None:
    """Refuse more instances than all of these hosts can ever hold at once.

    Raises: Refusal with the code of what bounds them, and figures; not retryable.
    """
    found = together.too_many(spec.instances, plans, policies, named=spec.devices, max_per_host=spec.max_per_host)
    if found is not None:
        raise Refusal(found.code, found.message(spec.name), details=found.details(), retryable=False)


def _check_count(spec: Spec) -> None:
    """Refuse more instances than `max_per_host` lets all hosts take, whatever memory they have."""
    if spec.max_per_host is None or spec.instances <= spec.max_per_host * len(spec.hosts):
        return
    most = spec.max_per_host * len(spec.hosts)
    raise Refusal(
        "host_ineligible",
        f"{spec.name}: instances: is {spec.instances}, and placement.max_per_host, {spec.max_per_host}, on "
        f"{len(spec.hosts)} host{'s' if len(spec.hosts) > 1 else ''} allows {most}. Lower it, or raise the other",
        details={"instances": spec.instances, "instances_max": most},
        retryable=False,
    )


def _check_this_release(document: Deployment) -> None:
    for source in document.model.sources:
        if isinstance(source, Http) and source.archive is not None:
            raise Refusal("unsupported", f"{document.name}: model: archives are not unpacked; name one file")
    if document.lmcache == "required":
        raise Refusal("capability_missing:lmcache", f"{document.name}: no engine of this release runs with LMCache")


def _check_ranks(document: Deployment, family: str) -> None:
    """An engine may span equal cards of one machine, one for each rank, where its family can."""
    ranks, devices = document.topology.ranks, len(document.devices)
    if ranks > 1 and family not in SPLIT:
        raise Refusal(
            "multi_gpu_unsupported",
            f"{document.name}: topology: {family} runs on one device; leave topology out, or use {' or '.join(SPLIT)}",
        )
    if ranks > 1 and len(document.placement.hosts) > 1:
        raise Refusal(
            "unsupported",
            f"{document.name}: topology: one instance runs on one machine in this release; name one host with `host`",
        )
    if devices > 1 and devices != ranks:
        raise Refusal(
            "multi_gpu_unsupported",
            f"{document.name}: devices: names {devices} for {ranks} rank{'s' if ranks > 1 else ''}; "
            f"state topology.tensor_parallel: {devices}, or one device for each rank",
        )


def _allowed(document: Deployment, hosts: Sequence[Allowed]) -> list[Allowed]:
    known = {host.name: host for host in hosts}
    unknown = [name for name in document.placement.hosts if name not in known]
    if unknown:
        raise Refusal(
            "not_found",
            f"{document.name}: placement.hosts: there is no host {unknown[0]}; known: {', '.join(known) or 'none'}",
        )
    if document.placement.selector:
        raise Refusal("host_ineligible", f"{document.name}: placement.selector: no host has these labels")
    found = [known[name] for name in document.placement.hosts] or list(hosts)
    if not found:
        raise Refusal("host_ineligible", f"{document.name}: no host is connected")
    return found


def _check_memory(document: Deployment, allowed: Sequence[Allowed], residency: Residency) -> dict[HostId, Plan] | None:
    """Refuse what none of the allowed hosts can hold, as far as the document alone says what that is.

    Returns: what each host that can would be charged; None where the document or a host leaves that open.
    """
    refused: list[CapyError] = []
    plans: dict[HostId, Plan] | None = {}
    for host in allowed:
        if host.policy is None:
            return None
        try:
            phases = check_unmeasured(document, host.policy, provisional=residency)
        except CapyError as wrong:
            refused.append(wrong)
            continue
        if phases is None:
            plans = None
        elif plans is not None:
            plans[host.host] = stated_plan(phases)
    if len(refused) == len(allowed):
        raise refused[0]
    return plans


def stated_plan(phases: Mapping[Phase, Allocation]) -> Plan:
    """What `resources` state, for whoever judges memory alone."""
    provenance = dict.fromkeys(phases, "declared")
    return Plan(phases=phases, provenance=provenance, initialize_ms=Millis(0), wake_ms=Millis(0), context_tokens=0)


def _deadline(document: Deployment, most_ms: Millis, family: str) -> Millis | None:
    """What the document states. Raises: Refusal for more than the hosts allow, and for time limits above either."""
    stated = document.request_deadline
    if stated is None:
        bound = Duration(max(most_ms, TENSORFOLD_START_MS) if family == "tensorfold" else most_ms)
        for name in ("initialize", "wake"):
            limit = getattr(document.timeouts, name)
            if limit is not None and limit > bound:
                raise Refusal(
                    "invalid_config",
                    f"{document.name}: timeouts.{name}: is {limit}, longer than a request may take here, {bound}, "
                    "which bounds it too; raise resource_policy.queue.request_deadline of the host, or lower this one",
                )
        return None
    if stated.ms > most_ms:
        raise Refusal(
            "invalid_config",
            f"{document.name}: request_deadline: is {stated}; the host's bound is {Duration(most_ms)}",
        )
    return Millis(stated.ms)
