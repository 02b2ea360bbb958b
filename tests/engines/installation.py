"""Lays out installations of simulated engines, turns their knobs, and reads what they were asked.

    vllm = lay_out("vllm", "0.32.0", tmp_path / "vllm")        # bin/vllm, bin/python, site-packages, dist-info
    vllm.set(load_s=2.0, faults=[lose("/sleep", times=1)])      # live, also while an engine runs
    assert [call["path"] for call in vllm.calls("/sleep", "/wake_up")] == ["/sleep"]

Nothing here is imported by the engines themselves; `simulated/` is copied into each installation.
"""

from __future__ import annotations

import atexit
import json
import os
import py_compile
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from .simulated.knobs import DEFAULTS
from .simulated.options import older

SOURCE = Path(__file__).with_name("simulated")
SHIMS = Path(__file__).with_name("shims")
CARD = Path(__file__).parent.parent / "nvml" / "card.py"
PACKAGE = "simulated_engine"  # its name in an installation
SHEBANG_MAX = 120

Call = dict[str, Any]


@attrs.frozen
class Installation:
    """One installation on disk. Several engines may run out of it; they share knobs and journal."""

    family: str
    version: str
    prefix: Path

    @property
    def executable(self) -> Path:
        """What the family is started by: `bin/vllm`, `bin/python3`, `bin/tensorfold`, the custom program."""
        return self.prefix / "bin" / {"sglang": "python3", "custom": "server"}.get(self.family, self.family)

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python3"

    @property
    def packages(self) -> Path:
        return site_packages(self.prefix)

    # --- knobs --------------------------------------------------------------------------------------------

    def set(self, *, of: str | None = None, **values: Any) -> None:
        """Turn knobs, for every engine of this installation or for one served name. Takes effect at once.

        Raises: KeyError for a knob that `simulated/knobs.py` does not list.
        """
        unknown = sorted(set(values) - set(DEFAULTS))
        if unknown:
            raise KeyError(f"no such knob: {unknown[0]}")
        now = self.knobs()
        target = now.setdefault("of", {}).setdefault(of, {}) if of is not None else now
        target.update({name: str(value) if isinstance(value, Path) else value for name, value in values.items()})
        fresh = self.prefix / f"knobs.{os.getpid()}.{time.monotonic_ns()}"
        fresh.write_text(json.dumps(now, indent=1))
        os.replace(fresh, self.prefix / "knobs.json")

    def knobs(self) -> dict[str, Any]:
        """What was set, without the defaults."""
        try:
            now: dict[str, Any] = json.loads((self.prefix / "knobs.json").read_text())
        except FileNotFoundError:
            return {}
        return now

    # --- journal ------------------------------------------------------------------------------------------

    def journal(self, *events: str) -> list[Call]:
        """Every whole line, or those of the named events: start, ready, call, answered, sigterm, segment, …"""
        try:
            text = (self.prefix / "journal.jsonl").read_text()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind("\n") + 1]  # the last one may be being written
        lines = [json.loads(line) for line in whole.splitlines()]
        return [line for line in lines if not events or line["event"] in events]

    def calls(self, *paths: str, of: str | None = None) -> list[Call]:
        """Requests as they arrived, in order: method, path, query, key (inference, admin, none, wrong), body, at.

        Args:
          paths: only these; all when none is named (`/metrics` and `/slots` are never journaled).
          of: only those to engines with this served name.
        """
        launches = None if of is None else {start["launch"] for start in self.starts() if served_name(start) == of}
        return [
            call
            for call in self.journal("call")
            if (not paths or call["path"] in paths) and (launches is None or call["launch"] in launches)
        ]

    def starts(self) -> list[Call]:
        """Each launch: argv, the whole environment, pid."""
        return self.journal("start")

    def segments(self) -> list[Path]:
        """Shared-memory files that engines of this installation made and that are still there."""
        try:
            forgotten = (self.prefix / "segments").read_text().splitlines()
        except FileNotFoundError:
            forgotten = []
        made = [*forgotten, *(line["path"] for line in self.journal("segment"))]
        return [path for one in made if (path := Path(one)).exists()]

    def sweep(self) -> None:
        """Remove the shared memory that engines of this installation left. Done at the end of the test process too."""
        for path in self.segments():
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Forget the journal, but not what lies in shared memory."""
        there = self.segments()
        (self.prefix / "segments").write_text("".join(f"{path}\n" for path in there))
        (self.prefix / "journal.jsonl").unlink(missing_ok=True)


def served_name(start: Call) -> str | None:
    """The name that a launch serves, out of its command line."""
    argv = start["argv"]
    for at, word in enumerate(argv):
        for option in ("--served-model-name", "--name", "--alias"):
            if word == option and at + 1 < len(argv):
                return str(argv[at + 1])
            if word.startswith(f"{option}="):
                return str(word.partition("=")[2])
    return start.get("served_name")


# --- faults of routes, by what they are for ---------------------------------------------------------------


def hang(route: str = "*", times: int | None = None) -> dict[str, Any]:
    """No answer, and nothing done."""
    return {"route": route, "then": "hang", "perform": False, "times": times}


def lose(route: str, times: int | None = None) -> dict[str, Any]:
    """Done, and the answer is lost: the connection closes."""
    return {"route": route, "then": "close", "perform": True, "times": times}


def fail(
    route: str, status: int = 500, *, perform: bool = False, times: int | None = None, **more: Any
) -> dict[str, Any]:
    """An error answer; with `perform` after doing what was asked. `body` and `pad_bytes` say what it holds."""
    return {"route": route, "status": status, "perform": perform, "times": times, **more}


def slow(route: str, wait_s: float, times: int | None = None) -> dict[str, Any]:
    """Answered as ever, later."""
    return {"route": route, "wait_s": wait_s, "times": times}


def die_at(route: str, *, after: bool = False, who: str = "api", signal: int | None = None) -> dict[str, Any]:
    """The front or a worker ends when the request comes, or right after its answer."""
    then = "answer_then_die" if after else "die"
    return {"route": route, "then": then, "perform": after, "who": who, "signal": signal}


# --- layout -----------------------------------------------------------------------------------------------


def lay_out(
    family: str,
    version: str,
    prefix: Path,
    *,
    cards: Path | None = None,
    conda: bool = False,
    without: Sequence[str] = (),
    **knobs: Any,
) -> Installation:
    """An installation of `family` (vllm, sglang, tensorfold, custom) at `version` in the directory `prefix`.

    Args:
      cards: the state file of the simulated cards; None is a machine without cards.
      conda: a conda environment instead of a venv.
      without: parts that are missing: `dist-info`, `entry` (the program), `torch_memory_saver`, `ninja`, `nvcc`,
        `nccl`, and routes of vLLM by their path.
      knobs: set before anything runs.
    """
    packages = site_packages(prefix)
    packages.mkdir(parents=True)
    (prefix / "bin").mkdir()
    base = Path(os.path.realpath(sys._base_executable))  # type: ignore[attr-defined]
    for name, target in (
        ("python3", str(base)),
        ("python", "python3"),
        (f"python3.{sys.version_info.minor}", "python3"),
    ):
        (prefix / "bin" / name).symlink_to(target)
    if conda:
        (prefix / "conda-meta").mkdir()
        # A conda interpreter is no link; ours finds its library through the same file that a venv has.
    (prefix / "pyvenv.cfg").write_text(
        f"home = {base.parent}\ninclude-system-site-packages = false\nversion = {sys.version.split()[0]}\n"
    )
    _copy(SOURCE, packages / PACKAGE)
    if CARD.exists():
        shutil.copy2(CARD, packages / PACKAGE / "card.py")
    installation = Installation(family, version, prefix)
    atexit.register(installation.sweep)  # engines that tests kill leave it, as the real ones do
    LAYOUTS[family](installation, without)
    installation.set(**(knobs | ({"card_state": str(cards)} if cards is not None else {})))
    return installation


def site_packages(prefix: Path) -> Path:
    return prefix / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"


def _copy(source: Path, target: Path) -> None:
    """Copy a package with its bytecode, so that an engine starts without compiling anything."""
    for path in sorted(source.rglob("*.py")):
        py_compile.compile(str(path), doraise=True, quiet=1)
    shutil.copytree(source, target, copy_function=shutil.copy2)


def _distribution(
    installation: Installation, name: str, entry_points: Mapping[str, str], version: str | None = None
) -> None:
    place = installation.packages / f"{name.replace('-', '_')}-{version or installation.version}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: {version or installation.version}\n"
    )
    lines = [f"{command} = {target}" for command, target in entry_points.items()]
    (place / "entry_points.txt").write_text("\n".join(["[console_scripts]", *lines, ""]))
    (place / "RECORD").write_text("")
    (place / "INSTALLER").write_text("pip\n")


def _script(installation: Installation, name: str, module: str, function: str = "main") -> None:
    """A console script as pip writes it, also for interpreters whose path is too long for a `#!` line."""
    python = installation.prefix / "bin" / "python3"
    first = f"#!{python}\n"
    if len(first) > SHEBANG_MAX or " " in first:
        first = f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"
    script = installation.prefix / "bin" / name
    body = f"import sys\nfrom {module} import {function}\nif __name__ == '__main__':\n    sys.exit({function}())\n"
    script.write_text(first + body)
    script.chmod(0o755)


def _shims(installation: Installation, package: str) -> None:
    """The family's own package: thin modules at the places where the real one has them."""
    _copy(SHIMS / package, installation.packages / package)
    (installation.packages / package / "_version.py").write_text(f'__version__ = version = "{installation.version}"\n')


def _lay_out_vllm(installation: Installation, without: Sequence[str]) -> None:
    _shims(installation, "vllm")
    routes = [part for part in without if part.startswith("/")]
    for module in (installation.packages / "vllm" / "entrypoints" / "serve" / "dev").glob("*/api_router.py"):
        lines = module.read_text().splitlines(keepends=True)
        module.write_text("".join(line for line in lines if not any(f'("{route}")' in line for route in routes)))
    installation.set(absent_routes=routes)
    if "dist-info" not in without:
        _distribution(installation, "vllm", {"vllm": "vllm.entrypoints.cli.main:main"})
    if "entry" not in without:
        _script(installation, "vllm", "vllm.entrypoints.cli.main")


def _lay_out_sglang(installation: Installation, without: Sequence[str]) -> None:
    _shims(installation, "sglang")
    if older(installation.version, "0.5.22"):
        (installation.packages / "sglang" / "srt" / "entrypoints" / "decisions.py").unlink()
    if "dist-info" not in without:
        _distribution(installation, "sglang", {"sglang": "sglang.cli.main:main"})
    if "torch_memory_saver" not in without:
        _copy(SHIMS / "torch_memory_saver", installation.packages / "torch_memory_saver")
        _distribution(installation, "torch-memory-saver", {}, "0.0.9")
    # From 0.5.22 on a package lies beside site-packages and is found by a `.pth` hook alone.
    hidden = installation.packages / "nvidia_cutlass_dsl" / "python_packages" / "cutlass"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("")
    (installation.packages / "nvidia_cutlass_dsl.pth").write_text("nvidia_cutlass_dsl/python_packages\n")


def _lay_out_tensorfold(installation: Installation, without: Sequence[str]) -> None:
    _shims(installation, "tensorfold")
    if "dist-info" not in without:
        _distribution(installation, "tensorfold", {"tensorfold": "tensorfold.cli:main"})
    if "entry" not in without:
        _script(installation, "tensorfold", "tensorfold.cli")
    tools = {"ninja": installation.prefix / "bin" / "ninja"}
    tools["nvcc"] = installation.packages / "nvidia" / "cu13" / "bin" / "nvcc"
    for name, place in tools.items():
        if name not in without:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("#!/bin/sh\nexit 1\n")  # it is looked for, and not run
            place.chmod(0o755)
    if "nccl" not in without:
        library = installation.packages / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
        library.parent.mkdir(parents=True)
        library.write_bytes(b"\x7fELF")
        _distribution(installation, "nvidia-nccl-cu13", {}, "2.28.9")


def _lay_out_custom(installation: Installation, without: Sequence[str]) -> None:
    _shims(installation, "other_server")
    if "entry" not in without:
        _script(installation, "server", "other_server")


LAYOUTS: dict[str, Callable[[Installation, Sequence[str]], None]] = {
    "vllm": _lay_out_vllm,
    "sglang": _lay_out_sglang,
    "tensorfold": _lay_out_tensorfold,
    "custom": _lay_out_custom,
}
