"""Writes, or with --check compares, every page of `spec/` that is rendered from code.

    python spec/render_all.py [--check] <directory>

Exit status: 0 when written or equal; 1 when a page differs, is missing, or is there for no machine.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from capyctl.fsm import render  # noqa: E402

MACHINES = {
    "request": "REQUEST",
    "operation": "OPERATION",
    "switch": "SWITCH",
    "deployment": "DEPLOYMENT",
    "activation": "ACTIVATION",
    "residency": "RESIDENCY",
    "cleanup": "CLEANUP",
    "gate": "GATE",
    "group": "GROUP",
    "member": "MEMBER",
}
"""Every machine: module under `capyctl.fsm`, and its name there."""

BY_HAND = {"README.md", "invariants.md"}
"""Pages that people write; tests check what they refer to."""


def machines() -> dict[str, Any]:
    """Every machine by name."""
    return {name: getattr(importlib.import_module(f"capyctl.fsm.{name}"), thing) for name, thing in MACHINES.items()}


def answers() -> dict[str, render.Answers]:
    """What the phases of each machine answer, for those that are asked.

    A machine's module says `QUESTIONS`: phase -> one answer per question. `instance` says them for its three machines.
    """
    told: dict[str, render.Answers] = {}
    by_enum = {machine.phases: name for name, machine in machines().items()}
    for name in (*MACHINES, "instance"):
        module = importlib.import_module(f"capyctl.fsm.{name}")
        heads = getattr(module, "QUESTION_HEADS", render.INSTANCE_QUESTIONS)
        lines: dict[str, dict[Any, Any]] = {}
        for phase, line in getattr(module, "QUESTIONS", {}).items():
            lines.setdefault(by_enum[type(phase)], {})[phase] = line
        told |= {machine: render.Answers(heads, by_phase) for machine, by_phase in lines.items()}
    return told


def pages() -> dict[str, str]:
    """Every rendered page by its file name."""
    checks = importlib.import_module("capyctl.ledger.checks")
    found = {f"{name}.md": render.page(machine) for name, machine in machines().items()}
    found["questions.md"] = render.questions_page(answers())
    found["admission.md"] = render.checks_page(
        "Admission", checks.__doc__ or "", "capyctl/ledger/checks.py", checks.CHECKS
    )
    return found


def stale(directory: Path) -> list[str]:
    """What is wrong with the pages in `directory`, one line each."""
    wanted = pages()
    wrong = [
        f"{name}: {'differs from the code' if (directory / name).exists() else 'is missing'}"
        for name, text in wanted.items()
        if not (directory / name).exists() or (directory / name).read_text() != text
    ]
    known = set(wanted) | BY_HAND
    return wrong + [
        f"{page.name}: no machine has this page" for page in directory.glob("*.md") if page.name not in known
    ]


def main(words: list[str]) -> int:
    check = "--check" in words
    places = [word for word in words if not word.startswith("-")]
    if len(places) != 1 or set(words) - {"--check", *places}:
        print("usage: python spec/render_all.py [--check] <directory>", file=sys.stderr)
        return 2
    directory = Path(places[0])
    if check:
        wrong = stale(directory)
        for line in wrong:
            print(f"{directory}/{line}; run: make spec", file=sys.stderr)
        return 1 if wrong else 0
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (directory / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
