"""Stand-ins for the engine rooms that keep the promises of `capyctl.host.adapter` and `capyctl.engines.adapter`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from capyctl.clock import now_ms
from capyctl.engines.adapter import Client, Command, LaunchFacts, RestartOnly
from capyctl.errors import Failure, Refusal
from capyctl.fsm.types import Bytes, DeploymentId, Domain, Generation, HostId, Incarnation, Lane, Millis, Token
from capyctl.ledger.types import DomainKind, DomainPolicy, HostPolicy
from capyctl.session.messages import Launch, Profile

PROGRAM = Path(__file__).with_name("fake_engine.py")
GIB = 1 << 30
UNIFIED = Domain("unified")


@attrs.define
class FakeAdapter(RestartOnly):
    """Parks when `parking` is set: by `/sleep` and `/wake`, each called once."""

    family: str = "fake"
    eof_settles: bool = True
    parking: bool = True
    workers_listen: bool = False
    resets_unread: bool = False

    @property
    def parks(self) -> bool:
        return self.parking

    @property
    def aborts(self) -> bool:
        return True

    def preflight(self) -> None:
        pass

    def render(self, facts: LaunchFacts) -> Command:
        mode = facts.document.get("mode", "serve")
        program = facts.document.get("program", sys.executable)
        argv = [program, "-S", str(PROGRAM), "--port", str(facts.port), "--as", mode]
        for option in ("hold", "diary", "fault"):
            if option in facts.document:
                argv += [f"--{option}", str(facts.document[option])]
        env = {"FAKE_KEY": facts.key, "FAKE_ADMIN": facts.admin_key, "PATH": "/usr/bin:/bin"}
        return Command(argv=tuple(argv), env=env)

    async def loaded(self, client: Client) -> bool:
        status, _ = await client.get("/health")
        return status == 200

    async def verify(self, client: Client, facts: LaunchFacts) -> None:
        await client.get("/props")

    async def probe(self, client: Client, facts: LaunchFacts, limit_s: float) -> int:
        status, body = await client.post("/v1/chat/completions", b"{}", limit_s)
        return len(json.loads(body)["text"]) if status == 200 else 0

    async def gauges(self, client: Client) -> tuple[int, int, int | None]:
        _, body = await client.get("/metrics")
        seen = json.loads(body)
        return seen["running"], seen["waiting"], None

    async def canary(self, client: Client, facts: LaunchFacts, limit_s: float) -> str | None:
        status, body = await client.post("/v1/completions", b"{}", limit_s)
        if status != 200:
            raise Failure("engine_error", f"it answered {status}")
        return body.decode()

    async def release(self, client: Client, facts: LaunchFacts, limit_s: float) -> None:
        await self._control(client, "/sleep", limit_s)

    async def restore(self, client: Client, facts: LaunchFacts, limit_s: float) -> None:
        await self._control(client, "/wake", limit_s)

    async def alive_parked(self, client: Client) -> bool:
        status, _ = await client.get("/health")
        return status == 200

    async def sleeps(self, client: Client) -> bool:
        return False

    async def abort(self, client: Client, request_id: str) -> None:
        await self._control(client, "/abort", 5.0, json.dumps({"rid": request_id}).encode())

    async def _control(self, client: Client, path: str, limit_s: float, body: bytes = b"{}") -> None:
        status, _ = await client.post(path, body, limit_s, admin=True)
        if status != 200:
            raise Failure("engine_error", f"{path} was answered with {status}")

    def failure(self, last_words: Sequence[str]) -> tuple[str, str] | None:
        return None


@attrs.define
class FakeRegistry:
    one: FakeAdapter = attrs.field(factory=FakeAdapter)

    def profiles(self) -> Sequence[Profile]:
        return (
            Profile(
                name="fake",
                engine="fake",
                version="1",
                custom=True,
                deep_park="disabled",
                executable=sys.executable,
                fingerprint="1+a",
            ),
        )

    def adapter(self, profile: str) -> FakeAdapter:
        if profile != "fake":
            raise Refusal("not_found", f"no profile {profile}; there is: fake")
        return self.one


@attrs.frozen
class Measured:
    digest: str
    weight_bytes: int
    facts: Mapping[str, Any]


class FakeCheckpoints:
    def measure(
        self, model_dir: Path, document: Mapping[str, Any], progress: Callable[[int, int], None] | None = None
    ) -> Measured:
        return Measured("sha256:00", sum(f.stat().st_size for f in model_dir.iterdir()), {"layers": 1})

    def verify(self, model_dir: Path, digest: str) -> None:
        if digest != "sha256:00":
            raise Refusal("checkpoint_mismatch", f"{model_dir} is sha256:00 and {digest} was recorded")


def policy(host: HostId) -> HostPolicy:
    limits = DomainPolicy(
        kind=DomainKind.UNIFIED,
        capacity_bytes=Bytes(8 * GIB),
        managed_bytes=Bytes(4 * GIB),
        reserve_bytes=Bytes(GIB // 16),
        parked_bytes=Bytes(GIB),
    )
    return HostPolicy(host=host, name="here", domains={UNIFIED: limits})


def incarnation(generation: int = 1, deployment: str = "d1") -> Incarnation:
    return Incarnation(Lane(DeploymentId(deployment), 0), Generation(generation))


def launch(
    place: Path, generation: int = 1, *, command_id: str | None = None, limit_s: float = 20, **more: Any
) -> Launch:
    document = {key: more.pop(key) for key in ("mode", "program", "hold", "diary", "fault") if key in more}
    facts: dict[str, Any] = {
        "command_id": command_id or f"launch-{generation}-{os.urandom(4).hex()}",
        "incarnation": incarnation(generation),
        "token": Token(generation),
        "profile": "fake",
        "profile_fingerprint": "1+a",
        "served_name": "m",
        "model": str(place),
        "digest": "sha256:00",
        "document": document,
        "context_tokens": 512,
        "slots": 1,
        "allocation": {UNIFIED: Bytes(GIB // 32)},
        "ready": {UNIFIED: Bytes(GIB // 32)},
        "deadline_ms": Millis(now_ms() + int(limit_s * 1000)),
    }
    return Launch(**{**facts, **more})
