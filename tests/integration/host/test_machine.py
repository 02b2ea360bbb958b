"""Ports, control groups, domains and limits: what this machine has, and what may be held."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from capyctl.errors import InvariantBroken, Refusal
from capyctl.fsm.types import Bytes, HostId
from capyctl.host import identity, ports, sockets
from capyctl.host.cards import Card, Nvml, whole
from capyctl.host.devices import Observer
from capyctl.host.memory import Seen, read_memory
from capyctl.host.policy import SYSTEM, UNIFIED, card_policy, host_policy, system_policy
from capyctl.host.ports import PortLeases
from capyctl.host.residents import Residents
from capyctl.ledger.types import DomainKind
from capyctl.units import Auto, Percent, Size

from .conftest import FIRST_PORT
from .fakes import incarnation

GIB = 1 << 30
FIRST = FIRST_PORT + 50


# --- ports -------------------------------------------------------------------------------------------


def test_a_lease_is_exclusive_and_rests_after_it_ends() -> None:
    leases = PortLeases(FIRST, FIRST + 2)
    held = [leases.lease(incarnation(generation)) for generation in (1, 2)]
    assert held == [FIRST, FIRST + 1]
    leases.give_back(incarnation(1))
    assert leases.lease(incarnation(3)) == FIRST + 2  # not the port that has just been used
    assert leases.lease(incarnation(4)) == FIRST
    with pytest.raises(Refusal, match="3 leased to engines, 0 used by other programs"):
        leases.lease(incarnation(5))


def test_a_restored_lease_cannot_be_anothers() -> None:
    leases = PortLeases(FIRST, FIRST + 2)
    leases.restore(FIRST, incarnation(1))
    leases.restore(FIRST, incarnation(1))
    with pytest.raises(InvariantBroken):
        leases.restore(FIRST, incarnation(2))


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_foreign_listener_is_seen_and_known_by_its_descriptors(address: str) -> None:
    with socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        foreign.bind((address, FIRST))
        assert not ports.taken(FIRST)  # bound and silent
        foreign.listen()
        assert ports.taken(FIRST)
        assert ports.listened_by(FIRST, [os.getpid()]) is True
        assert ports.listened_by(FIRST, [os.getppid()]) is False
        with pytest.raises(Refusal, match="1 used by other programs") as refused:
            PortLeases(FIRST, FIRST).lease(incarnation())
        assert refused.value.code == "port_conflict"
    assert ports.listened_by(FIRST, [os.getpid()]) is None


def test_a_port_that_is_shared_with_another_program_is_not_ones_own() -> None:
    script = (
        "import socket, sys; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); "
        f"s.bind(('127.0.0.1', {FIRST})); s.listen(); print('up', flush=True); sys.stdin.read()"
    )
    with socket.socket() as own, socket.socket() as elsewhere:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        own.bind(("127.0.0.1", FIRST))
        own.listen()
        elsewhere.bind(("127.0.0.2", FIRST))
        elsewhere.listen()  # takes no connection to the engine
        other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"up\n"
            assert ports.listened_by(FIRST, [os.getpid()]) is False
            assert ports.listened_by(FIRST, [os.getpid(), other.pid]) is True
        finally:
            other.communicate()
        assert ports.listened_by(FIRST, [os.getpid()]) is True


def test_a_past_connection_does_not_block_a_port() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", FIRST))
        server.listen()
        with socket.create_connection(("127.0.0.1", FIRST)):
            accepted, _ = server.accept()
            accepted.close()  # this side closes first and waits in TIME_WAIT
    assert not ports.taken(FIRST)


# --- control groups --------------------------------------------------------------------------------------


def machine(root: Path, cgroup: str, total_gib: int = 64, available_gib: int = 48) -> tuple[Path, Path]:
    proc, groups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "meminfo").write_text(
        f"MemTotal: {total_gib << 20} kB\nMemFree: 1 kB\nMemAvailable: {available_gib << 20} kB\n"
    )
    (proc / "self" / "cgroup").write_text(cgroup)
    return proc, groups


def v2(place: Path, limit: str, used: int = 0, cache: int = 0) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.max").write_text(f"{limit}\n")
    (place / "memory.current").write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"anon {used - cache}\nactive_file 5\ninactive_file {cache}\n")


def v1(place: Path, limit: int, used: int = 0, cache: int = 0) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (place / "memory.usage_in_bytes").write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {cache}\n")


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "")
    assert read_memory(proc, groups) == Seen(
        capacity_bytes=Bytes(64 * GIB), available_bytes=Bytes(48 * GIB), source="meminfo"
    )


def test_the_tightest_group_above_us_counts_and_its_cache_is_free(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/user.slice/user@1000.service/app\n")
    v2(groups / "user.slice", str(16 * GIB), used=10 * GIB, cache=4 * GIB)
    v2(groups / "user.slice/user@1000.service", str(20 * GIB), used=9 * GIB)
    v2(groups / "user.slice/user@1000.service/app", "max")
    assert read_memory(proc, groups) == Seen(
        capacity_bytes=Bytes(16 * GIB), available_bytes=Bytes(10 * GIB), source="cgroup_v2:/user.slice"
    )


def test_inside_a_container_our_group_is_the_root_of_the_mount(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/docker/abc\n")
    v2(groups, str(8 * GIB), used=2 * GIB)
    assert read_memory(proc, groups) == Seen(
        capacity_bytes=Bytes(8 * GIB), available_bytes=Bytes(6 * GIB), source="cgroup_v2:/"
    )


def test_version_1_is_read_too(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "9:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n")
    v1(groups / "memory", 9223372036854771712)
    v1(groups / "memory/a", 12 * GIB, used=5 * GIB, cache=GIB)
    v1(groups / "memory/a/b", 9223372036854771712)
    assert read_memory(proc, groups) == Seen(
        capacity_bytes=Bytes(12 * GIB), available_bytes=Bytes(8 * GIB), source="cgroup_v1:/a"
    )


@pytest.mark.parametrize(
    ("cgroup", "source"),
    [("0::/x\n", "meminfo:cgroup_v2_unreadable"), ("4:memory:/x\n", "meminfo:cgroup_v1_unread")],
)
def test_a_group_that_cannot_be_read_is_told(tmp_path: Path, cgroup: str, source: str) -> None:
    proc, groups = machine(tmp_path, cgroup)
    (groups / "x").mkdir()
    (groups / "x" / "memory.max").write_text("many\n")
    assert read_memory(proc, groups).source == source


def test_a_limit_above_the_machine_is_no_limit(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/x\n")
    v2(groups / "x", str(100 * GIB), used=10 * GIB)
    assert read_memory(proc, groups) == Seen(
        capacity_bytes=Bytes(64 * GIB), available_bytes=Bytes(48 * GIB), source="meminfo"
    )


def test_residents_are_anonymous_and_shared_memory_and_no_mapped_file(tmp_path: Path) -> None:
    big = tmp_path / "weights"
    big.write_bytes(b"1" * (64 << 20))
    program = (
        "import mmap,sys; f=open(sys.argv[1],'rb'); m=mmap.mmap(f.fileno(),0,prot=mmap.PROT_READ); "
        "sum(m[i] for i in range(0,len(m),4096)); b=bytearray(40<<20); print(1,flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(big)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        running.stdout.readline()
        me = identity.identify(running.pid)
        assert me is not None
        residents = Residents()
        one = residents.held([me])
        assert 40 << 20 < one < 60 << 20
        parent = identity.identify(os.getpid())
        assert parent is not None
        both = residents.held([me, parent])
        assert both > one
    assert residents.held([me]) == 0


# --- limits ---------------------------------------------------------------------------------------------------


def test_automatic_limits_of_a_unified_machine() -> None:
    limits = system_policy(DomainKind.UNIFIED, 100 * GIB)
    assert (limits.managed_bytes, limits.reserve_bytes) == (50 * GIB, 20 * GIB)
    assert (limits.parked_bytes, limits.host_kv_bytes) == (25 * GIB, 10 * GIB)


def test_stated_limits_win_and_automatic_ones_fit_below_them() -> None:
    limits = system_policy(
        DomainKind.UNIFIED, 100 * GIB, managed_limit=Size(20 * GIB), free_reserve=Percent(10), parked_limit=Auto.AUTO
    )
    assert (limits.managed_bytes, limits.reserve_bytes, limits.parked_bytes) == (20 * GIB, 10 * GIB, 20 * GIB)
    assert system_policy(DomainKind.UNIFIED, 100 * GIB, parked_limit=Size(0)).parked_bytes == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"managed_limit": Size(0)}, "managed_limit must be more than 0"),
        (
            {"managed_limit": Percent(90)},
            "managed_limit 90.0 GiB and free_reserve 20.0 GiB do not fit into the 100.0 GiB",
        ),
        ({"parked_limit": Size(60 * GIB)}, "parked_limit 60.0 GiB is above managed_limit 50.0 GiB"),
    ],
)
def test_limits_that_do_not_fit_are_refused_with_both_numbers(given, words) -> None:
    with pytest.raises(Refusal, match=words) as refused:
        system_policy(DomainKind.UNIFIED, 100 * GIB, **given)
    assert refused.value.code == "invalid_config"


def card(index: int, total: int | None = 80 * GIB, uuid: str | None = None) -> Card:
    return Card(
        index=index,
        uuid=uuid or f"GPU-{index}",
        name="T",
        total_bytes=None if total is None else Bytes(total),
        free_bytes=None if total is None else Bytes(total // 2),
        held=((os.getpid(), GIB),),
    )


def test_cards_of_their_own_memory_make_a_discrete_machine() -> None:
    seen = Seen(capacity_bytes=Bytes(100 * GIB), available_bytes=Bytes(90 * GIB), source="meminfo")
    discrete = host_policy(HostId("h"), "x", seen, (card(0), card(1)))
    assert set(discrete.domains) == {SYSTEM, "gpu0", "gpu1"}
    assert discrete.domains[SYSTEM].kind is DomainKind.DISTINCT
    limits = card_policy(card(0))
    assert limits.reserve_bytes == 80 * GIB * 8 // 100
    assert limits.managed_bytes == 80 * GIB - limits.reserve_bytes
    assert limits.parked_bytes == 8 * GIB
    integrated = host_policy(HostId("h"), "x", seen, (card(0, None),))
    assert set(integrated.domains) == {UNIFIED}
    with pytest.raises(Refusal, match=r"card 1 \(T\) without memory of its own beside card 0"):
        host_policy(HostId("h"), "x", seen, (card(0), card(1, None)))


def test_a_sample_that_names_a_card_twice_is_void() -> None:
    with pytest.raises(Refusal, match="names one card twice"):
        whole((card(0), card(1, uuid="GPU-0")))


async def test_a_machine_without_a_driver_has_no_cards_and_one_domain() -> None:
    observer = Observer(reader=Nvml())
    memory, cards = await observer.discover()
    assert cards == ()
    me = identity.identify(os.getpid())
    assert me is not None
    seen = await observer.sample({"deployment:d/instance:0": (me,)})
    assert set(seen) == {UNIFIED}
    assert seen[UNIFIED].capacity_bytes == memory.capacity_bytes
    assert seen[UNIFIED].residents["deployment:d/instance:0"] > 1 << 20


class Reader:
    cards: tuple[Card, ...] = ()

    def read(self) -> tuple[Card, ...]:
        if not self.cards:
            raise Refusal("topology_unknown", "the driver is gone")
        return self.cards


async def test_a_card_that_is_no_longer_seen_is_left_out_of_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()
    reader.cards = (card(0),)
    observer = Observer(reader=reader)
    await observer.discover()
    me = identity.identify(os.getpid())
    assert me is not None
    seen = await observer.sample({"o": (me,)})
    assert seen["gpu0"].residents == {"o": GIB}  # type: ignore[index]
    now = seen[SYSTEM].seen_at_ms
    monkeypatch.setattr("capyctl.host.devices.now_ms", lambda: now + 5_001)
    assert set(await observer.sample({})) == {SYSTEM}


def test_the_kernels_answer_about_listeners_and_its_text_tables_agree() -> None:
    with (
        socket.socket(socket.AF_INET) as four,
        socket.socket(socket.AF_INET6) as six,
    ):
        four.bind(("127.0.0.1", 0))
        six.bind(("::1", 0))
        four.listen()
        six.listen()
        mine = sockets.inodes(os.getpid())
        asked = {one for one in sockets.listening() if one.inode in mine}
        here = {(one.address, one.port) for one in asked}
        assert {("127.0.0.1", four.getsockname()[1]), ("::1", six.getsockname()[1])} <= here
        read = set(sockets.listening(proc=Path("/proc/../proc")))  # not the place where the kernel is asked
        assert asked == {one for one in read if one.inode in mine}
    assert not {one for one in sockets.listening(os.getpid()) if one in asked}
