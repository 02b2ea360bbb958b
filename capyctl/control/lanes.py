"""Instances in the world: one lane is told a fact, and what its machines order is done in the same step.

Ledger effects change the ledger at once. Host effects become orders. Notices are kept for `notices`,
which moves the machines that care: no machine moves in the middle of another one's step.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from capyctl.control import residue
from capyctl.control.book import Book
from capyctl.control.orders import AwaitIdle, Launch, Probe, Release, Restore, Terminate
from capyctl.control.records import Move, told_by
from capyctl.errors import InvariantBroken, check
from capyctl.fsm import cleanup, facts, instance
from capyctl.fsm import effects as fx
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.run import Step
from capyctl.fsm.table import Refused
from capyctl.fsm.types import Lane, Phase
from capyctl.ledger import admission, settlement
from capyctl.ledger.charges import Ledger
from capyctl.ledger.types import Plan


@attrs.frozen
class Armed:
    """A first effect for this lane was ordered."""


ARMED = Armed()


def tell(book: Book, lane: Lane, fact: facts.Fact) -> Refused | None:
    """Step one instance and do what it ordered. Returns the refusal, if it refused."""
    row = book.instances[lane]
    was = instance.published(row.machine)
    machine, effects = instance.step(row.machine, fact)
    if machine is not row.machine:
        book.put_instance(lane, attrs.evolve(row, machine=machine))
        now = instance.published(machine)
        if machine.phase is not row.machine.phase:
            book.moves.append(
                Move(
                    machine="instance",
                    lane=str(lane),
                    was=f"{was}.{row.machine.phase.value}",
                    event=type(fact).__name__,
                    now=f"{now}.{machine.phase.value}",
                    deployment=book.deployments[lane.deployment].spec.name,
                    why=_why(fact),
                )
            )
        _arm(book, lane)
    refusal: Refused | None = None
    for effect in effects:
        if isinstance(effect, Refused):
            refusal = effect
        elif isinstance(effect, fx.LedgerEffect):
            _charge(book, lane, effect)
        elif isinstance(effect, fx.HostEffect):
            _send(book, lane, effect)
        else:
            book.notices.append((lane, effect))
    if isinstance(row.machine.life, cleanup.State) and machine.phase is ResidencyPhase.PARKED:
        book.notices.append((lane, fx.ParkEnded(code=None)))  # a look completed the park whose answer was lost
    return refusal


def _why(fact: facts.Fact) -> str:
    """Why an instance moves, as far as the fact says it."""
    match fact:
        case facts.StopRequested(stop=stop):
            return f"{stop.kind.value} for {stop.for_name}" if stop.for_name else stop.kind.value
        case facts.ParkRequested(origin=origin, for_name=name):
            return f"{origin.value} for {name}" if name else origin.value
    return told_by(fact)


def _arm(book: Book, lane: Lane) -> None:
    """Ask to be woken at this instance's own deadlines, and watch its drain."""
    machine = book.instances[lane].machine
    book.due.at(instance.due_at_ms(machine), "lane", lane)
    if book.instances[lane].draining:
        book.draining.add(lane)
    if instance.wants_proof(machine):
        book.doubted.add(lane)
    else:
        book.doubted.discard(lane)
        book.looks.pop(lane, None)
        book.vain.pop(lane, None)
        book.silent.pop(lane, None)


def ticked(book: Book, lane: Lane) -> None:
    """A deadline of this lane may have passed; ask to be woken again for what is still ahead."""
    row = book.instances.get(lane)
    if row is None:
        return
    tell(book, lane, facts.Ticked(now_ms=book.now_ms))
    for due in (instance.due_at_ms(book.instances[lane].machine), book.look_again_at.get(lane)):
        if due is not None and due > book.now_ms:
            book.due.at(due, "lane", lane)


# --- ledger ---------------------------------------------------------------------------------------


def plan_of(book: Book, lane: Lane) -> Plan:
    """What the lane's run was sized by. Raises InvariantBroken for a lane that was never armed."""
    plan = book.instances[lane].plan
    check(plan is not None, "an armed run has a plan")
    assert plan is not None
    return plan


def _charge(book: Book, lane: Lane, effect: fx.LedgerEffect) -> None:
    owner = lane.owner
    match effect:
        case fx.RaiseCharge(phase=phase):
            proposal = book.proposals.pop(lane, None)
            check(proposal is not None and proposal.ask.phase is phase, "a raise was proposed and fits")
            generation = book.instances[lane].machine.run.generation
            after = admission.arm(book.ledger, proposal, now_ms=book.now_ms, generation=generation)
            if not isinstance(after, Ledger):
                raise InvariantBroken(f"a proposal of this very step is outdated: {after.message()}")
            book.put_ledger(after, owner)
        case fx.SettleDown(phase=phase, proof=proof):
            if phase is Phase.PARKED and isinstance(proof, Mapping):
                residue.measured(book, lane, proof)
            book.put_ledger(settlement.settle_down(book.ledger, owner, phase, proof), owner)
        case fx.ReleaseCharge(proof=proof):
            book.put_ledger(settlement.release(book.ledger, owner, proof), owner)
        case fx.KeepLarger(phases=phases):
            book.put_ledger(settlement.keep_larger(book.ledger, owner, phases), owner)


# --- orders to hosts --------------------------------------------------------------------------------


def _send(book: Book, lane: Lane, effect: fx.HostEffect) -> None:
    row = book.instances[lane]
    incarnation, token, host = effect.incarnation, effect.token, effect.host
    digest = row.digest or ""
    match effect:
        case fx.SendLaunch():
            book.order(
                Launch(
                    incarnation=incarnation,
                    token=token,
                    host=host,
                    revision=row.revision,
                    plan=plan_of(book, lane),
                    digest=digest,
                    deadline_ms=effect.deadline_ms,
                )
            )
        case fx.SendAwaitIdle():
            book.order(AwaitIdle(incarnation=incarnation, token=token, host=host, limit_ms=effect.limit_ms))
            return  # it frees nothing: no step of an operation is armed by it
        case fx.SendTerminate():
            book.order(
                Terminate(
                    incarnation=incarnation,
                    token=token,
                    host=host,
                    processes=effect.processes,
                    limit_ms=effect.limit_ms,
                )
            )
        case fx.SendProbe():
            book.order(
                Probe(
                    incarnation=incarnation,
                    token=token,
                    host=host,
                    processes=effect.processes,
                    parked=effect.lost is Step.PARK,
                    canary=effect.canary if effect.lost is Step.WAKE else None,
                )
            )
            return
        case fx.SendRelease():
            book.order(
                Release(
                    incarnation=incarnation,
                    token=token,
                    host=host,
                    tier=effect.tier,
                    plan=plan_of(book, lane),
                    gate_closed_at_ms=effect.gate_closed_at_ms,
                    processes=effect.processes,
                    deadline_ms=effect.deadline_ms,
                )
            )
        case fx.SendRestore():
            book.order(
                Restore(
                    incarnation=incarnation,
                    token=token,
                    host=host,
                    tier=effect.tier,
                    digest=digest,
                    canary=effect.canary,
                    deadline_ms=effect.deadline_ms,
                    processes=effect.processes,
                )
            )
    book.notices.append((lane, ARMED))
