"""TensorFold as the host drives it: kernels that are built on first use, `/health`, and its ways of failing.

Source: engines 4.1, 8, 12.1, 12.3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import attrs

from capyctl.documents import owned
from capyctl.documents.deployment import Deployment, parse_deployment
from capyctl.engines.adapter import Client, Command, LaunchFacts, RestartOnly
from capyctl.engines.environment import Reserved
from capyctl.engines.last_words import out_of_memory, worth_reading
from capyctl.engines.metrics import ppm, read_gauges
from capyctl.engines.options import check_real_paths
from capyctl.engines.python.installation import Package
from capyctl.engines.python.installed import Installed
from capyctl.engines.python.openai_calls import served_entry
from capyctl.engines.questions import answer, probe_chat
from capyctl.engines.registered import Registered
from capyctl.engines.tensorfold.installation import PACKAGE, check_toolchain, own_cuda_dirs
from capyctl.engines.tensorfold.options import POLICY, RESERVED_ENV
from capyctl.engines.tensorfold.render import (
    Launch,
    check_drafts,
    check_streams,
    check_thinking,
    owned_variables,
    render,
)
from capyctl.errors import CapyError, Failure

_WAITING = "tensorfold:requests_waiting"
_CACHE = "tensorfold:kv_cache_usage_ratio"


@attrs.frozen(kw_only=True)
class TensorfoldAdapter(Installed, RestartOnly):
    """One registered installation of TensorFold."""

    @property
    def family(self) -> str:
        return "tensorfold"

    @property
    def package(self) -> Package:
        return PACKAGE

    @property
    def reserved_env(self) -> tuple[Reserved, ...]:
        return RESERVED_ENV

    def preflight(self) -> None:
        """Look at the installation and its build tools again before a launch. Blocking.

        Raises: Refusal `installation_drift` when the program is gone, or changed and the profile says `refuse`;
          `toolchain_missing`.
        """
        super().preflight()
        check_toolchain(Path(self.registered.executable), self.registered.profile.cuda_home)

    def render(self, facts: LaunchFacts) -> Command:
        """The command line of one launch. Creates the directory of kernels, 0700, and forgets locks of dead builds.

        Raises: Refusal `invalid_config`, `invalid_root`, `unsupported` as the parts say.
        """
        document = parse_deployment(facts.document, "the deployment")
        check_real_paths(POLICY, document.engine_config.extra_args, self.registered.consent)
        extensions = extensions_dir(self.registered, facts.state_dir)
        owned.private_directory(extensions)
        if facts.alone:
            forget_locks(extensions)
        argv = render(
            Launch(
                executable=self.registered.executable,
                served_name=facts.served_name,
                port=facts.port,
                model_dir=facts.model_dir,
                draft_dir=self.draft_dir(document),
                context_tokens=facts.context_tokens,
                document=document,
                fixed_args=self.registered.profile.args,
            )
        )
        env = self.environment(
            document,
            facts,
            {**owned_variables(extensions, facts.ready), **facts.device_env},
            own_cuda_dirs(self.prefix),
        )
        return Command(argv=argv, env=env)

    async def loaded(self, client: Client) -> bool:
        """One poll of `/health`: ready says `ok: true`. ConnectionError passes through: not yet."""
        status, body = await client.get("/health")
        if status == 503:
            return False
        return answer(status, body, "/health").get("ok") is True

    async def verify(self, client: Client, facts: LaunchFacts) -> None:
        """The served name is listed. Raises: Failure `effective_args_mismatch`."""
        await served_entry(client, facts.served_name)

    async def probe(self, client: Client, facts: LaunchFacts, limit_s: float) -> int:
        """One short chat; the first one of a build waits for its kernels, as long as `limit_s` lets it."""
        return await probe_chat(client, facts.served_name, limit_s)

    async def gauges(self, client: Client) -> tuple[int, int, int | None]:
        """(running, waiting, cache usage in ppm): `/health` says whether it is idle, `/metrics` says more.

        A failed read of `/metrics` loses the usage only. Raises: ConnectionError, TimeoutError; Failure
        `engine_error` when `/health` does not say.
        """
        status, body = await client.get("/health")
        said = answer(status, body, "/health", code="engine_error")
        running, busy = said.get("requests_running"), said.get("busy")
        if type(running) is not int or running < 0 or type(busy) is not bool:
            raise Failure("engine_error", "/health does not state requests_running and busy")
        running = max(running, int(busy))
        try:
            found = await read_gauges(client, (_WAITING, _CACHE))
        except (ConnectionError, TimeoutError, CapyError):
            return running, 0, None
        return running, int(found[_WAITING]), ppm(found[_CACHE])

    def failure(self, last_words: Sequence[str]) -> tuple[str, str] | None:
        """(code, one line) when the engine's last lines name a typed failure, else None."""
        return classify(last_words)


def extensions_dir(registered: Registered, state_dir: Path) -> Path:
    """Where a build keeps its compiled kernels."""
    build = re.sub(r"[^A-Za-z0-9.+-]", "_", registered.fingerprint)
    return state_dir / "engines" / "tensorfold" / build / "torch_extensions"


def built(registered: Registered, state_dir: Path) -> bool:
    """Whether a launch before left compiled kernels: then a start need not be waited for as long."""
    return next(extensions_dir(registered, state_dir).glob("**/*.so"), None) is not None


def check_document(document: Deployment, registered: Registered) -> None:
    """What TensorFold's options add to a deployment's rules. Raises: Refusal `invalid_config`."""
    args = [*registered.profile.args, *document.engine_config.extra_args]
    check_drafts(args, draft=document.model.draft is not None)
    check_streams(document, registered.profile.args)
    check_thinking(document)


def forget_locks(extensions: Path) -> None:
    """Remove the locks of builds that a dead engine left behind; a live build would wait on them for ever.

    Only for whoever knows that nobody builds there.
    """
    for lock in extensions.glob("**/lock"):
        if not lock.is_symlink() and lock.is_file():
            lock.unlink(missing_ok=True)


_REFUSED = re.compile(
    r"(?:unrecognized arguments?:|error: argument|expected .* for|ambiguous option:)\s*(--[A-Za-z0-9][\w-]*)"
)
_DRAFTER = re.compile(r"\bdrafter\b")
_LACKS = re.compile(r"\b(no|missing|unknown|unsupported|cannot|not (found|supported|available))\b")


def classify(lines: Sequence[str]) -> tuple[str, str] | None:
    """A typed failure in the engine's last lines. Names the option, never its value."""
    for line in reversed(worth_reading(lines)):
        refused = _REFUSED.search(line)
        if refused is not None:
            return "engine_argument_rejected", f"TensorFold does not accept the argument {refused[1]}"
        low = line.lower()
        if _DRAFTER.search(low) and _LACKS.search(low):
            return (
                "launch_failed",
                "TensorFold has no drafter for this model. Add --no-drafts to engine_config.extra_args",
            )
        if "no family serves" in low or "is not a model directory" in low:
            return "checkpoint_unusable", "TensorFold serves no model of this kind"
        if "address already in use" in low:
            return "port_conflict", "the leased port was taken by another program while the engine started"
        short = out_of_memory(line)
        if short is not None:
            return short
    return None
