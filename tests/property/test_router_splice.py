"""Replacing `model` in a request changes those bytes and no others, whatever the JSON around them."""

import json
import re
import string
import tracemalloc
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capyctl.errors import Refusal
from capyctl.router import media as media_module
from capyctl.router import scan as scan_module
from capyctl.router.body import holds_no_number, parse_object, quoted, strict_object
from capyctl.router.endpoints import DENIED, ENDPOINTS, LOGPROBS, Dialect, read_question
from capyctl.router.events import EventReader
from capyctl.router.scan import NAMES_MAX, NotStrict, decoded, scan

SETTINGS = settings(derandomize=True, max_examples=200, deadline=None)

texts = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    ['"model"', '{"model":"x"}', "\\", "\u2028", "é", "😀", "\x00", "model", '","model":"y']
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts | st.just("model"), inner, max_size=4),
    max_leaves=10,
)
spaces = st.text(" \t\r\n", max_size=3)


@st.composite
def written_strings(draw: st.DrawFn, text: str) -> str:
    """One string in any of the ways in which JSON can write it."""
    written = []
    for char in text:
        plain = char not in '"\\' and char >= " "
        forms = [json.dumps(char)[1:-1], "".join(f"\\u{unit:04X}" for unit in _utf16(char))]
        if plain:
            forms.append(char)
        if char == "/":
            forms.append("\\/")
        written.append(draw(st.sampled_from(forms)))
    return '"' + "".join(written) + '"'


def _utf16(char: str) -> list[int]:
    raw = char.encode("utf-16-be")
    return [int.from_bytes(raw[at : at + 2]) for at in range(0, len(raw), 2)]


@st.composite
def objects(draw: st.DrawFn) -> tuple[str, str, str, dict]:
    """Text before the model's value, the value as written, text after it, and what it all means."""
    members = draw(st.dictionaries(texts.filter(lambda name: name != "model"), values, max_size=5))
    names = list(members)
    names.insert(draw(st.integers(0, len(names))), "model")
    model = draw(texts)
    before, after, spelled = "", "", ""
    parts = draw(spaces) + "{" + draw(spaces)
    for index, name in enumerate(names):
        parts += ("," if index else "") + draw(spaces)
        written_name = draw(written_strings(name))
        parts += written_name + draw(spaces) + ":" + draw(spaces)
        if name == "model":
            before, spelled, parts = parts, draw(written_strings(model)), ""
        else:
            parts += json.dumps(
                members[name], ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1]))
            )
        parts += draw(spaces)
    after = parts + "}" + draw(spaces)
    meaning = {name: (model if name == "model" else members[name]) for name in names}
    return before, spelled, after, meaning


@SETTINGS
@given(objects(), texts)
def test_only_the_value_of_model_changes(drawn: tuple[str, str, str, dict], served: str) -> None:
    before, spelled, after, meaning = drawn
    text = (before + spelled + after).encode()
    parsed = parse_object(text)
    assert parsed.values == meaning
    assert {name: decoded(text, spot) for name, spot in scan(text).items()} == meaning
    for spot in (parsed.spot("model"), scan(text)["model"]):
        assert text[spot.start : spot.end] == spelled.encode()
    replaced = parsed.replaced("model", served)
    assert replaced == before.encode() + quoted(served) + after.encode()
    assert json.loads(replaced) == {**meaning, "model": served}


@SETTINGS
@given(objects(), st.sampled_from(["served", 'a "quoted" 漢']))
def test_a_question_goes_up_with_its_model_replaced_and_nothing_else(
    drawn: tuple[str, str, str, dict], served: str
) -> None:
    before, spelled, after, meaning = drawn
    if not DENIED.isdisjoint(meaning) or not LOGPROBS.isdisjoint(meaning) or {"stream", "cache_salt"} & meaning.keys():
        return
    question = read_question(ENDPOINTS["/v1/embeddings"], (before + spelled + after).encode())
    assert question.model == meaning["model"]
    assert question.for_engine(served) == before.encode() + quoted(served) + after.encode()
    assert question.for_engine(question.model) == question.text


@SETTINGS
@given(objects(), st.sampled_from(["served", 'a "quoted" 漢']), st.booleans())
def test_an_id_stands_right_behind_the_model_and_every_other_byte_stays(
    drawn: tuple[str, str, str, dict], served: str, renamed: bool
) -> None:
    before, spelled, after, meaning = drawn
    if not DENIED.isdisjoint(meaning) or not LOGPROBS.isdisjoint(meaning) or {"stream", "cache_salt"} & meaning.keys():
        return
    question = read_question(ENDPOINTS["/v1/embeddings"], (before + spelled + after).encode())
    name = served if renamed else question.model
    shown = quoted(name) if name != question.model else spelled.encode()
    named = question.for_engine(name, "", RID)
    assert named == before.encode() + shown + b', "rid": "%s"' % RID.encode() + after.encode()
    assert json.loads(named) == {**meaning, "model": name, "rid": RID}


RID = "01JTEST0000000000000000000"
CHAT, COMPLETION = ENDPOINTS["/v1/chat/completions"], ENDPOINTS["/v1/completions"]


@pytest.mark.parametrize(
    "text",
    [
        b'{"model":"m","messages":[1]}',
        b'{"messages":[1],"model":"m"}',
        b'{\n  "messages" : [ 1 ] ,\r\n  "model" :\t"m"\n}\n',
        b'{"messages":[{"model":"x","rid":"deep"}],"model":"\\u006d","n":1}',
        '{"after":"漢","model":"m","messages":[1],"é":"\\u00e9"}'.encode(),
        b'{"cache_salt":"s","model":"m","messages":[1]}',
        b'{"model":"m","cache_salt":"s","messages":[1],"n":null}',
        b'{"model":"m","messages":[1],"x":1e400,"y":[1,2,{"z":-0.0}],"n": 1 }',
    ],
)
def test_every_shape_of_a_body_keeps_what_it_says_beside_model_salt_and_id(text: bytes) -> None:
    question = read_question(CHAT, text)
    assert question.nameable
    named, plain = question.for_engine("served", "D@1", RID), question.for_engine("served", "D@1")
    assert named.replace(b', "rid": "%s"' % RID.encode(), b"", 1) == plain
    said = json.loads(named)
    assert (said.pop("rid"), said.pop("model")) == (RID, "served")
    for name, value in json.loads(text).items():
        if name not in ("model", "cache_salt"):
            assert said[name] == value
    assert b'"rid"' not in plain.replace(b'"rid":"deep"', b"")


@pytest.mark.parametrize(
    ("endpoint", "more", "once"),
    [
        (CHAT, {}, True),
        (CHAT, {"n": 1}, True),
        (CHAT, {"n": 2}, False),
        (CHAT, {"n": True}, False),
        (CHAT, {"n": 1.0}, False),
        (CHAT, {"n": "1"}, False),
        (CHAT, {"n": 10**9}, False),
        (COMPLETION, {"prompt": "a"}, True),
        (COMPLETION, {"prompt": [1, 2]}, True),
        (COMPLETION, {"prompt": [" a"]}, False),
        (COMPLETION, {"prompt": [[1, 2]]}, False),
        (COMPLETION, {"prompt": []}, False),
        (COMPLETION, {"prompt": "a", "n": 2}, False),
        (ENDPOINTS["/v1/responses"], {}, False),
        (ENDPOINTS["/v1/messages"], {}, False),
        (ENDPOINTS["/v1/embeddings"], {"input": "a"}, False),
        (ENDPOINTS["/v1/rerank"], {}, False),
        (ENDPOINTS["/v1/systemone"], {}, False),
    ],
)
def test_only_one_answer_to_one_prompt_can_be_ended_by_one_id(endpoint, more: dict, once: bool) -> None:
    body = json.dumps({"model": "m", "messages": [1], **more}, indent=1).encode()
    assert read_question(endpoint, body).nameable == once


@pytest.mark.parametrize(
    "text", [b'{"model":"m","messages":[1],"rid":""}', b'{"r\\u0069d":"x","model":"m","messages":[1]}']
)
def test_a_client_brings_no_id_of_its_own_however_it_is_spelled(text: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        read_question(CHAT, text)
    assert (refused.value.code, refused.value.details) == ("invalid_request", {"param": "rid"})


@SETTINGS
@given(objects(), values)
def test_a_member_added_at_the_end_changes_nothing_before_it(drawn: tuple[str, str, str, dict], value: object) -> None:
    before, spelled, after, meaning = drawn
    parsed = parse_object((before + spelled + after).encode())
    added = parsed.with_last("capyctl  figures", value)
    assert added.startswith((before + spelled + after).rstrip()[:-1].encode())
    assert json.loads(added) == {**meaning, "capyctl  figures": value}


@SETTINGS
@given(st.binary(max_size=60) | st.text('{}[]",:\\0123e.-truefalsn \n', max_size=40).map(str.encode))
@example(b'{"a":1}x')
@example(b'{"a":1,}')
@example(b"{,}")
@example(b'{"a" 1}')
@example(b'{"a":01}')
@example(b'{"a":"\x01"}')
@example(b"")
@example(b'{"a":[1,]}')
@example(b'{"a":[,1]}')
@example(b'{"a":[[1,2],{},{"b":"c"},[ ] ,"d"]}')
@example(b'{"a":1 , "b" : 2}')
@example(b'{"a":1,"b":2,}')
@example(b'{"a":-}')
@example(b'{"a":1.}')
@example(b'{"a":[-0,1.5e+3,1E-2,0.0]}')
@example(b'{"a":[00]}')
@example(b'{"":0,"":1}')
@example(b'{"a":0,"\\u0061":1}')
@example(b'{"a":{"b":[{"c":1},2]},"d":"e"}')
@example(b'{"a":[1}')
@example(b'{"a":{"b":1]}')
@example(b'{"a":"\\x"}')
@example(b'{"a":"\\u12"}')
@example(b'{"a":"')
@example(b'{"a":tru}')
@example(b'{"a":truefalse}')
def test_what_is_accepted_is_what_a_strict_reader_accepts(text: bytes) -> None:
    _agrees(text)


def _agrees(text: bytes) -> None:
    try:
        expected = json.loads(text.decode("utf-8"), parse_constant=_refuse, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        expected = None
    if not isinstance(expected, dict):
        with pytest.raises(NotStrict):
            strict_object(text)
    else:
        assert strict_object(text) == expected


def _refuse(word: str) -> None:
    raise ValueError(word)


def _unique(pairs: list) -> dict:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("twice")
    return dict(pairs)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'\xef\xbb\xbf{"model":"a"}', "byte-order mark"),
        (b'{"model":"\xff"}', "UTF-8"),
        (b'{"model":"\xed\xa0\x80"}', "UTF-8"),
        (b'{"model":"\\ud800"}', "surrogate"),
        (b'{"x":{"y":"\\udc00 \\ud83d\\ude00"}}', "surrogate"),
        (b'{"model":"a","model":"b"}', "`model` twice"),
        (b'{"x":{"a":1,"a":1}}', "two members"),
        (b'{"x":NaN}', "NaN"),
        (b'{"x":-Infinity}', "Infinity"),
        (b'{"x":' + b"1" * 5000 + b"}", "digits"),
        (b'{"x":' + b"[" * 64 + b"]" * 64 + b"}", "deeper than 64"),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deeper than 64"),
        (b"[1]", "not a JSON object"),
        (b"", "not a JSON object"),
    ],
)
def test_what_is_not_strict_is_refused_with_its_reason(text: bytes, says: str) -> None:
    with pytest.raises(NotStrict, match=says):
        scan(text)


def test_escaped_pairs_and_the_deepest_nesting_pass() -> None:
    assert strict_object(b'{"x":"\\ud83d\\ude00"}') == {"x": "😀"}
    assert strict_object(b'{"x":"\\\\ud800"}') == {"x": "\\ud800"}
    scan(b'{"x":' + b"[" * 63 + b"]" * 63 + b"}")


@pytest.mark.parametrize("inner", [b"0", b"[]", b"{}", b'{"y":0}', b"[0,0]", b"0,[1],2", b'"s",{"t":null},0'])
def test_depth_counts_the_same_in_short_and_long_ways(inner: bytes) -> None:
    """Flat things are stepped over whole, which must not let one level more pass."""
    holds = b"[" in inner or b"{" in inner
    most = 62 if holds else 63
    scan(b'{"x":' + b"[" * most + inner + b"]" * most + b"}")
    with pytest.raises(NotStrict, match="deeper than 64"):
        scan(b'{"x":' + b"[" * (most + 1) + inner + b"]" * (most + 1) + b"}")


@SETTINGS
@given(
    st.lists(values, max_size=5), st.integers(0, 600), st.integers(0), st.sampled_from(["", ",", "]", "[", ":", '"'])
)
def test_long_arrays_are_read_as_short_ones_are(items: list, repeated: int, at: int, odd: str) -> None:
    value = {"a": items, "b": items * (repeated // 10), "c": [1, "x", None] * repeated}
    text = json.dumps(value, ensure_ascii=False)
    assert strict_object(text.encode()) == value
    at %= len(text)
    _agrees((text[:at] + odd + text[at + 1 :]).encode())


def test_a_bomb_of_names_or_of_small_things_is_refused() -> None:
    names = b",".join(b'"%d":1' % number for number in range(NAMES_MAX + 1))
    with pytest.raises(NotStrict, match="names"):
        scan(b'{"x":{' + names + b"}}")
    assert len(scan(b"{" + names[: names.rindex(b",")] + b"}")) == NAMES_MAX


def test_what_is_kept_while_a_body_is_looked_over_does_not_grow_with_it() -> None:
    text = b'{"model":"m","x":[' + b'[{"a":1,"b":[2]}],' * 20_000 + b"0]}"
    tracemalloc.start()
    try:
        scan(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**10


# --- event streams -----------------------------------------------------------------------------------

line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
words = st.text(string.ascii_letters + 'é漢😀\u2028"\\', max_size=8)


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[str]]:
    """A chat stream in one kind of line end, some comments in it, and the texts that it says."""
    end = draw(line_ends)
    said = draw(st.lists(words, min_size=1, max_size=5))
    raw = b""
    for text in said:
        if draw(st.booleans()):
            raw += b": ping" + end + end
        if draw(st.booleans()):
            raw += b"event: chunk" + end
        chunk = {"model": "m", "choices": [{"index": 0, "delta": {"content": text}}]}
        written = json.dumps(
            chunk, ensure_ascii=draw(st.booleans()), separators=draw(st.sampled_from([None, (",", ":")]))
        )
        if draw(st.booleans()):
            head, tail = written.split("[", 1)
            raw += b"data: " + head.encode() + end + b"data:" + f"[{tail}".encode() + end + end
        else:
            raw += draw(st.sampled_from([b"data: ", b"data:"])) + written.encode() + end + end
    return raw + b"data: [DONE]" + draw(st.sampled_from([end + end, end, b""])), said


def _texts(passed: bytes) -> list[str]:
    """Read a stream as a client does."""
    found = []
    for event in passed.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n"):
        lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
        if lines and lines != [b"[DONE]"]:
            found.append(json.loads(b"\n".join(lines))["choices"][0]["delta"]["content"])
    return found


@SETTINGS
@given(streams(), st.data(), st.sampled_from(["m", "another", 'a "quoted" 漢']))
def test_a_stream_says_the_same_however_it_is_cut(
    drawn: tuple[bytes, list[str]], data: st.DataObject, route: str
) -> None:
    raw, said = drawn
    reader = EventReader(Dialect.CHAT, route)
    passed = b""
    at = 0
    while at < len(raw) and reader.end is None:
        size = data.draw(st.integers(1, 40))
        passed += reader.feed(raw[at : at + size])
        at += size
    if reader.end is None:
        passed += reader.finish()
    assert reader.end is not None
    assert type(reader.end).__name__ == "Done"
    assert _texts(passed) == said
    assert b": ping" not in passed
    if route == "m" and b": ping" not in raw:
        assert (passed + reader.end.terminator).rstrip(b"\r\n") == raw.rstrip(b"\r\n")
    assert passed.count(quoted(route)) == len(said) if route != "m" else True


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        (b'{"a": NaN}', True),
        (b'{"a": "NaN", "b": [-Infinity]}', True),
        (b'{"NaN": 1, "b": "say \\"NaN\\" or Infinity"}', False),
        (b'{"b": "\\\\", "a": NaN}', True),
        (b'{"a": 1}', False),
        (b'{"a": "' + b'\\"NaN' * 50_000 + b'"}', False),
    ],
)
def test_a_constant_that_is_no_json_is_told_from_a_word(text: bytes, odd: bool) -> None:
    assert holds_no_number(text) is odd


def test_one_byte_at_a_time_is_read_in_linear_time() -> None:
    event = b'data: {"model":"m","choices":[{"delta":{"content":"' + b"x" * 200_000 + b'"}}]}\n\n'
    reader = EventReader(Dialect.CHAT, "m")
    passed = b"".join(reader.feed(event[at : at + 1]) for at in range(len(event)))
    assert passed == event
    assert reader.output_begun


@pytest.mark.parametrize(
    "rest", [b'data: {"half', b'data: {"a":{"b":1}', b'data: {"a":1}}', b"data:", b": x", b"event: done"]
)
def test_half_an_event_at_the_end_is_not_passed_on(rest: bytes) -> None:
    reader = EventReader(Dialect.CHAT, "m")
    reader.feed(b'data: {"model":"m","choices":[{"delta":{"content":"x"}}]}\n\n' + rest)
    assert b"{" not in reader.finish()
    assert type(reader.end).__name__ != "Done"


def test_a_line_without_an_end_is_cut_at_the_bound_and_not_held() -> None:
    reader = EventReader(Dialect.CHAT, "m", piece_bytes_max=10_000)
    fed = 0
    while reader.end is None:
        assert reader.feed(b"data: " + b"x" * 1000) == b""
        fed += 1006
        assert fed < 12_000
    assert type(reader.end).__name__ == "Broken"


def _forgetful(parsed: Any, inside: bool = False) -> bool:
    """Whether a possessive quantifier of a parsed pattern repeats something that could be tried again."""
    for op, value in parsed:
        name = str(op)
        if name in ("BRANCH", "MAX_REPEAT", "MIN_REPEAT") and inside:
            return True
        kept = False if name == "ATOMIC_GROUP" else inside or name == "POSSESSIVE_REPEAT"
        parts = value if isinstance(value, (list, tuple)) else [value]
        parts = [one for part in parts for one in (part if isinstance(part, list) else [part])]
        if any(_forgetful(part, kept) for part in parts if type(part).__name__ == "SubPattern"):
            return True
    return False


@pytest.mark.parametrize("module", [scan_module, media_module], ids=lambda module: module.__name__)
def test_no_possessive_quantifier_repeats_a_choice(module: ModuleType) -> None:
    """Before Python 3.11.5 such a quantifier loses its place, and good bodies were refused."""
    assert _forgetful(re._parser.parse(rb"(?:a|bc){0,9}+"))  # type: ignore[attr-defined]
    assert not _forgetful(re._parser.parse(rb"(?>a|bc){0,9}+"))  # type: ignore[attr-defined]
    found = [value for value in vars(module).values() if isinstance(value, re.Pattern)]
    found += [
        value.__self__ for value in vars(module).values() if isinstance(getattr(value, "__self__", 0), re.Pattern)
    ]
    assert len(found) > 5
    for pattern in found:
        assert not _forgetful(re._parser.parse(pattern.pattern, pattern.flags)), pattern.pattern  # type: ignore[attr-defined]
