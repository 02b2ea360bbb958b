"""A family's options as rows of data: class, reason, and the options' names in a short form.

A row names an option without its dashes. `?` at its end marks a switch, which has a `--no-` form; `!` a switch
without one; `*` an option that takes several values; `a|b` two spellings of one option.
"""

from __future__ import annotations

from collections.abc import Iterator

from capyctl.engines.options import OptionClass, OptionRule


def rules(
    kind: OptionClass,
    why: str,
    *specs: str,
    field: str | None = None,
    paths: bool = False,
    fixed: bool = False,
    keys: tuple[str, ...] = (),
) -> Iterator[OptionRule]:
    """One rule per spec, all of one class and for one reason."""
    for spec in specs:
        names: list[str] = []
        for word in spec.rstrip("?!*").split("|"):
            names.append(word if word.startswith("-") else f"--{word}")
            if spec.endswith("?") and not word.startswith("-"):
                names.append(f"--no-{word}")
        values = 0 if spec.endswith(("?", "!")) else 256 if spec.endswith("*") else 1
        yield OptionRule(
            names=tuple(names), kind=kind, why=why, field=field, paths=paths, values=values, fixed=fixed, keys=keys
        )


def typed(field: str, *specs: str, fixed: bool = False) -> Iterator[OptionRule]:
    """Options that a field of the document states."""
    return rules(OptionClass.TYPED, f"stated by {field}", *specs, field=field, fixed=fixed)


def owned(why: str, *specs: str) -> Iterator[OptionRule]:
    """Options that are CapyCTL's alone."""
    return rules(OptionClass.RESERVED, why, *specs)


def gated(why: str, *specs: str, paths: bool = False, keys: tuple[str, ...] = ()) -> Iterator[OptionRule]:
    """Options that a profile may approve."""
    return rules(OptionClass.APPROVAL, why, *specs, paths=paths, keys=keys)


def passed(why: str, *specs: str) -> Iterator[OptionRule]:
    """Options that a deployment may pass."""
    return rules(OptionClass.EXTRA, why, *specs)
