"""Who imports whom: the pure rooms import nothing that acts, and the arrows between rooms point one way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "capyctl"

PURE = ("fsm", "ledger", "control")
ACTS = frozenset(
    {
        *("asyncio", "ctypes", "h11", "httpx", "hypercorn", "logging", "multiprocessing", "os", "psutil", "pynvml"),
        *("quart", "quart_trio", "random", "secrets", "selectors", "shutil", "signal", "socket", "sqlite3", "ssl"),
        *("subprocess", "tempfile", "threading", "time", "trio", "trio_websocket", "urllib", "uuid"),
    }
)
"""What a decision must not depend on: clocks, chance, processes, files, sockets, threads, logs."""

BASE = {"errors", "units", "ulid"}

MAY_IMPORT = {
    "errors": set[str](),
    "units": {"errors"},
    "ulid": {"errors"},
    "fsm": BASE,
    "ledger": BASE | {"fsm"},
    "control": BASE | {"fsm", "ledger"},
    "documents": BASE,
    "checkpoints": BASE | {"documents", "fsm", "ledger"},
    "engines": BASE | {"documents", "checkpoints", "fsm", "ledger", "control"},
    "downloads": BASE | {"documents", "checkpoints"},
    "session": BASE | {"fsm", "ledger"},
    "clock": {"fsm"},
    "host": BASE
    | {"clock"}
    | {"documents", "checkpoints", "downloads", "engines", "session"}
    | {"fsm", "ledger", "router"},
    "router": BASE | {"fsm", "ledger", "control"},
    "server": BASE
    | {"clock"}
    | {"fsm", "ledger", "control", "session", "router"}
    | {"documents", "checkpoints", "engines"},
}
"""The arrows between rooms. `host` implements the router's `Upstream`, `server` its `Desk`: both read `router.desk`."""

VALUES = {"fsm": {"types", "proofs"}, "ledger": {"types"}, "control": {"spec"}, "router": {"desk"}}
PLAIN = dict.fromkeys(("checkpoints", "engines", "session", "host"), VALUES)
"""Of rooms that decide, these read values alone: what they measure and prove is handed over as such."""


def modules(room: str) -> list[Path]:
    """The files of a room."""
    alone = PACKAGE / f"{room}.py"
    return [alone] if alone.exists() else sorted((PACKAGE / room).rglob("*.py"))


def imports(path: Path, *, only_at_run_time: bool = True) -> Iterator[tuple[int, str]]:
    """Every imported module of a file, with its line; imports for type checking alone are left out."""
    tree = ast.parse(path.read_text(), filename=str(path))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if only_at_run_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for part in node.body
        for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.lineno, node.module
            if node.module.startswith("capyctl"):  # `from capyctl.fsm import run` imports capyctl.fsm.run
                yield from (
                    (node.lineno, f"{node.module}.{name.name}")
                    for name in node.names
                    if (ROOT / Path(*node.module.split("."), f"{name.name}.py")).exists()
                )


@pytest.mark.parametrize("room", PURE)
def test_a_pure_room_imports_nothing_that_acts(room: str):
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules(room)
        for line, name in imports(path, only_at_run_time=False)
        if name.split(".")[0] in ACTS
    ]
    assert not found
    assert modules(room), f"the room {room} is there"


@pytest.mark.parametrize("room", PURE)
def test_a_pure_room_draws_no_identity_by_itself(room: str):
    """`ulid.new` is made of what an event brings; `ulid.fresh` asks the clock and the system."""
    for path in modules(room):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        drawn = [name for _, name in imports(path) if name == "capyctl.ulid.fresh"]
        assert not drawn
        assert not (names & {"fresh"} and any(name == "capyctl.ulid" for _, name in imports(path)))


@pytest.mark.parametrize("room", [*MAY_IMPORT])
def test_rooms_import_only_along_the_arrows(room: str):
    allowed = MAY_IMPORT[room] | {room}
    found = []
    for path in modules(room):
        for line, name in imports(path):
            parts = name.split(".")
            if parts[0] != "capyctl" or len(parts) < 2:
                continue
            if parts[1] not in allowed:
                found.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
            plain = PLAIN.get(room, {}).get(parts[1])
            if plain is not None and len(parts) > 2 and parts[2] not in plain:
                found.append(f"{path.relative_to(ROOT)}:{line} imports {name}, which is no plain type")
    assert not found


@pytest.mark.parametrize("room", ["fsm", "ledger", "control", "documents"])
def test_a_room_without_shells_is_free_of_third_party_packages_but_its_own(room: str):
    own = {"attrs", "cattrs", "yaml"} if room == "documents" else {"attrs"}
    known = own | {"capyctl"}
    stdlib = __import__("sys").stdlib_module_names
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules(room)
        for line, name in imports(path)
        if (top := name.split(".")[0]) not in known and top not in stdlib
    ]
    assert not found


def test_no_machine_names_an_engine():
    """Control, ledger and machines decide by traits: no family's name stands in their code."""
    families = ("vllm", "sglang", "tensorfold", "llama.cpp", "llamacpp", "llama_cpp")
    found = []
    for room in PURE:
        for path in modules(room):
            for node in ast.walk(ast.parse(path.read_text())):
                is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
                if is_text and node.value.lower() in families:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} says {node.value!r}")
                if isinstance(node, ast.Name | ast.Attribute):
                    name = node.id if isinstance(node, ast.Name) else node.attr
                    if any(family == name.lower() for family in families):
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno} names {name}")
    assert not found


def test_the_map_names_every_module_and_nothing_that_is_not_there():
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = dict(re.findall(r"^\* \*\*`(\w+)`\*\*:(.*(?:\n  .*)*)", text, re.MULTILINE))
    named = {room: set(re.findall(r"`(\w+)`", said)) for room, said in listed.items()}
    there = {
        room.name: {one.stem for one in room.iterdir() if not one.name.startswith("_")}
        for room in PACKAGE.iterdir()
        if (room / "__init__.py").exists()
    }
    assert named == there
