"""Fetching from a Hub on loopback, with everything that servers and networks do. What lies on the disk afterwards."""

from __future__ import annotations

import gzip
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from capyctl.checkpoints.digest import StatCache, digest_listing
from capyctl.checkpoints.directory import list_files
from capyctl.checkpoints.sources import Wanted
from capyctl.documents.model_source import Http, HuggingFace
from capyctl.documents.scalars import SecretRef
from capyctl.downloads.door import Door, Line, Stopped
from capyctl.downloads.fetch import Fetcher
from capyctl.downloads.listing import Asking
from capyctl.downloads.part import Patience, Progress
from capyctl.downloads.reach import Found, Reach, look_up
from capyctl.downloads.room import Room
from capyctl.downloads.tokens import Tokens
from capyctl.errors import CapyError, Failure, Refusal
from tests.hub.hub import COMMIT, Fault, Hub, blob, running, sha256

REPO = "maker/tiny"
WEIGHTS = os.urandom(300_000)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}" * 200,
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickled",
    "README.md": b"# tiny",
    ".gitattributes": b"*",
}
NEEDED = {"config.json", "tokenizer.json", "model.safetensors"}
TENSORS = Wanted(kind="tensors")
SOURCE = HuggingFace(repo=REPO, revision=COMMIT)
TOKEN = "hf_" + "a" * 30


@attrs.define
class Here:
    """A download directory, and what fetches into it."""

    root: Path
    hub: Hub
    environ: dict[str, str] = attrs.field(factory=dict)
    reach: Reach = attrs.field(factory=lambda: Reach(allowed_hosts=frozenset({"localhost", "127.0.0.1"})))
    free: Callable[[Path], int] = lambda _: 1 << 40
    max_bytes: int = 1 << 40
    wait_s: float = 5.0
    line: Line = attrs.field(factory=Line)
    progress: Progress = attrs.field(factory=Progress)
    cache: StatCache = attrs.field(factory=lambda: StatCache(None))
    options: dict[str, Any] = attrs.field(factory=dict)

    def fetch(self, source: HuggingFace | Http = SOURCE, wanted: Wanted = TENSORS) -> Path:
        self.progress = Progress()
        door = Door(self.reach, self.wait_s)
        tokens = Tokens(environ=self.environ, secrets_dir=str(self.root / "secrets"), token_file=None)
        fetcher = Fetcher(
            asking=Asking(door=door, tokens=tokens, endpoint=self.hub.endpoint),
            room=Room(self.root, self.max_bytes, self.free),
            patience=Patience(attempts=3, pause_s=0.001),
            cache=self.cache,
            **self.options,
        )
        return fetcher.fetch(source, wanted, self.progress, self.line)

    def refused(self, source: HuggingFace | Http = SOURCE, wanted: Wanted = TENSORS) -> CapyError:
        """What a fetch is refused with; no directory of it is anywhere a model could be looked for."""
        with pytest.raises(CapyError) as caught:
            self.fetch(source, wanted)
        assert not self.published()
        assert "\n" not in caught.value.message
        assert TOKEN not in caught.value.message
        assert "s3cret" not in caught.value.message
        return caught.value

    def published(self) -> list[Path]:
        top = self.root / "sources"
        return [path for kind in ("huggingface", "http") for path in (top / kind).rglob("*") if path.is_file()]

    def left(self) -> dict[str, int]:
        """Files of the parts, and their sizes."""
        parts = self.root / "sources/.parts"
        return {path.name: path.stat().st_size for path in parts.rglob("*") if path.is_file() and path.name != "place"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running({REPO: dict(FILES)}) as made:
        yield made


@pytest.fixture
def here(tmp_path: Path, hub: Hub) -> Here:
    return Here(tmp_path, hub)


def http_source(hub: Hub, name: str = "model.gguf", digest: str = sha256(WEIGHTS)) -> Http:
    return Http(url=f"{hub.cdn}/files/{sha256(WEIGHTS)}/{name}?key=s3cret", sha256=digest)


# --- what is fetched ----------------------------------------------------------------------------------------


def test_a_repository_is_there_with_exactly_what_an_engine_needs(here: Here, hub: Hub):
    names: set[str] = set()

    def look(host: str, port: int) -> Sequence[Found]:
        names.add(host)
        return look_up(host, port) if host != "huggingface.co" else []

    listed = here.reach.allowed_hosts | {"huggingface.co"}
    here.reach = attrs.evolve(here.reach, lookup=look, allowed_hosts=listed)
    directory = here.fetch()
    assert directory == here.root / "sources/huggingface" / REPO / COMMIT / "tensors"
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == {name: FILES[name] for name in NEEDED}
    assert not here.left()
    assert here.progress.done_bytes == here.progress.total_bytes == sum(len(FILES[name]) for name in NEEDED)
    # Nothing else was asked of anybody: no pickle, no count of users.
    assert names == {"localhost", "127.0.0.1"}
    asked = [one.path.partition("?")[0] for one in hub.seen]
    assert asked[0] == f"/api/models/{REPO}/revision/{COMMIT}"
    assert len(asked) == 1 + len(NEEDED) + 1
    assert all(one.headers["user-agent"].startswith("capyctl/") for one in hub.seen)


def test_what_was_hashed_on_its_way_is_not_read_again_to_be_measured(here: Here, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("capyctl.checkpoints.digest.SMALL_FILE_BYTES", 1000)
    listing = list_files(here.fetch(), here.root)
    measured = digest_listing(listing, here.cache)
    assert measured.read_bytes < 1000
    assert measured.digest == digest_listing(listing, StatCache(None)).digest


def test_what_is_there_needs_no_network(here: Here, hub: Hub):
    directory = here.fetch()
    hub.seen.clear()
    assert here.fetch() == directory
    assert not hub.seen


def test_one_named_gguf_of_many_is_fetched_and_every_part_of_a_set(here: Here, hub: Hub):
    parts = {f"big-{number:05}-of-00002.gguf": b"part %d" % number for number in (1, 2)}
    hub.repos[REPO] = {"a.Q4.gguf": b"four", "a.Q8.gguf": b"eight", **parts, "config.json": b"{}"}
    named = here.fetch(wanted=Wanted(kind="gguf", gguf_file="a.Q8.gguf"))
    assert [path.name for path in named.iterdir()] == ["a.Q8.gguf"]
    sharded = here.fetch(wanted=Wanted(kind="gguf", gguf_file="big-00001-of-00002.gguf"))
    assert {path.name for path in sharded.iterdir()} == set(parts)
    assert named != sharded


def test_an_ambiguous_repository_is_refused_with_its_candidates(here: Here, hub: Hub):
    hub.repos[REPO] = {"a.Q4.gguf": b"four", "a.Q8.gguf": b"eight"}
    wrong = here.refused(wanted=Wanted(kind="gguf"))
    assert wrong.code == "checkpoint_unusable"
    assert "a.Q4.gguf, a.Q8.gguf" in wrong.message
    assert "gguf_file" in wrong.message


def test_pickles_alone_are_no_model(here: Here, hub: Hub):
    hub.repos[REPO] = {"config.json": b"{}", "pytorch_model.bin": b"pickled"}
    wrong = here.refused()
    assert wrong.code == "checkpoint_unusable"
    assert "pickles" in wrong.message


def test_a_file_behind_a_url_is_fetched_by_its_hash(here: Here, hub: Hub):
    directory = here.fetch(http_source(hub))
    assert directory == here.root / f"sources/http/model.gguf-{sha256(WEIGHTS)}"
    assert (directory / "model.gguf").read_bytes() == WEIGHTS


def test_a_url_may_be_a_secret_in_an_owner_only_file(here: Here, hub: Hub):
    secret = here.root / "secrets/mirror"
    secret.parent.mkdir()
    secret.write_text(str(http_source(hub).url))
    source = Http(url_ref=SecretRef("secret://mirror"), sha256=sha256(WEIGHTS))
    secret.chmod(0o644)
    wrong = here.refused(source)
    assert wrong.code == "unauthorized"
    assert "chmod 600" in wrong.message
    secret.chmod(0o600)
    assert (here.fetch(source) / "model.gguf").read_bytes() == WEIGHTS


def test_a_secret_address_that_was_corrected_gives_its_file_the_right_name_without_the_network(here: Here, hub: Hub):
    secret = here.root / "secrets/mirror"
    secret.parent.mkdir()
    secret.touch(mode=0o600)
    secret.write_text(str(http_source(hub, "weights").url))
    source = Http(url_ref=SecretRef("secret://mirror"), sha256=sha256(WEIGHTS))
    assert [path.name for path in here.fetch(source).iterdir()] == ["weights"]
    hub.seen.clear()
    secret.write_text(str(http_source(hub, "model.gguf").url))
    directory = here.fetch(source)
    assert [path.name for path in directory.iterdir()] == ["model.gguf"]
    secret.unlink()
    assert here.fetch(source) == directory, "what is there needs no address"
    assert not hub.seen


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault(status=404), "not_found"),
        (Fault(status=403), "unauthorized"),
        (Fault(flip=3), "checkpoint_mismatch"),
        (Fault(no_length=True), "not_materializable"),
        (Fault(redirect="../../../s3cret"), "not_found"),
        (Fault(redirect="ftp://127.0.0.1/s3cret"), "not_materializable"),
        (Fault(redirect="?s3cret"), "not_materializable"),
        (Fault(raw=b"HTTP/1.1 200 s3cret\r\nContent-Encoding: br\r\n\r\n"), "not_materializable"),
    ],
)
def test_an_address_that_is_a_secret_is_in_no_message(here: Here, hub: Hub, fault: Fault, code: str):
    secret = here.root / "secrets/mirror"
    secret.parent.mkdir()
    secret.touch(mode=0o600)
    secret.write_text(f"{hub.cdn}/files/{sha256(WEIGHTS)}/s3cret/m.gguf")
    hub.faults["m.gguf"] = [fault] * 9
    wrong = here.refused(Http(url_ref=SecretRef("secret://mirror"), sha256=sha256(WEIGHTS)))
    assert (wrong.code, "secret://mirror" in wrong.message) == (code, True), wrong.message


@pytest.mark.parametrize("text", ["http://[::", "no address", "https://x.example/a\nb/m.gguf", "file:///etc/m.gguf"])
def test_a_secret_that_is_no_address_is_refused_by_its_name(here: Here, hub: Hub, text: str):
    secret = here.root / "secrets/mirror"
    secret.parent.mkdir()
    secret.touch(mode=0o600)
    secret.write_text(text)
    wrong = here.refused(Http(url_ref=SecretRef("secret://mirror"), sha256=sha256(WEIGHTS)))
    assert (wrong.code in ("not_materializable", "unsafe_file"), "secret://mirror" in wrong.message) == (True, True), (
        wrong
    )


# --- going on -------------------------------------------------------------------------------------------------


def test_a_cut_is_gone_on_from_where_it_was(here: Here, hub: Hub):
    hub.faults["model.safetensors"] = [Fault(cut_after=100_000), Fault(cut_after=100_000)]
    here.fetch()
    ranges = [one.headers.get("range") for one in hub.to("cdn")]
    assert ranges == [None, "bytes=100000-", "bytes=200000-"]
    assert {one.headers.get("if-range") for one in hub.to("cdn")} == {None, f'"{sha256(WEIGHTS)}"'}


def test_another_process_goes_on_from_the_part_of_one_that_was_killed(here: Here, hub: Hub):
    hub.faults["model.safetensors"] = [Fault(cut_after=100_000), *[Fault(cut_after=0)] * 2]
    wrong = here.refused()
    assert wrong.code == "unavailable"
    assert 100_000 in here.left().values()
    hub.seen.clear()
    directory = here.fetch()
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    assert [one.headers.get("range") for one in hub.to("cdn")] == ["bytes=100000-"]
    assert not [one for one in hub.to("hub") if "config.json" in one.path], "what was whole is not asked for again"


def test_a_part_of_another_file_is_started_over(here: Here, hub: Hub):
    hub.faults["model.safetensors"] = [Fault(cut_after=100_000, etag='"older"'), *[Fault(cut_after=0)] * 2]
    here.refused()
    assert (here.fetch() / "model.safetensors").read_bytes() == WEIGHTS  # If-Range failed: all of it was sent


def test_a_server_without_ranges_is_asked_for_all_of_it(here: Here, hub: Hub):
    hub.faults["model.safetensors"] = [Fault(cut_after=100_000), Fault(no_ranges=True)]
    assert (here.fetch() / "model.safetensors").read_bytes() == WEIGHTS


def test_another_range_than_was_asked_for_is_not_glued_on(here: Here, hub: Hub):
    hub.faults["model.safetensors"] = [Fault(cut_after=100_000), Fault(shift=5)]
    assert (here.fetch() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_part_that_somebody_spoiled_ends_by_its_hash_and_the_next_time_is_clean(here: Here, hub: Hub):
    hub.faults["model.safetensors"] = [Fault(cut_after=100_000), *[Fault(cut_after=0)] * 2]
    here.refused()
    (part,) = [path for path in (here.root / "sources/.parts").rglob("part/*") if path.stat().st_size == 100_000]
    part.write_bytes(b"\0" * 100_000)
    assert here.refused().code == "checkpoint_mismatch"
    assert 300_000 not in here.left().values()
    assert (here.fetch() / "model.safetensors").read_bytes() == WEIGHTS


def test_the_rest_of_another_file_is_not_glued_on_though_a_server_calls_it_the_rest(here: Here, hub: Hub):
    hub.faults["model.safetensors"] = [Fault(cut_after=100_000, etag='"older"'), Fault(etag='"older"'), Fault()]
    here.fetch()
    hub.faults["model.safetensors"] = []
    ranges = [one.headers.get("range") for one in hub.to("cdn")]
    assert ranges == [None, "bytes=100000-"], "an ETag that holds lets it go on"
    hub.repos["maker/other"] = {**FILES, "model.safetensors": os.urandom(300_000)}
    begun = b'HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 100000-299999/300000\r\nETag: "newer"\r\n\r\nxx'
    hub.faults["model.safetensors"] = [Fault(cut_after=100_000, etag='"older"'), Fault(raw=begun)]
    hub.seen.clear()
    other = HuggingFace(repo="maker/other", revision=COMMIT)
    assert (here.fetch(other) / "model.safetensors").read_bytes() == hub.repos["maker/other"]["model.safetensors"]
    assert [one.headers.get("range") for one in hub.to("cdn")] == [None, "bytes=100000-", None]


def test_a_server_that_lets_nobody_come_to_an_end_is_given_up(here: Here, hub: Hub):
    """It sends much and little by turns, and never goes on from where it was: that is no progress."""
    turns = [Fault(cut_after=cut, no_ranges=True) for cut in (200_000, 1000)] * 50
    hub.faults["model.safetensors"] = list(turns)
    assert here.refused().code == "unavailable"
    assert len(hub.to("cdn")) < 8


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(here: Here, hub: Hub, status: int):
    hub.faults["model.safetensors"] = [Fault(status=status, headers={"Retry-After": "0"})] * 2
    hub.faults[f"/revision/{COMMIT}"] = [Fault(status=status)]
    assert (here.fetch() / "model.safetensors").read_bytes() == WEIGHTS


# --- what servers do ------------------------------------------------------------------------------------------

PRIVATE = "http://10.1.2.3/model"
OK, PARTIAL = b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 206 Partial Content\r\n"
CASES = {
    "a hash that is not the one": ([Fault(flip=7)], "checkpoint_mismatch", "the hash"),
    "a length that is not the one": ([Fault(length=12)], "not_materializable", "is 12 bytes, and 300000 are expected"),
    "more than is expected": (
        [Fault(no_length=True, more=9)],
        "not_materializable",
        "sends more than its 300000 bytes",
    ),
    "less than is expected, again and again": ([Fault(cut_after=0)] * 3, "unavailable", "ended after 0 of 300000"),
    "a server that stays busy": ([Fault(status=503)] * 3, "unavailable", "answered 503"),
    "a server that stays too busy for us": ([Fault(status=429)] * 3, "unavailable", "answered 429"),
    "a server that breaks": ([Fault(status=500)] * 3, "unavailable", "answered 500"),
    "a file that needs a token": ([Fault(status=401)], "unauthorized", "CAPYCTL_HF_TOKEN"),
    "a file that is not for us": ([Fault(status=403)], "unauthorized", "answered 403"),
    "a file that is not there": ([Fault(status=404)], "not_found", "answered 404"),
    "a file that is teapot": ([Fault(status=418)], "not_materializable", "answered 418"),
    "a redirect to a private address": ([Fault(redirect=PRIVATE)], "not_materializable", "10.1.2.3"),
    "a redirect to this machine in another writing": (
        [Fault(redirect="http://[::ffff:7f00:1]:1/x")],
        "not_materializable",
        "give it a name and add that",
    ),
    "a redirect to this machine as a number": (
        [Fault(redirect="http://2130706433:1/x")],
        "not_materializable",
        "127.0.0.1",
    ),
    "a redirect to a machine's own data": (
        [Fault(redirect="http://169.254.169.254/latest/meta-data")],
        "not_materializable",
        "169.254.169.254",
    ),
    "a redirect to another scheme": ([Fault(redirect="file:///etc/shadow")], "not_materializable", "the scheme file"),
    "a redirect with a user": ([Fault(redirect="https://u:p@localhost/x")], "not_materializable", "without a user"),
    "a redirect to a page of text": ([Fault(redirect="/" + "x" * 60_000)], "not_found", "xxx… answered 404"),
    "a redirect to no URL": ([Fault(redirect="http://[::")], "not_materializable", "no URL"),
    "a length that is said twice, in two ways": (
        [Fault(raw=OK + b"Content-Length: 12\r\nContent-Length: 300000\r\n\r\n" + b"x" * 12)] * 3,
        "unavailable",
        "ended after 12 of 300000",
    ),
    "a length below zero": (
        [Fault(raw=OK + b"Content-Length: -1\r\n\r\n" + b"x" * 300_001)],
        "not_materializable",
        "sends more than its 300000 bytes",
    ),
    "a body without an end": (
        [Fault(raw=OK + b"\r\n", endless=b"x" * 65536)],
        "not_materializable",
        "sends more than its 300000 bytes",
    ),
    "a range that nobody asked for": (
        [Fault(raw=PARTIAL + b"Content-Range: bytes 5-299999/300000\r\n\r\n")] * 3,
        "unavailable",
        "another range",
    ),
    "a range beside a length that is not its own": (
        [Fault(raw=PARTIAL + b"Content-Range: bytes 0-299999/300000\r\nContent-Length: 7\r\n\r\n1234567")],
        "not_materializable",
        "contradicts itself",
    ),
    "headers without an end": (
        [Fault(raw=OK, endless=b"X-Again: and again\r\n" * 200)] * 3,
        "unavailable",
        "more than 100 headers",
    ),
    "a header line without an end": (
        [Fault(raw=OK + b"X: ", endless=b"x" * 65536)] * 3,
        "unavailable",
        "more than 65536 bytes",
    ),
    "another HTTP, with what a terminal would do": (
        [Fault(raw=b"HTTP/\x1b[31m 200 OK\r\n\r\n")] * 3,
        "unavailable",
        "is no HTTP",
    ),
    "an encoding that a terminal would do": (
        [Fault(raw=OK + b"Content-Encoding: \x1b[31m\r\n\r\n")],
        "not_materializable",
        r"'\x1b[31m'",
    ),
    "what is no HTTP": ([Fault(raw=b"SSH-2.0-x\r\n")] * 3, "unavailable", "is no HTTP"),
    "a second encoding behind a harmless one": (
        [Fault(raw=OK + b"Content-Encoding: identity\r\nContent-Encoding: gzip\r\n\r\n")],
        "not_materializable",
        "identity, gzip",
    ),
    "something compressed": ([Fault(headers={"Content-Encoding": "gzip"})], "not_materializable", "gzip"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_server_that_does_wrong_is_one_clear_line_and_no_model(here: Here, hub: Hub, case: str):
    faults, code, words = CASES[case]
    here.reach = Reach(allowed_hosts=frozenset({"localhost", "127.0.0.1"}), plain_http=True)
    hub.faults["model.safetensors"] = list(faults)
    wrong = here.refused()
    assert (wrong.code, words in wrong.message) == (code, True), wrong.message
    assert isinstance(wrong, Failure if code == "unavailable" else Refusal)
    assert (wrong.message.isprintable(), len(wrong.message) < 1000) == (True, True)
    assert 300_000 not in here.left().values(), "what is of no use is not kept"


def test_a_loop_of_redirects_ends(here: Here, hub: Hub):
    hub.faults["model.safetensors"] = [Fault(redirect="?again")] * 20
    wrong = here.refused()
    assert (wrong.code, "more than 5 times" in wrong.message) == ("not_materializable", True)
    assert len(hub.to("cdn")) == 5


def test_a_stalled_server_is_not_waited_for_for_ever(here: Here, hub: Hub):
    here.wait_s = 0.1
    hub.faults["model.safetensors"] = [Fault(cut_after=100_000, stall=True)]
    assert (here.fetch() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_slow_connection_that_is_cut_from_outside_is_opened_again(here: Here, hub: Hub):
    hub.faults["model.safetensors"] = [Fault(piece=1000, pause_s=0.02)]
    cut = threading.Timer(0.3, here.line.cut, ["only 12 bytes came"])
    cut.start()
    assert (here.fetch() / "model.safetensors").read_bytes() == WEIGHTS
    cut.join()
    assert len(hub.to("cdn")) == 2


def test_a_fetch_that_nobody_wants_any_more_ends_at_once_and_keeps_its_part(here: Here, hub: Hub):
    hub.faults["model.safetensors"] = [Fault(cut_after=100_000, stall=True)]
    threading.Timer(0.3, here.line.stop).start()
    with pytest.raises(Stopped):
        here.fetch()
    assert not here.published()
    assert 100_000 in here.left().values()


def test_a_url_without_a_stated_length_is_refused_since_nothing_could_be_set_aside(here: Here, hub: Hub):
    hub.faults["model.gguf"] = [Fault(no_length=True)]
    wrong = here.refused(http_source(hub))
    assert (wrong.code, "how large" in wrong.message) == ("not_materializable", True)


@pytest.mark.parametrize("said", [b"-1", b"", b"9" * 30, b"0x10", b"1\r\nContent-Length: 2"])
def test_a_url_whose_length_means_nothing_is_refused(here: Here, hub: Hub, said: bytes):
    hub.faults["model.gguf"] = [Fault(raw=OK + b"Content-Length: " + said + b"\r\n\r\nxx")]
    wrong = here.refused(http_source(hub))
    assert (wrong.code, "how large" in wrong.message) == ("not_materializable", True)
    assert not here.left()


def test_a_corrected_name_is_what_an_engine_finds_and_the_wrong_one_stays_with_who_asked_for_it(here: Here, hub: Hub):
    wrong = here.fetch(http_source(hub, "model.bin-old"))
    hub.seen.clear()
    right = here.fetch(http_source(hub, "model.gguf"))
    assert not hub.seen, "what is here is copied"
    assert [path.name for path in right.iterdir()] == ["model.gguf"]
    assert [path.name for path in wrong.iterdir()] == ["model.bin-old"]
    assert (right / "model.gguf").read_bytes() == WEIGHTS


def test_what_is_here_under_another_name_is_asked_for_when_it_is_no_longer_what_it_was(here: Here, hub: Hub):
    (here.fetch(http_source(hub, "old.gguf")) / "old.gguf").write_bytes(b"\0" * len(WEIGHTS))
    right = here.fetch(http_source(hub, "model.gguf"))
    assert (right / "model.gguf").read_bytes() == WEIGHTS
    assert [one.path.rpartition("/")[2] for one in hub.seen] == ["old.gguf?key=s3cret", "model.gguf?key=s3cret"]
    assert here.progress.done_bytes == here.progress.total_bytes == len(WEIGHTS)


def test_a_copy_of_what_is_here_needs_room_as_a_download_does(here: Here, hub: Hub):
    here.fetch(http_source(hub, "old.gguf"))
    here.free = lambda _: 1 << 30
    with pytest.raises(Refusal) as caught:
        here.fetch(http_source(hub, "model.gguf"))
    assert caught.value.code == "insufficient_space"
    assert not here.left()


def test_a_lone_file_that_was_whole_when_the_role_was_killed_is_not_asked_for_again(here: Here, hub: Hub):
    hub.faults["model.gguf"] = [Fault(cut_after=100_000), *[Fault(cut_after=0)] * 2]
    here.refused(http_source(hub))
    (part,) = [path for path in (here.root / "sources/.parts").rglob("part/*") if path.stat().st_size == 100_000]
    part.write_bytes(WEIGHTS)
    hub.seen.clear()
    assert (here.fetch(http_source(hub)) / "model.gguf").read_bytes() == WEIGHTS
    assert not hub.seen
    assert here.progress.done_bytes == here.progress.total_bytes == len(WEIGHTS)


def test_a_url_whose_content_is_another_is_refused(here: Here, hub: Hub):
    wrong = here.refused(http_source(hub, digest="0" * 64))
    assert wrong.code == "checkpoint_mismatch"
    assert not here.left()


def test_archives_are_not_unpacked(here: Here, hub: Hub):
    assert here.refused(attrs.evolve(http_source(hub), archive="tar")).code == "unsupported"


@pytest.mark.parametrize(
    "listing",
    [
        [],
        {"id": REPO, "sha": "f" * 40, "siblings": []},
        {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": "model.safetensors"}]},
        {"id": REPO, "sha": COMMIT, "siblings": [{"size": 1}]},
        {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": "a.safetensors", "size": -1, "blobId": "0" * 40}]},
    ],
)
def test_what_is_no_hub_is_said_so(here: Here, hub: Hub, listing: Any):
    hub.listing = listing
    assert here.refused().code == "not_materializable"


@pytest.mark.parametrize(
    ("listing", "code", "words"),
    [
        (b'{"siblings": [' + b"[]," * (1 << 21) + b"[]]}", "not_materializable", "more values"),
        (b"[" * 100_000, "not_materializable", "nested too deeply"),
        (
            b'{"siblings": [' + b'{"rfilename":"a"},' * 9000 + b'{"rfilename":"b"}], "id": "x", "sha": "y"}',
            "too_large",
            "more than 8192 files",
        ),
        (b'{"sha": "a", "sha": "b"}', "not_materializable", "'sha' twice"),
        (b"x" * (17 << 20), "too_large", "larger than 16 MiB"),
    ],
    ids=["values", "depth", "files", "twice", "bytes"],
)
def test_a_listing_that_would_fill_the_memory_is_refused(here: Here, hub: Hub, listing: bytes, code: str, words: str):
    length = b"Content-Length: %d\r\n\r\n" % len(listing)
    hub.faults[f"/revision/{COMMIT}"] = [Fault(raw=OK + length + listing)]
    wrong = here.refused()
    assert (wrong.code, words in wrong.message) == (code, True), wrong.message


def test_a_listing_that_is_compressed_in_its_second_header_is_not_unpacked(here: Here, hub: Hub):
    packed = gzip.compress(b" " * (32 << 20))
    headers = b"Content-Encoding: identity\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    hub.faults[f"/revision/{COMMIT}"] = [Fault(raw=OK + headers + packed)]
    assert "Content-Encoding 'identity, gzip'" in here.refused().message


def test_a_name_that_is_listed_twice_is_refused(here: Here, hub: Hub):
    row = {"rfilename": "config.json", "size": 1, "blobId": blob(b"x")}
    hub.listing = {**hub.siblings(REPO), "siblings": [*hub.siblings(REPO)["siblings"], row]}
    assert here.refused().code == "unsafe_file"


def test_an_empty_file_of_a_repository_is_there_and_empty(here: Here, hub: Hub):
    hub.repos[REPO] = {**FILES, "added_tokens.json": b""}
    assert (here.fetch() / "added_tokens.json").read_bytes() == b""
    assert not here.left()


def test_names_that_differ_by_case_are_two_files(here: Here, hub: Hub):
    hub.repos[REPO] = {**FILES, "Config.json": b"{}"}
    assert {path.name for path in here.fetch().iterdir()} == {*NEEDED, "Config.json"}


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a//b", "a/./b", "nul\0", "x" * 300, "a\nb", "c\\d", "\u202efdp.x", "\ud800"]
)
def test_a_name_that_would_leave_the_directory_is_refused(here: Here, hub: Hub, name: str):
    row = {"rfilename": name, "size": 1, "blobId": blob(b"x")}
    hub.listing = {**hub.siblings(REPO), "siblings": [*hub.siblings(REPO)["siblings"], row]}
    assert here.refused().code == "unsafe_file"
    assert len(hub.seen) == 1


def test_a_name_that_is_a_file_and_a_directory_is_refused_before_anything_is_fetched(here: Here, hub: Hub):
    row = {"rfilename": "config.json/x.json", "size": 1, "blobId": blob(b"x")}
    hub.listing = {**hub.siblings(REPO), "siblings": [*hub.siblings(REPO)["siblings"], row]}
    refused = here.refused()
    assert (refused.code, "config.json as a file and as a directory" in refused.message) == ("unsafe_file", True)
    assert len(hub.seen) == 1


# --- who is spoken to ---------------------------------------------------------------------------------------


def test_a_token_reaches_the_hub_and_nobody_that_it_redirects_to(here: Here, hub: Hub):
    hub.token = TOKEN
    assert here.refused().code == "unauthorized"
    here.environ["HF_TOKEN"] = TOKEN
    hub.seen.clear()
    here.fetch()
    assert {one.headers.get("authorization") for one in hub.to("hub")} == {f"Bearer {TOKEN}"}
    assert {one.headers.get("authorization") for one in hub.to("cdn")} == {None}


def test_a_token_does_not_come_along_on_a_way_back_through_another_host(here: Here, hub: Hub):
    hub.token, here.environ["HF_TOKEN"] = TOKEN, TOKEN
    hub.faults["model.safetensors"] = [Fault(redirect=f"{hub.endpoint}/{REPO}/resolve/{COMMIT}/config.json")]
    assert here.refused().code == "unauthorized"
    sent = [(one.server, one.headers.get("authorization")) for one in hub.seen]
    assert sent[-3:] == [("hub", f"Bearer {TOKEN}"), ("cdn", None), ("hub", None)]


def test_no_token_is_found_in_other_ways_than_the_roles(here: Here, hub: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)  # the Hub's library would look here, and in its own files
    here.fetch()
    assert {one.headers.get("authorization") for one in hub.seen} == {None}


def test_a_token_that_the_hub_does_not_take_is_said_so_without_it(here: Here, hub: Hub):
    hub.token = "another"
    here.environ["CAPYCTL_HF_TOKEN"] = TOKEN
    wrong = here.refused()
    assert (wrong.code, "the token may not read it" in wrong.message) == ("unauthorized", True)


def test_a_private_address_is_reached_only_if_its_host_is_listed(here: Here, hub: Hub):
    here.reach = Reach()
    wrong = here.refused()
    assert wrong.code == "not_materializable"
    assert "add localhost to host.model_sources.allowed_hosts" in wrong.message
    assert not hub.seen
    here.reach = Reach(allowed_hosts=frozenset({"localhost"}))  # the Hub is; where it redirects to is not
    assert "add 127.0.0.1" in here.refused().message
    assert not hub.to("cdn")


def test_a_host_that_is_not_on_the_list_is_not_asked(here: Here, hub: Hub):
    here.reach = Reach(allowed_hosts=frozenset({"huggingface.co"}))
    assert "localhost is not one of host.model_sources.allowed_hosts" in here.refused().message


def test_a_name_is_looked_up_once_and_what_was_judged_is_connected_to(here: Here, hub: Hub):
    """A name that is public when it is judged and private when it is connected to: there is no second look."""
    looks: list[str] = []

    def rebinding(host: str, port: int) -> list[tuple[int, Any]]:
        looks.append(host)
        return [(socket.AF_INET, ("127.0.0.1", port))] if len(looks) % 2 == 0 else [(socket.AF_INET, ("192.0.2.1", 9))]

    here.reach = Reach(lookup=rebinding)
    wrong = here.refused()
    assert (wrong.code, "192.0.2.1" in wrong.message) == ("not_materializable", True)
    assert looks == ["localhost"]


def test_plain_http_is_for_this_machine_alone_unless_it_is_allowed(here: Here, hub: Hub):
    def here_only(host: str, port: int) -> list[tuple[int, Any]]:
        return [(socket.AF_INET, ("127.0.0.1", port))]

    source = Http(url=f"http://mirror.example:{hub.ports[1]}/files/{sha256(WEIGHTS)}/m.gguf", sha256=sha256(WEIGHTS))
    here.reach = Reach(allowed_hosts=frozenset({"mirror.example"}), lookup=here_only)
    wrong = here.refused(source)
    assert (wrong.code, "plain_http" in wrong.message) == ("not_materializable", True)
    here.reach = attrs.evolve(here.reach, plain_http=True)
    assert (here.fetch(source) / "m.gguf").read_bytes() == WEIGHTS


@pytest.mark.parametrize("kind", ["huggingface", "http"])
def test_a_kind_that_is_disabled_is_not_fetched(here: Here, hub: Hub, kind: str):
    here.options[kind] = False
    wrong = here.refused(SOURCE if kind == "huggingface" else http_source(hub))
    assert (wrong.code, f"host.model_sources.{kind}" in wrong.message) == ("not_materializable", True)
    assert not hub.seen


# --- room -------------------------------------------------------------------------------------------------------


def test_a_disk_without_room_is_refused_with_figures_before_a_byte(here: Here, hub: Hub):
    here.free = lambda _: (1 << 30) + 300_000
    wrong = here.refused()
    assert wrong.code == "insufficient_space"
    assert "1.0 GiB must stay free" in wrong.message
    assert wrong.details["need_bytes"] == sum(len(FILES[name]) for name in NEEDED)
    assert len(hub.seen) == 1
    here.free = lambda _: (1 << 30) + 301_000
    here.fetch()


def test_a_lone_file_without_room_is_refused_before_a_byte_is_kept(here: Here, hub: Hub):
    here.free = lambda _: 1 << 30
    wrong = here.refused(http_source(hub))
    assert (wrong.code, f"{sha256(WEIGHTS)}/model.gguf needs" in wrong.message) == ("insufficient_space", True)
    assert not here.left()


def test_the_cap_counts_what_is_there(here: Here, hub: Hub):
    here.max_bytes = 500_000
    here.fetch()
    with pytest.raises(Refusal) as caught:
        here.fetch(http_source(hub))
    assert caught.value.code == "too_large"
    assert caught.value.details["limit_bytes"] == 500_000


def test_a_full_disk_in_the_middle_keeps_the_part(here: Here, hub: Hub, monkeypatch: pytest.MonkeyPatch):
    def full(stream: Any, piece: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("capyctl.downloads.part._write", full)
    wrong = here.refused()
    assert wrong.code == "insufficient_space"


@pytest.mark.parametrize("open_to_all", ["", "sources", "sources/huggingface/maker", "sources/.parts"])
def test_a_directory_that_others_may_write_is_refused_before_anything_is_asked(here: Here, hub: Hub, open_to_all: str):
    directory = here.root / open_to_all
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o777)
    wrong = here.refused()
    assert (wrong.code, f"chmod o-w {directory}" in wrong.message) == ("invalid_root", True)
    assert not hub.seen


def test_a_place_that_cannot_be_written_is_named(here: Here, hub: Hub):
    (here.root / "sources").write_text("a file")
    wrong = here.refused()
    assert (wrong.code, str(here.root / "sources") in wrong.message) == ("invalid_root", True)


def test_parts_that_another_fetch_removes_at_this_moment_are_made_again(here: Here, monkeypatch: pytest.MonkeyPatch):
    """Whoever ended without a byte takes the directory away, while others are about to use it."""
    made, mkdir, hold = [], Path.mkdir, os.open
    (here.root / "sources/.parts").mkdir(parents=True)

    def late(self: Path, *more: Any, **words: Any) -> None:
        if self.parent.name == ".parts":
            made.append(self)
            if len(made) == 1:
                raise FileExistsError(17, "File exists", str(self))
        mkdir(self, *more, **words)

    def gone(path: Any, *more: Any) -> int:
        if len(made) == 2 and Path(path).parent.name == ".parts":
            Path(path).rmdir()
            made.append(Path(path))
        return hold(path, *more)

    monkeypatch.setattr(Path, "mkdir", late)
    monkeypatch.setattr("capyctl.downloads.fetch.os.open", gone)
    assert (here.fetch() / "model.safetensors").read_bytes() == WEIGHTS
    assert len(made) == 4


def test_a_disk_that_is_full_before_the_first_byte_leaves_nothing(here: Here, monkeypatch: pytest.MonkeyPatch):
    def full(self: Path, *more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    wrong = here.refused()
    assert (wrong.code, str(here.root) in wrong.message) == ("insufficient_space", True)
    assert list((here.root / "sources/.parts").iterdir()) == []


def test_a_file_where_parts_are_to_be_is_named(here: Here):
    name = hashlib.sha256(f"sources/huggingface/{REPO}/{COMMIT}/tensors".encode()).hexdigest()[:24]
    (here.root / "sources/.parts").mkdir(parents=True)
    (here.root / "sources/.parts" / name).write_text("mine")
    wrong = here.refused()
    assert (wrong.code, name in wrong.message) == ("invalid_root", True)
    (here.root / "sources/.parts" / name).unlink()
    (here.root / "sources/.parts" / name).symlink_to("nowhere")
    assert here.refused().code == "invalid_root"


def test_what_a_kill_left_beside_a_complete_model_is_tidied(here: Here):
    here.fetch()
    name = hashlib.sha256(f"sources/huggingface/{REPO}/{COMMIT}/tensors".encode()).hexdigest()[:24]
    (here.root / "sources/.parts" / name / "part").mkdir(parents=True)
    (here.root / "sources/.parts" / name / "part/x").write_bytes(b"half")
    here.fetch()
    assert not here.left()
