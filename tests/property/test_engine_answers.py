"""What engines answer the probe and the fixed prompt with, and when that cannot be right."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from capyctl.engines.python.openai_calls import completion_canary
from capyctl.engines.questions import probe_chat
from capyctl.errors import Failure

REFUSED = (400, b'{"error": {"message": "logprobs are not supported"}}')


@attrs.define
class Engine:
    """Answers each POST with the next of `answers`, and remembers what it was asked."""

    answers: list[tuple[int, bytes]]
    asked: list[dict[str, Any]] = attrs.field(factory=list)

    async def get(self, path: str, *, admin: bool = False) -> tuple[int, bytes]:
        raise AssertionError(path)

    async def post(
        self, path: str, body: bytes, limit_s: float | None = None, *, admin: bool = False
    ) -> tuple[int, bytes]:
        self.asked.append(json.loads(body))
        return self.answers.pop(0)


def completed(logprobs: str, ids: str = "[3, 4]") -> tuple[int, bytes]:
    return 200, f'{{"choices": [{{"text": "a b", "token_ids": {ids}, "logprobs": {logprobs}}}]}}'.encode()


def chatted(logprobs: str) -> tuple[int, bytes]:
    return 200, f'{{"choices": [{{"message": {{"content": "OK."}}, "logprobs": {logprobs}}}]}}'.encode()


async def test_the_fixed_prompts_answer_does_not_depend_on_its_log_probabilities() -> None:
    engine = Engine([completed('{"token_logprobs": [-0.5, -1]}'), completed('{"token_logprobs": [-0.50001, 0]}')])
    first, second = await completion_canary(engine, "m", 5), await completion_canary(engine, "m", 5)
    assert first == second == "ids:3,4"
    assert engine.asked[0]["logprobs"] == 1


@pytest.mark.parametrize(
    "given",
    [
        '{"token_logprobs": [-0.5, NaN]}',
        '{"token_logprobs": [-Infinity]}',
        '{"token_logprobs": [null, -0.5]}',
        '{"token_logprobs": ["nan"]}',
        '{"token_logprobs": []}',
        "null",
    ],
)
async def test_right_tokens_with_numbers_that_are_none_are_refused(given: str) -> None:
    with pytest.raises(Failure, match="no finite numbers") as refused:
        await completion_canary(Engine([completed(given)]), "m", 5)
    assert refused.value.code == "wake_mismatch"


async def test_an_engine_that_refuses_log_probabilities_is_asked_without() -> None:
    engine = Engine([REFUSED, completed("null"), REFUSED, chatted("null")])
    assert await completion_canary(engine, "m", 5) == "ids:3,4"
    assert await probe_chat(engine, "m", 5, logprobs=True) == 3
    assert ["logprobs" in asked for asked in engine.asked] == [True, False, True, False]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null"])
async def test_a_probe_with_numbers_that_are_none_is_refused(value: str) -> None:
    given = f'{{"content": [{{"token": "O", "logprob": -1}}, {{"token": "K", "logprob": {value}}}]}}'
    with pytest.raises(Failure, match="no finite numbers"):
        await probe_chat(Engine([chatted(given)]), "m", 5, logprobs=True)
    assert await probe_chat(Engine([chatted("null")]), "m", 5, logprobs=True) == 3


async def test_engines_that_have_no_log_probabilities_are_not_asked_for_them() -> None:
    engine = Engine([chatted("null")])
    assert await probe_chat(engine, "m", 5) == 3
    assert "logprobs" not in engine.asked[0]
