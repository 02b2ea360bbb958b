"""`engine detect | add | list | remove | flags`: the installations on this machine.

Works before any role exists: the file is written, and the next start reads it. Source: cli 12.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

from cyclopts import Parameter

from capyctl.cli import control
from capyctl.cli.output import PLAIN, Common, Text, Words, emit_json, note, say, summary, table, yes
from capyctl.documents import kinds, places
from capyctl.documents.places import Places
from capyctl.errors import CapyError, Refusal

if TYPE_CHECKING:  # commands import what they need when they run
    from capyctl.documents.custom_engine import Manifest
    from capyctl.engines.register import Added

DRAIN_LIMIT_S: Final = 990.0
SPELLINGS_WIDTH: Final = 44
"""Columns of `engine flags` for the spellings of one option; the longest single one is 43."""


def _places(common: Common) -> tuple[Places, Path, Mapping[str, str]]:
    """The state root, the engines file, and profiles that a role document states (to the document's path)."""
    cwd = os.getcwd()
    explicit = places.explicit_document(common.config, os.environ, cwd)
    root = places.stated_state_root(common.state_dir, os.environ, cwd)
    stated: dict[str, str] = {}
    if explicit is not None:
        raw = kinds.read_file(explicit[0], explicit[0])
        kind = kinds.kind_of(raw, explicit[0])
        if kind == "server":
            raise Refusal("invalid_config", "a server has no engines; run the command on a host")
        own = raw.get("state_dir")
        if root is None and isinstance(own, str) and own:
            root = places.absolute(own, os.path.dirname(explicit[0]))
    where = Places(root or places.default_state_root(os.environ))
    if explicit is None and places.roles_run(where) == ("server",):
        raise Refusal("invalid_config", "a server has no engines; run the command on a host")
    document = explicit[0] if explicit else where.document("standalone")
    if os.path.isfile(document):
        stated = _stated(document)
    return where, Path(places.engines_file(common.config, os.environ, cwd)), stated


def _stated(document: str) -> dict[str, str]:
    raw: Any = kinds.read_file(document, document)
    block = raw.get("host", raw) if isinstance(raw, Mapping) else {}
    profiles = block.get("runtime_profiles") if isinstance(block, Mapping) else None
    return {str(name): document for name in profiles} if isinstance(profiles, Mapping) else {}


def detect(
    *,
    path: Annotated[Words | None, Parameter(help="Also look here; repeatable.")] = None,
    common: Common = PLAIN,
) -> None:
    """Find engine installations; runs nothing it finds."""
    from capyctl.engines.detect import detect as look
    from capyctl.engines.detect import holds_one

    extra = [Path(places.absolute(place, os.getcwd())) for place in path or ()]
    rows = look(os.environ, extra)
    for place in extra:
        if not place.exists():
            note(f"--path {place} is not there")
        elif not holds_one(place):
            note(f"--path {place} holds no engine")
    if common.as_json:
        emit_json(
            [
                {
                    "engine": row.engine,
                    "version": row.version,
                    "custom": row.custom,
                    "environment": row.environment,
                    "source": row.source,
                    "path": row.path,
                }
                for row in rows
            ]
        )
        return
    titles = ("ENGINE", "VERSION", "CUSTOM", "ENVIRONMENT", "SOURCE")
    cells = ((row.engine, row.version, yes(row.custom), row.environment, row.source) for row in rows)
    table(titles, cells, none="No engine was found. Look elsewhere with --path, or: capyctl engine add <path>")


def add(
    path: Annotated[Text, Parameter(help="Environment, llama-server or other program that is installed.")] = None,
    /,
    *,
    name: Annotated[Text, Parameter(help="Profile name; the engine's word otherwise.")] = None,
    arg: Annotated[Words | None, Parameter(help="Argument of every launch; repeatable.")] = None,
    deep_park: Annotated[Text, Parameter(help="enabled or disabled.")] = None,
    drift: Annotated[Text, Parameter(help="warn (default) or refuse when the installation changes.")] = None,
    env: Annotated[Words | None, Parameter(help="NAME=value for the engine; repeatable.")] = None,
    approve_env: Annotated[Words | None, Parameter(help="Variable deployments may set; repeatable.")] = None,
    approve_option: Annotated[Words | None, Parameter(help="Gated option deployments may pass; repeatable.")] = None,
    approve_path: Annotated[Words | None, Parameter(help="Directory gated options may name; repeatable.")] = None,
    allow_remote_code: Annotated[bool, Parameter(negative=(), help="Let models bring code.")] = False,
    custom: Annotated[Text, Parameter(help="Program of a custom engine; its manifest says how it is started.")] = None,
    manifest: Annotated[Text, Parameter(help="Manifest file of a custom engine.")] = None,
    yes: Annotated[bool, Parameter(name="--yes", negative=(), help="Confirm a custom engine without asking.")] = False,
    common: Common = PLAIN,
) -> None:
    """Register an engine installation, or a custom engine with --custom."""
    from capyctl.engines import register

    where, engines_file, stated = _places(common)
    parks = _word("--deep-park", deep_park, ("enabled", "disabled"))
    drifts = _word("--drift", drift, ("warn", "refuse")) or "warn"
    variables = _pairs(env or [], os.environ.get("CAPYCTL_ENGINE_ADD_ENV", ""))
    approved = approve_env or [word for word in os.environ.get("CAPYCTL_APPROVE_ENV", "").split(";") if word]
    if custom is not None or manifest is not None or yes:
        _check_custom(path, custom, manifest, name, parks, drift, approve_option or approve_path, allow_remote_code)
        places.make_private(str(engines_file.parent))
        added = register.add_custom(
            Path(str(custom)),
            Path(places.absolute(str(manifest), os.getcwd())),
            name=str(name),
            engines_file=engines_file,
            confirm=partial(_confirm, str(custom), yes),
            args=arg or (),
            env=variables,
            approve_env=approved,
            taken=tuple(stated),
            owner=_owner(where),
        )
        _report(added, where, common)
        return
    chosen = path if path is not None else _pick()
    places.make_private(str(engines_file.parent))
    added = register.add_engine(
        Path(places.absolute(chosen, os.getcwd())),
        engines_file=engines_file,
        name=name,
        args=arg or (),
        deep_park=cast("Literal['enabled', 'disabled'] | None", parks),
        drift=cast("Literal['warn', 'refuse']", drifts),
        env=variables,
        approve_env=approved,
        approve_options=approve_option or (),
        approve_paths=approve_path or (),
        allow_remote_code=allow_remote_code,
        environ=os.environ,
        taken=tuple(stated),
        owner=_owner(where),
    )
    _report(added, where, common)


def _report(added: Added, where: Places, common: Common) -> None:
    """Have a running role read the file, and say what became of it. Raises: CapyError when the role refused it."""
    published, failure = _publish(where)
    if common.as_json:
        emit_json({**added.as_json(), "published": published})
    else:
        row = added.registered
        pairs = {"Executable": row.executable}
        if row.manifest is not None:
            idle = row.manifest.idle
            pairs["API"] = row.manifest.api
            pairs["Health"] = row.manifest.health or "connects"
            pairs["Idle"] = "none" if idle is None else f"{idle.path} ({', '.join(idle.names)})"
        else:
            pairs["Deep park"] = row.deep_park + (f" (it lacks {added.lacks})" if added.lacks else "")
        if row.profile.cuda_home:
            pairs["CUDA"] = row.profile.cuda_home
        pairs["Engines file"] = f"{added.engines_file} (revision {added.revision})"
        pairs["Published"] = _published_cell(published)
        summary(f"Registered {row.name} ({row.engine} {row.version})", pairs)
        if published == "role_not_running":
            say()
            say(f"Saved in {added.engines_file} (revision {added.revision}); start with `capyctl start standalone`.")
            say(f"No role listens at {where.control_socket}.")
    if failure is not None:
        raise failure


def _check_custom(
    path: str | None,
    program: str | None,
    manifest: str | None,
    name: str | None,
    deep_park: str | None,
    drift: str | None,
    approvals: list[str] | None,
    remote_code: bool,
) -> None:
    """Refuse what a custom engine lacks or cannot be told. Raises: Refusal."""
    if path is not None:
        raise Refusal(
            "invalid_config",
            f"{path} is looked at by itself; --custom, --manifest and --yes are for a custom engine: keep one",
        )
    for option, value in (("--custom", program), ("--manifest", manifest), ("--name", name)):
        if value is None:
            raise Refusal(
                "invalid_config", f"{option} is missing; a custom engine needs --custom, --name and --manifest"
            )
    if deep_park == "enabled":
        raise Refusal("capability_missing:deep_park", "a custom engine cannot park; leave --deep-park out")
    if drift == "warn":
        raise Refusal("invalid_config", "--drift warn: a custom engine is pinned; a changed one is always refused")
    if approvals:
        raise Refusal("invalid_config", "the options of a custom engine are not checked; there is nothing to approve")
    if remote_code:
        raise Refusal("invalid_config", "--allow-remote-code: a custom engine is not told of it")


def _confirm(program: str, agreed: bool, manifest: Manifest, digest: str) -> None:
    """Ask the operator whether this program may be run. Raises: Refusal not_interactive without a terminal."""
    if agreed:
        return
    if not sys.stdin.isatty():
        raise Refusal("not_interactive", f"{program} is to be confirmed by a person; add --yes to confirm it here")
    note(f"CapyCTL will run this program for deployments, as this user:\n  {program}")
    note(f"  with    {' '.join(manifest.command)}\n  serves  {manifest.api}\n  pin     {digest}")
    for name in manifest.env:
        note(f"  sets    {name}")
    sys.stderr.write("Confirm it (yes/no)? ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("yes", "y"):
        raise Refusal("invalid_config", f"{program} was not confirmed; nothing was written")


def _word(option: str, value: str | None, allowed: tuple[str, ...]) -> str | None:
    if value is not None and value not in allowed:
        raise Refusal("invalid_config", f"{option} {value}: expected {' or '.join(allowed)}")
    return value


def _pairs(flags: list[str], variable: str) -> dict[str, str]:
    """`NAME=value` pairs of a variable, then of flags: a flag wins per name."""
    given = [("CAPYCTL_ENGINE_ADD_ENV", pair) for pair in variable.split(";") if pair]
    found: dict[str, str] = {}
    for by, pair in (*given, *(("--env", pair) for pair in flags)):
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise Refusal("invalid_config", f"{by} {name}: expected NAME=value")
        found[name] = value
    return found


def _pick() -> str:
    """The installation a person chooses from those found. Raises: Refusal not_interactive without a terminal."""
    from capyctl.engines.detect import detect as look

    if not sys.stdin.isatty():
        raise Refusal("not_interactive", "name the installation: `capyctl engine add <path>`")
    rows = look(os.environ)
    if not rows:
        raise Refusal("engine_not_found", "no engine was found; name the installation: `capyctl engine add <path>`")
    for number, row in enumerate(rows, 1):
        note(f"  {number}   {row.engine} {row.version}   {row.environment}")
    sys.stderr.write(f"Which one (1-{len(rows)})? ")
    sys.stderr.flush()
    answer = sys.stdin.readline().strip()
    if not answer.isdigit() or not 1 <= int(answer) <= len(rows):
        raise Refusal("invalid_config", f"{answer or 'nothing'} is not one of the installations listed")
    return rows[int(answer) - 1].path


def _owner(where: Places) -> tuple[int, int] | None:
    """Who owns the state root: a file that root makes is given to the role's user."""
    try:
        seen = os.stat(where.root)
    except OSError:
        return None
    return seen.st_uid, seen.st_gid


def _publish(where: Places) -> tuple[str, CapyError | None]:
    """Ask a running role to read the file again. The file is written either way.

    What the role refuses is `publish_rejected`, whatever its reason: the command itself was a good one.
    """
    try:
        answer = control.ask(where, {"verb": "add"})
    except CapyError as refusal:
        if refusal.code == "agent_unreachable":
            return "not_published", refusal
        return "not_published", Refusal("publish_rejected", f"the running role keeps its engines: {refusal.message}")
    return ("role_not_running" if answer is None else "published"), None


def _published_cell(published: str) -> str:
    return {"published": "yes", "role_not_running": "when capyctl starts"}.get(published, "no")


def list_profiles(*, common: Common = PLAIN) -> None:
    """List registered engines."""
    from capyctl.engines.custom.engines_file import read_custom
    from capyctl.engines.engines_file import read_engines
    from capyctl.engines.revisioned import CUSTOM, beside

    where, engines_file, stated = _places(common)
    read, custom = read_engines(engines_file), read_custom(beside(engines_file, CUSTOM))
    saved = {**read.profiles, **custom.profiles}
    for warning in read.warnings:
        note(warning)
    answer = control.ask(where, {"verb": "list"})
    live = {str(row.get("profile")): row for row in (answer or {}).get("profiles", ())}
    rows = [_row(name, row.source, row, live.get(name), answer is not None) for name, row in saved.items()]
    rows += [
        _row(name, os.path.basename(stated.get(name, "")) or "local_engine", None, row, True)
        for name, row in live.items()
        if name not in saved
    ]
    if common.as_json:
        head = {"engines_file": str(engines_file), "revision": read.revision, "custom_revision": custom.revision}
        emit_json({**head, "engines": rows})
        return
    titles = ("PROFILE", "SOURCE", "ENGINE", "VERSION", "CUSTOM", "DEEP PARK", "PUBLISHED", "DEPLOYMENTS")
    table(
        titles,
        (
            (
                row["profile"],
                row["source"],
                row["engine"],
                row["version"],
                yes(row["custom"]),
                row["deep_park"],
                row["published"],
                ",".join(row["deployments"]) or "-",
            )
            for row in rows
        ),
        none="No engine is registered. Try: capyctl engine detect",
    )


def _row(name: str, source: str, file: Any, live: Mapping[str, Any] | None, role: bool) -> dict[str, Any]:
    """One row from the file's profile, the role's, or both."""
    known: Mapping[str, Any] = live or {}
    published = "unknown" if not role else "published" if live is not None else "not published"
    parks = known.get("deep_park")
    return {
        "profile": name,
        "source": source,
        "engine": str(file.engine if file is not None else known.get("engine")),
        "version": str(file.version if file is not None else known.get("version") or "-"),
        "custom": bool(file.custom if file is not None else known.get("custom")),
        "deep_park": str(file.deep_park if file is not None else parks or "-"),
        "published": published,
        "deployments": [str(deployment) for deployment in known.get("deployments", ())],
    }


def remove(
    profile: Annotated[str, Parameter(help="Its name in `capyctl engine list`.")],
    /,
    *,
    drain: Annotated[bool, Parameter(negative=(), help="Stop the deployments that use it first.")] = False,
    common: Common = PLAIN,
) -> None:
    """Remove a registered engine."""
    from capyctl.documents.blocks import RESERVED_PROFILES
    from capyctl.engines.register import holder_of, remove_engine

    where, engines_file, stated = _places(common)
    if profile in stated:
        raise Refusal(
            "invalid_config", f"{profile} is stated in {stated[profile]}; remove it there and restart the role"
        )
    if profile in RESERVED_PROFILES:
        raise Refusal("invalid_config", f"{profile} is the role's own engine; change its start options, and restart it")
    holder = holder_of(profile, engines_file)
    request = {"verb": "remove", "profile": profile, "drain": drain}
    answer = control.ask(where, request, DRAIN_LIMIT_S if drain else control.ANSWER_LIMIT_S)
    revision = remove_engine(profile, engines_file=engines_file, stated=stated)
    published, failure = ("role_not_running", None) if answer is None else _publish(where)
    if common.as_json:
        emit_json({"removed": profile, "engines_file": str(holder), "revision": revision, "published": published})
    else:
        # `yes` is of the file as it is now: a running role has stopped offering the profile.
        cell = "no role runs" if published == "role_not_running" else _published_cell(published)
        pairs = {"Engines file": f"{holder} (revision {revision})", "Published": cell}
        summary(f"Removed {profile}", pairs)
    if failure is not None:
        raise failure


def flags(
    family: Annotated[str, Parameter(help="vllm, sglang, tensorfold, llamacpp or custom.")],
    /,
    *,
    common: Common = PLAIN,
) -> None:
    """Show which options and variables of an engine family are whose."""
    from capyctl.engines.families import flag_rows

    rows = flag_rows(family)
    if common.as_json:
        emit_json([dict(zip(("kind", "name", "class", "why"), row, strict=True)) for row in rows])
    else:
        table(("KIND", "NAME", "CLASS", "WHY"), (line for row in rows for line in _folded(*row)))


def _folded(kind: str, name: str, stance: str, why: str) -> Iterator[tuple[str, str, str, str]]:
    """One row of `engine flags`, and one more for spellings of an option that the column has no room for."""
    first, *more = textwrap.wrap(name, SPELLINGS_WIDTH, break_long_words=False, break_on_hyphens=False)
    yield kind, first, stance, why
    for part in more:
        yield " ", part, " ", " "
