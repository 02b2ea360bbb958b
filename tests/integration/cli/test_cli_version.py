"""`capyctl version`: the commit of a checkout, read from git's files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Shell

from capyctl.cli.version import checked_out

HERE = "1" * 40
OTHER = "2" * 40


@pytest.mark.parametrize(
    ("files", "commit"),
    [
        ({"HEAD": HERE}, HERE),
        ({"HEAD": "ref: refs/heads/main\n", "refs/heads/main": f"{HERE}\n"}, HERE),
        (
            {"HEAD": "ref: refs/heads/a/b", "packed-refs": f"# pack\n{OTHER} refs/heads/b\n{HERE} refs/heads/a/b\n"},
            HERE,
        ),
        ({"HEAD": "ref: refs/heads/new\n"}, None),
        ({"HEAD": "nonsense"}, None),
        ({}, None),
    ],
)
def test_the_commit_is_what_head_names(tmp_path: Path, files: dict[str, str], commit: str | None) -> None:
    for name, text in files.items():
        (tmp_path / ".git" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".git" / name).write_text(text)
    assert checked_out(tmp_path) == commit


def test_a_worktree_has_a_head_of_its_own_and_shares_branches(tmp_path: Path) -> None:
    own = tmp_path / "main" / ".git" / "worktrees" / "w"
    own.mkdir(parents=True)
    (own / "HEAD").write_text("ref: refs/heads/w\n")
    (own / "commondir").write_text("../..\n")
    (tmp_path / "main" / ".git" / "packed-refs").write_text(f"{HERE} refs/heads/w\n")
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / ".git").write_text(f"gitdir: {own}\n")
    assert checked_out(tmp_path / "w") == HERE


def test_without_a_commit_none_is_named(shell: Shell) -> None:
    done = shell("version")
    told = json.loads(shell("version", "--json").out)
    assert done.out == f"capyctl {told['version']}{' (' + told['commit'] + ')' if told['commit'] else ''}\n"
