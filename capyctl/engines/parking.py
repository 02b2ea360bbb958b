"""Whether a deployment may park, as far as its document and its profile say; hardware and model decide the rest.

Source: engines 13.1; memory 9. What is left is `capyctl.checkpoints.residency`.
"""

from __future__ import annotations

from capyctl.documents.deployment import Deployment
from capyctl.engines.families import family
from capyctl.engines.registered import Registered
from capyctl.fsm.types import Residency


def why_restart_only(document: Deployment, registered: Registered) -> str | None:
    """Why this deployment cannot park on that profile, or None when nothing here forbids it."""
    known = family(registered.engine)
    if not known.traits.parks:
        return f"{known.title} cannot park"
    if not registered.profile.parks:
        return why_profile_does_not_park(registered)
    if document.api == "decisions":
        return "a decisions deployment does not park"
    return known.restart_only(document, registered)


def why_profile_does_not_park(registered: Registered) -> str:
    """Of a profile of a family that parks: what its build lacks, else who on the host turned it off."""
    if registered.lacks:
        return f"the build of {registered.name} cannot park: it lacks {registered.lacks}"
    if registered.source == "local_engine":
        return f"this host opted out: local_engine.deep_park is off for {registered.name}"
    return f"this host opted out: the profile {registered.name} has security.deep_park: disabled"


def provisional(document: Deployment, registered: Registered) -> Residency:
    """The residency before the checkpoint is measured: what is declared, else deep for whatever may park.

    Why it is none that parks is `residency_reason`.

    A declared one that cannot be kept was refused by `check_deployment`.
    """
    if document.residency is not None:
        return Residency(document.residency)
    return Residency.RESTART_ONLY if why_restart_only(document, registered) is not None else Residency.DEEP


DECLARED = "the document states it"


def residency_reason(document: Deployment, registered: Registered) -> str:
    """Why the provisional residency is what it is; empty while hardware and model have the last word."""
    if document.residency is not None:
        return DECLARED
    return why_restart_only(document, registered) or ""
