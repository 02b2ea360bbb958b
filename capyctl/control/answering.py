"""Answers that are owed: a start with `--evict` is answered once it is known who gives way for it, or that nobody can.

Its receipt names the switch and the victims, which are planned after the host has looked at the start. The receipt
is durable from the first step on, so whoever loses the answer asks again with the same key; only the answer itself
waits, and not for long. A start that comes to nothing before anything was begun is answered with its refusal, and
the key is free again. Source: cli 14.3; api 5.3.
"""

from __future__ import annotations

from typing import Final

import attrs

from capyctl.control import events as e
from capyctl.control import operations, waits
from capyctl.control.book import Book, Owed
from capyctl.control.orders import Receipt, Reply
from capyctl.control.records import WAITING, InstanceRow
from capyctl.fsm import operation
from capyctl.fsm.types import Lane, Millis
from capyctl.ledger.placement import Nowhere
from capyctl.ledger.victims import LIFTED

WAITS_MS: Final = Millis(5_000)
"""How long an answer is owed at most; then the receipt goes out as it is."""
CAPACITY = frozenset({"insufficient_resources", "insufficient_memory", "startup_requires_empty_host"})


def owe(book: Book, command: e.Command, receipt: Receipt, *, refusable: bool) -> None:
    """Answer this command later. `refusable`: nothing else was done for it, so that it may still be refused."""
    assert receipt.operation is not None  # a start always has one
    until = Millis(book.now_ms + WAITS_MS)
    book.owed[command.key] = Owed(receipt=receipt, operation=receipt.operation, until_ms=until, refusable=refusable)
    book.due.at(until, "answer", command.key)


def again(book: Book, key: str) -> bool:
    """The same command came once more before it was answered: both are answered then. False: nothing is owed."""
    owed = book.owed.get(key)
    if owed is None:
        return False
    book.owed[key] = attrs.evolve(owed, times=owed.times + 1)
    return True


def ticked(book: Book, key: str) -> None:
    """The time of an answer has come: if nobody could give way until now, that is the answer."""
    owed = book.owed.get(key)
    state = None if owed is None else book.operations.get(owed.operation)
    if state is not None:
        for lane, _ in book.of(state.deployment):
            book.asked_around.pop(lane, None)


def settle(book: Book, event: e.Event) -> None:
    """Give the answers that can be given after this step. A refusal comes after the step that accepted the command."""
    for key, owed in list(book.owed.items()):
        state = book.operations.get(owed.operation)
        late = isinstance(event, e.Ticked) and book.now_ms >= owed.until_ms
        if state is not None and not late and _undecided(book, state):
            continue
        refused = state is not None and owed.refusable and state.phase is operation.Phase.FAILED
        if (refused or owed.times > 1) and _is_of(event, key):
            book.due.at(book.now_ms, "answer", key)  # the step that took the command changes what a command changes
        elif state is not None and refused:
            _answer(book, key, owed, Reply(key=key, code=state.code, message=_refusal(book, state)))
            if book.receipts.pop(key, None) is not None:
                book.touch("receipt", key)
        else:
            _answer(book, key, owed, Reply(key=key, receipt=_named(book, key, owed, state)))


def _refusal(book: Book, state: operation.State) -> str:
    """Which instance cannot be placed and why; where it is memory that lacks, what may be done about it."""
    owner = book.deployments.get(state.deployment)
    index = next((target.index for target in state.targets if target.result is operation.Result.FAILED), 0)
    text = f"{owner.spec.name}/{index}: {state.reason}" if owner is not None else state.reason
    if state.code not in CAPACITY:
        return text
    helps = "" if waits.NOBODY in text else " Stop what is in its way, or leave --evict out to wait for memory."
    return f"{text} Nobody was released.{helps}"


def _is_of(event: e.Event, key: str) -> bool:
    command: e.Command | None = getattr(event, "command", None)
    return command is not None and command.key == key


def _answer(book: Book, key: str, owed: Owed, reply: Reply) -> None:
    del book.owed[key]
    book.due.forget("answer", key)
    for _ in range(owed.times):
        book.order(reply)


def _named(book: Book, key: str, owed: Owed, state: operation.State | None) -> Receipt:
    """The receipt, with the switch that was opened for the start, by whomever it was asked for first."""
    row = book.receipts.get(key)
    if row is None:
        return owed.receipt  # forgotten for newer ones
    made = book.switches.get(state.switch) if state is not None and state.switch is not None else None
    if row.receipt.switch is None and made is not None:
        victims = tuple(str(victim.lane) for victim in made.victims)
        row = attrs.evolve(row, receipt=attrs.evolve(row.receipt, switch=made.switch, victims=victims))
        book.put_receipt(key, row)
    return row.receipt


def _undecided(book: Book, state: operation.State) -> bool:
    """Whether it may still turn out within moments who gives way for this start."""
    if state.phase not in operations.OPEN or state.switch is not None:
        return False
    if book.evicts_again_at.get(state.deployment, Millis(0)) > book.now_ms:
        return False
    return any(_asks_for_room(book, lane, row) for lane, row in book.of(state.deployment))


def _asks_for_room(book: Book, lane: Lane, row: InstanceRow) -> bool:
    return lane in book.shortfalls and row.wish is not None and row.wish.evict and row.phase in WAITING


def is_hopeless(book: Book, lane: Lane, nowhere: Nowhere) -> bool:
    """Whether an operator who said that others may give way is told that nobody can, instead of being kept waiting.

    Where all that is in the way is there to stay, it is told so whenever that is found: an answer to its command may
    have been given before its files were measured. Else not while a client waits for it too, nor while something moves
    there that may make the room by itself; and what only a sample says is believed at the end of the wait.
    """
    wish = book.instances[lane].wish
    if wish is None or not wish.evict:
        return False
    opened = None if wish.operation is None else book.operations.get(wish.operation)
    if opened is not None and not opened.joined and waits.never(book, lane, nowhere):
        return True  # others that wait with it said nothing of evicting
    owed = [one for one in book.owed.values() if one.operation == wish.operation]
    if not any(one.refusable for one in owed) or book.traffic.queue(lane.deployment).waiting:
        return False
    if not all(short.check in LIFTED for short in nowhere.shortfalls) and all(
        book.now_ms < one.until_ms for one in owed
    ):
        return False
    return not any(waits.moves(book, lane, host) for host in nowhere.hosts)
