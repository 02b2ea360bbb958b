"""What the management API and the control socket may do and see: one object over the running role.

Views come from control, as plain data; what control does not know (engine versions, listeners, settings,
logs) is added here. Nothing here changes the world but by feeding it an event.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import trio

from capyctl import __version__, ulid
from capyctl.clock import Clock
from capyctl.control import events, host_views, live_load, orders, usage, views
from capyctl.control.spec import Spec
from capyctl.control.spelling import size
from capyctl.control.world import World
from capyctl.documents.model_source import shown_url
from capyctl.documents.paths import REDACTED, Row
from capyctl.engines.registered import Registered
from capyctl.engines.registry import Registry
from capyctl.errors import CapyError, Failure, Refusal
from capyctl.fsm.types import DeploymentId, HostId, Lane, Millis, OperationId, SwitchId
from capyctl.ledger.types import HostPolicy
from capyctl.server import deploy, figures
from capyctl.server.desk import Desk
from capyctl.server.driver import CommandEvent, Driver
from capyctl.server.hosts import HostLinks
from capyctl.server.keys import KeyRing
from capyctl.server.preview import plan_view
from capyctl.server.store import Store

RUNNING_SHOWN: Final = 8
"""Instances that a refusal names; of more it says how many."""
DRAIN_LIMIT_S: Final = 900.0
DRAIN_AGAIN_S: Final = 30.0
"""Between two drains of a profile: what was on its way to a start when it was withdrawn is stopped by the next."""


LogTail = Callable[[Lane, int], Awaitable[str]]
"""(lane, KiB) -> the last lines of its engine's log, redacted. Raises FileNotFoundError when there is none."""


@attrs.frozen(kw_only=True)
class RoleFacts:
    """What a role says of itself. Addresses as bound."""

    role: str
    state_dir: str
    inference: str
    inference_auth: str
    management: str
    document: str
    rows: Sequence[Row] = attrs.field(default=(), repr=False)


@attrs.define(eq=False, kw_only=True, repr=False)
class Services:
    """A running role, as its own interfaces see it. `facts` are set once the listeners are bound."""

    driver: Driver
    world: World
    store: Store
    desk: Desk
    links: HostLinks
    registry: Registry
    keys: KeyRing
    host: HostId
    allowed: Sequence[deploy.Allowed]
    admin_token: str = attrs.field(repr=False)
    clock: Clock
    request_deadline_ms: Millis
    log_tail: LogTail
    announce_profiles: Callable[[], None]
    look_at_model: Callable[[Spec], Awaitable[None]] | None = None
    """A first look at the model's files, where its host is this machine. Raises: Refusal."""
    facts: RoleFacts | None = None

    # --- commands --------------------------------------------------------------------------------

    async def submit(self, event: CommandEvent) -> orders.Receipt:
        """Give a command to the world. Raises: CapyError as the driver says."""
        return await self.driver.submit(event)

    def recall(self, command: events.Command) -> orders.Receipt | None:
        """The receipt that this command was given before. Raises: Refusal `idempotency_conflict`."""
        known = self.world.book.receipts.get(command.key)
        if known is None:
            return None
        if command.key in self.world.book.owed and known.digest == command.digest:
            return None  # it is being answered; the world answers both
        if known.digest != command.digest:
            raise Refusal(
                "idempotency_conflict",
                "this request identity was used for another command; leave it out, or repeat that command",
            )
        return known.receipt

    async def accept(self, config: Mapping[str, Any]) -> Spec:
        """A deployment document as a Spec, its model's files looked at where they can be. Raises: Refusal."""
        spec = deploy.accept(config, self.registry, self.allowed, self.request_deadline_ms)
        if self.look_at_model is not None:
            await self.look_at_model(spec)
        return spec

    async def drain_all(self, command: events.Command) -> orders.Receipt:
        """Stop every engine of this machine with proof. Its deployments start again on request."""
        receipt = await self.submit(events.DrainAsked(command=command, host=self.host, now_ms=self.clock()))
        again = attrs.evolve(command, key=f"{command.key} undrain")
        await self.submit(events.DrainAsked(command=again, host=self.host, undrain=True, now_ms=self.clock()))
        return receipt

    # --- views -----------------------------------------------------------------------------------

    @property
    def cursor(self) -> str:
        """Position of the newest durable input."""
        return self.store.cursor

    def snapshot(self) -> dict[str, Any]:
        """The durable world as one coherent value."""
        whole = views.snapshot(self.world, self.clock())
        return {**whole, "deployments": [_with_shown_document(row) for row in whole["deployments"]]}

    def deployments(self) -> list[dict[str, Any]]:
        """Every deployment's view, by id."""
        rows = views.deployments(self.world, self.clock())
        return sorted((self._with_engine(row) for row in rows), key=lambda row: str(row["id"]))

    def deployment_names(self) -> frozenset[str]:
        """What every deployment is called."""
        return frozenset(row.spec.name for row in self.world.book.deployments.values())

    def deployment(self, identity: DeploymentId) -> dict[str, Any]:
        """One deployment's view. Raises: Refusal `not_found`."""
        view = views.deployment(self.world, identity, self.clock())
        if view is None:
            raise Refusal("not_found", f"there is no deployment {identity}")
        return self._with_engine(view)

    def operation(self, identity: OperationId) -> dict[str, Any]:
        """One operation. Raises: Refusal `not_found`."""
        view = views.operation(self.world, identity)
        if view is None:
            raise Refusal("not_found", f"there is no operation {identity}")
        return view

    def hosts(self) -> dict[str, Any]:
        """Every host."""
        names = [profile.name for profile in self.registry.profiles()]
        known = {
            "binary_version": __version__,
            "compatibility": "supported",
            "engines": names,
        }
        return {"server_version": __version__, "hosts": [{**row, **known} for row in host_views.hosts(self.world)]}

    def load(self, deployment: str | None) -> dict[str, Any]:
        """Live load. Raises: Refusal `not_found` for an id that names no deployment."""
        return _of_one(live_load.load(self.world, self.clock()), deployment)

    def latency(self, deployment: str | None) -> dict[str, Any]:
        """Latency distributions. Raises: Refusal `not_found` for an id that names no deployment."""
        return _of_one(self.links.latencies.view(self.clock()), deployment)

    def usage(self, host: HostId | None, deployment: DeploymentId | None) -> dict[str, Any]:
        """Memory by domain and deployment, of one of them when it is named. Raises: Refusal `not_found`."""
        book = self.world.book
        if host is not None and host not in book.hosts:
            raise Refusal("not_found", f"there is no host {host}")
        if deployment is not None and deployment not in book.deployments:
            raise Refusal("not_found", f"there is no deployment {deployment}")
        return usage.usage(self.world, self.clock(), host=host, deployment=deployment)

    async def model_sources(self, *, prune: bool = False) -> list[dict[str, Any]]:
        """What is downloaded here; with `prune` what was removed, since no deployment refers to it."""
        return await self.links.fetching.sources(self.host, prune=prune)

    def engines(self) -> list[dict[str, Any]]:
        """Published profiles, and which deployments use them."""
        (host,) = [allowed.name for allowed in self.allowed if allowed.host == self.host]
        return [
            {
                "host": host,
                "profile": profile.name,
                "engine": profile.engine,
                "version": profile.version,
                "custom": profile.custom,
                "deep_park": profile.deep_park,
                "state": "published",
                "published": True,
                "source": profile.source,
                "revision": profile.revision,
                "fingerprint": profile.fingerprint,
                "executable": profile.executable,
                "installation_drift": profile.profile.security.installation_drift,
                "deployments": self._using(profile.name),
            }
            for profile in self.registry.profiles()
        ]

    def effective_config(self, identity: DeploymentId) -> dict[str, Any]:
        """What a deployment's revision resolved to; values of its engine's environment are not shown."""
        row = self.world.book.deployments.get(identity)
        if row is None:
            raise Refusal("not_found", f"there is no deployment {identity}")
        document = shown_document(row.spec.document)
        return {
            "deployment_id": identity,
            "revision": str(row.state.revision),
            "profile": row.spec.profile,
            "digest": row.digest,
            "residency": {
                "value": row.spec.residency.value,
                "source": "deployment" if document.get("residency") else "default",
            },
            "document": document,
            "plans": {host: plan_view(plan, self._policy(host)) for host, plan in row.plans.items()},
        }

    def _policy(self, host: HostId) -> HostPolicy | None:
        row = self.world.book.hosts.get(host)
        return None if row is None else row.policy

    async def engine_log(self, identity: DeploymentId, instance: int, kib: int) -> dict[str, Any]:
        """The end of an engine's log. Raises: Refusal `not_found`."""
        lane = Lane(identity, instance)
        if lane not in self.world.book.instances:
            raise Refusal("not_found", f"there is no instance {lane}")
        try:
            text = await self.log_tail(lane, kib)
        except FileNotFoundError:
            raise Refusal("not_found", f"instance {lane} has no engine log") from None
        return {"deployment_id": identity, "instance": instance, "text": text, "truncated": len(text) >= kib * 1000}

    def installation(self) -> dict[str, Any]:
        """Which program answers here, and where."""
        facts = self._facts()
        return {
            "version": __version__,
            "role": facts.role,
            "state_dir": facts.state_dir,
            "document": facts.document,
            "inference": {"address": facts.inference, "authentication": facts.inference_auth},
            "management": {"address": facts.management},
            "faults": len(self.driver.faults),
        }

    def inference_listener(self) -> dict[str, Any]:
        """Where clients send requests."""
        facts = self._facts()
        return {"address": facts.inference, "authentication": facts.inference_auth}

    def settings_rows(self) -> list[dict[str, Any]]:
        """Every setting of the role, its value and where it comes from."""
        return [{"setting": row.path, "value": row.value, "source": row.source} for row in self._facts().rows]

    def prometheus(self) -> str:
        """The figures of the role as Prometheus text."""
        return figures.render(self.world, self.desk, len(self.driver.faults))

    def _facts(self) -> RoleFacts:
        if self.facts is None:
            raise Failure("unavailable", "the role is still starting")
        return self.facts

    def _with_engine(self, view: dict[str, Any]) -> dict[str, Any]:
        identity, book = DeploymentId(view["id"]), self.world.book
        spec = book.deployments[identity].spec
        view = with_progress(
            _with_shown_document(view),
            fetched=self.links.fetching.progress(identity),
            read=self.links.measuring.progress(identity),
            measuring=identity in book.measuring,
        )
        try:
            registered: Registered = self.registry.named(spec.profile)
        except Refusal:
            return {**view, "profile": spec.profile, "engine_note": "this profile is not registered any more"}
        return {
            **view,
            "profile": spec.profile,
            "engine_version": registered.version,
            "engine_executable": registered.executable,
        }

    def _using(self, profile: str) -> list[str]:
        return sorted(row.spec.name for row in self.world.book.deployments.values() if row.spec.profile == profile)

    # --- engines, for the control socket ---------------------------------------------------------

    async def reload_engines(self) -> dict[str, Any]:
        """Read the engines file again. Raises: Refusal as the registry says; the profiles stay as they were then."""
        await trio.to_thread.run_sync(self.registry.reload)
        self.announce_profiles()
        return {
            "revision": self.registry.revision,
            "warnings": list(self.registry.warnings),
            "profiles": self.engines(),
        }

    async def retire_engine(self, profile: str, *, drain: bool) -> dict[str, Any]:
        """Let go of a profile before it leaves the file: it is offered no more, then nothing may run on it.

        Whoever asks again after a silence goes on where this stands. What is stopped is not stopped by an operator:
        a request starts it again once its profile is back.

        Raises: Refusal `profile_in_use` naming the instances; `not_found`; Failure `unreconciled` when a drain does
          not end in time.
        """
        running = self._running_on(profile)
        if running and not drain:
            names = ", ".join(self._shown(lane) for lane in running[:RUNNING_SHOWN])
            names += f" and {len(running) - RUNNING_SHOWN} more" if len(running) > RUNNING_SHOWN else ""
            raise Refusal("profile_in_use", f"{profile} runs {names}. Stop them, or use --drain")
        self.registry.retire(profile)
        self.announce_profiles()
        try:
            await self._drain_profile(profile)
        except CapyError:
            self.registry.reinstate(profile)
            self.announce_profiles()
            raise
        return {"retired": profile, "stopped": [self._shown(lane) for lane in running]}

    async def _drain_profile(self, profile: str) -> None:
        """Stop what runs on a profile, and whatever still begins to, until nothing does. Raises: Failure."""
        with trio.move_on_after(DRAIN_LIMIT_S):
            while self._running_on(profile):
                command = events.Command(
                    key=f"engine remove {profile} {ulid.fresh()}",
                    digest="",
                    operation=OperationId(ulid.fresh()),
                    switch=SwitchId(ulid.fresh()),
                )
                await self.submit(
                    events.DrainAsked(command=command, host=self.host, profile=profile, now_ms=self.clock())
                )
                with trio.move_on_after(DRAIN_AGAIN_S):
                    while self._running_on(profile):
                        await self.driver.moved()
        if left := self._running_on(profile):
            names = ", ".join(self._shown(lane) for lane in left)
            raise Failure(
                "unreconciled", f"{names} did not prove the stop within {DRAIN_LIMIT_S:.0f} s; {profile} stays"
            )

    def _running_on(self, profile: str) -> list[Lane]:
        book = self.world.book
        return [
            lane
            for lane, row in sorted(book.instances.items())
            if book.deployments[lane.deployment].spec.profile == profile and (row.has_launch or row.in_progress)
        ]

    def _shown(self, lane: Lane) -> str:
        return f"{self.world.book.deployments[lane.deployment].spec.name}/{lane.index}"


def _how_far(row: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: size(row[name]) for name in ("done_bytes", "total_bytes")}


def _of_one(body: dict[str, Any], deployment: str | None) -> dict[str, Any]:
    """Figures of all deployments, or of one. Raises: Refusal `not_found` for an id that names none."""
    if deployment is None:
        return body
    rows = [row for row in body["deployments"] if row["deployment_id"] == deployment]
    if not rows:
        raise Refusal("not_found", f"there is no deployment {deployment}")
    return {**body, "deployments": rows}


def with_progress(
    view: dict[str, Any], *, fetched: list[dict[str, Any]], read: list[dict[str, Any]], measuring: bool
) -> dict[str, Any]:
    """A view whose checkpoint, while it is on its way or looked at again, shows that instead of what was found before.

    Args:
      fetched, read: what is downloaded, and what is read for a digest, a row per host.
      measuring: whether it is measured, whatever is known of how far that is.
    """
    if fetched:
        slowest = min(fetched, key=lambda row: row["done_bytes"])
        hosts = [{**row, **_how_far(row)} for row in fetched]
        download = {"phase": slowest["phase"], **_how_far(slowest), "hosts": hosts}
        checkpoint = {**view["checkpoint"], "state": "materializing", "download": download}
        return {**view, "checkpoint": checkpoint, "waiting": view["waiting"] and "the model is being downloaded"}
    if not read and not measuring:
        return view
    checkpoint = {**view["checkpoint"], "state": "measuring"}
    if read:
        slowest = min(read, key=lambda row: row["done_bytes"] - row["total_bytes"])
        checkpoint["measured"] = {**_how_far(slowest), "hosts": [{**row, **_how_far(row)} for row in read]}
    return {**view, "checkpoint": checkpoint}


def shown_document(text: str) -> dict[str, Any]:
    """A stored document as it may be read: no values of an engine's environment, no credentials inside addresses."""
    document: dict[str, Any] = json.loads(text)
    env = document.get("engine_config", {}).get("env")
    if env:
        document["engine_config"]["env"] = dict.fromkeys(env, REDACTED)
    for one in (document["model"].get("source"), document["model"].get("draft")):
        if one and one.get("url"):
            one["url"] = shown_url(one["url"]) + (f"?{REDACTED}" if "?" in one["url"] else "")
    return document


def _with_shown_document(view: dict[str, Any]) -> dict[str, Any]:
    return {**view, "document": json.dumps(shown_document(view["document"]), sort_keys=True, separators=(",", ":"))}
