"""Log lines that can be searched: a dotted name in the past tense, and facts as fields.

A thin wrapper over the standard library. Text on a terminal, one JSON object per line otherwise.
Client strings are escaped, so that one event is always one line. Keys, tokens, prompts and
completions are never fields.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any, Final, TextIO

ROOT: Final = "capyctl"


class Log:
    """Takes fields as keywords: `log.info("machine.moved", lane=lane, now="ready")`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"{ROOT}.{name}")

    def debug(self, message: str, /, **fields: object) -> None:
        """For a developer."""
        self._say(logging.DEBUG, message, fields)

    def info(self, message: str, /, **fields: object) -> None:
        """What happened."""
        self._say(logging.INFO, message, fields)

    def warning(self, message: str, /, **fields: object) -> None:
        """A person may act."""
        self._say(logging.WARNING, message, fields)

    def error(self, message: str, /, **fields: object) -> None:
        """A person must act."""
        self._say(logging.ERROR, message, fields)

    def failed(self, message: str, wrong: BaseException, /, **fields: object) -> None:
        """A fault of ours, with its trace."""
        self._logger.error(message, exc_info=wrong, extra={"fields": fields})

    def _say(self, level: int, message: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, message, extra={"fields": fields})


class TextForm(logging.Formatter):
    """`2026-11-29T17:36:27.123Z info machine.moved lane=… now=ready`."""

    def format(self, record: logging.LogRecord) -> str:
        words = [_stamp(record), record.levelname.lower(), _plain(record.getMessage())]
        words += [f"{name}={_word(value)}" for name, value in _fields(record).items()]
        return " ".join(words) + _trace(record, "\n")


class JsonForm(logging.Formatter):
    """One object per line: time, level, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line.update((name, _json(value)) for name, value in _fields(record).items() if value is not None)
        if trace := _trace(record, ""):
            line["trace"] = trace
        return json.dumps(line, ensure_ascii=True)


def configure(form: str, stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Send every log line of this process to `stream` (stderr) as `text` or `json`. Replaces what was set before."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonForm() if form == "json" else TextForm())
    root = logging.getLogger(ROOT)
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "fields", {})
    return fields


def _stamp(record: logging.LogRecord) -> str:
    at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{int(record.msecs):03d}Z"


def _trace(record: logging.LogRecord, before: str) -> str:
    if not record.exc_info or record.exc_info[0] is None:
        return ""
    return before + logging.Formatter().formatException(record.exc_info)


def _plain(text: str) -> str:
    """No control character, so that nothing a client sent starts a line of its own."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _word(value: object) -> str:
    if value is None:
        return "-"
    text = _plain(str(value)) if not isinstance(value, (list, tuple)) else "[" + ",".join(map(_word, value)) + "]"
    return json.dumps(text) if " " in text or '"' in text or text == "" else text


def _json(value: object) -> Any:  # Any: whatever json takes
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_json(each) for each in value]
    return str(value)
