"""Hosts of the simulated shell: what becomes of each order, of each engine, and what their memory is meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import world_router
from world_values import RAM, Engine, Host, gib

from capyctl.control import events as e
from capyctl.control import orders as o
from capyctl.fsm.proofs import (
    Back,
    Canary,
    Gone,
    GoneProof,
    NeverLaunched,
    Quiet,
    Rebooted,
    Resident,
    SameEngine,
    Unsent,
    Usable,
)
from capyctl.fsm.types import Bytes, Domain, Incarnation, Millis, Phase, ProcessIdentity, Role
from capyctl.ledger.parked import may_be_left
from capyctl.ledger.types import Allocation

if TYPE_CHECKING:
    from world import Shell


def perform(shell: Shell, host: Host, order: o.HostOrder) -> None:
    match order:
        case o.Launch():
            launch(shell, host, order)
        case o.AwaitIdle():
            await_idle(shell, host, order, shell.now + order.limit_ms)
        case o.Terminate():
            terminate(shell, host, order)
        case o.Probe():
            shell.later(shell.between(1, 2_000), lambda: probe(shell, host, order))
        case o.Release():
            shell.later(shell.between(1, 500), lambda: release(shell, host, order))
        case o.Restore():
            shell.later(shell.between(1, 500), lambda: restore(shell, host, order))
        case _:
            raise AssertionError(f"no host takes {order}")


def launch(shell: Shell, host: Host, order: o.Launch) -> None:
    incarnation = order.incarnation
    assert incarnation not in host.started, f"18: {incarnation} is launched a second time"

    def refuse(code: str, *, passing: bool) -> None:
        host.fenced.add(incarnation)
        proof = never(shell, incarnation)
        shell.answer(order, e.LaunchFailed, code=code, reason="before it was spawned", transient=passing, proof=proof)

    if shell.faults.hits("launch_refused"):
        unsent = Unsent(incarnation=incarnation, refused_before_sending=True)
        host.fenced.add(incarnation)
        shell.answer(order, e.LaunchFailed, code="revision_conflict", reason="changed", transient=False, proof=unsent)
        return

    def prepared() -> None:
        if incarnation in host.fenced:
            refuse("lifecycle_conflict", passing=False)
        elif incarnation.lane.deployment in shell.spoiled:
            refuse(shell.spoiled_code, passing=False)
        elif shell.faults.hits("launch_never"):
            refuse("port_conflict", passing=True)
        else:
            spawn(shell, host, order)

    shell.later(shell.between(1, 300), prepared)


def spawn(shell: Shell, host: Host, order: o.Launch) -> None:
    incarnation = order.incarnation
    host.started.add(incarnation)
    shell.launches.append(incarnation)
    model = shell.models[incarnation.lane.deployment][order.revision]
    roles = [(Role.API, 0), (Role.WORKER, 0), (Role.HELPER, 0)][: shell.between(1, 3)]
    processes = []
    for role, number in roles:
        pid = shell.number()
        processes.append(
            ProcessIdentity(pid=pid, boot_id=host.boot_id, start_ticks=shell.now, role=role, number=number)
        )
    engine = Engine(incarnation, host, model, tuple(processes), launch=order)
    engine.unkillable = shell.faults.hits("unkillable")
    host.engines[incarnation] = engine
    if not shell.faults.hits("spawn_unheard"):
        told = e.Spawned(**shell.at(order), processes=engine.processes)
        if host.online:
            shell.later(0, lambda: shell.tell(told), mortal=True)
            if shell.faults.hits("answer_twice"):
                shell.later(shell.between(0, 90_000), lambda: shell.tell(told), mortal=True)
    takes = shell.between(model.load_ms // 2, model.load_ms * 3 // 2)
    shell.later(takes // 2, lambda: hold(shell, engine, at_most(order.plan.at(Phase.COLD), model.peak_gib)))
    if shell.faults.hits("exit_early"):
        shell.later(takes * 3 // 4, lambda: launch_ended(shell, engine, "launch_failed", "it exited with status 1"))
    elif shell.faults.hits("load_stuck"):
        shell.later(
            order.deadline_ms - shell.now, lambda: launch_ended(shell, engine, "activation_timeout", "not ready")
        )
    else:
        shell.later(takes, lambda: loaded(shell, engine, order))


def hold(shell: Shell, engine: Engine, allocation: Allocation) -> None:
    if engine.alive:
        engine.held_bytes = allocation.on(RAM)
        shell.assert_charged(engine)


def at_most(allocation: Allocation, peak_gib: float | None) -> Allocation:
    """What a start holds of what it is charged."""
    if peak_gib is None:
        return allocation
    return attrs.evolve(allocation, bytes={RAM: min(allocation.on(RAM), gib(peak_gib))})


def launch_ended(shell: Shell, engine: Engine, code: str, reason: str) -> None:
    """Its host ends a launch that failed, and proves it or cannot."""
    order, engine.launch = engine.launch, None
    if order is None or not engine.alive:
        return
    if engine.unkillable:
        shell.answer(order, e.OrderLost, after_ms=10_000, reason=f"{reason}; then: a process is alive")
        return
    die(shell, engine, news=False)
    proof = all_gone(shell, engine)
    shell.answer(order, e.LaunchFailed, code=code, reason=reason, transient=False, proof=proof)


def loaded(shell: Shell, engine: Engine, order: o.Launch) -> None:
    if not engine.alive or engine.state != "loading":
        return
    engine.state, most = "ready", engine.held_bytes
    hold(shell, engine, order.plan.at(Phase.READY))
    if engine.launch is not None and not engine.ending:
        engine.launch = None
        usable = usable_now(shell, engine)
        canary = "42" if engine.model.traits.parks else None
        alone = not any(other.moving or other.state == "loading" for other in engine.host.engines.values())
        seen = {RAM: max(most, engine.held_bytes)} if alone else {}
        shell.answer(order, e.LaunchReady, processes=engine.processes, usable=usable, canary=canary, peak_bytes=seen)
    if shell.faults.hits("crash_soon"):
        shell.later(shell.between(0, 50_000), lambda: die(shell, engine))
    elif shell.faults.hits("crash_late"):
        shell.later(shell.between(60_000, 900_000), lambda: die(shell, engine))
    if engine.model.traits.idle_signal and shell.faults.hits("hangs"):
        shell.later(shell.between(0, 200_000), lambda: hang(shell, engine))
    if shell.faults.hits("bloats"):
        shell.later(shell.between(0, 100_000), lambda: bloat(shell, engine))
    if shell.faults.hits("helper_exit"):
        shell.later(shell.between(0, 50_000), lambda: exit_news(shell, engine, Role.HELPER))


def bloat(shell: Shell, engine: Engine) -> None:
    """It holds more than anybody planned, until it ends or parks."""
    if engine.state == "ready" and not engine.moving:
        engine.more_bytes = Bytes(engine.held_bytes * shell.between(5, 100) // 100)


def hang(shell: Shell, engine: Engine) -> None:
    """It is there, holds what it held, and does nothing any more."""
    if engine.state == "ready" and not engine.moving and engine.hung_at_ms is None:
        engine.hung_at_ms = shell.now


def await_idle(shell: Shell, host: Host, order: o.AwaitIdle, ends_at_ms: int) -> None:
    engine = host.engines.get(order.incarnation)
    verdict = None
    if engine is None or not engine.alive:
        verdict = "gone"
    elif engine.hung_at_ms is not None:
        verdict = "silent" if shell.now >= min(ends_at_ms, engine.hung_at_ms + 15_000) else None
    elif shell.faults.hits("idle_silent"):
        verdict = "silent"
    elif not engine.entered and not engine.foreign and not shell.faults.hits("idle_busy"):
        verdict = "idle"
    elif shell.now >= ends_at_ms:
        verdict = "busy"
    if verdict is None:
        shell.later(1_000, lambda: await_idle(shell, host, order, ends_at_ms))
    else:
        shell.answer(order, e.IdleGateEnded, after_ms=1, verdict=verdict)


def terminate(shell: Shell, host: Host, order: o.Terminate) -> None:
    host.fenced.add(order.incarnation)
    engine = host.engines.get(order.incarnation)
    if engine is not None and order.incarnation in host.forgotten and engine.alive:
        unproven = "this host has no record of it; a process is alive"
        shell.answer(order, e.TerminateUnproven, after_ms=50, reason=unproven)
        return
    if engine is not None:
        engine.ending = True

    def kill() -> None:
        if engine is not None and engine.alive:
            if engine.unkillable:
                shell.answer(order, e.TerminateUnproven, after_ms=30_000, reason="it survives SIGKILL")
                return
            launch_ended(shell, engine, "lifecycle_conflict", "stopped while it was starting")
            die(shell, engine, news=False)
        proof = shown_gone(shell, host, order.incarnation, order.processes)
        shell.answer(order, e.Terminated, proof=proof)

    shell.later(shell.between(5, 4_000), kill)


def probe(shell: Shell, host: Host, order: o.Probe) -> None:
    engine = host.engines.get(order.incarnation)
    if shell.faults.hits("probe_mute"):
        shell.answer(order, e.Probed, after_ms=5_000, reason="it does not answer")
        return
    if engine is None:
        host.fenced.add(order.incarnation)
    if engine is None or not engine.alive:
        proof = shown_gone(shell, host, order.incarnation, order.processes)
        watched = engine is not None and not isinstance(proof, Rebooted)  # else nobody here saw it end
        shell.answer(order, e.Probed, gone=proof, reason="it exited" if watched else "")
        return
    if order.incarnation in host.forgotten:
        shell.answer(order, e.Probed, reason="not watched here")
        return
    same, usable, canary, resident = same_engine(shell, engine), None, None, None
    answers = engine.hung_at_ms is None and not engine.woken_wrong
    if engine.state == "ready" and not engine.moving and not order.parked and answers:
        usable = usable_now(shell, engine)
        if order.canary is not None:
            canary = Canary(incarnation=engine.incarnation, expected=order.canary, actual="42")
    fits = engine.held_bytes <= may_be_left(engine.model.plan).get(RAM, 0)
    if engine.state == "parked" and not engine.moving and order.parked and fits:
        resident = what_is_left(shell, engine, shell.now - 1)
    shell.answer(order, e.Probed, same=same, usable=usable, canary=canary, resident=resident, reason=engine.state)


def release(shell: Shell, host: Host, order: o.Release) -> None:
    engine = host.engines.get(order.incarnation)
    if engine is None or not engine.alive:
        shell.answer(order, e.OrderLost, reason="the engine is gone")
        return
    assert not engine.work, f"36: released under work: {list(engine.work)}"
    if engine.hung_at_ms is not None:
        shell.answer(order, e.OrderLost, after_ms=60_000, reason="the engine does not answer")
        return
    if shell.faults.hits("park_refused_unsent"):
        unsent = Unsent(incarnation=engine.incarnation, refused_before_sending=True)
        shell.answer(order, e.ParkRefused, code="host_capability_missing", reason="not declared", unsent=unsent)
        return
    if shell.faults.hits("park_refused"):
        shell.answer(order, e.ParkRefused, code="unavailable", reason="not quiescent")
        return
    engine.moving = True
    began = shell.now
    hold(shell, engine, order.plan.at(Phase.PARKING))

    def parked() -> None:
        engine.moving = False
        if not engine.alive:
            shell.answer(order, e.OrderLost, reason="the engine ended meanwhile")
            return
        if shell.faults.hits("park_dies"):
            die(shell, engine)
            shell.answer(order, e.OrderLost, reason="the engine ended meanwhile")
            return
        if shell.faults.hits("park_left"):
            shell.answer(order, e.OrderLost, reason="it is still resident")
            return
        engine.state, engine.more_bytes = "parked", Bytes(0)
        hold(shell, engine, order.plan.at(Phase.PARKED))
        if engine.model.residue_gib is not None:
            engine.held_bytes = gib(engine.model.residue_gib + engine.model.residue_grows_gib * engine.parks)
        engine.parks += 1
        if engine.held_bytes > may_be_left(engine.model.plan)[RAM]:
            shell.answer(order, e.OrderLost, reason="more is left than may be")
            return
        quiet = Quiet(
            incarnation=engine.incarnation,
            gate_closed_at_ms=order.gate_closed_at_ms,
            router_in_flight=0,
            running=0,
            waiting=0,
            read_at_ms=Millis(began),
        )
        same, resident = same_engine(shell, engine), what_is_left(shell, engine, began)
        shell.answer(order, e.ParkConfirmed, quiet=quiet, same=same, resident=resident)

    shell.later(shell.between(100, 5_000), parked)


def restore(shell: Shell, host: Host, order: o.Restore) -> None:
    engine = host.engines.get(order.incarnation)
    if engine is None or not engine.alive:
        shell.answer(order, e.WakeFailed, code="engine_error", reason="the engine is gone")
        return
    if shell.faults.hits("wake_refused_unsent"):
        unsent = Unsent(incarnation=engine.incarnation, refused_before_sending=True)
        shell.answer(order, e.WakeFailed, code="insufficient_memory", reason="somebody took it", unsent=unsent)
        return
    engine.moving = True
    began = shell.now
    hold(shell, engine, engine.model.plan.at(Phase.WAKE))

    def awake() -> None:
        engine.moving = False
        if not engine.alive:
            shell.answer(order, e.OrderLost, reason="the engine ended meanwhile")
            return
        if shell.faults.hits("wake_fails"):
            shell.answer(order, e.WakeFailed, code="engine_error", reason="no memory")
            return
        engine.state = "ready"
        hold(shell, engine, engine.model.plan.at(Phase.READY))
        if shell.faults.hits("wake_mismatch"):
            engine.woken_wrong = True
            shell.answer(order, e.WakeFailed, code="wake_mismatch", reason="!!!! is not 42", mismatch=True)
            return
        at = Millis(shell.now)
        back = Back(
            incarnation=engine.incarnation,
            restored_at_ms=Millis(began),
            sampled_at_ms=at,
            fresh_until_ms=Millis(at + 5_000),
            recorded_at_ms=at,
        )
        canary = None
        if not shell.faults.hits("wake_mute"):
            canary = Canary(incarnation=engine.incarnation, expected=order.canary or "42", actual="42")
        usable, same = usable_now(shell, engine), same_engine(shell, engine)
        shell.answer(order, e.WakeConfirmed, back=back, usable=usable, canary=canary, same=same)

    shell.later(shell.between(100, 5_000), awake)


# --- proofs and ends ----------------------------------------------------------------------------


def usable_now(shell: Shell, engine: Engine) -> Usable:
    return Usable(incarnation=engine.incarnation, answer_chars=3, probed_at_ms=Millis(shell.now))


def same_engine(shell: Shell, engine: Engine) -> SameEngine:
    return SameEngine(
        incarnation=engine.incarnation,
        recorded=engine.processes,
        alive=frozenset(engine.processes),
        strangers=0,
        observed_at_ms=Millis(shell.now),
    )


def what_is_left(shell: Shell, engine: Engine, released_at_ms: int) -> dict[Domain, Resident]:
    return {
        RAM: Resident(
            incarnation=engine.incarnation,
            resident_bytes=engine.held_bytes,
            budget_bytes=may_be_left(engine.model.plan)[RAM],
            released_at_ms=Millis(released_at_ms),
            sampled_at_ms=Millis(shell.now + 1),
        )
    }


def never(shell: Shell, incarnation: Incarnation) -> NeverLaunched:
    return NeverLaunched(incarnation=incarnation, fenced=True, observed_at_ms=Millis(shell.now))


def all_gone(shell: Shell, engine: Engine) -> Gone:
    return Gone(
        incarnation=engine.incarnation,
        processes=engine.processes,
        absent=frozenset(engine.processes),
        group_empty=True,
        observed_at_ms=Millis(shell.now),
    )


def shown_gone(shell: Shell, host: Host, incarnation: Incarnation, processes: tuple[ProcessIdentity, ...]) -> GoneProof:
    engine = host.engines.get(incarnation)
    assert engine is None or not engine.alive
    if engine is None and not processes:
        return never(shell, incarnation)
    known = processes or (engine.processes if engine is not None else ())
    if known and known[0].boot_id != host.boot_id:
        return Rebooted(
            incarnation=incarnation,
            recorded_boot_id=known[0].boot_id,
            present_boot_id=host.boot_id,
            observed_at_ms=Millis(shell.now),
        )
    absent = frozenset(known) | frozenset(engine.processes if engine is not None else ())
    return Gone(
        incarnation=incarnation,
        processes=known,
        absent=absent,
        group_empty=True,
        observed_at_ms=Millis(shell.now),
    )


def die(shell: Shell, engine: Engine, *, news: bool = True) -> None:
    """Every process of it ends. Its host says so if nobody ended it on purpose."""
    if not engine.alive:
        return
    if news and engine.launch is not None:  # a launch in progress tells by its own outcome
        launch_ended(shell, engine, "launch_failed", "it exited")
        return
    engine.state = "gone"
    engine.held_bytes = engine.more_bytes = Bytes(0)
    engine.work.clear()
    engine.entered.clear()
    for client in [
        one for one in shell.clients.values() if one.engine is engine and one.stage in ("sent", "streaming")
    ]:
        shell.later(shell.between(1, 50), lambda client=client: world_router.upstream_lost(shell, client), mortal=True)
    if news and not engine.ending:
        exit_news(shell, engine, shell.rng.choice((Role.API, Role.WORKER)))


def exit_news(shell: Shell, engine: Engine, role: Role) -> None:
    def report() -> None:
        if engine.host.online:
            shell.tell(
                e.EngineExited(
                    now_ms=Millis(shell.now),
                    incarnation=engine.incarnation,
                    role=role,
                    status=1,
                    reason="segmentation fault",
                )
            )

    shell.later(shell.between(1, 300), report, mortal=True)
