"""vLLM as the host drives it: its entry, readiness, gauges, sleep and wake, and its ways of failing.

Source: engines 4.1, 6, 12, 13; real-engines 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from capyctl.documents.deployment import parse_deployment
from capyctl.engines import parsers
from capyctl.engines.adapter import Client, Command, LaunchFacts
from capyctl.engines.environment import Reserved
from capyctl.engines.metrics import read_load
from capyctl.engines.options import check_real_paths
from capyctl.engines.python.installation import Package, helper_argv
from capyctl.engines.python.installed import Parkable
from capyctl.engines.python.openai_calls import completion_canary, served_entry
from capyctl.engines.questions import probe_chat, same
from capyctl.engines.vllm import sleep
from capyctl.engines.vllm.failures import classify
from capyctl.engines.vllm.installation import ENTRY, PACKAGE, install_helpers
from capyctl.engines.vllm.options import POLICY, RESERVED_ENV
from capyctl.engines.vllm.render import Launch, variables, words
from capyctl.errors import CapyError, Refusal

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_USAGE = "vllm:kv_cache_usage_perc"  # from 0 to 1, despite its name


@attrs.frozen(kw_only=True)
class VllmAdapter(Parkable):
    """One registered installation of vLLM."""

    @property
    def family(self) -> str:
        return "vllm"

    @property
    def package(self) -> Package:
        return PACKAGE

    @property
    def reserved_env(self) -> tuple[Reserved, ...]:
        return RESERVED_ENV

    @property
    def aborts(self) -> bool:
        """Closing the connection ends a request within 50 ms; the route by id is there in dev mode alone."""
        return False

    def render(self, facts: LaunchFacts) -> Command:
        """The command line of one launch. Writes the helper modules that it runs.

        Raises: Refusal `invalid_config`, `invalid_root`, `unsafe_file`, `insufficient_device_memory`,
          `capability_missing:deep_park`.
        """
        document = parse_deployment(facts.document, "the deployment")
        config, template = parsers.read_texts(facts.model_dir)
        self.check_parks(facts)
        check_real_paths(POLICY, document.engine_config.extra_args, self.registered.consent)
        runtime = install_helpers(facts.state_dir)
        rendered, rest = words(
            Launch(
                facts=facts,
                document=document,
                fixed_args=self.registered.profile.args,
                version=self.registered.version,
                parsers=parsers.detect("vllm", config, template),
                draft_dir=self.draft_dir(document),
            )
        )
        env = self.environment(document, facts, variables(facts, runtime, telemetry=self.telemetry))
        argv = helper_argv(self.prefix, runtime / ENTRY, ("serve", str(len(rendered)), *rendered, *rest))
        return Command(argv=argv, env=env)

    async def verify(self, client: Client, facts: LaunchFacts) -> None:
        """The served name and the context; the entry compared everything else before the engine started.

        Raises: Failure `effective_args_mismatch`.
        """
        entry = await served_entry(client, facts.served_name)
        if facts.context_tokens:
            same("--max-model-len", entry.get("max_model_len"), facts.context_tokens)
        same("the model's directory", entry.get("root"), str(facts.model_dir))

    async def probe(self, client: Client, facts: LaunchFacts, limit_s: float) -> int:
        """One short chat. Raises: Failure `launch_failed`."""
        return await probe_chat(client, facts.served_name, limit_s, logprobs=True)

    async def gauges(self, client: Client) -> tuple[int, int, int | None]:
        """(running, waiting, cache usage in ppm) of `/metrics`, summed over engines.

        Raises: ConnectionError, TimeoutError; Failure `engine_error` when the counts are not there.
        """
        return await read_load(client, RUNNING, WAITING, _USAGE)

    async def canary(self, client: Client, facts: LaunchFacts, limit_s: float) -> str | None:
        """What the fixed prompt is completed with. Raises: Failure `engine_error`, `wake_mismatch`."""
        return await completion_canary(client, facts.served_name, limit_s)

    async def quiescent(self, client: Client) -> None:
        """The gauges again, once: they follow the scheduler within a step. Raises: Refusal `not_quiescent`."""
        running, waiting, _ = await self.gauges(client)
        if running or waiting:
            raise Refusal("not_quiescent", f"vLLM still runs {running} requests and holds {waiting} waiting")

    async def release(self, client: Client, facts: LaunchFacts, limit_s: float) -> None:
        """Sleep, at the level of the residency. Raises: as `sleep.sleep`."""
        await sleep.sleep(client, facts.residency, self.registered.version, limit_s)

    async def restore(self, client: Client, facts: LaunchFacts, limit_s: float) -> None:
        """Wake, reload what was dropped, forget every prompt. Raises: as `sleep.wake`."""
        await sleep.wake(client, facts.residency, self.registered.version, limit_s)

    async def alive_parked(self, client: Client) -> bool:
        """Whether it says that it sleeps. Raises: ConnectionError, TimeoutError."""
        return await self.sleeps(client)

    async def sleeps(self, client: Client) -> bool:
        """As long as one tag sleeps it says so, and lets requests hang. Raises: ConnectionError, TimeoutError."""
        try:
            return await sleep.is_sleeping(client)
        except CapyError:
            return False

    async def abort(self, client: Client, request_id: str) -> None:
        raise Refusal("unsupported_capability", "vLLM ends a request when its connection closes")

    def failure(self, last_words: Sequence[str]) -> tuple[str, str] | None:
        """(code, one line) when the engine's last lines name a typed failure, else None."""
        return classify(last_words)
