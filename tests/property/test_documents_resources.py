"""`resources`: what contradicts itself is refused when it is written, what is accepted keeps every rule."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capyctl.documents.deployment import Deployment, parse_deployment
from capyctl.documents.resources import PHASES, SERVING, Resources
from capyctl.errors import CapyError

GIB = "1GiB"
UNIFIED = {"allocations": [{"domain": "unified", "bytes": "4GiB"}], "devices": [{}]}
CARD = {
    "allocations": [{"domain": "gpu0", "bytes": "4GiB"}, {"domain": "system", "bytes": GIB}],
    "devices": [{"id": "gpu0"}],
}
LEFT = {"allocations": [{"domain": "gpu0", "bytes": GIB}, {"domain": "system", "bytes": GIB}]}
FIVE: dict[str, Any] = {"cold": CARD, "ready": CARD, "parking": CARD, "parked": LEFT, "wake": CARD}


def made(resources: Any, **more: Any) -> Deployment:
    return parse_deployment({"name": "x", "engine": "vllm", "model": "m", "resources": resources, **more}, "x.yaml")


@pytest.mark.parametrize(
    ("resources", "more", "where", "way_out"),
    [
        ({}, {}, "resources.cold: is required", "gpu and ram"),
        ({"gpu": GIB}, {}, "resources.ram: is required", "state both"),
        ({"ram": GIB}, {}, "resources.gpu: is required", "state both"),
        ({"gpu": "0B", "ram": GIB}, {}, "resources.gpu: is 0B", "or the phases"),
        ({"gpu": GIB, "ram": "0B"}, {}, "resources.ram: is 0B", "or the phases"),
        ({"gpu": GIB, "ram": GIB, "wake": CARD}, {}, "resources: states gpu and ram, and wake", "keep the short form"),
        ({"gpu": GIB, "ram": GIB}, {"residency": "deep"}, "resources: gpu and ram are for restart_only", "the phases"),
        ({"gpu": GIB, "ram": GIB}, {"devices": [{}, {}]}, "resources: gpu and ram are for one device", "the phases"),
        (
            {"gpu": GIB, "ram": GIB},
            {"topology": {"tensor_parallel": 2}},
            "resources: gpu and ram are for one device",
            "the phases",
        ),
        (
            {"gpu": GIB, "ram": GIB},
            {"engine_config": {"memory": {"startup": "2GiB"}}},
            "engine_config.memory.startup: cannot stand beside resources",
            "leave it out",
        ),
        ({"ready": CARD}, {}, "resources.cold: is required", "gpu and ram"),
        ({"cold": CARD, "ready": CARD}, {"residency": "deep"}, "resources.parking: is required for residency deep", ""),
        (FIVE | {"wake": LEFT}, {}, "resources.wake.devices: lacks gpu0, which ready claims", "claim it in wake"),
        (FIVE | {"cold": LEFT}, {}, "resources.cold.devices: lacks gpu0, which ready claims", "claim it in cold"),
        (FIVE | {"parking": LEFT}, {}, "resources.parking.devices: lacks gpu0", "claim it in parking"),
        (
            {"cold": UNIFIED | {"devices": []}, "ready": UNIFIED},
            {},
            "resources.cold.devices: lacks a device, which ready claims",
            "claim it in cold",
        ),
        (
            {"cold": CARD, "ready": CARD | {"devices": [{"id": "gpu0"}, {"id": "gpu0"}]}},
            {},
            "resources.ready.devices: names gpu0 twice",
            "keep one claim",
        ),
        (
            {"cold": CARD, "ready": {"allocations": [CARD["allocations"][1]] * 2}},
            {},
            "resources.ready.allocations: names system twice",
            "keep one amount",
        ),
        (
            {"cold": CARD, "ready": {"allocations": [*CARD["allocations"], *UNIFIED["allocations"]]}},
            {},
            "resources.ready.allocations: names unified beside gpu0",
            "keep those it has",
        ),
        (
            {"cold": UNIFIED, "ready": {"allocations": [*UNIFIED["allocations"], CARD["allocations"][1]]}},
            {},
            "resources.ready.allocations: names unified and system",
            "add them up",
        ),
        ({"cold": UNIFIED, "ready": {}}, {}, "resources.ready.allocations: hold nothing", "state the bytes"),
        (
            {"cold": CARD, "ready": {"allocations": [CARD["allocations"][1]], "devices": [{}]}},
            {},
            "resources.ready.devices: claims a device and holds nothing on a card",
            "state its bytes",
        ),
        (
            {"cold": CARD, "ready": CARD | {"devices": [{"id": "gpu1"}]}},
            {},
            "resources.ready.devices: claims gpu1 and holds nothing there",
            "state the bytes of gpu1",
        ),
        (
            FIVE | {"parked": UNIFIED | {"devices": []}},
            {},
            "resources.parked.allocations[0].bytes: is 4GiB on unified, more than the 0B of ready",
            "only gives memory back",
        ),
        (
            {"cold": {"allocations": [{"domain": "unified", "bytes": GIB, "host_kv_bytes": "2GiB"}]}, "ready": UNIFIED},
            {},
            "resources.cold.allocations[0].host_kv_bytes: is 2GiB of 1GiB",
            "a part of bytes",
        ),
        (
            {"cold": {"allocations": [{"domain": "gpu0", "bytes": GIB, "host_kv_bytes": "1MiB"}]}, "ready": CARD},
            {},
            "resources.cold.allocations[0].host_kv_bytes: is a cache in the RAM",
            "state it on system",
        ),
        (
            {"cold": CARD, "ready": CARD},
            {"devices": [{"id": "gpu1"}], "host": "box"},
            "resources.cold: uses gpu0, and devices names gpu1",
            "keep one of them",
        ),
        (
            {
                phase: {"allocations": [*CARD["allocations"], {"domain": "gpu1", "bytes": GIB}]}
                for phase in ("cold", "ready")
            },
            {},
            "resources.cold: uses 2 devices, and topology says 1",
            "state one for each rank",
        ),
        (
            {phase: {"allocations": CARD["allocations"]} for phase in ("cold", "ready")},
            {"topology": {"tensor_parallel": 2}},
            "resources.cold.allocations: hold memory on 1 of 2 cards",
            "each rank's card",
        ),
        (
            {"gpu": "8GiB", "ram": GIB},
            {"engine_config": {"memory": {"request": "2GiB"}}},
            "engine_config.memory.request: cannot stand beside resources, which state its memory as gpu and ram",
            "leave it out",
        ),
        (
            FIVE,
            {"engine_config": {"memory": {"request": "2GiB"}}},
            "engine_config.memory.request: cannot stand beside resources, which state its memory as ready",
            "leave it out",
        ),
        (
            FIVE,
            {"engine_config": {"memory": {"kv_cache": "5GiB"}}},
            "engine_config.memory.kv_cache: is 5GiB, which leaves no room for weights in the 5GiB of resources",
            "while it serves",
        ),
        (
            {"gpu": GIB, "ram": "1B"},
            {},
            "resources.ram: is 1B; an engine's processes hold 64MiB",
            "State what yours hold",
        ),
        (
            {"cold": UNIFIED, "ready": {"allocations": [{"domain": "unified", "bytes": "63MiB"}], "devices": [{}]}},
            {},
            "resources.ready.allocations[0].bytes: is 63MiB on unified; an engine's processes hold 64MiB",
            "State what yours hold",
        ),
        (
            FIVE | {"cold": CARD | {"devices": [{"id": "gpu0", "sharing": "exclusive"}]}},
            {},
            "resources.cold.devices[0].sharing: is exclusive, and the ready phase says nothing of it",
            "say the same everywhere",
        ),
        (
            FIVE | {"ready": CARD | {"devices": [{"id": "gpu0", "sharing": "exclusive"}]}},
            {"devices": [{"sharing": "shared"}]},
            "resources.ready.devices[0].sharing: is exclusive, and devices says shared",
            "say the same everywhere",
        ),
    ],
)
def test_each_contradiction_is_one_line_with_the_field_and_the_way_out(
    resources: Any, more: dict[str, Any], where: str, way_out: str
) -> None:
    with pytest.raises(CapyError) as refused:
        made(resources, **more)
    assert refused.value.code == "invalid_config"
    assert refused.value.message.startswith(f"x.yaml: {where}")
    assert way_out in refused.value.message
    assert "\n" not in refused.value.message


def test_a_card_without_ram_beside_it_has_a_code_of_its_own() -> None:
    bare = {"allocations": [CARD["allocations"][0]], "devices": [{}]}
    with pytest.raises(CapyError) as refused:
        made({"cold": bare, "ready": bare})
    assert (refused.value.code, refused.value.exit_code) == ("missing_system_allocation", 2)
    assert "names gpu0 and not system" in refused.value.message


def test_an_engine_on_a_card_has_processes_in_ram_in_every_phase_of_its_life() -> None:
    for stated in ("0B", "1B", "65535KiB"):
        on_card = [CARD["allocations"][0], {"domain": "system", "bytes": stated}]
        for phase in PHASES:
            with pytest.raises(CapyError) as refused:
                made(FIVE | {phase: FIVE[phase] | {"allocations": on_card}}, residency="deep")
            assert refused.value.code == "missing_system_allocation"
            assert f"resources.{phase}.allocations[1].bytes: is {stated} on system" in refused.value.message
    gone = FIVE | {"parked": {}}
    assert made(gone, residency="restart_only").resources is not None  # nothing is left of what has ended
    with pytest.raises(CapyError, match="name neither system nor unified"):
        made(gone, residency="deep")


def test_what_devices_leave_open_the_claims_of_resources_say() -> None:
    alone = CARD | {"devices": [{"id": "gpu0", "sharing": "exclusive"}]}
    stated = {"cold": CARD, "ready": alone}
    for devices in ([], [{}], [{"id": "gpu0"}], [{"sharing": "exclusive"}]):
        (claim,) = made(stated, devices=devices, host="a").claims
        assert (claim.id, claim.sharing) == ("gpu0", "exclusive")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"instances": 3, "host": "a", "placement": {"max_per_host": 2}}, "max_per_host, 2, on 1 host allows 2"),
        (
            {"instances": 5, "placement": {"hosts": ["a", "b"], "max_per_host": 2}},
            "max_per_host, 2, on 2 hosts allows 4",
        ),
        ({"instances": 2, "host": "a", "devices": [{"id": "gpu0", "sharing": "exclusive"}]}, "wants gpu0 exclusively"),
        ({"lmcache": "off", "lmcache_pool": "1GiB"}, "lmcache_pool: is 1GiB, and lmcache is off"),
        (
            {"engine_config": {"memory": {"kv_cache": "2GiB", "startup": "2GiB"}}},
            "no room for weights in memory.startup",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused_by_the_document_alone(more: dict[str, Any], said: str) -> None:
    with pytest.raises(CapyError) as refused:
        parse_deployment({"name": "x", "engine": "vllm", "model": "m", **more}, "x.yaml")
    assert refused.value.code == "invalid_config"
    assert said in refused.value.message


@pytest.mark.parametrize("engine", ["tensorfold"])
def test_an_engine_whose_memory_nobody_derives_needs_the_block(engine: str) -> None:
    with pytest.raises(CapyError) as refused:
        parse_deployment(
            {"name": "x", "engine": engine, "model": "m", "engine_config": {"context_length": 512}}, "x.yaml"
        )
    assert refused.value.message == "x.yaml: resources: is required on tensorfold: its memory cannot be derived"


def test_two_ranks_have_two_cards() -> None:
    both = {"allocations": [*CARD["allocations"], {"domain": "gpu1", "bytes": GIB}], "devices": [{}, {}]}
    made({"cold": both, "ready": both}, topology={"tensor_parallel": 2})
    with pytest.raises(CapyError) as refused:
        made({"cold": both | {"devices": [{}]}, "ready": both}, topology={"tensor_parallel": 2})
    assert "resources.cold.devices: lacks a device" in refused.value.message
    member = {"cold": CARD | {"devices": [{}]}, "ready": CARD | {"devices": [{}]}}
    made(member, topology={"tensor_parallel": 2}, placement={"hosts": ["a", "b"]})


def test_a_claimed_card_is_the_card_of_the_deployment() -> None:
    assert [claim.id for claim in made({"cold": CARD, "ready": CARD}).claims] == ["gpu0"]
    assert [claim.id for claim in made({"gpu": GIB, "ram": GIB}, host="a", devices=[{"id": "gpu2"}]).claims] == ["gpu2"]
    assert made({"gpu": GIB, "ram": GIB}).claims == ()


# ---------------------------------------------------------------- drawn blocks

SIZES = st.sampled_from(["0B", "1MiB", "1GiB", "3GiB"])
DOMAINS = st.sampled_from(["unified", "system", "gpu0", "gpu1"])


@st.composite
def phases(draw: st.DrawFn) -> dict[str, Any]:
    allocation = st.fixed_dictionaries(
        {"domain": DOMAINS, "bytes": SIZES}, optional={"host_kv_bytes": st.sampled_from(["0B", "1MiB", "2GiB"])}
    )
    device = st.sampled_from([{}, {"id": "gpu0"}, {"id": "gpu1"}, {"id": "gpu0", "sharing": "exclusive"}])
    return {
        "allocations": draw(st.lists(allocation, max_size=3)),
        "devices": draw(st.lists(device, max_size=2)),
    }


@st.composite
def good(draw: st.DrawFn) -> dict[str, Any]:
    """A block that keeps every rule, before something in it is exchanged."""
    unified, held = draw(st.booleans()), draw(st.integers(2, 4))

    def phase(gib: int, uses: bool = True) -> dict[str, Any]:
        rows = [{"domain": "unified", "bytes": f"{gib}GiB"}]
        if not unified:
            rows = [{"domain": "gpu0", "bytes": f"{gib}GiB"}, {"domain": "system", "bytes": "1GiB"}]
        return {"allocations": rows, "devices": [{}] if uses else []}

    full = {name: phase(held) for name in ("ready", "parking", "wake")}
    return {"cold": phase(held + 1), **full, "parked": phase(draw(st.integers(0, held)), uses=False)}


@st.composite
def blocks(draw: st.DrawFn) -> dict[str, Any]:
    if draw(st.integers(0, 3)) == 0:
        return draw(
            st.fixed_dictionaries(
                {}, optional={"gpu": SIZES, "ram": SIZES, **{phase: phases() for phase in PHASES[:2]}}
            )
        )
    block = draw(good())
    for name in draw(st.lists(st.sampled_from(PHASES), max_size=2)):
        if draw(st.booleans()):
            block.pop(name, None)
        else:
            block[name] = draw(phases())
    return block


def read(block: dict[str, Any], **more: Any) -> Deployment | CapyError:
    try:
        return made(block, **more)
    except CapyError as refusal:
        return refusal


@settings(derandomize=True, max_examples=400, deadline=None)
@given(blocks(), st.sampled_from([None, "deep", "restart_only"]), st.sampled_from([(), ({"id": "gpu0"},), ({},)]))
def test_a_block_is_refused_by_its_field_or_keeps_every_rule(
    block: dict[str, Any], residency: str | None, devices: tuple[dict[str, Any], ...]
) -> None:
    more: dict[str, Any] = {"host": "box", "devices": list(devices)} | ({"residency": residency} if residency else {})
    found = read(block, **more)
    if isinstance(found, CapyError):
        assert found.code in ("invalid_config", "missing_system_allocation")
        assert found.message.startswith(("x.yaml: resources", "x.yaml: devices"))
        assert "\n" not in found.message
        return
    resources = found.resources
    assert resources is not None
    if resources.short:
        assert all(size is not None and size.bytes for size in (resources.gpu, resources.ram))
        assert (resources.stated, residency == "deep", len(devices) > 1) == ({}, False, False)
        return
    assert_rules(resources, parks=residency == "deep", named={str(one["id"]) for one in devices if "id" in one})


def assert_rules(resources: Resources, *, parks: bool, named: set[str]) -> None:
    stated = resources.stated
    assert {"cold", "ready"} <= set(stated)
    assert not parks or set(stated) == set(PHASES)
    for phase, block in stated.items():
        amounts = {str(one.domain): one.bytes.bytes for one in block.allocations}
        cards = {name for name, amount in amounts.items() if name.startswith("gpu") and amount}
        assert len(amounts) == len(block.allocations)
        assert all(one.host_kv_bytes.bytes <= one.bytes.bytes for one in block.allocations)
        assert not any(one.host_kv_bytes.bytes for one in block.allocations if one.domain.startswith("gpu"))
        assert not cards or "system" in amounts
        assert not ("unified" in amounts and (cards or "system" in amounts))
        assert max(len(cards), len(block.devices)) <= 1
        assert not named or (cards | set(block.ids)) <= named
        if phase in SERVING:
            assert sum(amounts.values()) > 0
            assert set(resources.stated["ready"].ids) <= set(block.ids)
            assert set(resources.stated["ready"].cards) <= cards
        else:
            served = {str(one.domain): one.bytes.bytes for one in resources.stated["ready"].allocations}
            assert all(amount <= served.get(name, 0) for name, amount in amounts.items())
