"""What the host's tests share: directories, an agent in a nursery, and the check that no process is left."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio

from capyctl.fsm.types import HostId, Incarnation, Millis, RequestId
from capyctl.host import identity
from capyctl.host.agent import HostAgent
from capyctl.host.devices import Observer
from capyctl.host.ingress import Ingress
from capyctl.host.journal import open_journal
from capyctl.host.ports import PortLeases
from capyctl.session.messages import Report
from tests.ports import neighbours

from .fakes import FakeCheckpoints, FakeRegistry, policy

FIRST_PORT = neighbours(100)


def children() -> set[int]:
    return {stat.pid for stat in identity.everyone() if stat.ppid == os.getpid() and not stat.dead}


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    identity.become_subreaper()  # so that an orphan of an engine is seen here
    before = children()
    yield
    for _ in range(100):
        left = children() - before
        if not left:
            return
        trio.run(trio.sleep, 0.05)
    names = [(pid, Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in left]
    for pid in left:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    pytest.fail(f"left behind: {names}")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    place = tmp_path / "models" / "tiny"
    place.mkdir(parents=True)
    (place / "weights").write_bytes(b"0" * 100)
    return place


@attrs.define
class Running:
    """An agent that serves, and what it reported so far."""

    agent: HostAgent
    ingress: Ingress
    ended: list[tuple[RequestId, Millis, Millis]]
    reports: list[Report]

    async def report(self, kind: type[Report], of: Incarnation | None = None) -> Report:
        """The next report of a kind, waited for."""
        with trio.fail_after(30):
            while True:
                for report in self.reports:
                    if isinstance(report, kind) and (of is None or getattr(report, "incarnation", of) == of):
                        self.reports.remove(report)
                        return report
                self.reports.append(await self.agent.reports.receive())


Host = Callable[[], AbstractAsyncContextManager[Running]]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Start an agent over the same state directory; leaving the block is the role's end, engines stay."""

    @asynccontextmanager
    async def start() -> AsyncIterator[Running]:
        journal = await open_journal(tmp_path / "host" / "journal.sqlite3")
        ended: list[tuple[RequestId, Millis, Millis]] = []
        ingress = Ingress(on_upstream_ended=lambda *facts: ended.append(facts))
        name = HostId("h1")
        agent = HostAgent(
            host=name,
            name="here",
            policy=policy(name),
            memory_source="meminfo",
            state_dir=tmp_path / "host",
            models_root=tmp_path / "models",
            registry=FakeRegistry(),
            checkpoints=FakeCheckpoints(),
            journal=journal,
            ingress=ingress,
            observer=Observer(),
            ports=PortLeases(FIRST_PORT, FIRST_PORT + 99),
            grace_s=1.0,
            kill_s=3.0,
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(agent.run)
            yield Running(agent, ingress, ended, [])
            nursery.cancel_scope.cancel()
        await journal.close()

    return start
