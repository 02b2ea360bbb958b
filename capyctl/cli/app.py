"""The tree of commands, and the one place where an error becomes a line and an exit status.

Commands are named by import path: asking for one imports that one. Source: cli 1, 2, 15.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnusedCliTokensError

from capyctl import __version__
from capyctl.cli.output import INTERRUPTED, PLAIN, Common, note, print_error
from capyctl.errors import CapyError, Failure, Refusal

# action, resource, function, help
COMMANDS: Final = (
    ("init", "server", "init:server", "Write a server document (for a later release)."),
    ("init", "host", "init:host", "Write a host document with limits that fit this machine (for a later release)."),
    ("start", "standalone", "roles:standalone", "Run everything on this machine, in the foreground."),
    ("start", "server", "roles:server", "Run the server of several machines (not in this release)."),
    ("start", "host", "roles:host", "Run a GPU machine that a server drives (not in this release)."),
    ("start", "deployment", "lifecycle:start", "Start a deployment."),
    ("stop", "deployment", "lifecycle:stop", "Stop a deployment; requests are refused until it is started."),
    ("park", "deployment", "lifecycle:park", "Park a deployment; the next request wakes it."),
    ("preinitialize", "deployment", "lifecycle:preinitialize", "Start, prove and park each instance in turn."),
    ("delete", "deployment", "lifecycle:delete", "Delete a deployment. Model files are never touched."),
    ("deploy", "model", "deploy:model", "Create a deployment, or replace one with --revision."),
    ("list", "deployments", "listing:deployments", "List deployments with their states."),
    ("list", "engines", "listing:engines", "List the engines that hosts offer."),
    ("list", "hosts", "listing:hosts", "List hosts with their memory and engines."),
    ("list", "sources", "sources:listed", "List downloaded models and who uses them."),
    ("prune", "sources", "sources:prune", "Show downloads that no deployment uses; --apply removes them."),
    ("list", "memory", "memory:memory", "Show every memory domain, its limits, and who holds what."),
    ("status", "deployment", "status:deployment", "Show a deployment: instances, what it waits for, what failed."),
    ("inspect", "deployment", "status:inspect_deployment", "Show the full record of a deployment."),
    ("inspect", "host", "status:inspect_host", "Show the full record of a host."),
    ("validate", "config", "validate:config", "Check a document offline."),
    ("config", "show", "config_show:show", "Show every setting with its value and source."),
    ("drain", "standalone", "drain:standalone", "Stop every engine of this machine; deployments are kept."),
    ("engine", "detect", "engine:detect", "Find engine installations; runs nothing it finds."),
    ("engine", "add", "engine:add", "Register an engine installation."),
    ("engine", "list", "engine:list_profiles", "List registered engines."),
    ("engine", "remove", "engine:remove", "Remove a registered engine."),
    ("engine", "flags", "engine:flags", "Show which options and variables of a family are whose."),
    ("logs", "", "logs:logs", "Print the end of an engine's log."),
    ("demo", "", "demo:demo", "See it work on this machine, with nothing set up."),
    ("version", "", "version:version", "Show the version and the commit the build came from."),
)
_ACTIONS: Final = {
    "init": "Write a document to begin with, for several machines (a later release).",
    "start": "Start a role or a deployment.",
    "stop": "Stop a deployment.",
    "park": "Park a deployment.",
    "preinitialize": "Prepare a deployment ahead of its first request.",
    "delete": "Delete a deployment.",
    "deploy": "Deploy a model.",
    "list": "List deployments, engines, hosts, memory or downloads.",
    "status": "Show what is going on.",
    "inspect": "Show full records.",
    "validate": "Check documents.",
    "config": "Show settings.",
    "drain": "Stop every engine.",
    "prune": "Remove what nobody uses.",
    "engine": "Register engine installations.",
}
OTHERWISE: Final[dict[tuple[str, ...], str]] = {
    ("stop", "standalone"): "a role ends with Ctrl-C or SIGTERM, and its engines run on; "
    "to stop every engine: `capyctl drain standalone`",
    ("init", "standalone"): "`capyctl start standalone` writes its own document when it starts for the first time",
    ("status", "standalone"): "`capyctl status` shows the role",
}
"""What does the work of a command that does not exist."""


def build() -> App:
    """The application. Nothing but names is read until a command is chosen."""
    app = App(
        name="capyctl",
        help="Run more models than fit in memory, behind one OpenAI-compatible endpoint.",
        version=f"capyctl {__version__}",
        version_flags=("--version",),
        result_action="return_value",
        help_format="plaintext",  # `<path>=<value>` is no markup
        default_parameter=Parameter(show_default=False),  # that a flag is off unless it is given needs no word
    )
    groups: dict[str, App] = {}
    for action, resource, function, text in COMMANDS:
        path = f"capyctl.cli.{function}"
        if not resource:
            app.command(path, name=action, help=text)
            continue
        if action not in groups:
            groups[action] = App(name=action, help=_ACTIONS[action], version_flags=(), result_action="return_value")
            app.command(groups[action])
        groups[action].command(path, name=resource, help=text)
    groups["status"].default(_overview)
    return app


def _overview(*, common: Common = PLAIN) -> None:
    """Show the role that answers here, its listeners and its memory."""
    from capyctl.cli.status import overview

    overview(common=common)


def run(words: Sequence[str]) -> int:
    """Run one command line and return its exit status. Prints errors; raises nothing a user can cause."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed by whoever started this
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  as long as the process
    try:
        return _answered(words)
    finally:
        _give_up_what_nobody_takes()


def _answered(words: Sequence[str]) -> int:
    as_json = _asked_for_json(words)
    app = build()
    try:
        status = _dispatch(app, list(words))
        sys.stdout.flush()
    except CapyError as error:
        _tell(error, as_json=as_json)
        return error.exit_code
    except UnusedCliTokensError as error:
        _tell(Refusal("invalid_config", _unused(app, words, error)), as_json=as_json, usage=_usage(app, words))
        return 2
    except CycloptsError as error:
        said = _missing(app, words, error) if isinstance(error, MissingArgumentError) else str(error)
        _tell(Refusal("invalid_config", said), as_json=as_json, usage=_usage(app, words))
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return 0  # whoever read the output has had enough of it
    except OSError as error:
        _tell(Failure("internal", f"{error.filename or 'the system'}: {error.strerror or error}"), as_json=as_json)
        return 13
    return status


def _tell(error: CapyError, *, as_json: bool, usage: str = "") -> None:
    """Print an error. Where it cannot be written, as to a file on a full disk, the exit status says it alone."""
    with contextlib.suppress(OSError):
        print_error(error, as_json=as_json)
        if usage and not as_json:
            note(f"Usage: {usage}")


def _give_up_what_nobody_takes() -> None:
    """Drop what cannot be written: Python would try once more at exit, and end with a status of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _dispatch(app: App, words: list[str]) -> int:
    helping = "--help" in words or "-h" in words
    if helping or not words:
        from rich.console import Console  # only help is drawn

        app.console = Console(no_color=True, highlight=False)
    if not words:
        app.help_print([])
        return 2
    chain, apps, rest = app.parse_commands(words)
    if not helping and apps[-1].default_command is None:
        resources = ", ".join(sorted(name for name in apps[-1] if not name.startswith("-")))
        what = "A word is missing after"
        if rest:
            what = f"Unknown {'option' if rest[0].startswith('-') else 'command'} {rest[0]!r} after"
        meant = _meant([*chain, *rest])
        raise CycloptsError(msg=f"{what} {' '.join(('capyctl', *chain))!r}: {meant or f'expected one of {resources}.'}")
    result = app(words, exit_on_error=False, print_error=False, result_action="return_value")
    return result if type(result) is int else 0


def _meant(words: Sequence[str]) -> str:
    """`did you mean `capyctl deploy`?` or what does it instead, empty when nothing comes near."""
    from capyctl.cli import nearest

    if otherwise := OTHERWISE.get(tuple(words[:2])):
        return otherwise
    known: dict[str, list[str]] = {}
    for action, resource, _, _ in COMMANDS:
        known.setdefault(action, []).extend([resource] if resource else [])
    found = nearest.command(words, known)
    return f"did you mean `{found}`?" if found else ""


def _unused(app: App, words: Sequence[str], error: UnusedCliTokensError) -> str:
    """One line for words that a command has no place for."""
    chain, _, _ = app.parse_commands(list(words))
    unused = [word for word in error.unused_tokens or () if not word.startswith("-")]
    meant = _meant([*chain, *unused]) if len(chain) == 1 else ""
    more = " ".join(unused or error.unused_tokens or ())
    return f"`{' '.join(('capyctl', *chain))}` takes no {more!r}{f'; {meant}' if meant else ''}"


def _missing(app: App, words: Sequence[str], error: MissingArgumentError) -> str:
    """One line for a name that is not given, or an option that ends the line."""
    chain, _, _ = app.parse_commands(list(words))
    name = error.argument.name if error.argument is not None else ""
    command = f"`{' '.join(('capyctl', *chain))}`"
    return f"{command}: {name} needs a value" if name.startswith("-") else f"{command} needs <{name.lower()}>"


def _positional(command: Callable[..., object]) -> Iterator[str]:
    """`<name>`, `[<file>]`, `<names>...`: the words of a command that are no options."""
    for name, parameter in inspect.signature(command).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            yield f"<{name}>..."
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            yield f"<{name}>" if parameter.default is parameter.empty else f"[<{name}>]"


def _usage(app: App, words: Sequence[str]) -> str:
    """`capyctl start deployment <name> …`: as far as the words name a command."""
    chain, apps, _ = app.parse_commands(list(words))
    form = " ".join(("capyctl", *chain))
    if apps[-1].default_command is None:
        return f"{form} <{'|'.join(name for name in apps[-1] if not name.startswith('-'))}> [options]"
    return f"{' '.join((form, *_positional(apps[-1].default_command)))} [options]; `{form} --help` lists them"


def _asked_for_json(words: Sequence[str]) -> bool:
    """Whether errors are to be JSON, before anything has been parsed."""
    for word, following in itertools.zip_longest(words, words[1:]):
        if word in ("--json", "--format=json", "--output=json"):
            return True
        if word in ("--format", "--output") and following == "json":
            return True
    return False
