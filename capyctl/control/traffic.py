"""Who waits and who runs, per deployment: indexes over the request machines, checked by an invariant.

The bounds are lifecycle 10.3: 32 places per deployment, a bounded queue per deployment and in total,
bounded bytes of waiting bodies. Order is arrival.
"""

from __future__ import annotations

import attrs

from capyctl.fsm.types import DeploymentId, Incarnation, Lane, RequestId

PLACES_MAX = 32  # running per deployment, fixed; cancelling requests included


@attrs.frozen(kw_only=True)
class QueueLimits:
    """Bounds of waiting (config 5.4). Zero waiting means that nothing waits."""

    pending_per_deployment: int = 64
    pending_total: int = 256
    buffered_bytes: int = 64 * 2**20


@attrs.define
class Queue:
    """One deployment's requests. `waiting` keeps arrival order; `running` maps to where the place is."""

    waiting: dict[RequestId, int] = attrs.field(factory=dict)  # -> body bytes
    running: dict[RequestId, Incarnation] = attrs.field(factory=dict)


@attrs.define
class Traffic:
    """All queues. Totals are kept beside the queues because they are asked on every arrival."""

    limits: QueueLimits = attrs.field(factory=QueueLimits)
    queues: dict[DeploymentId, Queue] = attrs.field(factory=dict)
    waited_for: set[DeploymentId] = attrs.field(factory=set)  # of those, where somebody waits
    waiting_total: int = 0
    waiting_bytes: int = 0

    def queue(self, deployment: DeploymentId) -> Queue:
        """The queue of a deployment, made when first asked for."""
        queue = self.queues.get(deployment)
        if queue is None:
            queue = self.queues[deployment] = Queue()
        return queue

    def why_full(self, deployment: DeploymentId, body_bytes: int) -> str | None:
        """Why one more request may not wait, in figures; None when it may."""
        waiting = len(self.queue(deployment).waiting)
        if waiting >= self.limits.pending_per_deployment:
            return f"{waiting} requests wait for it, {self.limits.pending_per_deployment} at most"
        if self.waiting_total >= self.limits.pending_total:
            return f"{self.waiting_total} requests wait in all, {self.limits.pending_total} at most"
        if self.waiting_bytes + body_bytes > self.limits.buffered_bytes:
            return f"waiting bodies hold {self.waiting_bytes} bytes, {self.limits.buffered_bytes} at most"
        return None

    def wait(self, deployment: DeploymentId, request: RequestId, body_bytes: int, *, front: bool = False) -> None:
        """Take a waiting slot, at the end, or at the `front` for one that lost its place before anything was sent."""
        queue = self.queue(deployment)
        if front:
            queue.waiting = {request: body_bytes, **queue.waiting}
        else:
            queue.waiting[request] = body_bytes
        self.waited_for.add(deployment)
        self.waiting_total += 1
        self.waiting_bytes += body_bytes

    def leave(self, deployment: DeploymentId, request: RequestId) -> None:
        """Give the waiting slot back."""
        waiting = self.queue(deployment).waiting
        self.waiting_bytes -= waiting.pop(request)
        self.waiting_total -= 1
        if not waiting:
            self.waited_for.discard(deployment)

    def run(self, deployment: DeploymentId, request: RequestId, incarnation: Incarnation) -> None:
        """Take a place."""
        self.queue(deployment).running[request] = incarnation

    def free(self, deployment: DeploymentId, request: RequestId) -> None:
        """Give the place back."""
        del self.queue(deployment).running[request]

    def has_place(self, deployment: DeploymentId) -> bool:
        """Whether one of the 32 places is free."""
        return len(self.queue(deployment).running) < PLACES_MAX

    def on(self, lane: Lane) -> list[RequestId]:
        """Requests that hold a place on any incarnation of `lane`."""
        running = self.queue(lane.deployment).running
        return [request for request, incarnation in running.items() if incarnation.lane == lane]

    def forget(self, deployment: DeploymentId) -> None:
        """Drop the queue of a deleted deployment; it must be empty."""
        queue = self.queues.get(deployment)
        if queue is not None and not queue.waiting and not queue.running:
            del self.queues[deployment]
