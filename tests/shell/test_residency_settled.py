"""What a deployment's memory is held in, from its document to the world: settled once, by hosts and model."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from capyctl.control import events, orders, views
from capyctl.control.records import DeploymentRow, HostRow
from capyctl.control.world import World
from capyctl.documents.blocks import EngineProfile, Security
from capyctl.engines.registered import Registered
from capyctl.fsm import deployment
from capyctl.fsm.types import (
    Bytes,
    DeploymentId,
    Device,
    Domain,
    HostId,
    Millis,
    OperationId,
    Phase,
    Residency,
    SwitchId,
)
from capyctl.ledger.types import DomainKind, DomainPolicy, HostPolicy
from capyctl.server.deploy import Allowed, accept
from capyctl.server.hosts import HostLinks
from capyctl.session import messages as m

GIB = 1 << 30
BOX, SPARK = HostId("box"), HostId("spark")
NAME = DeploymentId("D")
FACTS = {
    "cache_values": 65_536, "context_trained": 8192, "not_derivable": None, "attention": "full", "dtype": "bfloat16",
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
}  # fmt: skip


class Profiles:
    def __init__(self, deep_park: str | None = None, lacks: str | None = None) -> None:
        profile = EngineProfile(
            engine="sglang",
            executable="/opt/env/bin/python3",
            build_fingerprint="0.5.22",
            security=Security(deep_park=deep_park),
        )
        self.one = Registered(name="engine", profile=profile, lacks=lacks)

    def profiles(self) -> list[Registered]:
        return [self.one]

    def registered(self, profile: str) -> Registered:
        return self.one


class Link:
    """A host that has measured the model."""

    def __init__(self, weights: int) -> None:
        self.weights = weights

    async def call(self, command: m.Command) -> m.Result:
        facts = {**FACTS, "weight_bytes": self.weights}
        return m.Checkpoint(
            command_id=command.command_id,
            digest="sha256:" + "0" * 64,
            weight_bytes=Bytes(self.weights),
            path="/m",
            facts=facts,
        )


def card_host(host: HostId) -> HostPolicy:
    return HostPolicy(
        host=host,
        name=host,
        domains={
            Domain("system"): limits(DomainKind.DISTINCT, 128, 64, 32),
            Domain("gpu0"): attrs.evolve(limits(DomainKind.DEVICE, 48, 44, 8), device=Device("gpu0")),
        },
    )


def unified_host(host: HostId) -> HostPolicy:
    pool = attrs.evolve(limits(DomainKind.UNIFIED, 128, 96, 32), device=Device("gpu0"))
    return HostPolicy(host=host, name=host, domains={Domain("unified"): pool})


def limits(kind: DomainKind, total: int, managed: int, parked: int) -> DomainPolicy:
    return DomainPolicy(
        kind=kind,
        capacity_bytes=Bytes(total * GIB),
        managed_bytes=Bytes(managed * GIB),
        reserve_bytes=Bytes(0),
        parked_bytes=Bytes(parked * GIB),
    )


async def measured(
    weights_gib: int, *policies: HostPolicy, profiles: Profiles | None = None, **document: Any
) -> tuple[World, events.Event]:
    """A world with the deployment in it, and what measuring it came to."""
    world = World()
    config = {"name": "m", "engine": "engine", "model": "m", **document}
    hosts = [Allowed(host=policy.host, name=policy.name) for policy in policies]
    spec = accept(config, profiles or Profiles(), hosts, Millis(1_800_000))
    for policy in policies:
        world.book.hosts[policy.host] = HostRow(policy=policy, boot_id="boot")
    state = deployment.State(deployment=NAME)
    asked = deployment.DeployAsked(
        now_ms=Millis(0),
        wanted=deployment.Wanted(instances=1, parks=spec.residency.parks, activation=spec.activation, warm=False),
        published=True,
        free=True,
    )
    world.book.put_deployment(DeploymentRow(state=deployment.step(state, asked)[0], spec=spec, created_at_ms=Millis(0)))
    links = HostLinks(
        book=world.book,
        clock=lambda: Millis(1),
        links={policy.host: Link(weights_gib * GIB) for policy in policies},
    )
    outcome = await links.measure(orders.Measure(deployment=NAME, revision=1))
    world.handle(outcome)
    return world, outcome


@pytest.mark.parametrize(
    ("weights", "hosts", "tier"),
    [
        (4, (card_host(BOX),), Residency.HOST_BACKED),
        (20, (card_host(BOX),), Residency.DEEP),
        (4, (unified_host(SPARK),), Residency.DEEP),
        (4, (card_host(BOX), unified_host(SPARK)), Residency.DEEP),
    ],
)
async def test_where_nothing_is_declared_the_hosts_decide(
    weights: int, hosts: tuple[HostPolicy, ...], tier: Residency
) -> None:
    world, outcome = await measured(weights, *hosts)
    assert isinstance(outcome, events.RevisionResolved)
    row = world.book.deployments[NAME]
    assert row.spec.residency is tier
    assert row.state.wanted.parks
    assert set(outcome.plans) == {policy.host for policy in hosts}
    for plan in outcome.plans.values():
        assert Phase.PARKED in plan.phases
        copy = weights * GIB * 3 // 2 if tier is Residency.HOST_BACKED else 0
        assert plan.at(Phase.PARKED).on(Domain("system")) in (0, 4 * GIB + copy)


async def test_a_profile_that_opted_out_only_restarts() -> None:
    world, outcome = await measured(4, card_host(BOX), profiles=Profiles("disabled"))
    assert isinstance(outcome, events.RevisionResolved)
    row = world.book.deployments[NAME]
    assert (row.spec.residency, row.spec.traits.parks, row.state.wanted.parks) == (Residency.RESTART_ONLY, False, False)
    assert set(outcome.plans[BOX].phases) == {Phase.COLD, Phase.READY}


async def test_a_model_that_wakes_wrong_turns_a_wanted_park_into_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FACTS, "model_type", "gpt_oss")
    world, _ = await measured(4, unified_host(SPARK))
    row = world.book.deployments[NAME]
    assert (row.spec.residency, row.state.wanted.parks) == (Residency.RESTART_ONLY, False)


async def test_a_declared_host_copy_that_no_host_can_hold_makes_the_revision_unusable() -> None:
    _, outcome = await measured(4, unified_host(SPARK), residency="host_backed")
    assert isinstance(outcome, events.RevisionUnusable)
    assert outcome.code == "host_backed_unavailable"
    assert "residency: deep" in outcome.reason


async def test_a_changed_count_keeps_what_was_settled() -> None:
    world, _ = await measured(4, card_host(BOX))
    row = world.book.deployments[NAME]
    document = json.loads(row.spec.document) | {"instances": 3}
    spec = accept(document, Profiles(), [Allowed(host=BOX, name="box")], Millis(1_800_000))
    assert spec.residency is Residency.DEEP  # not measured yet, by itself
    command = events.Command(key="k", digest="", operation=OperationId("O"), switch=SwitchId("S"))
    world.handle(
        events.DeployAsked(
            command=command, deployment=NAME, spec=spec, expected_revision=1, activate=False, now_ms=Millis(2)
        )
    )
    after = world.book.deployments[NAME]
    assert (after.spec.instances, after.spec.residency, bool(after.plans)) == (3, Residency.HOST_BACKED, True)


def no_gpu(host: HostId) -> HostPolicy:
    return HostPolicy(host=host, name=host, domains={Domain("unified"): limits(DomainKind.UNIFIED, 128, 96, 32)})


@pytest.mark.parametrize(
    ("hosts", "profiles", "document", "model", "tier", "said"),
    [
        ((card_host(BOX),), None, {}, "qwen3", Residency.HOST_BACKED, "needs 10.0 GiB of system on box, and"),
        ((unified_host(SPARK),), None, {}, "qwen3", Residency.DEEP, "one memory for GPU and CPU"),
        ((card_host(BOX),), None, {"residency": "deep"}, "qwen3", Residency.DEEP, "the document states it"),
        ((no_gpu(BOX),), None, {}, "qwen3", Residency.RESTART_ONLY, "box has no GPU"),
        ((unified_host(SPARK),), None, {}, "gpt_oss", Residency.RESTART_ONLY, "gpt-oss cannot be loaded again"),
        (
            (card_host(BOX),),
            Profiles("disabled"),
            {},
            "qwen3",
            Residency.RESTART_ONLY,
            "this host opted out: the profile engine has security.deep_park: disabled",
        ),
        (
            (card_host(BOX),),
            Profiles("disabled", lacks="a sleep mode"),
            {},
            "qwen3",
            Residency.RESTART_ONLY,
            "the build of engine cannot park: it lacks a sleep mode",
        ),
        (
            (card_host(BOX),),
            None,
            {"resources": {"gpu": "9GiB", "ram": "1GiB"}},
            "qwen3",
            Residency.RESTART_ONLY,
            "resources do not state parking",
        ),
    ],
)
async def test_status_and_a_refused_park_say_why_it_is_that_residency(
    hosts: tuple[HostPolicy, ...],
    profiles: Profiles | None,
    document: dict[str, Any],
    model: str,
    tier: Residency,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FACTS, "model_type", model)
    world, outcome = await measured(4, *hosts, profiles=profiles, **document)
    assert isinstance(outcome, events.RevisionResolved), outcome
    view = views.deployment(world, NAME, Millis(3))
    assert view is not None
    assert (view["residency"], said in view["residency_reason"]) == (tier.value, True), view["residency_reason"]
    if tier is Residency.RESTART_ONLY:
        command = events.Command(key="p", digest="", operation=OperationId("P"), switch=SwitchId("S"))
        step = world.handle(events.ParkAsked(command=command, deployment=NAME, now_ms=Millis(4)))
        (reply,) = [order for order in step.orders if isinstance(order, orders.Reply)]
        assert (reply.code, said in reply.message) == ("unsupported_capability", True)
