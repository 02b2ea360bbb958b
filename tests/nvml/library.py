"""Builds the simulated NVML, and puts it where `pynvml` finds it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from .card import VARIABLE, Card

SOURCE = Path(__file__).with_name("nvml.c")
NAME = "libnvidia-ml.so.1"  # also its soname: once loaded, dlopen finds it by that name
FLAGS = ("-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{NAME}")


class NoCompiler(RuntimeError):
    """These tests need a C compiler, and this machine has none."""


@functools.cache
def library() -> Path:
    """The built library, made once per source text. Raises: NoCompiler, and RuntimeError with its messages."""
    mark = hashlib.sha256(SOURCE.read_bytes() + repr(FLAGS).encode()).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"capyctl-nvml-{os.getuid()}-{mark}"
    if (place / NAME).exists():
        return place / NAME
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NoCompiler("the simulated NVML is C: install a C compiler (`cc` or `gcc`) to run these tests")
    with tempfile.TemporaryDirectory() as fresh:
        built = Path(fresh) / NAME
        made = subprocess.run([compiler, *FLAGS, "-o", built, SOURCE], capture_output=True, text=True, check=False)
        if made.returncode:
            raise RuntimeError(f"{compiler} does not build {SOURCE}:\n{made.stderr}")
        place.mkdir(mode=0o700, exist_ok=True)
        shutil.copy(built, place / f"{NAME}.{os.getpid()}")
        os.replace(place / f"{NAME}.{os.getpid()}", place / NAME)  # whoever builds it at the same time wins or loses
    return place / NAME


def environment(cards: Card) -> dict[str, str]:
    """What a process needs to see these cards."""
    ahead = os.environ.get("LD_LIBRARY_PATH")
    where = str(library().parent)
    return {VARIABLE: str(cards.state), "LD_LIBRARY_PATH": f"{where}:{ahead}" if ahead else where}


def load() -> None:
    """Have this process take the simulated library; for ever, since a loaded library is found by its name."""
    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
