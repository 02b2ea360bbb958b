"""llama.cpp as the host drives it: readiness, the probe, its gauges and its ways of failing.

Source: engines 9.4, 12.1, 12.3; real-engines 2; decisions 2, 14, 15.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from capyctl.checkpoints.directory import list_files, pick_gguf
from capyctl.checkpoints.kv_cache import pad
from capyctl.documents import owned
from capyctl.documents.deployment import parse_deployment
from capyctl.engines.adapter import Client, Command, LaunchFacts, RestartOnly
from capyctl.engines.last_words import out_of_memory, worth_reading
from capyctl.engines.llamacpp.installation import CONFIG_FILE, check_config_file, fingerprint
from capyctl.engines.llamacpp.options import POLICY
from capyctl.engines.llamacpp.render import Launch, render
from capyctl.engines.metrics import read_gauges
from capyctl.engines.options import check_real_paths
from capyctl.engines.questions import first, probe_chat, probe_decision, read_json, same
from capyctl.engines.registered import Registered
from capyctl.errors import Failure, Refusal

_RUNNING, _WAITING = "llamacpp:requests_processing", "llamacpp:requests_deferred"
_MEMORY_WORDS = ("failed to allocate", "unable to allocate")
_UNLOADED_WORDS = ("failed to load model", "error loading model", "failed to open gguf")


@attrs.frozen(kw_only=True)
class LlamacppAdapter(RestartOnly):
    """One registered installation of llama.cpp."""

    registered: Registered
    models_root: Path | None = None
    telemetry: bool = False
    config_file: Path = CONFIG_FILE

    @property
    def family(self) -> str:
        return "llamacpp"

    @property
    def eof_settles(self) -> bool:
        return True

    @property
    def resets_unread(self) -> bool:
        return True

    def preflight(self) -> None:
        """Look at the installation again before a launch. Blocking.

        Raises: Refusal `engine_config_file` when llama.cpp would read a file of its own, `installation_drift`
          when the installation is gone, or changed and the profile says `refuse`.
        """
        check_config_file(self.config_file, "engine_config_file")
        if not os.access(self.registered.executable, os.X_OK):
            raise Refusal(
                "installation_drift", f"{self.registered.executable} of the profile {self.registered.name} is not there"
            )
        if self.registered.profile.security.installation_drift == "refuse" and self.registered.digest is not None:
            present = fingerprint(Path(self.registered.executable))
            if present != self.registered.digest:
                raise Refusal(
                    "installation_drift",
                    f"the files of {self.registered.executable} changed since {self.registered.name} was registered. "
                    "Register it again, or use --drift warn",
                )

    def drifted(self) -> bool | None:
        """Whether the installation's bytes differ from the registered ones; None when that was never measured."""
        if self.registered.digest is None:
            return None
        return fingerprint(Path(self.registered.executable)) != self.registered.digest

    def render(self, facts: LaunchFacts) -> Command:
        """The command line of one launch; creates the family's private directories, 0700.

        Raises: Refusal `checkpoint_unusable`, `unsafe_file`, `invalid_config` as the parts say.
        """
        document = parse_deployment(facts.document, "the deployment")
        block = document.engine_config.llamacpp
        listing = list_files(facts.model_dir, self.models_root)
        pick = pick_gguf(
            listing,
            block.gguf_file if block is not None else None,
            block.mmproj_file if block is not None else None,
        )
        check_real_paths(POLICY, document.engine_config.extra_args, self.registered.consent)
        private = facts.state_dir / "engines" / "llamacpp"
        for place in (private, private / "config", private / "cache"):
            owned.private_directory(place)
        return render(
            Launch(
                executable=self.registered.executable,
                served_name=facts.served_name,
                port=facts.port,
                model_file=facts.model_dir / pick.model,
                projector_file=facts.model_dir / pick.projector if pick.projector is not None else None,
                context_tokens=facts.context_tokens,
                slots=facts.slots,
                document=document,
                fixed_args=self.registered.profile.args,
                profile_env={str(name): value for name, value in self.registered.profile.env.items()},
                private_dir=private,
                log_path=facts.log_path,
                key=facts.key,
                device_env=facts.device_env,
                telemetry=self.telemetry,
            )
        )

    async def loaded(self, client: Client) -> bool:
        """One poll of `/health`: 200 is loaded, 503 is loading. ConnectionError passes through: not yet."""
        status, _ = await client.get("/health")
        if status in (200, 503):
            return status == 200
        raise Failure("launch_failed", f"/health answered {status}")

    async def verify(self, client: Client, facts: LaunchFacts) -> None:
        """The engine runs with what was rendered: name, slots, gauges, context.

        Raises: Failure `effective_args_mismatch` naming the first difference.
        """
        models = await read_json(client, "/v1/models")
        entry = first(models.get("data"))
        names = {entry.get("id"), *(entry.get("aliases") or ())}
        same("the served name", facts.served_name if facts.served_name in names else entry.get("id"), facts.served_name)
        props = await read_json(client, "/props")
        same("total_slots", props.get("total_slots"), facts.slots)
        same("endpoint_metrics", props.get("endpoint_metrics"), True)
        same("endpoint_slots", props.get("endpoint_slots"), True)
        meta = entry.get("meta") or {}
        expected = pad(facts.context_tokens)
        trained = meta.get("n_ctx_train")
        if isinstance(trained, int) and trained > 0:
            expected = min(expected, trained)
        same("n_ctx", meta.get("n_ctx"), expected)
        if facts.document.get("api") == "decisions":
            outputs = (entry.get("architecture") or {}).get("output_modalities") or []
            if "decisions" not in outputs:
                raise Failure(
                    "capability_missing:decisions", f"{facts.served_name} is no decision model: it gives {outputs}"
                )

    async def probe(self, client: Client, facts: LaunchFacts, limit_s: float) -> int:
        """One short inference at temperature 0; returns how many characters it answered.

        A model that reasons first is fine: its reasoning counts. A decision model is asked a decision.
        Raises: Failure `launch_failed` on an error status or an empty answer.
        """
        if facts.document.get("api") == "decisions":  # not read whole: rules that are newer than it do not end it
            return await probe_decision(client, facts.served_name, limit_s)
        return await probe_chat(client, facts.served_name, limit_s)

    async def gauges(self, client: Client) -> tuple[int, int, int | None]:
        """(processing, deferred, cache usage in ppm) of `/metrics` and `/slots`.

        A failed `/slots` read loses the usage only. Raises: ConnectionError, TimeoutError; Failure
        `engine_error` when the gauges are not in the answer.
        """
        found = await read_gauges(client, (_RUNNING, _WAITING))
        running = int(found[_RUNNING])
        return running, int(found[_WAITING]), await self._usage(client) if running else 0

    async def _usage(self, client: Client) -> int | None:
        try:
            status, body = await client.get("/slots")
        except (ConnectionError, TimeoutError):
            return None
        return slot_usage_ppm(body) if status == 200 else None

    def failure(self, last_words: Sequence[str]) -> tuple[str, str] | None:
        """(code, one line) when the engine's last lines name a typed failure, else None."""
        return classify(last_words)


def slot_usage_ppm(body: bytes) -> int | None:
    """Tokens of processing slots over the context of all, millionths; None when the answer does not say."""
    try:
        slots = json.loads(body)
        total = sum(int(slot["n_ctx"]) for slot in slots)
        used = sum(_slot_tokens(slot) for slot in slots if slot["is_processing"])
    except (ValueError, TypeError, KeyError):
        return None
    return min(1_000_000, used * 1_000_000 // total) if total > 0 else None


def _slot_tokens(slot: Mapping[str, Any]) -> int:
    following = slot.get("next_token")
    following = following[0] if isinstance(following, list) and following else following or {}
    decoded = int(following.get("n_decoded", 0)) if isinstance(following, Mapping) else 0
    return int(slot.get("n_prompt_tokens") or 0) + decoded


_ARGUMENT = re.compile(
    r"(?:invalid argument: |handling argument \"|argument has been removed: )(-{1,2}[A-Za-z0-9][\w-]*)"
)


def classify(lines: Sequence[str]) -> tuple[str, str] | None:
    """A typed failure in the engine's last lines. Names the option, never its value.

    A model that does not fit into memory is "failed to load" in the lines below the one that says why.
    """
    unloaded = False
    for line in reversed(worth_reading(lines)):
        refused = _ARGUMENT.search(line)
        if refused is not None:
            return "engine_argument_rejected", f"llama.cpp does not accept the argument {refused[1]}"
        low = line.lower()
        if "couldn't bind" in low or "address already in use" in low:
            return "port_conflict", "the leased port was taken by another program while the engine started"
        short = out_of_memory(line)
        if short is not None:
            return short
        if any(words in low for words in _MEMORY_WORDS):
            return "insufficient_memory", "the engine could not allocate its memory"
        unloaded = unloaded or any(words in low for words in _UNLOADED_WORDS)
    return ("checkpoint_unusable", "llama.cpp cannot load the model file") if unloaded else None
