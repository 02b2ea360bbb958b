"""From a Launch command to a process that answers, or to the proof that nothing of it is left.

The order is the whole point: look and refuse while nothing has happened, journal the handle (W3), spawn
behind a gate, journal the identity (W4), open the gate, prove readiness, journal the group, answer.
Source: engines 5, 12; lifecycle 14, 17; memory 10.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import trio

from capyctl.checkpoints.directory import resolve_model
from capyctl.clock import now_ms
from capyctl.engines.adapter import Adapter, Command, LaunchFacts
from capyctl.errors import CapyError, Refusal
from capyctl.fsm.types import Bytes, Domain, Incarnation
from capyctl.host import logs, process, segments
from capyctl.host.adapter import Checkpoints, EngineRegistry
from capyctl.host.devices import Observer, Owners
from capyctl.host.engine import Engine
from capyctl.host.http import LoopbackClient
from capyctl.host.ingress import Ingress
from capyctl.host.journal import Journal, LaunchRecord
from capyctl.host.policy import device_env
from capyctl.host.ports import PortLeases
from capyctl.ledger.types import DomainKind, HostPolicy, Observation
from capyctl.session.messages import Launch, VerifyStart

TRANSIENT = frozenset(
    {"port_conflict", "insufficient_memory", "insufficient_device_memory", "device_unobserved", "stale_observation"}
)
"""Refusals that the same launch may not meet a little later; an exit before ready is none of them."""

FILES_LIMITER = trio.CapacityLimiter(1)  # hashing; one disk
GIB = 1 << 30


@attrs.frozen(kw_only=True)
class Prepared:
    """A launch that may be journaled: looked at from every side, and nothing has happened."""

    adapter: Adapter
    facts: LaunchFacts
    rendered: Command


@attrs.frozen(kw_only=True)
class Launcher:
    """Prepares and spawns. It keeps no state of its own."""

    state_dir: Path
    models_root: Path
    policy: HostPolicy
    registry: EngineRegistry
    checkpoints: Checkpoints
    journal: Journal
    ingress: Ingress
    observer: Observer
    ports: PortLeases
    owners: Callable[[], Owners] = dict  # whose memory is not foreign on a card

    async def prepare(self, command: Launch) -> Prepared:
        """Everything that can refuse a launch while nothing has happened. Leases the port.

        Raises: CapyError; the lease is the caller's to give back.
        """
        if now_ms() >= command.deadline_ms:
            raise Refusal("activation_timeout", "the start's deadline had passed before it began")
        adapter = await self.verify(command)
        if command.residency.parks and not adapter.parks:
            raise Refusal(
                "capability_missing:deep_park",
                f"profile {command.profile} cannot park; use residency: restart_only",
            )
        seen = await self.observer.sample_anew(self.owners())
        check_room(self.policy, command.allocation, seen)
        port = self.ports.lease(command.incarnation)
        facts = attrs.evolve(
            self.facts(command, port, secrets.token_urlsafe(32), secrets.token_urlsafe(32)),
            available={str(name): int(sample.available_bytes) for name, sample in seen.items()},
            alone=await self._alone(command),
        )
        return Prepared(adapter=adapter, facts=facts, rendered=adapter.render(facts))

    async def _alone(self, command: Launch) -> bool:
        """Whether every other launch of this family is proven gone: what they shared is nobody's then.

        A launch whose profile is not registered any more may be of any family.
        """
        families = {profile.name: profile.engine for profile in self.registry.profiles()}
        mine = families.get(command.profile)
        others = [record for record in await self.journal.launches() if record.incarnation != command.incarnation]
        return all(families.get(record.command.profile, mine) != mine for record in others)

    async def verify(self, command: Launch | VerifyStart) -> Adapter:
        """What a launch needs of the installation and of the files; looked at again before anybody gives way for it.

        Raises: Refusal `installation_drift`, `invalid_root`, `checkpoint_mismatch`, … as the launch would be refused.
        """
        adapter = self.adapter(command)
        model_dir = self.model_dir(command.model)
        await trio.to_thread.run_sync(adapter.preflight, limiter=FILES_LIMITER)
        await trio.to_thread.run_sync(
            self.checkpoints.verify, model_dir, command.digest, limiter=FILES_LIMITER, abandon_on_cancel=True
        )
        return adapter

    def adapter(self, command: Launch | VerifyStart) -> Adapter:
        """The family's adapter of the command's profile. Raises: Refusal `not_found`, `installation_drift`."""
        adapter = self.registry.adapter(command.profile)
        asked = command.profile_fingerprint
        present = next((p.fingerprint for p in self.registry.profiles() if p.name == command.profile), None)
        if asked is not None and present != asked:
            raise Refusal(
                "installation_drift",
                f"profile {command.profile} was {asked} when the deployment was resolved and is {present} now",
            )
        return adapter

    def model_dir(self, model: str) -> Path:
        """The absolute directory of a model. Raises: Refusal `invalid_root`."""
        return resolve_model(model, self.models_root)

    def facts(self, command: Launch, port: int, key: str, admin_key: str) -> LaunchFacts:
        """What the adapter is told of a launch; what was free before it is known to `prepare` alone."""
        return LaunchFacts(
            served_name=command.served_name,
            model_dir=self.model_dir(command.model),
            document=command.document,
            context_tokens=command.context_tokens,
            slots=command.slots,
            allocation={str(name): int(amount) for name, amount in command.allocation.items()},
            ready={str(name): int(amount) for name, amount in command.ready.items()},
            port=port,
            key=key,
            state_dir=self.state_dir,
            log_path=logs.log_path(
                self.state_dir, command.incarnation.lane.deployment, launch_id_of(command.incarnation)
            ),
            device_env=device_env(self.policy, command.allocation),
            admin_key=admin_key,
            residency=command.residency,
            parked={str(name): int(amount) for name, amount in command.parked.items()},
            pools=command.pools,
            capacity={str(name): int(limits.capacity_bytes) for name, limits in self.policy.domains.items()},
            deadline_s=max(0.0, (command.deadline_ms - now_ms()) / 1000),
        )

    async def spawn(self, command: Launch, prepared: Prepared) -> Engine:
        """Journal, spawn, journal the identity, open the gate.

        Raises: CapyError. After `arm` the handle is fenced by its launch row; a process that was spawned is in
        the journal, and the caller ends it.
        """
        facts = prepared.facts
        launch_id = launch_id_of(command.incarnation)
        started_at = now_ms()
        shm_before = await trio.to_thread.run_sync(segments.present)
        await self.journal.arm(
            command,
            launch_id,
            facts.port,
            facts.key,
            facts.log_path,
            started_at,
            admin_key=facts.admin_key,
            shm_before=shm_before,
        )
        logs.prune(facts.log_path)
        hidden = [facts.key, facts.admin_key, *logs.secret_values(prepared.rendered.env)]
        writer = logs.start_writer(facts.log_path, hidden)
        try:
            gated = process.spawn_gated(writer.output)
        finally:
            os.close(writer.output)
        try:
            await self.journal.spawned(command.incarnation, (gated.process,), writer.identity)
        except BaseException:
            gated.close()  # it ends without having become anything
            raise
        record = LaunchRecord(
            command=command,
            launch_id=launch_id,
            port=facts.port,
            key=facts.key,
            log_path=facts.log_path,
            started_ms=started_at,
            state="spawned",
            writer=writer.identity,
            processes=(gated.process,),
            admin_key=facts.admin_key,
            shm_before=shm_before,
        )
        engine = self.engine(record, prepared.adapter)
        try:
            await gated.open(prepared.rendered.argv, prepared.rendered.env)
        except CapyError as error:
            raise SpawnFailed(engine, error) from error
        finally:
            gated.close()
        return engine

    def engine(self, record: LaunchRecord, adapter: Adapter | None = None) -> Engine:
        """The running side of a record, just spawned or found again. Raises: Refusal when its profile is gone."""
        command = record.command
        return Engine(
            record=record,
            adapter=adapter or self.registry.adapter(command.profile),
            facts=self.facts(command, record.port, record.key, record.admin_key),
            client=LoopbackClient(port=record.port, key=record.key, admin_key=record.admin_key),
            processes=record.processes,
            abandoned=lambda: self.ingress.abandoned(record.incarnation),
            ready=record.state == "ready",
            memory=record.memory,
            canary=record.canary,
        )


class SpawnFailed(Exception):
    """The process exists, and is ending, but it never became the engine."""

    def __init__(self, engine: Engine, error: CapyError) -> None:
        super().__init__(str(error))
        self.engine, self.error = engine, error


def launch_id_of(incarnation: Incarnation) -> str:
    """What a launch is called in file names: instance index and generation."""
    return f"{incarnation.lane.index}-{incarnation.generation}"


def check_room(policy: HostPolicy, allocation: Mapping[Domain, Bytes], seen: Mapping[Domain, Observation]) -> None:
    """The ledger's answer against what the machine says right now (memory 10, end).

    On a card what others use comes out of the reserve first, as in the ledger (memory 3.1).
    Raises: Refusal naming domain, need, free and reserve.
    """
    for name, need in allocation.items():
        limits = policy.domains.get(name)
        if limits is None:
            raise Refusal("device_policy_mismatch", f"this host has no memory domain {name}")
        if not need:
            continue
        if need > limits.managed_bytes:
            raise Refusal(
                "insufficient_resources", f"needs {_gib(need)} on {name}; {_gib(limits.managed_bytes)} are managed"
            )
        sample = seen.get(name)
        if sample is None:
            raise Refusal("device_unobserved", f"{name} was not observed within the last 5 s")
        device = limits.kind is DomainKind.DEVICE
        free, reserve = sample.available_bytes, limits.reserve_bytes
        if device:
            foreign = sample.capacity_bytes - free - sum(sample.residents.values())
            reserve = Bytes(max(0, reserve - max(0, foreign)))
        if need + reserve > free:
            raise Refusal(
                "insufficient_device_memory" if device else "insufficient_memory",
                f"needs {_gib(need)} on {name}; {_gib(free)} free, {_gib(reserve)} reserved",
            )


def _gib(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB"
