"""Answers of decision models (`POST /v1/systemone`): probabilities out of the checkpoint and the question.

Source: engines 15.2.
"""

from __future__ import annotations

import json
from typing import Any

from .text import share

Json = dict[str, Any]


class Malformed(Exception):
    """A request that is not of the format; `where` is the path to the field."""

    def __init__(self, where: list[str], message: str) -> None:
        super().__init__(message)
        self.where = where


def decide(seed: bytes, body: Json, model: str, *, mass: float | None = None) -> Json:
    """The whole answer. `mass` is the label mass of a model without a decision head.

    Raises: Malformed.
    """
    if body.get("state") is None:
        raise Malformed(["body", "state"], "Field required")
    questions = body.get("questions")
    if not isinstance(questions, dict) or not questions:
        raise Malformed(["body", "questions"], "Field required")
    state = json.dumps(body["state"], sort_keys=True)
    answers = {name: _answer(seed, state, name, question, mass) for name, question in questions.items()}
    tokens = len(state.split()) + sum(len(json.dumps(question).split()) for question in questions.values())
    return {"model": model, "answers": answers, "usage": {"input_tokens": tokens, "output_tokens": 0}}


def _answer(seed: bytes, state: str, name: str, question: Any, mass: float | None) -> Json:
    where = ["body", "questions", name]
    if not isinstance(question, dict):
        raise Malformed(where, "Input should be an object")
    kind, criteria = question.get("type"), question.get("criteria")
    strange = set(question) - {"type", "instructions", "criteria"}
    if strange:
        raise Malformed([*where, strange.pop()], "Extra inputs are not permitted")
    extra = {} if mass is None else {"x_label_mass": mass}
    text = json.dumps(question, sort_keys=True)
    if kind == "noul":
        return {"type": kind, "noul": round(share(seed, state, text), 6), **extra}
    if kind == "choice" and isinstance(criteria, dict) and criteria:
        options = list(criteria)
    elif kind == "score" and isinstance(criteria, list) and criteria:
        options = [str(number) for number in range(len(criteria))]
    else:
        raise Malformed([*where, "criteria"], f"Input should fit the type {kind}")
    raw = [share(seed, state, text, option) + 0.01 for option in options]
    scale = (1.0 if mass is None else mass) / sum(raw)
    shares = {option: value * scale for option, value in zip(options, raw, strict=True)}
    best = max(shares, key=lambda option: shares[option])
    body: Json = {"type": kind, "probabilities": shares, "confidence": shares[best], **extra}
    if kind == "choice":
        return body | {"choice": best}
    legend = dict(zip(options, criteria, strict=True))
    return body | {"score": sum(int(option) * value for option, value in shares.items()), "legend": legend}
