"""What stands before SGLang's routes: nothing is open, and either key of the launch comes through, once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

PATH = Path(__file__).parents[2] / "capyctl" / "engines" / "sglang" / "helpers" / "capyctl_sglang.py"
KEYS = ("inference-key", "admin-key")


@pytest.fixture(scope="module")
def entry() -> Any:
    spec = importlib.util.spec_from_file_location("capyctl_sglang", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Application:
    """Takes middleware as the framework does."""

    def __init__(self) -> None:
        self.made: Any = None
        self.reached: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope["type"])

    def add_middleware(self, middleware: Any, **options: Any) -> None:
        self.made = middleware(self, **options)


def answers(app: Application, *words: str, kind: str = "http", path: str = "/health_generate") -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    before = len(app.reached)
    headers = [(b"Authorization", word.encode()) for word in words]
    trio.run(app.made, {"type": kind, "path": path, "headers": headers}, None, send)
    assert (len(app.reached) > before) is (not sent), "refused, or let through; never both and never neither"
    return sent


@pytest.mark.parametrize("path", ["/health_generate", "/health", "/ready", "/metrics", "/v1/chat/completions", "/"])
def test_no_route_is_open_and_either_key_comes_through(entry: Any, path: str) -> None:
    app = Application()
    entry.close_open_routes(SimpleNamespace(app=app), KEYS, True)
    for key in KEYS:
        assert answers(app, f"Bearer {key}", path=path) == []
        for words in ((), (key,), ("Bearer ",), (f"Basic {key}",), (f"Bearer {key}x",), (f"Bearer {key}",) * 2):
            refused = answers(app, *words, path=path)
            assert (refused[0]["status"], refused[1]["body"]) == (401, b'{"error":"Unauthorized"}'), words


def test_a_websocket_takes_a_key_too_and_the_start_and_end_of_the_server_take_none(entry: Any) -> None:
    app = Application()
    entry.close_open_routes(SimpleNamespace(app=app), KEYS, True)
    assert answers(app, kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert answers(app, f"Bearer {KEYS[0]}", kind="websocket") == []
    assert answers(app, kind="lifespan") == []


def test_a_build_that_takes_no_guard_does_not_park_and_says_so_when_it_only_serves(
    entry: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        entry.close_open_routes(SimpleNamespace(), KEYS, True)
    assert caught.value.code == entry.REFUSED
    assert "capyctl_refused capability_missing:deep_park" in capsys.readouterr().err
    entry.close_open_routes(SimpleNamespace(app=object()), KEYS, False)
    assert "capyctl_key_guard_missing" in capsys.readouterr().err
