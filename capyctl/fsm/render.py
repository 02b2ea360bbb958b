"""Turns machines into spec pages: the same rows that decide are the rows that a reviewer reads.

A page shows prose, phases, events, the transition table in declaration order, what is refused and what is
ignored, the invariants and a diagram. What one cannot read off a table, whether a phase may serve
or be signalled, stands on a page of its own, from the `QUESTIONS` beside each machine.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from capyctl.fsm.table import Machine, Row, first_line

HEADER = "<!-- Rendered from {source} by `make spec`. Edit the code, not this page. -->"

INSTANCE_QUESTIONS = ("may it serve?", "may it be signalled?", "may its memory fall?", "status calls it")
"""The questions of an instance's phases; the answers are yes, no, or words."""


@attrs.frozen
class Answers:
    """The questions of one machine's phases: `heads` are the questions, `by_phase` one answer to each."""

    heads: Sequence[str]
    by_phase: Mapping[Any, Sequence[object]]


# --- one machine ----------------------------------------------------------------------------------


def page(machine: Machine[Any], *, source: str | None = None) -> str:
    """The spec page of one machine, as Markdown. Pure but for reading the comments beside its phases."""
    decided = [row for row in machine.rows if row.code is None and not row.ignored]
    parts = [
        f"# {machine.name.capitalize()}",
        HEADER.format(source=f"`{source or f'capyctl/fsm/{machine.name}.py'}`"),
        *prose(machine.doc),
        "## Phases",
        table(("phase", "meaning"), phase_rows(machine.phases)),
        "## Events",
        table(("event", "says"), ((f"`{event.__name__}`", first_line(event)) for event in machine.events)),
        "## Transitions",
        "Rows of one phase and event have guards that exclude each other; their order decides nothing. "
        "Where *to* says stays, only data changes. *why* says what the row does not.",
        transitions(machine, decided),
        "## Refused",
        "Answered with the code; nothing changes. `internal` marks what cannot come: if it does, it is our bug.",
        table(
            ("in", "event", "guard", "code", "why"),
            merged((phases_of(machine, row), row, guard_of(row), f"`{row.code}`", row.why) for row in machine.rows
                   if row.code is not None),
        ),
        "## Ignored",
        "Old news: nothing changes, nobody is answered.",
        table(
            ("in", "event", "guard", "why"),
            merged((phases_of(machine, row), row, guard_of(row), row.why) for row in machine.rows if row.ignored),
        ),
        "## Invariants",
        "Checked after every step, in production too.",
        "\n".join(
            f"- {first_line(claim)} (`{getattr(claim, '__name__', '?')}`)" for claim in machine.invariants
        ) or "None beyond the table.",
        "## Diagram",
        diagram(machine, decided),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def phase_rows(phases: type[enum.Enum]) -> Iterable[tuple[str, str]]:
    """Each phase and the comment beside it in the source."""
    notes = phase_notes(phases)
    return ((f"`{phase.name}`", notes.get(phase.name, "")) for phase in phases)


def merged(rows: Iterable[tuple[Any, ...]]) -> list[list[str]]:
    """Rows that differ in nothing but their event are one line; the second column is the row itself."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for where, row, *rest in rows:
        lines.setdefault((where, *rest), []).append(f"`{row.on.__name__}`")
    return [[where, ", ".join(events), *rest] for (where, *rest), events in lines.items()]


def transitions(machine: Machine[Any], rows: Iterable[Row]) -> str:
    """The table of the rows that do something, in declaration order."""
    return table(
        ("#", "from", "event", "guard", "to", "change", "emits", "why"),
        (
            (
                str(number),
                phases_of(machine, row),
                f"`{row.on.__name__}`",
                guard_of(row),
                f"`{row.to.name}`" if row.to is not None else "stays",
                first_line(row.change) if row.change else "",
                ", ".join(first_line(emit) for emit in row.emits),
                row.why,
            )
            for number, row in enumerate(rows, start=1)
        ),
    )


def diagram(machine: Machine[Any], rows: Sequence[Row]) -> str:
    """A Mermaid state diagram of the phases; rows that stay in their phase are left to the table."""
    edges: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for phase in ordered(machine.phases, row.when):
            if row.to is not None and row.to is not phase:
                names = edges.setdefault((phase.name, row.to.name), [])
                if row.on.__name__ not in names:
                    names.append(row.on.__name__)
    first = next(iter(machine.phases))
    left = {source for source, _ in edges}
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}"]
    lines += [f"    {source} --> {target}: {', '.join(names)}" for (source, target), names in edges.items()]
    lines += [f"    {phase.name} --> [*]" for phase in machine.phases if phase.name not in left]
    return "\n".join([*lines, "```"])


def phases_of(machine: Machine[Any], row: Row) -> str:
    """The phases of a row as text; what is most of them is told by what is missing."""
    names = [f"`{phase.name}`" for phase in ordered(machine.phases, row.when)]
    missing = [f"`{phase.name}`" for phase in machine.phases if phase not in row.when]
    if not missing:
        return "every phase"
    return ", ".join(names) if len(names) <= len(missing) + 1 else f"every phase but {', '.join(missing)}"


def ordered(phases: type[enum.Enum], some: frozenset[Any]) -> list[enum.Enum]:
    """Phases in the order of their declaration."""
    return [phase for phase in phases if phase in some]


def guard_of(row: Row) -> str:
    """A row's guard as text."""
    return first_line(row.given) if row.given else ""


def phase_notes(phases: type[enum.Enum]) -> dict[str, str]:
    """The comment beside each phase in the source, by the phase's name."""
    found = re.findall(r"^\s+(\w+) = .*?#\s*(.+?)\s*$", inspect.getsource(phases), flags=re.MULTILINE)
    return dict(found)


def prose(doc: str) -> list[str]:
    """The paragraphs of a module docstring, each on one line."""
    return [" ".join(paragraph.split()) for paragraph in doc.strip().split("\n\n")]


# --- other pages ----------------------------------------------------------------------------------


def questions_page(answers: Mapping[str, Answers]) -> str:
    """The page of questions per phase, one table for each machine that answers them."""
    parts = [
        "# Questions per phase",
        HEADER.format(source="the `QUESTIONS` beside each machine"),
        "What a reader of a table wants to know next. The answers are claims: tests hold the machines to them.",
    ]
    for name, told in answers.items():
        rows = ((f"`{phase.name}`", *(_said(answer) for answer in line)) for phase, line in told.by_phase.items())
        parts += [f"## {name.capitalize()}", table(("phase", *told.heads), rows)]
    return "\n\n".join(parts) + "\n"


def checks_page(title: str, doc: str, source: str, checks: Iterable[Any]) -> str:
    """The page of a list of conditions: objects with `name`, `requires`, `code`, `why`, and perhaps `scope`."""
    rows = (
        (
            str(number),
            f"`{check.name}`",
            str(getattr(getattr(check, "scope", ""), "value", "")),
            first_line(check.requires),
            f"`{check.code}`",
            check.why,
        )
        for number, check in enumerate(checks, start=1)
    )
    parts = [
        f"# {title}",
        HEADER.format(source=f"`{source}`"),
        *prose(doc),
        table(("#", "check", "where", "it requires that", "else refused with", "why"), rows),
    ]
    return "\n\n".join(parts) + "\n"


def _said(answer: object) -> str:
    if isinstance(answer, bool):
        return "yes" if answer else "no"
    return answer.value if isinstance(answer, enum.Enum) else str(answer)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a bar inside a cell is escaped. "Nothing." without a row."""
    told = [" | ".join(_cell(cell) for cell in row) for row in rows]
    if not told:
        return "Nothing."
    lines = [" | ".join(heads), " | ".join("---" for _ in heads), *told]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
