"""Whether a deployment may run on a registered installation: everything the document and the profile decide.

Pure; the checkpoint and the memory are asked elsewhere.
Source: engines 3, 4.2, 15.1; config 7.3.
"""

from __future__ import annotations

from capyctl.checkpoints import host_memory
from capyctl.documents import strict
from capyctl.documents.deployment import Deployment
from capyctl.documents.strict import Wrong
from capyctl.engines.environment import check_deployment_env
from capyctl.engines.families import family
from capyctl.engines.options import check_extra_args
from capyctl.engines.parking import why_profile_does_not_park
from capyctl.engines.registered import Registered
from capyctl.errors import Refusal


def check_deployment(document: Deployment, registered: Registered) -> None:
    """Check fields, extra arguments, variables, served name and API against the profile and its family.

    Raises: Refusal `invalid_config`, `no_safe_estimate`, `engine_env_reserved:…`, `engine_env_not_approved:…`,
      `capability_missing:…`, `profile_not_published` for a pinned profile revision that is not there.
    """
    known, config = family(registered.engine), document.engine_config
    try:
        document.check_family(known.name)
    except Wrong as wrong:
        raise strict.refusal(wrong, document.name) from None
    pinned = document.runtime_profile_revision
    if pinned is not None and pinned != registered.revision:
        raise Refusal(
            "profile_not_published",
            f"{document.name} pins revision {pinned} of the profile {registered.name}; it is at {registered.revision}",
        )
    if document.api == "decisions" and not known.decisions(registered.version):
        raise Refusal("capability_missing:decisions", f"{known.title} {registered.version} answers no decisions")
    if registered.manifest is not None and document.api != registered.manifest.api:
        raise Refusal(
            "invalid_config",
            f"{document.name}: api: is {document.api}; the custom engine {registered.name} serves "
            f"{registered.manifest.api}",
        )
    known.check_document(document, registered)
    _check_profile(document, registered)
    known.check_served_name(document.routes[0] if document.routes else document.name)
    check_extra_args(known.options, config.extra_args, registered.consent, registered.profile.args)
    host_memory.taken({"host_args": registered.profile.args}, document, known.name)
    check_deployment_env(config.env, known.reserved_env, registered.profile.security.approved_env)


def _check_profile(document: Deployment, registered: Registered) -> None:
    """What the host's profile must allow: a park, and code that a model brings."""
    security = registered.profile.security
    if document.residency in ("deep", "host_backed") and not registered.profile.parks:
        way_out = "register another build" if registered.lacks else "register it with --deep-park enabled"
        raise Refusal(
            "capability_missing:deep_park",
            f"{document.name}: residency is {document.residency}, and {why_profile_does_not_park(registered)}. "
            f"Use residency: restart_only, or {way_out}",
        )
    if document.engine_config.trust_remote_code and not security.trust_remote_code:
        raise Refusal(
            "invalid_config",
            f"{document.name}: engine_config.trust_remote_code: the profile {registered.name} does not allow code of "
            "models. Try: capyctl engine add … --allow-remote-code",
        )
