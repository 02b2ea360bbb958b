"""`validate config`: whether a document is good, as far as that can be known without any role.

Source: config 13, cli 7.1.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

from cyclopts import Parameter

from capyctl.cli.output import PLAIN, Common, Words, emit_json, say, the_file
from capyctl.documents import kinds, strict
from capyctl.errors import Refusal

NOT_CHECKED: Final = (
    "resolution against a host (give --host <host.yaml>)",
    "enrolment and publication",
    "accepted engine profiles",
    "the stored resource policy",
    "route and name conflicts",
    "the digest of a new checkpoint",
)


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
    kind, document = kinds.check(raw, file, set or ())
    if host and kind != "deployment":
        raise Refusal("invalid_config", f"--host is for deployments; {file} is a {kind} document")
    resolved = _resolve(document, host) if host else None
    if common.as_json:
        completed = document.completed() if kind == "deployment" else document
        answer: dict[str, Any] = {
            "valid": True,
            "file": file,
            "kind": kind,
            "document": json.loads(strict.canonical(completed)),
        }
        if resolved is not None:
            answer["resolved"] = resolved
        elif kind == "deployment":
            answer["not_checked"] = list(NOT_CHECKED)
        emit_json(answer)
        return
    say(f"{file} is a valid {kind} document")
    if kind == "deployment" and resolved is None:
        say()
        say("Not checked")
        for entry in NOT_CHECKED:
            say(f"  {entry}")
    elif resolved is not None:
        from capyctl.cli.output import key_lines

        say()
        key_lines({str(key): str(value) for key, value in resolved.items()})


def _resolve(document: Any, files: list[str]) -> dict[str, str]:
    """What the host documents fill in: profile, devices, residency and bounds, each with its source."""
    hosts: dict[str, Any] = {}
    for path in files:
        kind, made = kinds.check(kinds.read_file(path, path), path)
        if kind != "host":
            raise Refusal("invalid_config", f"--host {path}: is a {kind} document; expected a host document")
        if made.name in hosts:
            raise Refusal("invalid_config", f"--host {path}: a document of host {made.name} was given already")
        hosts[made.name] = made
    completed = document.completed()
    wanted = completed.placement.hosts
    for name in wanted:
        if name not in hosts:
            raise Refusal("invalid_config", f"no --host document of {name}, which placement.hosts names")
    for name in hosts:
        if wanted and name not in wanted:
            raise Refusal("invalid_config", f"--host gives {name}, which placement.hosts does not name")
    lines: dict[str, str] = {}
    for name, host in hosts.items():
        lines |= {f"{name} {key}": value for key, value in _on(completed, host).items()}
    return lines


def _on(deployment: Any, host: Any) -> dict[str, str]:
    """The fields one host fills in."""
    profiles = host.runtime_profiles
    name = deployment.profile
    if name not in profiles:
        family = [known for known, profile in profiles.items() if profile.engine == name]
        if len(family) != 1:
            offered = ", ".join(profiles) or "none"
            raise Refusal("profile_not_published", f"{host.name} offers no profile {name}; it has {offered}")
        name = family[0]
    profile = profiles[name]
    try:
        deployment.check_family(profile.engine)
    except strict.Wrong as wrong:
        raise strict.refusal(wrong, "") from None
    policy = host.resource_policy
    pinned = deployment.runtime_profile_revision
    if pinned not in (None, profile.revision):
        raise Refusal("profile_not_published", f"{host.name} offers {name} revision {profile.revision}, not {pinned}")
    claims = [claim.id for claim in deployment.devices if claim.id] or sorted(policy.devices)[:1]
    for device in claims:
        if device not in policy.devices:
            raise Refusal("invalid_config", f"devices: {host.name} has no {device}")
    stated, bound = deployment.request_deadline, policy.queue.request_deadline
    residency = deployment.residency or ("restart_only" if not profile.parks else "derived from the checkpoint")
    return {
        "profile": f"{name} revision {profile.revision} ({'deployment' if pinned else 'host'})",
        "devices": f"{','.join(claims) or '-'} ({'deployment' if deployment.devices else 'host'})",
        "residency": f"{residency} ({'deployment' if deployment.residency else 'default'})",
        "request deadline": f"{stated or bound} ({'deployment' if stated else 'host'})",
    }
