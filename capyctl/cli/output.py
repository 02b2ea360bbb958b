"""What commands print: tables, summaries, one JSON value; and errors, on one line of stderr.

Text is the default even when piped; the form never changes the exit status. Source: cli 4.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import attrs
from cyclopts import Parameter

from capyctl.errors import CapyError, Refusal, shown_details
from capyctl.units import gib

INTERRUPTED: Final = 130
Flag = Annotated[bool, Parameter(negative=())]  # no hidden --no-… twin
Words = Annotated[list[str], Parameter(negative=(), allow_leading_hyphen=True)]  # repeatable; no --empty-… twin
Text = Annotated[str | None, Parameter(allow_leading_hyphen=True)]


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Basic:
    """Options every command has."""

    config: Annotated[str | None, Parameter(help="Role document, instead of the one that is found.")] = None
    state_dir: Annotated[str | None, Parameter(help="State root of the role.")] = None
    format: Annotated[str | None, Parameter(help="text or json.")] = None
    json: Annotated[bool, Parameter(help="Short for --format json.", negative=())] = False

    def __attrs_post_init__(self) -> None:
        self.as_json  # noqa: B018  a form that does not exist is refused before anything is done

    @property
    def as_json(self) -> bool:
        return wants_json(self.format, self.json)


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Common(Basic):
    """Those, and the old spelling of --json, where --output is not a file."""

    output: Annotated[str | None, Parameter(show=False)] = None

    @property
    def as_json(self) -> bool:
        return wants_json(self.format, self.json) or wants_json(self.output, False)


def the_file(path: str | None, file: str | None) -> str:
    """The one file that a command names, as a word or as --file. Raises: Refusal for both and for none."""
    if path is not None and file is not None:
        raise Refusal("invalid_config", f"{path} and --file {file} both name a file; keep one")
    found = path if path is not None else file
    if found is None:
        raise Refusal("invalid_config", "no file is named; give its path, or --file <path>")
    return found


def wants_json(form: str | None, short: bool) -> bool:
    """Whether JSON is asked for. Raises: Refusal for a form that does not exist."""
    if form not in (None, "text", "table", "json"):
        raise Refusal("invalid_config", f"--format {form}: expected text or json")
    if short and form not in (None, "json"):
        raise Refusal("invalid_config", f"--json and --format {form} ask for different forms; keep one")
    return short or form == "json"


def say(text: str = "") -> None:
    """A line of the result, to stdout."""
    sys.stdout.write(f"{text}\n")


def note(text: str) -> None:
    """A notice, a warning or what is waited for, to stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def emit_json(value: Any) -> None:
    """One JSON value on stdout: indented on a terminal, one line otherwise."""
    indent = 2 if sys.stdout.isatty() else None
    say(json.dumps(value, indent=indent, ensure_ascii=False))


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, none: str = "") -> None:
    """Columns padded to the widest cell, three spaces between, no trailing spaces; the header always.

    `none`: what is said beside it, to stderr, when there are no rows.
    """
    rows = list(rows)
    if none and not rows:
        note(none)
    lines = [list(titles), *([cell or "-" for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    for line in lines:
        say("   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def key_lines(pairs: Mapping[str, str]) -> None:
    """Two spaces, the key, padding to the longest key and three more, the value."""
    width = max((len(key) for key in pairs), default=0)
    for key, value in pairs.items():
        first, *more = value.split("\n")
        say(f"  {key.ljust(width)}   {first}".rstrip())
        for line in more:
            say(f"  {' ' * width}   {line}".rstrip())


def summary(sentence: str, pairs: Mapping[str, str], hints: Iterable[str] = ()) -> None:
    """A sentence, an empty line, key lines, and hints from column one."""
    say(sentence)
    if pairs:
        say()
        key_lines(pairs)
    for hint in hints:
        say(hint)


def yes(value: bool) -> str:
    return "yes" if value else "no"


def memory(domains: Mapping[str, Any]) -> str:
    """`28.5 GiB`, or `13.2 GiB (+4.0 GiB RAM)` when a card and the RAM beside it are meant."""
    bytes_of = {domain: int(amount) for domain, amount in domains.items()}
    if not bytes_of:
        return "-"
    ram = bytes_of.pop("system", None)
    if not bytes_of:
        return gib(ram or 0)
    main = gib(sum(bytes_of.values()))
    return f"{main} (+{gib(ram)} RAM)" if ram else main


def first_line(text: Any) -> str:
    """A reason without the engine's last lines, which stand below it."""
    return " ".join(str(text).partition("\n")[0].removesuffix(":").split())


def context_note(facts: Mapping[str, str]) -> str:
    """What a plan's facts say against its context: that the cache holds less, and the longest input then."""
    warning, longest = facts.get("context_warning"), facts.get("longest_input")
    if not warning:
        return ""
    return f"; {warning}" + (f", so inputs end at {longest}" if longest else "")


def plain(text: str) -> str:
    """No control character: what a stranger wrote into a document or a file's name moves no cursor."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def print_error(error: CapyError, *, as_json: bool) -> None:
    """`error [code]: message` on stderr, or a JSON object with the same facts."""
    if as_json:
        fact: dict[str, Any] = {"code": error.code, "message": error.message, "retryable": error.retryable}
        if error.details:
            fact["details"] = shown_details(error.details)
        note(json.dumps(fact, ensure_ascii=False))
    else:
        note(f"error [{error.code}]: {plain(' '.join(error.message.split()))}")


PLAIN: Final = Common()
