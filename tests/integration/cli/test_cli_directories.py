"""Every directory that a command makes is its owner's alone, whatever the umask and whatever was there before."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Shell

from capyctl.documents import owned, places


def modes(root: Path) -> dict[str, int]:
    """The directories at and below `root` with their modes."""
    return {str(at): stat.S_IMODE(os.stat(at).st_mode) for at in (root, *root.rglob("*")) if at.is_dir()}


@pytest.fixture(autouse=True)
def usual_umask(shell: Shell) -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("kind", ["server", "host"])
def test_the_first_command_on_a_machine_opens_nothing_to_others(shell: Shell, kind: str) -> None:
    assert shell("init", kind, CAPYCTL_STATE_DIR="").status == 0
    assert set(modes(shell.home / ".local").values()) == {0o700}
    places.keep_private(str(shell.home / ".local" / "state" / "capyctl"))  # what `start standalone` asks first


def test_registering_closes_what_it_makes_and_leaves_what_it_finds(shell: Shell) -> None:
    (shell.home / "shared").mkdir(mode=0o755)
    missing = str(shell.home / "llama-server")
    assert shell("engine", "add", missing, XDG_CONFIG_HOME=str(shell.home / "shared" / "of" / "ada")).status == 16
    found = modes(shell.home / "shared")
    assert found.pop(str(shell.home / "shared")) == 0o755
    assert found
    assert set(found.values()) == {0o700}


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=r"File exists|Not a directory"):
            owned.private_directory(path)
