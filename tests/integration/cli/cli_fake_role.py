"""A small management listener with the shapes of api 5: what the commands are tried against without a role."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from capyctl import ulid

TOKEN = "capyadm-" + "t" * 40
KEY = "capy-" + "k" * 40


def view(name: str, **more: Any) -> dict[str, Any]:
    """A deployment view with every field the CLI prints."""
    return {
        "id": ulid.new(1_793_210_400_000, name.encode().ljust(10, b"_")[:10]),
        "name": name,
        "revision": "1",
        "routes": [name],
        "api": "chat",
        "residency": "restart_only",
        "activation": "on_demand",
        "desired_state": "stopped",
        "observed_state": "stopped",
        "ready": "0/1",
        "hosts": [{"id": "01N8C2F0QW7V5T3R9JX4B6M1KD", "name": "box"}],
        "instances": [
            {
                "index": 0,
                "host_id": None,
                "host": None,
                "generation": None,
                "observed_state": "stopped",
                "lifecycle": "active",
                "devices": [],
                "last_error": None,
                "stopped": None,
                "pid": None,
            }
        ],
        "startup": {"bytes": {"unified": "30601641984"}, "provenance": "derived"},
        "initialize_ms": 130_000,
        "checkpoint": {"state": "measured", "digest": "sha256:" + "a" * 64, "reason": None},
        "context": {"tokens": 16384, "reason": "fitted"},
        "latest_operation": None,
        "waiting": None,
        "requests": {"in_flight": 0, "waiting": 0, "settle_when_idle": 0, "settle_at_stop": 0},
        "ledger": [],
        "profile": "llamacpp",
        "engine_version": "1",
        "document": {},
        "warm": False,
        **more,
    }


class FakeRole:
    """State, and the requests that were seen. `refuse` maps an action to the errors it answers, one by one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.views: dict[str, dict[str, Any]] = {}
        self.operations: dict[str, dict[str, Any]] = {}
        self.seen: list[tuple[str, str, dict[str, Any] | None, str | None]] = []
        self.refuse: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        self.outcome: tuple[str, str | None, str | None] = ("succeeded", None, None)
        self.polls_before_end = 1
        self.logs: dict[tuple[str, int], str] = {}
        self.usage: dict[str, Any] = {"hosts": [], "deployments": []}
        handler = type("Handler", (_Handler,), {"role": self})
        self.listener = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.thread = threading.Thread(target=self.listener.serve_forever, kwargs={"poll_interval": 0.02})

    def add(self, name: str, **more: Any) -> dict[str, Any]:
        made = view(name, **more)
        self.views[made["id"]] = made
        return made

    def __enter__(self) -> FakeRole:
        (self.root / "identity").mkdir(parents=True, mode=0o700)
        (self.root / "run").mkdir(mode=0o700)
        self._private("identity/credentials", f"api_key: {KEY}\nadmin_token: {TOKEN}\n")
        self._private("run/management-address", f"127.0.0.1:{self.listener.server_port}\n")
        self.thread.start()
        return self

    def _private(self, name: str, text: str) -> None:
        path = self.root / name
        path.write_text(text)
        path.chmod(0o600)

    def __exit__(self, *_: object) -> None:
        self.listener.shutdown()
        self.listener.server_close()
        self.thread.join()

    def accept(self, deployment: str, action: str) -> dict[str, Any]:
        operation = ulid.new(1_793_210_400_000 + len(self.operations), os.urandom(10))
        name = {"start": "initialize"}.get(action, action)
        self.operations[operation] = {
            "api_version": "1",
            "id": operation,
            "deployment_id": deployment,
            "action": name,
            "state": "running",
            "error_code": None,
            "reason": None,
            "accepted_at_ms": "1793210400000",
            "finished_at_ms": None,
            "polls": 0,
        }
        revision = self.views[deployment]["revision"]
        return {
            "api_version": "1",
            "operation_id": operation,
            "deployment_id": deployment,
            "joined": False,
            "revision": revision,
        }

    def poll(self, operation: dict[str, Any]) -> dict[str, Any]:
        operation["polls"] += 1
        if operation["polls"] > self.polls_before_end and operation["state"] == "running":
            operation["state"], operation["error_code"], operation["reason"] = self.outcome
            good = operation["state"] == "succeeded"
            seen = self.views.get(operation["deployment_id"])
            if seen is not None and operation["action"] == "initialize" and good:
                seen |= {"observed_state": "ready", "ready": "1/1"}
            if seen is not None and operation["action"] == "stop" and good:
                seen |= {"observed_state": "stopped", "ready": "0/1"}
            if operation["action"] == "delete" and good:
                self.views.pop(operation["deployment_id"], None)
        return {key: value for key, value in operation.items() if key != "polls"}


class _Handler(BaseHTTPRequestHandler):
    role: FakeRole
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, method: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        path, _, query = self.path.removeprefix("/management/v1").partition("?")
        self.role.seen.append((method, path, body, self.headers.get("Idempotency-Key")))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, {"error": {"code": "unauthenticated", "message": "no", "retryable": False}})
            return
        status, value = self._route(method, path, query, body)
        self._send(status, value)

    def _route(self, method: str, path: str, query: str, body: Any) -> tuple[int, dict[str, Any]]:
        role, parts = self.role, path.strip("/").split("/")
        missing = 404, {"error": {"code": "not_found", "message": "there is no such thing", "retryable": False}}
        match method, parts:
            case "GET", ["deployments"]:
                every = list(role.views.values())
                first = int(dict(pair.split("=") for pair in query.split("&")).get("after", 0))
                following = str(first + 2) if first + 2 < len(every) else None
                return 200, {"api_version": "1", "deployments": every[first : first + 2], "next": following}
            case "GET", ["deployments", name]:
                return (200, role.views[name]) if name in role.views else missing
            case "GET", ["deployments", name, "engine-log"]:
                asked = dict(pair.split("=") for pair in query.split("&"))
                text = role.logs.get((name, int(asked["instance"])))
                if text is None:
                    return missing
                return 200, {"text": text[-1024 * int(asked["kib"]) :], "instance": int(asked["instance"])}
            case "POST", ["deployments"]:
                if role.refuse.get("create"):
                    return role.refuse["create"].pop(0)
                made = role.add(body["config"]["name"])
                return 202, role.accept(made["id"], "create")
            case "PUT", ["deployments", name]:
                role.views[name]["revision"] = str(body["expected_revision"] + 1)
                return 202, role.accept(name, "update")
            case "POST", ["deployments", name, "actions"]:
                if role.refuse.get(body["action"]):
                    return role.refuse[body["action"]].pop(0)
                return 202, role.accept(name, body["action"])
            case "POST", ["preinitializations"]:
                members = [role.accept(one["deployment_id"], "preinitialize") for one in body["members"]]
                return 202, {"operation_id": members[0]["operation_id"], "deployment_id": None, "members": members}
            case "GET", ["operations", name]:
                return (200, role.poll(role.operations[name])) if name in role.operations else missing
            case "GET", ["installation"]:
                return 200, {"api_version": "1", "version": "0.2.0", "role": "standalone", "state_dir": "/srv/capyctl"}
            case "GET", ["usage"]:
                return 200, {"api_version": "1", "query": query, **role.usage}
            case "GET", ["engines"]:
                row = {"host": "box", "profile": "llamacpp", "engine": "llamacpp", "version": "1", "custom": True}
                return 200, {"engines": [{**row, "deep_park": "disabled", "state": "online", "deployments": ["a"]}]}
            case "GET", ["hosts"]:
                domain = {"domain_id": "unified", "capacity_bytes": "17179869184", "available_bytes": "8589934592"}
                return 200, {
                    "server_version": "0.2.0",
                    "hosts": [
                        {
                            "id": "01N8C2F0QW7V5T3R9JX4B6M1KD",
                            "name": "box",
                            "state": "online",
                            "eligible": True,
                            "binary_version": "0.2.0",
                            "compatibility": "supported",
                            "engines": ["llamacpp"],
                            "session": {"domains": [domain]},
                        }
                    ],
                }
            case "POST", ["drain"]:
                for view in role.views.values():
                    view |= {"observed_state": "stopped", "ready": "0/1", "ledger": []}
                return 202, {"operations": []}
        return missing

    def _send(self, status: int, value: dict[str, Any]) -> None:
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


Run = Callable[..., Any]
