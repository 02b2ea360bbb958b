"""A branch or tag becomes a commit at the deploy, asked of the Hub that the user names."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from capyctl.cli.deploy import HUB, HUB_SETTING, hub_of, model, read_document, settle
from capyctl.documents.model_source import HuggingFace
from capyctl.downloads.part import Patience
from capyctl.downloads.pin import commit_of
from capyctl.errors import CapyError, Failure
from tests.hub.hub import COMMIT, Fault, Hub, running

REPO = "maker/tiny"
TOKEN = "hf_" + "b" * 30
QUICK = Patience(attempts=2, pause_s=0.001)


def pinned(hub: Hub, revision: str | None = None, token: str | None = None, repo: str = REPO) -> str:
    return commit_of(repo, revision, endpoint=hub.endpoint, token=token, patience=QUICK)


def test_main_or_what_is_named_becomes_todays_commit():
    with running({REPO: {"config.json": b"{}"}}) as hub:
        assert pinned(hub) == pinned(hub, "v1/2") == COMMIT
    assert [one.path for one in hub.seen] == [f"/api/models/{REPO}/revision/{name}" for name in ("main", "v1%2F2")]


def test_a_token_is_sent_to_the_hub_and_not_to_where_it_redirects():
    with running({REPO: {"config.json": b"{}"}}, token=TOKEN) as hub:
        assert pinned(hub, token=TOKEN) == COMMIT
        hub.faults["/revision/main"] = [Fault(redirect=f"{hub.cdn}/elsewhere")]
        with pytest.raises(CapyError) as caught:
            pinned(hub, token=TOKEN)
    assert "127.0.0.1" in caught.value.message  # a private address that nobody named
    assert TOKEN not in caught.value.message
    assert not hub.to("cdn")


@pytest.mark.parametrize(
    ("repo", "token", "fault", "code"),
    [
        ("maker/none", None, Fault(), "not_found"),
        (REPO, "wrong", Fault(), "unauthorized"),
        (REPO, TOKEN, Fault(status=403), "unauthorized"),
        (REPO, TOKEN, Fault(status=503), "unavailable"),
        (REPO, TOKEN, Fault(cut_after=3), "unavailable"),
        (REPO, TOKEN, Fault(redirect="http://169.254.169.254/x"), "not_materializable"),
    ],
)
def test_a_hub_that_does_not_say_is_one_line(repo: str, token: str | None, fault: Fault, code: str):
    needs = None if repo == "maker/none" else TOKEN
    faults = {"/revision/main": [fault] * 3}
    with running({REPO: {"config.json": b"{}"}}, token=needs, faults=faults) as hub, pytest.raises(CapyError) as caught:
        pinned(hub, token=token, repo=repo)
    assert (caught.value.code, caught.value.message.startswith(f"{repo} cannot be pinned: ")) == (code, True)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(raw=b"", endless=b"HTTP/1.1 100 Continue\r\n\r\n", pause_s=0.01),
        Fault(raw=b"HTTP/1.1 200 OK\r\nX-Slow: ", endless=b"x", pause_s=0.01),
        Fault(raw=b"HTTP/1.1 200 OK\r\n\r\n", endless=b" ", pause_s=0.01),
        Fault(raw=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", endless=b"X: y\r\n", pause_s=0.01),
        Fault(status=503, headers={"Retry-After": "60"}),
    ],
    ids=["continue", "header", "body", "trailer", "later"],
)
def test_a_hub_that_never_comes_to_an_end_is_waited_for_for_so_long_and_no_longer(fault: Fault):
    with running({REPO: {"config.json": b"{}"}}, faults={"/revision/main": [fault] * 3}) as hub:
        began = time.monotonic()
        with pytest.raises(Failure) as caught:
            commit_of(REPO, None, endpoint=hub.endpoint, token=None, limit_s=0.3)
        assert time.monotonic() - began < 25
        assert (caught.value.code, "cannot be pinned in" in caught.value.message) == ("unavailable", True)
        if fault.status is not None:
            assert "answered 503" in caught.value.message
        ends = time.monotonic() + 60
        while any(thread.name == "pin" for thread in threading.enumerate()):
            assert time.monotonic() < ends, "nothing goes on behind"
            time.sleep(0.01)


def test_a_document_is_pinned_by_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    document = tmp_path / "m.yaml"
    document.write_text(f"name: m\nengine: vllm\nmodel: {{hf: {REPO}@v2}}\n")
    with running({REPO: {"config.json": b"{}"}}, token=TOKEN) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        settled = settle(read_document(str(document)), str(document), None, [])
    assert settled.model.source == HuggingFace(repo=REPO, revision=COMMIT)


def test_where_nothing_else_is_said_a_document_is_pinned_at_the_hub_of_its_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    document = tmp_path / "m.yaml"
    document.write_text(f"name: m\nengine: vllm\nmodel: {{hf: {REPO}@v2}}\n")
    for name in ("CAPYCTL_HF_ENDPOINT", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with running({REPO: {"config.json": b"{}"}}) as hub, running({}) as other:
        api: Any = Role([{"setting": HUB_SETTING, "value": hub.endpoint, "source": "flag"}])
        settled = settle(read_document(str(document)), str(document), None, [], hub_of_role=lambda: hub_of(api))
        assert settled.model.source == HuggingFace(repo=REPO, revision=COMMIT)
        with pytest.raises(CapyError, match="cannot be pinned"):
            settle(read_document(str(document)), str(document), other.endpoint, [], hub_of_role=lambda: hub_of(api))
        assert other.seen, "what the command says goes before"
    nobody: Any = Role([])
    assert hub_of(nobody) == HUB


class Role:
    """A role of which the settings are asked."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def get(self, path: str) -> dict[str, Any]:
        assert path == "/config/effective"
        return {"settings": self.rows}


def test_without_a_role_no_hub_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    document = tmp_path / "m.yaml"
    document.write_text(f"name: m\nengine: vllm\nmodel: {{hf: {REPO}@v2}}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    with running({REPO: {"config.json": b"{}"}}) as hub, pytest.raises(CapyError, match="no role has run"):
        model(str(document), hf_endpoint=hub.endpoint)
    assert not hub.seen


@pytest.mark.parametrize(
    "module", ["capyctl.cli.app", "capyctl.cli.deploy", "capyctl.cli.status", "capyctl.roles.machine"]
)
def test_nothing_imports_the_hubs_library_before_a_hub_is_asked(module: str):
    look = f"import sys, {module}; print([name for name in sys.modules if name in ('huggingface_hub', 'httpx2')])"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout == "[]\n"
