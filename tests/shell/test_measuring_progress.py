"""How far a digest is, from the thread that makes it to whoever asks: rarely said, and shown until it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from test_fetching import HOSTS, NAME, accepted, measure

from capyctl.errors import Refusal
from capyctl.fsm.types import Bytes, DeploymentId, Millis
from capyctl.host import looks
from capyctl.server.hosts import HostLinks, listener
from capyctl.server.services import with_progress
from capyctl.session import messages as m
from capyctl.session.kinds import decode_message, encode_message


@attrs.define(eq=False)
class Reading:
    """A host that reads until it is let go of, and then finds no model."""

    commands: list[m.DigestCheckpoint] = attrs.field(factory=list)
    go: trio.Event = attrs.field(factory=trio.Event)

    async def call(self, command: m.Command) -> m.Result:
        assert isinstance(command, m.DigestCheckpoint)
        self.commands.append(command)
        await self.go.wait()
        return m.Refused(command_id=command.command_id, code="checkpoint_unusable", message="no model")


def report(command: m.Command, done: int, total: int) -> m.DigestProgress:
    return m.DigestProgress(
        seen_at_ms=Millis(8), digest=command.command_id, done_bytes=Bytes(done), total_bytes=Bytes(total)
    )


async def test_what_a_host_says_of_a_digest_is_shown_until_it_ends(autojump_clock: Any) -> None:
    world, host = accepted("here"), Reading()
    links = HostLinks(world.book, lambda: Millis(7), links=dict.fromkeys(HOSTS, host))
    hear = listener(links, lambda event: pytest.fail(f"{event} is no fact of the world"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(links.measure, measure())
        await trio.testing.wait_all_tasks_blocked()
        assert links.measuring.progress(NAME) == []
        (command,) = host.commands
        hear(report(command, 3, 9))
        hear(report(attrs.evolve(command, command_id="of before"), 8, 9))
        assert links.measuring.progress(NAME) == [{"host_id": "one", "done_bytes": 3, "total_bytes": 9}]
        assert links.measuring.progress(DeploymentId("E")) == []
        host.go.set()
    assert links.measuring.progress(NAME) == []


def test_a_view_shows_the_host_that_has_most_left_to_read() -> None:
    rows = [
        {"host_id": "one", "done_bytes": 5, "total_bytes": 9},
        {"host_id": "two", "done_bytes": 0, "total_bytes": 2},
    ]
    view = {"id": NAME, "checkpoint": {"state": "pending", "digest": None}, "waiting": None}
    checkpoint = with_progress(view, fetched=[], read=rows, measuring=False)["checkpoint"]
    hosts = [
        {"host_id": "one", "done_bytes": "5", "total_bytes": "9"},
        {"host_id": "two", "done_bytes": "0", "total_bytes": "2"},
    ]
    figures = {"done_bytes": "5", "total_bytes": "9", "hosts": hosts}
    assert checkpoint == {"state": "measuring", "digest": None, "measured": figures}
    assert with_progress(view, fetched=[], read=[], measuring=True)["checkpoint"]["state"] == "measuring"
    assert with_progress(view, fetched=[], read=[], measuring=False) == view


def test_the_report_travels() -> None:
    said = report(m.ReadMemory(command_id="c"), 3, 9)
    assert decode_message(encode_message(said)) == said


async def test_a_digest_is_told_of_twice_a_second_at_most_and_from_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1000, 1100, 1499, 1500, 2100, *[2101] * 20])
    monkeypatch.setattr(looks, "now_ms", lambda: next(clock))
    said: list[m.Report] = []

    @attrs.define
    class Files:
        def measure(self, model_dir: Path, document: Any, progress: Any) -> Any:
            for done in range(6):
                progress(done, 5)
            raise Refusal("checkpoint_unusable", "no model")

        def model_dir(self, model: str) -> Path:
            return Path("/m")

    unused: Any = None
    host = looks.Looks(
        state_dir=unused, journal=unused, custody=unused, checkpoints=Files(), launcher=Files(), launching=unused,  # type: ignore[arg-type]
        parking=unused, ingress=unused, watch=unused, say=said.append,
    )  # fmt: skip
    with pytest.raises(Refusal, match="no model"):
        await host.digest(m.DigestCheckpoint(command_id="c", model="m", document={}))
    await trio.testing.wait_all_tasks_blocked()
    told = [(one.done_bytes, one.total_bytes) for one in said if isinstance(one, m.DigestProgress)]
    assert told == [(0, 5), (3, 5), (4, 5)]
