"""Parsers by model family: the family is known by its name, and its template decides."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capyctl.engines.parsers import Choice, choose, detect, read_texts, template_of

JSON_CALLS = "<tool_call>\n{{ tool | tojson }}\n</tool_call> <think>"
FUNCTION_CALLS = "<tool_call>\n<function={{ name }}>\n</tool_call> <think>"


@pytest.mark.parametrize(
    ("engine", "model", "template", "tool", "reasoning"),
    [
        ("vllm", "qwen3", JSON_CALLS, "hermes", "qwen3"),
        ("sglang", "qwen3_moe", JSON_CALLS, "qwen25", "qwen3"),
        ("vllm", "qwen3", FUNCTION_CALLS, "qwen3_coder", "qwen3"),
        ("vllm", "qwen3_5", FUNCTION_CALLS, "qwen3_coder", "qwen3"),
        ("sglang", "qwen3_5_moe", FUNCTION_CALLS, "qwen3_coder", "qwen3"),
        ("vllm", "qwen3", "plain", None, None),
        ("vllm", "qwen3", "<tool_call>", "hermes", None),
        ("vllm", "qwen3", "<think>", None, "qwen3"),
        ("vllm", "llama", JSON_CALLS, None, None),
        ("vllm", "qwen3", None, None, None),
    ],
)
def test_the_family_and_its_template_decide(
    engine: str, model: str, template: str | None, tool: str | None, reasoning: str | None
) -> None:
    found = detect(engine, json.dumps({"model_type": model}), template)  # type: ignore[arg-type]
    assert (found.tool_call.name, found.reasoning.name) == (tool, reasoning)
    unknown = model == "llama" or template is None
    expected = "unknown_family" if unknown else "unsupported"
    for choice in (found.tool_call, found.reasoning):
        assert choice.source == (expected if choice.name is None else "model_family")


@given(st.text(), st.text())
def test_whatever_the_files_say_an_answer_comes_back(config: str, template: str) -> None:
    assert detect("vllm", config, template).tool_call.name is None


def test_what_is_declared_or_said_in_arguments_beats_the_family() -> None:
    found = Choice(name="hermes", source="model_family")
    assert choose("auto", found, in_extra=False, in_fixed=False) == found
    assert choose("none", found, in_extra=False, in_fixed=False) == Choice(name=None, source="off")
    assert choose("mistral", found, in_extra=False, in_fixed=False) == Choice(name="mistral", source="declared")
    assert choose("auto", found, in_extra=True, in_fixed=False) == Choice(name=None, source="extra_args")
    assert choose("auto", found, in_extra=True, in_fixed=True) == Choice(name=None, source="host_fixed")


def test_templates_are_read_where_checkpoints_keep_them(tmp_path: Path) -> None:
    assert read_texts(tmp_path) == (None, None)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default", "template": "T"}]}')
    assert read_texts(tmp_path) == (None, "T")
    (tmp_path / "chat_template.jinja").write_text("J")
    (tmp_path / "config.json").write_text("{}")
    assert read_texts(tmp_path) == ("{}", "J")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    assert read_texts(tmp_path) == ("{}", "T")
    assert template_of('{"chat_template": "one"}') == "one"
    assert template_of("[" * 100_000) is None


def test_a_pipe_in_place_of_a_template_is_waited_for_by_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "chat_template.jinja")
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "tokenizer_config.json").mkdir()
    assert read_texts(tmp_path) == (None, None)
