"""A machine with one simulated card and simulated engines that park, as its user has it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from capyctl.host import identity
from tests.engines.checkpoints import write_checkpoint
from tests.engines.installation import Installation, lay_out
from tests.integration.acceptance.machine import Machine, until
from tests.nvml import card, library
from tests.nvml.card import GIB, Card
from tests.ports import neighbours

VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23", "tensorfold": "0.6.6"}


@attrs.define(eq=False)
class ParkMachine(Machine):
    """Checkpoints are sparse, and their digests are declared: 14 GiB to look at, nothing to read."""

    limit_mib: int = 8192
    installations: dict[str, Installation] = attrs.field(factory=dict)

    def environ(self) -> dict[str, str]:
        return super().environ() | library.environment(self.cards)

    @property
    def cards(self) -> Card:
        return Card(self.home / "cards")

    def role_words(self) -> list[str]:
        return [*super().role_words(), "--set", "host.checkpoints.trust_declared_digest=true"]

    def register(self, family: str, **knobs: Any) -> Installation:
        """A simulated installation, registered under its family's name."""
        made = lay_out(family, VERSIONS[family], self.home / f"env-{family}", cards=self.cards.state, **knobs)
        self.ok("engine", "add", str(made.prefix))
        self.installations[family] = made
        return made

    def put(
        self,
        name: str,
        family: str,
        weights: int,
        ready: int,
        *,
        residency: str = "deep",
        parked: int = GIB,
        ram: int = 128 << 20,
        copy: int = 0,
        **document: Any,
    ) -> None:
        """Deploy a model with stated memory: `ready` bytes on the card, `parked` once it is parked.

        `copy`: host bytes of a copied-back engine, held for its whole life.
        """
        place = write_checkpoint(self.home / "models" / name, weights=weights)

        def held(on_card: int, claims: bool = True) -> dict[str, Any]:
            beside = {"domain": "system", "bytes": f"{ram + copy}B"}
            return {
                "allocations": [{"domain": "gpu0", "bytes": f"{on_card}B"}, beside],
                "devices": [{}] if claims else [],
            }

        full = held(ready)
        phases = {"cold": full, "ready": full}
        if residency != "restart_only":
            phases |= {"parking": full, "parked": held(parked, claims=False), "wake": full}
        body = {
            "name": name,
            "engine": family,
            "residency": residency,
            "model": {
                "source": {"type": "local", "path": str(place)},
                "content_fingerprint": "sha256:" + hashlib.sha256(name.encode()).hexdigest(),
            },
            "resources": phases,
            **document,
        }
        self.ok("deploy", "model", "--file", self.write(f"{name}.yaml", json.dumps(body)))
        until(lambda: self.view(name)["checkpoint"]["state"] not in ("pending", "measuring"), what="measuring")
        assert self.view(name)["checkpoint"]["state"] == "measured", self.view(name)["checkpoint"]

    def state_of(self, name: str) -> str:
        return str(self.instance(name)["observed_state"])

    def on_card(self) -> dict[str, str]:
        """What the ledger charges on the card, by deployment name."""
        names = {row["id"]: row["name"] for row in self.manage("GET", "/deployments")["deployments"]}
        return {
            names[owner.partition(":")[2][:26]]: held
            for owner, held in self.charged().items()
            if owner.endswith(" gpu0")
        }


@contextlib.contextmanager
def park_machine(
    home: Path,
    first_port: int,
    families: Mapping[str, Mapping[str, Any]],
    settings: Sequence[str] = (),
    *,
    limit_mib: int = 8192,
    cards: Callable[[Path], Card] = card.one_card,
) -> Iterator[ParkMachine]:
    """A machine with one 24 GiB card, unless `cards` lays out others. The role is started.

    `families` to the knobs of their installations.
    """
    identity.become_subreaper()  # what a killed role leaves comes to us
    cards(home / "cards")
    made = ParkMachine(
        home=home, environment=Path(sys.prefix), first_port=first_port, settings=settings, limit_mib=limit_mib
    )
    try:
        for family, knobs in families.items():
            made.register(family, **knobs)
        made.start()
        yield made
    finally:
        made.drop_everything()


@contextlib.contextmanager
def sampled(cards: Card, index: int = 0, every_s: float = 0.01) -> Iterator[list[int]]:
    """Bytes in use on a card, looked at again and again until the end of the block."""
    seen: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(every_s):
            seen.append(cards.used(index))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


PORTS = neighbours(10)
