"""Finding, registering and removing installations, and the file that remembers them."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capyctl.documents.blocks import EngineProfile, LocalEngine
from capyctl.documents.deployment import parse_deployment
from capyctl.engines.check import check_deployment
from capyctl.engines.detect import detect, holds_one
from capyctl.engines.engines_file import DOCUMENT_BYTES_MAX, put_profile, read_engines, remove_profile
from capyctl.engines.families import FAMILIES, family, flag_rows
from capyctl.engines.llamacpp import installation
from capyctl.engines.llamacpp.installation import fingerprint, read_version
from capyctl.engines.register import add_custom, add_engine, locate, remove_engine
from capyctl.engines.registered import Registered
from capyctl.engines.registry import Registry
from capyctl.errors import CapyError, Refusal
from capyctl.units import Size

from .conftest import ENVIRONMENT, PYTHON

GOOD = 'echo "version: 0.7.0 (build 11600, commit abc1234)" >&2; echo "built with cc for linux" >&2'


def code_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CapyError) as caught:
        call(*args, **kwargs)
    assert "\n" not in caught.value.message
    return caught.value.code


def binary(directory: Path, script: str = GOOD) -> Path:
    """A program named like the real one; a shell script does what the test needs."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "llama-server"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def profile(name: str, **fields: Any) -> Registered:
    return Registered(
        name=name,
        profile=EngineProfile(
            engine="llamacpp",
            executable="/opt/llama-server",  # type: ignore[arg-type]
            build_fingerprint="1+a",
            **fields,
        ),
    )


@pytest.fixture
def engines_file(tmp_path: Path) -> Path:
    return tmp_path / "conf" / "engines.yaml"


# --- locating --------------------------------------------------------------------------------------


def test_a_binary_its_directory_an_environment_its_bin_and_its_interpreter_are_found(tmp_path: Path) -> None:
    path = binary(tmp_path / "bin")
    for given in (path, tmp_path / "bin", tmp_path):
        assert locate(given)[1].executable == path
    for given in (ENVIRONMENT, ENVIRONMENT / "bin", Path(PYTHON), ENVIRONMENT / "bin" / "python3"):
        found = locate(given)[1]
        assert found.executable == Path(PYTHON)
        assert re.fullmatch(r"\d{4}\.\d+\.\d+", found.version)


def test_what_is_no_engine_is_told_apart(tmp_path: Path) -> None:
    assert code_of(locate, tmp_path / "none") == "engine_not_found"
    assert code_of(locate, tmp_path) == "engine_not_found"
    (tmp_path / "program").write_text("x")
    assert code_of(locate, tmp_path / "program") == "engine_unsupported"
    (tmp_path / "llama-server").write_text("not executable")
    assert code_of(locate, tmp_path / "llama-server") == "engine_unsupported"


def test_a_linked_binary_is_refused_with_its_target(tmp_path: Path) -> None:
    path = binary(tmp_path / "real")
    (tmp_path / "llama-server").symlink_to(path)
    with pytest.raises(Refusal, match=str(path)) as caught:
        locate(tmp_path / "llama-server")
    assert caught.value.code == "engine_unsupported"


def test_a_library_beside_the_binary_tells_its_version(tmp_path: Path) -> None:
    path = binary(tmp_path / "bin")
    assert locate(path)[1].version == "unknown"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libllama.so.0.7.1").write_text("x")
    assert locate(path)[1].version == "0.7.1"


# --- running it once -------------------------------------------------------------------------------


def test_the_version_is_read_from_standard_error(tmp_path: Path) -> None:
    version = read_version(binary(tmp_path))
    assert (version.version, version.build, version.commit) == ("0.7.0", 11600, "abc1234")
    assert version.fingerprint == "0.7.0+abc1234"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ('echo "version: 0.7.0 (build 1, commit abc)"', "engine_unsupported"),  # on standard output
        ('echo "version: 4567 (abcdef0)" >&2', "engine_unsupported"),
        ("true", "engine_unsupported"),
        (r"printf 'version: \033[31m7 (build 5, commit abc1234)\n' >&2", "engine_unsupported"),
        (f"printf 'version: {'9' * 65} (build 5, commit abc1234)\\n' >&2", "engine_unsupported"),
        ("exit 3", "engine_version_failed"),
        ("kill -KILL $$", "engine_version_failed"),
        (f"{GOOD}; exit 1", "engine_version_failed"),
        ("head -c 8000 /dev/zero >&2", "engine_version_failed"),
        ("sleep 30", "engine_version_failed"),
        (f"{GOOD}; exec >&- 2>&-; sleep 30", "engine_version_failed"),
    ],
)
def test_a_program_that_does_not_say_its_version_is_refused(tmp_path: Path, script: str, code: str) -> None:
    assert code_of(read_version, binary(tmp_path, script), 0.6) == code


def test_the_program_gets_no_variable_of_ours_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_CALLER", "x")
    path = binary(tmp_path, f'env > "{tmp_path}/env"; sleep 60 >&- 2>&- & echo $! > "{tmp_path}/child"; {GOOD}')
    read_version(path)
    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert names - {"PWD", "SHLVL", "_", "OLDPWD"} == {"PATH"}
    child = int((tmp_path / "child").read_text())
    ends = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split(") ")[1][:1]:
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_the_digest_covers_the_binary_and_its_libraries(tmp_path: Path) -> None:
    path = binary(tmp_path / "bin")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libllama.so.0.7.1").write_text("x")
    (tmp_path / "lib" / "libllama.so").symlink_to("libllama.so.0.7.1")
    seen = [fingerprint(path), fingerprint(path)]
    assert seen[0] == seen[1]
    (tmp_path / "lib" / "readme").write_text("x")
    assert fingerprint(path) == seen[0]
    (tmp_path / "lib" / "libllama.so.0.7.1").write_text("y")
    seen.append(fingerprint(path))
    (tmp_path / "lib" / "libllama.so").unlink()
    (tmp_path / "lib" / "libllama.so").symlink_to("libllama.so.9")
    seen.append(fingerprint(path))
    path.write_text("#!/bin/sh\nfalse\n")
    seen.append(fingerprint(path))
    assert len(set(seen)) == 4
    assert fingerprint(tmp_path / "none" / "llama-server") is None


# --- engine add, list, remove ----------------------------------------------------------------------


@pytest.mark.engine
def test_the_wheels_environment_is_registered_with_what_lists_show(engines_file: Path) -> None:
    added = add_engine(ENVIRONMENT, engines_file=engines_file, args=["--threads", "1"])
    result = added.as_json()
    assert result["profile"] == result["engine"] == "llamacpp"
    assert (result["executable"], result["custom"], result["deep_park"]) == (PYTHON, True, "disabled")
    assert result["fingerprint"]["version"].startswith(result["version"] + "+")
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", result["fingerprint"]["digest"])
    registry = Registry(engines_file)
    registry.reload()
    (row,) = registry.profiles()
    assert row == added.registered
    assert registry.fixed_args("llamacpp") == ("--threads", "1")
    assert registry.adapter("llamacpp").family == "llamacpp"


def test_a_binary_is_registered_under_a_name(tmp_path: Path, engines_file: Path) -> None:
    path = binary(tmp_path / "bin")
    options = {"approve_options": ["--lora"], "approve_paths": ["/srv/lora/"], "approve_env": ["OMP_*"]}
    added = add_engine(path, engines_file=engines_file, name="mine", drift="refuse", env={"OMP_X": "1"}, **options)
    text = engines_file.read_text()
    assert text.startswith("# capyctl-document-revision: 1\nschema_version: 1\nkind: engines\n")
    read = read_engines(engines_file).profiles["mine"]
    assert read == added.registered
    assert (read.version, read.profile.security.installation_drift) == ("0.7.0", "refuse")
    assert read.consent.paths == ("/srv/lora",)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"name": "local"}, "profile_exists"),
        ({"name": "local-llamacpp"}, "profile_exists"),
        ({"name": "Bad/Name"}, "invalid_config"),
        ({"name": "there"}, "profile_exists"),
        ({"name": "stated"}, "profile_exists"),
        ({"deep_park": "enabled"}, "capability_missing:deep_park"),
        ({"allow_remote_code": True}, "invalid_config"),
        ({"args": ["--host", "0.0.0.0"]}, "invalid_config"),
        ({"args": ["-c", "99"]}, "invalid_config"),
        ({"env": {"LD_PRELOAD": "x"}}, "engine_env_reserved:LD_PRELOAD"),
        ({"approve_env": ["*"]}, "invalid_config"),
        ({"approve_env": ["LD_*"]}, "engine_env_reserved:LD_*"),
        ({"approve_options": ["--host"]}, "invalid_config"),
        ({"approve_paths": ["relative"]}, "invalid_config"),
    ],
)
def test_a_refusal_comes_before_the_program_runs_and_writes_nothing(
    tmp_path: Path, engines_file: Path, options: dict[str, Any], code: str
) -> None:
    put_profile(engines_file, profile("there"))
    before = engines_file.read_bytes()
    path = binary(tmp_path / "bin", f'touch "{tmp_path}/ran"; {GOOD}')
    assert code_of(add_engine, path, engines_file=engines_file, taken=["stated"], **options) == code
    assert engines_file.read_bytes() == before
    assert not (tmp_path / "ran").exists()


def test_a_refused_argument_is_called_what_whoever_stated_it_calls_it(tmp_path: Path, engines_file: Path) -> None:
    path = binary(tmp_path / "bin", GOOD)
    with pytest.raises(Refusal, match=": --arg: --port is reserved"):
        add_engine(path, engines_file=engines_file, args=["--port", "1"])
    with pytest.raises(Refusal, match=": --env: LD_PRELOAD is owned"):
        add_engine(path, engines_file=engines_file, env={"LD_PRELOAD": "x"})


def test_a_failing_program_writes_nothing(tmp_path: Path, engines_file: Path) -> None:
    path = binary(tmp_path / "bin", "exit 1")
    assert code_of(add_engine, path, engines_file=engines_file) == "engine_version_failed"
    assert not engines_file.exists()


def test_an_options_file_of_llama_cpps_own_is_refused(
    tmp_path: Path, engines_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.ini"
    config.write_text("[x]")
    monkeypatch.setattr(installation.check_config_file, "__defaults__", (config, "engine_unsupported"))
    with pytest.raises(Refusal, match=str(config)) as caught:
        add_engine(binary(tmp_path / "bin"), engines_file=engines_file)
    assert caught.value.code == "engine_unsupported"


def test_profiles_are_removed_and_the_last_one_may_go(engines_file: Path) -> None:
    put_profile(engines_file, profile("a"))
    assert code_of(remove_engine, "b", engines_file=engines_file) == "not_found"
    assert code_of(remove_engine, "c", engines_file=engines_file, stated={"c": "host.yaml"}) == "invalid_config"
    assert remove_engine("a", engines_file=engines_file) == 2
    assert read_engines(engines_file).profiles == {}


# --- the file --------------------------------------------------------------------------------------


def test_the_file_is_private_and_a_rewrite_keeps_its_mode(engines_file: Path) -> None:
    assert put_profile(engines_file, profile("a")) == 1
    assert engines_file.stat().st_mode & 0o777 == 0o600
    engines_file.chmod(0o640)
    assert put_profile(engines_file, profile("b")) == 2
    assert engines_file.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(engines_file.parent)) == ["engines.yaml", "engines.yaml.lock"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_writes_for_the_owner_of_the_role_and_keeps_an_owner(engines_file: Path) -> None:
    put_profile(engines_file, profile("a"), owner=(12345, 12345))
    put_profile(engines_file, profile("b"), owner=(0, 0))
    assert (engines_file.stat().st_uid, engines_file.stat().st_gid) == (12345, 12345)


def test_profiles_of_unknown_engines_are_skipped_and_kept(engines_file: Path) -> None:
    put_profile(engines_file, profile("a"))
    text = engines_file.read_text() + "  future:\n    engine: warpdrive\n    anything: [1, 2]\n"
    engines_file.write_text(text)
    read = read_engines(engines_file)
    assert (list(read.profiles), read.skipped, len(read.warnings)) == (["a"], ("future",), 1)
    assert code_of(put_profile, engines_file, profile("future")) == "profile_exists"
    put_profile(engines_file, profile("b"))
    assert read_engines(engines_file).raw["future"] == {"engine": "warpdrive", "anything": [1, 2]}
    assert remove_profile(engines_file, "future") == 3


@pytest.mark.parametrize(
    "body",
    [
        "schema_version: 2\nkind: engines\n",
        "kind: engines\n",
        "schema_version: 1\nkind: host\n",
        "schema_version: 1\nkind: engines\nextra: 1\n",
        "schema_version: 1\nkind: engines\nruntime_profiles: [a]\n",
        "schema_version: 1\nkind: engines\nruntime_profiles: {a: {engine: llamacpp}}\n",
        "schema_version: 1\nkind: engines\nruntime_profiles: {a: 3}\n",
        "schema_version: 1\nkind: engines\nruntime_profiles:\n  a: &x {engine: llamacpp}\n  b: *x\n",
        "schema_version: 1\nkind: engines\nkind: engines\n",
        "runtime_profiles:\n  a: {engine: llamacpp, executable: /x, build_fingerprint: x, args: [--host, x]}\n",
        'runtime_profiles:\n  a: {engine: llamacpp, executable: /x, build_fingerprint: "\\e[31mx"}\n',
        "not: [closed",
        "",
    ],
)
def test_a_file_that_cannot_be_understood_is_refused_and_not_replaced(engines_file: Path, body: str) -> None:
    engines_file.parent.mkdir()
    head = "schema_version: 1\nkind: engines\n" if body.startswith("runtime") else ""
    engines_file.write_text(f"# capyctl-document-revision: 7\n{head}{body}")
    engines_file.chmod(0o600)
    assert code_of(read_engines, engines_file) == "invalid_config"
    assert code_of(put_profile, engines_file, profile("new")) == "invalid_config"
    assert engines_file.read_text() == f"# capyctl-document-revision: 7\n{head}{body}"


def test_a_file_or_a_lock_that_is_a_directory_is_named(engines_file: Path) -> None:
    engines_file.mkdir(parents=True)
    assert code_of(read_engines, engines_file) == "unsafe_file"
    engines_file.rmdir()
    (engines_file.parent / "engines.yaml.lock").mkdir()
    assert code_of(put_profile, engines_file, profile("new")) == "unsafe_file"


def test_a_file_that_others_could_have_written_is_not_used(engines_file: Path) -> None:
    put_profile(engines_file, profile("a"))
    engines_file.chmod(0o666)
    assert code_of(read_engines, engines_file) == "unsafe_file"
    engines_file.unlink()
    engines_file.symlink_to("/etc/passwd")
    assert code_of(read_engines, engines_file) == "unsafe_file"
    engines_file.unlink()
    os.mkfifo(engines_file, 0o600)
    assert code_of(read_engines, engines_file) == "unsafe_file"


def test_a_file_beyond_its_bound_is_refused_before_it_is_written(engines_file: Path) -> None:
    put_profile(engines_file, profile("a"))
    before = engines_file.read_bytes()
    huge = profile("b", args=tuple(f"--x{number}-{'y' * 200}" for number in range(200)))
    assert code_of(put_profile, engines_file, huge) == "publish_rejected"
    assert engines_file.read_bytes() == before
    engines_file.write_bytes(before + b"#" * DOCUMENT_BYTES_MAX)
    assert code_of(read_engines, engines_file) == "invalid_config"


def _register(path: str, name: str) -> None:
    put_profile(Path(path), profile(name))


def test_writers_at_once_lose_nothing_and_readers_never_see_half(engines_file: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_register, args=(str(engines_file), f"p{number}")) for number in range(8)]
    for writer in writers:
        writer.start()
    seen = []
    while any(writer.is_alive() for writer in writers):
        seen.append(read_engines(engines_file))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    final = read_engines(engines_file)
    assert (final.revision, len(final.profiles)) == (8, 8)
    assert all(read.revision == len(read.profiles) for read in seen)


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, "insufficient_space"), (errno.EROFS, "unsafe_file")])
@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_write_that_fails_is_named_and_leaves_the_old_file_whole(
    engines_file: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, code: str
) -> None:
    put_profile(engines_file, profile("a"))
    before = engines_file.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    assert code_of(put_profile, engines_file, profile("b")) == code
    assert engines_file.read_bytes() == before
    assert sorted(os.listdir(engines_file.parent)) == ["engines.yaml", "engines.yaml.lock"]


# --- the registry ----------------------------------------------------------------------------------


def test_a_name_that_is_stated_twice_is_refused_and_the_profiles_stay(engines_file: Path) -> None:
    put_profile(engines_file, profile("a"))
    registry = Registry(engines_file, stated={"b": profile("b").profile}, stated_in="standalone.yaml")  # type: ignore[dict-item]
    registry.reload()
    assert [row.name for row in registry.profiles()] == ["b", "a"]
    assert [row.source for row in registry.profiles()] == ["standalone.yaml", "engines.yaml"]
    put_profile(engines_file, profile("b"))
    assert code_of(registry.reload) == "profile_exists"
    assert [row.name for row in registry.profiles()] == ["b", "a"]


def test_a_file_that_was_put_back_is_refused(engines_file: Path) -> None:
    put_profile(engines_file, profile("a"))
    old = engines_file.read_bytes()
    put_profile(engines_file, profile("b"))
    registry = Registry(engines_file)
    registry.reload()
    engines_file.write_bytes(old)
    assert code_of(registry.reload) == "publish_rejected"
    assert len(registry.profiles()) == 2


def test_a_family_word_stands_for_the_only_profile_of_that_family(engines_file: Path) -> None:
    put_profile(engines_file, profile("mine"))
    registry = Registry(engines_file)
    registry.reload()
    assert registry.registered("llamacpp").name == "mine"
    with pytest.raises(Refusal, match=r"no engine profile lamacpp; registered: mine. Did you mean llamacpp\?"):
        registry.registered("lamacpp")
    document = {"name": "m", "engine": "llamacpp", "model": "m"}
    assert registry.check(document).name == "mine"
    assert code_of(registry.check, document | {"residency": "deep"}) == "capability_missing:deep_park"
    put_profile(engines_file, profile("other"))
    registry.reload()
    assert code_of(registry.registered, "llamacpp") == "profile_not_published"
    assert code_of(registry.adapter, "none") == "profile_not_published"


def test_a_profile_that_is_named_as_its_family_is_not_replaced_by_another_of_the_family(engines_file: Path) -> None:
    put_profile(engines_file, profile("llamacpp"))
    put_profile(engines_file, profile("other"))
    registry = Registry(engines_file)
    registry.reload()
    registry.adapter("llamacpp")
    registry.retire("llamacpp")
    for of_a_settled_deployment in (registry.named, registry.adapter, registry.fixed_args, registry.sizing_facts):
        assert code_of(of_a_settled_deployment, "llamacpp") == "profile_not_published"
    assert registry.check({"name": "m", "engine": "llamacpp", "model": "m"}).name == "other"  # a new one is settled
    registry.reload()
    registry.adapter("llamacpp")


@pytest.mark.engine
def test_the_roles_own_engine_is_local_and_measured_at_its_start() -> None:
    registry = Registry(None, local=LocalEngine(llamacpp=PYTHON))  # type: ignore[arg-type]
    registry.reload()
    assert (registry.registered("local").version, registry.registered("local").digest) == ("unknown", None)
    registry.measure_own()
    assert re.fullmatch(r"\d{4}\.\d+\.\d+", registry.registered("local").version)
    assert registry.registered("local").source == "local_engine"
    assert registry.sizing_facts("local") == {"host_env": {}}
    stated = Registry(None, local=LocalEngine(llamacpp=PYTHON, kv_cache=Size(6 << 30)))  # type: ignore[arg-type]
    assert stated.sizing_facts("local") == {"host_env": {}, "default_kv_bytes": 6 << 30}


# --- detection -------------------------------------------------------------------------------------


def make_environment(prefix: Path, version: str = "2026.10.1") -> Path:
    packages = prefix / "lib" / "python3.11" / "site-packages"
    (packages / "xllamacpp").mkdir(parents=True)
    (packages / "xllamacpp" / "__init__.py").write_text(f'open("{prefix}/executed", "w")\n')
    (packages / f"xllamacpp-{version}.dist-info").mkdir()
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python").write_text(f'#!/bin/sh\ntouch "{prefix}/executed"\n')
    (prefix / "bin" / "python").chmod(0o755)
    (prefix / "pyvenv.cfg").write_text("")
    return prefix


def test_the_known_places_are_looked_at_and_nothing_is_executed(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    places = [
        make_environment(home / "venvs" / "one", "2026.10.1"),
        make_environment(home / ".venv", "2026.10.2"),
        make_environment(home / "project", "2026.10.3"),
        make_environment(home / "miniconda3" / "envs" / "two", "2026.10.4"),
        make_environment(elsewhere, "2026.10.5"),
    ]
    (places[3] / "conda-meta").mkdir()
    built = binary(home / "llama.cpp" / "build-cpu" / "bin", f'touch "{tmp_path}/executed"')
    on_path = binary(tmp_path / "pathbin", f'touch "{tmp_path}/executed"')
    environ = {"HOME": str(home), "PATH": f"{tmp_path}/pathbin:relative:/none"}
    rows = {row.path: row for row in detect(environ, [elsewhere])}
    found = {path: (row.version, row.source) for path, row in rows.items() if path.startswith(str(tmp_path))}
    assert found == {
        str(places[0]): ("2026.10.1", "venv"),
        str(places[1]): ("2026.10.2", "venv"),
        str(places[2]): ("2026.10.3", "venv"),
        str(places[3]): ("2026.10.4", "conda"),
        str(elsewhere): ("2026.10.5", "venv"),
        str(built): ("unknown", "path"),
        str(on_path): ("unknown", "path"),
    }
    assert all(row.custom and row.engine == "llamacpp" for row in rows.values())
    assert not list(tmp_path.rglob("executed"))
    assert all(locate(Path(path)) for path in found)


def test_a_given_place_may_hold_installations_of_several(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    first = make_environment(shelf / "one", "2026.10.1")
    conda = make_environment(tmp_path / "conda" / "envs" / "two", "2026.10.2")
    built = binary(tmp_path / "llama.cpp" / "build" / "bin", "true")
    (shelf / "link").symlink_to(conda)
    make_environment(shelf / "deep" / "er" / "three", "2026.10.3")
    given = [shelf, tmp_path / "conda", tmp_path / "llama.cpp"]
    rows = detect({"HOME": str(tmp_path / "home"), "PATH": ""}, given)
    assert {row.path for row in rows if row.path.startswith(str(tmp_path))} == {str(first), str(conda), str(built)}
    assert all(holds_one(place) for place in given)
    assert not holds_one(tmp_path / "home")


def test_links_out_of_a_scanned_place_and_hostile_names_are_ignored(tmp_path: Path) -> None:
    home, outside = tmp_path / "home", make_environment(tmp_path / "outside")
    (home / "venvs").mkdir(parents=True)
    (home / "venvs" / "link").symlink_to(outside)
    (home / "llama.cpp" / "build" / "bin").mkdir(parents=True)
    (home / "llama.cpp" / "build" / "bin" / "llama-server").symlink_to("/bin/true")
    hostile = home / "venvs" / "hostile" / "lib" / "python3.11" / "site-packages"
    hostile.mkdir(parents=True)
    (hostile / "xllamacpp-$(touch x).dist-info").mkdir()
    (home / ".conda").mkdir()
    (home / ".conda" / "environments.txt").write_text("relative\n\n/none\n")
    rows = detect({"HOME": str(home), "PATH": ""})
    assert not [row for row in rows if row.environment.startswith(str(tmp_path))]


# --- families --------------------------------------------------------------------------------------


def test_families_say_what_they_can_prove_and_what_is_not_run() -> None:
    traits = family("llamacpp").traits
    assert (traits.parks, traits.idle_signal, traits.abort_by_id, traits.eof_proves_end) == (False, True, False, True)
    assert all(name == known.name == known.traits.family for name, known in FAMILIES.items())
    assert code_of(family, "docker") == "engine_unsupported"


def test_flags_are_printed_with_their_class_and_reason() -> None:
    rows = flag_rows("llamacpp")
    assert {row[0] for row in rows} == {"option", "variable"}
    assert {row[2] for row in rows} == {"owned", "reserved", "approval", "passed"}
    assert all(len(row) == 4 and all(row) for row in rows)
    assert any("--host" in row[1] and row[2] == "reserved" for row in rows)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, None),
        ({"engine_config": {"accept_extra_args": True, "extra_args": ["--temp", "0"]}}, None),
        ({"engine_config": {"accept_extra_args": True, "extra_args": ["--port", "1"]}}, "invalid_config"),
        ({"engine_config": {"accept_extra_args": True, "extra_args": ["--threads", "4"]}}, "invalid_config"),
        ({"engine_config": {"env": {"LLAMA_ARG_HOST": "x"}}}, "engine_env_reserved:LLAMA_ARG_HOST"),
        ({"engine_config": {"env": {"OMP_X": "x"}}}, "engine_env_not_approved:OMP_X"),
        ({"engine_config": {"dtype": "float16"}}, "invalid_config"),
        ({"engine_config": {"vllm": {}}}, "invalid_config"),
        ({"residency": "deep"}, "capability_missing:deep_park"),
        ({"routes": ["a,b"]}, "invalid_config"),
        ({"api": "decisions"}, None),
        ({"runtime_profile_revision": 3}, "profile_not_published"),
    ],
)
def test_a_deployment_is_checked_against_the_profile_it_names(fields: dict[str, Any], code: str | None) -> None:
    document = parse_deployment({"name": "m", "engine": "mine", "model": "m", **fields}, "d").completed()
    registered = profile("mine", args=("--threads", "1"))
    if code is None:
        check_deployment(document, registered)
    else:
        assert code_of(check_deployment, document, registered) == code


def test_a_pipe_among_what_is_read_of_a_home_or_a_manifest_keeps_nobody_waiting(tmp_path: Path) -> None:
    (tmp_path / ".conda").mkdir()
    os.mkfifo(tmp_path / ".conda" / "environments.txt")
    detect({"HOME": str(tmp_path), "PATH": ""})
    os.mkfifo(tmp_path / "manifest.yaml")
    with pytest.raises(Refusal, match="named pipe"):
        add_custom(
            Path(os.path.realpath(sys.executable)),
            tmp_path / "manifest.yaml",
            name="own",
            engines_file=tmp_path / "engines.yaml",
            confirm=lambda manifest, pin: None,
        )
