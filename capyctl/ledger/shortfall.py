"""Why something does not fit, in figures: the answer that a refused admission, plan or policy gives.

A shortfall is a value, never an exception: nothing was changed, and it says what is in the way. The
words follow one pattern, so that a person who has read one has read them all:
`needs 41.2 GiB on gpu0 of box; 37.9 GiB free, 2.0 GiB reserved.` Source: memory 10.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from capyctl.errors import CODES, check
from capyctl.fsm.types import Bytes, Device, Domain, HostId
from capyctl.units import gib, larger

Names = Mapping[str, str]
"""Owner key -> the name that people gave it; an owner that is missing is shown by its key."""

MOST_NAMED = 3  # owners that a message names; `details` holds all of them


@attrs.frozen(kw_only=True)
class Shortfall:
    """What one ask lacks on one host. All figures are bytes; None is a figure that the check does not have.

    `needs_bytes`: what the ask would be charged (for free memory: what of it is not resident yet).
    `others`: owners in the way with their bytes, largest first. `free_bytes`: limit less charges, or what was
    seen free. `never`: the ask alone exceeds the limit, so waiting and evicting cannot help.
    """

    code: str
    check: str
    host: HostId
    host_name: str
    owner: str
    domain: Domain | None = None
    device: Device | None = None
    needs_bytes: Bytes | None = None
    free_bytes: Bytes | None = None
    limit_bytes: Bytes | None = None
    reserve_bytes: Bytes | None = None
    unbacked_bytes: Bytes | None = None  # charged to others and not resident yet
    evictable_bytes: Bytes | None = None  # what the possible victims hold; set by eviction planning
    evicted: bool = False  # the figures are what would be with them gone
    stay: tuple[tuple[str, str], ...] = ()  # owners that hold of it and are not asked to give way, with why
    others: tuple[tuple[str, Bytes], ...] = ()
    count: int | None = None
    count_max: int | None = None
    reason: str = ""
    never: bool = False

    def __attrs_post_init__(self) -> None:
        check(self.code in CODES, "a shortfall's code is on the closed list")

    @property
    def charged_bytes(self) -> Bytes:
        """What the owners in the way hold together."""
        return Bytes(sum(amount for _, amount in self.others))

    @property
    def short_bytes(self) -> Bytes | None:
        """How much is missing; None where the check compares no bytes."""
        if self.needs_bytes is None or self.free_bytes is None:
            return None
        kept = (self.reserve_bytes or 0) + (self.unbacked_bytes or 0)
        return Bytes(max(0, self.needs_bytes - self.free_bytes + kept))

    @property
    def retryable(self) -> bool:
        """Whether the same ask may fit later, when charges or observations have changed."""
        return not self.never

    def message(self, names: Names | None = None) -> str:
        """One line for people, with figures. `names` shows owners by the names that people gave them."""
        text = _WORDS.get(self.check, _reason)(self, names or {})
        if self.evictable_bytes is not None:
            amount = gib(self.evictable_bytes)
            stay = _staying(self.stay, names or {})
            text += f" That is with {amount} evicted." if self.evicted else f" {amount} could be evicted{stay}."
        return text

    def details(self) -> dict[str, Any]:  # Any: plain JSON values of several types
        """The figures for `--json`: only those that the check has."""
        figures: dict[str, Any] = {
            "host": self.host,
            "host_name": self.host_name,
            "owner": self.owner,
            "check": self.check,
            "domain": self.domain,
            "device": self.device,
            "needs_bytes": self.needs_bytes,
            "free_bytes": self.free_bytes,
            "limit_bytes": self.limit_bytes,
            "reserve_bytes": self.reserve_bytes,
            "unbacked_bytes": self.unbacked_bytes,
            "short_bytes": self.short_bytes,
            "evictable_bytes": self.evictable_bytes,
            "count": self.count,
            "count_max": self.count_max,
        }
        details = {name: figure for name, figure in figures.items() if figure is not None}
        if self.stay:
            details["not_evicted"] = dict(self.stay)
        if self.others:
            details["charged"] = dict(self.others)
            details["charged_bytes"] = self.charged_bytes
        return details


@attrs.frozen(kw_only=True)
class Outdated:
    """A proposal that is no longer true: the ledger moved on, or its observation aged. Nothing was changed."""

    code: str
    reason: str
    proposed_at_epoch: int
    epoch: int

    def message(self) -> str:
        """One line for people."""
        return f"{self.reason}; look again."


# --- words ----------------------------------------------------------------------------------------


def listed(others: tuple[tuple[str, Bytes], ...], names: Names) -> str:
    """`llama-70b (40.0 GiB), qwen (8.0 GiB) and 2 more`; instances of one deployment together."""
    held: dict[str, int] = {}
    for owner, amount in others:
        shown_as = names.get(owner, owner)
        held[shown_as] = held.get(shown_as, 0) + amount
    most = sorted(held.items(), key=lambda one: -one[1])[:MOST_NAMED]
    shown = [f"{name} ({gib(amount)})" for name, amount in most]
    more = len(held) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _staying(stay: tuple[tuple[str, str], ...], names: Names) -> str:
    """`; llama-70b (activation: explicit) and 2 more are not asked to give way`; instances of one together."""
    told = list(dict.fromkeys(f"{names.get(owner, owner)} ({why})" for owner, why in stay))
    if not told:
        return ""
    more = f" and {len(told) - MOST_NAMED} more" if len(told) > MOST_NAMED else ""
    return f"; {', '.join(told[:MOST_NAMED])}{more} {'is' if len(told) == 1 else 'are'} not asked to give way"


def _place(short: Shortfall) -> str:
    return f"{short.domain} of {short.host_name}" if short.domain else short.host_name


def _amount(amount: Bytes | None) -> str:
    return gib(max(0, amount or 0))


def _capacity(short: Shortfall, names: Names) -> str:
    if not short.owner:  # nobody asks: it is the limit that is too low for what is charged already
        charged, most = larger(short.needs_bytes or 0, short.limit_bytes or 0)
        return f"{charged} on {_place(short)} is charged to {listed(short.others, names)}; at most {most} may be."
    reserved = f", {_amount(short.reserve_bytes)} reserved" if short.reserve_bytes is not None else ""
    text = f"needs {_amount(short.needs_bytes)} on {_place(short)}; "
    text += f"{_amount(short.free_bytes)} of its {_amount(short.limit_bytes)} free{reserved}"
    return text + (f"; charged to {listed(short.others, names)}." if short.others else ".")


def _memory(short: Shortfall, names: Names) -> str:
    text = f"needs {_amount(short.needs_bytes)} on {_place(short)}; "
    text += f"{_amount(short.free_bytes)} free, {_amount(short.reserve_bytes)} reserved"
    if short.unbacked_bytes:
        text += f", {_amount(short.unbacked_bytes)} still to be filled by {listed(short.others, names)}"
    return text + "."


def _parked(short: Shortfall, names: Names) -> str:
    text = f"a parked copy needs {_amount(short.needs_bytes)} on {_place(short)}; "
    text += f"{_amount(short.free_bytes)} free of the {_amount(short.limit_bytes)} for parked models"
    if not short.others:
        return f"{text}. Raise its parked limit, or state residency: restart_only."
    return f"{text}; held by {listed(short.others, names)}. Stop one of them, or raise the parked limit."


def _parked_count(short: Shortfall, names: Names) -> str:
    return f"{short.count} instances are parked on {short.host_name}, {short.count_max} at most. Stop one of them."


def _device(short: Shortfall, names: Names) -> str:
    owners = ", ".join(names.get(owner, owner) for owner, _ in short.others)
    return f"{short.device} of {short.host_name} is in use by {owners}, and one of them wants it alone."


def _whole_host(short: Shortfall, names: Names) -> str:
    what = (
        "its first start takes all of" if short.code == "startup_requires_empty_host" else "another's first start has"
    )
    return f"{what} {short.host_name}; charged to {listed(short.others, names)}."


def _category(short: Shortfall, names: Names) -> str:
    text = f"needs {_amount(short.needs_bytes)} for a KV cache in host memory on {_place(short)}; "
    return text + f"{_amount(short.free_bytes)} free of the {_amount(short.limit_bytes)} allowed."


def _reason(short: Shortfall, names: Names) -> str:
    return f"{short.reason}."


_WORDS: dict[str, Callable[[Shortfall, Names], str]] = {
    "managed_limit": _capacity,
    "capacity": _capacity,
    "free_memory": _memory,
    "free_card_memory": _memory,
    "parked_copies": _parked,
    "parked_count": _parked_count,
    "devices": _device,
    "stands_alone": _whole_host,
    "whole_host_taken": _whole_host,
    "host_kv": _category,
}
