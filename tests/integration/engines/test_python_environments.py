"""What engines in Python environments share: finding, versions, digests, probes, variables, and one bounded run."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import attrs
import pytest

from capyctl.documents.blocks import LocalEngine
from capyctl.documents.scalars import AbsolutePath
from capyctl.engines.environment import Reserved
from capyctl.engines.python.capabilities import probe, read_probe
from capyctl.engines.python.installation import Package, cuda_home, parse_version, public, read_version, release
from capyctl.engines.python.variables import Closed, closed_environment, max_jobs
from capyctl.engines.registry import Registry
from capyctl.engines.run_once import run_once
from capyctl.errors import Refusal
from tests.engines.installation import lay_out
from tests.integration.acceptance.machine import until
from tests.nvml import card
from tests.property.test_vllm_render import FACTS

GIB = 1 << 30
ENGINE = Package(distribution="engine", package="engine", commands=("engine",))


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An environment whose interpreter is a link, with a package of two files."""
    packages = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    (packages / "engine" / "inner").mkdir(parents=True)
    (packages / "engine" / "__init__.py").write_text("x = 1\n")
    (packages / "engine" / "inner" / "core.so").write_bytes(b"code")
    (packages / "engine-1.2.3+cpu.dist-info").mkdir()
    (tmp_path / "env" / "bin").mkdir()
    (tmp_path / "env" / "bin" / "python3").symlink_to(sys.executable)
    return tmp_path / "env"


def test_an_environment_is_found_lexically_and_not_without_its_parts(prefix: Path) -> None:
    for given in (prefix, prefix / "bin", prefix / "bin" / "python3"):
        found = ENGINE.find(given)
        assert found is not None
        assert (found.executable, found.version, found.place) == (prefix / "bin" / "python3", "1.2.3+cpu", prefix)
    assert ENGINE.find(prefix / "bin" / "other") is None
    assert ENGINE.find(prefix / "lib") is None
    program = prefix / "bin" / "engine"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert ENGINE.find(prefix).executable == program  # type: ignore[union-attr]
    os.rename(prefix / "lib/python3.11/site-packages/engine", prefix / "elsewhere")
    assert ENGINE.find(prefix) is None, "metadata without its package is no installation"


def test_a_digest_is_of_names_and_bytes_alone(prefix: Path) -> None:
    first = ENGINE.digest(prefix)
    package = prefix / "lib/python3.11/site-packages/engine"
    assert first is not None
    assert first.startswith("sha256:")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"1")
    os.utime(package / "__init__.py", (1, 1))
    assert ENGINE.digest(prefix) == first
    (package / "inner" / "core.so").write_bytes(b"evil")
    changed = ENGINE.digest(prefix)
    assert changed != first
    (package / "link").symlink_to("/etc")
    assert ENGINE.digest(prefix) not in (first, changed), "a link counts by its target's text and is not followed"
    assert ENGINE.digest(prefix.parent / "none") is None


def test_versions_are_read_as_programs_print_them() -> None:
    assert parse_version("WARNING x\n0.32.0+cpu\n", "x") == "0.32.0+cpu"
    assert parse_version("tensorfold 0.6.6\n", "x", "tensorfold") == "0.6.6"
    assert (public("0.32.0+cpu"), release("0.32.0rc1+cpu"), release("x")) == ("0.32.0", (0, 32, 0), ())
    for said in ("", "\n", "Traceback", "0.1 0.2", "-1"):
        with pytest.raises(Refusal) as caught:
            parse_version(said, "engine --version")
        assert caught.value.code == "engine_version_failed"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 3", "ended with 3: it said nothing"),
        ("echo out; echo why >&2; exit 1", "ended with 1: why"),
        ("yes", "printed more than 4096 bytes"),
        ("sleep 30", "did not answer within"),
        ("exec >&- 2>&-; sleep 30", "did not end within"),
    ],
)
def test_a_program_is_run_once_in_bounds(tmp_path: Path, script: str, said: str) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    began = time.monotonic()
    with pytest.raises(Refusal) as caught:
        read_version([str(program)], what="it", prefix=tmp_path, limit_s=0.3)
    assert said in caught.value.message
    assert caught.value.code == "engine_version_failed"
    assert time.monotonic() - began < 25


def test_what_a_program_leaves_behind_is_ended_and_not_waited_for(tmp_path: Path) -> None:
    program, mark = tmp_path / "program", tmp_path / "pid"
    program.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {mark}\necho 1.0\n")
    program.chmod(0o755)
    began = time.monotonic()
    said = run_once([str(program)], env={"PATH": "/usr/bin:/bin"}, what="it", limit_s=30, bytes_max=99)
    assert said.text == "1.0\n"
    assert time.monotonic() - began < 50
    left = Path(f"/proc/{mark.read_text().strip()}")
    until(lambda: not os.path.exists(left / "exe"), 5, "the end of what was left")  # a zombie has no program


@pytest.mark.parametrize(
    ("script", "status"),
    [("echo 1.0", 0), ("echo 1.0; kill -9 $PPID; sleep 60", -9), ("echo 1.0; exec sleep 60", None)],
)
def test_what_moves_into_another_session_is_ended_as_well(tmp_path: Path, script: str, status: int | None) -> None:
    program, mark = tmp_path / "program", tmp_path / "pid"
    moves = f"setsid sh -c 'echo $$ > {mark}; exec sleep 60' >&- 2>&- &"
    program.write_text(f"#!/bin/sh\n{moves}\nuntil [ -s {mark} ]; do sleep 0.01; done\n{script}\n")
    program.chmod(0o755)
    begins = {"env": {"PATH": "/usr/bin:/bin"}, "what": "it", "bytes_max": 99}
    if status is None:
        with pytest.raises(Refusal, match="did not answer"):
            run_once([str(program)], limit_s=1.5, **begins)
    else:
        assert run_once([str(program)], limit_s=30, **begins).status == status
    moved = Path(f"/proc/{mark.read_text().strip()}")
    if status == -9:  # whoever ends its overseer is out of reach with what moved; the rest of its group is not
        os.kill(int(moved.name), signal.SIGKILL)
    until(lambda: not os.path.exists(moved / "exe"), 5, "the end of what moved")


def test_nothing_of_our_environment_reaches_a_program(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    program = prefix / "bin" / "engine"
    program.write_text("#!/bin/sh\nenv | cut -d= -f1 | sort | tr '\\n' ' '\n")
    program.chmod(0o755)
    assert "SECRET" not in read_version([str(program)], what="it", prefix=prefix)


def test_a_probe_that_cannot_run_knows_nothing(prefix: Path, tmp_path: Path) -> None:
    script = tmp_path / "probe.py"
    script.write_text('print("noise")\nprint(\'capyctl_probe {"core": "", "deep_park": "a route"}\')\n')
    found = probe(prefix, script)
    assert found is not None
    assert (found.present, found.missing) == ({"core"}, {"deep_park": "a route"})
    script.write_text("raise SystemExit(1)")
    assert probe(prefix, script) is None
    script.write_text("import time\ntime.sleep(60)")
    assert probe(prefix, script, limit_s=0.5) is None
    assert probe(prefix.parent / "none", script) is None
    for text in ("", "capyctl_probe x", 'capyctl_probe {"core": 1}', "capyctl_probe []"):
        assert read_probe(text) is None


def test_a_toolkit_is_one_that_has_a_compiler(tmp_path: Path) -> None:
    assert cuda_home({}, ()) is None
    assert cuda_home({"CUDA_HOME": str(tmp_path)}, ()) is None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "nvcc").chmod(0o755)
    assert cuda_home({"CUDA_HOME": str(tmp_path)}, ()) == str(tmp_path)
    assert cuda_home({"CUDA_HOME": "relative"}, (tmp_path,)) == str(tmp_path)


def test_an_environment_is_closed_and_what_is_owned_has_the_last_word() -> None:
    parts = Closed(
        prefix=Path("/env"),
        cuda_home="/cuda",
        profile_env={"A": "profile", "MAX_JOBS": "7", "ENGINE_KEY": "mine", "LD_PRELOAD": "x"},
        deployment_env={"A": "deployment"},
        reserved=(Reserved("ENGINE_KEY", "ours"),),
        log_path=Path("/log"),
        max_jobs=3,
        owned={"ENGINE_KEY": "ours"},
    )
    env = closed_environment(parts)
    assert env == {
        "A": "deployment",
        "MAX_JOBS": "7",
        "FLASHINFER_NVCC_THREADS": "1",
        "PATH": "/env/bin:/cuda/bin:/usr/local/bin:/usr/bin:/bin",
        "CUDA_HOME": "/cuda",
        "CAPYCTL_ENGINE_LOG": "/log",
        "DO_NOT_TRACK": "1",
        "ENGINE_KEY": "ours",
    }
    assert "DO_NOT_TRACK" not in closed_environment(attrs.evolve(parts, telemetry=True))


def test_kernels_are_compiled_one_per_8_gib_of_what_is_really_free() -> None:
    assert max_jobs(FACTS, cpus=64) == 12
    assert max_jobs(FACTS, cpus=4) == 4
    unified = attrs.evolve(FACTS, available={"unified": 40 * GIB}, ready={"unified": 30 * GIB})
    assert max_jobs(unified, cpus=64) == 1
    assert max_jobs(attrs.evolve(FACTS, available={}), cpus=64) == 1


# --- the role's own engine -------------------------------------------------------------------------


def own(path: Path, **settings: object) -> Registry:
    return Registry(None, local=LocalEngine(vllm=AbsolutePath(str(path)), **settings))  # type: ignore[arg-type]


def test_a_roles_own_engine_parks_unless_its_setting_says_otherwise(tmp_path: Path) -> None:
    able = lay_out("vllm", "0.32.0", tmp_path / "able", cards=card.one_card(tmp_path / "cards").state)
    for given in (able.executable, able.prefix):
        registry = own(given, trust_remote_code=True, cuda_home=AbsolutePath("/cuda"), args=("--seed", "1"))
        registry.measure_own()
        row = registry.registered("local")
        assert (row.version, row.deep_park, row.executable) == ("0.32.0", "enabled", str(able.executable))
        assert row.profile.security.trust_remote_code
        assert (row.profile.cuda_home, row.profile.args) == ("/cuda", ("--seed", "1"))
        assert registry.family_of("local").traits.parks
    assert able.starts() == [], "a role's start runs nothing of a slow engine"
    registry = own(able.executable, deep_park="off")
    registry.measure_own()
    assert registry.registered("local").deep_park == "disabled"
    assert not registry.family_of("local").traits.parks
    with pytest.raises(Refusal) as caught:
        own(tmp_path).measure_own()
    assert caught.value.code == "engine_not_found"
