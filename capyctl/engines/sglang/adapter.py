"""SGLang as the host drives it: its entry, readiness, loads, park and wake, aborts, and its ways of failing.

Its `/health` runs a generation and is never read.
Source: engines 4.1, 7, 12, 13, 15.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from capyctl.documents.deployment import parse_deployment
from capyctl.engines import parsers
from capyctl.engines.adapter import Client, Command, LaunchFacts
from capyctl.engines.environment import Reserved
from capyctl.engines.metrics import ppm, read_load
from capyctl.engines.options import check_real_paths
from capyctl.engines.python.installation import Package, helper_argv
from capyctl.engines.python.installed import Parkable
from capyctl.engines.python.openai_calls import completion_canary, served_entry
from capyctl.engines.questions import probe_chat, probe_decision, same
from capyctl.engines.sglang import parking
from capyctl.engines.sglang.failures import classify
from capyctl.engines.sglang.installation import ENTRY, PACKAGE, aborts, install_helpers
from capyctl.engines.sglang.options import POLICY, RESERVED_ENV
from capyctl.engines.sglang.render import Launch, restart_only, variables, words
from capyctl.errors import Failure, Refusal

RUNNING, WAITING, _USAGE = "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"
AGAIN_S = 0.1
"""Between two readings of nothing: a lone request can read as none for some decode steps."""

Reading = tuple[int, int, int | None]


@attrs.frozen(kw_only=True)
class SglangAdapter(Parkable):
    """One registered installation of SGLang."""

    @property
    def family(self) -> str:
        return "sglang"

    @property
    def package(self) -> Package:
        return PACKAGE

    @property
    def reserved_env(self) -> tuple[Reserved, ...]:
        return RESERVED_ENV

    @property
    def aborts(self) -> bool:
        return aborts(self.registered.version)

    def render(self, facts: LaunchFacts) -> Command:
        """The command line of one launch. Writes the helper module that it runs.

        Raises: Refusal `invalid_config`, `invalid_root`, `unsafe_file`, `insufficient_device_memory`,
          `capability_missing:deep_park`.
        """
        document = parse_deployment(facts.document, "the deployment")
        self.check_parks(facts, restart_only(document, self.registered))
        config, template = parsers.read_texts(facts.model_dir)
        check_real_paths(POLICY, document.engine_config.extra_args, self.registered.consent)
        runtime = install_helpers(facts.state_dir)
        rendered, rest = words(
            Launch(
                facts=facts,
                document=document,
                version=self.registered.version,
                parsers=parsers.detect("sglang", config, template),
                draft_dir=self.draft_dir(document),
            )
        )
        env = self.environment(document, facts, variables(facts, telemetry=self.telemetry))
        mode = "parks" if facts.residency.parks else "stays"
        argv = helper_argv(self.prefix, runtime / ENTRY, ("serve", mode, str(len(rendered)), *rendered, *rest))
        return Command(argv=argv, env=env)

    async def verify(self, client: Client, facts: LaunchFacts) -> None:
        """The served name and the context; the entry compared everything else before the engine started.

        Raises: Failure `effective_args_mismatch`.
        """
        entry = await served_entry(client, facts.served_name)
        if facts.context_tokens:
            same("--context-length", entry.get("max_model_len"), facts.context_tokens)

    async def probe(self, client: Client, facts: LaunchFacts, limit_s: float) -> int:
        """One short chat, or a constant decision. Raises: Failure `launch_failed`."""
        if _decides(facts):
            return await probe_decision(client, facts.served_name, limit_s)
        return await probe_chat(client, facts.served_name, limit_s, logprobs=True)

    async def gauges(self, client: Client) -> Reading:
        """(running, waiting, cache usage in ppm). Nothing is read as nothing only when it is read twice.

        Raises: ConnectionError, TimeoutError; Failure `engine_error` when the counts are nowhere.
        """
        running, waiting, usage = await self._reading(client)
        if running or waiting:
            return running, waiting, usage
        import trio  # commands read a family's rows without its engines: they load no event loop

        await trio.sleep(AGAIN_S)
        return await self._reading(client)

    async def _reading(self, client: Client) -> Reading:
        """`/v1/loads`, which is fresher, else the gauges of `/metrics`."""
        status, body = await client.get("/v1/loads?include=core")
        found = read_loads(body) if status == 200 else None
        if found is not None:
            return found
        return await read_load(client, RUNNING, WAITING, _USAGE)

    async def canary(self, client: Client, facts: LaunchFacts, limit_s: float) -> str | None:
        """What the fixed prompt is completed with; a decision model completes nothing.

        Raises: Failure `engine_error`.
        """
        return None if _decides(facts) else await completion_canary(client, facts.served_name, limit_s)

    async def quiescent(self, client: Client) -> None:
        """The loads once more, then the scheduler's own word. Raises: Refusal `not_quiescent`."""
        running, waiting, _ = await self.gauges(client)
        if running or waiting:
            raise Refusal("not_quiescent", f"SGLang still runs {running} requests and holds {waiting} waiting")
        await parking.quiesce(client)

    async def release(self, client: Client, facts: LaunchFacts, limit_s: float) -> None:
        """Give weights and cache back. Raises: as `parking.release`."""
        if not facts.residency.parks:
            raise Refusal("residency_tier", "a restart_only engine gives its memory back only when it stops")
        await parking.release(client, limit_s)

    async def restore(self, client: Client, facts: LaunchFacts, limit_s: float) -> None:
        """Take them back, load dropped weights, forget every prompt. Raises: as `parking.resume`."""
        if not facts.residency.parks:
            raise Refusal("residency_tier", "a restart_only engine was never parked")
        await parking.resume(client, facts.residency, facts.model_dir, limit_s)

    async def alive_parked(self, client: Client) -> bool:
        """Whether it lists its model, which touches no released memory. Raises: ConnectionError, TimeoutError."""
        status, _ = await client.get("/v1/models")
        return status == 200

    async def sleeps(self, client: Client) -> bool:
        return False  # no route of it says so

    async def abort(self, client: Client, request_id: str) -> None:
        """End the request that was sent with this `rid`; SGLang also takes one that it does not know.

        Raises: Refusal `unsupported_capability` on a build without it; Failure `engine_error`.
        """
        if not self.aborts:
            raise Refusal("unsupported_capability", "this build of SGLang ends a request when its connection closes")
        if not request_id:
            raise Refusal("unsupported_capability", "a request without an id cannot be named to SGLang")
        body = json.dumps({"rid": request_id}).encode()
        status, _ = await client.post("/abort_request", body, admin=True)
        if status == 503:
            raise ConnectionError("/abort_request: the engine is going away")
        if status != 200:
            raise Failure("engine_error", f"/abort_request answered {status}")

    def failure(self, last_words: Sequence[str]) -> tuple[str, str] | None:
        """(code, one line) when the engine's last lines name a typed failure, else None."""
        return classify(last_words)


def read_loads(body: bytes) -> Reading | None:
    """(running, waiting, cache usage in ppm) over all ranks of a `/v1/loads` answer; None when it does not say."""
    try:
        rows = json.loads(body)["loads"]
        running = sum(_count(row["num_running_reqs"]) for row in rows)
        waiting = sum(_count(row["num_waiting_reqs"]) for row in rows)
        usage = max((_usage(row) for row in rows), default=None)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return (running, waiting, usage) if rows else None


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError("no count")
    return value


def _usage(row: Mapping[str, Any]) -> int:
    usage = row.get("token_usage", 0.0)
    return ppm(float(usage)) if isinstance(usage, (int, float)) else 0


def _decides(facts: LaunchFacts) -> bool:
    return facts.document.get("api") == "decisions"
