"""What `validate config` says of a deployment is what a role makes of it: the same plan, residency and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_residency_settled import (
    BOX,
    FACTS,
    GIB,
    NAME,
    SPARK,
    Profiles,
    card_host,
    measured,
    no_gpu,
    unified_host,
)

from capyctl.cli import sites, validate
from capyctl.control import events
from capyctl.control.book import Settings
from capyctl.documents.deployment import Deployment, parse_deployment
from capyctl.errors import CapyError, Refusal
from capyctl.ledger.types import HostPolicy
from capyctl.server.deploy import Allowed
from capyctl.server.preview import Preview, Site, preview

DEADLINE_MS = Settings().request_deadline_ms


def previewed(
    weights_gib: int | None, *policies: HostPolicy, profiles: Profiles | None = None, **document: Any
) -> list[Preview]:
    """What a deployment would be on these hosts. `weights_gib` None: its files are not here."""

    def facts(_: Deployment) -> dict[str, Any] | None:
        return None if weights_gib is None else {**FACTS, "weight_bytes": weights_gib * GIB}

    made = parse_deployment({"name": "m", "engine": "engine", "model": "m", **document}, "m.yaml")
    sites = [
        Site(
            allowed=Allowed(host=policy.host, name=policy.name, policy=policy),
            policy=policy,
            profiles=profiles or Profiles(),
            request_deadline_ms=DEADLINE_MS,
            facts=facts,
            source="here",
        )
        for policy in policies
    ]
    return preview(made, sites)


def refusal(call: Any) -> CapyError:
    with pytest.raises(CapyError) as refused:
        call()
    return refused.value


@pytest.mark.parametrize(
    ("weights", "hosts", "document"),
    [
        (4, (card_host(BOX),), {}),
        (20, (card_host(BOX),), {}),
        (4, (unified_host(SPARK),), {"engine_config": {"context_length": 4096}}),
        (4, (unified_host(SPARK),), {"residency": "restart_only"}),
        (4, (no_gpu(BOX),), {"engine_config": {"memory": {"request": "24GiB"}}}),
        (4, (card_host(BOX), unified_host(SPARK)), {}),
        (4, (card_host(BOX),), {"resources": {"gpu": "12GiB", "ram": "2GiB"}, "timeouts": {"initialize": "99s"}}),
        (400, (card_host(BOX),), {}),
        (4, (unified_host(SPARK),), {"engine_config": {"memory": {"request": "5GiB"}}}),
        (30, (card_host(BOX),), {"residency": "host_backed"}),
        (4, (card_host(BOX),), {"instances": 3}),
        (4, (card_host(BOX),), {"instances": 9}),
        (4, (unified_host(SPARK),), {"instances": 4}),
        (4, (unified_host(SPARK),), {"instances": 40}),
        (4, (card_host(BOX), unified_host(SPARK)), {"instances": 40}),
        (30, (card_host(BOX), unified_host(SPARK)), {"instances": 2}),
        (4, (card_host(BOX), unified_host(SPARK)), {"engine_config": {"memory": {"request": "60GiB"}}}),
        (400, (card_host(BOX), unified_host(SPARK)), {}),
    ],
)
async def test_a_preview_is_what_measuring_comes_to(
    weights: int, hosts: tuple[HostPolicy, ...], document: dict[str, Any]
) -> None:
    world, outcome = await measured(weights, *hosts, **document)
    if isinstance(outcome, events.RevisionUnusable):
        refused = refusal(lambda: previewed(weights, *hosts, **document))
        assert (refused.code, refused.message) == (outcome.code, outcome.reason)
        return
    assert isinstance(outcome, events.RevisionResolved)
    found = previewed(weights, *hosts, **document)
    spec = world.book.deployments[NAME].spec
    taking = [made for made in found if made.refused is None]
    assert {made.site.policy.host: made.plan for made in taking} == dict(outcome.plans)
    assert {made.residency for made in taking} == {spec.residency}
    assert spec.residency_reason in {made.residency_reason for made in taking}


async def test_what_measuring_refuses_a_preview_refuses_with_the_same_code() -> None:
    for document in ({"engine_config": {"memory": {"request": "5GiB"}}}, {"residency": "deep"}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(FACTS, "model_type", "gpt_oss")
            _, outcome = await measured(4, unified_host(SPARK), **document)
            assert isinstance(outcome, events.RevisionUnusable)
            found = refusal(lambda: previewed(4, unified_host(SPARK), **document))  # noqa: B023
            assert (found.code, found.message) == (outcome.code, outcome.reason)


def test_what_a_role_refuses_at_once_a_preview_refuses_too() -> None:
    opted_out = {"residency": "deep", "profiles": Profiles("disabled")}
    assert refusal(lambda: previewed(4, card_host(BOX), **opted_out)).code == "capability_missing:deep_park"
    late = refusal(lambda: previewed(4, card_host(BOX), request_deadline="3599s"))
    assert f"the host's bound is {DEADLINE_MS // 1000}s" in late.message


def test_files_that_are_not_here_leave_memory_and_context_open() -> None:
    (made,) = previewed(None, card_host(BOX))
    assert (made.facts, made.plan, made.residency, made.residency_reason) == (None, None, None, "")
    (known,) = previewed(None, card_host(BOX), profiles=Profiles("disabled"))
    assert known.spec.residency.value == "restart_only"
    assert known.residency_reason.startswith("this host opted out")


def test_a_tier_that_has_no_room_is_no_refusal_of_the_deployment() -> None:
    (small,) = previewed(4, card_host(BOX))
    assert small.residency_reason.startswith("a copy of the weights fits into RAM: with the engine it needs 10.0 GiB")
    (large,) = previewed(30, card_host(BOX))
    assert large.residency_reason == (
        "no copy of the weights is kept in RAM: with the engine it would need 49.0 GiB of system on box, "
        "and 32.0 GiB may be parked there"
    )


def test_a_host_that_cannot_take_it_is_shown_with_its_reason_beside_one_that_can() -> None:
    request = {"engine_config": {"memory": {"request": "60GiB"}}}
    box, spark = previewed(4, card_host(BOX), unified_host(SPARK), **request)
    assert spark.plan is not None
    assert box.plan is None
    assert box.refused is not None
    assert box.refused.code == "insufficient_device_memory"
    assert previewed(4, unified_host(SPARK), instances=1, **request)[0].refused is None
    assert refusal(lambda: previewed(4, unified_host(SPARK), instances=2, **request)).code == "insufficient_resources"


@pytest.mark.parametrize("whole", [True, False])
def test_cards_that_do_not_answer_are_no_fault_of_a_document(
    whole: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A role that knows the card from before would take the document, so it is not refused here."""

    def here(_: object) -> Site:
        if whole:
            raise Refusal("topology_unknown", "no card of this machine answers (card 0: GPU is lost)")
        policy = card_host(BOX)
        return Site(
            allowed=Allowed(host=policy.host, name=policy.name, policy=policy),
            policy=policy,
            profiles=Profiles(),
            request_deadline_ms=DEADLINE_MS,
            facts=lambda _: None,
            source="this machine",
            silent=("card 1: GPU is lost",),
        )

    monkeypatch.setattr(validate, "_settings", lambda _: object())
    monkeypatch.setattr(validate, "_may_have_engines", lambda _: True)
    monkeypatch.setattr(sites, "this_machine", here)
    file = tmp_path / "m.yaml"
    file.write_text("name: m\nengine: engine\nmodel: m\nhost: box\ndevices: [{id: gpu1}]\n")
    validate.config(str(file))
    said = capsys.readouterr().out
    assert "m.yaml is a valid deployment document" in said
    assert "GPU is lost" in said.partition("Not checked")[2]
    assert whole or "with the cards that answer: box does not have the device gpu1" in said
    file.write_text("name: m\nengine: engine\nmodel: m\nhost: box\nrequest_deadline: 3599s\n")
    if not whole:
        with pytest.raises(CapyError, match="the host's bound is"):
            validate.config(str(file))


def test_only_the_hosts_that_placement_names_are_previewed() -> None:
    found = previewed(4, card_host(BOX), unified_host(SPARK), placement={"hosts": ["spark"]})
    assert [made.site.allowed.name for made in found] == ["spark"]
