"""Settings, places and identities: precedence, what may be trusted, ULIDs."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capyctl import ulid
from capyctl.cli.deploy import read_document
from capyctl.documents import kinds, owned, paths, places
from capyctl.documents.settings import NAMED, Stated, effective
from capyctl.documents.standalone import Standalone
from capyctl.errors import CapyError

HOME = {"HOME": "/home/ada"}
BIND = "server.listeners.inference.bind"


def source_of(stated: Stated, path: str) -> tuple[str, str]:
    row = next(row for row in effective(stated).rows if row.path == path)
    return row.text, row.source


@settings(derandomize=True, max_examples=32, deadline=None)
@given(st.sets(st.sampled_from(["yaml", "variable", "flag", "env", "set"])))
def test_the_strongest_statement_wins(tmp_path_factory: pytest.TempPathFactory, made: set[str]) -> None:
    # An override may only stand beside a flag or variable that agrees, so those share its value.
    over = {"env", "set"} & made
    value = "127.0.0.1:9" if over else None
    folder = tmp_path_factory.mktemp("s")
    document = folder / "s.yaml"
    text = "schema_version: 1\nkind: standalone\nname: local\n"
    document.write_text(text + ("server: {listeners: {inference: {bind: '127.0.0.1:1'}}}\n" if "yaml" in made else ""))
    environ = dict(HOME)
    if "variable" in made:
        environ["CAPYCTL_INFERENCE_ADDR"] = value or "127.0.0.1:2"
    if "env" in made:
        environ["CAPYCTL_SET__SERVER__LISTENERS__INFERENCE__BIND"] = "127.0.0.1:9"
    stated = Stated(
        environ=environ,
        config=str(document),
        flags={"--listen": value or "127.0.0.1:3"} if "flag" in made else {},
        overrides=[f"{BIND}=127.0.0.1:9"] if "set" in made else [],
    )
    expected = ("0.0.0.0:8443", "default")
    order = [("yaml", "127.0.0.1:1", "yaml"), ("variable", "127.0.0.1:2", "env"), ("flag", "127.0.0.1:3", "flag")]
    for who, text_, source in (*order, ("env", "127.0.0.1:9", "env"), ("set", "127.0.0.1:9", "set")):
        if who in made:
            expected = (value if value and who in ("variable", "flag") else text_, source)
    assert source_of(stated, BIND) == expected


def test_every_named_setting_is_a_setting() -> None:
    known = {".".join(leaf) for leaf in paths.leaves(Standalone)}
    for named in NAMED:
        wanted = [f"{named.path}.start", f"{named.path}.end"] if named.form == "ports" else [named.path]
        assert set(wanted) <= known


def test_an_override_beside_a_flag_with_another_value_is_refused_naming_both() -> None:
    stated = Stated(environ=HOME, flags={"--listen": "127.0.0.1:2"}, overrides=[f"{BIND}=127.0.0.1:1"])
    with pytest.raises(CapyError, match=r"--set .* and --listen state different values"):
        effective(stated)


def test_a_state_root_follows_flag_variable_document_and_default(tmp_path: Path) -> None:
    document = tmp_path / "s.yaml"
    document.write_text("schema_version: 1\nkind: standalone\nname: local\nstate_dir: below\n")
    assert effective(Stated(environ=HOME)).places.root == "/home/ada/.local/state/capyctl"
    assert effective(Stated(environ={**HOME, "XDG_STATE_HOME": "/x"})).places.root == "/x/capyctl"
    stated = Stated(environ=HOME, config=str(document))
    assert effective(stated).places.root == str(tmp_path / "below")
    moved = effective(Stated(environ=HOME, config=str(document), state_dir="rel", cwd="/w"))
    assert (moved.places.root, len(moved.notices)) == ("/w/rel", 1)
    assert moved.engines_file == str(tmp_path / "engines.yaml")


def test_a_token_stays_out_of_every_text() -> None:
    made = effective(Stated(environ={**HOME, "HF_TOKEN": "hf_sesame"}))
    assert made.hf_token == "hf_sesame"
    assert "sesame" not in repr(made)
    assert "sesame" not in repr(places.Credentials("sesame" * 3, "b" * 16))


# ---------------------------------------------------------------- files


def private(tmp_path: Path) -> places.Places:
    tmp_path.chmod(0o700)
    return places.Places(str(tmp_path / "state"))


def test_credentials_are_made_once_and_read_back(tmp_path: Path) -> None:
    where = private(tmp_path)
    made = places.establish_credentials(where, served_before=False)
    assert places.establish_credentials(where, served_before=True) == made
    assert made.api_key != made.admin_token
    assert os.stat(where.credentials).st_mode & 0o777 == 0o600
    os.unlink(where.credentials)
    with pytest.raises(CapyError, match="served before"):
        places.establish_credentials(where, served_before=True)
    assert not os.path.exists(where.credentials), "a lost identity is not made again"


def _spoil_mode(path: Path) -> None:
    path.chmod(0o644)


def _spoil_link(path: Path) -> None:
    os.link(path, f"{path}.second")


def _spoil_symlink(path: Path) -> None:
    path.rename(f"{path}.real")
    path.symlink_to(f"{path}.real")


def _spoil_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _spoil_directory(path: Path) -> None:
    path.unlink()
    path.mkdir(mode=0o700)


@pytest.mark.parametrize("spoil", [_spoil_mode, _spoil_link, _spoil_symlink, _spoil_fifo, _spoil_directory])
def test_a_credentials_file_that_another_may_have_written_is_not_used(tmp_path: Path, spoil: object) -> None:
    where = private(tmp_path)
    places.establish_credentials(where, served_before=False)
    assert callable(spoil)
    spoil(Path(where.credentials))
    with pytest.raises(CapyError) as refused:
        places.read_credentials(where.credentials)
    assert refused.value.code == "unauthorized"
    assert where.credentials in refused.value.message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "api_key: " + "a" * 20,
        f"api_key: {'a' * 20}\nadmin_token: {'a' * 20}\n",
        f"api_key: {'a' * 20}\r\nadmin_token: {'b' * 20}\r\n",
        f"api_key: {'a' * 20}\napi_key: {'a' * 20}\nadmin_token: {'b' * 20}\n",
        "api_key: short\nadmin_token: short2\n",
        "x" * 2000,
    ],
)
def test_credentials_of_another_form_are_refused_without_showing_them(tmp_path: Path, text: str) -> None:
    where = private(tmp_path)
    places.make_private(where.identity)
    places.write_new(where.credentials, text)
    with pytest.raises(CapyError) as refused:
        places.read_credentials(where.credentials)
    assert "aaaa" not in refused.value.message


def test_a_new_file_never_replaces_one(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    places.write_new(path, "first")
    with pytest.raises(FileExistsError):
        places.write_new(path, "second")
    assert Path(path).read_text() == "first"
    places.replace(path, "third")
    assert Path(path).read_text() == "third"
    assert sorted(os.listdir(tmp_path)) == ["x"], "nothing is left beside it"


def test_a_state_directory_that_others_could_swap_is_unsafe(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    good = tmp_path / "state"
    good.mkdir(mode=0o700)
    assert places.unsafe(str(good)) is None, "a sticky temporary directory of root above it is fine"
    (tmp_path / "link").symlink_to(good)
    assert "symbolic link" in (places.unsafe(str(tmp_path / "link")) or "")
    assert "is not an absolute path" in (places.unsafe("state") or "")
    good.chmod(0o770)
    assert "0770" in (places.unsafe(str(good)) or "")
    good.chmod(0o700)
    tmp_path.chmod(0o777)
    assert "can be written by others" in (places.unsafe(str(good)) or "")


def _no_file(path: Path) -> str:
    return "No such file"


def _pipe(path: Path) -> str:
    os.mkfifo(path)
    return "a named pipe"


def _directory(path: Path) -> str:
    path.mkdir()
    return "a directory"


def _socket(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    return "No such device"  # what open() says of it


def _device(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "a device"


def _memory(path: Path) -> str:
    path.symlink_to("/proc/self/mem")
    return "cannot be read"


@pytest.mark.parametrize("make", [_no_file, _pipe, _directory, _socket, _device, _memory])
def test_a_file_that_a_user_names_is_read_only_when_it_is_a_regular_one(tmp_path: Path, make: object) -> None:
    path = tmp_path / "x.yaml"
    assert callable(make)
    says = make(path)
    for read in (lambda: kinds.read_file(str(path), "x.yaml"), lambda: read_document(str(path))):
        with pytest.raises(CapyError, match=says) as refused:
            read()
        assert refused.value.code == "invalid_config"
        assert "x.yaml" in refused.value.message


def test_a_file_that_a_user_names_is_read_up_to_its_bound(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 5000)
    assert owned.read_regular(str(tmp_path / "big"), 5000) == b"x" * 5000
    assert len(owned.read_regular(str(tmp_path / "big"), 100)) == 101


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = str(tmp_path / "x")
    places.write_new(path, "first")
    monkeypatch.setattr(os, "fsync", full)
    for write in (places.write_new, places.replace):
        with pytest.raises(CapyError, match=f"{path} cannot be written") as refused:
            write(path, "second")
        assert refused.value.code == "insufficient_space"
    assert os.listdir(tmp_path) == ["x"]
    assert Path(path).read_text() == "first"


# ---------------------------------------------------------------- identities


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.integers(0, 2**48 - 1), st.binary(min_size=10, max_size=10), st.integers(0, 2**48 - 1))
def test_ulids_sort_by_time_and_carry_it(now: int, noise: bytes, later: int) -> None:
    made = ulid.new(now, noise)
    assert ulid.is_ulid(made)
    assert ulid.instant_ms(made) == now
    assert (ulid.new(later, noise) > made) == (later > now)
    assert not ulid.is_ulid(made.lower()) or made.isdigit()


def test_text_of_another_form_is_no_ulid() -> None:
    for text in ("", "8" + "Z" * 25, "I" * 26, "0" * 25, "0" * 27, "0" * 25 + "\n", "0" * 25 + "٣"):
        assert not ulid.is_ulid(text)
    with pytest.raises(ValueError, match="ULID"):
        ulid.new(2**48, bytes(10))


def test_a_variable_that_is_misspelled_is_said_and_a_strangers_is_not() -> None:
    strangers = {"CAPYCTL_PORT_8443_TCP": "1", "CAPYCTL_SERVICE_HOST": "x", "CAPYCTL_ENGINE_LOG": "/x"}
    assert effective(Stated(environ={**HOME, **strangers, "CAPYCTL_HF_TOKEN": "t"})).notices == ()
    made = effective(
        Stated(
            environ={
                **HOME,
                "CAPYCTL_INFERENCE_ADR": "127.0.0.1:1",
                "CAPYCTL_MODEL_ROOT": "/m",
                "CAPYCTL_SET_NAME": "x",
            }
        )
    )
    assert made.notices == (
        "CAPYCTL_INFERENCE_ADR is not read; did you mean CAPYCTL_INFERENCE_ADDR?",
        "CAPYCTL_MODEL_ROOT is not read; did you mean CAPYCTL_MODELS_ROOT?",
        "CAPYCTL_SET_NAME is not read; did you mean CAPYCTL_SET__…, with two underscores for each dot?",
    )
