"""Commands that need no role: grammar, documents, settings, engines files."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Shell

from capyctl.cli.config_show import fitted


def test_version_answers_without_importing_the_commands(shell: Shell) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "capyctl", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=shell.environ(), check=True, timeout=30)
    assert re.fullmatch(r"capyctl \d+\.\d+\.\d+\S*\n", done.stdout)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"cyclopts", "attrs", "trio", "yaml", "rich", "capyctl.cli.app"}


@pytest.mark.parametrize(("words", "reads_documents"), [(("list", "deployments"), False), (("engine", "list"), True)])
def test_commands_import_no_event_loop_and_a_document_reader_only_to_read_one(
    shell: Shell, words: tuple[str, ...], reads_documents: bool
) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "capyctl", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=shell.environ(), check=False, timeout=30)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "cyclopts" in loaded
    assert not loaded & {"trio", "quart", "httpx", "hypercorn", "rich", "asyncio"}
    assert loaded & {"cattrs", "yaml"} == ({"cattrs", "yaml"} if reads_documents else set())


@pytest.mark.parametrize(
    ("words", "status", "first"),
    [
        ((), 2, ""),
        (("--help",), 0, ""),
        (("start", "deployment", "--help"), 0, ""),
        (("bogus",), 2, "error [invalid_config]: Unknown command 'bogus' after 'capyctl'"),
        (("start",), 2, "error [invalid_config]: A word is missing after 'capyctl start'"),
        (("start", "nothing"), 2, "error [invalid_config]: Unknown command 'nothing' after 'capyctl start'"),
        (("list", "deployments", "extra"), 2, "error [invalid_config]: "),
        (("list", "deployments", "--bogus"), 2, "error [invalid_config]: Unknown option: --bogus."),
        (("list", "deployments", "--no-json"), 2, "error [invalid_config]: Unknown option: --no-json."),
        (("list", "deployments", "--format", "xml"), 2, "error [invalid_config]: --format xml: expected text or json"),
        (("start", "server"), 5, "error [unsupported]: "),
        (("start", "host"), 5, "error [unsupported]: "),
        (("deploy", "model"), 2, "error [invalid_config]: "),
    ],
)
def test_the_grammar_exits_as_written(shell: Shell, words: tuple[str, ...], status: int, first: str) -> None:
    done = shell(*words)
    assert done.status == status
    if first:
        assert done.err.startswith(first)
        assert done.out == ""
    else:
        assert done.out.startswith("Usage: capyctl")
        assert done.err == ""


def test_validate_says_what_it_could_not_check(shell: Shell) -> None:
    (shell.home / "d.yaml").write_text("name: tiny\nengine: llamacpp\nmodel: tiny\n")
    done = shell("validate", "config", "--file", "d.yaml")
    assert (done.status, done.out.splitlines()[:4]) == (
        0,
        [
            "d.yaml is a valid deployment document",
            "",
            "Not checked",
            "  this machine: no engine llamacpp is registered here, so a deploy would be refused; add one with "
            "`capyctl engine add <path>` (`capyctl engine detect` lists what is installed)",
        ],
    )
    completed = json.loads(shell("validate", "config", "--file", "d.yaml", "--json").out)["document"]
    assert completed["routes"] == ["tiny"]
    (shell.home / "d.yaml").write_text("name: tiny\nengine: llamacpp\nmodel: tiny\nengine_config: {memry: {}}\n")
    done = shell("validate", "config", "--file", "d.yaml")
    assert (done.status, done.err) == (
        2,
        "error [invalid_config]: d.yaml: engine_config.memry: is not a field here; did you mean memory?\n",
    )


def test_validate_resolves_against_host_documents(shell: Shell) -> None:
    assert shell("init", "host", "--output", "h.yaml").status == 0
    (shell.home / "d.yaml").write_text("name: tiny\nengine: llamacpp\nmodel: tiny\n")
    with (shell.home / "h.yaml").open("a") as file:
        file.write("runtime_profiles: {mine: {engine: llamacpp, executable: /x, build_fingerprint: '1'}}\n")
    done = shell("validate", "config", "--file", "d.yaml", "--host", "h.yaml")
    assert done.status == 0, done.err
    assert "mine 1, revision 1 (h.yaml)" in done.out
    assert "tiny is not on this machine" in done.out


def test_help_is_for_what_works_in_this_release(shell: Shell) -> None:
    assert "--version" in shell("--help").out
    shown = shell("start", "standalone", "--help").out
    assert "--engine-ports" in shown
    for word in ("runtime-dir", "peer-address", "rendezvous-ports", "require-rdma", "debug-engine-logs"):
        assert word not in shown
    assert "later release" in shell("init", "--help").out


def test_init_writes_documents_that_validate_and_overwrites_nothing(shell: Shell) -> None:
    for kind in ("server", "host"):
        done = shell("init", kind, "--output", f"{kind}.yaml")
        assert done.out.startswith(f"Wrote {kind}.yaml\n\n  State directory")
        assert done.err == f"This release runs one machine: no {kind} role of it starts with this document yet.\n"
        checked = shell("validate", "config", "--file", f"{kind}.yaml").out
        assert checked.startswith(f"{kind}.yaml is a valid {kind} document\n\nNot checked\n")
        assert shell("init", kind, "--output", f"{kind}.yaml").status == 2
        assert (shell.home / f"{kind}.yaml").stat().st_mode & 0o077 == 0
        shown = shell("config", "show", "--config", f"{kind}.yaml").out.splitlines()
        assert shown[0] == f"{kind} (document {shell.home}/{kind}.yaml)"
    assert shell("init", "server", "--output", "s.json").status == 0
    assert json.loads((shell.home / "s.json").read_text())["kind"] == "server"


def test_init_writes_no_second_role_beside_a_standalone_one(shell: Shell) -> None:
    config = shell.home / "state" / "config"
    config.mkdir(parents=True, mode=0o700)
    config.parent.chmod(0o700)
    (config / "standalone.yaml").write_text("schema_version: 1\nkind: standalone\nname: local\n")
    for role in ("server", "host"):
        done = shell("init", role, "--state-dir", str(config.parent))
        assert (done.status, done.err.partition(";")[0]) == (
            2,
            f"error [invalid_config]: {config.parent} is the state of a standalone role, and two roles share none",
        )
        assert [file.name for file in config.iterdir()] == ["standalone.yaml"]


def test_config_show_names_the_source_of_each_setting(shell: Shell) -> None:
    (shell.home / "s.yaml").write_text(
        "schema_version: 1\nkind: standalone\nname: local\nhost: {model_sources: {max_bytes: 200GiB}}\n"
    )
    done = shell(
        "config",
        "show",
        "--config",
        "s.yaml",
        "--set",
        "host.resource_policy.memory.system.managed_limit=75%",
        CAPYCTL_DEEP_PARK="off",
        CAPYCTL_SET__SERVER__LISTENERS__INFERENCE__BIND="127.0.0.1:9443",
    )
    assert done.status == 0, done.err
    rows = {line.split()[0]: line.split()[1:] for line in done.out.splitlines()[2:]}
    assert rows["host.local_engine.deep_park"] == ["off", "env"]
    assert rows["host.model_sources.max_bytes"] == ["200GiB", "yaml"]
    assert rows["host.resource_policy.memory.system.managed_limit"] == ["75%", "set"]
    assert rows["server.listeners.inference.bind"] == ["127.0.0.1:9443", "env"]
    assert rows["shutdown.drain_timeout"] == ["30s", "default"]
    assert list(rows) == sorted(rows)
    assert not shell.state.exists(), "showing writes nothing"


@pytest.mark.parametrize(
    ("words", "environ", "blamed"),
    [
        (("--set", "host.resorce_policy.queue.request_deadline=3s"), {}, "host.resource_policy.queue.request_deadline"),
        (("--set", "host.resource_policy.queue=3s"), {}, "is a block; set one of"),
        (("--set", "host.resource_policy.queue.request_deadline=3"), {}, "--set host.resource_policy.queue.request"),
        ((), {"CAPYCTL_INFERENCE_ADDR": "localhost:1"}, "CAPYCTL_INFERENCE_ADDR: server.listeners.inference.bind"),
        ((), {"CAPYCTL_DEEP_PARK": ""}, "CAPYCTL_DEEP_PARK"),
        ((), {"CAPYCTL_SET__NOPE": "1"}, "CAPYCTL_SET__NOPE"),
        (("--set", "host.model_sources.huggingface_token_file=/x"), {}, "secrets"),
        (("--config", "absent.yaml"), {}, "--config: there is no document"),
    ],
)
def test_a_refused_setting_names_who_stated_it(
    shell: Shell, words: tuple[str, ...], environ: dict[str, str], blamed: str
) -> None:
    done = shell("config", "show", *words, **environ)
    assert done.status == 2
    assert blamed in done.err
    assert done.err.count("\n") == 1


def test_engines_are_detected_registered_listed_and_removed_without_a_role(shell: Shell) -> None:
    environment = str(Path(sys.prefix))
    more = {"XDG_CONFIG_HOME": str(shell.home / "config")}
    detected = json.loads(shell("engine", "detect", "--path", environment, "--json", **more).out)
    assert [row["engine"] for row in detected] == ["llamacpp"]
    done = shell("engine", "add", environment, "--name", "mine", "--arg", "--threads", "--arg", "1", **more)
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("Registered mine (llamacpp ")
    assert [line.split("  ")[1].strip() for line in lines[2:6]] == [
        "Executable",
        "Deep park",
        "Engines file",
        "Published",
    ]
    assert "when capyctl starts" in done.out
    assert str(shell.state / "control.sock") in done.out
    assert shell("engine", "add", environment, "--name", "mine", **more).status == 19
    assert shell("engine", "add", **more).status == 23
    assert shell("engine", "add", "/nonexistent", **more).status == 16
    shell.state.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:  # as a killed role leaves it: nobody listens
        left.bind(str(shell.state / "control.sock"))
    done = shell("engine", "list", **more)
    assert (done.status, done.err) == (0, ""), "a name that was taken before is no matter of a list"
    listed = done.out.splitlines()
    assert listed[0].split() == [
        "PROFILE",
        "SOURCE",
        "ENGINE",
        "VERSION",
        "CUSTOM",
        "DEEP",
        "PARK",
        "PUBLISHED",
        "DEPLOYMENTS",
    ]
    assert listed[1].split()[:3] == ["mine", "engines.yaml", "llamacpp"]
    assert listed[1].split()[-2:] == ["unknown", "-"]
    assert shell("engine", "remove", "other", **more).status == 2
    assert shell("engine", "remove", "mine", **more).out.startswith("Removed mine\n\n  Engines file   ")
    done = shell("engine", "list", **more)
    assert (done.status, len(done.out.splitlines())) == (0, 1)


def test_flags_of_a_family_have_a_class_and_a_reason(shell: Shell) -> None:
    rows = json.loads(shell("engine", "flags", "llamacpp", "--json").out)
    assert {row["class"] for row in rows} >= {"owned", "reserved", "approval", "passed"}
    assert all(row["why"] for row in rows)
    assert shell("engine", "flags", "another").status == 17
    for family in ("vllm", "sglang", "tensorfold", "llamacpp", "custom"):
        kinds = [line[:11].strip() for line in shell("engine", "flags", family).out.splitlines()]
        rows = json.loads(shell("engine", "flags", family, "--json").out)
        assert [kind for kind in kinds if kind] == ["KIND", *(row["kind"] for row in rows)]


def test_a_document_named_explicitly_is_never_written(shell: Shell) -> None:
    done = shell("start", "standalone", "--config", "absent.yaml")
    assert done.status == 2
    assert not (shell.home / "absent.yaml").exists()
    assert not os.path.exists(shell.state)


def test_settings_fit_their_terminal_and_lose_nothing() -> None:
    rows = [
        ("SETTING", "VALUE", "SOURCE"),
        ("a.long.name.of.a.setting", "30s", "default"),
        ("b", "/" + "p" * 40, "yaml"),
    ]
    for columns in (200, 100, 60, 20):
        lines = fitted(rows, columns)
        assert [word for line in lines for word in line.split()] == [word for row in rows for word in row]
        assert max(map(len, lines)) <= max(columns, 2 + 41 + 3 + 7)
    assert len(fitted(rows, 100)) == 3
    assert len(fitted(rows, 60)) == 4


@pytest.mark.parametrize(("words", "status"), [(("nonsense",), 2), (("engine", "flags", "another"), 17)])
def test_the_exit_status_is_the_errors_own_though_the_disk_that_takes_the_output_is_full(
    shell: Shell, words: tuple[str, ...], status: int
) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "capyctl", *words]
        done = subprocess.run(command, stdout=full, stderr=full, env=shell.environ(), check=False, timeout=30)
    assert done.returncode == status
