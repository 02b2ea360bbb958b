"""What processes hold of RAM, and how often their pages are walked for it: a /proc of files, and clocks of our own."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from capyctl.fsm.types import Bytes, ProcessIdentity
from capyctl.host.residents import WALK_RESTS, WALKS_KEPT, Residents

KIB = 1024


@attrs.define
class Machine:
    """A /proc in which a walk over an engine's pages takes `walk_s` of a core for each process."""

    proc: Path
    walk_s: float = 0.0
    time_s: float = 100.0
    used_s: float = 0.0
    walks: int = 0

    def process(self, pid: int, *, private: int, shared: int = 0, among: int = 2) -> ProcessIdentity:
        """Memory in KiB; `shared` is also mapped by the others of `among`."""
        place = self.proc / str(pid)
        place.mkdir(exist_ok=True)
        fields = ["S", "1", "7", "7", *["0"] * 13, "3", "0", "55", "0"]
        (place / "stat").write_text(f"{pid} (engine) {' '.join(fields)}")
        (place / "status").write_text(f"VmRSS:\t9 kB\nRssAnon:\t{private} kB\nRssFile:\t5 kB\nRssShmem:\t{shared} kB\n")
        (place / "smaps_rollup").write_text(f"Rss: 9 kB\nPss_Anon: {private} kB\nPss_Shmem: {shared // among} kB\n")
        return ProcessIdentity(pid, "b", 55)

    def residents(self) -> Residents:
        return Residents(proc=self.proc, now=lambda: self.time_s, used=self._used)

    def _used(self) -> float:
        """Asked before and after each walk."""
        self.walks += 1
        self.used_s += 0.0 if self.walks % 2 else self.walk_s
        return self.used_s


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("b\n")
    return Machine(tmp_path)


def test_one_process_shares_with_nobody_and_is_never_walked(machine: Machine) -> None:
    one = machine.process(7, private=10, shared=4)
    assert machine.residents().held([one]) == 14 * KIB
    assert machine.residents().held_at_most([one], Bytes(0)) == 14 * KIB
    assert machine.walks == 0


def test_what_several_share_is_counted_once(machine: Machine) -> None:
    both = (machine.process(7, private=10, shared=4), machine.process(8, private=20, shared=4))
    assert machine.residents().held(both) == 34 * KIB


def test_a_short_walk_is_repeated_whenever_somebody_asks(machine: Machine) -> None:
    both = (machine.process(7, private=10, shared=4), machine.process(8, private=20, shared=4))
    residents = machine.residents()
    assert residents.held(both) == 34 * KIB
    machine.process(8, private=20, shared=0)
    machine.process(7, private=10, shared=0)
    assert residents.held(both) == 30 * KIB


def test_a_long_walk_rests_and_memory_is_still_followed(machine: Machine) -> None:
    machine.walk_s = 3.0
    both = (machine.process(7, private=10, shared=4), machine.process(8, private=20, shared=4))
    residents = machine.residents()
    assert residents.held(both) == 34 * KIB
    machine.process(8, private=500, shared=4)
    machine.time_s += WALK_RESTS * machine.walk_s - 1
    assert (residents.held(both), machine.walks) == (514 * KIB, 2)
    machine.time_s += 2
    assert (residents.held(both), machine.walks) == (514 * KIB, 4)


def test_who_asks_for_a_bound_never_gets_less_than_the_truth(machine: Machine) -> None:
    machine.walk_s = 3.0
    both = (machine.process(7, private=10, shared=400), machine.process(8, private=20, shared=400))
    residents = machine.residents()
    assert residents.held(both) == 430 * KIB
    machine.process(7, private=300, shared=0)
    machine.process(8, private=20, shared=0)
    assert residents.held(both) == 320 * KIB
    assert (residents.held_at_most(both, Bytes(320 * KIB)), machine.walks) == (320 * KIB, 2)


def test_a_bound_that_is_not_kept_at_first_sight_is_looked_at_page_by_page(machine: Machine) -> None:
    machine.walk_s = 3.0
    both = (machine.process(7, private=10, shared=400), machine.process(8, private=20, shared=400))
    residents = machine.residents()
    residents.held(both)
    assert (residents.held_at_most(both, Bytes(430 * KIB)), machine.walks) == (430 * KIB, 4)


def test_children_that_nobody_has_recorded_take_nothing_of_what_their_parent_holds(machine: Machine) -> None:
    """Nine of them share its pages, so its proportional share is a tenth."""
    machine.walk_s = 3.0
    both = (machine.process(7, private=1000), machine.process(8, private=20))
    (machine.proc / "7" / "smaps_rollup").write_text("Pss_Anon: 100 kB\nPss_Shmem: 0 kB\n")
    residents = machine.residents()
    assert residents.held(both) == 1000 * KIB
    assert residents.held_at_most(both, Bytes(120 * KIB)) == 1000 * KIB
    machine.process(7, private=3000)
    assert residents.held(both) == 3000 * KIB


def test_what_is_given_back_during_a_walk_is_not_taken_for_shared(machine: Machine) -> None:
    machine.walk_s = 3.0
    both = (machine.process(7, private=5000), machine.process(8, private=4000, shared=4))
    residents = machine.residents()
    used = machine._used

    def walked() -> float:
        """The first process is read as it was, then both give back nearly all that they have."""
        if machine.walks % 2 == 0:
            for process in both:
                machine.process(process.pid, private=10)
            for process in both:
                (machine.proc / str(process.pid) / "status").write_text("RssAnon:\t10 kB\nRssShmem:\t0 kB\n")
        return used()

    residents.used = walked
    residents.held(both)
    for process in both:
        machine.process(process.pid, private=6000)
    assert residents.held(both) == 12000 * KIB


def test_the_end_of_one_process_is_no_reason_to_remember_what_it_shared(machine: Machine) -> None:
    machine.walk_s = 3.0
    both = (machine.process(7, private=10, shared=4), machine.process(8, private=20, shared=4))
    residents = machine.residents()
    residents.held(both)
    (machine.proc / "8" / "stat").unlink()
    assert residents.held(both) == 14 * KIB


def test_only_so_many_walks_are_remembered(machine: Machine) -> None:
    machine.walk_s = 3.0
    residents = machine.residents()
    for pid in range(10, 10 + 2 * WALKS_KEPT):
        residents.held((machine.process(7, private=1), machine.process(pid, private=1)))
    assert len(residents._walks) == WALKS_KEPT
