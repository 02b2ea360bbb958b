"""What a request may name: content that lies in it, never an address that an engine would fetch or open."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capyctl.errors import Refusal
from capyctl.router.endpoints import ENDPOINTS, read_question
from capyctl.router.media import STEPS_MAX, foreign_address
from capyctl.router.scan import NotStrict

CHAT = ENDPOINTS["/v1/chat/completions"]
DATA = "data:image/png;base64,iVBORw0KGgo="


def part(**member: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, member]}]}


@pytest.mark.parametrize(
    "body",
    [
        part(type="image_url", image_url={"url": DATA, "detail": "low"}),
        part(type="image_url", image_url=DATA),
        part(type="input_audio", input_audio={"data": "//uQxAAA", "format": "mp3"}),
        part(type="image", source={"type": "base64", "media_type": "image/png", "data": "iVBOR"}),
        {"images": [DATA, DATA]},
        {"images": []},
        {"images": None, "image_url": {}},
        {"metadata": {"source": "app"}},
        {"tools": [{"function": {"parameters": {"properties": {"image_url": {"type": "string", "format": "uri"}}}}}]},
        part(type="text", text='in "image_url": "http://127.0.0.1/" it says'),
    ],
)
def test_content_in_the_request_passes(body: dict[str, Any]) -> None:
    for text in (json.dumps(body), json.dumps(body, indent=1), json.dumps(body, separators=(",", ":"))):
        assert foreign_address(text.encode()) is None


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:9/x", "https://a/b", "file:///etc/passwd", "/etc/passwd", " data:,x"]
)
@pytest.mark.parametrize(
    "shape",
    [
        lambda a: part(image_url=a),
        lambda a: part(type="image_url", image_url={"url": a}),
        lambda a: part(type="image_url", image_url={"detail": {"of": [1, {"x": 2}]}, "url": a}),
        lambda a: part(type="video_url", video_url={"url": a}),
        lambda a: part(type="audio_url", audio_url={"url": a}),
        lambda a: part(type="image", source={"type": "url", "url": a}),
        lambda a: part(type="input_image", image_url=a),
        lambda a: part(type="input_file", file_url=a),
        lambda a: {"images": [DATA, a]},
        lambda a: {"images": {"images": [[a]]}},
    ],
)
def test_an_address_is_refused_wherever_it_stands(shape: Any, address: str) -> None:
    body = shape(address)
    for text in (json.dumps(body), json.dumps(body, indent=2)):
        assert foreign_address(text.encode()) is not None


@pytest.mark.parametrize(
    "text",
    [
        rb'{"im\u0061ge_url": "http://x"}',
        rb'{"image_url": "\u0064ata:,x"}',  # not what engines call a data address until they decode it
        rb'{"image_url": {"\u0075rl": "http://x"}}',
        rb'{"input_audio": {"data": "http://x"}}',
        rb'{"input_audio": {"data": "file:x"}}',
    ],
)
def test_escapes_and_schemes_hide_nothing(text: bytes) -> None:
    assert foreign_address(text) is not None


NAMES = st.sampled_from(["image_url", "images", "source", "url", "data", "detail", "x"])
TREES = st.recursive(
    st.sampled_from([DATA, "http://h/", "/etc/x", "plain", 'quo"te', 1, None, True]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)


def foreign(value: Any, name: str = "", inside: bool = False) -> bool:
    """The same rule over the decoded value."""
    match value:
        case dict():
            return any(foreign(v, k, inside or k in ("image_url", "images", "source")) for k, v in value.items())
        case list():
            return any(foreign(v, name, inside) for v in value)
        case str() if inside and name == "data":
            return value.startswith("http:")
        case str() if inside and name in ("image_url", "images", "url"):
            return not value.startswith("data:")
        case _:
            return False


@given(st.dictionaries(NAMES, TREES, max_size=4))
@settings(derandomize=True, max_examples=400)
def test_the_look_over_bytes_says_what_a_look_at_the_value_says(body: dict[str, Any]) -> None:
    assert (foreign_address(json.dumps(body).encode()) is not None) == foreign(body)


def test_a_flood_of_values_is_refused_in_bounded_time() -> None:
    begun = time.process_time()
    for text in (b'{"images":[' + b'"data:",' * STEPS_MAX + b"1]}", b'{"x":[' + b'{"i\\u006dages":1},' * 5000 + b"1]}"):
        with pytest.raises(NotStrict):
            foreign_address(text)
    assert time.process_time() - begun < 5


def test_the_door_names_the_member_and_not_the_address() -> None:
    body = {"model": "m", **part(type="image_url", image_url={"url": "http://10.0.0.1/secret"})}
    with pytest.raises(Refusal) as caught:
        read_question(CHAT, json.dumps(body).encode())
    assert (caught.value.code, caught.value.http_status) == ("invalid_request", 400)
    assert caught.value.details["param"] == "image_url"
    assert "10.0.0.1" not in caught.value.message


def test_a_salt_reaches_the_engine_as_a_digest_of_its_deployment_revision_and_itself() -> None:
    text = b'{"cache_salt": "s\\u00e4lt/@", "model": "m", "messages": [1], "after": "\xc3\xa4"}'
    question = read_question(CHAT, text)
    assert question.cache_salt
    sent = [question.for_engine(served, scope) for served in ("m", "other") for scope in ("A@1", "A@2", "B@1")]
    salts = [json.loads(body)["cache_salt"] for body in sent]
    assert salts[:3] == salts[3:]
    assert len(set(salts)) == 3
    assert all(len(salt) == 64 and set(salt) <= set("0123456789abcdef") for salt in salts)
    assert [json.loads(body)["model"] for body in sent] == ["m"] * 3 + ["other"] * 3
    assert all(body.endswith(b'"messages": [1], "after": "\xc3\xa4"}') for body in sent)
    assert "lt/@" not in repr(question)
