"""How many instances can ever be ready at once: as many as can be placed one after the other, and never fewer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_values import GPU0, GPU1, HOST, OTHER_HOST, POOL, SYSTEM, card_host, limits, plan, pool_host

from capyctl.fsm.types import Bytes, Device, Domain, Phase
from capyctl.ledger.cards import on_cards, sets
from capyctl.ledger.together import TooMany, too_many
from capyctl.ledger.types import Allocation, Claim, DomainKind, HostPolicy, Plan

few = settings(max_examples=60, deadline=None, derandomize=True)


def most(made: Plan, policy: HostPolicy, **more: Any) -> int:
    """The largest number that is not refused."""
    count = 1
    while too_many(count, {policy.host: made}, {policy.host: policy}, **more) is None:
        count += 1
        assert count < 2_000
    return count - 1


def refused(count: int, made: Plan, policy: HostPolicy, **more: Any) -> TooMany:
    found = too_many(count, {policy.host: made}, {policy.host: policy}, **more)
    assert found is not None
    return found


def test_the_last_of_them_starts_beside_those_that_serve() -> None:
    assert most(plan(cold=30, ready=30), pool_host(100)) == 3
    assert most(plan(cold=41, ready=30), pool_host(100)) == 2
    assert most(plan(cold=40, ready=30), pool_host(100)) == 3
    assert most(plan(cold=101, ready=30), pool_host(100)) == 0


def test_a_start_that_takes_the_whole_host_is_measured_first() -> None:
    assert most(plan(cold=100, ready=30, whole_host=True), pool_host(100)) == 3


def test_each_card_holds_its_own_and_ram_holds_all_of_them() -> None:
    made = plan(cold=12, ready=10, ram=4, domain=GPU0, device="gpu0")
    assert most(made, card_host(24, 24)) == 4
    assert most(made, card_host(24, 12)) == 3
    assert most(made, card_host(24, 24, system=15)) == 3
    assert most(made, card_host(24, 24), named=(Device("gpu0"),)) == 2


def test_a_device_that_each_wants_alone_holds_one() -> None:
    alone = plan(cold=10, ready=10, domain=GPU0, device="gpu0", exclusive=True)
    assert most(alone, card_host(24, 24)) == 2
    assert refused(3, alone, card_host(24, 24)).code == "device_conflict"
    assert refused(2, alone, card_host(24, 24), named=(Device("gpu0"),)).code == "device_conflict"
    # It is memory that bounds them where no card holds two anyway.
    assert refused(3, attrs.evolve(alone), card_host(12, 12)).code == "insufficient_device_memory"
    pool = attrs.evolve(pool_host(100), domains={POOL: limits(100, device="gpu0")})
    shared = plan(cold=10, ready=10, device="gpu0", exclusive=True)
    assert (most(shared, pool), refused(2, shared, pool).code) == (1, "device_conflict")


def ranked(*shares: int) -> Plan:
    """An engine with a rank on each of the first cards, and 1 byte of RAM."""
    bytes_ = {Domain(f"gpu{rank}"): Bytes(share) for rank, share in enumerate(shares)} | {SYSTEM: Bytes(1)}
    held = Allocation(bytes=bytes_, claims=tuple(Claim(device=Device(f"gpu{rank}")) for rank, _ in enumerate(shares)))
    made = plan(cold=1, ready=1)
    return attrs.evolve(made, phases={Phase.COLD: held, Phase.READY: held})


def test_ranks_of_one_instance_lie_on_different_cards_that_are_equal() -> None:
    assert most(ranked(10, 10), card_host(24, 24)) == 2
    assert most(ranked(10, 10), card_host(24, 24, 24)) == 3
    assert most(ranked(10, 10), card_host(24, 48)) == 0  # no two of them are equal
    assert most(ranked(10, 10), card_host(24, 24, 48, 48)) == 2 + 4
    assert most(ranked(10, 10, 10), card_host(10, 10, 10, 10, 10)) == 1


def test_shares_that_differ_lie_on_the_cards_that_they_are_stated_for() -> None:
    named = (Device("gpu0"), Device("gpu1"))
    assert most(ranked(10, 16), card_host(22, 22), named=named) == 1
    assert "holds 1 of them, each 16 B on 2 of gpu0,gpu1" in refused(2, ranked(10, 16), card_host(22, 22)).message("x")
    assert most(ranked(10, 10), card_host(22, 22), named=named) == 2
    assert most(ranked(16, 16, 2), card_host(22, 22, 22)) == 1


@few
@given(
    cards=st.lists(st.sampled_from((8, 12, 24, 24)), min_size=2, max_size=4),
    shares=st.lists(st.integers(1, 24), min_size=2, max_size=3),
    more=st.integers(0, 6),
)
def test_unequal_shares_are_never_thought_to_fit_less_often_than_they_do(
    cards: list[int], shares: list[int], more: int
) -> None:
    if len(shares) > len(cards):
        return
    policy, ready = card_host(*cards, system=100), ranked(*shares)
    held = ready.at(Phase.READY)
    start = {domain: Bytes(amount + (more if domain != SYSTEM else 0)) for domain, amount in held.bytes.items()}
    made = attrs.evolve(ready, phases={Phase.COLD: attrs.evolve(held, bytes=start), Phase.READY: held})
    assert most(made, policy) >= _placed(policy, made)


def _placed(policy: HostPolicy, made: Plan) -> int:
    """The most that can be placed one after the other, by trying everything."""
    equal = [card for card in policy.domains if policy.domains[card].kind is DomainKind.DEVICE]
    ways = [on_cards(made, policy, chosen) for chosen in sets(policy, equal, len(made.at(Phase.READY).claims))]
    seen: dict[tuple[tuple[str, int], ...], int] = {}

    def placed(used: Mapping[Domain, int]) -> int:
        key = tuple(sorted((str(name), amount) for name, amount in used.items()))
        if key not in seen:
            seen[key] = max((1 + placed(after) for way in ways if (after := _beside(policy, used, way))), default=0)
        return seen[key]

    return placed({})


def test_a_refusal_says_what_each_needs_where_and_how_many_there_can_be() -> None:
    gib = 1 << 30
    box = attrs.evolve(pool_host(16 * gib), name="box")
    found = refused(3, plan(cold=6 * gib, ready=6 * gib), box)
    assert found.code == "insufficient_resources"
    assert found.message("pair") == (
        "pair: instances: is 3, and box holds 2 of them, each 6.0 GiB on unified, where at most 16.0 GiB may be used. "
        "State instances: 2, or lower what each needs"
    )
    peak = refused(2, plan(cold=11 * gib, ready=6 * gib), box).message("pair")
    assert "holds 1 of them, each 6.0 GiB, 11.0 GiB while it starts, on unified, where at most 16.0 GiB" in peak
    assert found.details()["instances_max"] == 2
    assert found.details()["hosts"][0] | {"host": 0} == {
        "host": 0,
        "host_name": "box",
        "instances_max": 2,
        "code": "insufficient_resources",
        "domain": "unified",
        "needs_bytes": 6 * gib,
        "limit_bytes": 16 * gib,
    }


def test_hosts_add_up_and_max_per_host_bounds_each() -> None:
    made, policies = plan(cold=30, ready=30), {HOST: pool_host(100), OTHER_HOST: pool_host(60, host=OTHER_HOST)}
    plans = {HOST: made, OTHER_HOST: made}
    assert too_many(5, plans, policies) is None
    assert too_many(6, plans, policies) is not None
    found = too_many(4, plans, policies, max_per_host=1)
    assert found is not None
    assert (found.most, found.code) == (2, "host_ineligible")
    assert "as many as placement.max_per_host allows" in found.message("x")


def test_caches_in_host_memory_have_a_limit_of_their_own() -> None:
    made = plan(cold=10, ready=10, host_kv=4)
    found = refused(3, made, pool_host(100, host_kv=9))
    assert (found.most, found.code) == (2, "category_limit")


@few
@given(
    cards=st.lists(st.sampled_from((8, 12, 24, 24)), min_size=1, max_size=4),
    share=st.integers(1, 24),
    more=st.integers(0, 6),
    ranks=st.integers(1, 3),
    ram=st.integers(1, 30),
    exclusive=st.booleans(),
)
def test_what_can_be_placed_is_not_refused_and_one_more_cannot_be(
    cards: list[int], share: int, more: int, ranks: int, ram: int, exclusive: bool
) -> None:
    """Against every way of placing them, one after the other, each start beside those that serve."""
    if ranks > len(cards):
        return
    policy = card_host(*cards, system=100)
    names = [Domain(f"gpu{rank}") for rank in range(ranks)]
    claims = tuple(Claim(device=Device(name), exclusive=exclusive) for name in names)

    def held(amount: int) -> Allocation:
        return Allocation(bytes=dict.fromkeys(names, Bytes(amount)) | {SYSTEM: Bytes(ram)}, claims=claims)

    made = attrs.evolve(plan(cold=1, ready=1), phases={Phase.COLD: held(share + more), Phase.READY: held(share)})
    assert most(made, policy) == _placed(policy, made)


def _beside(policy: HostPolicy, used: Mapping[Domain, int], way: Plan) -> dict[Domain, int] | None:
    """What is used once this one serves too; None where its start, or its device, has no room."""
    for domain, amount in way.start_bytes.items():
        if used.get(domain, 0) + amount > policy.domains[domain].most_bytes:
            return None
    ready = way.at(Phase.READY)
    if any(claim.exclusive and used.get(Domain(claim.device)) for claim in ready.claims):
        return None
    after = dict(used)
    for domain, amount in ready.bytes.items():
        after[domain] = after.get(domain, 0) + amount
    return after


@pytest.mark.parametrize("domain", [GPU0, GPU1])
def test_every_host_is_told(domain: Domain) -> None:
    made = plan(cold=30, ready=30, domain=domain, device=str(domain))
    found = refused(4, made, card_host(30, 30))
    assert "host-a-name holds 2 of them, each 30 B on one of gpu0,gpu1" in found.message("x")
