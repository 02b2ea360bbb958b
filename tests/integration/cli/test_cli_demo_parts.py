"""The demo's parts that need no role: its room, its ports, what its screen says."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from capyctl.cli import demo_parts
from capyctl.cli.demo import ENDINGS, catch_endings
from capyctl.cli.demo_parts import Room
from capyctl.cli.demo_screen import Lines, Moment, Picture, sentence

MIB = 1 << 20
SWITCHED = Moment(
    states={"ada": "stopped", "grace": "ready"}, charged={"ada": 0, "grace": 512 * MIB}, limit_bytes=768 * MIB
)


def test_a_room_hides_the_users_settings_and_disappears(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CAPYCTL_MANAGEMENT_ADDR", "127.0.0.1:1")
    room = Room.make()
    environ = room.environ()
    assert "CAPYCTL_MANAGEMENT_ADDR" not in environ
    assert environ["CAPYCTL_STATE_DIR"].startswith(str(room.root))
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    room.place_model("ada", file)
    placed = room.models / "ada" / "m.gguf"
    assert placed.read_bytes() == b"GGUF"
    assert os.stat(placed).st_ino == os.stat(file).st_ino, "a second name, no copy"
    room.remove()
    assert not room.root.exists()
    assert file.exists()


def test_the_end_says_what_is_kept_and_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_parts.farewell() == "Stopping the engines and removing everything"
    demo_parts.cache().mkdir(parents=True)
    assert demo_parts.farewell().endswith(f"but the downloads, kept for the next demo: {tmp_path}/capyctl/demo")


def test_ports_are_free_neighbours() -> None:
    first, last = demo_parts.free_ports(4)
    assert last - first == 3
    for port in (*range(first, last + 1), demo_parts.free_port()):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_the_ledger_is_one_sentence() -> None:
    assert sentence(SWITCHED) == "ada stopped, grace ready 512 MiB; charged 512 MiB of 768 MiB"


def test_lines_say_each_change_of_the_ledger_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    lines.seen(SWITCHED)
    lines.seen(SWITCHED)
    lines.asked("grace", "Why?")
    lines.said("Be")
    lines.said("cause.\n")
    lines.answered(1.25)
    said = [re.sub(r"^\[ *\d+\.\ds\] ", "", line) for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "  ledger: ada stopped, grace ready 512 MiB; charged 512 MiB of 768 MiB",
        "Asking grace: Why?",
        "  answer after 1.2s: Because.",
    ]


def test_the_picture_shows_states_charges_and_the_answer() -> None:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=100, no_color=True)
    with Live(console=console, auto_refresh=False) as live:
        picture = Picture(live, ("ada", "grace"))
        picture.step("Asking")
        picture.seen(SWITCHED)
        picture.asked("grace", "Why?")
        picture.said("Because.")
        picture.answered(1.0)
        picture.close()
    text = drawn.getvalue()
    assert "512 MiB of 768 MiB" in text
    assert "grace: Because.  (1.0s)" in text
    assert re.search(r"ada +stopped +-", text)


@pytest.mark.parametrize("hangup", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_closed_terminal_ends_the_demo_like_an_interrupt_unless_nohup_says_otherwise(hangup: signal.Handlers) -> None:
    before = {number: signal.getsignal(number) for number in ENDINGS}
    try:
        signal.signal(signal.SIGHUP, hangup)
        catch_endings()
        ends = [number for number in ENDINGS if signal.getsignal(number) is signal.default_int_handler]
        assert (signal.SIGHUP in ends, len(ends)) == ((True, 3) if hangup is signal.SIG_DFL else (False, 2))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
