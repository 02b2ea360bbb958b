"""Waits at the door can be ended from outside: while it connects, while it shakes hands, while headers come."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from capyctl.downloads.door import Door, Interrupted, Line, Stopped
from capyctl.downloads.reach import Found, Reach

LISTED = frozenset({"mirror.example"})
WAIT_S = 60.0


@contextlib.contextmanager
def listening(backlog: int = 5) -> Iterator[socket.socket]:
    """A port of this machine where nobody answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(backlog)
        yield server


def door(port: int, addresses: int = 1) -> Door:
    found: list[Found] = [(socket.AF_INET, ("127.0.0.1", port))] * addresses
    return Door(
        Reach(allowed_hosts=LISTED, plain_http=True, lookup=lambda host, port: found),
        wait_s=WAIT_S,
        trusted=ssl.create_default_context(),
    )


@pytest.mark.parametrize(
    ("end", "as_"), [(lambda line: line.cut("too slow"), Interrupted), (lambda line: line.stop(), Stopped)]
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_wait_for_an_answer_or_a_handshake_ends_at_once(
    scheme: str, end: Callable[[Line], None], as_: type[Exception]
):
    line = Line()
    with listening() as server:
        opened, began = door(server.getsockname()[1]), time.monotonic()
        met: list[socket.socket] = []

        def end_it() -> None:
            met.append(server.accept()[0])
            met[0].recv(1)  # it has said something, and waits
            end(line)

        ending = threading.Thread(target=end_it)
        ending.start()
        with pytest.raises(as_):
            opened.open(f"{scheme}://mirror.example/m.gguf", line)
        ending.join()
        met[0].close()
        assert time.monotonic() - began < WAIT_S


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize(
    ("end", "as_"), [(lambda line: line.cut("too slow"), Interrupted), (lambda line: line.stop(), Stopped)]
)
def test_a_wait_that_is_ended_before_its_connection_stands_does_not_begin(
    scheme: str, end: Callable[[Line], None], as_: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    line = Line()

    class Late(socket.socket):
        def connect(self, address: object) -> None:
            end(line)
            super().connect(address)  # type: ignore[arg-type]

    with listening() as server:
        monkeypatch.setattr("capyctl.downloads.door.socket.socket", Late)
        began = time.monotonic()
        with pytest.raises(as_) as caught:
            door(server.getsockname()[1]).open(f"{scheme}://mirror.example/m.gguf", line)
        assert as_ is Stopped or str(caught.value) == "too slow"
        assert time.monotonic() - began < WAIT_S


def test_a_name_with_many_addresses_where_nobody_answers_is_one_wait(monkeypatch: pytest.MonkeyPatch):
    line = Line()
    tried: list[object] = []

    class Deaf(socket.socket):
        def connect(self, address: object) -> None:
            tried.append(address)
            line.cut("too slow")  # whoever watches cuts it
            raise TimeoutError

    monkeypatch.setattr("capyctl.downloads.door.socket.socket", Deaf)
    with pytest.raises(Interrupted, match="too slow"):
        door(9, addresses=50).open("http://mirror.example/m.gguf", line)
    assert len(tried) == 1
