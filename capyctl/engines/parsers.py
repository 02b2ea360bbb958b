"""Which parsers of tool calls and of reasoning fit a model, by its family and its chat template.

Pure: the texts of `config.json` and of the template are read by `read_texts` where the checkpoint is, when it
is measured, for people, and at each launch.
Source: engines 14.3.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import attrs

from capyctl.documents.deployment import Deployment
from capyctl.engines.options import OptionPolicy, mentions

TEXT_BYTES_MAX = 16 << 20
Engine = Literal["vllm", "sglang"]


@attrs.frozen
class _Row:
    """The reasoning parser of one family, and the parsers of its two ways to write a tool call."""

    json_calls: Mapping[Engine, str]
    function_calls: str
    reasoning: str


_QWEN = _Row({"vllm": "hermes", "sglang": "qwen25"}, "qwen3_coder", "qwen3")
FAMILIES: Final[Mapping[str, _Row]] = {
    "qwen3": _QWEN,
    "qwen3_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
}


@attrs.frozen(kw_only=True)
class Choice:
    """One parser and where the choice comes from. `name` is None when the engine is told of none by us.

    `source` is `declared`, `off`, `extra_args`, `host_fixed`, `model_family`, `unsupported` (the template has no
    such thing) or `unknown_family`.
    """

    name: str | None
    source: str


@attrs.frozen(kw_only=True)
class Parsers:
    """Both choices for one model."""

    tool_call: Choice
    reasoning: Choice

    def facts(self) -> dict[str, str]:
        """As facts of a checkpoint: a name, or `none`, and the source of each."""
        pairs = (("tool_call_parser", self.tool_call), ("reasoning_parser", self.reasoning))
        return {
            field: text
            for name, choice in pairs
            for field, text in ((name, choice.name or "none"), (f"{name}_source", choice.source))
        }


def detect(engine: Engine, config: str | None, template: str | None) -> Parsers:
    """What the model's own files say.

    Args:
      config: the text of `config.json`, or None when there is none that could be read.
      template: the text of the chat template, likewise.
    """
    row = FAMILIES.get(_model_type(config))
    if row is None or template is None:
        unknown = Choice(name=None, source="unknown_family")
        return Parsers(tool_call=unknown, reasoning=unknown)
    tool = row.function_calls if "<function=" in template else None
    if tool is None and "<tool_call>" in template:
        tool = row.json_calls[engine]
    reasoning = row.reasoning if "<think>" in template else None
    return Parsers(tool_call=_of_family(tool), reasoning=_of_family(reasoning))


def _of_family(name: str | None) -> Choice:
    return Choice(name=name, source="model_family" if name is not None else "unsupported")


def choose(field: str, found: Choice, *, in_extra: bool, in_fixed: bool) -> Choice:
    """The choice for one field of the document: `auto`, `none`, or a parser's name.

    Args:
      in_extra, in_fixed: whether the deployment's or the profile's own arguments name a parser; that beats
        `auto`, and beside anything else it is refused when the deployment is checked.
    """
    if in_fixed or in_extra:
        return Choice(name=None, source="host_fixed" if in_fixed else "extra_args")
    if field == "none":
        return Choice(name=None, source="off")
    return found if field == "auto" else Choice(name=field, source="declared")


def choices(
    engine: Engine, policy: OptionPolicy, document: Deployment, fixed_args: Sequence[str], found: Parsers
) -> Parsers:
    """Both parsers of a deployment, each with where it comes from. A decisions deployment has none.

    Args:
      policy: of the engine's options; `fixed_args` are the profile's own.
      found: what the model's files say.
    """
    if document.api == "decisions":
        off = Choice(name=None, source="off")
        return Parsers(tool_call=off, reasoning=off)
    config = document.engine_config
    own = getattr(config, engine)

    def one(option: str, field: str, detected: Choice) -> Choice:
        stated = "auto" if own is None else str(getattr(own, field))
        extra, fixed = (mentions(policy, args, option) for args in (config.extra_args, fixed_args))
        return choose(stated, detected, in_extra=extra, in_fixed=fixed)

    return Parsers(
        tool_call=one("--tool-call-parser", "tool_call_parser", found.tool_call),
        reasoning=one("--reasoning-parser", "reasoning_parser", found.reasoning),
    )


def read_texts(model_dir: Path) -> tuple[str | None, str | None]:
    """(`config.json`, chat template) of a checkpoint; None for what is not there or cannot be read. Blocking."""
    template = _text(model_dir / "chat_template.jinja")
    if template is None:
        template = template_of(_text(model_dir / "tokenizer_config.json"))
    if template is None:
        template = template_of(_text(model_dir / "chat_template.json"))
    return _text(model_dir / "config.json"), template


def template_of(text: str | None) -> str | None:
    """The template in a tokenizer's configuration: one text, or the one called `default` of several."""
    found = _object(text).get("chat_template")
    if isinstance(found, list):
        named = {row.get("name"): row.get("template") for row in found if isinstance(row, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _text(path: Path) -> str | None:
    try:
        # What was listed as a file may have become a pipe since, which nobody waits at.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return None
        with os.fdopen(descriptor, encoding="utf-8") as stream:
            text = stream.read(TEXT_BYTES_MAX + 1)
    except (OSError, UnicodeDecodeError):
        return None
    return text if len(text) <= TEXT_BYTES_MAX else None


def _model_type(config: str | None) -> str:
    found = _object(config).get("model_type")
    return found if isinstance(found, str) else ""


def _object(text: str | None) -> dict[str, object]:
    try:
        found = json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
