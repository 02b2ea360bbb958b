"""The page of invariants names what exists, misses no number, and misses no claim of the world."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from capyctl.control import invariants, transitions

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "spec" / "invariants.md").read_text()
REFERENCE = re.compile(r"`((?:[a-z_]+/)+[a-z_0-9]+\.py)(?::([\w.]+))?`")
LINE = re.compile(r"^\| (M?\d+) \| (.+?) \| (.+?) \| (.+?) \|$", flags=re.MULTILINE)


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions and classes of a module, and methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{part.name}" for part in inner}
    return frozenset(found)


def place(name: str) -> Path:
    """Where a name of the page is: below `tests` or below `capyctl`."""
    if name.startswith(("tests/", "capyctl/")):
        return ROOT / name
    below = "tests" if name.split("/")[0] in ("property", "shell", "integration") else "capyctl"
    return ROOT / below / name


def test_everything_that_the_page_names_exists():
    missing = [
        f"{path}:{name}"
        for path, name in REFERENCE.findall(PAGE)
        if not place(path).exists() or (name and name not in names_in(place(path)))
    ]
    assert not missing
    assert len(REFERENCE.findall(PAGE)) > 150


def test_every_number_is_there_once_and_in_order():
    numbers = [number for number, *_ in LINE.findall(PAGE)]
    assert numbers == [*(str(number) for number in range(1, 73)), *(f"M{number}" for number in range(1, 21))]


def test_whatever_has_neither_a_predicate_nor_a_test_says_so():
    for number, _, carried, shown in LINE.findall(PAGE):
        bare = not REFERENCE.search(carried) and not REFERENCE.search(shown)
        assert bare == carried.startswith("not carried yet"), f"{number}: {carried}"


def test_every_numbered_claim_of_the_world_is_on_the_page_under_its_number():
    lines = {number: carried for number, _, carried, _ in LINE.findall(PAGE)}
    for claim in (*invariants.STATE, *transitions.TRANSITIONS):
        name = claim.__name__
        if name.startswith("idx_"):  # an index of the world, not a promise of the product
            continue
        assert any(f":{name}`" in carried for carried in lines.values()), f"{name} is not on the page"


def test_the_page_is_about_the_product_alone():
    assert "/work" not in PAGE
    assert "http" not in PAGE
