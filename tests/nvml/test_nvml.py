"""The simulated NVML itself: what `pynvml` hears from it is what the state file says."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pynvml
import pytest

from tests.nvml import card, library
from tests.nvml.card import GIB


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library.load()
    monkeypatch.setenv(card.VARIABLE, str(tmp_path / "cards"))
    with suppress(pynvml.NVMLError_Uninitialized):  # readers of tests before, in this very process
        while True:
            pynvml.nvmlShutdown()
    return tmp_path / "cards"


@contextmanager
def nvml() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def first() -> object:
    return pynvml.nvmlDeviceGetHandleByIndex(0)


@contextmanager
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds card memory, ended by the end of the block at the latest."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        try:
            yield running
        finally:
            running.kill()


def test_a_card_has_the_identity_and_the_memory_that_the_file_says(state: Path) -> None:
    card.one_card(state)
    with nvml():
        assert pynvml.nvmlSystemGetDriverVersion() == "580.95.05"
        assert pynvml.nvmlSystemGetNVMLVersion() == "13.580.95.05"
        assert pynvml.nvmlDeviceGetCount() == 1
        handle = first()
        assert pynvml.nvmlDeviceGetName(handle) == "NVIDIA GeForce RTX 4090"
        assert pynvml.nvmlDeviceGetUUID(handle) == card.uuid(0)
        assert pynvml.nvmlDeviceGetPciInfo(handle).busId == "00000000:01:00.0"
        assert pynvml.nvmlDeviceGetCudaComputeCapability(handle) == (8, 9)
        assert pynvml.nvmlDeviceGetArchitecture(handle) == pynvml.NVML_DEVICE_ARCH_ADA
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        assert (memory.total, memory.free, memory.used) == (24 * GIB, 24 * GIB, 0)
        second = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        assert (second.total, second.free, second.reserved) == (24 * GIB, 24 * GIB, 0)
        for found in (
            pynvml.nvmlDeviceGetHandleByUUID(card.uuid(0)),
            pynvml.nvmlDeviceGetHandleByPciBusId("00000000:01:00.0"),
        ):
            assert pynvml.nvmlDeviceGetIndex(found) == 0
        with pytest.raises(pynvml.NVMLError_NotFound):
            pynvml.nvmlDeviceGetHandleByUUID(card.uuid(7))
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            pynvml.nvmlDeviceGetHandleByIndex(1)


def test_memory_is_listed_under_its_process_and_goes_with_it(state: Path) -> None:
    cards = card.one_card(state)
    with nvml(), process() as engine:
        cards.hold(0, engine.pid, 5 * GIB)
        cards.hold(0, engine.pid, GIB)
        cards.hold(0, 0, 2 * GIB)
        for version in ("", "_v2", "_v3"):
            (row,) = getattr(pynvml, f"nvmlDeviceGetComputeRunningProcesses{version}")(first())
            assert (row.pid, row.usedGpuMemory) == (engine.pid, 6 * GIB)
        assert pynvml.nvmlDeviceGetMemoryInfo(first()).used == 8 * GIB == cards.used(0)
        cards.drop(0, engine.pid, 5 * GIB)
        assert cards.held(0, engine.pid) == GIB
        engine.kill()
        os.waitid(os.P_PID, engine.pid, os.WEXITED | os.WNOWAIT)  # a zombie
        assert pynvml.nvmlDeviceGetComputeRunningProcesses(first()) == []
        assert pynvml.nvmlDeviceGetMemoryInfo(first()).used == 2 * GIB == cards.used(0)
        assert cards.peak(0) == 8 * GIB


def test_version_1_of_the_list_of_processes_has_rows_of_16_bytes(state: Path) -> None:
    class Row(ctypes.Structure):
        _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong)]

    cards = card.one_card(state)
    with nvml(), process() as one, process() as other:
        cards.hold(0, one.pid, GIB)
        cards.hold(0, other.pid, 2 * GIB)
        rows, count = (Row * 2)(), ctypes.c_uint(2)
        call = ctypes.CDLL(library.NAME).nvmlDeviceGetComputeRunningProcesses
        assert call(first(), ctypes.byref(count), rows) == 0
        assert {(row.pid, row.used) for row in rows} == {(one.pid, GIB), (other.pid, 2 * GIB)}


def test_a_pid_that_is_somebody_else_now_holds_nothing(state: Path) -> None:
    cards = card.one_card(state)
    cards.hold(0, os.getpid(), GIB)
    state.write_text(state.read_text().replace(f"hold 0 {os.getpid()} ", f"hold 0 {os.getpid()} 1"))
    with nvml():
        assert pynvml.nvmlDeviceGetMemoryInfo(first()).used == 0 == cards.used(0)


def test_memory_may_be_given_back_late(state: Path) -> None:
    cards = card.one_card(state)
    with nvml(), process() as engine:
        cards.hold(0, engine.pid, 3 * GIB, late_s=0.2)
        engine.kill()
        engine.wait()
        assert pynvml.nvmlDeviceGetMemoryInfo(first()).used == 3 * GIB == cards.used(0)
        assert pynvml.nvmlDeviceGetComputeRunningProcesses(first()) == []
        time.sleep(0.21)  # as late as it was told to be
        assert pynvml.nvmlDeviceGetMemoryInfo(first()).used == 0 == cards.used(0)


def test_what_is_not_free_cannot_be_held(state: Path) -> None:
    cards = card.one_card(state, 4 * GIB)
    cards.hold(0, os.getpid(), 3 * GIB)
    with pytest.raises(
        card.OutOfCardMemory, match=r"card 0: 2147483648 bytes asked for, 1073741824 of 4294967296 free"
    ):
        cards.hold(0, os.getpid(), 2 * GIB)
    assert cards.held(0, os.getpid()) == 3 * GIB
    with pytest.raises(ValueError, match="holds less"):
        cards.drop(0, os.getpid(), 4 * GIB)
    cards.drop(0, os.getpid())
    assert cards.used(0) == 0


def test_faults_are_answered_by_the_calls_that_they_are_about(state: Path) -> None:
    cards = card.two_cards(state)
    with nvml():
        lost = first()
        cards.fault(card.GPU_IS_LOST, 0)
        for ask in (pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlDeviceGetUUID, pynvml.nvmlDeviceGetName):
            with pytest.raises(pynvml.NVMLError_GpuIsLost):
                ask(lost)
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            first()
        assert pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(1)).total == 24 * GIB
        assert pynvml.nvmlDeviceGetCount() == 2
        cards.fault(None, 0)
        cards.fault(card.UNKNOWN)
        with pytest.raises(pynvml.NVMLError_Unknown):
            pynvml.nvmlDeviceGetCount()
        cards.fault(None)
        cards.hold(0, os.getpid(), GIB)
        cards.hide(0, "name", "usage")
        with pytest.raises(pynvml.NVMLError_Unknown):
            pynvml.nvmlDeviceGetName(first())
        (row,) = pynvml.nvmlDeviceGetComputeRunningProcesses(first())
        assert row.usedGpuMemory is None
        cards.hide(0, "processes")
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceGetComputeRunningProcesses(first())
        cards.hang(0.2, 1)

        def took(index: int) -> float:
            began = time.monotonic()
            pynvml.nvmlDeviceGetHandleByIndex(index)
            return time.monotonic() - began

        assert took(1) >= 0.2
        assert min(took(0) for _ in range(5)) < 0.2


def test_a_gpu_without_memory_of_its_own_has_none_to_report(state: Path) -> None:
    card.unified(state)
    with nvml(), pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetMemoryInfo(first())


def test_a_driver_that_is_not_loaded_refuses_init(state: Path) -> None:
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlInit()  # no file
    card.no_driver(state)
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlInit()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


def test_another_process_finds_it_by_its_environment(state: Path) -> None:
    cards = card.one_card(state)
    ask = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0)))"
    told = subprocess.run(
        [sys.executable, "-c", ask],
        env={**os.environ, **library.environment(cards)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == card.uuid(0)


def test_a_machine_without_a_compiler_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    library.library.cache_clear()
    with pytest.raises(library.NoCompiler, match="install a C compiler"):
        library.library()
    library.library.cache_clear()
