"""A role on machines with cards, from outside; it finds the simulated library as it would find the real one."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest
import yaml

from capyctl.host import identity
from tests.integration.acceptance.machine import Machine, until
from tests.integration.engines.tiny_gguf import write_tiny
from tests.nvml import card, library
from tests.nvml.card import GIB, Card
from tests.ports import neighbours

PORTS = neighbours(10)
NEEDED = importlib.util.find_spec("xllamacpp") is not None


@attrs.define(eq=False)
class CardMachine(Machine):
    """A machine that sees the cards of a state file."""

    def environ(self) -> dict[str, str]:
        return super().environ() | library.environment(Card(self.home / "cards"))

    @property
    def cards(self) -> Card:
        return Card(self.home / "cards")

    def domains(self) -> dict[str, dict[str, object]]:
        (host,) = self.manage("GET", "/hosts")["hosts"]
        return {domain["domain_id"]: domain for domain in host["domains"]}


@contextmanager
def machine(home: Path, lay: Callable[[Path], Card]) -> Iterator[CardMachine]:
    identity.become_subreaper()  # what a killed role leaves comes to us
    lay(home / "cards")
    here = CardMachine(home=home, environment=Path(sys.prefix), first_port=PORTS)
    try:
        yield here
    finally:
        here.drop_everything()


@pytest.mark.engine
@pytest.mark.skipif(not NEEDED, reason="needs the package xllamacpp")
def test_a_role_on_a_card_sizes_shows_charges_and_survives_the_loss_of_its_card(tmp_path: Path) -> None:
    (tmp_path / "models/tiny").mkdir(parents=True)
    write_tiny(tmp_path / "models/tiny/tiny.gguf")
    with machine(tmp_path, card.one_card) as here:
        here.cards.hold(0, 0, GIB)
        here.add_engine()
        here.start()
        until(lambda: here.domains()["gpu0"]["available_bytes"], what="a sample")
        gpu = here.domains()["gpu0"]
        assert (gpu["kind"], gpu["device_id"], gpu["capacity_bytes"]) == ("device", "gpu0", str(24 * GIB))
        assert gpu["available_bytes"] == str(23 * GIB)
        assert here.domains()["system"]["kind"] == "distinct"
        status = here.ok("status").out
        assert "Memory gpu0     0.0 GiB charged, 22.1 GiB managed limit, 23.0 GiB free, 24.0 GiB total" in status
        assert "Memory system   0.0 GiB charged, 0.8 GiB managed limit" in status
        assert "23.0 GiB / 24.0 GiB" in here.ok("list", "hosts").out

        # what a model is charged on the card, and what its engine sees of the machine
        here.write(
            "tiny.yaml",
            "name: tiny\nengine: llamacpp\nmodel: tiny\nresources: {gpu: 2GiB, ram: 256MiB}\n"
            "engine_config: {context_length: 256, max_concurrent_requests: 1}\n",
        )
        here.ok("deploy", "model", "--file", str(tmp_path / "tiny.yaml"))
        until(lambda: here.view("tiny")["checkpoint"]["state"] == "measured", what="measuring")
        here.act("tiny", "start")
        engine = here.engine("tiny")
        seen = Path(f"/proc/{engine.pid}/environ").read_bytes().split(b"\0")
        assert f"CUDA_VISIBLE_DEVICES={card.uuid(0)}".encode() in seen
        assert not [one for one in seen if one.startswith(b"LD_LIBRARY_PATH")]
        assert here.domains()["gpu0"]["charged_bytes"] == str(2 * GIB)
        assert here.domains()["system"]["charged_bytes"] == str(256 << 20)
        assert here.instance("tiny")["devices"] == ["gpu0"]
        here.cards.hold(0, engine.pid, GIB)
        until(lambda: here.domains()["gpu0"]["available_bytes"] == str(22 * GIB), what="the engine's bytes")

        # the card falls off the bus under a running role
        here.cards.fault(card.GPU_IS_LOST, 0)
        until(lambda: here.domains()["gpu0"]["available_bytes"] is None, what="an unobserved card")
        assert here.domains()["gpu0"]["charged_bytes"] == str(2 * GIB)
        assert "22.1 GiB managed limit, 24.0 GiB total, not observed now" in here.ok("status").out
        (lost,) = here.said("card.unobserved")
        assert (lost["domain"], lost["why"]) == ("gpu0", "GPU is lost")

        # and is gone at the next start: the engine is found, its charge stays until it is proven gone
        here.kill()
        card.no_driver(here.cards.state)
        here.start()
        assert here.domains()["gpu0"]["charged_bytes"] == str(2 * GIB)
        assert here.engine("tiny").pid == engine.pid
        here.act("tiny", "stop")
        assert not engine.alive()
        assert here.domains()["gpu0"]["charged_bytes"] == "0"
        assert here.terminate() == 0
        here.start()
        assert set(here.domains()) == {"unified"}
        assert here.terminate() == 0


@pytest.mark.parametrize(
    ("lay", "status", "words"),
    [
        (
            card.mixed,
            5,
            "error [unsupported_gpu_topology]: card 0 (NVIDIA GB10) without memory of its own beside card 1",
        ),
        (
            lambda path: broken(card.one_card(path)),
            11,
            "error [topology_unknown]: the NVIDIA driver does not answer: Unknown Error",
        ),
    ],
)
def test_a_role_that_cannot_count_its_cards_does_not_start_and_says_why(
    tmp_path: Path, lay: Callable[[Path], Card], status: int, words: str
) -> None:
    with machine(tmp_path, lay) as here:
        done = here.command("start", "standalone", "--listen", "127.0.0.1:0", "--management-listen", "127.0.0.1:0")
        assert done.status == status
        assert words in done.error


def broken(cards: Card) -> Card:
    cards.fault(card.UNKNOWN)
    return cards


def test_a_role_on_a_gpu_that_shares_the_machines_memory_has_one_domain_with_a_device(tmp_path: Path) -> None:
    with machine(tmp_path, card.unified) as here:
        here.start()
        (pool,) = here.domains().values()
        assert (pool["domain_id"], pool["kind"], pool["device_id"]) == ("unified", "unified", "gpu0")
        here.cards.hang(60)  # a driver that hangs holds up neither samples of RAM nor the role's end
        first = until(lambda: here.domains()["unified"]["observed_at_unix_ms"], what="a sample")
        until(lambda: here.domains()["unified"]["observed_at_unix_ms"] > first, what="a later one")
        assert here.role is not None
        here.role.send_signal(signal.SIGTERM)
        assert here.role.wait(timeout=60) == 0


def test_init_host_writes_each_card_as_a_domain(tmp_path: Path) -> None:
    with machine(tmp_path, card.two_cards) as here:
        here.ok("init", "host", "--output", str(tmp_path / "host.yaml"))
        policy = yaml.safe_load((tmp_path / "host.yaml").read_text())["resource_policy"]
        assert {name: limits["memory"] for name, limits in policy["domains"].items()} == {
            "system": "distinct",
            "gpu0": "device",
            "gpu1": "device",
        }
        assert policy["devices"] == {"gpu0": {"domain": "gpu0"}, "gpu1": {"domain": "gpu1"}}
        card.mixed(here.cards.state)
        assert here.command("init", "host", "--output", str(tmp_path / "other.yaml")).status == 5
