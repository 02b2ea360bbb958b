"""What an engine did and was asked, one JSON line each, in `<prefix>/journal.jsonl`.

Lines are written whole by one `write` to a file opened for appending, so processes do not mix them.
`at` is the machine's monotonic clock in seconds: comparable between processes, immune to a set clock.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any


class Journal:
    def __init__(self, path: str) -> None:
        self._path = path
        self.launch = f"{os.getpid()}-{time.monotonic_ns()}"

    def write(self, event: str, **facts: Any) -> None:
        line = {"at": time.monotonic(), "launch": self.launch, "pid": os.getpid(), "event": event, **facts}
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, json.dumps(line, separators=(",", ":")).encode() + b"\n")
        finally:
            os.close(descriptor)
