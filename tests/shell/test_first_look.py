"""A deploy looks at its model's files where they lie on the role's machine: what they show at once is refused then."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from test_residency_settled import BOX, GIB, Profiles, card_host

from capyctl.checkpoints.store import CheckpointStore
from capyctl.documents.blocks import ModelSources
from capyctl.errors import CapyError, Refusal
from capyctl.fsm.types import Millis
from capyctl.roles import machine
from capyctl.roles.machine import look_at_model
from capyctl.server.deploy import Allowed, accept
from capyctl.server.measuring import deployment_of
from capyctl.server.preview import Site, preview
from tests.engines.checkpoints import write_checkpoint


@attrs.define
class Here:
    """This machine, and what a deploy of a document comes to on it."""

    store: CheckpointStore
    site: Site

    async def deploy(self, **document: Any) -> None:
        spec = self.spec(**document)
        await look_at_model(self.store, self.site, spec)

    def spec(self, **document: Any) -> Any:
        config = {"name": "m", "engine": "engine", "model": "m", **document}
        return accept(config, self.site.profiles, [self.site.allowed], self.site.request_deadline_ms)

    def validated(self, **document: Any) -> tuple[str, str] | None:
        """The refusal of `validate config`, as code and line."""
        try:
            preview(deployment_of(self.spec(**document)), [self.site])
        except CapyError as refused:
            return refused.code, refused.message
        return None


@pytest.fixture
def here(tmp_path: Path) -> Here:
    store = CheckpointStore(None, tmp_path, family_of=lambda _: "sglang")
    policy = card_host(BOX)
    fetcher = machine.fetcher_of(ModelSources(), str(tmp_path), str(tmp_path), None, {})
    site = Site(
        allowed=Allowed(host=policy.host, name=policy.name, policy=policy),
        policy=policy,
        profiles=Profiles(),
        request_deadline_ms=Millis(1_800_000),
        facts=lambda document: store.facts_here(document, str(tmp_path), fetcher.check),
        source="this machine",
    )
    return Here(store, site)


def fifo(place: Path) -> None:
    (place / "model.safetensors").unlink()
    os.mkfifo(place / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "document", "code", "line"),
    [
        (lambda place: place.rename(f"{place}.gone"), {}, "invalid_root", "m: model: the model directory "),
        (lambda place: (place / "config.json").write_text("{"), {}, "checkpoint_unusable", "m: model: config.json "),
        (lambda place: (place / "model.safetensors").write_bytes(b"x"), {}, "checkpoint_unusable", "m: model: model.s"),
        (fifo, {}, "unsafe_file", "m: model: model.safetensors is not a regular file"),
        (lambda place: place.chmod(0o777), {}, "invalid_root", "m: model: "),
        (lambda _: None, {"instances": 30}, "insufficient_device_memory", "m: instances: is 30, and "),
        (lambda _: None, {"engine_config": {"memory": {"request": "60GiB"}}}, "insufficient_device_memory", "m needs "),
        (
            lambda _: None,
            {"engine_config": {"memory": {"request": "2GiB"}}},
            "checkpoint_unusable",
            "engine_config.memory.request ",
        ),
    ],
)
async def test_what_its_files_show_is_refused_at_the_deploy_in_the_words_of_validate(
    here: Here, tmp_path: Path, spoil: Any, document: dict[str, Any], code: str, line: str
) -> None:
    spoil(write_checkpoint(tmp_path / "m", weights=4 * GIB))
    with pytest.raises(Refusal) as refused:
        await here.deploy(**document)
    print(refused.value)
    assert refused.value.code == code
    assert refused.value.message.startswith(line)
    assert here.validated(**document) == (refused.value.code, refused.value.message)


async def test_what_fits_is_accepted_and_what_is_not_downloaded_waits(here: Here, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", weights=4 * GIB)
    await here.deploy()
    await here.deploy(model={"source": {"type": "huggingface", "repo": "o/n", "revision": "0" * 40}})


@pytest.mark.parametrize(
    ("url", "code", "line"),
    [
        ("http://mirror.example/m.gguf", "not_materializable", "is plain HTTP, which host.model_sources.plain_http"),
        ("https://127.0.0.1/m.gguf", "not_materializable", "add 127.0.0.1 to host.model_sources.allowed_hosts"),
        ("https://2130706433/m.gguf", "not_materializable", "is at 127.0.0.1, which is not a public address"),
        ("https://[fe80::1]/m.gguf", "not_materializable", "fe80::1 is not a public address"),
        ("https://mirror.example/", "unsafe_file", "does not end in a file's name"),
    ],
)
async def test_a_url_that_this_machine_never_fetches_is_refused_before_anybody_is_asked(
    here: Here, tmp_path: Path, url: str, code: str, line: str
) -> None:
    source = {"type": "http", "url": url, "sha256": "a" * 64}
    write_checkpoint(tmp_path / "m", weights=4 * GIB)
    extra = {"accept_extra_args": True, "extra_args": ["--speculative-algorithm=EAGLE3"]}
    drafted = {"model": {"path": "m", "draft": source}, "engine_config": extra}
    for document in ({"model": {"source": source}}, drafted):
        with pytest.raises(Refusal) as refused:
            await here.deploy(**document)
        assert (refused.value.code, line in refused.value.message) == (code, True), refused.value.message
        assert refused.value.message.startswith("m: model: ")
        assert here.validated(**document) == (refused.value.code, refused.value.message)
    await here.deploy(model={"source": {**source, "url": "https://mirror.example/m.gguf"}})  # a name waits for DNS


async def test_files_that_a_disk_holds_back_hold_nobody_up(
    autojump_clock: trio.abc.Clock, here: Here, tmp_path: Path
) -> None:
    answers = threading.Event()
    write_checkpoint(tmp_path / "m", weights=4 * GIB)
    here.site = attrs.evolve(here.site, facts=lambda _: answers.wait(60) and None)
    began = trio.current_time()
    try:
        async with trio.open_nursery() as deploys:
            for _ in range(5):  # more than may look at one time
                deploys.start_soon(here.deploy)
        assert trio.current_time() - began == pytest.approx(machine.LOOK_S)
    finally:
        answers.set()
    with trio.fail_after(60):
        while machine.LOOKS.borrowed_tokens:
            await trio.to_thread.run_sync(lambda: None)
