"""The paths that are served, as data: what each asks of a body, and how its streams are read.

What the engine behind a deployment serves is relayed with the same machinery; a new path is a row.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import attrs

from capyctl.errors import Refusal
from capyctl.router.body import JsonObject, NotStrict, parse_object


class Dialect(enum.Enum):
    """Whose event stream it is: what ends it, what in it is output, where it names the model."""

    CHAT = "chat"  # choices[].delta or choices[].text, ended by `data: [DONE]`
    RESPONSES = "responses"  # typed events, ended by response.completed and its siblings
    MESSAGES = "messages"  # typed events of the Messages API, ended by message_stop
    NONE = "none"  # never a stream


@attrs.frozen(kw_only=True)
class Endpoint:
    """One POST path. `api` is what the deployment must offer; `figures`: `capyctl.metrics` is added to answers."""

    path: str
    api: str = "chat"
    dialect: Dialect = Dialect.NONE
    messages: bool = False
    figures: bool = False
    answer_bytes_max: int = 16 * 2**20


ENDPOINTS: Final = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint(path="/v1/chat/completions", dialect=Dialect.CHAT, messages=True, figures=True),
        Endpoint(path="/v1/completions", dialect=Dialect.CHAT, figures=True),
        Endpoint(path="/v1/responses", dialect=Dialect.RESPONSES),
        Endpoint(path="/v1/messages", dialect=Dialect.MESSAGES, messages=True),
        # Vectors of a whole batch come as one body.
        Endpoint(path="/v1/embeddings", answer_bytes_max=128 * 2**20),
        Endpoint(path="/v1/rerank"),
        Endpoint(path="/v1/systemone", api="decisions", figures=True),
    )
}

DENIED: Final = frozenset(
    {
        # Asks for the model's insides.
        "return_hidden_states",
        # The engine's own request id is set here, or nowhere.
        "rid",
        "request_id",
        # These steer the engine process, not the answer.
        "priority",
        "lora_path",
        "data_parallel_rank",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "session_params",
        "kv_transfer_params",
        "vllm_xargs",
        "custom_logit_processor",
        "extra_body",
        "prompt_embeds",
    }
)
"""Top-level fields that are refused wherever they appear. Everything else passes untouched."""

CACHE_SALT_BYTES_MAX: Final = 1024


@attrs.frozen
class Question:
    """A checked body: what the world and the relay need to know of it."""

    body: JsonObject
    model: str
    stream: bool
    cache_salt: bool


LOGPROBS: Final = frozenset({"top_logprobs", "logprobs", "n_probs"})
LOGPROBS_MAX: Final = 20
"""Alternatives that may be asked for per token, as the OpenAI API bounds them.

An engine keeps them all until its answer ends, in memory that nobody sized: 5 000 for 400 tokens took llama.cpp
from 0.2 to 3.8 GiB beside a charge of 0.5.
"""


def read_question(endpoint: Endpoint, text: bytes) -> Question:
    """Check a whole request body. Raises Refusal(`invalid_request`), its `param` detail naming the field."""
    try:
        body = parse_object(text)
    except NotStrict as error:
        raise Refusal("invalid_request", str(error)) from None
    values = body.values
    if not DENIED.isdisjoint(values):
        field = min(DENIED & values.keys())
        raise _bad(field, f"`{field}` is not taken from clients; leave it out")
    model = values.get("model")
    if not isinstance(model, str):
        raise _bad("model", "`model` must be a string that names a deployment")
    stream = values.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise _bad("stream", "`stream` must be true or false")
    if stream and endpoint.dialect is Dialect.NONE:
        raise _bad("stream", f"{endpoint.path} does not stream")
    if endpoint.messages:
        messages = values.get("messages")
        if not isinstance(messages, list) or not messages:
            raise _bad("messages", "`messages` must be an array with at least one message")
    for field in LOGPROBS & values.keys():
        wanted = values[field]
        if isinstance(wanted, int) and wanted > LOGPROBS_MAX:
            raise _bad(field, f"`{field}` must be at most {LOGPROBS_MAX}")
    return Question(body=body, model=model, stream=bool(stream), cache_salt=_salted(values))


def _salted(values: dict[str, Any]) -> bool:
    if "cache_salt" not in values:
        return False
    salt = values["cache_salt"]
    if not isinstance(salt, str) or not 1 <= len(salt.encode()) <= CACHE_SALT_BYTES_MAX:
        raise _bad("cache_salt", f"`cache_salt` must be a string of 1 to {CACHE_SALT_BYTES_MAX} bytes")
    return True


def _bad(field: str, message: str) -> Refusal:
    return Refusal("invalid_request", message, details={"param": field})


# --- what is read of a stream's events --------------------------------------------------------------

_OPENING: Final = frozenset(
    {
        "ping",
        "message_start",
        "content_block_start",
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    }
)
"""Typed events that only open something: like a chunk that only names the role, they are not output."""

_CLOSING: Final = frozenset(
    {"message_stop", "response.completed", "response.incomplete", "response.failed"},
)


def is_output(dialect: Dialect, chunk: dict[str, Any]) -> bool:
    """Whether a chunk carries something generated, or the reason why nothing more comes."""
    if dialect is not Dialect.CHAT:
        return chunk.get("type") not in _OPENING
    choices = chunk.get("choices")
    if not isinstance(choices, list):
        return False
    for choice in choices:
        if not isinstance(choice, dict):
            continue
        if choice.get("text") or choice.get("finish_reason"):
            return True
        delta = choice.get("delta")
        if isinstance(delta, dict) and any(value for name, value in delta.items() if name != "role"):
            return True
    return False


def ends_stream(dialect: Dialect, event_type: str) -> bool:
    """Whether a typed event is its stream's terminator. (`[DONE]` is recognised by its bytes.)"""
    return dialect is not Dialect.CHAT and event_type in _CLOSING


MODEL_PATHS: Final[dict[Dialect, tuple[str, ...]]] = {
    Dialect.CHAT: (),
    Dialect.RESPONSES: ("response",),
    Dialect.MESSAGES: ("message",),
    Dialect.NONE: (),
}
"""Members inside which an event may name the model too, beside its top level."""
