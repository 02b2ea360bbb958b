"""What a revision is on the hosts that may run it: digested, sized, and looked at again before a start.

Every allowed host digests its own copy and gets a plan of its own; one digest and one tier are the deployment's.
Source: memory 5, 6, 9; api 7.6-7.9.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import attrs

from capyctl.checkpoints import residency, sources
from capyctl.checkpoints.sizing import derive_plan
from capyctl.clock import Clock
from capyctl.control import events, orders
from capyctl.control.book import Book
from capyctl.control.spec import Spec
from capyctl.documents.deployment import Deployment, parse_deployment
from capyctl.documents.model_source import Local
from capyctl.errors import CapyError, InvariantBroken, Refusal
from capyctl.fsm.types import DeploymentId, HostId, Millis, Residency
from capyctl.ledger.types import HostPolicy, Plan
from capyctl.server.deploy import check_together
from capyctl.session import messages as m

T = TypeVar("T", bound=m.Result)


@attrs.define(eq=False)
class _Asked:
    """One digest that a host makes, and what was last heard of it."""

    deployment: DeploymentId
    host: HostId
    seen: m.DigestProgress | None = None


@attrs.define(kw_only=True, eq=False)
class Measuring:
    """Asks hosts about the files of a revision. `book` is read, never written; `call` raises as `hosts.Link.call`."""

    book: Book
    clock: Clock
    call: Callable[[HostId, m.Command], Awaitable[m.Result]]
    downloads_root: Callable[[HostId], str | None]
    _asked: dict[str, _Asked] = attrs.field(init=False, factory=dict)

    async def measure(self, order: orders.Measure) -> events.Event:
        """Digest the checkpoint on the allowed hosts and resolve the revision on each of them."""
        try:
            spec = spec_of(self.book, order.deployment, order.revision)
            document = deployment_of(spec)
            found, tiers, refused = None, {}, Refusal("host_ineligible", "none of the allowed hosts is connected")
            looked_at: set[HostId] = set()
            for host in spec.hosts:
                try:
                    checkpoint = await self._digest(host, spec, order)
                    looked_at.add(host)
                    if found is not None and checkpoint.digest != found.digest:
                        raise Refusal("checkpoint_mismatch", f"host {host} holds other files under the same name")
                    tiers[host] = checkpoint, self._residency(host, checkpoint, spec, document)
                    found = found or checkpoint
                except CapyError as wrong:
                    refused = Refusal(wrong.code, wrong.message)
            plans, tier = {}, residency.one_for_all(tier for _, tier in tiers.values())
            for host, (checkpoint, _) in tiers.items():
                try:
                    plans[host] = self._plan(host, checkpoint, spec, document, tier)
                except CapyError as wrong:
                    refused = Refusal(wrong.code, wrong.message)
            if found is None or not plans:
                raise refused
            if looked_at.issuperset(spec.hosts):  # another one may hold what these cannot
                check_together(spec, plans, {host: self._policy(host) for host in plans})
        except CapyError as wrong:
            return unusable(order, wrong, self.clock())
        return events.RevisionResolved(
            deployment=order.deployment,
            revision=order.revision,
            digest=found.digest,
            weight_bytes=found.weight_bytes,
            plans=plans,
            residency=tier,
            residency_reason=self._reason(spec, document, tier, tiers),
            now_ms=self.clock(),
        )

    def _reason(
        self,
        spec: Spec,
        document: Deployment,
        tier: Residency,
        tiers: Mapping[HostId, tuple[m.Checkpoint, Residency]],
    ) -> str:
        """Why it is that tier; empty where the document or the profile had settled it before."""
        if not spec.residency.parks or document.residency is not None:
            return ""
        host = next((host for host, (_, one) in tiers.items() if one is tier), next(iter(tiers)))
        checkpoint, _ = tiers[host]
        return residency.reason(checkpoint.facts, document, self._policy(host), family=spec.traits.family, settled=tier)

    async def _digest(self, host: HostId, spec: Spec, order: orders.Measure) -> m.Checkpoint:
        here = on_host(spec, self.downloads_root(host))
        command = m.DigestCheckpoint(
            command_id=f"digest:{order.deployment}#{order.revision}@{self.clock()}",
            model=here.model,
            document=here.document,
        )
        self._asked[command.command_id] = _Asked(order.deployment, host)
        try:
            answer = await self.call(host, command)
        finally:
            self._asked.pop(command.command_id, None)
        return answered(host, command, answer, m.Checkpoint)

    def heard(self, report: m.DigestProgress) -> None:
        """How far a digest is."""
        asked = self._asked.get(report.digest)
        if asked is not None:
            asked.seen = report

    def progress(self, deployment: DeploymentId) -> list[dict[str, Any]]:
        """What is read of a deployment's files now, a row per host that has said how much it is."""
        return [
            {"host_id": asked.host, "done_bytes": asked.seen.done_bytes, "total_bytes": asked.seen.total_bytes}
            for asked in self._asked.values()
            if asked.deployment == deployment and asked.seen is not None
        ]

    def _policy(self, host: HostId) -> HostPolicy:
        row = self.book.hosts.get(host)
        if row is None:
            raise Refusal("host_ineligible", f"host {host} has not said what it may hold")
        return row.policy

    def _residency(self, host: HostId, checkpoint: m.Checkpoint, spec: Spec, document: Deployment) -> Residency:
        return residency.settle(
            checkpoint.facts,
            document,
            self._policy(host),
            family=spec.traits.family,
            provisional=spec.residency,
        )

    def _plan(self, host: HostId, checkpoint: m.Checkpoint, spec: Spec, document: Deployment, tier: Residency) -> Plan:
        return derive_plan(
            checkpoint.facts,
            document,
            self._policy(host),
            family=spec.traits.family,
            residency=tier,
            request_deadline_ms=self.book.settings.request_deadline_ms,
        )

    async def verify(self, order: orders.VerifyStart) -> events.Event:
        """Ask a host whether a start could begin there."""
        code: str | None = None
        reason, looked = "", True
        try:
            spec = spec_of(self.book, order.deployment, order.revision)
            command = m.VerifyStart(
                command_id=f"verify:{order.deployment}#{order.revision}@{self.clock()}",
                profile=spec.profile,
                profile_fingerprint=None,
                model=on_host(spec, self.downloads_root(order.host)).model,
                digest=order.digest,
            )
            match await self.call(order.host, command):
                case m.Done():
                    pass
                case m.Refused() as refused:
                    code, reason = refused.code, refused.message
                case other:
                    looked, reason = False, f"the host answered VerifyStart with {type(other).__name__}"
        except CapyError as wrong:
            looked, reason = False, wrong.message
        return events.StartVerified(
            deployment=order.deployment,
            revision=order.revision,
            digest=order.digest,
            host=order.host,
            code=code,
            reason=reason,
            looked=looked,
            now_ms=self.clock(),
        )


def unusable(order: orders.Measure, wrong: CapyError, now_ms: Millis) -> events.RevisionUnusable:
    """A revision that no host can serve, and why."""
    return events.RevisionUnusable(
        deployment=order.deployment, revision=order.revision, code=wrong.code, reason=wrong.message, now_ms=now_ms
    )


def answered(host: HostId, command: m.Command, answer: m.Result, wanted: type[T]) -> T:
    """The answer of a host, which must be a `wanted`. Raises: Refusal with the host's own code, else `internal`."""
    match answer:
        case m.Refused() as refused:
            raise Refusal(refused.code, refused.message)
        case wanted():
            return answer
        case other:
            raise Refusal("internal", f"host {host} answered {type(command).__name__} with {type(other).__name__}")


def spec_of(book: Book, deployment: DeploymentId, revision: int) -> Spec:
    row = book.deployments.get(deployment)
    if row is None or row.state.revision != revision:
        raise Refusal("revision_conflict", "the deployment was changed before this was sent")
    return row.spec


def deployment_of(spec: Spec) -> Deployment:
    """The completed document of an accepted revision."""
    data: Mapping[str, object] = json.loads(spec.document)
    return parse_deployment(data, spec.name)


@attrs.frozen
class OnHost:
    """A deployment as one host has it: `document`, its sources being directories there, and the model's own."""

    document: Mapping[str, Any]
    model: str


def on_host(spec: Spec, downloads_root: str | None) -> OnHost:
    """What a host is told of a deployment: what is downloaded has a place there, and no other source is named.

    Args:
      downloads_root: where that host keeps what it downloads; None when it downloads nothing.
    Raises: Refusal `not_materializable`.
    """
    document = deployment_of(spec)
    if not sources.fetched(document, spec.traits.family):
        return OnHost(json.loads(spec.document), _path(document))
    if downloads_root is None:
        raise Refusal("not_materializable", f"{document.name}: its host downloads no models; name a directory")
    placed = sources.placed(document, spec.traits.family, downloads_root)
    return OnHost(json.loads(placed.canonical()), _path(placed))


def _path(document: Deployment) -> str:
    source = document.model.source
    if not isinstance(source, Local):
        raise InvariantBroken(f"{document.name}: its source has no place")
    return source.path
