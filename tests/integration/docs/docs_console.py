"""Transcripts in the pages of `docs/`, read, run in one throw-away home, and compared by their shape.

A ```console block holds commands after `$ ` (continued after a closing backslash) and what they print.
`…` in a line stands for anything, and a line that is only `…` for any lines. What differs from machine to
machine (identities, sizes, times, ports, the home, the host's name) is masked on both sides. A ```yaml
block whose first line is `# name.yaml` is a file that the reader saves; a ```python block is run as it is.
A comment `<!-- simulated coder: {…} -->` turns knobs of the simulated engine that serves `coder`.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import attrs

from capyctl import __version__
from capyctl.cli.demo_parts import model
from capyctl.errors import CODES
from capyctl.roles.machine import machine_name
from tests.ports import neighbours

ROOT: Final = Path(__file__).resolve().parents[3]
DOCS_HOME: Final = "/home/ada"
DOCS_HOST: Final = "box"
MARK: Final = "@@done"

_FENCE: Final = re.compile(r"^```(?P<of>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_ASIDE: Final = re.compile(r"^<!-- (?P<of>simulated) (?P<text>.*) -->$", re.MULTILINE)
_ERROR: Final = re.compile(r"^error \[([a-z_]+)(?::[^\]]*)?\]: ", re.MULTILINE)
_JSON: Final = re.compile(r'^(data: |: x-capyctl-\w+ |)\{"')
_MASKS: Final = (
    (re.compile(r"sha256:[0-9a-f]{64}"), "<digest>"),
    (re.compile(r"capy-(?:[\w-]{43}|…)"), "<key>"),
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z"), "<time>"),
    (re.compile(r"^date: .*$"), "date: <time>"),
    (re.compile(r"^content-length: \d+$"), "content-length: <n>"),
    (re.compile(r"\b20\d\d\.\d+\.\d+\b"), "<version>"),
    (re.compile(r"\b\d+(\.\d+)? (GiB|MiB)\b"), "<size>"),
    (re.compile(r"\b\d+(\.\d+)?( s|s|ms)\b"), "<duration>"),
    (re.compile(r"\b\d+ tokens\b"), "<n> tokens"),
    (re.compile(r"(\bpid +|process )\d+"), r"\1<pid>"),
    (re.compile(r"\b\d{5,}\b"), "<n>"),
    (re.compile(r" {2,}"), "  "),
)
_BUSY: Final = re.compile(r"\n*^(?:\w+: )+managed limit .* until other programs free memory$", re.MULTILINE)
"""What a role says of a machine whose memory others use at that moment: true, and on no page."""
_OURS: Final = (
    re.compile(r"^a role runs here \(pid \d+\) with other settings: [\w.]+ \S+ \(env\).*\n?", re.MULTILINE),
    re.compile(r"(?<=\(set\))(?:, [\w.]+ \S+ \(env\))+(?:, and \d+ more)?"),
)
"""What is said of the variables that only the role of a test has, for its ports and its patience."""
_NUMBER: Final = re.compile(r"(?<![\w.])-?\d+(\.\d+)?(?![\w.])")
_ULID: Final = re.compile(r"\b[0-7][0-9A-HJKMNP-TV-Z]{25}\b")


@attrs.frozen
class Block:
    """One fenced block: its language, its text, and the line of the page that it begins on."""

    page: str
    line: int
    language: str
    text: str


@attrs.frozen
class Command:
    """One command of a transcript and the lines that the page shows under it."""

    where: str
    words: str
    shown: str


def blocks(page: Path, under: str | None = None) -> list[Block]:
    """The fenced blocks of a page that name a language, and comments to simulated engines, in their order.

    Args:
      under: only those below that second-level heading.
    """
    text = page.read_text("utf-8")
    first, last = 0, len(text)
    if under is not None:
        first = text.index(f"\n## {under}\n")
        last = text.find("\n## ", first + 1) % (len(text) + 1)
    found = [*_FENCE.finditer(text, first, last), *_ASIDE.finditer(text, first, last)]
    return [
        Block(page.name, text.count("\n", 0, one.start()) + 1, one["of"], one["text"])
        for one in sorted(found, key=lambda one: one.start())
    ]


def commands(block: Block) -> list[Command]:
    """The commands of a console block, each with what follows it."""
    found: list[tuple[int, list[str], list[str]]] = []
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        if line.startswith("$ "):
            found.append((number, [line[2:]], []))
        elif found and not found[-1][2] and found[-1][1][-1].endswith("\\"):
            found[-1][1].append(line)
        elif found:
            found[-1][2].append(line)
        else:
            raise AssertionError(f"{block.page}:{number}: a console block begins with a command")
    return [
        Command(f"{block.page}:{number}", "\n".join(words), "\n".join(shown).strip()) for number, words, shown in found
    ]


def shape(text: str) -> str:
    """Output with everything masked that another run prints differently."""
    seen: dict[str, str] = {}

    def identity(match: re.Match[str]) -> str:
        return seen.setdefault(match[0], f"<id{len(seen) + 1}>")

    lines = []
    for line in _ULID.sub(identity, text.replace(__version__, "<release>")).splitlines():
        if _JSON.match(line):
            line = _NUMBER.sub("<n>", line)
        for pattern, mask in _MASKS:
            line = pattern.sub(mask, line)
        lines.append(line.rstrip())
    return "\n".join(lines).strip()


def fits(shown: str, printed: str) -> bool:
    """Whether what was printed has the shape of what the page shows."""
    parts = []
    for line in shape(shown).splitlines():
        if line.strip() == "…":
            parts.append(r"(?:.*\n)*?")
        else:
            parts.append(".*".join(map(re.escape, line.split("…"))) + r"\n")
    for pattern in (_BUSY, *_OURS):
        printed = pattern.sub("", printed)
    return re.fullmatch("".join(parts), shape(printed) + "\n" if printed.strip() else "") is not None


@attrs.define(eq=False)
class Home:
    """A throw-away home with the real engine and the real small model in it, a shell, and at most one role."""

    path: Path
    shell: subprocess.Popen[str] = attrs.field(init=False)
    role: subprocess.Popen[bytes] | None = None
    starts: int = 0
    ports: dict[str, str] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        (self.path / "venvs").mkdir(parents=True)
        (self.path / "models").mkdir()
        self.furnish()
        (self.path / "bin").mkdir()
        program = self.path / "bin/capyctl"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m capyctl "$@"\n')
        program.chmod(0o755)
        self.shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.path,
            env=self.environ(),
        )

    def furnish(self) -> None:
        """Put engines and models into the home."""
        (self.path / "venvs/llamacpp").symlink_to(sys.prefix)
        folder = self.path / "models/smollm2"
        folder.mkdir()
        weights = model(lambda text: None)
        os.link(weights, folder / weights.name)

    def environ(self) -> dict[str, str]:
        """Nothing of the caller's settings."""
        return {
            "HOME": str(self.path),
            "PATH": f"{self.path / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "LC_ALL": "C.UTF-8",
        }

    def save(self, block: Block) -> None:
        """Write a yaml block that names its file."""
        name = re.match(r"# ([\w.-]+\.yaml)\b", block.text)
        if name is not None:
            (self.path / name[1]).write_text(block.text)

    def run(self, command: Command) -> str:
        """Run one command as a reader would, and return what it prints in the page's names. Checks its exit status."""
        words = self._here(command.words)
        if words.startswith("capyctl start standalone"):
            return self._there(self._start(words))
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        self.shell.stdin.write(f"{words}\nprintf '\\n{MARK} %d\\n' $?\n")
        self.shell.stdin.flush()
        lines: list[str] = []
        while not (line := self.shell.stdout.readline()).startswith(MARK):
            assert line, f"{command.where}: the shell ended"
            lines.append(line)
        printed = self._there("".join(lines)).strip()
        refused = _ERROR.search(printed)
        expected = CODES[refused[1]].exit if refused and "|" not in words else 0
        assert int(line.split()[1]) == expected, f"{command.where}: exit {line.split()[1]}, and it printed:\n{printed}"
        return printed

    def run_python(self, block: Block) -> str:
        """Run a python block in the shell's environment."""
        key = re.search(r"api_key: (\S+)", (self.path / ".local/state/capyctl/identity/credentials").read_text())
        assert key is not None
        done = subprocess.run(
            [sys.executable, "-c", self._here(block.text)],
            env={**self.environ(), "KEY": key[1]},
            cwd=self.path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{block.page}:{block.line}: {done.stderr}"
        return self._there(done.stdout)

    def _start(self, words: str) -> str:
        """Start the role, on ports of its own and in its terminal's form; its banner."""
        first = neighbours(16)
        self.starts += 1
        said = self.path / f"role-{self.starts}.log"
        with said.open("wb") as stderr:
            self.role = subprocess.Popen(
                [*shlex.split(words.replace("capyctl", str(self.path / "bin/capyctl"), 1)), "--format", "text"],
                env={
                    **self.environ(),
                    "CAPYCTL_INFERENCE_ADDR": self.ports.get("0.0.0.0:8443", "127.0.0.1:0"),
                    "CAPYCTL_MANAGEMENT_ADDR": self.ports.get("127.0.0.1:7443", "127.0.0.1:0"),
                    "CAPYCTL_ENGINE_PORTS": f"{first}-{first + 15}",
                    "CAPYCTL_SET__HOST__RESOURCE_POLICY__QUEUE__ADMISSION_WINDOW": "300ms",  # readers have 2 s
                },
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                cwd=self.path,
            )
        ends_at = time.monotonic() + 90
        while "Credentials" not in (text := said.read_text()):
            assert self.role.poll() is None, text
            assert time.monotonic() < ends_at, text
            time.sleep(0.05)
        lines = text.splitlines()
        banner = lines[next(n for n, line in enumerate(lines) if line.startswith("capyctl ")) :][:7]
        for name, row in (("0.0.0.0:8443", "Inference"), ("127.0.0.1:7443", "Management")):
            address = next(line.split()[1] for line in banner if line.strip().startswith(row))
            self.ports[name] = address
        return "\n".join(banner)

    def _here(self, words: str) -> str:
        """A command of the page for this machine: its ports, and one thread for engines."""
        for name, address in self.ports.items():
            port = name.rpartition(":")[2]
            words = words.replace(f"localhost:{port}", address).replace(f"127.0.0.1:{port}", address)
        return words.replace("--arg=4", "--arg=1")

    def _there(self, text: str) -> str:
        """What was printed here, in the names of the page."""
        for name, address in self.ports.items():
            text = text.replace(address, name)
        text = re.sub(rf"(?<![\w/.-]){re.escape(machine_name())}(?![\w/-])", DOCS_HOST, text)
        return text.replace(str(self.path), DOCS_HOME)

    def close(self) -> None:
        """End the engines by the product's own command, then the role and the shell; nothing may be left."""
        if self.role is not None and self.role.poll() is None:
            subprocess.run(
                [self.path / "bin/capyctl", "drain", "standalone"], env=self.environ(), capture_output=True, check=False
            )
            self.role.terminate()
            self.role.wait(60)
        assert self.shell.stdin is not None
        self.shell.stdin.close()
        self.shell.wait(60)
        for process in self.left():
            os.kill(process, signal.SIGKILL)

    def left(self) -> list[int]:
        """Pids of processes that still name this home in their command line."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and str(self.path).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended while it was looked at
        return found
