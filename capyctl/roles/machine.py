"""The host half of a role: who this machine is, what it may hold, and the agent over its engines."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import trio

from capyctl import ulid
from capyctl.checkpoints.digest import StatCache
from capyctl.checkpoints.store import CheckpointStore
from capyctl.control.spec import Spec
from capyctl.documents import places
from capyctl.documents.blocks import ModelSources
from capyctl.documents.model_source import Local
from capyctl.documents.settings import StandaloneSettings
from capyctl.documents.standalone import check_release
from capyctl.downloads.door import Door
from capyctl.downloads.fetch import Fetcher
from capyctl.downloads.listing import Asking
from capyctl.downloads.reach import Reach
from capyctl.downloads.room import Room
from capyctl.downloads.shared import Downloads
from capyctl.downloads.tokens import Tokens
from capyctl.engines.families import FAMILIES
from capyctl.engines.registry import Registry
from capyctl.errors import Failure, Refusal
from capyctl.fsm.types import Domain, HostId
from capyctl.host.agent import HostAgent
from capyctl.host.cards import Card
from capyctl.host.devices import Observer
from capyctl.host.ingress import Ingress, UpstreamEnded
from capyctl.host.journal import JOURNAL_FILE, Journal, open_journal
from capyctl.host.memory import Seen
from capyctl.host.policy import host_policy, left_out
from capyctl.host.ports import PortLeases
from capyctl.ledger.charges import Ledger
from capyctl.ledger.types import DomainKind, DomainPolicy, HostPolicy
from capyctl.server.measuring import deployment_of
from capyctl.server.preview import Site, accepted, judged

IDENTITY_FILE: Final = "host.json"
DIGESTS_FILE: Final = "digests.json"
LOOK_S: Final = 4.0
"""How long a deploy waits for the first look at its model's files: the headers of the largest take a second or two."""
LOOKS: Final = trio.CapacityLimiter(2)
"""First looks at one time. One that a disk holds back keeps its place until the disk answers."""
_NOT_IN_NAMES: Final = re.compile(r"[^a-z0-9._-]+", re.ASCII)


@attrs.frozen(kw_only=True)
class Machine:
    """The parts of the host half that the role wires up.

    `left_out`: cards that wait for the end of what is charged on those whose names they would have.
    """

    agent: HostAgent
    left_out: tuple[Card, ...] = ()
    registry: Registry
    ingress: Ingress
    journal: Journal
    checkpoints: CheckpointStore
    downloads: Downloads


async def look_at_model(store: CheckpointStore, site: Site, spec: Spec) -> None:
    """Refuse a deployment on this machine for what its model's files show at once: that they are not there, that no
    engine can load them, that they never fit. Whoever made the slip is told, before the name is taken.

    Headers and small files are read, within a bound. A file system that does not answer in time refuses nothing, and
    neither does what is not downloaded yet: measuring waits for both.

    Args:
      site: this machine, whose `facts` are those of `store`.
    Raises: Refusal with the code that measuring would end with.
    """

    def look() -> None:
        document = deployment_of(spec)
        for source in document.model.sources:
            if isinstance(source, Local):
                try:
                    store.resolve(source.path)
                except Refusal as missing:
                    raise Refusal(missing.code, f"{spec.name}: model: {missing.message}") from None
        judged([accepted(spec, site)], every_host=True)

    with trio.move_on_after(LOOK_S):
        await trio.to_thread.run_sync(look, limiter=LOOKS, abandon_on_cancel=True)


def machine_name() -> str:
    """This machine's own name, as a host may be called."""
    name = _NOT_IN_NAMES.sub("-", socket.gethostname().lower()).strip("-._")[:64]
    return name or "local"


def host_identity(state_dir: Path, name: str, hosts: Mapping[HostId, HostPolicy]) -> HostId:
    """The host's id, made at the first start; the name it was made for must still be the machine's.

    Args:
      hosts: those of the store. Another id than theirs would be a second host, that owns none of its engines.
    Raises: Refusal `host_name_changed`: a state that was copied to another machine must not speak for this one;
    `unreconciled` for an identity that was lost or exchanged: none is made where one existed.
    """
    path = state_dir / IDENTITY_FILE
    way_out = "restore it from a backup, or start with a new state directory"
    if len(hosts) == 1:
        (before,) = hosts.values()
        said = json.dumps({"host_id": before.host, "name": before.name})
        way_out = f"restore it from a backup, or write it anew with what the store says, mode 0600: {said}"
    try:
        stored = json.loads(places.read_owned(str(path), 4096))
        identity, known = str(stored["host_id"]), str(stored["name"])
    except FileNotFoundError:
        if hosts or (state_dir / JOURNAL_FILE).exists():
            raise Refusal("unreconciled", f"{path} is missing, and this host has served before; {way_out}") from None
        identity = ulid.fresh()
        places.write_new(str(path), json.dumps({"host_id": identity, "name": name}) + "\n")
        return HostId(identity)
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise Failure("internal", f"{path} cannot be read: {wrong}") from None
    if known != name:
        raise Refusal(
            "host_name_changed",
            f"this state belongs to the host {known}, and this machine is called {name}; "
            "in a container keep the host name (--hostname), elsewhere start with a new --state-dir",
        )
    if hosts and identity not in hosts:
        raise Refusal("unreconciled", f"{path} names a host that the store of this state does not know; {way_out}")
    return HostId(identity)


@asynccontextmanager
async def machine(
    settings: StandaloneSettings, on_upstream_ended: UpstreamEnded, ledger: Ledger, *, as_before: bool = False
) -> AsyncIterator[Machine]:
    """The host half, ready to run: `agent.run` is not started yet.

    Args:
      ledger: what engines of before are charged; cards that they are charged on keep their names.
      as_before: with the limits that are stored, not those of the machine as it is now.
    Raises: Refusal when the machine, its document, its engines file or its journal cannot be used.
    """
    half = settings.document.host
    check_this_release(settings)
    state_dir, name = Path(settings.places.host), name_of(settings)
    host = await trio.to_thread.run_sync(host_identity, state_dir, name, ledger.hosts)
    observer = Observer()
    memory, cards = await observer.discover()
    before = ledger.policy(host) if as_before else None
    charged = _charged_cards(ledger, host)
    policy = before or limits_of(settings, host, memory, cards, charged)
    observer.adopt(policy)
    registry = registry_of(settings)
    await trio.to_thread.run_sync(registry.measure_own)
    await trio.to_thread.run_sync(registry.reload)
    ingress = Ingress(on_upstream_ended=on_upstream_ended)
    journal = await open_journal(state_dir / JOURNAL_FILE)
    ports = half.resource_policy.endpoint_port_range
    checkpoints = checkpoints_of(settings, registry, state_dir / DIGESTS_FILE)
    downloads = downloads_of(settings, checkpoints.cache, os.environ)
    try:
        yield Machine(
            agent=HostAgent(
                host=host,
                name=name,
                policy=policy,
                memory_source=memory.source,
                state_dir=state_dir,
                models_root=Path(settings.models_dir),
                registry=registry,
                checkpoints=checkpoints,
                journal=journal,
                ingress=ingress,
                observer=observer,
                ports=PortLeases(ports.start, ports.end),
                lifecycle_activation=half.lifecycle.activation,
                downloads=downloads,
            ),
            left_out=left_out(cards, charged),
            registry=registry,
            ingress=ingress,
            journal=journal,
            checkpoints=checkpoints,
            downloads=downloads,
        )
    finally:
        with trio.CancelScope(shield=True):
            await journal.close()


def downloads_of(settings: StandaloneSettings, cache: StatCache, environ: Mapping[str, str]) -> Downloads:
    """What this machine fetches models with.

    Args:
      cache: told the hashes of what arrived.
      environ: may hold a Hub's token.
    """
    stated, models = settings.document.host.model_sources, settings.models_dir
    return Downloads(fetcher_of(stated, models, settings.places.secrets, cache, environ))


def fetcher_of(
    stated: ModelSources, models_dir: str, secrets_dir: str, cache: StatCache | None, environ: Mapping[str, str]
) -> Fetcher:
    """What fetches models on a host with these settings."""
    door = Door(Reach(allowed_hosts=frozenset(stated.allowed_hosts), plain_http=stated.plain_http == "allowed"))
    token_file = None if stated.huggingface_token_file is None else str(stated.huggingface_token_file)
    tokens = Tokens(environ=environ, token_file=token_file, secrets_dir=secrets_dir)
    root = Path(models_dir if stated.path is None else stated.path)
    return Fetcher(
        asking=Asking(door=door, tokens=tokens, endpoint=stated.huggingface_endpoint.rstrip("/")),
        room=Room(root, stated.max_bytes.bytes),
        cache=cache,
        huggingface=stated.huggingface == "allowed",
        http=stated.http == "allowed",
    )


def name_of(settings: StandaloneSettings) -> str:
    """What this machine is called in lists: as its document says, else by its own name."""
    stated = settings.document.host.name
    return str(stated) if stated != "local" else machine_name()


def limits_of(
    settings: StandaloneSettings,
    host: HostId,
    memory: Seen,
    cards: tuple[Card, ...],
    charged: Mapping[Domain, DomainPolicy] | None = None,
) -> HostPolicy:
    """What this machine may hold. Raises: Refusal as `host_policy`."""
    policy = settings.document.host.resource_policy
    system = policy.memory.system
    return host_policy(
        host,
        name_of(settings),
        memory,
        cards,
        managed_limit=system.managed_limit,
        free_reserve=system.free_reserve,
        parked_limit=system.parked_limit,
        parked_growth=policy.parked_growth_limit,
        charged=charged,
    )


def registry_of(settings: StandaloneSettings) -> Registry:
    """The profiles of this machine, not read yet: `measure_own` and `reload` do that."""
    half = settings.document.host
    return Registry(
        Path(settings.engines_file),
        stated=half.runtime_profiles,
        stated_in=os.path.basename(settings.document_path),
        local=half.local_engine,
        models_root=Path(settings.models_dir),
        telemetry=half.engine_telemetry == "allow",
    )


def checkpoints_of(settings: StandaloneSettings, registry: Registry, cache_file: Path | None) -> CheckpointStore:
    """What looks at the models of this machine. `cache_file`: where digests are remembered."""
    return CheckpointStore(
        cache_file,
        Path(settings.models_dir),
        registry.fixed_args,
        family_of=lambda profile: registry.named(profile).engine,
        built=partial(registry.built, Path(settings.places.host)),
        parsers=registry.parsers,
        profile_facts=registry.sizing_facts,
        trust_declared=settings.document.host.checkpoints.trust_declared_digest,
    )


def _charged_cards(ledger: Ledger, host: HostId) -> dict[Domain, DomainPolicy]:
    """The cards of this host that something is charged on, with the limits that they had."""
    before = ledger.policy(host)
    if before is None:
        return {}
    return {
        domain: limits
        for domain, limits in before.domains.items()
        if limits.kind is DomainKind.DEVICE and ledger.charged(host, domain)
    }


def check_this_release(settings: StandaloneSettings) -> None:
    """Refuse what this release would otherwise silently not do: promises about privacy, engines it does not run."""
    half = settings.document.host
    for word in half.local_engine.installations:
        if word not in FAMILIES:
            raise Refusal("unsupported", f"host.local_engine.{word}: this release runs {', '.join(FAMILIES)} only")
    check_release(settings.document)
    if settings.debug_engine_logs:
        raise Refusal("unsupported", "--debug-engine-logs is not in this release; engine logs are redacted")
