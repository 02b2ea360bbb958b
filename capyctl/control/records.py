"""The durable rows of the world: what a store keeps under (kind, key), and the world is loaded from.

A row's value is one of these classes, or a machine's own state. Rows are the truth; the journal is for
replay and for people.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from capyctl.control.orders import Receipt
from capyctl.control.spec import Spec
from capyctl.fsm import activation, cleanup, deployment, operation, request, residency, switch
from capyctl.fsm.activation import ActivationPhase
from capyctl.fsm.gate import GatePhase
from capyctl.fsm.instance import Instance
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.run import HoldCause, Problem, Run
from capyctl.fsm.types import Bytes, Domain, Generation, HostId, Millis, OperationId, Origin, Phase, SwitchId
from capyctl.ledger.charges import Holding
from capyctl.ledger.types import HostPolicy, Plan

AT_REST = frozenset({ActivationPhase.STOPPED, ActivationPhase.FAILED, ResidencyPhase.READY, ResidencyPhase.PARKED})
"""Phases in which an instance waits for a demand, not for an outcome."""

COMING = (
    activation.WAITING | activation.IN_FLIGHT | residency.WAKING | {ResidencyPhase.WAKE_PLANNED, ResidencyPhase.READY}
)


@attrs.frozen(kw_only=True)
class DeploymentRow:
    """One deployment: its machine, the current revision and what its checkpoint was measured to need.

    `generation` is the last one drawn or fenced. `plans` is empty until the revision resolves.
    """

    state: deployment.State
    spec: Spec
    created_at_ms: Millis
    generation: Generation = Generation(0)
    digest: str | None = None
    weight_bytes: Bytes = Bytes(0)
    plans: Mapping[HostId, Plan] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Wish:
    """Why an instance is to serve: who asked, since when, and what may be done for it."""

    origin: Origin
    since_ms: Millis
    operation: OperationId | None = None
    evict: bool = False
    until_ms: Millis | None = None  # how long it may wait for memory; None: until it is stopped
    initialize_ms: Millis | None = None
    host: HostId | None = None  # the host on which a switch made room
    switch: SwitchId | None = None


@attrs.frozen(kw_only=True)
class Slept:
    """When an instance was parked, and for whom. `origin` None: a park whose answer was lost, found to be done."""

    at_ms: Millis
    origin: Origin | None = None
    for_name: str | None = None
    switch: SwitchId | None = None


WAITING = (ActivationPhase.PLANNED, ResidencyPhase.WAKE_PLANNED)
"""Phases of an instance that is to start or wake, and may not yet."""


@attrs.frozen(kw_only=True)
class InstanceRow:
    """One instance: its machines, and what its present or last run was launched with.

    `plan` is frozen when the run is armed: later revisions do not change what a running engine was sized by.
    """

    machine: Instance
    revision: int = 0
    plan: Plan | None = None
    digest: str | None = None
    wish: Wish | None = None
    last_host: HostId | None = None
    parked_first: Mapping[Domain, Bytes] = attrs.field(
        factory=dict
    )  # what this launch was charged when it first parked
    parked_latest: Mapping[Domain, Bytes] = attrs.field(factory=dict)  # and what its last park would have been charged
    slept: Slept | None = None  # its last park

    @property
    def run(self) -> Run:
        return self.machine.run

    @property
    def phase(self) -> object:
        return self.machine.phase

    @property
    def gate_open(self) -> bool:
        """Requests may be dispatched to it."""
        return self.machine.gate.phase is GatePhase.OPEN

    @property
    def is_ready(self) -> bool:
        """It serves, or will as soon as nothing speaks against it."""
        return self.machine.phase is ResidencyPhase.READY

    @property
    def is_parked(self) -> bool:
        return self.machine.phase is ResidencyPhase.PARKED

    @property
    def draining(self) -> bool:
        """Its gate is closed, and running requests are waited for."""
        return self.machine.phase in residency.DRAINING

    @property
    def ending(self) -> bool:
        """It is on the way to a proven end."""
        return self.machine.phase in cleanup.ENDING or self.machine.phase is ResidencyPhase.DRAINING_TO_STOP

    @property
    def has_launch(self) -> bool:
        """Processes of it exist, or may."""
        return self.machine.run.charged is not Phase.NONE

    @property
    def in_progress(self) -> bool:
        """It is neither at rest nor serving: something is planned, in flight or unknown."""
        return self.machine.phase not in AT_REST

    @property
    def on_the_way(self) -> bool:
        """It will serve without anybody asking again."""
        return self.machine.phase in COMING

    @property
    def may_start(self) -> bool:
        """Nothing of it runs, so that a start may be planned."""
        return self.machine.phase in (ActivationPhase.STOPPED, ActivationPhase.FAILED)

    @property
    def may_park(self) -> bool:
        """It serves, or is on its way to a park that somebody may still call off."""
        return self.is_ready or self.machine.phase in residency.TO_PARK

    @property
    def parking(self) -> bool:
        """The release of its memory is asked for and not answered yet."""
        return self.machine.phase in residency.PARKING

    @property
    def leaves_idly(self) -> bool:
        """Nothing but an idle timer wants its memory, and nothing is armed: whoever asks for it keeps it."""
        life = self.machine.life
        if not isinstance(life, residency.State) or life.ask is None or life.phase not in residency.TO_PARK:
            return False
        return life.ask.origin is Origin.IDLE

    def may_start_at(self, now_ms: Millis) -> bool:
        """As `may_start`, and a failed start is not too recent for a request to try again."""
        retry_at = self.machine.run.retry_at_ms
        return self.may_start and (
            self.machine.phase is ActivationPhase.STOPPED or retry_at is None or now_ms >= retry_at
        )

    @property
    def waits_for(self) -> Problem | None:
        """Why a planned start, park or wake has no room yet."""
        life = self.machine.life
        return None if isinstance(life, cleanup.State) else life.waits_for

    @property
    def held_for(self) -> HoldCause | None:
        """What a held start waits for."""
        life = self.machine.life
        return life.hold if isinstance(life, activation.State) else None


@attrs.frozen(kw_only=True)
class HostRow:
    """One host as last heard of. Whether its session is up is not durable."""

    policy: HostPolicy
    boot_id: str
    draining: bool = False


@attrs.frozen(kw_only=True)
class ReceiptRow:
    """What a command was answered: the same key and digest get it again, another digest a conflict."""

    digest: str
    receipt: Receipt
    given_at_ms: Millis


@attrs.frozen(kw_only=True)
class Counter:
    """A number that never goes back: `token`, `session`, `epoch`."""

    value: int


@attrs.frozen(kw_only=True)
class Record:
    """One changed row; `value` None deletes it."""

    kind: str
    key: str
    value: object | None


@attrs.frozen(kw_only=True)
class Move:
    """One step of one machine, for the log: who moved, from where to where, and why.

    `lane` is the instance, or the name of what else moved; `deployment` is the name of an instance's deployment.
    `why`: what the event itself tells, in words.
    """

    machine: str
    lane: str
    was: str
    event: str
    now: str
    deployment: str | None = None
    why: str = ""


def told_by(event: object) -> str:
    """The first line of the reason that an event carries, with its code; "" where it carries none."""
    words = [str(getattr(event, name, None) or "") for name in ("code", "reason")]
    return ": ".join(word.partition("\n")[0] for word in words if word)


RECORDS: dict[str, type] = {
    "deployment": DeploymentRow,
    "instance": InstanceRow,
    "operation": operation.State,
    "switch": switch.State,
    "host": HostRow,
    "ledger": Holding,
    "receipt": ReceiptRow,
    "counter": Counter,
    "request": request.State,
}
"""Every kind of row and the class of its values."""
