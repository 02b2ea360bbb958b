"""Settlement: how a charge falls. Every function here takes a proof, and none takes an observation.

Lowering is always possible, however old the last observation is (M13). What a proof may lower, and to which
phase, is the table `SETTLES`; a release to nothing takes a gone proof, or that nothing was ever sent.
Source: memory 16; lifecycle 2, 18.6 and 23, invariants 3, 12, 13.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from capyctl.errors import check
from capyctl.fsm.proofs import Canary, Gone, GoneProof, Lowering, NeverLaunched, Rebooted, Resident, Unsent, Usable
from capyctl.fsm.types import Bytes, Domain, Incarnation, Phase
from capyctl.ledger.charges import Holding, Ledger
from capyctl.ledger.types import Allocation, peak

Residents = Mapping[Domain, Resident]
"""A park's proof: what is left in each domain that it emptied."""


@attrs.frozen(kw_only=True)
class Settles:
    """What one kind of proof may do: from the present phase (or one of those kept) to another."""

    proof: type
    of: frozenset[Phase]
    to: Phase
    why: str


SETTLES: tuple[Settles, ...] = (
    Settles(
        proof=Usable,
        of=frozenset({Phase.COLD, Phase.READY, Phase.PARKING, Phase.WAKE}),
        to=Phase.READY,
        why="A model that answers is loaded: the peak of whatever led there is over.",
    ),
    Settles(
        proof=Canary,
        of=frozenset({Phase.PARKING, Phase.WAKE}),
        to=Phase.READY,
        why="It answers as it did before its memory was released.",
    ),
    Settles(
        proof=Resident,
        of=frozenset({Phase.PARKING, Phase.PARKED, Phase.WAKE}),
        to=Phase.PARKED,
        why="A sample taken after the call shows what is left.",
    ),
    Settles(
        proof=Unsent,
        of=frozenset({Phase.PARKING}),
        to=Phase.READY,
        why="The release was never asked for, so the model is as it was.",
    ),
    Settles(
        proof=Unsent,
        of=frozenset({Phase.WAKE}),
        to=Phase.PARKED,
        why="The restore was never asked for, so the copy is as it was.",
    ),
)


def settle_down(ledger: Ledger, owner: str, phase: Phase, proof: Lowering | Residents) -> Ledger:
    """Lower the charge of `owner` to that of `phase`, and end its uncertainty.

    Args:
      proof: of this owner's present run. A park needs one sample for each domain that it lowers.
    Returns: the next epoch's ledger.
    Raises: InvariantBroken when the proof is of another run, is not one for this step, or lowers a domain that
      it says nothing about; and when the phase's charge is above the present one.
    Source: memory 16.
    """
    held = ledger.held_by(owner)
    proofs: tuple[Lowering, ...] = tuple(proof.values()) if isinstance(proof, Mapping) else (proof,)
    check(bool(proofs), "a charge falls with a proof")
    for one in proofs:
        check(is_of_this_run(owner, held, one), f"the proof is of the run that {owner} is charged for")
        check(may_settle(held, phase, one), f"{type(one).__name__} settles {held.phase.value} to {phase.value}")
    after = held.at(phase)
    for domain in set(after.bytes) | set(held.allocation.bytes):
        check(after.on(domain) <= held.on(domain), f"settling to {phase.value} lowers {domain}")
        if phase is Phase.PARKED and any(isinstance(one, Resident) for one in proofs):
            check(left_is_shown(held, after, domain, proof), f"a sample shows what is left on {domain}")
    if phase is Phase.PARKED:
        after = attrs.evolve(after, claims=())  # parked owners hold bytes and no device
    return ledger.replaced(
        owner,
        attrs.evolve(held, phase=phase, allocation=after, whole_host=False, kept=(), lowered_by=proof_id(proofs[0])),
    )


def keep_larger(ledger: Ledger, owner: str, phases: Iterable[Phase]) -> Ledger:
    """Nobody knows which of `phases` holds: charge, per domain, the largest of them and of the present charge.

    Claims stay as they were. Until a proof settles it, the owner begins nothing new.
    Source: lifecycle 18.6, invariant 12.
    """
    held, around = ledger.held_by(owner), tuple(phases)
    check(bool(around), "an unknown step lies between phases")
    largest = peak(held.allocation, *(held.at(phase) for phase in around))
    kept = tuple(phase for phase in Phase if phase in {*around, held.phase, *held.kept} - {Phase.NONE})
    return ledger.replaced(owner, attrs.evolve(held, allocation=attrs.evolve(largest, claims=held.claims), kept=kept))


def release(ledger: Ledger, owner: str, proof: GoneProof | Unsent) -> Ledger:
    """Remove the charge and the claims of `owner` altogether.

    Args:
      proof: every process of its run is gone, or was never launched. That an order was not sent is enough
        only for a start: before any other step there are processes.
    Raises: InvariantBroken when the proof is of another run, or not enough.
    """
    held = ledger.held_by(owner)
    check(is_of_this_run(owner, held, proof), f"the proof is of the run that {owner} is charged for")
    check(may_release(held, proof), f"{type(proof).__name__} frees an owner in {held.phase.value}")
    return ledger.replaced(owner, None)


def remeasure(ledger: Ledger, owners: Iterable[str], domain: Domain, measured_bytes: Bytes) -> Ledger:
    """Move parked owners of one revision on one host to the residue that was measured after a park.

    The charge becomes the measured one, at least the present (a placeholder, or an earlier and larger
    measurement) and at most the ready charge on that domain (M6). It only rises, and may pass the limits:
    then nothing is admitted there until the sum fits (M1). Owners that are not parked learn it for their
    next park. One epoch for all of them. Source: memory 8.3.
    """
    holdings: dict[str, Holding | None] = {}
    for owner in owners:
        held = ledger.held_by(owner)
        residue = clamp(
            measured_bytes, at_least=held.at(Phase.PARKED).on(domain), at_most=held.at(Phase.READY).on(domain)
        )
        copy = with_bytes(held.at(Phase.PARKED), domain, residue)
        phases = {**held.phases, Phase.PARKED: copy}
        # An uncertain owner may turn out to be parked: it is charged at least what it would then settle to.
        moves = held.phase is Phase.PARKED or Phase.PARKED in held.kept
        present = with_bytes(held.allocation, domain, max(held.on(domain), residue)) if moves else held.allocation
        holdings[owner] = attrs.evolve(held, phases=phases, allocation=present)
    return ledger.rewritten(holdings)


# --- predicates -----------------------------------------------------------------------------------


def is_of_this_run(owner: str, held: Holding, proof: Lowering) -> bool:
    """the proof names the owner's lane and the generation that is charged"""
    of: Incarnation = proof.incarnation
    return of.lane.owner == owner and of.generation == held.generation


def may_settle(held: Holding, phase: Phase, proof: Lowering) -> bool:
    """the table names this proof for this step, from the present phase or one of those kept"""
    present = {held.phase, *held.kept}
    return any(row.proof is type(proof) and row.to is phase and row.of & present for row in SETTLES)


def may_release(held: Holding, proof: GoneProof | Unsent) -> bool:
    """it is gone, or its start was never sent"""
    return isinstance(proof, (Gone, NeverLaunched, Rebooted)) or (
        isinstance(proof, Unsent) and held.phase is Phase.COLD and not held.uncertain
    )


def left_is_shown(held: Holding, after: Allocation, domain: Domain, proof: Lowering | Residents) -> bool:
    """a domain that falls has a sample of its own, of at most what stays charged there"""
    if after.on(domain) == held.on(domain):
        return True
    if isinstance(proof, Mapping):
        return domain in proof and proof[domain].resident_bytes <= after.on(domain)
    falling = [one for one in held.allocation.bytes if after.on(one) < held.on(one)]
    return falling == [domain] and isinstance(proof, Resident) and proof.resident_bytes <= after.on(domain)


def clamp(amount: Bytes, *, at_least: Bytes, at_most: Bytes) -> Bytes:
    """`amount`, moved into the range; the lower end wins when the range is empty."""
    return max(at_least, min(amount, at_most))


def with_bytes(allocation: Allocation, domain: Domain, amount: Bytes) -> Allocation:
    """`allocation` with another figure on one domain."""
    return attrs.evolve(allocation, bytes={**allocation.bytes, domain: amount})


def proof_id(proof: Lowering) -> str:
    """What a row keeps of the proof that lowered it: its kind and the run it is of."""
    return f"{type(proof).__name__} {proof.incarnation}"
