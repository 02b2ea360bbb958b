"""The log writer as the process it is: floods, secrets, rotation, the death of whoever started it."""

# A test may block and poll: it is alone in its loop, and what it waits for has no event.

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio

from capyctl import ulid
from capyctl.documents import owned
from capyctl.host import identity, logs, logwriter
from capyctl.host.identity import Presence
from capyctl.host.logwriter import MASK, Lines, Log, Redactor

KEY = "lk_4Zt9c1Qm"


async def finished(writer: logs.Writer) -> None:
    os.close(writer.output)
    with trio.fail_after(30):
        await identity.wait_gone(writer.identity)


def started(path: Path, rotate_bytes: int = logwriter.ROTATE_BYTES) -> logs.Writer:
    return logs.start_writer(path, [KEY], rotate_bytes)


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        (f"key is {KEY} here", f"key is {MASK} here"),
        ("api_key=abcdef123", f"api_key={MASK}"),
        ('{"hf_token": "abc def", "n": 3}', f'{{"hf_token": "{MASK}", "n": 3}}'),
        ("--api-key abcdef --port 80", f"--api-key {MASK} --port 80"),
        ("Authorization: Bearer abc.def", f"Authorization: Bearer {MASK}"),
        ("GET http://me:pw@h/p?sig=1#x now", f"GET http://{MASK}@h/p?{MASK}#{MASK} now"),
        ("using hf_abcDEF123", f"using {MASK}"),
        ("secret token sk-abcdef0123456789abcdef0123456789 here", f"secret token {MASK} here"),
        ("'sk-proj-a1B2c3D4e5F6g7H8_x'", f"'{MASK}'"),
        ("AKIAIOSFODNN7EXAMPLE, ghp_16C7e42F292c6912E7710c83", f"{MASK}, {MASK}"),
        ("xoxb-2048-abcdefgh eyJhbGciOiJI.eyJzdWIi.SflKxw", f"{MASK} {MASK}"),
        ("a task-force of risk-averse sk-learn-contributors", None),
        ("sha " + "a1" * 30, f"sha {MASK}"),
        ("EOS token = 2 '</s>'", "EOS token = 2 '</s>'"),
        ("n_tokens = 512, progress = 0.5", "n_tokens = 512, progress = 0.5"),
        ("token embeddings loaded", "token embeddings loaded"),
        ("=" * 60, "=" * 60),
        ("/a/very/long/path/to/some/model/directory/SmolLM2-135M-Instruct-Q4", None),
        ("\x1b[31mred\x1b[0m \x07bell", "red bell"),
    ],
)
def test_secrets_go_and_facts_stay(line: str, kept: str | None) -> None:
    assert Redactor([KEY]).line(line) == (line if kept is None else kept)


async def test_a_secret_split_over_reads_is_still_taken_out(tmp_path: Path) -> None:
    writer = started(tmp_path / "logs" / "d" / "0-1.log")
    for byte in f"the key {KEY} was split\n".encode():
        os.write(writer.output, bytes([byte]))
    await finished(writer)
    assert writer.path.read_text() == f"the key {MASK} was split\n"
    assert writer.path.stat().st_mode & 0o777 == 0o600
    assert writer.path.parent.stat().st_mode & 0o777 == 0o700
    assert writer.path.parent.parent.stat().st_mode & 0o777 == 0o700


def test_no_secret_is_on_the_writers_command_line(tmp_path: Path) -> None:
    writer = started(tmp_path / "x.log")
    place = Path(f"/proc/{writer.identity.pid}")
    assert KEY.encode() not in (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
    trio.run(finished, writer)


def test_an_overlong_line_is_cut_before_a_secret_that_the_cut_would_split(tmp_path: Path) -> None:
    secret = "s3cr3t" * 6
    for shift in range(0, 40, 3):
        log = Log(str(tmp_path / f"{shift}.log"))
        lines = Lines(Redactor([secret]), log)
        text = ("word " * 20_000)[: logwriter.LINE_BYTES - shift] + secret + " tail" * 20_000
        lines.feed(text.encode())
        lines.feed(b" more of the same line\nnext line\n")
        os.close(log.fd)
        written = (tmp_path / f"{shift}.log").read_text()
        assert "s3cr" not in written
        assert written.endswith("[line cut]\nnext line\n")


def test_after_a_gap_no_half_line_is_written(tmp_path: Path) -> None:
    log = Log(str(tmp_path / "x.log"))
    lines = Lines(Redactor([KEY]), log)
    lines.feed(f"whole\nstart of {KEY[:5]}".encode())
    lines.gap(1000)
    lines.feed(f"{KEY[5:]} end\nwhole again\n".encode())
    os.close(log.fd)
    assert (tmp_path / "x.log").read_text().splitlines() == [
        "whole",
        "[1000 bytes of output dropped: it came faster than it could be written]",
        "whole again",
    ]


async def test_a_flood_neither_blocks_the_engine_nor_fills_memory(tmp_path: Path) -> None:
    writer = started(tmp_path / "flood.log", rotate_bytes=1 << 30)
    block = (b"0123456789 abcdefgh " * 3 + b"\n") * 1000
    began = time.monotonic()
    peak = 0
    for number in range(1500):  # 90 MB
        os.write(writer.output, block)
        if number % 100 == 0:
            status = Path(f"/proc/{writer.identity.pid}/status").read_text()
            peak = max(peak, int(status.split("VmRSS:")[1].split()[0]))
    assert time.monotonic() - began < 60
    assert peak < 64_000  # KiB: the interpreter and the bounded queue
    os.write(writer.output, b"\nthe last word\n")
    await finished(writer)
    text = writer.path.read_text()
    assert len(text) < 80 << 20
    assert "bytes of output dropped: it came faster than it could be written]" in text
    assert logs.last_words(writer.path, 1) == ["the last word"]


def test_rotation_keeps_two_older_files(tmp_path: Path) -> None:
    log = Log(str(tmp_path / "r.log"), rotate_bytes=100)
    for number in range(20):
        log.write(f"line {number:03} " + "." * 40)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.log.1", "r.log.2"]
    log.write("newest")
    os.close(log.fd)
    assert logs.last_words(tmp_path / "r.log", 3)[-1] == "newest"
    assert logs.last_words(tmp_path / "r.log", 3)[0].startswith("line 018")


def test_a_log_that_cannot_be_written_is_counted_and_told(tmp_path: Path) -> None:
    place = tmp_path / "gone"
    log = Log(str(place / "x.log"))
    log.write("lost one")
    log.write("lost two")
    place.mkdir()
    log.write("kept")
    os.close(log.fd)
    assert (place / "x.log").read_text() == "[2 lines could not be written]\nkept\n"


def test_the_writer_survives_its_starter_and_every_signal_of_a_stop(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from capyctl.host import logs\n"
        f"writer = logs.start_writer(Path({str(tmp_path / 'x.log')!r}), [])\n"
        "os.set_inheritable(writer.output, True)\n"
        "print(writer.identity.pid, flush=True)\n"
        "os.dup2(writer.output, 1)\n"
        "os.close(writer.output)\n"
        "os.spawnv(os.P_NOWAIT, '/bin/sh', ['sh', '-c', 'sleep 0.5; echo spoken after its death'])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert starter.stdout is not None
    writer = identity.identify(int(starter.stdout.readline()))
    assert writer is not None
    starter.wait()
    starter.stdout.close()
    time.sleep(0.2)  # the starter's end is over, its child's words are still to come
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(writer.pid, number)

    async def wait() -> None:
        with trio.fail_after(30):
            await identity.wait_gone(writer)

    trio.run(wait)
    assert identity.presence(writer) is Presence.GONE
    assert (tmp_path / "x.log").read_text() == "spoken after its death\n"


def test_a_tail_has_whole_lines_and_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "t.log"
    path.write_text("".join(f"line {number} token=abcdefghij\n" for number in range(2000)))
    text = logs.tail(path, 1)
    assert len(text) <= 1100
    assert text.splitlines()[-1] == f"line 1999 token={MASK}"
    assert text.splitlines()[0].startswith("line ")
    assert logs.last_words(tmp_path / "absent.log") == []
    with pytest.raises(FileNotFoundError):
        logs.tail(tmp_path / "absent.log")


def test_logs_go_with_their_deployment_and_nothing_else_does(tmp_path: Path) -> None:
    old, kept, newer, linked = (ulid.new(number, bytes(10)) for number in range(4))
    for name in (old, kept, newer, "notes"):
        path = logs.log_path(tmp_path, name, "0-1")
        owned.private_directory(path.parent)
        path.write_text("a line")
        os.utime(path.parent, (1, 1))
    os.utime(tmp_path / "logs" / newer, (50, 50))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "logs" / linked).symlink_to(tmp_path / "elsewhere")
    assert logs.prune_deployments(tmp_path, {kept}, 50_000) == [old]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == sorted([kept, newer, linked, "notes"])
    assert logs.prune_deployments(tmp_path / "nowhere", set(), 50_000) == []
