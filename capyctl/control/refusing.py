"""Victims that would not give way: an engine that never reads idle, or a park that its host refused.

Such a one serves on and is asked by no switch again for a while, or every switch would close its door for the length
of a drain, for nothing. An engine that did not read idle may be asked as soon as it does.
Source: lifecycle 12, invariant 71.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from capyctl.control import events as e
from capyctl.control.book import Book, Refused
from capyctl.control.orders import ReadLoad
from capyctl.fsm import switch
from capyctl.fsm.types import HostId, Lane, Millis

BUSY_MS: Final = Millis(300_000)
"""How long a victim is left alone that did not read idle, unless it does before."""
REFUSED_MS: Final = Millis(60_000)
"""How long one is left alone whose park was refused for another reason, or whose requests did not end."""
BUSY_RETRY_MS: Final = Millis(10_000)
"""When a request may ask again that is in want of the room of one that does not read idle."""
NOT_IDLE: Final = "does not read idle"
UNDRAINED: Final = "operation_failed"  # the code of a park whose drain did not end in time


def note(book: Book, lane: Lane, code: str, reason: str, *, drained: bool) -> str:
    """Leave this victim alone from now on. `drained`: no request of ours was in its way. Returns why, without names."""
    busy = code == UNDRAINED and drained
    why = NOT_IDLE if busy else "was still answering" if code == UNDRAINED else f"could not be released ({code})"
    until = Millis(book.now_ms + (BUSY_MS if busy else REFUSED_MS))
    told = why if busy or code == UNDRAINED else f"{why}: {reason}"
    book.refused[lane] = Refused(until_ms=until, why=told, answer=why, idle=busy)
    book.due.at(until, "waiters", lane.deployment)
    return why


def is_left_alone(book: Book, lane: Lane) -> bool:
    """Whether no switch asks it now."""
    refused = book.refused.get(lane)
    return refused is not None and book.now_ms < refused.until_ms


def answer(book: Book, chosen: Collection[Lane]) -> tuple[str, int]:
    """What a request is told while these are left alone, without names, and after how many seconds it may ask again.

    Their gauges are read meanwhile, so that whoever asks again finds what is true by then.
    """
    for lane in chosen:
        run = book.instances[lane].run
        if is_left_alone(book, lane) and book.refused[lane].idle and run.host in book.online:
            book.order(ReadLoad(incarnation=run.incarnation, host=run.placed_on))
    left = [book.refused[lane] for lane in chosen if is_left_alone(book, lane)]
    why = left[0].answer
    wait_ms = min(BUSY_RETRY_MS if one.idle else one.until_ms - book.now_ms for one in left)
    return f"the model in its way {why}{switch.ASK_AGAIN}", max(1, -(-wait_ms // 1_000))


def heard(book: Book, event: e.LoadReported) -> None:
    """A reading of an engine's gauges: one that reads idle may be asked again."""
    refused = book.refused.get(event.incarnation.lane)
    if refused is not None and refused.idle and not event.running and not event.waiting:
        del book.refused[event.incarnation.lane]
        book.dirty = True


def words(book: Book, hosts: Collection[HostId]) -> str:
    """Who is left alone on these hosts, why and for how long, for those who see names; empty where nobody is."""
    said = []
    for lane, refused in sorted(book.refused.items()):
        if is_left_alone(book, lane) and book.instances[lane].run.host in hosts:
            name = f"{book.deployments[lane.deployment].spec.name}/{lane.index}"
            pause_s = (BUSY_MS if refused.idle else REFUSED_MS) // 1_000
            again = f"{'once it does, or ' if refused.idle else ''}{pause_s} s after that"
            said.append(f"; {name} {refused.why}, and is asked again {again}")
    return "".join(said)
