"""The page of invariants names what exists, misses no number, and misses no claim of the world."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from capyctl.control import invariants, transitions

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "spec" / "invariants.md").read_text()
REFERENCE = re.compile(r"`((?:[a-z_]+/)+[a-z_0-9]+\.py)(?::([\w.]+))?`")
LINE = re.compile(r"^\| ([MS]?\d+) \| (.+?) \| (.+?) \| (.+?) \|$", flags=re.MULTILINE)


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes and constants of a module, and methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
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
    reference = [*(str(number) for number in range(1, 73)), *(f"M{number}" for number in range(1, 21))]
    assert [number for number in numbers if not number.startswith("S")] == reference
    assert [number for number in numbers if number.startswith("S")] == [f"S{number}" for number in range(1, 9)]


def test_every_proof_of_the_catalogue_is_there_with_its_type():
    proofs = re.findall(r"^\| (P-[A-Z-]+) \|", PAGE, flags=re.MULTILINE)
    assert proofs == sorted(set(proofs), key=proofs.index)
    catalogue = (ROOT / "capyctl" / "fsm" / "proofs.py").read_text()
    known = re.findall(r"^    \"\"\"(P-[A-Z-]+):", catalogue, flags=re.MULTILINE)
    assert set(known) <= set(proofs)
    assert set(proofs) - set(known) == {"P-FRESH", "P-DIGEST", "P-NONE-WAITING"}  # a check, a refusal, a phase


def test_whatever_has_neither_a_predicate_nor_a_test_says_so():
    for number, _, carried, shown in LINE.findall(PAGE):
        bare = not REFERENCE.search(carried) and not REFERENCE.search(shown)
        assert bare == carried.startswith("not carried yet"), f"{number}: {carried}"


def numbers_of(claim: Callable[..., bool]) -> list[str]:
    """The numbers that a claim says it carries: in its name, and before the colon of its sentence."""
    named = claim.__name__.split("_")[1].lstrip("0").upper()
    said = re.sub(r"\([^)]*\)", "", (claim.__doc__ or "").split(":")[0])
    return sorted({named, *re.findall(r"\b[MS]?\d+\b", said)})


def test_every_numbered_claim_of_the_world_is_on_the_page_under_each_of_its_numbers():
    lines = {number: carried for number, _, carried, _ in LINE.findall(PAGE)}
    missing = []
    for claim in (*invariants.STATE, *transitions.TRANSITIONS):
        if claim.__name__.startswith("idx_"):  # an index of the world, not a promise of the product
            continue
        place_of = f"{claim.__module__.removeprefix('capyctl.').replace('.', '/')}.py:{claim.__name__}"
        missing += [f"{number}: {place_of}" for number in numbers_of(claim) if f"`{place_of}`" not in lines[number]]
    assert not missing


def test_whatever_a_line_names_of_the_world_s_claims_says_that_it_carries_that_number():
    claims = {claim.__name__: numbers_of(claim) for claim in (*invariants.STATE, *transitions.TRANSITIONS)}
    for number, _, carried, _ in LINE.findall(PAGE):
        if number.startswith("S"):  # a line without a number of the reference borrows what carries one
            continue
        for _, name in REFERENCE.findall(carried):
            assert name not in claims or name.startswith("idx_") or number in claims[name], f"{number}: {name}"


def checked_by(path: Path) -> Iterator[tuple[str, str]]:
    """(name, number) of what a module of tests says that it checks: in a name, and in the comment of its first line."""
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.parse(text).body:
        parts: list[tuple[str, ast.stmt]] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            parts = [(node.name, node)]
        if isinstance(node, ast.ClassDef):
            inner = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
            parts += [(f"{node.name}.{part.name}", part) for part in inner]
        for name, part in parts:
            head = " ".join(lines[part.lineno - 1 : part.body[0].lineno - 1])  # type: ignore[attr-defined]
            comment = head.partition("#")[2]
            said = re.findall(r"\bM\d+\b", comment)
            for numbers in re.findall(r"\binvariants? ([\d, ]+)", comment):
                said += re.findall(r"\d+", numbers)
            named = re.match(r"test_(?:m\d+_(?:and_)?)+", name)
            said += [number.upper() for number in re.findall(r"m\d+", named[0])] if named else []
            yield from ((name, number) for number in said)


def test_whatever_a_test_says_that_it_checks_is_on_the_page_under_that_number():
    lines = {number: shown for number, _, _, shown in LINE.findall(PAGE)}
    found = [
        (number, f"{path.relative_to(ROOT / 'tests')}:{name}")
        for path in sorted((ROOT / "tests").glob("**/*.py"))
        for name, number in checked_by(path)
    ]
    assert [f"{number}: {name}" for number, name in found if f"`{name}`" not in lines[number]] == []
    assert len(found) > 60


def test_the_page_is_about_the_product_alone():
    assert "/work" not in PAGE
    assert "http" not in PAGE
