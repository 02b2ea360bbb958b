"""Run by an installation's own interpreter: `probe` says what the build can do, `serve` starts its server.

`serve` reads the command line twice with the installed parser: what CapyCTL rendered, and the whole. Whatever
CapyCTL owns must come out the same, however the rest spells or abbreviates. Then the server starts in this
process, by the code that `vllm serve` itself runs.

This file imports nothing of CapyCTL: it is copied beside its data and runs without CapyCTL's packages.
Source: engines 2.5, 3.3, 6.1.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from typing import Any, NoReturn

REFUSED = 78
RESERVED_FILE = "capyctl_vllm_reserved.json"
ROUTES = ("/sleep", "/wake_up", "/is_sleeping", "/collective_rpc", "/reset_prefix_cache")
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")
SLEEP = "enable_sleep_mode"
FILE_BYTES_MAX = 4 << 20
_ABSENT = object()


def refuse(code: str, message: str) -> NoReturn:
    """End with one line that CapyCTL reads from the log."""
    print(f"capyctl_refused {code} {message}", file=sys.stderr, flush=True)
    sys.exit(REFUSED)


def open_packages() -> str:
    """Put the environment's packages on the path, without running its `.pth` hooks; returns its prefix."""
    prefix = os.path.dirname(os.path.dirname(sys.executable))
    if os.path.exists(os.path.join(prefix, "pyvenv.cfg")):
        sys.prefix = sys.exec_prefix = prefix
    for lib in ("lib", "lib64"):
        name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        packages = os.path.join(prefix, lib, name, "site-packages")
        real = {os.path.realpath(place) for place in sys.path}
        if os.path.isdir(packages) and os.path.realpath(packages) not in real:
            sys.path.append(packages)
    here = os.path.dirname(os.path.abspath(__file__))
    if here not in sys.path:
        sys.path.append(here)
    return prefix


def load() -> tuple[Any, Any, frozenset[str]]:
    """The installed parser of `vllm serve`, its command, and the destinations that it defines."""
    serve = importlib.import_module("vllm.entrypoints.cli.serve")
    command = serve.cmd_init()[0]
    parser = _parser_class()(prog="vllm")
    options = command.subparser_init(parser.add_subparsers(required=False, dest="subparser"))
    return parser, command, frozenset(action.dest for action in options._actions)


def _parser_class() -> Any:
    for place in ("vllm.utils.argparse_utils", "vllm.utils"):
        try:
            return importlib.import_module(place).FlexibleArgumentParser
        except (ImportError, AttributeError):
            continue  # older builds keep it elsewhere
    raise ImportError("vllm has no FlexibleArgumentParser")


def owned() -> dict[str, list[str]]:
    """The destinations that CapyCTL owns: `always` there, and `if_present`."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), RESERVED_FILE), encoding="utf-8") as stream:
        found: dict[str, list[str]] = json.load(stream)
    return found


def lacks_core(defined: frozenset[str], always: list[str]) -> str:
    """What every launch needs and this parser does not define, or nothing."""
    missing = sorted(set(always) - defined)
    return f"an option for {', '.join(missing)}" if missing else ""


def lacks_deep_park(defined: frozenset[str]) -> str:
    """What a park needs and this build lacks, or nothing."""
    missing = sorted({SLEEP, "middleware"} - defined)
    if missing:
        return f"an option for {', '.join(missing)}"
    texts = _texts("entrypoints")
    for route in ROUTES:
        decorated = re.compile(r"\.(?:get|post)\(\s*[\"']" + re.escape(route) + r"[\"']")
        if not any(decorated.search(text) for text in texts):
            return f"the route {route}"
    return _lacks_platform()


def _lacks_platform() -> str:
    """Whether the platform says that it cannot sleep; one that cannot tell is taken to."""
    try:
        platform = importlib.import_module("vllm.platforms").current_platform
        unspecified = getattr(platform, "is_unspecified", lambda: False)()
        can = getattr(platform, "is_sleep_mode_available", lambda: True)()
    except Exception as error:  # a driver or a plugin failed; the engine's own start will say so
        print(f"the platform cannot be asked: {error!r}", file=sys.stderr)
        return ""
    return "" if can or unspecified else f"sleep mode on {getattr(platform, 'device_type', 'this device')}"


def lacks_metrics() -> str:
    """Which scraped gauge this build does not have, or nothing."""
    texts = _texts("")
    missing = [gauge for gauge in GAUGES if not any(gauge in text for text in texts)]
    return f"the gauge {missing[0]}" if missing else ""


def _texts(below: str) -> list[str]:
    """The package's own modules as text: nothing is executed to look for a name."""
    root = os.path.join(os.path.dirname(importlib.import_module("vllm").__file__ or ""), below)
    found: list[str] = []
    for place, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(place, name)
            if name.endswith(".py") and os.path.getsize(path) <= FILE_BYTES_MAX:
                with open(path, encoding="utf-8", errors="replace") as stream:
                    found.append(stream.read())
    return found


def compare(parser: Any, defined: frozenset[str], rendered: list[str], whole: list[str]) -> Any:
    """Both readings of the command line; returns the whole one. Ends the process when something owned differs."""
    names = owned()
    lacks = lacks_core(defined, names["always"])
    if lacks:
        refuse("capability_missing:core", f"this build lacks {lacks}")
    ours = vars(parser.parse_args(["serve", *rendered]))
    parsed = parser.parse_args(["serve", *whole])
    theirs = vars(parsed)
    for name in (*names["always"], *names["if_present"]):
        mine, other = ours.get(name, _ABSENT), theirs.get(name, _ABSENT)
        if mine is other or (mine is not _ABSENT and other is not _ABSENT and mine == other):
            continue
        refuse("effective_args_mismatch", f"the arguments change {name}, which CapyCTL owns")
    return parsed


def probe() -> None:
    """Print the capabilities of this build."""
    _, _, defined = load()
    found = {
        "core": lacks_core(defined, owned()["always"]),
        "deep_park": lacks_deep_park(defined),
        "metrics": lacks_metrics(),
    }
    print("capyctl_probe " + json.dumps(found), flush=True)


def serve(rendered: list[str], whole: list[str]) -> None:
    """Check the command line and become the server."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as `vllm serve` sets it
    sys.argv = ["vllm", "serve", *whole]
    parser, command, defined = load()
    args = compare(parser, defined, rendered, whole)
    if getattr(args, SLEEP, False):
        lacks = lacks_deep_park(defined)
        if lacks:
            refuse("capability_missing:deep_park", f"this build lacks {lacks}")
    configure = getattr(importlib.import_module("vllm.logger"), "configure_logging_from_args", None)
    if configure is not None:
        configure(args)
    command.validate(args)
    command.cmd(args)


def main(words: list[str]) -> None:
    """`probe`, or `serve <number of rendered words> <word>...`."""
    open_packages()
    if words[:1] == ["probe"]:
        probe()
        return
    count = int(words[1])
    serve(words[2 : 2 + count], words[2:])


if __name__ == "__main__":  # children of the engine import this file again and must not start it
    main(sys.argv[1:])
