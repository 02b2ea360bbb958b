"""What starts and parks were measured to need: kept in the plans that later starts of the revision are sized by.

A measurement belongs to a revision, a host and the installation that ran it. It lies in the plans, which are rows, so
it outlives the role; a new revision begins with its own estimates, and so does one whose installation was exchanged.
Source: memory 8.1, 8.3.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from capyctl.control.book import Book
from capyctl.control.records import DeploymentRow, InstanceRow
from capyctl.fsm.types import Bytes, Domain, HostId, Lane, Phase
from capyctl.ledger import estimates
from capyctl.ledger.types import Plan


def started(book: Book, lane: Lane, peak: Mapping[Domain, Bytes]) -> None:
    """The most that a start held, by domain; nothing where its host could not tell that start from others."""
    if peak:
        keep(book, lane, Phase.COLD, peak)


def keep(book: Book, lane: Lane, phase: Phase, seen: Mapping[Domain, Bytes]) -> None:
    """Plan with what was seen of a run: for this run, for its like on the host, and for whoever starts there later."""
    row = book.instances[lane]
    host, policy = row.run.placed_on, book.ledger.hosts[row.run.placed_on]
    for other, one in alike(book, lane):
        if one.plan is not None:
            theirs = seen if other == lane else estimates.as_seen_by(one.plan, policy, phase, seen)
            plan = estimates.with_measured(one.plan, policy, phase, theirs)
            if plan is not one.plan:
                book.put_instance(other, attrs.evolve(one, plan=plan))
    owner = book.deployments[lane.deployment]
    present = owner.plans.get(host)
    if owner.state.revision != row.revision or present is None or not _same_installation(book, owner, host, row):
        return
    plan = estimates.with_measured(present, policy, phase, estimates.as_seen_by(present, policy, phase, seen))
    if plan is not present:
        _put(book, owner, host, attrs.evolve(plan, installation=book.installation(host, owner.spec.profile)))


def alike(book: Book, lane: Lane) -> list[tuple[Lane, InstanceRow]]:
    """The instances of the same revision that hold something on the same host, the lane itself among them."""
    row = book.instances[lane]
    return [
        (other, one)
        for other, one in book.of(lane.deployment)
        if one.revision == row.revision
        and one.run.host == row.run.host
        and book.ledger.holding(other.owner) is not None
    ]


def _same_installation(book: Book, owner: DeploymentRow, host: HostId, row: InstanceRow) -> bool:
    """Whether the run was of the installation that later ones will be of, as far as anybody knows."""
    present = book.installation(host, owner.spec.profile)
    mine = None if row.plan is None else row.plan.installation
    return present is None or mine is None or present == mine


def installed(book: Book, host: HostId, installations: Mapping[str, str]) -> None:
    """What a host runs its profiles with, from now on: measurements of other installations count no more."""
    if book.installations.get(host) == installations:
        return  # a session that came back with what it had
    book.installations[host] = dict(installations)
    for owner in list(book.deployments.values()):
        plan, present = owner.plans.get(host), installations.get(owner.spec.profile)
        if plan is not None and None not in (present, plan.installation) and present != plan.installation:
            _put(book, owner, host, estimates.as_estimated(plan))


def resolved(book: Book, before: DeploymentRow, plans: Mapping[HostId, Plan]) -> dict[HostId, Plan]:
    """The plans of a revision that was resolved again on the same files, with what was measured of it before."""
    return {
        host: estimates.carried_over(before.plans[host], plan, book.hosts[host].policy)
        if host in before.plans and host in book.hosts
        else plan
        for host, plan in plans.items()
    }


def _put(book: Book, owner: DeploymentRow, host: HostId, plan: Plan) -> None:
    book.put_deployment(attrs.evolve(owner, plans={**owner.plans, host: plan}))
