"""The paths that are served, as data: what each asks of a body, and how its streams are read.

What the engine behind a deployment serves is relayed with the same machinery; a new path is a row.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final

import attrs

from capyctl.errors import Refusal
from capyctl.router.body import quoted
from capyctl.router.media import foreign_address
from capyctl.router.scan import NotStrict, Spot, decoded, scan


class Dialect(enum.Enum):
    """Whose event stream it is: what ends it, what in it is output, where it names the model."""

    CHAT = "chat"  # choices[].delta or choices[].text, ended by `data: [DONE]`
    RESPONSES = "responses"  # typed events, ended by response.completed and its siblings
    MESSAGES = "messages"  # typed events of the Messages API, ended by message_stop
    NONE = "none"  # never a stream


@attrs.frozen(kw_only=True)
class Endpoint:
    """One POST path. `api` is what the deployment must offer; `figures`: `capyctl.metrics` is added to answers.

    `nameable`: engines that end a request by an id read that id from its body. `vectors`: it asks for embeddings or
    ranks, which not every engine that chats is started for.
    """

    path: str
    api: str = "chat"
    dialect: Dialect = Dialect.NONE
    messages: bool = False
    figures: bool = False
    nameable: bool = False
    vectors: bool = False
    answer_bytes_max: int = 16 * 2**20


ENDPOINTS: Final = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint(path="/v1/chat/completions", dialect=Dialect.CHAT, messages=True, figures=True, nameable=True),
        Endpoint(path="/v1/completions", dialect=Dialect.CHAT, figures=True, nameable=True),
        Endpoint(path="/v1/responses", dialect=Dialect.RESPONSES),
        Endpoint(path="/v1/messages", dialect=Dialect.MESSAGES, messages=True),
        # Vectors of a whole batch come as one body.
        Endpoint(path="/v1/embeddings", vectors=True, answer_bytes_max=128 * 2**20),
        Endpoint(path="/v1/rerank", vectors=True),
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


@attrs.frozen(kw_only=True)
class Question:
    """A checked body: its bytes, and what the world and the relay need to know of it. Nothing of it is kept decoded."""

    text: bytes = attrs.field(repr=False)
    model: str
    model_at: Spot
    stream: bool
    salt: str | None = attrs.field(default=None, repr=False)
    salt_at: Spot | None = None
    nameable: bool = False
    """Whether an engine that is told an id for it would know its work by that id."""
    logprobs: bool = False
    """Whether it asks for log probabilities, where damaged weights show as numbers that are none."""

    @property
    def cache_salt(self) -> bool:
        return self.salt is not None

    def for_engine(self, served_name: str, cache_scope: str = "", rid: str | None = None) -> bytes:
        """The body under the name that the engine knows; every byte but that value's stays as it came.

        A salt becomes a digest of it and `cache_scope`, in hexadecimal: two deployments never share a cache by
        choosing one salt, and vLLM takes no sign that is not a letter or a digit's. A `rid` is a member of its own
        right behind `model`; clients cannot bring one.
        """
        changes: list[tuple[Spot, bytes]] = []
        if served_name != self.model:
            changes.append((self.model_at, quoted(served_name)))
        if rid is not None:
            behind = Spot(self.model_at.end, self.model_at.end)
            changes.append((behind, b', "rid": ' + quoted(rid)))
        if self.salt is not None and self.salt_at is not None:
            salted = json.dumps([cache_scope, self.salt]).encode()
            changes.append((self.salt_at, quoted(hashlib.sha256(salted).hexdigest())))
        text = self.text
        for spot, value in sorted(changes, key=lambda change: -change[0].start):
            text = text[: spot.start] + value + text[spot.end :]
        return text


LOGPROBS: Final = frozenset({"top_logprobs", "logprobs", "n_probs"})
LOGPROBS_MAX: Final = 20
"""Alternatives that may be asked for per token, as the OpenAI API bounds them.

An engine keeps them all until its answer ends, in memory that nobody sized: 5 000 for 400 tokens took llama.cpp
from 0.2 to 3.8 GiB beside a charge of 0.5.
"""


_NOT_ASKED: Final = (b"false", b"null")


def read_question(endpoint: Endpoint, text: bytes, *, patient: bool = False) -> Question:
    """Check a whole request body; `patient` as `scan` has it.

    Raises: Refusal(`invalid_request`), its `param` detail naming the field.
    """
    try:
        spots = scan(text, patient=patient)
        foreign = foreign_address(text)
    except NotStrict as error:
        raise Refusal("invalid_request", str(error)) from None
    if foreign is not None:
        raise _bad(foreign, f"`{foreign}` must hold its content as a `data:` address; no engine fetches for a client")
    if not DENIED.isdisjoint(spots):
        field = min(DENIED & spots.keys())
        raise _bad(field, f"`{field}` is not taken from clients; leave it out")
    model = _short(text, spots, "model", NAME_BYTES_MAX)
    if model is LONG and text.startswith(b'"', spots["model"].start):
        raise Refusal("not_found", "no model with such a long name is deployed here; see GET /v1/models")
    if not isinstance(model, str):
        raise _bad("model", "`model` must be a string that names a deployment")
    stream = _short(text, spots, "stream", 8)
    if stream is not None and not isinstance(stream, bool):
        raise _bad("stream", "`stream` must be true or false")
    if stream and endpoint.dialect is Dialect.NONE:
        raise _bad("stream", f"{endpoint.path} does not stream")
    if endpoint.messages and not _has_items(text, spots.get("messages")):
        raise _bad("messages", "`messages` must be an array with at least one message")
    for field in LOGPROBS & spots.keys():
        wanted = _short(text, spots, field, 512)
        # A float counts too: engines take 5e3 for 5000. So does a number too long to be read.
        if wanted is LONG or (isinstance(wanted, int | float) and wanted > LOGPROBS_MAX):
            raise _bad(field, f"`{field}` must be at most {LOGPROBS_MAX}")
    return Question(
        text=text,
        model=model,
        model_at=spots["model"],
        stream=bool(stream),
        salt=_salt(text, spots),
        salt_at=spots.get("cache_salt"),
        nameable=endpoint.nameable and _asks_once(text, spots),
        logprobs=any(text[spots[name].start : spots[name].end] not in _NOT_ASKED for name in LOGPROBS & spots.keys()),
    )


NAME_BYTES_MAX: Final = 4096
LONG: Final = object()
"""What `_short` says of a value that is longer than any the field may have."""


def _short(text: bytes, spots: Mapping[str, Spot], name: str, most: int) -> object:
    """The value of a field that has at most `most` bytes; None when it is absent, LONG when it is longer."""
    spot = spots.get(name)
    if spot is None:
        return None
    return decoded(text, spot) if spot.end - spot.start <= most else LONG


def _has_items(text: bytes, spot: Spot | None) -> bool:
    return spot is not None and _ITEMS.match(text, spot.start) is not None


_ITEMS: Final = re.compile(rb"\[[ \t\n\r]*+[^\] \t\n\r]")


def _asks_once(text: bytes, spots: Mapping[str, Spot]) -> bool:
    """Whether one prompt is to have one answer. Of several SGLang makes requests with ids of its own, and the
    id that it was told then ends none of them.
    """
    count = _short(text, spots, "n", 8)
    if count is not None and (type(count) is not int or count != 1):
        return False
    prompt = spots.get("prompt")
    return prompt is None or _ONE_PROMPT.match(text, prompt.start) is not None


_ONE_PROMPT: Final = re.compile(rb'"|\[[ \t\n\r]*+-?[0-9]')  # a text, or the tokens of one


def _salt(text: bytes, spots: Mapping[str, Spot]) -> str | None:
    if "cache_salt" not in spots:
        return None
    salt = _short(text, spots, "cache_salt", 6 * CACHE_SALT_BYTES_MAX + 2)  # each byte may be written \u00xx
    if not isinstance(salt, str) or not 1 <= len(salt.encode()) <= CACHE_SALT_BYTES_MAX:
        raise _bad("cache_salt", f"`cache_salt` must be a string of 1 to {CACHE_SALT_BYTES_MAX} bytes")
    return salt


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
