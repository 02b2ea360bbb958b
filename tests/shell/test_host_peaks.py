"""A start's peak: what was seen beside a compiler, or beside another engine's step, is left out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capyctl.fsm.types import Bytes, Domain, HostId, ProcessIdentity, Role
from capyctl.host import peaks
from capyctl.host.cards import Card
from capyctl.host.devices import Observer
from capyctl.host.identity import Stat
from capyctl.host.journal import Memory
from capyctl.host.memory import available_beside
from capyctl.host.peaks import BUILDS_MAX, Peak, StartWatch, builds
from capyctl.host.policy import host_policy

GPU0, SYSTEM = Domain("gpu0"), Domain("system")


def peak(*steps: bool | int) -> dict[Domain, Bytes]:
    """A check (whether a compiler was found) or a sample (bytes on the card) after the other."""
    made = Peak()
    for step in steps:
        if isinstance(step, bool):
            made.checked(building=step)
        else:
            made.sampled({GPU0: Bytes(step)})
    return made.result


CLEAN, BUILD = False, True


def test_the_largest_sample_counts_once_the_next_check_finds_no_compiler() -> None:
    assert peak(CLEAN, 3, 9, CLEAN, 4, CLEAN) == {GPU0: 9}
    assert peak(CLEAN, 3, CLEAN, 9) == {GPU0: 3}


def test_a_build_reaches_from_the_last_clean_check_to_the_next() -> None:
    assert peak(CLEAN, 3, CLEAN, 50, BUILD, 60, BUILD, 70, CLEAN, 4, CLEAN) == {GPU0: 4}


def test_a_start_that_was_one_build_has_no_peak() -> None:
    assert peak(BUILD, 5, BUILD, 6, CLEAN) == {}
    assert peak() == {}


def test_more_builds_than_can_be_told_apart_are_no_measurement() -> None:
    many = [step for _ in range(BUILDS_MAX) for step in (BUILD, CLEAN, 5, CLEAN)]
    assert peak(*many) == {GPU0: 5}
    assert peak(*many, BUILD, CLEAN, 5, CLEAN) == {}


def test_domains_have_their_peaks_apart() -> None:
    made = Peak()
    made.checked(building=False)
    made.sampled({GPU0: Bytes(9), SYSTEM: Bytes(1)})
    made.sampled({GPU0: Bytes(2), SYSTEM: Bytes(3)})
    made.checked(building=False)
    assert made.result == {GPU0: 9, SYSTEM: 3}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("nvcc", True),
        ("cc1plus", True),
        ("gcc-13", True),
        ("clang++-17.1", True),
        ("ptxas", True),
        ("ptxas-blackwell", True),
        ("python3", False),
    ],
)
def test_compilers_are_known_by_the_name_of_their_program(tmp_path: Path, name: str, found: bool) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "comm").write_text(f"{name}\n")
    one = Stat(pid=7, state="S", ppid=1, group=5, session=5, threads=1, start_ticks=1)
    assert builds([one], tmp_path) is found
    assert not builds([Stat(pid=8, state="S", ppid=1, group=5, session=5, threads=1, start_ticks=1)], tmp_path)


# --- other engines ---------------------------------------------------------------------------------------


class _Ended:
    def is_set(self) -> bool:
        return False


def engine(name: str, **changes: Any) -> Any:
    """As much of an engine as decides whether it moves."""
    return SimpleNamespace(
        **{
            "incarnation": name,
            "launching": False,
            "ending": False,
            "moving": None,
            "memory": Memory.HELD,
            "ended": _Ended(),
            **changes,
        }
    )


class Machine:
    """An observer of a machine on which one engine holds `held`, and which has `free` available."""

    def __init__(self, *, shared: bool = False) -> None:
        self.shared, self.ram = shared, Domain("unified")
        self.held_bytes, self.free = Bytes(1), Bytes(100)

    async def look(self) -> None:
        """Its figures are always of now."""

    async def available_beside(self, processes: object) -> Bytes:
        return self.free

    async def held(self, processes: object, within: object = None) -> Any:
        return SimpleNamespace(bytes={self.ram: self.held_bytes})


@pytest.fixture(autouse=True)
def nobody_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "look_at", lambda engine, proc: (False, ("a worker",)))


async def watched(*others: Any, machine: Machine | None = None, then: Any = None) -> dict[Domain, Bytes]:
    """Open a watch beside these engines, see one sample, have `then` happen, and close it."""
    machine = machine or Machine()
    mine = engine("mine", launching=True, processes=())
    custody = SimpleNamespace(engines={one.incarnation: one for one in others})
    watch = await StartWatch.open(machine, custody)  # type: ignore[arg-type]
    custody.engines["mine"] = mine
    await watch._check(mine)
    await watch._sample(mine, ())
    machine.held_bytes, machine.free = Bytes(5), Bytes(70)
    await watch._sample(mine, ())
    machine.held_bytes, machine.free = Bytes(2), Bytes(90)
    if then is not None:
        then(custody)
    return await watch.close(mine)


def in_gib(proc: Path, **rows: int) -> Path:
    """A machine's memory, as the kernel sums it."""
    proc.mkdir(exist_ok=True)
    (proc / "meminfo").write_text("".join(f"{name}: {gib << 20} kB\n" for name, gib in rows.items()))
    return proc


def test_what_other_programs_take_or_give_back_is_no_part_of_a_drop(tmp_path: Path) -> None:
    """An engine that takes 3 GiB, 2 of them in a process, beside a program that goes from 4 GiB to 12, or to none."""
    gib = 1 << 30
    before = available_beside(Bytes(0), in_gib(tmp_path, MemAvailable=40, AnonPages=3, Shmem=1))
    for theirs in (4, 12, 0):
        left = in_gib(tmp_path, MemAvailable=44 - theirs - 3, AnonPages=theirs + 2, Shmem=0)
        assert before - available_beside(Bytes(2 * gib), left) == 3 * gib


async def test_what_others_hold_through_a_gpu_that_shares_the_memory_is_no_part_of_it_either(tmp_path: Path) -> None:
    class Reader:
        rows: tuple[tuple[int, int | None], ...] = ((7, 5 << 30), (8, None))

        def read(self) -> tuple[Card, ...]:
            return (Card(index=0, uuid="GPU-a", held=self.rows),)

    proc = in_gib(tmp_path, MemTotal=64, MemAvailable=40, AnonPages=0, Shmem=0)
    observer = Observer(reader=Reader(), proc=proc, cgroups=tmp_path)
    memory, cards = await observer.discover()
    observer.adopt(host_policy(HostId("h"), "here", memory, cards))
    assert await observer.available_beside(()) == 45 << 30
    mine = ProcessIdentity(pid=7, boot_id="b", start_ticks=1, role=Role.API)
    assert await observer.available_beside((mine,)) == 40 << 30


async def test_whoever_lives_in_its_group_while_it_loads_holds_its_memory() -> None:
    mine = engine("mine", launching=True, processes=())
    custody = SimpleNamespace(engines={"mine": mine})
    watch = await StartWatch.open(Machine(), custody)  # type: ignore[arg-type]
    await watch._check(mine)
    assert mine.group == ("a worker",)


async def test_an_engine_alone_is_measured_by_its_own_processes() -> None:
    assert await watched() == {Domain("unified"): 5}
    assert await watched(engine("quiet")) == {Domain("unified"): 5}


async def test_where_a_gpu_shares_the_memory_the_largest_drop_of_it_counts() -> None:
    assert await watched(machine=Machine(shared=True)) == {Domain("unified"): 30}


@pytest.mark.parametrize("moves", [{"launching": True}, {"ending": True}, {"moving": "release"}])
async def test_another_engine_on_its_way_leaves_nothing_to_say(moves: dict[str, Any]) -> None:
    assert await watched(engine("other", **moves)) == {}


async def test_an_engine_that_parked_or_went_or_came_meanwhile_leaves_nothing_to_say() -> None:
    def parks(custody: Any) -> None:
        custody.engines["other"].memory = Memory.PARKED

    def goes(custody: Any) -> None:
        del custody.engines["other"]

    def comes(custody: Any) -> None:
        custody.engines["new"] = engine("new")

    for happens in (parks, goes, comes):
        assert await watched(engine("other"), then=happens) == {}
