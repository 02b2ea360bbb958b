"""What a role refuses of a deployment document before its checkpoint is measured: nothing is stored then."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from sizing_values import cards, plain, spark

from capyctl.documents.blocks import EngineProfile
from capyctl.engines.registered import Registered
from capyctl.errors import CapyError
from capyctl.fsm.types import HostId, Millis
from capyctl.ledger.types import HostPolicy
from capyctl.server.deploy import Allowed, accept

GPU = {"domain": "gpu0", "bytes": "4GiB"}
RAM = {"domain": "system", "bytes": "1GiB"}
POOL = {"domain": "unified", "bytes": "4GiB"}


class OneProfile:
    """A registry with vLLM alone in it."""

    def profiles(self) -> list[Registered]:
        return [self.registered("vllm")]

    def registered(self, profile: str) -> Registered:
        made = EngineProfile(engine="vllm", executable="/v/bin/vllm", build_fingerprint="0.32.0")  # type: ignore[arg-type]
        return Registered(name=profile, profile=made)


def accepted(document: dict[str, Any], *policies: HostPolicy) -> Any:
    hosts = [
        Allowed(host=HostId(f"H{number}"), name=f"h{number}", policy=attrs.evolve(policy, name=f"h{number}"))
        for number, policy in enumerate(policies)
    ]
    return accept({"name": "x", "engine": "vllm", "model": "m", **document}, OneProfile(), hosts, Millis(600_000))


def phases(*rows: dict[str, Any], **claim: Any) -> dict[str, Any]:
    block = {"allocations": list(rows), "devices": [claim]}
    return {"cold": block, "ready": block}


@pytest.mark.parametrize(
    ("document", "policy", "code", "said"),
    [
        ({"devices": [{"id": "gpu7"}], "host": "h0"}, cards(), "host_ineligible", "does not have the device gpu7"),
        ({"resources": phases(POOL)}, cards(), "host_ineligible", "has no domain unified"),
        ({"resources": phases(GPU, RAM)}, spark(), "host_ineligible", "has no domain gpu0"),
        ({"residency": "host_backed"}, spark(), "host_backed_unavailable", "Use residency: deep"),
        ({"residency": "host_backed"}, plain(), "capability_missing:deep_park", "Use residency: restart_only"),
        ({"residency": "deep"}, plain(), "capability_missing:deep_park", "h0 has no GPU"),
        ({"timeouts": {"initialize": "11m"}}, plain(), "invalid_config", "timeouts.initialize: is 660s, longer than"),
        ({"timeouts": {"wake": "601s"}}, spark(), "invalid_config", "600s, which bounds it too"),
        (
            {"resources": phases({**GPU, "bytes": "900GiB"}, RAM)},
            cards(),
            "insufficient_device_memory",
            "Lower what the document states",
        ),
        (
            {"resources": {"gpu": "1GiB", "ram": "900GiB"}},
            plain(),
            "insufficient_resources",
            "at most",
        ),
    ],
)
def test_what_a_host_can_never_hold_is_refused_at_once(
    document: dict[str, Any], policy: HostPolicy, code: str, said: str
) -> None:
    with pytest.raises(CapyError) as refused:
        accepted(document, policy)
    assert refused.value.code == code
    assert said in refused.value.message


def test_one_host_that_can_hold_it_is_enough() -> None:
    spec = accepted({"resources": phases(GPU, RAM)}, spark(), cards())
    assert (spec.hosts, spec.devices) == (("H0", "H1"), ())


def test_a_card_that_resources_claim_by_name_is_the_card_it_runs_on() -> None:
    assert accepted({"resources": phases(GPU, RAM, id="gpu0")}, cards()).devices == ("gpu0",)
    with pytest.raises(CapyError) as refused:
        accepted({"resources": phases(GPU, RAM, id="gpu0")}, cards(), cards())
    assert "name that host with `host`" in refused.value.message


@pytest.mark.parametrize(
    ("document", "policies", "code", "said"),
    [
        (
            {"instances": 9, "resources": phases({**GPU, "bytes": "12GiB"}, RAM)},
            (cards(),),
            "insufficient_device_memory",
            "State instances: ",
        ),
        (
            {"instances": 999, "resources": {"gpu": "1GiB", "ram": "1GiB"}},
            (plain(),),
            "insufficient_resources",
            "holds",
        ),
        ({"instances": 2, "placement": {"max_per_host": 1}}, (plain(),), "host_ineligible", "on 1 host allows 1"),
        (
            {"instances": 3, "placement": {"max_per_host": 1}},
            (plain(), spark()),
            "host_ineligible",
            "on 2 hosts allows 2",
        ),
        (
            {"instances": 9, "resources": phases(GPU, RAM, sharing="exclusive")},
            (cards(),),
            "device_conflict",
            "exclusively",
        ),
    ],
)
def test_instances_that_never_fit_together_are_refused_at_once(
    document: dict[str, Any], policies: tuple[HostPolicy, ...], code: str, said: str
) -> None:
    with pytest.raises(CapyError) as refused:
        accepted(document, *policies)
    assert (refused.value.code, refused.value.retryable) == (code, False)
    assert said in refused.value.message
    assert refused.value.details["instances"] == document["instances"] > refused.value.details["instances_max"]
    fitting = document | {"instances": max(1, refused.value.details["instances_max"])}
    assert accepted(fitting, *policies).instances == fitting["instances"]


def test_hosts_that_may_still_be_enrolled_keep_a_count_open() -> None:
    document = {"name": "x", "engine": "vllm", "model": "m", "instances": 2, "placement": {"max_per_host": 1}}
    hosts = [Allowed(host=HostId("H0"), name="h0", policy=plain())]
    assert accept(document, OneProfile(), hosts, Millis(600_000), more_hosts=True).instances == 2
    document["placement"] = {"max_per_host": 1, "hosts": ["h0"]}  # those are all that it may use
    with pytest.raises(CapyError, match="on 1 host allows 1"):
        accept(document, OneProfile(), hosts, Millis(600_000), more_hosts=True)


def test_a_parked_engine_has_processes_too_whether_its_residency_is_stated_or_not() -> None:
    full, left = phases(GPU, RAM)["cold"], {"allocations": [{**GPU, "bytes": "1GiB"}, {**RAM, "bytes": "0B"}]}
    stated = {"cold": full, "ready": full, "parking": full, "parked": left, "wake": full}
    with pytest.raises(CapyError, match=r"x: resources\.parked\.allocations\[1\]\.bytes: is 0B on system"):
        accepted({"resources": stated}, cards())
    assert accepted({"resources": stated, "residency": "restart_only"}, cards()).name == "x"
