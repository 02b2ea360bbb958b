"""Where an engine's memory lies on a host: one pool without a GPU, one pool with a GPU, or cards beside RAM. Pure.

The machine is known by its policy. An engine of several ranks has a card for each of them, alike in size; which cards
those are at a start is placement's to say, so the plan's are the first that would do, in rank order.

Source: memory 1, 5.2, 11; decisions 4.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import attrs

from capyctl.documents.deployment import Deployment
from capyctl.errors import Refusal
from capyctl.fsm.types import Domain
from capyctl.ledger.types import Claim, DomainKind, DomainPolicy, HostPolicy

GIB = 1 << 30
MIB = 1 << 20
CUDA_CONTEXT_BYTES = 5 * GIB // 4
"""X: the CUDA context and graphs placeholder. A machine without a GPU has none (decisions 4)."""
DEFAULT_KV_BYTES = 4 * GIB


@attrs.frozen(kw_only=True)
class Machine:
    """Where the engine's memory lies: a domain per rank, in rank order, and the system domain beside cards.

    `policy` has the limits of each of those domains: cards of several ranks are alike.
    """

    domains: tuple[Domain, ...]
    policy: DomainPolicy
    system: Domain | None
    system_policy: DomainPolicy | None
    claims: tuple[Claim, ...]

    @property
    def domain(self) -> Domain:
        """The main domain: the first rank's."""
        return self.domains[0]

    @property
    def card(self) -> bool:
        return self.policy.kind is DomainKind.DEVICE

    @property
    def has_gpu(self) -> bool:
        return self.policy.device is not None

    @property
    def context_bytes(self) -> int:
        """X, on each of the domains."""
        return CUDA_CONTEXT_BYTES if self.has_gpu else 0

    @property
    def most_bytes(self) -> int:
        """What may be charged on one of the domains at all."""
        return min(self.policy.managed_bytes, self.policy.capacity_bytes - self.policy.reserve_bytes)

    @property
    def default_kv_bytes(self) -> int:
        """The cache of a document that states none."""
        return min(DEFAULT_KV_BYTES, self.policy.managed_bytes // 4)


def machine_of(document: Deployment, policy: HostPolicy) -> Machine:
    """The domains that a deployment's engine runs in: its named cards, else those that its `resources` speak of,
    else the largest ones, the first of equals.

    Placement chooses among the cards on which that fits.

    Raises: Refusal `host_ineligible` naming what the host lacks; `invalid_config` for devices that are not one per
      rank.
    """
    ranks, asked = document.topology.ranks, document.claims
    named = tuple(str(claim.id) for claim in asked if claim.id)
    if ranks > 1 and asked and len(asked) != ranks:
        raise Refusal(
            "invalid_config",
            f"{document.name}: devices: are {len(asked)}, and topology has {ranks} ranks; state one per rank",
        )
    fitting = [
        (name, limits)
        for name, limits in sorted(policy.domains.items(), key=lambda item: (len(item[0]), item[0]))
        if limits.kind is not DomainKind.DISTINCT and (not named or limits.device in named)
    ]
    missing = sorted(set(named) - {str(limits.device) for _, limits in fitting})
    if missing or not fitting:
        what = f"the device {missing[0]}" if missing else "a memory domain for an engine"
        raise Refusal("host_ineligible", f"{policy.name} does not have {what}")
    resources = document.resources
    stated = () if resources is None or resources.ready is None else resources.ready.cards
    chosen = _alike(document, policy, fitting, stated) if ranks > 1 else [max(fitting, key=_preferred(stated))]
    sharing = [claim.sharing for claim in asked] or [None]
    claims = tuple(
        Claim(device=limits.device, exclusive=how == "exclusive" or (how is None and limits.exclusive))
        for (_, limits), how in zip(chosen, sharing * len(chosen), strict=False)
        if limits.device is not None
    )
    system = next((name for name, other in policy.domains.items() if other.kind is DomainKind.DISTINCT), None)
    return Machine(
        domains=tuple(name for name, _ in chosen),
        policy=min((limits for _, limits in chosen), key=lambda limits: limits.managed_bytes),
        system=system,
        system_policy=None if system is None else policy.domains[system],
        claims=claims,
    )


_Named = tuple[Domain, DomainPolicy]


def _preferred(stated: Sequence[str]) -> Callable[[_Named], tuple[bool, int]]:
    return lambda item: (item[0] in stated, int(item[1].managed_bytes))


def _alike(document: Deployment, policy: HostPolicy, fitting: Sequence[_Named], stated: Sequence[str]) -> list[_Named]:
    """A card per rank, all of one model and size: those that are spoken of, else the largest.

    Raises: Refusal `host_ineligible` when the host has not that many alike.
    """
    ranks = document.topology.ranks
    makes: dict[tuple[str | None, int], list[_Named]] = defaultdict(list)
    for name, limits in fitting:
        if limits.kind is DomainKind.DEVICE:
            makes[limits.model, limits.capacity_bytes].append((name, limits))
    enough = [cards for cards in makes.values() if len(cards) >= ranks]
    if not enough:
        has = max((len(cards) for cards in makes.values()), default=0)
        raise Refusal(
            "host_ineligible",
            f"{document.name}: topology has {ranks} ranks, each on a card like the others'; "
            f"{policy.name} has {has} that are alike",
        )

    def rank(cards: list[_Named]) -> tuple[int, int]:
        return sum(name in stated for name, _ in cards), min(int(limits.managed_bytes) for _, limits in cards)

    cards = max(enough, key=rank)
    known = [Domain(name) for name in stated if name in policy.domains]
    if not {card for card, _ in cards}.issuperset(known):
        raise Refusal(
            "host_ineligible",
            f"{document.name}: resources hold memory on {', '.join(known)}, which are not alike on {policy.name}; "
            f"each rank needs a card like the others'",
        )
    return sorted(cards, key=lambda item: (item[0] not in stated, cards.index(item)))[:ranks]
