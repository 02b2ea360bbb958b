"""Widens every guard of the core, one at a time, and asks whether anything notices.

    python tests/property/mutants.py [--all] [machine ...]

A guarded row is made to fit always, and its siblings of the same pairs never, so that the table still
builds and exactly one row still fits. The mutant is killed when an invariant, a story or a model
fails. That a sibling's row no longer fires does not count, nor does a table that does not build.
The ledger lists its own mutants. Survivors are named, and make the exit status 1.

Checks are asked cheapest first. Those that took no sibling of a widened row cannot tell the mutant from the table
and are not asked; explorations show only what can have changed (`retrace`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import pytest  # noqa: E402
from _pytest.mark import ParameterSet  # noqa: E402
from hypothesis import HealthCheck, Phase, settings  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test  # noqa: E402

# Before any test module is imported: their own settings inherit from this one. A mutant need not be shrunk.
settings.register_profile(
    "mutants",
    phases=(Phase.explicit, Phase.generate),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("mutants")

import explore  # noqa: E402
from retrace import GIVEN_UP, Notebook, Rows, Where, siblings  # noqa: E402
from test_spec_pages import render_all  # noqa: E402

from capyctl.errors import InvariantBroken  # noqa: E402
from capyctl.fsm.table import Machine, Row, first_line  # noqa: E402

MACHINES = render_all.MACHINES

TESTS = {
    "activation": ("test_activation*.py", "test_instance*.py"),
    "residency": ("test_residency*.py", "test_instance*.py"),
    "cleanup": ("test_cleanup*.py", "test_instance*.py"),
    "gate": ("test_gate*.py", "test_instance*.py"),
    "member": ("test_group*.py", "test_member*.py"),
    "ledger": tuple(
        f"test_ledger_{part}.py" for part in ("admission", "placement", "cards", "settlement", "victims", "model")
    ),
}
"""Where the claims about a machine are tested, where it is not in `test_<machine>*.py`."""

EQUIVALENT: dict[str, str] = {}
"""Mutants that change nothing anybody could see, by label, each with the reason."""

NO_KILL = ("never fired", "rows fit (", GIVEN_UP)
"""What says nothing about meaning: a row that is not reached, a table that is not exclusive, a walk cut short."""


# --- checks ---------------------------------------------------------------------------------------


@attrs.define
class Check:
    """One thing that may fail: a test function with its arguments, or a model."""

    name: str
    kind: str  # story, model
    run: Callable[[], Any]
    seconds: float = 0.0  # how long it took when it last said nothing
    notebook: Notebook = attrs.field(factory=lambda: Notebook(Rows()))


def checks_of(patterns: tuple[str, ...]) -> list[Check]:
    """Every check of the test modules that match, in no order, learned."""
    stems = sorted({path.stem for pattern in patterns for path in HERE.glob(pattern)})
    return [check for stem in stems for check in checks_in(stem)]


@functools.cache
def checks_in(stem: str) -> tuple[Check, ...]:
    """The checks of one test module: its models, and its tests once for each of their parameter sets."""
    found: list[Check] = []
    for name, thing in vars(importlib.import_module(stem)).items():
        if inspect.isclass(thing) and issubclass(thing, RuleBasedStateMachine) and thing.__module__ == stem:
            found.append(Check(f"{stem}.{name}", "model", model(thing)))
        elif inspect.isfunction(thing) and name.startswith("test_") and thing.__module__ == stem:
            kind = "model" if hasattr(thing, "hypothesis") else "story"
            found += [Check(f"{stem}.{name}", kind, run) for run in calls(thing)]
    for check in found:
        learn(check)
    return tuple(found)


def model(machine: type[RuleBasedStateMachine]) -> Callable[[], None]:
    """Run a model with its own settings, unshrunk."""
    own = getattr(machine.TestCase, "settings", settings())
    mine = settings(own, phases=(Phase.explicit, Phase.generate), database=None)
    return lambda: run_state_machine_as_test(machine, settings=mine)


def calls(function: Callable[..., Any]) -> Iterator[Callable[[], Any]]:
    """A test function once for each of its parameter sets; none if it wants fixtures that only pytest gives."""
    sets: list[list[dict[str, Any]]] = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names = mark.args[0]
            names = [one.strip() for one in names.split(",")] if isinstance(names, str) else list(names)
            rows = [row.values if isinstance(row, ParameterSet) else row for row in mark.args[1]]
            sets.append([dict(zip(names, row if len(names) > 1 else [row], strict=True)) for row in rows])
    given = {name for one in sets for name in one[0]}
    signature = inspect.signature(function)
    wanted = {name for name, parameter in signature.parameters.items() if parameter.default is parameter.empty}
    missing = set() if hasattr(function, "hypothesis") else wanted - given
    if inspect.iscoroutinefunction(function) or missing - {"monkeypatch"}:
        return
    for chosen in itertools.product(*sets):
        arguments = {name: value for one in chosen for name, value in one.items()}
        yield lambda arguments=arguments: call(function, arguments, patched=bool(missing))


def call(function: Callable[..., Any], arguments: dict[str, Any], *, patched: bool) -> None:
    """Call a test, with a monkeypatch of its own if it wants one."""
    with pytest.MonkeyPatch.context() as patch:
        function(**arguments, **({"monkeypatch": patch} if patched else {}))


def failure(check: Check) -> BaseException | None:
    """What a check raised, if it says something about meaning."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            check.run()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as raised:
        told = str(raised) + "".join(str(one) for one in getattr(raised, "exceptions", ()))
        return None if any(words in told for words in NO_KILL) else raised
    return None


# --- mutants --------------------------------------------------------------------------------------


@attrs.frozen
class Mutant:
    """One change, to be applied and taken back."""

    label: str
    apply: Callable[[], contextlib.AbstractContextManager[None]]
    suspects: frozenset[Where] | None = None  # rows without which a check cannot tell it from the table


def always(state: Any, event: Any) -> bool:
    """always (mutant)"""
    return True


def outside(row: Row, sibling: Row) -> Row:
    """The sibling, no longer fitting where `row` now always does."""

    def narrowed(state: Any, event: Any) -> bool:
        return state.phase not in row.when and (sibling.given is None or sibling.given(state, event))

    narrowed.__doc__ = f"{first_line(sibling.given)} (narrowed)"
    return attrs.evolve(sibling, given=narrowed)


def widened(machine: Machine[Any], row: Row) -> tuple[Row, ...]:
    """The rows of a machine in which `row` fits always, and its siblings never where it does."""
    return tuple(
        attrs.evolve(one, given=always)
        if one is row
        else outside(row, one)
        if one.on is row.on and one.when & row.when
        else one
        for one in machine.rows
    )


@contextlib.contextmanager
def in_place(machine: Machine[Any], rows: tuple[Row, ...]) -> Iterator[None]:
    """Let a machine decide by other rows for a while, wherever it was imported."""
    kept = dict(vars(machine))
    fresh = Machine(
        name=machine.name,
        doc=machine.doc,
        phases=machine.phases,
        events=machine.events,
        rows=rows,
        invariants=machine.invariants,
    )
    vars(machine).update(vars(fresh))
    try:
        yield
    finally:
        vars(machine).clear()
        vars(machine).update(kept)


def mutants_of(name: str, machine: Machine[Any]) -> list[Mutant]:
    """One mutant for each guarded row."""

    def mutant(row: Row) -> Mutant:
        phases = "|".join(phase.name for phase in machine.phases if phase in row.when)
        label = f"{name}: {phases} {row.on.__name__} [{first_line(row.given)}]"
        return Mutant(label, lambda: in_place(machine, widened(machine, row)), siblings(machine, row))

    return [mutant(row) for row in machine.rows if row.given is not None]


def mutants_of_ledger() -> list[Mutant]:
    """The ledger's own list: its checks, proofs and predicates, each broken."""
    ledger = importlib.import_module("ledger_mutants")
    return [Mutant(f"ledger: {name}", breaks) for name, breaks in ledger.MUTANTS]


# --- the run --------------------------------------------------------------------------------------


def learn(check: Check) -> None:
    """Run a check while nothing is changed: it must pass; what it looks at and how long it takes is noted.

    Raises: SystemExit if it fails.
    """
    notebook, began = check.notebook, time.process_time()
    with watched(notebook), notebook.writing():
        wrong = failure(check)
    if wrong is not None:
        raise SystemExit(f"{check.name} fails without any mutant: {wrong}")
    check.seconds = time.process_time() - began
    if notebook.walks:
        wrong, seconds = timed(check, frozenset())
        if wrong is None:
            check.seconds = seconds
        else:
            notebook.walks.clear()  # its claim is about the whole walk: it sees all of it under each mutant


@contextlib.contextmanager
def watched(notebook: Notebook) -> Iterator[None]:
    """Let explorations be written down in, or repeated from, this notebook."""
    explore.notebook = notebook
    try:
        yield
    finally:
        explore.notebook = None


def timed(
    check: Check, suspects: frozenset[Where] | None, *, patient: bool = False
) -> tuple[BaseException | None, float]:
    """What a check raised where only what took these rows can have changed, or anything, and how long it took."""
    began = time.process_time()
    if suspects is None:
        wrong = failure(check)
    else:
        with watched(check.notebook), check.notebook.repeating(suspects, patient=patient):
            wrong = failure(check)
    return wrong, time.process_time() - began


def killed_by(
    mutant: Mutant, checks: list[Check], *, every_killer: bool, patient: bool = False
) -> list[tuple[Check, BaseException]]:
    """The checks that notice a mutant, cheapest first, with what they raised: the first of them, or all."""
    found: list[tuple[Check, BaseException]] = []
    for check in sorted(checks, key=lambda one: one.seconds):
        wrong, seconds = timed(check, mutant.suspects, patient=patient)
        if wrong is None:
            check.seconds = seconds
            continue
        found.append((check, wrong))
        if not every_killer:
            break
    return found


def hunt(name: str, everything: list[Mutant], *, every_killer: bool) -> tuple[Counter[str], list[str]]:
    """Try every mutant of one machine: what killed how many, and the labels of the survivors."""
    checks = checks_of(TESTS.get(name, (f"test_{name}*.py",)))
    if not checks:
        return Counter(), [f"{mutant.label}: there are no tests" for mutant in everything]
    kills: Counter[str] = Counter()
    survivors: list[str] = []
    killers: Counter[str] = Counter()
    for mutant in everything:
        asked = [one for one in checks if mutant.suspects is None or one.notebook.concerns(mutant.suspects)]
        with mutant.apply():
            found = killed_by(mutant, asked, every_killer=every_killer)
            if not found:  # a walk may have been cut short
                walks = [one for one in asked if one.notebook.walks]
                found = killed_by(mutant, walks, every_killer=every_killer, patient=True)
        killed = bool(found)
        if killed:
            check, wrong = found[0]
            kills["invariant" if isinstance(wrong, InvariantBroken) else check.kind] += 1
            killers.update(one.name for one, _ in found)
        if killed == (mutant.label in EQUIVALENT):
            survivors.append(f"{mutant.label}{' (listed as equivalent, but killed)' if killed else ''}")
    if every_killer:
        for name_of_check, count in killers.most_common():
            print(f"    {count:4d}  {name_of_check}")
    return kills, survivors


def main(words: list[str]) -> int:
    every_killer = "--all" in words
    names = [word for word in words if not word.startswith("-")]
    unknown = set(names) - {*MACHINES, "ledger"}
    if unknown:
        print(f"no such machine: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    explore.rows_must_fire = False
    print(f"{'machine':<12} mutants  invariant  story  model  survive  seconds")
    all_survivors: list[str] = []
    for name in names or [*MACHINES, "ledger"]:
        began = time.monotonic()
        if name == "ledger":
            everything = mutants_of_ledger()
        else:
            module = importlib.import_module(f"capyctl.fsm.{name}")
            everything = mutants_of(name, getattr(module, MACHINES[name]))
        kills, survivors = hunt(name, everything, every_killer=every_killer)
        seconds = time.monotonic() - began
        print(
            f"{name:<12} {len(everything):7d}  {kills['invariant']:9d}  {kills['story']:5d}  {kills['model']:5d}  "
            f"{len(survivors):7d}  {seconds:7.1f}",
            flush=True,
        )
        all_survivors += survivors
    for line in all_survivors:
        print(f"survived: {line}")
    return 1 if all_survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
