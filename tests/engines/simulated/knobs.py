"""The knobs of an installation: `<prefix>/knobs.json`, read again whenever the file changes.

Engines are launched with a closed environment, so their behaviour is turned by a file beside them. Every
knob has its default here; `installation.Installation.set` refuses a name that is not listed. A knob may
be set for one served name alone: `{"of": {"qwen": {"load_s": 3}}}`.
"""

from __future__ import annotations

import json
import os
from typing import Any

DEFAULTS: dict[str, Any] = {
    # --- time -----------------------------------------------------------------------------------------
    "time_scale": 0.1,  # of the waits that the real engine is known for: 1.0 is as slow as the real one
    "load_s": 0.05,  # from the start to the open port; never scaled
    "never_ready": False,  # loads for ever, without a word
    "registers_s": 0.0,  # SGLang's front, from a request to the moment from which it knows its `rid`
    "prefill_s": 0.0,  # before the first token
    "token_s": 0.001,  # between tokens
    "answer_tokens": None,  # length of an answer that max_tokens does not cut; None: 12 to 19, from the prompt
    "sleep_s": 0.0,  # park and wake calls take this long
    "wake_s": 0.0,
    "reload_s": 0.0,
    "build_s": 0.0,  # TensorFold compiles its kernels that long on the first request of an empty directory
    "keep_alive_s": 5.0,  # an idle connection is closed after it; never scaled
    "orphan_s": 60.0,  # children that outlive a killed leader end by themselves after it
    # --- memory ---------------------------------------------------------------------------------------
    "host_bytes": 8 << 20,  # resident in each worker, beside everything else
    "host_scale": 0.0,  # share of weights and cache that is really held in RAM on a machine without cards
    "host_copy_scale": 0.01,  # share of a parked host copy (host_backed) that is really held in RAM
    "card_state": None,  # the state file of the simulated cards; None: a machine without cards
    "card_context_bytes": 512 << 20,  # CUDA context, graphs, buffers: on the card as long as the process lives
    "card_free_bytes": None,  # instead of what the state file says is free
    "shm_bytes": 65536,  # each shared-memory segment
    "shm_leak": False,  # segments stay after a clean exit too
    "host_limit_bytes": None,  # the worker kills itself with SIGKILL where it would hold more, as the kernel does
    "answer_bytes": 0,  # host memory that every answer adds for good
    # --- park and wake --------------------------------------------------------------------------------
    "sleep_frees": 1.0,  # share of what a park should free
    "sleep_frees_after_s": 0.0,  # how long after the answer it is freed
    "sleep_leak_bytes": 0,  # card bytes (host, without cards) that every cycle leaves behind
    "sleep_then_dies": False,  # 200, and then the worker dies
    "wake_fails": None,  # "oom": no memory at the wake, whatever the card says
    "wake_answers": "same",  # after a wake: same, other, garbage, empty, nonfinite
    "wake_speed": 1.0,  # decode rate after a wake, relative
    # --- failures -------------------------------------------------------------------------------------
    "dies": None,  # {"when": "loading"|"ready"|"answer", "after_s": 0, "who": "api"|"worker", "status": 1,
    #                 "signal": None, "text": "..."}
    "launch_fails": None,  # "oom", "kv", "config", "quantization": the real engine's words for it, exit 1
    "front_stays": False,  # a dead worker does not take the front down
    "ignores_sigterm": False,
    "exits_nonzero": False,  # status 1 after a SIGTERM
    "busy": {"running": 0, "waiting": 0},  # added to the gauges: an engine that never reads idle
    "gauges_missing": False,  # the metrics page lacks them
    "checks_keys": True,
    "also_listens": None,  # an address beside the stated one, such as "0.0.0.0"
    "listens_on": None,  # instead of the stated one
    "unknown_options": [],  # options that this build does not know, whatever its version says
    "absent_routes": [],
    "drift": {},  # effective values that differ from what was asked: {"max_model_len": 1024, "served_name": "x"}
    "faults": [],  # see `faults.py`
    "flood": None,  # {"bytes": 1 << 20, "line_bytes": 200, "binary": False}, written to the log once ready
    "extra_children": 0,  # helper processes, beside the usual ones
    "reasons": True,  # a model with a reasoning parser thinks first
    "stream": {},  # see `dialect.py`: bytes_per_write, line_end, usage, pad_bytes, no_done, comment, ...
}


class Knobs:
    """Live values. Attribute access reads the file again when it changed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._values: dict[str, Any] = dict(DEFAULTS)
        self.served_name: str | None = None
        self.version = 0  # counts the changes

    def __getattr__(self, name: str) -> Any:
        self._refresh()
        try:
            own = self._values.get("of", {}).get(self.served_name, {})
            return own[name] if name in own else self._values[name]
        except KeyError:
            raise AttributeError(name) from None

    def _refresh(self) -> None:
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return
        seen = (status.st_mtime_ns, status.st_ino)
        if seen != self._seen:
            with open(self._path, encoding="utf-8") as stream:
                self._values = DEFAULTS | json.load(stream)
            self._seen = seen
            self.version += 1


def prefix() -> str:
    """The installation that this copy of the package lies in: `<prefix>/lib/python3.X/site-packages/<package>`."""
    place = os.path.abspath(__file__)
    for _ in range(5):
        place = os.path.dirname(place)
    return place
