"""`validate config` as its user sees it: what came out, what is left open, and what a bad file is answered with."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from capyctl.cli.app import run
from capyctl.documents import started
from capyctl.documents.settings import Stated, effective
from capyctl.server import lock
from tests.engines.checkpoints import write_checkpoint

GIB = 1 << 30
PROFILE = {"engine": "vllm", "executable": "/v/bin/vllm", "build_fingerprint": "0.32.0"}
SIZES = {"managed_limit": "40GiB", "free_reserve": "8GiB", "parked_limit": "20GiB"}


@attrs.frozen
class Said:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> dict[str, str]:
        """The key lines."""
        pairs = (line.strip().split("   ", 1) for line in self.out.splitlines() if line.startswith("  "))
        return {pair[0].strip(): pair[1].strip() for pair in pairs if len(pair) == 2}

    @property
    def left(self) -> list[str]:
        """What was not checked."""
        return [line.strip() for line in self.out.partition("Not checked\n")[2].splitlines()]


Command = Callable[..., Said]


@pytest.fixture
def validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`capyctl validate config …` in a home of its own, which is also the working directory."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    for name in [name for name in os.environ if name.startswith(("CAPYCTL_", "XDG_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)

    def command(*words: str) -> Said:
        status = run(["validate", "config", *words])
        said = capsys.readouterr()
        return Said(status, said.out, said.err)

    return command


def write(name: str, document: dict[str, Any]) -> str:
    Path(name).write_text(json.dumps(document))
    return name


def deployment(**more: Any) -> str:
    return write("d.yaml", {"name": "writer", "engine": "vllm", "model": "qwen", **more})


def host(name: str = "rack-a", **more: Any) -> str:
    domains = {
        "system": {"memory": "distinct", **SIZES},
        "gpu0": {"memory": "device", "device": "gpu0", **SIZES, "parked_limit": "4GiB"},
    }
    policy = {"domains": domains, "devices": {"gpu0": {"domain": "gpu0"}}, **more.pop("resource_policy", {})}
    document = {
        "schema_version": 1,
        "kind": "host",
        "name": name,
        "state_dir": "/var/lib/capyctl/host",
        "identity_dir": "/var/lib/capyctl/host/identity",
        "model_store": {"path": str(Path.cwd() / "models")},
        "resource_policy": policy,
        "runtime_profiles": {"vllm": PROFILE},
        **more,
    }
    return write(f"{name}.yaml", document)


def here(**profile: Any) -> None:
    """Register an engine on this machine."""
    place = Path(".config/capyctl")
    place.mkdir(parents=True, mode=0o700, exist_ok=True)
    body = {"schema_version": 1, "kind": "engines", "runtime_profiles": {"vllm": {**PROFILE, **profile}}}
    (place / "engines.yaml").write_text(f"# capyctl-document-revision: 1\n{json.dumps(body)}\n")
    (place / "engines.yaml").chmod(0o600)


def model(weights: int = 4 * GIB) -> None:
    write_checkpoint(Path("models/qwen"), weights=weights)


# --- what comes out -----------------------------------------------------------------------------------


def test_a_model_that_lies_here_is_sized_on_a_host_that_is_given(validate: Command) -> None:
    model()
    said = validate(deployment(), "--host", host())
    assert (said.status, said.err) == (0, "")
    assert said.out.startswith("d.yaml is a valid deployment document\n\n  Host ")
    lines = said.lines
    assert lines["Host"] == "rack-a (rack-a.yaml)"
    assert lines["Profile"] == "vllm 0.32.0, revision 1 (rack-a.yaml)"
    assert lines["Devices"] == "gpu0 (host)"
    assert lines["Request deadline"] == "600s (default of a host)"
    stated = host(resource_policy={"queue": {"request_deadline": "700s"}})
    assert validate(deployment(), "--host", stated).lines["Request deadline"] == "700s (host)"
    assert lines["Residency"] == (
        "host_backed (a copy of the weights fits into RAM: with the engine it needs 10.0 GiB of system on rack-a, "
        "and 20.0 GiB may be parked there)"
    )
    assert lines["Parked"] == "1.0 GiB on gpu0 (placeholder), 10.0 GiB on system (derived)"
    assert " on gpu0, " in lines["Ready"]
    assert "by model family" in lines["Parsers"]
    assert "fitted to" in lines["Context"]
    assert set(lines) >= {"Startup", "KV cache", "Requests", "Initialize", "Wake", "Request deadline"}
    assert said.left == [
        "enrolment and publication",
        "the stored resource policy, and whether the limits fit what the host has",
        "route and name conflicts",
        "the digest of a new checkpoint",
        "what others use of that memory when it starts",
    ]


def test_cards_that_hold_the_same_stand_together(validate: Command) -> None:
    model()
    cards = {f"gpu{n}": {"memory": "device", "device": f"gpu{n}", **SIZES, "parked_limit": "4GiB"} for n in (0, 1)}
    policy = {
        "domains": {"system": {"memory": "distinct", **SIZES}, **cards},
        "devices": {name: {"domain": name} for name in cards},
    }
    said = validate(deployment(topology={"tensor_parallel": 2}), "--host", host(resource_policy=policy))
    assert re.fullmatch(r"[0-9.]+ GiB on each of gpu0,gpu1, [0-9.]+ GiB on system \(derived\)", said.lines["Ready"])
    assert said.lines["Parked"].startswith("1.0 GiB on each of gpu0,gpu1 (placeholder), ")
    assert " on each of gpu0,gpu1" in said.lines["Limits"]


def test_a_request_deadline_below_what_a_start_needs_is_said(validate: Command) -> None:
    model()
    said = validate(deployment(request_deadline="1s"), "--host", host())
    assert said.status == 0
    assert "request_deadline, 1s, bounds a start of " in said.err
    assert "--initialize-timeout 643s" in said.err
    assert said.lines["Initialize"] == "1s (lowered to request_deadline)"
    assert validate(deployment(request_deadline="120s"), "--host", host()).err == ""


def test_what_the_document_states_is_told_from_what_was_derived(validate: Command) -> None:
    model()
    stated = {
        "residency": "deep",
        "runtime_profile_revision": 1,
        "host": "rack-a",
        "devices": [{"id": "gpu0"}],
        "request_deadline": "300s",
        "timeouts": {"initialize": "200s", "wake": "100s"},
        "engine_config": {
            "context_length": 4096,
            "max_concurrent_requests": 3,
            "memory": {"kv_cache": "3GiB"},
            "vllm": {"tool_call_parser": "hermes", "reasoning_parser": "none"},
        },
    }
    lines = validate(deployment(**stated), "--host", host()).lines
    assert {name: lines[name] for name in ("Devices", "Residency", "Context", "Requests", "KV cache")} == {
        "Devices": "gpu0 (deployment)",
        "Residency": "deep (the document states it)",
        "Context": "4096 tokens (deployment)",
        "Requests": "3 at a time (deployment)",
        "KV cache": "3.0 GiB (deployment)",
    }
    assert lines["Parsers"] == "tool calls hermes (declared), reasoning none (turned off)"
    assert [lines[name] for name in ("Initialize", "Wake", "Request deadline")] == [
        "200s (deployment)",
        "100s (deployment)",
        "300s (deployment)",
    ]
    assert lines["Profile"].endswith("revision 1 (deployment)")


def test_json_has_the_completed_document_and_the_whole_plan(validate: Command) -> None:
    model()
    profiles = {"vllm": {**PROFILE, "env": {"SOME_KEY": "not to be shown"}}}
    said = validate(deployment(), "--host", host(runtime_profiles=profiles), "--json")
    answer = json.loads(said.out)
    assert (answer["valid"], answer["kind"], answer["document"]["routes"]) == (True, "deployment", ["writer"])
    (found,) = answer["resolved"]
    assert (found["host"], found["residency"]["value"]) == ("rack-a", "host_backed")
    assert found["host_document"]["resource_policy"]["queue"]["request_deadline"] == "600s"
    assert found["host_document"]["runtime_profiles"]["vllm"]["env"] == {"SOME_KEY": "<redacted>"}
    assert "not to be shown" not in said.out
    assert set(found["plan"]["phases"]) == {"cold", "ready", "parking", "parked", "wake"}
    assert found["plan"]["facts"]["tool_call_parser_source"] == "model_family"
    assert "route and name conflicts" in answer["not_checked"]


def test_this_machine_is_asked_when_no_host_is_given(validate: Command) -> None:
    without = validate(deployment()).left[0]
    assert without.startswith(
        "this machine: no engine vllm is registered here, so a deploy would be refused; add one with"
    )
    assert "`capyctl engine add <path>`" in without
    source = {"type": "http", "url": "http://mirror.example/m.gguf", "sha256": "a" * 64}
    assert validate(deployment(model={"source": source})).err.startswith(
        "error [not_materializable]: d.yaml: writer: model: "
    )
    here()
    missing = validate(deployment())
    assert (missing.status, "models/qwen is not there" in missing.err) == (13, True)
    model(64 << 20)
    said = validate(deployment())
    assert said.status == 0, said.err
    assert said.lines["Profile"] == "vllm 0.32.0, revision 1 (engines.yaml)"
    assert said.lines["Host"].endswith("(this machine)")
    elsewhere = validate(deployment(host="rack-b"))
    assert elsewhere.left[0] == "resolution against rack-b (give --host <host.yaml>)"


def test_why_a_model_will_only_restart_is_said_before_it_is_deployed(validate: Command) -> None:
    model(64 << 20)
    here(security={"deep_park": "disabled"})
    opted_out = validate(deployment()).lines["Residency"]
    assert opted_out == "restart_only (this host opted out: the profile vllm has security.deep_park: disabled)"
    here(security={"deep_park": "disabled"}, installation_lacks="a sleep mode on this device")
    lacking = validate(deployment()).lines["Residency"]
    assert lacking == "restart_only (the build of vllm cannot park: it lacks a sleep mode on this device)"


def test_files_of_another_machine_leave_memory_open_and_everything_else_checked(validate: Command) -> None:
    said = validate(deployment(model="/srv/models/qwen"), "--host", host())
    assert said.status == 0, said.err
    assert said.left[0] == (
        "the model's files on rack-a, and with them memory and context: /srv/models/qwen is not on this machine"
    )
    assert "Startup" not in said.lines
    assert said.lines["Residency"] == "by hardware and model, once its files are seen"


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "status", "said"),
    [
        ({"engine": "nosuch"}, 24, "there is no engine profile nosuch; registered: vllm"),
        ({"runtime_profile_revision": 2}, 24, "pins revision 2"),
        ({"host": "rack-b"}, 2, "no --host document of rack-b"),
        ({"devices": [{"id": "gpu4"}], "host": "rack-a"}, 15, "rack-a does not have the device gpu4"),
        ({"request_deadline": "700s"}, 2, "the host's bound is 600s"),
        ({"engine_config": {"memory": {"request": "2GiB"}}}, 2, "error [checkpoint_unusable]"),
        ({"engine_config": {"memory": {"request": "60GiB"}}}, 4, "error [insufficient_device_memory]"),
        ({"engine_config": {"env": {"SOME": "x"}}}, 2, "error [engine_env_not_approved:SOME]"),
        ({"engine_config": {"accept_extra_args": True, "extra_args": ["--host", "::"]}}, 2, "--host is reserved"),
        ({"resources": {"gpu": "1GiB", "ram": "90GiB"}}, 4, "error [insufficient_resources]"),
        ({"resources": {"gpu": "0B", "ram": "1GiB"}}, 2, "d.yaml: resources.gpu: is 0B"),
        ({"residency": "host_backed", "engine_config": {"memory": {"request": "1GiB"}}}, 2, "checkpoint_unusable"),
        ({"api": "decisions"}, 5, "error [capability_missing:decisions]"),
        ({"model": {"hf": "a/b"}}, 2, "model: a/b is not pinned to a commit"),
        (
            {"model": {"source": {"type": "huggingface", "repo": "a/b", "revision": "main"}}},
            2,
            "model: a/b@main is not",
        ),
        ({"model": {"path": "m", "draft": {"hf": "a/b"}}}, 2, "model.draft: a/b is not pinned to a commit"),
    ],
)
def test_what_deploy_would_refuse_is_refused_with_its_code_in_one_line(
    validate: Command, document: dict[str, Any], status: int, said: str
) -> None:
    model()
    refused = validate(deployment(**document), "--host", host())
    assert (refused.status, refused.out, refused.err.count("\n")) == (status, "", 1), refused
    assert said in refused.err
    assert "]: d.yaml: " in refused.err or "no --host document" in refused.err


def test_host_documents_are_matched_by_name(validate: Command) -> None:
    a, b = host("rack-a"), host("rack-b")
    both = deployment(placement={"hosts": ["rack-b", "rack-a"]})
    model()
    said = validate(both, "--host", a, "--host", b)
    assert [line.split()[1] for line in said.out.splitlines() if line.startswith("  Host ")] == ["rack-b", "rack-a"]
    assert "no --host document of rack-b" in validate(both, "--host", a).err
    assert "was given already" in validate(both, "--host", a, "--host", a).err
    one = deployment(host="rack-a")
    assert "--host gives rack-b" in validate(one, "--host", a, "--host", b).err
    assert "is a deployment document; expected a host document" in validate(one, "--host", "d.yaml").err
    assert "--host is for deployments" in validate(a, "--host", b).err
    other = host("rack-b", runtime_profiles={"own": PROFILE})
    refused = validate(deployment(engine="own"), "--host", a, "--host", other).err
    assert refused.startswith("error [profile_not_published]: d.yaml: rack-a.yaml: there is no engine profile own;")


def test_a_role_document_is_checked_as_its_start_would(validate: Command) -> None:
    plain = {"kind": "standalone"}  # a start has defaults for the rest
    said = validate(write("s.yaml", plain))
    assert said.out.startswith("s.yaml is a valid standalone document\n\nNot checked\n")
    assert any("listeners' addresses" in line for line in said.left)
    assert effective(Stated(config="s.yaml", cwd=os.getcwd(), environ=os.environ)).document.name == "local"
    low = validate("s.yaml", "--set", "host.resource_policy.queue.request_deadline=1")
    assert (low.status, "--set host.resource_policy.queue.request_deadline" in low.err) == (2, True)
    kept = validate(write("s.yaml", {**plain, "host": {"engine_logs": "memory"}}))
    assert (kept.status, kept.err.startswith("error [unsupported]: host.engine_logs: memory")) == (5, True)
    assert validate("s.yaml", "--set", "host.engine_logs=file").status == 0


def test_what_a_start_on_this_machine_would_refuse_of_its_document_is_refused(validate: Command) -> None:
    plain = {"kind": "standalone", "state_dir": "beside"}  # relative to its document, as a start reads it
    assert (
        json.loads(validate(write("s.yaml", plain), "--json").out)["document"]["state_dir"] == f"{os.getcwd()}/beside"
    )
    much = validate("s.yaml", "--set", "host.resource_policy.memory.system.managed_limit=900TiB")
    assert (much.status, "do not fit into the" in much.err) == (2, True)
    assert validate("s.yaml", "--set", "host.local_engine.llamacpp=/nope/llama-server").err == (
        "error [engine_version_failed]: /nope/llama-server cannot be run: No such file or directory\n"
    )
    write("llama-server", {})
    here = f"host.local_engine.llamacpp={os.getcwd()}/llama-server"
    assert "cannot be run: Permission denied" in validate("s.yaml", "--set", here).err
    os.chmod("llama-server", 0o755)
    assert "host.local_engine.llamacpp: whether it runs, and its version" in validate("s.yaml", "--set", here).left
    elsewhere = write("s.yaml", {**plain, "server": {"state_dir": "/elsewhere"}})
    assert "s.yaml: server.state_dir: is /elsewhere; it can only be" in validate(elsewhere).err
    assert not Path("beside").exists()


def test_what_a_running_role_was_started_with_is_used_and_said(
    validate: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = "host.resource_policy.memory.system.managed_limit"
    with_set = Stated(
        environ=os.environ, cwd=os.getcwd(), overrides=[f"{limit}=1GiB"], flags={"--listen": "127.0.0.1:1"}
    )
    role = effective(with_set)
    os.makedirs(role.places.run, mode=0o700)
    started.keep(role)
    model(64 << 20)
    here()
    assert validate(deployment()).err == ""  # it does not run
    with lock.held(Path(role.places.role_lock), "standalone"):
        said = validate(deployment(model=f"{os.getcwd()}/models/qwen"))
        line = f"a role runs here (pid {os.getpid()}) with other settings: {limit} 1GiB (set), "
        assert said.err.startswith(line)
        assert "server.listeners.inference.bind 127.0.0.1:1 (flag); they are used\n" in said.err
        assert (said.status, "at most 1.0 GiB may be used there" in said.err) == (4, True)
        assert run(["config", "show"]) == 0
        shown = capsys.readouterr()
        assert (shown.err.startswith(line), f"{limit}   " in shown.out) == (True, True)
        of_a_start = validate(write("s.yaml", {"kind": "standalone"})).err
        assert f"engines of {os.getcwd()}/.config/capyctl/engines.yaml, {limit} 1GiB (set)" in of_a_start
        Path(role.places.started).write_text("{}")  # of another release
        assert validate(deployment(model=f"{os.getcwd()}/models/qwen")).err == ""


def test_files_that_are_no_documents_are_named_in_one_line(validate: Command) -> None:
    Path("adir").mkdir()
    Path("binary.yaml").write_bytes(bytes(range(256)))
    Path("empty.yaml").write_text("")
    Path("big.yaml").write_text("name: x\n" + "#" * 10_000_000)
    for name, said in (
        ("missing.yaml", "No such file"),
        ("adir", "is a directory"),
        ("binary.yaml", "is not UTF-8"),
        ("empty.yaml", "is empty"),
        ("big.yaml", "is larger than 1 MiB"),
        ("/dev/zero", "is a device"),
    ):
        refused = validate(name)
        assert (refused.status, refused.out, refused.err.count("\n")) == (2, "", 1)
        assert refused.err.startswith(f"error [invalid_config]: {name}")
        assert said in refused.err


def test_an_engines_file_that_cannot_be_used_is_named(validate: Command) -> None:
    here()
    Path(".config/capyctl/engines.yaml").chmod(0o666)
    refused = validate(deployment())
    assert (refused.status, refused.out) == (13, "")
    assert refused.err.startswith("error [unsafe_file]: ")
    assert "chmod" in refused.err
    Path(".config/capyctl/engines.yaml").chmod(0o600)
    Path(".config/capyctl/engines.yaml").write_text("# capyctl-document-revision: 1\nkind: other\n")
    assert validate(deployment()).err.startswith(f"error [invalid_config]: {Path.cwd()}/.config/capyctl/engines.yaml")
