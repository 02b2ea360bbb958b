"""The deployment document: one model on one engine, as its operator wrote it.

Three fields are enough (`name`, `engine`, `model`). `parse_deployment` reads the form, `completed`
fills in what the document alone decides; what a host or a checkpoint decides is resolved elsewhere.
The same code serves the CLI, the API, the store and the host, so they cannot disagree.
Source: config 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from capyctl.documents import reader, strict
from capyctl.documents.engine_config import FAMILIES, EngineConfig
from capyctl.documents.model_source import Model
from capyctl.documents.resources import PHASES, SERVING, DeviceClaim, PhaseResources, Resources, check_ram
from capyctl.documents.scalars import Name, Route
from capyctl.documents.strict import Wrong, at_least, no_more_than, within
from capyctl.errors import Refusal
from capyctl.units import Duration, Size

INSTANCES_MAX: Final = 1024
__all__ = ["Deployment", "DeviceClaim", "PhaseResources", "Resources", "parse_deployment"]


@attrs.frozen(kw_only=True)
class Placement:
    """Where it may run: named hosts in preference order, or hosts whose labels match."""

    hosts: tuple[Name, ...] = attrs.field(default=(), validator=no_more_than(256))
    selector: Mapping[Name, str] = attrs.field(factory=dict, validator=no_more_than(64))
    strategy: Literal["spread", "pack"] = "spread"
    max_per_host: int | None = attrs.field(default=None, validator=within(1, INSTANCES_MAX))

    def __attrs_post_init__(self) -> None:
        if len(set(self.hosts)) != len(self.hosts):
            raise Wrong(("hosts",), "names a host twice")


@attrs.frozen(kw_only=True)
class Topology:
    """How one instance is split over cards."""

    tensor_parallel: int = attrs.field(default=1, validator=within(1, 1024))
    pipeline_parallel: int = attrs.field(default=1, validator=within(1, 1024))

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


@attrs.frozen(kw_only=True)
class Timeouts:
    """Bounds of one start and one wake; absent ones follow from the weights."""

    initialize: Duration | None = attrs.field(default=None, validator=at_least(Duration(30_000)))
    wake: Duration | None = attrs.field(default=None, validator=at_least(Duration(10_000)))


@attrs.frozen(kw_only=True)
class Lifecycle:
    """Who may start it, and whether pressure and timers may end it."""

    activation: Literal["on_demand", "explicit"] = "on_demand"
    warm: bool = False


@attrs.frozen(kw_only=True)
class Deployment:
    """One deployment document. See the module."""

    schema_version: Literal[1] = 1
    kind: Literal["deployment"] = "deployment"
    name: Name
    engine: Name | None = None
    runtime_profile: Name | None = None
    runtime_profile_revision: int | None = attrs.field(default=None, validator=within(1, 2**31 - 1))
    model: Model
    routes: tuple[Route, ...] = attrs.field(default=(), validator=no_more_than(64))
    api: Literal["chat", "decisions"] = "chat"
    residency: Literal["deep", "host_backed", "restart_only"] | None = None
    recipe: Literal["standard"] = "standard"
    recovery: Literal["reconcile"] = "reconcile"
    host: Name | None = None
    placement: Placement = attrs.field(factory=Placement)
    instances: int = attrs.field(default=1, validator=within(1, INSTANCES_MAX))
    topology: Topology = attrs.field(factory=Topology)
    devices: tuple[DeviceClaim, ...] = attrs.field(default=(), validator=no_more_than(64))
    resources: Resources | None = None
    engine_config: EngineConfig = attrs.field(factory=EngineConfig)
    request_deadline: Duration | None = attrs.field(
        default=None, validator=within(Duration(1_000), Duration(3_600_000))
    )
    timeouts: Timeouts = attrs.field(factory=Timeouts)
    lifecycle: Lifecycle = attrs.field(factory=Lifecycle)
    lmcache: Literal["auto", "off", "required"] = "auto"
    lmcache_pool: Size | None = None

    def __attrs_post_init__(self) -> None:
        _check_names(self)
        _check_placement(self)
        _check_resources(self)
        _check_instances(self)
        _check_deadlines(self)
        if self.lmcache == "off" and self.lmcache_pool is not None:
            raise Wrong(("lmcache_pool",), f"is {self.lmcache_pool}, and lmcache is off; keep one of them")
        if self.api == "decisions" and self.residency in ("deep", "host_backed"):
            raise Wrong(("residency",), "a decisions deployment is restart_only: it does not park", _DECISIONS)
        if self.family in FAMILIES:
            self.check_family(self.family)

    @property
    def profile(self) -> str:
        """The engine profile it names, or a family word that stands for the host's only one."""
        return self.engine or self.runtime_profile or ""

    @property
    def claims(self) -> tuple[DeviceClaim, ...]:
        """The devices it is to run on: what `devices` says, and what its `resources` claim where that says nothing."""
        claimed = () if self.resources is None else self.resources.claims
        if all(claim == DeviceClaim() for claim in self.devices):
            return claimed or self.devices
        return tuple(_together(claim, _twin(claim, index, claimed)) for index, claim in enumerate(self.devices))

    @property
    def family(self) -> str:
        """The family when the profile's name says it, else the profile's name."""
        return self.profile

    def check_family(self, family: str) -> None:
        """Refuse what an engine of `family` cannot do. Raises Wrong; the server calls it with the profile's family."""
        try:
            self.engine_config.check_family(family)
        except Wrong as wrong:
            raise wrong.under("engine_config") from None
        parks = family in ("vllm", "sglang")
        if self.residency in ("deep", "host_backed") and not parks:
            raise Wrong(("residency",), f"{family} cannot park; use restart_only", "capability_missing:deep_park")
        if self.api == "decisions":
            _check_decisions(self, family)
        if family in ("llamacpp", "custom") and self.model.draft is not None:
            raise Wrong(("model", "draft"), f"is not read by {family}")
        if family in ("tensorfold", "custom") and self.resources is None:
            raise Wrong(("resources",), f"is required on {family}: its memory cannot be derived")

    def completed(self) -> Deployment:
        """With every field filled in that the document alone decides. Completing twice changes nothing."""
        placement = self.placement if self.host is None else attrs.evolve(self.placement, hosts=(self.host,))
        return attrs.evolve(
            self,
            engine=Name(self.profile),
            runtime_profile=Name(self.profile),
            routes=self.routes or (Route(self.name),),
            host=None,
            placement=placement,
        )

    def with_home(self, home: str) -> Deployment:
        """With `~/` of its model read as `home`; only the CLI knows whose home is meant."""
        return attrs.evolve(self, model=self.model.expanded(home))

    def settled(self, source: str) -> Deployment:
        """Itself, when it needs no CLI any more. Raises Refusal for `~/` paths and unpinned references."""
        try:
            self.model.check_settled()
        except Wrong as wrong:
            raise strict.refusal(wrong.under("model"), source) from None
        return self

    def canonical(self) -> str:
        """The completed document as JSON: keys sorted, no spaces; equal deployments give equal text."""
        return strict.canonical(self.completed())


_DECISIONS: Final = "capability_missing:decisions"


def parse_deployment(text: str | bytes | Mapping[str, Any], source: str, *, by_client: bool = False) -> Deployment:
    """A deployment document, strictly read and checked as far as it goes by itself; not yet completed.

    Args:
      text: YAML or JSON text, or already read plain data (an API body).
      source: how messages call it: its path, or "the document".
      by_client: leave `~/` and references without a commit in, for the CLI to expand and pin.
    Raises: Refusal, one line naming the field; mostly invalid_config, 5-codes for what no engine does.
    """
    data = dict(text) if isinstance(text, Mapping) else reader.read(text, source)
    if type(data) is not dict:
        raise Refusal("invalid_config", f"{source}: expected a deployment document: name, engine and model at least")
    made = strict.structure(data, Deployment, source)
    return made if by_client else made.settled(source)


def _check_names(self: Deployment) -> None:
    if self.engine is None and self.runtime_profile is None:
        raise Wrong(("engine",), "is required: a profile's name, or a family such as llamacpp")
    if self.engine is not None and self.runtime_profile not in (None, self.engine):
        raise Wrong(("runtime_profile",), f"is {self.runtime_profile}, but engine says {self.engine}; keep one of them")
    if len(set(self.routes)) != len(self.routes):
        raise Wrong(("routes",), "names a route twice")


def _check_placement(self: Deployment) -> None:
    if self.host is not None and self.placement.hosts not in ((), (self.host,)):
        raise Wrong(("host",), "is short for placement.hosts; keep one of them")
    hosts = (self.host,) if self.host is not None else self.placement.hosts
    ids = [claim.id for claim in self.devices if claim.id is not None]
    if len(set(ids)) != len(ids):
        raise Wrong(("devices",), "names a device twice")
    if ids and len(hosts) != 1:
        raise Wrong(("devices",), "an id means one host's card; name that host with `host`")


def _check_instances(self: Deployment) -> None:
    """What the document alone shows to be too many of them. What hosts can hold is asked when it is deployed."""
    hosts = 1 if self.host is not None else len(self.placement.hosts)
    each = self.placement.max_per_host
    if hosts and each is not None and self.instances > hosts * each:
        raise Wrong(
            ("instances",),
            f"is {self.instances}; placement.max_per_host, {each}, on {hosts} host{'s' if hosts > 1 else ''} allows "
            f"{hosts * each}. Lower it, or raise the other",
        )
    alone = next((claim.id for claim in self.claims if claim.id is not None and claim.sharing == "exclusive"), None)
    if alone is not None and self.instances > 1:
        raise Wrong(("instances",), f"is {self.instances}, and each wants {alone} exclusively; state 1, or share it")


def _check_resources(self: Deployment) -> None:
    """What `resources` may not stand beside. What it contradicts by itself is refused where it is read."""
    resources, parks = self.resources, self.residency in ("deep", "host_backed")
    if resources is None:
        return
    for field, stated_as in (("startup", "the start's memory as cold"), ("request", "its memory as ready")):
        if getattr(self.engine_config.memory, field) is not None:
            if resources.short:
                stated_as = "its memory as gpu and ram"
            raise Wrong(
                ("engine_config", "memory", field),
                f"cannot stand beside resources, which state {stated_as}; leave it out",
            )
    cache, held = self.engine_config.memory.kv_cache, resources.serving_bytes
    if cache is not None and cache.bytes >= held:
        raise Wrong(
            ("engine_config", "memory", "kv_cache"),
            f"is {cache}, which leaves no room for weights in the {Size(held)} of resources while it serves",
        )
    if resources.short and parks:
        raise Wrong(
            ("resources",),
            f"gpu and ram are for restart_only, and residency is {self.residency}; state the phases instead",
        )
    if resources.short and (len(self.devices) > 1 or self.topology.ranks > 1):
        raise Wrong(("resources",), "gpu and ram are for one device; state the phases instead")
    for phase in PHASES if parks else ():
        if getattr(resources, phase) is None:
            raise Wrong(("resources", phase), f"is required for residency {self.residency}; state what it holds then")
    if parks and resources.parked is not None:
        try:
            check_ram("parked", resources.parked)
        except Wrong as wrong:
            raise wrong.under("resources") from None
    _check_claims(self, resources)
    _check_sharing(self, resources)


def _check_claims(self: Deployment, resources: Resources) -> None:
    """The devices of a block are those of its deployment, one for each rank. A group's figures are a member's."""
    ids = [claim.id for claim in self.devices]
    named = [] if None in ids else [str(device) for device in ids]
    group = len(self.placement.hosts) > 1
    most = max(1, len(self.devices), self.topology.ranks)
    for phase, block in resources.stated.items():
        for device in (*block.ids, *block.cards):
            if named and device not in named:
                raise Wrong(
                    ("resources", phase), f"uses {device}, and devices names {', '.join(named)}; keep one of them"
                )
        uses = max(len(block.devices), len(block.cards))
        if uses > most:
            raise Wrong(("resources", phase), f"uses {uses} devices, and topology says {most}; state one for each rank")
        if phase in SERVING and block.cards and len(block.cards) < self.topology.ranks and not group:
            raise Wrong(
                ("resources", phase, "allocations"),
                f"hold memory on {len(block.cards)} of {self.topology.ranks} cards; state that of each rank's card",
            )


def _check_sharing(self: Deployment, resources: Resources) -> None:
    """A device is shared or exclusive for the whole life of an engine: what is said of it twice must agree."""
    claims = self.claims
    for phase, block in resources.stated.items():
        for index, claim in enumerate(block.devices):
            known = _twin(claim, index, claims)
            if claim.sharing is None or known is None or claim.sharing == known.sharing:
                continue
            said = "devices" if any(one.sharing is not None for one in self.devices) else "the ready phase"
            word = f"says {known.sharing}" if known.sharing else "says nothing of it"
            raise Wrong(
                ("resources", phase, "devices", index, "sharing"),
                f"is {claim.sharing}, and {said} {word}; say the same everywhere",
            )


def _twin(claim: DeviceClaim, index: int, others: tuple[DeviceClaim, ...]) -> DeviceClaim | None:
    """The claim among `others` that is of the same device: by its id, else the one in its place."""
    if claim.id is not None:
        named = next((other for other in others if other.id == claim.id), None)
        if named is not None:
            return named
    placed = others[index] if index < len(others) else None
    return placed if placed is None or None in (placed.id, claim.id) else None


def _together(claim: DeviceClaim, twin: DeviceClaim | None) -> DeviceClaim:
    if twin is None:
        return claim
    return DeviceClaim(
        id=claim.id if claim.id is not None else twin.id,
        sharing=claim.sharing if claim.sharing is not None else twin.sharing,
    )


SHORT_START: Final = Duration(120_000)
"""What a start may take beside the time for its weights, at the least that is derived for it."""


def short_start(document: Deployment, derived_ms: int | None = None) -> str | None:
    """What to know of a `request_deadline` that leaves a start less than any start is given; None where it does not.

    Args:
      derived_ms: what a start would be given without it, where the weights are known.
    """
    deadline = document.request_deadline
    if deadline is None or document.timeouts.initialize is not None or deadline >= SHORT_START:
        return None
    if derived_ms is None:
        needs, states = f"{SHORT_START} and 10s for each GB of its weights", "<as much>"
    else:
        needs = states = f"{-(-derived_ms // 1000)}s"
    return (
        f"request_deadline, {deadline}, bounds a start of {document.name} too, which may need {needs}: "
        f"one that takes longer is ended. Raise it, or: capyctl start deployment {document.name} "
        f"--initialize-timeout {states}"
    )


def _check_deadlines(self: Deployment) -> None:
    if self.request_deadline is None:
        return
    for name in ("initialize", "wake"):
        bound = getattr(self.timeouts, name)
        if bound is not None and bound > self.request_deadline:
            raise Wrong(
                ("timeouts", name),
                f"is {bound}, longer than request_deadline, {self.request_deadline}, which bounds it too; "
                "raise that, or leave this one out",
            )


def _check_decisions(self: Deployment, family: str) -> None:
    if family in ("vllm", "tensorfold"):
        raise Wrong(("api",), f"{family} answers no decisions; use llamacpp, sglang or a custom engine", _DECISIONS)
    block = self.engine_config.sglang
    if block is not None:
        for name in ("tool_call_parser", "reasoning_parser"):
            if getattr(block, name) not in ("auto", "none"):
                raise Wrong(("engine_config", "sglang", name), "a decisions deployment has no parsers", _DECISIONS)
