"""Compares the simulated vLLM with a real installation: its options, its routes, its words for bad options.

    python tests/engines/compare_vllm.py <environment> [--write]

Prints every difference and ends with 1 when there is one. `--write` records the real parser's options anew in
`simulated/vllm_options.json`. Needs no card; importing vLLM takes some 10 s, and it is imported twice.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.engines.checkpoints import write_checkpoint
from tests.engines.installation import lay_out
from tests.engines.simulated.options import facts
from tests.engines.simulated.vllm import Vllm

OPTIONS = Path(__file__).with_name("simulated") / "vllm_options.json"
READ_OPTIONS = """
import ast, json, sys
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.entrypoints.launchers.cli_args import make_arg_parser

KINDS = {"BooleanOptionalAction": "switch", "_StoreTrueAction": "flag", "_AppendAction": "append"}

def named(convert):
    name = getattr(convert, "__qualname__", str(convert)).rsplit(".", 1)[-1].strip("<>")
    inner = [cell.cell_contents for cell in getattr(convert, "__closure__", None) or ()]
    return f"optional:{named(inner[0])}" if name == "_optional_type" else name

rows = []
for action in make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))._actions:
    if action.dest == "help":
        continue
    kind = KINDS.get(type(action).__name__, "value") if action.option_strings else "positional"
    row = {"names": action.option_strings, "dest": action.dest, "kind": kind}
    if action.nargs not in (None, 0):
        row["nargs"] = action.nargs
    if action.type is not None:
        row["type"] = named(action.type)
    if action.choices:
        row["choices"] = [str(choice) for choice in action.choices]
    try:
        default = ast.literal_eval(repr(action.default))
    except (ValueError, SyntaxError):
        default = None
    default = list(default) if isinstance(default, (tuple, set)) else default
    default = {"suppressed": True} if default == "==SUPPRESS==" else default
    if default not in (None, False) or (kind == "switch" and default is not None):
        row["default"] = default
    rows.append(row)
print("facts " + json.dumps(rows))
"""
READ_ROUTES = """
import json, os, sys
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.app import build_app

def walk(routes):
    for route in routes:
        if hasattr(route, "original_router"):
            yield from walk(route.original_router.routes)
        elif hasattr(route, "routes") and not hasattr(route, "methods"):
            yield from walk(route.routes)
        else:
            for method in getattr(route, "methods", None) or ():
                yield method, route.path

args = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(["m"])
print("facts " + json.dumps(sorted(set(walk(build_app(args, ("generate",)).routes)))))
"""
BAD = (
    ["--bogus", "1"],
    ["--max-num", "3"],
    ["--max-model-len", "abc"],
    ["--kv-cache-memory-bytes", "4GiB"],
    ["--speculative-config", "{bad"],
    ["--tensor-parallel-size", "x"],
    ["--dtype", "int3"],
)


def read(environment: Path, code: str, **env: str) -> Any:
    """What a piece of code prints under the installation's interpreter."""
    environ = {"PATH": os.environ["PATH"], "VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1", **env}
    done = subprocess.run([environment / "bin" / "python", "-c", code], capture_output=True, text=True, env=environ)
    marked = [line for line in done.stdout.splitlines() if line.startswith("facts ")]
    if not marked:
        raise SystemExit(f"the real vLLM could not be asked:\n{done.stderr[-2000:]}")
    return json.loads(marked[0][6:])


def options(real: list[dict[str, Any]]) -> list[str]:
    """Differences of the recorded options from the real ones."""
    ours = {row["dest"]: row for row in facts("vllm")}
    theirs = {row["dest"]: row for row in real}
    found = [f"option {dest}: the real one has it, ours does not" for dest in theirs if dest not in ours]
    found += [f"option {dest}: ours has it, the real one does not" for dest in ours if dest not in theirs]
    for dest in sorted(set(ours) & set(theirs)):
        if ours[dest] != theirs[dest]:
            found.append(f"option {dest}: recorded {ours[dest]}, real {theirs[dest]}")
    return found


def routes(real: list[list[str]], dev: str) -> list[str]:
    """Routes that the simulated engine answers and the real one does not."""
    os.environ["VLLM_SERVER_DEV_MODE"] = dev
    with tempfile.TemporaryDirectory() as place:
        engine = Vllm("0.32.0", place)
        engine.dev, engine.log = dev, lambda *_, **__: None  # type: ignore[method-assign]
        engine.add_routes()
    there = {(method, path) for method, path in real}
    return [
        f"route {method} {path} (dev mode {dev}): only ours"
        for method, path in engine.routes
        if (method, path) not in there
    ]


def words(environment: Path) -> list[str]:
    """Last lines for bad options that differ, addresses of objects aside."""
    with tempfile.TemporaryDirectory() as place:
        ours = lay_out("vllm", "0.32.0", Path(place) / "vllm")
        model = write_checkpoint(Path(place) / "m")
        found = []
        for bad in BAD:
            said = [_last(program, str(model), bad) for program in (environment / "bin" / "vllm", ours.executable)]
            if said[0] != said[1]:
                found.append(f"{' '.join(bad)}: real {said[0]}, ours {said[1]}")
    return found


def _last(program: Path, model: str, bad: list[str]) -> tuple[int, str]:
    environ = {"PATH": os.environ["PATH"], "VLLM_PLUGINS": ""}
    done = subprocess.run([program, "serve", model, *bad], capture_output=True, text=True, env=environ)
    last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
    return done.returncode, last.partition(" at 0x")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    real = read(args.environment, READ_OPTIONS)
    if args.write:
        lines = ",\n".join(json.dumps(row) for row in real)
        source = "what the parser of vllm 0.32.0 defines, read by compare_vllm.py --write"
        OPTIONS.write_text(f'{{"source": {json.dumps(source)},\n"options": [\n{lines}\n]}}\n')
    found = options(real)
    for dev in ("0", "1"):
        found += routes(read(args.environment, READ_ROUTES, VLLM_SERVER_DEV_MODE=dev), dev)
    found += words(args.environment)
    print("\n".join(found) or f"{len(real)} options, the routes and {len(BAD)} refusals are the same")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
