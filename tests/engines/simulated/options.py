"""Command-line parsers built from recorded facts: the names, values and words of refusal of the real parsers.

`<family>_options.json` lists what each parser defines. Exit status and text of an error are argparse's own,
as they are in the real engines: an unknown option, an ambiguous prefix, a value of the wrong type.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

Facts = list[dict[str, Any]]


def facts(family: str) -> Facts:
    place = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{family}_options.json")
    with open(place, encoding="utf-8") as stream:
        rows: Facts = json.load(stream)["options"]
    return rows


def older(version: str, than: str) -> bool:
    """Whether a version precedes another; what follows a `+` does not count."""
    return _numbers(version) < _numbers(than)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def human_readable_int(text: str) -> int:
    """Also `4k` (thousands) and `4K` (of 1024), with decimals before a unit of ten."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip())
    if match is None:
        return int(text)
    number, unit = match.groups()
    power = "kmgt".index(unit.lower()) + 1
    if unit.islower():
        return int(float(number) * 1000**power)
    if "." in number:
        raise argparse.ArgumentTypeError(f"Decimals are not allowed with binary suffixes like {unit}: {text}")
    return int(int(number) * 1024**power)


def human_readable_int_or_auto(text: str) -> int:
    return -1 if text.strip() in ("auto", "-1") else human_readable_int(text)


def loads(text: str) -> Any:
    return json.loads(text)


def _named(name: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    parse.__name__ = name  # argparse names it in its errors
    return parse


def _lenient(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Nothing and `None` are no value; what cannot be read is refused in other words than argparse's."""

    def read(text: str) -> Any:
        if text in ("", "None"):
            return None
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to {parse}.") from error

    return read


TYPES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "human_readable_int": human_readable_int,
    "human_readable_int_or_auto": human_readable_int_or_auto,
    "loads": loads,
    "parse_dataclass": _named("parse_dataclass", lambda text: json.loads(text)),
    "json_list_type": _named("json_list_type", lambda text: json.loads(text)),
}


class Parser(argparse.ArgumentParser):
    """Takes `--some_name` for `--some-name`, and `--json-arg.key value` for a key of a JSON option."""

    def __init__(self, *args: Any, flexible: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._flexible = flexible

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_args(model_first(args) if args is not None and self._flexible else args, namespace)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if args is not None and self._flexible:
            args = _dotted([_dashed(word) for word in args])
        return super().parse_known_args(args, namespace)


def model_first(argv: list[str]) -> list[str]:
    """`vllm serve --model M …` is `vllm serve M …`, as the real command line has it."""
    if argv[:1] != ["serve"]:
        return argv
    for at, word in enumerate(argv):
        if word == "--model" and at + 1 < len(argv):
            return ["serve", argv[at + 1], *argv[1:at], *argv[at + 2 :]]
        if word.startswith("--model="):
            return ["serve", word.partition("=")[2], *argv[1:at], *argv[at + 1 :]]
    return argv


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    name, dot, rest = name.partition(".")
    return name.replace("_", "-") + dot + rest + equals + value


def _dotted(words: Sequence[str]) -> list[str]:
    """`--a.b c` and `--a.b=c` become `--a {"b": c}`; several of one option are one object."""
    objects: dict[str, dict[str, Any]] = {}
    rest: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        match = re.match(r"^(--[a-z][a-z0-9-]*)\.([A-Za-z0-9_.]+)(?:=(.*))?$", word, re.S)
        if match is None:
            rest.append(word)
            continue
        value = match[3]
        if value is None:
            value, at = (words[at], at + 1) if at < len(words) else ("", at)
        target = objects.setdefault(match[1], {})
        *parents, name = match[2].split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
        try:
            target[name] = json.loads(value)
        except ValueError:
            target[name] = value
    for option, value in objects.items():
        rest += [option, json.dumps(value)]
    return rest


def add_options(
    parser: argparse.ArgumentParser, rows: Facts, *, version: str = "", since: dict[str, str] | None = None,
    without: Sequence[str] = (), loose: bool = False,
) -> None:  # fmt: skip
    """Define every option of the facts that this version has and `without` does not name.

    Args:
      since: option -> the first version that has it.
      loose: whether values of types that the facts do not spell out are read as numbers where they look so.
    """
    for row in rows:
        names = row["names"]
        if any(name in without for name in names):
            continue
        if any(name in (since or {}) and older(version, (since or {})[name]) for name in names):
            continue
        _add(parser, row, names, loose)


def _add(parser: argparse.ArgumentParser, row: dict[str, Any], names: list[str], loose: bool) -> None:
    default = row.get("default", False if row["kind"] == "flag" else None)
    if default == {"suppressed": True}:
        default = argparse.SUPPRESS
    if row["kind"] == "positional":
        parser.add_argument(row["dest"], nargs=row.get("nargs"), default=None)
    elif row["kind"] == "flag":
        parser.add_argument(*names, dest=row["dest"], action="store_true", default=default)
    elif row["kind"] == "switch":
        # The recorded names hold the negative forms too, which argparse makes again by itself.
        plain = [name for name in names if not (name.startswith("--no-") and f"--{name[5:]}" in names)]
        parser.add_argument(*plain, dest=row["dest"], action=argparse.BooleanOptionalAction, default=default)
    else:
        named = row.get("type", "str")
        parse = TYPES.get(named.removeprefix("optional:"), _lenient if loose else str)
        more: dict[str, Any] = {"action": "append"} if row["kind"] == "append" else {}
        if "nargs" in row:
            more["nargs"] = row["nargs"]
        if "choices" in row:
            more["choices"] = [_lenient(choice) for choice in row["choices"]] if parse is int else row["choices"]
            parse = parse if parse is int else str
        elif named.startswith("optional:"):
            parse = _optional(parse)
        parser.add_argument(*names, dest=row["dest"], type=parse, default=default, **more)
