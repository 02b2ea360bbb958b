"""vLLM's options: what CapyCTL owns cannot be said, abbreviated, negated, taken apart or renamed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capyctl.engines.environment import check_env
from capyctl.engines.options import (
    Consent,
    OptionClass,
    check_approved_options,
    check_extra_args,
    check_fixed_args,
    check_real_paths,
    flat_object,
)
from capyctl.engines.vllm.installation import owned_destinations
from capyctl.engines.vllm.options import POLICY, RESERVED_ENV
from capyctl.errors import Refusal

RECORDED = json.loads((Path(__file__).parents[1] / "engines" / "simulated" / "vllm_options.json").read_text())
ALL = Consent(options=frozenset(POLICY.by_name), paths=("/srv/approved",))
OWNED = sorted(
    name
    for rule in POLICY.rules
    if rule.kind in (OptionClass.RESERVED, OptionClass.TYPED)
    for name in rule.names
    if name.startswith("--")
)
PARSED = sorted(name for row in RECORDED["options"] for name in row["names"] if name.startswith("--"))


def refused(*args: str, consent: Consent = ALL, fixed: tuple[str, ...] = ()) -> str:
    with pytest.raises(Refusal) as caught:
        check_extra_args(POLICY, args, consent, fixed)
    assert caught.value.code == "invalid_config"
    assert "\n" not in caught.value.message
    return caught.value.message


def accepted(*args: str, consent: Consent = ALL, fixed: tuple[str, ...] = ()) -> None:
    check_extra_args(POLICY, args, consent, fixed)


@given(st.sampled_from(OWNED), st.data())
@settings(derandomize=True, max_examples=300)
def test_an_owned_option_is_refused_in_every_spelling_its_parser_reads(name: str, data: st.DataObject) -> None:
    spelled = "--" + "".join(data.draw(st.sampled_from("-_")) if char == "-" else char for char in name[2:])
    form = data.draw(st.sampled_from((spelled, f"{spelled}=1", f"{spelled}.key", f"{spelled}.key=1")))
    refused(form)
    refused("--seed", "1", form, "x")
    if not POLICY.rule(name).fixed:
        with pytest.raises(Refusal):
            check_fixed_args(POLICY, [form])
    with pytest.raises(Refusal):
        check_approved_options(POLICY, [spelled])


@given(st.sampled_from(PARSED), st.data())
@settings(derandomize=True, max_examples=500)
def test_no_abbreviation_that_the_parser_takes_for_an_owned_option_passes(name: str, data: st.DataObject) -> None:
    """argparse takes a prefix that fits one option alone; whatever it would take it for decides here."""
    short = name[: data.draw(st.integers(3, len(name)))]
    meant = [short] if short in PARSED else [spelling for spelling in PARSED if spelling.startswith(short)]
    owned = [spelling for spelling in meant if POLICY.rule(spelling).kind in (OptionClass.RESERVED, OptionClass.TYPED)]
    gated = [spelling for spelling in meant if POLICY.rule(spelling).kind is OptionClass.APPROVAL]
    if owned:
        refused(short)
    elif gated:
        refused(short, consent=Consent())


def test_every_option_of_the_parser_has_a_class_and_as_many_values() -> None:
    for row in RECORDED["options"]:
        for name in row["names"]:
            if not name.startswith("--"):
                continue
            assert name in POLICY.by_name, name
            values = 256 if row.get("nargs") == "+" else 1 if row["kind"] in ("value", "append") else 0
            assert POLICY.by_name[name].values == values, name


def test_an_alias_and_a_negation_are_the_option_itself() -> None:
    assert "memory follows the ledger" in refused("--device-memory-utilization", "0.9")
    assert "CapyCTL decides what sleeps" in refused("--no-enable-sleep-mode")
    assert "the engine profile fixes it" in refused("--no-enable-lora", fixed=("--enable-lora",))
    assert "given twice" in refused("--seed", "1", "--seed=2")


def test_a_switch_takes_no_word_that_could_become_the_model() -> None:
    assert "follows no option" in refused("--enable-chunked-prefill", "/srv/other-model")
    accepted("--cudagraph-capture-sizes", "1", "2", "4")


@pytest.mark.parametrize("word", ["-n2", "-n=2", "-n", "-r0", "-qfp8", "-as", "-as=2", "-dpr", "-tp=2", "-t"])
def test_a_short_option_of_ours_is_refused_abbreviated_and_with_its_value_attached(word: str) -> None:
    with pytest.raises(Refusal) as caught:
        check_fixed_args(POLICY, ["--seed", "1", word])
    assert caught.value.code == "invalid_config"
    refused(word)


def test_a_part_of_a_json_option_is_as_gated_as_the_whole() -> None:
    accepted("--compilation-config.mode", "3", "--compilation-config.backend", "eager")
    refused("--compilation-config.mode", "3", consent=Consent())
    assert "given twice" in refused("--compilation-config.mode", "3", "--compilation-config.mode", "2")
    assert "one JSON object" in refused("--speculative-config.model", "/etc")


GOOD = '{"method":"eagle","model":"/srv/approved/draft","num_speculative_tokens":3}'


def test_the_speculative_configuration_is_admitted_key_by_key() -> None:
    accepted("--speculative-config", GOOD)
    accepted("--speculative-config=" + GOOD)
    assert "needs the host's approval" in refused("--speculative-config", GOOD, consent=Consent())
    for text, said in (
        ('{"method":"eagle","worker_cls":"x.Y"}', "worker_cls"),
        ('{"model":"/etc/draft"}', "outside the profile's security.approved_paths"),
        ('{"model":"draft"}', "outside the profile's security.approved_paths"),
        ('{"model":"/srv/approved/../../etc"}', "outside the profile's security.approved_paths"),
        ('{"model":7}', "model: expected a path"),
        ('{"method":{"a":1}}', "flat JSON object"),
        ('{"method":null}', "flat JSON object"),
        ('{"method":"a","method":"b"}', "flat JSON object"),
        ('["method"]', "flat JSON object"),
        ('[["method","ngram"]]', "flat JSON object"),
        ("/srv/approved/spec.json", "flat JSON object"),
        ("NaN", "flat JSON object"),
    ):
        assert said in refused("--speculative-config", text), text


@given(st.text(alphabet='{}[]":,ab1 \\ntruefalse', max_size=40))
@settings(derandomize=True, max_examples=300)
def test_a_flat_object_is_flat_whatever_the_text(text: str) -> None:
    found = flat_object(text)
    assert found is None or all(isinstance(value, str | int | float | bool) for value in found.values())


def test_a_draft_behind_a_link_is_looked_at_again(tmp_path: Path) -> None:
    approved, outside = tmp_path / "approved", tmp_path / "outside"
    approved.mkdir()
    outside.mkdir()
    (approved / "draft").symlink_to(outside)
    consent = Consent(options=frozenset({"--speculative-config"}), paths=(str(approved),))
    args = ["--speculative-config", json.dumps({"method": "eagle", "model": str(approved / "draft")})]
    check_extra_args(POLICY, args, consent)
    with pytest.raises(Refusal, match="leads to"):
        check_real_paths(POLICY, args, consent)


def test_a_profile_may_fix_how_many_run_at_once_and_no_other_field() -> None:
    check_fixed_args(POLICY, ["--max-num-seqs", "64", "--reasoning-parser", "qwen3"])
    for args in (["--max-model-len", "1"], ["--dtype", "half"], ["--max-num-batched", "1"]):
        with pytest.raises(Refusal):
            check_fixed_args(POLICY, args)
    assert "the engine profile fixes it" in refused("--reasoning-parser", "x", fixed=("--reasoning-parser", "qwen3"))


@pytest.mark.parametrize(
    "name",
    ["VLLM_API_KEY", "vllm_plugins", "VLLM_SERVER_DEV_MODE", "VLLM_USE_RUST_FRONTEND", "LMCACHE_CONFIG_FILE", "PATH"],
)
def test_owned_variables_are_refused(name: str) -> None:
    with pytest.raises(Refusal) as caught:
        check_env({name: "1"}, RESERVED_ENV, where="env")
    assert caught.value.code == f"engine_env_reserved:{name}"
    check_env({"VLLM_ATTENTION_BACKEND": "FLASH_ATTN"}, RESERVED_ENV, where="env")


def test_the_entry_compares_every_owned_destination_that_the_parser_defines() -> None:
    names, defined = owned_destinations(), {row["dest"] for row in RECORDED["options"]}
    assert set(names["always"]) <= defined
    assert {"model", "model_tag", "host", "port", "gpu_memory_utilization", "middleware", "api_key"} <= {
        *names["always"],
        *names["if_present"],
    }
    for rule in POLICY.rules:
        if rule.kind is OptionClass.RESERVED:
            long = [name[2:].replace("-", "_") for name in rule.names if name.startswith("--")]
            assert set(long) & {*names["always"], *names["if_present"]}, rule.names
