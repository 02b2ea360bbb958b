"""How long engines' requests took, as their hosts last told: memory only, and no business of the world's.

Source: api 5.9 (the names of the fields are ours).
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from capyctl.control.book import Book
from capyctl.fsm.types import Lane, Millis
from capyctl.session import messages as m

STALE_MS: Final = 15_000
"""Three samples missed: its engine is parked, gone, or silent."""


@attrs.define(eq=False)
class Latencies:
    """The last report of each instance. `book` is read, never written."""

    book: Book
    last: dict[Lane, m.LatencyReport] = attrs.field(factory=dict)

    def heard(self, report: m.LatencyReport) -> None:
        """Keep a report; those of instances that are no more go."""
        self.last[report.incarnation.lane] = report
        for lane in [lane for lane in self.last if lane not in self.book.instances]:
            del self.last[lane]

    def view(self, now_ms: Millis) -> dict[str, Any]:
        """Distributions per deployment; an instance whose present engine told none has no sample."""
        rows = sorted(self.book.deployments.values(), key=lambda row: row.spec.name)
        return {
            "observed_at_ms": now_ms,
            "stale_after_ms": STALE_MS,
            "deployments": [
                {
                    "deployment_id": row.state.deployment,
                    "name": row.spec.name,
                    "instances": [
                        {
                            "index": lane.index,
                            "host_id": one.run.host,
                            "generation": one.run.generation,
                            "sample": self._sample(lane, one.run.generation, now_ms),
                        }
                        for lane, one in self.book.of(row.state.deployment)
                    ],
                }
                for row in rows
            ],
        }

    def _sample(self, lane: Lane, generation: int | None, now_ms: Millis) -> dict[str, Any] | None:
        report = self.last.get(lane)
        if report is None or report.incarnation.generation != generation:
            return None
        age_ms = max(0, now_ms - report.seen_at_ms)
        return {
            "sampled_at_ms": report.seen_at_ms,
            "age_ms": age_ms,
            "fresh": age_ms <= STALE_MS,
            "distributions": [
                {
                    "figure": one.figure,
                    "tier": "engine",
                    "source": one.source,
                    "count": one.count,
                    "sum_us": one.sum_us,
                    "buckets": [{"le_us": bucket.le_us, "count": bucket.count} for bucket in one.buckets],
                }
                for one in report.distributions
            ],
        }
