"""The commands that have a deployment's sources on this host, and call them off again.

What is fetched twice is one download (`capyctl.downloads`); what is called off is called off for one command.
Source: api 7.6-7.9; lifecycle 15.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import trio

from capyctl.checkpoints.sources import fetched
from capyctl.clock import now_ms
from capyctl.documents.deployment import parse_deployment
from capyctl.downloads.part import Progress
from capyctl.downloads.shared import Downloads
from capyctl.errors import Refusal
from capyctl.fsm.types import Bytes
from capyctl.session import messages as m


@attrs.define(eq=False, kw_only=True)
class Materials:
    """Fetches what commands name. `say` sends a sample of how far it is, or drops it."""

    downloads: Downloads | None
    say: Callable[[m.Report], None]
    _scopes: dict[str, trio.CancelScope] = attrs.field(factory=dict)

    @property
    def root(self) -> str | None:
        """Where this host keeps what it downloads."""
        return None if self.downloads is None else str(self.downloads.root)

    async def materialize(self, command: m.MaterializeSource) -> m.Result:
        """Have every source of a deployment. Raises: CapyError: as downloads do; `deployment_stopped`, called off."""
        if self.downloads is None:
            raise Refusal("not_materializable", "this host downloads no models; name a directory")
        document = parse_deployment(command.document, "the deployment")
        paths: list[Path] = []
        behind = 0  # bytes of the sources that are complete
        with self._scopes.setdefault(command.command_id, trio.CancelScope()) as scope:
            try:
                for source, wanted in fetched(document, command.family):
                    last = Progress()

                    def hear(progress: Progress, before: int = behind) -> None:
                        nonlocal last
                        last = progress
                        self.say(_report(command.command_id, progress, before))

                    paths.append(await self.downloads.have(source, wanted, hear))
                    behind += last.total_bytes or 0
            finally:
                self._scopes.pop(command.command_id, None)
        if scope.cancelled_caught:
            raise Refusal("deployment_stopped", "its download was stopped; what has arrived is kept for the next start")
        return m.Materialized(command_id=command.command_id, paths=tuple(str(path) for path in paths))

    def stop(self, command: m.StopMaterializing) -> m.Result:
        """Call off one command. It may have ended by itself."""
        scope = self._scopes.get(command.materialize)
        if scope is not None:
            scope.cancel()
        return m.Done(command_id=command.command_id)


def _report(command_id: str, progress: Progress, before: int) -> m.SourceProgress:
    total = progress.total_bytes
    return m.SourceProgress(
        seen_at_ms=now_ms(),
        materialize=command_id,
        phase=progress.phase,
        done_bytes=Bytes(before + progress.done_bytes),
        total_bytes=None if total is None else Bytes(before + total),
    )
