"""A metrics page as engines write it, for Prometheus: the samples of the series that somebody asks for.

A page comes from a program that nobody vouches for. The client bounds its bytes; lines of other series are passed
over without being taken apart, and what is no number from 0 to 2**53 is no value.
Source: engines 12.1, 14.6.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from typing import Final

from capyctl.engines.adapter import Client
from capyctl.errors import Failure

SAMPLES_MAX: Final = 1 << 16
"""More lines of the asked series are no page of an engine that CapyCTL knows: 64 ranks write some 12,000."""
_LARGEST: Final = 1 << 53  # from there on a float is no exact count


async def read_page(client: Client, path: str = "/metrics") -> str:
    """Raises: ConnectionError, TimeoutError; Failure `engine_error` on another status than 200."""
    status, body = await client.get(path)
    if status != 200:
        raise Failure("engine_error", f"{path} answered {status}")
    return body.decode("utf-8", "replace")


async def read_gauges(
    client: Client, names: Collection[str], perhaps: Collection[str] = (), *, path: str = "/metrics"
) -> dict[str, float]:
    """Each named gauge, and of those in `perhaps` what the page states.

    Raises: as `read_page`; Failure `engine_error` also when one of `names` is not there.
    """
    found = sums(await read_page(client, path), {*names, *perhaps})
    for name in names:
        if name not in found:
            raise Failure("engine_error", f"{path} does not state {name}")
    return found


async def read_load(client: Client, running: str, waiting: str, usage: str) -> tuple[int, int, int | None]:
    """(running, waiting, cache usage in ppm) by the names of their gauges; None where the usage is not stated.

    Raises: as `read_gauges`.
    """
    found = await read_gauges(client, (running, waiting), (usage,))
    return int(found[running]), int(found[waiting]), ppm(found[usage]) if usage in found else None


def sums(page: str, names: Collection[str]) -> dict[str, float]:
    """Each named series, summed over its labels; a sample without a value takes it away.

    Raises: Failure as `samples`.
    """
    found, spoilt = dict[str, float](), set[str]()
    for name, _, value in samples(page, names):
        if value is None:
            spoilt.add(name)
        else:
            found[name] = found.get(name, 0.0) + value
    return {name: value for name, value in found.items() if name not in spoilt}


def samples(page: str, names: Collection[str]) -> Iterator[tuple[str, str, float | None]]:
    """(name, labels as they are written, value) of each line of a named series; None: broken, or no finite count.

    Raises: Failure `engine_error` at more than `SAMPLES_MAX` lines.
    """
    lines = re.compile(rf"\n({'|'.join(map(re.escape, names))})(?![^\s{{])(.*)")
    for seen, line in enumerate(lines.finditer("\n" + page)):
        if seen == SAMPLES_MAX:
            raise Failure("engine_error", f"the metrics page states {line[1]} and its like more than {seen} times")
        # A label's text may hold braces and spaces; the value follows the last closing one.
        labels, _, after = line[2].rpartition("}")
        words = after.split(maxsplit=1)
        yield line[1], labels.removeprefix("{"), count(words[0]) if words else None


def count(text: str) -> float | None:
    """A number from 0 to 2**53, else None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < _LARGEST else None


def ppm(share: float) -> int:
    """Millionths of a share, which lies from none to the whole; what is no number is none."""
    return min(1_000_000, max(0, round(share * 1_000_000))) if math.isfinite(share) else 0
