"""The program between an engine and its log file: one per launch, outside the engine's group.

Run by path with `python -I -S`, so it imports the standard library only; the host also imports it for
`Redactor`. Standard input carries one JSON object `{"path": ..., "secrets": [...]}` and ends;
descriptor 3 is the engine's output. It ends at the end of that output and at nothing else: not with
the role, not with its terminal, not by a SIGTERM that was meant for a whole service, because an engine
whose pipe nobody reads hangs, and its last words are the ones that matter.

Two threads: one empties the pipe whatever the disk does, into a queue of bounded size; the other
redacts and writes. What does not fit the queue is dropped, the oldest first, and counted; so is what the disk
refuses.
"""

import collections
import contextlib
import json
import os
import re
import signal
import sys
import threading

OUTPUT = 3
READ_BYTES = 1 << 16
QUEUE_BYTES = 4 << 20  # what may wait for the disk
LINE_BYTES = 1 << 16  # a longer line is cut
ROTATE_BYTES = 16 << 20
KEPT = 2  # path.1 and path.2
MASK = "<redacted>"

_WORD = (
    r"(?:secret|token|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|credentials?|authorization)"
)
_NAMED = re.compile(
    # name = value, "name": "value", --name value; the secret word ends the name, so n_tokens is none
    rf"""(?i)((?:^|(?<=[^\w]))(?:[\w.-]*?[_.-])?{_WORD}["']?(?:\s*[=:]\s*|\s+))"""
    r"""((?:bearer|basic)\s+)?("[^"]*"?|'[^']*'?|[^\s"',;&}\])]+)"""
)
_FLAG = re.compile(r"--[\w.-]*$")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+([A-Za-z0-9._~+/=-]{4,})")
_KEYS = re.compile(  # keys that tell by their shape whose they are, however short
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{6,}"
    r"|sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    r"|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|xox[a-z]-[A-Za-z0-9-]{8,}"
    r"|AIza[A-Za-z0-9_-]{30,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?"
    r"|capy-[A-Za-z0-9_-]{24,}"
    r")"
)
_URL = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*://)([^\s/?#\"'<>@]*@)?([^\s?#\"'<>]*)(\?[^\s#\"'<>]*)?(#[^\s\"'<>]*)?")
_RUN = re.compile(r"[A-Za-z0-9+/=_-]{48,}")
_CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PLAIN = re.compile(r"(?i)(?:[0-9.,]{1,8}|true|false|null|none)$")  # as in "EOS token = 2": no credential


class Redactor:
    """Takes secrets out of one line at a time: known values, then everything that looks like one."""

    def __init__(self, secrets: list[str]) -> None:
        # The longest first, so that a secret which contains another is replaced whole.
        self.secrets = sorted({secret for secret in secrets if len(secret) >= 4}, key=len, reverse=True)

    def line(self, text: str) -> str:
        """The line without secrets, terminal escapes and control characters."""
        if not text.isprintable():
            text = _CONTROL.sub("", text)
        for secret in self.secrets:
            if secret in text:
                text = text.replace(secret, MASK)
        if "://" in text:
            text = _URL.sub(_url, text)
        text = _BEARER.sub(rf"\1 {MASK}", text)
        text = _NAMED.sub(_named, text)
        text = _KEYS.sub(MASK, text)
        return _RUN.sub(_run, text) if len(text) >= 48 else text

    @property
    def longest(self) -> int:
        return max((len(secret) for secret in self.secrets), default=0)


def _url(match: re.Match[str]) -> str:
    scheme, user, place, query, fragment = match.groups()
    return "".join(
        (
            scheme,
            f"{MASK}@" if user else "",
            place,
            f"?{MASK}" if query else "",
            f"#{MASK}" if fragment else "",
        )
    )


def _named(match: re.Match[str]) -> str:
    name, scheme, value = match.group(1), match.group(2) or "", match.group(3)
    assigned = "=" in name or ":" in name
    if not assigned and not _FLAG.search(name.rstrip()):
        return match.group(0)  # "token embeddings", "password required": words, not a value
    bare = value.strip("\"'")
    if not bare or _PLAIN.match(bare) or bare.startswith(MASK):
        return match.group(0)
    return f"{name}{scheme}" + (f"{value[0]}{MASK}{value[0]}" if value[0] in "\"'" else MASK)


def _run(match: re.Match[str]) -> str:
    run = match.group(0)
    if run.startswith("/") or match.string[match.start() - 1 : match.start()] in ("/", ".", "~"):
        # A path: its names are judged one by one.
        return "/".join(MASK if len(name) >= 48 and _mixed(name) else name for name in run.split("/"))
    return MASK if _mixed(run) else run


def _mixed(run: str) -> bool:
    """Letters and digits both: a rule of dashes is no credential."""
    return any(c.isdigit() for c in run) and any(c.isalpha() for c in run)


class Log:
    """An append-only file that rotates: path, path.1, path.2."""

    def __init__(self, path: str, rotate_bytes: int = ROTATE_BYTES) -> None:
        self.path, self.rotate_bytes = path, rotate_bytes
        self.fd = -1
        self.size = 0
        self.lost_lines = 0

    def write(self, line: str) -> None:
        """Append a line, or count it when the file takes none."""
        data = line.encode("utf-8", "replace") + b"\n"
        try:
            if self.fd < 0:
                self._open()
            if self.lost_lines:
                note = f"[{self.lost_lines} lines could not be written]\n".encode()
                self._append(note)
                self.lost_lines = 0
            self._append(data)
        except OSError:
            self.lost_lines += 1
            return
        if self.size >= self.rotate_bytes:
            self._rotate()

    def _append(self, data: bytes) -> None:
        while data:
            written = os.write(self.fd, data)
            self.size += written
            data = data[written:]

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(self.path, flags, 0o600)
        self.size = os.fstat(self.fd).st_size

    def _rotate(self) -> None:
        os.close(self.fd)
        self.fd = -1
        with contextlib.suppress(OSError):  # then the file grows on; better than losing the engine's words
            for number in range(KEPT, 0, -1):
                older = f"{self.path}.{number - 1}" if number > 1 else self.path
                if os.path.lexists(older):
                    os.replace(older, f"{self.path}.{number}")


class Lines:
    """Bytes in, whole redacted lines out. A line over LINE_BYTES is cut before its last word.

    After a gap (dropped input) the unfinished line before it and the rest of the line after it are
    left out: half a secret is matched by no rule.
    """

    def __init__(self, redactor: Redactor, log: Log) -> None:
        self.redactor, self.log = redactor, log
        self.pending = b""
        self.skipping = False

    def feed(self, data: bytes) -> None:
        *whole, rest = (self.pending + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in whole:
            if self.skipping:
                self.skipping = False
            else:
                self._emit(line)
        if self.skipping:
            rest = b""
        elif len(rest) > LINE_BYTES:
            self._emit(rest)
            self.skipping, rest = True, b""
        self.pending = rest

    def gap(self, dropped: int) -> None:
        self.pending = b""
        self.skipping = True
        self.log.write(f"[{dropped} bytes of output dropped: it came faster than it could be written]")

    def end(self) -> None:
        if self.pending and not self.skipping:
            self._emit(self.pending)

    def _emit(self, line: bytes) -> None:
        cut = len(line) > LINE_BYTES
        text = self.redactor.line(line[:LINE_BYTES].decode("utf-8", "replace"))
        if cut:
            # The cut may have split a secret: leave out as much as the longest one, and the word before.
            text = text[: max(0, len(text) - max(self.redactor.longest, 256))]
            text = text[: max(text.rfind(" "), 0)] + " [line cut]"
        if text.strip():
            self.log.write(text)


class Feed:
    """The queue between the two threads. Putting never waits: when it is full the oldest goes, since an
    engine's last words are worth more than the flood before them."""

    def __init__(self) -> None:
        self.chunks: collections.deque[bytes] = collections.deque()
        self.waiting = 0
        self.dropped = 0  # bytes missing in front of the first chunk
        self.ready = threading.Condition()
        self.ended = False

    def put(self, data: bytes) -> None:
        with self.ready:
            self.chunks.append(data)
            self.waiting += len(data)
            while self.waiting > QUEUE_BYTES:
                oldest = self.chunks.popleft()
                self.waiting -= len(oldest)
                self.dropped += len(oldest)
            self.ready.notify()

    def end(self) -> None:
        with self.ready:
            self.ended = True
            self.ready.notify()

    def take(self) -> bytes | int | None:
        """The next chunk, or first how many bytes are missing before it; None at the end."""
        with self.ready:
            while not self.chunks and not self.ended:
                self.ready.wait()
            if self.dropped:
                dropped, self.dropped = self.dropped, 0
                return dropped
            if not self.chunks:
                return None
            chunk = self.chunks.popleft()
            self.waiting -= len(chunk)
            return chunk


def pump(output: int, lines: Lines) -> None:
    """Carry everything from `output` into `lines` until its end."""
    feed = Feed()

    def drain() -> None:
        try:
            while data := os.read(output, READ_BYTES):
                feed.put(data)
        finally:
            feed.end()

    reader = threading.Thread(target=drain, name="drain", daemon=True)
    reader.start()
    while (chunk := feed.take()) is not None:
        if isinstance(chunk, int):
            lines.gap(chunk)
        else:
            lines.feed(chunk)
    lines.end()


def main() -> None:
    os.umask(0o077)
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    order = json.load(sys.stdin)
    os.closerange(OUTPUT + 1, os.sysconf("SC_OPEN_MAX"))
    log = Log(order["path"], order.get("rotate_bytes", ROTATE_BYTES))
    pump(OUTPUT, Lines(Redactor(order["secrets"]), log))
    if log.fd >= 0 and log.lost_lines == 0:
        os.close(log.fd)


if __name__ == "__main__":
    main()
