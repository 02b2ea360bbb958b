"""The half of an adapter that is the same for every engine which lives in a Python environment.

Source: engines 2.5, 4.1, 4.2.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path

import attrs

from capyctl.checkpoints.directory import resolve_model
from capyctl.documents.deployment import Deployment
from capyctl.documents.model_source import Local
from capyctl.engines.adapter import Client, LaunchFacts
from capyctl.engines.environment import Reserved
from capyctl.engines.python.installation import Package, prefix_of
from capyctl.engines.python.openai_calls import models_listed
from capyctl.engines.python.variables import Closed, closed_environment, max_jobs
from capyctl.engines.registered import Registered
from capyctl.errors import Refusal


@attrs.frozen(kw_only=True)
class Installed:
    """One registered installation. `reserved_env`: the variables that no document may set for this family."""

    registered: Registered
    models_root: Path | None = None
    telemetry: bool = False

    @property
    @abstractmethod
    def package(self) -> Package: ...

    @property
    @abstractmethod
    def reserved_env(self) -> tuple[Reserved, ...]: ...

    @property
    def prefix(self) -> Path:
        return prefix_of(self.registered.executable)

    @property
    def eof_settles(self) -> bool:
        return False

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
                f"the files of {self.prefix} changed since {self.registered.name} was registered. "
                "Register it again, or use --drift warn",
            )

    def drifted(self) -> bool | None:
        """Whether the installation's bytes differ from the registered ones; None when that was never measured."""
        if self.registered.digest is None:
            return None
        return self.package.digest(self.prefix) != self.registered.digest

    def draft_dir(self, document: Deployment) -> Path | None:
        """Where the draft model lies. Raises: Refusal `unsupported`, `invalid_root`."""
        draft = document.model.draft
        if draft is None:
            return None
        if not isinstance(draft, Local):
            raise Refusal("unsupported", f"{document.name}: model.draft: this release takes drafts from directories")
        return resolve_model(draft.path, self.models_root)

    def environment(
        self, document: Deployment, facts: LaunchFacts, owned: Mapping[str, str], path_dirs: tuple[str, ...] = ()
    ) -> dict[str, str]:
        """The closed environment of one launch, with the family's `owned` variables over everything configured."""
        return closed_environment(
            Closed(
                prefix=self.prefix,
                cuda_home=self.registered.profile.cuda_home,
                profile_env={str(name): value for name, value in self.registered.profile.env.items()},
                deployment_env={str(name): value for name, value in document.engine_config.env.items()},
                reserved=self.reserved_env,
                log_path=facts.log_path,
                max_jobs=max_jobs(facts),
                telemetry=self.telemetry,
                path_dirs=path_dirs,
                owned=owned,
            )
        )


@attrs.frozen(kw_only=True)
class Parkable(Installed):
    """What vLLM and SGLang have in common beside: they park, and serve by uvicorn before workers of torch."""

    @property
    def parks(self) -> bool:
        return self.registered.profile.parks

    @property
    def resets_unread(self) -> bool:
        return True

    @property
    def workers_listen(self) -> bool:
        return True

    async def loaded(self, client: Client) -> bool:
        """One poll of `/v1/models`. The port is closed until the model is loaded."""
        return await models_listed(client)

    def check_parks(self, facts: LaunchFacts, why: str | None = None) -> None:
        """Refuse a launch that is to park where the profile, or its own options (`why`), do not let it.

        Raises: Refusal `capability_missing:deep_park`.
        """
        if not self.parks:
            why = f"the profile {self.registered.name} does not park (security.deep_park: disabled)"
        if facts.residency.parks and why is not None:
            raise Refusal("capability_missing:deep_park", f"{why}. State residency: restart_only")
