"""Could a start begin at all? Asked of its host before anybody gives way for it.

A start whose files or installation changed is refused by its launch. To learn that only then would cost the
models that were stopped for it, so a switch is opened only for a start that its host has just looked at, with the
very code of the launch (P-DIGEST). What changes while the switch runs is found by the launch.
Source: lifecycle 4.3, 12.1, 15.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import attrs

from capyctl.control import events as e
from capyctl.control.book import Book, Question, Verified
from capyctl.control.orders import VerifyStart
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.types import DeploymentId, HostId, Lane, Millis

GOOD_MS: Final = Millis(10_000)
"""How long a passed look is believed; one from before the start was wanted never is."""
HOLDS_MS: Final = Millis(5_000)
"""How long others that wait for the same host are held back by a look: one that reads whole files takes longer."""
AGAIN_MS: Final = Millis(2_000)
"""Pause after a look that the host did not answer."""


def could_begin(book: Book, lane: Lane, host: HostId, since_ms: Millis) -> bool:
    """Whether its host has just seen that this start or wake could begin; else the host is asked, once."""
    question = _question(book, lane, host)
    known = book.verified.get(question)
    if known is not None:
        if known.again_at_ms is not None and known.again_at_ms > book.now_ms:
            return False
        if known.passed and known.asked_at_ms >= since_ms and book.now_ms - known.asked_at_ms <= GOOD_MS:
            return True
        if not known.passed and known.again_at_ms is None:
            return False  # asked, and not answered yet
    _drop_old(book)
    book.verified[question] = Verified(asked_at_ms=book.now_ms)
    _look_at(book, question, Millis(book.now_ms + HOLDS_MS))
    book.order(
        VerifyStart(deployment=lane.deployment, revision=question.revision, digest=question.digest, host=question.host)
    )
    return False


def _question(book: Book, lane: Lane, host: HostId) -> Question:
    """What is asked for a lane. Instances of one deployment may ask differently: a copy of before, and a new start."""
    row, owner = book.instances[lane], book.deployments[lane.deployment]
    wakes = row.phase is ResidencyPhase.WAKE_PLANNED
    return Question(
        deployment=lane.deployment,
        revision=row.revision if wakes else owner.state.revision,
        digest=(row.digest if wakes else owner.digest) or "",
        host=host,
    )


def is_about(book: Book, event: e.StartVerified, lane: Lane) -> bool:
    """Whether an answer is to what would be asked for this lane."""
    return _question(book, lane, event.host) == _asked(event)


def is_asked(book: Book, lane: Lane, hosts: Collection[HostId]) -> bool:
    """Whether one of these hosts is just looking at this start or wake."""
    return any(question == _question(book, lane, question.host) for question in _looked_at(book, hosts))


def holds_back(book: Book, target: DeploymentId, hosts: Collection[HostId]) -> bool:
    """Whether another start is being looked at on one of these hosts, which is to have the room there."""
    return any(question.deployment != target for question in _looked_at(book, hosts))


def _looked_at(book: Book, hosts: Collection[HostId]) -> Iterator[Question]:
    return (
        question
        for question, known in book.verified.items()
        if question.host in hosts
        and not known.passed
        and known.again_at_ms is None
        and book.now_ms - known.asked_at_ms < HOLDS_MS
    )


def heard(book: Book, event: e.StartVerified) -> bool:
    """Note an answer. Whether it is one to a question that is open."""
    question = _asked(event)
    known = book.verified.get(question)
    if known is None or known.passed:
        return False
    book.dirty = True
    if not event.looked:
        again = Millis(event.now_ms + AGAIN_MS)
        book.verified[question] = attrs.evolve(known, again_at_ms=again)
        _look_at(book, question, again)
        return False
    if event.code is not None:
        del book.verified[question]
    else:
        book.verified[question] = attrs.evolve(known, passed=True)
    return True


def _asked(event: e.StartVerified) -> Question:
    return Question(deployment=event.deployment, revision=event.revision, digest=event.digest, host=event.host)


def _look_at(book: Book, question: Question, at_ms: Millis) -> None:
    book.due.forget("verify", question)
    book.due.at(at_ms, "verify", question)


def _drop_old(book: Book) -> None:
    """Answers that nobody would believe any more."""
    for question, known in list(book.verified.items()):
        answered = known.passed or known.again_at_ms is not None
        if answered and book.now_ms - known.asked_at_ms > GOOD_MS:
            del book.verified[question]


def forget(book: Book, target: DeploymentId) -> None:
    """The deployment is deleted."""
    for question in [question for question in book.verified if question.deployment == target]:
        del book.verified[question]
