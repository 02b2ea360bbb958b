"""Whose a segment of shared memory is, by its name: only what the recorded, ended process itself can have made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from capyctl.fsm.types import ProcessIdentity
from capyctl.host import identity, segments


@pytest.fixture
def ended() -> ProcessIdentity:
    """A process of ours that has ended and been reaped."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    known = identity.identify(child.pid)
    assert known is not None
    child.communicate(b"\n")
    return known


@pytest.fixture
def living() -> Iterator[ProcessIdentity]:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    known = identity.identify(child.pid)
    assert known is not None
    yield known
    child.communicate(b"\n")


def made(shm: Path, *names: str) -> frozenset[segments.Segment]:
    for name in names:
        (shm / name).write_bytes(b"x")
    return frozenset(
        segments.Segment(str(shm / name), (shm / name).stat().st_dev, (shm / name).stat().st_ino) for name in names
    )


def test_names_that_libraries_give_tell_their_maker_once_it_is_gone(tmp_path: Path, ended: ProcessIdentity) -> None:
    pid = ended.pid
    its_own = made(
        tmp_path, f"torch_{pid}_4711_0", f"torch_{pid}_4711_1", f"cuda.shm.0.{pid:x}.1", f"sgl_shm_mm_{pid}_00c0ffee"
    )
    made(
        tmp_path,
        f"torch_{pid}",
        f"x_{pid}_1_1",
        f"psm_{pid}",
        f"torch_{pid + 1}_4711_0",
        f"cuda.shm.0.{pid + 1:x}.1",
        f"sgl_shm_{pid}_00c0ffee",
    )
    (tmp_path / f"torch_{pid}_1_1").mkdir()
    os.symlink("/etc/hostname", tmp_path / f"torch_{pid}_2_1")
    assert segments.named_after([ended], frozenset(), shm=tmp_path) == its_own


def test_a_name_that_says_no_maker_is_nobodys(tmp_path: Path, ended: ProcessIdentity) -> None:
    made(tmp_path, "sglang_loads_7abf9124.shm", "sglang_loads_tmpk2m_0000beef.shm", "psm_7abf9124", "nccl-Xk2m")
    assert segments.named_after([ended], frozenset(), shm=tmp_path) == frozenset()


def test_what_is_older_than_the_launch_is_not_its_own(tmp_path: Path, ended: ProcessIdentity) -> None:
    made(tmp_path, f"torch_{ended.pid}_1_0")
    before = segments.present(tmp_path)
    later = made(tmp_path, f"torch_{ended.pid}_1_1")
    assert segments.named_after([ended], before, shm=tmp_path) == later


def test_a_pid_that_lives_or_that_somebody_else_has_proves_nothing(tmp_path: Path, living: ProcessIdentity) -> None:
    made(tmp_path, f"torch_{living.pid}_1_0")
    reused = attrs.evolve(living, start_ticks=living.start_ticks - 1)
    assert segments.named_after([living, reused], frozenset(), shm=tmp_path) == frozenset()
