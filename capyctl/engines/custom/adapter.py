"""A custom engine as the host drives it: what its manifest says, and nothing else.

Source: engines 10, 12.1.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import attrs

from capyctl.documents.custom_engine import Idle, Manifest
from capyctl.documents.deployment import parse_deployment
from capyctl.engines.adapter import Client, Command, LaunchFacts, RestartOnly
from capyctl.engines.custom.installation import pin
from capyctl.engines.custom.options import RESERVED_ENV
from capyctl.engines.environment import SYSTEM_PATH, reserved_reason
from capyctl.engines.last_words import out_of_memory, worth_reading
from capyctl.engines.metrics import read_gauges
from capyctl.engines.questions import probe_chat, probe_decision
from capyctl.engines.registered import Registered
from capyctl.errors import Failure, InvariantBroken, Refusal

LOOPBACK = "127.0.0.1"
_PORT_WORDS = ("address already in use",)


@attrs.frozen(kw_only=True)
class CustomAdapter(RestartOnly):
    """One confirmed custom engine."""

    registered: Registered
    telemetry: bool = False

    @property
    def family(self) -> str:
        return "custom"

    @property
    def manifest(self) -> Manifest:
        if self.registered.manifest is None:
            raise InvariantBroken(f"the custom engine {self.registered.name} has no manifest")
        return self.registered.manifest

    @property
    def eof_settles(self) -> bool:
        return False

    @property
    def workers_listen(self) -> bool:
        return False

    def preflight(self) -> None:
        """Blocking: the program and the manifest are those that were confirmed.

        Raises: Refusal `installation_drift`.
        """
        name, program = self.registered.name, Path(self.registered.executable)
        if not os.access(program, os.X_OK):
            raise Refusal("installation_drift", f"{program} of the custom engine {name} is not there")
        if pin(program, self.manifest) != self.registered.digest:
            raise Refusal(
                "installation_drift",
                f"{program} or its manifest changed since {name} was confirmed. "
                f"Try: capyctl engine remove {name}, then add it again",
            )

    def render(self, facts: LaunchFacts) -> Command:
        """The manifest's command with the launch's values, then the profile's and the deployment's arguments."""
        config = parse_deployment(facts.document, "the deployment").engine_config
        program = self.registered.executable
        words = self.manifest.arguments(
            host=LOOPBACK, port=facts.port, model=str(facts.model_dir), name=facts.served_name
        )
        configured = {**self.manifest.env, **config.env}
        env: dict[str, str] = {
            str(name): value for name, value in configured.items() if reserved_reason(name, RESERVED_ENV) is None
        }
        env["PATH"] = f"{PurePosixPath(program).parent}:{SYSTEM_PATH}"
        env["CAPYCTL_ENGINE_LOG"] = str(facts.log_path)
        if not self.telemetry:
            env["DO_NOT_TRACK"] = "1"
        env.update(facts.device_env)
        return Command(argv=(program, *words, *self.registered.profile.args, *config.extra_args), env=env)

    async def loaded(self, client: Client) -> bool:
        """2xx on the health path; without one, anything that speaks HTTP: the probe says the rest."""
        path = self.manifest.health
        if path is None:
            await client.get("/v1/models")
            return True
        status, _ = await client.get(path)
        return 200 <= status < 300

    async def verify(self, client: Client, facts: LaunchFacts) -> None:
        """Nothing to compare: what the program made of its arguments is its own."""

    async def probe(self, client: Client, facts: LaunchFacts, limit_s: float) -> int:
        """One question of the API that the manifest states. Raises: Failure `launch_failed`."""
        ask = probe_decision if self.manifest.api == "decisions" else probe_chat
        return await ask(client, facts.served_name, limit_s)

    async def gauges(self, client: Client) -> tuple[int, int, int | None]:
        """(running, waiting, None) from where the manifest says.

        Raises: Refusal `unsupported_capability` without an idle signal; Failure `engine_error` when it is not there.
        """
        idle = self.manifest.idle
        if idle is None:
            raise Refusal("unsupported_capability", f"{self.registered.name} does not say how much it is doing")
        if idle.is_json:
            figures = await _json_figures(client, idle)
        else:
            found = await read_gauges(client, idle.names, path=idle.path)
            figures = [math.ceil(found[name]) for name in idle.names]
        running, waiting = (*figures, 0)[:2]
        return running, waiting, None

    def failure(self, last_words: Sequence[str]) -> tuple[str, str] | None:
        """(code, one line) for what programs of any kind say before they end, else None."""
        for line in reversed(worth_reading(last_words)):
            low = line.lower()
            if any(words in low for words in _PORT_WORDS):
                return "port_conflict", "the leased port was taken by another program while the engine started"
            short = out_of_memory(line)
            if short is not None:
                return short
        return None


async def _json_figures(client: Client, idle: Idle) -> list[int]:
    status, body = await client.get(idle.path)
    if status != 200:
        raise Failure("engine_error", f"{idle.path} answered {status}")
    try:
        said = json.loads(body)
    except ValueError:
        raise Failure("engine_error", f"{idle.path} did not answer with JSON") from None
    return [_count(said, pointer, idle.path) for pointer in idle.names]


def _count(said: Any, pointer: str, path: str) -> int:
    """The number at a JSON pointer; true counts as 1, and a part of something as one thing.

    Raises: Failure `engine_error` when nothing is there, or no number.
    """
    value = said
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            raise Failure("engine_error", f"{path} does not state {pointer}")
    if not isinstance(value, bool | int | float) or not 0 <= value < 1 << 31:
        raise Failure("engine_error", f"{path}: {pointer} is not a count")
    return math.ceil(value)
