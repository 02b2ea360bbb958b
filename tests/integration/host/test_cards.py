"""The product's own NVML code and its limits, against a simulated driver: every shape of machine, and every fault."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio

from capyctl.errors import Refusal
from capyctl.fsm.types import Bytes, Domain, HostId, ProcessIdentity
from capyctl.host import devices, identity
from capyctl.host.cards import Card as Row
from capyctl.host.cards import Nvml, whole
from capyctl.host.devices import LATELY_MS, Observer
from capyctl.host.launch import check_room
from capyctl.host.memory import Seen
from capyctl.host.policy import SYSTEM, UNIFIED, device_env, host_policy
from capyctl.ledger.types import DomainKind, HostPolicy
from tests.nvml import card, library
from tests.nvml.card import GIB, Card

GPU0, GPU1 = Domain("gpu0"), Domain("gpu1")
RAM = Seen(capacity_bytes=Bytes(64 * GIB), available_bytes=Bytes(60 * GIB), source="meminfo")
HOST = HostId("h1")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library.load()
    monkeypatch.setenv(card.VARIABLE, str(tmp_path / "cards"))
    return tmp_path / "cards"


@contextmanager
def engine() -> Iterator[ProcessIdentity]:
    """A process whose card memory a test decides about."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as running:
        try:
            found = identity.identify(running.pid)
            assert found is not None
            yield found
        finally:
            running.kill()


async def observed() -> tuple[Observer, HostPolicy]:
    """An observer of the machine as it is now, with the limits that a role would publish."""
    observer = Observer()
    memory, cards = await observer.discover()
    policy = host_policy(HOST, "here", memory, cards)
    observer.adopt(policy)
    return observer, policy


@asynccontextmanager
async def looking(observer: Observer) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(observer.run)
        yield
        nursery.cancel_scope.cancel()


async def until(holds: Callable[[], object], limit_s: float = 5.0) -> None:
    with trio.fail_after(limit_s):
        while not holds():
            await trio.sleep(0.02)


# --- shapes -------------------------------------------------------------------------------------------------


async def test_one_card_is_a_domain_beside_the_machines_ram(state: Path) -> None:
    card.one_card(state)
    observer, policy = await observed()
    assert set(policy.domains) == {SYSTEM, GPU0}
    limits = policy.domains[GPU0]
    assert (limits.kind, limits.device, limits.uuid) == (DomainKind.DEVICE, "gpu0", card.uuid(0))
    assert limits.capacity_bytes == 24 * GIB
    assert limits.reserve_bytes == 24 * GIB * 8 // 100
    assert limits.managed_bytes == 24 * GIB - limits.reserve_bytes
    assert limits.parked_bytes == 6 * GIB
    seen = await observer.sample({})
    assert seen[GPU0].available_bytes == 24 * GIB
    assert device_env(policy, {GPU0: GIB, SYSTEM: GIB}) == {"CUDA_VISIBLE_DEVICES": card.uuid(0)}


async def test_two_cards_are_two_domains_and_an_engine_is_shown_its_own(state: Path) -> None:
    card.two_cards(state)
    _, policy = await observed()
    assert set(policy.domains) == {SYSTEM, GPU0, GPU1}
    assert device_env(policy, {GPU1: GIB, SYSTEM: GIB}) == {"CUDA_VISIBLE_DEVICES": card.uuid(1)}
    both = device_env(policy, {GPU0: GIB, GPU1: GIB})
    assert both == {"CUDA_VISIBLE_DEVICES": f"{card.uuid(0)},{card.uuid(1)}"}
    assert device_env(policy, {SYSTEM: GIB}) == {"CUDA_VISIBLE_DEVICES": ""}


async def test_a_gpu_without_memory_of_its_own_shares_the_machines(state: Path) -> None:
    cards = card.unified(state)
    observer, policy = await observed()
    assert set(policy.domains) == {UNIFIED}
    assert policy.domains[UNIFIED].device == "gpu0"
    assert device_env(policy, {UNIFIED: GIB}) == {}
    with engine() as one:
        before = (await observer.held((one,))).bytes
        assert UNIFIED not in before, "nobody says what it holds of the GPU"
        cards.hold(0, one.pid, 3 * GIB)
        after = (await observer.held((one,))).bytes[UNIFIED]
        assert 3 * GIB < after < 3 * GIB + (256 << 20)
        seen = await observer.sample({"o": (one,)})
        assert seen[UNIFIED].residents["o"] >= 3 * GIB


@pytest.mark.parametrize(
    ("lay", "words"),
    [
        (card.mixed, r"card 0 \(NVIDIA GB10\) without memory of its own beside card 1"),
        (lambda state: card.unified(state).write(*card.card_lines(0, 0), *card.card_lines(1, 0)), "card 0 .*, card 1"),
        (
            lambda state: card.one_card(state).write(*card.card_lines(0, 80 * GIB, compute="9 0"), "mig 0 1"),
            r"divided into MIG instances; `nvidia-smi -i 0 -mig 0`",
        ),
    ],
)
async def test_cards_that_cannot_be_counted_are_refused(state: Path, lay: Callable[[Path], Card], words: str) -> None:
    lay(state)
    with pytest.raises(Refusal, match=words) as refused:
        await observed()
    assert refused.value.code == "unsupported_gpu_topology"


async def test_a_machine_whose_driver_is_not_loaded_has_no_cards(state: Path) -> None:
    card.no_driver(state)
    _, policy = await observed()
    assert set(policy.domains) == {UNIFIED}
    assert policy.domains[UNIFIED].device is None


async def test_a_card_without_a_name_or_a_uuid_is_still_a_card(state: Path) -> None:
    cards = card.two_cards(state)
    cards.hide(1, "name", "uuid")
    observer, policy = await observed()
    assert policy.domains[GPU1].uuid is None
    assert set(await observer.sample({})) == {SYSTEM, GPU0, GPU1}
    assert device_env(policy, {GPU1: GIB}) == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


# --- residents ------------------------------------------------------------------------------------------------


async def test_what_a_process_holds_of_a_card_is_read_from_the_driver(state: Path) -> None:
    cards = card.two_cards(state)
    observer, _ = await observed()
    with engine() as one, engine() as other:
        cards.hold(1, one.pid, 6 * GIB)
        cards.hold(1, other.pid, 2 * GIB)
        cards.hold(0, 0, GIB)
        held = await observer.held((one,))
        assert held.bytes[GPU1] == 6 * GIB
        assert GPU0 not in held.bytes
        assert held.bytes[SYSTEM] > 0
        assert (await observer.held((one, other))).bytes[GPU1] == 8 * GIB
        seen = await observer.sample_anew({"a": (one,), "b": (other,)})
        assert seen[GPU1].residents == {"a": 6 * GIB, "b": 2 * GIB}
        assert seen[GPU1].available_bytes == 16 * GIB
        assert seen[GPU0].residents == {"a": 0, "b": 0}
        cards.drop(1, one.pid, 5 * GIB)
        parked = await observer.held((one,))
        assert parked.bytes[GPU1] == GIB
        assert parked.sampled_at_ms >= held.sampled_at_ms


@pytest.mark.parametrize("hidden", ["usage", "processes"])
async def test_a_driver_that_does_not_say_what_a_process_holds_gives_no_figure_and_not_zero(
    state: Path, hidden: str
) -> None:
    cards = card.one_card(state)
    observer, _ = await observed()
    with engine() as one:
        cards.hold(0, one.pid, 6 * GIB)
        cards.hide(0, hidden)
        assert GPU0 not in (await observer.held((one,))).bytes
        seen = await observer.sample({"a": (one,)})
        assert seen[GPU0].residents == {"a": 0}
        assert seen[GPU0].available_bytes == 18 * GIB


async def test_an_engines_end_shows_in_the_next_look_and_late_memory_stays_in_use(state: Path) -> None:
    cards = card.one_card(state)
    observer, _ = await observed()
    with engine() as one:
        cards.hold(0, one.pid, 6 * GIB, late_s=0.3)
    seen = await observer.sample_anew({"a": (one,)})
    assert seen[GPU0].available_bytes == 18 * GIB
    assert seen[GPU0].residents == {"a": 0}
    await trio.sleep(0.31)  # as late as it was told to be
    assert (await observer.sample_anew({}))[GPU0].available_bytes == 24 * GIB


async def test_only_a_sample_that_was_asked_for_serves_again_and_only_for_a_moment(state: Path) -> None:
    """A wake that its switch did not just sample for would else be allowed by what was free before a stranger came."""
    cards = card.one_card(state)
    observer, _ = await observed()
    await observer.look()
    await observer.sample({})
    cards.hold(0, 0, 10 * GIB)
    assert (await observer.sample_lately({}))[GPU0].available_bytes == 14 * GIB
    await observer.look()
    asked = await observer.sample({}, asked=True)
    assert await observer.sample_lately({}) is asked
    with engine() as one:
        assert await observer.sample_lately({"a": (one,)}) is not asked
    asked = await observer.sample({}, asked=True)
    await trio.sleep(2 * LATELY_MS / 1000)  # it is no longer from lately
    assert await observer.sample_lately({}) is not asked


# --- faults -----------------------------------------------------------------------------------------------------


async def test_a_lost_card_is_unobserved_and_the_other_one_is_not(
    state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cards = card.two_cards(state)
    observer, policy = await observed()
    cards.fault(card.GPU_IS_LOST, 0)
    await observer.look()
    assert set(await observer.sample({})) == {SYSTEM, GPU1}
    assert [record.fields for record in caplog.records if record.message == "card.unobserved"] == [  # type: ignore[attr-defined]
        {"domain": "gpu0", "why": "GPU is lost"}
    ]
    with pytest.raises(Refusal, match="gpu0 was not observed") as refused:
        check_room(policy, {GPU0: Bytes(GIB)}, await observer.sample({}))
    assert refused.value.code == "device_unobserved"
    cards.fault(None, 0)
    await observer.look()
    assert set(await observer.sample({})) == {SYSTEM, GPU0, GPU1}


async def test_a_card_that_takes_the_index_of_a_lost_one_is_not_taken_for_it(state: Path) -> None:
    cards = card.two_cards(state)
    observer, _ = await observed()
    cards.write(*card.card_lines(0, 24 * GIB))
    cards.state.write_text(cards.state.read_text().replace(card.uuid(0), card.uuid(1)))
    cards.hold(0, 0, 4 * GIB)
    await observer.look()
    seen = await observer.sample({})
    assert set(seen) == {SYSTEM, GPU1}
    assert seen[GPU1].available_bytes == 20 * GIB


async def test_a_driver_that_hangs_holds_up_nothing(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CARD_READ_S", 0.1)
    monkeypatch.setattr(devices, "CARD_EVERY_S", 0.05)
    monkeypatch.setattr(devices, "CARD_STALE_MS", 200)
    cards = card.one_card(state)
    observer, _ = await observed()
    async with looking(observer):
        with engine() as one:
            cards.hold(0, one.pid, 2 * GIB)
            cards.hang(2)
            with trio.fail_after(1.9):
                while GPU0 in await observer.sample({}):
                    await trio.sleep(0.02)
                assert SYSTEM in await observer.sample({"a": (one,)})
                held = await observer.held((one,))
                assert set(held.bytes) == {SYSTEM}
            cards.hang(None)
            with trio.fail_after(30):
                while GPU0 not in (seen := await observer.sample({"a": (one,)})):
                    await trio.sleep(0.02)
                assert seen[GPU0].residents == {"a": 2 * GIB}


async def test_a_driver_that_hangs_at_the_start_is_named(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "DISCOVER_S", 0.1)
    card.one_card(state).hang(0.5)
    with pytest.raises(Refusal, match="did not answer within") as refused:
        await Observer().discover()
    assert refused.value.code == "topology_unknown"


@pytest.mark.parametrize(
    ("total", "free", "used"), [(24, 20, 5), (24, 25, 0), (0, 0, 0), (24, -1, 24)], ids=lambda figure: str(figure)
)
def test_a_sample_whose_figures_cannot_be_is_void_as_a_whole(total: int, free: int, used: int) -> None:
    figures = {"total_bytes": total, "free_bytes": free, "used_bytes": used}
    nonsense = Row(index=1, uuid="GPU-1", **{name: Bytes(amount * GIB) for name, amount in figures.items()})
    sound = Row(index=0, uuid="GPU-0", total_bytes=Bytes(24 * GIB), free_bytes=Bytes(23 * GIB), used_bytes=Bytes(GIB))
    assert whole((sound,)) == (sound,)
    with pytest.raises(Refusal, match="card 1 reports") as refused:
        whole((sound, nonsense))
    assert refused.value.code == "topology_unknown"


def test_used_and_free_are_read_one_after_another_and_may_be_a_little_more_than_there_is() -> None:
    a_little = Row(
        index=0, uuid="GPU-0", total_bytes=Bytes(24 * GIB), free_bytes=Bytes(20 * GIB), used_bytes=Bytes(4 * GIB + 1)
    )
    assert whole((a_little,)) == (a_little,)


async def test_errors_of_the_whole_driver_leave_its_cards_unobserved(state: Path) -> None:
    cards = card.one_card(state)
    observer, _ = await observed()
    observer._cards = devices._CardSample()  # what was seen before has aged
    cards.fault(card.UNKNOWN)
    await observer.look()
    assert set(await observer.sample({})) == {SYSTEM}
    cards.fault(None)
    await observer.look()
    assert set(await observer.sample({})) == {SYSTEM, GPU0}
    cards.state.unlink()  # the module was unloaded
    await observer.look()
    assert set(await observer.sample({})) == {SYSTEM}


async def test_no_card_that_answers_at_the_start_is_refused_with_the_drivers_words(state: Path) -> None:
    card.one_card(state).fault(card.GPU_IS_LOST, 0)
    with pytest.raises(Refusal, match=r"no card of this machine answers \(card 0: GPU is lost\)") as refused:
        await observed()
    assert refused.value.code == "topology_unknown"


# --- limits -----------------------------------------------------------------------------------------------------


def test_cards_that_are_charged_keep_their_names_and_a_missing_one_its_limits(state: Path) -> None:
    cards = card.two_cards(state)
    before = host_policy(HOST, "here", RAM, Nvml().read())
    charged = {GPU0: before.domains[GPU0], GPU1: before.domains[GPU1]}
    assert host_policy(HOST, "here", RAM, Nvml().read(), charged=charged) == before
    # gpu0 is gone, and what was gpu1 is the driver's first card now
    cards.write(*card.card_lines(0, 24 * GIB))
    cards.state.write_text(cards.state.read_text().replace(card.uuid(0), card.uuid(1)))
    after = host_policy(HOST, "here", RAM, Nvml().read(), charged=charged)
    assert after == before
    assert set(host_policy(HOST, "here", RAM, Nvml().read(), charged={GPU0: charged[GPU0]}).domains) == {SYSTEM, GPU0}
    assert host_policy(HOST, "here", RAM, Nvml().read()).domains[GPU0].uuid == card.uuid(1)
    card.no_driver(state)
    assert host_policy(HOST, "here", RAM, Nvml().read(), charged=charged) == before


async def test_what_others_use_of_a_card_comes_out_of_its_reserve_first(state: Path) -> None:
    cards = card.one_card(state)
    observer, policy = await observed()
    everything = {GPU0: policy.domains[GPU0].managed_bytes}
    cards.hold(0, 0, GIB)
    check_room(policy, everything, await observer.sample_anew({}))
    cards.hold(0, 0, GIB)
    with pytest.raises(Refusal, match=r"needs 22\.1 GiB on gpu0; 22\.0 GiB free, 0\.0 GiB reserved") as refused:
        check_room(policy, everything, await observer.sample_anew({}))
    assert refused.value.code == "insufficient_device_memory"
    with engine() as one:
        cards.hold(0, one.pid, 8 * GIB)
        seen = await observer.sample_anew({"a": (one,)})
        check_room(policy, {GPU0: Bytes(14 * GIB)}, seen)
        with pytest.raises(Refusal, match="insufficient_device_memory"):
            check_room(policy, {GPU0: Bytes(14 * GIB + 1)}, seen)
