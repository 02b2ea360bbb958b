"""Settings of a standalone role: what it runs with, and where each value comes from.

One order everywhere: `--set`, `CAPYCTL_SET__…`, the flag, the variable, the document, the default.
Nothing is replaced by a default because it could not be read; the start is refused and names who
stated it. Source: config 10, 11.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import attrs

from capyctl.documents import owned, paths, places, reader, strict
from capyctl.documents.paths import Origin, Row, Statement
from capyctl.documents.places import Places
from capyctl.documents.scalars import AbsolutePath
from capyctl.documents.standalone import Standalone
from capyctl.errors import Refusal


@attrs.frozen
class Named:
    """A setting with a flag and a variable of its own. `form` is how their text is read."""

    path: str
    flag: str | None
    variable: str | None
    form: Literal["text", "boolean", "words", "ports"] = "text"
    old: str | None = None  # an older variable, read with a warning
    empty_refused: bool = False  # an empty variable usually counts as unset; here a mistake was seen


_ENGINE: Final = "host.local_engine"
_SOURCES: Final = "host.model_sources"
_GROUPS: Final = "host.resource_policy.groups"
_LISTENERS: Final = "server.listeners"
NAMED: Final = (
    Named(
        f"{_LISTENERS}.inference.bind",
        "--listen",
        "CAPYCTL_INFERENCE_ADDR",
        old="CAPYCTL_STANDALONE_INFERENCE_ADDR",
    ),
    Named(f"{_LISTENERS}.inference.authentication", "--no-inference-auth", "CAPYCTL_INFERENCE_AUTH"),
    Named(
        f"{_LISTENERS}.management.bind",
        "--management-listen",
        "CAPYCTL_MANAGEMENT_ADDR",
        old="CAPYCTL_STANDALONE_MANAGEMENT_ADDR",
    ),
    Named("server.groups.stall_timeout", None, "CAPYCTL_GROUP_STALL_TIMEOUT"),
    Named("host.model_store.path", "--models-root", "CAPYCTL_MODELS_ROOT"),
    Named(f"{_SOURCES}.huggingface", "--model-sources", "CAPYCTL_MODEL_SOURCES"),
    Named(f"{_SOURCES}.http", "--model-sources", "CAPYCTL_MODEL_SOURCES"),
    Named(f"{_SOURCES}.plain_http", "--model-sources-plain-http", "CAPYCTL_MODEL_SOURCES_PLAIN_HTTP"),
    Named(f"{_SOURCES}.max_bytes", "--model-sources-max", "CAPYCTL_MODEL_SOURCES_MAX"),
    Named(f"{_SOURCES}.path", "--model-sources-path", "CAPYCTL_MODEL_SOURCES_PATH"),
    Named(f"{_SOURCES}.huggingface_endpoint", "--hf-endpoint", "CAPYCTL_HF_ENDPOINT", old="HF_ENDPOINT"),
    Named(
        "host.checkpoints.trust_declared_digest",
        "--trust-declared-digest",
        "CAPYCTL_TRUST_DECLARED_DIGEST",
        "boolean",
    ),
    Named(f"{_ENGINE}.vllm", "--vllm-bin", "CAPYCTL_VLLM_BIN"),
    Named(f"{_ENGINE}.sglang", "--sglang-bin", "CAPYCTL_SGLANG_BIN"),
    Named(f"{_ENGINE}.tensorfold", "--tensorfold-bin", "CAPYCTL_TENSORFOLD_BIN"),
    Named(f"{_ENGINE}.llamacpp", "--llamacpp-bin", "CAPYCTL_LLAMACPP_BIN"),
    Named(f"{_ENGINE}.build_fingerprint", "--engine-fingerprint", "CAPYCTL_ENGINE_FINGERPRINT"),
    Named(f"{_ENGINE}.args", "--engine-args", "CAPYCTL_ENGINE_ARGS", "words"),
    Named(f"{_ENGINE}.kv_cache", "--kv-cache", "CAPYCTL_KV_CACHE_BYTES"),
    Named(f"{_ENGINE}.deep_park", "--deep-park", "CAPYCTL_DEEP_PARK", empty_refused=True),
    Named(f"{_ENGINE}.trust_remote_code", "--trust-remote-code", "CAPYCTL_TRUST_REMOTE_CODE", "boolean"),
    Named(f"{_ENGINE}.installation_drift", "--installation-drift", "CAPYCTL_INSTALLATION_DRIFT", empty_refused=True),
    Named(f"{_ENGINE}.cuda_home", "--cuda-home", "CAPYCTL_CUDA_HOME"),
    Named("host.runtime_dir", "--runtime-dir", "CAPYCTL_RUNTIME_DIR"),
    Named(
        "host.resource_policy.endpoint_port_range",
        "--engine-ports",
        "CAPYCTL_ENGINE_PORTS",
        "ports",
        old="CAPYCTL_STANDALONE_ENGINE_PORTS",
        empty_refused=True,
    ),
    Named(f"{_GROUPS}.peer_address", "--peer-address", "CAPYCTL_PEER_ADDRESS"),
    Named(f"{_GROUPS}.rendezvous_port_range", "--rendezvous-ports", "CAPYCTL_RENDEZVOUS_PORTS", "ports"),
    Named(f"{_GROUPS}.require_rdma", "--require-rdma", "CAPYCTL_REQUIRE_RDMA", "boolean"),
)
_OTHERS: Final = (
    "CAPYCTL_CONFIG",
    "CAPYCTL_STATE_DIR",
    "CAPYCTL_HF_TOKEN",
    "CAPYCTL_ENGINE_ENV",
    "CAPYCTL_ENGINE_ADD_ENV",
    "CAPYCTL_APPROVE_ENV",
    "CAPYCTL_LOG",
    # written for engine processes; a role that is started by one of them may have them
    "CAPYCTL_ENGINE_LOG",
    "CAPYCTL_EXTRA_APPROVALS",
    "CAPYCTL_RENDEZVOUS_DIR",
    "CAPYCTL_OBSERVATION_DIR",
    "CAPYCTL_VLLM_ADMIN_KEY",
    "CAPYCTL_ENGINE_API_KEY",
    "CAPYCTL_ENGINE_ADMIN_KEY",
    "CAPYCTL_DEBUG_ENGINE_LOGS",
    "CAPYCTL_GROUP_EXPECTED",
)
"""Variables that are no setting's own."""
_STANDARD_NAMES: Final = ("HF_ENDPOINT",)  # other tools' variables: read quietly
_OWN: Final = "CAPYCTL_"
_SET: Final = f"{_OWN}SET__"
_SECRET: Final = re.compile(r"(^|_)(token|key|credential|secret)(_|$)")


@attrs.frozen(kw_only=True)
class Stated:
    """What a command line and an environment say. `flags` maps a flag's word to its text."""

    flags: Mapping[str, str] = attrs.field(factory=dict)
    overrides: Sequence[str] = ()
    environ: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    cwd: str = "/"
    config: str | None = None
    state_dir: str | None = None
    debug_engine_logs: bool = False


@attrs.frozen(kw_only=True)
class StandaloneSettings:
    """Everything a standalone role is started with.

    `document` has its places filled in: the three state directories and the models directory are
    absolute. `document_path` may not exist yet (`generated` is True): the role writes
    `standalone.GENERATED` there once it holds its lock.
    """

    document: Standalone
    places: Places
    document_path: str
    generated: bool
    engines_file: str
    models_dir: str
    debug_engine_logs: bool = False
    hf_token: str | None = attrs.field(default=None, repr=False)
    notices: tuple[str, ...] = ()
    rows: tuple[Row, ...] = attrs.field(default=(), repr=False)


def effective(stated: Stated, called: str | None = None) -> StandaloneSettings:
    """The settings of a standalone role that is started with what is `stated`. Reads, never writes.

    Args:
      called: how messages call the document, instead of its whole path.
    Raises: Refusal invalid_config naming the document, flag, variable or override at fault.
    """
    environ = stated.environ
    explicit = places.explicit_document(stated.config, environ, stated.cwd)
    root = places.stated_state_root(stated.state_dir, environ, stated.cwd)
    notices: list[str] = []
    if explicit is not None:
        path, exists = explicit[0], True
    else:
        path = Places(root or places.default_state_root(environ)).document("standalone")
        exists = os.path.exists(path)
    called = called or path
    raw = _read(path, called) if exists else {}
    if explicit is not None and isinstance(raw.get("state_dir"), str) and raw["state_dir"]:
        own = places.absolute(raw["state_dir"], os.path.dirname(path))
        if root is not None and root != own:
            notices.append(f"the state directory {root} is used instead of {own}, which {path} states")
        root = root or own
    where = Places(root or places.default_state_root(environ))
    notices += _mistyped(environ)
    statements = [*_named(stated, notices), *_by_path(stated)]
    document = paths.overlay(Standalone, raw, statements, called)
    document = _placed(document, where, environ, called)
    if stated.debug_engine_logs and "memory" in (document.host.engine_logs, _retention(document)):
        raise Refusal("invalid_config", "--debug-engine-logs: host.engine_logs is memory, so no engine log is written")
    assert document.host.model_store.path is not None
    return StandaloneSettings(
        document=document,
        places=where,
        document_path=path,
        generated=not exists,
        engines_file=places.engines_file(stated.config, environ, stated.cwd),
        models_dir=document.host.model_store.path,
        debug_engine_logs=stated.debug_engine_logs,
        hf_token=environ.get("CAPYCTL_HF_TOKEN") or environ.get("HF_TOKEN") or None,
        notices=tuple(notices),
        rows=paths.rows(document, raw, statements),
    )


def _retention(document: Standalone) -> str:
    return "memory" if document.host.retention == "zero" else "file"


def _read(path: str, called: str) -> dict[str, Any]:
    raw = reader.read(owned.read_regular(path, reader.BYTES_MAX, called), called)
    if type(raw) is not dict:
        raise Refusal("invalid_config", f"{called}: expected a standalone document")
    if "kind" not in raw:  # without one a document is a deployment
        raise Refusal("invalid_config", f"{called}: kind: is required; write kind: standalone")
    return raw


def _placed(document: Standalone, where: Places, environ: Mapping[str, str], source: str) -> Standalone:
    """The document with its state and models directories filled in."""
    for half, path in (("server", where.server), ("host", where.host)):
        stated = getattr(document, half).state_dir
        if stated not in (None, path):
            raise Refusal("invalid_config", f"{source}: {half}.state_dir: is {stated}; it can only be {path}")
    models = document.host.model_store.path or AbsolutePath(os.path.join(places.home_of(environ), "models"))
    return attrs.evolve(
        document,
        state_dir=where.root,
        server=attrs.evolve(document.server, state_dir=AbsolutePath(where.server)),
        host=attrs.evolve(
            document.host,
            state_dir=AbsolutePath(where.host),
            model_store=attrs.evolve(document.host.model_store, path=models),
        ),
    )


# ---------------------------------------------------------------- flags and variables


def _named(stated: Stated, notices: list[str]) -> list[Statement]:
    """Statements of variables, then of flags: the stronger come later."""
    variables, flags = [], []
    for named in NAMED:
        found = _variable(named, stated.environ, notices)
        if found is not None:
            variables.extend(_read_named(named, *found, "env"))
        if named.flag is not None and named.flag in stated.flags:
            flags.extend(_read_named(named, stated.flags[named.flag], named.flag, "flag"))
    return [*variables, *flags]


def _mistyped(environ: Mapping[str, str]) -> list[str]:
    """Notices of variables that come near to one that is read. Others that begin alike are somebody else's."""
    known = {name for named in NAMED for name in (named.variable, named.old) if name} | set(_OTHERS)
    found = []
    for name in sorted(environ):
        if name.startswith(_OWN) and not name.startswith(_SET) and name not in known:
            words = {one.removeprefix(_OWN): one for one in known if one.startswith(_OWN)}
            near = [words[word] for word in strict.nearest(name.removeprefix(_OWN), words)]
            if name.startswith(_SET.removesuffix("_")):
                near = [f"{_SET}…, with two underscores for each dot"]
            if near:
                found.append(f"{name} is not read; did you mean {near[0]}?")
    return found


def _variable(named: Named, environ: Mapping[str, str], notices: list[str]) -> tuple[str, str] | None:
    """The variable's text and its name; an empty one counts as unset."""
    for name in (named.variable, named.old):
        if name is None or name not in environ:
            continue
        text = environ[name]
        if not text:
            if named.empty_refused:
                raise Refusal("invalid_config", f"{name}: {named.path}: is empty; unset it, or state a value")
            continue
        if name == named.old and name not in _STANDARD_NAMES:
            notice = f"{name} is an old name; use {named.variable}"
            if notice not in notices:
                notices.append(notice)
        return text, name
    return None


def _read_named(named: Named, text: str, by: str, origin: Origin) -> list[Statement]:
    path = tuple(named.path.split("."))

    def statement(value: Any, *inside: str) -> Statement:
        return Statement(path=(*path, *inside), value=value, origin=origin, by=by)

    match named.form:
        case "boolean":
            words = {"true": True, "false": False}
            if by == "CAPYCTL_TRUST_REMOTE_CODE":
                words["1"] = True
            return [statement(words.get(text, text))]
        case "words":
            return [statement(text.split())]
        case "ports":
            found = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text, re.ASCII)
            if found is None:
                raise Refusal("invalid_config", f"{by}: {named.path}: expected <first>-<last>, such as 8100-8199")
            return [statement(int(found[1]), "start"), statement(int(found[2]), "end")]
        case "text":
            return [statement(text)]


# ---------------------------------------------------------------- by path


def _by_path(stated: Stated) -> list[Statement]:
    """Statements of `CAPYCTL_SET__…`, then of `--set`; each must agree with a flag or variable of its setting."""
    found = [*from_variables(Standalone, stated.environ), *from_overrides(Standalone, stated.overrides)]
    named = _named(stated, [])
    for override in found:
        for other in named:
            if other.path == override.path and paths.as_text(other.value) != paths.as_text(override.value):
                raise Refusal(
                    "invalid_config",
                    f"{override.by} and {other.by} state different values for {'.'.join(override.path)}; keep one",
                )
    return found


def from_variables(document: type[Any], environ: Mapping[str, str]) -> list[Statement]:
    """The `CAPYCTL_SET__A__B=value` statements about a document, sorted by name."""
    found = []
    for name in sorted(environ):
        if name.startswith(_SET):
            path = tuple(name.removeprefix(_SET).lower().split("__"))
            found.append(_override(document, path, environ[name], "env", name))
    return found


def from_overrides(document: type[Any], overrides: Sequence[str]) -> list[Statement]:
    """The `--set path=value` statements about a document, in order. Raises: Refusal for secrets and unknown paths."""
    found = []
    for text in overrides:
        written, equals, value = text.partition("=")
        by = f"--set {written}"
        if not equals or not written:
            raise Refusal("invalid_config", f"--set {written or text}: expected <path>=<value>")
        path = tuple(written.split("."))
        if "env" in path[:-1] or any(_SECRET.search(part) for part in path[-1:]):
            raise Refusal("invalid_config", f"{by}: secrets are not read from a command line; use the document")
        found.append(_override(document, path, value, "set", by))
    return found


def _override(document: type[Any], path: tuple[str, ...], text: str, origin: Origin, by: str) -> Statement:
    paths.check_path(document, path, by)
    if path == ("state_dir",):
        raise Refusal("invalid_config", f"{by}: state_dir is stated with --state-dir or CAPYCTL_STATE_DIR")
    return Statement(path=path, value=reader.read_scalar(text, by), origin=origin, by=by)
