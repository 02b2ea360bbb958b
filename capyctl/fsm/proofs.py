"""The proof catalogue (lifecycle 2): values that cannot be built when what they claim does not hold.

A proof is evidence that a shell gathered, carried by an event. Whatever lowers a charge, frees a
port or opens a gate takes one as an argument, so a transition without its proof cannot be written.
An engine's own success reply, a deadline that passed and a refused connection are in none of them.
"""

from __future__ import annotations

import attrs

from capyctl.errors import check
from capyctl.fsm.types import Bytes, Generation, Incarnation, Millis, ProcessIdentity, Role


@attrs.frozen(kw_only=True)
class Gone:
    """P-GONE: every recorded process, helpers included, observed absent, and the group empty."""

    incarnation: Incarnation
    processes: tuple[ProcessIdentity, ...]
    absent: frozenset[ProcessIdentity]
    group_empty: bool
    observed_at_ms: Millis

    def __attrs_post_init__(self) -> None:
        check(self.group_empty, "the process group is empty")
        check(set(self.processes) <= self.absent, "every recorded process was observed absent")


@attrs.frozen(kw_only=True)
class NeverLaunched:
    """P-NEVER: no process was spawned for the fenced handle, and it can never start there."""

    incarnation: Incarnation
    fenced: bool
    observed_at_ms: Millis

    def __attrs_post_init__(self) -> None:
        check(self.fenced, "the handle can never start on that host")


@attrs.frozen(kw_only=True)
class Rebooted:
    """P-BOOT: the host runs another boot than the recorded one, so every process of the old is gone."""

    incarnation: Incarnation
    recorded_boot_id: str
    present_boot_id: str
    observed_at_ms: Millis

    def __attrs_post_init__(self) -> None:
        check(bool(self.present_boot_id), "the present boot id was read")
        check(self.recorded_boot_id != self.present_boot_id, "the boot id differs from the recorded one")


@attrs.frozen(kw_only=True)
class Usable:
    """P-READY: engine-specific readiness passed and a bounded inference probe answered something."""

    incarnation: Incarnation
    answer_chars: int
    probed_at_ms: Millis

    def __attrs_post_init__(self) -> None:
        check(self.answer_chars > 0, "the probe's answer is not empty")


@attrs.frozen(kw_only=True)
class SameEngine:
    """P-SAME: every recorded api and worker is alive, and no engine process that the record does not name."""

    incarnation: Incarnation
    recorded: tuple[ProcessIdentity, ...]
    alive: frozenset[ProcessIdentity]
    strangers: int
    observed_at_ms: Millis

    def __attrs_post_init__(self) -> None:
        engines = {process for process in self.recorded if process.role is not Role.HELPER}
        check(bool(engines), "the record names at least the api process")
        check(engines <= self.alive, "every recorded api and worker is alive")
        check(self.strangers == 0, "no engine process is present that the record does not name")


@attrs.frozen(kw_only=True)
class Quiet:
    """P-QUIET: gate closed, router in-flight 0, and the engine read idle after the gate closed."""

    incarnation: Incarnation
    gate_closed_at_ms: Millis
    router_in_flight: int
    running: int
    waiting: int
    read_at_ms: Millis

    def __attrs_post_init__(self) -> None:
        check(self.router_in_flight == 0, "nothing is in flight in the router")
        check(self.running == 0 and self.waiting == 0, "the engine reads idle")
        check(self.read_at_ms >= self.gate_closed_at_ms, "the reading is not older than the closed gate")


@attrs.frozen(kw_only=True)
class Resident:
    """P-RESID: what the recorded processes hold, sampled after the release call."""

    incarnation: Incarnation
    resident_bytes: Bytes
    budget_bytes: Bytes
    released_at_ms: Millis
    sampled_at_ms: Millis

    def __attrs_post_init__(self) -> None:
        check(self.sampled_at_ms > self.released_at_ms, "the sample is newer than the release")
        check(0 <= self.resident_bytes <= self.budget_bytes, "what is left fits the parked budget")


@attrs.frozen(kw_only=True)
class Back:
    """P-BACK: the recorded processes are resident again, in a report still fresh when recorded."""

    incarnation: Incarnation
    restored_at_ms: Millis
    sampled_at_ms: Millis
    fresh_until_ms: Millis
    recorded_at_ms: Millis

    def __attrs_post_init__(self) -> None:
        check(self.sampled_at_ms >= self.restored_at_ms, "the sample is not older than the restore")
        check(self.recorded_at_ms <= self.fresh_until_ms, "the report is still fresh when recorded")


@attrs.frozen(kw_only=True)
class Canary:
    """P-CANARY: the fixed prompt, asked after a wake, answered as it was at the first start."""

    incarnation: Incarnation
    expected: str
    actual: str

    def __attrs_post_init__(self) -> None:
        check(bool(self.actual), "the canary answered")
        check(self.expected == self.actual, "the canary's answer is the reference")


@attrs.frozen(kw_only=True)
class Aborted:
    """P-ABORT: the engine acknowledged the end of that request id."""

    incarnation: Incarnation
    request: str
    acknowledged_at_ms: Millis


@attrs.frozen(kw_only=True)
class Idle:
    """P-IDLE: the engine read running 0 and waiting 0, after the cut that it is to settle."""

    incarnation: Incarnation
    running: int
    waiting: int
    read_at_ms: Millis

    def __attrs_post_init__(self) -> None:
        check(self.running == 0 and self.waiting == 0, "the engine reads idle")


@attrs.frozen(kw_only=True)
class Closed:
    """P-CLOSED: after our half-close the engine sent its own EOF, and read idle after that.

    Only for engines whose EOF proves that the handler has returned (llama.cpp).
    """

    incarnation: Incarnation
    half_closed_at_ms: Millis
    eof_at_ms: Millis
    idle: Idle

    def __attrs_post_init__(self) -> None:
        check(self.eof_at_ms >= self.half_closed_at_ms, "the engine's EOF follows our half-close")
        check(self.idle.read_at_ms >= self.eof_at_ms, "the idle reading is not older than the EOF")
        check(self.idle.incarnation == self.incarnation, "the reading is of the same incarnation")


@attrs.frozen(kw_only=True)
class Unsent:
    """P-UNSENT: the record shows that no process effect was asked for under this token."""

    incarnation: Incarnation
    refused_before_sending: bool

    def __attrs_post_init__(self) -> None:
        check(self.refused_before_sending, "nothing was put on the wire")


GoneProof = Gone | NeverLaunched | Rebooted
"""What frees a charge, a port and a device claim altogether."""

Lowering = Gone | NeverLaunched | Rebooted | Resident | Usable | Unsent | Canary
"""What may lower a charge: to nothing, to parked, or from a transition's peak to ready."""


def generation_of(proof: GoneProof) -> Generation:
    """The generation whose absence `proof` shows."""
    return proof.incarnation.generation
