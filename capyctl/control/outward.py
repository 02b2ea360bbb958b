"""What clients of the inference endpoint may read of a failure: the reason and the engine's last words, without places.

An operator sees a failure whole, in `status`. A client may be anybody with a key: it never reads addresses,
ports or directories of the machine. The last words of an engine are full of them.
Source: api 4, security 9.
"""

from __future__ import annotations

import re
from typing import Final

WORDS_KEPT: Final = 3
CHARS_MAX: Final = 600

_DIRECTORIES: Final = re.compile(r"(?<![\w:/])(?:[a-z]+://)?~?/(?:[^\s/'\"]+/)*(?=[^\s/'\"])")
_OCTET: Final = r"(?:0|[1-9]\d{0,2})"  # engines stamp their lines with 0.01.099.278, which is no address
_ADDRESS: Final = re.compile(
    rf"(?:[a-z]+://)?(?:(?<![\d.])(?:{_OCTET}\.){{3}}{_OCTET}(?![\d.])|\[[0-9a-f:]+\]|localhost)(?::\d{{1,5}})?"
)
_PORT: Final = re.compile(r"\bport(:?) \d{1,5}\b")


def words(reason: str) -> str:
    """A failure's reason and the last of the lines below it, on one line of at most CHARS_MAX characters."""
    head, *lines = reason.splitlines() or [""]
    text = " ".join(" ".join((head, *lines[-WORDS_KEPT:])).split())
    text = _ADDRESS.sub("<address>", text)
    text = _PORT.sub(r"port\1 <number>", text)
    text = _DIRECTORIES.sub("", text)
    return text if len(text) <= CHARS_MAX else text[: CHARS_MAX - 1] + "…"
