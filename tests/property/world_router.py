"""The router of the simulated shell and its clients: one answer each, whatever happens on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from world_values import Client, Engine

from capyctl.control import events as e
from capyctl.control import orders as o
from capyctl.fsm.proofs import Aborted
from capyctl.fsm.types import Millis, RequestId

if TYPE_CHECKING:
    from world import Shell


def ask(
    shell,
    route: str,
    *,
    stream: bool = True,
    nameable: bool = True,
    hangs_up_in_ms: int | None = None,
    answer_ms: int | None = None,
) -> Client:
    """One client asks `route`. What is not `nameable` (several answers in one) no engine ends by an id."""
    request = RequestId(f"r{shell.number():06d}")
    client = shell.clients[request] = Client(request, route, stream, shell.now, nameable=nameable)
    client.enters_at_ms = answer_ms or 0
    if hangs_up_in_ms is not None:
        shell.later(hangs_up_in_ms, lambda: hang_up(shell, client))
    shell.tell(
        e.RequestArrived(
            now_ms=Millis(shell.now),
            request=request,
            route=route,
            api="chat",
            stream=stream,
            body_bytes=1_000,
            nameable=nameable,
        )
    )
    return client


def hang_up(shell: Shell, client: Client) -> None:
    """The client leaves, wherever its request stands; its router task may see that before it sees a cut."""
    if client.told is not None and not (client.cut and client.stage in ("sent", "streaming")):
        return
    client.told = "gone"
    shell.tell(e.ClientGone(now_ms=Millis(shell.now), request=client.request, reason="the client hung up"))


def end(shell: Shell, client: Client, how: str) -> None:
    """The one answer that a client gets."""
    if client.told == "gone" or client.cut:
        return
    assert client.told is None, f"31: {client.request} was told {client.told}, and now {how}"
    client.told = how


def route(shell: Shell, order: o.RouterOrder) -> None:
    client = shell.clients.get(order.request)
    match order:
        case o.Admit():
            assert client is not None
            assert client.stage == "waiting", f"{order.request} is admitted at {client.stage}"
            client.stage = "placed"
            client.served_by = order.incarnation
            if shell.faults.hits("hang_up") and shell.rng.random() < 0.1:
                shell.later(shell.between(0, 10), lambda: hang_up(shell, client))
            shell.later(shell.between(0, shell.dispatch_ms), lambda: dispatch(shell, client, order), mortal=True)
        case o.Answer():
            assert client is not None
            client.stage = "over"
            end(shell, client, order.code)
        case o.Cut():
            assert client is not None
            end(shell, client, order.code)
            client.cut = True
            shell.later(shell.between(0, 30), lambda: abandon(shell, client), mortal=True)
        case o.Abort():
            abort(shell, order)
        case o.Settled():
            settled(shell, order)
        case _:
            raise AssertionError(f"no router takes {order}")


def dispatch(shell: Shell, client: Client, order: o.Admit) -> None:
    """Connect and send; the first byte is told before it leaves."""
    if client.stage != "placed" or client.served_by != order.incarnation:
        return
    at, engine = Millis(shell.now), shell.hosts[order.host].engines.get(order.incarnation)
    serves = engine is not None and engine.state == "ready" and not engine.ending
    if engine is not None and engine.alive:
        assert not engine.moving, f"29: {client.request} goes to a model that parks or wakes"
        assert engine.state != "parked", f"29: {client.request} goes to a parked model"
    if engine is None or not serves or shell.faults.hits("refused_connection"):
        client.stage = "waiting"
        shell.tell(e.RequestNotAccepted(now_ms=at, request=client.request, reason="connection refused"))
        return
    client.stage, client.engine = "sent", engine
    engine.work[client.request] = None
    takes, client.enters_at_ms = client.enters_at_ms, shell.now + shell.between(0, 300)
    shell.tell(e.RequestSent(now_ms=at, request=client.request))
    if shell.faults.hits("refused_connection") and shell.rng.random() < 0.1:
        shell.later(1, lambda: refused_late(shell, client, engine))
        return
    shell.later(client.enters_at_ms - shell.now, lambda: enter(shell, client, engine, takes))


def refused_late(shell: Shell, client: Client, engine: Engine) -> None:
    """The engine closed a kept connection under the first byte: nobody knows whether it took it."""
    done(shell, engine, client.request)
    if client.stage == "sent":
        client.stage = "over"
        shell.tell(e.RequestNotAccepted(now_ms=Millis(shell.now), request=client.request, reason="reset"))


def enter(shell: Shell, client: Client, engine: Engine, answer_ms: int) -> None:
    """It reaches the engine's queue, even if it was cut on the way."""
    if client.request not in engine.work or not engine.alive:
        return
    engine.entered.add(client.request)
    takes = answer_ms or shell.between(1, 2 * engine.model.answer_ms)
    if shell.faults.hits("engine_mute") or engine.hung_at_ms is not None:
        return
    if shell.faults.hits("rejects"):
        shell.later(takes // 4, lambda: tells(shell, client, engine, "rejected"))
    elif shell.faults.hits("errors"):
        outputs(shell, client, engine, takes)
        shell.later(takes * 3 // 4, lambda: tells(shell, client, engine, "errored"))
    elif shell.faults.hits("upstream_lost"):
        outputs(shell, client, engine, takes)
        shell.later(takes * 3 // 4, lambda: upstream_lost(shell, client), mortal=True)
    else:
        outputs(shell, client, engine, takes)
        shell.later(takes, lambda: finish(shell, client, engine))


def outputs(shell: Shell, client: Client, engine: Engine, takes_ms: int) -> None:
    if client.stream and shell.rng.random() < 0.8:
        shell.later(takes_ms // 2, lambda: first_output(shell, client, engine))


def first_output(shell: Shell, client: Client, engine: Engine) -> None:
    if client.stage == "sent" and client.engine is engine and engine.alive and engine.hung_at_ms is None:
        client.stage = "streaming"
        shell.tell(e.FirstOutput(now_ms=Millis(shell.now), request=client.request))


def finish(shell: Shell, client: Client, engine: Engine) -> None:
    if not engine.alive or engine.hung_at_ms is not None:
        return
    done(shell, engine, client.request)
    if client.stage in ("sent", "streaming") and client.engine is engine:
        if client.told is None:
            shell.served[engine.incarnation] = shell.served.get(engine.incarnation, 0) + 1
        end(shell, client, "ok")
        client.stage = "over"
        shell.tell(e.RequestFinished(now_ms=Millis(shell.now), request=client.request))


def done(shell: Shell, engine: Engine, request: RequestId) -> None:
    engine.work.pop(request, None)
    engine.entered.discard(request)


def tells(shell: Shell, client: Client, engine: Engine, what: str) -> None:
    """The engine answers with an error; whole ones leave no work behind."""
    if client.stage not in ("sent", "streaming") or client.engine is not engine or not engine.alive:
        return
    if engine.hung_at_ms is not None:
        return
    if what == "rejected":
        done(shell, engine, client.request)
        end(shell, client, "rejected")
        client.stage = "over"
        shell.tell(e.EngineRejected(now_ms=Millis(shell.now), request=client.request, status=400))
    else:
        shell.tell(e.EngineErrored(now_ms=Millis(shell.now), request=client.request, reason="CUDA error"))


def upstream_lost(shell: Shell, client: Client) -> None:
    if client.stage in ("sent", "streaming"):
        engine = client.engine
        assert engine is not None
        shell.later(shell.between(100, 5_000), lambda: done(shell, engine, client.request))  # it notices in time
        shell.tell(e.UpstreamLost(now_ms=Millis(shell.now), request=client.request, reason="connection reset"))


def abandon(shell: Shell, client: Client, *, report: bool = True) -> None:
    """Half-close the upstream: the engine notices after a while, drops the work and closes too."""
    if client.stage not in ("sent", "streaming") or client.engine is None:
        client.stage = "over" if client.stage != "waiting" else client.stage
        return
    engine, cut_at = client.engine, shell.now
    client.stage = "over"
    deaf, late = shell.faults.hits("eof_mute"), shell.faults.hits("eof_late")

    def noticed() -> None:
        if not engine.alive or engine.hung_at_ms is not None:
            return
        done(shell, engine, client.request)
        if report and not deaf and engine.model.traits.eof_proves_end:
            shell.later(
                shell.between(30_000, 60_000) if late else 0,
                lambda: shell.tell(
                    e.UpstreamEnded(
                        now_ms=Millis(shell.now),
                        request=client.request,
                        half_closed_at_ms=Millis(cut_at),
                        eof_at_ms=Millis(shell.now),
                    )
                ),
                mortal=True,
            )

    shell.later(max(shell.between(10, 3_000), client.enters_at_ms - shell.now + 50), noticed, mortal=False)


def abort(shell: Shell, order: o.Abort) -> None:
    client = shell.clients.get(order.request)
    assert client is None or client.nameable, f"37: {order.request} is to be ended by an id that no engine was told"
    mute = shell.faults.hits("abort_mute")
    engine = shell.hosts[order.host].engines.get(order.incarnation)

    def answer() -> None:
        now = Millis(shell.now)
        if mute or engine is None or not engine.alive or engine.hung_at_ms is not None:
            shell.tell(e.AbortUnanswered(now_ms=now, request=order.request))
            if engine is not None and engine.alive and not engine.hung_at_ms and shell.rng.random() < 0.5:
                shell.later(shell.between(1, 5_000), acknowledge, mortal=True)
            return
        acknowledge()

    def acknowledge() -> None:
        now = Millis(shell.now)
        if engine is None or not engine.alive:
            return
        done(shell, engine, order.request)
        proof = Aborted(incarnation=order.incarnation, request=order.request, acknowledged_at_ms=now)
        shell.tell(e.AbortAcknowledged(now_ms=now, request=order.request, proof=proof))

    waits = max(0, client.enters_at_ms - shell.now) + 1 if client is not None else 1
    shell.later(waits + shell.between(1, 1_000), answer, mortal=True)


def settled(shell: Shell, order: o.Settled) -> None:
    client = shell.clients.get(order.request)
    assert client is not None
    assert not client.settled, f"31: {order.request} settles twice"
    client.settled = True
    if client.stage in ("waiting", "placed"):
        client.stage = "over"  # whoever leaves before anything was sent does not send it either
    engine = client.engine
    if engine is not None and engine.incarnation == order.incarnation and engine.alive:
        assert order.request not in engine.work, (
            f"35: {order.request} settles as {order.outcome} while its engine works on it"
        )
    if client.told is None and order.outcome in ("failed", "expired", "refused", "cut"):
        client.stage = "over"  # its Answer or Cut is of this very step
