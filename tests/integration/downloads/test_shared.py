"""Several who want the same source, a bound on how many are fetched at once, and whoever gives up in the middle."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from capyctl.checkpoints.sources import Wanted
from capyctl.documents.model_source import Http
from capyctl.downloads.door import Line, Stopped
from capyctl.downloads.fetch import Fetcher
from capyctl.downloads.part import Progress
from capyctl.downloads.shared import Downloads
from capyctl.errors import CapyError, Failure, Refusal
from capyctl.host.materials import Materials
from capyctl.session import messages as m

FILES = Wanted(kind="files")
JOURNAL: Any = None  # downloads are on no record; only a prune reads one


def source(number: int) -> Http:
    return Http(url=f"https://models.example/{number}", sha256=f"{number:064x}")


@attrs.define(eq=False, slots=False)
class Slow:
    """Stands for a fetcher: each fetch waits to be let go, and minds its line."""

    root: Path
    begun: list[str] = attrs.field(factory=list)
    ended: list[str] = attrs.field(factory=list)
    go: threading.Event = attrs.field(factory=threading.Event)
    fails: Exception | None = None
    lines: list[Line] = attrs.field(factory=list)

    @property
    def room(self) -> Slow:
        return self

    def directory(self, source: Http, wanted: Wanted) -> Path:
        return self.root / source.sha256

    def found(self, source: Http, wanted: Wanted) -> Path | None:
        return None

    def fetch(self, source: Http, wanted: Wanted, progress: Progress, line: Line) -> Path:
        self.begun.append(source.sha256)
        self.lines.append(line)
        progress.phase, progress.total_bytes, progress.done_bytes = "downloading", 10, 4
        while not self.go.wait(0.01):
            if line.stopped.is_set():
                self.ended.append(source.sha256)
                raise Stopped
        if self.fails is not None:
            raise self.fails
        progress.done_bytes = 10
        return self.directory(source, wanted)


@pytest.fixture
def slow(tmp_path: Path) -> Slow:
    return Slow(tmp_path)


def made(slow: Slow, **more: float) -> Downloads:
    fetcher: Fetcher = slow  # type: ignore[assignment]
    return Downloads(fetcher, **more)  # type: ignore[arg-type]


async def until(holds: object) -> None:
    with trio.fail_after(30):
        while not holds():  # type: ignore[operator]
            await trio.sleep(0.005)


async def test_two_who_want_one_source_share_one_fetch_and_both_hear_of_it(slow: Slow):
    downloads = made(slow)
    heard: list[str] = []
    found: list[Path] = []

    async def want(name: str) -> None:
        found.append(await downloads.have(source(1), FILES, lambda progress: heard.append(f"{name} {progress.phase}")))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(want, "a")
        nursery.start_soon(want, "b")
        await until(lambda: {"a downloading", "b downloading"} <= set(heard))
        slow.go.set()
    assert slow.begun == [source(1).sha256]
    assert found == [slow.directory(source(1), FILES)] * 2


async def test_a_mirror_of_the_same_file_does_not_fail_with_another_address(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
):
    dead, mirror = (Http(url=f"https://{host}.example/1", sha256="1" * 64) for host in ("dead", "mirror"))
    fetch = slow.fetch

    def or_not(source: Http, wanted: Wanted, progress: Progress, line: Line) -> Path:
        found = fetch(source, wanted, progress, line)
        if source is dead:
            raise Refusal("not_found", "no")
        return found

    monkeypatch.setattr(slow, "fetch", or_not)
    downloads = made(slow)
    told: dict[str, object] = {}

    async def want(source: Http) -> None:
        try:
            told[str(source.url)] = await downloads.have(source, FILES, lambda _: None)
        except CapyError as wrong:
            told[str(source.url)] = wrong.code

    async with trio.open_nursery() as nursery:
        nursery.start_soon(want, dead)
        nursery.start_soon(want, mirror)
        await until(lambda: len(slow.begun) == 2)
        slow.go.set()
    assert told == {str(dead.url): "not_found", str(mirror.url): slow.directory(mirror, FILES)}


async def test_two_sources_are_fetched_at_a_time_and_the_third_waits_for_its_turn(slow: Slow):
    downloads = made(slow)
    phases: list[str] = []
    async with trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(downloads.have, source(number), FILES, lambda _: None)
        await until(lambda: len(slow.begun) == 2)
        nursery.start_soon(downloads.have, source(3), FILES, lambda progress: phases.append(progress.phase))
        await until(lambda: "waiting" in phases)
        assert len(slow.begun) == 2
        slow.go.set()
    assert len(slow.begun) == 3


async def test_who_gives_up_ends_the_fetch_and_one_who_waits_goes_on(slow: Slow):
    downloads = made(slow)
    first = trio.CancelScope()
    found: list[Path] = []

    async def leader() -> None:
        with first:
            await downloads.have(source(1), FILES, lambda _: None)

    async def follower() -> None:
        found.append(await downloads.have(source(1), FILES, lambda _: None))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leader)
        await until(lambda: slow.begun)
        nursery.start_soon(follower)
        await until(lambda: sum(len(one.hear) for one in downloads._running.values()) == 2)
        first.cancel()
        await until(lambda: len(slow.begun) == 2)
        await until(lambda: slow.ended)
        slow.go.set()
    assert found == [slow.directory(source(1), FILES)]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (Refusal("too_large", "no"), "too_large"),
        (Failure("unavailable", "no"), "unavailable"),
        (RuntimeError("a slip"), "internal"),
    ],
)
async def test_what_went_wrong_is_told_to_all_who_waited(slow: Slow, wrong: Exception, code: str):
    slow.fails = wrong
    downloads = made(slow)
    told: list[CapyError] = []

    async def want() -> None:
        with pytest.raises(CapyError) as caught:
            await downloads.have(source(1), FILES, lambda _: None)
        told.append(caught.value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(want)
        nursery.start_soon(want)
        await until(lambda: slow.begun and sum(len(one.hear) for one in downloads._running.values()) == 2)
        slow.go.set()
    assert [one.code for one in told] == [code, code]
    assert told[0] is not told[1]
    slow.fails = None
    assert await downloads.have(source(1), FILES, lambda _: None)  # nothing of it is left


async def test_a_connection_that_brings_too_little_is_cut_again_and_again(slow: Slow):
    downloads = made(slow, slow_s=0.1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(downloads.have, source(1), FILES, lambda _: None)
        await until(lambda: slow.lines and slow.lines[0]._why is not None)
        slow.lines[0]._why = None
        await until(lambda: slow.lines[0]._why is not None)
        slow.go.set()
    assert "bytes came in" in str(slow.lines[0]._why)


# --- commands -------------------------------------------------------------------------------------------------

DOCUMENT = {
    "name": "m",
    "engine": "llamacpp",
    "model": {"http": {"url": "https://x.example/m.gguf", "sha256": "a" * 64}},
}


async def test_a_command_has_every_source_and_says_how_far_it_is(slow: Slow):
    said: list[m.Report] = []
    slow.go.set()
    materials = Materials(downloads=made(slow), journal=JOURNAL, say=said.append)
    result = await materials.materialize(m.MaterializeSource(command_id="c", document=DOCUMENT, family="llamacpp"))
    assert result == m.Materialized(command_id="c", paths=(str(slow.root / ("a" * 64)),))
    assert materials.root == str(slow.root)


async def test_a_command_that_is_called_off_says_so_and_another_one_of_the_source_goes_on(slow: Slow):
    said: list[m.Report] = []
    downloads = made(slow)
    materials = Materials(downloads=downloads, journal=JOURNAL, say=said.append)
    results: dict[str, object] = {}

    async def ask(identity: str) -> None:
        command = m.MaterializeSource(command_id=identity, document=DOCUMENT, family="llamacpp")
        try:
            results[identity] = await materials.materialize(command)
        except CapyError as wrong:
            results[identity] = wrong.code

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "a")
        await until(lambda: slow.begun)
        nursery.start_soon(ask, "b")
        await until(lambda: sum(len(one.hear) for one in downloads._running.values()) == 2)
        assert materials.stop(m.StopMaterializing(command_id="s", materialize="a")) == m.Done(command_id="s")
        await until(lambda: "a" in results)
        slow.go.set()
    assert results == {
        "a": "deployment_stopped",
        "b": m.Materialized(command_id="b", paths=(str(slow.root / ("a" * 64)),)),
    }
    materials.stop(m.StopMaterializing(command_id="s2", materialize="a"))  # it has ended; nothing happens
    reports = [one for one in said if isinstance(one, m.SourceProgress)]
    assert {(one.done_bytes, one.total_bytes) for one in reports if one.phase == "downloading"} <= {(4, 10), (10, 10)}


async def test_a_host_without_downloads_refuses_them():
    materials = Materials(downloads=None, journal=JOURNAL, say=lambda _: None)
    with pytest.raises(Refusal, match="downloads no models"):
        await materials.materialize(m.MaterializeSource(command_id="c", document=DOCUMENT, family="llamacpp"))
    assert materials.root is None


async def test_what_is_being_removed_is_not_taken_for_what_is_there(slow: Slow, monkeypatch: pytest.MonkeyPatch):
    class Nothing:
        async def launches(self) -> list[Any]:
            return []

    removed, go = threading.Event(), threading.Event()

    def prune(root: Path, kept: set[str]) -> list[Any]:
        removed.set()
        assert go.wait(60)
        return []

    monkeypatch.setattr("capyctl.host.materials.kept.prune", prune)
    slow.go.set()
    journal: Any = Nothing()
    materials = Materials(downloads=made(slow), journal=journal, say=lambda _: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(materials.prune, m.PruneSources(command_id="p", kept=()))
        await until(removed.is_set)
        command = m.MaterializeSource(command_id="c", document=DOCUMENT, family="llamacpp")
        nursery.start_soon(materials.materialize, command)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not slow.begun
        go.set()
    assert slow.begun
