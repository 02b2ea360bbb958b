"""Which engine options a document may pass: the grammar of `extra_args`, and the four classes of options.

The rules of a family are data (`OptionPolicy`); the checks are the same for all. Arity and meaning are
left to the engine, but nothing that CapyCTL owns can be said twice, abbreviated, or smuggled in.

Source: engines 3.1, 3.2; security 6.2, E12, E13.
"""

from __future__ import annotations

import enum
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import attrs

from capyctl.errors import Refusal

ARGUMENTS_MAX = 256
ARGUMENT_BYTES_MAX = 8192
_NUMBER = re.compile(r"-(\d|\.\d)")
_LONG = re.compile(r"--[A-Za-z0-9][A-Za-z0-9_.-]*")


class OptionClass(enum.Enum):
    """Where an option may appear. The value is the word that `capyctl engine flags` prints."""

    TYPED = "owned"  # a field of the document states it
    RESERVED = "reserved"  # nowhere, whatever is approved
    APPROVAL = "approval"  # once the profile names it in security.approved_options
    EXTRA = "passed"  # anywhere, shape checks only


@attrs.frozen(kw_only=True)
class OptionRule:
    """One option with all its spellings, and why it is classed as it is."""

    names: tuple[str, ...]
    kind: OptionClass
    why: str
    field: str | None = None  # the document field that states a TYPED option
    paths: bool = False  # its value names files of the host
    values: int = 1  # most values it takes
    fixed: bool = False  # a TYPED option that a profile may fix for every launch
    keys: tuple[str, ...] = ()  # its value is a flat JSON object of these keys, and `model` there is a path


@attrs.frozen(kw_only=True)
class OptionPolicy:
    """A family's options. Names that no rule lists are EXTRA, except those of a gated shape.

    `prefixes`: the family's parser abbreviates, so any prefix of a reserved name is that name.
    `unchecked`: nothing is known of the family's options, so every word passes that can be a word at all.
    """

    family: str
    rules: tuple[OptionRule, ...]
    gated_suffixes: tuple[str, ...] = ("-path", "-dir", "-config", "-file")
    ungated: frozenset[str] = frozenset()
    prefixes: bool = False
    equals: bool = False  # `--name=value` is understood by the family's parser
    dotted: bool = False  # and `--name.key value`, which says a part of what `--name` says
    unchecked: bool = False

    @cached_property
    def by_name(self) -> Mapping[str, OptionRule]:
        return {name: rule for rule in self.rules for name in rule.names}

    def rule(self, option: str) -> OptionRule:
        """The rule of one spelled option; a family without a row for it gets one by its shape.

        With `prefixes`, an abbreviation finds what it could mean, reserved first.
        """
        name = normal(option)
        if self.dotted:
            name = name.partition(".")[0]
        if name in self.by_name:
            return self.by_name[name]
        if self.prefixes:
            attached = name[:2] if not name.startswith("--") else name  # `-n2` is `-n 2`
            meant = [rule for spelling, rule in self.by_name.items() if spelling.startswith(name)]
            meant += [self.by_name[attached]] if attached in self.by_name else []
            order = (OptionClass.RESERVED, OptionClass.TYPED, OptionClass.APPROVAL, OptionClass.EXTRA)
            if meant:
                return min(meant, key=lambda rule: order.index(rule.kind))
        if name.endswith(self.gated_suffixes) and name not in self.ungated:
            why = "its name says that it takes a file, a directory or a configuration"
            return OptionRule(names=(name,), kind=OptionClass.APPROVAL, why=why, paths=True)
        return OptionRule(names=(name,), kind=OptionClass.EXTRA, why="not owned by CapyCTL")


@attrs.frozen(kw_only=True)
class Consent:
    """What a profile allows deployments: the `security` block's part that concerns options."""

    extra_args: bool = True
    options: frozenset[str] = frozenset()
    paths: tuple[str, ...] = ()


def normal(option: str) -> str:
    """The spelling that rules are compared under: no value, dashes for underscores."""
    return option.partition("=")[0].replace("_", "-")


def is_option(word: str) -> bool:
    """Whether a word is read as an option rather than as a value; `-1` is a value."""
    return word.startswith("-") and len(word) > 1 and not _NUMBER.match(word)


def check_extra_args(policy: OptionPolicy, args: Sequence[str], consent: Consent, fixed: Sequence[str] = ()) -> None:
    """Check a deployment's `engine_config.extra_args` against the family's policy and the profile's consent.

    Args:
      fixed: the profile's own arguments, which a deployment may not say again.
    Raises: Refusal `invalid_config` naming the option, the field or the path.
    """
    where = "engine_config.extra_args"
    if args and not consent.extra_args:
        raise Refusal("invalid_config", f"{where}: the profile does not allow extra arguments (security.extra_args)")
    if len(args) > ARGUMENTS_MAX:
        raise Refusal("invalid_config", f"{where}: {len(args)} words; at most {ARGUMENTS_MAX}")
    if policy.unchecked:
        for word in args:
            _check_word(where, word)
        return
    seen = {policy.rule(word).names[0] for word in fixed if is_option(word)}
    fixed_names = frozenset(seen)
    rule: OptionRule | None = None
    values = 0
    for word in args:
        _check_word(where, word)
        if not is_option(word):
            if rule is None or values == rule.values:
                raise Refusal("invalid_config", f"{where}: {word!r} follows no option that could take it")
            values += 1
            _check_value(where, rule, word, consent)
            continue
        rule, values = _check_option(policy, where, word, consent), 0
        said = normal(word) if policy.dotted and "." in normal(word) else rule.names[0]
        if said in seen or rule.names[0] in fixed_names:
            by = "the engine profile fixes it" if rule.names[0] in fixed_names else "it is given twice"
            raise Refusal("invalid_config", f"{where}: {normal(word)} is refused: {by}")
        seen.add(said)
        if "=" in word:
            _check_value(where, rule, word.partition("=")[2], consent)


def _check_word(where: str, word: str) -> None:
    if not word or len(word.encode()) > ARGUMENT_BYTES_MAX or any(ord(char) < 32 for char in word):
        raise Refusal(
            "invalid_config",
            f"{where}: each word is one line of 1 to {ARGUMENT_BYTES_MAX} bytes without control characters",
        )


def _check_option(policy: OptionPolicy, where: str, word: str, consent: Consent) -> OptionRule:
    name = normal(word)
    if not word.startswith("--"):
        raise Refusal("invalid_config", f"{where}: {name} is a short option; only long options are read")
    if not _LONG.fullmatch(word.partition("=")[0]):
        raise Refusal("invalid_config", f"{where}: {name!r} is not an option's name")
    if "=" in word and not policy.equals:
        raise Refusal(
            "invalid_config", f"{where}: {name}=… is not understood by {policy.family}; give the value as a word"
        )
    rule = policy.rule(word)
    if rule.kind is OptionClass.TYPED:
        raise Refusal("invalid_config", f"{where}: {name} is stated by {rule.field}; remove it here")
    if rule.kind is OptionClass.RESERVED:
        raise Refusal("invalid_config", f"{where}: {name} is reserved: {rule.why}")
    if rule.kind is OptionClass.APPROVAL and not consent.options & {normal(spelling) for spelling in rule.names}:
        raise Refusal(
            "invalid_config",
            f"{where}: {name} needs the host's approval: {rule.why}. Try: capyctl engine add … --approve-option={name}",
        )
    if rule.keys and "." in name:
        raise Refusal("invalid_config", f"{where}: {name}: give {rule.names[0]} one JSON object instead")
    return rule


def _check_value(where: str, rule: OptionRule, value: str, consent: Consent) -> None:
    if rule.keys:
        _check_object(where, rule, value)
    for path in _paths_of(rule, value):
        if not inside(path, consent.paths):
            raise Refusal(
                "invalid_config",
                f"{where}: {rule.names[0]} names {path}, which is outside the profile's security.approved_paths",
            )


def _check_object(where: str, rule: OptionRule, value: str) -> None:
    found = flat_object(value)
    if found is None:
        raise Refusal(
            "invalid_config",
            f"{where}: {rule.names[0]}: expected a flat JSON object of text, numbers and true or false",
        )
    unknown = [key for key in found if key not in rule.keys]
    if unknown:
        raise Refusal(
            "invalid_config",
            f"{where}: {rule.names[0]}: {unknown[0][:64]!r} is not allowed; expected {', '.join(rule.keys)}",
        )
    if not isinstance(found.get("model", ""), str):
        raise Refusal("invalid_config", f"{where}: {rule.names[0]}: model: expected a path")


def flat_object(text: str) -> dict[str, str | int | float | bool] | None:
    """A JSON object without lists, objects and nulls, in which no key stands twice; None for anything else."""
    try:
        pairs = json.loads(text, object_pairs_hook=lambda found: found if len(dict(found)) == len(found) else None)
    except (ValueError, RecursionError):
        return None
    if not text.lstrip().startswith("{") or pairs is None:
        return None
    return dict(pairs) if all(isinstance(value, str | int | float | bool) for _, value in pairs) else None


def _paths_of(rule: OptionRule, value: str) -> list[str]:
    if rule.paths:
        return paths_in(value)
    model = (flat_object(value) or {}).get("model") if rule.keys else None
    return [model] if isinstance(model, str) else []


def paths_in(value: str) -> list[str]:
    """The paths of an option's value: `a,b` are two, and a trailing `:0.5` is a scale, not a name."""
    return [re.sub(r":-?[\d.]+$", "", piece) for piece in value.split(",") if piece]


def inside(path: str, approved: Iterable[str]) -> bool:
    """Whether an absolute path lies below one of the approved directories, by its text alone."""
    if not os.path.isabs(path):
        return False
    plain = os.path.normpath(path)
    return any(plain == root or plain.startswith(root.rstrip("/") + "/") for root in map(os.path.normpath, approved))


def check_real_paths(policy: OptionPolicy, args: Sequence[str], consent: Consent) -> None:
    """The path check again before a launch, through symbolic links: what the text promised must be true.

    Raises: Refusal `invalid_config` naming the path and where it leads.
    """
    roots = tuple(os.path.realpath(root) for root in consent.paths)
    rule: OptionRule | None = None
    for word in args:
        if is_option(word):
            rule = policy.rule(word)
            word = word.partition("=")[2]
        if rule is None or not word:
            continue
        for path in _paths_of(rule, word):
            real = os.path.realpath(path)
            if not inside(real, roots):
                raise Refusal(
                    "invalid_config", f"{rule.names[0]} names {path}, which leads to {real}, outside the approved paths"
                )


def check_fixed_args(policy: OptionPolicy, args: Sequence[str], where: str = "args") -> None:
    """Check a profile's host-fixed arguments: the host may approve itself anything except what CapyCTL owns.

    Raises: Refusal `invalid_config` naming the option.
    """
    if len(args) > ARGUMENTS_MAX:
        raise Refusal("invalid_config", f"{where}: {len(args)} words; at most {ARGUMENTS_MAX}")
    for index, word in enumerate(args):
        _check_word(where, word)
        if policy.unchecked:
            continue
        if not is_option(word):
            if index == 0:
                raise Refusal("invalid_config", f"{where}: {word!r} follows no option")
            continue
        if "=" in word and not policy.equals:
            raise Refusal(
                "invalid_config",
                f"{where}: {normal(word)}=… is not understood by {policy.family}; give the value as a word",
            )
        rule = policy.rule(word)
        if rule.kind is OptionClass.TYPED and not rule.fixed:
            raise Refusal("invalid_config", f"{where}: {normal(word)} is stated by a deployment's {rule.field}")
        if rule.kind is OptionClass.RESERVED:
            raise Refusal("invalid_config", f"{where}: {normal(word)} is reserved: {rule.why}")


def check_approved_options(policy: OptionPolicy, options: Sequence[str]) -> None:
    """Check a profile's `security.approved_options`: long names, and none that no approval can free.

    Raises: Refusal `invalid_config` naming the option.
    """
    for option in options:
        if not _LONG.fullmatch(option):
            raise Refusal("invalid_config", f"security.approved_options: {option!r} is not a long option's name")
        rule = policy.rule(option)
        if rule.kind in (OptionClass.RESERVED, OptionClass.TYPED):
            raise Refusal(
                "invalid_config", f"security.approved_options: {normal(option)} cannot be approved: {rule.why}"
            )


def mentions(policy: OptionPolicy, args: Sequence[str], name: str) -> bool:
    """Whether an argument list says the option `name` under any of its spellings."""
    wanted = policy.rule(name).names[0]
    return any(is_option(word) and policy.rule(word).names[0] == wanted for word in args)


def value_of(policy: OptionPolicy, args: Sequence[str], name: str) -> str | None:
    """The last value given to the option `name`, or None."""
    wanted, found = policy.rule(name).names[0], None
    for index, word in enumerate(args):
        if is_option(word) and policy.rule(word).names[0] == wanted:
            following = args[index + 1] if index + 1 < len(args) else ""
            found = word.partition("=")[2] or ("" if is_option(following) else following)
    return found
