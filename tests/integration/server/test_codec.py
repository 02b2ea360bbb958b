"""Everything that is stored or sent comes back equal, and nothing else is accepted."""

from __future__ import annotations

import json

import pytest
import server_values as values
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Phases
from hypothesis import strategies as st

from capyctl.control import events, orders
from capyctl.control.records import RECORDS
from capyctl.fsm.types import Phase, ProcessIdentity
from capyctl.ledger.types import Allocation, Plan
from capyctl.server import kinds
from capyctl.session import codec, messages
from capyctl.session import kinds as sent

MESSAGES = [kind for table in (sent.COMMANDS, sent.RESULTS, sent.REPORTS) for kind in table]
QUICK = settings(
    max_examples=8, deadline=None, derandomize=True, phases=[Phases.generate], suppress_health_check=list(HealthCheck)
)


def all_classes(base: type) -> set[type]:
    return {base, *(each for sub in base.__subclasses__() for each in all_classes(sub))}


@pytest.mark.parametrize("kind", events.EVENTS, ids=lambda kind: kind.__name__)
def test_every_event_comes_back_from_the_journal(kind):
    @QUICK
    @given(values.of(kind))
    def round_trip(event):
        assert kinds.STORE.loads(kinds.STORE.dumps(event), kinds.EVENT_OF[kinds.EVENTS[kind]]) == event

    round_trip()


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_session_message_crosses_the_wire(kind):
    @QUICK
    @given(values.of(kind))
    def round_trip(message):
        assert sent.decode_message(json.loads(json.dumps(sent.encode_message(message)))) == message

    round_trip()


def test_every_event_and_every_message_has_a_word_of_its_own():
    assert set(kinds.EVENTS) == set(events.EVENTS)
    assert len(kinds.EVENT_OF) == len(kinds.EVENTS)
    bases = (messages.Command, messages.Result, messages.Report)
    concrete = {kind for base in bases for kind in all_classes(base)} - set(bases)
    assert concrete == set(MESSAGES)


@pytest.mark.parametrize("kind", RECORDS.values(), ids=list(RECORDS))
def test_every_kind_of_row_comes_back_from_the_store(kind):
    @QUICK
    @given(values.of(kind))
    def round_trip(value):
        assert kinds.STORE.loads(kinds.STORE.dumps(value, kind), kind) == value

    round_trip()


@pytest.mark.parametrize(
    "text",
    [
        '{"bytes": {"u": "5"}}',
        '{"bytes": {"u": true}}',
        '{"bytes": {"u": 3.0}}',
        '{"bytes": {"u": null}}',
        '{"bytes": {"u": -1}}',
        '{"bytes": {"u": 9223372036854775808}}',
        '{"bytes": []}',
        '{"claims": "ab"}',
        '{"claims": {"0": {"device": "gpu0"}}}',
        '{"claims": [{"device": "gpu0", "exclusive": "no"}]}',
        '{"claims": [{"device": "gpu0", "exclusive": 1}]}',
        '{"claims": [{}]}',
        '{"surprise": 1}',
        "[]",
        '"text"',
        "null",
        "{",
        "",
        "[" * 100_000,
    ],
)
def test_what_the_type_does_not_say_is_refused(text):
    with pytest.raises(codec.Malformed):
        sent.SESSION.loads(text, Allocation)


@pytest.mark.parametrize("data", [{}, {"kind": "no such"}, {"kind": ["launch"]}, [], None, "launch"])
def test_a_message_without_a_known_kind_is_refused(data):
    with pytest.raises(codec.Malformed):
        sent.decode_message(data)


def test_a_proof_that_does_not_hold_cannot_be_read_back():
    forged = {
        "kind": "absent",
        "command_id": "c",
        "proof": {
            "kind": "gone",
            "incarnation": {"lane": {"deployment": "D", "index": 0}, "generation": 1},
            "processes": [{"pid": 1, "boot_id": "b", "start_ticks": 1}],
            "absent": [],
            "group_empty": True,
            "observed_at_ms": 1,
        },
    }
    with pytest.raises(codec.Malformed, match="every recorded process was observed absent"):
        sent.decode_message(forged)


def test_an_absent_field_takes_its_default_so_that_old_records_stay_readable():
    assert sent.SESSION.loads('{"pid": 1, "boot_id": "b", "start_ticks": 2}', ProcessIdentity) == ProcessIdentity(
        1, "b", 2
    )
    assert sent.SESSION.dumps(ProcessIdentity(1, "b", 2)) == '{"boot_id":"b","pid":1,"start_ticks":2}'


@QUICK
@given(values.of(Plan))
def test_one_value_has_one_spelling(plan):
    again = sent.SESSION.loads(sent.SESSION.dumps(plan), Plan)
    assert sent.SESSION.dumps(again) == sent.SESSION.dumps(plan)


def test_mappings_are_written_by_their_keys_words():
    plan = Plan(
        phases={Phase.COLD: Allocation(bytes={"unified": 5})},
        provenance={Phase.COLD: "derived"},
        initialize_ms=1,
        wake_ms=2,
        context_tokens=3,
    )
    assert sent.SESSION.encode(plan)["phases"] == {"cold": {"bytes": {"unified": 5}}}


@QUICK
@given(st.dictionaries(values.of(orders.Receipt), st.integers(0, 5), max_size=3))
def test_mappings_with_other_keys_are_lists_of_pairs(data):
    typed = dict[orders.Receipt, int]
    assert sent.SESSION.loads(sent.SESSION.dumps(data, typed), typed) == data
