"""Where a role keeps its files, how they are found, and which of them may be trusted.

Import-light: client commands read the management address and the token through this module before
they know whether there is anything to do. Source: config 14, 15; security 4.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import attrs

from capyctl.documents import owned
from capyctl.errors import Failure, Refusal

Role = Literal["server", "host", "standalone"]
ROLES: Final[tuple[Role, ...]] = ("server", "host", "standalone")
DEFAULT_MANAGEMENT: Final = "127.0.0.1:7443"
CREDENTIALS_MAX: Final = 1024
_SECRET: Final = re.compile(r"[\x21-\x7e]{16,256}", re.ASCII)


@attrs.frozen
class Places:
    """The paths below one state root (absolute). Nothing is created by asking."""

    root: str

    def below(self, *parts: str) -> str:
        return os.path.join(self.root, *parts)

    def document(self, role: Role) -> str:
        """The implicit document of a role."""
        return self.below("config", f"{role}.yaml")

    @property
    def identity(self) -> str:
        return self.below("identity")

    @property
    def credentials(self) -> str:
        """Standalone's API key and admin token."""
        return self.below("identity", "credentials")

    @property
    def run(self) -> str:
        return self.below("run")

    @property
    def role_lock(self) -> str:
        """Held by the role that runs; it says the pid."""
        return self.below("role.lock")

    @property
    def management_address(self) -> str:
        return self.below("run", "management-address")

    @property
    def started(self) -> str:
        """Holds the settings that a standalone role was started with."""
        return self.below("run", "started.json")

    @property
    def document_record(self) -> str:
        """Holds the path of the document that a server or host was started with."""
        return self.below("run", "role-document")

    @property
    def control_socket(self) -> str:
        return self.below("control.sock")

    @property
    def server(self) -> str:
        return self.below("server")

    @property
    def host(self) -> str:
        return self.below("host")

    @property
    def secrets(self) -> str:
        return self.below("host", "secrets")


@attrs.frozen
class Credentials:
    """The two keys of a standalone role. Kept out of every text form."""

    api_key: str = attrs.field(repr=False)
    admin_token: str = attrs.field(repr=False)


# ---------------------------------------------------------------- finding


def home_of(environ: Mapping[str, str]) -> str:
    """The user's home: HOME, else the account's."""
    home = environ.get("HOME", "")
    if home.startswith("/"):
        return home
    import pwd

    return pwd.getpwuid(os.getuid()).pw_dir


def default_state_root(environ: Mapping[str, str]) -> str:
    """`$XDG_STATE_HOME/capyctl`, else `~/.local/state/capyctl`."""
    base = environ.get("XDG_STATE_HOME", "")
    return os.path.join(base if base.startswith("/") else os.path.join(home_of(environ), ".local", "state"), "capyctl")


def absolute(path: str, cwd: str) -> str:
    """`path` seen from `cwd`, without `.` and `..`; links are not followed."""
    return os.path.normpath(os.path.join(cwd, path))


def stated_state_root(flag: str | None, environ: Mapping[str, str], cwd: str) -> str | None:
    """The state root that a flag or a variable states, or None."""
    stated = flag if flag is not None else environ.get("CAPYCTL_STATE_DIR") or None
    if stated is None:
        return None
    if not stated or "\x00" in stated:
        raise Refusal("invalid_config", "--state-dir: expected a directory's path")
    return absolute(stated, cwd)


def explicit_document(flag: str | None, environ: Mapping[str, str], cwd: str) -> tuple[str, str] | None:
    """The document that `--config` or CAPYCTL_CONFIG names, and which of them, or None. It must exist.

    Raises: Refusal invalid_config: an explicit document is never generated nor replaced by defaults.
    """
    for stated, by in ((flag, "--config"), (environ.get("CAPYCTL_CONFIG") or None, "CAPYCTL_CONFIG")):
        if stated is None:
            continue
        path = absolute(stated, cwd)
        if not stated or not os.path.exists(path):
            raise Refusal("invalid_config", f"{by}: there is no document {path}")
        if not os.path.isfile(path):
            raise Refusal("invalid_config", f"{by}: {path} is not a regular file")
        return path, by
    return None


def engines_file(flag: str | None, environ: Mapping[str, str], cwd: str) -> str:
    """Beside `--config`, beside CAPYCTL_CONFIG, else below the user's configuration directory."""
    for stated in (flag, environ.get("CAPYCTL_CONFIG") or None):
        if stated:
            return os.path.join(os.path.dirname(absolute(stated, cwd)), "engines.yaml")
    base = environ.get("XDG_CONFIG_HOME", "")
    config = base if base.startswith("/") else os.path.join(home_of(environ), ".config")
    return os.path.join(config, "capyctl", "engines.yaml")


def roles_known(places: Places) -> tuple[Role, ...]:
    """The roles that have left a document, an identity or keys under this state root."""
    run = roles_run(places)
    return tuple(role for role in ROLES if role in run or os.path.lexists(places.document(role)))


def roles_run(places: Places) -> tuple[Role, ...]:
    """The roles that have an identity or keys under this state root; `init` writes a document alone."""
    marks: dict[Role, str] = {
        "server": places.below("identity", "server-credentials.json"),
        "host": places.below("identity", "host-identity.json"),
        "standalone": places.credentials,
    }
    return tuple(role for role in ROLES if os.path.lexists(marks[role]))


# ---------------------------------------------------------------- reading what must be trusted


def read_owned(path: str, limit: int) -> str:
    """The text of a small file that only its owner may read: regular, one link, no symlink, 0600 or less.

    Raises: FileNotFoundError; Refusal unauthorized naming the path and the failed check.
    """

    def refuse(why: str) -> Refusal:
        return Refusal("unauthorized", f"{path} is not used: {why}")

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except PermissionError:
        raise refuse("this user may not read it; run the command as the role's user") from None
    except OSError as wrong:
        link = wrong.errno == errno.ELOOP
        raise refuse("it is a symbolic link" if link else os.strerror(wrong.errno or 0)) from None
    try:
        seen = os.fstat(descriptor)
        if not stat.S_ISREG(seen.st_mode):
            raise refuse("it is not a regular file")
        if seen.st_nlink != 1:
            raise refuse("it has a second name")
        if seen.st_mode & 0o077:
            raise refuse(f"its mode is {stat.S_IMODE(seen.st_mode):04o}; others may read it (chmod 600)")
        if seen.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
            raise refuse("another user owns it")
        raw = os.read(descriptor, limit + 1)
        if len(raw) > limit:
            raise refuse(f"it is larger than {limit} bytes")
        again = os.lstat(path)
        if (again.st_dev, again.st_ino) != (seen.st_dev, seen.st_ino):
            raise refuse("it changed while it was read")
    finally:
        os.close(descriptor)
    try:
        return raw.decode("ascii")
    except UnicodeDecodeError:
        raise refuse("it is not plain text") from None


def read_credentials(path: str) -> Credentials:
    """The keys in a standalone credentials file: an `api_key: …` and an `admin_token: …` line.

    Raises: FileNotFoundError; Refusal unauthorized.
    """
    owned.check_directory(os.path.dirname(path))
    text = read_owned(path, CREDENTIALS_MAX)
    found: dict[str, str] = {}
    for line in text.split("\n"):
        if not line:
            continue
        name, colon, value = line.partition(": ")
        if not colon or name not in ("api_key", "admin_token") or name in found or not _SECRET.fullmatch(value):
            raise Refusal("unauthorized", f"{path} is not used: expected one api_key line and one admin_token line")
        found[name] = value
    if len(found) != 2:
        raise Refusal("unauthorized", f"{path} is not used: expected one api_key line and one admin_token line")
    if found["api_key"] == found["admin_token"]:
        raise Refusal("unauthorized", f"{path} is not used: the API key and the admin token are the same")
    return Credentials(**found)


def read_line(path: str) -> str | None:
    """A one-line record below `run/`, or None when there is none or it is not ours to believe."""
    try:
        return read_owned(path, 4096).rstrip("\n") or None
    except (FileNotFoundError, Refusal):
        return None


# ---------------------------------------------------------------- writing and checking


FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


_SQLITE_FULL: Final = 13
_SQLITE_MEANS_FULL_TOO: Final = (10, 14)  # IOERR and CANTOPEN: its log and its index could not be made or grown
_NO_ROOM_BYTES: Final = 64 << 10


def is_full(path: str, wrong: BaseException) -> bool:
    """Whether the reason is a full disk: what the system says, or SQLite, which calls it by other names as well."""
    if isinstance(wrong, OSError):
        return wrong.errno in FULL
    said = getattr(wrong, "sqlite_errorcode", 0) & 0xFF
    if said in _SQLITE_MEANS_FULL_TOO:
        try:
            disk = os.statvfs(os.path.dirname(path) or ".")
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize < _NO_ROOM_BYTES or (disk.f_files > 0 and disk.f_favail == 0)
    return bool(said == _SQLITE_FULL)


def no_space(path: str, wrong: OSError) -> Failure:
    """A disk, a quota or a limit that is full: nothing of the file was kept."""
    return Failure(
        "insufficient_space", f"{path} cannot be written: {os.strerror(wrong.errno or 0)}. Free some space there"
    )


def write_new(path: str, text: str) -> None:
    """A new private file (0600), whole or not at all. Raises: FileExistsError; Failure insufficient_space."""
    beside = _write_beside(path, text)
    try:
        os.link(beside, path)  # unlike rename, it never replaces
    finally:
        os.unlink(beside)
    _sync_directory(path)


def replace(path: str, text: str) -> None:
    """A private file (0600), replaced whole. Raises: Failure insufficient_space, and the old one stays."""
    beside = _write_beside(path, text)
    try:
        os.rename(beside, path)
    except OSError:
        os.unlink(beside)
        raise
    _sync_directory(path)


def _write_beside(path: str, text: str) -> str:
    beside = f"{path}.{os.getpid()}.{os.urandom(4).hex()}.new"
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            os.unlink(beside)
            raise
    except OSError as wrong:
        if wrong.errno in FULL:
            raise no_space(path, wrong) from None
        raise
    return beside


def _sync_directory(path: str) -> None:
    descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private(path: str) -> None:
    """The directory and what is missing above it, 0700.

    Raises: Refusal invalid_config when it cannot be made; Failure insufficient_space.
    """
    try:
        owned.private_directory(Path(path))
    except OSError as wrong:
        if wrong.errno in FULL:
            raise no_space(path, wrong) from None
        raise Refusal("invalid_config", f"{path} cannot be made: {os.strerror(wrong.errno or 0)}") from None


def keep_private(path: str) -> None:
    """As `make_private`, for a directory whose owner alone may reach it. Raises also: Refusal unsafe_file."""
    owned.check_directory(path)
    make_private(path)


def unsafe(path: str) -> str | None:
    """Why a role must not keep its state in `path`, naming the directory at fault, or None.

    The directory itself and every ancestor must be a real directory, owned by root or this user, and
    written by nobody else. A sticky ancestor of root is as good (a temporary directory): there
    nobody can replace what is not theirs.
    """
    if not os.path.isabs(path) or os.path.normpath(path) != path:
        return f"{path} is not an absolute path in its plain form"
    at = path
    while True:
        try:
            seen = os.lstat(at)
        except OSError as wrong:
            return f"{at}: {os.strerror(wrong.errno or 0)}"
        if stat.S_ISLNK(seen.st_mode):
            return f"{at} is a symbolic link"
        if not stat.S_ISDIR(seen.st_mode):
            return f"{at} is not a directory"
        if seen.st_uid not in (0, os.geteuid()):
            return f"{at} belongs to another user"
        if seen.st_mode & 0o022:
            sticky_of_root = seen.st_uid == 0 and seen.st_mode & stat.S_ISVTX
            if not sticky_of_root or at == path:
                return f"{at} can be written by others (mode {stat.S_IMODE(seen.st_mode):04o})"
        if at == "/":
            return None
        at = os.path.dirname(at)


def establish_credentials(places: Places, *, served_before: bool) -> Credentials:
    """The credentials of this state root, made when it is new. Call with the role's lock held.

    Args:
      served_before: a store exists, so missing credentials are lost, not new.
    Raises: Refusal unauthorized when they are lost or not to be trusted.
    """
    try:
        return read_credentials(places.credentials)
    except FileNotFoundError:
        if served_before:
            raise Refusal(
                "unauthorized",
                f"{places.credentials} is missing, and this state has served before; restore it from a backup, "
                "or start with a new state directory",
            ) from None
    import secrets

    keep_private(places.identity)
    made = Credentials(api_key=f"capy-{secrets.token_urlsafe(32)}", admin_token=f"capyadm-{secrets.token_urlsafe(32)}")
    write_new(places.credentials, f"api_key: {made.api_key}\nadmin_token: {made.admin_token}\n")
    return made
