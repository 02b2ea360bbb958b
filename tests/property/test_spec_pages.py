"""The pages of `spec/` are what the code says, and a reader finds his way among them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from capyctl.fsm.table import Machine

ROOT = Path(__file__).resolve().parents[2]
SPEC = ROOT / "spec"


def load() -> ModuleType:
    described = importlib.util.spec_from_file_location("render_all", SPEC / "render_all.py")
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    before = list(sys.path)
    described.loader.exec_module(module)
    sys.path[:] = before
    return module


render_all = load()


def test_the_pages_are_fresh():
    """Run: make spec"""
    assert render_all.stale(SPEC) == []


def test_a_page_that_differs_is_missing_or_belongs_to_nobody_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert render_all.main([str(tmp_path)]) == 0
    assert render_all.main(["--check", str(tmp_path)]) == 0
    (tmp_path / "gate.md").write_text("old")
    (tmp_path / "switch.md").unlink()
    (tmp_path / "stray.md").write_text("")
    assert render_all.main(["--check", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "gate.md: differs from the code" in told
    assert "switch.md: is missing" in told
    assert "stray.md: no machine has this page" in told
    assert told.count("run: make spec") == 3
    assert render_all.main([]) == 2
    assert render_all.main(["--chekc", str(tmp_path)]) == 2


@pytest.mark.parametrize("name", render_all.MACHINES)
def test_every_cell_that_a_reviewer_needs_is_filled(name: str):
    machine = render_all.machines()[name]
    assert isinstance(machine, Machine)
    notes = dict(render_all.render.phase_rows(machine.phases))
    for row in machine.rows:
        assert row.why.endswith("."), row
        for part in (row.given, row.change, *row.emits):
            assert part is None or part.__doc__, f"{name}: {part} has no words"
    for claim in machine.invariants:
        assert (claim.__doc__ or "").strip().endswith("."), claim
    assert all(event.__doc__ for event in machine.events)
    assert set(notes) == {f"`{phase.name}`" for phase in machine.phases}


def test_every_page_is_linked_from_the_first():
    readme = (SPEC / "README.md").read_text()
    linked = set(re.findall(r"\]\(([\w]+\.md)\)", readme))
    assert linked == {page.name for page in SPEC.glob("*.md")} - {"README.md"}


def test_every_phase_of_a_machine_that_is_asked_is_answered():
    for name, told in render_all.answers().items():
        machine = render_all.machines()[name]
        assert set(told.by_phase) == set(machine.phases), name
        assert all(len(line) == len(told.heads) for line in told.by_phase.values()), name
