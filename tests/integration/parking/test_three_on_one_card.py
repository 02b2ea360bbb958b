"""Three models of 14, 14 and 12 GB on a card of 24 GB: everybody is answered, each switch parks one and wakes one."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path

from tests.nvml.card import GIB

from .machine import PORTS, park_machine, sampled

MODELS = {"ada": ("vllm", 14, 16), "grace": ("vllm", 14, 16), "tom": ("sglang", 12, 14)}
LIMIT = 24 * GIB


def test_fifty_requests_that_alternate_among_three_models_are_all_answered(tmp_path: Path) -> None:
    hasty = ("host.resource_policy.queue.admission_window=1ms",)  # that window is waited out on purpose
    with park_machine(tmp_path, PORTS, {"vllm": {}, "sglang": {}}, hasty) as here:
        for name, (family, weights, ready) in MODELS.items():
            here.put(name, family, weights * GIB, ready * GIB)
        order = list(itertools.islice(itertools.cycle(MODELS), 50))
        with sampled(here.cards) as seen:
            answers = [(name, here.ask(name, max_tokens=4)) for name in order]
        assert [(name, answer.status) for name, answer in answers] == [(name, 200) for name in order]
        assert all(answer.json["model"] == name for name, answer in answers)
        texts = collections.defaultdict(set)
        for name, answer in answers:
            texts[name].add(answer.text)
        assert all(len(said) == 1 for said in texts.values()), "the same question is answered alike after each wake"

        starts = dict.fromkeys(MODELS, 0)
        sleeps = wakes = 0
        for made in here.installations.values():
            for start in made.starts():
                argv = start["argv"]
                starts[next(name for name in MODELS if name in argv)] += 1
            sleeps += len(made.calls("/sleep", "/release_memory_occupation"))
            wakes += len(made.calls("/resume_memory_occupation"))
            wakes += len([call for call in made.calls("/wake_up") if call["query"] == "tags=weights"])
        assert starts == dict.fromkeys(MODELS, 1), "nobody was started twice"
        assert (sleeps, wakes) == (49, 47)

        took = sorted(answer.took_s for _, answer in answers[3:])
        print(
            f"50 of 50 answered; median switch {took[len(took) // 2]:.2f} s, longest {took[-1]:.2f} s; {sleeps} parks, "
            f"{wakes} wakes; card at most {max(seen) / GIB:.1f} of {LIMIT / GIB:.0f} GiB in {len(seen)} samples"
        )
        assert here.cards.peak(0) <= LIMIT
        assert max(seen) <= LIMIT
        held = here.on_card()
        status = here.ok("status").out
        print(status)
        assert sum(int(text.split()[0]) for text in held.values()) <= LIMIT
        assert sorted(text.split()[1] for text in held.values()) == ["parked", "parked", "ready"]
        for name in MODELS:
            assert name in status
        assert here.terminate() == 0
