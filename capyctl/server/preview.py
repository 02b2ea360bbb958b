"""What a deployment would become on hosts that are known by their documents alone: every decision of a deploy, and no
role that takes it.

The same checks in the same order as a role's (`deploy.accept`, then `residency.settle` and `sizing.derive_plan`), so
that what passes here is refused there only for what nobody can know beforehand: other deployments, digests, and what
is in use when it starts.

Source: config 13; cli 7.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from capyctl.checkpoints import residency
from capyctl.checkpoints.sizing import derive_plan
from capyctl.control.spec import Spec
from capyctl.control.spelling import sizes
from capyctl.documents import strict
from capyctl.documents.deployment import Deployment
from capyctl.engines.registered import Registered
from capyctl.errors import CapyError, Refusal
from capyctl.fsm.types import Millis, Residency
from capyctl.ledger.estimates import source
from capyctl.ledger.types import HostPolicy, Plan
from capyctl.server.deploy import Allowed, Profiles, accept, check_together
from capyctl.server.measuring import deployment_of

Facts = Mapping[str, Any]  # of a checkpoint, as sizing takes them


@attrs.frozen(kw_only=True)
class Site:
    """A host as its document describes it. `source` names that document, and `stated` is it as plain data;
    `deadline_source`: where its bound of requests comes from.

    `facts` looks at a model's files there: None where they cannot be looked at from here; it raises what measuring
    them would.
    """

    allowed: Allowed
    policy: HostPolicy
    profiles: Profiles
    request_deadline_ms: Millis
    facts: Callable[[Deployment], Facts | None]
    source: str
    deadline_source: str = "host"
    stated: Mapping[str, Any] | None = None
    silent: tuple[str, ...] = ()  # cards that do not answer now, and why: a role may know them from before


@attrs.frozen(kw_only=True)
class Preview:
    """A deployment on one host. `facts` and `plan` are None where its files could not be looked at.

    `refused`: why this host cannot take it, where another one may.
    """

    site: Site
    registered: Registered
    document: Deployment
    spec: Spec
    facts: Facts | None = None
    residency: Residency | None = None
    residency_reason: str = ""
    plan: Plan | None = None
    refused: CapyError | None = None

    @property
    def deadline_ms(self) -> Millis:
        """How long a request may take: what the document says, else the host's bound."""
        stated = self.spec.request_deadline_ms
        return self.site.request_deadline_ms if stated is None else stated


def preview(document: Deployment, sites: Sequence[Site], *, more_hosts: bool = False) -> list[Preview]:
    """What `document` would be on each of the hosts that it may run on.

    Args:
      more_hosts: as for `accept`.
    Raises: Refusal with the code that deploying, measuring or sizing it would have, where no host can take it.
    """
    config, hosts = strict.unstructure(document.completed()), [site.allowed for site in sites]
    found = []
    for site in sites:
        try:
            spec = accept(config, site.profiles, hosts, site.request_deadline_ms, more_hosts=more_hosts)
        except CapyError as refused:
            raise (refused.of(site.source) if len(sites) > 1 else refused) from None
        if site.allowed.host not in spec.hosts:
            continue
        found.append(accepted(spec, site))
    whole = bool(document.completed().placement.hosts) or not more_hosts
    return judged(found, every_host=whole)


def accepted(spec: Spec, site: Site) -> Preview:
    """An accepted deployment on one of its hosts, before anybody has looked at its files."""
    return Preview(
        site=site, registered=site.profiles.registered(spec.profile), document=deployment_of(spec), spec=spec
    )


def judged(accepted: Sequence[Preview], *, every_host: bool) -> list[Preview]:
    """What a deployment is on each of its hosts, by its files as far as they can be looked at. Reads files.

    Args:
      every_host: there is no other that may hold what these cannot.
    Raises: Refusal as `preview`.
    """
    found = [_or_refused(made, _settled) for made in accepted]
    tier = residency.one_for_all(made.residency for made in found if made.residency is not None)
    sized = [made if made.refused is not None else _or_refused(made, partial(_sized, tier=tier)) for made in found]
    if all(made.refused is not None for made in sized):
        raise next(made.refused for made in reversed(sized) if made.refused is not None)
    known = [made for made in sized if made.plan is not None]
    if every_host and all(made.plan is not None or made.refused is not None for made in sized):
        policies = {made.site.policy.host: made.site.policy for made in known}
        plans = {made.site.policy.host: made.plan for made in known if made.plan is not None}
        check_together(known[0].spec, plans, policies)
    return sized


def _or_refused(made: Preview, step: Callable[[Preview], Preview]) -> Preview:
    try:
        return step(made)
    except CapyError as refused:
        return attrs.evolve(made, refused=refused)


def _settled(made: Preview) -> Preview:
    spec = made.spec
    try:
        facts = made.site.facts(made.document)
    except Refusal as wrong:
        words = f"{spec.name}: model: {wrong.message}"
        raise Refusal(wrong.code, words, details=wrong.details, retryable=wrong.retryable) from None
    if facts is None:
        return made
    tier = residency.settle(
        facts, made.document, made.site.policy, family=spec.traits.family, provisional=spec.residency
    )
    return attrs.evolve(made, facts=facts, residency=tier)


def _sized(made: Preview, tier: Residency) -> Preview:
    if made.facts is None:
        return attrs.evolve(made, residency_reason=made.spec.residency_reason)
    spec, family = made.spec, made.spec.traits.family
    reason = spec.residency_reason or residency.reason(
        made.facts, made.document, made.site.policy, family=family, settled=tier
    )
    plan = derive_plan(
        made.facts,
        made.document,
        made.site.policy,
        family=family,
        residency=tier,
        request_deadline_ms=made.site.request_deadline_ms,
    )
    return attrs.evolve(made, residency=tier, residency_reason=reason, plan=plan)


def plan_view(plan: Plan, policy: HostPolicy | None) -> dict[str, Any]:
    """A plan as JSON; bytes are decimal strings. `policy`: of its host, where that is known."""
    return {
        "context_tokens": plan.context_tokens,
        "context_reason": plan.context_reason,
        "slots": plan.slots,
        "initialize_ms": plan.initialize_ms,
        "wake_ms": plan.wake_ms,
        "phases": {
            phase.value: {
                "bytes": sizes(allocation.bytes),
                "devices": [claim.device for claim in allocation.claims],
                "provenance": {domain: source(plan, policy, phase, domain) for domain in allocation.bytes},
            }
            for phase, allocation in plan.phases.items()
        },
        "pools": sizes(plan.pools),
        "facts": dict(plan.facts),
    }
