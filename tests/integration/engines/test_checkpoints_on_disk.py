"""Model directories as people and attackers leave them: what is listed, picked, digested and remembered."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from capyctl.checkpoints import digest as digests
from capyctl.checkpoints.digest import StatCache, digest_listing
from capyctl.checkpoints.directory import check_root, list_files, pick_gguf, resolve_model
from capyctl.checkpoints.facts import gguf_facts
from capyctl.checkpoints.store import CheckpointStore
from capyctl.errors import CapyError, Refusal

from .tiny_gguf import write_tiny


def code_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CapyError) as caught:
        call(*args, **kwargs)
    assert "\n" not in caught.value.message
    return caught.value.code


def fill(directory: Path, *names: str) -> Path:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return directory


def document(**llamacpp: str) -> dict[str, Any]:
    config = {"llamacpp": llamacpp} if llamacpp else {}
    return {"name": "m", "engine": "llamacpp", "model": "m", "engine_config": config}


# --- finding and listing ---------------------------------------------------------------------------


def test_relative_models_are_below_the_models_directory(tmp_path: Path) -> None:
    fill(tmp_path / "a", "x.gguf")
    assert resolve_model("a", tmp_path) == tmp_path / "a"
    assert resolve_model(str(tmp_path / "a"), None) == tmp_path / "a"
    for bad in ("../a", "a/../../etc", "", "~/a", "none", "a/x.gguf", "a\0"):
        assert code_of(resolve_model, bad, tmp_path) == "invalid_root"
    assert code_of(resolve_model, "a", None) == "invalid_root"


@pytest.mark.parametrize(
    ("model", "way"),
    [
        ("smolm2", r'is not there\. Did you mean "smollm2"\?$'),
        ("deep/qwem", r'is not there\. Did you mean "deep/qwen"\?$'),
        ("{root}/smolm2", r'is not there\. Did you mean "/\S+/smollm2"\?$'),
        ("nothing-like-it", r"is not there$"),
        ("nowhere/smollm2", r"is not there$"),
        ("smollm2/x.gguf", r"model: smollm2, and in engine_config\.llamacpp\.gguf_file: x\.gguf$"),
        ("{root}/smollm2/x.gguf", r"model: /\S+/smollm2, and in engine_config\.llamacpp\.gguf_file: x\.gguf$"),
        ("deep/qwen/config.json", r"is not a directory\. Name the directory that holds it, model: deep/qwen$"),
        ("loose.gguf", r"Put the file into a directory of its own and name that$"),
    ],
)
def test_a_model_that_is_no_directory_is_refused_with_what_to_name(tmp_path: Path, model: str, way: str) -> None:
    fill(tmp_path, "loose.gguf", "smollm2/x.gguf", "deep/qwen/config.json")
    with pytest.raises(Refusal, match=way):
        resolve_model(model.format(root=tmp_path), tmp_path)


def test_files_are_listed_with_their_relative_paths(tmp_path: Path) -> None:
    fill(tmp_path / "m", "b.gguf", "sub/a.txt", ".hidden")
    assert [file.path for file in list_files(tmp_path / "m").files] == [".hidden", "b.gguf", "sub/a.txt"]


def test_links_inside_the_root_are_followed_up_to_eight_hops(tmp_path: Path) -> None:
    fill(tmp_path / "m", "hop0")
    for number in range(1, 10):
        (tmp_path / "m" / f"hop{number}").symlink_to(f"hop{number - 1}")
    (tmp_path / "m" / "hop9").unlink()
    listing = list_files(tmp_path / "m")
    assert {file.real.name for file in listing.files} == {"hop0"}
    (tmp_path / "m" / "hop9").symlink_to("hop8")
    assert code_of(list_files, tmp_path / "m") == "unsafe_file"


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "nowhere", ".", "loop"])
def test_links_that_leave_or_lead_nowhere_are_refused(tmp_path: Path, target: str) -> None:
    fill(tmp_path, "outside", "m/x.gguf")
    (tmp_path / "m" / "loop").symlink_to(target)
    assert code_of(list_files, tmp_path / "m") in ("unsafe_file", "invalid_root")


def test_a_link_may_reach_another_model_of_the_same_store_but_not_beyond(tmp_path: Path) -> None:
    store = tmp_path / "store"
    fill(store, "shared/w.gguf", "m/readme")
    fill(tmp_path, "outside")
    (store / "m" / "w.gguf").symlink_to("../shared/w.gguf")
    assert code_of(list_files, store / "m") == "unsafe_file"
    assert list_files(store / "m", store).find("w.gguf") is not None
    (store / "m" / "out").symlink_to("../../outside")
    assert code_of(list_files, store / "m", store) == "unsafe_file"


def test_a_snapshot_of_a_hub_cache_works(tmp_path: Path) -> None:
    repo = tmp_path / "models--owner--name"
    fill(repo, "blobs/0123")
    snapshot = repo / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "w.gguf").symlink_to("../../blobs/0123")
    assert [file.path for file in list_files(snapshot).files] == ["w.gguf"]
    (snapshot / "x.gguf").symlink_to("../../../elsewhere")
    assert code_of(list_files, snapshot) == "unsafe_file"


def test_fifos_sockets_and_directory_links_are_refused_without_opening_them(tmp_path: Path) -> None:
    fill(tmp_path / "m", "x.gguf", "sub/y")
    os.mkfifo(tmp_path / "m" / "pipe")
    assert code_of(list_files, tmp_path / "m") == "unsafe_file"
    (tmp_path / "m" / "pipe").unlink()
    (tmp_path / "m" / "link").symlink_to("sub")
    assert code_of(list_files, tmp_path / "m") == "unsafe_file"


def test_a_directory_that_everyone_may_write_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    model = fill(tmp_path / "open" / "m", "x.gguf", "sub/y")
    (tmp_path / "open").chmod(0o777)
    assert code_of(list_files, model) == "invalid_root"
    (tmp_path / "open").chmod(0o755)
    list_files(model)
    (model / "sub").chmod(0o777)
    assert code_of(list_files, model) == "invalid_root"
    (model / "sub").chmod(0o755)
    model.chmod(0o1777)
    assert code_of(list_files, model) == "invalid_root"


def test_a_sticky_ancestor_of_root_is_fine() -> None:
    place = Path("/tmp")
    if not (place.stat().st_mode & stat.S_ISVTX and place.stat().st_uid == 0):
        pytest.skip("this machine's temporary directory is not root's")
    child = place / f"capyctl-sticky-{os.getpid()}"
    child.mkdir(mode=0o755)
    try:
        check_root(child)
    finally:
        child.rmdir()


def test_a_name_that_cannot_be_printed_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "m", "x.gguf", "evil\x1b[2Jname")
    assert code_of(list_files, tmp_path / "m") == "unsafe_file"


# --- picking ---------------------------------------------------------------------------------------


def picked(directory: Path, *names: str, gguf_file: str | None = None, mmproj_file: str | None = None) -> Any:
    return pick_gguf(list_files(fill(directory, *names)), gguf_file, mmproj_file)


def test_the_only_model_file_is_picked_with_its_projector(tmp_path: Path) -> None:
    pick = picked(tmp_path, "m.gguf", "mmproj-m.gguf", "README.md")
    assert (pick.model, pick.shards, pick.projector) == ("m.gguf", ("m.gguf",), "mmproj-m.gguf")


def test_a_complete_set_of_shards_is_picked_by_its_first(tmp_path: Path) -> None:
    names = [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    pick = picked(tmp_path, *names)
    assert pick.model == names[0]
    assert pick.weights == tuple(names)
    (tmp_path / names[1]).unlink()
    assert code_of(picked, tmp_path) == "checkpoint_unusable"


def test_several_candidates_need_a_name(tmp_path: Path) -> None:
    assert code_of(picked, tmp_path, "a.gguf", "b.gguf") == "checkpoint_unusable"
    assert picked(tmp_path, gguf_file="b.gguf").model == "b.gguf"
    assert code_of(picked, tmp_path, gguf_file="c.gguf") == "checkpoint_unusable"
    assert code_of(picked, tmp_path, "mmproj-1.gguf", "mmproj-2.gguf", gguf_file="a.gguf") == "checkpoint_unusable"
    assert picked(tmp_path, gguf_file="a.gguf", mmproj_file="mmproj-2.gguf").projector == "mmproj-2.gguf"
    assert code_of(picked, tmp_path, gguf_file="a.gguf", mmproj_file="none.gguf") == "checkpoint_unusable"


def test_a_file_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"nope\.gguf is not a \.gguf file of \S+, which holds a\.gguf, b\.gguf$"):
        picked(tmp_path, "a.gguf", "b.gguf", "README.md", gguf_file="nope.gguf")
    with pytest.raises(Refusal, match=r"which holds b\.gguf$"):
        picked(tmp_path, gguf_file="a.gguf", mmproj_file="nope.gguf")


def test_directories_without_a_model_say_so(tmp_path: Path) -> None:
    assert code_of(picked, tmp_path / "1", "README.md") == "checkpoint_unusable"
    assert code_of(picked, tmp_path / "2", "mmproj-m.gguf") == "checkpoint_unusable"
    assert code_of(picked, tmp_path / "3", "m-00002-of-00002.gguf") == "checkpoint_unusable"
    both = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    assert code_of(picked, tmp_path / "4", *both, gguf_file=both[1]) == "checkpoint_unusable"


# --- facts -----------------------------------------------------------------------------------------


def facts_of(directory: Path) -> dict[str, Any]:
    listing = list_files(directory)
    return json.loads(json.dumps(gguf_facts(listing, pick_gguf(listing))))


def test_facts_of_a_plain_model(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    facts = facts_of(tmp_path)
    assert (facts["architecture"], facts["context_trained"], facts["layers"]) == ("llama", 2048, 2)
    assert (facts["kv_heads"], facts["key_length"], facts["value_length"]) == ([2, 2], 16, 16)
    assert facts["not_derivable"] is None
    assert facts["weight_bytes"] == path.stat().st_size > facts["tensor_bytes"] > 0


@pytest.mark.parametrize(
    ("architecture", "numbers", "words"),
    [
        ("llama", {"attention__sliding_window": 512}, "sliding"),
        ("llama", {"attention__key_length_mla": 192}, "MLA"),
        ("llama", {"ssm__conv_kernel": 4}, "recurrent"),
        ("mamba", {}, "recurrent"),
        ("bert", {}, "encoder"),
        ("llama", {"pooling_type": 1}, "encoder"),
        ("dream", {}, "diffusion"),
        ("llama", {"attention__indexer__head_count": 2}, "indexer"),
        ("llama", {"attention__head_count_kv": 0}, "incomplete"),
        ("llama", {"block_count": 5000}, "incomplete"),
    ],
)
def test_models_that_the_formula_does_not_describe_say_why(
    tmp_path: Path, architecture: str, numbers: dict[str, int], words: str
) -> None:
    write_tiny(tmp_path / "m.gguf", architecture=architecture, **numbers)
    assert words in facts_of(tmp_path)["not_derivable"]


def test_shared_and_extra_prediction_layers_are_counted_out(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m.gguf", block_count=10, nextn_predict_layers=1, attention__shared_kv_layers=3)
    facts = facts_of(tmp_path)
    assert (facts["layers"], facts["kv_heads"]) == (6, [2] * 6)


def test_key_and_value_lengths_may_be_stated(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m.gguf", attention__key_length=96, attention__value_length=64)
    facts = facts_of(tmp_path)
    assert (facts["key_length"], facts["value_length"]) == (96, 64)


def test_a_download_that_stopped_is_refused_by_its_name(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(Refusal, match=r"m\.gguf is incomplete"):
        facts_of(tmp_path)


def test_a_set_whose_shards_say_otherwise_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        write_tiny(tmp_path / f"m-{number:05}-of-00002.gguf")
    with pytest.raises(
        Refusal, match=r"of-00002\.gguf does not say which shard it is, and its name says 1 of 2"
    ) as caught:
        facts_of(tmp_path)
    assert caught.value.code == "checkpoint_unusable"


def test_a_draft_model_of_llama_cpp_is_charged_with_its_shards(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    write_tiny(tmp_path / "m" / "m.gguf")
    (tmp_path / "d").mkdir()
    draft = tmp_path / "d" / "d.gguf"
    store = CheckpointStore(None, tmp_path)

    def measured(*args: str) -> Any:
        config = {"accept_extra_args": True, "extra_args": list(args)}
        return store.measure(tmp_path / "m", document() | {"engine_config": config}).facts

    assert code_of(measured, "--model-draft", str(draft)) == "checkpoint_unusable"
    write_tiny(draft)
    assert measured("-md", str(draft))["draft"]["weight_bytes"] == draft.stat().st_size
    assert measured("--model-draft", "none")["weight_bytes"] == measured()["weight_bytes"]
    assert "draft" not in measured()


# --- digest ----------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of more than 8 bytes count as large."""
    monkeypatch.setattr(digests, "SMALL_FILE_BYTES", 8)


def test_the_digest_covers_names_and_contents_and_nothing_else(tmp_path: Path) -> None:
    model = fill(tmp_path / "m", "a.gguf", "sub/b")

    def now() -> str:
        return digest_listing(list_files(model), StatCache(None)).digest

    first = now()
    assert first.startswith("sha256:")
    assert len(first) == 71
    os.utime(model / "a.gguf", (1, 1))
    assert now() == first
    (model / "a.gguf").rename(model / "c.gguf")
    renamed = now()
    (model / "c.gguf").rename(model / "a.gguf")
    assert now() == first != renamed
    (model / "sub" / "b").write_text("B")
    changed = now()
    fill(model, "extra")
    assert len({first, renamed, changed, now()}) == 4


def test_unchanged_files_are_not_read_again(tmp_path: Path, small: None) -> None:
    model, cache_file = fill(tmp_path / "m", "large-file.gguf", "small"), tmp_path / "state" / "cache.json"
    first = digest_listing(list_files(model), StatCache(cache_file))
    assert first.read_bytes == 15 + 5
    again = digest_listing(list_files(model), StatCache(cache_file))
    assert (again.digest, again.read_bytes) == (first.digest, 5)
    full = digest_listing(list_files(model), StatCache(cache_file), trust_cache=False)
    assert (full.digest, full.read_bytes) == (first.digest, 20)
    assert cache_file.stat().st_mode & 0o777 == 0o600


def test_a_swapped_file_is_found_even_with_its_old_size_and_time(tmp_path: Path, small: None) -> None:
    model = fill(tmp_path / "m", "large-file.gguf")
    cache = StatCache(None)
    before = digest_listing(list_files(model), cache).digest
    status = (model / "large-file.gguf").stat()
    (model / "large-file.gguf").write_bytes(b"large-FILE.gguf")
    os.utime(model / "large-file.gguf", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest_listing(list_files(model), cache).digest != before


def test_a_cache_that_others_could_write_or_that_is_broken_is_not_believed(tmp_path: Path, small: None) -> None:
    model, cache_file = fill(tmp_path / "m", "large-file.gguf"), tmp_path / "cache.json"
    digest_listing(list_files(model), StatCache(cache_file))
    cache_file.chmod(0o666)
    assert digest_listing(list_files(model), StatCache(cache_file)).read_bytes == 15
    for broken in ("", "[]", '{"a": 1}', '{"a": [[1, 2], "x"]}', "\0"):
        cache_file.chmod(0o600)
        cache_file.write_text(broken)
        assert digest_listing(list_files(model), StatCache(cache_file)).read_bytes == 15


def test_progress_is_told_in_bytes(tmp_path: Path) -> None:
    model = fill(tmp_path / "m", "aaaa", "bb", "empty")
    (model / "empty").write_bytes(b"")
    told: list[tuple[int, int]] = []
    digest_listing(list_files(model), StatCache(None), progress=lambda done, total: told.append((done, total)))
    assert told == [(0, 6), (4, 6), (6, 6)]


def test_names_that_lead_to_one_file_are_read_once(tmp_path: Path, small: None) -> None:
    repo = tmp_path / "models--owner--name"
    fill(repo, "blobs/0123456789")
    snapshot = repo / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    for name in ("a.safetensors", "b.safetensors"):
        (snapshot / name).symlink_to("../../blobs/0123456789")
    os.link(repo / "blobs/0123456789", snapshot / "c.safetensors")
    cache = StatCache(None)
    told: list[tuple[int, int]] = []
    first = digest_listing(list_files(snapshot), cache, progress=lambda done, total: told.append((done, total)))
    assert (first.read_bytes, told) == (16, [(0, 16), (16, 16)])
    again = digest_listing(list_files(snapshot), cache)
    assert (again.digest, again.read_bytes) == (first.digest, 0)
    plain = fill(tmp_path / "m", "a.safetensors")
    for name in ("a", "b", "c"):
        (plain / f"{name}.safetensors").write_bytes(b"blobs/0123456789")
    assert digest_listing(list_files(plain), StatCache(None)).digest == first.digest


def test_a_link_of_the_hub_to_nothing_or_in_a_circle_is_refused_by_its_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    with pytest.raises(Refusal, match=r"model\.safetensors is a link to a file") as caught:
        list_files(snapshot)
    assert caught.value.code == "unsafe_file"
    (snapshot / "model.safetensors").unlink()
    for one, other in (("a", "b"), ("b", "a")):
        (snapshot / one).symlink_to(other)
    assert code_of(list_files, snapshot) == "unsafe_file"


def test_a_cache_of_the_hub_itself_is_no_model_and_its_snapshot_is_named(tmp_path: Path) -> None:
    repo = fill(tmp_path / "models--owner--name", "blobs/0123", "refs/main")
    snapshot = repo / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/0123")
    with pytest.raises(Refusal, match="name snapshots/c0ffee in it"):
        CheckpointStore(None, None).measure(repo, {"name": "m", "engine": "vllm", "model": "m"})


def test_a_file_that_changes_after_it_was_listed_is_a_mismatch(tmp_path: Path) -> None:
    model = fill(tmp_path / "m", "x.gguf")
    listing = list_files(model)
    (model / "x.gguf").write_text("other and longer")
    assert code_of(digest_listing, listing, StatCache(None)) == "checkpoint_mismatch"


def test_the_store_measures_and_verifies(tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    write_tiny(model / "m.gguf")
    store = CheckpointStore(tmp_path / "cache.json", tmp_path, lambda profile: ["--threads", profile])
    measured = store.measure(store.resolve("m"), document())
    assert measured.facts["host_args"] == ["--threads", "llamacpp"]
    store.verify(model, measured.digest)
    fill(model, "config.json")
    assert code_of(store.verify, model, measured.digest) == "checkpoint_mismatch"


def test_a_file_that_gets_a_second_name_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    """Another model may be a link to it, or a backup: its status changes, and what it holds does not."""
    model = fill(tmp_path / "m", "config.json", "other.gguf")
    write_tiny(model / "a.gguf")
    names = iter(f"second-{number}" for number in range(100))
    read: list[int] = []
    budget = 1

    def meddle(done: int, total: int) -> None:
        read.append(done)
        nonlocal budget
        if done and budget:
            budget -= 1
            os.link(model / "a.gguf", tmp_path / next(names))

    store = CheckpointStore(None, tmp_path)
    chosen = document(gguf_file="a.gguf")
    measured = store.measure(model, chosen, meddle)
    assert budget == 0
    assert measured == CheckpointStore(None, tmp_path).measure(model, chosen)
    assert read.count(0) == 2, "it was begun twice"
    os.link(model / "a.gguf", tmp_path / next(names))
    budget = 1
    store.verify(model, measured.digest, meddle)
    assert budget == 0
    budget = 100
    assert code_of(CheckpointStore(None, tmp_path).measure, model, chosen, meddle) == "checkpoint_mismatch"
    assert budget == 95, "not for ever"


def test_an_expected_digest_is_compared(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m.gguf")
    store = CheckpointStore(None, None)
    digest = store.measure(tmp_path, document()).digest
    model = {"path": "m", "content_fingerprint": digest}
    assert store.measure(tmp_path, document() | {"model": model}).digest == digest
    model["content_fingerprint"] = "sha256:" + "0" * 64
    assert code_of(store.measure, tmp_path, document() | {"model": model}) == "checkpoint_mismatch"
