"""The key guard of a vLLM launch: every route takes its own key, once, and nothing else opens it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

PATH = Path(__file__).parents[2] / "capyctl" / "engines" / "vllm" / "helpers" / "capyctl_vllm_guard.py"
INFERENCE, ADMIN = "inference-key", "admin-key"
OURS = ("/v1/chat/completions", "/v1", "/v2/embed", "/inference/v1/generate", "/cohere/x", "/metrics", "/metrics/")
CONTROL = ("/sleep", "/wake_up", "/invocations", "/tokenize", "/version", "/", "", "/v1x", "//v1/models", "/V1/models")


def guard(monkeypatch: pytest.MonkeyPatch, inference: str = INFERENCE, admin: str = ADMIN) -> Any:
    monkeypatch.setenv("VLLM_API_KEY", inference)
    monkeypatch.setenv("CAPYCTL_VLLM_ADMIN_KEY", admin)
    spec = importlib.util.spec_from_file_location("capyctl_vllm_guard", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reached: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    made = module.KeyGuard(app)
    made.reached = reached
    return made


def ask(made: Any, path: str, *keys: str, kind: str = "http", scheme: str = "Bearer") -> list[dict[str, Any]]:
    """What the guard sends itself; empty when it let the request through."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"authorization", f"{scheme} {key}".encode()) for key in keys]
    before = len(made.reached)
    trio.run(made, {"type": kind, "path": path, "headers": headers}, None, send)
    assert (len(made.reached) > before) is (not sent), "refused, or let through; never both and never neither"
    return sent


def test_each_route_takes_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    made = guard(monkeypatch)
    for routes, right, wrong in ((OURS, INFERENCE, ADMIN), (CONTROL, ADMIN, INFERENCE)):
        for path in routes:
            assert ask(made, path, right) == []
            assert ask(made, path, right, scheme="bearer") == []
            for keys in ((), (wrong,), ("",), (right, right), (right, wrong), (right + "x",), (right[:-1],)):
                assert ask(made, path, *keys)[0]["status"] == 401, (path, keys)
            assert ask(made, path, right, scheme="Basic")[0]["status"] == 401


def test_health_is_open_and_nothing_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = guard(monkeypatch)
    assert ask(made, "/health") == []
    for path in ("/health/", "/healthz", "/health/../sleep", "/HEALTH"):
        assert ask(made, path)[0]["status"] == 401


def test_a_socket_is_closed_before_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    made = guard(monkeypatch)
    assert ask(made, "/v1/realtime", kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert ask(made, "/v1/realtime", INFERENCE, kind="websocket") == []
    assert ask(made, "", kind="lifespan") == []


def test_a_key_that_the_launch_does_not_have_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = guard(monkeypatch, admin="")
    assert ask(made, "/sleep", "")[0]["status"] == 401
    assert ask(made, "/sleep", ADMIN)[0]["status"] == 401
    assert ask(made, "/v1/models", INFERENCE) == []


@given(path=st.text(max_size=40), key=st.text(max_size=20).filter(lambda key: key.isprintable()))
@settings(derandomize=True, max_examples=200)
def test_no_other_word_opens_any_route(path: str, key: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = guard(monkeypatch)
        opened = ask(made, path, key) == []
        assert opened is (path == "/health" or key in (INFERENCE, ADMIN))
