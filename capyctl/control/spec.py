"""What control knows of a deployment: the part of a revision that decides, without engine knowledge."""

from __future__ import annotations

import json

import attrs

from capyctl.fsm.types import Activation, Device, HostId, Millis, Residency
from capyctl.ledger.placement import Strategy


@attrs.frozen(kw_only=True)
class Traits:
    """What an engine build can prove (lifecycle 2.2). Control never learns a family's name from these.

    `family` is carried for status only.
    """

    family: str
    parks: bool = False
    idle_signal: bool = True  # a running/waiting reading exists
    abort_by_id: bool = False
    cache_salt: bool = False  # the engine partitions its prefix cache by salt
    least_deadline_ms: Millis = Millis(0)  # of requests to a deployment that states none: it builds kernels first
    vectors: bool = True  # what it serves for chat may be asked for embeddings and ranks: the engine decides
    eof_proves_end: bool = False  # P-CLOSED: the engine's EOF after our half-close means the handler returned


@attrs.frozen(kw_only=True)
class Spec:
    """One accepted revision. `document` is the completed deployment document as canonical JSON, opaque here."""

    name: str
    routes: tuple[str, ...]
    profile: str
    traits: Traits
    document: str
    api: str = "chat"
    activation: Activation = Activation.ON_DEMAND
    warm: bool = False
    residency: Residency = Residency.RESTART_ONLY
    residency_reason: str = ""  # for people: why it is that one
    instances: int = 1
    hosts: tuple[HostId, ...] = ()  # allowed hosts, in preference order; never empty once accepted
    max_per_host: int | None = None
    strategy: Strategy = Strategy.SPREAD
    devices: tuple[Device, ...] = ()  # that the document names; without one, placement chooses the card
    request_deadline_ms: Millis | None = None

    def same_but_count(self, other: Spec) -> bool:
        """Whether only the number of instances differs: such a change restarts nothing."""
        mine, theirs = json.loads(self.document), json.loads(other.document)
        mine.pop("instances", None)
        theirs.pop("instances", None)
        same_document = bool(mine == theirs)
        # What hardware and model settled for this document, they would settle for the other as well.
        settled = attrs.evolve(other, residency=self.residency, residency_reason=self.residency_reason)
        return same_document and attrs.evolve(self, document="", instances=1) == attrs.evolve(
            settled, document="", instances=1
        )
