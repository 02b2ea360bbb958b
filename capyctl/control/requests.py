"""Requests in the world: classified on arrival, given places in order, settled by proof (lifecycle 10).

The router hears of a decision through Admit, Answer, Cut and Settled, performed at once. A request that
finds a free place on an open gate is admitted in the step of its arrival; nothing here waits for the disk.
"""

from __future__ import annotations

from capyctl.control import events as e
from capyctl.control import measuring, outward, waits
from capyctl.control.book import Book
from capyctl.control.orders import Abort, Admit, Answer, Cut, Settled
from capyctl.control.records import DeploymentRow, InstanceRow
from capyctl.errors import lookup
from capyctl.fsm import deployment, request
from capyctl.fsm.proofs import GoneProof, Idle
from capyctl.fsm.request import Phase
from capyctl.fsm.types import Activation, DeploymentId, Incarnation, Lane, Millis, Origin, RequestId

VAIN_MAX = 5  # looks in a row, some ten seconds at least, after which nobody is kept waiting for a doubted engine
VAIN_RETRY_S = 5
RETRY_AFTER_S = 1  # told with every queue_full
PATHS = {
    "chat": (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/rerank",
    ),
    "decisions": ("/v1/systemone",),
}
"""By what a deployment offers: where the inference endpoint takes requests for it."""
SHY_MS = Millis(250)  # an upstream that refused a connection is not asked again for so long
STALE_LOAD_MS = Millis(3_000)  # an older reading of an engine's gauges does not choose between instances
KV_PRESSURE_PPM = 900_000  # above this share of its cache an instance is asked last

OF_FILES = frozenset({"checkpoint_mismatch", "checkpoint_unusable", "invalid_root", "unsafe_file", "too_large"})
"""Failures of a start that lie in the model's files: no patience of a client mends them, so it reads the code."""
AT_ITS_SOURCE = frozenset({"unauthorized", "not_found"})
"""What a source of models said to this machine: it says nothing about a client's own key or model."""
NOT_WAITED_FOR = frozenset({Phase.CANCEL_STOP, Phase.COMPLETING})
"""A drain does not wait for these: the first settle at the stop itself, the second are delivered already."""


# --- arrival --------------------------------------------------------------------------------------


def arrived(book: Book, event: e.RequestArrived) -> None:
    """Classify one request: a place, the queue, or a refusal that queues nothing."""
    target = book.routes.get(event.route)
    row = book.deployments.get(target) if target is not None else None
    limit = book.settings.request_deadline_ms
    if row is not None and row.spec.request_deadline_ms is not None:
        limit = min(limit, row.spec.request_deadline_ms)
    elif row is not None:
        limit = max(limit, row.spec.traits.least_deadline_ms)
    book.requests[event.request] = request.State(
        request=event.request,
        stream=event.stream,
        arrived_at_ms=event.now_ms,
        deadline_ms=Millis(event.now_ms + limit),
        nameable=event.nameable,
    )
    if target is None or row is None or (event.allowed is not None and row.spec.name not in event.allowed):
        _turn_away(book, event, "not_found", f"no model {event.route!r} is deployed here; see GET /v1/models")
        return
    refusal = _why_not(book, row, event)
    if refusal is not None:
        _turn_away(book, event, *refusal)
        return
    incarnation = choose(book, target) if not book.traffic.queue(target).waiting else None
    book.bodies[event.request] = event.body_bytes
    if incarnation is not None and book.traffic.has_place(target):
        _give_place(book, target, event.request, incarnation)
        return
    book.dirty = True  # a refused request asks for the wake or the start all the same
    full = book.traffic.why_full(target, event.body_bytes)
    if full is not None:
        book.asked.add(target)
        _turn_away(book, event, "queue_full", f"{event.route} takes no more requests now: {full}", RETRY_AFTER_S)
        return
    tell(book, event.request, request.WaitBegun(now_ms=event.now_ms, deployment=target))


def _turn_away(book: Book, event: e.RequestArrived, code: str, message: str, retry_after_s: int | None = None) -> None:
    tell(
        book,
        event.request,
        request.TurnedAway(now_ms=event.now_ms, code=code, message=message, retry_after_s=retry_after_s),
    )


def _why_not(book: Book, row: DeploymentRow, event: e.RequestArrived) -> tuple[str, str, int | None] | None:
    """The refusal that queues nothing, or None: api, options, operator stops, checkpoint, back-off."""
    name, state = row.spec.name, row.state
    if event.api != row.spec.api:
        paths = PATHS[row.spec.api]
        told = paths[0] if len(paths) == 1 else f"{', '.join(paths[:-1])} and {paths[-1]}"
        return "api_mismatch", f"{name} is a model for {row.spec.api}, and is asked at {told}", None
    if event.vectors and not row.spec.traits.vectors:
        return "api_mismatch", f"the engine of {name} serves chat and completions; embeddings and ranks are off", None
    if event.cache_salt and not row.spec.traits.cache_salt:
        return "cache_salt_unsupported", f"the engine of {name} does not partition its cache by salt", None
    if state.phase in (deployment.Phase.DELETING, deployment.Phase.DELETED):
        return "not_found", f"{name} is being deleted", None
    if operator_stopped(book, row):
        return "deployment_stopped", stopped_words(row), None
    if state.gate in (deployment.Gate.MISMATCH, deployment.Gate.UNUSABLE, deployment.Gate.UNMEASURABLE):
        measuring.again(book, row)  # the next request finds what was put right in the meantime
        words = outward.words(state.gate_reason).removeprefix(f"{name}: ")
        return of_files(state.gate_code), f"{name} cannot start: {words}", None
    refusal = unprovable(book, row)
    if refusal is not None:
        return refusal
    rows = [instance for _, instance in book.of(state.deployment)]
    if any(instance.gate_open or instance.in_progress for instance in rows):
        return None
    if row.spec.activation is Activation.EXPLICIT and not any(
        instance.wish is not None and instance.wish.origin is Origin.OPERATOR for instance in rows
    ):
        return "deployment_inactive", inactive_words(row), None
    return _backing_off(row, rows, event.now_ms)


def did_not_start(row: DeploymentRow, why: str) -> str:
    """What a client is told of a start that failed."""
    return f"{row.spec.name} did not start: {why}"


def stopped_words(row: DeploymentRow) -> str:
    """What a client is told whose model an operator stopped."""
    return f"an operator stopped {row.spec.name}. Try: capyctl start deployment {row.spec.name}"


def inactive_words(row: DeploymentRow) -> str:
    """What a client is told whose model does not run, and starts for no request."""
    return f"only an operator starts {row.spec.name}. Try: capyctl start deployment {row.spec.name}"


def of_files(code: str | None) -> str:
    """The code that a client reads for a model whose files cannot be used."""
    return "checkpoint_unusable" if code is None or code in AT_ITS_SOURCE else code


def unprovable(book: Book, row: DeploymentRow) -> tuple[str, str, int | None] | None:
    """Every instance holds an engine that look after look proved nothing of: waiting for it would be for a guess."""
    looks = [book.vain.get(lane, (0, "")) for lane, _ in book.of(row.state.deployment)]
    if not looks or any(count < VAIN_MAX for count, _ in looks):
        return None
    words = outward.words(looks[0][1]) or "it does not answer"
    name = row.spec.name
    return "unavailable", f"the engine of {name} was not seen to be well since the restart: {words}", VAIN_RETRY_S


def _backing_off(row: DeploymentRow, rows: list[InstanceRow], now_ms: Millis) -> tuple[str, str, int | None] | None:
    """After a failed start, for a while, the engine's last words at once instead of another start."""
    ends = [
        (run.retry_at_ms, run.last_error) for run in (one.machine.run for one in rows) if run.retry_at_ms is not None
    ]
    if not rows or len(ends) < len(rows) or any(now_ms >= at for at, _ in ends):
        return None
    ends_at, problem = min(ends, key=lambda one: one[0])
    wait_s = max(1, -(-(ends_at - now_ms) // 1000))
    if problem is not None and problem.code in OF_FILES:
        return problem.code, outward.words(problem.reason), None
    words = f"{problem.code}: {outward.words(problem.reason)}" if problem is not None else "the last start failed"
    told = did_not_start(row, f"{words} (a request in {wait_s} s or later tries again)")
    return "activation_failed", told, int(wait_s)


def operator_stopped(book: Book, row: DeploymentRow) -> bool:
    """Whether an operator stopped all of it: no request, timer or recovery starts it (invariant 38)."""
    return deployment.operator_stopped(row.state)


# --- places ---------------------------------------------------------------------------------------


def choose(book: Book, deployment_id: DeploymentId) -> Incarnation | None:
    """The open incarnation with the least to do (lifecycle 10.4); ties go to the one used longest ago."""
    best: tuple[int, int, Incarnation] | None = None
    for incarnation in book.serving(deployment_id):
        lane = incarnation.lane
        if book.shy_until.get(lane, Millis(0)) > book.now_ms:
            continue
        busy = book.running_on.get(lane, 0)
        load = book.loads.get(lane)
        if load is not None and load.incarnation == incarnation and book.now_ms - load.read_at_ms < STALE_LOAD_MS:
            busy = max(busy, load.running + load.waiting)
            if (load.kv_usage_ppm or 0) > KV_PRESSURE_PPM:
                busy += 1
        score = (busy, book.used_at.get(lane, 0), incarnation)
        if best is None or score < best:
            best = score
    return None if best is None else best[2]


def _give_place(book: Book, target: DeploymentId, request_id: RequestId, incarnation: Incarnation) -> None:
    traits = book.deployments[target].spec.traits
    tell(
        book,
        request_id,
        request.PlaceGiven(
            now_ms=book.now_ms,
            deployment=target,
            incarnation=incarnation,
            traits=request.EngineTraits(
                # What an engine acknowledges of an id that it was never told ends nothing.
                abort_by_id=traits.abort_by_id and book.requests[request_id].nameable,
                idle_signal=traits.idle_signal,
                eof_proves_end=traits.eof_proves_end,
            ),
        ),
    )


def let_in(book: Book, target: DeploymentId) -> int:
    """Give waiters places in order of arrival while there are any; the number let in."""
    let = 0
    queue = book.traffic.queue(target)
    while queue.waiting and book.traffic.has_place(target):
        incarnation = choose(book, target)
        if incarnation is None:
            break
        _give_place(book, target, next(iter(queue.waiting)), incarnation)
        let += 1
    return let


def fail_waiters(book: Book, target: DeploymentId, code: str, message: str, retry_after_s: int | None = None) -> None:
    """End every request that waits for `target` with this code."""
    for request_id in list(book.traffic.queue(target).waiting):
        tell(
            book,
            request_id,
            request.WaitFailed(now_ms=book.now_ms, code=code, message=message, retry_after_s=retry_after_s),
        )


# --- facts ----------------------------------------------------------------------------------------


def told(book: Book, event: e.RequestFact) -> None:
    """A fact about a running request, from the router or the ingress."""
    at = event.now_ms
    fact: request.Event
    match event:
        case e.RequestSent():
            fact = request.Sent(now_ms=at)
        case e.RequestNotAccepted(reason=reason):
            state = book.requests.get(event.request)
            if state is not None and state.incarnation is not None:
                book.shy_until[state.incarnation.lane] = Millis(at + SHY_MS)
                book.due.at(Millis(at + SHY_MS), "waiters", state.incarnation.lane.deployment)
            fact = request.NotAccepted(now_ms=at, reason=reason)
        case e.FirstOutput():
            fact = request.OutputBegun(now_ms=at)
        case e.RequestFinished():
            fact = request.Finished(now_ms=at)
        case e.RequestRecorded():
            fact = request.Recorded(now_ms=at)
        case e.EngineRejected(status=status):
            fact = request.Rejected(now_ms=at, status=status)
        case e.EngineErrored(reason=reason):
            fact = request.Errored(now_ms=at, reason=reason)
        case e.UpstreamLost(reason=reason):
            fact = request.UpstreamLost(now_ms=at, reason=reason)
        case e.ClientGone(reason=reason):
            fact = request.ClientGone(now_ms=at, reason=reason)
        case e.UpstreamEnded(half_closed_at_ms=half, eof_at_ms=eof):
            fact = request.UpstreamEnded(now_ms=at, half_closed_at_ms=half, eof_at_ms=eof)
        case e.AbortAcknowledged(proof=proof):
            fact = request.AbortAcknowledged(now_ms=at, proof=proof)
        case e.AbortUnanswered():
            fact = request.AbortUnanswered(now_ms=at)
        case _:
            raise TypeError(f"{type(event).__name__} is no fact about a request")
    tell(book, event.request, fact)


def idle_read(book: Book, event: e.LoadReported) -> None:
    """An idle reading settles what was cut before it was taken."""
    if event.running or event.waiting:
        return
    proof = Idle(incarnation=event.incarnation, running=0, waiting=0, read_at_ms=event.read_at_ms)
    for request_id in book.traffic.on(event.incarnation.lane):
        state = book.requests[request_id]
        if state.phase in (Phase.CANCEL_IDLE, Phase.CANCEL_CLOSED):
            tell(book, request_id, request.IdleRead(now_ms=event.now_ms, proof=proof))


def gone(book: Book, incarnation: Incarnation, proof: GoneProof) -> None:
    """The processes are proven gone: everything of that incarnation settles (never replayed)."""
    for request_id in book.traffic.on(incarnation.lane):
        if book.requests[request_id].incarnation == incarnation:
            tell(book, request_id, request.IncarnationGone(now_ms=book.now_ms, proof=proof))


def ticked(book: Book, request_id: RequestId) -> None:
    """A deadline of this request may have passed."""
    state = book.requests.get(request_id)
    if state is None:
        return
    full = state.deployment is not None and not book.traffic.has_place(state.deployment)
    target = state.deployment if state.phase is Phase.QUEUED else None
    why = "" if target is None else waits.for_client(book, target)
    tell(book, request_id, request.Ticked(now_ms=book.now_ms, places_full=full, why=why))
    after = book.requests.get(request_id)
    due = request.due_at_ms(after) if after is not None else None
    if due is not None and due > book.now_ms:
        book.due.at(due, "request", request_id)


def waited_for(book: Book, lane: Lane) -> int:
    """How many requests on this lane a drain waits for."""
    return sum(book.requests[held].phase not in NOT_WAITED_FOR for held in book.traffic.on(lane))


def settle_at_stop(book: Book, lane: Lane) -> bool:
    """Whether some request of this lane settles only at its stop."""
    return any(book.requests[held].phase is Phase.CANCEL_STOP for held in book.traffic.on(lane))


def saturated(book: Book, target: DeploymentId) -> bool:
    """Whether every place is held by requests that settle only at a stop (lifecycle 10.3)."""
    running = book.traffic.queue(target).running
    return not book.traffic.has_place(target) and all(
        book.requests[held].phase is Phase.CANCEL_STOP for held in running
    )


# --- the one way to move a request -----------------------------------------------------------------


def tell(book: Book, request_id: RequestId, fact: request.Event) -> None:
    """Step one request and do what it ordered. News of a settled request is nobody's any more."""
    before = book.requests.get(request_id)
    if before is None:
        return
    after, effects = request.step(before, fact)
    if after is not before:
        book.put_request(after)
        if after.phase is not before.phase:
            _arm(book, after)
    answer: request.AnswerClient | None = None
    cut: request.CutUpstream | None = None
    recorded = False
    for effect in effects:
        match effect:
            case request.TakeSlot():
                front = before.phase is Phase.ADMITTED  # it had its turn and lost it through no fault of its own
                book.traffic.wait(_target(after), request_id, book.bodies.get(request_id, 0), front=front)
                book.dirty = True
            case request.FreeSlot():
                book.traffic.leave(_target(before), request_id)
            case request.TakePlace(incarnation=incarnation):
                book.traffic.run(_target(after), request_id, incarnation)
                _count(book, incarnation.lane, +1)
            case request.FreePlace(incarnation=incarnation):
                book.traffic.free(_target(before), request_id)
                _count(book, incarnation.lane, -1)
                if book.traffic.queue(_target(before)).waiting:
                    book.dirty = True
            case request.Dispatch(incarnation=incarnation, deadline_ms=deadline):
                host = book.instances[incarnation.lane].machine.run.placed_on
                book.order(Admit(request=request_id, incarnation=incarnation, host=host, deadline_ms=deadline))
            case request.CutUpstream():
                cut = effect
            case request.AbortWork(incarnation=incarnation):
                host = book.instances[incarnation.lane].machine.run.placed_on
                book.order(Abort(request=request_id, incarnation=incarnation, host=host))
            case request.AnswerClient():
                answer = effect
            case request.CloseRecord():
                recorded = True
            case request.Settle(outcome=outcome):
                book.order(
                    Settled(
                        request=request_id,
                        outcome=outcome.value,
                        deployment=after.deployment or before.deployment,
                        incarnation=before.incarnation,
                    )
                )
                book.bodies.pop(request_id, None)
                book.drop_request(after)
    _speak(book, request_id, answer, cut)
    if recorded:
        # The row is part of this very step, so it is with the store as soon as the step is.
        tell(book, request_id, request.Recorded(now_ms=book.now_ms))


def _speak(
    book: Book, request_id: RequestId, answer: request.AnswerClient | None, cut: request.CutUpstream | None
) -> None:
    """One order to the router: end the exchange, or answer a request that has none."""
    if cut is not None:
        code, message = (answer.code, answer.message) if answer is not None else ("unavailable", cut.reason)
        book.order(Cut(request=request_id, code=code, message=message))
    elif answer is not None:
        lookup(answer.code)
        book.order(
            Answer(request=request_id, code=answer.code, message=answer.message, retry_after_s=answer.retry_after_s)
        )


def waits_since(book: Book, target: DeploymentId) -> Millis | None:
    """Since when a request waits for this deployment, None while none does."""
    waiting = book.traffic.queue(target).waiting
    return min((book.requests[one].arrived_at_ms for one in waiting), default=None)


def _target(state: request.State) -> DeploymentId:
    assert state.deployment is not None  # every waiting or running request has one
    return state.deployment


def _count(book: Book, lane: Lane, by: int) -> None:
    """Keep the running count and the last use of a lane; tell whoever drains it."""
    book.running_on[lane] = book.running_on.get(lane, 0) + by
    book.used_at[lane] = book.now_ms
    if lane in book.windowed:
        book.moved.add(lane)
        book.dirty = True
    if lane in book.draining:
        book.dirty = True


def _arm(book: Book, state: request.State) -> None:
    """Ask to be woken at the deadline of the phase it is in now."""
    book.due.at(request.due_at_ms(state), "request", state.request)
    if state.phase in (Phase.CANCEL_IDLE, Phase.CANCEL_ABORT, Phase.CANCEL_CLOSED, Phase.CANCEL_STOP):
        book.dirty = True  # a drain may be over, a deployment may be saturated


def _runs(book: Book, incarnation: Incarnation) -> bool:
    row = book.instances.get(incarnation.lane)
    return row is not None and row.has_launch and row.run.generation == incarnation.generation


def _forget(book: Book, state: request.State) -> None:
    assert state.incarnation is not None
    book.traffic.free(_target(state), state.request)
    _count(book, state.incarnation.lane, -1)
    book.drop_request(state)
    if _target(state) not in book.deployments:  # deleted, and told to the store before its last requests were
        book.traffic.forget(_target(state))


def load(book: Book, state: request.State) -> None:
    """Take a stored request into the indexes of a new controller session."""
    assert state.incarnation is not None
    assert state.deployment is not None
    book.requests[state.request] = state
    book.traffic.run(state.deployment, state.request, state.incarnation)
    book.running_on[state.incarnation.lane] = book.running_on.get(state.incarnation.lane, 0) + 1


def restart(book: Book) -> None:
    """A new controller session: connections and bodies of the old one are lost.

    Places of runs that are settled are let go: rows of requests are written behind, so they may be the older ones.
    """
    for request_id, state in list(book.requests.items()):
        if state.incarnation is not None and not _runs(book, state.incarnation):
            _forget(book, state)
        else:
            tell(book, request_id, request.ControllerRestarted(now_ms=book.now_ms))


__all__ = [
    "arrived", "choose", "fail_waiters", "gone", "idle_read", "let_in", "load", "operator_stopped", "restart",
    "saturated", "settle_at_stop", "tell", "ticked", "told", "waited_for",
]  # fmt: skip
