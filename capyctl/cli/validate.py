"""`validate config`: whether a document is good, as far as that can be known without any role.

A deployment is taken through every decision of a deploy on this machine, or on the hosts whose documents are given,
and what came out is printed with its source; what is left to a role is listed. Source: config 13, cli 7.1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import attrs
from cyclopts import Parameter

from capyctl.cli import previewed, running
from capyctl.cli.output import PLAIN, Common, Words, emit_json, key_lines, note, say, the_file
from capyctl.documents import kinds, places, strict
from capyctl.errors import CapyError, Refusal

if TYPE_CHECKING:  # a role document is checked without them
    from capyctl.documents.deployment import Deployment
    from capyctl.documents.settings import StandaloneSettings
    from capyctl.server.preview import Preview

FORM_ONLY: Final = (
    "enrolment and publication",
    "accepted engine profiles",
    "the stored resource policy",
    "route and name conflicts",
    "the digest of a new checkpoint",
)
"""What a document alone does not say, and no host was asked."""
ROLE_ONLY: Final = (
    "route and name conflicts",
    "the digest of a new checkpoint",
    "what others use of that memory when it starts",
)
"""What only a running role knows."""
CARDS_MATTER: Final = frozenset({"host_ineligible", "insufficient_device_memory", "device_conflict"})
"""What a card more could change."""
HOST_ONLY: Final = (
    "enrolment and publication",
    "the stored resource policy, and whether the limits fit what the host has",
)
"""What only the host itself knows of a document that is not of this machine."""

ROLE_LEFT: Final = {
    "server": ("whether its addresses are free, and its state directory", "hosts and what they publish"),
    "host": HOST_ONLY,
    "custom_engine": ("the program, which `capyctl engine add --custom` pins",),
}
"""What a document of another role, or of no role, does not say."""


def config(
    path: Annotated[str | None, Parameter(help="Document of any kind.")] = None,
    /,
    *,
    file: Annotated[str | None, Parameter(help="The same, as an option.")] = None,
    host: Annotated[Words | None, Parameter(help="Host document to resolve a deployment against; repeatable.")] = None,
    set: Annotated[Words | None, Parameter(help="Check a role document with <path>=<value>; repeatable.")] = None,
    common: Common = PLAIN,
) -> None:
    """Check a document offline."""
    file = the_file(path, file)
    raw = kinds.read_file(file, file)
    if kinds.is_deployment(raw):
        _deployment(raw, file, host or [], set or [], common)
        return
    kind, document, left = _of_a_role(raw, file, set or [], common)
    if host:
        raise Refusal("invalid_config", f"--host is for deployments; {file} is a {kind} document")
    if common.as_json:
        plain = json.loads(strict.canonical(document))
        emit_json({"valid": True, "file": file, "kind": kind, "document": plain, "not_checked": left})
        return
    say(f"{file} is a valid {kind} document")
    _say_left(left)


def _of_a_role(raw: dict[str, Any], file: str, overrides: list[str], common: Common) -> tuple[str, Any, list[str]]:
    """A document that is no deployment: its kind, the document, and what only its start or its host knows.

    A standalone one has the verdict of `start standalone --config <file>`. Raises: Refusal as that start.
    """
    if raw.get("kind") != "standalone":
        kind, document = kinds.check(raw, file, overrides)
        return kind, document, list(ROLE_LEFT[kind])
    from capyctl.cli import sites
    from capyctl.documents.settings import Stated, effective

    root = places.stated_state_root(common.state_dir, os.environ, os.getcwd())
    implicit = places.Places(root or places.default_state_root(os.environ)).document("standalone")
    stated = Stated(
        overrides=tuple(overrides),
        environ=dict(os.environ),
        cwd=os.getcwd(),
        config=None
        if places.absolute(file, os.getcwd()) == implicit and not os.environ.get("CAPYCTL_CONFIG")
        else file,
        state_dir=common.state_dir,
    )
    settings = effective(stated, file)
    for notice in settings.notices:
        note(notice)
    differs = running.other(settings)
    if differs is not None:
        note(differs.line)
    return "standalone", settings.document, sites.check_start(settings)


def _say_left(left: Sequence[str]) -> None:
    if left:
        say()
        say("Not checked")
    for entry in left:
        say(f"  {entry}")


def _deployment(raw: dict[str, Any], file: str, hosts: list[str], overrides: list[str], common: Common) -> None:
    from capyctl.documents.deployment import short_start

    if overrides:
        kinds.check(raw, file, overrides)  # refuses them
    document = _read(raw, file)
    found, unread = _resolved(document, file, hosts, common)
    short = short_start(document, _derived_ms(document, found))
    if short is not None:
        note(short)
    if not found:
        named = ",".join(document.completed().placement.hosts) or "a host"
        left = unread or [f"resolution against {named} (give --host <host.yaml>)"]
        left = [*left, *FORM_ONLY]
    else:
        left = [*unread, *(line for made in found for line in _not_looked_at(made))]
        left += [*(HOST_ONLY if hosts else ()), *ROLE_ONLY]
        if hosts and document.instances > 1 and not document.completed().placement.hosts:
            left.append("whether hosts that are not given can hold instances that these cannot")
    if common.as_json:
        answer: dict[str, Any] = {
            "valid": True,
            "file": file,
            "kind": "deployment",
            "document": json.loads(document.canonical()),
            "not_checked": left,
        }
        if found:
            answer["resolved"] = [previewed.record(made) for made in found]
        emit_json(answer)
        return
    say(f"{file} is a valid deployment document")
    for made in found:
        say()
        key_lines(previewed.key_values(made))
    _say_left(left)


def _derived_ms(document: Deployment, found: Sequence[Preview]) -> int | None:
    """What a start is given where `request_deadline` does not bound it, on the host where that is most."""
    from capyctl.checkpoints.time_limits import limits

    free = attrs.evolve(document, request_deadline=None)
    derived = [
        limits(free, int(made.plan.facts["weight_bytes"]), None, family=made.spec.traits.family)[0]
        for made in found
        if made.plan is not None
    ]
    return max(derived, default=None)


def _read(raw: dict[str, Any], file: str) -> Deployment:
    """The document as `deploy model` would send it, but for references that a network would have to pin."""
    from capyctl.cli.deploy import with_env
    from capyctl.documents.deployment import parse_deployment

    document = parse_deployment(raw, file, by_client=True)
    document = with_env(document, [], os.environ.get("CAPYCTL_ENGINE_ENV", ""))
    return document.with_home(places.home_of(os.environ)).settled(file)


def _resolved(document: Deployment, file: str, hosts: list[str], common: Common) -> tuple[list[Preview], list[str]]:
    """The deployment on the hosts that are given, else on this machine, and what of it could not be read.

    Nothing where there is nothing to ask. Cards that do not answer are no fault of a document: a role that knows
    them from before decides with them.
    """
    settings = None if hosts else _settings(common)
    wanted = document.completed().placement.hosts
    if settings is not None and not _may_have_engines(settings):
        return [], _without_engines(document, file, settings, wanted)
    # Everything that a role decides with is imported only when there is an engine to decide about.
    from capyctl.cli import sites
    from capyctl.server.preview import preview

    if settings is None:
        given = sites.of_documents(hosts, wanted)
        try:
            return preview(document, given, more_hosts=True), []
        except CapyError as refused:
            raise refused.of(file) from None
    try:
        here = sites.this_machine(settings)
    except CapyError as refused:
        if refused.code != "topology_unknown":
            raise
        return [], [f"this machine: {refused.message}"]
    if here is None:
        return [], _without_engines(document, file, settings, wanted)
    if wanted and here.allowed.name not in wanted:
        return [], []
    silent = [f"what does not answer on this machine: {card}" for card in here.silent]
    try:
        return preview(document, [here]), silent
    except CapyError as refused:
        if not here.silent or refused.code not in CARDS_MATTER:
            raise refused.of(file) from None
        return [], [*silent, f"this machine; with the cards that answer: {refused.message}"]


def _without_engines(document: Deployment, file: str, settings: StandaloneSettings, wanted: Sequence[str]) -> list[str]:
    """What is left where this machine has no engine: it decides nothing but where models may come from.

    Raises: Refusal as `check_sources`.
    """
    from capyctl.documents.model_source import Local

    if wanted:
        from capyctl.roles.machine import name_of

        if name_of(settings) not in wanted:
            return []
    if not all(isinstance(source, Local) for source in document.model.sources):
        from capyctl.cli import sites

        try:
            sites.check_sources(settings, document)
        except CapyError as refused:
            raise refused.of(file) from None
    return [
        f"this machine: no engine {document.profile} is registered here, so a deploy would be refused; "
        "add one with `capyctl engine add <path>` (`capyctl engine detect` lists what is installed)"
    ]


def _settings(common: Common) -> StandaloneSettings:
    """What the standalone role on this machine runs with, else would be started with. Raises: Refusal as that start."""
    from capyctl.documents.settings import Stated, effective
    from capyctl.documents.started import as_started

    settings = effective(
        Stated(environ=dict(os.environ), cwd=os.getcwd(), config=common.config, state_dir=common.state_dir)
    )
    for notice in settings.notices:
        note(notice)
    differs = running.other(settings)
    if differs is None:
        return settings
    try:
        used = as_started(settings, differs.started)
    except CapyError:  # noted by another release
        note(f"{differs.line}; the document's are used")
        return settings
    note(f"{differs.line}; they are used")
    return used


def _may_have_engines(settings: StandaloneSettings) -> bool:
    half = settings.document.host
    custom = os.path.join(os.path.dirname(settings.engines_file), "custom-engines.yaml")
    stated = half.runtime_profiles or half.local_engine.installations
    return bool(stated) or os.path.lexists(settings.engines_file) or os.path.lexists(custom)


def _not_looked_at(made: Preview) -> list[str]:
    """What of one host could not be looked at from here."""
    if made.facts is not None or made.refused is not None:
        return []
    source = strict.unstructure(made.document.model)["source"]
    named = next((str(source[key]) for key in ("path", "repo", "url", "url_ref") if source.get(key)), "it")
    where = "is not on this machine" if "path" in source else "is not downloaded here"
    return [f"the model's files on {made.site.allowed.name}, and with them memory and context: {named} {where}"]
