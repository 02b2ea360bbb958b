"""Host limits: publishing them, and refusing those that what is charged already exceeds.

Nothing is ended to make new limits true. Source: memory 2.2, 16; lifecycle 23, invariant 1.
"""

from __future__ import annotations

from capyctl.fsm.types import Bytes, Domain
from capyctl.ledger.charges import Ledger, sound
from capyctl.ledger.shortfall import Shortfall
from capyctl.ledger.types import HostPolicy


def set_policy(ledger: Ledger, policy: HostPolicy) -> Ledger | Shortfall:
    """Put a host's limits in force, its first ones or new ones.

    Charges of owners whose state nobody knows are kept and not held against the limits: nothing is admitted
    beside them until the sum fits.
    Returns: the next epoch's ledger, the same one where these limits are in force already, or the limit that
      present charges exceed, with figures.
    Raises: InvariantBroken for limits that cannot be.
    """
    if ledger.policy(policy.host) == policy:
        return ledger
    sound(policy)
    for domain in sorted({one for _, held in ledger.on(policy.host) for one in held.allocation.bytes}):
        short = _missing(ledger, policy, domain) or _exceeded(ledger, policy, domain)
        if short is not None:
            return short
    return ledger.limited(policy)


def _missing(ledger: Ledger, policy: HostPolicy, domain: Domain) -> Shortfall | None:
    before = ledger.hosts[policy.host].domains.get(domain) if policy.host in ledger.hosts else None
    if domain in policy.domains:
        was, now = before.uuid if before is not None else None, policy.domains[domain].uuid
        if was is None or now is None or was == now:
            return None
        reason = f"{domain} of {policy.name} is charged as the card {was}, and is {now} by the new limits"
    else:
        reason = f"{domain} of {policy.name} is charged and the new limits do not name it"
    return Shortfall(
        code="device_policy_mismatch",
        check="domains",
        host=policy.host,
        host_name=policy.name,
        owner="",
        domain=domain,
        others=_owners(ledger, policy, domain),
        reason=reason,
    )


def _exceeded(ledger: Ledger, policy: HostPolicy, domain: Domain) -> Shortfall | None:
    limits = policy.domains[domain]
    most = min(limits.managed_bytes, limits.capacity_bytes - limits.reserve_bytes)
    charged = Bytes(sum(held.on(domain) for _, held in ledger.on(policy.host) if not held.uncertain))
    if charged <= most:
        return None
    return Shortfall(
        code="insufficient_resources",
        check="managed_limit" if most == limits.managed_bytes else "capacity",
        host=policy.host,
        host_name=policy.name,
        owner="",
        domain=domain,
        needs_bytes=charged,
        free_bytes=Bytes(most),
        limit_bytes=Bytes(most),
        others=_owners(ledger, policy, domain),
    )


def _owners(ledger: Ledger, policy: HostPolicy, domain: Domain) -> tuple[tuple[str, Bytes], ...]:
    rows = [(owner, held.on(domain)) for owner, held in ledger.on(policy.host) if held.on(domain)]
    return tuple(sorted(rows, key=lambda row: (-row[1], row[0])))
