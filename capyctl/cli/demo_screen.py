"""The demo's screen: one live picture on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import attrs

from capyctl.units import gib

_BAR = 40


@attrs.frozen(kw_only=True)
class Moment:
    """What the role said at one instant: each model's state, and what the ledger charges it."""

    states: Mapping[str, str]
    charged: Mapping[str, int]
    limit_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.charged.values())


def mib(amount: int) -> str:
    """Small amounts, as the demo's model needs them."""
    return f"{amount >> 20} MiB" if amount < 1 << 30 else gib(amount)


def sentence(moment: Moment) -> str:
    """The ledger in one line: what is charged to whom, and the limit."""
    parts = [
        f"{name} {state}{f' {mib(moment.charged[name])}' if moment.charged.get(name) else ''}"
        for name, state in moment.states.items()
    ]
    return f"{', '.join(parts)}; charged {mib(moment.total_bytes)} of {mib(moment.limit_bytes)}"


class Screen(Protocol):
    """What the demo shows through."""

    def step(self, text: str) -> None:
        """A new thing is being done."""

    def seen(self, moment: Moment) -> None:
        """The role's state, whenever it was looked at."""

    def asked(self, name: str, question: str) -> None:
        """A question went to a model."""

    def said(self, piece: str) -> None:
        """A piece of its answer."""

    def answered(self, seconds: float) -> None:
        """The answer ended."""

    def close(self) -> None:
        """Nothing more is shown; the last picture stays."""


class Lines:
    """For pipes and logs: a line per step, per change of the ledger, per answer."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.last = ""
        self.answer = ""

    def _say(self, text: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - self.began:5.1f}s] {text}\n")
        sys.stdout.flush()

    def step(self, text: str) -> None:
        self._say(text)

    def seen(self, moment: Moment) -> None:
        text = sentence(moment)
        if text != self.last:
            self.last = text
            self._say(f"  ledger: {text}")

    def asked(self, name: str, question: str) -> None:
        self._say(f"Asking {name}: {question}")
        self.answer = ""

    def said(self, piece: str) -> None:
        self.answer += piece

    def answered(self, seconds: float) -> None:
        self._say(f"  answer after {seconds:.1f}s: {' '.join(self.answer.split())}")

    def close(self) -> None:
        pass  # every line has been written


class Picture:
    """For a terminal: models, the ledger as a bar, what happened, and the answer as it comes."""

    def __init__(self, live: Any, names: Sequence[str]) -> None:  # Any: rich is imported by `screen` alone
        self.live = live
        self.names = names
        self.began = time.monotonic()
        self.text = "Starting"
        self.moment: Moment | None = None
        self.history: deque[str] = deque(maxlen=9)
        self.last = ""
        self.talk: deque[str] = deque(maxlen=4)

    def step(self, text: str) -> None:
        self.text = text
        self._note(text)

    def seen(self, moment: Moment) -> None:
        self.moment = moment
        text = sentence(moment)
        if text != self.last:
            self.last = text
            self._note(text)
        self.draw()

    def asked(self, name: str, question: str) -> None:
        self.talk.append(f"you to {name}: {question}")
        self.talk.append(f"{name}: ")
        self._note(f"request for {name}")

    def said(self, piece: str) -> None:
        self.talk[-1] += piece
        self.draw()

    def answered(self, seconds: float) -> None:
        self.talk[-1] = f"{' '.join(self.talk[-1].split())}  ({seconds:.1f}s)"
        self.draw()

    def close(self) -> None:
        self.live.stop()

    def _note(self, text: str) -> None:
        self.history.append(f"{time.monotonic() - self.began:5.1f}s  {text}")
        self.draw()

    def draw(self) -> None:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        for title in ("MODEL", "STATE", "CHARGED"):
            table.add_column(title)
        if self.moment is not None:
            for name in self.names:
                amount = self.moment.charged.get(name, 0)
                table.add_row(name, self.moment.states.get(name, "-"), mib(amount) if amount else "-")
        parts = [
            Panel(table, title="models", title_align="left"),
            Panel(Text(self._bar()), title="memory ledger", title_align="left"),
            Panel(Text("\n".join(self.history)), title="what happened", title_align="left"),
            Panel(Text("\n".join(self.talk)), title="conversation", title_align="left"),
        ]
        self.live.update(Group(Text(f"capyctl demo · {self.text}"), *parts), refresh=True)

    def _bar(self) -> str:
        if self.moment is None:
            return ""
        total, limit = self.moment.total_bytes, max(1, self.moment.limit_bytes)
        full = min(_BAR, total * _BAR // limit)
        return f"{'█' * full}{'░' * (_BAR - full)}  {mib(total)} of {mib(limit)}"


@contextmanager
def screen(names: Sequence[str]) -> Iterator[Screen]:
    """The live picture on a terminal, else plain lines. Ends with the last picture left standing."""
    if not sys.stdout.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(no_color=True, highlight=False), auto_refresh=False) as live:
        yield Picture(live, names)
