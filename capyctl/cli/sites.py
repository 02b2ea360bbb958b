"""The hosts that a deployment is checked against without a role: this machine, or those of host documents.

Everything is read where a role would read it, and nothing is written, asked over a network, or run.
Source: config 13, 14.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from capyctl.checkpoints.store import CheckpointStore
from capyctl.documents import kinds, places, strict
from capyctl.documents.deployment import Deployment
from capyctl.documents.host import DomainLimits, Host
from capyctl.documents.model_source import Local
from capyctl.documents.paths import REDACTED
from capyctl.documents.settings import StandaloneSettings
from capyctl.downloads.fetch import Fetcher
from capyctl.engines.families import FAMILIES
from capyctl.engines.registry import Registry
from capyctl.engines.revisioned import ENGINES
from capyctl.errors import CapyError, Refusal
from capyctl.fsm.types import Activation, Bytes, Device, Domain, HostId, Millis
from capyctl.host.devices import Observer
from capyctl.ledger.types import DomainKind, DomainPolicy, HostPolicy
from capyctl.roles.machine import check_this_release, checkpoints_of, fetcher_of, limits_of, name_of, registry_of
from capyctl.server.deploy import Allowed
from capyctl.server.preview import Facts, Site

START_ONLY: Final = (
    "whether the listeners' addresses are this machine's and free",
    "the state directory: who may reach it, its keys, and limits below what runs",
)
"""What only a start itself knows of a document of this machine."""
_DEADLINE: Final = "host.resource_policy.queue.request_deadline"
KINDS = {"unified": DomainKind.UNIFIED, "distinct": DomainKind.DISTINCT, "device": DomainKind.DEVICE}


def this_machine(settings: StandaloneSettings) -> Site | None:
    """This machine as a standalone role would find it; None when no engine is registered here.

    Raises: Refusal as the start of that role.
    """
    registry = registry_of(settings)
    registry.measure_own(running=False)
    registry.reload()
    if not registry.profiles():
        return None
    check_this_release(settings)
    host = HostId(name_of(settings))
    memory, cards = trio.run(Observer().discover)
    policy = limits_of(settings, host, memory, cards)
    half = settings.document.host
    store = checkpoints_of(settings, registry, None)
    downloads = str(half.model_sources.path or settings.models_dir)
    check = _fetcher(settings).check
    return Site(
        allowed=Allowed(host=host, name=policy.name, activation=Activation(half.lifecycle.activation), policy=policy),
        policy=policy,
        profiles=registry,
        request_deadline_ms=Millis(half.resource_policy.queue.request_deadline.ms),
        facts=partial(store.facts_here, downloads=downloads, check=check),
        source="this machine",
        deadline_source=next(
            ("default" if row.source == "default" else "host" for row in settings.rows if row.path == _DEADLINE),
            "default",
        ),
        silent=tuple(f"card {card.index}: {card.fault}" for card in cards if card.fault),
    )


def check_sources(settings: StandaloneSettings, document: Deployment) -> None:
    """Refuse a source that this machine's settings never let it fetch, whatever engine it is for. Raises: Refusal."""
    for source in document.model.sources:
        if not isinstance(source, Local):
            try:
                _fetcher(settings).check(source)
            except Refusal as refused:
                raise Refusal(refused.code, f"{document.name}: model: {refused.message}") from None


def _fetcher(settings: StandaloneSettings) -> Fetcher:
    stated = settings.document.host.model_sources
    return fetcher_of(stated, settings.models_dir, settings.places.secrets, None, os.environ)


def check_start(settings: StandaloneSettings) -> list[str]:
    """Refuse what the start of a standalone role on this machine would refuse, as far as nothing is run or written.

    Returns: what of it only that start can tell. Raises: Refusal as that start.
    """
    check_this_release(settings)
    registry = registry_of(settings)
    registry.measure_own(running=False)
    registry.reload()
    left = [
        f"host.local_engine.{word}: whether it runs, and its version"
        for word in settings.document.host.local_engine.installations
        if FAMILIES[word].glance is None
    ]
    try:
        memory, cards = trio.run(Observer().discover)
        limits_of(settings, HostId(name_of(settings)), memory, cards)
    except CapyError as refused:
        if refused.code != "topology_unknown":  # a role may know its cards from before
            raise
        left.append(f"limits: {refused.message}")
    return [*left, *START_ONLY]


def of_documents(files: list[str], wanted: tuple[str, ...]) -> list[Site]:
    """The hosts of these documents, in the order of `wanted`, which names those that a deployment may run on.

    Raises: Refusal naming the document that cannot be used, is missing, or is not wanted.
    """
    hosts: dict[str, tuple[str, Host, bool]] = {}
    for path in files:
        raw = kinds.read_file(path, f"--host {path}")
        kind, made = kinds.check(raw, f"--host {path}")
        if kind != "host":
            hint = "; leave --host out to check against this machine" if kind == "standalone" else ""
            raise Refusal("invalid_config", f"--host {path}: is a {kind} document; expected a host document{hint}")
        if made.name in hosts:
            raise Refusal("invalid_config", f"--host {path}: a document of host {made.name} was given already")
        states_deadline = "request_deadline" in raw["resource_policy"].get("queue", {})
        hosts[made.name] = (path, made, states_deadline)
    for name in wanted:
        if name not in hosts:
            raise Refusal("invalid_config", f"no --host document of {name}, which placement.hosts names")
    for name in hosts:
        if wanted and name not in wanted:
            raise Refusal("invalid_config", f"--host gives {name}, which placement.hosts does not name")
    return [_site(*hosts[name]) for name in wanted or hosts]


def _site(path: str, host: Host, states_deadline: bool) -> Site:
    models = Path(host.model_store.path or os.path.join(places.home_of(os.environ), "models"))
    registry = Registry(
        Path(os.path.dirname(places.absolute(path, os.getcwd()))) / ENGINES.file,
        stated=host.runtime_profiles,
        stated_in=os.path.basename(path),
        local=host.local_engine,
        models_root=models,
        telemetry=host.engine_telemetry == "allow",
    )
    registry.reload()
    store = CheckpointStore(
        None,
        models,
        registry.fixed_args,
        family_of=lambda profile: registry.registered(profile).engine,
        parsers=registry.parsers,
        profile_facts=registry.sizing_facts,
    )

    downloads = str(host.model_sources.path or models)
    fetcher = fetcher_of(host.model_sources, str(models), os.path.join(host.state_dir, "secrets"), None, {})

    def facts(document: Deployment) -> Facts | None:
        """Of files that lie here as they would lie there; others are that host's to look at."""
        source = document.model.source
        if isinstance(source, Local) and not os.path.exists(models / source.path):
            return None
        return store.facts_here(document, downloads, fetcher.check)

    policy = _policy(host)
    return Site(
        allowed=Allowed(
            host=policy.host, name=host.name, activation=Activation(host.lifecycle.activation), policy=policy
        ),
        policy=policy,
        profiles=registry,
        request_deadline_ms=Millis(host.resource_policy.queue.request_deadline.ms),
        facts=facts,
        source=path,
        deadline_source="host" if states_deadline else "default of a host",
        stated=_shown(host),
    )


def _shown(host: Host) -> dict[str, Any]:
    """A host document with every field, but for the values of engines' variables, which may be secrets."""
    plain: dict[str, Any] = strict.unstructure(host)
    for profile in plain["runtime_profiles"].values():
        profile["env"] = dict.fromkeys(profile["env"], REDACTED)
    return plain


def _policy(host: Host) -> HostPolicy:
    """What a host document allows. What the machine really has is the host's to say, so limits are all there is."""
    stated = host.resource_policy
    sharing = {str(name): device.sharing or stated.device_sharing for name, device in stated.devices.items()}
    mapped = {device.domain: str(name) for name, device in stated.devices.items()}
    return HostPolicy(
        host=HostId(host.name),
        name=host.name,
        domains={
            Domain(name): _domain(limits, str(limits.device or mapped.get(name) or ""), sharing)
            for name, limits in stated.domains.items()
        },
        max_parked=stated.max_parked,
    )


def _domain(limits: DomainLimits, device: str, sharing: Mapping[str, Any]) -> DomainPolicy:
    return DomainPolicy(
        kind=KINDS[limits.memory],
        capacity_bytes=Bytes(limits.managed_limit.bytes + limits.free_reserve.bytes),
        managed_bytes=Bytes(limits.managed_limit.bytes),
        reserve_bytes=Bytes(limits.free_reserve.bytes),
        parked_bytes=Bytes(limits.parked_limit.bytes),
        host_kv_bytes=Bytes(limits.host_kv_limit.bytes),
        device=Device(device) if device else None,
        exclusive=sharing.get(device) == "exclusive",
    )
