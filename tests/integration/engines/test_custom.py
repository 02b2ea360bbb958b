"""Custom engines: the manifest, the pin, the file, a running one, and what deployments may ask of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

from capyctl.documents.custom_engine import Manifest, parse_manifest
from capyctl.documents.deployment import parse_deployment
from capyctl.engines.adapter import LaunchFacts
from capyctl.engines.check import check_deployment
from capyctl.engines.custom.adapter import CustomAdapter
from capyctl.engines.custom.engines_file import read_custom
from capyctl.engines.families import flag_rows, traits_of
from capyctl.engines.register import add_custom, add_engine, remove_engine
from capyctl.engines.registered import Registered
from capyctl.engines.registry import Registry
from capyctl.errors import CapyError, Refusal
from tests.engines.checkpoints import write_checkpoint
from tests.engines.installation import lay_out

from .conftest import ENVIRONMENT
from .launched import free_port, started

HEAD = {"schema_version": 1, "kind": "custom_engine"}
COMMAND = ["--host", "{host}", "--port", "{port}", "--model", "{model}", "--name", "{name}"]
PLAIN = {"api": "chat", "command": COMMAND}


def manifest(**fields: Any) -> Manifest:
    return parse_manifest({**HEAD, **PLAIN, **fields}, "m.yaml")


def refused(call: Any, *args: Any, **kwargs: Any) -> CapyError:
    with pytest.raises(CapyError) as caught:
        call(*args, **kwargs)
    assert "\n" not in caught.value.message
    return caught.value


# --- the manifest -----------------------------------------------------------------------------------


def test_a_command_is_data_and_its_placeholders_are_filled_in_once() -> None:
    said = manifest(command=["{port}", "--a=$(rm -rf /);`x`|&", "{model}/{name}.gguf", '{"json": {}}', "-p{port}"])
    words = said.arguments(host="127.0.0.1", port=8101, model="/srv/m", name="{port}")
    assert words == ("8101", "--a=$(rm -rf /);`x`|&", "/srv/m/{port}.gguf", '{"json": {}}', "-p8101")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "deployment"}, "kind"),
        ({"schema_version": 2}, "schema_version"),
        ({"schema_version": True}, "schema_version"),
        ({"api": "images"}, "api"),
        ({"command": ["--port", "8101"]}, "{port}"),
        ({"command": ["{port}", "{prt}"]}, "{prt} is not filled in"),
        ({"command": ["{port}", "a\nb"]}, "one line"),
        ({"command": ["{port}", ""]}, "command[1]"),
        ({"command": "--port {port}"}, "command"),
        ({"health": "healthz"}, "health"),
        ({"health": "http://x/"}, "health"),
        ({"idle": {"path": "/s"}}, "idle.running"),
        ({"idle": {"path": "/s", "running": "a b"}}, "idle.running"),
        ({"idle": {"path": "/s", "running": "/a", "waiting": "queued"}}, "idle.waiting"),
        ({"version": "a b"}, "version"),
        ({"env": {"A=B": "c"}}, "env"),
        ({"shell": True}, "shell"),
    ],
)
def test_a_manifest_is_read_strictly_and_the_field_at_fault_is_named(fields: dict[str, Any], says: str) -> None:
    error = refused(manifest, **fields)
    assert (error.code, error.exit_code) == ("invalid_config", 2)
    assert says in error.message
    assert error.message.startswith("m.yaml: ")


# --- registration -------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Place:
    """A program, a manifest's file, and the engines file that it is registered beside."""

    program: Path
    manifest: Path
    engines_file: Path

    def write(self, **fields: Any) -> None:
        said = {**HEAD, **PLAIN, **fields}
        self.manifest.write_text(yaml.safe_dump({name: value for name, value in said.items() if value is not None}))

    def add(self, name: str = "judge", confirm: Any = lambda said, digest: None, **options: Any) -> Registered:
        return add_custom(
            self.program, self.manifest, name=name, engines_file=self.engines_file, confirm=confirm, **options
        ).registered


@pytest.fixture
def place(tmp_path: Path) -> Place:
    program = tmp_path / "judge-serve"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    made = Place(program=program, manifest=tmp_path / "m.yaml", engines_file=tmp_path / "conf" / "engines.yaml")
    made.write()
    return made


def test_what_was_confirmed_is_what_is_read_again(place: Place) -> None:
    asked: list[tuple[str, str]] = []
    place.write(version="2.1", idle={"path": "/s", "running": "/busy"}, env={"A": "1"})
    added = place.add(
        confirm=lambda said, digest: asked.append((said.version, digest)), args=["-x", "positional"], env={"B": "2"}
    )
    path = place.engines_file.with_name("custom-engines.yaml")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().startswith("# capyctl-document-revision: 1\n")
    assert not place.engines_file.exists()
    assert read_custom(path).profiles == {"judge": added}
    assert asked == [("2.1", added.digest)]
    assert (added.engine, added.version, added.custom, added.deep_park) == ("custom", "2.1", True, "disabled")
    assert added.source == "custom-engines.yaml"
    assert dict(added.profile.env) == {"A": "1", "B": "2"}
    registry = Registry(place.engines_file)
    registry.reload()
    assert registry.registered("custom").name == "judge"
    registry.adapter("judge").preflight()


def test_nothing_is_written_on_a_refusal(place: Place, tmp_path: Path) -> None:
    def no(said: Manifest, digest: str) -> None:
        raise Refusal("not_interactive", "nobody is here")

    here = Path(os.path.relpath(place.program))
    folder = attrs.evolve(place, program=tmp_path)
    plain = attrs.evolve(place, program=place.manifest)
    for code, call in {
        "not_interactive": lambda: place.add(confirm=no),
        "engine_not_found": lambda: attrs.evolve(place, program=tmp_path / "none").add(),
        "profile_exists": lambda: place.add(name="local"),
        "engine_env_reserved:LD_PRELOAD": lambda: place.add(env={"LD_PRELOAD": "/x"}),
        "engine_env_reserved:NCCL_*": lambda: place.add(approve_env=["NCCL_*"]),
    }.items():
        assert refused(call).code == code
    open_to_all = tmp_path / "open"
    open_to_all.write_text("#!/bin/sh\n")
    open_to_all.chmod(0o757)
    for program in (here, folder.program, plain.program, open_to_all):
        error = refused(attrs.evolve(place, program=program).add)
        assert (error.code, error.exit_code) == ("engine_unsupported", 17)
    assert refused(attrs.evolve(place, manifest=tmp_path / "none").add).code == "invalid_config"
    assert not place.engines_file.parent.exists() or not list(place.engines_file.parent.glob("*.yaml"))


def test_names_are_one_space_over_both_files_and_removal_finds_the_right_one(place: Place) -> None:
    place.add()
    assert refused(place.add).code == "profile_exists"
    assert refused(add_engine, ENVIRONMENT, engines_file=place.engines_file, name="judge").code == "profile_exists"
    add_engine(ENVIRONMENT, engines_file=place.engines_file)
    assert refused(place.add, name="llamacpp").code == "profile_exists"
    assert remove_engine("judge", engines_file=place.engines_file) == 2
    assert remove_engine("llamacpp", engines_file=place.engines_file) == 2
    assert "registered: none" in refused(remove_engine, "judge", engines_file=place.engines_file).message


def test_a_file_that_somebody_edited_is_refused_by_field(place: Place) -> None:
    place.add()
    path = place.engines_file.with_name("custom-engines.yaml")
    whole = yaml.safe_load(path.read_text())
    for change in (
        {"digest": "sha256:1"},
        {"program": "bin/judge"},
        {"manifest": {"api": "chat"}},
        {"extra": 1},
        {"revision": 0},
    ):
        block = {**whole["engines"]["judge"], **change}
        path.write_text(yaml.safe_dump({**whole, "engines": {"judge": block}}))
        error = refused(read_custom, path)
        assert error.code == "invalid_config"
        assert "engines.judge" in error.message


def test_a_changed_program_or_manifest_is_never_launched(place: Place) -> None:
    place.add()
    path = place.engines_file.with_name("custom-engines.yaml")
    registry = Registry(place.engines_file)
    registry.reload()
    place.program.write_text("#!/bin/sh\nexit 4\n")
    assert refused(registry.adapter("judge").preflight).code == "installation_drift"
    place.program.write_text("#!/bin/sh\nexit 3\n")
    registry.adapter("judge").preflight()
    whole = yaml.safe_load(path.read_text())
    whole["engines"]["judge"]["manifest"]["command"].append("--more")
    path.write_text(f"# capyctl-document-revision: 2\n{yaml.safe_dump(whole)}")
    registry.reload()
    error = refused(registry.adapter("judge").preflight)
    assert error.code == "installation_drift"
    assert "capyctl engine remove judge" in error.message
    place.program.unlink()
    assert refused(registry.adapter("judge").preflight).code == "installation_drift"


def test_without_an_idle_signal_nothing_proves_an_end(place: Place) -> None:
    assert not traits_of(place.add()).idle_signal
    place.write(idle={"path": "/metrics", "running": "server_active"})
    traits = traits_of(place.add(name="other"))
    assert traits.idle_signal
    assert [traits.parks, traits.abort_by_id, traits.cache_salt, traits.eof_proves_end] == [False] * 4


# --- what deployments may ask --------------------------------------------------------------------------


DEPLOYMENT = {"name": "j", "engine": "judge", "model": "m", "resources": {"gpu": "1GiB", "ram": "1GiB"}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"api": "decisions"}, "serves chat"),
        ({"resources": None}, "is required on custom"),
        ({"routes": ["--trust-me", "j"]}, "served name"),
        ({"residency": "deep", "resources": None}, "cannot park"),
        ({"engine_config": {"context_length": 9}}, "context_length"),
        ({"engine_config": {"memory": {"request": "1GiB"}}}, "resources"),
        ({"engine_config": {"vllm": {}}}, "vllm"),
        ({"engine_config": {"env": {"HF_HOME": "/x"}}}, "does not approve"),
        ({"engine_config": {"accept_extra_args": True, "extra_args": ["a\x1bb"]}}, "control characters"),
    ],
)
def test_a_deployment_says_nothing_that_its_program_is_not_told(place: Place, change: Any, says: str) -> None:
    registered = place.add()
    document = {name: value for name, value in {**DEPLOYMENT, **change}.items() if value is not None}
    assert says in refused(lambda: check_deployment(parse_deployment(document, "d"), registered)).message


def test_its_options_are_passed_unchecked(place: Place) -> None:
    registered = place.add(approve_env=["HF_*"])
    config = {
        "accept_extra_args": True,
        "extra_args": ["-x", "word", "--a=b", "--host", "--a=b"],
        "env": {"HF_HOME": "/x"},
    }
    check_deployment(parse_deployment({**DEPLOYMENT, "engine_config": config}, "d"), registered)
    assert ("option", "any", "passed", "the options of a custom engine are not checked") in flag_rows("custom")


# --- a running one ----------------------------------------------------------------------------------------


JSON_IDLE = {"path": "/status", "running": "/work/active", "waiting": "/work/queued"}
METRICS_IDLE = {"path": "/metrics", "running": "server_active", "waiting": "server_queued"}


@pytest.mark.parametrize("api", ["chat", "decisions"])
@pytest.mark.parametrize("idle", [JSON_IDLE, METRICS_IDLE])
async def test_it_is_ready_by_health_and_a_question_and_idle_as_it_says(
    tmp_path: Path, place: Place, api: str, idle: dict[str, str]
) -> None:
    server = lay_out("custom", "1.0", tmp_path / "server", load_s=0.05)
    place = attrs.evolve(place, program=server.executable)
    place.write(api=api, command=[*COMMAND, "--api", api], health="/healthz" if idle is JSON_IDLE else None, idle=idle)
    adapter = CustomAdapter(registered=place.add(args=["--slots", "2"]))
    assert not adapter.workers_listen
    facts = LaunchFacts(
        served_name="it",
        model_dir=write_checkpoint(tmp_path / "model", weights=1 << 20),
        document={**DEPLOYMENT, "api": api},
        context_tokens=4096,
        slots=4,
        allocation={},
        ready={},
        port=free_port(),
        key="k" * 40,
        device_env={"CUDA_VISIBLE_DEVICES": "GPU-7"},
        state_dir=tmp_path,
        log_path=tmp_path / "log",
    )
    async with started(adapter, facts) as running:
        client = running.client
        await adapter.verify(client, facts)
        assert await adapter.probe(client, facts, 10) > 0
        assert await adapter.gauges(client) == (0, 0, None)
        server.set(busy={"running": 2, "waiting": 1})
        assert await adapter.gauges(client) == (2, 1, None)
    (start,) = server.starts()
    assert start["argv"][-4:] == ["--api", api, "--slots", "2"]
    assert "k" * 40 not in str(start)
    environment = {name: value for name, value in start["env"].items() if not name.startswith("LC_")}
    assert environment == {
        "PATH": f"{server.executable.parent}:/usr/local/bin:/usr/bin:/bin",
        "CAPYCTL_ENGINE_LOG": str(tmp_path / "log"),
        "DO_NOT_TRACK": "1",
        "CUDA_VISIBLE_DEVICES": "GPU-7",
    }


@attrs.frozen
class Canned:
    """One answer to everything."""

    status: int
    body: bytes

    async def get(self, path: str, *, admin: bool = False) -> tuple[int, bytes]:
        return self.status, self.body

    async def post(
        self, path: str, body: bytes, limit_s: float | None = None, *, admin: bool = False
    ) -> tuple[int, bytes]:
        return self.status, self.body


@pytest.mark.parametrize(
    ("body", "read"),
    [
        (b'{"work": {"active": 0, "queued": false}}', (0, 0)),
        (b'{"work": {"active": 0.5, "queued": true}}', (1, 1)),
        (b'{"work": {"active": 0}}', None),
        (b'{"work": {"active": "0", "queued": 0}}', None),
        (b'{"work": {"active": -1, "queued": 0}}', None),
        (b'{"work": {"active": null, "queued": 0}}', None),
        (b'{"work": [0, 0]}', None),
        (b"idle", None),
    ],
)
async def test_what_is_no_count_is_no_reading(place: Place, body: bytes, read: tuple[int, int] | None) -> None:
    place.write(idle=JSON_IDLE)
    adapter = CustomAdapter(registered=place.add())
    if read is not None:
        assert await adapter.gauges(Canned(200, body)) == (*read, None)
        return
    with pytest.raises(CapyError) as caught:
        await adapter.gauges(Canned(200, body))
    assert caught.value.code == "engine_error"


async def test_an_engine_that_says_nothing_about_its_work_has_no_gauges(place: Place) -> None:
    adapter = CustomAdapter(registered=place.add())
    with pytest.raises(Refusal) as caught:
        await adapter.gauges(Canned(200, b"{}"))
    assert caught.value.code == "unsupported_capability"
    assert await adapter.loaded(Canned(404, b"")) is True  # without a health path whatever answers is alive


async def test_health_is_any_success_and_nothing_else(place: Place) -> None:
    place.write(health="/healthz")
    adapter = CustomAdapter(registered=place.add())
    for status, alive in ((200, True), (204, True), (301, False), (404, False), (500, False), (503, False)):
        assert await adapter.loaded(Canned(status, b"")) is alive
