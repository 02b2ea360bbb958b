"""The grammar of extra arguments and variables: what CapyCTL owns cannot be said, however it is spelled."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capyctl.engines.environment import check_approved_env, check_deployment_env, check_env
from capyctl.engines.llamacpp.options import POLICY, RESERVED_ENV
from capyctl.engines.options import (
    Consent,
    OptionClass,
    check_approved_options,
    check_extra_args,
    check_fixed_args,
    check_real_paths,
    mentions,
    value_of,
)
from capyctl.errors import Refusal

ALL = Consent(options=frozenset(POLICY.by_name), paths=("/srv/approved",))
OWNED = sorted(
    name
    for rule in POLICY.rules
    if rule.kind in (OptionClass.RESERVED, OptionClass.TYPED)
    for name in rule.names
    if name.startswith("--")
)
GATED = sorted(
    name for rule in POLICY.rules if rule.kind is OptionClass.APPROVAL for name in rule.names if name.startswith("--")
)


def refused(args: list[str], consent: Consent = ALL, fixed: tuple[str, ...] = ()) -> str:
    with pytest.raises(Refusal) as caught:
        check_extra_args(POLICY, args, consent, fixed)
    assert caught.value.code == "invalid_config"
    assert "\n" not in caught.value.message
    return caught.value.message


def accepted(*args: str, consent: Consent = ALL, fixed: tuple[str, ...] = ()) -> None:
    check_extra_args(POLICY, args, consent, fixed)


@given(st.sampled_from(OWNED), st.data())
@settings(derandomize=True, max_examples=300)
def test_an_owned_option_is_refused_in_every_spelling(name: str, data: st.DataObject) -> None:
    spelled = "--" + "".join(data.draw(st.sampled_from("-_")) if char == "-" else char for char in name[2:])
    before = data.draw(st.sampled_from(([], ["--temp", "0.5"], ["--no-warmup"])))
    after = data.draw(st.sampled_from(([], ["x"], ["0"])))
    assert name in refused([*before, spelled, *after])
    refused([*before, f"{spelled}=x"])
    with pytest.raises(Refusal):
        check_fixed_args(POLICY, [*before, spelled, *after])
    with pytest.raises(Refusal):
        check_approved_options(POLICY, [spelled])


@given(st.sampled_from(GATED))
@settings(derandomize=True)
def test_a_gated_option_needs_its_approval_and_an_approved_path(name: str) -> None:
    path = "/srv/approved/file"
    assert "approval" in refused([name, path], Consent(paths=("/srv/approved",)))
    accepted(name, path)
    accepted(name, path, consent=Consent(options=frozenset(POLICY.rule(name).names[-1:]), paths=("/srv/approved",)))
    for outside in ("/srv/approvedX/file", "/srv/approved/../other", "relative", "/etc/passwd"):
        assert "outside" in refused([name, outside])


@given(st.text(st.sampled_from("abcdefghijklmnop-"), min_size=3, max_size=12))
@settings(derandomize=True)
def test_an_option_that_nobody_lists_passes_unless_its_name_says_file(stem: str) -> None:
    name = "--" + stem.strip("-")
    assume(name not in POLICY.by_name and len(name) > 2)
    if name.endswith(POLICY.gated_suffixes):
        return
    accepted(name, "value", consent=Consent())
    for suffix in POLICY.gated_suffixes:
        assert "approval" in refused([name + suffix, "/x"], Consent())


def test_shapes_that_are_refused() -> None:
    assert "short option" in refused(["-t", "1"])
    assert "short option" in refused(["-c", "4096"])
    assert "follows no option" in refused(["stray"])
    assert "follows no option" in refused(["--temp", "0.5", "stray"])
    assert "given twice" in refused(["--temp", "1", "--temp", "2"])
    assert "given twice" in refused(["--temp", "1", "--temperature", "2"])
    assert "given twice" in refused(["--warmup", "--no-warmup"])
    assert "not understood" in refused(["--temp=1"])
    assert "control characters" in refused(["--temp", "1\n--host"])
    assert "1 to" in refused([""])
    assert "name" in refused(["---temp"])
    refused(["@file"])
    refused(["--temp"] * 300)


def test_values_that_look_like_options_by_their_sign_are_values() -> None:
    accepted("--seed", "-1", "--rope-freq-scale", "-.5")
    accepted("--control-vector-layer-range", "1", "8")
    assert "follows no option" in refused(["--control-vector-layer-range", "1", "8", "9"])


def test_a_scaled_path_is_still_a_path() -> None:
    accepted("--lora-scaled", "/srv/approved/a.gguf:0.5,/srv/approved/b.gguf")
    assert "/etc/b.gguf" in refused(["--lora-scaled", "/srv/approved/a.gguf:0.5,/etc/b.gguf:1"])


def test_a_profile_may_deny_extra_arguments_and_fixes_its_own() -> None:
    assert "does not allow" in refused(["--temp", "1"], Consent(extra_args=False))
    accepted(consent=Consent(extra_args=False))
    assert "profile fixes it" in refused(["--threads", "2"], fixed=("-t", "1"))


def test_a_host_may_pass_short_and_gated_options_but_not_what_is_owned() -> None:
    check_fixed_args(POLICY, ["-t", "1", "--lora", "/x/lora.gguf", "--no-warmup"])
    for words in (["-c", "4096"], ["-np", "2"], ["-m", "x"], ["--port", "1"], ["-v"], ["stray"], ["--threads=1"]):
        with pytest.raises(Refusal):
            check_fixed_args(POLICY, words)


def test_no_approval_frees_what_is_owned() -> None:
    check_approved_options(POLICY, ["--lora", "--chat_template_file"])
    for option in ("--host", "--ctx-size", "-md", "lora", ""):
        with pytest.raises(Refusal):
            check_approved_options(POLICY, [option])


def test_a_link_out_of_an_approved_directory_is_found_before_a_launch(tmp_path: Path) -> None:
    approved, outside = tmp_path / "approved", tmp_path / "outside"
    approved.mkdir()
    outside.write_text("x")
    (approved / "good").write_text("x")
    (approved / "bad").symlink_to(outside)
    consent = Consent(options=frozenset({"--lora"}), paths=(str(approved),))
    check_real_paths(POLICY, ["--lora", str(approved / "good")], consent)
    with pytest.raises(Refusal, match="leads to"):
        check_real_paths(POLICY, ["--lora", str(approved / "bad")], consent)


def test_values_are_found_under_any_spelling() -> None:
    assert value_of(POLICY, ["-t", "3", "--threads", "4"], "--threads") == "4"
    assert value_of(POLICY, ["--no-warmup"], "--threads") is None
    assert mentions(POLICY, ["-nkvo"], "--no-kv-offload")


def test_every_spelling_belongs_to_one_rule() -> None:
    spellings = [name for rule in POLICY.rules for name in rule.names]
    assert len(spellings) == len(set(spellings))


# --- variables -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("LD_PRELOAD", "ld_preload", "PYTHONPATH", "PythonPath", "NCCL_DEBUG_FILE", "PATH", "CAPYCTL_X", "HOME"),
        *("LLAMA_API_KEY", "LLAMA_ARG_HOST", "XDG_CONFIG_HOME", "HF_TOKEN", "GGML_BACKEND_PATH", "DO_NOT_TRACK"),
    ],
)
def test_reserved_variables_are_refused_at_both_levels_in_any_case(name: str) -> None:
    for check in (
        lambda: check_env({name: "x"}, RESERVED_ENV, where="env"),
        lambda: check_deployment_env({name: "x"}, RESERVED_ENV, [name]),
    ):
        with pytest.raises(Refusal) as caught:
            check()
        assert caught.value.code == f"engine_env_reserved:{name}"
        assert caught.value.exit_code == 2


def test_deployment_variables_are_free_or_approved() -> None:
    check_deployment_env({"RUST_LOG": "x", "PYTHONUNBUFFERED": "1", "MAX_JOBS": "2"}, RESERVED_ENV, ())
    check_deployment_env(
        {"GGML_SCHED_DEBUG": "1", "OMP_WAIT_POLICY": "x"}, RESERVED_ENV, ["GGML_SCHED*", "OMP_WAIT_POLICY"]
    )
    with pytest.raises(Refusal) as caught:
        check_deployment_env({"OMP_NUM_THREADS": "1"}, RESERVED_ENV, ["OMP_WAIT*"])
    assert caught.value.code == "engine_env_not_approved:OMP_NUM_THREADS"


@pytest.mark.parametrize(
    "env", [{"A=B": "x"}, {"1A": "x"}, {"A": "x\ny"}, {"A": "x" * 4097}, {"": "x"}, {f"A{n}": "" for n in range(65)}]
)
def test_malformed_variables_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(Refusal) as caught:
        check_env(env, RESERVED_ENV, where="env")
    assert caught.value.code == "invalid_config"


@pytest.mark.parametrize(
    "pattern", ["*", "LD_*", "NCCL_*", "lower", "A*B", "", "PYTHON*", "LD_LIBRARY_*", "LLAMA_ARG_*"]
)
def test_approvals_of_nothing_but_reserved_names_are_refused(pattern: str) -> None:
    with pytest.raises(Refusal):
        check_approved_env([pattern], RESERVED_ENV)


def test_approvals_of_other_names_are_fine() -> None:
    check_approved_env(["OMP_*", "GGML_SCHED_DEBUG", "PYTHONUNBUFFERED"], RESERVED_ENV)
