"""Six hundred checkpoints that were made to hurt: refused with their code or read as something sane, in little time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile import MUTATIONS, good

from capyctl.checkpoints.digest import StatCache, digest_listing
from capyctl.checkpoints.directory import ModelFile, file_at, list_files
from capyctl.checkpoints.reading import opened, read_whole
from capyctl.checkpoints.tensor_facts import tensor_facts
from capyctl.errors import CapyError

SECONDS_MAX = 5.0  # of the processor, for one; the slowest takes half a second
PEAK_BYTES_MAX = 640 << 20  # of the whole process, whose own generators take a third of it
LIMIT_SECONDS = 240


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What came of each, in a process of its own with a limit on its memory."""
    place = tmp_path_factory.mktemp("hostile")
    program = [sys.executable, str(Path(__file__).with_name("hostile.py")), str(place)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_is_refused_with_its_code_or_read_as_something_sane(rows: list[dict[str, Any]]) -> None:
    assert len(rows) > 400 + MUTATIONS // 2
    wrong = [
        f"{row['name']}: {row['came']}, not {row['expected']}" for row in rows if row["came"] not in row["expected"]
    ]
    assert wrong == []


def test_good_ones_are_still_read_and_bad_ones_refused(rows: list[dict[str, Any]]) -> None:
    came = {row["name"]: row["came"] for row in rows}
    assert {came["good: safetensors"], came["good: GGUF"]} == {"read"}
    mutated = [row["came"] for row in rows if "mutated" in row["name"]]
    assert mutated.count("read") > 10
    assert len(mutated) - mutated.count("read") > MUTATIONS // 3


def test_none_takes_long_or_much_memory(rows: list[dict[str, Any]]) -> None:
    slow = {row["name"]: row["seconds"] for row in rows if row["seconds"] > SECONDS_MAX}
    assert slow == {}
    assert max(row["peak_bytes"] for row in rows) < PEAK_BYTES_MAX


# --- files that change while they are read -------------------------------------------------------------


def mismatch(call: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(CapyError, match="changed while it was read") as caught:
        call(*args, **kwargs)
    assert caught.value.code == "checkpoint_mismatch"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_was_swapped_after_the_listing_is_not_read(tmp_path: Path, name: str) -> None:
    good(tmp_path)
    listing = list_files(tmp_path)
    raw = (tmp_path / name).read_bytes()
    (tmp_path / name).rename(tmp_path / "old")
    (tmp_path / name).write_bytes(raw)
    mismatch(tensor_facts, listing)


def test_a_link_that_was_put_in_place_of_a_listed_file_is_not_followed(tmp_path: Path) -> None:
    good(tmp_path)
    listing = list_files(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "moved")
    (tmp_path / "model.safetensors").symlink_to("moved")
    with pytest.raises(CapyError, match=r"model\.safetensors cannot be read") as caught:
        tensor_facts(listing)
    assert caught.value.code == "checkpoint_unusable"


def test_a_fifo_that_was_put_in_place_of_a_listed_file_hangs_nobody(tmp_path: Path) -> None:
    good(tmp_path)
    listing = list_files(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    mismatch(tensor_facts, listing)
    mismatch(digest_listing, listing, StatCache(None))


@pytest.mark.parametrize("size", [8, 4096])
def test_what_is_written_while_it_is_open_is_seen(tmp_path: Path, size: int) -> None:
    (tmp_path / "x").write_bytes(bytes(64))
    file = file_at(tmp_path / "x")

    def read_and_write(file: ModelFile) -> None:
        with opened(file) as stream:
            stream.read(8)
            os.utime(file.real, ns=(0, 1))
            os.truncate(file.real, size)

    mismatch(read_and_write, file)
    mismatch(read_whole, file, 1 << 20)


def test_a_file_that_grows_while_it_is_hashed_is_a_mismatch_and_ends(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(1 << 16))

    def grow(done: int, total: int) -> None:
        with open(tmp_path / "b", "ab") as stream:
            stream.write(b"x")

    mismatch(digest_listing, list_files(tmp_path), StatCache(None), progress=grow)
