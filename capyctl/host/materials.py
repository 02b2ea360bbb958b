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
from capyctl.downloads import kept
from capyctl.downloads.part import Progress
from capyctl.downloads.shared import Downloads
from capyctl.errors import Failure, Refusal
from capyctl.fsm.types import Bytes
from capyctl.host.journal import Journal
from capyctl.session import messages as m


@attrs.define(eq=False, kw_only=True)
class Materials:
    """Fetches what commands name. `say` sends a sample of how far it is, or drops it."""

    downloads: Downloads | None
    journal: Journal
    say: Callable[[m.Report], None]
    _scopes: dict[str, trio.CancelScope] = attrs.field(factory=dict)
    _pruning: trio.Lock = attrs.field(factory=trio.Lock)

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

                    async with self._pruning:
                        pass  # what is being removed is not taken for what is there
                    paths.append(await self.downloads.have(source, wanted, hear))
                    behind += last.total_bytes or 0
            finally:
                self._scopes.pop(command.command_id, None)
        if scope.cancelled_caught:
            raise Refusal("deployment_stopped", "its download was stopped; what has arrived is kept for the next start")
        return m.Materialized(command_id=command.command_id, paths=tuple(str(path) for path in paths))

    async def prune(self, command: m.PruneSources) -> m.Result:
        """Show what is downloaded, or remove what nobody keeps. Raises: Failure when a file cannot be removed."""
        if self.downloads is None:
            return m.Sources(command_id=command.command_id, sources=())
        root = self.downloads.root
        try:
            if command.kept is None:
                found = await trio.to_thread.run_sync(kept.present, root)
            else:
                async with self._pruning:
                    places = {*command.kept, *await self._running(root)}
                    found = await trio.to_thread.run_sync(kept.prune, root, places)
        except OSError as wrong:
            raise Failure("internal", f"{wrong.filename or root}: {wrong.strerror or wrong}") from wrong
        rows = tuple(m.Source(place=one.place, bytes=one.bytes, complete=one.complete) for one in found)
        return m.Sources(command_id=command.command_id, sources=rows)

    async def _running(self, root: Path) -> set[str]:
        """Places that a launch on record here names: an older revision may still run from them."""
        named: set[str] = set()
        for record in await self.journal.launches():
            model = record.command.document.get("model") or {}
            paths = [record.command.model, *((model.get(name) or {}).get("path") for name in ("source", "draft"))]
            named |= {path for path in paths if isinstance(path, str)}
        return {path.removeprefix(f"{root}/") for path in named}

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
