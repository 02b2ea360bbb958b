"""vLLM's sleep and wake: each call once, in its order, and every answer must say what it must."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import attrs
import pytest
import trio

from capyctl.engines.vllm.failures import classify
from capyctl.engines.vllm.sleep import is_sleeping, sleep, wake
from capyctl.errors import CODES, CapyError, Failure, Lost, Refusal
from capyctl.fsm.types import Residency

NEW, OLD = "0.32.0+cpu", "0.31.0"
Answer = tuple[int, Any] | Exception


@attrs.define
class Scripted:
    """Answers each call with the next line of a script, and keeps what was asked."""

    answers: list[Answer]
    asked: list[tuple[str, str]] = attrs.field(factory=list)
    bodies: list[bytes] = attrs.field(factory=list)
    limits: list[float | None] = attrs.field(factory=list)

    async def get(self, path: str, *, admin: bool = False) -> tuple[int, bytes]:
        return self._next("GET", path, admin)

    async def post(
        self, path: str, body: bytes, limit_s: float | None = None, *, admin: bool = False
    ) -> tuple[int, bytes]:
        self.bodies.append(body)
        self.limits.append(limit_s)
        return self._next("POST", path, admin)

    def _next(self, method: str, path: str, admin: bool) -> tuple[int, bytes]:
        assert admin, "control routes take the admin key"
        self.asked.append((method, path))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        status, said = answer
        return status, said if isinstance(said, bytes) else json.dumps(said).encode()


ASLEEP, AWAKE = {"status": "sleeping", "tags": ["weights"]}, {"status": "awake", "tags": None}
RELOADED, RESET = {"results": [None, None]}, {"success": True}
DEEP_CALLS = ["/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache", "/reset_prefix_cache"]


def run(client: Scripted, call: Any, residency: Residency, version: str = NEW) -> None:
    trio.run(call, client, residency, version, 60.0)
    assert not client.answers, "every answer of the script was asked for"


def paths(client: Scripted) -> list[str]:
    return [path for _, path in client.asked]


def test_a_sleep_is_one_call_at_the_level_of_its_residency() -> None:
    for residency, level in ((Residency.DEEP, 2), (Residency.HOST_BACKED, 1)):
        client = Scripted([(200, {"status": "sleeping", "level": level})])
        run(client, sleep, residency)
        assert client.asked == [("POST", f"/sleep?level={level}")]


def test_an_older_build_is_asked_whether_it_sleeps() -> None:
    client = Scripted([(200, b""), (200, {"is_sleeping": True})])
    run(client, sleep, Residency.DEEP, OLD)
    assert client.asked == [("POST", "/sleep?level=2"), ("GET", "/is_sleeping")]
    with pytest.raises(Lost):
        run(Scripted([(200, b""), (200, {"is_sleeping": False})]), sleep, Residency.DEEP, OLD)


def test_a_deep_wake_reloads_between_the_weights_and_the_cache() -> None:
    client = Scripted([(200, ASLEEP), (200, RELOADED), (200, AWAKE), (200, RESET)])
    run(client, wake, Residency.DEEP)
    assert paths(client) == DEEP_CALLS
    assert json.loads(client.bodies[1]) == {"method": "reload_weights"}
    assert all(limit is not None and 0 < limit <= 60 for limit in client.limits)


def test_a_wake_from_host_memory_is_whole() -> None:
    client = Scripted([(200, AWAKE), (200, RESET)])
    run(client, wake, Residency.HOST_BACKED)
    assert paths(client) == ["/wake_up", "/reset_prefix_cache"]


def test_older_builds_wake_by_what_they_say_of_themselves() -> None:
    answers: list[Answer] = [(200, b""), (200, {"is_sleeping": True}), (200, RELOADED), (200, b"")]
    client = Scripted([*answers, (200, {"is_sleeping": False}), (200, b"")])
    run(client, wake, Residency.DEEP, OLD)
    asks = [path for path in paths(client) if path != "/is_sleeping"]
    assert asks == DEEP_CALLS


GOOD: list[Answer] = [(200, ASLEEP), (200, RELOADED), (200, AWAKE), (200, RESET)]
BAD: list[tuple[int, Answer]] = [
    (0, (200, AWAKE)),  # awake although the weights are not loaded
    (0, (200, b"")),
    (0, (200, {"status": True})),
    (0, (500, {"error": {"message": "CUDA error"}})),
    (0, (404, {"detail": "Not Found"})),
    (0, ConnectionError("cut")),
    (0, TimeoutError("late")),
    (1, (200, {"results": []})),
    (1, (200, {"results": [None, "failed"]})),
    (1, (200, {"result": None})),
    (1, (200, b"[]")),
    (1, (500, b"Internal Server Error")),
    (2, (200, ASLEEP)),
    (2, (503, b"")),
    (3, (200, {"success": False})),
    (3, (200, {"success": 1})),
    (3, (200, b"")),
]


@pytest.mark.parametrize(("step", "answer"), BAD)
def test_a_wrong_answer_ends_the_wake_and_nothing_is_asked_again(step: int, answer: Answer) -> None:
    client = Scripted([*GOOD[:step], answer])
    with pytest.raises((CapyError, ConnectionError, TimeoutError)) as caught:
        run(client, wake, Residency.DEEP)
    assert not isinstance(caught.value, Refusal), "something was sent: nobody knows what the engine did"
    assert paths(client) == DEEP_CALLS[: step + 1]


@pytest.mark.parametrize(
    "answer",
    [(200, {"status": "sleeping", "level": 1}), (200, {"status": "awake", "level": 2}), (400, {}), (200, b"x")],
)
def test_a_wrong_answer_to_a_sleep_is_no_sleep(answer: Answer) -> None:
    client = Scripted([answer])
    with pytest.raises((Lost, Failure)):
        run(client, sleep, Residency.DEEP)
    assert len(client.asked) == 1


@pytest.mark.parametrize("call", [sleep, wake])
def test_what_never_parks_is_refused_before_anything_is_sent(call: Any) -> None:
    client = Scripted([])
    with pytest.raises(Refusal):
        run(client, call, Residency.RESTART_ONLY)
    assert client.asked == []


@pytest.mark.parametrize("said", [{"is_sleeping": "yes"}, {}, b"", b"[]"])
def test_an_engine_that_does_not_say_whether_it_sleeps_says_nothing(said: Any) -> None:
    with pytest.raises(CapyError):
        trio.run(is_sleeping, Scripted([(200, said)]))


# --- last words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("capyctl_refused effective_args_mismatch the arguments change port, which CapyCTL owns", None, "change port"),
        (
            "capyctl_refused capability_missing:core this build has no option for host",
            "capability_missing:core",
            "host",
        ),
        ("capyctl_refused capability_missing:deep_park no route /sleep", "capability_missing:deep_park", "/sleep"),
        ("vllm: error: unrecognized arguments: --frob secret", "engine_argument_rejected", "--frob"),
        ("vllm: error: unrecognized arguments: secret", "engine_argument_rejected", "an argument"),
        ("vllm serve: error: argument --max-num-seqs: invalid int value: 'secret'", "engine_argument_rejected", "seqs"),
        ("error: argument --quantization/-q: expected one argument", "engine_argument_rejected", "--quantization"),
        ("error: ambiguous option: --ssl could match --ssl-keyfile", "engine_argument_rejected", "--ssl"),
        (
            "ValueError: Free memory on device cuda:0 (10.21/79.1 GiB) on startup is less than desired GPU memory",
            "insufficient_device_memory",
            "10.21 of 79.1 GiB",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "insufficient_device_memory", "memory"),
        ("ValueError: No available memory for the cache blocks. Try", "insufficient_device_memory", "memory"),
        ("OSError: [Errno 98] Address already in use", "port_conflict", "port"),
        (
            "  Value error, Sleep mode is not supported on current platform.",
            "capability_missing:deep_park",
            "restart_only",
        ),
    ],
)
def test_last_words_name_their_failure_and_no_value(line: str, code: str | None, said: str) -> None:
    found = classify(["INFO loading", line, "  warnings.warn('resource_tracker')"])
    assert found is not None
    assert found[0] == (code or "effective_args_mismatch")
    assert found[0].partition(":")[0] in CODES
    assert said in found[1]
    assert "secret" not in found[1]


@pytest.mark.parametrize(
    "lines", [[], ["INFO ready"], ["capyctl_refused not_a_code x"], ["Traceback", "KeyError: 'a'"]]
)
def test_words_that_name_nothing_are_no_typed_failure(lines: Iterable[str]) -> None:
    assert classify(list(lines)) is None
