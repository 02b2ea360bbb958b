"""Where models come from, as far as it is decided: places, files that are wanted, addresses, secrets, and the world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_world_stories import BIG, heard, world

from capyctl.checkpoints.directory import resolve_model
from capyctl.checkpoints.sources import Wanted, choose, fetched, place_of, placed, wanted_of
from capyctl.control import orders as o
from capyctl.control import views
from capyctl.documents.deployment import Deployment, parse_deployment
from capyctl.documents.model_source import Http, HuggingFace, Local, shown_url
from capyctl.documents.scalars import SecretRef, is_loopback_name
from capyctl.downloads.reach import Reach, is_public
from capyctl.downloads.tokens import Tokens
from capyctl.errors import CapyError, Refusal
from capyctl.fsm.types import DeploymentId, Millis

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB = {"hf": f"maker/tiny@{COMMIT}"}
TENSORS, GGUF, FILES = Wanted(kind="tensors"), Wanted(kind="gguf"), Wanted(kind="files")


def document(**more: Any) -> Deployment:
    return parse_deployment({"name": "m", "engine": "vllm", "model": HUB, **more}, "test")


# --- places ---------------------------------------------------------------------------------------------------


def test_the_place_of_a_download_follows_from_what_is_asked_for():
    (source, wanted) = fetched(document(), "vllm")[0]
    assert place_of(source, wanted) == f"sources/huggingface/maker/tiny/{COMMIT}/tensors"
    coded = wanted_of(document(engine_config={"trust_remote_code": True}), "sglang")
    named = wanted_of(document(engine="llamacpp", engine_config={"llamacpp": {"gguf_file": "q/a.gguf"}}), "llamacpp")
    places = {place_of(source, one) for one in (wanted, coded, named, GGUF, FILES, Wanted(kind="gguf", gguf_file="b"))}
    assert len(places) == 6, "another choice of files is another directory"


def test_the_place_of_a_file_behind_a_url_is_its_content_and_its_name():
    """Engines go by names: a corrected address must not find the file of the wrong one."""

    def place(url: str, sha256: str = "a" * 64) -> str:
        return place_of(Http(url=url, sha256=sha256), GGUF)

    assert place("https://x.example/v1/m.gguf?key=1") == f"sources/http/m.gguf-{'a' * 64}"
    assert place("https://x.example/v1/m.gguf") == place("https://mirror.example/m.gguf")
    secret = place_of(Http(url_ref=SecretRef("secret://m.gguf"), sha256="a" * 64), GGUF)
    names = ("m.gguf", "M.gguf", "m", "", "%2e%2e", "a%2fb", "a%00b", "-m.gguf", "%F0%9F%A6%AB.gguf", "_m.gguf")
    long = ["x" * 150, "x" * 151, "x" * 199 + "y", "x" * 200, "x" * 3000]
    places = [place(f"https://x.example/{name}") for name in (*names, *long)] + [secret, place("https://x/m", "b" * 64)]
    assert len(set(places)) == len(places)
    for one in places:
        assert Path(one).parent == Path("sources/http")
        assert one.isascii() and one.isprintable() and len(Path(one).name) <= 255  # noqa: PT018


def test_a_download_that_somebody_removed_is_refused_with_the_way_to_have_it_again(tmp_path: Path):
    here = placed(document(), "vllm", str(tmp_path)).model.source
    assert isinstance(here, Local)
    with pytest.raises(Refusal, match=r"is not there\. Deploy the model again to have it downloaded"):
        resolve_model(here.path, None)
    with pytest.raises(Refusal, match=r"is not there$"):
        resolve_model("chat", tmp_path)


def test_every_source_of_a_placed_document_is_a_directory_of_its_host():
    asked = document(model={**HUB, "draft": {"hf": f"maker/draft@{COMMIT}"}})
    assert [source.repo for source, _ in fetched(asked, "sglang") if isinstance(source, HuggingFace)] == [
        "maker/tiny",
        "maker/draft",
    ]
    found = placed(asked, "sglang", "/data/models/")
    root = "/data/models/sources/huggingface/maker"
    assert found.model.source == Local(path=f"{root}/tiny/{COMMIT}/tensors")
    assert found.model.draft == Local(path=f"{root}/draft/{COMMIT}/tensors")
    assert parse_deployment(found.canonical(), "again") == found.completed()
    assert not fetched(found, "sglang")
    here = document(model="here")
    assert placed(here, "vllm", "/data") == here


# --- files ----------------------------------------------------------------------------------------------------

REPO = [
    ".gitattributes", "README.md", "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model",
    "merges.txt", "chat_template.jinja", "additional_chat_templates/rag.jinja", "modeling_tiny.py",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    "consolidated.safetensors", "pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx",
    "onnx/config.json", "original/consolidated.00.pth",
]  # fmt: skip


def test_an_engine_of_tensors_is_given_weights_once_and_what_it_reads_beside_them():
    assert choose("r", REPO, TENSORS) == sorted(
        {
            *("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "merges.txt"),
            *("chat_template.jinja", "additional_chat_templates/rag.jinja"),
            *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"),
        }
    )
    assert "modeling_tiny.py" in choose("r", REPO, attrs.evolve(TENSORS, code=True))
    assert choose("r", ["consolidated.safetensors", "params.json"], TENSORS) == [
        "consolidated.safetensors",
        "params.json",
    ]


def test_a_sentence_transformer_keeps_its_inner_layers():
    names = ["modules.json", "config.json", "model.safetensors", "1_Pooling/config.json", "2_Dense/model.safetensors"]
    assert choose("r", [*names, "onnx/model.safetensors"], TENSORS) == sorted(names)


def test_a_custom_engine_is_given_all_but_pickles():
    assert set(choose("r", REPO, FILES)) == {
        name for name in REPO if name[0] != "." and not name.endswith((".bin", ".h5", ".msgpack", ".pth"))
    }


@given(names=st.lists(st.sampled_from([*REPO, "a.gguf", "b.gguf", "mmproj-a.gguf", "x.pkl", "y.pt"]), unique=True))
@settings(derandomize=True, max_examples=200, deadline=None)
def test_no_pickle_is_ever_chosen(names: list[str]):
    for wanted in (TENSORS, GGUF, FILES):
        try:
            chosen = choose("r", names, wanted)
        except Refusal:
            continue  # there is nothing to choose
        assert set(chosen) <= set(names)
        assert not [name for name in chosen if name.endswith((".bin", ".pt", ".pth", ".pkl", ".h5", ".msgpack"))]


def test_of_several_projectors_none_is_taken_unless_it_is_named():
    names = ["m.gguf", "mmproj-f16.gguf", "mmproj-f32.gguf"]
    assert choose("r", names, GGUF) == ["m.gguf"]
    assert choose("r", names, attrs.evolve(GGUF, mmproj_file="mmproj-f32.gguf")) == ["m.gguf", "mmproj-f32.gguf"]
    assert choose("r", names[:2], GGUF) == ["m.gguf", "mmproj-f16.gguf"]


# --- who may be reached -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.5.4", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.0.8", "192.88.99.1"),
        *("fec0::1", "3fff::1"),
        *("::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "fd00:ec2::254", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
        *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::"),
    ],
)  # fmt: skip
def test_an_address_that_is_not_the_internets_is_not_public(address: str):
    assert not is_public(address)
    reach = Reach(lookup=lambda host, port: [(2, (address, port))])
    with pytest.raises(Refusal, match=r"not a public address. If that is meant, add models\.example"):
        reach.addresses("models.example", 443)
    listed = attrs.evolve(reach, allowed_hosts=frozenset({"models.example"}))
    assert listed.addresses("Models.Example", 443) == [(2, (address, 443))]


def test_an_address_that_is_named_itself_is_said_once():
    reach = Reach(lookup=lambda host, port: [(2, (host, port))])
    with pytest.raises(Refusal, match=r"10\.0\.0\.1 is not a public address\. If that is meant, add 10\.0\.0\.1 to"):
        reach.addresses("10.0.0.1", 443)


@pytest.mark.parametrize(
    ("host", "ours"),
    [("localhost", True), ("127.0.0.9", True), ("::1", True), ("127.models.example", False), ("127.1", False)],
)
def test_only_this_machines_own_addresses_may_be_spoken_to_in_plain_text(host: str, ours: bool):
    assert is_loopback_name(host) is ours


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808"])
def test_a_public_address_is_reached_beside_a_private_one(address: str):
    found = [(2, ("10.0.0.1", 443)), (2, (address, 443))]
    assert Reach(lookup=lambda host, port: found).addresses("models.example", 443) == found[1:]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://models.example/a/b.gguf?key=secret#part", "https://models.example/a/b.gguf"),
        ("https://user:secret@models.example:8443/x", "https://models.example:8443/x"),
        ("http://[2001:db8::1]:80/x?secret", "http://[2001:db8::1]:80/x"),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret(url: str, says: str):
    assert shown_url(url) == says


# --- secrets ----------------------------------------------------------------------------------------------------


def test_the_sources_own_token_wins_over_the_environment_and_that_over_the_file(tmp_path: Path):
    for name in ("own", "default"):
        (tmp_path / name).write_text(f"hf_{name}\n")
        (tmp_path / name).chmod(0o600)
    tokens = Tokens(environ={"HF_TOKEN": "hf_env"}, token_file=str(tmp_path / "default"), secrets_dir=str(tmp_path))
    assert tokens.hub(SecretRef("secret://own")) == "hf_own"
    assert tokens.hub(None) == "hf_env"
    assert attrs.evolve(tokens, environ={"HF_TOKEN": "", "CAPYCTL_HF_TOKEN": "hf_ours"}).hub(None) == "hf_ours"
    assert attrs.evolve(tokens, environ={}).hub(None) == "hf_default"
    assert attrs.evolve(tokens, environ={}, token_file=None).hub(None) is None
    assert "hf_env" not in repr(tokens)


@pytest.mark.parametrize(("text", "mode"), [("hf_x", 0o644), ("", 0o600), ("two words", 0o600), ("hf_\u00e9", 0o600)])
def test_a_token_that_others_can_read_or_that_is_none_is_refused_without_being_shown(
    tmp_path: Path, text: str, mode: int
):
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(Refusal) as caught:
        Tokens(token_file=str(file), secrets_dir=str(tmp_path)).hub(None)
    assert (caught.value.code, str(file) in caught.value.message) == ("unauthorized", True)
    assert not text or text not in caught.value.message


def test_a_secret_that_is_not_there_is_named():
    with pytest.raises(CapyError, match="secret://lost: there is no file /nowhere/lost"):
        Tokens(secrets_dir="/nowhere").hub(SecretRef("secret://lost"))


# --- the world --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["unavailable", "insufficient_space", "unauthorized", "not_materializable"])
def test_a_model_that_could_not_be_fetched_is_tried_again_for_whoever_asks(code: str):
    here, (a,) = world(attrs.evolve(BIG, note=f"bad {code}"))
    told = here.ask("a").told
    assert told == ("checkpoint_unusable" if code == "unauthorized" else code), "its Hub's no is none to a client's key"
    here.run(10_000)
    here.models[a][1] = attrs.evolve(here.models[a][1], note="")
    here.ask("a")
    here.run(5_000)
    client = here.ask("a")
    here.run(20_000)
    assert client.told == "ok"


@pytest.mark.parametrize("code", ["not_found", "unauthorized", "checkpoint_mismatch"])
def test_a_start_that_a_source_refused_says_what_the_source_said(code: str):
    here, (a,) = world(attrs.evolve(BIG, note=f"bad {code}"))
    asked = here.start(a)
    here.run(100)
    told = here.reply(asked)
    row = here.world.book.deployments[a]
    assert row.state.gate_reason
    assert (told.code, told.message) == (code, f"{row.spec.name} cannot start: {row.state.gate_reason}")


def test_a_start_right_after_a_stop_goes_on_with_the_download():
    here, (a,) = world(attrs.evolve(BIG, note="bad deployment_stopped"))
    here.stop(a)
    here.run(5_000)
    measured = heard(here, o.Measure)
    here.models[a][1] = attrs.evolve(here.models[a][1], note="")
    here.run(100, until=lambda: not here.world.book.measuring)
    first = here.start(a)
    here.run(5_000)
    assert here.reply(first).code == "checkpoint_digest_pending"
    here.start(a)
    here.run(20_000)
    assert here.lane(a).gate_open
    assert len(measured) == 1


def test_a_stop_or_a_delete_calls_a_download_off_and_a_measured_model_is_left_alone():
    here, (a,) = world(BIG)
    called_off = heard(here, o.StopFetching)
    here.start(a)
    here.run(20_000)
    here.stop(a)
    here.run(60_000)
    assert not called_off
    b = here.deploy(attrs.evolve(BIG, name="b", note="bad deployment_stopped"))
    here.stop(b)
    here.run(5_000)
    assert [order.deployment for order in called_off] == [b]
    view = views.deployment(here.world, b, Millis(here.now))
    assert view is not None
    assert (view["observed_state"], view["checkpoint"]["code"]) == ("stopped", "deployment_stopped")
    here.delete(b)
    here.run(1_000)
    assert [order.deployment for order in called_off] == [b, b]
    assert DeploymentId(b) not in here.world.book.deployments
