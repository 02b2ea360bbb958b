"""vLLM as the host drives it: its entry, readiness, gauges, sleep and wake, and its ways of failing.

Source: engines 4.1, 6, 12, 13; real-engines 1.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import attrs

from capyctl.checkpoints.directory import resolve_model
from capyctl.documents.deployment import Deployment, parse_deployment
from capyctl.documents.model_source import Local
from capyctl.engines import parsers
from capyctl.engines.adapter import Client, Command, LaunchFacts
from capyctl.engines.options import check_real_paths
from capyctl.engines.python.installation import helper_argv, prefix_of
from capyctl.engines.python.openai_calls import completion_canary, models_listed, served_entry
from capyctl.engines.python.variables import Closed, closed_environment, max_jobs
from capyctl.engines.questions import gauge_sums, probe_chat, same
from capyctl.engines.registered import Registered
from capyctl.engines.vllm import sleep
from capyctl.engines.vllm.failures import classify
from capyctl.engines.vllm.installation import ENTRY, PACKAGE, install_helpers
from capyctl.engines.vllm.options import POLICY, RESERVED_ENV
from capyctl.engines.vllm.render import Launch, variables, words
from capyctl.errors import CapyError, Failure, Refusal

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_USAGE = "vllm:kv_cache_usage_perc"  # from 0 to 1, despite its name


@attrs.frozen(kw_only=True)
class VllmAdapter:
    """One registered installation of vLLM."""

    registered: Registered
    models_root: Path | None = None
    telemetry: bool = False

    @property
    def family(self) -> str:
        return "vllm"

    @property
    def eof_settles(self) -> bool:
        return False

    @property
    def parks(self) -> bool:
        return self.registered.profile.parks

    @property
    def aborts(self) -> bool:
        """Closing the connection ends a request within 50 ms; the route by id is there in dev mode alone."""
        return False

    @property
    def workers_listen(self) -> bool:
        return True

    def preflight(self) -> None:
        """Look at the installation again before a launch. Blocking.

        Raises: Refusal `installation_drift` when the program is gone, or changed and the profile says `refuse`.
        """
        executable = Path(self.registered.executable)
        if not os.access(executable, os.X_OK):
            raise Refusal("installation_drift", f"{executable} of the profile {self.registered.name} is not there")
        if self.registered.profile.security.installation_drift == "refuse" and self.drifted():
            raise Refusal(
                "installation_drift",
                f"the files of {prefix_of(executable)} changed since {self.registered.name} was registered. "
                "Register it again, or use --drift warn",
            )

    def drifted(self) -> bool | None:
        """Whether the installation's bytes differ from the registered ones; None when that was never measured."""
        if self.registered.digest is None:
            return None
        return PACKAGE.digest(prefix_of(self.registered.executable)) != self.registered.digest

    def render(self, facts: LaunchFacts) -> Command:
        """The command line of one launch. Writes the helper modules that it runs.

        Raises: Refusal `invalid_config`, `invalid_root`, `unsafe_file`, `insufficient_device_memory`,
          `capability_missing:deep_park`.
        """
        document = parse_deployment(facts.document, "the deployment")
        config, template = parsers.read_texts(facts.model_dir)
        if facts.residency.parks:
            self._check_parks()
        check_real_paths(POLICY, document.engine_config.extra_args, self.registered.consent)
        runtime = install_helpers(facts.state_dir)
        rendered, rest = words(
            Launch(
                facts=facts,
                document=document,
                fixed_args=self.registered.profile.args,
                version=self.registered.version,
                parsers=parsers.detect("vllm", config, template),
                draft_dir=self._draft_dir(document),
            )
        )
        prefix = prefix_of(self.registered.executable)
        env = closed_environment(
            Closed(
                prefix=prefix,
                cuda_home=self.registered.profile.cuda_home,
                profile_env={str(name): value for name, value in self.registered.profile.env.items()},
                deployment_env={str(name): value for name, value in document.engine_config.env.items()},
                reserved=RESERVED_ENV,
                log_path=facts.log_path,
                max_jobs=max_jobs(facts),
                telemetry=self.telemetry,
                owned=variables(facts, runtime, telemetry=self.telemetry),
            )
        )
        argv = helper_argv(prefix, runtime / ENTRY, ("serve", str(len(rendered)), *rendered, *rest))
        return Command(argv=argv, env=env)

    def _check_parks(self) -> None:
        if not self.parks:
            raise Refusal(
                "capability_missing:deep_park",
                f"the profile {self.registered.name} does not park (security.deep_park: disabled). "
                "State residency: restart_only",
            )

    def _draft_dir(self, document: Deployment) -> Path | None:
        draft = document.model.draft
        if draft is None:
            return None
        if not isinstance(draft, Local):
            raise Refusal("unsupported", f"{document.name}: model.draft: this release takes drafts from directories")
        return resolve_model(draft.path, self.models_root)

    async def loaded(self, client: Client) -> bool:
        """One poll of `/v1/models`. The port is closed until the model is loaded."""
        return await models_listed(client)

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
        status, body = await client.get("/metrics")
        if status != 200:
            raise Failure("engine_error", f"/metrics answered {status}")
        found = gauge_sums(body.decode("utf-8", "replace"), (RUNNING, WAITING, _USAGE))
        missing = [name for name in (RUNNING, WAITING) if name not in found]
        if missing:
            raise Failure("engine_error", f"/metrics does not state {missing[0]}")
        usage = found.get(_USAGE)
        ppm = None if usage is None else min(1_000_000, round(usage * 1_000_000))
        return int(found[RUNNING]), int(found[WAITING]), ppm

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
