"""The program of a custom engine, and the pin by which a changed one is known.

The pin covers the program's bytes, where it really lies, and the manifest. What the program loads beside
itself is not covered: that is the operator's to confirm.
Source: engines 10 (pinning); config 9.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path

from capyctl.documents import strict
from capyctl.documents.custom_engine import Manifest
from capyctl.errors import Refusal

PROGRAM_BYTES_MAX = 4 << 30


def check_program(path: Path) -> None:
    """Whether `path` is a program that a launch can start: absolute, a regular file, executable.

    A link is followed, since the interpreter of a Python environment is one.
    Raises: Refusal `engine_not_found`, or `engine_unsupported` saying what it is not.
    """
    if not path.is_absolute():
        raise Refusal("engine_unsupported", f"--custom {path}: expected the program's absolute path")
    try:
        status = os.stat(path)
    except OSError as wrong:
        raise Refusal("engine_not_found", f"{path}: {os.strerror(wrong.errno or 0)}") from None
    if not stat.S_ISREG(status.st_mode):
        raise Refusal("engine_unsupported", f"{path} is not a regular file")
    if not os.access(path, os.X_OK):
        raise Refusal("engine_unsupported", f"{path} is not executable. Try: chmod +x {path}")
    if status.st_mode & stat.S_IWOTH:
        raise Refusal("engine_unsupported", f"{path} can be written by every user. Try: chmod o-w {path}")
    if status.st_size > PROGRAM_BYTES_MAX:
        raise Refusal("engine_unsupported", f"{path} is larger than {PROGRAM_BYTES_MAX >> 30} GiB")


_measured: dict[str, tuple[tuple[str, int, int, int, int], str]] = {}


def pin(program: Path, manifest: Manifest) -> str:
    """`sha256:` over the program and the manifest. Blocking; an unchanged program is not read again.

    Raises: Refusal `installation_drift` when the program cannot be read any more.
    """
    try:
        real = os.path.realpath(program)
        status = os.stat(real)
        identity = (real, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        known = _measured.get(str(program))
        content = known[1] if known is not None and known[0] == identity else _content(real)
    except OSError as wrong:
        raise Refusal("installation_drift", f"{program} cannot be read: {wrong.strerror}") from None
    _measured[str(program)] = (identity, content)
    said = json.dumps([str(program), real, content, strict.canonical(manifest)], separators=(",", ":"))
    return "sha256:" + hashlib.sha256(said.encode()).hexdigest()


def _content(real: str) -> str:
    with open(real, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
