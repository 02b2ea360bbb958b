"""The table of models in docs/sizing.md, rendered from what the code reads of them.

.venv/bin/python tests/property/sizing_page.py          # writes the table into the page
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from model_files import write_model
from model_zoo import MODELS, B, Model

from capyctl.checkpoints.cache_shape import bounded_token_bytes, cache_of, token_bytes
from capyctl.checkpoints.directory import list_files
from capyctl.checkpoints.tensor_facts import tensor_facts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sizing.md"
BEGIN, END = "<!-- models: begin -->\n", "<!-- models: end -->\n"
HEAD = (
    "| model | parameters, published | counted | weights, GiB | KV bytes per token | of them in windows | attention | "
    "context fitted | figures from |\n|---|---|---|---|---|---|---|---|---|\n"
)


@cache
def facts_of(name: str) -> Mapping[str, Any]:
    """What is read of a model's checkpoint, which is written for it and deleted."""
    model = next(model for model in MODELS if model.name == name)
    place = Path(tempfile.mkdtemp(prefix="sizing-"))
    gc.disable()  # a hundred thousand tensors at a time, none of them in a cycle
    try:
        return tensor_facts(list_files(write_model(model, place / "model")))
    finally:
        gc.enable()
        shutil.rmtree(place)


def table(facts: Callable[[str], Mapping[str, Any]] = facts_of) -> str:
    """The rows of every model, in the order of the list."""
    return HEAD + "".join(_row(model, facts(model.name)) for model in MODELS)


def _row(model: Model, facts: Mapping[str, Any]) -> str:
    groups = cache_of(facts) or ()
    fitted = "yes" if facts["not_derivable"] is None else f"no: {facts['not_derivable']}"
    cells = (
        model.name,
        _billions(model.published),
        _billions(int(facts["parameters"])),
        f"{facts['weight_bytes'] / (1 << 30):.2f}",
        f"{token_bytes(groups, 2):,}",
        f"{bounded_token_bytes(groups, 2):,}",
        model.attention,
        fitted,
        model.words,
    )
    return f"| {' | '.join(cells)} |\n"


def _billions(parameters: int) -> str:
    return f"{parameters // B:,} B" if parameters % B == 0 else f"{parameters / B:,.3f} B"


def with_table(page: str, rows: str) -> str:
    """The page with these rows between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{rows}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), table()))
