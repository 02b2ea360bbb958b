"""The faults of engines and of the role, and what must have become of the model. Data; `faults.py` strikes.

A route that starts with `@` is the family's own: see `ROUTES`. An `Expect` says where the instance ends, what the
client got whose request met the fault, and what the next one gets once the engine is sound again.
Source: lifecycle 4, 18, 20; engines 6.4, 7.4, 12.3, 13, 16; cases R19-R26.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs

from tests.engines.installation import die_at, fail, hang, lose, slow

VLLM, SGLANG, TENSORFOLD, CUSTOM = "vllm", "sglang", "tensorfold", "custom"
ALL = (VLLM, SGLANG, TENSORFOLD, CUSTOM)
PARKING = (VLLM, SGLANG)
COPIES: Mapping[str, str] = {"vllm-copy": VLLM, "sglang-copy": SGLANG}
"""The engines that park, once more with a copy of their weights in RAM (`residency: host_backed`)."""
ROUTES: Mapping[str, Mapping[str, str]] = {
    VLLM: {"@park": "/sleep", "@wake": "/wake_up", "@reload": "/collective_rpc", "@reset": "/reset_prefix_cache"},
    SGLANG: {
        "@park": "/release_memory_occupation",
        "@wake": "/resume_memory_occupation",
        "@reload": "/update_weights_from_disk",
        "@reset": "/flush_cache",
    },
    TENSORFOLD: {},
    CUSTOM: {},
}
CHAT = "/v1/chat/completions"


class State(enum.Enum):
    """In which a fault strikes."""

    LOADING = "loading"
    IDLE = "idle"
    ANSWERING = "answering"
    PARKING = "parking"
    PARKED = "parked"
    WAKING = "waking"
    STOPPING = "stopping"


@attrs.frozen(kw_only=True)
class Expect:
    """`end`: where the instance comes to rest, `|` between what a race decides; `code`: its last error, or that of the
    operation; `client`: what the request got that met the fault, 0 for one whose answer broke off; `after`: what the
    next one gets after a failure, or `else_after` where a race decides.
    """

    end: str
    client: int | None = None
    code: str | None = None
    after: int = 200
    else_after: int | None = None
    within_s: float = 20.0


@attrs.frozen(kw_only=True)
class Fault:
    """`knobs` are turned, `kill` (front, worker, role) is sent SIGKILL, `foreign` is held by a stranger on the card.

    `cycles`: so many parks and wakes before the one that counts. `exceeds`: the engine itself holds more than it may.
    """

    name: str
    states: Mapping[State, Expect]
    families: tuple[str, ...] = ALL
    knobs: Mapping[str, Any] = attrs.field(factory=dict)
    kill: str | None = None
    foreign: int = 0
    cycles: int = 0
    exceeds: bool = False


def ends(end: str, client: int | None = None, code: str | None = None, **more: Any) -> Expect:
    return Expect(end=end, client=client, code=code, **more)


def _load(code: str, **more: Any) -> dict[State, Expect]:
    """A start that fails: the client is told, and for a while the next one too."""
    return {State.LOADING: ends("failed", 503, code, after=503, **more)}


BUSY = {"sleep_s": 20.0, "wake_s": 20.0}  # so that there is a middle to be killed in, however slow the machine
EXITED = ends("failed", None, after=503)
EXITED_LATE = ends("failed", None, after=503, else_after=200)  # its park may have been proven just before
EXITED_ASLEEP = ends("failed", None)  # what kills a parked engine is held against no start
CUT = ends("failed", 0, after=503)
RESTARTED = ends("ready", 200, within_s=40)  # a wake that failed is followed by one clean start, for whoever waits
STOPPED = ends("stopped")
UNPARKED = ends("stopped", None, "engine_error", within_s=60)

FAULTS: tuple[Fault, ...] = (
    # --- the start --------------------------------------------------------------------------------------------
    Fault(name="no memory at load", families=PARKING,
          knobs={"launch_fails": "oom"},
          states=_load("insufficient_device_memory")),
    Fault(name="no memory at load", families=(TENSORFOLD, CUSTOM), states=_load("insufficient_device_memory"),
          knobs={"dies": {"when": "loading", "text": "CUDA error: out of memory", "status": 1}}),
    Fault(name="unknown option", families=(VLLM,), knobs={"unknown_options": ["--max-model-len"]},
          states=_load("engine_argument_rejected")),
    Fault(name="plain exit at load", knobs={"dies": {"when": "loading", "status": 3}}, states=_load("launch_failed"),
         ),
    Fault(name="killed at load", knobs={"load_s": 20.0}, kill="front", states=_load("launch_failed")),
    Fault(name="worker dies at load", families=PARKING, states=_load("launch_failed"),
          knobs={"dies": {"when": "loading", "who": "worker", "status": 1, "after_s": 1.5}, "load_s": 3.0}),
    Fault(name="worker dies at load, front stays", families=(VLLM,), states=_load("launch_failed", within_s=50),
          knobs={"dies": {"when": "loading", "who": "worker", "status": 1, "after_s": 1.5}, "front_stays": True}),
    Fault(name="never ready", knobs={"never_ready": True}, states=_load("activation_timeout", within_s=60)),
    Fault(name="hangs once it listens", knobs={"faults": [hang()]}, states=_load("activation_timeout", within_s=60)),
    Fault(name="first answer is 500", knobs={"faults": [fail(CHAT)]}, states=_load("launch_failed")),
    Fault(name="another name is served", knobs={"drift": {"served_name": "x"}}, families=PARKING,
          states=_load("effective_args_mismatch")),
    Fault(name="another context", knobs={"drift": {"max_model_len": 1024}}, families=PARKING,
          states=_load("effective_args_mismatch")),
    Fault(name="listens off loopback", knobs={"also_listens": "0.0.0.0"}, families=(*PARKING, CUSTOM),
          states=_load("launch_failed")),
    # --- deaths -----------------------------------------------------------------------------------------------
    Fault(name="front killed", kill="front", states={State.IDLE: EXITED, State.ANSWERING: CUT}),
    Fault(name="front killed", kill="front", families=PARKING, states={
        State.PARKING: EXITED, State.PARKED: EXITED_ASLEEP, State.WAKING: RESTARTED}, knobs=BUSY),
    Fault(name="worker killed", kill="worker", families=PARKING, states={State.IDLE: EXITED, State.ANSWERING: CUT}),
    Fault(name="worker killed", kill="worker", families=PARKING, states={
        State.PARKING: EXITED, State.PARKED: EXITED_ASLEEP, State.WAKING: RESTARTED}, knobs=BUSY),
    Fault(name="worker killed, front stays", kill="worker", families=PARKING, knobs={"front_stays": True},
          states={State.IDLE: EXITED, State.ANSWERING: CUT, State.PARKED: EXITED_ASLEEP}),
    Fault(name="exits by itself", knobs={"dies": {"when": "ready", "status": 1}}, states={
        State.IDLE: EXITED, State.ANSWERING: CUT}),
    Fault(name="dies at the park", knobs={"faults": [die_at("@park")]}, families=PARKING, states={
        State.PARKING: EXITED}),
    Fault(name="dies after the park's 200", knobs={"faults": [die_at("@park", after=True)]}, families=PARKING,
          states={State.PARKING: EXITED_LATE}),
    Fault(name="dies at the wake", knobs={"faults": [die_at("@wake")]}, families=PARKING, states={
        State.WAKING: RESTARTED}),
    Fault(name="dies at the reload", knobs={"faults": [die_at("@reload")]}, families=PARKING, states={
        State.WAKING: RESTARTED}),
    # --- silence and errors -------------------------------------------------------------------------------------
    Fault(name="hangs entirely", knobs={"faults": [hang()]}, states={
        State.IDLE: ends("failed", after=503, within_s=90), State.ANSWERING: ends("failed", after=503, within_s=90),
        State.STOPPING: ends("stopped", within_s=60)}),
    Fault(name="stopped by a signal", kill="stop", states={
        State.IDLE: ends("failed", after=503, within_s=90), State.ANSWERING: ends("failed", after=503, within_s=90)}),
    Fault(name="hangs entirely", knobs={"faults": [hang()]}, families=PARKING, states={
        State.PARKED: ends("failed", 503, after=503, within_s=90),
        State.WAKING: ends("failed", 503, after=503, within_s=90)}),
    Fault(name="chat hangs", knobs={"faults": [hang(CHAT)]}, states={
        State.IDLE: ends("ready", 504, "deadline_exceeded", within_s=70)}),
    Fault(name="chat answers 500", knobs={"faults": [fail(CHAT, body="x", pad_bytes=2 << 20)]}, states={
        State.IDLE: ends("ready", 502)}),
    Fault(name="chat is reset", knobs={"faults": [{"route": CHAT, "then": "reset", "perform": False}]}, states={
        State.IDLE: ends("ready", 502)}),
    Fault(name="park hangs", knobs={"faults": [hang("@park")]}, families=PARKING, states={
        State.PARKING: ends("stopped", within_s=150)}),
    Fault(name="wake hangs", knobs={"faults": [hang("@wake", times=1)]}, families=PARKING, states={
        State.WAKING: ends("ready", 200, within_s=60)}),
    Fault(name="park answers 500 undone", knobs={"faults": [fail("@park", times=1)]}, families=PARKING,
          states={State.PARKING: ends("stopped", within_s=30)}),
    Fault(name="park answers 500 after doing it", knobs={"faults": [fail("@park", perform=True, times=1)]},
          families=PARKING, states={State.PARKING: ends("parked")}),
    Fault(name="park's answer is lost", knobs={"faults": [lose("@park", times=1)]}, families=PARKING,
          states={State.PARKING: ends("parked")}),
    Fault(name="park's answer is slow", knobs={"faults": [slow("@park", 3.0)]}, families=PARKING, states={
        State.PARKING: ends("parked")}),
    Fault(name="wake's answer is lost", knobs={"faults": [lose("@wake", times=1)]}, families=PARKING,
          states={State.WAKING: ends("ready", 200, within_s=90)}),
    Fault(name="wake answers 500", knobs={"faults": [fail("@wake", times=1)]}, families=PARKING, states={
        State.WAKING: ends("ready", 200, within_s=90)}),
    Fault(name="reload's answer is lost", knobs={"faults": [lose("@reload", times=1)]}, families=PARKING, states={
        State.WAKING: ends("ready", 200, within_s=90)}),
    Fault(name="reload answers 400", knobs={"faults": [fail("@reload", 400, times=1)]}, families=PARKING,
          states={State.WAKING: ends("ready", 200, within_s=90)}),
    Fault(name="reset's answer is lost", knobs={"faults": [lose("/reset_prefix_cache", times=1)]}, families=(VLLM,),
          states={State.WAKING: ends("ready", 200)}),
    Fault(name="gauges are gone", knobs={"gauges_missing": True}, families=PARKING, states={
        State.IDLE: ends("ready", 200), State.STOPPING: ends("stopped", within_s=60)}),
    Fault(name="gauges are gone", knobs={"gauges_missing": True}, families=(VLLM,), states={
        State.PARKING: ends("ready", None, "operation_failed")}),
    Fault(name="gauges are gone", knobs={"gauges_missing": True}, families=(SGLANG,), states={
        State.PARKING: ends("parked")}),  # its scheduler's own loads say as much
    Fault(name="never reads idle", knobs={"busy": {"running": 1, "waiting": 0}}, states={
        State.IDLE: ends("ready", 200), State.STOPPING: ends("stopped", within_s=60)}),
    Fault(name="never reads idle", knobs={"busy": {"running": 1, "waiting": 0}}, families=PARKING, states={
        State.PARKING: ends("ready")}),
    # --- memory -------------------------------------------------------------------------------------------------
    Fault(name="sleeps and frees nothing", knobs={"sleep_frees": 0.0}, families=PARKING, states={
        State.PARKING: ends("stopped", within_s=90)}),
    Fault(name="frees half", knobs={"sleep_frees": 0.5}, families=PARKING, states={
        State.PARKING: ends("stopped", within_s=90)}),
    Fault(name="frees 2 s late", knobs={"sleep_frees_after_s": 2.0}, families=PARKING, states={
        State.PARKING: ends("parked")}),
    Fault(name="frees 8 s late", knobs={"sleep_frees_after_s": 8.0}, families=PARKING, states={
        State.PARKING: ends("parked", within_s=30)}),
    Fault(name="leaks 240 MiB a cycle", knobs={"sleep_leak_bytes": 240 << 20}, families=PARKING, cycles=3,
          exceeds=True, states={State.PARKING: ends("stopped", within_s=90)}),
    Fault(name="wake finds no memory", knobs={"wake_fails": "oom"}, families=PARKING, states={
        State.WAKING: RESTARTED}),
    Fault(name="a stranger holds the card", foreign=21 << 30, families=PARKING, states={
        State.WAKING: ends("parked", 503, "insufficient_device_memory")}),
    Fault(name="leaves shared memory", knobs={"shm_leak": True}, families=PARKING, states={
        State.STOPPING: STOPPED}),
    # --- wrong answers --------------------------------------------------------------------------------------------
    *(
        Fault(name=f"wakes with {kind}", knobs={"wake_answers": kind}, families=PARKING,
              states={State.WAKING: RESTARTED})
        for kind in ("other", "garbage", "empty", "nonfinite")
    ),
    Fault(name="wakes slowly", knobs={"wake_speed": 0.3}, families=PARKING, states={State.WAKING: ends("ready", 200)}),
    # --- manners ----------------------------------------------------------------------------------------------------
    Fault(name="ignores SIGTERM", knobs={"ignores_sigterm": True}, states={
        State.STOPPING: ends("stopped", within_s=60)}),
    Fault(name="exits with status 1 when asked to end", knobs={"exits_nonzero": True}, states={
        State.STOPPING: STOPPED}),
    Fault(name="floods its log", knobs={"flood": {"bytes": 96 << 20}}, states={State.LOADING: ends("ready", 200)}),
    Fault(name="checks no keys", knobs={"checks_keys": False}, states={
        State.LOADING: ends("ready", 200), State.IDLE: ends("ready", 200)}),
    # --- the role -----------------------------------------------------------------------------------------------------
    Fault(name="role killed", kill="role", knobs={"load_s": 2.0}, states={State.LOADING: ends("ready", 0)}),
    Fault(name="role killed", kill="role", states={
        State.IDLE: ends("ready"), State.ANSWERING: ends("ready", 0)}),
    Fault(name="role killed", kill="role", families=PARKING, knobs={"sleep_s": 1.5, "wake_s": 1.5}, states={
        State.PARKING: ends("parked", within_s=30), State.PARKED: ends("parked"),
        State.WAKING: ends("ready", 0, within_s=90)}),
    Fault(name="role killed", kill="role", knobs={"time_scale": 2.0}, states={State.STOPPING: STOPPED}),
)  # fmt: skip

COPIED: Mapping[str, tuple[State, ...]] = {
    "front killed": (State.PARKING, State.PARKED, State.WAKING),
    "worker killed": (State.PARKING, State.PARKED, State.WAKING),
    "dies at the park": (State.PARKING,),
    "dies at the wake": (State.WAKING,),
    "hangs entirely": (State.PARKED, State.WAKING),
    "wake hangs": (State.WAKING,),
    "park answers 500 undone": (State.PARKING,),
    "park answers 500 after doing it": (State.PARKING,),
    "park's answer is lost": (State.PARKING,),
    "wake's answer is lost": (State.WAKING,),
    "wake answers 500": (State.WAKING,),
    "sleeps and frees nothing": (State.PARKING,),
    "frees 2 s late": (State.PARKING,),
    "wake finds no memory": (State.WAKING,),
    "a stranger holds the card": (State.WAKING,),
    "wakes with other": (State.WAKING,),
    "wakes with garbage": (State.WAKING,),
    "leaves shared memory": (State.STOPPING,),
    "role killed": (State.IDLE, State.PARKING, State.PARKED, State.WAKING),
}
"""What strikes the engines with a copy too."""

QUICK: Mapping[tuple[str, State], tuple[str, ...]] = {
    ("no memory at load", State.LOADING): (SGLANG, TENSORFOLD),
    ("listens off loopback", State.LOADING): (CUSTOM,),
    ("front killed", State.ANSWERING): (TENSORFOLD, CUSTOM),
    ("front killed", State.PARKING): (VLLM,),
    ("front killed", State.WAKING): (VLLM,),
    ("park answers 500 after doing it", State.PARKING): (VLLM,),
    ("park's answer is lost", State.PARKING): (SGLANG,),
    ("wake's answer is lost", State.WAKING): (VLLM,),
    ("reload answers 400", State.WAKING): (SGLANG,),
    ("frees 2 s late", State.PARKING): (VLLM,),
    ("a stranger holds the card", State.WAKING): (SGLANG,),
    ("leaves shared memory", State.STOPPING): (VLLM,),
    ("wakes with garbage", State.WAKING): (VLLM, SGLANG),
    ("role killed", State.PARKING): (SGLANG,),
    ("role killed", State.WAKING): (VLLM,),
}
"""Cells that `make test` runs too."""
