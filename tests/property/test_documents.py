"""Documents: what is written comes back, what is hostile is refused in one line, nothing is coerced."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capyctl.documents import kinds, reader, scalars, strict
from capyctl.documents.deployment import Deployment, parse_deployment
from capyctl.documents.standalone import GENERATED, Standalone, parse_standalone
from capyctl.errors import CapyError
from capyctl.units import (
    Auto,
    Duration,
    Off,
    Percent,
    Size,
    format_duration,
    format_size,
    gib,
    larger,
    parse_duration,
    parse_growth,
    parse_limit,
    parse_size,
    seconds,
)

quick = settings(derandomize=True, max_examples=150, deadline=None)
few = settings(derandomize=True, max_examples=60, deadline=None)
SMALL = {"name": "tiny", "engine": "llamacpp", "model": "tiny"}


def refusal_of(call: Callable[[], object]) -> CapyError | None:
    """What `call` is refused with, or None. Anything else it raises is a bug and passes through."""
    try:
        call()
    except CapyError as refusal:
        return refusal
    return None


# ---------------------------------------------------------------- quantities


@quick
@given(st.integers(0, 2**50), st.integers(0, 2**50))
def test_two_figures_that_differ_by_a_mebibyte_never_read_the_same(low: int, more: int) -> None:
    needed, there = larger(low + (1 << 20) + more, low)
    assert needed != there


@quick
@given(st.integers(0, 2**63 // 3_600_000))
def test_a_duration_comes_back_from_its_text(ms: int) -> None:
    assert parse_duration(format_duration(ms)) == Duration(ms)


@quick
@given(st.integers(0, 2**63 - 1))
def test_a_size_comes_back_from_its_text(amount: int) -> None:
    assert parse_size(format_size(amount)) == Size(amount)


@quick
@given(st.text(max_size=12))
def test_text_is_a_quantity_exactly_when_it_is_digits_and_a_unit(text: str) -> None:
    for parse, units in ((parse_duration, ("ms", "s", "m", "h")), (parse_size, ("B", "KiB", "MiB", "GiB", "TiB"))):
        plain = any(
            text.endswith(unit) and (digits := text.removesuffix(unit)).isascii() and digits.isdigit() for unit in units
        )
        try:
            parse(text)
            read = True
        except ValueError:
            read = False
        assert read <= plain
        if plain and len(text) < 10:
            assert read


@pytest.mark.parametrize("text", ["30", "1.5s", "-1s", "+1s", " 1s", "1 s", "1S", "1d", "", "s", "9" * 30 + "s", "٣s"])
def test_durations_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "hint"), [("24GB", "24GiB"), ("1MB", "1MiB"), ("24", "no unit"), ("1.5GiB", "whole")])
def test_sizes_of_another_form_are_refused_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        parse_size(text)


def test_limits_are_a_size_a_percentage_or_a_word() -> None:
    assert parse_limit("auto") is Auto.AUTO
    assert parse_limit("70%") == Percent(70)
    assert parse_limit("1GiB") == Size(1 << 30)
    assert parse_growth("off") is Off.OFF
    assert parse_growth("10000%") == Percent(10_000)
    for text in ("101%", "-1%", "7.5%", "off", "70", ""):
        with pytest.raises(ValueError, match=r"expected|unit"):
            parse_limit(text)


def test_amounts_for_people() -> None:
    assert [gib(amount) for amount in (0, 1, 1 << 29, 30601641984, 3 << 40)] == [
        "0.0 GiB",
        "1 B",
        "0.5 GiB",
        "28.5 GiB",
        "3072.0 GiB",
    ]
    assert [gib(amount) for amount in (1023, 1024, 1536, (1 << 20) - 1, 3 << 19, 1 << 25)] == [
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "1024.0 KiB",
        "1.5 MiB",
        "32 MiB",
    ]
    assert [seconds(ms) for ms in (0, 1, 130_000)] == ["0s", "1s", "130s"]


_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@quick
@given(st.integers(1, 2**63 - 1) | st.integers(1, 1 << 31))
def test_what_is_shown_of_an_amount_is_no_lie(amount: int) -> None:
    number, unit = gib(amount).split()
    assert abs(float(number) * _UNITS[unit] - amount) <= max(0.051 * _UNITS[unit], amount * 1e-9)
    assert float(number) > 0


@quick
@given(st.integers(0, 2**63 - 2), st.integers(1, 1 << 40))
def test_of_two_amounts_the_larger_one_is_shown_as_larger(there: int, more: int) -> None:
    needed, left = (
        float(text.split()[0]) * _UNITS[text.split()[1]] if " B" not in text else int(text.split()[0])
        for text in larger(there + more, there)
    )
    assert needed > left


# ---------------------------------------------------------------- reading text

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False).filter(lambda number: not number.is_integer())
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abcxyz_", min_size=1, max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)


@quick
@given(json_values)
def test_json_text_is_read_as_json_reads_it(value: Any) -> None:
    assert reader.read(json.dumps({"it": value}), "x") == {"it": value}


@quick
@given(st.text(max_size=60) | st.binary(max_size=60))
def test_any_text_is_data_or_one_line_of_refusal(text: str | bytes) -> None:
    refusal = refusal_of(lambda: reader.read(text, "x"))
    if refusal is not None:
        assert refusal.code == "invalid_config"
        assert "\n" not in refusal.message
        assert refusal.message.startswith("x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &b 1\nc: *b", "line 1: anchors"),
        ("a: 1\nb: *a", "line 2"),
        ("a: !!python/object/apply:os.system [x]", "line 1: tags"),
        ("a: !!str 1", "line 1: tags"),
        ("<<: {a: 1}", "line 1: merge keys"),
        ("a: 1\n---\nb: 2", "line 2: a file holds one document"),
        ("%YAML 1.1\n---\na: 1", ""),
        ("a: 1\nb:\n  c: 1\n  c: 2", 'line 4: "c" is stated twice'),
        ('{"a": 1, "a": 2}', '"a" is stated twice'),
        ("? {a: 1}\n: 1", "a key must be plain text"),
        ("[" * 100_000, "nested deeper than 32"),
        ("- " * 50_000 + "x", "nested deeper than 32"),
        ('{"a":' * 100_000, "nested deeper than 32"),
        ("a: " + "x" * (1 << 20), "larger than 1 MiB"),
        ("a:\t1\n\tb: 2", "is not YAML"),
        ("", "is empty"),
        ('{"a": NaN}', "NaN"),
        ('{"a": Infinity}', "Infinity"),
        ('{"a": "\\ud800"}', "surrogate"),
        ('a: "\\0"', "NUL"),
        ("a: " + "9" * 40, "too large"),
    ],
)
def test_hostile_text_is_refused_with_its_line(text: str, said: str) -> None:
    if not said:
        assert reader.read(text, "x") == {"a": 1}
        return
    with pytest.raises(CapyError) as refused:
        reader.read(text, "x")
    assert said in refused.value.message
    assert len(refused.value.message) < 200


def test_plain_scalars_follow_the_core_schema() -> None:
    text = "[on, off, yes, no, y, n, true, True, null, ~, 0x10, 0o7, 010, 1_000, 12, -3, 1.5, 2026-01-01, '12']"
    assert reader.read(f"it: {text}", "x")["it"] == [
        *("on", "off", "yes", "no", "y", "n"),
        *(True, True, None, None),
        *("0x10", "0o7", "010", "1_000", 12, -3),
        *(1.5, "2026-01-01", "12"),
    ]


# ---------------------------------------------------------------- deployments

names = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True)
sizes = st.integers(1, 1 << 44).map(format_size)
bounded = st.integers(30, 600).map(lambda amount: f"{amount}s")


@st.composite
def deployments(draw: st.DrawFn) -> dict[str, Any]:
    """A deployment document that is good by construction, in a random one of its forms."""
    engine = draw(st.sampled_from(["llamacpp", "vllm", "sglang", "my-profile"]))
    document: dict[str, Any] = {"name": draw(names), "engine": engine}
    document["model"] = draw(
        st.sampled_from(
            [
                "dir/sub",
                "/abs/dir",
                {"path": "dir", "revision": "7"},
                {"hf": f"owner/repo@{'a' * 40}"},
                {"source": {"type": "huggingface", "repo": "o/r", "revision": "b" * 40, "token_ref": "secret://hub"}},
                {"source": {"huggingface": {"repo": "o/r", "revision": "c" * 40}}, "content_fingerprint": "label"},
                {"source": {"http": {"url": "https://example.org/m.gguf", "sha256": "d" * 64}}},
                {"source": {"type": "http", "url_ref": "secret://url", "sha256": "d" * 64}},
                {"source": {"local": {"path": "x"}}, "content_fingerprint": "sha256:" + "e" * 64},
            ]
        )
    )
    if draw(st.booleans()):
        document["routes"] = draw(st.lists(st.sampled_from(["A", "b/c", "Ünïcode", "d e"]), min_size=1, unique=True))
    if draw(st.booleans()):
        document["host"] = draw(names)
        document["devices"] = draw(
            st.sampled_from(
                [[], [{"id": "gpu0"}], [{"sharing": "exclusive"}], [{"id": "gpu0", "sharing": "exclusive"}]]
            )
        )
    if draw(st.booleans()):
        alone = {"id": "gpu0", "sharing": "exclusive"} in document.get("devices", ())
        document["instances"] = 1 if alone else draw(st.integers(1, 1024))
    if draw(st.booleans()):
        document["timeouts"] = {"initialize": draw(bounded), "wake": draw(bounded)}
        document["request_deadline"] = "600s"
    config: dict[str, Any] = {}
    if draw(st.booleans()):
        config["context_length"] = draw(st.integers(1, 1 << 20))
        config["env"] = draw(st.dictionaries(st.sampled_from(["A", "B_C"]), st.text("xyz =;", max_size=5), max_size=2))
    if draw(st.booleans()):
        config["accept_extra_args"] = True
        config["extra_args"] = draw(st.lists(st.sampled_from(["--threads", "1", "--foo=bar baz"]), max_size=4))
    if engine == "llamacpp" and draw(st.booleans()):
        config["llamacpp"] = {"n_gpu_layers": draw(st.sampled_from(["all", 0, 33])), "gguf_file": "a/b.gguf"}
    if config:
        document["engine_config"] = config
    if engine != "my-profile" and draw(st.booleans()):
        document["resources"] = {"gpu": draw(sizes), "ram": draw(st.integers(1 << 26, 1 << 44).map(format_size))}
        document["residency"] = "restart_only"
    document["lifecycle"] = {"warm": draw(st.booleans())}
    return document


@few
@given(deployments())
def test_a_canonical_document_reads_back_to_itself(document: dict[str, Any]) -> None:
    made = parse_deployment(document, "x")
    text = made.canonical()
    again = parse_deployment(text, "x")
    assert again.canonical() == text
    assert again == made.completed()
    assert made.completed().completed() == made.completed()
    assert parse_deployment(json.dumps(document), "x") == made


@few
@given(deployments(), st.data())
def test_a_misspelt_field_anywhere_is_named(document: dict[str, Any], data: st.DataObject) -> None:
    blocks = [document, *(value for key, value in document.items() if isinstance(value, dict) and key != "model")]
    block = data.draw(st.sampled_from(blocks))
    block["zzz_unknown"] = 1
    with pytest.raises(CapyError) as refused:
        parse_deployment(document, "x")
    assert "zzz_unknown: is not a field here" in refused.value.message


@pytest.mark.parametrize("name", ["\x1b[31mred\nerror [internal]: no", "\u202etxt.exe", "\x9b2J", "a" * 3000])
@pytest.mark.parametrize("inside", [None, "placement", "engine_config"])
def test_a_field_that_somebody_called_something_unprintable_or_long_is_quoted(inside: str | None, name: str) -> None:
    document: dict[str, Any] = {"name": "m", "engine": "vllm", "model": "m"}
    (document if inside is None else document.setdefault(inside, {}))[name] = 1
    for given_as in (document, json.dumps(document)):
        with pytest.raises(CapyError) as refused:
            parse_deployment(given_as, "x")
        assert refused.value.message.isprintable()
        assert len(refused.value.message) < 500


HOSTILE = (None, True, 0, -1, 3.7, "", "x", "5", [], ["a"], {}, {"a": 1}, 10**18, math.pi, "0x10", "\u202e")


@settings(derandomize=True, max_examples=250, deadline=None)
@given(deployments(), st.data())
def test_a_value_of_another_type_is_refused_in_one_line_or_means_what_it_says(
    document: dict[str, Any], data: st.DataObject
) -> None:
    places: list[tuple[str, ...]] = [(key,) for key in document]
    places += [(key, inner) for key, value in document.items() if isinstance(value, dict) for inner in value]
    path = data.draw(st.sampled_from(places))
    block = document if len(path) == 1 else document[path[0]]
    block[path[-1]] = value = data.draw(st.sampled_from(HOSTILE))
    refusal = refusal_of(lambda: parse_deployment(document, "x"))
    if refusal is not None:
        assert refusal.exit_code in (2, 5)
        assert refusal.message.startswith("x: ")
        assert "\n" not in refusal.message
    elif path[0] != "model":  # its short forms are written another way
        written = strict.unstructure(parse_deployment(document, "x"))
        for name in path:
            written = written[name]
        assert value == {} or (written, type(written)) == (value, type(value)), "nothing was coerced"


@pytest.mark.parametrize("name", ["../../x", "a/b", ".", "x" * 65, "CON", "a\u202eb", "", "-a", "é", "a b", "a\n"])
def test_names_that_are_no_names_are_refused(name: str) -> None:
    with pytest.raises(CapyError) as refused:
        parse_deployment({**SMALL, "name": name}, "x")
    assert refused.value.message.startswith("x: name: ")


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ({"engine_config": {"vllm": {}}}, "invalid_config", "is for vllm"),
        ({"engine_config": {"dtype": "auto"}}, "invalid_config", "dtype"),
        ({"engine_config": {"kv_cache_dtype": "fp8"}}, "invalid_config", "q8_0"),
        ({"engine_config": {"extra_args": ["--x"]}}, "invalid_config", "accept_extra_args"),
        ({"engine_config": {"memory": {"request": "2GiB", "startup": "1GiB"}}}, "invalid_config", "startup"),
        ({"engine_config": {"llamacpp": {"gguf_file": "../x.gguf"}}}, "invalid_config", "gguf_file"),
        ({"residency": "deep"}, "capability_missing:deep_park", "cannot park"),
        ({"engine": "vllm", "api": "decisions"}, "capability_missing:decisions", "decisions"),
        ({"engine": "tensorfold"}, "invalid_config", "context_length"),
        ({"runtime_profile": "other"}, "invalid_config", "runtime_profile"),
        ({"devices": [{"id": "gpu0"}]}, "invalid_config", "devices"),
        ({"host": "a", "placement": {"hosts": ["b"]}}, "invalid_config", "host"),
        ({"timeouts": {"initialize": "700s"}, "request_deadline": "600s"}, "invalid_config", "timeouts.initialize"),
        ({"timeouts": {"initialize": "29s"}}, "invalid_config", "at least 30s"),
        ({"resources": {"gpu": "1GiB"}}, "invalid_config", "resources.ram"),
        ({"resources": {"gpu": "1GiB", "ram": "0B"}}, "invalid_config", "resources.ram"),
        ({"schema_version": 2}, "unsupported", "schema_version"),
        ({"model": "~/x"}, "invalid_config", "~ was not expanded"),
        ({"model": "../x"}, "invalid_config", "model"),
        ({"model": {"hf": "owner/repo"}}, "invalid_config", "x: model: owner/repo is not pinned to a commit"),
        ({"model": {"hf": "owner/repo@main"}}, "invalid_config", "x: model: owner/repo@main is not pinned to a commit"),
        (
            {"engine": "vllm", "model": {"path": "m", "draft": {"hf": "a/b"}}},
            "invalid_config",
            "x: model.draft: a/b is not",
        ),
        (
            {"model": {"source": {"http": {"url": "https://u:secret@e.org/x", "sha256": "a" * 64}}}},
            "invalid_config",
            "url",
        ),
        (
            {"model": {"source": {"huggingface": {"repo": "a/b", "token_ref": "secret://../x"}}}},
            "invalid_config",
            "token_ref",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_code(more: dict[str, Any], code: str, said: str) -> None:
    with pytest.raises(CapyError) as refused:
        parse_deployment({**SMALL, **more}, "x")
    assert refused.value.code == code
    assert said in refused.value.message
    assert "secret@" not in refused.value.message


def test_three_fields_are_enough_and_fill_in_what_the_document_decides() -> None:
    made = parse_deployment("name: tiny\nengine: llamacpp\nmodel: dir\n", "x").completed()
    assert (made.routes, made.runtime_profile, made.model.revision) == (("tiny",), "llamacpp", "1")
    assert isinstance(made, Deployment)


# ---------------------------------------------------------------- role documents


def test_the_generated_document_is_all_defaults() -> None:
    assert parse_standalone(GENERATED, "x") == Standalone()


@few
@given(st.sampled_from(["127.0.0.1", "[::1]", "0.0.0.0", "[::]", "10.1.2.3"]), st.integers(1, 65_535))
def test_an_address_comes_back_from_its_text(host: str, port: int) -> None:
    assert str(scalars.parse_address(f"{host}:{port}")) == f"{host}:{port}"


@pytest.mark.parametrize(
    "text",
    ["localhost:1", "127.0.0.1", "::1:80", "1.2.3.4:99999", "224.0.0.1:1", "0.0.0.0:0", "1.2.3.4:", "[1.2.3.4]:1"],
)
def test_addresses_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|multicast|port 0|too large"):
        scalars.parse_address(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("instances", True),
        ("instances", "5"),
        ("instances", 2.0),
        ("routes", "abc"),
        ("routes", {"a": 1}),
        ("name", 123),
        ("api", True),
        ("schema_version", True),
        ("schema_version", 1.0),
        ("lifecycle", {"warm": 1}),
        ("lifecycle", {"warm": "true"}),
        ("request_deadline", 600),
        ("engine_config", {"env": {"A": 1}}),
        ("engine_config", {"context_length": True}),
        ("engine_config", {"memory": {"request": 5}}),
        ("engine_config", []),
        ("placement", {"hosts": "rack-a"}),
        ("host", None),
    ],
)
def test_nothing_is_coerced(field: str, value: Any) -> None:
    refusal = refusal_of(lambda: parse_deployment({**SMALL, field: value}, "x"))
    assert refusal is not None
    assert refusal.message.startswith(f"x: {field}")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("hf:owner/name", "model: a model of a Hub is written {hf: owner/name}; text alone is a directory"),
        ("hf://owner/name@main", "model: a model of a Hub is written {hf: owner/name@main}; text alone is a directory"),
        ("https://u:p@x.example/m.gguf?secret", "model: a model behind a URL is written {http: {url: <URL>, sha256: "),
        ("s3://bucket/m", 'model: "s3" is not downloaded from; expected a directory, {hf: '),
        ({"path": "m", "draft": "hf:owner/name"}, "model.draft: a model of a Hub is written {hf: owner/name}"),
        ({"httpp": {}}, "model.httpp: is not a field here; did you mean http?"),
        ({"zzz": {}}, "model.zzz: is not a field here; the fields are source, revision, content_fingerprint, draft, "),
    ],
)
def test_what_is_meant_by_a_model_is_said_in_the_form_that_is_read(model: Any, said: str) -> None:
    with pytest.raises(CapyError) as refused:
        parse_deployment({"name": "n", "engine": "e", "model": model}, "d.yaml")
    assert refused.value.message.startswith(f"d.yaml: {said}")
    assert "secret" not in refused.value.message
    assert ("did you mean" in said or "the fields are" in said) == ("is not a field" in refused.value.message)


def test_only_what_comes_near_is_suggested() -> None:
    base = {"name": "n", "engine": "e", "model": "m"}
    for word, near in (
        ("sleepy", ""),
        ("depp", " (did you mean deep?)"),
        ("restart-only", " (did you mean restart_only?)"),
    ):
        with pytest.raises(CapyError) as refused:
            parse_deployment({**base, "residency": word}, "d.yaml")
        assert refused.value.message.endswith(f"expected deep or host_backed or restart_only{near}")
    with pytest.raises(CapyError, match=r"or custom_engine \(did you mean standalone\?\)"):
        kinds.check({"kind": "standalon"}, "d.yaml")


def test_a_port_that_is_too_large_is_said_to_be() -> None:
    with pytest.raises(ValueError, match="the port 99999 is too large; the largest is 65535"):
        scalars.parse_address("127.0.0.1:99999")
