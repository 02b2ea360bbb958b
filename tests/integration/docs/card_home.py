"""A home on a machine with a simulated 24 GiB card, and simulated engines that park, for the pages about parking."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

import attrs

from capyctl.checkpoints.digest import StatCache
from capyctl.checkpoints.directory import list_files
from capyctl.roles.machine import DIGESTS_FILE
from tests.engines.checkpoints import write_checkpoint
from tests.engines.installation import Installation, lay_out
from tests.nvml import card, library
from tests.nvml.card import GIB

from .docs_console import Block, Home

VERSIONS: Final = {"vllm": "0.32.0", "sglang": "0.5.23", "tensorfold": "0.6.6"}
MODELS: Final = {"qwen3-coder": 12, "qwen3-writer": 12, "qwen3-small": 4}


@attrs.define(eq=False)
class CardHome(Home):
    """See the module. Models are sparse files, and count as hashed before: nobody waits for gigabytes of zeros."""

    engines: dict[str, Installation] = attrs.field(init=False, factory=dict)

    @property
    def cards(self) -> card.Card:
        return card.Card(self.path / "cards")

    def furnish(self) -> None:
        card.one_card(self.path / "cards")
        for family, version in VERSIONS.items():
            self.engines[family] = lay_out(family, version, self.path / "venvs" / family, cards=self.cards.state)
        state = self.path / ".local/state/capyctl"
        state.mkdir(parents=True, mode=0o700)
        (state / "host").mkdir(mode=0o700)
        cache = StatCache(state / "host" / DIGESTS_FILE)
        for name, weights in MODELS.items():
            place = write_checkpoint(self.path / "models" / name, weights=weights * GIB)
            listing = list_files(place, Path(self.path / "models"))
            large = [file for file in listing.files if file.size_bytes > GIB]
            cache.put({file: hashlib.sha256(name.encode()).hexdigest() for file in large})

    def turn(self, block: Block) -> None:
        """Turn the knobs that a comment of the page names, for one served model."""
        name, _, knobs = block.text.partition(": ")
        for installation in self.engines.values():
            installation.set(of=name, **json.loads(knobs))

    def environ(self) -> dict[str, str]:
        return super().environ() | library.environment(self.cards)
