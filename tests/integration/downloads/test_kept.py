"""What was downloaded, shown and removed: what somebody refers to or fetches stays, and nothing else is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from capyctl.checkpoints.sources import Wanted
from capyctl.documents.model_source import HuggingFace
from capyctl.downloads import kept
from capyctl.downloads.fetch import locked, parts_of
from capyctl.downloads.kept import Kept
from capyctl.errors import CapyError
from tests.hub.hub import COMMIT, Fault, running

from .test_fetch import FILES, NEEDED, REPO, Here

WHOLE = f"sources/huggingface/{REPO}/{COMMIT}/tensors"
HALF = f"sources/huggingface/maker/half/{COMMIT}/tensors"
SIZE = sum(len(FILES[name]) for name in NEEDED)


@pytest.fixture
def here(tmp_path: Path) -> Here:
    """A directory with one download, parts of another, and a model of the user's own."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/model.gguf").write_bytes(b"mine")
    with running({REPO: dict(FILES), "maker/half": dict(FILES)}) as hub:
        made = Here(tmp_path, hub)
        made.fetch()
        hub.faults["model.safetensors"] = [Fault(cut_after=100_000), *[Fault(cut_after=0)] * 2]
        with pytest.raises(CapyError):
            made.fetch(HuggingFace(repo="maker/half", revision=COMMIT), Wanted(kind="tensors"))
        return made


def test_downloads_and_their_parts_are_listed_with_sizes(here: Here):
    half, whole = kept.present(here.root)
    assert whole == Kept(place=WHOLE, bytes=SIZE, complete=True)
    assert (half.place, half.complete, half.bytes > 100_000) == (HALF, False, True)
    assert kept.present(here.root / "mine") == []


def test_what_nobody_refers_to_is_removed_with_its_empty_directories(here: Here):
    assert [one.place for one in kept.prune(here.root, {HALF})] == [WHOLE]
    assert [one.place for one in kept.present(here.root)] == [HALF]
    assert [one.place for one in kept.prune(here.root, set())] == [HALF]
    left = sorted(str(path.relative_to(here.root)) for path in here.root.rglob("*") if path.is_file())
    assert left == ["mine/model.gguf"]
    assert not (here.root / "sources/huggingface").exists() or not any((here.root / "sources/huggingface").iterdir())


def test_what_a_killed_removal_or_a_power_cut_left_is_shown_and_removed(here: Here):
    """A removal is killed before it is through; a record of whose parts they are was not on the disk yet."""
    killed, dark = parts_of(here.root, "a"), parts_of(here.root, "b")
    for work in (killed, dark):
        (work / "gone").mkdir(parents=True)
        (work / "gone/model.gguf").write_bytes(b"x" * 1000)
    (dark / "place").touch()
    shown = [one for one in kept.present(here.root) if one.place.startswith("sources/.parts/")]
    assert [one.bytes for one in shown] == [1000, 1000]
    with locked(dark):
        assert [one.place for one in kept.prune(here.root, {WHOLE, HALF})] == [str(killed.relative_to(here.root))]
    assert [one.place for one in kept.prune(here.root, {WHOLE, HALF})] == [str(dark.relative_to(here.root))]
    assert [one.place for one in kept.present(here.root)] == [HALF, WHOLE]


def test_what_is_being_fetched_stays(here: Here):
    with locked(parts_of(here.root, HALF)) as held:
        assert held
        assert [one.place for one in kept.prune(here.root, {WHOLE})] == []
    assert {one.place for one in kept.present(here.root)} == {WHOLE, HALF}


def test_nothing_is_removed_through_a_link(here: Here, tmp_path_factory: pytest.TempPathFactory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "x").write_bytes(b"x")
    (here.root / "sources/http").mkdir()
    (here.root / "sources/http/linked").symlink_to(elsewhere)
    assert "sources/http/linked" not in {one.place for one in kept.prune(here.root, set())}
    assert (elsewhere / "x").exists()


def test_parts_that_claim_another_place_are_left_alone(here: Here):
    (parts_of(here.root, HALF) / "place").write_text("mine")
    assert [one.place for one in kept.present(here.root)] == [WHOLE]
    kept.prune(here.root, set())
    assert (here.root / "mine/model.gguf").exists()
