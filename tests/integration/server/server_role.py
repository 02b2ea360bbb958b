"""A role's server half on real sockets and a real store, over an agent that keeps its promises without processes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import h11
import trio

from capyctl import clock as clocks
from capyctl import ulid
from capyctl.control import events, views
from capyctl.control.records import RECORDS
from capyctl.control.world import World
from capyctl.documents.blocks import EngineProfile
from capyctl.engines.registry import Registry
from capyctl.fsm.proofs import Gone, SameEngine, Usable
from capyctl.fsm.types import Bytes, Domain, HostId, Incarnation, Lane, Millis, ProcessIdentity
from capyctl.ledger.types import DomainKind, DomainPolicy, HostPolicy, Observation
from capyctl.server.deploy import Allowed
from capyctl.server.desk import Desk
from capyctl.server.driver import Driver
from capyctl.server.hosts import HostLinks, listener
from capyctl.server.keys import KeyRing
from capyctl.server.listener import serve_management
from capyctl.server.management import build_management
from capyctl.server.services import RoleFacts, Services
from capyctl.server.store import Store
from capyctl.session import messages as m
from capyctl.session.kinds import decode_message, encode_message
from capyctl.session.memory import MemoryLink

GIB = 1 << 30
HOST = HostId("01N8C2F0QW7V5T3R9JX4B6M1KD")
TOKEN = "admin-token-of-the-tests-0123456789abcdef"
API_KEY = "inference-key-of-the-tests-0123456789abcd"
CONFIG = {
    "name": "notes",
    "engine": "llamacpp",
    "model": "notes",
    "engine_config": {"context_length": 1024, "memory": {"kv_cache": "256MiB"}},
}


@attrs.define(eq=False)
class FakeAgent:
    """Launches nothing, and answers as a host whose engines always come up. Every message crosses the codec."""

    clock: Any
    refuse_digest: tuple[str, str] | None = None
    refuse_launch: bool = False
    running: dict[Incarnation, ProcessIdentity] = attrs.field(factory=dict)
    diary: list[str] = attrs.field(factory=list)
    hold: trio.Event | None = None
    reports: trio.MemoryReceiveChannel[m.Report] = attrs.field(init=False)
    send: trio.MemorySendChannel[m.Report] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.send, self.reports = trio.open_memory_channel[m.Report](64)

    async def handle(self, command: m.Command) -> m.Result:
        received = decode_message(json.loads(json.dumps(encode_message(command))))
        result = await self.answer(received)
        return decode_message(json.loads(json.dumps(encode_message(result))))

    async def answer(self, command: m.Message) -> m.Result:
        self.diary.append(type(command).__name__)
        match command:
            case m.Inspect():
                return m.Inventory(
                    command_id=command.command_id,
                    host=HOST,
                    name="box",
                    boot_id="boot",
                    policy=policy(),
                    profiles=(),
                    owned=tuple(self.running),
                    models_root="/models",
                )
            case m.DigestCheckpoint():
                if self.refuse_digest is not None:
                    code, message = self.refuse_digest
                    return m.Refused(command_id=command.command_id, code=code, message=message)
                facts = {
                    "weight_bytes": 100 << 20,
                    "architecture": "llama",
                    "context_trained": 4096,
                    "layers": 30,
                    "kv_heads": [3] * 30,
                    "key_length": 64,
                    "value_length": 64,
                    "not_derivable": None,
                    "host_args": [],
                }
                return m.Checkpoint(
                    command_id=command.command_id,
                    digest="sha256:" + "a" * 64,
                    weight_bytes=Bytes(100 << 20),
                    path="/models/notes",
                    facts=facts,
                )
            case m.Launch():
                return await self.launch(command)
            case m.AwaitIdle():
                return m.IdleVerdict(command_id=command.command_id, verdict="idle")
            case m.Terminate():
                self.running.pop(command.incarnation, None)
                return m.Absent(command_id=command.command_id, proof=self.gone(command.incarnation, command.processes))
            case m.Probe():
                return self.probe(command)
            case _:
                return m.Done(command_id=command.command_id)

    async def launch(self, command: m.Launch) -> m.Result:
        if self.refuse_launch:
            return m.LaunchRefused(
                command_id=command.command_id,
                code="launch_failed",
                reason="it exited with status 1",
                proof=self.gone(command.incarnation, ()),
                transient=False,
            )
        process = ProcessIdentity(1000 + len(self.diary), "boot", 5)
        self.running[command.incarnation] = process
        await self.send.send(
            m.Spawned(
                seen_at_ms=self.clock(),
                incarnation=command.incarnation,
                token=command.token,
                processes=(process,),
            )
        )
        if self.hold is not None:
            await self.hold.wait()
        return m.Launched(
            command_id=command.command_id,
            processes=(process,),
            usable=self.usable(command.incarnation),
            peak_bytes={Domain("unified"): Bytes(1)},
        )

    def probe(self, command: m.Probe) -> m.Result:
        process = self.running.get(command.incarnation)
        if process is None:
            gone = self.gone(command.incarnation, command.processes)
            return m.ProbeResult(command_id=command.command_id, same=None, usable=None, gone=gone)
        same = SameEngine(
            incarnation=command.incarnation,
            recorded=(process,),
            alive=frozenset([process]),
            strangers=0,
            observed_at_ms=self.clock(),
        )
        return m.ProbeResult(
            command_id=command.command_id, same=same, usable=self.usable(command.incarnation), gone=None
        )

    def usable(self, incarnation: Incarnation) -> Usable:
        return Usable(incarnation=incarnation, answer_chars=2, probed_at_ms=self.clock())

    def gone(self, incarnation: Incarnation, processes: tuple[ProcessIdentity, ...]) -> Gone:
        return Gone(
            incarnation=incarnation,
            processes=processes,
            absent=frozenset(processes),
            group_empty=True,
            observed_at_ms=self.clock(),
        )

    async def observe(self) -> None:
        """Send fresh samples while the test runs."""
        while True:
            seen = Observation(capacity_bytes=Bytes(16 * GIB), available_bytes=Bytes(12 * GIB), seen_at_ms=self.clock())
            await self.send.send(m.Domains(seen_at_ms=self.clock(), host=HOST, domains={Domain("unified"): seen}))
            await trio.sleep(0.2)


def policy() -> HostPolicy:
    unified = DomainPolicy(
        kind=DomainKind.UNIFIED,
        capacity_bytes=Bytes(16 * GIB),
        managed_bytes=Bytes(8 * GIB),
        reserve_bytes=Bytes(2 * GIB),
        parked_bytes=Bytes(4 * GIB),
    )
    return HostPolicy(host=HOST, name="box", domains={Domain("unified"): unified})


@attrs.define(eq=False)
class Role:
    """A running server half."""

    services: Services
    agent: FakeAgent
    address: str

    async def ask(self, method: str, path: str, body: object = None, **more: Any) -> tuple[int, Any]:
        """(status, JSON) of one management call with the token, and an Idempotency-Key where it changes something."""
        headers = {"Authorization": f"Bearer {TOKEN}", **more.pop("headers", {})}
        if method != "GET":
            headers.setdefault("Idempotency-Key", more.pop("key", None) or ulid.fresh())
        raw = None if body is None else json.dumps(body).encode()
        status, _, content = await http(self.address, method, f"/management/v1{path}", headers, raw)
        return status, json.loads(content)

    async def deployed(self, **fields: Any) -> dict[str, Any]:
        """A deployment that is measured; its view."""
        status, receipt = await self.ask("POST", "/deployments", {"config": {**CONFIG, **fields}})
        assert status == 202, receipt
        return await self.settled(receipt["deployment_id"], lambda view: view["checkpoint"]["state"] != "pending")

    async def settled(self, identity: str, fits: Any) -> dict[str, Any]:
        """The deployment's view once it fits."""
        with trio.fail_after(30):
            while True:
                _, view = await self.ask("GET", f"/deployments/{identity}")
                if fits(view):
                    return view
                await trio.sleep(0.01)

    async def act(self, view: dict[str, Any], action: str, **more: Any) -> tuple[int, Any]:
        key = more.pop("key", None)
        body = {
            "expected_revision": int(view["revision"]),
            "action": action,
            "deadline_ms": self.services.clock() + 60_000,
            **more,
        }
        return await self.ask("POST", f"/deployments/{view['id']}/actions", body, key=key)


@asynccontextmanager
async def role(directory: Path, agent: FakeAgent | None = None) -> AsyncIterator[Role]:
    """The server half over `directory`, until the block ends."""
    clock = clocks.steady()
    agent = agent or FakeAgent(clock)
    store = Store(directory, RECORDS)
    world = World.load(store.load(), now_ms=clock())
    links = HostLinks(world.book, clock)
    driver = Driver(world, store, links, clock)
    desk = Desk(
        book=world.book,
        clock=clock,
        queued=partial(views.waiting, world),
        record=store.finished,
        feed=driver.feed,
    )
    driver.gates = desk
    profile = EngineProfile(engine="llamacpp", executable="/opt/llama-server", build_fingerprint="b9000+abc")
    registry = Registry(None, stated={"llamacpp": profile}, stated_in="standalone.yaml")

    async def log_tail(lane: Lane, kib: int) -> str:
        if lane.index > 0:
            raise FileNotFoundError
        return f"the last {kib} KiB of {lane}"

    services = Services(
        driver=driver,
        world=world,
        store=store,
        desk=desk,
        links=links,
        registry=registry,
        keys=KeyRing(API_KEY, TOKEN, store),
        host=HOST,
        allowed=[Allowed(host=HOST, name="box")],
        admin_token=TOKEN,
        clock=clock,
        request_deadline_ms=Millis(1_800_000),
        log_tail=log_tail,
        announce_profiles=lambda: None,
    )
    stopping = trio.Event()
    async with trio.open_nursery() as outer:
        await outer.start(store.run)
        async with trio.open_nursery() as nursery:
            link = MemoryLink(agent)
            links.links[HOST] = link
            await nursery.start(link.run, listener(links, driver.feed))
            await nursery.start(driver.run)
            driver.feed(events.ControllerStarted(session=world.book.session + 1, now_ms=clock()))
            driver.feed(events.HostOnline(policy=policy(), boot_id="boot", now_ms=clock()))
            nursery.start_soon(agent.observe)
            address = await nursery.start(
                partial(serve_management, build_management(services), "127.0.0.1", 0, stopping=stopping)
            )
            services.facts = RoleFacts(
                role="standalone",
                state_dir=str(directory),
                inference="127.0.0.1:1",
                inference_auth="api_key",
                management=address,
                document="standalone.yaml",
            )
            await driver.rested()
            yield Role(services, agent, address)
            stopping.set()
            driver.close()
            nursery.cancel_scope.cancel()
        outer.cancel_scope.cancel()
    store.close()


async def http(
    address: str, method: str, path: str, headers: dict[str, str] | list[tuple[str, str]], body: bytes | None
) -> tuple[int, dict[str, str], bytes]:
    """One exchange on a connection of its own; (status, headers, body)."""
    host, _, port = address.rpartition(":")
    given = list(headers.items()) if isinstance(headers, dict) else headers
    if not any(name.lower() == "host" for name, _ in given):
        given = [("Host", address), *given]
    if body is not None:
        given = [*given, ("Content-Length", str(len(body)))]
    connection = h11.Connection(h11.CLIENT)
    with trio.fail_after(30):
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            sent = connection.send(h11.Request(method=method, target=path, headers=given))
            sent += connection.send(h11.Data(data=body)) if body else b""
            try:
                await stream.send_all(sent + connection.send(h11.EndOfMessage()))
            except trio.BrokenResourceError:
                pass  # it answered before it had heard all: that answer is read below
            status, found, content = 0, {}, b""
            while True:
                event = connection.next_event()
                match event:
                    case h11.NEED_DATA:
                        connection.receive_data(await stream.receive_some())
                    case h11.Response():
                        status = event.status_code
                        found = {name.decode(): value.decode() for name, value in event.headers}
                    case h11.Data():
                        content += bytes(event.data)
                    case h11.EndOfMessage() | h11.ConnectionClosed():
                        return status, found, content
