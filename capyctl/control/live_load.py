"""How busy deployments are now: memory only, cheap enough for a poll each second (api 5.9)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capyctl.control.book import Book
from capyctl.control.records import DeploymentRow
from capyctl.control.traffic import PLACES_MAX
from capyctl.control.views import shown_plan
from capyctl.control.world import World
from capyctl.fsm import instance
from capyctl.fsm.types import Lane, Millis

Json = dict[str, Any]  # plain JSON values of several types

LOAD_STALE_MS = 3_000
LOAD_DROPPED_MS = 30_000


def load(world: World, now_ms: Millis) -> Json:
    """Every deployment by name: what its router holds, and what its engines last said of themselves."""
    book = world.book
    rows = sorted(book.deployments.values(), key=lambda row: row.spec.name)
    return {
        "observed_at_ms": now_ms,
        "stale_after_ms": LOAD_STALE_MS,
        "deployments": [_load(book, row, now_ms) for row in rows],
    }


def _load(book: Book, row: DeploymentRow, now_ms: Millis) -> Json:
    queue = book.traffic.queues.get(row.state.deployment)
    instances = list(book.of(row.state.deployment))
    plan = shown_plan(row, instances)
    return {
        "deployment_id": row.state.deployment,
        "name": row.spec.name,
        "router": {
            "in_flight": len(queue.running) if queue else 0,
            "in_flight_limit": PLACES_MAX,
            "waiting": len(queue.waiting) if queue else 0,
            "waiting_limit": book.traffic.limits.pending_per_deployment,
        },
        "max_running": {"count": plan.slots, "source": "engine"} if plan else {"source": "engine_default"},
        "instances": [
            {
                "index": lane.index,
                "host_id": one.run.host,
                "generation": one.run.generation,
                "observed_state": instance.published(one.machine),
                "router_in_flight": book.running_on.get(lane, 0),
                "sample": _sample(book, lane, now_ms),
            }
            for lane, one in instances
        ],
    }


def _sample(book: Book, lane: Lane, now_ms: Millis) -> Json | None:
    report = book.loads.get(lane)
    if report is None or now_ms - report.read_at_ms > LOAD_DROPPED_MS:
        return None
    age = max(0, now_ms - report.read_at_ms)
    engine: Mapping[str, int | None] = {
        "running": report.running,
        "waiting": report.waiting,
        "kv_usage_ppm": report.kv_usage_ppm,
    }
    return {
        "sampled_at_ms": report.read_at_ms,
        "age_ms": age,
        "fresh": age <= LOAD_STALE_MS,
        "engine": {name: value for name, value in engine.items() if value is not None},
    }
