"""Downloads as the server orders them: on every host, shown, and called off by another revision, a stop or an end."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from capyctl.control import events, orders
from capyctl.control.records import DeploymentRow
from capyctl.control.world import World
from capyctl.documents.blocks import EngineProfile
from capyctl.engines.registered import Registered
from capyctl.errors import Lost, Refusal
from capyctl.fsm import deployment
from capyctl.fsm.types import Bytes, DeploymentId, HostId, Millis
from capyctl.server.deploy import Allowed, accept
from capyctl.server.fetching import Fetching
from capyctl.server.measuring import on_host
from capyctl.session import messages as m

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = DeploymentId("D")
HOSTS = (HostId("one"), HostId("two"))


class Profiles:
    def profiles(self) -> list[Registered]:
        profile = EngineProfile(engine="vllm", executable="/opt/env/bin/python3", build_fingerprint="1")
        return [Registered(name="engine", profile=profile)]

    def registered(self, profile: str) -> Registered:
        return self.profiles()[0]


@attrs.define(eq=False)
class Hosts:
    """Both hosts: each MaterializeSource is answered once it is let go of."""

    calls: list[tuple[HostId, m.Command]] = attrs.field(factory=list)
    go: trio.Event = attrs.field(factory=trio.Event)
    says: dict[HostId, Any] = attrs.field(factory=dict)

    async def call(self, host: HostId, command: m.Command) -> m.Result:
        self.calls.append((host, command))
        if isinstance(command, m.StopMaterializing):
            return m.Done(command_id=command.command_id)
        await self.go.wait()
        said = self.says.get(host)
        if isinstance(said, Exception):
            raise said
        if said is not None:
            return m.Refused(command_id=command.command_id, code=said, message=f"{host} says no")
        return m.Materialized(command_id=command.command_id, paths=("/m",))

    def commands(self, kind: type[m.Command]) -> list[Any]:
        """Those of one kind, by host: tasks begin in any order."""
        calls = sorted(self.calls, key=lambda call: HOSTS.index(call[0]))
        return [command for _, command in calls if isinstance(command, kind)]


def accepted(model: Any, revision: int = 1) -> World:
    world = World()
    config = {"name": "m", "engine": "engine", "model": model}
    spec = accept(config, Profiles(), [Allowed(host=host, name=host) for host in HOSTS], Millis(1_800_000))
    state = deployment.State(
        deployment=NAME, revision=revision, phase=deployment.Phase.ACCEPTED, wanted=deployment.Wanted()
    )
    world.book.put_deployment(DeploymentRow(state=state, spec=spec, created_at_ms=Millis(0)))
    return world


def made(world: World, hosts: Hosts) -> Fetching:
    return Fetching(world.book, lambda: Millis(7), hosts.call)


def measure(revision: int = 1) -> orders.Measure:
    return orders.Measure(deployment=NAME, revision=revision)


HUB = {"hf": f"maker/tiny@{COMMIT}"}


async def test_every_host_fetches_and_what_is_heard_of_it_is_shown_until_it_ends(autojump_clock):
    hosts = Hosts()
    fetching = made(accepted(HUB), hosts)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetching.fetch, measure())
        await trio.testing.wait_all_tasks_blocked()
        first, second = hosts.commands(m.MaterializeSource)
        assert first.document["model"]["source"]["repo"] == "maker/tiny"
        fetching.heard(
            m.SourceProgress(
                seen_at_ms=Millis(8),
                materialize=second.command_id,
                phase="downloading",
                done_bytes=Bytes(3),
                total_bytes=Bytes(9),
            )
        )
        rows = {row["host_id"]: row for row in fetching.progress(NAME)}
        assert (rows["one"]["phase"], rows["one"]["total_bytes"]) == ("asking", None)
        assert rows["two"] == {"host_id": "two", "phase": "downloading", "done_bytes": 3, "total_bytes": 9}
        assert fetching.progress(DeploymentId("E")) == []
        hosts.go.set()
    assert fetching.progress(NAME) == []


async def test_a_directory_is_fetched_by_nobody(autojump_clock):
    hosts = Hosts()
    assert await made(accepted("here"), hosts).fetch(measure()) is None
    assert not hosts.calls


async def test_one_host_that_has_it_is_enough_and_none_is_a_refusal(autojump_clock):
    hosts = Hosts()
    hosts.go.set()
    hosts.says = {HOSTS[0]: "insufficient_space"}
    fetching = made(accepted(HUB), hosts)
    assert await fetching.fetch(measure()) is None
    hosts.says[HOSTS[1]] = Lost("unavailable", "its session ended")
    outcome = await fetching.fetch(measure())
    assert isinstance(outcome, events.RevisionUnusable)
    assert (outcome.code, outcome.reason) == ("insufficient_space", "one says no")


async def test_a_newer_revision_calls_off_what_the_older_one_fetched(autojump_clock):
    hosts, world = Hosts(), accepted(HUB)
    fetching = made(world, hosts)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetching.fetch, measure())
        await trio.testing.wait_all_tasks_blocked()
        older = {command.command_id for command in hosts.commands(m.MaterializeSource)}
        row = world.book.deployments[NAME]
        world.book.put_deployment(attrs.evolve(row, state=attrs.evolve(row.state, revision=2)))
        nursery.start_soon(fetching.fetch, measure(2))
        await trio.testing.wait_all_tasks_blocked()
        assert {command.materialize for command in hosts.commands(m.StopMaterializing)} == older
        hosts.go.set()


async def test_a_stop_calls_off_every_host_and_a_host_that_does_not_hear_it_is_no_matter(autojump_clock):
    hosts = Hosts()
    fetching = made(accepted(HUB), hosts)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetching.fetch, measure())
        await trio.testing.wait_all_tasks_blocked()
        await fetching.stop(DeploymentId("E"))
        assert not hosts.commands(m.StopMaterializing)
        await fetching.stop(NAME)
        assert len(hosts.commands(m.StopMaterializing)) == 2
        hosts.go.set()


async def test_a_measurement_of_a_deployment_that_is_gone_is_refused(autojump_clock):
    outcome = await made(accepted(HUB), Hosts()).fetch(measure(5))
    assert isinstance(outcome, events.RevisionUnusable)
    assert outcome.code == "revision_conflict"


def test_a_host_is_told_directories_and_no_source():
    spec = accepted({**HUB}).book.deployments[NAME].spec
    here = on_host(spec, "/data")
    assert here.model == f"/data/sources/huggingface/maker/tiny/{COMMIT}/tensors"
    assert here.document["model"]["source"] == {"path": here.model, "type": "local"}
    with pytest.raises(Refusal, match="downloads no models"):
        on_host(spec, None)
    local = accepted("here").book.deployments[NAME].spec
    assert on_host(local, None).document == json.loads(local.document)
