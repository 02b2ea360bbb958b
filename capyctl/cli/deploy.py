"""`deploy model`: read the document, settle what only this user knows, send it, maybe start it.

`~/` is expanded and `hf:` references are pinned here, because the role has another home and must
not choose which commit "today" is. Source: cli 9, config 7.2.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Final

import attrs
from cyclopts import Parameter

from capyctl.cli import lifecycle, progress
from capyctl.cli.client import Management
from capyctl.cli.lifecycle import RequestId, Wait
from capyctl.cli.output import PLAIN, Common, Words, emit_json, note, summary, the_file
from capyctl.documents import owned, places, reader, strict
from capyctl.documents.deployment import Deployment, parse_deployment, short_start
from capyctl.documents.model_source import HuggingFace
from capyctl.documents.scalars import EnvName, EnvValue, parse_env_name, parse_env_value, parse_https
from capyctl.errors import CapyError, Refusal

HUB: Final = "https://huggingface.co"
HUB_SETTING: Final = "host.model_sources.huggingface_endpoint"


def model(
    path: Annotated[str | None, Parameter(help="Deployment document.")] = None,
    /,
    *,
    file: Annotated[str | None, Parameter(help="The same, as an option.")] = None,
    revision: Annotated[str | None, Parameter(help="Current revision of the deployment to replace.")] = None,
    activate: Annotated[bool, Parameter(negative=(), help="Also start it.")] = False,
    wait: Wait = False,
    evict: Annotated[bool, Parameter(negative=(), help="With --activate: park or stop idle models.")] = False,
    initialize_timeout: Annotated[str | None, Parameter(help="Bound of this start alone, such as 300s.")] = None,
    hf_endpoint: Annotated[str | None, Parameter(help="Hub that hf: references are pinned at.")] = None,
    engine_env: Annotated[Words | None, Parameter(help="NAME=value for the engine; repeatable.")] = None,
    request_id: RequestId = None,
    common: Common = PLAIN,
) -> None:
    """Create a deployment, or replace one with --revision."""
    file = the_file(path, file)
    if wait and not activate:
        raise Refusal("invalid_config", "--wait waits for a start; use it with --activate")
    expected = _revision(revision)
    timeout = lifecycle.stated_duration(initialize_timeout, "--initialize-timeout")
    document = read_document(file)
    api = lifecycle.management(common, request_id)  # before a Hub is asked: without a role nobody needs to wait for it
    deployment = settle(document, file, hf_endpoint, engine_env or [], hub_of_role=partial(hub_of, api))
    short = short_start(deployment)
    if short is not None and timeout is None:
        note(short)
    config = strict.unstructure(deployment.completed())
    current = None if expected is None else api.deployment(deployment.name)
    lifecycle.announce(api)
    if current is None:
        receipt = _create(api, deployment.name, config, file)
    else:
        body = {"expected_revision": expected, "config": config}
        receipt = api.change("PUT", f"/deployments/{current['id']}", body)
    view = api.deployment(str(receipt["deployment_id"]))
    if activate and wait:
        view = lifecycle.started(api, view, evict=evict, timeout=timeout)
        _deployed(view, common)
        return
    digest = checkpoint_of(view)
    receipt = {**receipt, "checkpoint_digest": digest[0]}
    if activate:
        bound = None if timeout is None else timeout.ms
        start = lifecycle.act(
            api, view, "start", lifecycle.START_LIMIT_MS, evict=evict or None, initialize_timeout_ms=bound
        )
        receipt = lifecycle.looked_at(api, deployment.name, {**receipt, **start}, common)
    _accepted(deployment.name, receipt, digest, common, created=current is None, activated=activate)


def _create(api: Management, name: str, config: Any, file: str) -> dict[str, Any]:
    """The receipt of a new deployment. Raises: the role's refusal, with the way on when the name is taken."""
    try:
        return api.change("POST", "/deployments", {"config": config, "activate": False})
    except CapyError as refusal:
        if refusal.code != "route_conflict":
            raise
        taken = next((view for view in api.deployments() if view.get("name") == name), None)
        if taken is None:
            raise
        revision = taken.get("revision")
        raise Refusal(
            "route_conflict",
            f"{name} is deployed (revision {revision}). "
            f"To replace it: capyctl deploy model --file {shlex.quote(file)} --revision {revision}",
            details=refusal.details,
        ) from None


def _revision(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or not 0 < len(text) <= 18 or int(text) == 0:
        raise Refusal("invalid_config", f"--revision {text}: expected the number in the REVISION column")
    return int(text)


def read_document(file: str) -> Deployment:
    """The deployment document in a file, as its user wrote it. Raises: Refusal invalid_config."""
    return parse_deployment(owned.read_regular(file, reader.BYTES_MAX), file, by_client=True)


def settle(
    deployment: Deployment,
    source: str,
    hf_endpoint: str | None,
    engine_env: list[str],
    *,
    hub_of_role: Callable[[], str] = lambda: HUB,
) -> Deployment:
    """The document with what only the CLI can say: `~/` expanded, `hf:` pinned, `--engine-env` added.

    Args:
      hub_of_role: where a Hub is asked when neither the command nor its environment says so.
    """
    deployment = with_env(deployment, engine_env, os.environ.get("CAPYCTL_ENGINE_ENV", ""))
    found = deployment.with_home(places.home_of(os.environ)).model
    if any(isinstance(source_, HuggingFace) and not source_.pinned for source_ in found.sources):
        stated = hf_endpoint or os.environ.get("CAPYCTL_HF_ENDPOINT") or os.environ.get("HF_ENDPOINT")
        hub = stated or hub_of_role()
        found = attrs.evolve(
            found,
            source=_pinned(found.source, hub),
            draft=None if found.draft is None else _pinned(found.draft, hub),
        )
    return attrs.evolve(deployment, model=found).settled(source)


def with_env(deployment: Deployment, flags: list[str], variable: str) -> Deployment:
    """`engine_config.env` with the variables of flags and CAPYCTL_ENGINE_ENV; a flag wins per name.

    Raises: Refusal engine_env_conflict for a name that the document states too.
    """
    added: dict[EnvName, EnvValue] = {}
    given = [("CAPYCTL_ENGINE_ENV", pair) for pair in variable.split(";") if pair]
    for by, pair in (*given, *(("--engine-env", pair) for pair in flags)):
        name, equals, value = pair.partition("=")
        if not equals:
            raise Refusal("invalid_config", f"{by} {name}: expected NAME=value")
        try:
            added[parse_env_name(name)] = parse_env_value(value)
        except ValueError as wrong:
            raise Refusal("invalid_config", f"{by} {name}: {wrong}") from None
    for name in added:
        if name in deployment.engine_config.env:
            raise Refusal(
                f"engine_env_conflict:{name}", f"{name} is stated by the document and beside it; keep one of them"
            )
    if not added:
        return deployment
    config = attrs.evolve(deployment.engine_config, env={**deployment.engine_config.env, **added})
    return attrs.evolve(deployment, engine_config=config)


def hub_of(api: Management) -> str:
    """The Hub that the role downloads from, so that what it is to fetch is pinned where it will be fetched."""
    rows = api.get("/config/effective").get("settings") or ()
    return next((str(row["value"]) for row in rows if row.get("setting") == HUB_SETTING and row.get("value")), HUB)


def _pinned(source: Any, hub: str) -> Any:
    """A Hub reference at its present commit; other sources as they are. Asks the Hub."""
    if not isinstance(source, HuggingFace) or source.pinned:
        return source
    from capyctl.downloads import pin, tokens

    try:
        hub = parse_https(hub)
    except ValueError as wrong:
        raise Refusal("invalid_config", f"--hf-endpoint {hub}: {wrong}") from None
    # A source with a token of its own has it on its host; here it would be the wrong one.
    token = None if source.token_ref is not None else tokens.from_environment(os.environ)
    commit = pin.commit_of(source.repo, source.revision, endpoint=hub, token=token)
    return attrs.evolve(source, revision=commit)


def checkpoint_of(view: dict[str, Any]) -> tuple[str, str]:
    """What a view says of the checkpoint's digest: for JSON, and for people (empty when there is nothing to say)."""
    checkpoint = view.get("checkpoint") or {}
    digest, state = checkpoint.get("digest"), str(checkpoint.get("state") or "")
    if digest:
        return str(digest), str(digest)
    if state == "materializing":
        return "pending", f"being downloaded: {progress.downloaded(checkpoint.get('download') or {})}"
    if state in ("pending", "measuring", ""):
        return "pending", progress.being_measured(checkpoint)
    return state, f"{state}: {checkpoint.get('reason')}" if checkpoint.get("reason") else state


def _accepted(
    name: str, receipt: dict[str, Any], digest: tuple[str, str], common: Common, *, created: bool, activated: bool
) -> None:
    if common.as_json:
        emit_json(receipt)
        return
    done = "created" if created else "updated"
    pairs = {
        "Deployment ID": str(receipt["deployment_id"]),
        **lifecycle.receipt_lines(receipt),
        "Checkpoint digest": digest[1],
    }
    hints = []
    if digest[0] == "pending" and not activated:
        hints = [
            f"The digest is not known yet; `capyctl start deployment {name} --wait` waits for it and starts the model."
        ]
    summary(f"Deployment {name} {done} (revision {receipt.get('revision')})", pairs, hints)


def _deployed(view: dict[str, Any], common: Common) -> None:
    if common.as_json:
        emit_json(view)
        return
    ready = lifecycle.ready_lines(view)
    pairs = {
        "Revision": str(view.get("revision")),
        "Hosts": ready["Hosts"],
        "Ready": ready["Ready"],
        "Startup": lifecycle.startup_cell(view),
    }
    context = view.get("context")
    if context:
        pairs["Context"] = f"{context.get('tokens')} tokens"
    pairs["Operation"] = ready["Operation"]
    summary(f"Deployed {view['name']}: ready", pairs)
