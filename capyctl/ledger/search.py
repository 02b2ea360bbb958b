"""The smallest set that covers: exact for as many sets as may be looked at, greedy and pruned after that.

Items stand in order of preference; among sets of one size the one with the most preferred items is taken.
Source: memory 12, steps 3 and 5, M16; decisions, "planning cost".
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

import attrs

K = TypeVar("K", bound=Hashable)

STATES_MAX = 4096
"""Sets looked at before the search stops being exact: all of them for twelve candidates."""


@attrs.frozen(kw_only=True)
class Covered:
    """Indices of the chosen items, rising. `exact`: no smaller set covers; else no chosen item can be spared."""

    chosen: tuple[int, ...]
    exact: bool


def smallest(
    wants: Mapping[K, int],
    gives: Sequence[Mapping[K, int]],
    *,
    forced: frozenset[int] = frozenset(),
    states_max: int = STATES_MAX,
) -> Covered | None:
    """The smallest set of items, those of `forced` in it, whose sums reach every amount of `wants`.

    Returns: None when not even all items together reach it.
    """
    if not covers(wants, gives, range(len(gives))):
        return None
    left = {key: amount for key in wants if (amount := wants[key] - sum(gives[i].get(key, 0) for i in forced)) > 0}
    useful = [i for i in range(len(gives)) if i not in forced and any(gives[i].get(key, 0) > 0 for key in left)]
    looked_at = 0
    for size in range(fewest(left, [gives[i] for i in useful]), len(useful) + 1):
        for chosen in combinations(useful, size):
            looked_at += 1
            if looked_at > states_max:
                return Covered(chosen=tuple(sorted({*forced, *greedy(left, gives, useful)})), exact=False)
            if covers(left, gives, chosen):
                return Covered(chosen=tuple(sorted({*forced, *chosen})), exact=True)
    return None


def covers(wants: Mapping[K, int], gives: Sequence[Mapping[K, int]], chosen: Sequence[int]) -> bool:
    """the chosen items together give every amount that is wanted"""
    return all(sum(gives[i].get(key, 0) for i in chosen) >= amount for key, amount in wants.items())


def fewest(wants: Mapping[K, int], gives: Sequence[Mapping[K, int]]) -> int:
    """A size below which no set can cover: for each amount, how many of its largest givers it takes."""
    most = 0
    for key, amount in wants.items():
        reached = 0
        for count, given in enumerate(sorted((one.get(key, 0) for one in gives), reverse=True), start=1):
            reached += given
            if reached >= amount:
                most = max(most, count)
                break
    return most


def greedy(wants: Mapping[K, int], gives: Sequence[Mapping[K, int]], useful: Sequence[int]) -> list[int]:
    """Take whatever helps most until it covers, then spare whoever can be spared, the least preferred first."""
    left, chosen, rest = dict(wants), list[int](), list(useful)
    while left:
        best = max(rest, key=lambda i: sum(min(gives[i].get(key, 0), left[key]) * 2**20 // wants[key] for key in left))
        rest.remove(best)
        chosen.append(best)
        left = {key: more for key, amount in left.items() if (more := amount - gives[best].get(key, 0)) > 0}
    for one in sorted(chosen, reverse=True):
        fewer = [other for other in chosen if other != one]
        if covers(wants, gives, fewer):
            chosen = fewer
    return chosen
